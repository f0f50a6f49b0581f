//! Simulates a set of programs on a machine under a policy, with time series of the results.

use std::sync::atomic::Ordering;

use cachemate_core::{Machine, MachineSpec, Plan, PolicyConfig, Reason, TaskId, WindowRecord};
use cachemate_interval::{IntervalJob, IntervalMachine, Options};
use cachemate_pipeline::{INTERVAL_COUNTED_INSTRUCTIONS, Pipeline, StandardPipeline};
use cachemate_policy::policies::{self, PolicyError};
use cachemate_report::{PolicyOutcome, ProgramOutcome, ReportedDecision, TimeSeries};

use crate::setup::failed;
use crate::{ExperimentContext, ReproError};

/// A query: programs on a machine whose behavior under policies is to be compared.
#[derive(Clone, Debug)]
pub struct WhatIfQuery {
    /// The machine on which the programs run.
    pub machine: MachineSpec,
    /// Jobs, in the order of the time series.
    pub jobs: Vec<IntervalJob>,
    /// Nominal length of the run.
    pub length_ns: u64,
    /// Seed of the machine and the policy.
    pub seed: u64,
    /// Whether each turn is simulated instead of averages.
    pub explicit: bool,
    /// Whether a guard rolls back decisions that reduce performance.
    pub guard: bool,
}

/// Maximum number of stretches of a time line.
const STRETCHES: u64 = 240;

/// The standard pipeline around a policy on the interval machine.
///
/// # Errors
/// The policy is unknown, or does not accept the parameters.
pub fn interval_pipeline(
    machine: &IntervalMachine,
    spec: &MachineSpec,
    policy: PolicyConfig,
    guard: bool,
) -> Result<Pipeline, ReproError> {
    let standard = StandardPipeline::for_simulation(policy, guard, spec, INTERVAL_COUNTED_INSTRUCTIONS);
    crate::setup::build_pipeline(standard.for_machine(machine.topology(), machine.capabilities()))
}

/// The name and the TOML of `dio` or `dio:TOML`.
fn name_and_parameters(policy: &str) -> (&str, &str) {
    policy.split_once(':').unwrap_or((policy, ""))
}

/// Checks a policy's name and parameters, as a query takes them, before anything runs.
///
/// # Errors
/// No policy has the name, or it rejects the parameters.
pub fn check_policy(policy: &str) -> Result<(), PolicyError> {
    let (name, parameters) = name_and_parameters(policy);
    policies::build(name, parameters, 1).map(drop)
}

/// The query's machine at its start, and the pipeline of the policy. `name` may include parameters.
///
/// # Errors
/// The machine, a program or the policy is invalid.
pub fn start_query(question: &WhatIfQuery, name: &str) -> Result<(IntervalMachine, Pipeline), ReproError> {
    let (policy, parameters) = name_and_parameters(name);
    let config = PolicyConfig { name: policy.to_string(), parameters: parameters.to_string(), seed: question.seed };
    let options = Options {
        seed: question.seed,
        explicit: question.explicit,
        length_ns: Some(question.length_ns),
        ..Options::default()
    };
    let mut machine =
        IntervalMachine::new(&question.machine, options, question.jobs.clone()).map_err(failed("machine"))?;
    let policy_pipeline = interval_pipeline(&machine, &question.machine, config, question.guard)?;
    machine.set_first_window(policy_pipeline.config().first_window);
    Ok((machine, policy_pipeline))
}

/// Runs the query under one policy of the registry. `name` may include parameters: `dio` or `dio:TOML`.
///
/// # Errors
/// The machine, a program or the policy is invalid.
pub fn run_query(
    context: &ExperimentContext<'_>,
    question: &WhatIfQuery,
    name: &str,
) -> Result<PolicyOutcome, ReproError> {
    let (machine, pipeline) = start_query(question, name)?;
    let mut lines = TimeSeriesRecorder::new(question);
    let mut complete = true;
    let machine = pipeline
        .run(machine, |machine, record| {
            lines.add(machine, &record);
            complete = !context.stop.load(Ordering::Relaxed);
            complete
        })
        .map_err(failed(name))?;
    Ok(lines.into_outcome(name, &machine, complete))
}

/// Sums within one stretch of time, by job.
#[derive(Clone, Copy, Default)]
struct StretchSums {
    /// Solo time of the work done in `ns`.
    alone_ns: f64,
    ns: f64,
    held_bytes: f64,
    samples: u32,
}

