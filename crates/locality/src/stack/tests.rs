//! Compares the engine with an oracle that stores the LRU stack as a list.

use super::batch::BATCH_ACCESSES;
use super::counter::DeadSlotCounter;
use super::finder::FinderKind;
use super::slot_allocator::FinderLimits;
use super::{
    COLD, DistanceHistogram, MeasuredRange, Segment, SegmentParts, SegmentStream, StackDistances,
    StackError, StackLimits, measure_ranges,
};
use crate::simd::{Portable, Simd};
use cachemate_core::SplitMix64;
use proptest::prelude::*;

/// By Mattson's definition: a distance is the position of the line in a list, most recent first.
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

/// One engine, to which the lines are pushed in portions of varying length.
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

/// Measures the pieces of a stream between these cuts, and merges neighbors in the order that `picks` choose.
fn by_segments(
    lines: &[u64],
    cuts: &[usize],
    picks: &[usize],
    limits: FinderLimits,
) -> Result<Segment, StackError> {
    let mut bounds: Vec<usize> = cuts.iter().map(|cut| cut % (lines.len() + 1)).collect();
    bounds.extend([0, lines.len()]);
    bounds.sort_unstable();
    let mut segments = Vec::new();
    for pair in bounds.windows(2) {
        let mut segment = Segment::with_limits(Simd::detect_best(), limits);
        segment.push(&lines[pair[0]..pair[1]])?;
        segments.push(segment);
    }
    for pick in picks.iter().cycle() {
        if segments.len() < 2 {
            break;
        }
        let index = pick % (segments.len() - 1);
        let next = segments.remove(index + 1);
        segments[index].merge(next, 1 + pick % 3)?;
    }
    Ok(segments.remove(0))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Does every division of a stream into segments, merged in any order, give the oracle's distances, and the same
    /// segment?
    #[test]
    fn any_cuts_and_any_order_of_merges_give_the_same_bits(
        lines in any_trace(),
        cuts in prop::collection::vec(any::<usize>(), 0..12),
        picks in prop::collection::vec(any::<usize>(), 1..12),
    ) {
        let expected = mattson_histogram(lines.iter().copied());
        let whole = by_segments(&lines, &[], &[0], small_limits(FinderKind::default())).unwrap();
        let expected_parts = whole.into_parts().unwrap();
        for kind in FORMS {
            let merge_all = || by_segments(&lines, &cuts, &picks, small_limits(kind)).unwrap();
            prop_assert_eq!(&merge_all().into_parts().unwrap(), &expected_parts);
            prop_assert_eq!(&merge_all().finish().unwrap().histogram, &expected);
        }
    }

    /// With a cap, are all distances below it exact, the others one number, and the lists no longer than the cap,
    /// however the stream is cut?
    #[test]
    fn distances_below_the_cap_are_exact(
        lines in any_trace(),
        cap_lines in 1usize..300,
        cuts in prop::collection::vec(any::<usize>(), 0..6),
        picks in prop::collection::vec(any::<usize>(), 1..6),
    ) {
        let expected = mattson_histogram(lines.iter().copied());
        let limits = FinderLimits { cap_lines, ..small_limits(FORMS[cap_lines % FORMS.len()]) };
        let segment = by_segments(&lines, &cuts, &picks, limits).unwrap();
        let parts = segment.into_parts().unwrap();
        let near = |counts: &[(u64, u64)]| -> Vec<(u64, u64)> {
            counts.iter().copied().filter(|&(distance, _)| distance < cap_lines as u64).collect()
        };
        prop_assert_eq!(&parts.counts, &near(expected.counts()));
        let lines_below_cap = expected.cold_count().min(cap_lines as u64);
        prop_assert_eq!(parts.first_touches.len() as u64, lines_below_cap);
        prop_assert_eq!(parts.last_touches.len() as u64, lines_below_cap);
        prop_assert_eq!(parts.beyond_count, expected.misses_at(cap_lines as u64) - lines_below_cap);
        let whole = by_segments(&lines, &[], &[0], limits).unwrap();
        prop_assert_eq!(parts, whole.into_parts().unwrap());
    }

    /// Does a stored segment continue as the measured one does?
    #[test]
    fn a_stored_segment_continues_as_the_measured_one(lines in any_trace(), cut in any::<usize>(), cap in 0usize..200) {
        let stack_limits = StackLimits { cap_lines: (cap > 0).then_some(cap), max_lines: None };
        let limits = FinderLimits { cap_lines: stack_limits.cap_lines.unwrap_or(usize::MAX), ..FinderLimits::default() };
        let expected = by_segments(&lines, &[], &[0], limits).unwrap().into_parts().unwrap();
        let (first, second) = lines.split_at(cut % lines.len());
        let stored = |lines: &[u64]| {
            let parts = by_segments(lines, &[], &[0], limits).unwrap().into_parts().unwrap();
            Segment::from_parts(parts, stack_limits).unwrap()
        };
        let mut segment = stored(first);
        segment.merge(stored(second), 2).unwrap();
        prop_assert_eq!(segment.into_parts().unwrap(), expected);
    }
}

