//! Samples a program's stream of accesses in one pass, with the stack distance of each sampled access.
//!
//! Problem: a recording has more accesses than a timing model needs, and its length is not known before its end.
//! Method: systematic sampling. A part of the stream is kept at every multiple of a period; whenever there are twice as
//! many parts as wanted, every second one is dropped and the period doubles. Stretches for the histograms merge in the
//! same way. Stack distances come from the exact engine, so that each part starts with warm caches of every size
//! (functional warming, as in SMARTS). Properties: one pass; memory grows with the number of distinct lines, not with
//! the length; the parts of a stream do not depend on how it is divided into pushes.

use cachemate_core::{
    CoreSamples, CoreStretch, InstructionTiming, MEASURED_ACCESSES, SampledAccess, StreamPhase,
    StreamSample, WARM_UP_ACCESSES,
};

use crate::stack::{COLD, DistanceHistogram, StackDistances, StackError};

/// Minimum number of parts of a long stream; there are less than twice as many.
const MIN_PARTS: usize = 128;
/// Minimum number of stretches of a long stream; there are less than twice as many.
const MIN_PHASES: usize = 4;
/// Accesses of a stretch before stretches merge.
const FIRST_PHASE_ACCESSES: u64 = 1 << 14;
const PART_ACCESSES: u64 = (WARM_UP_ACCESSES + MEASURED_ACCESSES) as u64;
/// Distances below are counted one by one.
const EXACT_DISTANCES: u32 = 64;
/// Buckets per doubling of larger distances, as a power of two.
const BUCKET_BITS: u32 = 5;
const BUCKET_COUNT: usize = EXACT_DISTANCES as usize + (32 - 6) * (1 << BUCKET_BITS);

/// Samples one stream: push its accesses in order, then [`finish`](Self::finish).
#[derive(Debug)]
pub struct StreamSampler {
    engine: StackDistances,
    lines: Vec<u64>,
    distances: Vec<u32>,
    /// Accesses whose distances the engine has not listed yet.
    pending: Vec<SampledAccess>,
    access_count: u64,
    period_accesses: u64,
    /// Position of the next access within its period.
    offset: u64,
    current_part: Vec<SampledAccess>,
    /// Number of the first access of each part, and its accesses.
    parts: Vec<(u64, Vec<SampledAccess>)>,
    phase_accesses: u64,
    phases: Vec<RunningPhase>,
}

#[derive(Clone, Debug)]
struct RunningPhase {
    accesses: u64,
    instructions: u64,
    cold_count: u64,
    counts: Vec<u64>,
}

impl RunningPhase {
    fn new() -> Self {
        RunningPhase {
            accesses: 0,
            instructions: 0,
            cold_count: 0,
            counts: vec![0; BUCKET_COUNT],
        }
    }

    fn merge(&mut self, later: &RunningPhase) {
        self.accesses += later.accesses;
        self.instructions = self.instructions.saturating_add(later.instructions);
        self.cold_count += later.cold_count;
        for (count, other_count) in self.counts.iter_mut().zip(&later.counts) {
            *count += other_count;
        }
    }
}

/// Timing of the stretches that end in a part of the stream, or else of the next one; `None` without any.
fn core_timing_of(
    core: &[CoreStretch],
    start_access: u64,
    end_access: u64,
) -> Option<InstructionTiming> {
    let first = core.partition_point(|stretch| stretch.end_record <= start_access);
    let end = core.partition_point(|stretch| stretch.end_record <= end_access);
    let first = first.min(core.len().checked_sub(1)?);
    let mut timing = InstructionTiming::default();
    core[first..end.max(first + 1)]
        .iter()
        .for_each(|stretch| timing.add(&stretch.timing));
    Some(timing)
}

/// Draws whether a mispredicted branch waits for an access, with the share of its instruction's loads.
fn draw_branch_wait(core: &CoreSamples, number: u64, access: &SampledAccess) -> bool {
    let share = access.site.map_or(0.0, |site| core.waited_share(site));
    !access.is_store && (crate::hash::mix(number) as f64) < share * u64::MAX as f64
}

/// Short distances have a bucket each; longer ones share a bucket with their neighbors.
fn bucket_of(distance: u32) -> usize {
    if distance < EXACT_DISTANCES {
        return distance as usize;
    }
    let exponent = distance.ilog2();
    let mantissa = distance >> (exponent - BUCKET_BITS);
    (EXACT_DISTANCES + ((exponent - EXACT_DISTANCES.ilog2()) << BUCKET_BITS) + mantissa
        - (1 << BUCKET_BITS)) as usize
}

/// The largest distance of the bucket, in lines.
fn bucket_bound(bucket: usize) -> u64 {
    let exact = EXACT_DISTANCES as usize;
    if bucket < exact {
        return bucket as u64;
    }
    let exponent = ((bucket - exact) >> BUCKET_BITS) as u32 + EXACT_DISTANCES.ilog2();
    let mantissa = ((bucket - exact) & ((1 << BUCKET_BITS) - 1)) as u64 + (1 << BUCKET_BITS);
    ((mantissa + 1) << (exponent - BUCKET_BITS)) - 1
}

