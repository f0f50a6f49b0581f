//! The setup of a simulated run: options, programs, and length.

use cachemate_core::{AccessSource, CpuSet, Goal, MachineSpec};
use serde::{Deserialize, Serialize};

use crate::os::schedulers::SchedulerKind;

/// Choices that belong to the run, not to the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SimOptions {
    /// Frames, caches with random replacement, and jitter come from it.
    pub seed: u64,
    /// The one time scale (1 = as published): windows, slices, and the operating system's and interrupts' costs that a
    /// plan or the machine's specification names are divided by it. Entries of a trace and samples are not: each costs
    /// an interrupt, so with its cost scaled so many of them take the published share of the time. Times that the
    /// machine reports in nanoseconds are multiplied by it again, so that a policy sees the published scale; counts and
    /// cycles are reported as they are.
    pub scale: u64,
    /// Decides wherever a plan says nothing.
    pub scheduler: SchedulerKind,
    /// False switches every hardware prefetcher off.
    pub prefetch: bool,
    /// True: programs begin with their memory resident, as they have it after minutes. The first touch of a page takes no
    /// fault, and the first miss on a line counts as one on a line that its thread had before.
    #[serde(default)]
    pub is_resident: bool,
    /// Largest order of the pieces that free memory is in: 10 = an aged buddy allocator, 0 = every frame on its own.
    pub max_piece_order: u32,
    /// Published cost of a switch of the counters on a CPU if events are multiplexed; 0 if they are not read.
    pub counter_turn_cycles: u64,
    /// Before the measured part.
    pub warm_up: Option<RunLimit>,
    /// Length of the measured part; `None` = until nothing is left to run.
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

/// When a run is over; not scaled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunLimit {
    /// Simulated cycles.
    Cycles(u64),
    /// Simulated nanoseconds.
    Ns(u64),
    /// Instructions of all programs together.
    Instructions(u64),
    /// The run lasts until every program has ended this often.
    Completions(u32),
}

/// Builds the threads of a program's `n`th run (0 first).
pub type Maker = Box<dyn FnMut(u32) -> Vec<Box<dyn AccessSource>> + Send>;

/// Memory that several programs map at the same virtual place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedMemory {
    /// Programs that name the same number share it.
    pub number: u32,
    /// Virtual address; the segment begins with its page.
    pub first_byte: u64,
    /// The segment ends with the page of the last byte.
    pub bytes: u64,
}

/// One process and its threads.
pub struct SimProgram {
    /// Name of its tasks; several programs may have the same.
    pub name: String,
    /// Called for every run of the program.
    pub maker: Maker,
    /// Simulated time, not scaled.
    pub start_ns: u64,
    /// Starts again when all its threads have ended.
    pub restart: bool,
    /// Pinned there by its owner: no policy may move it.
    pub pinned: Option<CpuSet>,
    /// The owner's goal; `None` if there is none.
    pub goal: Option<Goal>,
    /// Segments of its address space that it does not have for itself.
    pub shared: Vec<SharedMemory>,
}

impl SimProgram {
    /// Starts at once, runs anywhere.
    pub fn new(name: impl Into<String>, maker: Maker) -> Self {
        let name = name.into();
        SimProgram { name, maker, start_ns: 0, restart: false, pinned: None, goal: None, shared: Vec::new() }
    }
}

/// Conversions between nominal time, which plans and observations use, and cycles of the simulated machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NominalClock {
    /// Clock of the cores.
    pub hertz: u64,
    /// [`SimOptions::scale`], 1 or more.
    pub scale: u64,
}

impl NominalClock {
    /// A scale of 0 counts as 1.
    pub fn new(spec: &MachineSpec, scale: u64) -> Self {
        NominalClock { hertz: spec.hertz, scale: scale.max(1) }
    }
    /// Nominal nanoseconds of so many simulated cycles.
    pub fn nominal_ns(&self, cycles: u64) -> u64 {
        (u128::from(cycles) * 1_000_000_000 * u128::from(self.scale) / u128::from(self.hertz)) as u64
    }
    /// Simulated cycles of so many nominal nanoseconds, at least one.
    pub fn cycles(&self, nominal_ns: u64) -> u64 {
        let cycles = u128::from(nominal_ns) * u128::from(self.hertz) / 1_000_000_000 / u128::from(self.scale);
        cycles.clamp(1, u128::from(u64::MAX / 4)) as u64
    }
    /// Simulated cycles of unscaled time.
    pub fn unscaled_cycles(&self, ns: u64) -> u64 {
        (u128::from(ns) * u128::from(self.hertz) / 1_000_000_000) as u64
    }
    /// A cost or count that the specification or a plan names, at the run's scale: at least one, unless it was none.
    pub fn scale(&self, amount: u64) -> u64 {
        amount.div_ceil(self.scale)
    }
}
