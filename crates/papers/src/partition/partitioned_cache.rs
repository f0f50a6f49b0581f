//! A cache that can be partitioned, with its processes and their shares.
//!
//! Problem: colors persist. If the share of a process is removed, its pages stay where they were moved, so the
//! partition remains in effect for all of its memory. Method: once colors have been assigned, the cache is also
//! restored by a share, which gives all colors to all processes. Pages then spread over the cache again, and their
//! copying is charged like any other. Ways leave no trace, so it suffices to remove the shares.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    Cache, CacheId, CacheShare, CounterEvent, CpuSet, Goal, GroupId, IndexSet, PageMigration,
    PartitionSupport, ProcessId, Profile, ShareMember, TaskId, TaskSample, Units, View,
};

use super::units::assign;

/// A phase by its number, and by its kind if that is known.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct ProcessPhase {
    /// Number of the phase, counted from the start of the task.
    pub number: u32,
    /// Kind of the phase; `None` until it is known.
    pub kind: Option<u32>,
}

impl ProcessPhase {
    /// The phase of the thread that has changed phase most often.
    pub fn from_threads(threads: &[&TaskSample], view: &View<'_>) -> Self {
        let profiles = threads
            .iter()
            .filter_map(|thread| view.profiles.get(&thread.task));
        let phase_of = |profile: &Profile| ProcessPhase {
            number: profile.phase_number,
            kind: profile.phase.kind.as_ref().map(|kind| kind.value),
        };
        profiles.map(phase_of).max().unwrap_or_default()
    }

    /// Whether both are the same phase, or phases of the same kind.
    pub fn is_comparable(self, other_phase: ProcessPhase) -> bool {
        self.number == other_phase.number || self.kind.is_some() && self.kind == other_phase.kind
    }
}

/// A process that uses this cache.
pub struct CacheProcess<'a> {
    /// The process.
    pub process: ProcessId,
    /// Its tasks that have not exited.
    pub tasks: Vec<&'a TaskSample>,
    /// Its phase.
    pub phase: ProcessPhase,
}

impl CacheProcess<'_> {
    /// The cache on which the process spent most of this window; `None` if it did not run.
    pub fn home_cache(&self, caches: &[(&Cache, PartitionSupport)]) -> Option<CacheId> {
        let time_on_cache = |cache: &Cache| -> u64 {
            let cpu_times = self.tasks.iter().flat_map(|task| &task.on_cpu_ns);
            cpu_times
                .filter(|(cpu, _)| cache.cpus.contains(cpu.0))
                .map(|(_, ns)| ns)
                .sum()
        };
        let time_by_cache = caches
            .iter()
            .map(|(cache, _)| (time_on_cache(cache), cache.id));
        let longest_residency = time_by_cache.reduce(|a, b| if b.0 > a.0 { b } else { a });
        longest_residency
            .filter(|(ns, _)| *ns > 0)
            .map(|(_, cache)| cache)
    }

    /// The strictest goal of all threads of the process.
    pub fn goal(&self) -> Goal {
        let goals = self.tasks.iter().filter_map(|task| task.goal);
        goals.fold(Goal::default(), Goal::merged_with)
    }

    /// Whether any of its threads is promised a slowdown or a rate.
    pub fn is_promised(&self) -> bool {
        self.goal().is_promised()
    }

    /// Whether any of its threads has a miss-rate curve.
    pub fn has_curve(&self, view: &View<'_>) -> bool {
        self.tasks.iter().any(|task| {
            let profile = view.profiles.get(&task.task);
            profile.is_some_and(|profile| profile.misses_per_kilo_instr().is_some())
        })
    }

    /// Whether it spent most of its time of this window on these CPUs.
    pub fn runs_mostly_on(&self, cpus: &CpuSet) -> bool {
        let times = self.tasks.iter().flat_map(|task| &task.on_cpu_ns);
        let (here, all) = times.fold((0, 0), |(here, all), (cpu, ns)| {
            let ns_here = if cpus.contains(cpu.0) { *ns } else { 0 };
            (here + ns_here, all + ns)
        });
        all > 0 && 2 * here > all
    }

    /// The bytes that it read from memory and wrote to it in this window; `None` if neither was counted.
    pub fn moved_bytes(&self) -> Option<f64> {
        let of_task = |task: &&TaskSample| {
            let count = |event| task.counts.get(event);
            let read = count(CounterEvent::MemoryReadBytes);
            let written = count(CounterEvent::MemoryWriteBytes);
            match (read, written) {
                (None, None) => count(CounterEvent::MemoryBytes),
                (read, written) => Some(read.unwrap_or(0.0) + written.unwrap_or(0.0)),
            }
        };
        let bytes = self.tasks.iter().filter_map(of_task);
        bytes.reduce(|sum, bytes| sum + bytes)
    }

    /// Its threads, in order of arrival.
    pub fn task_ids(&self) -> Vec<TaskId> {
        self.tasks.iter().map(|task| task.task).collect()
    }
}

