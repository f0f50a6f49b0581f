//! The shipped systemd unit.

mod common;
#[path = "common/managed.rs"]
mod managed;

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::not_shown::report_unchecked;
use common::{ChildGuard, MANAGE, acting_config, run, run_by, run_with_umask, start_sleeper, stop};
use managed::{PATIENCE, is_reached_within, send_signal, signals};

/// Maximum exposure of the unit by systemd's score, in tenths; 0 is best, 100 worst.
const MAX_EXPOSURE: &str = "30";

/// Is the unit's exposure by systemd's score at most the stated one?
#[test]
fn the_units_exposure_is_at_most_the_stated_score() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/cachemate.service");
    let threshold = format!("--threshold={MAX_EXPOSURE}");
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", &threshold])
        .arg(&unit)
        .output();
    let Ok(out) = output else {
        report_unchecked("the unit's exposure", "no systemd-analyze");
        return;
    };
    let (stdout_text, error) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    if stdout_text.is_empty() {
        report_unchecked("the unit's exposure", &error);
        return;
    }
    let verdict = stdout_text.lines().last().unwrap_or_default();
    assert!(out.status.success(), "{verdict}");
}

/// Can the user of a collector read the metrics' file, although the unit's umask keeps files from other users?
#[test]
fn a_collector_can_read_the_textfile_under_the_units_umask() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/cachemate.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    let umask = unit
        .lines()
        .find_map(|line| line.strip_prefix("UMask="))
        .expect("the unit has a umask");
    let dir = tempfile::tempdir().unwrap();
    let config = "window_ms = 100\nmetrics_textfile = \"metrics.prom\"\n";
    std::fs::write(dir.path().join("c.toml"), config).unwrap();
    let mut daemon = ChildGuard(run_with_umask(dir.path(), umask, &MANAGE).spawn().unwrap());
    let mode_of = |name: &str| {
        let metadata = std::fs::metadata(dir.path().join(name)).ok()?;
        Some(metadata.permissions().mode() & 0o777)
    };
    assert!(
        is_reached_within(PATIENCE, || mode_of("metrics.prom").is_some()),
        "no metrics are written"
    );
    assert_eq!(mode_of("metrics.prom"), Some(0o644));
    stop(&mut daemon);
    assert_eq!(mode_of("metrics.prom"), None, "it ends with the daemon");
}

/// System calls in one of systemd's sets, including its nested sets.
fn calls_of(set: &str) -> Option<BTreeSet<String>> {
    let out = Command::new("systemd-analyze")
        .args(["syscall-filter", set])
        .output()
        .ok()?;
    let text = String::from_utf8(out.stdout)
        .ok()
        .filter(|text| !text.is_empty())?;
    let mut calls = BTreeSet::new();
    for name in text
        .lines()
        .skip(1)
        .map(str::trim)
        .filter(|name| !name.is_empty() && !name.starts_with('#'))
    {
        if name.starts_with('@') {
            calls.extend(calls_of(name)?);
        } else {
            calls.insert(name.to_string());
        }
    }
    Some(calls)
}

/// System calls that the unit permits: the sets and names of its filters, in order.
fn let_through(unit: &str) -> Option<BTreeSet<String>> {
    let mut calls = BTreeSet::new();
    for line in unit
        .lines()
        .filter_map(|line| line.strip_prefix("SystemCallFilter="))
    {
        let (names, taken_out) = line
            .strip_prefix('~')
            .map_or((line, false), |names| (names, true));
        for name in names.split_ascii_whitespace() {
            let named = if name.starts_with('@') {
                calls_of(name)?
            } else {
                BTreeSet::from([name.to_string()])
            };
            if taken_out {
                calls.retain(|call| !named.contains(call));
            } else {
                calls.extend(named);
            }
        }
    }
    Some(calls)
}

/// Does the unit's filter permit every system call that a daemon and its guardian make while they manage, answer and
/// restore, and those of `restore` afterward?
#[test]
fn the_units_filter_permits_every_system_call_in_use() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/cachemate.service");
    let allowed = let_through(&std::fs::read_to_string(unit).unwrap());
    let traced = Command::new("strace")
        .args(["-qq", "-o", "/dev/null", "true"])
        .stderr(Stdio::null())
        .status();
    let (Some(allowed), true) = (allowed, traced.is_ok_and(|status| status.success())) else {
        report_unchecked(
            "calls beyond the unit's filter",
            "no strace or no systemd-analyze",
        );
        return;
    };
    assert!(
        allowed.len() > 100 && !allowed.contains("mount") && !allowed.contains("add_key"),
        "{allowed:?}"
    );
    let dir = tempfile::tempdir().unwrap();
    let program = start_sleeper();
    let config =
        acting_config("shake", 20, &program.pid().to_string()) + "[[rules]]\ncommand = \"none\"\n";
    std::fs::write(
        dir.path().join("c.toml"),
        format!("metrics_address = \"127.0.0.1:0\"\n{config}"),
    )
    .unwrap();
    let run_traced =
        |args: &[&str], name: &str| run_by(dir.path(), &["strace", "-f", "-qq", "-o", name], args);
    let mut tracer = ChildGuard(run_traced(&MANAGE, "calls").spawn().unwrap());
    let journal = dir.path().join("state/restore.journal");
    assert!(
        is_reached_within(PATIENCE, || journal.exists()),
        "it does not act under strace"
    );
    std::thread::sleep(Duration::from_millis(500));
    run(dir.path(), &["status", "--socket", "s.sock"]).ok();
    let children =
        std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", tracer.pid())).unwrap();
    send_signal(
        children
            .split_ascii_whitespace()
            .next()
            .unwrap()
            .parse()
            .unwrap(),
        signals::TERM,
    );
    assert!(
        is_reached_within(PATIENCE, || tracer.0.try_wait().unwrap().is_some()),
        "it does not end"
    );
    run_traced(&["restore", "--state-dir", "state"], "restore-calls")
        .status()
        .unwrap();
    let mut beyond = BTreeSet::new();
    for file in ["calls", "restore-calls"] {
        let text = std::fs::read_to_string(dir.path().join(file)).unwrap();
        let called = text.lines().filter_map(|line| {
            line.split_once(' ')?
                .1
                .trim_start()
                .split_once('(')
                .map(|(name, _)| name)
        });
        // A call that resumes after another thread's has its name in brackets.
        let names = called.filter(|name| {
            name.chars()
                .all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
        });
        beyond.extend(
            names
                .filter(|name| !allowed.contains(*name))
                .map(str::to_string),
        );
    }
    assert!(beyond.is_empty(), "called, and not let through: {beyond:?}");
    if !Path::new("/run/systemd/system").exists() {
        report_unchecked(
            "a daemon, its guardian and a colored run under the shipped unit",
            "no systemd runs here",
        );
    }
}
