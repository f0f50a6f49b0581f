//! Scenarios and questions on the interval machine, through the command.

use std::path::Path;

use crate::common::{interval_program, page_windows, run};

const SCENARIO: &str = "name = \"four\"\ndescription = \"two that reuse, two that stream\"\nmachine = \"xeon-x5365-4\"\n\
                        simulator = \"interval\"\nseed = 3\nlength = { ns = 300_000_000_000 }\npolicy = { name = \"dio\" }\n\
                        [[interval.events]]\nat_ns = 100_000_000_000\nresize_cache = { cache = 1, size_share = 0.5 }\n\
                        [[programs]]\nprogram = \"reuser.toml\"\ncount = 2\n\
                        [[programs]]\nprogram = \"streamer.toml\"\ncount = 2\n\
                        [[interval.mixes]]\ncount = 5\nprograms = [{ program = \"reuser.toml\" }, { program = \"streamer.toml\" }]\n\
                        interarrival_ns = { exponential = 30e9 }\ninstructions = { fixed = 2e10 }\n";

/// A directory with a program that reuses its data and one that streams.
fn two_programs() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    interval_program(dir.path(), "reuser", (512 << 10, 0.02), 0.001);
    interval_program(dir.path(), "streamer", (512 << 10, 0.02), 0.02);
    dir
}

/// Does a scenario of the interval machine run, repeat to the bit, and replay with the same decisions?
#[test]
fn a_nominal_scenario_runs_repeats_and_replays() {
    let dir = two_programs();
    let root = dir.path();
    std::fs::write(root.join("four.toml"), SCENARIO).unwrap();
    let run_sim = |log: &str| run(root, &["sim", "four.toml", "-o", log, "--json"]).json();
    let simulated = run_sim("a.log");
    assert_eq!(simulated, run_sim("b.log"));
    assert_eq!(
        std::fs::read(root.join("a.log")).unwrap(),
        std::fs::read(root.join("b.log")).unwrap()
    );
    let jobs = simulated["results"]["jobs"].as_array().unwrap();
    assert_eq!(jobs.len(), 9);
    assert!((simulated["results"]["seconds"].as_f64().unwrap() - 300.0).abs() < 1e-6);
    let ended = jobs[4..]
        .iter()
        .filter(|job| job["completions"] == 1)
        .count();
    assert!(ended >= 2, "{jobs:?}");
    assert!(
        jobs.iter()
            .take(4)
            .all(|job| job["slowdown"].as_f64().unwrap() > 0.99),
        "{jobs:?}"
    );
    let again = run(root, &["replay", "a.log", "--json"]).json();
    assert_eq!(again["same_plans"], again["windows"], "{again}");
    let offline = SCENARIO.replace(
        "resize_cache = { cache = 1, size_share = 0.5 }",
        "offline = 3",
    );
    std::fs::write(root.join("offline.toml"), &offline).unwrap();
    run(root, &["sim", "offline.toml", "-o", "c.log"]).ok();
    let again = run(root, &["replay", "c.log", "--json"]).json();
    assert_eq!(
        again["same_plans"], again["windows"],
        "a CPU went offline: {again}"
    );
    let words = run(root, &["sim", "four.toml"]).ok().out;
    assert!(
        words.contains("300 nominal seconds") && words.contains("reuser"),
        "{words}"
    );
}

