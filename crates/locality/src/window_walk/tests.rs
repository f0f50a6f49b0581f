use super::*;

const LATENCY: f64 = 200.0;

/// One level of cache and memory; one instruction a cycle.
fn sample_walk_machine() -> WalkMachine {
    WalkMachine {
        issue_width: 1.0,
        mispredict_cycles: None,
        window_instr: 96.0,
        miss_registers: 16,
        is_in_order: false,
        can_overtake_loads: true,
        levels: vec![
            WalkLevel {
                lines: 512,
                latency_cycles: 3.0,
                neighbor_lines_per_cycle: 0.0,
            },
            WalkLevel {
                lines: 65536,
                latency_cycles: 15.0,
                neighbor_lines_per_cycle: 0.0,
            },
        ],
        victim: None,
        memory_latency_cycles: LATENCY,
        cycles_per_line: 0.0,
        max_bus_reads: None,
        max_core_reads: None,
        prefetchers: Vec::new(),
        page_shift: 6,
    }
}

const OPTIONS: WalkOptions = WalkOptions {
    shared_lines: 65536,
    prefetch: true,
    dependences: DependenceRule::Recorded,
};

/// A first touch of another page, `gap` instructions after the previous access.
fn far_load(index: u64, gap: u64, dependence: u8) -> SampledAccess {
    SampledAccess {
        line: crate::hash::mix(index) >> 20,
        distance: Some(1 << 20),
        gap,
        dependence,
        ..SampledAccess::default()
    }
}

fn walk_with(
    accesses: Vec<SampledAccess>,
    machine: &WalkMachine,
    options: &WalkOptions,
) -> WalkCounts {
    let phase = StreamPhase {
        parts: vec![accesses],
        ..StreamPhase::default()
    };
    let sample = StreamSample {
        footprint_lines: 1 << 21,
        ..StreamSample::default()
    };
    sum_counts(&walk_phase(&sample, &phase, machine, options))
}

fn cycles_per_access(counts: &WalkCounts, gap: f64) -> f64 {
    counts.cycles / (counts.instructions / gap)
}

/// Do n interleaved chases overlap n misses and take the n-th part of the latency for each, until the window or the
/// registers are full?
#[test]
fn chases_overlap_as_many_misses_as_there_are() {
    let machine = sample_walk_machine();
    for (chases, gap, overlapped) in [
        (1, 4, 1.0),
        (2, 4, 2.0),
        (5, 4, 5.0),
        (12, 4, 12.0),
        (24, 2, 16.0),
    ] {
        let accesses: Vec<SampledAccess> = (0..2000)
            .map(|index| far_load(index, gap, chases))
            .collect();
        let counts = walk_with(accesses, &machine, &OPTIONS);
        let found = counts.overlapped_misses().unwrap();
        assert!(
            (found / overlapped - 1.0).abs() < 0.02,
            "{chases} chases: {found}"
        );
        let found = cycles_per_access(&counts, gap as f64);
        assert!(
            (found * overlapped / LATENCY - 1.0).abs() < 0.02,
            "{chases} chases: {found}"
        );
    }
}

/// Does each thread of a program have a window of its own, so that the misses of two chases by two threads do not overlap,
/// where those of one thread do?
#[test]
fn threads_have_windows_of_their_own() {
    let machine = sample_walk_machine();
    let overlap = |threads: u64| {
        let accesses = (0..4000).map(|index| SampledAccess {
            thread: (index % threads) as u32,
            // Each access waits for the last but one: two chases of one thread, or one of each of two.
            ..far_load(index, 4, if threads == 2 { 1 } else { 2 })
        });
        walk_with(accesses.collect(), &machine, &OPTIONS)
            .overlapped_misses()
            .unwrap()
    };
    assert!((overlap(1) - 2.0).abs() < 0.05, "{}", overlap(1));
    assert!((overlap(2) - 1.0).abs() < 0.05, "{}", overlap(2));
}

