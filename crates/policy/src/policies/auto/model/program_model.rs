//! The model of one task: misses by space, the cost of a miss, shared data, and the operator's goal.
//!
//! Method: the curve is sampled at equal steps of the largest cache, and made to fall. The growth of the footprint
//! follows from it: a program with `s` resident lines brings in lines at the miss rate of `s` lines. The number of
//! instructions until `s` lines are resident is therefore the integral of one over the miss rate (the footprint theory
//! of Xiang et al., HOTL, ASPLOS 2013). Cycles without misses are the measured cycles minus the measured cost of
//! misses. Properties: no value is guessed; if one is missing, the task has no model.

use cachemate_core::{Goal, Profile, SizeCurve};

use crate::policies::auto::evidence::speeds::ObservedSpeed;
use crate::work_metric::WorkMetric;

/// Number of steps of the curve.
pub const STEPS: usize = 64;
/// Differences up to this share of a curve's height are noise.
const SAME_SHARE: f64 = 0.03;
/// A count contradicts a curve only if it differs by more than both of these: as a share, and in misses per
/// instruction.
const CONTRADICTED_SHARE: f64 = 0.1;
const CONTRADICTED_FROM: f64 = 5e-4;
/// Upper bound of the factor between measured and composed occupancy.
const MAX_OCCUPANCY_ODDS: f64 = 5.0;
/// Lower bound of the share of cycles in which a program does not wait for memory.
const MIN_OWN_SHARE: f64 = 0.1;
/// Smallest share of misses beyond the solo ones from which the cost of a miss can be computed.
const MIN_BEYOND_SHARE: f64 = 0.1;
/// Upper bound of the factor between the counted mean cost of a miss and the cost of the misses beyond the solo ones.
const MAX_COST_FACTOR: f64 = 3.0;
/// A program with a lower rate of misses per instruction does not fill a cache within any relevant time.
const NO_MISSES: f64 = 1e-7;

/// The model of a program; see the module's documentation. Rates are per instruction.
#[derive(Clone, PartialEq, Debug)]
pub struct ProgramModel {
    /// Misses at 0, 1, ... [`STEPS`] steps of `step_bytes`.
    pub misses: Vec<f64>,
    /// Errors of `misses`, below and above.
    errors: Vec<(f64, f64)>,
    /// Value added to the whole curve, because no size explained the count.
    level: f64,
    /// Number of instructions after which each number of steps is full, starting from an empty cache.
    growth: Vec<f64>,
    lines_per_step: f64,
    pub step_bytes: f64,
    /// Cycles per instruction that do not depend on space.
    pub base_cycles: f64,
    /// Cycles per miss on the memory node that is nearest to the task's pages.
    pub cycles_per_miss: f64,
    /// Additional cycles of a miss, by the memory node on which the task runs; empty if unknown.
    far_cycles: Vec<f64>,
    /// Lines to and from memory per miss, including prefetched lines.
    pub lines_per_miss: f64,
    /// Cycles per instruction that would wait for other caches if all partners were on other caches.
    pub remote_cycles: f64,
    /// Share of one CPU that the task would use.
    pub cpu_demand: f64,
    pub goal: Goal,
    /// The counted work of the promised rate, if there is one and it was measured.
    pub rate: Option<PromisedRate>,
    /// Relative error of the curve, as one standard deviation.
    pub curve_error: f64,
    /// Odds of the measured occupancy over the composed one.
    pub occupancy_odds: f64,
    /// Solo cycles and misses per instruction, if they were measured.
    pub solo: Option<SoloMeasurement>,
}

/// Measured solo speed of a task.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SoloMeasurement {
    pub cycles_per_instr: f64,
    pub misses_per_instr: Option<f64>,
}

/// Unit of a promised rate, and the work per second of a task at one instruction per cycle of elapsed time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PromisedRate {
    pub work: WorkMetric,
    pub per_instr_per_cycle: f64,
}

/// Inputs of a task's model: its profile and its speed under the plan in force.
pub struct ModelInputs<'a> {
    pub profile: &'a Profile,
    pub speed: ObservedSpeed,
    pub goal: Option<Goal>,
    /// Cost of a miss, if no stalls are counted.
    pub penalty_cycles: Option<f64>,
    pub largest_cache_bytes: f64,
    pub line_bytes: f64,
    /// Share of the task's sharing partners that are on its own cache.
    pub partners_here: f64,
    pub memory: MemoryDistance,
}

