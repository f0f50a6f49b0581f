//! CP-1: a program's run time with 1 to 16 colors (thesis Figure 4.5).

use cachemate_report::figure::{Axis, Chart};
use cachemate_sim::kernels;
use cachemate_sim::machine::RunLimit;

use super::{COLORS, RunScale, chip_workload, fixed_plan_policy, thesis_job};
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, greatest, line_through,
    list_or_none, mean,
};

/// Minimum rise of the run time with more colors that counts, if the seeds' ranges do not overlap either.
const NOISE_SHARE: f64 = 0.01;
const NOMINAL_INSTRUCTIONS: u64 = 20_000_000_000;
/// Warm-up instructions. They are not scaled, because caches do not fill faster.
const WARM_UP_INSTRUCTIONS: u64 = 3_000_000;

/// Run time of a program with each number of colors, relative to that with all of them; one row per seed.
struct ColorCurve {
    program: &'static str,
    colors: Vec<u32>,
    relative_times_by_seed: Vec<Vec<f64>>,
}

impl ColorCurve {
    fn values_over_seeds(&self, index: usize) -> Vec<f64> {
        self.relative_times_by_seed
            .iter()
            .map(|row| row[index])
            .collect()
    }
    /// The numbers of colors with which it runs slower than with fewer, beyond noise.
    fn color_rises(&self) -> Vec<(u32, f64)> {
        let rise_at = |index: usize| {
            let (times_with_fewer, times_with_more) = (
                self.values_over_seeds(index - 1),
                self.values_over_seeds(index),
            );
            let growth = mean(&times_with_more) / mean(&times_with_fewer) - 1.0;
            let slowest_before = greatest(&times_with_fewer);
            let is_above_noise =
                growth > NOISE_SHARE && times_with_more.iter().all(|&time| time > slowest_before);
            is_above_noise.then_some((self.colors[index], growth))
        };
        (1..self.colors.len()).filter_map(rise_at).collect()
    }
}

/// Cycles for the given instructions, after the same warm-up instructions.
pub(super) fn cycles_for(
    program: &str,
    colors: u32,
    instructions: u64,
    scale: u64,
    seed: u64,
) -> Result<f64> {
    // All seeds run the same program; only its frames differ.
    let mut workload = chip_workload(
        vec![thesis_job(program, 1)],
        2,
        RunScale {
            scale,
            warm_up_cycles: 0,
            with_l3: true,
        },
        seed,
    )?;

    workload.options.warm_up = Some(RunLimit::Instructions(WARM_UP_INSTRUCTIONS));
    workload.options.ends = Some(RunLimit::Instructions(instructions));
    let results = workload.planned_run(&fixed_plan_policy(
        &workload,
        &[format!("0-{}", colors - 1)],
    )?)?;
    let executed_instr: u64 = results.tasks.iter().map(|task| task.instructions).sum();
    Ok(results.elapsed_cycles as f64 * instructions as f64 / executed_instr.max(1) as f64)
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let scale = context.pick(20_000, 10_000);
    let colors: Vec<u32> = context.pick(vec![1, 2, 4, 8, 12, 16], (1..=COLORS).collect());
    let quick_programs = ["mcf", "art", "twolf", "swim", "ammp", "vortex"];
    let programs: Vec<&'static str> = kernels::programs()
        .filter(|program| program.threads == (1, 1))
        .map(|program| program.name.as_str())
        .filter(|name| !context.quick || quick_programs.contains(name))
        .collect();

    let mut runs = Vec::new();
    for &program in &programs {
        for &seed in &context.seeds {
            runs.extend(colors.iter().map(|&count| (program, seed, count)));
        }
    }
    let cycles = context.run_all(&runs, |&(program, seed, count)| {
        context.report_progress(&format!("{program} with {count} colors, seed {seed}"));
        cycles_for(program, count, NOMINAL_INSTRUCTIONS / scale, scale, seed)
    })?;
    let mut rows = cycles.chunks(colors.len()).map(|row| {
        let all_colors_cycles = row[row.len() - 1];
        row.iter()
            .map(|cycles| cycles / all_colors_cycles)
            .collect::<Vec<f64>>()
    });
    let curve_of_program = |&program: &&'static str| {
        let relative_times_by_seed = rows.by_ref().take(context.seeds.len()).collect();
        ColorCurve {
            program,
            colors: colors.clone(),
            relative_times_by_seed,
        }
    };
    let curves: Vec<ColorCurve> = programs.iter().map(curve_of_program).collect();
    Ok(vec![sensitivity_finding(context, scale, &curves)])
}

