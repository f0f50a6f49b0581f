//! Records every task's progress at a fixed interval.
//!
//! Problem: programs have phases, so in the same number of cycles, a slower program executes different parts in two
//! runs, and a comparison of its speeds compares phases. Method: instructions and misses of every task are recorded at
//! a fixed interval. A comparison determines when a task had executed a given number of instructions, and interpolates
//! linearly between two records. Properties: the records are invisible to policies and cost no simulated time.

use super::SimMachine;

/// Counts of one task from its start to one moment.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TaskProgress {
    /// Number of instructions issued.
    pub instructions: u64,
    /// Number of demand misses of the last-level data cache.
    pub misses: u64,
    /// Number of cycles on a processor.
    pub on_cpu_cycles: u64,
    /// Number of these cycles in which the task waited for data from beyond the first level.
    pub data_stall_cycles: f64,
}

/// Counts of all tasks at one moment, by task number.
#[derive(Clone, PartialEq, Debug)]
pub struct ProgressSample {
    /// Cycle of the sample, counted from the start of the run.
    pub cycle: u64,
    /// Tasks that had arrived by that cycle.
    pub tasks: Vec<TaskProgress>,
}

pub(crate) struct ProgressLog {
    interval_cycles: u64,
    next_cycle: u64,
    samples: Vec<ProgressSample>,
    /// Number of instructions of each task at which the run ends.
    instruction_limits: Vec<u64>,
    is_done: bool,
}

impl SimMachine {
    /// Records the progress of every task every `interval_cycles` (1 or more) from now on.
    ///
    /// The run ends once each of the first `instruction_limits.len()` tasks has executed its number of instructions; if
    /// the list is empty, only the run's length ends it.
    pub fn log_progress(&mut self, interval_cycles: u64, instruction_limits: Vec<u64>) {
        let (every_cycles, next_cycle) = (interval_cycles.max(1), self.now_cycles());
        self.progress_log = Some(ProgressLog {
            interval_cycles: every_cycles,
            next_cycle,
            samples: Vec::new(),
            instruction_limits,
            is_done: false,
        });
        self.record_sample();
    }

    /// Samples in order of time; empty without [`SimMachine::log_progress`].
    pub fn progress_samples(&self) -> &[ProgressSample] {
        self.progress_log.as_ref().map_or(&[], |log| &log.samples)
    }

    pub(crate) fn next_sample_cycle(&self) -> u64 {
        self.progress_log
            .as_ref()
            .map_or(u64::MAX, |log| log.next_cycle)
    }

    pub(crate) fn has_reached_instruction_limits(&self) -> bool {
        self.progress_log.as_ref().is_some_and(|log| log.is_done)
    }

    pub(crate) fn record_sample(&mut self) {
        let now = self.system.now();
        self.system.dispatcher.account_to(now);
        let last_level = self.spec.last_level_cache().map(|cache| cache.level);
        let progress_of = |sim_task: &super::SimTask| {
            let counters = self.system.task_counters(sim_task.slot);
            TaskProgress {
                instructions: counters.instructions,
                misses: last_level.map_or(0, |level| counters.levels[level as usize].all_misses()),
                on_cpu_cycles: self
                    .system
                    .dispatcher
                    .task(sim_task.slot)
                    .on_cpu_cycles
                    .iter()
                    .sum(),
                data_stall_cycles: counters.stalls.data_stalls() as f64
                    / counters.ticks_per_cycle.max(1) as f64,
            }
        };
        let tasks: Vec<TaskProgress> = self.tasks.iter().map(progress_of).collect();
        let Some(log) = &mut self.progress_log else {
            return;
        };

        let limits = &log.instruction_limits;
        log.is_done = !limits.is_empty()
            && limits.len() <= tasks.len()
            && limits
                .iter()
                .zip(&tasks)
                .all(|(limit, task)| task.instructions >= *limit);
        log.next_cycle = now + log.interval_cycles;
        log.samples.push(ProgressSample { cycle: now, tasks });
    }
}

#[cfg(test)]
mod tests {
    use crate::kernels;
    use crate::machine::{RunLimit, SimMachine, SimOptions, SimProgram};
    use crate::run::run_alone;

    fn sample_machine(ends: u64) -> SimMachine {
        let new_program = |name: &'static str| {
            let make_threads =
                move |_| kernels::build_threads(name, 1, &kernels::Options::default()).unwrap();
            SimProgram::new(name, Box::new(make_threads))
        };
        let options = SimOptions {
            ends: Some(RunLimit::Cycles(ends)),
            ..SimOptions::default()
        };
        SimMachine::new(
            &crate::machine::tests::sample_spec(),
            &options,
            vec![new_program("twolf"), new_program("gamess")],
        )
        .unwrap()
    }

    /// Do the records rise to the final counts, without changing the run?
    #[test]
    fn records_rise_to_the_final_counts_without_changing_the_run() {
        let plain_run = run_alone(&mut sample_machine(1_000_000)).unwrap();
        let mut watched = sample_machine(1_000_000);
        watched.log_progress(50_000, Vec::new());
        let logged_run = run_alone(&mut watched).unwrap();
        let steps = watched.progress_samples();
        assert!(
            steps.windows(2).all(|two| two[0].cycle < two[1].cycle),
            "{steps:?}"
        );
        let last = steps.last().unwrap();
        for (task, results) in last.tasks.iter().zip(&logged_run.tasks) {
            assert_eq!(task.instructions, results.instructions);
        }
        let difference = |a: u64, b: u64| (a as f64 / b as f64 - 1.0).abs();
        for (first, other) in logged_run.tasks.iter().zip(&plain_run.tasks) {
            assert!(
                difference(first.instructions, other.instructions) < 0.001,
                "{first:?} {other:?}"
            );
        }
    }

    /// Does a run end once all programs have done the requested work, and not before?
    #[test]
    fn a_run_ends_when_the_work_is_done() {
        let mut machine = sample_machine(1_000_000_000);
        machine.log_progress(10_000, vec![200_000, 300_000]);
        run_alone(&mut machine).unwrap();
        let steps = machine.progress_samples();
        let is_finished = |step: &super::ProgressSample| {
            step.tasks[0].instructions >= 200_000 && step.tasks[1].instructions >= 300_000
        };
        assert_eq!(steps.iter().position(is_finished), Some(steps.len() - 1));
    }
}
