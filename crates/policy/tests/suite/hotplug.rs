//! Tests that tasks keep their caches while CPUs of other caches go offline and return.

use cachemate_core::test_support::{capabilities_fixture, last_level_caches, observation_of};
use cachemate_core::*;
use cachemate_policy::policies;
use cachemate_policy::reference_predictor::ReferencePredictor;

const WINDOW_NS: u64 = 100_000_000;

/// Do tasks of the second and third cache stay on them when the first cache loses its CPUs?
#[test]
fn tasks_keep_their_caches_when_an_earlier_cache_goes_offline() {
    let capabilities = capabilities_fixture(&[Ability::Affinity, Ability::Gangs]);
    let all_online = last_level_caches(3, 1, CacheLevel::L2, 4 << 20);
    let mut first_offline = all_online.clone();
    first_offline.cpus[0].online = false;
    let tasks: Vec<TaskSample> = (0..6).map(|id| TaskSample::new(TaskId(id), ProcessId(id))).collect();
    for name in ["random", "round-robin", "activity-vector"] {
        let mut policy = policies::build(name, "", 1).expect("a policy of the registry");
        let mut decide = |window: u64, topology: &Topology| {
            let view = View {
                topology,
                capabilities: &capabilities,
                observation: &observation_of(window, WINDOW_NS, tasks.clone()),
                profiles: &Profiles::new(),
                previous_plan: &Plan::idle(WindowLength::Time { ns: WINDOW_NS }),
                predictor: &ReferencePredictor { miss_penalty_cycles: 100.0 },
                verdicts: &(),
            };
            policy.decide(&view).plan.affinity
        };
        let before = decide(0, &all_online);
        let after = decide(1, &first_offline);
        let was_elsewhere = |task: &&TaskId| !before[*task].contains(0);
        let kept: Vec<&TaskId> = before.keys().filter(was_elsewhere).collect();
        assert_eq!(kept.len(), 4, "{name}: two tasks on each cache");
        assert!(kept.iter().all(|task| after[*task] == before[*task]), "{name}: {before:?} became {after:?}");
    }
}
