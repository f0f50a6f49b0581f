//! Layouts: plans in terms of the positions of tasks and sites, as used by the search, and their translation into
//! plans.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    CacheShare, CpuSet, Gang, GangSchedule, GroupId, IndexSet, PageMigration, PartitionSupport,
    Plan, ProcessId, ShareMember, TaskId,
};
use cachemate_papers::partition::units::assign;

use super::decided_plan::drop_starving_schedules;
use super::problem::{PlanningProblem, ProblemTask};
use super::sites::{CacheSite, CpuSites};

/// Largest fetches of the tasks outside of all partitions, relative to those of a task with a partition, beside which
/// it counts as having its partition to itself.
const MAX_OUTSIDE_SHARE: f64 = 0.1;

/// Tasks that share a partition of a cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PartitionMembers {
    pub members: Vec<usize>,
    pub units: u32,
}

/// Gangs that take turns on a site.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GangRotation {
    pub slice_ns: u64,
    pub gangs: Vec<Vec<usize>>,
}

impl GangRotation {
    /// Canonical order: members ascending, and the gang of the first member first. An equivalent rotation must compare
    /// equal, or the scheduler restarts every turn.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.gangs.iter_mut().for_each(|gang| gang.sort_unstable());
        let first_gang =
            (0..self.gangs.len()).min_by_key(|&gang| self.gangs[gang].first().copied());
        self.gangs.rotate_left(first_gang.unwrap_or(0));
        self
    }
}

/// Sites, pins, partitions and rotations of all tasks, by position in the planning problem.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SiteLayout {
    /// Site of each task; `None` if unknown.
    pub site_by_task: Vec<Option<usize>>,
    /// Whether the plan pins the task to its site; otherwise the task was only observed there.
    pub is_pinned: Vec<bool>,
    /// Partitions by site; empty if the site is undivided.
    pub partitions: Vec<Vec<PartitionMembers>>,
    pub rotations: Vec<Option<GangRotation>>,
}

impl SiteLayout {
    /// Puts all tasks on the sites that the machine's own scheduler chose, without partitions.
    pub fn from_default_sites(
        problem: &PlanningProblem,
        observed_sites: &BTreeMap<TaskId, usize>,
    ) -> Self {
        let site_by_task = problem
            .tasks
            .iter()
            .map(|problem_task| {
                observed_sites
                    .get(&problem_task.task)
                    .copied()
                    .or(problem_task.last_site)
            })
            .collect();
        SiteLayout::without_partitions(problem, site_by_task, false)
    }

    /// With `is_pinned`, movable tasks with a model are pinned to their sites, and all others stay free.
    pub fn without_partitions(
        problem: &PlanningProblem,
        site_by_task: Vec<Option<usize>>,
        is_pinned: bool,
    ) -> Self {
        let is_pinned = problem
            .tasks
            .iter()
            .map(|problem_task| {
                is_pinned && problem_task.is_movable && problem_task.program.is_some()
            })
            .collect();
        SiteLayout {
            site_by_task,
            is_pinned,
            partitions: vec![Vec::new(); problem.sites.len()],
            rotations: vec![None; problem.sites.len()],
        }
    }

