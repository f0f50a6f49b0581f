//! Solves problems with two CPUs to every cache by minimum-weight perfect matching over programs and idle CPUs (CA
//! 2.1.1, after Jiang).
//!
//! The library requires nonnegative integers and an even number of nodes, so idle CPUs are nodes of cost 0. The
//! smallest weight is subtracted from all weights; because every perfect matching has equally many edges, this does not
//! change the order of matchings. Weights become integers at a resolution of 2^-40 of their range; matchings that
//! differ by less count as equal.

use integer_blossom::min_weight_perfect_matching;

use super::{CostMatrix, Seating, Seats};

/// Number of distinct integer weights over the range of all weights.
const RESOLUTION: f64 = (1u64 << 40) as f64;

/// Maximum number of nodes; with more, the library takes longer than a second (cubic time).
const MAX_NODES: usize = 800;

/// Whether the problem is a matching problem of tractable size.
pub fn can_solve(programs: usize, seats: &Seats) -> bool {
    let nodes = seats.cpus();
    seats.cpus_per_cache.iter().all(|&cpus| cpus == 2) && programs <= nodes && nodes <= MAX_NODES
}

/// An optimal seating; [`can_solve`] must hold.
pub fn solve(costs: &CostMatrix, seats: &Seats) -> Seating {
    let programs = costs.len();
    let pair_weight = |a: usize, b: usize| match a.max(b) < programs {
        true => costs[a][b] + costs[b][a],
        false => 0.0,
    };
    let partners = perfect_matching(seats.cpus(), pair_weight);
    let pairs = (0..partners.len())
        .filter(|&node| node < partners[node])
        .map(|node| [node, partners[node]]);

    let programs_of_node = |node: usize| {
        if node < programs {
            vec![node]
        } else {
            Vec::new()
        }
    };
    Seating {
        by_cache: pairs
            .map(|pair| pair.map(programs_of_node).to_vec())
            .collect(),
    }
}

/// Each node's partner in a minimum-weight perfect matching of the complete graph over an even number of nodes.
/// `weight` must be symmetric and finite.
pub fn perfect_matching(nodes: usize, weight: impl Fn(usize, usize) -> f64) -> Vec<usize> {
    let all_edges = || (0..nodes).flat_map(|a| (a + 1..nodes).map(move |b| (a, b)));
    let (min_weight, max_weight) = all_edges()
        .map(|(a, b)| weight(a, b))
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), w| {
            (low.min(w), high.max(w))
        });
    let scale = if max_weight > min_weight {
        RESOLUTION / (max_weight - min_weight)
    } else {
        0.0
    };

    let mut cost = vec![0i64; nodes * nodes];
    for (a, b) in all_edges() {
        let integer_weight = libm::round((weight(a, b) - min_weight) * scale) as i64;
        cost[a * nodes + b] = integer_weight;
        cost[b * nodes + a] = integer_weight;
    }
    if nodes == 0 {
        Vec::new()
    } else {
        min_weight_perfect_matching(&cost, nodes)
    }
}
