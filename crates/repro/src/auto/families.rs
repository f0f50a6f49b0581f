//! Runs every mix under every contender, on several machine seeds.

use cachemate_core::MachineSpec;
use cachemate_interval::IntervalJob;

use super::MACHINES;
use super::draw::{FAMILIES, draw_mix_jobs};
use super::run::{AutoContender, ContenderRun, run};
use crate::setup::load_machine;
use crate::{ExperimentContext, Result};

/// Number of machine seeds: the first selects the best single mechanism, and the others score.
const MACHINE_SEEDS: u64 = 3;

/// The compared policies: the default is first and `auto` last.
pub fn contender_list() -> [AutoContender; AUTO_INDEX + 1] {
    let mechanism_only = |title: &'static str, mechanisms: &str| {
        AutoContender::new(title, "auto", &format!("disable = [{mechanisms}]"))
    };

    [
        AutoContender::new("default", "default", "window_ns = 1000000000"),
        mechanism_only("only placement", "\"sharing\", \"space\", \"gangs\""),
        mechanism_only("only sharing", "\"placement\", \"space\", \"gangs\""),
        mechanism_only("only space", "\"placement\", \"sharing\", \"gangs\""),
        mechanism_only("only gangs", "\"placement\", \"sharing\", \"space\""),
        AutoContender::new("dio", "dio", ""),
        AutoContender::new("thread-clustering", "thread-clustering", ""),
        AutoContender::new("cache-sizing", "cache-sizing", "window_ns = 1000000000"),
        AutoContender::new("linux-sched-cache", "linux-sched-cache", ""),
        AutoContender::new("caladan", "caladan", "window_ns = 1000000000"),
        AutoContender::new("fence", "fence", "window_ns = 1000000000"),
        AutoContender::new("lfoc", "lfoc", "window_ns = 1000000000"),
        AutoContender::new("parties", "parties", "window_ns = 1000000000"),
        AutoContender::new("auto", "auto", ""),
    ]
}

/// Position of `auto` in [`contender_list`]; the single mechanisms are before it and after the default.
pub const AUTO_INDEX: usize = 13;

/// Policies of today, of which an operator would ask why they are not enough.
pub const RIVALS: [&str; 4] = ["caladan", "fence", "lfoc", "parties"];

/// Scores of one contender on one machine seed.
#[derive(Clone, Debug)]
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
    /// The gain over another contender in percent, or in points for the worst slowdown, where
    /// smaller is better.
    pub fn gain_over(&self, other: &Self, score_kind: ScoreKind) -> f64 {
        let percent_above = |a: f64, b: f64| 100.0 * (a / b - 1.0);
        match score_kind {
            ScoreKind::WeightedSpeedup => {
                percent_above(self.weighted_speedup, other.weighted_speedup)
            }
            ScoreKind::HarmonicMean => percent_above(self.harmonic_mean, other.harmonic_mean),
            ScoreKind::Throughput => percent_above(self.instr_per_s, other.instr_per_s),
            ScoreKind::WorstSlowdown => 100.0 * (self.worst_slowdown - other.worst_slowdown),
        }
    }
}

/// One mix with all scores.
#[derive(Clone, Debug)]
pub struct AutoMix {
    /// The name of a [`MixFamily`], or `recorded`.
    pub family: &'static str,
    pub machine: String,
    pub seed: u64,
    /// Scores by machine seed, then by contender.
    pub scores_by_seed: Vec<Vec<ContenderScore>>,
}

impl AutoMix {
    /// The gain of one contender over another in percent, for each machine seed that scores.
    pub fn gain_percents(&self, contender: usize, baseline: usize) -> Vec<f64> {
        self.gain_percents_in(ScoreKind::WeightedSpeedup, contender, baseline)
    }

    /// Gains as in [`Self::gain_percents`], by another measure.
    pub fn gain_percents_in(
        &self,
        score_kind: ScoreKind,
        contender: usize,
        baseline: usize,
    ) -> Vec<f64> {
        self.scores_by_seed
            .iter()
            .skip(1)
            .map(|scores| scores[contender].gain_over(&scores[baseline], score_kind))
            .collect()
    }

