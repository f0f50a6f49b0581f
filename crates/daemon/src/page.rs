//! What the page of a running daemon shows besides what a recording has.

use cachemate_linux::kernel::Host;
use cachemate_linux::machine::LiveMachine;
use cachemate_linux::safety::journal::{Object, State};
use cachemate_page::{DaemonSnapshot, JournalLine, Live};
use cachemate_report::text::printable;

use crate::status::Status;

/// Lines of the journal that are shown.
const JOURNAL_LINES: usize = 200;

/// What only the daemon knows.
pub fn live_of(machine: &LiveMachine<Host>, status: &Status) -> Live {
    let managed = machine.managed();
    let name = |pid: i32| managed.iter().find(|task| task.pid == pid).map_or("", |task| task.name.as_str());
    let thread = |pid: i32, tid: i32| match tid == pid {
        true => format!("{}({pid})", printable(name(pid))),
        false => format!("{}({pid}), thread {tid}", printable(name(pid))),
    };
    let line = |(object, state): (&Object, &State)| JournalLine {
        what: match object {
            Object::Affinity { pid, thread: of } => format!("CPUs of {}", thread(*pid, of.tid)),
            Object::Nice { pid, thread: of } => format!("nice value of {}", thread(*pid, of.tid)),
            Object::Policy { pid, thread: of } => format!("scheduling of {}", thread(*pid, of.tid)),
            Object::Membership { hierarchy, pid, thread: of } => {
                format!("group of {} in {}", thread(*pid, of.tid), hierarchy.display())
            }
            Object::File { path } | Object::Schemata { path } | Object::Directory { path } => {
                path.display().to_string()
            }
        },
        original: match state {
            State::Cpus(cpus) => cpus.to_string(),
            State::Nice(nice) => nice.to_string(),
            State::Policy(policy) => format!("policy {policy}"),
            State::Scheduling(scheduling) => format!("{scheduling:?}"),
            State::Group(path) => path.display().to_string(),
            State::Text(text) => text.trim_end().to_string(),
            State::Absent => "absent".to_string(),
            State::Present => "there".to_string(),
        },
    };
    let running_ns = status.running_ns.max(1);
    Live {
        pids: managed.iter().map(|task| (task.task, task.pid)).collect(),
        journal: machine.originals().iter().take(JOURNAL_LINES).map(line).collect(),
        daemon: DaemonSnapshot {
            acts: status.acts,
            pid: status.pid,
            level: status.level,
            cpu_share: status.cpu_ns as f64 / running_ns as f64,
            config_error: status.config_error.clone(),
        },
    }
}
