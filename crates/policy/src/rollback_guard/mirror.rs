//! Plans that differ only in which of several like caches holds which tasks are one plan.
//!
//! Problem: a plan that made things worse is kept out, and a policy that does not know why decides its mirror image: the
//! same groups, each on the cache where the other was. Method: a plan is written down without the numbers of CPUs and
//! caches. Each CPU is told by what it is, by the tasks that may run on it, by its gangs, and by the shares of the caches
//! above it; what is inside a core, a cache, a package and a memory node is then put in order. Two plans are mirror images where the results are equal. As tasks keep their names, that is exact, with any
//! number of caches: there is an exchange of like places that makes one plan the other.
//!
//! Properties: caches are like where level, size, ways, lines and CPUs are; places on different memory nodes are never
//! exchanged, as memory stays where it is; caches of two packages only where whole packages are, as they share a way to
//! memory; units of a share are as they are, since their numbers do not tell how they clash.

use std::collections::BTreeMap;

use cachemate_core::{Cache, CpuId, GangSchedule, IndexSet, Level, Member, PageMoving, Plan, TaskId, Topology, Units};

use super::placement::{Present, gangs_of, shares_of};

/// What a cache is like: level, size, ways and bytes of a line.
type Like = (Level, Option<u64>, Option<u32>, Option<u32>);

/// Members of a share, how their pages move where it is by colors, and the units.
type Share = (Vec<Member>, Option<u8>, Vec<u32>);

/// Turns on so many CPUs: the length of a slice, and by gang its slices and who is in it, and with a CPU of its own.
type Turns = (u32, u64, Vec<(u32, Vec<(TaskId, bool)>)>);

/// One context, without its number.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Context {
    online: bool,
    hertz: Option<u64>,
    allowed: Vec<TaskId>,
    turns: Vec<Turns>,
    /// Gang and task that must have this CPU.
    seats: Vec<(usize, TaskId)>,
    /// Shares by ways of the caches above.
    shares: Vec<(Level, Share)>,
}

/// A package, a cache or a core: what is below it, without numbers and in order.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Place {
    like: Option<Like>,
    contexts: Vec<Context>,
    inside: Vec<Place>,
}

/// The same while it is put together, by the numbers of the places inside.
#[derive(Default)]
struct Numbered {
    like: Option<Like>,
    contexts: Vec<Context>,
    /// Packages, caches and cores, each kind with numbers of its own.
    inside: BTreeMap<(Kind, u32), Numbered>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Package,
    Cache,
    Core,
}

impl Numbered {
    fn without_numbers(self) -> Place {
        Place {
            like: self.like,
            contexts: in_order(self.contexts),
            inside: in_order(self.inside.into_values().map(Numbered::without_numbers)),
        }
    }
}

/// What a plan says of some tasks, without saying which of several like places is meant.
#[derive(PartialEq, Eq, Debug)]
pub struct Canonical {
    /// By memory node, whose number stays.
    nodes: BTreeMap<u32, Place>,
    weights: BTreeMap<TaskId, u64>,
    /// Tasks that are told where to run, with the number of their CPUs: some may be no longer there.
    told: BTreeMap<TaskId, u32>,
    /// Colors are of all caches of a level.
    colors: Vec<(Option<Like>, Share)>,
}

/// Do two plans say the same of these tasks, up to an exchange of like caches?
pub fn is_mirror(a: &Plan, b: &Plan, of: &Present, topology: &Topology) -> bool {
    let told = |plan: &Plan, task: &TaskId| plan.affinity.get(task).map(IndexSet::count);
    // Cheap, and tells most plans apart.
    of.tasks.iter().all(|task| told(a, task) == told(b, task))
        && Canonical::of(a, of, topology) == Canonical::of(b, of, topology)
}

