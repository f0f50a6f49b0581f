//! What the measured times say: the levels behind a curve of latencies, how long lines stay in a cache, and how low it
//! inserts streams.

use cachemate_core::{Estimate, LineLifetimes};

/// The shared cache and memory as a curve of latencies shows them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LatencyFit {
    /// Size from which on the largest private cache misses.
    pub private_bytes: f64,
    /// Size from which on the shared cache misses.
    pub cache_bytes: f64,
    /// Latency of a hit in the shared cache.
    pub cache_ns: f64,
    /// Latency of memory.
    pub memory_ns: f64,
    /// Mean relative deviation of the points.
    pub deviation: f64,
}

/// Candidates for the sizes, by factors of these.
const SIZE_STEP: f64 = 1.03;
const PRIVATE_STEP: f64 = 1.06;
/// Least share of the private cache that a guest may own.
const LEAST_PRIVATE_SHARE: f64 = 0.4;
/// Sizes up to this multiple of the cache decide; beyond it, misses of the address translation add to the latency.
const LARGEST_MULTIPLE: f64 = 5.0;

/// Fits private cache, shared cache and memory to latencies of random walks, given by size in bytes and time in ns.
/// Every line is equally likely, so that a walk over `s` bytes hits a cache of `c` bytes with probability `c / s`,
/// whatever the cache replaces. A guest may own a part of either cache: others use the same core, or its pages crowd in
/// some sets. `None` with fewer than four sizes beyond the private cache.
pub fn fit_latencies(
    points: &[(f64, f64)],
    private_bytes: f64,
    private_ns: f64,
    largest_bytes: f64,
) -> Option<LatencyFit> {
    let mut best: Option<LatencyFit> = None;
    let mut upper_limit = f64::INFINITY;
    for _ in 0..3 {
        best = None;
        let largest_used = upper_limit.max(LARGEST_MULTIPLE * private_bytes);
        let within = |point: &&(f64, f64)| point.0 <= largest_used;
        let used: Vec<(f64, f64)> = points.iter().filter(within).copied().collect();
        let mut cache_bytes = 1.2 * private_bytes;
        while cache_bytes <= largest_bytes {
            let mut owned_bytes = private_bytes;
            while owned_bytes >= LEAST_PRIVATE_SHARE * private_bytes {
                if let Some(fit) = fit_at(&used, owned_bytes, private_ns, cache_bytes)
                    && best.is_none_or(|best| fit.deviation < best.deviation)
                {
                    best = Some(fit);
                }
                owned_bytes /= PRIVATE_STEP;
            }
            cache_bytes *= SIZE_STEP;
        }
        upper_limit = LARGEST_MULTIPLE * best?.cache_bytes;
    }
    best
}

/// Least squares of relative deviations for both latencies at one size of the cache.
fn fit_at(
    points: &[(f64, f64)],
    private_bytes: f64,
    private_ns: f64,
    cache_bytes: f64,
) -> Option<LatencyFit> {
    if points
        .iter()
        .filter(|(bytes, _)| *bytes > private_bytes)
        .count()
        < 4
    {
        return None;
    }
    let shares = |bytes: f64| {
        let private = private_bytes.min(bytes) / bytes;
        let shared = cache_bytes.min(bytes) / bytes - private;
        (private, shared, 1.0 - private - shared)
    };
    // Normal equations of two unknowns, each point weighted by its time.
    let (mut aa, mut ab, mut bb, mut ay, mut by) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(bytes, ns) in points {
        let (private, shared, memory) = shares(bytes);
        let (a, b, y) = (shared / ns, memory / ns, 1.0 - private * private_ns / ns);
        aa += a * a;
        ab += a * b;
        bb += b * b;
        ay += a * y;
        by += b * y;
    }
    let determinant = aa * bb - ab * ab;
    if determinant <= 1e-9 * aa * bb {
        return None;
    }
    let cache_ns = (ay * bb - by * ab) / determinant;
    let memory_ns = (by * aa - ay * ab) / determinant;
    if !(cache_ns > 0.0 && memory_ns > cache_ns) {
        return None;
    }
    let deviation = |&(bytes, ns): &(f64, f64)| {
        let (private, shared, memory) = shares(bytes);
        ((private * private_ns + shared * cache_ns + memory * memory_ns) / ns - 1.0).powi(2)
    };
    let squares: f64 = points.iter().map(deviation).sum();
    Some(LatencyFit {
        private_bytes,
        cache_bytes,
        cache_ns,
        memory_ns,
        deviation: (squares / points.len() as f64).sqrt(),
    })
}

