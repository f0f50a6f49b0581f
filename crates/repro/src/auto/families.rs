//! Runs every mix under every contender, on several machine seeds.

use cachemate_core::MachineSpec;
use cachemate_interval::IntervalJob;
use serde::{Deserialize, Serialize};

use super::MACHINES;
use super::draw::{FAMILIES, MixFamily, draw_mix_jobs};
use super::run::{AutoContender, ContenderRun, run};
use crate::setup::failed;
use crate::{ExperimentContext, ReproError};

/// Number of machine seeds: the first selects the best single mechanism, and the others score.
const MACHINE_SEEDS: u64 = 3;

/// The compared policies: the default is first and `auto` last.
pub fn contender_list() -> Vec<AutoContender> {
    let mechanism_only =
        |title: &'static str, mechanisms: &str| AutoContender::new(title, "auto", &format!("disable = [{mechanisms}]"));
    vec![
        AutoContender::new("default", "default", "window_ns = 1000000000"),
        mechanism_only("only placement", "\"sharing\", \"space\", \"gangs\""),
        mechanism_only("only sharing", "\"placement\", \"space\", \"gangs\""),
        mechanism_only("only space", "\"placement\", \"sharing\", \"gangs\""),
        mechanism_only("only gangs", "\"placement\", \"sharing\", \"space\""),
        AutoContender::new("dio", "dio", ""),
        AutoContender::new("thread-clustering", "thread-clustering", ""),
        AutoContender::new("cache-sizing", "cache-sizing", "window_ns = 1000000000"),
        AutoContender::new("linux-sched-cache", "linux-sched-cache", ""),
        AutoContender::new("auto", "auto", ""),
    ]
}

/// Positions in [`contender_list`] of the single mechanisms.
pub fn single_mechanisms() -> std::ops::Range<usize> {
    1..contender_list().len() - 1
}

/// Scores of one contender on one machine seed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContenderScore {
    /// Mean over jobs of speed divided by solo speed, from each job's arrival.
    pub weighted_speedup: f64,
    /// Harmonic mean of the same ratios, which combines throughput and fairness.
    pub harmonic_mean: f64,
    /// Instructions per second of all jobs together.
    pub instr_per_s: f64,
    /// Largest run time divided by solo run time.
    pub worst_slowdown: f64,
    /// Share of settled windows in which a promised speed was kept; `None` if no speed was promised.
    pub floors_kept: Option<f64>,
}

/// The measure by which contenders are judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScoreKind {
    WeightedSpeedup,
    HarmonicMean,
    Throughput,
    WorstSlowdown,
}

impl ContenderScore {
    /// Gain over another contender in percent, or in points for the worst slowdown, where smaller is better.
    pub fn gain_over(&self, other: &Self, score_kind: ScoreKind) -> f64 {
        let percent_above = |a: f64, b: f64| 100.0 * (a / b - 1.0);
        match score_kind {
            ScoreKind::WeightedSpeedup => percent_above(self.weighted_speedup, other.weighted_speedup),
            ScoreKind::HarmonicMean => percent_above(self.harmonic_mean, other.harmonic_mean),
            ScoreKind::Throughput => percent_above(self.instr_per_s, other.instr_per_s),
            ScoreKind::WorstSlowdown => 100.0 * (self.worst_slowdown - other.worst_slowdown),
        }
    }
}

/// One mix with all scores.
#[derive(Clone, Debug)]
pub struct AutoMix {
    pub family: MixFamily,
    pub machine: String,
    pub seed: u64,
    /// Scores by machine seed, then by contender.
    pub scores_by_seed: Vec<Vec<ContenderScore>>,
}

impl AutoMix {
    /// Gain of one contender over another in percent, for each machine seed that scores.
    pub fn gains(&self, contender: usize, baseline: usize) -> Vec<f64> {
        self.gains_by(ScoreKind::WeightedSpeedup, contender, baseline)
    }

    /// Gains as in [`Self::gains`], by another measure.
    pub fn gains_by(&self, score_kind: ScoreKind, contender: usize, baseline: usize) -> Vec<f64> {
        self.scores_by_seed.iter().skip(1).map(|did| did[contender].gain_over(&did[baseline], score_kind)).collect()
    }

    /// Position of the single mechanism that was best on the first machine seed.
    pub fn best_single(&self) -> usize {
        let weighted_speedup_of = |index: usize| self.scores_by_seed[0][index].weighted_speedup;
        single_mechanisms()
            .reduce(|a, b| if weighted_speedup_of(b) > weighted_speedup_of(a) { b } else { a })
            .unwrap_or(0)
    }
}

/// Length of a solo run.
const ALONE_NS: u64 = 60_000_000_000;

/// Solo speed of a job over time.
#[derive(Serialize, Deserialize)]
struct SoloCourse {
    instr_per_s: f64,
    /// Seconds, and instructions completed by then, for a program with phases, whose instructions are not equal work.
    course: Vec<(f64, f64)>,
}

