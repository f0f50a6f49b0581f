//! Tests that tasks keep their caches while CPUs of other caches go offline and return.

use cachemate_core::test_support::{
    NullPredictor, ViewFixture, capabilities_fixture, last_level_caches,
};
use cachemate_core::*;
use cachemate_papers::policies::PAPERS;

/// Do tasks of the second and third cache stay on them when the first cache loses its CPUs?
#[test]
fn tasks_keep_their_caches_when_an_earlier_cache_goes_offline() {
    for name in ["random", "round-robin", "activity-vector"] {
        let mut policy = PAPERS.build(name, "", 1).expect("a policy of the registry");
        let capabilities = capabilities_fixture(&[Ability::Affinity, Ability::Gangs]);
        let mut fixture = ViewFixture::new(
            last_level_caches(3, 1, CacheLevel::L2, 4 << 20),
            capabilities,
            6,
        );
        let before = policy.decide(&fixture.view(&NullPredictor)).plan.affinity;
        fixture.topology.cpus[0].online = false;
        fixture.observation.window = 1;
        let after = policy.decide(&fixture.view(&NullPredictor)).plan.affinity;
        let was_elsewhere = |task: &&TaskId| !before[*task].contains(0);
        let kept: Vec<&TaskId> = before.keys().filter(was_elsewhere).collect();
        assert_eq!(kept.len(), 4, "{name}: two tasks on each cache");
        assert!(
            kept.iter().all(|task| after[*task] == before[*task]),
            "{name}: {before:?} became {after:?}"
        );
    }
}
