//! Assigns clusters to chips (thesis 3.4.4), for any number of chips.
//!
//! Problem: the threads of a cluster should be on one chip, while all chips stay equally busy. Method: clusters are
//! placed from the largest to the smallest, each on the chip with the fewest threads per CPU. A tie goes to the chip
//! that already has most of the cluster's threads, so that good placements stay. If the remaining threads could not
//! bring the other chips to within the limit of the chosen chip, the cluster is *neutralized*. It is spread over as few
//! chips as preserve the balance, least loaded first (on two chips, over both, as in the thesis). Unclustered threads
//! come last and even out differences. Threads that cannot be moved count toward the load of their chips, and attract
//! their cluster if the balance allows it.
//!
//! Properties: the function is pure and deterministic; the result is not necessarily optimal.

/// A chip: the CPUs that share one last-level cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chip {
    /// Number of CPUs on which threads can be placed.
    pub cpu_count: u32,
    /// Number of threads that cannot leave the chip.
    pub fixed_threads: usize,
}

/// A thread to place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ThreadToPlace {
    /// Present chip of the thread, if any.
    pub chip: Option<usize>,
    /// Whether the thread cannot be moved; its chip's `fixed_threads` then includes it.
    pub is_fixed: bool,
}

/// The chosen chips of threads and of clusters.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Assignment {
    /// Chip of each thread; `None` only if there are no chips.
    pub chip_by_thread: Vec<Option<usize>>,
    /// Chip of each cluster; `None` if the cluster is neutralized.
    pub chip_of_cluster: Vec<Option<usize>>,
}

struct ChipLoads<'a> {
    chips: &'a [Chip],
    thread_counts: Vec<usize>,
}

impl ChipLoads<'_> {
    fn load_per_cpu(&self, chip: usize, added_threads: usize) -> f64 {
        (self.thread_counts[chip] + added_threads) as f64
            / f64::from(self.chips[chip].cpu_count.max(1))
    }

    /// The chips, least loaded first. Ties go to the chip with the larger value of `preference_of`, then to the earlier
    /// one.
    fn rank_chips(&self, preference_of: impl Fn(usize) -> usize) -> Vec<usize> {
        let mut ranked_chips: Vec<usize> = (0..self.chips.len()).collect();
        ranked_chips.sort_by(|&a, &b| {
            self.load_per_cpu(a, 0)
                .total_cmp(&self.load_per_cpu(b, 0))
                .then(preference_of(b).cmp(&preference_of(a)))
                .then(a.cmp(&b))
        });
        ranked_chips
    }

    /// The highest minimum load per CPU that the remaining threads can produce on the chips outside `excluded_chips`.
    fn achievable_min_load(&self, excluded_chips: &[usize], remaining_threads: usize) -> f64 {
        let mut open_chips: Vec<usize> = (0..self.chips.len())
            .filter(|chip| !excluded_chips.contains(chip))
            .collect();
        open_chips.sort_by(|&a, &b| self.load_per_cpu(a, 0).total_cmp(&self.load_per_cpu(b, 0)));
        let (mut threads, mut cpus) = (remaining_threads as f64, 0.0);
        for (index, &chip) in open_chips.iter().enumerate() {
            threads += self.thread_counts[chip] as f64;
            cpus += f64::from(self.chips[chip].cpu_count.max(1));
            let load_per_cpu = threads / cpus;
            if open_chips
                .get(index + 1)
                .is_none_or(|&next| load_per_cpu <= self.load_per_cpu(next, 0))
            {
                return load_per_cpu;
            }
        }
        f64::INFINITY
    }

    /// Whether the remaining threads can balance `size` more threads that are spread evenly over `target_chips`. A
    /// difference of one thread always counts as balanced.
    fn is_balanced(
        &self,
        target_chips: &[usize],
        size: usize,
        remaining_threads: usize,
        limit: f64,
    ) -> bool {
        let threads_per_chip = size.div_ceil(target_chips.len().max(1));
        let max_load = target_chips
            .iter()
            .map(|&chip| self.load_per_cpu(chip, threads_per_chip))
            .fold(0.0, f64::max);
        let load_gap = max_load - self.achievable_min_load(target_chips, remaining_threads);
        let load_per_thread = target_chips
            .iter()
            .map(|&chip| 1.0 / f64::from(self.chips[chip].cpu_count.max(1)))
            .fold(0.0, f64::max);
        load_gap <= limit * max_load + 1e-9 || load_gap <= load_per_thread + 1e-9
    }
}

