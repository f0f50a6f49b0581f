//! INTERVAL-2 and INTERVAL-3: online policies at nominal time, where windows are as long as they are meant to be.
//!
//! On the cycle-level machine windows are divided by up to 5000 while caches are not, so a trial waits for a turnover of
//! the cache longer than a run lasts. Here nothing is divided. Two figures each: what the policy has once it has settled
//! (the last quarter of an hour's run), and what its search costs (that against the whole run). Programs are the
//! cycle-level machine's, measured alone there; their phases last [`STRETCH`] times longer.

use std::sync::Arc;

use cachemate_core::{MachineSpec, SplitMix64};
use cachemate_interval::{Job, Program};
use cachemate_report::PolicyOutcome;
use serde::{Deserialize, Serialize};

use super::nominal::measured;
use super::whatif::{Question, outcome};
use crate::setup::failed;
use crate::{Bar, Context, DataPoint, Finding, ReproError, mean};

const STRETCH: f64 = 1000.0;
/// The thesis' chip without its L3: the cache that is divided is the last before memory.
const CHIP: &str = "power5-2x2x2?packages=1&memory.nodes=1&contexts_per_core=1&memory.size=2G";
const COLORS: u32 = 16;
/// The paper's ten programs (CA).
const TEN: [&str; 10] =
    ["mcf-2006", "milc", "gamess", "namd", "soplex", "sphinx", "gcc", "gobmk", "libquantum", "povray"];
/// Pairs of the thesis (RM-4) but the one with a program of several threads.
const PAIRS: [(&str, &str); 6] =
    [("mcf", "art"), ("vortex", "art"), ("ammp", "applu"), ("twolf", "gzip"), ("vpr", "swim"), ("twolf", "swim")];

/// Sum of the programs' speeds over those alone, once settled and over the whole run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Speedup {
    settled: f64,
    whole: f64,
}

fn speedup(outcome: &PolicyOutcome) -> Speedup {
    let rows = &outcome.lines.slowdown;
    let sum = |from: usize| -> f64 {
        let of = |row: &Vec<Option<f64>>| {
            let values: Vec<f64> = row[from.min(row.len())..].iter().filter_map(|value| *value).collect();
            if values.is_empty() { 0.0 } else { 1.0 / mean(&values) }
        };
        rows.iter().map(of).sum()
    };
    Speedup { settled: sum(outcome.lines.seconds.len() * 3 / 4), whole: sum(0) }
}

fn question(context: &Context<'_>, machine: &MachineSpec, jobs: Vec<Job>, seed: u64) -> Question {
    let length_ns = context.pick(900_000_000_000, 3_600_000_000_000);
    Question { machine: machine.clone(), jobs, length_ns, seed, explicit: false, guard: false }
}

