//! Random mixes of programs, for which no policy was tuned: every policy is compared with the default scheduler and
//! with the optimum.
//!
//! Problem: the workloads of papers were chosen to show an effect. Method: programs are drawn from the seed, each at
//! most once per mix, from all single-threaded kernels and all available recordings; one program per core. Every policy
//! of the registry runs with its usual parameters and the usual profilers; the best and the worst placement come from
//! pairs measured for the mix. All programs are timed over equal work ([`crate::solo_work`]), after the policy's first
//! window and a refill of the caches. Properties: the same seed, machine and recordings give the same numbers; a policy
//! that fails, and a program that does not finish under one, are reported by name and do not end the run; throughput is
//! split into mix and contention, because throughput alone rewards starving programs that miss.

use std::path::PathBuf;

use cachemate_core::{Machine, PolicyConfig, ProfilerConfig, SplitMix64, WindowLength};
use cachemate_pipeline::POLICIES;
use cachemate_pipeline::{StandardPipeline, miss_penalty_of_machine};
use cachemate_sim::kernels;
use serde::Serialize;

use crate::corun::{CoRunBench, CoRunMatrix, cpus_by_cache};
use crate::rates::{ProgramRates, speeds};
use crate::setup::{Comparison, SpeedupScores, WorkloadJob, failed};
use crate::solo;
use crate::steered;
use crate::{ExperimentContext, ReproError, Result, mean};

/// Ratio of nominal to simulated window lengths.
const SCALE: u64 = 100;
const WINDOW_CYCLES: u64 = 1_000_000_000;
/// Number of data accesses in the profile of a program alone.
const PROFILE_ACCESSES: u64 = 3_000_000;

/// Minimum number of instructions of a counter reading. In a window of ten million cycles, the slowest phase of a
/// program with many misses executes some hundred thousand.
const MIN_COUNTED_INSTRUCTIONS: f64 = 50_000.0;

/// The machine, and the programs from which mixes are drawn.
pub struct MixOptions<'a> {
    /// A machine file or name; overrides are allowed.
    pub machine: &'a str,
    /// Number of mixes.
    pub mix_count: u32,
    /// Recorded programs: name and file.
    pub recordings: Vec<(String, PathBuf)>,
}

/// Scores of one policy on one mix, or their means over mixes.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PolicyScore {
    /// Name in the registry.
    pub policy: String,
    /// Instructions executed relative to the default scheduler, minus one, in percent.
    pub throughput_gain_percent: f64,
    /// The part of the gain that comes from other shares of time, at the default's speeds.
    pub mix_gain_percent: f64,
    /// The part of the gain that comes from other speeds, at the new shares.
    pub contention_gain_percent: f64,
    /// Sum over programs of speed divided by solo speed.
    pub weighted_speedup: f64,
    /// Weighted speed-up relative to that of the default, minus one, in percent.
    pub weighted_speedup_gain_percent: f64,
    /// Weighted speed-up in percent of that of `best-by-matrix`; above 100 if pairs do not determine the best
    /// placement.
    pub of_best_by_matrix_percent: f64,
    /// Harmonic mean of speeds divided by solo speeds, which combines throughput and fairness.
    pub harmonic_mean: f64,
    /// Largest run time divided by solo run time; a lower bound if a program did not finish.
    pub worst_slowdown: f64,
    /// Programs that had not finished their work when the run was abandoned, and their slowdown until then. Their
    /// speeds are those of the finished part.
    pub unfinished: Vec<String>,
}

/// A policy that has no score on a mix.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FailedPolicy {
    /// Name in the registry.
    pub policy: String,
    /// The error message.
    pub reason: String,
}

/// One random mix, with the scores of every policy.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RandomMix {
    /// Programs, one per core, in the order of the draw.
    pub programs: Vec<String>,
    /// Scores in the order of the registry, without failed policies.
    pub policies: Vec<PolicyScore>,
    /// Policies without a score.
    pub failed: Vec<FailedPolicy>,
    /// Pairs in which one program did not finish, so that the slowdown from which the optimum is computed is a lower
    /// bound.
    pub unfinished_pairs: Vec<String>,
}

