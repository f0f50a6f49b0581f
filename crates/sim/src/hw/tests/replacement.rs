//! Replacement against oracles; partitions; causes.

use super::*;

/// Random lines of a skewed distribution: small numbers are frequent.
fn skewed_lines(seed: u64, count: usize, lines: u64) -> Vec<u64> {
    let mut dice = TestRng::new(seed);
    let draw_line = |dice: &mut TestRng| {
        let below = dice.draw_below(lines) + 1;
        dice.draw_below(below)
    };
    (0..count).map(|_| draw_line(&mut dice)).collect()
}

fn loads_of(lines: &[u64]) -> Vec<Access> {
    lines
        .iter()
        .map(|&line| Access::load(line * 64, 1))
        .collect()
}

/// Misses of a plain list per set, most recent first.
fn lru_oracle_misses(lines: &[u64], sets: u64, ways: usize) -> Vec<u64> {
    let mut lists = vec![Vec::new(); sets as usize];
    let mut missed = Vec::new();
    for &line in lines {
        let list: &mut Vec<u64> = &mut lists[(line % sets) as usize];
        match list.iter().position(|&other| other == line) {
            Some(at) => drop(list.remove(at)),
            None => missed.push(line),
        }
        list.insert(0, line);
        list.truncate(ways);
    }
    missed
}

fn run_one(spec: &MachineSpec, lines: &[u64]) -> TaskCounters {
    run_thread(build_hardware(spec), loads_of(lines), false, u64::MAX / 4)
        .1
        .counters
}

/// Do the misses of a fully associative LRU cache equal the stack-distance curve at every size?
#[test]
fn fully_associative_lru_misses_equal_the_stack_distance_curve() {
    let lines = skewed_lines(3, 4_000, 64);
    let mut stack: Vec<u64> = Vec::new();
    let mut distances = vec![0u64; 66];
    for &line in &lines {
        let index = stack.iter().position(|&other| other == line);
        index.map(|index| stack.remove(index));
        distances[index.unwrap_or(65)] += 1;
        stack.insert(0, line);
    }
    for ways in 1..=64u32 {
        let mut spec = sample_machine();
        spec.caches[0] = sample_cache(CacheLevel::L1Data, u64::from(ways) * 64, ways, 3, 1);
        let found = run_one(&spec, &lines).levels[CacheLevel::L1Data as usize].all_misses();
        let expected: u64 = distances[ways as usize..].iter().sum();
        assert_eq!(found, expected, "{ways} lines");
    }
}

/// Do set-associative caches of two levels miss exactly as lists do, power-of-two sets or not?
#[test]
fn set_associative_misses_equal_an_independent_model() {
    for (ways, outer_sets, outer_ways) in [
        (2, 16, 4),
        (4, 16, 8),
        (8, 24, 12),
        (3, 20, 5),
        (16, 64, 16),
    ] {
        let lines = skewed_lines(ways, 20_000, 1500);
        let mut spec = sample_machine();
        spec.caches[0] = sample_cache(CacheLevel::L1Data, ways * 8 * 64, ways as u32, 3, 1);
        spec.caches[1] = sample_cache(
            CacheLevel::L2,
            outer_sets * outer_ways * 64,
            outer_ways as u32,
            14,
            1,
        );
        let counters = run_one(&spec, &lines);
        let first = lru_oracle_misses(&lines, 8, ways as usize);
        let second = lru_oracle_misses(&first, outer_sets, outer_ways as usize);
        let l1 = counters.levels[CacheLevel::L1Data as usize];
        let l2 = counters.levels[CacheLevel::L2 as usize];
        assert_eq!(
            (l1.references, l1.all_misses()),
            (20_000, first.len() as u64)
        );
        assert_eq!(
            (l2.references, l2.all_misses()),
            (first.len() as u64, second.len() as u64)
        );
        let mut distinct = first.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(
            l1.misses_from(MissCause::Cold),
            distinct.len() as u64,
            "cold misses are first touches"
        );
        assert_eq!(
            l1.misses_from(MissCause::Own),
            l1.all_misses() - distinct.len() as u64
        );
        assert_eq!(counters.memory_read_bytes, second.len() as u64 * 64);
    }
}

