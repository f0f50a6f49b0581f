//! Cost of a miss of the last level on this host: the reference predictor's penalty, measured rather than assumed.
//!
//! Two chases of dependent loads: one over lines that the last level holds, one over lines that are in no cache. These
//! were flushed where the processor lets programs flush, which takes at most 16 MiB; elsewhere a buffer of twice the
//! last level evicts them. Their difference in time, over the time of a cycle, is the penalty. A cycle's time comes
//! from the kernel's clock rate if it reports one, otherwise from a chain of dependent multiplications, which take
//! three cycles each on the processors of the last fifteen years (Agner Fog's instruction tables; Arm's optimization
//! guides).
//!
//! Properties: other programs may run. Time is the thread's own, a disturbed round of hits is not the fastest of many,
//! and the cost of a miss includes the disturbance. A round is as short as possible without fitting into the caches
//! before the last one, because streams on the other CPUs replace a last level of 8 MiB in 2 ms, and evicted lines are
//! no hits.

use std::hint::black_box;

use cachemate_core::{CacheLevel, PredictorConfig, Topology, median};

use super::probes::{flush_line, thread_time_ns};

/// Lines of a chase if the topology has no size of the caches before the last; each is visited once per round.
const DEFAULT_CHASED_LINES: usize = 30_000;
/// Bounds of the number of lines: fewer are timed too coarsely, and more take too long.
const MIN_LINES: usize = 4_096;
const MAX_LINES: usize = 65_536;
const LINE_BYTES: usize = 64;
const ROUNDS: usize = 5;
/// Rounds of hits after each round of misses: a turn on the CPU lasts for several rounds, and other programs fill the
/// cache between turns.
const HIT_ROUNDS: usize = 4;
/// Whether [`flush_line`] works here.
const CAN_FLUSH: bool = cfg!(target_arch = "x86_64");
/// Distance of the lines of a chase in lines, if they are flushed: no prefetcher fetches one line along with another.
const FLUSHED_SPACING: usize = 4;
/// Maximum size that is chased; for larger caches the difference in latency is the same.
const MAX_CACHE_BYTES: u64 = 64 << 20;
const MULTIPLICATIONS: u32 = 2_000_000;
const MULTIPLY_CYCLES: f64 = 3.0;
/// Assumed size of the last level if the topology has none: a typical size in servers for a few cores.
const DEFAULT_CACHE_BYTES: u64 = 32 << 20;

/// Measures for some tens of milliseconds, in a separate thread with raised priority if allowed, because other programs
/// fill the cache between two turns on a CPU, and then no round would hit.
pub fn measure(topology: &Topology) -> PredictorConfig {
    std::thread::scope(|scope| {
        let measuring_thread = scope.spawn(|| {
            // Without the privilege, the thread has ordinary turns. Its priority ends with the thread.
            let _ = rustix::process::setpriority_process(None, -20);
            measure_on_thread(topology)
        });
        measuring_thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn measure_on_thread(topology: &Topology) -> PredictorConfig {
    let cache_bytes = topology
        .last_level_caches()
        .find_map(|cache| cache.size_bytes)
        .unwrap_or(DEFAULT_CACHE_BYTES);
    let cache_line_count =
        (cache_bytes.clamp(1 << 20, MAX_CACHE_BYTES) / LINE_BYTES as u64) as usize;
    let mut chase = PointerChase::new(cache_line_count, chased_line_count(topology));
    let (mut hits_ns, mut misses_ns): (Vec<f64>, Vec<f64>) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        chase.evict_lines();
        misses_ns.push(chase.load_ns());
        hits_ns.extend((0..HIT_ROUNDS).map(|_| chase.load_ns()));
    }
    let (hit_ns, miss_ns) = (minimum(hits_ns), median(&misses_ns).unwrap_or(0.0));
    let cycle_ns = cycle_ns(topology);
    let miss_penalty_cycles = ((miss_ns - hit_ns) / cycle_ns).max(1.0);
    PredictorConfig {
        miss_penalty_cycles,
        miss_penalty_source: format!(
            "measured: a miss {miss_ns:.0} ns, a hit {hit_ns:.0} ns, a cycle {cycle_ns:.2} ns"
        ),
    }
}

/// Number of lines of the chase: twice as many as the largest cache before the last one holds, so that under LRU none
/// of them is found there again.
fn chased_line_count(topology: &Topology) -> usize {
    let inner_caches = topology
        .caches
        .iter()
        .filter(|cache| !cache.last_level && cache.level != CacheLevel::L1Instruction);
    let largest_bytes = inner_caches.filter_map(|cache| cache.size_bytes).max();
    let doubled_lines = |bytes: u64| (2 * bytes.min(1 << 30)) as usize / LINE_BYTES;
    largest_bytes
        .map_or(DEFAULT_CHASED_LINES, doubled_lines)
        .clamp(MIN_LINES, MAX_LINES)
}

/// A cycle of links through some lines of a buffer, and a further buffer that evicts them if they cannot be flushed.
struct PointerChase {
    /// Each link is the index of the next one.
    words: Vec<usize>,
    evicting_words: Vec<usize>,
    first_word: usize,
    step_count: usize,
}

const WORDS_PER_LINE: usize = LINE_BYTES / std::mem::size_of::<usize>();

impl PointerChase {
    /// Spreads at most `steps` links evenly over a buffer no larger than a cache of `cache_line_count` lines.
    fn new(cache_line_count: usize, max_steps: usize) -> Self {
        let step_count = max_steps.min(cache_line_count);
        let spacing = if CAN_FLUSH {
            FLUSHED_SPACING.min(cache_line_count / step_count)
        } else {
            cache_line_count / step_count
        };
        let mut words = vec![0usize; step_count * spacing * WORDS_PER_LINE];
        let evicting_words = vec![
            0usize;
            if CAN_FLUSH {
                0
            } else {
                2 * cache_line_count * WORDS_PER_LINE
            }
        ];
        let mut order: Vec<usize> = (0..step_count).map(|at| at * spacing).collect();
        // Any order that no prefetcher follows will do: a multiplicative generator shuffles.
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        for index in (1..order.len()).rev() {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            order.swap(index, (state >> 33) as usize % (index + 1));
        }
        for position in 0..order.len() {
            words[order[position] * WORDS_PER_LINE] =
                order[(position + 1) % order.len()] * WORDS_PER_LINE;
        }
        PointerChase {
            words,
            evicting_words,
            first_word: order[0] * WORDS_PER_LINE,
            step_count,
        }
    }

    fn evict_lines(&mut self) {
        if CAN_FLUSH {
            self.words
                .iter()
                .step_by(self.words.len() / self.step_count)
                .for_each(flush_line);
        }
        self.evicting_words
            .iter_mut()
            .step_by(WORDS_PER_LINE)
            .for_each(|word| *word = word.wrapping_add(1));
        black_box(&mut self.evicting_words);
    }

    fn load_ns(&self) -> f64 {
        let start_ns = thread_clock_ns();
        let position =
            (0..self.step_count).fold(self.first_word, |position, _| self.words[position]);
        black_box(position);
        (thread_clock_ns() - start_ns) / self.step_count as f64
    }
}

/// Time of a cycle, from the kernel's clock rate or, without one, measured for some milliseconds.
pub fn cycle_ns(topology: &Topology) -> f64 {
    let cpu_hertz = topology.cpus.iter().find_map(|cpu| cpu.hertz);
    cpu_hertz.map_or_else(measure_cycle_ns, |hertz| 1e9 / hertz as f64)
}

fn measure_cycle_ns() -> f64 {
    let factor = black_box(0x9E37_79B9_7F4A_7C15_u64);
    let cycle_times_ns: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start_ns = thread_clock_ns();
            black_box((0..MULTIPLICATIONS).fold(factor, |product, _| product.wrapping_mul(factor)));
            (thread_clock_ns() - start_ns) / f64::from(MULTIPLICATIONS) / MULTIPLY_CYCLES
        })
        .collect();
    minimum(cycle_times_ns).max(0.01)
}

