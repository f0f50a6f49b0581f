//! Groups threads and regions jointly (bipartite modularity: Barber, Phys. Rev. E 76, 2007; label propagation with
//! merging: Liu and Murata, 2010).
//! Problem: the thesis's scan lets one thread represent its cluster, and identifies global data by counting threads.
//! Both fail if sharing is uneven: the scan splits VolanoMark's two rooms into five clusters, and cannot detect a
//! cluster of more than half of the threads. This method was chosen because it does not require the number of clusters.
//! It reads the counters a few times instead of comparing all pairs, and compares a thread with the regions of its
//! whole cluster.
//!
//! Method: threads and entries are the two sides of a graph whose edges are weighted with the counters. Every entry
//! starts as a community. Threads, then entries, join the community to which their ties exceed chance most (weight -
//! degree x degree of the community / all weight), until none moves. Communities whose union raises modularity are then
//! merged, and propagation starts again. Parts of one group are united by their mean counters.
//!
//! A community *owns* an entry if each of its threads touches the entry at least three times as much as other threads
//! do. The excess must also be two standard deviations, so that noise owns nothing. All other entries are global: they
//! are dropped, and the procedure is repeated without them. A thread belongs to its community if, on the owned entries,
//! the product of its counters and the mean of the other members' reaches the similarity threshold.
//!
//! Properties: no seed is needed. In a tie, a node stays in its community, or otherwise takes the lower label. The
//! method makes a few passes over the nonzero counters.

use std::collections::BTreeMap;

use cachemate_locality::shmap::SharingCriteria;

use super::{Clusters, ThreadMap, earlier_cluster_weight, entries_and_columns};

/// Factor by which each member must touch an owned entry more than other threads do.
const DOMINANCE: f64 = 3.0;
/// Maximum number of passes of label propagation. Label propagation converges after a few passes.
const MAX_PASSES: usize = 50;
/// Maximum number of rounds, both of propagation with merging and of communities with the selection of columns.
const MAX_ROUNDS: usize = 12;

/// An edge between a thread and a column.
#[derive(Clone, Copy)]
struct Edge {
    target: u32,
    weight: u32,
}

/// One side of the graph; the edges of all nodes are in one array, because they are read repeatedly.
struct GraphSide {
    /// Index of each node's first edge, and the end of the last node's.
    first_edges: Vec<usize>,
    edges: Vec<Edge>,
    /// Sum of the edge weights of each node.
    degrees: Vec<f64>,
}

impl GraphSide {
    fn edges_of(&self, node: usize) -> &[Edge] {
        &self.edges[self.first_edges[node]..self.first_edges[node + 1]]
    }

    fn nodes(&self) -> impl Iterator<Item = &[Edge]> {
        self.first_edges
            .windows(2)
            .map(|ends| &self.edges[ends[0]..ends[1]])
    }

    fn new(first_edges: Vec<usize>, edges: Vec<Edge>) -> Self {
        let sum_weights = |ends: &[usize]| {
            edges[ends[0]..ends[1]]
                .iter()
                .map(|edge| f64::from(edge.weight))
                .sum()
        };
        let degrees = first_edges.windows(2).map(sum_weights).collect();
        GraphSide {
            first_edges,
            edges,
            degrees,
        }
    }
}

/// Number of counters of a thread that are tested together, because most are below the floor.
const COUNTERS_PER_BLOCK: usize = 32;

/// The observed counters, with one column for each entry of the shMap, followed by one for each earlier cluster.
struct SharingMatrix {
    entry_count: usize,
    column_count: usize,
    /// Weight of the column of an earlier cluster; its square just reaches the threshold.
    earlier_cluster_weight: u32,
    /// Counters of each thread that reach the floor.
    thread_edges: GraphSide,
    /// Sums of raw counters by column, including noise.
    column_sums: Vec<u64>,
}

