//! The model of one task: misses by space, the cost of a miss, shared data, and the operator's goal.
//!
//! Method: the curve is sampled at equal steps of the largest cache, and made to fall. The growth of the footprint
//! follows from it: a program with `s` resident lines brings in lines at the miss rate of `s` lines. The number of
//! instructions until `s` lines are resident is therefore the integral of one over the miss rate (the footprint theory
//! of Xiang et al., HOTL, ASPLOS 2013). Cycles without misses are the measured cycles minus the measured cost of
//! misses.
//!
//! Before a search the model is bent until it agrees with the plan in force: first the curve within its error
//! ([`ProgramModel::calibrate`]), then the odds of the occupancy, then the cycles without misses. So agreement with the
//! plan in force proves nothing.
//!
//! Without a curve, a speed or a cost of a miss, a task has no model. The other inputs have neutral values if they were
//! not measured: one line per miss, no waits for other caches, no queue, near memory, and for the misses without space
//! those with one step.

use cachemate_core::{Goal, Profile, SizeCurve};
use cachemate_papers::work_metric::WorkMetric;

use crate::auto::evidence::measured_sizes::CountedSize;
use crate::auto::evidence::speeds::ObservedSpeed;

/// Number of steps of the curve.
pub const STEPS: usize = 64;
/// Differences up to this share of a curve's height are noise.
const NOISE_SHARE: f64 = 0.03;
/// A count contradicts a curve only if it differs by more than both of these: as a share, and in misses per
/// instruction.
const MIN_CONTRADICTION_SHARE: f64 = 0.1;
const MIN_CONTRADICTION_RATE: f64 = 5e-4;
/// Upper bound of the ratio between the odds of the measured and of the composed occupancy (odds: share / (1 - share)).
const MAX_ODDS_RATIO: f64 = 5.0;
/// Lower bound of the share of cycles in which a program does not wait for memory.
const MIN_COMPUTE_SHARE: f64 = 0.1;
/// Smallest share of misses beyond the solo ones from which the cost of a miss can be computed.
const MIN_BEYOND_SHARE: f64 = 0.1;
/// Upper bound of the factor between the counted mean cost of a miss and the cost of the misses beyond the solo ones.
const MAX_COST_FACTOR: f64 = 3.0;
/// A program with a lower rate of misses per instruction does not fill a cache within any relevant time.
const NEGLIGIBLE_MISSES_PER_INSTR: f64 = 1e-7;

/// The model of a program; see the module's documentation. Rates are per instruction.
#[derive(Clone, PartialEq, Debug)]
pub struct ProgramModel {
    curve: StepCurve,
    /// How [`ProgramModel::add_unlogged_misses`] has changed the profile's curve.
    unlogged: CurveShift,
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
    /// Standard deviation of the curve at half of the largest cache, as a share of its value.
    pub curve_error: f64,
    /// Odds of the measured occupancy over those of the composed one; 1 until calibrated.
    pub odds_ratio: f64,
    /// Solo cycles and misses per instruction, if they were measured.
    pub solo: Option<SoloMeasurement>,
}

/// Misses by space at 0, 1, ... [`STEPS`] steps of a model's `step_bytes`.
#[derive(Clone, PartialEq, Debug)]
struct StepCurve {
    misses: Vec<f64>,
    /// By how much `misses` may lie too high or too low.
    errors: Vec<ErrorBounds>,
    /// Number of instructions after which each number of steps is full, starting from an empty cache.
    instr_by_steps: Vec<f64>,
}

/// A change of a curve: each rate times `factor`, plus `addend` misses per instruction.
#[derive(Clone, Copy, PartialEq, Debug)]
struct CurveShift {
    factor: f64,
    addend: f64,
}

impl CurveShift {
    const NONE: CurveShift = CurveShift {
        factor: 1.0,
        addend: 0.0,
    };
}

/// The distances from a rate to the ends of its interval, in misses per instruction.
#[derive(Clone, Copy, PartialEq, Debug)]
struct ErrorBounds {
    below: f64,
    above: f64,
}

impl ErrorBounds {
    const NONE: ErrorBounds = ErrorBounds {
        below: 0.0,
        above: 0.0,
    };
}

