//! The standard pipeline of a machine: all profilers that apply to the machine's last-level cache.

use cachemate_core::{
    CacheLevel, Capabilities, CoRunRowParameters, GuardConfig, MachineSpec, PhaseParameters,
    PipelineConfig, PolicyConfig, PredictorConfig, ProfilerConfig, ReplacementModel,
    ShMapParameters, Topology, TracedCache, WindowLength,
};

/// Inputs of a standard pipeline besides the machine.
pub struct StandardPipeline {
    /// The policy that decides.
    pub policy: PolicyConfig,
    /// Configuration of the verifier's guard; `None` disables the guard.
    pub guard: Option<GuardConfig>,
    /// Number of instructions over which counter readings are averaged: about one second of work at a low rate, in
    /// the machine's own time scale.
    pub counted_instructions: f64,
    /// Cost of a miss, and the source of this figure.
    pub predictor: PredictorConfig,
    /// Whether watch points cover instruction fetches as well as data. On simulated machines they do; on processors
    /// they do not.
    pub watches_code: bool,
    /// Length of the windows until the policy's first plan.
    pub first_window: WindowLength,
}

/// Latency of memory beyond that of a hit.
pub fn miss_penalty_of_machine(spec: &MachineSpec) -> PredictorConfig {
    let hit_cycles = spec
        .last_level_cache()
        .map_or(0, |cache| cache.latency_cycles);
    let penalty_cycles = spec.memory.local_latency_cycles.saturating_sub(hit_cycles);
    let miss_penalty_source = format!(
        "machine file of {}: memory beyond a hit of the last level",
        spec.name
    );
    PredictorConfig {
        miss_penalty_cycles: f64::from(penalty_cycles),
        miss_penalty_source,
    }
}

/// Cycles of a simulated machine's window before the policy's first plan, at the published scale.
const FIRST_WINDOW_CYCLES: u64 = 100_000_000;

/// [`StandardPipeline::counted_instructions`] of the cycle-level machine, at the published scale.
pub const CYCLE_COUNTED_INSTRUCTIONS: f64 = 1e6;

/// [`StandardPipeline::counted_instructions`] of the interval machine, in nominal time.
pub const INTERVAL_COUNTED_INSTRUCTIONS: f64 = 1e8;

impl StandardPipeline {
    /// What all simulated machines have in common.
    pub fn for_simulation(
        policy: PolicyConfig,
        is_guarded: bool,
        spec: &MachineSpec,
        counted_instructions: f64,
    ) -> Self {
        StandardPipeline {
            policy,
            guard: is_guarded.then(GuardConfig::default),
            counted_instructions,
            predictor: miss_penalty_of_machine(spec),
            watches_code: true,
            first_window: WindowLength::Cycles {
                cycles: FIRST_WINDOW_CYCLES,
            },
        }
    }

    /// Builds the pipeline for a machine. Phase detection comes first, because it discards older evidence; stored
    /// profiles come last, because they fill in facts that were not measured. Profilers without evidence on this
    /// machine are left out only if they would cost something.
    pub fn for_machine(self, topology: &Topology, capabilities: &Capabilities) -> PipelineConfig {
        let last_level = topology.last_level_caches().next();
        let level = last_level.map_or(CacheLevel::L2, |cache| cache.level);
        let counted_instructions = self.counted_instructions;

        let mut profilers = vec![
            ProfilerConfig::Phases {
                level,
                parameters: PhaseParameters::default(),
                interval_instructions: 10.0 * counted_instructions,
            },
            ProfilerConfig::Counters {
                level,
                min_instructions: counted_instructions,
            },
            ProfilerConfig::CoRunRows {
                level,
                parameters: CoRunRowParameters::default(),
            },
            ProfilerConfig::SoloIntervals { level },
            ProfilerConfig::Sharing {
                parameters: ShMapParameters::default(),
                machine_wide: false,
            },
            ProfilerConfig::Activity,
            ProfilerConfig::CoRunSlowdown,
            ProfilerConfig::PrimeProbe,
        ];

        if let Some((size_bytes, ways)) =
            last_level.and_then(|cache| Some((cache.size_bytes?, cache.ways?)))
        {
            let colors = capabilities
                .partitions
                .iter()
                .find_map(|(_, partition)| partition.colors())
                .unwrap_or(1);
            let cache = TracedCache {
                level,
                size_bytes,
                colors,
                ways,
                points: colors.max(ways).max(16),
            };
            let line_bytes = last_level
                .and_then(|cache| cache.line_bytes)
                .map_or(64, u64::from);

            let point_count = u64::from(cache.points);
            profilers.push(ProfilerConfig::Stalls { cache });
            profilers.push(ProfilerConfig::Reuse {
                level,
                replacement: ReplacementModel::Lru,
                line_bytes,
                sizes_bytes: (1..=point_count)
                    .map(|step| size_bytes * step / point_count)
                    .collect(),
                includes_code: self.watches_code,
            });
            profilers.push(ProfilerConfig::MissTrace {
                cache,
                follows_thesis: false,
            });
        }

        profilers.push(ProfilerConfig::Stored);
        PipelineConfig {
            policy: self.policy,
            guard: self.guard,
            profilers,
            predictor: self.predictor,
            first_window: self.first_window,
        }
    }
}

/// Adds miss-rate curves that are measured by varying the sizes of tasks' shares. Hosts need this because they
/// provide no exact curves. The profiler comes before the stored profiles, which fill in facts that were not
/// measured.
pub fn with_size_sweeps(mut config: PipelineConfig, min_instructions: f64) -> PipelineConfig {
    let stall_cache = |profiler: &ProfilerConfig| match profiler {
        ProfilerConfig::Stalls { cache } => Some(*cache),
        _ => None,
    };
    if let Some(cache) = config.profilers.iter().find_map(stall_cache) {
        let stored_index = config
            .profilers
            .iter()
            .position(|profiler| *profiler == ProfilerConfig::Stored);
        let position = stored_index.unwrap_or(config.profilers.len());
        config.profilers.insert(
            position,
            ProfilerConfig::SizeSweep {
                cache,
                min_instructions,
            },
        );
    }
    config
}
