//! Insertion by re-reference interval prediction (Jaleel, Theobald, Steely and Emer, ISCA 2010).
//!
//! A line has a prediction of two bits: near after a hit, long after a fill, distant if it leaves next. A scan's lines
//! are never hit, so that they leave before lines that were. If even the lines that will be hit exceed the cache,
//! nearly all fills are distant, so that some lines stay; two groups of sets duel over which of the two insertions
//! misses less.

use cachemate_core::SplitMix64;

/// Predictions of a re-reference: of a line that was hit, of a new one, and of the next victim.
pub(crate) const NEAR: u32 = 0;
pub(crate) const LONG: u32 = 2;
pub(crate) const DISTANT: u32 = 3;

/// Fills of which one is long under bimodal insertion.
const BIMODAL_PERIOD: u64 = 32;
/// Sets that always use one insertion, of each kind, if there are enough.
const LEADER_SETS: u64 = 32;
/// Half the range of the selector, which has ten bits.
const SELECTOR_MIDDLE: i32 = 512;

/// Decides between static and bimodal insertion. The selector counts the misses of the sets that always use one of
/// them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SetDuel {
    /// Misses with static insertion minus those with bimodal insertion.
    selector: i32,
}

impl SetDuel {
    /// Counts a miss of this set, and returns the prediction of its new line.
    pub fn insertion(&mut self, set: u64, sets: u64, random: &mut SplitMix64) -> u32 {
        let group_sets = (sets / LEADER_SETS).max(2);
        let is_bimodal = match set % group_sets {
            0 => {
                self.selector = (self.selector + 1).min(SELECTOR_MIDDLE);
                false
            }
            1 => {
                self.selector = (self.selector - 1).max(-SELECTOR_MIDDLE);
                true
            }
            _ => self.selector > 0,
        };
        if is_bimodal && random.draw_below(BIMODAL_PERIOD) != 0 {
            DISTANT
        } else {
            LONG
        }
    }
}
