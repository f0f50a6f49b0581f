//! Results of the last search that the next one can reuse.
//!
//! A full search models every program again from the measurements since the last one. After an arrival on a large
//! machine, a brief search comes first: it uses the last models of all known programs, and inserts the newcomers among
//! them, whose models are not yet matched with counts. The full search follows at its usual time. Properties: a full
//! search is required if a task changed phase, was probed again or became known, or if the caches of the machine wait
//! for one another.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{Plan, TaskId, View};
use cachemate_papers::work_metric::promised_work;

use super::layout::SiteLayout;
use super::problem::{PlanningProblem, PriorObservations};
use super::score_cache::ScoreCache;
use crate::auto::evidence::curves::CurveChecks;
use crate::auto::evidence::probe_planner::MIN_BUSY_SHARE;
use crate::auto::evidence::speeds::ObservedSpeed;
use crate::auto::evidence::{PATIENCE_WINDOWS, TaskEvidence, co_runners, phases::current_phase};

/// A live task as a search finds it. The search is outdated once a task differs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SearchedTask {
    pub task: TaskId,
    pub phase_number: u32,
    /// Whether the curve of this phase is known.
    pub has_curve: bool,
}

/// A planning problem with its stored scores, as one search leaves it to the next.
pub struct SearchInput {
    pub problem: PlanningProblem,
    /// The layout of the plan in force at that search.
    pub current_layout: SiteLayout,
    /// The same problem if curves lie as low as their errors allow; `None` if no partitions are explored.
    pub optimistic: Option<Box<PlanningProblem>>,
    pub score_cache: ScoreCache,
    /// The newcomers, if only they are placed.
    pub newcomers: Option<Vec<usize>>,
    searched_tasks: Vec<SearchedTask>,
    /// Window of the last full search, which may be this one.
    full_search_window: u64,
}

/// The last search: the tasks and phases for which it was made, and its results.
#[derive(Default)]
pub struct SearchHistory {
    last_search: Option<(Vec<SearchedTask>, u64)>,
    /// Window of the last search that had models to compare plans by, brief or full.
    pub results_window: Option<u64>,
    pub last_results: Option<SearchInput>,
    /// Whether a phase has changed since the last search.
    pub awaits_new_phase: bool,
}

/// Number of windows between two searches for the same tasks.
pub const SEARCH_INTERVAL_WINDOWS: u64 = 30;

/// Smallest number of tasks for which searches can be brief; with fewer, a full search is fast enough.
const MIN_BRIEF_SEARCH_TASKS: usize = 25;
/// Largest number of newcomers for a brief search, because more of them change too much.
const MAX_NEWCOMERS: usize = 8;
/// Number of windows after an arrival within which all tasks that can be profiled should be profiled.
const MAX_SURVEY_WINDOWS: u64 = 3 * PATIENCE_WINDOWS;
/// Number of windows for which models are reused.
const MAX_MODEL_AGE_WINDOWS: u64 = 2 * SEARCH_INTERVAL_WINDOWS;

impl SearchInput {
    /// The tasks that have arrived since, if nothing else has changed.
    fn newcomers_since(
        &self,
        view: &View<'_>,
        searched_tasks: &[SearchedTask],
        evidence: &TaskEvidence,
    ) -> Option<BTreeSet<TaskId>> {
        let is_large =
            self.problem.tasks.len() >= MIN_BRIEF_SEARCH_TASKS && self.problem.bus.is_none();
        if !is_large
            || view.observation.window >= self.full_search_window + MAX_MODEL_AGE_WINDOWS
            || evidence.sites != self.problem.sites
        {
            return None;
        }

        let index_by_task = self.problem.index_by_task();
        let mut newcomers = BTreeSet::new();
        for (sample, searched_task) in view.live_tasks().zip(searched_tasks) {
            let task = searched_task.task;
            match index_by_task.get(&task) {
                Some(&index) => {
                    let model = self.problem.tasks[index].program.as_ref();
                    let has_other_goal =
                        model.is_some_and(|model| model.goal != sample.goal.unwrap_or_default());
                    if self.searched_tasks[index] != *searched_task || has_other_goal {
                        return None;
                    }
                }
                None if searched_task.has_curve
                    && evidence.speeds.observed_speed(task).is_some() =>
                {
                    newcomers.insert(task);
                }
                None => {}
            }
        }
        (1..=MAX_NEWCOMERS)
            .contains(&newcomers.len())
            .then_some(newcomers)
    }
}

