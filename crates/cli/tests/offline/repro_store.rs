//! Do the papers' experiments give the same digits whether their runs are made here, stored, or made by shards?

use std::fs;

use crate::common::run;
use serde_json::Value;

/// Are the findings of two shards the same digits as those of one process, also if a shard was killed and its runs are
/// made again, and does the command then run nothing?
///
/// Cost: 17 s of CPU, because one experiment runs three times.
#[test]
fn findings_of_killed_shards_have_the_same_digits() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let command = [
        "repro", "CA-2", "CP-6", "--sample", "--seeds", "2", "--json",
    ];
    let with = |more: &[&str]| run(root, &[&command[..], more].concat()).json();
    let whole = with(&["--no-store"]);
    assert!(whole["results"].as_array().unwrap().len() > 3);

    let mut killed = std::process::Command::new(env!("CARGO_BIN_EXE_cachemate"))
        .args(command)
        .args(["--shard", "1/2", "--store", "a"])
        .current_dir(root)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    killed.kill().unwrap();
    killed.wait().unwrap();
    with(&["--shard", "1/2", "--store", "a"]);
    with(&["--shard", "2/2", "--store", "b"]);
    run(root, &["merge", "b", "a"]).ok();

    let joined = with(&["--store", "b"]);
    assert_eq!(joined["results"], whole["results"]);
    let plan = [
        "repro", "plan", "CA-2", "CP-6", "--sample", "--seeds", "2", "--store", "b", "--json",
    ];
    let planned = run(root, &plan).json();
    for experiment in planned["experiments"].as_array().unwrap() {
        assert_eq!(experiment["next_runs"], 0, "{planned}");
    }
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

/// Does a plan simulate nothing of experiments whose runs are not stored?
#[test]
fn a_plan_simulates_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let plan = run(
        dir.path(),
        &[
            "repro", "plan", "AUTO", "PROMISES", "--store", "none", "--json",
        ],
    )
    .json();
    for experiment in plan["experiments"].as_array().unwrap() {
        assert_eq!(experiment["is_complete"], false, "{plan}");
        assert_eq!(experiment["error"], serde_json::Value::Null, "{plan}");
    }
}

/// Does a run until results are decided stop at its limit of seeds, and state the interval of each result?
#[test]
fn seeds_are_added_up_to_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let args = [
        "repro",
        "run",
        "CP-6",
        "--sample",
        "--store",
        "runs",
        "--max-seeds",
        "2",
        "--json",
    ];
    let sampled = run(dir.path(), &args).json();
    assert_eq!(sampled["experiments"][0]["seeds"], 2, "{sampled}");
    assert!(
        sampled["results"][0]["confidence"]["low"].is_number(),
        "{sampled}"
    );
}