/// Do set-associative caches of two levels miss on exactly the lines on which the locality engine's cache simulator
/// misses, for LRU and tree PLRU, power-of-two sets or not?
#[test]
fn set_associative_misses_equal_the_locality_engines() {
    use cachemate_locality::cachesim::{
        CacheGeometry, CacheSim, Replacement as CacheSimReplacement,
    };
    let shapes = [
        (8, 2, 64, 8),
        (16, 4, 24, 12),
        (8, 8, 32, 16),
        (12, 3, 20, 5),
        (4, 16, 16, 32),
    ];
    let kinds = [
        (ReplacementPolicy::Lru, CacheSimReplacement::Lru),
        (ReplacementPolicy::TreePlru, CacheSimReplacement::TreePlru),
    ];

    for (ours, theirs) in kinds {
        for (sets, ways, outer_sets, outer_ways) in shapes {
            let powers = u32::is_power_of_two(ways) && u32::is_power_of_two(outer_ways);
            if ours == ReplacementPolicy::TreePlru && !powers {
                continue;
            }
            let lines = skewed_lines(u64::from(ways + sets), 30_000, 3000);
            let mut spec = sample_machine();
            let size_bytes = |sets: u32, ways: u32| u64::from(sets) * u64::from(ways) * 64;
            spec.caches[0] = CacheSpec {
                replacement: ours,
                ..sample_cache(CacheLevel::L1Data, size_bytes(sets, ways), ways, 3, 1)
            };
            let outer = sample_cache(
                CacheLevel::L2,
                size_bytes(outer_sets, outer_ways),
                outer_ways,
                14,
                1,
            );
            spec.caches[1] = CacheSpec {
                replacement: ours,
                ..outer
            };
            let counters = run_one(&spec, &lines);
            let engine = |sets, ways| {
                CacheSim::new(
                    CacheGeometry {
                        sets,
                        ways,
                        slices: 1,
                    },
                    theirs,
                )
                .unwrap()
            };
            let mut missed = Vec::new();
            let first = engine(sets, ways).push_collecting(&lines, &mut missed);
            let second = engine(outer_sets, outer_ways).push(&missed);
            let counted = [CacheLevel::L1Data, CacheLevel::L2]
                .map(|level| counters.levels[level as usize].all_misses());
            assert_eq!(
                counted,
                [first, second],
                "{ours:?} {sets} x {ways}, {outer_sets} x {outer_ways}"
            );
        }
    }
}

/// Does tree PLRU match the textbook: as LRU for two ways, and with the known victim for four?
#[test]
fn tree_plru_points_away_from_recent_halves() {
    let mut spec = sample_machine();
    let lines = skewed_lines(9, 5_000, 60);
    let l1_misses = |spec: &MachineSpec, lines: &[u64]| run_one(spec, lines).levels[1].all_misses();
    spec.caches[0] = CacheSpec {
        replacement: ReplacementPolicy::TreePlru,
        ..sample_cache(CacheLevel::L1Data, 1024, 2, 3, 1)
    };
    assert_eq!(
        l1_misses(&spec, &lines),
        lru_oracle_misses(&lines, 8, 2).len() as u64
    );
    // a b c d, then a: the tree points to the other half, at c. LRU would take b.
    spec.caches[0] = CacheSpec {
        replacement: ReplacementPolicy::TreePlru,
        ..sample_cache(CacheLevel::L1Data, 256, 4, 3, 1)
    };
    assert_eq!(l1_misses(&spec, &[0, 1, 2, 3, 0, 4, 1]), 5, "b stayed");
    assert_eq!(l1_misses(&spec, &[0, 1, 2, 3, 0, 4, 2]), 6, "c went");
}

/// Does random replacement keep a cyclic pattern partly resident, while LRU loses all of it?
#[test]
fn random_replacement_keeps_part_of_a_loop_that_lru_loses() {
    let mut spec = sample_machine();
    let cyclic: Vec<u64> = (0..20_000).map(|at| at % 20).collect();
    let count_misses = |replacement, spec: &mut MachineSpec| {
        spec.caches[0] = CacheSpec {
            replacement,
            ..sample_cache(CacheLevel::L1Data, 1024, 16, 3, 1)
        };
        run_one(spec, &cyclic).levels[1].all_misses()
    };
    assert_eq!(count_misses(ReplacementPolicy::Lru, &mut spec), 20_000);
    // Independent reference theory of random replacement: m = 1 - (1 - 1/16)^(20 m) has its root at m = 0.355.
    let miss_ratio = count_misses(ReplacementPolicy::Random, &mut spec) as f64 / 20_000.0;
    assert!((miss_ratio - 0.355).abs() < 0.03, "{miss_ratio}");
}

