//! Threads and regions grouped together (bipartite modularity: Barber, Phys. Rev. E 76, 2007; label propagation with
//! merging: Liu and Murata, 2010).
//!
//! Problem: the thesis's scan trusts one thread to stand for its cluster, and calls data global by a head count. Both
//! fail where sharing is uneven: VolanoMark's two rooms came out as five clusters, and a cluster of more than half of the
//! threads is invisible. Why this method: it needs no number of clusters, its cost is that of reading the counters a few
//! times (not of comparing all pairs), and a thread is compared with what its whole cluster touches.
//!
//! Method: threads and entries are the two sides of a graph weighted with the counters. Every entry starts as a community;
//! threads, then entries, join the community that they touch more than chance would have it (weight - degree x degree of
//! the community / all weight), until nobody moves; communities that raise modularity together are merged; again from
//! there. Then an entry is *owned* by a community if its threads touch it at least three times as much each as the others
//! do, and two standard deviations beyond that, so that noise owns nothing. Other entries are global: they are dropped and
//! the whole is repeated without them. A thread belongs to its community if its counters and the mean of the other members'
//! reach the similarity threshold on the owned entries.
//!
//! Properties: no seed; ties fall to the community a node is in, then to the lower label; a few passes over the non-zero
//! counters.

use std::collections::BTreeMap;

use cachemate_locality::shmap::Sharing;

use super::{Clusters, ThreadMap, Weights};

/// Members touch an owned entry so many times as much as the others.
const DOMINANCE: f64 = 3.0;
/// Passes of label propagation, rounds of merging, and rounds of dropping global entries. Each settles in a few.
const PASSES_AT_MOST: usize = 50;
const ROUNDS_AT_MOST: usize = 12;

/// The two sides and their edges: per node its neighbours with weights.
struct Graph {
    threads: Vec<Vec<(usize, f64)>>,
    columns: Vec<Vec<(usize, f64)>>,
}

impl Graph {
    /// Columns that one thread touches, or none, say nothing of sharing.
    fn of(weights: &Weights, threads: usize, kept: &[bool]) -> Self {
        let mut columns: Vec<Vec<(usize, f64)>> = vec![Vec::new(); weights.columns];
        for thread in 0..threads {
            for (column, &weight) in weights.row(thread).iter().enumerate() {
                if weight > 0 && kept[column] {
                    columns[column].push((thread, f64::from(weight)));
                }
            }
        }
        let mut edges: Vec<Vec<(usize, f64)>> = vec![Vec::new(); threads];
        for (column, touching) in columns.iter_mut().enumerate() {
            if touching.len() < 2 {
                touching.clear();
            }
            touching.iter().for_each(|&(thread, weight)| edges[thread].push((column, weight)));
        }
        Graph { threads: edges, columns }
    }

    /// One for each column, and the last for threads that touch nothing.
    fn labels(&self) -> usize {
        self.columns.len() + 1
    }
}

fn degrees(side: &[Vec<(usize, f64)>]) -> Vec<f64> {
    side.iter().map(|edges| edges.iter().map(|(_, weight)| weight).sum()).collect()
}

/// Sum of the nodes' degrees by label.
fn by_label(labels: &[usize], degrees: &[f64], count: usize) -> Vec<f64> {
    let mut sums = vec![0.0; count];
    labels.iter().zip(degrees).for_each(|(&label, degree)| sums[label] += degree);
    sums
}

/// Labels of both sides.
#[derive(Clone, PartialEq)]
struct Labels {
    threads: Vec<usize>,
    columns: Vec<usize>,
}

/// Every node of one side to the community of the other side that it is tied to most, beyond chance. True if any moved.
fn join(own: &mut [usize], edges: &[Vec<(usize, f64)>], other: &[usize], expected: &[f64], all: f64) -> bool {
    let mut tied = vec![0.0; expected.len()];
    let mut seen: Vec<usize> = Vec::new();
    let mut moved = false;
    for (label, edges) in own.iter_mut().zip(edges) {
        let degree: f64 = edges.iter().map(|(_, weight)| weight).sum();
        for &(node, weight) in edges {
            if tied[other[node]] == 0.0 {
                seen.push(other[node]);
            }
            tied[other[node]] += weight;
        }
        seen.sort_unstable();
        let score = |label: usize| tied[label] - degree * expected[label] / all;
        let mut best = *label;
        for &candidate in &seen {
            if score(candidate) > score(best) + 1e-9 * degree {
                best = candidate;
            }
        }
        moved |= best != *label;
        *label = best;
        seen.drain(..).for_each(|label| tied[label] = 0.0);
    }
    moved
}

