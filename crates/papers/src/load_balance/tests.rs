//! Compares the results with brute force, and with the bound in the module's documentation.

use proptest::prelude::*;

use super::exchanges::{max_distance, tournament_pairs};
use super::*;

fn equal_capacities(bin_count: usize, seats: usize) -> Vec<CacheCapacity> {
    vec![
        CacheCapacity {
            cpus: seats,
            package: 0
        };
        bin_count
    ]
}
fn newcomer_loads(weights: &[f64]) -> Vec<TaskLoad> {
    weights
        .iter()
        .map(|&weight| TaskLoad {
            weight,
            current_bin: None,
            is_unmovable: false,
        })
        .collect()
}
fn placed_loads(task_loads: &[TaskLoad], bins: &[usize]) -> Vec<TaskLoad> {
    task_loads
        .iter()
        .zip(bins)
        .map(|(task_load, &bin)| TaskLoad {
            current_bin: Some(bin),
            ..*task_load
        })
        .collect()
}
fn sums_by_bin(capacities: &[CacheCapacity], task_loads: &[TaskLoad], bins: &[usize]) -> Vec<f64> {
    BinLoads::from_bins(capacities, task_loads, bins).sums
}
fn counts_by_bin(capacities: &[CacheCapacity], bins: &[usize]) -> Vec<usize> {
    (0..capacities.len())
        .map(|bin| bins.iter().filter(|&&other| other == bin).count())
        .collect()
}

/// Runs rounds of exchanges until a whole tournament changes nothing.
fn exchanged_to_the_end(
    capacities: &[CacheCapacity],
    mut task_loads: Vec<TaskLoad>,
    worth_moving: f64,
) -> (Vec<usize>, u64) {
    let (mut bins, mut quiet, mut round) = (Vec::new(), 0, 0);
    while quiet < capacities.len().max(2) {
        let next = exchange(capacities, &task_loads, round, worth_moving);
        quiet = if next == bins { quiet + 1 } else { 0 };
        task_loads = placed_loads(&task_loads, &next);
        bins = next;
        round += 1;
        assert!(round < 10_000, "exchanges end");
    }
    (bins, round)
}

