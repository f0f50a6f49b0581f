//! Candidates: the plan of every single mechanism, the default, the plan in force, and a joint local search over all.
//!
//! Problem: mechanisms conflict (thesis 7.3): clusters unite tasks that spreading separates, partition sizes hold for
//! one placement only, gangs change which tasks run together. Method: one forecast scores whole plans. Placement is
//! searched first, by moves, exchanges and moves of whole sharing clusters, each of which rescores only the sites that
//! it changes; then the partitions and the rotation of each site. On a small machine, placement is then searched once
//! more with the best partitions and rotations of each site. Properties: deterministic; bounded by a number of site
//! scores; disabled mechanisms are not used.

use std::cell::Cell;
use std::collections::BTreeMap;

use cachemate_core::{SplitMix64, TaskId};

use super::layout::SiteLayout;
use super::problem::PlanningProblem;
use super::score::{LayoutScore, PlanObjective, score, split_shares};
use super::score_cache::ScoreCache;
use super::site_search::SiteTasks;

/// Mechanisms that the search may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AllowedMechanisms {
    pub placement: bool,
    pub sharing: bool,
    pub space: bool,
    pub gangs: bool,
    /// Tasks may be placed by the node of their memory.
    pub memory_nodes: bool,
}

/// Comparator of plans.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlanComparator {
    pub objective: PlanObjective,
    /// Lowest speed of any task relative to its solo speed; not for the objective of the slowest task.
    pub min_speed: f64,
}

impl PlanComparator {
    /// Larger is better: goals first, then the lowest speed, then the objective.
    pub fn key(&self, score: LayoutScore) -> f64 {
        let behind = (self.min_speed - score.worst()).clamp(0.0, 10.0);
        score.value(self.objective) - 100.0 * score.unmet_goals - 10.0 * behind
    }
}

/// A plan with its score.
#[derive(Clone, Debug)]
pub struct CandidatePlan {
    pub what: &'static str,
    pub layout: SiteLayout,
    pub score: LayoutScore,
}

/// Points of worst slowdown that a plan may cost under another objective.
const MAX_WORST_LOSS: f64 = 0.02;
/// Number of tasks up to which placement is searched together with partitions and rotations.
const JOINT_TASKS: usize = 24;

/// A search with its remaining evaluations.
pub struct PlanSearch<'a> {
    pub scene: &'a PlanningProblem,
    pub memo: &'a ScoreCache,
    pub allowed: AllowedMechanisms,
    pub judge: PlanComparator,
    /// Site scores that may still be computed; one with gangs counts for several.
    pub effort: Cell<usize>,
    pub generator: SplitMix64,
}

