//! The cost of one decision: 1 000 tasks on 64 last-level caches, and 8 on 2, with complete evidence, for every policy
//! from a fresh start; and its share of such a host's time with windows of 10^9 cycles (target: at most 0.5 %).
//!
//! `auto` is timed on larger hosts too, as a power of the number of tasks, and relative to a copy of the host's state.
//!
//! The input counts tasks, so a speed of 0.2 millions per second is 1 000 tasks in 5 ms. Times are those of a first
//! decision, when nothing can be reused from the previous window.

use cachemate_core::test_support::{
    ViewFixture, capabilities_fixture, last_level_caches, observation_of,
};
use cachemate_core::{
    Ability, CacheLevel, Capabilities, ChangeVerdict, CounterEvent, CpuId, Decision, Estimate,
    EventCounts, Fact, FactSource, Policy, ProcessId, Profile, RateFacts, SplitMix64, StallCause,
    SuperSetCount, TaskId, TaskSample, Verdicts, Verification, VerificationOutcome, View, median,
};
use cachemate_locality::reuse::ReuseTimes;
use cachemate_papers::reference_predictor::ReferencePredictor;
use cachemate_pipeline::POLICIES;

use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use crate::memory::{peak_bytes, retained_bytes};

pub const GROUP: BenchGroup = BenchGroup {
    name: "policies",
    about: "one decision for 1 000 tasks on 64 last-level caches",
    run,
};

/// A host and its tasks.
#[derive(Clone, Copy)]
struct HostSize {
    tasks: u32,
    caches: u32,
    cpus_per_cache: u32,
}

const SIZES: [HostSize; 2] = [
    HostSize {
        tasks: 1_000,
        caches: 64,
        cpus_per_cache: 8,
    },
    HostSize {
        tasks: 8,
        caches: 2,
        cpus_per_cache: 4,
    },
];
const HERTZ: u64 = 2_500_000_000;
const WINDOW_CYCLES: f64 = 1e9;
const WINDOW_NS: u64 = 10_000_000;
const PREDICTOR: ReferencePredictor = ReferencePredictor {
    miss_penalty_cycles: 200.0,
};
const MAX_SHARE_PERCENT: f64 = 0.5;
/// The target for casc, activity-vector, di and dio: a decision within 5 ms.
const MIN_MILLION_TASKS_PER_S: f64 = 0.2;

fn synthetic_host(
    HostSize {
        tasks,
        caches,
        cpus_per_cache,
    }: HostSize,
) -> ViewFixture {
    let mut generator = SplitMix64::new(1);
    let mut topology = last_level_caches(caches, cpus_per_cache, CacheLevel::L3, 16 << 20);
    for cpu in &mut topology.cpus {
        (cpu.package, cpu.memory_node, cpu.hertz) = (cpu.id.0 / 256, cpu.id.0 / 256, Some(HERTZ));
    }
    use Ability::{Affinity, CountPerTask, Gangs, Penalties, SampleReuses, Weights};
    let capabilities = Capabilities {
        min_window_ns: 1_000_000,
        min_slice_ns: Some(1_000_000),
        ..capabilities_fixture(&[
            Affinity,
            Penalties,
            CountPerTask,
            Gangs,
            SampleReuses,
            Weights,
        ])
    };
    let task = |id: u32| TaskSample {
        name: format!("task-{id}"),
        cpu: Some(CpuId(id % (caches * cpus_per_cache))),
        on_cpu_ns: vec![(CpuId(id % (caches * cpus_per_cache)), 5_000_000)],
        ..TaskSample::new(TaskId(id), ProcessId(id))
    };
    let mut draw_profile = || {
        let mut reuse = ReuseTimes::new();
        (0..200).for_each(|_| reuse.add(Some(1 << generator.draw_below(24))));
        let exact = |value: f64| Some(Fact::oracle(value));
        let mut super_set = || SuperSetCount {
            accesses: generator.draw_below(20_000),
            misses: generator.draw_below(2_000),
        };
        let super_sets: Vec<SuperSetCount> = (0..32).map(|_| super_set()).collect();
        let curve = (1..=16)
            .map(|mb| (mb << 20, Estimate::exact(40.0 / mb as f64)))
            .collect();
        let rates = RateFacts {
            llc_refs_per_mega_instr: exact(1_000.0 + 30_000.0 * generator.draw_unit()),
            solo_instr_per_cycle: exact(0.3 + generator.draw_unit()),
            observed_instr_per_cycle: exact(0.3 + generator.draw_unit()),
            observed_misses_per_kilo_instr: exact(40.0 * generator.draw_unit()),
            pcmr: exact(80.0 * generator.draw_unit()),
            ..RateFacts::default()
        };
        let mut profile = Profile::default()
            .with_misses(CacheLevel::L3, curve, FactSource::Oracle)
            .with_rates(rates);
        profile.locality.reuse_times = reuse
            .to_profile()
            .map(|times| Fact::new(times, FactSource::Oracle, 0));
        profile
            .locality
            .activity
            .insert(CacheLevel::L3, Fact::new(super_sets, FactSource::Oracle, 0));
        profile
    };
    let observation = observation_of(5, WINDOW_NS, (0..tasks).map(task));
    let profiles = (0..tasks).map(|id| (TaskId(id), draw_profile())).collect();
    ViewFixture {
        observation,
        profiles,
        ..ViewFixture::new(topology, capabilities, 0)
    }
}