struct TimeSeriesRecorder {
    stretch_ns: u64,
    ends_ns: u64,
    max_line_bytes: Vec<f64>,
    now: Vec<StretchSums>,
    /// By job and cache: the job's time there.
    caches_ns: Vec<Vec<f64>>,
    memory_bytes: Vec<f64>,
    from_ns: u64,
    series: TimeSeries,
    decisions: Vec<ReportedDecision>,
    previous_plan: Option<Plan>,
    windows: u64,
    /// Programs' time that page moves have taken so far, and that of probes.
    moves_ns: u64,
    probes_ns: u64,
    names: Vec<String>,
}

impl TimeSeriesRecorder {
    fn new(question: &WhatIfQuery) -> Self {
        let jobs = question.jobs.len();
        let spec = &question.machine;
        let caches = spec.last_level().map_or(0, |cache| spec.instance_count(cache)) as usize;
        let nodes = spec.memory.nodes as usize;
        let stretch_ns = (question.length_ns / STRETCHES).max(1);
        let per_second = spec.memory.bytes_per_cycle * spec.hertz as f64;
        TimeSeriesRecorder {
            stretch_ns,
            ends_ns: stretch_ns,
            max_line_bytes: vec![per_second; nodes],
            now: vec![StretchSums::default(); jobs],
            caches_ns: vec![vec![0.0; caches]; jobs],
            memory_bytes: vec![0.0; nodes],
            from_ns: 0,
            series: TimeSeries {
                seconds: Vec::new(),
                slowdown: vec![Vec::new(); jobs],
                occupancy_bytes: vec![Vec::new(); jobs],
                cache: vec![Vec::new(); jobs],
                memory_busy_share: vec![Vec::new(); nodes],
            },
            decisions: Vec::new(),
            previous_plan: None,
            windows: 0,
            moves_ns: 0,
            probes_ns: 0,
            names: make_names_unique(question.jobs.iter().map(|job| job.name.clone()).collect()),
        }
    }

    fn add(&mut self, machine: &IntervalMachine, record: &WindowRecord) {
        self.windows += 1;
        self.moves_ns = record.applied.cost_ns;
        let answers = record.observation.probe_results.iter();
        self.probes_ns += answers.flat_map(|answer| &answer.cost_ns).map(|(_, ns)| ns).sum::<u64>();
        let elapsed = record.observation.span.elapsed_ns as f64;
        for task in &record.observation.tasks {
            let Some(job) = machine.job_of(task.task) else { continue };
            let sums = &mut self.now[job];
            if let Some((slowdown, _)) = machine.task_slowdown(task.task) {
                sums.alone_ns += elapsed / slowdown;
                sums.ns += elapsed;
            }
            sums.held_bytes += machine.occupied_bytes(task.task).iter().sum::<f64>();
            sums.samples += 1;
            let slot = machine.slot_of(task.task);
            if let Some(cache) = slot.and_then(|slot| machine.engine().cache_of(slot)) {
                self.caches_ns[job][cache] += elapsed;
            }
        }
        for (sum, bytes) in self.memory_bytes.iter_mut().zip(node_bytes(record)) {
            *sum += bytes;
        }
        let plan_changed =
            self.previous_plan.as_ref().is_some_and(|previous| has_other_effect(previous, &record.decision.plan));
        if plan_changed {
            let seconds = machine.now_ns() as f64 / 1e9;
            self.decisions.push(ReportedDecision { seconds, reason: describe_reasons(record, &self.names, machine) });
        }
        self.previous_plan = Some(record.decision.plan.clone());
        if machine.now_ns() >= self.ends_ns {
            self.close(machine.now_ns());
        }
    }

