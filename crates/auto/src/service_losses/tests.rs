mod scheduled;

use super::*;
use cachemate_core::test_support::{last_level_caches, observation_of};
use cachemate_core::{
    ActiveShare, CacheLevel, CacheShare, CounterEvent, CpuId, EventCount, EventCounts, Fact,
    FactSource, GroupId, ProbeId, ProbeResult, ProcessId, ServiceKind, SplitMix64, TaskId,
    TimeSpan, Units,
};

const WINDOW_NS: u64 = 1_000_000_000;

fn unit_service(name: &str) -> ServiceIdentity {
    ServiceIdentity::new(ServiceKind::Unit, format!("{name}.service"))
}

/// A task that runs all the time on a CPU, with this many instructions if they are counted.
fn task_fixture(
    id: u32,
    service: &ServiceIdentity,
    cpu: u32,
    instructions: Option<f64>,
) -> TaskSample {
    TaskSample {
        service: Some(service.clone()),
        on_cpu_ns: vec![(CpuId(cpu), WINDOW_NS)],
        counts: EventCounts::exact(
            instructions.map(|count| (CounterEvent::Instructions, count as u64)),
        ),
        ..TaskSample::new(TaskId(id), ProcessId(id))
    }
}

fn window_fixture(number: u64, tasks: Vec<TaskSample>) -> Observation {
    observation_of(number, WINDOW_NS, tasks)
}

fn report_of<'r>(reports: &'r [ServiceReport], service: &ServiceIdentity) -> &'r ServiceReport {
    reports
        .iter()
        .find(|report| report.service == *service)
        .unwrap()
}

fn no_forecast(_: &Profile, _: &Profile) -> Option<Estimate> {
    None
}

/// Is a batch service, which runs as a loop of short programs, named as the cause of the store's loss with its measured
/// share, six windows after its start? Is the quiet service beside them not named?
#[test]
fn the_cause_is_named_with_its_measured_share() {
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let (store, batch, quiet) = (
        unit_service("store"),
        unit_service("batch"),
        unit_service("quiet"),
    );
    let (mut losses, mut random) = (ServiceLosses::default(), SplitMix64::new(5));
    let mut reports = Vec::new();
    for number in 0..26 {
        let has_started = number >= 20;
        let speed = if has_started { 1e9 / 1.5 } else { 1e9 } * (1.0 + 0.02 * random.draw_unit());
        let mut tasks = vec![
            task_fixture(0, &store, 0, Some(speed)),
            task_fixture(1, &quiet, 1, Some(1e9)),
        ];
        if has_started {
            tasks.push(TaskSample {
                exited: true,
                ..task_fixture(100 + number as u32, &batch, 2, Some(2e9))
            });
        }
        reports = losses.observe(
            &window_fixture(number, tasks),
            &topology,
            &Profiles::new(),
            &no_forecast,
        );
    }
    let report = report_of(&reports, &store);
    assert_eq!(report.losses.len(), 1, "{report:?}");
    let loss = &report.losses[0];
    assert_eq!((&loss.cause, loss.source), (&batch, LossSource::Measured));
    assert!(
        (loss.loss.value - 0.5).abs() < 0.06 && loss.loss.low > 0.3,
        "{loss:?}"
    );
    let (slowdown, source) = report.slowdown.cache.unwrap();
    assert_eq!((slowdown, source), (loss.loss, LossSource::Measured));
    assert!(report_of(&reports, &quiet).losses.is_empty());
    assert_eq!(
        reports[0].service, store,
        "the one that loses most comes first"
    );
}

