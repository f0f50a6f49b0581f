//! Tables of a phase's rates by size of the contended cache, and the growth of its footprint, which
//! follows from its fills.
//!
//! Occupancies change in every step, so rates are needed at any size, and the footprint after any
//! number of instructions; a profile has both at a few sizes. Points are interpolated monotonically
//! over the logarithm of the size, because curves bend at working sets whatever the unit, and
//! tabulated at equal steps of the capacity. The footprint needs no measurement of its own: a
//! program that starts with an empty cache gains a line with every fill, and with `s` resident
//! lines it fills at the rate that it has alone in a cache of `s` lines. This is footprint theory,
//! in which the miss rate is the derivative of the footprint (Xiang et al., ASPLOS 2013). The
//! window in which the program touches `s` lines therefore lasts `∫ ds / fills(s)` instructions.
//!
//! For example, a loop over 1,000 lines fetches 0.01 lines an instruction as long as they do not
//! fit, and none beyond. It has touched all of them after 1,000 / 0.01 = 100,000 instructions, and
//! 500 after half of that; its footprint grows no further.
//!
//! The footprint is concave where the curve falls, and never exceeds the capacity.

use cachemate_core::LineLifetimes;

use crate::memory::Prefetch;
use crate::program::{ProgramPhase, SizePoint, UnprefetchedRates};
use crate::synthetic_trace::DistanceDistribution;

/// Number of capacity steps in a table.
pub const STEPS: usize = 64;
const NODES: usize = STEPS + 1;

/// Rates of a phase at one size; lines are those of the contended cache.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[repr(C)]
pub struct SizeRates {
    pub cycles_per_instr: f32,
    pub stall_per_instr: f32,
    /// Demand misses per instruction.
    pub demand_per_instr: f32,
    /// Demand misses and prefetched lines per instruction.
    pub fills_per_instr: f32,
    pub writebacks_per_instr: f32,
    /// Number of instructions in which the program touches as many lines as this size holds.
    window_instr: f32,
    padding: [f32; 2],
}

/// Number of instructions that represents "never": the window of a footprint that has stopped growing.
const NEVER_INSTR: f32 = 1e30;
/// Number of instructions after which a footprint counts as no longer growing within the time for which its lines stay
/// resident.
const STAGNANT_INSTR: f64 = 1e13;
/// Resident share from which a footprint counts as complete.
const COMPLETE_SHARE: f32 = 0.999;
/// Fill rates below this count as zero.
const NEGLIGIBLE_FILLS: f64 = 1e-12;

/// The tables of all phases of all programs, stored one after another.
#[derive(Clone, Debug, Default)]
pub struct PhaseCurves {
    with_prefetch: Vec<SizeRates>,
    /// Rates with prefetchers off; equal to `with_prefetch` if they were not measured.
    without_prefetch: Vec<SizeRates>,
    lines_per_step: f32,
    steps_per_line: f32,
    has_prefetch_data: Vec<bool>,
    /// Stall cycles of a miss without prefetchers, by phase.
    miss_cost_cycles: Vec<f32>,
    /// Maximum occupancy by phase; the value lies between two steps.
    footprint_lines: Vec<f32>,
    references_per_instr: Vec<f32>,
    /// Size of a private cache above this one.
    private_bytes: f64,
    /// Share of a stream's lines that take space as under LRU.
    stream_insertion: f64,
    /// How lines leave a cache that other systems fill too; `None` under LRU.
    lifetimes: Option<LineLifetimes>,
}

impl PhaseCurves {
    /// Creates empty tables for a cache of `capacity_lines` lines.
    pub fn new(capacity_lines: f64) -> Self {
        let lines_per_step = (capacity_lines / STEPS as f64) as f32;
        PhaseCurves {
            lines_per_step,
            steps_per_line: 1.0 / lines_per_step,
            stream_insertion: 1.0,
            ..PhaseCurves::default()
        }
    }

    /// Sets the size of a private cache. A program with no more lines in the contended cache reuses none of them,
    /// because the private cache has them too. Smaller sizes therefore have the rates of the smallest measured size, if
    /// that is no larger than a private cache.
    pub fn with_private_bytes(self, private_bytes: f64) -> Self {
        PhaseCurves {
            private_bytes,
            ..self
        }
    }

    /// Sets the share of a stream's lines that take space as under LRU. A program's stream is what it fills with the
    /// whole cache to itself: those lines are not touched again before the cache evicts them.
    pub fn with_stream_insertion(self, stream_insertion: f64) -> Self {
        PhaseCurves {
            stream_insertion,
            ..self
        }
    }

    /// Lets lines leave at random, as where other systems fill the cache too.
    pub fn with_lifetimes(self, lifetimes: Option<LineLifetimes>) -> Self {
        PhaseCurves { lifetimes, ..self }
    }

    pub fn capacity_lines(&self) -> f32 {
        self.lines_per_step * STEPS as f32
    }