impl SharingMatrix {
    fn from_threads(threads: &[ThreadMap<'_>], floor: u8, threshold: u64) -> Self {
        let (entry_count, column_count) = entries_and_columns(threads);
        let cluster_weight = u32::from(earlier_cluster_weight(threshold));
        let (mut first_edges, mut edges, mut column_sums) =
            (vec![0], Vec::new(), vec![0u64; column_count]);
        let minimum = floor.max(1);

        for thread in threads {
            column_sums
                .iter_mut()
                .zip(thread.counters)
                .for_each(|(sum, &counter)| *sum += u64::from(counter));

            for (block, counters) in thread.counters.chunks(COUNTERS_PER_BLOCK).enumerate() {
                if counters
                    .iter()
                    .fold(0, |largest: u8, &counter| largest.max(counter))
                    < minimum
                {
                    continue;
                }

                let reached_counters = counters
                    .iter()
                    .enumerate()
                    .filter(|(_, counter)| **counter >= minimum);
                edges.extend(reached_counters.map(|(offset, &c)| Edge {
                    target: (block * COUNTERS_PER_BLOCK + offset) as u32,
                    weight: u32::from(c),
                }));
            }

            if let Some(cluster) = thread.previous_cluster {
                edges.push(Edge {
                    target: (entry_count + cluster) as u32,
                    weight: cluster_weight,
                });
                column_sums[entry_count + cluster] += u64::from(cluster_weight);
            }
            first_edges.push(edges.len());
        }

        SharingMatrix {
            entry_count,
            column_count,
            earlier_cluster_weight: cluster_weight,
            thread_edges: GraphSide::new(first_edges, edges),
            column_sums,
        }
    }

    /// The raw counter, including noise.
    fn raw_count(&self, thread: &ThreadMap<'_>, column: usize) -> u64 {
        match column.checked_sub(self.entry_count) {
            None => thread
                .counters
                .get(column)
                .map_or(0, |&counter| u64::from(counter)),
            Some(cluster) if thread.previous_cluster == Some(cluster) => {
                u64::from(self.earlier_cluster_weight)
            }
            Some(_) => 0,
        }
    }
}

/// The threads and the columns, with the edges of both sides.
struct Graph {
    threads: GraphSide,
    columns: GraphSide,
}

impl Graph {
    /// Builds the graph without columns that fewer than two threads touch, because these are not evidence of sharing.
    fn from_matrix(matrix: &SharingMatrix, is_kept: &[bool]) -> Self {
        let mut touch_counts = vec![0usize; matrix.column_count];
        matrix
            .thread_edges
            .edges
            .iter()
            .for_each(|edge| touch_counts[edge.target as usize] += 1);
        let is_retained =
            |edge: &&Edge| is_kept[edge.target as usize] && touch_counts[edge.target as usize] > 1;
        let (mut first_edges, mut edges) =
            (vec![0], Vec::with_capacity(matrix.thread_edges.edges.len()));
        for thread_edges in matrix.thread_edges.nodes() {
            edges.extend(thread_edges.iter().filter(is_retained));
            first_edges.push(edges.len());
        }
        let threads = GraphSide::new(first_edges, edges);
        let columns = transpose(&threads, matrix.column_count);
        Graph { threads, columns }
    }

