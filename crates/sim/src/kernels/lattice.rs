//! milc, lbm and libquantum: long arrays of sites updated in place or from one array to the other.
//!
//! Method: milc multiplies, for each site and direction, the 3x3 complex link matrix with the neighbour's vector; the
//! fields are separate arrays as large as the lattice. lbm streams 19 distributions of each cell from one grid to
//! shifted cells of the other. libquantum applies gate after gate to every basis state of the register.

use cachemate_core::Turn;

use super::out::Out;
use super::random::Rng;
use super::registry::ProgramSpec;
use super::setup::{Kernel, Region, Setup, Users};
use super::{Code, Pace};

pub(super) const PROGRAMS: &[ProgramSpec] = &[
    ProgramSpec {
        name: "milc",
        stands_for: "SPEC CPU2006 433.milc",
        algorithm: "lattice QCD: 3x3 complex matrices times neighbours' vectors, all directions",
        footprint_bytes: 700_000_000,
        footprint_source: "Henning 2007 (CPU2006 memory footprint): about 700 MB",
        pace: Pace { instructions_per_access: 2.08, stack_per_access: 1.2 },
        pace_source: "Phansalkar et al. 2007: 37.3 % loads, 10.7 % stores",
        code: Code { functions: 5, function_instr: 256 },
        code_source: "estimate: unrolled matrix routines",
        phases: "directions in turn, then the update of the links",
        unit: "lattice sweeps",
        threads: (1, 1),
        make: |setup| setup.single(Gauge::new),
    },
    ProgramSpec {
        name: "lbm",
        stands_for: "SPEC CPU2006 470.lbm",
        algorithm: "lattice Boltzmann D3Q19: cells streamed from one grid to the other",
        footprint_bytes: 420_000_000,
        footprint_source: "Henning 2007 (CPU2006 memory footprint): about 420 MB",
        pace: Pace { instructions_per_access: 2.87, stack_per_access: 2.1 },
        pace_source: "Phansalkar et al. 2007: 26.3 % loads, 8.5 % stores, 1375e9 instructions (352 a cell and step)",
        code: Code { functions: 1, function_instr: 320 },
        code_source: "estimate: one unrolled cell update",
        phases: "none",
        unit: "time steps",
        threads: (1, 1),
        make: |setup| setup.single(Boltzmann::new),
    },
    ProgramSpec {
        name: "libquantum",
        stands_for: "SPEC CPU2006 462.libquantum",
        algorithm: "quantum register: gates swept over all basis states",
        footprint_bytes: 64 << 20,
        footprint_source: "register of 2^22 states of 16 bytes; Henning 2007: about 100 MB resident",
        pace: Pace { instructions_per_access: 5.15, stack_per_access: 0.3 },
        pace_source: "Phansalkar et al. 2007: 14.4 % loads, 5.0 % stores",
        code: Code { functions: 3, function_instr: 48 },
        code_source: "estimate: one loop per gate kind",
        phases: "one gate after the other, all alike to a cache",
        unit: "gates",
        threads: (1, 1),
        make: |setup| setup.single(Register::new),
    },
];

/// Bytes of an su3 matrix and vector in single precision complex.
const MATRIX_BYTES: u64 = 72;
const VECTOR_BYTES: u64 = 24;
const VECTORS: u64 = 8;

struct Gauge {
    links: Region,
    vectors: Vec<Region>,
    sites: u64,
    side: u64,
    site: u64,
    direction: u64,
    sweep: u64,
}

impl Gauge {
    fn new(setup: &mut Setup) -> Self {
        let sites = setup.data_bytes() / (4 * MATRIX_BYTES + VECTORS * VECTOR_BYTES);
        let links = setup.region("links", sites * 4 * MATRIX_BYTES, Users::All);
        let vectors = (0..VECTORS).map(|_| setup.region("vector field", sites * VECTOR_BYTES, Users::All)).collect();
        let sites = sites - 8;
        let side = libm::sqrt(libm::sqrt(sites as f64)) as u64;
        Gauge { links, vectors, sites, side: side.max(1), site: setup.rng.below(sites), direction: 0, sweep: 0 }
    }

    fn multiply(&self, site: u64, out: &mut Out) {
        let shift = self.side.pow(self.direction as u32 % 4);
        let neighbour = (site + shift) % self.sites;
        let pair = (self.sweep % (VECTORS / 2)) as usize * 2;
        let source = self.vectors[pair].at(neighbour, VECTOR_BYTES);
        let target = self.vectors[pair + 1].at(site, VECTOR_BYTES);
        let link = self.links.at(site * 4 + self.direction % 4, MATRIX_BYTES);
        for row in 0..3 {
            for column in 0..3 {
                out.load(link + (row * 3 + column) * 8);
                out.load(source + column * 8);
            }
            if self.direction > 0 {
                out.load(target + row * 8);
            }
            out.store(target + row * 8);
        }
    }