    fn close(&mut self, now_ns: u64) {
        let seconds = (now_ns - self.from_ns) as f64 / 1e9;
        self.series.seconds.push(now_ns as f64 / 1e9);
        for (job, sums) in self.now.iter_mut().enumerate() {
            let sums = std::mem::take(sums);
            self.series.slowdown[job].push((sums.alone_ns > 0.0).then(|| sums.ns / sums.alone_ns));
            let windows = f64::from(sums.samples);
            self.series.occupancy_bytes[job].push((sums.samples > 0).then(|| sums.held_bytes / windows));
            let longest = (0..self.caches_ns[job].len())
                .max_by(|&a, &b| self.caches_ns[job][a].total_cmp(&self.caches_ns[job][b]).then(b.cmp(&a)));
            let longest_cache = longest.filter(|&at| self.caches_ns[job][at] > 0.0);
            self.series.cache[job].push(longest_cache.map(|at| at as u32));
            self.caches_ns[job].iter_mut().for_each(|ns| *ns = 0.0);
        }
        for (node, bytes) in self.memory_bytes.iter_mut().enumerate() {
            let share = std::mem::take(bytes) / seconds.max(1e-9) / self.max_line_bytes[node];
            self.series.memory_busy_share[node].push(share);
        }
        self.from_ns = now_ns;
        self.ends_ns = (now_ns / self.stretch_ns + 1) * self.stretch_ns;
    }

    fn into_outcome(mut self, name: &str, machine: &IntervalMachine, complete: bool) -> PolicyOutcome {
        if machine.now_ns() > self.from_ns {
            self.close(machine.now_ns());
        }
        let results = machine.results();
        let slowdowns: Vec<f64> = results.jobs.iter().filter_map(|job| job.slowdown).collect();
        let if_measured = |value: f64| (!slowdowns.is_empty()).then_some(value);
        let program = |(job, name): (&cachemate_interval::JobResults, &String)| ProgramOutcome {
            name: name.clone(),
            slowdown: job.slowdown,
            slowdown_on_cpu: job.slowdown_on_cpu,
            instr_per_cycle: job.instr_per_cycle,
            mpki: job.mpki,
        };
        let seconds = results.seconds.max(1e-9);
        PolicyOutcome {
            policy: name.to_string(),
            complete,
            windows: self.windows,
            mean_slowdown: if_measured(slowdowns.iter().sum::<f64>() / slowdowns.len().max(1) as f64),
            worst_slowdown: if_measured(slowdowns.iter().copied().fold(0.0, f64::max)),
            weighted_speedup: if_measured(slowdowns.iter().map(|slowdown| 1.0 / slowdown).sum()),
            instructions_per_second: results.jobs.iter().map(|job| job.instructions).sum::<f64>() / seconds,
            memory_bytes_per_second: results.memory_bytes_per_second.iter().sum(),
            changes_per_hour: self.decisions.len() as f64 * 3600.0 / seconds,
            overhead_seconds: (self.moves_ns + self.probes_ns) as f64 / 1e9,
            programs: results.jobs.iter().zip(&self.names).map(program).collect(),
            series: self.series,
            decisions: self.decisions,
        }
    }
}

/// Makes names unique: the second copy becomes `name 2`.
fn make_names_unique(names: Vec<String>) -> Vec<String> {
    let occurrence_number =
        |index: usize| names[..index].iter().filter(|earlier_name| **earlier_name == names[index]).count() + 1;
    (0..names.len())
        .map(|index| {
            if occurrence_number(index) > 1 {
                format!("{} {}", names[index], occurrence_number(index))
            } else {
                names[index].clone()
            }
        })
        .collect()
}

fn node_bytes(record: &WindowRecord) -> impl Iterator<Item = f64> {
    let nodes = record
        .observation
        .shared_counts
        .iter()
        .filter(|(place, _)| matches!(place, cachemate_core::CounterScope::MemoryNode(_)));
    nodes.map(|(_, counts)| counts.0.iter().map(|reading| reading.count as f64).sum())
}

/// Returns whether the plans differ in placement, partitions or times. Windows and probes are ignored, because they affect a
/// program only briefly.
pub fn has_other_effect(a: &Plan, b: &Plan) -> bool {
    a.affinity != b.affinity || a.weights != b.weights || a.gangs != b.gangs || a.shares != b.shares
}

/// The first reasons, with the programs to which they apply.
fn describe_reasons(record: &WindowRecord, names: &[String], machine: &IntervalMachine) -> String {
    let name = |task: &TaskId| machine.job_of(*task).map(|job| names[job].clone());
    let reasons: Vec<String> =
        record.decision.reasons.iter().take(3).map(|reason| describe_reason(reason, name)).collect();
    if reasons.is_empty() { "no reason given".to_string() } else { reasons.join("; ") }
}

/// Maximum number of programs named with a reason.
const NAMED: usize = 4;

