//! Predicted against measured: errors by set, ranks, and what predicting nothing would cost.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Truth;
use super::draw::{Kind, Measured, Run};
use super::predict;
use crate::ReproError;
use crate::setup::failed;

/// From here on a run counts as bandwidth-bound.
pub const BANDWIDTH_BOUND: f64 = 0.7;
/// Plans of a mix that differ by less are not ranked.
const RANKED_POINTS: f64 = 2.0;

/// One task of one run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Compared {
    pub machine: String,
    pub task: String,
    pub beside: Vec<String>,
    /// In per cent of the time alone.
    pub measured_slowdown_percent: f64,
    pub predicted_slowdown_percent: f64,
    /// Predicted cycles per instruction over measured, minus one.
    pub cycles_per_instr_error_percent: f64,
    pub busy_share: f64,
}

/// One set of co-runs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Set {
    pub count: usize,
    pub mean_absolute_error_points: f64,
    pub p90_error_points: f64,
    pub kendall_tau: Option<f64>,
    pub error_of_predicting_nothing_points: f64,
    /// Mean error of cycles per instruction.
    pub mean_error_percent: f64,
    pub p90_error_percent: f64,
    /// Predicted minus measured.
    pub mean_signed_error_points: f64,
    /// Share of the runs in which a program loses 10 % or more.
    pub runs_losing_10_percent: f64,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Score {
    pub seed: u64,
    pub sets: BTreeMap<String, Set>,
    pub tasks: BTreeMap<String, Vec<Compared>>,
}

/// Predicts all that was measured, and compares.
///
/// # Errors
/// No such machine, or a prediction that fails.
pub fn score(truth: &Truth) -> Result<Score, ReproError> {
    let mut tasks: BTreeMap<String, Vec<Vec<Compared>>> = BTreeMap::new();
    let mut mixes: Vec<Vec<(f64, f64)>> = Vec::new();
    for bench in &truth.benches {
        let machine = cachemate_spec::load_machine(&bench.machine).map_err(failed(&bench.machine))?;
        let mut plans: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
        for run in bench.runs.iter().filter(|run| run.finished) {
            let speeds = predict::speeds(&machine, &bench.programs, run)?;
            let found = compare(bench, run, &speeds);
            if let Kind::Plan(mix) = run.kind {
                let mean = |of: fn(&Compared) -> f64| found.iter().map(of).sum::<f64>() / found.len() as f64;
                let both = (mean(|task| task.measured_slowdown_percent), mean(|task| task.predicted_slowdown_percent));
                plans.entry(mix).or_default().push(both);
            }
            tasks.entry(set_of(run).to_string()).or_default().push(found);
        }
        mixes.extend(plans.into_values());
    }
    let mut sets: BTreeMap<String, Set> = tasks.iter().map(|(name, runs)| (name.clone(), set(runs))).collect();
    if let Some(plans) = sets.get_mut("plans") {
        plans.kendall_tau = tau_within(&mixes);
    }
    let tasks = tasks.into_iter().map(|(name, runs)| (name, runs.into_iter().flatten().collect())).collect();
    Ok(Score { seed: truth.seed, sets, tasks })
}

fn set_of(run: &Run) -> &'static str {
    match run.kind {
        Kind::Plan(_) => "plans",
        _ if run.busy_share >= BANDWIDTH_BOUND => "bandwidth_bound",
        Kind::Pair => "pairs",
        Kind::Four => "groups",
    }
}

fn compare(bench: &Measured, run: &Run, speeds: &[f64]) -> Vec<Compared> {
    let name = |&(program, _): &(usize, u32)| bench.programs[program].name.clone();
    let task = |at: usize| {
        let alone = bench.programs[run.jobs[at].0].alone_instr_per_cycle;
        let percent = |speed: f64| 100.0 * (alone / speed - 1.0);
        let others = run.jobs.iter().enumerate().filter(|(other, _)| *other != at);
        Compared {
            machine: bench.machine.clone(),
            task: name(&run.jobs[at]),
            beside: others.map(|(_, job)| name(job)).collect(),
            measured_slowdown_percent: percent(run.instr_per_cycle[at]),
            predicted_slowdown_percent: percent(speeds[at]),
            cycles_per_instr_error_percent: 100.0 * (run.instr_per_cycle[at] / speeds[at] - 1.0),
            busy_share: run.busy_share,
        }
    };
    (0..run.jobs.len()).map(task).collect()
}

