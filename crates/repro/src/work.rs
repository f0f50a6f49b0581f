//! Speeds over equal work: the same instructions of a program in every run that is compared.
//!
//! Problem: programs have phases. Over equal numbers of cycles, a slower run of a program covers other phases than a
//! faster one, so the ratio of their speeds compares phases as much as co-runners; a program that walks a structure of
//! the cache's size seemed to become six times slower, or faster than alone. Method: the instructions that a program
//! executes alone between two cycles are its work. With co-runners it is timed from the first to the last of those
//! instructions, wherever in time they fall, and all programs keep running until the last one has finished (CA 5:
//! finished programs restart). Properties: the ratio of two times of the same work is a slowdown whatever the phases;
//! progress is sampled every [`STEP_CYCLES`] and interpolated linearly; a policy sees none of it.

use cachemate_core::{CacheLevel, Decision, Machine as _, Plan, WindowLength};
use cachemate_sim::machine::{ProgressSample, RunLimit, SimMachine, SimOptions, TaskProgress};
use cachemate_sim::results::RunResults;
use cachemate_sim::run::run_alone;
use serde::{Deserialize, Serialize};

use crate::error::{ReproError, failed};
use crate::rates::ProgramRates;
use crate::workload::Workload;

/// Simulated cycles between two samples of all programs' progress.
pub const STEP_CYCLES: u64 = 50_000;
/// Multiple of the solo cycles of its work after which a run ends unfinished.
pub const GIVES_UP_AFTER_TIMES: u64 = 20;

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
    pub fn run(&self, machine: &mut SimMachine) -> Result<RunResults, ReproError> {
        machine.set_first_window(self.first_window);
        while machine.observe().map_err(failed("a run under a fixed plan"))?.is_some() {
            let applied = machine.apply(&self.plan).map_err(failed("a fixed plan"))?;
            if let Some(refused) = applied.refused.first() {
                return Err(failed("a fixed plan")(&refused.message));
            }
        }
        Ok(machine.results())
    }
}

/// One run over given work.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WorkRun {
    /// Rates in the order of the jobs.
    pub rates: Vec<ProgramRates>,
    /// Results of the whole run, including the warm-up and the time after the first jobs have finished.
    pub results: RunResults,
    /// The policy's reasons, window by window; empty without a policy.
    pub decisions: Vec<Decision>,
}

/// The work of the workload's only job alone in the measured cycles after the warm-up, and its speed.
pub(crate) fn measure_solo(workload: &Workload) -> Result<(InstructionRange, ProgramRates), ReproError> {
    let (start_cycle, end_cycle) = (workload.warm_up_cycles, workload.warm_up_cycles + workload.measured_cycles);
    let mut machine = timed_machine(workload, end_cycle, Vec::new())?;
    run_alone(&mut machine).map_err(failed("run alone"))?;
    let progress_at =
        |cycle: u64| find_progress(machine.progress_samples(), 0, |step, _| step.cycle as f64, cycle as f64);
    let name = &workload.jobs[0].name;
    let (begin, end) = progress_at(start_cycle)
        .zip(progress_at(end_cycle))
        .ok_or_else(|| failed(name)("it ended alone before it was measured"))?;
    let work = InstructionRange { from_instr: begin.instructions, to_instr: end.instructions };
    Ok((work, rates_between(&begin, &end, true).ok_or_else(|| failed(name)("it ran no instruction alone"))?))
}

/// Runs all jobs together, the n-th over the n-th work, under the machine's scheduler or one plan. A job that does not
/// finish its work in [`GIVES_UP_AFTER_TIMES`] the solo time of all is marked in its rates.
pub(crate) fn measure_joint(
    workload: &Workload,
    work: &[InstructionRange],
    plan: Option<&FixedPlan>,
) -> Result<WorkRun, ReproError> {
    let mut machine = machine_timed_together(workload, work)?;
    let results = match plan {
        None => run_alone(&mut machine).map_err(failed("unmanaged run"))?,
        Some(plan) => plan.run(&mut machine)?,
    };
    work_run(workload, work, machine.progress_samples(), results, Vec::new())
}

