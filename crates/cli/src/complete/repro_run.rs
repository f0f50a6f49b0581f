//! `cachemate repro plan` and `cachemate repro run`: the cost of results, and results with as many seeds as they need.

use std::sync::atomic::{AtomicBool, Ordering};

use cachemate_report::Table;
use cachemate_report::text::{format_count_of, format_fixed, format_number};
use cachemate_repro::confidence::{MAX_SEEDS, MIN_SEEDS};
use cachemate_repro::store::{self, ExperimentCost, StoreMode};
use cachemate_repro::{
    Experiment, ExperimentContext, Finding, Findings, ReproError, select_experiments,
};
use clap::Args;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::run_store::{RunStoreArgs, use_store_dir};
use crate::args::JsonArg;
use crate::exit::{InterruptedError, UsageError};
use crate::session::Session;

/// Options that select experiments and their form.
#[derive(Args)]
pub struct FormArgs {
    /// Result ids such as CASC-1, or `all` of the papers
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Smaller runs of everything, minutes in all
    #[arg(long)]
    quick: bool,
    /// Even smaller runs, which show that each mechanism works: seconds for most ids, and no targets
    #[arg(long, conflicts_with = "quick")]
    pub sample: bool,
    /// First seed; the others follow it
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    #[command(flatten)]
    pub json: JsonArg,
}

impl FormArgs {
    /// The form (full, quick or sample) under which costs are stored.
    pub fn form(&self) -> &'static str {
        match (self.quick, self.sample) {
            (_, true) => "sample",
            (true, _) => "quick",
            _ => "full",
        }
    }

    /// The runs are smaller than those to which the targets apply.
    pub fn is_short(&self) -> bool {
        self.quick || self.sample
    }

    /// The named experiments, or all; an error for an unknown id.
    pub fn experiments(&self) -> anyhow::Result<Vec<Experiment>> {
        let all = ["all".to_string()];
        let ids = if self.ids.is_empty() {
            &all[..]
        } else {
            &self.ids
        };
        Ok(select_experiments(ids).map_err(|unknown| UsageError(unknown.to_string()))?)
    }

    pub fn build_context<'a>(
        &self,
        seeds: usize,
        stop: &'a AtomicBool,
        progress: &'a (dyn Fn(&str) + Sync),
    ) -> ExperimentContext<'a> {
        let seeds = (self.seed..self.seed.saturating_add(seeds as u64)).collect();
        ExperimentContext {
            quick: self.is_short(),
            sample: self.sample,
            seeds,
            progress,
            ..ExperimentContext::for_seed(self.seed, stop)
        }
    }

    /// CPU seconds of an experiment that starts from an empty store. This is the last measured value or, for full runs,
    /// the declared one; `None` if neither is known.
    fn estimate_cost(&self, experiment: &Experiment, seeds: usize) -> Option<f64> {
        let measured_cost =
            store::dir().and_then(|dir| dir.latest_cost(&experiment.ids, self.form()));
        let declared_cost =
            || (self.form() == "full").then(|| 3600.0 * processor_hours([experiment], seeds));
        measured_cost
            .map(|cost| cost.cost_of_seeds(seeds))
            .or_else(declared_cost)
    }
}

/// All threads of this process count, ended ones too.
pub fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Meter of the CPU time that an experiment takes.
pub struct CostMeter {
    cpu_seconds: f64,
    reused_cpu_seconds: f64,
}

impl CostMeter {
    pub fn start() -> Self {
        CostMeter {
            cpu_seconds: cpu_seconds(),
            reused_cpu_seconds: store::store_counts().reused_cpu_seconds,
        }
    }

    /// Counted since the start.
    pub fn cpu_seconds(&self) -> f64 {
        cpu_seconds() - self.cpu_seconds
    }

