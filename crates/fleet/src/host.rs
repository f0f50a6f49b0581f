//! One host: services on its caches, their speeds, and the node's own placement.
//!
//! With the node policy off, a service starts on the least busy cache and stays there, as the kernel's load balancing
//! leaves it. `auto` is modeled by the state that it reaches: it starts a service on the cache with the best forecast.
//! In each step it then tries to move one service for every broken limit, and partitions a cache whose limits stay
//! broken. Like its roll-back guard, the model keeps a change only if the measured slowdowns improve. Its windows,
//! trials and probes are not modeled.

use crate::corun::{CoRunKey, CoRunMember, CoRunSolver, LOAD_LEVELS, TRAFFIC_LEVELS};
use crate::node_report::{EFFECT_SHARES, ResidentLoss, share_effect};
use crate::scorer::{
    CacheState, NodeCacheState, NodePolicy, ServiceDemand, ServiceForecaster, least_busy_cache,
};
use crate::spec::FleetService;

/// Iterations that balance the traffic between caches of one memory node; two or three suffice.
const TRAFFIC_ITERATIONS: usize = 5;
/// Iterations that balance the residents' shares of the cache for the published state.
const SHARE_ITERATIONS: usize = 8;
/// Moves that a node tries in one step.
const MAX_NODE_MOVES: usize = 2;
/// Minimum gain in the objective for which a change is kept, in percent of a thread.
const MIN_GAIN: f64 = 1.0;
/// Weight of slowdowns within the limits in the node's objective. Slowdown beyond a limit has weight 1.
const WITHIN_LIMITS_WEIGHT: f64 = 0.05;

/// Constants of all hosts of one variant.
pub struct HostModel<'a> {
    /// Solver for the speeds of services on a cache.
    pub solver: &'a CoRunSolver,
    /// The services, by kind.
    pub kinds: &'a [FleetService],
    /// Index of the solver's profile by kind; `None` if the kind has no profile.
    pub profiles: &'a [Option<u16>],
    /// Policy by which a node places services among its caches.
    pub policy: NodePolicy,
    /// Whether nodes may partition caches.
    pub can_partition: bool,
}

/// The part of a service that runs on one cache.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Resident {
    /// Number of the service.
    pub service: u32,
    /// Index of its kind.
    pub kind: u16,
    /// Number of its threads on this cache.
    pub threads: u16,
    /// Load of each thread, in steps of the solver.
    pub load: u8,
    /// Whether the service is confined to the small part of a partitioned cache.
    pub is_confined: bool,
}

/// Slowdown of the part of a service on one cache; missing for a service without a profile.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PartSlowdown {
    /// Number of the service.
    pub service: u32,
    /// Number of threads of the part.
    pub threads: u16,
    /// Cycles per instruction divided by the solo value on an idle host.
    pub ratio: f64,
}

/// One host.
#[derive(Clone, Debug)]
pub struct FleetHost {
    /// The services on each cache.
    pub residents: Vec<Vec<Resident>>,
    /// Ways of the small part of each cache; 0 if it is not partitioned.
    confined_ways: Vec<u8>,
    /// Traffic of the other caches on the same memory node, by cache, in steps of the solver.
    other_traffic_levels: Vec<u8>,
    /// Requested CPUs of all services.
    pub requested_cpus: f64,
    /// Requested memory of all services.
    pub requested_bytes: f64,
    /// Number of services.
    pub services: u32,
    /// The state that the node publishes.
    pub state: NodeCacheState,
    /// Memory traffic at the last evaluation, in bytes per second.
    pub memory_bytes_per_second: f64,
}

impl FleetHost {
    /// Without services, but with known fills: nothing is fetched into an idle cache.
    pub fn new(model: &HostModel<'_>) -> Self {
        let solver = model.solver;
        let cache_count = solver.caches();
        let hertz = solver.host().hertz as f64;
        let memory_bytes_per_second = solver.node_bytes_per_cycle() * hertz;
        let cache = CacheState {
            size_bytes: solver.cache_bytes(),
            cpus: f64::from(solver.cpus_per_cache()),
            fill_bytes_per_second: Some(0.0),
            bandwidth_left_bytes_per_second: Some(memory_bytes_per_second),
            ..CacheState::default()
        };

        FleetHost {
            residents: vec![Vec::new(); cache_count],
            confined_ways: vec![0; cache_count],
            other_traffic_levels: vec![0; cache_count],
            requested_cpus: 0.0,
            requested_bytes: 0.0,
            services: 0,
            state: NodeCacheState {
                hertz,
                memory_bytes_per_second: Some(memory_bytes_per_second),
                policy: model.policy,
                caches: vec![cache; cache_count],
            },
            memory_bytes_per_second: 0.0,
        }
    }