impl Canonical {
    /// Writes a plan down as far as it speaks of these tasks.
    pub fn of(plan: &Plan, of: &Present, topology: &Topology) -> Self {
        let found = Contexts::of(plan, of, topology);
        let mut caches: Vec<&Cache> = topology.caches.iter().collect();
        // From the outside to the inside; the contended one first, whatever its level.
        caches.sort_by_key(|cache| (std::cmp::Reverse((cache.last_level, cache.level)), cache.id));
        let mut nodes: BTreeMap<u32, Numbered> = BTreeMap::new();
        for cpu in &topology.cpus {
            let node = nodes.entry(cpu.memory_node).or_default();
            let mut place = node.inside.entry((Kind::Package, cpu.package)).or_default();
            for cache in caches.iter().filter(|cache| cache.cpus.contains(cpu.id.0)) {
                place = place.inside.entry((Kind::Cache, cache.id.0)).or_default();
                place.like = Some(like(cache));
            }
            let core = place.inside.entry((Kind::Core, cpu.core)).or_default();
            core.contexts.push(found.context(cpu.id, cpu.online, cpu.hertz));
        }
        let weight = |task: &TaskId| plan.weights.get(task).map(|weight| (*task, weight.to_bits()));
        let told = |task: &TaskId| plan.affinity.get(task).map(|cpus| (*task, cpus.count()));
        Canonical {
            nodes: nodes.into_iter().map(|(node, found)| (node, found.without_numbers())).collect(),
            // A weight of one is what holds without one.
            weights: of.tasks.iter().filter_map(weight).filter(|(_, weight)| *weight != 1.0f64.to_bits()).collect(),
            told: of.tasks.iter().filter_map(told).collect(),
            colors: in_order(found.colors),
        }
    }
}

fn in_order<T: Ord>(of: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut all: Vec<T> = of.into_iter().collect();
    all.sort_unstable();
    all
}

fn like(cache: &Cache) -> Like {
    (cache.level, cache.size_bytes, cache.ways, cache.line_bytes)
}

/// What a plan says, CPU by CPU.
#[derive(Default)]
struct Contexts {
    allowed: BTreeMap<u32, Vec<TaskId>>,
    turns: BTreeMap<u32, Vec<Turns>>,
    seats: BTreeMap<u32, Vec<(usize, TaskId)>>,
    shares: BTreeMap<u32, Vec<(Level, Share)>>,
    colors: Vec<(Option<Like>, Share)>,
}

impl Contexts {
    fn of(plan: &Plan, of: &Present, topology: &Topology) -> Self {
        let mut found = Contexts::default();
        // Tasks are in order, and so each CPU's are.
        for task in &of.tasks {
            for cpu in plan.affinity.get(task).into_iter().flat_map(IndexSet::iter) {
                found.allowed.entry(cpu).or_default().push(*task);
            }
        }
        gangs_of(&plan.gangs, of).iter().for_each(|schedule| found.take_turns(schedule));
        for share in shares_of(&plan.shares, of) {
            let cache = topology.cache(share.cache);
            let members = in_order(share.members);
            match &share.units {
                Units::Colors { allowed, moving } => {
                    let moving = match moving {
                        PageMoving::Never => 0,
                        PageMoving::Lazy => 1,
                        PageMoving::HotFirst => 2,
                        PageMoving::All => 3,
                    };
                    found.colors.push((cache.map(like), (members, Some(moving), allowed.iter().collect())));
                }
                Units::Ways { mask } => {
                    let Some(cache) = cache else { continue };
                    for cpu in cache.cpus.iter() {
                        let share = (cache.level, (members.clone(), None, mask.iter().collect()));
                        found.shares.entry(cpu).or_default().push(share);
                    }
                }
            }
        }
        found
    }

    fn take_turns(&mut self, schedule: &GangSchedule) {
        let mut gangs = Vec::new();
        for (nth, gang) in schedule.gangs.iter().enumerate() {
            for (task, cpu) in &gang.members {
                if let Some(cpu) = cpu {
                    self.seats.entry(cpu.0).or_default().push((nth, *task));
                }
            }
            gangs.push((gang.slices, in_order(gang.members.iter().map(|(task, cpu)| (*task, cpu.is_some())))));
        }
        for cpu in schedule.cpus.iter() {
            let turns = (schedule.cpus.count(), schedule.slice_ns, gangs.clone());
            self.turns.entry(cpu).or_default().push(turns);
        }
    }

    fn context(&self, cpu: CpuId, online: bool, hertz: Option<u64>) -> Context {
        fn here<T: Clone + Ord>(of: &BTreeMap<u32, Vec<T>>, cpu: CpuId) -> Vec<T> {
            in_order(of.get(&cpu.0).into_iter().flatten().cloned())
        }
        Context {
            online,
            hertz,
            allowed: here(&self.allowed, cpu),
            turns: here(&self.turns, cpu),
            seats: here(&self.seats, cpu),
            shares: here(&self.shares, cpu),
        }
    }
}
