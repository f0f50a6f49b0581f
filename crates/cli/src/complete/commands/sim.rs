//! `cachemate sim`: runs a scenario on the simulated machine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use cachemate_core::{AppliedPlan, Machine, MachineSpec, PipelineConfig, WindowLength};
use cachemate_interval::{IntervalMachine, IntervalResults};
use cachemate_pipeline::Pipeline;
use cachemate_report::Table;
use cachemate_report::text::{format_count, format_number, format_percent, value_or_dash};
use cachemate_repro::store::{self, RunName};
use cachemate_scenario::{build, interval, pipeline_config};
use cachemate_sim::machine::SimMachine;
use cachemate_sim::results::RunResults;
use cachemate_spec::{Scenario, SimModel, load_varied_scenario};
use cachemate_trace::RunLogWriter;
use clap::Args;
use serde::{Deserialize, Serialize};

use super::sim_interval;
use crate::args::JsonArg;
use crate::complete::run_store::{RunStoreArgs, source_version};
use crate::complete::shards::{ShardArg, compute_all, content_digest, print_shard};
use crate::exit::{InterruptedError, UsageError};
use crate::session::Session;

/// Run scenarios on a simulated machine, under one policy or several (docs/scenarios.md)
///
/// One run prints the counts of every task and every cache. Several runs, which are the combinations of the given
/// scenarios, machines, policies and seeds, print one line each. The same scenario and seed give bit-identical results
/// on any host, so a run is stored and not made twice.
#[derive(Args)]
pub struct Sim {
    /// The scenarios' files; `-` is standard input
    #[arg(value_name = "SCENARIO", required = true)]
    scenarios: Vec<String>,
    /// Machine, instead of the scenario's; repeated for each machine
    #[arg(long, short, value_name = "MACHINE")]
    machine: Vec<String>,
    /// Policy, instead of the scenario's, with parameters after a colon (TOML); repeated for each policy to compare
    #[arg(long, short, value_name = "POLICY")]
    policy: Vec<String>,
    /// Another value for a field of the scenario, by its path, such as programs.0.count=2; repeated
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = parse_change)]
    changes: Vec<(String, toml::Value)>,
    /// First seed, instead of the scenario's
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    seeds: u64,
    /// Write a run log, which `cachemate replay` reads (compressed if its name ends in .zst)
    #[arg(short, long, value_name = "LOG", conflicts_with = "shard")]
    output: Option<PathBuf>,
    /// Overwrite the run log if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    shard: ShardArg,
    #[command(flatten)]
    runs: RunStoreArgs,
    #[command(flatten)]
    json: JsonArg,
}

/// Parses `FIELD=VALUE`; a value that is not TOML is text.
fn parse_change(text: &str) -> Result<(String, toml::Value), String> {
    let (field, value) = text
        .split_once('=')
        .ok_or_else(|| format!("found '{text}', expected FIELD=VALUE"))?;
    let parsed: Option<toml::Table> = format!("value = {value}").parse().ok();
    let parsed = parsed.and_then(|mut table| table.remove("value"));
    Ok((field.to_string(), parsed.unwrap_or(value.into())))
}

/// A scenario with its machine, as one run needs them.
struct SimPoint {
    /// The scenario's file, for messages.
    file: String,
    scenario: Scenario,
    spec: MachineSpec,
}

/// `cachemate sim --json`.
#[derive(Clone, Serialize, Deserialize)]
pub struct SimJson {
    pub scenario: String,
    machine: String,
    pub seed: u64,
    policy: String,
    windows: u64,
    /// Whether the run completed; if not, the user stopped it, and the counts cover the time before the stop.
    complete: bool,
    pub results: MachineResults,
}

/// The results of either machine.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MachineResults {
    Cycle(RunResults),
    Interval(IntervalResults),
}

/// A simulated machine that the command can run.
trait SimulatedMachine: Machine {
    /// Sets the length of the window before the policy's first plan.
    fn set_first_window(&mut self, window: WindowLength);
    /// Simulated time that has passed, for the progress bar.
    fn position(&self) -> u64;
    fn results(self) -> MachineResults;
}

impl SimulatedMachine for IntervalMachine {
    fn set_first_window(&mut self, window: WindowLength) {
        IntervalMachine::set_first_window(self, window);
    }
    fn position(&self) -> u64 {
        self.now_ns()
    }
    fn results(self) -> MachineResults {
        MachineResults::Interval(IntervalMachine::results(&self))
    }
}

