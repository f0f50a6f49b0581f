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
    /// Speedup under each of [`ONLINE`], with the seconds that its probes and page moves took.
    online: Vec<(Speedup, f64)>,
}

impl SizedPair {
    /// The better of sharing and the best split.
    fn best(&self) -> f64 {
        self.splits.iter().copied().fold(self.shared, f64::max)
    }
    fn percent(&self, value: f64) -> f64 {
        100.0 * (value / self.shared - 1.0)
    }
}

/// RM-4 at nominal time.
///
/// # Errors
/// An invalid program, machine or policy, or the interruption.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let machine = chip(2)?;
    let pairs: &[(&'static str, &'static str)] = &PAIRS;
    let seed = context.seeds.first().copied().unwrap_or(1);
    let names: Vec<&'static str> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
    let programs = programs(context, &names, &machine, seed)?;
    let sized_pairs = context.run_all(pairs, |&(a, b)| {
        context.report_progress(&format!("INTERVAL-2: {a} + {b}"));
        let jobs = vec![job(&programs, a, None)?, job(&programs, b, None)?];
        let query = build_query(context, &machine, jobs, seed);
        let shared_speedup = speedup(&outcome(context, &query, "default")?).settled;
        let split = |first: &u32| {
            let by = confining_policy(&[format!("0-{}", first - 1), format!("{first}-{}", COLORS - 1)]);
            Ok(speedup(&outcome(context, &query, &by)?).settled)
        };
        let splits = (1..COLORS).collect::<Vec<u32>>().iter().map(split).collect::<Result<_, ReproError>>()?;
        let online = |policy: &&str| {
            let run = outcome(context, &guard_query(&query), policy)?;
            Ok((speedup(&run), run.overhead_seconds))
        };
        let online = ONLINE.iter().map(online).collect::<Result<_, ReproError>>()?;
        Ok(SizedPair { name: format!("{a}+{b}"), shared: shared_speedup, splits, online })
    })?;
    Ok((0..ONLINE.len()).flat_map(|policy| sizing_findings(&sized_pairs, policy, seed)).collect())
}

/// Findings for the policy at this position in [`ONLINE`].
fn sizing_findings(sized_pairs: &[SizedPair], policy: usize, seed: u64) -> Vec<Finding> {
    let online = |pair: &SizedPair| pair.online[policy].0;
    let near_count = sized_pairs.iter().filter(|pair| online(pair).settled >= 0.99 * pair.best()).count() as f64;
    let point = |series: &str, metric: &dyn Fn(&SizedPair) -> f64| -> Vec<DataPoint> {
        sized_pairs.iter().map(|pair| DataPoint::over_values(series, pair.name.clone(), &[metric(pair)])).collect()
    };
    let points = [
        point("best split, % over shared", &|pair| pair.percent(pair.best())),
        point("online once settled, %", &|pair| pair.percent(online(pair).settled)),
        point("online over the whole run, %", &|pair| pair.percent(online(pair).whole)),
        point("probes and page moves, s", &|pair| pair.online[policy].1),
    ];
    let gain = |metric: &dyn Fn(&SizedPair) -> f64| mean(&sized_pairs.iter().map(metric).collect::<Vec<f64>>());
    let (best, settled) = (gain(&|pair| pair.percent(pair.best())), gain(&|pair| pair.percent(online(pair).settled)));
    let price = gain(&|pair| pair.percent(online(pair).settled) - pair.percent(online(pair).whole));
    let finding = |title: &str, unit: &str, target: ResultTarget, value: f64| {
        Finding::new(
            "INTERVAL-2",
            &policy_title(ONLINE[policy], title),
            "RM-4 at nominal time",
            unit,
            target,
            &[(seed, value)],
        )
    };
    let target = |target: f64| ResultTarget::AtLeast { target, paper_best: None };
    let count_text = format!("of {} pairs", sized_pairs.len());
    // The same fraction as five of RM-4's seven.
    let target_count = (5.0 * sized_pairs.len() as f64 / 7.0).ceil();
    vec![
        finding("pairs whose online split is within 1 % of the best", &count_text, target(target_count), near_count).points(points.concat()).with_note(
            "L3 off, the interval machine, which has one contended cache; one pair of RM-4 is left out, as its program has \
             several threads. Gains are of weighted speed-up.",
        ),
        finding("online gain over the best split's, in the mean", "%", target(90.0), 100.0 * settled / best),
        finding("price of the search: gain once settled less gain over the whole run", "points", ResultTarget::Shown, price),
    ]
}
