//! Does the guard of a running daemon roll back a decision that slows programs down, and is a confined group restored
//! when the daemon ends?

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cachemate_linux::kernel::{Kernel, LinuxHost};
use common::not_shown::report_unchecked;
use common::{run, start_daemon, start_sleeper, status_when, stop};
use serde_json::Value;

/// Polling interval, and maximum time until the daemon's state is as expected.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(150));

/// Writes the work counts of two programs as one that is sensitive to confinement would: full speed while it may run on
/// every CPU, half speed while it may not.
struct ProgressWriter {
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ProgressWriter {
    fn start(reports: Vec<(i32, PathBuf)>) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let thread = std::thread::spawn(move || {
            let (host, mut last) = (LinuxHost::new("/"), Instant::now());
            let whole: Vec<_> = reports
                .iter()
                .map(|(pid, _)| host.affinity(*pid).unwrap())
                .collect();
            let mut work = vec![0.0; reports.len()];
            while !ends.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(2));
                let seconds = std::mem::replace(&mut last, Instant::now())
                    .elapsed()
                    .as_secs_f64();
                for (index, (pid, path)) in reports.iter().enumerate() {
                    let squeezed = host.affinity(*pid).is_ok_and(|now| now != whole[index]);
                    work[index] += seconds * if squeezed { 50_000.0 } else { 100_000.0 };
                    let beside = path.with_extension("new");
                    std::fs::write(&beside, (work[index] as u64).to_ne_bytes()).unwrap();
                    std::fs::rename(&beside, path).unwrap();
                }
            }
        });
        ProgressWriter {
            over,
            thread: Some(thread),
        }
    }
}

impl Drop for ProgressWriter {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Is a decision that halves the speed of its programs made, measured, rolled back, put on cooldown, shown and
/// explained, with every mask restored in the end?
#[test]
fn a_harmful_decision_is_rolled_back_and_put_on_cooldown() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [start_sleeper(), start_sleeper()];
    let pids: Vec<i32> = programs
        .iter()
        .map(|program| program.0.id() as i32)
        .collect();
    let host = LinuxHost::new("/");
    let masks_before: Vec<_> = pids
        .iter()
        .map(|pid| host.affinity(*pid).unwrap())
        .collect();
    if masks_before[0].count() < 2 {
        panic!("this test needs two CPUs: a program on the only one cannot be squeezed");
    }
    let reports = dir.path().join("progress");
    std::fs::create_dir(&reports).unwrap();
    let source = ProgressWriter::start(
        pids.iter()
            .map(|pid| (*pid, reports.join(pid.to_string())))
            .collect(),
    );
    let rules: String = pids
        .iter()
        .map(|pid| format!("[[rules]]\npid = {pid}\n"))
        .collect();
    let config = format!(
        "mode = \"act\"\nwindow_ms = 100\n[policy]\nname = \"squeeze\"\n[rollback]\ntrial_windows = 4\ncooldown_windows = 1000000\n{rules}"
    );
    let mut daemon = start_daemon(dir.path(), &config);
    let status = status_when(dir.path(), "the roll-back", PATIENCE, |status| {
        status["counters"]["rollbacks"] != 0
    });
    let reported_decisions = |status: &Value| {
        let decisions = status["decisions"].as_array().unwrap().clone();
        decisions.into_iter().find(|decision| {
            decision["reason"]
                .as_str()
                .unwrap()
                .contains("% since the last decision")
        })
    };
    let decision =
        reported_decisions(&status).expect("the roll-back stands among the last decisions");
    let change = decision["numbers"][0][1].as_f64().unwrap();
    assert!(
        (-75.0..-25.0).contains(&change),
        "half the speed was taken: {decision}"
    );
    // The plan is on cooldown: the policy still requests it, but some windows later no program is confined.
    let at = status["windows"].as_u64().unwrap();
    status_when(dir.path(), "later windows", PATIENCE, |status| {
        status["windows"].as_u64().unwrap() > at + 5
    });
    let masks: Vec<_> = pids
        .iter()
        .map(|pid| host.affinity(*pid).unwrap())
        .collect();
    assert_eq!(masks, masks_before, "it stays out");
    let explained = run(
        dir.path(),
        &["explain", &pids[0].to_string(), "--socket", "s.sock"],
    )
    .ok()
    .out;
    assert!(explained.contains("rolled back"), "{explained}");
    stop(&mut daemon);
    drop(source);
    assert!(!dir.path().join("state/restore.journal").exists());
}

