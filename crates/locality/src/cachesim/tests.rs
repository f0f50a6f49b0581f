//! Compares the simulator with deliberately simple reference models.

use super::*;
use crate::hash::scatter;
use crate::stack::StackDistances;
use cachemate_core::SplitMix64;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Directly by the definition, as an oracle for the simulator.
fn set_of(shape: CacheGeometry, line: u64) -> u64 {
    let slice = (u128::from(scatter(line)) * u128::from(shape.slices)) >> 64;
    let slice = if shape.slices == 1 { 0 } else { slice as u64 };
    slice * u64::from(shape.sets) + line % u64::from(shape.sets)
}

/// Simulates LRU with a plain list of line addresses per set, most recent first.
fn lru_oracle(shape: CacheGeometry, lines: &[u64]) -> (PositionProfile, Vec<u64>) {
    let ways = shape.ways as usize;
    let mut sets: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut profile = PositionProfile {
        hits: vec![0; ways],
        misses: 0,
    };
    let mut missed = Vec::new();
    for &line in lines {
        let set = sets.entry(set_of(shape, line)).or_default();
        match set.iter().position(|&stored_line| stored_line == line) {
            Some(position) => {
                profile.hits[position] += 1;
                set.remove(position);
            }
            None => {
                profile.misses += 1;
                missed.push(line);
            }
        }
        set.insert(0, line);
        set.truncate(ways);
    }
    (profile, missed)
}

/// Tree-PLRU as nested halves, each of which stores which of its own halves was touched last.
enum PlruTree {
    Way(Option<u64>),
    Halves {
        low: Box<PlruTree>,
        high: Box<PlruTree>,
        low_is_older: bool,
    },
}

impl PlruTree {
    fn new(ways: u32) -> Self {
        if ways == 1 {
            return PlruTree::Way(None);
        }
        let half = || Box::new(PlruTree::new(ways / 2));
        PlruTree::Halves {
            low: half(),
            high: half(),
            low_is_older: true,
        }
    }
    /// Touches the lowest way whose content `is_accepted` accepts; returns `false` if there is none.
    fn touch(&mut self, line: u64, is_accepted: &dyn Fn(Option<u64>) -> bool) -> bool {
        match self {
            PlruTree::Way(content) => {
                let was_touched = is_accepted(*content);
                if was_touched {
                    *content = Some(line);
                }
                was_touched
            }
            PlruTree::Halves {
                low,
                high,
                low_is_older,
            } => {
                let in_low = low.touch(line, is_accepted);
                let was_touched = in_low || high.touch(line, is_accepted);
                if was_touched {
                    *low_is_older = !in_low;
                }
                was_touched
            }
        }
    }
    fn replace_oldest(&mut self, line: u64) {
        match self {
            PlruTree::Way(content) => *content = Some(line),
            PlruTree::Halves {
                low,
                high,
                low_is_older,
            } => {
                if *low_is_older { low } else { high }.replace_oldest(line);
                *low_is_older = !*low_is_older;
            }
        }
    }
}

fn plru_oracle(shape: CacheGeometry, lines: &[u64]) -> u64 {
    let mut sets: BTreeMap<u64, PlruTree> = BTreeMap::new();
    let mut misses = 0;
    for &line in lines {
        let tree = sets
            .entry(set_of(shape, line))
            .or_insert_with(|| PlruTree::new(shape.ways));
        if !tree.touch(line, &|content| content == Some(line)) {
            misses += 1;
            if !tree.touch(line, &|content| content.is_none()) {
                tree.replace_oldest(line);
            }
        }
    }
    misses
}

fn any_shape() -> impl Strategy<Value = CacheGeometry> {
    (1u32..40, 1u32..24, 1u32..4).prop_map(|(sets, ways, slices)| CacheGeometry {
        sets,
        ways,
        slices,
    })
}

/// Traces with reuse; some use all 64 address bits from halfway on.
fn any_lines() -> impl Strategy<Value = Vec<u64>> {
    (any::<u64>(), 0usize..2000, 1u64..2000, any::<bool>()).prop_map(
        |(seed, len, footprint, widens)| {
            let mut random = SplitMix64::new(seed);
            let draw_narrow = |random: &mut SplitMix64| {
                let range = if random.draw_below(2) == 0 {
                    footprint
                } else {
                    footprint / 10 + 1
                };
                random.draw_below(range)
            };
            let line = |index: usize| {
                let line = draw_narrow(&mut random);
                if widens && index > len / 2 && random.draw_below(3) == 0 {
                    u64::MAX - line
                } else {
                    line
                }
            };
            (0..len).map(line).collect()
        },
    )
}

