//! Probes: they log what happened, at the stated cost.

use expect_test::expect;

use super::*;

fn run_probed(spec: &MachineSpec, accesses: Vec<Access>, probes: Probes) -> HwThread {
    let mut hw = build_hardware(spec);
    let mut own_thread = scripted_thread(0, 0, accesses, false);
    own_thread.probes = probes;
    hw.load(CpuId(0), own_thread, 0);
    let finished = finish(&mut hw, u64::MAX / 4).0.remove(0);
    assert_balanced(&finished.counters);
    finished
}

fn spaced_loads(count: u64) -> Vec<Access> {
    (0..count)
        .map(|index| Access::load(index * 64, 3))
        .collect()
}

/// Does an ideal trace hold every L1 miss in order, nothing that was not simulated, at one interrupt each?
#[test]
fn an_ideal_trace_is_the_sequence_of_misses() {
    let trace = TraceProbe {
        max_entries: 500,
        ..TraceProbe::default()
    };
    let mut accesses = spaced_loads(1000);
    // A second access to each line hits and is not in the trace.
    accesses = accesses
        .into_iter()
        .flat_map(|access| [access, access])
        .collect();
    let spec = sample_machine();
    let finished = run_probed(
        &spec,
        accesses,
        Probes {
            trace: Some(trace),
            ..Probes::default()
        },
    );
    let trace = finished.probes.trace.unwrap();
    assert_eq!(trace.lines, (0..500).collect::<Vec<u64>>());
    assert_eq!((trace.lost_misses, trace.stale_entries), (0, 0));
    assert_eq!(
        finished.probes.cost_ticks,
        500 * spec.counters.interrupt_cycles
    );
    assert_eq!(finished.counters.stalls.system, finished.probes.cost_ticks);
}

/// Does the last-address register lose neighbors of a miss out of order, and repeat itself after prefetches?
#[test]
fn the_last_address_register_loses_and_repeats() {
    let mut spec = sample_machine();
    spec.pipeline = CoreModel::OutOfOrder {
        issue_width: 4,
        window: 64,
        mshrs: 8,
        loads_pass: true,
    };
    spec.counters.sampler = SamplerModel::LastAddress;
    let accesses: Vec<Access> = (0..1000)
        .map(|index| Access::load(index * 192, 0))
        .collect();

    let new_trace_probe = || {
        Some(TraceProbe {
            max_entries: 10_000,
            ..TraceProbe::default()
        })
    };
    let finished = run_probed(
        &spec,
        accesses.clone(),
        Probes {
            trace: new_trace_probe(),
            ..Probes::default()
        },
    );
    let log = finished.probes.trace.unwrap();
    assert_eq!(log.lines.len() as u64 + log.lost_misses, 1000);
    assert!(log.lost_misses > 300, "{}", log.lost_misses);
    spec.prefetchers = vec![PrefetcherSpec::AdjacentLine {
        level: CacheLevel::L1Data,
    }];
    let finished = run_probed(
        &spec,
        accesses,
        Probes {
            trace: new_trace_probe(),
            ..Probes::default()
        },
    );
    let log = finished.probes.trace.unwrap();
    let repeats = log
        .lines
        .windows(2)
        .filter(|pair| pair[0] == pair[1])
        .count() as u64;
    assert!(
        log.stale_entries > 300 && repeats == log.stale_entries,
        "{} stale, {repeats} repeats",
        log.stale_entries
    );
}

