//! Results of a run that policies do not see: the work of every job, and the traffic of memory.

use serde::{Deserialize, Serialize};

use super::IntervalMachine;
use super::observe::subtract_totals;
use crate::engine::{
    DEMAND, FILLS, QUEUE_CYCLES, REFERENCES, REMOTE_HITS, SOLO_CYCLES, TaskTotals, WRITEBACKS,
};

/// The totals of one job since the start of the measurement, over all its threads and runs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
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
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
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
    /// Cycles in which the job's tasks were runnable.
    demanded_cycles: f64,
    pub tasks: u64,
    pub completions: u64,
}

impl JobTotals {
    pub fn add(&mut self, addend: &TaskTotals) {
        let sums = &mut self.totals;
        sums.instructions += addend.instructions;
        sums.cycles += addend.cycles;
        sums.wait_cycles += addend.wait_cycles;
        sums.counts
            .iter_mut()
            .zip(&addend.counts)
            .for_each(|(sum, count)| *sum += count);
        self.demanded_cycles += addend.cycles + addend.wait_cycles;
    }

    fn build_job_results(&self, name: &str, hertz: f64, line_bytes: f64) -> JobResults {
        let TaskTotals {
            instructions,
            cycles,
            counts,
            ..
        } = self.totals;
        let per_instr =
            |count: f64, scale: f64| (instructions > 0.0).then(|| scale * count / instructions);
        let solo_cycles = counts[SOLO_CYCLES];

        JobResults {
            name: name.to_string(),
            tasks: self.tasks,
            completions: self.completions,
            instructions,
            cpu_seconds: cycles / hertz,
            instr_per_cycle: (cycles > 0.0).then(|| instructions / cycles),
            references_per_kilo_instr: per_instr(counts[REFERENCES], 1000.0),
            mpki: per_instr(counts[DEMAND], 1000.0),
            memory_bytes_per_instr: per_instr(counts[FILLS] + counts[WRITEBACKS], line_bytes),
            queue_cycles_per_instr: per_instr(counts[QUEUE_CYCLES], 1.0),
            remote_hits_per_kilo_instr: per_instr(counts[REMOTE_HITS], 1000.0),
            slowdown: (solo_cycles > 0.0).then(|| self.demanded_cycles / solo_cycles),
            slowdown_on_cpu: (solo_cycles > 0.0).then(|| cycles / solo_cycles),
        }
    }
}

impl IntervalMachine {
    /// Starts the measurement; earlier work is not counted.
    pub fn begin_measuring(&mut self) {
        for job in &mut self.jobs {
            job.totals = JobTotals {
                tasks: u64::from(job.live_threads),
                ..JobTotals::default()
            };
        }
        for interval_task in &mut self.tasks {
            interval_task.totals_at_start = *self.engine.task_totals(interval_task.slot);
        }
        self.measurement_start_ns = self.now_ns;
        self.node_bytes.iter_mut().for_each(|bytes| *bytes = 0.0);
    }

    /// Results up to the end of the last window.
    pub fn results(&self) -> IntervalResults {
        let (hertz, line_bytes) = (self.spec.hertz as f64, self.engine.line_bytes());
        let mut job_totals: Vec<JobTotals> =
            self.jobs.iter().map(|running| running.totals).collect();
        for interval_task in &self.tasks {
            job_totals[interval_task.job].add(&subtract_totals(
                self.engine.task_totals(interval_task.slot),
                &interval_task.totals_at_start,
            ));
        }

        let seconds = (self.now_ns - self.measurement_start_ns) as f64 / 1e9;
        let bytes_per_second = |bytes: &f64| if seconds > 0.0 { bytes / seconds } else { 0.0 };
        let bytes_per_second_by_node: Vec<f64> =
            self.node_bytes.iter().map(bytes_per_second).collect();
        let max_bytes = self.spec.memory.bytes_per_cycle * hertz;
        IntervalResults {
            seconds,
            jobs: self
                .jobs
                .iter()
                .zip(&job_totals)
                .map(|(job, totals)| totals.build_job_results(&job.job.name, hertz, line_bytes))
                .collect(),
            memory_busy_share: bytes_per_second_by_node
                .iter()
                .map(|bytes| bytes / max_bytes)
                .collect(),
            memory_bytes_per_second: bytes_per_second_by_node,
        }
    }

    /// Runnable cycles over solo cycles, and cycles on a processor over solo cycles, in the last
    /// window. `None` if the task ran no instruction.
    pub(super) fn slowdown_of(totals: &TaskTotals) -> Option<(f64, f64)> {
        let solo_cycles = totals.counts[SOLO_CYCLES];
        (solo_cycles > 0.0).then(|| {
            (
                (totals.cycles + totals.wait_cycles) / solo_cycles,
                totals.cycles / solo_cycles,
            )
        })
    }
}
