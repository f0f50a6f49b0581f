//! `cachemate validate-model`: measures the accuracy of the interval machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, bail, ensure};
use cachemate_report::Table;
use cachemate_report::text::{format_number, value_or_dash};
use cachemate_repro::ExperimentContext;
use cachemate_repro::interval::offline::{OfflineScore, score_offline};
use cachemate_repro::interval::score::{ErrorSummary, ValidationScore, score, score_chart};
use cachemate_repro::interval::{ValidationTruth, measure_truth, speed};
use cachemate_repro::setup::failed;
use cachemate_trace::{CmtReader, TraceReader, bundled_recordings};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::exit::UsageError;
use crate::files::{refuse_existing, write_file};
use crate::run_store::RunStoreArgs;
use crate::session::Session;
use crate::traces::recording_path;

/// Maximum size of the file of `--truth`, which contains measured runs as JSON of a few kilobytes each.
const MAX_TRUTH_BYTES: u64 = 1 << 30;

/// Compare the interval machine's predictions with the cycle-level machine (docs/simulators/interval.md)
///
/// Programs are profiled alone. Co-runs and plans are drawn at random from the seed and run on the cycle-level machine;
/// the interval machine predicts them from the profiles. No parameter is fitted to a co-run.
#[derive(Args)]
pub struct ValidateModel {
    /// Seed for the choice of programs, co-runs and plans
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Fewer and shorter runs: minutes instead of hours
    #[arg(long)]
    quick: bool,
    /// Store the measurements of the cycle-level machine in this file, and resume from it if it exists
    #[arg(long, value_name = "FILE")]
    truth: Option<PathBuf>,
    /// Draw predicted over measured slowdowns as SVG
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
    /// Overwrite the figure if it exists
    #[arg(long)]
    force: bool,
    /// Instead, compare the forecasts that `predict` makes from the given recordings, or from all bundled ones
    #[arg(long, conflicts_with_all = ["truth", "figure"])]
    offline: bool,
    /// Recordings for --offline: files or names of bundled recordings [default: all bundled ones]
    #[arg(value_name = "RECORDING", requires = "offline")]
    recordings: Vec<String>,
    #[command(flatten)]
    runs: RunStoreArgs,
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate validate-model --json`.
#[derive(Serialize)]
struct ValidationReport {
    seed: u64,
    quick: bool,
    sets: BTreeMap<String, ErrorSummary>,
    /// Simulated time divided by elapsed time with averaged turns, for 64 CPUs, 200 tasks and a phase every ten
    /// seconds.
    times_real_time_averaged: f64,
    /// The same ratio with turns of 10 ms that are simulated one by one.
    times_real_time_explicit: f64,
    /// The same ratio with averaged turns and a phase every second.
    times_real_time_phase_a_second: f64,
    tasks: BTreeMap<String, Vec<cachemate_repro::interval::score::TaskComparison>>,
}

impl ValidateModel {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if self.offline {
            return self.run_offline(session);
        }
        if let Some(path) = &self.figure {
            refuse_existing(path, self.force)?;
        }
        if let Some(path) = &self.truth {
            // An existing file is allowed, because the command resumes from it.
            refuse_existing(path, true)?;
        }
        self.runs.start()?;
        let interrupt_flag = session.interrupt_flag();
        let bar = session.progress_bar("validate-model", None);
        let report_stage = |stage: &str| bar.set_message(stage.to_string());
        let context = self.build_context(&interrupt_flag, &report_stage);
        let stored_path = self
            .truth
            .as_deref()
            .filter(|path| cachemate_files::path_exists(path));
        let stored_truth = stored_path.map(|path| self.read_truth(path)).transpose()?;
        let write_truth = |truth: &ValidationTruth| {
            let Some(path) = &self.truth else {
                return Ok(());
            };
            let text = serde_json::to_string(truth).map_err(failed("the measured runs as JSON"))?;
            cachemate_files::replace(path, text.as_bytes())
                .map_err(failed(&path.display().to_string()))
        };
        let truth = measure_truth(&context, stored_truth, write_truth)?;
        self.runs.report_reuse(session);
        let validation = score(&truth)?;
        if let Some(path) = &self.figure {
            write_file(path, score_chart(&validation).svg().as_bytes(), self.force)?;
        }
        let ValidationScore { seed, sets, tasks } = validation;
        let report = ValidationReport {
            seed,
            quick: truth.quick,
            sets,
            times_real_time_averaged: speed::times_real_time(false, 10.0, 60.0)?,
            times_real_time_explicit: speed::times_real_time(true, 10.0, 10.0)?,
            times_real_time_phase_a_second: speed::times_real_time(false, 1.0, 60.0)?,
            tasks,
        };
        bar.finish_and_clear();
        session.print_result(self.json.json, &report, || render_report(&report))
    }

    fn build_context<'a>(
        &self,
        stop: &'a AtomicBool,
        progress: &'a (dyn Fn(&str) + Sync),
    ) -> ExperimentContext<'a> {
        ExperimentContext {
            quick: self.quick,
            progress,
            ..ExperimentContext::for_seed(self.seed, stop)
        }
    }

    fn read_truth(&self, path: &Path) -> anyhow::Result<ValidationTruth> {
        let text = cachemate_files::read_text_limited(path, MAX_TRUTH_BYTES);
        let text = text.with_context(|| path.display().to_string())?;
        let truth: ValidationTruth = serde_json::from_str(&text)
            .with_context(|| format!("{}: not a file of this command", path.display()))?;
        if truth.seed != self.seed {
            bail!(UsageError(format!(
                "{}: found seed {}, expected {}",
                path.display(),
                truth.seed,
                self.seed
            )));
        }
        Ok(truth)
    }

    /// Compares forecasts from recordings with the cycle-level machine.
    fn run_offline(&self, session: &Session) -> anyhow::Result<()> {
        let mut recordings = Vec::new();
        if self.recordings.is_empty() {
            // Only a program of one thread can be measured alone.
            for (name, path) in bundled_recordings() {
                if count_threads(&path)? <= 1 {
                    recordings.push((name, path));
                }
            }
        }
        for name in &self.recordings {
            let path = recording_path(name)?;
            let thread_count = count_threads(&path)?;
            ensure!(
                thread_count <= 1,
                "'{name}': found {thread_count} threads, expected one: programs with several threads cannot be measured \
                 alone"
            );
            recordings.push((file_stem(name), path));
        }
        let stop = session.interrupt_flag();
        let bar = session.progress_bar("validate-model", None);
        let report_stage = |stage: &str| bar.set_message(stage.to_string());
        let context = self.build_context(&stop, &report_stage);
        self.runs.start()?;
        let score = score_offline(&context, &recordings)?;
        bar.finish_and_clear();
        self.runs.report_reuse(session);
        session.print_result(self.json.json, &score, || render_offline(&score))
    }
}

/// Returns the number of threads of a recording, from its totals.
fn count_threads(path: &Path) -> anyhow::Result<usize> {
    let reader = CmtReader::open(path)?;
    Ok(reader.totals().map_or(0, |totals| totals.threads.len()))
}

/// Returns the name of a recording's file, without directory and extensions.
fn file_stem(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.split('.').next().unwrap_or(name).to_string()
}

fn render_offline(score: &OfflineScore) -> String {
    let mut table = Table::with_columns("measure", "value | target");
    let mut add_row = |measure: &str, value: String, target: &str| {
        table.add_row([measure.to_string(), value, target.to_string()]);
    };
    add_row(
        "mean absolute error, points",
        format_number(score.mean_absolute_error_points),
        "5",
    );
    add_row(
        "90th percentile, points",
        format_number(score.p90_error_points),
        "12",
    );
    add_row(
        "mean signed error, points",
        format_number(score.mean_signed_error_points),
        "-",
    );
    add_row(
        "error of predicting nothing, points",
        format_number(score.error_of_predicting_nothing_points),
        "-",
    );
    add_row(
        "Kendall's tau",
        value_or_dash(score.kendall_tau.map(format_number)),
        "0.8",
    );
    add_row(
        "90 % intervals that hold the truth, %",
        format_number(score.coverage_percent),
        "85 to 95",
    );
    add_row(
        "error by composition, points",
        format_number(score.error_by_cause_points.composition),
        "-",
    );
    add_row(
        "error by the cost of a miss, points",
        format_number(score.error_by_cause_points.cost),
        "-",
    );
    let mut task_table = Table::with_columns(
        "machine | program | beside",
        "measured, % | forecast, % | 90 % interval",
    );
    for task in &score.tasks {
        task_table.add_row([
            task.machine.clone(),
            task.task.clone(),
            task.beside.join(", "),
            format!("{:.1}", task.measured_slowdown_percent),
            format!("{:.1}", task.predicted_slowdown_percent),
            format!("{:.0} to {:.0}", task.low_percent, task.high_percent),
        ]);
    }
    format!(
        "seed {}{}, {} runs of {} recordings on {}\n\n{}\n{}",
        score.seed,
        if score.quick { ", quick" } else { "" },
        score.runs,
        score.programs.len(),
        score.machines.join(" and "),
        table.text(),
        task_table.text()
    )
}

fn render_report(report: &ValidationReport) -> String {
    let mut table = Table::with_columns(
        "set",
        "runs | error, points | 90 % | of CPI, % | 90 % | signed | nothing | tau | losing 10 %",
    );
    let mut cause_table = Table::with_columns("set", "profile | composition | bandwidth | overlap");
    let number_text = |value: Option<f64>| value_or_dash(value.map(format_number));
    for (name, set) in &report.sets {
        table.add_row([
            name.clone(),
            set.count.to_string(),
            number_text(set.mean_absolute_error_points),
            number_text(set.p90_error_points),
            number_text(set.mean_error_percent),
            number_text(set.p90_error_percent),
            number_text(set.mean_signed_error_points),
            number_text(set.error_of_predicting_nothing_points),
            number_text(set.kendall_tau),
            number_text(set.runs_losing_10_percent),
        ]);
        if let Some(by_cause) = set.error_by_cause_points {
            let cause_errors = [
                by_cause.profile,
                by_cause.composition,
                by_cause.bandwidth,
                by_cause.overlap,
            ];
            cause_table
                .add_row(std::iter::once(name.clone()).chain(cause_errors.map(format_number)));
        }
    }
    format!(
        "seed {}{}\n\n{}\nsigned: predicted minus measured. nothing: the error of predicting no slowdown.\n\n\
         errors by cause, points (they may cancel)\n{}\n\
         64 CPUs, 8 caches, 200 tasks: {} times real time with averaged turns and a phase each 10 s, {} with a phase \
         each second, {} with explicit turns\n",
        report.seed,
        if report.quick { ", quick" } else { "" },
        table.text(),
        cause_table.text(),
        format_number(report.times_real_time_averaged),
        format_number(report.times_real_time_phase_a_second),
        format_number(report.times_real_time_explicit),
    )
}
