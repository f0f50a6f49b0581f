//! Reasons of decisions, as text and numbers: the candidates and the choice.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{Reason, TaskId, VerificationMethod};
use cachemate_papers::reasons::named_number;

use super::candidates::{CandidatePlan, Mechanism};
use super::evidence::probe_planner::ProbePlanner;
use super::model::layout::SiteLayout;
use super::model::problem::PlanningProblem;
use super::model::score::{ForecastSpeed, forecast_speeds};
use super::model::score_cache::ScoreCache;

/// A search for a better plan, and its result.
pub struct SearchReport<'a> {
    pub problem: &'a PlanningProblem,
    pub score_cache: &'a ScoreCache,
    pub candidates: &'a [CandidatePlan],
    pub best_candidate: &'a CandidatePlan,
    pub current_layout: &'a SiteLayout,
    /// Gain over the plan in force, as a share.
    pub gain: f64,
    /// The newcomers, if only newcomers were placed.
    pub newcomers: Option<&'a [usize]>,
    /// Gains of the best plan of each mechanism over the plan in force, as shares.
    pub mechanism_gains: &'a [(Mechanism, f64)],
}

/// The last reported forecasts. Only changes are reported, so that the log does not grow while nothing happens.
#[derive(Default)]
pub struct ReportedForecasts {
    last_unchanged: Option<(String, Vec<TaskId>)>,
    reported_speeds: BTreeMap<TaskId, (f64, String)>,
}

/// Smallest change of a forecast that is reported again, as a share of the solo speed.
const MIN_REPORTED_CHANGE: f64 = 0.05;

impl ReportedForecasts {
    /// Whether a task's forecast has changed enough to be reported, and records it if so.
    fn record_if_changed(&mut self, task: TaskId, relative_speed: f64, placement: &str) -> bool {
        let last_report = self.reported_speeds.get(&task);
        let is_unchanged = last_report.is_some_and(|(speed, reported_placement)| {
            reported_placement == placement && (speed - relative_speed).abs() < MIN_REPORTED_CHANGE
        });
        if !is_unchanged {
            self.reported_speeds
                .insert(task, (relative_speed, placement.to_string()));
        }
        !is_unchanged
    }

    /// Forgets tasks that have exited, once there are many of them.
    fn retain(&mut self, problem: &PlanningProblem) {
        if self.reported_speeds.len() <= problem.tasks.len() {
            return;
        }
        let problem_tasks: BTreeSet<TaskId> = problem.task_ids().collect();
        self.reported_speeds
            .retain(|task, _| problem_tasks.contains(task));
    }
}

