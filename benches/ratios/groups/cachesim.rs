//! Compares the simulator of a 2 MiB 16-way LRU cache, with every instruction set, to a plain move-to-front loop; and
//! the same cache on two threads with one thread, by the wall clock, which needs two free cores to be meaningful.

use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use crate::traces::FULL_LEN;
use cachemate_locality::cachesim::{CacheGeometry, CacheSim, CacheSimGroup, Replacement};
use cachemate_locality::simd::Simd;

pub const GROUP: BenchGroup = BenchGroup {
    name: "cachesim",
    about: "2 MiB 16-way LRU against a plain move-to-front loop over the ways; two threads against one",
    run,
};

const WAYS: usize = 16;
const SETS: usize = (2 << 20) / 64 / WAYS;

/// Counts misses with a plain move-to-front loop over the ways.
pub fn move_to_front(lines: &[u64]) -> u64 {
    let mut sets = vec![[u64::MAX; WAYS]; SETS];
    let mut misses = 0;
    for &line in lines {
        let set = &mut sets[line as usize % SETS];
        let mut carried = line;
        let mut hit = false;
        for way in set.iter_mut() {
            std::mem::swap(way, &mut carried);
            if carried == line {
                hit = true;
                break;
            }
        }
        misses += u64::from(!hit);
    }
    misses
}

const SHAPE: CacheGeometry = CacheGeometry {
    sets: SETS as u32,
    ways: WAYS as u32,
    slices: 1,
};
/// Number of lines in a portion, as `cachemate mrc --ways` reads it.
const PORTION_LINES: usize = 1 << 20;

fn simulate(simd: Simd, lines: &[u64]) -> u64 {
    let mut cache = CacheSim::with_simd(SHAPE, Replacement::Lru, simd).expect("the shape is valid");
    cache.push(lines)
}

/// Simulates a cache of each of these numbers of sets.
fn simulate_on(threads: usize, set_counts: &[usize], lines: &[u64]) -> u64 {
    let to_shape = |&sets: &usize| CacheGeometry {
        sets: sets as u32,
        ..SHAPE
    };
    let shapes: Vec<CacheGeometry> = set_counts.iter().map(to_shape).collect();
    let mut caches =
        CacheSimGroup::new(&shapes, Replacement::Lru, threads).expect("the shapes are valid");
    for portion in lines.chunks(PORTION_LINES) {
        caches.push_while(portion, || ());
    }
    caches.misses().iter().sum()
}

/// # Panics
/// Misses on a full trace differ from the known number.
fn run(options: &Options) -> Vec<ResultRow> {
    let mut rows = Vec::new();
    for kind in &options.traces {
        let lines = &kind.generate_lines(options.accesses);
        if lines.len() == FULL_LEN {
            assert_eq!(
                simulate(Simd::detect_best(), lines),
                kind.full_misses_2_mib_16_way(),
                "misses on {}",
                kind.name()
            );
        }
        let mut contenders = vec![Contender::new("move to front", || move_to_front(lines))];
        for simd in Simd::available() {
            let bar = (simd == Simd::detect_best()).then_some(1.0);
            contenders.push(
                Contender::new(simd.name(), move || simulate(simd, lines)).compare_with(0, bar),
            );
        }
        rows.extend(compare(
            "cachesim",
            kind.name(),
            lines.len(),
            options.rounds,
            BenchClock::Thread,
            true,
            contenders,
        ));
        let four = &[SETS / 4, SETS / 2, SETS, 2 * SETS][..];
        for (sizes, set_counts) in [("one size", &[SETS][..]), ("four sizes", four)] {
            // By CPU time, the ratio is half of the one that two free cores would give.
            for (clock, unit, bar) in [
                (BenchClock::Wall, "", Some(1.8)),
                (BenchClock::Process, ", CPU", None),
            ] {
                let contender = |threads: usize| {
                    let name = format!("{sizes}, {threads} threads{unit}");
                    Contender::new(name, move || simulate_on(threads, set_counts, lines))
                };
                rows.extend(compare(
                    "cachesim",
                    kind.name(),
                    lines.len(),
                    options.rounds,
                    clock,
                    true,
                    vec![contender(1), contender(2).compare_with(0, bar)],
                ));
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traces::KINDS;

    /// Do the plain loop and the simulator agree on a prefix of each trace, and with the number that is pinned here?
    #[test]
    fn plain_loop_and_simulator_agree_with_the_pinned_misses() {
        for (kind, misses) in KINDS.into_iter().zip([140_456, 400_000, 382_324]) {
            let lines = kind.generate_lines(400_000);
            assert_eq!(move_to_front(&lines), misses, "{}", kind.name());
            assert_eq!(simulate_on(2, &[SETS], &lines), misses, "{}", kind.name());
            for simd in Simd::available() {
                assert_eq!(
                    simulate(simd, &lines),
                    misses,
                    "{} {}",
                    kind.name(),
                    simd.name()
                );
            }
        }
    }
}
