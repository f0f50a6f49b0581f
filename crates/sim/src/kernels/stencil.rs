//! swim, mgrid, applu, apsi: sweeps of stencils over grids.
//!
//! Method: one engine runs a cycle of loop nests. A nest visits its points row by row; at each point it touches a fixed
//! list of places, each a base address with a stride per dimension. A coarse grid can thus be walked together with a
//! fine one, and a point may contain a vector or a 5x5 block. Nests may repeat each plane, like solvers that iterate
//! plane by plane. The lists follow the programs' loops.

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("swim", |setup| setup.add_single_kernel(swim)),
    ("mgrid", |setup| setup.add_single_kernel(mgrid)),
    ("applu", |setup| setup.add_single_kernel(applu)),
    ("apsi", |setup| setup.add_single_kernel(apsi)),
];

/// A place that is touched at every point of a nest.
#[derive(Clone, Copy)]
struct Touch {
    base: u64,
    strides: [u64; 3],
    store: bool,
}

/// A loop nest over `extent` points (fastest dimension first).
struct Nest {
    extent: [u64; 3],
    touches: Vec<Touch>,
    /// Number of passes over each plane before the next plane.
    passes: u32,
    function: u32,
}

/// A cubic or square grid of points of `point_bytes`, in which neighbors have names.
#[derive(Clone, Copy)]
struct Grid {
    region: Region,
    side: [u64; 3],
    point_bytes: u64,
}

impl Grid {
    fn new(setup: &mut KernelSetup, name: &'static str, side: [u64; 3], point_bytes: u64) -> Self {
        let bytes = side.iter().product::<u64>() * point_bytes;
        Grid { region: setup.add_region(name, bytes, RegionUsers::All), side, point_bytes }
    }

    fn strides(&self) -> [u64; 3] {
        [self.point_bytes, self.point_bytes * self.side[0], self.point_bytes * self.side[0] * self.side[1]]
    }

    /// Returns the place of word `word` of the point `shift` away, walked `step` points at a time; nests start one
    /// point inside the grid.
    fn touch(&self, shift: [i64; 3], word: u64, step: u64, store: bool) -> Touch {
        let strides = self.strides();
        let mut base = self.region.base + word * 8;
        for axis in 0..3 {
            let first = i64::from(self.side[axis] > 1) + shift[axis];
            base += strides[axis] * u64::try_from(first).expect("shifts are -1, 0 or 1 and only along real axes");
        }
        Touch { base, strides: strides.map(|stride| stride * step), store }
    }

    fn load(&self, shift: [i64; 3]) -> Touch {
        self.touch(shift, 0, 1, false)
    }

    fn store(&self) -> Touch {
        self.touch([0; 3], 0, 1, true)
    }

    /// Returns the nests of the boundary conditions, which set every line of every face once per cycle.
    fn face_nests(&self) -> Vec<Nest> {
        let strides = self.strides();
        let mut nests = Vec::new();
        for axis in (0..3).filter(|&axis| self.side[axis] > 1) {
            let mut extent = self.side;
            extent[axis] = 1;
            for place in [0, self.side[axis] - 1] {
                let base = self.region.base + place * strides[axis];
                let words = (0..self.point_bytes / 8).step_by(8);
                let touches = words.map(|word| Touch { base: base + word * 8, strides, store: true }).collect();
                nests.push(Nest { extent, touches, passes: 1, function: 0 });
            }
        }
        nests
    }

    /// Returns the number of points in each dimension that have all their neighbors.
    fn interior(&self) -> [u64; 3] {
        self.side.map(|side| side.max(3) - 2)
    }
}

struct Stencil {
    nests: Vec<Nest>,
    nest: usize,
    /// Index of the next point within the row, of the row, and of the plane.
    at: [u64; 3],
    pass: u32,
    row: Vec<u64>,
    cycles: u64,
}

impl Stencil {
    /// Builds a sweep that starts in the first nest, at a position that the seed determines, so that copies of a
    /// program are not in step.
    fn new(setup: &mut KernelSetup, nests: Vec<Nest>) -> Self {
        let at = nests[0].extent.map(|points| setup.rng.draw_below(points));
        Stencil { nests, nest: 0, at, pass: 0, row: Vec::new(), cycles: 0 }
    }

    /// Moves to the row after the one that has just ended.
    fn next_row(&mut self, out: &mut AccessEmitter) {
        let nest = &self.nests[self.nest];
        self.at[0] = 0;
        self.at[1] += 1;
        if self.at[1] < nest.extent[1] {
            return;
        }
        self.at[1] = 0;
        self.pass += 1;
        if self.pass < nest.passes {
            return;
        }
        self.pass = 0;
        self.at[2] += 1;
        if self.at[2] < nest.extent[2] {
            return;
        }
        self.at[2] = 0;
        self.nest += 1;
        if self.nest == self.nests.len() {
            self.nest = 0;
            self.cycles += 1;
        }
        out.enter_function(self.nests[self.nest].function);
    }
}