/// All draws of one seed on one machine.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RandomMixes {
    /// Machine as requested.
    pub machine: String,
    /// Seed of the drawing, of the machine and of the policies.
    pub seed: u64,
    /// Factor by which windows are shorter than nominal time.
    pub time_scale: u64,
    /// Mixes in the order of the draw.
    pub mixes: Vec<RandomMix>,
    /// Means over the mixes on which a policy has a score, in the order of the registry.
    pub mean: Vec<PolicyScore>,
}

/// Draws the mixes and runs them under every policy.
///
/// # Errors
/// An unknown machine, fewer programs than cores, a program that cannot be measured alone, or no score of the default
/// scheduler or the optimum.
pub fn score_random_mixes(
    context: &ExperimentContext<'_>,
    mix_options: &MixOptions<'_>,
) -> Result<RandomMixes> {
    let (refill_cycles, measured_cycles) =
        context.pick((10_000_000, 5_000_000), (25_000_000, 15_000_000));
    let seed = context.seeds[0];
    let mut bench = CoRunBench::load(
        mix_options.machine,
        seed,
        WINDOW_CYCLES / SCALE + refill_cycles,
        measured_cycles,
    )?;
    bench.options.scale = SCALE;
    let cores = cpus_by_cache(&bench.machine.topology())?
        .iter()
        .map(Vec::len)
        .sum();

    let mut generator = SplitMix64::new(seed);
    let mut mixes = Vec::new();
    for mix_index in 0..mix_options.mix_count {
        let jobs = draw_mix(
            &mut generator,
            cores,
            &mix_options.recordings,
            seed * 1_000 + u64::from(mix_index),
        )?;
        let programs: Vec<String> = jobs.iter().map(|job| job.name.clone()).collect();
        context.report_progress(&format!(
            "mix {} of {}: {}",
            mix_index + 1,
            mix_options.mix_count,
            programs.join(", ")
        ));
        mixes.push(score_mix(context, &bench, &jobs)?);
    }
    let mean = mean_scores_by_policy(&mixes);
    Ok(RandomMixes {
        machine: mix_options.machine.to_string(),
        seed,
        time_scale: SCALE,
        mixes,
        mean,
    })
}

fn draw_mix(
    generator: &mut SplitMix64,
    cores: usize,
    recordings: &[(String, PathBuf)],
    seed: u64,
) -> Result<Vec<WorkloadJob>> {
    let single_threaded_programs = kernels::programs().filter(|program| program.threads == (1, 1));
    let mut candidates: Vec<WorkloadJob> = single_threaded_programs
        .map(|program| WorkloadJob::new(&program.name, seed))
        .collect();
    candidates.extend(recordings.iter().map(|(name, path)| {
        WorkloadJob::from_recording(&format!("{name}.cmt"), path.clone(), seed)
    }));
    if candidates.len() < cores {
        return Err(failed("mixes")(format!(
            "{} programs for {cores} cores",
            candidates.len()
        )));
    }

    generator.shuffle(&mut candidates);
    candidates.truncate(cores);
    Ok(candidates)
}

