//! Composition of the scheduler's message from schedules: the turn of each gang at each cache.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::GangSchedule;
use cachemate_gangs::{
    ScheduledTask, ScheduledTurn, SchedulerPlan, VERSION, WAIT_BEYOND_ROTATIONS_MS,
};

use super::NumberedCache;
use crate::act::thread_rotation::ThreadRotation;
use crate::kernel::ThreadKey;
use crate::kernel::scheduling::SchedParams;

/// Maximum number of gangs per cache.
pub const MAX_GANGS: usize = 30;
/// Lengths of a turn that the scheduler accepts.
const ACCEPTED_TURN_US: std::ops::RangeInclusive<u64> = 1_000..=1_000_000;
/// The scheduler's value for a weight of 1.0.
const NOMINAL_WEIGHT: f64 = 100.0;

/// A thread, with its original scheduling parameters.
pub(crate) type GangMember = (ThreadKey, SchedParams);

/// One schedule, and the cache that it applies to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CacheSchedule {
    pub cache: u32,
    /// Length of its turn and its members, gang by gang.
    pub gangs: Vec<(u64, Vec<GangMember>)>,
}

impl CacheSchedule {
    pub fn members(&self) -> impl Iterator<Item = GangMember> + '_ {
        self.gangs
            .iter()
            .flat_map(|(_, members)| members.iter().copied())
    }
}

/// Gangs by advice alone, the same at every cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct AdvisoryGangs {
    pub turn_us: u64,
    pub caches: Vec<u32>,
    pub gangs: Vec<Vec<GangMember>>,
}

impl AdvisoryGangs {
    pub fn members(&self) -> impl Iterator<Item = GangMember> + '_ {
        self.gangs.iter().flatten().copied()
    }
}

/// The schedule as turns of one cache; `used_caches` are the caches that other schedules use.
///
/// # Errors
/// The reason why the scheduler cannot keep it.
pub(crate) fn build_cache_schedule(
    schedule: &GangSchedule,
    rotation: &ThreadRotation,
    caches: &[NumberedCache],
    used_caches: &[u32],
) -> Result<CacheSchedule, String> {
    let cache = caches
        .iter()
        .find(|cache| schedule.cpus.is_subset(&cache.cpus));
    let cache = cache
        .ok_or_else(|| format!("CPUs {} are not within one last-level cache", schedule.cpus))?
        .number;
    if used_caches.contains(&cache) {
        return Err(format!(
            "cache {cache} has turns of another schedule already"
        ));
    }
    if rotation.gangs.len() > MAX_GANGS {
        return Err(format!(
            "found {} gangs, expected at most {MAX_GANGS}",
            rotation.gangs.len()
        ));
    }
    let mut visited = BTreeSet::new();
    let mut gangs = Vec::new();
    for (members, slices) in &rotation.gangs {
        if let Some((duplicate_member, _)) =
            members.iter().find(|(thread, _)| !visited.insert(*thread))
        {
            return Err(format!(
                "thread {} is in several gangs",
                duplicate_member.tid
            ));
        }
        if let Some((reset_on_fork_member, _)) =
            members.iter().find(|(_, original)| original.flags != 0)
        {
            let message = "resets its policy on fork, which the scheduler would not restore";
            return Err(format!("thread {} {message}", reset_on_fork_member.tid));
        }
        let turn_us = schedule.slice_ns / 1000 * u64::from(*slices);
        if !ACCEPTED_TURN_US.contains(&turn_us) {
            return Err(format!(
                "found a turn of {turn_us} us, expected {} to {}",
                ACCEPTED_TURN_US.start(),
                ACCEPTED_TURN_US.end()
            ));
        }
        gangs.push((turn_us, members.clone()));
    }
    Ok(CacheSchedule { cache, gangs })
}

