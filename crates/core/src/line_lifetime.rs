//! How long lines stay in a cache that other systems fill too.
//!
//! Under LRU, a line leaves when as many others as the cache holds were touched since, so that a loop that is a little too
//! large never hits. In a cache that neighbors fill too, it is their traffic that evicts, and what it hits is chance: a line
//! leaves at a rate, whatever its age, as under random replacement. Most caches moreover keep a new line on probation,
//! and protect it once it was touched again. A protected line falls back before it leaves, so that its lifetime is the sum
//! of two exponentially distributed times: that of a new line and the rest, or two equal ones if a new line stays for less
//! than half as long.
//!
//! For example, on an AMD EPYC whose L3 other guests fill, 70, 48, 23 and 8 % of some new lines were left after 0.5, 1, 2
//! and 4 ms (exponential with a mean of 1.4 ms: 70, 49, 24, 6), and 93, 67, 36 and 5 % of lines that were touched eight
//! times after 1, 2, 4 and 8 ms (two such times with a mean of 3.7 ms together: 90, 71, 36, 7). On an Intel of the fifth
//! generation, 99, 94 and 47 % of such lines were left after 3, 10 and 30 ms (two equal times with a mean of 32 ms: 98, 87,
//! 44; a single one: 91, 73, 39), whereas of new lines a third was left after less than one.
//!
//! Times are in units of the mean lifetime of a line that was touched again.

/// Lifetimes of the lines of such a cache.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LineLifetimes {
    probation_share: f64,
}

/// Difference of two stages below which they count as this different.
const STAGE_DIFFERENCE: f64 = 1e-6;
/// Halvings of a range in which a time is looked for.
const HALVINGS: usize = 60;
/// Times after which no line is left.
const LONGEST_TIME: f64 = 64.0;

impl LineLifetimes {
    /// Lifetimes of new lines have this share of the mean of those of others, above 0 and at most 1.
    pub fn new(probation_share: f64) -> Self {
        LineLifetimes { probation_share }
    }

    /// Share of new lines that stay for longer.
    pub fn new_share_left(&self, time: f64) -> f64 {
        libm::exp(-time / self.probation_share)
    }

    /// Share of lines that were touched again that stay for longer.
    pub fn share_left(&self, time: f64) -> f64 {
        let [first, last] = self.stages();
        let left_of = |mean: f64| {
            if mean > 0.0 {
                mean * libm::exp(-time / mean)
            } else {
                0.0
            }
        };
        (left_of(first) - left_of(last)) / (first - last)
    }

    /// Share of the lines of a loop that are resident, in the mean, if it comes round in this time: each line stays for the
    /// smaller one of its lifetime and of a round.
    pub fn resident_share(&self, time: f64) -> f64 {
        let [first, last] = self.stages();
        let stays_of = |mean: f64| {
            if mean > 0.0 {
                -mean * mean * libm::expm1(-time / mean)
            } else {
                0.0
            }
        };
        (stays_of(first) - stays_of(last)) / (first - last) / time
    }

    /// Mean times of the two stages, the second at least as long as the first and never equal, because two equal ones have another closed form.
    fn stages(&self) -> [f64; 2] {
        let last = self.probation_share.max(0.5 + STAGE_DIFFERENCE);
        [1.0 - last, last]
    }

    /// Time after which half of the lines that were touched again have left: 0.69 to 0.84 of the mean.
    pub fn half_time(&self) -> f64 {
        time_where(0.5, |time| self.share_left(time))
    }

    /// Time in which a loop comes round of whose references half hit.
    pub fn half_hit_time(&self) -> f64 {
        time_where(0.5, |time| {
            LineLifetimes::hit_share(self.new_share_left(time), self.share_left(time))
        })
    }

    /// Share of hits among references of which these shares come back before a new line has left, and before another has.
    ///
    /// A reference hits if the line's last reference missed and it comes back within the shorter time, or hit and it comes
    /// back within the longer one: `h = new (1 - h) + again h` (as for 2-LRU with random lifetimes: Martina, Garetto,
    /// Leonardi, INFOCOM 2014).
    pub fn hit_share(new_share: f64, again_share: f64) -> f64 {
        if new_share > 0.0 {
            new_share / (1.0 - again_share + new_share)
        } else {
            0.0
        }
    }

    /// Lifetimes of new lines and of others, each by `N` equally likely values, ascending.
    pub fn equally_likely<const N: usize>(&self) -> [[f64; N]; 2] {
        let mean_is = |mean: f64, times: [f64; N]| {
            let sum: f64 = times.iter().sum();
            times.map(|time| time * mean * N as f64 / sum)
        };
        let left_shares: [f64; N] =
            std::array::from_fn(|index| 1.0 - (index as f64 + 0.5) / N as f64);
        let new_times =
            left_shares.map(|share| time_where(share, |time| self.new_share_left(time)));
        let times = left_shares.map(|share| time_where(share, |time| self.share_left(time)));
        [
            mean_is(self.probation_share, new_times),
            mean_is(1.0, times),
        ]
    }

