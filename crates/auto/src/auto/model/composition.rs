//! Composition of tasks on one cache: the occupancy and the speed of each.
//!
//! Under LRU, a cache holds the lines that were touched after a certain moment, which is the same for all tasks (equal
//! window; Xiang et al., ASPLOS 2013). Each task holds its footprint over its own progress since then. Progress depends
//! on speed, and speed on occupancy, so both are solved together, with damping. If gangs take turns, each has the cache
//! to itself, but first fetches again what the others displaced. Properties: a task that is alone holds all lines that
//! it touches; occupancies never add up to more than the cache.

use super::program_model::ProgramModel;

/// A task that uses the cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheOccupant<'a> {
    pub program: &'a ProgramModel,
    /// Share of the CPU's time that the task gets while its gang has the turn.
    pub cpu_share: f64,
    /// Share of the task's partners that are on other caches.
    pub split_share: f64,
    /// Additional cycles that every miss waits, relative to a miss to the nearest memory in the measured queue.
    pub wait_cycles: f64,
    /// Share of the task's lines that fall into this partition: 1, except for tasks that may use every partition.
    pub partition_share: f64,
}

/// Performance of a task while it runs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TaskPerformance {
    pub cycles_per_instr: f64,
    pub misses_per_instr: f64,
    /// Mean occupancy, as computed by the composition.
    pub occupancy_bytes: f64,
}

impl TaskPerformance {
    /// The initial value, to which the performance in each partition is added.
    pub const NONE: TaskPerformance = TaskPerformance {
        cycles_per_instr: 0.0,
        misses_per_instr: 0.0,
        occupancy_bytes: 0.0,
    };

    /// Adds the performance in another partition, into which this share of the task's lines falls.
    pub fn add(&mut self, addend: TaskPerformance, line_share: f64) {
        self.cycles_per_instr += line_share * addend.cycles_per_instr;
        self.misses_per_instr += line_share * addend.misses_per_instr;
        self.occupancy_bytes += addend.occupancy_bytes;
    }
}

/// Largest number of damped rounds. Each at best halves the distance between the assumed and the composed speeds, so
/// after six a few percent of a co-runner's loss are left; curves are known no better.
const CO_RUN_ROUNDS: usize = 6;
/// Performances have converged if they change by less than this: curves are known to a few percent only.
const CONVERGENCE_TOLERANCE: f64 = 1e-5;
/// Occupancies add up to the cache within this share of it.
const OCCUPANCY_TOLERANCE: f64 = 1e-6;
/// Largest length of a window.
const MAX_WINDOW_CYCLES: f64 = 1e14;
/// Largest number of steps of a root search; a handful is usual.
const MAX_STEPS: usize = 48;

/// The performance of tasks that run together.
pub fn compose(occupants: &[CacheOccupant<'_>], cache_bytes: f64) -> Vec<TaskPerformance> {
    let mut cycles: Vec<f64> = occupants
        .iter()
        .map(|occupant| occupant.cycles_with(cache_bytes / occupant.partition_share))
        .collect();
    let mut performances: Vec<TaskPerformance> = Vec::with_capacity(occupants.len());
    let rounds = if occupants.len() == 1 {
        1
    } else {
        CO_RUN_ROUNDS
    };

    // The last root is close to the next one.
    let mut cursor = FootprintCursor::new(occupants.len());
    for _ in 0..rounds {
        compose_co_runners(
            occupants,
            cache_bytes,
            &cycles,
            &mut cursor,
            &mut performances,
        );
        let mut largest_change: f64 = 0.0;
        for (cycles, performance) in cycles.iter_mut().zip(&performances) {
            let previous_cycles = *cycles;
            *cycles = 0.5 * (*cycles + performance.cycles_per_instr);
            largest_change = largest_change.max((*cycles / previous_cycles - 1.0).abs());
        }
        if largest_change < CONVERGENCE_TOLERANCE {
            break;
        }
    }
    performances
}

impl CacheOccupant<'_> {
    fn cycles_with(&self, bytes: f64) -> f64 {
        let program = self.program;
        program.cycles_with_bytes(bytes, self.wait_cycles, self.split_share)
    }

    /// The performance over turns of this many cycles, at whose beginning other gangs have displaced the task's lines.
    /// It is at worst that without any lines.
    pub fn in_turns(&self, within_turn: TaskPerformance, turn_cycles: f64) -> TaskPerformance {
        let max_instr = turn_cycles / within_turn.cycles_per_instr;
        let touched_bytes = self.program.footprint_near(max_instr, &mut 0).0;
        let refilled_bytes = touched_bytes.min(within_turn.occupancy_bytes);
        let lines = self.program.lines_in(refilled_bytes);
        let refill_cycles = lines * (self.program.cycles_per_miss + self.wait_cycles);
        let instr_per_turn = (turn_cycles - refill_cycles) / within_turn.cycles_per_instr;
        let cycles_without_lines = self.cycles_with(0.0);
        let cycles_per_instr = turn_cycles / instr_per_turn;
        if instr_per_turn <= 0.0 || cycles_per_instr >= cycles_without_lines {
            return TaskPerformance {
                cycles_per_instr: cycles_without_lines,
                misses_per_instr: self.program.misses_at(0.0),
                ..within_turn
            };
        }

        TaskPerformance {
            cycles_per_instr,
            misses_per_instr: within_turn.misses_per_instr + lines / instr_per_turn,
            ..within_turn
        }
    }
}

