//! The three synthetic traces to which all speed figures refer; they contain numbers of 64-byte lines.
//!
//! - `zipf`: Zipf with exponent 0.99 over 10^6 lines by exact inversion, with ranks scattered by a seeded shuffle;
//! - `scan`: a cyclic scan over 300 000 lines;
//! - `mixed`: 1 562 500 lines (100 MB); 80 % of the accesses are uniform over the first 30 %, the others over the rest.

use cachemate_core::SplitMix64;
use std::hash::Hasher;
use xxhash_rust::xxh3::Xxh3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TraceKind {
    Zipf,
    Scan,
    Mixed,
}

pub const KINDS: [TraceKind; 3] = [TraceKind::Zipf, TraceKind::Scan, TraceKind::Mixed];
/// Length of a full trace, for which misses and checksums are known.
pub const FULL_LEN: usize = 20_000_000;

impl TraceKind {
    pub fn name(self) -> &'static str {
        match self {
            TraceKind::Zipf => "zipf",
            TraceKind::Scan => "scan",
            TraceKind::Mixed => "mixed",
        }
    }

    /// Generates the first `len` line numbers.
    ///
    /// # Panics
    /// A full trace differs from the one to which all figures refer.
    pub fn generate_lines(self, len: usize) -> Vec<u64> {
        let lines: Vec<u64> = match self {
            TraceKind::Zipf => zipf_lines(len),
            TraceKind::Scan => (0..300_000).cycle().take(len).collect(),
            TraceKind::Mixed => draw_mixed_lines(len),
        };
        if len == FULL_LEN {
            assert_eq!(
                checksum(&lines),
                self.checksums().1,
                "{}: not the known trace",
                self.name()
            );
        }
        lines
    }

    /// XXH3-64 of the first 100 000 and of all [`FULL_LEN`] accesses, as little-endian byte addresses. The full traces
    /// with these sums have the SHA-256 sums c608e91979de211e..., 4a72e67575318414... and 065d9bff00c07a3b....
    pub fn checksums(self) -> (u64, u64) {
        match self {
            TraceKind::Zipf => (0x3e56_19bf_26d1_39e7, 0xeb83_eb15_0e99_ccdf),
            TraceKind::Scan => (0xbb8c_d1a2_8778_b643, 0x50af_febb_79d1_eb78),
            TraceKind::Mixed => (0xe996_1ad6_5f5c_c0dc, 0xdabc_50e1_1fd1_c3ed),
        }
    }

    /// Misses of a 2 MiB 16-way LRU cache with 64-byte lines on the full trace.
    pub fn full_misses_2_mib_16_way(self) -> u64 {
        match self {
            TraceKind::Zipf => 6_728_723,
            TraceKind::Scan => 20_000_000,
            TraceKind::Mixed => 19_085_453,
        }
    }
}

/// XXH3-64 of line numbers as little-endian byte addresses.
pub fn checksum(lines: &[u64]) -> u64 {
    let mut hasher = Xxh3::new();
    lines
        .iter()
        .for_each(|line| hasher.write(&(line * 64).to_le_bytes()));
    hasher.finish()
}

fn draw_unit(random: &mut SplitMix64) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn zipf_lines(len: usize) -> Vec<u64> {
    const RANKS: usize = 1_000_000;
    let mut random = SplitMix64::new(1);
    let mut sum = 0.0;
    let cumulative: Vec<f64> = (1..=RANKS)
        .map(|rank| {
            sum += libm::pow(rank as f64, -0.99);
            sum
        })
        .collect();
    let mut rank_order: Vec<u32> = (0..RANKS as u32).collect();
    random.shuffle(&mut rank_order);
    (0..len)
        .map(|_| {
            let target = draw_unit(&mut random) * sum;
            let rank = cumulative[..RANKS - 1].partition_point(|&upto| upto < target);
            u64::from(rank_order[rank])
        })
        .collect()
}

fn draw_mixed_lines(len: usize) -> Vec<u64> {
    const LINES: u64 = 1_562_500;
    const HOT: u64 = 468_750;
    let mut random = SplitMix64::new(3);
    (0..len)
        .map(|_| {
            if draw_unit(&mut random) < 0.8 {
                random.draw_below(HOT)
            } else {
                HOT + random.draw_below(LINES - HOT)
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are these the traces to which the figures refer (bit for bit as the C generator writes them)?
    #[test]
    fn traces_have_the_known_checksums() {
        for kind in KINDS {
            assert_eq!(
                checksum(&kind.generate_lines(100_000)),
                kind.checksums().0,
                "{}",
                kind.name()
            );
        }
    }
}
