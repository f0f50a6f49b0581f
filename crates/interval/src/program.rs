//! Programs as sequences of phases, each described by its solo rates at several cache sizes.
//!
//! A profile is measured in a solo run, recorded, or written manually. Rates are per instruction; sizes and lines are
//! those of the contended cache. No figure in a profile depends on co-runners.

use cachemate_core::{CacheLevel, FieldError};
use serde::{Deserialize, Serialize};

/// Solo rates of a phase with a given share of the contended cache.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizePoint {
    /// Size of the contended cache, in bytes.
    pub size_bytes: f64,
    /// Cycles per instruction, including waits.
    pub cycles_per_instr: f64,
    /// Lines that demand accesses bring into the contended cache.
    pub demand_fills_per_instr: f64,
    /// Lines that prefetchers bring into the contended cache, used or not.
    #[serde(default)]
    pub prefetch_fills_per_instr: f64,
    /// Lines written back to memory, per instruction.
    #[serde(default)]
    pub writebacks_per_instr: f64,
    /// Cycles spent waiting for memory; overlapped misses count once.
    pub memory_stall_cycles_per_instr: f64,
    /// The same rates with all prefetchers off, if measured. They are the limit when memory drops all prefetches.
    pub without_prefetch: Option<UnprefetchedRates>,
}

/// Rates of a phase with prefetchers off.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnprefetchedRates {
    /// Cycles per instruction, including waits.
    pub cycles_per_instr: f64,
    /// Lines that demand accesses bring in; without prefetchers there are no other fills.
    pub demand_fills_per_instr: f64,
    /// Lines written back to memory.
    pub writebacks_per_instr: f64,
    /// Cycles spent waiting for memory; overlapped misses count once.
    pub memory_stall_cycles_per_instr: f64,
}

/// Rates of a private cache level, for counters and traces.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrivateLevel {
    /// The level.
    pub level: CacheLevel,
    /// Demand references of this level.
    pub references_per_instr: f64,
    /// Demand misses of this level.
    pub misses_per_instr: f64,
}

/// A program's use of a memory region that several tasks share.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionUse {
    /// Number of the region; tasks with the same number share the region.
    pub region: u32,
    /// Size of the region.
    pub bytes: f64,
    /// Reads that miss the private caches, or would miss if no other task had the line.
    pub reads_per_instr: f64,
    /// Writes, counted in the same way as reads.
    pub writes_per_instr: f64,
}

/// A stretch of a program with steady rates.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramPhase {
    /// Length of the phase; `None` if the phase never ends.
    pub instructions: Option<f64>,
    /// Demand references of the contended cache.
    pub references_per_instr: f64,
    /// Rates by size, in ascending order; at least one.
    pub points: Vec<SizePoint>,
    /// Total memory that the phase touches; `None` if it exceeds any cache.
    pub footprint_bytes: Option<f64>,
    /// The levels between the core and the contended cache, used only for counters.
    #[serde(default)]
    pub private_levels: Vec<PrivateLevel>,
    /// Memory regions that the phase shares with other tasks.
    #[serde(default)]
    pub sharing: Vec<RegionUse>,
    /// Extra cycles per instruction if another context of the core halves its private caches.
    #[serde(default)]
    pub half_private_extra_cycles_per_instr: f64,
}

/// A program's demand for a CPU.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Demand {
    /// Share of one CPU's time that the program would use if alone there.
    pub cpu_share: f64,
    /// Length of one period of running and sleeping (explicit turns only).
    pub period_ns: u64,
}

impl Default for Demand {
    fn default() -> Self {
        Demand {
            cpu_share: 1.0,
            period_ns: 20_000_000,
        }
    }
}

/// The program of one thread.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhasedProgram {
    /// Name for messages and results.
    pub name: String,
    /// Its phases in order, one or more.
    pub phases: Vec<ProgramPhase>,
    /// Index of the phase that follows the last one; `None` if the program ends.
    pub repeats_from: Option<u32>,
    /// The program's demand for a CPU.
    #[serde(default)]
    pub demand: Demand,
    /// Units of work per instruction, if the program counts any.
    pub progress_per_instr: Option<f64>,
    /// Whether the first phases were measured from an empty cache, so that their misses include first touches at any
    /// occupancy.
    #[serde(default)]
    pub from_empty_cache: bool,
}