    /// Stores the cost of an experiment that started from an empty store.
    pub fn finish(&self, experiment: &Experiment, form: &str, seeds: usize) {
        let reused_seconds = store::store_counts().reused_cpu_seconds - self.reused_cpu_seconds;
        let cost = ExperimentCost {
            seeds,
            cpu_seconds: self.cpu_seconds() + reused_seconds,
        };
        // If this fails, the next plan shows the declared cost instead.
        let _ = store::dir().map(|dir| dir.write_cost(&experiment.ids, form, cost));
    }
}

/// CPU hours of full runs, from measurements on two cores with three seeds.
pub fn processor_hours<'a>(
    experiments: impl IntoIterator<Item = &'a Experiment>,
    seeds: usize,
) -> f64 {
    let minutes: f64 = experiments
        .into_iter()
        .map(|experiment| experiment.full_minutes)
        .sum();
    2.0 * minutes / 60.0 * seeds as f64 / 3.0
}

/// Show the runs that results need, the stored ones among them, and the cost of the rest; run nothing
#[derive(Args)]
pub struct ReproPlan {
    #[command(flatten)]
    form: FormArgs,
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = MIN_SEEDS, value_parser = parse_seed_count)]
    seeds: usize,
    /// Directory of stored runs [default: in the user's cache]
    #[arg(long, value_name = "DIR")]
    store: Option<std::path::PathBuf>,
}

fn parse_seed_count(text: &str) -> Result<usize, String> {
    let seeds_problem = || format!("found '{text}', expected a number from 1 to 1000");
    text.parse()
        .ok()
        .filter(|count| (1..=1000).contains(count))
        .ok_or_else(seeds_problem)
}

/// `cachemate repro plan --json`.
#[derive(Serialize)]
struct CostPlan {
    seeds: usize,
    form: &'static str,
    experiments: Vec<PlannedExperiment>,
}

/// An experiment, with the part that remains to be run.
#[derive(Serialize)]
struct PlannedExperiment {
    ids: Vec<&'static str>,
    stored_runs: usize,
    /// Runs that are not stored and whose inputs exist; their results may lead to further runs.
    next_runs: usize,
    is_complete: bool,
    stored_cpu_hours: f64,
    /// CPU hours from an empty store; `null` if the cost is neither measured nor declared.
    cpu_hours: Option<f64>,
    /// CPU hours of the part that is not stored.
    left_cpu_hours: Option<f64>,
    error: Option<String>,
}

impl ReproPlan {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        use_store_dir(
            &self
                .store
                .clone()
                .unwrap_or_else(super::run_store::default_dir),
        )?;
        let stop = session.interrupt_flag();
        store::set_mode(StoreMode::Peek);
        let mut experiments = Vec::new();
        for experiment in self.form.experiments()? {
            if stop.load(Ordering::Relaxed) {
                return Err(InterruptedError(format!(
                    "{} experiments were examined",
                    experiments.len()
                ))
                .into());
            }
            experiments.push(self.plan_experiment(&experiment, &stop));
        }
        let plan = CostPlan {
            seeds: self.seeds,
            form: self.form.form(),
            experiments,
        };
        session.print_result(self.form.json.json, &plan, || plan.describe())
    }

    fn plan_experiment(&self, experiment: &Experiment, stop: &AtomicBool) -> PlannedExperiment {
        let counts_before = store::store_counts();
        let outcome = (experiment.run)(&self.form.build_context(self.seeds, stop, &|_| ()));
        let counts_after = store::store_counts();
        let error = match &outcome {
            Ok(_) | Err(ReproError::NotStored | ReproError::Interrupted) => None,
            Err(error) => Some(error.to_string()),
        };
        let stored_hours =
            (counts_after.reused_cpu_seconds - counts_before.reused_cpu_seconds) / 3600.0;
        let hours = self
            .form
            .estimate_cost(experiment, self.seeds)
            .map(|seconds| seconds / 3600.0);
        let is_complete = outcome.is_ok();
        PlannedExperiment {
            ids: experiment.ids.clone(),
            stored_runs: counts_after.reused - counts_before.reused,
            next_runs: counts_after.missing - counts_before.missing,
            is_complete,
            stored_cpu_hours: stored_hours,
            cpu_hours: hours,
            left_cpu_hours: if is_complete {
                Some(0.0)
            } else {
                hours.map(|hours| (hours - stored_hours).max(0.0))
            },
            error,
        }
    }
}

