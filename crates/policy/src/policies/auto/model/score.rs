//! Score of a layout, by its forecast and the stated objective.
//!
//! The speed of a task counts relative to its solo speed on the machine, with a CPU and a cache to itself. Goals come
//! first: a shortfall outweighs every gain. Properties: sites are scored one by one, so that a search rescores only
//! those that it changed; waiting for memory is composed per memory node only if its cost is known.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::composition::{CacheOccupant, TaskPerformance, compose};
use super::layout::{GangRotation, PartitionMembers, SiteLayout};
use super::problem::{CacheSite, PlanningProblem};
use super::program_model::ProgramModel;
use super::score_cache::{ErrorDraw, ScoreCache};

/// The objective of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlanObjective {
    /// Maximizes the mean of speeds relative to solo speeds, weighted by priority.
    #[default]
    WeightedSpeedup,
    /// Minimizes the largest slowdown.
    WorstSlowdown,
    /// Meets the goals with the smallest share of each cache.
    LeastSpace,
    /// Maximizes the total of instructions; this rewards starving programs that are slow by nature.
    Throughput,
}

/// Forecast of one task.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ForecastSpeed {
    /// Speed relative to the solo speed.
    pub over_alone: f64,
    /// Instructions per cycle of elapsed time.
    pub instr_per_cycle: f64,
    /// Lines to and from memory per cycle of elapsed time.
    pub lines_per_cycle: f64,
    /// Occupancy, as composed.
    pub held_bytes: f64,
    /// Share of the task's CPU demand that is met.
    pub share_of_demand: f64,
    /// Solo instructions per cycle if the curve lies as low as its error allows; only for promised rates.
    pub alone_at_best: Option<f64>,
}

impl ForecastSpeed {
    /// Returns the shortfall from a task's goals, as a share, summed over the goals. A rate that the task could not
    /// even reach alone is not counted: no plan can provide it, and no other task should lose speed for it.
    pub fn goal_shortfall(&self, program: &ProgramModel) -> f64 {
        let goal = program.goal;
        let slower = goal.max_slowdown.map_or(0.0, |limit| 1.0 / self.over_alone - 1.0 - target_slowdown(limit));
        let below = goal.min_rate.zip(self.current_and_solo_rates(program)).map_or(0.0, |(min_rate, (rate, alone))| {
            if alone < min_rate { 0.0 } else { min_rate / rate.max(1e-12) - 1.0 }
        });
        slower.clamp(0.0, 10.0) + below.clamp(0.0, 10.0)
    }

    /// Returns the cycles per instruction while the task runs.
    pub fn cycles_per_instr(&self, program: &ProgramModel) -> f64 {
        self.share_of_demand * program.cpu_demand / self.instr_per_cycle.max(1e-12)
    }

    /// Returns the work per second, now and at best alone on the machine; `None` if no rate was promised, or it was not
    /// measured.
    pub fn current_and_solo_rates(&self, program: &ProgramModel) -> Option<(f64, f64)> {
        let per_s = program.rate?.per_instr_per_cycle;
        Some((per_s * self.instr_per_cycle, per_s * self.alone_at_best?))
    }
}

/// Returns the slowdown at which a plan aims for a promised maximum, which is lower by the error of a forecast.
fn target_slowdown(max: f64) -> f64 {
    max - (0.25 * max).min(0.01)
}

/// Cost of a shortfall. A promise that is missed by this much counts as broken, however large the shortfall is; thus,
/// of two promises that exclude each other, one is kept.
const BROKEN_FROM: f64 = 0.02;
const BROKEN_COST: f64 = 0.1;

fn unmet_cost(shortfall: f64) -> f64 {
    shortfall + BROKEN_COST * (shortfall / BROKEN_FROM).min(1.0)
}

/// Sums over the tasks of one site or of all sites.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayoutScore {
    weighted: f64,
    weights: f64,
    instr_per_cycle: f64,
    worst: f64,
    /// Shortfall from all goals, weighted by priority and summed.
    pub unmet_goals: f64,
    units_share: f64,
}

