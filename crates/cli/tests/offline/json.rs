//! Does the output of `--json` match the promise of docs/json.md, field by field?

use std::collections::{BTreeMap, BTreeSet};

use crate::common::{lackey_text, run};
use serde_json::Value;

/// Field paths of one command's table, with their types.
fn documented_fields(command: &str) -> BTreeMap<String, BTreeSet<String>> {
    let text = include_str!("../../../../docs/json.md");
    let section = text
        .split("\n## ")
        .find(|section| section.lines().next() == Some(command))
        .expect("a section");
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let types = cells[2]
            .split(',')
            .map(|kind| kind.trim().to_string())
            .collect();
        (cells[1].trim_matches('`').to_string(), types)
    })
    .collect()
}

fn collect_field_types(path: &str, value: &Value, found: &mut BTreeMap<String, BTreeSet<String>>) {
    let mut record_kind = |kind: &str| {
        found
            .entry(path.to_string())
            .or_default()
            .insert(kind.to_string());
    };
    match value {
        Value::Null => record_kind("null"),
        Value::Bool(_) => record_kind("bool"),
        Value::Number(_) => record_kind("number"),
        Value::String(_) => record_kind("string"),
        Value::Array(entries) => entries
            .iter()
            .for_each(|entry| collect_field_types(&format!("{path}[]"), entry, found)),
        Value::Object(fields) => {
            for (name, value) in fields {
                let dot = if path.is_empty() {
                    String::new()
                } else {
                    format!("{path}.")
                };
                collect_field_types(&format!("{dot}{name}"), value, found);
            }
        }
    }
}

/// Checks that every printed field is promised with its type, and that some run printed every promised field.
#[track_caller]
fn check(command: &str, printed: &[Value], like_plan: &[&str], free: &[&str]) {
    let promised = documented_fields(command);
    let mut printed_keys = BTreeMap::new();
    printed
        .iter()
        .for_each(|value| collect_field_types("", value, &mut printed_keys));
    let mut visited = BTreeSet::new();
    for (path, kinds) in &printed_keys {
        if free.iter().any(|start| path.starts_with(start)) {
            visited.extend(
                free.iter()
                    .filter(|start| path.starts_with(**start))
                    .map(|start| start.to_string()),
            );
            continue;
        }
        let (first, rest) = path.split_once('.').unwrap_or((path, ""));
        let documented = if like_plan.contains(&first) {
            format!("plan.{rest}")
        } else {
            path.clone()
        };
        let types = promised
            .get(&documented)
            .unwrap_or_else(|| panic!("{command}: '{path}' is not in docs/json.md"));
        assert!(
            kinds.is_subset(types),
            "{command}: '{path}' is {kinds:?}, promised {types:?}"
        );
        visited.insert(documented);
    }
    let missing: Vec<&String> = promised
        .keys()
        .filter(|path| !visited.contains(*path))
        .collect();
    assert!(
        missing.is_empty(),
        "{command}: promised and not printed: {missing:?}"
    );
}

