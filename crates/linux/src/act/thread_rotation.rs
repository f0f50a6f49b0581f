//! Turns, and a thread's place and turn, set only if it is that thread still: numbers of threads are reused.

use std::io;
use std::time::Duration;

use cachemate_core::CpuSet;

use crate::kernel::scheduling::SchedParams;
use crate::kernel::{Kernel, ThreadKey};

/// One schedule with its members as threads, each with the class that it had before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ThreadRotation {
    /// Turns are so many of these.
    pub slice: Duration,
    /// Members of each gang, and the slices of its turn.
    pub gangs: Vec<(Vec<(ThreadKey, SchedParams)>, u32)>,
}

/// Sets a thread's affinity, if it is that thread still.
///
/// # Errors
/// The thread is gone or its id another's (`ESRCH`); or as the kernel says.
pub(crate) fn set_seat(kernel: &dyn Kernel, thread: ThreadKey, cpus: &CpuSet) -> io::Result<()> {
    if kernel.stat(thread.tid)?.key != thread {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    kernel.set_affinity(thread.tid, cpus)
}

/// Lets a thread wait as an idle task, or gives it back what it had.
///
/// # Errors
/// The thread is gone or its id another's (`ESRCH`); it cannot wait, or chose another class meanwhile: left alone; or as the
/// kernel says.
pub(crate) fn set_turn(kernel: &dyn Kernel, thread: ThreadKey, original: &SchedParams, waits: bool) -> io::Result<()> {
    if kernel.stat(thread.tid)?.key != thread {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    let now = kernel.scheduling(thread.tid)?;
    let wanted = if waits { original.waiting() } else { *original };
    if !original.can_wait() || (now != *original && now != original.waiting()) {
        return Err(io::Error::other(format!("thread {}: {now}: left alone", thread.tid)));
    }
    if now == wanted { Ok(()) } else { kernel.set_scheduling(thread.tid, &wanted) }
}
