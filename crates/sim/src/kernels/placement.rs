//! twolf and vpr: placement by simulated annealing, and vpr's maze router.
//!
//! Method: cells with pins, and nets with terminal lists, are drawn at random with Rent-like locality (most nets join
//! cells of nearby index). A move swaps a cell with the one at a position inside the shrinking window. It walks every
//! net of both, from pin to net to terminals, pointer by pointer, and is accepted by Metropolis on the half perimeter.
//! Positions are stored on the host, so the cost and the acceptance are real. Between temperatures, twolf rebuilds its
//! global-routing tables. vpr routes: wavefronts with a heap spread over the routing graph, inside the net's bounding
//! box.

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::random::{Rng, mix};
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("twolf", |setup| setup.add_single_kernel(|setup| Annealer::new(setup, 55, false))),
    ("vpr", |setup| setup.add_single_kernel(|setup| Annealer::new(setup, 4, true))),
];

const PINS: usize = 4;
const CELL_BYTES: u64 = 128;
const PIN_BYTES: u64 = 32;
const NET_BYTES: u64 = 64;
const TERMINAL_BYTES: u64 = 32;
/// Number of bytes for a cell, its pins, one net per cell and that net's terminals.
const BYTES_PER_CELL: u64 = CELL_BYTES + PINS as u64 * (PIN_BYTES + TERMINAL_BYTES) + NET_BYTES;

struct Annealer {
    cells: Region,
    pins: Region,
    nets: Region,
    terminals: Region,
    tables: Region,
    router: Option<Router>,
    rng: Rng,
    side: u32,
    /// Cell of each terminal: terminal t of net n joins cell `net_cells[n * PINS + t]`.
    net_cells: Vec<u32>,
    /// Net of each pin: pin p of cell c belongs to net `cell_nets[c * PINS + p]`.
    cell_nets: Vec<u32>,
    /// Slot (row-major position) of each cell, and the cell in each slot.
    slot_of: Vec<u32>,
    cell_at: Vec<u32>,
    window: u32,
    temperature: u32,
    moves_left: u32,
    sweep_at: Option<u64>,
    work: u64,
}

impl Annealer {
    fn new(setup: &mut KernelSetup, netlist_percent: u64, routes: bool) -> Self {
        let netlist = setup.data_bytes() / 100 * netlist_percent;
        let count = (netlist / BYTES_PER_CELL).max(64);
        let cells = setup.add_region("cells", count * CELL_BYTES, RegionUsers::All);
        let pins = setup.add_region("pins", count * PINS as u64 * PIN_BYTES, RegionUsers::All);
        let nets = setup.add_region("nets", count * NET_BYTES, RegionUsers::All);
        let terminals = setup.add_region("net terminals", count * PINS as u64 * TERMINAL_BYTES, RegionUsers::All);
        let table_bytes = setup.data_bytes() - count * BYTES_PER_CELL;
        let tables =
            setup.add_region(if routes { "routing graph" } else { "routing tables" }, table_bytes, RegionUsers::All);
        let mut rng = setup.rng.clone();
        let (net_cells, cell_nets) = netlist_of(count as u32, &mut rng);
        let side = libm::ceil(libm::sqrt(count as f64)) as u32;
        let router = routes.then(|| Router::new(tables));
        Annealer {
            cells,
            pins,
            nets,
            terminals,
            tables,
            router,
            rng,
            side,
            net_cells,
            cell_nets,
            slot_of: (0..count as u32).collect(),
            cell_at: (0..count as u32).collect(),
            window: side,
            temperature: side,
            moves_left: 10 * count as u32,
            sweep_at: None,
            work: 0,
        }
    }

    fn cell_position(&self, cell: u32) -> (u32, u32) {
        let slot = self.slot_of[cell as usize];
        (slot % self.side, slot / self.side)
    }

