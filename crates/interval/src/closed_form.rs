//! Programs in closed form: what theory speaks of, and the neighbors that probes bring.

use crate::program::{ProgramPhase, SizePoint};

/// Cycles of an instruction that misses nothing.
const BASE_CYCLES: f64 = 1.0;
/// Cycles that a miss waits, where nothing overlaps.
const WAIT_CYCLES: f64 = 100.0;

/// A phase with these fills per instruction by lines held, at `sizes` equal steps up to the capacity; misses do not
/// overlap and wait 100 cycles each, and it never ends.
pub fn phase_of(
    line_bytes: f64,
    capacity_lines: f64,
    sizes: u32,
    fills_per_instr: impl Fn(f64) -> f64,
) -> ProgramPhase {
    let point = |at: u32| {
        let lines = capacity_lines * f64::from(at) / f64::from(sizes);
        let fills = fills_per_instr(lines);
        SizePoint {
            size_bytes: lines * line_bytes,
            cycles_per_instr: BASE_CYCLES + WAIT_CYCLES * fills,
            demand_fills_per_instr: fills,
            prefetch_fills_per_instr: 0.0,
            writebacks_per_instr: 0.0,
            memory_stall_cycles_per_instr: WAIT_CYCLES * fills,
            without_prefetch: None,
        }
    };
    ProgramPhase {
        instructions: None,
        references_per_instr: fills_per_instr(0.0),
        points: (1..=sizes).map(point).collect(),
        footprint_bytes: None,
        private_levels: Vec::new(),
        sharing: Vec::new(),
        half_private_extra_cycles_per_instr: 0.0,
    }
}

/// Independent references to `lines` equally likely lines: with `s` of them there, a share `s / lines` hits.
pub fn uniform(line_bytes: f64, capacity_lines: f64, lines: f64, references_per_instr: f64) -> ProgramPhase {
    let fills = |held: f64| references_per_instr * (1.0 - held / lines).max(0.0);
    ProgramPhase {
        footprint_bytes: Some(lines * line_bytes),
        ..phase_of(line_bytes, capacity_lines, STEPS_OF_A_LINE, fills)
    }
}

/// A stream: nothing that it brings is used again.
pub fn stream(line_bytes: f64, capacity_lines: f64, lines_per_instr: f64) -> ProgramPhase {
    phase_of(line_bytes, capacity_lines, 1, |_| lines_per_instr)
}

/// Dependent loads that go round `lines` lines, one every other instruction.
pub fn chase(line_bytes: f64, capacity_lines: f64, lines: f64, latency_cycles: f64) -> ProgramPhase {
    let mut phase = uniform(line_bytes, capacity_lines, lines.max(1.0), 0.5);
    for point in &mut phase.points {
        point.memory_stall_cycles_per_instr = latency_cycles * point.demand_fills_per_instr;
        point.cycles_per_instr = BASE_CYCLES + point.memory_stall_cycles_per_instr;
    }
    phase
}

/// Points over the logarithm of the size must be dense for a line to stay one.
const STEPS_OF_A_LINE: u32 = 256;
