//! Messages on the socket: each request is one JSON object on a line, and each answer is one line
//! (docs/sched-ext.md).

use crate::maps::{MAX_CACHES, MAX_GANGS, MapTurn, TaskKey, TaskPlace};
use crate::quantum::WAIT_BEYOND_ROTATIONS_NS;
use cachemate_gangs::{ScheduledTask, SchedulerPlan, SchedulerRequest, VERSION};
use std::collections::BTreeMap;

/// Maximum length of a message in bytes.
pub const MAX_BYTES: usize = 8 << 20;
const MAX_TASKS: usize = 65_536;
const TURN_US: (u64, u64) = (1_000, 1_000_000);
const WEIGHT: (u32, u32) = (1, 10_000);

/// A plan that has passed all checks.
#[derive(Debug, PartialEq, Eq)]
pub struct CheckedPlan {
    pub generation: u64,
    /// Turns of each cache, by index of the cache.
    pub rotations: Vec<Vec<MapTurn>>,
    pub places: BTreeMap<TaskKey, TaskPlace>,
}

/// Parses one request.
///
/// # Errors
/// The line is not a request.
pub fn parse_request(line: &str) -> Result<SchedulerRequest, String> {
    if line.len() > MAX_BYTES {
        return Err(format!(
            "message: found {} bytes, expected at most {MAX_BYTES}",
            line.len()
        ));
    }
    serde_json::from_str(line).map_err(|error| format!("message: {error}"))
}

/// Checks the plan against a machine with `caches` last-level caches and the generation in force.
///
/// # Errors
/// The plan is invalid; the error names the first invalid place, the value found and the values expected.
pub fn check_plan(
    plan: &SchedulerPlan,
    caches: usize,
    in_force: u64,
) -> Result<CheckedPlan, String> {
    if plan.version != VERSION {
        return Err(format!(
            "plan.version: found {}, expected {VERSION}",
            plan.version
        ));
    }
    if plan.generation <= in_force {
        return Err(format!(
            "plan.generation: found {}, expected more than {in_force}",
            plan.generation
        ));
    }
    // This generation marks tasks that have not been looked up in any plan, so no plan may have it.
    if plan.generation == u64::MAX {
        return Err(format!(
            "plan.generation: found {}, expected less",
            plan.generation
        ));
    }
    let rotations = rotations_by_cache(plan, caches.min(MAX_CACHES))?;
    check_waits(plan, &rotations)?;
    let places = task_places(plan, &rotations)?;
    Ok(CheckedPlan {
        generation: plan.generation,
        rotations,
        places,
    })
}

fn rotations_by_cache(plan: &SchedulerPlan, caches: usize) -> Result<Vec<Vec<MapTurn>>, String> {
    let mut rotations: Vec<Vec<MapTurn>> = vec![Vec::new(); caches];
    for (index, turn) in plan.turns.iter().enumerate() {
        let place = format!("plan.turns[{index}]");
        let Some(rotation) = rotations.get_mut(turn.cache as usize) else {
            return Err(format!(
                "{place}.cache: found {}, expected below {caches}",
                turn.cache
            ));
        };
        check_gang(turn.gang, &format!("{place}.gang"))?;
        if rotation.iter().any(|known| known.gang == turn.gang) {
            return Err(format!(
                "{place}.gang: found {} again, expected one turn at cache {}",
                turn.gang, turn.cache
            ));
        }
        check_range(turn.turn_us, TURN_US, &format!("{place}.turn_us"))?;
        let mut may_fill = 0;
        for (at, filler) in turn.may_fill.iter().enumerate() {
            let place = format!("{place}.may_fill[{at}]");
            check_gang(*filler, &place)?;
            if *filler == turn.gang {
                return Err(format!(
                    "{place}: found {filler}, expected another gang than the turn's own"
                ));
            }
            may_fill |= 1 << filler;
        }
        rotation.push(MapTurn {
            length_ns: turn.turn_us * 1000,
            gang: turn.gang,
            may_fill,
        });
    }
    Ok(rotations)
}

