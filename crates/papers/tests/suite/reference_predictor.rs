//! Tests whether the reference predictor agrees with theory.

use cachemate_core::test_support::*;
use cachemate_core::*;
use cachemate_papers::reference_predictor::ReferencePredictor;

const MB: u64 = 1 << 20;

fn profile_fixture(curve: &[(u64, f64)]) -> Profile {
    let rates = RateFacts {
        llc_refs_per_mega_instr: Some(Fact::oracle(40_000.0)),
        solo_instr_per_cycle: Some(Fact::oracle(1.0)),
        ..RateFacts::default()
    };
    let curve = curve
        .iter()
        .map(|&(size, misses)| (size, Estimate::exact(misses)))
        .collect();
    Profile::default()
        .with_rates(rates)
        .with_misses(CacheLevel::L2, curve, FactSource::Oracle)
}
/// The profile of a program that needs all of the 4 MB.
fn sensitive_profile() -> Profile {
    profile_fixture(&[(0, 20.0), (4 * MB, 0.5)])
}
fn stream_profile() -> Profile {
    profile_fixture(&[(0, 30.0), (8 * MB, 30.0)])
}

fn forecast_plan(profiles: Vec<Profile>, plan: &Plan) -> Forecast {
    let profiles: Profiles = profiles
        .into_iter()
        .enumerate()
        .map(|(index, p)| (TaskId(index as u32), p))
        .collect();
    forecast_on(capabilities_fixture(&[]), profiles, plan)
}
fn forecast_on(capabilities: Capabilities, profiles: Profiles, plan: &Plan) -> Forecast {
    let bench = ViewFixture {
        profiles,
        ..ViewFixture::new(
            last_level_caches(2, 2, CacheLevel::L2, 4 * MB),
            capabilities,
            0,
        )
    };
    ReferencePredictor {
        miss_penalty_cycles: 100.0,
    }
    .forecast(&bench.view(&NullPredictor), plan)
}
fn pinned_plan(cpus: &[&str]) -> Plan {
    let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
    for (task, cpus) in cpus.iter().enumerate() {
        plan.affinity
            .insert(TaskId(task as u32), cpus.parse().unwrap());
    }
    plan
}
fn degradation_of(forecast: &Forecast, task: u32) -> f64 {
    forecast.tasks[&TaskId(task)].degradation.unwrap().value
}

/// Does a program alone on a cache not slow down, and does a stream slow a sensitive one only on the same cache?
#[test]
fn a_stream_slows_a_sensitive_program_only_on_its_cache() {
    let split_forecast = forecast_plan(
        vec![sensitive_profile(), stream_profile()],
        &pinned_plan(&["0-1", "2-3"]),
    );
    assert_eq!(
        (
            degradation_of(&split_forecast, 0),
            degradation_of(&split_forecast, 1)
        ),
        (0.0, 0.0)
    );
    let shared_forecast = forecast_plan(
        vec![sensitive_profile(), stream_profile()],
        &pinned_plan(&["0", "1"]),
    );
    assert!(
        degradation_of(&shared_forecast, 0) > 0.3,
        "{shared_forecast:?}"
    );
    assert!(
        degradation_of(&shared_forecast, 1).abs() < 1e-9,
        "a stream has nothing to lose"
    );
    assert!(
        shared_forecast.cache_miss_ratio[&CacheId(0)].value
            > split_forecast.cache_miss_ratio[&CacheId(0)].value
    );
    assert_eq!(
        forecast_plan(
            vec![sensitive_profile(), stream_profile()],
            &Plan::idle(WindowLength::Time { ns: 1 })
        )
        .unknown,
        []
    );
}

/// Does each of two equal programs occupy half of the cache?
#[test]
fn two_equal_programs_occupy_half_of_the_cache_each() {
    let equal_forecast = forecast_plan(
        vec![sensitive_profile(), sensitive_profile()],
        &pinned_plan(&["0", "1"]),
    );
    let half = equal_forecast.tasks[&TaskId(0)]
        .misses_per_kilo_instr
        .unwrap()
        .value;
    assert!((half - 10.25).abs() < 1e-6, "{half}");
    assert_eq!(
        equal_forecast.tasks[&TaskId(0)],
        equal_forecast.tasks[&TaskId(1)]
    );
}

/// Do separate ways protect a program from a stream, and do turns in gangs separate the two?
#[test]
fn separate_ways_and_gang_turns_protect_from_a_stream() {
    let mut plan = pinned_plan(&["0", "1"]);
    let share = |group, task, mask: &str| CacheShare {
        group: GroupId(group),
        members: vec![ShareMember::Task(TaskId(task))],
        cache: CacheId(0),
        units: Units::Ways {
            mask: mask.parse().unwrap(),
        },
    };
    plan.shares = vec![share(0, 0, "0-13"), share(1, 1, "14-15")];
    let parted = forecast_plan(vec![sensitive_profile(), stream_profile()], &plan);
    let misses = parted.tasks[&TaskId(0)]
        .misses_per_kilo_instr
        .unwrap()
        .value;
    assert!(
        (misses - (0.5 + 19.5 / 8.0)).abs() < 1e-9,
        "14 of 16 ways: {misses}"
    );

    let gang = |task| Gang {
        members: vec![(TaskId(task), None)],
        slices: 1 + task,
    };
    let mut gang_plan = pinned_plan(&["0-1", "0-1"]);
    gang_plan.gangs.push(GangSchedule {
        cpus: "0-1".parse().unwrap(),
        slice_ns: 1,
        gangs: vec![gang(0), gang(1)],
    });
    let gang_forecast = forecast_plan(vec![sensitive_profile(), stream_profile()], &gang_plan);
    assert_eq!(degradation_of(&gang_forecast, 0), 0.0);
    assert!((gang_forecast.tasks[&TaskId(1)].cpu_share.unwrap().value - 2.0 / 3.0).abs() < 1e-12);
}

