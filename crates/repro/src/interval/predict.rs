//! The interval machine's forecast of a co-run, from solo profiles.

use cachemate_core::MachineSpec;
use cachemate_interval::engine::{DEMAND, IntervalEngine, QUEUE_CYCLES, TaskTotals};

use super::draw::{CoRun, ProfiledProgram, ProgramRate};
use crate::Result;
use crate::setup::failed;

/// Predicted cycles between two readings of all programs' progress.
const PROGRESS_READING_CYCLES: f64 = 50_000.0;
/// A prediction is abandoned after this multiple of the slowest program's solo time.
const MAX_SOLO_TIME_MULTIPLE: f64 = 40.0;

/// The rates of each job over its work.
///
/// # Errors
/// The machine has no data cache, or the work is never finished.
pub fn predict_rates(
    machine: &MachineSpec,
    programs: &[ProfiledProgram],
    run: &CoRun,
) -> Result<Vec<ProgramRate>> {
    let prediction_error = || failed(&machine.name);
    let mut engine = IntervalEngine::new(machine, false)
        .ok_or_else(|| prediction_error()("no data cache to share"))?;
    let mut slots = Vec::new();
    for &(program, cpu) in &run.jobs {
        let program = engine.add_program(programs[program].profile.clone());
        slots.push(engine.start_task(program, [cpu].into_iter().collect()));
    }
    partition_by_ways(&mut engine, machine, run, &slots);
    let work_ranges: Vec<_> = run
        .jobs
        .iter()
        .map(|&(program, _)| programs[program].work)
        .collect();

    let solo_cycles = |&(program, _): &(usize, u32)| {
        programs[program].work.to_instr / programs[program].alone.instr_per_cycle
    };
    let max_cycles = run.jobs.iter().map(solo_cycles).fold(0.0, f64::max) * MAX_SOLO_TIME_MULTIPLE;
    let mut start_and_end_moments: Vec<(Option<JobMoment>, Option<JobMoment>)> =
        vec![(None, None); slots.len()];
    let mut earlier_totals = vec![TaskTotals::default(); slots.len()];

    let mut elapsed_cycles = 0.0;
    while start_and_end_moments.iter().any(|(_, end)| end.is_none()) && elapsed_cycles < max_cycles
    {
        engine.run(elapsed_cycles + PROGRESS_READING_CYCLES);
        for (index, &slot) in slots.iter().enumerate() {
            let current_totals = *engine.task_totals(slot);
            let moment_at = |instr: f64| {
                interpolate_moment(
                    elapsed_cycles,
                    &earlier_totals[index],
                    &current_totals,
                    instr,
                )
            };
            start_and_end_moments[index].0 = start_and_end_moments[index]
                .0
                .or_else(|| moment_at(work_ranges[index].from_instr));
            start_and_end_moments[index].1 = start_and_end_moments[index]
                .1
                .or_else(|| moment_at(work_ranges[index].to_instr));
            earlier_totals[index] = current_totals;
        }
        elapsed_cycles += PROGRESS_READING_CYCLES;
    }

    let rate_of_job = |(work, moments): (
        &crate::work::InstructionRange,
        &(Option<JobMoment>, Option<JobMoment>),
    )| {
        let (start_moment, end_moment) = moments.0.zip(moments.1)?;
        let instructions = work.to_instr - work.from_instr;
        Some(ProgramRate {
            instr_per_cycle: instructions / (end_moment.cycle - start_moment.cycle),
            misses_per_instr: (end_moment.misses - start_moment.misses) / instructions,
            queue_cycles_per_instr: (end_moment.queue_cycles - start_moment.queue_cycles)
                / instructions,
        })
    };
    let program_rates: Option<Vec<ProgramRate>> = work_ranges
        .iter()
        .zip(&start_and_end_moments)
        .map(rate_of_job)
        .collect();
    program_rates.ok_or_else(|| prediction_error()("a predicted program never did its work"))
}

/// A job's totals at the moment when it has executed a given instruction.
#[derive(Clone, Copy, PartialEq, Debug)]
struct JobMoment {
    cycle: f64,
    misses: f64,
    queue_cycles: f64,
}

/// The moment between two readings, interpolated linearly; `None` if it was reached earlier, or is
/// not reached yet.
fn interpolate_moment(
    now_cycle: f64,
    before: &TaskTotals,
    after: &TaskTotals,
    instr: f64,
) -> Option<JobMoment> {
    let executed_instr = after.instructions - before.instructions;
    if instr > after.instructions || executed_instr <= 0.0 {
        return None;
    }
    let share = ((instr - before.instructions) / executed_instr).max(0.0);
    let interpolate =
        |count: usize| before.counts[count] + share * (after.counts[count] - before.counts[count]);
    Some(JobMoment {
        cycle: now_cycle + PROGRESS_READING_CYCLES * share,
        misses: interpolate(DEMAND),
        queue_cycles: interpolate(QUEUE_CYCLES),
    })
}

fn partition_by_ways(
    engine: &mut IntervalEngine,
    machine: &MachineSpec,
    run: &CoRun,
    slots: &[u32],
) {
    if run.ways.is_empty() {
        return;
    }

    let total_ways = machine.last_level_cache().map_or(1, |cache| cache.ways) as f32;
    let lines = |ways: &u32| engine.capacity_lines() * *ways as f32 / total_ways;
    let partition_lines: Vec<f32> = run.ways.iter().map(lines).collect();
    let domains: Vec<(f32, u8)> = partition_lines
        .iter()
        .enumerate()
        .map(|(index, &part)| (part, index as u8))
        .collect();
    let members = slots
        .iter()
        .enumerate()
        .map(|(index, &slot)| (slot, index as u8))
        .collect();
    engine.divide(0, &domains, &partition_lines, members);
}