/// Distances of a task's pages from the memory nodes.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MemoryDistance {
    /// Latency of the task's lines relative to near ones, by the node on which it would run; 0 if there is no such
    /// node. Empty if unknown.
    pub factors: Vec<f64>,
    /// The node on which the task runs now.
    pub now: usize,
}

impl MemoryDistance {
    /// Splits the present cost of a miss into the cycles with the nearest pages and the additional cycles by node.
    /// Queues are the same on all nodes.
    fn split(&self, cycles_per_miss: f64, queue_cycles: f64) -> (f64, Vec<f64>) {
        let is_known = |factor: &f64| *factor >= 1.0;
        let nearest = self.factors.iter().copied().filter(is_known).fold(f64::INFINITY, f64::min);
        let Some(now) = self.factors.get(self.now).copied().filter(is_known) else {
            return (cycles_per_miss, Vec::new());
        };
        let queue_cycles = queue_cycles.clamp(0.0, cycles_per_miss);
        let nearest_cost = (cycles_per_miss - queue_cycles) / now;
        (
            queue_cycles + nearest_cost * nearest,
            self.factors.iter().map(|factor| nearest_cost * (factor - nearest).max(0.0)).collect(),
        )
    }
}

impl ProgramModel {
    /// Builds the model; `None` if the curve, the speed or the cost of a miss is missing.
    pub fn from_inputs(inputs: &ModelInputs<'_>) -> Option<Self> {
        let curve = inputs.profile.misses_per_kilo_instr().filter(|curve| curve.len() >= 2)?;
        let speed = inputs.speed;
        let step_bytes = inputs.largest_cache_bytes / STEPS as f64;
        let mut next = 0;
        let points = (0..=STEPS).map(|step| rates_near(curve, step as f64 * step_bytes, &mut next));
        let points: Vec<[f64; 3]> = points.collect();
        let mut misses: Vec<f64> = points.iter().map(|[rate, ..]| rate / 1000.0).collect();
        let rate_errors =
            |[rate, low, high]: &[f64; 3]| ((rate - low).max(0.0) / 1000.0, (high - rate).max(0.0) / 1000.0);
        let errors = points.iter().map(rate_errors).collect();
        // With no resident lines, every reference misses, if the number of references is known.
        misses[0] = speed.references_per_instr.map_or(misses[1], |references| references.max(misses[1]));
        for step in (0..STEPS).rev() {
            misses[step] = misses[step].max(misses[step + 1]);
        }
        let measured = speed.misses_per_instr;
        // Misses that no size explains raise the whole curve, because the log does not contain those fetches.
        let unexplained_misses = |measured: f64| (measured - misses[1]).max(0.0) - (misses[STEPS] - measured).max(0.0);
        let level = measured.map_or(0.0, unexplained_misses);
        misses.iter_mut().for_each(|rate| *rate = (*rate + level).max(0.0));
        let misses_now = measured.unwrap_or(misses[STEPS]);
        // Counted stalls are those of the task's present node. A stated cost is that of near memory, for serialized
        // misses; if misses overlap, their total cost is at most the elapsed cycles.
        let factor_now = inputs.memory.factors.get(inputs.memory.now).copied().unwrap_or(1.0);
        let went_by = (1.0 - MIN_OWN_SHARE) * speed.cycles_per_instr / misses_now.max(NO_MISSES);
        let stated_penalty = || Some((inputs.penalty_cycles? * factor_now).min(went_by));
        let cycles_per_miss = speed.stall_cycles_per_miss.or_else(stated_penalty)?.max(0.0);
        let queue_cycles = speed.stall_cycles_per_miss.and(speed.queue_cycles_per_miss).unwrap_or(0.0);
        let (nearest_cycles, far_cycles) = inputs.memory.split(cycles_per_miss, queue_cycles);
        let remote_cycles = speed.remote_cycles_per_instr.unwrap_or(0.0);
        let base_cycles = (speed.cycles_per_instr - misses_now * cycles_per_miss - remote_cycles)
            .max(MIN_OWN_SHARE * speed.cycles_per_instr);
        let split_share = 1.0 - inputs.partners_here.clamp(0.0, 0.9);
        let [rate, low, high] = rates_at(curve, inputs.largest_cache_bytes / 2.0);
        let curve_error = (0.5 * (high - low) / rate.max(1e-9) / 2.0).clamp(0.02, 0.5);
        let goal = inputs.goal.unwrap_or_default();
        let mut program = ProgramModel {
            growth: Vec::new(),
            lines_per_step: step_bytes / inputs.line_bytes,
            misses,
            errors,
            level,
            step_bytes,
            base_cycles,
            cycles_per_miss: nearest_cycles,
            far_cycles,
            lines_per_miss: speed.lines_per_miss.unwrap_or(1.0).clamp(0.5, 50.0),
            remote_cycles: remote_cycles / split_share,
            cpu_demand: speed.cpu_demand,
            goal,
            rate: None,
            curve_error,
            occupancy_odds: 1.0,
            solo: inputs.profile.rates.solo_instr_per_cycle.filter(|solo| solo.value > 0.0).map(|solo| {
                SoloMeasurement {
                    cycles_per_instr: 1.0 / solo.value,
                    misses_per_instr: inputs.profile.rates.solo_misses_per_kilo_instr.map(|mpki| mpki.value / 1000.0),
                }
            }),
        };
        program.grow();
        let numbers = [program.base_cycles, program.cycles_per_miss, program.remote_cycles];
        (numbers.iter().all(|number| number.is_finite()) && program.misses.iter().all(|rate| rate.is_finite()))
            .then_some(program)
    }

