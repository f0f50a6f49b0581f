//! Intensity from outside: the part of the shared cache that a neighbor evicts while we wait.
//!
//! Problem: without a PMU no counter shows how much of a shared cache a program evicts. A pointer chase defends its own
//! lines and a stream measures mostly itself. Method (prime, wait, reload): two sequential passes load a buffer that
//! fills a good part of the cache. After a wait, which leaves the cache to the neighbor, single loads of random lines
//! of the buffer are timed, and those served by memory are counted. The same is done with the neighbor kept away, in
//! the order away-away / discard-beside-beside / away, so that slow drifts cancel (`crate::sense::probe_runner`); the
//! raw samples are interpreted by a profiler. Properties: a program that hits the shared cache without missing evicts
//! nothing and is invisible, which is right, because it does no harm. Cost to the neighbor: the lines that priming
//! takes from it.

use std::io;
use std::time::{Duration, Instant};

use cachemate_core::{PrimeProbeSample, SplitMix64};

use super::{cycles_now, flush_line};

/// A calibrated prober with its buffer, which must run on one CPU (see [`super::PinnedThread`]).
pub struct PrimeProber {
    buffer: Vec<u64>,
    /// Line numbers in the order in which they are reloaded.
    order: Vec<u32>,
    next_index: usize,
    /// Loads that take longer came from memory.
    min_miss_cycles: u64,
}

const LINE_BYTES: usize = 64;
const WORDS_PER_LINE: usize = LINE_BYTES / 8;
/// Lines reloaded per sample.
const RELOADS: usize = 4096;
/// Calibration uses this many bytes of the buffer: more than private caches hold, and a small part of any shared one.
const CALIBRATED_BYTES: usize = 8 << 20;

/// Time limit for fitting; half a second is usual for the largest caches.
const MAX_FITTING_TIME: Duration = Duration::from_secs(8);

/// Smallest buffer; smaller ones might fit into private caches.
const MIN_BUFFER_BYTES: usize = 4 << 20;
/// Largest share of the lines just loaded that may already have been evicted.
const MAX_EVICTED_SHARE: f64 = 0.25;

/// Size of the buffer: half of the cache, within limits on time and memory.
pub fn initial_buffer_bytes(cache_bytes: Option<u64>) -> usize {
    (cache_bytes.unwrap_or(32 << 20) / 2).clamp(MIN_BUFFER_BYTES as u64, 128 << 20) as usize
}

/// The neighbor's time alone with the cache: 10 ms for 32 MiB, in which a stream of a few gigabytes per second passes
/// through the whole cache.
pub fn wait_time(cache_bytes: Option<u64>) -> Duration {
    let cache_bytes = cache_bytes.unwrap_or(32 << 20) as f64;
    Duration::from_secs_f64((0.010 * cache_bytes / f64::from(32 << 20)).clamp(0.010, 0.100))
}

/// The samples of a bracket: whether the task runs, and whether the sample counts. Two off, one discarded while the
/// task refills the cache, two on, one off.
pub const BRACKET: [(bool, bool); 6] = [
    (false, true),
    (false, true),
    (true, false),
    (true, true),
    (true, true),
    (false, true),
];