/// Time after which this share of some lines is lost, from the shares lost after pauses in µs, on a logarithmic scale;
/// `None` if less is lost after the longest pause. What was lost once does not come back, so that a large share after a
/// pause that is shorter than one with a small share was another disturbance.
pub fn half_time_ns(
    pauses_us: &[u64],
    lost_shares: &[Estimate],
    lost_share: f64,
) -> Option<Estimate> {
    let crossing_of = |share_of: fn(&Estimate) -> f64| {
        let shares: Vec<f64> = lost_shares.iter().map(share_of).collect();
        let pause_ns = |index: usize| pauses_us[index] as f64 * 1e3;
        let Some(before) = shares.iter().rposition(|share| *share < lost_share) else {
            return Some(pause_ns(0));
        };
        let after = before + 1;
        if after == shares.len() {
            return None;
        }
        let position = (lost_share - shares[before]) / (shares[after] - shares[before]);
        Some(pause_ns(before) * (pause_ns(after) / pause_ns(before)).powf(position))
    };
    let value = crossing_of(|share| share.value)?;
    let longest_ns = *pauses_us.last()? as f64 * 1e3;
    Some(Estimate {
        value,
        low: crossing_of(|share| share.high).unwrap_or(value).min(value),
        high: crossing_of(|share| share.low)
            .unwrap_or(longest_ns)
            .max(value),
    })
}

/// Number of instructions between two misses up to which they overlap, from the time for both (instructions from one to
/// the next, time), ascending: the time rises from that of one miss to that of two. `None` if it rises nowhere.
pub fn window_instr(points: &[(f64, f64)]) -> Option<Estimate> {
    const RISE: f64 = 1.4;
    let (_, overlapped_ns) = points.first()?;
    let above = 1 + points
        .iter()
        .rposition(|(_, ns)| *ns < RISE * overlapped_ns)?;
    let (low, high) = (points[above - 1].0, points.get(above)?.0);
    Some(Estimate {
        value: 0.5 * (low + high),
        low,
        high,
    })
}

/// A random walk beside a co-runner that never reads a line twice while it is cached.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WalkBesideCoRunner {
    /// Capacity of the shared cache, in lines.
    pub cache_lines: f64,
    /// Lines of the walk, which are fewer.
    pub walk_lines: f64,
    /// Share of the walk's loads that miss beside the co-runner.
    pub miss_share: f64,
    /// Loads of the walk per ns.
    pub walk_rate: f64,
}

/// Misses of a walk below and above which their share says nothing.
const LEAST_MISS_SHARE: f64 = 0.002;
const MOST_MISS_SHARE: f64 = 0.999;

/// Lines per ns, inserted as LRU inserts all, that compete with a walk: 0 if it hardly misses. Under LRU, the cache
/// holds what was touched in a window: of the walk, each line with probability `1 - exp(-rate x window / lines)`, which
/// is the share of hits, and of the others every line of the window. The difference that a stream makes, over its
/// lines, is 1 for LRU, and near 0 if the stream only replaces itself or lines of other guests.
pub fn co_runner_lines_per_ns(walk: &WalkBesideCoRunner) -> f64 {
    if walk.miss_share <= LEAST_MISS_SHARE {
        return 0.0;
    }
    let miss_share = walk.miss_share.min(MOST_MISS_SHARE);
    let window_ns = -miss_share.ln() * walk.walk_lines / walk.walk_rate;
    let held_by_others = walk.cache_lines - walk.walk_lines * (1.0 - miss_share);
    held_by_others.max(0.0) / window_ns
}

/// Least ratio of the time for a line of a stream from memory to that from the cache, from which its size can be told.
const LEAST_CONTRAST: f64 = 1.2;

