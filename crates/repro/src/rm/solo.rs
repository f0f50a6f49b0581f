//! One program alone on one chip with a given number of colors: its misses over time, and traces of it.
//!
//! Positions in a run are counted in instructions of the program, which are the same for any number of colors, because
//! the program's stream does not depend on time.

use cachemate_core::{
    CacheId, CacheLevel, CacheShare, CounterEvent, CounterScope, GroupId, Machine, Observation,
    PageMigration, Plan, ProbeEvidence, ProbeId, ProbeKind, ProbeRequest, ProcessId, ShareMember,
    TaskId, Units, WindowLength,
};
use cachemate_sim::machine::SimMachine;
use serde::{Deserialize, Serialize};

use crate::setup::{Workload, failed};
use crate::statistics::interpolate_at;
use crate::{ReproError, Result};

/// The thesis's machine (Table 5.3), with the cores of chapter 4 (`cp`).
pub const MACHINE: &str = "power5-2x2x2?pipeline.issue_width=1&pipeline.window=20";
/// Its number of page colors, which are the points of every curve.
pub const COLORS: u32 = 16;

/// Instructions and misses of the L2, summed since the program started.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct MissTotals {
    pub instructions: f64,
    pub misses: f64,
    /// Misses of the first-level data cache.
    pub first_level_misses: f64,
    pub instruction_misses: f64,
    /// References to the L2: first-level misses and stores that write through.
    pub references: f64,
}

/// Totals at the end of every window, beginning with 0.
#[derive(Clone, PartialEq, Debug)]
pub struct MissTimeline(pub Vec<MissTotals>);

impl MissTimeline {
    /// A total after this many instructions, interpolated linearly between windows; `None` beyond
    /// the end.
    fn interpolate_total(&self, instructions: f64, value: fn(&MissTotals) -> f64) -> Option<f64> {
        interpolate_at(&self.0, instructions, |sums| sums.instructions, value)
    }

    fn rate_per_kilo_instr(
        &self,
        from_instr: f64,
        to_instr: f64,
        value: fn(&MissTotals) -> f64,
    ) -> Option<f64> {
        Some(
            1000.0
                * (self.interpolate_total(to_instr, value)?
                    - self.interpolate_total(from_instr, value)?)
                / (to_instr - from_instr),
        )
    }

    /// The misses per thousand instructions in a stretch of the run; `None` if the run ended
    /// earlier.
    pub fn misses_per_kilo_instr(&self, from_instr: f64, to_instr: f64) -> Option<f64> {
        self.rate_per_kilo_instr(from_instr, to_instr, |sums| sums.misses)
    }

    /// Rates per thousand instructions that no allocation of the L2 changes: misses of the first-level caches,
    /// references of the L2.
    pub fn first_level_per_kilo_instr(&self, from_instr: f64, to_instr: f64) -> Option<[f64; 3]> {
        let mean_rate = |value| self.rate_per_kilo_instr(from_instr, to_instr, value);
        Some([
            mean_rate(|sums| sums.first_level_misses)?,
            mean_rate(|sums| sums.instruction_misses)?,
            mean_rate(|sums| sums.references)?,
        ])
    }

    pub fn last_totals(&self) -> MissTotals {
        self.0.last().copied().unwrap_or_default()
    }
}

/// A running program alone on its machine.
pub struct SoloMachine {
    machine: SimMachine,
    plan: Plan,
    pub timeline: MissTimeline,
}

impl SoloMachine {
    /// The program of the workload at its start, on the first CPU, with the first `colors` colors.
    pub fn start(workload: &Workload, colors: u32, window_cycles: u64) -> Result<Self> {
        Self::from_machine(workload.build_machine()?, colors, window_cycles)
    }

    /// Starts a machine with one task.
    pub fn from_machine(mut machine: SimMachine, colors: u32, window_cycles: u64) -> Result<Self> {
        let mut plan = Plan::idle(WindowLength::Cycles {
            cycles: window_cycles,
        });
        plan.affinity.insert(TaskId(0), [0].into_iter().collect());
        plan.shares = vec![color_share(&machine, colors)];
        machine.apply(&plan).map_err(failed("colors"))?;
        machine.set_first_window(plan.window);
        let timeline = MissTimeline(vec![MissTotals::default()]);
        Ok(SoloMachine {
            machine,
            plan,
            timeline,
        })
    }

