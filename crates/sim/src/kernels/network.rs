//! mcf: minimum-cost flow by the network simplex method.
//!
//! Problem: the shares of pricing, sorting, tree walks and refreshes, and the sizes of records, determine the curve.
//! They are taken from the programs' published description and source (Löbel; SPEC's documentation of 429.mcf).
//!
//! Method: the kernel runs a real simplex over a timetable (the sibling module `basis`). Arcs are priced in groups of
//! 300 that are as far apart as there are groups, and each arc reads the potentials of both ends, until a basket
//! contains 50 violating arcs (181.mcf: 100). The best arcs of the last basket are priced again first. The basket is
//! sorted as far as its best 50 or 100 arcs, of which the first enters.
//!
//! The cycle is found by climbing from both ends; the subtree that is cut off gets new potentials and is reversed. At
//! every 200th pivot (181.mcf: every 20th), all potentials are computed again along the tree, each from its node's
//! basic arc. Nodes have 104 bytes (181.mcf: 120), arcs 64.
//!
//! Properties: at the optimum, the costs of the given arcs change, so the problem never ends. The generation of arcs,
//! which runs between some ten thousand pivots, is not modeled.

use super::basis::{ARTIFICIAL, Basis, NONE, Pivot};
use super::emitter::AccessEmitter;
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("mcf", |setup| {
        setup.add_single_kernel(|setup| Simplex::new(setup, &MCF_2000))
    }),
    ("mcf-2006", |setup| {
        setup.add_single_kernel(|setup| Simplex::new(setup, &MCF_2006))
    }),
];

const ARC_BYTES: u64 = 64;
const GROUP_ARCS: u64 = 300;
const BASKET_ENTRY_BYTES: u64 = 24;

/// The record layout of a version of the program, in bytes from the record's start (64-bit), with its constants.
struct McfVersion {
    node_bytes: u64,
    potential: u64,
    orientation: u64,
    child: u64,
    parent: u64,
    sibling: u64,
    previous_sibling: u64,
    basic_arc: u64,
    flow: u64,
    size: u64,
    /// Offset of a mark in every node, which is cleared before each refresh; `None` if the version has no mark.
    mark: Option<u64>,
    cost: u64,
    tail: u64,
    head: u64,
    ident: u64,
    basket_arcs: usize,
    pivots_per_refresh: u64,
}

const MCF_2000: McfVersion = McfVersion {
    node_bytes: 120,
    potential: 88,
    orientation: 56,
    child: 24,
    parent: 16,
    sibling: 32,
    previous_sibling: 40,
    basic_arc: 64,
    flow: 96,
    size: 48,
    mark: Some(104),
    cost: 32,
    tail: 0,
    head: 8,
    ident: 56,
    basket_arcs: 100,
    pivots_per_refresh: 20,
};

const MCF_2006: McfVersion = McfVersion {
    node_bytes: 104,
    potential: 0,
    orientation: 8,
    child: 16,
    parent: 24,
    sibling: 32,
    previous_sibling: 40,
    basic_arc: 48,
    flow: 80,
    size: 88,
    mark: None,
    cost: 0,
    tail: 8,
    head: 16,
    ident: 24,
    basket_arcs: 50,
    pivots_per_refresh: 200,
};

#[derive(Clone, Copy)]
enum SimplexStage {
    Price {
        arc: u64,
    },
    Sort,
    Update {
        pivot: Pivot,
        node: u32,
        change: i64,
    },
    ClearMarks {
        first_node: u64,
    },
    Refresh {
        node: u32,
    },
}

/// An arc in the basket, with the index of its entry.
#[derive(Clone, Copy)]
struct BasketArc {
    arc: u64,
    reduced_cost: i64,
    slot: u64,
}

struct Simplex {
    version: &'static McfVersion,
    nodes: Region,
    arcs: Region,
    pointers: Region,
    entries: Region,
    basis: Basis,
    basket: Vec<BasketArc>,
    stage: SimplexStage,
    next_group: u64,
    first_group: u64,
}