    /// Adds a service. If it has more threads than a cache has CPUs, it is split into equal parts.
    pub fn place_service(&mut self, model: &HostModel<'_>, service: u32, kind: u16, load: u8) {
        let spec = &model.kinds[usize::from(kind)];
        self.requested_cpus += spec.cpus;
        self.requested_bytes += spec.memory_bytes;
        self.services += 1;
        let max_threads = (model.solver.cpus_per_cache() as u16).max(1);
        let part_count = spec.threads.div_ceil(max_threads);

        for index in 0..part_count {
            let threads = spec.threads / part_count + u16::from(index < spec.threads % part_count);
            let resident = Resident {
                service,
                kind,
                threads,
                load,
                is_confined: false,
            };
            let cache = self.choose_cache(model, &resident);
            self.residents[cache].push(resident);
            self.update_state(model, cache);
        }
    }

    /// Frees its requests, on whatever caches its threads are.
    pub fn remove(&mut self, model: &HostModel<'_>, service: u32, kind: u16) {
        let spec = &model.kinds[usize::from(kind)];
        self.requested_cpus = (self.requested_cpus - spec.cpus).max(0.0);
        self.requested_bytes = (self.requested_bytes - spec.memory_bytes).max(0.0);
        self.services -= 1;
        for cache in 0..self.residents.len() {
            let count_before = self.residents[cache].len();
            self.residents[cache].retain(|resident| resident.service != service);
            if self.residents[cache].len() != count_before {
                self.update_state(model, cache);
            }
        }
    }

    /// Updates the loads of all services to an hour of the day.
    pub fn set_hour(&mut self, model: &HostModel<'_>, hour: f64) {
        for cache in 0..self.residents.len() {
            for resident in &mut self.residents[cache] {
                resident.load = model.kinds[usize::from(resident.kind)].load_level(hour);
            }
            self.update_state(model, cache);
        }
    }

    /// Sum over the caches.
    pub fn busy_cpus(&self) -> f64 {
        self.state.caches.iter().map(|cache| cache.busy_cpus).sum()
    }

    /// Bytes per second that all residents fill into caches, according to their profiles.
    pub fn fill_bytes_per_second(&self) -> f64 {
        self.state
            .caches
            .iter()
            .filter_map(|cache| cache.fill_bytes_per_second)
            .sum()
    }

    fn choose_cache(&self, model: &HostModel<'_>, resident: &Resident) -> usize {
        let service = resident_demand(model, resident);
        match ServiceForecaster::new(&service).forecast_node(&self.state) {
            Some((cache, _)) => cache,
            None => least_busy_cache(&self.state).unwrap_or(0),
        }
    }

