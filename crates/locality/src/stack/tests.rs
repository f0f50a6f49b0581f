//! The engine against an oracle that keeps the LRU stack as a list.

use super::find_side::Sizes;
use super::finder::{BATCH, Form};
use super::{Histogram, StackDistances};
use crate::hash::SplitMix64;
use crate::simd::Simd;
use proptest::prelude::*;

/// Mattson's stack, literally: the position of the line in a list, most recent first.
fn oracle(lines: impl IntoIterator<Item = u64>) -> Histogram {
    let (mut stack, mut cold, mut counts) = (Vec::new(), 0, Vec::new());
    for line in lines {
        match stack.iter().rposition(|&other| other == line) {
            Some(at) => {
                counts.push(((stack.len() - 1 - at) as u64, 1));
                stack.remove(at);
            }
            None => cold += 1,
        }
        stack.push(line);
    }
    Histogram::new(cold, counts)
}

fn small(form: Form) -> Sizes {
    Sizes { form, min_slots: 2 * BATCH, ..Sizes::default() }
}

const FORMS: [Form; 4] =
    [Form::Dense, Form::Sparse, Form::Fitting { dense_free_bytes: 0 }, Form::Fitting { dense_free_bytes: 1 << 20 }];

/// The histogram by one engine, pushed in portions of changing length.
fn by_engine(simd: Simd, sizes: Sizes, lines: &[u64]) -> Histogram {
    let mut engine = StackDistances::with_sizes(simd, sizes);
    let (mut rest, mut portion) = (lines, 1);
    while !rest.is_empty() {
        let (now, later) = rest.split_at(portion.min(rest.len()));
        engine.push(now).unwrap();
        (rest, portion) = (later, portion * 3 % 1000 + 1);
    }
    engine.finish().unwrap()
}

/// Traces with locality of several kinds; addresses dense, sparse, strided or using all 64 bits.
fn any_trace() -> impl Strategy<Value = Vec<u64>> {
    (any::<u64>(), 1usize..3000, 1u64..600, 0u32..6).prop_map(|(seed, len, footprint, kind)| {
        let mut random = SplitMix64(seed);
        (0..len as u64)
            .map(|at| {
                let line = match random.below(4) {
                    0 => at % footprint,
                    1 => random.below(footprint / 8 + 1),
                    _ => random.below(footprint),
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

    /// Does every instruction set and every form of the finder, compacting often, give the oracle's distances?
    #[test]
    fn engine_equals_oracle(lines in any_trace()) {
        let expected = oracle(lines.iter().copied());
        for simd in Simd::available() {
            for form in FORMS {
                prop_assert_eq!(&by_engine(simd, small(form), &lines), &expected, "{} {:?}", simd.name(), form);
            }
        }
    }
}

/// Do footprints of many blocks of counters, where every level of the tree is at work, give the oracle's distances?
#[test]
fn deep_tree_equals_cyclic_theory() {
    // Cyclic over n lines: every access but the first n has distance n - 1. Then backwards: distances 0, 2, 4, ...
    let n = 300_000u64;
    let cycle: Vec<u64> = (0..3 * n).map(|at| at % n).collect();
    let back: Vec<u64> = (0..n).rev().collect();
    let mut expected: Vec<(u64, u64)> = (0..n).map(|at| (at, 1)).collect();
    expected.push((n - 1, 2 * n));
    for simd in Simd::available() {
        let mut engine = StackDistances::with_simd(simd);
        engine.push(&cycle).unwrap();
        engine.push(&back).unwrap();
        assert_eq!(engine.finish().unwrap(), Histogram::new(n, expected.clone()));
    }
}
