//! Simulates a set of programs on a machine under a policy, with time series of the results.

use std::sync::atomic::Ordering;

use cachemate_core::{Machine, MachineSpec, Plan, PolicyConfig, Reason, TaskId, WindowRecord};
use cachemate_interval::{IntervalJob, IntervalMachine, Options};
use cachemate_pipeline::{INTERVAL_COUNTED_INSTRUCTIONS, Pipeline, StandardPipeline};
use cachemate_report::{PolicyOutcome, ProgramOutcome, ReportedDecision, TimeSeries};

use crate::setup::failed;
use crate::{ExperimentContext, Result};

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
    /// Whether each turn is simulated, instead of the average over turns.
    pub has_explicit_turns: bool,
    /// Whether a guard rolls back decisions that reduce performance.
    pub has_guard: bool,
}

/// Maximum number of stretches in a time series.
const MAX_STRETCH_COUNT: u64 = 240;

/// The standard pipeline around a policy on the interval machine.
///
/// # Errors
/// The policy is unknown, or does not accept the parameters.
pub fn build_interval_pipeline(
    machine: &IntervalMachine,
    spec: &MachineSpec,
    policy: PolicyConfig,
    has_guard: bool,
) -> Result<Pipeline> {
    let standard_pipeline =
        StandardPipeline::for_simulation(policy, has_guard, spec, INTERVAL_COUNTED_INSTRUCTIONS);
    crate::setup::build_pipeline(
        standard_pipeline.for_machine(machine.topology(), machine.capabilities()),
    )
}

/// Splits `dio` or `dio:TOML` into the name and the TOML.
fn name_and_parameters(policy: &str) -> (&str, &str) {
    policy.split_once(':').unwrap_or((policy, ""))
}

/// The query's machine at its start, and the pipeline of the policy. `policy_text` may include
/// parameters.
///
/// # Errors
/// The machine, a program or the policy is invalid.
pub fn start_query(query: &WhatIfQuery, policy_text: &str) -> Result<(IntervalMachine, Pipeline)> {
    let (policy, parameters) = name_and_parameters(policy_text);
    let config = PolicyConfig {
        name: policy.to_string(),
        parameters: parameters.to_string(),
        seed: query.seed,
    };
    let options = Options {
        seed: query.seed,
        has_explicit_turns: query.has_explicit_turns,
        length_ns: Some(query.length_ns),
        ..Options::default()
    };
    let mut machine = IntervalMachine::new(&query.machine, options, query.jobs.clone())
        .map_err(failed("machine"))?;
    let policy_pipeline =
        build_interval_pipeline(&machine, &query.machine, config, query.has_guard)?;
    machine.set_first_window(policy_pipeline.config().first_window);
    Ok((machine, policy_pipeline))
}

/// Runs the query under one policy of the registry. `policy_text` may include parameters: `dio` or `dio:TOML`.
///
/// # Errors
/// The machine, a program or the policy is invalid.
pub fn run_query(
    context: &ExperimentContext<'_>,
    query: &WhatIfQuery,
    policy_text: &str,
) -> Result<PolicyOutcome> {
    let (machine, pipeline) = start_query(query, policy_text)?;
    let mut time_series = TimeSeriesRecorder::new(query);
    let mut is_complete = true;
    let machine = pipeline
        .run(machine, |machine, record| {
            time_series.add_window(machine, &record);
            is_complete = !context.stop.load(Ordering::Relaxed);
            is_complete
        })
        .map_err(failed(policy_text))?;
    Ok(time_series.into_outcome(policy_text, &machine, is_complete))
}

/// Sums within one stretch of time, by job.
#[derive(Clone, Copy, Default)]
struct StretchSums {
    /// Solo time of the work done in `work_ns`.
    solo_ns: f64,
    work_ns: f64,
    occupancy_sum_bytes: f64,
    sample_count: u32,
}

struct TimeSeriesRecorder {
    stretch_ns: u64,
    stretch_end_ns: u64,
    bandwidth_bytes_per_s: Vec<f64>,
    stretch_sums: Vec<StretchSums>,
    /// By job and cache: the job's time there.
    ns_by_cache: Vec<Vec<f64>>,
    bytes_by_node: Vec<f64>,
    stretch_start_ns: u64,
    series: TimeSeries,
    decisions: Vec<ReportedDecision>,
    previous_plan: Option<Plan>,
    window_count: u64,
    /// Program time spent on page moves so far, and on probes.
    migration_ns: u64,
    probe_ns: u64,
    names: Vec<String>,
}

