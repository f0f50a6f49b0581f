//! The few calls by which the live machine reads and changes a host, behind one trait that tests
//! implement with a fake host or with faults. No other code in this crate calls the kernel to
//! change anything.
//!
//! What cachemate promises about a host is a promise about calls that fail: a full disk, a thread
//! that exits between two reads, a mask that the kernel refuses. None of these can be arranged on a
//! real kernel at every place where it could happen. So all of them pass through [`Kernel`].
//!
//! For example, the test `a_fault_at_any_call_loses_no_original` counts the calls of a run, repeats
//! the run once for each of them with that call failing, and checks each time that a restore brings
//! back every original.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use cachemate_core::CpuSet;
use cachemate_files::{DirAccess, TrustedDir};
use rustix::fs::{Mode, OFlags};

use crate::act::colors::reference_set::BASE;
use crate::safety::fence::Fence;

pub mod group_dirs;
pub mod group_moves;
pub mod lineage;
pub(crate) mod memory_map;
pub mod process_events;
pub(crate) mod refused_calls;
pub mod scheduling;
pub(crate) mod systemd_units;
pub(crate) mod text_files;

use group_moves::GroupMoves;
use lineage::{Lineage, RecordedAncestry};
use process_events::ProcessEventSubscription;
use scheduling::SchedParams;

/// Locks a value. A poisoned lock only means that another thread panicked: neither a kernel nor a table that is
/// replaced entry by entry has a state that the panic could leave inconsistent.
pub fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the exclusive flock of a file. Returns false if another process still holds it after `max_wait`.
///
/// # Errors
/// The kernel's error.
pub(crate) fn lock_file(file: &impl AsFd, max_wait: Duration) -> io::Result<bool> {
    let lock = || rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    let deadline = Instant::now() + max_wait;
    loop {
        match rustix::io::retry_on_intr(lock) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The time of a clock, in nanoseconds.
pub fn clock_ns(clock: rustix::time::ClockId) -> u64 {
    let time = rustix::time::clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Identity of a thread. Thread ids are reused, but id and start time together are unique within one boot.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize,
)]
pub struct ThreadKey {
    /// Thread id as returned by gettid(2); for a process's first thread it equals the process id.
    pub tid: i32,
    /// Field 22 of `/proc/TID/stat`: clock ticks since boot.
    pub start_ticks: u64,
}

/// Selected fields of `/proc/TID/stat`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ThreadStat {
    /// Thread id and start time.
    pub key: ThreadKey,
    /// Parent process.
    pub parent: i32,
    /// Process group.
    pub group: i32,
    /// Session.
    pub session: i32,
    /// Command name as the kernel stores it: at most 15 bytes.
    pub name: String,
    /// State letter: `R` running, `S` sleeping, `D` uninterruptible, `Z` zombie, and so on.
    pub state: char,
    /// Nice value, from -20 (highest weight) to 19.
    pub nice: i32,
    /// Scheduling class, `SCHED_*`: 0 other, 1 fifo, 2 rr, 3 batch, 5 idle, 6 deadline.
    pub policy: u32,
    /// Priority of a real-time thread; 0 for any other thread.
    pub priority: u32,
    /// Processor on which it last ran.
    pub cpu: u32,
    /// Page faults so far that did not wait for a disk.
    pub minor_faults: u64,
    /// Page faults so far that waited for a disk.
    pub major_faults: u64,
    /// The kernel's `PF_*` flags; bit 0x00200000 marks kernel threads.
    pub flags: u64,
    /// Number of threads in its process; 0 if the process has exited.
    pub threads: u32,
}

/// A lock on a directory by flock(2), held until this value is dropped.
#[derive(Debug, Default)]
pub struct DirLock {
    _file: Option<fs::File>,
}

/// A file that is read repeatedly, and stays open if the host has descriptors to spare.
#[derive(Clone, Debug)]
pub struct KeptFile {
    path: PathBuf,
    file: Option<Arc<fs::File>>,
}

impl KeptFile {
    /// A file that every read opens anew.
    pub fn new(path: PathBuf) -> Self {
        KeptFile { path, file: None }
    }
}

