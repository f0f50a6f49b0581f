//! `cachemate repro attribute`: attributes a slowdown to its causes.

use cachemate_report::Table;
use cachemate_report::text::format_number;
use cachemate_repro::ExperimentContext;
use cachemate_repro::corun::CoRunBench;
use cachemate_repro::decompose::{CoRunnerPlace, Decomposition, decompose};
use cachemate_repro::setup::WorkloadJob;
use cachemate_scenario::{namesake_note, recording_of_program};
use clap::Args;

use crate::args::JsonArg;
use crate::complete::run_store::RunStoreArgs;
use crate::exit::UsageError;
use crate::session::Session;

/// Attribute a slowdown to its causes: cache space, bus, memory controller, prefetching
///
/// Eight runs on the simulated machine time the same instructions of the victim. The aggressor runs on the same cache,
/// on another cache of the package, in another package, and not at all, each with hardware prefetching and without.
/// Each step removes one shared resource, and the slowdown that disappears is attributed to it. A program is a
/// simulated program (docs/programs.md), a recording, or the name of a bundled recording.
#[derive(Args)]
pub struct AttributeArgs {
    /// The victim: the program whose slowdown is attributed
    #[arg(value_name = "PROGRAM")]
    program: String,
    /// The aggressor: the program that runs with it
    #[arg(long, value_name = "PROGRAM")]
    with: String,
    /// Machine to run on
    #[arg(long, short, value_name = "MACHINE", default_value = "xeon-x5365")]
    machine: String,
    /// Seed for inputs and page frames
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Millions of cycles before the measurement, in which caches fill
    #[arg(long, default_value_t = 25, value_name = "N", value_parser = clap::value_parser!(u64).range(0..1_000_000))]
    warm_up: u64,
    /// Millions of measured cycles: the instructions that the victim alone executes in them are timed in all runs
    #[arg(long, default_value_t = 15, value_name = "N", value_parser = clap::value_parser!(u64).range(1..1_000_000))]
    cycles: u64,
    #[command(flatten)]
    runs: RunStoreArgs,
    #[command(flatten)]
    json: JsonArg,
}

impl AttributeArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        session.limit_calculation();
        let (program, co_runner) = (
            build_job(&self.program, self.seed)?,
            build_job(&self.with, self.seed.wrapping_add(50))?,
        );
        for note in [&self.program, &self.with]
            .into_iter()
            .filter_map(|name| namesake_note(name))
        {
            session.note(&note);
        }
        self.runs.start()?;
        let stop = session.interrupt_flag();
        let bar = session.progress_bar("attribute", None);
        bar.set_message("eight runs");
        let context = ExperimentContext::for_seed(self.seed, &stop);
        let bench = CoRunBench::load(
            &self.machine,
            self.seed,
            self.warm_up * 1_000_000,
            self.cycles * 1_000_000,
        )?;
        let decomposition = decompose(&context, &bench, &program, &co_runner)?;
        bar.finish_and_clear();
        self.runs.report_reuse(session);
        session.print_result(self.json.json, &decomposition, || render(&decomposition))
    }
}

/// `program_name` is a simulated program, a recording's file, or a bundled recording.
fn build_job(program_name: &str, seed: u64) -> anyhow::Result<WorkloadJob> {
    let recording = recording_of_program(program_name).map_err(UsageError)?;
    Ok(match recording {
        None => WorkloadJob::new(program_name, seed),
        Some(path) => WorkloadJob::from_recording(program_name, path, seed),
    })
}

fn render(decomposition: &Decomposition) -> String {
    let mut cause_table = Table::with_columns("cause", "of solo run time | share");
    for part in &decomposition.parts {
        let share = part.share_percent.map_or("–".to_string(), |share| {
            format!("{} %", format_number(share))
        });
        cause_table.add_row([
            part.cause.clone(),
            format!("{} %", format_number(part.slowdown_percent)),
            share,
        ]);
    }
    let mut run_table = Table::with_columns("aggressor | prefetching", "cycles per instruction");
    for run in &decomposition.runs {
        let location_text = match run.co_runner_location {
            CoRunnerPlace::None => "absent",
            CoRunnerPlace::OtherPackage => "in another package",
            CoRunnerPlace::OtherCache => "on another cache of the package",
            CoRunnerPlace::SameCache => "on the same cache",
        };
        let prefetching_text = if run.prefetching { "on" } else { "off" };
        run_table.add_row([
            location_text.to_string(),
            prefetching_text.to_string(),
            format!("{:.3}", run.cycles_per_instr),
        ]);
    }
    let unavailable_note = match decomposition.unavailable.as_slice() {
        [] => "",
        _ => "The machine lacks some of these locations, so some causes are reported together.\n",
    };
    let hiding_note = decomposition.hiding_part().map_or(String::new(), |part| {
        format!(
            "The part of {} is negative: it hides {} points of what the others cost without it. So no part has a share of the \
             whole.\n",
            part.cause,
            format_number(-part.slowdown_percent)
        )
    });
    format!(
        "{} beside {} on {}: {} % slower\n\n{}\n{}\n{unavailable_note}{hiding_note}The memory controller's part is a lower bound, and that of prefetching an upper bound.\n",
        decomposition.victim,
        decomposition.aggressor,
        decomposition.machine,
        format_number(decomposition.total_slowdown_percent),
        cause_table.text(),
        run_table.text(),
    )
}
