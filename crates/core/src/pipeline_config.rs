//! The configuration of the pipeline between a machine and a plan. A run log's header contains it, so that a replay
//! builds the same pipeline.

use serde::{Deserialize, Serialize};

use crate::{CacheLevel, Profile, WindowLength};

/// Everything from which a pipeline is built, besides the machine's topology and capabilities.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipelineConfig {
    /// The policy that decides.
    pub policy: PolicyConfig,
    /// The guard that rolls back decisions that slow programs down; `None` if there is none.
    pub guard: Option<GuardConfig>,
    /// The profilers that turn observations into profiles, in order.
    pub profilers: Vec<ProfilerConfig>,
    /// The predictor that scores every plan.
    pub predictor: PredictorConfig,
    /// Window until the policy's first plan.
    pub first_window: WindowLength,
}

/// A policy of the registry.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyConfig {
    /// Its name in the registry.
    pub name: String,
    /// Its own parameters as given (TOML); empty = all defaults.
    pub parameters: String,
    /// Seed of what it draws.
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
    #[serde(alias = "worst-process")]
    WorstProcessSpeed,
}

/// The roll-back guard's settings.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuardConfig {
    /// Windows before and after a change that are compared; 2 or more.
    #[serde(alias = "windows")]
    pub trial_windows: u32,
    /// Smallest loss, as a share, for which a decision is rolled back.
    #[serde(alias = "loss_at_least")]
    pub min_loss: f64,
    /// Windows of the first cooldown of a plan that was rolled back.
    #[serde(alias = "keep_out_windows")]
    pub cooldown_windows: u32,
    /// How the guard combines the speeds of several programs.
    #[serde(default)]
    pub objective: GuardObjective,
    /// Whether the first change waits until a reference was measured; set on live hosts, whose initial state no policy
    /// chose.
    #[serde(default)]
    #[serde(alias = "wait_for_reference")]
    pub waits_for_reference: bool,
}

impl Default for GuardConfig {
    fn default() -> Self {
        let objective = GuardObjective::default();
        GuardConfig { trial_windows: 5, min_loss: 0.03, cooldown_windows: 60, objective, waits_for_reference: false }
    }
}

/// The reference predictor's settings.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PredictorConfig {
    /// Cycles that a miss of the last level costs a task without a curve of stalls.
    pub miss_penalty_cycles: f64,
    /// Source of that number: the machine file, or a measurement with its figures.
    #[serde(alias = "miss_penalty_from")]
    pub miss_penalty_source: String,
}

/// One profiler with its settings.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "profiler", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ProfilerConfig {
    /// Phase changes; first, as it drops the evidence of the phase before.
    Phases {
        /// Level of the contended cache.
        level: CacheLevel,
        /// Detection.
        parameters: PhaseParameters,
        /// Instructions that make one interval.
        interval_instructions: f64,
    },
    /// Running averages of counters.
    Counters {
        /// Level of the contended cache.
        level: CacheLevel,
        /// A reading counts once it covers this many instructions.
        #[serde(alias = "at_least_instructions")]
        min_instructions: f64,
    },
    /// Partial-cache miss rates from sets of tasks that ran together (CASC).
    CoRunRows {
        /// Level of the contended cache.
        level: CacheLevel,
        /// Thresholds of the measurement.
        parameters: CoRunRowParameters,
    },
    /// Solo speeds from rows of one task.
    SoloIntervals {
        /// Level of the contended cache.
        level: CacheLevel,
    },
    /// Shared regions from samples of accesses (TC).
    Sharing {
        /// Counters and regions.
        parameters: ShMapParameters,
        /// One filter for all processes, by physical line.
        #[serde(alias = "across_processes")]
        machine_wide: bool,
    },
    /// Activity vectors (AV).
    Activity,
    /// Slowdowns of and by a calibrated neighbor.
    CoRunSlowdown,
    /// Evicted lines.
    PrimeProbe,
    /// Curves from traces of misses (RapidMRC).
    MissTrace {
        /// The traced cache.
        cache: TracedCache,
        /// The thesis' own settings instead of the survival curve.
        #[serde(default)]
        #[serde(alias = "as_in_the_thesis")]
        follows_thesis: bool,
    },
    /// Curves and histograms from watched locations.
    Reuse {
        /// Level of the contended cache.
        level: CacheLevel,
        /// Replacement of that cache.
        replacement: ReplacementModel,
        /// Unit of reuse.
        line_bytes: u64,
        /// Sizes of the curve's points.
        sizes_bytes: Vec<u64>,
        /// Watch points see fetches of code as well.
        #[serde(alias = "of_code_too")]
        includes_code: bool,
    },
    /// Curves of stalls from counters at the sizes held.
    Stalls {
        /// Shape of the contended cache.
        cache: TracedCache,
    },
    /// Curves of misses from counters at the sizes held.
    SizeSweep {
        /// Shape of the contended cache.
        cache: TracedCache,
        /// A window counts once it covers this many instructions.
        #[serde(alias = "at_least_instructions")]
        min_instructions: f64,
    },
    /// Profiles that an experiment supplies, in order of the tasks' arrival.
    Oracle {
        /// One for each of the first tasks.
        profiles: Vec<Profile>,
    },
    /// Profiles recorded earlier and recognized; last, as it fills only what nothing measured.
    Stored,
}

/// Phase detection (thesis 5.6.2).
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct PhaseParameters {
    /// w: intervals that the present one is compared with (their mean).
    pub history: usize,
    /// A larger difference is a phase change; in the signal's unit.
    pub threshold: f64,
    /// A transition begins and ends at this share of the threshold.
    pub edge_share: f64,
}

impl Default for PhaseParameters {
    fn default() -> Self {
        PhaseParameters { history: 3, threshold: 3.0, edge_share: 0.5 }
    }
}

/// CASC's figures (CASC 4.2), and the run's scale for all of them.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct CoRunRowParameters {
    /// Shorter intervals are cold starts.
    #[serde(alias = "shortest_interval_ns")]
    pub min_interval_ns: f64,
    /// MIN_RUNLENGTH: what has to be collected of each row, and of each newcomer.
    #[serde(alias = "least_total_ns")]
    pub min_total_ns: f64,
    /// Both times are multiplied by this.
    pub scale: f64,
    /// Takes the members' own counts where the machine has them.
    #[serde(alias = "own_counts")]
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
    /// Counters per thread and entries of the filter.
    pub entries: usize,
    /// Unit of sharing; the line size avoids false sharing.
    pub region_bytes: u64,
}

impl Default for ShMapParameters {
    fn default() -> Self {
        ShMapParameters { entries: 256, region_bytes: 128 }
    }
}

/// The cache that curves refer to, and its partitioning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TracedCache {
    /// Level of the cache.
    pub level: CacheLevel,
    /// All of it.
    pub size_bytes: u64,
    /// Page colors; 1 where pages cannot be placed.
    pub colors: u32,
    /// Associativity.
    pub ways: u32,
    /// Number of points of a curve, at equal steps of size.
    pub points: u32,
}

/// Replacement, as models of reuse take it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplacementModel {
    /// Least recently used (StatStack).
    Lru,
    /// Random (StatCache).
    Random,
}