impl WorkloadKernel for Stencil {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        let nest = &self.nests[self.nest];
        let points = (512 / nest.touches.len() as u64).max(1);
        let end = (self.at[0] + points).min(nest.extent[0]);
        let [first, j, k] = self.at;
        self.row.clear();
        self.row.extend(nest.touches.iter().map(|touch| touch.base + j * touch.strides[1] + k * touch.strides[2]));
        for i in first..end {
            for (touch, row) in nest.touches.iter().zip(&self.row) {
                let address = row + i * touch.strides[0];
                if touch.store { out.store(address) } else { out.load(address) }
            }
        }
        self.at[0] = end;
        if end == nest.extent[0] {
            self.next_row(out);
        }
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.cycles as f64
    }
}

const HERE: [i64; 3] = [0, 0, 0];
const EAST: [i64; 3] = [1, 0, 0];
const NORTH: [i64; 3] = [0, 1, 0];
const NORTH_EAST: [i64; 3] = [1, 1, 0];

fn square_root(value: u64) -> u64 {
    libm::sqrt(value as f64) as u64
}

fn cube_root(value: u64) -> u64 {
    libm::cbrt(value as f64) as u64
}

fn swim(setup: &mut KernelSetup) -> Stencil {
    let side = square_root(setup.data_bytes() / (13 * 8));
    let names = ["u", "v", "p", "unew", "vnew", "pnew", "uold", "vold", "pold", "cu", "cv", "z", "h"];
    let [u, v, p, unew, vnew, pnew, uold, vold, pold, cu, cv, z, h] =
        names.map(|name| Grid::new(setup, name, [side, side, 1], 8));
    let fluxes = vec![
        p.load(HERE),
        p.load(EAST),
        p.load(NORTH),
        p.load(NORTH_EAST),
        u.load(HERE),
        u.load(EAST),
        v.load(HERE),
        v.load(NORTH),
        cu.store(),
        cv.store(),
        z.store(),
        h.store(),
    ];
    let mut update: Vec<Touch> = vec![
        cu.load(HERE),
        cu.load(EAST),
        cv.load(HERE),
        cv.load(NORTH),
        z.load(HERE),
        z.load(EAST),
        z.load(NORTH),
        h.load(HERE),
        h.load(EAST),
        h.load(NORTH),
    ];
    update.extend([uold, vold, pold].map(|grid| grid.load(HERE)));
    update.extend([unew, vnew, pnew].map(|grid| grid.store()));
    let mut smooth = Vec::new();
    for (now, new, old) in [(u, unew, uold), (v, vnew, vold), (p, pnew, pold)] {
        smooth.extend([now.load(HERE), new.load(HERE), old.load(HERE), old.store(), now.store()]);
    }
    let new_nest = |touches, function| Nest { extent: u.interior(), touches, passes: 1, function };
    let mut nests = vec![new_nest(fluxes, 0), new_nest(update, 1), new_nest(smooth, 2)];
    for grid in [u, v, p, unew, vnew, pnew, uold, vold, pold, cu, cv, z, h] {
        nests.extend(grid.face_nests());
    }
    Stencil::new(setup, nests)
}

/// Returns the loads of a 27-point stencil as compiled, where the sums along the row of the previous point stay in
/// registers.
fn touches_of_27_points(grid: &Grid, step: u64) -> Vec<Touch> {
    let mut touches = Vec::new();
    for dk in -1..=1 {
        for dj in -1..=1 {
            for di in 0..=1 {
                touches.push(grid.touch([di, dj, dk], 0, step, false));
            }
        }
    }
    touches
}

fn mgrid(setup: &mut KernelSetup) -> Stencil {
    // u and r exist on all levels (8/7 of the finest), v on the finest only.
    let finest = cube_root(setup.data_bytes() * 7 / (23 * 8));
    let mut levels = Vec::new();
    let mut side = finest;
    while side >= 6 {
        levels.push([Grid::new(setup, "u", [side; 3], 8), Grid::new(setup, "r", [side; 3], 8)]);
        side = (side - 2) / 2 + 2;
        if side <= 6 {
            break;
        }
    }
    let v = Grid::new(setup, "v", [finest; 3], 8);
    let mut nests = Vec::new();
    for pair in levels.windows(2) {
        // `rprj3` computes the coarse residual from the fine one.
        let mut touches = touches_of_27_points(&pair[0][1], 2);
        touches.push(pair[1][1].store());
        let extent = pair[1][1].interior().map(|n| n.min((pair[0][1].side[0] - 2) / 2));
        nests.push(Nest { extent, touches, passes: 1, function: 0 });
    }
    for level in (0..levels.len()).rev() {
        let [u, r] = levels[level];
        if let Some([coarse, _]) = levels.get(level + 1) {
            // `interp` adds the coarse correction to the fine grid.
            let mut touches: Vec<Touch> = [HERE, EAST, NORTH, NORTH_EAST].map(|shift| coarse.load(shift)).to_vec();
            for shift in [HERE, EAST, NORTH, NORTH_EAST] {
                touches.push(u.touch(shift, 0, 2, false));
                touches.push(u.touch(shift, 0, 2, true));
            }
            let extent = coarse.interior().map(|n| n.min((u.side[0] - 3) / 2));
            nests.push(Nest { extent, touches, passes: 1, function: 1 });
        }
        // `resid` is followed by `psinv`.
        let mut residual = touches_of_27_points(&u, 1);
        residual.push(if level == 0 { v.load(HERE) } else { r.load(HERE) });
        residual.push(r.store());
        nests.push(Nest { extent: u.interior(), touches: residual, passes: 1, function: 2 });
        let mut smooth = touches_of_27_points(&r, 1);
        smooth.extend([u.load(HERE), u.store()]);
        nests.push(Nest { extent: u.interior(), touches: smooth, passes: 1, function: 3 });
    }
    for grid in levels.iter().flatten().chain([&v]) {
        nests.extend(grid.face_nests());
    }
    Stencil::new(setup, nests)
}

