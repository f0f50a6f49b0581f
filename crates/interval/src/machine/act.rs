//! Putting a plan in force, and reading back what holds.

use cachemate_core::{
    Applied, CacheId, CpuSet, IndexSet, Item, Member, PageMoving, Pending, Plan, ProcessId, Refused, RefusedBecause,
    ShareHeld, TaskId, Units,
};

use super::{IntervalMachine, parts};
use crate::turns::Rotation;

/// Pages of a process on their way to other colors.
#[derive(Clone, Debug, PartialEq)]
pub struct Moving {
    pub process: ProcessId,
    pub colors: IndexSet,
    pub pages: u64,
    pub began_ns: u64,
    pub ends_ns: u64,
}

/// Share of a process' time that copying its pages takes while it lasts.
const COPYING_SHARE: f64 = 0.5;

fn refused(item: Item, because: RefusedBecause, said: impl Into<String>) -> Refused {
    Refused { item, because, said: said.into() }
}

impl IntervalMachine {
    pub(super) fn put_in_force(&mut self, plan: &Plan) -> Applied {
        let mut refusals = Vec::new();
        let before = std::mem::replace(&mut self.plan, plan.clone());
        self.apply_rights(plan, &mut refusals);
        if before.gangs != plan.gangs {
            self.apply_gangs(plan, &mut refusals);
        }
        if !plan.penalties.is_empty() {
            refusals.push(refused(Item::Penalties, RefusedBecause::NotSupported, "nobody is picked one by one here"));
        }
        if before.shares != plan.shares {
            self.move_pages(&before, plan);
        }
        self.divide_caches();
        self.apply_probes(plan, &mut refusals);
        let mut applied = self.read_back();
        applied.refused = refusals;
        applied
    }

    fn live(&self) -> Vec<(TaskId, u32, bool)> {
        let live = self.known.iter().filter(|known| !known.exited);
        live.map(|known| (known.task, known.slot, known.fixed)).collect()
    }

    pub(super) fn apply_rights(&mut self, plan: &Plan, refusals: &mut Vec<Refused>) {
        let live = self.live();
        let gone = |task: &TaskId| live.iter().all(|(known, _, _)| known != task);
        for &task in plan.affinity.keys().filter(|task| gone(task)) {
            refusals.push(refused(Item::Affinity(task), RefusedBecause::Gone, "the task has ended"));
        }
        for &task in plan.weights.keys().filter(|task| gone(task)) {
            refusals.push(refused(Item::Weight(task), RefusedBecause::Gone, "the task has ended"));
        }
        let all: CpuSet = (0..self.spec.cpus()).collect();
        for (task, slot, fixed) in live {
            if fixed {
                continue;
            }
            let allowed = plan.affinity.get(&task).map_or_else(|| all.clone(), |cpus| cpus.intersection(&all));
            if allowed.is_empty() {
                refusals.push(refused(Item::Affinity(task), RefusedBecause::NotSupported, "none of the CPUs exists"));
                continue;
            }
            self.engine.turns.allow(slot, allowed);
            self.engine.turns.weigh(slot, plan.weights.get(&task).copied().unwrap_or(1.0));
        }
        self.engine.turns.balance();
    }

    pub(super) fn apply_gangs(&mut self, plan: &Plan, refusals: &mut Vec<Refused>) {
        let mut rotations = Vec::new();
        for (at, schedule) in plan.gangs.iter().enumerate() {
            let mut gangs = Vec::new();
            for gang in &schedule.gangs {
                let here = |&(task, cpu): &(TaskId, Option<cachemate_core::CpuId>)| {
                    let known = self.known.iter().find(|known| known.task == task && !known.exited)?;
                    Some((known.slot, cpu.map(|cpu| cpu.0)))
                };
                let members: Vec<(u32, Option<u32>)> = gang.members.iter().filter_map(here).collect();
                if members.len() < gang.members.len() {
                    let said = "a member has ended; the others keep their turn";
                    refusals.push(refused(Item::Gangs(at), RefusedBecause::Gone, said));
                }
                if !members.is_empty() {
                    gangs.push((members, gang.slices));
                }
            }
            if !gangs.is_empty() {
                let slice = self.cycles_of(schedule.slice_ns);
                rotations.push(Rotation::new(schedule.cpus.clone(), slice, gangs));
            }
        }
        self.engine.turns.set_rotations(rotations);
    }

