//! Do sweeps through the command line lose nothing, whatever happens to them?

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{ChildGuard, command, lackey_text, run};

const SCENARIO: &str = "name = \"pair\"\ndescription = \"two programs\"\nmachine = \"xeon-x5365-4\"\nseed = 1\nscale = 100\n\
     length = { cycles = 300_000 }\n[[programs]]\nprogram = \"mcf\"\n[[programs]]\nprogram = \"gamess\"\n";

/// Four points with two seeds, of which a filter leaves six tasks; `seeds` more make it longer.
fn sweep_file(dir: &Path, seeds: u32) -> PathBuf {
    fs::write(dir.join("pair.toml"), SCENARIO).unwrap();
    let text = format!(
        "name = \"pairs\"\n[axes]\nscenario = [\"pair.toml\"]\nmachine = [\"xeon-x5365-4\", \"xeon-x5365-4?caches.l2.size=2M\"]\n\
         policy = [\"default\", \"random\"]\nseed = {{ first = 1, count = {seeds} }}\n\
         [[skip]]\npolicy = \"random\"\nmachine = \"xeon-x5365-4\"\n"
    );
    let path = dir.join("sweep-pairs.toml");
    fs::write(&path, text).unwrap();
    path
}

fn read_json_lines(path: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

pub fn results_in(dir: &Path) -> usize {
    let dirs = fs::read_dir(dir.join("results"))
        .into_iter()
        .flatten()
        .flatten();
    dirs.flat_map(|entry| fs::read_dir(entry.path()).into_iter().flatten())
        .count()
}

/// Does a sweep whose name imitates a terminal command, with failures of such names, show as plain text?
#[test]
fn hostile_sweep_names_are_shown_as_plain_text() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(sweep_file(dir.path(), 1)).unwrap();
    let hostile = r#"name = "\u001b]0;x\u0007\u202e\n6 of 6 {1}""#;
    let named = text.replacen("name = \"pairs\"", hostile, 1).replacen(
        "pair.toml",
        "p\\u001b[2J\\u2066.toml",
        1,
    );
    fs::rename(
        dir.path().join("pair.toml"),
        dir.path().join("p\u{1b}[2J\u{2066}.toml"),
    )
    .unwrap();
    fs::write(dir.path().join("sweep-pairs.toml"), named).unwrap();
    let steps: [&[&str]; 5] = [
        &["sweep", "run", "sweep-pairs.toml", "-o", "out"],
        &["sweep", "status", "out"],
        &["sweep", "status", "out", "--json"],
        &["sweep", "merge", "out", "--allow-incomplete"],
        &["sweep", "report", "out"],
    ];
    for step in steps {
        let outcome = run(dir.path(), step);
        let both = format!("{}{}", outcome.out, outcome.err);
        let acts = |c: char| {
            (c.is_control() && c != '\n')
                || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        };
        assert!(!both.contains(acts), "{step:?}: {both:?}");
        assert!(
            !both.lines().any(|line| line.starts_with("6 of 6 {1}")),
            "{step:?}: {both}"
        );
    }
}

