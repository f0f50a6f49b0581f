//! milc: staggered lattice QCD, with the accesses of the public program's loops.
//!
//! The program sweeps a lattice of 700 MB with one loop after another, and no loop finds anything
//! in a cache that an earlier one left there. A run of milliseconds would see one loop of one
//! sweep. So each loop has its own position in the lattice here and processes one time slice in its
//! turn: the mix of loops is that of the whole program within a short run, and still none finds
//! another's lines.
//!
//! For example, a lattice of 20^4 sites at 4,208 bytes has 673 MB, and a time slice of 20^3 sites
//! 34 MB.
//!
//! Layout (MILC 6, `ks_imp_dyn/lattice.h`, as 433.milc builds it: double precision, temporary
//! vectors and links): a site has 1808 bytes; its four links take 576 from byte 112 on, its momenta
//! the next 320, and its two work matrices the last 288 bytes. The fat and long links are stored
//! separately, four matrices of 144 bytes per site; vectors of 48 bytes, pointers and neighbor
//! tables are in their own arrays. Even sites come first.
//!
//! Conjugate gradient (`dslash` on contiguous links), fermion force, gauge force and fat links
//! (strided by a site) take the shares of time that were published for the program.

use super::emitter::AccessEmitter;
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] =
    &[("milc", |setup| setup.add_single_kernel(Gauge::new))];

const WORD_BYTES: u64 = 8;
const MATRIX_WORDS: u64 = 18;
const VECTOR_WORDS: u64 = 6;
const MATRIX_BYTES: u64 = MATRIX_WORDS * WORD_BYTES;
const VECTOR_BYTES: u64 = VECTOR_WORDS * WORD_BYTES;

/// Size of a site in bytes; the offsets of its parts follow (`lattice.h`; by the C ABI of x86-64).
const SITE_BYTES: u64 = 1808;
const PRNG_OFFSET: u64 = 16;
const LINK_OFFSET: u64 = 112;
const MOMENTUM_OFFSET: u64 = 688;
const MOMENTUM_WORDS: u64 = 10;
const PHASE_OFFSET: u64 = 1008;
const FIELDS_OFFSET: u64 = 1040;
const FIELD_VECTORS: u64 = 6;
const WORK_OFFSET: u64 = 1520;
const STAPLE_OFFSET: u64 = 1664;

/// Number of vector arrays besides the sites: those of the solver, of `dslash` and of the fermion force.
const SOLVER_ARRAYS: usize = 4;
const DSLASH_ARRAYS: usize = 9;
const FORCE_ARRAYS: usize = 9;
const GATHERS: u64 = 16;
const BYTES_PER_SITE: u64 = SITE_BYTES
    + 8 * MATRIX_BYTES
    + (SOLVER_ARRAYS + DSLASH_ARRAYS + FORCE_ARRAYS) as u64 * VECTOR_BYTES
    + GATHERS * (POINTER_BYTES + INDEX_BYTES);
const POINTER_BYTES: u64 = 8;
const INDEX_BYTES: u64 = 4;

/// The body of one loop of the program over a part of the lattice. Directions 0 to 3 are forward, 4 to 7 backward.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoopBody {
    /// Sets a gather's pointers from the neighbor table.
    Point(u64),
    /// `dslash` multiplies adjoint links with the local vector; the other side fetches the product.
    Back {
        source: usize,
    },
    /// `dslash` multiplies links with the neighbors' vectors, one hop over fat links and three over long ones.
    Forward {
        source: usize,
    },
    /// `dslash` subtracts the products from the backward direction.
    Subtract,
    /// The solver reads all of these vectors, and writes the last one.
    Axpy(&'static [usize]),
    ShiftForward(u64),
    ShiftBack(u64),
    Fetch(u64),
    AddForce(u64),
    ForceAxpy,
    PathCopy(u64),
    PathMultiply(u64),
    PathForce(u64),
    StapleUp(u64, u64),
    StapleDown(u64, u64),
    StapleAdd(u64, u64),
    Fatten(u64),
    Refresh,
    CopyIn,
    Rephase,
    Update,
}

