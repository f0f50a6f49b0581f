//! `AUTO-RECORDED`: compares the integrated policy with its rivals on mixes of recorded programs.
//!
//! Problem: the programs that [`super::draw`] makes up have one or two working sets, and the miss ratio curves of real
//! ones are of every form. Method: eight of the bundled recordings, drawn by the seed, are timed as by `cachemate
//! predict`, so that the policy has to find out by its own probes what the walk of a recording knows. A recording covers
//! seconds of a program that runs for minutes, so a round through it is stretched to [`ROUND_NS`]. Properties: all mixes
//! count; the best single mechanism is chosen in hindsight as for `AUTO`.

use cachemate_core::{MachineSpec, SplitMix64};
use cachemate_forecast::{TimedProgram, forecast_alone};
use cachemate_interval::IntervalJob;

use super::MACHINES;
use super::bounds::lower_bound;
use super::families::{AUTO_INDEX, AutoMix, RIVALS, contender_list, score_mix};
use crate::interval::nominal::stretch_phases;
use crate::interval::offline::single_thread_recordings;
use crate::setup::load_machine;
use crate::{DataPoint, ExperimentContext, Finding, Result, mean};

const PROGRAMS_PER_MIX: usize = 8;
/// Time of a round through a recording alone.
const ROUND_NS: f64 = 120e9;

/// The bundled recordings as jobs of the interval machine, named by program.
fn recorded_jobs(
    context: &ExperimentContext<'_>,
    machine: &MachineSpec,
) -> Result<Vec<IntervalJob>> {
    context.run_all(&single_thread_recordings()?, |(name, path)| {
        context.report_progress(&format!("{}: {name} alone", machine.name));
        let timed = TimedProgram::from_recording(name, path, machine)?;
        let alone = forecast_alone(machine, &timed)?;
        let mut program = timed.sharing_program(timed.median_draw(), machine);
        let round_instr: f64 = program
            .phases
            .iter()
            .filter_map(|phase| phase.instructions)
            .sum();
        let round_ns = round_instr * alone.cycles_per_instr / machine.hertz as f64 * 1e9;
        if round_ns > 0.0 {
            stretch_phases(&mut program, ROUND_NS / round_ns);
        }
        Ok(IntervalJob {
            name: name.clone(),
            ..IntervalJob::new(program)
        })
    })
}

/// Eight jobs drawn with equal probability, all different, in random order.
fn draw_mix(recorded: &[IntervalJob], seed: u64) -> Vec<IntervalJob> {
    let mut jobs = recorded.to_vec();
    SplitMix64::new(seed ^ 0x7ec0_4ded).shuffle(&mut jobs);
    jobs.truncate(PROGRAMS_PER_MIX);
    jobs
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let contenders = contender_list();
    let mixes_per_machine = context.mixes.unwrap_or(context.pick(3, 12));
    let length_ns = context.pick(300, 900) * 1_000_000_000;

    let mut mixes = Vec::new();
    for name in &MACHINES[1..] {
        let machine = load_machine(name)?;
        let recorded = recorded_jobs(context, &machine)?;
        for mix_index in 0..mixes_per_machine {
            let seed = context.seeds[0] * 1_000 + u64::from(mix_index);
            let jobs = draw_mix(&recorded, seed);
            let label = ("recorded", seed);
            mixes.push(score_mix(
                context,
                &machine,
                label,
                &jobs,
                &contenders,
                length_ns,
            )?);
        }
    }

    let gains_over = |baseline: fn(&AutoMix) -> usize| -> Vec<f64> {
        let gain = |mix: &AutoMix| mean(mix.gain_percents(AUTO_INDEX, baseline(mix)));
        mixes.iter().map(gain).collect()
    };
    let by_seed = |value: f64| [(context.seeds[0], value)];
    let mut findings = vec![
        Finding::declared(
            "auto-recorded-over-default",
            &by_seed(mean(gains_over(|_| 0))),
        )
        .with_points(mix_points(&mixes)),
        Finding::declared(
            "auto-recorded-over-best",
            &by_seed(lower_bound(&gains_over(AutoMix::best_single_mechanism))),
        ),
    ];
    for (index, contender) in contenders.iter().enumerate() {
        if RIVALS.contains(&contender.title) {
            let gains = mixes
                .iter()
                .map(|mix| mean(mix.gain_percents(AUTO_INDEX, index)));
            findings.push(Finding::declared_for(
                "auto-recorded-over-rival",
                &[contender.title],
                &by_seed(mean(gains)),
            ));
        }
    }
    Ok(findings)
}

/// The gain of every contender over the default on each mix.
fn mix_points(mixes: &[AutoMix]) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for (index, contender) in contender_list().iter().enumerate().skip(1) {
        for mix in mixes {
            let label = format!("{} on {}", mix.seed, mix.machine);
            points.push(DataPoint::from_values(
                contender.title,
                label,
                mix.gain_percents(index, 0),
            ));
        }
    }
    points
}
