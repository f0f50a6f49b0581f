use super::*;
use crate::reference_predictor::ReferencePredictor;
use cachemate_core::test_support::*;
use cachemate_core::*;

fn task_fixture(id: u32) -> TaskSample {
    TaskSample {
        on_cpu_ns: vec![(CpuId(id % 2), 500_000_000)],
        ..TaskSample::new(TaskId(id), ProcessId(id))
    }
}

/// A host that answers every probe in the next window, with given intensities, sensitivities and round trips.
struct ProbedHost {
    policy: Box<dyn Policy>,
    truth: Vec<(f64, Option<f64>)>,
    round_trip_ns: f64,
    view: ViewFixture,
    window: u64,
    penalty_cycles: f64,
    /// Processor time of an intensity probe and of a sensitivity probe, each with the time for which it keeps the task
    /// off its CPU.
    costs_ns: [(u64, u64); 2],
}

impl ProbedHost {
    fn new(truth: &[(f64, Option<f64>)], round_trip_ns: f64) -> Self {
        let mut topology = last_level_caches(1, 2, CacheLevel::L3, 32 << 20);
        topology
            .cpus
            .iter_mut()
            .for_each(|cpu| cpu.hertz = Some(2_000_000_000));
        ProbedHost {
            policy: build("", 1).unwrap(),
            truth: truth.to_vec(),
            round_trip_ns,
            view: ViewFixture::new(topology, capabilities_fixture(&[]), 0),
            window: 0,
            penalty_cycles: 200.0,
            costs_ns: [(0, 0); 2],
        }
    }

    fn answer_probe(&mut self, probe: &ProbeRequest) -> ProbeResult {
        let exact = |value| Some(Fact::oracle(value));

        let evidence = match probe.kind {
            ProbeKind::PingPong { cpus } => ProbeEvidence::PingPong {
                cpus,
                round_trip_ns: self.round_trip_ns,
            },
            ProbeKind::PrimeProbe { task, .. } => {
                self.view
                    .profiles
                    .entry(task)
                    .or_default()
                    .contention
                    .intensity = exact(self.truth[task.0 as usize].0);

                ProbeEvidence::PrimeProbe {
                    task,
                    buffer_bytes: 1,
                    wait_ns: 1,
                    samples: Vec::new(),
                }
            }
            ProbeKind::Neighbor { task, neighbor } => {
                let sensitivity = self.truth[task.0 as usize].1;
                self.view
                    .profiles
                    .entry(task)
                    .or_default()
                    .contention
                    .sensitivity = sensitivity.map(Fact::oracle);

                ProbeEvidence::NeighborSlowdown {
                    task,
                    neighbor,
                    neighbor_alone_ns: 1.0,
                    neighbor_corun_ns: 1.0,
                    task_alone_rate: None,
                    task_corun_rate: None,
                    rate_event: None,
                }
            }
            _ => panic!("unexpected {probe:?}"),
        };

        let cost_ns = match probe.kind {
            ProbeKind::PrimeProbe { task, .. } => {
                vec![(None, self.costs_ns[0].0), (Some(task), self.costs_ns[0].1)]
            }
            ProbeKind::Neighbor { task, .. } => {
                vec![(None, self.costs_ns[1].0), (Some(task), self.costs_ns[1].1)]
            }
            _ => Vec::new(),
        };
        ProbeResult {
            probe: probe.id,
            evidence,
            complete: true,
            cost_ns,
        }
    }

    fn step(&mut self) -> Decision {
        let probes = self.view.previous_plan.probes.clone();
        let probe_results = probes
            .iter()
            .map(|probe| self.answer_probe(probe))
            .collect();
        let tasks = (0..self.truth.len() as u32).map(task_fixture);
        self.view.observation = Observation {
            probe_results,
            ..observation_of(self.window, 1_000_000_000, tasks)
        };
        self.window += 1;
        let predictor = ReferencePredictor {
            miss_penalty_cycles: self.penalty_cycles,
        };
        self.view.decide(self.policy.as_mut(), &predictor)
    }

    /// Gives each task a curve that falls at this size in bytes.
    fn knows_footprints(&mut self, footprints: &[(u32, u64)]) {
        for &(task, bytes) in footprints {
            let curve = vec![
                (bytes / 2, Estimate::exact(40.0)),
                (bytes, Estimate::exact(0.0)),
            ];
            let profile = self.view.profiles.entry(TaskId(task)).or_default();
            *profile =
                std::mem::take(profile).with_misses(CacheLevel::L3, curve, FactSource::Oracle);
        }
    }

    fn gangs_after(&mut self, windows: usize) -> Vec<Vec<u32>> {
        (0..windows).for_each(|_| drop(self.step()));
        let gangs = self
            .view
            .previous_plan
            .gangs
            .iter()
            .flat_map(|schedule| &schedule.gangs);
        let mut gangs: Vec<Vec<u32>> = gangs
            .map(|gang| gang.members.iter().map(|(task, _)| task.0).collect())
            .collect();
        gangs.sort();
        gangs
    }
}

