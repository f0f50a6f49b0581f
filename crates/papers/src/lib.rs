//! The policies of the literature and of Linux, with their parts: schemes that predict mutual slowdowns, solvers that
//! find an assignment with a small total slowdown, and policies that decide in every window. The trait of a policy is
//! [`cachemate_core::Policy`]; the default policy and the verifier around every policy are in `cachemate-auto`, which
//! this crate does not know.
//!
//! - [`schemes`]: compute mutual slowdowns, or weights for a matching, from profiles.
//! - [`solvers`]: find the best, worst and random assignments of programs to CPUs.
//! - [`placement`]: applies schemes and solvers to a machine's topology, and states the reasons as text.
//! - [`forecast_placement`]: improves a placement by forecasts of all programs at once.
//! - [`partition`]: units of a cache, the programs' demand for them, and their allocation.
//! - [`clustering`]: groups threads that share data, and assigns each cluster a chip.
//! - [`work_metric`]: measures a task's speed by reported work, instructions or a proxy.
//! - [`solo_speeds`]: estimates slowdowns relative to the solo speed.
//! - [`probe_ledger`]: accounts for what probes cost.
//! - [`gang_quantum`]: bounds the turns of gangs.
//! - [`policies`]: one file per policy, and the registry by name.
//!
//! # Invariants
//! - No I/O, no clock, seeded random numbers: the same input gives the same bits.
//! - A policy returns plans and never acts; without evidence it keeps the plan in force.
//! - Renaming the tasks only renames the plan.

#![warn(missing_docs)]

mod cache_reload_cost;
pub mod clustering;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod coschedule;
pub mod forecast_placement;
pub mod gang_quantum;
mod intensity_balancing;
mod llc_placement;
mod load_balance;
pub mod matrix;
mod parameters;
pub mod partition;
pub mod placement;
pub mod policies;
pub mod probe_ledger;
pub mod reasons;
pub mod reference_predictor;
pub mod schemes;
pub mod solo_speeds;
pub mod solvers;
pub mod work_metric;
