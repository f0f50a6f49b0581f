//! The job store: a directory of plain files that alone determine the state of a sweep.
//!
//! | file | content |
//! |---|---|
//! | `manifest.jsonl`, `inputs/` | the tasks ([`crate::Manifest`]) |
//! | `results/ab/ID.json` | a finished task: the result's line, then a line about its worker |
//! | `claims/ID` | the worker that runs a task now ([`crate::claims`]) |
//! | `failed/ID.jsonl` | failed attempts ([`crate::failures`]) |
//! | `damaged/`, `differing/` | incomplete results, and results on which two workers disagree |
//! | `partial/` | files being written |
//!
//! A file gets its name by linking it when it is complete, so a result either exists whole or not at all, on a shared
//! file system as well. Files are not synced to disk: if a power failure damages a result, its checksum is wrong and
//! its task runs again.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cachemate_files::{DirAccess, TrustedDir};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

use crate::manifest::SweepTaskId;
use crate::owner::{ClaimOwner, Heartbeat, started_ticks};
use crate::{Manifest, SweepError};

/// Time without a heartbeat after which a claim is taken over.
pub const STALE_AFTER: Duration = Duration::from_secs(60);

/// A sweep's directory, opened by this process.
pub struct Store {
    dir: PathBuf,
    root: Arc<TrustedDir>,
    pub(crate) owner: ClaimOwner,
    pub(crate) heartbeat: Heartbeat,
    pub(crate) stale_after: Duration,
}

/// Worker and duration of an attempt. These are not part of the result, because they differ between attempts.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunNote {
    /// Host that ran the task.
    pub host: String,
    /// Process that ran it.
    pub pid: u32,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Start of that attempt: milliseconds since 1970 by that host's clock.
    pub started_unix_ms: u64,
    /// Duration of that attempt, in milliseconds.
    pub elapsed_ms: u64,
}

/// A result as stored.
#[derive(Debug)]
pub struct StoredResult {
    /// JSON of the result, with exactly the bytes that the worker wrote.
    pub result: Box<RawValue>,
    /// Note about the attempt; `None` if its line is missing.
    pub note: Option<RunNote>,
}

/// Outcome of publishing a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PublishOutcome {
    /// This is the first result of the task.
    New,
    /// Another worker had already published the same bytes.
    Same,
    /// Another worker had already published different bytes; both results are kept for inspection.
    Differs,
}

#[derive(Serialize, Deserialize)]
struct ResultLine<'a> {
    #[serde(borrow)]
    id: &'a str,
    /// XXH3 checksum of the id and the result.
    #[serde(borrow)]
    checksum: &'a str,
    #[serde(borrow)]
    result: &'a RawValue,
}

const DIRS: [&str; 7] = [
    INPUTS, RESULTS, "claims", "failed", DAMAGED, DIFFERING, PARTIAL,
];
const INPUTS: &str = "inputs";
const RESULTS: &str = "results";
const DAMAGED: &str = "damaged";
const DIFFERING: &str = "differing";
const PARTIAL: &str = "partial";
/// Maximum size of a result; one with everything that a run counted has a few MiB.
const RESULT_BYTES_LIMIT: u64 = 256 << 20;