/// The processes with a thread that may be moved, in order of arrival, without their phases.
pub fn movable_processes<'a>(view: &'a View<'a>) -> Vec<CacheProcess<'a>> {
    processes_of(view.movable_tasks())
}

/// The processes of these threads, in order of arrival, without their phases.
pub fn processes_of<'a>(tasks: impl Iterator<Item = &'a TaskSample>) -> Vec<CacheProcess<'a>> {
    let mut processes: Vec<CacheProcess<'a>> = Vec::new();
    let mut index_by_process: BTreeMap<ProcessId, usize> = BTreeMap::new();
    for task in tasks {
        let index = *index_by_process.entry(task.process).or_insert_with(|| {
            processes.push(CacheProcess {
                process: task.process,
                tasks: Vec::new(),
                phase: ProcessPhase::default(),
            });
            processes.len() - 1
        });
        processes[index].tasks.push(task);
    }
    processes
}

/// The tasks of one of the processes, for a reason about it.
pub fn tasks_of(processes: &[CacheProcess<'_>], process: ProcessId) -> Vec<TaskId> {
    let cache_process = processes.iter().find(|other| other.process == process);
    cache_process.map_or_else(Vec::new, CacheProcess::task_ids)
}

/// Processes that get a part of a cache together.
pub struct SharingGroup {
    /// Id of the group.
    pub id: GroupId,
    /// Its processes.
    pub members: Vec<ProcessId>,
    /// Size of its part.
    pub units: u32,
}

/// The last-level cache on which each process ran last, for windows in which it does not run.
#[derive(Default)]
pub struct HomeCaches(BTreeMap<ProcessId, CacheId>);

impl HomeCaches {
    /// Every last-level cache that can be partitioned, with its processes in order of arrival. A process of which any
    /// thread must not be changed is left out.
    pub fn collect<'a>(&mut self, view: &'a View<'a>) -> Vec<PartitionedCache<'a>> {
        let mut processes = movable_processes(view);
        let samples = view.observation.tasks.iter();
        let unmovable: BTreeSet<ProcessId> = samples
            .filter(|sample| sample.unmovable)
            .map(|sample| sample.process)
            .collect();
        processes.retain(|cache_process| !unmovable.contains(&cache_process.process));
        for cache_process in &mut processes {
            cache_process.phase = ProcessPhase::from_threads(&cache_process.tasks, view);
        }

        let caches: Vec<(&Cache, PartitionSupport)> = view
            .topology
            .caches
            .iter()
            .filter(|cache| cache.last_level && cache.size_bytes.is_some())
            .filter_map(|cache| {
                Some((
                    cache,
                    PartitionSupport::preferred(view.partitions_of(cache.id))?,
                ))
            })
            .collect();

        let live_processes: BTreeSet<ProcessId> = processes
            .iter()
            .map(|cache_process| cache_process.process)
            .collect();
        self.0.retain(|process, _| live_processes.contains(process));
        let mut domains: Vec<PartitionedCache<'a>> = caches
            .iter()
            .map(|&(cache, partition_units)| PartitionedCache::new(cache, partition_units))
            .collect();

        for cache_process in processes {
            if let Some(cache) = cache_process.home_cache(&caches) {
                self.0.insert(cache_process.process, cache);
            }
            let home_cache = self.0.get(&cache_process.process);
            if let Some(domain) = domains
                .iter_mut()
                .find(|domain| Some(&domain.cache.id) == home_cache)
            {
                domain.processes.push(cache_process);
            }
        }

        domains
    }
}

/// A cache that can be partitioned, with its processes.
pub struct PartitionedCache<'a> {
    /// The cache.
    pub cache: &'a Cache,
    /// Its units.
    pub partition_units: PartitionSupport,
    /// The processes that use it.
    pub processes: Vec<CacheProcess<'a>>,
}