fn run(options: &Options) -> Vec<ResultRow> {
    let costs: Vec<SearchCosts> = SEARCH_SIZES
        .into_iter()
        .zip(SEARCH_TARGETS_MS)
        .map(|(size, targets_ms)| time_searches(size, targets_ms, options.rounds))
        .collect();
    let metrics: [(&str, fn(&SearchCosts) -> f64); 3] = [
        ("time of a first search", |costs| costs.search_ms[0]),
        ("time after an arrival", |costs| costs.search_ms[1]),
        ("peak memory", |costs| costs.peak_bytes),
    ];
    for (what, metric) in metrics {
        let points = costs
            .iter()
            .map(|costs| (costs.tasks.ln(), metric(costs).ln()));
        let points: Vec<(f64, f64)> = points.filter(|point| point.1.is_finite()).collect();
        eprintln!(
            "policies auto, {what}: exponent {:.2} over {} of {} hosts, bar {MAX_EXPONENT}",
            fitted_slope(&points),
            points.len(),
            costs.len()
        );
    }
    SIZES
        .into_iter()
        .flat_map(|size| decision_rows(size, options))
        .collect()
}

/// Hosts for `auto`, with the targets in milliseconds for a search of all tasks, and for one after an arrival.
const SEARCH_SIZES: [HostSize; 4] = [
    HostSize {
        tasks: 250,
        caches: 16,
        cpus_per_cache: 8,
    },
    SIZES[0],
    HostSize {
        tasks: 4_000,
        caches: 256,
        cpus_per_cache: 8,
    },
    HostSize {
        tasks: 10_000,
        caches: 512,
        cpus_per_cache: 8,
    },
];
const SEARCH_TARGETS_MS: [[Option<f64>; 2]; 4] = [
    [None, None],
    [Some(20.0), Some(2.0)],
    [None, None],
    [Some(300.0), None],
];
/// Largest exponent of time and memory as a power of the number of tasks.
const MAX_EXPONENT: f64 = 1.2;
/// Windows within which `auto` searches for a plan.
const MAX_WINDOWS_UNTIL_SEARCH: u64 = 64;

/// Costs of `auto` on one host.
struct SearchCosts {
    tasks: f64,
    /// Medians of a first search, and of one after an arrival.
    search_ms: [f64; 2],
    peak_bytes: f64,
}

