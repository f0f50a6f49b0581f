//! A program with its solo timing, whichever way it came in.

use std::path::Path;

use cachemate_core::{CoreSamples, MachineSpec, StreamSample};
use cachemate_interval::PhasedProgram;
use cachemate_locality::stream_sampler::StreamSampler;
use cachemate_locality::window_walk::DependenceRule;
use cachemate_trace::{CmtReader, ProfileFile, TraceReader};
use serde::{Deserialize, Serialize};

use crate::prior::{self, TimingPrior};
use crate::set_means;
use crate::walked::walk_sample;
use crate::{ForecastResult, failed};

/// The source of a program's timing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimingBasis {
    /// A walk of the window over a sample that states which loads wait for which.
    Dependences,
    /// The same, over a sample whose loads are assumed to wait for no other.
    AssumedIndependence,
    /// A prior for cycles and overlap, because the input has no sample.
    Prior,
}

impl TimingBasis {
    /// A clause without a period, for output.
    pub fn describe(self) -> &'static str {
        match self {
            TimingBasis::Dependences => {
                "cycles and overlap walked from the recording, with the loads that wait for others"
            }
            TimingBasis::AssumedIndependence => {
                "cycles and overlap walked from the recording; it states no dependences, so misses are assumed to overlap, \
                 and the interval covers a program of which every second load waits for the one before \
                 ('cachemate record' of this version states them)"
            }
            TimingBasis::Prior => {
                "cycles and overlap from a prior, because the input has no sample of the accesses with instruction counts \
                 ('cachemate profile' of a .cmt recording without bursts writes one)"
            }
        }
    }
}

/// A program with its solo timing.
#[derive(Clone, PartialEq, Debug)]
pub struct TimedProgram {
    /// The program, once for each draw of its timing; a known timing has one draw.
    pub(crate) timed_draws: Vec<PhasedProgram>,
    /// The source of the timing.
    pub basis: TimingBasis,
    /// One standard error of the solo cycles that sampling leaves, relative to them.
    pub(crate) sampling_error_share: f64,
}

const PRIOR_DRAW_COUNT: usize = 15;

impl TimedProgram {
    /// Times a recording by a walk over a sample of its accesses.
    ///
    /// # Errors
    /// The recording cannot be read, does not count instructions, or has pauses, whose distances are unknown.
    pub fn from_recording(
        name: &str,
        recording: &Path,
        machine: &MachineSpec,
    ) -> ForecastResult<Self> {
        let line_bytes = machine
            .last_level_cache()
            .map_or(64, |cache| cache.line_bytes);
        let mut reader = CmtReader::open(recording).map_err(failed(name))?;
        reader
            .header()
            .check_lines(line_bytes)
            .map_err(failed(name))?;
        if reader
            .totals()
            .is_some_and(|totals| !totals.bursts.is_empty())
        {
            return Err(failed(name)(
                "found a recording in bursts, expected one without gaps",
            ));
        }
        let (mut sampler, mut records) = (StreamSampler::new(), Vec::new());
        while reader.read_batch(&mut records).map_err(failed(name))? {
            let accesses = records
                .iter()
                .map(|record| record.to_sampled(line_bytes.trailing_zeros()));
            sampler.push(accesses).map_err(failed(name))?;
        }

        let core = reader
            .totals()
            .map_or(CoreSamples::default(), |totals| totals.core.clone());
        let header = reader.header();
        if !header.instructions_known {
            return Err(failed(name)("found no instruction counts, expected them"));
        }
        let page_bytes = header.page_bytes.max(line_bytes);
        let (sample, _) = sampler
            .finish(line_bytes, page_bytes, header.has_dependences, &core)
            .map_err(failed(name))?;
        TimedProgram::from_sample(name, &sample, machine)
    }

    /// Times a sampled program by walks of the machine's window.
    ///
    /// # Errors
    /// The machine has no data cache, or other lines than the sample.
    pub fn from_sample(
        name: &str,
        sample: &StreamSample,
        machine: &MachineSpec,
    ) -> ForecastResult<Self> {
        let walk_by = |rule| walk_sample(name, sample, machine, rule);
        if sample.has_dependences {
            let walk = walk_by(DependenceRule::Recorded)?;
            return Ok(TimedProgram {
                timed_draws: vec![walk.program],
                basis: TimingBasis::Dependences,
                sampling_error_share: walk.sampling_error_share,
            });
        }

        let independent = walk_by(DependenceRule::Independent)?;
        let half_chained = walk_by(DependenceRule::HalfChained)?;
        // The median of the draws is that of independent loads.
        Ok(TimedProgram {
            timed_draws: vec![
                independent.program.clone(),
                independent.program,
                half_chained.program,
            ],
            basis: TimingBasis::AssumedIndependence,
            sampling_error_share: independent.sampling_error_share,
        })
    }