impl PrimeProber {
    /// Allocates `buffer_bytes` (a quarter to a half of the cache serves well) and calibrates the threshold of a
    /// miss.
    ///
    /// # Errors
    /// The buffer is under a megabyte, or hits and misses cannot be distinguished on this host.
    pub fn new(buffer_bytes: usize, seed: u64) -> io::Result<Self> {
        if buffer_bytes < 1 << 20 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("buffer of {buffer_bytes} bytes, expected 1 MiB or more"),
            ));
        }
        let lines = buffer_bytes / LINE_BYTES;
        let mut buffer = vec![0u64; lines * WORDS_PER_LINE];
        advise_huge(&mut buffer);
        buffer.iter_mut().step_by(512).for_each(|word| *word = 1); // writes every page, so that each has its own frame
        let mut order: Vec<u32> = (0..lines as u32).collect();
        SplitMix64::new(seed).shuffle(&mut order);
        let mut prober = PrimeProber {
            buffer,
            order,
            next_index: 0,
            min_miss_cycles: u64::MAX,
        };
        prober.min_miss_cycles = prober.calibrate()?;
        Ok(prober)
    }

    /// A prober whose buffer fits the actual cache: half of `cache_bytes`, halved again as long as much of the buffer
    /// is evicted right after it was loaded. Virtual machines report their host's whole cache, although they have only
    /// a share of it.
    ///
    /// # Errors
    /// As [`PrimeProber::new`]; or it takes too long to be useful, as under emulation.
    pub fn fit_to_cache(cache_bytes: Option<u64>, seed: u64) -> io::Result<Self> {
        let (start, mut bytes) = (Instant::now(), initial_buffer_bytes(cache_bytes));
        loop {
            let mut prober = PrimeProber::new(bytes, seed)?;
            if start.elapsed() > MAX_FITTING_TIME {
                let (seconds, mib) = (start.elapsed().as_secs_f64(), bytes >> 20);
                let message = format!(
                    "calibrating took {seconds:.1} s and was at {mib} MiB: too slow a machine to probe on"
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            if bytes / 2 < MIN_BUFFER_BYTES || prober.is_buffer_retained() {
                return Ok(prober);
            }
            bytes /= 2;
        }
    }

    fn is_buffer_retained(&mut self) -> bool {
        let mut missed_reloads: [u32; 5] =
            std::array::from_fn(|_| self.sample(Duration::ZERO, false).evicted);
        missed_reloads.sort_unstable();
        f64::from(missed_reloads[2]) <= MAX_EVICTED_SHARE * RELOADS as f64
    }

    /// Size of the cache that this buffer fits.
    pub fn cache_bytes(&self) -> u64 {
        2 * self.buffer_bytes()
    }

    /// Loads the whole buffer in two sequential passes.
    fn prime(&self) {
        for _ in 0..2 {
            for index in (0..self.buffer.len()).step_by(WORDS_PER_LINE) {
                std::hint::black_box(self.buffer[index]);
            }
        }
    }

    fn count_missed_reloads(&mut self) -> usize {
        let mut missed = 0;
        for _ in 0..RELOADS {
            let line = self.order[self.next_index] as usize;
            self.next_index = (self.next_index + 1) % self.order.len();
            missed += usize::from(self.measure_load_cycles(line) >= self.min_miss_cycles);
        }
        missed
    }

    fn measure_load_cycles(&self, line: usize) -> u64 {
        let start = cycles_now();
        std::hint::black_box(self.buffer[line * WORDS_PER_LINE]);
        cycles_now() - start
    }

    /// Primes, waits and reloads once, with the probed task running or kept away. The wait is spent on the processor:
    /// on a full machine, another program would otherwise run here and cause the misses.
    pub fn sample(&mut self, wait: Duration, target_running: bool) -> PrimeProbeSample {
        let start = Instant::now();
        self.prime();
        let wait_start = Instant::now();
        while wait_start.elapsed() < wait {
            std::hint::spin_loop();
        }
        let evicted = self.count_missed_reloads() as u32;
        PrimeProbeSample {
            target_running,
            evicted,
            reloads: RELOADS as u32,
            elapsed_ns: start.elapsed().as_nanos() as u64,
            round_trips_ns: None,
        }
    }

    /// Size of this prober's buffer.
    pub fn buffer_bytes(&self) -> u64 {
        size_of_val(self.buffer.as_slice()) as u64
    }

    /// Cycles that separate a load served by the shared cache from one served by memory: the middle, on a logarithmic
    /// scale, between the typical load of a part just primed and the typical load after a flush.
    fn calibrate(&self) -> io::Result<u64> {
        let calibrated_lines =
            (self.buffer.len() / WORDS_PER_LINE).min(CALIBRATED_BYTES / LINE_BYTES);
        let lines: Vec<usize> = self
            .order
            .iter()
            .map(|&line| line as usize)
            .filter(|&line| line < calibrated_lines)
            .take(RELOADS)
            .collect();
        for line in (0..calibrated_lines).chain(0..calibrated_lines) {
            self.measure_load_cycles(line);
        }
        let hits: Vec<u64> = lines
            .iter()
            .map(|&line| self.measure_load_cycles(line))
            .collect();
        let mut misses: Vec<u64> = Vec::with_capacity(lines.len());
        for &line in &lines {
            flush_line(&self.buffer[line * WORDS_PER_LINE]);
            misses.push(self.measure_load_cycles(line));
        }
        let median = |mut cycles: Vec<u64>| {
            cycles.sort_unstable();
            cycles.get(cycles.len() / 2).copied().unwrap_or(1).max(1)
        };
        let (hit_cycles, miss_cycles) = (median(hits), median(misses));
        if miss_cycles < hit_cycles + hit_cycles / 4 {
            let message = format!(
                "a hit seems to take {hit_cycles} cycles and a miss {miss_cycles}, which is implausible: other programs, or \
                 a hypervisor, disturbed the measurement, or this CPU hides misses"
            );
            return Err(io::Error::other(message));
        }
        Ok((hit_cycles as f64 * miss_cycles as f64).sqrt() as u64)
    }

    /// Threshold of a miss, for `doctor` to show.
    pub fn min_miss_cycles(&self) -> u64 {
        self.min_miss_cycles
    }
}

/// Requests large pages, which keep TLB misses out of the timing; a refusal costs only precision.
fn advise_huge(buffer: &mut [u64]) {
    const PAGE: usize = 4096;
    let start = buffer.as_mut_ptr() as usize;
    let first_page = start.next_multiple_of(PAGE);
    let length = (start + size_of_val(buffer)).saturating_sub(first_page) / PAGE * PAGE;
    // SAFETY: whole pages within a buffer that we own; the advice does not change its content.
    unsafe { libc::madvise(first_page as *mut libc::c_void, length, libc::MADV_HUGEPAGE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are there no more misses than reloads, and is a small buffer refused?
    #[test]
    fn a_sample_has_no_more_misses_than_reloads() {
        assert!(PrimeProber::new(1000, 1).is_err());
        // Whatever size the kernel reports, the buffer that fits is no larger than half of it.
        if let Ok(prober) = PrimeProber::fit_to_cache(Some(16 << 20), 1) {
            assert!((4 << 20..=8 << 20).contains(&prober.buffer_bytes()));
            assert_eq!(prober.cache_bytes(), 2 * prober.buffer_bytes());
        }
        match PrimeProber::new(2 << 20, 1) {
            Ok(mut prober) => {
                let sample = prober.sample(Duration::from_millis(1), true);
                assert!(
                    sample.evicted <= sample.reloads && sample.elapsed_ns >= 1_000_000,
                    "{sample:?}"
                );
            }
            // A host whose clock cannot tell hits from misses must say so instead of inventing a threshold.
            Err(error) => assert!(
                error.to_string().contains("which is implausible"),
                "{error}"
            ),
        }
    }
}
