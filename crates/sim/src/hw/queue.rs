//! Selection of the next core: a tournament of ticks, so that the cost hardly grows with the number of cores.

/// The smallest tick of a fixed number of cores; ties go to the core with the lower number.
pub(crate) struct CoreQueue {
    /// By node, with the root at 1: the key of the winner below; the leaves are in the second half.
    winners: Vec<u128>,
}

/// Packs the tick above the core into one number, which the host compares without a branch.
fn join_key(tick: u64, core: usize) -> u128 {
    u128::from(tick) << 64 | core as u128
}

fn split_key(key: u128) -> (u64, usize) {
    ((key >> 64) as u64, key as u64 as usize)
}

impl CoreQueue {
    pub fn new(cores: usize) -> Self {
        let leaf_count = cores.next_power_of_two();
        let leaf = |node: usize| join_key(u64::MAX, node.saturating_sub(leaf_count));
        let mut queue = CoreQueue {
            winners: (0..2 * leaf_count).map(leaf).collect(),
        };
        (0..cores).for_each(|core| queue.set(core, u64::MAX));
        queue
    }

    /// Sets a core's tick; `u64::MAX` if it has nothing to do.
    #[inline]
    pub fn set(&mut self, core: usize, tick: u64) {
        let mut node = self.winners.len() / 2 + core;
        let mut winner = join_key(tick, core);
        self.winners[node] = winner;
        while node > 1 {
            winner = winner.min(self.winners[node ^ 1]);
            node /= 2;
            self.winners[node] = winner;
        }
    }

    /// The first core, and the first of the others (`u64::MAX` if there are none).
    #[inline]
    pub fn find_two_earliest(&self) -> ((u64, usize), (u64, usize)) {
        let first_key = self.winners[1];
        let mut second_key = u128::MAX;
        let mut node = self.winners.len() / 2 + split_key(first_key).1;
        while node > 1 {
            second_key = second_key.min(self.winners[node ^ 1]);
            node /= 2;
        }
        (split_key(first_key), split_key(second_key))
    }
}