    /// Reads the layout of a plan. Tasks that the plan does not mention are on the sites on which they were observed.
    pub fn from_plan(plan: &Plan, problem: &PlanningProblem) -> Self {
        let cpu_sites = CpuSites::from_sites(&problem.sites);
        let pinned_site_of = |task: &TaskId| {
            let cpus = plan.affinity.get(task)?;
            cpu_sites
                .site_of_cpu(cpus.iter().next()?)
                .filter(|&site| cpus.is_subset(&problem.sites[site].cpus))
        };
        let index_by_task = if plan.gangs.is_empty() {
            BTreeMap::new()
        } else {
            problem.index_by_task()
        };

        let mut layout = SiteLayout::without_partitions(problem, Vec::new(), false);
        let pinned_sites: Vec<Option<usize>> = problem
            .tasks
            .iter()
            .map(|problem_task| pinned_site_of(&problem_task.task))
            .collect();
        layout.site_by_task = problem
            .tasks
            .iter()
            .zip(&pinned_sites)
            .map(|(problem_task, pinned_site)| pinned_site.or(problem_task.last_site))
            .collect();
        layout.is_pinned = pinned_sites.iter().map(Option::is_some).collect();

        for schedule in &plan.gangs {
            let Some(site) = problem
                .sites
                .iter()
                .position(|site| schedule.cpus.is_subset(&site.cpus))
            else {
                continue;
            };

            let members = |gang: &Gang| {
                gang.members
                    .iter()
                    .filter_map(|(task, _)| index_by_task.get(task).copied())
                    .collect()
            };
            let gangs = schedule.gangs.iter().map(members).collect();
            layout.rotations[site] = Some(GangRotation {
                slice_ns: schedule.slice_ns,
                gangs,
            });
        }

        for share in &plan.shares {
            let Some(site) = problem
                .sites
                .iter()
                .position(|site| site.cache == share.cache)
            else {
                continue;
            };
            let named: BTreeSet<&ShareMember> = share.members.iter().collect();
            let is_member = |index: &usize| {
                let task = &problem.tasks[*index];
                let is_named = named.contains(&ShareMember::Task(task.task))
                    || named.contains(&ShareMember::Process(task.process));
                is_named && layout.site_by_task[*index] == Some(site)
            };
            let members = (0..problem.tasks.len()).filter(is_member).collect();
            layout.partitions[site].push(PartitionMembers {
                members,
                units: share.units.set().count(),
            });
        }

        layout
    }

    pub fn known_tasks_on(&self, problem: &PlanningProblem, site: usize) -> Vec<usize> {
        problem
            .known_tasks()
            .filter(|&index| self.site_by_task[index] == Some(site))
            .collect()
    }

    /// Writes the layout into a plan. Units stay the same as in `previous_plan` as far as possible.
    pub fn write_into_plan(
        &self,
        problem: &PlanningProblem,
        previous_plan: &Plan,
        migration: PageMigration,
        plan: &mut Plan,
    ) {
        let pinned_cpus = |(index, problem_task): (usize, &ProblemTask)| {
            let is_pinned = self.is_pinned[index] && problem_task.is_movable;
            let site = self.site_by_task[index].filter(|_| is_pinned)?;
            Some((problem_task.task, problem.sites[site].cpus.clone()))
        };
        let tasks = problem.tasks.iter().enumerate();
        plan.affinity.extend(tasks.filter_map(pinned_cpus));
        let online: CpuSet = problem
            .sites
            .iter()
            .flat_map(|site| site.cpus.iter())
            .collect();
        let allowed_cpus =
            |problem_task: &ProblemTask| match (problem_task.is_movable, problem_task.last_site) {
                (true, _) => plan
                    .affinity
                    .get(&problem_task.task)
                    .unwrap_or(&online)
                    .intersection(&online),
                (false, Some(site)) => problem.sites[site].cpus.clone(),
                (false, None) => CpuSet::default(),
            };

        plan.gangs.extend(
            (0..problem.sites.len()).filter_map(|site| self.build_gang_schedule(problem, site)),
        );
        drop_starving_schedules(
            &mut plan.gangs,
            problem
                .tasks
                .iter()
                .map(|problem_task| (problem_task.task, allowed_cpus(problem_task))),
        );
        for site in 0..problem.sites.len() {
            self.add_cache_shares(problem, site, previous_plan, migration, plan);
        }
    }