    /// The phase must have been checked; the other methods take the number that this returns.
    pub fn add(&mut self, phase: &ProgramPhase, line_bytes: f64, latency_cycles: f64) -> u32 {
        let step = f64::from(self.lines_per_step);
        let footprint = phase
            .footprint_bytes
            .map_or(f64::INFINITY, |bytes| bytes / line_bytes);
        let build_table = |without_prefetch: bool| -> Vec<SizeRates> {
            let joined_curve =
                JoinedCurve::new(phase, latency_cycles, without_prefetch, self.private_bytes);
            let mut nodes: Vec<SizeRates> = (0..NODES)
                .map(|index| joined_curve.rates_at_size(index as f64 * step * line_bytes))
                .collect();
            fill_windows(&mut nodes, step, footprint, self.stream_insertion);
            if let Some(lifetimes) = self.lifetimes {
                let_lines_leave_at_random(&mut nodes, step, footprint, lifetimes);
            }
            nodes
        };

        let number = self.has_prefetch_data.len() as u32;
        let has_prefetch_data = phase
            .points
            .iter()
            .any(|point| point.without_prefetch.is_some());
        let table_with_prefetch = build_table(false);
        if has_prefetch_data {
            self.without_prefetch.extend(build_table(true))
        } else {
            self.without_prefetch
                .extend_from_slice(&table_with_prefetch)
        }

        self.with_prefetch.extend(table_with_prefetch);
        self.footprint_lines
            .push(footprint.min(f64::from(self.capacity_lines())) as f32);
        let unprefetched_rates = phase
            .points
            .iter()
            .filter_map(|point| point.without_prefetch);
        let (stall, fills) = unprefetched_rates.fold((0.0, 0.0), |(stall, fills), rates| {
            (
                stall + rates.memory_stall_cycles_per_instr,
                fills + rates.demand_fills_per_instr,
            )
        });
        self.miss_cost_cycles.push(if fills > NEGLIGIBLE_FILLS {
            (stall / fills) as f32
        } else {
            latency_cycles as f32
        });
        self.has_prefetch_data.push(has_prefetch_data);
        self.references_per_instr
            .push(phase.references_per_instr as f32);
        number
    }

    /// Rates with `lines` resident lines if a share `dropped_share` of the prefetches is dropped.
    #[inline]
    pub fn rates_at(&self, curve: u32, lines: f32, dropped_share: f32) -> SizeRates {
        let first_node = curve as usize * NODES;
        // A program whose whole footprint is resident misses as often as with the whole cache.
        let is_footprint_resident = lines >= COMPLETE_SHARE * self.footprint_lines[curve as usize];
        let lines = if is_footprint_resident {
            self.capacity_lines()
        } else {
            lines
        };
        let rates_with_prefetch =
            self.interpolate(&self.with_prefetch[first_node..first_node + NODES], lines);
        if dropped_share <= 0.0 || !self.has_prefetch_data[curve as usize] {
            return rates_with_prefetch;
        }
        let rates_without_prefetch = self.interpolate(
            &self.without_prefetch[first_node..first_node + NODES],
            lines,
        );
        interpolate(&rates_with_prefetch, &rates_without_prefetch, dropped_share)
    }

    /// Cycles per instruction at one size with and without prefetchers.
    pub fn prefetch_benefit(&self, curve: u32, lines: f32, late_share: f32) -> Prefetch {
        let cycles_per_instr_at =
            |dropped_share: f32| self.rates_at(curve, lines, dropped_share).cycles_per_instr;
        Prefetch {
            aided_cycles: cycles_per_instr_at(0.0),
            unaided_cycles: cycles_per_instr_at(1.0),
            late_share,
        }
    }

    /// The part of the stall that demand misses cause, each at its cost without prefetchers. Late
    /// prefetched lines cause the remaining stall.
    #[inline]
    pub fn demand_stall_per_instr(&self, curve: u32, rates: &SizeRates) -> f32 {
        if !self.has_prefetch_data[curve as usize] {
            return rates.stall_per_instr;
        }
        (rates.demand_per_instr * self.miss_cost_cycles[curve as usize]).min(rates.stall_per_instr)
    }

    /// Cycles with the whole cache and with prefetchers.
    #[inline]
    pub fn solo_cycles_per_instr(&self, curve: u32) -> f32 {
        self.with_prefetch[curve as usize * NODES + STEPS].cycles_per_instr
    }

    #[inline]
    fn interpolate(&self, nodes: &[SizeRates], lines: f32) -> SizeRates {
        let position = (lines * self.steps_per_line).clamp(0.0, STEPS as f32);
        let low = (position as usize).min(STEPS - 1);
        interpolate(&nodes[low], &nodes[low + 1], position - low as f32)
    }

    /// Lines touched in a window of this many of the program's own instructions, and those added by
    /// each further instruction. The search starts at `hint`, the position of the previous result,
    /// and updates it.
    #[inline]
    pub fn window_footprint(&self, curve: u32, window_instr: f64, hint: &mut u8) -> (f32, f32) {
        let nodes = &self.with_prefetch[curve as usize * NODES..(curve as usize + 1) * NODES];
        let window = window_instr as f32;
        let mut index = usize::from(*hint);
        while index < STEPS - 1 && nodes[index + 1].window_instr <= window {
            index += 1;
        }
        while index > 0 && nodes[index].window_instr > window {
            index -= 1;
        }
        *hint = index as u8;
        let (low, high) = (nodes[index].window_instr, nodes[index + 1].window_instr);
        if window >= high {
            return (self.footprint_lines[curve as usize], 0.0);
        }

        let slope = self.lines_per_step / (high - low);
        let lines = self.lines_per_step * index as f32 + slope * (window - low);
        let max_lines = self.footprint_lines[curve as usize];
        if lines < max_lines {
            (lines, slope)
        } else {
            (max_lines, 0.0)
        }
    }

