//! The job store: a folder of plain files, which is the only truth about a sweep.
//!
//! | file | what |
//! |---|---|
//! | `manifest.jsonl`, `inputs/` | what there is to do ([`crate::Manifest`]) |
//! | `results/ab/ID.json` | a finished task: the result's line, then a line on who made it |
//! | `claims/ID` | who runs a task now ([`crate::claims`]) |
//! | `failed/ID.jsonl` | attempts that came to nothing ([`crate::failures`]) |
//! | `damaged/`, `differing/` | results that were not whole, and such that two workers did not agree on |
//! | `partial/` | files under way |
//!
//! Names appear by linking a whole file, so that a result is there or not, on a shared file system too. Nothing is
//! forced to the disk: a result that a power failure damaged has a wrong checksum and is made again.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

use crate::manifest::SweepTaskId;
use crate::owner::{ClaimOwner, Heartbeat};
use crate::{Manifest, SweepError};

/// A claim whose owner has not stirred for so long is taken over.
pub const STALE_AFTER: Duration = Duration::from_secs(60);

/// A sweep's folder, opened by this process.
pub struct Store {
    folder: PathBuf,
    pub(crate) owner: ClaimOwner,
    pub(crate) heart: Heartbeat,
    pub(crate) stale_after: Duration,
    /// Tells the files under way of one process apart.
    next: AtomicU64,
}

/// Who made a result, and how long it took. Not part of the result: it differs between attempts.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunNote {
    /// Host that ran the task.
    pub host: String,
    /// Process that ran it.
    pub pid: u32,
    /// Which attempt it was, from 1.
    pub attempt: u32,
    /// Start of that attempt: milliseconds since 1970 by that host's clock.
    pub started_unix_ms: u64,
    /// Duration of that attempt, in milliseconds.
    pub elapsed_ms: u64,
}

/// A result as it lies in the store.
#[derive(Debug)]
pub struct StoredResult {
    /// The answer's JSON, byte by byte as the worker wrote it.
    pub result: Box<RawValue>,
    /// `None` where that line is missing.
    pub note: Option<RunNote>,
}

/// What publishing a result found in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PublishOutcome {
    /// Nothing: the result is the first.
    New,
    /// Another worker had published the same bytes.
    Same,
    /// Another worker had published other bytes: both are kept, and somebody must look.
    Differs,
}

#[derive(Serialize, Deserialize)]
struct ResultLine<'a> {
    #[serde(borrow)]
    id: &'a str,
    /// XXH3 of the id and the result.
    #[serde(borrow)]
    checksum: &'a str,
    #[serde(borrow)]
    result: &'a RawValue,
}

const FOLDERS: [&str; 7] = ["inputs", "results", "claims", "failed", "damaged", "differing", "partial"];

