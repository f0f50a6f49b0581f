//! Tests against brute force, and against the bound in the module's documentation.

use proptest::prelude::*;

use super::exchanges::{max_distance, tournament_pairs};
use super::*;

fn alike(places: usize, seats: usize) -> Vec<CacheCapacity> {
    vec![CacheCapacity { seats, package: 0 }; places]
}
fn newcomers(weights: &[f64]) -> Vec<TaskLoad> {
    weights.iter().map(|&weight| TaskLoad { weight, at: None, stuck: false }).collect()
}
fn moved(pieces: &[TaskLoad], bins: &[usize]) -> Vec<TaskLoad> {
    pieces.iter().zip(bins).map(|(piece, &at)| TaskLoad { at: Some(at), ..*piece }).collect()
}
fn sums(places: &[CacheCapacity], pieces: &[TaskLoad], bins: &[usize]) -> Vec<f64> {
    BinLoads::of(places, pieces, bins).sums
}
fn counts(places: &[CacheCapacity], bins: &[usize]) -> Vec<usize> {
    (0..places.len()).map(|place| bins.iter().filter(|&&other| other == place).count()).collect()
}

/// Runs rounds of exchanges until a whole tournament changes nothing.
fn exchanged_to_the_end(places: &[CacheCapacity], mut pieces: Vec<TaskLoad>, worth_moving: f64) -> (Vec<usize>, u64) {
    let (mut at, mut quiet, mut round) = (Vec::new(), 0, 0);
    while quiet < places.len().max(2) {
        let next = exchange(places, &pieces, round, worth_moving);
        quiet = if next == at { quiet + 1 } else { 0 };
        pieces = moved(&pieces, &next);
        at = next;
        round += 1;
        assert!(round < 10_000, "exchanges end");
    }
    (at, round)
}

