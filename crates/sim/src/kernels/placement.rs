//! twolf and vpr: placement by simulated annealing, and vpr's maze router.
//!
//! Method: cells with pins, and nets with terminal lists, are drawn at random with Rent-like locality (most nets join
//! cells of nearby index). A move swaps a cell with the one at a position inside the shrinking window. It walks every
//! net of both, from pin to net to terminals, pointer by pointer, and is accepted by Metropolis on the half perimeter.
//! Positions are stored on the host, so the cost and the acceptance are real. Between temperatures, twolf rebuilds its
//! global-routing tables. vpr routes: wavefronts with a heap spread over the routing graph, inside the net's bounding
//! box.

use super::emitter::AccessEmitter;
use super::random::{Rng, hash_value};
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("twolf", |setup| {
        setup.add_single_kernel(|setup| Annealer::new(setup, 55, false))
    }),
    ("vpr", |setup| {
        setup.add_single_kernel(|setup| Annealer::new(setup, 4, true))
    }),
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
    slot_by_cell: Vec<u32>,
    cell_by_slot: Vec<u32>,
    window_radius: u32,
    temperature: u32,
    moves_left: u32,
    sweep_offset: Option<u64>,
}

impl Annealer {
    fn new(setup: &mut KernelSetup, netlist_percent: u64, has_router: bool) -> Self {
        let netlist_bytes = setup.data_bytes() / 100 * netlist_percent;
        let count = (netlist_bytes / BYTES_PER_CELL).max(64);
        let cells = setup.add_shared_region("cells", count * CELL_BYTES);
        let pins = setup.add_shared_region("pins", count * PINS as u64 * PIN_BYTES);
        let nets = setup.add_shared_region("nets", count * NET_BYTES);
        let terminals =
            setup.add_shared_region("net terminals", count * PINS as u64 * TERMINAL_BYTES);
        let table_bytes = setup.data_bytes() - count * BYTES_PER_CELL;
        let tables = setup.add_shared_region(
            if has_router {
                "routing graph"
            } else {
                "routing tables"
            },
            table_bytes,
        );
        let mut rng = setup.rng.clone();
        let (net_cells, cell_nets) = draw_netlist(count as u32, &mut rng);
        let side = libm::ceil(libm::sqrt(count as f64)) as u32;
        let router = has_router.then(|| Router::new(tables));
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
            slot_by_cell: (0..count as u32).collect(),
            cell_by_slot: (0..count as u32).collect(),
            window_radius: side,
            temperature: side,
            moves_left: 10 * count as u32,
            sweep_offset: None,
        }
    }

    fn cell_position(&self, cell: u32) -> (u32, u32) {
        let slot = self.slot_by_cell[cell as usize];
        (slot % self.side, slot / self.side)
    }

    /// Emits a walk over one net as in the cost function, and returns the net's half perimeter.
    fn emit_net_cost(&self, cell: u32, pin: usize, out: &mut AccessEmitter) -> u32 {
        let index = cell as usize * PINS + pin;
        out.load(self.pins.element_address(index as u64, PIN_BYTES));
        let net = self.cell_nets[index];
        let record = self.nets.element_address(u64::from(net), NET_BYTES);
        out.load_dependent(record);
        out.load(record + 16);
        let (mut low_corner, mut high_corner) = ((u32::MAX, u32::MAX), (0, 0));
        for terminal in 0..PINS as u64 {
            let record = self
                .terminals
                .element_address(u64::from(net) * PINS as u64 + terminal, TERMINAL_BYTES);
            out.load_dependent(record);
            out.load(record + 8);
            out.load(record + 16);
            let (x, y) =
                self.cell_position(self.net_cells[net as usize * PINS + terminal as usize]);
            low_corner = (low_corner.0.min(x), low_corner.1.min(y));
            high_corner = (high_corner.0.max(x), high_corner.1.max(y));
        }

        out.store(record + 32);
        high_corner.0 - low_corner.0 + high_corner.1 - low_corner.1
    }

    fn emit_cell_cost(&self, cell: u32, out: &mut AccessEmitter) -> u32 {
        out.load(self.cells.element_address(u64::from(cell), CELL_BYTES) + 64);
        (0..PINS)
            .map(|pin| self.emit_net_cost(cell, pin, out))
            .sum()
    }

    /// The cell at a random position within the window around `cell`; `None` if that position is
    /// empty.
    fn draw_partner(&mut self, cell: u32) -> Option<u32> {
        let (x, y) = self.cell_position(cell);
        let window_side = u64::from(2 * self.window_radius + 1);
        let mut draw_shifted = |coordinate: u32| {
            (coordinate + self.rng.draw_below(window_side) as u32).checked_sub(self.window_radius)
        };
        let (x, y) = (draw_shifted(x)?, draw_shifted(y)?);
        let slot = y * self.side + x;
        if x >= self.side {
            None
        } else {
            self.cell_by_slot
                .get(slot as usize)
                .copied()
                .filter(|&other| other != cell)
        }
    }

    fn swap_cells(&mut self, first_cell: u32, second_cell: u32) {
        let (slot_one, slot_two) = (
            self.slot_by_cell[first_cell as usize],
            self.slot_by_cell[second_cell as usize],
        );
        self.slot_by_cell
            .swap(first_cell as usize, second_cell as usize);
        self.cell_by_slot[slot_one as usize] = second_cell;
        self.cell_by_slot[slot_two as usize] = first_cell;
    }

    fn try_move(&mut self, out: &mut AccessEmitter) {
        let cell = self.rng.draw_below(self.slot_by_cell.len() as u64) as u32;
        out.enter_function(hash_value(u64::from(cell)) as u32);
        out.load(self.cells.element_address(u64::from(cell), CELL_BYTES));
        let Some(partner) = self.draw_partner(cell) else {
            return;
        };
        out.load(self.cells.element_address(u64::from(partner), CELL_BYTES));
        let old_cost = self.emit_cell_cost(cell, out) + self.emit_cell_cost(partner, out);
        self.swap_cells(cell, partner);
        out.enter_function(hash_value(u64::from(partner)) as u32);

        // The new cost reads the same records again; they are in the first-level cache by now.
        let mut new_cost = 0;
        for moved_cell in [cell, partner] {
            for pin in 0..PINS {
                new_cost += self.emit_net_cost(moved_cell, pin, out);
            }
        }
        let cost_increase = new_cost.saturating_sub(old_cost);
        let chance = libm::exp(-f64::from(cost_increase) / f64::from(self.temperature.max(1)));
        if (self.rng.next_bits() >> 11) as f64 / (1u64 << 53) as f64 >= chance {
            self.swap_cells(cell, partner);
            return;
        }

        for moved_cell in [cell, partner] {
            let record = self
                .cells
                .element_address(u64::from(moved_cell), CELL_BYTES);
            out.store(record + 8);
            out.store(record + 72);
            for pin in 0..PINS {
                let index = moved_cell as usize * PINS + pin;
                out.store(self.pins.element_address(index as u64, PIN_BYTES) + 8);
            }
        }
    }

    /// Ends a temperature: lowers it and narrows the window. When the temperature reaches 0, both start again at their
    /// maximum, as for the input of the next run.
    fn lower_temperature(&mut self) {
        self.temperature = self.temperature * 9 / 10;
        self.window_radius = (self.window_radius * 19 / 20).max(2);
        if self.temperature == 0 {
            self.temperature = self.side;
            self.window_radius = self.side;
        }
        self.moves_left = 10 * self.slot_by_cell.len() as u32;
    }

    /// Emits a sweep over a part of the tables, and ends the sweep at their end.
    fn emit_table_sweep(&mut self, start: u64, out: &mut AccessEmitter) {
        let end = (start + 64 * 64).min(self.tables.bytes);
        for offset in (start..end).step_by(32) {
            out.load(self.tables.base + offset);
            if offset.is_multiple_of(64) {
                out.store(self.tables.base + offset + 8);
            }
        }
        self.sweep_offset = (end < self.tables.bytes).then_some(end);
    }
}

