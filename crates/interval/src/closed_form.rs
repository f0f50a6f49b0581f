//! Programs whose behavior is known in closed form, for tests and as neighbors in probes.

use cachemate_core::MachineSpec;

use crate::IntervalJob;
use crate::program::{PhasedProgram, ProgramPhase, SizePoint};

/// Cycles of an instruction that does not miss.
const BASE_CYCLES: f64 = 1.0;
/// Cycles for which a miss stalls if no other miss overlaps it.
const MISS_STALL_CYCLES: f64 = 100.0;

/// An endless phase, tabulated at `size_count` equal steps of resident lines up to the capacity.
/// Misses do not overlap, and each stalls for 100 cycles.
pub fn build_phase(
    line_bytes: f64,
    capacity_lines: f64,
    size_count: u32,
    fills_per_instr: impl Fn(f64) -> f64,
) -> ProgramPhase {
    let curve_point = |step: u32| {
        let lines = capacity_lines * f64::from(step) / f64::from(size_count);
        let fills = fills_per_instr(lines);
        SizePoint {
            size_bytes: lines * line_bytes,
            cycles_per_instr: BASE_CYCLES + MISS_STALL_CYCLES * fills,
            demand_fills_per_instr: fills,
            prefetch_fills_per_instr: 0.0,
            writebacks_per_instr: 0.0,
            memory_stall_cycles_per_instr: MISS_STALL_CYCLES * fills,
            without_prefetch: None,
        }
    };

    ProgramPhase {
        instructions: None,
        references_per_instr: fills_per_instr(0.0),
        points: (1..=size_count).map(curve_point).collect(),
        footprint_bytes: None,
        private_levels: Vec::new(),
        sharing: Vec::new(),
        half_private_extra_cycles_per_instr: 0.0,
    }
}

/// Independent references to `lines` equally likely lines: with `s` resident lines, a share `s /
/// lines` of the references hits.
pub fn uniform_phase(
    line_bytes: f64,
    capacity_lines: f64,
    lines: f64,
    references_per_instr: f64,
) -> ProgramPhase {
    let fills =
        |resident_lines: f64| references_per_instr * (1.0 - resident_lines / lines).max(0.0);
    ProgramPhase {
        footprint_bytes: Some(lines * line_bytes),
        ..build_phase(line_bytes, capacity_lines, STRAIGHT_LINE_STEPS, fills)
    }
}

/// Reuses no line that it brings in.
pub fn stream_phase(line_bytes: f64, capacity_lines: f64, lines_per_instr: f64) -> ProgramPhase {
    build_phase(line_bytes, capacity_lines, 1, |_| lines_per_instr)
}

/// Size in lines; 0 without a cache.
pub fn cache_lines(machine: &MachineSpec) -> f64 {
    machine.last_level_cache().map_or(0.0, |cache| {
        cache.size_bytes as f64 / f64::from(cache.line_bytes)
    })
}

/// An endless program that reads at random in a working set of this share of the contended cache.
pub fn reusing_job(
    name: &str,
    machine: &MachineSpec,
    share: f64,
    references_per_instr: f64,
) -> IntervalJob {
    let lines = cache_lines(machine);
    let phase = uniform_phase(64.0, lines, share * lines, references_per_instr);
    IntervalJob::new(PhasedProgram::endless_program(name, phase))
}

/// An endless program that reuses nothing.
pub fn streaming_job(machine: &MachineSpec, references_per_instr: f64) -> IntervalJob {
    let phase = stream_phase(64.0, cache_lines(machine), references_per_instr);
    IntervalJob::new(PhasedProgram::endless_program("stream", phase))
}

/// Number of steps for a straight line. Points are interpolated over the logarithm of the size, so a straight line
/// stays straight only if its points are dense.
const STRAIGHT_LINE_STEPS: u32 = 256;
