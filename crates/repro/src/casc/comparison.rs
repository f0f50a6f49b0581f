//! CASC-1, -2, -3, -6: misses, throughput and fairness against the default scheduler, from 48 to 768 KB of L2.

use cachemate_report::figure::{Axis, Chart, ChartPoint, Mark, Series};

use crate::niagara::SIZES_KB;
use crate::niagara::cells::{
    Cells, METRICS, ResultMetric, SizeSweep, describe_shortfall, measure_bandwidth_sweep,
    metric_points, run_cells, size_chart, size_label,
};
use crate::niagara::{
    NiagaraPolicy, NiagaraSetting, TIME_SCALE, ThreadMix, l2_miss_ratio, measure, run as run_mix,
    sensitivity,
};
use crate::setup::failed;
use crate::{DataPoint, ExperimentContext, Finding, Result, ResultFigure, least};

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let sizes: &[u64] = context.pick(&[192], &SIZES_KB);
    let better_cells = run_cells(
        context,
        ThreadMix::Casc,
        &NiagaraPolicy::better_policy(""),
        sizes,
    )?;
    let literal_cells = run_cells(
        context,
        ThreadMix::Casc,
        &NiagaraPolicy::literal_policy(""),
        sizes,
    )?;

    let mut all_points = metric_points("casc", &better_cells, sizes, size_label);
    all_points.extend(metric_points(
        LITERAL_LABEL,
        &literal_cells,
        sizes,
        size_label,
    ));
    let (gain_bound, gain_bound_text) = sensitivity::gain_bound(context, sizes)?;
    all_points.extend(gain_bound);

    if !context.quick {
        let phase_policies = [("following phases", NiagaraPolicy::phase_following_policy())];
        all_points.extend(sensitivity::compare_variations(
            context,
            ThreadMix::Casc,
            &NiagaraPolicy::better_policy(""),
            &phase_policies,
        )?);
        all_points.extend(metric_points(
            "one greedy thread at a time",
            &run_cells(context, ThreadMix::Casc, &NiagaraPolicy::OneGreedy, sizes)?,
            sizes,
            size_label,
        ));
        all_points.extend(latency_points(context)?);
    }

    let (sensitivity_points, figure) = measure_bandwidth_sweep(
        context,
        ThreadMix::Casc,
        &NiagaraPolicy::better_policy(""),
        "casc-2-bandwidth",
        "casc",
    )?;
    all_points.extend(sensitivity_points);
    let mut findings = misses_and_throughput(
        "casc",
        SizeSweep {
            cells: &better_cells,
            sizes,
            points: &all_points,
        },
        &gain_bound_text,
    )
    .to_vec();
    findings[1].figures.push(figure);
    findings.extend(misses_and_throughput(
        LITERAL_LABEL,
        SizeSweep {
            cells: &literal_cells,
            sizes,
            points: &all_points,
        },
        &gain_bound_text,
    ));
    findings.push(twice_cache_finding(context, sizes, &better_cells)?);
    findings.extend(fairness_findings(context, sizes, &better_cells)?);
    Ok(findings)
}

const LITERAL_LABEL: &str = "casc as the paper has it";

/// The findings of CASC-1 and CASC-2 for one form.
fn misses_and_throughput(form: &str, sweep: SizeSweep<'_>, gain_bound_text: &str) -> [Finding; 2] {
    let draw_chart = |name: &str, title: &str, y: &str, parts: &[&str]| {
        let series: Vec<String> = parts.iter().map(|part| format!("{form}: {part}")).collect();
        let series: Vec<&str> = series.iter().map(String::as_str).collect();
        let name = if form == LITERAL_LABEL {
            format!("{name}-literal")
        } else {
            name.to_string()
        };
        size_chart(&name, title, y, sweep.points, &series)
    };
    let casc_1 = sweep
        .worst_size_finding("casc-1-miss-ratio", &[form], METRICS[7].1)
        .with_figure(draw_chart(
            "casc-1-miss-ratio",
            "L2 miss ratio, default scheduler and CASC",
            "misses per 100 references",
            &["L2 miss ratio, default %", "L2 miss ratio %"],
        ));
    let casc_2 = sweep
        .worst_size_finding("casc-2-throughput", &[form], METRICS[0].1)
        .with_figure(draw_chart(
            "casc-2-throughput",
            "Throughput gain of CASC and what it is made of",
            "%",
            &[
                "throughput gain %",
                "of which mix %",
                "of which contention %",
                "weighted speed-up change %",
            ],
        ));
    let mut casc_2 = sweep.with_gain_parts(casc_2);
    casc_2.note = format!("{} {gain_bound_text}.", casc_2.note);
    [casc_1, casc_2]
}

/// The points of CASC-1 and -2 for several memory latencies (the paper does not state one), at 192
/// KB.
fn latency_points(context: &ExperimentContext<'_>) -> Result<Vec<DataPoint>> {
    let first_seed = ExperimentContext {
        seeds: vec![context.seeds[0]],
        ..*context
    };

    let latencies = [112, 200, 300];
    let results = first_seed.run_unstored_cases(&latencies, |cycles, seed| {
        context.report_progress(&format!("sweep, memory {cycles} cycles"));
        let setting = NiagaraSetting::new(192, seed, context);
        let setting = NiagaraSetting {
            memory_latency_cycles: Some(cycles),
            ..setting
        };
        measure(&setting, &NiagaraPolicy::better_policy(""))
    })?;
    Ok(metric_points(
        "sweep at 192 KB",
        &results,
        &latencies,
        |cycles| format!("memory {cycles} cycles"),
    ))
}