/// Checks that two rotations and 100 ms do not exceed the allowed wait.
fn check_waits(plan: &SchedulerPlan, rotations: &[Vec<MapTurn>]) -> Result<(), String> {
    for (cache, rotation) in rotations
        .iter()
        .enumerate()
        .filter(|(_, rotation)| rotation.len() > 1)
    {
        let wait_ms = longest_wait_ns(rotation).div_ceil(1_000_000);
        if wait_ms > plan.longest_wait_ms {
            return Err(format!(
                "plan.turns: a task at cache {cache} may wait {wait_ms} ms (two rotations and 100 ms), expected at most {}",
                plan.longest_wait_ms
            ));
        }
    }
    Ok(())
}

fn task_places(
    plan: &SchedulerPlan,
    rotations: &[Vec<MapTurn>],
) -> Result<BTreeMap<TaskKey, TaskPlace>, String> {
    let mut places = BTreeMap::new();
    if plan.tasks.len() > MAX_TASKS {
        return Err(format!(
            "plan.tasks: found {}, expected at most {MAX_TASKS}",
            plan.tasks.len()
        ));
    }
    for (index, task) in plan.tasks.iter().enumerate() {
        let task_path = format!("plan.tasks[{index}]");
        let key = match (task.process, task.thread) {
            (Some(id), None) => TaskKey::Process(id),
            (None, Some(id)) => TaskKey::Thread(id),
            _ => {
                return Err(format!(
                    "{task_path}: expected either 'process' or 'thread'"
                ));
            }
        };
        // The kernel's thread numbers are positive and fit into an `int`.
        let (TaskKey::Process(id) | TaskKey::Thread(id)) = key;
        check_range(
            u64::from(id),
            (1, i32::MAX as u64),
            &format!(
                "{task_path}.{}",
                if task.process.is_some() {
                    "process"
                } else {
                    "thread"
                }
            ),
        )?;
        check_gang(task.gang, &format!("{task_path}.gang"))?;
        check_range(
            u64::from(task.weight),
            (WEIGHT.0.into(), WEIGHT.1.into()),
            &format!("{task_path}.weight"),
        )?;
        let caches = task_cache_mask(task, rotations, &task_path)?;
        let task_place = TaskPlace {
            gang: task.gang,
            caches,
            weight: task.weight,
            children: task.children,
        };
        if places.insert(key, task_place).is_some() {
            return Err(format!(
                "{task_path}: found {key:?} again, expected each task once"
            ));
        }
    }
    Ok(places)
}

/// Caches that a task may use, one bit each. Caches at which the task's gang has no turn are an error, because it
/// would never run there.
fn task_cache_mask(
    task: &ScheduledTask,
    rotations: &[Vec<MapTurn>],
    place: &str,
) -> Result<u32, String> {
    if task.caches.is_empty() {
        return Err(format!("{place}.caches: found none, expected at least one"));
    }
    let mut bits = 0;
    for (index, cache) in task.caches.iter().enumerate() {
        let Some(rotation) = rotations.get(*cache as usize) else {
            return Err(format!(
                "{place}.caches[{index}]: found {cache}, expected below {}",
                rotations.len()
            ));
        };
        if !rotation.iter().any(|turn| turn.gang == task.gang) {
            return Err(format!(
                "{place}.caches[{index}]: gang {} has no turn at cache {cache}",
                task.gang
            ));
        }
        bits |= 1 << cache;
    }
    Ok(bits)
}

/// Maximum wait of a task at a cache with these turns, in ns.
pub fn longest_wait_ns(rotation: &[MapTurn]) -> u64 {
    2 * rotation.iter().map(|turn| turn.length_ns).sum::<u64>() + WAIT_BEYOND_ROTATIONS_NS as u64
}

fn check_gang(found: u32, place: &str) -> Result<(), String> {
    if (found as usize) < MAX_GANGS {
        Ok(())
    } else {
        Err(format!(
            "{place}: found {found}, expected below {MAX_GANGS}"
        ))
    }
}

fn check_range(found: u64, (least, most): (u64, u64), place: &str) -> Result<(), String> {
    if (least..=most).contains(&found) {
        Ok(())
    } else {
        Err(format!(
            "{place}: found {found}, expected {least} to {most}"
        ))
    }
}