impl Simplex {
    fn new(setup: &mut KernelSetup, version: &'static McfVersion) -> Self {
        let slot_count = version.basket_arcs as u64 + GROUP_ARCS;
        let pointers = setup.add_shared_region("basket order", slot_count * 8);
        let entries = setup.add_shared_region("basket", slot_count * BASKET_ENTRY_BYTES);
        let bytes = setup.data_bytes() - pointers.bytes - entries.bytes;
        let max_nodes = Basis::node_count(bytes / ARC_BYTES);
        let arc_count = (bytes - max_nodes * version.node_bytes) / ARC_BYTES;
        let nodes =
            setup.add_shared_region("nodes", Basis::node_count(arc_count) * version.node_bytes);
        let arcs = setup.add_shared_region("arcs", arc_count * ARC_BYTES);
        let basis = Basis::new(arc_count, setup.rng.clone().next_bits());
        let (basket, stage) = (Vec::new(), SimplexStage::Price { arc: 0 });

        Simplex {
            version,
            nodes,
            arcs,
            pointers,
            entries,
            basis,
            basket,
            stage,
            next_group: 0,
            first_group: 0,
        }
    }

    fn group_count(&self) -> u64 {
        self.basis.arcs.div_ceil(GROUP_ARCS)
    }

    #[inline]
    fn node_address(&self, node: u32) -> u64 {
        self.nodes
            .element_address(u64::from(node), self.version.node_bytes)
    }

    fn pointer_address(&self, index: usize) -> u64 {
        self.pointers.element_address(index as u64, 8)
    }

    fn entry_address(&self, slot: u64) -> u64 {
        self.entries.element_address(slot, BASKET_ENTRY_BYTES)
    }

    /// Emits the pricing of one arc, and returns its reduced cost if the arc violates optimality.
    #[inline]
    fn price_arc(&self, arc: u64, out: &mut AccessEmitter) -> Option<i64> {
        let version = self.version;
        let record = self.arcs.element_address(arc, ARC_BYTES);
        let (tail, head, cost) = self.basis.arc_ends_and_cost(arc);
        out.load(record + version.ident);
        if self.basis.is_basic(arc, tail, head) {
            return None;
        }
        out.load(record + version.cost);
        out.load(record + version.tail);
        out.load_dependent(self.node_address(tail) + version.potential);
        out.load(record + version.head);
        out.load_dependent(self.node_address(head) + version.potential);
        let reduced_cost = self.basis.reduced_cost(tail, head, cost);
        self.basis
            .is_violating(arc, reduced_cost)
            .then_some(reduced_cost)
    }

    /// Emits storing a candidate in the next entry of the basket.
    fn add_candidate(&mut self, arc: u64, reduced_cost: i64, out: &mut AccessEmitter) {
        let index = self.basket.len();
        let slot = index as u64;
        out.load(self.pointer_address(index));
        [0, 8, 16]
            .into_iter()
            .for_each(|field| out.store(self.entry_address(slot) + field));
        self.basket.push(BasketArc {
            arc,
            reduced_cost,
            slot,
        });
    }

    /// Prices the best arcs of the last basket again, except the one that entered; the next group follows.
    fn start_pricing(&mut self, out: &mut AccessEmitter) {
        out.enter_function(0);
        let last_basket = std::mem::take(&mut self.basket);
        for (index, candidate) in last_basket
            .iter()
            .enumerate()
            .take(self.version.basket_arcs)
            .skip(1)
        {
            out.load(self.pointer_address(index));
            out.load_dependent(self.entry_address(candidate.slot));
            if let Some(reduced_cost) = self.price_arc(candidate.arc, out) {
                self.add_candidate(candidate.arc, reduced_cost, out);
            }
        }
        self.first_group = self.next_group;
        self.stage = SimplexStage::Price {
            arc: self.next_group,
        };
    }

