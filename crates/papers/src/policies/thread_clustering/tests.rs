//! Tests the policy's phases and the conditions between them.

use cachemate_core::*;

use super::{Chip, ThreadToPlace};
use crate::policies::PAPERS;
use crate::reference_predictor::ReferencePredictor;

/// A topology of two chips of two cores with two contexts each.
fn topology_fixture() -> Topology {
    let mut topology = test_support::last_level_caches(2, 4, CacheLevel::L2, 2 << 20);
    for cpu in &mut topology.cpus {
        (cpu.core, cpu.package, cpu.hertz) = (cpu.id.0 / 2, cpu.id.0 / 4, Some(1_500_000_000));
    }
    topology
}

fn capabilities_fixture(samples: bool) -> Capabilities {
    let support = match samples {
        true => Support::Yes { note: None },
        false => Support::No {
            reason: "no sampling here".to_string(),
            remedy: None,
        },
    };
    Capabilities {
        abilities: [(Ability::SampleAccesses, support)].into(),
        ..test_support::capabilities_fixture(&[])
    }
}

/// A policy, its machine, and its last decision.
struct ClusteringFixture {
    policy: Box<dyn Policy>,
    can_sample: bool,
    /// Answer that is delivered once, in the next window.
    next_probe_result: Option<ProbeResult>,
    /// Number of threads, from the first on, whose stalls are not counted.
    without_stalls: u32,
    /// The group of each thread, 0 or 1.
    group: fn(u32) -> u32,
    window: u64,
    view: test_support::ViewFixture,
}

impl ClusteringFixture {
    fn new(parameters: &str) -> Self {
        ClusteringFixture {
            policy: PAPERS.build("thread-clustering", parameters, 1).unwrap(),
            can_sample: true,
            next_probe_result: None,
            without_stalls: 0,
            group: |id| id / 2 % 2,
            window: 0,
            view: test_support::ViewFixture::new(topology_fixture(), capabilities_fixture(true), 0),
        }
    }

    /// Runs one window with eight threads, alternately on the two chips, that stall on remote caches for this
    /// percentage of their cycles. If `sampled` is set, threads 0, 1, 4 and 5 share data, and so do 2, 3, 6 and 7.
    fn step(&mut self, remote_percent: u64, sampled: Option<u32>) -> Decision {
        self.window += 1;
        let mut tasks: Vec<TaskSample> =
            (0..8).map(|id| task_fixture(id, remote_percent)).collect();
        for task in tasks.iter_mut().take(self.without_stalls as usize) {
            task.counts
                .0
                .retain(|reading| !matches!(reading.event, CounterEvent::StallCycles(_)));
        }

        let probe_results = sampled
            .iter()
            .map(|&probe| sample_probe_result(probe))
            .chain(self.next_probe_result.take())
            .collect();
        let observation = test_support::observation_of(self.window, 1_000_000_000, tasks);
        self.view.observation = Observation {
            probe_results,
            ..observation
        };

        let counter = |entry: u32, id: u32| if entry % 2 == (self.group)(id) { 9 } else { 0 };
        let map = |id: u32| {
            sampled.map(|_| SharingMap {
                counters: (0..256).map(|entry| counter(entry, id)).collect(),
                machine_wide: false,
            })
        };
        let fact = |id| map(id).map(|map| Fact::new(map, FactSource::AccessSamples, 0));
        let sharing = |id| SharingFacts {
            map: fact(id),
            ..SharingFacts::default()
        };
        let profile = |id| {
            (
                TaskId(id),
                Profile {
                    sharing: sharing(id),
                    ..Profile::default()
                },
            )
        };
        self.view.profiles = (0..8).map(profile).collect();
        self.view.capabilities = capabilities_fixture(self.can_sample);
        self.view.decide(
            self.policy.as_mut(),
            &ReferencePredictor {
                miss_penalty_cycles: 200.0,
            },
        )
    }
}

fn task_fixture(id: u32, remote_percent: u64) -> TaskSample {
    let event_counts = [
        (CounterEvent::Cycles, 1_000_000),
        (CounterEvent::RemoteCacheHits, 1_000 * remote_percent),
        (
            CounterEvent::StallCycles(StallCause::RemoteCache),
            10_000 * remote_percent,
        ),
    ];
    TaskSample {
        name: "server".to_string(),
        cpu: Some(CpuId(id % 2 * 4)),
        on_cpu_ns: vec![(CpuId(id % 2 * 4), 1_000_000_000)],
        counts: EventCounts::exact(event_counts),
        ..TaskSample::new(TaskId(id), ProcessId(0))
    }
}

fn sample_probe_result(probe: u32) -> ProbeResult {
    let sample = |id: u32| AccessSample {
        task: TaskId(id % 8),
        virtual_line: 1,
        physical_line: None,
        source: DataSource::RemoteCache,
        latency_cycles: None,
        at_ns: 0,
    };
    let samples = (0..4000).map(sample).collect();
    let evidence = ProbeEvidence::Samples {
        sample_period: 10,
        events: 40_000,
        line_bytes: 128,
        samples,
    };

    ProbeResult {
        probe: ProbeId(probe),
        evidence,
        complete: true,
        cost_ns: vec![(None, 8_000_000)],
    }
}

