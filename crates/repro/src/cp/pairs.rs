//! Pairs of programs at all splits of the cache, sharing it, and alone: what CP-2 to CP-4 and RM-4 are read from.

use cachemate_core::{Level, Plan, Profiles, TaskId, Window};
use cachemate_policy::partition::space::Space;
use cachemate_policy::solvers::sizing::{Claim, Total, exact, total_cost};
use cachemate_sim::results::{RunResults, StallCycles};

use super::{COLOURS, Pace, job, on_chip, rates, split, tell, told};
use crate::setup::Workload;
use crate::{Context, ReproError};

pub(crate) type Pair = (&'static str, &'static str);

/// Thesis Figure 4.6; `warehouses` stands for SPECjbb. Its seventh pair is not named in the text, only that swim is in
/// it: taken is twolf, the other program whose curve the text calls unusual.
pub(crate) const PAIRS: [Pair; 7] = [
    ("warehouses", "equake"),
    ("mcf", "art"),
    ("vortex", "art"),
    ("ammp", "applu"),
    ("twolf", "gzip"),
    ("vpr", "swim"),
    ("twolf", "swim"),
];
/// Pairs that sharing does not hurt (4.6.2).
pub(super) const CONTROLS: [Pair; 3] = [("gap", "parser"), ("apsi", "crafty"), ("vortex", "mesa")];
/// A slowdown from sharing below this is noise: nothing to recover.
const SLOWED: f64 = 0.01;

/// One pair under one seed; all rates in instructions per elapsed cycle, of the first and the second program.
pub(crate) struct Measured {
    pub pair: Pair,
    pub alone: [f64; 2],
    pub shared: [f64; 2],
    /// By colours of the first.
    pub splits: Vec<(u32, [f64; 2])>,
}

impl Measured {
    /// Rates over those under sharing, minus one.
    pub fn gains(&self, rates: &[f64; 2]) -> [f64; 2] {
        [rates[0] / self.shared[0] - 1.0, rates[1] / self.shared[1] - 1.0]
    }
    pub fn sum(&self, rates: &[f64; 2]) -> f64 {
        self.gains(rates).iter().sum()
    }
    /// Sum of speeds over those alone.
    pub fn weighted_speedup(&self, rates: &[f64; 2]) -> f64 {
        rates[0] / self.alone[0] + rates[1] / self.alone[1]
    }
    /// At a split, or where it is left shared; `None` where that split was not measured.
    pub fn rates_at(&self, first: Option<u32>) -> Option<[f64; 2]> {
        let Some(first) = first else { return Some(self.shared) };
        self.splits.iter().find(|(split, _)| *split == first).map(|(_, rates)| *rates)
    }
    /// The measured split nearest to one that was asked for.
    pub fn nearest(&self, first: Option<u32>) -> Option<u32> {
        let first = first?;
        self.splits.iter().map(|(split, _)| *split).min_by_key(|split| split.abs_diff(first))
    }
    /// The split with the largest sum of gains.
    pub fn best(&self) -> &(u32, [f64; 2]) {
        let best = self.splits.iter().max_by(|a, b| self.sum(&a.1).total_cmp(&self.sum(&b.1)));
        best.expect("every pair is measured at one split at least")
    }
    /// Slowdown from sharing, and what of it the best split takes back, as a share; of programs that were slowed.
    pub fn recovered(&self) -> Vec<(&'static str, f64, f64)> {
        let best = self.best().1;
        let names = [self.pair.0, self.pair.1];
        let one = |at: usize| {
            let slowed = 1.0 - self.shared[at] / self.alone[at];
            let left = 1.0 - best[at] / self.alone[at];
            (slowed >= SLOWED).then(|| (names[at], slowed, (slowed - left) / slowed))
        };
        (0..2).filter_map(one).collect()
    }
}

fn two(results: &RunResults) -> [f64; 2] {
    let rates = rates(results);
    [rates[0], rates[1]]
}

/// What is run for a pair.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Run {
    Alone(usize),
    Shared,
    Split(u32),
}