impl StepCurve {
    /// Raises the misses with less space to those with more, and computes the growth of the footprint.
    fn make_monotone(&mut self, lines_per_step: f64) {
        for step in (0..STEPS).rev() {
            self.misses[step] = self.misses[step].max(self.misses[step + 1]);
        }
        self.rebuild_growth(lines_per_step);
    }

    fn rebuild_growth(&mut self, lines_per_step: f64) {
        let mut instructions = 0.0;
        self.instr_by_steps.clear();
        self.instr_by_steps.push(0.0);
        for step in 0..STEPS {
            let rate = 0.5 * (self.misses[step] + self.misses[step + 1]);
            instructions += lines_per_step / rate.max(NEGLIGIBLE_MISSES_PER_INSTR);
            self.instr_by_steps.push(instructions);
        }
    }
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
    pub local_partner_share: f64,
    pub memory: MemoryDistance,
}

/// Distances of a task's pages from the memory nodes.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MemoryDistance {
    /// Latency of the task's lines relative to near ones, by the node on which it would run; 0 if there is no such
    /// node. Empty if unknown.
    pub factors: Vec<f64>,
    /// The node on which the task runs now.
    pub current_node: usize,
}

impl MemoryDistance {
    /// Splits the present cost of a miss into the cycles with the nearest pages and the additional cycles by node.
    /// Queues are the same on all nodes.
    fn split_cost(&self, cycles_per_miss: f64, queue_cycles: f64) -> (f64, Vec<f64>) {
        let is_known = |factor: &f64| *factor >= 1.0;
        let nearest_factor = self
            .factors
            .iter()
            .copied()
            .filter(is_known)
            .fold(f64::INFINITY, f64::min);
        let Some(current_factor) = self
            .factors
            .get(self.current_node)
            .copied()
            .filter(is_known)
        else {
            return (cycles_per_miss, Vec::new());
        };

        let queue_cycles = queue_cycles.clamp(0.0, cycles_per_miss);
        let nearest_cost = (cycles_per_miss - queue_cycles) / current_factor;
        (
            queue_cycles + nearest_cost * nearest_factor,
            self.factors
                .iter()
                .map(|factor| nearest_cost * (factor - nearest_factor).max(0.0))
                .collect(),
        )
    }
}

