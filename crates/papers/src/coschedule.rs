//! Co-scheduling below one cache, sample by sample (AV 4.3), which activity-vector and counter-driven share. The
//! policies supply the penalty of two tasks and further costs.
//!
//! Problem: a cache has more tasks than CPUs, so in each sample some tasks run and the others wait. Method, in three
//! forms:
//! - *replacement* (AV 4.3, the simulated form): of the running tasks, the one with the most samples is the candidate
//!   for eviction. It is replaced by the waiting task with the lowest score, if that is lower than its own. The score
//!   is S = Σ wᵢ·sᵢ, over the penalties with the remaining tasks, the samples that the task has run, and the policy's
//!   costs.
//! - *set*: like *replacement*, but the whole set may change at once. The new set consists of the task that has run
//!   least, joined by the tasks of the lowest score with those chosen so far. It is used if its total score is lower
//!   than that of the running set. A good pair can thus be reached without passing through a bad one. If the policy
//!   knows a task's reload cost, the task's score includes it, because a change costs more than bad co-runners if a
//!   sample is short relative to the refill of the cache.
//! - *advice* (AV 4.3.1, the Linux form): the machine's scheduler picks the tasks, and prefers a waiting task of a
//!   lower penalty. A task that lags behind the others by more than a bound gets no advice.
//!
//! Properties: the samples that a task has run are part of its score, so no task waits forever. With a weight of w per
//! sample and scores that differ by at most d, no task falls more than d/w samples behind. A task without evidence has
//! no penalties, so it runs soon and evidence is gained. Tasks stay on their caches ([`StickyPlacement`]). CPUs on
//! which unmovable tasks were observed are not used.

use std::collections::BTreeMap;

use cachemate_core::{
    Ability, CacheId, CoRunPenalty, CpuId, CpuSet, Decision, Gang, GangSchedule, Plan, Reason,
    TaskId, TaskSample, View, WindowLength,
};
use serde::Deserialize;

use crate::llc_placement::{LlcTasks, StickyPlacement};

/// The way in which the running tasks are chosen, and in which the choice is enforced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CoScheduleForm {
    Replacement,
    Set,
    Advice,
}

/// A policy's knowledge about the tasks in this window.
pub trait CoRunCost {
    fn has_evidence(&self, task: TaskId) -> bool;
    /// The penalty of running two tasks together; 0 if either has no evidence.
    fn penalty(&self, task: TaskId, other: TaskId) -> f64;
    /// The cost of running the task, whatever its co-runners.
    fn solo_cost(&self, task: TaskId) -> f64;
    /// The cost of loading a task's data into the cache, in the unit of penalties; used by *set* only.
    fn reload_cost(&self, _task: TaskId) -> f64 {
        0.0
    }
    /// Whether the task must stay for another sample so that its reload cost can be measured; used by *set* only.
    fn must_stay(&self, _task: TaskId) -> bool {
        false
    }
}

/// Costs to which the reload cost of tasks that are not resident is added.
struct ReloadAdjustedCost<'a> {
    costs: &'a dyn CoRunCost,
    running_tasks: &'a [TaskId],
    max_reload_cost: f64,
}

impl CoRunCost for ReloadAdjustedCost<'_> {
    fn has_evidence(&self, task: TaskId) -> bool {
        self.costs.has_evidence(task)
    }
    fn penalty(&self, task: TaskId, other: TaskId) -> f64 {
        self.costs.penalty(task, other)
    }
    fn solo_cost(&self, task: TaskId) -> f64 {
        let reload_cost = if self.running_tasks.contains(&task) {
            0.0
        } else {
            self.costs.reload_cost(task).min(self.max_reload_cost)
        };
        self.costs.solo_cost(task) + reload_cost
    }
}

/// Lag that round robin itself causes, in samples.
pub const MAX_LAG_SAMPLES: f64 = 1.0;

/// Maximum weight of a reload, in samples. A reload cost counts misses in units of the misses that make a super set
/// busy. If all tasks miss rarely, a few misses suffice for that, so without a maximum, neither the cost nor the wait
/// would be bounded.
const MAX_RELOAD_SAMPLES: f64 = 32.0;

/// Number of turns for which the running set stays if no new plan arrives.
const RUNNING_SET_TURNS: u32 = 100;

