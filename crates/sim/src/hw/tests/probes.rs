//! Probes: what is logged is what happened, and costs what it says.

use super::*;

fn probed(spec: &MachineSpec, accesses: Vec<Access>, probes: Probes) -> Thread {
    let mut hw = hardware(spec);
    let mut one = thread(0, 0, accesses, false);
    one.probes = probes;
    hw.load(CpuId(0), one, 0);
    let done = finish(&mut hw, u64::MAX / 4).0.remove(0);
    assert_balanced(&done.counters);
    done
}

fn far(count: u64) -> Vec<Access> {
    (0..count).map(|at| Access::load(at * 64, 3)).collect()
}

/// Does an ideal trace hold every L1 miss in order, and nothing that was not simulated, at one interrupt each?
#[test]
fn an_ideal_trace_is_the_sequence_of_misses() {
    let trace = TraceProbe { entries_at_most: 500, ..TraceProbe::default() };
    let mut accesses = far(1000);
    // A second access to each line hits and is not in the trace.
    accesses = accesses.into_iter().flat_map(|access| [access, access]).collect();
    let spec = machine();
    let done = probed(&spec, accesses, Probes { trace: Some(trace), ..Probes::default() });
    let trace = done.probes.trace.unwrap();
    assert_eq!(trace.lines, (0..500).collect::<Vec<u64>>());
    assert_eq!((trace.lost, trace.stale), (0, 0));
    assert_eq!(done.probes.cost_ticks, 500 * spec.counters.interrupt_cycles);
    assert_eq!(done.counters.stalls.system, done.probes.cost_ticks);
}

/// Does the last-address register lose neighbours of a miss out of order, and repeat itself after prefetches?
#[test]
fn the_last_address_register_loses_and_repeats() {
    let mut spec = machine();
    spec.pipeline = Pipeline::OutOfOrder { issue_width: 4, window: 64, mshrs: 8 };
    spec.counters.sampler = Sampler::LastAddress;
    let accesses: Vec<Access> = (0..1000).map(|at| Access::load(at * 192, 0)).collect();
    let trace = || Some(TraceProbe { entries_at_most: 10_000, ..TraceProbe::default() });
    let done = probed(&spec, accesses.clone(), Probes { trace: trace(), ..Probes::default() });
    let found = done.probes.trace.unwrap();
    assert_eq!(found.lines.len() as u64 + found.lost, 1000);
    assert!(found.lost > 300, "{}", found.lost);
    spec.prefetchers = vec![PrefetcherSpec::AdjacentLine { level: Level::L1Data }];
    let done = probed(&spec, accesses, Probes { trace: trace(), ..Probes::default() });
    let found = done.probes.trace.unwrap();
    let repeats = found.lines.windows(2).filter(|pair| pair[0] == pair[1]).count() as u64;
    assert!(found.stale > 300 && repeats == found.stale, "{} stale, {repeats} repeats", found.stale);
}

/// Does a stream that prefetches keep ahead of leave a repeat for every line, though it misses only at page starts?
#[test]
fn a_prefetched_stream_is_seen_as_repeats() {
    let mut spec = machine();
    spec.pipeline = Pipeline::OutOfOrder { issue_width: 4, window: 64, mshrs: 8 };
    spec.counters.sampler = Sampler::LastAddress;
    spec.prefetchers = vec![PrefetcherSpec::Stride { level: Level::L1Data, streams: 8, degree: 2 }];
    let accesses: Vec<Access> = (0..1000).map(|at| Access::load(at * 64, 100)).collect();
    let trace = TraceProbe { entries_at_most: 10_000, ..TraceProbe::default() };
    let done = probed(&spec, accesses, Probes { trace: Some(trace), ..Probes::default() });
    let misses = done.counters.levels[1].all_misses();
    let found = done.probes.trace.unwrap();
    assert!(misses < 100, "{misses} misses");
    let prefetched = 1000 - misses;
    assert!(found.stale.abs_diff(prefetched) < 20, "{} stale, {prefetched} lines prefetched", found.stale);
}

/// Are tagged samples about one in so many, with source, latency and line of what really happened?
#[test]
fn tagged_samples_tell_source_and_latency() {
    let mut spec = machine();
    spec.counters.sampler = Sampler::Tagged;
    let samples = SampleProbe { one_in: 10, at_most: 10_000, ..SampleProbe::default() };
    let done = probed(&spec, far(5_000), Probes { samples: Some(samples), ..Probes::default() });
    let samples = done.probes.samples.unwrap();
    assert_eq!(samples.events, 5_000);
    assert!((400..=600).contains(&samples.samples.len()), "{}", samples.samples.len());
    for sample in &samples.samples {
        assert_eq!((sample.source, sample.latency_cycles), (Source::Memory, Some(200)));
        assert_eq!(sample.physical_line, Some(sample.virtual_line), "the frames are the pages");
    }
}

/// Do watched locations report the accesses between two touches?
#[test]
fn watched_locations_report_reuse_times() {
    let accesses = (0..50_000u64).map(|at| Access::load(at % 100 * 64, 1)).collect();
    let watch = WatchProbe { locations: 50, one_in: 37, ..WatchProbe::default() };
    let done = probed(&machine(), accesses, Probes { watch: Some(watch), ..Probes::default() });
    let samples = done.probes.watch.unwrap().samples;
    assert_eq!(samples.len(), 50);
    assert!(samples.iter().all(|sample| sample.accesses == Some(99) && sample.touched_again));
}

/// Do super sets add up to the level's counters, of data and code, all levels at once? Do overflows come once per period?
#[test]
fn super_sets_and_overflows_agree_with_the_counters() {
    let mut spec = machine();
    spec.caches.insert(0, cache(Level::L1Instruction, 1 << 10, 4, 1, 1));
    let levels: Vec<Level> = spec.caches.iter().map(|cache| cache.level).collect();
    let super_sets = vec![SuperSetCount { accesses: 0, misses: 0 }; 4];
    let activity = |&level: &Level| ActivityProbe { level, contiguous: false, super_sets: super_sets.clone() };
    let load = |at: u64| [Access::load(at * at % 300 * 64, 1), Access::jump((1 << 20) + at * 7 % 90 * 1024, 3)];
    let overflow = Overflow { event: Event::Instructions, period: 1000, next_at: 1000, raised: 0 };
    let activity: Vec<ActivityProbe> = levels.iter().map(activity).collect();
    let probes = Probes { activity, overflows: vec![overflow], ..Probes::default() };
    let done = probed(&spec, (0..5_000u64).flat_map(load).collect(), probes);
    for probe in &done.probes.activity {
        let counts = done.counters.levels[probe.level as usize];
        let sum = |of: fn(&SuperSetCount) -> u64| probe.super_sets.iter().map(of).sum::<u64>();
        assert!(counts.all_misses() > 0, "{:?}", probe.level);
        assert_eq!(sum(|set| set.accesses), counts.references, "{:?}", probe.level);
        assert_eq!(sum(|set| set.misses), counts.all_misses(), "{:?}", probe.level);
    }
    // Told at the end of a burst: never more often than once per period, seldom late by as much.
    let (raised, periods) = (done.probes.overflows[0].raised, done.counters.instructions / 1000);
    assert!((periods - periods / 5..=periods).contains(&raised), "{raised} of {periods}");
}