/// Two pointer chases and two streams, in order of arrival; 0 and 2 are the victims.
const MIX: [(f64, Option<f64>); 4] = [
    (0.05, Some(2.0)),
    (0.7, Some(0.1)),
    (0.05, Some(2.0)),
    (0.7, Some(0.1)),
];

/// Are victims and aggressors in different gangs once all have been probed?
#[test]
fn victims_and_aggressors_are_separated_in_time() {
    let mut host = ProbedHost::new(&MIX, 60.0);
    assert_eq!(
        host.gangs_after(3),
        Vec::<Vec<u32>>::new(),
        "not before all values are known"
    );
    assert_eq!(host.gangs_after(20), [vec![0, 2], vec![1, 3]]);
}

/// Do turns follow from the footprints if these are known, last 50 ms if not, and have the configured length if there
/// is one?
#[test]
fn turns_follow_the_law_if_footprints_are_known() {
    let slice_ns = |host: &mut ProbedHost| {
        assert_eq!(host.gangs_after(20).len(), 2);
        host.view.previous_plan.gangs[0].slice_ns
    };
    assert_eq!(slice_ns(&mut ProbedHost::new(&MIX, 60.0)), 50_000_000);
    let mut host = ProbedHost::new(&MIX, 60.0);
    // A refill of 24 MiB at 100 ns a line takes 39 ms. Four times that exceeds the maximum wait, but shorter turns pay
    // off as well.
    host.knows_footprints(&[(0, 24 << 20), (2, 1 << 20)]);
    let by_law = slice_ns(&mut host);
    assert!((100_000_000..=225_000_000).contains(&by_law), "{by_law}");
    let mut stated = ProbedHost::new(&MIX, 60.0);
    stated.policy = build("slice_ns = 20_000_000", 1).unwrap();
    stated.knows_footprints(&[(0, 24 << 20)]);
    assert_eq!(slice_ns(&mut stated), 20_000_000);
}

/// If turns that pay off would make a task wait too long, are gangs rejected with the reason?
#[test]
fn gangs_are_rejected_if_turns_pay_off_too_late() {
    let mut host = ProbedHost::new(&MIX, 60.0);
    host.policy = build("max_wait_ns = 120_000_000", 1).unwrap();
    host.knows_footprints(&[(0, 24 << 20), (2, 24 << 20)]);
    assert!(host.gangs_after(20).is_empty());
    let reasons = host.step().reasons;
    assert!(
        reasons.iter().any(
            |reason| reason.text.contains("turns pay off from") && reason.text.contains("5 ms")
        ),
        "{reasons:?}"
    );
}

/// Does the initial profiling end if probes cost as much as on a live host?
///
/// There, a probe takes four brackets of six samples of a few tens of milliseconds, or five phases of 150 ms, in one of
/// which the task is kept off its CPU.
#[test]
fn initial_profiling_ends_at_the_costs_of_a_host() {
    let mut host = ProbedHost::new(&MIX, 60.0);
    host.costs_ns = [(1_100_000_000, 120_000_000), (900_000_000, 150_000_000)];
    assert_eq!(host.gangs_after(20), [vec![0, 2], vec![1, 3]]);
}

/// If CPUs share no cache, is nothing changed, and are gangs dissolved when CPUs stop sharing?
#[test]
fn nothing_changes_without_a_shared_cache() {
    let mut host = ProbedHost::new(&MIX, 330.0);
    assert!(host.gangs_after(20).is_empty() && host.view.previous_plan.affinity.is_empty());
    let mut host = ProbedHost::new(&MIX, 60.0);
    assert_eq!(host.gangs_after(25).len(), 2);
    host.round_trip_ns = 330.0;
    assert_eq!(
        host.gangs_after(1).len(),
        2,
        "a single far answer decides nothing"
    );
    assert!(host.gangs_after(4).is_empty());
    host.round_trip_ns = 60.0;
    assert_eq!(
        host.gangs_after(4).len(),
        2,
        "probed values are still known"
    );
}

/// Are quiet programs not moved, and programs of unknown sensitivity not counted as slowed down?
#[test]
fn quiet_programs_stay_and_unknown_ones_do_not_count_as_slowed() {
    assert!(
        ProbedHost::new(&[(0.02, Some(0.1)); 4], 60.0)
            .gangs_after(30)
            .is_empty()
    );
    assert!(
        ProbedHost::new(&[(0.7, None); 4], 60.0)
            .gangs_after(30)
            .is_empty()
    );
    assert!(
        ProbedHost::new(&MIX[..2], 60.0).gangs_after(30).is_empty(),
        "a CPU for each"
    );
}

/// Is a number of samples rejected that gives no intensity?
#[test]
fn too_few_samples_are_rejected() {
    let refused = build("samples = 2", 1).err().expect("too few").to_string();
    assert!(
        refused.contains("samples") && refused.contains("4 or more"),
        "{refused}"
    );
    build("samples = 4", 1).unwrap();
}
