//! Work that programs report themselves: without a PMU, the only measure of speed that is not a guess.
//!
//! A program that cachemate starts finds the name of a file in its environment ([`PROGRESS_VARIABLE`]). Any other
//! program asks the daemon's socket for `progress` and gets a descriptor of memory. Either way it maps the first eight
//! bytes and increments them (native byte order), in its own unit: requests, rows, frames. Reading costs one small read
//! per window and process.
//!
//! Problem: a report is data of one user that root reads, and a folder for such files is one in which every user can
//! block, fill and shrink what belongs to others. Method: the daemon makes the memory, sealed against any change of its
//! size, and the kernel says which process asked. Properties: nobody can report for another process, end it by
//! `SIGBUS`, or use more than a page for each process and a bounded number of them.
//!
//! If nothing is reported, an event that the program causes at a steady rate may serve as a proxy, declared as such:
//! its instructions, if they are counted; its read and write calls, which the kernel counts per thread
//! (`/proc/PID/task/TID/io`); its waits (voluntary context switches); and its page faults.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use cachemate_core::CounterEvent;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use crate::kernel::text_files::read_users;
use crate::kernel::{Kernel, ThreadKey, is_descriptor_scarce, lock};
use crate::sense::thread_counts::{read_calls, read_waits, run_time_ns};

/// Variable that names the file in a program's environment.
pub const PROGRESS_VARIABLE: &str = "CACHEMATE_PROGRESS";

/// Size of the memory of a report; programs use its first eight bytes.
const REPORT_BYTES: u64 = 4096;
/// Maximum number of reports, each of which costs the daemon a descriptor.
const MAX_REPORTS: usize = 4_096;
/// Maximum number of reports of one user other than root.
const MAX_USER_REPORTS: usize = 256;

/// Where the reports of programs are found; clones share the memory that was handed out.
#[derive(Clone, Debug, Default)]
pub struct ProgressReports {
    /// A directory of this user, with one file for each program that it started, named by its process id.
    dir: Option<PathBuf>,
    handed_out: Arc<Mutex<BTreeMap<i32, HandedReport>>>,
}

/// Memory in which one process reports.
#[derive(Debug)]
struct HandedReport {
    process: ThreadKey,
    user: u32,
    memory: File,
}

impl ProgressReports {
    /// Reports in the files of a directory that only this user can change.
    pub fn in_dir(dir: PathBuf) -> Self {
        ProgressReports {
            dir: Some(dir),
            ..ProgressReports::default()
        }
    }

    /// Memory for the reports of a process of this user, the same at each request. The caller knows from the kernel
    /// that the process asks for itself.
    ///
    /// # Errors
    /// The process has ended or changed its user, there are too many reports, or memory or descriptors are short.
    pub fn hand_out(&self, kernel: &dyn Kernel, pid: i32, user: u32) -> io::Result<File> {
        let process = kernel.stat(pid)?.key;
        if process_user(kernel, pid) != Some(user) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        self.forget_ended(kernel);

        let mut reports = lock(&self.handed_out);
        if let Some(report) = reports.get(&pid) {
            return report.memory.try_clone();
        }
        let user_reports = reports
            .values()
            .filter(|report| report.user == user)
            .count();
        if reports.len() >= MAX_REPORTS || user != 0 && user_reports >= MAX_USER_REPORTS {
            return Err(io::Error::other("too many programs report their progress"));
        }
        let memory = new_report_memory()?;
        if is_descriptor_scarce(&memory) {
            return Err(io::Error::other("no descriptors are left"));
        }
        let handed_memory = memory.try_clone()?;
        let report = HandedReport {
            process,
            user,
            memory,
        };
        reports.insert(pid, report);
        Ok(handed_memory)
    }

    /// Drops the reports of processes that have ended. To be called once in each window.
    pub fn forget_ended(&self, kernel: &dyn Kernel) {
        let is_ended = |report: &HandedReport| matches!(kernel.is_alive(report.process), Ok(false));
        lock(&self.handed_out).retain(|_, report| !is_ended(report));
    }

    /// The file in which a program that was started by cachemate reports; `None` if there are no files.
    pub fn path(&self, pid: i32) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(pid.to_string()))
    }

    /// Total that the process has reported; `None` if it does not report, or its report is not a file of at least eight
    /// bytes that belongs to the process's own user or to root.
    pub fn read_total(&self, kernel: &dyn Kernel, pid: i32) -> Option<u64> {
        if let Some(report) = lock(&self.handed_out).get(&pid) {
            return read_first_number(&report.memory);
        }
        read_counter(kernel, &self.path(pid)?, pid)
    }
}