    fn build_gang_schedule(&self, problem: &PlanningProblem, site: usize) -> Option<GangSchedule> {
        let rotation = self.rotations[site].as_ref()?;
        let cpus = &problem.sites[site].cpus;
        let build_gang = |members: &Vec<usize>| Gang {
            members: members
                .iter()
                .map(|&index| (problem.tasks[index].task, None))
                .collect(),
            slices: 1,
        };

        let is_feasible = rotation
            .gangs
            .iter()
            .all(|gang| !gang.is_empty() && gang.len() <= cpus.count() as usize);
        if !is_feasible || rotation.gangs.len() < 2 {
            return None;
        }

        let gangs = rotation.gangs.iter().map(build_gang).collect();
        Some(GangSchedule {
            cpus: cpus.clone(),
            slice_ns: rotation.slice_ns,
            gangs,
        })
    }

    fn add_cache_shares(
        &self,
        problem: &PlanningProblem,
        site: usize,
        previous_plan: &Plan,
        migration: PageMigration,
        plan: &mut Plan,
    ) {
        let (partitions, cache_site) = (&self.partitions[site], &problem.sites[site]);
        let Some(partition_units) = cache_site
            .partition_units
            .filter(|_| !partitions.is_empty())
        else {
            return;
        };

        let uses_colors = matches!(partition_units, PartitionSupport::Colors { .. });
        let mut shares: Vec<(GroupId, Vec<ShareMember>, u32)> = Vec::new();
        for group in partitions.iter().filter(|group| !group.members.is_empty()) {
            let members = self.share_members(problem, group, uses_colors);
            let id = GroupId(
                problem.tasks[group.members[0]].process.0.wrapping_mul(64)
                    + group.members[0] as u32 % 64,
            );
            shares.push((id, members, group.units));
        }
        shares.retain(|(_, members, _)| !members.is_empty());
        let previous_units_by_share = previous_units(&shares, previous_plan, cache_site);
        let sizes: Vec<u32> = shares.iter().map(|(.., units)| *units).collect();
        if sizes.iter().sum::<u32>() > partition_units.units() {
            return;
        }
        for ((group, members, _), units) in
            shares
                .into_iter()
                .zip(assign(&previous_units_by_share, &sizes, &partition_units))
        {
            let units = partition_units.to_units(units, migration);
            plan.shares.push(CacheShare {
                group,
                members,
                cache: cache_site.cache,
                units,
            });
        }
    }

    /// Whether the plan into which the layout was written contains all of it. A partition or a gang is left out if its
    /// task cannot be moved, or belongs to a process in two groups.
    pub fn is_expressed_by(&self, plan: &Plan, problem: &PlanningProblem) -> bool {
        let is_expressed = |(index, site): (usize, &CacheSite)| {
            let groups = self.partitions[index]
                .iter()
                .filter(|group| !group.members.is_empty())
                .count();
            let shares = plan
                .shares
                .iter()
                .filter(|share| share.cache == site.cache)
                .count();
            let has_gangs = plan.gangs.iter().any(|schedule| schedule.cpus == site.cpus);
            groups == shares && self.rotations[index].is_some() == has_gangs
        };
        problem.sites.iter().enumerate().all(is_expressed)
    }

    /// Whether the layout has neither partitions nor rotations.
    pub fn is_undivided(&self) -> bool {
        self.partitions.iter().all(Vec::is_empty) && self.rotations.iter().all(Option::is_none)
    }

