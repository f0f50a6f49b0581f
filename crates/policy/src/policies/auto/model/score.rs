//! Score of a layout, by its forecast and the stated objective.
//!
//! The speed of a task counts relative to its solo speed on the machine, with a CPU and a cache to itself. Goals come
//! first: a shortfall outweighs every gain. Properties: sites are scored one by one, so that a search rescores only
//! those that it changed; waiting for memory is composed per memory node only if its cost is known.

use std::collections::BTreeMap;

use cachemate_locality::memory_queue::LineSource;
use serde::Deserialize;

use super::bus::task_lines;
use super::composition::{CacheOccupant, TaskPerformance, compose};
use super::layout::{GangRotation, PartitionMembers, SiteLayout};
use super::problem::{CacheSite, PlanningProblem};
use super::program_model::ProgramModel;
use super::score_cache::ScoreCache;

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
    /// Returns the shortfall from a task's goals, as a share, summed over the goals. A rate that the task could not
    /// even reach alone is not counted: no plan can provide it, and no other task should lose speed for it.
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

    /// Returns the misses per instruction.
    pub fn misses_per_instr(&self, program: &ProgramModel) -> f64 {
        self.lines_per_cycle / self.instr_per_cycle / program.lines_per_miss
    }

    /// Returns what the task asks of its path to memory, if its misses wait this long there.
    fn lines_on_path(&self, program: &ProgramModel, wait_cycles: f64) -> LineSource {
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

    /// Returns the cycles per instruction while the task runs.
    pub fn cycles_per_instr(&self, program: &ProgramModel) -> f64 {
        self.met_demand_share * program.cpu_demand / self.instr_per_cycle.max(1e-12)
    }

    /// Returns the work per second, now and at best alone on the machine; `None` if no rate was promised, or it was not
    /// measured.
    pub fn current_and_solo_rates(&self, program: &ProgramModel) -> Option<(f64, f64)> {
        let rate_factor = program.rate?.per_instr_per_cycle;
        Some((
            rate_factor * self.instr_per_cycle,
            rate_factor * self.best_solo_instr_per_cycle?,
        ))
    }
}

/// Returns the slowdown at which a plan aims for a promised maximum, which is lower by the error of a forecast.
fn target_slowdown(max_slowdown: f64) -> f64 {
    max_slowdown - (0.25 * max_slowdown).min(0.01)
}

/// Shortfall from which a broken promise has its whole additional cost.
const BROKEN_SHORTFALL: f64 = 0.02;
/// Additional cost of a broken promise. It grows with the shortfall up to [`BROKEN_SHORTFALL`] and is constant beyond
/// it, so that one of two promises that exclude each other is kept.
const BROKEN_GOAL_COST: f64 = 0.1;

fn shortfall_cost(shortfall: f64) -> f64 {
    shortfall + BROKEN_GOAL_COST * (shortfall / BROKEN_SHORTFALL).min(1.0)
}

/// Sums over the tasks of one site or of all sites.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayoutScore {
    weighted_speed_sum: f64,
    total_weight: f64,
    instr_per_cycle: f64,
    min_relative_speed: f64,
    /// Shortfall from all goals, weighted by priority and summed.
    pub unmet_goals: f64,
    promised_units_share: f64,
}

impl LayoutScore {
    /// Score of an empty set of tasks.
    pub const EMPTY: LayoutScore = LayoutScore {
        weighted_speed_sum: 0.0,
        total_weight: 0.0,
        instr_per_cycle: 0.0,
        min_relative_speed: f64::INFINITY,
        unmet_goals: 0.0,
        promised_units_share: 0.0,
    };

    #[must_use]
    pub fn plus(self, addend: LayoutScore) -> Self {
        LayoutScore {
            weighted_speed_sum: self.weighted_speed_sum + addend.weighted_speed_sum,
            total_weight: self.total_weight + addend.total_weight,
            instr_per_cycle: self.instr_per_cycle + addend.instr_per_cycle,
            min_relative_speed: self.min_relative_speed.min(addend.min_relative_speed),
            unmet_goals: self.unmet_goals + addend.unmet_goals,
            promised_units_share: self.promised_units_share + addend.promised_units_share,
        }
    }

