//! Does a sweep over a few way masks yield the curve that closed-form theory predicts?

use cachemate_core::{
    Access, AccessSource, BatchEnd, CacheLevel, Machine, PolicyConfig, Profiler, Profiles,
    SplitMix64, TaskId, TracedCache, WindowLength,
};
use cachemate_locality::profilers::SizeSweepProfiler;
use cachemate_pipeline::{Pipeline, StandardPipeline, miss_penalty_of_machine};
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions, SimProgram};

/// Length of a window. Two windows are long relative to the time in which added ways are filled.
const WINDOW_NS: u64 = 4_000_000;
const STEP_NS: u64 = 20_000_000;
/// Number of lines from which the uniform program loads, all with equal probability.
const LINES: u64 = 4 << 14;
const INSTRUCTIONS_OF_A_LOAD: u32 = 10;

/// Loads lines at random.
struct Uniform(SplitMix64);

impl AccessSource for Uniform {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        batch.extend(
            (0..1000).map(|_| {
                Access::load(64 * (self.0.next_u64() % LINES), INSTRUCTIONS_OF_A_LOAD - 1)
            }),
        );
        BatchEnd::More
    }
}

/// Loads one line after the other of 32 MiB.
struct StreamLoads(u64);

impl AccessSource for StreamLoads {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        batch.extend((0..1000).map(|index| Access::load(64 * ((self.0 + index) % (8 * LINES)), 3)));
        self.0 += 1000;
        BatchEnd::More
    }
}

/// Curve of the first of two programs, which is given 2, then 4, then 6 of 16 ways; the other
/// program has the rest.
fn sweep_curve() -> Vec<(u64, f64)> {
    // As many counters as events, so that none is multiplexed.
    let spec = cachemate_spec::load_machine("lab-vm?counters.count=64").expect("a shipped machine");
    let uniform = SimProgram::new(
        "uniform",
        Box::new(|_| vec![Box::new(Uniform(SplitMix64::new(3))) as _]),
    );
    let stream = SimProgram::new("stream", Box::new(|_| vec![Box::new(StreamLoads(0)) as _]));
    let ends = Some(RunLimit::Cycles(3 * STEP_NS * spec.hertz / 1_000_000_000));
    let options = SimOptions {
        seed: 4,
        scale: 1,
        ends,
        ..SimOptions::default()
    };
    let mut machine =
        SimMachine::new(&spec, &options, vec![uniform, stream]).expect("two programs on two CPUs");
    let steps = [("0-1", "2-15"), ("0-3", "4-15"), ("0-5", "6-15")]
        .iter()
        .enumerate()
        .map(|(index, (first, second))| {
            format!(
                "{{ from_ns = {}, shares = [\"{first}\", \"{second}\"] }}",
                index as u64 * STEP_NS
            )
        });
    let parameters = format!(
        "window_ns = {WINDOW_NS}\nsteps = [{}]",
        steps.collect::<Vec<_>>().join(", ")
    );
    let standard = StandardPipeline {
        policy: PolicyConfig {
            name: "static-partition".into(),
            parameters,
            seed: 1,
        },
        guard: None,
        counted_instructions: 100_000.0,
        predictor: miss_penalty_of_machine(&spec),
        watches_code: true,
        first_window: WindowLength::Time { ns: WINDOW_NS },
    };
    let config = standard.for_machine(machine.topology(), machine.capabilities());
    machine.set_first_window(config.first_window);
    let cache = TracedCache {
        level: CacheLevel::L3,
        size_bytes: 8 << 20,
        colors: 1,
        ways: 16,
        points: 16,
    };
    let (mut profiler, mut profiles) = (SizeSweepProfiler::new(cache, 10_000.0), Profiles::new());
    let pipeline = Pipeline::build(config).expect("a policy of the registry");
    pipeline
        .run(machine, |_, record| {
            profiler.update(&record.observation, &mut profiles);
            true
        })
        .expect("the run ends");
    let curve = profiles[&TaskId(0)]
        .misses_per_kilo_instr()
        .expect("three sizes were held");
    curve
        .iter()
        .map(|(bytes, rate)| (*bytes, rate.value))
        .collect()
}

/// Each page of 4 KiB falls at random into one of 128 groups of sets, so the number of pages per
/// group is binomial. Of these pages, as many are resident as the share has ways.
fn closed_form(ways: f64) -> f64 {
    let (pages, places) = (LINES as f64 / 64.0, 128.0_f64);
    let odds = 1.0 / (places - 1.0);
    let mut probability = (1.0 - 1.0 / places).powf(pages);
    let mut expected_held = 0.0;
    for in_place in 0..64 {
        let count = f64::from(in_place);
        expected_held += probability * count.min(ways);
        probability *= (pages - count) / (count + 1.0) * odds;
    }
    1000.0 / f64::from(INSTRUCTIONS_OF_A_LOAD) * (1.0 - expected_held * places / pages)
}

/// Do three masks, each in force for five windows, yield the share of lines that do not fit the ways?
///
/// Cost: 5 s of CPU, because fifteen windows are simulated access by access.
#[test]
fn a_sweep_over_three_masks_gives_the_closed_form() {
    let curve = sweep_curve();
    let sizes: Vec<u64> = curve.iter().map(|(bytes, _)| bytes >> 20).collect();
    assert_eq!(sizes, [1, 2, 3]);
    for (bytes, miss_rate) in curve {
        let closed_form = closed_form((bytes >> 19) as f64);
        println!(
            "{} MiB: {miss_rate:.1} swept, {closed_form:.1} by closed form",
            bytes >> 20
        );
        assert!(
            (miss_rate / closed_form - 1.0).abs() < 0.05,
            "{bytes}: {miss_rate} against {closed_form}"
        );
    }
}
