//! The basis of a network simplex: a spanning tree over a day's timetable, with its flows and
//! potentials.
//!
//! mcf's misses depend on the number of tree nodes that a pivot touches, the length of its cycle,
//! and the arcs that violate optimality. None of these can be drawn at random without deciding the
//! result, so the kernel runs a real simplex. The trips of a day are to be covered by as few
//! vehicles as possible. A trip has a start and an end node; a depot arc leads to each start and
//! from each end; a dead-head arc leads from an end to a later start. All capacities are one. The
//! tree is stored as in mcf (Löbel 1997: parent, first child, siblings, size of the subtree,
//! direction and flow of the arc to the parent).
//!
//! For example, the test input of 429.mcf has 5,985 trips, which its published solution covers with
//! 206 vehicles, 29 trips each; trips of 10 to 64 minutes, spread evenly over a day, come to the
//! same.
//!
//! Ends and costs of arcs are hashes of their index, so that arcs need no host memory; a real input
//! of 190 MB would need as much here. After every pivot, the tree spans all nodes, and sizes are
//! those of the subtrees. Flows are 0 or 1 and conserved, and basic arcs have reduced cost 0
//! (tested).

use super::random::{hash_value, map_to_range};

pub(super) const NONE: u32 = u32::MAX;
/// Arc of a node that an artificial arc connects to the root.
pub(super) const ARTIFICIAL: u64 = u64::MAX;

/// Cost of a vehicle (mcf's BIGM), and of leaving the depot or returning to it.
const VEHICLE_COST: i64 = 10_000_000;
const DEPOT_ARC_COST: i64 = 15;
/// Cost of a dead-head trip that the program generates, as in its source.
const GENERATED_ARC_COST: i64 = 30;
const ARTIFICIAL_COST: i64 = 100_000_000;
/// Number of given dead-head trips for each trip.
///
/// The published log of 429.mcf's test input starts with 102 404 arcs for 5 985 trips, three of which belong to the
/// trip itself.
const GIVEN_ARCS: u64 = 14;
/// Number of arcs that belong to a trip: from the depot, to the depot, and the trip itself.
const TRIP_ARCS: u64 = 3;
const DAY_MINUTES: u64 = 18 * 60;

/// A node of the spanning tree, with its basic arc.
#[derive(Clone, Copy)]
pub(super) struct BasisNode {
    pub parent: u32,
    pub child: u32,
    pub next_sibling: u32,
    pub previous_sibling: u32,
    /// Number of nodes in the subtree.
    pub size: u32,
    /// Whether the basic arc leads from this node to its parent.
    pub points_up: bool,
    /// Flow of the basic arc.
    pub has_flow: bool,
    pub arc: u64,
    pub potential: i64,
}

/// An arc that is about to enter the basis, with the arc that leaves for it.
#[derive(Clone, Copy)]
pub(super) struct Pivot {
    pub entering_arc: u64,
    /// Node from which flow is pushed over the arc to `to_node`, and back through the tree.
    from_node: u32,
    to_node: u32,
    apex: u32,
    /// Node whose basic arc leaves; `NONE` if the capacity of the entering arc limits the flow before any other arc
    /// does.
    pub cut_node: u32,
    /// Whether `cut_node` lies on the path from `from_node` to the apex.
    is_cut_on_from_path: bool,
    can_push: bool,
    reduced_cost: i64,
}

impl Pivot {
    /// First the end within the subtree to be cut off.
    pub fn entering_arc_ends(&self) -> (u32, u32) {
        if self.is_cut_on_from_path {
            (self.from_node, self.to_node)
        } else {
            (self.to_node, self.from_node)
        }
    }
}

/// The spanning tree. Node 0 is the root, node 1 the depot, followed by the trips' start nodes and then their end
/// nodes.
pub(super) struct Basis {
    pub nodes: Vec<BasisNode>,
    trips: u64,
    pub arcs: u64,
    salt: u64,
    /// Salt of the costs. It changes when the optimum is reached, which gives the next problem on the same network.
    costs_salt: u64,
    /// Bit set of the nonbasic arcs that have a flow of one.
    arcs_at_upper_bound: Vec<u64>,
}

