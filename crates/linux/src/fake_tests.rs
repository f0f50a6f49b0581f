//! A fake host for tests: threads and files in memory, and faults on any call that changes something.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use cachemate_core::CpuSet;

use crate::act::actuator::GuardianCommand;
use crate::kernel::scheduling::{FIFO, RR, SchedParams};
use crate::kernel::{DirLock, Kernel, ThreadKey};
use crate::safety::journal::{JournalEntry, ObjectState};

/// Writes files with their texts below a directory, with the directories above them.
pub(crate) fn write_tree<'a>(root: &Path, files: impl IntoIterator<Item = (&'a str, &'a str)>) {
    for (path, text) in files {
        let path = root.join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

#[derive(Clone, Debug)]
pub(crate) struct FakeThread {
    pub pid: i32,
    pub parent: i32,
    pub start_ticks: u64,
    pub cpus: CpuSet,
    /// CPUs that were last requested; the kernel drops those outside the cpuset.
    pub asked: Option<CpuSet>,
    pub nice: i32,
    pub policy: u32,
    pub priority: u32,
    /// Its session and process group.
    pub session: i32,
}

/// An error number of no error: the write takes effect, but reports fewer bytes than it was given.
pub(crate) const SHORT: i32 = -1;

#[derive(Default)]
pub(crate) struct FakeHost {
    pub threads: RefCell<BTreeMap<i32, FakeThread>>,
    /// Files with their contents; `None` for a directory.
    pub files: RefCell<BTreeMap<PathBuf, Option<String>>>,
    /// The n-th change from now on fails with this error number; with [`SHORT`] it happens but reports a short write.
    pub fault: Cell<Option<(u32, i32)>>,
    pub changes: Cell<u32>,
    /// Number of further changes after which all fail.
    pub broken_from: Cell<Option<u32>>,
    /// While this is set, every read of a file fails with this error number, as if descriptors or memory had run out.
    pub reads_fail: Cell<Option<i32>>,
    /// The cpuset of all threads; `None` if the host has no cpusets.
    pub cpuset: RefCell<Option<CpuSet>>,
    /// The fence; while it is raised, nothing may be changed.
    pub fence: RefCell<Option<std::sync::Arc<crate::safety::fence::Fence>>>,
    /// Every write to this file fails with this error number.
    pub refused_file: RefCell<Option<(PathBuf, i32)>>,
    /// Owners of directories; those that are missing here belong to root.
    pub owners: RefCell<BTreeMap<PathBuf, u32>>,
    /// Number of calls on threads that report a missing process although it exists.
    pub no_such_process_for: Cell<u32>,
}

impl FakeHost {
    /// The id of this process on the made-up host, above those of the threads that tests add.
    pub const OWN_PID: i32 = 1_000_000;

    /// A host with these single-threaded processes, which may run on CPUs 0 to 3.
    pub fn with_threads(tids: impl IntoIterator<Item = i32>) -> Self {
        let host = FakeHost::default();
        tids.into_iter()
            .for_each(|tid| _ = host.add_thread(tid, tid, 1, "0-3"));
        host
    }
    pub fn mask_of(&self, tid: i32) -> String {
        self.threads.borrow()[&tid].cpus.to_string()
    }
    pub fn masks(&self) -> Vec<String> {
        self.threads
            .borrow()
            .values()
            .map(|thread| thread.cpus.to_string())
            .collect()
    }
    pub fn policies(&self) -> Vec<u32> {
        self.threads
            .borrow()
            .values()
            .map(|thread| thread.policy)
            .collect()
    }
    pub fn change_thread(&self, tid: i32, change: impl FnOnce(&mut FakeThread)) {
        change(self.threads.borrow_mut().get_mut(&tid).unwrap());
    }
    pub fn add_thread(&self, pid: i32, tid: i32, parent: i32, cpus: &str) -> ThreadKey {
        let start_ticks = tid as u64 * 10;
        let cpus = cpus.parse().unwrap();
        self.threads.borrow_mut().insert(
            tid,
            FakeThread {
                pid,
                parent,
                start_ticks,
                cpus,
                asked: None,
                nice: 0,
                policy: 0,
                priority: 0,
                session: 0,
            },
        );
        ThreadKey { tid, start_ticks }
    }
    /// Puts all threads into one cpuset with these CPUs, with the semantics of Linux 6.2 and later.
    pub fn set_cpuset(&self, cpus: &str) {
        let cpuset: CpuSet = cpus.parse().unwrap();
        self.set_file("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n");
        self.set_file("/sys/fs/cgroup/cgroup.subtree_control", "cpuset\n");
        self.set_file("/sys/fs/cgroup/cpuset.cpus.effective", cpus);
        for thread in self.threads.borrow_mut().values_mut() {
            thread.cpus = thread
                .asked
                .as_ref()
                .map_or(cpuset.clone(), |mask| mask.intersection(&cpuset));
        }
        *self.cpuset.borrow_mut() = Some(cpuset);
    }
    pub fn set_file(&self, path: &str, text: &str) {
        let path = Path::new(path);
        for dir in path.ancestors().skip(1) {
            self.files
                .borrow_mut()
                .entry(dir.to_path_buf())
                .or_insert(None);
        }
        self.files
            .borrow_mut()
            .insert(path.to_path_buf(), Some(text.to_string()));
    }
    pub fn file_text(&self, path: &str) -> String {
        self.files.borrow()[Path::new(path)].clone().unwrap()
    }
    /// Command name of a thread: `x`, unless the test sets another.
    fn command_name(&self, tid: i32) -> String {
        let set = self
            .files
            .borrow()
            .get(&Path::new("/proc-comm").join(tid.to_string()))
            .cloned()
            .flatten();
        set.unwrap_or_else(|| "x".to_string())
    }
    /// Counts a change. Fails before the change, or returns the result that the call must return after making it.
    pub fn begin_change(&self) -> io::Result<io::Result<()>> {
        if self
            .fence
            .borrow()
            .as_ref()
            .is_some_and(|fence| fence.is_raised())
        {
            return Err(io::Error::other("fenced"));
        }
        self.changes.set(self.changes.get() + 1);
        match self.broken_from.get() {
            Some(0) => return Err(io::Error::from_raw_os_error(libc::EIO)),
            Some(remaining) => self.broken_from.set(Some(remaining - 1)),
            None => {}
        }
        match self.fault.get() {
            Some((0, errno)) => {
                self.fault.set(None);
                match errno {
                    SHORT => Ok(Err(io::ErrorKind::WriteZero.into())),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                }
            }
            Some((left, errno)) => {
                self.fault.set(Some((left - 1, errno)));
                Ok(Ok(()))
            }
            None => Ok(Ok(())),
        }
    }
    fn tids(&self, is_listed: impl Fn(i32, &FakeThread) -> bool) -> Vec<String> {
        let threads = self.threads.borrow();
        threads
            .iter()
            .filter(|(tid, thread)| is_listed(**tid, thread))
            .map(|(tid, _)| tid.to_string())
            .collect()
    }
    fn on_thread(&self, tid: i32, change: impl FnOnce(&mut FakeThread)) -> io::Result<()> {
        if self.no_such_process_for.get() > 0 {
            self.no_such_process_for
                .set(self.no_such_process_for.get() - 1);
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let outcome = self.begin_change()?;
        let mut threads = self.threads.borrow_mut();
        change(
            threads
                .get_mut(&tid)
                .ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?,
        );
        outcome
    }
}

/// An entry of a journal for an object that had this state, and has not been changed yet.
pub(crate) fn journal_entry(original: ObjectState) -> JournalEntry {
    JournalEntry {
        original,
        applied_states: Vec::new(),
        since_ticks: 70,
        follows_cpuset: false,
        family: None,
    }
}

/// A guardian that only waits, so that the daemon's side can be tested alone.
pub(crate) fn waiting_guardian() -> GuardianCommand {
    let args = ["-c", "echo ready; while read line; do :; done"]
        .map(str::to_string)
        .to_vec();
    GuardianCommand {
        program: "/bin/sh".into(),
        args,
    }
}

fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Kernel for FakeHost {
    fn own_pid(&self) -> i32 {
        FakeHost::OWN_PID
    }
    fn read(&self, path: &Path) -> io::Result<String> {
        if let Some(errno) = self.reads_fail.get() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        if path == Path::new("/proc/sys/kernel/random/boot_id") {
            return Ok("boot\n".to_string());
        }
        if path == Path::new("/proc/uptime") {
            return Ok("0.00 0.00\n".to_string());
        }
        if let Some(Some(text)) = self.files.borrow().get(path) {
            return Ok(text.clone());
        }
        let below = path.strip_prefix("/proc").unwrap_or(Path::new(""));
        if let Some(tid) = below
            .iter()
            .next()
            .and_then(|tid| tid.to_str()?.parse::<i32>().ok())
        {
            let threads = self.threads.borrow();
            let t = threads.get(&tid).ok_or_else(not_found)?;
            return match below.iter().nth(1).and_then(|name| name.to_str()) {
                Some("cpuset") if self.cpuset.borrow().is_some() => Ok("/\n".to_string()),
                Some("status") => Ok(format!("Name:\tx\nCpus_allowed_list:\t{}\n", t.cpus)),
                Some("stat") => Ok(format!(
                    "{tid} ({}) S {} {} {} 0 0 0 0 0 0 0 0 0 0 0 20 {} {} 0 {} 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 0 {} {}\n",
                    self.command_name(tid),
                    t.parent,
                    t.session,
                    t.session,
                    t.nice,
                    threads.values().filter(|other| other.pid == t.pid).count(),
                    t.start_ticks,
                    t.priority,
                    t.policy
                )),
                // A file of a thread, whose content the test sets.
                Some("task" | "schedstat") if path.ends_with("schedstat") => {
                    let tid = below.iter().rev().nth(1).unwrap_or_default();
                    self.files
                        .borrow()
                        .get(&Path::new("/proc-schedstat").join(tid))
                        .cloned()
                        .flatten()
                        .ok_or_else(not_found)
                }
                _ => Err(not_found()),
            };
        }
        Err(not_found())
    }
    fn owner(&self, path: &Path) -> io::Result<u32> {
        Ok(self.owners.borrow().get(path).copied().unwrap_or(0))
    }
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        if let Some((refused, errno)) = &*self.refused_file.borrow()
            && refused == path
        {
            return Err(io::Error::from_raw_os_error(*errno));
        }
        let outcome = self.begin_change()?;
        let mut files = self.files.borrow_mut();
        if path.file_name().is_some_and(|name| name == "tasks") {
            // Writing a thread's id to one group removes it from all others of the hierarchy.
            let line = format!("{}\n", text.trim());
            let members = |(path, text): (&PathBuf, &mut Option<String>)| {
                if path.file_name().is_some_and(|name| name == "tasks") {
                    *text = text
                        .take()
                        .map(|text| text.split_inclusive('\n').filter(|l| *l != line).collect());
                }
            };
            files.iter_mut().for_each(members);
            files
                .get_mut(path)
                .ok_or_else(not_found)?
                .as_mut()
                .unwrap()
                .push_str(&line);
            return outcome;
        }
        *files.get_mut(path).ok_or_else(not_found)? = Some(text.to_string());
        outcome
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        let outcome = self.begin_change()?;
        self.set_file(&path.join("tasks").display().to_string(), "");
        outcome
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let outcome = self.begin_change()?;
        let occupied = self
            .files
            .borrow()
            .get(&path.join("tasks"))
            .cloned()
            .flatten()
            .is_some_and(|t| !t.is_empty());
        if occupied {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let count_before = self.files.borrow().len();
        self.files
            .borrow_mut()
            .retain(|file, _| !file.starts_with(path));
        if self.files.borrow().len() == count_before {
            Err(not_found())
        } else {
            outcome
        }
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        if path == Path::new("/proc") {
            return Ok(self.tids(|tid, thread| tid == thread.pid));
        }
        if path.starts_with("/proc") {
            let pid: i32 = path
                .iter()
                .nth(2)
                .unwrap()
                .to_str()
                .unwrap()
                .parse()
                .unwrap();
            return Ok(self.tids(|_, thread| thread.pid == pid));
        }
        match self.files.borrow().get(path) {
            Some(None) => {}
            Some(Some(_)) => return Err(io::ErrorKind::NotADirectory.into()),
            None => return Err(not_found()),
        }
        let child = |file: &PathBuf| {
            (file.parent() == Some(path)).then(|| file.file_name().unwrap().to_owned())
        };
        Ok(self
            .files
            .borrow()
            .keys()
            .filter_map(child)
            .map(|name| name.into_string().unwrap())
            .collect())
    }
    fn lock_dir(&self, _: &Path, _: std::time::Duration) -> io::Result<DirLock> {
        Ok(DirLock::default())
    }
    fn set_fence(&self, fence: Option<std::sync::Arc<crate::safety::fence::Fence>>) {
        *self.fence.borrow_mut() = fence;
    }
    fn set_affinity(&self, tid: i32, cpus: &CpuSet) -> io::Result<()> {
        let cpuset = self.cpuset.borrow().clone();
        self.on_thread(tid, |thread| {
            thread.cpus = cpuset.map_or_else(|| cpus.clone(), |cpuset| cpus.intersection(&cpuset));
            thread.asked = Some(cpus.clone());
        })
    }
    fn set_nice(&self, tid: i32, nice: i32) -> io::Result<()> {
        self.on_thread(tid, |thread| thread.nice = nice)
    }
    fn set_scheduling(&self, tid: i32, wanted: &SchedParams) -> io::Result<()> {
        // As in the kernel, real-time classes need a priority, and all others must not have one.
        if matches!(wanted.policy, FIFO | RR) != (wanted.priority > 0) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.on_thread(tid, |thread| {
            (thread.policy, thread.priority) = (wanted.policy, wanted.priority)
        })
    }
}
