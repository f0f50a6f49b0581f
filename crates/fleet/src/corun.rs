//! Steady speeds of services that share a cache, from the interval machine, computed once for each combination.
//!
//! Problem: a fleet has tens of thousands of caches that change every hour. Method: a cache is identified by a key:
//! the multiset of its services, their quantized loads, its partition, and the traffic of the other caches on its
//! memory (in sixteenths of the bandwidth). Its solution is a pure function of the key: a machine with that one cache
//! runs until its speeds are steady. If several caches share a memory node, the machine has a second cache with a
//! stream that represents the others' traffic. Solutions are stored in shards of bounded size; a full shard is
//! emptied. Properties: the store saves time and never changes a result.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use cachemate_core::{FieldError, MachineSpec, SplitMix64};
use cachemate_interval::engine::{FILLS, IntervalEngine, WRITEBACKS};
use cachemate_interval::{Demand, PhasedProgram, closed_form};

use crate::profile::WorkloadProfile;

/// Number of load levels: loads are multiples of one eighth of a CPU per thread.
pub const LOAD_LEVELS: u8 = 8;
/// Number of traffic levels: traffic is a multiple of one sixteenth of a memory node's bandwidth.
pub const TRAFFIC_LEVELS: u8 = 16;
/// Nominal seconds until a cache is steady, and seconds over which speeds are then measured.
const SETTLING_SECONDS: f64 = 20.0;
const MEASURED_SECONDS: f64 = 5.0;
const SHARD_COUNT: usize = 64;
/// Number of solutions in a shard before it is emptied: about 1 GiB for all shards at ten services each.
const MAX_SHARD_ENTRIES: usize = 40_000;

/// One service on a cache.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct CoRunMember {
    /// Index of the service's kind.
    pub kind: u16,
    /// Load of each thread, in units of 1 / [`LOAD_LEVELS`] CPU; 1 or more.
    pub load: u8,
    /// Number of the service's threads on this cache.
    pub threads: u16,
    /// Whether the service is confined to the small part of a partitioned cache.
    pub is_confined: bool,
}

/// A cache with its services, and the traffic of the other caches on its memory.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct CoRunKey {
    /// Traffic of other caches on the same memory, in steps of 1 / [`TRAFFIC_LEVELS`].
    pub traffic: u8,
    /// Ways of the small part; 0 if the cache is not partitioned.
    pub confined_ways: u8,
    /// Services on the cache, in ascending order.
    pub members: Vec<CoRunMember>,
}

/// Steady speed of one service.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct MemberSpeed {
    /// Cycles per instruction on a CPU. Waits for a CPU are excluded, because they depend on the requests and not on
    /// the cache.
    pub cycles_per_instr: f32,
    /// Memory traffic of all the service's threads, in both directions.
    pub bytes_per_cycle: f32,
}

/// Speeds in the order of [`CoRunKey::members`].
pub type CoRunSpeeds = Arc<[MemberSpeed]>;

type SpeedShard = Mutex<BTreeMap<CoRunKey, CoRunSpeeds>>;

/// Solves caches of one kind of host for one set of services.
pub struct CoRunSolver {
    host: MachineSpec,
    /// A machine with one cache of the host, and a second one if several caches share a memory node.
    machine: MachineSpec,
    profiles: Vec<WorkloadProfile>,
    line_bytes: f64,
    ways: u32,
    shards: Vec<SpeedShard>,
}

impl CoRunSolver {
    /// Builds a solver for a checked machine and checked profiles.
    ///
    /// # Errors
    /// The machine has no data cache, or its caches do not divide its memory nodes evenly.
    pub fn new(host: &MachineSpec, profiles: Vec<WorkloadProfile>) -> Result<Self, FieldError> {
        let machine_error = |found: &str, expected| {
            FieldError::new(format!("machine '{}'", host.name), found, expected)
        };
        let last_level = host
            .last_level_cache()
            .ok_or_else(|| machine_error("no data cache", "a shared data cache"))?;
        let cache_count = host.instance_count(last_level);
        let caches_per_node = cache_count / host.memory.nodes;
        if caches_per_node == 0 || !cache_count.is_multiple_of(host.memory.nodes) {
            let found = format!("{cache_count} caches on {} memory nodes", host.memory.nodes);
            return Err(machine_error(&found, "a multiple of its memory nodes"));
        }

        let mut machine = host.clone();
        machine.packages = 1;
        machine.cores_per_package = last_level.shared_by_cores * caches_per_node.min(2);
        machine.memory.nodes = 1;
        let (line_bytes, ways) = (f64::from(last_level.line_bytes), last_level.ways);
        let shards = (0..SHARD_COUNT).map(|_| Mutex::default()).collect();
        Ok(CoRunSolver {
            host: host.clone(),
            machine,
            profiles,
            line_bytes,
            ways,
            shards,
        })
    }

