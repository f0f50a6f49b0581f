//! One file per group of comparisons. A new group: one file, and a line in [`GROUPS`].

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

use crate::harness::Row;
use crate::traces::Kind;

/// What the command line asks for.
pub struct Options {
    pub accesses: usize,
    pub rounds: usize,
    pub traces: Vec<Kind>,
}

pub struct Group {
    pub name: &'static str,
    pub about: &'static str,
    pub run: fn(&Options) -> Vec<Row>,
}

pub const GROUPS: &[Group] = &[
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