impl PlanSearch<'_> {
    /// The default, which sets the lowest speed of the comparator. Tasks stay where they were put, so once another plan
    /// is in force, the default has to pin them to their sites.
    pub(super) fn default(&mut self, lived_on: &BTreeMap<TaskId, usize>, held: Option<&SiteLayout>) -> CandidatePlan {
        let mut layout = SiteLayout::default_of(self.scene, lived_on);
        if let Some(held) = held {
            if held.pinned.contains(&true) {
                layout = SiteLayout::at(self.scene, layout.site_of, true);
            }
            layout = self.scene.with_closed(layout, held);
        }
        let score = score(self.scene, &layout, self.memo);
        if self.judge.objective != PlanObjective::WorstSlowdown {
            self.judge.min_speed = score.worst() - MAX_WORST_LOSS;
        }
        CandidatePlan { what: "default", layout, score }
    }

    /// All candidates, the default first.
    pub fn candidates(&mut self, lived_on: &BTreeMap<TaskId, usize>, held: Option<SiteLayout>) -> Vec<CandidatePlan> {
        let (scene, memo) = (self.scene, self.memo);
        let first = self.default(lived_on, held.as_ref());
        let default = first.layout.clone();
        let mut all = vec![first];
        let mut add = |what: &'static str, layout: SiteLayout| {
            let layout = match &held {
                Some(held) => scene.with_closed(layout, held),
                None => layout,
            };
            add(&mut all, scene, memo, what, layout);
        };
        let mut homes = vec![("joint from the default", default.clone())];
        if let Some(held) = &held {
            add("held", held.clone());
            homes.push(("joint from the plan in force", SiteLayout::at(scene, held.site_of.clone(), true)));
        }
        let shares_data = self.allowed.sharing && scene.tasks.iter().any(|scene_task| scene_task.cluster.is_some());
        if self.allowed.space {
            add("space", self.with_budget_share(8, |search| search.with_cuts(&default)));
        }
        if self.allowed.gangs {
            add("gangs", self.with_budget_share(2, |search| search.with_turns(&default)));
        }
        if shares_data {
            let layout = self.clustered(&default);
            add("sharing", layout.clone());
            homes.push(("joint from sharing", layout));
        }
        if self.allowed.memory_nodes
            && let Some(layout) = self.layout_near_memory(&default)
        {
            add("memory nodes", layout);
        }
        if self.allowed.placement && scene.sites.len() > 1 {
            let (even, separated) = (self.balanced(&default), self.separated(&default));
            let mut placed_from = |from: SiteLayout| self.with_budget_share(8, |search| search.placed(from, false));
            let apart = placed_from(separated);
            add("placement from separated misses", apart.clone());
            homes.push(("joint from separated misses", apart));
            add("placement", placed_from(default.clone()));
            let placed = placed_from(even);
            add("placement from balanced misses", placed.clone());
            homes.push(("joint from balanced misses", placed));
        }
        let last = homes.len();
        for (nth, (what, home)) in homes.into_iter().enumerate() {
            let places = self.allowed.placement && scene.sites.len() > 1;
            let joint = scene.tasks.len() <= JOINT_TASKS;
            let layout = self.with_budget_share(last - nth, |search| {
                // The same layout again still gets its partitions and rotation.
                let layout =
                    if places { search.with_budget_share(2, |search| search.placed(home, joint)) } else { home };
                search.refined(&layout)
            });
            add(what, layout);
        }
        all
    }

    /// Runs a search with at most one in so many of the remaining site scores.
    fn with_budget_share<T>(&mut self, one_in: usize, find: impl FnOnce(&mut Self) -> T) -> T {
        let all = self.effort.get();
        self.effort.set(all / one_in.max(1));
        let layout = find(self);
        self.effort.set(all - all / one_in.max(1) + self.effort.get());
        layout
    }

    pub(super) fn movable(&self) -> Vec<usize> {
        self.scene.known().filter(|&at| self.scene.can_move(at)).collect()
    }

    /// Number of known tasks that fit on each open site: by cores while those suffice, else in proportion to CPUs.
    pub(super) fn free_seats(&self) -> Vec<usize> {
        let tasks = self.scene.known().count();
        let cores: usize = self.scene.sites.iter().map(|site| site.cores).sum();
        let cpus: u32 = self.scene.sites.iter().map(|site| site.cpus.count()).sum();
        let fair = |cpus_here: u32| (tasks * cpus_here as usize).div_ceil(cpus.max(1) as usize);
        let room = |(at, site): (usize, &super::problem::CacheSite)| match self.scene.is_closed(at) {
            true => 0,
            false if tasks <= cores => site.cores,
            false => fair(site.cpus.count()).max(site.cores),
        };
        self.scene.sites.iter().enumerate().map(room).collect()
    }

    /// Score of a site with these members, without partitions or with its best partitions and rotation.
    fn site_key(&self, home: &[Option<usize>], site: usize, members: &[usize], joint: bool) -> LayoutScore {
        if members.is_empty() {
            return LayoutScore::EMPTY;
        }
        let apart = split_shares(self.scene, home, members, site);
        let here = SiteTasks { scene: self.scene, site, members, apart: &apart, effort: &self.effort, memo: self.memo };
        let (cut, turns) = if joint { self.best_of(&here, true) } else { (Vec::new(), None) };
        here.score(&cut, turns.as_ref())
    }

    /// Partitions and rotation of one site, the better of the two first.
    pub(super) fn best_of(
        &self,
        here: &SiteTasks<'_>,
        hurry: bool,
    ) -> (Vec<super::layout::PartitionMembers>, Option<super::layout::GangRotation>) {
        if here.members.len() < 2 {
            return (Vec::new(), None);
        }
        let turns = if self.allowed.gangs { here.best_turns(&self.judge, &[], hurry) } else { None };
        let cut = if self.allowed.space { here.best_cut(&self.judge, turns.as_ref()) } else { Vec::new() };
        if turns.is_none() || !self.allowed.space {
            return (cut, turns);
        }
        // If partitions suffice, a rotation adds nothing.
        let alone = here.best_cut(&self.judge, None);
        let (with, without) = (here.score(&cut, turns.as_ref()), here.score(&alone, None));
        if self.judge.key(without) >= self.judge.key(with) - 1e-3 { (alone, None) } else { (cut, turns) }
    }

    fn each_site(&self, layout: &SiteLayout, change: impl Fn(&Self, &SiteTasks<'_>, &mut SiteLayout)) -> SiteLayout {
        self.on_each(layout, 0..self.scene.sites.len(), change)
    }

    /// A layout with these sites changed one by one.
    pub(super) fn on_each(
        &self,
        layout: &SiteLayout,
        sites: impl IntoIterator<Item = usize>,
        change: impl Fn(&Self, &SiteTasks<'_>, &mut SiteLayout),
    ) -> SiteLayout {
        let mut changed = layout.clone();
        for site in sites.into_iter().filter(|&site| !self.scene.is_closed(site)) {
            let members = layout.on(self.scene, site);
            let apart = split_shares(self.scene, &layout.site_of, &members, site);
            let here = SiteTasks {
                scene: self.scene,
                site,
                members: &members,
                apart: &apart,
                effort: &self.effort,
                memo: self.memo,
            };
            change(self, &here, &mut changed);
            // Partitions and rotations are for tasks that stay on the site.
            if !changed.partitions[site].is_empty() || changed.rotations[site].is_some() {
                for &at in members.iter().filter(|&&at| self.scene.tasks[at].movable) {
                    changed.pinned[at] = true;
                }
            }
        }
        changed
    }

    fn with_cuts(&self, layout: &SiteLayout) -> SiteLayout {
        self.each_site(layout, |search, here, changed| {
            changed.partitions[here.site] = here.best_cut(&search.judge, None);
        })
    }

    fn with_turns(&self, layout: &SiteLayout) -> SiteLayout {
        self.each_site(layout, |search, here, changed| {
            changed.rotations[here.site] = here.best_turns(&search.judge, &[], false);
        })
    }

    fn refined(&self, layout: &SiteLayout) -> SiteLayout {
        self.each_site(layout, |search, here, changed| {
            (changed.partitions[here.site], changed.rotations[here.site]) = search.best_of(here, false);
        })
    }

    /// Puts each cluster onto one site as far as there is room, and all other tasks where room is left.
    fn clustered(&self, default: &SiteLayout) -> SiteLayout {
        let movable = self.movable();
        let mut clusters: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &at in &movable {
            if let Some(cluster) = self.scene.tasks[at].cluster {
                clusters.entry(cluster).or_default().push(at);
            }
        }
        let mut order: Vec<Vec<usize>> = clusters.into_values().collect();
        order.sort_by_key(|members| std::cmp::Reverse(members.len()));
        let mut free = self.free_seats();
        let mut home = default.site_of.clone();
        for at in self.scene.known().filter(|at| !movable.contains(at)) {
            if let Some(site) = home[at] {
                free[site] = free[site].saturating_sub(1);
            }
        }
        for members in &order {
            let near = |site: usize| members.iter().filter(|&&at| default.site_of[at] == Some(site)).count();
            let fits = |site: usize| free[site].min(members.len());
            let best = (0..free.len()).reduce(|a, b| if (fits(b), near(b)) > (fits(a), near(a)) { b } else { a });
            let Some(site) = best else { continue };
            for &at in members {
                let to = if free[site] > 0 { Some(site) } else { (0..free.len()).find(|&other| free[other] > 0) };
                if let Some(to) = to {
                    free[to] -= 1;
                    home[at] = Some(to);
                }
            }
        }
        for at in movable.into_iter().filter(|&at| self.scene.tasks[at].cluster.is_none()) {
            let stays = home[at].filter(|&site| free[site] > 0);
            let most = (0..free.len()).reduce(|a, b| if free[b] > free[a] { b } else { a });
            if let Some(site) = stays.or(most) {
                free[site] = free[site].saturating_sub(1);
                home[at] = Some(site);
            }
        }
        SiteLayout::at(self.scene, home, true)
    }

    /// Puts the tasks that miss most whatever their space onto as few sites as possible, so that they displace each
    /// other only.
    fn separated(&self, default: &SiteLayout) -> SiteLayout {
        let mut movable = self.movable();
        let bytes = self.scene.sites.iter().map(|site| site.bytes).fold(0.0, f64::max);
        let weight = |at: usize| {
            let program = self.scene.tasks[at].program.as_ref();
            program.map_or(0.0, |one| one.cpu_demand * one.misses(bytes) / one.alone(bytes))
        };
        movable.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)).then(a.cmp(&b)));
        // As many tasks on each site as there are now.
        let mut room = vec![0; self.scene.sites.len()];
        for &at in &movable {
            if let Some(site) = default.site_of[at] {
                room[site] += 1;
            }
        }
        let mut home = default.site_of.clone();
        let mut site = 0;
        for at in movable.into_iter().filter(|&at| default.site_of[at].is_some()) {
            while site < room.len() && room[site] == 0 {
                site += 1;
            }
            if site == room.len() {
                break;
            }
            room[site] -= 1;
            home[at] = Some(site);
        }
        SiteLayout::at(self.scene, home, true)
    }

    /// Evens out misses over the sites (DI), heaviest task first to the lightest site.
    fn balanced(&self, default: &SiteLayout) -> SiteLayout {
        let mut movable = self.movable();
        let weight = |at: usize| {
            let scene_task = &self.scene.tasks[at];
            let bytes = self.scene.sites[0].bytes;
            scene_task.program.as_ref().map_or(0.0, |one| one.cpu_demand * one.misses(0.5 * bytes) / one.alone(bytes))
        };
        movable.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)).then(a.cmp(&b)));
        let mut free = self.free_seats();
        let mut load = vec![0.0; free.len()];
        for at in self.scene.known().filter(|&at| !self.scene.can_move(at)) {
            if let Some(site) = default.site_of[at] {
                free[site] = free[site].saturating_sub(1);
                load[site] += weight(at);
            }
        }
        let mut home = default.site_of.clone();
        for at in movable {
            let open = (0..free.len()).filter(|&site| free[site] > 0);
            let per_cpu = |site: usize| load[site] / f64::from(self.scene.sites[site].cpus.count().max(1));
            if let Some(site) = open.reduce(|a, b| if per_cpu(b) < per_cpu(a) { b } else { a }) {
                free[site] -= 1;
                load[site] += weight(at);
                home[at] = Some(site);
            }
        }
        SiteLayout::at(self.scene, home, true)
    }

    /// Local search of the placement by moves and exchanges of tasks.
    fn placed(&mut self, from: SiteLayout, joint: bool) -> SiteLayout {
        let movable = self.movable();
        let room = self.free_seats();
        let sites = self.scene.sites.len();
        let mut homes = HomeAssignment { home: from.site_of, on: vec![Vec::new(); sites], scores: Vec::new() };
        for at in self.scene.known() {
            if let Some(site) = homes.home[at] {
                homes.on[site].push(at);
            }
        }
        homes.scores = (0..sites).map(|site| self.site_key(&homes.home, site, &homes.on[site], joint)).collect();
        let mut improved = true;
        while improved && self.effort.get() > 0 {
            improved = false;
            let mut order = movable.clone();
            self.generator.shuffle(&mut order);
            for &at in &order {
                if self.effort.get() == 0 {
                    break;
                }
                improved |= self.improve(at, &room, &mut homes, joint);
            }
        }
        SiteLayout::at(self.scene, homes.home, true)
    }

    /// Applies the first move or exchange of one task that is better; returns whether there was one.
    fn improve(&self, at: usize, room: &[usize], homes: &mut HomeAssignment, joint: bool) -> bool {
        let Some(here) = homes.home[at] else { return false };
        let total = |scores: &[LayoutScore]| scores.iter().copied().fold(LayoutScore::EMPTY, LayoutScore::plus);
        let before = self.judge.key(total(&homes.scores));
        for site in (0..homes.scores.len()).filter(|&site| site != here) {
            let mut partners: Vec<Option<usize>> = Vec::new();
            if homes.on[site].len() < room[site] {
                partners.push(None);
            }
            let there = homes.on[site].iter().copied().filter(|&other| self.scene.can_move(other));
            partners.extend(there.take(EXCHANGES).map(Some));
            for partner in partners {
                let touched = self.clusters_of([Some(at), partner]);
                homes.exchange(at, here, site, partner);
                // A move also affects partners of a sharing cluster on other sites.
                let feels = |on: &Vec<usize>| {
                    on.iter().any(|&other| self.scene.tasks[other].cluster.is_some_and(|one| touched.contains(&one)))
                };
                let again =
                    |other: &usize| *other == here || *other == site || !touched.is_empty() && feels(&homes.on[*other]);
                let again: Vec<usize> = (0..homes.scores.len()).filter(again).collect();
                let mut changed = Vec::with_capacity(again.len());
                for other in again {
                    let score = self.site_key(&homes.home, other, &homes.on[other], joint);
                    changed.push((other, std::mem::replace(&mut homes.scores[other], score)));
                }
                if self.judge.key(total(&homes.scores)) > before + MIN_STEP {
                    return true;
                }
                changed.into_iter().for_each(|(other, score)| homes.scores[other] = score);
                homes.exchange(at, site, here, partner);
            }
        }
        false
    }

    fn clusters_of(&self, tasks: [Option<usize>; 2]) -> Vec<usize> {
        tasks.into_iter().flatten().filter_map(|at| self.scene.tasks[at].cluster).collect()
    }
}