/// A machine at its start that ends once every job has finished its work.
pub(crate) fn machine_timed_together(workload: &Workload, work: &[InstructionRange]) -> Result<SimMachine, ReproError> {
    let alone_cycles = workload.warm_up_cycles + workload.measured_cycles;
    let instr_limits = work.iter().map(|work| work.to_instr as u64 + 1).collect();
    timed_machine(workload, GIVES_UP_AFTER_TIMES * alone_cycles, instr_limits)
}

/// The run that this trail describes.
pub(crate) fn work_run(
    workload: &Workload,
    work: &[InstructionRange],
    samples: &[ProgressSample],
    results: RunResults,
    decisions: Vec<Decision>,
) -> Result<WorkRun, ReproError> {
    let rates = |(task, work): (usize, &InstructionRange)| {
        rates_over_work(samples, task, work).ok_or_else(|| failed(&workload.jobs[task].name)("it never ran"))
    };
    Ok(WorkRun { rates: work.iter().enumerate().map(rates).collect::<Result<_, _>>()?, results, decisions })
}

/// Rates over the work; `None` for a job that executed nothing.
fn rates_over_work(samples: &[ProgressSample], task: usize, work: &InstructionRange) -> Option<ProgramRates> {
    let progress_at = |instr: f64| find_progress(samples, task, |_, task| task.instructions as f64, instr);
    let begin = progress_at(work.from_instr);
    if let Some((begin, end)) = begin.zip(progress_at(work.to_instr)) {
        return rates_between(&begin, &end, true);
    }
    let last = samples.last().filter(|step| task < step.tasks.len())?;
    let end = progress_point(last, &last.tasks[task]);
    let start =
        ProgressPoint { cycle: 0.0, instructions: 0.0, misses: 0.0, on_cpu_cycles: 0.0, data_stall_cycles: 0.0 };
    rates_between(&begin.unwrap_or(start), &end, false)
}