    /// Returns the program with all misses and their cost scaled: one draw within the errors.
    #[must_use]
    pub fn scale(&self, misses: f64, cost: f64) -> Self {
        ProgramModel {
            misses: self.misses.iter().map(|rate| rate * misses).collect(),
            errors: self.errors.iter().map(|(below, above)| (below * misses, above * misses)).collect(),
            growth: self.growth.iter().map(|instructions| instructions / misses).collect(),
            cycles_per_miss: self.cycles_per_miss * cost,
            far_cycles: self.far_cycles.iter().map(|cycles| cycles * cost).collect(),
            ..*self
        }
    }

    fn grow(&mut self) {
        let mut instructions = 0.0;
        self.growth = Vec::with_capacity(STEPS + 1);
        self.growth.push(0.0);
        for step in 0..STEPS {
            let rate = 0.5 * (self.misses[step] + self.misses[step + 1]);
            instructions += self.lines_per_step / rate.max(NO_MISSES);
            self.growth.push(instructions);
        }
    }

    /// Returns the additional cycles of a miss on this memory node relative to the nearest; 0 if unknown.
    pub fn far_cycles(&self, node: u32) -> f64 {
        self.far_cycles.get(node as usize).copied().unwrap_or(0.0)
    }

    /// Returns the misses per instruction with this number of bytes.
    pub fn misses_at(&self, bytes: f64) -> f64 {
        let position_steps = (bytes / self.step_bytes).clamp(0.0, STEPS as f64);
        let low = (position_steps as usize).min(STEPS - 1);
        self.misses[low] + (position_steps - low as f64) * (self.misses[low + 1] - self.misses[low])
    }

    /// Does the profiled curve predict more misses with this space than were measured with no more space? Then it does
    /// not describe the program's present work.
    pub fn is_contradicted(&self, bytes: f64, measured: f64) -> bool {
        let step = ((bytes / self.step_bytes).clamp(0.0, STEPS as f64)) as usize;
        let curve_misses = self.misses_at(bytes) - self.level;
        curve_misses - self.errors[step].0 - measured > (CONTRADICTED_SHARE * curve_misses).max(CONTRADICTED_FROM)
    }

    /// Converts a composed occupancy to the real one, by the ratio measured under the plan in force; at most the whole
    /// cache.
    pub fn real_occupancy(&self, composed: f64, cache_bytes: f64) -> f64 {
        let share = (composed / cache_bytes).clamp(0.0, 1.0);
        cache_bytes * self.occupancy_odds * share / (1.0 - share + self.occupancy_odds * share)
    }

