//! mcf: minimum-cost flow by the network simplex method.
//!
//! Method: a real spanning tree (parents, children, depths, potentials) over a few ten thousand nodes, and some millions
//! of arcs whose ends and costs are hashes of their index. Pricing scans a group of arcs and reads both ends' potentials;
//! the best violating arc enters; the cycle is found by walking both ends up to their common ancestor, the leaving arc
//! cuts a subtree, which is re-hung at the entering arc; after some pivots all potentials are refreshed along the tree,
//! each node's address coming out of the record before.

use cachemate_core::Turn;

use super::out::Out;
use super::random::{Rng, mix, scale};
use super::registry::ProgramSpec;
use super::setup::{Kernel, Region, Setup, Users};
use super::{Code, Pace};

pub(super) const PROGRAMS: &[ProgramSpec] = &[
    ProgramSpec {
        name: "mcf",
        stands_for: "SPEC CPU2000 181.mcf",
        algorithm: "network simplex: pricing scans of arcs, tree walks, potential refresh",
        footprint_bytes: 190_000_000,
        footprint_source: "Henning 2000: 190 MB resident",
        pace: Pace { instructions_per_access: 2.9, stack_per_access: 0.1 },
        pace_source: "Hennessy & Patterson 3rd ed., Fig. 2.32 (mcf: about 35 % loads and stores)",
        code: Code { functions: 4, function_instr: 96 },
        code_source: "estimate: pricing, tree update, refresh",
        phases: "pricing (stream and gather) and refresh (pointer chase) alternate; papers RM Fig. 5.2 shows two levels",
        unit: "pivots",
        threads: (1, 1),
        make: |setup| setup.single(Simplex::new),
    },
    ProgramSpec {
        name: "mcf-2006",
        stands_for: "SPEC CPU2006 429.mcf",
        algorithm: "as mcf, on the larger network",
        footprint_bytes: 860_000_000,
        footprint_source: "Henning 2007 (CPU2006 memory footprint): about 860 MB as a 32-bit program",
        pace: Pace { instructions_per_access: 2.55, stack_per_access: 0.1 },
        pace_source: "Phansalkar et al. 2007: 30.6 % loads, 8.6 % stores",
        code: Code { functions: 4, function_instr: 96 },
        code_source: "estimate: pricing, tree update, refresh",
        phases: "as mcf",
        unit: "pivots",
        threads: (1, 1),
        make: |setup| setup.single(Simplex::new),
    },
];

const NODE_BYTES: u64 = 64;
const ARC_BYTES: u64 = 64;
const NONE: u32 = u32::MAX;
const GROUP_ARCS: u64 = 300;
const PIVOTS_PER_REFRESH: u32 = 40;

/// A node of the spanning tree.
#[derive(Clone, Copy)]
struct Node {
    parent: u32,
    child: u32,
    next: u32,
    previous: u32,
    depth: u32,
    potential: i32,
}

enum Stage {
    Price { group: u64, arc: u64, left: u64, best: Option<(i32, u64)> },
    Update { at: u32, root: u32 },
    Refresh { at: u32 },
}

struct Simplex {
    nodes: Region,
    arcs: Region,
    tree: Vec<Node>,
    arc_count: u64,
    salt: u64,
    stage: Stage,
    group: u64,
    pivots: u64,
    until_refresh: u32,
}

impl Simplex {
    fn new(setup: &mut Setup) -> Self {
        let bytes = setup.data_bytes();
        // The reference inputs have about 60 000 nodes (trips to cover); 181.mcf has fifty arcs to each, 429.mcf more.
        let count = (bytes / NODE_BYTES / 51).clamp(64, 60_000);
        let arc_count = (bytes - count * NODE_BYTES) / ARC_BYTES;
        let nodes = setup.region("nodes", count * NODE_BYTES, Users::All);
        let arcs = setup.region("arcs", arc_count * ARC_BYTES, Users::All);
        let mut rng = setup.rng.clone();
        let tree = random_tree(count as u32, &mut rng);
        let stage = Stage::Refresh { at: 0 };
        let salt = rng.bits();
        Simplex { nodes, arcs, tree, arc_count, salt, stage, group: 0, pivots: 0, until_refresh: PIVOTS_PER_REFRESH }
    }

