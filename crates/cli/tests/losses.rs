//! On this host: is the waiting loss of a program that shares its CPU named with its culprit, is a program that only
//! computes never blamed for the cache, and does the history still name it after it has ended?

mod common;

use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cachemate_core::CpuSet;
use cachemate_linux::kernel::{Kernel, LinuxHost};
use common::{ChildGuard, run, start_daemon, status_when, stop};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(180);
/// Time for which the programs run together, and then alone.
const PHASE: Duration = Duration::from_secs(8);

/// Starts a program that never sleeps, on one CPU.
fn start_on(cpu: u32, command: &mut Command) -> ChildGuard {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let guard = ChildGuard(child);
    let cpus: CpuSet = [cpu].into_iter().collect();
    LinuxHost::new("/")
        .set_affinity(guard.pid(), &cpus)
        .unwrap();
    guard
}

/// A program that only computes, under a name that no other program of the host has.
fn start_spinner(cpu: u32, program: &Path) -> ChildGuard {
    let spins = ["-c", "while :; do :; done"];
    start_on(cpu, Command::new(program).arg0("sh").args(spins))
}

fn service_named(status: &Value, name: &str) -> Option<Value> {
    let services = status["services"].as_array()?;
    services
        .iter()
        .find(|service| service["name"] == name)
        .cloned()
}

/// Are only CPUs scarce between a copying program and two spinners on its CPU?
#[test]
fn a_spinner_is_named_for_waiting_and_not_for_the_cache() {
    let cpus = LinuxHost::new("/").affinity(std::process::id() as i32);
    let cpu = cpus.unwrap().first().unwrap();
    let dir = tempfile::tempdir().unwrap();
    // Each block costs two system calls, which are the measure of its work without counters.
    let copies = ["if=/dev/zero", "of=/dev/null", "bs=512", "status=none"];
    let copier = start_on(cpu, Command::new("dd").args(copies));
    // The pids of the spinners are not known yet, so that a rule names their command.
    let name = format!("spin{}", std::process::id());
    let program = dir.path().join(&name);
    symlink("/bin/sh", &program).unwrap();
    let config = format!(
        "window_ms = 200\npolicy = {{ name = \"default\" }}\n[[rules]]\npid = {}\n[[rules]]\ncommand = \"{name}\"\n",
        copier.pid()
    );
    let mut daemon = start_daemon(dir.path(), &config);
    let poll = (Duration::from_millis(100), PATIENCE);
    status_when(dir.path(), "windows of the copier alone", poll, |status| {
        status["windows"].as_u64() > Some(30) && service_named(status, "dd").is_some()
    });
    for round in 0..2 {
        let spinners = [(); 2].map(|()| start_spinner(cpu, &program));
        let waits = |status: &Value| {
            service_named(status, "dd").is_some_and(|copier| {
                copier["waiting_percent"].as_f64() > Some(80.0)
                    && copier["waiting_by"][0]["service"] == name.as_str()
                    && copier["waiting_by"][0]["share"].as_f64() > Some(0.5)
            })
        };
        status_when(dir.path(), "the culprit of the waiting", poll, waits);
        assert_innocent(dir.path(), &name, &format!("round {round}, together"));
        drop(spinners);
        assert_innocent(dir.path(), &name, &format!("round {round}, afterward"));
    }
    // A minute keeps its worst window, which may be one before the spinners: they stay until one has them for a cause.
    let spinners = [(); 2].map(|()| start_spinner(cpu, &program));
    let start = Instant::now();
    while !is_blamed_in_history(dir.path(), &name) {
        assert!(
            start.elapsed() < PATIENCE,
            "no minute has {name} for a cause"
        );
        std::thread::sleep(Duration::from_secs(1));
    }
    drop(spinners);
    // The culprit has ended, and the daemon still explains it.
    let start = Instant::now();
    loop {
        let explained = run(dir.path(), &["explain", &name, "--socket", "s.sock"]);
        let text = &explained.out;
        if text.starts_with(&format!("{name} does not run now; its history"))
            && text.contains("losses of\n  dd")
        {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{text}{}", explained.err);
        std::thread::sleep(Duration::from_secs(1));
    }
    stop(&mut daemon);

    // The daemon and the culprit have ended, and the history is there.
    let text = run(dir.path(), &["history", &name, "--state-dir", "state"])
        .ok()
        .out;
    assert!(
        text.contains("is among the causes of losses of\n  dd in"),
        "{text}"
    );
    let json = run(dir.path(), &["history", "--state-dir", "state", "--json"]).json();
    let worst = json["minutes"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|minute| {
            let services = minute["services"].as_array().unwrap();
            let copier = services.iter().find(|service| service["name"] == "dd")?;
            copier["waiting_percent"].as_f64()
        });
    assert!(worst.fold(0.0, f64::max) > 80.0, "{json}");
}

/// Does a minute have this service for a cause of the copier's waiting?
fn is_blamed_in_history(dir: &Path, culprit: &str) -> bool {
    let result = run(dir, &["history", "--state-dir", "state", "--json"]);
    if result.code != Some(0) {
        // No minute has ended yet.
        return false;
    }
    let history = result.json();
    let minutes = history["minutes"].as_array().unwrap().iter();
    let mut services = minutes.flat_map(|minute| minute["services"].as_array().unwrap());
    services.any(|service| {
        let causes = service["waiting_by"].as_array();
        let is_named = |cause: &Value| cause[0]["name"] == culprit;
        service["name"] == "dd" && causes.is_some_and(|causes| causes.iter().any(is_named))
    })
}

/// Watches for a phase that no cache loss of the copier by a spinner is claimed.
#[track_caller]
fn assert_innocent(dir: &Path, spinner: &str, phase: &str) {
    let start = Instant::now();
    while start.elapsed() < PHASE {
        let status = run(dir, &["status", "--json", "--socket", "s.sock"]).json();
        let copier = service_named(&status, "dd").unwrap();
        let causes = copier["cache_by"].as_array().unwrap();
        let accused = causes
            .iter()
            .find(|cause| cause["service"] == spinner && cause["percent"].as_f64() > Some(0.0));
        assert!(accused.is_none(), "{phase}: {copier}");
        std::thread::sleep(Duration::from_millis(200));
    }
}