/// The scheduling that the policies share, with its state between windows.
pub struct CoScheduler {
    pub form: CoScheduleForm,
    pub window_ns: u64,
    /// Weight of each sample that the task has run.
    pub sample_weight: f64,
    /// A task gets no `advice` if it has run at least this many samples fewer than the mean task below its cache.
    pub max_lag_samples: f64,
    placement: StickyPlacement,
    /// The cache of each task, and the samples that it has run there; a new task starts with the smallest number of its
    /// cache.
    sample_counts: BTreeMap<TaskId, (CacheId, f64)>,
    /// CPUs on which tasks outside the plan were observed.
    pinned_task_cpus: BTreeMap<TaskId, CpuSet>,
}

impl CoScheduler {
    pub fn new(
        form: CoScheduleForm,
        window_ns: u64,
        sample_weight: f64,
        max_lag_samples: f64,
    ) -> Self {
        let (placement, sample_counts, pinned_task_cpus) = Default::default();
        CoScheduler {
            form,
            window_ns,
            sample_weight,
            max_lag_samples,
            placement,
            sample_counts,
            pinned_task_cpus,
        }
    }

    /// The decision without probes, which the policy adds.
    pub fn decide(&mut self, view: &View<'_>, costs: &dyn CoRunCost) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: self.window_ns });
        let mut reasons = Vec::new();
        let tasks: Vec<&TaskSample> = view.movable_tasks().collect();
        if tasks.is_empty() {
            return Decision::new(plan, reasons);
        }
        let caches = self.placement.place_tasks_by_cache(view);
        if caches.is_empty() {
            return Decision::new(plan, reasons);
        }

        self.observe(view, &caches);
        if self.form == CoScheduleForm::Advice || !view.capabilities.has_ability(Ability::Gangs) {
            if view.capabilities.has_ability(Ability::Penalties) {
                plan.penalties = self.advise_penalties(&tasks, &caches, costs);
            }
            return Decision::new(plan, reasons);
        }

        for cache in &caches {
            if caches.len() > 1 {
                plan.affinity.extend(
                    cache
                        .tasks
                        .iter()
                        .map(|task| (task.task, cache.cpus.clone())),
                );
            }
            plan.gangs.extend(self.build_schedule(
                view,
                &cache.cpus,
                &cache.tasks,
                costs,
                &mut reasons,
            ));
        }
        Decision::new(plan, reasons)
    }