/// Does a sweep run to its end, report its progress, merge in the manifest's order, and run nothing twice?
#[test]
fn a_sweep_runs_reports_progress_and_merges_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    sweep_file(root, 2);
    let outcome = run(root, &["sweep", "run", "sweep-pairs.toml", "-o", "out"]).ok();
    assert_eq!(outcome.out, "out: 6 of 6 tasks finished\n");
    let status = run(root, &["sweep", "status", "out", "--json"]).json();
    assert_eq!(
        (&status["total"], &status["finished"], &status["waiting"]),
        (&6.into(), &6.into(), &0.into())
    );
    run(root, &["sweep", "merge", "out"]).ok();
    let merged = read_json_lines(&root.join("out/merged.jsonl"));
    let point_at = |at: usize| {
        let point = &merged[at]["point"];
        (
            point["machine"].as_str().unwrap().len(),
            point["policy"].as_str().unwrap(),
            point["seed"].as_u64().unwrap(),
        )
    };
    let expected = [
        (12, "default", 1),
        (12, "default", 2),
        (30, "default", 1),
        (30, "default", 2),
        (30, "random", 1),
    ];
    assert_eq!([0, 1, 2, 3, 4].map(point_at), expected);
    let mpki_at = |at: usize| {
        merged[at]["result"]["figures"]["llc_mpki"]
            .as_f64()
            .unwrap()
    };
    assert!(mpki_at(0) > 0.0 && mpki_at(0) != mpki_at(1), "seeds differ");
    assert!(merged[0]["result"]["detail"]["tasks"][0]["name"] == "mcf");
    let again = run(root, &["sweep", "run", "-o", "out"]).ok();
    assert_eq!(again.out, "out: 6 of 6 tasks finished, 6 of them before\n");
    run(root, &["sweep", "report", "out", "-o", "page"]).ok();
    let page = fs::read_to_string(root.join("page/index.html")).unwrap();
    assert!(
        page.contains("6 of 6 results") && page.contains("<svg"),
        "{page}"
    );
    assert!(root.join("page/instr-per-cycle.svg").exists());
    let message = run(root, &["sweep", "report", "out"]).ok().out;
    assert_eq!(
        message.lines().count(),
        6,
        "a lead, a blank, a header and three points:\n{message}"
    );
    // The same run without a sweep gives the same figures.
    let sim = run(root, &["sim", "pair.toml", "--seed", "2", "--json"]).json();
    assert_eq!(sim["results"], merged[1]["result"]["detail"]);
}

