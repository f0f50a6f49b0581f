//! A list of changes on this host: the state that is read first, each change as files and system calls, and its
//! execution.
//!
//! [`HostSnapshot`] is the host's state, object by object; `cachemate_core::changes` compares it with the plan.
//! [`Execution`] applies the list: it journals the originals that can be read as one synced batch, then makes each
//! change and reads it back.

mod execution;
mod object_changes;
mod snapshot;

#[cfg(test)]
pub(crate) mod fixture;

#[cfg(test)]
pub(crate) use execution::KernelLender;
pub(crate) use execution::{ApplyContext, Execution, GangController, build_rotation};
pub(crate) use snapshot::{AppliedHistory, HostSnapshot, pid_of_color_file, plan_item};
