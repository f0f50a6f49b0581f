//! Changes of the host (affinities, weights, gangs, cpusets, ways, colors), all recorded in the journal first.

pub mod actuator;
pub(crate) mod boundaries;
pub(crate) mod changes;
pub mod colors;
pub mod cpusets;
pub mod desired_state;
pub mod gang_scheduler;
pub mod gangs;
pub mod group_overrides;
pub mod group_owners;
pub mod resctrl;
pub mod rules;
pub(crate) mod thread_rotation;
