//! CASC-1, -2, -3, -6: misses, throughput and fairness against the default scheduler, from 48 to 768 KB of L2.

use cachemate_report::figure::{Axis, Chart, ChartPoint, Mark, Series};

use crate::niagara::SIZES_KB;
use crate::niagara::cells::{
    Cell, METRICS, SizeSweep, describe_shortfall, metric_points, run_cells, size_chart, values_over_bandwidth,
};
use crate::niagara::{
    NiagaraPolicy, NiagaraResult, NiagaraSetting, SCALE, ThreadMix, l2_miss_ratio, measure, run as run_mix, sensitivity,
};
use crate::setup::failed;
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultFigure, ResultTarget};

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let sizes: &[u64] = context.pick(&[192], &SIZES_KB);
    let better_cells = run_cells(context, ThreadMix::Casc, &NiagaraPolicy::better_policy(""), sizes)?;
    let literal = run_cells(context, ThreadMix::Casc, &NiagaraPolicy::literal(""), sizes)?;
    let mut all_points = metric_points("casc", &better_cells, sizes);
    all_points.extend(metric_points(LITERAL, &literal, sizes));
    let (bound, bound_words) = sensitivity::gain_bound(context, sizes)?;
    all_points.extend(bound);
    if !context.quick {
        let phases = [("following phases", NiagaraPolicy::following_phases())];
        all_points.extend(sensitivity::compare_variations(
            context,
            ThreadMix::Casc,
            &NiagaraPolicy::better_policy(""),
            &phases,
        )?);
        all_points.extend(metric_points(
            "one greedy thread at a time",
            &run_cells(context, ThreadMix::Casc, &NiagaraPolicy::OneGreedy, sizes)?,
            sizes,
        ));
        all_points.extend(sweep_latencies(context)?);
    }
    let (swept, figure) =
        values_over_bandwidth(context, ThreadMix::Casc, &NiagaraPolicy::better_policy(""), "casc-2-bandwidth", "casc")?;
    all_points.extend(swept);
    let mut findings =
        misses_and_throughput("casc", SizeSweep { cells: &better_cells, sizes, points: &all_points }, &bound_words)
            .to_vec();
    findings[1].figures.push(figure);
    findings.extend(misses_and_throughput(
        LITERAL,
        SizeSweep { cells: &literal, sizes, points: &all_points },
        &bound_words,
    ));
    findings.push(twice_cache_finding(context, sizes, &better_cells)?);
    findings.extend(fairness_findings(context, sizes, &better_cells)?);
    Ok(findings)
}

const LITERAL: &str = "casc as the paper has it";

/// CASC-1 and CASC-2 for one form.
fn misses_and_throughput(form: &str, sweep: SizeSweep<'_>, bound: &str) -> [Finding; 2] {
    let draw_chart = |name: &str, title: &str, y: &str, parts: &[&str]| {
        let series: Vec<String> = parts.iter().map(|part| format!("{form}: {part}")).collect();
        let series: Vec<&str> = series.iter().map(String::as_str).collect();
        let name = if form == LITERAL { format!("{name}-literal") } else { name.to_string() };
        size_chart(&name, title, y, sweep.points, &series)
    };
    let title = format!("{form}: L2 miss ratio against the default scheduler, at the size where it falls least");
    let target = ResultTarget::AtMost { target: -15.0, paper_best: Some(-46.0) };
    let casc_1 = sweep.worst_size("CASC-1", &title, "-15 to -46 %", METRICS[7].1, target).with_figure(draw_chart(
        "casc-1-miss-ratio",
        "L2 miss ratio, default scheduler and CASC",
        "misses per 100 references",
        &["L2 miss ratio, default %", "L2 miss ratio %"],
    ));
    let title =
        format!("{form}: instructions per second against the default scheduler, at the size where they grow least");
    let target = ResultTarget::AtLeast { target: 28.0, paper_best: Some(50.0) };
    let casc_2 = sweep.worst_size("CASC-2", &title, "+28 to +50 %", METRICS[0].1, target).with_figure(draw_chart(
        "casc-2-throughput",
        "Throughput gain of CASC and what it is made of",
        "%",
        &["throughput gain %", "of which mix %", "of which contention %", "weighted speed-up change %"],
    ));
    let mut casc_2 = sweep.with_splits(casc_2);
    casc_2.note = format!("{} {bound}.", casc_2.note);
    [casc_1, casc_2]
}