    /// Recomputes the published state of a cache after its residents or their loads have changed.
    fn update_state(&mut self, model: &HostModel<'_>, cache: usize) {
        let residents = &self.residents[cache];
        let cache_bytes = model.solver.cache_bytes();
        let (hertz, line_bytes) = (self.state.hertz, model.solver.line_bytes());
        let profiled_residents = || {
            residents
                .iter()
                .filter_map(|resident| Some((resident, kind_of(model, resident).profile.as_ref()?)))
        };
        let mut spaces: Vec<f64> = profiled_residents()
            .map(|(_, profile)| profile.footprint_bytes().min(cache_bytes))
            .collect();

        if spaces.iter().sum::<f64>() > cache_bytes {
            let equal_space = cache_bytes / spaces.len() as f64;
            spaces
                .iter_mut()
                .for_each(|space| *space = space.min(equal_space));
            for _ in 0..SHARE_ITERATIONS {
                step_toward_fill_shares(
                    &mut spaces,
                    cache_bytes,
                    profiled_residents().map(|(resident, profile)| (busy_cpus(resident), profile)),
                );
            }
        }
        let fill_rates = profiled_residents()
            .zip(&spaces)
            .map(|((resident, profile), &space)| {
                profile.fills_per_cycle(space) * busy_cpus(resident) * hertz * line_bytes
            });
        let fill_bytes_per_second = fill_rates.sum::<f64>();
        let effect_at = |share: f64| {
            let losses = profiled_residents()
                .zip(&spaces)
                .map(|((resident, profile), &space)| ResidentLoss {
                    slowdown_percent: profile.slowdown_percent(space * share, cache_bytes),
                    busy_cpus: busy_cpus(resident),
                    max_slowdown_percent: kind_of(model, resident).max_slowdown_percent,
                });
            share_effect(share, losses)
        };
        let effects = if spaces.is_empty() {
            Vec::new()
        } else {
            EFFECT_SHARES.map(effect_at).to_vec()
        };
        let state = &mut self.state.caches[cache];
        state.busy_cpus = residents.iter().map(busy_cpus).sum();
        state.fill_bytes_per_second = Some(fill_bytes_per_second);
        state.occupancy_bytes = spaces.iter().sum::<f64>().min(cache_bytes);
        state.effects = effects;
        self.update_bandwidth(model);
    }

    /// Updates the remaining bandwidth of each memory node.
    fn update_bandwidth(&mut self, model: &HostModel<'_>) {
        let Some(total_bytes_per_second) = self.state.memory_bytes_per_second else {
            return;
        };
        for node in self
            .state
            .caches
            .chunks_mut(model.solver.caches_per_node().max(1))
        {
            let used_bytes_per_second: f64 = node
                .iter()
                .filter_map(|cache| cache.fill_bytes_per_second)
                .sum();
            let bandwidth_left = (total_bytes_per_second - used_bytes_per_second).max(0.0);
            node.iter_mut()
                .for_each(|cache| cache.bandwidth_left_bytes_per_second = Some(bandwidth_left));
        }
    }

    fn corun_key(&self, model: &HostModel<'_>, cache: usize) -> (CoRunKey, Vec<usize>) {
        let mut members: Vec<(CoRunMember, usize)> =
            Vec::with_capacity(self.residents[cache].len());
        for (index, resident) in self.residents[cache].iter().enumerate() {
            if let Some(member) = member_of(model, resident) {
                members.push((member, index));
            }
        }
        members.sort_unstable();
        let (members, resident_indices) = members.into_iter().unzip();
        let confined_ways = self.confined_ways[cache];
        (
            CoRunKey {
                traffic: self.other_traffic_levels[cache],
                confined_ways,
                members,
            },
            resident_indices,
        )
    }

    /// Computes the slowdowns of all parts, by cache. The traffic of each cache slows down the others on its memory
    /// node.
    pub fn evaluate_caches(&mut self, model: &HostModel<'_>) -> Vec<Vec<PartSlowdown>> {
        let solver = model.solver;
        let caches_per_node = solver.caches_per_node().max(1);
        let mut traffic_by_cache = vec![0.0f64; self.residents.len()];

        for _ in 0..TRAFFIC_ITERATIONS {
            for (cache, sum) in traffic_by_cache.iter_mut().enumerate() {
                let (key, _) = self.corun_key(model, cache);
                *sum = solver
                    .member_speeds(&key)
                    .iter()
                    .map(|speed| f64::from(speed.bytes_per_cycle))
                    .sum();
            }
            let levels: Vec<u8> = (0..traffic_by_cache.len())
                .map(|cache| {
                    let caches_of_node = cache / caches_per_node * caches_per_node
                        ..(cache / caches_per_node + 1) * caches_per_node;
                    let other_traffic: f64 = caches_of_node
                        .filter(|neighbor| *neighbor != cache)
                        .map(|neighbor| traffic_by_cache[neighbor])
                        .sum();
                    let level = libm::round(
                        other_traffic / solver.node_bytes_per_cycle() * f64::from(TRAFFIC_LEVELS),
                    );
                    level.clamp(0.0, f64::from(TRAFFIC_LEVELS) - 1.0) as u8
                })
                .collect();
            if levels == self.other_traffic_levels {
                break;
            }
            self.other_traffic_levels = levels;
        }
        self.memory_bytes_per_second = traffic_by_cache.iter().sum::<f64>() * self.state.hertz;
        (0..self.residents.len())
            .map(|cache| self.cache_slowdowns(model, cache))
            .collect()
    }