/// Does a stream that stays behind the prefetcher leave a repeat for every line, although it misses only at page
/// starts?
#[test]
fn a_prefetched_stream_leaves_a_repeat_for_every_line() {
    let mut spec = sample_machine();
    spec.pipeline = CoreModel::OutOfOrder {
        issue_width: 4,
        window: 64,
        mshrs: 8,
        loads_pass: true,
    };
    spec.counters.sampler = SamplerModel::LastAddress;
    spec.prefetchers = vec![PrefetcherSpec::Stride {
        level: CacheLevel::L1Data,
        streams: 8,
        degree: 2,
    }];

    let accesses: Vec<Access> = (0..1000)
        .map(|index| Access::load(index * 64, 100))
        .collect();
    let trace = TraceProbe {
        max_entries: 10_000,
        ..TraceProbe::default()
    };
    let finished = run_probed(
        &spec,
        accesses,
        Probes {
            trace: Some(trace),
            ..Probes::default()
        },
    );
    let misses = finished.counters.levels[1].all_misses();
    let log = finished.probes.trace.unwrap();
    assert!(misses < 100, "{misses} misses");
    let prefetched = 1000 - misses;
    assert!(
        log.stale_entries.abs_diff(prefetched) < 20,
        "{} stale, {prefetched} lines prefetched",
        log.stale_entries
    );
}

/// Are tagged samples taken at about the requested rate, with the true source, latency and line?
#[test]
fn tagged_samples_have_the_true_source_and_latency() {
    let mut spec = sample_machine();
    spec.counters.sampler = SamplerModel::Tagged;
    let samples = SampleProbe {
        sample_period: 10,
        max_samples: 10_000,
        ..SampleProbe::default()
    };
    let finished = run_probed(
        &spec,
        spaced_loads(5_000),
        Probes {
            samples: Some(samples),
            ..Probes::default()
        },
    );
    let samples = finished.probes.samples.unwrap();
    assert_eq!(samples.event_count, 5_000);
    assert!(
        (400..=600).contains(&samples.samples.len()),
        "{}",
        samples.samples.len()
    );
    for sample in &samples.samples {
        assert_eq!(
            (sample.source, sample.latency_cycles),
            (DataSource::Memory, Some(200))
        );
        assert_eq!(
            sample.physical_line,
            Some(sample.virtual_line),
            "the frames are the pages"
        );
    }
}

/// Do watched locations report the accesses between two touches?
#[test]
fn watched_locations_report_reuse_times() {
    let accesses = (0..50_000u64)
        .map(|index| Access::load(index % 100 * 64, 1))
        .collect();
    let watch = WatchProbe {
        max_locations: 50,
        watch_period: 37,
        ..WatchProbe::default()
    };
    let finished = run_probed(
        &sample_machine(),
        accesses,
        Probes {
            watch: Some(watch),
            ..Probes::default()
        },
    );
    let samples = finished.probes.watch.unwrap().samples;
    assert_eq!(samples.len(), 50);
    assert!(
        samples
            .iter()
            .all(|sample| sample.accesses == Some(99) && sample.reused)
    );
}

/// Is fetched code watched like data, in lines of the watched size? A loop over 2 KB of code fetches its 32 lines in
/// turn, and loads the same word on each.
#[test]
fn fetched_code_is_watched_like_data() {
    let mut spec = sample_machine();
    spec.caches
        .insert(0, sample_cache(CacheLevel::L1Instruction, 1 << 10, 4, 1, 1));
    let lap =
        |_| std::iter::once(Access::jump(1 << 20, 0)).chain((0..32).map(|_| Access::load(64, 15)));
    let watch = WatchProbe {
        max_locations: 30,
        watch_period: 7,
        ..WatchProbe::default()
    };
    let finished = run_probed(
        &spec,
        (0..200).flat_map(lap).collect(),
        Probes {
            watch: Some(watch),
            ..Probes::default()
        },
    );
    let watch = finished.probes.watch.unwrap();
    let references_at = |level: CacheLevel| finished.counters.levels[level as usize].references;
    assert_eq!(
        watch.accesses,
        references_at(CacheLevel::L1Instruction) + references_at(CacheLevel::L1Data)
    );
    let count_samples_with = |accesses: u64| {
        watch
            .samples
            .iter()
            .filter(|sample| sample.accesses == Some(accesses))
            .count()
    };
    assert!(
        count_samples_with(1) > 5
            && count_samples_with(63) > 5
            && count_samples_with(1) + count_samples_with(63) == 30,
        "{:?}",
        watch.samples
    );
}

