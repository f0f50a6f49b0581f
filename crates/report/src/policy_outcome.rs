//! The outcome of programs under one policy on the interval machine, as data.

use serde::Serialize;

/// Outcome of a run under one policy.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PolicyOutcome {
    /// The policy, as given on the command line.
    pub policy: String,
    /// Whether the run completed; if not, the user stopped it, and the figures cover the time before the stop.
    pub complete: bool,
    /// Number of windows that the policy observed.
    pub windows: u64,
    /// Mean over programs of the slowdown: run time divided by the run time alone on a separate CPU and cache.
    pub mean_slowdown: Option<f64>,
    /// Largest slowdown of any program; `None` if no program has a slowdown.
    pub worst_slowdown: Option<f64>,
    /// Sum of the inverse slowdowns of all programs.
    pub weighted_speedup: Option<f64>,
    /// Instructions per second of all programs together, over the whole run.
    pub instructions_per_second: f64,
    /// Memory traffic of all nodes together, in both directions.
    pub memory_bytes_per_second: f64,
    /// Plans per hour that changed a placement, a partition or a time share.
    pub changes_per_hour: f64,
    /// Machine time that probes and page moves consumed.
    pub overhead_seconds: f64,
    /// Programs in the order given; the second copy of a name is `name 2`.
    pub programs: Vec<ProgramOutcome>,
    /// Figures over time.
    pub series: TimeSeries,
    /// Plans that changed something, in order of time.
    pub decisions: Vec<ReportedDecision>,
}

/// Outcome of one program under one policy.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProgramOutcome {
    /// Name of the program; the second copy of a name is `name 2`.
    pub name: String,
    /// Run time divided by the run time alone on a separate CPU and cache; `None` if no instruction was executed.
    pub slowdown: Option<f64>,
    /// The same ratio for time on CPU only, which reflects caches and memory but no waits for a CPU.
    pub slowdown_on_cpu: Option<f64>,
    /// Instructions per cycle on CPU; `None` if the program never ran.
    pub instr_per_cycle: Option<f64>,
    /// Misses of the contended cache per thousand instructions; `None` if no instruction was executed.
    pub mpki: Option<f64>,
}

/// Values over time, by program in the order of `programs`. Each value covers the interval that ends at its time.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct TimeSeries {
    /// End of each interval, from the start of the run.
    pub seconds: Vec<f64>,
    /// Slowdown by program and interval; `None` if the program did not run in it.
    pub slowdown: Vec<Vec<Option<f64>>>,
    /// Mean bytes that the program occupied in all contended caches, by program and interval; `None` if not observed.
    pub occupancy_bytes: Vec<Vec<Option<f64>>>,
    /// Contended cache on whose CPUs the program ran most, by program and interval.
    pub cache: Vec<Vec<Option<u32>>>,
    /// Utilization of memory, by memory node and interval.
    pub memory_busy_share: Vec<Vec<f64>>,
}

/// A plan that changed something.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ReportedDecision {
    /// Time of the decision, from the start of the run.
    pub seconds: f64,
    /// The plan's first reasons, with their programs.
    pub reason: String,
}
