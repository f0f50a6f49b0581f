//! h264, mesa and sphinx: motion search, rasterization, Gaussian scoring.
//!
//! Method, h264: for each macroblock, candidates around the predicted vector are compared in several reference
//! pictures, which are stored upsampled four times in both directions, as in the reference encoder.
//!
//! Method, mesa: triangles of a mesh are filled span by span with depth test and texture.
//!
//! Method, sphinx: each frame scores the active senones, whose means and variances are streamed, and advances the
//! active states of the lexical tree.

use super::emitter::AccessEmitter;
use super::random::{Rng, hash_value};
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("h264", |setup| setup.add_single_kernel(MotionSearch::new)),
    ("mesa", |setup| setup.add_single_kernel(Rasterizer::new)),
    ("sphinx", |setup| setup.add_single_kernel(Recognizer::new)),
];

const REFERENCES: u64 = 5;

struct MotionSearch {
    references: Vec<Region>,
    current_picture: Region,
    coded_data: Region,
    /// Luma size in pixels; references store four samples per pixel in both directions.
    width: u64,
    height: u64,
    macroblock_index: u64,
    coded_offset: u64,
    rng: Rng,
}

impl MotionSearch {
    fn new(setup: &mut KernelSetup) -> Self {
        // Memory contains five pictures of 16 bytes per pixel, the current one, and as much again for coded data and
        // side information.
        let pixels = setup.data_bytes() / (REFERENCES * 16 + 2);
        let width = (libm::sqrt(pixels as f64 * 5.0 / 4.0) as u64 / 16 * 16).max(16);
        let height = (pixels / width / 16 * 16).max(16);
        let picture = width * height;
        let references = (0..REFERENCES)
            .map(|_| setup.add_shared_region("reference", picture * 16))
            .collect();

        let current_picture = setup.add_shared_region("picture", picture);
        let coded_bytes = setup.data_bytes() - picture * (REFERENCES * 16 + 1);
        let coded_data = setup.add_shared_region("coded data", coded_bytes);
        MotionSearch {
            references,
            current_picture,
            coded_data,
            width,
            height,
            macroblock_index: 0,
            coded_offset: 0,
            rng: setup.rng.clone(),
        }
    }

    /// Emits the sum of absolute differences at one candidate, row by row until it is worse than the best, on average
    /// after 10 of 16 rows.
    fn emit_candidate_comparison(
        &mut self,
        reference: usize,
        x: u64,
        y: u64,
        out: &mut AccessEmitter,
    ) {
        let (columns, picture) = (self.width / 16, self.references[reference]);
        let (left_pixel, top_pixel) = (
            self.macroblock_index % columns * 16,
            self.macroblock_index / columns * 16,
        );
        let rows = 4 + self.rng.draw_below(13);
        for row in 0..rows.min(16) {
            let pixel_address =
                self.current_picture.base + (top_pixel + row) * self.width + left_pixel;
            let sample_offset = (y + row * 4) * self.width * 4 + x;
            for word in 0..2 {
                out.load(pixel_address + word * 8);
                out.load(picture.base + sample_offset + word * 32);
                out.load(picture.base + sample_offset + word * 32 + 16);
            }
        }
    }

    fn emit_motion_search(&mut self, reference: usize, out: &mut AccessEmitter) {
        let columns = self.width / 16;
        let (left_sample, top_sample) = (
            self.macroblock_index % columns * 64,
            self.macroblock_index / columns * 64,
        );
        let (max_left, max_top) = ((self.width - 16) * 4, (self.height - 16) * 4);
        for candidate in 0..64 {
            // The first 48 candidates are random whole pixels around the macroblock, the others random quarter pixels
            // next to it.
            let (search_radius, alignment) = if candidate < 48 { (64, 4) } else { (4, 1) };
            let x = (left_sample + self.rng.draw_below(2 * search_radius))
                .saturating_sub(search_radius)
                .min(max_left)
                / alignment
                * alignment;
            let y = (top_sample + self.rng.draw_below(2 * search_radius))
                .saturating_sub(search_radius)
                .min(max_top)
                / alignment
                * alignment;
            out.enter_function(candidate % 24);
            self.emit_candidate_comparison(reference, x, y, out);
        }
    }