/// `auto` observes the same tasks for some windows before it searches for a plan: its first search, and the one after
/// the arrival of another task. Their times are compared with that of copying the host's state once.
fn time_searches(size: HostSize, targets_ms: [Option<f64>; 2], rounds: usize) -> SearchCosts {
    let (mut search_times, mut peak, mut state, mut copy_ms) =
        ([Vec::new(), Vec::new()], 0, 0, f64::INFINITY);
    for _ in 0..rounds {
        let (mut host, host_bytes) = retained_bytes(|| counted_host(size));
        (state, copy_ms) = (host_bytes, copy_ms.min(time_copy(host_bytes as usize)));
        let mut policy = POLICIES.build("auto", "", 1).expect("the registry has it");
        let mut verdict = KeptPlan(None);
        for (choice, times) in search_times.iter_mut().enumerate() {
            if choice == 1 {
                add_task(&mut host);
            }
            let (time, bytes) = peak_bytes(|| {
                (0..MAX_WINDOWS_UNTIL_SEARCH)
                    .find_map(|_| time_window(&mut host, policy.as_mut(), &mut verdict))
            });
            peak = peak.max(bytes);
            times.extend(time);
        }
    }
    let searches = search_times
        .iter_mut()
        .zip(["first search", "after an arrival"])
        .zip(targets_ms);
    let search_ms: Vec<f64> = searches
        .map(|((times, what), target_ms)| {
            times.sort_by(f64::total_cmp);
            let host = format!("policies {} x {} auto, {what}", size.tasks, size.caches);
            let (Some(fastest), Some(median), Some(slowest)) =
                (times.first(), median(times), times.last())
            else {
                eprintln!("{host}: no search in {MAX_WINDOWS_UNTIL_SEARCH} windows");
                return f64::NAN;
            };
            let bar = target_ms.map_or(String::new(), |ms| format!(", bar {ms} ms"));
            eprintln!(
                "{host}: {median:.2} ms ({fastest:.2}-{slowest:.2}){bar}; {:.0} times a copy of its state ({:.1} MB)",
                median / copy_ms,
                state as f64 / 1e6
            );
            median
        })
        .collect();
    eprintln!(
        "policies {} x {} auto, peak memory: {:.1} MB",
        size.tasks,
        size.caches,
        peak as f64 / 1e6
    );
    SearchCosts {
        tasks: f64::from(size.tasks),
        search_ms: [search_ms[0], search_ms[1]],
        peak_bytes: peak as f64,
    }
}

/// Milliseconds in which this many bytes are copied.
fn time_copy(bytes: usize) -> f64 {
    let (source, mut target) = (vec![1u8; bytes], vec![0u8; bytes]);
    let start = BenchClock::Thread.now_s();
    target.copy_from_slice(std::hint::black_box(&source));
    std::hint::black_box(&target);
    1e3 * (BenchClock::Thread.now_s() - start)
}

/// The slope of the line through these points, by least squares.
fn fitted_slope(points: &[(f64, f64)]) -> f64 {
    let mean = |values: &dyn Fn(&(f64, f64)) -> f64| {
        points.iter().map(values).sum::<f64>() / points.len() as f64
    };
    let (mean_x, mean_y) = (mean(&|point| point.0), mean(&|point| point.1));
    mean(&|point| (point.0 - mean_x) * (point.1 - mean_y))
        / mean(&|point| (point.0 - mean_x) * (point.0 - mean_x))
}

/// The same host, with curves and counts that differ between tasks.
fn counted_host(size: HostSize) -> ViewFixture {
    let mut host = synthetic_host(size);
    let mut generator = SplitMix64::new(2);
    for profile in host.profiles.values_mut() {
        *profile = phased_profile(&mut generator);
    }
    let mut draws = SplitMix64::new(3);
    host.observation
        .tasks
        .iter_mut()
        .for_each(|task| task.counts = draw_counts(&mut draws));
    host
}

/// Misses fall at one size to a floor.
fn phased_profile(generator: &mut SplitMix64) -> Profile {
    let (knee, floor, height) = (
        1 + generator.draw_below(15),
        generator.draw_unit(),
        2.0 + 30.0 * generator.draw_unit(),
    );
    let misses_at = |mb: u64| {
        if mb < knee {
            height * (1.0 - 0.5 * mb as f64 / knee as f64)
        } else {
            floor
        }
    };
    let curve = (1..=16)
        .map(|mb| (mb << 20, Estimate::exact(misses_at(mb))))
        .collect();
    Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle)
}

fn draw_counts(draws: &mut SplitMix64) -> EventCounts {
    let (instructions, misses) = (1_000_000_000, 1_000_000 + draws.draw_below(10_000_000));
    EventCounts::exact([
        (CounterEvent::Instructions, instructions),
        (CounterEvent::Cycles, instructions + 100 * misses),
        (CounterEvent::References(CacheLevel::L3), 3 * misses),
        (CounterEvent::Misses(CacheLevel::L3), misses),
        (
            CounterEvent::StallCycles(StallCause::LocalMemory),
            90 * misses,
        ),
    ])
}

