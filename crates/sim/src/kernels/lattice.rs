//! lbm and libquantum: long arrays of sites, updated in place or from one array to another.
//!
//! Method: lbm streams the 19 distributions of each cell from one grid to the neighboring cells of the other.
//! libquantum applies gate after gate to every basis state of the register.

use super::emitter::AccessEmitter;
use super::random::Rng;
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("lbm", |setup| setup.add_single_kernel(Boltzmann::new)),
    ("libquantum", |setup| setup.add_single_kernel(Register::new)),
];

/// Size of a cell in bytes: 19 distributions and the flags, as doubles.
const CELL_BYTES: u64 = 160;

/// Direction of each distribution, in the order within the cell (470.lbm: C N S E W T B NE NW SE SW NT NB ST SB ET EB
/// WT WB).
const DIRECTIONS: [[i64; 3]; 19] = [
    [0, 0, 0],
    [0, 1, 0],
    [0, -1, 0],
    [1, 0, 0],
    [-1, 0, 0],
    [0, 0, 1],
    [0, 0, -1],
    [1, 1, 0],
    [-1, 1, 0],
    [1, -1, 0],
    [-1, -1, 0],
    [0, 1, 1],
    [0, 1, -1],
    [0, -1, 1],
    [0, -1, -1],
    [1, 0, 1],
    [1, 0, -1],
    [-1, 0, 1],
    [-1, 0, -1],
];

struct Boltzmann {
    grids: [Region; 2],
    cells: u64,
    row_cells: u64,
    next_cell: u64,
}

impl Boltzmann {
    fn new(setup: &mut KernelSetup) -> Self {
        let cells = setup.data_bytes() / (2 * CELL_BYTES);
        let grids =
            ["grid", "other grid"].map(|name| setup.add_shared_region(name, cells * CELL_BYTES));
        let cells = grids[0].bytes / CELL_BYTES;
        // The reference input has 100 x 100 x 130 cells, in rows of a hundred.
        Boltzmann {
            grids,
            cells,
            row_cells: 100.min(cells / 64).max(1),
            next_cell: setup.rng.draw_below(cells),
        }
    }
}

impl WorkloadKernel for Boltzmann {
    fn step(&mut self, out: &mut AccessEmitter) {
        let (source, target) = (
            self.grids[(out.work_done & 1) as usize],
            self.grids[(out.work_done & 1) as usize ^ 1],
        );
        let plane_cells = (self.row_cells * self.row_cells).min(self.cells / 4);
        let end = (self.next_cell + 8).min(self.cells);
        for cell in self.next_cell..end {
            let cell_address = source.element_address(cell, CELL_BYTES);
            for word in 0..20 {
                out.load(cell_address + word * 8);
            }
            // Each distribution goes to the cell in its direction; the grid is periodic here.
            for (word, [dx, dy, dz]) in (0..).zip(DIRECTIONS) {
                let offset = dx + dy * self.row_cells as i64 + dz * plane_cells as i64;
                let target_cell = (cell as i64 + offset).rem_euclid(self.cells as i64) as u64;
                out.store(target.element_address(target_cell, CELL_BYTES) + word * 8);
            }
        }
        self.next_cell = end;
        if end == self.cells {
            self.next_cell = 0;
            out.work_done += 1;
        }
    }
}

struct Register {
    states: Region,
    state_count: u64,
    next_state: u64,
    gate_kind: u32,
    salt: u64,
    rng: Rng,
}

impl Register {
    fn new(setup: &mut KernelSetup) -> Self {
        let states = setup.add_shared_region("register", setup.data_bytes());
        let mut rng = setup.rng.clone();
        Register {
            states,
            state_count: states.bytes / 16,
            next_state: 0,
            gate_kind: 0,
            salt: rng.next_bits(),
            rng,
        }
    }
}

impl WorkloadKernel for Register {
    fn step(&mut self, out: &mut AccessEmitter) {
        // These bits must be set for the gate to act: two controls of a Toffoli gate, one of a CNOT, none of a NOT.
        let bit = 1 << (self.salt % 16);
        let mask = [bit | bit << (1 + self.salt / 16 % 5), bit, 0][self.gate_kind as usize];
        let end = (self.next_state + 128).min(self.state_count);
        for state in self.next_state..end {
            let address = self.states.element_address(state, 16) + 8;
            out.load(address);
            if state & mask == mask {
                out.store(address);
            }
        }

        self.next_state = end;
        if end == self.state_count {
            self.next_state = 0;
            out.work_done += 1;
            self.salt = self.rng.next_bits();
            // Shor's modular exponentiation is mostly Toffoli gates.
            self.gate_kind = [0, 0, 0, 0, 1, 1, 1, 2][self.rng.draw_below(8) as usize];
            out.enter_function(self.gate_kind);
        }
    }
}
