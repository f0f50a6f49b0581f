//! Calibrated neighbors, which take a known part of the cache, or of the bandwidth, from a program beside them.
//!
//! Cache pirating (Eklov et al., ICPP 2011): a thread that cycles over a footprint keeps it resident, so that the
//! program beside it has the rest of the cache; how much that slows the program down is its sensitivity.

use std::time::{Duration, Instant};

use cachemate_core::{Neighbor, SplitMix64};

const WORDS_PER_LINE: usize = 8;
/// Largest footprint; larger ones are a mistake, or take too long to allocate.
const MAX_FOOTPRINT_BYTES: u64 = 1 << 30;
/// Lines between two reads of the clock.
const LINES_PER_CLOCK_READ: usize = 4096;

/// A neighbor with its memory.
pub struct NeighborLoad {
    memory: Vec<u64>,
    position: usize,
    is_chase: bool,
}

impl NeighborLoad {
    /// Allocates and touches the footprint; a stream's is twice the cache, and 64 MiB at least.
    pub fn new(neighbor: Neighbor, cache_bytes: Option<u64>) -> Self {
        let (bytes, is_chase) = match neighbor {
            Neighbor::Chase { footprint_bytes } => (footprint_bytes, true),
            Neighbor::Pirate { footprint_bytes } => (footprint_bytes, false),
            Neighbor::Stream => (
                cache_bytes
                    .unwrap_or(32 << 20)
                    .saturating_mul(2)
                    .max(64 << 20),
                false,
            ),
        };
        let lines = (bytes.clamp(4096, MAX_FOOTPRINT_BYTES) / 64) as usize;
        let mut memory = vec![0u64; lines * WORDS_PER_LINE];
        if is_chase {
            link_random_cycle(&mut memory, lines);
        } else {
            memory
                .iter_mut()
                .step_by(WORDS_PER_LINE)
                .for_each(|word| *word = 1);
        }
        NeighborLoad {
            memory,
            position: 0,
            is_chase,
        }
    }

    /// Runs for about `duration`, and returns the number of touched lines.
    pub fn run(&mut self, duration: Duration) -> u64 {
        let start = Instant::now();
        let mut lines = 0;
        while start.elapsed() < duration {
            for _ in 0..LINES_PER_CLOCK_READ {
                let word = std::hint::black_box(self.memory[self.position]);
                self.position = if self.is_chase {
                    word as usize
                } else {
                    self.position + WORDS_PER_LINE
                };
                if self.position >= self.memory.len() {
                    self.position = 0;
                }
            }
            lines += LINES_PER_CLOCK_READ as u64;
        }
        lines
    }
}

/// Links all lines in one random cycle (Sattolo's algorithm); the first word of each line holds the index of the first
/// word of the next line.
fn link_random_cycle(memory: &mut [u64], lines: usize) {
    let mut order: Vec<usize> = (0..lines).collect();
    let mut rng = SplitMix64::new(1);
    for index in (1..lines).rev() {
        order.swap(index, rng.draw_below(index as u64) as usize);
    }
    for (index, &next) in order.iter().enumerate() {
        memory[index * WORDS_PER_LINE] = (next * WORDS_PER_LINE) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a chase visit every line before it returns to the first, whatever the size?
    #[test]
    fn a_chase_visits_every_line_before_it_returns() {
        for lines in [1, 2, 7, 64] {
            let mut memory = vec![0u64; lines * WORDS_PER_LINE];
            link_random_cycle(&mut memory, lines);
            let mut at = 0;
            let mut visited = vec![false; lines];
            for _ in 0..lines {
                visited[at / WORDS_PER_LINE] = true;
                at = memory[at] as usize;
            }
            assert!(at == 0 && visited.iter().all(|seen| *seen), "{lines}");
        }
    }

    /// Do all neighbors run for about the requested time, and count the lines that they touch?
    #[test]
    fn neighbors_run_and_count() {
        let footprint_bytes = 1 << 20;
        for neighbor in [
            Neighbor::Chase { footprint_bytes },
            Neighbor::Pirate { footprint_bytes },
            Neighbor::Stream,
        ] {
            assert!(
                NeighborLoad::new(neighbor, Some(1 << 20)).run(Duration::from_millis(2))
                    >= LINES_PER_CLOCK_READ as u64
            );
        }
    }
}
