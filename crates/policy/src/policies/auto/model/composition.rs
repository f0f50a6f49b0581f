//! Composition of tasks on one cache: the occupancy and the speed of each.
//!
//! Under LRU, a cache holds the lines that were touched after a certain moment, which is the same for all tasks (equal
//! window; Xiang et al., ASPLOS 2013). Each task holds its footprint over its own progress since then. Progress depends
//! on speed, and speed on occupancy, so both are solved together, with damping. If gangs take turns, the window reaches
//! back into earlier turns, in which only the members of those gangs made progress. This yields the law for turns that
//! are too short for their refill. Properties: a task that is alone holds all lines that it touches; occupancies never
//! add up to more than the cache.

use super::program_model::ProgramModel;

/// A task that uses the cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheOccupant<'a> {
    pub program: &'a ProgramModel,
    /// Share of the CPU's time that the task gets while its gang has the turn.
    pub cpu_share: f64,
    pub gang: usize,
    /// Share of the task's partners that are on other caches.
    pub split_share: f64,
    /// Additional cycles that every miss waits, relative to a miss to the nearest memory in the measured queue.
    pub wait_cycles: f64,
    /// Share of the task's lines that fall into this partition: 1, except for tasks that may use every partition.
    pub partition_share: f64,
}

impl CacheOccupant<'_> {
    fn footprint_in_part(&self, instructions: f64) -> f64 {
        self.partition_share * self.program.footprint_bytes(instructions)
    }
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

/// Largest number of rounds until occupancies and speeds agree; most converge earlier.
const CO_RUN_ROUNDS: usize = 6;
/// Number of rounds for gangs; it is smaller because each round computes many moments of a turn.
const GANG_ROUNDS: usize = 3;
/// Performances have converged if they change by less than this: curves are known to a few percent only.
const CONVERGENCE_TOLERANCE: f64 = 1e-5;
/// Occupancies add up to the cache within this share of it.
const OCCUPANCY_TOLERANCE: f64 = 1e-6;
/// Largest length of a window.
const MAX_WINDOW_CYCLES: f64 = 1e14;
/// Largest number of steps of a root search; a handful is usual.
const MAX_STEPS: usize = 48;
/// Sampled moments of a turn; they are dense at its beginning, while the cache is being filled.
const MOMENTS_PER_TURN: i32 = 16;
const STEP_GROWTH: f64 = 1.3;

