//! Lists of changes for random plans from random states.

use proptest::prelude::*;

use super::*;
use crate::{
    BandwidthLimit, BandwidthSupport, BandwidthUnit, Capabilities, Cpu, CpuId, Gang, GroupId,
    PartitionSupport, Plan, RefusalReason, ShareMember, Topology, Units, WindowLength,
};

const CPUS: u32 = 6;
const TASKS: u32 = 6;
const WAYS: u32 = 8;
const COLORS: u32 = 8;

fn sample_topology() -> Topology {
    let cpu = |id| Cpu {
        id: CpuId(id),
        core: id,
        package: 0,
        memory_node: 0,
        online: true,
        hertz: None,
    };
    Topology {
        cpus: (0..CPUS).map(cpu).collect(),
        ..Topology::default()
    }
}

/// Steps of ten percent, as on Intel.
fn sample_bandwidth() -> BandwidthSupport {
    BandwidthSupport {
        unit: BandwidthUnit::Percent,
        min_level: 10,
        step: 10,
        max_level: 100,
        max_groups: 4,
    }
}

fn sample_capabilities() -> Capabilities {
    let ways = PartitionSupport::Ways {
        ways: WAYS,
        min_ways: 1,
        contiguous: true,
        max_groups: 4,
        device_ways: 0,
    };

    let colors = PartitionSupport::Colors {
        colors: COLORS,
        page_bytes: 4096,
        page_migration_ns: 1.0,
    };
    let partitions = (0..2)
        .flat_map(|index| [(CacheId(index), ways), (CacheId(index), colors)])
        .collect();
    Capabilities {
        abilities: BTreeMap::new(),
        partitions,
        bandwidth: vec![(CacheId(0), sample_bandwidth())],
        min_window_ns: 1,
        min_slice_ns: None,
    }
}

/// Two tasks per process; task 5 is unmovable, and task 4 is in the group `/a/b`.
fn start() -> MachineState {
    let all_cpus: CpuSet = (0..CPUS).collect();
    let task = |index: u32| TaskState {
        task: TaskId(index),
        process: ProcessId(index / 2),
        name: format!("t{index}"),
        movable: index != 5,
        group: (index == 4).then(|| "/a/b".to_string()),
        affinity: Some(TrackedObject::new(all_cpus.clone())),
        weight: Some(TrackedObject::new(1.0)),
        class: None,
        class_owner: None,
        no_idle_turns: None,
    };

    let group = |name: &str| (name.to_string(), TrackedObject::new(all_cpus.clone()));
    MachineState {
        tasks: (0..TASKS).map(task).collect(),
        groups: ["/a", "/a/b", "/c"].map(group).into(),
        colors: (0..TASKS / 2)
            .map(|process| (ProcessId(process), TrackedObject::new(None)))
            .collect(),
        limits: ActuationLimits {
            seats_are_affinities: true,
            ..ActuationLimits::default()
        },
        ..MachineState::default()
    }
}

/// A contiguous run of indices below `limit`, from random numbers.
fn run_of(first: u32, width: u32, limit: u32) -> IndexSet {
    let first = first % limit;
    (first..(first + 1 + width % limit).min(limit)).collect()
}

/// The desired state of an operator and a policy together.
#[derive(Clone, Debug)]
struct ChangeInputs {
    plan: Plan,
    confined: Vec<CpusetGroup>,
}