/// The live tasks, in the order of the view.
pub fn searched_tasks(view: &View<'_>, curves: &CurveChecks) -> Vec<SearchedTask> {
    view.live_tasks()
        .map(|sample| SearchedTask {
            task: sample.task,
            phase_number: current_phase(view, sample.task).number,
            has_curve: curves.has_curve(view, sample.task),
        })
        .collect()
}

impl SearchHistory {
    /// Whether the tasks, their phases or profiles have changed since the last search, or that search was long ago.
    pub fn is_outdated(&self, tasks: &[SearchedTask], window: u64) -> bool {
        self.last_search
            .as_ref()
            .is_none_or(|(last_tasks, last_window)| {
                last_tasks != tasks || window >= last_window + SEARCH_INTERVAL_WINDOWS
            })
    }

    pub fn record_start(&mut self, tasks: Vec<SearchedTask>, window: u64) {
        self.last_search = Some((tasks, window));
        self.awaits_new_phase = false;
    }

    /// Stores the results of this window's search for the next one. After a brief search, the full search comes at its
    /// usual time.
    pub fn store_results(&mut self, input: SearchInput, window: u64) {
        self.results_window = Some(window);
        if let Some((_, search_window)) = &mut self.last_search {
            *search_window = input.full_search_window;
        }
        self.last_results = Some(SearchInput {
            optimistic: None,
            ..input
        });
    }

    /// Whether a live task has changed phase since the last search.
    pub fn has_phase_changed(&self, view: &View<'_>) -> bool {
        let Some((last_tasks, _)) = &self.last_search else {
            return false;
        };
        let has_new_phase = |last: &SearchedTask| {
            current_phase(view, last.task).number != last.phase_number
                && view.live_tasks().any(|sample| sample.task == last.task)
        };
        last_tasks.iter().any(has_new_phase)
    }

    /// Records the present phases, and returns the tasks of the last search whose phase has changed. The next search is
    /// due as soon as they are known again, or no longer waited for.
    pub fn record_phases(&mut self, view: &View<'_>) -> Vec<TaskId> {
        self.awaits_new_phase = true;
        let mut changed_tasks = Vec::new();
        for last in self.last_search.iter_mut().flat_map(|(tasks, _)| tasks) {
            let phase_number = current_phase(view, last.task).number;
            if last.phase_number != phase_number {
                last.phase_number = phase_number;
                last.has_curve = false;
                changed_tasks.push(last.task);
            }
        }
        changed_tasks
    }

    /// Builds the problem from the present evidence, with new models of all programs or of newcomers only. `None` if no
    /// task has a model.
    pub fn prepare(
        &mut self,
        view: &View<'_>,
        current_plan: &Plan,
        evidence: &mut TaskEvidence,
        uses_counts: bool,
    ) -> Option<SearchInput> {
        let (searched_tasks, _) = self.last_search.as_ref()?;
        let last_results = self.last_results.take();
        let newcomers = last_results
            .as_ref()
            .and_then(|last_results| last_results.newcomers_since(view, searched_tasks, evidence));
        let mut input_builder = InputBuilder {
            view,
            current_plan,
            evidence,
            uses_counts,
            searched_tasks: searched_tasks.clone(),
        };

        match (last_results, newcomers) {
            (Some(last_results), Some(newcomers)) => {
                input_builder.with_newcomers(last_results, &newcomers)
            }
            (last_results, _) => input_builder.rebuild(last_results),
        }
    }
}

/// Builds the problem of one search.
struct InputBuilder<'a, 'v> {
    view: &'a View<'v>,
    current_plan: &'a Plan,
    evidence: &'a mut TaskEvidence,
    /// Whether misses and rates that are counted under the plan in force are used.
    uses_counts: bool,
    searched_tasks: Vec<SearchedTask>,
}

