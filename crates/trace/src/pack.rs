//! The pack: recorded real programs by name.
//!
//! Looked for, first found wins: the directory named by `CACHEMATE_PACK`, `pack` and `../share/cachemate/pack` beside
//! the executable, `pack` in its parents (a source tree's build directory), the installed share directories. The
//! first of these holding any recording is the pack.

use std::path::{Path, PathBuf};

use crate::{TraceError, unknown_name};

/// The directories where a pack may lie, in the order they are looked at.
pub fn pack_places() -> Vec<PathBuf> {
    if let Some(named) = std::env::var_os("CACHEMATE_PACK") {
        return vec![PathBuf::from(named)];
    }
    let mut places = Vec::new();
    if let Some(beside) = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_path_buf)) {
        places.push(beside.join("pack"));
        places.push(beside.join("../share/cachemate/pack"));
        // target/release/deps/x: the source tree is at most four levels up.
        places.extend(beside.ancestors().skip(1).take(4).map(|parent| parent.join("pack")));
    }
    places.push(PathBuf::from("/usr/local/share/cachemate/pack"));
    places.push(PathBuf::from("/usr/share/cachemate/pack"));
    places
}

/// The pack in the first of `places` that has one: names and files, by name.
pub fn pack_in(places: &[PathBuf]) -> Vec<(String, PathBuf)> {
    places.iter().map(|place| recordings(place)).find(|found| !found.is_empty()).unwrap_or_default()
}

/// The programs of the pack: names and files, by name; none where there is no pack.
pub fn pack_programs() -> Vec<(String, PathBuf)> {
    pack_in(&pack_places())
}

/// The recording of a program of the pack.
///
/// # Errors
/// [`TraceError::Unknown`] with what there is and the nearest name; [`TraceError::NoPack`].
pub fn pack_program(name: &str) -> Result<PathBuf, TraceError> {
    find(pack_programs(), name)
}

fn find(programs: Vec<(String, PathBuf)>, name: &str) -> Result<PathBuf, TraceError> {
    if programs.is_empty() {
        return Err(TraceError::NoPack { name: name.to_string() });
    }
    match programs.iter().find(|(known, _)| known == name) {
        Some((_, path)) => Ok(path.clone()),
        None => Err(unknown_name("program of the pack", name, programs.into_iter().map(|(known, _)| known))),
    }
}

fn recordings(place: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = std::fs::read_dir(place) else { return Vec::new() };
    let mut programs: Vec<(String, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?.strip_suffix(".cmt")?.to_string();
            Some((name, path))
        })
        .collect();
    programs.sort();
    programs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a name find its recording, the first place with one win, and a wrong name list what there is?
    #[test]
    fn names_find_their_recording_and_unknown_ones_list_what_there_is() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("nothing");
        for name in ["gzip.cmt", "sqlite3.cmt", "README.md"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        let programs = pack_in(&[empty.clone(), dir.path().to_path_buf()]);
        assert_eq!(find(programs.clone(), "gzip").unwrap(), dir.path().join("gzip.cmt"));
        let error = find(programs, "sqlite").unwrap_err().to_string();
        assert_eq!(
            error,
            "no program of the pack is named 'sqlite' (did you mean 'sqlite3'?); there are: gzip, sqlite3"
        );
        let error = find(pack_in(&[empty]), "gzip").unwrap_err().to_string();
        assert_eq!(
            error,
            "no pack to find 'gzip' in: none beside the program or installed, expected CACHEMATE_PACK to name one"
        );
    }

    /// Is the shipped pack what its page says: every recording whole, described, with its counts, and small enough?
    #[test]
    fn the_shipped_pack_is_whole_described_and_small() {
        let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pack");
        let page = std::fs::read_to_string(place.join("README.md")).unwrap();
        let programs = pack_in(&[place]);
        assert!(programs.len() >= 12, "{}", programs.len());
        let mut all_bytes = 0;
        for (name, path) in &programs {
            assert!(page.contains(&format!("| {name} |")), "{name} is not in pack/README.md");
            let bytes = std::fs::metadata(path).unwrap().len();
            assert!(bytes < 700 << 10, "{name}: {bytes} bytes");
            all_bytes += bytes;
            let mut reader = crate::CmtReader::open(path).unwrap();
            let (mut records, mut batch) = (0, Vec::new());
            while crate::TraceReader::read_batch(&mut reader, &mut batch).unwrap() {
                records += batch.len() as u64;
            }
            let totals = crate::TraceReader::totals(&reader).unwrap();
            assert!(records == totals.records && records >= 1000, "{name}: {records} records");
            assert!(
                totals.program_accesses >= Some(records) && totals.instructions > totals.program_accesses,
                "{name}"
            );
        }
        assert!(all_bytes <= 8 << 20, "{all_bytes} bytes in all");
    }
}