impl Basis {
    /// Trips whose arcs fill `arcs`.
    ///
    /// In 429.mcf's test input, the generated arcs are 13.4 % of all pairs of its trips (2 393 292
    /// of 5 985^2 / 2).
    pub fn trip_count(arcs: u64) -> u64 {
        let trips = libm::sqrt(2.0 * arcs as f64 / 0.134) as u64;
        trips.min(arcs / (2 * (TRIP_ARCS + GIVEN_ARCS))).max(8)
    }

    pub fn node_count(arcs: u64) -> u64 {
        2 * Self::trip_count(arcs) + 2
    }

    /// Builds a feasible basis, in which each trip is followed by the first of its given dead-head trips whose end is
    /// still free.
    pub fn new(arcs: u64, salt: u64) -> Self {
        let trips = Self::trip_count(arcs);
        let unlinked_node = BasisNode {
            parent: NONE,
            child: NONE,
            next_sibling: NONE,
            previous_sibling: NONE,
            size: 1,
            points_up: false,
            has_flow: false,
            arc: ARTIFICIAL,
            potential: 0,
        };
        let nodes = vec![unlinked_node; 2 * trips as usize + 2];
        let arcs_at_upper_bound = vec![0; arcs.div_ceil(64) as usize];
        let mut basis = Basis {
            nodes,
            trips,
            arcs,
            salt,
            costs_salt: salt,
            arcs_at_upper_bound,
        };
        basis.nodes[1].points_up = true;
        basis.link(1, 0);
        for trip in 0..trips {
            basis.flip_upper_bound(TRIP_ARCS * trip + 2);
        }

        basis.build_first_chains();
        basis.compute_first_sizes();
        let mut current_node = 0;
        while let Some(next_node) = basis.next_in_depth_first_order(current_node, 0) {
            basis.set_potential(next_node);
            current_node = next_node;
        }
        basis
    }

    fn build_first_chains(&mut self) {
        let trips = self.trips;
        for trip in 0..trips {
            let (start, end) = (2 + trip as u32, (2 + trips + trip) as u32);
            if self.nodes[start as usize].parent == NONE {
                self.attach_node(start, 1, TRIP_ARCS * trip, false, true);
            }
            let given_arcs = (0..GIVEN_ARCS).map(|k| TRIP_ARCS * trips + trip * GIVEN_ARCS + k);
            let free_arc = given_arcs.into_iter().find(|&arc| {
                let (tail, head, _) = self.arc_ends_and_cost(arc);
                tail == end && head > start && self.nodes[head as usize].parent == NONE
            });
            self.attach_node(end, 1, TRIP_ARCS * trip + 1, true, free_arc.is_none());
            if let Some(arc) = free_arc {
                let (_, head, _) = self.arc_ends_and_cost(arc);
                self.attach_node(head, end, arc, false, true);
            }
        }
    }

    fn compute_first_sizes(&mut self) {
        let mut depth_first_order = vec![0];
        let mut current_node = 0;
        while let Some(next_node) = self.next_in_depth_first_order(current_node, 0) {
            depth_first_order.push(next_node);
            current_node = next_node;
        }
        for &node in depth_first_order[1..].iter().rev() {
            let parent = self.nodes[node as usize].parent;
            self.nodes[parent as usize].size += self.nodes[node as usize].size;
        }
    }

    fn attach_node(&mut self, node: u32, parent: u32, arc: u64, points_up: bool, has_flow: bool) {
        let record = &mut self.nodes[node as usize];
        (record.arc, record.points_up, record.has_flow) = (arc, points_up, has_flow);
        self.link(node, parent);
    }

