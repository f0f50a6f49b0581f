//! Does a running daemon show services by their control groups, with every field, under every form of their names?

mod common;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::not_shown::report_unchecked;
use common::{run, start_daemon, start_sleeper, status_when};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(120);

/// The group of a unit in a hierarchy that permits new groups; removed when dropped.
struct UnitGroup(PathBuf);

impl UnitGroup {
    /// # Errors
    /// No hierarchy permits this process to create groups.
    fn new(unit: &str) -> Result<Self, String> {
        let mut errors = Vec::new();
        for hierarchy in ["pids", "freezer", "unified", ""] {
            let above = format!(
                "/sys/fs/cgroup/{hierarchy}/cachemate-services-{}",
                std::process::id()
            );
            let group = UnitGroup(PathBuf::from(above).join(unit));
            match std::fs::create_dir_all(&group.0)
                .and_then(|()| std::fs::metadata(group.0.join("cgroup.procs")))
            {
                Ok(_) => return Ok(group),
                Err(error) => errors.push(format!("{}: {error}", group.0.display())),
            }
        }
        Err(errors.join("; "))
    }

    fn join(&self, pid: i32) {
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for UnitGroup {
    fn drop(&mut self) {
        let start = Instant::now();
        while self.0.exists()
            && std::fs::remove_dir(&self.0).is_err()
            && start.elapsed() < Duration::from_secs(20)
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.0.parent().map(std::fs::remove_dir);
    }
}

/// Do status, explain and metrics all show a unit with its threads, including one that joins later, and is a misspelled
/// name corrected?
#[test]
fn a_unit_is_shown_with_its_threads() {
    // The name has the number of this process, so that the rule matches no unit of the host.
    let name = format!("cmtest{}", std::process::id());
    let (name, unit) = (name.as_str(), format!("{name}.service"));
    let group = match UnitGroup::new(&unit) {
        Ok(group) => group,
        Err(error) => return report_unchecked("a daemon that shows a unit", error),
    };
    let dir = tempfile::tempdir().unwrap();
    let (first, second, other) = (start_sleeper(), start_sleeper(), start_sleeper());
    group.join(first.pid());
    let config = format!(
        "window_ms = 20\npolicy = {{ name = \"default\" }}\n[[rules]]\nservice = \"{name}\"\nmax_slowdown = \"5%\"\n\
         [[rules]]\npid = {}\n",
        other.pid()
    );
    let _daemon = start_daemon(dir.path(), &config);
    let service_named = |status: &Value, name: &str| -> Option<Value> {
        status["services"]
            .as_array()?
            .iter()
            .find(|service| service["name"] == name)
            .cloned()
    };
    let wait_for_tasks = |tasks: u64| {
        let has_tasks = |status: &Value| {
            service_named(status, &unit).is_some_and(|shown| shown["tasks"] == tasks)
        };
        status_when(
            dir.path(),
            "the unit's threads",
            (Duration::from_millis(50), PATIENCE),
            has_tasks,
        )
    };
    let status = wait_for_tasks(1);
    let shown = service_named(&status, &unit).unwrap();
    assert_eq!(
        (
            shown["kind"].as_str(),
            shown["max_slowdown_percent"].as_f64()
        ),
        (Some("unit"), Some(5.0))
    );
    assert!(
        shown["cache_percent"].is_null() && shown["reason"].is_string(),
        "{shown}"
    );
    assert!(shown["cache_by"].as_array().is_some_and(Vec::is_empty) && shown.get("pod").is_none());
    assert_eq!(service_named(&status, "sleep").unwrap()["kind"], "command");
    group.join(second.pid());
    let shown = service_named(&wait_for_tasks(2), &unit).unwrap();
    assert_eq!(shown["task_ids"].as_array().unwrap().len(), 2);
    for word in [name, &unit, &format!("unit/{name}")] {
        let explained = run(
            dir.path(),
            &["explain", word, "--json", "--socket", "s.sock"],
        )
        .json();
        assert_eq!(explained["services"][0]["name"], unit.as_str(), "{word}");
        assert_eq!(explained["tasks"].as_array().unwrap().len(), 2, "{word}");
    }
    let text = run(dir.path(), &["explain", name, "--socket", "s.sock"])
        .ok()
        .out;
    assert!(
        text.contains("which service slows which: none is known") && text.contains(&unit),
        "{text}"
    );
    let misspelt = run(
        dir.path(),
        &["explain", &format!("{name}.servce"), "--socket", "s.sock"],
    );
    assert!(
        misspelt.err.contains(&format!("did you mean '{unit}'")),
        "{}",
        misspelt.err
    );
    let shown = run(dir.path(), &["status", "--socket", "s.sock"]).ok().out;
    let with_threads = run(dir.path(), &["status", "--threads", "--socket", "s.sock"])
        .ok()
        .out;
    let tid = first.pid().to_string();
    assert!(
        !shown.contains(&format!(" {tid} ")) && with_threads.contains(&tid),
        "{shown}\n{with_threads}"
    );
    drop((first, second));
}
