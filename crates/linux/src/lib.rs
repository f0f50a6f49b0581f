//! The live machine. Nothing on the host is changed without the restore journal, and every path lies under an injected
//! root, so that tests run on hand-made trees.

mod access_probe;
pub mod acting;
pub mod actuator;
mod changes;
pub mod colors;
pub mod counters;
pub mod cpusets;
pub mod events;
pub mod fence;
pub mod gangs;
pub mod guardian;
pub mod journal;
pub mod kernel;
pub mod ladder;
mod limits;
pub mod machine;
pub mod miss_cost;
pub mod pressure;
pub mod probes;
mod probing;
pub mod progress;
pub mod resctrl;
pub mod restore;
pub mod rules;
pub mod sampling;
pub mod scheduling;
pub mod tasks;
pub mod topology;

#[cfg(test)]
mod fake_tests;
#[cfg(test)]
mod faults_tests;
#[cfg(test)]
mod not_shown;
