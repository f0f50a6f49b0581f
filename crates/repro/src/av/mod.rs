//! AV: activity vectors, which show the part of a shared cache that each task uses. Do they predict which tasks
//! should run together?

mod bits;
mod mixes;
mod pairs;
mod samples;
mod solo;
mod xeon;

use crate::ExperimentRun;

/// The nine programs of AV's Table 4, by the names of cachemate's kernels (`perlbmk` is `perl`).
const PROGRAMS: [&str; 9] = [
    "gzip", "mcf", "equake", "ammp", "twolf", "mesa", "parser", "perl", "bzip2",
];

const MACHINE: &str = "smt-av";

/// Number of super sets, which the paper does not state. It was chosen before any run: 32 at every level, so that
/// overlaps at different levels have the same unit. A super set has 4 sets in the L1 caches and 32 in the L2.
const SUPER_SETS: u32 = 32;

/// Length of a sample of the simulated runs (AV 2.2, 2.3), before scaling.
const SAMPLE_CYCLES: u64 = 5_000_000;

/// All experiments of the paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("AV-1 AV-7", pairs::run),
    ("AV-3", mixes::run),
    ("AV-4 AV-5 AV-8 AV-9", xeon::run),
    ("AV-2 AV-6", solo::run),
];
