//! Makes programs for the interval machine from samples of their accesses, by walks of the machine's window.
//!
//! Problem: cycles, overlap and prefetches of a program have to be known at every size of the contended cache, on any
//! machine, in a moment. Method: [`cachemate_locality::window_walk`] gives them for the sampled accesses at up to eight
//! sizes, or, where other systems fill the cache, at doublings up to the footprint. Of a private cache that is filled
//! so, a program keeps the lines that its speed allows. Misses are not left to the sample: the stack distances of all
//! accesses say how many there are, and the walk only says what each costs (a ratio estimator). Between the sizes,
//! rates follow the misses ([`crate::set_means`]). Properties: pure; the same sample and machine give the same program,
//! whether the sample comes from a recording or from a profile file.

use cachemate_core::{MachineSpec, StreamPhase, StreamSample};
use cachemate_interval::{Demand, PhasedProgram, ProgramPhase, SizePoint, UnprefetchedRates};
use cachemate_locality::stack::DistanceHistogram;
use cachemate_locality::window_walk::{
    DependenceRule, WalkCounts, WalkLevel, WalkMachine, WalkOptions, sampling_error_share,
    sum_counts, walk_phase,
};

use crate::set_means::points_by_distances;
use crate::{ForecastResult, failed};

/// Shares of the contended cache at which the program is walked: halves, and one more between each of the three
/// largest, because a working set often ends there.
const WALKED_SHARES: [f64; 7] = [0.0625, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0];
/// Number of sizes at which the interval machine tabulates rates.
const TABULATED_SIZE_COUNT: f64 = 64.0;
/// Minimum instructions of a round through the phases.
const MIN_ROUND_INSTR: f64 = 4e6;
/// Lines of a cache in which everything hits.
const UNLIMITED_LINES: u64 = u64::MAX / 4;

/// A program with the standard error of its cycles that sampling leaves, relative to them.
pub struct WalkedProgram {
    /// The program, whose phases repeat.
    pub program: PhasedProgram,
    /// One standard error of the cycles, relative to them.
    pub sampling_error_share: f64,
}

/// Makes the program of a sample on a machine.
///
/// # Errors
/// The machine has no data cache, or other lines than the sample.
pub fn walk_sample(
    name: &str,
    sample: &StreamSample,
    machine: &MachineSpec,
    dependences: DependenceRule,
) -> ForecastResult<WalkedProgram> {
    let walk_machine = WalkMachine::from_machine(machine)
        .ok_or_else(|| failed(&machine.name)("no data cache to share"))?;
    let cache = machine.last_level_cache();
    let line_bytes = cache.map_or(0, |cache| cache.line_bytes);
    if line_bytes != sample.line_bytes {
        let message = format!(
            "found a sample of lines of {} bytes, expected {line_bytes}: profile the recording with --machine",
            sample.line_bytes
        );
        return Err(failed(name)(message));
    }
    let walked_phases = sample
        .phases
        .iter()
        .filter(|phase| phase.instructions > 0 && !phase.parts.is_empty());
    let (mut phases, mut error_squares, mut cycles) = (Vec::new(), 0.0, 0.0);
    for phase in walked_phases {
        let mut walker = PhaseWalker {
            sample,
            machine: walk_machine.clone(),
            dependences,
        };
        let histogram = walker.repeated_distances(phase);
        walker.share_private_cache(phase, &histogram);
        let (program_phase, error_share) = walker.walk(phase, &histogram);
        let phase_cycles = phase.instructions as f64
            * program_phase
                .points
                .last()
                .map_or(0.0, |point| point.cycles_per_instr);
        let error_cycles = error_share * phase_cycles;
        error_squares += error_cycles * error_cycles;
        cycles += phase_cycles;
        phases.push(program_phase);
    }
    repeat_phases(&mut phases);
    let program = PhasedProgram {
        name: name.to_string(),
        phases,
        repeats_from: Some(0),
        demand: Demand::default(),
        progress_per_instr: None,
        from_empty_cache: false,
    };
    program.check().map_err(failed(name))?;
    Ok(WalkedProgram {
        program,
        sampling_error_share: if cycles > 0.0 {
            libm::sqrt(error_squares) / cycles
        } else {
            0.0
        },
    })
}

