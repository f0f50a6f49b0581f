//! Small programs that load a host in known ways: chase, stream, quiet and count. Each reports its work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, bail};
use cachemate_linux::sense::progress::PROGRESS_VARIABLE;

/// Accesses between two progress reports.
const ACCESSES_PER_REPORT: usize = 1 << 14;

/// Names of all loads.
pub const LOAD_KINDS: [&str; 4] = ["chase", "stream", "quiet", "count"];

/// Runs one load over this many bytes until it is stopped. For `count`, `bytes` is the number of additions in each of
/// its two threads, after which it ends by itself.
///
/// # Errors
/// The progress file cannot be written, or an addition was lost.
pub fn run(kind: &str, bytes: u64, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    let progress = ProgressCounter::open(stop)?;
    let lines = (bytes / 64).max(2) as usize;
    match kind {
        "chase" => run_chase(lines, &progress),
        "stream" => run_stream(lines, &progress),
        "count" => return run_counters(bytes, &progress.stop),
        _ => run_quiet(&progress),
    }
    Ok(())
}

/// The progress file that the environment names, if any; its first eight bytes are the work done.
struct ProgressCounter {
    file: Option<std::fs::File>,
    count: AtomicU64,
    stop: Arc<AtomicBool>,
}

impl ProgressCounter {
    fn open(stop: Arc<AtomicBool>) -> anyhow::Result<Self> {
        let file = match std::env::var_os(PROGRESS_VARIABLE) {
            Some(path) => Some(
                std::fs::OpenOptions::new()
                    .write(true)
                    .open(&path)
                    .with_context(|| format!("{}: cannot be written", path.to_string_lossy()))?,
            ),
            None => None,
        };
        Ok(ProgressCounter {
            file,
            count: AtomicU64::new(0),
            stop,
        })
    }

    /// Reports progress; returns false if the load must stop.
    fn report_work(&self, work: u64) -> bool {
        use std::os::unix::fs::FileExt;
        let total_work = self.count.fetch_add(work, Ordering::Relaxed) + work;
        if let Some(file) = &self.file {
            // One small write every few hundred microseconds is cheap; a failed report does not end the load.
            let _ = file.write_at(&total_work.to_ne_bytes(), 0);
        }
        !self.stop.load(Ordering::Relaxed)
    }
}

/// Follows one random cycle through all lines (Sattolo's algorithm).
fn run_chase(lines: usize, progress: &ProgressCounter) {
    let mut memory = vec![0u64; lines * 8];
    let mut cycle: Vec<u32> = (0..lines as u32).collect();
    let mut state = 1u64;
    for index in (1..lines).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        cycle.swap(index, ((state >> 33) % index as u64) as usize);
    }
    cycle
        .iter()
        .enumerate()
        .for_each(|(index, &next)| memory[index * 8] = u64::from(next) * 8);
    drop(cycle);
    let mut position = 0usize;
    while progress.report_work(ACCESSES_PER_REPORT as u64) {
        for _ in 0..ACCESSES_PER_REPORT {
            position = std::hint::black_box(memory[position]) as usize;
        }
    }
}

fn run_stream(lines: usize, progress: &ProgressCounter) {
    let memory = vec![1u64; lines * 8];
    let mut sum = 0u64;
    for chunk in memory.chunks(ACCESSES_PER_REPORT * 8).cycle() {
        sum = chunk
            .iter()
            .step_by(8)
            .fold(sum, |sum, word| sum.wrapping_add(*word));
        std::hint::black_box(sum);
        if !progress.report_work((chunk.len() / 8) as u64) {
            break;
        }
    }
}

/// Increments counters on 2 000 pages in two threads, `target_count` times each, or until stopped. Returns an error if
/// an addition was lost. Only this load ends by itself.
fn run_counters(target_count: u64, stop: &AtomicBool) -> anyhow::Result<()> {
    const PAGES: usize = 2_000;
    const CHECK_INTERVAL: u64 = 1 << 16;
    let counters: Vec<[AtomicU64; 2]> = (0..PAGES * 256).map(|_| Default::default()).collect();
    let additions = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let (counters, additions) = (&counters, &additions);
            scope.spawn(move || {
                let (mut state, mut done_count) = (worker as u64 + 1, 0);
                while done_count < target_count && !stop.load(Ordering::Relaxed) {
                    let batch_end = target_count.min(done_count + CHECK_INTERVAL);
                    for _ in done_count..batch_end {
                        state = state
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        let counter = &counters[(state >> 33) as usize % counters.len()][worker];
                        // A plain load and store suffice, because each counter has one writer; a page that moves must
                        // not lose the store.
                        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    }
                    done_count = batch_end;
                }
                additions.fetch_add(done_count, Ordering::Relaxed);
            });
        }
    });
    let sum: u64 = counters
        .iter()
        .flatten()
        .map(|counter| counter.load(Ordering::Relaxed))
        .sum();
    let additions = additions.into_inner();
    if sum == additions {
        Ok(())
    } else {
        bail!("{sum} of {additions} additions are left")
    }
}

/// Computes in registers, without using caches or memory.
fn run_quiet(progress: &ProgressCounter) {
    let mut word = 1u64;
    while progress.report_work(ACCESSES_PER_REPORT as u64) {
        for _ in 0..ACCESSES_PER_REPORT * 16 {
            word =
                std::hint::black_box(word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
}