    /// Emits transforming and writing the residual, and writing this macroblock's part of the next reference picture.
    fn emit_coding(&mut self, out: &mut AccessEmitter) {
        let columns = self.width / 16;
        let target =
            self.references[(out.work_done / (columns * (self.height / 16)) % REFERENCES) as usize];
        let (left_sample, top_sample) = (
            self.macroblock_index % columns * 64,
            self.macroblock_index / columns * 64,
        );
        for row in 0..64u64 {
            if row.is_multiple_of(4) {
                out.enter_function(24 + (row / 4 + out.work_done * 16) as u32 % 72);
            }
            for word in 0..8 {
                out.store(
                    target.base + (top_sample + row) * self.width * 4 + left_sample + word * 8,
                );
            }
            out.store(self.coded_data.base + self.coded_offset);
            self.coded_offset = (self.coded_offset + 8) % (self.coded_data.bytes / 8 * 8);
        }
    }
}

impl WorkloadKernel for MotionSearch {
    fn step(&mut self, out: &mut AccessEmitter) {
        for reference in 0..REFERENCES as usize {
            self.emit_motion_search(reference, out);
        }
        self.emit_coding(out);
        self.macroblock_index =
            (self.macroblock_index + 1) % (self.width / 16 * (self.height / 16));
        out.work_done += 1;
    }
}

struct Rasterizer {
    color: Region,
    depth: Region,
    texture: Region,
    vertices: Region,
    side_pixels: u64,
    side_texels: u64,
    rng: Rng,
}

impl Rasterizer {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let side_pixels = libm::sqrt((bytes * 3 / 4 / 8) as f64) as u64;
        let color = setup.add_shared_region("color buffer", side_pixels * side_pixels * 4);
        let depth = setup.add_shared_region("depth buffer", side_pixels * side_pixels * 4);
        let texture_bytes = (1 << 20).min(bytes / 8);
        let texture = setup.add_shared_region("texture", texture_bytes);
        let vertices = setup.add_shared_region(
            "vertices",
            bytes - color.bytes - depth.bytes - texture.bytes,
        );
        let side_texels = libm::sqrt((texture.bytes / 4) as f64) as u64;
        let rng = setup.rng.clone();
        Rasterizer {
            color,
            depth,
            texture,
            vertices,
            side_pixels,
            side_texels,
            rng,
        }
    }

    fn emit_span(&self, x: u64, y: u64, width: u64, texel: u64, out: &mut AccessEmitter) {
        for pixel in (0..width).filter(|pixel| x + pixel < self.side_pixels) {
            let offset = (y * self.side_pixels + x + pixel) * 4;
            out.load(self.depth.base + offset);
            // The new point is nearer than the present one in three of four cases.
            if hash_value(offset ^ out.work_done) & 3 == 0 {
                continue;
            }
            out.store(self.depth.base + offset);
            let (u, v) = (
                (texel + pixel) % (self.side_texels - 1),
                (texel / 7 + y) % (self.side_texels - 1),
            );
            let corner = self.texture.base + (v * self.side_texels + u) * 4;
            out.load(corner);
            out.load(corner + 4);
            out.load(corner + self.side_texels * 4);
            out.load(corner + self.side_texels * 4 + 4);
            out.store(self.color.base + offset);
        }
    }
}