fn in_two_pushes(cache: &mut CacheSim, lines: &[u64]) -> Vec<u64> {
    let mut missed = Vec::new();
    let (first, second) = lines.split_at(lines.len() / 3);
    let misses =
        cache.push_collecting(first, &mut missed) + cache.push_collecting(second, &mut missed);
    assert_eq!((misses, misses), (cache.misses(), missed.len() as u64));
    assert_eq!(cache.accesses(), lines.len() as u64);
    missed
}

proptest! {
    /// Does LRU hit and miss exactly like a list per set, at the same positions, with every instruction set?
    #[test]
    fn lru_equals_lists(shape in any_shape(), lines in any_lines()) {
        let (profile, missed) = lru_oracle(shape, &lines);
        for simd in Simd::available() {
            let mut cache = CacheSim::with_simd(shape, Replacement::Lru, simd).unwrap();
            prop_assert_eq!(&in_two_pushes(&mut cache, &lines), &missed, "{}", simd.name());
            prop_assert_eq!(cache.positions().unwrap(), profile.clone(), "{}", simd.name());
        }
    }

    /// Does tree-PLRU evict the same lines as a tree of halves?
    #[test]
    fn tree_plru_equals_nested_halves(
        sets in 1u32..9, log_ways in 0u32..7, lines in any_lines()
    ) {
        let shape = CacheGeometry { sets, ways: 1 << log_ways, slices: 1 };
        let mut cache = CacheSim::new(shape, Replacement::TreePlru).unwrap();
        in_two_pushes(&mut cache, &lines);
        prop_assert_eq!(cache.misses(), plru_oracle(shape, &lines));
    }

    /// Do the misses of a fully associative LRU cache agree with the stack distances, at every size?
    #[test]
    fn stack_distances_agree_with_misses_at_every_size(lines in any_lines(), sizes in prop::collection::vec(1u32..300, 4)) {
        let mut engine = StackDistances::new();
        engine.push(&lines).unwrap();
        let histogram = engine.finish().unwrap();
        for size in sizes.into_iter().chain([1, 2, 15, 16, 17]) {
            let mut cache = CacheSim::new(CacheGeometry::fully_associative(size), Replacement::Lru).unwrap();
            prop_assert_eq!(cache.push(&lines), histogram.misses_at(u64::from(size)), "{} lines", size);
        }
    }

    /// Do the hits by position determine the misses of caches with fewer ways?
    #[test]
    fn hits_by_position_determine_misses_with_fewer_ways(sets in 1u32..9, lines in any_lines(), ways in 1u32..16) {
        let count_positions = |ways| {
            let mut cache = CacheSim::new(CacheGeometry { sets, ways, slices: 1 }, Replacement::Lru).unwrap();
            cache.push(&lines);
            cache.positions().unwrap()
        };
        let PositionProfile { hits, misses } = count_positions(16);
        prop_assert_eq!(misses + hits.iter().skip(ways as usize).sum::<u64>(), count_positions(ways).misses);
    }
}

/// Does random replacement hit as often as theory predicts for a cyclic scan over n lines in one set with C ways?
///
/// The probability h that a line survives one round solves h = (1 - 1/C)^(misses in a round) = (1 - 1/C)^(n (1 - h)).
#[test]
fn random_replacement_follows_theory() {
    let (ways, n) = (256u32, 300u64);
    let mut cache = CacheSim::new(
        CacheGeometry::fully_associative(ways),
        Replacement::Random { seed: 5 },
    )
    .unwrap();
    let lines: Vec<u64> = (0..n * 1500).map(|index| index % n).collect();
    cache.push(&lines);
    let mut hits = 0.0;
    for _ in 0..200 {
        hits = libm::pow(1.0 - 1.0 / f64::from(ways), n as f64 * (1.0 - hits));
    }
    let measured = 1.0 - cache.miss_ratio().unwrap();
    assert!(
        (measured - hits).abs() < 0.01,
        "hits {measured}, theory {hits}"
    );
}

/// Does the same seed give the same misses, and another seed different ones?
#[test]
fn the_seed_determines_the_misses_of_random_replacement() {
    let lines: Vec<u64> = (0..5000).map(|index| index * index % 97).collect();
    let missed_lines = |seed| {
        let shape = CacheGeometry {
            sets: 3,
            ways: 16,
            slices: 1,
        };
        in_two_pushes(
            &mut CacheSim::new(shape, Replacement::Random { seed }).unwrap(),
            &lines,
        )
    };
    assert_eq!(missed_lines(1), missed_lines(1));
    assert_ne!(missed_lines(1), missed_lines(2));
}