fn propagate(graph: &Graph, labels: &mut Labels, all: f64) {
    let (of_threads, of_columns) = (degrees(&graph.threads), degrees(&graph.columns));
    let count = graph.labels();
    for _ in 0..PASSES_AT_MOST {
        let expected = by_label(&labels.columns, &of_columns, count);
        let threads_moved = join(&mut labels.threads, &graph.threads, &labels.columns, &expected, all);
        let expected = by_label(&labels.threads, &of_threads, count);
        let columns_moved = join(&mut labels.columns, &graph.columns, &labels.threads, &expected, all);
        if !threads_moved && !columns_moved {
            return;
        }
    }
}

/// Merges communities that are each other's best partner and raise modularity together. True if any were merged.
fn merge(graph: &Graph, labels: &mut Labels, all: f64) -> bool {
    let count = graph.labels();
    let of_threads = by_label(&labels.threads, &degrees(&graph.threads), count);
    let of_columns = by_label(&labels.columns, &degrees(&graph.columns), count);
    let used: Vec<usize> = (0..count).filter(|&label| of_threads[label] > 0.0 || of_columns[label] > 0.0).collect();
    let mut place = vec![0; count];
    used.iter().enumerate().for_each(|(at, &label)| place[label] = at);
    let mut across = vec![0.0; used.len() * used.len()];
    for (thread, edges) in graph.threads.iter().enumerate() {
        let from = place[labels.threads[thread]] * used.len();
        edges.iter().for_each(|&(column, weight)| across[from + place[labels.columns[column]]] += weight);
    }
    let gain = |a: usize, b: usize| {
        let expected = of_threads[used[a]] * of_columns[used[b]] + of_threads[used[b]] * of_columns[used[a]];
        across[a * used.len() + b] + across[b * used.len() + a] - expected / all
    };
    let partner = |a: usize| {
        let gains = (0..used.len()).filter(|&b| b != a).map(|b| (gain(a, b), b));
        gains.fold(None, |best: Option<(f64, usize)>, (gain, b)| match best {
            Some((most, _)) if most >= gain => best,
            _ => (gain > 1e-9 * all).then_some((gain, b)).or(best),
        })
    };
    let partners: Vec<Option<usize>> = (0..used.len()).map(|a| partner(a).map(|(_, b)| b)).collect();
    let mut into: Vec<usize> = (0..count).collect();
    let mut merged = false;
    for (a, partner) in partners.iter().enumerate() {
        if let Some(b) = partner.filter(|&b| b > a && partners[b] == Some(a)) {
            into[used[b]] = used[a];
            merged = true;
        }
    }
    labels.threads.iter_mut().chain(&mut labels.columns).for_each(|label| *label = into[*label]);
    merged
}

fn communities(graph: &Graph) -> Labels {
    let columns: Vec<usize> = (0..graph.columns.len()).collect();
    let nobody = graph.columns.len();
    let mut labels = Labels { threads: vec![nobody; graph.threads.len()], columns };
    let all: f64 = degrees(&graph.threads).iter().sum();
    if all <= 0.0 {
        return labels;
    }
    for (label, edges) in labels.threads.iter_mut().zip(&graph.threads) {
        let heaviest =
            edges.iter().fold((nobody, 0.0), |best, &(column, w)| if w > best.1 { (column, w) } else { best });
        *label = heaviest.0;
    }
    for _ in 0..ROUNDS_AT_MOST {
        propagate(graph, &mut labels, all);
        if !merge(graph, &mut labels, all) {
            break;
        }
    }
    labels
}

