//! Addresses with given LRU stack distances.
//!
//! Method: every address in the stack has a slot in time; a Fenwick tree over the slots counts those that are the last use
//! of their address, so that the `d`-th most recent one is found in logarithmic time. Slots are renumbered when they run
//! out.

/// Where in its stack an access falls.
pub struct Distances {
    /// Upper bound of distances in lines, ascending, and the share of accesses at or below it.
    pub up_to: Vec<(f32, f32)>,
}

impl Distances {
    /// The distance below which a share `at` of all accesses falls, between bounds by a line; `None` = it misses.
    pub fn at(&self, at: f64) -> Option<f64> {
        let mut low = (0.0f64, 0.0f64);
        for &(lines, share) in &self.up_to {
            let high = (f64::from(lines), f64::from(share));
            if at < high.1 {
                let part = (at - low.1) / (high.1 - low.1).max(1e-12);
                return Some(low.0 + part * (high.0 - low.0));
            }
            low = high;
        }
        None
    }
}

struct Fenwick(Vec<u32>);

impl Fenwick {
    fn add(&mut self, at: usize, by: i32) {
        let mut at = at + 1;
        while at < self.0.len() {
            self.0[at] = self.0[at].wrapping_add_signed(by);
            at += at & at.wrapping_neg();
        }
    }
    /// The place of the `nth` one, from 1.
    fn find(&self, mut nth: u32) -> usize {
        let mut at = 0;
        let mut step = (self.0.len() - 1).next_power_of_two();
        while step > 0 {
            if at + step < self.0.len() && self.0[at + step] < nth {
                at += step;
                nth -= self.0[at];
            }
            step /= 2;
        }
        at
    }
}

/// `entries` line addresses whose LRU distances follow `distances`; beyond twice the capacity every line is new.
pub fn addresses(distances: Distances, entries: u32, capacity: f32, mut uniform: impl FnMut() -> f64) -> Vec<u64> {
    let most = (2.0 * capacity) as u32;
    // The stack starts full, so that distances beyond what was seen so far exist.
    let first = (capacity as u32).min(entries.max(1) * 4);
    let slots = (first + entries) as usize;
    let mut live = Fenwick(vec![0; slots + 1]);
    let mut line_at: Vec<u64> = (0..u64::from(first)).collect();
    (0..first as usize).for_each(|at| live.add(at, 1));
    let (mut count, mut next_line) = (first, u64::from(first));
    let mut found = Vec::with_capacity(entries as usize);
    for _ in 0..entries {
        let distance = distances.at(uniform()).map(|lines| lines as u32);
        let line = match distance.filter(|distance| *distance < count.min(most)) {
            Some(distance) => {
                let at = live.find(count - distance);
                live.add(at, -1);
                count -= 1;
                line_at[at]
            }
            None => {
                next_line += 1;
                next_line - 1
            }
        };
        live.add(line_at.len(), 1);
        count += 1;
        line_at.push(line);
        found.push(line);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a plain LRU list find the distances again that addresses were made from?
    #[test]
    fn a_plain_lru_list_finds_the_distances_again() {
        let distances = Distances { up_to: vec![(100.0, 0.5), (400.0, 0.8)] };
        let mut state = 1u64;
        let uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let trace = addresses(distances, 20_000, 1000.0, uniform);
        let (mut stack, mut near, mut far, mut missed) = (Vec::<u64>::new(), 0, 0, 0);
        for line in trace {
            match stack.iter().rposition(|other| *other == line) {
                Some(at) => {
                    let distance = stack.len() - 1 - at;
                    if distance < 100 {
                        near += 1
                    } else {
                        far += 1
                    }
                    assert!(distance < 400, "{distance}");
                    stack.remove(at);
                }
                None => missed += 1,
            }
            stack.push(line);
        }
        // The list starts empty, so its first accesses miss what the stack held already.
        assert!((f64::from(near) / 20_000.0 - 0.5).abs() < 0.02, "{near} {far} {missed}");
        assert!((f64::from(far) / 20_000.0 - 0.3).abs() < 0.03, "{near} {far} {missed}");
    }
}
