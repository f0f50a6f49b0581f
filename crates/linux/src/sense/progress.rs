//! Work that programs report themselves: without a PMU, the only measure of speed that is not a guess.
//!
//! A program finds the name of a file in its environment ([`PROGRESS_VARIABLE`]), maps its first eight bytes and
//! increments them (native byte order), in its own unit: requests, rows, frames. Reading costs one small read per
//! window and process. If no file is named, `DIR/PID` is used in the daemon's progress directory.
//!
//! If nothing is reported, an event that the program causes at a steady rate may serve as a proxy, declared as such:
//! its instructions, if they are counted; its read and write calls, which the kernel counts per thread
//! (`/proc/PID/task/TID/io`); its waits (voluntary context switches); and its page faults.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cachemate_core::CounterEvent;
use rustix::fs::{Mode, OFlags};

use crate::kernel::{Kernel, ThreadKey};
use crate::sense::thread_counts::{read_calls, read_waits, run_time_ns};

/// Variable that names the file in a program's environment.
pub const PROGRESS_VARIABLE: &str = "CACHEMATE_PROGRESS";

/// Entries of the directory that one sweep examines for files of exited processes.
const SWEPT_ENTRIES: usize = 256;

/// Locations of progress reports. The directory is never listed to find them: every user can write to it, and it may
/// hold any number of files.
#[derive(Clone, Debug, Default)]
pub struct ProgressFiles {
    dir: Option<PathBuf>,
    /// Whether another process maintains the directory.
    is_read_only: bool,
}

/// Position in the directory at which the last sweep stopped.
#[derive(Debug, Default)]
pub struct ProgressSweep {
    position: Option<rustix::fs::Dir>,
}

impl ProgressFiles {
    /// Reports in `dir`, which holds one file per process, named by its id; `None` if programs make no reports.
    pub fn new(dir: Option<PathBuf>) -> Self {
        ProgressFiles {
            dir,
            is_read_only: false,
        }
    }

    /// Reports in a directory that another process maintains; they are read, but no file is removed.
    pub fn read_only(dir: PathBuf) -> Self {
        ProgressFiles {
            dir: Some(dir),
            is_read_only: true,
        }
    }