    fn cache_slowdowns(&self, model: &HostModel<'_>, cache: usize) -> Vec<PartSlowdown> {
        let (key, resident_indices) = self.corun_key(model, cache);
        let speeds = model.solver.member_speeds(&key);
        let part_slowdown =
            |((member, speed), &index): ((&CoRunMember, &crate::corun::MemberSpeed), &usize)| {
                let resident = &self.residents[cache][index];
                let ratio = f64::from(speed.cycles_per_instr)
                    / f64::from(model.solver.solo_cycles_per_instr(*member));
                PartSlowdown {
                    service: resident.service,
                    threads: resident.threads,
                    ratio,
                }
            };

        key.members
            .iter()
            .zip(speeds.iter())
            .zip(&resident_indices)
            .map(part_slowdown)
            .collect()
    }

    /// Applies one step of the node's policy to an evaluated host, and returns the slowdowns afterward.
    pub fn tune_caches(
        &mut self,
        model: &HostModel<'_>,
        mut slowdowns: Vec<Vec<PartSlowdown>>,
        moves: &mut u64,
    ) -> Vec<Vec<PartSlowdown>> {
        if model.policy == NodePolicy::Off {
            return slowdowns;
        }

        if self.confined_ways.iter().any(|ways| *ways > 0) {
            // The partition is chosen anew in every step, for the services that are present.
            self.confined_ways.fill(0);
            self.residents
                .iter_mut()
                .flatten()
                .for_each(|resident| resident.is_confined = false);
            slowdowns = self.evaluate_caches(model);
        }

        for _ in 0..MAX_NODE_MOVES {
            let Some(improved_slowdowns) = self.move_worst_service(model, &slowdowns) else {
                break;
            };
            slowdowns = improved_slowdowns;
            *moves += 1;
        }
        if model.can_partition && model.solver.can_partition() {
            for (cache, parts) in slowdowns.iter_mut().enumerate() {
                if self.cache_excess(model, cache, parts) > 0.0 {
                    self.partition_cache(model, cache, parts);
                }
            }
        }

        slowdowns
    }

    /// Moves the service that exceeds its limit most to the cache with the best forecast, if this improves the host's
    /// objective.
    fn move_worst_service(
        &mut self,
        model: &HostModel<'_>,
        slowdowns: &[Vec<PartSlowdown>],
    ) -> Option<Vec<Vec<PartSlowdown>>> {
        let mut worst_service: Option<(f64, usize, u32)> = None;
        for (cache, parts) in slowdowns.iter().enumerate() {
            for part in parts {
                let excess = self.part_excess(model, cache, part);
                if excess > 0.0
                    && worst_service.is_none_or(|(worst_excess, ..)| excess > worst_excess)
                {
                    worst_service = Some((excess, cache, part.service));
                }
            }
        }

        let (_, source, service) = worst_service?;
        let old_objective = self.host_objective(model, slowdowns);
        let mut trial_host = self.clone();
        let index = trial_host.residents[source]
            .iter()
            .position(|resident| resident.service == service)?;
        let resident = trial_host.residents[source].remove(index);
        trial_host.update_state(model, source);
        let target = trial_host.choose_cache(model, &resident);
        if target == source {
            return None;
        }

        trial_host.residents[target].push(resident);
        trial_host.update_state(model, target);
        let new_slowdowns = trial_host.evaluate_caches(model);
        if trial_host.host_objective(model, &new_slowdowns) > old_objective - MIN_GAIN {
            return None;
        }
        *self = trial_host;
        Some(new_slowdowns)
    }