fn score_mix(
    context: &ExperimentContext<'_>,
    bench: &CoRunBench,
    jobs: &[WorkloadJob],
) -> Result<RandomMix> {
    let matrix = CoRunMatrix::measure(context, bench, jobs, false)?;
    let solo_speeds = speeds(&matrix.solo_rates);
    let profiles = context.run_all(jobs, |job| {
        solo::profile_job(job, &bench.machine, PROFILE_ACCESSES)
    })?;
    let names: Vec<&str> = POLICIES.entries().iter().map(|entry| entry.name).collect();
    let work_ranges = bench.solo_work(jobs)?;

    let run_under_policy = |name: &str| -> Result<Vec<ProgramRates>> {
        let workload = bench.build_workload(bench.options.clone(), jobs.to_vec());
        let needs_matrix = name == "best-by-matrix" || name == "worst-by-matrix";
        let parameters = if needs_matrix {
            format!("slowdowns = {:?}", matrix.costs().cost)
        } else {
            String::new()
        };

        let machine = workload.build_machine()?;
        let standard_pipeline = StandardPipeline {
            policy: PolicyConfig {
                name: name.to_string(),
                parameters,
                seed: bench.options.seed,
            },
            guard: None,
            counted_instructions: MIN_COUNTED_INSTRUCTIONS,
            predictor: miss_penalty_of_machine(&bench.machine),
            watches_code: true,
            first_window: WindowLength::Cycles {
                cycles: WINDOW_CYCLES,
            },
        };
        let mut config = standard_pipeline.for_machine(machine.topology(), machine.capabilities());
        // Recorded profiles only fill gaps that the others leave, so they come last.
        config.profilers.push(ProfilerConfig::Oracle {
            profiles: profiles.clone(),
        });
        Ok(steered::run_together_under(&workload, &work_ranges, config)?.rates)
    };

    let runs_by_policy = context.run_all(&names, |&name| match run_under_policy(name) {
        Err(ReproError::Interrupted) => Err(ReproError::Interrupted),
        outcome => Ok(outcome.map_err(|error| error.to_string())),
    })?;
    let run_of_policy = |name: &str| match names
        .iter()
        .position(|policy| *policy == name)
        .map(|index| &runs_by_policy[index])
    {
        Some(Ok(run)) => Ok(run),
        Some(Err(error)) => Err(failed(name)(error)),
        None => Err(failed("mixes")(format!("the registry has no '{name}'"))),
    };
    let (default_run, matrix_run) = (run_of_policy("default")?, run_of_policy("best-by-matrix")?);
    let score_run = |run: &[ProgramRates], name: &str| {
        SpeedupScores::from_rates(&speeds(run), &solo_speeds)
            .ok_or_else(|| failed(name)("a program never ran in the measured part"))
    };
    let (default_score, best_score) = (
        score_run(default_run, "default")?,
        score_run(matrix_run, "best-by-matrix")?,
    );
    let mut mix = RandomMix {
        programs: jobs.iter().map(|job| job.name.clone()).collect(),
        policies: Vec::new(),
        failed: Vec::new(),
        unfinished_pairs: matrix.unfinished_programs(),
    };
    for (name, run) in names.iter().zip(&runs_by_policy) {
        let score = run.as_ref().map_err(ToString::to_string).and_then(|run| {
            let rate_gain =
                Comparison::compare_rates(run, default_run).ok_or("a program never ran")?;
            let scores = score_run(run, name).map_err(|error| error.to_string())?;
            let unfinished = unfinished_jobs(jobs, run, &solo_speeds);
            let score = score_policy(
                name,
                &scores,
                &rate_gain,
                default_score.weighted_speedup,
                best_score.weighted_speedup,
            );
            Ok(PolicyScore {
                unfinished,
                ..score
            })
        });
        match score {
            Ok(score) => mix.policies.push(score),
            Err(reason) => mix.failed.push(FailedPolicy {
                policy: (*name).to_string(),
                reason,
            }),
        }
    }
    Ok(mix)
}

fn unfinished_jobs(jobs: &[WorkloadJob], run: &[ProgramRates], solo_speeds: &[f64]) -> Vec<String> {
    let describe_unfinished_job = |((job, rates), alone): ((&WorkloadJob, &ProgramRates), &f64)| {
        (!rates.finished).then(|| {
            format!(
                "{} ({:.1} times slower than alone)",
                job.name,
                alone / rates.instr_per_cycle
            )
        })
    };
    jobs.iter()
        .zip(run)
        .zip(solo_speeds)
        .filter_map(describe_unfinished_job)
        .collect()
}

fn score_policy(
    name: &str,
    scores: &SpeedupScores,
    gain: &Comparison,
    default_speedup: f64,
    matrix_speedup: f64,
) -> PolicyScore {
    PolicyScore {
        policy: name.to_string(),
        throughput_gain_percent: 100.0 * gain.throughput_gain,
        mix_gain_percent: 100.0 * gain.mix_gain,
        contention_gain_percent: 100.0 * gain.contention_gain,
        weighted_speedup: scores.weighted_speedup,
        weighted_speedup_gain_percent: 100.0 * (scores.weighted_speedup / default_speedup - 1.0),
        of_best_by_matrix_percent: 100.0 * scores.weighted_speedup / matrix_speedup,
        harmonic_mean: scores.harmonic_mean,
        worst_slowdown: scores.worst_slowdown,
        unfinished: Vec::new(),
    }
}

fn mean_scores_by_policy(mixes: &[RandomMix]) -> Vec<PolicyScore> {
    POLICIES
        .entries()
        .iter()
        .filter_map(|entry| mean_of_policy(entry.name, mixes))
        .collect()
}

