//! The exact curve of a stream that is longer than any file: each thread generates the ranges that it measures, with a
//! cap on the lines. One thread measures the whole stream in one pass. Prints speed, CPU time, peak memory, and a
//! digest of all distances, which must not depend on the number of threads.
//!
//! `cargo run --release -p cachemate-bench --example long_curve -- ACCESSES CAP_LINES THREADS`

use std::error::Error;
use std::time::Instant;

use cachemate_bench::resident;
use cachemate_core::SplitMix64;
use cachemate_locality::stack::{
    MeasuredRange, Segment, SegmentDistances, StackError, StackLimits, measure_ranges,
};
use rustix::time::{ClockId, clock_gettime};
use xxhash_rust::xxh3::Xxh3;

/// Number of accesses that are generated together.
const BATCH: u64 = 1 << 16;
/// Number of accesses of a range if there are several threads, about fifty for each line that it holds.
const RANGE: u64 = 1 << 27;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next_number = |default: u64| -> Result<u64, std::num::ParseIntError> {
        arguments.next().map_or(Ok(default), |text| text.parse())
    };
    let accesses = next_number(1_000_000_000)?;
    let cap_lines = next_number(1 << 20)?;
    let threads = next_number(2)?;

    let limits = StackLimits {
        cap_lines: Some(usize::try_from(cap_lines)?),
        max_lines: None,
    };
    let range_len = if threads > 1 { RANGE } else { accesses.max(1) };
    let start = Instant::now();
    let measure = |range: u64| -> Result<MeasuredRange<Segment>, StackError> {
        let mut meter = Segment::new(limits);
        let end = ((range + 1) * range_len).min(accesses);
        let mut lines = Vec::new();
        for batch_start in (range * range_len..end).step_by(BATCH as usize) {
            lines.clear();
            lines.extend((batch_start..end.min(batch_start + BATCH)).map(line_of));
            meter.push(&lines)?;
        }
        let is_whole = true;
        Ok(MeasuredRange { meter, is_whole })
    };
    let measured = measure_ranges(
        usize::try_from(threads)?,
        accesses.div_ceil(range_len),
        measure,
    )?;
    let distances = measured.ok_or("no accesses")?.finish()?;

    let seconds = start.elapsed().as_secs_f64();
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let histogram = &distances.histogram;
    let ratios = histogram.miss_ratio_curve(&[1 << 10, 1 << 15, cap_lines]);
    println!(
        "{} accesses on {threads} threads in {seconds:.1} s ({:.1} M/s; {} s of CPU time), {} of them beyond the cap, \
         peak {} MB; miss ratios {ratios:.4?}; digest {:016x}",
        histogram.accesses(),
        accesses as f64 / seconds / 1e6,
        cpu.tv_sec,
        distances.beyond_count,
        resident::peak_bytes().ok_or("the kernel counts no VmHWM")? / 1_000_000,
        digest(&distances)
    );
    Ok(())
}

/// The line of an access. Half of the accesses go to 32 Ki lines, three eighths to 512 Ki lines, and the rest to lines
/// that never return, as those of a log do.
fn line_of(index: u64) -> u64 {
    let bits = SplitMix64::new(index).next_u64();
    match bits >> 61 {
        0..4 => bits % (1 << 15),
        4..7 => (1 << 20) + bits % (1 << 19),
        _ => (1 << 32) + index,
    }
}

/// A number that represents all distances.
fn digest(distances: &SegmentDistances) -> u64 {
    let histogram = &distances.histogram;
    let mut hasher = Xxh3::new();
    let first_touches = (histogram.cold_count(), distances.beyond_count);
    for &(distance, count) in [&first_touches].into_iter().chain(histogram.counts()) {
        hasher.update(&distance.to_le_bytes());
        hasher.update(&count.to_le_bytes());
    }
    hasher.digest()
}