/// Do super sets add up to the level's counters, of data and code, all levels at once? Do overflows come once per
/// period?
#[test]
fn super_sets_and_overflows_agree_with_the_counters() {
    let mut spec = sample_machine();
    spec.caches
        .insert(0, sample_cache(CacheLevel::L1Instruction, 1 << 10, 4, 1, 1));
    let levels: Vec<CacheLevel> = spec.caches.iter().map(|cache| cache.level).collect();
    let super_sets = vec![
        SuperSetCount {
            accesses: 0,
            misses: 0
        };
        4
    ];
    let activity = |&level: &CacheLevel| ActivityProbe {
        level,
        is_contiguous: false,
        super_sets: super_sets.clone(),
    };

    let load = |at: u64| {
        [
            Access::load(at * at % 300 * 64, 1),
            Access::jump((1 << 20) + at * 7 % 90 * 1024, 3),
        ]
    };
    let overflow = Overflow {
        event: CounterEvent::Instructions,
        threshold_step: 1000,
        next_threshold: 1000,
        interrupt_count: 0,
    };

    let activity: Vec<ActivityProbe> = levels.iter().map(activity).collect();
    let probes = Probes {
        activity,
        overflows: vec![overflow],
        ..Probes::default()
    };
    let finished = run_probed(&spec, (0..5_000u64).flat_map(load).collect(), probes);
    for probe in &finished.probes.activity {
        let counts = finished.counters.levels[probe.level as usize];
        let sum_over_sets =
            |value: fn(&SuperSetCount) -> u64| probe.super_sets.iter().map(value).sum::<u64>();
        assert!(counts.all_misses() > 0, "{:?}", probe.level);
        assert_eq!(
            sum_over_sets(|set| set.accesses),
            counts.references,
            "{:?}",
            probe.level
        );
        assert_eq!(
            sum_over_sets(|set| set.misses),
            counts.all_misses(),
            "{:?}",
            probe.level
        );
    }
    // Reported at the end of a burst: never more often than once per period, rarely late by that much.
    let (raised, periods) = (
        finished.probes.overflows[0].interrupt_count,
        finished.counters.instructions / 1000,
    );
    assert!(
        (periods - periods / 5..=periods).contains(&raised),
        "{raised} of {periods}"
    );
}

/// Is an access that was never simulated never reported? Does every line that any probe names belong to the program's
/// accesses, whatever the sampler's errors, and do probes of a thread without accesses stay empty?
#[test]
fn an_access_that_was_never_simulated_is_never_reported() {
    for sampler in [
        SamplerModel::Ideal,
        SamplerModel::LastAddress,
        SamplerModel::Tagged,
    ] {
        let mut spec = sample_machine();
        spec.pipeline = CoreModel::OutOfOrder {
            issue_width: 4,
            window: 64,
            mshrs: 8,
            loads_pass: true,
        };
        spec.counters.sampler = sampler;
        spec.prefetchers = vec![PrefetcherSpec::AdjacentLine {
            level: CacheLevel::L1Data,
        }];

        let all_probes = || Probes {
            trace: Some(TraceProbe {
                max_entries: 100_000,
                ..TraceProbe::default()
            }),
            samples: Some(SampleProbe {
                sample_period: 3,
                max_samples: 100_000,
                ..SampleProbe::default()
            }),
            watch: Some(WatchProbe {
                max_locations: 100,
                watch_period: 7,
                ..WatchProbe::default()
            }),
            ..Probes::default()
        };

        // Even lines only, so that the lines that the prefetcher brings in addition were not requested.
        let mut dice = TestRng::new(11);
        let accesses: Vec<Access> = (0..20_000)
            .map(|_| Access::load(dice.draw_below(2_000) * 128, 1))
            .collect();
        let finished = run_probed(&spec, accesses, all_probes());

        let (trace, samples) = (
            finished.probes.trace.unwrap(),
            finished.probes.samples.unwrap(),
        );
        assert!(
            trace.lines.len() > 1_000 && samples.samples.len() > 1_000,
            "{sampler:?}"
        );
        assert!(
            trace
                .lines
                .iter()
                .all(|line| line % 2 == 0 && *line < 4_000),
            "{sampler:?}"
        );
        assert!(
            samples
                .samples
                .iter()
                .all(|sample| sample.virtual_line % 2 == 0 && sample.virtual_line < 4_000)
        );
        let misses = finished.counters.levels[CacheLevel::L1Data as usize].all_misses();
        assert_eq!(
            trace.lines.len() as u64 - trace.stale_entries + trace.lost_misses,
            misses,
            "{sampler:?}"
        );
        assert!(finished.probes.watch.unwrap().samples.len() <= 100);
        let idle = run_probed(&spec, vec![Access::compute(1_000)], all_probes());
        let (trace, samples, watch) = (idle.probes.trace, idle.probes.samples, idle.probes.watch);
        assert!(trace.unwrap().lines.is_empty() && samples.unwrap().samples.is_empty());
        assert!(watch.unwrap().samples.is_empty());
    }
}