/// Does a mispredicted branch that waits for a miss end its overlap with loads whose addresses follow from it, and with none whose
/// address is known before, on a machine that states what refilling the pipeline costs; and does it change nothing on one
/// that does not?
#[test]
fn a_wrong_path_requests_what_does_not_depend_on_its_branch() {
    let gap = 8;
    let cycles = |machine: &WalkMachine, waiting_share: u64, dependence: u8| {
        let accesses = (0..4000)
            .map(|index| SampledAccess {
                delays_branch: index % 4 < waiting_share,
                ..far_load(index, gap, dependence)
            })
            .collect();
        cycles_per_access(&walk_with(accesses, machine, &OPTIONS), gap as f64)
    };
    let silent = sample_walk_machine();
    let stating = WalkMachine {
        mispredict_cycles: Some(20.0),
        ..silent.clone()
    };
    let (independent, chase) = (0, 1);
    assert_eq!(
        cycles(&silent, 4, independent),
        cycles(&silent, 0, independent)
    );
    assert_eq!(
        cycles(&stating, 0, independent),
        cycles(&silent, 0, independent)
    );
    // Probes that all end in such a branch: the window holds twelve, whose lines are requested on the wrong path.
    let (found, bound) = (cycles(&stating, 4, independent), LATENCY / 12.0);
    assert!(
        found > 0.9 * bound && found < 1.5 * bound,
        "{found}, {bound}"
    );
    // A chase: the wrong path has no address before the branch is decided. Each takes its latency, as without branches.
    let found = cycles(&stating, 4, chase);
    assert!((found / LATENCY - 1.0).abs() < 0.05, "{found}");
}

/// Do instructions between misses take the cycles of their chains and branches, if the machine states what refilling
/// the pipeline costs, and their share of the issue width otherwise or in order?
#[test]
fn instructions_between_misses_take_the_time_of_their_chains() {
    let hit = SampledAccess {
        distance: Some(0),
        gap: 10,
        ..SampledAccess::default()
    };
    let phase = StreamPhase {
        core: Some(InstructionTiming {
            instructions: 1000,
            cycles: [1500; cachemate_core::CORE_WINDOWS.len()],
            mispredicted: 50,
            unfetched: Some(0),
        }),
        parts: vec![vec![hit; 1000]],
        ..StreamPhase::default()
    };
    let cycles_on = |machine: &WalkMachine| {
        let counts = sum_counts(&walk_phase(
            &StreamSample::default(),
            &phase,
            machine,
            &OPTIONS,
        ));
        counts.cycles / counts.instructions
    };
    let issuing = sample_walk_machine();
    assert!((cycles_on(&issuing) - 1.0).abs() < 1e-9);
    let stating = WalkMachine {
        mispredict_cycles: Some(20.0),
        ..issuing.clone()
    };
    assert!((cycles_on(&stating) - (1.5 + 0.05 * 20.0)).abs() < 1e-9);
    let in_order = WalkMachine {
        is_in_order: true,
        ..stating
    };
    assert!((cycles_on(&in_order) - 1.0).abs() < 1e-9);
}

/// Does a window that ends before the next miss overlap none, and does a core that runs in order overlap none either?
#[test]
fn nothing_overlaps_beyond_the_window_or_in_order() {
    let machine = sample_walk_machine();
    let sparse: Vec<SampledAccess> = (0..1000).map(|index| far_load(index, 100, 0)).collect();
    let counts = walk_with(sparse, &machine, &OPTIONS);
    // The window is full 96 instructions after each miss; the next one enters four cycles after its return.
    assert!(
        (cycles_per_access(&counts, 100.0) - (LATENCY + 4.0)).abs() < 1.0,
        "{counts:?}"
    );
    assert!((counts.overlapped_misses().unwrap() - 1.0).abs() < 1e-9);
    let in_order = WalkMachine {
        is_in_order: true,
        window_instr: f64::INFINITY,
        can_overtake_loads: false,
        ..machine
    };
    let dense: Vec<SampledAccess> = (0..1000).map(|index| far_load(index, 4, 0)).collect();
    let counts = walk_with(dense, &in_order, &OPTIONS);
    assert!(
        (cycles_per_access(&counts, 4.0) - (LATENCY + 4.0)).abs() < 1.0,
        "{counts:?}"
    );
}

