//! crafty, gobmk, gamess and povray: programs that compute more than they touch.
//!
//! Method: game search goes up and down a tree of positions on the stack, evaluates with attack tables and pattern
//! databases of moderate size, and probes a transposition table at random. gamess computes the integrals of a quartet
//! of shells in small buffers. It contracts them into the packed triangles of the density and Fock matrices, with
//! quartets in their canonical order. povray follows rays through a bounding hierarchy: every ray reads its top levels,
//! few rays its leaves and textures.

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::random::Rng;
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("crafty", |setup| setup.add_single_kernel(|setup| GameSearch::new(setup, 120, 12, 48))),
    ("gobmk", |setup| setup.add_single_kernel(|setup| GameSearch::new(setup, 240, 48, 240))),
    ("gamess", |setup| setup.add_single_kernel(Integrals::new)),
    ("povray", |setup| setup.add_single_kernel(RayTracer::new)),
];

struct GameSearch {
    boards: Region,
    tables: Region,
    cache: Region,
    /// Number of table reads per position.
    reads: u64,
    /// Number of these reads that one routine makes in a loop.
    reads_per_call: u64,
    /// Interval of reads that go anywhere in the tables; the others go to [their hot part](Self::hot_divisor). gobmk
    /// makes one such read per position; with this value, it misses from 256 KB on about as often as recorded GNU Go.
    seldom: u64,
    /// Size of the tables over that of their hot part, the attack tables and common patterns.
    hot_divisor: u64,
    depth: u64,
    positions: u64,
    rng: Rng,
}

const BOARD_BYTES: u64 = 512;

impl GameSearch {
    fn new(setup: &mut KernelSetup, reads: u64, reads_per_call: u64, seldom: u64) -> Self {
        let bytes = setup.data_bytes();
        let boards = setup.add_region("position stack", (16 * BOARD_BYTES).min(bytes / 8), RegionUsers::All);
        let tables = setup.add_region("tables", bytes / 4, RegionUsers::All);
        let cache = setup.add_region("transposition table", bytes - boards.bytes - tables.bytes, RegionUsers::All);
        let hot_divisor = (tables.bytes / (32 << 10)).max(1);
        let rng = setup.rng.clone();
        GameSearch { boards, tables, cache, reads, reads_per_call, seldom, hot_divisor, depth: 0, positions: 0, rng }
    }
}

impl WorkloadKernel for GameSearch {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        let functions = u64::from(out.functions());
        let levels = self.boards.bytes / BOARD_BYTES;
        // Depth-first: down until a cutoff or the horizon, then back.
        let backtracks = self.rng.draw_below(levels.min(16)) < self.depth;
        self.depth = if backtracks { self.depth.saturating_sub(1 + self.rng.draw_below(2)) } else { self.depth + 1 };
        let board = self.boards.element_address(self.depth.min(levels - 1), BOARD_BYTES);
        out.enter_function(self.rng.draw_function(functions));
        for word in 0..12 {
            out.load(board + word * 8);
            out.store(board + word * 40 / 8 * 8);
        }
        let entries = self.cache.bytes / 16;
        let slot = self.cache.element_address(self.rng.draw_below(entries), 16);
        out.load(slot);
        out.load(slot + 8);
        for read in 0..self.reads {
            if read.is_multiple_of(self.reads_per_call) {
                out.enter_function(self.rng.draw_function(functions));
            }
            // A few tables serve every position, others only certain patterns.
            let word = self.rng.draw_skewed(self.tables.bytes / 8);
            let word = if read.is_multiple_of(self.seldom) { word } else { word / self.hot_divisor };
            out.load(self.tables.element_address(word, 8));
            if read.is_multiple_of(3) {
                out.load(board + read * 8 % BOARD_BYTES);
            }
        }
        if self.rng.draw_below(3) == 0 {
            out.store(slot + 8);
        }
        self.positions += 1;
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.positions as f64
    }
}

