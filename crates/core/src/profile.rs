//! Profiles of tasks as groups of facts, and a predictor's forecast for a task under a plan.
//!
//! A policy combines evidence of very different age and worth: a curve from a recording, a rate of
//! the last window, an intensity from a probe of an hour ago. So each value is a [`Fact`], which
//! carries its error, its source and its window, and the policy decides what it is worth.
//!
//! For example, of a task that has just arrived, a stored profile knows the curve (source: stored,
//! window 0), and the counters of this window the misses per thousand instructions. A policy that
//! trusts counters more sees that the curve says 4 where 9 are counted, and can ask for a new one.
//!
//! A new measurement needs only one new line in one group; filling from stored profiles, listings
//! and phase changes are derived from it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::fact::facts;
use crate::{
    CacheId, CacheLevel, Estimate, Fact, FactOrigin, FactSource, Facts, Observation, Plan,
    ProcessId, SuperSetCount, TaskId, View,
};

/// A quantity by cache size in bytes, in ascending order of size; each point has its interval.
pub type SizeCurve = Vec<(u64, Estimate)>;

/// Fraction of accesses by reuse time: log-spaced buckets (upper bound in accesses, weight); `None` is the bucket of
/// cold accesses.
pub type ReuseHistogram = Vec<(Option<u64>, f64)>;

facts! {
    /// Facts about the task's use of space.
    pub struct LocalityFacts {
        /// Misses per thousand instructions by size, for each measured level.
        pub misses_per_kilo_instr: BTreeMap<CacheLevel, Fact<SizeCurve>>,
        /// Stalled cycles per thousand instructions by size, for each level (CP-4).
        pub stalls_per_kilo_instr: BTreeMap<CacheLevel, Fact<SizeCurve>>,
        /// Reuse times of the accesses that reach the last level.
        pub reuse_times: Option<Fact<ReuseHistogram>>,
        /// LRU stack positions 1..=ways, then misses, per million instructions (SDC, Animal, Pain).
        pub stack_positions: Option<Fact<Vec<f64>>>,
        /// Accesses and misses per super set, by level (AV).
        pub activity: BTreeMap<CacheLevel, Fact<Vec<SuperSetCount>>>,
    }
}

facts! {
    /// Facts about the task's speed and demand.
    pub struct RateFacts {
        /// Speed alone on the machine.
        pub solo_instr_per_cycle: Option<Fact<f64>>,
        /// Last-level misses measured while the task was alone on the machine.
        pub solo_misses_per_kilo_instr: Option<Fact<f64>>,
        /// References to the last level.
        pub llc_refs_per_mega_instr: Option<Fact<f64>>,
        /// Running average of last-level misses beside whatever co-runners it had (DIO), so not a property of the task
        /// alone.
        pub observed_misses_per_kilo_instr: Option<Fact<f64>>,
        /// Bytes read from memory, including prefetches, averaged likewise.
        pub observed_read_bytes_per_kilo_instr: Option<Fact<f64>>,
        /// Speed, averaged likewise.
        pub observed_instr_per_cycle: Option<Fact<f64>>,
        /// Misses per 100 references with part of the cache (CASC).
        pub pcmr: Option<Fact<f64>>,
        /// Share of cycles stalled on lines of other caches (TC).
        pub remote_stall_share: Option<Fact<f64>>,
    }
}

facts! {
    /// Facts from probes about how much the task and its co-runners slow each other down, for hosts without a PMU.
    pub struct ContentionFacts {
        /// Share of a full cache that the task evicts while the probe waits, from 0 to 1.
        pub intensity: Option<Fact<f64>>,
        /// Run time beside a full stream over run time without it, minus one.
        pub sensitivity: Option<Fact<f64>>,
        /// Run time of the calibrated neighbor beside the task over its run time alone, minus one.
        pub neighbor_slowdown: Option<Fact<f64>>,
    }
}

/// Counters of shared regions (TC: shMap).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SharingMap {
    /// One saturating counter per region.
    pub counters: Vec<u8>,
    /// Do the counters belong to one filter for the whole machine (regions by physical line), so that they are
    /// comparable across processes?
    pub machine_wide: bool,
}

facts! {
    /// The data that the task shares, and its partners.
    pub struct SharingFacts {
        /// The regions that it reads from other caches.
        pub map: Option<Fact<SharingMap>>,
        /// Share of its remote accesses that go to lines of each other task.
        pub with: BTreeMap<TaskId, Fact<f64>>,
    }
}

