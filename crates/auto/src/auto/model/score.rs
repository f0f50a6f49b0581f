//! Score of a layout, by its forecast.
//!
//! The speed of a task counts relative to its solo speed on the machine, with a CPU and a cache to itself. Goals come
//! first: a shortfall outweighs every gain. Properties: sites are scored one by one, so that a search rescores only
//! those that it changed; waiting for memory is composed per memory node only if its cost is known.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use cachemate_locality::memory_queue::LineSource;

use super::bus::MemoryPathModel;
use super::composition::{CacheOccupant, TaskPerformance, compose};
use super::layout::{GangRotation, PartitionMembers, SiteLayout};
use super::problem::PlanningProblem;
use super::program_model::ProgramModel;
use super::score_cache::ScoreCache;
use super::site_score::shortfall_cost;
pub use super::site_score::{ForecastSpeed, LayoutScore, SiteForecast};
use super::sites::CacheSite;

/// The shares of CPU time if tasks take turns fairly on this number of CPUs: no task gets more than it wants.
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

/// Share of each member's partners on other sites, from 0 to 1; 1 for a task without a cluster.
pub fn split_shares(
    problem: &PlanningProblem,
    site_by_task: &[Option<usize>],
    members: &[usize],
    site: usize,
) -> Vec<f64> {
    if members
        .iter()
        .all(|&index| problem.tasks[index].cluster.is_none())
    {
        return vec![1.0; members.len()];
    }
    // The tasks of each cluster: all, and those on other sites.
    let mut clusters: BTreeMap<usize, (u32, u32)> = BTreeMap::new();
    let is_elsewhere = |index: usize| u32::from(site_by_task[index] != Some(site));
    for (index, problem_task) in problem.tasks.iter().enumerate() {
        if let Some(cluster) = problem_task.cluster {
            let (tasks, split_tasks) = clusters.entry(cluster).or_default();
            (*tasks, *split_tasks) = (*tasks + 1, *split_tasks + is_elsewhere(index));
        }
    }

    let split_share = |&index: &usize| {
        let (tasks, split_tasks) = clusters[&problem.tasks[index].cluster?];
        let (partners, split_partners) = (tasks - 1, split_tasks - is_elsewhere(index));
        (partners > 0).then(|| f64::from(split_partners) / f64::from(partners))
    };
    members
        .iter()
        .map(|index| split_share(index).unwrap_or(1.0))
        .collect()
}

/// The known tasks of one site under a layout.
pub struct SiteScorer<'a> {
    pub problem: &'a PlanningProblem,
    pub site: usize,
    pub members: &'a [usize],
    /// Share of each member's partners that are on other sites.
    pub split_shares: &'a [f64],
    pub partitions: &'a [PartitionMembers],
    pub rotation: Option<&'a GangRotation>,
}

