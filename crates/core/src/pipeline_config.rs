//! The configuration of the pipeline between a machine and a plan. A run log's header contains it, so that a replay
//! builds the same pipeline.

use serde::{Deserialize, Serialize};

use crate::{CacheLevel, Profile, WindowLength};

/// Everything that a pipeline is built from, except the machine's topology and capabilities.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipelineConfig {
    /// The policy that decides.
    pub policy: PolicyConfig,
    /// The guard that rolls back decisions that slow programs down; `None` for no guard.
    pub guard: Option<GuardConfig>,
    /// The profilers that turn observations into profiles, in order.
    pub profilers: Vec<ProfilerConfig>,
    /// The predictor that scores every plan.
    pub predictor: PredictorConfig,
    /// Length of the window before the policy's first plan.
    pub first_window: WindowLength,
}

/// A policy from the registry.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyConfig {
    /// Name of the policy in the registry.
    pub name: String,
    /// Parameters of the policy as given (TOML); empty for all defaults.
    pub parameters: String,
    /// Seed of its random draws.
    pub seed: u64,
}

/// How the guard combines the speeds of several programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuardObjective {
    /// The mean of the logarithms of the speeds, weighted by priority: a doubling offsets a halving.
    #[default]
    MeanLogSpeed,
    /// The program that lost the most speed.
    WorstProcessSpeed,
}

/// The roll-back guard's settings.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuardConfig {
    /// Windows before and after a change that are compared; at least 2.
    pub trial_windows: u32,
    /// Smallest loss, as a fraction, that causes a roll-back.
    pub min_loss: f64,
    /// Windows of the first cooldown of a plan that was rolled back.
    pub cooldown_windows: u32,
    /// How the guard combines the speeds of several programs.
    #[serde(default)]
    pub objective: GuardObjective,
    /// Must the first change wait until a reference was measured? Set on live hosts, whose initial state no policy
    /// chose.
    #[serde(default)]
    pub waits_for_reference: bool,
}

impl Default for GuardConfig {
    fn default() -> Self {
        let objective = GuardObjective::default();
        GuardConfig {
            trial_windows: 5,
            min_loss: 0.03,
            cooldown_windows: 60,
            objective,
            waits_for_reference: false,
        }
    }
}

/// The reference predictor's settings.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PredictorConfig {
    /// Cycles per last-level miss of a task that has no stall curve.
    pub miss_penalty_cycles: f64,
    /// Source of that number: the machine file, or a measurement with its figures.
    pub miss_penalty_source: String,
}

/// One profiler with its settings.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "profiler", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ProfilerConfig {
    /// Phase changes; first in order, because it drops the evidence of the previous phase.
    Phases {
        /// Level of the contended cache.
        level: CacheLevel,
        /// Parameters of the detection.
        parameters: PhaseParameters,
        /// Instructions that make one interval.
        interval_instructions: f64,
    },
    /// Running averages of counters.
    Counters {
        /// Level of the contended cache.
        level: CacheLevel,
        /// Instructions that a reading must cover to count.
        min_instructions: f64,
    },
    /// Miss rates at partial cache sizes, from sets of tasks that ran together (CASC).
    CoRunRows {
        /// Level of the contended cache.
        level: CacheLevel,
        /// Thresholds of the measurement.
        parameters: CoRunRowParameters,
    },
    /// Solo speeds, from rows with a single task.
    SoloIntervals {
        /// Level of the contended cache.
        level: CacheLevel,
    },
    /// Shared regions, from sampled accesses (TC).
    Sharing {
        /// Counters and regions.
        parameters: ShMapParameters,
        /// Is one filter used for all processes, keyed by physical line?
        machine_wide: bool,
    },
    /// Activity vectors (AV).
    Activity,
    /// Slowdowns caused and suffered beside a calibrated neighbor.
    CoRunSlowdown,
    /// Evicted lines.
    PrimeProbe,
    /// Curves from traces of misses (RapidMRC).
    MissTrace {
        /// The traced cache.
        cache: TracedCache,
        /// Use the settings of the thesis instead of the survival curve?
        #[serde(default)]
        follows_thesis: bool,
    },
    /// Curves and histograms from watched locations.
    Reuse {
        /// Level of the contended cache.
        level: CacheLevel,
        /// Replacement model of that cache.
        replacement: ReplacementModel,
        /// Unit of reuse.
        line_bytes: u64,
        /// Sizes of the curve's points.
        sizes_bytes: Vec<u64>,
        /// Do the watchpoints cover code fetches as well?
        includes_code: bool,
    },
    /// Stall curves from counters at the occupied sizes.
    Stalls {
        /// Geometry of the contended cache.
        cache: TracedCache,
    },
    /// Curves of misses from counters at the occupied sizes.
    SizeSweep {
        /// Geometry of the contended cache.
        cache: TracedCache,
        /// Instructions that a window must cover to count.
        min_instructions: f64,
    },
    /// Profiles that an experiment supplies, in order of the tasks' arrival.
    Oracle {
        /// One profile for each of the first tasks.
        profiles: Vec<Profile>,
    },
    /// Profiles recorded earlier, whose programs were recognized; last in order, because they only fill gaps that no
    /// measurement filled.
    Stored,
}

/// Phase detection (thesis 5.6.2).
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct PhaseParameters {
    /// Number of preceding intervals (w in the thesis) with whose mean the current interval is compared.
    pub history: usize,
    /// The difference above which there is a phase change, in the signal's unit.
    pub threshold: f64,
    /// The fraction of the threshold at which a transition begins and ends.
    pub edge_share: f64,
}

impl Default for PhaseParameters {
    fn default() -> Self {
        PhaseParameters {
            history: 3,
            threshold: 3.0,
            edge_share: 0.5,
        }
    }
}

/// CASC's parameters (CASC 4.2), and a factor for both of its times.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct CoRunRowParameters {
    /// Intervals shorter than this are cold starts.
    pub min_interval_ns: f64,
    /// MIN_RUNLENGTH: the time to collect for each row, and for each newcomer.
    pub min_total_ns: f64,
    /// A factor for both times.
    pub scale: f64,
    /// Use the members' own counts if the machine provides them?
    pub uses_task_counts: bool,
}

impl Default for CoRunRowParameters {
    fn default() -> Self {
        CoRunRowParameters {
            min_interval_ns: 200_000.0,
            min_total_ns: 2_000_000.0,
            scale: 1.0,
            uses_task_counts: false,
        }
    }
}

/// Shared-region counters (TC 4.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ShMapParameters {
    /// Counters per thread, and entries of the filter.
    pub entries: usize,
    /// Unit of sharing; the line size avoids false sharing.
    pub region_bytes: u64,
}

impl Default for ShMapParameters {
    fn default() -> Self {
        ShMapParameters {
            entries: 256,
            region_bytes: 128,
        }
    }
}

/// The cache that curves refer to, and its partitioning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TracedCache {
    /// Level of the cache.
    pub level: CacheLevel,
    /// Total size of the cache.
    pub size_bytes: u64,
    /// Page colors; 1 if pages cannot be placed by color.
    pub colors: u32,
    /// Associativity.
    pub ways: u32,
    /// Number of points of a curve, at equal steps of size.
    pub points: u32,
}

/// The replacement policy that models of reuse assume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplacementModel {
    /// Least recently used (StatStack).
    Lru,
    /// Random (StatCache).
    Random,
}