/// The calls that read and change a host. Errors are the kernel's own; callers add the name of the object.
pub trait Kernel {
    /// The id of this process on that host. A made-up host says one of its own: the tests' real id may be that of one
    /// of its threads, which would then be taken for ourselves.
    fn own_pid(&self) -> i32 {
        std::process::id() as i32
    }
    /// Reads the text of a small file below the root.
    fn read(&self, path: &Path) -> io::Result<String>;
    /// Opens a small file below the root to read it again and again. A file that is missing is an error of the reads.
    fn keep_open(&self, path: PathBuf) -> KeptFile {
        KeptFile::new(path)
    }
    /// Reads the current text of a file that was kept open.
    fn read_kept(&self, kept_file: &KeptFile) -> io::Result<String> {
        self.read(&kept_file.path)
    }
    /// Writes the whole text by one `write(2)`, as kernel files require; a short write is an error.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
    /// Makes the owner of the control group with this control file set the group's CPUs. Returns false if the group has
    /// no owner that accepts requests.
    fn set_cpus_by_owner(&self, _cpus_file: &Path, _cpus: &str) -> io::Result<bool> {
        Ok(false)
    }
    /// Creates a directory. The directory must not exist, and its parent must.
    fn make_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty directory. A control group counts as empty if it has no members and no child groups.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Names in a directory, sorted.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;
    /// Does a file or directory exist? Its content is not read.
    fn exists(&self, path: &Path) -> io::Result<bool> {
        let is_missing =
            |error: &io::Error| is_gone(error) || error.kind() == io::ErrorKind::NotADirectory;
        match self
            .read(path)
            .map(drop)
            .or_else(|_| self.list(path).map(drop))
        {
            Ok(()) => Ok(true),
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
    /// The user to whom a file or directory belongs; a link is not followed.
    fn owner(&self, _path: &Path) -> io::Result<u32> {
        Ok(0)
    }
    /// Takes the exclusive flock of a directory. If another process still holds it after `max_wait`, the error is
    /// `WouldBlock` and names the holders.
    fn lock_dir(&self, path: &Path, max_wait: Duration) -> io::Result<DirLock>;
    /// Sets the allowed CPUs of one thread. The kernel silently drops CPUs outside its cpuset.
    fn set_affinity(&self, tid: i32, cpus: &CpuSet) -> io::Result<()>;
    /// Sets the nice value of this thread only, from -20 (the highest weight) to 19.
    fn set_nice(&self, tid: i32, nice: i32) -> io::Result<()>;
    /// Sets a thread's class and its parameters, but not its nice value.
    fn set_scheduling(&self, tid: i32, params: &SchedParams) -> io::Result<()>;
    /// Sets a class without parameters (`SCHED_OTHER`, `SCHED_BATCH`, `SCHED_IDLE`).
    fn set_policy(&self, tid: i32, policy: u32) -> io::Result<()> {
        self.set_scheduling(tid, &SchedParams::from_policy(policy))
    }

    /// Sets the fence, which prevents every later change once it is raised; `None` if there is no guardian.
    fn set_fence(&self, _: Option<Arc<Fence>>) {}

    /// The random id of this boot. Thread ids and start times are valid in one boot only.
    fn boot_id(&self) -> io::Result<String> {
        Ok(self
            .read(Path::new("/proc/sys/kernel/random/boot_id"))?
            .trim()
            .to_string())
    }
    /// Clock ticks since boot, the unit of start times (100 per second in user space on any host).
    fn ticks_since_boot(&self) -> io::Result<u64> {
        let path = Path::new("/proc/uptime");
        let text = self.read(path)?;
        let seconds = text
            .split_ascii_whitespace()
            .next()
            .and_then(|word| word.parse::<f64>().ok());
        seconds
            .map(|seconds| (seconds * 100.0) as u64)
            .ok_or_else(|| invalid_file(path, "not the form of an uptime line"))
    }
    /// Affinity as it was set, including offline CPUs, which `sched_getaffinity` hides.
    fn affinity(&self, tid: i32) -> io::Result<CpuSet> {
        let path = PathBuf::from(format!("/proc/{tid}/status"));
        let text = self.read(&path)?;
        let allowed_list = text_files::field(&text, "Cpus_allowed_list")
            .ok_or_else(|| invalid_file(&path, "no line 'Cpus_allowed_list:'"))?;
        allowed_list
            .parse()
            .map_err(|error| invalid_file(&path, format!("Cpus_allowed_list: {error}")))
    }
    /// Does the thread still have this affinity? The check runs for every placed thread in every window, so a host
    /// may implement it faster than by reading the mask.
    fn has_affinity(&self, tid: i32, cpus: &CpuSet) -> io::Result<bool> {
        Ok(self.affinity(tid)? == *cpus)
    }
    /// Reads `/proc/TID/stat` of an existing thread, which may be a zombie.
    fn stat(&self, tid: i32) -> io::Result<ThreadStat> {
        read_stat(self, Path::new(&format!("/proc/{tid}/stat")))
    }
    /// Reads `/proc/PID/stat`, whose counts are sums over all threads: for a process with one thread it costs less.
    fn process_stat(&self, pid: i32) -> io::Result<ThreadStat> {
        self.stat(pid)
    }
    /// Class of a thread and its parameters. The default implementation knows only the fields that the stat line
    /// contains.
    fn scheduling(&self, tid: i32) -> io::Result<SchedParams> {
        let stat = self.stat(tid)?;
        Ok(SchedParams {
            priority: stat.priority,
            ..SchedParams::from_policy(stat.policy)
        })
    }
    /// Processor time of all threads of a process so far. Ended threads are included if the kernel counts them.
    fn run_time_ns(&self, pid: i32) -> io::Result<u64> {
        sum_run_times(self, pid)
    }
    /// Subscribes to the events of processes.
    fn process_events(&self) -> io::Result<ProcessEventSubscription> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Subscribes to the moves of processes between control groups.
    fn group_moves(&self) -> io::Result<GroupMoves> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Records the births of processes from the first call on, if the host reports them. Later calls take the reports
    /// that have come since, and must not be far apart, because the kernel keeps a bounded number of them.
    fn record_births(&self) {}
    /// The ancestors of a living process whose birth was recorded; `None` if it was not.
    fn recorded_ancestry(&self, _pid: i32) -> Option<RecordedAncestry> {
        None
    }
    /// Thread ids of a process, ascending.
    fn threads(&self, pid: i32) -> io::Result<Vec<i32>> {
        Ok(parse_ids(
            self.list(&PathBuf::from(format!("/proc/{pid}/task")))?,
        ))
    }
    /// Ids of all processes, ascending.
    fn processes(&self) -> io::Result<Vec<i32>> {
        Ok(parse_ids(self.list(Path::new("/proc"))?))
    }
    /// Reads the stat line of a thread.
    ///
    /// # Errors
    /// It has exited, or its id was reused (`ESRCH`); or the kernel's error.
    fn stat_of(&self, thread: ThreadKey) -> io::Result<ThreadStat> {
        let stat = self.stat(thread.tid)?;
        if stat.key == thread {
            Ok(stat)
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
    }
    /// Does this thread still exist, and is it not a zombie?
    ///
    /// # Errors
    /// The query failed (for example, no descriptor or memory was left). The thread's state is unknown, so callers
    /// treat the thread as alive.
    fn is_alive(&self, thread: ThreadKey) -> io::Result<bool> {
        match self.stat(thread.tid) {
            Ok(stat) => Ok(stat.key == thread && !matches!(stat.state, 'Z' | 'X')),
            Err(error) if is_gone(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Does the error mean that the thread or file no longer exists? Only `ENOENT` and `ESRCH` do; after any other error,
/// the state is unknown.
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// The result of the call, or `None` if its object does not exist.
pub(crate) fn none_if_missing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The PID namespace of this process, by its inode; `None` if the kernel does not report it. Thread ids are valid
/// only within one namespace.
pub(crate) fn pid_namespace() -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self/ns/pid")
        .ok()
        .map(|namespace| namespace.ino())
}

fn read_stat(kernel: &(impl Kernel + ?Sized), path: &Path) -> io::Result<ThreadStat> {
    parse_stat(&kernel.read(path)?).ok_or_else(|| invalid_file(path, "not the form of a stat line"))
}

/// Sum of the processor times of a process's threads, by their `schedstat` files.
fn sum_run_times(kernel: &(impl Kernel + ?Sized), pid: i32) -> io::Result<u64> {
    let mut total_ns = 0u64;
    for tid in kernel.threads(pid)? {
        let path = PathBuf::from(format!("/proc/{pid}/task/{tid}/schedstat"));
        let thread_ns = kernel
            .read(&path)?
            .split_ascii_whitespace()
            .next()
            .and_then(|word| word.parse::<u64>().ok());
        total_ns = total_ns.saturating_add(
            thread_ns.ok_or_else(|| invalid_file(&path, "not the form of a schedstat line"))?,
        );
    }
    Ok(total_ns)
}

fn parse_ids(names: Vec<String>) -> Vec<i32> {
    let mut ids: Vec<i32> = names.iter().filter_map(|name| name.parse().ok()).collect();
    ids.sort_unstable();
    ids
}

fn invalid_file(path: &Path, problem: impl std::fmt::Display) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{}: {problem}", path.display()),
    )
}

/// Parses `/proc/TID/stat`; the command name is in parentheses and may itself contain spaces and parentheses.
fn parse_stat(line: &str) -> Option<ThreadStat> {
    let (tid, name_and_fields) = line.split_once(" (")?;
    let (name, fields_text) = name_and_fields.rsplit_once(") ")?;
    let fields: Vec<&str> = fields_text.split_ascii_whitespace().collect();
    // proc(5) numbers fields from 1; the state, field 3, is the first one after the name.
    let parse_field = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(ThreadStat {
        key: ThreadKey {
            tid: tid.trim().parse().ok()?,
            start_ticks: parse_field(22)?,
        },
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        session: fields.get(3)?.parse().ok()?,
        name: name.to_string(),
        state: fields.first()?.chars().next()?,
        nice: fields.get(16)?.parse().ok()?,
        policy: parse_field(41)?.try_into().ok()?,
        priority: parse_field(40)?.try_into().ok()?,
        cpu: parse_field(39)?.try_into().ok()?,
        minor_faults: parse_field(10)?,
        major_faults: parse_field(12)?,
        flags: parse_field(9)?,
        threads: parse_field(20)?.try_into().ok()?,
    })
}

/// Descriptors that cached files leave free for the journal, a guardian, connections, and restoring the host.
const SPARE_DESCRIPTORS: u64 = 64;

/// Files may be kept open while descriptors have numbers below this part of the limit.
const KEPT_DESCRIPTORS_DIVISOR: u64 = 4;

/// Maximum size of a kernel file; the mounts and maps of a large host have a few million bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The processes that hold flocks on a file, as `/proc/locks` lists them, for messages. Any user who may open the
/// file for reading can hold such a lock.
fn lock_holders(kernel: &dyn Kernel, file: &fs::Metadata) -> String {
    use std::os::unix::fs::MetadataExt;
    let device = file.dev();
    let inode_id = format!(
        "{:02x}:{:02x}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device),
        file.ino()
    );
    let text = kernel.read(Path::new("/proc/locks")).unwrap_or_default();
    let holders = text.lines().filter_map(|line| {
        // In the line of a process that waits for the lock, an arrow follows the number.
        let [_, "FLOCK", _, _, pid, locked_file, ..] =
            line.split_ascii_whitespace().collect::<Vec<_>>()[..]
        else {
            return None;
        };
        let pid = pid
            .parse::<i32>()
            .ok()
            .filter(|&pid| pid > 0 && locked_file == inode_id)?;
        Some(
            kernel
                .stat(pid)
                .map_or_else(|_| pid.to_string(), |stat| format!("{pid} ({})", stat.name)),
        )
    });
    let holders: Vec<String> = holders.take(MAX_NAMED_HOLDERS).collect();
    match holders.as_slice() {
        [] => "another process holds the lock, and /proc/locks does not name it".to_string(),
        _ => format!("the lock is held by process {}", holders.join(", ")),
    }
}

/// Maximum number of holders in a message, because any number of processes can share a lock.
const MAX_NAMED_HOLDERS: usize = 4;

/// Is the process running out of descriptors? A new descriptor gets the lowest free number, so a high number means
/// that few are left.
pub(crate) fn is_descriptor_scarce(file: &fs::File) -> bool {
    use std::os::fd::AsRawFd;
    descriptor_limit().is_some_and(|limit| file.as_raw_fd() as u64 + SPARE_DESCRIPTORS > limit)
}

/// Maximum number of descriptors; `None` if unlimited.
fn descriptor_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// Programs that own control groups.
pub trait GroupOwner: std::fmt::Debug + Send + Sync {
    /// Makes the owner of the group with this control file set these CPUs. Returns false if the group has no owner that
    /// accepts requests.
    ///
    /// # Errors
    /// The owner refuses or does not answer.
    fn set_cpus(&self, host: &LinuxHost, cpus_file: &Path, cpus: &str) -> io::Result<bool>;
}

/// The host itself, or a tree that looks like a host. Files are read below `root`; scheduling calls go to the running
/// kernel.
#[derive(Clone, Debug)]
pub struct LinuxHost {
    root: PathBuf,
    fence: Arc<RwLock<Option<Arc<Fence>>>>,
    group_owners: Option<Arc<dyn GroupOwner>>,
    births: Arc<Mutex<Option<BirthRecord>>>,
}

/// The births since this process began to record them.
#[derive(Debug)]
struct BirthRecord {
    events: ProcessEventSubscription,
    lineage: Lineage,
}

impl BirthRecord {
    fn take_events(&mut self) {
        let lineage = &mut self.lineage;
        if self
            .events
            .deliver_events(|event| lineage.record(event))
            .is_err()
        {
            self.lineage.forget();
        }
    }
}

impl LinuxHost {
    /// A host with this root, which is `/` on a live host.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        LinuxHost {
            root: root.into(),
            fence: Arc::default(),
            group_owners: None,
            births: Arc::default(),
        }
    }
    /// This host, with owners of control groups that are asked to change a group before its file is written.
    #[must_use]
    pub fn with_owners(self, owners: impl GroupOwner + 'static) -> Self {
        LinuxHost {
            group_owners: Some(Arc::new(owners)),
            ..self
        }
    }
    /// Checks the fence. Callers check it immediately before every change.
    fn check_fence(&self) -> io::Result<()> {
        let fence = self.fence.read().unwrap_or_else(PoisonError::into_inner);
        match &*fence {
            Some(fence) if fence.is_raised() => Err(io::Error::other(
                "the guardian has restored the host meanwhile",
            )),
            _ => Ok(()),
        }
    }
    /// The path below the root.
    pub(crate) fn path_below(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
    /// Opens a file. In the directory of colors, a file that another user could have created or changed is refused.
    fn open(&self, path: &Path, flags: OFlags) -> io::Result<fs::File> {
        match path.strip_prefix(BASE) {
            Ok(relative_path) => {
                let is_written = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
                let access = if is_written {
                    DirAccess::ReadWrite
                } else {
                    DirAccess::ReadOnly
                };
                TrustedDir::open_anchored(&self.path_below(Path::new(BASE)), access)?
                    .open_file(relative_path, flags)
            }
            Err(_) => {
                let open_call = || {
                    rustix::fs::open(
                        self.path_below(path),
                        flags | OFlags::CLOEXEC,
                        Mode::empty(),
                    )
                };
                Ok(rustix::io::retry_on_intr(open_call)?.into())
            }
        }
    }
}

impl Kernel for LinuxHost {
    fn read(&self, path: &Path) -> io::Result<String> {
        use std::io::Read;
        let mut file = self.open(path, OFlags::RDONLY)?;
        // The size is not queried first, because these files report none. Most are shorter than this buffer.
        let (mut buffer, mut bytes) = ([0; 4096], Vec::new());
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => bytes.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if bytes.len() as u64 > MAX_FILE_BYTES {
                let problem = format!(
                    "found more than {MAX_FILE_BYTES} bytes, expected a file of the kernel"
                );
                return Err(invalid_file(path, problem));
            }
        }
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|odd| String::from_utf8_lossy(odd.as_bytes()).into_owned()))
    }
    fn keep_open(&self, path: PathBuf) -> KeptFile {
        use std::os::fd::AsRawFd;
        // Counters and connections need descriptors more than this does.
        let is_affordable = |file: &fs::File| {
            descriptor_limit()
                .is_none_or(|limit| (file.as_raw_fd() as u64) < limit / KEPT_DESCRIPTORS_DIVISOR)
        };
        let file = self
            .open(&path, OFlags::RDONLY)
            .ok()
            .filter(is_affordable)
            .map(Arc::new);
        KeptFile { path, file }
    }
    fn read_kept(&self, kept_file: &KeptFile) -> io::Result<String> {
        use std::os::unix::fs::FileExt;
        let Some(file) = &kept_file.file else {
            return self.read(&kept_file.path);
        };
        let mut bytes = [0; 4096];
        match file.read_at(&mut bytes, 0)? {
            length if length == bytes.len() => self.read(&kept_file.path),
            length => Ok(String::from_utf8_lossy(&bytes[..length]).into_owned()),
        }
    }
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        use std::io::Write;
        self.check_fence()?;
        // Links are not followed, because a link here can only be an attempt to have another file overwritten.
        let mut file = self.open(path, OFlags::WRONLY | OFlags::NOFOLLOW)?;
        let written_bytes = file.write(text.as_bytes())?;
        if written_bytes == text.len() {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::WriteZero,
            format!("{written_bytes} of {} bytes written", text.len()),
        ))
    }
    fn set_cpus_by_owner(&self, cpus_file: &Path, cpus: &str) -> io::Result<bool> {
        self.check_fence()?;
        self.group_owners
            .as_ref()
            .map_or(Ok(false), |owners| owners.set_cpus(self, cpus_file, cpus))
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.check_fence()?;
        fs::create_dir(self.path_below(path))
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.check_fence()?;
        fs::remove_dir(self.path_below(path))
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        if let Ok(relative_path) = path.strip_prefix(BASE) {
            let base =
                TrustedDir::open_anchored(&self.path_below(Path::new(BASE)), DirAccess::ReadOnly)?;
            let mut names = base.open_dir(relative_path)?.names()?;
            names.sort_unstable();
            return Ok(names);
        }
        let entries = fs::read_dir(self.path_below(path))?;
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        Ok(names)
    }
    fn lock_dir(&self, path: &Path, max_wait: Duration) -> io::Result<DirLock> {
        // The descriptor is closed on exec, so that a guardian or a started program does not keep the lock.
        let file = fs::File::open(self.path_below(path))?;
        if lock_file(&file, max_wait)? {
            Ok(DirLock { _file: Some(file) })
        } else {
            let holders = lock_holders(self, &file.metadata()?);
            Err(io::Error::new(io::ErrorKind::WouldBlock, holders))
        }
    }
    fn exists(&self, path: &Path) -> io::Result<bool> {
        match fs::symlink_metadata(self.path_below(path)) {
            Ok(_) => Ok(true),
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::NotADirectory => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
    fn owner(&self, path: &Path) -> io::Result<u32> {
        use std::os::unix::fs::MetadataExt;
        Ok(fs::symlink_metadata(self.path_below(path))?.uid())
    }
    fn set_fence(&self, fence: Option<Arc<Fence>>) {
        *self.fence.write().unwrap_or_else(PoisonError::into_inner) = fence;
    }
    fn process_events(&self) -> io::Result<ProcessEventSubscription> {
        if self.root != Path::new("/") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        ProcessEventSubscription::subscribe()
    }
    fn record_births(&self) {
        let mut births = lock(&self.births);
        match &mut *births {
            Some(record) => record.take_events(),
            None => {
                let (Ok(events), Ok(since_ticks)) =
                    (self.process_events(), self.ticks_since_boot())
                else {
                    return;
                };
                let lineage = Lineage::new(since_ticks);
                *births = Some(BirthRecord { events, lineage });
            }
        }
    }
    fn recorded_ancestry(&self, pid: i32) -> Option<RecordedAncestry> {
        let mut births = lock(&self.births);
        let record = births.as_mut()?;
        record.take_events();
        record.lineage.ancestry_of(pid)
    }
    fn group_moves(&self) -> io::Result<GroupMoves> {
        if self.root != Path::new("/") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let hierarchies = text_files::group_hierarchies(self)?.into_iter();
        GroupMoves::watch(hierarchies.map(|hierarchy| hierarchy.mount).collect())
    }
    fn stat(&self, tid: i32) -> io::Result<ThreadStat> {
        // The counts in `/proc/TID/stat` are sums over all threads of the process, at a cost for each of them.
        let dir = if self.root == Path::new("/") {
            format!("/proc/{tid}/task/{tid}")
        } else {
            format!("/proc/{tid}")
        };
        read_stat(self, &Path::new(&dir).join("stat"))
    }
    fn process_stat(&self, pid: i32) -> io::Result<ThreadStat> {
        read_stat(self, Path::new(&format!("/proc/{pid}/stat")))
    }
    fn run_time_ns(&self, pid: i32) -> io::Result<u64> {
        if self.root != Path::new("/") {
            return sum_run_times(self, pid);
        }
        // The clock of a process, as clock_getcpuclockid(3) forms it: one call instead of a file of each thread.
        let clock = (!pid << 3) | 2;
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the kernel writes a live structure.
        let status = unsafe { libc::clock_gettime(clock, &raw mut time) };
        if status < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
    }
    fn set_affinity(&self, tid: i32, cpus: &CpuSet) -> io::Result<()> {
        // The mask is built manually, because rustix and libc stop at 1 024 CPUs and the system call does not.
        let word_count = cpus.iter().last().map_or(1, |last| last as usize / 64 + 1);
        let mut mask = vec![0u64; word_count];
        cpus.iter()
            .for_each(|cpu| mask[cpu as usize / 64] |= 1 << (cpu % 64));
        self.check_fence()?;
        // SAFETY: the kernel reads `word_count * 8` bytes from a live vector of that size.
        let status = unsafe {
            libc::syscall(
                libc::SYS_sched_setaffinity,
                tid,
                word_count * 8,
                mask.as_ptr(),
            )
        };
        if status < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
    fn has_affinity(&self, tid: i32, cpus: &CpuSet) -> io::Result<bool> {
        // The system call takes a microsecond, whereas the file has sixty lines. The call hides offline CPUs, so the
        // file is read if the two masks differ.
        let mut mask = [0u64; 128];
        // SAFETY: the kernel writes at most the stated size into a live array; it returns the number of written bytes.
        let written_bytes = unsafe {
            libc::syscall(
                libc::SYS_sched_getaffinity,
                tid,
                size_of_val(&mask),
                mask.as_mut_ptr(),
            )
        };
        if written_bytes < 0 {
            return Err(io::Error::last_os_error());
        }
        let is_allowed = |cpu: u32| {
            mask.get(cpu as usize / 64)
                .is_some_and(|word| word >> (cpu % 64) & 1 == 1)
        };
        let allowed_count: u32 = mask.iter().map(|word| word.count_ones()).sum();
        if cpus.iter().all(is_allowed) && allowed_count == cpus.count() {
            return Ok(true);
        }
        Ok(self.affinity(tid)? == *cpus)
    }
    fn set_nice(&self, tid: i32, nice: i32) -> io::Result<()> {
        self.check_fence()?;
        // SAFETY: no memory is passed. PRIO_PROCESS with a thread id concerns that thread only (setpriority(2)).
        let status = unsafe { libc::setpriority(libc::PRIO_PROCESS, tid as libc::id_t, nice) };
        if status < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
    fn scheduling(&self, tid: i32) -> io::Result<SchedParams> {
        scheduling::read_params(tid)
    }
    fn set_scheduling(&self, tid: i32, params: &SchedParams) -> io::Result<()> {
        self.check_fence()?;
        scheduling::write_params(tid, params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a stat line parsed correctly if the command name has spaces and parentheses?
    #[test]
    fn a_stat_line_is_parsed_with_any_command_name() {
        let line = "42 (a) b (c) S 7 42 42 0 -1 4194560 11 0 2 0 30 4 0 0 20 5 3 0 987654 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 17 3 0 0";
        let stat = parse_stat(line).unwrap();
        assert_eq!(
            (stat.key, stat.parent, stat.state),
            (
                ThreadKey {
                    tid: 42,
                    start_ticks: 987_654
                },
                7,
                'S'
            )
        );
        assert_eq!((stat.name.as_str(), stat.nice, stat.cpu), ("a) b (c", 5, 3));
        assert_eq!(
            (stat.minor_faults, stat.major_faults, stat.threads),
            (11, 2, 3)
        );
        assert_eq!(parse_stat("42 (a"), None);
    }

    /// Does the live host report this very thread, and can its affinity be set to its current value?
    #[test]
    fn the_live_host_reports_this_thread_and_sets_its_affinity() {
        let host = LinuxHost::new("/");
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        let stat = host.stat(tid).unwrap();
        assert!(host.is_alive(stat.key).unwrap());
        let affinity_before = host.affinity(tid).unwrap();
        host.set_affinity(tid, &affinity_before).unwrap();
        assert_eq!(host.affinity(tid).unwrap(), affinity_before);
        assert!(
            host.has_affinity(tid, &affinity_before).unwrap()
                && !host.has_affinity(tid, &CpuSet::default()).unwrap()
        );
        assert!(
            !host
                .is_alive(ThreadKey {
                    start_ticks: stat.key.start_ticks + 1,
                    ..stat.key
                })
                .unwrap()
        );
    }
}
