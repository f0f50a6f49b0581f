//! Builds profiles for the schemes' tests.

use cachemate_core::{Fact, FactSource, Profile};

/// A profile with these hits by LRU position and misses, per million instructions; references are their sum.
pub(crate) fn with_positions(positions: &[f64]) -> Profile {
    let mut profile = Profile::default();
    profile.locality.stack_positions = Some(Fact::new(positions.to_vec(), FactSource::Oracle, 0));
    profile.rates.llc_refs_per_mega_instr = Some(Fact::oracle(positions.iter().sum()));
    profile
}