impl LayoutScore {
    /// Score of an empty set of tasks.
    pub const EMPTY: LayoutScore = LayoutScore {
        weighted: 0.0,
        weights: 0.0,
        instr_per_cycle: 0.0,
        worst: f64::INFINITY,
        unmet_goals: 0.0,
        units_share: 0.0,
    };

    #[must_use]
    pub fn added_to(self, addend: LayoutScore) -> Self {
        LayoutScore {
            weighted: self.weighted + addend.weighted,
            weights: self.weights + addend.weights,
            instr_per_cycle: self.instr_per_cycle + addend.instr_per_cycle,
            worst: self.worst.min(addend.worst),
            unmet_goals: self.unmet_goals + addend.unmet_goals,
            units_share: self.units_share + addend.units_share,
        }
    }

    /// Returns all fields as bits, for exact comparisons.
    #[cfg(test)]
    pub fn bits(self) -> [u64; 6] {
        let sums = [self.weighted, self.weights, self.instr_per_cycle, self.worst, self.unmet_goals, self.units_share];
        sums.map(f64::to_bits)
    }

    /// Lowest speed of a task relative to its solo speed.
    pub fn worst(self) -> f64 {
        self.worst
    }

    /// Returns the value of the score; larger is better, and the ratio of two values is a gain.
    pub fn objective_value(self, objective: PlanObjective) -> f64 {
        let mean = self.weighted / self.weights.max(1e-9);
        match objective {
            PlanObjective::WeightedSpeedup => mean,
            // Among plans that are equally good for the slowest task, the one with the better mean wins.
            PlanObjective::WorstSlowdown => self.worst.min(1e9) + 0.01 * mean,
            PlanObjective::Throughput => self.instr_per_cycle,
            PlanObjective::LeastSpace => 2.0 - self.units_share + 0.01 * mean,
        }
    }
}

/// Returns the shares of CPU time if tasks take turns fairly on this number of CPUs: no task gets more than it wants.
fn cpu_shares(wants: &[f64], cpus: f64) -> Vec<f64> {
    let mut level = 1.0f64;
    if wants.iter().sum::<f64>() > cpus {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..40 {
            level = 0.5 * (low + high);
            if wants.iter().map(|want| want.min(level)).sum::<f64>() > cpus { high = level } else { low = level }
        }
    }
    wants.iter().map(|want| want.min(level)).collect()
}

/// Returns the share of each task's partners that are not on this site.
fn split_share(problem: &PlanningProblem, site_of: &[Option<usize>], index: usize, site: usize) -> f64 {
    let Some(cluster) = problem.tasks[index].cluster else { return 1.0 };
    let (mut partners, mut elsewhere) = (0.0, 0.0);
    for (partner, partner_task) in problem.tasks.iter().enumerate() {
        if partner != index && partner_task.cluster == Some(cluster) {
            partners += 1.0;
            elsewhere += if site_of[partner] == Some(site) { 0.0 } else { 1.0 };
        }
    }
    if partners > 0.0 { elsewhere / partners } else { 1.0 }
}

/// Returns the split shares of all members of a site.
pub fn split_shares(problem: &PlanningProblem, site_of: &[Option<usize>], members: &[usize], site: usize) -> Vec<f64> {
    members.iter().map(|&index| split_share(problem, site_of, index, site)).collect()
}

/// State of one site under a layout.
pub struct SiteState<'a> {
    pub site: &'a CacheSite,
    pub members: &'a [usize],
    /// Programs of the members, in the order of the members.
    pub programs: &'a [&'a ProgramModel],
    pub cycles_per_ns: f64,
    /// Share of each member's partners that are on other caches.
    pub split_shares: &'a [f64],
    /// Additional cycles that a miss of each member waits, relative to a miss to the nearest memory in the measured
    /// queue.
    pub waits: &'a [f64],
    pub partitions: &'a [PartitionMembers],
    pub rotation: Option<&'a GangRotation>,
}

