//! swim, mgrid, applu, apsi: sweeps of stencils over grids.
//!
//! Method: one engine runs a cycle of loop nests. A nest visits its points row by row; at each point it touches a fixed
//! list of places, each a base address with a stride per dimension. A coarse grid can thus be walked together with a
//! fine one, and a point may contain a vector or a 5x5 block. Nests may repeat each plane, like solvers that iterate
//! plane by plane. The lists follow the programs' loops.

use super::emitter::AccessEmitter;
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("swim", |setup| setup.add_single_kernel(build_swim)),
    ("mgrid", |setup| setup.add_single_kernel(build_mgrid)),
    ("applu", |setup| setup.add_single_kernel(build_applu)),
    ("apsi", |setup| setup.add_single_kernel(build_apsi)),
];

/// A place that is touched at every point of a nest.
#[derive(Clone, Copy)]
struct PointTouch {
    base: u64,
    strides: [u64; 3],
    is_store: bool,
}

/// A loop nest over `point_counts` points (fastest dimension first).
struct LoopNest {
    point_counts: [u64; 3],
    touches: Vec<PointTouch>,
    /// Number of passes over each plane before the next plane.
    passes_per_plane: u32,
    function: u32,
}

/// A cubic or square grid of points of `point_bytes`, in which neighbors have names.
#[derive(Clone, Copy)]
struct PointGrid {
    region: Region,
    side: [u64; 3],
    point_bytes: u64,
}

impl PointGrid {
    fn new(setup: &mut KernelSetup, name: &'static str, side: [u64; 3], point_bytes: u64) -> Self {
        let bytes = side.iter().product::<u64>() * point_bytes;
        PointGrid {
            region: setup.add_shared_region(name, bytes),
            side,
            point_bytes,
        }
    }

    fn strides(&self) -> [u64; 3] {
        [
            self.point_bytes,
            self.point_bytes * self.side[0],
            self.point_bytes * self.side[0] * self.side[1],
        ]
    }

    /// The touch of word `word` of the point at this offset from the current one. The nest advances
    /// `point_step` points at a time, and starts one point inside the grid.
    fn touch_at(&self, offset: [i64; 3], word: u64, point_step: u64, is_store: bool) -> PointTouch {
        let strides = self.strides();
        let mut base = self.region.base + word * 8;
        for axis in 0..3 {
            let start_index = i64::from(self.side[axis] > 1) + offset[axis];
            base += strides[axis]
                * u64::try_from(start_index)
                    .expect("shifts are -1, 0 or 1 and only along real axes");
        }
        PointTouch {
            base,
            strides: strides.map(|stride| stride * point_step),
            is_store,
        }
    }

    fn load_at(&self, offset: [i64; 3]) -> PointTouch {
        self.touch_at(offset, 0, 1, false)
    }

    fn store_here(&self) -> PointTouch {
        self.touch_at([0; 3], 0, 1, true)
    }

    /// The boundary conditions, which store to every line of every face once per cycle.
    fn face_nests(&self) -> Vec<LoopNest> {
        let strides = self.strides();
        let mut nests = Vec::new();
        for axis in (0..3).filter(|&axis| self.side[axis] > 1) {
            let mut extent = self.side;
            extent[axis] = 1;
            for face_index in [0, self.side[axis] - 1] {
                let base = self.region.base + face_index * strides[axis];
                let words = (0..self.point_bytes / 8).step_by(8);
                let touches = words
                    .map(|word| PointTouch {
                        base: base + word * 8,
                        strides,
                        is_store: true,
                    })
                    .collect();
                nests.push(LoopNest::new(extent, touches, 0));
            }
        }

        nests
    }

    /// Points in each dimension that have all their neighbors.
    fn interior_counts(&self) -> [u64; 3] {
        self.side.map(|side| side.max(3) - 2)
    }
}

impl LoopNest {
    /// Builds a nest with one pass over each plane.
    fn new(point_counts: [u64; 3], touches: Vec<PointTouch>, function: u32) -> Self {
        LoopNest {
            point_counts,
            touches,
            passes_per_plane: 1,
            function,
        }
    }
}

