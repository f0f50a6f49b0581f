//! Forecasts and scores of single caches, stored under all their inputs.
//!
//! Problem: a search visits the same caches many times, and most caches stay the same from one decision to the next.
//! Method: each program has a number that changes as soon as anything about the program changes. The forecast of a
//! cache is stored under the numbers of its tasks, the shares of partners on other caches, partitions and rotations.
//! Properties: decisions are the same to the bit with and without stored forecasts; one is dropped if two successive
//! searches did not use it.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::problem::PlanningProblem;
use super::site_score::SiteForecast;
use super::sites::CacheSite;

type ForecastByKey = BTreeMap<Vec<u64>, SiteForecast>;

/// Stored forecasts; see the module's documentation. Each problem has its own; the default stores nothing.
#[derive(Debug, Default)]
pub struct ScoreCache {
    /// Numbers of the programs, by position; `None` if nothing is stored.
    program_numbers: Option<Vec<u64>>,
    last_number: u64,
    sites: Vec<CacheSite>,
    /// Forecasts used by the previous search and not by this one, and those used by this one.
    previous_forecasts: RefCell<ForecastByKey>,
    current_forecasts: RefCell<ForecastByKey>,
}

impl ScoreCache {
    #[cfg(test)]
    pub fn new(problem: &PlanningProblem) -> Self {
        ScoreCache::default().carry_over(problem, |_| None)
    }

    /// Carries the forecasts over to the next problem. `unchanged_position` returns the earlier position of a task
    /// whose program has not changed.
    #[must_use]
    pub fn carry_over(
        self,
        problem: &PlanningProblem,
        unchanged_position: impl Fn(usize) -> Option<usize>,
    ) -> Self {
        let mut last_number = self.last_number;
        let assign_number = |index: usize| {
            let previous_number = unchanged_position(index)
                .and_then(|position| self.program_numbers.as_ref()?.get(position).copied());
            previous_number.unwrap_or_else(|| {
                last_number += 1;
                last_number
            })
        };
        let numbers = (0..problem.tasks.len()).map(assign_number).collect();

        let previous_forecasts = if self.sites == problem.sites {
            self.current_forecasts
        } else {
            RefCell::default()
        };
        ScoreCache {
            program_numbers: Some(numbers),
            last_number,
            sites: problem.sites.clone(),
            previous_forecasts,
            current_forecasts: RefCell::default(),
        }
    }

    /// Reads the forecast stored under a key that is made from the numbers of the programs, or computes and stores it
    /// first.
    pub fn read<R>(
        &self,
        key_of: impl FnOnce(&[u64]) -> Vec<u64>,
        compute: impl FnOnce() -> SiteForecast,
        read: impl FnOnce(&SiteForecast) -> R,
    ) -> R {
        let Some(numbers) = &self.program_numbers else {
            return read(&compute());
        };
        let key = key_of(numbers);
        if let Some(forecast) = self.current_forecasts.borrow().get(&key) {
            return read(forecast);
        }

        let previous_forecast = self.previous_forecasts.borrow_mut().remove(&key);
        let forecast = previous_forecast.unwrap_or_else(compute);
        read(
            self.current_forecasts
                .borrow_mut()
                .entry(key)
                .or_insert(forecast),
        )
    }
}

#[cfg(test)]
pub mod tests {
    use std::cell::Cell;
    use std::collections::BTreeMap;

    use super::super::problem::ProblemTask;
    use super::super::program_model::ProgramModel;
    use super::super::program_model::tests::{CACHE, program_fixture, uniform_program};
    use super::super::score::{LayoutScore, SiteScorer};
    use super::*;
    use crate::auto::candidates::{Mechanism, PlanSearch};
    use cachemate_core::{CacheId, PartitionSupport, ProcessId, TaskId};
    use proptest::prelude::*;

    /// A site with this number of CPUs and eight ways for each.
    pub fn site_fixture(id: u32, cpus: u32) -> CacheSite {
        CacheSite {
            cache: CacheId(id),
            cpus: (id * cpus..(id + 1) * cpus).collect(),
            cores: cpus as usize,
            package: 0,
            memory_node: 0,
            bytes: CACHE,
            partition_units: Some(PartitionSupport::Ways {
                ways: 8,
                min_ways: 1,
                contiguous: true,
                max_groups: 4,
                device_ways: 0,
            }),
        }
    }

    /// A program that keeps this share of a cache; from 1 on, it is a stream.
    pub fn program_keeping(share: f64) -> ProgramModel {
        if share < 1.0 {
            uniform_program((0.1 + share) * CACHE, 0.02)
        } else {
            program_fixture(|_| 0.01 * share)
        }
    }

