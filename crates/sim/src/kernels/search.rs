//! crafty, gobmk, gamess and povray: programs that compute more than they touch.
//!
//! Method: game search goes up and down a tree of positions on the stack, evaluates with attack tables and pattern
//! databases of moderate size, and probes a transposition table at random. gamess computes the integrals of a quartet
//! of shells in small buffers. It contracts them into the packed triangles of the density and Fock matrices, with
//! quartets in their canonical order. povray follows rays through a bounding hierarchy: every ray reads its top levels,
//! few rays its leaves and textures.

use super::emitter::AccessEmitter;
use super::random::Rng;
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("crafty", |setup| {
        setup.add_single_kernel(|setup| GameSearch::new(setup, 120, 12, 48))
    }),
    ("gobmk", |setup| {
        setup.add_single_kernel(|setup| GameSearch::new(setup, 240, 48, 240))
    }),
    ("gamess", |setup| setup.add_single_kernel(Integrals::new)),
    ("povray", |setup| setup.add_single_kernel(RayTracer::new)),
];

struct GameSearch {
    boards: Region,
    tables: Region,
    cache: Region,
    /// Number of table reads per position.
    reads_per_position: u64,
    /// Number of these reads that one routine makes in a loop.
    reads_per_call: u64,
    /// Interval of reads that go anywhere in the tables; the others go to [their hot part](Self::hot_divisor). gobmk
    /// makes one such read per position; with this value, it misses from 256 KB on about as often as recorded GNU Go.
    reads_per_cold_read: u64,
    /// Size of the tables divided by that of their hot part, which contains the attack tables and common patterns.
    hot_divisor: u64,
    tree_depth: u64,
    rng: Rng,
}

const BOARD_BYTES: u64 = 512;

impl GameSearch {
    fn new(
        setup: &mut KernelSetup,
        reads_per_position: u64,
        reads_per_call: u64,
        reads_per_cold_read: u64,
    ) -> Self {
        let bytes = setup.data_bytes();
        let boards = setup.add_shared_region("position stack", (16 * BOARD_BYTES).min(bytes / 8));
        let tables = setup.add_shared_region("tables", bytes / 4);
        let cache =
            setup.add_shared_region("transposition table", bytes - boards.bytes - tables.bytes);
        let hot_divisor = (tables.bytes / (32 << 10)).max(1);

        GameSearch {
            boards,
            tables,
            cache,
            reads_per_position,
            reads_per_call,
            reads_per_cold_read,
            hot_divisor,
            tree_depth: 0,
            rng: setup.rng.clone(),
        }
    }
}

impl WorkloadKernel for GameSearch {
    fn step(&mut self, out: &mut AccessEmitter) {
        let functions = u64::from(out.function_count());
        let level_count = self.boards.bytes / BOARD_BYTES;
        // Depth-first: down until a cutoff or the horizon, then back.
        let is_backtracking = self.rng.draw_below(level_count.min(16)) < self.tree_depth;
        self.tree_depth = if is_backtracking {
            self.tree_depth.saturating_sub(1 + self.rng.draw_below(2))
        } else {
            self.tree_depth + 1
        };
        let board = self
            .boards
            .element_address(self.tree_depth.min(level_count - 1), BOARD_BYTES);
        out.enter_function(self.rng.draw_function(functions));
        for word in 0..12 {
            out.load(board + word * 8);
            out.store(board + word * 40 / 8 * 8);
        }

        let entries = self.cache.bytes / 16;
        let slot = self.cache.element_address(self.rng.draw_below(entries), 16);
        out.load(slot);
        out.load(slot + 8);
        for read in 0..self.reads_per_position {
            if read.is_multiple_of(self.reads_per_call) {
                out.enter_function(self.rng.draw_function(functions));
            }

            // A few tables serve every position, others only certain patterns.
            let word = self.rng.draw_skewed(self.tables.bytes / 8);
            let word = if read.is_multiple_of(self.reads_per_cold_read) {
                word
            } else {
                word / self.hot_divisor
            };
            out.load(self.tables.element_address(word, 8));
            if read.is_multiple_of(3) {
                out.load(board + read * 8 % BOARD_BYTES);
            }
        }

        if self.rng.draw_below(3) == 0 {
            out.store(slot + 8);
        }
        out.work_done += 1;
    }
}

