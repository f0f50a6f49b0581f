//! Turns of gangs. Before a thread's CPUs or policy are set, its id is checked for reuse.

use std::io;
use std::time::Duration;

use cachemate_core::CpuSet;

use crate::kernel::scheduling::SchedParams;
use crate::kernel::{Kernel, ThreadKey};

/// A schedule with its members as threads, each with its original class.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ThreadRotation {
    /// Unit in which the length of a turn is counted.
    pub slice: Duration,
    /// Members of each gang, and the number of slices in its turn.
    pub gangs: Vec<(Vec<(ThreadKey, SchedParams)>, u32)>,
}

/// Sets a thread's affinity, unless its id has been reused.
///
/// # Errors
/// The thread has exited or its id was reused (`ESRCH`); or the kernel's error.
pub(crate) fn set_affinity_checked(
    kernel: &dyn Kernel,
    thread: ThreadKey,
    cpus: &CpuSet,
) -> io::Result<()> {
    kernel.stat_of(thread)?;
    kernel.set_affinity(thread.tid, cpus)
}

/// Makes a thread wait as an idle task, or restores its original policy.
///
/// # Errors
/// The thread has exited or its id was reused (`ESRCH`); it cannot wait, or has chosen another class meanwhile, and is
/// left unchanged; or the kernel's error.
pub(crate) fn set_turn_policy(
    kernel: &dyn Kernel,
    thread: ThreadKey,
    original: &SchedParams,
    is_waiting: bool,
) -> io::Result<()> {
    kernel.stat_of(thread)?;
    let current_params = kernel.scheduling(thread.tid)?;
    let target_params = if is_waiting {
        original.to_waiting()
    } else {
        *original
    };
    if !original.can_wait()
        || (current_params != *original && current_params != original.to_waiting())
    {
        return Err(io::Error::other(format!(
            "thread {}: {current_params}: left alone",
            thread.tid
        )));
    }
    if current_params == target_params {
        Ok(())
    } else {
        kernel.set_scheduling(thread.tid, &target_params)
    }
}
