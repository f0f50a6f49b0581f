//! Decisions about shared caches: schemes that predict mutual slowdowns, solvers that turn the slowdowns into an
//! assignment, and policies that decide in every window.
//!
//! The whole crate is pure: no I/O, no clock, seeded generators only; the same input gives the same bits.
//! - [`schemes`]: from profiles to mutual slowdowns, or to weights for a matching.
//! - [`solvers`]: from slowdowns and CPUs to the best, worst and random assignment.
//! - [`placement`]: schemes and solvers combined on a machine's topology, with the reasons as text.
//! - [`partition`]: units of a cache, the programs' demand for them, and their allocation.
//! - [`clustering`]: threads that share data, and the chip of each cluster.
//! - [`work_metric`]: speed of a task by reported work, instructions or a proxy.
//! - [`solo_speeds`]: slowdowns relative to the solo speed.
//! - [`service_losses`]: which services slow each other down.
//! - [`verifier`]: measures the effect of plan changes, and rolls back those that made programs slower.
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
mod parameters;
pub mod partition;
pub mod placement;
pub mod policies;
mod reasons;
pub mod reference_predictor;
pub mod schemes;
mod sequential_test;
pub mod service_losses;
pub mod solo_speeds;
pub mod solvers;
pub mod verifier;
pub mod work_metric;
