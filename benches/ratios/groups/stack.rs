//! Compares exact stack distances with every instruction set to the baseline.

use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use crate::olken::Olken;
use cachemate_locality::simd::Simd;
use cachemate_locality::stack::{DistanceHistogram, StackDistances};

pub const GROUP: BenchGroup = BenchGroup {
    name: "stack",
    about: "exact stack distances against the textbook engine (hash map and Fenwick tree), one core",
    run,
};

/// The target of an instruction set relative to the baseline.
fn target_speedup(simd: Simd) -> Option<f64> {
    match simd.name() {
        "avx512" => Some(10.0),
        "avx2" => Some(8.0),
        _ => None,
    }
}

/// A number that represents a histogram: equal numbers mean equal histograms, except with a probability of 2^-64.
pub fn fingerprint(histogram: DistanceHistogram) -> u64 {
    let mut hashed_words = vec![histogram.cold_count()];
    hashed_words.extend(
        histogram
            .counts()
            .iter()
            .flat_map(|&(distance, count)| [distance, count]),
    );
    crate::traces::checksum(&hashed_words)
}

pub fn olken_histogram(lines: &[u64]) -> DistanceHistogram {
    let mut engine = Olken::new();
    engine.push(lines);
    engine.finish()
}

pub fn exact_histogram(simd: Simd, lines: &[u64]) -> DistanceHistogram {
    let mut engine = StackDistances::with_simd(simd);
    engine
        .push(lines)
        .and_then(|()| engine.finish())
        .expect("the traces have fewer lines than the limit")
}

fn run(options: &Options) -> Vec<ResultRow> {
    let mut rows = Vec::new();
    for kind in &options.traces {
        let lines = kind.generate_lines(options.accesses);
        let olken = || olken_histogram(&lines);
        let mut contenders = vec![Contender::with_digest("olken", olken, fingerprint)];
        for simd in Simd::available() {
            let lines = &lines;
            let work = move || exact_histogram(simd, lines);
            contenders.push(
                Contender::with_digest(simd.name(), work, fingerprint)
                    .compare_with(0, target_speedup(simd))
                    .with_max_bytes(80_000_000),
            );
        }
        rows.extend(compare(
            "stack",
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