    pub fn run_window(&mut self) -> Result<Observation> {
        let observation = self.machine.observe().map_err(failed("window"))?;
        let observation = observation
            .ok_or_else(|| ReproError::Failed("window".into(), "the program ended".into()))?;
        let mut sums = self.timeline.last_totals();
        for (scope, counts) in &observation.shared_counts {
            match scope {
                CounterScope::Cpu(_) => {
                    sums.instructions += counts.get(CounterEvent::Instructions).unwrap_or(0.0)
                }
                CounterScope::Cache(_) => {
                    sums.misses += counts
                        .get(CounterEvent::Misses(CacheLevel::L2))
                        .unwrap_or(0.0);
                    sums.references += counts
                        .get(CounterEvent::References(CacheLevel::L2))
                        .unwrap_or(0.0);
                    sums.first_level_misses += counts
                        .get(CounterEvent::Misses(CacheLevel::L1Data))
                        .unwrap_or(0.0);
                    sums.instruction_misses += counts
                        .get(CounterEvent::Misses(CacheLevel::L1Instruction))
                        .unwrap_or(0.0);
                }
                _ => {}
            }
        }

        self.timeline.0.push(sums);
        Ok(observation)
    }

    /// Runs until the program has executed at least this many instructions since its start.
    pub fn run_to_instruction(&mut self, instructions: f64) -> Result<()> {
        while self.timeline.last_totals().instructions < instructions {
            self.run_window()?;
        }
        Ok(())
    }

    /// Logs this many first-level misses from now on; returns the log with the positions of its start and end.
    pub fn trace_misses(&mut self, entries: u32) -> Result<TraceCapture> {
        let from_instr = self.timeline.last_totals().instructions;
        let probe_kind = ProbeKind::MissTrace {
            task: TaskId(0),
            entries,
            includes_code: false,
        };
        self.plan.probes = vec![ProbeRequest {
            id: ProbeId(0),
            kind: probe_kind,
            budget_ns: u64::MAX,
        }];
        self.machine.apply(&self.plan).map_err(failed("trace"))?;

        loop {
            let mut observation = self.run_window()?;
            if let Some(probe_result) = observation.probe_results.pop() {
                self.plan.probes.clear();
                self.machine
                    .apply(&self.plan)
                    .map_err(failed("end of trace"))?;
                let cost_ns = probe_result.cost_ns.iter().map(|(_, ns)| *ns as f64).sum();
                observation.probe_results = vec![probe_result];
                return Ok(TraceCapture {
                    seen: observation,
                    from: from_instr,
                    to: self.timeline.last_totals().instructions,
                    cost_ns,
                });
            }
        }
    }
}

/// A trace as profilers receive it, and its position in the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TraceCapture {
    pub seen: Observation,
    /// Instructions of the program before the first and after the last entry.
    pub from: f64,
    pub to: f64,
    pub cost_ns: f64,
}

impl TraceCapture {
    /// The log, if there is one.
    pub fn evidence(&self) -> Option<&ProbeEvidence> {
        self.seen
            .probe_results
            .first()
            .map(|probe_result| &probe_result.evidence)
    }

    pub fn entry_count(&self) -> usize {
        if let Some(ProbeEvidence::Trace { lines, .. }) = self.evidence() {
            lines.len()
        } else {
            0
        }
    }

    /// The number of entries per instruction of the program.
    pub fn entries_per_instr(&self) -> f64 {
        self.entry_count() as f64 / (self.to - self.from).max(1.0)
    }
}

fn color_share(machine: &SimMachine, colors: u32) -> CacheShare {
    let last_level_cache = machine
        .topology()
        .last_level_caches()
        .next()
        .map_or(CacheId(0), |cache| cache.id);
    CacheShare {
        group: GroupId(0),
        members: vec![ShareMember::Process(ProcessId(0))],
        cache: last_level_cache,
        units: Units::Colors {
            allowed: (0..colors).collect(),
            migration: PageMigration::All,
        },
    }
}