    /// The members of a group: whole processes if all their tasks are in the group, and single tasks only if units are
    /// ways. Memory belongs to a process, so if units are colors, threads without a profile go with the others.
    fn share_members(
        &self,
        problem: &PlanningProblem,
        group: &PartitionMembers,
        uses_colors: bool,
    ) -> Vec<ShareMember> {
        let group_members: BTreeSet<usize> = group.members.iter().copied().collect();
        let is_included = |(index, problem_task): &(usize, &ProblemTask)| {
            let is_compatible =
                group_members.contains(index) || uses_colors && problem_task.program.is_none();
            problem_task.is_movable && is_compatible
        };
        let tasks = problem.tasks.iter().enumerate();
        let partial_processes: BTreeSet<ProcessId> = tasks
            .filter(|task| !is_included(task))
            .map(|(_, problem_task)| problem_task.process)
            .collect();

        let member_of = |&index: &usize| {
            let problem_task = &problem.tasks[index];
            if !partial_processes.contains(&problem_task.process) {
                Some(ShareMember::Process(problem_task.process))
            } else {
                (!uses_colors && problem_task.is_movable)
                    .then_some(ShareMember::Task(problem_task.task))
            }
        };
        let mut listed = BTreeSet::new();
        let members = group.members.iter().filter_map(member_of);
        members.filter(|member| listed.insert(*member)).collect()
    }
}

/// The units that each share of a site has in the previous plan: those of its group or, because exits rename groups, of
/// a share without a group now that has a member of it.
fn previous_units(
    shares: &[(GroupId, Vec<ShareMember>, u32)],
    previous_plan: &Plan,
    site: &CacheSite,
) -> Vec<IndexSet> {
    let old_shares = previous_plan.shares.iter();
    let (named, mut unnamed): (Vec<&CacheShare>, Vec<&CacheShare>) = old_shares
        .filter(|old| old.cache == site.cache)
        .partition(|old| shares.iter().any(|(id, ..)| *id == old.group));
    let units_of = |(id, members, _): &(GroupId, Vec<ShareMember>, u32)| {
        if let Some(old) = named.iter().find(|old| old.group == *id) {
            return old.units.set().clone();
        }
        let is_successor = |old: &&CacheShare| old.members.iter().any(|old| members.contains(old));
        let position = unnamed.iter().position(is_successor);
        position.map_or_else(IndexSet::default, |index| {
            unnamed.remove(index).units.set().clone()
        })
    };
    shares.iter().map(units_of).collect()
}

impl PlanningProblem {
    /// Closed sites, and tasks that are on one in either layout, stay as in `current_layout`.
    #[must_use]
    pub fn with_closed_sites(
        &self,
        mut layout: SiteLayout,
        current_layout: &SiteLayout,
    ) -> SiteLayout {
        if self.closed_sites.is_empty() {
            return layout;
        }
        let is_closed = |home: Option<usize>| home.is_some_and(|site| self.is_closed(site));
        for index in 0..self.tasks.len() {
            if is_closed(current_layout.site_by_task[index])
                || is_closed(layout.site_by_task[index])
            {
                (layout.site_by_task[index], layout.is_pinned[index]) = (
                    current_layout.site_by_task[index],
                    current_layout.is_pinned[index],
                );
            }
        }
        for site in (0..self.sites.len()).filter(|&site| self.is_closed(site)) {
            layout.partitions[site].clone_from(&current_layout.partitions[site]);
            layout.rotations[site].clone_from(&current_layout.rotations[site]);
        }
        layout
    }

    /// The size of a task's partition in bytes; `None` if its site is unknown, or if it takes turns.
    pub fn partition_bytes(&self, layout: &SiteLayout, index: usize) -> Option<f64> {
        let site = layout.site_by_task[index].filter(|&site| layout.rotations[site].is_none())?;
        let partition = layout.partitions[site]
            .iter()
            .find(|group| group.members.contains(&index));
        Some(self.share_bytes(site, partition))
    }

