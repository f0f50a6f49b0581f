//! The daemon's configuration.

use cachemate_spec::{ManageMode, RuleAction, User, parse_manage_config};

fn user_id_of(name: &str) -> Option<u32> {
    (name == "mysql").then_some(105)
}

/// Is a complete configuration read, with users as numbers, and goals only for rules that set one?
#[test]
fn a_configuration_is_read() {
    let text = r#"
        mode = "act"
        window_ms = 500
        metrics_address = "127.0.0.1:9753"
        policy = { name = "intensity-gangs", parameters = { slice_ns = 50_000_000 } }
        [[rules]]
        command = "mysqld*"
        user = "mysql"
        priority = 2.0
        [[rules]]
        command = "nginx"
        min_rate = 1500.0
        [[rules]]
        cgroup = "/system.slice"
        action = "observe"
        [[cpusets]]
        cgroup = "/system.slice/backup.service"
        cpus = "0-1,4"
    "#;

    let config = parse_manage_config("c.toml", text, &user_id_of).unwrap();
    assert!(config.mode == ManageMode::Act && config.rollback.enabled);
    assert_eq!(config.rules[0].user, Some(User::Id(105)));
    assert_eq!(config.rules[0].goal().unwrap().priority, 2.0);
    let floor = config.rules[1].goal().unwrap();
    assert_eq!(
        (floor.priority, floor.max_slowdown, floor.min_rate),
        (1.0, None, Some(1500.0))
    );
    assert_eq!(
        (config.rules[2].action, config.rules[2].goal()),
        (RuleAction::Observe, None)
    );
    assert_eq!(config.cpusets[0].cpus.to_string(), "0-1,4");
    let empty = parse_manage_config("c.toml", "", &user_id_of).unwrap();
    assert!(empty.mode == ManageMode::Observe && empty.rules.is_empty());
}

/// Is a limit the same as a fraction and as a percentage, and may only the latter reach 100 %?
#[test]
fn a_limit_is_the_same_as_a_fraction_and_as_a_percentage() {
    let limit = |written: &str| {
        let text = format!("[[rules]]\nmax_slowdown = {written}");
        parse_manage_config("c.toml", &text, &user_id_of)
            .unwrap()
            .rules[0]
            .max_slowdown
    };
    let cases = [
        ("0.05", 0.05),
        ("\"5%\"", 0.05),
        ("\"5 %\"", 0.05),
        ("\"100%\"", 1.0),
        ("0", 0.0),
        ("\"150%\"", 1.5),
    ];
    for (written, share) in cases {
        assert_eq!(limit(written), Some(share), "{written}");
    }
}

/// Are all errors of a file reported, each once, in the order of their lines and missing fields last, whether a type or
/// a value is wrong?
#[test]
fn all_errors_of_a_file_are_reported_by_line() {
    let text = "window_ms = 0\nmode = 1\n[[rules]]\ncomand = 'a'\npid = -1\n[[rules]]\npriority = 'high'\nuser = 'nobdy'\n\
                progress_file = 'work'\n[[cpusets]]\ncgroup = '/'\ncpus = ''";
    let message = parse_manage_config("c.toml", text, &|_| None)
        .unwrap_err()
        .to_string();
    let places: Vec<&str> = message
        .lines()
        .filter_map(|line| line.split(": found").next())
        .collect();

    let expected = [
        "c.toml:1:13: field 'window_ms'",
        "c.toml:2:8: field 'mode'",
        "c.toml:4:10: field 'rules[0].comand'",
        "c.toml:5:7: field 'rules[0].pid'",
        "c.toml:7:12: field 'rules[1].priority'",
        "c.toml:8:8: field 'rules[1].user'",
        "c.toml:9:17: field 'rules[1].progress_file'",
        "c.toml:11:10: field 'cpusets[0].cgroup'",
        "c.toml:12:8: field 'cpusets[0].cpus'",
    ];
    assert_eq!(places, expected, "{message}");
}

