//! The groups of comparisons, one file per group. A new group needs a file, and a line in [`GROUPS`].

mod cachesim;
mod clusters;
mod curve;
mod machine;
mod policies;
mod programs;
mod sampled;
mod sizing;
mod solvers;
mod sparse;
mod stack;
mod threads;
mod trace;

use crate::harness::ResultRow;
use crate::traces::TraceKind;
use cachemate_core::MachineSpec;

/// Options of the command line.
pub struct Options {
    pub accesses: usize,
    pub rounds: usize,
    pub traces: Vec<TraceKind>,
}

/// # Panics
/// There is no machine of this name.
fn shipped_machine(name: &str) -> MachineSpec {
    cachemate_spec::load_machine(name).expect("a shipped machine")
}

pub struct BenchGroup {
    pub name: &'static str,
    pub about: &'static str,
    pub run: fn(&Options) -> Vec<ResultRow>,
}

pub const GROUPS: &[BenchGroup] = &[
    stack::GROUP,
    sparse::GROUP,
    threads::GROUP,
    sampled::GROUP,
    cachesim::GROUP,
    trace::GROUP,
    machine::GROUP,
    policies::GROUP,
    curve::GROUP,
    sizing::GROUP,
    programs::GROUP,
    solvers::GROUP,
    clusters::GROUP,
];