    /// Returns all fields as bits, for exact comparisons.
    #[cfg(test)]
    pub fn bits(self) -> [u64; 6] {
        let sums = [
            self.weighted_speed_sum,
            self.total_weight,
            self.instr_per_cycle,
            self.min_relative_speed,
            self.unmet_goals,
            self.promised_units_share,
        ];
        sums.map(f64::to_bits)
    }

    /// Returns the lowest speed of a task relative to its solo speed.
    pub fn min_relative_speed(self) -> f64 {
        self.min_relative_speed
    }

    /// Returns the value of the score; larger is better, and the ratio of two values is a gain.
    pub fn objective_value(self, objective: PlanObjective) -> f64 {
        let mean = self.weighted_speed_sum / self.total_weight.max(1e-9);
        match objective {
            PlanObjective::WeightedSpeedup => mean,
            // Among plans that are equally good for the slowest task, the one with the better mean wins.
            PlanObjective::WorstSlowdown => self.min_relative_speed.min(1e9) + 0.01 * mean,
            PlanObjective::Throughput => self.instr_per_cycle,
            PlanObjective::LeastSpace => 2.0 - self.promised_units_share + 0.01 * mean,
        }
    }
}

/// Returns the shares of CPU time if tasks take turns fairly on this number of CPUs: no task gets more than it wants.
fn cpu_shares(demands: &[f64], cpus: f64) -> Vec<f64> {
    let mut max_share = 1.0f64;
    if demands.iter().sum::<f64>() > cpus {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..40 {
            max_share = 0.5 * (low + high);
            if demands
                .iter()
                .map(|demand| demand.min(max_share))
                .sum::<f64>()
                > cpus
            {
                high = max_share
            } else {
                low = max_share
            }
        }
    }
    demands.iter().map(|demand| demand.min(max_share)).collect()
}

/// Returns the share of each task's partners that are not on this site.
fn split_share(
    problem: &PlanningProblem,
    site_by_task: &[Option<usize>],
    index: usize,
    site: usize,
) -> f64 {
    let Some(cluster) = problem.tasks[index].cluster else {
        return 1.0;
    };
    let (mut partners, mut split_partners) = (0.0, 0.0);
    for (partner, partner_task) in problem.tasks.iter().enumerate() {
        if partner != index && partner_task.cluster == Some(cluster) {
            partners += 1.0;
            split_partners += if site_by_task[partner] == Some(site) {
                0.0
            } else {
                1.0
            };
        }
    }
    if partners > 0.0 {
        split_partners / partners
    } else {
        1.0
    }
}

/// Returns the split shares of all members of a site.
pub fn split_shares(
    problem: &PlanningProblem,
    site_by_task: &[Option<usize>],
    members: &[usize],
    site: usize,
) -> Vec<f64> {
    members
        .iter()
        .map(|&index| split_share(problem, site_by_task, index, site))
        .collect()
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
    pub wait_cycles: &'a [f64],
    pub partitions: &'a [PartitionMembers],
    pub rotation: Option<&'a GangRotation>,
}