struct Stencil {
    nests: Vec<LoopNest>,
    current_nest: usize,
    /// Index of the next point within the row, of the row, and of the plane.
    position: [u64; 3],
    current_pass: u32,
    row_addresses: Vec<u64>,
}

impl Stencil {
    /// Builds a sweep that starts in the first nest, at a position that the seed determines, so that copies of a
    /// program are not in step.
    fn new(setup: &mut KernelSetup, nests: Vec<LoopNest>) -> Self {
        let position = nests[0]
            .point_counts
            .map(|points| setup.rng.draw_below(points));
        Stencil {
            nests,
            current_nest: 0,
            position,
            current_pass: 0,
            row_addresses: Vec::new(),
        }
    }

    /// Advances to the next row; after the last row of a plane, to the next pass, plane, nest or cycle.
    fn advance_row(&mut self, out: &mut AccessEmitter) {
        let nest = &self.nests[self.current_nest];
        self.position[0] = 0;
        self.position[1] += 1;
        if self.position[1] < nest.point_counts[1] {
            return;
        }

        self.position[1] = 0;
        self.current_pass += 1;
        if self.current_pass < nest.passes_per_plane {
            return;
        }
        self.current_pass = 0;
        self.position[2] += 1;
        if self.position[2] < nest.point_counts[2] {
            return;
        }

        self.position[2] = 0;
        self.current_nest += 1;
        if self.current_nest == self.nests.len() {
            self.current_nest = 0;
            out.work_done += 1;
        }
        out.enter_function(self.nests[self.current_nest].function);
    }
}

impl WorkloadKernel for Stencil {
    fn step(&mut self, out: &mut AccessEmitter) {
        let nest = &self.nests[self.current_nest];
        let points_per_step = (512 / nest.touches.len() as u64).max(1);
        let end = (self.position[0] + points_per_step).min(nest.point_counts[0]);
        let [first_point, j, k] = self.position;
        self.row_addresses.clear();
        self.row_addresses.extend(
            nest.touches
                .iter()
                .map(|touch| touch.base + j * touch.strides[1] + k * touch.strides[2]),
        );
        for i in first_point..end {
            for (touch, row) in nest.touches.iter().zip(&self.row_addresses) {
                let address = row + i * touch.strides[0];
                if touch.is_store {
                    out.store(address)
                } else {
                    out.load(address)
                }
            }
        }
        self.position[0] = end;
        if end == nest.point_counts[0] {
            self.advance_row(out);
        }
    }
}

const HERE: [i64; 3] = [0, 0, 0];
const EAST: [i64; 3] = [1, 0, 0];
const NORTH: [i64; 3] = [0, 1, 0];
const NORTH_EAST: [i64; 3] = [1, 1, 0];

/// Offsets by this number of points along each axis.
fn neighbors(shift: i64) -> [[i64; 3]; 3] {
    std::array::from_fn(|axis| std::array::from_fn(|other| if other == axis { shift } else { 0 }))
}

fn square_root(value: u64) -> u64 {
    libm::sqrt(value as f64) as u64
}

fn cube_root(value: u64) -> u64 {
    libm::cbrt(value as f64) as u64
}

