//! Tests which co-runners tasks get under DI and DIO.

use std::collections::BTreeMap;

use cachemate_core::test_support::*;
use cachemate_core::*;
use cachemate_papers::policies::PAPERS;

fn task_fixture(id: u32, priority: Option<f64>) -> TaskSample {
    TaskSample {
        name: format!("p{id}"),
        goal: priority.map(|priority| Goal {
            priority,
            ..Goal::default()
        }),
        cpu: Some(CpuId(id)),
        ..TaskSample::new(TaskId(id), ProcessId(id))
    }
}

fn decide(
    policy: &mut dyn Policy,
    caches: u32,
    tasks: Vec<TaskSample>,
    profiles: &Profiles,
    previous_plan: &Plan,
) -> Decision {
    decide_where(
        BTreeMap::new(),
        policy,
        caches,
        tasks,
        profiles,
        previous_plan,
    )
}

fn decide_where(
    abilities: BTreeMap<Ability, Support>,
    policy: &mut dyn Policy,
    caches: u32,
    tasks: Vec<TaskSample>,
    profiles: &Profiles,
    previous_plan: &Plan,
) -> Decision {
    let capabilities = Capabilities {
        abilities,
        ..capabilities_fixture(&[])
    };
    let mut fixture = ViewFixture::new(
        last_level_caches(caches, 2, CacheLevel::L2, 4 << 20),
        capabilities,
        0,
    );
    fixture.observation = observation_of(0, 1, tasks);
    (fixture.profiles, fixture.previous_plan) = (profiles.clone(), previous_plan.clone());
    fixture.decide(policy, &NullPredictor)
}

fn profiles_with_rates(rates: &[f64]) -> Profiles {
    let profile = |&rate: &f64| {
        Profile::default().with_rates(RateFacts {
            observed_misses_per_kilo_instr: Some(Fact::oracle(rate)),
            ..RateFacts::default()
        })
    };
    rates
        .iter()
        .map(profile)
        .enumerate()
        .map(|(id, profile)| (TaskId(id as u32), profile))
        .collect()
}

fn with_misses(curve: SizeCurve) -> Profile {
    Profile::default().with_misses(CacheLevel::L2, curve, FactSource::ExactTrace)
}

fn idle_plan() -> Plan {
    Plan::idle(WindowLength::Time { ns: 1 })
}

/// The other tasks on the cache of a task.
fn co_runners(plan: &Plan, task: u32) -> Vec<u32> {
    let own_cpus = &plan.affinity[&TaskId(task)];
    plan.affinity
        .iter()
        .filter(|(other_task, cpus)| other_task.0 != task && *cpus == own_cpus)
        .map(|(other_task, _)| other_task.0)
        .collect()
}

/// Are two heavy programs that the machine's scheduler put on one cache separated by one exchange, with a reason?
#[test]
fn two_heavy_programs_are_separated_by_one_exchange() {
    let tasks: Vec<TaskSample> = (0..4).map(|id| task_fixture(id, None)).collect();
    for form in ["central", "distributed"] {
        let mut dio = PAPERS
            .build("dio", &format!("form = \"{form}\""), 1)
            .unwrap();
        let decision = decide(
            dio.as_mut(),
            2,
            tasks.clone(),
            &profiles_with_rates(&[30.0, 25.0, 1.0, 0.1]),
            &idle_plan(),
        );
        assert_eq!(co_runners(&decision.plan, 0), [3], "{form}: {decision:?}");
        let stays = |id: u32| decision.plan.affinity[&TaskId(id)].contains(id);
        assert_eq!(
            (0..4).filter(|&id| stays(id)).count(),
            2,
            "{form}: two of four move"
        );
        assert!(
            decision
                .reasons
                .iter()
                .any(|reason| reason.text.contains("instead of")),
            "{form}: {:?}",
            decision.reasons
        );
        let second_decision = decide(
            dio.as_mut(),
            2,
            tasks.clone(),
            &profiles_with_rates(&[29.0, 26.0, 1.1, 0.1]),
            &decision.plan,
        );
        assert_eq!(
            second_decision.plan.affinity, decision.plan.affinity,
            "{form}: noise moves no task"
        );
        assert!(second_decision.reasons.is_empty());
    }
}

/// If reads are configured, does a program whose prefetchers leave it few misses count by its reads, or by its misses
/// if reads are not counted?
#[test]
fn prefetched_lines_count_as_reads() {
    let tasks: Vec<TaskSample> = (0..4).map(|id| task_fixture(id, None)).collect();
    let mut both = profiles_with_rates(&[30.0, 1.0, 2.0, 0.1]);
    for (profile, bytes) in both.values_mut().zip([2_000.0, 1_900.0, 130.0, 7.0]) {
        profile.rates.observed_read_bytes_per_kilo_instr = Some(Fact::oracle(bytes));
    }

    let beside_the_first = |counted: &str, profiles: &Profiles| {
        let mut dio = PAPERS
            .build("dio", &format!("counted = \"{counted}\""), 1)
            .unwrap();
        co_runners(
            &decide(dio.as_mut(), 2, tasks.clone(), profiles, &idle_plan()).plan,
            0,
        )
    };
    assert_eq!(beside_the_first("misses", &both), [3]);
    assert_eq!(beside_the_first("memory-reads", &both), [3]);
    let misses_only = profiles_with_rates(&[30.0, 1.0, 2.0, 0.1]);
    assert_eq!(
        beside_the_first("memory-reads", &misses_only),
        beside_the_first("misses", &misses_only)
    );
    // With few misses and many reads, the streaming program is not the quiet neighbor.
    both.get_mut(&TaskId(1))
        .unwrap()
        .rates
        .observed_misses_per_kilo_instr = Some(Fact::oracle(0.05));
    assert_eq!(beside_the_first("misses", &both), [1]);
    assert_eq!(beside_the_first("memory-reads", &both), [3]);
}

