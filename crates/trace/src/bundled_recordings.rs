//! Bundled recordings: recorded real programs, by name.
//!
//! The first of these directories that holds any recording is used: the one named by `CACHEMATE_RECORDINGS`;
//! `recordings` and `../share/cachemate/recordings` beside the executable; `recordings` in its parents (a source tree's
//! build directory); the installed share directories.

use std::path::{Path, PathBuf};

use crate::{TraceError, unknown_name_error};

/// The directories that may contain recordings, in the order of the search.
pub fn recording_dirs() -> Vec<PathBuf> {
    if let Some(named_dir) = std::env::var_os("CACHEMATE_RECORDINGS") {
        return vec![PathBuf::from(named_dir)];
    }
    let mut dirs = Vec::new();
    if let Some(program_dir) = std::env::current_exe()
        .ok()
        .and_then(|exe| exe.parent().map(Path::to_path_buf))
    {
        dirs.push(program_dir.join("recordings"));
        dirs.push(program_dir.join("../share/cachemate/recordings"));
        // target/release/deps/x: the source tree is at most four levels up.
        dirs.extend(
            program_dir
                .ancestors()
                .skip(1)
                .take(4)
                .map(|parent| parent.join("recordings")),
        );
    }
    dirs.push(PathBuf::from("/usr/local/share/cachemate/recordings"));
    dirs.push(PathBuf::from("/usr/share/cachemate/recordings"));
    dirs
}

/// The recordings of the first of `dirs` that has any: names and files, by name.
pub fn find_recordings_in(dirs: &[PathBuf]) -> Vec<(String, PathBuf)> {
    dirs.iter()
        .map(|dir| list_recordings(dir))
        .find(|recordings| !recordings.is_empty())
        .unwrap_or_default()
}

/// All bundled recordings: names and files, by name; empty if none are installed.
pub fn bundled_recordings() -> Vec<(String, PathBuf)> {
    find_recordings_in(&recording_dirs())
}

/// The file, for a name that [`bundled_recordings`] lists.
///
/// # Errors
/// [`TraceError::Unknown`] with the known names and the nearest one; [`TraceError::NoRecordings`].
pub fn bundled_recording(name: &str) -> Result<PathBuf, TraceError> {
    find_by_name(bundled_recordings(), name)
}

/// The path of a recording: a path, a `.cmt` file, or a bundled recording by its name. If there is no file `NAME.cmt`,
/// the bundled recording is meant, whose name may also be that of a simulated program.
///
/// # Errors
/// As [`bundled_recording`].
pub fn find_recording(name: &str) -> Result<PathBuf, TraceError> {
    match name.strip_suffix(".cmt") {
        None if name.contains('/') => Ok(name.into()),
        None => bundled_recording(name),
        Some(_) if cachemate_files::path_exists(Path::new(name)) => Ok(name.into()),
        Some(stem) => Ok(bundled_recording(stem).unwrap_or_else(|_| name.into())),
    }
}

fn find_by_name(programs: Vec<(String, PathBuf)>, name: &str) -> Result<PathBuf, TraceError> {
    if programs.is_empty() {
        return Err(TraceError::NoRecordings {
            name: name.to_string(),
        });
    }
    match programs.iter().find(|(known, _)| known == name) {
        Some((_, path)) => Ok(path.clone()),
        None => Err(unknown_name_error(
            "file or bundled recording",
            name,
            programs.into_iter().map(|(known, _)| known),
        )),
    }
}

fn list_recordings(dir: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = cachemate_files::list_dir(dir) else {
        return Vec::new();
    };
    let mut recordings: Vec<(String, PathBuf)> = entries
        .into_iter()
        .filter_map(|path| {
            let name = path
                .file_name()?
                .to_str()?
                .strip_suffix(".cmt")?
                .to_string();
            Some((name, path))
        })
        .collect();
    recordings.sort();
    recordings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a name find its recording, with precedence for the first directory, and does an unknown name list the known
    /// ones?
    #[test]
    fn a_name_finds_its_recording_and_an_unknown_one_lists_all() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("nothing");
        for name in ["gzip.cmt", "sqlite3.cmt", "README.md"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        let programs = find_recordings_in(&[empty.clone(), dir.path().to_path_buf()]);
        assert_eq!(
            find_by_name(programs.clone(), "gzip").unwrap(),
            dir.path().join("gzip.cmt")
        );
        let error = find_by_name(programs, "sqlite").unwrap_err().to_string();
        assert_eq!(
            error,
            "no file or bundled recording is named 'sqlite' (did you mean 'sqlite3'?); there are: gzip, sqlite3"
        );
        let error = find_by_name(find_recordings_in(&[empty]), "gzip")
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "no bundled recordings to find 'gzip' in: none beside the program or installed ('cargo install' leaves them out); CACHEMATE_RECORDINGS may name their directory, such as recordings of the sources"
        );
    }

    /// Are the bundled recordings as their page states: each complete, described, with its counts, and small enough?
    #[test]
    fn the_bundled_recordings_are_complete_described_and_small() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recordings");
        let page = std::fs::read_to_string(dir.join("README.md")).unwrap();
        let programs = find_recordings_in(&[dir]);
        assert!(programs.len() >= 12, "{}", programs.len());
        let mut all_bytes = 0;
        for (name, path) in &programs {
            assert!(
                page.contains(&format!("| {name} |")),
                "{name} is not in recordings/README.md"
            );
            let bytes = std::fs::metadata(path).unwrap().len();
            assert!(bytes < 700 << 10, "{name}: {bytes} bytes");
            all_bytes += bytes;
            let mut reader = crate::CmtReader::open(path).unwrap();
            let (mut records, mut batch) = (0, Vec::new());
            while crate::TraceReader::read_batch(&mut reader, &mut batch).unwrap() {
                records += batch.len() as u64;
            }
            let totals = crate::TraceReader::totals(&reader).unwrap();
            assert!(
                records == totals.records && records >= 1000,
                "{name}: {records} records"
            );
            assert!(
                totals.program_accesses >= Some(records)
                    && totals.instructions > totals.program_accesses,
                "{name}"
            );
        }
        assert!(all_bytes <= 8 << 20, "{all_bytes} bytes in all");
    }
}
