//! The centralized form, which sorts all tasks in one list and places them from the heaviest down.

use super::{BinLoads, CacheCapacity, TaskLoad, TaskQuota, package_sums, unevenness};

/// A bin for every task, in their order; empty without bins.
///
/// Tasks keep their bins, and new tasks go to the lightest bins with a free CPU. All are placed anew only if that
/// lowers the [`unevenness`] by more than `min_gain`, or if some CPU would otherwise have two tasks more than another.
pub fn balance_centrally(
    capacities: &[CacheCapacity],
    task_loads: &[TaskLoad],
    min_gain: f64,
) -> Vec<usize> {
    if capacities.is_empty() {
        return Vec::new();
    }

    let balanced_bins = match_bins(
        capacities,
        task_loads,
        &place_heaviest_first(capacities, task_loads, |task_load| task_load.is_unmovable),
    );
    let current_bins = place_heaviest_first(capacities, task_loads, |task_load| {
        task_load.current_bin.is_some()
    });

    let quota = TaskQuota::for_tasks(capacities, task_loads.len());
    let is_balanced = quota.is_within_quota(
        capacities,
        &BinLoads::from_bins(capacities, task_loads, &current_bins).counts,
    );
    let improvement = unevenness(capacities, task_loads, &current_bins)
        - unevenness(capacities, task_loads, &balanced_bins);

    if is_balanced && improvement <= min_gain {
        current_bins
    } else {
        balanced_bins
    }
}

/// Places the tasks that keep their bin first. The others follow, heaviest first, each on the lightest bin with room.
fn place_heaviest_first(
    capacities: &[CacheCapacity],
    task_loads: &[TaskLoad],
    keeps_bin: impl Fn(&TaskLoad) -> bool,
) -> Vec<usize> {
    let quota = TaskQuota::for_tasks(capacities, task_loads.len());
    let mut loads = BinLoads::without_tasks(capacities);
    let mut bins = vec![None; task_loads.len()];
    for (bin, task_load) in bins.iter_mut().zip(task_loads) {
        if let Some(current_bin) = task_load.current_bin
            && keeps_bin(task_load)
        {
            loads.add(current_bin, task_load.weight);
            *bin = Some(current_bin);
        }
    }

    let mut ordered_tasks: Vec<usize> = (0..task_loads.len())
        .filter(|&task_index| bins[task_index].is_none())
        .collect();
    ordered_tasks.sort_by(|&a, &b| task_loads[b].weight.total_cmp(&task_loads[a].weight));
    let mut extra_tasks = quota.count_extra_tasks(capacities, &loads.counts);
    for task_index in ordered_tasks {
        let compare_load = |&a: &usize, &b: &usize| {
            let tasks_per_cpu =
                |bin: usize| loads.counts[bin] as f64 / capacities[bin].cpus.max(1) as f64;
            loads.sums[a]
                .total_cmp(&loads.sums[b])
                .then(tasks_per_cpu(a).total_cmp(&tasks_per_cpu(b)))
        };

        let open_bins = (0..capacities.len())
            .filter(|&bin| quota.has_room(&capacities[bin], loads.counts[bin], extra_tasks));
        // All bins exceed their quota only if tasks that cannot move fill them.
        let bin = open_bins
            .min_by(compare_load)
            .or_else(|| (0..capacities.len()).min_by(compare_load))
            .unwrap_or(0);
        extra_tasks +=
            usize::from(loads.counts[bin] >= quota.min_tasks_per_cpu * capacities[bin].cpus);
        loads.add(bin, task_loads[task_index].weight);
        bins[task_index] = Some(bin);
    }
    bins.into_iter().map(|bin| bin.unwrap_or(0)).collect()
}

/// Assigns bins to groups so that few tasks move. A group is what [`place_heaviest_first`] put on one bin, and has that
/// bin's number, so `group_by_task` is a placement that is still free to exchange bins of equally many CPUs.
///
/// The heaviest group goes first, to the package with the smallest sum so far, and there to the bin with most of its
/// members. Groups are exchanged only between bins with equally many CPUs, and a group with a task that cannot move
/// stays.
fn match_bins(
    capacities: &[CacheCapacity],
    task_loads: &[TaskLoad],
    group_by_task: &[usize],
) -> Vec<usize> {
    let loads = BinLoads::from_bins(capacities, task_loads, group_by_task);
    let has_stuck_task = |group: usize| {
        task_loads
            .iter()
            .zip(group_by_task)
            .any(|(task_load, &owner)| owner == group && task_load.is_unmovable)
    };
    let mut target_bins: Vec<Option<usize>> = (0..capacities.len())
        .map(|group| has_stuck_task(group).then_some(group))
        .collect();
    let mut is_taken: Vec<bool> = target_bins.iter().map(Option::is_some).collect();
    let mut member_overlap = vec![vec![0usize; capacities.len()]; capacities.len()];
    for (task_load, &group) in task_loads.iter().zip(group_by_task) {
        task_load
            .current_bin
            .iter()
            .for_each(|&bin| member_overlap[group][bin] += 1);
    }

    let counts_packages = package_sums(capacities, &loads.sums).is_some();
    let mut sums: Vec<f64> = target_bins
        .iter()
        .enumerate()
        .map(|(index, target_bin)| target_bin.map_or(0.0, |_| loads.sums[index]))
        .collect();
    let mut ordered_groups: Vec<usize> = (0..capacities.len())
        .filter(|&group| target_bins[group].is_none())
        .collect();
    ordered_groups.sort_by(|&a, &b| loads.sums[b].total_cmp(&loads.sums[a]));

    for group in ordered_groups {
        let package_sum = |bin: usize| -> f64 {
            let is_same_package =
                |other_bin: &usize| capacities[*other_bin].package == capacities[bin].package;
            if counts_packages {
                (0..capacities.len())
                    .filter(is_same_package)
                    .map(|bin| sums[bin])
                    .sum()
            } else {
                0.0
            }
        };

        let is_candidate =
            |bin: &usize| !is_taken[*bin] && capacities[*bin].cpus == capacities[group].cpus;
        let compare_distance = |&a: &usize, &b: &usize| {
            package_sum(a)
                .total_cmp(&package_sum(b))
                .then(member_overlap[group][b].cmp(&member_overlap[group][a]))
        };
        // A bin is always left, because there are as many bins of this size as groups that were formed for them.
        let bin = (0..capacities.len())
            .filter(is_candidate)
            .min_by(compare_distance)
            .unwrap_or(group);
        (is_taken[bin], sums[bin], target_bins[group]) = (true, loads.sums[group], Some(bin));
    }

    group_by_task
        .iter()
        .map(|&group| target_bins[group].unwrap_or(group))
        .collect()
}
