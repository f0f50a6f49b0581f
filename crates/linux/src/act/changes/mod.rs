//! A list of changes on this host: the state that is read first, each change as files and system calls, and its
//! execution.
//!
//! [`HostSnapshot`] is the host's state, thing by thing; `cachemate_core::changes` compares it with the plan. [`Execution`]
//! makes the list: originals first, as one synced batch of the journal as far as they can be read, then each change, read
//! back.

mod execution;
mod object_changes;
mod snapshot;

#[cfg(test)]
pub(crate) mod fixture;

#[cfg(test)]
pub(crate) use execution::KernelLender;
pub(crate) use execution::{ApplyContext, Execution, GangController, rotation};
pub(crate) use snapshot::{AppliedHistory, HostSnapshot, color_pid, item_of};