impl WorkloadKernel for Annealer {
    fn step(&mut self, out: &mut AccessEmitter) {
        if let Some(start) = self.sweep_offset {
            self.emit_table_sweep(start, out);
            return;
        }

        if let Some(router) = &mut self.router
            && router.nets_left > 0
        {
            router.step(&mut self.rng, out);
            out.work_done += u64::from(router.expansions_left == 0);
            return;
        }

        self.try_move(out);
        out.work_done += 1;
        self.moves_left -= 1;
        if self.moves_left == 0 {
            self.lower_temperature();
            match &mut self.router {
                Some(router) => router.nets_left = self.slot_by_cell.len() as u32 / 4,
                None => self.sweep_offset = Some(0),
            }
        }
    }
}

/// Random nets of `PINS` cells each, such that every cell is on `PINS` nets. Nets join nearby
/// indices, with a probability that falls like 1/d.
fn draw_netlist(count: u32, rng: &mut Rng) -> (Vec<u32>, Vec<u32>) {
    let total_pins = count as usize * PINS;
    let mut net_cells = vec![0; total_pins];
    let mut cell_nets = vec![0; total_pins];
    for pin in 0..PINS {
        // Terminal `pin` of each net is on the cell that a permutation within blocks assigns to the net, so each cell
        // has one pin of each kind.
        let block = [1, 16, 256, u64::from(count)][pin].min(u64::from(count));
        let mut permuted_cells: Vec<u32> = (0..count).collect();
        for start in (0..u64::from(count)).step_by(block as usize) {
            let len = block.min(u64::from(count) - start);
            for i in (1..len).rev() {
                permuted_cells.swap(
                    (start + i) as usize,
                    (start + rng.draw_below(i + 1)) as usize,
                );
            }
        }
        for (net, &cell) in permuted_cells.iter().enumerate() {
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
    expansions_left: u64,
    box_corner: (u64, u64),
    box_side: u64,
}

/// Size of a routing node (48 B), its cost record (16 B) and its edges (64 B), which are next to each other.
const NODE_BYTES: u64 = 128;

impl Router {
    fn new(graph: Region) -> Self {
        let side = libm::sqrt((graph.bytes / NODE_BYTES) as f64) as u64;
        Router {
            graph,
            side,
            nets_left: 0,
            expansions_left: 0,
            box_corner: (0, 0),
            box_side: 1,
        }
    }

    fn step(&mut self, rng: &mut Rng, out: &mut AccessEmitter) {
        if self.expansions_left == 0 {
            self.box_side = 4 + rng.draw_skewed(self.side / 8);
            self.box_side = self.box_side.min(self.side);
            let corner_range = self.side - self.box_side + 1;
            self.box_corner = (rng.draw_below(corner_range), rng.draw_below(corner_range));
            // Wavefronts of one net, and of neighboring nets, expand a node several times.
            self.expansions_left = (self.box_side * self.box_side * 4).min(16_384);
            self.nets_left -= 1;
        }
        let expansion_count = self.expansions_left.min(16);
        self.expansions_left -= expansion_count;

        for expansion in 0..expansion_count {
            out.enter_function(16 + expansion as u32 % 16);
            let x = self.box_corner.0 + rng.draw_below(self.box_side);
            let y = self.box_corner.1 + rng.draw_below(self.box_side);
            let node = self.graph.element_address(y * self.side + x, NODE_BYTES);
            out.load(node);
            out.load(node + 48);

            // The costs of the four neighbors, relaxed if they improve.
            for (dx, dy) in [(1, 0), (0, 1), (2, 0), (0, 2)] {
                let (x, y) = ((x + dx).min(self.side - 1), (y + dy).min(self.side - 1));
                out.load(node + 64 + dx * 4 + dy * 8);
                let neighbor = self.graph.element_address(y * self.side + x, NODE_BYTES);
                out.load_dependent(neighbor);
                out.load(neighbor + 48);
                out.load(neighbor + 56);
            }
            out.store(node + 48);
            out.store(node + 56);
        }
    }
}
