//! Putting a plan in force, and reading back what holds.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    Applied, CacheId, CacheShare, CpuSet, IndexSet, Item, Member, PageMoving, Pending, Plan, Refused, RefusedBecause,
    ShareHeld, TaskId, Units,
};

use super::SimMachine;
use crate::os::dispatch::Slot;
use crate::os::gangs::{Rotation, SlotGang};

/// Way masks now: by cache, and per distinct row of masks one class of service (class 0 = everything).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WaysInForce {
    classes: Vec<BTreeMap<CacheId, IndexSet>>,
}

fn refused(item: Item, because: RefusedBecause, said: impl Into<String>) -> Refused {
    Refused { item, because, said: said.into() }
}

impl SimMachine {
    /// Makes the plan hold as far as it can.
    pub(crate) fn put_in_force(&mut self, plan: &Plan) -> Applied {
        let mut refusals = Vec::new();
        self.apply_rights(plan, &mut refusals);
        self.apply_gangs(plan, &mut refusals);
        self.apply_colours(plan, &mut refusals);
        self.apply_ways(plan, &mut refusals);
        let known = &self.known;
        self.system.dispatcher.set_clashes(&plan.clashes, |task| known.get(task.0 as usize).map(|known| known.slot));
        self.plan = plan.clone();
        self.apply_probes(plan, &mut refusals);
        self.in_force.clashes = plan
            .clashes
            .iter()
            .filter(|clash| {
                let here = |task: TaskId| !self.is_gone(task);
                here(clash.tasks.0) && here(clash.tasks.1)
            })
            .copied()
            .collect();
        let mut applied = self.read_back();
        applied.refused.extend(refusals);
        applied
    }

    fn live(&self) -> Vec<(TaskId, Slot)> {
        let live = (0..self.known.len() as u32).map(TaskId).filter(|&task| !self.is_gone(task));
        live.map(|task| (task, self.known[task.0 as usize].slot)).collect()
    }

    fn apply_rights(&mut self, plan: &Plan, refusals: &mut Vec<Refused>) {
        for &task in plan.allowed.keys().filter(|&&task| self.is_gone(task)) {
            refusals.push(refused(Item::Allowed(task), RefusedBecause::Gone, "the task has ended"));
        }
        for &task in plan.weights.keys().filter(|&&task| self.is_gone(task)) {
            refusals.push(refused(Item::Weight(task), RefusedBecause::Gone, "the task has ended"));
        }
        let all: CpuSet = (0..self.spec.cpus()).collect();
        for (task, slot) in self.live() {
            if self.known[task.0 as usize].fixed {
                continue;
            }
            let allowed = plan.allowed.get(&task).map_or_else(|| all.clone(), |cpus| cpus.intersection(&all));
            if allowed.is_empty() {
                let said = "none of the CPUs exists";
                refusals.push(refused(Item::Allowed(task), RefusedBecause::NotSupported, said));
                continue;
            }
            let now = self.system.now();
            self.system.dispatcher.set_allowed(now, slot, allowed);
            self.system.dispatcher.set_weight(now, slot, plan.weights.get(&task).copied().unwrap_or(1.0));
        }
    }

    fn apply_gangs(&mut self, plan: &Plan, refusals: &mut Vec<Refused>) {
        let mut rotations = Vec::new();
        for (at, schedule) in plan.gangs.iter().enumerate() {
            let mut gangs = Vec::new();
            for gang in &schedule.gangs {
                let here = gang.members.iter().filter(|(task, _)| !self.is_gone(*task));
                let members: Vec<(Slot, Option<u32>)> =
                    here.filter_map(|&(task, cpu)| Some((self.slot_of(task)?, cpu.map(|cpu| cpu.0)))).collect();
                if members.len() < gang.members.len() {
                    let said = "a member has ended; the others keep their turn";
                    refusals.push(refused(Item::Gangs(at), RefusedBecause::Gone, said));
                }
                if !members.is_empty() {
                    gangs.push(SlotGang { members, slices: gang.slices });
                }
            }
            if !gangs.is_empty() {
                let slice = self.clock.cycles(schedule.slice_ns);
                rotations.push(Rotation::new(schedule.cpus.clone(), slice, gangs, self.system.now()));
            }
        }
        self.system.set_rotations(rotations);
        self.in_force.gangs = plan.gangs.clone();
    }

    fn processes_of(&self, share: &CacheShare) -> Vec<usize> {
        let process = |member: &Member| match member {
            Member::Process(process) => Some(self.process_index(*process)),
            Member::Task(_) => None,
        };
        share.members.iter().filter_map(process).filter(|&process| self.has_process(process)).collect()
    }
    fn has_process(&self, process: usize) -> bool {
        self.live().iter().any(|&(_, slot)| self.system.task(slot).process == process)
    }

    fn apply_colours(&mut self, plan: &Plan, refusals: &mut Vec<Refused>) {
        let mut wanted: BTreeMap<usize, (IndexSet, PageMoving)> = BTreeMap::new();
        for share in &plan.shares {
            let Units::Colours { allowed, moving } = &share.units else { continue };
            let item = || Item::Share(share.group, share.cache);
            if self.spec.pages.colours.is_none_or(|colours| allowed.is_empty() || allowed.iter().any(|c| c >= colours))
            {
                refusals.push(refused(
                    item(),
                    RefusedBecause::NotSupported,
                    "this machine's kernel has no such colours",
                ));
                continue;
            }
            for process in self.processes_of(share) {
                let earlier = wanted.entry(process).or_insert_with(|| (allowed.clone(), *moving));
                if earlier.0 != *allowed {
                    let said = "the process has other colours in another share; colours hold in every cache";
                    refusals.push(refused(item(), RefusedBecause::Busy, said));
                }
            }
        }
        let processes: BTreeSet<usize> = self.live().iter().map(|&(_, slot)| self.system.task(slot).process).collect();
        for process in processes {
            match wanted.get(&process) {
                Some((allowed, moving)) => self.system.set_colours(process, allowed, *moving),
                None => self.system.memory.clear_colours(process),
            }
        }
    }