    /// Emits a walk over one net as in the cost function, and returns the net's half perimeter.
    fn net_cost(&self, cell: u32, pin: usize, out: &mut AccessEmitter) -> u32 {
        let index = cell as usize * PINS + pin;
        out.load(self.pins.element_address(index as u64, PIN_BYTES));
        let net = self.cell_nets[index];
        let record = self.nets.element_address(u64::from(net), NET_BYTES);
        out.chase(record);
        out.load(record + 16);
        let (mut low, mut high) = ((u32::MAX, u32::MAX), (0, 0));
        for terminal in 0..PINS as u64 {
            let record = self.terminals.element_address(u64::from(net) * PINS as u64 + terminal, TERMINAL_BYTES);
            out.chase(record);
            out.load(record + 8);
            out.load(record + 16);
            let (x, y) = self.cell_position(self.net_cells[net as usize * PINS + terminal as usize]);
            low = (low.0.min(x), low.1.min(y));
            high = (high.0.max(x), high.1.max(y));
        }
        out.store(record + 32);
        high.0 - low.0 + high.1 - low.1
    }

    fn cell_cost(&self, cell: u32, out: &mut AccessEmitter) -> u32 {
        out.load(self.cells.element_address(u64::from(cell), CELL_BYTES) + 64);
        (0..PINS).map(|pin| self.net_cost(cell, pin, out)).sum()
    }

    /// Returns the cell at a random position within the window around `cell`; `None` if that position is empty.
    fn draw_partner(&mut self, cell: u32) -> Option<u32> {
        let (x, y) = self.cell_position(cell);
        let span = u64::from(2 * self.window + 1);
        let mut draw_shifted =
            |coordinate: u32| (coordinate + self.rng.draw_below(span) as u32).checked_sub(self.window);
        let (x, y) = (draw_shifted(x)?, draw_shifted(y)?);
        let slot = y * self.side + x;
        if x >= self.side { None } else { self.cell_at.get(slot as usize).copied().filter(|&other| other != cell) }
    }

    fn swap(&mut self, first: u32, second: u32) {
        let (slot_one, slot_two) = (self.slot_of[first as usize], self.slot_of[second as usize]);
        self.slot_of.swap(first as usize, second as usize);
        self.cell_at[slot_one as usize] = second;
        self.cell_at[slot_two as usize] = first;
    }

    fn attempt(&mut self, out: &mut AccessEmitter) {
        let cell = self.rng.draw_below(self.slot_of.len() as u64) as u32;
        out.enter_function(mix(u64::from(cell)) as u32);
        out.load(self.cells.element_address(u64::from(cell), CELL_BYTES));
        let Some(partner) = self.draw_partner(cell) else { return };
        out.load(self.cells.element_address(u64::from(partner), CELL_BYTES));
        let old_cost = self.cell_cost(cell, out) + self.cell_cost(partner, out);
        self.swap(cell, partner);
        out.enter_function(mix(u64::from(partner)) as u32);
        // The new cost reads the same records again; they are in the first-level cache by now.
        let mut new_cost = 0;
        for moved_cell in [cell, partner] {
            for pin in 0..PINS {
                new_cost += self.net_cost(moved_cell, pin, out);
            }
        }
        let worse = new_cost.saturating_sub(old_cost);
        let chance = libm::exp(-f64::from(worse) / f64::from(self.temperature.max(1)));
        if (self.rng.bits() >> 11) as f64 / (1u64 << 53) as f64 >= chance {
            self.swap(cell, partner);
            return;
        }
        for moved_cell in [cell, partner] {
            let record = self.cells.element_address(u64::from(moved_cell), CELL_BYTES);
            out.store(record + 8);
            out.store(record + 72);
            for pin in 0..PINS {
                let index = moved_cell as usize * PINS + pin;
                out.store(self.pins.element_address(index as u64, PIN_BYTES) + 8);
            }
        }
    }

    /// Ends a temperature: cools down and narrows the window. Once frozen, starts again hot, as for the next run's
    /// input.
    fn cool(&mut self) {
        self.temperature = self.temperature * 9 / 10;
        self.window = (self.window * 19 / 20).max(2);
        if self.temperature == 0 {
            self.temperature = self.side;
            self.window = self.side;
        }
        self.moves_left = 10 * self.slot_of.len() as u32;
    }

    /// Emits a sweep over a part of the tables, and ends the sweep at their end.
    fn sweep(&mut self, start: u64, out: &mut AccessEmitter) {
        let end = (start + 64 * 64).min(self.tables.bytes);
        for offset in (start..end).step_by(32) {
            out.load(self.tables.base + offset);
            if offset.is_multiple_of(64) {
                out.store(self.tables.base + offset + 8);
            }
        }
        self.sweep_at = (end < self.tables.bytes).then_some(end);
    }
}