    /// Moves the curve through misses that were counted with partitions of these sizes, in rising order. Next to a
    /// counted size, the curve keeps its difference from the count. Beyond the largest one, it keeps either that
    /// difference or that factor: the mean of the two is taken, and they widen the error. As curves fall, counts bound
    /// the curve and its errors. Most curves are convex, so between two counts only the larger size's bounds the error.
    pub fn pass_through(&mut self, counts: &[(f64, f64)]) {
        if counts.is_empty() {
            return;
        }
        let prior = self.clone();
        for step in 0..=STEPS {
            let bytes = step as f64 * self.step_bytes;
            let next = counts.partition_point(|(size, _)| *size <= bytes);
            let (before, after) = (next.checked_sub(1).map(|last| counts[last]), counts.get(next).copied());
            let shift = |(size, misses): (f64, f64)| misses - prior.misses_at(size);
            let rate = prior.misses[step];
            let (rate, error) = match (before, after) {
                (Some(before), Some(after)) => {
                    let along = (bytes - before.0) / (after.0 - before.0).max(1.0);
                    (rate + shift(before) + along * (shift(after) - shift(before)), f64::INFINITY)
                }
                (Some((size, misses)), None) => {
                    let shifted = rate + shift((size, misses));
                    let scaled = rate * misses / prior.misses_at(size).max(NO_MISSES);
                    (0.5 * (shifted + scaled), 0.5 * (shifted - scaled).abs())
                }
                (None, Some(after)) => (rate + shift(after), 0.0),
                (None, None) => (rate, 0.0),
            };
            let low = after.map_or(0.0, |(_, misses)| misses);
            let high = before.map_or(f64::INFINITY, |(_, misses)| misses).max(low);
            let (below, above) = self.errors[step];
            // Between two counts, the curve is at most about linear.
            let above = if after.is_some() && before.is_some() { 0.0 } else { above.max(error) };
            let is_counted = before.is_some_and(|(size, _)| bytes - size < 0.5 * self.step_bytes);
            let rate = if is_counted { high } else { rate.clamp(low, high) };
            self.misses[step] = rate;
            self.errors[step] =
                if is_counted { (0.0, 0.0) } else { (below.max(error).min(rate - low), above.min(high - rate)) };
        }
        for step in (0..STEPS).rev() {
            self.misses[step] = self.misses[step].max(self.misses[step + 1]);
        }
        self.grow();
    }

    /// Returns the program with the curve above this occupancy as low as its error allows, so that only less space than
    /// composed can explain more misses.
    #[must_use]
    pub fn at_lowest(&self, composed: f64) -> Self {
        let mut lowest = self.clone();
        for (step, (rate, error)) in lowest.misses.iter_mut().zip(&mut lowest.errors).enumerate() {
            if step as f64 * self.step_bytes > composed {
                *rate = (*rate - error.0).max(0.0);
            }
            *error = (0.0, 0.0);
        }
        for step in (0..STEPS).rev() {
            lowest.misses[step] = lowest.misses[step].max(lowest.misses[step + 1]);
        }
        lowest.grow();
        lowest
    }

    /// Shifts the curve toward the misses measured at a composed occupancy, where the log was too short to reach. All
    /// points move by the same share of their errors. If the count is above the curve, points of less space rise only
    /// to the count, which bounds them from below: a stream, whose log ends early, misses as often with any space.
    pub fn shift_within_error(&mut self, composed: f64, misses: f64) {
        let misses_deviation = misses - self.misses_at(composed);
        let error_on_side = |&(below, above): &(f64, f64)| if misses_deviation < 0.0 { below } else { above };
        let position_steps = (composed / self.step_bytes).clamp(0.0, STEPS as f64);
        let low = (position_steps as usize).min(STEPS - 1);
        let (error_before, error_after) = (error_on_side(&self.errors[low]), error_on_side(&self.errors[low + 1]));
        let error = error_before + (position_steps - low as f64) * (error_after - error_before);
        if error <= 0.0 {
            return;
        }
        let error_share = (misses_deviation / error).clamp(-1.0, 1.0);
        let corrected_rate = self.misses_at(composed) + error_share * error;
        for (step, (rate, error)) in self.misses.iter_mut().zip(&mut self.errors).enumerate() {
            let shifted = (*rate + error_share * error_on_side(error)).max(0.0);
            let bounds = (*rate - error.0, *rate + error.1);
            *rate = if misses_deviation > 0.0 && step <= low { rate.max(corrected_rate.min(shifted)) } else { shifted };
            *error = ((*rate - bounds.0).max(0.0), (bounds.1 - *rate).max(0.0));
        }
        for step in (0..STEPS).rev() {
            self.misses[step] = self.misses[step].max(self.misses[step + 1]);
        }
        self.grow();
    }

    /// Shifts the curve to the misses measured at a composed occupancy. Differences within the curve's error correct
    /// the curve; larger ones correct the occupancy.
    pub fn calibrate(&mut self, composed: f64, cache_bytes: f64, misses: f64) {
        self.shift_within_error(composed, misses);
        let (max_rate, min_rate) = (self.misses[0], self.misses_at(cache_bytes));
        let expected = self.misses_at(composed);
        if (misses - expected).abs() <= SAME_SHARE * (max_rate - min_rate) || max_rate <= min_rate {
            return;
        }
        let next = self.misses.partition_point(|&rate| rate > misses).clamp(1, STEPS);
        let (rate_before, rate_after) = (self.misses[next - 1], self.misses[next]);
        let along = if rate_before > rate_after {
            ((rate_before - misses) / (rate_before - rate_after)).clamp(0.0, 1.0)
        } else {
            1.0
        };
        let steps = next as f64 - 1.0 + along;
        let eviction_odds = |bytes: f64| {
            let share = (bytes / cache_bytes).clamp(0.02, 0.98);
            share / (1.0 - share)
        };
        self.occupancy_odds = (eviction_odds(steps * self.step_bytes) / eviction_odds(composed))
            .clamp(1.0 / MAX_OCCUPANCY_ODDS, MAX_OCCUPANCY_ODDS);
    }