/// Does the share of a loop of short programs hardly depend on the position in the loop at which it is read, although a
/// window ends in each gap between two programs?
#[test]
fn a_gap_between_two_programs_hardly_changes_the_share() {
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let (store, batch) = (unit_service("store"), unit_service("batch"));
    let mut losses = ServiceLosses::default();
    let mut shares = Vec::new();
    for number in 0..200u64 {
        let is_gap = number >= 60 && number % 11 == 10;
        let is_beside = number >= 60 && !is_gap;
        let ns = if is_gap { WINDOW_NS / 20 } else { WINDOW_NS };
        let instructions = if is_beside { 1e9 / 1.5 } else { 1e9 } * ns as f64 / WINDOW_NS as f64;
        let mut tasks = vec![task_fixture(0, &store, 0, Some(instructions))];
        tasks.extend(is_beside.then(|| task_fixture(1, &batch, 1, Some(1e9))));
        tasks.iter_mut().for_each(|task| {
            task.on_cpu_ns
                .iter_mut()
                .for_each(|(_, ns_on_cpu)| *ns_on_cpu = ns)
        });
        let mut observation = window_fixture(number, tasks);
        observation.span.elapsed_ns = ns;
        let reports = losses.observe(&observation, &topology, &Profiles::new(), &no_forecast);
        if number >= 100 {
            shares.push(report_of(&reports, &store).losses[0].loss.value);
        }
    }

    let (low, high) = (
        shares.iter().copied().reduce(f64::min),
        shares.iter().copied().reduce(f64::max),
    );
    assert!(
        low.unwrap() > 0.45 && high.unwrap() < 0.52,
        "{low:?} to {high:?}"
    );
}

/// Is a slowdown without counters unknown with its reason, and forecast as soon as profiles suffice?
#[test]
fn a_slowdown_without_counters_is_forecast_or_has_a_reason() {
    let topology = last_level_caches(1, 2, CacheLevel::L3, 1 << 23);
    let (store, batch) = (unit_service("store"), unit_service("batch"));
    let mut losses = ServiceLosses::default();
    let tasks = || {
        vec![
            task_fixture(0, &store, 0, None),
            task_fixture(1, &batch, 1, None),
        ]
    };
    let reports = losses.observe(
        &window_fixture(0, tasks()),
        &topology,
        &Profiles::new(),
        &no_forecast,
    );
    let report = report_of(&reports, &store);
    assert_eq!((report.slowdown.cache, report.losses.len()), (None, 0));
    assert!(
        report
            .reason
            .as_ref()
            .unwrap()
            .contains("no work is counted"),
        "{report:?}"
    );
    let mut profiles = Profiles::from([
        (TaskId(0), Profile::default()),
        (TaskId(1), Profile::default()),
    ]);
    let fact = |value| Some(Fact::new(value, FactSource::StoredProfile, 0));
    profiles.get_mut(&TaskId(0)).unwrap().contention.sensitivity = fact(0.4);
    profiles.get_mut(&TaskId(1)).unwrap().contention.intensity = fact(0.5);
    let reports = losses.observe(
        &window_fixture(1, tasks()),
        &topology,
        &profiles,
        &no_forecast,
    );
    let report = report_of(&reports, &store);
    assert_eq!(report.losses[0].source, LossSource::Forecast);
    assert!(
        (report.losses[0].loss.value - 0.2).abs() < 1e-9 && report.reason.is_none(),
        "{report:?}"
    );
    let alone = losses.observe(
        &window_fixture(2, vec![task_fixture(0, &store, 0, None)]),
        &topology,
        &profiles,
        &no_forecast,
    );
    assert!(
        report_of(&alone, &store)
            .losses
            .iter()
            .all(|loss| loss.source == LossSource::Forecast)
    );
}

