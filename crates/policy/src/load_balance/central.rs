//! The centralized sort: all tasks in one list, placed from the heaviest down.

use super::{BinLoads, CacheCapacity, SeatQuota, TaskLoad, package_sums, unevenness};

/// Returns a bin for every task. The present assignment stays, with newcomers on the lightest bins that have a free
/// CPU, unless a new one lowers the [`unevenness`] by more than `worth_moving` or loads per CPU have become uneven.
pub fn balance_centrally(places: &[CacheCapacity], pieces: &[TaskLoad], worth_moving: f64) -> Vec<usize> {
    if places.is_empty() {
        return Vec::new();
    }
    let balanced = match_bins(places, pieces, &place_heaviest_first(places, pieces, |piece| piece.stuck));
    let stays = place_heaviest_first(places, pieces, |piece| piece.at.is_some());
    let rule = SeatQuota::of(places, pieces.len());
    let even = rule.is_within_quota(places, &BinLoads::of(places, pieces, &stays).counts);
    let better = unevenness(places, pieces, &stays) - unevenness(places, pieces, &balanced);
    if even && better <= worth_moving { stays } else { balanced }
}

/// Places the tasks that keep their bin first, then the others, heaviest first, each on the lightest bin with room.
fn place_heaviest_first(
    places: &[CacheCapacity],
    pieces: &[TaskLoad],
    keeps: impl Fn(&TaskLoad) -> bool,
) -> Vec<usize> {
    let rule = SeatQuota::of(places, pieces.len());
    let mut loads = BinLoads::empty(places);
    let current_bin = |piece: &TaskLoad| piece.at.filter(|_| keeps(piece));
    let mut bins: Vec<Option<usize>> = pieces.iter().map(current_bin).collect();
    for (piece, place) in pieces.iter().zip(&bins) {
        place.iter().for_each(|&place| loads.add(place, piece.weight));
    }
    let mut order: Vec<usize> = (0..pieces.len()).filter(|&nth| bins[nth].is_none()).collect();
    order.sort_by(|&a, &b| pieces[b].weight.total_cmp(&pieces[a].weight));
    let mut more_taken = rule.more_taken(places, &loads.counts);
    for nth in order {
        let lighter = |&a: &usize, &b: &usize| {
            let per_seat = |place: usize| loads.counts[place] as f64 / places[place].seats.max(1) as f64;
            loads.sums[a].total_cmp(&loads.sums[b]).then(per_seat(a).total_cmp(&per_seat(b)))
        };
        let open = (0..places.len()).filter(|&p| rule.has_room(&places[p], loads.counts[p], more_taken));
        // All bins exceed their quota only if tasks that cannot move fill them.
        let place = open.min_by(lighter).or_else(|| (0..places.len()).min_by(lighter)).unwrap_or(0);
        more_taken += usize::from(loads.counts[place] >= rule.least * places[place].seats);
        loads.add(place, pieces[nth].weight);
        bins[nth] = Some(place);
    }
    bins.into_iter().map(|place| place.unwrap_or(0)).collect()
}

/// Moves the same groups to the bins that hold most of their members. The heaviest group goes first, to the package
/// with the smallest sum so far, and there to the bin with most of its members. Only bins with equally many CPUs are
/// exchanged, and groups with a task that cannot move stay.
fn match_bins(places: &[CacheCapacity], pieces: &[TaskLoad], groups: &[usize]) -> Vec<usize> {
    let loads = BinLoads::of(places, pieces, groups);
    let stuck = |group: usize| pieces.iter().zip(groups).any(|(piece, &owner)| owner == group && piece.stuck);
    let mut named: Vec<Option<usize>> = (0..places.len()).map(|group| stuck(group).then_some(group)).collect();
    let mut is_taken: Vec<bool> = named.iter().map(Option::is_some).collect();
    let mut overlap = vec![vec![0usize; places.len()]; places.len()];
    for (piece, &group) in pieces.iter().zip(groups) {
        piece.at.iter().for_each(|&place| overlap[group][place] += 1);
    }
    let mut sums: Vec<f64> =
        named.iter().enumerate().map(|(index, name)| name.map_or(0.0, |_| loads.sums[index])).collect();
    let mut order: Vec<usize> = (0..places.len()).filter(|&group| named[group].is_none()).collect();
    order.sort_by(|&a, &b| loads.sums[b].total_cmp(&loads.sums[a]));
    for group in order {
        let by_package = package_sums(places, &sums).is_some();
        let package_sum = |place: usize| -> f64 {
            let same = |other: &usize| places[*other].package == places[place].package;
            if by_package { (0..places.len()).filter(same).map(|other| sums[other]).sum() } else { 0.0 }
        };
        let fits = |place: &usize| !is_taken[*place] && places[*place].seats == places[group].seats;
        let nearer = |&a: &usize, &b: &usize| {
            package_sum(a).total_cmp(&package_sum(b)).then(overlap[group][b].cmp(&overlap[group][a]))
        };
        // A bin is always left, because there are as many bins of this size as groups made for them.
        let place = (0..places.len()).filter(fits).min_by(nearer).unwrap_or(group);
        (is_taken[place], sums[place], named[group]) = (true, loads.sums[group], Some(place));
    }
    groups.iter().map(|&group| named[group].unwrap_or(group)).collect()
}