impl SiteState<'_> {
    /// Returns the speeds of the members, in the order of the members.
    pub fn speeds(&self) -> Vec<ForecastSpeed> {
        let programs = self.programs;
        let gang_of = |at: usize| {
            self.rotation.map_or(0, |turns| turns.gangs.iter().position(|gang| gang.contains(&at)).unwrap_or(0))
        };
        let gangs: Vec<usize> = self.members.iter().map(|&index| gang_of(index)).collect();
        let gang_count = self.rotation.map_or(1, |turns| turns.gangs.len().max(1));
        let wants: Vec<f64> = programs.iter().map(|program| program.cpu_demand).collect();
        let cpus = self.site.cpus.count() as f64;
        // During its turn, a gang has the CPUs to itself.
        let shares = if gang_count > 1 { wants.iter().map(|_| 1.0).collect() } else { cpu_shares(&wants, cpus) };
        let lengths: Vec<f64> = match self.rotation {
            Some(rotation) => vec![rotation.slice_ns as f64 * self.cycles_per_ns; gang_count],
            None => vec![1.0],
        };
        let all_occupants: Vec<CacheOccupant<'_>> = (0..programs.len())
            .map(|at| CacheOccupant {
                program: programs[at],
                share: shares[at],
                gang: gangs[at],
                split_share: self.split_shares[at],
                wait_cycles: self.waits[at],
                in_part_share: 1.0,
            })
            .collect();
        // A task in several partitions has the mean of its performances, weighted by its share of lines in each.
        let mut performances = vec![TaskPerformance::NONE; all_occupants.len()];
        for (members, bytes) in self.parts() {
            let occupants: Vec<CacheOccupant<'_>> = members
                .iter()
                .map(|&(at, inside)| CacheOccupant { in_part_share: inside, ..all_occupants[at] })
                .collect();
            for (&(at, inside), fare) in members.iter().zip(compose(&occupants, bytes, &lengths)) {
                performances[at].add(fare, inside);
            }
        }
        let forecast_speed_at = |at: usize| {
            let cycles =
                if performances[at].cycles_per_instr > 0.0 { performances[at].cycles_per_instr } else { f64::INFINITY };
            let of_time = shares[at] / gang_count as f64;
            let instr_per_cycle = of_time / cycles;
            let alone = wants[at] / programs[at].solo_cycles(self.site.bytes);
            let misses = performances[at].misses_per_instr;
            let lines_per_cycle = instr_per_cycle * misses * programs[at].lines_per_miss;
            let held_bytes = performances[at].held_bytes;
            let over_alone = instr_per_cycle / alone.max(1e-12);
            let of_wanted = of_time / wants[at].max(1e-12);
            let is_asked = programs[at].rate.is_some();
            let alone_at_best = is_asked.then(|| wants[at] / programs[at].best_solo_cycles(self.site.bytes));
            ForecastSpeed {
                over_alone,
                instr_per_cycle,
                lines_per_cycle,
                held_bytes,
                share_of_demand: of_wanted,
                alone_at_best,
            }
        };
        (0..programs.len()).map(forecast_speed_at).collect()
    }

    /// Returns the members of each partition by position, with the share of their lines that falls into it, and the
    /// partition's bytes. A task outside the groups may use every partition, and takes its share of each from the group
    /// that owns it.
    fn parts(&self) -> Vec<(Vec<(usize, f64)>, f64)> {
        let all_members = 0..self.members.len();
        let Some(partition_units) = self.site.partition_units.filter(|_| !self.partitions.is_empty()) else {
            return vec![(all_members.map(|index| (index, 1.0)).collect(), self.site.bytes)];
        };
        let is_in = |group: &PartitionMembers, index: usize| group.members.contains(&self.members[index]);
        let unpartitioned: Vec<usize> =
            all_members.clone().filter(|&index| self.partitions.iter().all(|group| !is_in(group, index))).collect();
        let part_members = |inside: Vec<usize>, units: u32| {
            let share = f64::from(units) / f64::from(partition_units.units());
            let inside = inside.into_iter().map(|index| (index, 1.0));
            (
                inside.chain(unpartitioned.iter().map(|&index| (index, share))).collect::<Vec<_>>(),
                share * self.site.bytes,
            )
        };
        let of_group = |group: &PartitionMembers| {
            part_members(all_members.clone().filter(|&index| is_in(group, index)).collect(), group.units)
        };
        let mut parts: Vec<(Vec<(usize, f64)>, f64)> = self.partitions.iter().map(of_group).collect();
        let taken_units: u32 = self.partitions.iter().map(|group| group.units).sum();
        if taken_units < partition_units.units() {
            parts.push(part_members(Vec::new(), partition_units.units() - taken_units));
        }
        parts.retain(|(inside, _)| !inside.is_empty());
        parts
    }

    /// Returns the sums over the members.
    pub fn score(&self) -> LayoutScore {
        self.score_of(&self.speeds())
    }

    fn score_of(&self, speeds: &[ForecastSpeed]) -> LayoutScore {
        let mut score = LayoutScore::EMPTY;
        for (program, speed) in self.programs.iter().zip(speeds) {
            let goal = program.goal;
            let priority = if goal.priority.is_finite() && goal.priority > 0.0 { goal.priority } else { 1.0 };
            score.weighted += priority * speed.over_alone;
            score.weights += priority;
            score.instr_per_cycle += speed.instr_per_cycle;
            score.worst = score.worst.min(1.0 - (1.0 - speed.over_alone) * priority);
            score.unmet_goals += priority * unmet_cost(speed.goal_shortfall(program));
        }
        let has_promise = |group: &&PartitionMembers| {
            let has_goal =
                |(at, model): (&usize, &&ProgramModel)| group.members.contains(at) && model.goal.is_promised();
            self.members.iter().zip(self.programs).any(has_goal)
        };
        let units = self.site.partition_units.map_or(1, |partition_units| partition_units.units());
        let promised_units: u32 = self.partitions.iter().filter(has_promise).map(|group| group.units).sum();
        score.units_share = if self.partitions.is_empty() { 1.0 } else { f64::from(promised_units) / f64::from(units) };
        score
    }
}