    /// Lines touched by the end of a window, if `start_lines` had been touched before it.
    #[inline]
    pub fn footprint_after(
        &self,
        curve: u32,
        start_lines: f32,
        window_instr: f64,
        hint: &mut u8,
    ) -> f32 {
        let instr_to_start = self.window_instr(curve, start_lines);
        if instr_to_start >= STAGNANT_INSTR {
            start_lines
        } else {
            self.window_footprint(curve, instr_to_start + window_instr, hint)
                .0
                .max(start_lines)
        }
    }

    /// Shares of a phase's references that hit within a given number of lines of the LRU stack, if
    /// a share `dropped_share` of the prefetches is dropped. A prefetched line counts as a hit, and
    /// a dropped prefetch as none, as in the counters of [`PhaseCurves::rates_at`].
    pub fn distance_distribution(&self, curve: u32, dropped_share: f32) -> DistanceDistribution {
        let first_node = curve as usize * NODES;
        let demand_at = |index: usize| {
            let tables = [&self.with_prefetch, &self.without_prefetch];
            let [aided, unaided] = tables.map(|table| table[first_node + index].demand_per_instr);
            aided + dropped_share * (unaided - aided)
        };
        let references = self.references_per_instr[curve as usize];
        let total_demand = references.max(demand_at(0)).max(f32::MIN_POSITIVE);
        let mut max_hit_share = 0.0f32;
        let bound_of = |index: usize| {
            max_hit_share = max_hit_share.max(1.0 - demand_at(index) / total_demand);
            (self.lines_per_step * index as f32, max_hit_share)
        };
        DistanceDistribution {
            bounds: (1..NODES).map(bound_of).collect(),
        }
    }

    /// The inverse of [`PhaseCurves::window_footprint`]: the program's own instructions in which
    /// `lines` lines are touched.
    pub fn window_instr(&self, curve: u32, lines: f32) -> f64 {
        let nodes = &self.with_prefetch[curve as usize * NODES..(curve as usize + 1) * NODES];
        f64::from(self.interpolate(nodes, lines).window_instr).min(f64::from(NEVER_INSTR))
    }
}

#[inline]
fn interpolate(low: &SizeRates, high: &SizeRates, share: f32) -> SizeRates {
    let interpolate_linearly = |low: f32, high: f32| low + share * (high - low);
    SizeRates {
        cycles_per_instr: interpolate_linearly(low.cycles_per_instr, high.cycles_per_instr),
        stall_per_instr: interpolate_linearly(low.stall_per_instr, high.stall_per_instr),
        demand_per_instr: interpolate_linearly(low.demand_per_instr, high.demand_per_instr),
        fills_per_instr: interpolate_linearly(low.fills_per_instr, high.fills_per_instr),
        writebacks_per_instr: interpolate_linearly(
            low.writebacks_per_instr,
            high.writebacks_per_instr,
        ),
        window_instr: interpolate_linearly(low.window_instr, high.window_instr),
        padding: [0.0; 2],
    }
}

/// Fills in `window_instr` of each node by integrating over sizes, with the mean fill rate of each step. Of the lines
/// that miss even with the whole cache, only a share counts, because they are inserted low and displace each other.
fn fill_windows(
    nodes: &mut [SizeRates],
    lines_per_step: f64,
    footprint_lines: f64,
    stream_insertion: f64,
) {
    let stream_fills = f64::from(nodes[nodes.len() - 1].fills_per_instr);

    let mut window = 0.0f64;
    for index in 1..nodes.len() {
        let fills = 0.5
            * (f64::from(nodes[index - 1].fills_per_instr)
                + f64::from(nodes[index].fills_per_instr));
        let lasting_fills = fills - (1.0 - stream_insertion) * stream_fills.min(fills);
        window += lines_per_step / lasting_fills.max(NEGLIGIBLE_FILLS);
        // The step in which the footprint ends is a whole one; occupancy is clipped at the footprint.
        if (index - 1) as f64 * lines_per_step > footprint_lines {
            window = f64::from(NEVER_INSTR);
        }
        nodes[index].window_instr = window.min(f64::from(NEVER_INSTR)) as f32;
    }
}

/// Equally likely lifetimes that stand for all.
const LIFETIMES: usize = 8;
/// Halvings of the logarithm of a window that is looked for.
const HALVINGS: usize = 40;

/// Windows and rates of a phase under LRU.
struct LruTable<'a> {
    nodes: &'a [SizeRates],
    lines_per_step: f64,
    footprint_lines: f64,
}