/// L2 misses of the task on CPU 0, which shares the L2 with CPU 1: alone, or beside a neighbor that
/// streams.
fn counts_beside(
    spec: &MachineSpec,
    neighbor: bool,
    prepare: impl Fn(&mut Hardware),
    frames: &mut dyn FrameProvider,
) -> LevelCounts {
    let mut hw = build_hardware(spec);
    prepare(&mut hw);
    let lines = skewed_lines(5, 20_000, 200);
    let mut own_thread = scripted_thread(0, 0, loads_of(&lines), false);
    own_thread.class = 1;
    hw.load(CpuId(0), own_thread, 0);
    if neighbor {
        let mut neighbor_thread = scripted_thread(
            1,
            1,
            (0..5_000).map(|line| Access::store(line * 64, 0)).collect(),
            true,
        );
        neighbor_thread.class = 2;
        hw.load(CpuId(1), neighbor_thread, 0);
    }
    loop {
        if let StopReason::BatchEnd {
            batch_end: BatchEnd::Exit,
            cpu: CpuId(0),
            ..
        } = hw.run(u64::MAX / 4, frames)
        {
            return hw.unload(CpuId(0)).unwrap().counters.levels[CacheLevel::L2 as usize];
        }
    }
}

/// Do exclusive way masks make a victim's hits independent of its neighbor, and does it lose hits without them?
#[test]
fn exclusive_way_masks_make_hits_independent_of_the_neighbor() {
    let mut spec = sample_machine();
    (spec.cores_per_package, spec.caches[1].shared_by_cores) = (2, 2);
    spec.caches[1].way_partitions = Some(WayPartitions {
        groups: 4,
        min_ways: 1,
        contiguous: true,
    });

    for replacement in [ReplacementPolicy::Lru, ReplacementPolicy::TreePlru] {
        spec.caches[1].replacement = replacement;
        let masks = |hw: &mut Hardware| {
            hw.set_way_mask(CacheId(2), 1, &"0-3".parse().unwrap())
                .unwrap();
            hw.set_way_mask(CacheId(2), 2, &"4-7".parse().unwrap())
                .unwrap();
        };
        let solo_counts = counts_beside(&spec, false, masks, &mut IdentityFrames);
        assert_eq!(
            solo_counts,
            counts_beside(&spec, true, masks, &mut IdentityFrames)
        );
        let unpartitioned_counts = counts_beside(&spec, true, |_| {}, &mut IdentityFrames);
        assert!(
            unpartitioned_counts.misses_from(MissCause::InterTask) > 1_000
                && unpartitioned_counts.all_misses() > solo_counts.all_misses()
        );
    }
}

/// Frames of one half of the colors per process.
struct ColoredFrames;

impl FrameProvider for ColoredFrames {
    fn find_frame(
        &mut self,
        process: ProcessId,
        page: u64,
        _cpu: CpuId,
        _store: bool,
    ) -> FrameLookup {
        FrameLookup {
            frame: 2 * (page + 4096 * u64::from(process.0)) + u64::from(process.0 % 2),
            cost_cycles: 0,
            is_copied: false,
        }
    }
}

/// Do disjoint colors have the same effect?
#[test]
fn disjoint_colors_make_hits_independent_of_the_neighbor() {
    let mut spec = sample_machine();
    spec.cores_per_package = 2;
    // 128 sets of 64 bytes: two pages, two colors.
    spec.caches[1] = sample_cache(CacheLevel::L2, 32 << 10, 4, 14, 2);
    assert_eq!(spec.colors_of(&spec.caches[1]), 2);
    let solo_counts = counts_beside(&spec, false, |_| {}, &mut ColoredFrames);
    assert_eq!(
        solo_counts,
        counts_beside(&spec, true, |_| {}, &mut ColoredFrames)
    );
    assert!(
        counts_beside(&spec, true, |_| {}, &mut IdentityFrames).misses_from(MissCause::InterTask)
            > 0
    );
}

/// Are masks that the cache cannot have refused, with the expected values?
#[test]
fn impossible_way_masks_are_refused() {
    let mut spec = sample_machine();
    let parse_mask = |text: &str| text.parse::<IndexSet>().unwrap();
    assert!(
        build_hardware(&spec)
            .set_way_mask(CacheId(1), 0, &parse_mask("0-3"))
            .is_err(),
        "no partitions"
    );
    spec.caches[1].way_partitions = Some(WayPartitions {
        groups: 2,
        min_ways: 2,
        contiguous: true,
    });
    let mut hw = build_hardware(&spec);
    for (class, ways) in [(2, "0-3"), (0, "1"), (0, "0,2"), (0, "7-8"), (0, "")] {
        let refused = hw
            .set_way_mask(CacheId(1), class, &parse_mask(ways))
            .unwrap_err();
        assert!(!refused.expected.is_empty(), "{refused}");
    }
    assert_eq!(hw.set_way_mask(CacheId(1), 1, &parse_mask("4-7")), Ok(()));
    assert!(hw.set_way_mask(CacheId(9), 1, &parse_mask("4-7")).is_err());
}