/// Do searches of a tree overlap only with each other, as many as the window holds?
#[test]
fn searches_of_a_tree_overlap_with_each_other_only() {
    let machine = sample_walk_machine();
    for (depth, gap) in [(4u64, 4u64), (8, 4), (3, 8)] {
        let accesses: Vec<SampledAccess> = (0..4000)
            .map(|index| far_load(index, gap, u8::from(index % depth > 0)))
            .collect();
        let counts = walk_with(accesses, &machine, &OPTIONS);
        // While a search takes `depth` latencies, the window holds the next ones, and they end in turn.
        let searches = machine.window_instr / (depth * gap) as f64;
        let found = counts.overlapped_misses().unwrap();
        assert!(
            found > 0.75 * searches && found < 1.25 * searches.ceil() + 0.5,
            "depth {depth}: {found} for {searches}"
        );
    }
}

/// Do loads of a line on its way wait with it, without another miss?
#[test]
fn loads_of_a_line_on_its_way_wait_with_it() {
    let machine = sample_walk_machine();
    let pairs: Vec<SampledAccess> = (0..2000)
        .map(|index| SampledAccess {
            // The second access of each pair finds the line on its way.
            distance: Some(if index % 2 == 0 { 1 << 20 } else { 0 }),
            ..far_load(index / 2, 60, 0)
        })
        .collect();
    let counts = walk_with(pairs, &machine, &OPTIONS);
    let accesses = counts.instructions / 60.0;
    assert!((counts.demand_misses / accesses - 0.5).abs() < 0.01);
    // One miss in 120 instructions: it blocks the window after 96, and the load that waits with it changes nothing.
    assert!(
        (cycles_per_access(&counts, 60.0) - (LATENCY + 24.0) / 2.0).abs() < 1.0,
        "{counts:?}"
    );
}

fn stream_accesses(gap: u64) -> Vec<SampledAccess> {
    (0..2000)
        .map(|index| SampledAccess {
            line: index,
            ..far_load(0, gap, 0)
        })
        .collect()
}

/// Does a stream overlap what the window holds, does the bus bound it, and do prefetches hide its latency as far as
/// they lead?
#[test]
fn streams_are_bound_by_window_bus_and_lead() {
    let machine = sample_walk_machine();
    let counts = walk_with(stream_accesses(16), &machine, &OPTIONS);
    // Six lines enter the window; the seventh waits for the first.
    let found = counts.overlapped_misses().unwrap();
    assert!((found - 6.0).abs() < 0.7, "{found}");
    let slow_bus = WalkMachine {
        cycles_per_line: 50.0,
        ..machine.clone()
    };
    let counts = walk_with(stream_accesses(16), &slow_bus, &OPTIONS);
    assert!((cycles_per_access(&counts, 16.0) - 50.0).abs() < 0.5);
    let stride = PrefetcherSpec::Stride {
        level: CacheLevel::L2,
        streams: 8,
        degree: 4,
    };
    let prefetching = WalkMachine {
        prefetchers: vec![(1, stride)],
        ..machine
    };
    // The fourth line ahead is requested 4 x 60 cycles before its use, which is more than the latency.
    let counts = walk_with(stream_accesses(60), &prefetching, &OPTIONS);
    assert!(
        cycles_per_access(&counts, 60.0) < 68.0,
        "{}",
        cycles_per_access(&counts, 60.0)
    );
    // Three lines of each page train the prefetcher, and no prefetch crosses its end.
    let prefetched_share = counts.prefetched_misses / counts.needed_lines();
    assert!(
        (prefetched_share - 61.0 / 64.0).abs() < 0.01,
        "{prefetched_share}"
    );
    assert!(counts.useless_prefetches < 0.01 * counts.needed_lines());
    let unprefetched = WalkOptions {
        prefetch: false,
        ..OPTIONS
    };
    let counts = walk_with(stream_accesses(60), &prefetching, &unprefetched);
    assert_eq!(counts.prefetched_misses, 0.0);
}

