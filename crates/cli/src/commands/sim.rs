//! `cachemate sim`: runs a scenario on the simulated machine.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::Context;
use cachemate_core::{AppliedPlan, Machine, MachineSpec, PipelineConfig, WindowLength};
use cachemate_pipeline::Pipeline;
use cachemate_report::Table;
use cachemate_report::text::{format_count, format_number, format_percent, value_or_dash};
use cachemate_scenario::{build, pipeline_config};
use cachemate_sim::machine::SimMachine;
use cachemate_sim::results::RunResults;
use cachemate_spec::{Scenario, SimModel, load_scenario};
use cachemate_trace::RunLogWriter;
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::exit::{InterruptedError, UsageError};
use crate::job_runner::run_until_stopped;
use crate::session::Session;

/// Run a scenario on the simulated machine (docs/scenarios.md)
///
/// Prints the counts of every task and every cache. The same scenario and seed give bit-identical results on any host.
#[derive(Args)]
pub struct Sim {
    /// The scenario's file
    #[arg(value_name = "SCENARIO")]
    pub(super) scenario: String,
    /// Seed, instead of the scenario's
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Write a run log, which `cachemate replay` reads (compressed if its name ends in .zst)
    #[arg(short, long, value_name = "LOG")]
    pub(super) output: Option<PathBuf>,
    /// Overwrite the run log if it exists
    #[arg(long)]
    pub(super) force: bool,
    #[command(flatten)]
    pub(super) json: JsonArg,
}

/// `cachemate sim --json`; `R` is the type of the machine's results.
#[derive(Serialize)]
pub(super) struct SimJson<R> {
    pub(super) scenario: String,
    pub(super) seed: u64,
    pub(super) policy: String,
    pub(super) windows: u64,
    /// Whether the run completed; if not, the user stopped it, and the counts cover the time before the stop.
    complete: bool,
    pub(super) results: R,
}

/// A simulated machine that the command can run.
pub(super) trait SimulatedMachine: Machine {
    type Results: Serialize;
    /// Sets the length of the window before the policy's first plan.
    fn set_first_window(&mut self, window: WindowLength);
    /// Returns the simulated time that has passed, for the progress bar.
    fn position(&self) -> u64;
    fn results(self) -> Self::Results;
}

impl SimulatedMachine for SimMachine {
    type Results = RunResults;
    fn set_first_window(&mut self, window: WindowLength) {
        SimMachine::set_first_window(self, window);
    }
    fn position(&self) -> u64 {
        self.now_cycles()
    }
    fn results(mut self) -> RunResults {
        SimMachine::collect_results(&mut self)
    }
}

impl Sim {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let (mut scenario, spec) = load_scenario(&self.scenario)?;
        scenario.seed = self.seed.unwrap_or(scenario.seed);
        if scenario.simulator == SimModel::Interval {
            return self.run_interval(session, &scenario, &spec);
        }
        let machine = build(&scenario, &spec).with_context(|| self.scenario.clone())?;
        let config = pipeline_config(&scenario, &spec, &machine);
        let total_cycles = end_cycles(&scenario, &spec);
        let result = run_until_stopped(&machine.stop_flag(), &session.interrupt_flag(), || {
            self.run_to_end(session, &scenario, config, machine, total_cycles, |_| ())
        })?;
        self.print_result(session, &result, render)
    }

    /// Runs a machine to its end under the scenario's policy, and writes the run log.
    pub(super) fn run_to_end<M: SimulatedMachine>(
        &self,
        session: &Session,
        scenario: &Scenario,
        config: PipelineConfig,
        mut machine: M,
        end_position: Option<u64>,
        mut after_window: impl FnMut(&mut M),
    ) -> anyhow::Result<SimJson<M::Results>> {
        let pipeline = Pipeline::build(config).map_err(|error| UsageError(error.to_string()))?;
        for evidence in pipeline.missing_evidence(&machine) {
            session.note(&evidence.to_string());
        }
        let mut log = match &self.output {
            Some(path) => Some(RunLogWriter::create(
                path,
                self.force,
                &pipeline.build_run_header(&machine),
            )?),
            None => None,
        };
        machine.set_first_window(pipeline.config().first_window);
        let bar = session.progress_bar("sim", end_position);
        let interrupt = session.interrupt_flag();
        let (mut window_count, mut failure, mut has_changed) = (0, None, false);
        let machine = pipeline.run(machine, |machine, record| {
            window_count += 1;
            has_changed |= changes_something(&record.observation.applied);
            bar.set_position(machine.position());
            after_window(machine);
            failure = log.as_mut().and_then(|log| log.push(&record).err());
            failure.is_none() && !interrupt.load(Ordering::Relaxed)
        })?;
        bar.finish_and_clear();
        if let Some(failure) = failure {
            return Err(failure.into());
        }
        if let Some(log) = log {
            log.finish()?;
        }
        if !has_changed && scenario.policy.name != "default" && !self.json.json {
            session.warn(&unchanged_message(&scenario.policy.name, window_count));
        }
        Ok(SimJson {
            scenario: scenario.name.clone(),
            seed: scenario.seed,
            policy: scenario.policy.name.clone(),
            windows: window_count,
            complete: !interrupt.load(Ordering::Relaxed),
            results: machine.results(),
        })
    }

    /// Prints the result; an interrupted run ends with exit code 130.
    pub(super) fn print_result<R: Serialize>(
        &self,
        session: &Session,
        result: &SimJson<R>,
        render: impl FnOnce(&SimJson<R>) -> String,
    ) -> anyhow::Result<()> {
        session.print_result(self.json.json, result, || render(result))?;
        if !result.complete {
            return Err(InterruptedError(format!(
                "{} windows were measured before that",
                result.windows
            ))
            .into());
        }
        Ok(())
    }
}