impl ProgramModel {
    /// Builds the model; `None` if the curve, the speed or the cost of a miss is missing.
    pub fn from_inputs(inputs: &ModelInputs<'_>) -> Option<Self> {
        let curve = inputs
            .profile
            .misses_per_kilo_instr()
            .filter(|curve| curve.len() >= 2)?;
        let speed = inputs.speed;
        let step_bytes = inputs.largest_cache_bytes / STEPS as f64;

        let mut next_point = 0;
        let points =
            (0..=STEPS).map(|step| rates_near(curve, step as f64 * step_bytes, &mut next_point));
        let points: Vec<[f64; 3]> = points.collect();
        let mut misses: Vec<f64> = points.iter().map(|[rate, ..]| rate / 1000.0).collect();
        let rate_errors = |[rate, low, high]: &[f64; 3]| ErrorBounds {
            below: (rate - low).max(0.0) / 1000.0,
            above: (high - rate).max(0.0) / 1000.0,
        };
        let errors = points.iter().map(rate_errors).collect();

        // With no resident lines, every reference misses, if the number of references is known.
        misses[0] = speed
            .references_per_instr
            .map_or(misses[1], |references| references.max(misses[1]));

        let lines_per_step = step_bytes / inputs.line_bytes;
        let mut curve_by_steps = StepCurve {
            misses,
            errors,
            instr_by_steps: Vec::with_capacity(STEPS + 1),
        };
        curve_by_steps.make_monotone(lines_per_step);
        let measured_misses = speed.misses_per_instr;
        let current_misses = measured_misses.unwrap_or(curve_by_steps.misses[STEPS]);

        // Counted stalls are those of the task's present node. A stated cost is that of near memory, for serialized
        // misses; if misses overlap, their total cost is at most the elapsed cycles.
        let current_factor = inputs
            .memory
            .factors
            .get(inputs.memory.current_node)
            .copied()
            .unwrap_or(1.0);
        let max_penalty = (1.0 - MIN_COMPUTE_SHARE) * speed.cycles_per_instr
            / current_misses.max(NEGLIGIBLE_MISSES_PER_INSTR);
        let stated_penalty = || Some((inputs.penalty_cycles? * current_factor).min(max_penalty));
        let cycles_per_miss = speed
            .stall_cycles_per_miss
            .or_else(stated_penalty)?
            .max(0.0);

        let queue_cycles = speed
            .stall_cycles_per_miss
            .and(speed.queue_cycles_per_miss)
            .unwrap_or(0.0);
        let (nearest_cycles, far_cycles) = inputs.memory.split_cost(cycles_per_miss, queue_cycles);

        let remote_cycles = speed.remote_cycles_per_instr.unwrap_or(0.0);
        let base_cycles =
            (speed.cycles_per_instr - current_misses * cycles_per_miss - remote_cycles)
                .max(MIN_COMPUTE_SHARE * speed.cycles_per_instr);
        let split_share = 1.0 - inputs.local_partner_share.clamp(0.0, 0.9);

        let [rate, low, high] = rates_at(curve, inputs.largest_cache_bytes / 2.0);
        // Half of a 95 % interval is two standard deviations. One size stands for the curve: half of the largest cache.
        let standard_deviation = (high - low) / 4.0;
        let curve_error = (standard_deviation / rate.max(1e-9)).clamp(0.02, 0.5);
        let goal = inputs.goal.unwrap_or_default();

        let mut program = ProgramModel {
            curve: curve_by_steps,
            lines_per_step,
            unlogged: CurveShift::NONE,
            step_bytes,
            base_cycles,
            cycles_per_miss: nearest_cycles,
            far_cycles,
            lines_per_miss: speed
                .bytes_per_miss
                .map_or(1.0, |bytes| bytes / inputs.line_bytes)
                .clamp(0.5, 50.0),
            remote_cycles: remote_cycles / split_share,
            cpu_demand: speed.cpu_demand,
            goal,
            rate: None,
            curve_error,
            odds_ratio: 1.0,
            solo: inputs
                .profile
                .rates
                .solo_instr_per_cycle
                .filter(|solo| solo.value > 0.0)
                .map(|solo| SoloMeasurement {
                    cycles_per_instr: 1.0 / solo.value,
                    misses_per_instr: inputs
                        .profile
                        .rates
                        .solo_misses_per_kilo_instr
                        .map(|mpki| mpki.value / 1000.0),
                }),
        };

        // Beyond the log's reach the curve is a guess, so a count within its error says nothing about the log.
        let most = program.curve.misses[1];
        let fewest = program.curve.misses[STEPS] - program.curve.errors[STEPS].below;
        match measured_misses {
            Some(count) if count > most => program.add_unlogged_misses(most, count),
            Some(count) if count < fewest => program.add_unlogged_misses(fewest, count),
            _ => {}
        }

        let numbers = [
            program.base_cycles,
            program.cycles_per_miss,
            program.remote_cycles,
        ];
        (numbers.iter().all(|number| number.is_finite())
            && program.curve.misses.iter().all(|rate| rate.is_finite()))
        .then_some(program)
    }

    /// Moves a point of the profile's curve to the count, which lies outside of the curve's range, because the log does
    /// not contain all fetches. The missing ones are the same with any space, or in proportion to the others: the mean
    /// of the two is taken, and they widen the error.
    fn add_unlogged_misses(&mut self, logged: f64, count: f64) {
        let (factor, addend) = (
            count / logged.max(NEGLIGIBLE_MISSES_PER_INSTR),
            count - logged,
        );
        let lines_per_step = self.lines_per_step;
        let curve = &mut self.curve;
        for (rate, error) in curve.misses.iter_mut().zip(&mut curve.errors).skip(1) {
            let (shifted, scaled) = ((*rate + addend).max(0.0), *rate * factor);
            let difference = 0.5 * (shifted - scaled).abs();
            *rate = 0.5 * (shifted + scaled);
            *error = ErrorBounds {
                below: error.below.max(difference).min(*rate),
                above: error.above.max(difference),
            };
        }
        curve.misses[0] = curve.misses[0].max(curve.misses[1]);
        curve.rebuild_growth(lines_per_step);
        self.unlogged = CurveShift {
            factor: 0.5 * (1.0 + factor),
            addend: 0.5 * addend,
        };
    }

