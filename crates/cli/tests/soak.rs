//! Many short-lived programs under a daemon: does it keep up, leak nothing, and miss no restore?
//!
//! `CACHEMATE_SOAK` sets their number (`make soak`: 10 000, chosen to finish within a minute on an idle machine).

mod common;

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cachemate_linux::kernel::{Kernel, LinuxHost};
use common::{acting_config, run, start_daemon, status_when, stop};

/// Resident pages and open files of a process.
fn pages_and_open_files(pid: u32) -> (u64, usize) {
    let pages = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = pages
        .split_ascii_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .unwrap_or(0);
    (
        pages,
        std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count),
    )
}

/// Do thousands of programs come and go without the daemon growing, and are the remaining programs restored?
#[test]
fn short_lived_programs_do_not_make_the_daemon_grow() {
    let tasks: usize = std::env::var("CACHEMATE_SOAK")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(400);
    let dir = tempfile::tempdir().unwrap();
    // Half of the programs run before the first reading, so that growth can be distinguished from the memory needed to
    // start.
    let half = tasks / 2;
    let script = format!(
        "sleep 1000 & while [ ! -e start ]; do sleep 0.05; done; i=0; while [ $i -lt {half} ]; do /bin/true & i=$((i+1)); [ $((i%50)) = 0 ] && wait -n 2>/dev/null; done; \
         touch half; while [ ! -e go ]; do sleep 0.05; done; i=0; \
         while [ $i -lt {half} ]; do /bin/true & i=$((i+1)); [ $((i%50)) = 0 ] && wait -n 2>/dev/null; done; touch end; wait"
    );
    let mut parent = Command::new("bash")
        .args(["-c", &script])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let host = LinuxHost::new("/");
    let affinity_before = host.affinity(parent.id() as i32).unwrap();
    let mut daemon = start_daemon(
        dir.path(),
        &acting_config("shake", 50, &parent.id().to_string()),
    );
    // Calibration at the daemon's start takes memory for some seconds, so programs start after the first windows.
    let patience = (Duration::from_millis(50), Duration::from_secs(120));
    status_when(dir.path(), "windows", patience, |status| {
        status["windows"].as_u64() > Some(2)
    });
    std::fs::write(dir.path().join("start"), "").unwrap();
    let start = Instant::now();
    let wait_for_file = |name: &str| {
        while !dir.path().join(name).exists() {
            assert!(
                start.elapsed() < Duration::from_secs(600),
                "'{name}' did not come"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait_for_file("half");
    std::thread::sleep(Duration::from_millis(500));
    let (pages_half, files_half) = pages_and_open_files(daemon.0.id());
    std::fs::write(dir.path().join("go"), "").unwrap();
    wait_for_file("end");
    let seconds = start.elapsed().as_secs_f64();
    std::thread::sleep(Duration::from_millis(500));
    let (pages_end, files_end) = pages_and_open_files(daemon.0.id());
    let journal =
        std::fs::metadata(dir.path().join("state/restore.journal")).map_or(0, |found| found.len());
    assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon ended");
    let status = run(dir.path(), &["status", "--json", "--socket", "s.sock"]).json();
    let seen = status["counters"]["tasks_seen"].as_u64().unwrap();
    stop(&mut daemon);
    let affinity_after = host.affinity(parent.id() as i32).unwrap();
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", parent.id()))
        .unwrap_or_default();
    let masks: Vec<_> = children
        .split_ascii_whitespace()
        .filter_map(|pid| host.affinity(pid.parse().ok()?).ok())
        .collect();
    for pid in children.split_ascii_whitespace() {
        let _ = Command::new("kill")
            .args(["-KILL", pid])
            .stderr(Stdio::null())
            .status();
    }
    let _ = parent.kill();
    let _ = parent.wait();
    println!(
        "{tasks} programs in {seconds:.0} s, {seen} seen; pages {pages_half} -> {pages_end}, files {files_half} -> {files_end}, journal {journal} bytes"
    );
    assert_eq!(affinity_after, affinity_before);
    assert!(
        masks.iter().all(|mask| *mask == affinity_before),
        "{masks:?}"
    );
    assert!(!dir.path().join("state/restore.journal").exists());
    assert!(seen >= 2, "the daemon saw {seen} threads");
    // A quarter more, or a megabyte, is due to the allocator; a leak in every task would be far larger.
    assert!(
        pages_end <= pages_half + pages_half / 4 + 256,
        "{pages_half} -> {pages_end} pages"
    );
    assert!(
        files_end <= files_half + 16,
        "{files_half} -> {files_end} open files"
    );
    assert!(journal < 4 << 20, "a journal of {journal} bytes");
}

/// Under a daemon that moves all tasks and runs gangs in turns, while a thousand short programs a minute come and go:
/// is the longest wait of any task for a CPU reported, and does no task starve?
#[test]
fn no_task_starves_under_churn_and_the_longest_wait_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    // Two tasks that always want a CPU, and a birth every 30 ms; a crowded host makes fewer of them, but at least a
    // thousand.
    let script = "(while :; do :; done) & (while :; do :; done) & \
                  i=0; while [ $i -lt 300 ]; do (k=0; while [ $k -lt 2000 ]; do k=$((k+1)); done) & sleep 0.03; i=$((i+1)); done; \
                  touch end; wait";
    let mut parent = Command::new("bash");
    parent
        .args(["-c", script])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    // A separate process group allows the test to end all its processes together.
    let mut parent = std::os::unix::process::CommandExt::process_group(&mut parent, 0)
        .spawn()
        .unwrap();
    let mut daemon = start_daemon(
        dir.path(),
        &acting_config("shake", 50, &parent.id().to_string()),
    );
    let start = Instant::now();
    while !dir.path().join("end").exists() && start.elapsed() < Duration::from_secs(300) {
        std::thread::sleep(Duration::from_millis(100));
    }
    let churned = start.elapsed();
    let status = run(dir.path(), &["status", "--json", "--socket", "s.sock"]).json();
    let words = run(dir.path(), &["status", "--socket", "s.sock"]).ok().out;
    stop(&mut daemon);
    Command::new("kill")
        .args(["-KILL", "--", &format!("-{}", parent.id())])
        .status()
        .unwrap();
    let _ = parent.wait();
    let Some(longest_ns) = status["counters"]["max_runqueue_wait_ns"].as_u64() else {
        common::not_shown::report_unchecked(
            "the longest wait under churn",
            "the kernel keeps no account of waits (schedstat)",
        );
        return;
    };
    let a_minute = 300.0 * 60.0 / churned.as_secs_f64();
    println!(
        "{a_minute:.0} short processes a minute, {} threads seen: the longest wait {:.1} ms of {:.1} s",
        status["counters"]["tasks_seen"],
        longest_ns as f64 / 1e6,
        churned.as_secs_f64()
    );
    assert!(
        words.contains("longest wait of a managed thread"),
        "{words}"
    );
    assert!(
        longest_ns > 0 && longest_ns < status["running_ns"].as_u64().unwrap() / 2,
        "somebody starves: {longest_ns} ns"
    );
}

const BIRTHS_PER_SECOND: u64 = 1_000;

/// A thread that starts [`BIRTHS_PER_SECOND`] short programs, or as many as the host manages.
struct Births {
    count: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Births {
    fn start() -> Self {
        let (count, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (births, is_stopped) = (count.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let start = Instant::now();
            while !is_stopped.load(Ordering::Relaxed) {
                let expected = start.elapsed().as_millis() as u64 * BIRTHS_PER_SECOND / 1_000;
                let due = expected.saturating_sub(births.load(Ordering::Relaxed));
                let children: Vec<Child> = (0..due.min(100))
                    .map(|_| Command::new("/bin/true").spawn().unwrap())
                    .collect();
                births.fetch_add(children.len() as u64, Ordering::Relaxed);
                children.into_iter().for_each(|mut child| _ = child.wait());
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        Births {
            count,
            stop,
            thread: Some(thread),
        }
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl Drop for Births {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// Duration in seconds from which the cost of births is a figure rather than a sample.
const LONG_RUN_S: u64 = 60;

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

/// Beside a thousand short programs a second, and with thousands of threads at once: what does an observer cost, does
/// it grow, and is a long-running program managed within two windows?
///
/// `CACHEMATE_BIRTHS_SECONDS` and `CACHEMATE_BIRTHS_THREADS` set the size (`make nightly`: 600 and 10,000).
#[test]
fn observing_births_costs_little_and_does_not_grow() {
    let seconds = from_environment("CACHEMATE_BIRTHS_SECONDS", 3);
    let threads = from_environment("CACHEMATE_BIRTHS_THREADS", 500);
    let dir = tempfile::tempdir().unwrap();
    let births = Births::start();
    let pid = std::process::id();
    let config =
        format!("window_ms = 200\npolicy = {{ name = \"default\" }}\n[[rules]]\npid = {pid}\n");
    let mut daemon = start_daemon(dir.path(), &config);
    let every = (Duration::from_millis(50), Duration::from_secs(120));
    let windows_of = |status: &serde_json::Value| status["windows"].as_u64();
    let status = |subject: &str, wanted: &dyn Fn(&serde_json::Value) -> bool| {
        status_when(dir.path(), subject, every, wanted)
    };
    let count_named_tasks = |status: &serde_json::Value, name: &str| {
        let tasks = status["tasks"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        tasks.iter().filter(|task| task["name"] == name).count() as u64
    };
    let settled = status("the first windows", &|status| {
        windows_of(status) > Some(5) && births.count() > 0
    });
    let (start, first_births) = (Instant::now(), births.count());
    let (pages_start, _) = pages_and_open_files(daemon.0.id());
    std::thread::sleep(Duration::from_secs(seconds).div_f64(2.0));
    let (pages_half, files_half) = pages_and_open_files(daemon.0.id());
    std::thread::sleep(Duration::from_secs(seconds).div_f64(2.0));
    let ended = status("the last windows", &|_| true);
    let (pages_end, files_end) = pages_and_open_files(daemon.0.id());
    let rate = (births.count() - first_births) as f64 / start.elapsed().as_secs_f64();
    let count_unread = |status: &serde_json::Value| {
        let services = status["services"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        services
            .iter()
            .filter_map(|service| service["unread_programs"].as_u64())
            .sum::<u64>()
    };
    let unread_programs = count_unread(&ended) - count_unread(&settled);
    let cpu_share_between = |from: &serde_json::Value, to: &serde_json::Value| {
        let increase_of =
            |field: &str| (to[field].as_u64().unwrap() - from[field].as_u64().unwrap()) as f64;
        increase_of("cpu_ns") / increase_of("running_ns")
    };
    let cost_of_births = cpu_share_between(&settled, &ended);
    let lasting = common::ChildGuard(Command::new("sleep").arg("1000").spawn().unwrap());
    let born = windows_of(&status("a status", &|_| true)).unwrap();
    let managed = windows_of(&status("the program that lives", &|status| {
        count_named_tasks(status, "sleep") > 0
    }))
    .unwrap();
    drop((lasting, births));
    let gate = std::sync::Arc::new(std::sync::Barrier::new(threads as usize + 1));
    for _ in 0..threads {
        let gate = gate.clone();
        let thread = std::thread::Builder::new().stack_size(64 << 10);
        thread.spawn(move || _ = gate.wait()).unwrap();
    }
    // Idle threads of a large process count for their service, and are no tasks of their own.
    let counted = |status: &serde_json::Value| {
        let services = status["services"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        services
            .iter()
            .filter_map(|service| service["tasks"].as_u64())
            .sum::<u64>()
    };
    let crowd = status("all threads", &|status| counted(status) > threads);
    std::thread::sleep(Duration::from_secs(2));
    let crowded = status("a status", &|_| true);
    let cost_of_threads = cpu_share_between(&crowd, &crowded);
    gate.wait();
    stop(&mut daemon);
    println!(
        "{rate:.0} births a second for {seconds} s, {unread_programs} only counted: {:.1} % of a CPU, pages {pages_start} -> \
         {pages_half} -> {pages_end}, files {files_half} -> {files_end}; {threads} threads: {:.1} % of a CPU, {} tasks",
        100.0 * cost_of_births,
        100.0 * cost_of_threads,
        crowded["tasks"].as_array().map_or(0, Vec::len)
    );
    // Two windows, and the one that was in progress when the program started.
    assert!(
        managed <= born + 3,
        "born in window {born}, managed in window {managed}"
    );
    assert!(
        pages_end <= pages_half + pages_half / 4 + 256,
        "{pages_half} -> {pages_end} pages"
    );
    assert!(
        files_end <= files_half + 64,
        "{files_half} -> {files_end} open files"
    );
    assert!(
        seconds < LONG_RUN_S || cost_of_births < 0.05,
        "{:.1} % of a CPU",
        100.0 * cost_of_births
    );
    assert!(
        seconds < LONG_RUN_S || cost_of_threads < 0.05,
        "{threads} threads: {:.1} % of a CPU",
        100.0 * cost_of_threads
    );
}