    /// Confines the services without a limit to a part of the cache, if this improves the objective.
    fn partition_cache(
        &mut self,
        model: &HostModel<'_>,
        cache: usize,
        slowdowns: &mut Vec<PartSlowdown>,
    ) {
        let is_unlimited =
            |resident: &Resident| kind_of(model, resident).max_slowdown_percent.is_none();
        if !self.residents[cache].iter().any(is_unlimited) {
            return;
        }
        self.residents[cache]
            .iter_mut()
            .for_each(|resident| resident.is_confined = is_unlimited(resident));
        let mut best_objective_and_ways = (
            self.cache_objective(model, cache, slowdowns) - MIN_GAIN,
            0u8,
        );
        let ways = model.solver.ways();
        for divisor in [8, 4, 2] {
            let trial_ways = (ways / divisor).max(1) as u8;
            self.confined_ways[cache] = trial_ways;
            let trial_slowdowns = self.cache_slowdowns(model, cache);
            let objective = self.cache_objective(model, cache, &trial_slowdowns);
            if objective < best_objective_and_ways.0 {
                best_objective_and_ways = (objective, trial_ways);
                *slowdowns = trial_slowdowns;
            }
        }
        self.confined_ways[cache] = best_objective_and_ways.1;
        if best_objective_and_ways.1 == 0 {
            self.residents[cache]
                .iter_mut()
                .for_each(|resident| resident.is_confined = false);
        }
    }

    fn part_excess(&self, model: &HostModel<'_>, cache: usize, part: &PartSlowdown) -> f64 {
        let resident = self.residents[cache]
            .iter()
            .find(|resident| resident.service == part.service);
        let limit = resident.and_then(|resident| kind_of(model, resident).max_slowdown_percent);
        limit.map_or(0.0, |limit| ((part.ratio - 1.0) * 100.0 - limit).max(0.0))
    }

    fn cache_excess(&self, model: &HostModel<'_>, cache: usize, slowdowns: &[PartSlowdown]) -> f64 {
        slowdowns
            .iter()
            .map(|part| self.part_excess(model, cache, part) * f64::from(part.threads))
            .sum()
    }

    fn cache_objective(
        &self,
        model: &HostModel<'_>,
        cache: usize,
        slowdowns: &[PartSlowdown],
    ) -> f64 {
        let slowdown_sum: f64 = slowdowns
            .iter()
            .map(|part| (part.ratio - 1.0) * 100.0 * f64::from(part.threads))
            .sum();
        self.cache_excess(model, cache, slowdowns) + WITHIN_LIMITS_WEIGHT * slowdown_sum
    }

    fn host_objective(&self, model: &HostModel<'_>, slowdowns: &[Vec<PartSlowdown>]) -> f64 {
        slowdowns
            .iter()
            .enumerate()
            .map(|(cache, parts)| self.cache_objective(model, cache, parts))
            .sum()
    }
}

fn kind_of<'a>(model: &HostModel<'a>, resident: &Resident) -> &'a FleetService {
    &model.kinds[usize::from(resident.kind)]
}

fn member_of(model: &HostModel<'_>, resident: &Resident) -> Option<CoRunMember> {
    let kind = model.profiles[usize::from(resident.kind)]?;
    Some(CoRunMember {
        kind,
        load: resident.load,
        threads: resident.threads,
        is_confined: resident.is_confined,
    })
}

fn busy_cpus(resident: &Resident) -> f64 {
    f64::from(resident.threads) * f64::from(resident.load) / f64::from(LOAD_LEVELS)
}

fn resident_demand<'a>(model: &HostModel<'a>, resident: &Resident) -> ServiceDemand<'a> {
    let kind = kind_of(model, resident);
    ServiceDemand {
        profile: kind.profile.as_ref(),
        busy_cpus: busy_cpus(resident),
        max_slowdown_percent: kind.max_slowdown_percent,
    }
}

/// Moves each resident's share of the space halfway to its share of the fills. A footprint that fits keeps its size.
fn step_toward_fill_shares<'a>(
    spaces: &mut [f64],
    cache_bytes: f64,
    residents: impl Iterator<Item = (f64, &'a crate::profile::WorkloadProfile)> + Clone,
) {
    let fill_rates: Vec<f64> = residents
        .clone()
        .zip(&*spaces)
        .map(|((cpus, profile), &space)| cpus * profile.fills_per_cycle(space))
        .collect();
    let sum: f64 = fill_rates.iter().sum();
    if sum <= 0.0 {
        return;
    }

    for ((space, fill), (_, profile)) in spaces.iter_mut().zip(&fill_rates).zip(residents) {
        *space = 0.5 * (*space + (cache_bytes * fill / sum).min(profile.footprint_bytes()));
    }
    let space_sum: f64 = spaces.iter().sum();
    spaces
        .iter_mut()
        .for_each(|space| *space *= cache_bytes / space_sum);
}