    /// The additional cycles of a miss on this memory node relative to the nearest; 0 if unknown.
    pub fn far_cycles(&self, node: u32) -> f64 {
        self.far_cycles.get(node as usize).copied().unwrap_or(0.0)
    }

    /// Misses per instruction, interpolated; beyond the curve, its last value.
    pub fn misses_at(&self, bytes: f64) -> f64 {
        let position_steps = (bytes / self.step_bytes).clamp(0.0, STEPS as f64);
        let low = (position_steps as usize).min(STEPS - 1);
        let misses = &self.curve.misses;
        misses[low] + (position_steps - low as f64) * (misses[low + 1] - misses[low])
    }

    /// Whether the profiled curve predicts clearly more misses with this space than were measured. Such a curve does
    /// not describe the program's present work.
    pub fn is_contradicted(&self, bytes: f64, measured_misses: f64) -> bool {
        let step = ((bytes / self.step_bytes).clamp(0.0, STEPS as f64)) as usize;
        let curve_misses = (self.misses_at(bytes) - self.unlogged.addend) / self.unlogged.factor;
        curve_misses - self.curve.errors[step].below - measured_misses
            > (MIN_CONTRADICTION_SHARE * curve_misses).max(MIN_CONTRADICTION_RATE)
    }

    /// Converts a composed occupancy to the real one, by the ratio measured under the plan in force; at most the whole
    /// cache.
    pub fn real_occupancy(&self, composed_bytes: f64, cache_bytes: f64) -> f64 {
        let share = (composed_bytes / cache_bytes).clamp(0.0, 1.0);
        cache_bytes * self.odds_ratio * share / (1.0 - share + self.odds_ratio * share)
    }

    /// Moves the curve through misses that were counted with partitions of these sizes, in rising order.
    ///
    /// Next to a counted size, the curve keeps its difference from the count. Beyond the largest one, it keeps either
    /// that difference or that factor: the mean of the two is taken, and they widen the error. As curves fall, counts
    /// bound the curve and its errors. Most curves are convex, so between two counts only the larger size's bounds the
    /// error.
    pub fn pass_through(&mut self, counts: &[CountedSize]) {
        if counts.is_empty() {
            return;
        }

        let prior = self.clone();
        let prior_curve = &prior.curve;
        self.unlogged = CurveShift::NONE;
        let shift = |count: CountedSize| count.misses_per_instr - prior.misses_at(count.bytes);
        for step in 0..=STEPS {
            let bytes = step as f64 * self.step_bytes;
            let next = counts.partition_point(|count| count.bytes <= bytes);
            let before = next.checked_sub(1).map(|last| counts[last]);
            let after = counts.get(next).copied();

            let rate = prior_curve.misses[step];
            let (rate, error) = match (before, after) {
                (Some(before), Some(after)) => {
                    let fraction = (bytes - before.bytes) / (after.bytes - before.bytes).max(1.0);
                    (
                        rate + shift(before) + fraction * (shift(after) - shift(before)),
                        f64::INFINITY,
                    )
                }
                (Some(before), None) => {
                    let prior_misses = prior.misses_at(before.bytes);
                    let shifted = rate + shift(before);
                    let scaled = rate * before.misses_per_instr
                        / prior_misses.max(NEGLIGIBLE_MISSES_PER_INSTR);
                    (0.5 * (shifted + scaled), 0.5 * (shifted - scaled).abs())
                }
                (None, Some(after)) => (rate + shift(after), 0.0),
                (None, None) => (rate, 0.0),
            };

            let low = after.map_or(0.0, |count| count.misses_per_instr);
            let high = before.map_or(f64::INFINITY, |count| count.misses_per_instr);
            let high = high.max(low);
            let is_counted =
                before.is_some_and(|count| bytes - count.bytes < 0.5 * self.step_bytes);
            if is_counted {
                self.curve.misses[step] = high;
                self.curve.errors[step] = ErrorBounds::NONE;
                continue;
            }

            let rate = rate.clamp(low, high);
            let prior_error = prior_curve.errors[step];
            // Between two counts, the curve is at most about linear.
            let above = if after.is_some() && before.is_some() {
                0.0
            } else {
                prior_error.above.max(error)
            };
            self.curve.misses[step] = rate;
            self.curve.errors[step] = ErrorBounds {
                below: prior_error.below.max(error).min(rate - low),
                above: above.min(high - rate),
            };
        }
        self.curve.make_monotone(self.lines_per_step);
    }