    /// The position of the single mechanism that was best on the first machine seed.
    pub fn best_single_mechanism(&self) -> usize {
        let weighted_speedup_of = |index: usize| self.scores_by_seed[0][index].weighted_speedup;
        (1..AUTO_INDEX)
            .reduce(|a, b| {
                if weighted_speedup_of(b) > weighted_speedup_of(a) {
                    b
                } else {
                    a
                }
            })
            .unwrap_or(0)
    }
}

/// Length of a solo run.
const SOLO_RUN_NS: u64 = 60_000_000_000;

/// Solo speed of a job over time.
struct SoloProgress {
    instr_per_s: f64,
    /// Seconds, and instructions completed by then, for a program with phases, whose instructions are not equal work.
    course: Vec<(f64, f64)>,
}

impl SoloProgress {
    /// The speed relative to solo speed at equal work: solo time for these instructions, divided by
    /// the time that they took.
    fn speed_ratio_at_equal_work(&self, instr_per_s: f64, seconds: f64) -> f64 {
        let done_instr = instr_per_s * seconds;
        let next_point = self
            .course
            .partition_point(|&(_, instructions)| instructions < done_instr);
        let Some(&(later_s, later_instr)) = self.course.get(next_point) else {
            return instr_per_s / self.instr_per_s;
        };
        let (earlier_s, earlier_instr) = if next_point == 0 {
            (0.0, 0.0)
        } else {
            self.course[next_point - 1]
        };
        let interpolated_share = if later_instr > earlier_instr {
            (done_instr - earlier_instr) / (later_instr - earlier_instr)
        } else {
            0.0
        };
        (earlier_s + interpolated_share * (later_s - earlier_s)) / seconds
    }
}

fn measure_solo_progress(
    machine: &MachineSpec,
    job: &IntervalJob,
    length_ns: u64,
) -> Result<SoloProgress> {
    let has_phases = job.program.phases.len() > 1;
    let length_ns = if has_phases { length_ns } else { SOLO_RUN_NS };
    let job = IntervalJob {
        start_ns: 0,
        ..job.clone()
    };

    let default_contender = &contender_list()[0];
    let outcome = run(machine, &[job], default_contender, 1, length_ns)?;
    let instr_by_second = if has_phases {
        outcome.instr_by_second
    } else {
        Vec::new()
    };
    Ok(SoloProgress {
        instr_per_s: outcome.instr_per_s[0],
        course: instr_by_second,
    })
}

fn score_run(
    jobs: &[IntervalJob],
    solo_progress: &[SoloProgress],
    outcome: &ContenderRun,
    length_ns: u64,
) -> ContenderScore {
    let present_seconds =
        |job: &IntervalJob| length_ns.saturating_sub(job.start_ns).max(1) as f64 / 1e9;
    let speeds_by_job = outcome.instr_per_s.iter().zip(jobs);
    let solo_speed_ratios: Vec<f64> = speeds_by_job
        .zip(solo_progress)
        .map(|((rate, job), alone)| alone.speed_ratio_at_equal_work(*rate, present_seconds(job)))
        .collect();

    let slowdown_limits: Vec<(usize, f64)> = jobs
        .iter()
        .enumerate()
        .filter_map(|(index, job)| Some((index, job.goal?.max_slowdown?)))
        .collect();
    let keeps_all_promises = |window: &&Vec<f64>| {
        slowdown_limits.iter().all(|&(job_index, limit)| {
            window[job_index] * (1.0 + limit) >= solo_progress[job_index].instr_per_s
        })
    };
    let window_count = outcome.second_half_speeds.len().max(1) as f64;

    ContenderScore {
        weighted_speedup: solo_speed_ratios.iter().sum::<f64>() / solo_speed_ratios.len() as f64,
        harmonic_mean: solo_speed_ratios.len() as f64
            / solo_speed_ratios
                .iter()
                .map(|speed| 1.0 / speed)
                .sum::<f64>(),
        instr_per_s: outcome.instr_per_s.iter().sum(),
        worst_slowdown: solo_speed_ratios
            .iter()
            .map(|speed| 1.0 / speed)
            .fold(0.0, f64::max),
        floors_kept: (!slowdown_limits.is_empty()).then(|| {
            outcome
                .second_half_speeds
                .iter()
                .filter(keeps_all_promises)
                .count() as f64
                / window_count
        }),
    }
}