/// If co-runners never stop, is a slowdown relative to the solo speed divided among them by their forecasts?
#[test]
fn a_measured_slowdown_is_divided_among_constant_co_runners() {
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let (store, batch, scan) = (
        unit_service("store"),
        unit_service("batch"),
        unit_service("scan"),
    );
    let mut losses = ServiceLosses::default();
    let mut profiles = Profiles::new();
    let mut own_profile = Profile::default();
    own_profile.rates.solo_instr_per_cycle = Some(Fact::new(2.0, FactSource::Counters, 0));
    own_profile.contention.sensitivity = Some(Fact::new(1.0, FactSource::Neighbor, 0));
    profiles.insert(TaskId(0), own_profile);
    for (id, intensity) in [(1, 0.6), (2, 0.2)] {
        let mut profile = Profile::default();
        profile.contention.intensity = Some(Fact::new(intensity, FactSource::PrimeProbe, 0));
        profiles.insert(TaskId(id), profile);
    }
    let mut reports = Vec::new();
    for number in 0..10 {
        let mut first = task_fixture(0, &store, 0, Some(1e9));
        first.counts.0.insert(
            0,
            EventCount {
                event: CounterEvent::Cycles,
                count: 700_000_000,
                enabled_share: 1.0,
            },
        );
        let tasks = vec![
            first,
            task_fixture(1, &batch, 1, Some(1e9)),
            task_fixture(2, &scan, 2, Some(1e9)),
        ];
        reports = losses.observe(
            &window_fixture(number, tasks),
            &topology,
            &profiles,
            &no_forecast,
        );
    }
    let report = report_of(&reports, &store);
    let (slowdown, source) = report.slowdown.cache.unwrap();
    assert!((slowdown.value - 0.4).abs() < 1e-6 && source == LossSource::Measured);
    let parts: Vec<(&ServiceIdentity, LossSource, i64)> = report
        .losses
        .iter()
        .map(|loss| {
            (
                &loss.cause,
                loss.source,
                libm::round(100.0 * loss.loss.value) as i64,
            )
        })
        .collect();
    assert_eq!(
        parts,
        [
            (&batch, LossSource::Attributed, 30),
            (&scan, LossSource::Attributed, 10)
        ]
    );
}

/// Is a service on another cache never named as a cause, and is the reason stated?
#[test]
fn a_service_on_another_cache_is_never_named_as_a_cause() {
    let topology = last_level_caches(2, 2, CacheLevel::L3, 1 << 23);
    let (store, batch) = (unit_service("store"), unit_service("batch"));
    let mut losses = ServiceLosses::default();
    for number in 0..30 {
        let speed = if number % 10 < 5 { 1e9 } else { 5e8 };
        let mut tasks = vec![task_fixture(0, &store, 0, Some(speed))];
        tasks.extend((number % 10 >= 5).then(|| task_fixture(1, &batch, 3, Some(1e9))));
        let reports = losses.observe(
            &window_fixture(number, tasks),
            &topology,
            &Profiles::new(),
            &no_forecast,
        );
        let report = report_of(&reports, &store);
        assert!(
            report.losses.is_empty()
                && report
                    .reason
                    .as_ref()
                    .unwrap()
                    .contains("no other managed service")
        );
    }
}

/// An interval of a probe with these tasks, each with its instructions per 1,000 cycles.
fn row_fixture(tasks: &[(u32, u64)]) -> RowInterval {
    let counts = |instructions| {
        EventCounts::exact([
            (CounterEvent::Instructions, instructions),
            (CounterEvent::Cycles, 1_000),
        ])
    };

    RowInterval {
        tasks: tasks.iter().map(|(id, _)| TaskId(*id)).collect(),
        cache: CacheId(0),
        span: TimeSpan {
            start_ns: 0,
            elapsed_ns: 100_000_000,
            elapsed_cycles: None,
        },
        ended_by_task: None,
        cache_counts: EventCounts::default(),
        task_counts: tasks
            .iter()
            .map(|(_, instructions)| counts(*instructions))
            .collect(),
    }
}