impl LruTable<'_> {
    /// Where a window ends between two nodes, in nodes; beyond the last one for a stream, which touches new lines for ever.
    fn position_of(&self, window_instr: f64) -> f64 {
        let window_at = |index: usize| f64::from(self.nodes[index].window_instr);
        let upper = self
            .nodes
            .partition_point(|node| f64::from(node.window_instr) <= window_instr)
            .clamp(1, STEPS);
        let (low, high) = (window_at(upper - 1), window_at(upper));
        (upper - 1) as f64 + (window_instr - low) / (high - low).max(f64::MIN_POSITIVE)
    }

    /// Lines that are touched in a window.
    fn lines_within(&self, window_instr: f64) -> f64 {
        (self.position_of(window_instr) * self.lines_per_step).min(self.footprint_lines)
    }

    /// Fills without a line of its own, and with the whole cache: the others are references to lines that come back.
    fn range_of_fills(&self) -> (f64, f64) {
        let fills_at = |index: usize| f64::from(self.nodes[index].fills_per_instr);
        (fills_at(0), fills_at(STEPS))
    }

    /// The share of the references to lines that come back that do so within a window.
    fn reused_share_within(&self, window_instr: f64) -> f64 {
        let position = self.position_of(window_instr).min(STEPS as f64);
        let low = (position as usize).min(STEPS - 1);
        let share = (position - low as f64) as f32;
        let rates = interpolate(&self.nodes[low], &self.nodes[low + 1], share);
        let (most, least) = self.range_of_fills();
        ((most - f64::from(rates.fills_per_instr)) / (most - least)).clamp(0.0, 1.0)
    }

    /// The rates at which this share of these references hits.
    fn rates_with_hits(&self, hit_share: f64) -> SizeRates {
        let (most, least) = self.range_of_fills();
        let fills = (most - hit_share * (most - least)) as f32;
        node_where(self.nodes, |node| node.fills_per_instr, fills)
    }
}

/// Replaces the rates of nodes under LRU, and their windows, by those in a cache whose lines leave at random.
///
/// If a line that was touched again stays for a window `T` in the mean, a program holds the mean of its footprints over the
/// windows for which lines stay. Of its references to lines that come back at all, shares do so before a new line has left and
/// before another has, from which [`LineLifetimes::hit_share`] follows. For example, under LRU a loop of 1,000 lines that
/// comes round in `T` always hits if `T` is a little longer, and never if it is shorter. Here it holds 630 lines if new lines
/// stay as long as others, and `exp(-1)`, or 37 of 100, outlive a round.
fn let_lines_leave_at_random(
    nodes: &mut [SizeRates],
    lines_per_step: f64,
    footprint_lines: f64,
    lifetimes: LineLifetimes,
) {
    let lru_nodes = nodes.to_vec();
    let lru = LruTable {
        nodes: &lru_nodes,
        lines_per_step,
        footprint_lines,
    };
    let (most_fills, least_fills) = lru.range_of_fills();
    if most_fills - least_fills <= NEGLIGIBLE_FILLS {
        return;
    }
    let [new_times, times] = lifetimes.equally_likely::<LIFETIMES>();
    let mean_of = |times: [f64; LIFETIMES], value_within: &dyn Fn(f64) -> f64| {
        times.map(value_within).iter().sum::<f64>() / LIFETIMES as f64
    };
    let lines_at = |window: f64| mean_of(times, &|time| lru.lines_within(time * window));

    let mut previous_window = f64::from(f32::MIN_POSITIVE);
    for (index, node) in nodes.iter_mut().enumerate().skip(1) {
        let previous_lines = (index - 1) as f64 * lines_per_step;
        let resident_lines = f64::from(COMPLETE_SHARE) * footprint_lines;
        let lines = resident_lines.min(index as f64 * lines_per_step);
        if lines <= previous_lines {
            *node = SizeRates {
                window_instr: NEVER_INSTR,
                ..lru_nodes[STEPS]
            };
            continue;
        }
        let window = window_where(previous_window, |window| lines_at(window) >= lines);
        // A footprint that ends within the step is resident from there on.
        let step_share = (lines - previous_lines) / lines_per_step;
        let window_at_node = previous_window + (window - previous_window) / step_share;
        let rates = if lines < resident_lines {
            let new_share = mean_of(new_times, &|time| lru.reused_share_within(time * window));
            let again_share = mean_of(times, &|time| lru.reused_share_within(time * window));
            lru.rates_with_hits(LineLifetimes::hit_share(new_share, again_share))
        } else {
            lru_nodes[STEPS]
        };
        *node = SizeRates {
            window_instr: window_at_node.min(f64::from(NEVER_INSTR)) as f32,
            ..rates
        };
        previous_window = window;
    }
}

/// The shortest window, longer than `low` and up to "never", from which on a statement holds.
fn window_where(low: f64, holds_at: impl Fn(f64) -> bool) -> f64 {
    let (mut low, mut high) = (libm::log(low), libm::log(f64::from(NEVER_INSTR)));
    for _ in 0..HALVINGS {
        let middle = 0.5 * (low + high);
        if holds_at(libm::exp(middle)) {
            high = middle;
        } else {
            low = middle;
        }
    }
    libm::exp(high)
}

/// The rates between the first two nodes between which a value reaches the target; those of the last node if it never does.
fn node_where(nodes: &[SizeRates], value_of: impl Fn(&SizeRates) -> f32, target: f32) -> SizeRates {
    for pair in nodes.windows(2) {
        let [low, high] = [value_of(&pair[0]), value_of(&pair[1])];
        if low.min(high) <= target && target <= low.max(high) {
            let share = if high == low {
                0.0
            } else {
                (target - low) / (high - low)
            };
            return interpolate(&pair[0], &pair[1], share);
        }
    }
    nodes[nodes.len() - 1]
}