impl Store {
    /// Makes the folders where they are missing.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn create(folder: &Path) -> Result<Self, SweepError> {
        for name in FOLDERS {
            let path = folder.join(name);
            fs::create_dir_all(&path).map_err(SweepError::io(&path))?;
        }
        Store::open(folder)
    }

    /// A folder that has a manifest, or will have one.
    ///
    /// # Errors
    /// It is not there.
    pub fn open(folder: &Path) -> Result<Self, SweepError> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => {
                SweepError::file(folder, "no such folder: 'cachemate sweep run FILE -o DIR' makes it")
            }
            _ => SweepError::file(folder, error),
        };
        let folder = folder.canonicalize().map_err(failed)?;
        let next = AtomicU64::new(0);
        Ok(Store { folder, owner: ClaimOwner::me(), heart: Heartbeat::default(), stale_after: STALE_AFTER, next })
    }

    /// The same store with another time without a beat after which a claim is taken over.
    #[must_use]
    pub fn stale_after(mut self, time: Duration) -> Self {
        self.stale_after = time;
        self
    }

    /// The sweep's folder, by an absolute path.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads the manifest of this folder.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn manifest(&self) -> Result<Manifest, SweepError> {
        Manifest::read(&self.folder)
    }

    /// Writes a file beside its place and renames it there.
    pub(crate) fn write_atomic(&self, name: &str, content: &str) -> Result<(), SweepError> {
        let path = self.folder.join(name);
        let fresh = self.partial(name);
        let put = || fs::write(&fresh, content).and_then(|()| fs::rename(&fresh, &path));
        put().map_err(|error| {
            let _ = fs::remove_file(&fresh);
            SweepError::io(&path)(error)
        })
    }

    /// A name for a file under way: nobody else's.
    pub(crate) fn partial(&self, what: &str) -> PathBuf {
        let plain: String = what.chars().map(|c| if c == '/' { '-' } else { c }).collect();
        let (host, pid) = (&self.owner.host, self.owner.pid);
        self.folder.join(format!("partial/{plain}.{host}.{pid}.{}", self.next.fetch_add(1, Ordering::Relaxed)))
    }

    fn result_path(&self, id: SweepTaskId) -> PathBuf {
        let name = id.to_string();
        self.folder.join(format!("results/{}/{name}.json", &name[..2]))
    }

    /// Makes a result known under its name, if nobody did before.
    ///
    /// # Errors
    /// It cannot be written; a full disk is told apart.
    pub fn publish(&self, id: SweepTaskId, result: &RawValue, note: &RunNote) -> Result<PublishOutcome, SweepError> {
        let path = self.result_path(id);
        let failed = SweepError::io(&path);
        let fresh = self.partial(&id.to_string());
        let text = file_text(id, result, note);
        let written = fs::write(&fresh, text).and_then(|()| link(&fresh, &path));
        let published = match written {
            Ok(()) => Ok(PublishOutcome::New),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.compare(id, result, &fresh),
            Err(error) => Err(failed(error)),
        };
        let _ = fs::remove_file(&fresh);
        published
    }

    fn compare(&self, id: SweepTaskId, result: &RawValue, fresh: &Path) -> Result<PublishOutcome, SweepError> {
        match self.read(id) {
            Ok(Some(found)) if found.result.get() == result.get() => Ok(PublishOutcome::Same),
            Ok(Some(_)) => {
                let conflict_path =
                    self.folder.join(format!("differing/{id}.{}.{}.json", self.owner.host, self.owner.pid));
                fs::rename(fresh, &conflict_path).map_err(SweepError::io(&conflict_path))?;
                Ok(PublishOutcome::Differs)
            }
            // What was there was not whole.
            Ok(None) | Err(_) => {
                self.quarantine(id)?;
                let path = self.result_path(id);
                fs::rename(fresh, &path).map_err(SweepError::io(&path))?;
                Ok(PublishOutcome::New)
            }
        }
    }

    /// A finished task's result; `None` where it is not finished.
    ///
    /// # Errors
    /// Words for what is damaged about the file.
    pub fn read(&self, id: SweepTaskId) -> Result<Option<StoredResult>, String> {
        let path = self.result_path(id);
        let bad = |what: String| format!("{}: damaged: {what}", path.display());
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(bad(error.to_string())),
        };
        let (first, rest) = text.split_once('\n').ok_or_else(|| bad("no whole line".to_string()))?;
        let line: ResultLine<'_> = serde_json::from_str(first).map_err(|error| bad(error.to_string()))?;
        let sum = checksum(line.id, line.result);
        if line.id != id.to_string() {
            return Err(bad(format!("found the result of task {}", line.id)));
        }
        if line.checksum != sum {
            return Err(bad(format!("found checksum {}, expected {sum}", line.checksum)));
        }
        Ok(Some(StoredResult { result: line.result.to_owned(), note: serde_json::from_str(rest).ok() }))
    }

    /// Moves a result that is not whole out of the way.
    ///
    /// # Errors
    /// It cannot be moved.
    pub fn quarantine(&self, id: SweepTaskId) -> Result<(), SweepError> {
        let path = self.result_path(id);
        let aside = self.folder.join(format!("damaged/{id}.{}", unix_ms()));
        match fs::rename(&path, aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(SweepError::io(&path)(error)),
            _ => Ok(()),
        }
    }

    /// Ids with a file in `results`, by name alone.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn finished(&self) -> Result<BTreeSet<SweepTaskId>, SweepError> {
        let mut finished = BTreeSet::new();
        for folder in entries(&self.folder.join("results"))? {
            finished.extend(self.finished_in(&folder)?);
        }
        Ok(finished)
    }

    pub(crate) fn finished_in(&self, folder: &Path) -> Result<Vec<SweepTaskId>, SweepError> {
        Ok(names(folder)?.filter_map(|name| name.strip_suffix(".json")?.parse().ok()).collect())
    }

    /// Ids of tasks with attempts that came to nothing.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn failed(&self) -> Result<BTreeSet<SweepTaskId>, SweepError> {
        let failed = names(&self.folder.join("failed"))?;
        Ok(failed.filter_map(|name| name.strip_suffix(".jsonl")?.parse().ok()).collect())
    }

    /// Names of the files in `differing`.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn differing(&self) -> Result<Vec<String>, SweepError> {
        Ok(names(&self.folder.join("differing"))?.collect())
    }

    /// When results appeared, of at most so many of the newest; for how fast a sweep goes.
    pub(crate) fn newest(&self, ids: impl Iterator<Item = SweepTaskId>, most: usize) -> Vec<SystemTime> {
        let time = |id: SweepTaskId| fs::metadata(self.result_path(id)).ok()?.modified().ok();
        let mut times: Vec<SystemTime> = ids.filter_map(time).collect();
        times.sort_unstable_by(|a, b| b.cmp(a));
        times.truncate(most);
        times
    }

    /// Removes files that processes which are gone left under way on this host.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn sweep_partial(&self) -> Result<(), SweepError> {
        let folder = self.folder.join("partial");
        let ours = format!(".{}.", self.owner.host);
        for name in names(&folder)? {
            let pid = name.rsplit('.').nth(1).and_then(|pid| pid.parse().ok());
            if name.contains(&ours) && pid.is_some_and(|pid: u32| !Path::new(&format!("/proc/{pid}")).exists()) {
                let _ = fs::remove_file(folder.join(name));
            }
        }
        Ok(())
    }
}