/// If a probe itself speeds the store up by 30 %, is the loss by the paused service still measured within two points?
/// Is it reported as prevented while the service is confined and harms no longer?
#[test]
fn a_confined_cause_stays_named_with_its_loss_before() {
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let (store, batch) = (unit_service("store"), unit_service("batch"));

    let (mut losses, mut random) = (ServiceLosses::default(), SplitMix64::new(9));
    let mut reports = Vec::new();
    for number in 0..20 {
        let is_confined = number > 10;
        let speed = if is_confined { 1e9 } else { 1e9 / 1.1 } * (1.0 + 0.01 * random.draw_unit());
        let mut tasks = vec![
            task_fixture(0, &store, 0, Some(speed)),
            task_fixture(1, &batch, 1, Some(1e9)),
        ];
        let cycles = EventCount {
            event: CounterEvent::Cycles,
            count: WINDOW_NS,
            enabled_share: 1.0,
        };
        tasks.iter_mut().for_each(|task| task.counts.0.push(cycles));
        let mut observation = window_fixture(number, tasks);
        if number == 10 {
            observation.tasks[0].counts.0[0].count = 1_300_000_000;
            let (pause, all) = (
                row_fixture(&[(0, 1_300)]),
                row_fixture(&[(0, 1_182), (1, 1_000)]),
            );
            let rows = [vec![pause; 4], vec![all; 4]].concat();
            let evidence = ProbeEvidence::Rows(rows);
            observation.probe_results = vec![ProbeResult {
                probe: ProbeId(0),
                evidence,
                complete: true,
                cost_ns: Vec::new(),
            }];
        }
        if is_confined {
            let members = vec![ShareMember::Process(ProcessId(1))];
            let units = Units::Ways {
                mask: (0..4).collect(),
            };
            let share = CacheShare {
                group: GroupId(0),
                members,
                cache: CacheId(0),
                units,
            };
            observation.applied.shares = vec![ActiveShare {
                share,
                pages_in_share: None,
                fallback_pages: None,
                occupancy_bytes: None,
            }];
        }
        reports = losses.observe(&observation, &topology, &Profiles::new(), &no_forecast);
        let report = report_of(&reports, &store);
        let prevented: Vec<&ServiceLoss> = report.prevented_losses.iter().collect();
        match number {
            10 => assert!(
                (report.losses[0].loss.value - 0.1).abs() < 0.02 && prevented.is_empty(),
                "{report:?}"
            ),
            11.. => assert!(
                prevented.len() == 1 && (prevented[0].loss.value - 0.1).abs() < 0.02,
                "{report:?}"
            ),
            _ => assert!(prevented.is_empty()),
        }
    }
    let report = report_of(&reports, &store);
    assert_eq!(report.prevented_losses[0].cause, batch);
    assert!(
        report.losses.iter().all(|loss| loss.loss.value < 0.02),
        "{report:?}"
    );
}

/// A task that ran and waited for these parts of a window on a CPU.
fn sharing_task(
    id: u32,
    service: &ServiceIdentity,
    cpu: u32,
    (ran_share, waiting_share): (f64, f64),
    instr_per_second: Option<f64>,
) -> TaskSample {
    let part_ns = |share: f64| (share * WINDOW_NS as f64) as u64;
    TaskSample {
        on_cpu_ns: vec![(CpuId(cpu), part_ns(ran_share))],
        run_queue_wait_ns: Some(part_ns(waiting_share)),
        ..task_fixture(
            id,
            service,
            cpu,
            instr_per_second.map(|rate| rate * ran_share),
        )
    }
}

