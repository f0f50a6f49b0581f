//! The names of processes that the recorded program starts and that are not recorded.
//!
//! Problem: a compiler driver does nothing itself, and whoever recorded it has to learn which program did the work. The
//! kernel's account of a process has the CPU time of its children, but not their names, and both are gone once a child
//! was waited for. Method: while the program runs, its descendants are looked at every 50 ms, so that each one that
//! worked for longer was seen; the last reading of a process counts. Where the kernel does not list children
//! (`CONFIG_PROC_CHILDREN`), there are no names.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time between two looks at the descendants.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Processes of which one look takes note; a program that starts more at a time is described by these.
const MAX_PROCESSES: usize = 1000;
/// Names that are shown.
const MAX_NAMES: usize = 3;

/// Facts about a process by `/proc/PID/stat`.
pub(super) struct ProcessStat {
    name: String,
    cpu_time: Duration,
    /// CPU time of the children that it has waited for.
    pub(super) children_time: Duration,
    /// Time at which it started, in ticks, by which ids that are used again are told apart.
    start_ticks: u64,
}

/// `None` if the process has gone or the file has another form.
pub(super) fn read_stat(pid: u32) -> Option<ProcessStat> {
    let path = format!("/proc/{pid}/stat");
    let stat = cachemate_files::read_text_limited(Path::new(&path), 4096).ok()?;
    // The name may contain spaces and parentheses; the state, which is the third field, follows it.
    let (head, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let ticks_per_second = rustix::param::clock_ticks_per_second().max(1);
    let time = |user: usize| {
        let ticks = field(user)?.checked_add(field(user + 1)?)?;
        Some(Duration::from_millis(
            ticks.saturating_mul(1000) / ticks_per_second,
        ))
    };
    Some(ProcessStat {
        name: head.split_once('(')?.1.escape_default().to_string(),
        cpu_time: time(14)?,
        children_time: time(16)?,
        start_ticks: field(22)?,
    })
}

/// The processes with one name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NamedChildren {
    pub(super) processes: u32,
    pub(super) cpu_time: Duration,
}

/// What was seen of the descendants of one process.
#[derive(Debug, Default)]
pub(super) struct ChildWatch {
    last_look: Option<Instant>,
    ancestor_name: String,
    /// By id and start: the name at the last look, which exec changes, and the CPU time.
    living: BTreeMap<(u32, u64), (String, Duration)>,
    ended: BTreeMap<String, NamedChildren>,
}

impl ChildWatch {
    /// Looks at the descendants of a process, unless the last look was a moment ago.
    pub(super) fn look(&mut self, ancestor: u32) {
        if self
            .last_look
            .is_some_and(|last| last.elapsed() < LOOK_INTERVAL)
        {
            return;
        }
        self.last_look = Some(Instant::now());

        if let Some(stat) = read_stat(ancestor) {
            self.ancestor_name = stat.name;
        }

        let mut living = BTreeMap::new();
        let mut unvisited = children_of(ancestor);
        while let Some(pid) = unvisited.pop() {
            if living.len() == MAX_PROCESSES {
                break;
            }
            let Some(stat) = read_stat(pid) else { continue };
            let key = (pid, stat.start_ticks);
            if living.insert(key, (stat.name, stat.cpu_time)).is_none() {
                unvisited.extend(children_of(pid));
            }
        }
        for (process, (name, cpu_time)) in std::mem::replace(&mut self.living, living) {
            if !self.living.contains_key(&process) {
                self.count_ended(name, cpu_time);
            }
        }
    }

    fn count_ended(&mut self, name: String, cpu_time: Duration) {
        if self.ended.contains_key(&name) || self.ended.len() < MAX_PROCESSES {
            let named = self.ended.entry(name).or_default();
            named.processes += 1;
            named.cpu_time += cpu_time;
        }
    }

    /// The descendants by name, once the process has ended. A copy of it that started no other program has the name of
    /// the recorder's tool, and gets that of `program`.
    pub(super) fn finish(mut self, program: &str) -> BTreeMap<String, NamedChildren> {
        for (name, cpu_time) in std::mem::take(&mut self.living).into_values() {
            self.count_ended(name, cpu_time);
        }
        if let Some(copies) = self.ended.remove(&self.ancestor_name) {
            self.ended.insert(format!("copies of {program}"), copies);
        }
        self.ended
    }
}

/// The ids of the children of all threads of a process.
fn children_of(pid: u32) -> Vec<u32> {
    let threads = cachemate_files::list_subdirs(Path::new(&format!("/proc/{pid}/task")));
    let lists = threads.into_iter().flatten().filter_map(|thread| {
        cachemate_files::read_text_limited(&thread.join("children"), 1 << 16).ok()
    });
    lists
        .flat_map(|list| {
            let ids = list.split_whitespace().map(str::parse);
            ids.flatten().collect::<Vec<u32>>()
        })
        .collect()
}

/// The names with the most CPU time, such as `cc1: 2 processes, 0.8 s; as: 1 process, 0.1 s`.
pub(super) fn describe_children(children: &BTreeMap<String, NamedChildren>) -> String {
    let mut by_time: Vec<(&String, &NamedChildren)> = children.iter().collect();
    by_time.sort_by_key(|(_, named)| std::cmp::Reverse(named.cpu_time));
    let others = by_time.split_off(by_time.len().min(MAX_NAMES));
    let mut names: Vec<String> = by_time
        .into_iter()
        .map(|(name, named)| {
            let plural = if named.processes == 1 { "" } else { "es" };
            let seconds = named.cpu_time.as_secs_f64();
            format!(
                "{name}: {} process{plural}, {seconds:.1} s",
                named.processes
            )
        })
        .collect();
    if !others.is_empty() {
        names.push(format!("{} other names", others.len()));
    }
    names.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are the descendants of a process found with their names, whether they live or have ended, and described with
    /// the busiest first?
    #[test]
    fn descendants_are_counted_by_name() {
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & sleep 60 & sh -c 'sleep 60; true' & wait"])
            .spawn()
            .unwrap();
        let mut watch = ChildWatch::default();
        let started = Instant::now();
        while watch
            .living
            .values()
            .filter(|(name, _)| name == "sleep")
            .count()
            < 3
        {
            assert!(started.elapsed() < Duration::from_secs(20), "{watch:?}");
            std::thread::sleep(LOOK_INTERVAL);
            watch.look(shell.id());
        }
        let ids: Vec<u32> = watch.living.keys().map(|&(pid, _)| pid).collect();
        for pid in ids {
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
        }
        shell.wait().unwrap();
        std::thread::sleep(LOOK_INTERVAL);
        watch.look(shell.id());
        assert!(watch.living.is_empty());

        let mut children = watch.finish("make");
        assert_eq!(children["sleep"].processes, 3);
        assert_eq!(children["copies of make"].processes, 1);
        children.get_mut("sleep").unwrap().cpu_time = Duration::from_millis(1800);
        assert_eq!(
            describe_children(&children),
            "sleep: 3 processes, 1.8 s; copies of make: 1 process, 0.0 s"
        );
    }
}
