//! Makes programs for the interval machine from samples of their accesses, by walks of the machine's window.
//!
//! Problem: cycles, overlap and prefetches of a program have to be known at every size of the contended cache, on any
//! machine, in a moment. Method: [`cachemate_locality::window_walk`] gives them for the sampled accesses at eight sizes.
//! Misses are not left to the sample: the stack distances of all accesses say how many there are, and the walk only says
//! what each costs (a ratio estimator). Between the sizes, rates follow the misses ([`super::set_means`]). Properties: pure;
//! the same sample and machine give the same program, whether the sample comes from a recording or from a profile file.

use cachemate_core::{MachineSpec, StreamPhase, StreamSample};
use cachemate_interval::{Demand, PhasedProgram, ProgramPhase, SizePoint, UnprefetchedRates};
use cachemate_locality::stack::DistanceHistogram;
use cachemate_locality::window_walk::{
    DependenceRule, WalkCounts, WalkMachine, WalkOptions, sampling_error_share, sum_counts,
    walk_phase,
};

use super::set_means::points_by_distances;
use crate::Result;
use crate::setup::failed;

/// Shares of the contended cache at which the program is walked: halves, and one more between each of the three largest,
/// because a working set often ends there.
const WALKED_SHARES: [f64; 7] = [0.0625, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0];
/// Number of sizes at which the interval machine tabulates rates.
const TABULATED_SIZE_COUNT: f64 = 64.0;
/// Minimum instructions of a round through the phases.
const MIN_ROUND_INSTR: f64 = 4e6;
/// Lines of a cache in which everything hits.
const UNLIMITED_LINES: u64 = u64::MAX / 4;