/// Scores a layout that differs from all earlier ones.
pub(super) fn add(
    all: &mut Vec<CandidatePlan>,
    scene: &PlanningProblem,
    memo: &ScoreCache,
    what: &'static str,
    layout: SiteLayout,
) {
    if all.iter().all(|other| other.layout != layout) {
        let score = score(scene, &layout, memo);
        all.push(CandidatePlan { what, layout, score });
    }
}

/// The placement during its search.
struct HomeAssignment {
    home: Vec<Option<usize>>,
    /// Known tasks by site, ascending.
    on: Vec<Vec<usize>>,
    scores: Vec<LayoutScore>,
}

impl HomeAssignment {
    fn set(&mut self, at: usize, from: usize, to: usize) {
        if let Ok(place) = self.on[from].binary_search(&at) {
            self.on[from].remove(place);
        }
        if let Err(place) = self.on[to].binary_search(&at) {
            self.on[to].insert(place, at);
        }
        self.home[at] = Some(to);
    }

    /// Moves one task to another site, and its partner to the first one's site.
    fn exchange(&mut self, at: usize, from: usize, to: usize, partner: Option<usize>) {
        self.set(at, from, to);
        if let Some(partner) = partner {
            self.set(partner, to, from);
        }
    }
}

/// A score of more tasks than this counts for several.
pub const TASKS_OF_ONE: usize = 8;
/// Tasks of another site against which one is tried.
pub const EXCHANGES: usize = 8;
/// Smallest gain of a step; without it moves would be made for nothing.
pub const MIN_STEP: f64 = 1e-4;

