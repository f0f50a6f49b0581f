//! Do commands that run programs leave the programs' output and exit status unchanged?

mod common;

use std::path::Path;
use std::process::Stdio;

use common::{CommandResult, command, run};

/// A program that writes to both outputs and fails with this status.
fn failing(status: u8) -> [String; 3] {
    [
        "sh",
        "-c",
        &format!("echo out; echo err >&2; exit {status}"),
    ]
    .map(str::to_string)
}

fn run_of(dir: &Path, args: &[&str], programs: &[String]) -> CommandResult {
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    run(dir, &[args, &programs[..]].concat())
}

/// Is the output of a recorded or profiled program unchanged byte for byte, with and without a summary?
#[test]
fn a_programs_output_is_unchanged_when_recorded_or_profiled() {
    let dir = tempfile::tempdir().unwrap();
    let text: Vec<u8> = (0..20_000u32)
        .flat_map(|at| (at % 251).to_le_bytes())
        .collect();
    std::fs::write(dir.path().join("text"), text).unwrap();
    let compress = ["gzip", "-n", "-c", "text"];
    let alone = std::process::Command::new(compress[0])
        .args(&compress[1..])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let commands: &[(&[&str], bool)] = &[
        (&["record", "-q", "-o", "quiet.cmt", "--"], true),
        (&["record", "-o", "said.cmt", "--"], false),
        (&["record", "--json", "-o", "json.cmt", "--"], false),
        (&["profile", "-q", "-o", "quiet.json", "--"], true),
        (&["profile", "--json", "-o", "file.json", "--"], true),
        (&["profile", "--json", "--"], false),
        (&["run", "-q", "--observe-only", "--"], true),
        (
            &["run", "--observe-only", "--json", "-o", "run.json", "--"],
            true,
        ),
        (&["run", "--observe-only", "--"], false),
    ];
    for (args, silent) in commands {
        let child = command(dir.path(), &[*args, &compress[..]].concat())
            .env("CACHEMATE_STATE_DIR", dir.path().join("state"))
            .stdout(Stdio::piped())
            .output()
            .unwrap();
        let message = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{args:?}: {message}");
        assert!(
            child.stdout == alone.stdout,
            "{args:?}: {} bytes, {} alone",
            child.stdout.len(),
            alone.stdout.len()
        );
        assert_eq!(message.is_empty(), *silent, "{args:?}: {message}");
    }
}

/// Do `record` and `profile` pass on a program's exit status, even if a signal ended it?
#[test]
fn the_exit_status_is_passed_on() {
    let dir = tempfile::tempdir().unwrap();
    let killed = ["sh", "-c", "kill -TERM $$"].map(str::to_string);
    for (name, program, status) in [("three", failing(3), 3), ("killed", killed, 128 + 15)] {
        for (command, ending) in [("record", "cmt"), ("profile", "json")] {
            let file = format!("{name}.{ending}");
            let output = run_of(dir.path(), &[command, "-q", "-o", &file, "--"], &program);
            assert_eq!(output.code, Some(status), "{command}: {}", output.err);
            assert!(dir.path().join(&file).exists(), "{command} keeps {file}");
        }
    }
}

/// Does `run` exit with 1 and name only the program that failed?
#[test]
fn run_names_the_program_that_failed() {
    let dir = tempfile::tempdir().unwrap();
    for quiet in [
        &["run", "--observe-only"][..],
        &["run", "-q", "--observe-only"],
    ] {
        run(
            dir.path(),
            &[quiet, &["--", "false", ":::", "true"]].concat(),
        )
        .exits_with(1, &["a program failed: 'false' (exit 1)\n"]);
    }
}

/// Does a comparison refuse a verdict on programs with fewer than ten windows, and start the clock when the program may
/// run?
#[test]
fn short_programs_are_not_compared() {
    let dir = tempfile::tempdir().unwrap();
    let compare = ["run", "--compare", "1", "--observe-only", "--json", "-o"];
    // A loop of work, because a timer would also run while the program waits for its start.
    let count = "i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done";
    let work = |file: &str, window: &str| {
        let args = [
            &compare[..],
            &[file, "--window-ms", window, "--", "sh", "-c", count],
        ]
        .concat();
        run(dir.path(), &args).ok();
        let answer: serde_json::Value =
            serde_json::from_slice(&std::fs::read(dir.path().join(file)).unwrap()).unwrap();
        answer["programs"][0].clone()
    };
    let short = work("short.json", "1000");
    assert_eq!(
        (&short["too_short_to_compare"], &short["speed_ratio"]),
        (&true.into(), &serde_json::Value::Null)
    );
    let long = work("long.json", "10");
    assert_eq!(long["too_short_to_compare"], false);
    assert!(long["speed_ratio"].is_number(), "{long}");
}
