//! The groups of comparisons, one file per group. A new group needs a file, and a line in [`GROUPS`].

mod cachesim;
mod clusters;
mod curve;
mod machine;
mod older;
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
use std::path::PathBuf;

/// Options of the command line.
pub struct Options {
    pub accesses: usize,
    pub rounds: usize,
    pub traces: Vec<TraceKind>,
    /// An older version of this program, for the group `older`.
    pub older: Option<PathBuf>,
    /// A directory with machine files that replace the built-in ones.
    pub machines: Option<PathBuf>,
}

impl Options {
    /// # Panics
    /// There is no machine of this name.
    pub fn load_machine(&self, name: &str) -> MachineSpec {
        let file = self.machines.as_ref().map(|dir| dir.join(format!("{name}.toml")));
        let name_or_path = file.as_ref().map_or(name.into(), |file| file.to_string_lossy());
        cachemate_spec::load_machine(&name_or_path).expect("a machine's file")
    }
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
    older::GROUP,
    policies::GROUP,
    curve::GROUP,
    sizing::GROUP,
    programs::GROUP,
    solvers::GROUP,
    clusters::GROUP,
];