/// Number of functions of a shell: s and three p.
const FUNCTIONS_PER_SHELL: u64 = 4;
/// Number of terms for the 256 integrals of a quartet, each of three accesses and their stack accesses.
///
/// An integral takes 616 instructions in a free program of this kind (MPQC 2.3.1, direct Hartree-Fock of two waters in
/// 6-311G**: 6.63e9 for 10.8e6).
const TERMS_PER_QUARTET: u64 = 5_632;
/// Number of terms of one step.
const TERMS_PER_STEP: u64 = 128;
/// Number of routines of the recursions, which take turns; every other call is one of them. MPQC misses 16 KB of code
/// 11.4 times per thousand instructions.
const RECURSION_ROUTINES: u64 = 24;
/// Interval of terms that use values stored for other shells, chosen so that the kernel misses 32 KB as often as MPQC.
const TERMS_PER_INTERMEDIATE: u64 = 14;

struct Integrals {
    buffers: Region,
    intermediates: Region,
    density: Region,
    fock: Region,
    shell_count: u64,
    /// Shells of the current quartet: `shells > i >= j`, `i >= k >= l`.
    quartet: [u64; 4],
    term_count: u64,
    rng: Rng,
}

impl Integrals {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let buffers = setup.add_shared_region("integral buffers", (16 << 10).min(bytes / 8));
        let intermediates = setup.add_shared_region("intermediates", (128 << 10).min(bytes / 8));
        // A packed triangle of n functions has n (n + 1) / 2 words.
        let words = (bytes - buffers.bytes - intermediates.bytes) / 16;
        let functions = (libm::sqrt(8.0 * words as f64 + 1.0) - 1.0) as u64 / 2;
        let triangle_bytes = functions * (functions + 1) / 2 * 8;
        let density = setup.add_shared_region("density", triangle_bytes);
        let fock = setup.add_shared_region("Fock matrix", triangle_bytes);
        let mut rng = setup.rng.clone();
        let shell_count = (functions / FUNCTIONS_PER_SHELL).max(1);

        // The last shell has the most quartets, and those of each pair go over nearly the whole triangle.
        let quartet = [shell_count - 1, rng.draw_below(shell_count), 0, 0];
        Integrals {
            buffers,
            intermediates,
            density,
            fock,
            shell_count,
            quartet,
            term_count: 0,
            rng,
        }
    }

    /// Emits recursions over the primitives of one quartet of shells.
    fn emit_recursions(&mut self, out: &mut AccessEmitter) {
        let (buffer_words, intermediates) = (self.buffers.bytes / 8, self.intermediates.bytes / 8);
        // The types of the shells choose the routines: three kinds, of which those of the outer two shells stay for
        // long.
        let [i, j, k, l] = self.quartet;
        let type_code = [i, j, k, l]
            .iter()
            .fold(0, |types, shell| types * 3 + shell % 3);
        let contraction_routines = u64::from(out.function_count())
            .saturating_sub(RECURSION_ROUTINES)
            .max(1);

        for term in self.term_count..self.term_count + TERMS_PER_STEP {
            if term.is_multiple_of(32) {
                let (call, is_recursion) = (term / 64, (term / 32).is_multiple_of(2));
                let contraction =
                    RECURSION_ROUTINES + (type_code * 4 + call % 4) % contraction_routines;
                out.enter_function(if is_recursion {
                    call % RECURSION_ROUTINES
                } else {
                    contraction
                } as u32);
            }
            if term.is_multiple_of(TERMS_PER_INTERMEDIATE) {
                out.load(
                    self.intermediates
                        .element_address(self.rng.draw_skewed(intermediates), 8),
                );
            }
            out.load(
                self.buffers
                    .element_address((term * 5 + l) % buffer_words, 8),
            );
            out.load(
                self.buffers
                    .element_address((term * 11 + 3 * l) % buffer_words, 8),
            );
            out.store(self.buffers.element_address((term + l) % buffer_words, 8));
        }
    }

    /// Emits the contraction of one block of two shells: reads of its part of the density, and updates of its part of
    /// the Fock matrix.
    fn emit_contraction(&self, first_shell: u64, second_shell: u64, out: &mut AccessEmitter) {
        let (high_shell, low_shell) =
            (first_shell.max(second_shell), first_shell.min(second_shell));
        for row in high_shell * FUNCTIONS_PER_SHELL..(high_shell + 1) * FUNCTIONS_PER_SHELL {
            for column in (low_shell * FUNCTIONS_PER_SHELL..(low_shell + 1) * FUNCTIONS_PER_SHELL)
                .filter(|column| *column <= row)
            {
                let word = row * (row + 1) / 2 + column;
                out.load(self.density.element_address(word, 8));
                out.load(self.fock.element_address(word, 8));
                out.store(self.fock.element_address(word, 8));
            }
        }
    }

    /// Advances to the next quartet; each occurs once, whatever the order of its shells.
    fn advance_quartet(&mut self) {
        let [i, j, k, l] = self.quartet;
        let last_l = if k == i { j } else { k };
        self.quartet = match () {
            () if l < last_l => [i, j, k, l + 1],
            () if k < i => [i, j, k + 1, 0],
            () if j < i => [i, j + 1, 0, 0],
            () => [(i + 1) % self.shell_count, 0, 0, 0],
        };
    }
}