/// The points of a phase joined to curves, with or without prefetchers.
struct JoinedCurve {
    sizes_bytes: Vec<f64>,
    /// Logarithms of the sizes, by point.
    logs: Vec<f64>,
    /// Rates by point.
    rates: Vec<SizeRates>,
    /// Rates at size zero.
    rates_at_zero: SizeRates,
}

impl JoinedCurve {
    fn new(
        phase: &ProgramPhase,
        latency_cycles: f64,
        without_prefetch: bool,
        private_bytes: f64,
    ) -> Self {
        let smallest_point = phase.points[0];
        let zero_point = match smallest_point.size_bytes <= private_bytes {
            true => smallest_point,
            false => without_lines(phase, latency_cycles),
        };

        let point_sizes = || phase.points.iter().map(|point| point.size_bytes);
        JoinedCurve {
            sizes_bytes: point_sizes().collect(),
            logs: point_sizes().map(libm::log).collect(),
            rates: phase
                .points
                .iter()
                .map(|point| rates_of(point, without_prefetch))
                .collect(),
            rates_at_zero: rates_of(&zero_point, without_prefetch),
        }
    }

    fn rates_at_size(&self, size_bytes: f64) -> SizeRates {
        let last_index = self.rates.len() - 1;
        if size_bytes <= self.sizes_bytes[0] {
            return interpolate(
                &self.rates_at_zero,
                &self.rates[0],
                (size_bytes / self.sizes_bytes[0]) as f32,
            );
        }
        if size_bytes >= self.sizes_bytes[last_index] {
            return self.rates[last_index];
        }
        let upper = self.sizes_bytes.partition_point(|size| *size <= size_bytes);
        let log_size = libm::log(size_bytes);
        let interpolate_field = |field: fn(&SizeRates) -> f32| {
            let curve_point =
                |index: usize| Some((*self.logs.get(index)?, f64::from(field(&self.rates[index]))));
            let previous_point = upper.checked_sub(2).and_then(curve_point);
            let ends = curve_point(upper - 1).zip(curve_point(upper));
            ends.map_or(0.0, |ends| {
                interpolate_monotone(log_size, previous_point, ends, curve_point(upper + 1)) as f32
            })
        };
        SizeRates {
            cycles_per_instr: interpolate_field(|rates| rates.cycles_per_instr),
            stall_per_instr: interpolate_field(|rates| rates.stall_per_instr),
            demand_per_instr: interpolate_field(|rates| rates.demand_per_instr),
            fills_per_instr: interpolate_field(|rates| rates.fills_per_instr),
            writebacks_per_instr: interpolate_field(|rates| rates.writebacks_per_instr),
            ..SizeRates::default()
        }
    }
}

/// Rates if every reference is a miss. A miss costs as much as one at the smallest measured size
/// without prefetchers, because those that prefetchers leave are mostly waits for their lines.
fn without_lines(phase: &ProgramPhase, latency_cycles: f64) -> SizePoint {
    let smallest_point = phase.points[0];
    let (stall, misses) = match smallest_point.without_prefetch {
        Some(rates) => (
            rates.memory_stall_cycles_per_instr,
            rates.demand_fills_per_instr,
        ),
        None => (
            smallest_point.memory_stall_cycles_per_instr,
            smallest_point.demand_fills_per_instr,
        ),
    };
    let miss_cost_cycles = if misses > NEGLIGIBLE_FILLS {
        (stall / misses).min(latency_cycles)
    } else {
        latency_cycles
    };

    let demand_per_instr = phase
        .references_per_instr
        .max(smallest_point.demand_fills_per_instr);
    let added_cycles =
        |demand_fills: f64| miss_cost_cycles * (demand_per_instr - demand_fills).max(0.0);
    let unprefetched_rates =
        smallest_point
            .without_prefetch
            .map(|unprefetched| UnprefetchedRates {
                cycles_per_instr: unprefetched.cycles_per_instr
                    + added_cycles(unprefetched.demand_fills_per_instr),
                demand_fills_per_instr: demand_per_instr.max(unprefetched.demand_fills_per_instr),
                memory_stall_cycles_per_instr: unprefetched.memory_stall_cycles_per_instr
                    + added_cycles(unprefetched.demand_fills_per_instr),
                ..unprefetched
            });

    let extra_cycles = added_cycles(smallest_point.demand_fills_per_instr);
    SizePoint {
        size_bytes: 0.0,
        cycles_per_instr: smallest_point.cycles_per_instr + extra_cycles,
        demand_fills_per_instr: demand_per_instr,
        memory_stall_cycles_per_instr: smallest_point.memory_stall_cycles_per_instr + extra_cycles,
        without_prefetch: unprefetched_rates,
        ..smallest_point
    }
}

type CurvePosition = (f64, f64);