/// Does `auto` decide if a scenario names no policy, and is a run that no plan changed distinguished from one that a
/// plan did?
#[test]
fn auto_is_the_default_and_runs_without_changes_are_marked() {
    let dir = two_programs();
    let root = dir.path();
    let unnamed = SCENARIO.replace("policy = { name = \"dio\" }\n", "");
    std::fs::write(root.join("four.toml"), &unnamed).unwrap();
    let long = run(root, &["sim", "four.toml"]).ok();
    assert!(
        long.out.contains("under 'auto'") && !long.err.contains("changed anything"),
        "{}{}",
        long.out,
        long.err
    );
    std::fs::write(
        root.join("four.toml"),
        unnamed.replace("300_000_000_000", "2_000_000_000"),
    )
    .unwrap();
    let short = run(root, &["sim", "four.toml"]).ok();
    assert!(
        short.err.contains("no plan of 'auto' changed anything"),
        "{}",
        short.err
    );
    let nobody = unnamed.replace("seed = 3", "seed = 3\npolicy = { name = \"default\" }");
    std::fs::write(root.join("four.toml"), nobody).unwrap();
    assert!(
        !run(root, &["sim", "four.toml"])
            .ok()
            .err
            .contains("changed anything"),
        "nothing was asked for"
    );
}

/// Are an invalid program, a missing one, and a sweep's use of the machine rejected with name and place?
#[test]
fn impossible_runs_are_rejected_with_name_and_place() {
    let dir = two_programs();
    let root = dir.path();
    interval_program(root, "streamer", (512 << 10, -0.02), 0.02);
    std::fs::write(root.join("four.toml"), SCENARIO).unwrap();
    run(root, &["sim", "four.toml"])
        .exits_with(1, &["streamer.toml", "cycles_per_instr: found -1.2"]);
    std::fs::write(
        root.join("four.toml"),
        SCENARIO.replace("streamer.toml", "mfc"),
    )
    .unwrap();
    run(root, &["sim", "four.toml"]).exits_with(1, &["did you mean 'mcf'"]);
    std::fs::write(
        root.join("four.toml"),
        SCENARIO.replace(
            "resize_cache = { cache = 1, size_share = 0.5 }",
            "offline = 4",
        ),
    )
    .unwrap();
    let outcome = run(root, &["sim", "four.toml"]);
    assert!(
        outcome.err.contains("four.toml:10:11") && outcome.err.contains("expected 0 to 3"),
        "{}",
        outcome.err
    );
}

/// Do several policies and seeds give a line each, in the order of their combinations, equal to single runs, and are
/// impossible requests refused before anything runs?
#[test]
fn several_policies_and_seeds_give_a_line_each() {
    let dir = two_programs();
    let root = dir.path();
    std::fs::write(root.join("four.toml"), SCENARIO).unwrap();
    let arguments = [
        "sim",
        "four.toml",
        "-p",
        "default",
        "-p",
        "dio",
        "--seeds",
        "2",
    ];
    let with = |more: &[&str]| run(root, &[&arguments[..], more].concat());
    let found = with(&["--json", "--no-store"]).json();
    let runs = found["runs"].as_array().unwrap();
    let order: Vec<_> = runs
        .iter()
        .map(|run| {
            (
                run["policy"].as_str().unwrap(),
                run["seed"].as_u64().unwrap(),
            )
        })
        .collect();
    let first_seed = order[0].1;
    let expected = [("default", 0), ("default", 1), ("dio", 0), ("dio", 1)];
    assert_eq!(
        order,
        expected.map(|(policy, add)| (policy, first_seed + add))
    );
    let single = run(
        root,
        &["sim", "four.toml", "-p", "dio", "--json", "--no-store"],
    )
    .json();
    assert_eq!(runs[2], single);

    // Two shards, joined, are the same bits.
    for (shard, store) in [("1/2", "a"), ("2/2", "b")] {
        with(&["--shard", shard, "--store", store]).ok();
    }
    run(root, &["merge", "a", "b"]).ok();
    assert_eq!(with(&["--json", "--store", "a"]).json(), found);
    let table = with(&["--store", "a"]).ok().out;
    assert!(
        table.contains("mean slowdown") && table.lines().count() >= 5,
        "{table}"
    );

    with(&["-p", "casq"]).exits_with(2, &["--policy", "did you mean 'casc'"]);
    with(&["-o", "log.jsonl"]).exits_with(2, &["found 4 runs, expected one"]);
    with(&["--shard", "3/2", "--store", "a"]).exits_with(2, &["expected I/N"]);
    with(&["--set", "lenght=3"]).exits_with(1, &["four.toml"]);
}

