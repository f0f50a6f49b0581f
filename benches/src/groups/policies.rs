//! What one decision costs: 1 000 tasks on 64 last-level caches, and 8 on 2, everything known, every policy from a fresh
//! start; and which share of such a host's time that is at windows of 10^9 cycles (promised: at most 0.5 %).
//!
//! The input names tasks, so a speed of 0.2 millions a second is 1 000 tasks in 5 ms. Times are of a first decision,
//! when nothing can be kept from the window before.

use cachemate_core::{
    Applied, Cache, CacheId, Capabilities, Cpu, CpuId, Estimate, Fact, FactSource, Level, Observation, Plan, ProcessId,
    Profile, Profiles, Rates, Span, SplitMix64, SuperSetCount, Support, TaskId, TaskSample, Topology, View, Window,
    WindowEnd,
};
use cachemate_locality::reuse::ReuseTimes;
use cachemate_policy::policies;
use cachemate_policy::reference_predictor::ReferencePredictor;

use super::{Group, Options};
use crate::harness::{Clock, Contender, Row, compare};

pub const GROUP: Group = Group { name: "policies", about: "one decision for 1 000 tasks on 64 last-level caches", run };

/// A host and what runs on it.
#[derive(Clone, Copy)]
struct Size {
    tasks: u32,
    caches: u32,
    cpus_per_cache: u32,
}

const SIZES: [Size; 2] =
    [Size { tasks: 1_000, caches: 64, cpus_per_cache: 8 }, Size { tasks: 8, caches: 2, cpus_per_cache: 4 }];
const HERTZ: u64 = 2_500_000_000;
const WINDOW_CYCLES: f64 = 1e9;
const SHARE_BAR_PERCENT: f64 = 0.5;
/// A decision within 5 ms is promised of casc, activity-vector, di and dio.
const LEAST_MILLIONS: f64 = 0.2;

struct Host {
    topology: Topology,
    capabilities: Capabilities,
    seen: Observation,
    profiles: Profiles,
    before: Plan,
}

fn host(Size { tasks, caches, cpus_per_cache }: Size) -> Host {
    let mut generator = SplitMix64::new(1);
    let cpus = 0..caches * cpus_per_cache;
    let cpu = |id: u32| Cpu {
        id: CpuId(id),
        core: id,
        package: id / 256,
        memory_node: id / 256,
        online: true,
        hertz: Some(HERTZ),
    };
    let cache = |id: u32| Cache {
        id: CacheId(id),
        level: Level::L3,
        cpus: (id * cpus_per_cache..(id + 1) * cpus_per_cache).collect(),
        last_level: true,
        size_bytes: Some(16 << 20),
        ways: Some(16),
        line_bytes: Some(64),
    };
    use cachemate_core::Ability::{Affinity, CountPerTask, Gangs, Penalties, SampleReuses, Weights};
    let able = [Affinity, Penalties, CountPerTask, Gangs, SampleReuses, Weights];
    let capabilities = Capabilities {
        abilities: able.into_iter().map(|ability| (ability, Support::Yes { note: None })).collect(),
        partitions: Vec::new(),
        shortest_window_ns: 1_000_000,
        shortest_slice_ns: Some(1_000_000),
    };
    let task = |id: u32| TaskSample {
        name: format!("task-{id}"),
        cpu: Some(CpuId(id % (caches * cpus_per_cache))),
        on_cpu_ns: vec![(CpuId(id % (caches * cpus_per_cache)), 5_000_000)],
        ..TaskSample::new(TaskId(id), ProcessId(id))
    };
    let mut profile = || {
        let mut reuse = ReuseTimes::new();
        (0..200).for_each(|_| reuse.add(Some(1 << generator.below(24))));
        let exact = |value: f64| Some(Fact::oracle(value));
        let mut super_set = || SuperSetCount { accesses: generator.below(20_000), misses: generator.below(2_000) };
        let super_sets: Vec<SuperSetCount> = (0..32).map(|_| super_set()).collect();
        let curve = (1..=16).map(|mb| (mb << 20, Estimate::exact(40.0 / mb as f64))).collect();
        let rates = Rates {
            llc_refs_per_mega_instr: exact(1_000.0 + 30_000.0 * generator.unit()),
            solo_instr_per_cycle: exact(0.3 + generator.unit()),
            observed_instr_per_cycle: exact(0.3 + generator.unit()),
            observed_misses_per_kilo_instr: exact(40.0 * generator.unit()),
            pcmr: exact(80.0 * generator.unit()),
            ..Rates::default()
        };
        let mut profile = Profile::default().with_misses(Level::L3, curve, FactSource::Oracle).with_rates(rates);
        profile.locality.reuse_times = reuse.to_profile().map(|times| Fact::new(times, FactSource::Oracle, 0));
        profile.locality.activity.insert(Level::L3, Fact::new(super_sets, FactSource::Oracle, 0));
        profile
    };
    let seen = Observation {
        window: 5,
        span: Span { start_ns: 0, elapsed_ns: 10_000_000, elapsed_cycles: None },
        ended: WindowEnd::Elapsed,
        tasks: (0..tasks).map(task).collect(),
        places: Vec::new(),
        answers: Vec::new(),
        in_force: Applied::default(),
    };
    Host {
        topology: Topology { cpus: cpus.map(cpu).collect(), caches: (0..caches).map(cache).collect() },
        capabilities,
        seen,
        profiles: (0..tasks).map(|id| (TaskId(id), profile())).collect(),
        before: Plan::idle(Window::Time { ns: 10_000_000 }),
    }
}