facts! {
    /// The phase of the task.
    pub struct PhaseFacts {
        /// The current kind among the phases observed so far; recurring phases have the same kind.
        pub kind: Option<Fact<u32>>,
    }
}

/// The facts about one task. Every fact may be missing; a profiler sets its own facts and leaves the rest.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Profile {
    /// The process whose address space it runs in, from which the profiles show the shares of processes; set by
    /// [`ProfilerChain`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessId>,
    /// Incremented at each phase change, which drops the evidence of older phases.
    pub phase_number: u32,
    /// Use of space.
    pub locality: LocalityFacts,
    /// Speed and demand.
    pub rates: RateFacts,
    /// Mutual slowdown with co-runners.
    pub contention: ContentionFacts,
    /// Shared data.
    pub sharing: SharingFacts,
    /// Current phase.
    pub phase: PhaseFacts,
}

impl Facts for Profile {
    fn list_origins(&self, field: &str, window: u64, origins: &mut Vec<FactOrigin>) {
        self.locality.list_origins(field, window, origins);
        self.rates.list_origins(field, window, origins);
        self.contention.list_origins(field, window, origins);
        self.sharing.list_origins(field, window, origins);
        self.phase.list_origins(field, window, origins);
    }
    fn fill_missing(&mut self, source: &Self) {
        self.locality.fill_missing(&source.locality);
        self.rates.fill_missing(&source.rates);
        self.contention.fill_missing(&source.contention);
        self.sharing.fill_missing(&source.sharing);
        self.phase.fill_missing(&source.phase);
    }
    fn merge_newer(&mut self, source: &Self) {
        self.locality.merge_newer(&source.locality);
        self.rates.merge_newer(&source.rates);
        self.contention.merge_newer(&source.contention);
        self.sharing.merge_newer(&source.sharing);
        self.phase.merge_newer(&source.phase);
    }
    fn restamp(&mut self, source: FactSource, window: u64) {
        self.locality.restamp(source, window);
        self.rates.restamp(source, window);
        self.contention.restamp(source, window);
        self.sharing.restamp(source, window);
        self.phase.restamp(source, window);
    }
}

impl Profile {
    /// Origins of all facts, as of this window.
    pub fn origins(&self, window: u64) -> Vec<FactOrigin> {
        let mut origins = Vec::new();
        self.list_origins("", window, &mut origins);
        origins
    }

    /// The curve at the level nearest to memory, if there are several.
    pub fn misses_per_kilo_instr(&self) -> Option<&SizeCurve> {
        outermost_curve(&self.locality.misses_per_kilo_instr)
    }

    /// The curve at the level nearest to memory, if there are several.
    pub fn stalls_per_kilo_instr(&self) -> Option<&SizeCurve> {
        outermost_curve(&self.locality.stalls_per_kilo_instr)
    }

    /// Only of accesses that reach the last level.
    pub fn reuse_times(&self) -> Option<&ReuseHistogram> {
        self.locality.reuse_times.as_ref().map(|fact| &fact.value)
    }

    /// Hits by LRU stack position, then misses, per million instructions.
    pub fn stack_positions(&self) -> Option<&[f64]> {
        self.locality
            .stack_positions
            .as_ref()
            .map(|fact| fact.value.as_slice())
    }

    /// `None` if no accesses were sampled.
    pub fn sharing_map(&self) -> Option<&SharingMap> {
        self.sharing.map.as_ref().map(|fact| &fact.value)
    }

    /// Replaces an earlier curve of `level`.
    #[must_use]
    pub fn with_misses(mut self, level: CacheLevel, points: SizeCurve, source: FactSource) -> Self {
        self.locality
            .misses_per_kilo_instr
            .insert(level, Fact::new(points, source, 0));
        self
    }

    /// Replaces an earlier curve of `level`.
    #[must_use]
    pub fn with_stalls(mut self, level: CacheLevel, points: SizeCurve, source: FactSource) -> Self {
        self.locality
            .stalls_per_kilo_instr
            .insert(level, Fact::new(points, source, 0));
        self
    }

    /// Replaces the rates; the other groups are unchanged.
    #[must_use]
    pub fn with_rates(mut self, rates: RateFacts) -> Self {
        self.rates = rates;
        self
    }
}

fn outermost_curve(curves: &BTreeMap<CacheLevel, Fact<SizeCurve>>) -> Option<&SizeCurve> {
    curves.values().next_back().map(|fact| &fact.value)
}

/// The profile of each task.
pub type Profiles = BTreeMap<TaskId, Profile>;

