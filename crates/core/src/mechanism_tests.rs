//! Can the types express the papers' mechanisms?

use crate::test_support::*;
use crate::*;

fn sample_span(elapsed_ns: u64) -> TimeSpan {
    TimeSpan { start_ns: 0, elapsed_ns, elapsed_cycles: None }
}
fn sample_counts(misses: u64, references: u64) -> EventCounts {
    EventCounts::exact([
        (CounterEvent::References(CacheLevel::L2), references),
        (CounterEvent::Misses(CacheLevel::L2), misses),
    ])
}
fn row_interval(tasks: &[u32], elapsed_ns: u64, misses: u64) -> RowInterval {
    RowInterval {
        tasks: tasks.iter().map(|&t| TaskId(t)).collect(),
        cache: CacheId(0),
        span: sample_span(elapsed_ns),
        ended_by_task: tasks.first().map(|&t| TaskId(t)),
        cache_counts: sample_counts(misses, 100),
        task_counts: Vec::new(),
    }
}

/// Can CASC be computed from an observation: drop < 200 us, weight by length, solve?
#[test]
fn casc_can_be_computed_from_an_observation() {
    let pcmr = [2.0, 4.0, 6.0, 28.0, 30.0];
    let n = 4;
    let mut intervals = Vec::new();
    for left_out in 0..=n {
        let members: Vec<u32> = (0..=n as u32).filter(|&t| t != left_out as u32).collect();
        let mean = members.iter().map(|&t| pcmr[t as usize]).sum::<f64>() / n as f64;
        intervals.push(row_interval(&members, 100_000, 99)); // cold start: must not count
        intervals.push(row_interval(&members, 1_500_000, 0));
        intervals.last_mut().unwrap().cache_counts = sample_counts((mean * 1000.0) as u64, 100_000);
        intervals.push(intervals.last().unwrap().clone());
    }
    let rate = |left_out: u32| {
        let of_row = intervals.iter().filter(|i| !i.tasks.contains(&TaskId(left_out)) && i.span.elapsed_ns >= 200_000);
        let (sum, ns) = of_row.fold((0.0, 0.0), |(sum, ns), i| {
            let weight_ns = i.span.elapsed_ns as f64;
            let counts = &i.cache_counts;
            (
                sum + weight_ns * 100.0 * counts.get(CounterEvent::Misses(CacheLevel::L2)).unwrap()
                    / counts.get(CounterEvent::References(CacheLevel::L2)).unwrap(),
                ns + weight_ns,
            )
        });
        sum / ns
    };
    let rates: Vec<f64> = (0..=n as u32).map(rate).collect();
    let total: f64 = rates.iter().sum(); // the system's closed form: x_i = sum(rates) - n * rate_i
    for (i, want) in pcmr.iter().enumerate() {
        assert!((total - n as f64 * rates[i] - want).abs() < 0.05, "{i}");
    }
}

#[test]
fn unmeasured_events_are_absent_and_multiplexed_ones_scaled() {
    let half = EventCounts(vec![EventCount { event: CounterEvent::Instructions, count: 10, enabled_share: 0.5 }]);
    assert_eq!(half.get(CounterEvent::Instructions), Some(20.0));
    assert_eq!(half.get(CounterEvent::Cycles), None);
    let never_enabled = EventCounts(vec![EventCount { event: CounterEvent::Cycles, count: 0, enabled_share: 0.0 }]);
    assert_eq!(never_enabled.get(CounterEvent::Cycles), None);
}

