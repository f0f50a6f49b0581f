//! A sample of a program's accesses with their stack distances, from which its timing on any machine follows.
//!
//! Problem: cycles, overlap and prefetches depend on the machine, so no figure of one machine describes a program on
//! another. Method: parts of the stream are kept as they are, at regular positions (systematic sampling, SMARTS:
//! Wunderlich, Wenisch, Falsafi and Hoe, ISCA 2003). Each access has the stack distance that it has in the whole
//! stream, so that caches of any size are warm at the start of a part. The distances of all accesses are kept as well,
//! because counts of misses need no sample. Properties: a part begins with accesses that only fill the window and train
//! prefetchers; a short stream is kept whole.

use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

/// Accesses at the start of each part that are not measured.
pub const WARM_UP_ACCESSES: usize = 128;
/// Measured accesses of each part.
pub const MEASURED_ACCESSES: usize = 256;
/// A dependence that lies further back than can be stated.
pub const FAR_DEPENDENCE: u8 = u8::MAX;

/// Reorder windows, in instructions, for which [`InstructionTiming`] has cycles.
pub const CORE_WINDOWS: [u32; 5] = [32, 64, 128, 256, 512];

/// What instructions cost a core of unlimited width while all data hits the first cache: their chains of dependences,
/// within a reorder window, and what waits behind mispredicted branches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct InstructionTiming {
    /// Timed instructions.
    pub instructions: u64,
    /// Their cycles for each window of [`CORE_WINDOWS`], without refilling the pipeline after a mispredicted branch.
    pub cycles: [u64; CORE_WINDOWS.len()],
    /// Mispredicted branches among them.
    pub mispredicted: u64,
    /// Lines of code that missed a first-level cache of 32 KiB; `None` in recordings that do not count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfetched: Option<u64>,
}

impl InstructionTiming {
    /// Counts are summed; `unfetched` is unknown if it is for either side's instructions.
    pub fn add(&mut self, other: &InstructionTiming) {
        self.unfetched = match (self.unfetched, other.unfetched) {
            (Some(own), Some(more)) => Some(own.saturating_add(more)),
            (None, more) if self.instructions == 0 => more,
            (own, None) if other.instructions == 0 => own,
            _ => None,
        };
        self.instructions = self.instructions.saturating_add(other.instructions);
        self.mispredicted = self.mispredicted.saturating_add(other.mispredicted);
        for (cycles, more) in self.cycles.iter_mut().zip(other.cycles) {
            *cycles = cycles.saturating_add(more);
        }
    }

    /// The cycles per instruction of a core: those of the chains in its window, but no fewer than its width allows,
    /// `refill_cycles` for each mispredicted branch, and `fetch_cycles` for each line of code that missed (Karkhanis
    /// and Smith, ISCA 2004). Between two windows, cycles are interpolated over their logarithm; beyond the last ones
    /// they are those of the last. `None` without instructions.
    pub fn cycles_per_instr(
        &self,
        issue_width: f64,
        window_instr: f64,
        refill_cycles: f64,
        fetch_cycles: f64,
    ) -> Option<f64> {
        if self.instructions == 0 {
            return None;
        }

        let instructions = self.instructions as f64;
        let last = CORE_WINDOWS.len() - 1;
        let position =
            libm::log2((window_instr / f64::from(CORE_WINDOWS[0])).max(1.0)).min(last as f64);
        let below = position as usize;
        let above = (below + 1).min(last);
        let [low, high] = [below, above].map(|window| self.cycles[window] as f64 / instructions);
        let chains = low + (position - below as f64) * (high - low);
        let refills = refill_cycles * self.mispredicted as f64 / instructions;
        let fetches = fetch_cycles * self.unfetched.unwrap_or(0) as f64 / instructions;
        Some(chains.max(1.0 / issue_width) + refills + fetches)
    }
}

/// The timing of a stretch of a recording.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CoreStretch {
    /// Number of records of the recording up to the end of the stretch.
    pub end_record: u64,
    /// What instructions of the stretch cost.
    pub timing: InstructionTiming,
}

/// Loads of one instruction that missed the recorder's filter, in the samples of [`InstructionTiming`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BranchLoads {
    /// A hash of the instruction, as in [`SampledAccess`].
    pub site: NonZeroU16,
    /// Loads.
    pub loads: u64,
    /// Those for whose value a mispredicted branch waited.
    pub waited: u64,
}

/// What a recording tells of the core that it ran on.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CoreSamples {
    /// What instructions cost between misses, in stretches in the order of the records; empty if unknown.
    pub stretches: Vec<CoreStretch>,
    /// Loads by the instruction that makes them, in ascending order of the site.
    pub branch_loads: Vec<BranchLoads>,
}

