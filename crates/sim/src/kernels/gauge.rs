//! milc: staggered lattice QCD, with the accesses of the public program's loops.
//!
//! Layout (MILC 6, `ks_imp_dyn/lattice.h`, as 433.milc builds it: double precision, temporary vectors and links): a
//! site has 1808 bytes; its four links take 576 from byte 112 on, its momenta the next 320, and its two work matrices
//! the last 288 bytes. The fat and long links are stored separately, four matrices of 144 bytes per site; vectors of 48
//! bytes, pointers and neighbor tables are in their own arrays. Even sites come first.
//!
//! Method: conjugate gradient (`dslash` on contiguous links), fermion force, gauge force and fat links (strided by a
//! site) take the shares of time that were published for the program. In the program, each loop passes over the whole
//! lattice before the next, gigabytes later; here, each loop has its own position in the lattice and processes one time
//! slice in its turn. As in the program, a loop thus finds nothing in a cache that an earlier loop left there.

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[("milc", |setup| setup.add_single_kernel(Gauge::new))];

const WORD: u64 = 8;
const MATRIX_WORDS: u64 = 18;
const VECTOR_WORDS: u64 = 6;
const MATRIX: u64 = MATRIX_WORDS * WORD;
const VECTOR: u64 = VECTOR_WORDS * WORD;

/// Size of a site in bytes; the offsets of its parts follow (`lattice.h`; by the C ABI of x86-64).
const SITE: u64 = 1808;
const PRNG: u64 = 16;
const LINK: u64 = 112;
const MOMENTUM: u64 = 688;
const MOMENTUM_WORDS: u64 = 10;
const PHASE: u64 = 1008;
const FIELDS: u64 = 1040;
const FIELD_VECTORS: u64 = 6;
const WORK: u64 = 1520;
const STAPLE: u64 = 1664;

/// Number of vector arrays besides the sites: those of the solver, of `dslash` and of the fermion force.
const SOLVER: usize = 4;
const TEMPORARIES: usize = 9;
const FORCE: usize = 9;
const GATHERS: u64 = 16;
const BYTES_PER_SITE: u64 =
    SITE + 8 * MATRIX + (SOLVER + TEMPORARIES + FORCE) as u64 * VECTOR + GATHERS * (POINTER + INDEX);
const POINTER: u64 = 8;
const INDEX: u64 = 4;

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
    fn function(self) -> u32 {
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

    /// Returns the number of sites that give several hundred accesses.
    fn sites_per_step(self) -> u64 {
        match self {
            LoopBody::Point(_) => 64,
            LoopBody::Axpy(_) | LoopBody::ForceAxpy | LoopBody::Fetch(_) => 16,
            _ => 4,
        }
    }
}

/// A loop of the program, with its position in the lattice.
struct LatticeSweep {
    body: LoopBody,
    first: u64,
    count: u64,
    place: u64,
}

/// The loops of a routine, which run in turn, with the work done so far.
struct Routine {
    sweeps: Vec<LatticeSweep>,
    next: usize,
    /// Share of the routine, in percent of the accesses.
    share: u64,
    accesses: u64,
}

struct Gauge {
    lattice: Region,
    fat: Region,
    long: Region,
    solver: Vec<Region>,
    temporaries: Vec<Region>,
    force: Vec<Region>,
    pointers: Region,
    neighbors: Region,
    sites: u64,
    /// Length of the lattice's sides in x, y and z, and in t.
    side: u64,
    times: u64,
    routines: Vec<Routine>,
    running: usize,
    /// Number of sites left in the current slice.
    sites_left: u64,
    visited: u64,
}