/// Interpolates between two points by a cubic that rises or falls only if the points do (Fritsch and Butland, SIAM
/// 1984). The points beside the two determine the slopes at the ends.
fn interpolate_monotone(
    position: f64,
    before: Option<CurvePosition>,
    (low, high): (CurvePosition, CurvePosition),
    after: Option<CurvePosition>,
) -> f64 {
    let secant_slope = |a: CurvePosition, b: CurvePosition| (b.1 - a.1) / (b.0 - a.0);
    let (width, own_secant) = (high.0 - low.0, secant_slope(low, high));
    let end_slope = |adjacent: Option<(f64, f64)>| match adjacent {
        None => own_secant,
        Some((_, adjacent_secant)) if adjacent_secant * own_secant <= 0.0 => 0.0,
        // The harmonic mean, weighted by the width of the other interval.
        Some((adjacent_width, adjacent_secant)) => {
            let (own_weight, other_weight) =
                (2.0 * adjacent_width + width, adjacent_width + 2.0 * width);
            (own_weight + other_weight) / (own_weight / own_secant + other_weight / adjacent_secant)
        }
    };
    let low_slope = end_slope(before.map(|before| (low.0 - before.0, secant_slope(before, low))));
    let high_slope = end_slope(after.map(|after| (after.0 - high.0, secant_slope(high, after))));

    let t = (position - low.0) / width;
    let (complement, product) = (1.0 - t, t * (1.0 - t));
    low.1 * complement * complement * (1.0 + 2.0 * t)
        + high.1 * t * t * (3.0 - 2.0 * t)
        + width * product * (complement * low_slope - t * high_slope)
}