/// A reuser with a promised rate, beside a streamer, and another reuser; then more programs.
fn write_promise_scenario(dir: &Path, at_least: f64, more: &str) {
    let goal = if at_least > 0.0 {
        format!("goal = {{ priority = 1.0, min_rate = {at_least:e} }}\n")
    } else {
        String::new()
    };
    let text = format!(
        "name = \"floor\"\ndescription = \"a rate that is promised\"\nmachine = \"xeon-x5365-4\"\nsimulator = \"interval\"\n\
         seed = 3\nlength = {{ ns = 300_000_000_000 }}\npolicy = {{ name = \"auto\" }}\n\
         [[programs]]\nprogram = \"reuser.toml\"\n{goal}[[programs]]\nprogram = \"streamer.toml\"\n\
         [[programs]]\nprogram = \"reuser.toml\"\n{more}"
    );
    std::fs::write(dir.join("floor.toml"), text).unwrap();
}

/// Is a promised rate kept if this costs a neighbor, is an impossible one reported with the reason and the programs
/// that would have to leave, and is a promise of nothing rejected?
///
/// Cost: 5 s of CPU, because three mixes run for a nominal hour each.
#[test]
fn a_promised_rate_is_kept_or_reported_as_impossible() {
    let dir = two_programs();
    let root = dir.path();
    let slowdowns_with = |at_least: f64, more: &str| {
        write_promise_scenario(root, at_least, more);
        let _ = std::fs::remove_file(root.join("floor.log"));
        let _ = std::fs::remove_file(root.join("floor.html"));
        let found = run(root, &["sim", "floor.toml", "-o", "floor.log", "--json"]).json();
        run(root, &["replay", "floor.log", "-o", "floor.html"]).ok();
        let jobs = found["results"]["jobs"].as_array().unwrap().clone();
        let slowdowns: Vec<f64> = jobs
            .iter()
            .map(|job| job["slowdown"].as_f64().unwrap())
            .collect();
        let page = std::fs::read_to_string(root.join("floor.html")).unwrap();
        (slowdowns, page_windows(&page).to_string())
    };
    // Alone, a reuser executes 3.33e9 instructions per second, beside a streamer 2e9.
    let (free, _) = slowdowns_with(0.0, "");
    let (promised, words) = slowdowns_with(3.0e9, "");
    assert!(
        free[0] > 1.4,
        "unasked, the first one is beside the streamer: {free:?}"
    );
    assert!(
        promised[0] < 1.15 && promised[2] > 1.3,
        "{promised:?}, unasked {free:?}"
    );
    assert!(
        words.contains("goals are met at the cost of"),
        "who pays is said"
    );
    let (_, words) = slowdowns_with(4.0e9, "");
    assert!(
        words.contains("min_rate") && words.contains("as even alone it does"),
        "alone it does less"
    );
    let (_, words) = slowdowns_with(3.0e9, "[[programs]]\nprogram = \"streamer.toml\"\n");
    assert!(
        words.contains("a second in instructions (min_rate)"),
        "which promise is said"
    );
    assert!(words.contains("as its neighbors leave it"), "why is said");
    write_promise_scenario(root, -1.0, "");
    let text = std::fs::read_to_string(root.join("floor.toml")).unwrap();
    std::fs::write(
        root.join("floor.toml"),
        text.replacen(
            "reuser.toml\"\n",
            "reuser.toml\"\ngoal = { priority = 1.0, min_rate = 0.0 }\n",
            1,
        ),
    )
    .unwrap();
    run(root, &["sim", "floor.toml"])
        .exits_with(1, &["goal.min_rate': found 0, expected a positive"]);
}