impl SimulatedMachine for SimMachine {
    fn set_first_window(&mut self, window: WindowLength) {
        SimMachine::set_first_window(self, window);
    }
    fn position(&self) -> u64 {
        self.now_cycles()
    }
    fn results(mut self) -> MachineResults {
        MachineResults::Cycle(SimMachine::collect_results(&mut self))
    }
}

impl Sim {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let points = self.load_points()?;
        if let (Some(path), [_, _, ..]) = (&self.output, &points[..]) {
            bail!(UsageError(format!(
                "-o {}: found {} runs, expected one: a run log has one run",
                path.display(),
                points.len()
            )));
        }
        self.runs.start()?;
        if let ([point], None) = (&points[..], self.shard.shard) {
            let result = self.run_point(session, point)?;
            return self.print_one(session, &result);
        }
        self.run_many(session, &points)
    }

    /// Every combination of scenario, machine, policy and seed.
    fn load_points(&self) -> anyhow::Result<Vec<SimPoint>> {
        let machine_choices = or_unchanged(self.machine.iter().map(|name| name.clone().into()));
        let mut policies = Vec::new();
        for policy in &self.policy {
            policies.push(policy_value(policy)?);
        }
        let policy_choices = or_unchanged(policies.into_iter());

        let mut points = Vec::new();
        for file in &self.scenarios {
            for machine in &machine_choices {
                for policy in &policy_choices {
                    let mut changes = self.changes.clone();
                    changes.extend(machine.clone().map(|value| ("machine".to_string(), value)));
                    changes.extend(policy.clone().map(|value| ("policy".to_string(), value)));
                    let (scenario, spec) = load_varied_scenario(file, &changes)?;
                    let first = self.seed.unwrap_or(scenario.seed);
                    for seed in first..first.saturating_add(self.seeds) {
                        let scenario = Scenario {
                            seed,
                            ..scenario.clone()
                        };
                        points.push(SimPoint {
                            file: file.clone(),
                            scenario,
                            spec: spec.clone(),
                        });
                    }
                }
            }
        }
        Ok(points)
    }

    fn run_many(&self, session: &Session, points: &[SimPoint]) -> anyhow::Result<()> {
        let owned = self.shard.select(points);
        let stop = session.interrupt_flag();
        let bar = session.progress_bar("sim", Some(owned.len() as u64));
        let silent = session.silent();
        let outcomes = compute_all(&owned, &|| stop.load(Ordering::Relaxed), |point| {
            let outcome = self.run_point(&silent, point);
            bar.inc(1);
            outcome
        });
        bar.finish_and_clear();

        let (mut runs, mut failures) = (Vec::new(), Vec::new());
        for (outcome, point) in outcomes.into_iter().zip(&owned) {
            match outcome {
                Some(Ok(result)) if result.complete => runs.push(result),
                Some(Ok(_)) | None => {}
                Some(Err(error)) if error.is::<InterruptedError>() => {}
                Some(Err(error)) => failures.push(format!("{}: {error:#}", point.file)),
            }
        }
        if stop.load(Ordering::Relaxed) {
            let note = format!("{} of {} runs are stored", runs.len(), owned.len());
            return Err(InterruptedError(note).into());
        }
        if let Some(shard) = self.shard.shard {
            return print_shard(session, self.json.json, shard, runs.len(), failures);
        }
        self.runs.report_reuse(session);
        let result = BTreeMap::from([("runs", &runs)]);
        session.print_result(self.json.json, &result, || runs_table(&runs))?;
        ensure!(failures.is_empty(), "runs failed: {}", failures.join("; "));
        Ok(())
    }

    /// Makes a run, or takes it from the store. With a run log it is made in any case, because the store keeps no
    /// windows.
    fn run_point(&self, session: &Session, point: &SimPoint) -> anyhow::Result<SimJson> {
        let make = || match point.scenario.simulator {
            SimModel::Cycle => self.run_cycle(session, point),
            SimModel::Interval => self.run_interval(session, point),
        };
        if self.output.is_some() {
            return make();
        }
        let mut incomplete = None;
        let outcome = store::find_or_make(run_name(point)?, || {
            let result = make()?;
            if result.complete {
                return Ok(result);
            }
            let error = interruption(&result);
            incomplete = Some(result);
            Err(anyhow::Error::from(error))
        });
        match incomplete {
            Some(result) => Ok(result),
            None => outcome,
        }
    }

    fn run_cycle(&self, session: &Session, point: &SimPoint) -> anyhow::Result<SimJson> {
        let SimPoint { scenario, spec, .. } = point;
        let machine = build(scenario, spec).with_context(|| point.file.clone())?;
        let config = pipeline_config(scenario, spec, &machine);
        let total_cycles = end_cycles(scenario, spec);
        run_until_stopped(&machine.stop_flag(), &session.interrupt_flag(), || {
            self.run_to_end(session, point, config, machine, total_cycles, |_| ())
        })
    }

    fn run_interval(&self, session: &Session, point: &SimPoint) -> anyhow::Result<SimJson> {
        let SimPoint {
            file,
            scenario,
            spec,
        } = point;
        let programs =
            sim_interval::load_programs(session, scenario, spec).with_context(|| file.clone())?;
        let machine =
            interval::build_machine(scenario, spec, &programs).with_context(|| file.clone())?;
        let config = pipeline_config(scenario, spec, &machine);
        let nominal_ns = |length| interval::length_ns(length, spec).unwrap_or(0);
        let warm_up_ns = scenario.warm_up.map_or(0, nominal_ns);
        let total_ns = Some(warm_up_ns + nominal_ns(scenario.length));

        let mut is_measuring = warm_up_ns == 0;
        self.run_to_end(session, point, config, machine, total_ns, |machine| {
            if !is_measuring && machine.now_ns() >= warm_up_ns {
                is_measuring = true;
                machine.begin_measuring();
            }
        })
    }

    /// Prints the result of one run; an interrupted run ends with exit code 130.
    fn print_one(&self, session: &Session, result: &SimJson) -> anyhow::Result<()> {
        session.print_result(self.json.json, result, || match &result.results {
            MachineResults::Cycle(results) => render(result, results),
            MachineResults::Interval(results) => {
                let head = format!(
                    "{}: {} under '{}', seed {}",
                    result.scenario, result.machine, result.policy, result.seed
                );
                sim_interval::render(&head, result.windows, results)
            }
        })?;
        if !result.complete {
            return Err(interruption(result).into());
        }
        Ok(())
    }

    /// Runs a machine to its end under the scenario's policy, and writes the run log.
    fn run_to_end<M: SimulatedMachine>(
        &self,
        session: &Session,
        SimPoint { scenario, spec, .. }: &SimPoint,
        config: PipelineConfig,
        mut machine: M,
        end_position: Option<u64>,
        mut after_window: impl FnMut(&mut M),
    ) -> anyhow::Result<SimJson> {
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
            machine: spec.name.clone(),
            seed: scenario.seed,
            policy: scenario.policy.name.clone(),
            windows: window_count,
            complete: !interrupt.load(Ordering::Relaxed),
            results: machine.results(),
        })
    }
}

