//! Gangs that take turns on their CPUs.
//!
//! A rotation has exclusive use of its CPUs: in a gang's turn, each member has a CPU, and every other CPU of the
//! schedule idles. If no member of a gang can run, its turn ends at once. Members without a named CPU get the one on
//! which they last ran, if it is free. A matching leaves as few members as possible without a CPU that their affinity
//! allows.

use cachemate_core::CpuSet;

use super::dispatch::Dispatcher;
use super::queues::Slot;

/// A gang of slots: members with their CPUs if these are named, and slices per turn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotGang {
    pub members: Vec<(Slot, Option<u32>)>,
    pub slices: u32,
}

/// A gang schedule in progress.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotRotation {
    pub cpus: CpuSet,
    pub slice_cycles: u64,
    pub gangs: Vec<SlotGang>,
    turn: usize,
    turn_ends: u64,
}

impl SlotRotation {
    pub fn new(cpus: CpuSet, slice_cycles: u64, gangs: Vec<SlotGang>, now: u64) -> Self {
        let first = gangs.first().map_or(1, |gang| u64::from(gang.slices));
        SlotRotation {
            cpus,
            slice_cycles: slice_cycles.max(1),
            gangs,
            turn: 0,
            turn_ends: now + first * slice_cycles.max(1),
        }
    }

    /// Returns whether the schedules are the same, whatever their current turns.
    pub fn is_same_schedule(&self, other: &Self) -> bool {
        (&self.cpus, self.slice_cycles, &self.gangs) == (&other.cpus, other.slice_cycles, &other.gangs)
    }

    pub fn turn_end_cycle(&self) -> u64 {
        if self.gangs.len() > 1 { self.turn_ends } else { u64::MAX }
    }

    /// Returns the index into `gangs` of the gang whose turn it is.
    pub fn active_gang(&self) -> usize {
        self.turn
    }

    /// Ends turns that are over, or whose gang cannot run while another can.
    pub fn advance(&mut self, now: u64, dispatcher: &Dispatcher) {
        let is_gang_runnable = |gang: &SlotGang| gang.members.iter().any(|&(slot, _)| dispatcher.is_runnable(slot));
        if self.gangs.is_empty() || (self.turn_ends > now && is_gang_runnable(&self.gangs[self.turn])) {
            return;
        }
        let gangs = self.gangs.len();
        let next =
            (1..=gangs).map(|step| (self.turn + step) % gangs).find(|&index| is_gang_runnable(&self.gangs[index]));
        let is_over = self.turn_ends <= now;
        if let Some(next) = next {
            self.turn = next;
            // A turn starts where the last one ended, so that rounding up to an event does not lengthen the rotation.
            let turn_start = if is_over { self.turn_ends.max(now.saturating_sub(self.slice_cycles)) } else { now };
            self.turn_ends = turn_start + u64::from(self.gangs[next].slices) * self.slice_cycles;
        } else if is_over {
            self.turn_ends = now + self.slice_cycles;
        }
    }

    /// Returns the CPU of each member of the gang whose turn it is.
    pub fn active_seats(&self, dispatcher: &Dispatcher) -> Vec<(u32, Slot)> {
        self.gangs.get(self.turn).map_or_else(Vec::new, |gang| assign_seats(&gang.members, &self.cpus, dispatcher))
    }
}

/// Gives each member its own CPU among `cpus`: a named one if there is one, otherwise an allowed one, and the last one
/// if possible.
pub fn assign_seats(members: &[(Slot, Option<u32>)], cpus: &CpuSet, dispatcher: &Dispatcher) -> Vec<(u32, Slot)> {
    assign_seats_with(members, cpus, dispatcher, &|slot| dispatcher.task(slot).allowed.clone())
}

/// Like `assign_seats`, for members that may be on other CPUs than the dispatcher would give them.
pub fn assign_seats_with(
    members: &[(Slot, Option<u32>)],
    cpus: &CpuSet,
    dispatcher: &Dispatcher,
    allowed: &dyn Fn(Slot) -> CpuSet,
) -> Vec<(u32, Slot)> {
    let mut seats: Vec<(u32, Slot)> = Vec::new();
    for &(slot, cpu) in members {
        if let Some(cpu) = cpu.filter(|&cpu| allowed(slot).contains(cpu)) {
            seats.push((cpu, slot));
        }
    }
    let pinned_count = seats.len();
    let choices = |slot: Slot| -> Vec<u32> { cpus.intersection(&allowed(slot)).iter().collect() };
    for &(slot, _) in members.iter().filter(|(_, cpu)| cpu.is_none()) {
        let mut tried = CpuSet::default();
        find_seat(slot, &choices, dispatcher, &mut seats, pinned_count, &mut tried);
    }
    seats.sort_unstable();
    seats
}

/// Finds an augmenting path from `slot` to a free CPU, on which the first `pinned_count` assignments must not change.
fn find_seat(
    slot: Slot,
    choices_of: &dyn Fn(Slot) -> Vec<u32>,
    dispatcher: &Dispatcher,
    seats: &mut Vec<(u32, Slot)>,
    pinned_count: usize,
    tried: &mut CpuSet,
) -> bool {
    let last_cpu = dispatcher.task(slot).last_cpu;
    let mut choices = choices_of(slot);
    choices.sort_by_key(|&cpu| {
        let is_free = seats.iter().all(|&(other, _)| other != cpu);
        (!(is_free && last_cpu == Some(cpu)), !is_free, cpu)
    });
    for cpu in choices {
        if tried.contains(cpu) {
            continue;
        }
        tried.insert(cpu);
        match seats.iter().position(|&(other, _)| other == cpu) {
            None => {
                seats.push((cpu, slot));
                return true;
            }
            Some(at) if at >= pinned_count => {
                let (_, holder) = seats[at];
                if find_seat(holder, choices_of, dispatcher, seats, pinned_count, tried) {
                    // The previous holder has another CPU now, so this task gets its old one.
                    seats[at] = (cpu, slot);
                    return true;
                }
            }
            Some(_) => {}
        }
    }
    false
}