    /// Lifetimes of which halves of the new lines and of the others have left after times in this ratio.
    pub fn of_half_times(new_over_other: f64) -> Self {
        let halves_ratio = |share: f64| {
            let lifetimes = LineLifetimes::new(share);
            share * std::f64::consts::LN_2 / lifetimes.half_time()
        };
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..HALVINGS {
            let middle = 0.5 * (low + high);
            if halves_ratio(middle) < new_over_other {
                low = middle;
            } else {
                high = middle;
            }
        }
        LineLifetimes::new(high)
    }

    /// Lifetime of a new line, in the mean, as a share of that of a line that was touched again.
    pub fn probation_share(&self) -> f64 {
        self.probation_share
    }
}

/// Time at which a share that falls with time reaches this one.
fn time_where(share: f64, share_at: impl Fn(f64) -> f64) -> f64 {
    let (mut low, mut high) = (0.0, LONGEST_TIME);
    for _ in 0..HALVINGS {
        let middle = 0.5 * (low + high);
        if share_at(middle) > share {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do lifetimes have their means and the shares of a simulation that draws both stages, for shares below, at and above a
    /// half, and for one?
    #[test]
    fn shares_are_those_of_two_drawn_stages() {
        for probation_share in [0.05, 0.3, 0.5, 0.8, 1.0] {
            let lifetimes = LineLifetimes::new(probation_share);
            // Both stages take values in the middle of equally likely ranges, each with each.
            let exponential = |index: usize| -libm::log(1.0 - (index as f64 + 0.5) / 400.0);
            let last_stage = f64::max(probation_share, 0.5);
            let drawn_times = (0..400).flat_map(|first| {
                (0..400).map(move |last| {
                    (1.0 - last_stage) * exponential(first) + last_stage * exponential(last)
                })
            });
            let drawn_times: Vec<f64> = drawn_times.collect();
            for time in [0.1, 0.7, 1.0, 3.0] {
                let left = drawn_times.iter().filter(|drawn| **drawn > time).count();
                let drawn_share = left as f64 / drawn_times.len() as f64;
                let found = lifetimes.share_left(time);
                assert!((found - drawn_share).abs() < 0.005, "{found} {drawn_share}");
            }
            for (mean, times) in [probation_share, 1.0]
                .into_iter()
                .zip(lifetimes.equally_likely::<8>())
            {
                assert!((times.iter().sum::<f64>() / 8.0 - mean).abs() < 1e-9);
                assert!(times.is_sorted());
            }
            assert!((lifetimes.share_left(lifetimes.half_time()) - 0.5).abs() < 1e-9);
        }
    }

    /// Are lifetimes recovered from their halves, and is it one stage if new lines stay as long as others?
    #[test]
    fn lifetimes_are_recovered_from_their_halves() {
        for probation_share in [0.02, 0.3, 0.5, 0.9] {
            let half_time = LineLifetimes::new(probation_share).half_time();
            let ratio = probation_share * std::f64::consts::LN_2 / half_time;
            let found = LineLifetimes::of_half_times(ratio).probation_share();
            assert!((found - probation_share).abs() < 1e-6, "{found}");
        }
        assert_eq!(LineLifetimes::of_half_times(1.3).probation_share(), 1.0);
    }

    /// Does a loop hit as often as one whose lines leave when they are drawn to, and half of the time where it says so?
    #[test]
    fn a_loop_hits_as_in_a_simulation() {
        let lifetimes = LineLifetimes::new(0.3);
        let mut random = crate::SplitMix64::new(7);
        for time in [0.1, lifetimes.half_hit_time(), 1.0] {
            let (mut hits, mut has_hit) = (0, false);
            for _ in 0..200_000 {
                let new_time = random.draw_exponential(0.3);
                let again_time = random.draw_exponential(0.5) + random.draw_exponential(0.5);
                has_hit = if has_hit { again_time } else { new_time } > time;
                hits += u32::from(has_hit);
            }
            let expected = LineLifetimes::hit_share(
                lifetimes.new_share_left(time),
                lifetimes.share_left(time),
            );
            let found = f64::from(hits) / 200_000.0;
            assert!(
                (found - expected).abs() < 0.01,
                "{time}: {found} {expected}"
            );
        }
        let middle = lifetimes.half_hit_time();
        let half = LineLifetimes::hit_share(
            lifetimes.new_share_left(middle),
            lifetimes.share_left(middle),
        );
        assert!((half - 0.5).abs() < 1e-9);
    }
}
