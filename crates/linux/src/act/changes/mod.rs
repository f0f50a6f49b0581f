//! A list of changes on this host: what is read before, what each change is in files and calls, and how the list is made.
//!
//! [`Reading`] is the host's state, thing by thing; `cachemate_core::changes` compares it with the plan. [`Execution`] makes
//! the list: originals first, as one synced batch of the journal as far as they can be read, then each change, read back.

mod execution;
mod reading;
mod steps;

#[cfg(test)]
pub(crate) mod bench;

#[cfg(test)]
pub(crate) use execution::Lend;
pub(crate) use execution::{Execution, Gangs, Host, rotation};
pub(crate) use reading::{Before, Reading, color_pid, item_of};