fn arbitrary_inputs() -> impl Strategy<Value = ChangeInputs> {
    let pair = || (0..16u32, 0..16u32);
    let tasks = proptest::collection::vec((any::<bool>(), pair(), 0..3u32), TASKS as usize - 1);
    let shares = proptest::collection::vec((0..3u32, 0..2u32, any::<bool>(), pair()), 0..4);
    let gangs = (0..3u32, 1..3u64);
    let limits = proptest::collection::vec((0..3u32, 1..10u32), 0..3);
    let groups = (0..4u32, pair(), pair());

    (tasks, shares, limits, gangs, groups).prop_map(|(tasks, shares, limits, gangs, groups)| {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
        for (index, (placed, (first, width), weight)) in tasks.into_iter().enumerate() {
            let task = TaskId(index as u32);
            if placed {
                plan.affinity.insert(task, run_of(first, width, CPUS));
            }
            if weight > 0 {
                plan.weights.insert(task, f64::from(weight));
            }
        }

        for (index, (process, cache, ways, (first, width))) in shares.into_iter().enumerate() {
            let units = match ways {
                true => Units::Ways {
                    mask: run_of(first, width, WAYS),
                },
                false => Units::Colors {
                    allowed: run_of(first, width, COLORS),
                    migration: PageMigration::All,
                },
            };

            let members = vec![ShareMember::Process(ProcessId(process))];
            plan.shares.push(crate::CacheShare {
                group: GroupId(index as u32),
                members,
                cache: CacheId(cache),
                units,
            });
        }

        for (index, (process, tens)) in limits.into_iter().enumerate() {
            plan.bandwidth.push(BandwidthLimit {
                group: GroupId(index as u32),
                members: vec![ShareMember::Process(ProcessId(process))],
                cache: CacheId(0),
                level: 10 * tens,
            });
        }

        let gang = |task: u32| Gang {
            members: vec![(TaskId(task), None)],
            slices: 1,
        };
        let (kind, slice_ns) = gangs;
        let cpus = |cpus: std::ops::Range<u32>| cpus.collect::<CpuSet>();
        if kind > 0 {
            plan.gangs.push(GangSchedule {
                cpus: cpus(0..1),
                slice_ns,
                gangs: vec![gang(0), gang(1)],
            });
        }

        if kind > 1 {
            plan.gangs.push(GangSchedule {
                cpus: cpus(1..2),
                slice_ns,
                gangs: vec![gang(2), gang(3)],
            });
        }

        let (named, outer, inner) = groups;
        let outer = run_of(outer.0, outer.1, CPUS);
        let inner = run_of(inner.0, inner.1, CPUS).intersection(&outer);
        let mut confined = Vec::new();
        if named > 0 {
            confined.push(CpusetGroup {
                cgroup: "/a".to_string(),
                cpus: outer.clone(),
            });
            // Equal to its parent if no CPUs are left; listed in any case, because the original is wider.
            confined.push(CpusetGroup {
                cgroup: "/a/b".to_string(),
                cpus: inner,
            });
        }

        if named > 1 {
            confined.push(CpusetGroup {
                cgroup: "/c".to_string(),
                cpus: outer,
            });
        }
        ChangeInputs { plan, confined }
    })
}

fn derive_for(inputs: &ChangeInputs, state: &MachineState) -> ChangeList {
    derive_changes(
        &inputs.plan,
        &inputs.confined,
        state,
        &sample_topology(),
        &sample_capabilities(),
    )
}

fn make_all(state: &mut MachineState, changes: &[Change]) {
    for change in changes {
        state
            .apply(&change.kind)
            .unwrap_or_else(|error| panic!("{error}; in {changes:#?}"));
    }
}