/// Returns whether the plan places, weights, gangs, penalizes or confines any task.
fn changes_something(applied_plan: &AppliedPlan) -> bool {
    !(applied_plan.affinity.is_empty()
        && applied_plan.weights.is_empty()
        && applied_plan.gangs.is_empty()
        && applied_plan.shares.is_empty()
        && applied_plan.penalties.is_empty())
}

/// Warns that the policy had no effect in a run, so that only the machine's own scheduler was measured.
fn unchanged_message(policy: &str, windows: u64) -> String {
    let reason = match windows {
        0..3 => "the run has too few windows; lengthen it or increase the scale",
        _ => "the run log (-o) and 'cachemate dashboard' show the reasons",
    };
    format!("in {windows} windows no plan of '{policy}' changed anything: {reason}")
}

fn end_cycles(scenario: &Scenario, spec: &MachineSpec) -> Option<u64> {
    let length_cycles = |length: cachemate_core::RunLimit| match length {
        cachemate_core::RunLimit::Cycles(cycles) => Some(cycles),
        cachemate_core::RunLimit::Ns(ns) => {
            Some((u128::from(ns) * u128::from(spec.hertz) / 1_000_000_000) as u64)
        }
        _ => None,
    };
    Some(length_cycles(scenario.length)? + scenario.warm_up.map_or(Some(0), length_cycles)?)
}

fn render(result: &SimJson<RunResults>) -> String {
    let results = &result.results;
    let mut text = format!(
        "{}: {} under '{}', seed {}: {} cycles (time scale {}), {} windows, CPUs busy {}\n\n",
        result.scenario,
        results.machine,
        result.policy,
        result.seed,
        format_count(results.elapsed_cycles),
        results.scale,
        result.windows,
        format_percent(results.busy_share, 1),
    );
    text += &tasks_table(results);
    text.push('\n');
    text += &caches_table(results);
    for memory in &results.memory {
        text += &format!(
            "\nmemory node {}: {} bytes a cycle, busy {}\n",
            memory.node,
            format_number(memory.bytes_per_cycle),
            format_percent(memory.busy_share, 1)
        );
    }
    text
}

fn tasks_table(results: &RunResults) -> String {
    let mut table = Table::from_header(
        "> task | program | > time | > instructions | > IPC | > LLC refs | > misses | > cold | > own | \
         > others' | > coherence | > stalls: issue | > caches | > remote | > memory | > queue",
    );
    for task in &results.tasks {
        let last_level = task.levels.last();
        let share_of_misses = |count: u64| {
            let misses = last_level.map_or(0, |level| level.misses);
            value_or_dash((misses > 0).then(|| format_percent(count as f64 / misses as f64, 0)))
        };
        let stall_share = |cycles: f64| {
            value_or_dash((task.cycles > 0).then(|| format_percent(cycles / task.cycles as f64, 0)))
        };
        let stalls = &task.stall_cycles;
        table.add_row([
            task.task.0.to_string(),
            task.name.clone(),
            format_percent(task.run_time_share, 1),
            format_count(task.instructions),
            value_or_dash(task.instructions_per_cycle.map(format_number)),
            value_or_dash(last_level.map(|level| format_count(level.references))),
            value_or_dash(
                last_level
                    .and_then(|level| level.miss_ratio())
                    .map(|ratio| format_percent(ratio, 1)),
            ),
            share_of_misses(last_level.map_or(0, |level| level.cold)),
            share_of_misses(last_level.map_or(0, |level| level.own)),
            share_of_misses(last_level.map_or(0, |level| level.inter_task)),
            share_of_misses(last_level.map_or(0, |level| level.coherence)),
            stall_share(stalls.issue),
            stall_share(stalls.hit.iter().map(|(_, cycles)| cycles).sum()),
            stall_share(stalls.remote_cache),
            stall_share(stalls.local_memory + stalls.remote_memory),
            stall_share(stalls.queue),
        ]);
    }
    table.text()
}

fn caches_table(results: &RunResults) -> String {
    let mut table = Table::from_header(
        "cache | > references | > misses | > others' | > bytes/cycle | most evicted (by > whose)",
    );
    for cache in &results.caches {
        let inter_task_share = (cache.demand.misses > 0)
            .then(|| cache.demand.inter_task as f64 / cache.demand.misses as f64);
        let worst_pair = cache
            .evictions_by_pair
            .iter()
            .filter(|(evictor, victim, _)| evictor != victim)
            .max_by_key(|(_, _, lines)| *lines);
        table.add_row([
            format!("{:?} {}", cache.level, cache.cache.0),
            format_count(cache.demand.references),
            value_or_dash(
                cache
                    .demand
                    .miss_ratio()
                    .map(|ratio| format_percent(ratio, 2)),
            ),
            value_or_dash(inter_task_share.map(|share| format_percent(share, 0))),
            format_number(cache.bytes_per_cycle),
            value_or_dash(worst_pair.map(|(by, victim, lines)| {
                format!("{} > {}: {} lines", by.0, victim.0, format_count(*lines))
            })),
        ]);
    }
    table.text()
}
