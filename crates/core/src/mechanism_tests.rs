//! Are counts, plans and replays checked as the types promise?

use crate::test_support::*;
use crate::*;

/// Are unmeasured events absent, and multiplexed ones scaled?
#[test]
fn unmeasured_events_are_absent_and_multiplexed_ones_scaled() {
    let half = EventCounts(vec![EventCount {
        event: CounterEvent::Instructions,
        count: 10,
        enabled_share: 0.5,
    }]);
    assert_eq!(half.get(CounterEvent::Instructions), Some(20.0));
    assert_eq!(half.get(CounterEvent::Cycles), None);
    let never_enabled = EventCounts(vec![EventCount {
        event: CounterEvent::Cycles,
        count: 0,
        enabled_share: 0.0,
    }]);
    assert_eq!(never_enabled.get(CounterEvent::Cycles), None);
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
        let Some((observation, plan, applied)) = self.0.next() else {
            return Ok(None);
        };
        self.1 = Some((plan, applied));
        Ok(Some(observation))
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        let (recorded, applied) = self
            .1
            .take()
            .ok_or_else(|| MachineError("apply before observe".into()))?;
        if *plan == recorded {
            return Ok(applied);
        }
        let message = "the recorded run did something else here".to_string();
        let refused = vec![RefusedItem {
            item: PlanItem::Plan,
            reason: RefusalReason::NotRecorded,
            message,
        }];
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
        pending: vec![PendingItem {
            item: PlanItem::Share(GroupId(0), CacheId(0)),
            done,
            total: Some(1_000),
        }],
        ..AppliedPlan::default()
    };

    let observation = |window, in_force| Observation {
        window,
        span: TimeSpan {
            start_ns: 0,
            elapsed_ns: 1_000_000_000,
            elapsed_cycles: None,
        },
        end_reason: WindowEnd::Elapsed,
        tasks: Vec::new(),
        shared_counts: vec![(CounterScope::Cache(CacheId(0)), EventCounts::default())],
        probe_results: vec![ProbeResult {
            probe: ProbeId(0),
            evidence: ProbeEvidence::Rows(Vec::new()),
            complete: false,
            cost_ns: vec![(None, 9)],
        }],
        applied: in_force,
    };

    let other_plan = Plan::idle(WindowLength::Time { ns: 5 });
    let recorded_windows = vec![
        (
            observation(0, AppliedPlan::default()),
            plan.clone(),
            pending_move(10),
        ),
        (
            observation(1, pending_move(600)),
            other_plan,
            pending_move(700),
        ),
    ];
    let machine = Canned(
        recorded_windows.into_iter(),
        None,
        topology_fixture(1),
        capabilities_fixture(&[]),
    );
    let mut run = ControlLoop::new(
        machine,
        ProfilerChain::default(),
        Box::new(NullPredictor),
        "keep",
        KeepPlanPolicy,
        plan.window,
    );
    let first = run.step().unwrap().unwrap();
    assert!(first.applied.refused.is_empty());
    let second = run.step().unwrap().unwrap();
    assert_eq!(second.observation.applied.pending[0].done, 600);
    assert_eq!(second.applied.refused[0].reason, RefusalReason::NotRecorded);
    assert!(run.step().unwrap().is_none());
}

/// One second with two tasks, on a machine with two CPUs and one cache of 16 ways that supports at most two groups.
fn two_cpu_fixture() -> ViewFixture {
    let ways = PartitionSupport::Ways {
        ways: 16,
        min_ways: 1,
        contiguous: true,
        max_groups: 2,
        device_ways: 0,
    };
    let divisible = capabilities_fixture(&[Ability::Ways]).with_partition(CacheId(0), ways);
    ViewFixture::new(
        last_level_caches(1, 2, CacheLevel::L3, 1 << 20),
        divisible,
        2,
    )
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
        gangs: members
            .iter()
            .map(|&t| Gang {
                members: vec![(TaskId(t), None)],
                slices: 1,
            })
            .collect(),
    };
    assert_eq!(check(|_| ()), Ok(()));
    assert_eq!(check(|plan| plan.gangs = vec![gangs(&[0, 1])]), Ok(()));
    assert_eq!(
        check(|plan| plan.gangs = vec![gangs(&[1])]),
        Err(PlanError::Starved(TaskId(0)))
    );
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
            plan.affinity
                .insert(TaskId(0), [affinity].into_iter().collect());
            let gang = |task, cpu| Gang {
                members: vec![(TaskId(task), cpu)],
                slices: 1,
            };
            let gangs = vec![gang(0, Some(CpuId(1))), gang(1, None)];
            plan.gangs = vec![GangSchedule {
                cpus: [0, 1].into_iter().collect(),
                slice_ns: 1,
                gangs,
            }];
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
        units: Units::Ways {
            mask: (0..2).collect(),
        },
    };
    let message = |shares: Vec<CacheShare>| match check(|plan| plan.shares = shares) {
        Err(PlanError::InvalidShare(CacheId(0), what)) => what,
        other => format!("{other:?}"),
    };
    assert_eq!(
        check(|plan| plan.shares = vec![share(0, 0), share(1, 1)]),
        Ok(())
    );
    assert!(
        message(vec![share(0, 0), share(1, 0)])
            .contains("in two shares, expected each member in one")
    );
    assert!(
        message(vec![share(0, 0), share(0, 1)])
            .contains("in two shares, expected one share for each group")
    );
    let nobody = |group| CacheShare {
        members: Vec::new(),
        ..share(group, 0)
    };
    assert!(
        message(vec![share(0, 0), share(1, 1), nobody(2)]).contains("3 groups, expected at most 2")
    );
    let elsewhere = CacheShare {
        cache: CacheId(9),
        ..share(0, 0)
    };
    assert!(matches!(
        check(|plan| plan.shares = vec![elsewhere]),
        Err(PlanError::InvalidShare(CacheId(9), _))
    ));
}

/// Does a record read back bit for bit, including maps keyed by ids and index sets?
#[test]
fn a_plan_reads_back_from_json() {
    let mut plan = Plan::idle(WindowLength::Cycles { cycles: 5 });
    plan.affinity
        .insert(TaskId(3), (0..130).chain([200]).collect());
    plan.weights.insert(TaskId(3), 0.1 + 0.2);
    let text = serde_json::to_string(&plan).unwrap();
    assert!(text.contains("0-129,200"), "{text}");
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
}