/// Are the eight programs of one workload paired as by hand: the heaviest with the lightest, and both sockets equally?
#[test]
fn pairs_are_folded_and_sockets_evened_out() {
    let places: Vec<CacheCapacity> = [0, 0, 1, 1].map(|package| CacheCapacity { seats: 2, package }).to_vec();
    let pieces = newcomers(&[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]);
    let at = balance_centrally(&places, &pieces, 0.0);
    assert_eq!(sums(&places, &pieces, &at), vec![9.0; 4]);
    let uneven = newcomers(&[20.0, 6.0, 5.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
    let at = balance_centrally(&places, &uneven, 0.0);
    let totals = sums(&places, &uneven, &at);
    assert_eq!(totals[0].max(totals[1]).max(totals[2]).max(totals[3]), 20.0);
    let packages = package_sums(&places, &totals).unwrap();
    assert_eq!(packages[0].max(packages[1]), 24.0, "the heaviest cache shares its bus with the lightest: {totals:?}");
}

/// Does a heavy task get a cache to itself while CPUs are free, and does no task wait while they are?
#[test]
fn free_seats_are_used_against_the_heaviest() {
    let places = alike(2, 4);
    let pieces = newcomers(&[100.0, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(counts(&places, &balance_centrally(&places, &pieces, 0.0)), [1, 4]);
    let (at, _) = exchanged_to_the_end(&places, pieces, 0.0);
    assert!(counts(&places, &at) == [1, 4] || counts(&places, &at) == [4, 1]);
}

/// Do tasks stay for a small gain and move for a large one?
#[test]
fn small_gains_move_no_task() {
    let places = alike(2, 2);
    let at = |weights: [f64; 4], worth| {
        let pieces = moved(&newcomers(&weights), &[0, 0, 1, 1]);
        balance_centrally(&places, &pieces, worth)
    };
    assert_eq!(at([5.0, 5.1, 5.0, 5.2], 0.05), [0, 0, 1, 1]);
    let split = at([9.0, 9.0, 1.0, 1.0], 0.05);
    assert_eq!(split.iter().zip([0, 0, 1, 1]).filter(|(a, b)| **a != *b).count(), 2, "{split:?}");
}

/// Does a task that cannot move stay, with the others arranged around it?
#[test]
fn tasks_that_cannot_move_stay() {
    let places = alike(2, 2);
    let mut pieces = newcomers(&[9.0, 8.0, 1.0, 0.5]);
    pieces[0] = TaskLoad { weight: 9.0, at: Some(1), stuck: true };
    let at = balance_centrally(&places, &pieces, 0.0);
    assert_eq!((at[0], at[1]), (1, 0));
    let (at, _) = exchanged_to_the_end(&places, pieces, 0.0);
    assert_eq!((at[0], at[1]), (1, 0));
}

/// Does each bin meet each other bin once?
#[test]
fn a_tournament_is_complete() {
    for places in 0..12usize {
        let rounds = if places % 2 == 0 { places.max(1) - 1 } else { places };
        let mut met: Vec<(usize, usize)> =
            (0..rounds as u64).flat_map(|round| tournament_pairs(places, round)).collect();
        met.sort_unstable();
        let every: Vec<(usize, usize)> = (0..places).flat_map(|a| (a + 1..places).map(move |b| (a, b))).collect();
        assert_eq!(met, every, "{places}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Without a central sort, do exchanges end within the stated bound, from any start?
    #[test]
    fn exchanges_end_within_the_bound(
        weights in prop::collection::vec(0.0f64..50.0, 24),
        shape in 0usize..5,
        worth_moving in 0.0f64..0.2,
        start in any::<u64>(),
    ) {
        let (count, seats) = [(2, 12), (3, 8), (4, 6), (6, 4), (12, 2)][shape];
        let places = alike(count, seats);
        let pieces = newcomers(&weights);
        let mut places_of: Vec<usize> = (0..24).map(|nth| nth % count).collect();
        cachemate_core::SplitMix64::new(start).shuffle(&mut places_of);
        let (at, _) = exchanged_to_the_end(&places, moved(&pieces, &places_of), worth_moving);
        prop_assert_eq!(counts(&places, &at), vec![seats; count]);
        let totals = sums(&places, &pieces, &at);
        for a in 0..count {
            for b in 0..count {
                let bound = max_distance(&pieces, seats, 0.5 * (totals[a] + totals[b]), worth_moving);
                prop_assert!(totals[a] - totals[b] <= bound + 1e-9, "{:?} {bound}", totals);
            }
        }
        let most = |sums: &[f64]| sums.iter().copied().fold(0.0, f64::max);
        let sorted = sums(&places, &pieces, &balance_centrally(&places, &pieces, 0.0));
        let bound = max_distance(&pieces, seats, most(&totals), worth_moving);
        prop_assert!(most(&totals) <= most(&sorted) + bound + 1e-9);
    }

    /// Are loads per CPU even in both forms, whatever the counts, shapes and starts?
    #[test]
    fn loads_are_even(
        weights in prop::collection::vec(0.0f64..50.0, 1..20),
        seats in prop::collection::vec(1usize..5, 1..5),
        start in any::<u64>(),
    ) {
        let places: Vec<CacheCapacity> =
            seats.iter().enumerate().map(|(index, &seats)| CacheCapacity { seats, package: index as u32 / 2 }).collect();
        let mut generator = cachemate_core::SplitMix64::new(start);
        let mut pieces = newcomers(&weights);
        for piece in &mut pieces {
            piece.at = (generator.draw_below(2) == 0).then(|| generator.draw_below(places.len() as u64) as usize);
        }
        let rule = SeatQuota::of(&places, pieces.len());
        for index in [balance_centrally(&places, &pieces, 0.05), exchanged_to_the_end(&places, pieces.clone(), 0.05).0] {
            let counts = counts(&places, &index);
            prop_assert!(rule.is_within_quota(&places, &counts), "{counts:?} on {places:?}");
        }
    }

    /// For pairs, does the sorted assignment have the smallest maximal sum, as by enumeration?
    #[test]
    fn the_central_answer_to_pairs_is_the_best(weights in prop::collection::vec(0.0f64..50.0, 6)) {
        let places = alike(3, 2);
        let pieces = newcomers(&weights);
        let greatest = |at: &[usize]| sums(&places, &pieces, at).into_iter().fold(0.0, f64::max);
        let mut minimum = f64::INFINITY;
        for code in 0..729u32 {
            let at: Vec<usize> = (0..6).map(|nth| (code / 3u32.pow(nth) % 3) as usize).collect();
            if counts(&places, &at) == [2, 2, 2] {
                minimum = minimum.min(greatest(&at));
            }
        }
        prop_assert!(greatest(&balance_centrally(&places, &pieces, 0.0)) <= minimum + 1e-9);
    }

    /// For pairs, does a higher priority never bring heavier co-runners?
    #[test]
    fn a_higher_priority_brings_quieter_co_runners(
        weights in prop::collection::vec(0.0f64..50.0, 8),
        chosen in 0usize..8,
        extra in 0.0f64..500.0,
    ) {
        let places = alike(4, 2);
        let neighbor = |pieces: &[TaskLoad]| {
            let at = balance_centrally(&places, pieces, 0.0);
            (0..8).find(|&other| other != chosen && at[other] == at[chosen]).map_or(0.0, |other| weights[other])
        };
        let plain = newcomers(&weights);
        let mut raised = plain.clone();
        raised[chosen].weight += extra;
        prop_assert!(neighbor(&raised) <= neighbor(&plain) + 1e-9);
    }
}
