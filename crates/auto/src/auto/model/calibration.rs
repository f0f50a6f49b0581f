//! Models that agree with what was counted under the plan in force.

use cachemate_core::TaskId;
use cachemate_papers::work_metric::WorkMetric;

use super::layout::SiteLayout;
use super::problem::PlanningProblem;
use super::program_model::PromisedRate;
use super::score::forecast_speeds;
use super::score_cache::ScoreCache;

/// With more tasks than this, no partition is explored, because the effect of one curve is lost in those of the others.
const MAX_EXPLORED_TASKS: usize = 24;

impl PlanningProblem {
    /// The problem with all curves as low as their errors allow for more space than under this layout. `None` if no
    /// cache can be divided, or there are too many tasks to explore their curves.
    pub fn with_lowest_curves(&self, current_layout: &SiteLayout) -> Option<Self> {
        let can_divide = self.sites.iter().any(|site| site.partition_units.is_some());
        if !can_divide || self.tasks.len() > MAX_EXPLORED_TASKS {
            return None;
        }
        let mut lowest = self.clone();
        for (task, speed) in lowest.tasks.iter_mut().zip(forecast_speeds(
            self,
            current_layout,
            &ScoreCache::default(),
        )) {
            if let Some((program, speed)) = task.program.as_mut().zip(speed) {
                *program = program.with_lowest_curve(speed.occupancy_bytes);
            }
        }
        Some(lowest)
    }

    /// The tasks whose misses were measured under this layout, each with whether the measurement contradicts its curve.
    pub fn check_curves(
        &self,
        current_layout: &SiteLayout,
        measured_misses_of: impl Fn(TaskId) -> Option<f64>,
    ) -> Vec<(TaskId, bool)> {
        let check_task = |index: usize| {
            let problem_task = &self.tasks[index];
            let (bytes, misses) = self
                .partition_bytes(current_layout, index)
                .zip(measured_misses_of(problem_task.task))?;
            Some((
                problem_task.task,
                problem_task
                    .program
                    .as_ref()?
                    .is_contradicted(bytes, misses),
            ))
        };
        (0..self.tasks.len()).filter_map(check_task).collect()
    }

    /// Shifts every curve to the value measured under the layout in force. Gangs are left out, because occupancies are
    /// not steady within their turns.
    pub fn calibrate(
        &mut self,
        current_layout: &SiteLayout,
        measured_misses_of: impl Fn(TaskId) -> Option<f64>,
    ) {
        let forecasts = forecast_speeds(self, current_layout, &ScoreCache::default());

        for (index, forecast) in forecasts.into_iter().enumerate() {
            let Some((bytes, forecast_speed)) =
                self.partition_bytes(current_layout, index).zip(forecast)
            else {
                continue;
            };

            let problem_task = &mut self.tasks[index];
            if let Some((program, misses)) = problem_task
                .program
                .as_mut()
                .zip(measured_misses_of(problem_task.task))
            {
                program.calibrate(forecast_speed.occupancy_bytes, bytes, misses);
            }

            let site = current_layout.site_by_task[index].map(|site| &self.sites[site]);
            if let Some((program, site)) = self.tasks[index].program.as_mut().zip(site) {
                let queue_cycles = self
                    .bus
                    .as_ref()
                    .map_or(0.0, |bus| bus.current_wait_cycles(site.package));
                program.calibrate_solo(forecast_speed.occupancy_bytes, site.bytes, queue_cycles);
            }
        }
    }

    /// Adjusts the cycles that tasks do not wait for memory, so that the forecast of the layout in force equals the
    /// measured cycles per instruction. The composition and the queue are modeled, and their errors would otherwise
    /// look like gains of other layouts.
    pub fn calibrate_cycles(
        &mut self,
        current_layout: &SiteLayout,
        measured_cycles_of: impl Fn(TaskId) -> Option<f64>,
    ) {
        let forecasts = forecast_speeds(self, current_layout, &ScoreCache::default());

        for (index, forecast) in forecasts.into_iter().enumerate() {
            let Some((_, forecast_speed)) =
                self.partition_bytes(current_layout, index).zip(forecast)
            else {
                continue;
            };

            let problem_task = &mut self.tasks[index];
            if let Some((program, measured_cycles)) = problem_task
                .program
                .as_mut()
                .zip(measured_cycles_of(problem_task.task))
            {
                program
                    .shift_base_cycles(forecast_speed.cycles_per_instr(program), measured_cycles);
            }
        }
    }

    /// Relates promised rates to the rates measured under the layout in force, so that the bias of the model cancels.
    pub fn calibrate_rates(
        &mut self,
        current_layout: &SiteLayout,
        measured_rate_of: impl Fn(TaskId) -> Option<(WorkMetric, f64)>,
    ) {
        let has_promised_rate = |index: usize| {
            self.tasks[index]
                .program
                .as_ref()
                .is_some_and(|model| model.goal.min_rate.is_some())
        };
        if !self.known_tasks().any(has_promised_rate) {
            return;
        }

        let forecast = forecast_speeds(self, current_layout, &ScoreCache::default());
        for (problem_task, speed) in self.tasks.iter_mut().zip(forecast) {
            let Some((program, speed)) = problem_task.program.as_mut().zip(speed) else {
                continue;
            };
            let is_calibrated = program.goal.min_rate.is_some() && speed.instr_per_cycle > 0.0;
            program.rate = is_calibrated
                .then(|| measured_rate_of(problem_task.task))
                .flatten()
                .map(|(work, per_s)| PromisedRate {
                    work,
                    per_instr_per_cycle: per_s / speed.instr_per_cycle,
                });
        }
    }
}