impl SiteState<'_> {
    /// Returns the speeds of the members, in the order of the members.
    pub fn speeds(&self) -> Vec<ForecastSpeed> {
        let programs = self.programs;
        let gang_count = self.rotation.map_or(1, |turns| turns.gangs.len().max(1));
        let demands: Vec<f64> = programs.iter().map(|program| program.cpu_demand).collect();
        let cpus = self.site.cpus.count() as f64;
        // During its turn, a gang has the CPUs to itself.
        let time_shares = if gang_count > 1 {
            demands.iter().map(|_| 1.0).collect()
        } else {
            cpu_shares(&demands, cpus)
        };
        let performances = self.performances(&time_shares);
        let forecast_speed_at = |position: usize| {
            let cycles = if performances[position].cycles_per_instr > 0.0 {
                performances[position].cycles_per_instr
            } else {
                f64::INFINITY
            };
            let time_share = time_shares[position] / gang_count as f64;
            let instr_per_cycle = time_share / cycles;
            let solo_instr_per_cycle =
                demands[position] / programs[position].solo_cycles(self.site.bytes);
            let misses = performances[position].misses_per_instr;
            let lines_per_cycle = instr_per_cycle * misses * programs[position].lines_per_miss;
            let occupancy_bytes = performances[position].occupancy_bytes;
            let relative_speed = instr_per_cycle / solo_instr_per_cycle.max(1e-12);
            let met_demand_share = time_share / demands[position].max(1e-12);
            let has_promised_rate = programs[position].rate.is_some();
            let best_solo_instr_per_cycle = has_promised_rate
                .then(|| demands[position] / programs[position].best_solo_cycles(self.site.bytes));
            ForecastSpeed {
                relative_speed,
                instr_per_cycle,
                lines_per_cycle,
                occupancy_bytes,
                met_demand_share,
                best_solo_instr_per_cycle,
            }
        };
        (0..programs.len()).map(forecast_speed_at).collect()
    }

    /// Returns the performance of each member while it runs, if it has this share of a CPU's time.
    fn performances(&self, time_shares: &[f64]) -> Vec<TaskPerformance> {
        let all_occupants: Vec<CacheOccupant<'_>> = (0..self.programs.len())
            .map(|position| CacheOccupant {
                program: self.programs[position],
                cpu_share: time_shares[position],
                split_share: self.split_shares[position],
                wait_cycles: self.wait_cycles[position],
                partition_share: 1.0,
            })
            .collect();
        let mut performances = vec![TaskPerformance::NONE; all_occupants.len()];

        if let Some(rotation) = self.rotation {
            let turn_cycles = rotation.slice_ns as f64 * self.cycles_per_ns;
            for positions in self.gang_members(rotation) {
                let gang = positions.iter().map(|&position| all_occupants[position]);
                let occupants: Vec<CacheOccupant<'_>> = gang.collect();
                let within_turns = compose(&occupants, self.site.bytes);
                for (index, &position) in positions.iter().enumerate() {
                    performances[position] =
                        occupants[index].in_turns(within_turns[index], turn_cycles);
                }
            }
            return performances;
        }

        // A task in several partitions has the mean of its performances, weighted by its share of lines in each.
        for (members, bytes) in self.partition_members() {
            let occupants: Vec<CacheOccupant<'_>> = members
                .iter()
                .map(|&(position, line_share)| CacheOccupant {
                    partition_share: line_share,
                    ..all_occupants[position]
                })
                .collect();
            for (&(position, line_share), performance) in
                members.iter().zip(compose(&occupants, bytes))
            {
                performances[position].add(performance, line_share);
            }
        }
        performances
    }

    /// Returns the members of each gang by position. A member without a gang counts to the first.
    fn gang_members(&self, rotation: &GangRotation) -> Vec<Vec<usize>> {
        let mut positions = vec![Vec::new(); rotation.gangs.len().max(1)];
        for (position, member) in self.members.iter().enumerate() {
            let gang = rotation.gangs.iter().position(|gang| gang.contains(member));
            positions[gang.unwrap_or(0)].push(position);
        }
        positions.retain(|positions| !positions.is_empty());
        positions
    }

    /// Returns the members of each partition by position, with the share of their lines that falls into it, and the
    /// partition's bytes. A task outside the groups may use every partition, and takes its share of each from the group
    /// that owns it.
    fn partition_members(&self) -> Vec<(Vec<(usize, f64)>, f64)> {
        let all_members = 0..self.members.len();
        let Some(partition_units) = self
            .site
            .partition_units
            .filter(|_| !self.partitions.is_empty())
        else {
            return vec![(
                all_members.map(|index| (index, 1.0)).collect(),
                self.site.bytes,
            )];
        };
        let is_in =
            |group: &PartitionMembers, index: usize| group.members.contains(&self.members[index]);
        let unpartitioned_members: Vec<usize> = all_members
            .clone()
            .filter(|&index| self.partitions.iter().all(|group| !is_in(group, index)))
            .collect();
        let part_members = |indices: Vec<usize>, units: u32| {
            let share = f64::from(units) / f64::from(partition_units.units());
            let inside = indices.into_iter().map(|index| (index, 1.0));
            (
                inside
                    .chain(unpartitioned_members.iter().map(|&index| (index, share)))
                    .collect::<Vec<_>>(),
                share * self.site.bytes,
            )
        };
        let group_part = |group: &PartitionMembers| {
            part_members(
                all_members
                    .clone()
                    .filter(|&index| is_in(group, index))
                    .collect(),
                group.units,
            )
        };
        let mut parts: Vec<(Vec<(usize, f64)>, f64)> =
            self.partitions.iter().map(group_part).collect();
        let taken_units: u32 = self.partitions.iter().map(|group| group.units).sum();
        if taken_units < partition_units.units() {
            parts.push(part_members(
                Vec::new(),
                partition_units.units() - taken_units,
            ));
        }
        parts.retain(|(members, _)| !members.is_empty());
        parts
    }

    /// Returns the speeds of the members, and the sums over them.
    fn forecast(&self) -> SiteForecast {
        let speeds = self.speeds();
        SiteForecast {
            score: self.score_speeds(&speeds),
            speeds,
        }
    }

    fn score_speeds(&self, speeds: &[ForecastSpeed]) -> LayoutScore {
        let mut score = LayoutScore::EMPTY;
        for (program, speed) in self.programs.iter().zip(speeds) {
            let goal = program.goal;
            let priority = if goal.priority.is_finite() && goal.priority > 0.0 {
                goal.priority
            } else {
                1.0
            };
            score.weighted_speed_sum += priority * speed.relative_speed;
            score.total_weight += priority;
            score.instr_per_cycle += speed.instr_per_cycle;
            score.min_relative_speed = score
                .min_relative_speed
                .min(1.0 - (1.0 - speed.relative_speed) * priority);
            score.unmet_goals += priority * shortfall_cost(speed.goal_shortfall(program));
        }
        let contains_promise = |group: &&PartitionMembers| {
            let has_goal = |(index, model): (&usize, &&ProgramModel)| {
                group.members.contains(index) && model.goal.is_promised()
            };
            self.members.iter().zip(self.programs).any(has_goal)
        };
        let units = self
            .site
            .partition_units
            .map_or(1, |partition_units| partition_units.units());
        let promised_units: u32 = self
            .partitions
            .iter()
            .filter(contains_promise)
            .map(|group| group.units)
            .sum();
        score.promised_units_share = if self.partitions.is_empty() {
            1.0
        } else {
            f64::from(promised_units) / f64::from(units)
        };
        score
    }
}