/// Is the state of each object as the plan requests it?
fn assert_plan_in_force(inputs: &ChangeInputs, state: &MachineState, derived: &ChangeList) {
    for task in state.tasks.iter().filter(|task| task.movable) {
        let in_gang = inputs.plan.gangs.iter().any(|schedule| {
            schedule
                .gangs
                .iter()
                .any(|gang| gang.members.iter().any(|(member, _)| *member == task.task))
        });
        let affinity = &task.affinity.as_ref().unwrap().current;
        match inputs.plan.affinity.get(&task.task) {
            _ if in_gang => assert_eq!(affinity.count(), 1, "a seat"),
            Some(cpus) if task.group.is_none() => assert_eq!(affinity, cpus),
            Some(cpus) => assert!(affinity.is_subset(cpus)),
            None if task.group.is_none() => assert_eq!(affinity.count(), CPUS),
            None => {}
        }

        let weight = inputs.plan.weights.get(&task.task).copied().unwrap_or(1.0);
        assert_eq!(task.weight.as_ref().unwrap().current, weight);
        let mut masks = WayMasks::new();
        for share in &inputs.plan.shares {
            if let Units::Ways { mask } = &share.units
                && share.members.contains(&ShareMember::Process(task.process))
            {
                // A second share of one cache is refused; the first one stays.
                masks.entry(share.cache).or_insert_with(|| mask.clone());
            }
        }

        let class = task
            .class
            .map(|class| state.classes[&class].clone())
            .unwrap_or_default();
        assert_eq!(class.masks, masks);
        let mut levels = BTreeMap::new();
        for limit in &inputs.plan.bandwidth {
            if limit.members.contains(&ShareMember::Process(task.process)) {
                levels.entry(limit.cache).or_insert(limit.level);
            }
        }
        assert_eq!(class.bandwidth, levels);
    }

    for (process, colors) in &state.colors {
        let is_of_process = |share: &&crate::CacheShare| {
            matches!(share.units, Units::Colors { .. })
                && share.members.contains(&ShareMember::Process(*process))
        };
        let planned_units = inputs
            .plan
            .shares
            .iter()
            .find(is_of_process)
            .map(|share| share.units.clone());
        let current_units = colors.current.clone().map(
            |ColorAssignment {
                 allowed,
                 migration: moving,
             }| Units::Colors {
                allowed,
                migration: moving,
            },
        );
        assert_eq!(current_units, planned_units);
    }
    assert_eq!(state.gangs, inputs.plan.gangs);
    for (group, cpus) in &state.groups {
        let wanted_group = inputs
            .confined
            .iter()
            .find(|confined| confined.cgroup == *group);
        assert_eq!(
            cpus.current,
            wanted_group.map_or_else(|| cpus.original.clone(), |confined| confined.cpus.clone())
        );
    }
    assert_eq!(
        state.classes.keys().collect::<Vec<_>>(),
        derived.classes.keys().collect::<Vec<_>>()
    );
}

proptest! {
    /// From the state that any earlier plan produced: does the list lead to the plan, and is the next list empty?
    #[test]
    fn applying_the_list_reaches_the_plan_and_the_next_is_empty(wishes in proptest::collection::vec(arbitrary_inputs(), 1..4)) {
        let mut state = start();
        for inputs in &wishes {
            let derived = derive_for(inputs, &state);
            make_all(&mut state, &derived.changes);
            assert_plan_in_force(inputs, &state, &derived);
            prop_assert_eq!(derive_for(inputs, &state).changes, Vec::new());
        }
        // With an empty request, everything returns to its original state.
        let idle = ChangeInputs { plan: Plan::idle(WindowLength::Time { ns: 1 }), confined: Vec::new() };
        let changes = derive_for(&idle, &state).changes;
        make_all(&mut state, &changes);
        prop_assert_eq!(state, start());
    }

    /// Can any prefix of the list be undone, and do dependencies precede their dependents in both directions?
    #[test]
    fn every_prefix_can_be_undone(before in arbitrary_inputs(), after in arbitrary_inputs()) {
        let mut state = start();
        let changes = derive_for(&before, &state).changes;
        make_all(&mut state, &changes);
        let changes = derive_for(&after, &state).changes;
        for made_count in 0..=changes.len() {
            let mut changed_state = state.clone();
            make_all(&mut changed_state, &changes[..made_count]);
            let undo_list = undo(&changes[..made_count]);
            make_all(&mut changed_state, &undo_list);
            prop_assert_eq!(&changed_state, &state);
            for change in changes.iter().chain(&undo_list) {
                prop_assert!(change.depends_on.iter().all(|needed| *needed < change.id));
            }
        }
    }

    /// If one change fails: are exactly its dependents skipped, and can the rest be applied and undone?
    #[test]
    fn a_failed_change_skips_its_dependents_only(before in arbitrary_inputs(), after in arbitrary_inputs(), at in 0usize..64) {
        let mut state = start();
        let changes = derive_for(&before, &state).changes;
        make_all(&mut state, &changes);
        let changes = derive_for(&after, &state).changes;
        prop_assume!(!changes.is_empty());
        let broken = ChangeId((at % changes.len()) as u32);
        let mut changed_state = state.clone();
        let mut failed_else = Vec::new();
        let outcomes = run(&changes, |change| {
            if change.id == broken {
                return Err("broken".to_string());
            }
            changed_state.apply(&change.kind).map_err(|error| {
                failed_else.push(error.to_string());
                error.to_string()
            })
        });

        prop_assert_eq!(failed_else, Vec::<String>::new());
        let mut needs = std::collections::BTreeSet::from([broken]);
        for (change, outcome) in changes.iter().zip(&outcomes) {
            if change.depends_on.iter().any(|needed| needs.contains(needed)) {
                needs.insert(change.id);
                prop_assert_eq!(outcome, &ChangeOutcome::Skipped(broken));
            } else if change.id != broken {
                prop_assert_eq!(outcome, &ChangeOutcome::Done);
            }
        }

        let done_changes: Vec<Change> =
            changes.iter().zip(&outcomes).filter(|(_, outcome)| **outcome == ChangeOutcome::Done).map(|(change, _)| change.clone()).collect();
        make_all(&mut changed_state, &undo(&done_changes));
        prop_assert_eq!(changed_state, state);
    }

    /// Does a list read back from its JSON?
    #[test]
    fn a_list_reads_back_from_its_json(wish in arbitrary_inputs()) {
        let changes = derive_for(&wish, &start()).changes;
        let text = serde_json::to_string(&changes).unwrap();
        prop_assert_eq!(serde_json::from_str::<Vec<Change>>(&text).unwrap(), changes);
    }
}

