//! The store of simulated runs: a run is made once for all requests, in this process or another, now or later.
//!
//! Problem: most of an experiment's time is spent on runs that other experiments, seeds and edits need again. Method: a
//! value's name is a hash of everything that it depends on: machine, programs, options, lengths, seed, and the sources
//! that can change it ([`crate::sources`]). Within a process, values are in memory; with a directory
//! ([`use_directory`]), they are on disk as well. Properties: the same bits with and without a store; an unusable file
//! is reported and its run made again ([`RunDir`]).

mod account;
mod entry;
mod run_dir;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use account::ExperimentCost;
pub use entry::{EntryError, StoredEntry};
pub use run_dir::{MAX_DIR_BYTES, RunDir, StoredFile, StoredLookup};

use crate::encoding;
use crate::error::{ReproError, Result, failed};

/// Maximum size of the values in memory, beyond which the oldest are dropped.
const MAX_MEMORY_BYTES: usize = 256 << 20;

/// Everything that a value depends on, and its label for users.
pub struct RunName {
    /// The kind of run, such as `alone`.
    pub(crate) kind: &'static str,
    /// Label in one line: machine and programs.
    pub(crate) label: String,
    /// Digest of the sources that can change the value.
    pub(crate) sources: String,
    /// All other inputs, as JSON.
    pub(crate) inputs: String,
}

impl RunName {
    /// Names the value of a kind of run that is made by these sources from these inputs. The inputs are what the run
    /// receives, whole: text composed by hand may leave out what the run reads. Numbers must be finite, because JSON
    /// has one `null` for all others.
    ///
    /// # Errors
    /// The inputs cannot be represented in JSON.
    pub fn new(
        kind: &'static str,
        label: String,
        sources: String,
        inputs: &impl Serialize,
    ) -> Result<Self> {
        let inputs = serde_json::to_string(inputs).map_err(failed(&label))?;
        Ok(RunName {
            kind,
            label,
            sources,
            inputs,
        })
    }
}

/// Use of the store in this process.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct StoreCounts {
    /// Number of runs that were executed.
    pub executed: usize,
    /// Number of runs taken from the directory; those from memory do not count again.
    pub reused: usize,
    /// Processor time of the executed runs.
    pub executed_cpu_seconds: f64,
    /// Original processor time of the reused runs.
    pub reused_cpu_seconds: f64,
    /// Runs that were requested in [`StoreMode::Peek`] and are not stored.
    pub missing: usize,
}

/// The treatment of a run that is not stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StoreMode {
    /// The run is made.
    #[default]
    Make,
    /// The run counts as missing, and is not simulated.
    Peek,
}

/// Kind, sources and inputs.
type StoredValueKey = (&'static str, String, String);

#[derive(Default)]
struct StoreState {
    dir: Option<(Arc<RunDir>, fn(&str))>,
    mode: StoreMode,
    counts: StoreCounts,
    bytes_by_key: BTreeMap<StoredValueKey, Arc<[u8]>>,
    /// Keys of the values, oldest first.
    keys_by_age: VecDeque<StoredValueKey>,
    total_bytes: usize,
}

static STATE: LazyLock<Mutex<StoreState>> = LazyLock::new(Mutex::default);

impl StoreState {
    fn insert_value(&mut self, key: StoredValueKey, value: Arc<[u8]>) {
        self.total_bytes += value.len();
        if self.bytes_by_key.insert(key.clone(), value).is_none() {
            self.keys_by_age.push_back(key);
        }
        while self.total_bytes > MAX_MEMORY_BYTES {
            let Some(oldest) = self.keys_by_age.pop_front() else {
                break;
            };
            self.total_bytes -= self
                .bytes_by_key
                .remove(&oldest)
                .map_or(0, |value| value.len());
        }
    }
}

fn lock_state() -> MutexGuard<'static, StoreState> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on, stores values in this directory and reads them from it. `report_problem` receives a message for each
/// file that cannot be used or written.
pub fn use_directory(dir: Arc<RunDir>, report_problem: fn(&str)) {
    lock_state().dir = Some((dir, report_problem));
}

/// Sets the treatment of runs that are not stored, and returns the previous one.
pub fn set_mode(mode: StoreMode) -> StoreMode {
    std::mem::replace(&mut lock_state().mode, mode)
}

/// The counts of this process up to now.
pub fn store_counts() -> StoreCounts {
    lock_state().counts
}

/// The value of this name from memory or from the directory, or makes it now.
///
/// # Errors
/// The errors of `make`; [`ReproError::NotStored`] for a missing value in [`StoreMode::Peek`].
pub fn find_or_make<T: Serialize + DeserializeOwned, E: From<ReproError>>(
    name: RunName,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let key = (name.kind, name.sources.clone(), name.inputs.clone());
    let (stored_bytes, dir, mode) = {
        let state = lock_state();
        (
            state.bytes_by_key.get(&key).cloned(),
            state.dir.clone(),
            state.mode,
        )
    };
    if let Some(bytes) = stored_bytes {
        return Ok(encoding::decode_result(&name.label, &bytes)?);
    }

    if let Some((dir, report_problem)) = &dir {
        match dir.find_entry(name.kind, &name.sources, &name.inputs) {
            StoredLookup::Hit(entry) => {
                let mut state = lock_state();
                state.counts.reused += 1;
                state.counts.reused_cpu_seconds += entry.cpu_seconds;
                let value = encoding::decode_result(&name.label, &entry.answer);
                state.insert_value(key, entry.answer.into());
                return Ok(value?);
            }
            StoredLookup::Unusable(reason) => {
                report_problem(&format!("{reason}; the run is made again"))
            }
            StoredLookup::Miss => {}
        }
    }

    if mode == StoreMode::Peek {
        lock_state().counts.missing += 1;
        return Err(ReproError::NotStored.into());
    }
    let start_cpu_seconds = cpu_seconds();
    let value = make()?;
    let cpu_seconds = cpu_seconds() - start_cpu_seconds;
    let encoded_result = encoding::encode_result(&name.label, &value)?;

    if let Some((dir, report_problem)) = &dir {
        let RunName {
            kind,
            label,
            sources,
            inputs,
        } = name;
        let kind = kind.to_string();
        let entry = StoredEntry {
            kind,
            label,
            sources,
            inputs,
            cpu_seconds,
            answer: encoded_result.clone(),
        };
        if let Err(error) = dir.store_entry(&entry) {
            let path = dir.path().display();
            report_problem(&format!(
                "{path}: a run cannot be stored ({error}); it is made again the next time"
            ));
        }
    }

    let mut state = lock_state();
    state.counts.executed += 1;
    state.counts.executed_cpu_seconds += cpu_seconds;
    state.insert_value(key, encoded_result.into());
    Ok(value)
}

/// The processor time of this thread.
fn cpu_seconds() -> f64 {
    let thread_time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    thread_time.tv_sec as f64 + thread_time.tv_nsec as f64 * 1e-9
}

/// The directory in use.
pub fn dir() -> Option<Arc<RunDir>> {
    lock_state().dir.as_ref().map(|(dir, _)| Arc::clone(dir))
}

/// An error if no run may be simulated, because the store is in [`StoreMode::Peek`].
pub(crate) fn allow_simulation() -> Result<()> {
    if lock_state().mode == StoreMode::Peek {
        Err(ReproError::NotStored)
    } else {
        Ok(())
    }
}