/// Forecast of the members of one site.
#[derive(Clone, Debug)]
pub struct SiteForecast {
    pub score: LayoutScore,
    /// Speeds, in the order of the members.
    pub speeds: Vec<ForecastSpeed>,
}

/// A layout with the tasks of each site.
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
        LayoutScorer {
            problem,
            layout,
            members,
            split_shares,
        }
    }

    /// Returns the scores by site, each computed by itself.
    pub fn scores_by_site(&self, score_cache: &ScoreCache) -> Vec<LayoutScore> {
        (0..self.members.len())
            .map(|site| self.score(site, score_cache))
            .collect()
    }

    fn score(&self, site: usize, score_cache: &ScoreCache) -> LayoutScore {
        if self.members[site].is_empty() {
            return LayoutScore::EMPTY;
        }
        self.site_scorer(site).score(score_cache)
    }

    fn site_scorer(&self, site: usize) -> SiteScorer<'_> {
        let (problem, members, split_shares) =
            (self.problem, &self.members[site], &self.split_shares[site]);
        let (partitions, rotation) = (
            &self.layout.partitions[site],
            self.layout.rotations[site].as_ref(),
        );
        SiteScorer {
            problem,
            site,
            members,
            split_shares,
            partitions,
            rotation,
        }
    }
}

