//! Cache partitions by way masks (Intel CAT, AMD QoS, Arm MPAM) through the kernel's resctrl file system.
//!
//! Problem: resctrl is shared with other owners, has few classes of service, takes only some masks and tells why it
//! refuses in a file of its own; what is made there outlives its maker. Method: what it offers is read once ([`find`]);
//! the classes of a list of changes become groups of our own ([`WayController`]), through the one actuator,
//! so that every group, mask and task move is in the restore journal before it is made; what holds is read back.
//! Properties: groups of others are never touched, nor threads that are in them; a plan is carried out as far as it goes
//! and each part that is not is refused with the kernel's words; every change is made under resctrl's lock (flock on its
//! root, as its documentation asks); without resctrl nothing of this is done and `doctor` says what would help.

pub mod groups;
mod info;
mod masks;
mod mount;
mod occupancy;
mod ways;

pub use info::{MonitoredEvents, Resctrl, ResctrlCache, find};
pub use masks::Schemata;
pub use mount::ResctrlUnavailable;
pub(crate) use mount::mounted;
pub use ways::WayController;

#[cfg(test)]
pub(crate) mod fake_tests;
#[cfg(test)]
mod tests;
