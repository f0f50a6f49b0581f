//! INTERVAL-2: pairs of the thesis, sized online (RM-4 at nominal time).

use super::*;
use crate::{Bar, DataPoint, Finding};

/// Pairs of the thesis (RM-4) but the one with a program of several threads.
const PAIRS: [(&str, &str); 6] =
    [("mcf", "art"), ("vortex", "art"), ("ammp", "applu"), ("twolf", "gzip"), ("vpr", "swim"), ("twolf", "swim")];

/// One pair: shared, at all splits, and sized online.
#[derive(Serialize, Deserialize)]
struct Sized {
    name: String,
    shared: f64,
    /// By colors of the first.
    splits: Vec<f64>,
    online: Speedup,
    cost_seconds: f64,
}

impl Sized {
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
/// A program, machine or policy that cannot be, or the interruption.
pub(crate) fn run(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let machine = chip(2)?;
    let pairs: &[(&'static str, &'static str)] = context.pick(&PAIRS[4..], &PAIRS);
    let seed = context.seeds.first().copied().unwrap_or(1);
    let names: Vec<&'static str> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
    let programs = programs(context, &names, &machine, seed)?;
    let all = context.run_all(pairs, |&(a, b)| {
        context.tell(&format!("INTERVAL-2: {a} + {b}"));
        let jobs = vec![job(&programs, a, None)?, job(&programs, b, None)?];
        let asked = question(context, &machine, jobs, seed);
        let shared = speedup(&outcome(context, &asked, "default")?).settled;
        let split = |first: &u32| {
            let by = held_to(&[format!("0-{}", first - 1), format!("{first}-{}", COLORS - 1)]);
            Ok(speedup(&outcome(context, &asked, &by)?).settled)
        };
        let splits = (1..COLORS).collect::<Vec<u32>>().iter().map(split).collect::<Result<_, ReproError>>()?;
        let online = outcome(context, &guarded(&asked), "cache-sizing")?;
        Ok(Sized {
            name: format!("{a}+{b}"),
            shared,
            splits,
            online: speedup(&online),
            cost_seconds: online.cost_seconds,
        })
    })?;
    Ok(sizing_findings(&all, seed))
}

fn sizing_findings(all: &[Sized], seed: u64) -> Vec<Finding> {
    let near = all.iter().filter(|pair| pair.online.settled >= 0.99 * pair.best()).count() as f64;
    let point = |series: &str, of: &dyn Fn(&Sized) -> f64| -> Vec<DataPoint> {
        all.iter().map(|pair| DataPoint::over(series, pair.name.clone(), &[of(pair)])).collect()
    };
    let points = [
        point("best split, % over shared", &|pair| pair.percent(pair.best())),
        point("online once settled, %", &|pair| pair.percent(pair.online.settled)),
        point("online over the whole run, %", &|pair| pair.percent(pair.online.whole)),
        point("probes and page moves, s", &|pair| pair.cost_seconds),
    ];
    let gain = |of: &dyn Fn(&Sized) -> f64| mean(&all.iter().map(of).collect::<Vec<f64>>());
    let (best, settled) = (gain(&|pair| pair.percent(pair.best())), gain(&|pair| pair.percent(pair.online.settled)));
    let price = gain(&|pair| pair.percent(pair.online.settled) - pair.percent(pair.online.whole));
    let told = |what: &str, unit: &str, bar: Bar, value: f64| {
        Finding::new("INTERVAL-2", what, "RM-4 at nominal time", unit, bar, &[(seed, value)])
    };
    let bar = |bar: f64| Bar::AtLeast { bar, paper_best: None };
    let of = format!("of {} pairs", all.len());
    vec![
        told("pairs whose online split is within 1 % of the best", &of, Bar::Shown, near).points(points.concat()).note(
            "L3 off, the interval machine; one pair of RM-4 is left out, as its program has several threads. Gains are of \
             weighted speed-up.",
        ),
        told("online gain over the best split's, in the mean", "%", bar(90.0), 100.0 * settled / best),
        told("price of the search: gain once settled less gain over the whole run", "points", Bar::Shown, price),
    ]
}
