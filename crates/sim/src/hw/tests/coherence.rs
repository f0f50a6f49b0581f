//! Inclusion, exclusion and MESI under random traffic, and counters that add up.

use proptest::prelude::*;

use super::*;
use crate::hw::cache_unit::ROOT;
use crate::hw::store::{EXCLUSIVE, SHARER_BITS};

/// Two packages of two cores over small caches of the given kinds.
fn small_machine(
    first: WritePolicy,
    second: Inclusion,
    third: Option<Inclusion>,
    per_l2: u32,
    replacement: ReplacementPolicy,
) -> MachineSpec {
    let mut spec = sample_machine();
    (spec.packages, spec.cores_per_package, spec.memory.nodes) = (2, 2, 2);
    spec.caches = vec![
        CacheSpec {
            replacement,
            ..sample_cache(CacheLevel::L1Instruction, 512, 2, 1, 1)
        },
        CacheSpec {
            write: first,
            replacement,
            line_bytes: 32,
            ..sample_cache(CacheLevel::L1Data, 512, 2, 3, 1)
        },
        CacheSpec {
            inclusion: second,
            replacement,
            ..sample_cache(CacheLevel::L2, 2 << 10, 4, 14, per_l2)
        },
    ];

    spec.caches.extend(third.map(|inclusion| {
        let line_bytes = if inclusion == Inclusion::Victim {
            128
        } else {
            64
        };
        CacheSpec {
            inclusion,
            line_bytes,
            replacement,
            ..sample_cache(CacheLevel::L3, 4 << 10, 4, 40, 2)
        }
    }));
    spec.coherence = CoherenceSpec {
        same_package_cycles: Some(30),
        other_package_cycles: Some(120),
    };
    spec.prefetchers = vec![
        PrefetcherSpec::AdjacentLine {
            level: CacheLevel::L1Data,
        },
        PrefetcherSpec::Stride {
            level: CacheLevel::L2,
            streams: 4,
            degree: 2,
        },
    ];
    spec
}

fn on_path(hw: &Hardware, from: usize, to: usize) -> bool {
    let mut cache_index = from;
    while cache_index != ROOT {
        if cache_index == to {
            return true;
        }
        cache_index = hw.caches.units[cache_index].parent;
    }
    false
}

/// Byte ranges that a unit holds, with state; a victim cache's sectors one by one.
fn held_ranges(hw: &Hardware, index: usize) -> Vec<(u64, u64, u32)> {
    let unit = &hw.caches.units[index];
    let child_shift = hw.caches.child_line_shift(index);
    let mut ranges = Vec::new();
    for (line, meta) in unit.store.lines() {
        let start = line << unit.line_shift;
        if !unit.is_victim() {
            ranges.push((start, start + (1 << unit.line_shift), meta.state()));
            continue;
        }
        for sector in 0..SHARER_BITS.min(1 << (unit.line_shift - child_shift)) {
            if meta.sharers() >> sector & 1 == 1 {
                let start = start + (u64::from(sector) << child_shift);
                ranges.push((start, start + (1 << child_shift), meta.state()));
            }
        }
    }
    ranges
}

fn check_invariants(hw: &Hardware) {
    let count = hw.caches.units.len();
    let ranges: Vec<_> = (0..count).map(|index| held_ranges(hw, index)).collect();
    let overlap = |a: &(u64, u64, u32), b: &(u64, u64, u32)| a.0 < b.1 && b.0 < a.1;
    for cpu in 0..count {
        for other in 0..count {
            if cpu == other || on_path(hw, cpu, other) || on_path(hw, other, cpu) {
                continue;
            }
            for range in ranges[cpu].iter().filter(|range| range.2 >= EXCLUSIVE) {
                let copy = ranges[other].iter().find(|copy| overlap(range, copy));
                assert!(
                    copy.is_none(),
                    "{range:x?} is owned by cache {cpu} and also in {other}: {copy:x?}"
                );
            }
        }
        let parent = hw.caches.units[cpu].parent;
        if parent == ROOT {
            continue;
        }
        for range in &ranges[cpu] {
            let parent_copy = ranges[parent].iter().find(|copy| overlap(range, copy));
            match hw.caches.units[parent].inclusion {
                Inclusion::Inclusive => assert!(
                    parent_copy.is_some(),
                    "{range:x?} of {cpu} is missing in {parent}"
                ),
                Inclusion::Victim => assert!(
                    parent_copy.is_none_or(|copy| copy.2 < EXCLUSIVE),
                    "{range:x?} is in {cpu} and owned by its victim cache {parent}"
                ),
                Inclusion::NonInclusive => {}
            }
            let unit = &hw.caches.units[parent];
            if let Some(place) = unit
                .store
                .find(range.0 >> unit.line_shift)
                .filter(|_| !unit.is_victim())
            {
                let bit = hw.caches.units[cpu].sharer_bit;
                assert!(
                    unit.store.line_meta(place).sharers() & bit != 0,
                    "{parent} does not know that {cpu} has {range:x?}"
                );
            }
        }
    }
}

