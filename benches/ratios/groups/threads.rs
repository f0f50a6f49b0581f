//! Exact stack distances on two threads against one, by the wall clock, which needs two free cores to be meaningful;
//! and in 2, 4 and 16 segments on one thread against one pass, by CPU time: the work efficiency that as many threads
//! would have.

use super::stack::{exact_histogram, fingerprint};
use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_locality::simd::Simd;
use cachemate_locality::stack::{
    DistanceHistogram, MeasuredRange, Segment, SegmentStream, StackError, StackLimits,
    measure_ranges,
};

pub const GROUP: BenchGroup = BenchGroup {
    name: "threads",
    about: "exact stack distances on two threads against one (wall clock; wants two idle cores)",
    run,
};

/// Measures a stream that is pushed.
fn count_pushed(threads: usize, lines: &[u64]) -> DistanceHistogram {
    let new_meter = || Segment::new(StackLimits::default());
    let mut stream = SegmentStream::new(threads, Some(lines.len() as u64), new_meter);
    stream
        .push(lines)
        .and_then(|()| stream.finish()?.finish())
        .expect("the traces have fewer lines than the limit")
        .histogram
}

/// Measures equal ranges of lines that any thread can read.
fn count_in_ranges(threads: usize, range_count: usize, lines: &[u64]) -> DistanceHistogram {
    let ranges: Vec<&[u64]> = lines
        .chunks(lines.len().div_ceil(range_count).max(1))
        .collect();
    let measure = |range: u64| -> Result<MeasuredRange<Segment>, StackError> {
        let mut meter = Segment::new(StackLimits::default());
        meter.push(ranges[range as usize])?;
        let is_whole = true;
        Ok(MeasuredRange { meter, is_whole })
    };
    measure_ranges(threads, ranges.len() as u64, measure)
        .and_then(|segment| segment.expect("a trace has accesses").finish())
        .expect("the traces have fewer lines than the limit")
        .histogram
}

fn run(options: &Options) -> Vec<ResultRow> {
    let mut rows = Vec::new();
    for kind in &options.traces {
        let lines = &kind.generate_lines(options.accesses);
        let one_pass = || exact_histogram(Simd::detect_best(), lines);
        let contenders = vec![
            Contender::with_digest("1 thread", one_pass, fingerprint),
            Contender::with_digest("2 threads", || count_in_ranges(2, 2, lines), fingerprint)
                .compare_with(0, Some(1.8)),
            Contender::with_digest("2 threads, pushed", || count_pushed(2, lines), fingerprint)
                .compare_with(0, None),
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
        let mut contenders = vec![Contender::with_digest("1 pass", one_pass, fingerprint)];
        for count in [2, 4, 16] {
            let work = move || count_in_ranges(1, count, lines);
            let bar = (count == 16).then_some(0.9);
            let contender = Contender::with_digest(format!("{count} segments"), work, fingerprint);
            contenders.push(contender.compare_with(0, bar));
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
