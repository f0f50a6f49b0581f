//! Lets a policy decide for programs from their profiles alone: the policy runs on the interval machine, and its
//! reasons are recorded.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use cachemate_core::{
    Ability, ActuationLimits, Machine, MachineState, Observation, PartitionSupport, Plan, TaskId, TaskState,
    TrackedObject, WindowRecord, derive_changes,
};
use cachemate_interval::IntervalMachine;
use serde::Serialize;

use super::whatif::{WhatIfQuery, describe_reason, plans_differ, start_query};
use crate::setup::failed;
use crate::{ExperimentContext, ReproError};

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

/// The final decision of a policy, with the way to it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PlannedRun {
    /// The policy as requested, including parameters.
    pub policy: String,
    /// Nominal time that the programs ran.
    pub seconds: f64,
    /// Changes from an untouched machine to the last plan, as text, in the order in which they are made.
    pub changes: Vec<String>,
    /// Parts of the plan that the machine cannot apply.
    pub refused: Vec<String>,
    /// Windows with reasons, in order; consecutive equal ones are listed once.
    pub decisions: Vec<PlanReport>,
}

/// Runs the query under one policy of the registry and returns its decisions.
pub fn plan_under_policy(
    context: &ExperimentContext<'_>,
    query: &WhatIfQuery,
    name: &str,
) -> Result<PlannedRun, ReproError> {
    let (machine, pipeline) = start_query(query, name)?;
    let mut decision_log = DecisionLog::default();
    let machine = pipeline
        .run(machine, |machine, record| {
            decision_log.add_record(machine, record);
            !context.stop.load(Ordering::Relaxed)
        })
        .map_err(failed(name))?;
    context.check_not_stopped()?;
    Ok(decision_log.into_planned_run(name, &machine))
}

#[derive(Default)]
struct DecisionLog {
    names: BTreeMap<TaskId, String>,
    last_window: Option<(Observation, Plan)>,
    decisions: Vec<PlanReport>,
}

impl DecisionLog {
    fn add_record(&mut self, machine: &IntervalMachine, record: WindowRecord) {
        for seen in &record.observation.tasks {
            self.names.entry(seen.task).or_insert_with(|| seen.name.clone());
        }
        let plan = record.decision.plan;
        let is_plan_changed =
            self.last_window.as_ref().is_some_and(|(_, previous_plan)| plans_differ(previous_plan, &plan));
        let reasons: Vec<String> = record
            .decision
            .reasons
            .iter()
            .map(|reason| describe_reason(reason, |task| self.names.get(task).cloned()))
            .collect();
        // Reasons that are the same in every window are not repeated.
        if is_plan_changed || !reasons.is_empty() && self.decisions.last().is_none_or(|last| last.reasons != reasons) {
            self.decisions.push(PlanReport {
                seconds: machine.now_ns() as f64 / 1e9,
                changed: is_plan_changed,
                reasons,
            });
        }
        self.last_window = Some((record.observation, plan));
    }

    fn into_planned_run(self, policy: &str, machine: &IntervalMachine) -> PlannedRun {
        let changes_and_refusals = self.last_window.as_ref().map(|(observation, plan)| {
            derive_changes(plan, &[], &initial_state(observation, machine), machine.topology(), machine.capabilities())
        });
        let decision = changes_and_refusals.unwrap_or_default();
        PlannedRun {
            policy: policy.to_string(),
            seconds: machine.now_ns() as f64 / 1e9,
            changes: decision.changes.iter().map(ToString::to_string).collect(),
            refused: decision.refused_items.iter().map(|refused| refused.message.clone()).collect(),
            decisions: self.decisions,
        }
    }
}

/// The machine with these tasks, before any change.
fn initial_state(observation: &Observation, machine: &IntervalMachine) -> MachineState {
    let online_cpus = machine.topology().online();
    let live_tasks = || observation.tasks.iter().filter(|task| !task.exited);
    let task_state = |task: &cachemate_core::TaskSample| TaskState {
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
    let has_colors = capabilities.can(Ability::Colors);
    let colors_by_process = live_tasks().filter(|_| has_colors).map(|task| (task.process, TrackedObject::new(None)));
    let groups = capabilities.partitions.iter().filter_map(|(_, partition)| match partition {
        PartitionSupport::Ways { max_groups, .. } => Some(*max_groups),
        PartitionSupport::Colors { .. } => None,
    });
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
    use std::sync::atomic::AtomicBool;

    use super::*;
    use cachemate_interval::{IntervalJob, PhasedProgram, closed_form};

    /// Is the plan a list of changes to an untouched machine, with reasons that name the programs?
    #[test]
    fn a_plan_is_told_as_changes_with_reasons() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let lines = machine.last_level().map_or(0.0, |cache| cache.size_bytes as f64 / 64.0);
        let steady_job = |name: &str, phase| IntervalJob::new(PhasedProgram::endless_program(name, phase));
        let jobs = vec![
            steady_job("stream", closed_form::stream_phase(64.0, lines, 0.02)),
            steady_job("reuser", closed_form::uniform_phase(64.0, lines, 0.4 * lines, 0.02)),
            steady_job("stream", closed_form::stream_phase(64.0, lines, 0.02)),
            steady_job("reuser", closed_form::uniform_phase(64.0, lines, 0.4 * lines, 0.02)),
        ];
        let question =
            WhatIfQuery { machine, jobs, length_ns: 60_000_000_000, seed: 1, is_explicit: false, has_guard: false };
        let stop = AtomicBool::new(false);
        let context = ExperimentContext { quick: true, ..ExperimentContext::for_seed(1, &stop) };
        let plan = plan_under_policy(&context, &question, "round-robin").unwrap();
        assert!(plan.changes.iter().any(|line| line.starts_with("move task 0 'stream' to CPUs")), "{plan:?}");
        let was_reason_given = |reason: &str| {
            plan.decisions.iter().flat_map(|decision| &decision.reasons).any(|text| text.starts_with(reason))
        };
        assert!(was_reason_given("stream goes to CPUs") && was_reason_given("reuser goes to CPUs"), "{plan:?}");
        let idle_run = plan_under_policy(&context, &question, "default").unwrap();
        assert!(idle_run.changes.is_empty() && idle_run.decisions.is_empty(), "{idle_run:?}");
    }
}