/// Returns the performance of all tasks. `quanta` holds the gangs' quanta in cycles; without gangs, it has one entry of
/// any length.
pub fn compose(
    occupants: &[CacheOccupant<'_>],
    cache_bytes: f64,
    quanta: &[f64],
) -> Vec<TaskPerformance> {
    let mut cycles: Vec<f64> = occupants
        .iter()
        .map(|occupant| {
            occupant.program.cycles_per_instr_at(
                cache_bytes / occupant.partition_share,
                occupant.wait_cycles,
                occupant.split_share,
            )
        })
        .collect();
    let mut performances: Vec<TaskPerformance> = Vec::with_capacity(occupants.len());
    let rounds = match quanta.len() {
        0 | 1 if occupants.len() == 1 => 1,
        0 | 1 => CO_RUN_ROUNDS,
        _ => GANG_ROUNDS,
    };
    // The last root is close to the next one.
    let (mut cursor, mut guess) = (
        FootprintCursor::new(occupants.len()),
        WindowGuess::default(),
    );
    for _ in 0..rounds {
        if quanta.len() <= 1 {
            compose_co_runners(
                occupants,
                cache_bytes,
                &cycles,
                &mut cursor,
                &mut performances,
            );
        } else {
            performances = compose_gangs(occupants, cache_bytes, quanta, &cycles, &mut guess);
        }
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
        cycles_per_instr: occupant.program.cycles_at(
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

/// The length of the last window over turns, as the decimal logarithm of its cycles.
#[derive(Clone, Copy)]
struct WindowGuess(f64);

impl Default for WindowGuess {
    fn default() -> Self {
        WindowGuess(8.0)
    }
}

/// The shortest and the longest window, as decimal logarithms of cycles.
const WINDOW_EXPONENTS: (f64, f64) = (3.0, 14.0);

impl WindowGuess {
    /// Returns the occupancies of all tasks, given their progress (in instructions) over a window. The sum grows with
    /// the window, but in steps, one per turn, so the root is bracketed by false position.
    fn solve_occupancies(
        &mut self,
        occupants: &[CacheOccupant<'_>],
        cache_bytes: f64,
        progress: impl Fn(usize, f64) -> f64,
    ) -> Vec<f64> {
        let window_of_exponent = |exponent: f64| libm::exp(exponent * std::f64::consts::LN_10);
        let footprint_at = |index: usize, exponent: f64| {
            occupants[index].footprint_in_part(progress(index, window_of_exponent(exponent)))
        };
        let excess_bytes = |exponent: f64| {
            (0..occupants.len())
                .map(|index| footprint_at(index, exponent))
                .sum::<f64>()
                - cache_bytes
        };
        let occupancies_at = |exponent: f64| {
            (0..occupants.len())
                .map(|index| footprint_at(index, exponent))
                .collect::<Vec<f64>>()
        };
        let (mut low, mut high) = (self.0, self.0);
        let mut low_excess = excess_bytes(low);
        let mut high_excess = low_excess;
        let mut step = 0.02;
        while low_excess > 0.0 && low > WINDOW_EXPONENTS.0 {
            (high, high_excess) = (low, low_excess);
            low = (low - step).max(WINDOW_EXPONENTS.0);
            low_excess = excess_bytes(low);
            step *= 3.0;
        }
        while high_excess <= 0.0 && high < WINDOW_EXPONENTS.1 {
            (low, low_excess) = (high, high_excess);
            high = (high + step).min(WINDOW_EXPONENTS.1);
            high_excess = excess_bytes(high);
            step *= 3.0;
        }
        if high_excess <= 0.0 || low_excess > 0.0 {
            self.0 = if high_excess <= 0.0 {
                WINDOW_EXPONENTS.1
            } else {
                WINDOW_EXPONENTS.0
            };
            return occupancies_at(self.0);
        }
        // If an end stays, its weight is halved (Illinois); otherwise it would never move.
        let (mut low_weight, mut high_weight) = (low_excess, high_excess);
        for _ in 0..MAX_STEPS {
            if high - low < 1e-6 {
                break;
            }
            let middle = (low * high_weight - high * low_weight) / (high_weight - low_weight);
            let middle = if middle > low && middle < high {
                middle
            } else {
                0.5 * (low + high)
            };
            let excess = excess_bytes(middle);
            if excess.abs() <= OCCUPANCY_TOLERANCE * cache_bytes {
                low = middle;
                break;
            }
            if excess > 0.0 {
                (high, high_weight, low_weight) = (middle, excess, 0.5 * low_weight);
            } else {
                (low, low_weight, high_weight) = (middle, excess, 0.5 * high_weight);
            }
        }
        self.0 = low;
        occupancies_at(low)
    }
}

/// Returns the cycles that a gang ran within the last `window` cycles, at `elapsed_in_turn` cycles into the turn of
/// `current_gang`.
fn turn_cycles(
    gang: usize,
    current_gang: usize,
    elapsed_in_turn: f64,
    window: f64,
    turns: &[f64],
) -> f64 {
    let rotation: f64 = turns.iter().sum();
    let full_rotations = libm::floor(window / rotation);
    let mut remaining_cycles = window - full_rotations * rotation;
    let mut gang_cycles = full_rotations * turns[gang];
    let (mut gang_in_turn, mut turn_length) = (current_gang, elapsed_in_turn);
    // The window may reach back into the preceding turn of the same gang, so one more turn than a rotation is visited.
    for _ in 0..=turns.len() {
        let elapsed = remaining_cycles.min(turn_length);
        if gang_in_turn == gang {
            gang_cycles += elapsed;
        }
        remaining_cycles -= elapsed;
        gang_in_turn = (gang_in_turn + turns.len() - 1) % turns.len();
        turn_length = turns[gang_in_turn];
        if remaining_cycles <= 0.0 {
            break;
        }
    }
    gang_cycles
}

fn compose_gangs(
    occupants: &[CacheOccupant<'_>],
    cache_bytes: f64,
    quanta: &[f64],
    cycles: &[f64],
    guess: &mut WindowGuess,
) -> Vec<TaskPerformance> {
    // Sums over the moments: instructions, misses, cycles, and bytes held times cycles.
    let mut sums = vec![[0.0; 4]; occupants.len()];
    for (current_gang, &quantum) in quanta.iter().enumerate() {
        let mut instructions_done = vec![0.0; occupants.len()];
        // Cycles per instruction at the previous moment. At the start of the turn, the cache is assumed to be empty.
        let mut last_cycles_per_instr: Vec<f64> = occupants
            .iter()
            .map(|occupant| {
                occupant.program.cycles_per_instr_at(
                    0.0,
                    occupant.wait_cycles,
                    occupant.split_share,
                )
            })
            .collect();
        let mut step = quantum * (STEP_GROWTH - 1.0)
            / (libm::pow(STEP_GROWTH, f64::from(MOMENTS_PER_TURN)) - 1.0);
        let mut elapsed = 0.0;
        for _ in 0..MOMENTS_PER_TURN {
            let middle = elapsed + 0.5 * step;
            let instr_in_window = |index: usize, window: f64| {
                let occupant = &occupants[index];
                let gang_cycles = turn_cycles(occupant.gang, current_gang, middle, window, quanta);
                if occupant.gang != current_gang {
                    return gang_cycles * occupant.cpu_share / cycles[index];
                }
                // The current turn counts at its actual speed, earlier turns at the mean speed.
                let cycles_in_turn = gang_cycles.min(middle);
                let instr_in_turn = instructions_done[index]
                    + 0.5 * step * occupant.cpu_share / last_cycles_per_instr[index];
                instr_in_turn * cycles_in_turn / middle
                    + (gang_cycles - cycles_in_turn) * occupant.cpu_share / cycles[index]
            };
            let occupancies = guess.solve_occupancies(occupants, cache_bytes, instr_in_window);
            for (index, occupant) in occupants
                .iter()
                .enumerate()
                .filter(|(_, occupant)| occupant.gang == current_gang)
            {
                let performance = task_performance(occupant, occupancies[index], cache_bytes);
                let instructions = step * occupant.cpu_share / performance.cycles_per_instr;
                instructions_done[index] += instructions;
                last_cycles_per_instr[index] = performance.cycles_per_instr;
                sums[index][0] += instructions;
                sums[index][1] += instructions * performance.misses_per_instr;
                sums[index][2] += step * occupant.cpu_share;
                sums[index][3] += step * occupant.cpu_share * occupancies[index];
            }
            elapsed += step;
            step *= STEP_GROWTH;
        }
    }
    let mean_performance = |(sums, occupant): (&[f64; 4], &CacheOccupant<'_>)| {
        if sums[0] <= 0.0 {
            return task_performance(occupant, 0.0, cache_bytes);
        }
        let (misses_per_instr, held_bytes) = (sums[1] / sums[0], sums[3] / sums[2]);
        TaskPerformance {
            cycles_per_instr: sums[2] / sums[0],
            misses_per_instr,
            occupancy_bytes: held_bytes,
        }
    };
    sums.iter().zip(occupants).map(mean_performance).collect()
}

#[cfg(test)]
mod tests {
    use super::super::program_model::tests::{CACHE, program_fixture, uniform_program};
    use super::*;

    fn occupant_fixture(program: &ProgramModel, gang: usize) -> CacheOccupant<'_> {
        CacheOccupant {
            program,
            cpu_share: 1.0,
            gang,
            split_share: 0.0,
            wait_cycles: 0.0,
            partition_share: 1.0,
        }
    }

    /// Does a single task run at its solo speed, and do equal programs perform alike?
    #[test]
    fn a_single_task_runs_at_solo_speed_and_equals_perform_alike() {
        let program = uniform_program(3_000_000.0, 0.02);
        let alone = compose(&[occupant_fixture(&program, 0)], CACHE, &[1.0]);
        assert!((alone[0].cycles_per_instr - program.solo_cycles(CACHE)).abs() < 1e-9);
        let performances = compose(
            &[occupant_fixture(&program, 0), occupant_fixture(&program, 0)],
            CACHE,
            &[1.0],
        );
        assert_eq!(performances[0], performances[1]);
        // Each holds half of the cache, so about a third of its lines is missing.
        let half = program.cycles_per_instr_at(CACHE / 2.0, 0.0, 0.0);
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
            &[occupant_fixture(&reuser, 0), occupant_fixture(&stream, 0)],
            CACHE,
            &[1.0],
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
            &[occupant_fixture(&reuser, 0), occupant_fixture(&stream, 0)],
            CACHE,
            &[1.0],
        );
        let half = |program| CacheOccupant {
            partition_share: 0.5,
            ..occupant_fixture(program, 0)
        };
        let partition = compose(&[half(&reuser), half(&stream)], 0.5 * CACHE, &[1.0]);
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
        let stream = program_fixture(|_| 0.1);
        let (miss, hit) = (
            chase.cycles_per_instr_at(0.0, 0.0, 0.0) / 0.1,
            chase.solo_cycles(CACHE) / 0.1,
        );
        let lines = bytes / 64.0;
        for turn in [0.5, 2.0, 4.0, 10.0].map(|times| times * lines * miss) {
            let performances = compose(
                &[occupant_fixture(&chase, 0), occupant_fixture(&stream, 1)],
                CACHE,
                &[turn, turn],
            );
            let flushed = turn / miss >= 65_536.0;
            let expected = if turn > lines * miss {
                turn / (lines + (turn - lines * miss) / hit)
            } else {
                miss
            };
            let cycles_per_access = performances[0].cycles_per_instr / 0.1;
            assert!(
                !flushed || (cycles_per_access / expected - 1.0).abs() < 0.15,
                "turn {turn}: {cycles_per_access}, law {expected}"
            );
        }
    }

    /// Do the turns of a rotation add up to the window, wherever it ends?
    #[test]
    fn turns_of_a_rotation_add_up_to_the_window() {
        let quanta = [3.0, 5.0, 2.0];
        for current_gang in 0..3 {
            for window in [0.5, 4.0, 10.0, 27.5] {
                let elapsed = 0.5 * quanta[current_gang];
                let sum: f64 = (0..3)
                    .map(|gang| turn_cycles(gang, current_gang, elapsed, window, &quanta))
                    .sum();
                assert!((sum - window).abs() < 1e-9);
            }
            assert_eq!(
                turn_cycles(current_gang, current_gang, 0.25, 0.25, &quanta),
                0.25
            );
        }
    }
}