impl CostPlan {
    fn describe(&self) -> String {
        let mut table = Table::with_columns("ids", "stored | next | hours in all | hours left");
        let hours_text = |hours: Option<f64>| {
            hours.map_or("not known".to_string(), |hours| format!("{hours:.3}"))
        };
        for experiment in &self.experiments {
            let ids = match &experiment.error {
                None => experiment.ids.join(", "),
                Some(error) => format!("{} (fails: {error})", experiment.ids.join(", ")),
            };
            let next_text = if experiment.is_complete {
                "complete".to_string()
            } else {
                experiment.next_runs.to_string()
            };
            table.add_row([
                ids,
                experiment.stored_runs.to_string(),
                next_text,
                hours_text(experiment.cpu_hours),
                hours_text(experiment.left_cpu_hours),
            ]);
        }
        let remaining_hours: f64 = self
            .experiments
            .iter()
            .filter_map(|experiment| experiment.left_cpu_hours)
            .sum();
        let unknown_count = self
            .experiments
            .iter()
            .filter(|experiment| experiment.left_cpu_hours.is_none())
            .count();
        let unknown_text = match unknown_count {
            0 => String::new(),
            count => format!(
                ", and {} of unknown cost",
                format_count_of(count as u64, "experiment")
            ),
        };
        let seeds_text = format_count_of(self.seeds as u64, "seed");
        format!(
            "{}\n{} form, {seeds_text}: {} processor hours left{unknown_text}\n",
            table.text(),
            self.form,
            format_fixed(remaining_hours, 2)
        )
    }
}

/// Run results with as many seeds as their targets need
///
/// An experiment runs with two seeds at first, and then with more, until the 95 % interval of each of its results lies
/// on one side of the target.
#[derive(Args)]
pub struct ReproRun {
    #[command(flatten)]
    form: FormArgs,
    /// Number of seeds after which a result is left undecided
    #[arg(long, value_name = "N", default_value_t = MAX_SEEDS, value_parser = parse_seed_count)]
    max_seeds: usize,
    #[command(flatten)]
    store: RunStoreArgs,
}

struct ExperimentProgress {
    experiment: Experiment,
    seeds: usize,
    spent_seconds: f64,
    findings: Vec<Finding>,
    failure: Option<String>,
}

impl ExperimentProgress {
    fn new(experiment: Experiment) -> Self {
        let (findings, failure) = (Vec::new(), None);
        ExperimentProgress {
            experiment,
            seeds: 0,
            spent_seconds: 0.0,
            findings,
            failure,
        }
    }

    /// Number of seeds for the next run; `None` once all results are decided or the limit is reached.
    fn next_seeds(&self, max_seeds: usize) -> Option<usize> {
        if self.failure.is_some() || self.seeds >= max_seeds {
            return None;
        }
        if self.seeds == 0 {
            return Some(MIN_SEEDS.min(max_seeds));
        }
        let open_findings = self
            .findings
            .iter()
            .filter(|finding| finding.is_undecided());
        let next_count = open_findings
            .filter_map(|finding| Some(finding.confidence?.next_seed_count(self.seeds)))
            .max()?;
        Some(next_count.min(max_seeds))
    }
}

/// `cachemate repro run --json`.
#[derive(Serialize)]
struct RunAccount<'a> {
    form: &'static str,
    cpu_hours: f64,
    experiments: Vec<AccountLine<'a>>,
    results: Vec<&'a Finding>,
}