fn set(text: &str) -> IndexSet {
    text.parse().unwrap()
}

/// Does every kind of change print as one plain line?
#[test]
fn every_change_prints_as_one_plain_line() {
    let name = || "db".to_string();
    let gang = |tasks: [u32; 2], slices| Gang {
        members: tasks.map(|task| (TaskId(task), None)).to_vec(),
        slices,
    };
    let schedule = || GangSchedule {
        cpus: set("0-1"),
        slice_ns: 20_000_000,
        gangs: vec![gang([1, 2], 1), gang([3, 4], 2)],
    };

    let masks = || -> ClassLimits {
        WayMasks::from([(CacheId(0), set("0-3")), (CacheId(1), set("4"))]).into()
    };
    let limits = ClassLimits {
        bandwidth: BTreeMap::from([(CacheId(1), 50)]),
        ..masks()
    };
    let colors = || {
        Some(ColorAssignment {
            allowed: set("0-7"),
            migration: PageMigration::All,
        })
    };
    let (task, class) = (TaskId(3), ServiceClassId(1));

    let lines = [
        (
            ChangeKind::Affinity {
                task,
                name: name(),
                from: set("0-7"),
                to: set("0-3"),
            },
            "move task 3 'db' to CPUs 0-3 (was 0-7)",
        ),
        (
            ChangeKind::Weight {
                task,
                name: name(),
                from: 1.0,
                to: 2.5,
            },
            "give task 3 'db' a weight of 2.5 (was 1)",
        ),
        (
            ChangeKind::Cpuset {
                group: "/a".to_string(),
                from: CpuSet::default(),
                to: set("1"),
            },
            "confine group '/a' to CPUs 1 (was the CPUs of its parent)",
        ),
        (
            ChangeKind::CreateClass {
                class,
                limits: ClassLimits::default(),
            },
            "create class of service 1",
        ),
        (
            ChangeKind::Schemata {
                class,
                from: ClassLimits::default(),
                to: masks(),
            },
            "give class of service 1 ways 0-3 of cache 0, ways 4 of cache 1 (was all ways)",
        ),
        (
            ChangeKind::CreateClass { class, limits },
            "create class of service 1 with ways 0-3 of cache 0, ways 4 of cache 1, bandwidth 50 behind cache 1",
        ),
        (
            ChangeKind::Member {
                task,
                name: name(),
                from: None,
                to: Some(class),
            },
            "put task 3 'db' in class of service 1 (was in no class of service)",
        ),
        (
            ChangeKind::RemoveClass {
                class,
                limits: masks(),
            },
            "remove class of service 1",
        ),
        (
            ChangeKind::RemoveClass {
                class,
                limits: masks(),
            }
            .inverse(),
            "create class of service 1 with ways 0-3 of cache 0, ways 4 of cache 1",
        ),
        (
            ChangeKind::Colors {
                process: ProcessId(2),
                from: None,
                to: colors(),
            },
            "give process 2 colors 0-7 and moves all its pages (was all colors)",
        ),
        (
            ChangeKind::StartGangs {
                schedule: schedule(),
            },
            "start gangs on CPUs 0-1: tasks 1+2, then tasks 3+4 for 2 slices, 20 ms a slice",
        ),
    ];

    for (kind, line) in lines {
        assert_eq!(kind.to_string(), line);
        assert_eq!(kind.inverse().inverse(), kind);
    }
}

