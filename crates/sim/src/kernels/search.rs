//! crafty, gobmk, gamess and povray: programs that compute more than they touch.
//!
//! Method: game search goes up and down a tree of positions on the stack, evaluates with attack tables and pattern
//! databases of moderate size, and probes a transposition table at random. gamess contracts integrals from small buffers
//! into density and Fock matrices. povray follows rays through a bounding hierarchy: its top levels at every ray, its
//! leaves and textures seldom.

use cachemate_core::Turn;

use super::out::Out;
use super::random::{Rng, mix};
use super::registry::ProgramSpec;
use super::setup::{Kernel, Region, Setup, Users};
use super::{Code, Pace};

pub(super) const PROGRAMS: &[ProgramSpec] = &[
    ProgramSpec {
        name: "crafty",
        stands_for: "SPEC CPU2000 186.crafty",
        algorithm: "alpha-beta search: bit boards, attack tables, transposition table",
        footprint_bytes: 2_100_000,
        footprint_source: "Henning 2000: 2.1 MB resident",
        pace: Pace { instructions_per_access: 2.8, stack_per_access: 1.0 },
        pace_source: "Hennessy & Patterson 3rd ed., Fig. 2.32 (integer: about 36 % loads and stores)",
        code: Code { functions: 400, function_instr: 96 },
        code_source: "estimate: 150 KB of generator and evaluator",
        phases: "none",
        unit: "positions",
        threads: (1, 1),
        make: |setup| setup.single(|setup| GameSearch::new(setup, 120, 12)),
    },
    ProgramSpec {
        name: "gobmk",
        stands_for: "SPEC CPU2006 445.gobmk",
        algorithm: "go reading and pattern matching: boards, pattern database, reading cache",
        footprint_bytes: 28_000_000,
        footprint_source: "Henning 2007 (CPU2006 memory footprint): about 28 MB",
        pace: Pace { instructions_per_access: 2.38, stack_per_access: 1.4 },
        pace_source: "Phansalkar et al. 2007: 27.9 % loads, 14.2 % stores",
        code: Code { functions: 1200, function_instr: 80 },
        code_source: "estimate: 375 KB in use (pattern matchers)",
        phases: "none",
        unit: "positions",
        threads: (1, 1),
        make: |setup| setup.single(|setup| GameSearch::new(setup, 240, 48)),
    },
    ProgramSpec {
        name: "gamess",
        stands_for: "SPEC CPU2006 416.gamess",
        algorithm: "integrals in small buffers contracted into density and Fock matrices",
        footprint_bytes: 2_000_000,
        footprint_source: "estimate: two 350 x 350 matrices and buffers; the 670 MB of Henning 2007 are mostly untouched",
        pace: Pace { instructions_per_access: 2.28, stack_per_access: 3.0 },
        pace_source: "Phansalkar et al. 2007: 34.6 % loads, 9.2 % stores",
        code: Code { functions: 64, function_instr: 320 },
        code_source: "estimate: 80 KB of integral routines",
        phases: "none",
        unit: "shell quartets",
        threads: (1, 1),
        make: |setup| setup.single(Integrals::new),
    },
    ProgramSpec {
        name: "povray",
        stands_for: "SPEC CPU2006 453.povray",
        algorithm: "ray tracer: bounding hierarchy, shapes, textures",
        footprint_bytes: 6_700_000,
        footprint_source: "Henning 2007 (CPU2006 memory footprint): about 7 MB",
        pace: Pace { instructions_per_access: 2.58, stack_per_access: 2.5 },
        pace_source: "Phansalkar et al. 2007: 30.0 % loads, 8.8 % stores",
        code: Code { functions: 400, function_instr: 96 },
        code_source: "estimate: 150 KB of shapes, noise and texture routines",
        phases: "none",
        unit: "rays",
        threads: (1, 1),
        make: |setup| setup.single(RayTracer::new),
    },
];

struct GameSearch {
    boards: Region,
    tables: Region,
    cache: Region,
    /// Table reads per position.
    reads: u64,
    /// Of these, so many in a loop of one routine.
    reads_per_call: u64,
    /// All but every 48th read go to this fraction of the tables: attack tables, common patterns.
    hot_divisor: u64,
    depth: u64,
    positions: u64,
    rng: Rng,
}

const BOARD_BYTES: u64 = 512;

impl GameSearch {
    fn new(setup: &mut Setup, reads: u64, reads_per_call: u64) -> Self {
        let bytes = setup.data_bytes();
        let boards = setup.region("position stack", (16 * BOARD_BYTES).min(bytes / 8), Users::All);
        let tables = setup.region("tables", bytes / 4, Users::All);
        let cache = setup.region("transposition table", bytes - boards.bytes - tables.bytes, Users::All);
        let hot_divisor = (tables.bytes / (32 << 10)).max(1);
        let rng = setup.rng.clone();
        GameSearch { boards, tables, cache, reads, reads_per_call, hot_divisor, depth: 0, positions: 0, rng }
    }
}