impl Gauge {
    fn new(setup: &mut KernelSetup) -> Self {
        // Regions consist of whole lines, so up to 64 bytes of each are lost.
        let regions = (5 + SOLVER + TEMPORARIES + FORCE) as u64;
        let fitting = (setup.data_bytes() - regions * 64) / BYTES_PER_SITE;
        let side = (libm::sqrt(libm::sqrt(fitting as f64)) as u64 & !1).max(2);
        let times = (fitting / side.pow(3)).max(1);
        let sites = side.pow(3) * times;
        let mut declare_lattice = |name, bytes| setup.add_region(name, sites * bytes, RegionUsers::All);
        let lattice = declare_lattice("sites", SITE);
        let [fat, long] = ["fat links", "long links"].map(|name| declare_lattice(name, 4 * MATRIX));
        let solver = (0..SOLVER).map(|_| declare_lattice("solver's vector", VECTOR)).collect();
        let temporaries = (0..TEMPORARIES).map(|_| declare_lattice("dslash's vector", VECTOR)).collect();
        let force = (0..FORCE).map(|_| declare_lattice("force's vector", VECTOR)).collect();
        let pointers = declare_lattice("gathered pointers", GATHERS * POINTER);
        let neighbors = declare_lattice("neighbor tables", GATHERS * INDEX);
        let mut routines = build_routines(sites);
        for routine in &mut routines {
            let loops = routine.sweeps.len() as u64;
            for (nth, sweep) in (0..).zip(&mut routine.sweeps) {
                // Each loop is ahead of the one after it.
                sweep.place = (setup.rng.draw_below(sites) + (loops - nth) * sweep.count / loops) % sweep.count;
            }
        }
        Gauge {
            lattice,
            fat,
            long,
            solver,
            temporaries,
            force,
            pointers,
            neighbors,
            sites,
            side,
            times,
            routines,
            running: 0,
            sites_left: 0,
            visited: 0,
        }
    }

    /// Returns the neighbor of a site at this number of hops in a direction, in a periodic lattice. Even sites are the
    /// first half.
    fn neighbor(&self, site: u64, direction: u64, hops: u64) -> u64 {
        let (half, side) = (self.sites / 2, self.side);
        let odd = u64::from(site >= half);
        let pair = site - odd * half;
        let row = pair / (side / 2);
        let mut at = [0, row % side, row / side % side, row / (side * side)];
        at[0] = pair % (side / 2) * 2 + ((at[1] + at[2] + at[3] + odd) & 1);
        let axis = (direction % 4) as usize;
        let length = if axis == 3 { self.times } else { side };
        let hops = hops % length;
        at[axis] = (at[axis] + if direction < 4 { hops } else { length - hops }) % length;
        let odd = (at[0] + at[1] + at[2] + at[3]) & 1;
        (at[0] + side * (at[1] + side * (at[2] + side * at[3]))) / 2 + odd * half
    }

    fn site_address(&self, site: u64, offset: u64) -> u64 {
        self.lattice.element_address(site, SITE) + offset
    }

    fn link_address(&self, site: u64, direction: u64) -> u64 {
        self.site_address(site, LINK + direction % 4 * MATRIX)
    }

    fn momentum_address(&self, site: u64, direction: u64) -> u64 {
        self.site_address(site, MOMENTUM + direction % 4 * MOMENTUM_WORDS * WORD)
    }

    fn pointer_address(&self, gather: u64, site: u64) -> u64 {
        self.pointers.element_address(gather * self.sites + site, POINTER)
    }

    /// Emits reads of `words` words through a gathered pointer.
    fn emit_gather(&self, gather: u64, site: u64, target: u64, words: u64, out: &mut AccessEmitter) {
        out.load(self.pointer_address(gather, site));
        out.chase(target);
        load(out, target + WORD, words - 1);
    }