/// Can one plan contain every mechanism of the papers at once?
#[test]
fn one_plan_can_contain_every_mechanism_of_the_papers() {
    let (a, b, c) = (TaskId(0), TaskId(1), TaskId(2));
    let gang = |t| Gang { members: vec![(t, None)], slices: 1 };
    let probe = |id, probe_kind| ProbeRequest { id: ProbeId(id), kind: probe_kind, budget_ns: 1_000_000_000 };
    let mut plan = Plan::idle(WindowLength::Cycles { cycles: 1_000_000_000 });
    plan.affinity.insert(a, (0..4).collect());
    plan.weights.insert(b, 2.0);
    plan.gangs.push(GangSchedule { cpus: (4..8).collect(), slice_ns: 10_000_000, gangs: vec![gang(b), gang(c)] });
    plan.shares.push(CacheShare {
        group: GroupId(0),
        members: vec![ShareMember::Process(ProcessId(0))],
        cache: CacheId(0),
        units: Units::Colors { allowed: (0..300).collect(), migration: PageMigration::HotFirst },
    });
    plan.shares.push(CacheShare {
        group: GroupId(1),
        members: vec![ShareMember::Task(b), ShareMember::Task(c)],
        cache: CacheId(1),
        units: Units::Ways { mask: (0..3).collect() },
    });
    plan.penalties.push(CoRunPenalty { tasks: (b, c), penalty: 0.4 });
    plan.probes = vec![
        probe(
            0,
            ProbeKind::CoRunRows {
                cache: CacheId(0),
                rows: vec![vec![a, b], vec![a, c], vec![b, c]],
                total_ns: 2_000_000,
                settle_ns: 500_000,
                boost: true,
            },
        ),
        probe(1, ProbeKind::PairedRows { cache: CacheId(0), task: c, peers: vec![a, b], total_ns: 2_000_000 }),
        probe(2, ProbeKind::MissTrace { task: a, entries: 160_000, includes_code: false }),
        probe(
            3,
            ProbeKind::AccessSamples {
                processes: vec![ProcessId(0)],
                sample_period: 10,
                remote_only: true,
                max_samples: 1_000_000,
            },
        ),
        probe(4, ProbeKind::ReuseTimes { task: a, locations: 4 }),
        probe(5, ProbeKind::SuperSets { tasks: vec![a, b], level: CacheLevel::L2, super_sets: 64 }),
        probe(6, ProbeKind::Neighbor { task: a, neighbor: Neighbor::Pirate { footprint_bytes: 8 << 20 } }),
        probe(7, ProbeKind::PingPong { cpus: (CpuId(0), CpuId(1)) }),
    ];
    assert_eq!(plan.shares[0].units, Units::Colors { allowed: (0..300).collect(), migration: PageMigration::HotFirst });
    assert_eq!((0..300).collect::<IndexSet>().count(), 300);
    assert_eq!(plan, plan.clone());
}

struct Canned(
    std::vec::IntoIter<(Observation, Plan, AppliedPlan)>,
    Option<(Plan, AppliedPlan)>,
    Topology,
    Capabilities,
);
impl Machine for Canned {
    fn topology(&self) -> &Topology {
        &self.2
    }
    fn capabilities(&self) -> &Capabilities {
        &self.3
    }
    fn observe(&mut self) -> Result<Option<Observation>, MachineError> {
        let Some((observation, plan, applied)) = self.0.next() else { return Ok(None) };
        self.1 = Some((plan, applied));
        Ok(Some(observation))
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        let (recorded, applied) = self.1.take().ok_or_else(|| MachineError("apply before observe".into()))?;
        if *plan == recorded {
            return Ok(applied);
        }
        let message = "the recorded run did something else here".to_string();
        let refused = vec![RefusedItem { item: PlanItem::Plan, reason: RefusalReason::NotRecorded, message }];
        Ok(AppliedPlan { refused, ..applied })
    }
}
struct KeepPlanPolicy;
impl Policy for KeepPlanPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        Decision::new(view.previous_plan.clone(), Vec::new())
    }
}

/// Does a replay report that the policy decides differently from the recorded one? Is a slow action observed as
/// pending?
#[test]
fn a_replay_reports_divergence_and_slow_actions_stay_pending() {
    let plan = Plan::idle(WindowLength::Time { ns: 1_000_000_000 });
    let pending_move = |done| AppliedPlan {
        pending: vec![PendingItem { item: PlanItem::Share(GroupId(0), CacheId(0)), done, total: Some(1_000) }],
        ..AppliedPlan::default()
    };
    let observation = |window, in_force| Observation {
        window,
        span: sample_span(1_000_000_000),
        end_reason: WindowEnd::Elapsed,
        tasks: Vec::new(),
        shared_counts: vec![(CounterScope::Cache(CacheId(0)), EventCounts::default())],
        probe_results: vec![ProbeResult {
            probe: ProbeId(0),
            evidence: ProbeEvidence::Rows(vec![row_interval(&[0, 1], 300_000, 5)]),
            complete: false,
            cost_ns: vec![(None, 9)],
        }],
        applied: in_force,
    };
    let other_plan = Plan::idle(WindowLength::Time { ns: 5 });
    let recorded_windows = vec![
        (observation(0, AppliedPlan::default()), plan.clone(), pending_move(10)),
        (observation(1, pending_move(600)), other_plan, pending_move(700)),
    ];
    let machine = Canned(recorded_windows.into_iter(), None, topology_fixture(1), capabilities_fixture(&[]));
    let mut run = ControlLoop::new(machine, Vec::new(), Box::new(NullPredictor), "keep", KeepPlanPolicy, plan.window);
    let first = run.step().unwrap().unwrap();
    assert!(first.applied.refused.is_empty());
    let second = run.step().unwrap().unwrap();
    assert_eq!(second.observation.applied.pending[0].done, 600);
    assert_eq!(second.applied.refused[0].reason, RefusalReason::NotRecorded);
    assert!(run.step().unwrap().is_none());
}

