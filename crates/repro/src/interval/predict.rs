//! The interval machine's forecast of a co-run, from solo profiles.

use cachemate_core::MachineSpec;
use cachemate_interval::engine::{DEMAND, IntervalEngine, QUEUE_CYCLES, TaskTotals};

use super::draw::{CoRun, ProfiledProgram, ProgramRate};
use crate::ReproError;
use crate::setup::failed;

/// Predicted cycles between two readings of all programs' progress.
const LOOK_CYCLES: f64 = 50_000.0;
/// A prediction is abandoned after this multiple of the slowest program's solo time.
const GIVES_UP_AFTER_TIMES: f64 = 40.0;

/// Rates of each job over its work.
///
/// # Errors
/// The machine has no data cache, or the work is never finished.
pub fn predict_rates(
    machine: &MachineSpec,
    programs: &[ProfiledProgram],
    run: &CoRun,
) -> Result<Vec<ProgramRate>, ReproError> {
    let prediction_error = || failed(&machine.name);
    let mut engine = IntervalEngine::new(machine, false).ok_or_else(|| prediction_error()("no data cache to share"))?;
    let mut slots = Vec::new();
    for &(program, cpu) in &run.jobs {
        let program = engine.add_program(programs[program].profile.clone());
        slots.push(engine.start(program, [cpu].into_iter().collect()));
    }
    divide(&mut engine, machine, run, &slots);
    let works: Vec<_> = run.jobs.iter().map(|&(program, _)| programs[program].work).collect();
    let alone =
        |&(program, _): &(usize, u32)| programs[program].work.to_instr / programs[program].alone.instr_per_cycle;
    let longest = run.jobs.iter().map(alone).fold(0.0, f64::max) * GIVES_UP_AFTER_TIMES;
    let mut moments: Vec<(Option<JobMoment>, Option<JobMoment>)> = vec![(None, None); slots.len()];
    let mut earlier_totals = vec![TaskTotals::default(); slots.len()];
    let mut now = 0.0;
    while moments.iter().any(|(_, end)| end.is_none()) && now < longest {
        engine.run(now + LOOK_CYCLES);
        for (index, &slot) in slots.iter().enumerate() {
            let after = *engine.task_totals(slot);
            let moment_at = |instr: f64| interpolate_moment(now, &earlier_totals[index], &after, instr);
            moments[index].0 = moments[index].0.or_else(|| moment_at(works[index].from_instr));
            moments[index].1 = moments[index].1.or_else(|| moment_at(works[index].to_instr));
            earlier_totals[index] = after;
        }
        now += LOOK_CYCLES;
    }
    let rate = |(work, moments): (&crate::work::InstructionRange, &(Option<JobMoment>, Option<JobMoment>))| {
        let (start, end) = moments.0.zip(moments.1)?;
        let instructions = work.to_instr - work.from_instr;
        Some(ProgramRate {
            instr_per_cycle: instructions / (end.cycle - start.cycle),
            misses_per_instr: (end.misses - start.misses) / instructions,
            queue_cycles_per_instr: (end.queue_cycles - start.queue_cycles) / instructions,
        })
    };
    let program_rates: Option<Vec<ProgramRate>> = works.iter().zip(&moments).map(rate).collect();
    program_rates.ok_or_else(|| prediction_error()("a predicted program never did its work"))
}

/// A job's totals at the moment when it has executed a given instruction.
#[derive(Clone, Copy, PartialEq, Debug)]
struct JobMoment {
    cycle: f64,
    misses: f64,
    queue_cycles: f64,
}

/// The moment between two readings, interpolated linearly; `None` = not reached yet, or earlier.
fn interpolate_moment(now_cycle: f64, before: &TaskTotals, after: &TaskTotals, instr: f64) -> Option<JobMoment> {
    let instr_done = after.instructions - before.instructions;
    if instr > after.instructions || instr_done <= 0.0 {
        return None;
    }
    let share = ((instr - before.instructions) / instr_done).max(0.0);
    let interpolate = |count: usize| before.counts[count] + share * (after.counts[count] - before.counts[count]);
    Some(JobMoment {
        cycle: now_cycle + LOOK_CYCLES * share,
        misses: interpolate(DEMAND),
        queue_cycles: interpolate(QUEUE_CYCLES),
    })
}

fn divide(engine: &mut IntervalEngine, machine: &MachineSpec, run: &CoRun, slots: &[u32]) {
    if run.ways.is_empty() {
        return;
    }
    let total_ways = machine.last_level().map_or(1, |cache| cache.ways) as f32;
    let lines = |ways: &u32| engine.capacity_lines() * *ways as f32 / total_ways;
    let parts: Vec<f32> = run.ways.iter().map(lines).collect();
    let domains: Vec<(f32, u8)> = parts.iter().enumerate().map(|(index, &part)| (part, index as u8)).collect();
    let members = slots.iter().enumerate().map(|(index, &slot)| (slot, index as u8)).collect();
    engine.divide(0, &domains, &parts, members);
}