    /// Tail, head and cost.
    ///
    /// Trips start evenly over the day and last 10 to 64 minutes, so 29 trips make a vehicle's day,
    /// as in the published solution (5 985 trips, 206 vehicles).
    #[inline]
    pub fn arc_ends_and_cost(&self, arc: u64) -> (u32, u32, i64) {
        let trips = self.trips;
        let (start, end) = (
            |trip: u64| (2 + trip) as u32,
            |trip: u64| (2 + trips + trip) as u32,
        );
        if arc < TRIP_ARCS * trips {
            let trip = arc / TRIP_ARCS;
            return match arc % TRIP_ARCS {
                0 => (1, start(trip), VEHICLE_COST + DEPOT_ARC_COST),
                1 => (end(trip), 1, DEPOT_ARC_COST),
                _ => (start(trip), end(trip), -2 * VEHICLE_COST),
            };
        }
        let hash = hash_value(arc ^ self.salt);
        let index = arc - TRIP_ARCS * trips;
        let is_given = index < GIVEN_ARCS * trips;
        let mut trip = if is_given {
            index / GIVEN_ARCS
        } else {
            map_to_range(hash, trips)
        };
        let mut first_later_trip = self.first_trip_after(trip);
        // No trip follows the last ones of a day, so their arcs belong to trips in the middle of the day.
        while first_later_trip + 1 >= trips {
            trip /= 2;
            first_later_trip = self.first_trip_after(trip);
        }
        // Given dead-head trips lead to a trip that starts within a quarter of an hour, the others to any later trip.
        let later_trips = if is_given {
            (trips * 15 / DAY_MINUTES)
                .max(1)
                .min(trips - first_later_trip)
        } else {
            trips - first_later_trip
        };
        let head_trip = first_later_trip + map_to_range(hash << 32, later_trips);
        let cost = if is_given {
            1 + (hash_value(hash ^ self.costs_salt) % 60) as i64
        } else {
            GENERATED_ARC_COST
        };
        (end(trip), start(head_trip), cost)
    }

    /// The first trip that starts after this one has ended.
    #[inline]
    fn first_trip_after(&self, trip: u64) -> u64 {
        let minutes = 10 + hash_value(trip ^ self.salt) % 55;
        trip + 1 + minutes * self.trips / DAY_MINUTES
    }

    #[inline]
    pub fn is_at_upper_bound(&self, arc: u64) -> bool {
        self.arcs_at_upper_bound[(arc / 64) as usize] >> (arc % 64) & 1 == 1
    }

    fn flip_upper_bound(&mut self, arc: u64) {
        self.arcs_at_upper_bound[(arc / 64) as usize] ^= 1 << (arc % 64);
    }

    pub fn is_basic(&self, arc: u64, tail: u32, head: u32) -> bool {
        self.nodes[tail as usize].arc == arc || self.nodes[head as usize].arc == arc
    }

    pub fn reduced_cost(&self, tail: u32, head: u32, cost: i64) -> i64 {
        cost - self.nodes[tail as usize].potential + self.nodes[head as usize].potential
    }

    /// Whether a change of the flow over a nonbasic arc of this reduced cost would improve the
    /// solution.
    pub fn is_violating(&self, arc: u64, reduced_cost: i64) -> bool {
        if reduced_cost < 0 {
            !self.is_at_upper_bound(arc)
        } else {
            reduced_cost > 0 && self.is_at_upper_bound(arc)
        }
    }

    /// Starts the next problem on the same network, in which the given arcs have other costs. Flows stay feasible;
    /// potentials are stale until they are refreshed.
    pub fn start_next_problem(&mut self) {
        self.costs_salt = hash_value(self.costs_salt);
    }