fn run_one(workload: &Workload, run: Run) -> Result<[f64; 2], ReproError> {
    match run {
        Run::Alone(which) => Ok([rates(&workload.solo(which)?)[0], 0.0]),
        Run::Shared => Ok(two(&workload.unmanaged()?)),
        Run::Split(first) => Ok(two(&workload.managed(told(workload, &split(first))?)?.results)),
    }
}

/// Pairs alone, sharing, and at the given splits, under each seed; seed by seed.
pub(crate) fn measure_pairs(
    context: &Context<'_>,
    pairs: &[Pair],
    splits: &[u32],
    l3: bool,
    pace: Pace,
) -> Result<Vec<Vec<Measured>>, ReproError> {
    let mut of_pair = vec![Run::Alone(0), Run::Alone(1), Run::Shared];
    of_pair.extend(splits.iter().map(|&first| Run::Split(first)));
    let mut runs = Vec::new();
    for &seed in &context.seeds {
        for &pair in pairs {
            runs.extend(of_pair.iter().map(|&run| (seed, pair, run)));
        }
    }
    let answers = context.run_all(&runs, |&(seed, (a, b), run)| {
        tell(context, &format!("{a}+{b} {run:?}"), seed);
        run_one(&on_chip(vec![job(a, seed), job(b, seed + 1_000)], 2, l3, pace, seed)?, run)
    })?;
    let measured: Vec<Measured> = answers
        .chunks(of_pair.len())
        .zip(pairs.iter().cycle())
        .map(|(answers, &pair)| Measured {
            pair,
            alone: [answers[0][0], answers[1][0]],
            shared: answers[2],
            splits: splits.iter().copied().zip(answers[3..].iter().copied()).collect(),
        })
        .collect();
    let mut measured = measured.into_iter();
    Ok(context.seeds.iter().map(|_| measured.by_ref().take(pairs.len()).collect()).collect())
}

/// A program alone with each number of colours.
pub(crate) struct Alone {
    pub space: Space,
    /// Cycles stalled on data beyond the first level.
    pub stalls_per_kilo_instr: Vec<f64>,
}