/// Programs by name, each measured alone once.
fn programs(
    context: &Context<'_>,
    names: &[&'static str],
    machine: &MachineSpec,
    seed: u64,
) -> Result<Vec<(&'static str, Arc<Program>)>, ReproError> {
    let mut names = names.to_vec();
    names.sort_unstable();
    names.dedup();
    (context.progress)(&format!("{}: {} programs alone, seed {seed}", machine.name, names.len()));
    context.run_here(&names, |&name| {
        Ok((name, Arc::new(measured(&crate::setup::Job::new(name, seed), machine, STRETCH)?)))
    })
}

fn job(programs: &[(&'static str, Arc<Program>)], name: &str, cpu: Option<u32>) -> Result<Job, ReproError> {
    let found = programs.iter().find(|(known, _)| *known == name).ok_or_else(|| failed(name)("was not measured"))?;
    Ok(Job { pinned: cpu.map(|cpu| [cpu].into_iter().collect()), ..Job::new(Arc::clone(&found.1)) })
}

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
pub fn sizing(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let mut machine = cachemate_spec::load_machine(CHIP).map_err(failed(CHIP))?;
    machine.caches.retain(|cache| cache.level != cachemate_core::Level::L3);
    let pairs: &[(&'static str, &'static str)] = context.pick(&PAIRS[4..], &PAIRS);
    let seed = context.seeds.first().copied().unwrap_or(1);
    let names: Vec<&'static str> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
    let programs = programs(context, &names, &machine, seed)?;
    let all = context.run_all(pairs, |&(a, b)| {
        (context.progress)(&format!("INTERVAL-2: {a} + {b}"));
        let jobs = vec![job(&programs, a, Some(0))?, job(&programs, b, Some(1))?];
        let asked = question(context, &machine, jobs, seed);
        let shared = speedup(&outcome(context, &asked, "default")?).settled;
        let split = |first: &u32| {
            let by = format!(
                "static-partition:window_ns = 1_000_000_000\nsteps = [{{ shares = ['0-{}', '{first}-{}'] }}]",
                first - 1,
                COLORS - 1
            );
            Ok(speedup(&outcome(context, &asked, &by)?).settled)
        };
        let splits = (1..COLORS).collect::<Vec<u32>>().iter().map(split).collect::<Result<_, ReproError>>()?;
        let online = outcome(context, &asked, "cache-sizing")?;
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

/// CA-6 at nominal time: DIO on four cores against all schedules.
///
/// # Errors
/// As [`sizing`].
pub fn placing(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let machine = cachemate_spec::load_machine("xeon-x5365-4").map_err(failed("xeon-x5365-4"))?;
    let seed = context.seeds.first().copied().unwrap_or(1);
    let mut draws = SplitMix64::new(seed);
    let fours: Vec<[&'static str; 4]> = (0..context.pick(2, 8))
        .map(|_| {
            let mut names = TEN;
            draws.shuffle(&mut names);
            [names[0], names[1], names[2], names[3]]
        })
        .collect();
    let names: Vec<&'static str> = fours.iter().flatten().copied().collect();
    let programs = programs(context, &names, &machine, seed)?;
    let found = context.run_all(&fours, |four| {
        (context.progress)(&format!("INTERVAL-3: {}", four.join(" + ")));
        let on = |cpus: [Option<u32>; 4], policy: &str| {
            let jobs = four.iter().zip(cpus).map(|(name, cpu)| job(&programs, name, cpu)).collect::<Result<_, _>>()?;
            outcome(context, &question(context, &machine, jobs, seed), policy)
        };
        let mut pairings = Vec::new();
        for cpus in [[0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 3, 1]] {
            pairings.push(speedup(&on(cpus.map(Some), "default")?).settled);
        }
        let dio = on([None; 4], "dio")?;
        let best = pairings.iter().copied().fold(0.0, f64::max);
        Ok((four.join("+"), best, speedup(&dio), dio.changes_per_hour))
    })?;
    let short = |value: f64, best: f64| 100.0 * (1.0 - value / best);
    let most = found.iter().map(|(_, best, dio, _)| short(dio.settled, *best)).fold(0.0, f64::max);
    let price: Vec<f64> =
        found.iter().map(|(_, best, dio, _)| short(dio.whole, *best) - short(dio.settled, *best)).collect();
    let points = found.iter().flat_map(|(name, best, dio, changes)| {
        [
            DataPoint::over("short of the best schedule once settled, %", name.clone(), &[short(dio.settled, *best)]),
            DataPoint::over("over the whole run, %", name.clone(), &[short(dio.whole, *best)]),
            DataPoint::over("changes an hour", name.clone(), &[*changes]),
        ]
    });
    let bar = Bar::AtMost { bar: 2.0, paper_best: None };
    let told = |what: &str, unit: &str, bar: Bar, value: f64| {
        Finding::new("INTERVAL-3", what, "CA-6 at nominal time: within 2 %", unit, bar, &[(seed, value)])
    };
    Ok(vec![
        told("DIO short of the best schedule of four programs, worst mix", "%", bar, most)
            .points(points.collect())
            .note("Weighted speed-up on the interval machine, windows of 10^9 cycles, without the guard."),
        told("price of the search, mean", "points", Bar::Shown, mean(&price)),
    ])
}