/// Measures the lines in this number of ranges.
fn by_ranges(lines: &[u64], threads: usize, range_count: usize) -> DistanceHistogram {
    let range_len = lines.len().div_ceil(range_count).max(1);
    let measure = |range: u64| -> Result<MeasuredRange<Segment>, StackError> {
        let mut meter = Segment::new(StackLimits::default());
        let start = (range as usize * range_len).min(lines.len());
        let end = (start + range_len).min(lines.len());
        meter.push(&lines[start..end])?;
        let is_whole = true;
        Ok(MeasuredRange { meter, is_whole })
    };
    let measured = measure_ranges(threads, range_count as u64, measure);
    measured.unwrap().unwrap().finish().unwrap().histogram
}

/// Do a stream and ranges on this number of threads give what one pass gives?
fn assert_threads_agree(lines: &[u64], threads: usize) {
    let mut single = StackDistances::new();
    single.push(lines).unwrap();
    let expected = single.finish().unwrap();
    let is_equal = |histogram: DistanceHistogram, name: &str| {
        let len = lines.len();
        assert!(
            histogram == expected,
            "{name}: {threads} threads, {len} accesses"
        );
    };
    for expected_accesses in [None, Some(1), Some(lines.len() as u64)] {
        let new_meter = || Segment::new(StackLimits::default());
        let mut stream = SegmentStream::new(threads, expected_accesses, new_meter);
        for lines in lines.chunks(77_777) {
            stream.push(lines).unwrap();
        }
        let distances = stream.finish().unwrap().finish().unwrap();
        is_equal(distances.histogram, "stream");
    }
    is_equal(by_ranges(lines, threads, 7), "ranges");
}

/// Does a range that is not whole end the result, whichever thread measures it, and is the error of the first range
/// with one reported?
#[test]
fn the_first_incomplete_range_ends_the_result() {
    let measure = |range: u64| -> Result<MeasuredRange<Segment>, StackError> {
        let mut meter = Segment::new(StackLimits::default());
        meter.push(&[range])?;
        let is_whole = range != 5 && range != 8;
        Ok(MeasuredRange { meter, is_whole })
    };
    let measured = measure_ranges(3, 12, measure).unwrap().unwrap();
    assert_eq!(measured.finish().unwrap().histogram.cold_count(), 6);

    let fail = |range: u64| match range {
        4 | 6 => Err(StackError { limit_lines: range }),
        _ => measure(range),
    };
    let error = measure_ranges(3, 12, fail).map(|_| ()).unwrap_err();
    assert_eq!(error.limit_lines, 4);
    assert!(measure_ranges(3, 0, measure).unwrap().is_none());
}

/// Do several threads agree with one on streams with a growing set of lines, with one line, with none repeated, with
/// all repeated, and without accesses?
#[test]
fn threads_agree_with_one_on_every_kind_of_stream() {
    let mut random = SplitMix64::new(9);
    let growing: Vec<u64> = (0..900_000)
        .map(|index| random.draw_below(1 + index % 50_000) * 3)
        .collect();
    let one_line = vec![7; 300_000];
    let none_repeated: Vec<u64> = (0..500_000).collect();
    let all_repeated: Vec<u64> = (0..400_000).map(|index| index % 200_000).collect();
    for threads in [1, 2, 3, 8] {
        for lines in [&growing, &one_line, &none_repeated, &all_repeated] {
            assert_threads_agree(lines, threads);
        }
        assert_threads_agree(&[], threads);
    }
}

/// Do the threads end if the stream is dropped before its end?
#[test]
fn dropping_early_ends_the_threads() {
    let new_meter = || Segment::new(StackLimits::default());
    let mut stream = SegmentStream::new(3, None, new_meter);
    stream.push(&vec![1; 600_000]).unwrap();
    drop(stream);
}