impl TimeSeriesRecorder {
    fn new(query: &WhatIfQuery) -> Self {
        let jobs = query.jobs.len();
        let spec = &query.machine;
        let cache_count = spec
            .last_level_cache()
            .map_or(0, |cache| spec.instance_count(cache)) as usize;
        let node_count = spec.memory.nodes as usize;
        let stretch_ns = (query.length_ns / MAX_STRETCH_COUNT).max(1);
        let bytes_per_second = spec.memory.bytes_per_cycle * spec.hertz as f64;

        TimeSeriesRecorder {
            stretch_ns,
            stretch_end_ns: stretch_ns,
            bandwidth_bytes_per_s: vec![bytes_per_second; node_count],
            stretch_sums: vec![StretchSums::default(); jobs],
            ns_by_cache: vec![vec![0.0; cache_count]; jobs],
            bytes_by_node: vec![0.0; node_count],
            stretch_start_ns: 0,
            series: TimeSeries {
                seconds: Vec::new(),
                slowdown: vec![Vec::new(); jobs],
                occupancy_bytes: vec![Vec::new(); jobs],
                cache: vec![Vec::new(); jobs],
                memory_busy_share: vec![Vec::new(); node_count],
            },
            decisions: Vec::new(),
            previous_plan: None,
            window_count: 0,
            migration_ns: 0,
            probe_ns: 0,
            names: make_names_unique(query.jobs.iter().map(|job| job.name.clone()).collect()),
        }
    }

    fn add_window(&mut self, machine: &IntervalMachine, record: &WindowRecord) {
        self.window_count += 1;
        self.migration_ns = record.applied.cost_ns;
        let probe_results = record.observation.probe_results.iter();
        self.probe_ns += probe_results
            .flat_map(|probe_result| &probe_result.cost_ns)
            .map(|(_, ns)| ns)
            .sum::<u64>();

        let elapsed_ns = record.observation.span.elapsed_ns as f64;
        for task in &record.observation.tasks {
            let Some(job) = machine.job_of(task.task) else {
                continue;
            };
            let sums = &mut self.stretch_sums[job];
            if let Some((slowdown, _)) = machine.task_slowdown(task.task) {
                sums.solo_ns += elapsed_ns / slowdown;
                sums.work_ns += elapsed_ns;
            }

            sums.occupancy_sum_bytes += machine.occupied_bytes(task.task).iter().sum::<f64>();
            sums.sample_count += 1;
            let slot = machine.slot_of(task.task);
            if let Some(cache) = slot.and_then(|slot| machine.engine().cache_of(slot)) {
                self.ns_by_cache[job][cache] += elapsed_ns;
            }
        }

        for (sum, bytes) in self.bytes_by_node.iter_mut().zip(node_bytes(record)) {
            *sum += bytes;
        }

        let plan_changed = self
            .previous_plan
            .as_ref()
            .is_some_and(|previous| plans_differ(previous, &record.decision.plan));
        if plan_changed {
            let seconds = machine.now_ns() as f64 / 1e9;
            self.decisions.push(ReportedDecision {
                seconds,
                reason: describe_reasons(record, &self.names, machine),
            });
        }

        self.previous_plan = Some(record.decision.plan.clone());
        if machine.now_ns() >= self.stretch_end_ns {
            self.close_stretch(machine.now_ns());
        }
    }