/// If a spinner takes half of the store's CPU, and each preemption costs the store some speed by CPU second: is the
/// spinner named for the waiting with its share, and never for the cache, also after the first windows with it?
#[test]
fn a_spinner_is_named_for_waiting_and_never_for_the_cache() {
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let (store, spinner) = (unit_service("store"), unit_service("spinner"));

    for preemption_cost in [0.0, 0.05, 0.1] {
        let (mut losses, mut random) = (ServiceLosses::default(), SplitMix64::new(4));
        for number in 0..120 {
            let is_beside = number / 20 % 2 == 1;
            // The scheduler divides the CPU only on average, and an idle host preempts now and then.
            let noise = 0.1 * random.draw_unit();
            let shares = if is_beside {
                (0.45 + noise, 0.55 - noise)
            } else {
                (0.98 - noise, 0.2 * noise)
            };
            let waiting_share = shares.1 / (shares.0 + shares.1);
            let speed =
                1e9 * (1.0 - preemption_cost * waiting_share) * (1.0 + 0.01 * random.draw_unit());
            let mut tasks = vec![sharing_task(0, &store, 0, shares, Some(speed))];
            tasks.extend(is_beside.then(|| {
                let rest = (1.0 - shares.0, shares.0);
                sharing_task(1, &spinner, 0, rest, Some(2e9))
            }));
            let reports = losses.observe(
                &window_fixture(number, tasks),
                &topology,
                &Profiles::new(),
                &no_forecast,
            );
            let report = report_of(&reports, &store);
            assert!(report.losses.is_empty(), "window {number}: {report:?}");
            if number % 40 == 39 {
                // In the mean it ran for 0.93 of a CPU alone and for 0.5 beside the spinner, whose preemptions cost it
                // speed.
                let expected = 0.93 / 0.5 - 1.0;
                let felt = 0.93 * (1.0 - 0.01 * preemption_cost)
                    / (0.5 * (1.0 - 0.5 * preemption_cost))
                    - 1.0;
                let waiting = report.slowdown.waiting.unwrap();
                let run_time = report.slowdown.run_time().unwrap();
                for (loss, truth) in [(waiting, expected), (run_time, felt)] {
                    let is_narrow = loss.high - loss.low < 0.3;
                    assert!(
                        loss.low < truth && truth < loss.high && is_narrow,
                        "{loss:?} {truth}"
                    );
                }
                assert_eq!(report.waiting_causes[0].cause, Some(spinner.clone()));
                assert!(report.waiting_causes[0].share > 0.99, "{report:?}");
            }
        }
    }
}

/// Is a stream that slows the store through the cache still named, although both wait for CPUs now and then?
#[test]
fn a_stream_is_named_for_the_cache_beside_some_waiting() {
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let (store, stream) = (unit_service("store"), unit_service("stream"));
    let (mut losses, mut random) = (ServiceLosses::default(), SplitMix64::new(6));
    let mut reports = Vec::new();
    for number in 0..60 {
        let is_beside = number / 10 % 2 == 1;
        let waiting_share = 0.2 * random.draw_unit();
        let speed = if is_beside { 1e9 / 1.2 } else { 1e9 } * (1.0 + 0.01 * random.draw_unit());
        let shares = (1.0 - waiting_share, waiting_share);
        let mut tasks = vec![sharing_task(0, &store, 0, shares, Some(speed))];
        tasks.extend(is_beside.then(|| sharing_task(1, &stream, 1, (1.0, 0.0), Some(1e9))));
        reports = losses.observe(
            &window_fixture(number, tasks),
            &topology,
            &Profiles::new(),
            &no_forecast,
        );
    }
    let report = report_of(&reports, &store);
    let (cache, source) = report.slowdown.cache.unwrap();
    assert_eq!(
        (&report.losses[0].cause, source),
        (&stream, LossSource::Measured)
    );
    // The stream ran in half of the windows over which the present loss is averaged.
    let expected = libm::sqrt(1.2) - 1.0;
    assert!((cache.value - expected).abs() < 0.01, "{report:?}");
    // What ran on the store's own CPU is not observed here, and the stream ran elsewhere.
    assert!(
        report
            .waiting_causes
            .iter()
            .all(|cause| cause.cause.is_none()),
        "{report:?}"
    );
    let (waiting, run_time) = (report.slowdown.waiting.unwrap(), report.slowdown.run_time());
    let product = (1.0 + cache.value) * (1.0 + waiting.value) - 1.0;
    assert!((run_time.unwrap().value - product).abs() < 1e-12 && report.slowdown.is_complete());
}