impl SoloCourse {
    /// Speed relative to solo speed at equal work: solo time for these instructions, divided by the time that they
    /// took.
    fn speed_at_equal_work(&self, instr_per_s: f64, seconds: f64) -> f64 {
        let work_done = instr_per_s * seconds;
        let next = self.course.partition_point(|&(_, instructions)| instructions < work_done);
        let Some(&(to_s, to)) = self.course.get(next) else { return instr_per_s / self.instr_per_s };
        let (from_s, from) = if next == 0 { (0.0, 0.0) } else { self.course[next - 1] };
        let along = if to > from { (work_done - from) / (to - from) } else { 0.0 };
        (from_s + along * (to_s - from_s)) / seconds
    }
}

fn solo_course(machine: &MachineSpec, job: &IntervalJob, length_ns: u64) -> Result<SoloCourse, ReproError> {
    let phased = job.program.phases.len() > 1;
    let length_ns = if phased { length_ns } else { ALONE_NS };
    let job = IntervalJob { start_ns: 0, ..job.clone() };
    let default = &contender_list()[0];
    let outcome = run(machine, &[job], default, 1, length_ns, |_| ())?;
    let course = if phased { outcome.course } else { Vec::new() };
    Ok(SoloCourse { instr_per_s: outcome.instr_per_s[0], course })
}

fn score_run(jobs: &[IntervalJob], alone: &[SoloCourse], outcome: &ContenderRun, length_ns: u64) -> ContenderScore {
    let run_seconds = |job: &IntervalJob| length_ns.saturating_sub(job.start_ns).max(1) as f64 / 1e9;
    let rates = outcome.instr_per_s.iter().zip(jobs);
    let over_alone: Vec<f64> =
        rates.zip(alone).map(|((rate, job), alone)| alone.speed_at_equal_work(*rate, run_seconds(job))).collect();
    let promised: Vec<(usize, f64)> =
        jobs.iter().enumerate().filter_map(|(index, job)| Some((index, job.goal?.max_slowdown?))).collect();
    let keeps_promises =
        |window: &&Vec<f64>| promised.iter().all(|&(at, limit)| window[at] * (1.0 + limit) >= alone[at].instr_per_s);
    let windows = outcome.windows.len().max(1) as f64;
    ContenderScore {
        weighted_speedup: over_alone.iter().sum::<f64>() / over_alone.len() as f64,
        harmonic_mean: over_alone.len() as f64 / over_alone.iter().map(|speed| 1.0 / speed).sum::<f64>(),
        instr_per_s: outcome.instr_per_s.iter().sum(),
        worst_slowdown: over_alone.iter().map(|speed| 1.0 / speed).fold(0.0, f64::max),
        floors_kept: (!promised.is_empty())
            .then(|| outcome.windows.iter().filter(keeps_promises).count() as f64 / windows),
    }
}

/// Draws a number of mixes of each family on each machine, and runs them under all contenders.
pub fn run_all(
    context: &ExperimentContext<'_>,
    mixes: u32,
    contenders: &[AutoContender],
) -> Result<Vec<AutoMix>, ReproError> {
    let load_machine = |name: &str| cachemate_spec::load_machine(name).map_err(failed(name));
    let machines: Vec<MachineSpec> = match context.machine {
        Some(name) => vec![load_machine(name)?],
        None => MACHINES.iter().map(|name| load_machine(name)).collect::<Result<_, _>>()?,
    };
    let length_ns = context.pick(300, 900) * 1_000_000_000;
    let mut scored_mixes = Vec::new();
    for machine in &machines {
        for family in FAMILIES {
            for nth in 0..mixes {
                let seed = context.seeds[0] * 1_000 + u64::from(nth);
                let Some(jobs) = draw_mix_jobs(machine, family, seed, length_ns) else { continue };
                context.report_progress(&format!("{}, {} {seed}", machine.name, family.name()));
                let alone = context.run_all(&jobs, |job| solo_course(machine, job, length_ns))?;
                let runs: Vec<(u64, &AutoContender)> = (1..=MACHINE_SEEDS)
                    .flat_map(|seed| contenders.iter().map(move |compared| (seed, compared)))
                    .collect();
                let scores = context.run_all(&runs, |(machine_seed, contender)| {
                    let outcome = run(machine, &jobs, contender, seed ^ machine_seed, length_ns, |_| ())?;
                    Ok(score_run(&jobs, &alone, &outcome, length_ns))
                })?;
                let scores_by_seed = scores.chunks(contenders.len()).map(<[ContenderScore]>::to_vec).collect();
                scored_mixes.push(AutoMix { family, machine: machine.name.clone(), seed, scores_by_seed });
            }
        }
    }
    Ok(scored_mixes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a program with phases judged by the solo time of its work, whatever phase it ends in, and one without phases
    /// by its rate?
    #[test]
    fn speeds_are_told_at_equal_work() {
        // Slow for a hundred seconds, then five times as fast.
        let alone = SoloCourse { instr_per_s: 300.0, course: vec![(100.0, 1e4), (200.0, 6e4)] };
        assert_eq!(alone.speed_at_equal_work(300.0, 200.0), 1.0);
        // Half as fast throughout: in two hundred seconds it completes the work of one hundred.
        assert_eq!(alone.speed_at_equal_work(50.0, 200.0), 0.5);
        assert_eq!(alone.speed_at_equal_work(175.0, 200.0), 0.75);
        let steady = SoloCourse { instr_per_s: 300.0, course: Vec::new() };
        assert_eq!(steady.speed_at_equal_work(150.0, 200.0), 0.5);
    }
}