    /// What a process is held to by colors; the first share that names it counts.
    fn colors_of(plan: &Plan, process: ProcessId) -> Option<(IndexSet, PageMoving)> {
        plan.shares.iter().find_map(|share| match &share.units {
            Units::Colors { allowed, moving } if share.members.contains(&Member::Process(process)) => {
                Some((allowed.clone(), *moving))
            }
            _ => None,
        })
    }

    /// Pages outside the new colors start to move: that takes the process' time, and its lines of them are lost.
    fn move_pages(&mut self, before: &Plan, plan: &Plan) {
        let Some(colors) = self.spec.pages.colors else { return };
        let all: IndexSet = (0..colors).collect();
        let mut processes: Vec<ProcessId> = self.known.iter().map(|known| known.process).collect();
        processes.dedup();
        for process in processes {
            let now = Self::colors_of(plan, process);
            let was = Self::colors_of(before, process).map_or_else(|| all.clone(), |found| found.0);
            let Some((allowed, moving)) = now.filter(|(allowed, _)| *allowed != was) else { continue };
            let outside = was.iter().filter(|color| !allowed.contains(*color)).count() as f64;
            let share = outside / f64::from(was.count().max(1));
            let slots: Vec<u32> =
                self.known.iter().filter(|known| known.process == process).map(|known| known.slot).collect();
            let pages = (share * self.pages_of(&slots)) as u64;
            if moving == PageMoving::Never || pages == 0 {
                continue;
            }
            let cost_ns = pages as f64 * self.spec.pages.move_page_cycles as f64 * 1e9 / self.spec.hertz as f64;
            self.cost_ns += cost_ns;
            let ends_ns = self.now_ns + (cost_ns / COPYING_SHARE) as u64 + 1;
            for &slot in &slots {
                self.engine.drop_lines(slot, share);
                self.engine.steal(slot, COPYING_SHARE);
            }
            self.moving.retain(|other| other.process != process);
            self.moving.push(Moving { process, colors: allowed, pages, began_ns: self.now_ns, ends_ns });
        }
    }

    /// Resident pages: of the footprint, or of four caches where that is not known.
    fn pages_of(&self, slots: &[u32]) -> f64 {
        let Some(&slot) = slots.first() else { return 0.0 };
        let phase = &self.engine.program(slot).phases[self.engine.phase(slot) as usize];
        let four_caches = 4.0 * f64::from(self.engine.capacity_lines()) * self.engine.line_bytes();
        phase.footprint_bytes.unwrap_or(four_caches) / self.spec.pages.page_bytes as f64
    }

    pub(super) fn moves_due(&self) -> u64 {
        self.moving.iter().map(|moving| moving.ends_ns).min().unwrap_or(u64::MAX)
    }

    pub(super) fn moves_done(&mut self) {
        let now_ns = self.now_ns;
        for done in self.moving.iter().filter(|moving| moving.ends_ns <= now_ns) {
            for known in self.known.iter().filter(|known| known.process == done.process && !known.exited) {
                self.engine.steal(known.slot, 0.0);
            }
        }
        self.moving.retain(|moving| moving.ends_ns > now_ns);
    }