/// Does LRU miss every access of a cyclic scan that is one line too long for the cache, and none if it just fits?
#[test]
fn lru_misses_every_access_of_a_scan_one_line_too_long() {
    let shape = CacheGeometry::from_bytes(2 << 20, 64, 16, 1).unwrap();
    for (lines, misses) in [(32_768u64, 32_768), (32_768 + 2048, 3 * (32_768 + 2048))] {
        let mut cache = CacheSim::new(shape, Replacement::Lru).unwrap();
        assert_eq!(
            cache.push(
                &(0..3 * lines)
                    .map(|index| index % lines)
                    .collect::<Vec<_>>()
            ),
            misses
        );
    }
}

/// Do the slices of a sliced cache receive about equal shares of the accesses at any stride?
#[test]
fn slices_receive_equal_shares_at_any_stride() {
    for stride in [1, 64, 640, 4096] {
        let shape = CacheGeometry {
            sets: 1,
            ways: 1,
            slices: 3,
        };
        let mut shares = [0; 3];
        (0..30_000).for_each(|index| shares[set_of(shape, index * stride) as usize] += 1);
        assert!(
            shares.iter().all(|&share| (9_600..10_400).contains(&share)),
            "{stride}: {shares:?}"
        );
    }
}

/// Does the error for an invalid geometry name the field?
#[test]
fn errors_for_invalid_geometries_name_the_field() {
    let error_text = |shape: Result<CacheGeometry, FieldError>| shape.unwrap_err().to_string();
    assert_eq!(
        error_text(CacheGeometry::from_bytes(1 << 20, 48, 16, 1)),
        "cache line_bytes: found 48, expected a power of two"
    );
    assert_eq!(
        error_text(CacheGeometry::from_bytes(1 << 20, 64, 0, 1)),
        "cache ways: found 0, expected at least 1"
    );
    assert!(
        error_text(CacheGeometry::from_bytes(1000, 64, 4, 1))
            .starts_with("cache size_bytes: found 1000")
    );
    let shape = CacheGeometry {
        sets: 4,
        ways: 12,
        slices: 1,
    };
    let plru = CacheSim::new(shape, Replacement::TreePlru).unwrap_err();
    assert_eq!(
        plru.to_string(),
        "cache ways: found 12, expected a power of two up to 64 for tree-PLRU"
    );
    // POWER5's L2: three slices of 640 KB, 10 ways, 128-byte lines.
    let power5 = CacheGeometry::from_bytes(1920 << 10, 128, 10, 3).unwrap();
    assert_eq!(
        power5,
        CacheGeometry {
            sets: 512,
            ways: 10,
            slices: 3
        }
    );
}

/// Do caches that threads divide by sets, or take one each, have the misses of single caches, under every policy,
/// number of threads and number of sets?
#[test]
fn caches_on_threads_have_the_misses_of_single_caches() {
    let mut random = SplitMix64::new(4);
    let lines: Vec<u64> = (0..30_000).map(|_| random.draw_below(900)).collect();
    let policies = [
        Replacement::Lru,
        Replacement::TreePlru,
        Replacement::Random { seed: 3 },
    ];
    for all_sets in [[16, 32, 48], [12, 30, 7]] {
        let to_geometry = |sets| CacheGeometry {
            sets,
            ways: 8,
            slices: 2,
        };
        let geometries = all_sets.map(to_geometry);
        for policy in policies {
            let expected = geometries.map(|geometry| {
                let mut cache = CacheSim::new(geometry, policy).unwrap();
                cache.push(&lines)
            });
            for threads in [1, 2, 3, 16] {
                let mut group = CacheSimGroup::new(&geometries, policy, threads).unwrap();
                for part in lines.chunks(7_000) {
                    let meanwhile = group.push_while(part, || part.len());
                    assert_eq!(meanwhile, part.len());
                }
                assert_eq!(group.misses(), expected, "{policy:?}, {threads} threads");
            }
        }
    }
}

/// Do threads that divide the sets hold each set once together, so that they take no more memory than one thread?
#[test]
fn threads_hold_each_set_once() {
    let to_geometry = |sets| CacheGeometry {
        sets,
        ways: 8,
        slices: 2,
    };
    let geometries = [16, 32, 48].map(to_geometry);
    for (threads, expected) in [(1, vec![192]), (2, vec![96; 2]), (16, vec![12; 16])] {
        let group = CacheSimGroup::new(&geometries, Replacement::Lru, threads).unwrap();
        assert_eq!(group.set_counts(), expected, "{threads} threads");
    }
}