fn applu(setup: &mut KernelSetup) -> Stencil {
    // A point has `u`, `rsd` and `frct` of five words, and four 5x5 blocks.
    let side = cube_root(setup.data_bytes() / (3 * 40 + 4 * 200));
    let [u, rsd, frct] = ["u", "rsd", "frct"].map(|name| Grid::new(setup, name, [side; 3], 40));
    let blocks = ["a", "b", "c", "d"].map(|name| Grid::new(setup, name, [side; 3], 200));
    let touch_words = |grid: &Grid, shift, count: u64, store| -> Vec<Touch> {
        (0..count).map(|word| grid.touch(shift, word, 1, store)).collect()
    };
    let interior = u.interior();
    let mut nests = Vec::new();
    for axis in 0..3 {
        let mut touches = touch_words(&frct, HERE, 5, false);
        for shift in [-1, 0, 1] {
            let mut offset = HERE;
            offset[axis] = shift;
            touches.extend(touch_words(&u, offset, 5, false));
        }
        touches.extend(touch_words(&rsd, HERE, 5, false));
        touches.extend(touch_words(&rsd, HERE, 5, true));
        nests.push(Nest { extent: interior, touches, passes: 1, function: axis as u32 });
    }
    for (sign, function) in [(-1, 3), (1, 5)] {
        let mut jacobians = touch_words(&u, HERE, 5, false);
        for axis in 0..3 {
            let mut offset = HERE;
            offset[axis] = sign;
            jacobians.extend(touch_words(&u, offset, 5, false));
        }
        let mut sweep = Vec::new();
        for grid in &blocks {
            jacobians.extend(touch_words(grid, HERE, 25, true));
            sweep.extend(touch_words(grid, HERE, 25, false));
        }
        for axis in 0..3 {
            let mut offset = HERE;
            offset[axis] = sign;
            sweep.extend(touch_words(&rsd, offset, 5, false));
        }
        sweep.extend(touch_words(&rsd, HERE, 5, false));
        sweep.extend(touch_words(&rsd, HERE, 5, true));
        nests.push(Nest { extent: interior, touches: jacobians, passes: 1, function });
        nests.push(Nest { extent: interior, touches: sweep, passes: 1, function: function + 1 });
    }
    let mut add = touch_words(&rsd, HERE, 5, false);
    add.extend(touch_words(&u, HERE, 5, false));
    add.extend(touch_words(&u, HERE, 5, true));
    nests.push(Nest { extent: interior, touches: add, passes: 1, function: 0 });
    for grid in [&u, &rsd, &frct].into_iter().chain(&blocks) {
        nests.extend(grid.face_nests());
    }
    Stencil::new(setup, nests)
}

fn apsi(setup: &mut KernelSetup) -> Stencil {
    const FIELDS: u64 = 16;
    let side = cube_root(setup.data_bytes() / (FIELDS * 8));
    let fields: Vec<Grid> = (0..FIELDS).map(|_| Grid::new(setup, "field", [side; 3], 8)).collect();
    let mut nests = Vec::new();
    for (solver, group) in (0..6).zip(fields.windows(3).step_by(2).cycle()) {
        let [first, second, target] = [group[0], group[1], group[2]];
        let touches = vec![
            first.load(HERE),
            first.load(EAST),
            first.load(NORTH),
            second.load(HERE),
            second.load(EAST),
            target.load(HERE),
            target.store(),
        ];
        nests.push(Nest { extent: first.interior(), touches, passes: 12, function: solver });
    }
    // The last fields are sources and boundary values, read once per step.
    let touches = fields.iter().map(|field| field.load(HERE)).chain([fields[0].store()]).collect();
    nests.push(Nest { extent: fields[0].interior(), touches, passes: 1, function: 5 });
    for grid in &fields {
        nests.extend(grid.face_nests());
    }
    Stencil::new(setup, nests)
}