impl InputBuilder<'_, '_> {
    fn prior_observations(&self) -> PriorObservations<'_> {
        PriorObservations {
            sites: &self.evidence.sites,
            speeds: &self.evidence.speeds,
            clusters: &self.evidence.probe_planner.clusters,
            default_sites: &self.evidence.default_sites,
            split_tasks: &self.evidence.split_tasks,
            curves: &self.evidence.curves,
        }
    }

    /// The speed that was counted under the plan in force; `None` if the only speed is recalled from another plan, or
    /// counts are not used.
    fn current_speed(&self, task: TaskId) -> Option<ObservedSpeed> {
        let speed = self.evidence.speeds.observed_speed(task);
        speed.filter(|speed| speed.is_current && self.uses_counts)
    }

    /// Moves curves through the misses that were counted with partitions, and those of shared caches through the ones
    /// that were counted there with the same co-runners: a partition in force says nothing about sharing.
    fn recall_counts(&mut self, problem: &mut PlanningProblem, layout: &SiteLayout) {
        self.evidence.record_counts(self.view, problem, layout);
        if !self.uses_counts {
            return;
        }
        let sizes = &self.evidence.measured_sizes;
        for problem_task in &mut problem.tasks {
            let points = sizes.points(
                problem_task.task,
                current_phase(self.view, problem_task.task),
            );
            problem_task
                .program
                .iter_mut()
                .for_each(|program| program.pass_through(&points));
        }
        let is_divided_now = |site: usize| !layout.partitions[site].is_empty();
        let divided_sites = co_runners(self.view, problem, layout, is_divided_now);
        let counts: BTreeMap<TaskId, f64> = divided_sites
            .values()
            .flat_map(|tasks| sizes.shared_misses(tasks))
            .collect();
        if !counts.is_empty() {
            let divided_tasks = layout
                .site_by_task
                .iter()
                .map(|site| site.filter(|&site| is_divided_now(site)));
            let shared_layout =
                SiteLayout::without_partitions(problem, divided_tasks.collect(), false);
            problem.calibrate(&shared_layout, |task| counts.get(&task).copied());
        }
    }

    /// Shifts the curves to the measurements, and scales promised rates to them.
    fn match_counts(&self, problem: &mut PlanningProblem, layout: &SiteLayout) {
        problem.calibrate(layout, |task| self.current_speed(task)?.misses_per_instr);
        problem.calibrate_cycles(layout, |task| {
            Some(self.current_speed(task)?.cycles_per_instr)
        });
        problem.calibrate_rates(layout, |task| {
            self.current_speed(task)?;
            let sample = self.view.live_tasks().find(|sample| sample.task == task)?;
            let work = promised_work(sample, &self.view.observation.tasks)?;
            Some((work, self.evidence.speeds.work_per_second(task, work)?))
        });
    }

    /// Closes sites with a running task that has no model yet, because its phase has changed or it is still being
    /// profiled.
    fn close_unknown_sites(&mut self, problem: &mut PlanningProblem) {
        let window = self.view.observation.window;
        let is_surveying = self.evidence.arrivals.unchanged_windows(window) < MAX_SURVEY_WINDOWS;
        let is_movable: BTreeMap<TaskId, bool> = problem
            .tasks
            .iter()
            .filter(|problem_task| problem_task.program.is_none())
            .map(|problem_task| (problem_task.task, problem_task.is_movable))
            .collect();
        self.evidence.phase_changed_at.retain(|task, changed_at| {
            window < *changed_at + PATIENCE_WINDOWS && is_movable.contains_key(task)
        });

        let is_running = |task: TaskId| {
            self.evidence
                .speeds
                .observed_speed(task)
                .is_none_or(|speed| speed.cpu_demand >= MIN_BUSY_SHARE)
        };
        let is_being_probed = |task: TaskId| {
            is_surveying
                && self.evidence.probe_planner.has_open_probe(
                    self.view,
                    task,
                    is_movable.get(&task) == Some(&true),
                )
        };
        problem.close_sites(|task| {
            (self.evidence.phase_changed_at.contains_key(&task) || is_being_probed(task))
                && is_running(task)
        });
    }

    /// Drops curves that measurements under the plan in force contradict, and requests new ones.
    fn drop_contradicted_curves(&mut self, problem: &mut PlanningProblem) {
        let current_misses_per_instr = |task: TaskId| self.current_speed(task)?.misses_per_instr;
        for (task, is_contradicted) in problem.check_curves(
            &SiteLayout::from_plan(self.current_plan, problem),
            current_misses_per_instr,
        ) {
            let profile = self.view.profiles.get(&task);
            if profile.is_some_and(|profile| {
                self.evidence
                    .curves
                    .record_check(task, profile, is_contradicted)
            }) {
                problem.drop_model(task);
                self.evidence.probe_planner.forget(task);
                self.evidence
                    .phase_changed_at
                    .insert(task, self.view.observation.window);
            }
        }
    }

    fn rebuild(&mut self, last_results: Option<SearchInput>) -> Option<SearchInput> {
        let mut problem = PlanningProblem::new(self.view, &self.prior_observations(), |_| None)?;
        self.drop_contradicted_curves(&mut problem);
        self.close_unknown_sites(&mut problem);
        problem.known_tasks().next()?;
        let current_layout = SiteLayout::from_plan(self.current_plan, &problem);
        self.recall_counts(&mut problem, &current_layout);
        let optimistic = self
            .uses_counts
            .then(|| problem.with_lowest_curves(&current_layout))
            .flatten()
            .map(|mut optimistic| {
                self.match_counts(&mut optimistic, &current_layout);
                Box::new(optimistic)
            });

        self.match_counts(&mut problem, &current_layout);
        let (previous_problem, score_cache) = last_results
            .map_or((None, ScoreCache::default()), |results| {
                (Some(results.problem), results.score_cache)
            });
        let previous_positions = previous_problem
            .as_ref()
            .map_or_else(BTreeMap::new, PlanningProblem::index_by_task);
        let unchanged_position = |index: usize| {
            let previous_position = *previous_positions.get(&problem.tasks[index].task)?;
            (previous_problem.as_ref()?.tasks[previous_position].program
                == problem.tasks[index].program)
                .then_some(previous_position)
        };
        let score_cache = score_cache.carry_over(&problem, unchanged_position);
        Some(SearchInput {
            problem,
            current_layout,
            optimistic,
            score_cache,
            newcomers: None,
            searched_tasks: std::mem::take(&mut self.searched_tasks),
            full_search_window: self.view.observation.window,
        })
    }

    fn with_newcomers(
        &mut self,
        last_results: SearchInput,
        new_tasks: &BTreeSet<TaskId>,
    ) -> Option<SearchInput> {
        let full_search_window = last_results.full_search_window;
        let previous_positions = last_results.problem.index_by_task();
        let mut previous_tasks = last_results.problem.tasks;
        let previous_model = |task: TaskId| {
            previous_tasks[*previous_positions.get(&task)?]
                .program
                .take()
        };
        let mut problem =
            PlanningProblem::new(self.view, &self.prior_observations(), previous_model)?;
        self.close_unknown_sites(&mut problem);

        let newcomers: Vec<usize> = problem
            .known_tasks()
            .filter(|&index| new_tasks.contains(&problem.tasks[index].task))
            .collect();
        let is_new = |at: usize| newcomers.contains(&at);
        let unchanged_position = |at: usize| {
            previous_positions
                .get(&problem.tasks[at].task)
                .copied()
                .filter(|_| !is_new(at))
        };
        let score_cache = last_results
            .score_cache
            .carry_over(&problem, unchanged_position);
        Some(SearchInput {
            current_layout: SiteLayout::from_plan(self.current_plan, &problem),
            problem,
            optimistic: None,
            score_cache,
            newcomers: Some(newcomers),
            searched_tasks: std::mem::take(&mut self.searched_tasks),
            full_search_window,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auto::build;
    use cachemate_core::test_support::{
        NullPredictor, ViewFixture, capabilities_fixture, last_level_caches, observation_fixture,
    };
    use cachemate_core::{
        Ability, CacheLevel, CounterEvent, CpuId, Decision, Estimate, EventCount, EventCounts,
        FactSource, Policy, Profile, Profiles, StallCause, TaskSample, WindowLength,
    };

    const CACHE: u64 = 4 << 20;

    /// Every third task streams; each of the others fits into half of a cache or less.
    fn rate_at_bytes(id: u32, held_bytes: u64) -> f64 {
        let reused_bytes = CACHE / (2 + u64::from(id) % 5);
        if id.is_multiple_of(3) {
            10.0
        } else {
            20.0 * (1.0 - held_bytes as f64 / reused_bytes as f64).max(0.0)
        }
    }

    fn sample(id: u32) -> TaskSample {
        let misses = rate_at_bytes(id, CACHE / 8) * 1e6;
        let counts = [
            (CounterEvent::Instructions, 1e9),
            (CounterEvent::Cycles, 1e9 + 100.0 * misses),
            (CounterEvent::Misses(CacheLevel::L3), misses),
            (
                CounterEvent::StallCycles(StallCause::LocalMemory),
                100.0 * misses,
            ),
        ];

        let reading = |(event, count): (CounterEvent, f64)| EventCount {
            event,
            count: count as u64,
            enabled_share: 1.0,
        };
        let counts = EventCounts(counts.map(reading).to_vec());
        let on_cpu_ns = vec![(CpuId(id % 32), 1_000_000_000)];
        TaskSample {
            counts,
            on_cpu_ns,
            ..TaskSample::new(TaskId(id), cachemate_core::ProcessId(id))
        }
    }

    fn profile_fixture(id: u32) -> Profile {
        let curve = (0..=16)
            .map(|step| {
                (
                    step * CACHE / 16,
                    Estimate::exact(rate_at_bytes(id, step * CACHE / 16)),
                )
            })
            .collect();
        Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle)
    }

    /// The next window with a search, for this number of tasks on four caches.
    fn next_search(
        policy: &mut dyn Policy,
        window: &mut u64,
        tasks: u32,
        previous_plan: &mut Plan,
    ) -> Option<Decision> {
        let (topology, can) = (
            last_level_caches(4, 8, CacheLevel::L3, CACHE),
            capabilities_fixture(&[Ability::Affinity]),
        );
        let profiles: Profiles = (0..tasks)
            .map(|id| (TaskId(id), profile_fixture(id)))
            .collect();
        for _ in 0..70 {
            *window += 1;
            let mut observation = observation_fixture(*window, 0);
            observation.tasks = (0..tasks).map(sample).collect();
            let decision = policy.decide(&View {
                topology: &topology,
                capabilities: &can,
                observation: &observation,
                profiles: &profiles,
                previous_plan,
                predictor: &NullPredictor,
                verdicts: &(),
            });
            *previous_plan = decision.plan.clone();
            if has_searched(&decision) {
                return Some(decision);
            }
        }
        None
    }

    /// If a cache goes offline on which a task was at home that is pinned elsewhere now, or that sleeps: do searches go
    /// on, with plans for the CPUs that are left?
    #[test]
    fn does_a_search_survive_the_loss_of_a_cache() {
        for (is_asleep, lost_cpus) in [(false, 2..4), (true, 2..4), (false, 0..2), (true, 0..2)] {
            let mut fixture = ViewFixture::new(
                last_level_caches(2, 2, CacheLevel::L3, CACHE),
                capabilities_fixture(&[Ability::Affinity]),
                0,
            );
            fixture.profiles = (0..2).map(|id| (TaskId(id), profile_fixture(id))).collect();
            let home_cpu = lost_cpus.start;
            let mut policy = build("min_gain = 1.0", 1).unwrap();
            let mut searches = 0;
            for window in 1..=100 {
                // Task 1 is at home on the cache that is lost in window 60; another tool's pin moves it before.
                fixture.observation = observation_fixture(window, 0);
                fixture.observation.tasks = (0..2).map(sample).collect();
                let tasks = &mut fixture.observation.tasks;
                tasks[0].on_cpu_ns[0].0 = CpuId(2 - home_cpu);
                tasks[1].on_cpu_ns[0].0 = CpuId(home_cpu);
                if window > 50 {
                    let cpus = (2 - home_cpu..4 - home_cpu).collect();
                    fixture.previous_plan.affinity.insert(TaskId(1), cpus);
                    tasks[1].on_cpu_ns[0].0 = CpuId(3 - home_cpu);
                    if is_asleep {
                        tasks[1].on_cpu_ns.clear();
                        tasks[1].counts = EventCounts::default();
                    }
                }
                if window > 60 {
                    for cpu in &mut fixture.topology.cpus {
                        cpu.online = !lost_cpus.contains(&cpu.id.0);
                    }
                }
                let decision = fixture.decide(policy.as_mut(), &NullPredictor);
                let online = fixture.topology.online();
                let affinity = decision.plan.affinity.values();
                assert!(affinity.into_iter().all(|cpus| cpus.intersects(&online)));
                searches += u32::from(window > 60 && has_searched(&decision));
            }
            assert!(searches >= 1, "{is_asleep} {home_cpu}");
        }
    }

    fn has_searched(decision: &Decision) -> bool {
        let mut reasons = decision.reasons.iter();
        reasons.any(|reason| reason.text.contains(" candidates, "))
    }

    /// Does an arrival cause a brief search on a large machine, followed by a full one in time, and a full one at once
    /// on a small machine? A gain that no plan reaches keeps the plan unchanged.
    #[test]
    fn an_arrival_causes_a_brief_search_first() {
        let is_brief = |decision: &Decision| {
            decision
                .reasons
                .iter()
                .any(|reason| reason.text.contains("one newcomer was placed"))
        };

        for (tasks, expected) in [(30, [false, true, false]), (12, [false, false, false])] {
            let mut policy = build("min_gain = 1.0", 1).unwrap();
            let (mut window, mut plan) = (0, Plan::idle(WindowLength::Time { ns: 1_000_000_000 }));
            let mut search_window = |tasks: u32| {
                let decision = next_search(policy.as_mut(), &mut window, tasks, &mut plan).unwrap();
                (is_brief(&decision), window)
            };
            let (first, brief) = (search_window(tasks), search_window(tasks + 1));
            assert_eq!([first.0, brief.0], expected[..2], "{tasks}");
            if brief.0 {
                let full_search = search_window(tasks + 1);
                assert_eq!(
                    (full_search.0, full_search.1),
                    (expected[2], first.1 + SEARCH_INTERVAL_WINDOWS),
                    "at its usual time"
                );
            }
        }
    }
}
