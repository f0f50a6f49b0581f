//! Places programs by forecasts of all of them at once on the whole machine.
//!
//! Problem: sums of pairs on one cache lack the waits for memory that other caches cause, and slowdowns of three or more
//! programs do not add up. Method: the search starts from the best placement by pairs. If the placements are few, all are
//! forecast. Otherwise, it exchanges two programs or moves one to an idle CPU as long as that lowers the mean slowdown.
//! Placements that differ only in the cores of a cache are forecast once. Properties: deterministic for a seed; the result
//! is never worse, by forecast, than the best placement by pairs; at equal slowdown that placement stays.

use std::collections::BTreeMap;

use cachemate_core::{CpuId, Estimate, Reason, ReasonKind, SplitMix64, TaskId, Topology};

use crate::matrix::{CostKind, PairCosts};
use crate::placement::{
    CacheSeats, Placement, PlacementCost, PlacementError, build_caches, build_programs, cache_seats, check_costs,
    number_names, place, placement_cost, shape_of,
};
use crate::reasons::explain_placement;
use crate::solvers::{self, Seating, SolverMethod, random_seating};

/// Maximum number of forecasts of the search, and of the sample of random placements.
const MAX_SEARCHED: usize = 300;
const RANDOM_SAMPLES: usize = 1000;
const MAX_SAMPLED: usize = 60;
/// Minimum gain in mean slowdown, above the error of a forecast's solution.
const MIN_GAIN: f64 = 1e-5;

/// Forecasts the slowdown of every program, as a share of its solo time, from the CPU of every program.
pub type MachineForecast<'a, E> = dyn FnMut(&[CpuId]) -> Result<Vec<Estimate>, E> + 'a;

/// Places `names` on the machine with the smallest mean of the forecast slowdowns. With more programs than CPUs, the result
/// is that of [`place`] by `costs`, because programs that take turns do not run at once.
///
/// # Errors
/// The errors of [`place`] and of `forecast`.
pub fn place_by_forecast<E: From<PlacementError>>(
    names: &[String],
    costs: &PairCosts,
    topology: &Topology,
    seed: u64,
    forecast: &mut MachineForecast<'_, E>,
) -> Result<Placement, E> {
    check_costs(names, costs)?;
    let seats_by_cache = cache_seats(topology, names.len())?;
    let shape = shape_of(&seats_by_cache);
    if names.is_empty() || names.len() > shape.cpus() {
        return Ok(place(names, costs, costs, topology, seed)?);
    }
    let mut search = ForecastSearch::new(&seats_by_cache, topology, forecast);
    let pair_seating = solvers::best_assignment(&costs.cost, &shape).seating;
    let start = search.seats_of(&pair_seating, names.len());
    let mut best = (mean_slowdown(search.solve(&start)?), start.clone());
    let is_exhaustive = search.count_placements(names.len()).is_some_and(|count| count <= MAX_SEARCHED);
    match is_exhaustive {
        true => search.solve_all(&mut Vec::new(), names.len(), &mut best)?,
        false => search.climb(&mut best)?,
    }
    let best_seats = best.1;
    let worst_by_pairs = search.seats_of(&solvers::worst_assignment(&costs.cost, &shape).seating, names.len());
    search.solve(&worst_by_pairs)?;
    let mut generator = SplitMix64::new(seed);
    let (mut random, searched) = (Vec::new(), search.stored_forecasts.len());
    for _ in 0..RANDOM_SAMPLES {
        let seats = search.seats_of(&random_seating(names.len(), &shape, &mut generator), names.len());
        random.push(mean_slowdown(search.solve(&seats)?));
        if search.stored_forecasts.len() >= searched + MAX_SAMPLED {
            break;
        }
    }
    random.sort_by(f64::total_cmp);
    let quantile_of = |share: f64| random[((random.len() - 1) as f64 * share) as usize];

    let names = number_names(names);
    let seating = search.seating_of(&best_seats, &seats_by_cache);
    let reasons = match best_seats == start {
        true => explain_placement(&seating, costs),
        false => search.explain(&best_seats, costs),
    };
    let estimates = search.solve(&best_seats)?.to_vec();
    let slowdowns: Vec<f64> = estimates.iter().map(|estimate| estimate.value).collect();
    let mut programs = build_programs(&names, &seats_by_cache, &seating, &slowdowns, CostKind::Degradation, &reasons);
    for (program, estimate) in programs.iter_mut().zip(&estimates) {
        program.forecast = Some(*estimate);
    }
    let cost = |mean: f64| placement_cost(mean, CostKind::Degradation);
    let plan = cost(mean_slowdown(&estimates));
    let worst =
        search.stored_forecasts.values().map(|slowdowns| mean_slowdown(slowdowns)).fold(f64::NEG_INFINITY, f64::max);
    Ok(Placement {
        programs,
        caches: build_caches(&names, &seats_by_cache, &seating, topology),
        covers_machine: true,
        plan,
        best: plan,
        worst: cost(worst),
        random: cost(random.iter().sum::<f64>() / random.len() as f64),
        random_low_5_percent: cost(quantile_of(0.05)),
        random_high_5_percent: cost(quantile_of(0.95)),
        method: if is_exhaustive { SolverMethod::Exhaustive } else { SolverMethod::LocalSearch },
        lower_bound: if is_exhaustive { plan } else { PlacementCost::default() },
        gap: if is_exhaustive { cost(0.0) } else { PlacementCost::default() },
        reasons,
    })
}

