//! Exact stack distances if hardly any page of 64 lines has two lines in use.

use super::stack::{exact_histogram, fingerprint, olken_histogram};
use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_locality::hash::mix_bits;
use cachemate_locality::simd::Simd;

pub const GROUP: BenchGroup = BenchGroup {
    name: "sparse",
    about: "exact stack distances with the lines scattered over 2^40 against the textbook engine, one core",
    run,
};

fn run(options: &Options) -> Vec<ResultRow> {
    let mut rows = Vec::new();
    for kind in &options.traces {
        let lines: &Vec<u64> = &kind
            .generate_lines(options.accesses)
            .iter()
            .map(|&line| mix_bits(line, 40))
            .collect();
        let olken = || olken_histogram(lines);
        let mut contenders = vec![Contender::with_digest("olken", olken, fingerprint)];
        for simd in Simd::available() {
            let bar = (simd == Simd::detect_best()).then_some(6.0);
            let work = move || exact_histogram(simd, lines);
            contenders.push(
                Contender::with_digest(simd.name(), work, fingerprint)
                    .compare_with(0, bar)
                    .with_max_bytes(80_000_000),
            );
        }
        rows.extend(compare(
            "sparse",
            kind.name(),
            lines.len(),
            options.rounds,
            BenchClock::Thread,
            true,
            contenders,
        ));
    }
    rows
}
