use super::*;
use cachemate_core::test_support::*;
use cachemate_core::{
    CacheLevel, CpuId, Estimate, EventCounts, Fact, FactSource, Observation, ProbeEvidence,
    ProbeResult, ProcessId, Profile, RateFacts,
};

const CPUS: u32 = 4;

/// Four CPUs on one cache, with tasks of given PCMRs, run window by window.
struct CascFixture {
    policy: Box<dyn Policy>,
    view: ViewFixture,
    window: u64,
    observed: f64,
    answered_probe: Option<ProbeId>,
}

impl CascFixture {
    fn new(parameters: &str, pcmrs: &[Option<f64>]) -> Self {
        let profile = |pcmr: &Option<f64>| {
            Profile::default().with_rates(RateFacts {
                pcmr: pcmr.map(Fact::oracle),
                ..RateFacts::default()
            })
        };

        let topology = last_level_caches(1, CPUS, CacheLevel::L2, 1 << 20);
        let profiles = pcmrs
            .iter()
            .enumerate()
            .map(|(index, pcmr)| (TaskId(index as u32), profile(pcmr)))
            .collect();
        let view = ViewFixture {
            profiles,
            ..ViewFixture::new(topology, capabilities_fixture(&[]), 0)
        };

        let policy = build(parameters, 1).unwrap();
        CascFixture {
            policy,
            view,
            window: 0,
            observed: 12.0,
            answered_probe: None,
        }
    }

    fn step(&mut self) -> Plan {
        let task = |&task: &TaskId| TaskSample {
            on_cpu_ns: vec![(CpuId(0), 1_000_000)],
            ..TaskSample::new(task, ProcessId(task.0))
        };
        let counts = EventCounts::exact([
            (CounterEvent::References(CacheLevel::L2), 100_000),
            (
                CounterEvent::Misses(CacheLevel::L2),
                (self.observed * 1_000.0) as u64,
            ),
        ]);

        let complete_result = |probe| ProbeResult {
            probe,
            evidence: ProbeEvidence::Rows(Vec::new()),
            complete: true,
            cost_ns: Vec::new(),
        };
        self.view.observation = Observation {
            shared_counts: vec![(CounterScope::Cache(CacheId(0)), counts)],
            probe_results: self
                .answered_probe
                .take()
                .map(complete_result)
                .into_iter()
                .collect(),
            ..observation_of(self.window, 10_000_000, self.view.profiles.keys().map(task))
        };
        self.window += 1;
        self.view.decide(self.policy.as_mut(), &NullPredictor).plan
    }
}

fn rows_of(plan: &Plan) -> Vec<Vec<TaskId>> {
    let rows = plan.probes.iter().filter_map(|probe| match &probe.kind {
        ProbeKind::CoRunRows { rows, .. } => Some(rows.clone()),
        _ => None,
    });
    rows.flatten().collect()
}

const KNOWN: [Option<f64>; 6] = [
    Some(2.0),
    Some(3.0),
    Some(4.0),
    Some(5.0),
    Some(40.0),
    Some(50.0),
];

/// Are n + 1 rows of n of the first n + 1 threads requested, with each thread left out once?
#[test]
fn the_first_threads_are_measured_in_rows() {
    for form in ["literal", "better"] {
        let rows = rows_of(&CascFixture::new(&format!("form = \"{form}\""), &[None; 7]).step());
        assert_eq!(rows.len(), 5);
        for left_out in 0..5 {
            assert!(
                rows.iter()
                    .any(|row| row.len() == 4 && !row.contains(&TaskId(left_out))),
                "{rows:?}"
            );
        }
    }
}

/// Are greedy threads confined to a few CPUs, whereas frugal ones may run on CPUs of every kind?
#[test]
fn greedy_threads_are_confined_to_few_cpus() {
    let plan = CascFixture::new("", &KNOWN).step();
    let cpus = |task: u32| plan.affinity[&TaskId(task)].count();
    assert!(
        cpus(5) < CPUS && cpus(5) >= 1 && cpus(0) == CPUS,
        "{:?}",
        plan.affinity
    );
    assert!(plan.probes.is_empty());
}