/// Number of functions of a shell: s and three p.
const SHELL: u64 = 4;
/// Number of terms for the 256 integrals of a quartet, each of three accesses and their stack accesses.
///
/// An integral takes 616 instructions in a free program of this kind (MPQC 2.3.1, direct Hartree-Fock of two waters in
/// 6-311G**: 6.63e9 for 10.8e6).
const TERMS_PER_QUARTET: u64 = 5_632;
/// Number of terms of one step.
const TERMS_PER_STEP: u64 = 128;
/// Number of routines of the recursions, which take turns; every other call is one of them. MPQC misses 16 KB of code
/// 11.4 times per thousand instructions.
const RECURSIONS: u64 = 24;
/// Interval of terms that use values stored for other shells, chosen so that the kernel misses 32 KB as often as MPQC.
const TERMS_PER_INTERMEDIATE: u64 = 14;

struct Integrals {
    buffers: Region,
    intermediates: Region,
    density: Region,
    fock: Region,
    shells: u64,
    /// Shells of the current quartet: `shells > i >= j`, `i >= k >= l`.
    quartet: [u64; 4],
    terms: u64,
    quartets: u64,
    rng: Rng,
}

impl Integrals {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let buffers = setup.add_region("integral buffers", (16 << 10).min(bytes / 8), RegionUsers::All);
        let intermediates = setup.add_region("intermediates", (128 << 10).min(bytes / 8), RegionUsers::All);
        // A packed triangle of n functions has n (n + 1) / 2 words.
        let words = (bytes - buffers.bytes - intermediates.bytes) / 16;
        let functions = (libm::sqrt(8.0 * words as f64 + 1.0) - 1.0) as u64 / 2;
        let triangle_bytes = functions * (functions + 1) / 2 * 8;
        let density = setup.add_region("density", triangle_bytes, RegionUsers::All);
        let fock = setup.add_region("Fock matrix", triangle_bytes, RegionUsers::All);
        let mut rng = setup.rng.clone();
        let shells = (functions / SHELL).max(1);
        // The last shell has half of all quartets, and those of each pair go over the whole triangle.
        let quartet = [shells - 1, rng.draw_below(shells), 0, 0];
        Integrals { buffers, intermediates, density, fock, shells, quartet, terms: 0, quartets: 0, rng }
    }

    /// Emits recursions over the primitives of one quartet of shells.
    fn recur(&mut self, out: &mut AccessEmitter) {
        let (words, intermediates) = (self.buffers.bytes / 8, self.intermediates.bytes / 8);
        // The types of the shells choose the routines: three kinds, of which those of the outer two shells stay for
        // long.
        let [i, j, k, l] = self.quartet;
        let types = [i, j, k, l].iter().fold(0, |types, shell| types * 3 + shell % 3);
        let contractions = u64::from(out.functions()).saturating_sub(RECURSIONS).max(1);
        for term in self.terms..self.terms + TERMS_PER_STEP {
            if term.is_multiple_of(32) {
                let (call, recursion) = (term / 64, (term / 32).is_multiple_of(2));
                let contraction = RECURSIONS + (types * 4 + call % 4) % contractions;
                out.enter_function(if recursion { call % RECURSIONS } else { contraction } as u32);
            }
            if term.is_multiple_of(TERMS_PER_INTERMEDIATE) {
                out.load(self.intermediates.element_address(self.rng.draw_skewed(intermediates), 8));
            }
            out.load(self.buffers.element_address((term * 5 + l) % words, 8));
            out.load(self.buffers.element_address((term * 11 + 3 * l) % words, 8));
            out.store(self.buffers.element_address((term + l) % words, 8));
        }
    }

    /// Emits the contraction of the block of two shells: its part of the density goes into the block of the other two,
    /// and theirs into its own.
    fn contract(&self, first: u64, second: u64, out: &mut AccessEmitter) {
        let (high, low) = (first.max(second), first.min(second));
        for row in high * SHELL..(high + 1) * SHELL {
            for column in (low * SHELL..(low + 1) * SHELL).filter(|column| *column <= row) {
                let word = row * (row + 1) / 2 + column;
                out.load(self.density.element_address(word, 8));
                out.load(self.fock.element_address(word, 8));
                out.store(self.fock.element_address(word, 8));
            }
        }
    }

    /// Advances to the next quartet; each occurs once, whatever the order of its shells.
    fn next(&mut self) {
        let [i, j, k, l] = self.quartet;
        let last = if k == i { j } else { k };
        self.quartet = match () {
            () if l < last => [i, j, k, l + 1],
            () if k < i => [i, j, k + 1, 0],
            () if j < i => [i, j + 1, 0, 0],
            () => [(i + 1) % self.shells, 0, 0, 0],
        };
    }
}

