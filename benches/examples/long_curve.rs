//! The exact curve of a stream that is longer than any file: generated, cut and measured on several threads, with a cap
//! on the lines. Prints speed and peak memory.
//!
//! `cargo run --release -p cachemate-bench --example long_curve -- ACCESSES CAP_LINES THREADS`

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use cachemate_core::SplitMix64;
use cachemate_locality::stack::{Segment, SegmentStream, StackLimits};

/// Number of accesses that are generated together.
const BATCH: u64 = 1 << 16;

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
    let start = Instant::now();
    let new_meter = move || Segment::new(limits);
    let mut stream = SegmentStream::new(usize::try_from(threads)?, Some(accesses), new_meter);
    let mut random = SplitMix64::new(1);
    let mut lines = Vec::new();
    let mut count = 0;
    while count < accesses {
        let batch_len = BATCH.min(accesses - count);
        lines.clear();
        lines.extend((count..count + batch_len).map(|index| draw_line(index, &mut random)));
        stream.push(&lines)?;
        count += batch_len;
    }
    let distances = stream.finish()?.finish()?;

    let seconds = start.elapsed().as_secs_f64();
    let histogram = &distances.histogram;
    let ratios = histogram.miss_ratio_curve(&[1 << 10, 1 << 15, cap_lines]);
    println!(
        "{} accesses in {seconds:.1} s ({:.1} M/s), {} of them beyond the cap, peak {}; miss ratios {ratios:.4?}",
        histogram.accesses(),
        accesses as f64 / seconds / 1e6,
        distances.beyond_count,
        peak_memory()?.trim()
    );
    Ok(())
}

/// Half of the accesses go to 32 Ki lines, three eighths to 512 Ki lines, and the rest to lines that never return, as
/// those of a log do.
fn draw_line(index: u64, random: &mut SplitMix64) -> u64 {
    let bits = random.next_u64();
    match bits >> 61 {
        0..4 => bits % (1 << 15),
        4..7 => (1 << 20) + bits % (1 << 19),
        _ => (1 << 32) + index,
    }
}

/// The process's peak of resident memory, as the kernel prints it.
fn peak_memory() -> Result<String, Box<dyn Error>> {
    let status = cachemate_files::read_text_limited(Path::new("/proc/self/status"), 1 << 16)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    Ok(line.ok_or("no VmHWM in /proc/self/status")?.to_string())
}