fn machine_strategy() -> impl Strategy<Value = MachineSpec> {
    let write = prop_oneof![Just(WritePolicy::Back), Just(WritePolicy::Through)];
    let second = prop_oneof![Just(Inclusion::Inclusive), Just(Inclusion::NonInclusive)];
    let third = prop_oneof![
        Just(None),
        Just(Some(Inclusion::Inclusive)),
        Just(Some(Inclusion::NonInclusive)),
        Just(Some(Inclusion::Victim))
    ];
    let replacement = prop_oneof![
        Just(ReplacementPolicy::Lru),
        Just(ReplacementPolicy::TreePlru),
        Just(ReplacementPolicy::Random)
    ];

    let index = prop_oneof![Just(SetIndexing::Physical), Just(SetIndexing::Virtual)];
    (write, second, third, 1..=2u32, replacement, index).prop_map(
        |(write, second, third, per_l2, replacement, index)| {
            let mut spec = small_machine(write, second, third, per_l2, replacement);
            if index == SetIndexing::Virtual {
                // Two pages in a way of the L1s.
                spec.pages.page_bytes = 512;
                spec.caches[..2]
                    .iter_mut()
                    .for_each(|cache| (cache.index, cache.size_bytes) = (index, 2 << 10));
            }
            spec
        },
    )
}

/// Two pages in each frame: a line has two virtual addresses, with different bits of the page.
struct AliasedFrames;

impl FrameProvider for AliasedFrames {
    fn find_frame(
        &mut self,
        _process: ProcessId,
        page: u64,
        _cpu: CpuId,
        _store: bool,
    ) -> FrameLookup {
        FrameLookup {
            frame: page / 2,
            cost_cycles: 0,
            is_copied: false,
        }
    }
}