    fn visit(&self, body: LoopBody, site: u64, out: &mut AccessEmitter) {
        match body {
            LoopBody::Point(gather) => {
                out.load(self.neighbors.element_address(gather * self.sites + site, INDEX));
                out.store(self.pointer_address(gather, site));
            }
            LoopBody::Back { source } => self.emit_return(site, source, out),
            LoopBody::Forward { source } => self.sum_forward_links(site, source, out),
            LoopBody::Subtract => self.subtract_backward_links(site, out),
            LoopBody::Axpy(vectors) => {
                vectors
                    .iter()
                    .for_each(|&vector| load(out, self.solver[vector].element_address(site, VECTOR), VECTOR_WORDS));
                let last = vectors.last().map_or(0, |&last| last);
                store_words(out, self.solver[last].element_address(site, VECTOR), VECTOR_WORDS);
            }
            LoopBody::ShiftForward(direction) => {
                load(out, self.link_address(site, direction), MATRIX_WORDS);
                let source = self.force[0].element_address(self.neighbor(site, direction, 1), VECTOR);
                self.emit_gather(0, site, source, VECTOR_WORDS, out);
                store_words(out, self.force[1].element_address(site, VECTOR), VECTOR_WORDS);
            }
            LoopBody::ShiftBack(direction) => {
                load(out, self.link_address(site, direction), MATRIX_WORDS);
                load(out, self.force[2].element_address(site, VECTOR), VECTOR_WORDS);
                store_words(out, self.force[3].element_address(site, VECTOR), VECTOR_WORDS);
            }
            LoopBody::Fetch(direction) => {
                let source = self.force[3].element_address(self.neighbor(site, direction + 4, 1), VECTOR);
                self.emit_gather(0, site, source, VECTOR_WORDS, out);
                store_words(out, self.force[4].element_address(site, VECTOR), VECTOR_WORDS);
            }
            LoopBody::AddForce(direction) => {
                load(out, self.force[5].element_address(site, VECTOR), VECTOR_WORDS);
                load(out, self.force[6].element_address(site, VECTOR), VECTOR_WORDS);
                load(out, self.momentum_address(site, direction), MOMENTUM_WORDS);
                store_words(out, self.momentum_address(site, direction), MOMENTUM_WORDS);
            }
            LoopBody::ForceAxpy => {
                load(out, self.force[7].element_address(site, VECTOR), VECTOR_WORDS);
                load(out, self.force[1].element_address(site, VECTOR), VECTOR_WORDS);
                store_words(out, self.force[7].element_address(site, VECTOR), VECTOR_WORDS);
            }
            _ => self.visit_whole_site(body, site, out),
        }
    }

    /// Emits the products of links, and the work done once per trajectory, for one site.
    fn visit_whole_site(&self, body: LoopBody, site: u64, out: &mut AccessEmitter) {
        match body {
            LoopBody::PathCopy(direction) => {
                let source = self.site_address(self.neighbor(site, direction, 1), WORK);
                self.emit_gather(0, site, source, MATRIX_WORDS, out);
                store_words(out, self.site_address(site, STAPLE), MATRIX_WORDS);
            }
            LoopBody::PathMultiply(direction) => {
                load(out, self.site_address(site, STAPLE), MATRIX_WORDS);
                load(out, self.link_address(site, direction), MATRIX_WORDS);
                store_words(out, self.site_address(site, WORK), MATRIX_WORDS);
            }
            LoopBody::PathForce(direction) => {
                load(out, self.site_address(site, WORK), MATRIX_WORDS);
                load(out, self.link_address(site, direction), MATRIX_WORDS);
                load(out, self.momentum_address(site, direction), MOMENTUM_WORDS);
                store_words(out, self.momentum_address(site, direction), MOMENTUM_WORDS);
            }
            LoopBody::StapleUp(mu, nu) => {
                load(out, self.link_address(site, nu), MATRIX_WORDS);
                self.emit_gather(0, site, self.link_address(self.neighbor(site, nu, 1), mu), MATRIX_WORDS, out);
                self.emit_gather(1, site, self.link_address(self.neighbor(site, mu, 1), nu), MATRIX_WORDS, out);
                store_words(out, self.site_address(site, STAPLE), MATRIX_WORDS);
            }
            LoopBody::StapleDown(mu, nu) => {
                load(out, self.link_address(site, nu), MATRIX_WORDS);
                load(out, self.link_address(site, mu), MATRIX_WORDS);
                self.emit_gather(1, site, self.link_address(self.neighbor(site, mu, 1), nu), MATRIX_WORDS, out);
                store_words(out, self.site_address(site, WORK), MATRIX_WORDS);
            }
            LoopBody::StapleAdd(mu, nu) => {
                let source = self.site_address(self.neighbor(site, nu + 4, 1), WORK);
                self.emit_gather(2, site, source, MATRIX_WORDS, out);
                load(out, self.site_address(site, STAPLE), MATRIX_WORDS);
                store_words(out, self.site_address(site, STAPLE), MATRIX_WORDS);
                debug_assert!(mu != nu);
            }
            LoopBody::Fatten(mu) => {
                load(out, self.site_address(site, STAPLE), MATRIX_WORDS);
                load(out, self.fat.element_address(4 * site + mu, MATRIX), MATRIX_WORDS);
                store_words(out, self.fat.element_address(4 * site + mu, MATRIX), MATRIX_WORDS);
            }
            LoopBody::Refresh => {
                load(out, self.site_address(site, PRNG), 11);
                store_words(out, self.site_address(site, PRNG), 11);
                store_words(out, self.site_address(site, MOMENTUM), 4 * MOMENTUM_WORDS);
            }
            LoopBody::CopyIn => {
                load(out, self.site_address(site, FIELDS), FIELD_VECTORS * VECTOR_WORDS);
                store_words(out, self.force[8].element_address(site, VECTOR), VECTOR_WORDS);
            }
            LoopBody::Rephase => {
                load(out, self.site_address(site, PHASE), 4);
                load(out, self.site_address(site, LINK), 4 * MATRIX_WORDS);
                store_words(out, self.site_address(site, LINK), 4 * MATRIX_WORDS);
            }
            _ => {
                load(out, self.site_address(site, MOMENTUM), 4 * MOMENTUM_WORDS);
                load(out, self.site_address(site, LINK), 4 * MATRIX_WORDS);
                store_words(out, self.site_address(site, LINK), 4 * MATRIX_WORDS);
            }
        }
    }