fn add_task(host: &mut ViewFixture) {
    let id = host.observation.tasks.len() as u32;
    let on_cpu_ns = host.observation.tasks[0].on_cpu_ns.clone();
    let task = TaskSample {
        name: format!("task-{id}"),
        on_cpu_ns,
        ..TaskSample::new(TaskId(id), ProcessId(id))
    };
    let mut draws = SplitMix64::new(4);
    host.profiles.insert(TaskId(id), phased_profile(&mut draws));
    host.observation.tasks.push(TaskSample {
        counts: draw_counts(&mut draws),
        ..task
    });
}

/// The verdict on the last proposed plan: it is kept, since nothing runs that could be measured.
struct KeptPlan(Option<ChangeVerdict>);

impl KeptPlan {
    fn from_decision(decision: &Decision) -> Self {
        let is_proposed = matches!(decision.verification, Verification::Proposed(_));
        KeptPlan(is_proposed.then(|| ChangeVerdict {
            outcome: VerificationOutcome::NotMeasured,
            plan: decision.plan.clone(),
            forecast_gain: None,
            measured: None,
        }))
    }
}

impl Verdicts for KeptPlan {
    fn latest(&self) -> Option<&ChangeVerdict> {
        self.0.as_ref()
    }
}

/// One window under the last decision; its CPU time in milliseconds if the policy searched for a plan.
fn time_window(
    host: &mut ViewFixture,
    policy: &mut dyn Policy,
    verdict: &mut KeptPlan,
) -> Option<f64> {
    host.observation.window += 1;
    host.observation.span.start_ns += host.observation.span.elapsed_ns;
    let start = BenchClock::Thread.now_s();
    let decision = policy.decide(&View {
        verdicts: verdict,
        ..host.view(&PREDICTOR)
    });
    let ms = 1e3 * (BenchClock::Thread.now_s() - start);
    *verdict = KeptPlan::from_decision(&decision);
    host.previous_plan = decision.plan;
    (!decision.reasons.is_empty()).then_some(ms)
}

fn decision_rows(size: HostSize, options: &Options) -> Vec<ResultRow> {
    let host = synthetic_host(size);
    let run_decisions = |name: &str, parameters: &str| {
        let mut policy = POLICIES
            .build(name, parameters, 1)
            .expect("the names and parameters below are the registry's");
        let decision = policy.decide(&host.view(&PREDICTOR));
        (decision.plan.affinity.len() + decision.plan.gangs.len() + decision.reasons.len()) as u64
    };
    let policy_contender = |name: &'static str, parameters: &'static str, label: &str| {
        Contender::new(label, move || run_decisions(name, parameters))
    };
    let promised_contender = |name: &'static str, parameters: &'static str, label: &str| {
        policy_contender(name, parameters, label)
            .with_min_millions((size.tasks == SIZES[0].tasks).then_some(MIN_MILLION_TASKS_PER_S))
    };
    let contenders = vec![
        policy_contender("default", "", "default"),
        promised_contender("casc", "", "casc"),
        promised_contender("casc", "form = \"literal\"", "casc, literal"),
        promised_contender("activity-vector", "", "activity-vector, one replaced"),
        promised_contender(
            "activity-vector",
            "form = \"set\"",
            "activity-vector, whole set",
        ),
        promised_contender(
            "activity-vector",
            "form = \"advice\"",
            "activity-vector, advice",
        ),
        policy_contender("counter-driven", "", "counter-driven"),
        promised_contender("di", "", "di"),
        promised_contender("dio", "", "dio"),
        policy_contender("balance-set", "", "balance-set, average"),
        policy_contender(
            "balance-set",
            "group_model = \"composed\"",
            "balance-set, composed",
        ),
    ];
    let input = format!("{} x {}", size.tasks, size.caches);
    let rows = compare(
        "policies",
        &input,
        size.tasks as usize,
        options.rounds,
        BenchClock::Thread,
        false,
        contenders,
    );
    let window_ms = 1e3 * WINDOW_CYCLES / HERTZ as f64;
    for row in &rows {
        let ms = f64::from(size.tasks) / row.millions_per_s / 1e3;
        let share = 100.0 * ms / window_ms / f64::from(size.caches * size.cpus_per_cache);
        eprintln!(
            "policies {input} {}: {ms:.3} ms a decision, {share:.5} % of the host's time, bar {MAX_SHARE_PERCENT} %",
            row.contender
        );
    }
    rows
}
