//! TC: thread clustering by data sharing (Tam's thesis, chapter 3).
//!
//! Four programs with clusters of their own (scoreboards, warehouses, two databases, chat rooms), on the paper's
//! machine and on its eight-chip sibling, under four placements: the machine's own scheduler, round robin, manual, and
//! the policy. Placements are compared by remote-cache stalls per instruction and by the programs' own work per cycle,
//! after the same warm-up, in which the policy must find the clusters.

mod clusters;
mod controls;
mod figures;
mod insight;
mod more_placements;
mod overhead;
mod placements;
mod recorded;
mod sensitivity;
mod setup;
mod variants;

use crate::ExperimentRun;

/// All experiments of the paper: their ids in `experiments.toml`, and the function that runs them.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[
    ("TC-1 TC-3 TC-4", placements::run),
    ("TC-4 TC-EIGHT", more_placements::eight_chip_findings),
    ("TC-4 TC-UNEVEN", more_placements::uneven_cluster_findings),
    ("TC-2 TC-PROGRAMS", clusters::paper_program_findings),
    ("TC-2 TC-HARDER", clusters::harder_findings),
    ("TC-2 TC-VARIANTS", variants::run),
    ("TC-2 TC-SERVER", recorded::run),
    ("TC-5", overhead::run),
    ("TC-6", sensitivity::size_findings),
    ("TC-7", sensitivity::phase_findings),
    ("TC-CONTROLS", controls::run),
];