    /// The cycle that an arc closes, with the first arc on it that blocks. `on_climb` is called for
    /// every step up the tree.
    pub fn find_pivot(&self, entering_arc: u64, mut on_climb: impl FnMut(u32)) -> Pivot {
        let (tail, head, cost) = self.arc_ends_and_cost(entering_arc);
        let reduced_cost = self.reduced_cost(tail, head, cost);
        let (from_node, to_node) = if reduced_cost < 0 {
            (tail, head)
        } else {
            (head, tail)
        };
        let (mut from_climber, mut to_climber) = (from_node, to_node);
        let (mut cut_node, mut is_cut_on_from_path, mut can_push) = (NONE, false, true);
        while from_climber != to_climber {
            let (from_record, to_record) = (
                &self.nodes[from_climber as usize],
                &self.nodes[to_climber as usize],
            );
            // Flow would come down from the apex to `from_node`, and go up from `to_node`. An arc that blocks on
            // `to_node`'s side leaves even if another could, to prevent cycling.
            if from_record.size < to_record.size {
                if can_push && from_record.has_flow != from_record.points_up {
                    (cut_node, is_cut_on_from_path, can_push) = (from_climber, true, false);
                }
                on_climb(from_climber);
                from_climber = from_record.parent;
            } else {
                let has_room = to_record.has_flow != to_record.points_up;
                if !has_room || can_push {
                    (cut_node, is_cut_on_from_path, can_push) = (to_climber, false, has_room);
                }
                on_climb(to_climber);
                to_climber = to_record.parent;
            }
        }
        Pivot {
            entering_arc,
            from_node,
            to_node,
            apex: from_climber,
            cut_node,
            is_cut_on_from_path,
            can_push,
            reduced_cost,
        }
    }

    /// The change of the potentials of the cut-off subtree.
    pub fn potential_change(&self, pivot: &Pivot) -> i64 {
        let inner_end = pivot.entering_arc_ends().0;
        if inner_end == self.arc_ends_and_cost(pivot.entering_arc).0 {
            pivot.reduced_cost
        } else {
            -pivot.reduced_cost
        }
    }

    /// Pushes the flow and exchanges the arcs.
    ///
    /// `visit_node` is called for every node whose record changes. Its second argument is true for nodes between the
    /// entering arc and the cut, whose arcs are reversed.
    pub fn exchange(&mut self, pivot: &Pivot, mut visit_node: impl FnMut(u32, bool)) {
        if pivot.can_push {
            self.push_flow(pivot);
        }

        if pivot.cut_node == NONE {
            self.flip_upper_bound(pivot.entering_arc);
            [pivot.from_node, pivot.to_node]
                .into_iter()
                .for_each(|end| self.update_path(end, pivot.apex, |_, at| visit_node(at, false)));
            return;
        }

        let leaving_node = self.nodes[pivot.cut_node as usize];
        if leaving_node.has_flow {
            self.flip_upper_bound(leaving_node.arc);
        }
        let was_at_upper_bound = self.is_at_upper_bound(pivot.entering_arc);
        if was_at_upper_bound {
            self.flip_upper_bound(pivot.entering_arc);
        }

        let (inner_end, outer_end) = pivot.entering_arc_ends();
        let points_up = inner_end == self.arc_ends_and_cost(pivot.entering_arc).0;
        let cut_size = leaving_node.size;
        self.reverse_path(
            inner_end,
            outer_end,
            pivot.cut_node,
            (
                pivot.entering_arc,
                points_up,
                was_at_upper_bound != pivot.can_push,
            ),
            &mut visit_node,
        );
        self.update_path(leaving_node.parent, pivot.apex, |record, node| {
            record.size -= cut_size;
            visit_node(node, false);
        });
        self.update_path(outer_end, pivot.apex, |record, node| {
            record.size += cut_size;
            visit_node(node, false);
        });
    }

    fn update_path(
        &mut self,
        mut node: u32,
        apex: u32,
        mut change: impl FnMut(&mut BasisNode, u32),
    ) {
        while node != apex {
            let record = &mut self.nodes[node as usize];
            change(record, node);
            node = record.parent;
        }
    }

    fn push_flow(&mut self, pivot: &Pivot) {
        self.update_path(pivot.from_node, pivot.apex, |record, _| {
            record.has_flow = !record.points_up
        });
        self.update_path(pivot.to_node, pivot.apex, |record, _| {
            record.has_flow = record.points_up
        });
    }