    fn close_stretch(&mut self, now_ns: u64) {
        let seconds = (now_ns - self.stretch_start_ns) as f64 / 1e9;
        self.series.seconds.push(now_ns as f64 / 1e9);
        for (job, sums) in self.stretch_sums.iter_mut().enumerate() {
            let sums = std::mem::take(sums);
            self.series.slowdown[job]
                .push((sums.solo_ns > 0.0).then(|| sums.work_ns / sums.solo_ns));
            let window_count = f64::from(sums.sample_count);
            self.series.occupancy_bytes[job]
                .push((sums.sample_count > 0).then(|| sums.occupancy_sum_bytes / window_count));
            let most_used_cache = (0..self.ns_by_cache[job].len()).max_by(|&a, &b| {
                self.ns_by_cache[job][a]
                    .total_cmp(&self.ns_by_cache[job][b])
                    .then(b.cmp(&a))
            });
            let main_cache =
                most_used_cache.filter(|&cache_index| self.ns_by_cache[job][cache_index] > 0.0);
            self.series.cache[job].push(main_cache.map(|cache_index| cache_index as u32));
            self.ns_by_cache[job].iter_mut().for_each(|ns| *ns = 0.0);
        }

        for (node, bytes) in self.bytes_by_node.iter_mut().enumerate() {
            let bandwidth_share =
                std::mem::take(bytes) / seconds.max(1e-9) / self.bandwidth_bytes_per_s[node];
            self.series.memory_busy_share[node].push(bandwidth_share);
        }
        self.stretch_start_ns = now_ns;
        self.stretch_end_ns = (now_ns / self.stretch_ns + 1) * self.stretch_ns;
    }

    fn into_outcome(
        mut self,
        name: &str,
        machine: &IntervalMachine,
        is_complete: bool,
    ) -> PolicyOutcome {
        if machine.now_ns() > self.stretch_start_ns {
            self.close_stretch(machine.now_ns());
        }

        let results = machine.results();
        let slowdowns: Vec<f64> = results.jobs.iter().filter_map(|job| job.slowdown).collect();
        let some_if_measured = |value: f64| (!slowdowns.is_empty()).then_some(value);
        let program_outcome =
            |(job, name): (&cachemate_interval::JobResults, &String)| ProgramOutcome {
                name: name.clone(),
                slowdown: job.slowdown,
                slowdown_on_cpu: job.slowdown_on_cpu,
                instr_per_cycle: job.instr_per_cycle,
                mpki: job.mpki,
            };
        let seconds = results.seconds.max(1e-9);

        PolicyOutcome {
            policy: name.to_string(),
            complete: is_complete,
            windows: self.window_count,
            mean_slowdown: some_if_measured(
                slowdowns.iter().sum::<f64>() / slowdowns.len().max(1) as f64,
            ),
            worst_slowdown: some_if_measured(slowdowns.iter().copied().fold(0.0, f64::max)),
            weighted_speedup: some_if_measured(
                slowdowns.iter().map(|slowdown| 1.0 / slowdown).sum(),
            ),
            instructions_per_second: results.jobs.iter().map(|job| job.instructions).sum::<f64>()
                / seconds,
            memory_bytes_per_second: results.memory_bytes_per_second.iter().sum(),
            changes_per_hour: self.decisions.len() as f64 * 3600.0 / seconds,
            overhead_seconds: (self.migration_ns + self.probe_ns) as f64 / 1e9,
            programs: results
                .jobs
                .iter()
                .zip(&self.names)
                .map(program_outcome)
                .collect(),
            series: self.series,
            decisions: self.decisions,
        }
    }
}

/// Makes names unique: the second copy becomes `name 2`.
fn make_names_unique(names: Vec<String>) -> Vec<String> {
    let occurrence_number = |index: usize| {
        names[..index]
            .iter()
            .filter(|earlier_name| **earlier_name == names[index])
            .count()
            + 1
    };
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
        .filter(|(scope, _)| matches!(scope, cachemate_core::CounterScope::MemoryNode(_)));
    nodes.map(|(_, counts)| counts.0.iter().map(|reading| reading.count as f64).sum())
}

/// Whether the plans differ in placement, partitions or times. Windows and probes are ignored,
/// because they affect a program only briefly.
pub fn plans_differ(first_plan: &Plan, second_plan: &Plan) -> bool {
    first_plan.affinity != second_plan.affinity
        || first_plan.weights != second_plan.weights
        || first_plan.gangs != second_plan.gangs
        || first_plan.shares != second_plan.shares
}

/// The first reasons, with the programs to which they apply.
fn describe_reasons(record: &WindowRecord, names: &[String], machine: &IntervalMachine) -> String {
    let name = |task: &TaskId| machine.job_of(*task).map(|job| names[job].clone());
    let reasons: Vec<String> = record
        .decision
        .reasons
        .iter()
        .take(3)
        .map(|reason| describe_reason(reason, name))
        .collect();
    if reasons.is_empty() {
        "no reason given".to_string()
    } else {
        reasons.join("; ")
    }
}

