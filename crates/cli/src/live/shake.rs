//! The kill test's policy: another plan every window, through every actuator there is, sensible or not.
//!
//! Not in the registry: nobody wants it but who tests that everything is put back.

use cachemate_core::{
    CacheShare, Decision, Gang, GangSchedule, GroupId, Member, Partition, Plan, Policy, TaskId, Units, View, Window,
};
use cachemate_policy::policies::movable;
use cachemate_policy::rng::SplitMix64;

pub struct Shake {
    generator: SplitMix64,
}

impl Shake {
    pub const NAME: &str = "shake";

    pub fn new(seed: u64) -> Self {
        Shake { generator: SplitMix64::new(seed) }
    }
}

impl Shake {
    /// Some tasks, each under a mask of its own that the hardware takes, in every cache that ways divide.
    fn shares(&mut self, view: &View<'_>, tasks: &[TaskId]) -> Vec<CacheShare> {
        let mut shares = Vec::new();
        for (cache, partition) in &view.capabilities.partitions {
            let Partition::Ways { ways, at_least, .. } = *partition else { continue };
            for &task in tasks {
                if self.generator.below(3) > 0 {
                    continue;
                }
                let width = at_least + self.generator.below(u64::from(ways - at_least) + 1) as u32;
                let first = self.generator.below(u64::from(ways - width) + 1) as u32;
                let units = Units::Ways { mask: (first..first + width).collect() };
                shares.push(CacheShare {
                    group: GroupId(task.0),
                    members: vec![Member::Task(task)],
                    cache: *cache,
                    units,
                });
            }
        }
        shares
    }
}

impl Policy for Shake {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(Window::Time { ns: 1 });
        let online: Vec<u32> = view.topology.cpus.iter().filter(|cpu| cpu.online).map(|cpu| cpu.id.0).collect();
        let tasks: Vec<_> = movable(view).map(|task| task.task).collect();
        for &task in &tasks {
            if self.generator.below(4) > 0 && !online.is_empty() {
                let cpu = online[self.generator.below(online.len() as u64) as usize];
                plan.allowed.insert(task, [cpu].into_iter().collect());
            }
            if self.generator.below(3) == 0 {
                plan.weights.insert(task, [0.25, 0.5, 2.0, 4.0][self.generator.below(4) as usize]);
            }
        }
        if self.generator.below(2) == 0 && !tasks.is_empty() && !online.is_empty() {
            let gangs = tasks
                .chunks(online.len())
                .map(|members| Gang { members: members.iter().map(|&task| (task, None)).collect(), slices: 1 });
            let cpus = online.iter().copied().collect();
            plan.gangs = vec![GangSchedule { cpus, slice_ns: 5_000_000, gangs: gangs.collect() }];
        }
        plan.shares = self.shares(view, &tasks);
        Decision { plan, why: Vec::new() }
    }
}