    /// Returns the bytes touched within this number of instructions.
    pub fn footprint_bytes(&self, instructions: f64) -> f64 {
        self.footprint_and_growth(instructions).0
    }

    /// Returns the footprint, and the bytes that another instruction adds.
    pub fn footprint_and_growth(&self, instructions: f64) -> (f64, f64) {
        self.grown_footprint(self.growth.partition_point(|&threshold| threshold <= instructions), instructions)
    }

    /// Returns the footprint and its growth, searched from the position of the last call.
    pub fn footprint_near(&self, instructions: f64, position: &mut usize) -> (f64, f64) {
        let mut next = *position;
        while next <= STEPS && self.growth[next] <= instructions {
            next += 1;
        }
        while next > 0 && self.growth[next - 1] > instructions {
            next -= 1;
        }
        *position = next;
        self.grown_footprint(next, instructions)
    }

    fn grown_footprint(&self, next: usize, instructions: f64) -> (f64, f64) {
        if next > STEPS {
            return (STEPS as f64 * self.step_bytes, 0.0);
        }
        // The first entry is 0 instructions, so there is always an earlier entry.
        let next = next.max(1);
        let (growth_before, growth_after) = (self.growth[next - 1], self.growth[next]);
        let per_instr = self.step_bytes / (growth_after - growth_before).max(1e-9);
        ((next as f64 - 1.0) * self.step_bytes + (instructions - growth_before).max(0.0) * per_instr, per_instr)
    }

    /// Returns the cycles per instruction with this number of bytes, if each miss waits `wait_cycles` longer and this
    /// share of partners is on other caches.
    pub fn cycles_per_instr_at(&self, bytes: f64, wait_cycles: f64, split_share: f64) -> f64 {
        self.cycles_at(self.misses_at(bytes), wait_cycles, split_share)
    }

    /// Returns the cycles per instruction with this number of misses per instruction.
    pub fn cycles_at(&self, misses: f64, wait_cycles: f64, split_share: f64) -> f64 {
        self.base_cycles + misses * (self.cycles_per_miss + wait_cycles) + split_share * self.remote_cycles
    }

    /// Moves the curve above the present occupancy, and adjusts the split of cycles into waits and others, so that the
    /// forecast for the whole cache without other traffic equals the measured solo speed. `queue_cycles` is the part of
    /// a miss's present wait that other traffic causes.
    pub fn anchor_solo(&mut self, composed: f64, cache_bytes: f64, queue_cycles: f64) {
        let Some(solo) = self.solo else { return };
        let (now, solo_rate) = (self.misses_at(composed), self.misses_at(cache_bytes));
        let alone = solo.misses_per_instr.unwrap_or(solo_rate).min(now);
        for step in 0..=STEPS {
            let bytes = step as f64 * self.step_bytes;
            if bytes <= composed {
                continue;
            }
            let remaining = if now - solo_rate > SAME_SHARE * now {
                ((self.misses[step] - solo_rate) / (now - solo_rate)).clamp(0.0, 1.0)
            } else {
                ((cache_bytes - bytes) / (cache_bytes - composed).max(1.0)).clamp(0.0, 1.0)
            };
            self.misses[step] = alone + remaining * (now - alone);
        }
        self.grow();
        let cycles_now = self.base_cycles + now * self.cycles_per_miss;
        let beyond = now - alone;
        if beyond > MIN_BEYOND_SHARE * now && cycles_now > solo.cycles_per_instr {
            let cost = (cycles_now - solo.cycles_per_instr - alone * queue_cycles) / beyond;
            let previous_cost = self.cycles_per_miss;
            self.cycles_per_miss = cost.clamp(previous_cost / MAX_COST_FACTOR, previous_cost * MAX_COST_FACTOR);
            self.base_cycles = (cycles_now - now * self.cycles_per_miss).max(MIN_OWN_SHARE * cycles_now);
        }
    }

    /// Shifts the cycles apart from waits by the difference between measured and forecast cycles per instruction.
    pub fn match_cycles(&mut self, forecast: f64, measured: f64) {
        self.base_cycles = (self.base_cycles + measured - forecast).max(MIN_OWN_SHARE * measured);
    }