impl<'a> PartitionedCache<'a> {
    /// Builds the cache without processes.
    pub fn new(cache: &'a Cache, partition_units: PartitionSupport) -> Self {
        PartitionedCache {
            cache,
            partition_units,
            processes: Vec::new(),
        }
    }

    /// Whether a process has a promised slowdown.
    pub fn has_goals(&self) -> bool {
        self.processes
            .iter()
            .any(|process| process.goal().max_slowdown.is_some())
    }

    /// Whether the cache needs a partition: it has several processes, or a process with a goal.
    pub fn needs_partition(&self) -> bool {
        self.processes.len() > 1 || self.has_goals()
    }

    /// The shares of this cache, without members that have exited.
    pub fn surviving_shares(&self, shares: &[CacheShare]) -> Vec<CacheShare> {
        let processes: BTreeSet<ProcessId> = self
            .processes
            .iter()
            .map(|cache_process| cache_process.process)
            .collect();
        let is_member = |member: &ShareMember| match member {
            ShareMember::Process(process) => processes.contains(process),
            ShareMember::Task(_) => false,
        };

        let cache_shares = shares.iter().filter(|share| share.cache == self.cache.id);
        let remaining_shares = cache_shares.map(|share| {
            let members = share
                .members
                .iter()
                .filter(|member| is_member(member))
                .copied()
                .collect();
            CacheShare {
                members,
                ..share.clone()
            }
        });
        remaining_shares
            .filter(|share| !share.members.is_empty())
            .collect()
    }

    /// The shares that cancel a partition, which give every process the whole cache; none if the units are ways.
    pub fn undivided_shares(&self, migration: PageMigration) -> Vec<CacheShare> {
        match self.partition_units {
            PartitionSupport::Ways { .. } => Vec::new(),
            PartitionSupport::Colors { colors: units, .. } => vec![CacheShare {
                group: GroupId(0),
                members: self
                    .processes
                    .iter()
                    .map(|process| ShareMember::Process(process.process))
                    .collect(),
                cache: self.cache.id,
                units: Units::Colors {
                    allowed: (0..units).collect(),
                    migration,
                },
            }],
        }
    }

    /// The shares by which the groups divide this cache; together they have at most its units. A group that exists
    /// already keeps its units as far as possible.
    pub fn divide(
        &self,
        groups: &[SharingGroup],
        current_shares: &[CacheShare],
        migration: PageMigration,
    ) -> Vec<CacheShare> {
        let current_units = |group: &SharingGroup| {
            current_shares
                .iter()
                .find(|share| share.group == group.id && share.cache == self.cache.id)
                .map(|share| share.units.set().clone())
                .unwrap_or_default()
        };
        let current_units: Vec<IndexSet> = groups.iter().map(current_units).collect();
        let sizes: Vec<u32> = groups.iter().map(|group| group.units).collect();
        let units = assign(&current_units, &sizes, &self.partition_units);

        let build_share = |(group, units): (&SharingGroup, IndexSet)| CacheShare {
            group: group.id,
            members: group
                .members
                .iter()
                .map(|process| ShareMember::Process(*process))
                .collect(),
            cache: self.cache.id,
            units: self.partition_units.to_units(units, migration),
        };
        groups.iter().zip(units).map(build_share).collect()
    }

    /// Whether every process may use the whole cache.
    pub fn is_undivided(&self, shares: &[CacheShare]) -> bool {
        shares
            .iter()
            .all(|share| share.units.set().count() == self.partition_units.units())
    }
}
