//! Compares the engine with an oracle that stores the LRU stack as a list.

use super::batch::BATCH_ACCESSES;
use super::finder::FinderKind;
use super::slot_allocator::FinderLimits;
use super::{COLD, DistanceHistogram, ParallelStackDistances, StackDistances};
use crate::simd::Simd;
use cachemate_core::SplitMix64;
use proptest::prelude::*;

/// Returns the histogram by Mattson's definition: a distance is the position of the line in a list, most recent first.
fn mattson_histogram(lines: impl IntoIterator<Item = u64>) -> DistanceHistogram {
    let (mut stack, mut cold, mut counts) = (Vec::new(), 0, Vec::new());
    for line in lines {
        match stack.iter().rposition(|&stored_line| stored_line == line) {
            Some(position) => {
                counts.push(((stack.len() - 1 - position) as u64, 1));
                stack.remove(position);
            }
            None => cold += 1,
        }
        stack.push(line);
    }
    DistanceHistogram::new(cold, counts)
}

fn small_limits(kind: FinderKind) -> FinderLimits {
    FinderLimits {
        kind,
        min_slots: 2 * BATCH_ACCESSES,
        ..FinderLimits::default()
    }
}

const FORMS: [FinderKind; 4] = [
    FinderKind::Dense,
    FinderKind::Sparse,
    FinderKind::Adaptive { max_dense_bytes: 0 },
    FinderKind::Adaptive {
        max_dense_bytes: 1 << 20,
    },
];

/// Returns the histogram of one engine to which the lines are pushed in portions of varying length.
fn by_engine(simd: Simd, limits: FinderLimits, lines: &[u64]) -> DistanceHistogram {
    let mut engine = StackDistances::with_limits(simd, limits);
    let (mut remaining_lines, mut portion) = (lines, 1);
    while !remaining_lines.is_empty() {
        let (now, later) = remaining_lines.split_at(portion.min(remaining_lines.len()));
        engine.push(now).unwrap();
        (remaining_lines, portion) = (later, portion * 3 % 1000 + 1);
    }
    engine.finish().unwrap()
}

