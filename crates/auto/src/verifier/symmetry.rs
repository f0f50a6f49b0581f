//! Equality of plans up to an exchange of like caches.
//!
//! Problem: while a plan is on cooldown, a policy that does not know the reason proposes its mirror image: the same
//! groups, each on the other's cache. Method: a plan is written down without the numbers of CPUs and caches. Each CPU
//! is described by its properties, the tasks that may run on it, its gangs, and the shares of the caches above it; the
//! contents of each core, cache, package and memory node are then sorted. Two plans are mirror images if the results
//! are equal. Tasks keep their names, so the result is exact for any number of caches: the plans are equal if an
//! exchange of like places maps one to the other.
//!
//! Properties: caches are alike if level, size, ways, lines and CPUs are. Places on different memory nodes are never
//! exchanged, because memory stays in place. Caches of two packages are exchanged only with their whole packages,
//! because they share a path to memory. Units of a share are compared as they are, because their numbers do not reveal
//! conflicts.

use std::collections::BTreeMap;

use cachemate_core::{
    Cache, CacheLevel, CpuId, GangSchedule, IndexSet, PageMigration, Plan, ShareMember, TaskId,
    Topology, Units,
};

use super::live_tasks::{LiveTasks, restrict_gangs, restrict_shares};

/// Properties of a cache: level, size, ways and bytes of a line.
type CacheSignature = (CacheLevel, Option<u64>, Option<u32>, Option<u32>);

/// Members of a share, the migration of pages for colors, and the units.
type ShareSignature = (Vec<ShareMember>, Option<PageMigration>, Vec<u32>);

/// Turns on a number of CPUs: the length of a slice, and for each gang its slices and its members, with whether each
/// has a CPU of its own.
type RotationSignature = (u32, u64, Vec<(u32, Vec<(TaskId, bool)>)>);

/// A hardware context, without its number.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct CanonicalContext {
    is_online: bool,
    hertz: Option<u64>,
    allowed_tasks: Vec<TaskId>,
    rotations: Vec<RotationSignature>,
    /// Gangs and tasks that must have this CPU.
    seats: Vec<(usize, TaskId)>,
    /// Shares by ways of the caches above.
    shares: Vec<(CacheLevel, ShareSignature)>,
}

/// A package, a cache or a core, with its contents sorted and without numbers.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct CanonicalNode {
    cache_signature: Option<CacheSignature>,
    contexts: Vec<CanonicalContext>,
    children: Vec<CanonicalNode>,
}

/// The node while it is built, with its contents by number.
#[derive(Default)]
struct NumberedNode {
    cache_signature: Option<CacheSignature>,
    contexts: Vec<CanonicalContext>,
    /// Packages, caches and cores, each kind with its own numbers.
    children: BTreeMap<(NodeKind, u32), NumberedNode>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum NodeKind {
    Package,
    Cache,
    Core,
}

impl NumberedNode {
    fn strip_numbers(self) -> CanonicalNode {
        CanonicalNode {
            cache_signature: self.cache_signature,
            contexts: sort_items(self.contexts),
            children: sort_items(self.children.into_values().map(NumberedNode::strip_numbers)),
        }
    }
}

/// The part of a plan for some tasks, in a form that does not distinguish like places.
#[derive(PartialEq, Eq, Debug)]
pub struct CanonicalPlan {
    /// Nodes by memory node, whose number is kept.
    nodes: BTreeMap<u32, CanonicalNode>,
    weights: BTreeMap<TaskId, u64>,
    /// Number of allowed CPUs, some of which may be offline, of each task with an affinity.
    affinity_counts: BTreeMap<TaskId, u32>,
    /// Shares by color, which apply to all caches of a level.
    color_shares: Vec<(Option<CacheSignature>, ShareSignature)>,
}

/// Whether two plans are the same for these tasks, up to an exchange of like caches.
pub fn is_mirror(a: &Plan, b: &Plan, live_tasks: &LiveTasks, topology: &Topology) -> bool {
    let allowed_cpu_count =
        |plan: &Plan, task: &TaskId| plan.affinity.get(task).map(IndexSet::count);
    // A cheap test that distinguishes most plans.
    live_tasks
        .tasks
        .iter()
        .all(|task| allowed_cpu_count(a, task) == allowed_cpu_count(b, task))
        && CanonicalPlan::new(a, live_tasks, topology)
            == CanonicalPlan::new(b, live_tasks, topology)
}

impl CanonicalPlan {
    /// Plans that differ by an exchange of equal caches have the same form.
    pub fn new(plan: &Plan, live_tasks: &LiveTasks, topology: &Topology) -> Self {
        let plan_by_cpu = PlanByCpu::new(plan, live_tasks, topology);
        let mut caches: Vec<&Cache> = topology.caches.iter().collect();
        // From the outside in; the contended level comes first, whatever its number.
        caches.sort_by_key(|cache| (std::cmp::Reverse((cache.last_level, cache.level)), cache.id));
        let mut nodes: BTreeMap<u32, NumberedNode> = BTreeMap::new();
        for cpu in &topology.cpus {
            let node = nodes.entry(cpu.memory_node).or_default();
            let mut parent = node
                .children
                .entry((NodeKind::Package, cpu.package))
                .or_default();
            for cache in caches.iter().filter(|cache| cache.cpus.contains(cpu.id.0)) {
                parent = parent
                    .children
                    .entry((NodeKind::Cache, cache.id.0))
                    .or_default();
                parent.cache_signature = Some(signature_of(cache));
            }
            let core = parent
                .children
                .entry((NodeKind::Core, cpu.core))
                .or_default();
            core.contexts
                .push(plan_by_cpu.build_context(cpu.id, cpu.online, cpu.hertz));
        }

        let weight_bits = |task: &TaskId| {
            plan.weights
                .get(task)
                .map(|weight| (*task, weight.to_bits()))
        };
        let cpu_count = |task: &TaskId| plan.affinity.get(task).map(|cpus| (*task, cpus.count()));
        CanonicalPlan {
            nodes: nodes
                .into_iter()
                .map(|(node, numbered_node)| (node, numbered_node.strip_numbers()))
                .collect(),
            // A weight of one is the default.
            weights: live_tasks
                .tasks
                .iter()
                .filter_map(weight_bits)
                .filter(|(_, weight)| *weight != 1.0f64.to_bits())
                .collect(),
            affinity_counts: live_tasks.tasks.iter().filter_map(cpu_count).collect(),
            color_shares: sort_items(plan_by_cpu.color_shares),
        }
    }
}

fn sort_items<T: Ord>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut sorted_items: Vec<T> = items.into_iter().collect();
    sorted_items.sort_unstable();
    sorted_items
}