impl Store {
    /// Opens a directory, after creating it and its subdirectories if they are missing.
    ///
    /// # Errors
    /// A directory cannot be created, or another user can change it.
    pub fn create(dir: &Path) -> Result<Self, SweepError> {
        if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).map_err(SweepError::io_error(parent))?;
        }
        let root = TrustedDir::create(dir).map_err(SweepError::io_error(dir))?;
        for name in DIRS {
            root.create_dir(name)
                .map_err(SweepError::io_error(&dir.join(name)))?;
        }
        Store::open(dir)
    }

    /// Opens an existing directory that has a manifest or will get one.
    ///
    /// # Errors
    /// The directory does not exist, or another user can change it; its content determines which commands run.
    pub fn open(dir: &Path) -> Result<Self, SweepError> {
        Store::open_for(dir, DirAccess::ReadWrite)
    }

    /// Opens the directory for a command that only reports, without changing anything in it.
    pub fn open_to_read(dir: &Path) -> Result<Self, SweepError> {
        Store::open_for(dir, DirAccess::ReadOnly)
    }

    fn open_for(dir: &Path, access: DirAccess) -> Result<Self, SweepError> {
        let open_error = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => SweepError::file(
                dir,
                "no such directory: 'cachemate sweep run FILE -o DIR' makes it",
            ),
            io::ErrorKind::PermissionDenied => SweepError::Refused(error.to_string()),
            _ => SweepError::file(dir, error),
        };
        let root = Arc::new(TrustedDir::open(dir, access).map_err(open_error)?);
        let heartbeat = Heartbeat::new(Arc::clone(&root));
        let dir = dir.canonicalize().map_err(open_error)?;
        Ok(Store {
            dir,
            root,
            owner: ClaimOwner::this_process(),
            heartbeat,
            stale_after: STALE_AFTER,
        })
    }

    /// The open directory of the sweep.
    pub(crate) fn root(&self) -> &TrustedDir {
        &self.root
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.root.access() == DirAccess::ReadOnly
    }

    /// An error about a file below the directory.
    pub(crate) fn io_error<'a>(&'a self, path: &'a str) -> impl Fn(io::Error) -> SweepError + 'a {
        move |error| SweepError::io_error(&self.dir.join(path))(error)
    }

    pub(crate) fn dir(&self, name: &str) -> Result<TrustedDir, SweepError> {
        self.root
            .open_dir(Path::new(name))
            .map_err(self.io_error(name))
    }

    /// The store with `time` instead of [`STALE_AFTER`].
    #[must_use]
    pub fn stale_after(mut self, time: Duration) -> Self {
        self.stale_after = time;
        self
    }

    /// The absolute path of the sweep's directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Reads the manifest of this directory.
    pub fn manifest(&self) -> Result<Manifest, SweepError> {
        Manifest::read(&self.root)
    }

    /// The manifest's header and the tasks with these ids.
    pub fn find_tasks(&self, ids: &[SweepTaskId]) -> Result<Manifest, SweepError> {
        Manifest::find(&self.root, ids)
    }

    /// Writes the manifest of this directory.
    ///
    /// # Errors
    /// The manifest cannot be written.
    pub fn write_manifest(&self, manifest: &Manifest) -> Result<(), SweepError> {
        manifest.write(&self.root)
    }

    /// Writes one of the inputs.
    pub(crate) fn write_input(&self, path: &str, content: &str) -> Result<(), SweepError> {
        let name =
            plain_input(path).map_err(|problem| SweepError::file(&self.dir.join(path), problem))?;
        self.dir(INPUTS)?
            .replace(name, content.as_bytes())
            .map_err(self.io_error(path))
    }

    /// Writes a file in `partial` under a name that no other process chooses. Returns the directory and the name.
    pub(crate) fn write_partial(
        &self,
        subject: &str,
        content: &[u8],
    ) -> Result<(TrustedDir, String), SweepError> {
        let partial = self.dir(PARTIAL)?;
        let (host, pid) = (&self.owner.host, self.owner.pid);
        let name = partial
            .write_temporary(&format!("{subject}.{host}.{pid}"), content)
            .map_err(self.io_error(PARTIAL))?;
        Ok((partial, name))
    }

    /// Publishes a result under its task's name, unless a result was published before.
    ///
    /// # Errors
    /// The result cannot be written; a full disk has its own error.
    pub fn publish(
        &self,
        id: SweepTaskId,
        result: &RawValue,
        note: &RunNote,
    ) -> Result<PublishOutcome, SweepError> {
        let (dir, name) = result_location(id);
        let results_error = self.io_error(&name);
        let results = self
            .dir(RESULTS)?
            .create_dir(&dir)
            .map_err(&results_error)?;
        let (partial_dir, partial_name) = self.write_partial(
            &id.to_string(),
            render_result_file(id, result, note).as_bytes(),
        )?;
        let outcome = match link_if_absent(&partial_dir, &partial_name, &results, &name) {
            Ok(()) => Ok(PublishOutcome::New),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.resolve_duplicate(id, result, (&partial_dir, &partial_name), &results)
            }
            Err(error) => Err(results_error(error)),
        };
        let _ = partial_dir.remove(&partial_name);
        outcome
    }

    fn resolve_duplicate(
        &self,
        id: SweepTaskId,
        result: &RawValue,
        (partial_dir, partial_name): (&TrustedDir, &str),
        results: &TrustedDir,
    ) -> Result<PublishOutcome, SweepError> {
        match self.read(id) {
            Ok(Some(stored)) if stored.result.get() == result.get() => Ok(PublishOutcome::Same),
            Ok(Some(_)) => {
                let name = format!("{id}.{}.{}.json", self.owner.host, self.owner.pid);
                let differing = self.dir(DIFFERING)?;
                partial_dir
                    .rename_into(partial_name, &differing, &name)
                    .map_err(self.io_error(DIFFERING))?;
                Ok(PublishOutcome::Differs)
            }
            // The existing file is incomplete, so it is replaced.
            Ok(None) | Err(_) => {
                self.quarantine(id)?;
                let (_, name) = result_location(id);
                partial_dir
                    .rename_into(partial_name, results, &name)
                    .map_err(self.io_error(&name))?;
                Ok(PublishOutcome::New)
            }
        }
    }

    /// Reads the result of a task; `None` if the task is not finished.
    ///
    /// # Errors
    /// The result is damaged; the text describes the damage.
    pub fn read(&self, id: SweepTaskId) -> Result<Option<StoredResult>, String> {
        let path = result_path(id);
        let damaged_result =
            |problem: String| format!("{}: damaged: {problem}", self.dir.join(&path).display());
        let file_result = self.root.read_text(Path::new(&path), RESULT_BYTES_LIMIT);
        let Some(text) = file_result.map_err(|error| damaged_result(error.to_string()))? else {
            return Ok(None);
        };
        let (result_text, note_text) = text
            .split_once('\n')
            .ok_or_else(|| damaged_result("no whole line".to_string()))?;
        let line: ResultLine<'_> =
            serde_json::from_str(result_text).map_err(|error| damaged_result(error.to_string()))?;
        let checksum = result_checksum(line.id, line.result);
        if line.id != id.to_string() {
            return Err(damaged_result(format!(
                "found the result of task {}",
                line.id
            )));
        }
        if line.checksum != checksum {
            return Err(damaged_result(format!(
                "found checksum {}, expected {checksum}",
                line.checksum
            )));
        }
        Ok(Some(StoredResult {
            result: line.result.to_owned(),
            note: serde_json::from_str(note_text).ok(),
        }))
    }

    /// Moves an incomplete result to `damaged`.
    ///
    /// # Errors
    /// The file cannot be moved.
    pub fn quarantine(&self, id: SweepTaskId) -> Result<(), SweepError> {
        let (dir, name) = result_location(id);
        let results = self.dir(&format!("{RESULTS}/{dir}"))?;
        match results.rename_into(&name, &self.dir(DAMAGED)?, &format!("{id}.{}", unix_ms())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.io_error(&name)(error))
            }
            _ => Ok(()),
        }
    }

    /// Ids of tasks with a file in `results`; the files' content is not checked.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn finished_tasks(&self) -> Result<BTreeSet<SweepTaskId>, SweepError> {
        let mut finished_ids = BTreeSet::new();
        for (dir, _) in self.result_dirs()? {
            finished_ids.extend(self.finished_tasks_in(&dir)?);
        }
        Ok(finished_ids)
    }

    /// Directories of results, with their modification times.
    pub(crate) fn result_dirs(&self) -> Result<Vec<(String, SystemTime)>, SweepError> {
        let dirs = self
            .names_in(RESULTS)?
            .into_iter()
            .map(|name| format!("{RESULTS}/{name}"));
        Ok(dirs
            .filter_map(|dir| Some((dir.clone(), self.modified_time(&dir)?)))
            .collect())
    }

    pub(crate) fn finished_tasks_in(&self, dir: &str) -> Result<Vec<SweepTaskId>, SweepError> {
        let names = self.names_in(dir)?.into_iter();
        Ok(names
            .filter_map(|name| name.strip_suffix(".json")?.parse().ok())
            .collect())
    }

    /// Names in one of the store's directories; empty if the directory is missing.
    pub(crate) fn names_in(&self, dir: &str) -> Result<Vec<String>, SweepError> {
        let names = self
            .root
            .open_dir(Path::new(dir))
            .and_then(|dir| dir.names());
        match names {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            other => other.map_err(self.io_error(dir)),
        }
    }

    /// Modification time of a file or directory; `None` if it is missing.
    pub(crate) fn modified_time(&self, relative_path: &str) -> Option<SystemTime> {
        let stat = self.root.stat_if_exists(Path::new(relative_path)).ok()??;
        let since_epoch = Duration::from_secs(u64::try_from(stat.st_mtime).ok()?)
            + Duration::from_nanos(stat.st_mtime_nsec);
        SystemTime::UNIX_EPOCH.checked_add(since_epoch)
    }

    /// Ids of tasks with failed attempts.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn failed_tasks(&self) -> Result<BTreeSet<SweepTaskId>, SweepError> {
        let names = self.names_in("failed")?.into_iter();
        Ok(names
            .filter_map(|name| name.strip_suffix(".jsonl")?.parse().ok())
            .collect())
    }

    /// Names of the files in `differing`.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn differing_files(&self) -> Result<Vec<String>, SweepError> {
        self.names_in(DIFFERING)
    }

    /// Times at which the newest results appeared, from which the rate is computed.
    pub(crate) fn newest_times(
        &self,
        ids: impl Iterator<Item = SweepTaskId>,
        max_times: usize,
    ) -> Vec<SystemTime> {
        let time_of = |id: SweepTaskId| self.modified_time(&result_path(id));
        let mut times: Vec<SystemTime> = ids.filter_map(time_of).collect();
        times.sort_unstable_by(|a, b| b.cmp(a));
        times.truncate(max_times);
        times
    }

    /// Removes temporary files that exited processes of this host left behind.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn remove_stale_partials(&self) -> Result<(), SweepError> {
        let partial = self.dir(PARTIAL)?;
        let own_marker = format!(".{}.", self.owner.host);
        for name in self.names_in(PARTIAL)? {
            let pid = name.rsplit('.').nth(1).and_then(|pid| pid.parse().ok());
            if name.contains(&own_marker)
                && pid.is_some_and(|pid: u32| started_ticks(pid).is_none())
            {
                let _ = partial.remove(&name);
            }
        }
        Ok(())
    }
}

