//! ammp and namd: forces between atoms over neighbor lists.
//!
//! Method: atoms are in a box, numbered along the cells of a coarse grid, and the neighbor list of an atom contains
//! atoms of its own and adjoining cells. ammp stores each atom in a large record and reaches neighbors by pointer. namd
//! works on small compact coordinate arrays of one pair of patches at a time, with many instructions per access.

use super::emitter::AccessEmitter;
use super::random::{Rng, hash_value, map_to_range};
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("ammp", |setup| {
        setup.add_single_kernel(|setup| Molecules::new(setup, 2048, 120))
    }),
    ("namd", |setup| {
        setup.add_single_kernel(|setup| Molecules::new(setup, 128, 160))
    }),
];

/// Number of steps between two rebuilds of the neighbor lists.
const STEPS_PER_REBUILD: u64 = 20;

struct Molecules {
    atoms: Region,
    lists: Region,
    atom_bytes: u64,
    neighbors_per_atom: u64,
    atom_count: u64,
    next_atom: u64,
    is_rebuilding: bool,
    salt: u64,
    rng: Rng,
}

impl Molecules {
    fn new(setup: &mut KernelSetup, atom_bytes: u64, neighbors_per_atom: u64) -> Self {
        let atom_count = setup.data_bytes() / (atom_bytes + neighbors_per_atom * 4);
        let atoms = setup.add_shared_region("atoms", atom_count * atom_bytes);
        let lists = setup.add_shared_region("neighbor lists", atom_count * neighbors_per_atom * 4);
        let mut rng = setup.rng.clone();
        let salt = rng.next_bits();
        Molecules {
            atoms,
            lists,
            atom_bytes,
            neighbors_per_atom,
            atom_count,
            next_atom: 0,
            is_rebuilding: false,
            salt,
            rng,
        }
    }

    /// Neighbors lie within the atom's own row of cells, or in the adjacent rows and planes.
    fn neighbor(&self, atom: u64, slot: u64) -> u64 {
        let plane_atoms = (self.atom_count / 24).max(1);
        let row_atoms = (plane_atoms / 24).max(1);
        let hash = hash_value((atom * self.neighbors_per_atom + slot) ^ self.salt);
        let cell_shift = [0, 0, row_atoms, plane_atoms][(hash & 3) as usize];
        (atom + cell_shift + map_to_range(hash, 2 * row_atoms + 1)) % self.atom_count
    }

    fn emit_forces(&self, atom: u64, out: &mut AccessEmitter) {
        let own_atom = self.atoms.element_address(atom, self.atom_bytes);
        for word in 0..4 {
            out.load(own_atom + word * 8);
        }
        for slot in 0..self.neighbors_per_atom {
            if slot.is_multiple_of(2) {
                out.load(
                    self.lists
                        .element_address(atom * self.neighbors_per_atom + slot, 4),
                );
            }
            let neighbor = self
                .atoms
                .element_address(self.neighbor(atom, slot), self.atom_bytes);
            out.load_dependent(neighbor);
            out.load(neighbor + 8);
            out.load(neighbor + 16);
            out.load(neighbor + 24);
            // Beyond the cutoff (half of the list), no force is added.
            if hash_value(atom ^ slot << 32) & 1 == 0 {
                out.load(neighbor + 40);
                out.store(neighbor + 40);
                out.store(neighbor + 48);
            }
        }
        out.load(own_atom + 64);
        out.store(own_atom + 72);
    }

    fn emit_list_rebuild(&self, atom: u64, out: &mut AccessEmitter) {
        // Multipoles, bonds and old coordinates, further on in the record, are used only here.
        for offset in (0..self.atom_bytes).step_by(64) {
            out.load(self.atoms.element_address(atom, self.atom_bytes) + offset);
        }
        for slot in 0..self.neighbors_per_atom {
            out.load(
                self.atoms
                    .element_address(self.neighbor(atom, slot), self.atom_bytes),
            );
            out.store(
                self.lists
                    .element_address(atom * self.neighbors_per_atom + slot, 4),
            );
        }
    }
}

impl WorkloadKernel for Molecules {
    fn step(&mut self, out: &mut AccessEmitter) {
        if self.next_atom.is_multiple_of(16) {
            out.enter_function((self.next_atom / 16) as u32);
        }

        if self.is_rebuilding {
            self.emit_list_rebuild(self.next_atom, out)
        } else {
            self.emit_forces(self.next_atom, out)
        }

        self.next_atom += 1;
        if self.next_atom == self.atom_count {
            self.next_atom = 0;
            if self.is_rebuilding {
                self.is_rebuilding = false;
                self.salt = self.rng.next_bits();
            } else {
                out.work_done += 1;
                self.is_rebuilding = out.work_done.is_multiple_of(STEPS_PER_REBUILD);
            }
        }
    }
}