impl CoreSamples {
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.stretches.is_empty() && self.branch_loads.is_empty()
    }

    /// The share of an instruction's loads for which a mispredicted branch waits; 0 if none was seen.
    pub fn waited_share(&self, site: NonZeroU16) -> f64 {
        let found = self
            .branch_loads
            .binary_search_by_key(&site, |loads| loads.site);
        match found {
            Ok(index) => {
                let loads = &self.branch_loads[index];
                loads.waited as f64 / (loads.loads as f64).max(1.0)
            }
            Err(_) => 0.0,
        }
    }
}

/// One access of a sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SampledAccess {
    /// Line address.
    pub line: u64,
    /// Distinct lines since the line was last touched; `None` for a first touch.
    pub distance: Option<u64>,
    /// Instructions that the thread executed since its previous access, including the one that makes this access.
    pub gap: u64,
    /// The thread.
    pub thread: u32,
    /// Whether the access writes.
    pub is_store: bool,
    /// Number of the thread's accesses back to the youngest load on which the address depends: 0 if there is none,
    /// [`FAR_DEPENDENCE`] if it is further back than 254.
    pub dependence: u8,
    /// A hash of the instruction that makes the access; `None` if unknown.
    pub site: Option<NonZeroU16>,
    /// Whether a mispredicted branch waits for the value that it loads.
    pub delays_branch: bool,
}

/// A stretch of the stream.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StreamPhase {
    /// Instructions of all threads.
    pub instructions: u64,
    /// First touches.
    pub cold_count: u64,
    /// (stack distance, inclusive upper bound of a bucket; accesses), ascending.
    pub distances: Vec<(u64, u64)>,
    /// What instructions cost between two misses; `None` if the recording does not state it.
    pub core: Option<InstructionTiming>,
    /// Parts of the stretch: [`WARM_UP_ACCESSES`], and then [`MEASURED_ACCESSES`] or, at its end, fewer.
    pub parts: Vec<Vec<SampledAccess>>,
}

/// A program's stream of accesses, sampled.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StreamSample {
    /// Line size in bytes.
    pub line_bytes: u32,
    /// Page size in bytes.
    pub page_bytes: u32,
    /// Distinct lines of the whole stream.
    pub footprint_lines: u64,
    /// Whether dependences between loads are recorded.
    pub has_dependences: bool,
    /// The stream in order, in stretches of about equally many accesses.
    pub phases: Vec<StreamPhase>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a core take the time of the chains in its window, of its width if that is longer, of its mispredicted
    /// branches and of code that misses, and is a window between two of the counted ones between them?
    #[test]
    fn cycles_follow_window_width_and_branches() {
        let timing = InstructionTiming {
            instructions: 1000,
            cycles: [800, 600, 400, 200, 100],
            mispredicted: 10,
            unfetched: None,
        };
        let cycles = |width, window| timing.cycles_per_instr(width, window, 20.0, 9.0).unwrap();
        assert!((cycles(4.0, 64.0) - (0.6 + 0.2)).abs() < 1e-12);
        assert!((cycles(4.0, 512.0) - (0.25 + 0.2)).abs() < 1e-12);
        assert!((cycles(8.0, 90.509_667_991_878_1) - (0.5 + 0.2)).abs() < 1e-9);
        assert!((cycles(8.0, 8.0) - (0.8 + 0.2)).abs() < 1e-12);
        assert!((cycles(64.0, 1e9) - (0.1 + 0.2)).abs() < 1e-12);

        let from_second_level = InstructionTiming {
            unfetched: Some(30),
            ..timing
        };
        let fetching = from_second_level.cycles_per_instr(4.0, 64.0, 20.0, 9.0);
        assert!((fetching.unwrap() - (0.6 + 0.2 + 0.27)).abs() < 1e-12);
        assert_eq!(
            InstructionTiming::default().cycles_per_instr(4.0, 64.0, 20.0, 9.0),
            None
        );
    }

    /// Do misses of code add up, and are they unknown if those of a part are?
    #[test]
    fn misses_of_code_are_unknown_if_a_part_did_not_count_them() {
        let timing = |instructions, unfetched| InstructionTiming {
            instructions,
            unfetched,
            ..InstructionTiming::default()
        };
        let sum = |parts: &[InstructionTiming]| {
            let mut sum = InstructionTiming::default();
            parts.iter().for_each(|part| sum.add(part));
            sum.unfetched
        };
        let (counted, uncounted) = (timing(10, Some(3)), timing(10, None));
        assert_eq!(sum(&[counted, counted]), Some(6));
        assert_eq!(sum(&[counted, uncounted]), None);
        assert_eq!(sum(&[uncounted, counted]), None);
    }
}