    /// Reverses the path from `node` up to `cut`, and attaches `node` to `new_parent` by the given arc.
    fn reverse_path(
        &mut self,
        mut node: u32,
        mut new_parent: u32,
        cut: u32,
        mut basic_arc: (u64, bool, bool),
        on_reversed: &mut impl FnMut(u32, bool),
    ) {
        let subtree_size = self.nodes[cut as usize].size;
        let mut size = subtree_size;

        loop {
            let old_node = self.nodes[node as usize];
            self.unlink(node);
            self.attach_node(node, new_parent, basic_arc.0, basic_arc.1, basic_arc.2);
            self.nodes[node as usize].size = size;
            on_reversed(node, true);
            if node == cut {
                return;
            }
            size = subtree_size - old_node.size;
            basic_arc = (old_node.arc, !old_node.points_up, old_node.has_flow);
            (new_parent, node) = (node, old_node.parent);
        }
    }

    fn unlink(&mut self, node: u32) {
        let BasisNode {
            parent,
            next_sibling,
            previous_sibling,
            ..
        } = self.nodes[node as usize];
        if previous_sibling != NONE {
            self.nodes[previous_sibling as usize].next_sibling = next_sibling;
        } else {
            self.nodes[parent as usize].child = next_sibling;
        }
        if next_sibling != NONE {
            self.nodes[next_sibling as usize].previous_sibling = previous_sibling;
        }
    }

    fn link(&mut self, node: u32, parent: u32) {
        let first_child = self.nodes[parent as usize].child;
        if first_child != NONE {
            self.nodes[first_child as usize].previous_sibling = node;
        }
        self.nodes[parent as usize].child = node;
        let record = &mut self.nodes[node as usize];
        (record.parent, record.next_sibling, record.previous_sibling) = (parent, first_child, NONE);
    }

    /// From its parent's, which must be current.
    pub fn set_potential(&mut self, node: u32) {
        let BasisNode {
            parent,
            arc,
            points_up: up,
            ..
        } = self.nodes[node as usize];
        let cost = if arc == ARTIFICIAL {
            ARTIFICIAL_COST
        } else {
            self.arc_ends_and_cost(arc).2
        };
        let parent_potential = self.nodes[parent as usize].potential;
        self.nodes[node as usize].potential = if up {
            parent_potential + cost
        } else {
            parent_potential - cost
        };
    }

    /// The node that follows `node` in the depth-first order of the subtree of `root`; `None` after
    /// the last one.
    pub fn next_in_depth_first_order(&self, node: u32, root: u32) -> Option<u32> {
        self.next_in_subtree(node, root, |_, _| ())
    }

