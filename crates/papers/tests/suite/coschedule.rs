//! Tests which tasks run together on one cache with two CPUs, under co-scheduling by activity vectors and by counters.

use std::collections::BTreeMap;

use cachemate_core::test_support::*;
use cachemate_core::*;
use cachemate_papers::policies::PAPERS;

const WINDOW_NS: u64 = 100_000_000;

/// One cache of two CPUs, without these abilities.
fn view_without(missing_abilities: &[Ability]) -> ViewFixture {
    let mut known_abilities = vec![
        Ability::Gangs,
        Ability::Penalties,
        Ability::CountSuperSets,
        Ability::Affinity,
    ];
    known_abilities.retain(|ability| !missing_abilities.contains(ability));
    let capabilities = Capabilities {
        min_slice_ns: Some(1),
        ..capabilities_fixture(&known_abilities)
    };
    ViewFixture::new(
        last_level_caches(1, 2, CacheLevel::L2, 4 << 20),
        capabilities,
        0,
    )
}

fn task_fixture(id: u32) -> TaskSample {
    TaskSample::new(TaskId(id), ProcessId(id))
}

/// A profile with eight super sets, of which the given ones are busy.
fn busy_in(super_sets: std::ops::Range<usize>) -> Profile {
    let count = |index: usize| SuperSetCount {
        accesses: 100,
        misses: if super_sets.contains(&index) { 50 } else { 1 },
    };
    let mut profile = Profile::default();
    let counts = (0..8).map(count).collect();
    profile
        .locality
        .activity
        .insert(CacheLevel::L2, Fact::new(counts, FactSource::SuperSets, 0));
    profile
}

struct CoScheduleRun {
    decisions: Vec<Decision>,
    /// Number of windows that each task ran.
    ran: Vec<u32>,
}

impl CoScheduleRun {
    /// The pairs of tasks that ran together, in the order of tasks.
    fn pairs(&self) -> Vec<Vec<u32>> {
        let pair = |decision: &Decision| {
            let mut pair: Vec<u32> = decision.plan.gangs[0].gangs[0]
                .members
                .iter()
                .map(|(task, _)| task.0)
                .collect();
            pair.sort_unstable();
            pair
        };
        self.decisions.iter().map(pair).collect()
    }
}

/// Runs windows in which the machine runs the plan's first gang, and every task's profile is known from the start.
fn run(
    policy: &str,
    parameters: &str,
    profiles: Vec<Profile>,
    windows: u64,
    missing_abilities: &[Ability],
) -> CoScheduleRun {
    run_filling(
        policy,
        parameters,
        profiles,
        windows,
        missing_abilities,
        None,
    )
}

/// The counts of the tasks that ran: their profile, with additional misses in the first window after a wait.
fn probe_results(
    tasks: &[TaskSample],
    has_waited: &[bool],
    profiles: &Profiles,
    filling: u64,
) -> Vec<ProbeResult> {
    let task_sets = |(index, task): (usize, &TaskSample)| {
        let cpu = task.cpu?;
        let mut super_sets = profiles[&task.task].locality.activity[&CacheLevel::L2]
            .value
            .clone();
        super_sets[0].misses += if has_waited[index] { filling } else { 0 };
        let evidence = ProbeEvidence::Activity {
            task: task.task,
            cpu,
            level: CacheLevel::L2,
            super_sets,
        };
        Some(ProbeResult {
            probe: ProbeId(0),
            evidence,
            complete: true,
            cost_ns: Vec::new(),
        })
    };

    tasks.iter().enumerate().filter_map(task_sets).collect()
}

fn run_filling(
    policy: &str,
    parameters: &str,
    profiles: Vec<Profile>,
    windows: u64,
    missing_abilities: &[Ability],
    filling: Option<u64>,
) -> CoScheduleRun {
    let mut view = view_without(missing_abilities);
    let mut policy = PAPERS.build(policy, parameters, 1).unwrap();
    let mut tasks: Vec<TaskSample> = (0..profiles.len() as u32).map(task_fixture).collect();
    view.profiles = (0..).map(TaskId).zip(profiles).collect();
    let mut run = CoScheduleRun {
        decisions: Vec::new(),
        ran: vec![0; tasks.len()],
    };
    let mut has_waited = vec![true; tasks.len()];

    for window in 0..windows {
        let answers =
            filling.map(|filling| probe_results(&tasks, &has_waited, &view.profiles, filling));
        view.observation = Observation {
            probe_results: answers.unwrap_or_default(),
            ..observation_of(window, WINDOW_NS, tasks.clone())
        };
        let decision = view.decide(policy.as_mut(), &NullPredictor);
        has_waited = tasks.iter().map(|task| task.cpu.is_none()).collect();

        for task in &mut tasks {
            let seats = decision
                .plan
                .gangs
                .iter()
                .filter_map(|schedule| schedule.gangs.first())
                .flat_map(|gang| &gang.members);
            let seat_of: BTreeMap<TaskId, Option<CpuId>> = seats.copied().collect();
            let cpu = seat_of.get(&task.task).copied().flatten();
            (task.cpu, task.on_cpu_ns) =
                (cpu, cpu.map(|cpu| (cpu, WINDOW_NS)).into_iter().collect());
            run.ran[task.task.0 as usize] += u32::from(cpu.is_some());
        }
        run.decisions.push(decision);
    }

    run
}