    /// Updates the samples of the tasks, and the CPUs of other tasks.
    fn observe(&mut self, view: &View<'_>, caches: &[LlcTasks<'_>]) {
        let elapsed_ns = view.observation.span.elapsed_ns.max(1) as f64;
        let mut sample_counts = BTreeMap::new();
        for cache in caches {
            let previous_count = |task: &TaskSample| {
                self.sample_counts
                    .get(&task.task)
                    .filter(|(home, _)| *home == cache.cache)
                    .map(|(_, count)| *count)
            };
            let min_count = cache
                .tasks
                .iter()
                .filter_map(|task| previous_count(task))
                .reduce(f64::min);

            for task in &cache.tasks {
                let count = match previous_count(task) {
                    Some(count) => count + task.ran_ns() as f64 / elapsed_ns,
                    None => min_count.unwrap_or(0.0),
                };
                sample_counts.insert(task.task, (cache.cache, count));
            }
        }
        self.sample_counts = sample_counts;
        self.pinned_task_cpus.retain(|id, _| {
            view.observation
                .tasks
                .iter()
                .any(|task| task.task == *id && task.unmovable)
        });

        for task in view
            .observation
            .tasks
            .iter()
            .filter(|task| task.unmovable && !task.exited)
        {
            let cpus = task
                .on_cpu_ns
                .iter()
                .map(|(cpu, _)| cpu.0)
                .chain(task.cpu.map(|cpu| cpu.0));
            self.pinned_task_cpus
                .entry(task.task)
                .or_default()
                .extend(cpus);
        }
    }

    /// The gangs of one cache: the running set, then the others, which run only if no new plan arrives. `None` if every
    /// task has a CPU, if no CPU is free, or if there is neither evidence nor a schedule in force.
    fn build_schedule(
        &self,
        view: &View<'_>,
        domain: &CpuSet,
        members: &[&TaskSample],
        costs: &dyn CoRunCost,
        reasons: &mut Vec<Reason>,
    ) -> Option<GangSchedule> {
        let is_occupied = |cpu: u32| {
            self.pinned_task_cpus
                .values()
                .any(|cpus| cpus.contains(cpu))
        };
        let cpus: CpuSet = domain.iter().filter(|&cpu| !is_occupied(cpu)).collect();
        let seat_count = cpus.count() as usize;
        if seat_count == 0 || members.len() <= seat_count {
            return None;
        }

        let current_schedule = view
            .previous_plan
            .gangs
            .iter()
            .find(|schedule| schedule.cpus == cpus);
        let is_member = |id: TaskId| members.iter().any(|task| task.task == id);
        let current_tasks: Vec<(TaskId, CpuId)> =
            match current_schedule.and_then(|schedule| schedule.gangs.first()) {
                Some(gang) => gang
                    .members
                    .iter()
                    .filter_map(|&(task, cpu)| Some((task, cpu?)))
                    .collect(),
                None => members
                    .iter()
                    .filter_map(|task| Some((task.task, task.cpu?)))
                    .collect(),
            };
        let mut current_tasks: Vec<(TaskId, CpuId)> = current_tasks
            .into_iter()
            .filter(|&(task, cpu)| is_member(task) && cpus.contains(cpu.0))
            .collect();
        current_tasks.sort_by_key(|(_, cpu)| *cpu);
        current_tasks.dedup_by_key(|(_, cpu)| *cpu);

        if !members.iter().any(|task| costs.has_evidence(task.task)) {
            // Without evidence, the gangs stay, and new tasks get a turn.
            let current_schedule = current_schedule?;
            let running_tasks = if current_tasks.is_empty() {
                self.seat_members(&cpus, members, &[], &[])
            } else {
                current_tasks
            };
            return Some(self.build_gangs(
                &cpus,
                current_schedule.slice_ns,
                members,
                running_tasks,
            ));
        }

        let running_ids: Vec<TaskId> = current_tasks.iter().map(|(task, _)| *task).collect();
        let chosen_tasks = match self.form {
            CoScheduleForm::Set => self.choose_set(seat_count, members, &running_ids, costs),
            _ => self.replace_one(seat_count, members, &running_ids, costs),
        };
        add_replacement_reasons(&running_ids, &chosen_tasks, reasons);
        let seats = self.seat_members(&cpus, members, &chosen_tasks, &current_tasks);
        Some(self.build_gangs(&cpus, self.window_ns, members, seats))
    }

    fn sample_count(&self, task: TaskId) -> f64 {
        self.sample_counts[&task].1
    }

    fn score(&self, task: TaskId, co_runners: &[TaskId], costs: &dyn CoRunCost) -> f64 {
        let penalties = co_runners
            .iter()
            .filter(|&&other| other != task)
            .map(|&co_runner| costs.penalty(task, co_runner));
        penalties.sum::<f64>()
            + self.sample_weight * self.sample_count(task)
            + costs.solo_cost(task)
    }

    /// The task with the lowest score beside `co_runners`; in a tie, the first one.
    fn lowest_scoring_task(
        &self,
        candidates: &[&TaskSample],
        excluded_tasks: &[TaskId],
        co_runners: &[TaskId],
        costs: &dyn CoRunCost,
    ) -> Option<(TaskId, f64)> {
        let candidate_tasks = candidates
            .iter()
            .map(|task| task.task)
            .filter(|task| !excluded_tasks.contains(task));
        let scored_tasks = candidate_tasks.map(|task| (task, self.score(task, co_runners, costs)));
        scored_tasks.reduce(|best, next| if next.1 < best.1 { next } else { best })
    }

    /// Repeatedly adds the task with the lowest score beside those already chosen, until no CPU or no task is left.
    fn fill_seats(
        &self,
        seat_count: usize,
        members: &[&TaskSample],
        chosen_tasks: &mut Vec<TaskId>,
        costs: &dyn CoRunCost,
    ) {
        while chosen_tasks.len() < seat_count
            && let Some((task, _)) =
                self.lowest_scoring_task(members, chosen_tasks, chosen_tasks, costs)
        {
            chosen_tasks.push(task);
        }
    }

    /// Fills free CPUs. If there are none, the task with the most samples may be replaced (AV 4.3).
    fn replace_one(
        &self,
        seat_count: usize,
        members: &[&TaskSample],
        running_tasks: &[TaskId],
        costs: &dyn CoRunCost,
    ) -> Vec<TaskId> {
        let mut new_set = running_tasks.to_vec();
        if new_set.len() == seat_count {
            // The order of arrival makes a tie replace the earliest task, whatever its CPU.
            let mut running_by_arrival = members
                .iter()
                .map(|task| task.task)
                .filter(|task| running_tasks.contains(task));
            let candidate = running_by_arrival.by_ref().reduce(|longest_running, next| {
                if self.sample_count(next) > self.sample_count(longest_running) {
                    next
                } else {
                    longest_running
                }
            });
            let Some(candidate) = candidate else {
                return new_set;
            };

            let staying_tasks: Vec<TaskId> = running_tasks
                .iter()
                .copied()
                .filter(|&task| task != candidate)
                .collect();
            let own_score = self.score(candidate, &staying_tasks, costs);
            let replacement = self
                .lowest_scoring_task(members, running_tasks, &staying_tasks, costs)
                .filter(|(_, score)| *score < own_score);
            if let Some((task, _)) = replacement {
                new_set
                    .iter_mut()
                    .filter(|member| **member == candidate)
                    .for_each(|seat| *seat = task);
            }
            return new_set;
        }

        self.fill_seats(seat_count, members, &mut new_set, costs);
        new_set
    }

    fn choose_set(
        &self,
        seat_count: usize,
        members: &[&TaskSample],
        running_tasks: &[TaskId],
        costs: &dyn CoRunCost,
    ) -> Vec<TaskId> {
        if running_tasks.len() == seat_count
            && running_tasks.iter().any(|&task| costs.must_stay(task))
        {
            return running_tasks.to_vec();
        }
        let max_reload_cost = MAX_RELOAD_SAMPLES * self.sample_weight;
        let costs = &ReloadAdjustedCost {
            costs,
            running_tasks,
            max_reload_cost,
        };

        let mut new_set: Vec<TaskId> = Vec::new();
        let task_ids = members.iter().map(|task| task.task);
        let least_run_task = task_ids.reduce(|least_run, next| {
            if self.sample_count(next) < self.sample_count(least_run) {
                next
            } else {
                least_run
            }
        });
        new_set.extend(least_run_task);
        self.fill_seats(seat_count, members, &mut new_set, costs);

        // In both sets, every penalty counts from both sides.
        let total_score = |set: &[TaskId]| {
            set.iter()
                .map(|&task| self.score(task, set, costs))
                .sum::<f64>()
        };
        if running_tasks.len() == seat_count && total_score(running_tasks) <= total_score(&new_set)
        {
            running_tasks.to_vec()
        } else {
            new_set
        }
    }

    /// Assigns CPUs: tasks that ran keep theirs, and the others take the free CPUs in ascending order.
    fn seat_members(
        &self,
        cpus: &CpuSet,
        members: &[&TaskSample],
        chosen_tasks: &[TaskId],
        current_seats: &[(TaskId, CpuId)],
    ) -> Vec<(TaskId, CpuId)> {
        let earliest_tasks: Vec<TaskId>;
        let chosen_tasks = if chosen_tasks.is_empty() {
            earliest_tasks = members
                .iter()
                .map(|task| task.task)
                .take(cpus.count() as usize)
                .collect();
            &earliest_tasks
        } else {
            chosen_tasks
        };
        let staying_tasks: Vec<(TaskId, CpuId)> = current_seats
            .iter()
            .copied()
            .filter(|(task, _)| chosen_tasks.contains(task))
            .collect();
        let mut free_cpus = cpus.iter().filter(|cpu| {
            staying_tasks
                .iter()
                .all(|(_, taken_cpu)| taken_cpu.0 != *cpu)
        });

        let newcomers = chosen_tasks.iter().filter(|task| {
            staying_tasks
                .iter()
                .all(|(seated_task, _)| seated_task != *task)
        });
        let new_seats: Vec<(TaskId, CpuId)> = newcomers
            .filter_map(|&task| Some((task, CpuId(free_cpus.next()?))))
            .collect();
        let mut seats: Vec<(TaskId, CpuId)> =
            staying_tasks.iter().copied().chain(new_seats).collect();
        seats.sort_by_key(|(_, cpu)| *cpu);
        seats
    }

    fn build_gangs(
        &self,
        cpus: &CpuSet,
        slice_ns: u64,
        members: &[&TaskSample],
        seats: Vec<(TaskId, CpuId)>,
    ) -> GangSchedule {
        let waiting_tasks: Vec<TaskId> = members
            .iter()
            .map(|task| task.task)
            .filter(|task| seats.iter().all(|(seated_task, _)| seated_task != task))
            .collect();
        let running_gang = Gang {
            members: seats
                .into_iter()
                .map(|(task, cpu)| (task, Some(cpu)))
                .collect(),
            slices: RUNNING_SET_TURNS,
        };

        let waiting_groups = waiting_tasks.chunks(cpus.count().max(1) as usize);
        let waiting_gangs = waiting_groups.map(|tasks| Gang {
            members: tasks.iter().map(|&task| (task, None)).collect(),
            slices: 1,
        });
        GangSchedule {
            cpus: cpus.clone(),
            slice_ns,
            gangs: std::iter::once(running_gang).chain(waiting_gangs).collect(),
        }
    }

    /// The penalties of tasks that were last observed below the same cache. Tasks that lag too far behind get none,
    /// because no task may be passed over forever.
    fn advise_penalties(
        &self,
        tasks: &[&TaskSample],
        caches: &[LlcTasks<'_>],
        costs: &dyn CoRunCost,
    ) -> Vec<CoRunPenalty> {
        let last_cpu = |task: &TaskSample| {
            let longest_stay = task.on_cpu_ns.iter().reduce(|longest_running, next| {
                if next.1 > longest_running.1 {
                    next
                } else {
                    longest_running
                }
            });
            task.cpu.or(longest_stay.map(|(cpu, _)| *cpu))
        };
        let last_domain = |task: &TaskSample| {
            let cpu = last_cpu(task)?;
            caches.iter().position(|cache| cache.cpus.contains(cpu.0))
        };

        // With one cache, every waiting task will run below it, wherever the task was observed.
        let cache_indices: Vec<Option<usize>> = tasks
            .iter()
            .map(|task| {
                if caches.len() == 1 {
                    Some(0)
                } else {
                    last_domain(task)
                }
            })
            .collect();

        let mut sample_totals = vec![(0.0, 0.0); caches.len()];
        for (task, domain_index) in tasks.iter().zip(&cache_indices) {
            if let Some(domain_index) = *domain_index {
                sample_totals[domain_index] = (
                    sample_totals[domain_index].0 + self.sample_count(task.task),
                    sample_totals[domain_index].1 + 1.0,
                );
            }
        }
        let lags_too_far = |index: usize| {
            let mean = cache_indices[index]
                .map(|domain_index| sample_totals[domain_index].0 / sample_totals[domain_index].1);
            mean.is_none_or(|mean| {
                mean - self.sample_count(tasks[index].task) > self.max_lag_samples
            })
        };
        let is_lagging: Vec<bool> = (0..tasks.len()).map(lags_too_far).collect();
        let mut penalties = Vec::new();
        for (index, sample) in tasks.iter().enumerate() {
            for (partner_index, partner) in tasks.iter().enumerate().skip(index + 1) {
                if cache_indices[index] != cache_indices[partner_index]
                    || is_lagging[index]
                    || is_lagging[partner_index]
                {
                    continue;
                }
                let penalty = costs.penalty(sample.task, partner.task);
                if penalty > 0.0 {
                    penalties.push(CoRunPenalty {
                        tasks: (sample.task, partner.task),
                        penalty,
                    });
                }
            }
        }
        penalties
    }
}

fn add_replacement_reasons(
    running_tasks: &[TaskId],
    chosen_tasks: &[TaskId],
    reasons: &mut Vec<Reason>,
) {
    let leaving_tasks = running_tasks
        .iter()
        .filter(|task| !chosen_tasks.contains(task));
    let entering_tasks = chosen_tasks
        .iter()
        .filter(|task| !running_tasks.contains(task));

    for (&leaving_task, &entering_task) in leaving_tasks.zip(entering_tasks) {
        let staying_tasks: Vec<TaskId> = chosen_tasks
            .iter()
            .copied()
            .filter(|&task| task != entering_task)
            .take(1)
            .collect();
        let text = match staying_tasks.is_empty() {
            true => "{1} runs instead of {0}: its score is lower",
            false => "{1} runs instead of {0} beside {2}: its score is lower",
        };
        let tasks = [leaving_task, entering_task]
            .into_iter()
            .chain(staying_tasks)
            .collect();
        reasons.push(Reason::new(tasks, text, Vec::new()));
    }
}