impl LoopBody {
    fn function_index(self) -> u32 {
        match self {
            LoopBody::Point(_) | LoopBody::Fetch(_) => 0,
            LoopBody::Back { .. } => 1,
            LoopBody::Forward { .. } => 2,
            LoopBody::Subtract => 3,
            LoopBody::Axpy(_) | LoopBody::ForceAxpy => 4,
            LoopBody::ShiftForward(_) => 5,
            LoopBody::ShiftBack(_) => 6,
            LoopBody::AddForce(_) | LoopBody::PathForce(_) => 7,
            LoopBody::PathCopy(_) | LoopBody::PathMultiply(_) => 8,
            LoopBody::StapleUp(..) | LoopBody::StapleDown(..) => 9,
            LoopBody::StapleAdd(..) | LoopBody::Fatten(_) => 10,
            LoopBody::Refresh | LoopBody::CopyIn | LoopBody::Rephase | LoopBody::Update => 11,
        }
    }

    /// So many sites that a step has several hundred accesses.
    fn sites_per_step(self) -> u64 {
        match self {
            LoopBody::Point(_) => 64,
            LoopBody::Axpy(_) | LoopBody::ForceAxpy | LoopBody::Fetch(_) => 16,
            _ => 4,
        }
    }
}

/// A loop of the program, with its position in the lattice.
struct LatticeLoop {
    body: LoopBody,
    first_site: u64,
    site_count: u64,
    position: u64,
}

/// The loops of a routine, which run in turn, with the work done so far.
struct Routine {
    sweeps: Vec<LatticeLoop>,
    next_sweep: usize,
    /// Share of the routine, in percent of the accesses.
    share_percent: u64,
    access_count: u64,
}

struct Gauge {
    lattice: Region,
    fat_links: Region,
    long_links: Region,
    solver_vectors: Vec<Region>,
    dslash_vectors: Vec<Region>,
    force_vectors: Vec<Region>,
    pointers: Region,
    neighbors: Region,
    site_count: u64,
    /// Length of the lattice's side in x, y and z; `time_slices` is its length in t.
    side: u64,
    time_slices: u64,
    routines: Vec<Routine>,
    current_routine: usize,
    /// Number of sites left in the current slice.
    sites_left: u64,
}

impl Gauge {
    fn new(setup: &mut KernelSetup) -> Self {
        // Regions consist of whole lines, so up to 64 bytes of each are lost.
        let regions = (5 + SOLVER_ARRAYS + DSLASH_ARRAYS + FORCE_ARRAYS) as u64;
        let fitting_sites = (setup.data_bytes() - regions * 64) / BYTES_PER_SITE;
        let side = (libm::sqrt(libm::sqrt(fitting_sites as f64)) as u64 & !1).max(2);
        let time_slices = (fitting_sites / side.pow(3)).max(1);
        let site_count = side.pow(3) * time_slices;
        let mut declare_lattice = |name, bytes| setup.add_shared_region(name, site_count * bytes);
        let lattice = declare_lattice("sites", SITE_BYTES);
        let [fat_links, long_links] =
            ["fat links", "long links"].map(|name| declare_lattice(name, 4 * MATRIX_BYTES));

        let solver_vectors = (0..SOLVER_ARRAYS)
            .map(|_| declare_lattice("solver's vector", VECTOR_BYTES))
            .collect();
        let dslash_vectors = (0..DSLASH_ARRAYS)
            .map(|_| declare_lattice("dslash's vector", VECTOR_BYTES))
            .collect();
        let force_vectors = (0..FORCE_ARRAYS)
            .map(|_| declare_lattice("force's vector", VECTOR_BYTES))
            .collect();

        let pointers = declare_lattice("gathered pointers", GATHERS * POINTER_BYTES);
        let neighbors = declare_lattice("neighbor tables", GATHERS * INDEX_BYTES);
        let mut routines = build_routines(site_count);
        for routine in &mut routines {
            let loop_count = routine.sweeps.len() as u64;
            for (nth, sweep) in (0..).zip(&mut routine.sweeps) {
                // Each loop is ahead of the one after it.
                sweep.position = (setup.rng.draw_below(site_count)
                    + (loop_count - nth) * sweep.site_count / loop_count)
                    % sweep.site_count;
            }
        }

        Gauge {
            lattice,
            fat_links,
            long_links,
            solver_vectors,
            dslash_vectors,
            force_vectors,
            pointers,
            neighbors,
            site_count,
            side,
            time_slices,
            routines,
            current_routine: 0,
            sites_left: 0,
        }
    }

