//! `cachemate validate`: is the interval machine true?

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context as _;
use cachemate_report::text::{number, or_dash};
use cachemate_report::{Align, Table};
use cachemate_repro::Context;
use cachemate_repro::interval::score::{Score, Set, score};
use cachemate_repro::interval::{Truth, speed, truth};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::session::Session;

/// Hold the interval machine's predictions against the cycle-level machine (docs/interval.md)
///
/// Programs are profiled alone, co-runs and plans are drawn by the seed and run on the cycle-level machine, and the
/// interval machine predicts them from the profiles. Nothing is fitted on a co-run.
#[derive(Args)]
pub struct Validate {
    /// Draws programs, co-runs and plans
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Fewer and shorter runs: minutes instead of hours
    #[arg(long)]
    quick: bool,
    /// Keep what was measured on the cycle-level machine here, and take it from here if the file exists
    #[arg(long, value_name = "FILE")]
    truth: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

/// The command's answer.
#[derive(Serialize)]
struct Answer {
    seed: u64,
    quick: bool,
    sets: BTreeMap<String, Set>,
    times_real_time_averaged: f64,
    times_real_time_explicit: f64,
    tasks: BTreeMap<String, Vec<cachemate_repro::interval::score::Compared>>,
}

impl Validate {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let stop = session.interrupt_flag();
        let bar = session.progress("validate", None);
        let progress = |what: &str| bar.set_message(what.to_string());
        let context = Context {
            quick: self.quick,
            seeds: vec![self.seed],
            stop: &stop,
            mixes: None,
            machine: None,
            progress: &progress,
        };
        let known = self.truth.as_ref().filter(|path| path.exists());
        let measured: Truth = match known {
            Some(path) => {
                let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
                serde_json::from_str(&text)
                    .with_context(|| format!("{}: not a file of this command", path.display()))?
            }
            None => truth(&context)?,
        };
        if let (Some(path), None) = (&self.truth, known) {
            let text = serde_json::to_string(&measured).context("the measured runs as JSON")?;
            std::fs::write(path, text).with_context(|| path.display().to_string())?;
        }
        let Score { seed, sets, tasks } = score(&measured)?;
        let answer = Answer {
            seed,
            quick: measured.quick,
            sets,
            times_real_time_averaged: speed::times_real_time(false, 10.0, 60.0)?,
            times_real_time_explicit: speed::times_real_time(true, 10.0, 10.0)?,
            tasks,
        };
        bar.finish_and_clear();
        session.answer(self.json.json, &answer, || words(&answer))
    }
}

fn words(answer: &Answer) -> String {
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
    for (name, set) in &answer.sets {
        table.row([
            name.clone(),
            set.count.to_string(),
            number(set.mean_absolute_error_points),
            number(set.p90_error_points),
            number(set.mean_error_percent),
            number(set.p90_error_percent),
            number(set.mean_signed_error_points),
            number(set.error_of_predicting_nothing_points),
            or_dash(set.kendall_tau.map(number)),
            number(set.runs_losing_10_percent),
        ]);
    }
    format!(
        "seed {}{}\n\n{}\nsigned: predicted minus measured. nothing: the error of predicting no slowdown.\n\
         64 CPUs, 8 caches, 200 tasks, a phase each 10 s: {} times real time with averaged turns, {} with explicit ones\n",
        answer.seed,
        if answer.quick { ", quick" } else { "" },
        table.text(),
        number(answer.times_real_time_averaged),
        number(answer.times_real_time_explicit),
    )
}