    /// The bytes of the partition that each task has to itself; `None` if it shares its space or takes turns. Tasks
    /// outside of all partitions may use every partition of their site: they share it, unless they fetch far fewer lines
    /// per cycle than the task with the partition.
    pub fn exclusive_bytes(
        &self,
        layout: &SiteLayout,
        fetches_of: impl Fn(TaskId) -> Option<f64>,
    ) -> Vec<Option<f64>> {
        let mut is_partitioned = vec![false; self.tasks.len()];
        for (site, partitions) in layout.partitions.iter().enumerate() {
            for &index in partitions.iter().flat_map(|group| &group.members) {
                is_partitioned[index] |= layout.site_by_task[index] == Some(site);
            }
        }
        let mut outside_fetches = vec![Some(0.0); self.sites.len()];
        for index in (0..self.tasks.len()).filter(|&index| !is_partitioned[index]) {
            if let Some(site) = layout.site_by_task[index] {
                let fetches = fetches_of(self.tasks[index].task);
                outside_fetches[site] = outside_fetches[site].zip(fetches).map(|(a, b)| a + b);
            }
        }

        let mut sizes = vec![None; self.tasks.len()];
        for (site, partitions) in layout.partitions.iter().enumerate() {
            let Some(outside) = outside_fetches[site].filter(|_| layout.rotations[site].is_none())
            else {
                continue;
            };
            for group in partitions {
                if let [index] = group.members[..]
                    && layout.site_by_task[index] == Some(site)
                {
                    let own = fetches_of(self.tasks[index].task).unwrap_or(0.0);
                    let is_exclusive = outside <= MAX_OUTSIDE_SHARE * own;
                    sizes[index] = is_exclusive.then(|| self.share_bytes(site, Some(group)));
                }
            }
        }
        sizes
    }

    /// The bytes of a partition of a site, or of all of it.
    fn share_bytes(&self, site: usize, partition: Option<&PartitionMembers>) -> f64 {
        let CacheSite {
            bytes,
            partition_units,
            ..
        } = &self.sites[site];
        let units = partition_units.map_or(1, |partition_units| partition_units.units());
        bytes * partition.map_or(1.0, |group| f64::from(group.units) / f64::from(units))
    }
}

/// Groups tasks by process, for partitions by color.
pub fn group_by_process(
    problem: &PlanningProblem,
    members: &[usize],
) -> Vec<(ProcessId, Vec<usize>)> {
    let mut process_groups: Vec<(ProcessId, Vec<usize>)> = Vec::new();
    for &index in members {
        let process = problem.tasks[index].process;
        match process_groups
            .iter_mut()
            .find(|(process_of_group, _)| *process_of_group == process)
        {
            Some((_, tasks)) => tasks.push(index),
            None => process_groups.push((process, vec![index])),
        }
    }
    process_groups
}

#[cfg(test)]
mod tests {
    use super::super::score_cache::tests::{site_fixture, task_fixture};
    use super::*;
    use cachemate_core::WindowLength;

    /// Two programs on one cache of eight colors, and another thread of the first program's process.
    fn problem_fixture(knows_thread: bool) -> PlanningProblem {
        let partition_units = Some(PartitionSupport::Colors {
            colors: 8,
            page_bytes: 4096,
            page_migration_ns: 1.0,
        });
        let mut tasks = vec![
            task_fixture(0, 0, 0.5),
            task_fixture(1, 0, 1.2),
            task_fixture(2, 0, 0.1),
        ];
        tasks[2].process = ProcessId(0);
        if !knows_thread {
            tasks[2].program = None;
        }

        let sites = vec![CacheSite {
            partition_units,
            ..site_fixture(0, 4)
        }];
        PlanningProblem::undisturbed_problem(sites, tasks)
    }

    fn write_to(problem: &PlanningProblem, partitions: &[(&[usize], u32)]) -> (SiteLayout, Plan) {
        let mut layout = SiteLayout::without_partitions(problem, vec![Some(0); 3], true);
        let group = |&(members, units): &(&[usize], u32)| PartitionMembers {
            members: members.to_vec(),
            units,
        };
        layout.partitions[0] = partitions.iter().map(group).collect();
        let idle = Plan::idle(WindowLength::Time { ns: 1 });
        let mut plan = idle.clone();
        layout.write_into_plan(problem, &idle, PageMigration::All, &mut plan);
        (layout, plan)
    }

