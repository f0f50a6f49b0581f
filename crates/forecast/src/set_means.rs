//! Rates by size: between the sizes that are known, and as means over the sets of a cache.
//!
//! Problem: a working set that is read in a cycle has a cliff. It hits with all of its lines resident, and misses
//! always with a few less, so a smooth curve between two sizes would let it keep a part. In a cache with sets, some
//! sets overflow although the cache has room. Method: between two sizes, the rates are those at both, mixed so that
//! misses fall as they do by stack distance. In a shared cache, rates are means over the sets ([`average_over_sets`]),
//! unless other systems fill it. Properties: no rate at a known size changes; a stream, which misses at every size, has
//! the same rates at all of them.

use cachemate_core::CacheSpec;
use cachemate_interval::{SizePoint, UnprefetchedRates};
use cachemate_locality::stack::DistanceHistogram;

/// Share of the accesses that two miss counts may differ by because of rounding.
pub(crate) const MAX_ROUNDING_SHARE: f64 = 1e-4;
/// Half of the quantiles of a normal distribution at the middles of eight equally likely parts.
const NORMAL_QUANTILES: [f64; 4] = [0.157_311, 0.488_776, 0.887_147, 1.534_121];

/// Adds a point at every multiple of `step_bytes` between two measured sizes where misses change. Its rates are those
/// of both sizes, mixed as the misses by stack distance.
pub fn points_by_distances(
    points: &[SizePoint],
    histogram: &DistanceHistogram,
    step_bytes: f64,
    line_bytes: u64,
) -> Vec<SizePoint> {
    let lines_of_bytes = |size_bytes: f64| size_bytes as u64 / line_bytes;

    let mut all_points = Vec::new();
    for pair in points.windows(2) {
        let (small_point, large_point) = (&pair[0], &pair[1]);
        all_points.push(*small_point);
        let [small_lines, large_lines] =
            [small_point, large_point].map(|point| lines_of_bytes(point.size_bytes));
        let first_step = libm::floor(small_point.size_bytes / step_bytes) as u64 + 1;
        // A step may end within the first line of a size that is known.
        let intermediate_sizes = (first_step..)
            .map(|step| lines_of_bytes(step as f64 * step_bytes))
            .take_while(|lines| *lines < large_lines)
            .filter(|lines| *lines > small_lines);
        let mut sizes: Vec<u64> = [small_lines]
            .into_iter()
            .chain(intermediate_sizes)
            .chain([large_lines])
            .collect();
        sizes.dedup();
        let Some(ratios) = histogram.miss_ratio_curve(&sizes) else {
            continue;
        };
        let (largest_ratio, smallest_ratio) = (ratios[0], ratios[ratios.len() - 1]);
        if largest_ratio - smallest_ratio < MAX_ROUNDING_SHARE {
            continue;
        }

        let inner_sizes_and_ratios = sizes.iter().zip(&ratios).take(sizes.len() - 1).skip(1);
        all_points.extend(inner_sizes_and_ratios.map(|(&lines, ratio)| {
            interpolate_rates(
                small_point,
                large_point,
                (largest_ratio - ratio) / (largest_ratio - smallest_ratio),
                (lines * line_bytes) as f64,
            )
        }));
    }

    all_points.extend(points.last());
    all_points
}

