//! The speed of the interval machine, for a host with 64 CPUs, 8 caches and 200 tasks with phases.

use std::time::Instant;

use cachemate_core::SplitMix64;
use cachemate_interval::engine::IntervalEngine;
use cachemate_interval::{Demand, PhasedProgram, ProgramPhase, SizePoint};

use crate::Result;
use crate::setup::{failed, load_machine};

/// Number of tasks.
pub const TASK_COUNT: u32 = 200;

/// The nominal seconds per second of one core of this host, for `nominal_seconds` after a short
/// start, with a new phase for each task about every `phase_seconds`.
pub fn times_real_time(is_explicit: bool, phase_seconds: f64, nominal_seconds: f64) -> Result<f64> {
    let mut engine = start_host(is_explicit, phase_seconds)?;
    let hertz = engine.hertz;
    engine.run(2.0 * hertz);
    let start_clocks = (cpu_seconds(), Instant::now());
    engine.run((2.0 + nominal_seconds) * hertz);
    let wall_seconds = start_clocks.1.elapsed().as_secs_f64();
    let used_seconds = start_clocks
        .0
        .zip(cpu_seconds())
        .map_or(wall_seconds, |(start, now)| now - start);
    Ok(nominal_seconds / used_seconds)
}

/// The processor time of this thread, which is independent of other load. `None` if the host does
/// not report it.
pub fn cpu_seconds() -> Option<f64> {
    let text = cachemate_files::read_text_limited(
        std::path::Path::new("/proc/thread-self/schedstat"),
        4096,
    )
    .ok()?;
    let ns: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(ns / 1e9)
}

/// One package of `epyc-7763` with all tasks placed; time slices are explicit, or averaged over a rotation.
pub fn start_host(is_explicit: bool, phase_seconds: f64) -> Result<IntervalEngine> {
    let mut machine = load_machine("epyc-7763")?;
    machine.contexts_per_core = 1;
    machine.packages = 1;
    let mut engine = IntervalEngine::new(&machine, is_explicit)
        .ok_or_else(|| failed("epyc-7763")("no data cache to share"))?;
    let cache_lines = f64::from(engine.capacity_lines());
    let mut generator = SplitMix64::new(1);
    let mut draw_unit = || generator.draw_below(1 << 20) as f64 / f64::from(1u32 << 20);
    for task in 0..TASK_COUNT {
        let phases = (0..4)
            .map(|_| draw_phase(cache_lines, engine.hertz, phase_seconds, &mut draw_unit))
            .collect();
        let program = PhasedProgram {
            name: format!("task-{task}"),
            phases,
            repeats_from: Some(0),
            demand: Demand::default(),
            progress_per_instr: None,
            from_empty_cache: false,
        };
        let program = engine.add_program(program);
        engine.start_task(program, (0..64).collect());
    }

    Ok(engine)
}

/// A phase whose fills fall to a floor at the size of its working set.
fn draw_phase(
    cache_lines: f64,
    hertz: f64,
    mean_seconds: f64,
    draw_unit: &mut impl FnMut() -> f64,
) -> ProgramPhase {
    let (working_set, max_fills, min_fills) = (
        cache_lines * (0.02 + 0.6 * draw_unit()),
        0.001 + 0.01 * draw_unit(),
        0.0002 * draw_unit(),
    );
    let point = |share: f64| {
        let fills = min_fills + max_fills * (1.0 - share * cache_lines / working_set).max(0.0);
        SizePoint {
            size_bytes: share * cache_lines * 64.0,
            cycles_per_instr: 0.7 + 90.0 * fills,
            demand_fills_per_instr: 0.7 * fills,
            prefetch_fills_per_instr: 0.3 * fills,
            writebacks_per_instr: 0.2 * fills,
            memory_stall_cycles_per_instr: 90.0 * fills,
            without_prefetch: None,
        }
    };
    // About a third of a CPU, the share of each of 200 tasks on 64 CPUs.
    let instructions = hertz * mean_seconds * (0.5 + draw_unit()) / 3.0;
    ProgramPhase {
        instructions: Some(instructions),
        references_per_instr: 0.02,
        points: [1.0 / 16.0, 0.125, 0.25, 0.5, 1.0]
            .into_iter()
            .map(point)
            .collect(),
        footprint_bytes: None,
        private_levels: Vec::new(),
        sharing: Vec::new(),
        half_private_extra_cycles_per_instr: 0.0,
    }
}
