//! Speeds over equal work: the same instructions of a program in every run that is compared.
//!
//! Problem: programs have phases. Over equal numbers of cycles, a slower run of a program covers other phases than a
//! faster one, so the ratio of their speeds compares phases as much as co-runners; a program that walks a structure of
//! the cache's size seemed to become six times slower, or faster than alone. Method: the instructions that a program
//! executes alone between two cycles are its work. With co-runners it is timed from the first to the last of those
//! instructions, wherever in time they fall, and all programs keep running until the last one has finished (CA 5:
//! finished programs restart). Properties: the ratio of two times of the same work is a slowdown whatever the phases;
//! progress is sampled every [`SAMPLING_STEP_CYCLES`] and interpolated linearly; a policy sees none of it.

use cachemate_core::{CacheLevel, Decision, Machine as _, Plan, WindowLength};
use cachemate_sim::machine::{ProgressSample, RunLimit, SimMachine, SimOptions, TaskProgress};
use cachemate_sim::results::RunResults;
use cachemate_sim::run::run_alone;
use serde::{Deserialize, Serialize};

use crate::error::{Result, failed};
use crate::rates::ProgramRates;
use crate::statistics::interpolate_at;
use crate::workload::Workload;

/// Simulated cycles between two samples of all programs' progress.
pub const SAMPLING_STEP_CYCLES: u64 = 50_000;
/// Multiple of the solo cycles of its work after which a run ends unfinished.
pub const MAX_SOLO_TIME_MULTIPLE: u64 = 20;

/// A range of a program's instructions, counted from its start.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct InstructionRange {
    /// The first instruction.
    pub from_instr: f64,
    /// The instruction after the last.
    pub to_instr: f64,
}

/// One plan that is applied after the first window, whatever is observed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct FixedPlan {
    /// The plan.
    pub plan: Plan,
    /// Length of the first window, before the plan is in force.
    pub first_window: WindowLength,
}

impl FixedPlan {
    /// Runs a machine under the plan to its end.
    pub fn run(&self, machine: &mut SimMachine) -> Result<RunResults> {
        machine.set_first_window(self.first_window);
        while machine
            .observe()
            .map_err(failed("a run under a fixed plan"))?
            .is_some()
        {
            let applied = machine.apply(&self.plan).map_err(failed("a fixed plan"))?;
            if let Some(refused) = applied.refused.first() {
                return Err(failed("a fixed plan")(&refused.message));
            }
        }
        Ok(machine.collect_results())
    }
}

/// One run over given work.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WorkRun {
    /// Rates in the order of the jobs.
    pub rates: Vec<ProgramRates>,
    /// Results of the whole run, including the warm-up and the time after the first jobs have finished.
    pub results: RunResults,
    /// The policy's decisions, window by window; empty without a policy.
    pub decisions: Vec<Decision>,
}

/// The work of the workload's only job alone in the measured cycles after the warm-up, and its
/// speed.
pub(crate) fn measure_solo(workload: &Workload) -> Result<(InstructionRange, ProgramRates)> {
    let (start_cycle, end_cycle) = (
        workload.warm_up_cycles,
        workload.warm_up_cycles + workload.measured_cycles,
    );
    let mut machine = build_machine_ending_at(workload, end_cycle, Vec::new())?;
    run_alone(&mut machine).map_err(failed("run alone"))?;
    let progress_at_cycle = |cycle: u64| {
        find_progress(
            machine.progress_samples(),
            0,
            |step, _| step.cycle as f64,
            cycle as f64,
        )
    };
    let name = &workload.jobs[0].name;
    let (start_point, end_point) = progress_at_cycle(start_cycle)
        .zip(progress_at_cycle(end_cycle))
        .ok_or_else(|| failed(name)("it ended alone before it was measured"))?;
    let work_range = InstructionRange {
        from_instr: start_point.instructions,
        to_instr: end_point.instructions,
    };
    Ok((
        work_range,
        rates_between(&start_point, &end_point, true)
            .ok_or_else(|| failed(name)("it ran no instruction alone"))?,
    ))
}

/// Runs all jobs together, the n-th over the n-th work, under the machine's scheduler or one plan. A job that does not
/// finish its work in [`MAX_SOLO_TIME_MULTIPLE`] the solo time of all is marked in its rates.
pub(crate) fn measure_joint(
    workload: &Workload,
    work_ranges: &[InstructionRange],
    plan: Option<&FixedPlan>,
) -> Result<WorkRun> {
    let mut machine = build_joint_machine(workload, work_ranges)?;
    let results = match plan {
        None => run_alone(&mut machine).map_err(failed("unmanaged run"))?,
        Some(plan) => plan.run(&mut machine)?,
    };
    summarize_run(
        workload,
        work_ranges,
        machine.progress_samples(),
        results,
        Vec::new(),
    )
}