impl SiteScorer<'_> {
    /// The stored score with the measured waits for memory, or computes it.
    pub fn score(&self, score_cache: &ScoreCache) -> LayoutScore {
        score_cache.read(
            |numbers| self.key(numbers),
            || self.forecast(&[]),
            |forecast| forecast.score,
        )
    }

    /// The key of the forecast: all of its inputs, with the programs by their numbers, each list preceded by its
    /// length.
    pub fn key(&self, numbers: &[u64]) -> Vec<u64> {
        let mut key = Vec::with_capacity(4 + 2 * self.members.len());
        key.extend([self.site as u64, self.members.len() as u64]);
        for (&task, split_share) in self.members.iter().zip(self.split_shares) {
            key.extend([numbers[task], split_share.to_bits()]);
        }
        let push_list = |key: &mut Vec<u64>, members: &[usize]| {
            key.push(members.len() as u64);
            key.extend(members.iter().map(|&index| numbers[index]));
        };

        key.push(self.partitions.len() as u64);
        for group in self.partitions {
            key.push(group.units.into());
            push_list(&mut key, &group.members);
        }
        if let Some(rotation) = self.rotation {
            key.extend([rotation.slice_ns, self.problem.cycles_per_ns.to_bits()]);
            for gang in &rotation.gangs {
                push_list(&mut key, gang);
            }
        }
        key
    }

    fn cache_site(&self) -> &CacheSite {
        &self.problem.sites[self.site]
    }

    fn programs(&self) -> Vec<&ProgramModel> {
        self.members
            .iter()
            .filter_map(|&index| self.problem.tasks[index].program.as_ref())
            .collect()
    }

    /// Forecasts the members, whose misses wait so many cycles longer than measured; none if `queue_waits` is empty.
    fn forecast(&self, queue_waits: &[f64]) -> SiteForecast {
        let programs = self.programs();
        let speeds = self.speeds(&programs, queue_waits);
        SiteForecast {
            score: score_speeds(&programs, &speeds),
            speeds,
            task_forecasts: OnceCell::new(),
        }
    }

    /// The speeds of the members, in the order of the members.
    fn speeds(&self, programs: &[&ProgramModel], queue_waits: &[f64]) -> Vec<ForecastSpeed> {
        let site = self.cache_site();
        let gang_count = self.rotation.map_or(1, |turns| turns.gangs.len().max(1));
        let demands: Vec<f64> = programs.iter().map(|program| program.cpu_demand).collect();
        // During its turn, a gang has the CPUs to itself.
        let time_shares = if gang_count > 1 {
            vec![1.0; demands.len()]
        } else {
            cpu_shares(&demands, site.cpus.count() as f64)
        };
        let occupants: Vec<CacheOccupant<'_>> = (0..programs.len())
            .map(|position| CacheOccupant {
                program: programs[position],
                cpu_share: time_shares[position],
                split_share: self.split_shares[position],
                wait_cycles: programs[position].far_cycles(site.memory_node)
                    + queue_waits.get(position).copied().unwrap_or(0.0),
                partition_share: 1.0,
            })
            .collect();

        let mut speeds = Vec::with_capacity(programs.len());
        for (position, performance) in self.performances(&occupants).into_iter().enumerate() {
            let (program, demand) = (programs[position], demands[position]);
            let time_share = time_shares[position] / gang_count as f64;
            let instr_per_cycle = if performance.cycles_per_instr > 0.0 {
                time_share / performance.cycles_per_instr
            } else {
                0.0
            };
            let solo_instr_per_cycle = demand / program.solo_cycles(site.bytes);
            speeds.push(ForecastSpeed {
                relative_speed: instr_per_cycle / solo_instr_per_cycle.max(1e-12),
                instr_per_cycle,
                lines_per_cycle: instr_per_cycle
                    * performance.misses_per_instr
                    * program.lines_per_miss,
                occupancy_bytes: performance.occupancy_bytes,
                met_demand_share: time_share / demand.max(1e-12),
                best_solo_instr_per_cycle: program
                    .rate
                    .map(|_| demand / program.best_solo_cycles(site.bytes)),
            });
        }
        speeds
    }

    /// The performance of each member while it runs.
    fn performances(&self, all_occupants: &[CacheOccupant<'_>]) -> Vec<TaskPerformance> {
        let mut performances = vec![TaskPerformance::NONE; all_occupants.len()];

        if let Some(rotation) = self.rotation {
            let turn_cycles = rotation.slice_ns as f64 * self.problem.cycles_per_ns;
            for positions in self.gang_members(rotation) {
                let gang = positions.iter().map(|&position| all_occupants[position]);
                let occupants: Vec<CacheOccupant<'_>> = gang.collect();
                let within_turns = compose(&occupants, self.cache_site().bytes);
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

    /// The members of each gang by position. A member without a gang counts to the first.
    fn gang_members(&self, rotation: &GangRotation) -> Vec<Vec<usize>> {
        let mut positions = vec![Vec::new(); rotation.gangs.len().max(1)];
        for (position, member) in self.members.iter().enumerate() {
            let gang = rotation.gangs.iter().position(|gang| gang.contains(member));
            positions[gang.unwrap_or(0)].push(position);
        }
        positions.retain(|positions| !positions.is_empty());
        positions
    }

    /// The members of each partition by position, with the share of their lines that falls into it, and the partition's
    /// bytes. A task outside the groups may use every partition, and takes its share of each from the group that owns
    /// it.
    fn partition_members(&self) -> Vec<(Vec<(usize, f64)>, f64)> {
        let all_members = 0..self.members.len();
        let Some(partition_units) = self
            .cache_site()
            .partition_units
            .filter(|_| !self.partitions.is_empty())
        else {
            return vec![(
                all_members.map(|index| (index, 1.0)).collect(),
                self.cache_site().bytes,
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
                share * self.cache_site().bytes,
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
}

fn score_speeds(programs: &[&ProgramModel], speeds: &[ForecastSpeed]) -> LayoutScore {
    let mut score = LayoutScore::EMPTY;
    for (program, speed) in programs.iter().zip(speeds) {
        let goal = program.goal;
        let priority = if goal.priority.is_finite() && goal.priority > 0.0 {
            goal.priority
        } else {
            1.0
        };
        score.weighted_speed_sum += priority * speed.relative_speed;
        score.total_weight += priority;
        score.min_relative_speed = score
            .min_relative_speed
            .min(1.0 - (1.0 - speed.relative_speed) * priority);
        score.unmet_goals += priority * shortfall_cost(speed.goal_shortfall(program));
    }

    score
}

/// A layout with the known tasks of each site.
pub struct LayoutScorer<'a> {
    problem: &'a PlanningProblem,
    layout: &'a SiteLayout,
    members: Vec<Vec<usize>>,
    split_shares: Vec<Vec<f64>>,
}

/// Number of rounds until traffic and waits converge.
const BUS_ROUNDS: usize = 4;

impl<'a> LayoutScorer<'a> {
    fn new(problem: &'a PlanningProblem, layout: &'a SiteLayout) -> Self {
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); problem.sites.len()];
        for index in problem.known_tasks() {
            if let Some(site) = layout.site_by_task[index] {
                members[site].push(index);
            }
        }
        let sites = members.iter().enumerate();
        let split_shares = sites
            .map(|(site, members)| split_shares(problem, &layout.site_by_task, members, site))
            .collect();
        LayoutScorer {
            problem,
            layout,
            members,
            split_shares,
        }
    }

    fn site_scorer(&self, site: usize) -> SiteScorer<'_> {
        SiteScorer {
            problem: self.problem,
            site,
            members: &self.members[site],
            split_shares: &self.split_shares[site],
            partitions: &self.layout.partitions[site],
            rotation: self.layout.rotations[site].as_ref(),
        }
    }

    fn occupied_sites(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.members.len()).filter(|&site| !self.members[site].is_empty())
    }

    /// Forecasts all sites together, as the misses of a package wait for one another.
    fn forecast_with_queues(&self, bus: &MemoryPathModel) -> Vec<(usize, SiteForecast)> {
        let site_waits = |members: &Vec<usize>| vec![0.0; members.len()];
        let mut queue_waits: Vec<Vec<f64>> = self.members.iter().map(site_waits).collect();
        let mut forecasts = Vec::new();
        for _ in 0..BUS_ROUNDS {
            forecasts.clear();
            let mut lines: BTreeMap<u32, Vec<LineSource>> = BTreeMap::new();
            for site in self.occupied_sites() {
                let scorer = self.site_scorer(site);
                let forecast = scorer.forecast(&queue_waits[site]);
                let package_lines = lines.entry(scorer.cache_site().package).or_default();
                for (position, program) in scorer.programs().into_iter().enumerate() {
                    let wait = queue_waits[site][position]
                        + self.measured_wait(bus, self.members[site][position]);
                    package_lines.push(forecast.speeds[position].lines_on_path(program, wait));
                }
                forecasts.push((site, forecast));
            }

            let mut waits: BTreeMap<u32, std::vec::IntoIter<f64>> = lines
                .iter()
                .map(|(&package, sources)| (package, bus.wait_cycles(sources).into_iter()))
                .collect();
            for (site, members) in self.members.iter().enumerate() {
                let package_waits = waits.get_mut(&self.problem.sites[site].package);
                let Some(package_waits) = package_waits else {
                    continue;
                };
                for (queue_wait, &task) in queue_waits[site].iter_mut().zip(members) {
                    let wait = package_waits.next().unwrap_or(0.0);
                    *queue_wait = 0.5 * (*queue_wait + wait - self.measured_wait(bus, task));
                }
            }
        }
        forecasts
    }

    /// The cycles that a miss of a task waited when the task was measured.
    fn measured_wait(&self, bus: &MemoryPathModel, task: usize) -> f64 {
        let site = self.problem.tasks[task].last_site;
        bus.current_wait_cycles(site.map_or(0, |site| self.problem.sites[site].package))
    }
}

/// Reads the forecast of each site that has known tasks, with these tasks.
pub fn read_sites(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    score_cache: &ScoreCache,
    mut read: impl FnMut(&[usize], &SiteForecast),
) {
    let scorer = LayoutScorer::new(problem, layout);
    if let Some(bus) = &problem.bus {
        for (site, forecast) in scorer.forecast_with_queues(bus) {
            read(&scorer.members[site], &forecast);
        }
        return;
    }
    for site in scorer.occupied_sites() {
        let site_scorer = scorer.site_scorer(site);
        score_cache.read(
            |numbers| site_scorer.key(numbers),
            || site_scorer.forecast(&[]),
            |forecast| read(site_scorer.members, forecast),
        );
    }
}

/// Scores all sites, with the waits of their packages for memory.
pub fn score(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    score_cache: &ScoreCache,
) -> LayoutScore {
    let mut sum = LayoutScore::EMPTY;
    read_sites(problem, layout, score_cache, |_, forecast| {
        sum = sum.plus(forecast.score);
    });
    sum
}

/// The score of all sites together.
pub fn total_score(scores: &[LayoutScore]) -> LayoutScore {
    scores
        .iter()
        .copied()
        .fold(LayoutScore::EMPTY, LayoutScore::plus)
}

/// The speeds of all known tasks.
pub fn forecast_speeds(
    problem: &PlanningProblem,
    layout: &SiteLayout,
    score_cache: &ScoreCache,
) -> Vec<Option<ForecastSpeed>> {
    let mut task_speeds = vec![None; problem.tasks.len()];
    read_sites(problem, layout, score_cache, |members, forecast| {
        for (&index, speed) in members.iter().zip(&forecast.speeds) {
            task_speeds[index] = Some(*speed);
        }
    });
    task_speeds
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
