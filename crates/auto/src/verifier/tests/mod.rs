//! Tests of the guard on machines defined by a rule: the tasks of a window and their speeds, given the plan in force.

mod basics;
mod chance;
mod churn;
mod lies;
mod mirror;
mod proposals;
mod series;
mod way_home;

use cachemate_core::*;

use super::Verifier;

pub const SECOND_NS: u64 = 1_000_000_000;

struct SilentPolicy;
impl Predictor for SilentPolicy {
    fn forecast(&self, _: &View<'_>, _: &Plan) -> Forecast {
        Forecast::default()
    }
}

/// A policy that decides by window, tasks and the plan in force.
pub struct ScriptedPolicy<F>(pub F);
impl<F: FnMut(&View<'_>) -> Plan> Policy for ScriptedPolicy<F> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        Decision::new((self.0)(view), Vec::new())
    }
}

pub fn idle_plan() -> Plan {
    Plan::idle(WindowLength::Time { ns: SECOND_NS })
}

/// Tasks on one CPU each.
pub fn pinned_plan(cpu_by_task: &[(u32, u32)]) -> Plan {
    let affinity = cpu_by_task
        .iter()
        .map(|&(task, cpu)| (TaskId(task), [cpu].into_iter().collect()))
        .collect();
    Plan {
        affinity,
        ..idle_plan()
    }
}

/// A process with one thread of the same number, which reports this work.
pub fn program_sample(id: u32, user: Option<u32>, work: f64) -> TaskSample {
    TaskSample {
        user,
        progress: (work > 0.0).then_some(work),
        ..TaskSample::new(TaskId(id), ProcessId(id))
    }
}

/// Two last-level caches with two CPUs each.
pub fn topology_fixture() -> Topology {
    let cpu = |id| Cpu {
        id: CpuId(id),
        core: id,
        package: 0,
        memory_node: 0,
        online: true,
        hertz: None,
    };

    let cache = |id: u32| Cache {
        id: CacheId(id),
        level: CacheLevel::L3,
        cpus: (2 * id..2 * id + 2).collect(),
        size_bytes: Some(2 << 20),
        line_bytes: Some(64),
        ways: Some(16),
        last_level: true,
    };
    Topology {
        cpus: (0..4).map(cpu).collect(),
        caches: vec![cache(0), cache(1)],
        ..Topology::default()
    }
}

/// The decisions of all windows. `machine` gives the live tasks and their profiles under the plan in force.
pub fn run_with_profiles(
    policy: impl Policy,
    config: impl Into<Option<GuardConfig>>,
    windows: u64,
    mut machine: impl FnMut(u64, &Plan) -> (Vec<TaskSample>, Profiles),
) -> Vec<Decision> {
    let topology = topology_fixture();
    let capabilities = cachemate_core::test_support::capabilities_fixture(&[]);

    let mut guard = Verifier::new(policy, config);
    let mut previous_plan = idle_plan();
    let mut decisions = Vec::new();
    for window in 0..windows {
        let (tasks, profiles) = machine(window, &previous_plan);
        let span = TimeSpan {
            start_ns: window * SECOND_NS,
            elapsed_ns: SECOND_NS,
            elapsed_cycles: None,
        };

        let (ended, applied) = (WindowEnd::Elapsed, AppliedPlan::default());
        let observation = Observation {
            window,
            span,
            end_reason: ended,
            tasks,
            shared_counts: Vec::new(),
            probe_results: Vec::new(),
            applied,
        };
        let view = View {
            topology: &topology,
            capabilities: &capabilities,
            observation: &observation,
            profiles: &profiles,
            previous_plan: &previous_plan,
            predictor: &SilentPolicy,
            verdicts: &(),
        };
        let decision = guard.decide(&view);
        check_plan(&decision.plan, &view).expect("the guard's plans are valid");
        previous_plan = decision.plan.clone();
        decisions.push(decision);
    }

    decisions
}

pub fn run(
    policy: impl Policy,
    config: impl Into<Option<GuardConfig>>,
    windows: u64,
    mut machine: impl FnMut(u64, &Plan) -> Vec<TaskSample>,
) -> Vec<Decision> {
    run_with_profiles(policy, config, windows, |window, plan| {
        (machine(window, plan), Profiles::new())
    })
}

/// The positions of changes of placement, after the first decision, for which no reason is given.
fn changes_without_reason(decisions: &[Decision]) -> Vec<usize> {
    let is_change =
        |index: &usize| decisions[index - 1].plan.affinity != decisions[*index].plan.affinity;
    (1..decisions.len())
        .filter(is_change)
        .filter(|&index| decisions[index].reasons.is_empty())
        .collect()
}

/// The windows in which a decision has `plan` for the tasks that it names.
pub fn windows_with(decisions: &[Decision], plan: &Plan) -> Vec<usize> {
    let says = |decision: &Decision| {
        plan.affinity
            .iter()
            .all(|(task, cpus)| decision.plan.affinity.get(task) == Some(cpus))
    };
    (0..decisions.len())
        .filter(|&window| says(&decisions[window]))
        .collect()
}

/// The windows in which a plan was rolled back because of a measurement, rather than refused on cooldown.
pub fn rollback_windows(decisions: &[Decision]) -> Vec<usize> {
    let is_rollback = |reason: &Reason| reason.kind == ReasonKind::RolledBack;
    (0..decisions.len())
        .filter(|&window| decisions[window].reasons.iter().any(is_rollback))
        .collect()
}

/// A normal deviate (sum of twelve uniform ones).
pub fn draw_normal(generator: &mut cachemate_core::SplitMix64) -> f64 {
    (0..12).map(|_| generator.draw_unit()).sum::<f64>() - 6.0
}