    /// The program with the optimistic curve: beyond the composed occupancy, the lower end of the error band. Only less
    /// space than composed can then explain more misses.
    #[must_use]
    pub fn with_lowest_curve(&self, composed_bytes: f64) -> Self {
        let mut lowest = self.clone();
        let curve = &mut lowest.curve;
        for (step, (rate, error)) in curve.misses.iter_mut().zip(&mut curve.errors).enumerate() {
            if step as f64 * self.step_bytes > composed_bytes {
                *rate = (*rate - error.below).max(0.0);
            }
            *error = ErrorBounds::NONE;
        }
        curve.make_monotone(self.lines_per_step);
        lowest
    }

    /// Shifts the curve toward the misses measured at a composed occupancy, where the log was too short to reach.
    ///
    /// All points up to the next counted sizes move by the same share of their errors, but by no more than the count
    /// differs from the curve. Each access has one reuse distance: if it misses contrary to the curve with one size,
    /// the curve is wrong by at most that access with any other. If the count is above the curve, points of less space
    /// rise only to the count, which bounds them from below: a stream, whose log ends early, misses as often with any
    /// space. If the count is below, the accesses that hit contrary to the curve have distances of which only the upper
    /// bound is known, the occupancy, so they are taken to be spread evenly below it: points of less space fall in
    /// proportion to their space. Otherwise a loop that the log did not see whole would seem to need no more than the
    /// log's reach.
    pub fn shift_within_error(&mut self, composed_bytes: f64, misses: f64) {
        let misses_deviation = misses - self.misses_at(composed_bytes);
        let error_on_side = |error: &ErrorBounds| {
            if misses_deviation < 0.0 {
                error.below
            } else {
                error.above
            }
        };
        let position_steps = (composed_bytes / self.step_bytes).clamp(0.0, STEPS as f64);
        let low = (position_steps as usize).min(STEPS - 1);
        let (error_before, error_after) = (
            error_on_side(&self.curve.errors[low]),
            error_on_side(&self.curve.errors[low + 1]),
        );
        let error = error_before + (position_steps - low as f64) * (error_after - error_before);
        if error <= 0.0 {
            return;
        }

        let error_share = (misses_deviation / error).clamp(-1.0, 1.0);
        let corrected_rate = self.misses_at(composed_bytes) + error_share * error;
        let lines_per_step = self.lines_per_step;
        let curve = &mut self.curve;
        // The count says nothing about errors beyond a counted size.
        let is_counted = |step: &usize| curve.errors[*step] == ErrorBounds::NONE;
        let first_step = (0..=low).rev().find(is_counted).unwrap_or(0);
        let last_step = (low + 1..=STEPS).find(is_counted).unwrap_or(STEPS);
        let points = curve.misses.iter_mut().zip(&mut curve.errors).enumerate();
        for (step, (rate, error)) in points.take(last_step + 1).skip(first_step) {
            let mut max_shift = misses_deviation.abs();
            if misses_deviation < 0.0 && step < low {
                let (distance, occupancy) = (step - first_step, position_steps - first_step as f64);
                max_shift *= distance as f64 / occupancy;
            }
            let shift = error_share * error_on_side(error);
            // Between the two points beside it, the curve passes through the count.
            let shift = if step == low || step == low + 1 {
                shift
            } else {
                shift.clamp(-max_shift, max_shift)
            };
            let shifted_rate = (*rate + shift).max(0.0);
            let lower_end = *rate - error.below;
            let upper_end = *rate + error.above;
            *rate = if misses_deviation > 0.0 && step <= low {
                rate.max(corrected_rate.min(shifted_rate))
            } else {
                shifted_rate
            };
            *error = ErrorBounds {
                below: (*rate - lower_end).max(0.0),
                above: (upper_end - *rate).max(0.0),
            };
        }
        curve.make_monotone(lines_per_step);
    }