/// A phase's points in a cache that others share. Lines between two uses of a line are spread over the sets at random,
/// in part. A set with more of them than on average evicts the line although the cache has room, and one with fewer
/// keeps it although the cache has none (Smith 1978). Rates are means over the sets, with the whole cache too: a
/// working set as large as the cache has conflict misses alone, and loses the less beside others. Where other systems
/// fill the cache, a set's lines are evicted by their age, wherever they lie.
pub fn average_over_sets(points: &[SizePoint], cache: &CacheSpec) -> Vec<SizePoint> {
    let (Some(first_point), Some(last_point)) = (points.first(), points.last()) else {
        return Vec::new();
    };
    if cache.pool_bytes.is_some() {
        return points.to_vec();
    }

    let way_bytes = cache.size_bytes as f64 / f64::from(cache.ways);
    let relative_deviation = space_deviation(cache);
    // The share x of a set with room for its mean number of lines, at which x + z sqrt(x / 3 ways) fills the set.
    let room_shares = NORMAL_QUANTILES
        .iter()
        .flat_map(|quantile| [*quantile, -quantile])
        .map(|quantile| {
            let half_deviation = 0.5 * quantile * relative_deviation;
            let root = libm::sqrt(1.0 + half_deviation * half_deviation) - half_deviation;
            root * root
        });
    let room_shares: Vec<f64> = room_shares.collect();
    let average_at = |size_bytes: f64| {
        room_shares
            .iter()
            .enumerate()
            .fold(*first_point, |average, (index, room_share)| {
                let point = rates_at_size(points, first_point, size_bytes * room_share);
                interpolate_rates(&average, &point, 1.0 / (index + 1) as f64, size_bytes)
            })
    };

    let full_size = last_point.size_bytes.min(cache.size_bytes as f64);
    let inner_sizes = (1..cache.ways)
        .map(|ways| f64::from(ways) * way_bytes)
        .filter(|size| *size < full_size)
        .chain([full_size])
        .filter(|size| *size > first_point.size_bytes);
    std::iter::once(*first_point)
        .chain(inner_sizes.map(average_at))
        .collect()
}

/// One standard deviation of the number of lines in a set, as a share of its ways. Lines that fall into the sets at
/// random have a variance equal to their mean; consecutive pages have none. In between, all deviations are equally
/// likely.
pub fn space_deviation(cache: &CacheSpec) -> f64 {
    1.0 / libm::sqrt(3.0 * f64::from(cache.ways))
}

/// The rates at a size, interpolated over its logarithm.
fn rates_at_size(points: &[SizePoint], first_point: &SizePoint, size_bytes: f64) -> SizePoint {
    let upper = points.partition_point(|point| point.size_bytes <= size_bytes);
    let low_point = upper
        .checked_sub(1)
        .map_or(first_point, |index| &points[index]);
    let Some(high_point) = points.get(upper).filter(|_| upper > 0) else {
        return *low_point;
    };
    let log_ratio = |size_bytes: f64| libm::log(size_bytes / low_point.size_bytes);
    interpolate_rates(
        low_point,
        high_point,
        log_ratio(size_bytes) / log_ratio(high_point.size_bytes),
        size_bytes,
    )
}