/// How many misses does POWER5's register lose after each one that it shows? RM 5.3.1 found, at worst: none after 59 %
/// of them, one after 36 %, two after 4 %, more after 1 %.
#[test]
fn the_distribution_of_lost_misses_is_reported() {
    let mut spec = sample_machine();
    spec.pipeline = CoreModel::OutOfOrder {
        issue_width: 5,
        window: 100,
        mshrs: 8,
        loads_pass: true,
    };
    spec.counters.sampler = SamplerModel::LastAddress;
    (spec.caches[0], spec.caches[1]) = (
        sample_cache(CacheLevel::L1Data, 32 << 10, 4, 2, 1),
        sample_cache(CacheLevel::L2, 2 << 20, 8, 14, 1),
    );
    let mut shares = String::new();
    for name in ["swim", "art", "twolf", "mcf", "libquantum"] {
        let mut threads =
            crate::kernels::build_threads(name, 1, &crate::kernels::Options::default()).unwrap();
        let mut accesses = Vec::new();
        while accesses.len() < 400_000 {
            threads[0].next_batch(&mut accesses);
        }
        let trace = TraceProbe {
            max_entries: 20_000,
            ..TraceProbe::default()
        };
        let mut hw = build_hardware(&spec);
        let mut own_thread = scripted_thread(0, 0, accesses, false);
        own_thread.probes.trace = Some(trace);
        hw.load(CpuId(0), own_thread, 0);
        let _ = hw.run(u64::MAX / 16, &mut FirstTouchFrames::default());
        let trace = hw.unload(CpuId(0)).unwrap().probes.trace.unwrap();
        assert_eq!(
            trace
                .entries_by_lost_count
                .iter()
                .map(|count| u64::from(*count))
                .sum::<u64>(),
            trace.lines.len() as u64
        );
        let share = trace
            .entries_by_lost_count
            .map(|count| 100.0 * f64::from(count) / trace.lines.len() as f64);
        let [none, one, two, more] = share;
        shares += &format!(
            "{name}: {none:.0} % none, {one:.0} % one, {two:.0} % two, {more:.0} % more\n"
        );
    }
    expect![[r#"
        swim: 73 % none, 17 % one, 9 % two, 0 % more
        art: 1 % none, 98 % one, 1 % two, 0 % more
        twolf: 90 % none, 10 % one, 0 % two, 0 % more
        mcf: 55 % none, 39 % one, 6 % two, 0 % more
        libquantum: 99 % none, 1 % one, 0 % two, 0 % more
    "#]]
    .assert_eq(&shares);
}
