//! Lets a policy decide for programs from their profiles alone: the policy runs on the interval machine, and its
//! reasons are recorded. The settled plan is the one that was in force longest in the second half of the run, because
//! the last one may be under measurement.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use cachemate_core::{
    Ability, ActuationLimits, Forecast, Machine, MachineState, Observation, Plan, TaskId,
    TaskSample, TaskState, TrackedObject, WindowRecord, derive_changes,
};
use cachemate_interval::IntervalMachine;
use serde::Serialize;

use super::whatif::{WhatIfQuery, describe_reason, plans_differ, start_query};
use crate::setup::failed;
use crate::{ExperimentContext, Result};

/// One window in which the policy gave reasons.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PlanReport {
    /// Nominal seconds since the programs started.
    pub seconds: f64,
    /// Whether the plan changed.
    pub changed: bool,
    /// The reasons, with the names of the programs.
    pub reasons: Vec<String>,
}

/// A program under the settled plan.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PlannedProgram {
    /// Name of the program.
    pub program: String,
    /// Run time over that alone minus one, as the policy or the reference predictor forecast it; `None` without a
    /// forecast.
    pub forecast_slowdown: Option<f64>,
    /// The same, over the windows in which the plan was in force; `None` if the program did no work in them.
    pub measured_slowdown: Option<f64>,
}

/// The settled plan of a policy, with the way to it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PlannedRun {
    /// The policy as requested, including parameters.
    pub policy: String,
    /// Nominal time that the programs ran.
    pub seconds: f64,
    /// Share of the second half of that time in which the settled plan was in force: the plan with the largest share.
    pub share_in_force: f64,
    /// Nominal seconds until the settled plan was decided first; `None` if it is the initial state.
    pub decided_at: Option<f64>,
    /// Changes from an untouched machine to the settled plan, as text, in the order in which they are made.
    pub changes: Vec<String>,
    /// Parts of the plan that the machine cannot apply.
    pub refused: Vec<String>,
    /// The programs that were live under the settled plan, in order of arrival.
    pub programs: Vec<PlannedProgram>,
    /// Windows with reasons, in order; consecutive equal ones are listed once.
    pub decisions: Vec<PlanReport>,
}

/// Runs the query under one policy of the registry and returns its decisions.
pub fn plan_under_policy(
    context: &ExperimentContext<'_>,
    query: &WhatIfQuery,
    name: &str,
) -> Result<PlannedRun> {
    let (machine, pipeline) = start_query(query, name)?;
    let mut decision_log = DecisionLog {
        second_half_ns: query.length_ns / 2,
        ..DecisionLog::default()
    };
    let machine = pipeline
        .run(machine, |machine, record| {
            decision_log.add_record(machine, record);
            !context.stop.load(Ordering::Relaxed)
        })
        .map_err(failed(name))?;
    context.check_not_stopped()?;
    Ok(decision_log.into_planned_run(name, &machine))
}

/// A plan that was decided, and its windows in the second half of the run.
struct PlanInForce {
    plan: Plan,
    decided_at: Option<f64>,
    /// Tasks of the last window under the plan.
    tasks: Vec<TaskSample>,
    elapsed_ns: f64,
    /// The latest forecast of the plan.
    forecast: Option<Forecast>,
    /// Time of each task in these windows, and the time that it would have needed alone.
    task_times_ns: BTreeMap<TaskId, (f64, f64)>,
}

#[derive(Default)]
struct DecisionLog {
    second_half_ns: u64,
    names: BTreeMap<TaskId, String>,
    plans: Vec<PlanInForce>,
    /// Position of the plan in force in `plans`.
    current_plan: usize,
    decisions: Vec<PlanReport>,
}

impl DecisionLog {
    fn add_record(&mut self, machine: &IntervalMachine, record: WindowRecord) {
        for sample in &record.observation.tasks {
            self.names
                .entry(sample.task)
                .or_insert_with(|| sample.name.clone());
        }
        if self.plans.is_empty() {
            self.plans.push(PlanInForce::new(
                Plan::idle(record.decision.plan.window),
                None,
            ));
        }
        if machine.now_ns() > self.second_half_ns {
            self.plans[self.current_plan].add_window(machine, &record.observation);
        }
        let seconds = machine.now_ns() as f64 / 1e9;
        let plan = record.decision.plan;
        let is_plan_changed = plans_differ(&self.plans[self.current_plan].plan, &plan);
        if is_plan_changed {
            let known_plan = self
                .plans
                .iter()
                .rposition(|known| !plans_differ(&known.plan, &plan));
            self.current_plan = known_plan.unwrap_or_else(|| {
                self.plans.push(PlanInForce::new(plan, Some(seconds)));
                self.plans.len() - 1
            });
        }
        self.plans[self.current_plan].forecast = Some(record.forecast);
        let reasons: Vec<String> = record
            .decision
            .reasons
            .iter()
            .map(|reason| describe_reason(reason, |task| self.names.get(task).cloned()))
            .collect();
        // Reasons that are the same in every window are not repeated.
        if is_plan_changed
            || !reasons.is_empty()
                && self
                    .decisions
                    .last()
                    .is_none_or(|last| last.reasons != reasons)
        {
            self.decisions.push(PlanReport {
                seconds,
                changed: is_plan_changed,
                reasons,
            });
        }
    }

