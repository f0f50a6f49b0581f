//! The restore journal: the original state of everything that cachemate changes on the host.
//!
//! The daemon may die at any instant, by any signal, and the host must be restored exactly; so
//! whatever restores it can rely on nothing that was only in memory. Before the first change of an
//! object, its original is appended to a file and synced, a whole batch at a time, once per object;
//! the new state is recorded beside it, so that a restore can distinguish our changes from those of
//! others.
//!
//! For example, thread 4711 may use CPUs 0-7 and is moved to 0-3. The line with the original 0-7 is
//! on the disk before the mask is set. If the daemon is killed before that, a restore finds 0-7 and
//! changes nothing; after that, it finds 0-3, which is ours, and sets 0-7. If it finds 5, somebody
//! else moved the thread since, and it is left alone.
//!
//! Every line carries its own checksum; a torn line is ignored, because its change was never made.
//! If a failing disk accepted a part of a batch, the part is cut off again; if that fails, too, the
//! next line marks the fragment before it. Any other unreadable line is damage: its content is
//! lost, and the loss is reported. When threads have exited, their lines are dropped by rewriting
//! the file and renaming it into place.
//!
//! There is no change without a synced original, and no line with an intermediate state. The size
//! is proportional to the live objects, and a journal of another boot names no object that still
//! exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use cachemate_core::CpuSet;
use serde::{Deserialize, Serialize};

use crate::kernel::scheduling::SchedParams;
use crate::kernel::{ThreadKey, pid_namespace};

mod left_behind;
pub use left_behind::{find_quarantined, quarantine, remove_left_behind, retain_left_behind};

/// An object on the host that can be changed and restored.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JournalObject {
    /// A thread's CPU affinity; `pid` is its process, whose later threads and children inherit it.
    Affinity {
        /// Process of the thread.
        pid: i32,
        /// The thread.
        thread: ThreadKey,
    },
    /// A thread's nice value.
    Nice {
        /// Process of the thread.
        pid: i32,
        /// The thread.
        thread: ThreadKey,
    },
    /// A thread's scheduling policy, which changes because gang members wait for their turn as idle tasks.
    Policy {
        /// Process of the thread.
        pid: i32,
        /// The thread.
        thread: ThreadKey,
    },
    /// The group of a hierarchy (a mounted cgroup controller, resctrl) that contains a thread; its children start in
    /// the same group.
    Membership {
        /// Mount point of the hierarchy.
        hierarchy: PathBuf,
        /// Process of the thread.
        pid: i32,
        /// The thread.
        thread: ThreadKey,
    },
    /// Content of a control file: cpuset, freezer, weight.
    File {
        /// Absolute, below the host's root.
        path: PathBuf,
    },
    /// Way masks of a resctrl group: the lines of its schemata file that divide caches.
    Schemata {
        /// Absolute, below the host's root.
        path: PathBuf,
    },
    /// A directory that did not exist: a cgroup or a resctrl group of our own.
    Directory {
        /// Absolute, below the host's root.
        path: PathBuf,
    },
}

impl JournalObject {
    /// The process and the thread whose property it is; `None` if it is not a property of a thread. Threads and
    /// children of the process inherit the property at their creation.
    pub fn owner(&self) -> Option<(i32, ThreadKey)> {
        match *self {
            JournalObject::Affinity { pid, thread }
            | JournalObject::Nice { pid, thread }
            | JournalObject::Policy { pid, thread }
            | JournalObject::Membership { pid, thread, .. } => Some((pid, thread)),
            JournalObject::File { .. }
            | JournalObject::Schemata { .. }
            | JournalObject::Directory { .. } => None,
        }
    }

    /// The thread whose property it is, if it is a thread's property.
    pub fn thread(&self) -> Option<ThreadKey> {
        self.owner().map(|(_, thread)| thread)
    }

    /// The same property of another thread; an object that is not a thread's property is returned unchanged.
    pub fn for_thread(&self, pid: i32, thread: ThreadKey) -> JournalObject {
        match self {
            JournalObject::Affinity { .. } => JournalObject::Affinity { pid, thread },
            JournalObject::Nice { .. } => JournalObject::Nice { pid, thread },
            JournalObject::Policy { .. } => JournalObject::Policy { pid, thread },
            JournalObject::Membership { hierarchy, .. } => JournalObject::Membership {
                hierarchy: hierarchy.clone(),
                pid,
                thread,
            },
            JournalObject::File { .. }
            | JournalObject::Schemata { .. }
            | JournalObject::Directory { .. } => self.clone(),
        }
    }
}

