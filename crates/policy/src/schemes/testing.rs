//! Profiles for the schemes' tests.

use cachemate_core::{Estimate, Profile};

/// LRU positions and misses per million instructions; references are their sum.
pub(crate) fn with_positions(positions: &[f64]) -> Profile {
    Profile {
        stack_positions: Some(positions.to_vec()),
        llc_refs_per_mega_instr: Some(Estimate::exact(positions.iter().sum())),
        ..Profile::default()
    }
}