impl WorkloadKernel for Rasterizer {
    fn step(&mut self, out: &mut AccessEmitter) {
        // The mesh covers the screen strip by strip; vertices are streamed and transformed by their own code.
        let vertex = self
            .vertices
            .element_address(out.work_done % (self.vertices.bytes / 64), 64);
        out.enter_function(out.work_done as u32 % 48);
        for word in 0..8 {
            out.load(vertex + word * 8);
        }
        out.store(vertex + 48);
        let size = 4 + self.rng.draw_below(8);
        let triangles_per_row = (self.side_pixels / 6).max(1);
        let (column, row) = (
            out.work_done % triangles_per_row,
            out.work_done / triangles_per_row * 6 % self.side_pixels,
        );
        out.enter_function(48 + self.rng.draw_function(48));
        for line in 0..size {
            let y = row + line;
            if y < self.side_pixels {
                self.emit_span(column * 6, y, size - line / 2, out.work_done * 5, out);
            }
        }
        out.work_done += 1;
    }
}

/// Size of one senone's mixture in bytes: 8 densities of 39 means and variances in single precision, and weights.
const SENONE_BYTES: u64 = 8 * 39 * 2 * 4;
const STATE_BYTES: u64 = 64;

struct Recognizer {
    senones: Region,
    tree: Region,
    senone_count: u64,
    next_senone: u64,
    states_left: u64,
    state_position: u64,
    salt: u64,
    rng: Rng,
}

impl Recognizer {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        // The reference model has 6000 senones, a third of the memory; the tree and the language model take the rest.
        let senone_count = (bytes / 3 / SENONE_BYTES).max(4);
        let senones = setup.add_shared_region("senones", senone_count * SENONE_BYTES);
        let tree = setup.add_shared_region("lexical tree", bytes - senones.bytes);
        let mut rng = setup.rng.clone();
        let (state_position, salt) = (rng.next_bits(), rng.next_bits());
        Recognizer {
            senones,
            tree,
            senone_count,
            next_senone: 0,
            states_left: 0,
            state_position,
            salt,
            rng,
        }
    }

    fn emit_senone_score(&self, senone: u64, out: &mut AccessEmitter) {
        let base = self.senones.element_address(senone, SENONE_BYTES);
        for offset in (0..SENONE_BYTES).step_by(8) {
            out.load(base + offset);
            out.load(base + offset + 4);
        }
    }

    /// Emits the accesses of the search from one active state to a successor.
    fn emit_state_search(&mut self, out: &mut AccessEmitter) {
        let states = self.tree.bytes / STATE_BYTES;
        // Paths move to nearby states; occasionally a word ends and another begins.
        let state_offset = if self.state_position & 15 == 0 {
            self.rng.draw_below(states)
        } else {
            self.rng.draw_below(64)
        };
        let state = (self.state_position + state_offset) % states;
        self.state_position = self.state_position.wrapping_add(state_offset + 1);
        let record = self.tree.element_address(state, STATE_BYTES);
        out.load_dependent(record);
        out.load(record + 8);
        out.load(record + 16);
        out.store(record + 24);
        out.load(record + 32);
    }
}

impl WorkloadKernel for Recognizer {
    fn step(&mut self, out: &mut AccessEmitter) {
        if self.states_left > 0 {
            out.enter_function(16 + (self.states_left / 16) as u32 % 16);
            let state_count = self.states_left.min(16);
            for _ in 0..state_count {
                self.emit_state_search(out);
            }
            self.states_left -= state_count;
            return;
        }

        // Two of five senones are active in a frame; the set changes slowly, every sixteenth frame.
        let epoch = out.work_done / 16;
        if hash_value(self.next_senone ^ epoch << 32 ^ self.salt) % 5 < 2 {
            out.enter_function(self.next_senone as u32 % 16);
            self.emit_senone_score(self.next_senone, out);
        } else {
            out.load(self.senones.element_address(self.next_senone, SENONE_BYTES));
        }

        self.next_senone += 1;
        if self.next_senone == self.senone_count {
            self.next_senone = 0;
            out.work_done += 1;
            self.states_left = (self.tree.bytes / STATE_BYTES / 16).next_multiple_of(16);
            out.enter_function(out.work_done as u32 % 16);
        }
    }
}