    /// If a process has a thread without a profile, as agents have, do its pages still get their colors?
    #[test]
    fn a_process_with_an_unprofiled_thread_still_gets_colors() {
        let problem = problem_fixture(false);
        let (layout, plan) = write_to(&problem, &[(&[0], 6), (&[1], 2)]);
        let members: Vec<_> = plan
            .shares
            .iter()
            .flat_map(|share| share.members.clone())
            .collect();
        assert_eq!(
            members,
            [
                ShareMember::Process(ProcessId(0)),
                ShareMember::Process(ProcessId(1))
            ]
        );
        assert!(layout.is_expressed_by(&plan, &problem) && !layout.is_undivided());
        // Apart from tasks without a profile, the layout is read back unchanged.
        let mut read = SiteLayout::from_plan(&plan, &problem);
        read.partitions[0].iter_mut().for_each(|group| {
            group
                .members
                .retain(|&index| problem.tasks[index].program.is_some())
        });
        assert_eq!(read.partitions, layout.partitions);
    }

    /// If a task exits that arrived first, so that the positions of all others change: do the partitions of the others
    /// keep their units?
    #[test]
    fn do_shares_keep_their_units_after_an_earlier_task_exits() {
        let mut problem = problem_fixture(true);
        problem.tasks[2].process = ProcessId(2);
        let (_, plan) = write_to(&problem, &[(&[0], 2), (&[1], 3), (&[2], 3)]);
        problem.tasks.remove(0);
        let mut layout = SiteLayout::without_partitions(&problem, vec![Some(0); 2], true);
        let group = |member, units| PartitionMembers {
            members: vec![member],
            units,
        };
        // The order has changed as well.
        layout.partitions[0] = vec![group(1, 3), group(0, 3)];
        let mut new_plan = Plan::idle(WindowLength::Time { ns: 1 });
        layout.write_into_plan(&problem, &plan, PageMigration::All, &mut new_plan);
        let units_of = |plan: &Plan, process: u32| {
            let member = ShareMember::Process(ProcessId(process));
            let mut shares = plan.shares.iter();
            let share = shares.find(|share| share.members.contains(&member));
            share.unwrap().units.set().to_string()
        };
        for process in [1, 2] {
            assert_eq!(units_of(&new_plan, process), units_of(&plan, process));
        }
    }

    /// Are rotations equal if they differ only in the order of members or in the gang that they begin with, and not if
    /// another gang follows?
    #[test]
    fn equal_rotations_have_one_order() {
        let rotation = |gangs: &[&[usize]]| {
            GangRotation {
                slice_ns: 1,
                gangs: gangs.iter().map(|gang| gang.to_vec()).collect(),
            }
            .in_order()
        };
        let first = rotation(&[&[5, 2], &[3, 0], &[1, 4]]);
        assert_eq!(first.gangs, [[0, 3], [1, 4], [2, 5]]);
        assert_eq!(first, rotation(&[&[4, 1], &[2, 5], &[0, 3]]));
        assert_ne!(first, rotation(&[&[4, 1], &[0, 3], &[2, 5]]));
    }

    /// Is a plan that cannot express a layout distinguished from one that can?
    #[test]
    fn a_plan_that_cannot_express_a_layout_is_distinguished() {
        // The thread has a profile and is in the other group, but colors cannot split a process.
        let parted = problem_fixture(true);
        let (layout, plan) = write_to(&parted, &[(&[0], 6), (&[1, 2], 2)]);
        assert!(!layout.is_expressed_by(&plan, &parted), "{plan:?}");
        let mut layout = SiteLayout::without_partitions(&parted, vec![Some(0); 3], true);
        layout.rotations[0] = Some(GangRotation {
            slice_ns: 1,
            gangs: vec![vec![0], Vec::new()],
        });
        assert!(
            !layout.is_expressed_by(&Plan::idle(WindowLength::Time { ns: 1 }), &parted),
            "an empty gang"
        );
    }
}