/// Seeds and CPU time of one experiment.
#[derive(Serialize)]
struct AccountLine<'a> {
    ids: &'a [&'static str],
    seeds: usize,
    cpu_hours: f64,
    undecided: usize,
    error: Option<&'a str>,
}

impl ReproRun {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        self.store.start()?;
        let mut experiments: Vec<ExperimentProgress> = self
            .form
            .experiments()?
            .into_iter()
            .map(ExperimentProgress::new)
            .collect();
        let (stop, meter) = (session.interrupt_flag(), CostMeter::start());
        let bar = session.progress_bar("repro", None);
        for progress in &mut experiments {
            while !stop.load(Ordering::Relaxed)
                && let Some(seeds) = progress.next_seeds(self.max_seeds)
            {
                let ids = progress.experiment.ids.join(", ");
                let report_run =
                    |run: &str| bar.set_message(format!("{ids}, {seeds} seeds: {run}"));
                self.run_experiment(progress, seeds, &stop, &report_run);
            }
        }
        bar.finish_and_clear();
        self.store.report_reuse(session);
        let account = self.build_account(&experiments, meter.cpu_seconds());
        session.print_result(self.form.json.json, &account, || account.describe())?;
        if stop.load(Ordering::Relaxed) {
            return Err(InterruptedError("what was measured is stored".to_string()).into());
        }
        let failures: Vec<String> = experiments
            .iter()
            .filter_map(|experiment| experiment.failure.clone())
            .collect();
        anyhow::ensure!(
            failures.is_empty(),
            "experiments failed: {}",
            failures.join("; ")
        );
        Ok(())
    }

    fn run_experiment(
        &self,
        experiment: &mut ExperimentProgress,
        seeds: usize,
        stop: &AtomicBool,
        progress: &(dyn Fn(&str) + Sync),
    ) {
        let meter = CostMeter::start();
        let outcome = (experiment.experiment.run)(&self.form.build_context(seeds, stop, progress));
        experiment.spent_seconds += meter.cpu_seconds();
        match outcome {
            Ok(findings) => {
                // Runs of earlier seeds come from memory, so their cost is that of the first time.
                let known_cost = store::dir()
                    .and_then(|dir| dir.latest_cost(&experiment.experiment.ids, self.form.form()));
                if experiment.seeds == 0 || known_cost.is_none() {
                    meter.finish(&experiment.experiment, self.form.form(), seeds);
                }
                let findings = Findings { results: findings };
                let findings = if self.form.sample {
                    findings.without_targets()
                } else {
                    findings
                };
                (experiment.seeds, experiment.findings) = (seeds, findings.results);
            }
            Err(ReproError::Interrupted) => {}
            Err(error) => {
                experiment.failure =
                    Some(format!("{}: {error}", experiment.experiment.ids.join(", ")))
            }
        }
    }

    fn build_account<'a>(
        &self,
        experiments: &'a [ExperimentProgress],
        spent_seconds: f64,
    ) -> RunAccount<'a> {
        let account_line = |entry: &'a ExperimentProgress| AccountLine {
            ids: &entry.experiment.ids,
            seeds: entry.seeds,
            cpu_hours: entry.spent_seconds / 3600.0,
            undecided: entry
                .findings
                .iter()
                .filter(|finding| finding.is_undecided())
                .count(),
            error: entry.failure.as_deref(),
        };
        RunAccount {
            form: self.form.form(),
            cpu_hours: spent_seconds / 3600.0,
            experiments: experiments.iter().map(account_line).collect(),
            results: experiments
                .iter()
                .flat_map(|entry| &entry.findings)
                .collect(),
        }
    }
}