/// The whole plan. If the plan has penalties, a turn may be filled by gangs whose members do not clash with its own;
/// otherwise it is strict.
pub(crate) fn plan_message(
    generation: u64,
    cache_schedules: &[&CacheSchedule],
    advisory_gangs: Option<&AdvisoryGangs>,
    weights: &BTreeMap<ThreadKey, f64>,
    clashes: &[(ThreadKey, ThreadKey)],
) -> SchedulerPlan {
    let mut plan = SchedulerPlan {
        version: VERSION,
        generation,
        longest_wait_ms: 0,
        turns: Vec::new(),
        tasks: Vec::new(),
    };
    let used_caches: Vec<u32> = cache_schedules
        .iter()
        .map(|cache_schedule| cache_schedule.cache)
        .collect();
    for cache_schedule in cache_schedules {
        let gangs: Vec<&[GangMember]> = cache_schedule
            .gangs
            .iter()
            .map(|(_, members)| members.as_slice())
            .collect();
        for (gang, (turn_us, members)) in cache_schedule.gangs.iter().enumerate() {
            let may_fill = find_fillers(gang, &gangs, clashes);
            plan.turns.push(ScheduledTurn {
                cache: cache_schedule.cache,
                gang: gang as u32,
                turn_us: *turn_us,
                may_fill,
            });
            plan.tasks.extend(
                members
                    .iter()
                    .map(|member| build_task(member, gang, vec![cache_schedule.cache], weights)),
            );
        }
    }
    if let Some(advisory_gangs) = advisory_gangs {
        let gangs: Vec<&[GangMember]> = advisory_gangs.gangs.iter().map(Vec::as_slice).collect();
        let caches: Vec<u32> = advisory_gangs
            .caches
            .iter()
            .copied()
            .filter(|cache| !used_caches.contains(cache))
            .collect();
        for &cache in &caches {
            for gang in 0..gangs.len() {
                let may_fill = find_fillers(gang, &gangs, clashes);
                plan.turns.push(ScheduledTurn {
                    cache,
                    gang: gang as u32,
                    turn_us: advisory_gangs.turn_us,
                    may_fill,
                });
            }
        }
        if !caches.is_empty() {
            let placements = gangs.iter().enumerate().flat_map(|(gang, members)| {
                members.iter().map(move |gang_member| (gang, gang_member))
            });
            plan.tasks.extend(
                placements.map(|(gang, member)| build_task(member, gang, caches.clone(), weights)),
            );
        }
    }
    plan.longest_wait_ms = max_wait_ms(&plan.turns);
    plan
}

fn build_task(
    member: &GangMember,
    gang: usize,
    caches: Vec<u32>,
    weights: &BTreeMap<ThreadKey, f64>,
) -> ScheduledTask {
    let weight = weights.get(&member.0).copied().unwrap_or(1.0);
    let weight = (weight * NOMINAL_WEIGHT).round().clamp(1.0, 10_000.0) as u32;
    ScheduledTask {
        process: None,
        thread: Some(member.0.tid as u32),
        gang: gang as u32,
        caches,
        weight,
        children: false,
    }
}

fn find_fillers(
    gang: usize,
    gangs: &[&[GangMember]],
    clashes: &[(ThreadKey, ThreadKey)],
) -> Vec<u32> {
    if clashes.is_empty() {
        return Vec::new();
    }
    let is_clashing = |other_members: &[GangMember]| {
        let is_between = |(a, b): &(ThreadKey, ThreadKey)| {
            let is_in = |thread: &ThreadKey, members: &[GangMember]| {
                members.iter().any(|(member, _)| member == thread)
            };
            (is_in(a, gangs[gang]) && is_in(b, other_members))
                || (is_in(b, gangs[gang]) && is_in(a, other_members))
        };
        clashes.iter().any(is_between)
    };
    (0..gangs.len())
        .filter(|other| *other != gang && !is_clashing(gangs[*other]))
        .map(|other| other as u32)
        .collect()
}

/// Maximum wait that the scheduler promises: two rotations of the cache whose rotation is longest, and 100 ms.
fn max_wait_ms(turns: &[ScheduledTurn]) -> u64 {
    let mut rotation_us_by_cache: BTreeMap<u32, u64> = BTreeMap::new();
    turns
        .iter()
        .for_each(|turn| *rotation_us_by_cache.entry(turn.cache).or_default() += turn.turn_us);
    (2 * rotation_us_by_cache.into_values().max().unwrap_or(0)).div_ceil(1000)
        + WAIT_BEYOND_ROTATIONS_MS
}