fn split_shares_by_site(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    members: &[Vec<usize>],
) -> Vec<Vec<f64>> {
    let site_split_shares = |(site, members): (usize, &Vec<usize>)| {
        split_shares(problem, &layout.site_by_task, members, site)
    };
    members.iter().enumerate().map(site_split_shares).collect()
}

/// Scores all sites, with the waits of their packages for memory.
pub fn score(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    score_cache: &ScoreCache,
) -> LayoutScore {
    if problem.bus.is_some() {
        return site_results(problem, layout)
            .into_iter()
            .map(|(score, ..)| score)
            .fold(LayoutScore::EMPTY, LayoutScore::plus);
    }
    total_score(&LayoutScorer::new(problem, layout).scores_by_site(score_cache))
}

/// Returns the score of all sites together.
pub fn total_score(scores: &[LayoutScore]) -> LayoutScore {
    scores
        .iter()
        .copied()
        .fold(LayoutScore::EMPTY, LayoutScore::plus)
}

/// Returns the known tasks by site.
pub fn tasks_on_sites(problem: &PlanningProblem, layout: &SiteLayout) -> Vec<Vec<usize>> {
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); problem.sites.len()];
    for index in problem.known_tasks() {
        if let Some(site) = layout.site_by_task[index] {
            members[site].push(index);
        }
    }
    members
}

/// All inputs of the score of one site. The waits for memory are those that were measured.
pub struct SiteScorer<'a> {
    pub problem: &'a PlanningProblem,
    pub site: usize,
    pub members: &'a [usize],
    pub split_shares: &'a [f64],
    pub partitions: &'a [PartitionMembers],
    pub rotation: Option<&'a GangRotation>,
}

impl SiteScorer<'_> {
    /// Returns the stored score, or computes it.
    pub fn score(&self, score_cache: &ScoreCache) -> LayoutScore {
        score_cache.read(self, || self.compute(), |forecast| forecast.score)
    }

    fn compute(&self) -> SiteForecast {
        let programs: Vec<&ProgramModel> = self
            .members
            .iter()
            .filter_map(|&index| self.problem.tasks[index].program.as_ref())
            .collect();
        let (site, programs) = (&self.problem.sites[self.site], &programs);
        let site_state = SiteState {
            site,
            members: self.members,
            programs,
            cycles_per_ns: self.problem.cycles_per_ns,
            split_shares: self.split_shares,
            wait_cycles: &far_memory_cycles(site, programs),
            partitions: self.partitions,
            rotation: self.rotation,
        };
        site_state.forecast()
    }
}

/// Returns the additional cycles that a miss of each program waits on this site, relative to the site nearest to its
/// memory.
fn far_memory_cycles(site: &CacheSite, programs: &[&ProgramModel]) -> Vec<f64> {
    programs
        .iter()
        .map(|program| program.far_cycles(site.memory_node))
        .collect()
}

/// Returns the speeds of all known tasks.
pub fn forecast_speeds(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    score_cache: &ScoreCache,
) -> Vec<Option<ForecastSpeed>> {
    let mut task_speeds = vec![None; problem.tasks.len()];
    let mut write_speeds = |members: &[usize], speeds: &[ForecastSpeed]| {
        members
            .iter()
            .zip(speeds)
            .for_each(|(&index, speed)| task_speeds[index] = Some(*speed));
    };
    if problem.bus.is_some() {
        for (_, members, speeds) in site_results(problem, layout) {
            write_speeds(&members, &speeds);
        }
        return task_speeds;
    }
    let scorer = LayoutScorer::new(problem, layout);
    for (site, members) in scorer
        .members
        .iter()
        .enumerate()
        .filter(|(_, members)| !members.is_empty())
    {
        let site_scorer = scorer.site_scorer(site);
        score_cache.read(
            &site_scorer,
            || site_scorer.compute(),
            |forecast| write_speeds(members, &forecast.speeds),
        );
    }
    task_speeds
}