/// The mean of a policy's scores; `None` if it has none.
fn mean_of_policy(name: &str, mixes: &[RandomMix]) -> Option<PolicyScore> {
    let scores: Vec<&PolicyScore> = mixes
        .iter()
        .flat_map(|mix| &mix.policies)
        .filter(|score| score.policy == name)
        .collect();
    let mean_over_scores =
        |value: fn(&PolicyScore) -> f64| mean(scores.iter().map(|score| value(score)));

    (!scores.is_empty()).then(|| PolicyScore {
        policy: name.to_string(),
        throughput_gain_percent: mean_over_scores(|s| s.throughput_gain_percent),
        mix_gain_percent: mean_over_scores(|s| s.mix_gain_percent),
        contention_gain_percent: mean_over_scores(|s| s.contention_gain_percent),
        weighted_speedup: mean_over_scores(|s| s.weighted_speedup),
        weighted_speedup_gain_percent: mean_over_scores(|s| s.weighted_speedup_gain_percent),
        of_best_by_matrix_percent: mean_over_scores(|s| s.of_best_by_matrix_percent),
        harmonic_mean: mean_over_scores(|s| s.harmonic_mean),
        worst_slowdown: mean_over_scores(|s| s.worst_slowdown),
        unfinished: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are draws repeatable, without duplicates, and different from mix to mix?
    #[test]
    fn draws_are_repeatable_and_without_duplicates() {
        let recordings = vec![("sort".to_string(), PathBuf::from("sort.cmt"))];
        let draw_names = |seed: u64| -> Vec<Vec<String>> {
            let mut generator = SplitMix64::new(seed);
            let mut draw_mix = || draw_mix(&mut generator, 8, &recordings, 1).unwrap();
            (0..20)
                .map(|_| draw_mix().into_iter().map(|job| job.name).collect())
                .collect()
        };
        assert_eq!(draw_names(1), draw_names(1));
        assert_ne!(draw_names(1), draw_names(2));

        for mix in draw_names(1) {
            let mut sorted = mix.clone();
            sorted.sort();
            sorted.dedup();
            assert_eq!(sorted.len(), 8, "{mix:?}");
        }

        assert!(
            draw_names(1)
                .iter()
                .flatten()
                .any(|name| name == "sort.cmt")
        );
    }

    /// Is a policy that failed on one mix averaged over the others, and one without any score left out of the means?
    #[test]
    fn means_are_over_the_mixes_with_a_score() {
        let scores = SpeedupScores {
            weighted_speedup: 2.0,
            harmonic_mean: 0.5,
            worst_slowdown: 4.0,
            mean_degradation: 1.0,
        };

        let gain = Comparison {
            throughput_gain: 0.1,
            mix_gain: 0.1,
            contention_gain: 0.0,
            busy_gain: 0.0,
        };
        let mix_with_scores = |policies: &[(&str, f64)]| RandomMix {
            programs: Vec::new(),
            policies: policies
                .iter()
                .map(|(name, default)| score_policy(name, &scores, &gain, *default, 4.0))
                .collect(),
            failed: Vec::new(),
            unfinished_pairs: Vec::new(),
        };
        let means = mean_scores_by_policy(&[
            mix_with_scores(&[("di", 2.0), ("dio", 2.0)]),
            mix_with_scores(&[("dio", 1.0)]),
        ]);
        let score_of = |index: usize| {
            (
                means[index].policy.as_str(),
                means[index].weighted_speedup_gain_percent,
            )
        };
        assert_eq!(
            (means.len(), score_of(0), score_of(1)),
            (2, ("di", 0.0), ("dio", 50.0))
        );
    }

    /// Is an abandoned program named, with its slowdown until then?
    #[test]
    fn unfinished_programs_are_named() {
        let sample_rates = |finished: bool| ProgramRates {
            instr_per_cycle: 0.01,
            misses_per_kilo_instr: 1.0,
            data_stalls_per_kilo_instr: 10.0,
            run_time_share: 1.0,
            finished,
        };
        let jobs = [WorkloadJob::new("mcf", 1), WorkloadJob::new("art", 1)];
        let names = unfinished_jobs(
            &jobs,
            &[sample_rates(false), sample_rates(true)],
            &[0.42, 0.42],
        );
        assert_eq!(names, ["mcf (42.0 times slower than alone)"]);
    }
}
