//! CASC (papers CASC): 18 threads on two cores of four contexts, from 48 to 768 KB of L2.

mod estimates;

use cachemate_report::figure::{Axis, Chart, Mark, Point, Series};

use crate::cmt::cells::{Cell, METRICS, cells, means, points, shortfall, size_chart, splits, worst_per_seed};
use crate::cmt::{CONTEXTS, Measured, Mix, SCALE, SIZES_KB, Setting, Who, hangs, jobs, measure, ratio, run, run_jobs};
use crate::setup::{Comparison, Job, failed};
use crate::{Bar, Context, DataPoint, Experiment, Figure, Finding, ReproError};

/// All experiments of the paper.
pub fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            ids: &["CASC-1", "CASC-2", "CASC-3", "CASC-6"],
            what: "misses, throughput and fairness of CASC against the default scheduler, over L2 sizes",
            full_minutes: 12.0,
            run: comparison,
        },
        Experiment {
            ids: &["CASC-4", "CASC-5"],
            what: "which threads are put on the right side, and how well groups are expected",
            full_minutes: 6.0,
            run: estimates::run,
        },
        Experiment {
            ids: &["CASC-7", "CASC-8"],
            what: "what measuring costs, and what identical threads get",
            full_minutes: 2.0,
            run: overhead,
        },
    ]
}

fn comparison(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let sizes: &[u64] = context.pick(&[192], &SIZES_KB);
    let better = cells(context, Mix::Casc, &Who::better(""), sizes)?;
    let mut all = points("casc", &better, sizes);
    let (bound, bound_words) = hangs::bound(context, sizes)?;
    all.extend(bound);
    if !context.quick {
        let phases = [("following phases", Who::following_phases())];
        all.extend(hangs::variations(context, Mix::Casc, &Who::better(""), &phases)?);
        all.extend(points("casc as the paper has it", &cells(context, Mix::Casc, &Who::literal(), sizes)?, sizes));
        all.extend(points("one greedy thread at a time", &cells(context, Mix::Casc, &Who::OneGreedy, sizes)?, sizes));
        all.extend(sweep(context)?);
    }
    let misses = METRICS[7].1;
    let gain = METRICS[0].1;
    let splits = splits(&better, sizes);
    let casc_1 = Finding::new(
        "CASC-1",
        "L2 miss ratio against the default scheduler, at the size where it falls least",
        "-15 to -46 %",
        "%",
        Bar::AtMost { bar: -15.0, paper_best: Some(-46.0) },
        &worst_per_seed(&better, misses, f64::max),
    )
    .note(shortfall(means(&better, sizes, misses).into_iter(), |value| value <= -15.0))
    .figure(size_chart(
        "casc-1-miss-ratio",
        "L2 miss ratio, default scheduler and CASC",
        "misses per 100 references",
        &all,
        &["casc: L2 miss ratio, default %", "casc: L2 miss ratio %"],
    ))
    .points(all.clone())
    .time_scale(SCALE as f64);
    let casc_2 = Finding::new(
        "CASC-2",
        "instructions per second against the default scheduler, at the size where they grow least",
        "+28 to +50 %",
        "%",
        Bar::AtLeast { bar: 28.0, paper_best: Some(50.0) },
        &worst_per_seed(&better, gain, f64::min),
    )
    .note(format!(
        "{} {splits}. {bound_words}.",
        shortfall(means(&better, sizes, gain).into_iter(), |value| value >= 28.0)
    ))
    .figure(size_chart(
        "casc-2-throughput",
        "Throughput gain of CASC and what it is made of",
        "%",
        &all,
        &[
            "casc: throughput gain %",
            "casc: of which mix %",
            "casc: of which contention %",
            "casc: weighted speed-up change %",
        ],
    ))
    .points(all)
    .time_scale(SCALE as f64);
    let mut findings = vec![casc_1, casc_2, twice_the_cache(context, sizes, &better)?];
    findings.extend(fairness(context, sizes, &better)?);
    Ok(findings)
}