/// Number of rounds until traffic and waits converge.
const BUS_ROUNDS: usize = 4;

/// Returns the score, the members and their speeds by site.
fn site_results(
    problem: &PlanningProblem,
    layout: &SiteLayout,
) -> Vec<(LayoutScore, Vec<usize>, Vec<ForecastSpeed>)> {
    let members = tasks_on_sites(problem, layout);
    let site_split_shares = split_shares_by_site(problem, layout, &members);
    let mut queue_waits: Vec<Vec<f64>> = members
        .iter()
        .map(|members| vec![0.0; members.len()])
        .collect();
    let rounds = if problem.bus.is_some() { BUS_ROUNDS } else { 1 };
    let mut site_scores = Vec::new();
    for _ in 0..rounds {
        site_scores.clear();
        let mut lines: BTreeMap<u32, Vec<LineSource>> = BTreeMap::new();
        for (site, members) in members
            .iter()
            .enumerate()
            .filter(|(_, members)| !members.is_empty())
        {
            let (partitions, rotation) =
                (&layout.partitions[site], layout.rotations[site].as_ref());
            let split_shares = &site_split_shares[site];
            let programs: Vec<&ProgramModel> = members
                .iter()
                .filter_map(|&index| problem.tasks[index].program.as_ref())
                .collect();
            let (cache_site, cycles_per_ns) = (&problem.sites[site], problem.cycles_per_ns);
            let far_memory_cycles = far_memory_cycles(cache_site, &programs);
            let wait_cycles = &far_memory_cycles
                .iter()
                .zip(&queue_waits[site])
                .map(|(remote_wait, queue)| remote_wait + queue)
                .collect::<Vec<f64>>();
            let site_state = SiteState {
                site: cache_site,
                members,
                programs: &programs,
                cycles_per_ns,
                split_shares,
                wait_cycles,
                partitions,
                rotation,
            };
            let speeds = site_state.speeds();
            if let Some(bus) = &problem.bus {
                let of_package = lines.entry(cache_site.package).or_default();
                for (position, &at) in members.iter().enumerate() {
                    let (program, speed) = (programs[position], &speeds[position]);
                    let wait = queue_waits[site][position]
                        + bus.current_wait_cycles(measured_package(problem, at));
                    of_package.push(speed.lines_on_path(program, wait));
                }
            }
            site_scores.push((site_state.score_speeds(&speeds), members.clone(), speeds));
        }
        let Some(bus) = &problem.bus else { break };
        let mut waits: BTreeMap<u32, std::vec::IntoIter<f64>> = lines
            .iter()
            .map(|(&package, sources)| (package, bus.wait_cycles(sources).into_iter()))
            .collect();
        for (site, members) in members.iter().enumerate() {
            for (queue_wait, &at) in queue_waits[site].iter_mut().zip(members) {
                let wait = waits
                    .get_mut(&problem.sites[site].package)
                    .and_then(Iterator::next)
                    .unwrap_or(0.0);
                let measured_wait = bus.current_wait_cycles(measured_package(problem, at));
                *queue_wait = 0.5 * (*queue_wait + wait - measured_wait);
            }
        }
    }
    site_scores
}

/// Returns the package on which a task's wait for memory was measured.
fn measured_package(problem: &PlanningProblem, task: usize) -> u32 {
    problem.tasks[task]
        .last_site
        .map_or(0, |last_site| problem.sites[last_site].package)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is CPU time shared fairly, and does no task get more than it wants?
    #[test]
    fn cpu_time_is_shared_fairly_up_to_each_tasks_demand() {
        assert_eq!(cpu_shares(&[1.0, 0.2], 2.0), [1.0, 0.2]);
        let shares = cpu_shares(&[1.0, 1.0, 0.2], 1.0);
        assert!(
            (shares[0] - 0.4).abs() < 1e-6 && (shares[2] - 0.2).abs() < 1e-6,
            "{shares:?}"
        );
    }
}