fn profiles_in_halves() -> Vec<Profile> {
    vec![busy_in(0..4), busy_in(0..4), busy_in(4..8), busy_in(4..8)]
}

/// Do tasks that use different halves of the cache run together, and all tasks equally often?
#[test]
fn tasks_on_different_cache_halves_run_together() {
    let run = run(
        "activity-vector",
        "form = \"set\"",
        profiles_in_halves(),
        40,
        &[],
    );
    let is_split = |pair: &&Vec<u32>| pair[0] < 2 && pair[1] >= 2;
    assert_eq!(
        run.pairs().iter().filter(is_split).count(),
        40,
        "{:?}",
        run.pairs()
    );
    assert_eq!(run.ran, [20; 4]);
}

/// If refills cost misses, does the whole set change less often the more they cost, while all tasks still run equally
/// often within the bound of the scores?
#[test]
fn the_set_changes_less_often_the_more_refills_cost() {
    let changes = |filling: u64, parameters: &str| {
        let run = run_filling(
            "activity-vector",
            parameters,
            profiles_in_halves(),
            400,
            &[],
            Some(filling),
        );
        let (min_runs, max_runs) = (run.ran.iter().min().unwrap(), run.ran.iter().max().unwrap());
        assert!(max_runs - min_runs <= 20, "{filling}: {:?}", run.ran);
        run.pairs()
            .windows(2)
            .filter(|two| two[0] != two[1])
            .count()
    };
    let set = "form = \"set\"";
    let (without_filling, small_filling, large_filling) =
        (changes(0, set), changes(400, set), changes(1600, set));
    assert!(
        large_filling > 10
            && 2 * large_filling < small_filling
            && 2 * small_filling < without_filling,
        "{without_filling} {small_filling} {large_filling}"
    );
    assert!(
        changes(1600, "form = \"set\"\nweights.newcomer = 0.0") >= without_filling,
        "nothing to pay"
    );
    // Whatever the cost, no task waits longer than the 32 samples that a reload may weigh, twice for two tasks, plus a
    // few.
    let run = run_filling(
        "activity-vector",
        set,
        profiles_in_halves(),
        2_000,
        &[],
        Some(1_000_000),
    );
    let (min_runs, max_runs) = (run.ran.iter().min().unwrap(), run.ran.iter().max().unwrap());
    assert!(
        *min_runs > 900 && max_runs - min_runs <= 70,
        "{:?}",
        run.ran
    );
    // The paper's form does not include this cost.
    assert_eq!(changes(1600, ""), changes(0, ""));
}

/// Does the paper's form replace one task at a time, the one that ran most, and keep all tasks within the bound?
#[test]
fn the_literal_form_replaces_one_at_a_time() {
    let run = run("activity-vector", "", profiles_in_halves(), 200, &[]);
    let pairs = run.pairs();
    for two in pairs.windows(2) {
        assert!(two[0].iter().any(|task| two[1].contains(task)), "{two:?}");
    }
    let split_count = pairs
        .iter()
        .filter(|pair| pair[0] < 2 && pair[1] >= 2)
        .count();
    assert!(
        split_count > pairs.len() * 2 / 3,
        "a chance of 2 in 3 without looking, {split_count} of {}",
        pairs.len()
    );
    // Scores differ by at most 4 bits, and a sample weighs 4, so no task falls more than one or two samples behind.
    let (min_runs, max_runs) = (run.ran.iter().min().unwrap(), run.ran.iter().max().unwrap());
    assert!(max_runs - min_runs <= 2, "{:?}", run.ran);
}