fn timed_machine(workload: &Workload, ends_cycles: u64, instr_limits: Vec<u64>) -> Result<SimMachine, ReproError> {
    if workload.machine.last_level().map(|cache| cache.level).is_none_or(|level| level == CacheLevel::L1Instruction) {
        return Err(failed(&workload.machine.name)("no data cache to share"));
    }
    let ends = Some(RunLimit::Cycles(ends_cycles));
    let mut machine = workload.build_machine_with(SimOptions { warm_up: None, ends, ..workload.options.clone() })?;
    machine.log_progress(STEP_CYCLES, instr_limits);
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

fn progress_point(step: &ProgressSample, task: &TaskProgress) -> ProgressPoint {
    ProgressPoint {
        cycle: step.cycle as f64,
        instructions: task.instructions as f64,
        misses: task.misses as f64,
        on_cpu_cycles: task.on_cpu_cycles as f64,
        data_stall_cycles: task.data_stall_cycles,
    }
}

/// The moment at which `of` reaches `value`, interpolated linearly between samples; `None` beyond the last.
fn find_progress(
    samples: &[ProgressSample],
    task: usize,
    metric: impl Fn(&ProgressSample, &TaskProgress) -> f64,
    value: f64,
) -> Option<ProgressPoint> {
    let job_steps = || samples.iter().filter_map(|step| Some((step, step.tasks.get(task)?)));
    let after = job_steps().position(|(step, task)| metric(step, task) >= value)?;
    let high = job_steps().nth(after)?;
    let low = after.checked_sub(1).and_then(|index| job_steps().nth(index)).unwrap_or(high);
    let (low_value, high_value) = (metric(low.0, low.1), metric(high.0, high.1));
    let share = if high_value > low_value { (value - low_value) / (high_value - low_value) } else { 1.0 };
    let (low, high) = (progress_point(low.0, low.1), progress_point(high.0, high.1));
    let interpolate = |low: f64, high: f64| low + share * (high - low);
    Some(ProgressPoint {
        cycle: interpolate(low.cycle, high.cycle),
        instructions: interpolate(low.instructions, high.instructions),
        misses: interpolate(low.misses, high.misses),
        on_cpu_cycles: interpolate(low.on_cpu_cycles, high.on_cpu_cycles),
        data_stall_cycles: interpolate(low.data_stall_cycles, high.data_stall_cycles),
    })
}

/// Rates between two moments; `None` if nothing was executed.
fn rates_between(begin: &ProgressPoint, end: &ProgressPoint, finished: bool) -> Option<ProgramRates> {
    let (instr, cycles) = (end.instructions - begin.instructions, end.cycle - begin.cycle);
    (instr > 0.0 && cycles > 0.0).then(|| ProgramRates {
        instr_per_cycle: instr / cycles,
        misses_per_kilo_instr: 1000.0 * (end.misses - begin.misses) / instr,
        data_stalls_per_kilo_instr: 1000.0 * (end.data_stall_cycles - begin.data_stall_cycles) / instr,
        run_time_share: (end.on_cpu_cycles - begin.on_cpu_cycles) / cycles,
        finished,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::WorkloadJob;

    /// Does a program with very different phases keep its speed beside one that does not use memory, although it is
    /// measured from another cycle on?
    #[test]
    fn equal_work_is_the_same_instructions() {
        let run_jobs = |jobs: &[&str]| {
            let jobs = jobs.iter().map(|name| WorkloadJob::new(name, 1)).collect();
            Workload::from_machine_name("xeon-x5365-4", jobs, 1).unwrap().with_length(1_000_000, 1_500_000)
        };
        let (work, speed) = measure_solo(&run_jobs(&["mcf-2006"])).unwrap();
        assert!(work.from_instr > 0.0 && work.to_instr > work.from_instr);
        let (quiet, _) = measure_solo(&run_jobs(&["gamess"])).unwrap();
        let run = measure_joint(&run_jobs(&["mcf-2006", "gamess"]), &[work, quiet], None).unwrap();
        let ratio = run.rates[0].instr_per_cycle / speed.instr_per_cycle;
        assert!((0.9..1.05).contains(&ratio), "{ratio}");
        assert!((run.rates[0].run_time_share - 1.0).abs() < 0.02, "{:?}", run.rates);
        assert!(run.results.tasks[0].instructions as f64 >= work.to_instr);
    }

    /// Are moments between two samples interpolated linearly, and is there none beyond the last?
    #[test]
    fn moments_lie_on_lines_between_notes() {
        let sample_step = |cycle: u64, instructions: u64| ProgressSample {
            cycle,
            tasks: vec![TaskProgress {
                instructions,
                misses: instructions / 10,
                on_cpu_cycles: cycle,
                data_stall_cycles: 0.5 * cycle as f64,
            }],
        };
        let samples = [sample_step(0, 0), sample_step(100, 50), sample_step(200, 250)];
        let progress_at = |instr: f64| find_progress(&samples, 0, |_, task| task.instructions as f64, instr);
        let counts = |moment: ProgressPoint| (moment.cycle, moment.misses, moment.data_stall_cycles);
        assert_eq!(progress_at(150.0).map(counts), Some((150.0, 15.0, 75.0)));
        assert_eq!(progress_at(50.0).map(|moment| moment.cycle), Some(100.0));
        assert_eq!(progress_at(0.0).map(|moment| moment.cycle), Some(0.0));
        assert_eq!(progress_at(251.0), None);
    }

    /// Is an unfinished program marked as such, with the speed of the finished part, and does one that executed nothing
    /// have no speed?
    #[test]
    fn unfinished_work_is_told() {
        let task =
            |instructions: u64| TaskProgress { instructions, misses: 0, on_cpu_cycles: 0, data_stall_cycles: 0.0 };
        let sample_step = |cycle: u64, done: u64| ProgressSample { cycle, tasks: vec![task(done), task(0)] };
        let samples = [sample_step(0, 0), sample_step(100, 100), sample_step(200, 150)];
        let rates_over = |task: usize, from_instr: f64, to_instr: f64| {
            rates_over_work(&samples, task, &InstructionRange { from_instr, to_instr })
                .map(|rates| (rates.instr_per_cycle, rates.finished))
        };
        assert_eq!(rates_over(0, 50.0, 100.0), Some((1.0, true)));
        assert_eq!(rates_over(0, 100.0, 1000.0), Some((0.5, false)));
        assert_eq!(rates_over(0, 500.0, 1000.0), Some((0.75, false)));
        assert_eq!(rates_over(1, 0.0, 10.0), None);
    }
}