#[test]
fn printed_and_promised_fields_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for (name, lines) in [("small", 600), ("large", 3000)] {
        std::fs::write(
            root.join(format!("{name}.lackey")),
            lackey_text(lines, 12, 2),
        )
        .unwrap();
        run(
            root,
            &[
                "record",
                "--from",
                &format!("{name}.lackey"),
                "-o",
                &format!("{name}.cmt"),
            ],
        )
        .ok();
    }
    let run_json = |args: &[&str]| run(root, args).json();
    let mrc = [
        run_json(&["mrc", "small.cmt", "--json", "--by", "thread"]),
        run_json(&["mrc", "small.cmt", "--json", "--sample-rate", "0.9"]),
        serde_json::json!({ "bursts": { "count": 9, "reach_bytes": 64, "error": 0.1 } }),
        serde_json::json!({ "bursts": { "error": null } }),
    ];
    check("mrc", &mrc, &[], &[]);
    let sim = [
        "mrc",
        "small.cmt",
        "--sizes",
        "16K,32K",
        "--ways",
        "4",
        "--json",
    ];
    check(
        "mrc --ways",
        &[
            run_json(&sim),
            run_json(&[&sim[..], &["--l1", "1K:2"]].concat()),
        ],
        &[],
        &[],
    );
    check(
        "topology",
        &[run_json(&["topology", "-m", "opteron-2350", "--json"])],
        &[],
        &[],
    );
    let machine = ["-m", "xeon-x5365-4", "--json"];
    let both = run_json(&[&["predict", "small.cmt", "large.cmt"], &machine[..]].concat());
    let by_scheme = run_json(
        &[
            &["predict", "small.cmt", "large.cmt", "--model", "statcc"],
            &machine[..],
        ]
        .concat(),
    );
    check(
        "predict",
        &[
            both,
            by_scheme,
            run_json(&[&["predict", "small.cmt"], &machine[..]].concat()),
        ],
        &[],
        &[],
    );
    let crowd = ["small.cmt"; 5];
    let four = ["plan", "small.cmt", "large.cmt", "small.cmt", "small.cmt"];
    let plans = [
        run_json(&[&["plan"], &crowd[..], &["large.cmt"], &machine[..]].concat()),
        run_json(
            &[
                &["plan", "small.cmt", "large.cmt", "--model", "pain"],
                &machine[..],
            ]
            .concat(),
        ),
        run_json(&[&four[..], &["--model", "statcc"], &machine[..]].concat()),
        run_json(&[&four[..], &["--goal", "large=30%"], &machine[..]].concat()),
    ];
    let outcomes = [
        "best",
        "worst",
        "random",
        "random_low_5_percent",
        "random_high_5_percent",
        "lower_bound",
        "gap",
    ];
    check(
        "plan",
        &plans,
        &outcomes,
        &["reasons", "caches[].cpus[][]", "goals.must_leave"],
    );
    let fleet = "name = \"f\"\nmachine = \"xeon-x5365-4\"\nhosts = 1\nhours = 1\nservices_per_host = 2\n[draw]\nkinds = 2\ncpus = [1, 1]\nlimited_kinds = 1\n";
    std::fs::write(root.join("fleet.toml"), fleet).unwrap();
    check(
        "fleet",
        &[run_json(&["fleet", "fleet.toml", "--json"])],
        &[],
        &[],
    );
    let short = ["--warm-up", "0", "--cycles", "1", "--json"];
    let attribution = |machine: &str| {
        run_json(
            &[
                &[
                    "repro",
                    "attribute",
                    "mcf",
                    "--with",
                    "small.cmt",
                    "-m",
                    machine,
                ],
                &short[..],
            ]
            .concat(),
        )
    };
    check(
        "repro attribute",
        &[attribution("xeon-x5365"), attribution("xeon-x5365-4")],
        &[],
        &[],
    );
}

/// Do shards and their merge report the promised fields, and a shard with a failed run too?
#[test]
fn shards_report_the_promised_fields() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let run_json = |args: &[&str]| -> Value { serde_json::from_str(&run(root, args).out).unwrap() };
    let shard = [
        "repro", "CP-6", "--sample", "--shard", "1/1", "--store", "a", "--json",
    ];
    let failed = [
        "repro",
        "TC-SERVER",
        "--sample",
        "--shard",
        "1/1",
        "--store",
        "a",
        "--json",
    ];
    check(
        "repro --shard",
        &[run_json(&shard), run_json(&failed)],
        &[],
        &[],
    );
    let merges = [
        run_json(&["merge", "b", "a", "--json"]),
        serde_json::json!({ "damaged": ["x"], "differing": ["x"] }),
    ];
    check("merge", &merges, &[], &[]);
}

/// Does the published matrix produce the published schedules (CA Table 1)?
#[test]
fn the_published_matrix_gives_the_published_schedules() {
    let dir = tempfile::tempdir().unwrap();
    let table = "# CA Table 1\n,mcf,milc,gamess,namd\nmcf,48.01%,65.63%,2.0%,2.11%\nmilc,24.75%,45.39%,1.23%,1.11%\n\
                 gamess,2.67%,4.48%,-1.01%,-1.21%\nnamd,1.48%,3.45%,-1.19%,-0.93%\n";
    std::fs::write(dir.path().join("ca.csv"), table).unwrap();
    let plan = run(
        dir.path(),
        &[
            "plan",
            "-m",
            "xeon-x5365-4",
            "--slowdowns",
            "ca.csv",
            "--json",
        ],
    )
    .json();
    let mean_slowdown = |outcome: &str| plan[outcome]["mean_slowdown_percent"].as_f64().unwrap();
    assert_eq!(
        (
            mean_slowdown("plan"),
            mean_slowdown("best"),
            mean_slowdown("worst")
        ),
        (2.3075, 2.3075, 21.995)
    );
    assert!((mean_slowdown("random") - (2.3075 + 2.325 + 21.995) / 3.0).abs() < 1e-9);
    let co_runner_of = |name: &str| {
        let programs = plan["programs"].as_array().unwrap();
        programs.iter().find(|p| p["name"] == name).unwrap()["co_runners"][0]
            .as_str()
            .unwrap()
            .to_string()
    };
    assert_eq!(
        (co_runner_of("mcf"), co_runner_of("milc")),
        ("gamess".to_string(), "namd".to_string())
    );
}