#[cfg(test)]
mod tests {
    use super::super::problem::{CacheSite, PlanningProblem, ProblemTask};
    use super::super::program_model::tests::{CACHE, program, uniform};
    use super::*;
    use cachemate_core::{CacheId, ProcessId};

    fn scene(sites: u32, cpus: u32, tasks: u32) -> PlanningProblem {
        let site = |id: u32| CacheSite {
            cache: CacheId(id),
            cpus: (id * cpus..(id + 1) * cpus).collect(),
            cores: cpus as usize,
            package: 0,
            memory_node: 0,
            bytes: CACHE,
            divided: None,
        };
        let (keeps, stream) = (uniform(0.22 * CACHE, 0.002), program(|_| 0.01));
        let scene_task = |id: u32| ProblemTask {
            task: TaskId(id),
            process: ProcessId(id),
            movable: true,
            program: Some(if id.is_multiple_of(2) { keeps.clone() } else { stream.clone() }),
            cluster: None,
            last_site: Some((id % sites) as usize),
            keep_in_place: false,
        };
        let (sites, tasks) = ((0..sites).map(site).collect(), (0..tasks).map(scene_task).collect());
        PlanningProblem {
            sites,
            tasks,
            cycles_per_ns: 2.0,
            bus: None,
            shortest_slice_ns: None,
            frozen_sites: Vec::new(),
        }
    }

