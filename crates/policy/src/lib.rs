//! Who shares a cache with whom: classification schemes that say who hurts whom, solvers that turn that into an
//! assignment, and policies that decide window by window.
//!
//! Everything here is pure: no I/O, no clock, seeded generators only; the same input gives the same bits.
//! - [`schemes`]: profiles to mutual degradations, or to a weight that a matching can use.
//! - [`solvers`]: degradations and seats to the best, worst and random assignment.
//! - [`placement`]: both together on a machine's topology, with the reasons in plain words.
//! - [`partition`]: units of a cache, what a program does with them, and who gets which.
//! - [`clustering`]: threads that share data, and which chip they go to.
//! - [`work_metric`]: how fast a task goes, by what it reports or by what stands in for that.
//! - [`rollback_guard`]: takes back what made programs slower.
//! - [`policies`]: one file per policy, and the registry by name.

#![warn(missing_docs)]

mod cache_reload_cost;
pub mod clustering;
pub mod conformance;
mod coschedule;
mod gang_quantum;
mod intensity_balancing;
mod llc_placement;
mod load_balance;
pub mod matrix;
pub mod measured_matrix;
pub mod partition;
mod phase_curves;
pub mod placement;
pub mod policies;
mod reasons;
pub mod reference_predictor;
pub mod rollback_guard;
pub mod schemes;
mod sequential_test;
pub mod solvers;
pub mod work_metric;
