//! Builders for tests: minimal machines, abilities, observations and views.

use std::collections::BTreeMap;

use crate::{
    Ability, AppliedPlan, Cache, CacheId, CacheLevel, CacheSpec, Capabilities, CoherenceSpec,
    CoreModel, Cpu, CpuId, Decision, Forecast, Inclusion, Machine, MachineError, MachineSpec,
    MemorySchedulingSpec, MemorySpec, Observation, OsSpec, PageSpec, PartitionSupport,
    PipelineConfig, Plan, PmuSpec, Policy, PolicyConfig, Predictor, PredictorConfig, ProcessId,
    Profiles, ReplacementPolicy, RunHeader, SetIndexing, Support, TaskId, TaskSample, TimeSpan,
    Topology, View, WindowEnd, WindowLength, WindowRecord, WritePolicy, check_plan,
};

pub mod alternating;

/// A topology of this number of online CPUs, each on its own core in one package, without caches.
pub fn topology_fixture(cpus: u32) -> Topology {
    let cpu = |id| Cpu {
        id: CpuId(id),
        core: id,
        package: 0,
        memory_node: 0,
        online: true,
        hertz: None,
    };
    Topology {
        cpus: (0..cpus).map(cpu).collect(),
        ..Topology::default()
    }
}

/// `caches` last-level caches of `cpus_each` CPUs, with 16 ways and 64-byte lines.
pub fn last_level_caches(
    caches: u32,
    cpus_each: u32,
    level: CacheLevel,
    size_bytes: u64,
) -> Topology {
    let cache = |id: u32| Cache {
        id: CacheId(id),
        level,
        cpus: (id * cpus_each..(id + 1) * cpus_each).collect(),
        last_level: true,
        size_bytes: Some(size_bytes),
        ways: Some(16),
        line_bytes: Some(64),
    };
    Topology {
        caches: (0..caches).map(cache).collect(),
        ..topology_fixture(caches * cpus_each)
    }
}

/// Capabilities with these abilities and no cache partitions.
pub fn capabilities_fixture(abilities: &[Ability]) -> Capabilities {
    Capabilities {
        abilities: abilities
            .iter()
            .map(|&ability| (ability, Support::Yes { note: None }))
            .collect(),
        partitions: Vec::new(),
        bandwidth: Vec::new(),
        min_window_ns: 1,
        min_slice_ns: None,
    }
}

impl Capabilities {
    /// In addition to those that can be partitioned already.
    #[must_use]
    pub fn with_partition(mut self, cache: CacheId, partition: PartitionSupport) -> Self {
        self.partitions.push((cache, partition));
        self
    }
}

/// A pipeline with the named policy without parameters, no guard and no profilers.
pub fn pipeline_config(policy: &str) -> PipelineConfig {
    PipelineConfig {
        policy: PolicyConfig {
            name: policy.into(),
            parameters: String::new(),
            seed: 0,
        },
        guard: None,
        profilers: Vec::new(),
        predictor: PredictorConfig {
            miss_penalty_cycles: 100.0,
            miss_penalty_source: "a test".into(),
        },
        first_window: WindowLength::Time { ns: 1 },
    }
}

/// The first line of a recording of such a machine. The writer of run logs fills in its format.
pub fn run_header(
    topology: Topology,
    capabilities: Capabilities,
    pipeline: PipelineConfig,
) -> RunHeader {
    RunHeader {
        format: 0,
        topology,
        capabilities,
        pipeline,
    }
}

/// A window of one second with this number of tasks, each in its own process.
pub fn observation_fixture(window: u64, tasks: u32) -> Observation {
    observation_of(
        window,
        1_000_000_000,
        (0..tasks).map(|id| TaskSample::new(TaskId(id), ProcessId(id))),
    )
}

/// A window of this length with these tasks, in a row of equal windows.
pub fn observation_of(
    window: u64,
    window_ns: u64,
    tasks: impl IntoIterator<Item = TaskSample>,
) -> Observation {
    Observation {
        window,
        span: TimeSpan {
            start_ns: window * window_ns,
            elapsed_ns: window_ns,
            elapsed_cycles: None,
        },
        end_reason: WindowEnd::Elapsed,
        tasks: tasks.into_iter().collect(),
        shared_counts: Vec::new(),
        probe_results: Vec::new(),
        applied: AppliedPlan::default(),
    }
}

/// The record of a window with this observation, in which an idle plan was decided and nothing was forecast.
pub fn record_fixture(observation: Observation) -> WindowRecord {
    WindowRecord {
        observation,
        decision: Decision::new(Plan::idle(WindowLength::Time { ns: 1 }), Vec::new()),
        forecast: Forecast::default(),
        applied: AppliedPlan::default(),
        forecast_errors_instr_per_cycle: Vec::new(),
        promises: Vec::new(),
        online: None,
    }
}

/// A predictor with empty forecasts.
pub struct NullPredictor;

impl Predictor for NullPredictor {
    fn forecast(&self, _: &View<'_>, _: &Plan) -> Forecast {
        Forecast::default()
    }
}

