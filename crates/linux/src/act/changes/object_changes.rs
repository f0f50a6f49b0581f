//! Changes as steps on this host: objects of the journal and their desired states.

use std::io;

use cachemate_core::{Change, ChangeKind, ColorAssignment, PageMigration};

use super::snapshot::{HostSnapshot, nice_value};
use crate::act::colors::agents::{color_mask, target_text};
use crate::act::resctrl::WayController;
use crate::kernel::scheduling::EXT;
use crate::kernel::{Kernel, none_if_missing};
use crate::safety::journal::{JournalObject, ObjectState};

/// One object that a change concerns.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct ObjectChange {
    pub object: JournalObject,
    pub state: ObjectState,
    /// False if the object is only journaled here, because the kernel or the gang runner changes it.
    pub must_write: bool,
}

fn object_write(object: JournalObject, state: ObjectState) -> ObjectChange {
    ObjectChange {
        object,
        state,
        must_write: true,
    }
}

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
) -> io::Result<Vec<ObjectChange>> {
    let find_thread = |task| {
        let known_thread = snapshot.threads.get(&task).copied();
        known_thread.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
    };
    let require_ways = || ways.ok_or_else(|| invalid_input("no resctrl on this host".to_string()));
    Ok(match &change.kind {
        ChangeKind::Affinity { task, to, .. } => {
            let thread = find_thread(*task)?;
            vec![object_write(
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
            vec![object_write(
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
            let journal_only_step =
                |desired_state: &crate::act::desired_state::DesiredState| ObjectChange {
                    object: desired_state.object.clone(),
                    state: desired_state.state.clone(),
                    must_write: false,
                };
            let mut steps: Vec<ObjectChange> = pending_states.map(journal_only_step).collect();
            steps.push(object_write(
                JournalObject::File { path: path.clone() },
                ObjectState::Text(to.to_string()),
            ));
            steps
        }
        ChangeKind::CreateClass { class, limits } => {
            let ways = require_ways()?;
            let mut steps = vec![object_write(
                JournalObject::Directory {
                    path: ways.group_path(*class),
                },
                ObjectState::Present,
            )];
            if !limits.is_empty() {
                steps.push(object_write(
                    ways.schemata_object(*class),
                    ways.schemata_state(kernel, snapshot, *class, limits)?,
                ));
            }
            steps
        }
        ChangeKind::Schemata { class, to, .. } => {
            let ways = require_ways()?;
            vec![object_write(
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
            vec![object_write(object, state)]
        }
        ChangeKind::RemoveClass { class, .. } => {
            vec![object_write(
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
            vec![object_write(
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
                    steps.push(ObjectChange {
                        object: object.clone(),
                        state: ObjectState::Policy(EXT),
                        must_write: false,
                    });
                }
                steps.push(ObjectChange {
                    object,
                    state: scheduling.to_waiting().into(),
                    must_write: false,
                });
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
