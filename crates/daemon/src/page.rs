//! Parts of the dashboard that only a running daemon has.

use cachemate_linux::kernel::LinuxHost;
use cachemate_linux::machine::LiveMachine;
use cachemate_linux::safety::journal::{JournalObject, ObjectState};
use cachemate_page::{DaemonSnapshot, DaemonState, JournalLine};
use cachemate_report::text::escape_controls;

use crate::status::DaemonStatus;

/// Maximum number of the journal's lines that the dashboard shows.
const JOURNAL_LINES: usize = 200;

/// The state that only the daemon has.
pub fn daemon_state(machine: &LiveMachine<LinuxHost>, status: &DaemonStatus) -> DaemonState {
    let managed_threads = machine.managed_threads();
    let name_of = |pid: i32| {
        managed_threads
            .iter()
            .find(|task| task.pid == pid)
            .map_or("", |task| task.name.as_str())
    };
    let describe_thread = |pid: i32, tid: i32| match tid == pid {
        true => format!("{}({pid})", escape_controls(name_of(pid))),
        false => format!("{}({pid}), thread {tid}", escape_controls(name_of(pid))),
    };
    let journal_line = |(object, state): (&JournalObject, &ObjectState)| JournalLine {
        object: match object {
            JournalObject::Affinity { pid, thread: of } => {
                format!("CPUs of {}", describe_thread(*pid, of.tid))
            }
            JournalObject::Nice { pid, thread: of } => {
                format!("nice value of {}", describe_thread(*pid, of.tid))
            }
            JournalObject::Policy { pid, thread: of } => {
                format!("scheduling of {}", describe_thread(*pid, of.tid))
            }
            JournalObject::Membership {
                hierarchy,
                pid,
                thread: of,
            } => {
                format!(
                    "group of {} in {}",
                    describe_thread(*pid, of.tid),
                    hierarchy.display()
                )
            }
            JournalObject::File { path }
            | JournalObject::Schemata { path }
            | JournalObject::Directory { path } => path.display().to_string(),
        },
        original: match state {
            ObjectState::Cpus(cpus) => cpus.to_string(),
            ObjectState::Nice(nice) => nice.to_string(),
            ObjectState::Policy(policy) => format!("policy {policy}"),
            ObjectState::Scheduling(scheduling) => format!("{scheduling:?}"),
            ObjectState::Group(path) => path.display().to_string(),
            ObjectState::Text(text) => text.trim_end().to_string(),
            ObjectState::Absent => "absent".to_string(),
            ObjectState::Present => "there".to_string(),
        },
    };
    let running_ns = status.running_ns.max(1);
    DaemonState {
        pids: managed_threads
            .iter()
            .map(|task| (task.task, task.pid))
            .collect(),
        journal: machine
            .originals()
            .iter()
            .take(JOURNAL_LINES)
            .map(journal_line)
            .collect(),
        daemon: DaemonSnapshot {
            acting: status.mode == cachemate_spec::ManageMode::Act,
            pid: status.pid,
            level: status.level,
            cpu_share: status.cpu_ns as f64 / running_ns as f64,
            config_error: status.config_error.clone(),
        },
    }
}