    fn emit_return(&self, site: u64, source: usize, out: &mut AccessEmitter) {
        for (links, first) in [(self.fat, 0), (self.long, 4)] {
            for direction in 0..4 {
                load(out, links.element_address(4 * site + direction, MATRIX), MATRIX_WORDS);
                load(out, self.solver[source].element_address(site, VECTOR), VECTOR_WORDS);
                store_words(
                    out,
                    self.temporaries[first + direction as usize].element_address(site, VECTOR),
                    VECTOR_WORDS,
                );
            }
        }
    }

    fn sum_forward_links(&self, site: u64, source: usize, out: &mut AccessEmitter) {
        let sums = [self.solver[0], self.temporaries[8]];
        for ((links, hops, first), sum) in [(self.fat, 1, 0), (self.long, 3, 4)].into_iter().zip(sums) {
            for direction in 0..4 {
                load(out, links.element_address(4 * site + direction, MATRIX), MATRIX_WORDS);
                let vector = self.solver[source].element_address(self.neighbor(site, direction, hops), VECTOR);
                self.emit_gather(first + direction, site, vector, VECTOR_WORDS, out);
            }
            store_words(out, sum.element_address(site, VECTOR), VECTOR_WORDS);
        }
    }

    fn subtract_backward_links(&self, site: u64, out: &mut AccessEmitter) {
        let sums = [self.solver[0], self.temporaries[8]];
        for ((hops, first), sum) in [(1, 0), (3, 4)].into_iter().zip(sums) {
            for direction in 0..4 {
                let neighbor = self.neighbor(site, direction + 4, hops);
                let target = self.temporaries[(first + direction) as usize].element_address(neighbor, VECTOR);
                self.emit_gather(8 + first + direction, site, target, VECTOR_WORDS, out);
            }
            load(out, sum.element_address(site, VECTOR), VECTOR_WORDS);
            store_words(out, sum.element_address(site, VECTOR), VECTOR_WORDS);
        }
        sums.iter().for_each(|sum| load(out, sum.element_address(site, VECTOR), VECTOR_WORDS));
        store_words(out, self.solver[0].element_address(site, VECTOR), VECTOR_WORDS);
    }

    /// Starts the next slice, with a loop of the routine that is furthest below its share.
    fn start_next_loop(&mut self, out: &mut AccessEmitter) {
        let routine = &mut self.routines[self.running];
        routine.next = (routine.next + 1) % routine.sweeps.len();
        let relative_usage = |routine: &Routine| routine.accesses * 100 / routine.share;
        let next = (0..self.routines.len()).min_by_key(|&index| relative_usage(&self.routines[index]));
        self.running = next.unwrap_or_default();
        let routine = &self.routines[self.running];
        let sweep = &routine.sweeps[routine.next];
        // A slice is a time slice, or its even or odd half.
        self.sites_left = (sweep.count / self.times).max(1);
        out.enter_function(sweep.body.function());
    }
}