/// Is nothing sampled below the activation threshold, or on a machine that cannot sample?
#[test]
fn nothing_is_sampled_below_the_threshold() {
    let mut fixture = ClusteringFixture::new("");
    (0..5).for_each(|_| assert!(fixture.step(19, None).plan.probes.is_empty()));
    let mut lower = ClusteringFixture::new("activation_share = 0.05");
    assert_eq!(lower.step(6, None).plan.probes.len(), 1);
    let mut blind_fixture = ClusteringFixture::new("");
    blind_fixture.can_sample = false;
    let decision = blind_fixture.step(50, None);
    assert!(decision.plan.probes.is_empty());
    assert_eq!(
        decision.reasons[0].text,
        "no threads are clustered: accesses cannot be sampled, no sampling here"
    );
    assert_eq!(
        decision.reasons[0].tasks.len(),
        8,
        "the status of each task shows it"
    );
}

/// Are threads without a counter reading left out of the stall breakdown, rather than counted as never stalled?
#[test]
fn threads_without_a_reading_do_not_dilute_the_breakdown() {
    let mut fixture = ClusteringFixture::new("");
    fixture.without_stalls = 4;
    assert_eq!(fixture.step(21, None).plan.probes.len(), 1);
    let mut fixture = ClusteringFixture::new("");
    fixture.without_stalls = 4;
    assert!(fixture.step(19, None).plan.probes.is_empty());
}

/// If stalls are not counted, do remote hits start a round, by their assumed cost?
#[test]
fn remote_hits_start_a_round_if_stalls_are_not_counted() {
    let begins = |parameters: &str, percent: u64| {
        let mut fixture = ClusteringFixture::new(parameters);
        fixture.without_stalls = 8;
        fixture.step(percent, None).plan.probes.len() == 1
    };
    // There are a thousand hits in a million cycles: three tenths of the cycles, at 300 per hit.
    assert!(begins("", 1) && !begins("", 0));
    assert!(!begins("remote_hit_cycles = 100.0", 1) && begins("remote_hit_cycles = 100.0", 2));
}

/// Does a round end with each cluster on one chip, and does this stay so without further evidence?
#[test]
fn sharing_threads_end_up_on_one_chip() {
    for method in ["one-pass", "co-clusters"] {
        let mut fixture = ClusteringFixture::new(&format!("method = \"{method}\""));
        assert_eq!(fixture.step(30, None).plan.probes.len(), 1);
        let decision = fixture.step(30, Some(0));
        let affinity = &decision.plan.affinity;
        let chip = |id: u32| affinity[&TaskId(id)].to_string();
        assert_eq!(affinity.len(), 8, "{method}");
        assert!(
            [1, 4, 5].into_iter().all(|id| chip(id) == chip(0)),
            "{method}: {affinity:?}"
        );
        assert!(
            [3, 6, 7].into_iter().all(|id| chip(id) == chip(2)) && chip(0) != chip(2),
            "{method}: {affinity:?}"
        );
        assert_eq!(decision.reasons.len(), 3, "{:?}", decision.reasons);
        let rate = "4000 samples of remote accesses were taken: 1 in 10 of 40000 counted accesses was sampled";
        assert_eq!(
            decision.reasons[2].text, rate,
            "the rate of the machine, not the requested one"
        );
        assert_eq!(fixture.step(1, None).plan.affinity, *affinity);
    }
}

/// With `spread`, does every thread get its own context, cores first?
#[test]
fn spread_gives_every_thread_a_context() {
    let mut fixture = ClusteringFixture::new("within_chip = \"spread\"");
    fixture.step(30, None);
    let affinity = fixture.step(30, Some(0)).plan.affinity;
    let mut cpus: Vec<String> = affinity.values().map(ToString::to_string).collect();
    cpus.sort_unstable();
    assert_eq!(cpus, ["0", "1", "2", "3", "4", "5", "6", "7"]);
    let core = |id: u32| affinity[&TaskId(id)].first().unwrap() / 2;
    assert_ne!(
        core(0),
        core(1),
        "the first two of a cluster are on different cores"
    );
}

/// Is the sampling rate the one that the overhead allows?
#[test]
fn the_sampling_rate_is_the_one_the_overhead_allows() {
    // Eight threads make 30 000 remote accesses each in 8 CPU-seconds, which would take 6 % of the time at 2 µs per
    // sample.
    let one_in = |parameters: &str| match ClusteringFixture::new(parameters)
        .step(30, None)
        .plan
        .probes[0]
        .kind
    {
        ProbeKind::AccessSamples {
            sample_period: one_in,
            ..
        } => one_in,
        _ => 0,
    };

    assert_eq!(
        (
            one_in(""),
            one_in("overhead_share = 0.01"),
            one_in("one_in = 17")
        ),
        (3, 10, 17)
    );
}