    fn node(&self, node: u32) -> u64 {
        self.nodes.at(u64::from(node), NODE_BYTES)
    }

    /// Tail, head and cost of an arc: a hash, with heads near tails (timetabled trips follow each other).
    #[inline]
    fn ends(&self, arc: u64) -> (u32, u32, i32) {
        let count = self.tree.len() as u64;
        let hash = mix(arc ^ self.salt);
        let tail = scale(hash, count);
        let span = (count / 4).max(2);
        let head = (tail + 1 + scale(hash << 24, span)) % count;
        (tail as u32, head as u32, (hash & 0x3ff) as i32)
    }

    fn price(&mut self, out: &mut Out) {
        let Stage::Price { group, mut arc, mut left, mut best } = self.stage else { return };
        // Arcs of one group lie `groups` apart, as in the program's partial pricing.
        let groups = self.arc_count.div_ceil(GROUP_ARCS);
        for _ in 0..left.min(64) {
            let record = self.arcs.at(arc, ARC_BYTES);
            let (tail, head, cost) = self.ends(arc);
            out.load(record + 24);
            out.load(record);
            out.chase(self.node(tail) + 8);
            out.load(record + 8);
            out.chase(self.node(head) + 8);
            let reduced = cost - self.tree[tail as usize].potential + self.tree[head as usize].potential;
            if reduced < 0 && best.is_none_or(|(least, _)| reduced < least) {
                best = Some((reduced, arc));
                out.store(self.nodes.base);
            }
            arc += groups;
            left -= 1;
            if arc >= self.arc_count {
                left = 0;
                break;
            }
        }
        self.stage = Stage::Price { group, arc, left, best };
        if left == 0 {
            self.group = (group + 1) % groups;
            // Without a violating arc the basis is left by a forced, degenerate pivot: the problem never ends.
            let entering = best.map_or(group, |(_, arc)| arc);
            self.pivot(entering, out);
        }
    }

    fn climb(&self, node: u32, out: &mut Out) -> u32 {
        let record = self.node(node);
        out.load(record + 40);
        out.load(record + 16);
        self.tree[node as usize].parent
    }

    fn pivot(&mut self, arc: u64, out: &mut Out) {
        out.enter(1);
        let (mut one, mut two, _) = self.ends(arc);
        let (tail, head) = (one, two);
        let mut cut = NONE;
        let mut least = u64::MAX;
        while one != two {
            let deeper =
                if self.tree[one as usize].depth >= self.tree[two as usize].depth { &mut one } else { &mut two };
            let here = *deeper;
            let flow = mix(u64::from(here) ^ self.pivots);
            if flow < least {
                least = flow;
                cut = here;
            }
            *deeper = self.climb(here, out);
        }
        if cut != NONE {
            // The side whose path holds the cut is re-hung under the other end.
            let inside = if self.is_below(tail, cut) { (tail, head) } else { (head, tail) };
            self.rehang(inside.0, inside.1, cut, out);
        } else {
            self.end_pivot(out);
        }
    }

    fn end_pivot(&mut self, out: &mut Out) {
        self.pivots += 1;
        self.until_refresh -= 1;
        if self.until_refresh == 0 {
            self.until_refresh = PIVOTS_PER_REFRESH;
            self.stage = Stage::Refresh { at: 0 };
            out.enter(2);
        } else {
            self.start_pricing(out);
        }
    }

    fn start_pricing(&mut self, out: &mut Out) {
        let group = self.group;
        self.stage = Stage::Price { group, arc: group, left: GROUP_ARCS, best: None };
        out.enter(0);
    }

    fn is_below(&self, mut node: u32, ancestor: u32) -> bool {
        while node != NONE {
            if node == ancestor {
                return true;
            }
            node = self.tree[node as usize].parent;
        }
        false
    }

