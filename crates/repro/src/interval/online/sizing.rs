//! INTERVAL-2: pairs of the thesis, sized online (RM-4 at nominal time).

use super::*;
use crate::{DataPoint, Finding, ResultTarget};

/// Pairs of the thesis (RM-4) except the one with a multithreaded program.
const PAIRS: [(&str, &str); 6] =
    [("mcf", "art"), ("vortex", "art"), ("ammp", "applu"), ("twolf", "gzip"), ("vpr", "swim"), ("twolf", "swim")];

/// One pair: shared, at all splits, and sized online.
#[derive(Serialize, Deserialize)]
struct SizedPair {
    name: String,
    shared: f64,
    /// Speedup by colors of the first program.
    splits: Vec<f64>,
    /// Speedup under each of [`ONLINE_POLICIES`], with the seconds that its probes and page moves took.
    online: Vec<(Speedup, f64)>,
}

impl SizedPair {
    /// The better of sharing and the best split.
    fn best_speedup(&self) -> f64 {
        self.splits.iter().copied().fold(self.shared, f64::max)
    }
    fn gain_percent(&self, value: f64) -> f64 {
        100.0 * (value / self.shared - 1.0)
    }
}

/// RM-4 at nominal time.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let machine = chip_with_cores(2)?;
    let pairs: &[(&'static str, &'static str)] = &PAIRS;
    let seed = context.seeds.first().copied().unwrap_or(1);
    let names: Vec<&'static str> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
    let programs = measure_programs(context, &names, &machine, seed)?;
    let sized_pairs = context.run_all(pairs, |&(a, b)| {
        context.report_progress(&format!("INTERVAL-2: {a} + {b}"));
        let jobs = vec![build_job(&programs, a, None)?, build_job(&programs, b, None)?];
        let query = build_query(context, &machine, jobs, seed);
        let shared_speedup = speedup_of_outcome(&run_query(context, &query, "default")?).settled;
        let speedup_at_split = |first_colors: &u32| {
            let split_policy =
                confining_policy(&[format!("0-{}", first_colors - 1), format!("{first_colors}-{}", COLOR_COUNT - 1)]);
            Ok(speedup_of_outcome(&run_query(context, &query, &split_policy)?).settled)
        };
        let speedups_by_split =
            (1..COLOR_COUNT).collect::<Vec<u32>>().iter().map(speedup_at_split).collect::<Result<_, ReproError>>()?;
        let run_online = |policy: &&str| {
            let run = run_query(context, &guarded_query(&query), policy)?;
            Ok((speedup_of_outcome(&run), run.overhead_seconds))
        };
        let speedups_by_policy = ONLINE_POLICIES.iter().map(run_online).collect::<Result<_, ReproError>>()?;
        Ok(SizedPair {
            name: format!("{a}+{b}"),
            shared: shared_speedup,
            splits: speedups_by_split,
            online: speedups_by_policy,
        })
    })?;
    Ok((0..ONLINE_POLICIES.len()).flat_map(|policy| sizing_findings(&sized_pairs, policy, seed)).collect())
}

/// Findings for the policy at this position in [`ONLINE_POLICIES`].
fn sizing_findings(sized_pairs: &[SizedPair], policy_index: usize, seed: u64) -> Vec<Finding> {
    let online_speedup = |pair: &SizedPair| pair.online[policy_index].0;
    let near_count =
        sized_pairs.iter().filter(|pair| online_speedup(pair).settled >= 0.99 * pair.best_speedup()).count() as f64;
    let pair_points = |series: &str, metric: &dyn Fn(&SizedPair) -> f64| -> Vec<DataPoint> {
        sized_pairs.iter().map(|pair| DataPoint::from_values(series, pair.name.clone(), &[metric(pair)])).collect()
    };
    let points = [
        pair_points("best split, % over shared", &|pair| pair.gain_percent(pair.best_speedup())),
        pair_points("online once settled, %", &|pair| pair.gain_percent(online_speedup(pair).settled)),
        pair_points("online over the whole run, %", &|pair| pair.gain_percent(online_speedup(pair).whole)),
        pair_points("probes and page moves, s", &|pair| pair.online[policy_index].1),
    ];
    let mean_gain = |metric: &dyn Fn(&SizedPair) -> f64| mean(&sized_pairs.iter().map(metric).collect::<Vec<f64>>());
    let (best_gain, settled_gain) = (
        mean_gain(&|pair| pair.gain_percent(pair.best_speedup())),
        mean_gain(&|pair| pair.gain_percent(online_speedup(pair).settled)),
    );
    let mean_settling_cost = mean_gain(&|pair| {
        pair.gain_percent(online_speedup(pair).settled) - pair.gain_percent(online_speedup(pair).whole)
    });
    let nominal_finding = |title: &str, unit: &str, target: ResultTarget, value: f64| {
        Finding::new(
            "INTERVAL-2",
            &policy_title(ONLINE_POLICIES[policy_index], title),
            "RM-4 at nominal time",
            unit,
            target,
            &[(seed, value)],
        )
    };
    let at_least_target = |target: f64| ResultTarget::AtLeast { target, paper_best: None };
    let unit_text = format!("of {} pairs", sized_pairs.len());
    // The same fraction as five of RM-4's seven.
    let target_count = (5.0 * sized_pairs.len() as f64 / 7.0).ceil();
    vec![
        nominal_finding("pairs whose online split is within 1 % of the best", &unit_text, at_least_target(target_count), near_count).with_points(points.concat()).with_note(
            "L3 off, the interval machine, which has one contended cache; one pair of RM-4 is left out, as its program has \
             several threads. Gains are of weighted speed-up.",
        ),
        nominal_finding("online gain over the best split's, in the mean", "%", at_least_target(90.0), 100.0 * settled_gain / best_gain),
        nominal_finding("price of the search: gain once settled less gain over the whole run", "points", ResultTarget::Shown, mean_settling_cost),
    ]
}
