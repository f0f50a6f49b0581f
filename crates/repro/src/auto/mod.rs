//! `AUTO`: compares the integrated policy with every baseline, on mixes for which no policy was tuned.
//!
//! Problem: a policy that chooses among mechanisms has to match the best of them on every kind of mix, and must never
//! be slower than the default. Method: mixes are drawn by family from seeds ([`draw`]) and run on the interval machine
//! in nominal time ([`run`]) under the default, under single mechanisms, and under `auto`. Runs are measured from the
//! arrival of each program, so the time in which a policy learns counts. The best single mechanism of a mix is chosen
//! on one machine seed and scored on others. Properties: the same seed and machine give the same numbers; all mixes
//! count; bounds are one-sided 95 % bounds by bootstrap over mixes ([`bounds`]).

mod ablation;
mod bounds;
pub mod draw;
mod families;
mod recorded;
mod results;
mod run;

use crate::ExperimentRun;

pub use draw::MixFamily;
pub(crate) use families::RIVALS;

/// Machines of the development mixes: one without way masks and with few caches, one with many small caches behind
/// one bus, and one with way masks and large caches.
pub const MACHINES: [&str; 3] = [
    "opteron-2350",
    "xeon-x5365",
    "epyc-7742?cores_per_package=8&contexts_per_core=1",
];

/// Experiments that are not from a paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("AUTO", results::run),
    ("AUTO-ABLATION", ablation::run),
    ("AUTO-RECORDED", recorded::run),
];
