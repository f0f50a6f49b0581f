//! CP-6: the cost of changing a partition while the program runs, and how it changes if pages move one by one, lazily
//! or hottest first (thesis 4.6.5, Figure 4.12).
//!
//! One program swaps between the two halves of the colors at an interval, and all its pages have to be copied each
//! time. Its throughput is compared with that in one half for good. Costs are the machine's own, at time scale 1,
//! because a scaled cost per page would vanish beside the cache misses that follow a copy, which do not scale. Instead
//! the program is smaller than the thesis's (117 MB), and the interval is shorter in proportion.

use cachemate_core::{ShareMember, Units, WindowLength, WindowRecord};
use cachemate_report::figure::{Axis, Chart, Series};
use cachemate_sim::results::RunResults;
use serde::{Deserialize, Serialize};

use super::{RunScale, chip_workload, nominal_ns, thesis_job};
use crate::seeded_runs::SeededRuns;
use crate::setup::{Workload, build_pipeline};
use crate::{DataPoint, ExperimentContext, Finding, Result, ResultFigure, line_through, mean};

/// Swaps in the measured part.
const SWAP_COUNT: u64 = 4;
/// Size of the thesis's program in megabytes.
const THESIS_MB: f64 = 117.0;
const PAGE_BYTES: f64 = 4096.0;
const MOVE_PAGE_CYCLES: f64 = 11_051.0;

/// For one interval: the lost throughput, and the loss expected from the cost per page, as shares.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct ResizeCost {
    measured: f64,
    computed: f64,
}

/// A program of this size that swaps at this interval.
#[derive(Clone, Copy, Serialize)]
struct SwapInputs {
    footprint_bytes: u64,
    interval_cycles: u64,
    seed: u64,
}

fn warehouse_workload(inputs: &SwapInputs) -> Result<Workload> {
    let SwapInputs {
        footprint_bytes,
        interval_cycles,
        seed,
    } = *inputs;
    let mut program = thesis_job("warehouses", seed);
    program.options.footprint_bytes = Some(footprint_bytes);

    // Two intervals to touch all pages.
    Ok(chip_workload(
        vec![program],
        2,
        RunScale {
            scale: 1,
            warm_up_cycles: 0,
            with_l3: true,
        },
        seed,
    )?
    .with_length(2 * interval_cycles, SWAP_COUNT * interval_cycles))
}

/// A run that swaps between the halves every interval; `migration_mode` is the policy's parameter, `None` to stay
/// in the first half.
fn run_with_swaps(
    workload: &Workload,
    interval_cycles: u64,
    migration_mode: Option<&str>,
) -> Result<(RunResults, Vec<WindowRecord>)> {
    let interval_ns = nominal_ns(workload, interval_cycles);
    let window_ns = interval_ns / 4;
    let parameters = match migration_mode {
        Some(mode_name) => format!(
            "window_ns = {window_ns}\npage_migration = '{mode_name}'\nperiod_ns = {}\nsteps = [{{ shares = ['0-7'] }}, \
             {{ from_ns = {interval_ns}, shares = ['8-15'] }}]",
            2 * interval_ns
        ),
        None => format!("window_ns = {window_ns}\nsteps = [{{ shares = ['0-7'] }}]"),
    };

    let first_window = WindowLength::Cycles { cycles: 1_000 };
    let pipeline = build_pipeline(workload.pipeline(
        "static-partition",
        &parameters,
        Vec::new(),
        first_window,
    ))?;
    let run = workload.run_managed(pipeline)?;
    Ok((run.results, run.records))
}

fn total_instructions(results: &RunResults) -> f64 {
    results
        .tasks
        .iter()
        .map(|task| task.instructions as f64)
        .sum()
}