impl Default for StreamSampler {
    fn default() -> Self {
        StreamSampler::new()
    }
}

impl StreamSampler {
    /// Builds a sampler.
    pub fn new() -> Self {
        StreamSampler {
            engine: StackDistances::new(),
            lines: Vec::new(),
            distances: Vec::new(),
            pending: Vec::new(),
            access_count: 0,
            period_accesses: PART_ACCESSES,
            offset: 0,
            current_part: Vec::new(),
            parts: Vec::new(),
            phase_accesses: FIRST_PHASE_ACCESSES,
            phases: Vec::new(),
        }
    }

    /// Adds the next accesses; their distances are ignored.
    ///
    /// # Errors
    /// The stream has more distinct lines than stack distances support.
    pub fn push(
        &mut self,
        accesses: impl IntoIterator<Item = SampledAccess>,
    ) -> Result<(), StackError> {
        let first_new = self.pending.len();
        self.pending.extend(accesses);
        self.lines.clear();
        self.lines
            .extend(self.pending[first_new..].iter().map(|access| access.line));
        self.engine
            .push_and_list(&self.lines, &mut self.distances)?;
        self.take_listed();
        Ok(())
    }

    /// The sample, and the number of accesses at every distance. `core` is what instructions cost in stretches of the
    /// stream, and what branches wait for, if that is known. Which of an instruction's loads delay a branch is drawn.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(
        mut self,
        line_bytes: u32,
        page_bytes: u32,
        has_dependences: bool,
        core: &CoreSamples,
    ) -> Result<(StreamSample, DistanceHistogram), StackError> {
        let engine = std::mem::take(&mut self.engine);
        let histogram = engine.finish_and_list(&mut self.distances)?;
        self.take_listed();
        if self.current_part.len() > WARM_UP_ACCESSES {
            self.end_part();
        }
        // A last stretch that is much shorter than the others is no stretch of its own.
        if let Some(last_phase) = self.phases.pop() {
            match self.phases.last_mut() {
                Some(previous_phase) if last_phase.accesses < self.phase_accesses / 2 => {
                    previous_phase.merge(&last_phase)
                }
                _ => self.phases.push(last_phase),
            }
        }
        let mut end_access = 0;
        let mut remaining_parts = self.parts.into_iter().peekable();
        let phase_count = self.phases.len();
        let mut phases = Vec::with_capacity(phase_count);
        for (index, phase) in self.phases.into_iter().enumerate() {
            let start_access = end_access;
            end_access += phase.accesses;
            let is_last = index + 1 == phase_count;
            let mut parts = Vec::new();
            while let Some((start, mut part)) =
                remaining_parts.next_if(|(start, _)| is_last || *start < end_access)
            {
                for (number, access) in (start..).zip(&mut part) {
                    access.delays_branch = draw_branch_wait(core, number, access);
                }
                parts.push(part);
            }
            let counted = (0..).zip(phase.counts).filter(|&(_, count)| count > 0);
            phases.push(StreamPhase {
                core: core_timing_of(&core.stretches, start_access, end_access),
                instructions: phase.instructions,
                cold_count: phase.cold_count,
                distances: counted
                    .map(|(bucket, count)| (bucket_bound(bucket), count))
                    .collect(),
                parts,
            });
        }
        let sample = StreamSample {
            line_bytes,
            page_bytes,
            footprint_lines: histogram.cold_count(),
            has_dependences,
            phases,
        };
        Ok((sample, histogram))
    }

    /// Takes in the accesses whose distances are known.
    fn take_listed(&mut self) {
        let distances = std::mem::take(&mut self.distances);
        let pending = std::mem::take(&mut self.pending);
        for (access, &distance) in pending.iter().zip(&distances) {
            self.count(access, distance);
            if self.offset < PART_ACCESSES {
                self.current_part.push(SampledAccess {
                    distance: (distance != COLD).then_some(u64::from(distance)),
                    ..*access
                });
                if self.current_part.len() as u64 == PART_ACCESSES {
                    self.end_part();
                }
            }
            self.access_count += 1;
            self.offset += 1;
            if self.offset == self.period_accesses {
                self.offset = 0;
            }
        }
        self.pending = pending;
        self.pending.drain(..distances.len());
        self.distances = distances;
        self.distances.clear();
    }

    #[inline(always)]
    fn count(&mut self, access: &SampledAccess, distance: u32) {
        let is_full = |phase: &RunningPhase| phase.accesses == self.phase_accesses;
        if self.phases.last().is_none_or(is_full) {
            self.start_phase();
        }
        let Some(phase) = self.phases.last_mut() else {
            return;
        };
        phase.accesses += 1;
        phase.instructions = phase.instructions.saturating_add(access.gap);
        if distance == COLD {
            phase.cold_count += 1;
        } else {
            phase.counts[bucket_of(distance)] += 1;
        }
    }

    #[cold]
    fn start_phase(&mut self) {
        if self.phases.len() == 2 * MIN_PHASES {
            for index in 0..MIN_PHASES {
                let later_phase = self.phases.remove(index + 1);
                self.phases[index].merge(&later_phase);
            }
            self.phase_accesses *= 2;
        }
        self.phases.push(RunningPhase::new());
    }

    fn end_part(&mut self) {
        let part = std::mem::take(&mut self.current_part);
        let start = (self.access_count / self.period_accesses) * self.period_accesses;
        self.parts.push((start, part));
        if self.parts.len() == 2 * MIN_PARTS {
            let mut index = 0;
            self.parts.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.offset = self.access_count % (2 * self.period_accesses);
            self.period_accesses *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accesses(count: u64) -> impl Iterator<Item = SampledAccess> {
        (0..count).map(|index| SampledAccess {
            line: index * 7919 % 5000,
            gap: 1 + index % 3,
            ..SampledAccess::default()
        })
    }

    fn sample_of(count: u64, push_len: usize) -> (StreamSample, DistanceHistogram) {
        let mut sampler = StreamSampler::new();
        let all: Vec<SampledAccess> = accesses(count).collect();
        for some in all.chunks(push_len) {
            sampler.push(some.iter().copied()).unwrap();
        }
        sampler
            .finish(64, 4096, false, &CoreSamples::default())
            .unwrap()
    }

    /// Is the sample the same however the stream is divided into pushes, for lengths around each doubling of the
    /// period?
    #[test]
    fn parts_do_not_depend_on_pushes() {
        for count in [0, 1, 127, 500, 98_303, 98_304, 98_305, 150_000, 400_001] {
            let (whole, histogram) = sample_of(count, 1 << 20);
            for push_len in [1, 100, 4096] {
                assert_eq!(
                    sample_of(count, push_len),
                    (whole.clone(), histogram.clone())
                );
            }
            let accesses_of = |phase: &StreamPhase| {
                phase.cold_count + phase.distances.iter().map(|(_, count)| count).sum::<u64>()
            };
            let counted: u64 = whole.phases.iter().map(accesses_of).sum();
            assert_eq!(counted, count);
            let instructions: u64 = whole.phases.iter().map(|phase| phase.instructions).sum();
            assert_eq!(instructions, accesses(count).map(|access| access.gap).sum());
        }
    }

    /// Are parts spread over the whole stream at equal distances, with the distances that the accesses have in the
    /// whole stream?
    #[test]
    fn parts_are_spread_evenly_with_their_distances() {
        let (sample, histogram) = sample_of(1_000_000, 1 << 16);
        let parts: Vec<&Vec<SampledAccess>> = sample
            .phases
            .iter()
            .flat_map(|phase| &phase.parts)
            .collect();
        assert!((MIN_PARTS..2 * MIN_PARTS).contains(&parts.len()));
        assert!((MIN_PHASES..=2 * MIN_PHASES).contains(&sample.phases.len()));
        let per_phase: Vec<usize> = sample
            .phases
            .iter()
            .map(|phase| phase.parts.len())
            .collect();
        assert!(per_phase.iter().all(|&count| count > 10), "{per_phase:?}");
        let known = parts.iter().flat_map(|part| part.iter()).skip(384);
        assert!(known.clone().count() > 40_000);
        assert!(
            known
                .into_iter()
                .all(|access| access.distance == Some(4999))
        );
        assert_eq!(histogram.misses_at(4999), 1_000_000);
    }

    /// Does each part of the stream have the timing of the stretches that end in it, of the next one if none does, and
    /// the whole all of them?
    #[test]
    fn parts_have_the_core_timing_of_their_stretches() {
        let stretch = |end_record: u64| CoreStretch {
            end_record,
            timing: InstructionTiming {
                instructions: end_record,
                ..InstructionTiming::default()
            },
        };
        let core = [10, 20, 90].map(stretch);
        let instructions = |start, end| core_timing_of(&core, start, end).unwrap().instructions;
        assert_eq!(instructions(0, 20), 30);
        assert_eq!(instructions(20, 50), 90);
        assert_eq!(instructions(90, 100), 90);
        assert_eq!(instructions(0, 100), 120);
        assert_eq!(core_timing_of(&[], 0, 100), None);
    }

    /// Does every distance lie in a bucket that ends at it or at most 1/32 above?
    #[test]
    fn buckets_are_narrow_and_in_order() {
        let mut previous_bucket = 0;
        let near_powers = (6..32).flat_map(|bits| [(1u64 << bits) - 1, 1 << bits, (1 << bits) + 5]);
        for distance in (0..5000).chain(near_powers) {
            let bucket = bucket_of(distance as u32);
            let bound = bucket_bound(bucket);
            assert!(
                bound >= distance && bound - distance <= distance / 32,
                "{distance} {bound}"
            );
            assert!(bucket >= previous_bucket || distance < 5000);
            previous_bucket = bucket;
        }
        assert!(bucket_of(u32::MAX - 1) < BUCKET_COUNT);
    }
}
