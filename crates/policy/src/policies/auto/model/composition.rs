//! Composition of tasks on one cache: the occupancy and the speed of each.
//!
//! Under LRU, a cache holds the lines that were touched after a certain moment, which is the same for all tasks (equal
//! window; Xiang et al., ASPLOS 2013): each task holds its footprint over its own progress since then. Progress depends
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
    pub share: f64,
    pub gang: usize,
    /// Share of the task's partners that are on other caches.
    pub split_share: f64,
    /// Additional cycles that every miss waits, relative to a miss to the nearest memory in the measured queue.
    pub wait_cycles: f64,
    /// Share of the task's lines that fall into this partition: 1, except for tasks that may use every partition.
    pub in_part_share: f64,
}

impl CacheOccupant<'_> {
    fn footprint(&self, instructions: f64) -> f64 {
        self.in_part_share * self.program.footprint(instructions)
    }
}

/// Performance of a task while it runs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TaskPerformance {
    pub cycles_per_instr: f64,
    pub misses_per_instr: f64,
    /// Mean occupancy, as computed by the composition.
    pub held_bytes: f64,
}

impl TaskPerformance {
    /// Performance of a task before any partition was added.
    pub const NONE: TaskPerformance = TaskPerformance { cycles_per_instr: 0.0, misses_per_instr: 0.0, held_bytes: 0.0 };

    /// Adds the performance in another partition, into which this share of the task's lines falls.
    pub fn add(&mut self, part: TaskPerformance, inside: f64) {
        self.cycles_per_instr += inside * part.cycles_per_instr;
        self.misses_per_instr += inside * part.misses_per_instr;
        self.held_bytes += part.held_bytes;
    }
}

const ROUNDS: usize = 6;
/// Number of rounds for gangs; it is smaller because each round computes many moments of a turn.
const ROUNDS_OF_TURNS: usize = 3;
/// Performances have converged if they change by less than this: curves are known to a few percent only.
const SETTLED: f64 = 1e-5;
/// Occupancies add up to the cache within this share of it.
const TOLERANCE: f64 = 1e-6;
/// Largest length of a window.
const LONGEST_CYCLES: f64 = 1e14;
/// Largest number of steps of a root search; a handful is usual.
const MAX_STEPS: usize = 48;
/// Sampled moments of a turn; they are dense at its beginning, while the cache is being filled.
const MOMENTS: i32 = 16;
const NEXT_STEP: f64 = 1.3;