/// Pages that the swaps within the measured part had to copy: all that were resident outside the new half. The decision
/// in the last record is never applied.
fn count_copied_pages(records: &[WindowRecord], from_ns: u64) -> f64 {
    let mut pages = 0;
    for pair in records[..records.len().saturating_sub(1)].windows(2) {
        let allowed_colors = |record: &WindowRecord| {
            let share = record.decision.plan.shares.first()?;
            let Units::Colors { allowed, .. } = &share.units else {
                return None;
            };
            let Some(ShareMember::Process(process)) = share.members.first() else {
                return None;
            };
            Some((allowed.clone(), *process))
        };
        let (Some((earlier_colors, _)), Some((later_colors, process))) =
            (allowed_colors(&pair[0]), allowed_colors(&pair[1]))
        else {
            continue;
        };

        let decided_ns = pair[1].observation.span.start_ns + pair[1].observation.span.elapsed_ns;
        if earlier_colors == later_colors || decided_ns < from_ns {
            continue;
        }

        let task = pair[1]
            .observation
            .tasks
            .iter()
            .find(|task| task.process == process);
        let pages_per_color = task.and_then(|task| task.pages_per_color.as_ref());
        pages += pages_per_color.map_or(0, |per_color| {
            cachemate_papers::partition::units::pages_to_move(per_color, &later_colors)
        });
    }

    pages as f64
}

fn measure_lost_work(context: &ExperimentContext<'_>, inputs: &SwapInputs) -> Result<ResizeCost> {
    let interval_cycles = inputs.interval_cycles;
    context.report_progress(&format!(
        "swapping every {interval_cycles} cycles, seed {}",
        inputs.seed
    ));

    let workload = warehouse_workload(inputs)?;
    let (steady_run, _) = run_with_swaps(&workload, interval_cycles, None)?;
    let (swapping_run, records) = run_with_swaps(&workload, interval_cycles, Some("all"))?;
    let pages = count_copied_pages(&records, nominal_ns(&workload, workload.warm_up_cycles));
    let copy_cycles = pages * workload.machine.pages.migration_cycles as f64;
    Ok(ResizeCost {
        measured: 1.0 - total_instructions(&swapping_run) / total_instructions(&steady_run),
        computed: copy_cycles / swapping_run.elapsed_cycles as f64,
    })
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let footprint_bytes: u64 = context.pick_by_length(128 << 10, 512 << 10, 2 << 20);
    // Intervals as multiples of the time that moving all pages takes.
    let full_move_cycles = footprint_bytes / PAGE_BYTES as u64 * MOVE_PAGE_CYCLES as u64;
    let intervals: Vec<u64> = context
        .pick(vec![4, 8], vec![4, 8, 16])
        .into_iter()
        .map(|times| times * full_move_cycles)
        .collect();

    let inputs = |interval_cycles, seed| SwapInputs {
        footprint_bytes,
        interval_cycles,
        seed,
    };
    let costs = context.run_cases(&intervals, inputs, measure_lost_work)?;
    let mode_inputs: Vec<SwapInputs> = context
        .seeds
        .iter()
        .map(|&seed| inputs(intervals[0], seed))
        .collect();
    let losses_by_migration_mode = context.run_all_stored(&mode_inputs, measure_migration_modes)?;
    Ok(vec![
        computed_finding(&intervals, &costs),
        migration_mode_finding(context, &losses_by_migration_mode),
    ])
}

