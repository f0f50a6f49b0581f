//! The types that crates share, and the one loop that connects the stages.
//!
//! The types enforce these rules. Missing evidence is a missing entry or `None`, never zero. The unit stands last in a
//! name. Ids are dense, assigned by the machine in order of arrival and never reused within a run. Every `Vec` of tasks
//! is in order of arrival, and that order, never the id's value, breaks ties.

#![warn(missing_docs)]

mod access;
mod allocation;
mod applied;
mod changes;
mod check;
mod fact;
mod field_error;
mod host_report;
mod ids;
mod machine;
mod machine_event;
mod machine_spec;
mod measured_matrix;
mod observation;
mod pipeline_config;
mod plan;
mod policy;
mod profile;
mod promise;
mod random;
mod run_loop;
mod run_settings;
mod sample_quantiles;
mod service;
mod service_profiles;
mod stream_sample;
mod suggestion;
pub mod test_support;

pub use access::*;
pub use allocation::*;
pub use applied::*;
pub use changes::*;
pub use check::*;
pub use fact::*;
pub use field_error::*;
pub use host_report::*;
pub use ids::*;
pub use machine::*;
pub use machine_event::*;
pub use machine_spec::*;
pub use measured_matrix::*;
pub use observation::*;
pub use pipeline_config::*;
pub use plan::*;
pub use policy::*;
pub use profile::*;
pub use promise::*;
pub use random::*;
pub use run_loop::*;
pub use run_settings::*;
pub use sample_quantiles::*;
pub use service::*;
pub use service_profiles::*;
pub use stream_sample::*;
pub use suggestion::*;

#[cfg(test)]
mod mechanism_tests;