/// A layout that is scored many times, with different programs each time.
pub struct LayoutScorer<'a> {
    problem: &'a PlanningProblem,
    layout: &'a SiteLayout,
    /// Known tasks by site.
    pub members: Vec<Vec<usize>>,
    split_shares: Vec<Vec<f64>>,
}

impl<'a> LayoutScorer<'a> {
    pub fn new(problem: &'a PlanningProblem, layout: &'a SiteLayout) -> Self {
        let members = tasks_on_sites(problem, layout);
        let split_shares = split_shares_by_site(problem, layout, &members);
        LayoutScorer { problem, layout, members, split_shares }
    }

    /// Returns the scores by site, each computed by itself.
    pub fn scores_by_site(&self, draw: &ErrorDraw, memo: &ScoreCache) -> Vec<LayoutScore> {
        (0..self.members.len()).map(|site| self.score(site, draw, memo)).collect()
    }

    /// Returns the scores if those of another layout are known: sites that are equal in both are scored once.
    pub fn scores_beside(
        &self,
        other: &LayoutScorer<'_>,
        scores: &[LayoutScore],
        draw: &ErrorDraw,
        memo: &ScoreCache,
    ) -> Vec<LayoutScore> {
        let reuse_or_score = |site: usize| {
            if self.is_alike(other, site) { scores[site] } else { self.score(site, draw, memo) }
        };
        (0..self.members.len()).map(reuse_or_score).collect()
    }

    fn is_alike(&self, other: &LayoutScorer<'_>, site: usize) -> bool {
        let (own_layout, other_layout) = (self.layout, other.layout);
        self.members[site] == other.members[site]
            && self.split_shares[site] == other.split_shares[site]
            && own_layout.partitions[site] == other_layout.partitions[site]
            && own_layout.rotations[site] == other_layout.rotations[site]
    }