/// Does a sweep that is killed repeatedly end with the same bytes as one that was not?
#[test]
fn a_repeatedly_killed_sweep_ends_with_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    sweep_file(root, 10);
    run(root, &["sweep", "run", "sweep-pairs.toml", "-o", "whole"]).ok();
    run(root, &["sweep", "merge", "whole"]).ok();
    for kills in 1..=3 {
        let args = [
            "--quiet",
            "sweep",
            "run",
            "sweep-pairs.toml",
            "-o",
            "killed",
        ];
        let mut sweep = ChildGuard(command(root, &args).stdout(Stdio::null()).spawn().unwrap());
        let start = Instant::now();
        while results_in(&root.join("killed")) < 3 * kills && sweep.0.try_wait().unwrap().is_none()
        {
            assert!(
                start.elapsed() < Duration::from_secs(300),
                "no result after {:?}",
                start.elapsed()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        sweep.0.kill().unwrap();
        sweep.0.wait().unwrap();
    }
    let count_before = results_in(&root.join("killed"));
    assert!(
        (9..30).contains(&count_before),
        "{count_before} of 30 were finished before the last kill"
    );
    let merged = run(root, &["sweep", "merge", "killed"]);
    merged.exits_with(1, &["tasks have no result"]);
    run(root, &["sweep", "run", "-o", "killed"]).ok();
    run(root, &["sweep", "merge", "killed"]).ok();
    let merged_bytes = |name: &str| fs::read(root.join(name).join("merged.jsonl")).unwrap();
    assert_eq!(merged_bytes("killed"), merged_bytes("whole"));
    assert_eq!(fs::read_dir(root.join("killed/claims")).unwrap().count(), 0);
}

/// Does Ctrl-C end a sweep at once, keep finished results, and leave no claim?
#[test]
fn an_interrupted_sweep_keeps_finished_results() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    sweep_file(root, 100);
    let mut sweep = command(root, &["sweep", "run", "sweep-pairs.toml", "-o", "out"]);
    let mut sweep = ChildGuard(
        sweep
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    while results_in(&root.join("out")) < 2 {
        assert!(
            sweep.0.try_wait().unwrap().is_none(),
            "300 tasks are not finished that soon"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    let process = rustix::process::Pid::from_raw(sweep.pid()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::INT).unwrap();
    assert_eq!(sweep.0.wait().unwrap().code(), Some(130));
    let finished_count = results_in(&root.join("out"));
    let status = run(root, &["sweep", "status", "out", "--json"]).json();
    assert_eq!(
        (&status["finished"], &status["running"], &status["failed"]),
        (&finished_count.into(), &0.into(), &0.into())
    );
    assert!(finished_count < 300 && fs::read_dir(root.join("out/claims")).unwrap().count() == 0);
}

/// Do two concurrent sweeps in one directory, with single tasks beside them, produce every result once?
#[test]
fn concurrent_sweeps_in_one_directory_run_every_task_once() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    sweep_file(root, 4);
    run(root, &["sweep", "run", "sweep-pairs.toml", "-o", "one"]).ok();
    // Like an engine's workers, the second directory starts with the manifest only.
    fs::create_dir_all(root.join("two")).unwrap();
    fs::copy(
        root.join("one/manifest.jsonl"),
        root.join("two/manifest.jsonl"),
    )
    .unwrap();
    for name in [
        "inputs",
        "results",
        "claims",
        "failed",
        "damaged",
        "differing",
        "partial",
    ] {
        fs::create_dir_all(root.join("two").join(name)).unwrap();
    }
    for entry in fs::read_dir(root.join("one/inputs")).unwrap().flatten() {
        fs::copy(
            entry.path(),
            root.join("two/inputs").join(entry.file_name()),
        )
        .unwrap();
    }
    let args = ["--quiet", "sweep", "run", "-o", "two", "--workers", "2"];
    let start_sweep = || ChildGuard(command(root, &args).stdout(Stdio::null()).spawn().unwrap());
    let (mut first, mut second) = (start_sweep(), start_sweep());
    let id = read_json_lines(&root.join("one/manifest.jsonl"))[12]["id"]
        .as_str()
        .unwrap()
        .to_string();
    run(root, &["sweep", "run", "-o", "two", "--task", &id]).ok();
    assert!(first.0.wait().unwrap().success() && second.0.wait().unwrap().success());
    for dir in ["one", "two"] {
        run(root, &["sweep", "merge", dir]).ok();
    }
    let merged_bytes = |name: &str| fs::read(root.join(name).join("merged.jsonl")).unwrap();
    assert_eq!(merged_bytes("one"), merged_bytes("two"));
    // Shards of machines without a common disk.
    for part in ["1/2", "2/2"] {
        let out = format!("part-{}", &part[..1]);
        let outcome = run(
            root,
            &[
                "sweep",
                "run",
                "sweep-pairs.toml",
                "-o",
                &out,
                "--shard",
                part,
            ],
        )
        .ok();
        assert!(outcome.out.contains("6 of 6 tasks"), "{}", outcome.out);
    }
    let id = read_json_lines(&root.join("part-2/manifest.jsonl"))[1]["id"]
        .as_str()
        .unwrap()
        .to_string();
    run(root, &["sweep", "run", "-o", "part-2", "--task", &id]).ok();
    let merged = run(
        root,
        &[
            "sweep",
            "merge",
            "part-1",
            "part-2",
            "-o",
            "parts.jsonl",
            "--json",
        ],
    )
    .json();
    assert_eq!(
        (&merged["merged"], &merged["duplicates"]),
        (&12.into(), &1.into())
    );
    assert_eq!(
        fs::read(root.join("parts.jsonl")).unwrap(),
        merged_bytes("one")
    );
}

/// Is a recording that changed during the sweep reported as a failure, and are curves of recordings measured?
#[test]
fn a_recording_that_changed_during_a_sweep_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for (name, lines) in [("small", 300), ("large", 2000)] {
        fs::write(
            root.join(format!("{name}.lackey")),
            lackey_text(lines, 3, 2),
        )
        .unwrap();
        run(
            root,
            &[
                "convert",
                &format!("{name}.lackey"),
                "-o",
                &format!("{name}.cmt"),
            ],
        )
        .ok();
    }
    let text = "name = \"curves\"\nkind = \"curve\"\n[axes]\nrecording = [\"small.cmt\", \"large.cmt\"]\n\
                [axes.parameters]\nsizes = [\"16K,64K,256K\"]\n";
    fs::write(root.join("sweep-curves.toml"), text).unwrap();
    run(
        root,
        &[
            "sweep",
            "run",
            "sweep-curves.toml",
            "-o",
            "out",
            "--shard",
            "1/2",
        ],
    )
    .ok();
    let content = fs::read(root.join("large.cmt")).unwrap();
    fs::write(root.join("large.cmt"), &content[..content.len() - 1]).unwrap();
    let failed = run(root, &["sweep", "run", "-o", "out", "--retries", "1"]);
    failed.exits_with(1, &["1 task failed; --retry-failed runs them again"]);
    assert!(
        failed
            .out
            .contains("it is not the file that the manifest was made with"),
        "{}",
        failed.out
    );
    let status = run(root, &["sweep", "status", "out", "--json"]).json();
    assert_eq!(
        (&status["failures"][0]["attempts"], &status["failed"]),
        (&2.into(), &1.into())
    );
    assert_eq!(status["failures"][0]["point"]["recording"], "large.cmt");
    fs::write(root.join("large.cmt"), &content).unwrap();
    assert_eq!(
        run(root, &["sweep", "run", "-o", "out", "--retries", "1"]).code,
        Some(1),
        "given up is given up"
    );
    run(root, &["sweep", "run", "-o", "out", "--retry-failed"]).ok();
    run(root, &["sweep", "merge", "out"]).ok();
    let merged = read_json_lines(&root.join("out/merged.jsonl"));
    let mrc = run(
        root,
        &["mrc", "large.cmt", "--sizes", "16K,64K,256K", "--json"],
    )
    .json();
    for (of, point) in mrc["curve"].as_array().unwrap().iter().enumerate() {
        assert_eq!(
            merged[1]["result"]["curve"][of],
            serde_json::json!([point["bytes"], point["miss_ratio"]])
        );
    }
}

/// Is a full disk reported, and does the sweep continue when there is space?
#[test]
fn a_full_disk_is_reported_and_the_sweep_continues_later() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    sweep_file(root, 12);
    fs::create_dir(root.join("small")).unwrap();
    // A separate file system in a separate mount namespace.
    let exe = env!("CARGO_BIN_EXE_cachemate");
    let script = format!(
        "mount -t tmpfs -o size=60k,mode=700 none small || exit 99\n\
         {exe} sweep run sweep-pairs.toml -o small > said 2>&1; echo code $? >> said\n\
         mount -o remount,size=8m small || exit 99\n\
         {exe} sweep run -o small >> said 2>&1; echo code $? >> said\n"
    );
    let ran = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script])
        .current_dir(root)
        .status();
    if !ran.is_ok_and(|status| status.success()) {
        println!("not shown here: a full disk, which takes a mount namespace");
        return;
    }
    let message = fs::read_to_string(root.join("said")).unwrap();
    assert!(
        message.contains("the disk is full; what is finished is kept")
            && message.contains("code 1\n"),
        "{message}"
    );
    assert!(
        message.contains("36 of 36 tasks finished, ") && message.ends_with("code 0\n"),
        "{message}"
    );
}

