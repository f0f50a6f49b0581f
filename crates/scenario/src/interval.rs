//! A scenario on the interval machine: jobs drawn from their distributions, events, and length.

use std::sync::Arc;

use cachemate_core::{MachineSpec, RunLimit, SplitMix64};
use cachemate_interval::{
    IntervalJob, IntervalMachine, IntervalMachineError, Options, PhasedProgram,
};
use cachemate_spec::{Distribution, IntervalSpec, Scenario, TimeSharingModel};

/// The programs of a scenario: one per entry of `programs`, and one per part of each mix.
#[derive(Clone, Debug, Default)]
pub struct ScenarioPrograms {
    /// Programs in the order of the scenario's `programs`.
    pub entry_programs: Vec<Arc<PhasedProgram>>,
    /// Programs by mix, in the order of the mix's parts.
    pub mix_programs: Vec<Vec<Arc<PhasedProgram>>>,
}

/// The same scenario and programs give the same bits.
///
/// # Errors
/// The machine or a program is invalid.
pub fn build_machine(
    scenario: &Scenario,
    spec: &MachineSpec,
    programs: &ScenarioPrograms,
) -> Result<IntervalMachine, IntervalMachineError> {
    IntervalMachine::new(
        spec,
        engine_options(scenario, spec),
        build_jobs(scenario, programs),
    )
}

/// `None` for a limit that is no time; a checked scenario for the interval machine has none.
pub fn length_ns(length: RunLimit, spec: &MachineSpec) -> Option<u64> {
    match length {
        RunLimit::Ns(ns) => Some(ns),
        RunLimit::Cycles(cycles) => {
            Some((u128::from(cycles) * 1_000_000_000 / u128::from(spec.hertz)) as u64)
        }
        RunLimit::Instructions(_) | RunLimit::Completions(_) => None,
    }
}

fn engine_options(scenario: &Scenario, spec: &MachineSpec) -> Options {
    let default_table = IntervalSpec::default();
    let interval_table = scenario.interval.as_ref().unwrap_or(&default_table);
    let warm_up_ns = scenario
        .warm_up
        .and_then(|length| length_ns(length, spec))
        .unwrap_or(0);
    Options {
        seed: scenario.seed,
        has_explicit_turns: interval_table.time_sharing == TimeSharingModel::Explicit,
        counter_noise: interval_table.counters,
        length_ns: length_ns(scenario.length, spec).map(|length| length + warm_up_ns),
        events: interval_table.events.clone(),
    }
}

/// Jobs in order of mention. Every entry draws from its own generator, so that changing one entry
/// does not change the others.
pub fn build_jobs(scenario: &Scenario, programs: &ScenarioPrograms) -> Vec<IntervalJob> {
    let mut jobs = Vec::new();
    let entry_generator =
        |index: usize| SplitMix64::new(scenario.seed.wrapping_add((index as u64 + 1) << 32));

    for (index, (given, program)) in scenario
        .programs
        .iter()
        .zip(&programs.entry_programs)
        .enumerate()
    {
        let mut entry_random = entry_generator(index);
        let mut start_ns = given.start_ns;
        for copy_index in 0..given.count {
            if copy_index > 0 {
                start_ns =
                    start_ns.saturating_add(draw_gap_ns(given.interarrival_ns, &mut entry_random));
            }
            jobs.push(IntervalJob {
                threads: given.threads.unwrap_or(1),
                instructions: given
                    .instructions
                    .map(|length| draw_sample(length, &mut entry_random).max(1.0)),
                start_ns,
                restarts: given.restart,
                pinned: given.cpus.clone(),
                goal: given.goal,
                ..IntervalJob::new(Arc::clone(program))
            });
        }
    }

    let mixes = scenario.interval.iter().flat_map(|table| &table.mixes);
    for (index, (mix, programs)) in mixes.zip(&programs.mix_programs).enumerate() {
        let mut mix_random = entry_generator(scenario.programs.len() + index);
        let mut start_ns = mix.start_ns;
        let weights: Vec<f64> = mix.programs.iter().map(|entry| entry.weight).collect();
        for copy_index in 0..mix.count {
            if copy_index > 0 {
                start_ns =
                    start_ns.saturating_add(draw_gap_ns(mix.interarrival_ns, &mut mix_random));
            }

            let program = &programs[draw_by_weight(&weights, &mut mix_random)];
            jobs.push(IntervalJob {
                instructions: mix
                    .instructions
                    .map(|length| draw_sample(length, &mut mix_random).max(1.0)),
                start_ns,
                ..IntervalJob::new(Arc::clone(program))
            });
        }
    }
    jobs
}

fn draw_gap_ns(gap_distribution: Option<Distribution>, draws: &mut SplitMix64) -> u64 {
    gap_distribution.map_or(0, |gap| draw_sample(gap, draws) as u64)
}

/// Above 0, because a logarithm follows, and at most 1.
fn draw_positive_unit(generator: &mut SplitMix64) -> f64 {
    1.0 - generator.draw_unit()
}

fn draw_sample(distribution: Distribution, generator: &mut SplitMix64) -> f64 {
    match distribution {
        Distribution::Fixed(value) => value,
        Distribution::Exponential(mean) => generator.draw_exponential(mean),
        Distribution::Uniform(low, high) => low + (high - low) * draw_positive_unit(generator),
        Distribution::LogNormal(median, sigma) => {
            median * libm::exp(sigma * generator.draw_normal())
        }
    }
}

