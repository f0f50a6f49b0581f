//! `cachemate validate-model`: the accuracy of the interval machine.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context as _;
use cachemate_report::text::{number, or_dash};
use cachemate_report::{Align, Table};
use cachemate_repro::ExperimentContext;
use cachemate_repro::interval::score::{ErrorSummary, ValidationScore, figure, score};
use cachemate_repro::interval::{ValidationTruth, speed, truth};
use cachemate_repro::setup::failed;
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::exit::UsageError;
use crate::files::{refuse_existing, write_file};
use crate::session::Session;

/// A file of `--truth`: measured runs as JSON, some kilobytes each.
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
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate validate-model --json`.
#[derive(Serialize)]
struct Validation {
    seed: u64,
    quick: bool,
    sets: BTreeMap<String, ErrorSummary>,
    /// 64 CPUs, 200 tasks, a phase each ten seconds.
    times_real_time_averaged: f64,
    /// The same with turns of 10 ms one by one.
    times_real_time_explicit: f64,
    /// Averaged turns, a phase each second.
    times_real_time_phase_a_second: f64,
    tasks: BTreeMap<String, Vec<cachemate_repro::interval::score::TaskComparison>>,
}

impl ValidateModel {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if let Some(path) = &self.figure {
            refuse_existing(path, self.force)?;
        }
        if let Some(path) = &self.truth {
            // An existing file is resumed from.
            refuse_existing(path, true)?;
        }
        let stop = session.interrupt_flag();
        let bar = session.progress("validate-model", None);
        let progress = |what: &str| bar.set_message(what.to_string());
        let context = ExperimentContext {
            quick: self.quick,
            progress: &progress,
            ..ExperimentContext::of_seed(self.seed, &stop)
        };
        let known = match self.truth.as_ref().filter(|path| cachemate_files::exists(path)) {
            Some(path) => {
                let text = cachemate_files::read_text_limited(path, MAX_TRUTH_BYTES)
                    .with_context(|| path.display().to_string())?;
                let known: ValidationTruth = serde_json::from_str(&text)
                    .with_context(|| format!("{}: not a file of this command", path.display()))?;
                if known.seed != self.seed {
                    let path = path.display();
                    return Err(UsageError(format!("{path}: found seed {}, expected {}", known.seed, self.seed)).into());
                }
                Some(known)
            }
            None => None,
        };
        let keep = |measured: &ValidationTruth| {
            let Some(path) = &self.truth else { return Ok(()) };
            let text = serde_json::to_string(measured).map_err(failed("the measured runs as JSON"))?;
            cachemate_files::replace(path, text.as_bytes()).map_err(failed(&path.display().to_string()))
        };
        let measured = truth(&context, known, keep)?;
        let scored = score(&measured)?;
        if let Some(path) = &self.figure {
            write_file(path, figure(&scored).svg().as_bytes(), self.force)?;
        }
        let ValidationScore { seed, sets, tasks } = scored;
        let answer = Validation {
            seed,
            quick: measured.quick,
            sets,
            times_real_time_averaged: speed::times_real_time(false, 10.0, 60.0)?,
            times_real_time_explicit: speed::times_real_time(true, 10.0, 10.0)?,
            times_real_time_phase_a_second: speed::times_real_time(false, 1.0, 60.0)?,
            tasks,
        };
        bar.finish_and_clear();
        session.answer(self.json.json, &answer, || render(&answer))
    }
}

fn render(answer: &Validation) -> String {
    let mut table = Table::new(&[
        ("set", Align::Left),
        ("runs", Align::Right),
        ("error, points", Align::Right),
        ("90 %", Align::Right),
        ("of CPI, %", Align::Right),
        ("90 %", Align::Right),
        ("signed", Align::Right),
        ("nothing", Align::Right),
        ("tau", Align::Right),
        ("losing 10 %", Align::Right),
    ]);
    let mut causes = Table::new(&[
        ("set", Align::Left),
        ("profile", Align::Right),
        ("composition", Align::Right),
        ("bandwidth", Align::Right),
        ("overlap", Align::Right),
    ]);
    let or = |value: Option<f64>| or_dash(value.map(number));
    for (name, set) in &answer.sets {
        table.row([
            name.clone(),
            set.count.to_string(),
            or(set.mean_absolute_error_points),
            or(set.p90_error_points),
            or(set.mean_error_percent),
            or(set.p90_error_percent),
            or(set.mean_signed_error_points),
            or(set.error_of_predicting_nothing_points),
            or(set.kendall_tau),
            or(set.runs_losing_10_percent),
        ]);
        if let Some(by_cause) = set.error_by_cause_points {
            let parts = [by_cause.profile, by_cause.composition, by_cause.bandwidth, by_cause.overlap];
            causes.row(std::iter::once(name.clone()).chain(parts.map(number)));
        }
    }
    format!(
        "seed {}{}\n\n{}\nsigned: predicted minus measured. nothing: the error of predicting no slowdown.\n\n\
         errors by cause, points (they may cancel)\n{}\n\
         64 CPUs, 8 caches, 200 tasks: {} times real time with averaged turns and a phase each 10 s, {} with a phase \
         each second, {} with explicit turns\n",
        answer.seed,
        if answer.quick { ", quick" } else { "" },
        table.text(),
        causes.text(),
        number(answer.times_real_time_averaged),
        number(answer.times_real_time_phase_a_second),
        number(answer.times_real_time_explicit),
    )
}
