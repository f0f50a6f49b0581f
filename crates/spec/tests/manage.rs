//! The daemon's configuration.

use cachemate_spec::{RuleAction, User, parse_manage_config};

fn users(name: &str) -> Option<u32> {
    (name == "mysql").then_some(105)
}

/// Is a whole configuration read, with users as numbers and goals only where something is asked?
#[test]
fn a_configuration_is_read() {
    let text = r#"
        act = true
        window_ms = 500
        metrics = "127.0.0.1:9753"
        policy = { name = "intensity-gangs", parameters = { slice_ns = 50_000_000 } }
        [[rules]]
        command = "mysqld*"
        user = "mysql"
        priority = 2.0
        [[rules]]
        command = "nginx"
        rate_at_least = 1500.0
        [[rules]]
        cgroup = "/system.slice"
        action = "observe"
        [[groups]]
        cgroup = "/system.slice/backup.service"
        cpus = "0-1,4"
    "#;
    let config = parse_manage_config("c.toml", text, &users).unwrap();
    assert!(config.act && config.guard.enabled);
    assert_eq!(config.rules[0].user, Some(User::Id(105)));
    assert_eq!(config.rules[0].goal().unwrap().priority, 2.0);
    let floor = config.rules[1].goal().unwrap();
    assert_eq!((floor.priority, floor.max_slowdown, floor.min_rate), (1.0, None, Some(1500.0)));
    assert_eq!((config.rules[2].action, config.rules[2].goal()), (RuleAction::Observe, None));
    assert_eq!(config.groups[0].cpus.to_string(), "0-1,4");
    let empty = parse_manage_config("c.toml", "", &users).unwrap();
    assert!(!empty.act && empty.rules.is_empty());
}

/// Does every mistake name its line, what was found and what was expected?
#[test]
fn mistakes_are_told_with_their_line() {
    for (text, said) in [
        ("act = 1", "c.toml:1:7: field 'act': found integer 1, expected true or false"),
        ("\nwindov_ms = 3", "c.toml:2:13: field 'windov_ms'"),
        ("window_ms = 0", "c.toml:1:13: field 'window_ms': found 0, expected 1 or more"),
        ("sched_cache_tolerance = 101", "c.toml:1:25: field 'sched_cache_tolerance': found 101, expected 0 to 100"),
        ("gang_scheduler = ''", "field 'gang_scheduler': found '', expected a path"),
        ("metrics = \"0.0.0.0:9753\"", "c.toml:1:11: field 'metrics': found '0.0.0.0:9753', expected a loopback"),
        ("[[rules]]\n[[rules]]\nuser = \"nobdy\"", "c.toml:3:8: field 'rules[1].user': found 'nobdy'"),
        ("[[rules]]\ncgroup = \"a\"", "c.toml:2:10: field 'rules[0].cgroup': found 'a', expected a path"),
        ("[[rules]]\naction = \"move\"", "c.toml:2:10"),
        ("[[rules]]\npriority = -1", "field 'rules[0].priority': found -1, expected a positive number"),
        (
            "[[rules]]\nrate_at_least = 0",
            "field 'rules[0].rate_at_least': found 0, expected a positive number, in work",
        ),
        ("[[rules]]\nrate_at_least = 5\naction = \"observe\"", "c.toml:3:10: field 'rules[0].action'"),
        ("[[rules]]\ncommand = \"a-very-long-command\"", "1 to 15 bytes"),
        ("[[rules]]\npriority = 2\naction = \"leave\"", "c.toml:3:10: field 'rules[0].action'"),
        (
            "[[groups]]\ncgroup = \"/\"\ncpus = \"0\"",
            "c.toml:2:10: field 'groups[0].cgroup': found '/', expected a path below",
        ),
        ("[[groups]]\ncgroup = \"/a/../b\"\ncpus = \"0\"", "field 'groups[0].cgroup'"),
        ("[[groups]]\ncgroup = \"/a\"\ncpus = \"\"", "c.toml:3:8: field 'groups[0].cpus': found no CPU"),
        ("[[groups]]\ncgroup = \"/a\"\ncpus = \"zero\"", "'groups[0].cpus'"),
        (
            "[[groups]]\ncgroup = \"/a\"\ncpus = \"0\"\n[[groups]]\ncgroup = \"/a\"\ncpus = \"1\"",
            "field 'groups[1].cgroup': found '/a' again",
        ),
        ("[guard]\nwindows = 1", "c.toml:2:11: field 'guard.windows': found 1, expected 2 or more"),
    ] {
        let error = parse_manage_config("c.toml", text, &users).unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
}
