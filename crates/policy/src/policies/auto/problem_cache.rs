//! Results of the last search that the next one can use again.
//!
//! A full search models every program anew from the measurements since. After an arrival on a large machine, a brief
//! search comes first: it uses the last models of all known programs, and places the newcomers among them. The full
//! search follows at its usual time. Properties: a task that changed phase, was probed again, or became known requires
//! a full search, and so does a machine whose caches wait for one another.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{Plan, TaskId, View};

use super::layout::SiteLayout;
use super::probe_planner::IDLE_BELOW;
use super::problem::{PlanningProblem, PriorObservations, sites};
use super::program_model::ProgramModel;
use super::score_cache::ScoreCache;
use super::speeds::{ObservedSpeed, SpeedTracker};
use super::{Auto, LOOK_AGAIN_AFTER, Mechanism, PATIENCE_WINDOWS};
use crate::work_metric::promised_work;

/// Tasks, their phases, and whether their curves are known.
pub type TaskStamp = Vec<(TaskId, u32, bool)>;

/// See the module's documentation.
pub struct ProblemCache {
    pub scene: PlanningProblem,
    pub memo: ScoreCache,
    pub stamp: TaskStamp,
    /// Window of the last full search.
    pub whole_at: u64,
}

/// A problem to decide, with the newcomers if only they are placed.
pub struct SearchInput {
    pub scene: PlanningProblem,
    pub memo: ScoreCache,
    pub newcomers: Option<Vec<usize>>,
}

/// With fewer tasks every search is full, because it is fast enough.
const BRIEF_FROM_TASKS: usize = 25;
/// More newcomers change too much.
const MAX_NEWCOMERS: usize = 8;
/// Windows after an arrival within which all tasks that can be profiled should be.
const SURVEYED_WITHIN_WINDOWS: u64 = 3 * PATIENCE_WINDOWS;
/// Windows for which models are used again.
const REUSED_FOR: u64 = 2 * LOOK_AGAIN_AFTER;

impl ProblemCache {
    /// Tasks that arrived since, if nothing else has changed.
    fn newcomers(&self, view: &View<'_>, stamp: &TaskStamp, speeds: &SpeedTracker) -> Option<BTreeSet<TaskId>> {
        let large = self.scene.tasks.len() >= BRIEF_FROM_TASKS && self.scene.bus.is_none();
        if !large || view.observation.window >= self.whole_at + REUSED_FOR || sites(view) != self.scene.sites {
            return None;
        }
        let then: BTreeMap<TaskId, (u32, bool)> =
            self.stamp.iter().map(|&(task, phase, known)| (task, (phase, known))).collect();
        let here = stamp.iter().filter_map(|&(task, phase, known)| Some((then.get(&task)?, (phase, known))));
        let goals: BTreeMap<TaskId, _> =
            self.scene.tasks.iter().filter_map(|one| Some((one.task, one.program.as_ref()?.goal))).collect();
        let has_goal = |seen: &cachemate_core::TaskSample| {
            goals.get(&seen.task).is_some_and(|goal| *goal != seen.goal.unwrap_or_default())
        };
        if here.into_iter().any(|(then, now)| *then != now) || view.live_tasks().any(has_goal) {
            return None;
        }
        let can_be_known = |task: &TaskId| view.profiles.contains_key(task) && speeds.of(*task, 64.0).is_some();
        let new: BTreeSet<TaskId> = stamp
            .iter()
            .filter(|(task, _, known)| *known && !then.contains_key(task))
            .map(|(task, ..)| *task)
            .filter(can_be_known)
            .collect();
        (1..=MAX_NEWCOMERS).contains(&new.len()).then_some(new)
    }
}

impl Auto {
    /// The problem as known now, with all models new or only those of newcomers. `None` = nothing is known.
    pub(super) fn prepare(&mut self, view: &View<'_>, kept: &Plan) -> Option<SearchInput> {
        let last = self.last.take();
        let stamp = self.searched_at.as_ref().map(|(stamp, _)| stamp);
        let new = last.as_ref().zip(stamp).and_then(|(last, stamp)| last.newcomers(view, stamp, &self.speeds));
        match (last, new) {
            (Some(last), Some(new)) => self.with_newcomers(view, kept, last, &new),
            (last, _) => self.rebuild(view, kept, last),
        }
    }

