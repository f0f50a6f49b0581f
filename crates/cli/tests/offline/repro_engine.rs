//! Do the papers' experiments give the same digits when an engine executes their runs?

use std::fs;
use std::path::Path;

use crate::common::run;
use serde_json::Value;

/// A matrix of pairs with nested runs; two dependent calls; one that fails for lack of a recording.
const IDS: [&str; 3] = ["CA-2", "CP-6", "TC-SERVER"];

fn run_repro(at: &Path, more: &[&str]) -> (Option<i32>, String, Value) {
    let outcome = run(
        at,
        &[
            &["repro"],
            &IDS[..],
            &["--sample", "--seed", "1", "--json"],
            more,
        ]
        .concat(),
    );
    let answer = serde_json::from_str(&outcome.out)
        .unwrap_or_else(|error| panic!("{error}: {}{}", outcome.out, outcome.err));
    (outcome.code, outcome.err, answer)
}

/// Names and times of the results in a sweep's directory.
fn stored_results(dir: &Path) -> Vec<(String, std::time::SystemTime)> {
    let dirs = fs::read_dir(dir.join("results")).unwrap().flatten();
    let files = dirs.flat_map(|entry| fs::read_dir(entry.path()).unwrap().flatten());
    let mut all: Vec<_> = files
        .map(|entry| {
            (
                entry.file_name().to_string_lossy().into_owned(),
                entry.metadata().unwrap().modified().unwrap(),
            )
        })
        .collect();
    all.sort();
    all
}

/// Are findings computed run by run in two threads the same digits as those computed at once, including failures, and
/// does the same command repeat nothing?
///
/// Cost: 17 s of CPU, because one experiment runs three times.
#[test]
fn findings_run_by_run_have_the_same_digits_as_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let (code, message, plain) = run_repro(root, &["--no-store"]);
    assert!(
        code == Some(1) && message.contains("TC-SERVER"),
        "{message}"
    );
    assert!(plain["results"].as_array().unwrap().len() > 3);
    let engine = ["--engine", "local", "--workers", "2", "-o", "out"];
    let (code, message, swept) = run_repro(root, &engine);
    assert!(
        code == Some(1) && message.contains("TC-SERVER"),
        "{message}"
    );
    assert_eq!(swept["results"], plain["results"]);
    let first = stored_results(&root.join("out/sweep"));
    assert!(first.len() > 10, "{first:?}");
    let (_, _, again) = run_repro(root, &engine);
    assert_eq!(again["results"], plain["results"]);
    assert_eq!(stored_results(&root.join("out/sweep")), first);
    let written: Value =
        serde_json::from_str(&fs::read_to_string(root.join("out/results.json")).unwrap()).unwrap();
    assert_eq!(written["results"], plain["results"]);
    assert!(
        written["date"]
            .as_str()
            .is_some_and(|date| date.ends_with('Z')),
        "{}",
        written["date"]
    );
    assert_eq!(written["quick"], true);
    let status = run(root, &["sweep", "status", "out/sweep", "--json"]).json();
    assert_eq!(
        (&status["finished"], &status["waiting"]),
        (&first.len().into(), &0.into()),
        "{status}"
    );
}

/// Is an engine without a directory for its runs rejected, and is the cost of a full run reported in advance?
#[test]
fn an_engine_needs_a_directory_and_reports_a_full_runs_cost() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["repro", "CA-3", "--engine", "local"])
        .exits_with(2, &["--engine keeps its runs in -o DIR"]);
    let message = run(
        dir.path(),
        &[
            "repro", "CA-3", "--seeds", "2", "--engine", "local", "-o", "out",
        ],
    )
    .ok();
    assert!(
        message.err.contains("processor hours for 2 seeds"),
        "{}",
        message.err
    );
}