    fn into_planned_run(self, policy: &str, machine: &IntervalMachine) -> PlannedRun {
        let total_ns: f64 = self.plans.iter().map(|plan| plan.elapsed_ns).sum();
        let settled = self
            .plans
            .into_iter()
            .reduce(|a, b| if b.elapsed_ns > a.elapsed_ns { b } else { a });
        let changes = settled.as_ref().map(|PlanInForce { plan, tasks, .. }| {
            derive_changes(
                plan,
                &[],
                &initial_state(tasks, machine),
                machine.topology(),
                machine.capabilities(),
            )
        });
        let changes = changes.unwrap_or_default();
        PlannedRun {
            policy: policy.to_string(),
            seconds: machine.now_ns() as f64 / 1e9,
            share_in_force: settled
                .as_ref()
                .map_or(0.0, |plan| plan.elapsed_ns / total_ns.max(1.0)),
            decided_at: settled.as_ref().and_then(|plan| plan.decided_at),
            changes: changes.changes.iter().map(ToString::to_string).collect(),
            refused: changes
                .refused_items
                .iter()
                .map(|refused| refused.message.clone())
                .collect(),
            programs: settled.map_or_else(Vec::new, |plan| plan.programs()),
            decisions: self.decisions,
        }
    }
}

impl PlanInForce {
    fn new(plan: Plan, decided_at: Option<f64>) -> Self {
        PlanInForce {
            plan,
            decided_at,
            tasks: Vec::new(),
            elapsed_ns: 0.0,
            forecast: None,
            task_times_ns: BTreeMap::new(),
        }
    }

    fn add_window(&mut self, machine: &IntervalMachine, observation: &Observation) {
        let elapsed_ns = observation.span.elapsed_ns as f64;
        self.elapsed_ns += elapsed_ns;
        for sample in &observation.tasks {
            let Some((slowdown, _)) = machine.task_slowdown(sample.task) else {
                continue;
            };
            let (time_ns, solo_time_ns) = self.task_times_ns.entry(sample.task).or_default();
            *time_ns += elapsed_ns;
            *solo_time_ns += elapsed_ns / slowdown;
        }
        self.tasks.clone_from(&observation.tasks);
    }

    fn programs(&self) -> Vec<PlannedProgram> {
        let planned_program = |sample: &TaskSample| {
            let forecast = self
                .forecast
                .as_ref()
                .and_then(|forecast| forecast.tasks.get(&sample.task));
            PlannedProgram {
                program: sample.name.clone(),
                forecast_slowdown: forecast
                    .and_then(|task| task.degradation)
                    .map(|slowdown| slowdown.value),
                measured_slowdown: self
                    .task_times_ns
                    .get(&sample.task)
                    .map(|(time, solo)| time / solo - 1.0),
            }
        };
        self.tasks
            .iter()
            .filter(|sample| !sample.exited)
            .map(planned_program)
            .collect()
    }
}

/// Returns the machine with these tasks, before any change.
fn initial_state(tasks: &[TaskSample], machine: &IntervalMachine) -> MachineState {
    let online_cpus = machine.topology().online();
    let live_tasks = || tasks.iter().filter(|task| !task.exited);
    let task_state = |task: &TaskSample| TaskState {
        task: task.task,
        process: task.process,
        name: task.name.clone(),
        movable: !task.unmovable,
        group: None,
        affinity: Some(TrackedObject::new(online_cpus.clone())),
        weight: Some(TrackedObject::new(1.0)),
        class: None,
        class_owner: None,
        no_idle_turns: None,
    };
    let capabilities = machine.capabilities();
    let has_colors = capabilities.has_ability(Ability::Colors);
    let colors_by_process = live_tasks()
        .filter(|_| has_colors)
        .map(|task| (task.process, TrackedObject::new(None)));
    let groups = capabilities
        .partitions
        .iter()
        .filter_map(|(_, partition)| partition.way_groups());
    MachineState {
        tasks: live_tasks().map(task_state).collect(),
        colors: colors_by_process.collect(),
        limits: ActuationLimits {
            max_classes: groups.min().map(|groups| groups.max(1) - 1),
            ..ActuationLimits::default()
        },
        ..MachineState::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::quick_context;
    use crate::interval::fixtures::two_kinds_of_jobs;

    /// Is the plan a list of changes to an untouched machine, with reasons that name the programs?
    #[test]
    fn a_plan_is_a_list_of_changes_with_reasons() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let jobs = two_kinds_of_jobs(&machine, 0.4);
        let question = WhatIfQuery {
            machine,
            jobs,
            length_ns: 60_000_000_000,
            seed: 1,
            has_explicit_turns: false,
            has_guard: false,
        };
        let context = quick_context();
        let plan = plan_under_policy(&context, &question, "round-robin").unwrap();
        assert!(
            plan.changes
                .iter()
                .any(|line| line.starts_with("move task 0 'stream' to CPUs")),
            "{plan:?}"
        );
        let was_reason_given = |reason: &str| {
            plan.decisions
                .iter()
                .flat_map(|decision| &decision.reasons)
                .any(|text| text.starts_with(reason))
        };
        assert!(
            was_reason_given("stream goes to CPUs") && was_reason_given("reuser goes to CPUs"),
            "{plan:?}"
        );
        let idle_run = plan_under_policy(&context, &question, "default").unwrap();
        assert!(
            idle_run.changes.is_empty() && idle_run.decisions.is_empty(),
            "{idle_run:?}"
        );
        assert_eq!(
            (
                idle_run.share_in_force,
                idle_run.decided_at,
                idle_run.programs.len()
            ),
            (1.0, None, 4)
        );
        let is_known = |program: &PlannedProgram| {
            program
                .measured_slowdown
                .is_some_and(|slowdown| slowdown > -0.01)
        };
        assert!(idle_run.programs.iter().all(is_known), "{idle_run:?}");
    }
}