/// A machine that observes scripted windows and applies every plan.
pub struct ScriptedMachine {
    /// The machine.
    pub topology: Topology,
    /// Abilities of the machine.
    pub capabilities: Capabilities,
    windows: std::vec::IntoIter<Observation>,
    applied: AppliedPlan,
}

impl ScriptedMachine {
    /// A machine that plays these windows once.
    pub fn new(topology: Topology, capabilities: Capabilities, windows: Vec<Observation>) -> Self {
        ScriptedMachine {
            topology,
            capabilities,
            windows: windows.into_iter(),
            applied: AppliedPlan::default(),
        }
    }
}

impl Machine for ScriptedMachine {
    fn topology(&self) -> &Topology {
        &self.topology
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn observe(&mut self) -> Result<Option<Observation>, MachineError> {
        Ok(self.windows.next().map(|observation| Observation {
            applied: self.applied.clone(),
            ..observation
        }))
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        self.applied = AppliedPlan {
            affinity: plan.affinity.clone(),
            gangs: plan.gangs.clone(),
            ..AppliedPlan::default()
        };
        Ok(self.applied.clone())
    }
}

/// The values that a view borrows.
pub struct ViewFixture {
    /// The machine.
    pub topology: Topology,
    /// Abilities of the machine.
    pub capabilities: Capabilities,
    /// The latest window.
    pub observation: Observation,
    /// The profiles of its tasks.
    pub profiles: Profiles,
    /// The plan that was in force in that window.
    pub previous_plan: Plan,
}

impl ViewFixture {
    /// A first window with this number of tasks, none of which has a profile.
    pub fn new(topology: Topology, capabilities: Capabilities, tasks: u32) -> Self {
        let previous_plan = Plan::idle(WindowLength::Time { ns: 1_000_000_000 });
        ViewFixture {
            topology,
            capabilities,
            observation: observation_fixture(0, tasks),
            profiles: BTreeMap::new(),
            previous_plan,
        }
    }

    /// The input of a policy.
    pub fn view<'a>(&'a self, predictor: &'a dyn Predictor) -> View<'a> {
        View {
            topology: &self.topology,
            capabilities: &self.capabilities,
            observation: &self.observation,
            profiles: &self.profiles,
            previous_plan: &self.previous_plan,
            predictor,
            verdicts: &(),
        }
    }

    /// Decides on this window; the plan is valid, and in force in the next one.
    pub fn decide(&mut self, policy: &mut dyn Policy, predictor: &dyn Predictor) -> Decision {
        let view = self.view(predictor);
        let decision = policy.decide(&view);
        check_plan(&decision.plan, &view)
            .unwrap_or_else(|error| panic!("an invalid plan: {error}"));
        self.previous_plan = decision.plan.clone();
        decision
    }
}

/// A machine of one core with these caches, at 1 GHz: in order, one instruction per cycle, and 100 cycles to memory.
pub fn machine_spec(caches: Vec<CacheSpec>) -> MachineSpec {
    MachineSpec {
        name: "test".to_string(),
        description: String::new(),
        sources: Vec::new(),
        hertz: 1_000_000_000,
        packages: 1,
        cores_per_package: 1,
        contexts_per_core: 1,
        mispredict_cycles: None,
        pipeline: CoreModel::in_order(1),
        caches,
        coherence: CoherenceSpec::default(),
        prefetchers: Vec::new(),
        memory: memory_spec(1 << 30, 100, 8.0),
        pages: PageSpec::default(),
        os: OsSpec::default(),
        counters: PmuSpec::default(),
    }
}

/// Memory of one node, with equal latencies and without a limit on a package's bus.
pub fn memory_spec(size_bytes: u64, latency_cycles: u32, bytes_per_cycle: f64) -> MemorySpec {
    MemorySpec {
        size_bytes,
        nodes: 1,
        local_latency_cycles: latency_cycles,
        remote_latency_cycles: latency_cycles,
        bytes_per_cycle,
        package_bus_bytes_per_cycle: None,
        bandwidth_limits: None,
        scheduling: MemorySchedulingSpec::default(),
    }
}

/// A cache with 64-byte lines, a latency of 3 cycles, LRU replacement, and defaults otherwise.
pub fn cache_spec(
    level: CacheLevel,
    size_bytes: u64,
    ways: u32,
    shared_by_cores: u32,
) -> CacheSpec {
    CacheSpec {
        level,
        size_bytes,
        ways,
        line_bytes: 64,
        latency_cycles: 3,
        replacement: ReplacementPolicy::Lru,
        stream_insertion: None,
        pool_bytes: None,
        neighbor_bytes_per_cycle: None,
        neighbor_spread: None,
        pool_spread: None,
        apart_share: None,
        probation_share: None,
        write: WritePolicy::Back,
        inclusion: Inclusion::NonInclusive,
        index: SetIndexing::Physical,
        shared_by_cores,
        slices: 1,
        bandwidth_bytes_per_cycle: None,
        way_partitions: None,
    }
}
