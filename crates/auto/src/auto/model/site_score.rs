//! Forecasts of tasks, and their sums over sites, by which plans are compared.

use std::cell::OnceCell;

use cachemate_core::TaskForecast;
use cachemate_locality::memory_queue::LineSource;

use super::bus::task_lines;
use super::program_model::ProgramModel;

/// Forecast of one task.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ForecastSpeed {
    /// Speed relative to the solo speed.
    pub relative_speed: f64,
    /// Instructions per cycle of elapsed time.
    pub instr_per_cycle: f64,
    /// Lines to and from memory per cycle of elapsed time.
    pub lines_per_cycle: f64,
    /// Occupancy, as composed.
    pub occupancy_bytes: f64,
    /// Share of the task's CPU demand that is met.
    pub met_demand_share: f64,
    /// Solo instructions per cycle with the miss curve at the lower end of its error; only for tasks with a promised
    /// rate.
    pub best_solo_instr_per_cycle: Option<f64>,
}

impl ForecastSpeed {
    /// The shortfall from a task's goals, as a share, summed over the goals. A rate that the task could not even reach
    /// alone is not counted: no plan can provide it, and no other task should lose speed for it.
    pub fn goal_shortfall(&self, program: &ProgramModel) -> f64 {
        let goal = program.goal;
        let slowdown_shortfall = goal.max_slowdown.map_or(0.0, |limit| {
            1.0 / self.relative_speed - 1.0 - target_slowdown(limit)
        });
        let rate_shortfall = goal
            .min_rate
            .zip(self.current_and_solo_rates(program))
            .map_or(0.0, |(min_rate, (rate, solo_rate))| {
                if solo_rate < min_rate {
                    0.0
                } else {
                    min_rate / rate.max(1e-12) - 1.0
                }
            });
        slowdown_shortfall.clamp(0.0, 10.0) + rate_shortfall.clamp(0.0, 10.0)
    }

    pub fn misses_per_instr(&self, program: &ProgramModel) -> f64 {
        self.lines_per_cycle / self.instr_per_cycle / program.lines_per_miss
    }

    /// What the task asks of its path to memory, if its misses wait this long there.
    pub fn lines_on_path(&self, program: &ProgramModel, wait_cycles: f64) -> LineSource {
        let cycles_per_instr = 1.0 / self.instr_per_cycle.max(1e-12);
        let lines_per_miss = program.lines_per_miss.max(1e-9);
        let misses_per_instr = self.lines_per_cycle * cycles_per_instr / lines_per_miss;
        task_lines(
            cycles_per_instr,
            misses_per_instr,
            lines_per_miss,
            wait_cycles,
        )
    }

    /// The cycles per instruction while the task runs.
    pub fn cycles_per_instr(&self, program: &ProgramModel) -> f64 {
        self.met_demand_share * program.cpu_demand / self.instr_per_cycle.max(1e-12)
    }

    /// The work per second, now and at best alone on the machine; `None` if no rate was promised, or it was not
    /// measured.
    pub fn current_and_solo_rates(&self, program: &ProgramModel) -> Option<(f64, f64)> {
        let rate_factor = program.rate?.per_instr_per_cycle;
        Some((
            rate_factor * self.instr_per_cycle,
            rate_factor * self.best_solo_instr_per_cycle?,
        ))
    }
}

/// The slowdown at which a plan aims for a promised maximum, which is lower by the error of a forecast.
fn target_slowdown(max_slowdown: f64) -> f64 {
    max_slowdown - (0.25 * max_slowdown).min(0.01)
}

/// Shortfall from which a broken promise has its whole additional cost.
const BROKEN_SHORTFALL: f64 = 0.02;
/// Additional cost of a broken promise. It grows with the shortfall up to [`BROKEN_SHORTFALL`] and is constant beyond
/// it, so that one of two promises that exclude each other is kept.
const BROKEN_GOAL_COST: f64 = 0.1;

pub fn shortfall_cost(shortfall: f64) -> f64 {
    shortfall + BROKEN_GOAL_COST * (shortfall / BROKEN_SHORTFALL).min(1.0)
}

/// Sums over the tasks of one site or of all sites.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayoutScore {
    pub weighted_speed_sum: f64,
    pub total_weight: f64,
    pub min_relative_speed: f64,
    /// Shortfall from all goals, weighted by priority and summed.
    pub unmet_goals: f64,
}

impl LayoutScore {
    /// Score of an empty set of tasks.
    pub const EMPTY: LayoutScore = LayoutScore {
        weighted_speed_sum: 0.0,
        total_weight: 0.0,
        min_relative_speed: f64::INFINITY,
        unmet_goals: 0.0,
    };

    #[must_use]
    pub fn plus(self, addend: LayoutScore) -> Self {
        LayoutScore {
            weighted_speed_sum: self.weighted_speed_sum + addend.weighted_speed_sum,
            total_weight: self.total_weight + addend.total_weight,
            min_relative_speed: self.min_relative_speed.min(addend.min_relative_speed),
            unmet_goals: self.unmet_goals + addend.unmet_goals,
        }
    }

    /// All fields as bits, for exact comparisons.
    #[cfg(test)]
    pub fn bits(self) -> [u64; 4] {
        let sums = [
            self.weighted_speed_sum,
            self.total_weight,
            self.min_relative_speed,
            self.unmet_goals,
        ];
        sums.map(f64::to_bits)
    }

    /// The mean of speeds relative to solo speeds, weighted by priority.
    pub fn mean_speed(self) -> f64 {
        self.weighted_speed_sum / self.total_weight.max(1e-9)
    }
}

/// Forecast of the members of one site.
#[derive(Clone, Debug)]
pub struct SiteForecast {
    pub score: LayoutScore,
    /// Speeds, in the order of the members.
    pub speeds: Vec<ForecastSpeed>,
    /// What the loop compares with the next window, computed when it is first asked for.
    pub task_forecasts: OnceCell<Vec<TaskForecast>>,
}