    /// The number of labels: one for each column, and one for threads that touch nothing.
    fn label_count(&self) -> usize {
        self.columns.degrees.len() + 1
    }
}

/// The same edges, grouped by the nodes of the other side.
fn transpose(side: &GraphSide, other_count: usize) -> GraphSide {
    let mut first_edges = vec![0usize; other_count + 1];
    side.edges
        .iter()
        .for_each(|edge| first_edges[edge.target as usize + 1] += 1);
    (0..other_count).for_each(|index| first_edges[index + 1] += first_edges[index]);
    let mut next_slots = first_edges.clone();
    let mut edges = vec![
        Edge {
            target: 0,
            weight: 0
        };
        side.edges.len()
    ];

    for (node, node_edges) in side.nodes().enumerate() {
        for edge in node_edges {
            let next_slot = &mut next_slots[edge.target as usize];
            edges[*next_slot] = Edge {
                target: node as u32,
                weight: edge.weight,
            };
            *next_slot += 1;
        }
    }
    GraphSide::new(first_edges, edges)
}

fn sum_by_label(labels: &[usize], degrees: &[f64], count: usize) -> Vec<f64> {
    let mut sums = vec![0.0; count];
    labels
        .iter()
        .zip(degrees)
        .for_each(|(&label, degree)| sums[label] += degree);
    sums
}

/// Labels of all threads and of all columns.
#[derive(Clone, PartialEq)]
struct Labels {
    threads: Vec<usize>,
    columns: Vec<usize>,
}

/// Moves every node to the community of the other side to which its ties exceed chance most. Returns whether any node
/// moved.
fn move_to_best_labels(
    labels: &mut [usize],
    side: &GraphSide,
    other_labels: &[usize],
    expected: &[f64],
    total_weight: f64,
) -> bool {
    let mut tie_weights = vec![0u64; expected.len()];
    let mut tied_labels: Vec<usize> = Vec::new();
    let mut has_moved = false;
    for ((label, edges), &degree) in labels.iter_mut().zip(side.nodes()).zip(&side.degrees) {
        for edge in edges {
            let target_label = other_labels[edge.target as usize];
            if tie_weights[target_label] == 0 {
                tied_labels.push(target_label);
            }
            tie_weights[target_label] += u64::from(edge.weight);
        }
        tied_labels.sort_unstable();
        let label_score =
            |label: usize| tie_weights[label] as f64 - degree * expected[label] / total_weight;
        let (mut best_label, mut best_score) = (*label, label_score(*label));
        for &candidate in &tied_labels {
            let score = label_score(candidate);
            if score > best_score + 1e-9 * degree {
                (best_label, best_score) = (candidate, score);
            }
        }

        has_moved |= best_label != *label;
        *label = best_label;
        tied_labels
            .drain(..)
            .for_each(|label| tie_weights[label] = 0);
    }

    has_moved
}

fn propagate(graph: &Graph, labels: &mut Labels, total_weight: f64) {
    let count = graph.label_count();
    for _ in 0..MAX_PASSES {
        let expected_weights = sum_by_label(&labels.columns, &graph.columns.degrees, count);
        move_to_best_labels(
            &mut labels.threads,
            &graph.threads,
            &labels.columns,
            &expected_weights,
            total_weight,
        );
        let expected_weights = sum_by_label(&labels.threads, &graph.threads.degrees, count);
        // Threads chose by the columns' labels, so while these stay the same, threads would choose the same again.
        if !move_to_best_labels(
            &mut labels.columns,
            &graph.columns,
            &labels.threads,
            &expected_weights,
            total_weight,
        ) {
            return;
        }
    }
}

/// Merges communities that are each other's best partner and whose union raises modularity. Returns whether any were
/// merged.
fn merge(graph: &Graph, labels: &mut Labels, total_weight: f64) -> bool {
    let count = graph.label_count();
    let thread_degrees = sum_by_label(&labels.threads, &graph.threads.degrees, count);
    let column_degrees = sum_by_label(&labels.columns, &graph.columns.degrees, count);
    let used_labels: Vec<usize> = (0..count)
        .filter(|&label| thread_degrees[label] > 0.0 || column_degrees[label] > 0.0)
        .collect();
    let index_by_label = positions_by_label(&used_labels, count);
    let mut cross_weights = vec![0.0; used_labels.len() * used_labels.len()];
    for (&label, edges) in labels.threads.iter().zip(graph.threads.nodes()) {
        let row_start = index_by_label[label] * used_labels.len();
        for edge in edges {
            cross_weights[row_start + index_by_label[labels.columns[edge.target as usize]]] +=
                f64::from(edge.weight);
        }
    }

    let merge_gain = |a: usize, b: usize| {
        let expected_weight = thread_degrees[used_labels[a]] * column_degrees[used_labels[b]]
            + thread_degrees[used_labels[b]] * column_degrees[used_labels[a]];
        cross_weights[a * used_labels.len() + b] + cross_weights[b * used_labels.len() + a]
            - expected_weight / total_weight
    };
    merge_best_partners(labels, &used_labels, count, |a, b| {
        Some(merge_gain(a, b)).filter(|gain| *gain > 1e-9 * total_weight)
    })
}

/// The index of each label among the used ones.
fn positions_by_label(used_labels: &[usize], count: usize) -> Vec<usize> {
    let mut index_by_label = vec![0; count];
    used_labels
        .iter()
        .enumerate()
        .for_each(|(index, &label)| index_by_label[label] = index);
    index_by_label
}

/// Merges used labels that are each other's best partner. `gain` takes two indices into the used labels. Returns
/// whether any were merged.
fn merge_best_partners(
    labels: &mut Labels,
    used_labels: &[usize],
    count: usize,
    gain: impl Fn(usize, usize) -> Option<f64>,
) -> bool {
    let best_partner = |a: usize| {
        let gains = (0..used_labels.len())
            .filter(|&b| b != a)
            .filter_map(|b| Some((gain(a, b)?, b)));
        let best_merge = gains.reduce(|best, next| if next.0 > best.0 { next } else { best });
        best_merge.map(|(_, b)| b)
    };
    let partners: Vec<Option<usize>> = (0..used_labels.len()).map(best_partner).collect();
    let mut merge_targets: Vec<usize> = (0..count).collect();
    let mut has_merged = false;
    for (a, partner) in partners.iter().enumerate() {
        if let Some(b) = partner.filter(|&b| b > a && partners[b] == Some(a)) {
            merge_targets[used_labels[b]] = used_labels[a];
            has_merged = true;
        }
    }

    labels
        .threads
        .iter_mut()
        .chain(&mut labels.columns)
        .for_each(|label| *label = merge_targets[*label]);
    has_merged
}

/// Unites communities whose mean counters reach the similarity threshold that applies to two threads of a cluster.
///
/// Modularity splits a large group if only a few of its threads share each region, and the regions shared between the
/// parts would then count as global. Similarity is computed on the entries that are not global by the thesis's rule. In
/// addition, the two communities must share at least a third of the weight that the weaker one shares within itself.
fn unite_communities(graph: &Graph, labels: &mut Labels, threshold: u64) {
    for _ in 0..MAX_PASSES {
        if !unite_similar_pairs(graph, labels, threshold) {
            return;
        }
    }
}

fn unite_similar_pairs(graph: &Graph, labels: &mut Labels, threshold: u64) -> bool {
    let count = graph.label_count();
    let mut sizes = vec![0.0; count];
    graph
        .threads
        .nodes()
        .zip(&labels.threads)
        .filter(|(edges, _)| !edges.is_empty())
        .for_each(|(_, &label)| {
            sizes[label] += 1.0;
        });

    let used_labels: Vec<usize> = (0..count).filter(|&label| sizes[label] > 0.0).collect();
    let index_by_label = positions_by_label(&used_labels, count);
    let mut similarities = vec![0.0; used_labels.len() * used_labels.len()];
    let (mut sums, mut touched_labels) = (vec![0u64; count], Vec::new());
    for edges in graph
        .columns
        .nodes()
        .filter(|edges| 2 * edges.len() <= labels.threads.len())
    {
        for edge in edges {
            let label = labels.threads[edge.target as usize];
            if sums[label] == 0 {
                touched_labels.push(label);
            }
            sums[label] += u64::from(edge.weight);
        }
        let mean_counter = |label: usize| sums[label] as f64 / sizes[label];
        for &a in &touched_labels {
            touched_labels.iter().for_each(|&b| {
                similarities[index_by_label[a] * used_labels.len() + index_by_label[b]] +=
                    mean_counter(a) * mean_counter(b)
            });
        }
        touched_labels.drain(..).for_each(|label| sums[label] = 0);
    }

    let similarity_of = |a: usize, b: usize| similarities[a * used_labels.len() + b];
    let shared_fraction = |a: usize, b: usize| {
        let (similarity_across, similarity_within) = (
            similarity_of(a, b),
            similarity_of(a, a).min(similarity_of(b, b)),
        );
        (similarity_across >= threshold as f64
            && DOMINANCE * similarity_across >= similarity_within)
            .then(|| similarity_across / similarity_within)
    };
    merge_best_partners(labels, &used_labels, count, shared_fraction)
}

fn find_communities(graph: &Graph) -> Labels {
    let no_label = graph.columns.degrees.len();
    let mut labels = Labels {
        threads: vec![no_label; graph.threads.degrees.len()],
        columns: (0..no_label).collect(),
    };
    let total_weight: f64 = graph.threads.degrees.iter().sum();
    if total_weight <= 0.0 {
        return labels;
    }

    for (label, edges) in labels.threads.iter_mut().zip(graph.threads.nodes()) {
        let heavier_edge = |best: (usize, u32), edge: &Edge| match edge.weight > best.1 {
            true => (edge.target as usize, edge.weight),
            false => best,
        };
        *label = edges.iter().fold((no_label, 0), heavier_edge).0;
    }

    for _ in 0..MAX_ROUNDS {
        propagate(graph, &mut labels, total_weight);
        if !merge(graph, &mut labels, total_weight) {
            break;
        }
    }
    labels
}

/// For each column, whether it belongs to a single community, by raw counters.
fn exclusive_columns(
    threads: &[ThreadMap<'_>],
    matrix: &SharingMatrix,
    labels: &Labels,
) -> Vec<bool> {
    let mut sizes = vec![0usize; matrix.column_count + 1];
    let mut columns: Vec<Vec<usize>> = vec![Vec::new(); matrix.column_count + 1];
    labels
        .columns
        .iter()
        .enumerate()
        .filter(|(column, _)| matrix.column_sums[*column] > 0)
        .for_each(|(column, &label)| {
            columns[label].push(column);
        });

    let mut within_counts = vec![0u64; matrix.column_count];
    for (thread, &label) in threads.iter().zip(&labels.threads) {
        sizes[label] += 1;
        columns[label]
            .iter()
            .for_each(|&column| within_counts[column] += matrix.raw_count(thread, column));
    }
    let is_owned = |column: usize| {
        let size = sizes[labels.columns[column]];
        let (inside_threads, outside_threads) = (size as f64, (labels.threads.len() - size) as f64);
        let (inside_count, outside_count) = (
            within_counts[column] as f64,
            (matrix.column_sums[column] - within_counts[column]) as f64,
        );
        let minimum = if outside_threads > 0.0 {
            DOMINANCE * inside_threads * outside_count / outside_threads
        } else {
            0.0
        };
        inside_count > 0.0 && inside_count >= minimum + 2.0 * libm::sqrt(minimum)
    };
    (0..matrix.column_count).map(is_owned).collect()
}

pub(super) fn find_co_clusters(
    threads: &[ThreadMap<'_>],
    sharing: &SharingCriteria,
    threshold: u64,
) -> Clusters {
    let matrix = SharingMatrix::from_threads(threads, sharing.floor, threshold);
    let mut is_selected = vec![true; matrix.column_count];
    let (mut graph, mut labels) = (Graph::from_matrix(&matrix, &is_selected), None);
    for _ in 0..MAX_ROUNDS {
        let mut community_labels = find_communities(&graph);
        unite_communities(&graph, &mut community_labels, threshold.max(1));
        let owned_columns = exclusive_columns(threads, &matrix, &community_labels);
        let is_dropped =
            |column: &usize| !graph.columns.edges_of(*column).is_empty() && !owned_columns[*column];
        let dropped_columns: Vec<usize> = (0..matrix.column_count).filter(is_dropped).collect();
        labels = Some(community_labels);
        if dropped_columns.is_empty() {
            break;
        }

        dropped_columns
            .into_iter()
            .for_each(|column| is_selected[column] = false);
        graph = Graph::from_matrix(&matrix, &is_selected);
    }

    let is_global = (0..matrix.entry_count)
        .map(|entry| !is_selected[entry])
        .collect();
    let Some(labels) = labels else {
        return Clusters::from_labels(&vec![None; threads.len()], is_global);
    };
    let mut cluster_by_thread = cluster_members(&graph, &labels, matrix.entry_count, threshold);
    assign_silent_threads(threads, sharing.floor, &mut cluster_by_thread);
    Clusters::from_labels(&cluster_by_thread, is_global)
}

/// Assigns threads without any samples to the cluster of most of their former co-members, because threads on one chip
/// cause no remote accesses that could reveal their sharing (thesis 3.4.3 starts from the existing clusters).
fn assign_silent_threads(
    threads: &[ThreadMap<'_>],
    floor: u8,
    cluster_by_thread: &mut [Option<usize>],
) {
    let mut votes: BTreeMap<usize, BTreeMap<usize, usize>> = BTreeMap::new();
    for (thread, label) in threads.iter().zip(cluster_by_thread.iter()) {
        if let (Some(previous_cluster), Some(label)) = (thread.previous_cluster, *label) {
            *votes
                .entry(previous_cluster)
                .or_default()
                .entry(label)
                .or_insert(0) += 1;
        }
    }

    for (thread, label) in threads.iter().zip(cluster_by_thread) {
        let is_silent = label.is_none() && thread.counters.iter().all(|&counter| counter < floor);
        let previous_cluster = thread.previous_cluster.filter(|_| is_silent);
        let Some(votes) = previous_cluster.and_then(|previous| votes.get(&previous)) else {
            continue;
        };
        let max_votes = votes.values().copied().max();
        *label = votes
            .iter()
            .find(|(_, count)| Some(**count) == max_votes)
            .map(|(winning_label, _)| *winning_label);
    }
}

/// The cluster of each thread. A thread belongs to its community if it shares enough with the rest on the community's
/// own entries, or if it was in the same earlier cluster (columns from `first_cluster_column` on).
fn cluster_members(
    graph: &Graph,
    labels: &Labels,
    first_cluster_column: usize,
    threshold: u64,
) -> Vec<Option<usize>> {
    let mut sizes = vec![0.0; graph.label_count()];
    labels.threads.iter().for_each(|&label| sizes[label] += 1.0);
    let inner_weight = |column: usize| -> f64 {
        let column_edges = graph.columns.edges_of(column).iter();
        let inner_edges = column_edges
            .filter(|edge| labels.threads[edge.target as usize] == labels.columns[column]);
        inner_edges.map(|edge| f64::from(edge.weight)).sum()
    };
    let inner_weights: Vec<f64> = (0..labels.columns.len()).map(inner_weight).collect();

    let cluster_of_thread = |(edges, &label): (&[Edge], &usize)| {
        let inside_edges = || {
            edges
                .iter()
                .filter(|edge| labels.columns[edge.target as usize] == label)
        };
        let tie_weight = |edge: &Edge| {
            f64::from(edge.weight) * (inner_weights[edge.target as usize] - f64::from(edge.weight))
        };
        let is_similar_enough = inside_edges().map(tie_weight).sum::<f64>() / (sizes[label] - 1.0)
            >= (threshold as f64).max(1.0);
        (sizes[label] > 1.0
            && (is_similar_enough
                || inside_edges().any(|edge| edge.target as usize >= first_cluster_column)))
        .then_some(label)
    };

    graph
        .threads
        .nodes()
        .zip(&labels.threads)
        .map(cluster_of_thread)
        .collect()
}