/// The error for a run that the user stopped.
fn interruption(result: &SimJson) -> InterruptedError {
    InterruptedError(format!(
        "{} windows were measured before that",
        result.windows
    ))
}

/// The given values, or one `None`, which leaves the scenario's value.
fn or_unchanged(values: impl Iterator<Item = toml::Value>) -> Vec<Option<toml::Value>> {
    let mut choices: Vec<Option<toml::Value>> = values.map(Some).collect();
    if choices.is_empty() {
        choices.push(None);
    }
    choices
}

/// Parses `NAME` or `NAME:TOML` as a scenario's field.
fn policy_value(text: &str) -> anyhow::Result<toml::Value> {
    let (name, parameters) = text.split_once(':').unwrap_or((text, ""));
    cachemate_pipeline::POLICIES
        .build(name, parameters, 1)
        .map_err(|error| UsageError(format!("--policy: {error}")))?;
    let parameters: toml::Table = parameters.parse().context("--policy")?;
    let mut choice = toml::Table::new();
    choice.insert("name".to_string(), name.into());
    choice.insert("parameters".to_string(), parameters.into());
    Ok(choice.into())
}

/// Everything that a run depends on: scenario, machine, contents of the files that it names, and all sources.
fn run_name(point: &SimPoint) -> anyhow::Result<RunName> {
    let SimPoint { scenario, spec, .. } = point;
    let mixes = scenario
        .interval
        .iter()
        .flat_map(|interval| &interval.mixes);
    let mix_programs = mixes.flat_map(|mix| &mix.programs);
    let program_names = scenario
        .programs
        .iter()
        .map(|program| &program.program)
        .chain(mix_programs.map(|part| &part.program));
    let mut contents = Vec::new();
    for name in program_names {
        let recording = cachemate_scenario::recording_of_program(name)
            .ok()
            .flatten();
        let path = recording.unwrap_or_else(|| PathBuf::from(name));
        contents.push(content_digest(&path));
    }
    // What a result contains and what it depends on; a description is neither.
    let undescribed = Scenario {
        description: String::new(),
        ..scenario.clone()
    };
    let label = format!("{} on {}", scenario.name, spec.name);
    let inputs = (undescribed, spec, contents);
    Ok(RunName::new("sim", label, source_version(), &inputs)?)
}