/// The state of an object.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ObjectState {
    /// For [`JournalObject::Affinity`]: the CPUs as set, including offline ones.
    Cpus(CpuSet),
    /// For [`JournalObject::Nice`]: -20 to 19.
    Nice(i32),
    /// `SCHED_*` of a class without parameters.
    Policy(u32),
    /// `SCHED_*` with its parameters.
    Scheduling(SchedParams),
    /// Path of the group, below the hierarchy's mount.
    Group(PathBuf),
    /// For [`JournalObject::File`] and [`JournalObject::Schemata`]: content without the white space at its end.
    Text(String),
    /// For [`JournalObject::Directory`]: it does not exist.
    Absent,
    /// For [`JournalObject::Directory`]: it exists.
    Present,
}

impl From<SchedParams> for ObjectState {
    fn from(scheduling: SchedParams) -> Self {
        let is_default = scheduling == SchedParams::from_policy(scheduling.policy);
        if is_default {
            ObjectState::Policy(scheduling.policy)
        } else {
            ObjectState::Scheduling(scheduling)
        }
    }
}

impl ObjectState {
    /// The CPUs, if it is the state of an affinity.
    pub(crate) fn cpus(&self) -> Option<&CpuSet> {
        if let ObjectState::Cpus(cpus) = self {
            Some(cpus)
        } else {
            None
        }
    }
    /// The class of a thread, if this state is one.
    pub fn scheduling(&self) -> Option<SchedParams> {
        match self {
            ObjectState::Policy(policy) => Some(SchedParams::from_policy(*policy)),
            ObjectState::Scheduling(scheduling) => Some(*scheduling),
            _ => None,
        }
    }
}

/// What a process shares with its descendants, whether or not their parents live.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProcessFamily {
    /// Its session.
    pub session: i32,
    /// Its process group.
    pub group: i32,
    /// A hash of the text that lists its control groups; `None` if the text cannot be read.
    #[serde(default)]
    pub cgroups: Option<u64>,
}

/// The record of one object: its original, and all states that we ever set (distinct, oldest first).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JournalEntry {
    /// State before the first change.
    pub original: ObjectState,
    /// All states that cachemate has set.
    pub applied_states: Vec<ObjectState>,
    /// Time at which the journal was begun, in clock ticks since the boot.
    pub since_ticks: u64,
    /// Whether the original mask was as wide as the thread's cpuset, so that the restored mask must follow the cpuset
    /// again.
    pub follows_cpuset: bool,
    /// The family of the object's process before the first change; `None` if it is not a thread's object, or unknown.
    pub family: Option<ProcessFamily>,
}

impl JournalEntry {
    /// Can a thread have inherited a state that we set? A thread that is older than the journal cannot; it only happens
    /// to have the same state.
    pub fn may_be_inherited_by(&self, thread: ThreadKey) -> bool {
        thread.start_ticks >= self.since_ticks
    }
}

/// An intended change: the object, its current state, and its desired state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IntendedChange {
    /// The object that changes.
    pub object: JournalObject,
    /// State of the object before the change.
    pub current: ObjectState,
    /// State of the object after the change.
    pub target: ObjectState,
    /// See [`JournalEntry::follows_cpuset`].
    pub follows_cpuset: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum JournalRecord {
    Header {
        format: u32,
        boot_id: String,
        since_ticks: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        pid_namespace: Option<u64>,
    },
    Original {
        object: JournalObject,
        original: ObjectState,
        ours: Vec<ObjectState>,
        #[serde(default)]
        follows: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        family: Option<ProcessFamily>,
    },
    Update {
        object: JournalObject,
        ours: ObjectState,
    },
    /// The previous line is a fragment of a failed batch, none of whose changes was made.
    Torn {},
}

/// Version of the file's format.
const FORMAT: u32 = 1;
/// Maximum length of a journal; one of ten thousand threads has a few million bytes.
const MAX_BYTES: u64 = 256 << 20;
/// Size below which the file is never rewritten.
const COMPACT_FROM_BYTES: u64 = 256 << 10;

