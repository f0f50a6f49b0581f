//! equake and soplex: sparse matrices.
//!
//! Method: equake multiplies a symmetric sparse matrix of 3x3 blocks with a displacement vector each time step (column
//! index, block, gather, scatter), then integrates over plain vectors. soplex prices the columns of a linear program
//! against the dual vector. It reads column headers, then the nonzeros' index and value, gathers from the dense dual,
//! and occasionally solves with the factorized basis.

use super::emitter::AccessEmitter;
use super::random::{Rng, hash_value, map_to_range};
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("equake", |setup| setup.add_single_kernel(Earthquake::new)),
    ("soplex", |setup| {
        setup.add_single_kernel(LinearProgram::new)
    }),
];

const BLOCK_BYTES: u64 = 72;
/// Number of stored nonzero blocks of a row: the published mesh has about 13, half of which are stored, by symmetry.
const ROW_BLOCKS: u64 = 7;

struct Earthquake {
    matrix: Region,
    columns: Region,
    /// Displacements of three time levels, velocities and masses, with three doubles per node each.
    vectors: Vec<Region>,
    node_count: u64,
    row: u64,
    is_integrating: bool,
    salt: u64,
}

impl Earthquake {
    fn new(setup: &mut KernelSetup) -> Self {
        let node_count = setup.data_bytes() / (ROW_BLOCKS * (BLOCK_BYTES + 4) + 6 * 24);
        let matrix = setup.add_shared_region("matrix", node_count * ROW_BLOCKS * BLOCK_BYTES);
        let columns = setup.add_shared_region("column indices", node_count * ROW_BLOCKS * 4);
        let vectors = (0..6)
            .map(|_| setup.add_shared_region("vector", node_count * 24))
            .collect();
        let (salt, row) = (setup.rng.next_bits(), setup.rng.draw_below(node_count));
        Earthquake {
            matrix,
            columns,
            vectors,
            node_count,
            row,
            is_integrating: false,
            salt,
        }
    }

    /// Emits the multiplication with one row, which also scatters the row's transpose.
    fn emit_row_product(&self, row: u64, out: &mut AccessEmitter) {
        let (source, target) = (self.vectors[0], self.vectors[1]);
        for word in 0..3 {
            out.load(source.element_address(row, 24) + word * 8);
        }

        for nonzero in row * ROW_BLOCKS..(row + 1) * ROW_BLOCKS {
            out.load(self.columns.element_address(nonzero, 4));
            // A mesh is numbered by regions, so most neighbors are close and some are far.
            let hash = hash_value(nonzero ^ self.salt);
            let column_distance = if hash & 7 == 0 {
                self.node_count / 8
            } else {
                512
            };
            let column = (row + 1 + map_to_range(hash, column_distance.max(1))) % self.node_count;
            for word in 0..3 {
                out.load_dependent(source.element_address(column, 24) + word * 8);
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

    fn emit_integration(&self, row: u64, out: &mut AccessEmitter) {
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
    fn step(&mut self, out: &mut AccessEmitter) {
        let rows_per_step = if self.is_integrating { 24 } else { 4 };
        let end = (self.row + rows_per_step).min(self.node_count);
        for row in self.row..end {
            if self.is_integrating {
                self.emit_integration(row, out)
            } else {
                self.emit_row_product(row, out)
            }
        }
        self.row = end;
        if end == self.node_count {
            self.row = 0;
            out.work_done += u64::from(self.is_integrating);
            self.is_integrating = !self.is_integrating;
            out.enter_function(u32::from(self.is_integrating));
        }
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
    column_count: u64,
    row_count: u64,
    next_column: u64,
    vectors_left: u64,
    rng: Rng,
    salt: u64,
}

impl LinearProgram {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        // pds-50 has 83 060 rows and 275 814 columns: about three columns per row; factors take a tenth.
        let factors = setup.add_shared_region("basis factors", bytes / 10);
        let column_count = (bytes - bytes / 10) / (COLUMN_BYTES + 32 + 3);
        let rows = (column_count * 3 / 8).max(8);
        let columns = setup.add_shared_region("columns", column_count * COLUMN_BYTES);
        let headers = setup.add_shared_region("column headers", column_count * 32);
        let dual = setup.add_shared_region("dual vector", rows * 8);
        let mut rng = setup.rng.clone();
        let (next_column, salt) = (rng.draw_below(column_count), rng.next_bits());
        let row_count = dual.bytes / 8;

        LinearProgram {
            columns,
            headers,
            dual,
            factors,
            column_count,
            row_count,
            next_column,
            vectors_left: 0,
            rng,
            salt,
        }
    }

    fn emit_column_pricing(&self, column: u64, out: &mut AccessEmitter) {
        let header = self.headers.element_address(column, 32);
        out.load(header);
        out.load(header + 8);
        // Columns are ordered by commodity, as are their rows.
        let base_row = (map_to_range(self.salt, self.row_count)
            + column * self.row_count / self.column_count)
            % self.row_count;
        for nonzero in 0..COLUMN_NONZEROS {
            let entry = self.columns.element_address(column, COLUMN_BYTES) + nonzero * 16;
            out.load(entry);
            // Network rows of one commodity lie together.
            let row = (base_row
                + map_to_range(hash_value(column * 8 + nonzero), 2048.min(self.row_count)))
                % self.row_count;
            out.load_dependent(self.dual.element_address(row, 8));
            out.load(entry + 8);
        }
        out.store(header + 16);
    }

    fn emit_solve_step(&mut self, out: &mut AccessEmitter) {
        let vector_count = self.factors.bytes / 64 - 2;
        let vector_address = self
            .factors
            .element_address(self.rng.draw_below(vector_count), 64);
        out.load_dependent(vector_address);
        for word in 1..24 {
            out.load(vector_address + word * 8);
        }
        let row = (self.next_column * self.row_count / self.column_count
            + self.rng.draw_below(2048))
            % self.row_count;
        out.load_dependent(self.dual.element_address(row, 8));
        out.store(self.dual.element_address(row, 8));
    }
}

/// Numbers of columns priced and of factor vectors read per simplex iteration.
const COLUMNS_PER_ITERATION: u64 = 4096;
const VECTORS_PER_ITERATION: u64 = 1024;

impl WorkloadKernel for LinearProgram {
    fn step(&mut self, out: &mut AccessEmitter) {
        if self.vectors_left > 0 {
            out.enter_function(12 + (self.vectors_left / 16) as u32 % 12);
            for _ in 0..16 {
                self.emit_solve_step(out);
            }
            self.vectors_left -= 16;
            return;
        }
        out.enter_function((self.next_column / 8) as u32 % 12);
        for _ in 0..8 {
            self.emit_column_pricing(self.next_column, out);
            self.next_column = (self.next_column + 1) % self.column_count;
        }
        if self.next_column % COLUMNS_PER_ITERATION < 8 {
            self.vectors_left = VECTORS_PER_ITERATION;
            out.work_done += 1;
        }
    }
}