/// Do two tasks that compete for one set appear as each other's evictors?
#[test]
fn the_matrix_names_evictor_and_victim() {
    let mut spec = sample_machine();
    (spec.cores_per_package, spec.caches[1]) = (2, sample_cache(CacheLevel::L2, 256, 4, 14, 2));
    let mut hw = build_hardware(&spec);
    hw.load(
        CpuId(0),
        scripted_thread(
            0,
            0,
            (0..100).map(|index| Access::load(index * 64, 0)).collect(),
            true,
        ),
        0,
    );
    hw.load(
        CpuId(1),
        scripted_thread(
            5,
            1,
            (0..100)
                .map(|index| Access::load(index * 64, index as u32 % 7 * 90))
                .collect(),
            true,
        ),
        0,
    );
    finish(&mut hw, 50_000);
    let pairs = hw.evictions(CacheId(2));
    for pair in [(0, 0), (0, 5), (5, 0), (5, 5)] {
        let is_listed = pairs.iter().any(|listed| (listed.0.0, listed.1.0) == pair);
        assert!(is_listed || pair.0 == pair.1, "{pair:?} in {pairs:?}");
    }
    let bytes: u64 = hw
        .occupancy_bytes(CacheId(2))
        .iter()
        .map(|(_, bytes)| bytes)
        .sum();
    assert_eq!(bytes, 256);
}

/// Right after a page was copied, does it find its lines in the last cache, and in no other cache?
#[test]
fn a_copied_page_is_cached_in_the_last_level_only() {
    let mut hw = build_hardware(&sample_machine());
    hw.insert_copied(CpuId(0), 1, 1, TaskId(0));
    let page: Vec<Access> = (0..64)
        .map(|line| Access::load(4096 + line * 64, 1))
        .collect();
    hw.load(CpuId(0), scripted_thread(0, 0, page, false), 0);
    let counters = finish(&mut hw, u64::MAX / 4).0.remove(0).counters;
    let misses_at = |level: CacheLevel| counters.levels[level as usize].all_misses();
    assert_eq!(
        (misses_at(CacheLevel::L1Data), misses_at(CacheLevel::L2)),
        (64, 0)
    );
}

/// Does a program on one color keep its hits in a virtually indexed L1, and lose them in a physically indexed one?
#[test]
fn colors_do_not_divide_a_virtually_indexed_l1() {
    let count_misses = |index: SetIndexing, frames: &mut dyn FrameProvider| {
        let mut spec = sample_machine();
        // Two pages a way; every second frame.
        spec.caches[0] = CacheSpec {
            index,
            ..sample_cache(CacheLevel::L1Data, 16 << 10, 2, 3, 1)
        };
        spec.caches[1] = sample_cache(CacheLevel::L2, 64 << 10, 8, 14, 1);
        let mut hw = build_hardware(&spec);
        let sweep: Vec<Access> = (0..10 * 256)
            .map(|line| Access::load(line % 256 * 64, 1))
            .collect();
        hw.load(CpuId(0), scripted_thread(0, 0, sweep, false), 0);
        let _ = hw.run(u64::MAX / 16, frames);
        let counters = hw.unload(CpuId(0)).unwrap().counters;
        assert_balanced(&counters);
        counters.levels[CacheLevel::L1Data as usize].all_misses()
    };

    assert_eq!(
        count_misses(SetIndexing::Virtual, &mut ColoredFrames),
        256,
        "each line once"
    );
    assert_eq!(
        count_misses(SetIndexing::Physical, &mut ColoredFrames),
        10 * 256,
        "an LRU loop over twice the sets it gets"
    );
    assert_eq!(
        count_misses(SetIndexing::Virtual, &mut IdentityFrames),
        count_misses(SetIndexing::Physical, &mut IdentityFrames)
    );
}