/// The findings of CASC-3: hit rate compared with that of the default on a cache of twice the size.
fn twice_cache_finding(
    context: &ExperimentContext<'_>,
    sizes: &[u64],
    better_cells: &Cells,
) -> Result<Finding> {
    let leads = context.run_unstored_cases(sizes, |l2_kb, seed| {
        context.report_progress(&format!("default at {} KB, seed {seed}", 2 * l2_kb));
        let default_run = run_mix(
            &NiagaraSetting::new(2 * l2_kb, seed, context),
            &NiagaraPolicy::Default,
        )?;
        let default_ratio =
            l2_miss_ratio(&default_run).ok_or_else(|| failed("default")("no references"))?;
        Ok(100.0
            * (default_ratio
                - better_cells
                    .get(l2_kb, seed)
                    .map_or(f64::NAN, |result| result.miss_ratio)))
    })?;

    let series = "hit rate of CASC over the default's on twice the cache, points";
    let points: Vec<DataPoint> = sizes
        .iter()
        .map(|&size| leads.point(size, series, size_label(size), |&lead| lead))
        .collect();
    let leads_by_size = points
        .iter()
        .zip(sizes)
        .map(|(point, &size)| (size, point.value.unwrap_or(f64::NAN)));
    let note = describe_shortfall(leads_by_size, |value| value >= 0.0);
    Ok(Finding::declared(
        "casc-3-twice-the-cache",
        &leads.least_per_seed(|&lead| lead),
    )
    .require_every_seed()
    .with_points(points)
    .with_note(note)
    .with_time_scale(TIME_SCALE as f64))
}

/// Every size, with the spread of run times limited to that of the default scheduler.
fn cells_with_default_spread(context: &ExperimentContext<'_>, sizes: &[u64]) -> Result<Cells> {
    context.run_unstored_cases(sizes, |l2_kb, seed| {
        context.report_progress(&format!(
            "spread bound to the default's at {l2_kb} KB, seed {seed}"
        ));
        let setting = NiagaraSetting::new(l2_kb, seed, context);
        let default_variation = measure(&setting, &NiagaraPolicy::Default)?.default_variation;
        measure(
            &setting,
            &NiagaraPolicy::better_policy(&format!("max_run_time_variation = {default_variation}")),
        )
    })
}

/// The findings of CASC-6: the spread of run times, and gain against fairness.
fn fairness_findings(
    context: &ExperimentContext<'_>,
    sizes: &[u64],
    better_cells: &Cells,
) -> Result<Vec<Finding>> {
    let least_cpu_share = least(better_cells.all().map(|result| result.least_share));
    let spread_points = metric_points("casc", better_cells, sizes, size_label);
    let spread_finding = SizeSweep {
        cells: better_cells,
        sizes,
        points: &spread_points,
    }
    .worst_size_finding("casc-6-spread", &[], METRICS[12].1)
    .with_note(format!(
        "The thread with the least CPU time has {least_cpu_share:.2} of the mean."
    ));

    let largest_size = *sizes.last().unwrap_or(&768);
    let bounded_cells = cells_with_default_spread(context, sizes)?;
    let bounds: &[f64] = context.pick(&[], &[0.1, 0.3, 0.5, 0.7, 0.9, 1.1]);
    let results_by_bound = context.run_unstored_cases(bounds, |bound, seed| {
        let policy = NiagaraPolicy::better_policy(&format!("max_run_time_variation = {bound}"));
        measure(&NiagaraSetting::new(largest_size, seed, context), &policy)
    })?;
    let mut points = metric_points(
        "bound to the default's spread",
        &bounded_cells,
        sizes,
        size_label,
    );
    let bounded_finding = SizeSweep {
        cells: &bounded_cells,
        sizes,
        points: &points,
    }
    .worst_size_finding("casc-6-bounded-spread", &[], METRICS[8].1);
    for (metric, value_of) in METRICS {
        let series = format!("bound on the spread: {metric}");
        points.extend(
            bounds
                .iter()
                .map(|&bound| results_by_bound.point(bound, &series, bound.to_string(), value_of)),
        );
        points.push(bounded_cells.point(largest_size, series, "the default's", value_of));
    }
    let drawn_results = || {
        results_by_bound
            .all()
            .chain(bounded_cells.of_case(largest_size))
    };
    let drawn_series = |name: &str, value_of: ResultMetric| Series {
        name: name.to_string(),
        points: drawn_results()
            .map(|result| ChartPoint::new(100.0 * result.variation, value_of(result)))
            .collect(),
        mark: Mark::Points,
        ..Series::default()
    };
    let chart = Chart {
        title: format!("Gain against fairness at {largest_size} KB"),
        x: Axis::linear("standard deviation of run times, % of mean"),
        y: Axis::linear("%"),
        series: vec![
            drawn_series("throughput gain", METRICS[0].1),
            drawn_series("weighted speed-up", METRICS[8].1),
        ],
        ..Chart::default()
    };
    let figure = ResultFigure::chart("casc-6-fairness", &chart);
    let note = "The bound holds for the shares that the assignment leads one to expect; points show the spread that was measured.";
    Ok(vec![
        spread_finding,
        bounded_finding
            .with_points(points)
            .with_figure(figure)
            .with_note(note),
    ])
}