/// Do greedy threads get CPUs of different cores (better form) if several contexts share a core?
#[test]
fn greedy_threads_are_spread_over_cores() {
    let pcmrs = [2.0, 2.0, 2.0, 2.0, 40.0, 40.0, 40.0, 40.0].map(Some);
    let cores = |form: &str| {
        let mut fixture = CascFixture::new(&format!("form = \"{form}\"\nthreshold = 21.0"), &pcmrs);
        fixture
            .view
            .topology
            .cpus
            .iter_mut()
            .for_each(|cpu| cpu.core = cpu.id.0 / 2);
        let plan = fixture.step();
        plan.affinity[&TaskId(7)]
            .iter()
            .map(|cpu| cpu / 2)
            .collect::<Vec<u32>>()
    };
    assert_eq!(
        (cores("better"), cores("literal")),
        (vec![0, 1], vec![0, 1, 1])
    );
}

/// Does a new thread wait on the first CPU beside known threads (literal form), or get its own rows (better form)?
#[test]
fn newcomers_wait_beside_known_threads_or_get_their_own_rows() {
    let mut pcmrs = KNOWN.to_vec();
    pcmrs.push(None);
    let literal = CascFixture::new("form = \"literal\"", &pcmrs).step();
    assert_eq!(literal.affinity[&TaskId(6)].to_string(), "0");
    let measures_last_task = |probe: &ProbeRequest| matches!(&probe.kind, ProbeKind::PairedRows { task, peers, .. } if task.0 == 6 && peers.len() == 6);
    assert!(
        literal.probes.len() == 1 && measures_last_task(&literal.probes[0]),
        "{:?}",
        literal.probes
    );
    let rows = rows_of(&CascFixture::new("", &pcmrs).step());
    assert!(
        rows.len() == 5 && rows.iter().filter(|row| row.contains(&TaskId(6))).count() == 4,
        "{rows:?}"
    );
}

/// Is a thread measured again after a change of phase, and does it keep its CPUs until then?
#[test]
fn a_thread_in_a_new_phase_is_measured_and_keeps_its_cpus() {
    let mut fixture = CascFixture::new("", &KNOWN);
    let first_plan = fixture.step();
    fixture.view.profiles.insert(
        TaskId(5),
        Profile {
            phase_number: 1,
            ..Profile::default()
        },
    );
    let second_plan = fixture.step();
    assert_eq!(second_plan.affinity, first_plan.affinity);
    assert!(
        rows_of(&second_plan)
            .iter()
            .any(|row| row.contains(&TaskId(5)))
    );
}

/// Are all threads measured again if the cache's miss rate drifts, but not if it has deviated from the start?
#[test]
fn a_drifting_miss_rate_is_measured_again() {
    let mut fixture = CascFixture::new("drift_windows = 3", &KNOWN);
    fixture.observed = 60.0;
    assert!((0..20).all(|_| fixture.step().probes.is_empty()));
    fixture.observed = 20.0;
    let asking_plan = (0..4)
        .map(|_| fixture.step())
        .find(|plan| !plan.probes.is_empty());
    assert_eq!(rows_of(&asking_plan.unwrap()).len(), 5);
}

/// Are rows repeated for twice as long while estimates are uncertain, up to the longest row?
#[test]
fn uncertain_estimates_are_measured_for_longer() {
    let mut fixture = CascFixture::new("max_row_ns = 10000000", &[None; 5]);
    let probe_length = |plan: &Plan| match &plan.probes[..] {
        [
            ProbeRequest {
                id,
                kind: ProbeKind::CoRunRows { total_ns, .. },
                ..
            },
        ] => Some((*id, *total_ns)),
        _ => None,
    };

    let mut lengths = Vec::new();
    for _ in 0..8 {
        let Some((id, total_ns)) = probe_length(&fixture.step()) else {
            break;
        };
        lengths.push(total_ns);
        fixture.answered_probe = Some(id);
        for profile in fixture.view.profiles.values_mut() {
            let wide = Estimate {
                value: 10.0,
                low: -10.0,
                high: 30.0,
            };
            profile.rates.pcmr = Some(Fact::from_measurement(wide, FactSource::CoRunRows, 1));
        }
    }
    assert_eq!(lengths, [2_500_000, 5_000_000, 10_000_000]);
}