fn thread_clock_ns() -> f64 {
    thread_time_ns() as f64
}

fn minimum(values: Vec<f64>) -> f64 {
    values.into_iter().fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::last_level_caches;

    /// Is every link of the chase visited once per round, so that no line is warm from the same round, and does the
    /// largest chase take at most 16 MiB where lines can be flushed?
    #[test]
    fn a_round_visits_every_link_once() {
        let largest = PointerChase::new(MAX_CACHE_BYTES as usize / LINE_BYTES, MAX_LINES);
        assert!(
            !CAN_FLUSH
                || size_of_val(&largest.words[..]) + size_of_val(&largest.evicting_words[..])
                    <= 16 << 20
        );
        let chase = PointerChase::new(2 * DEFAULT_CHASED_LINES, DEFAULT_CHASED_LINES);
        let mut visited = std::collections::BTreeSet::new();
        let last = (0..chase.step_count).fold(chase.first_word, |at, _| {
            assert!(visited.insert(at), "{at} twice");
            chase.words[at]
        });
        assert_eq!(
            (last, visited.len()),
            (chase.first_word, DEFAULT_CHASED_LINES)
        );
    }

    /// Is a chase too long for the caches before the last one, and not longer than that?
    #[test]
    fn a_round_is_just_too_long_for_the_inner_caches() {
        let with_l2 = |size_bytes: Option<u64>| {
            let mut topology = last_level_caches(1, 1, CacheLevel::L3, 8 << 20);
            let inner = cachemate_core::Cache {
                level: CacheLevel::L2,
                last_level: false,
                size_bytes,
                ..topology.caches[0].clone()
            };
            topology.caches.push(inner);
            chased_line_count(&topology)
        };
        assert_eq!(with_l2(Some(512 << 10)), 2 * (512 << 10) / 64);
        assert_eq!(
            [Some(1 << 10), Some(1 << 40), None].map(with_l2),
            [MIN_LINES, MAX_LINES, DEFAULT_CHASED_LINES]
        );
    }

    /// Does a chase count only its own time, whatever else runs on its CPU?
    #[test]
    fn a_chase_counts_only_its_own_time() {
        let start_ns = thread_clock_ns();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(
            thread_clock_ns() - start_ns < 25e6,
            "sleeping takes no processor time"
        );
    }

    /// Is the penalty positive, and reported with the figures that it is computed from?
    #[test]
    fn the_penalty_is_reported_with_its_figures() {
        let measured = measure(&last_level_caches(1, 1, CacheLevel::L3, 1 << 20));
        assert!(
            measured.miss_penalty_cycles >= 1.0 && measured.miss_penalty_cycles.is_finite(),
            "{measured:?}"
        );
        assert!(
            measured
                .miss_penalty_source
                .starts_with("measured: a miss "),
            "{measured:?}"
        );
    }
}