    /// Returns the solo cycles per instruction on a cache of this size.
    pub fn solo_cycles(&self, cache_bytes: f64) -> f64 {
        if let Some(solo) = self.solo {
            return solo.cycles_per_instr;
        }
        self.base_cycles + self.misses_at(cache_bytes) * self.cycles_per_miss
    }

    /// Returns the solo cycles per instruction if the curve lies as low as its error allows.
    pub fn best_solo_cycles(&self, cache_bytes: f64) -> f64 {
        let position_steps = (cache_bytes / self.step_bytes).clamp(0.0, STEPS as f64);
        let below = self.errors[(position_steps as usize).min(STEPS)].0;
        self.base_cycles + (self.misses_at(cache_bytes) - below).max(0.0) * self.cycles_per_miss
    }
}

/// Returns the value and both ends of the interval; linear between points, constant beyond the ends.
fn rates_at(curve: &SizeCurve, bytes: f64) -> [f64; 3] {
    rates_near(curve, bytes, &mut 0)
}

/// As `rates_at`, for rising sizes: `next` is the point of the last call.
fn rates_near(curve: &SizeCurve, bytes: f64, next: &mut usize) -> [f64; 3] {
    while curve.get(*next).is_some_and(|(size, _)| (*size as f64) < bytes) {
        *next += 1;
    }
    let next = *next;
    let point_values = |index: usize| [curve[index].1.value, curve[index].1.low, curve[index].1.high];
    if next == 0 || next == curve.len() {
        return point_values(next.min(curve.len() - 1));
    }
    let along = (bytes - curve[next - 1].0 as f64) / (curve[next].0 - curve[next - 1].0).max(1) as f64;
    let (low, high) = (point_values(next - 1), point_values(next));
    std::array::from_fn(|bound| low[bound] + along * (high[bound] - low[bound]))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use cachemate_core::{CacheLevel, Estimate, FactSource};

    pub const CACHE: f64 = 4_194_304.0;

    /// A program with these misses per instruction by bytes, each costing 100 cycles, and one cycle for everything
    /// else.
    pub fn program_fixture(misses: impl Fn(f64) -> f64) -> ProgramModel {
        program_far(misses, MemoryDistance::default())
    }

    /// A stream whose misses cost 100 cycles on its present node.
    pub fn far_from(memory: MemoryDistance) -> ProgramModel {
        program_far(|_| 0.015, memory)
    }

    fn inputs_of(
        profile: &Profile,
        speed: ObservedSpeed,
        penalty_cycles: Option<f64>,
        memory: MemoryDistance,
    ) -> ModelInputs<'_> {
        ModelInputs {
            profile,
            speed,
            goal: None,
            penalty_cycles,
            largest_cache_bytes: CACHE,
            line_bytes: 64.0,
            partners_here: 0.0,
            memory,
        }
    }

    fn program_far(misses: impl Fn(f64) -> f64, memory: MemoryDistance) -> ProgramModel {
        let curve: SizeCurve =
            (0..=64u64).map(|step| (step * 65_536, Estimate::exact(1000.0 * misses(step as f64 * 65_536.0)))).collect();
        let profile = Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle);
        let speed = ObservedSpeed {
            cycles_per_instr: 1.0 + 100.0 * misses(CACHE),
            misses_per_instr: Some(misses(CACHE)),
            stall_cycles_per_miss: Some(100.0),
            cpu_demand: 1.0,
            ..ObservedSpeed::default()
        };
        let inputs = inputs_of(&profile, speed, None, memory);
        ProgramModel::from_inputs(&inputs).unwrap()
    }

    /// A program whose references are to equally probable lines.
    pub fn uniform_program(bytes: f64, per_instr: f64) -> ProgramModel {
        program_fixture(|bytes_held| per_instr * (1.0 - bytes_held / bytes).max(0.0))
    }

    /// Does the footprint of independent references grow as in theory, to `1 - 1/e` of the lines after as many
    /// references as lines?
    #[test]
    fn footprints_grow_as_theory_says() {
        let program = uniform_program(2_097_152.0, 0.02);
        let lines = 2_097_152.0 / 64.0;
        let share = program.footprint_bytes(lines / 0.02) / 2_097_152.0;
        assert!((share - (1.0 - (-1.0f64).exp())).abs() < 0.01, "{share}");
        assert_eq!(program.footprint_bytes(0.0), 0.0);
        let mut last = 0;
        for instructions in [1e3, 1e30, 1e7, 0.0, 2e7, 1e6] {
            let growth = program.footprint_near(instructions, &mut last);
            assert_eq!(growth, program.footprint_and_growth(instructions), "wherever it is sought from");
        }
        assert!(program.footprint_bytes(1e30) <= CACHE);
    }

    /// Does a calibrated program have the occupancy that its misses imply, and a whole cache if it has the cache to
    /// itself?
    #[test]
    fn misses_imply_the_occupancy() {
        let mut program = uniform_program(CACHE, 0.02);
        program.calibrate(0.25 * CACHE, CACHE, 0.01);
        let share = program.real_occupancy(0.25 * CACHE, CACHE) / CACHE;
        assert!((share - 0.5).abs() < 0.03, "{share}");
        assert_eq!(program.real_occupancy(CACHE, CACHE), CACHE);
        assert_eq!(program.real_occupancy(0.0, CACHE), 0.0);
        let mut stream = super::tests::program_fixture(|_| 0.01);
        stream.calibrate(0.25 * CACHE, CACHE, 0.02);
        assert_eq!(stream.occupancy_odds, 1.0);
    }

    /// Does a count below all values of a curve contradict it, while one that less space explains does not?
    #[test]
    fn a_curve_of_other_work_is_contradicted() {
        let stream = program_fixture(|_| 0.008);
        assert!(stream.is_contradicted(CACHE, 0.005) && !stream.is_contradicted(CACHE, 0.0079));
        let reuser = uniform_program(0.5 * CACHE, 0.01);
        assert!(!reuser.is_contradicted(CACHE, 0.0) && !reuser.is_contradicted(CACHE, 0.01));
        assert!(reuser.is_contradicted(0.1 * CACHE, 0.004) && !reuser.is_contradicted(0.4 * CACHE, 0.004));
    }

    /// Does the curve pass through counts, fall between them, and stay uncertain only beyond the largest counted size?
    #[test]
    fn a_curve_passes_through_counts() {
        let mut program = program_fixture(|bytes| if bytes < 0.2 * CACHE { 0.02 } else { 0.002 });
        program.pass_through(&[(0.25 * CACHE, 0.012), (0.5 * CACHE, 0.006)]);
        let misses_at = |share: f64| program.misses_at(share * CACHE);
        assert!((misses_at(0.25) - 0.012).abs() < 1e-9 && (misses_at(0.5) - 0.006).abs() < 1e-9);
        assert!((misses_at(0.375) - 0.009).abs() < 1e-9 && misses_at(0.1) > 0.029);
        assert!(misses_at(1.0) <= 0.006);
        assert_eq!(program.errors[STEPS / 2], (0.0, 0.0));
        let reach = program.clone();
        program.pass_through(&[]);
        assert_eq!(program, reach);
    }

    /// If a curve is wrong only beyond the reach of its log, is it corrected there and nowhere else, and is the
    /// occupancy not corrected instead?
    #[test]
    fn a_curve_is_corrected_beyond_the_reach_of_its_log() {
        let truth = uniform_program(0.4 * CACHE, 0.02);
        // Known up to 0.3 of the cache; beyond that, the tail falls too slowly, and its error covers everything below.
        let known_bytes = 0.3 * CACHE;
        let logged = |bytes_held: f64| {
            if bytes_held <= known_bytes {
                truth.misses_at(bytes_held)
            } else {
                truth.misses_at(known_bytes) * known_bytes / bytes_held
            }
        };
        let mut calibrated = program_fixture(logged);
        for step in 0..=STEPS {
            if step as f64 * calibrated.step_bytes > known_bytes {
                calibrated.errors[step] =
                    (calibrated.misses[step], truth.misses_at(known_bytes) - calibrated.misses[step]);
            }
        }
        let composed = 0.39 * CACHE;
        calibrated.calibrate(composed, CACHE, truth.misses_at(composed));
        assert!((calibrated.misses_at(composed) - truth.misses_at(composed)).abs() < 1e-6);
        assert!(calibrated.misses_at(0.5 * CACHE) < 0.2 * logged(0.5 * CACHE), "{}", calibrated.misses_at(0.5 * CACHE));
        assert!((calibrated.misses_at(0.25 * CACHE) / truth.misses_at(0.25 * CACHE) - 1.0).abs() < 0.02);
        assert_eq!(calibrated.occupancy_odds, 1.0);
    }

    /// If more misses are counted than the curve beyond the reach of its log predicts, is a program with less space
    /// forecast to miss as often as counted, and not more often?
    #[test]
    fn a_stream_misses_as_often_with_less_space() {
        let reach = 0.1 * CACHE;
        let logged =
            |bytes_held: f64| if bytes_held <= reach { 0.06 } else { 0.06 * reach / bytes_held * reach / bytes_held };
        let mut calibrated = program_fixture(logged);
        for step in 0..=STEPS {
            if step as f64 * calibrated.step_bytes > reach {
                calibrated.errors[step] = (calibrated.misses[step], 0.06 - calibrated.misses[step]);
            }
        }
        calibrated.calibrate(0.6 * CACHE, CACHE, 0.013);
        for share in [0.3, 0.4, 0.6] {
            let misses = calibrated.misses_at(share * CACHE);
            assert!((misses / 0.013 - 1.0).abs() < 0.05, "{share}: {misses}");
        }
        assert!(calibrated.misses_at(0.05 * CACHE) > 0.059, "what the log reached stays");
        assert_eq!(calibrated.occupancy_odds, 1.0);
    }

    /// Do cycles follow from the measurements, and does a task without a cost of misses have no model?
    #[test]
    fn cycles_follow_from_what_was_measured() {
        let program = uniform_program(2_097_152.0, 0.02);
        assert!((program.solo_cycles(CACHE) - 1.0).abs() < 1e-9);
        assert!((program.cycles_per_instr_at(1_048_576.0, 0.0, 0.0) - 2.0).abs() < 1e-6);
        assert!((program.cycles_per_instr_at(1_048_576.0, 50.0, 0.0) - 2.5).abs() < 1e-6);
        let profile = Profile::default();
        let speed = ObservedSpeed::default();
        let inputs = inputs_of(&profile, speed, Some(100.0), MemoryDistance::default());
        assert_eq!(ProgramModel::from_inputs(&inputs), None);
    }

    /// If stalls are not counted, does a pointer chase pay the stated cost, and a stream whose misses overlap no more
    /// than its measured cycles?
    #[test]
    fn overlapping_misses_cost_no_more_than_the_elapsed_time() {
        let model = |cycles_per_instr: f64, misses: f64| {
            let curve: SizeCurve = [0, CACHE as u64].map(|bytes| (bytes, Estimate::exact(1000.0 * misses))).to_vec();
            let profile = Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle);
            let speed = ObservedSpeed {
                cycles_per_instr,
                misses_per_instr: Some(misses),
                cpu_demand: 1.0,
                ..ObservedSpeed::default()
            };
            let inputs = inputs_of(&profile, speed, Some(200.0), MemoryDistance::default());
            ProgramModel::from_inputs(&inputs).unwrap()
        };
        let (chase, stream) = (model(60.0, 0.2), model(6.0, 0.25));
        assert!((chase.cycles_per_miss - 200.0).abs() < 1e-9 && (chase.solo_cycles(CACHE) - 60.0).abs() < 1e-9);
        assert!((stream.cycles_per_miss - 21.6).abs() < 1e-9 && (stream.solo_cycles(CACHE) - 6.0).abs() < 1e-9);
    }

    /// Is the cost of a miss split by node: less on the node of its memory, the same queue on all nodes, and no split
    /// if distances are unknown?
    #[test]
    fn far_memory_costs_its_distance() {
        let near_and_far = |factors: &[f64], now: usize| far_from(MemoryDistance { factors: factors.to_vec(), now });
        let costs = |model: &ProgramModel| (model.cycles_per_miss, [0, 1, 2].map(|node| model.far_cycles(node)));
        assert_eq!(costs(&near_and_far(&[1.0, 2.0], 1)), (50.0, [0.0, 50.0, 0.0]));
        assert_eq!(costs(&near_and_far(&[1.0, 2.0], 0)), (100.0, [0.0, 100.0, 0.0]));
        assert_eq!(costs(&near_and_far(&[2.0, 0.0, 1.0], 0)), (50.0, [50.0, 0.0, 0.0]));
        assert_eq!(costs(&near_and_far(&[], 0)), (100.0, [0.0; 3]));
        let queued = MemoryDistance { factors: vec![1.0, 2.0], now: 1 }.split(100.0, 40.0);
        assert_eq!(queued, (70.0, vec![0.0, 30.0]));
        // On the node of the measurement, the cost is the measured one.
        let (near_model, far_model) = (near_and_far(&[1.0, 2.0], 0), near_and_far(&[1.0, 2.0], 1));
        assert!(
            (far_model.cycles_per_instr_at(CACHE, far_model.far_cycles(1), 0.0)
                - near_model.cycles_per_instr_at(CACHE, 0.0, 0.0))
            .abs()
                < 1e-9
        );
        assert!((far_model.scale(1.0, 2.0).far_cycles(1) - 100.0).abs() < 1e-9);
    }
}