    fn price_arcs(&mut self, mut arc: u64, out: &mut AccessEmitter) {
        let groups = self.group_count();
        for _ in 0..64 {
            if arc >= self.basis.arcs {
                return self.end_group(out);
            }
            if let Some(reduced_cost) = self.price_arc(arc, out) {
                self.add_candidate(arc, reduced_cost, out);
            }
            arc += groups;
        }
        self.stage = SimplexStage::Price { arc };
    }

    fn end_group(&mut self, out: &mut AccessEmitter) {
        self.next_group = (self.next_group + 1) % self.group_count();
        self.stage = if self.basket.len() < self.version.basket_arcs
            && self.next_group != self.first_group
        {
            SimplexStage::Price {
                arc: self.next_group,
            }
        } else if self.basket.is_empty() {
            self.basis.start_next_problem();
            self.start_refresh(out)
        } else {
            out.enter_function(3);
            SimplexStage::Sort
        };
    }

    /// Sorts the basket by the absolute reduced costs, largest first. The quicksort omits the entries behind those that
    /// are kept.
    fn sort_candidates(&mut self, low: isize, high: isize, out: &mut AccessEmitter) {
        let candidate_cost = |simplex: &Self, index: isize, out: &mut AccessEmitter| {
            out.load(simplex.pointer_address(index as usize));
            let candidate = simplex.basket[index as usize];
            out.load_dependent(simplex.entry_address(candidate.slot) + 16);
            candidate.reduced_cost.abs()
        };
        let pivot_cost = candidate_cost(self, (low + high) / 2, out);
        let (mut left_index, mut right_index) = (low, high);
        while left_index <= right_index {
            while candidate_cost(self, left_index, out) > pivot_cost {
                left_index += 1;
            }

            while candidate_cost(self, right_index, out) < pivot_cost {
                right_index -= 1;
            }
            if left_index < right_index {
                self.basket.swap(left_index as usize, right_index as usize);
                out.store(self.pointer_address(left_index as usize));
                out.store(self.pointer_address(right_index as usize));
            }

            if left_index <= right_index {
                left_index += 1;
                right_index -= 1;
            }
        }
        if low < right_index {
            self.sort_candidates(low, right_index, out);
        }

        if left_index < high && left_index < self.version.basket_arcs as isize {
            self.sort_candidates(left_index, high, out);
        }
    }

    /// Sorts the basket and lets its first arc enter: emits the climb along the cycle that the arc closes, and starts
    /// the update of the subtree that is cut off.
    fn start_pivot(&mut self, out: &mut AccessEmitter) {
        self.sort_candidates(0, self.basket.len() as isize - 1, out);
        out.enter_function(1);
        let version = self.version;
        let pivot = self.basis.find_pivot(self.basket[0].arc, |node| {
            let record = self.node_address(node);
            out.load_dependent(record + version.size);
            out.load(record + version.orientation);
            out.load(record + version.flow);
            out.load(record + version.parent);
        });
        if pivot.cut_node == NONE {
            return self.exchange(&pivot, out);
        }

        let change = self.basis.potential_change(&pivot);
        self.stage = SimplexStage::Update {
            pivot,
            node: pivot.cut_node,
            change,
        };
    }

    /// Emits following the tree's links from one node to the next in depth-first order.
    #[inline]
    fn next_in_subtree(&self, node: u32, root: u32, out: &mut AccessEmitter) -> Option<u32> {
        let version = self.version;
        self.basis.next_in_subtree(node, root, |node, is_upward| {
            let record = self.node_address(node);
            if is_upward {
                out.load(record + version.sibling);
                out.load(record + version.parent);
            } else {
                out.load(record + version.child);
            }
        })
    }