/// Size of the cache in which a program's lines compete with those of others, from the time for a line of a stream over
/// the same bytes again and again (size, time), ascending; `None` if it always hits, or if hits and misses take about
/// the same time. Where the time is half-way to that of memory, half of the references hit, which tells how long lines stay
/// as a multiple `1 / u` of a pass. They stay as long as the others' traffic and the stream's own lines, of which a share `r`
/// is resident, leave them: with the mean lifetime `T` beside the others' traffic alone, `pool = r x size + pool x pass / (u T)`.
pub fn pool_bytes(
    points: &[(f64, f64)],
    memory_line_ns: f64,
    lifetimes: LineLifetimes,
    mean_lifetime_ns: f64,
) -> Option<f64> {
    let (_, cached_line_ns) = *points.first()?;
    // Where memory streams about as fast as the cache, the times say nothing about where the lines were.
    if memory_line_ns < LEAST_CONTRAST * cached_line_ns {
        return None;
    }
    let middle_ns = 0.5 * (cached_line_ns + memory_line_ns);
    let above = points
        .iter()
        .rposition(|(_, line_ns)| *line_ns < middle_ns)
        .map_or(0, |below| below + 1);
    let (larger_bytes, larger_ns) = *points.get(above)?;
    let size_bytes = match above.checked_sub(1).map(|below| points[below]) {
        Some((bytes, line_ns)) => {
            let position = (middle_ns - line_ns) / (larger_ns - line_ns);
            bytes * (larger_bytes / bytes).powf(position)
        }
        None => larger_bytes,
    };
    let pass = lifetimes.half_hit_time();
    let filled_share = size_bytes / 64.0 * middle_ns / (pass * mean_lifetime_ns);
    Some(if filled_share < 1.0 {
        lifetimes.resident_share(pass) * size_bytes / (1.0 - filled_share)
    } else {
        f64::INFINITY
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a lifetime found between two pauses, at the first one if all is lost by then, behind a disturbance of a
    /// shorter pause, and nowhere if lines stay?
    #[test]
    fn a_lifetime_lies_between_the_pauses_around_half_of_the_loss() {
        let found = |shares: [f64; 3]| {
            let shares = shares.map(|value| Estimate {
                value,
                low: value - 0.1,
                high: value + 0.1,
            });
            half_time_ns(&[1000, 10_000, 100_000], &shares, 0.5)
        };
        let middle = found([0.0, 0.25, 0.75]).unwrap();
        assert!(
            (middle.value / (10f64.powf(1.5) * 1e6) - 1.0).abs() < 1e-9,
            "{middle:?}"
        );
        assert!(
            middle.low < middle.value && middle.high > middle.value,
            "{middle:?}"
        );
        assert_eq!(found([0.9, 1.0, 1.0]).unwrap().value, 1e6);
        assert!(found([0.9, 0.1, 0.9]).unwrap().value > 1e7);
        assert_eq!(found([0.0, 0.01, 0.02]), None);
    }

    /// Are size and latencies recovered from a curve with three levels, although the latency of memory creeps up with
    /// the size?
    #[test]
    fn size_and_latencies_are_recovered_from_a_curve() {
        const MIB: f64 = 1048576.0;
        for (own, cache, creep) in [
            (2.0, 9.0, 0.0),
            (2.0, 30.0, 0.0),
            (2.0, 9.0, 0.001),
            (1.3, 4.5, 0.0),
        ] {
            let sizes = (0..=40).map(|step| MIB * 2f64.powf(f64::from(step) / 4.0));
            let latency = |bytes: f64| {
                let private = (own * MIB).min(bytes) / bytes;
                let shared = (cache * MIB).min(bytes) / bytes - private;
                let memory = 130.0 * (1.0 + creep * bytes / MIB);
                5.0 * private + 25.0 * shared + memory * (1.0 - private - shared)
            };
            let points: Vec<(f64, f64)> = sizes.map(|bytes| (bytes, latency(bytes))).collect();
            let fit = fit_latencies(&points, 2.0 * MIB, 5.0, 256.0 * MIB).unwrap();
            assert!(
                (fit.cache_bytes / MIB / cache - 1.0).abs() < 0.06,
                "{fit:?}"
            );
            assert!(
                (fit.private_bytes / MIB / own - 1.0).abs() < 0.06,
                "{fit:?}"
            );
            assert!((fit.cache_ns / 25.0 - 1.0).abs() < 0.06, "{fit:?}");
            assert!((fit.memory_ns / 130.0 - 1.0).abs() < 0.06, "{fit:?}");
        }
        assert_eq!(fit_latencies(&[(4e6, 20.0)], 2e6, 5.0, 1e8), None);
    }

    /// Is the insertion of a simulated LRU cache 1, and that of a cache that puts most of a stream's lines at the end
    /// of its order the share that it does not?
    #[test]
    fn insertion_of_a_simulated_cache_is_recovered() {
        for low_share in [0.0, 0.5, 0.9] {
            let (cache_lines, walk_lines, streams_per_walk) = (400usize, 250u64, 3);
            let mut order: Vec<u64> = Vec::new();
            let (mut state, mut stream_line) = (9u64, 1 << 40);
            let mut draw = |bound: u64| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                ((state >> 32) * bound) >> 32
            };
            let (mut loads, mut misses) = (0.0, 0.0);
            for step in 0..40_000 {
                let line = draw(walk_lines);
                let position = order.iter().position(|held| *held == line);
                if step > 10_000 {
                    loads += 1.0;
                    misses += f64::from(position.is_none());
                }
                if let Some(position) = position {
                    order.remove(position);
                }
                order.push(line);
                for _ in 0..streams_per_walk {
                    stream_line += 1;
                    let is_low = (draw(1000) as f64) < 1000.0 * low_share;
                    if is_low && order.len() >= cache_lines {
                        // It takes the place of the oldest line of the order, which is a stream's own.
                        continue;
                    }
                    order.push(stream_line);
                }
                let surplus = order.len().saturating_sub(cache_lines);
                order.drain(..surplus);
            }
            let competing_lines = co_runner_lines_per_ns(&WalkBesideCoRunner {
                cache_lines: cache_lines as f64,
                walk_lines: walk_lines as f64,
                miss_share: misses / loads,
                walk_rate: 1.0,
            });
            let found = competing_lines / f64::from(streams_per_walk);
            assert!(
                (found - (1.0 - low_share)).abs() < 0.08,
                "{low_share}: {found}"
            );
        }
    }

    /// Is the size of a cache recovered in which lines leave at random while neighbors fill it, from the times of streams that
    /// slow down as their lines leave, and does a stream that never misses say nothing?
    #[test]
    fn a_pool_is_recovered_from_streams_that_come_back() {
        let (pool_lines, neighbor_lines_per_ns) = (100_000.0, 0.05);
        let lifetimes = LineLifetimes::new(0.4);
        // Lines stay for as long as the stream's resident ones leave to the neighbors' traffic, and the stream takes as long as
        // its misses make it.
        let line_ns = |bytes: f64| {
            let lines = bytes / 64.0;
            let mut hit_share = 1.0;
            for _ in 0..500 {
                let pass_ns = lines * (12.0 - 4.0 * hit_share);
                let (mut low, mut high) = (0.0, pool_lines / neighbor_lines_per_ns);
                for _ in 0..50 {
                    let lifetime_ns = 0.5 * (low + high);
                    let held = lines * lifetimes.resident_share(pass_ns / lifetime_ns);
                    if held + neighbor_lines_per_ns * lifetime_ns < pool_lines {
                        low = lifetime_ns;
                    } else {
                        high = lifetime_ns;
                    }
                }
                let pass = pass_ns / high;
                let (new, again) = (lifetimes.new_share_left(pass), lifetimes.share_left(pass));
                hit_share = 0.5 * (hit_share + LineLifetimes::hit_share(new, again));
            }
            12.0 - 4.0 * hit_share
        };
        let sizes = (0..40).map(|step| 1e6 * 1.06f64.powi(step));
        let points: Vec<(f64, f64)> = sizes.map(|bytes| (bytes, line_ns(bytes))).collect();
        let mean_lifetime_ns = pool_lines / neighbor_lines_per_ns;
        let found_at = |points: &[(f64, f64)], memory_line_ns: f64| {
            pool_bytes(points, memory_line_ns, lifetimes, mean_lifetime_ns)
        };
        let found = found_at(&points, 12.0).unwrap();
        assert!((found / 64.0 / pool_lines - 1.0).abs() < 0.1, "{found}");
        assert_eq!(found_at(&points[..5], 12.0), None);
        assert_eq!(found_at(&points, 8.5), None);
        assert_eq!(found_at(&[], 12.0), None);
    }

    /// Does a window end between the two numbers of instructions at which two misses take the time of one and of two,
    /// although one sample was disturbed, and nowhere if they always overlap?
    #[test]
    fn a_window_ends_where_two_misses_no_longer_overlap() {
        let times = |window: f64| {
            let instr = [8.0, 100.0, 200.0, 300.0, 400.0];
            instr.map(|count| (count, if count < window { 90.0 } else { 160.0 }))
        };
        let mut disturbed = times(250.0);
        disturbed[1].1 = 150.0;
        let found = window_instr(&disturbed).unwrap();
        assert_eq!((found.low, found.value, found.high), (200.0, 250.0, 300.0));
        assert_eq!(window_instr(&times(1e9)), None);
    }
}
