//! Results of a run that policies do not see: the work of every job, and the traffic of memory.

use serde::Serialize;

use super::IntervalMachine;
use super::observe::subtract_totals;
use crate::engine::{ALONE_CYCLES, DEMAND, FILLS, QUEUE_CYCLES, REFERENCES, REMOTE_HITS, TaskTotals, WRITEBACKS};

/// The totals of one job since the start of the measurement, over all its threads and runs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct JobResults {
    /// The job's name.
    pub name: String,
    /// Number of the job's tasks that have run.
    pub tasks: u64,
    /// Number of the job's completed runs.
    pub completions: u64,
    /// Instructions of all tasks of the job.
    pub instructions: f64,
    /// Processor time of all tasks of the job, in seconds.
    pub cpu_seconds: f64,
    /// Instructions over cycles on a processor; `None` if the job did not run.
    pub instr_per_cycle: Option<f64>,
    /// Demand references of the contended cache; like the rates below, `None` if the job ran no instruction.
    pub references_per_kilo_instr: Option<f64>,
    /// Demand misses of the contended cache per thousand instructions.
    pub mpki: Option<f64>,
    /// Bytes to and from memory.
    pub memory_bytes_per_instr: Option<f64>,
    /// Cycles in the queues of buses and controllers.
    pub queue_cycles_per_instr: Option<f64>,
    /// Lines that came from another cache.
    pub remote_hits_per_kilo_instr: Option<f64>,
    /// Run time relative to that of the same instructions alone on a CPU and a cache.
    pub slowdown: Option<f64>,
    /// Time on a processor relative to a solo run: the effect of caches, memory and the core's other contexts.
    pub slowdown_on_cpu: Option<f64>,
}

/// Results of the whole run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct IntervalResults {
    /// Nominal time since measuring began.
    pub seconds: f64,
    /// All jobs, in the given order.
    pub jobs: Vec<JobResults>,
    /// Bytes to and from memory, by node.
    pub memory_bytes_per_second: Vec<f64>,
    /// Share of the controller's bandwidth that is used, by node.
    pub memory_busy_share: Vec<f64>,
}

/// Accumulated totals of a job.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct JobTotals {
    totals: TaskTotals,
    /// Cycles in which the job's tasks wanted to run.
    wanted_cycles: f64,
    pub tasks: u64,
    pub completions: u64,
}

impl JobTotals {
    pub fn add(&mut self, added: &TaskTotals) {
        let sums = &mut self.totals;
        sums.instructions += added.instructions;
        sums.cycles += added.cycles;
        sums.wait_cycles += added.wait_cycles;
        sums.counts.iter_mut().zip(&added.counts).for_each(|(sum, count)| *sum += count);
        self.wanted_cycles += added.cycles + added.wait_cycles;
    }

    fn build_job_results(&self, name: &str, hertz: f64, line_bytes: f64) -> JobResults {
        let TaskTotals { instructions, cycles, counts, .. } = self.totals;
        let ratio_of = |count: f64, scale: f64| (instructions > 0.0).then(|| scale * count / instructions);
        let solo_cycles = counts[ALONE_CYCLES];
        JobResults {
            name: name.to_string(),
            tasks: self.tasks,
            completions: self.completions,
            instructions,
            cpu_seconds: cycles / hertz,
            instr_per_cycle: (cycles > 0.0).then(|| instructions / cycles),
            references_per_kilo_instr: ratio_of(counts[REFERENCES], 1000.0),
            mpki: ratio_of(counts[DEMAND], 1000.0),
            memory_bytes_per_instr: ratio_of(counts[FILLS] + counts[WRITEBACKS], line_bytes),
            queue_cycles_per_instr: ratio_of(counts[QUEUE_CYCLES], 1.0),
            remote_hits_per_kilo_instr: ratio_of(counts[REMOTE_HITS], 1000.0),
            slowdown: (solo_cycles > 0.0).then(|| self.wanted_cycles / solo_cycles),
            slowdown_on_cpu: (solo_cycles > 0.0).then(|| cycles / solo_cycles),
        }
    }
}

impl IntervalMachine {
    /// Starts the measurement; earlier work is not counted.
    pub fn begin_measuring(&mut self) {
        for job in &mut self.jobs {
            job.book = JobTotals { tasks: u64::from(job.alive), ..JobTotals::default() };
        }
        for interval_task in &mut self.tasks {
            interval_task.measured_from = *self.engine.task_totals(interval_task.slot);
        }
        self.measured_from_ns = self.now_ns;
        self.node_bytes.iter_mut().for_each(|bytes| *bytes = 0.0);
    }

    /// Returns the results up to the end of the last window.
    pub fn results(&self) -> IntervalResults {
        let (hertz, line) = (self.spec.hertz as f64, self.engine.line_bytes());
        let mut books: Vec<JobTotals> = self.jobs.iter().map(|running| running.book).collect();
        for interval_task in &self.tasks {
            books[interval_task.job]
                .add(&subtract_totals(self.engine.task_totals(interval_task.slot), &interval_task.measured_from));
        }
        let seconds = (self.now_ns - self.measured_from_ns) as f64 / 1e9;
        let bytes_per_second = |bytes: &f64| if seconds > 0.0 { bytes / seconds } else { 0.0 };
        let memory: Vec<f64> = self.node_bytes.iter().map(bytes_per_second).collect();
        let max_bytes = self.spec.memory.bytes_per_cycle * hertz;
        IntervalResults {
            seconds,
            jobs: self
                .jobs
                .iter()
                .zip(&books)
                .map(|(job, book)| book.build_job_results(&job.job.name, hertz, line))
                .collect(),
            memory_busy_share: memory.iter().map(|bytes| bytes / max_bytes).collect(),
            memory_bytes_per_second: memory,
        }
    }

    /// Returns a task's present slowdown: wanted cycles over solo cycles since the last window, and the same on a
    /// processor.
    pub(super) fn slowdown_of(totals: &TaskTotals) -> Option<(f64, f64)> {
        let solo_cycles = totals.counts[ALONE_CYCLES];
        (solo_cycles > 0.0).then(|| ((totals.cycles + totals.wait_cycles) / solo_cycles, totals.cycles / solo_cycles))
    }
}