    pub fn task_fixture(id: u32, last_site: usize, share: f64) -> ProblemTask {
        ProblemTask {
            task: TaskId(id),
            process: ProcessId(id),
            is_movable: true,
            program: Some(program_keeping(share)),
            cluster: None,
            last_site: Some(last_site),
            stays_on_site: false,
        }
    }

    /// The layouts and scores of all candidates.
    fn decide_candidates(
        problem: &PlanningProblem,
        score_cache: &ScoreCache,
    ) -> Vec<(super::super::layout::SiteLayout, LayoutScore)> {
        let mut search = PlanSearch::with_effort(problem, score_cache, Mechanism::ALL.into(), 150);
        let candidates = search.find_candidates(&BTreeMap::new(), None);
        candidates
            .into_iter()
            .map(|candidate| (candidate.layout, candidate.score))
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
        /// Tasks arrive, exit and change: are decisions the same to the bit with and without stored scores?
        #[test]
        fn cached_scores_change_no_decision(
            first in prop::collection::vec((0usize..3, 0.0f64..1.5), 2..7),
            then in prop::collection::vec((0u8..4, 0usize..8, 0.0f64..1.5), 1..5),
        ) {
            let mut tasks: Vec<ProblemTask> =
                first.iter().enumerate().map(|(id, &(last_site, share))| task_fixture(id as u32, last_site, share)).collect();

            let mut next = tasks.len() as u32;
            let (mut score_cache, mut previous_problem): (ScoreCache, Option<PlanningProblem>) = (ScoreCache::default(), None);
            for (step, at, share) in std::iter::once((9, 0, 0.0)).chain(then) {
                let index = at % tasks.len();
                match step {
                    0 if tasks.len() > 2 => { tasks.remove(index); }
                    1 => tasks[index].program = Some(program_keeping(share)),
                    2 => tasks[index].last_site = Some(index % 3),
                    3 => { tasks.push(task_fixture(next, index % 3, share)); next += 1; }
                    _ => {}
                }

                let sites = (0..3).map(|id| site_fixture(id, 2)).collect();
                let problem = PlanningProblem { sites, tasks: tasks.clone(), cycles_per_ns: 2.0, bus: None, min_slice_ns: Some(1), closed_sites: Vec::new() };
                let previous_positions = previous_problem.as_ref().map(PlanningProblem::index_by_task).unwrap_or_default();
                score_cache = score_cache.carry_over(&problem, |at| {
                    let previous_position = *previous_positions.get(&problem.tasks[at].task)?;
                    (previous_problem.as_ref()?.tasks[previous_position].program == problem.tasks[at].program).then_some(previous_position)
                });
                let (with_cache, without_cache) = (decide_candidates(&problem, &score_cache), decide_candidates(&problem, &ScoreCache::default()));
                prop_assert_eq!(with_cache.len(), without_cache.len());
                for (with_cache, without_cache) in with_cache.iter().zip(&without_cache) {
                    prop_assert_eq!(&with_cache.0, &without_cache.0);
                    prop_assert_eq!(with_cache.1.bits(), without_cache.1.bits());
                }
                previous_problem = Some(problem);
            }
        }
    }

    /// Is a score computed once while successive searches use it, and dropped after one that does not?
    #[test]
    fn a_score_is_computed_once_and_dropped_in_time() {
        let problem = |tasks: Vec<ProblemTask>| {
            PlanningProblem::undisturbed_problem(vec![site_fixture(0, 2)], tasks)
        };
        let (first, other_problem) = (
            problem(vec![task_fixture(0, 0, 0.5)]),
            problem(vec![task_fixture(0, 0, 0.9)]),
        );
        let call_count = Cell::new(0);
        let score_of = |problem: &PlanningProblem, score_cache: &ScoreCache| {
            let scorer = SiteScorer {
                problem,
                site: 0,
                members: &[0],
                split_shares: &[1.0],
                partitions: &[],
                rotation: None,
            };
            let compute = || {
                call_count.set(call_count.get() + 1);
                SiteForecast {
                    score: LayoutScore::EMPTY,
                    speeds: Vec::new(),
                    task_forecasts: Default::default(),
                }
            };
            score_cache.read(|numbers| scorer.key(numbers), compute, |_| ());
        };
        let score_cache = ScoreCache::new(&first);
        (0..3).for_each(|_| score_of(&first, &score_cache));
        let score_cache = score_cache.carry_over(&first, Some);
        score_of(&first, &score_cache);
        assert_eq!(call_count.get(), 1);
        let score_cache = score_cache.carry_over(&other_problem, |_| None);
        score_of(&other_problem, &score_cache);
        assert_eq!(call_count.get(), 2, "another program");
        let score_cache = score_cache.carry_over(&other_problem, Some);
        assert_eq!(
            (
                score_cache.previous_forecasts.borrow().len(),
                score_cache.current_forecasts.borrow().len()
            ),
            (1, 0)
        );
    }
}