/// A program with the standard error of its cycles that sampling leaves, relative to them.
pub struct WalkedProgram {
    pub program: PhasedProgram,
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
) -> Result<WalkedProgram> {
    let walk_machine = WalkMachine::from_machine(machine)
        .ok_or_else(|| failed(&machine.name)("no data cache to share"))?;
    let line_bytes = machine
        .last_level_cache()
        .map_or(0, |cache| cache.line_bytes);
    if line_bytes != sample.line_bytes {
        let message = format!(
            "found a sample of lines of {} bytes, expected {line_bytes}: profile the recording with --machine",
            sample.line_bytes
        );
        return Err(failed(name)(message));
    }
    let walker = PhaseWalker {
        sample,
        machine: &walk_machine,
        dependences,
    };
    let walked_phases = sample
        .phases
        .iter()
        .filter(|phase| phase.instructions > 0 && !phase.parts.is_empty());
    let (mut phases, mut error_squares, mut cycles) = (Vec::new(), 0.0, 0.0);
    for phase in walked_phases {
        let (program_phase, error_share) = walker.walk(phase);
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

/// Lengthens the phases of a short program until a round of them has [`MIN_ROUND_INSTR`]: a forecast lasts many cycles, and
/// each change of a phase is an event.
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

struct PhaseWalker<'a> {
    sample: &'a StreamSample,
    machine: &'a WalkMachine,
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
    /// Returns the phase, and the standard error of its cycles with the whole cache.
    fn walk(&self, phase: &StreamPhase) -> (ProgramPhase, f64) {
        let line_bytes = f64::from(self.sample.line_bytes);
        let histogram = self.repeated_distances(phase);
        let full_lines = self.machine.levels.last().map_or(1, |level| level.lines);
        let private_lines = self.machine.private_lines();
        let mut sizes: Vec<u64> = WALKED_SHARES
            .iter()
            .map(|share| (share * full_lines as f64) as u64)
            .filter(|lines| *lines > private_lines)
            .collect();
        sizes.insert(0, private_lines.max(1).min(full_lines));
        sizes.dedup();
        let walk_at =
            |lines: u64, prefetch: bool| self.walk_at(phase, self.machine, lines, prefetch);
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
                &histogram,
                step_bytes,
                u64::from(self.sample.line_bytes),
            ),
            footprint_bytes: None,
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

    /// Returns the distances of a stretch if the stream repeats, so that a first touch has the distance of the footprint.
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

    /// Returns the rates of a walk whose misses are scaled to `misses` per instruction. `hits` are the counts if everything
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
        let lines = demand_fills + prefetch_fills + writebacks;
        WalkedRates {
            cycles: (hit_cycles + stall_cycles).max(lines * self.machine.cycles_per_line),
            demand_fills,
            prefetch_fills,
            writebacks,
            stall_cycles,
        }
    }

    /// Returns the additional cycles per instruction with half of each private cache, against the walk with all of them.
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
    use crate::run_request::solo_run;
    use crate::workload::{Workload, WorkloadJob};
    use cachemate_core::{BatchEnd, FAR_DEPENDENCE, SampledAccess};
    use cachemate_locality::cachesim::{CacheGeometry, CacheSim, Replacement};
    use cachemate_locality::stream_sampler::StreamSampler;
    use cachemate_sim::machine::SimOptions;
    use std::collections::VecDeque;

    /// A first-level cache whose misses a recording contains, and for each of the latest accesses before it the recorded
    /// access that its value depends on.
    struct RecordingFilter {
        cache: CacheSim,
        sources: VecDeque<Option<u64>>,
        kept_count: u64,
    }

    impl RecordingFilter {
        fn new() -> Self {
            let geometry = CacheGeometry {
                sets: 64,
                ways: 8,
                slices: 1,
            };
            RecordingFilter {
                cache: CacheSim::new(geometry, Replacement::Lru).unwrap(),
                sources: VecDeque::new(),
                kept_count: 0,
            }
        }

        /// Returns the access with the dependence that its record states; `None` if it hits the filter.
        fn pass(&mut self, access: SampledAccess) -> Option<SampledAccess> {
            let back = usize::from(access.dependence);
            let source = self.sources.len().checked_sub(back).filter(|_| back > 0);
            let source = source.and_then(|index| self.sources.get(index).copied().flatten());
            let is_kept = self.cache.push(&[access.line]) > 0;
            let value_source = if is_kept {
                Some(self.kept_count)
            } else {
                source
            };
            self.sources.push_back(value_source);
            if self.sources.len() > usize::from(u8::MAX) {
                self.sources.pop_front();
            }
            if !is_kept {
                return None;
            }

            let dependence = source.map_or(0, |source| {
                (self.kept_count - source).min(u64::from(FAR_DEPENDENCE)) as u8
            });
            self.kept_count += 1;
            Some(SampledAccess {
                dependence,
                ..access
            })
        }
    }

    /// Samples the first instructions of a simulated program as a recording of it would be sampled; its dependences are
    /// those of its algorithm. First touches count as misses at every size, because the run that is compared begins with
    /// empty caches.
    fn sample_program(job: &WorkloadJob, until_instr: f64) -> StreamSample {
        let mut sampler = StreamSampler::new();
        let mut filter = RecordingFilter::new();
        let mut source = job.start_threads(0).unwrap().remove(0);
        let (mut batch, mut instructions, mut gap) = (Vec::new(), 0u64, 0u64);
        let mut since_load = 0u8;
        while (instructions as f64) < until_instr {
            batch.clear();
            let batch_end = source.next_batch(&mut batch);
            let mut accesses = Vec::new();
            for access in &batch {
                instructions += access.instructions();
                gap += access.instructions();
                if !access.is_data() {
                    continue;
                }
                let dependence = if access.is_dependent() { since_load } else { 0 };
                since_load = if access.is_store() {
                    since_load.saturating_add(u8::from(since_load > 0))
                } else {
                    1
                };
                let sampled = SampledAccess {
                    line: access.address() / 64,
                    gap,
                    is_store: access.is_store(),
                    dependence,
                    ..SampledAccess::default()
                };
                if let Some(recorded) = filter.pass(sampled) {
                    accesses.push(recorded);
                    gap = 0;
                }
            }
            sampler.push(accesses).unwrap();
            assert!(matches!(batch_end, BatchEnd::More), "{} sleeps", job.name);
        }
        let (sample, _) = sampler.finish(64, 4096, true).unwrap();
        StreamSample {
            footprint_lines: 1 << 40,
            ..sample
        }
    }

    /// Are cycles per instruction those of the cycle-level machine within 12 % in the mean, for programs of every kind on two
    /// machines, none of which the walk was fitted to? The largest errors are those of streams that are prefetched.
    #[test]
    fn walks_come_near_the_cycles_of_the_cycle_level_machine() {
        let (mut errors, mut report) = (Vec::new(), String::new());
        for machine_name in ["opteron-2350", "xeon-x5365-4"] {
            for program in [
                "art", "swim", "mcf-2006", "twolf", "vpr", "soplex", "equake", "bzip2",
            ] {
                let job = WorkloadJob::new(program, 7).with_cpus([0].into_iter().collect());
                let workload = Workload {
                    options: SimOptions {
                        seed: 7,
                        is_resident: true,
                        ..SimOptions::default()
                    },
                    ..Workload::from_machine_name(machine_name, vec![job.clone()], 7).unwrap()
                }
                .with_length(0, 6_000_000);
                let (range, rates) = solo_run(&workload).unwrap();
                let sample = sample_program(&job, range.to_instr);
                let walked = walk_sample(
                    program,
                    &sample,
                    &workload.machine,
                    DependenceRule::Recorded,
                )
                .unwrap();
                let instructions: f64 = walked
                    .program
                    .phases
                    .iter()
                    .filter_map(|phase| phase.instructions)
                    .sum();
                let total = |rate: fn(&SizePoint) -> f64| {
                    let phases = walked.program.phases.iter();
                    let products = phases
                        .filter_map(|phase| Some(rate(phase.points.last()?) * phase.instructions?));
                    products.sum::<f64>() / instructions
                };
                let found = total(|point| point.cycles_per_instr);
                let expected = 1.0 / rates.instr_per_cycle;
                let error = found / expected - 1.0;
                report += &format!(
                    "{machine_name} {program}: {found:.3} for {expected:.3}, {:.1} %; sampling {:.1} %; MPKI {:.2} + {:.2} for {:.2}\n",
                    100.0 * error,
                    100.0 * walked.sampling_error_share,
                    1000.0 * total(|point| point.demand_fills_per_instr),
                    1000.0 * total(|point| point.prefetch_fills_per_instr),
                    rates.misses_per_kilo_instr,
                );
                errors.push(error.abs());
            }
        }
        let mean_error = crate::mean(&errors);
        assert!(mean_error < 0.12, "{mean_error}\n{report}");
    }
}