impl SearchReport<'_> {
    fn score_reason(&self, probe_planner: &ProbePlanner, text: String) -> Reason {
        let score_of = |candidate: &CandidatePlan| {
            let name = candidate.label.replace(", ", "_").replace(' ', "_");
            named_number(format!("score_of_{name}"), candidate.score.mean_speed())
        };
        let mut numbers: Vec<(String, f64)> = self.candidates.iter().map(score_of).collect();
        numbers.push(named_number("gain_percent", 100.0 * self.gain));
        for (mechanism, gain) in self.mechanism_gains {
            numbers.push(named_number(
                format!("gain_of_{}_percent", mechanism.describe()),
                100.0 * gain,
            ));
        }

        numbers.push(named_number(
            "probing_percent_of_processor_time",
            100.0 * probe_planner.ledger.spent_share(),
        ));
        let tasks: Vec<TaskId> = self
            .problem
            .known_tasks()
            .map(|index| self.problem.tasks[index].task)
            .collect();
        Reason::new(tasks, text, numbers)
    }

    /// Explains why the plan in force stays.
    pub fn explain_unchanged(
        &self,
        probe_planner: &ProbePlanner,
        reported_forecasts: &mut ReportedForecasts,
        reasons: &mut Vec<Reason>,
    ) {
        let text = format!(
            "the plan in force stays: of {} candidates, '{}' is best, {:+.1} % forecast{}{}",
            self.candidates.len(),
            self.best_candidate.label,
            100.0 * self.gain,
            self.describe_mechanisms(),
            self.describe_newcomers()
        );
        reported_forecasts.retain(self.problem);
        let reason = self.score_reason(probe_planner, text);
        let unchanged_report = (reason.text.clone(), reason.tasks.clone());
        let mut new_reasons = Vec::new();
        let reported_layout = self.reported_layout(self.current_layout);
        let current_speeds = forecast_speeds(self.problem, &reported_layout, self.score_cache);
        for index in self.problem.known_tasks() {
            let Some(current_speed) = current_speeds[index] else {
                continue;
            };
            let (task, placement) = (
                self.problem.tasks[index].task,
                self.describe_placement(self.current_layout, index),
            );
            if !reported_forecasts.record_if_changed(task, current_speed.relative_speed, &placement)
            {
                continue;
            }
            let text = format!(
                "{{0}} stays: {:.0} % of its solo speed{placement}",
                100.0 * current_speed.relative_speed
            );
            let mut numbers = vec![
                named_number("relative_speed", current_speed.relative_speed),
                named_number("occupancy_bytes", current_speed.occupancy_bytes),
            ];
            numbers.extend(self.forecast_inputs(index));
            new_reasons.push(Reason::new(vec![task], text, numbers));
        }
        // The search is reported before the forecasts that follow from it, even if it has not changed.
        if !new_reasons.is_empty()
            || reported_forecasts.last_unchanged.as_ref() != Some(&unchanged_report)
        {
            reported_forecasts.last_unchanged = Some(unchanged_report);
            reasons.push(reason);
            reasons.append(&mut new_reasons);
        }
    }

    /// A layout on the reported caches; if only newcomers were placed, these are the newcomers' caches.
    fn reported_layout(&self, layout: &SiteLayout) -> SiteLayout {
        let mut layout = layout.clone();
        if let Some(newcomers) = self.newcomers.filter(|_| self.problem.bus.is_none()) {
            let layouts = [self.current_layout, &self.best_candidate.layout];
            let sites: BTreeSet<usize> = layouts
                .iter()
                .flat_map(|layout| {
                    newcomers
                        .iter()
                        .filter_map(|&index| layout.site_by_task[index])
                })
                .collect();
            for site_of_task in &mut layout.site_by_task {
                *site_of_task = site_of_task.filter(|site| sites.contains(site));
            }
        }
        layout
    }

    /// Explains why the best plan is applied or to be confirmed.
    pub fn explain_change(
        &self,
        method: VerificationMethod,
        probe_planner: &ProbePlanner,
        reported_forecasts: &mut ReportedForecasts,
        reasons: &mut Vec<Reason>,
    ) {
        let action = match method {
            VerificationMethod::Confirmation => "to be confirmed",
            VerificationMethod::Monitoring => "applied",
        };
        let text = format!(
            "'{}' is {action}: it is the best of {} candidates, {:+.1} % forecast{}",
            self.best_candidate.label,
            self.candidates.len(),
            100.0 * self.gain,
            self.describe_newcomers()
        );
        *reported_forecasts = ReportedForecasts::default();
        reasons.push(self.score_reason(probe_planner, text));
        let [speeds_before, speeds_after] = [self.current_layout, &self.best_candidate.layout]
            .map(|layout| self.reported_layout(layout))
            .map(|layout| forecast_speeds(self.problem, &layout, self.score_cache));
        for index in self.problem.known_tasks() {
            if let (Some(old_speed), Some(new_speed)) = (speeds_before[index], speeds_after[index])
            {
                reasons.push(self.task_reason(index, old_speed, new_speed));
            }
        }
    }

    fn task_reason(
        &self,
        index: usize,
        old_speed: ForecastSpeed,
        new_speed: ForecastSpeed,
    ) -> Reason {
        let mut text = format!(
            "{{0}}: {:.0} % of its solo speed, {:.0} % before",
            100.0 * new_speed.relative_speed,
            100.0 * old_speed.relative_speed
        );
        text += &self.describe_placement(&self.best_candidate.layout, index);
        let mut numbers = vec![
            named_number("relative_speed", new_speed.relative_speed),
            named_number("relative_speed_before", old_speed.relative_speed),
            named_number("occupancy_bytes", new_speed.occupancy_bytes),
            named_number("occupancy_bytes_before", old_speed.occupancy_bytes),
        ];
        numbers.extend(self.forecast_inputs(index));
        Reason::new(vec![self.problem.tasks[index].task], text, numbers)
    }

    /// Describes the best plan of every single mechanism.
    fn describe_mechanisms(&self) -> String {
        let describe_gain = |(mechanism, gain): &(Mechanism, f64)| {
            format!("; {} {:+.1} %", mechanism.describe(), 100.0 * gain)
        };
        self.mechanism_gains.iter().map(describe_gain).collect()
    }

    fn describe_newcomers(&self) -> String {
        let newcomer_phrase = |newcomers: &[usize]| match newcomers.len() {
            1 => "; one newcomer was placed; the next search covers all tasks".to_string(),
            count => format!("; {count} newcomers were placed; the next search covers all tasks"),
        };
        self.newcomers.map_or_else(String::new, newcomer_phrase)
    }

    /// The quantities from which the task's speed is forecast.
    fn forecast_inputs(&self, index: usize) -> Vec<(String, f64)> {
        let Some(program) = &self.problem.tasks[index].program else {
            return Vec::new();
        };

        let bytes = self
            .problem
            .sites
            .iter()
            .map(|site| site.bytes)
            .fold(0.0, f64::max);
        let mpki_at_share = |share: f64| 1000.0 * program.misses_at(share * bytes);
        let site = self.problem.tasks[index]
            .last_site
            .map(|site| self.problem.sites[site].memory_node);
        let far_cycles = site.map_or(0.0, |node| program.far_cycles(node));
        let farther =
            (far_cycles > 0.0).then(|| named_number("cycles_per_miss_for_far_memory", far_cycles));

        let mut numbers = vec![
            named_number("misses_per_kilo_instr_alone", mpki_at_share(1.0)),
            named_number("misses_per_kilo_instr_on_half", mpki_at_share(0.5)),
            named_number("misses_per_kilo_instr_on_an_eighth", mpki_at_share(0.125)),
            named_number("cycles_per_miss", program.cycles_per_miss),
            named_number("cycles_per_instr_without_misses", program.base_cycles),
            named_number("holds_over_composed", program.odds_ratio),
        ];
        numbers.extend(farther);
        numbers
    }

    fn describe_placement(&self, layout: &SiteLayout, index: usize) -> String {
        let Some(site) = layout.site_by_task[index] else {
            return String::new();
        };

        let mut text = String::new();
        if layout.is_pinned[index] {
            text += &format!(", on cache {}", self.problem.sites[site].cache.0);
        }
        if let Some(partition) = layout.partitions[site]
            .iter()
            .find(|group| group.members.contains(&index))
        {
            let units = self.problem.sites[site]
                .partition_units
                .map_or(0, |partition_units| partition_units.units());
            text += &format!(", with {} of its {units} units", partition.units);
            if partition.members.len() > 1 {
                text += &format!(" shared with {} more", partition.members.len() - 1);
            }
        }

        if let Some(rotation) = &layout.rotations[site]
            && let Some(gang) = rotation.gangs.iter().find(|gang| gang.contains(&index))
        {
            let ms = rotation.slice_ns / 1_000_000;
            text += &format!(
                ", ganged with {} more in time slices of {ms} ms",
                gang.len() - 1
            );
        }
        if self.problem.tasks[index].cluster.is_some() {
            text += ", beside tasks that share its data";
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::model::score::score;
    use super::super::model::score_cache::ScoreCache;
    use super::super::model::score_cache::tests::{site_fixture, task_fixture};
    use super::*;

    fn problem_fixture(parts: &[f64]) -> PlanningProblem {
        let tasks = parts
            .iter()
            .enumerate()
            .map(|(id, &share)| task_fixture(id as u32, 0, share))
            .collect();
        PlanningProblem::undisturbed_problem(vec![site_fixture(0, 4)], tasks)
    }

    fn explain_unchanged(
        problem: &PlanningProblem,
        reported: &mut ReportedForecasts,
    ) -> Vec<Reason> {
        let current_layout = SiteLayout::from_default_sites(problem, &BTreeMap::new());
        let best = CandidatePlan {
            label: "space".to_string(),
            mechanism: Some(Mechanism::Space),
            layout: current_layout.clone(),
            score: score(problem, &current_layout, &ScoreCache::default()),
        };
        let singles = [(Mechanism::Space, 0.002)];
        let candidates = [best.clone()];
        let (best, current_layout, newcomers) = (&best, &current_layout, None);
        let (gain, singles) = (0.002, &singles);
        let report = SearchReport {
            problem,
            score_cache: &ScoreCache::default(),
            candidates: &candidates,
            best_candidate: best,
            current_layout,
            gain,
            newcomers,
            mechanism_gains: singles,
        };
        let mut reasons = Vec::new();
        report.explain_unchanged(&ProbePlanner::default(), reported, &mut reasons);
        reasons
    }

    /// Is the plan in force explained once, by mechanism and by task, and again only for tasks whose forecast has
    /// changed?
    #[test]
    fn an_unchanged_plan_is_explained_once() {
        let mut reported = ReportedForecasts::default();
        let reasons = explain_unchanged(&problem_fixture(&[0.5, 1.2, 0.4]), &mut reported);
        assert_eq!(reasons.len(), 4);
        assert!(
            reasons[0].text.contains("+0.2 % forecast; space +0.2 %"),
            "{}",
            reasons[0].text
        );
        assert!(
            reasons[1].text.starts_with("{0} stays: ") && reasons[1].tasks == [TaskId(0)],
            "{}",
            reasons[1].text
        );
        let has_number = |name: &str| reasons[1].numbers.iter().any(|(number, _)| number == name);
        assert!(
            has_number("relative_speed")
                && has_number("cycles_per_miss")
                && has_number("misses_per_kilo_instr_on_half")
        );
        assert_eq!(
            explain_unchanged(&problem_fixture(&[0.5, 1.2, 0.4]), &mut reported),
            [],
            "nothing is new"
        );
        let reasons = explain_unchanged(&problem_fixture(&[0.5, 1.2, 0.4, 1.4]), &mut reported);
        assert!(
            reasons.iter().any(|reason| reason.tasks == [TaskId(3)]),
            "a newcomer is reported"
        );
    }
}
