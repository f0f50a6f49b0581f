//! The papers' experiments on the simulated machine, one file per paper.
//!
//! A published gain depends on a machine, on programs and on a baseline that cannot be had any
//! more, and a reproduction that picks its target after seeing its result proves nothing. So
//! `experiments.toml` and `results.toml` declare each experiment and each result with the paper's
//! sentence, the target and its unit, before anything is run; the code measures, and the verdict
//! follows.
//!
//! For example, CASC-2 states "at least 28 %" at the worst cache size. Three seeds give 31 ± 6 %,
//! and because the mean minus one standard error is below 28, the verdict is `missed`, although the
//! mean is above the target.
//!
//! `cachemate repro ID...` runs experiments by the ids of `docs/results/index.md`. A new experiment
//! needs one line in the file of its paper, its declaration in `experiments.toml`, and those of its
//! results in `results.toml`.
//!
//! # Invariants
//! - A verdict follows from the declared target and the measured values alone.
//! - Runs that are compared execute the same instructions of each program.
//! - The [`store`] changes no digit, and a killed process leaves no wrong entry.
//! - A value that no seed gave is a missed result, not a missing one.
#![warn(missing_docs)]

mod auto;
mod av;
mod bs;
mod ca;
mod casc;
pub mod confidence;
pub mod corun;
mod cp;
mod declarations;
pub mod decompose;
mod encoding;
mod error;
mod experiment;
mod index;
pub mod interval;
mod niagara;
mod phased_profile;
mod promises;
mod rates;
pub mod recordings;
mod rm;
pub mod run_request;
mod seeded_runs;
pub mod setup;
mod solo;
mod sources;
mod statistics;
mod steered;
pub mod store;
mod tc;
mod work;
mod workload;

pub use error::{ReproError, Result};
pub use experiment::*;
pub use index::index_html;
pub use statistics::mean;
pub(crate) use statistics::{greatest, least};

use cachemate_trace::{TraceError, unknown_name_error};

/// Experiments in the order of the papers.
pub fn experiments() -> Vec<Experiment> {
    let papers = [
        bs::EXPERIMENTS,
        casc::EXPERIMENTS,
        av::EXPERIMENTS,
        ca::EXPERIMENTS,
        tc::EXPERIMENTS,
        cp::EXPERIMENTS,
        rm::EXPERIMENTS,
        auto::EXPERIMENTS,
        interval::EXPERIMENTS,
        promises::EXPERIMENTS,
    ];
    papers
        .into_iter()
        .flatten()
        .map(|&(ids, run)| Experiment::declared(ids, run))
        .collect()
}

/// Selects the experiments that answer the requested ids (`all` for every one), each once, in the order of the
/// papers.
///
/// # Errors
/// No experiment answers an id; the error has the first such id, the nearest one, and all known ids.
pub fn select_experiments(ids: &[String]) -> Result<Vec<Experiment>, TraceError> {
    let all_experiments = experiments();
    let mut known_ids: Vec<&str> = Vec::new();
    for &id in all_experiments
        .iter()
        .flat_map(|experiment| &experiment.ids)
    {
        // Several experiments may share an id.
        if !known_ids.contains(&id) {
            known_ids.push(id);
        }
    }

    let requested_ids: Vec<String> = ids.iter().map(|id| id.to_ascii_uppercase()).collect();
    if let Some(unknown) = requested_ids
        .iter()
        .find(|id| *id != "ALL" && !known_ids.contains(&id.as_str()))
    {
        return Err(unknown_name_error(
            "experiment",
            unknown,
            known_ids.iter().map(|id| id.to_string()),
        ));
    }

    let is_requested = |experiment: &Experiment| {
        let is_selected_by_all =
            requested_ids.iter().any(|id| id == "ALL") && !experiment.is_from_no_paper();
        is_selected_by_all
            || requested_ids
                .iter()
                .any(|id| experiment.ids.contains(&id.as_str()))
    };
    Ok(all_experiments.into_iter().filter(is_requested).collect())
}