fn build_swim(setup: &mut KernelSetup) -> Stencil {
    let side = square_root(setup.data_bytes() / (13 * 8));
    let names = [
        "u", "v", "p", "unew", "vnew", "pnew", "uold", "vold", "pold", "cu", "cv", "z", "h",
    ];
    let [u, v, p, unew, vnew, pnew, uold, vold, pold, cu, cv, z, h] =
        names.map(|name| PointGrid::new(setup, name, [side, side, 1], 8));
    let load_all = |grid: PointGrid, shifts: &[[i64; 3]]| -> Vec<PointTouch> {
        shifts.iter().map(|&shift| grid.load_at(shift)).collect()
    };
    let flux_touches = [
        load_all(p, &[HERE, EAST, NORTH, NORTH_EAST]),
        load_all(u, &[HERE, EAST]),
        load_all(v, &[HERE, NORTH]),
        [cu, cv, z, h].map(|grid| grid.store_here()).to_vec(),
    ];

    let update_touches = [
        load_all(cu, &[HERE, EAST]),
        load_all(cv, &[HERE, NORTH]),
        load_all(z, &[HERE, EAST, NORTH]),
        load_all(h, &[HERE, EAST, NORTH]),
        [uold, vold, pold].map(|grid| grid.load_at(HERE)).to_vec(),
        [unew, vnew, pnew].map(|grid| grid.store_here()).to_vec(),
    ];

    let mut smooth_touches = Vec::new();
    for (current, new, old) in [(u, unew, uold), (v, vnew, vold), (p, pnew, pold)] {
        smooth_touches.extend([current, new, old].map(|grid| grid.load_at(HERE)));
        smooth_touches.extend([old, current].map(|grid| grid.store_here()));
    }
    let mut nests: Vec<LoopNest> = (0..)
        .zip([
            flux_touches.concat(),
            update_touches.concat(),
            smooth_touches,
        ])
        .map(|(function, touches)| LoopNest::new(u.interior_counts(), touches, function))
        .collect();
    for grid in [u, v, p, unew, vnew, pnew, uold, vold, pold, cu, cv, z, h] {
        nests.extend(grid.face_nests());
    }
    Stencil::new(setup, nests)
}

/// The loads of a 27-point stencil as compiled, where the sums along the row of the previous point
/// stay in registers.
fn touches_of_27_points(grid: &PointGrid, point_step: u64) -> Vec<PointTouch> {
    let mut touches = Vec::new();
    for dk in -1..=1 {
        for dj in -1..=1 {
            for di in 0..=1 {
                touches.push(grid.touch_at([di, dj, dk], 0, point_step, false));
            }
        }
    }
    touches
}

fn build_mgrid(setup: &mut KernelSetup) -> Stencil {
    // u and r exist on all levels (8/7 of the finest), v on the finest only.
    let finest_side = cube_root(setup.data_bytes() * 7 / (23 * 8));
    let mut levels = Vec::new();
    let mut side = finest_side;
    while side >= 6 {
        levels.push([
            PointGrid::new(setup, "u", [side; 3], 8),
            PointGrid::new(setup, "r", [side; 3], 8),
        ]);
        side = (side - 2) / 2 + 2;
        if side <= 6 {
            break;
        }
    }

    let v = PointGrid::new(setup, "v", [finest_side; 3], 8);
    let mut nests = Vec::new();
    for pair in levels.windows(2) {
        // `rprj3` computes the coarse residual from the fine one.
        let mut touches = touches_of_27_points(&pair[0][1], 2);
        touches.push(pair[1][1].store_here());
        let extent = pair[1][1]
            .interior_counts()
            .map(|n| n.min((pair[0][1].side[0] - 2) / 2));
        nests.push(LoopNest::new(extent, touches, 0));
    }

    for level in (0..levels.len()).rev() {
        let [u, r] = levels[level];
        if let Some([coarse, _]) = levels.get(level + 1) {
            // `interp` adds the coarse correction to the fine grid.
            let mut touches: Vec<PointTouch> = [HERE, EAST, NORTH, NORTH_EAST]
                .map(|shift| coarse.load_at(shift))
                .to_vec();
            for shift in [HERE, EAST, NORTH, NORTH_EAST] {
                touches.push(u.touch_at(shift, 0, 2, false));
                touches.push(u.touch_at(shift, 0, 2, true));
            }
            let extent = coarse.interior_counts().map(|n| n.min((u.side[0] - 3) / 2));
            nests.push(LoopNest::new(extent, touches, 1));
        }

        // `resid` is followed by `psinv`.
        let mut residual_touches = touches_of_27_points(&u, 1);
        residual_touches.push(if level == 0 {
            v.load_at(HERE)
        } else {
            r.load_at(HERE)
        });
        residual_touches.push(r.store_here());
        nests.push(LoopNest::new(u.interior_counts(), residual_touches, 2));
        let mut smooth_touches = touches_of_27_points(&r, 1);
        smooth_touches.extend([u.load_at(HERE), u.store_here()]);
        nests.push(LoopNest::new(u.interior_counts(), smooth_touches, 3));
    }

    for grid in levels.iter().flatten().chain([&v]) {
        nests.extend(grid.face_nests());
    }
    Stencil::new(setup, nests)
}