impl WorkloadKernel for Integrals {
    fn step(&mut self, out: &mut AccessEmitter) {
        self.emit_recursions(out);
        self.term_count += TERMS_PER_STEP;
        out.work_done += TERMS_PER_STEP;
        if self.term_count == TERMS_PER_QUARTET {
            let [i, j, k, l] = self.quartet;
            for (first_shell, second_shell) in [(i, j), (k, l), (i, k), (j, l), (i, l), (j, k)] {
                self.emit_contraction(first_shell, second_shell, out);
            }
            self.term_count = 0;
            self.advance_quartet();
        }
    }

    fn progress(&self, work_done: u64) -> f64 {
        (work_done / TERMS_PER_QUARTET) as f64
            + (work_done % TERMS_PER_QUARTET) as f64 / TERMS_PER_QUARTET as f64
    }
}

struct RayTracer {
    hierarchy: Region,
    shapes: Region,
    image: Region,
    rng: Rng,
}

const BOX_BYTES: u64 = 64;
const SHAPE_BYTES: u64 = 256;

impl RayTracer {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let hierarchy = setup.add_shared_region("bounding boxes", bytes / 8);
        let image = setup.add_shared_region("image", bytes / 8);
        let shapes =
            setup.add_shared_region("shapes and textures", bytes - hierarchy.bytes - image.bytes);
        let rng = setup.rng.clone();
        RayTracer {
            hierarchy,
            shapes,
            image,
            rng,
        }
    }
}

impl WorkloadKernel for RayTracer {
    fn step(&mut self, out: &mut AccessEmitter) {
        let functions = u64::from(out.function_count());
        let box_count = self.hierarchy.bytes / BOX_BYTES;
        // Neighboring pixels hit neighboring shapes: the leaf drifts, and secondary rays leave it.
        let drifting_leaf = out.work_done / 64 * 3 % box_count;
        let leaf = if self.rng.draw_below(48) == 0 {
            self.rng.draw_skewed(box_count)
        } else {
            (drifting_leaf + self.rng.draw_below(4)) % box_count
        };

        let mut node = 1;
        while node < box_count {
            let record = self.hierarchy.element_address(node, BOX_BYTES);
            out.load_dependent(record);
            for word in 1..6 {
                out.load(record + word * 8);
            }
            node = 2 * node + (leaf * node.next_power_of_two() * 2 / box_count) % 2;
        }

        out.enter_function(self.rng.draw_function(functions));
        let record = self.hierarchy.element_address(leaf, BOX_BYTES);
        out.load(record);
        let shape_count = self.shapes.bytes / SHAPE_BYTES;
        let shape = self.shapes.element_address(
            (leaf * shape_count + out.work_done % box_count) / box_count,
            SHAPE_BYTES,
        ) + out.work_done % 2 * 64;
        out.load_dependent(shape);
        for word in 0..24u64 {
            if word.is_multiple_of(8) {
                out.enter_function(self.rng.draw_function(functions));
            }
            out.load(shape + word * 8);
        }

        // Texture: occasionally, some other part of the shapes' memory.
        if self.rng.draw_below(64) == 0 {
            let any_shape = self.rng.draw_skewed(shape_count);
            for word in 0..8 {
                out.load(self.shapes.element_address(any_shape, SHAPE_BYTES) + word * 32);
            }
        }

        out.store(
            self.image
                .element_address(out.work_done / 4 % (self.image.bytes / 8), 8),
        );
        out.work_done += 1;
    }
}