    /// The site at this number of hops in a direction of a periodic lattice. Even sites are the
    /// first half.
    fn neighbor(&self, site: u64, direction: u64, hops: u64) -> u64 {
        let (half_count, side) = (self.site_count / 2, self.side);
        let is_odd = u64::from(site >= half_count);
        let pair = site - is_odd * half_count;
        let row = pair / (side / 2);
        let mut coordinates = [0, row % side, row / side % side, row / (side * side)];
        coordinates[0] = pair % (side / 2) * 2
            + ((coordinates[1] + coordinates[2] + coordinates[3] + is_odd) & 1);
        let axis = (direction % 4) as usize;
        let length = if axis == 3 { self.time_slices } else { side };
        let hops = hops % length;
        coordinates[axis] =
            (coordinates[axis] + if direction < 4 { hops } else { length - hops }) % length;
        let is_odd = (coordinates[0] + coordinates[1] + coordinates[2] + coordinates[3]) & 1;
        (coordinates[0] + side * (coordinates[1] + side * (coordinates[2] + side * coordinates[3])))
            / 2
            + is_odd * half_count
    }

    fn site_address(&self, site: u64, offset: u64) -> u64 {
        self.lattice.element_address(site, SITE_BYTES) + offset
    }

    fn link_address(&self, site: u64, direction: u64) -> u64 {
        self.site_address(site, LINK_OFFSET + direction % 4 * MATRIX_BYTES)
    }

    fn momentum_address(&self, site: u64, direction: u64) -> u64 {
        self.site_address(
            site,
            MOMENTUM_OFFSET + direction % 4 * MOMENTUM_WORDS * WORD_BYTES,
        )
    }

    fn pointer_address(&self, gather: u64, site: u64) -> u64 {
        self.pointers
            .element_address(gather * self.site_count + site, POINTER_BYTES)
    }

    /// Emits reads of `words` words through a gathered pointer.
    fn emit_gather(
        &self,
        gather: u64,
        site: u64,
        target: u64,
        words: u64,
        out: &mut AccessEmitter,
    ) {
        out.load(self.pointer_address(gather, site));
        out.load_dependent(target);
        load_words(out, target + WORD_BYTES, words - 1);
    }