fn run(options: &Options) -> Vec<Row> {
    SIZES.into_iter().flat_map(|size| decisions(size, options)).collect()
}

fn decisions(size: Size, options: &Options) -> Vec<Row> {
    let host = host(size);
    let yardstick = ReferencePredictor { miss_penalty_cycles: 200.0 };
    let decide = |name: &str, parameters: &str| {
        let mut policy =
            policies::build(name, parameters, 1).expect("the names and parameters below are the registry's");
        let decision = policy.decide(&View {
            topology: &host.topology,
            capabilities: &host.capabilities,
            seen: &host.seen,
            profiles: &host.profiles,
            previous_plan: &host.before,
            predictor: &yardstick,
        });
        (decision.plan.affinity.len() + decision.plan.gangs.len() + decision.why.len()) as u64
    };
    let contender = |name: &'static str, parameters: &'static str, label: &str| {
        Contender::new(label, move || decide(name, parameters))
    };
    let promised = |name: &'static str, parameters: &'static str, label: &str| {
        contender(name, parameters, label).least_millions((size.tasks == SIZES[0].tasks).then_some(LEAST_MILLIONS))
    };
    let contenders = vec![
        contender("default", "", "default"),
        promised("casc", "", "casc"),
        promised("casc", "form = \"literal\"", "casc, literal"),
        promised("activity-vector", "", "activity-vector, one replaced"),
        promised("activity-vector", "form = \"set\"", "activity-vector, whole set"),
        promised("activity-vector", "form = \"advice\"", "activity-vector, advice"),
        contender("counter-driven", "", "counter-driven"),
        promised("di", "", "di"),
        promised("dio", "", "dio"),
        contender("balance-set", "", "balance-set, average"),
        contender("balance-set", "extension = \"composed\"", "balance-set, composed"),
    ];
    let input = format!("{} x {}", size.tasks, size.caches);
    let rows = compare("policies", &input, size.tasks as usize, options.rounds, Clock::Thread, false, contenders);
    let window_ms = 1e3 * WINDOW_CYCLES / HERTZ as f64;
    for row in &rows {
        let ms = f64::from(size.tasks) / row.millions_per_s / 1e3;
        let share = 100.0 * ms / window_ms / f64::from(size.caches * size.cpus_per_cache);
        eprintln!(
            "policies {input} {}: {ms:.3} ms a decision, {share:.5} % of the host's time, bar {SHARE_BAR_PERCENT} %",
            row.contender
        );
    }
    rows
}