/// Are eight programs of one workload paired as worked out by hand, heaviest with lightest, with equal sums per socket?
#[test]
fn heaviest_are_paired_with_lightest_and_sockets_are_equal() {
    let capacities: Vec<CacheCapacity> = [0, 0, 1, 1]
        .map(|package| CacheCapacity { cpus: 2, package })
        .to_vec();
    let task_loads = newcomer_loads(&[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]);
    let bins = balance_centrally(&capacities, &task_loads, 0.0);
    assert_eq!(sums_by_bin(&capacities, &task_loads, &bins), vec![9.0; 4]);
    let uneven = newcomer_loads(&[20.0, 6.0, 5.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
    let bins = balance_centrally(&capacities, &uneven, 0.0);
    let totals = sums_by_bin(&capacities, &uneven, &bins);
    assert_eq!(totals[0].max(totals[1]).max(totals[2]).max(totals[3]), 20.0);
    let packages = package_sums(&capacities, &totals).unwrap();
    assert_eq!(
        packages[0].max(packages[1]),
        24.0,
        "the heaviest cache shares its bus with the lightest: {totals:?}"
    );
}

/// Does a heavy task get a cache to itself while CPUs are free, and does no task wait while they are?
#[test]
fn a_heavy_task_gets_a_cache_to_itself_while_cpus_are_free() {
    let capacities = equal_capacities(2, 4);
    let task_loads = newcomer_loads(&[100.0, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(
        counts_by_bin(
            &capacities,
            &balance_centrally(&capacities, &task_loads, 0.0)
        ),
        [1, 4]
    );
    let (bins, _) = exchanged_to_the_end(&capacities, task_loads, 0.0);
    assert!(
        counts_by_bin(&capacities, &bins) == [1, 4] || counts_by_bin(&capacities, &bins) == [4, 1]
    );
}

/// Do tasks stay for a small gain and move for a large one?
#[test]
fn small_gains_move_no_task() {
    let capacities = equal_capacities(2, 2);
    let bins_of = |weights: [f64; 4], worth| {
        let task_loads = placed_loads(&newcomer_loads(&weights), &[0, 0, 1, 1]);
        balance_centrally(&capacities, &task_loads, worth)
    };
    assert_eq!(bins_of([5.0, 5.1, 5.0, 5.2], 0.05), [0, 0, 1, 1]);
    let split = bins_of([9.0, 9.0, 1.0, 1.0], 0.05);
    assert_eq!(
        split
            .iter()
            .zip([0, 0, 1, 1])
            .filter(|(a, b)| **a != *b)
            .count(),
        2,
        "{split:?}"
    );
}

/// Does a task that cannot move stay, with the others arranged around it?
#[test]
fn tasks_that_cannot_move_stay() {
    let capacities = equal_capacities(2, 2);
    let mut task_loads = newcomer_loads(&[9.0, 8.0, 1.0, 0.5]);
    task_loads[0] = TaskLoad {
        weight: 9.0,
        current_bin: Some(1),
        is_unmovable: true,
    };
    let bins = balance_centrally(&capacities, &task_loads, 0.0);
    assert_eq!((bins[0], bins[1]), (1, 0));
    let (bins, _) = exchanged_to_the_end(&capacities, task_loads, 0.0);
    assert_eq!((bins[0], bins[1]), (1, 0));
}

/// Does each bin meet each other bin once?
#[test]
fn each_bin_meets_each_other_bin_once() {
    for bin_count in 0..12usize {
        let rounds = if bin_count % 2 == 0 {
            bin_count.max(1) - 1
        } else {
            bin_count
        };
        let mut met: Vec<(usize, usize)> = (0..rounds as u64)
            .flat_map(|round| tournament_pairs(bin_count, round))
            .collect();
        met.sort_unstable();
        let every: Vec<(usize, usize)> = (0..bin_count)
            .flat_map(|a| (a + 1..bin_count).map(move |b| (a, b)))
            .collect();
        assert_eq!(met, every, "{bin_count}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Do exchanges without a central sort end within the stated bound, from any start?
    #[test]
    fn exchanges_end_within_the_bound(
        weights in prop::collection::vec(0.0f64..50.0, 24),
        shape in 0usize..5,
        worth_moving in 0.0f64..0.2,
        start in any::<u64>(),
    ) {
        let (count, seats) = [(2, 12), (3, 8), (4, 6), (6, 4), (12, 2)][shape];
        let capacities = equal_capacities(count, seats);
        let task_loads = newcomer_loads(&weights);
        let mut places_of: Vec<usize> = (0..24).map(|nth| nth % count).collect();
        cachemate_core::SplitMix64::new(start).shuffle(&mut places_of);
        let (bins, _) = exchanged_to_the_end(&capacities, placed_loads(&task_loads, &places_of), worth_moving);
        prop_assert_eq!(counts_by_bin(&capacities, &bins), vec![seats; count]);
        let totals = sums_by_bin(&capacities, &task_loads, &bins);
        for a in 0..count {
            for b in 0..count {
                let bound = max_distance(&task_loads, seats, 0.5 * (totals[a] + totals[b]), worth_moving);
                prop_assert!(totals[a] - totals[b] <= bound + 1e-9, "{:?} {bound}", totals);
            }
        }

        let largest_sum = |sums: &[f64]| sums.iter().copied().fold(0.0, f64::max);
        let sorted = sums_by_bin(&capacities, &task_loads, &balance_centrally(&capacities, &task_loads, 0.0));
        let bound = max_distance(&task_loads, seats, largest_sum(&totals), worth_moving);
        prop_assert!(largest_sum(&totals) <= largest_sum(&sorted) + bound + 1e-9);
    }

    /// Are loads per CPU even in both forms, whatever the number of tasks, the bins and the initial assignment?
    #[test]
    fn loads_per_cpu_are_even_in_both_forms(
        weights in prop::collection::vec(0.0f64..50.0, 1..20),
        seats in prop::collection::vec(1usize..5, 1..5),
        start in any::<u64>(),
    ) {
        let capacities: Vec<CacheCapacity> =
            seats.iter().enumerate().map(|(index, &seats)| CacheCapacity { cpus: seats, package: index as u32 / 2 }).collect();
        let mut generator = cachemate_core::SplitMix64::new(start);
        let mut task_loads = newcomer_loads(&weights);
        for task_load in &mut task_loads {
            task_load.current_bin = (generator.draw_below(2) == 0).then(|| generator.draw_below(capacities.len() as u64) as usize);
        }
        let quota = TaskQuota::for_tasks(&capacities, task_loads.len());
        for index in [balance_centrally(&capacities, &task_loads, 0.05), exchanged_to_the_end(&capacities, task_loads.clone(), 0.05).0] {
            let counts = counts_by_bin(&capacities, &index);
            prop_assert!(quota.is_within_quota(&capacities, &counts), "{counts:?} on {capacities:?}");
        }
    }

    /// For bins of two tasks, does the sorted assignment have the smallest maximum sum, as by enumeration?
    #[test]
    fn the_sorted_assignment_of_pairs_has_the_smallest_maximum(weights in prop::collection::vec(0.0f64..50.0, 6)) {
        let capacities = equal_capacities(3, 2);
        let task_loads = newcomer_loads(&weights);
        let greatest = |bins: &[usize]| sums_by_bin(&capacities, &task_loads, bins).into_iter().fold(0.0, f64::max);
        let mut minimum = f64::INFINITY;
        for code in 0..729u32 {
            let bins: Vec<usize> = (0..6).map(|nth| (code / 3u32.pow(nth) % 3) as usize).collect();
            if counts_by_bin(&capacities, &bins) == [2, 2, 2] {
                minimum = minimum.min(greatest(&bins));
            }
        }
        prop_assert!(greatest(&balance_centrally(&capacities, &task_loads, 0.0)) <= minimum + 1e-9);
    }

    /// For bins of two tasks, does a higher priority never bring heavier co-runners?
    #[test]
    fn a_higher_priority_brings_quieter_co_runners(
        weights in prop::collection::vec(0.0f64..50.0, 8),
        chosen in 0usize..8,
        extra in 0.0f64..500.0,
    ) {
        let capacities = equal_capacities(4, 2);
        let neighbor = |task_loads: &[TaskLoad]| {
            let bins = balance_centrally(&capacities, task_loads, 0.0);
            (0..8).find(|&task| task != chosen && bins[task] == bins[chosen]).map_or(0.0, |task| weights[task])
        };
        let plain = newcomer_loads(&weights);
        let mut raised = plain.clone();
        raised[chosen].weight += extra;
        prop_assert!(neighbor(&raised) <= neighbor(&plain) + 1e-9);
    }
}
