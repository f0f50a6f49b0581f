//! A program with known phases: it alternates between two programs of the table after a fixed number of instructions.

use std::collections::VecDeque;

use cachemate_core::{Access, AccessKind, AccessSource, BatchEnd};
use cachemate_sim::kernels;
use cachemate_sim::machine::SimProgram;

use crate::Result;
use crate::setup::failed;

/// The thesis's interval of 10^9 instructions at this scale.
pub(super) const INSTRUCTION_SCALE: f64 = 4_000.0;
pub(super) const INTERVAL_INSTRUCTIONS: f64 = 1e9 / INSTRUCTION_SCALE;
pub(super) const INTERVALS_PER_PHASE: usize = 8;

/// Distance between the address ranges of the programs, far larger than any of them.
const PROGRAM_ADDRESS_DISTANCE: u64 = 1 << 46;

/// Alternates between single-threaded programs, each of which continues where it stopped.
struct AlternatingSource {
    programs: Vec<(Box<dyn AccessSource>, VecDeque<Access>)>,
    phase_instructions: u64,
    active_program: usize,
    remaining_instr: u64,
}

impl AccessSource for AlternatingSource {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        let offset = PROGRAM_ADDRESS_DISTANCE * self.active_program as u64;
        let (source, pending) = &mut self.programs[self.active_program];
        if pending.is_empty() {
            let mut source_batch = Vec::new();
            let batch_end = source.next_batch(&mut source_batch);
            pending.extend(source_batch);
            if pending.is_empty() {
                return batch_end;
            }
        }

        while let Some(access) = pending.pop_front() {
            batch.push(offset_access(access, offset));
            self.remaining_instr = self.remaining_instr.saturating_sub(access.instructions());
            if self.remaining_instr == 0 {
                self.active_program = (self.active_program + 1) % self.programs.len();
                self.remaining_instr = self.phase_instructions;
                break;
            }
        }
        BatchEnd::More
    }
}

fn offset_access(access: Access, offset: u64) -> Access {
    match access.kind() {
        AccessKind::Compute => access,
        kind => Access::new(
            kind,
            access.address() + offset,
            access.gap(),
            access.is_dependent(),
        ),
    }
}

/// One process whose phases are the two programs in turn.
pub fn alternating_program(
    names: [&'static str; 2],
    seed: u64,
    phase_instructions: u64,
) -> Result<SimProgram> {
    for name in names {
        kernels::build_threads(name, seed, &kernels::Options::default()).map_err(failed(name))?;
    }

    let make_threads = move |_: u32| -> Vec<Box<dyn AccessSource>> {
        let threads = names.iter().flat_map(|name| {
            kernels::build_threads(name, seed, &kernels::Options::default())
                .expect("built with these options before")
        });
        let programs = threads.map(|thread| (thread, VecDeque::new())).collect();
        vec![Box::new(AlternatingSource {
            programs,
            phase_instructions,
            active_program: 0,
            remaining_instr: phase_instructions,
        })]
    };
    Ok(SimProgram::new(names.join("+"), Box::new(make_threads)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do the phases last as long as requested, with each program at its own addresses?
    #[test]
    fn phases_last_as_long_as_requested() {
        let mut program = alternating_program(["mcf", "gzip"], 1, 50_000).unwrap();
        let mut source = (program.build_threads)(0).remove(0);
        let (mut accesses, mut sums) = (Vec::new(), [0, 0, 0]);
        while accesses.len() < 40_000 {
            source.next_batch(&mut accesses);
        }

        let mut phase = 0;
        for access in accesses
            .iter()
            .filter(|access| access.kind() != AccessKind::Compute)
        {
            let now = (access.address() / PROGRAM_ADDRESS_DISTANCE) as usize;
            assert!(now < 2);
            phase += usize::from(now != phase % 2);
            if phase < 3 {
                sums[phase] += access.instructions();
            }
        }
        assert!(phase >= 1, "{sums:?}");
        assert!(sums[0].abs_diff(50_000) < 20_000, "{sums:?}");
    }
}
