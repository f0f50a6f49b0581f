//! Policies for tests of what is around a policy; not in the registry, and in no package (the feature `chaos`).
//!
//! [`Shake`]: another plan every window, through every actuator there is, sensible or not; is everything put back?
//! [`Squeeze`]: after some windows everybody onto the first CPU, for ever; does the guard take it back?
//! [`Astray`]: everybody onto the first CPU, then plans that no machine may be told, then nothing; does the daemon live on?

use cachemate_core::{
    CacheShare, Decision, Gang, GangSchedule, GroupId, Member, PageMoving, Partition, Plan, Policy, PolicyConfig,
    ProcessId, Reason, ReasonKind, SplitMix64, TaskId, Units, View, Window,
};

/// The one of this name, if it is one of them.
pub fn chaos_policy(policy: &PolicyConfig) -> Option<Box<dyn Policy>> {
    match policy.name.as_str() {
        Shake::NAME => Some(Box::new(Shake::new(policy.seed))),
        Squeeze::NAME => Some(Box::new(Squeeze)),
        Astray::NAME => Some(Box::new(Astray)),
        _ => None,
    }
}

/// Groups of colors are numbered apart from those of ways.
const FIRST_COLORED: u32 = 1 << 20;

struct Shake {
    generator: SplitMix64,
}

impl Shake {
    const NAME: &str = "shake";

    fn new(seed: u64) -> Self {
        Shake { generator: SplitMix64::new(seed) }
    }
}

impl Shake {
    /// Some processes on one half of the colors or the other: colors hold in every cache of the level, so the first stands
    /// for all.
    fn colored(&mut self, view: &View<'_>) -> Vec<CacheShare> {
        let divided = view.capabilities.partitions.iter().find_map(|(cache, partition)| match partition {
            Partition::Colors { colors, .. } => Some((*cache, *colors)),
            Partition::Ways { .. } => None,
        });
        let Some((cache, colors)) = divided else { return Vec::new() };
        let processes: std::collections::BTreeSet<ProcessId> = view.movable().map(|task| task.process).collect();
        let mut shares = Vec::new();
        for process in processes {
            let half = match self.generator.below(3) {
                0 => 0..colors / 2,
                1 => colors / 2..colors,
                _ => continue,
            };
            let units = Units::Colors { allowed: half.collect(), moving: PageMoving::All };
            let group = GroupId(FIRST_COLORED + process.0);
            shares.push(CacheShare { group, members: vec![Member::Process(process)], cache, units });
        }
        shares
    }

    /// Some tasks, each under a mask of its own that the hardware takes, in every cache that ways divide.
    fn shares(&mut self, view: &View<'_>, tasks: &[TaskId]) -> Vec<CacheShare> {
        let mut shares = self.colored(view);
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
        let online: Vec<u32> = view.topology.online().iter().collect();
        let tasks: Vec<_> = view.movable().map(|task| task.task).collect();
        for &task in &tasks {
            if self.generator.below(4) > 0 && !online.is_empty() {
                let cpu = online[self.generator.below(online.len() as u64) as usize];
                plan.affinity.insert(task, [cpu].into_iter().collect());
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

struct Squeeze;

impl Squeeze {
    const NAME: &str = "squeeze";
    /// The guard has its reference by then.
    const FROM_WINDOW: u64 = 8;
}

impl Policy for Squeeze {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(Window::Time { ns: 1 });
        let mut why = Vec::new();
        let first = view.topology.cpus.iter().find(|cpu| cpu.online).map(|cpu| cpu.id.0);
        if view.seen.window >= Self::FROM_WINDOW
            && let Some(first) = first
        {
            plan.affinity.extend(view.movable().map(|task| (task.task, [first].into_iter().collect())));
            let tasks: Vec<_> = plan.affinity.keys().copied().collect();
            why.push(Reason {
                kind: ReasonKind::Plain,
                tasks,
                text: "everybody onto one CPU".to_string(),
                numbers: Vec::new(),
            });
        }
        Decision { plan, why }
    }
}

struct Astray;

impl Astray {
    const NAME: &str = "astray";
    /// In these windows the plan divides a cache by a mask that no hardware has.
    const FROM_WINDOW: u64 = 5;
    const TO_WINDOW: u64 = 60;
}

impl Policy for Astray {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(Window::Time { ns: 1 });
        let first = view.topology.cpus.iter().find(|cpu| cpu.online).map(|cpu| cpu.id.0);
        let tasks: Vec<_> = view.movable().map(|task| task.task).collect();
        if view.seen.window < Self::FROM_WINDOW {
            plan.affinity.extend(
                first.into_iter().flat_map(|cpu| tasks.iter().map(move |&task| (task, [cpu].into_iter().collect()))),
            );
        } else if view.seen.window < Self::TO_WINDOW
            && let Some(cache) = view.topology.caches.first()
        {
            let units = Units::Ways { mask: [0, 2, 70].into_iter().collect() };
            let members = tasks.into_iter().map(Member::Task).collect();
            plan.shares.push(CacheShare { group: GroupId(0), members, cache: cache.id, units });
        }
        Decision { plan, why: Vec::new() }
    }
}