    /// Creates the directory, in which every user may create files but not remove those of others.
    ///
    /// # Errors
    /// The directory cannot be created, or the path is a link, not a directory, or another user's.
    pub fn create(dir: &Path) -> io::Result<Self> {
        use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
        match std::fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = std::fs::File::from(rustix::fs::open(dir, flags, Mode::empty())?);
        let owner = directory.metadata()?.uid();
        if owner != rustix::process::geteuid().as_raw() {
            let message = format!("found a directory of user {owner}, expected one of this user");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        directory.set_permissions(std::fs::Permissions::from_mode(0o1777))?;
        Ok(ProgressFiles::new(Some(dir.to_path_buf())))
    }

    /// The file in which this process reports; `None` if it makes no reports.
    pub fn path(&self, pid: i32) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(pid.to_string()))
    }

    /// Removes files of exited processes, a limited number in each call. Returns the processes that had a file,
    /// including exited ones, if this call has examined all files; `None` if there may be others.
    pub fn sweep(&self, kernel: &dyn Kernel, sweep: &mut ProgressSweep) -> Option<BTreeSet<i32>> {
        let dir = self.dir.as_ref().filter(|_| !self.is_read_only)?;
        let open_dir = || {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::Dir::new(rustix::fs::open(dir, flags, Mode::empty()).ok()?).ok()
        };
        let is_full_sweep = sweep.position.is_none();
        let mut entries = sweep.position.take().or_else(open_dir)?;
        let mut reporters = BTreeSet::new();
        for _ in 0..SWEPT_ENTRIES {
            // At the directory's end, or after a failed read, the next sweep starts again.
            let Some(entry) = entries.next() else {
                return is_full_sweep.then_some(reporters);
            };
            let entry = entry.ok()?;
            let pid = entry
                .file_name()
                .to_str()
                .ok()
                .and_then(|name| name.parse::<i32>().ok());
            let Some(pid) = pid.filter(|&pid| pid > 0) else {
                continue;
            };
            reporters.insert(pid);
            // The file is removed only if the process does not exist; any other error gives no evidence.
            if kernel
                .stat(pid)
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
            {
                self.remove(pid);
            } else {
                self.replace_foreign_report(kernel, pid);
            }
        }
        sweep.position = Some(entries);
        None
    }

    /// Removes a file that another user has put in the place of the report of `pid`, because in a sticky directory the
    /// process's user could neither write nor remove it. An empty file of the process's user replaces it; otherwise the
    /// other user could create the file again before the process creates its own.
    fn replace_foreign_report(&self, kernel: &dyn Kernel, pid: i32) {
        let Some(path) = self.path(pid).filter(|_| !self.is_read_only) else {
            return;
        };
        let Ok(metadata) = std::fs::symlink_metadata(&path) else {
            return;
        };
        let Some(user) = process_user(kernel, pid) else {
            return;
        };
        if may_report(metadata.uid(), user) || !self.remove(pid) {
            return;
        }
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) else {
            return;
        };
        // If the daemon may not give the file to the user, the file must not block the user's own.
        if user != rustix::process::geteuid().as_raw()
            && std::os::unix::fs::fchown(&file, Some(user), None).is_err()
        {
            self.remove(pid);
        }
    }

    /// Removes the report of `pid`, whatever it is: a directory that is not empty is renamed out of the way. Returns
    /// whether it existed and was removed.
    fn remove(&self, pid: i32) -> bool {
        let Some(path) = self.path(pid) else {
            return false;
        };
        let removal_result = match std::fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_dir() => {
                let renamed_path =
                    |index: u32| path.with_file_name(format!("not-a-report-{pid}-{index}"));
                let free_path = || {
                    (0..SWEPT_ENTRIES as u32)
                        .map(renamed_path)
                        .find(|aside| std::fs::symlink_metadata(aside).is_err())
                };
                std::fs::remove_dir(&path)
                    .or_else(|error| std::fs::rename(&path, free_path().ok_or(error)?))
            }
            Ok(_) => std::fs::remove_file(&path),
            Err(error) => Err(error),
        };
        removal_result.is_ok()
    }

    /// Total that the process has reported; `None` if it does not report, or its report is not a file of at least eight
    /// bytes that belongs to the process's own user or to root. A file of any other user
    /// is removed, so that a new process can report from its first window on.
    pub fn read_total(&self, kernel: &dyn Kernel, pid: i32) -> Option<u64> {
        self.replace_foreign_report(kernel, pid);
        read_counter(kernel, &self.path(pid)?, pid)
    }
}

/// Measures of progress, best first; `None` is the program's own report.
const PROGRESS_MEASURES: [Option<CounterEvent>; 5] = [
    None,
    Some(CounterEvent::Instructions),
    Some(CounterEvent::SystemCalls),
    Some(CounterEvent::ContextSwitches),
    Some(CounterEvent::PageFaults),
];
/// Minimum number of events in the phases alone; the statistical error of 200 events is 7 %.
const MIN_EVENTS: f64 = 200.0;
/// Minimum agreement of the phases alone: their smaller rate divided by the larger one.
const MIN_RATE_AGREEMENT: f64 = 0.75;
/// A task that runs for less than this share of the phases alone is paced by something other than the processor.
const MIN_BUSY_SHARE: f64 = 0.5;

/// All counts that may show a thread's progress, at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgressTotals {
    counts: [Option<u64>; PROGRESS_MEASURES.len()],
    run_time_ns: Option<u64>,
}

impl ProgressTotals {
    /// The current totals; `instructions` is the thread's count so far, or `None` if they are not counted.
    pub(crate) fn read_current(
        kernel: &dyn Kernel,
        files: &ProgressFiles,
        pid: i32,
        thread: ThreadKey,
        instructions: Option<u64>,
    ) -> Self {
        let stat = kernel
            .stat(thread.tid)
            .ok()
            .filter(|stat| stat.key == thread);
        let counts = [
            files.read_total(kernel, pid),
            instructions,
            read_calls(kernel, pid, thread.tid),
            read_waits(kernel, pid, thread.tid),
            stat.as_ref()
                .map(|stat| stat.minor_faults + stat.major_faults),
        ];
        ProgressTotals {
            counts,
            run_time_ns: stat
                .map(|stat| run_time_ns(kernel, pid, &stat))
                .unwrap_or_default(),
        }
    }
}

/// Counts in the phases of a probe, alone and beside the neighbor.
#[derive(Default, Debug)]
pub(crate) struct BracketCounts {
    alone_phases: Vec<BracketPhase>,
    corun_phases: Vec<BracketPhase>,
}