/// Lengthens the phases of a short program until a round of them has [`MIN_ROUND_INSTR`]: a forecast lasts many cycles,
/// and each change of a phase is an event.
fn repeat_phases(phases: &mut [ProgramPhase]) {
    let round_instr: f64 = phases.iter().filter_map(|phase| phase.instructions).sum();
    let repeats = libm::ceil(MIN_ROUND_INSTR / round_instr.max(1.0)).max(1.0);
    for instructions in phases
        .iter_mut()
        .filter_map(|phase| phase.instructions.as_mut())
    {
        *instructions *= repeats;
    }
}

/// The lines of a program that stay in a cache beside the neighbors' lines. Its accesses at these distances take this
/// number of cycles.
fn lines_that_stay(level: &WalkLevel, histogram: &DistanceHistogram, cycles: f64) -> u64 {
    let (mut lines, mut room) = (0.0, level.lines as f64);
    let mut longer_count = histogram.accesses() as f64;
    for &(distance, count) in histogram.counts() {
        if longer_count < 1.0 {
            break;
        }
        // While the program touches a line that it has not touched since, the neighbors fill so many.
        let room_per_line = 1.0 + level.neighbor_lines_per_cycle * cycles / longer_count;
        let more_lines = (distance + 1) as f64 - lines;
        if more_lines * room_per_line >= room {
            return (lines + room / room_per_line) as u64;
        }
        lines += more_lines;
        room -= more_lines * room_per_line;
        longer_count -= count as f64;
    }
    level.lines
}

struct PhaseWalker<'a> {
    sample: &'a StreamSample,
    machine: WalkMachine,
    dependences: DependenceRule,
}

/// Rates per instruction at one size.
#[derive(Clone, Copy)]
struct WalkedRates {
    cycles: f64,
    demand_fills: f64,
    prefetch_fills: f64,
    writebacks: f64,
    stall_cycles: f64,
}

