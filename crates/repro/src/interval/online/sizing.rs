//! INTERVAL-2: pairs of the thesis, sized online (RM-4 at nominal time).

use super::*;
use crate::{DataPoint, Finding, greatest};

/// Pairs of the thesis (RM-4) except the one with a multithreaded program.
const PAIRS: [(&str, &str); 6] = [
    ("mcf", "art"),
    ("vortex", "art"),
    ("ammp", "applu"),
    ("twolf", "gzip"),
    ("vpr", "swim"),
    ("twolf", "swim"),
];

/// The findings of RM-4 at nominal time.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let machine = chip_with_cores(2)?;
    let seed = context.seeds[0];
    let names: Vec<&'static str> = PAIRS.iter().flat_map(|&(a, b)| [a, b]).collect();
    let programs = measure_programs(context, &names, &machine, seed)?;

    let sized_pairs = context.run_all(&PAIRS, |&(a, b)| {
        context.report_progress(&format!("INTERVAL-2: {a} + {b}"));
        let jobs = vec![
            build_job(&programs, a, None)?,
            build_job(&programs, b, None)?,
        ];
        let query = build_query(context, &machine, jobs, seed);
        let shared_speedup = speedup_of_outcome(&run_query(context, &query, "default")?).settled;
        let speedup_at_split = |first_colors: &u32| {
            let split_policy = confining_policy(&[
                format!("0-{}", first_colors - 1),
                format!("{first_colors}-{}", COLORS - 1),
            ]);
            Ok(speedup_of_outcome(&run_query(context, &query, &split_policy)?).settled)
        };
        let speedups_by_split = (1..COLORS)
            .collect::<Vec<u32>>()
            .iter()
            .map(speedup_at_split)
            .collect::<Result<Vec<f64>>>()?;
        Ok(OnlineMix {
            name: format!("{a}+{b}"),
            shared: shared_speedup,
            divided: greatest(speedups_by_split),
            online: run_online(context, &query)?,
        })
    })?;

    Ok((0..ONLINE_POLICIES.len())
        .flat_map(|policy| sizing_findings(&sized_pairs, policy, seed))
        .collect())
}

/// Findings for the policy at this position in [`ONLINE_POLICIES`].
fn sizing_findings(sized_pairs: &[OnlineMix], policy_index: usize, seed: u64) -> Vec<Finding> {
    let is_near =
        |pair: &&OnlineMix| pair.online[policy_index].0.settled >= 0.99 * pair.best_speedup();
    let near_count = sized_pairs.iter().filter(is_near).count() as f64;
    let best_gain = |pair: &OnlineMix| pair.gain_percent(pair.best_speedup());
    let settled_gain = |pair: &OnlineMix| pair.settled_gain_percent(policy_index);
    let pair_points = |series: &str, metric: &dyn Fn(&OnlineMix) -> f64| -> Vec<DataPoint> {
        sized_pairs
            .iter()
            .map(|pair| DataPoint::from_values(series, &pair.name, [metric(pair)]))
            .collect()
    };
    let points = [
        pair_points("best split, % over shared", &best_gain),
        pair_points("online once settled, %", &settled_gain),
        pair_points("online over the whole run, %", &|pair| {
            pair.whole_gain_percent(policy_index)
        }),
        pair_points("probes and page moves, s", &|pair| {
            pair.online[policy_index].1
        }),
    ];

    let mean_gain = |metric: &dyn Fn(&OnlineMix) -> f64| mean(sized_pairs.iter().map(metric));
    let (best_gain, settled_gain) = (mean_gain(&best_gain), mean_gain(&settled_gain));
    let policy_finding = |name: &str, value: f64| {
        Finding::declared_for(name, &[TITLE_STARTS[policy_index]], &[(seed, value)])
    };
    vec![
        policy_finding("interval-2-near-best", near_count).with_points(points.concat()),
        policy_finding("interval-2-share-of-best", 100.0 * settled_gain / best_gain),
        search_price_finding("interval-2-price", sized_pairs, policy_index, seed),
    ]
}