/// Are errors in a sweep file reported with their place, before anything starts?
#[test]
fn sweep_file_errors_are_reported_with_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let path = sweep_file(root, 2);
    let text = fs::read_to_string(&path).unwrap();
    let run_refused = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
        let outcome = run(root, &["sweep", "run", "sweep-pairs.toml", "-o", "never"]);
        assert!(
            outcome.code == Some(1) && !root.join("never").exists(),
            "{from} -> {to}: {}{}",
            outcome.out,
            outcome.err
        );
        outcome.err
    };
    let cases = [
        (
            "seed = {",
            "seeds = {",
            "sweep-pairs.toml:6:9: field 'axes.seeds': found 'seeds'",
        ),
        ("count = 2", "count = 0", "'axes.seed': found no seed"),
        (
            "\"default\", \"random\"",
            "\"default\", \"default\"",
            "'axes.policy': found \"default\" twice",
        ),
        (
            "\"default\", \"random\"",
            "\"default\", \"randon\"",
            "'skip[0].policy': found \"random\", expected values of",
        ),
        (
            "[[skip]]\npolicy",
            "[[skip]]\npolice",
            "(did you mean 'policy'?)",
        ),
        ("pair.toml", "pear.toml", "pear.toml: No such file"),
        ("size=2M", "sizes=2M", "pair.toml:3:11: field 'machine'"),
        (
            "[[skip]]",
            "[axes.parameters]\n\"length.weeks\" = [3]\n[[skip]]",
            "field 'length",
        ),
        (
            "[[skip]]",
            "[axes.parameters]\n\"programs.0.program\" = [\"mfc\"]\n[[skip]]",
            "mfc",
        ),
        (
            "policy = \"random\"\nmachine = \"xeon-x5365-4\"",
            "scenario = \"pair.toml\"",
            "found no point that the filters leave",
        ),
    ];
    for (from, to, expected) in cases {
        let message = run_refused(from, to);
        assert!(message.contains(expected), "{from} -> {to}: {message}");
    }
    for args in [
        &["sweep", "status", "nowhere"][..],
        &["sweep", "run", "-o", "nowhere"],
    ] {
        run(root, args).exits_with(1, &["nowhere: no such directory: 'cachemate sweep run"]);
    }
    fs::write(&path, &text).unwrap();
    for (engine, names) in [
        (["hq", "--hq"], "--hq names"),
        (["dask", "--python"], "--python names"),
    ] {
        let args = [
            "sweep",
            "run",
            "sweep-pairs.toml",
            "-o",
            "engines",
            "--engine",
            engine[0],
            engine[1],
            "no-such-program",
        ];
        run(root, &args).exits_with(1, &["no-such-program: ", names]);
    }
    // A manifest of another version is not run, whichever command requests it.
    fs::write(&path, &text).unwrap();
    run(root, &["sweep", "run", "sweep-pairs.toml", "-o", "out"]).ok();
    let manifest = fs::read_to_string(root.join("out/manifest.jsonl")).unwrap();
    let version = run(root, &["sweep", "status", "out", "--json"]).json()["version"]
        .as_str()
        .unwrap()
        .to_string();
    fs::write(
        root.join("out/manifest.jsonl"),
        manifest.replacen(&version, "0.0.9", 1),
    )
    .unwrap();
    run(root, &["sweep", "run", "-o", "out"]).exits_with(1, &["the manifest is of version 0.0.9"]);
    let outcome = run(root, &["sweep", "run", "sweep-pairs.toml", "-o", "out"]).ok();
    assert!(
        outcome.err.contains("its results are of version 0.0.9"),
        "{}",
        outcome.err
    );
}

/// Does a small part of the documentation's example run?
#[test]
fn the_documentations_example_runs() {
    let dir = tempfile::tempdir().unwrap();
    let example = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../scenarios/sweep-example.toml"
    );
    let outcome = run(
        dir.path(),
        &["sweep", "run", example, "-o", "out", "--shard", "15/15"],
    )
    .ok();
    assert!(
        outcome.out.contains("1 of 1 tasks finished"),
        "{}",
        outcome.out
    );
    let status = run(dir.path(), &["sweep", "status", "out", "--json"]).json();
    assert_eq!(status["total"], 15);
}