/// CASC-1 and -2 over memory latency and bandwidth, which the paper does not state, at 192 KB.
fn sweep(context: &Context<'_>) -> Result<Vec<DataPoint>, ReproError> {
    let seed = context.seeds[0];
    let base = Setting::new(192, seed, context);
    let latency = [112, 200, 300]
        .map(|cycles| (format!("memory {cycles} cycles"), Setting { memory_cycles: Some(cycles), ..base }));
    let bandwidth = [6.4, 3.2, 1.6]
        .map(|bytes| (format!("memory {bytes} bytes a cycle"), Setting { bytes_per_cycle: Some(bytes), ..base }));
    let settings: Vec<(String, Setting)> = latency.into_iter().chain(bandwidth).collect();
    let measured = context.run_all(&settings, |(name, setting)| {
        (context.progress)(&format!("sweep, {name}"));
        measure(setting, &Who::better(""))
    })?;
    let mut points = Vec::new();
    for ((name, _), measured) in settings.iter().zip(&measured) {
        for (metric, of) in METRICS {
            points.push(DataPoint::over(format!("sweep at 192 KB: {metric}"), name.clone(), &[of(measured)]));
        }
    }
    Ok(points)
}

/// CASC-3: hit rate against the default's on twice the cache.
fn twice_the_cache(context: &Context<'_>, sizes: &[u64], better: &[Cell]) -> Result<Finding, ReproError> {
    let on_twice = context.run_all(better, |cell| {
        (context.progress)(&format!("default at {} KB, seed {}", 2 * cell.l2_kb, cell.seed));
        let default = run(&Setting::new(2 * cell.l2_kb, cell.seed, context), &Who::Default)?;
        ratio(&default).ok_or_else(|| failed("default")("no references"))
    })?;
    let ahead: Vec<(u64, u64, f64)> = better
        .iter()
        .zip(&on_twice)
        .map(|(cell, twice)| (cell.l2_kb, cell.seed, 100.0 * (twice - cell.measured.miss_ratio)))
        .collect();
    let per_seed: Vec<(u64, f64)> = context
        .seeds
        .iter()
        .map(|&seed| {
            let least = ahead.iter().filter(|(_, of, _)| *of == seed).map(|(_, _, points)| *points);
            (seed, least.fold(f64::INFINITY, f64::min))
        })
        .collect();
    let point = |&size: &u64| {
        let values: Vec<f64> = ahead.iter().filter(|(of, _, _)| *of == size).map(|(_, _, points)| *points).collect();
        DataPoint::over("hit rate of CASC over the default's on twice the cache, points", format!("{size} KB"), &values)
    };
    let points: Vec<DataPoint> = sizes.iter().map(point).collect();
    let of_size = points.iter().zip(sizes).map(|(point, &size)| (size, point.value.unwrap_or(f64::NAN)));
    let note = shortfall(of_size, |value| value >= 0.0);
    Ok(Finding::new(
        "CASC-3",
        "hit rate with CASC minus the default's on twice the cache, at the worst size (768 KB against 1536 too)",
        "at least equal at every size",
        "points",
        Bar::AtLeast { bar: 0.0, paper_best: None },
        &per_seed,
    )
    .points(points)
    .note(note)
    .time_scale(SCALE as f64))
}

/// CASC-6: the spread of run times, and gain against fairness.
fn fairness(context: &Context<'_>, sizes: &[u64], better: &[Cell]) -> Result<Vec<Finding>, ReproError> {
    let variation = METRICS[12].1;
    let least = better.iter().map(|cell| cell.measured.least_share).fold(f64::INFINITY, f64::min);
    let spread = Finding::new(
        "CASC-6",
        "standard deviation of run times over their mean, at the worst size",
        "90 % with CASC, 43 % with the default scheduler; nobody starved",
        "%",
        Bar::AtMost { bar: 90.0, paper_best: None },
        &worst_per_seed(better, variation, f64::max),
    )
    .note(format!("The thread with the least CPU time has {:.2} of the mean.", least))
    .points(points("casc", better, sizes))
    .time_scale(SCALE as f64);
    let size = *sizes.last().unwrap_or(&768);
    let bounds: &[f64] = context.pick(&[], &[0.1, 0.3, 0.5, 0.7, 0.9, 1.1]);
    let mut curve = Vec::new();
    for &bound in bounds {
        let who = Who::better(&format!("run_time_variation_at_most = {bound}"));
        for cell in cells(context, Mix::Casc, &who, &[size])? {
            curve.push((format!("{bound}"), cell.measured));
        }
    }
    let mut at_defaults = Vec::new();
    for &seed in &context.seeds {
        let setting = Setting::new(size, seed, context);
        let default = measure(&setting, &Who::Default)?.default_variation;
        let bounded = measure(&setting, &Who::better(&format!("run_time_variation_at_most = {default}")))?;
        at_defaults.push((seed, METRICS[8].1(&bounded)));
        curve.push(("the default's".to_string(), bounded));
    }
    let mut names: Vec<String> = curve.iter().map(|(name, _)| name.clone()).collect();
    names.dedup();
    let mut points = Vec::new();
    for (metric, of) in METRICS {
        for name in &names {
            let values: Vec<f64> =
                curve.iter().filter(|(of, _)| of == name).map(|(_, measured)| of(measured)).collect();
            points.push(DataPoint::over(format!("bound on the spread: {metric}"), name.clone(), &values));
        }
    }
    let chart_point = |(_, measured): &(String, Measured)| {
        Point::new(100.0 * measured.variation, 100.0 * measured.gain.throughput_gain)
    };
    let speedup_point =
        |(_, measured): &(String, Measured)| Point::new(100.0 * measured.variation, METRICS[8].1(measured));
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
    let figure = Figure {
        name: "casc-6-fairness".to_string(),
        title: chart.title.clone(),
        svg: chart.svg(),
        inline: chart.inline(),
    };
    let bounded = Finding::new(
        "CASC-6",
        "weighted speed-up against the default's, with the spread of run times bound to the default's",
        "not given",
        "%",
        Bar::AtLeast { bar: 0.0, paper_best: None },
        &at_defaults,
    )
    .points(points)
    .figure(figure)
    .note("The bound holds for the shares that the assignment leads one to expect; points show the spread that was measured.")
    .time_scale(SCALE as f64);
    Ok(vec![spread, bounded])
}