fn rates_of(point: &SizePoint, without_prefetch: bool) -> SizeRates {
    let (cycles, demand, fills, writebacks, stall) =
        match point.without_prefetch.filter(|_| without_prefetch) {
            Some(unprefetched) => (
                unprefetched.cycles_per_instr,
                unprefetched.demand_fills_per_instr,
                unprefetched.demand_fills_per_instr,
                unprefetched.writebacks_per_instr,
                unprefetched.memory_stall_cycles_per_instr,
            ),
            None => (
                point.cycles_per_instr,
                point.demand_fills_per_instr,
                point.demand_fills_per_instr + point.prefetch_fills_per_instr,
                point.writebacks_per_instr,
                point.memory_stall_cycles_per_instr,
            ),
        };

    SizeRates {
        cycles_per_instr: cycles as f32,
        stall_per_instr: stall as f32,
        demand_per_instr: demand as f32,
        fills_per_instr: fills as f32,
        writebacks_per_instr: writebacks as f32,
        window_instr: 0.0,
        padding: [0.0; 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::closed_form;

    const LINES: f64 = 65_536.0;

    /// Does a footprint that is computed from fills equal the closed form for a linearly falling curve?
    #[test]
    fn the_footprint_of_a_linear_curve_is_an_exponential() {
        // fills(s) = a (1 - s / b): s(n) = b (1 - exp(-a n / b)).
        let (a, b) = (0.02, 50_000.0);
        let phase =
            closed_form::build_phase(64.0, LINES, 256, |lines| a * (1.0 - lines / b).max(0.0));
        let mut curves = PhaseCurves::new(LINES);
        let curve = curves.add(&phase, 64.0, 200.0);
        for instr in [1e4, 1e5, 1e6, 3e6, 1e7] {
            let mut hint = 0;
            let (lines, _) = curves.window_footprint(curve, instr, &mut hint);
            let expected = b * (1.0 - libm::exp(-a * instr / b));
            assert!(
                (f64::from(lines) / expected - 1.0).abs() < 0.02,
                "{instr}: {lines} {expected}"
            );
            let round_trip = curves.window_instr(curve, lines);
            assert!(
                (round_trip / instr - 1.0).abs() < 0.01 || expected > 0.99 * b,
                "{instr}: {round_trip}"
            );
        }
    }

    /// Do rates at the measured sizes equal the measured rates?
    #[test]
    fn rates_at_measured_sizes_are_the_measured_ones() {
        let phase =
            closed_form::build_phase(64.0, LINES, 8, |lines| 0.03 / (1.0 + lines / 10_000.0));
        let mut curves = PhaseCurves::new(LINES);
        let curve = curves.add(&phase, 64.0, 200.0);
        for point in &phase.points {
            let lines = (point.size_bytes / 64.0) as f32;
            let rates = curves.rates_at(curve, lines, 0.0);
            assert!(
                (f64::from(rates.demand_per_instr) / point.demand_fills_per_instr - 1.0).abs()
                    < 1e-3,
                "{point:?}"
            );
            assert!(
                (f64::from(rates.cycles_per_instr) / point.cycles_per_instr - 1.0).abs() < 1e-3,
                "{point:?}"
            );
        }
    }

    /// Without a cache, does a miss cost as much as at the smallest measured size without prefetchers, and is a size no
    /// larger than a private cache the end of the curve?
    #[test]
    fn a_program_without_lines_misses_as_often_as_in_a_private_cache() {
        let mut phase = closed_form::build_phase(64.0, LINES, 64, |_| 0.001);
        phase.references_per_instr = 0.1;
        phase.points[0].without_prefetch = Some(UnprefetchedRates {
            cycles_per_instr: 2.0,
            demand_fills_per_instr: 0.04,
            writebacks_per_instr: 0.0,
            memory_stall_cycles_per_instr: 1.6,
        });
        let step_bytes = phase.points[0].size_bytes;

        for (private_bytes, added_misses) in [(0.0, 0.099), (step_bytes, 0.0)] {
            let mut curves = PhaseCurves::new(LINES).with_private_bytes(private_bytes);
            let curve = curves.add(&phase, 64.0, 300.0);
            let rates =
                [0.0, step_bytes / 64.0].map(|lines| curves.rates_at(curve, lines as f32, 0.0));
            let difference =
                |field: fn(&SizeRates) -> f32| f64::from(field(&rates[0]) - field(&rates[1]));
            assert!(
                (difference(|rates| rates.demand_per_instr) - added_misses).abs() < 1e-5,
                "{rates:?}"
            );
            assert!(
                (difference(|rates| rates.cycles_per_instr) - 40.0 * added_misses).abs() < 1e-3,
                "{rates:?}"
            );
        }
    }

    /// Does the footprint of a program that fits the cache stop growing at its full size?
    #[test]
    fn a_footprint_that_fits_stops_growing() {
        let mut phase = closed_form::build_phase(64.0, LINES, 8, |_| 0.01);
        phase.footprint_bytes = Some(0.5 * 64.0 * LINES);
        let mut curves = PhaseCurves::new(LINES);
        let curve = curves.add(&phase, 64.0, 200.0);
        let (lines, _) = curves.window_footprint(curve, 1e12, &mut 0);
        assert!((f64::from(lines) / LINES - 0.5).abs() < 0.02, "{lines}");
    }

    /// Does a stream of which a quarter is inserted as under LRU take a quarter of the space in the same time, and a
    /// program that fits as much as before?
    #[test]
    fn a_stream_that_is_inserted_low_takes_less_space() {
        let footprint = |insertion: f64, phase: &ProgramPhase| {
            let mut curves = PhaseCurves::new(LINES).with_stream_insertion(insertion);
            let curve = curves.add(phase, 64.0, 200.0);
            curves.window_footprint(curve, 1e6, &mut 0).0
        };
        let stream = closed_form::stream_phase(64.0, LINES, 0.02);
        assert!((footprint(1.0, &stream) - 20_000.0).abs() < 100.0);
        assert!((footprint(0.25, &stream) - 5_000.0).abs() < 100.0);
        let fitting = closed_form::uniform_phase(64.0, LINES, 0.5 * LINES, 0.02);
        assert_eq!(footprint(0.25, &fitting), footprint(1.0, &fitting));
    }

    /// A phase in a cache whose lines leave at random, and misses and resident shares of it if a line that was touched again
    /// stays for this many instructions.
    struct RandomCache {
        curves: PhaseCurves,
        curve: u32,
        lines: f64,
        fills_per_instr: f64,
    }

    impl RandomCache {
        fn of(
            phase: &ProgramPhase,
            lines: f64,
            fills_per_instr: f64,
            lifetimes: LineLifetimes,
        ) -> Self {
            let mut curves = PhaseCurves::new(LINES).with_lifetimes(Some(lifetimes));
            let curve = curves.add(phase, 64.0, 200.0);
            RandomCache {
                curves,
                curve,
                lines,
                fills_per_instr,
            }
        }

        fn resident_and_hit_share(&self, lifetime_instr: f64) -> (f64, f64) {
            let (resident, _) = self
                .curves
                .window_footprint(self.curve, lifetime_instr, &mut 0);
            let rates = self.curves.rates_at(self.curve, resident, 0.0);
            let hit_share = 1.0 - f64::from(rates.fills_per_instr) / self.fills_per_instr;
            (f64::from(resident) / self.lines, hit_share)
        }
    }

    /// Does a loop keep as many lines, and hit as often, as lines that leave at random outlive a round, however long it is?
    #[test]
    fn a_loop_loses_lines_gradually_where_they_leave_at_random() {
        let (lines, fills) = (0.5 * LINES, 0.02);
        let round_instr = lines / fills;
        for probation_share in [0.3, 1.0] {
            let lifetimes = LineLifetimes::new(probation_share);
            let fills_at = |resident: f64| if resident < lines { fills } else { 0.0 };
            let phase = ProgramPhase {
                footprint_bytes: Some(64.0 * lines),
                ..closed_form::build_phase(64.0, LINES, 512, fills_at)
            };
            let cache = RandomCache::of(&phase, lines, fills, lifetimes);
            for round in [0.2, 0.5, 1.0, 2.0] {
                let (resident, hits) = cache.resident_and_hit_share(round_instr / round);
                let (new, again) = (lifetimes.new_share_left(round), lifetimes.share_left(round));
                let expected = LineLifetimes::hit_share(new, again);
                assert!((hits - expected).abs() < 0.13, "{round}: {hits} {expected}");
                let expected = lifetimes.resident_share(round);
                assert!(
                    (resident - expected).abs() < 0.05,
                    "{round}: {resident} {expected}"
                );
            }
        }
    }

    /// Do random references to a table hit as often as the closed form for independent references says, and does a table whose
    /// lines stay far longer than its references take always hit?
    #[test]
    fn independent_references_hit_as_in_closed_form() {
        let (lines, fills) = (0.5 * LINES, 0.02);
        let phase = closed_form::uniform_phase(64.0, LINES, lines, fills);
        for probation_share in [0.3, 1.0] {
            let cache = RandomCache::of(&phase, lines, fills, LineLifetimes::new(probation_share));
            for lifetime in [0.5, 1.0, 3.0] {
                let (_, hits) = cache.resident_and_hit_share(lifetime * lines / fills);
                // An exponential time outlives another one whose rate is 1 with the probability mean / (1 + mean).
                let outlives = |mean: f64| lifetime * mean / (1.0 + lifetime * mean);
                let new = outlives(probation_share);
                let last_stage = f64::max(probation_share, 0.5);
                let [first, last] = [1.0 - last_stage, last_stage].map(outlives);
                let again = first + (1.0 - first) * last;
                let expected = LineLifetimes::hit_share(new, again);
                assert!(
                    (hits - expected).abs() < 0.04,
                    "{lifetime}: {hits} {expected}"
                );
            }
            assert!(cache.resident_and_hit_share(1e3 * lines / fills).1 > 0.999);
        }
    }

    /// Does a program whose whole footprint is resident have no misses, even if the footprint ends between two steps?
    #[test]
    fn a_resident_footprint_has_no_misses() {
        for lines in [100.0, 1000.0, 30_000.0, 30_719.0, 30_721.0] {
            let mut curves = PhaseCurves::new(LINES);
            let curve = curves.add(
                &closed_form::uniform_phase(64.0, LINES, lines, 0.02),
                64.0,
                200.0,
            );
            let (resident, _) = curves.window_footprint(curve, 1e12, &mut 0);
            let rates = curves.rates_at(curve, resident, 0.0);
            assert!(
                rates.fills_per_instr < 1e-6,
                "{lines}: {resident} {rates:?}"
            );
            assert!(curves.rates_at(curve, 0.9 * resident, 0.0).fills_per_instr > 1e-3);
        }
    }

    /// Do rates change linearly from aided to unaided with the share of dropped prefetches, and does a log then miss as
    /// often as is counted?
    #[test]
    fn rates_change_linearly_with_dropped_prefetches() {
        let mut curves = PhaseCurves::new(LINES);
        let mut add_phase = |misses: &dyn Fn(f64) -> f64, references_per_miss: f64| {
            let mut phase = closed_form::build_phase(64.0, LINES, 4, misses);
            phase.references_per_instr *= references_per_miss;
            for point in &mut phase.points {
                point.without_prefetch = Some(UnprefetchedRates {
                    cycles_per_instr: 3.0 * point.cycles_per_instr,
                    demand_fills_per_instr: 3.0 * point.demand_fills_per_instr,
                    writebacks_per_instr: 0.0,
                    memory_stall_cycles_per_instr: 1.0,
                });
            }
            curves.add(&phase, 64.0, 200.0)
        };
        let curve = add_phase(&|_| 0.01, 1.0);
        let falling = add_phase(&|lines| 0.02 * (1.0 - lines / (2.0 * LINES)), 3.0);

        let (none, half) = (
            curves.rates_at(curve, 1000.0, 0.0),
            curves.rates_at(curve, 1000.0, 0.5),
        );
        assert!((half.cycles_per_instr / none.cycles_per_instr - 2.0).abs() < 1e-3);
        assert!((half.demand_per_instr - 0.02).abs() < 1e-4, "{half:?}");
        for dropped_share in [0.0, 0.5, 1.0] {
            let counted_misses = |lines: f32| {
                curves
                    .rates_at(falling, lines, dropped_share)
                    .demand_per_instr
            };
            let is_counted = |&(lines, share): &(f32, f32)| {
                ((1.0 - share) * 0.06 - counted_misses(lines)).abs() < 1e-4
            };
            let log = curves.distance_distribution(falling, dropped_share);
            assert!(
                log.bounds.iter().all(is_counted),
                "{dropped_share}: {:?}",
                log.bounds
            );
        }
    }

    /// Does the curve pass through its points, rise and fall only if they do, and lie below the chord of a convex
    /// decrease?
    #[test]
    fn points_are_joined_by_a_monotone_curve() {
        let falls = |x: f64| libm::exp(-x);
        let point = |x: f64| (x, falls(x));
        let join = |at: f64| {
            interpolate_monotone(
                at,
                Some(point(0.0)),
                (point(1.0), point(2.0)),
                Some(point(3.0)),
            )
        };
        assert!((join(1.0) - falls(1.0)).abs() < 1e-12 && (join(2.0) - falls(2.0)).abs() < 1e-12);
        let chord = 0.5 * (falls(1.0) + falls(2.0));
        assert!(
            (join(1.5) - falls(1.5)).abs() < 0.3 * (chord - falls(1.5)),
            "{} {}",
            join(1.5),
            falls(1.5)
        );
        let cliff = |at: f64| {
            interpolate_monotone(
                at,
                Some((0.0, 1.0)),
                ((1.0, 1.0), (2.0, 0.0)),
                Some((3.0, 0.0)),
            )
        };
        let values: Vec<f64> = (0..=20)
            .map(|step| cliff(1.0 + f64::from(step) / 20.0))
            .collect();
        assert!(
            values.is_sorted_by(|a, b| a >= b) && values[0] == 1.0 && values[20].abs() < 1e-12,
            "{values:?}"
        );
        assert!(
            (interpolate_monotone(1.25, None, ((1.0, 4.0), (2.0, 0.0)), None) - 3.0).abs() < 1e-12,
            "a line without others"
        );
    }
}