fn computed_finding(intervals: &[u64], costs: &SeededRuns<u64, ResizeCost>) -> Finding {
    let per_seed = costs.mean_per_seed(|lost| 100.0 * (lost.measured / lost.computed - 1.0).abs());
    let mut points = Vec::new();
    let (measured, computed) = ("measured", "computed from the cost a page");
    for &interval in intervals {
        let at = format!("{:.0} ms", interval as f64 / 1.5e6);
        points.extend([
            costs.point(interval, measured, &at, |lost| 100.0 * lost.measured),
            costs.point(interval, computed, &at, |lost| 100.0 * lost.computed),
        ]);
    }

    // Loss is inversely proportional to the interval: it is scaled from the longest measured interval to the thesis's
    // size.
    let longest_interval_cycles = intervals[intervals.len() - 1];
    let one_percent_ms = longest_interval_cycles as f64 / 1.5e6
        * mean(costs.values(longest_interval_cycles, |lost| 100.0 * lost.measured));

    // All pages of the program, as copied at each swap.
    let copied_share = mean(costs.values(longest_interval_cycles, |lost| lost.computed));
    let megabytes = copied_share * longest_interval_cycles as f64 / MOVE_PAGE_CYCLES * PAGE_BYTES
        / (1 << 20) as f64;
    let chart = Chart {
        title: "Throughput lost by swapping halves of the cache".to_string(),
        x: Axis::log("interval, ms"),
        y: Axis::linear("throughput lost, %"),
        series: vec![
            line_through(&points, measured),
            Series {
                is_dashed: true,
                ..line_through(&points, computed)
            },
        ],
        ..Chart::default()
    };

    let note = format!(
        "Below 1 % from an interval of {:.1} s on for {megabytes:.1} MB of data, which is {:.0} s for the thesis's {THESIS_MB} MB \
         (2.2 % at 10 s there). Measured against staying in one half. A copied page is cached where it was copied, as when the \
         thesis measured the cost a page; what is left between measured and computed is what the copies evict, and that the \
         lines' places in the sets are others.",
        one_percent_ms / 1000.0,
        one_percent_ms / 1000.0 * THESIS_MB / megabytes,
    );
    let figure = ResultFigure::chart("cp-6-resizing", &chart);
    Finding::declared("cp-6-measured-loss", &per_seed)
        .with_points(points)
        .with_note(note)
        .with_figure(figure)
}

const MIGRATION_MODES: [&str; 4] = ["all", "hot-first", "lazy", "never"];

/// The throughput lost for each method of moving pages.
fn measure_migration_modes(_: &ExperimentContext<'_>, inputs: &SwapInputs) -> Result<Vec<f64>> {
    let workload = warehouse_workload(inputs)?;
    let interval_cycles = inputs.interval_cycles;
    let instr_without_swaps =
        total_instructions(&run_with_swaps(&workload, interval_cycles, None)?.0);
    let lost_share = |mode: &&str| {
        let (results, _) = run_with_swaps(&workload, interval_cycles, Some(mode))?;
        Ok(1.0 - total_instructions(&results) / instr_without_swaps)
    };
    MIGRATION_MODES.iter().map(lost_share).collect()
}

fn migration_mode_finding(context: &ExperimentContext<'_>, losses_by_seed: &[Vec<f64>]) -> Finding {
    let points = MIGRATION_MODES
        .iter()
        .enumerate()
        .map(|(index, mode_name)| {
            let values: Vec<f64> = losses_by_seed
                .iter()
                .map(|losses| 100.0 * losses[index])
                .collect();
            DataPoint::from_values("throughput lost, %", *mode_name, &values)
        });
    let per_seed = context.with_seeds(
        losses_by_seed
            .iter()
            .map(|losses| 100.0 * (losses[0] - losses[2])),
    );
    Finding::declared("cp-6-lazy-moves", &per_seed).with_points(points.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::quick_context;

    /// Does swapping cost throughput, about as much as the copied pages?
    #[test]
    fn swapping_costs_about_as_much_as_copying() {
        let footprint_bytes = 256 << 10;
        let interval_cycles = footprint_bytes / 4096 * 11_051 * 4;
        let inputs = SwapInputs {
            footprint_bytes,
            interval_cycles,
            seed: 1,
        };
        let workload = warehouse_workload(&inputs).unwrap();
        let (_, records) = run_with_swaps(&workload, interval_cycles, Some("all")).unwrap();
        let pages = count_copied_pages(&records, nominal_ns(&workload, workload.warm_up_cycles));
        assert!(
            pages >= 40.0 * SWAP_COUNT as f64,
            "{pages} pages in {SWAP_COUNT} swaps"
        );
        let cost = measure_lost_work(&quick_context(), &inputs).unwrap();
        assert!(cost.measured > 0.0 && cost.computed > 0.05, "{cost:?}");
    }
}