impl PhaseWalker<'_> {
    /// The phase, and the standard error of its cycles with the whole cache.
    fn walk(&self, phase: &StreamPhase, histogram: &DistanceHistogram) -> (ProgramPhase, f64) {
        let line_bytes = f64::from(self.sample.line_bytes);
        let full_lines = self.machine.levels.last().map_or(1, |level| level.lines);
        let private_lines = self.machine.private_lines();
        let sizes = self.walked_sizes(private_lines.max(1).min(full_lines), full_lines);
        let walk_at =
            |lines: u64, prefetch: bool| self.walk_at(phase, &self.machine, lines, prefetch);
        let hits = sum_counts(&walk_at(UNLIMITED_LINES, true));
        let has_prefetchers = !self.machine.prefetchers.is_empty();
        let unprefetched_hits =
            has_prefetchers.then(|| sum_counts(&walk_at(UNLIMITED_LINES, false)));
        let parts_by_size: Vec<Vec<WalkCounts>> =
            sizes.iter().map(|&lines| walk_at(lines, true)).collect();
        // The last size is the whole cache, whose walk also gives the error of the sample.
        let full_size_parts = &parts_by_size[parts_by_size.len() - 1];
        let rates_at = |lines: u64, counts: WalkCounts, hits: WalkCounts| {
            let misses =
                histogram.misses_at(lines.max(private_lines)) as f64 / phase.instructions as f64;
            self.rates(counts, hits, misses)
        };

        let point_of = |(&lines, parts): (&u64, &Vec<WalkCounts>)| {
            let rates = rates_at(lines, sum_counts(parts), hits);
            let without_prefetch = unprefetched_hits.map(|hits| {
                let rates = rates_at(lines, sum_counts(&walk_at(lines, false)), hits);
                UnprefetchedRates {
                    cycles_per_instr: rates.cycles,
                    demand_fills_per_instr: rates.demand_fills,
                    writebacks_per_instr: rates.writebacks,
                    memory_stall_cycles_per_instr: rates.stall_cycles,
                }
            });
            SizePoint {
                size_bytes: lines as f64 * line_bytes,
                cycles_per_instr: rates.cycles,
                demand_fills_per_instr: rates.demand_fills,
                prefetch_fills_per_instr: rates.prefetch_fills,
                writebacks_per_instr: rates.writebacks,
                memory_stall_cycles_per_instr: rates.stall_cycles,
                without_prefetch,
            }
        };

        let points: Vec<SizePoint> = sizes.iter().zip(&parts_by_size).map(point_of).collect();
        let step_bytes = full_lines as f64 * line_bytes / TABULATED_SIZE_COUNT;
        let program_phase = ProgramPhase {
            instructions: Some(phase.instructions as f64),
            references_per_instr: histogram.misses_at(private_lines) as f64
                / phase.instructions as f64,
            points: points_by_distances(
                &points,
                histogram,
                step_bytes,
                u64::from(self.sample.line_bytes),
            ),
            footprint_bytes: self
                .is_pooled()
                .then_some(self.sample.footprint_lines as f64 * line_bytes),
            private_levels: Vec::new(),
            sharing: Vec::new(),
            half_private_extra_cycles_per_instr: self.half_private_cost(
                phase,
                full_lines,
                sum_counts(full_size_parts),
            ),
        };
        (
            program_phase,
            sampling_error_share(full_size_parts).unwrap_or(0.0),
        )
    }

    /// Whether other systems fill the contended cache too.
    fn is_pooled(&self) -> bool {
        let contended = self.machine.levels.last();
        contended.is_some_and(|level| level.neighbor_lines_per_cycle > 0.0)
    }

    /// Leaves the largest private cache the lines that stay in it beside a thread of another system on the same core,
    /// at the speed that the program has if it misses no shared cache. That thread's lines count since the program's
    /// oldest one, so that a fast program keeps more (Che's equation, as in [`cachemate_interval`]'s occupancies).
    fn share_private_cache(&mut self, phase: &StreamPhase, histogram: &DistanceHistogram) {
        let Some(private_level) = self.machine.levels.len().checked_sub(2) else {
            return;
        };
        let level = self.machine.levels[private_level];
        if level.neighbor_lines_per_cycle <= 0.0 {
            return;
        }
        // A second round takes in that more misses make the program slower.
        for _ in 0..2 {
            let counts = sum_counts(&self.walk_at(phase, &self.machine, UNLIMITED_LINES, true));
            let cycles = phase.instructions as f64 * counts.cycles / counts.instructions.max(1.0);
            let inner_lines = match private_level {
                0 => 1,
                _ => self.machine.levels[private_level - 1].lines,
            };
            let stayed_lines = lines_that_stay(&level, histogram, cycles);
            self.machine.levels[private_level].lines = stayed_lines.max(inner_lines);
        }
    }

    /// The sizes at which the program is walked, in lines: shares of a cache of its own. In one that others fill too,
    /// what it holds depends on its speed, so that only its footprint bounds it.
    fn walked_sizes(&self, smallest_lines: u64, full_lines: u64) -> Vec<u64> {
        let mut sizes = vec![smallest_lines];
        if self.is_pooled() {
            let bound = full_lines.min(self.sample.footprint_lines);
            let doublings = (1..32).map(|doubling| smallest_lines << doubling);
            sizes.extend(doublings.take_while(|lines| *lines < bound));
            sizes.push(full_lines);
        } else {
            let shares = WALKED_SHARES
                .iter()
                .map(|share| (share * full_lines as f64) as u64);
            sizes.extend(shares.filter(|lines| *lines > smallest_lines));
        }
        sizes.dedup();
        sizes
    }

    /// The distances of a stretch if the stream repeats, so that a first touch has the distance of the footprint.
    fn repeated_distances(&self, phase: &StreamPhase) -> DistanceHistogram {
        let largest_distance = self.sample.footprint_lines.saturating_sub(1);
        let known = phase
            .distances
            .iter()
            .map(|&(bound, count)| (bound.min(largest_distance), count));
        DistanceHistogram::new(0, known.chain([(largest_distance, phase.cold_count)]))
    }

    fn walk_at(
        &self,
        phase: &StreamPhase,
        machine: &WalkMachine,
        shared_lines: u64,
        prefetch: bool,
    ) -> Vec<WalkCounts> {
        let options = WalkOptions {
            shared_lines,
            prefetch,
            dependences: self.dependences,
        };
        walk_phase(self.sample, phase, machine, &options)
    }

    /// The rates of a walk whose misses are scaled to `misses` per instruction. `hits` are the counts if everything
    /// hits the contended cache.
    fn rates(&self, counts: WalkCounts, hits: WalkCounts, misses: f64) -> WalkedRates {
        let instructions = counts.instructions.max(1.0);
        let hit_cycles = hits.cycles / hits.instructions.max(1.0);
        let walked_misses = counts.needed_lines() / instructions;
        let store_share = counts.store_misses / counts.needed_lines().max(1.0);
        let writebacks = store_share * misses;

        let (demand_fills, prefetch_fills, stall_cycles) = if walked_misses > 0.0 {
            let scale = misses / walked_misses;
            let prefetched = counts.prefetched_misses + counts.useless_prefetches;
            (
                scale * counts.demand_misses / instructions,
                scale * prefetched / instructions,
                scale * (counts.cycles / instructions - hit_cycles).max(0.0),
            )
        } else {
            // Misses that are too rare for the sample come one at a time.
            (misses, 0.0, misses * self.machine.memory_latency_cycles)
        };
        let reads = demand_fills + prefetch_fills;
        let bus_cycles = (reads + writebacks) * self.machine.cycles_per_line;
        // A read holds one of the bus's slots and of the core's for its latency. The walk sees those of all lines but the
        // ones that are found to have been prefetched only when they are used.
        let fewest_slots = [self.machine.max_bus_reads, self.machine.max_core_reads]
            .into_iter()
            .flatten()
            .min();
        let slot_cycles = match fewest_slots {
            Some(slots) => reads * self.machine.memory_latency_cycles / slots as f64,
            None => 0.0,
        };
        WalkedRates {
            cycles: (hit_cycles + stall_cycles).max(bus_cycles).max(slot_cycles),
            demand_fills,
            prefetch_fills,
            writebacks,
            stall_cycles,
        }
    }

    /// The additional cycles per instruction with half of each private cache, against the walk with all of them.
    fn half_private_cost(
        &self,
        phase: &StreamPhase,
        full_lines: u64,
        whole_counts: WalkCounts,
    ) -> f64 {
        let mut halved = self.machine.clone();
        let private_count = halved.levels.len().saturating_sub(1);
        for level in &mut halved.levels[..private_count] {
            level.lines /= 2;
        }
        let halved_counts = sum_counts(&self.walk_at(phase, &halved, full_lines, true));
        let [halved_cycles, whole_cycles] = [halved_counts, whole_counts]
            .map(|counts| counts.cycles / counts.instructions.max(1.0));
        (halved_cycles - whole_cycles).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a loop of 1,000 lines just stay in a cache of 1,500 if the neighbors fill one line while it touches two,
    /// lose a part at half the speed, and have room for more lines than it has in a larger cache?
    #[test]
    fn a_fast_loop_keeps_more_of_a_cache_that_neighbors_fill() {
        let level = |lines: u64| WalkLevel {
            lines,
            latency_cycles: 10.0,
            neighbor_lines_per_cycle: 0.1,
        };
        let loop_distances = DistanceHistogram::new(0, [(999, 50_000)]);
        assert_eq!(lines_that_stay(&level(1500), &loop_distances, 250e3), 1000);
        assert_eq!(lines_that_stay(&level(1500), &loop_distances, 500e3), 750);
        assert_eq!(lines_that_stay(&level(4000), &loop_distances, 250e3), 4000);
    }
}
