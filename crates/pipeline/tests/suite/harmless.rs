//! On a machine without contention, does no policy slow a program?

use cachemate_core::{GuardConfig, Machine, PolicyConfig, WindowLength};
use cachemate_pipeline::POLICIES;
use cachemate_pipeline::{Pipeline, StandardPipeline, miss_penalty_of_machine};
use cachemate_sim::kernels;
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions, SimProgram};
use cachemate_sim::results::RunResults;
use rayon::prelude::*;

const SCALE: u64 = 5_000;
/// Length of the run at this scale, in cycles. The scale divides windows, slices and probes, so this is sixteen
/// seconds of the machine's own time.
const CYCLES: u64 = 10_000_000;
const MAX_LOSS: f64 = 0.01;

/// Builds a machine with one program per core, each of which fits its own caches, so that no placement causes
/// contention.
fn uncontended_machine() -> SimMachine {
    let spec = cachemate_spec::load_machine("xeon-x5365-4").expect("a shipped machine");
    let program = |index: u64| {
        let maker = move |run: u32| {
            let seed = 100 * index + u64::from(run) + 1;
            kernels::build_threads("gamess", seed, &kernels::Options::default())
                .expect("a known program")
        };
        SimProgram::new(format!("gamess-{index}"), Box::new(maker))
    };
    let options = SimOptions {
        seed: 9,
        scale: SCALE,
        warm_up: Some(RunLimit::Cycles(CYCLES / 4)),
        ends: Some(RunLimit::Cycles(CYCLES)),
        ..SimOptions::default()
    };
    SimMachine::new(&spec, &options, (0..4).map(program).collect())
        .expect("four programs on four cores")
}

fn run(policy: &str, guarded: bool) -> RunResults {
    let spec = cachemate_spec::load_machine("xeon-x5365-4").expect("a shipped machine");
    let mut machine = uncontended_machine();
    let standard = StandardPipeline {
        policy: PolicyConfig {
            name: policy.to_string(),
            parameters: String::new(),
            seed: 3,
        },
        guard: guarded.then(GuardConfig::default),
        counted_instructions: 10_000.0,
        predictor: miss_penalty_of_machine(&spec),
        watches_code: true,
        first_window: WindowLength::Time { ns: 1_000_000 },
    };
    let config = standard.for_machine(machine.topology(), machine.capabilities());
    machine.set_first_window(config.first_window);

    let pipeline = Pipeline::build(config).expect("a policy of the registry with its defaults");
    pipeline
        .run(machine, |_, _| true)
        .expect("the run ends")
        .collect_results()
}

/// Does no task lose more than one percent of its instructions under any unguarded policy, except policies that are
/// harmful by design?
///
/// Cost: 38 s of CPU, because every policy of the registry runs the same four programs.
#[test]
fn no_policy_slows_a_program_without_contention() {
    let harmful: Vec<&str> = POLICIES
        .entries()
        .iter()
        .filter(|entry| entry.is_harmful_by_design)
        .map(|entry| entry.name)
        .collect();
    println!(
        "policies that harm by design, exempt from this: {}",
        harmful.join(", ")
    );
    let default = run("default", false);
    let losses: Vec<String> = POLICIES
        .entries()
        .par_iter()
        .filter(|entry| !entry.is_harmful_by_design)
        .flat_map_iter(|entry| {
            let results = run(entry.name, false);
            let loss = |(task, default_results): (usize, &cachemate_sim::results::TaskResults)| {
                let now = results.tasks[task].instructions as f64;
                let loss = 1.0 - now / default_results.instructions as f64;
                println!("{:20} task {task}: {:+.2} %", entry.name, -100.0 * loss);
                (loss > MAX_LOSS)
                    .then(|| format!("{}, task {task}: {:.1} %", entry.name, 100.0 * loss))
            };
            default
                .tasks
                .iter()
                .enumerate()
                .filter_map(loss)
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(
        losses.is_empty(),
        "instructions lost: {}",
        losses.join("; ")
    );
}
