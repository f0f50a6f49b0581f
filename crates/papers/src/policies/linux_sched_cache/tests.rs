//! Tests each rule of the kernel separately, on two caches of four CPUs.

use cachemate_core::test_support::*;
use cachemate_core::{Ability, CacheLevel, CpuId, TaskId};

use super::*;

const WINDOW_NS: u64 = 100_000_000;

struct SchedCacheFixture {
    policy: Box<dyn Policy>,
    view: ViewFixture,
    window: u64,
}

impl SchedCacheFixture {
    fn new(parameters: &str) -> Self {
        let topology = last_level_caches(2, 4, CacheLevel::L3, 8 << 20);
        let view = ViewFixture::new(topology, capabilities_fixture(&[Ability::Affinity]), 0);
        SchedCacheFixture {
            policy: build(parameters, 0).unwrap(),
            view,
            window: 0,
        }
    }

    /// Runs one window in which threads run as given by (process, CPU, percent of the window). Returns the affinity of
    /// each thread as a cache.
    fn step(&mut self, threads: &[(u32, u32, u64)]) -> Vec<Option<u32>> {
        let tasks = threads
            .iter()
            .enumerate()
            .map(|(id, &(process, cpu, percent))| TaskSample {
                on_cpu_ns: vec![(CpuId(cpu), percent * WINDOW_NS / 100)],
                ..TaskSample::new(TaskId(id as u32), ProcessId(process))
            });
        self.decide(tasks.collect())
    }

    fn decide(&mut self, tasks: Vec<TaskSample>) -> Vec<Option<u32>> {
        self.view.observation = observation_of(self.window, WINDOW_NS, tasks);
        self.window += 1;
        let affinity = self
            .view
            .decide(self.policy.as_mut(), &NullPredictor)
            .plan
            .affinity;

        let caches = &self.view.topology.caches;
        let cache_of = |cpus: &CpuSet| {
            caches
                .iter()
                .find(|cache| cache.cpus == *cpus)
                .map(|cache| cache.id.0)
        };
        self.view
            .observation
            .tasks
            .iter()
            .map(|task| affinity.get(&task.task).and_then(cache_of))
            .collect()
    }
}

/// Are the threads of each process gathered on the cache where that process ran most?
#[test]
fn threads_are_gathered_where_their_process_ran_most() {
    let threads = [
        (1, 0, 40),
        (1, 1, 40),
        (1, 4, 30),
        (2, 5, 40),
        (2, 6, 40),
        (2, 2, 30),
    ];
    assert_eq!(
        SchedCacheFixture::new("").step(&threads),
        [0, 0, 0, 1, 1, 1].map(Some)
    );
}

/// Does another cache replace the preferred one only with more than twice its run time?
#[test]
fn twice_the_run_time_moves_a_process() {
    let mut fixture = SchedCacheFixture::new("");
    assert_eq!(fixture.step(&[(1, 0, 30), (1, 4, 20)]), [Some(0); 2]);
    assert_eq!(fixture.step(&[(1, 0, 20), (1, 4, 38)]), [Some(0); 2]);
    assert_eq!(fixture.step(&[(1, 0, 10), (1, 4, 40)]), [Some(1); 2]);
}

/// Is a process not gathered if it has one thread, or more running threads than the cache has CPUs?
#[test]
fn processes_of_one_or_too_many_threads_are_not_gathered() {
    assert_eq!(
        SchedCacheFixture::new("").step(&[(1, 0, 50), (2, 4, 50)]),
        [None; 2]
    );
    let many: Vec<(u32, u32, u64)> = (0..5).map(|cpu| (1, cpu, 100)).collect();
    assert_eq!(SchedCacheFixture::new("").step(&many), [None; 5]);
    assert!(
        SchedCacheFixture::new("aggr_tolerance = 100").step(&many)[..4]
            .iter()
            .all(|index| *index == Some(0))
    );
    assert_eq!(
        SchedCacheFixture::new("aggr_tolerance = 0").step(&[(1, 0, 40), (1, 4, 30)]),
        [None; 2]
    );
}

/// Does a footprint larger than the cache count with two memory nodes, but not with one?
#[test]
fn a_large_footprint_counts_with_numa_balancing() {
    let tasks = || {
        let task = |id: u32, cpu: u32| TaskSample {
            on_cpu_ns: vec![(CpuId(cpu), 30_000_000)],
            pages_per_color: Some(vec![3 << 10]), // 12 MiB
            ..TaskSample::new(TaskId(id), ProcessId(1))
        };
        vec![task(0, 0), task(1, 1)]
    };
    let mut fixture = SchedCacheFixture::new("");
    assert_eq!(fixture.decide(tasks()), [Some(0); 2]);
    fixture
        .view
        .topology
        .cpus
        .iter_mut()
        .skip(4)
        .for_each(|cpu| cpu.memory_node = 1);
    assert_eq!(fixture.decide(tasks()), [None; 2]);
}

/// Is a thread kept off a cache that others keep busy, unless its present cache is as busy?
#[test]
fn a_full_cache_admits_no_thread() {
    // Process 1 ran most on cache 0, but the threads of process 2 use the other CPUs of that cache fully.
    let threads = [(1, 0, 60), (1, 4, 40), (2, 1, 100), (2, 2, 100), (2, 3, 60)];
    assert_eq!(
        SchedCacheFixture::new("").step(&threads)[..2],
        [Some(0), None]
    );
    let both_full = [
        (1, 0, 60),
        (1, 4, 50),
        (2, 1, 100),
        (2, 2, 100),
        (3, 5, 100),
        (3, 6, 100),
    ];
    assert_eq!(
        SchedCacheFixture::new("").step(&both_full)[..2],
        [Some(0), None]
    );
    let half_empty = [(1, 0, 60), (1, 4, 40), (2, 1, 60)];
    assert_eq!(
        SchedCacheFixture::new("").step(&half_empty)[..2],
        [Some(0), Some(0)]
    );
}

/// Is the preference forgotten after five epochs without running, and kept until then?
#[test]
fn a_preference_is_forgotten_after_five_idle_epochs() {
    let mut fixture = SchedCacheFixture::new("epoch_period_ns = 30_000_000");
    assert_eq!(fixture.step(&[(1, 0, 30), (1, 1, 30)]), [Some(0); 2]);
    assert_eq!(fixture.step(&[(1, 0, 0), (1, 1, 0)]), [Some(0); 2]);
    assert_eq!(fixture.step(&[(1, 0, 0), (1, 1, 0)]), [None; 2]);
}