/// Do the places of a bus bound a stream that is prefetched as they bound one on demand (Little's law), and does a
/// prefetcher that runs less far ahead on a busy bus leave places free?
#[test]
fn prefetched_lines_hold_places_of_the_bus() {
    let streamer = PrefetcherSpec::Streamer {
        level: CacheLevel::L2,
        up_streams: 4,
        down_streams: 4,
        ahead_lines: 16,
    };
    for places in [2, 3, 6, 12] {
        let machine = WalkMachine {
            max_bus_reads: Some(places),
            prefetchers: vec![(1, streamer)],
            ..sample_walk_machine()
        };
        // A line for each cycle is more than any number of places lets pass.
        let counts = walk_with(stream_accesses(1), &machine, &OPTIONS);
        let found = cycles_per_access(&counts, 1.0);
        assert!(found > 0.99 * LATENCY / places as f64, "{places}: {found}");
    }

    // In each latency of 200 cycles it needs two lines, which two of 12 places hold.
    let roomy = WalkMachine {
        max_bus_reads: Some(12),
        prefetchers: vec![(1, streamer)],
        ..sample_walk_machine()
    };
    let counts = walk_with(stream_accesses(100), &roomy, &OPTIONS);
    assert!(cycles_per_access(&counts, 100.0) < 110.0, "{counts:?}");
    assert!(
        counts.prefetched_misses > 0.9 * counts.needed_lines(),
        "{counts:?}"
    );
}

/// Do the places of a core bound what it reads from memory and from the contended cache (Little's law), prefetched or
/// not, and its private caches not at all?
#[test]
fn places_of_the_core_bound_its_reads() {
    let prefetcher = PrefetcherSpec::Streamer {
        level: CacheLevel::L2,
        up_streams: 4,
        down_streams: 4,
        ahead_lines: 16,
    };
    let cycles = |distance: u64, prefetchers: Vec<(usize, PrefetcherSpec)>| {
        let machine = WalkMachine {
            max_core_reads: Some(2),
            prefetchers,
            ..sample_walk_machine()
        };
        let accesses = stream_accesses(1)
            .into_iter()
            .map(|access| SampledAccess {
                distance: Some(distance),
                ..access
            })
            .collect();
        cycles_per_access(&walk_with(accesses, &machine, &OPTIONS), 1.0)
    };
    let levels = sample_walk_machine().levels;
    for prefetchers in [vec![], vec![(1, prefetcher)]] {
        let memory = cycles(1 << 40, prefetchers.clone());
        assert!((memory / (LATENCY / 2.0) - 1.0).abs() < 0.02, "{memory}");
        let contended = cycles(levels[0].lines, prefetchers.clone());
        let bound = levels[1].latency_cycles / 2.0;
        assert!((contended / bound - 1.0).abs() < 0.02, "{contended}");
        let private = cycles(0, prefetchers);
        assert!(private < 1.1, "{private}");
    }
}

/// Does a working set cost what the level costs that holds it, at every size?
#[test]
fn a_level_that_holds_the_lines_sets_their_latency() {
    let machine = sample_walk_machine();
    let chase = |distance: u64| -> Vec<SampledAccess> {
        (0..1000)
            .map(|index| SampledAccess {
                distance: Some(distance),
                ..far_load(index % 300, 1, 1)
            })
            .collect()
    };
    for (distance, shared_lines, latency) in [
        (511, 65536, 3.0),
        (512, 65536, 15.0),
        (65535, 65536, 15.0),
        (65536, 65536, LATENCY),
        (40000, 30000, LATENCY),
    ] {
        let options = WalkOptions {
            shared_lines,
            ..OPTIONS
        };
        let counts = walk_with(chase(distance), &machine, &options);
        let found = cycles_per_access(&counts, 1.0);
        assert!((found - latency).abs() < 0.1, "{distance}: {found}");
    }
}

/// Does the error that sampling leaves cover the truth about as often as it should?
#[test]
fn the_sampling_error_covers_the_truth() {
    let mut generator = cachemate_core::SplitMix64::new(5);
    let mut covered = 0;
    for _ in 0..200 {
        let mut parts = Vec::new();
        for _ in 0..40 {
            let cycles = 100.0 + generator.draw_below(300) as f64;
            parts.push(WalkCounts {
                cycles,
                instructions: 100.0,
                ..WalkCounts::default()
            });
        }
        let sum = sum_counts(&parts);
        let error = 1.645 * sampling_error_share(&parts).unwrap();
        let found = sum.cycles / sum.instructions;
        covered += u32::from((found / 2.495 - 1.0).abs() < error);
    }
    assert!((165..=195).contains(&covered), "{covered} of 200");
    assert_eq!(sampling_error_share(&[WalkCounts::default()]), None);
}