/// Are a frame's lines found and dropped under the name that it had, and does its next page give it another name?
#[test]
fn a_flushed_frame_gets_another_index_from_its_next_page() {
    let mut spec = sample_machine();
    spec.caches[0] = CacheSpec {
        index: SetIndexing::Virtual,
        ..sample_cache(CacheLevel::L1Data, 16 << 10, 2, 3, 1)
    };
    let mut hw = build_hardware(&spec);
    for (page, set) in [(7u64, 64), (12, 0)] {
        let accesses = vec![Access::load(page << 12, 1)];
        hw.load(CpuId(0), scripted_thread(0, 0, accesses, false), 0);
        let _ = hw.run(u64::MAX / 16, &mut OneFrame);
        hw.unload(CpuId(0));
        assert_eq!(hw.lines_by_set(CacheId(0)), [(set, TaskId(0))]);
        hw.flush_frame(3);
        assert!((0..2).all(|cache| hw.lines_by_set(CacheId(cache)).is_empty()));
    }
}

/// A translation that maps all pages to frame 3.
struct OneFrame;

impl FrameProvider for OneFrame {
    fn find_frame(
        &mut self,
        _process: ProcessId,
        _page: u64,
        _cpu: CpuId,
        _store: bool,
    ) -> FrameLookup {
        FrameLookup {
            frame: 3,
            cost_cycles: 0,
            is_copied: false,
        }
    }
}

/// A machine whose only data cache has this policy and shape.
fn machine_with_policy(replacement: ReplacementPolicy, sets: u64, ways: u32) -> MachineSpec {
    let mut spec = sample_machine();
    spec.caches[0] = sample_cache(CacheLevel::L1Data, sets * u64::from(ways) * 64, ways, 3, 1);
    spec.caches[0].replacement = replacement;
    spec
}

fn first_level_misses(spec: &MachineSpec, lines: &[u64]) -> u64 {
    run_one(spec, lines).levels[CacheLevel::L1Data as usize].all_misses()
}

/// Does SRRIP miss exactly as the paper's algorithm, written as lists of lines and predictions?
#[test]
fn srrip_misses_equal_an_independent_model() {
    for (sets, ways) in [(8u64, 4u32), (16, 16), (4, 3)] {
        let lines = skewed_lines(u64::from(ways), 20_000, 900);
        let mut model: Vec<Vec<(u64, u32)>> = vec![Vec::new(); sets as usize];
        let mut expected = 0;
        for &line in &lines {
            let set = &mut model[(line % sets) as usize];
            if let Some(entry) = set.iter_mut().find(|entry| entry.0 == line) {
                entry.1 = 0;
                continue;
            }

            expected += 1;
            if set.len() < ways as usize {
                set.push((line, 2));
                continue;
            }
            while set.iter().all(|entry| entry.1 < 3) {
                set.iter_mut().for_each(|entry| entry.1 += 1);
            }

            if let Some(victim) = set.iter_mut().find(|entry| entry.1 == 3) {
                *victim = (line, 2);
            }
        }
        let spec = machine_with_policy(ReplacementPolicy::Srrip, sets, ways);
        assert_eq!(
            first_level_misses(&spec, &lines),
            expected,
            "{sets} x {ways}"
        );
    }
}

/// Does a working set that is hit between scans survive them under SRRIP, and does a part of a cycle that exceeds the
/// cache stay under DRRIP, where LRU loses all of both?
#[test]
fn predictions_keep_what_lru_loses_to_scans_and_cycles() {
    let (sets, ways) = (128u64, 8u32);
    let capacity = sets * u64::from(ways);
    let mut scanned = Vec::new();
    for round in 0..20u64 {
        for _ in 0..2 {
            scanned.extend(0..capacity / 4);
        }
        scanned.extend((0..2 * capacity).map(|line| (1 << 20) + round * 2 * capacity + line));
    }

    let set_misses = |replacement| {
        let spec = machine_with_policy(replacement, sets, ways);
        first_level_misses(&spec, &scanned) - 40 * capacity
    };
    assert_eq!(set_misses(ReplacementPolicy::Lru), 20 * capacity / 4);
    assert!(set_misses(ReplacementPolicy::Srrip) < 5 * capacity / 4);
    let cycle: Vec<u64> = (0..40).flat_map(|_| 0..capacity * 3 / 2).collect();
    let cycle_misses =
        |replacement| first_level_misses(&machine_with_policy(replacement, sets, ways), &cycle);
    assert_eq!(cycle_misses(ReplacementPolicy::Lru), cycle.len() as u64);
    let kept = cycle_misses(ReplacementPolicy::Drrip) as f64 / cycle.len() as f64;
    assert!(kept < 0.65, "{kept}: the best possible is a third");
}