/// Is a service of which all threads were measured to evict nothing never named for the cache, whatever else changes
/// with it, and is one with a single other thread named?
#[test]
fn a_service_that_evicts_nothing_is_never_named_for_the_cache() {
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let (store, spinner) = (unit_service("store"), unit_service("spinner"));
    let profile_of = |intensity: f64| {
        let mut profile = Profile::default();
        profile.contention.intensity = Some(Fact::new(intensity, FactSource::PrimeProbe, 0));
        profile
    };

    // The second thread of the spinner runs for a third of the time of the first.
    for (first, second, causes) in [
        (0.01, Some(0.01), 0),
        (0.4, Some(0.01), 1),
        (0.01, Some(0.4), 1),
        (0.01, None, 1),
    ] {
        let mut profiles = Profiles::from([(TaskId(1), profile_of(first))]);
        profiles.extend(second.map(|intensity| (TaskId(2), profile_of(intensity))));
        let mut losses = ServiceLosses::default();
        let mut reports = Vec::new();
        for number in 0..40 {
            let is_beside = number / 10 % 2 == 1;
            let speed = if is_beside { 8e8 } else { 1e9 };
            let mut tasks = vec![task_fixture(0, &store, 0, Some(speed))];
            if is_beside {
                tasks.push(task_fixture(1, &spinner, 1, Some(2e9)));
                let third = (1.0 / 3.0, 0.0);
                tasks.push(sharing_task(2, &spinner, 2, third, Some(2e9)));
            }
            reports = losses.observe(
                &window_fixture(number, tasks),
                &topology,
                &profiles,
                &no_forecast,
            );
        }
        let report = report_of(&reports, &store);
        assert_eq!(report.losses.len(), causes, "{report:?}");
        let reason = report.reason.clone().unwrap_or_default();
        assert_eq!(reason.contains("evict nothing"), causes == 0, "{reason}");
    }
}

/// Is a promise that lacks the program's own speeds judged by the losses of its service, and is none said to be kept if
/// a loss is unknown or only a lower bound?
#[test]
fn a_promise_without_speeds_is_judged_by_the_losses_of_its_service() {
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let store = unit_service("store");
    let mut losses = ServiceLosses::default();
    let window = window_fixture(0, vec![task_fixture(0, &store, 0, Some(1e9))]);
    let reports = losses.observe(&window, &topology, &Profiles::new(), &no_forecast);
    let around = |value: f64| Estimate {
        value,
        low: value - 0.01,
        high: value + 0.01,
    };

    let state_of = |cache: Option<f64>, is_cache_complete, waiting: Option<f64>, term, missing| {
        let report = ServiceReport {
            slowdown: ServiceSlowdown {
                cache: cache.map(|loss| (around(loss), LossSource::Measured)),
                is_cache_complete,
                waiting: waiting.map(around),
                work: None,
            },
            ..report_of(&reports, &store).clone()
        };

        let promise = PromiseReport {
            process: ProcessId(0),
            task: TaskId(0),
            term,
            state: PromiseState::Unknown,
            measured: None,
            basis: None,
            windows: 0,
            missing: Some(missing),
            must_leave: Vec::new(),
            best_possible: None,
        };
        let judged = report.judge_promise(&promise);
        assert_eq!(judged.missing.is_some(), judged.measured.is_none());
        judged.state
    };

    let limit = PromiseTerm::MaxSlowdown(0.05);
    let counters = MissingPromiseEvidence::Counters;
    let by_limit = |cache, is_cache_complete, waiting| {
        state_of(cache, is_cache_complete, waiting, limit, counters)
    };
    assert_eq!(by_limit(Some(0.01), true, Some(0.01)), PromiseState::Kept);
    assert_eq!(by_limit(Some(0.03), true, Some(0.01)), PromiseState::Likely);
    assert_eq!(by_limit(Some(0.03), true, Some(0.03)), PromiseState::AtRisk);
    assert_eq!(by_limit(Some(0.02), false, Some(0.9)), PromiseState::Broken);
    assert_eq!(by_limit(None, false, Some(0.9)), PromiseState::Broken);

    for (cache, is_cache_complete, waiting) in [
        (Some(0.01), false, Some(0.01)),
        (Some(0.01), true, None),
        (None, false, Some(0.01)),
        (None, false, None),
    ] {
        let state = by_limit(cache, is_cache_complete, waiting);
        assert_eq!(state, PromiseState::Unknown, "{cache:?} {waiting:?}");
    }

    let too_new = MissingPromiseEvidence::Windows;
    let rate = PromiseTerm::MinRate(9.0);
    for (term, missing) in [(limit, too_new), (rate, counters)] {
        let state = state_of(Some(0.5), true, Some(0.5), term, missing);
        assert_eq!(state, PromiseState::Unknown, "{term:?} {missing:?}");
    }
}