/// Is a stream with too many lines refused with the limit, in a segment and by a merge, on threads too?
#[test]
fn segments_with_too_many_lines_are_refused_with_the_limit() {
    let limits = FinderLimits {
        max_lines: 1000,
        ..small_limits(FinderKind::default())
    };
    let lines: Vec<u64> = (0..1600).collect();
    let in_one_segment = by_segments(&lines, &[], &[0], limits).unwrap_err();
    let by_a_merge = by_segments(&lines, &[800], &[0], limits).unwrap_err();
    assert_eq!(
        (in_one_segment.limit_lines, by_a_merge.limit_lines),
        (1000, 1000)
    );

    let limits = StackLimits {
        max_lines: Some(100_000),
        cap_lines: None,
    };
    let mut stream = SegmentStream::new(2, None, move || Segment::new(limits));
    let lines: Vec<u64> = (0..3_000_000).collect();
    let pushed = stream.push(&lines);
    let outcome = pushed.and_then(|()| stream.finish().map(|segment| segment.line_count()));
    assert_eq!(outcome.unwrap_err().limit_lines, 100_000);
}

/// Are stored segments refused that no stream has: repeated lines, different lines, too far distances, a surplus
/// without a cap?
#[test]
fn impossible_segments_are_refused() {
    let parts = SegmentParts {
        first_touches: vec![1, 2, 3],
        last_touches: vec![3, 1, 2],
        counts: vec![(0, 5), (2, 1)],
        beyond_count: 0,
    };
    let is_accepted = |change: fn(&mut SegmentParts)| {
        let mut parts = parts.clone();
        change(&mut parts);
        Segment::from_parts(parts, StackLimits::default()).is_some()
    };
    assert!(is_accepted(|_| ()));
    assert!(!is_accepted(|parts| parts.first_touches[0] = 2));
    assert!(!is_accepted(|parts| parts.last_touches[0] = 4));
    assert!(!is_accepted(|parts| parts.counts.push((3, 1))));
    assert!(!is_accepted(|parts| parts.beyond_count = 1));
}

/// Does a segment with a cap hold no more than about twice the cap, however long the stream, and does it tell distances
/// apart up to the cap?
#[test]
fn a_cap_bounds_the_lines_that_are_held() {
    let cap_lines = 10_000;
    let limits = StackLimits {
        cap_lines: Some(cap_lines),
        max_lines: None,
    };
    let mut segment = Segment::new(limits);
    let mut next_line = 0;
    for _ in 0..50 {
        // New lines, and then the newest 6 000 of them again.
        let new_lines: Vec<u64> = (next_line..next_line + 30_000).collect();
        next_line += 30_000;
        segment.push(&new_lines).unwrap();
        segment.push(&new_lines[24_000..]).unwrap();
        assert!(segment.line_count() <= 2 * cap_lines + BATCH_ACCESSES);
    }
    let distances = segment.finish().unwrap();
    assert_eq!(distances.histogram.counts(), [(5_999, 50 * 6_000)]);
    assert_eq!(distances.histogram.cold_count(), 50 * 30_000);
    assert_eq!(distances.beyond_count, 50 * 30_000 - 10_000);
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

/// Does a counter with slots that died together count like one that saw each die, at every level of the tree?
#[test]
fn slots_that_died_together_count_like_slots_that_died_in_turn() {
    let mut random = SplitMix64::new(8);
    let mut slots: Vec<u32> = (0..60_000)
        .map(|_| 1 + random.draw_below(40 << 20) as u32)
        .collect();
    slots.sort_unstable();
    slots.dedup();
    (1..slots.len()).for_each(|at| slots.swap(at, random.draw_below(at as u64 + 1) as usize));
    let (early, late) = slots.split_at(slots.len() / 2);

    // SAFETY: the portable lanes run everywhere.
    let kill =
        |counter: &mut DeadSlotCounter, slot: u32| unsafe { counter.kill_one::<Portable>(slot) };
    let mut in_turn = DeadSlotCounter::new(40 << 20 | 1);
    let together = DeadSlotCounter::new(40 << 20 | 1);
    let mut with_gaps = early.to_vec();
    with_gaps.insert(7, 0);
    let mut together = together.with_dead(&with_gaps);
    early.iter().for_each(|&slot| _ = kill(&mut in_turn, slot));
    for &slot in late {
        assert_eq!(kill(&mut together, slot), kill(&mut in_turn, slot));
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
