//! Scenario files: the documented example, checks, and the documentation.

use cachemate_core::CpuSet;
use cachemate_core::RunLimit;
use cachemate_spec::{Distribution, Scenario, SimModel, load_scenario, parse_scenario, parse_toml};

fn example_scenario() -> String {
    let page = include_str!("../../../../docs/scenarios.md");
    page.split("```toml\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap()
        .to_string()
}

/// Does the documented example parse to the documented values?
#[test]
fn the_documented_example_reads() {
    let (scenario, machine) = parse_scenario("example", &example_scenario()).unwrap();
    assert_eq!(machine.name, "xeon-x5365-4");
    assert_eq!(
        (scenario.seed, scenario.scale, scenario.length),
        (1, 100, RunLimit::Cycles(30_000_000))
    );
    assert_eq!(
        (
            scenario.policy.name.as_str(),
            scenario.scheduler.name.as_str()
        ),
        ("random", "default")
    );
    assert_eq!(
        scenario
            .programs
            .iter()
            .map(|program| program.count)
            .sum::<u32>(),
        4
    );
    assert_eq!(
        scenario.programs[0].parameters["footprint_bytes"].as_integer(),
        Some(8 << 20)
    );
    let (unnamed, _) = parse_scenario(
        "example",
        &example_scenario().replace("policy = { name = \"random\" }\n", ""),
    )
    .unwrap();
    assert_eq!(
        (
            unnamed.policy.name.as_str(),
            unnamed.scheduler.name.as_str()
        ),
        ("auto", "default")
    );
    let pinned = example_scenario().replace(
        "count = 2\nparameters",
        "count = 2\ncpus = \"0,2-3\"\nparameters",
    );
    let (pinned, _) = parse_scenario("example", &pinned).unwrap();
    assert_eq!(
        pinned.programs[0].cpus,
        Some([0, 2, 3].into_iter().collect::<CpuSet>())
    );
}

/// Is every impossible scenario rejected with its place?
#[test]
fn impossible_scenarios_are_rejected_with_their_place() {
    let refused = |old: &str, new: &str| {
        let text = example_scenario();
        assert!(text.contains(old), "{old}");
        parse_scenario("s.toml", &text.replacen(old, new, 1))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refused("scale = 100", "scale = 0"),
        "s.toml:5:9: field 'scale': found 0, expected 1 or more"
    );
    assert_eq!(
        refused("count = 2", "count = 0"),
        "s.toml:11:9: field 'programs[0].count': found 0, expected 1 to 4096"
    );
    let machine = refused("xeon-x5365-4", "xeon-x5356-4");
    assert!(
        machine.starts_with("s.toml:3:11: field 'machine'"),
        "{machine}"
    );
    assert!(
        machine.ends_with("(did you mean 'xeon-x5365-4'?)"),
        "{machine}"
    );
    let cpus = refused("count = 2", "cpus = \"0-4\"");
    assert!(
        cpus.contains(
            "'programs[0].cpus': found '0-4', expected some of the CPUs 0-3 of xeon-x5365-4"
        ),
        "{cpus}"
    );
    assert!(refused("count = 2", "cpus = \"a\"").contains("'a' is not an index list"));
    assert!(
        refused("count = 2", "goal = { priority = -1.0 }")
            .contains("'programs[0].goal.priority': found -1")
    );
    let percent = refused("count = 2", "goal = { max_slowdown = 5 }");
    assert!(
        percent.contains("'programs[0].goal.max_slowdown': found 5, expected a number below 1"),
        "{percent}"
    );
    assert!(refused("cycles = 30_000_000", "weeks = 3").contains("field 'length"));
    assert!(refused("seed = 1\n", "").contains("field 'seed': found nothing"));
    assert!(refused("program = \"mcf\"", "prog = \"mcf\"").contains("(did you mean 'program'?)"));
    assert!(
        load_scenario("no-such-file.toml")
            .unwrap_err()
            .to_string()
            .starts_with("no-such-file.toml: found")
    );
}

/// May a scenario omit its description and the priority of a goal, and give a limit in percent?
#[test]
fn description_and_priority_are_optional() {
    let text: String = example_scenario()
        .lines()
        .filter(|line| !line.starts_with("description"))
        .map(|l| format!("{l}\n"))
        .collect();
    assert!(text.len() < example_scenario().len());
    let text = text.replacen("count = 2", "goal = { max_slowdown = \"5%\" }", 1);
    let (scenario, _) = parse_scenario("s.toml", &text).unwrap();
    assert_eq!(scenario.description, "");
    let goal = scenario.programs[0].goal.unwrap();
    assert_eq!(
        (goal.priority, goal.max_slowdown, goal.min_rate),
        (1.0, Some(0.05), None)
    );
}

/// Does docs/scenarios.md name every field?
#[test]
fn the_documentation_names_every_field() {
    let page = include_str!("../../../../docs/scenarios.md");
    let known = |text: &str| {
        let error = parse_toml::<Scenario>("doc", text).unwrap_err();
        assert!(error.found.contains("zzz"), "{error}");
        error
            .expected
            .split('\'')
            .skip(1)
            .step_by(2)
            .map(str::to_string)
            .collect::<Vec<_>>()
    };
    let mut names = known(&format!("zzz = 1\n{}", example_scenario()));
    names.extend(known(&example_scenario().replacen(
        "count = 2",
        "zzz = 2",
        1,
    )));
    names.extend(known(&example_scenario().replacen(
        "cycles = 30",
        "zzz = 30",
        1,
    )));
    names.extend(known(&example_scenario().replacen(
        "name = \"random\"",
        "name = \"random\", zzz = 1",
        1,
    )));
    assert!(names.len() > 20, "{names:?}");

    for name in names {
        assert!(
            page.contains(&format!("`{name}`")),
            "docs/scenarios.md does not mention `{name}`"
        );
    }
}

fn nominal_scenario() -> String {
    let page = include_str!("../../../../docs/scenarios.md");
    page.split("```toml\n")
        .nth(2)
        .unwrap()
        .split("```")
        .next()
        .unwrap()
        .to_string()
}

/// Does the documented scenario of the interval machine parse to the documented values?
#[test]
fn the_documented_interval_scenario_reads() {
    let (scenario, _) = parse_scenario("example", &nominal_scenario()).unwrap();
    assert_eq!(scenario.simulator, SimModel::Interval);
    let interval = scenario.interval.unwrap();
    assert_eq!(interval.events.len(), 2);
    assert_eq!(
        interval.events[1].split_cpus,
        Some([1].into_iter().collect::<CpuSet>())
    );
    assert_eq!(
        interval.mixes[0].interarrival_ns,
        Some(Distribution::Exponential(60e9))
    );
    assert_eq!(
        interval.mixes[0].instructions,
        Some(Distribution::LogNormal(2e11, 0.5))
    );
    assert_eq!(interval.phase_scale, 1000.0);
}

/// Are fields that the interval machine does not accept rejected at their place, and fields that only it accepts
/// rejected elsewhere?
#[test]
fn impossible_interval_scenarios_are_rejected_at_their_place() {
    let refused = |old: &str, new: &str| {
        let text = nominal_scenario();
        assert!(text.contains(old), "{old}");
        parse_scenario("s.toml", &text.replacen(old, new, 1))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refused("split_cpus = \"1\"", "split_cpus = \"1-2\""),
        "s.toml:18:14: field 'interval.events[1].split_cpus': found '1-2', expected CPUs of one contended cache"
    );
    assert!(
        refused("cache = 0", "cache = 2")
            .contains("'interval.events[0].external_traffic.cache': found 2, expected 0 to 1")
    );
    let both = refused("split_cpus = \"1\"", "split_cpus = \"1\"\noffline = 0");
    assert!(
        both.contains("'interval.events[1]': found 2 kinds of event, expected exactly one"),
        "{both}"
    );
    assert!(
        refused("weight = 3.0", "weight = 0.0")
            .contains("'interval.mixes[0].programs[1].weight': found 0")
    );
    assert!(
        refused("exponential = 60e9", "exponential = -1.0")
            .contains("'interval.mixes[0].interarrival_ns': found -1")
    );
    assert!(refused("count = 40", "count = 0").contains("'interval.mixes[0].count': found 0"));
    assert!(
        refused("ns = 3_600_000_000_000", "completions = 3").contains("'length': found no time")
    );
    assert!(refused("seed = 1", "seed = 1\nscale = 10").contains("'scale': found 10, expected 1"));
    assert!(
        refused("time_sharing = \"averaged\"", "time_sharing = \"average\"")
            .contains("(did you mean 'averaged'?)")
    );
    let cycle = refused("simulator = \"interval\"\n", "");
    assert!(
        cycle.contains("'interval': found a table, expected none, as simulator is"),
        "{cycle}"
    );
    let text = example_scenario().replacen("count = 2", "cpu_share = 0.5", 1);
    let cycle = parse_scenario("s.toml", &text).unwrap_err().to_string();
    assert!(
        cycle.contains("'programs[0].cpu_share': found a value, expected none"),
        "{cycle}"
    );
}