    fn best(scene: &PlanningProblem, allowed: AllowedMechanisms, effort: usize) -> (LayoutScore, LayoutScore, usize) {
        let judge = PlanComparator { objective: PlanObjective::WeightedSpeedup, min_speed: 0.0 };
        let (effort, generator) = (Cell::new(effort), SplitMix64::new(1));
        let memo = ScoreCache::of(scene);
        let mut search = PlanSearch { scene, memo: &memo, allowed, judge, effort, generator };
        let all = search.candidates(&BTreeMap::new(), None);
        let judge = search.judge;
        let best = all.iter().map(|one| one.score).reduce(|a, b| if judge.key(b) > judge.key(a) { b } else { a });
        (all[0].score, best.unwrap(), search.effort.get())
    }

    const ALL: AllowedMechanisms =
        AllowedMechanisms { placement: true, sharing: true, space: true, gangs: true, memory_nodes: true };

    /// Are streams and programs that keep data separated if the machine's own scheduler has mixed them?
    #[test]
    fn streams_are_separated_from_programs_that_keep_data() {
        let mut scene = scene(2, 4, 8);
        scene.tasks.iter_mut().enumerate().for_each(|(index, scene_task)| scene_task.last_site = Some(index / 4));
        let (default, found, _) = best(&scene, ALL, 2_000);
        let value = |score: LayoutScore| score.value(PlanObjective::WeightedSpeedup);
        assert!(value(found) > 1.01 * value(default) && value(found) > 0.98, "{default:?} {found:?}");
        let nothing =
            AllowedMechanisms { placement: false, sharing: false, space: false, gangs: false, memory_nodes: false };
        let (default, found, _) = best(&scene, nothing, 2_000);
        assert_eq!(value(default), value(found), "all mechanisms are disabled");
    }

