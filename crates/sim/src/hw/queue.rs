//! Which core is next: a tournament of ticks, so that the cost hardly grows with the cores.

/// The least ticks of a fixed number of cores; of equal ones the lower core's.
pub(crate) struct CoreQueue {
    /// By node, root at 1: (tick, core) of the winner below; leaves in the second half.
    winners: Vec<(u64, usize)>,
}

impl CoreQueue {
    pub fn new(cores: usize) -> Self {
        let leaves = cores.next_power_of_two();
        let leaf = |node: usize| (u64::MAX, node.saturating_sub(leaves));
        let mut queue = CoreQueue { winners: (0..2 * leaves).map(leaf).collect() };
        (0..cores).for_each(|core| queue.set(core, u64::MAX));
        queue
    }

    /// `u64::MAX` = nothing to do.
    #[inline]
    pub fn set(&mut self, core: usize, tick: u64) {
        let mut node = self.winners.len() / 2 + core;
        self.winners[node] = (tick, core);
        while node > 1 {
            node /= 2;
            self.winners[node] = self.winners[2 * node].min(self.winners[2 * node + 1]);
        }
    }

    /// The first, and the first of the others (`u64::MAX` without any).
    #[inline]
    pub fn two_earliest(&self) -> ((u64, usize), (u64, usize)) {
        let first = self.winners[1];
        let mut second = (u64::MAX, usize::MAX);
        let mut node = self.winners.len() / 2 + first.1;
        while node > 1 {
            second = second.min(self.winners[node ^ 1]);
            node /= 2;
        }
        (first, second)
    }
}