/// Calls `run`, and meanwhile copies the stop flag to the machine's own flag, so that the run ends within a window. The
/// two are separate, because a machine may also stop by itself.
fn run_until_stopped<T>(
    machine_stop: &Arc<AtomicBool>,
    stop: &AtomicBool,
    run: impl FnOnce() -> T,
) -> T {
    let (done_sender, done_receiver) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while done_receiver.recv_timeout(Duration::from_millis(50))
                == Err(RecvTimeoutError::Timeout)
            {
                if stop.load(Ordering::Relaxed) {
                    machine_stop.store(true, Ordering::Relaxed);
                }
            }
        });
        let outcome = run();
        drop(done_sender);
        outcome
    })
}

/// One line for each run. A slowdown is relative to a program alone, which only the interval machine knows.
fn runs_table(runs: &[SimJson]) -> String {
    let mut table = Table::from_header(
        "scenario | machine | policy | > seed | > windows | > IPC | > slowest IPC | > misses/1000 | > mean slowdown | > worst",
    );
    for run in runs {
        let figures = match &run.results {
            MachineResults::Cycle(results) => RunFigures::of_cycle_run(results),
            MachineResults::Interval(results) => RunFigures::of_interval_run(results),
        };
        let percent =
            |value: Option<f64>| value_or_dash(value.map(|factor| format_percent(factor - 1.0, 1)));
        let number = |value: Option<f64>| value_or_dash(value.map(format_number));
        table.add_row([
            run.scenario.clone(),
            run.machine.clone(),
            run.policy.clone(),
            run.seed.to_string(),
            run.windows.to_string(),
            number(figures.instr_per_cycle),
            number(figures.slowest_instr_per_cycle),
            number(figures.mpki),
            percent(figures.mean_slowdown),
            percent(figures.worst_slowdown),
        ]);
    }
    table.text()
}

/// The figures of a run in a table of several; slowdowns as factors.
#[derive(Default)]
struct RunFigures {
    instr_per_cycle: Option<f64>,
    slowest_instr_per_cycle: Option<f64>,
    mpki: Option<f64>,
    mean_slowdown: Option<f64>,
    worst_slowdown: Option<f64>,
}

impl RunFigures {
    fn of_cycle_run(results: &RunResults) -> Self {
        let cycles = results.elapsed_cycles as f64;
        let instructions: u64 = results.tasks.iter().map(|task| task.instructions).sum();
        let last_levels = results.tasks.iter().filter_map(|task| task.levels.last());
        let misses: u64 = last_levels.map(|level| level.misses).sum();
        let fewest = results.tasks.iter().map(|task| task.instructions).min();
        let ratio = |value: f64, base: f64| (base > 0.0).then(|| value / base);
        RunFigures {
            instr_per_cycle: ratio(instructions as f64, cycles),
            slowest_instr_per_cycle: fewest.and_then(|count| ratio(count as f64, cycles)),
            mpki: ratio(1000.0 * misses as f64, instructions as f64),
            ..RunFigures::default()
        }
    }

    fn of_interval_run(results: &IntervalResults) -> Self {
        let jobs = &results.jobs;
        let slowdowns: Vec<f64> = jobs.iter().filter_map(|job| job.slowdown).collect();
        let speeds: Vec<f64> = jobs.iter().filter_map(|job| job.instr_per_cycle).collect();
        let instructions: f64 = jobs.iter().map(|job| job.instructions).sum();
        let misses = jobs
            .iter()
            .map(|job| job.mpki.map_or(0.0, |mpki| mpki * job.instructions))
            .sum::<f64>();
        let mean = |values: &[f64]| {
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        RunFigures {
            instr_per_cycle: mean(&speeds),
            slowest_instr_per_cycle: speeds.iter().copied().reduce(f64::min),
            mpki: (instructions > 0.0).then(|| misses / instructions),
            mean_slowdown: mean(&slowdowns),
            worst_slowdown: slowdowns.iter().copied().reduce(f64::max),
        }
    }
}

/// The plan places, weights, gangs, penalizes or confines some task.
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
        _ => "the run log (-o) and 'cachemate replay LOG -o' show the reasons",
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

fn render(result: &SimJson, results: &RunResults) -> String {
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