/// Memory of one report, whose size nobody can change: a program that maps it never gets `SIGBUS`.
fn new_report_memory() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = File::from(rustix::fs::memfd_create("cachemate-progress", flags)?);
    memory.set_len(REPORT_BYTES)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, seals)?;
    Ok(memory)
}

/// A file with a total contains one number.
const MAX_WORK_FILE_BYTES: u64 = 64;

/// The total work in the progress file of a rule; `None` if it cannot be read or contains no whole number.
pub(crate) fn read_work_file(path: &Path) -> Option<u64> {
    let text = cachemate_files::read_text_limited(path, MAX_WORK_FILE_BYTES).ok()?;
    text.trim().parse().ok()
}

fn read_first_number(file: &File) -> Option<u64> {
    let mut bytes = [0u8; 8];
    file.read_exact_at(&mut bytes, 0).ok()?;
    Some(u64::from_ne_bytes(bytes))
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
        reports: &ProgressReports,
        pid: i32,
        thread: ThreadKey,
        instructions: Option<u64>,
    ) -> Self {
        let stat = kernel.stat_of(thread).ok();
        let counts = [
            reports.read_total(kernel, pid),
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
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let metadata = file.metadata().ok()?;
    (metadata.is_file() && may_report(metadata.uid(), process_user(kernel, pid)?)).then_some(())?;
    read_first_number(&file)
}

/// May the owner of a file report for a process of this user?
fn may_report(owner: u32, user: u32) -> bool {
    owner == user || owner == 0
}

/// Real user of a process.
fn process_user(kernel: &dyn Kernel, pid: i32) -> Option<u32> {
    read_users(kernel, pid).ok()?.first().copied()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
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
        let files = ProgressReports::in_dir(dir.path().to_path_buf());
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
        assert_eq!(ProgressReports::default().read_total(&host, pid), None);
    }

    /// Does the reader never block and never read a linked file, even if a program repeatedly swaps its report for a
    /// pipe or a link?
    #[test]
    fn a_report_swapped_for_a_pipe_or_a_link_never_blocks_a_reader() {
        let dir = tempfile::tempdir().unwrap();
        let (pid, swap_path) = (std::process::id() as i32, dir.path().join("other"));
        let files = ProgressReports::in_dir(dir.path().to_path_buf());
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

    /// Does a process that asks twice get the same memory, which nobody can shrink or grow, is its number read, and is
    /// it dropped when the process has ended?
    #[test]
    fn handed_memory_cannot_be_resized_and_ends_with_its_process() {
        let (host, reports) = (LinuxHost::new("/"), ProgressReports::default());
        let user = rustix::process::geteuid().as_raw();
        let mut child = std::process::Command::new("sleep")
            .arg("100")
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let memory = reports.hand_out(&host, pid, user).unwrap();
        memory.write_all_at(&7u64.to_ne_bytes(), 0).unwrap();
        assert_eq!(reports.read_total(&host, pid), Some(7));
        for bytes in [0, 8, 1 << 30] {
            assert!(memory.set_len(bytes).is_err(), "{bytes}");
        }
        assert!(memory.write_all_at(b"x", REPORT_BYTES).is_err());
        let again = reports.hand_out(&host, pid, user).unwrap();
        assert_eq!(read_first_number(&again), Some(7));
        assert!(
            reports.hand_out(&host, pid, user + 1).is_err(),
            "another user"
        );
        child.kill().unwrap();
        child.wait().unwrap();
        reports.forget_ended(&host);
        assert!(reports.read_total(&host, pid).is_none() && lock(&reports.handed_out).is_empty());
    }

    /// Is the number of one user's reports bounded, whatever she starts, while others still report?
    #[test]
    fn one_user_cannot_use_up_the_reports() {
        let (host, reports) = (
            crate::fake_tests::FakeHost::default(),
            ProgressReports::default(),
        );
        for pid in 1..=MAX_USER_REPORTS as i32 + 2 {
            host.add_thread(pid, pid, 1, "0");
            let user = if pid == MAX_USER_REPORTS as i32 + 2 {
                7
            } else {
                1001
            };
            host.set_file(
                &format!("/proc/{pid}/status"),
                &format!("Uid:\t{user}\t0\t0\t0\n"),
            );
        }
        for pid in 1..=MAX_USER_REPORTS as i32 {
            let small = File::open("/dev/null").unwrap();
            if is_descriptor_scarce(&small) {
                return crate::skip_test::report_unchecked(
                    "a bound on reports",
                    "too few descriptors",
                );
            }
            reports.hand_out(&host, pid, 1001).unwrap();
        }
        let next = MAX_USER_REPORTS as i32 + 1;
        assert!(reports.hand_out(&host, next, 1001).is_err());
        assert!(reports.hand_out(&host, next + 1, 7).is_ok());
    }
}