/// In a list with all kinds of changes, do members depend on their class, gangs on their CPUs, and removals on their
/// members?
#[test]
fn members_gangs_and_removals_have_their_dependencies() {
    let mut state = start();
    let mut inputs = ChangeInputs {
        plan: Plan::idle(WindowLength::Time { ns: 1 }),
        confined: Vec::new(),
    };
    let units = Units::Ways { mask: set("0-3") };
    let members = vec![ShareMember::Process(ProcessId(0))];
    inputs.plan.shares.push(crate::CacheShare {
        group: GroupId(0),
        members,
        cache: CacheId(0),
        units,
    });

    let gang = |task| Gang {
        members: vec![(TaskId(task), None)],
        slices: 1,
    };
    inputs.plan.gangs = vec![GangSchedule {
        cpus: set("0"),
        slice_ns: 1,
        gangs: vec![gang(2), gang(3)],
    }];
    let changes = derive_for(&inputs, &state).changes;
    let shown = |changes: &[Change]| -> Vec<(String, Vec<u32>)> {
        let line = |change: &Change| change.to_string().split(" (").next().unwrap().to_string();
        changes
            .iter()
            .map(|change| {
                (
                    line(change),
                    change.depends_on.iter().map(|id| id.0).collect(),
                )
            })
            .collect()
    };

    let want = [
        ("move task 2 't2' to CPUs 0", vec![]),
        ("move task 3 't3' to CPUs 0", vec![]),
        ("create class of service 0", vec![]),
        ("give class of service 0 ways 0-3 of cache 0", vec![2]),
        ("put task 0 't0' in class of service 0", vec![3]),
        ("put task 1 't1' in class of service 0", vec![3]),
        (
            "start gangs on CPUs 0: tasks 2, then tasks 3, 0.000001 ms a slice",
            vec![0, 1],
        ),
    ];
    assert_eq!(
        shown(&changes),
        want.map(|(line, dependencies)| (line.to_string(), dependencies))
    );
    make_all(&mut state, &changes);
    let idle = ChangeInputs {
        plan: Plan::idle(WindowLength::Time { ns: 1 }),
        confined: Vec::new(),
    };
    let changes = derive_for(&idle, &state).changes;
    let last_change = shown(&changes).pop().unwrap();
    assert_eq!(
        last_change,
        ("remove class of service 0".to_string(), vec![3, 4])
    );
}