/// Places clusters and unclustered threads (both lists of indices into `threads`) on the chips. `max_imbalance` is the
/// maximum difference between chips, as a fraction of the fuller one (0.25 in the thesis).
pub fn assign(
    threads: &[ThreadToPlace],
    clusters: &[Vec<usize>],
    unclustered_threads: &[usize],
    chips: &[Chip],
    max_imbalance: f64,
) -> Assignment {
    let mut assignment = Assignment {
        chip_by_thread: vec![None; threads.len()],
        chip_of_cluster: vec![None; clusters.len()],
    };
    if chips.is_empty() {
        return assignment;
    }

    let movable_members = |members: &[usize]| -> Vec<usize> {
        members
            .iter()
            .copied()
            .filter(|&thread| !threads[thread].is_fixed)
            .collect()
    };

    let mut loads = ChipLoads {
        chips,
        thread_counts: chips.iter().map(|chip| chip.fixed_threads).collect(),
    };
    let mut remaining_threads: usize = clusters
        .iter()
        .map(|members| movable_members(members).len())
        .sum::<usize>()
        + unclustered_threads.len();

    let mut ordered_clusters: Vec<usize> = (0..clusters.len()).collect();
    ordered_clusters.sort_by_key(|&cluster| std::cmp::Reverse(clusters[cluster].len()));
    for cluster in ordered_clusters {
        let movable_threads = movable_members(&clusters[cluster]);
        remaining_threads -= movable_threads.len();
        let target_chips = choose_chips(
            &clusters[cluster],
            threads,
            &loads,
            movable_threads.len(),
            remaining_threads,
            max_imbalance,
        );
        assignment.chip_of_cluster[cluster] = (target_chips.len() == 1).then_some(target_chips[0]);
        place_on_least_loaded(
            &movable_threads,
            &target_chips,
            threads,
            &mut loads,
            &mut assignment.chip_by_thread,
        );
    }
    let all_chips: Vec<usize> = (0..chips.len()).collect();
    place_on_least_loaded(
        &movable_members(unclustered_threads),
        &all_chips,
        threads,
        &mut loads,
        &mut assignment.chip_by_thread,
    );
    threads
        .iter()
        .zip(&mut assignment.chip_by_thread)
        .filter(|(thread, _)| thread.is_fixed)
        .for_each(|(t, chip)| *chip = t.chip);
    assignment
}

/// The chips of a cluster: the first single chip that keeps the balance, or else as few chips as possible.
fn choose_chips(
    members: &[usize],
    threads: &[ThreadToPlace],
    loads: &ChipLoads<'_>,
    size: usize,
    remaining_threads: usize,
    limit: f64,
) -> Vec<usize> {
    let count_members = |chip: usize, requires_fixed: bool| {
        members
            .iter()
            .filter(|&&thread| {
                threads[thread].chip == Some(chip) && threads[thread].is_fixed >= requires_fixed
            })
            .count()
    };
    let order = loads.rank_chips(|chip| count_members(chip, false));
    let preferred_fixed_chip = (0..loads.chips.len())
        .filter(|&chip| count_members(chip, true) > 0)
        .max_by_key(|&chip| count_members(chip, true));
    if let Some(chip) = preferred_fixed_chip
        .filter(|&chip| loads.is_balanced(&[chip], size, remaining_threads, limit))
    {
        return vec![chip];
    }

    let is_acceptable = |&chips: &usize| {
        chips == order.len() || loads.is_balanced(&order[..chips], size, remaining_threads, limit)
    };
    let chip_count = (1..=order.len()).find(is_acceptable).unwrap_or(order.len());
    order[..chip_count].to_vec()
}