impl Kernel for GameSearch {
    fn step(&mut self, out: &mut Out) -> Turn {
        let functions = u64::from(out.functions());
        let levels = self.boards.bytes / BOARD_BYTES;
        // Depth-first: down until a cut-off or the horizon, then back.
        let up = self.rng.below(levels.min(16)) < self.depth;
        self.depth = if up { self.depth.saturating_sub(1 + self.rng.below(2)) } else { self.depth + 1 };
        let board = self.boards.at(self.depth.min(levels - 1), BOARD_BYTES);
        out.enter(self.rng.function(functions));
        for word in 0..12 {
            out.load(board + word * 8);
            out.store(board + word * 40 / 8 * 8);
        }
        let entries = self.cache.bytes / 16;
        let slot = self.cache.at(self.rng.below(entries), 16);
        out.load(slot);
        out.load(slot + 8);
        for read in 0..self.reads {
            if read.is_multiple_of(self.reads_per_call) {
                out.enter(self.rng.function(functions));
            }
            // A few tables serve every position, others only certain patterns.
            let word = self.rng.skewed(self.tables.bytes / 8);
            let word = if read.is_multiple_of(48) { word } else { word / self.hot_divisor };
            out.load(self.tables.at(word, 8));
            if read.is_multiple_of(3) {
                out.load(board + read * 8 % BOARD_BYTES);
            }
        }
        if self.rng.below(3) == 0 {
            out.store(slot + 8);
        }
        self.positions += 1;
        Turn::More
    }

    fn progress(&self) -> f64 {
        self.positions as f64
    }
}

struct Integrals {
    buffers: Region,
    density: Region,
    fock: Region,
    side: u64,
    quartet: u64,
    salt: u64,
}

impl Integrals {
    fn new(setup: &mut Setup) -> Self {
        let bytes = setup.data_bytes();
        let buffers = setup.region("integral buffers", (16 << 10).min(bytes / 4), Users::All);
        let side = libm::sqrt(((bytes - buffers.bytes) / 16) as f64) as u64;
        let density = setup.region("density", side * side * 8, Users::All);
        let fock = setup.region("Fock matrix", side * side * 8, Users::All);
        Integrals { buffers, density, fock, side, quartet: 0, salt: setup.rng.bits() }
    }
}

impl Kernel for Integrals {
    fn step(&mut self, out: &mut Out) -> Turn {
        // Recursions over the primitives of one quartet of shells, all in the buffers.
        let words = self.buffers.bytes / 8;
        // The types of the shells choose the routines: the outer two stay, the inner ones are of three kinds.
        let types = self.quartet / 64 * 3 + self.quartet % 3;
        for term in 0..96u64 {
            if term.is_multiple_of(24) {
                out.enter(mix(types * 4 + term / 24) as u32);
            }
            out.load(self.buffers.at((term * 5 + self.quartet) % words, 8));
            out.load(self.buffers.at((term * 11 + 3 * self.quartet) % words, 8));
            out.store(self.buffers.at((term + self.quartet) % words, 8));
        }
        // Four shells: two stay for long (the outer loops), two move on. 4 x 4 blocks of both matrices.
        let tiles = self.side.div_ceil(4);
        let (outer, inner) = (self.quartet / 64, self.quartet);
        let row = mix(outer ^ self.salt) % tiles * 4;
        let column = mix(inner ^ self.salt << 1) % tiles * 4;
        for i in (row..row + 4).filter(|i| *i < self.side) {
            for j in (column..column + 4).filter(|j| *j < self.side) {
                out.load(self.density.at(i * self.side + j, 8));
                out.load(self.fock.at(i * self.side + j, 8));
                out.store(self.fock.at(i * self.side + j, 8));
            }
        }
        self.quartet += 1;
        Turn::More
    }

    fn progress(&self) -> f64 {
        self.quartet as f64
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
    fn new(setup: &mut Setup) -> Self {
        let bytes = setup.data_bytes();
        let hierarchy = setup.region("bounding boxes", bytes / 8, Users::All);
        let image = setup.region("image", bytes / 8, Users::All);
        let shapes = setup.region("shapes and textures", bytes - hierarchy.bytes - image.bytes, Users::All);
        let rng = setup.rng.clone();
        RayTracer { hierarchy, shapes, image, rays: 0, rng }
    }
}

impl Kernel for RayTracer {
    fn step(&mut self, out: &mut Out) -> Turn {
        let functions = u64::from(out.functions());
        let boxes = self.hierarchy.bytes / BOX_BYTES;
        // Neighbouring pixels hit neighbouring shapes: the leaf drifts, secondary rays leave it.
        let drift = self.rays / 64 * 3 % boxes;
        let leaf = if self.rng.below(48) == 0 { self.rng.skewed(boxes) } else { (drift + self.rng.below(4)) % boxes };
        let mut node = 1;
        while node < boxes {
            let record = self.hierarchy.at(node, BOX_BYTES);
            out.chase(record);
            for word in 1..6 {
                out.load(record + word * 8);
            }
            node = 2 * node + (leaf * node.next_power_of_two() * 2 / boxes) % 2;
        }
        out.enter(self.rng.function(functions));
        let record = self.hierarchy.at(leaf, BOX_BYTES);
        out.load(record);
        let shapes = self.shapes.bytes / SHAPE_BYTES;
        let shape = self.shapes.at((leaf * shapes + self.rays % boxes) / boxes, SHAPE_BYTES) + self.rays % 2 * 64;
        out.chase(shape);
        for word in 0..24u64 {
            if word.is_multiple_of(8) {
                out.enter(self.rng.function(functions));
            }
            out.load(shape + word * 8);
        }
        // Texture: some other part of the shapes' memory, seldom.
        if self.rng.below(64) == 0 {
            let other = self.rng.skewed(shapes);
            for word in 0..8 {
                out.load(self.shapes.at(other, SHAPE_BYTES) + word * 32);
            }
        }
        out.store(self.image.at(self.rays / 4 % (self.image.bytes / 8), 8));
        self.rays += 1;
        Turn::More
    }

    fn progress(&self) -> f64 {
        self.rays as f64
    }
}