/// Are items that a machine does not support refused with the reason, and the rest applied?
#[test]
fn unsupported_items_are_refused_and_the_rest_applied() {
    let mut state = start();
    state.limits = ActuationLimits {
        no_lazy_moving: true,
        max_classes: Some(1),
        ..ActuationLimits::default()
    };
    state.tasks[2].class_owner = Some("somebody else's".to_string());
    state.colors.remove(&ProcessId(1));
    let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
    state.tasks[3].no_idle_turns = Some("real time".to_string());

    let gangs = vec![Gang {
        members: vec![(TaskId(3), None)],
        slices: 1,
    }];
    plan.gangs = vec![GangSchedule {
        cpus: set("0"),
        slice_ns: 1,
        gangs,
    }];
    plan.affinity = [
        (TaskId(9), set("0")),
        (TaskId(0), set("99")),
        (TaskId(1), set("1")),
    ]
    .into();

    let share = |group, member, cache, units| crate::CacheShare {
        group: GroupId(group),
        members: vec![member],
        cache: CacheId(cache),
        units,
    };
    let (task, process) = (
        |id| ShareMember::Task(TaskId(id)),
        |id| ShareMember::Process(ProcessId(id)),
    );
    let ways = |mask: &str| Units::Ways { mask: set(mask) };
    let colors = |allowed: &str, migration| Units::Colors {
        allowed: set(allowed),
        migration,
    };
    plan.shares = vec![
        share(0, task(0), 9, ways("0")),
        share(1, task(1), 0, ways("12")),
        share(2, task(3), 0, ways("0-1,4")),
        share(3, task(3), 0, ways("7")),
        share(4, task(2), 0, ways("0-1")),
        share(5, task(4), 0, ways("3")),
        share(6, process(0), 0, colors("0-3", PageMigration::Lazy)),
        share(7, process(0), 0, colors("9", PageMigration::All)),
        share(8, process(1), 0, colors("0", PageMigration::All)),
    ];
    let derived = derive_for(
        &ChangeInputs {
            plan,
            confined: Vec::new(),
        },
        &state,
    );
    let refusals: Vec<(RefusalReason, &str)> = derived
        .refused_items
        .iter()
        .map(|refused| (refused.reason.clone(), refused.message.as_str()))
        .collect();
    use RefusalReason::*;
    assert_eq!(
        refusals,
        [
            (NotSupported, "real time"),
            (NotFound, "the task has ended"),
            (NotSupported, "none of the requested CPUs is online"),
            (NotSupported, "cache 9 cannot be divided by ways"),
            (
                NotSupported,
                "ways 12: the hardware takes 1 or more of ways 0-7, in one piece"
            ),
            (
                NotSupported,
                "ways 0-1,4 became 0-1: the hardware takes 1 or more of ways 0-7, in one piece"
            ),
            (Busy, "task 3 keeps the ways of group 2 in this cache"),
            (OwnedByOther, "somebody else's"),
            (
                NoCapacity,
                "more combinations of limits than the 1 classes of service"
            ),
            (
                NotSupported,
                "pages cannot be migrated on their next touch; migrating all pages is supported"
            ),
            (
                NotSupported,
                "colors 9: none, or more than this machine has"
            ),
            (
                NotSupported,
                "process 1 was not started by cachemate page-color run"
            ),
        ]
    );
    let lines: Vec<String> = derived.changes.iter().map(ToString::to_string).collect();
    assert_eq!(
        lines.len(),
        4,
        "one task moves, one class is made, given its ways and filled: {lines:#?}"
    );
}

/// Is a limit between two steps raised to the next one and reported, one at the maximum no class, and one behind a
/// cache without limits refused?
#[test]
fn limits_of_bandwidth_become_those_of_the_hardware() {
    let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
    for (group, cache, level) in [(0, 0, 33), (1, 0, 100), (2, 1, 50)] {
        plan.bandwidth.push(BandwidthLimit {
            group: GroupId(group),
            members: vec![ShareMember::Process(ProcessId(group))],
            cache: CacheId(cache),
            level,
        });
    }

    let inputs = ChangeInputs {
        plan,
        confined: Vec::new(),
    };
    let derived = derive_for(&inputs, &start());
    let messages: Vec<&str> = derived
        .refused_items
        .iter()
        .map(|refused| &*refused.message)
        .collect();
    assert_eq!(
        messages,
        [
            "33 % became 40 %",
            "no bandwidth can be limited behind cache 1"
        ]
    );
    let classes: Vec<_> = derived.classes.values().collect();
    assert_eq!(classes.len(), 1, "{classes:?}");
    assert_eq!(classes[0].limits.bandwidth, [(CacheId(0), 40)].into());
    assert_eq!(classes[0].members, [TaskId(0), TaskId(1)]);
    let support = sample_bandwidth();
    let nearest = [0, 10, 11, 95, 101].map(|level| support.nearest_level(level));
    assert_eq!(nearest, [10, 10, 20, 100, 100]);
}

/// Do classes keep the hardware class of most of their members, and reuse free ones before new ones are created?
#[test]
fn classes_keep_hardware_classes_then_reuse_then_create_them() {
    let mut state = start();
    for (index, class) in [(0, 4), (1, 4), (2, 1), (3, 4)] {
        state.tasks[index].class = Some(ServiceClassId(class));
    }

    state.classes = [0, 1, 4]
        .map(|class| (ServiceClassId(class), ClassLimits::default()))
        .into();
    let class = |members: &[u32]| ServiceClass {
        members: members.iter().map(|&id| TaskId(id)).collect(),
        ..ServiceClass::default()
    };
    let ids = |classes: &[ServiceClass]| {
        assign_class_ids(classes, &state)
            .into_iter()
            .map(|class| class.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        ids(&[class(&[3]), class(&[0, 1]), class(&[2]), class(&[4])]),
        [0, 4, 1, 2]
    );
    assert_eq!(ids(&[]), [0; 0]);
}
