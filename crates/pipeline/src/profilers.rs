//! Construction of profilers from their configurations; no other code builds profilers.

use cachemate_core::{Profiler, ProfilerConfig};
use cachemate_locality::profilers::{
    ActivityProfiler, CoRunSlowdownProfiler, CountersProfiler, PcmrProfiler, PhaseProfiler,
    PrimeProbeProfiler, RapidMrcProfiler, ReuseProfiler, SharingProfiler, SizeSweepProfiler,
    SoloIntervalProfiler, StallProfiler, StoredProfileProfiler,
};

use crate::oracle::OracleProfiler;

pub(crate) fn build_profiler(config: &ProfilerConfig) -> Box<dyn Profiler> {
    match config.clone() {
        ProfilerConfig::Phases {
            level,
            parameters,
            interval_instructions,
        } => Box::new(PhaseProfiler::new(level, parameters, interval_instructions)),
        ProfilerConfig::Counters {
            level,
            min_instructions,
        } => Box::new(CountersProfiler::new(level, min_instructions)),
        ProfilerConfig::CoRunRows { level, parameters } => {
            Box::new(PcmrProfiler::new(level, parameters))
        }
        ProfilerConfig::SoloIntervals { level } => Box::new(SoloIntervalProfiler::new(level)),
        ProfilerConfig::Sharing {
            parameters,
            machine_wide: is_machine_wide,
        } => {
            let profiler = SharingProfiler::new(parameters);
            Box::new(if is_machine_wide {
                profiler.with_cross_process_pages()
            } else {
                profiler
            })
        }
        ProfilerConfig::Activity => Box::new(ActivityProfiler),
        ProfilerConfig::CoRunSlowdown => Box::new(CoRunSlowdownProfiler::default()),
        ProfilerConfig::PrimeProbe => Box::new(PrimeProbeProfiler::default()),
        ProfilerConfig::MissTrace {
            cache,
            follows_thesis: false,
        } => Box::new(RapidMrcProfiler::new(cache)),
        ProfilerConfig::MissTrace {
            cache,
            follows_thesis: true,
        } => Box::new(RapidMrcProfiler::with_thesis_defaults(cache)),
        ProfilerConfig::Reuse {
            level,
            replacement,
            line_bytes,
            sizes_bytes,
            includes_code: of_code_too,
        } => {
            let profiler = ReuseProfiler::new(level, replacement, line_bytes, sizes_bytes);
            Box::new(if of_code_too {
                profiler.with_code()
            } else {
                profiler
            })
        }
        ProfilerConfig::Stalls { cache } => Box::new(StallProfiler::new(cache)),
        ProfilerConfig::SizeSweep {
            cache,
            min_instructions,
        } => Box::new(SizeSweepProfiler::new(cache, min_instructions)),
        ProfilerConfig::Oracle { profiles } => Box::new(OracleProfiler::new(profiles)),
        ProfilerConfig::Stored => Box::new(StoredProfileProfiler::default()),
    }
}