impl WorkloadKernel for Annealer {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        if let Some(start) = self.sweep_at {
            self.sweep(start, out);
            return BatchEnd::More;
        }
        if let Some(router) = &mut self.router
            && router.nets_left > 0
        {
            router.step(&mut self.rng, out);
            self.work += u64::from(router.wave == 0);
            return BatchEnd::More;
        }
        self.attempt(out);
        self.work += 1;
        self.moves_left -= 1;
        if self.moves_left == 0 {
            self.cool();
            match &mut self.router {
                Some(router) => router.nets_left = self.slot_of.len() as u32 / 4,
                None => self.sweep_at = Some(0),
            }
        }
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.work as f64
    }
}

/// Returns random nets of `PINS` cells each, such that every cell is on `PINS` nets. Nets join nearby indices, with a
/// probability that falls like 1/d.
fn netlist_of(count: u32, rng: &mut Rng) -> (Vec<u32>, Vec<u32>) {
    let total = count as usize * PINS;
    let mut net_cells = vec![0; total];
    let mut cell_nets = vec![0; total];
    for pin in 0..PINS {
        // Terminal `pin` of net n is on the cell given by a permutation of blocks, so each cell still has one pin of
        // each kind.
        let block = [1, 16, 256, u64::from(count)][pin].min(u64::from(count));
        let mut order: Vec<u32> = (0..count).collect();
        for start in (0..u64::from(count)).step_by(block as usize) {
            let len = block.min(u64::from(count) - start);
            for i in (1..len).rev() {
                order.swap((start + i) as usize, (start + rng.draw_below(i + 1)) as usize);
            }
        }
        for (net, &cell) in order.iter().enumerate() {
            net_cells[net * PINS + pin] = cell;
            cell_nets[cell as usize * PINS + pin] = net as u32;
        }
    }
    (net_cells, cell_nets)
}

/// vpr's router, whose wavefronts spread over a grid of routing nodes.
struct Router {
    graph: Region,
    side: u64,
    nets_left: u32,
    /// Number of nodes still to be expanded for the current net, and the net's box.
    wave: u64,
    corner: (u64, u64),
    extent: u64,
}

/// Size of a routing node (48 B), its cost record (16 B) and its edges (64 B), which are next to each other.
const NODE_BYTES: u64 = 128;

impl Router {
    fn new(graph: Region) -> Self {
        let side = libm::sqrt((graph.bytes / NODE_BYTES) as f64) as u64;
        Router { graph, side, nets_left: 0, wave: 0, corner: (0, 0), extent: 1 }
    }

    fn step(&mut self, rng: &mut Rng, out: &mut AccessEmitter) {
        if self.wave == 0 {
            self.extent = 4 + rng.draw_skewed(self.side / 8);
            self.extent = self.extent.min(self.side);
            let span = self.side - self.extent + 1;
            self.corner = (rng.draw_below(span), rng.draw_below(span));
            // Wavefronts of one net, and of neighboring nets, expand a node several times.
            self.wave = (self.extent * self.extent * 4).min(16_384);
            self.nets_left -= 1;
        }
        let batch = self.wave.min(16);
        self.wave -= batch;
        for turn in 0..batch {
            out.enter_function(16 + turn as u32 % 16);
            let x = self.corner.0 + rng.draw_below(self.extent);
            let y = self.corner.1 + rng.draw_below(self.extent);
            let node = self.graph.element_address(y * self.side + x, NODE_BYTES);
            out.load(node);
            out.load(node + 48);
            // The costs of the four neighbors, relaxed if they improve.
            for (dx, dy) in [(1, 0), (0, 1), (2, 0), (0, 2)] {
                let (x, y) = ((x + dx).min(self.side - 1), (y + dy).min(self.side - 1));
                out.load(node + 64 + dx * 4 + dy * 8);
                let neighbor = self.graph.element_address(y * self.side + x, NODE_BYTES);
                out.chase(neighbor);
                out.load(neighbor + 48);
                out.load(neighbor + 56);
            }
            out.store(node + 48);
            out.store(node + 56);
        }
    }
}
