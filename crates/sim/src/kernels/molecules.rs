//! ammp and namd: forces between atoms over neighbor lists.
//!
//! Method: atoms are in a box, numbered along the cells of a coarse grid, and the neighbor list of an atom contains
//! atoms of its own and adjoining cells. ammp stores each atom in a large record and reaches neighbors by pointer. namd
//! works on small compact coordinate arrays of one pair of patches at a time, with many instructions per access.

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::random::{Rng, mix, scale};
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("ammp", |setup| setup.add_single_kernel(|setup| Molecules::new(setup, 2048, 120))),
    ("namd", |setup| setup.add_single_kernel(|setup| Molecules::new(setup, 128, 160))),
];

/// Number of steps between two rebuilds of the neighbor lists.
const STEPS_PER_REBUILD: u64 = 20;

struct Molecules {
    atoms: Region,
    lists: Region,
    atom_bytes: u64,
    neighbors: u64,
    count: u64,
    next: u64,
    steps: u64,
    rebuilding: bool,
    salt: u64,
    rng: Rng,
}

impl Molecules {
    fn new(setup: &mut KernelSetup, atom_bytes: u64, neighbors: u64) -> Self {
        let count = setup.data_bytes() / (atom_bytes + neighbors * 4);
        let atoms = setup.add_region("atoms", count * atom_bytes, RegionUsers::All);
        let lists = setup.add_region("neighbor lists", count * neighbors * 4, RegionUsers::All);
        let mut rng = setup.rng.clone();
        let salt = rng.bits();
        Molecules { atoms, lists, atom_bytes, neighbors, count, next: 0, steps: 0, rebuilding: false, salt, rng }
    }

    /// Returns neighbor `slot` of `atom`, within its own row of cells, or in the adjacent rows and planes.
    fn neighbor(&self, atom: u64, slot: u64) -> u64 {
        let plane = (self.count / 24).max(1);
        let row = (plane / 24).max(1);
        let hash = mix((atom * self.neighbors + slot) ^ self.salt);
        let shift = [0, 0, row, plane][(hash & 3) as usize];
        (atom + shift + scale(hash, 2 * row + 1)) % self.count
    }

    fn emit_forces(&self, atom: u64, out: &mut AccessEmitter) {
        let own_atom = self.atoms.element_address(atom, self.atom_bytes);
        for word in 0..4 {
            out.load(own_atom + word * 8);
        }
        for slot in 0..self.neighbors {
            if slot.is_multiple_of(2) {
                out.load(self.lists.element_address(atom * self.neighbors + slot, 4));
            }
            let neighbor = self.atoms.element_address(self.neighbor(atom, slot), self.atom_bytes);
            out.chase(neighbor);
            out.load(neighbor + 8);
            out.load(neighbor + 16);
            out.load(neighbor + 24);
            // Beyond the cutoff (half of the list), no force is added.
            if mix(atom ^ slot << 32) & 1 == 0 {
                out.load(neighbor + 40);
                out.store(neighbor + 40);
                out.store(neighbor + 48);
            }
        }
        out.load(own_atom + 64);
        out.store(own_atom + 72);
    }

    fn rebuild(&self, atom: u64, out: &mut AccessEmitter) {
        // Multipoles, bonds and old coordinates, further on in the record, are used only here.
        for offset in (0..self.atom_bytes).step_by(64) {
            out.load(self.atoms.element_address(atom, self.atom_bytes) + offset);
        }
        for slot in 0..self.neighbors {
            out.load(self.atoms.element_address(self.neighbor(atom, slot), self.atom_bytes));
            out.store(self.lists.element_address(atom * self.neighbors + slot, 4));
        }
    }
}

impl WorkloadKernel for Molecules {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        if self.next.is_multiple_of(16) {
            out.enter_function((self.next / 16) as u32);
        }
        if self.rebuilding {
            self.rebuild(self.next, out)
        } else {
            self.emit_forces(self.next, out)
        }
        self.next += 1;
        if self.next == self.count {
            self.next = 0;
            if self.rebuilding {
                self.rebuilding = false;
                self.salt = self.rng.bits();
            } else {
                self.steps += 1;
                self.rebuilding = self.steps.is_multiple_of(STEPS_PER_REBUILD);
            }
        }
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.steps as f64
    }
}