    /// Like [`Basis::next_in_depth_first_order`], but also calls `on_read` for every node whose links are read, and
    /// passes whether it is reached on the way up.
    pub fn next_in_subtree(
        &self,
        mut node: u32,
        root: u32,
        mut on_read: impl FnMut(u32, bool),
    ) -> Option<u32> {
        on_read(node, false);
        let record = &self.nodes[node as usize];
        if record.child != NONE {
            return Some(record.child);
        }

        while node != root {
            let record = &self.nodes[node as usize];
            on_read(node, true);
            if record.next_sibling != NONE {
                return Some(record.next_sibling);
            }
            node = record.parent;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs one simplex step with the arc of largest reduced cost; returns `false` at the optimum.
    fn step(basis: &mut Basis) -> bool {
        let reduced_cost_of = |basis: &Basis, arc: u64| {
            let (tail, head, cost) = basis.arc_ends_and_cost(arc);
            (!basis.is_basic(arc, tail, head)).then(|| basis.reduced_cost(tail, head, cost))
        };
        let best = (0..basis.arcs)
            .filter_map(|arc| {
                reduced_cost_of(basis, arc)
                    .filter(|&cost| basis.is_violating(arc, cost))
                    .map(|cost| (cost.abs(), arc))
            })
            .max();
        let Some((_, arc)) = best else { return false };

        let pivot = basis.find_pivot(arc, |_| ());
        if pivot.cut_node != NONE {
            let change = basis.potential_change(&pivot);
            let mut at = Some(pivot.cut_node);
            while let Some(node) = at {
                basis.nodes[node as usize].potential += change;
                at = basis.next_in_depth_first_order(node, pivot.cut_node);
            }
        }
        basis.exchange(&pivot, |_, _| ());
        true
    }

    /// Vehicles in use, and for every node the flow in minus the flow out.
    fn flow_balance(basis: &Basis) -> (u64, Vec<i32>) {
        let mut excess = vec![0; basis.nodes.len()];
        let mut vehicles = 0;
        for arc in 0..basis.arcs {
            let (tail, head, _) = basis.arc_ends_and_cost(arc);
            let is_basic_arc = |node: u32| basis.nodes[node as usize].arc == arc;
            let basic = if is_basic_arc(tail) {
                Some(tail)
            } else {
                is_basic_arc(head).then_some(head)
            };
            let flow = basic.map_or(basis.is_at_upper_bound(arc), |node| {
                basis.nodes[node as usize].has_flow
            });
            excess[tail as usize] -= i32::from(flow);
            excess[head as usize] += i32::from(flow);
            vehicles += u64::from(flow && tail == 1);
        }
        (vehicles, excess)
    }

    /// Do pivots keep a spanning tree with correct sizes, correct potentials and a feasible flow? Do they reach an
    /// optimum that no schedule beats, with as many vehicles as an augmenting-path matching leaves?
    #[test]
    fn pivots_keep_the_basis_and_reach_an_optimal_schedule() {
        let mut basis = Basis::new(6000, 7);
        let trips = basis.trips;
        let (before, _) = flow_balance(&basis);
        let mut pivots = 0;
        while step(&mut basis) {
            pivots += 1;
            assert!(pivots < 100_000, "it cycles");
            if pivots % 50 == 0 {
                check(&basis);
            }
        }
        check(&basis);
        let (vehicles, _) = flow_balance(&basis);
        assert!(
            vehicles < before && pivots > trips,
            "{vehicles} of {before} vehicles after {pivots} pivots"
        );
        assert_eq!(vehicles, trips - max_matching(&basis));
    }

    fn check(basis: &Basis) {
        let (_, excess) = flow_balance(basis);
        assert!(excess.iter().all(|&node| node == 0));
        let mut sizes = vec![1; basis.nodes.len()];
        let mut order = vec![0];
        while let Some(next) = basis.next_in_depth_first_order(*order.last().expect("not empty"), 0)
        {
            order.push(next);
            assert!(order.len() <= basis.nodes.len(), "no tree");
        }
        assert_eq!(order.len(), basis.nodes.len());

        for &node in order[1..].iter().rev() {
            sizes[basis.nodes[node as usize].parent as usize] += sizes[node as usize];
            let BasisNode { arc, .. } = basis.nodes[node as usize];
            if arc != ARTIFICIAL {
                let (tail, head, cost) = basis.arc_ends_and_cost(arc);
                assert_eq!(basis.reduced_cost(tail, head, cost), 0);
            }
        }

        assert!(
            basis
                .nodes
                .iter()
                .zip(sizes)
                .all(|(node, size)| node.size == size)
        );
    }

    /// The maximum number of trips that can follow another one in the same vehicle (Berge's
    /// augmenting paths).
    fn max_matching(basis: &Basis) -> u64 {
        let mut followers = vec![Vec::new(); basis.trips as usize];
        for arc in TRIP_ARCS * basis.trips..basis.arcs {
            let (tail, head, _) = basis.arc_ends_and_cost(arc);
            followers[(u64::from(tail) - 2 - basis.trips) as usize].push(head as usize - 2);
        }

        let mut led = vec![usize::MAX; basis.trips as usize];
        fn find_augmenting_lead(
            trip: usize,
            followers: &[Vec<usize>],
            led: &mut [usize],
            visited: &mut [bool],
        ) -> bool {
            followers[trip].iter().any(|&next| {
                !std::mem::replace(&mut visited[next], true)
                    && (led[next] == usize::MAX
                        || find_augmenting_lead(led[next], followers, led, visited))
                    && {
                        led[next] = trip;
                        true
                    }
            })
        }

        (0..followers.len())
            .filter(|&trip| {
                find_augmenting_lead(
                    trip,
                    &followers,
                    &mut led,
                    &mut vec![false; followers.len()],
                )
            })
            .count() as u64
    }
}