    /// All hosts of a fleet are alike.
    pub fn host(&self) -> &MachineSpec {
        &self.host
    }

    /// The number of contended caches of a host.
    pub fn caches(&self) -> usize {
        self.host
            .last_level_cache()
            .map_or(0, |last| self.host.instance_count(last) as usize)
    }

    /// The number of caches that share one memory node.
    pub fn caches_per_node(&self) -> usize {
        self.caches() / self.host.memory.nodes as usize
    }

    /// Hardware threads below one last-level cache; 0 on a machine without one.
    pub fn cpus_per_cache(&self) -> u32 {
        self.host
            .last_level_cache()
            .map_or(0, |last| last.shared_by_cores * self.host.contexts_per_core)
    }

    /// The size of a line of the contended caches, in bytes.
    pub fn line_bytes(&self) -> f64 {
        self.line_bytes
    }

    /// Capacity of one last-level cache; 0 on a machine without one.
    pub fn cache_bytes(&self) -> f64 {
        self.host
            .last_level_cache()
            .map_or(0.0, |last| last.size_bytes as f64)
    }

    /// The bandwidth that the caches of one memory node share, in bytes per cycle.
    pub fn node_bytes_per_cycle(&self) -> f64 {
        self.host.memory.bytes_per_cycle
    }

    /// Of one last-level cache; [`Self::can_partition`] says whether they can be assigned.
    pub fn ways(&self) -> u32 {
        self.ways
    }

    /// Whether the cache can be partitioned by ways.
    pub fn can_partition(&self) -> bool {
        self.host
            .last_level_cache()
            .is_some_and(|last| last.way_partitions.is_some())
    }

    /// The steady speeds of a cache's services, from the store if they were computed before.
    pub fn member_speeds(&self, key: &CoRunKey) -> CoRunSpeeds {
        if key.members.is_empty() {
            return Arc::new([]);
        }

        let shard = &self.shards[shard_of(key)];
        let stored_speeds = shard
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .cloned();
        if let Some(stored_speeds) = stored_speeds {
            return stored_speeds;
        }

        let speeds: CoRunSpeeds = self.solve_speeds(key).into();
        let mut entries = shard.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= MAX_SHARD_ENTRIES {
            entries.clear();
        }
        entries.insert(key.clone(), Arc::clone(&speeds));
        speeds
    }

    /// The cycles per instruction of a service that is alone on an idle host.
    pub fn solo_cycles_per_instr(&self, member: CoRunMember) -> f32 {
        let member = CoRunMember {
            is_confined: false,
            ..member
        };
        let key = CoRunKey {
            members: vec![member],
            ..CoRunKey::default()
        };
        self.member_speeds(&key)[0].cycles_per_instr
    }

    fn solve_speeds(&self, key: &CoRunKey) -> Vec<MemberSpeed> {
        let mut engine =
            IntervalEngine::new(&self.machine, false).expect("checked: it has a data cache");
        let mut slots: Vec<(usize, u32)> = Vec::new();
        let mut confined_slots = Vec::new();
        for (index, cpus) in self.member_cpus(&key.members) {
            let member = &key.members[index];
            let program = engine.add_program(self.thread_program(member));
            for cpu in cpus {
                let slot = engine.start_task(program, std::iter::once(cpu).collect());
                slots.push((index, slot));
                if member.is_confined {
                    confined_slots.push((slot, 1));
                }
            }
        }

        if key.traffic > 0 && self.caches_per_node() > 1 {
            let program = engine.add_program(self.traffic_program(key.traffic));
            engine.start_task(
                program,
                (self.cpus_per_cache()..self.cpus_per_cache() + 1).collect(),
            );
        }
        if key.confined_ways > 0 {
            let confined_lines =
                engine.divisible_lines() * f32::from(key.confined_ways) / self.ways as f32;
            let shared_lines = engine.divisible_lines() - confined_lines;
            engine.divide(
                0,
                &[(shared_lines, 0), (confined_lines, 1)],
                &[shared_lines, confined_lines],
                confined_slots,
            );
        }
        let cycles_per_second = engine.hertz;
        engine.run(SETTLING_SECONDS * cycles_per_second);
        let totals_before: Vec<_> = slots
            .iter()
            .map(|&(_, slot)| *engine.task_totals(slot))
            .collect();
        engine.run((SETTLING_SECONDS + MEASURED_SECONDS) * cycles_per_second);
        let mut sums = vec![(0.0, 0.0, 0.0); key.members.len()];
        for (&(member, slot), start_totals) in slots.iter().zip(&totals_before) {
            let totals = engine.task_totals(slot);
            let lines_since = |index: usize| totals.counts[index] - start_totals.counts[index];
            let sum = &mut sums[member];
            sum.0 += totals.cycles - start_totals.cycles;
            sum.1 += totals.instructions - start_totals.instructions;
            sum.2 += lines_since(FILLS) + lines_since(WRITEBACKS);
        }
        let elapsed = MEASURED_SECONDS * cycles_per_second;
        let member_speed = |(cycles, instructions, lines): (f64, f64, f64)| MemberSpeed {
            cycles_per_instr: (cycles / instructions.max(1.0)) as f32,
            bytes_per_cycle: (lines * self.line_bytes / elapsed) as f32,
        };
        sums.into_iter().map(member_speed).collect()
    }