/// A program with one endless phase that uses this number of bytes, each equally often, written from the theoretical
/// values.
fn write_uniform_curve(dir: &Path, name: &str, footprint_bytes: f64, references_per_instr: f64) {
    let mut text =
        format!("name = \"{name}\"\n[[phases]]\nreferences_per_instr = {references_per_instr}\n");
    for step in 1..=64u32 {
        let bytes = f64::from(step) * 65_536.0;
        let fills = references_per_instr * (1.0 - bytes / footprint_bytes).max(0.0);
        text += &format!(
            "[[phases.points]]\nsize_bytes = {bytes:.1}\ncycles_per_instr = {}\ndemand_fills_per_instr = {fills}\n\
             memory_stall_cycles_per_instr = {}\n",
            1.0 + 100.0 * fills,
            100.0 * fills
        );
    }
    std::fs::write(dir.join(format!("{name}.toml")), text).unwrap();
}

/// If two programs fit into one cache together, and each is beside a stream: are they brought together, although the
/// logs are too short to show that they fit?
#[test]
fn programs_that_fit_together_are_separated_from_streams() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_uniform_curve(root, "fits", 0.4 * 4_194_304.0, 0.02);
    write_uniform_curve(root, "stream", 1e12, 0.02);
    let scenario = "name = \"four\"\nmachine = \"xeon-x5365-4\"\nsimulator = \"interval\"\nseed = 1\n\
                    length = { ns = 200_000_000_000 }\nwarm_up = { ns = 100_000_000_000 }\n";
    let programs = ["stream", "fits", "stream", "fits"]
        .map(|name| format!("[[programs]]\nprogram = \"{name}.toml\"\nrestart = true\n"));
    let text = scenario.to_string() + &programs.concat();
    std::fs::write(root.join("four.toml"), text).unwrap();
    let found = run(
        root,
        &[
            "sim",
            "four.toml",
            "-p",
            "default",
            "-p",
            "auto",
            "--no-store",
            "--json",
        ],
    )
    .json();
    let worst_fit = |run: usize| {
        let jobs = found["runs"][run]["results"]["jobs"].as_array().unwrap();
        let fits = jobs
            .iter()
            .filter(|job| job["name"].as_str().unwrap().contains("fits"));
        fits.map(|job| job["slowdown_on_cpu"].as_f64().unwrap())
            .fold(1.0, f64::max)
    };
    assert!(
        worst_fit(1) < 1.01 && worst_fit(0) > 1.02,
        "default {}, auto {}",
        worst_fit(0),
        worst_fit(1)
    );
}

/// Do a recording and its profile give the same digits in every forecast: pairs, the group, and the plan?
#[test]
fn a_recording_and_its_profile_give_the_same_digits() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let recordings = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recordings");
    let mut forms = [Vec::new(), Vec::new()];
    for name in ["xz", "chase", "stencil"] {
        let recording = format!("{name}.cmt");
        std::fs::copy(recordings.join(&recording), root.join(&recording)).unwrap();
        let profile = format!("{name}.profile.json");
        run(root, &["profile", &recording, "-o", &profile]).ok();
        forms[0].push(recording);
        forms[1].push(profile);
    }
    let answers = forms.map(|files| {
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let ask = |command: &str| {
            let options = ["-m", "opteron-2350", "--json"];
            run(root, &[&[command], &files[..], &options[..]].concat()).json()
        };
        let (mut predicted, mut planned) = (ask("predict"), ask("plan"));
        predicted["programs"].take();
        planned["placement"]["names"].take();
        (predicted, planned)
    });
    assert_eq!(answers[0].0["matrix"], answers[1].0["matrix"]);
    assert_eq!(answers[0].0["group"], answers[1].0["group"]);
    assert_eq!(answers[0].0["timing"], answers[1].0["timing"]);
    assert_eq!(answers[0].1, answers[1].1);
    let timing = answers[0].0["timing"][0].as_str().unwrap();
    assert!(
        timing.contains("with the loads that wait for others"),
        "{timing}"
    );
}
