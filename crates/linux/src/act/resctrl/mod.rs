//! Cache partitions by way masks, and limits of memory bandwidth (Intel RDT, AMD QoS, Arm MPAM), through the kernel's
//! resctrl file system.
//!
//! Problem: resctrl is shared with other owners, has few classes of service, accepts only some masks, and explains
//! refusals in a separate file; its groups outlive their creator. Method: its facilities are read once ([`find`]); the
//! classes of a list of changes become groups of our own ([`WayController`]), through the one actuator, so that every
//! group, mask and task move is in the restore journal before it is made; the state in force is read back. Properties:
//! groups of other tools and the threads in them are never changed; a plan is applied as far as possible, and the
//! remaining parts are refused with the kernel's message; every change is made under resctrl's lock (flock on its root,
//! as its documentation asks); without resctrl none of this is done, and `doctor` reports the remedy.

mod bandwidth;
pub mod groups;
mod info;
mod masks;
mod monitors;
mod mount;
mod occupancy;
mod ways;

pub use bandwidth::BandwidthResource;
pub(crate) use info::count_text;
pub use info::{IoAlloc, MonitoredEvents, Resctrl, ResctrlCache, find};
pub(crate) use masks::MEMORY_BANDWIDTH;
pub use masks::Schemata;
pub use monitors::{
    CounterAssignment, MonitorGroup, assign_counters, describe_holders, list_monitor_groups,
};
pub(crate) use mount::mount_point;
pub(crate) use occupancy::missing_traffic;
pub use ways::WayController;

#[cfg(test)]
pub(crate) mod fake_tests;
#[cfg(test)]
pub(crate) mod tests;