impl WorkloadKernel for Integrals {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        self.recur(out);
        self.terms += TERMS_PER_STEP;
        if self.terms == TERMS_PER_QUARTET {
            let [i, j, k, l] = self.quartet;
            for (first, second) in [(i, j), (k, l), (i, k), (j, l), (i, l), (j, k)] {
                self.contract(first, second, out);
            }
            self.terms = 0;
            self.next();
            self.quartets += 1;
        }
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.quartets as f64 + self.terms as f64 / TERMS_PER_QUARTET as f64
    }
}

struct RayTracer {
    hierarchy: Region,
    shapes: Region,
    image: Region,
    rays: u64,
    rng: Rng,
}

const BOX_BYTES: u64 = 64;
const SHAPE_BYTES: u64 = 256;

impl RayTracer {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let hierarchy = setup.add_region("bounding boxes", bytes / 8, RegionUsers::All);
        let image = setup.add_region("image", bytes / 8, RegionUsers::All);
        let shapes = setup.add_region("shapes and textures", bytes - hierarchy.bytes - image.bytes, RegionUsers::All);
        let rng = setup.rng.clone();
        RayTracer { hierarchy, shapes, image, rays: 0, rng }
    }
}

impl WorkloadKernel for RayTracer {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        let functions = u64::from(out.functions());
        let boxes = self.hierarchy.bytes / BOX_BYTES;
        // Neighboring pixels hit neighboring shapes: the leaf drifts, and secondary rays leave it.
        let drift = self.rays / 64 * 3 % boxes;
        let leaf = if self.rng.draw_below(48) == 0 {
            self.rng.draw_skewed(boxes)
        } else {
            (drift + self.rng.draw_below(4)) % boxes
        };
        let mut node = 1;
        while node < boxes {
            let record = self.hierarchy.element_address(node, BOX_BYTES);
            out.chase(record);
            for word in 1..6 {
                out.load(record + word * 8);
            }
            node = 2 * node + (leaf * node.next_power_of_two() * 2 / boxes) % 2;
        }
        out.enter_function(self.rng.draw_function(functions));
        let record = self.hierarchy.element_address(leaf, BOX_BYTES);
        out.load(record);
        let shapes = self.shapes.bytes / SHAPE_BYTES;
        let shape =
            self.shapes.element_address((leaf * shapes + self.rays % boxes) / boxes, SHAPE_BYTES) + self.rays % 2 * 64;
        out.chase(shape);
        for word in 0..24u64 {
            if word.is_multiple_of(8) {
                out.enter_function(self.rng.draw_function(functions));
            }
            out.load(shape + word * 8);
        }
        // Texture: occasionally, some other part of the shapes' memory.
        if self.rng.draw_below(64) == 0 {
            let any_shape = self.rng.draw_skewed(shapes);
            for word in 0..8 {
                out.load(self.shapes.element_address(any_shape, SHAPE_BYTES) + word * 32);
            }
        }
        out.store(self.image.element_address(self.rays / 4 % (self.image.bytes / 8), 8));
        self.rays += 1;
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.rays as f64
    }
}
