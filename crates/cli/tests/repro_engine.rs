//! Do the papers' experiments give the same digits when an engine makes their runs?

mod common;

use std::fs;
use std::path::Path;

use common::run;
use serde_json::Value;

/// A matrix of pairs and runs within runs; two calls that need each other; one that fails, as there is no recording.
const IDS: [&str; 3] = ["CA-2", "CP-6", "TC-SERVER"];

fn repro(at: &Path, more: &[&str]) -> (Option<i32>, String, Value) {
    let ran = run(at, &[&["repro"], &IDS[..], &["--sample", "--seed", "1", "--json"], more].concat());
    let answer = serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}: {}{}", ran.out, ran.err));
    (ran.code, ran.err, answer)
}

/// Names and times of the results in a sweep's folder.
fn made(folder: &Path) -> Vec<(String, std::time::SystemTime)> {
    let folders = fs::read_dir(folder.join("results")).unwrap().flatten();
    let files = folders.flat_map(|entry| fs::read_dir(entry.path()).unwrap().flatten());
    let mut all: Vec<_> = files
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.metadata().unwrap().modified().unwrap()))
        .collect();
    all.sort();
    all
}

/// Are findings made run by run, in two threads, the same digits as those made at once, failures too, and is nothing
/// made twice by the same command again?
///
/// Cost: 17 s of CPU, because one experiment runs three times.
#[test]
fn findings_by_an_engine_are_the_same_digits() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let (code, said, plain) = repro(at, &["--no-cache"]);
    assert!(code == Some(1) && said.contains("TC-SERVER"), "{said}");
    assert!(plain["results"].as_array().unwrap().len() > 3);
    let engine = ["--engine", "local", "--workers", "2", "-o", "out"];
    let (code, said, swept) = repro(at, &engine);
    assert!(code == Some(1) && said.contains("TC-SERVER"), "{said}");
    assert_eq!(swept["results"], plain["results"]);
    let first = made(&at.join("out/sweep"));
    assert!(first.len() > 10, "{first:?}");
    let (_, _, again) = repro(at, &engine);
    assert_eq!(again["results"], plain["results"]);
    assert_eq!(made(&at.join("out/sweep")), first);
    let written: Value = serde_json::from_str(&fs::read_to_string(at.join("out/results.json")).unwrap()).unwrap();
    assert_eq!(written["results"], plain["results"]);
    assert!(written["date"].as_str().is_some_and(|date| date.ends_with('Z')), "{}", written["date"]);
    assert_eq!(written["quick"], true);
    let left =
        run(at, &[&["repro"], &IDS[..], &["--sample", "--seed", "1", "-o", "out", "--dry-run"]].concat()).ok().out;
    assert!(left.contains("left: 1 of 3 experiments with 1 seed, minutes in all"), "{left}");
    let row = |id: &str| left.lines().find(|line| line.starts_with(id)).unwrap_or_default().to_string();
    assert!(row("CP-6").contains(" made") && !row("TC-2, TC-SERVER").contains("all "), "{left}");
    let status = run(at, &["sweep", "status", "out/sweep", "--json"]).json();
    assert_eq!((&status["finished"], &status["waiting"]), (&first.len().into(), &0.into()), "{status}");
}

/// Is an engine without a folder to keep its runs in refused, and the cost of a full run told beforehand?
#[test]
fn an_engine_needs_a_folder_and_says_what_a_full_run_costs() {
    let folder = tempfile::tempdir().unwrap();
    let refused = run(folder.path(), &["repro", "CA-3", "--engine", "local"]);
    assert!(refused.code == Some(2) && refused.err.contains("--engine keeps its runs in -o DIR"), "{}", refused.err);
    let cost = run(folder.path(), &["repro", "BS-5", "BS-1", "--seeds", "6", "-o", "out", "--dry-run"]).ok().out;
    assert!(cost.contains("left: 2 of 2 experiments with 6 seeds, at most about 0.6 processor hours"), "{cost}");
    assert!(!folder.path().join("out").exists(), "a dry run makes nothing");
    let said = run(folder.path(), &["repro", "CA-3", "--seeds", "2", "--engine", "local", "-o", "out"]).ok();
    assert!(said.err.contains("processor hours for 2 seeds"), "{}", said.err);
}