    fn update_potentials(
        &mut self,
        pivot: Pivot,
        mut current_node: u32,
        change: i64,
        out: &mut AccessEmitter,
    ) {
        for _ in 0..64 {
            let record = self.node_address(current_node);
            out.load_dependent(record + self.version.potential);
            out.store(record + self.version.potential);
            self.basis.nodes[current_node as usize].potential += change;
            match self.next_in_subtree(current_node, pivot.cut_node, out) {
                Some(next) => current_node = next,
                None => return self.exchange(&pivot, out),
            }
        }

        self.stage = SimplexStage::Update {
            pivot,
            node: current_node,
            change,
        };
    }

    fn exchange(&mut self, pivot: &Pivot, out: &mut AccessEmitter) {
        let McfVersion {
            node_bytes,
            sibling,
            previous_sibling: sibling_before,
            parent,
            flow,
            size,
            ..
        } = *self.version;
        let McfVersion {
            child,
            orientation,
            basic_arc,
            ..
        } = *self.version;
        let nodes = self.nodes;

        self.basis.exchange(pivot, |node, is_reversed| {
            let record = nodes.element_address(u64::from(node), node_bytes);
            if is_reversed {
                [parent, sibling, sibling_before, child]
                    .into_iter()
                    .for_each(|field| out.load(record + field));
                [
                    parent,
                    sibling,
                    sibling_before,
                    orientation,
                    flow,
                    basic_arc,
                    size,
                ]
                .into_iter()
                .for_each(|field| out.store(record + field));
            } else {
                out.load_dependent(record + size);
                out.store(record + size);
                out.load(record + parent);
            }
        });

        out.store(self.arcs.element_address(pivot.entering_arc, ARC_BYTES) + self.version.ident);
        out.work_done += 1;
        if out.work_done % self.version.pivots_per_refresh == 1 {
            self.stage = self.start_refresh(out);
        } else {
            self.start_pricing(out);
        }
    }

    fn start_refresh(&mut self, out: &mut AccessEmitter) -> SimplexStage {
        out.enter_function(2);
        if self.version.mark.is_some() {
            SimplexStage::ClearMarks { first_node: 0 }
        } else {
            SimplexStage::Refresh { node: 0 }
        }
    }

    fn clear_marks(&mut self, first_node: u64, mark: u64, out: &mut AccessEmitter) {
        let nodes = self.basis.nodes.len() as u64;
        let end = (first_node + 256).min(nodes);
        (first_node..end).for_each(|node| {
            out.store(self.nodes.element_address(node, self.version.node_bytes) + mark)
        });
        self.stage = if end == nodes {
            SimplexStage::Refresh { node: 0 }
        } else {
            SimplexStage::ClearMarks { first_node: end }
        };
    }

    fn refresh_potentials(&mut self, mut current_node: u32, out: &mut AccessEmitter) {
        let version = self.version;
        for _ in 0..64 {
            let Some(next) = self.next_in_subtree(current_node, 0, out) else {
                return self.start_pricing(out);
            };
            self.basis.set_potential(next);
            let (record, node) = (self.node_address(next), self.basis.nodes[next as usize]);
            out.load_dependent(record + version.orientation);
            out.load(record + version.basic_arc);
            if node.arc != ARTIFICIAL {
                out.load_dependent(self.arcs.element_address(node.arc, ARC_BYTES) + version.cost);
            }
            out.load(record + version.parent);
            out.load_dependent(self.node_address(node.parent) + version.potential);
            out.store(record + version.potential);
            current_node = next;
        }
        self.stage = SimplexStage::Refresh { node: current_node };
    }
}

impl WorkloadKernel for Simplex {
    fn step(&mut self, out: &mut AccessEmitter) {
        match self.stage {
            SimplexStage::Price { arc } => self.price_arcs(arc, out),
            SimplexStage::Sort => self.start_pivot(out),
            SimplexStage::Update {
                pivot,
                node,
                change,
            } => self.update_potentials(pivot, node, change, out),
            SimplexStage::ClearMarks { first_node } => {
                self.clear_marks(first_node, self.version.mark.unwrap_or(0), out)
            }
            SimplexStage::Refresh { node } => self.refresh_potentials(node, out),
        }
    }
}
