//! Does an interrupt end the work with exit code 130 and keep the results so far?

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use crate::common::{command, run};
use rustix::process::{Pid, Signal, kill_process};

fn send_interrupt(child: &Child) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
}

fn wait_for(path: &Path, child: &mut Child) {
    let start = Instant::now();
    while !path.exists() {
        assert!(
            child.try_wait().unwrap().is_none(),
            "ended before it was interrupted"
        );
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "{} never came",
            path.display()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs `args -- an endless program`, interrupts it once the program is running, and returns its messages on stderr.
fn run_interrupted(dir: &Path, args: &[&str]) -> String {
    let endless =
        "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done; : > under-way; while :; do :; done";
    let mut child = command(dir, &[args, &["--", "sh", "-c", endless]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for(&dir.join("under-way"), &mut child);
    send_interrupt(&child);
    let mut message = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut message)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{message}");
    message
}

/// Is the part recorded before the interrupt a complete file?
#[test]
fn an_interrupted_recording_is_a_complete_file() {
    let dir = tempfile::tempdir().unwrap();
    let message = run_interrupted(dir.path(), &["record", "--l1", "none", "-o", "x.cmt"]);
    assert!(message.contains("interrupted: x.cmt keeps"), "{message}");
    let read = run(dir.path(), &["mrc", "x.cmt", "--json"]).json();
    assert!(read["accesses"].as_u64().unwrap() > 3000, "{read}");
}

/// Does a recorded program end with a recorder that is killed?
#[test]
fn a_recorded_program_ends_with_a_killed_recorder() {
    let dir = tempfile::tempdir().unwrap();
    let program = ": > under-way; exec sleep 1000";
    let mut child = command(
        dir.path(),
        &["record", "-o", "x.cmt", "--", "sh", "-c", program],
    )
    .stdout(Stdio::null())
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    wait_for(&dir.path().join("under-way"), &mut child);
    let children_file = format!("/proc/{0}/task/{0}/children", child.id());
    let recorded: Vec<i32> = std::fs::read_to_string(children_file)
        .unwrap()
        .split_ascii_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect();
    assert_eq!(recorded.len(), 1, "{recorded:?}");

    child.kill().unwrap();
    child.wait().unwrap();
    let stat_path = format!("/proc/{}/stat", recorded[0]);
    let is_running = || {
        let stat = std::fs::read_to_string(&stat_path).unwrap_or_default();
        let state = stat
            .rsplit(')')
            .next()
            .and_then(|rest| rest.split_whitespace().next());
        state.is_some_and(|state| state != "Z" && state != "X")
    };
    let start = Instant::now();
    while is_running() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "{recorded:?} still runs"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Is the part recorded before the interrupt profiled, and is the profile usable for a prediction?
#[test]
fn an_interrupted_profile_covers_the_recorded_part() {
    let dir = tempfile::tempdir().unwrap();
    let message = run_interrupted(dir.path(), &["profile", "--l1", "none", "-o", "x.json"]);
    assert!(
        message.contains("interrupted: the profile covers"),
        "{message}"
    );
    let profile = run(dir.path(), &["profile", "x.json", "--json"]).json();
    assert!(profile["records"].as_u64().unwrap() > 3000, "{profile}");
}

/// Starts `mrc` on its standard input, and returns the process with the pipe.
fn curve_of_input(dir: &Path) -> (Child, ChildStdin) {
    let mut child = command(dir, &["mrc", "-", "--format", "u64", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let input = child.stdin.take().unwrap();
    (child, input)
}

/// The bytes of this number of accesses, each to a different line.
fn accesses_bytes(count: u64) -> Vec<u8> {
    (0..count).flat_map(|at| (at * 64).to_le_bytes()).collect()
}

/// Does an interrupted curve cover the records read before?
#[test]
fn an_interrupted_curve_covers_the_records_read_before() {
    let dir = tempfile::tempdir().unwrap();
    let (child, mut input) = curve_of_input(dir.path());
    let portion = accesses_bytes(8192);
    let portions_before = 64;
    for _ in 0..portions_before {
        input.write_all(&portion).unwrap();
    }
    send_interrupt(&child);
    // Continues until the reader has closed the pipe.
    while input.write_all(&portion).is_ok() {}
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{message}");
    assert!(
        message.contains("interrupted: the result covers the first"),
        "{message}"
    );
    let result: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("one JSON object");
    let accesses = result["accesses"].as_u64().unwrap();
    // The curve contains all accesses except those in the pipe and in the reader's buffer.
    assert!(
        accesses > (portions_before - 48) * 8192 && result["cold"] == 8192,
        "{result}"
    );
}

/// Does an interrupt end a curve whose input is silent, before the first byte and after some?
#[test]
fn an_interrupt_ends_a_curve_of_a_silent_input() {
    let dir = tempfile::tempdir().unwrap();
    for portion in [0u64, 4096] {
        let (mut child, mut input) = curve_of_input(dir.path());
        input.write_all(&accesses_bytes(portion)).unwrap();
        std::thread::sleep(Duration::from_millis(500));
        send_interrupt(&child);
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(
                start.elapsed() < Duration::from_secs(180),
                "still waiting for its input"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        let output = child.wait_with_output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{message}");
        if portion > 0 {
            let result: serde_json::Value =
                serde_json::from_slice(&output.stdout).expect("one JSON object");
            assert_eq!(result["accesses"], portion, "{message}");
        }
        drop(input);
    }
}

/// Does an interrupt end a calculation within seconds, although its simulation would last for minutes?
#[test]
fn an_interrupted_calculation_ends_within_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let args = [
        "repro",
        "attribute",
        "mcf",
        "--with",
        "art",
        "--cycles",
        "900000",
        "--no-store",
    ];
    let mut child = command(dir.path(), &args)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(1));
    send_interrupt(&child);
    let mut message = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut message)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{message}");
    assert!(
        message.contains("interrupted: the calculation has no result yet"),
        "{message}"
    );
}
