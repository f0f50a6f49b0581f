//! Control groups that are created, joined, left, renamed and removed at random: does every program keep the right
//! service?

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cachemate_core::SplitMix64;
use cachemate_linux::act::rules::{ManageAction, ManageRule};
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::sense::tasks::TaskTable;
use common::Program;
use common::not_shown::report_unchecked;

/// Length of the test, unless `CACHEMATE_RACE_SECONDS` sets another.
const SECONDS: u64 = 3;
const PROGRAMS: usize = 6;
const GROUPS: u64 = 5;

/// A control group of this test in a hierarchy that allows groups to be created; dropping it removes all groups below
/// as well.
struct GroupTree(PathBuf);

impl GroupTree {
    /// # Errors
    /// No hierarchy allows this process to create groups.
    fn new() -> Result<Self, String> {
        let mut errors = Vec::new();
        for hierarchy in ["pids", "freezer", "unified", ""] {
            let path = Path::new("/sys/fs/cgroup")
                .join(hierarchy)
                .join(format!("cachemate-race-{}", std::process::id()));
            let probe = path.join("probe.service");
            match std::fs::create_dir_all(&probe)
                .and_then(|()| std::fs::metadata(probe.join("cgroup.procs")))
            {
                Ok(_) => {
                    let tree = GroupTree(path);
                    std::fs::remove_dir(&probe).map_err(|error| error.to_string())?;
                    return Ok(tree);
                }
                Err(error) => errors.push(format!("{}: {error}", path.display())),
            }
        }
        Err(errors.join("; "))
    }

    fn join(&self, group: Option<&str>, pid: i32) {
        let dir = group.map_or_else(
            || self.0.parent().unwrap().to_path_buf(),
            |group| self.0.join(group),
        );
        std::fs::write(dir.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for GroupTree {
    fn drop(&mut self) {
        let start = Instant::now();
        // A group stays busy until the kernel has reaped its last member.
        while self.0.exists() && start.elapsed() < Duration::from_secs(20) {
            for entry in std::fs::read_dir(&self.0).into_iter().flatten().flatten() {
                let _ = std::fs::remove_dir(entry.path());
            }
            let _ = std::fs::remove_dir(&self.0);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// After two refreshes of the table, does every program have the service of its current group, whatever groups were
/// created, renamed and removed in between, and is nothing left of exited programs?
#[test]
fn every_program_keeps_the_right_service() {
    let tree = match GroupTree::new() {
        Ok(tree) => tree,
        Err(error) => return report_unchecked("services while control groups come and go", error),
    };
    let seconds = std::env::var("CACHEMATE_RACE_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(SECONDS);
    let host = LinuxHost::new("/");
    let rules = [ManageRule {
        command: Some("sleep".into()),
        action: ManageAction::Observe,
        ..ManageRule::default()
    }];
    // One reads everything in turn, the other follows the kernel's reports as far as they are allowed.
    let mut tables = [false, true].map(|follows| (TaskTable::new(false), follows));
    let (_, following) = tables.split_at_mut(1);
    host.process_events()
        .into_iter()
        .for_each(|events| following[0].0.set_events(events));
    host.group_moves()
        .into_iter()
        .for_each(|moves| following[0].0.set_group_moves(moves));
    let mut random = SplitMix64::new(11);
    let mut programs: Vec<Program> = (0..PROGRAMS).map(|_| Program::start()).collect();
    let mut groups: Vec<String> = Vec::new();
    let mut members: BTreeMap<i32, Option<String>> = BTreeMap::new();
    let (start, mut rounds, mut run_count) = (Instant::now(), 0u64, 0u64);
    while start.elapsed() < Duration::from_secs(seconds) {
        rounds += 1;
        for _ in 0..3 {
            match random.draw_below(5) {
                0 if groups.len() < GROUPS as usize => {
                    run_count += 1;
                    groups.push(format!("g{run_count}.service"));
                    std::fs::create_dir(tree.0.join(&groups[groups.len() - 1])).unwrap();
                }
                1 if !groups.is_empty() => {
                    run_count += 1;
                    let index = random.draw_below(groups.len() as u64) as usize;
                    let name = format!("r{run_count}.service");
                    // Control groups of version 2 cannot be renamed.
                    if std::fs::rename(tree.0.join(&groups[index]), tree.0.join(&name)).is_ok() {
                        let old = std::mem::replace(&mut groups[index], name.clone());
                        let theirs = members
                            .values_mut()
                            .filter(|group| group.as_ref() == Some(&old));
                        theirs.for_each(|group| *group = Some(name.clone()));
                    }
                }
                2 if !groups.is_empty() => {
                    let index = random.draw_below(groups.len() as u64) as usize;
                    if !members
                        .values()
                        .any(|group| group.as_ref() == Some(&groups[index]))
                        && std::fs::remove_dir(tree.0.join(&groups[index])).is_ok()
                    {
                        groups.remove(index);
                    }
                }
                3 => {
                    let index = random.draw_below(PROGRAMS as u64) as usize;
                    members.remove(&programs[index].pid());
                    programs[index] = Program::start();
                }
                _ => {
                    let pid = programs[random.draw_below(PROGRAMS as u64) as usize].pid();
                    let index = random.draw_below(groups.len() as u64 + 1) as usize;
                    let group = groups.get(index).cloned();
                    tree.join(group.as_deref(), pid);
                    members.insert(pid, group);
                }
            }
        }
        // Programs of this test must have become `sleep` before they are examined.
        programs
            .iter()
            .for_each(|program| wait_for_exec(program.pid()));
        // With hundreds of programs, control groups are read less often.
        let processes = host.processes().unwrap().len();
        for (table, follows) in &mut tables {
            for _ in 0..if processes < 200 || *follows { 2 } else { 10 } {
                table
                    .refresh(&host, &rules, start.elapsed().as_nanos() as u64)
                    .unwrap();
            }
            let seen: BTreeMap<i32, String> = table
                .tasks()
                .into_iter()
                .filter(|task| !task.has_exited)
                .map(|task| (task.pid, task.service_or_command().to_string()))
                .collect();
            for program in &programs {
                let group = members.get(&program.pid()).cloned().flatten();
                let expected = group.map_or_else(
                    || "command/sleep".to_string(),
                    |group| format!("unit/{group}"),
                );
                let found = seen.get(&program.pid());
                assert_eq!(
                    found,
                    Some(&expected),
                    "process {} in round {rounds}, {follows}",
                    program.pid()
                );
            }
            table.drop_exited();
        }
    }
    assert!(rounds > 3, "{rounds} rounds in {seconds} s");
    println!("{rounds} rounds in {seconds} s");
    drop(programs);
    for (table, _) in &mut tables {
        table
            .refresh(&host, &rules, start.elapsed().as_nanos() as u64)
            .unwrap();
        table.drop_exited();
        assert!(
            table
                .tasks()
                .into_iter()
                .all(|task| !members.contains_key(&task.pid)),
            "ended programs are forgotten"
        );
    }
    let path = tree.0.clone();
    drop(tree);
    assert!(!path.exists(), "{} stays", path.display());
}

fn wait_for_exec(pid: i32) {
    let start = Instant::now();
    while std::fs::read_to_string(format!("/proc/{pid}/comm"))
        .is_ok_and(|name| name.trim() != "sleep")
    {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
}
