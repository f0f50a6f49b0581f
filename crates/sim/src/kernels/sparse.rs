//! equake and soplex: sparse matrices.
//!
//! Method: equake multiplies a symmetric sparse matrix of 3x3 blocks with a displacement vector each time step (column
//! index, block, gather, scatter), then integrates over plain vectors. soplex prices the columns of a linear program
//! against the dual vector. It reads column headers, then the nonzeros' index and value, gathers from the dense dual,
//! and occasionally solves with the factorized basis.

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::random::{Rng, mix, scale};
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("equake", |setup| setup.add_single_kernel(Earthquake::new)),
    ("soplex", |setup| setup.add_single_kernel(LinearProgram::new)),
];

const BLOCK_BYTES: u64 = 72;
/// Number of stored nonzero blocks of a row: the published mesh has about 13, half of which are stored, by symmetry.
const ROW_BLOCKS: u64 = 7;

struct Earthquake {
    matrix: Region,
    columns: Region,
    /// Displacements of three time levels, velocities and masses, with three doubles per node each.
    vectors: Vec<Region>,
    nodes: u64,
    row: u64,
    integrating: bool,
    salt: u64,
    steps: u64,
}

impl Earthquake {
    fn new(setup: &mut KernelSetup) -> Self {
        let nodes = setup.data_bytes() / (ROW_BLOCKS * (BLOCK_BYTES + 4) + 6 * 24);
        let matrix = setup.add_region("matrix", nodes * ROW_BLOCKS * BLOCK_BYTES, RegionUsers::All);
        let columns = setup.add_region("column indices", nodes * ROW_BLOCKS * 4, RegionUsers::All);
        let vectors = (0..6).map(|_| setup.add_region("vector", nodes * 24, RegionUsers::All)).collect();
        let (salt, row) = (setup.rng.bits(), setup.rng.draw_below(nodes));
        Earthquake { matrix, columns, vectors, nodes, row, integrating: false, salt, steps: 0 }
    }

    /// Emits the multiplication with one row, which also scatters the row's transpose.
    fn multiply_row(&self, row: u64, out: &mut AccessEmitter) {
        let (source, target) = (self.vectors[0], self.vectors[1]);
        for word in 0..3 {
            out.load(source.element_address(row, 24) + word * 8);
        }
        for nonzero in row * ROW_BLOCKS..(row + 1) * ROW_BLOCKS {
            out.load(self.columns.element_address(nonzero, 4));
            // A mesh is numbered by regions, so most neighbors are close and some are far.
            let hash = mix(nonzero ^ self.salt);
            let span = if hash & 7 == 0 { self.nodes / 8 } else { 512 };
            let column = (row + 1 + scale(hash, span.max(1))) % self.nodes;
            for word in 0..3 {
                out.chase(source.element_address(column, 24) + word * 8);
            }
            let block = self.matrix.element_address(nonzero, BLOCK_BYTES);
            for word in 0..9 {
                out.load(block + word * 8);
            }
            for word in 0..3 {
                out.load(target.element_address(column, 24) + word * 8);
                out.store(target.element_address(column, 24) + word * 8);
            }
        }
        for word in 0..3 {
            out.store(target.element_address(row, 24) + word * 8);
        }
    }

    fn integrate(&self, row: u64, out: &mut AccessEmitter) {
        for vector in &self.vectors[..5] {
            for word in 0..3 {
                out.load(vector.element_address(row, 24) + word * 8);
            }
        }
        for word in 0..3 {
            out.store(self.vectors[0].element_address(row, 24) + word * 8);
            out.store(self.vectors[5].element_address(row, 24) + word * 8);
        }
    }
}

impl WorkloadKernel for Earthquake {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        let rows = if self.integrating { 24 } else { 4 };
        let end = (self.row + rows).min(self.nodes);
        for row in self.row..end {
            if self.integrating { self.integrate(row, out) } else { self.multiply_row(row, out) }
        }
        self.row = end;
        if end == self.nodes {
            self.row = 0;
            self.steps += u64::from(self.integrating);
            self.integrating = !self.integrating;
            out.enter_function(u32::from(self.integrating));
        }
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.steps as f64
    }
}

/// Number of nonzeros of a column, which are 16-byte pairs of index and value.
const COLUMN_NONZEROS: u64 = 8;
const COLUMN_BYTES: u64 = COLUMN_NONZEROS * 16;

struct LinearProgram {
    columns: Region,
    headers: Region,
    dual: Region,
    factors: Region,
    count: u64,
    rows: u64,
    next: u64,
    solve_left: u64,
    rng: Rng,
    salt: u64,
    iterations: u64,
}

impl LinearProgram {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        // pds-50 has 83 060 rows and 275 814 columns: about three columns per row; factors take a tenth.
        let factors = setup.add_region("basis factors", bytes / 10, RegionUsers::All);
        let count = (bytes - bytes / 10) / (COLUMN_BYTES + 32 + 3);
        let rows = (count * 3 / 8).max(8);
        let columns = setup.add_region("columns", count * COLUMN_BYTES, RegionUsers::All);
        let headers = setup.add_region("column headers", count * 32, RegionUsers::All);
        let dual = setup.add_region("dual vector", rows * 8, RegionUsers::All);
        let mut rng = setup.rng.clone();
        let (next, salt) = (rng.draw_below(count), rng.bits());
        let rows = dual.bytes / 8;
        LinearProgram { columns, headers, dual, factors, count, rows, next, solve_left: 0, rng, salt, iterations: 0 }
    }

    fn price_column(&self, column: u64, out: &mut AccessEmitter) {
        let header = self.headers.element_address(column, 32);
        out.load(header);
        out.load(header + 8);
        // Columns are ordered by commodity, as are their rows.
        let base = (scale(self.salt, self.rows) + column * self.rows / self.count) % self.rows;
        for nonzero in 0..COLUMN_NONZEROS {
            let entry = self.columns.element_address(column, COLUMN_BYTES) + nonzero * 16;
            out.load(entry);
            // Network rows of one commodity lie together.
            let row = (base + scale(mix(column * 8 + nonzero), 2048.min(self.rows))) % self.rows;
            out.chase(self.dual.element_address(row, 8));
            out.load(entry + 8);
        }
        out.store(header + 16);
    }

    fn solve(&mut self, out: &mut AccessEmitter) {
        let vectors = self.factors.bytes / 64 - 2;
        let at = self.factors.element_address(self.rng.draw_below(vectors), 64);
        out.chase(at);
        for word in 1..24 {
            out.load(at + word * 8);
        }
        let row = (self.next * self.rows / self.count + self.rng.draw_below(2048)) % self.rows;
        out.chase(self.dual.element_address(row, 8));
        out.store(self.dual.element_address(row, 8));
    }
}

/// Number of columns priced and of factor vectors read per simplex iteration.
const PRICED: u64 = 4096;
const SOLVED: u64 = 1024;

impl WorkloadKernel for LinearProgram {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        if self.solve_left > 0 {
            out.enter_function(12 + (self.solve_left / 16) as u32 % 12);
            for _ in 0..16 {
                self.solve(out);
            }
            self.solve_left -= 16;
            return BatchEnd::More;
        }
        out.enter_function((self.next / 8) as u32 % 12);
        for _ in 0..8 {
            self.price_column(self.next, out);
            self.next = (self.next + 1) % self.count;
        }
        if self.next % PRICED < 8 {
            self.solve_left = SOLVED;
            self.iterations += 1;
        }
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.iterations as f64
    }
}