    /// Shifts the curve to the misses measured at a composed occupancy. Differences within the curve's error correct
    /// the curve; larger ones correct the occupancy.
    pub fn calibrate(&mut self, composed_bytes: f64, cache_bytes: f64, misses: f64) {
        let shift = std::mem::replace(&mut self.unlogged, CurveShift::NONE);
        if shift.addend != 0.0 {
            let logged_misses = self.curve.misses.iter_mut().skip(1);
            logged_misses.for_each(|rate| *rate = ((*rate - shift.addend) / shift.factor).max(0.0));
            self.add_unlogged_misses(self.misses_at(composed_bytes), misses);
            self.unlogged = CurveShift::NONE;
        }

        self.shift_within_error(composed_bytes, misses);
        let (max_rate, min_rate) = (self.misses_at(0.0), self.misses_at(cache_bytes));
        let expected_misses = self.misses_at(composed_bytes);
        if (misses - expected_misses).abs() <= NOISE_SHARE * (max_rate - min_rate)
            || max_rate <= min_rate
        {
            return;
        }

        let rates = &self.curve.misses;
        let next_index = rates.partition_point(|&rate| rate > misses).clamp(1, STEPS);
        let (rate_before, rate_after) = (rates[next_index - 1], rates[next_index]);
        let fraction = if rate_before > rate_after {
            ((rate_before - misses) / (rate_before - rate_after)).clamp(0.0, 1.0)
        } else {
            1.0
        };
        let steps = next_index as f64 - 1.0 + fraction;
        let odds = |bytes: f64| {
            let share = (bytes / cache_bytes).clamp(0.02, 0.98);
            share / (1.0 - share)
        };
        self.odds_ratio = (odds(steps * self.step_bytes) / odds(composed_bytes))
            .clamp(1.0 / MAX_ODDS_RATIO, MAX_ODDS_RATIO);
    }

    pub fn lines_in(&self, bytes: f64) -> f64 {
        bytes / self.step_bytes * self.lines_per_step
    }

    /// The footprint and its growth, searched from the position of the last call.
    pub fn footprint_near(&self, instructions: f64, position: &mut usize) -> (f64, f64) {
        let thresholds = &self.curve.instr_by_steps;
        let mut next_index = *position;
        while next_index <= STEPS && thresholds[next_index] <= instructions {
            next_index += 1;
        }
        while next_index > 0 && thresholds[next_index - 1] > instructions {
            next_index -= 1;
        }
        *position = next_index;
        self.interpolate_footprint(next_index, instructions)
    }

    fn interpolate_footprint(&self, next_index: usize, instructions: f64) -> (f64, f64) {
        if next_index > STEPS {
            return (STEPS as f64 * self.step_bytes, 0.0);
        }
        // The first entry is 0 instructions, so there is always an earlier entry.
        let next_index = next_index.max(1);
        let [before, after] =
            [next_index - 1, next_index].map(|index| self.curve.instr_by_steps[index]);
        let bytes_per_instr = self.step_bytes / (after - before).max(1e-9);
        (
            (next_index as f64 - 1.0) * self.step_bytes
                + (instructions - before).max(0.0) * bytes_per_instr,
            bytes_per_instr,
        )
    }

    /// The cycles per instruction with this number of bytes, if each miss waits `wait_cycles` longer and this share of
    /// partners is on other caches.
    pub fn cycles_with_bytes(&self, bytes: f64, wait_cycles: f64, split_share: f64) -> f64 {
        self.cycles_with_misses(self.misses_at(bytes), wait_cycles, split_share)
    }

    /// Cycles per instruction; `misses` are per instruction, and `wait_cycles` queueing per miss.
    pub fn cycles_with_misses(&self, misses: f64, wait_cycles: f64, split_share: f64) -> f64 {
        self.base_cycles
            + misses * (self.cycles_per_miss + wait_cycles)
            + split_share * self.remote_cycles
    }

