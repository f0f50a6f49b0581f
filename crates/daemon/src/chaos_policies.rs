//! Policies that test the components around a policy. They are not in the registry, and only in builds with the
//! feature `chaos`, which no package enables.
//!
//! [`ShakePolicy`] makes a new plan in every window, reasonable or not, with every actuator, to test that everything
//! is restored. [`SqueezePolicy`] moves all tasks to the first CPU after some windows and keeps them there, to test
//! that the guard rolls this back. [`MisplacingPolicy`] moves all tasks to the first CPU, then partitions a cache by
//! an impossible mask, then returns empty plans, to test that the daemon continues.

use cachemate_core::{
    CacheShare, CpuSet, Decision, Gang, GangSchedule, GroupId, PageMigration, PartitionSupport,
    Plan, Policy, PolicyConfig, ProcessId, Reason, ShareMember, SplitMix64, TaskId, Units, View,
    WindowLength,
};

/// The chaos policy of this name, if there is one.
pub fn chaos_policy(policy: &PolicyConfig) -> Option<Box<dyn Policy>> {
    match policy.name.as_str() {
        ShakePolicy::NAME => Some(Box::new(ShakePolicy::new(policy.seed))),
        SqueezePolicy::NAME => Some(Box::new(SqueezePolicy)),
        MisplacingPolicy::NAME => Some(Box::new(MisplacingPolicy)),
        _ => None,
    }
}

/// Color groups are numbered separately from way groups.
const FIRST_COLOR_GROUP: u32 = 1 << 20;

struct ShakePolicy {
    generator: SplitMix64,
}

impl ShakePolicy {
    const NAME: &str = "shake";

    fn new(seed: u64) -> Self {
        ShakePolicy {
            generator: SplitMix64::new(seed),
        }
    }

    /// Assigns some processes to one half of the colors or the other. Colors apply to every cache of the level, so the
    /// first cache stands for all.
    fn draw_color_shares(&mut self, view: &View<'_>) -> Vec<CacheShare> {
        let mut partitions = view.capabilities.partitions.iter();
        let Some((cache, colors)) =
            partitions.find_map(|(cache, partition)| Some((*cache, partition.colors()?)))
        else {
            return Vec::new();
        };
        let processes: std::collections::BTreeSet<ProcessId> =
            view.movable_tasks().map(|task| task.process).collect();
        let mut shares = Vec::new();
        for process in processes {
            let half_colors = match self.generator.draw_below(3) {
                0 => 0..colors / 2,
                1 => colors / 2..colors,
                _ => continue,
            };
            let units = Units::Colors {
                allowed: half_colors.collect(),
                migration: PageMigration::All,
            };
            let group = GroupId(FIRST_COLOR_GROUP + process.0);
            shares.push(CacheShare {
                group,
                members: vec![ShareMember::Process(process)],
                cache,
                units,
            });
        }
        shares
    }

    /// Assigns some tasks, each with its own valid mask, in every cache that supports way partitions.
    fn draw_shares(&mut self, view: &View<'_>, tasks: &[TaskId]) -> Vec<CacheShare> {
        let mut shares = self.draw_color_shares(view);
        for (cache, partition) in &view.capabilities.partitions {
            let PartitionSupport::Ways {
                ways,
                min_ways: at_least,
                ..
            } = *partition
            else {
                continue;
            };
            for &task in tasks {
                if self.generator.draw_below(3) > 0 {
                    continue;
                }
                let width =
                    at_least + self.generator.draw_below(u64::from(ways - at_least) + 1) as u32;
                let first_way = self.generator.draw_below(u64::from(ways - width) + 1) as u32;
                let units = Units::Ways {
                    mask: (first_way..first_way + width).collect(),
                };
                shares.push(CacheShare {
                    group: GroupId(task.0),
                    members: vec![ShareMember::Task(task)],
                    cache: *cache,
                    units,
                });
            }
        }
        shares
    }
}

impl Policy for ShakePolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
        let online_cpus: Vec<u32> = view.topology.online().iter().collect();
        let tasks: Vec<_> = view.movable_tasks().map(|task| task.task).collect();
        for &task in &tasks {
            if self.generator.draw_below(4) > 0 && !online_cpus.is_empty() {
                let cpu = online_cpus[self.generator.draw_below(online_cpus.len() as u64) as usize];
                plan.affinity.insert(task, [cpu].into_iter().collect());
            }
            if self.generator.draw_below(3) == 0 {
                plan.weights.insert(
                    task,
                    [0.25, 0.5, 2.0, 4.0][self.generator.draw_below(4) as usize],
                );
            }
        }
        if self.generator.draw_below(2) == 0 && !tasks.is_empty() && !online_cpus.is_empty() {
            let gangs = tasks.chunks(online_cpus.len()).map(|members| Gang {
                members: members.iter().map(|&task| (task, None)).collect(),
                slices: 1,
            });
            let cpus = online_cpus.iter().copied().collect();
            plan.gangs = vec![GangSchedule {
                cpus,
                slice_ns: 5_000_000,
                gangs: gangs.collect(),
            }];
        }
        plan.shares = self.draw_shares(view, &tasks);
        Decision::new(plan, Vec::new())
    }
}

struct SqueezePolicy;

impl SqueezePolicy {
    const NAME: &str = "squeeze";
    /// First window of the squeeze; the guard has its reference before it.
    const FIRST_WINDOW: u64 = 8;
}

impl Policy for SqueezePolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
        let mut reasons = Vec::new();
        let first_cpu = view
            .topology
            .cpus
            .iter()
            .find(|cpu| cpu.online)
            .map(|cpu| cpu.id.0);
        if view.observation.window >= Self::FIRST_WINDOW
            && let Some(first) = first_cpu
        {
            plan.affinity.extend(
                view.movable_tasks()
                    .map(|task| (task.task, [first].into_iter().collect())),
            );
            let tasks: Vec<_> = plan.affinity.keys().copied().collect();
            reasons.push(Reason::new(tasks, "all tasks onto one CPU", Vec::new()));
        }
        Decision::new(plan, reasons)
    }
}

struct MisplacingPolicy;

impl MisplacingPolicy {
    const NAME: &str = "astray";
    /// First window in which the plan partitions a cache by an impossible mask.
    const FIRST_INVALID_WINDOW: u64 = 5;
    const END_WINDOW: u64 = 60;
}

impl Policy for MisplacingPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
        let first_cpu = view
            .topology
            .cpus
            .iter()
            .find(|cpu| cpu.online)
            .map(|cpu| cpu.id.0);
        let tasks: Vec<_> = view.movable_tasks().map(|task| task.task).collect();
        if view.observation.window < Self::FIRST_INVALID_WINDOW {
            let cpus: Option<CpuSet> = first_cpu.map(|cpu| [cpu].into_iter().collect());
            plan.affinity
                .extend(tasks.iter().filter_map(|&task| Some((task, cpus.clone()?))));
        } else if view.observation.window < Self::END_WINDOW
            && let Some(cache) = view.topology.caches.first()
        {
            let units = Units::Ways {
                mask: [0, 2, 70].into_iter().collect(),
            };
            let members = tasks.into_iter().map(ShareMember::Task).collect();
            plan.shares.push(CacheShare {
                group: GroupId(0),
                members,
                cache: cache.id,
                units,
            });
        }
        Decision::new(plan, Vec::new())
    }
}
