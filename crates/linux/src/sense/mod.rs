//! Measurements of the host: counters, samples, probes, progress, topology. Only probes change the host, and they
//! restore every thread that they move.

pub(crate) mod access_probe;
pub mod births;
pub mod calibration;
pub mod capability_survey;
pub(crate) mod continuity;
pub(crate) mod counter_table;
pub mod counters;
pub mod cpu_load;
pub mod events;
pub(crate) mod group_trust;
pub mod kubelet_cpus;
pub(crate) mod memory_nodes;
pub mod miss_cost;
pub(crate) mod miss_trace;
pub mod pressure;
pub(crate) mod probe_runner;
pub mod probes;
pub(crate) mod process_properties;
pub mod progress;
pub mod rule_matches;
pub mod sampling;
pub mod sched_cache;
pub mod service_directory;
pub mod tasks;
pub(crate) mod thread_counts;
pub mod topology;
