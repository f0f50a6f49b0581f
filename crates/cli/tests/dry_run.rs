//! Does `--dry-run` report the changes that would be made, and make none?

mod common;

use std::path::Path;

use cachemate_linux::kernel::{Kernel, LinuxHost};
use common::{MANAGE, acting_config, run, start_sleeper};

/// `manage --dry-run` in this directory, with additional arguments.
fn dry_run_with(dir: &Path, config: &str, more: &[&str]) -> common::CommandResult {
    std::fs::write(dir.join("c.toml"), config).unwrap();
    let args: Vec<&str> = MANAGE
        .iter()
        .copied()
        .chain(["--dry-run"])
        .chain(more.iter().copied())
        .collect();
    run(dir, &args)
}

/// With a policy that puts all tasks on one CPU: is the move printed, as a line and as JSON, while no task is moved, no
/// journal written and no socket opened?
#[test]
fn a_dry_run_prints_the_intended_moves_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let program = start_sleeper();
    let host = LinuxHost::new("/");
    let affinity_before = host.affinity(program.pid()).unwrap();
    let config = acting_config("squeeze", 20, &program.pid().to_string());
    let answer = dry_run_with(dir.path(), &config, &["--json"]).json();
    let first = affinity_before.first().unwrap();
    assert_eq!(answer["changes"].as_array().unwrap().len(), 1, "{answer}");
    let change = &answer["changes"][0];
    assert_eq!(
        change["line"],
        format!("move task 0 'sleep' to CPUs {first} (was {affinity_before})")
    );
    assert_eq!(
        change["change"]["kind"]["affinity"]["to"],
        first.to_string()
    );
    assert_eq!(answer["reasons"][0], "all tasks onto one CPU");
    assert!(answer["window"].as_u64().unwrap() >= 8, "{answer}");
    let words = dry_run_with(dir.path(), &config, &[]).ok().out;
    assert!(
        words.contains(&format!(
            "0  move task 0 'sleep' to CPUs {first} (was {affinity_before})\n"
        )),
        "{words}"
    );
    assert_eq!(host.affinity(program.pid()).unwrap(), affinity_before);
    for leftover in ["state", "s.sock", "progress"] {
        assert!(!dir.path().join(leftover).exists(), "{leftover} was made");
    }
}

/// Does `--check` print the current matches of each rule, warn about a rule without a match, and reject impossible
/// values?
#[test]
fn a_check_names_matches_and_rejects_impossible_values() {
    let dir = tempfile::tempdir().unwrap();
    let program = start_sleeper();
    let run_check = |config: &str| {
        std::fs::write(dir.path().join("c.toml"), config).unwrap();
        let args: Vec<&str> = MANAGE.iter().copied().chain(["--check"]).collect();
        run(dir.path(), &args)
    };
    let rules = format!(
        "[[rules]]\npid = {}\nmax_slowdown = \"5%\"\n[[rules]]\ncgroup = \"/no-such.slice/*/*pod1234*\"\n",
        program.pid()
    );
    let checked = run_check(&rules).ok();
    assert!(
        checked.out.contains(&format!(
            "rules[0] (pid {}) managed, at most 5 % slower: 1 process: sleep\n",
            program.pid()
        )),
        "{}",
        checked.out
    );
    assert!(
        checked
            .out
            .contains("rules[1] (cgroup '/no-such.slice/*/*pod1234*') managed: 0 processes\n"),
        "{}",
        checked.out
    );
    assert!(
        checked.err.contains("warning: rules[1]") && checked.err.contains("matches nothing now"),
        "{}",
        checked.err
    );
    assert!(!checked.err.contains("rules[0]"), "{}", checked.err);
    for (config, message) in [
        (
            "[[rules]]\nmax_slowdown = 5\n",
            "found 5, expected a number below 1",
        ),
        (
            "[[cpusets]]\ncgroup = \"/a\"\ncpus = \"0-8191\"\n",
            "cpusets[0].cpus: found '0-8191', expected some of the CPUs",
        ),
    ] {
        run_check(config).exits_with(1, &[message]);
    }
}

/// If there is nothing to change, is this reported after the requested number of windows?
#[test]
fn nothing_to_change_is_reported_after_the_requested_windows() {
    let dir = tempfile::tempdir().unwrap();
    let program = start_sleeper();
    let config = acting_config("default", 10, &program.pid().to_string());
    let words = dry_run_with(dir.path(), &config, &["--max-windows", "3"])
        .ok()
        .out;
    assert_eq!(words, "policy 'default': none in 3 windows\n");
    let answer = dry_run_with(dir.path(), &config, &["--max-windows", "2", "--json"]).json();
    assert_eq!(
        (&answer["windows"], answer["window"].is_null()),
        (&2.into(), true),
        "{answer}"
    );
    assert_eq!(answer["changes"].as_array().unwrap().len(), 0);
}

/// Does a configuration without a policy use `auto`, which changes nothing on a host without evidence?
#[test]
fn auto_is_the_default_and_changes_nothing_without_evidence() {
    let dir = tempfile::tempdir().unwrap();
    let program = start_sleeper();
    let named = acting_config("default", 10, &program.pid().to_string());
    let config = named.replace("[policy]\nname = \"default\"\n", "");
    assert_ne!(config, named);
    let words = dry_run_with(dir.path(), &config, &["--max-windows", "3"])
        .ok()
        .out;
    // Notes follow if the host lacks evidence.
    assert!(
        words.starts_with("policy 'auto': none in 3 windows\n"),
        "{words}"
    );
}

/// Are programs of `run --dry-run` started and left where they are, and are the intended changes reported?
#[test]
fn run_starts_the_programs_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let script = "sleep 5; grep Cpus_allowed_list /proc/self/status > mask";
    let state = dir.path().join("state");
    let args = [
        "run",
        "--dry-run",
        "--policy",
        "shake",
        "--window-ms",
        "20",
        "--json",
        "-o",
        "answer.json",
        "sh",
        "-c",
        script,
    ];
    let output = common::command(dir.path(), &args)
        .env("CACHEMATE_STATE_DIR", &state)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(output.stdout, b"", "standard output is the program's");
    let answer = std::fs::read(dir.path().join("answer.json")).unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
    assert_eq!(
        answer["programs"][0]["managed"][0]["code"], 0,
        "the program ran to its end"
    );
    let lines = answer["dry_run"]["changes"].as_array().unwrap();
    let of_it = |line: &serde_json::Value| {
        line["line"]
            .as_str()
            .is_some_and(|line| line.contains("task"))
    };
    assert!(!lines.is_empty() && lines.iter().all(of_it), "{answer}");
    let own = LinuxHost::new("/")
        .affinity(std::process::id() as i32)
        .unwrap();
    let mask = std::fs::read_to_string(dir.path().join("mask")).unwrap();
    assert_eq!(
        mask.trim(),
        format!("Cpus_allowed_list:\t{own}"),
        "nobody was moved"
    );
    assert!(!state.join(format!("run-{}", std::process::id())).exists());
}

/// Are `--max-windows` and `--json` of `manage` rejected without a dry run?
#[test]
fn dry_run_options_are_rejected_without_a_dry_run() {
    let dir = tempfile::tempdir().unwrap();
    for more in [["--max-windows", "3"].as_slice(), &["--json"]] {
        let args: Vec<&str> = MANAGE.iter().copied().chain(more.iter().copied()).collect();
        assert_eq!(run(dir.path(), &args).code, Some(2));
    }
}