    /// Every contended cache as the plan and events have it.
    pub(super) fn divide_caches(&mut self) {
        let contended: Vec<CacheId> =
            self.topology.caches.iter().filter(|cache| cache.last_level).map(|cache| cache.id).collect();
        let level_ways = self.spec.last_level().map_or(1, |cache| cache.ways);
        for (at, cache) in contended.iter().enumerate() {
            let mut masks: Vec<IndexSet> = Vec::new();
            let mut members: Vec<(u32, usize)> = Vec::new();
            let mut units = level_ways;
            for known in self.known.iter().filter(|known| !known.exited) {
                let held = self.plan.shares.iter().find_map(|share| {
                    let named = share.members.contains(&Member::Task(known.task))
                        || share.members.contains(&Member::Process(known.process));
                    match &share.units {
                        Units::Ways { mask } if named && share.cache == *cache => Some((mask.clone(), level_ways)),
                        // A frame's color is the same in every cache.
                        Units::Colors { allowed, .. } if named => {
                            Some((allowed.clone(), self.spec.pages.colors.unwrap_or(1)))
                        }
                        _ => None,
                    }
                });
                if let Some((mask, of)) = held {
                    units = of;
                    members.push((known.slot, masks.len()));
                    masks.push(mask);
                }
            }
            let live = self.known.iter().filter(|known| !known.exited).count();
            let shared = members.len() < live || self.outside.contains_key(&(at as u32));
            let found = parts::parts(units, &masks, shared);
            let shrunk = self.shrunk.get(&(at as u32)).copied().unwrap_or(1.0);
            let lines = |share: f64| (f64::from(self.engine.capacity_lines()) * share * shrunk) as f32;
            let domains: Vec<(f32, u8)> = found.parts.iter().map(|&(share, group)| (lines(share), group)).collect();
            let groups: Vec<f32> = found.groups.iter().map(|&share| lines(share)).collect();
            let of: Vec<(u32, u8)> = members.iter().map(|&(slot, mask)| (slot, found.of[mask])).collect();
            self.engine.divide_if_new(at, &domains, &groups, &of);
        }
    }

    /// The state as the machine has it now.
    pub(super) fn read_back(&self) -> Applied {
        let all: CpuSet = (0..self.spec.cpus()).collect();
        let mut applied = Applied { gangs: self.plan.gangs.clone(), ..Applied::default() };
        for (task, slot, _) in self.live() {
            let sched = &self.engine.turns.tasks[slot as usize];
            if sched.allowed != all || self.plan.affinity.contains_key(&task) {
                applied.affinity.insert(task, sched.allowed.clone());
            }
            if sched.weight != 1.0 || self.plan.weights.contains_key(&task) {
                applied.weights.insert(task, sched.weight);
            }
        }
        applied.probes = self.probes.iter().map(|active| active.probe.id).collect();
        for share in &self.plan.shares {
            let colors = matches!(share.units, Units::Colors { .. });
            let moving = self.moving.iter().find(|moving| share.members.contains(&Member::Process(moving.process)));
            if let Some(moving) = moving.filter(|_| colors) {
                let span = (moving.ends_ns - moving.began_ns).max(1) as f64;
                let done = (moving.pages as f64 * (self.now_ns - moving.began_ns) as f64 / span) as u64;
                let item = Item::Share(share.group, share.cache);
                applied.pending.push(Pending { item, done: done.min(moving.pages), total: Some(moving.pages) });
            }
            let inside = moving.map_or(1.0, |moving| {
                let span = (moving.ends_ns - moving.began_ns).max(1) as f64;
                (self.now_ns - moving.began_ns) as f64 / span
            });
            applied.shares.push(ShareHeld {
                share: share.clone(),
                pages_inside: colors.then_some(inside.min(1.0)),
                fallback_pages: colors.then_some(0),
                occupancy_bytes: self.occupancy(share),
            });
        }
        applied.cost_ns = self.cost_ns as u64;
        applied
    }

    fn occupancy(&self, share: &cachemate_core::CacheShare) -> Option<u64> {
        let monitored = self.spec.caches.iter().any(|cache| cache.way_partitions.is_some());
        let contended = self.topology.caches.iter().filter(|cache| cache.last_level);
        let at = contended.map(|cache| cache.id).position(|id| id == share.cache).filter(|_| monitored)?;
        let named = self.known.iter().filter(|known| {
            share.members.contains(&Member::Task(known.task)) || share.members.contains(&Member::Process(known.process))
        });
        Some(named.map(|known| self.engine.held_bytes(known.slot, at)).sum::<f64>() as u64)
    }
}