    /// Links move by the force, which comes from the matrix and the vectors at the site.
    fn update(&self, site: u64, out: &mut Out) {
        for direction in 0..4 {
            let link = self.links.at(site * 4 + direction, MATRIX_BYTES);
            for word in 0..9 {
                out.load(link + word * 8);
                out.store(link + word * 8);
            }
        }
    }
}

impl Kernel for Gauge {
    fn step(&mut self, out: &mut Out) -> Turn {
        let end = (self.site + 16).min(self.sites);
        for site in self.site..end {
            if self.direction < 4 { self.multiply(site, out) } else { self.update(site, out) }
        }
        self.site = end;
        if end == self.sites {
            self.site = 0;
            self.direction += 1;
            // One update of the links to four products with each vector field.
            let last = if (self.sweep + 1).is_multiple_of(16) { 5 } else { 4 };
            if self.direction >= last {
                self.direction = 0;
                self.sweep += 1;
            }
            out.enter(self.direction as u32);
        }
        Turn::More
    }

    fn progress(&self) -> f64 {
        self.sweep as f64
    }
}

const CELL_BYTES: u64 = 160;

struct Boltzmann {
    grids: [Region; 2],
    cells: u64,
    row: u64,
    cell: u64,
    steps: u64,
}

impl Boltzmann {
    fn new(setup: &mut Setup) -> Self {
        let cells = setup.data_bytes() / (2 * CELL_BYTES);
        let grids = ["grid", "other grid"].map(|name| setup.region(name, cells * CELL_BYTES, Users::All));
        let cells = grids[0].bytes / CELL_BYTES;
        // 100 x 100 x 130 cells in the reference input: rows of a hundred.
        Boltzmann { grids, cells, row: 100.min(cells / 64).max(1), cell: setup.rng.below(cells), steps: 0 }
    }
}

impl Kernel for Boltzmann {
    fn step(&mut self, out: &mut Out) -> Turn {
        let (source, target) = (self.grids[(self.steps & 1) as usize], self.grids[(self.steps & 1) as usize ^ 1]);
        let plane = (self.row * self.row).min(self.cells / 4);
        let end = (self.cell + 8).min(self.cells);
        for cell in self.cell..end {
            let from = source.at(cell, CELL_BYTES);
            for word in 0..20 {
                out.load(from + word * 8);
            }
            // Each distribution goes to the cell in its direction; the grid is periodic here.
            for word in 0..19 {
                let (dx, dy, dz) = (word % 3, word / 3 % 3, word / 9 % 3);
                let shift = self.cells + dx + dy * self.row + dz * plane - 1 - self.row - plane;
                out.store(target.at((cell + shift) % self.cells, CELL_BYTES) + word * 8);
            }
        }
        self.cell = end;
        if end == self.cells {
            self.cell = 0;
            self.steps += 1;
        }
        Turn::More
    }

    fn progress(&self) -> f64 {
        self.steps as f64
    }
}

struct Register {
    states: Region,
    count: u64,
    next: u64,
    kind: u32,
    gates: u64,
    salt: u64,
    rng: Rng,
}

impl Register {
    fn new(setup: &mut Setup) -> Self {
        let states = setup.region("register", setup.data_bytes(), Users::All);
        let mut rng = setup.rng.clone();
        Register { states, count: states.bytes / 16, next: 0, kind: 0, gates: 0, salt: rng.bits(), rng }
    }
}

impl Kernel for Register {
    fn step(&mut self, out: &mut Out) -> Turn {
        // Bits that must be set for the gate to act: two controls of a Toffoli gate, one of a CNOT, none of a NOT.
        let one = 1 << (self.salt % 16);
        let mask = [one | one << (1 + self.salt / 16 % 5), one, 0][self.kind as usize];
        let end = (self.next + 128).min(self.count);
        for state in self.next..end {
            let address = self.states.at(state, 16) + 8;
            out.load(address);
            if state & mask == mask {
                out.store(address);
            }
        }
        self.next = end;
        if end == self.count {
            self.next = 0;
            self.gates += 1;
            self.salt = self.rng.bits();
            // Shor's modular exponentiation is mostly Toffoli gates.
            self.kind = [0, 0, 0, 0, 1, 1, 1, 2][self.rng.below(8) as usize];
            out.enter(self.kind);
        }
        Turn::More
    }

    fn progress(&self) -> f64 {
        self.gates as f64
    }
}