fn build_applu(setup: &mut KernelSetup) -> Stencil {
    // A point has `u`, `rsd` and `frct` of five words, and four 5x5 blocks.
    let side = cube_root(setup.data_bytes() / (3 * 40 + 4 * 200));
    let [u, rsd, frct] =
        ["u", "rsd", "frct"].map(|name| PointGrid::new(setup, name, [side; 3], 40));
    let blocks = ["a", "b", "c", "d"].map(|name| PointGrid::new(setup, name, [side; 3], 200));
    let touch_words = |grid: &PointGrid, shift, count: u64, is_store| -> Vec<PointTouch> {
        (0..count)
            .map(|word| grid.touch_at(shift, word, 1, is_store))
            .collect()
    };

    let interior = u.interior_counts();
    let mut nests = Vec::new();
    for axis in 0..3 {
        let mut touches = touch_words(&frct, HERE, 5, false);
        for shift in [-1, 0, 1] {
            touches.extend(touch_words(&u, neighbors(shift)[axis], 5, false));
        }
        touches.extend(touch_words(&rsd, HERE, 5, false));
        touches.extend(touch_words(&rsd, HERE, 5, true));
        nests.push(LoopNest::new(interior, touches, axis as u32));
    }

    for (sign, function) in [(-1, 3), (1, 5)] {
        let mut jacobian_touches = touch_words(&u, HERE, 5, false);
        for offset in neighbors(sign) {
            jacobian_touches.extend(touch_words(&u, offset, 5, false));
        }

        let mut sweep_touches = Vec::new();
        for grid in &blocks {
            jacobian_touches.extend(touch_words(grid, HERE, 25, true));
            sweep_touches.extend(touch_words(grid, HERE, 25, false));
        }
        for offset in neighbors(sign) {
            sweep_touches.extend(touch_words(&rsd, offset, 5, false));
        }
        sweep_touches.extend(touch_words(&rsd, HERE, 5, false));
        sweep_touches.extend(touch_words(&rsd, HERE, 5, true));
        nests.push(LoopNest::new(interior, jacobian_touches, function));
        nests.push(LoopNest::new(interior, sweep_touches, function + 1));
    }

    let mut add_touches = touch_words(&rsd, HERE, 5, false);
    add_touches.extend(touch_words(&u, HERE, 5, false));
    add_touches.extend(touch_words(&u, HERE, 5, true));
    nests.push(LoopNest::new(interior, add_touches, 0));
    for grid in [&u, &rsd, &frct].into_iter().chain(&blocks) {
        nests.extend(grid.face_nests());
    }
    Stencil::new(setup, nests)
}

fn build_apsi(setup: &mut KernelSetup) -> Stencil {
    const FIELDS: u64 = 16;
    let side = cube_root(setup.data_bytes() / (FIELDS * 8));
    let fields: Vec<PointGrid> = (0..FIELDS)
        .map(|_| PointGrid::new(setup, "field", [side; 3], 8))
        .collect();
    let mut nests = Vec::new();
    for (solver, field_group) in (0..6).zip(fields.windows(3).step_by(2).cycle()) {
        let [first_field, second_field, target_field] =
            [field_group[0], field_group[1], field_group[2]];
        let touches = vec![
            first_field.load_at(HERE),
            first_field.load_at(EAST),
            first_field.load_at(NORTH),
            second_field.load_at(HERE),
            second_field.load_at(EAST),
            target_field.load_at(HERE),
            target_field.store_here(),
        ];
        let nest = LoopNest::new(first_field.interior_counts(), touches, solver);
        nests.push(LoopNest {
            passes_per_plane: 12,
            ..nest
        });
    }

    // The last fields are sources and boundary values, read once per step.
    let touches = fields
        .iter()
        .map(|field| field.load_at(HERE))
        .chain([fields[0].store_here()])
        .collect();
    nests.push(LoopNest::new(fields[0].interior_counts(), touches, 5));
    for grid in &fields {
        nests.extend(grid.face_nests());
    }
    Stencil::new(setup, nests)
}
