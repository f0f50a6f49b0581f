//! RM: RapidMRC, miss-rate curves of running programs from short logs, and phases (thesis ch. 5). RM-4 is
//! here as in the thesis, and with the partitions (`cp`) as online choices.

mod accuracy;
mod aggregate;
mod alternating;
mod overhead;
mod phases;
mod remeasure;
mod sensitivity;
mod solo;

use crate::Experiment;

/// All experiments of the paper.
pub(crate) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            ids: &["RM-1"],
            title: "curves from short logs against real curves, all programs",
            full_minutes: 4.0,
            run: accuracy::run,
        },
        Experiment {
            ids: &["RM-2", "RM-3"],
            title: "what log size, warm-up, lost events, associativity, prefetching and issue order do to curves",
            full_minutes: 1.0,
            run: sensitivity::run,
        },
        Experiment {
            ids: &["RM-4"],
            title: "aggregate IPC at splits by curves from logs and by real curves, as in the thesis",
            full_minutes: 6.0,
            run: aggregate::run,
        },
        Experiment {
            ids: &["RM-5"],
            title: "phase boundaries at every size, and what measuring each phase costs",
            full_minutes: 2.5,
            run: phases::run,
        },
    ]
}
