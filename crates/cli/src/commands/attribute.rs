//! `cachemate attribute`: where a slowdown comes from.

use cachemate_core::nearest;
use cachemate_report::text::number;
use cachemate_report::{Align, Table};
use cachemate_repro::ExperimentContext;
use cachemate_repro::corun::CoRunBench;
use cachemate_repro::decompose::{CoRunnerPlace, Decomposition, decompose};
use cachemate_repro::setup::WorkloadJob;
use cachemate_sim::kernels;
use cachemate_trace::{bundled_recording, bundled_recordings};
use clap::Args;

use crate::args::JsonArg;
use crate::exit::UsageError;
use crate::run_cache::RunCacheArgs;
use crate::session::Session;

/// Tell where the slowdown beside another program comes from: cache space, bus, memory controller, prefetching
///
/// Eight runs on the simulated machine time the same instructions of the victim. The aggressor runs on the same cache,
/// on another cache of the package, in another package, and not at all, each with hardware prefetching and without.
/// What disappears with a step was due to what was shared until then. A program is a simulated program
/// (docs/programs.md), a recording, or the name of a bundled recording.
#[derive(Args)]
pub struct AttributeArgs {
    /// The victim: the program whose slowdown is explained
    #[arg(value_name = "PROGRAM")]
    program: String,
    /// The aggressor: the program beside it
    #[arg(long, value_name = "PROGRAM")]
    with: String,
    /// The machine to run on
    #[arg(long, short, value_name = "MACHINE", default_value = "xeon-x5365")]
    machine: String,
    /// Seed of inputs and frames
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Millions of cycles that are not measured: caches fill
    #[arg(long, default_value_t = 25, value_name = "N", value_parser = clap::value_parser!(u64).range(0..1_000_000))]
    warm_up: u64,
    /// Millions of cycles that are measured: what the program executes in them alone is timed in all runs
    #[arg(long, default_value_t = 15, value_name = "N", value_parser = clap::value_parser!(u64).range(1..1_000_000))]
    cycles: u64,
    #[command(flatten)]
    kept: RunCacheArgs,
    #[command(flatten)]
    json: JsonArg,
}

impl AttributeArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let (program, with) = (job(&self.program, self.seed)?, job(&self.with, self.seed.wrapping_add(50))?);
        self.kept.start();
        let stop = session.interrupt_flag();
        let bar = session.progress("attribute", None);
        bar.set_message("eight runs");
        let context = ExperimentContext::of_seed(self.seed, &stop);
        let bench = CoRunBench::on(&self.machine, self.seed, self.warm_up * 1_000_000, self.cycles * 1_000_000)?;
        let decomposition = decompose(&context, &bench, &program, &with)?;
        bar.finish_and_clear();
        self.kept.end(session);
        session.answer(self.json.json, &decomposition, || words(&decomposition))
    }
}

/// A simulated program by name, a recording's file, or the name of a bundled recording.
fn job(given: &str, seed: u64) -> anyhow::Result<WorkloadJob> {
    let is_kernel = |name: &str| kernels::programs().any(|known| known.name == name);
    if is_kernel(given) {
        return Ok(WorkloadJob::new(given, seed));
    }
    if given.ends_with(".cmt") || given.contains('/') {
        return Ok(WorkloadJob::recorded(given, given.into(), seed));
    }
    match bundled_recording(given) {
        Ok(path) => Ok(WorkloadJob::recorded(given, path, seed)),
        Err(_) => {
            let bundled: Vec<String> = bundled_recordings().into_iter().map(|(name, _)| name).collect();
            let known: Vec<&str> =
                kernels::programs().map(|known| known.name).chain(bundled.iter().map(String::as_str)).collect();
            let meant = nearest(given, known.iter().copied());
            let meant = meant.map_or(String::new(), |meant| format!(" (did you mean '{meant}'?)"));
            Err(UsageError(format!("no program '{given}'; there are {}{meant}", known.join(", "))).into())
        }
    }
}

fn words(found: &Decomposition) -> String {
    let mut parts = Table::new(&[("part", Align::Left), ("of the time alone", Align::Right), ("share", Align::Right)]);
    for part in &found.parts {
        let share = part.share_percent.map_or("–".to_string(), |share| format!("{} %", number(share)));
        parts.row([part.cause.clone(), format!("{} %", number(part.slowdown_percent)), share]);
    }
    let mut runs = Table::new(&[
        ("the other program", Align::Left),
        ("prefetching", Align::Left),
        ("cycles per instruction", Align::Right),
    ]);
    for run in &found.runs {
        let other = match run.co_runner_location {
            CoRunnerPlace::None => "gone",
            CoRunnerPlace::OtherPackage => "in another package",
            CoRunnerPlace::OtherCache => "on another cache of the package",
            CoRunnerPlace::SameCache => "on the same cache",
        };
        let prefetching = if run.prefetching { "on" } else { "off" };
        runs.row([other.to_string(), prefetching.to_string(), format!("{:.3}", run.cycles_per_instr)]);
    }
    let missing = match found.unavailable.as_slice() {
        [] => "",
        _ => "The machine lacks some steps, so some parts are reported together.\n",
    };
    format!(
        "{} beside {} on {}: {} % slower\n\n{}\n{}\n{missing}The memory controller's part is a lower bound, prefetching's an upper one.\n",
        found.victim,
        found.aggressor,
        found.machine,
        number(found.total_slowdown_percent),
        parts.text(),
        runs.text(),
    )
}