impl WorkloadKernel for Gauge {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        if self.sites_left == 0 {
            self.start_next_loop(out);
        }
        let previous_len = out.len();
        let routine = &self.routines[self.running];
        let sweep = &routine.sweeps[routine.next];
        let (body, first, start) = (sweep.body, sweep.first, sweep.place);
        let sites = body.sites_per_step().min(self.sites_left).min(sweep.count - start);
        (start..start + sites).for_each(|nth| self.visit(body, first + nth, out));
        let routine = &mut self.routines[self.running];
        let sweep = &mut routine.sweeps[routine.next];
        sweep.place = (start + sites) % sweep.count;
        routine.accesses += (out.len() - previous_len) as u64;
        self.sites_left -= sites;
        self.visited += sites;
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.visited as f64 / self.sites as f64
    }
}

fn load(out: &mut AccessEmitter, address: u64, words: u64) {
    (0..words).for_each(|word| out.load(address + word * WORD));
}

fn store_words(out: &mut AccessEmitter, address: u64, words: u64) {
    (0..words).for_each(|word| out.store(address + word * WORD));
}

/// Returns all loops in the program's order, with the published shares of its four routines and of the rest.
fn build_routines(sites: u64) -> Vec<Routine> {
    let half = sites / 2;
    let sweep_over = |first, count| move |body| LatticeSweep { body, first, count, place: 0 };
    let (even, odd, all) = (sweep_over(0, half), sweep_over(half, sites - half), sweep_over(0, sites));
    let mut solver = Vec::new();
    // `dslash` computes odd sites from even ones, then the reverse (`d_congrad5_fn.c`).
    for (source, onto_odd) in [(1, true), (0, false)] {
        let half_sweep = |here: bool, body| if here == onto_odd { odd(body) } else { even(body) };
        solver.extend((0..8).map(|gather| half_sweep(true, LoopBody::Point(gather))));
        solver.push(half_sweep(false, LoopBody::Back { source }));
        solver.extend((8..16).map(|gather| half_sweep(true, LoopBody::Point(gather))));
        solver.push(half_sweep(true, LoopBody::Forward { source }));
        solver.push(half_sweep(true, LoopBody::Subtract));
    }
    solver.extend([&[1, 0][..], &[1, 3], &[0, 2], &[2, 1]].map(|vectors| even(LoopBody::Axpy(vectors))));
    // Shifts, sums and forces occur as often as in `fermion_force_asqtad.c`: 2000, 624 and 1032 each time.
    let mut fermions = Vec::new();
    for round in 0..8 {
        let direction = round % 4;
        fermions
            .extend([LoopBody::Point(0), LoopBody::ShiftForward(direction), LoopBody::AddForce(direction)].map(all));
        fermions.extend([LoopBody::ShiftBack(direction), LoopBody::Point(0), LoopBody::Fetch(direction)].map(all));
        fermions.extend((round < 5).then(|| all(LoopBody::ForceAxpy)));
    }
    // Paths have three and five links, 4.75 on average.
    let (mut gauge, mut fat) = (Vec::new(), Vec::new());
    for direction in 0..4 {
        for step in 1..5 {
            let along = (direction + step) % 4;
            gauge.extend([LoopBody::Point(0), LoopBody::PathCopy(along), LoopBody::PathMultiply(along)].map(all));
        }
        gauge.push(all(LoopBody::PathForce(direction)));
        for nu in (0..4).filter(|&nu| nu != direction) {
            fat.extend([LoopBody::Point(0), LoopBody::Point(1), LoopBody::StapleUp(direction, nu)].map(all));
            fat.extend(
                [LoopBody::StapleDown(direction, nu), LoopBody::Point(2), LoopBody::StapleAdd(direction, nu)].map(all),
            );
            fat.push(all(LoopBody::Fatten(direction)));
        }
    }
    let other_sweeps = [LoopBody::Refresh, LoopBody::CopyIn, LoopBody::Rephase, LoopBody::Update].map(all).into();
    let routine = |(sweeps, share)| Routine { sweeps, next: 0, share, accesses: 0 };
    [(solver, 58), (fermions, 22), (gauge, 10), (fat, 9), (other_sweeps, 1)].map(routine).into()
}
