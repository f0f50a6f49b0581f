//! Exact stack distances on two threads against one, by the wall clock, which needs two free cores to be meaningful; and
//! in 2, 4 and 16 segments against one pass, by CPU time: the work efficiency that as many threads would have.

use super::stack::{exact_histogram, fingerprint};
use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_locality::simd::Simd;
use cachemate_locality::stack::{
    DistanceHistogram, ParallelSegments, Segment, SegmentBuilder, StackLimits,
};

pub const GROUP: BenchGroup = BenchGroup {
    name: "threads",
    about: "exact stack distances on two threads against one (wall clock; wants two idle cores)",
    run,
};

fn count_on_threads(threads: usize, lines: &[u64]) -> DistanceHistogram {
    let new_meter = || SegmentBuilder::new(StackLimits::default());
    let mut engine = ParallelSegments::new(threads, Some(lines.len() as u64), new_meter);
    engine
        .push(lines)
        .and_then(|()| engine.finish())
        .map(|segment| segment.into_histogram())
        .expect("the traces have fewer lines than the limit")
}

/// Measures equal segments one after the other, and merges neighbors in rounds.
fn count_in_segments(count: usize, lines: &[u64]) -> DistanceHistogram {
    let measure = |part: &[u64]| {
        let mut builder = SegmentBuilder::new(StackLimits::default());
        let pushed = builder.push(part);
        pushed.and_then(|()| builder.finish())
    };
    let mut segments: Vec<Segment> = lines
        .chunks(lines.len().div_ceil(count))
        .map(|part| measure(part).expect("the traces have fewer lines than the limit"))
        .collect();
    while segments.len() > 1 {
        let mut merged = Vec::new();
        let mut remaining = segments.into_iter();
        while let Some(first) = remaining.next() {
            merged.push(match remaining.next() {
                Some(next) => first.merge(next, 1).expect("as few lines as before"),
                None => first,
            });
        }
        segments = merged;
    }
    segments.remove(0).into_histogram()
}

fn run(options: &Options) -> Vec<ResultRow> {
    let mut rows = Vec::new();
    for kind in &options.traces {
        let lines = &kind.generate_lines(options.accesses);
        let contenders = vec![
            Contender::new("1 thread", || {
                fingerprint(&exact_histogram(Simd::detect_best(), lines))
            }),
            Contender::new("2 threads", || fingerprint(&count_on_threads(2, lines)))
                .compare_with(0, Some(1.5))
                .with_max_bytes(80_000_000),
        ];
        rows.extend(compare(
            "threads",
            kind.name(),
            lines.len(),
            options.rounds,
            BenchClock::Wall,
            true,
            contenders,
        ));
        let mut contenders = vec![Contender::new("1 pass", || {
            fingerprint(&exact_histogram(Simd::detect_best(), lines))
        })];
        for count in [2, 4, 16] {
            let work = move || fingerprint(&count_in_segments(count, lines));
            let bar = (count == 16).then_some(0.9);
            contenders.push(Contender::new(format!("{count} segments"), work).compare_with(0, bar));
        }
        rows.extend(compare(
            "segments",
            kind.name(),
            lines.len(),
            options.rounds,
            BenchClock::Process,
            true,
            contenders,
        ));
    }
    rows
}