/// The journal cannot be used; nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// A file or directory that the journal, the guardian or a lock needs is unusable.
    #[error("restore journal {path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// An object's current state must be recorded but cannot be read.
    #[error("{object}: its current state cannot be read: {source}")]
    Original {
        /// The object, for the message.
        object: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another user may have written the file or directory.
    #[error("{path}: found {found}, expected {expected}: its content is ignored")]
    NotOurs {
        /// The file or directory.
        path: PathBuf,
        /// Actual owner, mode or kind of the file.
        found: String,
        /// The required owner, mode or kind.
        expected: String,
    },
    /// The last owner of the right to act has left a journal.
    #[error(
        "{path}: contains the journal of a crashed run; run cachemate restore --state-dir {path} first"
    )]
    LeftElsewhere {
        /// The state directory that contains it.
        path: PathBuf,
    },
    /// The journal's thread ids belong to another PID namespace, and name other threads or none here.
    #[error(
        "{path}: found PID namespace {found}, expected {expected}, that of this process: nothing is restored and the journal is kept; run cachemate restore in that namespace, or remove the journal if it has ended"
    )]
    OtherPidNamespace {
        /// The journal.
        path: PathBuf,
        /// The namespace in which it was written.
        found: u64,
        /// The namespace of this process.
        expected: u64,
    },
    /// See [`crate::act::actuator::Actuator::rejoin`].
    #[error(
        "the guardian restored the host because this process sent no heartbeat; nothing more is changed until a new guardian is running"
    )]
    Fenced,
    /// A journal of another format, which cannot be interpreted.
    #[error("restore journal {path}, line {line}: {what}")]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// The line's number, from 1.
        line: usize,
        /// The found and the expected format.
        what: String,
    },
}

impl JournalError {
    /// For `map_err`: an error of the file system at this path.
    pub(crate) fn io_error_at(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |source| JournalError::Io {
            path: path.to_path_buf(),
            source,
        }
    }
}

/// Contents of a journal file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RecoveredJournal {
    /// The boot in which it was written; `None` if the header is missing or cannot be read.
    pub boot_id: Option<String>,
    /// The PID namespace of its writer; `None` if the header is missing or invalid, or if an older version wrote it.
    pub pid_namespace: Option<u64>,
    /// Objects to restore.
    pub entries: BTreeMap<JournalObject, JournalEntry>,
    /// Lines that could not be read, although their changes may have been made; all other lines were read.
    pub damaged_lines: Vec<usize>,
    /// The last line was cut off: its change was never made.
    pub is_torn: bool,
}

/// The file, open for appending. Tests make it fail as disks do.
#[derive(Debug)]
struct JournalFile {
    file: File,
    #[cfg(test)]
    fails: tests::Fails,
}

impl JournalFile {
    fn new(file: File) -> Self {
        JournalFile {
            file,
            #[cfg(test)]
            fails: tests::NEXT.take(),
        }
    }

    fn append(&mut self, text: &[u8]) -> io::Result<()> {
        #[cfg(test)]
        if let Some(room) = self.fails.room_bytes.take() {
            self.file.write_all(&text[..room.min(text.len())])?;
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.file.write_all(text)
    }

    fn sync(&mut self) -> io::Result<()> {
        #[cfg(test)]
        if std::mem::take(&mut self.fails.sync) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.file.sync_data()
    }

    fn truncate(&mut self, bytes: u64) -> io::Result<()> {
        #[cfg(test)]
        if self.fails.cut {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.file.set_len(bytes)
    }

    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}

/// An open journal.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: JournalFile,
    valid_bytes: u64,
    /// Whether the valid bytes are followed by a fragment of a failed batch that could not be cut off.
    is_torn: bool,
    compacted_bytes: u64,
    boot_id: String,
    pid_namespace: Option<u64>,
    since_ticks: u64,
    entries: BTreeMap<JournalObject, JournalEntry>,
    /// Families of processes whose objects may be journaled, by pid.
    families: BTreeMap<i32, ProcessFamily>,
}

impl Journal {
    /// Name of the journal in the state directory.
    pub const FILE_NAME: &str = "restore.journal";
    /// Prefix of the names of quarantined journals with damaged lines.
    pub const QUARANTINE_PREFIX: &str = "damaged.journal";