/// Does a plan's forecast of a group account for the fact that slowdowns do not add up: is a member's slowdown at least
/// that beside one of them?
#[test]
fn a_group_forecast_is_at_least_each_pairs_slowdown() {
    let dir = tempfile::tempdir().unwrap();
    for (name, lines) in [("a", 9_000), ("b", 30_000), ("c", 20_000), ("d", 14_000)] {
        std::fs::write(
            dir.path().join(format!("{name}.lackey")),
            lackey_text(lines, 6, 2),
        )
        .unwrap();
    }
    let programs = ["a.lackey", "b.lackey", "c.lackey", "d.lackey"];
    let four_on_one = ["-m", "opteron-2350?packages=1&memory.nodes=1", "--json"];
    let plan = run(
        dir.path(),
        &[&["plan"], &programs[..], &four_on_one].concat(),
    )
    .json();
    let predicted = run(
        dir.path(),
        &[&["predict"], &programs[..], &four_on_one].concat(),
    )
    .json();
    let groups = plan["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 1, "{groups:?}");
    assert_eq!(groups[0]["members"], predicted["group"]["members"]);
    assert!(groups[0]["miss_ratio"].as_f64().unwrap() > 0.0);
}

/// Does recording report its results in the promised fields?
#[test]
fn record_reports_the_promised_fields() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = run(
        dir.path(),
        &["record", "--json", "-o", "true.cmt", "--", "true"],
    )
    .ok();
    assert_eq!(outcome.out, "", "standard output is the program's");
    let recorded: Value = serde_json::from_str(&outcome.err).unwrap();
    check("record", std::slice::from_ref(&recorded), &[], &[]);
    assert_eq!(
        (&recorded["ended"], &recorded["exit_status"]),
        (&"exit 0".into(), &0.into())
    );
    let read = run(dir.path(), &["mrc", "true.cmt", "--json"]).json();
    assert_eq!(
        (
            &read["accesses"],
            &read["program_accesses"],
            &read["instructions"]
        ),
        (
            &recorded["records"],
            &recorded["program_accesses"],
            &recorded["instructions"]
        )
    );
}

/// Is every field of a profile, at any depth, on the format's page, and does the profile read back?
#[test]
fn every_profile_field_is_documented_and_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t.lackey"), lackey_text(3000, 40, 2)).unwrap();
    let args = ["profile", "t.lackey", "-m", "xeon-x5365-4", "--json"];
    let profile = run(dir.path(), &args).json();
    let page = include_str!("../../../../docs/formats.md");
    let mut profile_keys = BTreeMap::new();
    collect_field_types("", &profile, &mut profile_keys);
    for path in profile_keys
        .keys()
        .filter(|path| !path.starts_with("profile"))
    {
        for name in path.split(['.', '[', ']']).filter(|name| !name.is_empty()) {
            let named =
                page.contains(&format!("`{name}`")) || page.contains(&format!("\"{name}\""));
            assert!(named, "'{name}' of {path} is not in docs/formats.md");
        }
    }
    for field in [
        "format",
        "program",
        "source",
        "accesses",
        "records",
        "instructions",
        "curves",
        "profile",
    ] {
        assert!(!profile[field].is_null(), "{field} in {profile}");
    }
    serde_json::from_value::<cachemate_core::Profile>(profile["profile"].clone()).unwrap();
    std::fs::write(dir.path().join("t.json"), profile.to_string()).unwrap();
    let again = run(dir.path(), &["profile", "t.json", "--json"]).json();
    assert_eq!(profile, again);
}
