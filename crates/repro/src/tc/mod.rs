//! TC: thread clustering by data sharing (Tam's thesis, chapter 3).
//!
//! Four programs with clusters of their own (scoreboards, warehouses, two databases, chat rooms), on the paper's machine
//! and on its eight-chip sibling, under four placements: the machine's own scheduler, round robin, manual, and the
//! policy. Placements are compared by remote-cache stalls per instruction and by the programs' own work per cycle, after
//! the same warm-up, in which the policy must find the clusters.

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

use crate::Experiment;

/// All experiments of the paper.
pub(crate) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            ids: &["TC-1", "TC-3", "TC-4"],
            title: "stall breakdown, remote-cache stalls and performance under four placements",
            full_minutes: 5.0,
            run: placements::run,
        },
        Experiment {
            ids: &["TC-4", "TC-EIGHT"],
            title: "performance on eight chips with eight clusters, against two chips",
            full_minutes: 11.0,
            run: more_placements::eight_chips,
        },
        Experiment {
            ids: &["TC-4", "TC-UNEVEN"],
            title: "uneven clusters against a hand placement under the same balance limit",
            full_minutes: 2.0,
            run: more_placements::uneven_clusters,
        },
        Experiment {
            ids: &["TC-2", "TC-PROGRAMS"],
            title: "clusters found against the programs' own partition, with the shMaps",
            full_minutes: 1.0,
            run: clusters::four_programs,
        },
        Experiment {
            ids: &["TC-2", "TC-HARDER"],
            title: "the same with background threads, uneven clusters, another partition midway, and 4 x 16 warehouses",
            full_minutes: 4.0,
            run: clusters::harder_findings,
        },
        Experiment {
            ids: &["TC-2", "TC-VARIANTS"],
            title: "the same clusters by tagged samples, at another time scale, and across two processes",
            full_minutes: 4.0,
            run: variants::run,
        },
        Experiment {
            ids: &["TC-2", "TC-SERVER"],
            title: "clusters of a recorded database server's threads against its two databases",
            full_minutes: 1.0,
            run: recorded::run,
        },
        Experiment {
            ids: &["TC-5"],
            title: "what detection costs, by sampling rate and at the policy's own",
            full_minutes: 2.5,
            run: overhead::run,
        },
        Experiment {
            ids: &["TC-6"],
            title: "the same clusters from shMaps of 128, 256 and 512 entries, and from fewer samples",
            full_minutes: 0.5,
            run: sensitivity::size_findings,
        },
        Experiment {
            ids: &["TC-7"],
            title: "how long a phase of sharing must last for clustering to pay",
            full_minutes: 2.5,
            run: sensitivity::phase_findings,
        },
        Experiment {
            ids: &["TC-CONTROLS"],
            title: "threads that share nothing, or everything, are left alone",
            full_minutes: 1.0,
            run: controls::run,
        },
    ]
}
