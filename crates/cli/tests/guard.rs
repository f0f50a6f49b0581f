//! Does the guard of a running daemon roll back a decision that slows programs down, and is a confined group restored
//! when the daemon ends?

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use cachemate_linux::kernel::{Kernel, LinuxHost};
use common::not_shown::report_unchecked;
use common::{ChildGuard, run, start_daemon, start_sleeper, status_when, stop};
use serde_json::Value;

/// Polling interval, and maximum time until the daemon's state is as expected.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(150));

/// Variable with the socket of the daemon, for the program of the test below.
const SOCKET: &str = "CACHEMATE_TEST_SOCKET";

/// A program that reports its work as one that is sensitive to confinement would: full speed while it may run on every
/// CPU, half speed while it may not.
fn start_reporter(dir: &Path) -> ChildGuard {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "part_of_a_program_that_reports_its_work",
            "--ignored",
        ])
        .env(SOCKET, dir.join("s.sock"))
        .stdout(std::process::Stdio::null());
    ChildGuard(command.spawn().unwrap())
}

#[test]
#[ignore = "a program of the test below"]
fn part_of_a_program_that_reports_its_work() {
    use std::os::unix::fs::FileExt;
    let Some(socket) = std::env::var_os(SOCKET) else {
        return;
    };
    let request = || cachemate_daemon::socket::request_report_memory(Path::new(&socket));
    let memory = loop {
        match request() {
            Ok(memory) => break memory,
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let (host, own_pid) = (LinuxHost::new("/"), std::process::id() as i32);
    let whole = host.affinity(own_pid).unwrap();
    let (mut last, mut work) = (Instant::now(), 0.0);
    loop {
        std::thread::sleep(Duration::from_millis(2));
        let seconds = std::mem::replace(&mut last, Instant::now())
            .elapsed()
            .as_secs_f64();
        // The thread that reports is a later one of the program; its mask is that of all.
        let is_squeezed = host.affinity(own_pid).is_ok_and(|now| now != whole);
        work += seconds * if is_squeezed { 50_000.0 } else { 100_000.0 };
        memory
            .write_all_at(&(work as u64).to_ne_bytes(), 0)
            .unwrap();
    }
}

/// Is a decision that halves the speed of its programs made, measured, rolled back, put on cooldown, shown and
/// explained, with every mask restored in the end?
#[test]
fn a_harmful_decision_is_rolled_back_and_put_on_cooldown() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [start_reporter(dir.path()), start_reporter(dir.path())];
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

/// Is a default configuration that has vanished an error at a reload, so that its rules stay in force?
#[test]
fn a_vanished_configuration_drops_no_rule() {
    let dir = tempfile::tempdir().unwrap();
    let program = start_sleeper();
    let pid = program.0.id();
    let config = dir.path().join("default.toml");
    let text = format!("window_ms = 100\n[[rules]]\npid = {pid}\naction = \"observe\"\n");
    std::fs::write(&config, text).unwrap();
    let mut command = common::command(dir.path(), &["--quiet", "manage", "--socket", "s.sock"]);
    command.env("CACHEMATE_CONFIG", &config);
    let mut daemon = ChildGuard(command.stdout(std::process::Stdio::null()).spawn().unwrap());
    let has_task = |status: &Value| !status["tasks"].as_array().unwrap().is_empty();
    status_when(dir.path(), "the program", PATIENCE, has_task);
    std::fs::remove_file(&config).unwrap();
    let hang_up = std::process::Command::new("kill")
        .args(["-HUP", &daemon.0.id().to_string()])
        .status();
    assert!(hang_up.unwrap().success());
    let status = status_when(dir.path(), "the error", PATIENCE, |status| {
        status["config_error"]
            .as_str()
            .is_some_and(|error| error.contains("the file is gone"))
    });
    assert!(has_task(&status), "{status}");
    stop(&mut daemon);
}
