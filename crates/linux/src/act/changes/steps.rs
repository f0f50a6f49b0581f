//! What a change is on this host: objects of the journal, and what they are to become.

use std::io;

use cachemate_core::{Change, ChangeKind, Colors, PageMoving};

use super::reading::{Reading, nice_for};
use crate::act::colors::agents::{mask_of, wanted};
use crate::act::resctrl::Ways;
use crate::kernel::scheduling::EXT;
use crate::kernel::{Kernel, if_there};
use crate::safety::journal::{Object, State};

/// One object that a change concerns.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Step {
    pub object: Object,
    pub state: State,
    /// False = it is only written down: the kernel, or the gangs' runner, makes it so.
    pub write: bool,
}

fn write(object: Object, state: State) -> Step {
    Step { object, state, write: true }
}

fn bad(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// The steps of a change, in order.
///
/// # Errors
/// Something that the steps depend on cannot be read yet, or is not there.
pub(super) fn steps(
    kernel: &dyn Kernel,
    change: &Change,
    reading: &Reading,
    ways: Option<&Ways>,
) -> io::Result<Vec<Step>> {
    let thread = |task| {
        let found = reading.threads.get(&task).copied();
        found.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
    };
    let ways = || ways.ok_or_else(|| bad("no resctrl on this host".to_string()));
    Ok(match &change.kind {
        ChangeKind::Affinity { task, to, .. } => {
            let thread = thread(*task)?;
            vec![write(Object::Affinity { pid: thread.pid, thread: thread.key }, State::Cpus(to.clone()))]
        }
        ChangeKind::Weight { task, to, .. } => {
            let thread = thread(*task)?;
            let nice = State::Nice(nice_for(*to, thread.original_nice));
            vec![write(Object::Nice { pid: thread.pid, thread: thread.key }, nice)]
        }
        ChangeKind::Cpuset { group, to, .. } => {
            let path = reading.group_files.get(group).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            let states_to_come = reading.states_to_come.get(group).into_iter().flatten();
            let step = |want: &crate::act::desired::DesiredState| Step {
                object: want.object.clone(),
                state: want.state.clone(),
                write: false,
            };
            let mut steps: Vec<Step> = states_to_come.map(step).collect();
            steps.push(write(Object::File { path: path.clone() }, State::Text(to.to_string())));
            steps
        }
        ChangeKind::CreateClass { class, masks } => {
            let ways = ways()?;
            let mut steps = vec![write(Object::Directory { path: ways.path(*class) }, State::Present)];
            if !masks.is_empty() {
                steps.push(write(ways.schemata(*class), ways.masks_text(kernel, reading, *class, masks)?));
            }
            steps
        }
        ChangeKind::Schemata { class, to, .. } => {
            let ways = ways()?;
            vec![write(ways.schemata(*class), ways.masks_text(kernel, reading, *class, to)?)]
        }
        ChangeKind::Member { task, to, .. } => {
            let (ways, thread) = (ways()?, thread(*task)?);
            let object = ways.membership(thread.pid, thread.key);
            let state = match to {
                Some(class) => ways.group(*class),
                None => reading.originals.get(&object).cloned().unwrap_or_else(|| State::Group("/".into())),
            };
            vec![write(object, state)]
        }
        ChangeKind::RemoveClass { class, .. } => {
            vec![write(Object::Directory { path: ways()?.path(*class) }, State::Absent)]
        }
        ChangeKind::Colors { process, to, .. } => {
            let path = reading.color_files.get(process).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            vec![write(Object::File { path: path.clone() }, State::Text(wanted_text(to.as_ref())?))]
        }
        ChangeKind::StopGangs { .. } => Vec::new(),
        ChangeKind::StartGangs { schedule } => {
            let members = schedule.gangs.iter().flat_map(|gang| gang.members.iter().map(|(task, _)| *task));
            let known = members.filter_map(|task| reading.threads.get(&task));
            let mut steps = Vec::new();
            for thread in known {
                // Who is gone meanwhile has no turn, and his gang goes on.
                let Some(now) = if_there(kernel.scheduling(thread.key.tid))? else { continue };
                let object = Object::Policy { pid: thread.pid, thread: thread.key };
                if reading.by_scheduler {
                    steps.push(Step { object: object.clone(), state: State::Policy(EXT), write: false });
                }
                steps.push(Step { object, state: now.waiting().into(), write: false });
            }
            steps.sort_by(|a, b| a.object.cmp(&b.object));
            steps.dedup();
            steps
        }
    })
}

/// An agent always has colors of its own: `None` is never read, and so never asked for.
fn wanted_text(colors: Option<&Colors>) -> io::Result<String> {
    let colors = colors.ok_or_else(|| bad("no colors to give back".to_string()))?;
    let mask = mask_of(&colors.allowed);
    let mask = mask.ok_or_else(|| bad(format!("colors {}: none, or more than a mask holds", colors.allowed)))?;
    Ok(wanted(mask, colors.moving != PageMoving::Never))
}