/// Are findings the same digits without a store, with an empty one, and with a full one? Does a plan report the stored
/// runs, and does a check find damaged files?
#[test]
fn a_store_changes_no_digit() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let run_sample = |more: &[&str]| -> Value {
        run(
            root,
            &[&["repro", "CA-2", "--sample", "--json"], more].concat(),
        )
        .json()["results"]
            .clone()
    };
    let run_plan = || {
        run(
            root,
            &[
                "repro", "plan", "CA-2", "--sample", "--seeds", "1", "--store", "runs", "--json",
            ],
        )
        .json()
    };
    let plan_before = run_plan();
    assert_eq!(
        (
            &plan_before["experiments"][0]["stored_runs"],
            &plan_before["experiments"][0]["is_complete"]
        ),
        (&0.into(), &false.into())
    );
    assert!(
        plan_before["experiments"][0]["next_runs"].as_u64() > Some(0)
            && !root.join("runs").exists(),
        "{plan_before}"
    );
    let plain = run_sample(&["--no-store"]);
    assert_eq!(run_sample(&["--store", "runs"]), plain);
    assert_eq!(run_sample(&["--store", "runs"]), plain);
    let plan_after = run_plan();
    assert_eq!(
        (
            &plan_after["experiments"][0]["is_complete"],
            &plan_after["experiments"][0]["left_cpu_hours"]
        ),
        (&true.into(), &0.0.into())
    );
    let shown = run(
        root,
        &["repro", "store", "show", "--store", "runs", "--json"],
    )
    .json();
    assert!(
        shown["kinds"]["alone"]["runs"].as_u64() > Some(0) && shown["damaged"] == 0,
        "{shown}"
    );
    let verify = [
        "repro", "store", "verify", "--runs", "2", "--store", "runs", "--json",
    ];
    let checked = run(root, &verify).json();
    assert_eq!(
        (&checked["made_again"], &checked["wrong"]),
        (&2.into(), &Value::Array(Vec::new())),
        "{checked}"
    );
    // Damaged files are detected and their runs repeated; the record of costs is rewritten silently.
    let dirs = fs::read_dir(root.join("runs")).unwrap().flatten();
    let dirs = dirs.filter(|entry| entry.path().is_dir());
    let files = dirs.flat_map(|entry| fs::read_dir(entry.path()).unwrap().flatten());
    let mut damaged = 0;
    for file in files {
        damaged += 1;
        let mut bytes = fs::read(file.path()).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file.path(), bytes).unwrap();
    }
    let again = run(
        root,
        &["repro", "CA-2", "--sample", "--store", "runs", "--json"],
    );
    // Two threads can find the same damaged file.
    let messages: std::collections::BTreeSet<&str> = again
        .err
        .lines()
        .filter(|line| line.ends_with("; the run is made again"))
        .collect();
    assert_eq!(messages.len(), damaged - 1, "{}", again.err);
    assert_eq!(
        serde_json::from_str::<Value>(&again.out).unwrap()["results"],
        plain
    );
    let checked = run(root, &verify).json();
    assert_eq!(checked["damaged"], Value::Array(Vec::new()), "{checked}");
    run(
        root,
        &["repro", "store", "prune", "--to", "1", "--store", "runs"],
    )
    .ok();
    assert_eq!(
        run(
            root,
            &["repro", "store", "show", "--store", "runs", "--json"]
        )
        .json()["files"],
        0
    );
}

/// Does every command refuse a directory that is no store, and leave what is in it?
#[test]
fn a_directory_of_other_files_is_no_store() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("home/db/table.sqlite");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, "rows").unwrap();
    for args in [
        &["repro", "store", "prune", "--to", "1", "--store", "home"][..],
        &["repro", "store", "show", "--store", "home"],
        &["repro", "CA-1", "--sample", "--store", "home"],
    ] {
        run(dir.path(), args).exits_with(1, &["a directory with other files"]);
    }
    assert_eq!(fs::read(&file).unwrap(), b"rows");
}

/// Does a run until results are decided keep its budget, and report the experiments beyond it?
#[test]
fn a_budget_is_kept_and_experiments_beyond_it_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let run_with = |budget: &str| {
        let args = [
            "repro",
            "run",
            "BS-1",
            "--budget",
            budget,
            "--max-seeds",
            "3",
            "--store",
            "runs",
            "--json",
        ];
        run(root, &args).json()
    };
    let none = run_with("0.000001");
    let line = &none["experiments"][0];
    assert_eq!(
        (&line["seeds"], &line["is_within_budget"]),
        (&0.into(), &false.into()),
        "{none}"
    );
    run(root, &["repro", "run", "BS-1", "--budget", "0"])
        .exits_with(2, &["expected a number of hours above 0"]);
    let sampled = run(
        root,
        &[
            "repro",
            "run",
            "CP-6",
            "--sample",
            "--store",
            "runs",
            "--max-seeds",
            "2",
            "--json",
        ],
    )
    .json();
    assert_eq!(sampled["experiments"][0]["seeds"], 2, "{sampled}");
    assert!(
        sampled["results"][0]["confidence"]["low"].is_number(),
        "{sampled}"
    );
}
