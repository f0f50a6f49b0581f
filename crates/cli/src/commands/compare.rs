//! `cachemate compare`: runs the same programs on a modeled machine under several policies.

use std::path::PathBuf;

use cachemate_report::text::{format_number, value_or_dash};
use cachemate_report::{Align, Table, WhatIfResult};
use cachemate_repro::ExperimentContext;
use cachemate_repro::interval::whatif::{WhatIfQuery, check_policy, run_query};
use cachemate_study::cache_summary;
use clap::Args;

use crate::args::JsonArg;
use crate::exit::{InterruptedError, UsageError};
use crate::files::{refuse_existing, write_file};
use crate::interval_programs::load_jobs;
use crate::prediction::MachineArg;
use crate::run_store::RunStoreArgs;
use crate::session::Session;

/// Compare policies: how these programs would run on a machine for hours under each of them
///
/// A program is a file of phases (TOML or JSON), a profile file, a program of the simulated machine, or a recording. A
/// name with a number runs as many copies (mcf-2006*3). They run on the interval machine, whose
/// accuracy is stated in docs/simulators/interval.md.
#[derive(Args)]
pub struct CompareArgs {
    /// Profiles, programs, recordings; NAME*N = N copies
    #[arg(value_name = "PROFILE", required = true)]
    programs: Vec<String>,
    #[command(flatten)]
    machine: MachineArg,
    /// Policy, with parameters after a colon (TOML); repeated for each policy to compare
    #[arg(long = "policy", short, value_name = "POLICY", required = true)]
    policies: Vec<String>,
    /// Nominal time of the run
    #[arg(long, value_name = "H", default_value_t = 1.0)]
    hours: f64,
    /// Seed for the machine and the policies
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Simulate each time slice of tasks on one CPU, instead of averages
    #[arg(long)]
    explicit: bool,
    /// Run without the guard, which rolls back decisions that slow programs down
    #[arg(long)]
    no_guard: bool,
    /// Stretch the phases of measured programs by this factor
    #[arg(long, value_name = "TIMES", default_value_t = 1000.0)]
    stretch: f64,
    /// Write a page with time series
    #[arg(short, long, value_name = "HTML")]
    output: Option<PathBuf>,
    /// Overwrite the page if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    runs: RunStoreArgs,
    #[command(flatten)]
    json: JsonArg,
}

/// Maximum length of a run: a week. Longer runs are probably typing errors.
const MAX_HOURS: f64 = 168.0;

impl CompareArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if !(self.hours > 0.0 && self.hours <= MAX_HOURS) {
            let text = format!(
                "--hours: found {}, expected more than 0, at most {MAX_HOURS}",
                self.hours
            );
            return Err(UsageError(text).into());
        }
        if !(self.stretch.is_finite() && self.stretch >= 1.0) {
            return Err(UsageError(format!(
                "--stretch: found {}, expected 1 or more",
                self.stretch
            ))
            .into());
        }
        if let Some(path) = &self.output {
            refuse_existing(path, self.force)?;
        }
        let machine = cachemate_spec::load_machine(&self.machine.machine)?;
        // An unknown name is refused before the recordings are timed, which takes seconds.
        for policy in &self.policies {
            check_policy(policy)?;
        }
        self.runs.start()?;
        let stop = session.interrupt_flag();
        let jobs = load_jobs(session, &self.programs, &machine, self.seed, self.stretch)?;
        let query = WhatIfQuery {
            machine: machine.clone(),
            jobs,
            length_ns: (self.hours * 3.6e12) as u64,
            seed: self.seed,
            has_explicit_turns: self.explicit,
            has_guard: !self.no_guard,
        };
        let bar = session.progress_bar("compare", Some(self.policies.len() as u64));
        let context = ExperimentContext::for_seed(self.seed, &stop);
        let mut outcomes = Vec::new();
        for policy in &self.policies {
            bar.set_message(policy.clone());
            let policy_outcome = run_query(&context, &query, policy)?;
            let complete = policy_outcome.complete;
            outcomes.push(policy_outcome);
            bar.inc(1);
            if !complete {
                break;
            }
        }
        bar.finish_and_clear();
        let complete = outcomes.len() == self.policies.len()
            && outcomes.iter().all(|outcome| outcome.complete);
        let comparison = WhatIfResult {
            machine: machine.name.clone(),
            cache: cache_summary(&machine),
            hours: self.hours,
            seed: self.seed,
            policies: outcomes,
        };
        if let Some(path) = &self.output {
            let title = format!("Comparison of {}", self.policies.join(", "));
            write_file(path, comparison.render_html(&title).as_bytes(), self.force)?;
        }
        session.print_result(self.json.json, &comparison, || {
            render(&comparison, self.output.as_ref())
        })?;
        if !complete {
            return Err(InterruptedError(
                "the results cover the part before the interruption".to_string(),
            )
            .into());
        }
        Ok(())
    }
}

fn render(outcomes: &WhatIfResult, page: Option<&PathBuf>) -> String {
    let mut policy_table = Table::with_columns(
        "policy",
        "mean slowdown | worst | weighted speed-up | 10^9 instr./s | GB/s | changes/h | overhead, s | windows",
    );
    for outcome in &outcomes.policies {
        policy_table.add_row([
            outcome.policy.clone(),
            value_or_dash(outcome.mean_slowdown.map(format_number)),
            value_or_dash(outcome.worst_slowdown.map(format_number)),
            value_or_dash(outcome.weighted_speedup.map(format_number)),
            format_number(outcome.instructions_per_second / 1e9),
            format_number(outcome.memory_bytes_per_second / 1e9),
            format_number(outcome.changes_per_hour),
            format_number(outcome.overhead_seconds),
            outcome.windows.to_string(),
        ]);
    }
    let mut header = vec![("slowdown of", Align::Left)];
    header.extend(
        outcomes
            .policies
            .iter()
            .map(|outcome| (outcome.policy.as_str(), Align::Right)),
    );
    let mut program_table = Table::new(&header);
    let program_count = outcomes
        .policies
        .first()
        .map_or(0, |outcome| outcome.programs.len());
    for index in 0..program_count {
        let name = outcomes
            .policies
            .first()
            .map_or_else(String::new, |outcome| outcome.programs[index].name.clone());
        let cells = outcomes
            .policies
            .iter()
            .map(|outcome| value_or_dash(outcome.programs[index].slowdown.map(format_number)));
        program_table.add_row(std::iter::once(name).chain(cells));
    }
    let written_note = page.map_or(String::new(), |path| {
        format!("\nwrote {}\n", path.display())
    });
    format!(
        "{}: {} h of nominal time, seed {}, {} programs\n\n{}\n{}{written_note}",
        outcomes.machine,
        format_number(outcomes.hours),
        outcomes.seed,
        program_count,
        policy_table.text(),
        program_table.text()
    )
}
