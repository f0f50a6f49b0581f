//! What the interval machine says of a co-run, from profiles taken alone.

use cachemate_core::MachineSpec;
use cachemate_interval::engine::Engine;

use super::draw::{Profiled, Run};
use crate::ReproError;
use crate::setup::failed;

/// Predicted cycles between two looks at how far everybody is.
const LOOK_CYCLES: f64 = 50_000.0;
/// A prediction is given up after so many times the slowest program's time alone.
const GIVES_UP_AFTER_TIMES: f64 = 40.0;

/// Instructions per cycle of each job over its work.
///
/// # Errors
/// A machine without a data cache, or work that is never done.
pub fn speeds(machine: &MachineSpec, programs: &[Profiled], run: &Run) -> Result<Vec<f64>, ReproError> {
    let what = || failed(&machine.name);
    let mut engine = Engine::new(machine, false).ok_or_else(|| what()("no data cache to share"))?;
    let mut slots = Vec::new();
    for &(program, cpu) in &run.jobs {
        let program = engine.add_program(programs[program].profile.clone());
        slots.push(engine.start(program, [cpu].into_iter().collect()));
    }
    divide(&mut engine, machine, run, &slots);
    let works: Vec<_> = run.jobs.iter().map(|&(program, _)| programs[program].work).collect();
    let alone =
        |&(program, _): &(usize, u32)| programs[program].work.to_instr / programs[program].alone_instr_per_cycle;
    let longest = run.jobs.iter().map(alone).fold(0.0, f64::max) * GIVES_UP_AFTER_TIMES;
    let mut moments = vec![(None, None); slots.len()];
    let mut before = vec![0.0; slots.len()];
    let mut now = 0.0;
    while moments.iter().any(|(_, end): &(Option<f64>, Option<f64>)| end.is_none()) && now < longest {
        engine.run(now + LOOK_CYCLES);
        for (at, &slot) in slots.iter().enumerate() {
            let after = engine.done(slot).instructions;
            let when = |instr: f64| {
                (instr <= after && after > before[at])
                    .then(|| now + LOOK_CYCLES * ((instr - before[at]) / (after - before[at])).max(0.0))
            };
            moments[at].0 = moments[at].0.or_else(|| when(works[at].from_instr));
            moments[at].1 = moments[at].1.or_else(|| when(works[at].to_instr));
            before[at] = after;
        }
        now += LOOK_CYCLES;
    }
    let speed = |(work, moments): (&crate::work::Work, &(Option<f64>, Option<f64>))| {
        let (from, to) = moments.0.zip(moments.1)?;
        Some((work.to_instr - work.from_instr) / (to - from))
    };
    let found: Option<Vec<f64>> = works.iter().zip(&moments).map(speed).collect();
    found.ok_or_else(|| what()("a predicted program never did its work"))
}

fn divide(engine: &mut Engine, machine: &MachineSpec, run: &Run, slots: &[u32]) {
    if run.ways.is_empty() {
        return;
    }
    let all = machine.last_level().map_or(1, |cache| cache.ways) as f32;
    let lines = |ways: &u32| engine.capacity_lines() * *ways as f32 / all;
    let parts: Vec<f32> = run.ways.iter().map(lines).collect();
    let domains: Vec<(f32, u8)> = parts.iter().enumerate().map(|(at, &part)| (part, at as u8)).collect();
    let of = slots.iter().enumerate().map(|(at, &slot)| (slot, at as u8)).collect();
    engine.divide(0, &domains, &parts, of);
}