fn signature_of(cache: &Cache) -> CacheSignature {
    (cache.level, cache.size_bytes, cache.ways, cache.line_bytes)
}

/// A plan, by CPU.
#[derive(Default)]
struct PlanByCpu {
    allowed_tasks: BTreeMap<u32, Vec<TaskId>>,
    rotations: BTreeMap<u32, Vec<RotationSignature>>,
    seats: BTreeMap<u32, Vec<(usize, TaskId)>>,
    shares: BTreeMap<u32, Vec<(CacheLevel, ShareSignature)>>,
    color_shares: Vec<(Option<CacheSignature>, ShareSignature)>,
}

impl PlanByCpu {
    fn new(plan: &Plan, live_tasks: &LiveTasks, topology: &Topology) -> Self {
        let mut plan_by_cpu = PlanByCpu::default();
        // Tasks are sorted, so the tasks of each CPU are sorted too.
        for task in &live_tasks.tasks {
            for cpu in plan.affinity.get(task).into_iter().flat_map(IndexSet::iter) {
                plan_by_cpu
                    .allowed_tasks
                    .entry(cpu)
                    .or_default()
                    .push(*task);
            }
        }

        restrict_gangs(&plan.gangs, live_tasks)
            .iter()
            .for_each(|schedule| plan_by_cpu.add_gangs(schedule));

        for share in restrict_shares(&plan.shares, live_tasks) {
            let cache = topology.cache(share.cache);
            let members = sort_items(share.members);

            match &share.units {
                Units::Colors { allowed, migration } => {
                    plan_by_cpu.color_shares.push((
                        cache.map(signature_of),
                        (members, Some(*migration), allowed.iter().collect()),
                    ));
                }
                Units::Ways { mask } => {
                    let Some(cache) = cache else { continue };
                    for cpu in cache.cpus.iter() {
                        let share = (cache.level, (members.clone(), None, mask.iter().collect()));
                        plan_by_cpu.shares.entry(cpu).or_default().push(share);
                    }
                }
            }
        }

        plan_by_cpu
    }

    fn add_gangs(&mut self, schedule: &GangSchedule) {
        let mut gangs = Vec::new();
        for (gang_index, gang) in schedule.gangs.iter().enumerate() {
            for (task, cpu) in &gang.members {
                if let Some(cpu) = cpu {
                    self.seats
                        .entry(cpu.0)
                        .or_default()
                        .push((gang_index, *task));
                }
            }

            gangs.push((
                gang.slices,
                sort_items(
                    gang.members
                        .iter()
                        .map(|(task, cpu)| (*task, cpu.is_some())),
                ),
            ));
        }

        for cpu in schedule.cpus.iter() {
            let signature = (schedule.cpus.count(), schedule.slice_ns, gangs.clone());
            self.rotations.entry(cpu).or_default().push(signature);
        }
    }

    fn build_context(&self, cpu: CpuId, is_online: bool, hertz: Option<u64>) -> CanonicalContext {
        fn items_at_cpu<T: Clone + Ord>(
            items_by_cpu: &BTreeMap<u32, Vec<T>>,
            cpu: CpuId,
        ) -> Vec<T> {
            sort_items(items_by_cpu.get(&cpu.0).into_iter().flatten().cloned())
        }
        CanonicalContext {
            is_online,
            hertz,
            allowed_tasks: items_at_cpu(&self.allowed_tasks, cpu),
            rotations: items_at_cpu(&self.rotations, cpu),
            seats: items_at_cpu(&self.seats, cpu),
            shares: items_at_cpu(&self.shares, cpu),
        }
    }
}