/// `share` is 0 at `low` and 1 at `high`.
pub(super) fn interpolate_rates(
    low: &SizePoint,
    high: &SizePoint,
    share: f64,
    size_bytes: f64,
) -> SizePoint {
    let interpolate = |low: f64, high: f64| low + share * (high - low);
    let unprefetched = low
        .without_prefetch
        .zip(high.without_prefetch)
        .map(|(low, high)| UnprefetchedRates {
            cycles_per_instr: interpolate(low.cycles_per_instr, high.cycles_per_instr),
            demand_fills_per_instr: interpolate(
                low.demand_fills_per_instr,
                high.demand_fills_per_instr,
            ),
            writebacks_per_instr: interpolate(low.writebacks_per_instr, high.writebacks_per_instr),
            memory_stall_cycles_per_instr: interpolate(
                low.memory_stall_cycles_per_instr,
                high.memory_stall_cycles_per_instr,
            ),
        });

    SizePoint {
        size_bytes,
        cycles_per_instr: interpolate(low.cycles_per_instr, high.cycles_per_instr),
        demand_fills_per_instr: interpolate(
            low.demand_fills_per_instr,
            high.demand_fills_per_instr,
        ),
        prefetch_fills_per_instr: interpolate(
            low.prefetch_fills_per_instr,
            high.prefetch_fills_per_instr,
        ),
        writebacks_per_instr: interpolate(low.writebacks_per_instr, high.writebacks_per_instr),
        memory_stall_cycles_per_instr: interpolate(
            low.memory_stall_cycles_per_instr,
            high.memory_stall_cycles_per_instr,
        ),
        without_prefetch: unprefetched,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_interval::closed_form;

    /// Does a cyclic working set as large as the cache keep its cliff, and a random one its slope?
    #[test]
    fn a_cyclic_set_keeps_its_cliff_and_a_random_one_its_slope() {
        let cyclic = DistanceHistogram::new(0, [(4095, 1000)]);
        let mut points = closed_form::stream_phase(64.0, 4096.0, 0.1).points;
        points.push(SizePoint {
            size_bytes: 4096.0 * 64.0,
            demand_fills_per_instr: 0.0,
            ..points[0]
        });
        points[0].size_bytes = 3072.0 * 64.0;
        let fills = |histogram: &DistanceHistogram| {
            let all_points = points_by_distances(&points, histogram, 512.0 * 64.0, 64);
            all_points
                .iter()
                .map(|point| (point.size_bytes / 64.0, point.demand_fills_per_instr))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            fills(&cyclic),
            [(3072.0, 0.1), (3584.0, 0.1), (4096.0, 0.0)]
        );
        let uniform = DistanceHistogram::new(0, (0..4096).map(|distance| (distance, 1)));
        assert_eq!(
            fills(&uniform),
            [(3072.0, 0.1), (3584.0, 0.05), (4096.0, 0.0)]
        );
        // A step that ends within the line after a known size, or after the step before, adds no second point of it.
        for step_lines in [1536.25, 0.5] {
            let steps = points_by_distances(&points, &uniform, step_lines * 64.0, 64);
            assert!(steps.is_sorted_by(|one, next| one.size_bytes < next.size_bytes));
        }
    }

    /// Does a cyclic working set that fills the cache miss in half of the sets alone, and lose the other hits set by
    /// set as others take space, does one of half the cache keep its own, and do rates without a cliff stay as they
    /// are?
    #[test]
    fn a_cliff_is_spread_over_sets() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let cache = machine.last_level_cache().unwrap();
        let way_bytes = (cache.size_bytes / 16) as f64;
        let first = closed_form::stream_phase(64.0, 4096.0, 0.1).points[0];
        let fills_by_ways = |curve: &[(f64, f64)]| -> Vec<f64> {
            let point = |&(ways, fills): &(f64, f64)| SizePoint {
                size_bytes: way_bytes * ways,
                demand_fills_per_instr: fills,
                ..first
            };
            let points: Vec<SizePoint> = curve.iter().map(point).collect();
            average_over_sets(&points, cache)
                .iter()
                .map(|point| point.demand_fills_per_instr)
                .collect()
        };
        let full = fills_by_ways(&[(1.0, 0.3), (15.99, 0.3), (16.0, 0.0)]);
        assert_eq!((full.len(), full[7]), (16, 0.3));
        // Alone, half of the sets have more lines than room.
        assert!((full[15] / 0.3 - 0.5).abs() < 1e-9, "{full:?}");

        // One line of others in each set, at random: a set has none with probability 1/e.
        assert!(
            (full[14] / 0.3 - 0.63).abs() < 0.1 && full[12] > full[14],
            "{full:?}"
        );
        let half = fills_by_ways(&[(1.0, 0.3), (7.99, 0.3), (8.0, 0.0), (16.0, 0.0)]);
        assert!(
            half[6] > 0.15 && half[7] > 0.1 && half[7] < 0.2 && half[11] < 1e-12,
            "{half:?}"
        );
        assert!(
            fills_by_ways(&[(1.0, 0.3), (16.0, 0.3)])
                .iter()
                .all(|fills| (fills - 0.3).abs() < 1e-12)
        );
    }
}