/// During a round, does the sampling rate follow the overhead, with the same probe and for the remaining samples?
#[test]
fn the_rate_follows_the_overhead_while_a_round_lasts() {
    let mut fixture = ClusteringFixture::new("samples = 10000");
    let first = fixture.step(30, None).plan.probes[0].clone();
    assert_eq!(
        fixture.step(30, None).plan.probes[0],
        first,
        "nothing has been sampled yet"
    );
    // Sampling 1 in 3 took 7.5 % of this window and 3.75 % of both; the target is 3.56 %, which leaves 3.36 % from now
    // on.
    let probe_result = sample_probe_result(0);
    fixture.next_probe_result = Some(ProbeResult {
        complete: false,
        cost_ns: vec![(None, 600_000_000)],
        ..probe_result
    });
    let later = fixture.step(30, None).plan.probes[0].clone();
    assert_eq!(later.id, first.id);
    match later.kind {
        ProbeKind::AccessSamples {
            sample_period: one_in,
            max_samples: at_most,
            ..
        } => {
            assert_eq!((one_in, at_most), (7, 6000))
        }
        other => panic!("{other:?}"),
    }
}

/// Is a round abandoned once the stalls have ceased, so that the next one has its own filter?
#[test]
fn a_round_is_abandoned_once_the_stalls_are_gone() {
    let mut fixture = ClusteringFixture::new("");
    let first = fixture.step(30, None).plan.probes[0].id;
    assert_eq!(
        fixture.step(11, None).plan.probes[0].id,
        first,
        "above half of the activation share it goes on"
    );
    assert!(fixture.step(9, None).plan.probes.is_empty());
    assert_ne!(fixture.step(30, None).plan.probes[0].id, first);
}

/// Does no round start in the window in which moved threads fetch their private data?
#[test]
fn the_window_after_a_move_starts_no_round() {
    let mut fixture = ClusteringFixture::new("");
    fixture.step(30, None);
    assert_eq!(fixture.step(30, Some(0)).plan.affinity.len(), 8);
    assert!(fixture.step(90, None).plan.probes.is_empty());
    assert_eq!(fixture.step(30, None).plan.probes.len(), 1);
}

/// Are clusters that no balanced placement can accommodate reported, without moving any thread?
#[test]
fn clusters_that_unbalance_the_chips_are_reported() {
    let mut fixture = ClusteringFixture::new("");
    fixture.group = |id| id / 6;
    fixture.step(30, None);
    let decision = fixture.step(30, Some(0));
    assert!(decision.plan.affinity.is_empty());
    let task_counts: Vec<usize> = decision
        .reasons
        .iter()
        .map(|reason| reason.tasks.len())
        .collect();
    assert_eq!(task_counts, [6, 2, 0], "{:?}", decision.reasons);
    assert!(
        decision.reasons[..2]
            .iter()
            .all(|reason| reason.text.contains("not placed together"))
    );
}

/// Do rounds without result become ever rarer, until the stalls grow?
#[test]
fn rounds_without_result_become_rarer_until_stalls_grow() {
    let mut fixture = ClusteringFixture::new("");
    let mut began = Vec::new();
    let mut probe = None;
    for window in 0..40 {
        // The answers contain no counters, so no threads are similar.
        fixture.step(25, None);
        let now = fixture
            .view
            .previous_plan
            .probes
            .first()
            .map(|probe| probe.id);
        if now.is_some() && now != probe {
            began.push(window);
        }
        probe = now;
    }
    let gaps: Vec<i32> = began.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.windows(2).all(|pair| pair[1] >= pair[0]), "{gaps:?}");

    assert!(
        began.len() >= 2,
        "a round that times out is tried again: {began:?}"
    );
}

/// Are invalid parameters rejected by name?
#[test]
fn invalid_parameters_are_rejected_by_name() {
    for (text, name) in [
        ("activation_share = 2.0", "activation_share"),
        ("samples = 0", "samples"),
        ("method = \"k\"", "one-pass"),
        ("breakdown_share = 0.04", "breakdown_share"),
    ] {
        let error = PAPERS
            .build("thread-clustering", text, 1)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(name), "{error}");
    }
}

/// Is the removed stall that of threads which join their partners, averaged over all threads?
#[test]
fn the_removed_stall_is_that_of_joined_partners() {
    let placing = super::ClusterAssignmentInput {
        tasks: (0..4).map(TaskId).collect(),
        threads: (0..4)
            .map(|id| ThreadToPlace {
                chip: Some(id % 2),
                is_fixed: false,
            })
            .collect(),
        clusters: vec![vec![0, 1]],
        unclustered_threads: vec![2, 3],
        chips: vec![
            Chip {
                cpu_count: 4,
                fixed_threads: 0
            };
            2
        ],
    };

    let mut fixture =
        test_support::ViewFixture::new(topology_fixture(), capabilities_fixture(true), 0);
    fixture.observation.tasks = (0..4).map(|id| task_fixture(id, 20)).collect();
    // Two of four threads lose a fifth of their cycles to each other's chip.
    let removed = placing.removed_stall_share(
        &placing.assign(0.25),
        &fixture.view(&test_support::NullPredictor),
        300.0,
    );
    assert!((removed - 0.1).abs() < 1e-9, "{removed}");
}