    /// Starts a fresh journal, `since_ticks` clock ticks after the boot. An old journal must have been restored and
    /// removed before; an empty one (the disk was full when it was begun) is replaced.
    ///
    /// # Errors
    /// The file exists already, or cannot be created and synced.
    pub fn create(state_dir: &Path, boot_id: &str, since_ticks: u64) -> Result<Self, JournalError> {
        let path = state_dir.join(Self::FILE_NAME);
        let io_error = JournalError::io_error_at(&path);
        let open_new = || {
            OpenOptions::new()
                .append(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)
        };
        let file = match open_new() {
            Err(error)
                if error.kind() == io::ErrorKind::AlreadyExists && is_empty_journal(state_dir) =>
            {
                remove(&path)?;
                open_new()
            }
            other => other,
        };
        let mut journal = Journal {
            path: path.clone(),
            file: JournalFile::new(file.map_err(io_error)?),
            valid_bytes: 0,
            is_torn: false,
            compacted_bytes: 0,
            boot_id: boot_id.to_string(),
            pid_namespace: pid_namespace(),
            since_ticks,
            entries: BTreeMap::new(),
            families: BTreeMap::new(),
        };
        let outcome = journal
            .append(&[journal.header_record()], true)
            .and_then(|()| sync_dir(state_dir).map_err(io_error));
        if let Err(error) = outcome {
            // If even this fails, the next try finds a journal without objects.
            let _ = fs::remove_file(&path);
            return Err(error);
        }
        Ok(journal)
    }

    fn header_record(&self) -> JournalRecord {
        let (boot_id, pid_namespace) = (self.boot_id.clone(), self.pid_namespace);
        JournalRecord::Header {
            format: FORMAT,
            boot_id,
            since_ticks: self.since_ticks,
            pid_namespace,
        }
    }

    /// Remembers the families of the processes whose objects are about to change for the first time.
    pub fn add_families(
        &mut self,
        pids: impl IntoIterator<Item = i32>,
        read_family: impl Fn(i32) -> Option<ProcessFamily>,
    ) {
        for pid in pids {
            if !self.families.contains_key(&pid)
                && let Some(family) = read_family(pid)
            {
                self.families.insert(pid, family);
            }
        }
    }

    /// Must be called, and succeed, before any of `changes` is made. Originals of new objects are synced to disk
    /// first; new states of known objects are recorded without waiting for the disk.
    ///
    /// # Errors
    /// The disk is full or failing: none of the changes may be made. The journal stays usable.
    pub fn journal_changes(&mut self, changes: &[IntendedChange]) -> Result<(), JournalError> {
        let mut records = Vec::new();
        let mut has_new_object = false;
        let mut next_entries: BTreeMap<JournalObject, JournalEntry> = BTreeMap::new();
        for change in changes {
            let known_entry = next_entries
                .get(&change.object)
                .or_else(|| self.entries.get(&change.object))
                .cloned();
            let entry = match known_entry {
                Some(entry) if entry.applied_states.contains(&change.target) => continue,
                Some(mut entry) => {
                    entry.applied_states.push(change.target.clone());
                    records.push(JournalRecord::Update {
                        object: change.object.clone(),
                        ours: change.target.clone(),
                    });
                    entry
                }
                None => {
                    has_new_object = true;
                    let applied_states = vec![change.target.clone()];
                    let (original, follows) = (change.current.clone(), change.follows_cpuset);
                    let owner = change.object.owner();
                    let family = owner.and_then(|(pid, _)| self.families.get(&pid).copied());
                    records.push(JournalRecord::Original {
                        object: change.object.clone(),
                        original: original.clone(),
                        ours: applied_states.clone(),
                        follows,
                        family,
                    });
                    JournalEntry {
                        original,
                        applied_states,
                        since_ticks: self.since_ticks,
                        follows_cpuset: follows,
                        family,
                    }
                }
            };
            next_entries.insert(change.object.clone(), entry);
        }
        if !records.is_empty() {
            self.append(&records, has_new_object)?;
        }
        self.entries.append(&mut next_entries);
        Ok(())
    }

    /// Objects to restore.
    pub fn entries(&self) -> &BTreeMap<JournalObject, JournalEntry> {
        &self.entries
    }

    /// Drops objects that no longer exist or were restored; the file is rewritten once most of it concerns such
    /// objects.
    ///
    /// # Errors
    /// Rewriting failed; the old file is still whole and in use.
    pub fn retain(&mut self, is_kept: impl Fn(&JournalObject) -> bool) -> Result<(), JournalError> {
        self.entries.retain(|object, _| is_kept(object));
        let owners = self.entries.keys().filter_map(JournalObject::owner);
        let pids: BTreeSet<i32> = owners.map(|(pid, _)| pid).collect();
        self.families.retain(|pid, _| pids.contains(pid));
        let is_compaction_due = self.valid_bytes > COMPACT_FROM_BYTES.max(2 * self.compacted_bytes);
        if is_compaction_due {
            self.compact()
        } else {
            Ok(())
        }
    }