fn mean_slowdown(estimates: &[Estimate]) -> f64 {
    estimates.iter().map(|estimate| estimate.value).sum::<f64>() / estimates.len() as f64
}

/// A search over placements, each as a position in `cpus` for every program. These are the CPUs of all caches, in order.
struct ForecastSearch<'a, 'f, E> {
    cpus: Vec<CpuId>,
    /// Interchangeable CPUs have the same number: those on different cores of one cache, as long as each core has one CPU.
    kinds: Vec<usize>,
    forecast: &'a mut MachineForecast<'f, E>,
    /// Forecasts by the kind of every program's CPU.
    stored_forecasts: BTreeMap<Vec<usize>, Vec<Estimate>>,
}

impl<'a, 'f, E> ForecastSearch<'a, 'f, E> {
    fn new(seats_by_cache: &[CacheSeats], topology: &Topology, forecast: &'a mut MachineForecast<'f, E>) -> Self {
        let cpus: Vec<CpuId> = seats_by_cache.iter().flat_map(|place| &place.cpus).copied().collect();
        let core_of = |id: CpuId| topology.cpus.iter().find(|cpu| cpu.id == id).map(|cpu| cpu.core);
        let mut cores: Vec<Option<u32>> = cpus.iter().map(|&cpu| core_of(cpu)).collect();
        cores.sort_unstable();
        cores.dedup();
        let caches = seats_by_cache.iter().enumerate().flat_map(|(cache, place)| place.cpus.iter().map(move |_| cache));
        let kinds = if cores.len() == cpus.len() { caches.collect() } else { (0..cpus.len()).collect() };
        ForecastSearch { cpus, kinds, forecast, stored_forecasts: BTreeMap::new() }
    }

    /// The position in `cpus` for every program; each CPU of the seating has at most one program.
    fn seats_of(&self, seating: &Seating, programs: usize) -> Vec<usize> {
        let mut seats = vec![0; programs];
        for (seat, members) in seating.by_cache.iter().flatten().enumerate() {
            members.iter().for_each(|&program| seats[program] = seat);
        }
        seats
    }

    fn seating_of(&self, seats: &[usize], seats_by_cache: &[CacheSeats]) -> Seating {
        let mut members = (0..self.cpus.len()).map(|seat| {
            let here = seats.iter().enumerate().filter(|(_, other)| **other == seat);
            here.map(|(program, _)| program).collect::<Vec<usize>>()
        });
        Seating {
            by_cache: seats_by_cache.iter().map(|place| members.by_ref().take(place.cpus.len()).collect()).collect(),
        }
    }

    fn kinds_of(&self, seats: &[usize]) -> Vec<usize> {
        seats.iter().map(|&seat| self.kinds[seat]).collect()
    }

    /// The slowdowns of a placement, forecast or known.
    fn solve(&mut self, seats: &[usize]) -> Result<&[Estimate], E> {
        let key = self.kinds_of(seats);
        if !self.stored_forecasts.contains_key(&key) {
            let cpus: Vec<CpuId> = seats.iter().map(|&seat| self.cpus[seat]).collect();
            let slowdowns = (self.forecast)(&cpus)?;
            self.stored_forecasts.insert(key.clone(), slowdowns);
        }
        Ok(&self.stored_forecasts[&key])
    }

    /// Number of different placements; `None` if it is beyond counting.
    fn count_placements(&self, programs: usize) -> Option<usize> {
        let mut rooms = BTreeMap::new();
        self.kinds.iter().for_each(|kind| *rooms.entry(*kind).or_insert(0usize) += 1);
        // Ways to place as many programs as the index on the kinds so far.
        let mut ways = vec![0usize; programs + 1];
        ways[0] = 1;
        for room in rooms.into_values() {
            let extended = |placed: usize| {
                (0..=room.min(placed)).try_fold(0usize, |sum, here| {
                    let choices = choose(programs - (placed - here), here)?;
                    sum.checked_add(ways[placed - here].checked_mul(choices)?)
                })
            };
            ways = (0..=programs).map(extended).collect::<Option<_>>()?;
        }
        Some(ways[programs])
    }