impl PhasedProgram {
    /// A program of one phase, which never ends.
    pub fn endless_program(name: impl Into<String>, phase: ProgramPhase) -> Self {
        PhasedProgram {
            name: name.into(),
            phases: vec![ProgramPhase {
                instructions: None,
                ..phase
            }],
            repeats_from: None,
            demand: Demand::default(),
            progress_per_instr: None,
            from_empty_cache: false,
        }
    }

    /// Checks that the program can run.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn check(&self) -> Result<(), FieldError> {
        let refuse_field = |field: String, found: String, expected: &str| {
            Err(FieldError::new(
                format!("program '{}', {field}", self.name),
                found,
                expected,
            ))
        };
        if self.phases.is_empty() {
            return refuse_field("phases".to_string(), "none".to_string(), "one or more");
        }

        if self
            .repeats_from
            .is_some_and(|at| at as usize >= self.phases.len())
        {
            let found = self.repeats_from.map_or(String::new(), |at| at.to_string());
            return refuse_field(
                "repeats_from".to_string(),
                found,
                "the number of a phase, from 0",
            );
        }
        let share = self.demand.cpu_share;
        if !(share > 0.0 && share <= 1.0) {
            return refuse_field(
                "demand.cpu_share".to_string(),
                share.to_string(),
                "more than 0, at most 1",
            );
        }
        if self.demand.period_ns == 0 {
            return refuse_field("demand.period_ns".to_string(), "0".to_string(), "1 or more");
        }
        for (at, phase) in self.phases.iter().enumerate() {
            phase.check(&|field, found, expected| {
                refuse_field(format!("phases[{at}].{field}"), found, expected)
            })?;
        }
        Ok(())
    }
}

type FieldRefusal<'a> = &'a dyn Fn(&str, String, &str) -> Result<(), FieldError>;

impl ProgramPhase {
    fn check(&self, refuse: FieldRefusal<'_>) -> Result<(), FieldError> {
        if let Some(length) = self
            .instructions
            .filter(|length| !(length.is_finite() && *length >= 1.0))
        {
            refuse("instructions", length.to_string(), "1 or more")?;
        }

        if self.points.is_empty() {
            refuse("points", "none".to_string(), "one size or more")?;
        }

        if !self.points.is_sorted_by(|a, b| a.size_bytes < b.size_bytes) {
            refuse(
                "points",
                "sizes out of order".to_string(),
                "ascending sizes, each once",
            )?;
        }

        let is_valid_number = |value: f64| value.is_finite() && value >= 0.0;
        let rates = [
            ("references_per_instr", self.references_per_instr),
            (
                "half_private_extra_cycles_per_instr",
                self.half_private_extra_cycles_per_instr,
            ),
        ];
        for (field, value) in rates {
            if !is_valid_number(value) {
                refuse(field, value.to_string(), "a number, 0 or more")?;
            }
        }

        for (index, point) in self.points.iter().enumerate() {
            let rates = [
                ("size_bytes", point.size_bytes, point.size_bytes > 0.0),
                (
                    "cycles_per_instr",
                    point.cycles_per_instr,
                    point.cycles_per_instr > 0.0,
                ),
                ("demand_fills_per_instr", point.demand_fills_per_instr, true),
                (
                    "prefetch_fills_per_instr",
                    point.prefetch_fills_per_instr,
                    true,
                ),
                ("writebacks_per_instr", point.writebacks_per_instr, true),
                (
                    "memory_stall_cycles_per_instr",
                    point.memory_stall_cycles_per_instr,
                    true,
                ),
            ];

            for (field, value, is_valid) in rates {
                if !(is_valid_number(value) && is_valid) {
                    refuse(
                        &format!("points[{index}].{field}"),
                        value.to_string(),
                        "a usable number",
                    )?;
                }
            }
        }

        Ok(())
    }
}