    fn emit_site_accesses(&self, body: LoopBody, site: u64, out: &mut AccessEmitter) {
        // Parts of a site, as address and number of words.
        let part = |offset: u64, words: u64| (self.site_address(site, offset), words);
        let (work, staple) = (
            part(WORK_OFFSET, MATRIX_WORDS),
            part(STAPLE_OFFSET, MATRIX_WORDS),
        );
        let (links, momenta) = (
            part(LINK_OFFSET, 4 * MATRIX_WORDS),
            part(MOMENTUM_OFFSET, 4 * MOMENTUM_WORDS),
        );
        let link = |direction: u64| (self.link_address(site, direction), MATRIX_WORDS);
        let momentum = |direction: u64| (self.momentum_address(site, direction), MOMENTUM_WORDS);
        let force_vector = |vector: usize| {
            (
                self.force_vectors[vector].element_address(site, VECTOR_BYTES),
                VECTOR_WORDS,
            )
        };
        match body {
            LoopBody::Point(gather) => {
                out.load(
                    self.neighbors
                        .element_address(gather * self.site_count + site, INDEX_BYTES),
                );
                out.store(self.pointer_address(gather, site));
            }
            LoopBody::Back { source } => self.multiply_adjoint_links(site, source, out),
            LoopBody::Forward { source } => self.emit_forward_products(site, source, out),
            LoopBody::Subtract => self.emit_backward_subtraction(site, out),
            LoopBody::Axpy(vectors) => {
                let address =
                    |vector: usize| self.solver_vectors[vector].element_address(site, VECTOR_BYTES);
                vectors
                    .iter()
                    .for_each(|&vector| load_words(out, address(vector), VECTOR_WORDS));
                store_words(
                    out,
                    address(vectors.last().map_or(0, |&last| last)),
                    VECTOR_WORDS,
                );
            }
            LoopBody::ShiftForward(direction) => {
                load_words(out, self.link_address(site, direction), MATRIX_WORDS);
                let source = self.force_vectors[0]
                    .element_address(self.neighbor(site, direction, 1), VECTOR_BYTES);
                self.emit_gather(0, site, source, VECTOR_WORDS, out);
                emit_update(out, &[], force_vector(1));
            }
            LoopBody::ShiftBack(direction) => {
                emit_update(out, &[link(direction), force_vector(2)], force_vector(3))
            }
            LoopBody::Fetch(direction) => {
                let source = self.force_vectors[3]
                    .element_address(self.neighbor(site, direction + 4, 1), VECTOR_BYTES);
                self.emit_gather(0, site, source, VECTOR_WORDS, out);
                emit_update(out, &[], force_vector(4));
            }
            LoopBody::AddForce(direction) => {
                emit_update(
                    out,
                    &[force_vector(5), force_vector(6), momentum(direction)],
                    momentum(direction),
                );
            }
            LoopBody::ForceAxpy => {
                emit_update(out, &[force_vector(7), force_vector(1)], force_vector(7))
            }
            LoopBody::PathCopy(direction) => {
                let source = self.site_address(self.neighbor(site, direction, 1), WORK_OFFSET);
                self.emit_gather(0, site, source, MATRIX_WORDS, out);
                emit_update(out, &[], staple);
            }
            LoopBody::PathMultiply(direction) => emit_update(out, &[staple, link(direction)], work),
            LoopBody::PathForce(direction) => {
                emit_update(
                    out,
                    &[work, link(direction), momentum(direction)],
                    momentum(direction),
                );
            }
            LoopBody::StapleUp(mu, nu) => {
                emit_loads(out, &[link(nu)]);
                self.emit_gather(
                    0,
                    site,
                    self.link_address(self.neighbor(site, nu, 1), mu),
                    MATRIX_WORDS,
                    out,
                );
                self.emit_gather(
                    1,
                    site,
                    self.link_address(self.neighbor(site, mu, 1), nu),
                    MATRIX_WORDS,
                    out,
                );
                emit_update(out, &[], staple);
            }
            LoopBody::StapleDown(mu, nu) => {
                emit_loads(out, &[link(nu), link(mu)]);
                self.emit_gather(
                    1,
                    site,
                    self.link_address(self.neighbor(site, mu, 1), nu),
                    MATRIX_WORDS,
                    out,
                );
                emit_update(out, &[], work);
            }
            LoopBody::StapleAdd(mu, nu) => {
                debug_assert!(mu != nu);
                let source = self.site_address(self.neighbor(site, nu + 4, 1), WORK_OFFSET);
                self.emit_gather(2, site, source, MATRIX_WORDS, out);
                emit_update(out, &[staple], staple);
            }
            LoopBody::Fatten(mu) => {
                let fat_link = (
                    self.fat_links.element_address(4 * site + mu, MATRIX_BYTES),
                    MATRIX_WORDS,
                );
                emit_update(out, &[staple, fat_link], fat_link);
            }
            // Work that is done once per trajectory.
            LoopBody::Refresh => {
                emit_update(out, &[part(PRNG_OFFSET, 11)], part(PRNG_OFFSET, 11));
                emit_update(out, &[], momenta);
            }
            LoopBody::CopyIn => {
                emit_update(
                    out,
                    &[part(FIELDS_OFFSET, FIELD_VECTORS * VECTOR_WORDS)],
                    force_vector(8),
                );
            }
            LoopBody::Rephase => emit_update(out, &[part(PHASE_OFFSET, 4), links], links),
            LoopBody::Update => emit_update(out, &[momenta, links], links),
        }
    }

    fn multiply_adjoint_links(&self, site: u64, source: usize, out: &mut AccessEmitter) {
        for (links, first_vector) in [(self.fat_links, 0), (self.long_links, 4)] {
            for direction in 0..4 {
                load_words(
                    out,
                    links.element_address(4 * site + direction, MATRIX_BYTES),
                    MATRIX_WORDS,
                );
                load_words(
                    out,
                    self.solver_vectors[source].element_address(site, VECTOR_BYTES),
                    VECTOR_WORDS,
                );
                store_words(
                    out,
                    self.dslash_vectors[first_vector + direction as usize]
                        .element_address(site, VECTOR_BYTES),
                    VECTOR_WORDS,
                );
            }
        }
    }