/// If only samples have a weight, do all tasks take turns, whatever the evidence?
#[test]
fn all_tasks_take_turns_if_only_samples_have_a_weight() {
    let nothing = "[weights]\nlast_level_miss = 0.0";
    for profiles in [profiles_in_halves(), vec![Profile::default(); 4]] {
        let run = run("activity-vector", nothing, profiles, 41, &[]);
        let (min_runs, max_runs) = (run.ran.iter().min().unwrap(), run.ran.iter().max().unwrap());
        assert!(max_runs - min_runs <= 1, "{:?}", run.ran);
        assert!(run.decisions[0].plan.probes.is_empty());
    }
}

/// Does the Linux form give advice about exactly the pairs that share bits, and is it used on machines without gangs?
#[test]
fn advice_names_the_pairs_that_share_bits() {
    for (parameters, missing_abilities) in
        [("form = \"advice\"", vec![]), ("", vec![Ability::Gangs])]
    {
        let run = run(
            "activity-vector",
            parameters,
            profiles_in_halves(),
            1,
            &missing_abilities,
        );
        let penalty = |a, b| CoRunPenalty {
            tasks: (TaskId(a), TaskId(b)),
            penalty: 4.0,
        };
        assert_eq!(
            run.decisions[0].plan.penalties,
            [penalty(0, 1), penalty(2, 3)]
        );
        assert!(run.decisions[0].plan.gangs.is_empty());
    }
}

/// Do counters pair tasks with many misses with tasks with few, whereas activity vectors find all of them busy?
#[test]
fn counters_pair_tasks_with_many_misses_and_with_few() {
    let miss_rate = |rate: f64| {
        Profile::default().with_rates(RateFacts {
            observed_misses_per_kilo_instr: Some(Fact::oracle(rate)),
            ..RateFacts::default()
        })
    };
    let tasks = vec![
        miss_rate(30.0),
        miss_rate(30.0),
        miss_rate(1.0),
        miss_rate(1.0),
    ];
    let run = run("counter-driven", "form = \"set\"", tasks, 40, &[]);
    assert!(
        run.pairs().iter().all(|pair| pair[0] < 2 && pair[1] >= 2),
        "{:?}",
        run.pairs()
    );
    assert_eq!(run.ran, [20; 4]);
}

/// Is the probe requested for the weighted level only, and not at all if the machine cannot count?
#[test]
fn the_probe_is_requested_for_the_weighted_level_only() {
    let probes = |missing_abilities: &[Ability]| {
        let run = run(
            "activity-vector",
            "super_sets = 8",
            profiles_in_halves(),
            1,
            missing_abilities,
        );
        run.decisions[0].plan.probes.clone()
    };
    let requests = probes(&[]);
    assert_eq!(requests.len(), 1);
    let tasks = (0..4).map(TaskId).collect();
    assert_eq!(
        requests[0].kind,
        ProbeKind::SuperSets {
            tasks,
            level: CacheLevel::L2,
            super_sets: 8
        }
    );
    assert!(probes(&[Ability::CountSuperSets]).is_empty());
}

/// Is there no advice for a task that lags behind by more than the bound, but for all others?
#[test]
fn lagging_tasks_get_no_advice() {
    // On two CPUs, tasks 0 and 2 run all the time, 1 and 3 never, so the mean is half a sample per window.
    let penalties = |parameters: &str, windows: u64| {
        let mut view = view_without(&[]);
        let mut policy = PAPERS.build("activity-vector", parameters, 1).unwrap();
        view.profiles = (0u32..).map(TaskId).zip(profiles_in_halves()).collect();
        let mut last = Vec::new();
        for window in 0..windows {
            let mut tasks: Vec<TaskSample> = (0..4).map(task_fixture).collect();
            for (index, cpu) in [(0, 0), (2, 1)] {
                tasks[index].on_cpu_ns = vec![(CpuId(cpu), WINDOW_NS)];
            }
            view.observation = observation_of(window, WINDOW_NS, tasks);
            last = view.decide(policy.as_mut(), &NullPredictor).plan.penalties;
        }
        last.len()
    };

    let advice = "form = \"advice\"\n";
    assert_eq!(
        [1, 3, 4].map(|windows| penalties(advice, windows)),
        [2, 2, 0]
    );
    let bound = |samples: &str| format!("{advice}max_lag_samples = {samples}");
    assert_eq!(
        [1, 2].map(|windows| penalties(&bound("0.4"), windows)),
        [2, 0]
    );
    assert_eq!(penalties(&bound("inf"), 50), 2);
}