    fn earlier(&self) -> PriorObservations<'_> {
        PriorObservations {
            speeds: &self.speeds,
            clusters: &self.probe_planner.clusters,
            lived_on: &self.default_site,
            split_tasks: &self.split_processes,
            memory_nodes: !self.parameters.disable.contains(&Mechanism::MemoryNodes),
        }
    }

    /// A speed counted under the plan in force; a recalled speed was counted under another plan.
    fn counted_now(&self, task: TaskId) -> Option<ObservedSpeed> {
        self.speeds.of(task, 64.0).filter(|speed| speed.is_current_phase)
    }

    /// Shifts the curves of these tasks to the measurements, and scales promised rates to them.
    fn calibrate(&self, view: &View<'_>, scene: &mut PlanningProblem, held: &SiteLayout, of: impl Fn(TaskId) -> bool) {
        scene.calibrate(held, |task| self.counted_now(task).filter(|_| of(task))?.misses_per_instr);
        scene.anchor(held, |task| {
            self.counted_now(task)?;
            let seen = view.live_tasks().find(|seen| seen.task == task)?;
            let work = promised_work(seen, &view.observation.tasks)?;
            Some((work, self.speeds.rate(task, work)?))
        });
    }

    /// Closes sites with a task that is not known yet, after a change of phase or before its initial profiling.
    fn close(&mut self, view: &View<'_>, scene: &mut PlanningProblem) {
        let window = view.observation.window;
        let surveys = window < self.since.1 + SURVEYED_WITHIN_WINDOWS;
        let is_unknown = |task: &TaskId| scene.tasks.iter().any(|one| one.task == *task && one.program.is_none());
        self.phase_changed_at.retain(|task, at| window < *at + PATIENCE_WINDOWS && is_unknown(task));
        let runs = |task: TaskId| self.speeds.of(task, 64.0).is_none_or(|speed| speed.cpu_demand >= IDLE_BELOW);
        let is_asked = |task: TaskId| surveys && self.probe_planner.has_open_probe(view, task);
        scene.close(|task| (self.phase_changed_at.contains_key(&task) || is_asked(task)) && runs(task));
    }

    /// Drops curves that measurements under the plan in force contradict, and requests new ones.
    fn drop_contradicted_curves(&mut self, view: &View<'_>, kept: &Plan, scene: &mut PlanningProblem) {
        let measured = |task: TaskId| self.counted_now(task)?.misses_per_instr;
        for (task, contradicted) in scene.contradicted(&SiteLayout::of(kept, scene), measured) {
            let profile = view.profiles.get(&task);
            if profile.is_some_and(|profile| self.recall.is_dropped(task, profile, contradicted)) {
                scene.forget(task);
                self.probe_planner.forget(task);
                self.phase_changed_at.insert(task, view.observation.window);
            }
        }
    }

    fn rebuild(&mut self, view: &View<'_>, kept: &Plan, last: Option<ProblemCache>) -> Option<SearchInput> {
        let mut scene = PlanningProblem::of(view, &self.earlier(), |_| None)?;
        self.drop_contradicted_curves(view, kept, &mut scene);
        self.close(view, &mut scene);
        scene.known().next()?;
        let held = SiteLayout::of(kept, &scene);
        self.calibrate(view, &mut scene, &held, |_| true);
        let (then, memo) = last.map_or((None, ScoreCache::default()), |last| (Some(last.scene), last.memo));
        let places = then.as_ref().map_or_else(BTreeMap::new, PlanningProblem::places);
        let unchanged = |index: usize| {
            let place = *places.get(&scene.tasks[index].task)?;
            (then.as_ref()?.tasks[place].program == scene.tasks[index].program).then_some(place)
        };
        let memo = memo.after(&scene, unchanged);
        Some(SearchInput { scene, memo, newcomers: None })
    }

    fn with_newcomers(
        &mut self,
        view: &View<'_>,
        kept: &Plan,
        last: ProblemCache,
        new: &BTreeSet<TaskId>,
    ) -> Option<SearchInput> {
        let places = last.scene.places();
        let mut before: BTreeMap<TaskId, Option<ProgramModel>> =
            last.scene.tasks.into_iter().map(|one| (one.task, one.program)).collect();
        let previous_model = |task: TaskId| before.get_mut(&task)?.take();
        let mut scene = PlanningProblem::of(view, &self.earlier(), previous_model)?;
        self.close(view, &mut scene);
        let newcomers: Vec<usize> = scene.known().filter(|&at| new.contains(&scene.tasks[at].task)).collect();
        // Only their caches are composed.
        let mut held = SiteLayout::of(kept, &scene);
        let homes: BTreeSet<usize> = newcomers.iter().filter_map(|&at| held.site_of[at]).collect();
        held.site_of.iter_mut().for_each(|home| *home = home.filter(|site| homes.contains(site)));
        let rates: Vec<_> =
            scene.tasks.iter().map(|one| one.program.as_ref().and_then(|program| program.rate)).collect();
        self.calibrate(view, &mut scene, &held, |task| new.contains(&task));
        for (at, scene_task) in scene.tasks.iter_mut().enumerate().filter(|(at, _)| !newcomers.contains(at)) {
            if let Some(program) = &mut scene_task.program {
                program.rate = rates[at];
            }
        }
        let is_new = |at: usize| newcomers.contains(&at);
        let unchanged = |at: usize| places.get(&scene.tasks[at].task).copied().filter(|_| !is_new(at));
        let memo = last.memo.after(&scene, unchanged);
        Some(SearchInput { scene, memo, newcomers: Some(newcomers) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::build;
    use super::*;
    use cachemate_core::test_support::{NullPredictor, capabilities, last_level_caches, observation};
    use cachemate_core::{
        Ability, CacheLevel, CounterEvent, CpuId, Decision, Estimate, EventCount, EventCounts, FactSource, Policy,
        Profile, Profiles, StallCause, TaskSample, WindowLength,
    };

    const CACHE: u64 = 4 << 20;

    /// Every third task streams; all others fit into up to half of a cache.
    fn rate(id: u32, held: u64) -> f64 {
        let keeps = CACHE / (2 + u64::from(id) % 5);
        if id.is_multiple_of(3) { 10.0 } else { 20.0 * (1.0 - held as f64 / keeps as f64).max(0.0) }
    }

    fn sample(id: u32) -> TaskSample {
        let misses = rate(id, CACHE / 8) * 1e6;
        let counts = [
            (CounterEvent::Instructions, 1e9),
            (CounterEvent::Cycles, 1e9 + 100.0 * misses),
            (CounterEvent::Misses(CacheLevel::L3), misses),
            (CounterEvent::StallCycles(StallCause::LocalMemory), 100.0 * misses),
        ];
        let reading =
            |(event, count): (CounterEvent, f64)| EventCount { event, count: count as u64, enabled_share: 1.0 };
        let counts = EventCounts(counts.map(reading).to_vec());
        let on_cpu_ns = vec![(CpuId(id % 32), 1_000_000_000)];
        TaskSample { counts, on_cpu_ns, ..TaskSample::new(TaskId(id), cachemate_core::ProcessId(id)) }
    }

    fn profile(id: u32) -> Profile {
        let curve = (0..=16).map(|step| (step * CACHE / 16, Estimate::exact(rate(id, step * CACHE / 16)))).collect();
        Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle)
    }

    /// The next window with a search, for so many tasks on four caches.
    fn next_search(policy: &mut dyn Policy, window: &mut u64, tasks: u32, before: &mut Plan) -> Option<Decision> {
        let (topology, can) = (last_level_caches(4, 8, CacheLevel::L3, CACHE), capabilities(&[Ability::Affinity]));
        let profiles: Profiles = (0..tasks).map(|id| (TaskId(id), profile(id))).collect();
        for _ in 0..70 {
            *window += 1;
            let mut seen = observation(*window, 0);
            seen.tasks = (0..tasks).map(sample).collect();
            let decision = policy.decide(&View {
                topology: &topology,
                capabilities: &can,
                observation: &seen,
                profiles: &profiles,
                previous_plan: before,
                predictor: &NullPredictor,
            });
            *before = decision.plan.clone();
            if decision.reasons.iter().any(|reason| reason.text.contains(" candidates, ")) {
                return Some(decision);
            }
        }
        None
    }

    /// Does an arrival on a large machine cause a brief search, followed by a full one in time, and an arrival on a
    /// small machine a full one? A gain that no plan reaches keeps the plan as it is.
    #[test]
    fn an_arrival_causes_a_brief_search_first() {
        let is_brief =
            |decision: &Decision| decision.reasons.iter().any(|one| one.text.contains("one newcomer was placed"));
        for (tasks, expected) in [(30, [false, true, false]), (12, [false, false, false])] {
            let mut policy = build("min_gain = 1.0", 1).unwrap();
            let (mut window, mut plan) = (0, Plan::idle(WindowLength::Time { ns: 1_000_000_000 }));
            let mut look = |tasks: u32| {
                let decision = next_search(policy.as_mut(), &mut window, tasks, &mut plan).unwrap();
                (is_brief(&decision), window)
            };
            let (first, brief) = (look(tasks), look(tasks + 1));
            assert_eq!([first.0, brief.0], expected[..2], "{tasks}");
            if brief.0 {
                let whole = look(tasks + 1);
                assert_eq!((whole.0, whole.1), (expected[2], first.1 + LOOK_AGAIN_AFTER), "at its usual time");
            }
        }
    }
}