    fn compact(&mut self) -> Result<(), JournalError> {
        let io_error = JournalError::io_error_at(&self.path);
        let mut encoded_lines = Vec::new();
        append_line(&mut encoded_lines, &self.header_record());
        for (object, entry) in &self.entries {
            let (object, original, ours) = (
                object.clone(),
                entry.original.clone(),
                entry.applied_states.clone(),
            );
            append_line(
                &mut encoded_lines,
                &JournalRecord::Original {
                    object,
                    original,
                    ours,
                    follows: entry.follows_cpuset,
                    family: entry.family,
                },
            );
        }
        let new_path = self.path.with_extension("journal.new");
        // The remains of a crash are not a journal. The file stays open under its new name, because opening it again
        // could fail.
        let _ = fs::remove_file(&new_path);
        let file = OpenOptions::new()
            .append(true)
            .create_new(true)
            .mode(0o600)
            .open(&new_path)
            .map_err(io_error)?;
        let mut new_file = JournalFile::new(file);
        new_file
            .append(&encoded_lines)
            .and_then(|()| new_file.sync())
            .map_err(io_error)?;
        fs::rename(&new_path, &self.path).map_err(io_error)?;
        self.file = new_file;
        (self.valid_bytes, self.is_torn) = (encoded_lines.len() as u64, false);
        self.compacted_bytes = self.valid_bytes;
        sync_dir(self.path.parent().unwrap_or(Path::new("."))).map_err(io_error)
    }

    fn append(&mut self, records: &[JournalRecord], must_sync: bool) -> Result<(), JournalError> {
        let mut encoded_lines = Vec::new();
        if self.is_torn && self.file.truncate(self.valid_bytes).is_err() {
            encoded_lines.push(b'\n'); // ends the fragment, so that it does not hide the next line
            append_line(&mut encoded_lines, &JournalRecord::Torn {});
        }
        self.is_torn = false;
        records
            .iter()
            .for_each(|line| append_line(&mut encoded_lines, line));
        let outcome = self
            .file
            .append(&encoded_lines)
            .and_then(|()| if must_sync { self.file.sync() } else { Ok(()) });
        match outcome.and_then(|()| self.file.size_bytes()) {
            Ok(bytes) => {
                self.valid_bytes = bytes;
                Ok(())
            }
            Err(source) => {
                self.is_torn = self.file.truncate(self.valid_bytes).is_err();
                Err(JournalError::Io {
                    path: self.path.clone(),
                    source,
                })
            }
        }
    }

    /// Rewrites the file, even if it was removed meanwhile, with these objects only.
    ///
    /// # Errors
    /// The disk fails.
    pub fn rewrite(
        &mut self,
        is_kept: impl Fn(&JournalObject) -> bool,
    ) -> Result<(), JournalError> {
        self.entries.retain(|object, _| is_kept(object));
        self.compact()
    }

    /// Removes the file after everything has been restored.
    ///
    /// # Errors
    /// The file could not be removed; the next start will restore again, which changes nothing.
    pub fn remove(&self) -> Result<(), JournalError> {
        remove(&self.path)
    }
}

/// Opens a file whose content will be trusted: it must belong to this user, and no other user may write to it. `None`
/// if it does not exist.
fn open_trusted(path: &Path) -> Result<Option<File>, JournalError> {
    let io_error = JournalError::io_error_at(path);
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(io_error(source)),
    };
    let metadata = file.metadata().map_err(io_error)?;
    check_ownership(path, &metadata)?;
    if !metadata.is_file() {
        let (found, expected) = (
            format!("{:?}", metadata.file_type()),
            "a plain file".to_string(),
        );
        return Err(JournalError::NotOurs {
            path: path.to_path_buf(),
            found,
            expected,
        });
    }
    Ok(Some(file))
}

/// Checks that a file belongs to this user, and that no other user may write to it.
///
/// # Errors
/// The file belongs to another user, or another user may write to it.
pub(crate) fn check_ownership(path: &Path, metadata: &fs::Metadata) -> Result<(), JournalError> {
    let own_user = rustix::process::geteuid().as_raw();
    let (found, expected) = match (metadata.uid(), metadata.mode() & 0o7777) {
        (owner, _) if owner != own_user => (format!("owner {owner}"), format!("owner {own_user}")),
        (_, mode) if mode & 0o022 != 0 => (
            format!("mode {mode:o}"),
            "one that only its owner may write to".to_string(),
        ),
        _ => return Ok(()),
    };
    Err(JournalError::NotOurs {
        path: path.to_path_buf(),
        found,
        expected,
    })
}