/// Does every error give its line, the value found and the values expected?
#[test]
fn errors_have_their_line() {
    for (text, expected) in [
        ("mode = 1", "c.toml:1:8: field 'mode'"),
        (
            "mode = \"acting\"",
            "field 'mode': found 'acting', expected 'observe' or 'act'",
        ),
        (
            "policy = \"auto\"",
            "field 'policy': found string \"auto\", expected a table such as { name = 'auto' }",
        ),
        ("\nwindov_ms = 3", "c.toml:2:13: field 'windov_ms'"),
        (
            "window_ms = 0",
            "c.toml:1:13: field 'window_ms': found 0, expected 1 or more",
        ),
        (
            "gang_scheduler_socket = ''",
            "field 'gang_scheduler_socket': found '', expected a path",
        ),
        (
            "metrics_address = \"0.0.0.0:9753\"",
            "c.toml:1:19: field 'metrics_address': found '0.0.0.0:9753', expected a loopback",
        ),
        (
            "[[rules]]\n[[rules]]\nuser = \"nobdy\"",
            "c.toml:3:8: field 'rules[1].user': found 'nobdy'",
        ),
        (
            "[[rules]]\ncgroup = \"a\"",
            "c.toml:2:10: field 'rules[0].cgroup': found 'a', expected a path",
        ),
        ("[[rules]]\naction = \"move\"", "c.toml:2:10"),
        (
            "[[rules]]\npriority = -1",
            "field 'rules[0].priority': found -1, expected a positive number",
        ),
        (
            "[[rules]]\nmax_slowdown = 5",
            "c.toml:2:16: field 'rules[0].max_slowdown': found 5, expected a number below 1 such as 0.05 without \
             quotes, or a percentage such as \"5%\"",
        ),
        (
            "[[rules]]\nmax_slowdown = 1",
            "found 1, expected a number below 1",
        ),
        (
            "[[rules]]\nmax_slowdown = 1.0",
            "found 1, expected a number below 1",
        ),
        (
            "[[rules]]\nmax_slowdown = -0.1",
            "found -0.1, expected a number",
        ),
        (
            "[[rules]]\nmax_slowdown = \"0.05\"",
            "found '0.05', expected a number below 1 such as 0.05 without quotes",
        ),
        (
            "[[rules]]\nmin_rate = 0",
            "field 'rules[0].min_rate': found 0, expected a positive number, in work",
        ),
        (
            "[[rules]]\nmin_rate = 5\naction = \"observe\"",
            "c.toml:3:10: field 'rules[0].action'",
        ),
        (
            "[[rules]]\nprogress_file = 'work'",
            "field 'rules[0].progress_file': found 'work', expected an absolute path",
        ),
        (
            "[[rules]]\nprogress_file = '/run/work'\naction = \"observe\"",
            "c.toml:3:10: field 'rules[0].action'",
        ),
        (
            "[[rules]]\ncommand = \"a-very-long-command\"",
            "1 to 15 bytes",
        ),
        (
            "[[rules]]\npriority = 2\naction = \"ignore\"",
            "c.toml:3:10: field 'rules[0].action'",
        ),
        (
            "[[cpusets]]\ncgroup = \"/\"\ncpus = \"0\"",
            "c.toml:2:10: field 'cpusets[0].cgroup': found '/', expected a path below",
        ),
        (
            "[[cpusets]]\ncgroup = \"/a/*\"\ncpus = \"0\"",
            "expected one cgroup",
        ),
        (
            "[[cpusets]]\ncgroup = \"/a/../b\"\ncpus = \"0\"",
            "field 'cpusets[0].cgroup'",
        ),
        (
            "[[cpusets]]\ncgroup = \"/a\"\ncpus = \"\"",
            "c.toml:3:8: field 'cpusets[0].cpus': found no CPU",
        ),
        (
            "[[cpusets]]\ncgroup = \"/a\"\ncpus = \"zero\"",
            "'cpusets[0].cpus'",
        ),
        (
            "[[cpusets]]\ncgroup = \"/a\"\ncpus = \"0\"\n[[cpusets]]\ncgroup = \"/a\"\ncpus = \"1\"",
            "field 'cpusets[1].cgroup': found '/a' again",
        ),
        (
            "[rollback]\ntrial_windows = 1",
            "c.toml:2:17: field 'rollback.trial_windows': found 1, expected 2 or more",
        ),
    ] {
        let error = parse_manage_config("c.toml", text, &user_id_of)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

/// Is every example of the shipped configuration valid, and does it show every key of the documented table?
#[test]
fn the_shipped_examples_are_valid_and_complete() {
    let shipped = include_str!("../../../../packaging/cachemate.toml");
    assert!(
        shipped
            .lines()
            .all(|line| line.is_empty() || line.starts_with('#')),
        "as shipped, nothing is configured"
    );
    let is_example = |line: &&str| {
        line.starts_with('[')
            || line
                .split_once(" = ")
                .is_some_and(|(key, _)| !key.contains(' '))
    };
    let examples: Vec<&str> = shipped
        .lines()
        .filter_map(|line| line.strip_prefix('#'))
        .filter(is_example)
        .collect();
    parse_manage_config("shipped", &examples.join("\n"), &|_| Some(0)).unwrap();
    let table = include_str!("../../../../docs/live.md")
        .lines()
        .skip_while(|line| !line.starts_with("| key | meaning"));
    for row in table.skip(2).take_while(|line| line.starts_with('|')) {
        let keys = row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2);
        let keys = keys.map(|key| key.split(' ').next().unwrap());
        for key in keys {
            let shows = |line: &&str| {
                line.trim_start_matches('[')
                    .starts_with(key.trim_start_matches('['))
            };
            assert!(examples.iter().any(shows), "{key} of {row}");
        }
    }
}
