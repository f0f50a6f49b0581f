//! Threads of the machine itself, for measurements that need no PMU.

use cachemate_core::{Access, AccessSource, BatchEnd};

const LINE_BYTES: u64 = 64;
const BATCH_TURNS: usize = 64;

/// The pattern of a thread's accesses; each unit of `progress` is one access.
pub(super) enum InjectedPattern {
    /// Dependent loads over all lines of a footprint, in an order that no prefetcher follows.
    Chase { lines: u64 },
    /// Ascending lines of a footprint, repeatedly.
    Sweep { lines: u64 },
    /// Loads and stores of one line, with `gap_instr` instructions without accesses between.
    OneLine { gap_instr: u64 },
}

pub(super) struct InjectedSource {
    base: u64,
    pattern: InjectedPattern,
    line_index: u64,
    access_count: u64,
}

impl InjectedSource {
    pub fn new(base: u64, pattern: InjectedPattern) -> Self {
        InjectedSource {
            base,
            pattern,
            line_index: 0,
            access_count: 0,
        }
    }
}

impl AccessSource for InjectedSource {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        // A pattern with long gaps emits one turn per batch, so that its progress is exact.
        let batch_turns = if matches!(self.pattern, InjectedPattern::OneLine { .. }) {
            1
        } else {
            BATCH_TURNS
        };

        for _ in 0..batch_turns {
            self.access_count += 1;
            match self.pattern {
                InjectedPattern::Chase { lines } => {
                    // A full-period generator modulo a power of two (Hull and Dobell), whose values past the end are
                    // skipped.
                    let modulus = lines.next_power_of_two().max(4);
                    loop {
                        self.line_index = (self
                            .line_index
                            .wrapping_mul(0x5851_F42D_4C95_7F2D)
                            .wrapping_add(0x1405_7B7E_F767_814F))
                            % modulus;
                        if self.line_index < lines {
                            break;
                        }
                    }
                    batch.push(Access::dependent_load(
                        self.base + self.line_index * LINE_BYTES,
                        0,
                    ));
                }
                InjectedPattern::Sweep { lines } => {
                    self.line_index = (self.line_index + 1) % lines;
                    batch.push(Access::load(self.base + self.line_index * LINE_BYTES, 1));
                }
                InjectedPattern::OneLine { gap_instr: apart } => {
                    batch.push(Access::compute(apart));
                    batch.push(Access::dependent_load(self.base, 0));
                    batch.push(Access::store(self.base, 0));
                }
            }
        }

        BatchEnd::More
    }

    fn progress(&self) -> Option<f64> {
        Some(self.access_count as f64)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Does the chase visit every line of its footprint once per round, in an irregular order?
    #[test]
    fn a_chase_visits_every_line_once_a_round() {
        for lines in [1, 3, 64, 1000] {
            let mut source = InjectedSource::new(1 << 30, InjectedPattern::Chase { lines });
            let mut batch = Vec::new();
            while (batch.len() as u64) < lines {
                source.next_batch(&mut batch);
            }
            let touched_lines: BTreeSet<u64> = batch[..lines as usize]
                .iter()
                .map(|access| access.address())
                .collect();
            assert_eq!(touched_lines.len() as u64, lines);
            assert!(batch.iter().all(|access| access.is_dependent()));
        }
    }
}
