//! Tests whether the guard returns threads to their caches on a kernel that leaves them in place when an affinity is
//! widened.

use std::collections::BTreeMap;

use super::*;

/// Placement of four programs: an affinity moves them, and without one they stay in place. Two victims on one cache and
/// two streams on the other run at full speed; any other placement halves the speed of the victims.
struct StickyKernel {
    cpus: BTreeMap<u32, u32>,
}

impl StickyKernel {
    fn new() -> Self {
        StickyKernel {
            cpus: (0..4).map(|id| (id, id)).collect(),
        }
    }

    fn run_window(&mut self, plan: &Plan) -> Vec<TaskSample> {
        for (id, cpu) in &mut self.cpus {
            let pinned_cpus = plan
                .affinity
                .get(&TaskId(*id))
                .filter(|cpus| !cpus.contains(*cpu));
            *cpu = pinned_cpus
                .and_then(|cpus| cpus.iter().next())
                .unwrap_or(*cpu);
        }
        let cache = |id: u32| self.cpus[&id] / 2;
        let is_separated = cache(0) == cache(1) && cache(2) == cache(3) && cache(0) != cache(2);
        let work = |id: u32| if id < 2 && !is_separated { 50.0 } else { 100.0 };
        let sample = |id: u32| TaskSample {
            on_cpu_ns: vec![(CpuId(self.cpus[&id]), SECOND_NS)],
            ..program_sample(id, None, work(id))
        };
        (0..4).map(sample).collect()
    }
}

/// Is a placement undone if only affinities move threads, and are all tasks unpinned afterwards?
#[test]
fn a_placement_is_undone_if_only_affinities_move_threads() {
    let mixed = pinned_plan(&[(0, 0), (1, 2), (2, 1), (3, 3)]);
    let policy = ScriptedPolicy(|view: &View<'_>| {
        if view.observation.window >= 10 {
            mixed.clone()
        } else {
            idle_plan()
        }
    });

    let mut kernel = StickyKernel::new();
    let mut cpus_by_window = Vec::new();
    let decisions = run(policy, GuardConfig::default(), 60, |_, plan| {
        let observation = kernel.run_window(plan);
        cpus_by_window.push(kernel.cpus.clone());
        observation
    });
    let rolled_back = rollback_windows(&decisions)[0];
    let cache_of = |cpu_by_task: &BTreeMap<u32, u32>| {
        cpu_by_task
            .values()
            .map(|cpu| cpu / 2)
            .collect::<Vec<u32>>()
    };
    assert_eq!(
        cache_of(&cpus_by_window[rolled_back]),
        [0, 1, 0, 1],
        "the plan was in force"
    );
    for window in [rolled_back + 1, rolled_back + 5, 59] {
        assert_eq!(
            cache_of(&cpus_by_window[window]),
            [0, 0, 1, 1],
            "window {window}"
        );
    }
    assert_eq!(decisions[rolled_back].plan.affinity.len(), 4);
    assert!(
        decisions[rolled_back + 3..]
            .iter()
            .all(|decision| decision.plan.affinity.is_empty()),
        "free again"
    );
    assert_eq!(
        rollback_windows(&decisions).len(),
        1,
        "temporary pins are no plan to be judged"
    );
    assert!(changes_without_reason(&decisions[rolled_back..]).is_empty());
}