    /// Assigns CPUs of the cache to the threads of each member, and returns them with the member's index. The heaviest
    /// threads choose first, so that the CPUs' loads are nearly even.
    fn member_cpus(&self, members: &[CoRunMember]) -> Vec<(usize, Vec<u32>)> {
        let mut cpus = CpuLoads::new(self.cpus_per_cache(), self.host.contexts_per_core);
        let mut heaviest_first: Vec<usize> = (0..members.len()).collect();
        heaviest_first.sort_by_key(|&index| std::cmp::Reverse(members[index].load));
        let assign_threads = |index: usize| {
            let member = &members[index];
            (
                index,
                (0..member.threads)
                    .map(|_| cpus.assign_cpu(member.load))
                    .collect(),
            )
        };
        heaviest_first.into_iter().map(assign_threads).collect()
    }

    fn thread_program(&self, member: &CoRunMember) -> PhasedProgram {
        let profile = &self.profiles[usize::from(member.kind)];
        let phase = profile.thread_phase(u32::from(member.threads));
        let cpu_share = f64::from(member.load.clamp(1, LOAD_LEVELS)) / f64::from(LOAD_LEVELS);
        let demand = Demand {
            cpu_share,
            ..Demand::default()
        };
        PhasedProgram {
            demand,
            ..PhasedProgram::endless_program("service", phase)
        }
    }

    /// Builds a stream that causes the traffic of the other caches. Its misses never stall it, so it reaches the
    /// requested rate.
    fn traffic_program(&self, level: u8) -> PhasedProgram {
        let capacity = self.cache_bytes() / self.line_bytes;
        let share = f64::from(level.min(TRAFFIC_LEVELS)) / f64::from(TRAFFIC_LEVELS);
        let lines_per_cycle = share * self.node_bytes_per_cycle() / self.line_bytes;
        let mut phase = closed_form::stream_phase(self.line_bytes, capacity, lines_per_cycle);
        for point in &mut phase.points {
            (point.cycles_per_instr, point.memory_stall_cycles_per_instr) = (1.0, 0.0);
        }
        PhasedProgram::endless_program("other caches", phase)
    }
}

/// Loads of a cache's CPUs, from which each thread chooses its CPU.
struct CpuLoads {
    loads: Vec<u32>,
    contexts_per_core: usize,
}

impl CpuLoads {
    fn new(cpus: u32, contexts_per_core: u32) -> Self {
        CpuLoads {
            loads: vec![0; cpus as usize],
            contexts_per_core: contexts_per_core.max(1) as usize,
        }
    }

    /// Adds a load to the least loaded CPU, and returns that CPU; among equals, the one on the least loaded core.
    fn assign_cpu(&mut self, load: u8) -> u32 {
        let core_load = |cpu: usize| {
            let first_cpu = cpu / self.contexts_per_core * self.contexts_per_core;
            self.loads[first_cpu..first_cpu + self.contexts_per_core]
                .iter()
                .sum::<u32>()
        };
        let cpu = (0..self.loads.len())
            .min_by_key(|&cpu| (self.loads[cpu], core_load(cpu), cpu))
            .unwrap_or(0);
        self.loads[cpu] += u32::from(load);
        cpu as u32
    }
}

fn shard_of(key: &CoRunKey) -> usize {
    let pack_member = |member: &CoRunMember| {
        u64::from(member.kind) << 32
            | u64::from(member.threads) << 16
            | u64::from(member.load) << 1
            | u64::from(member.is_confined)
    };
    let initial_hash = u64::from(key.traffic) << 8 | u64::from(key.confined_ways);
    let members_hash = key.members.iter().fold(initial_hash, |hash, member| {
        SplitMix64::scatter(hash.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ pack_member(member))
    });
    (members_hash % SHARD_COUNT as u64) as usize
}
