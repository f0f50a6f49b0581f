//! Measured runs kept on disk, so that a degradation matrix is measured once per machine and set of programs.
//!
//! Problem: a matrix of n programs takes n + n (n + 1) / 2 runs, and the same pairs are asked for again by other results,
//! other mixes and the next day. Method: one JSON file for each machine with its options and lengths; in it every run by
//! its programs (with their inputs and places). The file's name and first lines say what it was measured with: the
//! machine's whole description, options, lengths, and the build of the program that measured. Properties: nothing is
//! taken from a file that was made with anything else; a damaged or foreign file is measured anew and replaced, with a
//! message; files appear whole or not at all. Without [`keep_in`] nothing is read or written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::work::{Rates, Work};

/// What one run answers, in the order of its programs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Kept {
    pub work: Vec<Work>,
    pub rates: Vec<Rates>,
}

/// A file.
#[derive(Serialize, Deserialize)]
struct Runs {
    format: u32,
    build: String,
    machine: String,
    /// All that the runs have in common.
    measured_with: String,
    /// By programs, inputs and places.
    runs: BTreeMap<String, Kept>,
}

const FORMAT: u32 = 3;

struct Folder {
    path: PathBuf,
    build: String,
    note: fn(&str),
    /// By what the runs of a file have in common.
    files: BTreeMap<String, BTreeMap<String, Kept>>,
    taken: usize,
}

static FOLDER: Mutex<Option<Folder>> = Mutex::new(None);

fn folder() -> std::sync::MutexGuard<'static, Option<Folder>> {
    FOLDER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps runs in this folder from now on. `build` tells programs apart that may measure differently; `note` is told of
/// files that cannot be used or written.
pub fn keep_in(path: &Path, build: &str, note: fn(&str)) {
    let (path, build) = (path.to_path_buf(), build.to_string());
    *folder() = Some(Folder { path, build, note, files: BTreeMap::new(), taken: 0 });
}

/// How many runs were taken from the folder instead of being made.
pub fn taken() -> usize {
    folder().as_ref().map_or(0, |folder| folder.taken)
}

/// A run that was kept.
pub(crate) fn find(machine: &str, measured_with: &str, run: &str) -> Option<Kept> {
    let mut folder = folder();
    let folder = folder.as_mut()?;
    let found = folder.file(machine, measured_with).get(run).cloned();
    folder.taken += usize::from(found.is_some());
    found
}

/// Keeps a run.
pub(crate) fn keep(machine: &str, measured_with: &str, run: &str, kept: &Kept) {
    let mut folder = folder();
    let Some(folder) = folder.as_mut() else { return };
    folder.file(machine, measured_with).insert(run.to_string(), kept.clone());
    if let Err(error) = folder.write(machine, measured_with) {
        (folder.note)(&format!(
            "{}: runs cannot be kept ({error}); they are measured each time",
            folder.path.display()
        ));
    }
}

impl Folder {
    fn file(&mut self, machine: &str, measured_with: &str) -> &mut BTreeMap<String, Kept> {
        if !self.files.contains_key(measured_with) {
            let found = self.read(machine, measured_with);
            self.files.insert(measured_with.to_string(), found);
        }
        self.files.entry(measured_with.to_string()).or_default()
    }

    fn path_of(&self, machine: &str, measured_with: &str) -> PathBuf {
        let plain: String =
            machine.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
        self.path.join(format!("runs-{plain}-{:016x}.json", fingerprint(measured_with.as_bytes())))
    }

    /// Nothing, with a message, where the file is not what it should be.
    fn read(&self, machine: &str, measured_with: &str) -> BTreeMap<String, Kept> {
        let path = self.path_of(machine, measured_with);
        let again = |why: &str| {
            (self.note)(&format!("{}: {why}; measured again", path.display()));
            BTreeMap::new()
        };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return BTreeMap::new(),
            Err(error) => return again(&error.to_string()),
        };
        match serde_json::from_str::<Runs>(&text) {
            Err(error) => again(&format!("damaged ({error})")),
            Ok(found) if found.format != FORMAT || found.build != self.build => {
                again(&format!("made by another build ({}, this is {})", found.build, self.build))
            }
            Ok(found) if found.measured_with != measured_with => again("made with another machine or length"),
            Ok(found) => match found.runs.values().all(is_whole) {
                true => found.runs,
                false => again("damaged (a speed that cannot be)"),
            },
        }
    }

    fn write(&self, machine: &str, measured_with: &str) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.path)?;
        let runs = Runs {
            format: FORMAT,
            build: self.build.clone(),
            machine: machine.to_string(),
            measured_with: measured_with.to_string(),
            runs: self.files.get(measured_with).cloned().unwrap_or_default(),
        };
        let path = self.path_of(machine, measured_with);
        let fresh = path.with_extension(format!("{}.new", std::process::id()));
        std::fs::write(&fresh, serde_json::to_string_pretty(&runs)?)?;
        std::fs::rename(&fresh, &path)
    }
}

fn is_whole(kept: &Kept) -> bool {
    let speeds = kept.rates.iter().map(|rates| rates.instr_per_cycle);
    !kept.rates.is_empty()
        && kept.rates.len() == kept.work.len()
        && speeds.into_iter().all(|speed| speed.is_finite() && speed > 0.0)
}

/// FNV-1a: tells texts and builds apart, nothing more.
pub fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    static NOTES: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn open(path: &Path, build: &str) -> Folder {
        let note = |text: &str| NOTES.lock().unwrap().push(text.to_string());
        Folder { path: path.to_path_buf(), build: build.to_string(), note, files: BTreeMap::new(), taken: 0 }
    }

    fn last_note() -> Option<String> {
        NOTES.lock().unwrap().pop()
    }

    /// Is a run found again to the bit by the same build, and is a file that is damaged, or made by another, refused with
    /// a message and replaced?
    #[test]
    fn kept_runs_are_found_and_others_are_refused() {
        let place = tempfile::tempdir().unwrap();
        let kept = Kept {
            work: vec![Work { from_instr: 0.1, to_instr: 1e9 / 3.0 }],
            rates: vec![Rates {
                instr_per_cycle: 1.0 / 3.0,
                misses_per_kilo_instr: 0.7,
                data_stalls_per_kilo_instr: 200.0,
                run_time_share: 1.0,
                finished: true,
            }],
        };
        let mut first = open(place.path(), "one");
        first.file("m?a=1", "with").insert("milc".to_string(), kept.clone());
        first.write("m?a=1", "with").unwrap();
        assert_eq!(open(place.path(), "one").file("m?a=1", "with").get("milc"), Some(&kept));
        assert_eq!(last_note(), None);
        assert!(open(place.path(), "one").file("m?a=1", "longer").is_empty());
        assert!(open(place.path(), "two").file("m?a=1", "with").is_empty());
        assert!(last_note().unwrap().contains("made by another build (one, this is two); measured again"));
        let path = first.path_of("m?a=1", "with");
        std::fs::write(&path, "{ half").unwrap();
        assert!(open(place.path(), "one").file("m?a=1", "with").is_empty());
        assert!(last_note().unwrap().contains("damaged"));
        first.write("m?a=1", "with").unwrap();
        assert_eq!(open(place.path(), "one").file("m?a=1", "with").len(), 1);
    }
}