    fn score(&self, site: usize, draw: &ErrorDraw, memo: &ScoreCache) -> LayoutScore {
        let (problem, members, split_shares) = (self.problem, &self.members[site], &self.split_shares[site]);
        if members.is_empty() {
            return LayoutScore::EMPTY;
        }
        let (partitions, rotation) = (&self.layout.partitions[site], self.layout.rotations[site].as_ref());
        SiteScorer { problem, site, members, split_shares, partitions, rotation }.score(draw, memo)
    }
}

fn split_shares_by_site(problem: &PlanningProblem, layout: &SiteLayout, members: &[Vec<usize>]) -> Vec<Vec<f64>> {
    let site_split_shares =
        |(site, members): (usize, &Vec<usize>)| split_shares(problem, &layout.site_of, members, site);
    members.iter().enumerate().map(site_split_shares).collect()
}

/// Scores all sites, with the waits of their packages for memory.
pub fn score(problem: &PlanningProblem, layout: &SiteLayout, memo: &ScoreCache) -> LayoutScore {
    score_drawn(problem, layout, &ErrorDraw::default(), memo)
}

/// Scores all sites with drawn programs, if no site is affected by another's traffic.
pub fn score_drawn(problem: &PlanningProblem, layout: &SiteLayout, draw: &ErrorDraw, memo: &ScoreCache) -> LayoutScore {
    if problem.bus.is_some() {
        return site_results(problem, layout)
            .into_iter()
            .map(|(score, ..)| score)
            .fold(LayoutScore::EMPTY, LayoutScore::added_to);
    }
    total_score(&LayoutScorer::new(problem, layout).scores_by_site(draw, memo))
}

/// Returns the score of all sites together.
pub fn total_score(scores: &[LayoutScore]) -> LayoutScore {
    scores.iter().copied().fold(LayoutScore::EMPTY, LayoutScore::added_to)
}

/// Returns the known tasks by site.
pub fn tasks_on_sites(problem: &PlanningProblem, layout: &SiteLayout) -> Vec<Vec<usize>> {
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); problem.sites.len()];
    for index in problem.known_tasks() {
        if let Some(site) = layout.site_of[index] {
            members[site].push(index);
        }
    }
    members
}

/// All inputs of the score of one site, as long as waits for memory are the measured ones.
pub struct SiteScorer<'a> {
    pub problem: &'a PlanningProblem,
    pub site: usize,
    pub members: &'a [usize],
    pub split_shares: &'a [f64],
    pub partitions: &'a [PartitionMembers],
    pub rotation: Option<&'a GangRotation>,
}

impl SiteScorer<'_> {
    /// Returns the cached score, or computes it.
    pub fn score(&self, draw: &ErrorDraw, memo: &ScoreCache) -> LayoutScore {
        memo.score(self, draw, || self.compute(draw))
    }

    fn compute(&self, draw: &ErrorDraw) -> LayoutScore {
        let mut programs: Vec<&ProgramModel> = Vec::with_capacity(self.members.len());
        programs.extend(self.members.iter().filter_map(|&index| self.problem.tasks[index].program.as_ref()));
        let mut drawn: Vec<ProgramModel> = Vec::with_capacity(if draw.0.is_empty() { 0 } else { programs.len() });
        let scaled_program = |(&at, program): (&usize, &&ProgramModel)| {
            let (misses, cost) = draw.factors_of_task(at)?;
            Some(program.scale(misses, cost))
        };
        drawn.extend(self.members.iter().zip(&programs).filter_map(scaled_program));
        if !drawn.is_empty() {
            programs = drawn.iter().collect();
        }
        let (site, programs) = (&self.problem.sites[self.site], &programs);
        let site_state = SiteState {
            site,
            members: self.members,
            programs,
            cycles_per_ns: self.problem.cycles_per_ns,
            split_shares: self.split_shares,
            waits: &remote_cycles(site, programs),
            partitions: self.partitions,
            rotation: self.rotation,
        };
        site_state.score()
    }
}