/// Reads a journal left behind; `None` if there is none.
///
/// # Errors
/// The file cannot be read, belongs to another user, or has a newer format.
pub fn read_left_behind(state_dir: &Path) -> Result<Option<RecoveredJournal>, JournalError> {
    let path = state_dir.join(Journal::FILE_NAME);
    let Some(file) = open_trusted(&path)? else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(JournalError::io_error_at(&path))?;
    if bytes.len() as u64 > MAX_BYTES {
        let (found, expected) = (
            format!("more than {MAX_BYTES} bytes"),
            "a journal".to_string(),
        );
        return Err(JournalError::NotOurs {
            path,
            found,
            expected,
        });
    }
    parse(&path, &bytes).map(Some)
}

/// Parses the bytes of a journal; errors name it `path`.
///
/// # Errors
/// The journal has another format.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<RecoveredJournal, JournalError> {
    let mut recovered_journal = RecoveredJournal::default();
    let mut header_since_ticks = 0;
    for (index, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let has_newline = line.ends_with(b"\n");
        let record = if has_newline {
            parse_line(line)
        } else {
            parse_last_line(line)
        };
        match record {
            None if has_newline => recovered_journal.damaged_lines.push(index + 1),
            None => recovered_journal.is_torn = true,
            Some(JournalRecord::Header { format, .. }) if format != FORMAT => {
                let problem = format!("found format {format}, expected {FORMAT}");
                return Err(JournalError::Damaged {
                    path: path.to_path_buf(),
                    line: index + 1,
                    what: problem,
                });
            }
            Some(JournalRecord::Header {
                boot_id,
                since_ticks,
                pid_namespace,
                ..
            }) => {
                (recovered_journal.boot_id, header_since_ticks) = (Some(boot_id), since_ticks);
                recovered_journal.pid_namespace = pid_namespace;
            }
            // A second original: the first one was in a failed batch, or its object was dropped since.
            Some(JournalRecord::Original {
                object,
                original,
                ours,
                follows,
                family,
            }) => {
                let (since_ticks, applied_states, follows_cpuset) =
                    (header_since_ticks, ours, follows);
                let entry = JournalEntry {
                    original,
                    applied_states,
                    since_ticks,
                    follows_cpuset,
                    family,
                };
                recovered_journal.entries.insert(object, entry);
            }
            Some(JournalRecord::Update { object, ours }) => {
                if let Some(entry) = recovered_journal.entries.get_mut(&object) {
                    entry.applied_states.push(ours);
                }
            }
            Some(JournalRecord::Torn {}) => {
                recovered_journal
                    .damaged_lines
                    .pop_if(|line| *line == index);
            }
        }
    }
    Ok(recovered_journal)
}

/// Does this journal name no object, so that nothing was changed after it was begun?
fn is_empty_journal(state_dir: &Path) -> bool {
    read_left_behind(state_dir).is_ok_and(|journal| {
        journal
            .is_some_and(|journal| journal.entries.is_empty() && journal.damaged_lines.is_empty())
    })
}

/// Parses a last line without a newline: the line may be otherwise whole, or only its end was damaged.
fn parse_last_line(line: &[u8]) -> Option<JournalRecord> {
    let read_completed = |text: &[u8]| parse_line(&[text, b"\n"].concat());
    read_completed(line).or_else(|| read_completed(line.split_last()?.1))
}

fn remove(path: &Path) -> Result<(), JournalError> {
    let io_error = JournalError::io_error_at(path);
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(error)),
        _ => sync_dir(path.parent().unwrap_or(Path::new("."))).map_err(io_error),
    }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn append_line(encoded_lines: &mut Vec<u8>, record: &JournalRecord) {
    let json = serde_json::to_string(record)
        .expect("records contain only maps with string keys, and no serializer that fails");
    let checksum = xxhash_rust::xxh3::xxh3_64(json.as_bytes());
    encoded_lines.extend_from_slice(format!("{checksum:016x} {json}\n").as_bytes());
}

fn parse_line(line: &[u8]) -> Option<JournalRecord> {
    let text = std::str::from_utf8(line.strip_suffix(b"\n")?).ok()?;
    let (sum, json) = text.split_once(' ')?;
    (u64::from_str_radix(sum, 16).ok()? == xxhash_rust::xxh3::xxh3_64(json.as_bytes()))
        .then_some(())?;
    serde_json::from_str(json).ok()
}

#[cfg(test)]
mod tests;