/// Raw counters, noise included: an entry of the shMap, or a column of an earlier cluster behind them.
fn raw(threads: &[ThreadMap<'_>], weights: &Weights, thread: usize, column: usize) -> u64 {
    let counter = threads[thread].counters.get(column).map(|&counter| u64::from(counter));
    counter.unwrap_or_else(|| weights.row(thread)[column] as u64)
}

/// Their sums by column, read thread by thread: a column lies in as many places as there are threads.
fn sums(threads: &[ThreadMap<'_>], weights: &Weights) -> Vec<u64> {
    let mut sums = vec![0u64; weights.columns];
    for (at, thread) in threads.iter().enumerate() {
        sums.iter_mut().zip(thread.counters).for_each(|(sum, &counter)| *sum += u64::from(counter));
        let behind = thread.counters.len().min(weights.columns);
        let row = &weights.row(at)[behind..];
        sums[behind..].iter_mut().zip(row).for_each(|(sum, &weight)| *sum += weight as u64);
    }
    sums
}

/// Which columns are their community's own, by raw counters.
fn owned(threads: &[ThreadMap<'_>], weights: &Weights, labels: &Labels, all: &[u64]) -> Vec<bool> {
    let mut sizes = vec![0usize; weights.columns + 1];
    let mut columns: Vec<Vec<usize>> = vec![Vec::new(); weights.columns + 1];
    labels.columns.iter().enumerate().for_each(|(column, &label)| columns[label].push(column));
    let mut within = vec![0u64; weights.columns];
    for (thread, &label) in labels.threads.iter().enumerate() {
        sizes[label] += 1;
        columns[label].iter().for_each(|&column| within[column] += raw(threads, weights, thread, column));
    }
    let owns = |column: usize| {
        let size = sizes[labels.columns[column]];
        let (inside, outside) = (size as f64, (labels.threads.len() - size) as f64);
        let (within, without) = (within[column] as f64, (all[column] - within[column]) as f64);
        let least = if outside > 0.0 { DOMINANCE * inside * without / outside } else { 0.0 };
        within > 0.0 && within >= least + 2.0 * libm::sqrt(least)
    };
    (0..weights.columns).map(owns).collect()
}

pub(super) fn find(threads: &[ThreadMap<'_>], sharing: &Sharing, threshold: u64) -> Clusters {
    let weights = Weights::of(threads, sharing.floor, threshold);
    let mut kept = vec![true; weights.columns];
    let all = sums(threads, &weights);
    let (mut graph, mut labels) = (Graph::of(&weights, threads.len(), &kept), None);
    for _ in 0..ROUNDS_AT_MOST {
        let found = communities(&graph);
        let own = owned(threads, &weights, &found, &all);
        let dropped: Vec<usize> =
            (0..weights.columns).filter(|&column| !graph.columns[column].is_empty() && !own[column]).collect();
        labels = Some(found);
        if dropped.is_empty() {
            break;
        }
        dropped.into_iter().for_each(|column| kept[column] = false);
        graph = Graph::of(&weights, threads.len(), &kept);
    }
    let global = (0..weights.entries).map(|entry| !kept[entry]).collect();
    let Some(labels) = labels else { return Clusters::of_labels(&vec![None; threads.len()], global) };
    let mut found = members(&graph, &labels, weights.entries, threshold);
    keep_traceless(threads, sharing.floor, &mut found);
    Clusters::of_labels(&found, global)
}

/// Threads on one chip leave no trace of what they share: one that left none at all stays with most of those it was with
/// (thesis 3.4.3 starts from the clusters there are).
fn keep_traceless(threads: &[ThreadMap<'_>], floor: u8, found: &mut [Option<usize>]) {
    let mut votes: BTreeMap<usize, BTreeMap<usize, usize>> = BTreeMap::new();
    for (thread, label) in threads.iter().zip(found.iter()) {
        if let (Some(before), Some(label)) = (thread.together, *label) {
            *votes.entry(before).or_default().entry(label).or_insert(0) += 1;
        }
    }
    for (thread, label) in threads.iter().zip(found) {
        let traceless = label.is_none() && thread.counters.iter().all(|&counter| counter < floor);
        let before = thread.together.filter(|_| traceless);
        let Some(votes) = before.and_then(|before| votes.get(&before)) else { continue };
        let most = votes.values().copied().max();
        *label = votes.iter().find(|(_, count)| Some(**count) == most).map(|(settled, _)| *settled);
    }
}

/// Threads that share enough with the rest of their community, on its own entries, or were with it before (columns from
/// `earlier` on).
fn members(graph: &Graph, labels: &Labels, earlier: usize, threshold: u64) -> Vec<Option<usize>> {
    let mut sizes = vec![0.0; graph.labels()];
    labels.threads.iter().for_each(|&label| sizes[label] += 1.0);
    let within = |column: usize| -> f64 {
        let own = labels.columns[column];
        graph.columns[column].iter().filter(|(thread, _)| labels.threads[*thread] == own).map(|(_, w)| w).sum()
    };
    let sums: Vec<f64> = (0..graph.columns.len()).map(within).collect();
    let member = |(edges, &label): (&Vec<(usize, f64)>, &usize)| {
        let own = || edges.iter().filter(|(column, _)| labels.columns[*column] == label);
        let similar: f64 = own().map(|&(column, w)| w * (sums[column] - w)).sum();
        let shares = similar / (sizes[label] - 1.0) >= (threshold as f64).max(1.0);
        (sizes[label] > 1.0 && (shares || own().any(|&(column, _)| column >= earlier))).then_some(label)
    };
    graph.threads.iter().zip(&labels.threads).map(member).collect()
}
