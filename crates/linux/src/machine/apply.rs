//! Execution of a plan on the live machine: the state in force is read, the list of changes is derived from it, and
//! the list is executed or only reported.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    AppliedPlan, ChangeKind, ChangeList, CoRunPenalty, GangSchedule, Plan, PlanItem, RefusalReason,
    RefusedItem, TaskId, derive_changes,
};

use super::{LiveMachine, OBSERVE_ONLY_REASON};
use crate::act::actuator::ApplyReport;
use crate::act::boundaries::clip_plan_to_boundaries;
use crate::act::changes::{
    AppliedHistory, ApplyContext, Execution, GangController, HostSnapshot, build_rotation,
};
use crate::act::cpusets;
use crate::act::desired_state::DesiredState;
use crate::act::gang_scheduler::advisory_gangs::build_advisory_gangs;
use crate::act::gang_scheduler::compose::GangMember;
use crate::kernel::scheduling::EXT;
use crate::kernel::{DirLock, Kernel, ThreadKey, lock};
use crate::safety::journal::{JournalObject, ObjectState};
use crate::sense::tasks::ManagedThread;

impl<K: Kernel + Send + 'static> LiveMachine<K> {
    /// Restarts the gangs that a probe stopped.
    pub(super) fn restart_gangs(&mut self, schedules: Vec<GangSchedule>) {
        let tasks = self.tasks.tasks();
        let threads: BTreeMap<TaskId, (i32, ThreadKey)> = tasks
            .iter()
            .map(|task| (task.task, (task.pid, task.thread)))
            .collect();
        let originals = self.actuator.originals();
        for schedule in schedules {
            // A schedule that cannot be started is missing from the state in force, and the next plan starts it.
            let _ = self
                .gang_runners
                .start(&schedule, build_rotation(&schedule, &threads, &originals));
        }
        let _ = self.gang_runners.commit_gangs();
    }

    /// Polls the gang scheduler and sends it the advice that schedules do not contain: weights, and tasks that should
    /// not run together.
    pub(super) fn update_gang_scheduler(&mut self, plan: &Plan, applied_plan: &mut AppliedPlan) {
        if let Some(lost_message) = self.gang_runners.poll() {
            let message = format!(
                "{lost_message}: its threads run under the fair class, gangs are idle turns"
            );
            applied_plan
                .refused
                .push(plan_refusal(RefusalReason::NotFound, message));
        }
        if !self.gang_runners.is_scheduler_running() {
            return;
        }
        let kernel = self.kernel();
        let originals = self.actuator.originals();
        let tasks = self.tasks.tasks();
        let find_thread = |task: &TaskId| {
            tasks
                .iter()
                .find(|managed_thread| managed_thread.task == *task)
                .map(|managed_thread| managed_thread.thread)
        };
        let weights = plan
            .weights
            .iter()
            .filter_map(|(task, weight)| Some((find_thread(task)?, *weight)))
            .collect();
        let penalized_threads = |pair: &CoRunPenalty| {
            Some((
                (find_thread(&pair.tasks.0)?, find_thread(&pair.tasks.1)?),
                pair.penalty,
            ))
        };
        let penalties: BTreeMap<_, _> = plan
            .penalties
            .iter()
            .filter(|pair| pair.penalty > 0.0)
            .filter_map(penalized_threads)
            .collect();
        let clashes = penalties.keys().copied().collect();
        let mut members = Vec::new();
        if plan.gangs.is_empty() && !penalties.is_empty() {
            members = movable_threads(&*lock(&kernel), &tasks, &originals);
            let ext_states: Vec<DesiredState> = members
                .iter()
                .map(|(object, _)| {
                    DesiredState::journaled(object.clone(), ObjectState::Policy(EXT))
                })
                .collect();
            // Before the scheduler gets the plan, the originals are in the journal and the guardian runs.
            let journal_result = self
                .actuator
                .journal_originals(&*lock(&kernel), &ext_states);
            if let Err(error) = journal_result {
                applied_plan
                    .refused
                    .push(plan_refusal(RefusalReason::NoCapacity, error.to_string()));
                members.clear();
            }
        }
        let members: Vec<GangMember> = members.into_iter().map(|(_, member)| member).collect();
        self.gang_runners.set_advice(weights, clashes, |caches| {
            build_advisory_gangs(&members, &penalties, caches)
        });
    }

    /// The state in force, and the changes that lead from it to the plan. The caller keeps resctrl's lock until the
    /// changes are made.
    pub(super) fn derive_change_list(
        &mut self,
        plan: &Plan,
    ) -> (HostSnapshot, ChangeList, Option<DirLock>) {
        let kernel = self.kernel();
        let kernel = lock(&kernel);
        let mut groups =
            cpusets::read_groups(&*kernel, &self.options.cpusets, &self.actuator.originals());
        if self.options.should_act {
            let now_ns = self.start_time.elapsed().as_nanos() as u64;
            self.overrides.observe(&mut groups, &self.actuator, now_ns);
        }
        let tasks = self.tasks.tasks();
        let gangs = self.gang_runners.schedules();
        let has_gang_scheduler = self.gang_runners.is_scheduler_running();
        let history = AppliedHistory {
            actuator: &self.actuator,
            weights: &self.weights,
            gangs,
            has_gang_scheduler,
        };
        let mut plan = plan.clone();
        let boundary_refusals =
            clip_plan_to_boundaries(&*kernel, &mut plan, &tasks, &self.actuator);
        let mut snapshot = HostSnapshot::read(&*kernel, &plan, &tasks, groups, &history);
        snapshot.refused_items.extend(boundary_refusals);
        let mut dir_lock = None;
        if let Some(ways) = &mut self.way_controller {
            dir_lock = ways.read(
                &*kernel,
                &mut plan,
                &tasks,
                &mut snapshot,
                self.options.should_act,
            );
        }
        let change_list = derive_changes(
            &plan,
            &snapshot.confined_groups,
            &snapshot.state,
            &self.topology,
            &self.capabilities,
        );
        (snapshot, change_list, dir_lock)
    }

    /// The plan's outcome without any change: one refusal for each line that requires a change.
    pub(super) fn refuse_changes(
        &mut self,
        snapshot: HostSnapshot,
        change_list: ChangeList,
    ) -> AppliedPlan {
        let items: BTreeSet<PlanItem> = change_list
            .changes
            .iter()
            .flat_map(|change| change.items.clone())
            .collect();
        let reason = RefusalReason::NoPermission;
        let refuse = |item| RefusedItem {
            item,
            reason: reason.clone(),
            message: OBSERVE_ONLY_REASON.to_string(),
        };
        let mut refused_items = change_list.refused_items;
        refused_items.extend(snapshot.refused_items);
        refused_items.extend(items.into_iter().map(refuse));
        refused_items.append(&mut self.probe_runner.refused_items);
        AppliedPlan {
            refused: refused_items,
            probes: self.probe_runner.probe_ids(),
            is_only_proposed: true,
            ..AppliedPlan::default()
        }
    }

    /// Executes the list of changes and records refusals, complaints and overridden items in `applied_plan`.
    pub(super) fn execute(
        &mut self,
        snapshot: &HostSnapshot,
        change_list: ChangeList,
        applied_plan: &mut AppliedPlan,
    ) -> ApplyReport {
        let context = ApplyContext {
            kernel: &self.kernel,
            actuator: &mut self.actuator,
            ways: self.way_controller.as_mut(),
            gangs: &mut self.gang_runners,
        };
        let mut report = Execution::run(context, snapshot, &change_list.changes);
        for change in &change_list.changes {
            if let ChangeKind::Weight { task, to, .. } = change.kind
                && let Some(thread) = snapshot.threads.get(&task)
                && let Some(ObjectState::Nice(nice)) =
                    report.read_back_states.get(&JournalObject::Nice {
                        pid: thread.pid,
                        thread: thread.key,
                    })
            {
                self.weights.insert(thread.key, (to, *nice));
            }
        }
        applied_plan.refused.extend(change_list.refused_items);
        applied_plan.refused.append(&mut report.refused_items);
        let complaints = self.gang_runners.take_complaints().into_iter();
        applied_plan
            .refused
            .extend(complaints.map(|complaint| plan_refusal(RefusalReason::Failed, complaint)));
        applied_plan.overridden_by_others = std::mem::take(&mut report.overridden_items);
        if let Some(ways) = &mut self.way_controller {
            ways.assign_classes(&change_list.classes);
        }
        report
    }
}

/// Threads that may be given to the gang scheduler, with their original scheduling parameters.
fn movable_threads(
    kernel: &dyn Kernel,
    tasks: &[&ManagedThread],
    originals: &BTreeMap<JournalObject, ObjectState>,
) -> Vec<(JournalObject, GangMember)> {
    let gang_member = |task: &&ManagedThread| {
        let object = JournalObject::Policy {
            pid: task.pid,
            thread: task.thread,
        };
        let journaled_params = originals.get(&object).and_then(ObjectState::scheduling);
        let original = journaled_params.or_else(|| kernel.scheduling(task.thread.tid).ok())?;
        (original.can_wait() && original.flags == 0).then_some((object, (task.thread, original)))
    };
    tasks
        .iter()
        .filter(|task| !task.is_fixed && !task.has_exited)
        .filter_map(gang_member)
        .collect()
}

fn plan_refusal(reason: RefusalReason, message: String) -> RefusedItem {
    RefusedItem {
        item: PlanItem::Plan,
        reason,
        message,
    }
}