/// Returns the additional cycles that a miss of each program waits on this site, relative to the site nearest to its
/// memory.
fn remote_cycles(site: &CacheSite, programs: &[&ProgramModel]) -> Vec<f64> {
    programs.iter().map(|program| program.far_cycles(site.memory_node)).collect()
}

/// Returns the speeds of all known tasks.
pub fn forecast_speeds(problem: &PlanningProblem, layout: &SiteLayout) -> Vec<Option<ForecastSpeed>> {
    let mut task_speeds = vec![None; problem.tasks.len()];
    for (_, members, speeds) in site_results(problem, layout) {
        for (index, speed) in members.into_iter().zip(speeds) {
            task_speeds[index] = Some(speed);
        }
    }
    task_speeds
}

/// Number of rounds until traffic and waits converge.
const BUS_ROUNDS: usize = 4;

/// Returns the score, the members and their speeds by site.
fn site_results(problem: &PlanningProblem, layout: &SiteLayout) -> Vec<(LayoutScore, Vec<usize>, Vec<ForecastSpeed>)> {
    let members = tasks_on_sites(problem, layout);
    let site_split_shares = split_shares_by_site(problem, layout, &members);
    let mut queues: Vec<Vec<f64>> = members.iter().map(|members| vec![0.0; members.len()]).collect();
    let rounds = if problem.bus.is_some() { BUS_ROUNDS } else { 1 };
    let mut site_scores = Vec::new();
    for _ in 0..rounds {
        site_scores.clear();
        let mut traffic: BTreeMap<u32, f64> = BTreeMap::new();
        for (site, members) in members.iter().enumerate().filter(|(_, members)| !members.is_empty()) {
            let (partitions, rotation) = (&layout.partitions[site], layout.rotations[site].as_ref());
            let split_shares = &site_split_shares[site];
            let programs: Vec<&ProgramModel> =
                members.iter().filter_map(|&index| problem.tasks[index].program.as_ref()).collect();
            let (cache_site, cycles_per_ns) = (&problem.sites[site], problem.cycles_per_ns);
            let remote_waits = remote_cycles(cache_site, &programs);
            let waits = &remote_waits
                .iter()
                .zip(&queues[site])
                .map(|(remote_wait, queue)| remote_wait + queue)
                .collect::<Vec<f64>>();
            let site_state = SiteState {
                site: cache_site,
                members,
                programs: &programs,
                cycles_per_ns,
                split_shares,
                waits,
                partitions,
                rotation,
            };
            let speeds = site_state.speeds();
            let sum: f64 = speeds.iter().map(|speed| speed.lines_per_cycle).sum();
            *traffic.entry(problem.sites[site].package).or_insert(0.0) += sum;
            site_scores.push((site_state.score_of(&speeds), members.clone(), speeds));
        }
        let Some(bus) = &problem.bus else { break };
        for (site, members) in members.iter().enumerate() {
            let package_traffic = traffic.get(&problem.sites[site].package).copied().unwrap_or(0.0);
            for (queue, &at) in queues[site].iter_mut().zip(members) {
                let measured_on = problem.tasks[at].last_site.map_or(0, |last_site| problem.sites[last_site].package);
                *queue = 0.5 * (*queue + bus.added_wait(package_traffic, measured_on));
            }
        }
    }
    site_scores
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is CPU time shared fairly, and does no task get more than it wants?
    #[test]
    fn time_is_dealt_fairly() {
        assert_eq!(cpu_shares(&[1.0, 0.2], 2.0), [1.0, 0.2]);
        let shares = cpu_shares(&[1.0, 1.0, 0.2], 1.0);
        assert!((shares[0] - 0.4).abs() < 1e-6 && (shares[2] - 0.2).abs() < 1e-6, "{shares:?}");
    }
}