/// Draws a number of mixes of each family on each machine, and runs them under all contenders.
pub fn score_all_mixes(
    context: &ExperimentContext<'_>,
    mixes_per_family: u32,
    contenders: &[AutoContender],
) -> Result<Vec<AutoMix>> {
    let machines: Vec<MachineSpec> = match context.machine {
        Some(name) => vec![load_machine(name)?],
        None => MACHINES
            .iter()
            .map(|name| load_machine(name))
            .collect::<Result<_, _>>()?,
    };
    let length_ns = context.pick(300, 900) * 1_000_000_000;

    let mut scored_mixes = Vec::new();
    for machine in &machines {
        for family in FAMILIES {
            for mix_index in 0..mixes_per_family {
                let seed = context.seeds[0] * 1_000 + u64::from(mix_index);
                let Some(jobs) = draw_mix_jobs(machine, family, seed, length_ns) else {
                    continue;
                };

                let mix = score_mix(
                    context,
                    machine,
                    (family.name(), seed),
                    &jobs,
                    contenders,
                    length_ns,
                )?;
                scored_mixes.push(mix);
            }
        }
    }

    Ok(scored_mixes)
}

/// Runs one mix under all contenders, on several machine seeds.
pub fn score_mix(
    context: &ExperimentContext<'_>,
    machine: &MachineSpec,
    (family, seed): (&'static str, u64),
    jobs: &[IntervalJob],
    contenders: &[AutoContender],
    length_ns: u64,
) -> Result<AutoMix> {
    context.report_progress(&format!("{}, {family} {seed}", machine.name));
    let solo_progress =
        context.run_all(jobs, |job| measure_solo_progress(machine, job, length_ns))?;
    let seeded_contenders: Vec<(u64, &AutoContender)> = (1..=MACHINE_SEEDS)
        .flat_map(|seed| contenders.iter().map(move |compared| (seed, compared)))
        .collect();
    let scores = context.run_all(&seeded_contenders, |(machine_seed, contender)| {
        let outcome = run(machine, jobs, contender, seed ^ machine_seed, length_ns)?;
        Ok(score_run(jobs, &solo_progress, &outcome, length_ns))
    })?;

    Ok(AutoMix {
        family,
        machine: machine.name.clone(),
        seed,
        scores_by_seed: scores
            .chunks(contenders.len())
            .map(<[ContenderScore]>::to_vec)
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a program with phases judged by the solo time of its work, whatever phase it ends in, and one without phases
    /// by its rate?
    #[test]
    fn a_program_with_phases_is_judged_at_equal_work() {
        // Slow for a hundred seconds, then five times as fast.
        let alone = SoloProgress {
            instr_per_s: 300.0,
            course: vec![(100.0, 1e4), (200.0, 6e4)],
        };
        assert_eq!(alone.speed_ratio_at_equal_work(300.0, 200.0), 1.0);
        // Half as fast throughout: in two hundred seconds it completes the work of one hundred.
        assert_eq!(alone.speed_ratio_at_equal_work(50.0, 200.0), 0.5);
        assert_eq!(alone.speed_ratio_at_equal_work(175.0, 200.0), 0.75);
        let steady = SoloProgress {
            instr_per_s: 300.0,
            course: Vec::new(),
        };
        assert_eq!(steady.speed_ratio_at_equal_work(150.0, 200.0), 0.5);
    }
}