fn checksum(id: &str, result: &RawValue) -> String {
    format!("{:016x}", xxh3_64(format!("{id} {}", result.get()).as_bytes()))
}

fn file_text(id: SweepTaskId, result: &RawValue, note: &RunNote) -> String {
    let id = id.to_string();
    let line = ResultLine { id: &id, checksum: &checksum(&id, result), result };
    let text =
        |value: Result<String, serde_json::Error>| value.expect("texts, numbers and checked JSON can be written");
    format!("{}\n{}\n", text(serde_json::to_string(&line)), text(serde_json::to_string(note)))
}

/// Gives a whole file its name unless there is one. File systems without hard links get a rename, which may replace
/// what appeared in between by the same.
pub(crate) fn link(fresh: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(fresh, path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound && fresh.exists() => {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::hard_link(fresh, path)
        }
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::PERM | Errno::OPNOTSUPP)) => {
            if path.exists() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            fs::rename(fresh, path)
        }
        Err(error) => Err(error),
    }
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, SweepError> {
    Ok(names(folder)?.map(|name| folder.join(name)).collect())
}

/// Names in a folder; none where there is no such folder.
pub(crate) fn names(folder: &Path) -> Result<impl Iterator<Item = String> + use<>, SweepError> {
    let entries = match fs::read_dir(folder) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(SweepError::file(folder, error)),
    };
    Ok(entries.into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok()))
}

/// Milliseconds since 1970 by this host's clock.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Adds one line to a file in one write.
pub(crate) fn append(path: &Path, line: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(format!("{line}\n").as_bytes())
}