fn draw_by_weight(weights: &[f64], generator: &mut SplitMix64) -> usize {
    let mut remaining_weight = draw_positive_unit(generator) * weights.iter().sum::<f64>();
    for (index, weight) in weights.iter().enumerate() {
        remaining_weight -= weight;
        if remaining_weight <= 0.0 {
            return index;
        }
    }
    weights.len() - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_interval::closed_form;

    fn parse_scenario(text: &str) -> (Scenario, MachineSpec) {
        let head = "name = \"t\"\ndescription = \"t\"\nmachine = \"xeon-x5365-4\"\nsimulator = \"interval\"\nseed = 3\n";
        let length = "length = { ns = 3_000_000_000 }\n";
        cachemate_spec::parse_scenario("t.toml", &format!("{head}{length}{text}")).unwrap()
    }

    fn sample_programs(count: usize) -> Vec<Arc<PhasedProgram>> {
        let uniform_phase = |index: usize| {
            closed_form::uniform_phase(64.0, 65_536.0, 30_000.0 + 9_000.0 * index as f64, 0.02)
        };
        (0..count)
            .map(|index| {
                Arc::new(PhasedProgram::endless_program(
                    format!("p{index}"),
                    uniform_phase(index),
                ))
            })
            .collect()
    }

    /// Do arrivals, lengths and mixes have the requested means and weights?
    #[test]
    fn draws_have_their_means_and_weights() {
        let (scenario, _) = parse_scenario(
            "[[interval.mixes]]\ncount = 8000\ninterarrival_ns = { exponential = 1e6 }\ninstructions = { log_normal = [1e9, 0.5] }\n\
             programs = [{ program = \"a\" }, { program = \"b\", weight = 3.0 }]\n",
        );
        let result = build_jobs(
            &scenario,
            &ScenarioPrograms {
                entry_programs: Vec::new(),
                mix_programs: vec![sample_programs(2)],
            },
        );
        assert_eq!(result.len(), 8000);
        let gap = result.last().unwrap().start_ns as f64 / 7999.0;
        assert!((gap / 1e6 - 1.0).abs() < 0.05, "{gap}");
        let mut lengths: Vec<f64> = result.iter().map(|job| job.instructions.unwrap()).collect();
        lengths.sort_by(f64::total_cmp);
        assert!(
            (lengths[4000] / 1e9 - 1.0).abs() < 0.05,
            "{}",
            lengths[4000]
        );
        // One deviation above the median is the 84th percentile.
        assert!(
            (lengths[6730] / 1e9 / 0.5f64.exp() - 1.0).abs() < 0.06,
            "{}",
            lengths[6730]
        );
        let second = result.iter().filter(|job| job.name == "p1").count() as f64 / 8000.0;
        assert!((second - 0.75).abs() < 0.02, "{second}");
    }

    /// Does changing one entry leave the draws of the others unchanged?
    #[test]
    fn changing_one_entry_leaves_the_others_draws_unchanged() {
        let scenario_text = |count: u32| {
            format!(
                "[[programs]]\nprogram = \"a\"\ncount = {count}\ninterarrival_ns = {{ uniform = [1e6, 2e6] }}\n\
                 [[programs]]\nprogram = \"b\"\ncount = 4\ninterarrival_ns = {{ exponential = 1e6 }}\n"
            )
        };
        let start_times = |count: u32| {
            let result = build_jobs(
                &parse_scenario(&scenario_text(count)).0,
                &ScenarioPrograms {
                    entry_programs: sample_programs(2),
                    mix_programs: Vec::new(),
                },
            );
            result
                .into_iter()
                .filter(|job| job.name == "p1")
                .map(|job| job.start_ns)
                .collect::<Vec<_>>()
        };
        assert_eq!(start_times(2), start_times(5));
    }

    /// Do an offline CPU, outside traffic and CPUs that stop sharing a cache reach the machine, and does the same seed
    /// repeat the run?
    #[test]
    fn events_reach_the_machine_and_runs_repeat() {
        let text = "[interval]\nevents = [{ at_ns = 1_000_000_000, split_cpus = \"1\" }, \
                    { at_ns = 2_000_000_000, offline = 3 }]\n[[programs]]\nprogram = \"a\"\ncpus = \"0\"\n\
                    [[programs]]\nprogram = \"b\"\ncpus = \"1\"\n";
        let run_scenario = || {
            let (scenario, spec) = parse_scenario(text);
            let programs = ScenarioPrograms {
                entry_programs: sample_programs(2),
                mix_programs: Vec::new(),
            };
            let mut machine = build_machine(&scenario, &spec, &programs).unwrap();
            let mut slowdowns = Vec::new();
            while let Some(observation) = cachemate_core::Machine::observe(&mut machine).unwrap() {
                slowdowns.push(machine.task_slowdown(observation.tasks[0].task).unwrap().0);
            }
            (
                slowdowns,
                cachemate_core::Machine::topology(&machine).cpus[3].online,
                format!("{:?}", machine.results()),
            )
        };
        let (slowdowns, online, results) = run_scenario();
        assert_eq!(slowdowns.len(), 3);

        assert!(
            slowdowns[0] > 1.02 && slowdowns[2] < 1.01,
            "alone in its cache from the second on: {slowdowns:?}"
        );
        assert!(!online);
        assert_eq!(run_scenario().2, results);
    }
}