/// Maximum number of programs named with a reason.
const MAX_NAMED_PROGRAMS: usize = 4;

/// A reason with its programs, in their places in the text or after it.
pub fn describe_reason(reason: &Reason, name: impl Fn(&TaskId) -> Option<String>) -> String {
    let job_name_or_ended =
        |task: &TaskId| name(task).unwrap_or_else(|| "a program that has ended".to_string());
    let text = reason.render(|task| job_name_or_ended(&task));
    let mut distinct_names: Vec<String> = Vec::new();
    for name in reason.tasks.iter().map(job_name_or_ended) {
        if !distinct_names.contains(&name) {
            distinct_names.push(name);
        }
    }
    if text != reason.text || distinct_names.is_empty() {
        return text;
    }
    format!(
        "{text} ({})",
        cachemate_report::text::format_names(&distinct_names, MAX_NAMED_PROGRAMS)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::quick_context;
    use cachemate_interval::closed_form::{reusing_job, streaming_job};

    fn test_query() -> WhatIfQuery {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let job = |index: usize| match index % 2 {
            0 => streaming_job(&machine, 0.02),
            _ => reusing_job("reuser", &machine, 0.8, 0.02),
        };
        let jobs = (0..4).map(job).collect();
        WhatIfQuery {
            machine,
            jobs,
            length_ns: 120_000_000_000,
            seed: 1,
            has_explicit_turns: false,
            has_guard: true,
        }
    }

    fn policy_outcome(policy: &str) -> PolicyOutcome {
        run_query(&quick_context(), &test_query(), policy).unwrap()
    }

    /// Do time lines cover the whole run without a gap, agree with the table, and repeat to the bit?
    #[test]
    fn time_lines_cover_the_run_and_agree_with_the_table() {
        let run = policy_outcome("dio");
        assert!((run.series.seconds.last().unwrap() - 120.0).abs() < 1e-6);
        assert!(
            run.series.seconds.len() > 50,
            "{}",
            run.series.seconds.len()
        );
        for (job, program) in run.programs.iter().enumerate() {
            let line: Vec<f64> = run.series.slowdown[job]
                .iter()
                .map(|value| value.unwrap())
                .collect();
            let mean = line.iter().sum::<f64>() / line.len() as f64;
            assert!(
                (mean / program.slowdown.unwrap() - 1.0).abs() < 0.05,
                "{mean} {program:?}"
            );
        }
        let names: Vec<&str> = run
            .programs
            .iter()
            .map(|program| program.name.as_str())
            .collect();
        assert_eq!(names, ["stream", "reuser", "stream 2", "reuser 2"]);
        assert_eq!(run, policy_outcome("dio"));
    }

    /// Are program names inserted where the reason has a place for them, and appended if it has none?
    #[test]
    fn reasons_name_their_programs() {
        let numbered_name = |task: &TaskId| Some(format!("p{}", task.0));
        let sample_reason = |text: &str, tasks: u32| {
            Reason::new((0..tasks).map(TaskId).collect(), text, Vec::new())
        };
        assert_eq!(
            describe_reason(&sample_reason("{1} beside {0}", 2), numbered_name),
            "p1 beside p0"
        );
        let braces = |task: &TaskId| Some(format!("{{{}}}", 1 - task.0));
        assert_eq!(
            describe_reason(&sample_reason("{0} beside {1}", 2), braces),
            "{1} beside {0}"
        );
        assert_eq!(
            describe_reason(&sample_reason("apart", 2), numbered_name),
            "apart (p0, p1)"
        );
        assert_eq!(
            describe_reason(&sample_reason("apart", 9), numbered_name),
            "apart (p0, p1, p2, p3 and 5 more)"
        );
    }

    /// Is an unknown policy an error with its name?
    #[test]
    fn an_unknown_policy_is_named() {
        let error = run_query(&quick_context(), &test_query(), "dioo")
            .unwrap_err()
            .to_string();
        assert!(error.contains("dioo"), "{error}");
    }
}