/// Returns the performance of all tasks. `turns` has the gangs' quanta in cycles (one entry of any length if there are
/// no gangs).
pub fn compose(present: &[CacheOccupant<'_>], cache_bytes: f64, turns: &[f64]) -> Vec<TaskPerformance> {
    let mut cycles: Vec<f64> = present
        .iter()
        .map(|occupant| {
            occupant.program.cycles(cache_bytes / occupant.in_part_share, occupant.wait_cycles, occupant.split_share)
        })
        .collect();
    let mut fares: Vec<TaskPerformance> = Vec::with_capacity(present.len());
    let rounds = match turns.len() {
        0 | 1 if present.len() == 1 => 1,
        0 | 1 => ROUNDS,
        _ => ROUNDS_OF_TURNS,
    };
    // The last root is close to the next one.
    let (mut window, mut reach) = (FootprintCursor::new(present.len()), WindowGuess::default());
    for _ in 0..rounds {
        if turns.len() <= 1 {
            co_run(present, cache_bytes, &cycles, &mut window, &mut fares);
        } else {
            fares = shares_in_turns(present, cache_bytes, turns, &cycles, &mut reach);
        }
        let mut moved: f64 = 0.0;
        for (cycles, fare) in cycles.iter_mut().zip(&fares) {
            let before = *cycles;
            *cycles = 0.5 * (*cycles + fare.cycles_per_instr);
            moved = moved.max((*cycles / before - 1.0).abs());
        }
        if moved < SETTLED {
            break;
        }
    }
    fares
}

fn performance(occupant: &CacheOccupant<'_>, composed: f64, cache_bytes: f64) -> TaskPerformance {
    let occupancy =
        occupant.program.real_occupancy(composed / occupant.in_part_share, cache_bytes / occupant.in_part_share);
    let misses_per_instr = occupant.program.misses(occupancy);
    TaskPerformance {
        cycles_per_instr: occupant.program.cycles_at(misses_per_instr, occupant.wait_cycles, occupant.split_share),
        misses_per_instr,
        held_bytes: composed,
    }
}

/// Reach of the last window, and the step of growth at which each task's footprint was found.
struct FootprintCursor {
    cycles: f64,
    steps: Vec<usize>,
    /// Progress per cycle and occupancy of each task; recomputed in each round.
    rates: Vec<f64>,
    held: Vec<f64>,
}

impl FootprintCursor {
    fn new(tasks: usize) -> Self {
        FootprintCursor { cycles: 0.0, steps: vec![0; tasks], rates: vec![0.0; tasks], held: vec![0.0; tasks] }
    }
}

/// Composes tasks that all run all the time. Progress is proportional to the window, and the sum of footprints is
/// concave, so Newton's steps from the left never pass the root. `window` is the starting point on entry, and the root
/// on return.
fn co_run(
    present: &[CacheOccupant<'_>],
    cache_bytes: f64,
    cycles: &[f64],
    window: &mut FootprintCursor,
    fares: &mut Vec<TaskPerformance>,
) {
    let FootprintCursor { rates, held, .. } = window;
    rates.iter_mut().zip(present.iter().zip(cycles)).for_each(|(rate, (member, cycles))| *rate = member.share / cycles);
    let mut minimum = 0.0;
    for step in 0..=MAX_STEPS {
        let (mut sum, mut slope) = (0.0, 0.0);
        for (index, occupant) in present.iter().enumerate() {
            let (bytes, per_instr) =
                occupant.program.footprint_near(window.cycles * rates[index], &mut window.steps[index]);
            held[index] = occupant.in_part_share * bytes;
            sum += held[index];
            slope += occupant.in_part_share * per_instr * rates[index];
        }
        let missing = cache_bytes - sum;
        let all_held = missing >= 0.0 && (slope <= 0.0 || window.cycles >= LONGEST_CYCLES);
        if all_held || missing.abs() <= TOLERANCE * cache_bytes || step == MAX_STEPS {
            break;
        }
        if missing > 0.0 {
            minimum = window.cycles;
        }
        let next = window.cycles + missing / slope;
        // A step from the right may overshoot; the next step then comes from the left.
        window.cycles = if next > minimum { next.min(LONGEST_CYCLES) } else { minimum };
    }
    fares.clear();
    fares.extend(present.iter().zip(held).map(|(member, held)| performance(member, *held, cache_bytes)));
}

/// Reach of the last window over turns, as a power of ten of cycles.
#[derive(Clone, Copy)]
struct WindowGuess(f64);

impl Default for WindowGuess {
    fn default() -> Self {
        WindowGuess(8.0)
    }
}

/// The shortest and the longest window, as powers of ten of cycles.
const REACH: (f64, f64) = (3.0, 14.0);

impl WindowGuess {
    /// Returns the occupancies of all tasks, given their progress (in instructions) over a window. The sum grows with
    /// the window, but in steps, one per turn, so the root is bracketed by false position.
    fn occupancies(
        &mut self,
        present: &[CacheOccupant<'_>],
        cache_bytes: f64,
        progress: impl Fn(usize, f64) -> f64,
    ) -> Vec<f64> {
        let window = |exponent: f64| libm::exp(exponent * std::f64::consts::LN_10);
        let value = |index: usize, exponent: f64| present[index].footprint(progress(index, window(exponent)));
        let beyond = |exponent: f64| (0..present.len()).map(|index| value(index, exponent)).sum::<f64>() - cache_bytes;
        let all = |exponent: f64| (0..present.len()).map(|index| value(index, exponent)).collect::<Vec<f64>>();
        let (mut low, mut high) = (self.0, self.0);
        let mut below = beyond(low);
        let mut above = below;
        let mut step = 0.02;
        while below > 0.0 && low > REACH.0 {
            (high, above) = (low, below);
            low = (low - step).max(REACH.0);
            below = beyond(low);
            step *= 3.0;
        }
        while above <= 0.0 && high < REACH.1 {
            (low, below) = (high, above);
            high = (high + step).min(REACH.1);
            above = beyond(high);
            step *= 3.0;
        }
        if above <= 0.0 || below > 0.0 {
            self.0 = if above <= 0.0 { REACH.1 } else { REACH.0 };
            return all(self.0);
        }
        // If an end stays, its weight is halved (Illinois); otherwise it would never move.
        let (mut weight_below, mut weight_above) = (below, above);
        for _ in 0..MAX_STEPS {
            if high - low < 1e-6 {
                break;
            }
            let middle = (low * weight_above - high * weight_below) / (weight_above - weight_below);
            let middle = if middle > low && middle < high { middle } else { 0.5 * (low + high) };
            let excess = beyond(middle);
            if excess.abs() <= TOLERANCE * cache_bytes {
                low = middle;
                break;
            }
            if excess > 0.0 {
                (high, weight_above, weight_below) = (middle, excess, 0.5 * weight_below);
            } else {
                (low, weight_below, weight_above) = (middle, excess, 0.5 * weight_above);
            }
        }
        self.0 = low;
        all(low)
    }
}

/// Returns the cycles that a gang ran within the last `window` cycles, `into` cycles into the turn of gang `now`.
fn turn_cycles(gang: usize, now: usize, into: f64, window: f64, turns: &[f64]) -> f64 {
    let rotation: f64 = turns.iter().sum();
    let whole = libm::floor(window / rotation);
    let mut remaining = window - whole * rotation;
    let mut had = whole * turns[gang];
    let (mut at, mut length) = (now, into);
    // The part of the current turn that is still to come appears at the far end of the rotation.
    for _ in 0..=turns.len() {
        let part = remaining.min(length);
        if at == gang {
            had += part;
        }
        remaining -= part;
        at = (at + turns.len() - 1) % turns.len();
        length = turns[at];
        if remaining <= 0.0 {
            break;
        }
    }
    had
}

fn shares_in_turns(
    present: &[CacheOccupant<'_>],
    cache_bytes: f64,
    turns: &[f64],
    cycles: &[f64],
    reach: &mut WindowGuess,
) -> Vec<TaskPerformance> {
    // Sums over the moments: instructions, misses, cycles, and bytes held times cycles.
    let mut sums = vec![[0.0; 4]; present.len()];
    for (now, &turn) in turns.iter().enumerate() {
        let mut done = vec![0.0; present.len()];
        // Occupancies of the previous moment; initially the cache may be empty.
        let mut last: Vec<f64> = present
            .iter()
            .map(|occupant| occupant.program.cycles(0.0, occupant.wait_cycles, occupant.split_share))
            .collect();
        let mut step = turn * (NEXT_STEP - 1.0) / (libm::pow(NEXT_STEP, f64::from(MOMENTS)) - 1.0);
        let mut into = 0.0;
        for _ in 0..MOMENTS {
            let middle = into + 0.5 * step;
            let progress = |index: usize, window: f64| {
                let occupant = &present[index];
                let turn_length = turn_cycles(occupant.gang, now, middle, window, turns);
                if occupant.gang != now {
                    return turn_length * occupant.share / cycles[index];
                }
                // The current turn counts at its actual speed, earlier turns at the mean speed.
                let this_turn = turn_length.min(middle);
                let so_far = done[index] + 0.5 * step * occupant.share / last[index];
                so_far * this_turn / middle + (turn_length - this_turn) * occupant.share / cycles[index]
            };
            let held = reach.occupancies(present, cache_bytes, progress);
            for (index, occupant) in present.iter().enumerate().filter(|(_, occupant)| occupant.gang == now) {
                let fare = performance(occupant, held[index], cache_bytes);
                let instructions = step * occupant.share / fare.cycles_per_instr;
                done[index] += instructions;
                last[index] = fare.cycles_per_instr;
                sums[index][0] += instructions;
                sums[index][1] += instructions * fare.misses_per_instr;
                sums[index][2] += step * occupant.share;
                sums[index][3] += step * occupant.share * held[index];
            }
            into += step;
            step *= NEXT_STEP;
        }
    }
    let mean_performance = |(sums, occupant): (&[f64; 4], &CacheOccupant<'_>)| {
        if sums[0] <= 0.0 {
            return performance(occupant, 0.0, cache_bytes);
        }
        let (misses_per_instr, held_bytes) = (sums[1] / sums[0], sums[3] / sums[2]);
        TaskPerformance { cycles_per_instr: sums[2] / sums[0], misses_per_instr, held_bytes }
    };
    sums.iter().zip(present).map(mean_performance).collect()
}

#[cfg(test)]
mod tests {
    use super::super::program_model::tests::{CACHE, program, uniform};
    use super::*;

    fn present(program: &ProgramModel, gang: usize) -> CacheOccupant<'_> {
        CacheOccupant { program, share: 1.0, gang, split_share: 0.0, wait_cycles: 0.0, in_part_share: 1.0 }
    }

    /// Does a single task run at its solo speed, and do equal programs perform alike?
    #[test]
    fn alone_is_alone_and_like_fares_alike() {
        let program = uniform(3_000_000.0, 0.02);
        let alone = compose(&[present(&program, 0)], CACHE, &[1.0]);
        assert!((alone[0].cycles_per_instr - program.solo_cycles(CACHE)).abs() < 1e-9);
        let both = compose(&[present(&program, 0), present(&program, 0)], CACHE, &[1.0]);
        assert_eq!(both[0], both[1]);
        // Each holds half of the cache, so about a third of its lines is missing.
        let half = program.cycles(CACHE / 2.0, 0.0, 0.0);
        assert!((both[0].cycles_per_instr / half - 1.0).abs() < 0.01, "{} {half}", both[0].cycles_per_instr);
    }

    /// Does a program that fits lose speed beside a stream, while the stream loses none?
    #[test]
    fn a_stream_displaces_a_program_that_fits() {
        let (keeps, stream) = (uniform(3_000_000.0, 0.02), program(|_| 0.05));
        let fares = compose(&[present(&keeps, 0), present(&stream, 0)], CACHE, &[1.0]);
        assert!(fares[0].cycles_per_instr > 1.2 * keeps.solo_cycles(CACHE), "{fares:?}");
        assert!((fares[1].cycles_per_instr / stream.solo_cycles(CACHE) - 1.0).abs() < 1e-6);
    }

    /// If a task may use both halves of a cache, with half of its lines in each, is its performance the same as in the
    /// whole cache?
    #[test]
    fn tasks_that_may_use_every_partition_perform_as_in_the_whole() {
        let (keeps, stream) = (uniform(3_000_000.0, 0.02), program(|_| 0.05));
        let whole = compose(&[present(&keeps, 0), present(&stream, 0)], CACHE, &[1.0]);
        let half = |program| CacheOccupant { in_part_share: 0.5, ..present(program, 0) };
        let part = compose(&[half(&keeps), half(&stream)], 0.5 * CACHE, &[1.0]);
        for (part, whole) in part.iter().zip(&whole) {
            assert!((part.cycles_per_instr / whole.cycles_per_instr - 1.0).abs() < 1e-4, "{part:?} {whole:?}");
            assert!((part.held_bytes / whole.held_bytes - 0.5).abs() < 1e-3, "{part:?} {whole:?}");
        }
    }

    /// Does the law of turns hold: time per access `T / (F + (T - F m) / h)` if the other turn flushes the cache?
    #[test]
    fn the_law_of_turns_holds() {
        // Each line is read once, in order: all accesses miss until all lines are resident. Every tenth instruction is
        // an access.
        let bytes = 2_097_152.0;
        let chase = program(|held| if held < bytes { 0.1 } else { 0.0 });
        let stream = program(|_| 0.1);
        let (miss, hit) = (chase.cycles(0.0, 0.0, 0.0) / 0.1, chase.solo_cycles(CACHE) / 0.1);
        let lines = bytes / 64.0;
        for turn in [0.5, 2.0, 4.0, 10.0].map(|times| times * lines * miss) {
            let found = compose(&[present(&chase, 0), present(&stream, 1)], CACHE, &[turn, turn]);
            let flushed = turn / miss >= 65_536.0;
            let expected = if turn > lines * miss { turn / (lines + (turn - lines * miss) / hit) } else { miss };
            let found = found[0].cycles_per_instr / 0.1;
            assert!(!flushed || (found / expected - 1.0).abs() < 0.15, "turn {turn}: {found}, law {expected}");
        }
    }

    /// Do the turns of a rotation add up to the window, wherever it ends?
    #[test]
    fn turns_add_up() {
        let turns = [3.0, 5.0, 2.0];
        for now in 0..3 {
            for window in [0.5, 4.0, 10.0, 27.5] {
                let into = 0.5 * turns[now];
                let sum: f64 = (0..3).map(|gang| turn_cycles(gang, now, into, window, &turns)).sum();
                assert!((sum - window).abs() < 1e-9);
            }
            assert_eq!(turn_cycles(now, now, 0.25, 0.25, &turns), 0.25);
        }
    }
}