/// Do colors, which belong to processes and apply to every cache of the level, separate the two as well?
#[test]
fn colors_of_processes_protect_from_a_stream() {
    let mut plan = pinned_plan(&["2", "3"]);
    let share = |process, allowed: &str| CacheShare {
        group: GroupId(process),
        members: vec![ShareMember::Process(ProcessId(process))],
        cache: CacheId(0),
        units: Units::Colors {
            allowed: allowed.parse().unwrap(),
            migration: PageMigration::Never,
        },
    };
    plan.shares = vec![share(7, "0-11"), share(8, "12-15")];

    let with_process = |process: u32, profile: Profile| Profile {
        process: Some(ProcessId(process)),
        ..profile
    };
    let profiles: Profiles = [
        (TaskId(0), with_process(7, sensitive_profile())),
        (TaskId(1), with_process(8, stream_profile())),
    ]
    .into_iter()
    .collect();
    let misses = |colors: Option<u32>| {
        let divided = |colors| PartitionSupport::Colors {
            colors,
            page_bytes: 4096,
            page_migration_ns: 1.0,
        };
        let machine = colors
            .into_iter()
            .fold(capabilities_fixture(&[]), |machine, n| {
                machine.with_partition(CacheId(0), divided(n))
            });
        Some(
            forecast_on(machine, profiles.clone(), &plan).tasks[&TaskId(0)]
                .misses_per_kilo_instr?
                .value,
        )
    };
    assert!(
        (misses(Some(16)).unwrap() - (0.5 + 19.5 / 4.0)).abs() < 1e-9,
        "12 of 16 colors: {:?}",
        misses(Some(16))
    );
    assert!(
        (misses(Some(64)).unwrap() - (0.5 + 19.5 * 13.0 / 16.0)).abs() < 1e-9,
        "of 64: {:?}",
        misses(Some(64))
    );
    assert_eq!(
        misses(None),
        None,
        "an unreported number of colors is not guessed"
    );
}

/// Does a neighbor compete for a task's share only if it does not fit into its space outside that share?
#[test]
fn space_elsewhere_keeps_a_neighbor_from_competing() {
    let mut plan = pinned_plan(&["0", "1"]);
    plan.shares = vec![CacheShare {
        group: GroupId(0),
        members: vec![ShareMember::Task(TaskId(0))],
        cache: CacheId(0),
        units: Units::Ways {
            mask: "0-3".parse().unwrap(),
        },
    }];
    let misses = |fits_from: u64| {
        let neighbor = profile_fixture(&[
            (0, 20.0),
            (fits_from - 1, 20.0),
            (fits_from, 0.0),
            (4 * MB, 0.0),
        ]);
        forecast_plan(vec![sensitive_profile(), neighbor], &plan).tasks[&TaskId(0)]
            .misses_per_kilo_instr
            .unwrap()
            .value
    };

    let whole_share = 20.0 - 19.5 / 4.0;
    assert!(
        (misses(2 * MB) - whole_share).abs() < 1e-6,
        "it fits into the other twelve ways: {}",
        misses(2 * MB)
    );
    assert!(misses(4 * MB) > whole_share + 1.0, "{}", misses(4 * MB));
}

/// Is an unknown task listed, without a forecast for it or for the misses of tasks that meet it?
#[test]
fn unknown_tasks_are_listed_without_a_forecast() {
    let message = forecast_plan(
        vec![sensitive_profile(), Profile::default(), sensitive_profile()],
        &pinned_plan(&["0", "1", "2"]),
    );
    assert_eq!(message.unknown, [TaskId(1)]);
    assert_eq!(message.tasks[&TaskId(0)].degradation, None);
    assert_eq!(message.tasks[&TaskId(1)].misses_per_kilo_instr, None);
    assert_eq!(degradation_of(&message, 2), 0.0);
    assert!(!message.cache_miss_ratio.contains_key(&CacheId(0)));
    assert_eq!(
        message.tasks[&TaskId(0)].cpu_share,
        Some(Estimate::exact(1.0))
    );
}

/// Does the default scheduler's spread put two of five tasks on one CPU, for half of the time each?
#[test]
fn more_tasks_than_cpus_take_turns() {
    let message = forecast_plan(
        vec![stream_profile(); 5],
        &Plan::idle(WindowLength::Time { ns: 1 }),
    );
    let shares: Vec<f64> = message
        .tasks
        .values()
        .map(|task| task.cpu_share.unwrap().value)
        .collect();
    assert_eq!(shares.iter().sum::<f64>(), 4.0);
    assert_eq!(shares.iter().filter(|&&share| share == 0.5).count(), 2);
}

/// Are reuse times alone sufficient for a curve?
#[test]
fn reuse_times_alone_suffice_for_a_curve() {
    let times = vec![(Some(100), 0.5), (Some(40_000), 0.4), (None, 0.1)];
    let reuse_times = Some(Fact::new(times, FactSource::ReuseSamples, 0));
    let reuses = Profile {
        locality: LocalityFacts {
            reuse_times,
            ..LocalityFacts::default()
        },
        ..sensitive_profile()
    };
    let alone = forecast_plan(vec![reuses.clone()], &pinned_plan(&["0"]));
    assert_eq!(degradation_of(&alone, 0), 0.0);
    assert!(
        degradation_of(
            &forecast_plan(vec![reuses, stream_profile()], &pinned_plan(&["0", "1"])),
            0
        ) > 0.0
    );
}