impl RunAccount<'_> {
    fn describe(&self) -> String {
        let mut result_table =
            Table::from_header("id | result | target | > measured | > 95 % | > seeds | ");
        for finding in &self.results {
            let interval_text = finding.confidence.map_or(String::new(), |interval| {
                format!(
                    "{} to {}",
                    format_number(interval.low),
                    format_number(interval.high)
                )
            });
            let measured_text = finding.measured.map_or("–".to_string(), |value| {
                format!("{} {}", format_number(value), finding.unit)
            });
            let cells = [
                &finding.id,
                &finding.title,
                &finding.target.describe(),
                &measured_text,
                &interval_text,
            ];
            let seeds_text = finding.seeds.len().to_string();
            result_table.add_row(
                cells
                    .into_iter()
                    .cloned()
                    .chain([seeds_text, describe_verdict(finding)]),
            );
        }
        let mut account_table = Table::from_header("ids | > seeds | > processor hours | ");
        for line in &self.experiments {
            let state_text = match (line.error, line.undecided) {
                (Some(error), _) => format!("failed: {error}"),
                (None, 0) => "decided".to_string(),
                (None, undecided) => format!("{undecided} undecided"),
            };
            account_table.add_row([
                line.ids.join(", "),
                line.seeds.to_string(),
                format!("{:.4}", line.cpu_hours),
                state_text,
            ]);
        }
        let verdict_counts = Findings::count_verdicts(self.results.iter().copied());
        let (met, exceeded, missed) = (
            verdict_counts["met"],
            verdict_counts["exceeded"],
            verdict_counts["missed"],
        );
        let hours = self.cpu_hours;
        format!(
            "{}\n{}\n{met} met, {exceeded} exceeded, {missed} missed; {hours:.3} processor hours\n",
            result_table.text(),
            account_table.text()
        )
    }
}

/// For an undecided result, with the number of seeds that would decide it; empty without a verdict.
fn describe_verdict(finding: &Finding) -> String {
    let Some(verdict) = finding.verdict else {
        return String::new();
    };
    if !finding.is_undecided() {
        return verdict.name().to_string();
    }
    match finding
        .confidence
        .and_then(|confidence| confidence.seeds_to_decide)
    {
        Some(seeds) => format!("undecided ({seeds} seeds would decide it)"),
        None => "undecided (the mean is at the target)".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_repro::ResultTarget;

    fn progress_fixture(values: &[f64]) -> ExperimentProgress {
        let experiment = Experiment {
            ids: vec!["X-1"],
            title: "x",
            full_minutes: 1.0,
            run: |_| Err(ReproError::Interrupted),
        };
        let per_seed: Vec<(u64, f64)> = (1..).zip(values.iter().copied()).collect();
        let target = ResultTarget::AtLeast {
            target: 10.0,
            paper_best: None,
        };
        let findings = vec![Finding::new("X-1", "x", "y", "%", target, &per_seed)];
        ExperimentProgress {
            seeds: values.len(),
            findings,
            ..ExperimentProgress::new(experiment)
        }
    }

    /// Does an experiment start with two seeds, continue while it is undecided, and stop at its limit?
    #[test]
    fn seeds_are_added_until_a_result_is_decided() {
        assert_eq!(progress_fixture(&[]).next_seeds(40), Some(2));
        assert_eq!(progress_fixture(&[20.0, 20.5]).next_seeds(40), None);
        assert_eq!(
            progress_fixture(&[9.0, 12.0]).next_seeds(40),
            Some(4),
            "twice as many at most"
        );
        assert_eq!(progress_fixture(&[9.0, 12.0]).next_seeds(3), Some(3));
        assert_eq!(progress_fixture(&[9.0, 12.0]).next_seeds(2), None);
        let open = describe_verdict(&progress_fixture(&[9.0, 12.0]).findings[0]);
        assert!(
            open.starts_with("undecided (") && open.ends_with("seeds would decide it)"),
            "{open}"
        );
        assert_eq!(
            describe_verdict(&progress_fixture(&[20.0, 20.5]).findings[0]),
            "met"
        );
    }
}
