//! Scheduling attributes of a thread, with all parameters of its class.
//!
//! Problem: a thread that waits for its turn is an idle task for a while, and must get exactly its original attributes
//! afterwards. A real-time or deadline thread cannot wait: its class exists because waiting is wrong, and the kernel
//! accepts the class only with its parameters. Method: everything in sched_getattr(2) except the nice value is read;
//! threads that cannot wait are refused; and a thread that has chosen another class meanwhile keeps it.

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

/// `SCHED_OTHER` of sched(7), the default class.
pub const NORMAL: u32 = 0;
/// `SCHED_FIFO`, a real-time class: a thread runs until it blocks.
pub const FIFO: u32 = 1;
/// `SCHED_RR`, a real-time class: threads of equal priority take turns in slices.
pub const RR: u32 = 2;
/// The same as [`NORMAL`], for non-interactive work.
pub const BATCH: u32 = 3;
/// `SCHED_IDLE`: a weight lower than that of any nice value.
pub const IDLE: u32 = 5;
/// A guaranteed run time in each period, with precedence over all other classes.
pub const DEADLINE: u32 = 6;
/// A scheduler that was loaded into the kernel (sched_ext), below all other classes.
pub const EXT: u32 = 7;
/// `SCHED_FLAG_RESET_ON_FORK`; the other flags stored here, reclaim and overrun, belong to the deadline class.
pub const RESET_ON_FORK: u64 = 1;
const STORED_FLAGS: u64 = 7;

/// A class with its parameters; those that the class does not have are 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SchedParams {
    /// `SCHED_*`.
    pub policy: u32,
    /// `SCHED_FLAG_*`.
    #[serde(default)]
    pub flags: u64,
    /// Priority of a real-time thread, 1 to 99.
    #[serde(default)]
    pub priority: u32,
    /// Run time of a deadline thread; the next two fields belong to that class as well.
    #[serde(default)]
    pub runtime_ns: u64,
    /// Time after the period's start by which the run time must be over.
    #[serde(default)]
    pub deadline_ns: u64,
    /// Time between two starts; 0 if equal to the deadline.
    #[serde(default)]
    pub period_ns: u64,
}

impl SchedParams {
    /// A class without parameters or flags.
    pub fn from_policy(policy: u32) -> Self {
        SchedParams {
            policy,
            ..Self::default()
        }
    }

    /// Can it be an idle task for a while? Not if its class precedes the fair class, or another scheduler runs it.
    pub fn can_wait(&self) -> bool {
        matches!(self.policy, NORMAL | BATCH | IDLE)
    }

    /// The parameters of the same thread while it waits.
    #[must_use]
    pub fn to_waiting(&self) -> Self {
        SchedParams {
            policy: IDLE,
            ..*self
        }
    }
}

impl fmt::Display for SchedParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.policy {
            NORMAL => f.write_str("SCHED_OTHER"),
            FIFO => write!(f, "SCHED_FIFO, priority {}", self.priority),
            RR => write!(f, "SCHED_RR, priority {}", self.priority),
            BATCH => f.write_str("SCHED_BATCH"),
            IDLE => f.write_str("SCHED_IDLE"),
            DEADLINE => write!(
                f,
                "SCHED_DEADLINE, {} ns every {} ns",
                self.runtime_ns, self.period_ns
            ),
            EXT => f.write_str("SCHED_EXT"),
            other => write!(f, "scheduling policy {other}"),
        }
    }
}

/// `struct sched_attr` of sched_getattr(2), in its first version.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Reads a thread's parameters by sched_getattr(2).
pub(crate) fn read_params(tid: i32) -> io::Result<SchedParams> {
    let mut attributes = SchedAttr::default();
    // SAFETY: the kernel writes at most the stated size into a structure of that size.
    let status = unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            tid,
            &raw mut attributes,
            size_of::<SchedAttr>() as u32,
            0u32,
        )
    };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    let (flags, priority) = (attributes.flags & STORED_FLAGS, attributes.priority);
    let params = SchedParams {
        flags,
        priority,
        ..SchedParams::from_policy(attributes.policy)
    };
    // In other classes the run time is the slice, which is kept when the class changes.
    if attributes.policy != DEADLINE {
        return Ok(params);
    }
    let (runtime_ns, deadline_ns, period_ns) = (
        attributes.runtime_ns,
        attributes.deadline_ns,
        attributes.period_ns,
    );
    Ok(SchedParams {
        runtime_ns,
        deadline_ns,
        period_ns,
        ..params
    })
}

/// Writes by sched_setscheduler(2), which leaves the nice value unchanged; parameters that it lacks are written by
/// sched_setattr(2).
pub(crate) fn write_params(tid: i32, params: &SchedParams) -> io::Result<()> {
    let status = if params.policy == DEADLINE {
        let attributes = SchedAttr {
            size: size_of::<SchedAttr>() as u32,
            policy: params.policy,
            flags: params.flags,
            runtime_ns: params.runtime_ns,
            deadline_ns: params.deadline_ns,
            period_ns: params.period_ns,
            ..SchedAttr::default()
        };
        // SAFETY: the kernel reads a structure of the size that its first field states.
        unsafe { libc::syscall(libc::SYS_sched_setattr, tid, &raw const attributes, 0u32) }
    } else {
        let reset_flag = if params.flags & RESET_ON_FORK != 0 {
            libc::SCHED_RESET_ON_FORK
        } else {
            0
        };
        let parameters = libc::sched_param {
            sched_priority: params.priority as libc::c_int,
        };
        // SAFETY: the kernel reads one sched_param that lives across the call.
        let return_value = unsafe {
            libc::sched_setscheduler(
                tid,
                params.policy as libc::c_int | reset_flag,
                &raw const parameters,
            )
        };
        libc::c_long::from(return_value)
    };
    if status < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a child of an idle task inherit its class in spite of `SCHED_RESET_ON_FORK`, so that children must be
    /// found?
    #[test]
    fn reset_on_fork_does_not_reset_the_idle_class() {
        use std::os::unix::process::CommandExt;
        let mut command = std::process::Command::new("sleep");
        command.arg("10");
        // SAFETY: system calls only, between fork and exec.
        unsafe {
            command.pre_exec(|| {
                let idle = SchedParams {
                    flags: RESET_ON_FORK,
                    ..SchedParams::from_policy(IDLE)
                };
                write_params(0, &idle)?;
                match libc::fork() {
                    0 => {
                        let is_idle = read_params(0)? == SchedParams::from_policy(IDLE);
                        libc::_exit(if is_idle { 5 } else { 1 });
                    }
                    child => {
                        let mut status = 0;
                        libc::waitpid(child, &raw mut status, 0);
                        libc::_exit(libc::WEXITSTATUS(status));
                    }
                }
            });
        }
        assert_eq!(command.status().unwrap().code(), Some(5));
    }
}