fn set(runs: &[Vec<Compared>]) -> Set {
    let tasks: Vec<&Compared> = runs.iter().flatten().collect();
    let signed = |task: &&Compared| task.predicted_slowdown_percent - task.measured_slowdown_percent;
    let errors: Vec<f64> = tasks.iter().map(|task| signed(task).abs()).collect();
    let relative: Vec<f64> = tasks.iter().map(|task| task.cycles_per_instr_error_percent.abs()).collect();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let nothing: Vec<f64> = tasks.iter().map(|task| task.measured_slowdown_percent.abs()).collect();
    let pairs: Vec<(f64, f64)> =
        tasks.iter().map(|task| (task.measured_slowdown_percent, task.predicted_slowdown_percent)).collect();
    let losing = runs.iter().filter(|run| run.iter().any(|task| task.measured_slowdown_percent >= 10.0));
    Set {
        count: runs.len(),
        mean_absolute_error_points: mean(&errors),
        p90_error_points: percentile(&errors, 0.9),
        kendall_tau: tau(&pairs, 0.0),
        error_of_predicting_nothing_points: mean(&nothing),
        mean_error_percent: mean(&relative),
        p90_error_percent: percentile(&relative, 0.9),
        mean_signed_error_points: mean(&tasks.iter().map(signed).collect::<Vec<f64>>()),
        runs_losing_10_percent: losing.count() as f64 / runs.len().max(1) as f64,
    }
}

/// The smallest value that so large a share does not exceed.
fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(at.max(1) - 1).copied().unwrap_or(0.0)
}

/// Kendall's rank correlation over pairs that differ by at least so much in the first value; `None` without any.
fn tau(both: &[(f64, f64)], differ_by: f64) -> Option<f64> {
    let (agree, all) = agreement(both, differ_by);
    (all > 0).then(|| (2 * agree - all) as f64 / all as f64)
}

fn agreement(both: &[(f64, f64)], differ_by: f64) -> (i64, i64) {
    let (mut agree, mut all) = (0, 0);
    for (at, a) in both.iter().enumerate() {
        for b in &both[at + 1..] {
            if (a.0 - b.0).abs() > differ_by {
                all += 1;
                agree += i64::from((a.0 - b.0) * (a.1 - b.1) > 0.0);
            }
        }
    }
    (agree, all)
}

/// The same over plans of one mix only.
fn tau_within(mixes: &[Vec<(f64, f64)>]) -> Option<f64> {
    let (mut agree, mut all) = (0, 0);
    for mix in mixes {
        let found = agreement(mix, RANKED_POINTS);
        (agree, all) = (agree + found.0, all + found.1);
    }
    (all > 0).then(|| (2 * agree - all) as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is tau 1 for the same order, -1 for the reverse, and not said of plans that hardly differ?
    #[test]
    fn ranks_count_pairs_that_differ() {
        assert_eq!(tau(&[(1.0, 10.0), (2.0, 20.0), (3.0, 21.0)], 0.0), Some(1.0));
        assert_eq!(tau(&[(1.0, 3.0), (2.0, 2.0)], 0.0), Some(-1.0));
        assert_eq!(tau_within(&[vec![(1.0, 3.0), (2.0, 2.0)]]), None);
        assert_eq!(tau_within(&[vec![(1.0, 3.0), (9.0, 4.0)], vec![(1.0, 3.0), (9.0, 2.0)]]), Some(0.0));
    }

    /// Is the 90th percentile the value that nine of ten do not exceed?
    #[test]
    fn percentiles_are_values_that_occur() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!(percentile(&values, 0.9), 9.0);
        assert_eq!(percentile(&[5.0], 0.9), 5.0);
    }
}