#[derive(Debug)]
struct BracketPhase {
    counts: [Option<u64>; PROGRESS_MEASURES.len()],
    busy_share: Option<f64>,
    seconds: f64,
}

impl BracketCounts {
    pub(crate) fn add_phase(
        &mut self,
        has_co_runner: bool,
        totals_before: ProgressTotals,
        totals_after: ProgressTotals,
        seconds: f64,
    ) {
        let count_since = |count_before: Option<u64>, count_after: Option<u64>| {
            count_after?.checked_sub(count_before?)
        };
        let counts = std::array::from_fn(|measure_index| {
            count_since(
                totals_before.counts[measure_index],
                totals_after.counts[measure_index],
            )
        });
        let busy_share = count_since(totals_before.run_time_ns, totals_after.run_time_ns)
            .map(|ns| ns as f64 / 1e9 / seconds);
        let phases = if has_co_runner {
            &mut self.corun_phases
        } else {
            &mut self.alone_phases
        };
        phases.push(BracketPhase {
            counts,
            busy_share,
            seconds,
        });
    }

    /// The best usable measure, and its rates per second alone and beside the neighbor.
    pub(crate) fn best_rates(&self) -> Option<(Option<CounterEvent>, (f64, f64))> {
        PROGRESS_MEASURES
            .iter()
            .enumerate()
            .find_map(|(measure_index, measure)| {
                let (alone_rate, corun_rate) = (
                    mean_rate(&self.alone_phases, measure_index)?,
                    mean_rate(&self.corun_phases, measure_index)?,
                );
                (measure.is_none() || self.is_usable_proxy(measure_index))
                    .then_some((*measure, (alone_rate, corun_rate)))
            })
    }

    fn is_usable_proxy(&self, measure_index: usize) -> bool {
        let event_count: u64 = self
            .alone_phases
            .iter()
            .filter_map(|phase| phase.counts[measure_index])
            .sum();
        let rates = || {
            self.alone_phases
                .iter()
                .filter_map(|phase| Some(phase.counts[measure_index]? as f64 / phase.seconds))
        };
        let (min_rate, max_rate) = rates()
            .fold((f64::MAX, 0.0), |(low, high): (f64, f64), rate| {
                (low.min(rate), high.max(rate))
            });
        let is_busy = self.alone_phases.iter().all(|phase| {
            phase
                .busy_share
                .is_some_and(|share| share >= MIN_BUSY_SHARE)
        });
        is_busy && event_count as f64 >= MIN_EVENTS && min_rate >= MIN_RATE_AGREEMENT * max_rate
    }
}

/// The rate per second over all phases; `None` if a phase was not counted, or if there were no events.
fn mean_rate(phases: &[BracketPhase], measure_index: usize) -> Option<f64> {
    let count: u64 = phases
        .iter()
        .map(|phase| phase.counts[measure_index])
        .sum::<Option<u64>>()?;
    let seconds: f64 = phases.iter().map(|phase| phase.seconds).sum();
    (count > 0 && seconds > 0.0).then(|| count as f64 / seconds)
}