/// Adds threads one by one to the least loaded chip of `target_chips`, starting with the threads that are already
/// there.
fn place_on_least_loaded(
    members: &[usize],
    target_chips: &[usize],
    threads: &[ThreadToPlace],
    loads: &mut ChipLoads<'_>,
    chip_by_thread: &mut [Option<usize>],
) {
    for &thread in members {
        let order = loads.rank_chips(|chip| usize::from(threads[thread].chip == Some(chip)));
        if let Some(&chip) = order.iter().find(|chip| target_chips.contains(chip)) {
            loads.thread_counts[chip] += 1;
            chip_by_thread[thread] = Some(chip);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: f64 = 0.25;

    fn sample_chips(count: usize) -> Vec<Chip> {
        vec![
            Chip {
                cpu_count: 4,
                fixed_threads: 0
            };
            count
        ]
    }

    /// Assigns clusters of these sizes and this many unclustered threads, none of which has been placed yet.
    fn assign_sizes(sizes: &[usize], unclustered: usize, chips: &[Chip]) -> Assignment {
        let mut first = 0;
        let next = |size: &usize| {
            first += size;
            (first - size..first).collect()
        };
        let clusters: Vec<Vec<usize>> = sizes.iter().map(next).collect();
        let thread_count = sizes.iter().sum::<usize>() + unclustered;
        let unclustered_threads: Vec<usize> = (thread_count - unclustered..thread_count).collect();
        assign(
            &vec![ThreadToPlace::default(); thread_count],
            &clusters,
            &unclustered_threads,
            chips,
            LIMIT,
        )
    }

    fn loads_by_chip(assignment: &Assignment, chips: usize) -> Vec<usize> {
        (0..chips)
            .map(|chip| {
                assignment
                    .chip_by_thread
                    .iter()
                    .filter(|placed_on| **placed_on == Some(chip))
                    .count()
            })
            .collect()
    }

    /// Does every cluster get a chip of its own if that is balanced: two, four on two chips, eight on eight?
    #[test]
    fn each_cluster_gets_a_chip_of_its_own_if_that_is_balanced() {
        for (sizes, count) in [
            (vec![8, 8], 2),
            (vec![4; 4], 2),
            (vec![4; 8], 8),
            (vec![16, 16], 2),
        ] {
            let assignment = assign_sizes(&sizes, 0, &sample_chips(count));
            assert!(
                assignment.chip_of_cluster.iter().all(Option::is_some),
                "{sizes:?}"
            );
            let loads = loads_by_chip(&assignment, count);
            assert!(loads.iter().all(|&load| load == loads[0]), "{loads:?}");
        }
    }

    /// Is the thesis's example, 100 threads against 10, neutralized, with an even result?
    #[test]
    fn a_cluster_that_unbalances_two_chips_is_neutralized() {
        let assignment = assign_sizes(&[100], 10, &sample_chips(2));
        assert_eq!(assignment.chip_of_cluster, [None]);
        assert_eq!(loads_by_chip(&assignment, 2), [55, 55]);
    }

    /// Is a cluster that is too large for one of eight chips spread over as few chips as preserve the balance?
    #[test]
    fn a_large_cluster_is_spread_over_few_of_many_chips() {
        let assignment = assign_sizes(&[16, 16], 0, &sample_chips(8));
        assert_eq!(loads_by_chip(&assignment, 8), [4; 8]);
        let of_first: Vec<usize> = (0..16)
            .filter_map(|thread| assignment.chip_by_thread[thread])
            .collect();
        let used_chips = (0..8).filter(|chip| of_first.contains(chip)).count();
        assert_eq!(used_chips, 4);
    }

    /// Do threads that cannot be moved attract their cluster?
    #[test]
    fn fixed_threads_attract_their_cluster() {
        let fixed = ThreadToPlace {
            chip: Some(1),
            is_fixed: true,
        };
        let threads = [vec![fixed], vec![ThreadToPlace::default(); 7]].concat();
        let clusters = [vec![0, 1, 2, 3], vec![4, 5, 6, 7]];
        let chips = [
            Chip {
                cpu_count: 4,
                fixed_threads: 0,
            },
            Chip {
                cpu_count: 4,
                fixed_threads: 1,
            },
        ];
        let assignment = assign(&threads, &clusters, &[], &chips, LIMIT);
        assert_eq!(assignment.chip_of_cluster, [Some(1), Some(0)]);
    }

    /// Does a balanced assignment stay the same when it is computed again?
    #[test]
    fn a_balanced_assignment_stays() {
        let threads: Vec<ThreadToPlace> = (0..16)
            .map(|t| ThreadToPlace {
                chip: Some(1 - t / 4 % 2),
                is_fixed: false,
            })
            .collect();
        let clusters: Vec<Vec<usize>> = (0..4).map(|c| (c * 4..c * 4 + 4).collect()).collect();
        let assignment = assign(&threads, &clusters, &[], &sample_chips(2), LIMIT);
        assert!(
            threads
                .iter()
                .zip(&assignment.chip_by_thread)
                .all(|(thread, chip)| thread.chip == *chip),
            "{assignment:?}"
        );
    }

    proptest! {
        /// Are all threads placed, and does no chip exceed the limit if unclustered threads could even it out?
        #[test]
        fn all_threads_are_placed_and_chips_are_balanced(
            sizes in prop::collection::vec(2usize..20, 0..8),
            unclustered in 0usize..30,
            count in 1usize..9,
        ) {
            let assignment = assign_sizes(&sizes, unclustered, &sample_chips(count));
            prop_assert!(assignment.chip_by_thread.iter().all(Option::is_some));
            let loads = loads_by_chip(&assignment, count);
            let (max_load, min_load) = (loads.iter().max().unwrap(), loads.iter().min().unwrap());
            // Later clusters count as if their threads could be placed one by one, so the error is at most the size of
            // the largest cluster.
            let largest = sizes.iter().max().copied().unwrap_or(1);
            prop_assert!((max_load - min_load) as f64 <= LIMIT * *max_load as f64 + largest as f64, "{:?}", loads);
        }
    }
}