    /// Forecasts all placements that begin with these CPUs, and keeps the best.
    fn solve_all(&mut self, seats: &mut Vec<usize>, programs: usize, best: &mut (f64, Vec<usize>)) -> Result<(), E> {
        if seats.len() == programs {
            self.improve(best, seats)?;
            return Ok(());
        }
        for seat in 0..self.cpus.len() {
            // Of interchangeable CPUs, the first free one stands for all.
            let is_first = (0..seat).all(|other| self.kinds[other] != self.kinds[seat] || seats.contains(&other));
            if is_first && !seats.contains(&seat) {
                seats.push(seat);
                self.solve_all(seats, programs, best)?;
                seats.pop();
            }
        }
        Ok(())
    }

    /// Takes a placement if its mean slowdown is lower, and returns whether it is.
    fn improve(&mut self, best: &mut (f64, Vec<usize>), seats: &[usize]) -> Result<bool, E> {
        let mean = mean_slowdown(self.solve(seats)?);
        let is_better = mean < best.0 - MIN_GAIN;
        if is_better {
            *best = (mean, seats.to_vec());
        }
        Ok(is_better)
    }

    /// All placements that differ by the exchange of two programs, or by the move of one to an idle CPU.
    fn neighbors(&self, seats: &[usize]) -> Vec<(usize, Option<usize>, Vec<usize>)> {
        let mut neighbors = Vec::new();
        for program in 0..seats.len() {
            for other in program + 1..seats.len() {
                if self.kinds[seats[program]] != self.kinds[seats[other]] {
                    let mut exchanged = seats.to_vec();
                    exchanged.swap(program, other);
                    neighbors.push((program, Some(other), exchanged));
                }
            }
            for seat in 0..self.cpus.len() {
                if self.kinds[seat] != self.kinds[seats[program]] && !seats.contains(&seat) {
                    let mut moved = seats.to_vec();
                    moved[program] = seat;
                    neighbors.push((program, None, moved));
                }
            }
        }
        neighbors
    }

    /// Takes better neighbors until there is none, or the number of forecasts is used up.
    fn climb(&mut self, best: &mut (f64, Vec<usize>)) -> Result<(), E> {
        loop {
            let mut has_improved = false;
            for (_, _, seats) in self.neighbors(&best.1) {
                if self.stored_forecasts.len() >= MAX_SEARCHED {
                    return Ok(());
                }
                has_improved = self.improve(best, &seats)?;
                if has_improved {
                    break;
                }
            }
            if !has_improved {
                return Ok(());
            }
        }
    }

    /// A reason for every program: the known exchange or move that would cost least.
    fn explain(&self, best: &[usize], costs: &PairCosts) -> Vec<Reason> {
        let known_mean = |seats: &[usize]| {
            self.stored_forecasts.get(&self.kinds_of(seats)).map(|slowdowns| mean_slowdown(slowdowns))
        };
        let mean = known_mean(best).unwrap_or(0.0);
        let neighbors = self.neighbors(best);
        let reason_of = |program: usize| {
            let changes = neighbors.iter().filter_map(|(first, second, seats)| {
                let partner = match second {
                    Some(second) if *second == program => Some(*first),
                    second if *first == program => *second,
                    _ => return None,
                };
                Some((known_mean(seats)? - mean, partner))
            });
            let cheapest = changes.reduce(|a, b| if b.0 < a.0 { b } else { a });
            self.reason(program, best, cheapest, costs)
        };
        (0..best.len()).map(reason_of).collect()
    }

    fn reason(
        &self,
        program: usize,
        best: &[usize],
        cheapest: Option<(f64, Option<usize>)>,
        costs: &PairCosts,
    ) -> Reason {
        let is_co_runner = |other: &usize| *other != program && self.kinds[best[*other]] == self.kinds[best[program]];
        let dearest = |a: usize, b: usize| {
            if costs.mutual_cost(program, b) > costs.mutual_cost(program, a) { b } else { a }
        };
        let companion = (0..best.len()).filter(is_co_runner).reduce(dearest);
        let mut tasks = vec![TaskId(program as u32)];
        let mut name = |other: usize| {
            tasks.push(TaskId(other as u32));
            format!("{{{}}}", tasks.len() - 1)
        };
        let place = match companion {
            Some(companion) => {
                let pair = 100.0 * costs.cost[program][companion];
                format!("is placed beside {} (the pair alone {pair:+.1} %)", name(companion))
            }
            None => "has a cache for itself".to_string(),
        };
        let (text, numbers) = match cheapest {
            None => (format!("{{0}} {place}"), Vec::new()),
            Some((added, partner)) => {
                let change = match partner {
                    Some(partner) => format!("exchanging it with {}", name(partner)),
                    None => "moving it to another cache".to_string(),
                };
                let numbers = vec![("cheapest_change_costs_mean_percent".to_string(), 100.0 * added)];
                let added = 100.0 * added;
                (format!("{{0}} {place}: {change} would slow all programs by {added:+.1} points in the mean"), numbers)
            }
        };
        Reason { kind: ReasonKind::Explanation, tasks, text, numbers }
    }
}

fn choose(from: usize, count: usize) -> Option<usize> {
    (0..count).try_fold(1usize, |ways, taken| Some(ways.checked_mul(from - taken)? / (taken + 1)))
}