    fn emit_forward_products(&self, site: u64, source: usize, out: &mut AccessEmitter) {
        let sums = [self.solver_vectors[0], self.dslash_vectors[8]];
        for ((links, hops, first_gather), sum) in [(self.fat_links, 1, 0), (self.long_links, 3, 4)]
            .into_iter()
            .zip(sums)
        {
            for direction in 0..4 {
                load_words(
                    out,
                    links.element_address(4 * site + direction, MATRIX_BYTES),
                    MATRIX_WORDS,
                );
                let vector = self.solver_vectors[source]
                    .element_address(self.neighbor(site, direction, hops), VECTOR_BYTES);
                self.emit_gather(first_gather + direction, site, vector, VECTOR_WORDS, out);
            }
            store_words(out, sum.element_address(site, VECTOR_BYTES), VECTOR_WORDS);
        }
    }

    fn emit_backward_subtraction(&self, site: u64, out: &mut AccessEmitter) {
        let sums = [self.solver_vectors[0], self.dslash_vectors[8]];
        for ((hops, first_vector), sum) in [(1, 0), (3, 4)].into_iter().zip(sums) {
            for direction in 0..4 {
                let neighbor = self.neighbor(site, direction + 4, hops);
                let target = self.dslash_vectors[(first_vector + direction) as usize]
                    .element_address(neighbor, VECTOR_BYTES);
                self.emit_gather(
                    8 + first_vector + direction,
                    site,
                    target,
                    VECTOR_WORDS,
                    out,
                );
            }
            load_words(out, sum.element_address(site, VECTOR_BYTES), VECTOR_WORDS);
            store_words(out, sum.element_address(site, VECTOR_BYTES), VECTOR_WORDS);
        }
        sums.iter()
            .for_each(|sum| load_words(out, sum.element_address(site, VECTOR_BYTES), VECTOR_WORDS));
        store_words(
            out,
            self.solver_vectors[0].element_address(site, VECTOR_BYTES),
            VECTOR_WORDS,
        );
    }

    /// Advances the current routine to its next loop, and starts the next slice with a loop of the routine that is
    /// furthest below its share.
    fn start_next_loop(&mut self, out: &mut AccessEmitter) {
        let routine = &mut self.routines[self.current_routine];
        routine.next_sweep = (routine.next_sweep + 1) % routine.sweeps.len();
        let relative_usage = |routine: &Routine| routine.access_count * 100 / routine.share_percent;
        let next_routine =
            (0..self.routines.len()).min_by_key(|&index| relative_usage(&self.routines[index]));
        self.current_routine = next_routine.unwrap_or_default();
        let routine = &self.routines[self.current_routine];
        let sweep = &routine.sweeps[routine.next_sweep];
        // A slice is a time slice, or its even or odd half.
        self.sites_left = (sweep.site_count / self.time_slices).max(1);
        out.enter_function(sweep.body.function_index());
    }
}

impl WorkloadKernel for Gauge {
    fn step(&mut self, out: &mut AccessEmitter) {
        if self.sites_left == 0 {
            self.start_next_loop(out);
        }
        let count_before = out.len();
        let routine = &self.routines[self.current_routine];
        let sweep = &routine.sweeps[routine.next_sweep];
        let (body, first_site, start) = (sweep.body, sweep.first_site, sweep.position);
        let sites = body
            .sites_per_step()
            .min(self.sites_left)
            .min(sweep.site_count - start);
        (start..start + sites).for_each(|nth| self.emit_site_accesses(body, first_site + nth, out));
        let routine = &mut self.routines[self.current_routine];
        let sweep = &mut routine.sweeps[routine.next_sweep];
        sweep.position = (start + sites) % sweep.site_count;
        routine.access_count += (out.len() - count_before) as u64;
        self.sites_left -= sites;
        out.work_done += sites;
    }

    fn progress(&self, work_done: u64) -> f64 {
        work_done as f64 / self.site_count as f64
    }
}

fn load_words(out: &mut AccessEmitter, address: u64, words: u64) {
    (0..words).for_each(|word| out.load(address + word * WORD_BYTES));
}

fn store_words(out: &mut AccessEmitter, address: u64, words: u64) {
    (0..words).for_each(|word| out.store(address + word * WORD_BYTES));
}

/// Emits loads of these words, given by address and number.
fn emit_loads(out: &mut AccessEmitter, loads: &[(u64, u64)]) {
    loads
        .iter()
        .for_each(|&(address, words)| load_words(out, address, words));
}