/// CASC-1 and -2 for several memory latencies (the paper does not state one), at 192 KB.
fn sweep_latencies(context: &ExperimentContext<'_>) -> Result<Vec<DataPoint>, ReproError> {
    let base = NiagaraSetting::new(192, context.seeds[0], context);
    let settings = [112, 200, 300]
        .map(|cycles| (format!("memory {cycles} cycles"), NiagaraSetting { memory_cycles: Some(cycles), ..base }));
    let results = context.run_all(&settings, |(name, setting)| {
        context.report_progress(&format!("sweep, {name}"));
        measure(setting, &NiagaraPolicy::better_policy(""))
    })?;
    let mut points = Vec::new();
    for ((name, _), measured) in settings.iter().zip(&results) {
        for (metric, value) in METRICS {
            points.push(DataPoint::over_values(format!("sweep at 192 KB: {metric}"), name.clone(), &[value(measured)]));
        }
    }
    Ok(points)
}

/// CASC-3: hit rate compared with that of the default on a cache of twice the size.
fn twice_cache_finding(
    context: &ExperimentContext<'_>,
    sizes: &[u64],
    better_cells: &[Cell],
) -> Result<Finding, ReproError> {
    let on_twice = context.run_all(better_cells, |cell| {
        context.report_progress(&format!("default at {} KB, seed {}", 2 * cell.l2_kb, cell.seed));
        let default = run_mix(&NiagaraSetting::new(2 * cell.l2_kb, cell.seed, context), &NiagaraPolicy::Default)?;
        l2_miss_ratio(&default).ok_or_else(|| failed("default")("no references"))
    })?;
    let leads: Vec<(u64, u64, f64)> = better_cells
        .iter()
        .zip(&on_twice)
        .map(|(cell, twice)| (cell.l2_kb, cell.seed, 100.0 * (twice - cell.measured.miss_ratio)))
        .collect();
    let per_seed: Vec<(u64, f64)> = context
        .seeds
        .iter()
        .map(|&seed| {
            let minimum = leads.iter().filter(|(_, own_seed, _)| *own_seed == seed).map(|(_, _, points)| *points);
            (seed, minimum.fold(f64::INFINITY, f64::min))
        })
        .collect();
    let size_point = |&size: &u64| {
        let values: Vec<f64> =
            leads.iter().filter(|(own_size, _, _)| *own_size == size).map(|(_, _, points)| *points).collect();
        DataPoint::over_values(
            "hit rate of CASC over the default's on twice the cache, points",
            format!("{size} KB"),
            &values,
        )
    };
    let points: Vec<DataPoint> = sizes.iter().map(size_point).collect();
    let of_size = points.iter().zip(sizes).map(|(point, &size)| (size, point.value.unwrap_or(f64::NAN)));
    let note = describe_shortfall(of_size, |value| value >= 0.0);
    Ok(Finding::declared("casc-3-twice-the-cache", &per_seed)
        .require_every_seed()
        .with_points(points)
        .with_note(note)
        .time_scale(SCALE as f64))
}

/// Every size, with the spread of run times limited to that of the default scheduler.
fn cells_bounded_at(context: &ExperimentContext<'_>, sizes: &[u64]) -> Result<Vec<Cell>, ReproError> {
    let settings: Vec<(u64, u64)> =
        sizes.iter().flat_map(|&l2_kb| context.seeds.iter().map(move |&seed| (l2_kb, seed))).collect();
    context.run_all(&settings, |&(l2_kb, seed)| {
        context.report_progress(&format!("spread bound to the default's at {l2_kb} KB, seed {seed}"));
        let setting = NiagaraSetting::new(l2_kb, seed, context);
        let default = measure(&setting, &NiagaraPolicy::Default)?.default_variation;
        let policy = NiagaraPolicy::better_policy(&format!("max_run_time_variation = {default}"));
        Ok(Cell { l2_kb, seed, measured: measure(&setting, &policy)? })
    })
}