/// One program just fits the cache alone, one streams, and two are quiet. Does DI give the first the quietest neighbor
/// by rates on a share of the cache, although the paper's rates treat it as quiet?
#[test]
fn a_program_that_just_fits_gets_the_quietest_neighbor() {
    let curve = |on_half: f64, on_all: f64| {
        let points = vec![
            (2 << 20, Estimate::exact(on_half)),
            (4 << 20, Estimate::exact(on_all)),
        ];
        with_misses(points)
    };
    let curves = [
        curve(50.0, 3.0),
        curve(29.0, 28.0),
        curve(2.0, 1.5),
        curve(0.4, 0.4),
    ];
    let all: Profiles = curves
        .into_iter()
        .enumerate()
        .map(|(id, profile)| (TaskId(id as u32), profile))
        .collect();

    let tasks: Vec<TaskSample> = (0..4).map(|id| task_fixture(id, None)).collect();
    let neighbor = |parameters: &str, profiles: &Profiles| {
        let mut di = PAPERS.build("di", parameters, 1).unwrap();
        co_runners(
            &decide(di.as_mut(), 2, tasks.clone(), profiles, &idle_plan()).plan,
            0,
        )
    };
    assert_eq!(neighbor("", &all), [3]);
    assert_eq!(neighbor("recorded_on = \"whole\"", &all), [2]);

    // One curve ends above the share, so all tasks are compared on the whole cache.
    let mut partly = all.clone();
    partly.insert(
        TaskId(3),
        with_misses(vec![(4 << 20, Estimate::exact(0.4))]),
    );
    assert_eq!(neighbor("", &partly), [2]);
}

/// Does a program with a high priority get the quietest neighbor, and do two of them get different caches?
#[test]
fn priorities_bring_quiet_neighbors() {
    let rates = profiles_with_rates(&[30.0, 20.0, 10.0, 8.0, 6.0, 4.0, 2.0, 1.0]);
    let plan_with = |priorities: &[(u32, f64)]| {
        let priority_of = |id| {
            priorities
                .iter()
                .find(|(task, _)| *task == id)
                .map(|(_, priority)| *priority)
        };
        let tasks = (0..8).map(|id| task_fixture(id, priority_of(id))).collect();
        decide(
            PAPERS.build("dio", "", 1).unwrap().as_mut(),
            4,
            tasks,
            &rates,
            &idle_plan(),
        )
        .plan
    };
    assert_eq!(co_runners(&plan_with(&[]), 4), [3], "without a priority");

    assert_eq!(co_runners(&plan_with(&[(4, 5.0)]), 4), [7]);
    let two_priorities = plan_with(&[(4, 5.0), (5, 5.0)]);
    assert!(
        !co_runners(&two_priorities, 4).contains(&5),
        "{two_priorities:?}"
    );
    let rates = [30.0, 20.0, 10.0, 8.0, 6.0, 4.0, 2.0, 1.0];
    assert!(
        co_runners(&two_priorities, 4)
            .iter()
            .chain(&co_runners(&two_priorities, 5))
            .all(|&co_runner| rates[co_runner as usize] <= 2.0),
        "{two_priorities:?}"
    );
}

/// Does DI use the solo rate on half of this machine's cache, or on the whole cache if configured, and DIO the counted
/// rate?
#[test]
fn di_uses_solo_rates_and_dio_counted_rates() {
    let mut profiles = profiles_with_rates(&[1.0, 2.0, 30.0, 40.0]);
    for (id, alone) in [(0, 40.0), (1, 30.0), (2, 2.0), (3, 1.0)] {
        let curve = vec![
            (2 << 20, Estimate::exact(50.0 + alone)),
            (4 << 20, Estimate::exact(alone)),
        ];
        let profile = profiles.entry(TaskId(id)).or_default();
        *profile =
            std::mem::take(profile).with_misses(CacheLevel::L2, curve, FactSource::ExactTrace);
    }

    let tasks: Vec<TaskSample> = [0, 1, 2, 3].map(|id| task_fixture(id, None)).to_vec();
    let decision_of = |name: &str, parameters: &str, profiles: &Profiles| {
        decide(
            PAPERS.build(name, parameters, 1).unwrap().as_mut(),
            2,
            tasks.clone(),
            profiles,
            &idle_plan(),
        )
    };

    // Reasons give a rate as a multiple of the mean rate.
    let first_intensity = |name: &str, parameters: &str| {
        let reasons = decision_of(name, parameters, &profiles).reasons;
        reasons
            .iter()
            .find(|reason| reason.tasks == [TaskId(0)])
            .map(|reason| reason.numbers[0].1)
    };
    let intensities = [
        first_intensity("di", ""),
        first_intensity("di", "recorded_on = \"whole\""),
        first_intensity("dio", ""),
    ];
    let (mean_in_half, mean) = (
        (90.0 + 80.0 + 52.0 + 51.0) / 4.0,
        (1.0 + 2.0 + 30.0 + 40.0) / 4.0,
    );
    assert_eq!(
        intensities,
        [
            Some(90.0 / mean_in_half),
            Some(40.0 / mean),
            Some(1.0 / mean)
        ]
    );
    profiles
        .values_mut()
        .for_each(|profile| profile.locality = LocalityFacts::default());
    assert!(
        decision_of("di", "", &profiles).plan.affinity.is_empty(),
        "no profile, no move"
    );
}