/// What each program alone does with each number of colours, measured by running it with them.
pub(crate) fn alone_by_colours(
    context: &Context<'_>,
    programs: &[(&'static str, u64)],
    colours: &[u32],
    l3: bool,
    pace: Pace,
    seed: u64,
) -> Result<Vec<Alone>, ReproError> {
    let runs: Vec<((&'static str, u64), u32)> =
        programs.iter().flat_map(|&program| colours.iter().map(move |&colours| (program, colours))).collect();
    let answers = context.run_all(&runs, |&((program, job_seed), colours)| {
        tell(context, &format!("{program} alone with {colours} colours"), seed);
        let workload = on_chip(vec![job(program, job_seed)], 2, l3, pace, seed)?;
        let by = told(&workload, &[format!("0-{}", colours - 1)])?;
        let results = workload.managed(by)?.results;
        let kilo_instr = results.tasks.iter().map(|task| task.instructions).sum::<u64>().max(1) as f64 / 1000.0;
        let misses = results.level(Level::L2).map_or(0, |level| level.misses) as f64;
        let stalls: f64 = results.tasks.iter().map(|task| data_stalls(&task.stall_cycles)).sum();
        Ok([misses / kilo_instr, 1.0 / rates(&results)[0], stalls / kilo_instr])
    })?;
    Ok(answers.chunks(colours.len()).map(|row| filled_in(colours, row)).collect())
}

fn data_stalls(stalls: &StallCycles) -> f64 {
    let hits: f64 = stalls.hit.iter().filter(|(level, _)| *level >= Level::L2).map(|(_, cycles)| cycles).sum();
    hits + stalls.remote_cache + stalls.local_memory + stalls.remote_memory + stalls.queue
}

/// For every number of colours, on straight lines between those that were measured.
fn filled_in(colours: &[u32], row: &[[f64; 3]]) -> Alone {
    let at = |held: u32, which: usize| {
        let next = colours.partition_point(|&measured| measured < held).min(colours.len() - 1);
        let before = next.saturating_sub(usize::from(colours[next] > held));
        let along =
            f64::from(held.saturating_sub(colours[before])) / f64::from((colours[next] - colours[before]).max(1));
        row[before][which] + along.min(1.0) * (row[next][which] - row[before][which])
    };
    let all = |which: usize| (1..=COLOURS).map(|held| at(held, which)).collect::<Vec<f64>>();
    let space = Space { misses_per_kilo_instr: all(0), cycles_per_instr: all(1) };
    Alone { space, stalls_per_kilo_instr: all(2) }
}

/// What an operator with curves of each program alone would choose for weighted speed-up: colours of the first, or
/// `None` = leave the cache shared, where the predictor sees less than 1 % in it.
pub(super) fn chosen_split(workload: &Workload, spaces: [&Space; 2]) -> Option<u32> {
    let claim = |space: &Space| {
        let all = space.whole_cycles();
        Claim { costs: space.cycles_per_instr.iter().map(|cycles| -all / cycles).collect(), at_least: 1 }
    };
    let claims = spaces.map(claim);
    let deal = exact(&claims, COLOURS, Total::Sum).expect("sixteen colours for two, and measured costs");
    let topology = workload.machine.topology();
    let bytes = topology.caches.iter().find(|cache| cache.last_level)?.size_bytes?;
    let profiles: Profiles =
        spaces.iter().enumerate().map(|(at, space)| (TaskId(at as u32), space.to_profile(bytes))).collect();
    let shared = workload.yardstick().forecast(&topology, &profiles, &Plan::idle(Window::Time { ns: 1 }));
    let speeds = shared.tasks.values().map(|task| task.degradation.map(|slower| 1.0 / (1.0 + slower.value)));
    let shared: f64 = speeds.sum::<Option<f64>>()?;
    (-total_cost(&claims, &deal, Total::Sum) / shared - 1.0 >= 0.01).then_some(deal[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        Measured {
            pair: ("a", "b"),
            alone: [1.0, 0.5],
            shared: [0.8, 0.5],
            splits: vec![(4, [0.7, 0.5]), (12, [0.96, 0.49])],
        }
    }

    /// Are gains, the best split and what is recovered those of a pair worked by hand?
    #[test]
    fn gains_of_a_pair_worked_by_hand() {
        let pair = measured();
        assert_eq!(pair.best().0, 12);
        let gains = pair.gains(&pair.best().1);
        assert!((gains[0] - 0.2).abs() < 1e-12 && (gains[1] + 0.02).abs() < 1e-12);
        let recovered = pair.recovered();
        assert_eq!(recovered.len(), 1, "b was not slowed");
        assert!((recovered[0].1 - 0.2).abs() < 1e-12 && (recovered[0].2 - 0.8).abs() < 1e-12);
    }

    /// Does the chosen split give space to whom it speeds up, and leave alone what it would not help?
    #[test]
    fn space_goes_to_whom_it_speeds_up() {
        let workload = on_chip(Vec::new(), 2, true, Pace { scale: 1_000, warm_up_cycles: 0 }, 1).unwrap();
        let flat = filled_in(&[1, 16], &[[10.0, 2.0, 0.0]; 2]);
        let steep = filled_in(&[1, 8, 16], &[[40.0, 6.0, 0.0], [2.0, 1.1, 0.0], [0.0, 1.0, 0.0]]);
        assert_eq!(chosen_split(&workload, [&steep.space, &flat.space]), Some(15));
        assert_eq!(chosen_split(&workload, [&flat.space, &steep.space]), Some(1));
        assert_eq!(chosen_split(&workload, [&flat.space, &flat.space]), None);
    }

    /// Do lines between measured numbers of colours pass through the measured points?
    #[test]
    fn measured_points_are_kept() {
        let alone = filled_in(&[1, 4, 16], &[[8.0, 2.0, 90.0], [2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]);
        assert_eq!(alone.space.misses_per_kilo_instr[..5], [8.0, 6.0, 4.0, 2.0, 2.0]);
        assert_eq!((alone.space.units(), alone.space.whole_cycles()), (16, 1.0));
        assert_eq!(alone.stalls_per_kilo_instr[..4], [90.0, 60.0, 30.0, 0.0]);
    }
}