/// CASC-6: the spread of run times, and gain against fairness.
fn fairness_findings(
    context: &ExperimentContext<'_>,
    sizes: &[u64],
    better_cells: &[Cell],
) -> Result<Vec<Finding>, ReproError> {
    let minimum = better_cells.iter().map(|cell| cell.measured.least_share).fold(f64::INFINITY, f64::min);
    let spread_points = metric_points("casc", better_cells, sizes);
    let spread = SizeSweep { cells: better_cells, sizes, points: &spread_points }
        .worst_size(
            "CASC-6",
            "standard deviation of run times over their mean, at the worst size",
            "90 % with CASC, 43 % with the default scheduler; no thread starved",
            METRICS[12].1,
            ResultTarget::AtMost { target: 90.0, paper_best: None },
        )
        .with_note(format!("The thread with the least CPU time has {minimum:.2} of the mean."));
    let size = *sizes.last().unwrap_or(&768);
    let of_sizes = cells_bounded_at(context, sizes)?;
    let bounds: &[f64] = context.pick(&[], &[0.1, 0.3, 0.5, 0.7, 0.9, 1.1]);
    let mut curve = Vec::new();
    for &bound in bounds {
        let policy = NiagaraPolicy::better_policy(&format!("max_run_time_variation = {bound}"));
        for cell in run_cells(context, ThreadMix::Casc, &policy, &[size])? {
            curve.push((format!("{bound}"), cell.measured));
        }
    }
    let mut points = metric_points("bound to the default's spread", &of_sizes, sizes);
    let bounded = SizeSweep { cells: &of_sizes, sizes, points: &points }.worst_size(
        "CASC-6",
        "weighted speed-up against the default's, with the spread of run times bound to the default's, worst size",
        "not given",
        METRICS[8].1,
        ResultTarget::AtLeast { target: 0.0, paper_best: None },
    );
    let cells_at_size = of_sizes.into_iter().filter(|cell| cell.l2_kb == size);
    curve.extend(cells_at_size.map(|cell| ("the default's".to_string(), cell.measured)));
    let mut names: Vec<String> = curve.iter().map(|(name, _)| name.clone()).collect();
    names.dedup();
    for (metric, value) in METRICS {
        for name in &names {
            let values: Vec<f64> =
                curve.iter().filter(|(owner, _)| owner == name).map(|(_, result)| value(result)).collect();
            points.push(DataPoint::over_values(format!("bound on the spread: {metric}"), name.clone(), &values));
        }
    }
    let chart_point = |(_, result): &(String, NiagaraResult)| {
        ChartPoint::new(100.0 * result.variation, 100.0 * result.gain.throughput_gain)
    };
    let speedup_point =
        |(_, result): &(String, NiagaraResult)| ChartPoint::new(100.0 * result.variation, METRICS[8].1(result));
    let mark = Mark::Points;
    let chart = Chart {
        title: format!("Gain against fairness at {size} KB"),
        x: Axis::linear("standard deviation of run times, % of mean"),
        y: Axis::linear("%"),
        series: vec![
            Series {
                name: "throughput gain".to_string(),
                points: curve.iter().map(chart_point).collect(),
                mark,
                ..Series::default()
            },
            Series {
                name: "weighted speed-up".to_string(),
                points: curve.iter().map(speedup_point).collect(),
                mark,
                ..Series::default()
            },
        ],
        ..Chart::default()
    };
    let figure = ResultFigure::chart("casc-6-fairness", &chart);
    let note = "The bound holds for the shares that the assignment leads one to expect; points show the spread that was measured.";
    Ok(vec![spread, bounded.with_points(points).with_figure(figure).with_note(note)])
}
