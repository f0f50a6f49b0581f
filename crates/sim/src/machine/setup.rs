//! The setup of a simulated run: options, programs and length.

use cachemate_core::{AccessSource, CpuSet, Goal, MachineSpec, RunLimit};
use serde::{Deserialize, Serialize};

use crate::os::schedulers::SchedulerKind;

/// Options of a run, as opposed to properties of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SimOptions {
    /// Seed for the order of frames, random replacement, and jitter.
    pub seed: u64,
    /// Time scale of the run; 1 is as published. Windows, slices, and the costs of the operating system and of
    /// interrupts are divided by the scale.
    ///
    /// The numbers of entries of traces and of samples are not divided. Each costs an interrupt at the scaled cost, so
    /// the requested number takes the published share of the time. Times that the machine reports in nanoseconds are
    /// multiplied by the scale, so that a policy sees published times; counts and cycles are reported unscaled.
    pub scale: u64,
    /// Default scheduler, which decides everything that a plan does not determine.
    pub scheduler: SchedulerKind,
    /// Whether hardware prefetchers are enabled.
    pub prefetch: bool,
    /// Whether programs begin with resident memory, as after minutes of running. The first touch of a page then causes
    /// no fault, and the first miss on a line does not count as cold.
    #[serde(default)]
    pub is_resident: bool,
    /// Maximum order of the pieces of free memory: 10 models an aged buddy allocator, and 0 makes every frame separate.
    pub max_piece_order: u32,
    /// Unscaled cost, in cycles, of switching to the next group of multiplexed counters on a CPU; 0 if counters are not
    /// read.
    pub counter_turn_cycles: u64,
    /// Length of the run before the measured part.
    pub warm_up: Option<RunLimit>,
    /// Length of the measured part; `None` if the run ends when no program is left.
    pub ends: Option<RunLimit>,
}

impl Default for SimOptions {
    fn default() -> Self {
        SimOptions {
            seed: 1,
            scale: 1,
            scheduler: SchedulerKind::default(),
            prefetch: true,
            is_resident: false,
            max_piece_order: 10,
            counter_turn_cycles: 0,
            warm_up: None,
            ends: None,
        }
    }
}

/// A function that builds the threads of a program's `n`th run, from 0.
pub type ThreadBuilder = Box<dyn FnMut(u32) -> Vec<Box<dyn AccessSource>> + Send>;

/// Memory that several programs map at the same virtual address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedMemory {
    /// Number of the segment, which programs that share it have in common.
    pub segment: u32,
    /// Virtual address of the first byte; the segment begins at the start of that byte's page.
    pub first_byte: u64,
    /// Length in bytes; the segment ends with the page of the last byte.
    pub bytes: u64,
}

/// One process with its threads.
pub struct SimProgram {
    /// Name of the program's tasks; several programs may have the same name.
    pub name: String,
    /// Function that builds the program's threads, called for every run of the program.
    pub build_threads: ThreadBuilder,
    /// Simulated time at which the program starts, in unscaled nanoseconds.
    pub start_ns: u64,
    /// Whether the program starts again when all its threads have ended.
    pub restarts: bool,
    /// CPUs to which the owner has pinned the program, so that no policy may move it.
    pub pinned_cpus: Option<CpuSet>,
    /// The owner's goal; `None` if there is none.
    pub goal: Option<Goal>,
    /// Segments of the address space that the program shares with others.
    pub shared_memory: Vec<SharedMemory>,
}

impl SimProgram {
    /// Builds a program that starts at once and may run on any CPU.
    pub fn new(name: impl Into<String>, build_threads: ThreadBuilder) -> Self {
        let name = name.into();
        SimProgram {
            name,
            build_threads,
            start_ns: 0,
            restarts: false,
            pinned_cpus: None,
            goal: None,
            shared_memory: Vec::new(),
        }
    }
}

/// The conversions between nominal time, which plans and observations use, and cycles of the simulated machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NominalClock {
    /// Clock frequency of the cores.
    pub hertz: u64,
    /// Time scale of the run ([`SimOptions::scale_down`]), at least 1.
    pub scale: u64,
}

impl NominalClock {
    /// Builds the conversions; a scale of 0 counts as 1.
    pub fn new(spec: &MachineSpec, scale: u64) -> Self {
        NominalClock {
            hertz: spec.hertz,
            scale: scale.max(1),
        }
    }
    /// Nanoseconds, for which the scale is multiplied back.
    pub fn to_nominal_ns(&self, cycles: u64) -> u64 {
        (u128::from(cycles) * 1_000_000_000 * u128::from(self.scale) / u128::from(self.hertz))
            as u64
    }
    /// Any time takes at least one cycle.
    pub fn to_cycles(&self, nominal_ns: u64) -> u64 {
        let cycles = u128::from(nominal_ns) * u128::from(self.hertz)
            / 1_000_000_000
            / u128::from(self.scale);
        cycles.clamp(1, u128::from(u64::MAX / 4)) as u64
    }
    /// Cycles of a time that the scale does not divide.
    pub fn to_unscaled_cycles(&self, ns: u64) -> u64 {
        (u128::from(ns) * u128::from(self.hertz) / 1_000_000_000) as u64
    }
    /// Divides a cost or count from the specification or a plan by the run's scale. The result is at least one, unless
    /// the amount was zero.
    pub fn scale_down(&self, amount: u64) -> u64 {
        amount.div_ceil(self.scale)
    }
}
