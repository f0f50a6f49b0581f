//! Measured runs kept on disk, so that a matrix of slowdowns is measured once per machine and set of programs.
//!
//! Problem: a matrix of n programs takes n + n (n + 1) / 2 runs, and the same pairs are asked for again by other results,
//! other mixes, other processes of a sweep and the next day. Method: one JSON file for each run, in a folder for each
//! machine with its options and lengths. The file says what it was measured with: the machine's whole description,
//! options, lengths, programs (with their inputs and places), and the version of the program that measured. Properties:
//! nothing is taken from a file that was made with anything else; a damaged or foreign file is measured anew and
//! replaced, with a message; files appear whole or not at all, so that any number of processes share the folder. Without
//! [`keep_in`] nothing is read or written.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::rates::ProgramRates;
use crate::work::InstructionRange;

/// The results of one run, in the order of its programs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StoredRun {
    /// The work of each program: its instructions alone in the measured cycles.
    pub work: Vec<InstructionRange>,
    /// How fast each program was over its work.
    pub rates: Vec<ProgramRates>,
}

/// A file.
#[derive(Serialize, Deserialize)]
struct RunFile {
    format: u32,
    build: String,
    /// All that the runs of a folder have in common.
    measured_with: String,
    /// Programs, inputs and places.
    run: String,
    kept: StoredRun,
}

/// Largest stored run.
const MAX_RUN_BYTES: u64 = 64 << 20;
const FORMAT: u32 = 4;

struct RunFolder {
    path: PathBuf,
    build: String,
    note: fn(&str),
    taken: usize,
}

static FOLDER: Mutex<Option<RunFolder>> = Mutex::new(None);

fn folder() -> std::sync::MutexGuard<'static, Option<RunFolder>> {
    FOLDER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps runs in this folder from now on. `build` distinguishes programs that may measure differently; `note` receives
/// a message for each file that cannot be used or written.
pub fn keep_in(path: &Path, build: &str, note: fn(&str)) {
    *folder() = Some(RunFolder { path: path.to_path_buf(), build: build.to_string(), note, taken: 0 });
}

/// How many runs were taken from the folder instead of being made.
pub fn taken() -> usize {
    folder().as_ref().map_or(0, |folder| folder.taken)
}

/// A run that was kept.
pub(crate) fn find(machine: &str, measured_with: &str, run: &str) -> Option<StoredRun> {
    let mut folder = folder();
    let folder = folder.as_mut()?;
    let stored = folder.read(machine, measured_with, run);
    folder.taken += usize::from(stored.is_some());
    stored
}

/// Keeps a run.
pub(crate) fn keep(machine: &str, measured_with: &str, run: &str, kept: &StoredRun) {
    let folder = folder();
    let Some(folder) = folder.as_ref() else { return };
    if let Err(error) = folder.write(machine, measured_with, run, kept) {
        let shown = folder.path.display();
        (folder.note)(&format!("{shown}: runs cannot be kept ({error}); they are measured each time"));
    }
}

impl RunFolder {
    fn path_of(&self, machine: &str, measured_with: &str, run: &str) -> PathBuf {
        let plain: String =
            machine.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
        let of = |text: &str| fingerprint(text.as_bytes());
        self.path.join(format!("runs-{plain}-{:016x}/{:016x}.json", of(measured_with), of(run)))
    }

    /// Nothing, with a message, where the file is not what it should be.
    fn read(&self, machine: &str, measured_with: &str, run: &str) -> Option<StoredRun> {
        let path = self.path_of(machine, measured_with, run);
        let again = |why: &str| {
            (self.note)(&format!("{}: {why}; measured again", path.display()));
            None
        };
        let text = match cachemate_files::read_text_limited(&path, MAX_RUN_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => return again(&error.to_string()),
        };
        match serde_json::from_str::<RunFile>(&text) {
            Err(error) => again(&format!("damaged ({error})")),
            Ok(found) if found.format != FORMAT || found.build != self.build => {
                again(&format!("made by another build ({}, this is {})", found.build, self.build))
            }
            Ok(found) if found.measured_with != measured_with || found.run != run => {
                again("made with another machine, length or programs")
            }
            Ok(found) if !is_whole(&found.kept) => again("damaged (a speed that cannot be)"),
            Ok(found) => Some(found.kept),
        }
    }

    fn write(&self, machine: &str, measured_with: &str, run: &str, kept: &StoredRun) -> std::io::Result<()> {
        let file = RunFile {
            format: FORMAT,
            build: self.build.clone(),
            measured_with: measured_with.to_string(),
            run: run.to_string(),
            kept: kept.clone(),
        };
        let path = self.path_of(machine, measured_with, run);
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        cachemate_files::replace(&path, serde_json::to_string(&file)?.as_bytes())
    }
}

fn is_whole(kept: &StoredRun) -> bool {
    let speeds = kept.rates.iter().map(|rates| rates.instr_per_cycle);
    !kept.rates.is_empty()
        && kept.rates.len() == kept.work.len()
        && speeds.into_iter().all(|speed| speed.is_finite() && speed > 0.0)
}

/// FNV-1a, to distinguish texts and builds.
pub fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    static NOTES: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn open(path: &Path, build: &str) -> RunFolder {
        let note = |text: &str| NOTES.lock().unwrap().push(text.to_string());
        RunFolder { path: path.to_path_buf(), build: build.to_string(), note, taken: 0 }
    }

    fn last_note() -> Option<String> {
        NOTES.lock().unwrap().pop()
    }

    /// Is a run found again to the bit by the same build, and is a file that is damaged, or made by another, refused with
    /// a message and replaced?
    #[test]
    fn kept_runs_are_found_and_others_are_refused() {
        let place = tempfile::tempdir().unwrap();
        let kept = StoredRun {
            work: vec![InstructionRange { from_instr: 0.1, to_instr: 1e9 / 3.0 }],
            rates: vec![ProgramRates {
                instr_per_cycle: 1.0 / 3.0,
                misses_per_kilo_instr: 0.7,
                data_stalls_per_kilo_instr: 200.0,
                run_time_share: 1.0,
                finished: true,
            }],
        };
        let first = open(place.path(), "one");
        let read = |folder: &RunFolder, with: &str| folder.read("m?a=1", with, "milc");
        first.write("m?a=1", "with", "milc", &kept).unwrap();
        assert_eq!(read(&open(place.path(), "one"), "with"), Some(kept.clone()));
        assert_eq!(last_note(), None);
        assert_eq!(read(&first, "longer"), None);
        assert_eq!(first.read("m?a=1", "with", "mcf"), None);
        assert_eq!(last_note(), None, "nothing is there");
        assert_eq!(read(&open(place.path(), "two"), "with"), None);
        assert!(last_note().unwrap().contains("made by another build (one, this is two); measured again"));
        let path = first.path_of("m?a=1", "with", "milc");
        std::fs::rename(&path, first.path_of("m?a=1", "with", "mcf")).unwrap();
        assert_eq!(first.read("m?a=1", "with", "mcf"), None);
        assert!(last_note().unwrap().contains("another machine, length or programs"));
        std::fs::write(&path, "{ half").unwrap();
        assert_eq!(read(&first, "with"), None);
        assert!(last_note().unwrap().contains("damaged"));
        first.write("m?a=1", "with", "milc", &kept).unwrap();
        assert_eq!(read(&first, "with"), Some(kept));
    }
}