    /// Do threads that have never run on different caches stay together, and are they split if they have?
    #[test]
    fn threads_that_never_ran_on_different_caches_stay_together() {
        let mut scene = scene(2, 4, 8);
        // Two tasks that keep data are of one process, on the cache of the streams.
        for (at, scene_task) in scene.tasks.iter_mut().enumerate() {
            scene_task.last_site = Some(at / 4);
        }
        let pair = [0, 2];
        let parted = |scene: &PlanningProblem| {
            let judge = PlanComparator { objective: PlanObjective::WeightedSpeedup, min_speed: 0.0 };
            let (effort, generator) = (Cell::new(2_000), SplitMix64::new(1));
            let memo = ScoreCache::of(scene);
            let mut search = PlanSearch { scene, memo: &memo, allowed: ALL, judge, effort, generator };
            let all = search.candidates(&BTreeMap::new(), None);
            all.iter().filter(|one| pair.iter().any(|&at| one.layout.site_of[at] != Some(0))).count()
        };
        assert!(parted(&scene) > 0, "some plan moves them");
        pair.iter().for_each(|&at| scene.tasks[at].keep_in_place = true);
        assert_eq!(parted(&scene), 0);
    }

    /// If a task on the first cache is not known for the moment, is that cache the same in every plan, with no task
    /// joining?
    #[test]
    fn a_site_with_an_unknown_task_is_left_alone() {
        let mut scene = scene(2, 4, 8);
        scene.tasks.iter_mut().enumerate().for_each(|(index, scene_task)| scene_task.last_site = Some(index / 4));
        scene.tasks[1].program = None;
        let count_same = |scene: &PlanningProblem| {
            let mut held = SiteLayout::at(scene, scene.tasks.iter().map(|one| one.last_site).collect(), false);
            held.partitions[0] = vec![super::super::layout::PartitionMembers { members: vec![0], units: 5 }];
            let judge = PlanComparator { objective: PlanObjective::WeightedSpeedup, min_speed: 0.0 };
            let (effort, generator, memo) = (Cell::new(2_000), SplitMix64::new(1), ScoreCache::of(scene));
            let mut search = PlanSearch { scene, memo: &memo, allowed: ALL, judge, effort, generator };
            let all = search.candidates(&BTreeMap::new(), Some(held.clone()));
            let on_first = |layout: &SiteLayout| layout.site_of.iter().map(|home| *home == Some(0)).collect::<Vec<_>>();
            let same = |one: &&CandidatePlan| {
                one.layout.partitions[0] == held.partitions[0] && on_first(&one.layout) == on_first(&held)
            };
            (all.iter().filter(same).count(), all.len())
        };
        let (same, all) = count_same(&scene);
        assert!(same < all, "{same} of {all}");
        scene.close(|task| task == TaskId(1));
        assert!(scene.is_closed(0) && !scene.is_closed(1));
        let (same, all) = count_same(&scene);
        assert_eq!(same, all);
        scene.frozen_sites.clear();
        scene.close(|_| false);
        assert!(!scene.is_closed(0), "searches no longer wait for it");
    }

    /// Does the search of a large machine end within its evaluations, with a plan at least as good as the default?
    #[test]
    fn large_machines_are_searched_within_the_effort() {
        let scene = scene(64, 16, 1_000);
        let (default, found, left) = best(&scene, ALL, 400);
        let value = |score: LayoutScore| score.value(PlanObjective::WeightedSpeedup);
        assert!(value(found) >= value(default) && left <= 400, "{default:?} {found:?}");
    }
}