/// The name of an input without its directory.
///
/// # Errors
/// The name is not a plain one below `inputs/`. A manifest with arbitrary paths could otherwise name any file of the
/// host.
pub(crate) fn plain_input(path: &str) -> Result<&str, String> {
    let name = path
        .strip_prefix("inputs/")
        .filter(|name| !name.is_empty() && !name.contains('/'));
    name.filter(|name| !name.starts_with('.'))
        .ok_or_else(|| format!("found '{path}', expected a name below inputs/"))
}

/// The directory below `results`, and the file name of a task's result.
fn result_location(id: SweepTaskId) -> (String, String) {
    let name = id.to_string();
    (name[..2].to_string(), format!("{name}.json"))
}

fn result_path(id: SweepTaskId) -> String {
    let (dir, name) = result_location(id);
    format!("{RESULTS}/{dir}/{name}")
}

fn result_checksum(id: &str, result: &RawValue) -> String {
    format!(
        "{:016x}",
        xxh3_64(format!("{id} {}", result.get()).as_bytes())
    )
}

fn render_result_file(id: SweepTaskId, result: &RawValue, note: &RunNote) -> String {
    let id = id.to_string();
    let line = ResultLine {
        id: &id,
        checksum: &result_checksum(&id, result),
        result,
    };
    let expect_json = |value: Result<String, serde_json::Error>| {
        value.expect("texts, numbers and checked JSON can be written")
    };
    format!(
        "{}\n{}\n",
        expect_json(serde_json::to_string(&line)),
        expect_json(serde_json::to_string(note))
    )
}

/// Links a complete file to its name unless the name exists. On file systems without hard links it is renamed instead,
/// which may replace an identical file that appeared in between.
pub(crate) fn link_if_absent(
    partial: &TrustedDir,
    partial_name: &str,
    dir: &TrustedDir,
    name: &str,
) -> io::Result<()> {
    match partial.link_into(partial_name, dir, name) {
        Err(error)
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::PERM | Errno::OPNOTSUPP)
            ) =>
        {
            if dir.stat_if_exists(Path::new(name))?.is_some() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            partial.rename_into(partial_name, dir, name)
        }
        other => other,
    }
}

/// Milliseconds since 1970 by this host's clock.
pub(crate) fn unix_ms() -> u64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_epoch.map_or(0, |time| {
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
    })
}