    /// A program whose solo timing is known.
    pub fn from_phases(program: PhasedProgram) -> Self {
        TimedProgram {
            timed_draws: vec![program],
            basis: TimingBasis::Dependences,
            sampling_error_share: 0.0,
        }
    }

    /// Instructions and solo cycles of one round through the program's phases; `None` if a phase is endless.
    pub fn solo_round(&self) -> Option<(f64, f64)> {
        let phases = self.timed_draws[self.median_draw()].phases.iter();
        phases
            .map(|phase| Some((phase.instructions?, phase.points.last()?.cycles_per_instr)))
            .try_fold((0.0, 0.0), |(instructions, cycles), phase| {
                let (round_instr, cycles_per_instr) = phase?;
                Some((
                    instructions + round_instr,
                    cycles + round_instr * cycles_per_instr,
                ))
            })
    }

    /// Times a profile's program: from its sample, or else from the prior.
    ///
    /// # Errors
    /// The profile has neither a sample nor a miss curve with references per instruction, or its sample has other
    /// lines.
    pub fn from_profile(file: &ProfileFile, machine: &MachineSpec) -> ForecastResult<Self> {
        match &file.sample {
            Some(sample) => TimedProgram::from_sample(&file.program, sample, machine),
            None => TimedProgram::from_prior(file, machine),
        }
    }

    /// Times a profile's program from the prior.
    ///
    /// # Errors
    /// The profile has no miss curve, or no references per instruction.
    pub fn from_prior(file: &ProfileFile, machine: &MachineSpec) -> ForecastResult<Self> {
        let program_of_draw = |index: usize| {
            prior::from_file_with(file, machine, &TimingPrior::draw(index, PRIOR_DRAW_COUNT))
        };
        Ok(TimedProgram {
            timed_draws: (0..PRIOR_DRAW_COUNT)
                .map(program_of_draw)
                .collect::<ForecastResult<_>>()?,
            basis: TimingBasis::Prior,
            sampling_error_share: 0.0,
        })
    }

    /// The index of the draw with the median timing.
    pub const fn median_draw(&self) -> usize {
        self.timed_draws.len() / 2
    }

    /// The program with one draw of its timing, for a cache that others share.
    pub fn sharing_program(&self, draw_index: usize, machine: &MachineSpec) -> PhasedProgram {
        let mut program = self.timed_draws[draw_index % self.timed_draws.len()].clone();
        if let Some(cache) = machine.last_level_cache() {
            for phase in &mut program.phases {
                phase.points = set_means::average_over_sets(&phase.points, cache);
            }
        }
        program
    }
}

#[cfg(test)]
mod tests {
    use cachemate_trace::{AccessRecord, CmtWriter, L1Filter, TraceHeader, TraceTotals};

    use super::*;

    /// Is a recording refused whose accesses do not have the distances of the program: with pauses, or behind a filter of larger
    /// lines than the cache's?
    #[test]
    fn recordings_without_the_programs_distances_are_refused() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let problem_of = |bursts: Vec<u64>, line_bytes: u32| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let header = TraceHeader {
                filter: Some(L1Filter {
                    line_bytes,
                    ..L1Filter::default()
                }),
                ..TraceHeader::for_import("a", true)
            };
            let mut writer = CmtWriter::new(file.reopen().unwrap(), "a", &header, 1).unwrap();
            let record = |number: u64| AccessRecord {
                address: number * 64,
                gap: 10,
                ..AccessRecord::default()
            };
            writer
                .push_all(&Vec::from_iter((0..500).map(record)))
                .unwrap();
            let totals = TraceTotals {
                bursts,
                ..TraceTotals::default()
            };
            writer.finish(totals).unwrap();
            let timed = TimedProgram::from_recording("a", file.path(), &machine);
            timed.err().map(|failure| failure.reason)
        };
        assert_eq!(problem_of(Vec::new(), 64), None);
        let pauses = problem_of(vec![0, 250], 64).unwrap();
        assert!(pauses.contains("found a recording in bursts"), "{pauses}");
        let lines = problem_of(Vec::new(), 128).unwrap();
        assert!(lines.contains("expected at least the 128"), "{lines}");
    }
}