/// A file of another user gives no evidence about this process. Swapping the file has no effect: links are not
/// followed, opening a pipe does not block, and the opened file is the one that is checked.
fn read_counter(kernel: &dyn Kernel, path: &Path, pid: i32) -> Option<u64> {
    use std::os::unix::fs::FileExt;
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let metadata = file.metadata().ok()?;
    (metadata.is_file() && may_report(metadata.uid(), process_user(kernel, pid)?)).then_some(())?;
    let mut bytes = [0u8; 8];
    file.read_exact_at(&mut bytes, 0).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

/// May the owner of a file report for a process of this user?
fn may_report(owner: u32, user: u32) -> bool {
    owner == user || owner == 0
}

/// Real user of a process.
fn process_user(kernel: &dyn Kernel, pid: i32) -> Option<u32> {
    let status = kernel
        .read(Path::new(&format!("/proc/{pid}/status")))
        .ok()?;
    status.lines().find_map(|line| {
        line.strip_prefix("Uid:")?
            .split_ascii_whitespace()
            .next()?
            .parse()
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{CWD, FileType, RenameFlags};

    use super::*;
    use crate::kernel::LinuxHost;

    /// Rates over four phases of instructions (0 = not counted), calls, waits and faults.
    fn bracket_of_phases(counts: [[u64; 4]; 4], busy_share: f64) -> BracketCounts {
        let mut rates = BracketCounts::default();
        for (phase_index, [instructions, calls, waits, faults]) in counts.into_iter().enumerate() {
            let counted = |count: u64| (instructions > 0).then_some(count);
            let before = [None, counted(0), Some(0), Some(0), Some(0)];
            let after = [
                None,
                counted(instructions),
                Some(calls),
                Some(waits),
                Some(faults),
            ];
            let before = ProgressTotals {
                counts: before,
                run_time_ns: Some(0),
            };
            let after = ProgressTotals {
                counts: after,
                run_time_ns: Some((busy_share * 1e9) as u64),
            };
            rates.add_phase(phase_index == 1 || phase_index == 2, before, after, 1.0);
        }
        rates
    }

    /// Does the best steady event of a busy program serve as a proxy for its work, and no other event?
    #[test]
    fn the_best_steady_event_is_a_proxy_for_work() {
        let calls = bracket_of_phases(
            [
                [0, 400, 0, 0],
                [0, 200, 0, 0],
                [0, 210, 0, 0],
                [0, 410, 0, 0],
            ],
            1.0,
        );
        assert_eq!(
            calls.best_rates(),
            Some((Some(CounterEvent::SystemCalls), (405.0, 205.0)))
        );
        let faults = bracket_of_phases(
            [
                [0, 9, 0, 400],
                [0, 9, 0, 200],
                [0, 9, 0, 200],
                [0, 9, 0, 400],
            ],
            1.0,
        );
        assert_eq!(
            faults.best_rates().unwrap().0,
            Some(CounterEvent::PageFaults),
            "too few calls say nothing"
        );
        let unsteady = bracket_of_phases(
            [
                [0, 400, 0, 0],
                [0, 200, 0, 0],
                [0, 200, 0, 0],
                [0, 100, 0, 0],
            ],
            1.0,
        );
        assert_eq!(unsteady.best_rates(), None);
        let idle_program = bracket_of_phases(
            [
                [0, 400, 400, 0],
                [0, 400, 400, 0],
                [0, 400, 400, 0],
                [0, 400, 400, 0],
            ],
            0.2,
        );
        assert_eq!(
            idle_program.best_rates(),
            None,
            "a program that sleeps is paced by something else"
        );
        // A program that only computes and touches its memory: no call, no wait, no fault.
        let counted = bracket_of_phases(
            [
                [4000, 0, 0, 0],
                [1000, 0, 0, 0],
                [1000, 0, 0, 0],
                [4000, 0, 0, 0],
            ],
            1.0,
        );
        assert_eq!(
            counted.best_rates(),
            Some((Some(CounterEvent::Instructions), (4000.0, 1000.0)))
        );
        let mut reported = bracket_of_phases(
            [
                [0, 400, 0, 0],
                [0, 200, 0, 0],
                [0, 200, 0, 0],
                [0, 400, 0, 0],
            ],
            0.1,
        );
        for phase in reported
            .alone_phases
            .iter_mut()
            .chain(&mut reported.corun_phases)
        {
            phase.counts[0] = Some(7);
        }
        assert_eq!(
            reported.best_rates(),
            Some((None, (7.0, 7.0))),
            "its own report needs no proof"
        );
    }

    /// Do this thread's own reads appear among its calls?
    #[test]
    fn this_threads_reads_appear_among_its_calls() {
        let (host, pid) = (LinuxHost::new("/"), std::process::id() as i32);
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        let Some(before) = read_calls(&host, pid, tid) else {
            assert!(
                !Path::new("/proc/self/io").exists(),
                "the kernel counts, and it was not read"
            );
            crate::skip_test::report_unchecked("calls of a thread", "no /proc/self/io");
            return;
        };
        (0..50).for_each(|_| drop(std::fs::read("/proc/self/comm").unwrap()));
        assert!(read_calls(&host, pid, tid).unwrap() >= before + 50);
        assert!(read_waits(&host, pid, tid).is_some());
    }

    /// Is a counter read, and a missing, short or linked file not taken for a report?
    #[test]
    fn only_a_regular_file_of_eight_bytes_is_a_report() {
        let dir = tempfile::tempdir().unwrap();
        let files = ProgressFiles::new(Some(dir.path().to_path_buf()));
        let (host, pid) = (LinuxHost::new("/"), std::process::id() as i32);
        assert_eq!(files.read_total(&host, pid), None);
        let path = files.path(pid).unwrap();
        std::fs::write(&path, 77u64.to_ne_bytes()).unwrap();
        assert_eq!(files.read_total(&host, pid), Some(77));
        std::fs::write(&path, [1, 2, 3]).unwrap();
        assert_eq!(files.read_total(&host, pid), None);
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/proc/self/stat", &path).unwrap();
        assert_eq!(files.read_total(&host, pid), None);
        assert_eq!(ProgressFiles::default().read_total(&host, pid), None);
    }

    /// Does the reader never block and never read a linked file, even if a program repeatedly swaps its report for a
    /// pipe or a link?
    #[test]
    fn a_report_swapped_for_a_pipe_or_a_link_never_blocks_a_reader() {
        let dir = tempfile::tempdir().unwrap();
        let (pid, swap_path) = (std::process::id() as i32, dir.path().join("other"));
        let files = ProgressFiles::new(Some(dir.path().to_path_buf()));
        let (report, secret) = (files.path(pid).unwrap(), dir.path().join("secret"));
        std::fs::write(&secret, 99u64.to_ne_bytes()).unwrap();
        for hostile in ["pipe", "link"] {
            std::fs::write(&report, 77u64.to_ne_bytes()).unwrap();
            match hostile {
                "pipe" => {
                    rustix::fs::mknodat(CWD, &swap_path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
                        .unwrap()
                }
                _ => std::os::unix::fs::symlink(&secret, &swap_path).unwrap(),
            }
            let (send, done) = std::sync::mpsc::channel();
            let (reader, stop) = (files.clone(), Arc::new(AtomicBool::new(false)));
            let read = move || {
                (0..20_000)
                    .map(|_| reader.read_total(&LinuxHost::new("/"), pid))
                    .collect::<BTreeSet<_>>()
            };
            std::thread::spawn(move || send.send(read()));
            let (swapper_stop, swapper_report, swapper_path) =
                (stop.clone(), report.clone(), swap_path.clone());
            let swapper = std::thread::spawn(move || {
                while !swapper_stop.load(Ordering::Relaxed) {
                    rustix::fs::renameat_with(
                        CWD,
                        &swapper_report,
                        CWD,
                        &swapper_path,
                        RenameFlags::EXCHANGE,
                    )
                    .unwrap();
                }
            });
            let observed_totals = done.recv_timeout(std::time::Duration::from_secs(60));
            stop.store(true, Ordering::Relaxed);
            swapper.join().unwrap();
            let seen =
                observed_totals.unwrap_or_else(|_| panic!("the reader hangs on the {hostile}"));
            assert!(
                seen.is_subset(&BTreeSet::from([None, Some(77)])) && seen.contains(&Some(77)),
                "{hostile}: {seen:?}"
            );
            for path in [&report, &swap_path] {
                std::fs::remove_file(path).unwrap();
            }
        }
    }

    /// Can every user write to the directory, and is a link, a file or another user's directory in its place refused
    /// and left unchanged?
    #[test]
    fn a_progress_directory_that_is_not_ours_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let (dir, other) = (root.path().join("progress"), root.path().join("other"));
        for _ in 0..2 {
            ProgressFiles::create(&dir).unwrap();
            assert_eq!(mode(&dir), 0o1777);
        }
        std::fs::create_dir(&other).unwrap();
        std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o700)).unwrap();
        std::fs::remove_dir(&dir).unwrap();
        std::os::unix::fs::symlink(&other, &dir).unwrap();
        assert!(ProgressFiles::create(&dir).is_err());
        assert_eq!(mode(&other), 0o700, "not through the link");
        std::fs::remove_file(&dir).unwrap();
        std::fs::write(&dir, "").unwrap();
        assert!(ProgressFiles::create(&dir).is_err());
        if !rustix::process::geteuid().is_root() {
            println!("not shown here: another user's directory: needs root");
            return;
        }
        std::os::unix::fs::chown(&other, Some(65_534), None).unwrap();
        assert!(
            ProgressFiles::create(&other)
                .unwrap_err()
                .to_string()
                .contains("user 65534")
        );
        assert_eq!(mode(&other), 0o700);
    }

    /// Are files of exited processes removed, some at a time, and no others?
    #[test]
    fn exited_processes_files_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let files = ProgressFiles::new(Some(root.path().to_path_buf()));
        let (host, own_pid) = (LinuxHost::new("/"), std::process::id());
        let pid_max: u32 = std::fs::read_to_string("/proc/sys/kernel/pid_max")
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        // Ids that no process can have, one of a live process, and names that are not ids.
        let retained_names = [own_pid.to_string(), "0".into(), "-1".into(), "notes".into()];
        retained_names
            .iter()
            .for_each(|name| std::fs::write(root.path().join(name), "").unwrap());
        (0..1_000).for_each(|index| {
            std::fs::write(root.path().join((pid_max + index).to_string()), "").unwrap()
        });
        let count_files = || std::fs::read_dir(root.path()).unwrap().count();
        let mut sweep = ProgressSweep::default();
        assert_eq!(
            files.sweep(&host, &mut sweep),
            None,
            "not all files are known"
        );
        assert!(
            count_files() >= 1_004 - SWEPT_ENTRIES,
            "each sweep is bounded"
        );
        let reporters = (0..20)
            .map(|_| files.sweep(&host, &mut sweep))
            .last()
            .flatten();
        assert_eq!(
            (count_files(), reporters),
            (
                retained_names.len(),
                Some([std::process::id() as i32].into())
            )
        );
        std::fs::write(root.path().join((pid_max + 1).to_string()), "").unwrap();
        (0..2).for_each(|_| _ = files.sweep(&host, &mut sweep));
        assert_eq!(
            count_files(),
            retained_names.len(),
            "a new sweep starts from the beginning"
        );
    }

    /// Can each process report from its first window on, even if another user has created its report in the sticky
    /// directory beforehand (as a file, link, FIFO or directory)?
    #[test]
    fn other_users_cannot_squat_on_report_files() {
        let root = tempfile::tempdir().unwrap();
        let (files, host) = (
            ProgressFiles::create(&root.path().join("progress")).unwrap(),
            LinuxHost::new("/"),
        );
        crate::stranger_tests::open_to_all(root.path());
        let program = |seconds: &str| {
            std::process::Command::new("sleep")
                .arg(seconds)
                .spawn()
                .unwrap()
        };
        let mut programs: Vec<_> = (0..5).map(|_| program("100")).collect();
        let pids: Vec<i32> = programs.iter().map(|program| program.id() as i32).collect();
        let names: Vec<String> = pids.iter().map(i32::to_string).collect();
        let was_run_as_stranger = crate::stranger_tests::run(
            "sense::progress::tests::occupy_reports_as_another_user",
            &[
                ("FOLDER", root.path().join("progress").to_str().unwrap()),
                ("PIDS", &names.join(" ")),
            ],
            || Ok(()),
        );
        if was_run_as_stranger {
            let mut sweep = ProgressSweep::default();
            assert_eq!(
                files.read_total(&host, pids[0]),
                None,
                "read first, as of a process in its first window"
            );
            (0..2).for_each(|_| _ = files.sweep(&host, &mut sweep));
            for &pid in &pids {
                let path = files.path(pid).unwrap();
                let metadata = std::fs::symlink_metadata(&path).unwrap();
                assert!(
                    metadata.is_file() && metadata.uid() == 0,
                    "{pid}: {metadata:?}"
                );
                std::fs::write(&path, 5u64.to_ne_bytes()).unwrap();
                assert_eq!(files.read_total(&host, pid), Some(5));
            }
        }
        for program in &mut programs {
            program.kill().unwrap();
            program.wait().unwrap();
        }
    }

    #[test]
    #[ignore = "run by the test above, as nobody"]
    fn occupy_reports_as_another_user() {
        let Some(dir) = std::env::var_os("FOLDER").map(PathBuf::from) else {
            return;
        };
        let pids = std::env::var("PIDS").unwrap();
        let paths: Vec<PathBuf> = pids.split(' ').map(|pid| dir.join(pid)).collect();
        std::fs::write(&paths[0], 99u64.to_ne_bytes()).unwrap();
        std::os::unix::fs::symlink("/proc/self/stat", &paths[1]).unwrap();
        rustix::fs::mknodat(CWD, &paths[2], FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::fs::create_dir(&paths[3]).unwrap();
        std::fs::create_dir_all(paths[4].join("occupied")).unwrap();
    }
}
