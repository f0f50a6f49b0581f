//! Safety: every change can be undone, and no other process is harmed.

pub mod actuation_lock;
pub mod fence;
pub mod guardian;
pub(crate) mod inheritance;
pub mod journal;
pub(crate) mod limits;
pub mod object_state;
pub mod restore;