/// A machine at its start that ends once every job has finished its work.
pub(crate) fn build_joint_machine(
    workload: &Workload,
    work_ranges: &[InstructionRange],
) -> Result<SimMachine> {
    let solo_cycles = workload.warm_up_cycles + workload.measured_cycles;
    let instr_limits = work_ranges
        .iter()
        .map(|work| work.to_instr as u64 + 1)
        .collect();
    build_machine_ending_at(workload, MAX_SOLO_TIME_MULTIPLE * solo_cycles, instr_limits)
}

/// Computes the rates of all jobs from the samples of their progress.
pub(crate) fn summarize_run(
    workload: &Workload,
    work_ranges: &[InstructionRange],
    samples: &[ProgressSample],
    results: RunResults,
    decisions: Vec<Decision>,
) -> Result<WorkRun> {
    let rates_of_job = |(task, work): (usize, &InstructionRange)| {
        rates_over_work(samples, task, work)
            .ok_or_else(|| failed(&workload.jobs[task].name)("it never ran"))
    };

    Ok(WorkRun {
        rates: work_ranges
            .iter()
            .enumerate()
            .map(rates_of_job)
            .collect::<Result<_, _>>()?,
        results,
        decisions,
    })
}

/// Rates over the work; `None` for a job that executed nothing.
fn rates_over_work(
    samples: &[ProgressSample],
    task: usize,
    work: &InstructionRange,
) -> Option<ProgramRates> {
    let progress_at_instr =
        |instr: f64| find_progress(samples, task, |_, task| task.instructions as f64, instr);
    let start_point = progress_at_instr(work.from_instr);
    if let Some((begin, end)) = start_point.zip(progress_at_instr(work.to_instr)) {
        return rates_between(&begin, &end, true);
    }

    let last_sample = samples.last().filter(|step| task < step.tasks.len())?;
    let end_point = point_of_progress(last_sample, &last_sample.tasks[task]);
    let zero_point = ProgressPoint {
        cycle: 0.0,
        instructions: 0.0,
        misses: 0.0,
        on_cpu_cycles: 0.0,
        data_stall_cycles: 0.0,
    };
    rates_between(&start_point.unwrap_or(zero_point), &end_point, false)
}

fn build_machine_ending_at(
    workload: &Workload,
    end_cycle: u64,
    instr_limits: Vec<u64>,
) -> Result<SimMachine> {
    if workload
        .machine
        .last_level_cache()
        .map(|cache| cache.level)
        .is_none_or(|level| level == CacheLevel::L1Instruction)
    {
        return Err(failed(&workload.machine.name)("no data cache to share"));
    }

    let run_limit = Some(RunLimit::Cycles(end_cycle));
    let mut machine = workload.build_machine_with(SimOptions {
        warm_up: None,
        ends: run_limit,
        ..workload.options.clone()
    })?;
    machine.log_progress(SAMPLING_STEP_CYCLES, instr_limits);
    Ok(machine)
}

/// A task's totals at a moment between two samples.
#[derive(Clone, Copy, PartialEq, Debug)]
struct ProgressPoint {
    cycle: f64,
    instructions: f64,
    misses: f64,
    on_cpu_cycles: f64,
    data_stall_cycles: f64,
}

fn point_of_progress(step: &ProgressSample, task: &TaskProgress) -> ProgressPoint {
    ProgressPoint {
        cycle: step.cycle as f64,
        instructions: task.instructions as f64,
        misses: task.misses as f64,
        on_cpu_cycles: task.on_cpu_cycles as f64,
        data_stall_cycles: task.data_stall_cycles,
    }
}

/// The moment at which `metric` reaches `value`, interpolated linearly between samples; `None`
/// beyond the last.
fn find_progress(
    samples: &[ProgressSample],
    task: usize,
    metric: impl Fn(&ProgressSample, &TaskProgress) -> f64,
    value: f64,
) -> Option<ProgressPoint> {
    // A task is in the samples from its arrival on.
    let samples = &samples[samples.partition_point(|step| step.tasks.len() <= task)..];
    let interpolate = |value_of: fn(&ProgressPoint) -> f64| {
        let position = |step: &ProgressSample| metric(step, &step.tasks[task]);
        interpolate_at(samples, value, position, |step| {
            value_of(&point_of_progress(step, &step.tasks[task]))
        })
    };

    Some(ProgressPoint {
        cycle: interpolate(|point| point.cycle)?,
        instructions: interpolate(|point| point.instructions)?,
        misses: interpolate(|point| point.misses)?,
        on_cpu_cycles: interpolate(|point| point.on_cpu_cycles)?,
        data_stall_cycles: interpolate(|point| point.data_stall_cycles)?,
    })
}

