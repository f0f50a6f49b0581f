//! TC-2: are the clusters the program's own? With the picture of Figure 3.5, before and after.

use cachemate_locality::shmap::Sharing;
use cachemate_policy::clustering::{Method, ThreadMap, find};
use cachemate_report::figure::{HeatMap, Shade};
use cachemate_sim::kernels::Options;

use super::setup::{Case, Placement, Round, SAMPLES, SCALE, SMALL, Setting, four, rounds};
use crate::{Bar, Context, DataPoint, Figure, Finding, ReproError};

/// Below every program's share of remote stalls, so that all four are looked at.
const LOW: &str = "activation_share = 0.02";

/// What one run found.
struct Outcome {
    agreement: f64,
    unclustered: usize,
    clusters: usize,
    rounds: usize,
    first: Option<Round>,
    last: Option<Round>,
}

fn outcome(context: &Context<'_>, case: &Case, seed: u64, more: &str) -> Result<Outcome, ReproError> {
    // Long enough for several rounds: data comes into the caches first, and the filter is cleared for each.
    let setting = Setting {
        warm_up_windows: context.pick(3, 12),
        measured_windows: 1,
        ..Setting::new(context, SMALL, case, seed)
    };
    let truth = case.truth(seed)?;
    let run = setting.run(&Placement::Automatic(format!("{LOW}\n{more}")))?;
    let mut found = rounds(&run.records, truth.len(), setting.entries);
    let workers = truth.iter().flatten().count();
    let count = found.len();
    let last = found.pop();
    Ok(Outcome {
        agreement: last.as_ref().map_or(0.0, |round| round.agreement(&truth)),
        unclustered: last.as_ref().map_or(workers, |round| round.unclustered_workers(&truth)),
        clusters: last.as_ref().map_or(0, |round| round.clusters),
        rounds: count,
        first: (!found.is_empty()).then(|| found.swap_remove(0)),
        last,
    })
}

/// The chapter's programs, and each with what makes it harder: background threads, uneven clusters, a change midway.
fn cases(context: &Context<'_>) -> Vec<Case> {
    let mut cases = four();
    let with = |name, kernel, change: fn(&mut Options)| {
        let mut options = Options::default();
        change(&mut options);
        Case::new(name, kernel, options)
    };
    if !context.quick {
        cases.push(with("warehouses 4 x 16", "warehouses", |o| (o.groups, o.threads) = (Some(4), Some(16))));
        for (name, kernel) in [
            ("scoreboards, 2 collectors", "scoreboards"),
            ("warehouses, 2 collectors", "warehouses"),
            ("databases, 2 background threads", "rubis"),
            ("chat rooms, 2 collectors", "chatrooms"),
        ] {
            cases.push(with(name, kernel, |o| o.background_threads = Some(2)));
        }
        cases.push(with("scoreboards 6 + 4 + 4 + 2", "scoreboards", |o| o.group_sizes = vec![6, 4, 4, 2]));
        cases.push(with("warehouses 10 + 6", "warehouses", |o| o.group_sizes = vec![10, 6]));
        cases.push(with("databases 20 + 12", "rubis", |o| o.group_sizes = vec![20, 12]));
        cases.push(with("chat rooms 10 + 6", "chatrooms", |o| o.group_sizes = vec![10, 6]));
    }
    cases
}

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let cases = cases(context);
    let items: Vec<(usize, u64)> =
        (0..cases.len()).flat_map(|case| context.seeds.iter().map(move |&seed| (case, seed))).collect();
    let outcomes = context.run_all(&items, |&(case, seed)| {
        (context.progress)(&format!("TC-2 {} seed {seed}", cases[case].name));
        outcome(context, &cases[case], seed, "")
    })?;
    let of = |case: usize| items.iter().zip(&outcomes).filter(move |((at, _), _)| *at == case).map(|(_, found)| found);
    let mut points = Vec::new();
    let mut figures = Vec::new();
    for (at, case) in cases.iter().enumerate() {
        let values = |value: fn(&Outcome) -> f64| of(at).map(value).collect::<Vec<f64>>();
        points.push(DataPoint::over("adjusted Rand index", case.name, &values(|found| found.agreement)));
        points.push(DataPoint::over("clusters", case.name, &values(|found| found.clusters as f64)));
        points.push(DataPoint::over("unclustered workers", case.name, &values(|found| found.unclustered as f64)));
        points.push(DataPoint::over("rounds that moved threads", case.name, &values(|found| found.rounds as f64)));
        let by_scan = of(at).map(|found| one_pass_agreement(found, &case.truth(1).unwrap_or_default()));
        points.push(DataPoint::over("adjusted Rand index, one pass", case.name, &by_scan.collect::<Vec<f64>>()));
        if let Some(round) = of(at).find_map(|found| found.first.as_ref().or(found.last.as_ref())) {
            figures.extend(pictures(case, round));
        }
    }
    let worst = |seed: u64| {
        let of_seed = items.iter().zip(&outcomes).filter(|((case, at), _)| *at == seed && *case < 4);
        of_seed.map(|(_, found)| found.agreement).fold(f64::INFINITY, f64::min)
    };
    let per_seed: Vec<(u64, f64)> = context.seeds.iter().map(|&seed| (seed, worst(seed))).collect();
    let mut finding = Finding::new(
        "TC-2",
        "worst agreement of workers' clusters with the programs' own partition, four programs",
        "clusters equal the partition for the microbenchmark and SPECjbb; RUBiS two and some unclustered; VolanoMark five instead of two",
        "adjusted Rand index",
        Bar::AtLeast { bar: 1.0, paper_best: None },
        &per_seed,
    )
    .points(points)
    .time_scale(SCALE as f64)
    .note(format!(
        "Activation at 2 % so that all four are sampled; {SAMPLES} samples a round. \"One pass\" is the thesis's scan on the \
         same shMaps of the first round. Uneven clusters, background threads and 4 x 16 warehouses in full runs. Short runs fall \
         short on warehouses and databases; the cause has not been measured."
    ));
    finding.figures = figures;
    Ok(vec![finding])
}

