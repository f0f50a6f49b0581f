//! Changes as steps on this host: objects of the journal and their desired states.

use std::io;

use cachemate_core::{Change, ChangeKind, ColorAssignment, PageMigration};

use super::snapshot::{HostSnapshot, nice_value};
use crate::act::colors::agents::{color_mask, target_text};
use crate::act::desired_state::DesiredState;
use crate::act::resctrl::WayController;
use crate::kernel::scheduling::EXT;
use crate::kernel::{Kernel, none_if_missing};
use crate::safety::journal::{JournalObject, ObjectState};

fn invalid_input(subject: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, subject)
}

/// The steps of a change, in order.
///
/// # Errors
/// An object that the steps depend on cannot be read yet, or does not exist.
pub(super) fn object_changes(
    kernel: &dyn Kernel,
    change: &Change,
    snapshot: &HostSnapshot,
    ways: Option<&WayController>,
) -> io::Result<Vec<DesiredState>> {
    let find_thread = |task| {
        let known_thread = snapshot.threads.get(&task).copied();
        known_thread.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
    };
    let require_ways = || ways.ok_or_else(|| invalid_input("no resctrl on this host".to_string()));
    Ok(match &change.kind {
        ChangeKind::Affinity { task, to, .. } => {
            let thread = find_thread(*task)?;
            vec![DesiredState::written(
                JournalObject::Affinity {
                    pid: thread.pid,
                    thread: thread.key,
                },
                ObjectState::Cpus(to.clone()),
            )]
        }
        ChangeKind::Weight { task, to, .. } => {
            let thread = find_thread(*task)?;
            let nice = ObjectState::Nice(nice_value(*to, thread.original_nice));
            vec![DesiredState::written(
                JournalObject::Nice {
                    pid: thread.pid,
                    thread: thread.key,
                },
                nice,
            )]
        }
        ChangeKind::Cpuset { group, to, .. } => {
            let path = snapshot
                .group_files
                .get(group)
                .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            let pending_states = snapshot.pending_states.get(group).into_iter().flatten();
            let mut steps: Vec<DesiredState> = pending_states.cloned().collect();
            steps.push(DesiredState::written(
                JournalObject::File { path: path.clone() },
                ObjectState::Text(to.to_string()),
            ));
            steps
        }
        ChangeKind::CreateClass { class, limits } => {
            let ways = require_ways()?;
            let mut steps = vec![DesiredState::written(
                JournalObject::Directory {
                    path: ways.group_path(*class),
                },
                ObjectState::Present,
            )];
            if !limits.is_empty() {
                steps.push(DesiredState::written(
                    ways.schemata_object(*class),
                    ways.schemata_state(kernel, snapshot, *class, limits)?,
                ));
            }
            steps
        }
        ChangeKind::Schemata { class, to, .. } => {
            let ways = require_ways()?;
            vec![DesiredState::written(
                ways.schemata_object(*class),
                ways.schemata_state(kernel, snapshot, *class, to)?,
            )]
        }
        ChangeKind::Member { task, to, .. } => {
            let (ways, thread) = (require_ways()?, find_thread(*task)?);
            let object = ways.membership_object(thread.pid, thread.key);
            let state = match to {
                Some(class) => ways.group_state(*class),
                None => snapshot
                    .originals
                    .get(&object)
                    .cloned()
                    .unwrap_or_else(|| ObjectState::Group("/".into())),
            };
            vec![DesiredState::written(object, state)]
        }
        ChangeKind::RemoveClass { class, .. } => {
            vec![DesiredState::written(
                JournalObject::Directory {
                    path: require_ways()?.group_path(*class),
                },
                ObjectState::Absent,
            )]
        }
        ChangeKind::Colors { process, to, .. } => {
            let path = snapshot
                .color_files
                .get(process)
                .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            vec![DesiredState::written(
                JournalObject::File { path: path.clone() },
                ObjectState::Text(target_file_text(to.as_ref())?),
            )]
        }
        ChangeKind::StopGangs { .. } => Vec::new(),
        ChangeKind::StartGangs { schedule } => {
            let members = schedule
                .gangs
                .iter()
                .flat_map(|gang| gang.members.iter().map(|(task, _)| *task));
            let member_threads = members.filter_map(|task| snapshot.threads.get(&task));
            let mut steps = Vec::new();
            for thread in member_threads {
                // A thread that has exited gets no turn; the rest of its gang continues.
                let Some(scheduling) = none_if_missing(kernel.scheduling(thread.key.tid))? else {
                    continue;
                };
                let object = JournalObject::Policy {
                    pid: thread.pid,
                    thread: thread.key,
                };
                if snapshot.has_gang_scheduler {
                    steps.push(DesiredState::journaled(
                        object.clone(),
                        ObjectState::Policy(EXT),
                    ));
                }
                steps.push(DesiredState::journaled(
                    object,
                    scheduling.to_waiting().into(),
                ));
            }
            steps.sort_by(|a, b| a.object.cmp(&b.object));
            steps.dedup();
            steps
        }
    })
}

/// The content of a `wanted` file. An agent always has colors, so `None` is never read and never requested.
fn target_file_text(colors: Option<&ColorAssignment>) -> io::Result<String> {
    let colors = colors.ok_or_else(|| invalid_input("no colors to restore".to_string()))?;
    let mask = color_mask(&colors.allowed);
    let mask = mask.ok_or_else(|| {
        invalid_input(format!(
            "colors {}: none, or more than a mask holds",
            colors.allowed
        ))
    })?;
    Ok(target_text(mask, colors.migration != PageMigration::Never))
}