    /// Moves the curve above the present occupancy, and adjusts the split of cycles into waits and others, so that the
    /// forecast for the whole cache without other traffic equals the measured solo speed. `queue_cycles` is the part of
    /// a miss's present wait that other traffic causes.
    pub fn calibrate_solo(&mut self, composed_bytes: f64, cache_bytes: f64, queue_cycles: f64) {
        let Some(solo) = self.solo else { return };
        let (current_misses, curve_solo_misses) =
            (self.misses_at(composed_bytes), self.misses_at(cache_bytes));
        let solo_misses = solo
            .misses_per_instr
            .unwrap_or(curve_solo_misses)
            .min(current_misses);

        let (step_bytes, lines_per_step) = (self.step_bytes, self.lines_per_step);
        let curve = &mut self.curve;
        for step in 0..=STEPS {
            let bytes = step as f64 * step_bytes;
            if bytes <= composed_bytes {
                continue;
            }

            let decline_left = if current_misses - curve_solo_misses > NOISE_SHARE * current_misses
            {
                ((curve.misses[step] - curve_solo_misses) / (current_misses - curve_solo_misses))
                    .clamp(0.0, 1.0)
            } else {
                ((cache_bytes - bytes) / (cache_bytes - composed_bytes).max(1.0)).clamp(0.0, 1.0)
            };
            curve.misses[step] = solo_misses + decline_left * (current_misses - solo_misses);
        }

        curve.rebuild_growth(lines_per_step);
        let current_cycles = self.base_cycles + current_misses * self.cycles_per_miss;
        let misses_beyond_solo = current_misses - solo_misses;
        if misses_beyond_solo > MIN_BEYOND_SHARE * current_misses
            && current_cycles > solo.cycles_per_instr
        {
            let cost = (current_cycles - solo.cycles_per_instr - solo_misses * queue_cycles)
                / misses_beyond_solo;
            let previous_cost = self.cycles_per_miss;
            self.cycles_per_miss = cost.clamp(
                previous_cost / MAX_COST_FACTOR,
                previous_cost * MAX_COST_FACTOR,
            );
            self.base_cycles = (current_cycles - current_misses * self.cycles_per_miss)
                .max(MIN_COMPUTE_SHARE * current_cycles);
        }
    }

    /// Shifts the cycles without waits by the difference between measured and forecast cycles per instruction.
    pub fn shift_base_cycles(&mut self, forecast_cycles: f64, measured_cycles: f64) {
        self.base_cycles = (self.base_cycles + measured_cycles - forecast_cycles)
            .max(MIN_COMPUTE_SHARE * measured_cycles);
    }

    /// Cycles per instruction alone on this cache: as measured, or else by the curve.
    pub fn solo_cycles(&self, cache_bytes: f64) -> f64 {
        if let Some(solo) = self.solo {
            return solo.cycles_per_instr;
        }
        self.base_cycles + self.misses_at(cache_bytes) * self.cycles_per_miss
    }

    /// The solo cycles per instruction if the curve lies as low as its error allows.
    pub fn best_solo_cycles(&self, cache_bytes: f64) -> f64 {
        let position_steps = (cache_bytes / self.step_bytes).clamp(0.0, STEPS as f64);
        let error_below = self.curve.errors[(position_steps as usize).min(STEPS)].below;
        self.base_cycles
            + (self.misses_at(cache_bytes) - error_below).max(0.0) * self.cycles_per_miss
    }
}

/// The value and both ends of the interval; linear between points, constant beyond the ends.
fn rates_at(curve: &SizeCurve, bytes: f64) -> [f64; 3] {
    rates_near(curve, bytes, &mut 0)
}

/// The same as `rates_at`, for sizes that rise from call to call: `next_position` is the point of the last call.
fn rates_near(curve: &SizeCurve, bytes: f64, next_position: &mut usize) -> [f64; 3] {
    while curve
        .get(*next_position)
        .is_some_and(|(size, _)| (*size as f64) < bytes)
    {
        *next_position += 1;
    }

    let next_position = *next_position;
    let point_values = |index: usize| {
        [
            curve[index].1.value,
            curve[index].1.low,
            curve[index].1.high,
        ]
    };
    if next_position == 0 || next_position == curve.len() {
        return point_values(next_position.min(curve.len() - 1));
    }

    let fraction = (bytes - curve[next_position - 1].0 as f64)
        / (curve[next_position].0 - curve[next_position - 1].0).max(1) as f64;
    let (low, high) = (point_values(next_position - 1), point_values(next_position));
    std::array::from_fn(|bound| low[bound] + fraction * (high[bound] - low[bound]))
}

#[cfg(test)]
pub mod tests;