/// Emits these loads, and then a store of the words that are computed from them.
fn emit_update(out: &mut AccessEmitter, loads: &[(u64, u64)], target: (u64, u64)) {
    emit_loads(out, loads);
    store_words(out, target.0, target.1);
}

/// All loops in the program's order, with the published shares of its four routines and of the
/// rest.
fn build_routines(sites: u64) -> Vec<Routine> {
    let half_count = sites / 2;
    let sweep_over = |first, count| {
        move |body| LatticeLoop {
            body,
            first_site: first,
            site_count: count,
            position: 0,
        }
    };
    let (sweep_even, sweep_odd, sweep_all) = (
        sweep_over(0, half_count),
        sweep_over(half_count, sites - half_count),
        sweep_over(0, sites),
    );
    let mut solver_sweeps = Vec::new();
    // `dslash` computes odd sites from even ones, then the reverse (`d_congrad5_fn.c`).
    for (source, is_onto_odd) in [(1, true), (0, false)] {
        let sweep_half = |is_target_half: bool, body| {
            if is_target_half == is_onto_odd {
                sweep_odd(body)
            } else {
                sweep_even(body)
            }
        };
        solver_sweeps.extend((0..8).map(|gather| sweep_half(true, LoopBody::Point(gather))));
        solver_sweeps.push(sweep_half(false, LoopBody::Back { source }));
        solver_sweeps.extend((8..16).map(|gather| sweep_half(true, LoopBody::Point(gather))));
        solver_sweeps.push(sweep_half(true, LoopBody::Forward { source }));
        solver_sweeps.push(sweep_half(true, LoopBody::Subtract));
    }
    solver_sweeps.extend(
        [&[1, 0][..], &[1, 3], &[0, 2], &[2, 1]].map(|vectors| sweep_even(LoopBody::Axpy(vectors))),
    );
    // Shifts, sums and forces occur as often as in `fermion_force_asqtad.c`: 2000, 624 and 1032 each time.
    let mut fermion_sweeps = Vec::new();
    for round in 0..8 {
        let direction = round % 4;
        fermion_sweeps.extend(
            [
                LoopBody::Point(0),
                LoopBody::ShiftForward(direction),
                LoopBody::AddForce(direction),
            ]
            .map(sweep_all),
        );
        fermion_sweeps.extend(
            [
                LoopBody::ShiftBack(direction),
                LoopBody::Point(0),
                LoopBody::Fetch(direction),
            ]
            .map(sweep_all),
        );
        fermion_sweeps.extend((round < 5).then(|| sweep_all(LoopBody::ForceAxpy)));
    }
    // Paths have three and five links, 4.75 on average.
    let (mut gauge_sweeps, mut fat_sweeps) = (Vec::new(), Vec::new());
    for direction in 0..4 {
        for step in 1..5 {
            let step_direction = (direction + step) % 4;
            gauge_sweeps.extend(
                [
                    LoopBody::Point(0),
                    LoopBody::PathCopy(step_direction),
                    LoopBody::PathMultiply(step_direction),
                ]
                .map(sweep_all),
            );
        }
        gauge_sweeps.push(sweep_all(LoopBody::PathForce(direction)));
        for nu in (0..4).filter(|&nu| nu != direction) {
            fat_sweeps.extend(
                [
                    LoopBody::Point(0),
                    LoopBody::Point(1),
                    LoopBody::StapleUp(direction, nu),
                ]
                .map(sweep_all),
            );
            fat_sweeps.extend(
                [
                    LoopBody::StapleDown(direction, nu),
                    LoopBody::Point(2),
                    LoopBody::StapleAdd(direction, nu),
                ]
                .map(sweep_all),
            );
            fat_sweeps.push(sweep_all(LoopBody::Fatten(direction)));
        }
    }
    let other_sweeps = [
        LoopBody::Refresh,
        LoopBody::CopyIn,
        LoopBody::Rephase,
        LoopBody::Update,
    ]
    .map(sweep_all)
    .into();
    let routine = |(sweeps, share)| Routine {
        sweeps,
        next_sweep: 0,
        share_percent: share,
        access_count: 0,
    };
    [
        (solver_sweeps, 58),
        (fermion_sweeps, 22),
        (gauge_sweeps, 10),
        (fat_sweeps, 9),
        (other_sweeps, 1),
    ]
    .map(routine)
    .into()
}