/// Four threads that load, store and jump at random, over lines of their own and lines of all.
fn load_traffic(hw: &mut Hardware, dice: &mut TestRng) {
    for cpu in 0..4u32 {
        let draw_test_access = |dice: &mut TestRng| {
            let address = if dice.draw_below(4) == 0 {
                dice.draw_below(256) * 32
            } else {
                dice.draw_below(32) * 32
            };
            match dice.draw_below(8) {
                0 => Access::jump((1 << 16) + dice.draw_below(64) * 64, 3),
                1..=3 => Access::store(address, 2),
                4 => Access::dependent_load(address, 1),
                _ => Access::load(address, 2),
            }
        };

        let accesses = (0..400).map(|_| draw_test_access(dice)).collect();
        hw.load(
            CpuId(cpu),
            scripted_thread(cpu, 0, accesses, true),
            u64::from(cpu) * 3,
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Do inclusion, exclusion and single ownership hold at every stop, whatever four cores do to shared lines, and do
    /// the counters of tasks and caches agree?
    #[test]
    fn coherence_holds_under_random_traffic(spec in machine_strategy(), seed in any::<u64>()) {
        let mut dice = TestRng::new(seed);
        let mut hw = build_hardware(&spec);
        load_traffic(&mut hw, &mut dice);
        for stop in 1..20 {
            hw.run(stop * 500, &mut AliasedFrames);
            check_invariants(&hw);
        }

        let (threads, _) = finish(&mut hw, 10_000);
        let mut caches = [0; LEVEL_COUNT];
        for index in 0..hw.caches.units.len() {
            let unit = &hw.caches.units[index];
            caches[unit.level as usize] += unit.counters.demand.references;
            let lines = unit.store.lines().count() as u64;
            let owned: u64 = unit.lines_by_owner.iter().map(|&lines| u64::from(lines)).sum();
            prop_assert_eq!(lines, owned, "every line has one owner");
            let evicted: u64 = unit.eviction_matrix.nonzero_counts().map(|(_, _, lines)| lines).sum();
            prop_assert_eq!(evicted, unit.counters.evictions);
        }

        for thread in &threads {
            assert_balanced(&thread.counters);
        }

        for level in ALL_LEVELS {
            let tasks: u64 = threads.iter().map(|thread| thread.counters.levels[level as usize].references).sum();
            prop_assert_eq!(tasks, caches[level as usize], "references of tasks and caches at {:?}", level);
        }
    }

    /// Does the short way to the next cache leave every counter and every line in the same state as the long way?
    #[test]
    fn the_short_and_the_long_way_leave_the_same_state(spec in machine_strategy(), seed in any::<u64>()) {
        let run_machine = |long_way_only: bool| {
            let mut hw = build_hardware(&spec);
            hw.caches.uses_slow_path_only = long_way_only;
            load_traffic(&mut hw, &mut TestRng::new(seed));
            final_state(&mut hw, 10_000)
        };
        prop_assert_eq!(run_machine(false), run_machine(true));
    }

    /// Does the same seed give the same bits, and stopping in between change nothing that a lone core does?
    #[test]
    fn the_same_run_gives_the_same_counters(spec in machine_strategy(), seed in any::<u64>()) {
        let run_with_stops = |stops: u64| {
            let mut dice = TestRng::new(seed);
            let mut hw = build_hardware(&spec);
            let accesses = (0..500).map(|_| Access::store(dice.draw_below(300) * 32, 2)).collect();
            hw.load(CpuId(1), scripted_thread(0, 0, accesses, true), 0);
            for stop in 1..=stops {
                hw.run(20_000 * stop / stops, &mut IdentityFrames);
            }
            hw.unload(CpuId(1)).unwrap().counters
        };
        prop_assert_eq!(run_with_stops(1), run_with_stops(1));
        prop_assert_eq!(run_with_stops(1), run_with_stops(7));
    }
}

/// Does running ahead with hits of a core's own second level change nothing if cores share no lines, however many
/// contexts take turns?
#[test]
fn running_ahead_in_a_private_cache_changes_no_bit() {
    let in_order = CoreModel::in_order(2);
    let out_of_order = CoreModel::OutOfOrder {
        issue_width: 4,
        window: 64,
        mshrs: 8,
        loads_pass: true,
    };
    let shapes = [
        (in_order, 1),
        (in_order, 2),
        (out_of_order, 1),
        (out_of_order, 2),
    ];

    for ((pipeline, contexts), seed) in shapes
        .into_iter()
        .flat_map(|shape| (0..4).map(move |seed| (shape, seed)))
    {
        let mut spec = MachineSpec {
            pipeline,
            cores_per_package: 4,
            contexts_per_core: contexts,
            ..sample_machine()
        };
        spec.caches
            .push(sample_cache(CacheLevel::L3, 64 << 10, 16, 45, 4));
        spec.memory.bytes_per_cycle = 2.0;
        let run_machine = |in_order_only: bool| {
            let mut hw = build_hardware(&spec);
            hw.caches.forbids_running_ahead = in_order_only;
            let mut dice = TestRng::new(seed);
            for cpu in 0..4 * contexts {
                let lines = [24, 100, 400, 3000][cpu as usize % 4];
                let mut draw_access = || {
                    let (address, gap) = (dice.draw_below(lines) * 64, dice.draw_below(6) as u32);
                    if dice.draw_below(3) == 0 {
                        Access::store(address, gap)
                    } else {
                        Access::load(address, gap)
                    }
                };
                let accesses = (0..4_000).map(|_| draw_access()).collect();
                hw.load(CpuId(cpu), scripted_thread(cpu, cpu, accesses, true), 0);
            }

            let state = final_state(&mut hw, 200_000);
            state.0.iter().for_each(assert_balanced);
            state
        };
        assert!(
            run_machine(false) == run_machine(true),
            "{contexts} contexts, {pipeline:?}, seed {seed}"
        );
    }
}

/// Does a line that another package wrote cost the remote latency, count as a remote hit, and its loss as coherence?
#[test]
fn a_line_written_elsewhere_costs_the_remote_latency() {
    for (writer, latency) in [(1, 30), (2, 120)] {
        let spec = small_machine(
            WritePolicy::Back,
            Inclusion::NonInclusive,
            None,
            1,
            ReplacementPolicy::Lru,
        );
        let mut hw = Hardware::new(
            &spec,
            HwOptions {
                is_prefetch_enabled: false,
                ..HwOptions::default()
            },
        )
        .unwrap();
        let load_thread = |hw: &mut Hardware, cpu: u32, at: u64, access: Access| {
            hw.load(CpuId(cpu), scripted_thread(cpu, 0, vec![access], false), at);
            finish(hw, at + 1000).0.remove(0).counters
        };
        load_thread(&mut hw, 0, 0, Access::load(0, 0));
        load_thread(&mut hw, writer, 1000, Access::store(0, 0));
        // The second access waits for the first one's value.
        let accesses = vec![Access::load(0, 0), Access::dependent_load(0, 0)];
        hw.load(CpuId(0), scripted_thread(0, 0, accesses, false), 2000);
        let counters = finish(&mut hw, 3000).0.remove(0).counters;
        assert_eq!(counters.remote_cache_hits, 1);
        assert_eq!(
            counters.stalls.remote_cache,
            latency - 1,
            "the issue itself is the first cycle"
        );
        assert_eq!(
            counters.stalls.data_stalls(),
            latency - 1,
            "nothing else is waited for"
        );
        assert_eq!(
            counters.levels[CacheLevel::L1Data as usize].misses_from(MissCause::Coherence),
            1
        );
        assert_eq!(
            counters.levels[CacheLevel::L2 as usize].misses_from(MissCause::Coherence),
            1
        );
    }
}