    fn apply_ways(&mut self, plan: &Plan, refusals: &mut Vec<Refused>) {
        let mut masks: BTreeMap<Slot, BTreeMap<CacheId, IndexSet>> = BTreeMap::new();
        let live = self.live();
        for share in &plan.shares {
            let Units::Ways { mask } = &share.units else { continue };
            let processes = self.processes_of(share);
            for &(task, slot) in &live {
                let member = share.members.contains(&Member::Task(task));
                if member || processes.contains(&self.system.task(slot).process) {
                    masks.entry(slot).or_default().insert(share.cache, mask.clone());
                }
            }
        }
        let mut classes = vec![BTreeMap::new()];
        for row in masks.values() {
            if !classes.contains(row) {
                classes.push(row.clone());
            }
        }
        let groups = self.spec.caches.iter().filter_map(|cache| Some(cache.way_partitions?.groups)).min().unwrap_or(1);
        while classes.len() > groups.clamp(1, 256) as usize {
            let Some(dropped) = classes.pop() else { break };
            let over = |share: &&CacheShare| dropped.contains_key(&share.cache);
            for share in plan.shares.iter().filter(over).filter(|share| matches!(share.units, Units::Ways { .. })) {
                let said = format!("more combinations of masks than the {groups} classes of service");
                refusals.push(refused(Item::Share(share.group, share.cache), RefusedBecause::NoRoom, said));
            }
        }
        self.set_masks(&classes, plan, refusals);
        for &(_, slot) in &live {
            let class = masks.get(&slot).and_then(|row| classes.iter().position(|class| class == row)).unwrap_or(0);
            if let Some(thread) = self.system.thread_mut(slot) {
                thread.class = class as u8;
            }
        }
        self.ways = WaysInForce { classes };
    }

    fn set_masks(&mut self, classes: &[BTreeMap<CacheId, IndexSet>], plan: &Plan, refusals: &mut Vec<Refused>) {
        for cache in self.topology.caches.clone() {
            let Some(described) = self.spec.caches.iter().find(|described| described.level == cache.level) else {
                continue;
            };
            if described.way_partitions.is_none() {
                continue;
            }
            let all: IndexSet = (0..described.ways).collect();
            for (class, row) in classes.iter().enumerate() {
                let mask = row.get(&cache.id).unwrap_or(&all);
                if let Err(error) = self.system.hw.set_way_mask(cache.id, class as u8, mask) {
                    let at_fault = plan.shares.iter().find(|share| share.cache == cache.id);
                    refusals.extend(at_fault.map(|share| {
                        refused(Item::Share(share.group, share.cache), RefusedBecause::Failed, error.to_string())
                    }));
                }
            }
        }
    }

    /// The state as the machine has it now.
    pub(crate) fn read_back(&mut self) -> Applied {
        let all: CpuSet = (0..self.spec.cpus()).collect();
        let mut applied = Applied { clashes: self.in_force.clashes.clone(), ..Applied::default() };
        for (task, slot) in self.live() {
            let state = self.system.dispatcher.task(slot);
            if state.allowed != all || self.plan.allowed.contains_key(&task) {
                applied.allowed.insert(task, state.allowed.clone());
            }
            if state.weight != 1.0 || self.plan.weights.contains_key(&task) {
                applied.weights.insert(task, state.weight);
            }
        }
        applied.gangs = self.in_force.gangs.clone();
        applied.probes = self.probes_in_force();
        for share in self.plan.shares.clone() {
            self.read_back_share(share, &mut applied);
        }
        applied.cost_ns = self.clock.nominal_ns(self.system.page_copy_cycles);
        applied
    }

    fn read_back_share(&self, share: CacheShare, applied: &mut Applied) {
        let processes = self.processes_of(&share);
        let members = |slot: Slot| {
            let task = self.task_of_slot.get(&slot);
            task.is_some_and(|task| share.members.contains(&Member::Task(*task)))
                || processes.contains(&self.system.task(slot).process)
        };
        let counted = |ways: bool| ways && self.spec.caches.iter().any(|cache| cache.way_partitions.is_some());
        let occupancy_bytes = counted(true).then(|| {
            let lines = self.system.hw.occupancy_bytes(share.cache).into_iter();
            lines.filter(|(task, _)| members(task.0 as usize)).map(|(_, bytes)| bytes).sum()
        });
        let held = match &share.units {
            Units::Ways { .. } => ShareHeld { share, pages_inside: None, fallback_pages: None, occupancy_bytes },
            Units::Colours { .. } => {
                let (mut resident, mut inside, mut fallback, mut done, mut total) = (0, 0, 0, 0, 0);
                for &process in &processes {
                    let pages = self.system.memory.pages_inside(process);
                    (resident, inside) = (resident + pages.0, inside + pages.1);
                    if let Some(colouring) = self.system.memory.colouring(process) {
                        fallback += colouring.fallback_pages;
                        total += colouring.total_pages;
                        done += colouring.total_pages - colouring.pending_pages();
                    }
                }
                if done < total {
                    let item = Item::Share(share.group, share.cache);
                    applied.pending.push(Pending { item, done, total: Some(total) });
                }
                let pages_inside = (resident > 0).then(|| inside as f64 / resident as f64);
                ShareHeld { share, pages_inside, fallback_pages: Some(fallback), occupancy_bytes }
            }
        };
        applied.shares.push(held);
    }
}