/// Is waiting for the service's own threads no loss, and is the wait that no observed program explains of unknown
/// cause?
#[test]
fn waiting_for_own_threads_is_no_loss_and_an_unexplained_wait_has_no_cause() {
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let (store, batch) = (unit_service("store"), unit_service("batch"));
    let waiting_of = |tasks: Vec<TaskSample>| {
        let mut losses = ServiceLosses::default();
        let mut reports = Vec::new();
        for number in 0..5 {
            reports = losses.observe(
                &window_fixture(number, tasks.clone()),
                &topology,
                &Profiles::new(),
                &no_forecast,
            );
        }
        report_of(&reports, &store).clone()
    };
    let half = (0.5, 0.5);
    let own = waiting_of(
        (0..2)
            .map(|id| sharing_task(id, &store, 0, half, None))
            .collect(),
    );
    assert_eq!(
        own.slowdown.waiting.map(|loss| loss.value),
        Some(0.0),
        "{own:?}"
    );
    assert!(
        own.waiting_causes.is_empty() && own.waiting_share == Some(1.0),
        "{own:?}"
    );

    let quarter = (0.25, 0.75);
    let beside = waiting_of(vec![
        sharing_task(0, &store, 0, quarter, None),
        sharing_task(1, &batch, 0, quarter, None),
    ]);
    let causes: Vec<(Option<&str>, f64)> = beside
        .waiting_causes
        .iter()
        .map(|cause| {
            (
                cause.cause.as_ref().map(|cause| cause.name.as_str()),
                cause.share,
            )
        })
        .collect();
    assert_eq!(causes.len(), 2, "{causes:?}");
    assert!(
        causes[0].0.is_none() && (causes[0].1 - 2.0 / 3.0).abs() < 1e-6,
        "{causes:?}"
    );
    assert_eq!(causes[1].0, Some("batch.service"));
    assert!(
        (beside.slowdown.waiting.unwrap().value - 3.0).abs() < 1e-6,
        "{beside:?}"
    );

    let uncounted = waiting_of(vec![task_fixture(0, &store, 0, None)]);
    assert_eq!(uncounted.slowdown.waiting, None);
}

/// If a stream takes the CPU to which the store could move, so that the store waits for its own client: is the stream
/// named with its part, although it never runs on the CPU of the store meanwhile?
#[test]
fn a_service_that_takes_the_other_cpu_is_named_for_waiting() {
    let topology = last_level_caches(1, 2, CacheLevel::L3, 1 << 23);
    let (store, client, stream) = (
        unit_service("store"),
        unit_service("client"),
        unit_service("stream"),
    );
    let mut losses = ServiceLosses::default();
    let mut reports = Vec::new();
    for number in 0..40 {
        let is_beside = number >= 20;
        let half = (0.5, 0.5);
        let mut tasks = vec![
            sharing_task(
                0,
                &store,
                0,
                if is_beside { half } else { (0.5, 0.0) },
                None,
            ),
            sharing_task(1, &client, u32::from(!is_beside), half, None),
        ];
        // The two have changed places now and then.
        if number % 5 == 0 && !is_beside {
            (tasks[0].on_cpu_ns[0].0, tasks[1].on_cpu_ns[0].0) = (CpuId(1), CpuId(0));
        }
        tasks.extend(is_beside.then(|| sharing_task(2, &stream, 1, (1.0, 0.0), None)));
        reports = losses.observe(
            &window_fixture(number, tasks),
            &topology,
            &Profiles::new(),
            &no_forecast,
        );
    }
    let causes = &report_of(&reports, &store).waiting_causes;
    assert_eq!(causes[0].cause, Some(stream), "{causes:?}");
    assert!((causes[0].share - 2.0 / 3.0).abs() < 1e-6, "{causes:?}");
}