/// Is a real group confined, including a program born in it, and is the group restored when the daemon ends or is
/// killed?
#[test]
fn a_confined_group_is_restored_when_the_daemon_ends() {
    let (group, path) = match common::make_cgroup() {
        Ok(group) => group,
        Err(reason) => {
            // crates/linux/src/act/cpusets.rs tests the same on artificial trees.
            report_unchecked("a real group that is confined", reason);
            return;
        }
    };
    let file = group.0.join("cpuset.cpus");
    let read_file_text = || std::fs::read_to_string(&file).unwrap();
    let text_before = read_file_text();
    let dir = tempfile::tempdir().unwrap();
    let first: u32 = text_before
        .trim()
        .parse::<cachemate_core::CpuSet>()
        .unwrap()
        .first()
        .unwrap();
    let program = start_sleeper();
    std::fs::write(group.0.join("cgroup.procs"), program.0.id().to_string()).unwrap();
    let host = LinuxHost::new("/");
    let pid = program.0.id() as i32;
    let mask = host.affinity(pid).unwrap();
    let config = format!(
        "mode = \"act\"\nwindow_ms = 50\n[[cpusets]]\ncgroup = \"{path}\"\ncpus = \"{first}\"\n"
    );
    for killed in [false, true] {
        let mut daemon = start_daemon(dir.path(), &config);
        let status = status_when(dir.path(), "the group", PATIENCE, |status| {
            status["cpusets"][0]["cgroup"] == path.as_str()
        });
        assert_eq!(status["cpusets"][0]["cpus"], first.to_string());
        assert_eq!(
            (read_file_text().trim(), host.affinity(pid).unwrap().count()),
            (first.to_string().as_str(), 1)
        );
        if killed {
            daemon.0.kill().unwrap();
            daemon.0.wait().unwrap();
            // Waits for the guardian, and restores whatever is left.
            run(dir.path(), &["restore", "--state-dir", "state"]).ok();
        } else {
            stop(&mut daemon);
        }
        assert_eq!(
            (read_file_text(), host.affinity(pid).unwrap()),
            (text_before.clone(), mask.clone()),
            "killed: {killed}"
        );
    }
    drop(program);
}

/// If a policy returns an invalid plan: is the plan rejected and shown, the previous one kept, and does the daemon
/// follow the policy again later?
#[test]
fn an_invalid_plan_is_rejected_and_the_previous_one_kept() {
    let dir = tempfile::tempdir().unwrap();
    let program = start_sleeper();
    let (host, pid) = (LinuxHost::new("/"), program.0.id() as i32);
    let affinity_before = host.affinity(pid).unwrap();
    let config = format!(
        "mode = \"act\"\nwindow_ms = 50\n[policy]\nname = \"astray\"\n[rollback]\nenabled = false\n[[rules]]\npid = {pid}\n"
    );
    let mut daemon = start_daemon(dir.path(), &config);
    let astray = status_when(dir.path(), "the refusal", PATIENCE, |status| {
        !status["refused_plan"].is_null()
    });
    let message = astray["refused_plan"].as_str().unwrap();
    assert!(
        message.contains("does not support these units") || message.contains("way mask"),
        "{message}"
    );
    assert_eq!(
        host.affinity(pid).unwrap().to_string(),
        affinity_before.first().unwrap().to_string(),
        "the previous plan stays in force"
    );
    let shown = run(dir.path(), &["status", "--socket", "s.sock"]).ok();
    let later = status_when(dir.path(), "a good plan", PATIENCE, |status| {
        status["refused_plan"].is_null()
    });
    assert!(
        later["counters"]["refused_plans"].as_u64().unwrap() > 1,
        "{later}"
    );
    assert!(
        shown.out.contains("the previous plan stays in force")
            || later["windows"].as_u64() > Some(60),
        "{}",
        shown.out
    );
    assert_eq!(
        host.affinity(pid).unwrap(),
        affinity_before,
        "a plan that names nobody puts everybody back"
    );
    stop(&mut daemon);
}