/// CASC-7 and CASC-8.
fn overhead(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let size = 192;
    let compare = |setting: &Setting, who: &Who, name: &str, jobs: &[Job]| {
        let (new, old) = (run_jobs(setting, who, name, jobs)?, run_jobs(setting, &Who::Default, name, jobs)?);
        Comparison::of(&new, &old).ok_or_else(|| failed(name)("a thread never ran"))
    };
    // A threshold of 100 is always met, so nobody is restricted (CASC 5.3.4).
    let measuring = Who::better("threshold = 1000.0\nremeasure_every_ns = 250000000");
    let (mut costs, mut same) = (Vec::new(), Vec::new());
    for &seed in &context.seeds {
        let setting = Setting::new(size, seed, context);
        let cost = compare(&setting, &measuring, "all", &jobs(seed))?;
        costs.push((seed, cost));
        let identical: Vec<Job> =
            (0..18).map(|at| Job { name: format!("twolf-{at}"), ..Job::new("twolf", 1_000 * seed) }).collect();
        same.push((seed, compare(&setting, &Who::better(""), "identical", &identical)?));
    }
    context.go_on()?;
    let values = |of: fn(&Comparison) -> f64, from: &[(u64, Comparison)]| {
        from.iter().map(|(seed, gain)| (*seed, 100.0 * of(gain))).collect::<Vec<_>>()
    };
    let split = |name: &str, from: &[(u64, Comparison)]| {
        let parts: [(&str, fn(&Comparison) -> f64); 4] = [
            ("throughput gain %", |gain| gain.throughput_gain),
            ("of which mix %", |gain| gain.mix_gain),
            ("of which contention %", |gain| gain.contention_gain),
            ("busy gain %", |gain| gain.busy_gain),
        ];
        let point = |(part, of): (&str, fn(&Comparison) -> f64)| {
            let values: Vec<f64> = from.iter().map(|(_, gain)| 100.0 * of(gain)).collect();
            DataPoint::over(format!("{name}: {part}"), format!("{size} KB"), &values)
        };
        parts.map(point).to_vec()
    };
    let overhead = Finding::new(
        "CASC-7",
        "slowdown of the threads at their shares of time, measured again every 250 ms without restricting anybody",
        "not measurable",
        "%",
        Bar::AtMost { bar: 0.5, paper_best: None },
        &values(|gain| -gain.contention_gain, &costs),
    )
    .points(split("measuring", &costs))
    .note(format!(
        "Rows bring {CONTEXTS} threads together at a time and so change who runs how long while they last (mix); what they cost is \
         what threads lose at equal time. Deciding is not simulated: the bench group 'policies' has its time."
    ))
    .time_scale(SCALE as f64);
    let nothing = Finding::new(
        "CASC-8",
        "throughput of 18 identical threads against the default scheduler",
        "no gain, no penalty",
        "%",
        Bar::Within { low: -0.5, high: 0.5 },
        &values(|gain| gain.throughput_gain, &same),
    )
    .points(split("identical", &same))
    .time_scale(SCALE as f64);
    Ok(vec![overhead, nothing])
}