/// One second with two tasks, on a machine with two CPUs and one cache of 16 ways that supports at most two groups.
fn two_cpu_fixture() -> ViewFixture {
    let ways = PartitionSupport::Ways { ways: 16, min_ways: 1, contiguous: true, max_groups: 2 };
    let divisible = capabilities_fixture(&[Ability::Ways]).with_partition(CacheId(0), ways);
    ViewFixture::new(last_level_caches(1, 2, CacheLevel::L3, 1 << 20), divisible, 2)
}

fn check(change: impl FnOnce(&mut Plan)) -> Result<(), PlanError> {
    let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
    change(&mut plan);
    check_plan(&plan, &two_cpu_fixture().view(&NullPredictor))
}

/// Is a plan that would starve a task or overlap gangs rejected before it is applied?
#[test]
fn plans_that_starve_or_overlap_gangs_are_rejected() {
    let gangs = |members: &[u32]| GangSchedule {
        cpus: [0, 1].into_iter().collect(),
        slice_ns: 1,
        gangs: members.iter().map(|&t| Gang { members: vec![(TaskId(t), None)], slices: 1 }).collect(),
    };
    assert_eq!(check(|_| ()), Ok(()));
    assert_eq!(check(|plan| plan.gangs = vec![gangs(&[0, 1])]), Ok(()));
    assert_eq!(check(|plan| plan.gangs = vec![gangs(&[1])]), Err(PlanError::Starved(TaskId(0))));
    let doubled_schedule = check(|plan| plan.gangs = vec![gangs(&[0, 1]), gangs(&[0, 1])]);
    assert_eq!(doubled_schedule, Err(PlanError::OverlappingGangs(0, 1)));
    let nowhere = check(|plan| _ = plan.affinity.insert(TaskId(0), [3].into_iter().collect()));
    assert_eq!(nowhere, Err(PlanError::NoRunnableCpu(TaskId(0))));
    let unknown = check(|plan| _ = plan.weights.insert(TaskId(7), 1.0));
    assert_eq!(unknown, Err(PlanError::UnknownTask(TaskId(7))));
}

/// Is a CPU of a gang member outside of its own affinity rejected, and one inside accepted?
#[test]
fn a_gang_member_on_a_cpu_outside_its_affinity_is_rejected() {
    let seated = |affinity: u32| {
        check(|plan| {
            plan.affinity.insert(TaskId(0), [affinity].into_iter().collect());
            let gang = |task, cpu| Gang { members: vec![(TaskId(task), cpu)], slices: 1 };
            let gangs = vec![gang(0, Some(CpuId(1))), gang(1, None)];
            plan.gangs = vec![GangSchedule { cpus: [0, 1].into_iter().collect(), slice_ns: 1, gangs }];
        })
    };
    assert_eq!(seated(1), Ok(()));
    assert!(matches!(seated(0), Err(PlanError::InvalidGang(0, what)) if what.contains("affinity")));
}

/// Are shares of more groups than the cache supports, members of two shares, and duplicate ids detected?
#[test]
fn excess_shares_double_members_and_duplicate_ids_are_detected() {
    let share = |group: u32, task: u32| CacheShare {
        group: GroupId(group),
        members: vec![ShareMember::Task(TaskId(task))],
        cache: CacheId(0),
        units: Units::Ways { mask: (0..2).collect() },
    };
    let message = |shares: Vec<CacheShare>| match check(|plan| plan.shares = shares) {
        Err(PlanError::InvalidShare(CacheId(0), what)) => what,
        other => format!("{other:?}"),
    };
    assert_eq!(check(|plan| plan.shares = vec![share(0, 0), share(1, 1)]), Ok(()));
    assert!(message(vec![share(0, 0), share(1, 0)]).contains("in two shares, expected each member in one"));
    assert!(message(vec![share(0, 0), share(0, 1)]).contains("in two shares, expected one share for each group"));
    let nobody = |group| CacheShare { members: Vec::new(), ..share(group, 0) };
    assert!(message(vec![share(0, 0), share(1, 1), nobody(2)]).contains("3 groups, expected at most 2"));
    let elsewhere = CacheShare { cache: CacheId(9), ..share(0, 0) };
    assert!(matches!(check(|plan| plan.shares = vec![elsewhere]), Err(PlanError::InvalidShare(CacheId(9), _))));
}

/// Does a record read back bit for bit, including maps keyed by ids and index sets?
#[test]
fn a_plan_reads_back_from_json() {
    let mut plan = Plan::idle(WindowLength::Cycles { cycles: 5 });
    plan.affinity.insert(TaskId(3), (0..130).chain([200]).collect());
    plan.weights.insert(TaskId(3), 0.1 + 0.2);
    let text = serde_json::to_string(&plan).unwrap();
    assert!(text.contains("0-129,200"), "{text}");
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
}