fn task_performance(
    occupant: &CacheOccupant<'_>,
    composed_bytes: f64,
    cache_bytes: f64,
) -> TaskPerformance {
    let occupancy = occupant.program.real_occupancy(
        composed_bytes / occupant.partition_share,
        cache_bytes / occupant.partition_share,
    );
    let misses_per_instr = occupant.program.misses_at(occupancy);
    TaskPerformance {
        cycles_per_instr: occupant.program.cycles_with_misses(
            misses_per_instr,
            occupant.wait_cycles,
            occupant.split_share,
        ),
        misses_per_instr,
        occupancy_bytes: composed_bytes,
    }
}

/// The length of the last window, and the step of growth at which each task's footprint was found.
struct FootprintCursor {
    cycles: f64,
    steps: Vec<usize>,
    /// Progress per cycle and occupancy of each task; recomputed in each round.
    rates: Vec<f64>,
    occupancies: Vec<f64>,
}

impl FootprintCursor {
    fn new(tasks: usize) -> Self {
        FootprintCursor {
            cycles: 0.0,
            steps: vec![0; tasks],
            rates: vec![0.0; tasks],
            occupancies: vec![0.0; tasks],
        }
    }
}

/// Composes tasks that all run all the time. Progress is proportional to the window, and the sum of footprints is
/// concave, so Newton's steps from the left never pass the root. `cursor.cycles` is the starting point on entry, and
/// the root on return.
fn compose_co_runners(
    occupants: &[CacheOccupant<'_>],
    cache_bytes: f64,
    cycles: &[f64],
    cursor: &mut FootprintCursor,
    performances: &mut Vec<TaskPerformance>,
) {
    let FootprintCursor {
        rates,
        occupancies: occupancy_bytes,
        ..
    } = cursor;
    rates
        .iter_mut()
        .zip(occupants.iter().zip(cycles))
        .for_each(|(rate, (member, cycles))| *rate = member.cpu_share / cycles);

    let mut lower_bound = 0.0;
    for step in 0..=MAX_STEPS {
        let (mut sum, mut slope) = (0.0, 0.0);
        for (index, occupant) in occupants.iter().enumerate() {
            let (bytes, bytes_per_instr) = occupant
                .program
                .footprint_near(cursor.cycles * rates[index], &mut cursor.steps[index]);
            occupancy_bytes[index] = occupant.partition_share * bytes;
            sum += occupancy_bytes[index];
            slope += occupant.partition_share * bytes_per_instr * rates[index];
        }
        let free_bytes = cache_bytes - sum;
        let fits_completely =
            free_bytes >= 0.0 && (slope <= 0.0 || cursor.cycles >= MAX_WINDOW_CYCLES);
        if fits_completely
            || free_bytes.abs() <= OCCUPANCY_TOLERANCE * cache_bytes
            || step == MAX_STEPS
        {
            break;
        }

        if free_bytes > 0.0 {
            lower_bound = cursor.cycles;
        }
        let next_cycles = cursor.cycles + free_bytes / slope;
        // A step from the right may overshoot; the next step then comes from the left.
        cursor.cycles = if next_cycles > lower_bound {
            next_cycles.min(MAX_WINDOW_CYCLES)
        } else {
            lower_bound
        };
    }

    performances.clear();
    performances.extend(
        occupants
            .iter()
            .zip(occupancy_bytes)
            .map(|(member, composed_bytes)| task_performance(member, *composed_bytes, cache_bytes)),
    );
}

#[cfg(test)]
mod tests {
    use super::super::program_model::tests::{CACHE, program_fixture, uniform_program};
    use super::*;

    fn occupant_fixture(program: &ProgramModel) -> CacheOccupant<'_> {
        CacheOccupant {
            program,
            cpu_share: 1.0,
            split_share: 0.0,
            wait_cycles: 0.0,
            partition_share: 1.0,
        }
    }

    /// Does a single task run at its solo speed, and do equal programs perform alike?
    #[test]
    fn a_single_task_runs_at_solo_speed_and_equals_perform_alike() {
        let program = uniform_program(3_000_000.0, 0.02);
        let alone = compose(&[occupant_fixture(&program)], CACHE);
        assert!((alone[0].cycles_per_instr - program.solo_cycles(CACHE)).abs() < 1e-9);
        let performances = compose(
            &[occupant_fixture(&program), occupant_fixture(&program)],
            CACHE,
        );
        assert_eq!(performances[0], performances[1]);
        // Each holds half of the cache, so about a third of its lines is missing.
        let half = program.cycles_with_bytes(CACHE / 2.0, 0.0, 0.0);
        assert!(
            (performances[0].cycles_per_instr / half - 1.0).abs() < 0.01,
            "{} {half}",
            performances[0].cycles_per_instr
        );
    }

    /// Does a program that fits lose speed beside a stream, while the stream loses none?
    #[test]
    fn a_stream_displaces_a_program_that_fits() {
        let (reuser, stream) = (
            uniform_program(3_000_000.0, 0.02),
            program_fixture(|_| 0.05),
        );
        let performances = compose(
            &[occupant_fixture(&reuser), occupant_fixture(&stream)],
            CACHE,
        );
        assert!(
            performances[0].cycles_per_instr > 1.2 * reuser.solo_cycles(CACHE),
            "{performances:?}"
        );
        assert!((performances[1].cycles_per_instr / stream.solo_cycles(CACHE) - 1.0).abs() < 1e-6);
    }

    /// If a task may use both halves of a cache, with half of its lines in each, is its performance the same as in the
    /// whole cache?
    #[test]
    fn tasks_that_may_use_every_partition_perform_as_in_the_whole() {
        let (reuser, stream) = (
            uniform_program(3_000_000.0, 0.02),
            program_fixture(|_| 0.05),
        );
        let whole_cache = compose(
            &[occupant_fixture(&reuser), occupant_fixture(&stream)],
            CACHE,
        );
        let half = |program| CacheOccupant {
            partition_share: 0.5,
            ..occupant_fixture(program)
        };
        let partition = compose(&[half(&reuser), half(&stream)], 0.5 * CACHE);
        for (part_performance, whole_performance) in partition.iter().zip(&whole_cache) {
            assert!(
                (part_performance.cycles_per_instr / whole_performance.cycles_per_instr - 1.0)
                    .abs()
                    < 1e-4,
                "{part_performance:?} {whole_performance:?}"
            );
            assert!(
                (part_performance.occupancy_bytes / whole_performance.occupancy_bytes - 0.5).abs()
                    < 1e-3,
                "{part_performance:?} {whole_performance:?}"
            );
        }
    }

    /// Does the law of turns hold: time per access `T / (F + (T - F m) / h)` if the other turn flushes the cache?
    #[test]
    fn time_per_access_follows_the_law_of_turns() {
        // Each line is read once, in order: all accesses miss until all lines are resident. Every tenth instruction is
        // an access.
        let bytes = 2_097_152.0;
        let chase = program_fixture(|bytes_held| if bytes_held < bytes { 0.1 } else { 0.0 });
        let (miss, hit) = (
            chase.cycles_with_bytes(0.0, 0.0, 0.0) / 0.1,
            chase.solo_cycles(CACHE) / 0.1,
        );
        let lines = bytes / 64.0;
        let occupant = occupant_fixture(&chase);
        let alone = compose(&[occupant], CACHE)[0];
        for turn in [0.5, 2.0, 4.0, 10.0].map(|times| times * lines * miss) {
            let expected = if turn > lines * miss {
                turn / (lines + (turn - lines * miss) / hit)
            } else {
                miss
            };
            let cycles_per_access = occupant.in_turns(alone, turn).cycles_per_instr / 0.1;
            assert!(
                (cycles_per_access / expected - 1.0).abs() < 0.15,
                "turn {turn}: {cycles_per_access}, law {expected}"
            );
        }
    }
}
