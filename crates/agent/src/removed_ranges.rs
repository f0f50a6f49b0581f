//! Ranges that the program is freeing.
//!
//! Problem: the kernel reports `MADV_DONTNEED` before it removes the pages. A page that is moved out for recoloring in
//! between would return with its old content, although the program must find zeros. Method: the agent leaves a reported
//! range alone until its loop has run a hundred times; if there are more ranges than can be stored, it leaves all
//! memory alone for as long.

const MAX_REMOVED_RANGES: usize = 64;
/// Turns of the handler's loop, each a hundredth of a second while it is idle. Only turns in which the handler ran
/// count, so the time in which a program is stopped does not.
const EXCLUSION_TURNS: u64 = 100;

/// The last 64 ranges that the kernel reported, each with the turn until which it is left alone.
#[derive(Debug)]
pub struct RemovedRanges {
    ranges: [(u64, u64, u64); MAX_REMOVED_RANGES],
    next_index: usize,
    /// No page may be moved before this turn.
    closed_until: u64,
}

impl Default for RemovedRanges {
    fn default() -> Self {
        RemovedRanges {
            ranges: [(0, 0, 0); MAX_REMOVED_RANGES],
            next_index: 0,
            closed_until: 0,
        }
    }
}

impl RemovedRanges {
    /// Records that the program frees the addresses from `start` to before `end`, as reported in this turn of the
    /// handler's loop.
    pub fn record(&mut self, start: u64, end: u64, turn: u64) {
        let end_turn = turn + EXCLUSION_TURNS;
        if self.ranges[self.next_index].2 > turn {
            self.closed_until = end_turn;
        }
        self.ranges[self.next_index] = (start, end, end_turn);
        self.next_index = (self.next_index + 1) % MAX_REMOVED_RANGES;
    }

    /// May the page be moved out briefly?
    pub fn may_take_out(&self, page: u64, turn: u64) -> bool {
        turn >= self.closed_until
            && self
                .ranges
                .iter()
                .all(|&(start, end, end_turn)| turn >= end_turn || page < start || page >= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a range left alone for a while, but not its neighbors, and is all memory if there are more ranges than can be
    /// stored?
    #[test]
    fn ranges_being_removed_are_left_alone() {
        let mut removed = RemovedRanges::default();
        removed.record(4096, 8192, 10);
        assert!(
            !removed.may_take_out(4096, 11)
                && removed.may_take_out(8192, 11)
                && removed.may_take_out(0, 11)
        );
        assert!(removed.may_take_out(4096, 10 + EXCLUSION_TURNS));
        for index in 0..=MAX_REMOVED_RANGES as u64 {
            removed.record(index << 20, (index << 20) + 4096, 500);
        }
        assert!(
            !removed.may_take_out(1 << 50, 501),
            "one range was forgotten, which may be any"
        );
        assert!(removed.may_take_out(0, 500 + EXCLUSION_TURNS));
    }
}