/// A predictor's forecast for one task.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TaskForecast {
    /// Run time over solo run time, minus one.
    pub degradation: Option<Estimate>,
    /// Misses of the last level.
    pub misses_per_kilo_instr: Option<Estimate>,
    /// Instructions per cycle while on CPU.
    pub instr_per_cycle: Option<Estimate>,
    /// Share of one CPU's time.
    pub cpu_share: Option<Estimate>,
}

/// The model that made a forecast.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForecastModel {
    /// The pipeline's reference predictor.
    #[default]
    Reference,
    /// The policy's own model, by which it decided.
    Policy,
}

impl ForecastModel {
    fn is_reference(&self) -> bool {
        *self == ForecastModel::Reference
    }
}

/// A forecast of a plan, over the next full rotation of all gangs.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Forecast {
    /// The model that made the forecast.
    #[serde(default, skip_serializing_if = "ForecastModel::is_reference")]
    pub model: ForecastModel,
    /// The tasks that can be forecast.
    pub tasks: BTreeMap<TaskId, TaskForecast>,
    /// Misses over references of each last-level cache.
    pub cache_miss_ratio: BTreeMap<CacheId, Estimate>,
    /// Tasks without enough evidence for a forecast.
    pub unknown: Vec<TaskId>,
}

/// Kinds of evidence that machines provide, profilers need, and policies request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvidenceKind {
    /// Counters of each task.
    TaskCounters,
    /// Stalled cycles by cause.
    StallCounters,
    /// Sets of tasks that ran together, with the shared cache's counters.
    CoRunRows,
    /// Traces of misses of the first level.
    MissTraces,
    /// Samples of data accesses.
    AccessSamples,
    /// Watched locations.
    ReuseSamples,
    /// Super-set counters.
    SuperSets,
    /// Prime, wait and reload.
    PrimeProbe,
    /// A calibrated neighbor.
    Neighbor,
    /// Profiles recorded earlier.
    StoredProfiles,
}

/// A profiler turns raw observations into profiles. It is pure: the same observations give the same profiles.
pub trait Profiler {
    /// Name in messages, and the evidence without which the profiler never has a result.
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>);
    /// Updates its own fields, adds tasks that arrived, and removes tasks that exited.
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles);
}

/// The last step of profiling, which completes measured profiles with facts recalled from earlier. It is pure, and
/// separate from the profilers because the next window must not mistake recalled facts for measured ones.
pub trait ProfileRecall {
    /// Observes a window and returns the profiles with recalled facts, or `None` if there is nothing to recall.
    fn recall(&mut self, observation: &Observation, measured: &Profiles) -> Option<Profiles>;
}

/// Profilers in their order, and the recall after them: the step between observations and a policy.
#[derive(Default)]
pub struct ProfilerChain {
    /// Run in this order after every window; each adds to the profiles.
    pub profilers: Vec<Box<dyn Profiler>>,
    /// Completes the profiles for the policy; `None` if the policy gets them as measured.
    pub recall: Option<Box<dyn ProfileRecall>>,
    measured_profiles: Profiles,
    recalled_profiles: Option<Profiles>,
}

impl ProfilerChain {
    /// Profilers that have observed nothing yet.
    pub fn new(profilers: Vec<Box<dyn Profiler>>, recall: Option<Box<dyn ProfileRecall>>) -> Self {
        ProfilerChain {
            profilers,
            recall,
            ..ProfilerChain::default()
        }
    }

    /// Passes one more window to the profilers, and returns the updated profiles: measured facts, then recalled ones.
    pub fn update(&mut self, observation: &Observation) -> &Profiles {
        for profiler in &mut self.profilers {
            profiler.update(observation, &mut self.measured_profiles);
        }
        for task in &observation.tasks {
            if let Some(profile) = self.measured_profiles.get_mut(&task.task) {
                profile.process = Some(task.process);
            }
        }
        self.recalled_profiles = self
            .recall
            .as_mut()
            .and_then(|recall| recall.recall(observation, &self.measured_profiles));
        self.profiles()
    }

    /// After the last window, as a policy receives them.
    pub fn profiles(&self) -> &Profiles {
        self.recalled_profiles
            .as_ref()
            .unwrap_or(&self.measured_profiles)
    }
}

/// A predictor forecasts the effect of a plan before it is tried. It is pure.
pub trait Predictor {
    /// Forecasts the tasks of the view under a plan; the view contains the machine's abilities and the state in force.
    fn forecast(&self, view: &View<'_>, plan: &Plan) -> Forecast;
    /// Cycles per last-level miss of a task that has no stall curve; `None` if the predictor has no
    /// such number.
    fn miss_penalty_cycles(&self) -> Option<f64> {
        None
    }
}