fn sensitivity_finding(
    context: &ExperimentContext<'_>,
    scale: u64,
    curves: &[ColorCurve],
) -> Finding {
    let mut rises = Vec::new();
    let mut points = Vec::new();
    for curve in curves {
        rises.extend(curve.color_rises().iter().map(|(colors, growth)| {
            let percent = 100.0 * growth;
            format!("{} at {colors} colors (+{percent:.1} %)", curve.program)
        }));
        points.extend(curve.colors.iter().enumerate().map(|(index, colors)| {
            let values = curve.values_over_seeds(index);
            DataPoint::from_values(curve.program, colors.to_string(), values)
        }));
    }
    let count = rises.len() as f64;
    let per_seed = context.values_by_seed(|_| count);
    let rise_list = list_or_none(rises);
    let figure = sensitivity_figure(curves, &points);
    let note = format!(
        "A rise counts above {:.0} % where the ranges over seeds do not overlap; seeds give the frames anew, the program \
         is the same. Mapping conflicts left: {rise_list}. 20·10^9 instructions at the time scale, after \
         3·10^6 of warm-up: the L3 of programs larger than a few megabytes is still filling.",
        100.0 * NOISE_SHARE
    );
    Finding::declared("cp-1-slower-steps", &per_seed)
        .with_points(points)
        .with_time_scale(scale as f64)
        .with_note(note)
        .with_figure(figure)
}

fn sensitivity_figure(curves: &[ColorCurve], points: &[DataPoint]) -> ResultFigure {
    // Only programs that depend on colors are drawn; the lines of the others would all be flat.
    let mut curves_by_sensitivity: Vec<&ColorCurve> = curves.iter().collect();
    let one_color_value = |curve: &ColorCurve| mean(curve.values_over_seeds(0));
    curves_by_sensitivity.sort_by(|a, b| one_color_value(b).total_cmp(&one_color_value(a)));
    let drawn_curves = curves_by_sensitivity.iter().take(8);
    let chart = Chart {
        title: "Run time against colors: the eight programs that gain most".to_string(),
        x: Axis::linear("colors of 16"),
        y: Axis::linear("run time over that with all colors"),
        series: drawn_curves
            .map(|curve| line_through(points, curve.program))
            .collect(),
        ..Chart::default()
    };
    ResultFigure::chart("cp-1-colors", &chart)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_curve(by_seed: Vec<Vec<f64>>) -> ColorCurve {
        ColorCurve {
            program: "p",
            colors: vec![1, 2, 3],
            relative_times_by_seed: by_seed,
        }
    }

    /// Is a rise counted only if it exceeds both noise and the effect of other frames?
    #[test]
    fn a_rise_counts_only_if_it_exceeds_noise_and_other_frames() {
        assert_eq!(
            sample_curve(vec![vec![2.0, 1.5, 1.0], vec![2.1, 1.4, 1.0]]).color_rises(),
            []
        );
        let rises = sample_curve(vec![vec![2.0, 1.0, 1.2], vec![2.0, 1.0, 1.3]]).color_rises();
        assert_eq!(
            rises.iter().map(|(colors, _)| *colors).collect::<Vec<_>>(),
            [3]
        );
        assert_eq!(
            sample_curve(vec![vec![2.0, 1.0, 1.2], vec![2.0, 1.3, 1.3]]).color_rises(),
            [],
            "one seed's frames do as much"
        );
        assert_eq!(sample_curve(vec![vec![1.0, 1.0, 1.005]]).color_rises(), []);
    }

    /// Does a program whose footprint needs all colors run faster with all of them than with one?
    #[test]
    fn a_program_runs_faster_with_all_colors_than_with_one() {
        let single = cycles_for("twolf", 1, 400_000, 50_000, 1).unwrap();
        let all_colors = cycles_for("twolf", 16, 400_000, 50_000, 1).unwrap();
        assert!(
            single > all_colors,
            "{single} with one color, {all_colors} with sixteen"
        );
    }
}