/// A reason with its programs, in their places in the text or after it.
pub fn describe_reason(reason: &Reason, name: impl Fn(&TaskId) -> Option<String>) -> String {
    let job_name_or_ended = |task: &TaskId| name(task).unwrap_or_else(|| "a program that has ended".to_string());
    let text = reason.render(|task| job_name_or_ended(&task));
    let mut names_listed: Vec<String> = Vec::new();
    for name in reason.tasks.iter().map(job_name_or_ended) {
        if !names_listed.contains(&name) {
            names_listed.push(name);
        }
    }
    if text != reason.text || names_listed.is_empty() {
        return text;
    }
    let hidden_count = names_listed.len().saturating_sub(NAMED);
    names_listed.truncate(NAMED);
    let suffix = if hidden_count > 0 { format!(" and {hidden_count} more") } else { String::new() };
    format!("{text} ({}{suffix})", names_listed.join(", "))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use cachemate_interval::{PhasedProgram, closed_form};

    fn test_query() -> WhatIfQuery {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let lines = machine.last_level().map_or(0.0, |cache| cache.size_bytes as f64 / 64.0);
        let steady_job = |name: &str, phase| IntervalJob::new(PhasedProgram::endless_program(name, phase));
        let jobs = vec![
            steady_job("stream", closed_form::stream_phase(64.0, lines, 0.02)),
            steady_job("reuser", closed_form::uniform_phase(64.0, lines, 0.8 * lines, 0.02)),
            steady_job("stream", closed_form::stream_phase(64.0, lines, 0.02)),
            steady_job("reuser", closed_form::uniform_phase(64.0, lines, 0.8 * lines, 0.02)),
        ];
        WhatIfQuery { machine, jobs, length_ns: 120_000_000_000, seed: 1, explicit: false, guard: true }
    }

    fn policy_outcome(policy: &str) -> PolicyOutcome {
        let stop = AtomicBool::new(false);
        let context = ExperimentContext { quick: true, ..ExperimentContext::for_seed(1, &stop) };
        run_query(&context, &test_query(), policy).unwrap()
    }

    /// Do time lines cover the whole run without a gap, agree with the table, and repeat to the bit?
    #[test]
    fn time_lines_cover_the_run_and_agree_with_the_table() {
        let run = policy_outcome("dio");
        assert!((run.series.seconds.last().unwrap() - 120.0).abs() < 1e-6);
        assert!(run.series.seconds.len() > 50, "{}", run.series.seconds.len());
        for (job, program) in run.programs.iter().enumerate() {
            let line: Vec<f64> = run.series.slowdown[job].iter().map(|value| value.unwrap()).collect();
            let mean = line.iter().sum::<f64>() / line.len() as f64;
            assert!((mean / program.slowdown.unwrap() - 1.0).abs() < 0.05, "{mean} {program:?}");
        }
        let names: Vec<&str> = run.programs.iter().map(|program| program.name.as_str()).collect();
        assert_eq!(names, ["stream", "reuser", "stream 2", "reuser 2"]);
        assert_eq!(run, policy_outcome("dio"));
    }

    /// Are program names inserted where the reason has a place for them, and appended if it has none?
    #[test]
    fn reasons_name_their_programs() {
        let numbered_name = |task: &TaskId| Some(format!("p{}", task.0));
        let sample_reason = |text: &str, tasks: u32| Reason {
            kind: cachemate_core::ReasonKind::Explanation,
            tasks: (0..tasks).map(TaskId).collect(),
            text: text.to_string(),
            numbers: Vec::new(),
        };
        assert_eq!(describe_reason(&sample_reason("{1} beside {0}", 2), numbered_name), "p1 beside p0");
        let braces = |task: &TaskId| Some(format!("{{{}}}", 1 - task.0));
        assert_eq!(describe_reason(&sample_reason("{0} beside {1}", 2), braces), "{1} beside {0}");
        assert_eq!(describe_reason(&sample_reason("apart", 2), numbered_name), "apart (p0, p1)");
        assert_eq!(describe_reason(&sample_reason("apart", 9), numbered_name), "apart (p0, p1, p2, p3 and 5 more)");
    }

    /// Is an unknown policy an error with its name?
    #[test]
    fn an_unknown_policy_is_named() {
        let stop = AtomicBool::new(false);
        let context = ExperimentContext { quick: true, ..ExperimentContext::for_seed(1, &stop) };
        let error = run_query(&context, &test_query(), "dioo").unwrap_err().to_string();
        assert!(error.contains("dioo"), "{error}");
    }
}