/// Rates between two moments; `None` if nothing was executed.
fn rates_between(
    start_point: &ProgressPoint,
    end_point: &ProgressPoint,
    is_finished: bool,
) -> Option<ProgramRates> {
    let (instr, cycles) = (
        end_point.instructions - start_point.instructions,
        end_point.cycle - start_point.cycle,
    );
    (instr > 0.0 && cycles > 0.0).then(|| ProgramRates {
        instr_per_cycle: instr / cycles,
        misses_per_kilo_instr: 1000.0 * (end_point.misses - start_point.misses) / instr,
        data_stalls_per_kilo_instr: 1000.0
            * (end_point.data_stall_cycles - start_point.data_stall_cycles)
            / instr,
        run_time_share: (end_point.on_cpu_cycles - start_point.on_cpu_cycles) / cycles,
        finished: is_finished,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::WorkloadJob;

    /// Does a program with very different phases keep its speed beside one that does not use memory, although it is
    /// measured from another cycle on?
    #[test]
    fn a_program_keeps_its_speed_beside_one_without_memory_use() {
        let run_jobs = |jobs: &[&str]| {
            let jobs = jobs.iter().map(|name| WorkloadJob::new(name, 1)).collect();
            Workload::from_machine_name("xeon-x5365-4", jobs, 1)
                .unwrap()
                .with_length(1_000_000, 1_500_000)
        };
        let (work, speed) = measure_solo(&run_jobs(&["mcf-2006"])).unwrap();
        assert!(work.from_instr > 0.0 && work.to_instr > work.from_instr);
        let (quiet, _) = measure_solo(&run_jobs(&["gamess"])).unwrap();
        let run = measure_joint(&run_jobs(&["mcf-2006", "gamess"]), &[work, quiet], None).unwrap();
        let ratio = run.rates[0].instr_per_cycle / speed.instr_per_cycle;
        assert!((0.9..1.05).contains(&ratio), "{ratio}");
        assert!(
            (run.rates[0].run_time_share - 1.0).abs() < 0.02,
            "{:?}",
            run.rates
        );
        assert!(run.results.tasks[0].instructions as f64 >= work.to_instr);
    }

    /// Are moments between two samples interpolated linearly, and is there none beyond the last?
    #[test]
    fn moments_between_samples_are_interpolated_linearly() {
        let sample_step = |cycle: u64, instructions: u64| ProgressSample {
            cycle,
            tasks: vec![TaskProgress {
                instructions,
                misses: instructions / 10,
                on_cpu_cycles: cycle,
                data_stall_cycles: 0.5 * cycle as f64,
            }],
        };

        let samples = [
            sample_step(0, 0),
            sample_step(100, 50),
            sample_step(200, 250),
        ];
        let progress_at =
            |instr: f64| find_progress(&samples, 0, |_, task| task.instructions as f64, instr);
        let counts =
            |moment: ProgressPoint| (moment.cycle, moment.misses, moment.data_stall_cycles);
        assert_eq!(progress_at(150.0).map(counts), Some((150.0, 15.0, 75.0)));
        assert_eq!(progress_at(50.0).map(|moment| moment.cycle), Some(100.0));
        assert_eq!(progress_at(0.0).map(|moment| moment.cycle), Some(0.0));
        assert_eq!(progress_at(251.0), None);
    }

    /// Is an unfinished program marked as such, with the speed of the finished part, and does one that executed nothing
    /// have no speed?
    #[test]
    fn an_unfinished_program_is_marked_with_its_partial_speed() {
        let task = |instructions: u64| TaskProgress {
            instructions,
            misses: 0,
            on_cpu_cycles: 0,
            data_stall_cycles: 0.0,
        };
        let sample_step = |cycle: u64, done: u64| ProgressSample {
            cycle,
            tasks: vec![task(done), task(0)],
        };

        let samples = [
            sample_step(0, 0),
            sample_step(100, 100),
            sample_step(200, 150),
        ];
        let rates_over = |task: usize, from_instr: f64, to_instr: f64| {
            rates_over_work(
                &samples,
                task,
                &InstructionRange {
                    from_instr,
                    to_instr,
                },
            )
            .map(|rates| (rates.instr_per_cycle, rates.finished))
        };
        assert_eq!(rates_over(0, 50.0, 100.0), Some((1.0, true)));
        assert_eq!(rates_over(0, 100.0, 1000.0), Some((0.5, false)));
        assert_eq!(rates_over(0, 500.0, 1000.0), Some((0.75, false)));
        assert_eq!(rates_over(1, 0.0, 10.0), None);
    }
}
