//! Computes the cost of the papers' experiments, and of the runs that are missing in a sweep's directory.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cachemate_report::Table;
use cachemate_report::text::format_count_of;
use cachemate_repro::split_runs::RunDivision;
use cachemate_repro::{Experiment, ReproError};
use cachemate_sweep::Store;

use crate::repro_sweep::{ReproRequest, indexed_experiments};

/// Returns the CPU hours of full runs, from measurements on two cores with three seeds.
pub fn processor_hours<'a>(experiments: impl IntoIterator<Item = &'a Experiment>, seeds: usize) -> f64 {
    let minutes: f64 = experiments.into_iter().map(|experiment| experiment.full_minutes).sum();
    2.0 * minutes / 60.0 * seeds as f64 / 3.0
}

/// Renders a line for each experiment, and the cost of the missing runs. Nothing is run.
pub fn render(request: &ReproRequest, experiments: &[Experiment], store: Option<&Store>) -> String {
    let (mut table, mut unfinished_experiments, seeds) =
        (Table::with_columns("ids | what | runs", "hours"), Vec::new(), request.seeds.len());
    let numbered_experiments = indexed_experiments(experiments);
    for (experiment_index, experiment) in &numbered_experiments {
        let runs =
            store.map_or(RunCounts::default(), |store| run_counts(request, store, *experiment_index, experiment));
        let hours = match request.quick {
            true => "not timed".to_string(),
            false => format!("{:.2}", processor_hours([experiment], seeds)),
        };
        table.add_row([experiment.ids.join(", "), experiment.title.to_string(), runs.describe(), hours]);
        if !runs.is_finished {
            unfinished_experiments.push(experiment);
        }
    }
    let (open_count, seeds_text) = (unfinished_experiments.len(), format_count_of(seeds as u64, "seed"));
    let hours = match request.quick {
        true => "minutes in all".to_string(),
        false => format!("at most about {:.1} processor hours", processor_hours(unfinished_experiments, seeds)),
    };
    format!(
        "{}\nleft: {open_count} of {} experiments with {seeds_text}, {hours}\n",
        table.text(),
        numbered_experiments.len()
    )
}

/// Counts of an experiment's runs in a sweep's directory.
#[derive(Default)]
struct RunCounts {
    made_runs: usize,
    /// Missing runs whose inputs exist. Their results may lead to further runs.
    next_runs: usize,
    is_finished: bool,
    /// Error of an experiment that fails before its first run.
    failure: Option<String>,
}

impl RunCounts {
    fn describe(&self) -> String {
        match self {
            RunCounts { failure: Some(reason), .. } => format!("fails: {reason}"),
            RunCounts { made_runs, is_finished: true, .. } => format!("all {made_runs} stored"),
            RunCounts { made_runs: 0, next_runs: 0, .. } => "none stored".to_string(),
            RunCounts { made_runs, next_runs, .. } => format!("{made_runs} stored, {next_runs} next"),
        }
    }
}

/// Counts the runs of an experiment by executing it on stored results only.
fn run_counts(request: &ReproRequest, store: &Store, experiment_index: usize, experiment: &Experiment) -> RunCounts {
    let (find, made_count, stop) =
        (request.stored_lookup(store, experiment_index), AtomicUsize::new(0), AtomicBool::new(false));
    let find_counted = |run: &str| {
        let stored_result = find(run);
        made_count.fetch_add(usize::from(stored_result.is_some()), Ordering::Relaxed);
        stored_result
    };
    let split = RunDivision::list(&find_counted);
    let (is_finished, failure) = match (experiment.run)(&request.build_context(&split, &stop)) {
        Ok(_) => (true, None),
        Err(ReproError::Failed(what, why)) => (false, Some(format!("{what}: {why}"))),
        Err(ReproError::Elsewhere | ReproError::Interrupted) => (false, None),
    };
    RunCounts {
        made_runs: made_count.load(Ordering::Relaxed),
        next_runs: split.missing_runs().len(),
        is_finished,
        failure,
    }
}