    /// Reverses the path from `root` up to `cut`, hanging `root` under `parent`.
    fn rehang(&mut self, root: u32, parent: u32, cut: u32, out: &mut Out) {
        let (mut node, mut above) = (root, parent);
        loop {
            let next = self.tree[node as usize].parent;
            self.unlink(node);
            self.link(node, above);
            let record = self.node(node);
            out.load(record + 16);
            out.store(record + 16);
            out.store(record + 32);
            out.store(record + 48);
            if node == cut || next == NONE {
                break;
            }
            (above, node) = (node, next);
        }
        out.enter(3);
        self.stage = Stage::Update { at: root, root };
    }

    fn unlink(&mut self, node: u32) {
        let Node { parent, next, previous, .. } = self.tree[node as usize];
        if previous != NONE {
            self.tree[previous as usize].next = next;
        } else if parent != NONE {
            self.tree[parent as usize].child = next;
        }
        if next != NONE {
            self.tree[next as usize].previous = previous;
        }
    }

    fn link(&mut self, node: u32, parent: u32) {
        let first = self.tree[parent as usize].child;
        if first != NONE {
            self.tree[first as usize].previous = node;
        }
        self.tree[parent as usize].child = node;
        let record = &mut self.tree[node as usize];
        record.parent = parent;
        record.next = first;
        record.previous = NONE;
    }

    /// Depths and potentials of the re-hung subtree, in depth-first order; then pricing or the refresh.
    fn update(&mut self, out: &mut Out) {
        let Stage::Update { mut at, root } = self.stage else { return };
        for _ in 0..64 {
            let record = self.node(at);
            out.chase(record + 16);
            out.load(record + 8);
            out.store(record + 8);
            out.store(record + 56);
            let parent = self.tree[at as usize].parent;
            self.tree[at as usize].depth = self.tree[parent as usize].depth + 1;
            self.tree[at as usize].potential = self.potential_below(at, parent);
            match self.after(at, root) {
                Some(next) => at = next,
                None => return self.end_pivot(out),
            }
        }
        self.stage = Stage::Update { at, root };
    }

    fn potential_below(&self, node: u32, parent: u32) -> i32 {
        let cost = (mix(u64::from(node) ^ self.salt) & 0x3ff) as i32 - 512;
        (self.tree[parent as usize].potential + cost) % 4096
    }

    /// The node after `node` in depth-first order, within the subtree of `root`.
    fn after(&self, mut node: u32, root: u32) -> Option<u32> {
        if self.tree[node as usize].child != NONE {
            return Some(self.tree[node as usize].child);
        }
        while node != root {
            if self.tree[node as usize].next != NONE {
                return Some(self.tree[node as usize].next);
            }
            node = self.tree[node as usize].parent;
        }
        None
    }

    fn refresh(&mut self, out: &mut Out) {
        let Stage::Refresh { mut at } = self.stage else { return };
        for _ in 0..64 {
            let Some(next) = self.after(at, 0) else {
                self.start_pricing(out);
                return;
            };
            let parent = self.tree[next as usize].parent;
            self.tree[next as usize].potential = self.potential_below(next, parent);
            let record = self.node(next);
            out.chase(record + 16);
            out.load(self.node(parent) + 8);
            out.store(record + 8);
            out.load(record + 24);
            at = next;
        }
        self.stage = Stage::Refresh { at };
    }
}

impl Kernel for Simplex {
    fn step(&mut self, out: &mut Out) -> Turn {
        match self.stage {
            Stage::Price { .. } => self.price(out),
            Stage::Update { .. } => self.update(out),
            Stage::Refresh { .. } => self.refresh(out),
        }
        Turn::More
    }

    fn progress(&self) -> f64 {
        self.pivots as f64
    }
}

/// A random spanning tree of logarithmic depth with root 0, siblings in order of index.
fn random_tree(count: u32, rng: &mut Rng) -> Vec<Node> {
    let blank = Node { parent: NONE, child: NONE, next: NONE, previous: NONE, depth: 0, potential: 0 };
    let mut tree = vec![blank; count as usize];
    for node in 1..count {
        let parent = rng.below(u64::from(node)) as u32;
        let first = tree[parent as usize].child;
        if first != NONE {
            tree[first as usize].previous = node;
        }
        tree[parent as usize].child = node;
        let depth = tree[parent as usize].depth + 1;
        tree[node as usize] = Node { parent, next: first, depth, ..blank };
    }
    tree
}