/// The thesis's scan on the same maps, at the threshold that the policy's default gives for these samples.
fn one_pass_agreement(found: &Outcome, truth: &[Option<u32>]) -> f64 {
    let Some(round) = found.first.as_ref().or(found.last.as_ref()) else { return 0.0 };
    let threads: Vec<ThreadMap<'_>> =
        round.maps.iter().map(|map| ThreadMap { counters: map, together: None }).collect();
    let clusters = find(Method::OnePass, &threads, &Sharing::default(), 36);
    let alone = |at: usize| clusters.count + at;
    let cluster_of = clusters.of.iter().enumerate().map(|(at, of)| of.unwrap_or(alone(at))).collect();
    let clustered = clusters.of.iter().map(Option::is_some).collect();
    Round { cluster_of, clusters: clusters.count, clustered, maps: Vec::new() }.agreement(truth)
}

/// shMaps as they came, and by cluster; data that more than one cluster touches left out, as in the thesis.
fn pictures(case: &Case, round: &Round) -> [Figure; 2] {
    let threads: Vec<ThreadMap<'_>> =
        round.maps.iter().map(|map| ThreadMap { counters: map, together: None }).collect();
    let global = find(Method::CoClusters, &threads, &Sharing::default(), 36).global;
    // A shuffled order is what an observer without the clusters has.
    let mut before: Vec<usize> = (0..round.maps.len()).collect();
    cachemate_policy::rng::SplitMix64::new(1).shuffle(&mut before);
    let mut after: Vec<usize> = (0..round.maps.len()).collect();
    after.sort_by_key(|&thread| (round.cluster_of[thread], thread));
    let kept: Vec<usize> = (0..global.len()).filter(|&entry| !global[entry]).collect();
    let draw = |order: &[usize], when: &str| {
        let value = |thread: usize, entry: usize| round.maps[thread].get(entry).map(|&count| f64::from(count));
        let map = HeatMap {
            title: format!("{}: shMaps {when}", case.name),
            rows: order.iter().map(|thread| thread.to_string()).collect(),
            columns: kept.iter().map(|entry| entry.to_string()).collect(),
            row_label: "thread".to_string(),
            column_label: "shMap entry".to_string(),
            values: order.iter().map(|&t| kept.iter().map(|&entry| value(t, entry).or(Some(0.0))).collect()).collect(),
            full: None,
            shade: Shade::Grey,
            unit: String::new(),
            decimals: Some(0),
            by_root: true,
            bare: true,
        };
        let slug: String = case.name.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
        let name = format!("tc-2-{slug}-{}", if when.starts_with("before") { "before" } else { "after" });
        Figure { name, title: map.title.clone(), svg: map.svg(), inline: map.inline() }
    };
    [draw(&before, "before clustering"), draw(&after, "by cluster")]
}
