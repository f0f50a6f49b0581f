//! Does the log of a real managed run on this host replay with the same decisions?

mod common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{ChildGuard, run, start_daemon, status_when, stop};

const PATIENCE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(120));

/// A program that alternates between computing and resting, so that windows have something to measure and the test is
/// cheap.
fn start_busy_program() -> ChildGuard {
    let turns = "while :; do i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done; sleep 0.02; done";
    ChildGuard(
        Command::new("sh")
            .args(["-c", turns])
            .stdin(Stdio::null())
            .spawn()
            .unwrap(),
    )
}

/// Runs a daemon over two busy programs until its policy has decided for this number of windows, with a properly closed
/// log.
fn record_managed_run(dir: &Path, policy: &str, windows: u64) {
    let programs = [start_busy_program(), start_busy_program()];
    let rules: String = programs
        .iter()
        .map(|program| format!("[[rules]]\npid = {}\n", program.pid()))
        .collect();
    let config = format!(
        "mode = \"act\"\nwindow_ms = 100\nrun_log = \"run.jsonl.zst\"\n[policy]\nname = \"{policy}\"\n{rules}"
    );
    let mut daemon = start_daemon(dir, &config);
    status_when(dir, "its windows", PATIENCE, |status| {
        status["windows"].as_u64().is_some_and(|at| at >= windows)
    });
    stop(&mut daemon);
}

/// Are plans, reasons and forecasts of a live run the same when its log is replayed, with probe results and guard?
///
/// Cost: about 20 s of CPU, because three policies each observe two running programs for tens of seconds.
#[test]
fn a_replayed_live_run_gives_the_same_plans() {
    for (policy, windows) in [("random", 15), ("dio", 15), ("intensity-gangs", 25)] {
        let dir = tempfile::tempdir().unwrap();
        record_managed_run(dir.path(), policy, windows);
        let replayed = run(dir.path(), &["replay", "run.jsonl.zst", "--json"]).json();
        assert_eq!(replayed["recorded_policy"], policy);
        assert_eq!(
            replayed["same_plans"], replayed["windows"],
            "{policy}: {replayed}"
        );
        assert!(
            replayed["windows"].as_u64().unwrap() >= windows,
            "{policy}: {replayed}"
        );
    }
}