/// Traces with several kinds of locality, whose addresses are dense, sparse, strided or use all 64 bits.
fn any_trace() -> impl Strategy<Value = Vec<u64>> {
    (any::<u64>(), 1usize..3000, 1u64..600, 0u32..6).prop_map(|(seed, len, footprint, kind)| {
        let mut random = SplitMix64::new(seed);
        (0..len as u64)
            .map(|index| {
                let line = match random.draw_below(4) {
                    0 => index % footprint,
                    1 => random.draw_below(footprint / 8 + 1),
                    _ => random.draw_below(footprint),
                };
                match kind {
                    0 => line,
                    1 => line * 64 + 7,
                    2 => line * 4096,
                    3 => line.wrapping_mul(0x9E37_79B9_7F4A_7C15),
                    4 => u64::MAX - line,
                    _ => line << 38,
                }
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Does every instruction set and every form of the finder give the oracle's distances, even with frequent
    /// compaction?
    #[test]
    fn engine_equals_oracle(lines in any_trace()) {
        let expected = mattson_histogram(lines.iter().copied());
        for simd in Simd::available() {
            for kind in FORMS {
                prop_assert_eq!(&by_engine(simd, small_limits(kind), &lines), &expected, "{} {:?}", simd.name(), kind);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Do two or more threads give the oracle's distances?
    #[test]
    fn several_threads_give_the_oracles_distances(lines in any_trace(), threads in 0usize..6) {
        let mut engine = ParallelStackDistances::with_sizes(threads, Simd::detect_best(), small_limits(FinderKind::default()));
        lines.chunks(700).for_each(|lines| engine.push(lines).unwrap());
        prop_assert_eq!(engine.finish().unwrap(), mattson_histogram(lines.iter().copied()));
    }
}

/// Do several threads agree with one on a trace with many messages and compactions?
#[test]
fn threads_agree_on_a_long_trace() {
    let mut random = SplitMix64::new(9);
    let lines: Vec<u64> = (0..600_000)
        .map(|index| random.draw_below(1 + index % 50_000) * 3)
        .collect();
    let mut distances = StackDistances::new();
    distances.push(&lines).unwrap();
    let expected = distances.finish().unwrap();
    for threads in [2, 3, 4] {
        let mut engine = ParallelStackDistances::new(threads);
        engine.push(&lines).unwrap();
        assert_eq!(engine.finish().unwrap(), expected, "{threads} threads");
    }
}

/// Do the threads end if the engine is dropped before the stream is finished?
#[test]
fn dropping_early_ends_the_threads() {
    let mut engine = ParallelStackDistances::new(3);
    engine.push(&[1, 2, 1]).unwrap();
    drop(engine);
}

/// Does the finder switch to the smaller form, and back, without a wrong distance?
#[test]
fn the_finder_switches_form_without_a_wrong_distance() {
    let limits = FinderLimits {
        kind: FinderKind::Adaptive { max_dense_bytes: 0 },
        min_slots: 1 << 12,
        ..FinderLimits::default()
    };
    let mut engine = StackDistances::with_limits(Simd::detect_best(), limits);
    // One line per page, touched twice, makes the finder sparse. After that, all lines of these pages make it dense
    // again at the next compaction.
    let scattered: Vec<u64> = (0..20_000).map(|index| index % 10_000 * 64).collect();
    engine.push(&scattered).unwrap();
    assert!(engine.is_sparse());
    let all_lines: Vec<u64> = (0..1_280_000).map(|index| index % 640_000).collect();
    engine.push(&all_lines).unwrap();
    assert!(!engine.is_sparse());
    // In the first round over all lines, every 64th line is known. Since the line at place p of the scattered ones was
    // last touched, the 9 999 others occurred, and 63 new lines for each of the p pages before it.
    let mut expected = vec![(9_999, 10_000), (639_999, 640_000)];
    expected.extend((0..10_000).map(|position| (9_999 + 63 * position, 1)));
    assert_eq!(
        engine.finish().unwrap(),
        DistanceHistogram::new(640_000, expected)
    );
}

/// Is a trace with more lines than slots can number rejected, and does the error contain the limit?
#[test]
fn a_trace_with_too_many_lines_is_rejected_with_the_limit() {
    let limits = FinderLimits {
        max_lines: 1000,
        ..small_limits(FinderKind::default())
    };
    let mut engine = StackDistances::with_limits(Simd::detect_best(), limits);
    let lines: Vec<u64> = (0..5000).collect();
    let error = engine.push(&lines).unwrap_err();
    assert_eq!(
        error.to_string(),
        "stack distances: found more than 1000 distinct lines, expected at most that many"
    );
}

/// Are distances right for footprints that span many blocks of counters, so that every level of the tree is used?
#[test]
fn distances_are_right_at_every_level_of_the_tree() {
    // In a cyclic scan over n lines, every access but the first n has distance n - 1. The scan then runs backwards: the
    // line at depth i of the stack, for i = 0, 1, 2, ..., because each touch leaves deeper lines in place.
    let line_count = 300_000u64;
    let cycle: Vec<u64> = (0..3 * line_count)
        .map(|index| index % line_count)
        .collect();
    let reversed_lines: Vec<u64> = (0..line_count).rev().collect();
    let mut expected: Vec<(u64, u64)> = (0..line_count).map(|distance| (distance, 1)).collect();
    expected.push((line_count - 1, 2 * line_count));
    for simd in Simd::available() {
        let mut engine = StackDistances::with_simd(simd);
        engine.push(&cycle).unwrap();
        engine.push(&reversed_lines).unwrap();
        assert_eq!(
            engine.finish().unwrap(),
            DistanceHistogram::new(line_count, expected.clone())
        );
    }
}

/// Are listed distances those of a stack that is searched access by access, in order, through compactions and pending
/// batches?
#[test]
fn listed_distances_are_those_of_a_searched_stack() {
    let mut generator = SplitMix64::new(3);
    let lines: Vec<u64> = (0..30_000)
        .map(|_| generator.draw_below(700) * generator.draw_below(3))
        .collect();
    let mut stack: Vec<u64> = Vec::new();
    let expected: Vec<u32> = lines
        .iter()
        .map(|line| {
            let depth = stack.iter().rev().position(|other| other == line);
            if let Some(depth) = depth {
                stack.remove(stack.len() - 1 - depth);
            }
            stack.push(*line);
            depth.map_or(COLD, |depth| depth as u32)
        })
        .collect();
    for simd in Simd::available() {
        let mut engine = StackDistances::with_limits(simd, small_limits(FinderKind::default()));
        let mut listed = Vec::new();
        for some in lines.chunks(777) {
            engine.push_and_list(some, &mut listed).unwrap();
        }
        assert!(lines.len() - listed.len() < 128);
        let histogram = engine.finish_and_list(&mut listed).unwrap();
        assert_eq!(listed, expected);
        assert_eq!(histogram.accesses(), lines.len() as u64);
    }
}
