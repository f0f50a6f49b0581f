//! art: the adaptive-resonance network of SPEC 179.art, which scans an image window by window.
//!
//! Method: for each window, the F1 layer's fields are relaxed in passes over an array of 64-byte structs. Then every F2
//! neuron's activation is the dot product of P with one *column* of the bottom-up weights. These are stored by rows, so
//! each load is on another line. Finally, the winner's weights are learned. This is published as the classic
//! cache-thrashing program: the column scans miss until all weights fit.

use super::emitter::AccessEmitter;
use super::random::Rng;
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[("art", |setup| setup.add_single_kernel(Art::new))];

/// Size of one F1 neuron in bytes: eight doubles (I, W, X, V, U, P, Q, R).
const NEURON_BYTES: u64 = 64;
const F2_NEURONS: u64 = 11;
const ROW_BYTES: u64 = F2_NEURONS * 8;
const PASSES: u32 = 5;
/// Number of loops of one pass: W, its norm, X, V and its norm, U, P, Q.
const LOOPS: u32 = 7;
/// Bytes of the scanned images and training data per neuron.
const IMAGE_BYTES: u64 = 128;
/// Number of rows or neurons handled by one step.
const ROWS_PER_STEP: u64 = 64;

struct Art {
    f1: Region,
    bottom_up: Region,
    top_down: Region,
    images: Region,
    neuron_count: u64,
    rng: Rng,
    stage: ArtStage,
    next_row: u64,
    winner: u64,
}

#[derive(Clone, Copy)]
enum ArtStage {
    Read,
    Relax { pass: u32 },
    Column { j: u64 },
    Learn,
}

impl Art {
    fn new(setup: &mut KernelSetup) -> Self {
        let neuron_count = setup.data_bytes() / (NEURON_BYTES + 2 * ROW_BYTES + IMAGE_BYTES);
        let f1 = setup.add_shared_region("f1 layer", neuron_count * NEURON_BYTES);
        let bottom_up = setup.add_shared_region("bottom-up weights", neuron_count * ROW_BYTES);
        let top_down = setup.add_shared_region("top-down weights", neuron_count * ROW_BYTES);
        let images = setup.add_shared_region("images", neuron_count * IMAGE_BYTES);
        let mut rng = setup.rng.clone();
        // Copies scan different windows, so each starts at another column.
        let stage = ArtStage::Column {
            j: rng.draw_below(F2_NEURONS),
        };

        Art {
            f1,
            bottom_up,
            top_down,
            images,
            neuron_count,
            rng,
            stage,
            next_row: 0,
            winner: 0,
        }
    }

    /// Emits the accesses of one loop of a pass to one neuron: the fields that this loop reads and writes.
    fn emit_neuron_update(&self, i: u64, pass: u32, out: &mut AccessEmitter) {
        let neuron = self.f1.element_address(i, NEURON_BYTES);
        let (first_read, second_read, written_field) = match pass % LOOPS {
            0 => (0, 32, 8),
            1 => (8, 8, 56),
            2 => (8, 56, 16),
            3 => (16, 48, 24),
            4 => (24, 24, 32),
            5 => (32, 32, 40),
            _ => (40, 40, 48),
        };
        out.load(neuron + first_read);
        out.load(neuron + second_read);
        if pass % LOOPS == 5 {
            out.load(self.top_down.element_address(i, ROW_BYTES) + self.winner * 8);
        }
        out.store(neuron + written_field);
    }

    fn emit_row_accesses(&self, i: u64, out: &mut AccessEmitter) {
        match self.stage {
            ArtStage::Read => {
                let words = self.images.bytes / 8;
                out.load(
                    self.images
                        .element_address((i + out.work_done * 617) % words, 8),
                );
                out.store(self.f1.element_address(i, NEURON_BYTES));
            }
            ArtStage::Relax { pass } => self.emit_neuron_update(i, pass, out),
            ArtStage::Column { j } => {
                // The row's pointer is part of the row here; the sum is kept in memory, on the stack's lines.
                out.load(self.f1.element_address(i, NEURON_BYTES) + 40);
                out.load(self.bottom_up.element_address(i, ROW_BYTES) + j * 8);
            }
            ArtStage::Learn => {
                out.load(self.f1.element_address(i, NEURON_BYTES) + 32);
                out.store(self.bottom_up.element_address(i, ROW_BYTES) + self.winner * 8);
                out.store(self.top_down.element_address(i, ROW_BYTES) + self.winner * 8);
            }
        }
    }

    fn start_next_stage(&mut self, out: &mut AccessEmitter) {
        self.next_row = 0;
        self.stage = match self.stage {
            ArtStage::Read => ArtStage::Relax { pass: 0 },
            ArtStage::Relax { pass } if pass + 1 < PASSES * LOOPS => {
                ArtStage::Relax { pass: pass + 1 }
            }
            ArtStage::Relax { .. } => ArtStage::Column { j: 0 },
            ArtStage::Column { j } if j + 1 < F2_NEURONS => ArtStage::Column { j: j + 1 },
            ArtStage::Column { .. } => ArtStage::Learn,
            ArtStage::Learn => {
                self.winner = self.rng.draw_below(F2_NEURONS);
                out.work_done += 1;
                ArtStage::Read
            }
        };

        out.enter_function(match self.stage {
            ArtStage::Relax { pass } => pass % LOOPS,
            ArtStage::Column { .. } => 7,
            ArtStage::Read => 8,
            ArtStage::Learn => 9,
        });
    }
}

impl WorkloadKernel for Art {
    fn step(&mut self, out: &mut AccessEmitter) {
        let end = (self.next_row + ROWS_PER_STEP).min(self.neuron_count);
        for i in self.next_row..end {
            self.emit_row_accesses(i, out);
        }
        self.next_row = end;
        if end == self.neuron_count {
            self.start_next_stage(out);
        }
    }
}