/// Without any counter, is the intensity from probes used, and never mixed with counted rates?
#[test]
fn probed_intensity_is_used_without_counters() {
    let tasks: Vec<TaskSample> = (0..4).map(|id| task_fixture(id, None)).collect();
    let mut profiles = Profiles::new();
    for (id, intensity) in [0.9, 0.8, 0.1, 0.0].into_iter().enumerate() {
        let mut profile = Profile::default();
        profile.contention.intensity = Some(Fact::oracle(intensity));
        profiles.insert(TaskId(id as u32), profile);
    }
    let mut dio = PAPERS.build("dio", "", 1).unwrap();
    assert_eq!(
        co_runners(
            &decide(dio.as_mut(), 2, tasks.clone(), &profiles, &idle_plan()).plan,
            0
        ),
        [3]
    );
    profiles
        .entry(TaskId(0))
        .or_default()
        .rates
        .observed_misses_per_kilo_instr = Some(Fact::oracle(5.0));
    let plan = decide(
        PAPERS.build("dio", "", 1).unwrap().as_mut(),
        2,
        tasks,
        &profiles,
        &idle_plan(),
    )
    .plan;
    assert_eq!(
        plan.affinity.keys().copied().collect::<Vec<_>>(),
        [TaskId(0)],
        "only what is counted is placed"
    );
}

/// Are recorded rates used as the last resort on machines without counters, and only there?
#[test]
fn recorded_rates_are_used_without_counters_and_probes() {
    let tasks: Vec<TaskSample> = (0..4).map(|id| task_fixture(id, None)).collect();
    let curve = |rate| {
        vec![
            (1 << 20, Estimate::exact(2.0 * rate)),
            (8 << 20, Estimate::exact(rate)),
        ]
    };
    let profile = |rate| with_misses(curve(rate));
    let mut profiles: Profiles = (0..4)
        .map(|id| (TaskId(id), profile([20.0, 10.0, 1.0, 0.5][id as usize])))
        .collect();

    let no_counters = Support::No {
        reason: "no PMU".to_string(),
        remedy: None,
    };
    let decide = |support: Option<&Support>, profiles: &Profiles| {
        let abilities = support
            .map(|support| (Ability::CountPerTask, support.clone()))
            .into_iter()
            .collect();
        let mut dio = PAPERS.build("dio", "", 1).unwrap();
        decide_where(
            abilities,
            dio.as_mut(),
            2,
            tasks.clone(),
            profiles,
            &idle_plan(),
        )
        .plan
    };
    assert_eq!(co_runners(&decide(Some(&no_counters), &profiles), 0), [3]);
    assert!(
        decide(None, &profiles).affinity.is_empty(),
        "counters will come"
    );
    profiles.get_mut(&TaskId(1)).unwrap().contention.intensity = Some(Fact::oracle(0.5));
    let plan = decide(Some(&no_counters), &profiles);
    assert!(
        !plan.affinity.contains_key(&TaskId(0)),
        "kinds are not mixed: {:?}",
        plan.affinity
    );
}

/// Do the matrix policies choose the best and the worst pairs of the published table?
#[test]
fn best_and_worst_follow_the_matrix() {
    let matrix = "slowdowns = [[0.4801, 0.6563, 0.02, 0.0211], [0.2475, 0.4539, 0.0123, 0.0111], \
                  [0.0267, 0.0448, -0.0101, -0.0121], [0.0148, 0.0345, -0.0119, -0.0093]]";
    let tasks: Vec<TaskSample> = (0..4).map(|id| task_fixture(id, None)).collect();
    let plan_of = |name: &str| {
        decide(
            PAPERS.build(name, matrix, 1).unwrap().as_mut(),
            2,
            tasks.clone(),
            &Profiles::new(),
            &idle_plan(),
        )
        .plan
    };
    assert_eq!(co_runners(&plan_of("best-by-matrix"), 0), [2]);
    assert_eq!(co_runners(&plan_of("worst-by-matrix"), 0), [1]);
}
