//! Places programs by forecasts of all of them at once on the whole machine.
//!
//! Problem: sums of pairs on one cache lack the waits for memory that other caches cause, and slowdowns of three or
//! more programs do not add up. Method: the search starts from the best placement by pairs. If the placements are few,
//! all are forecast. Otherwise, it exchanges two programs or moves one to an idle CPU as long as that lowers the mean
//! slowdown. Placements that differ only in the cores of a cache are forecast once. Properties: deterministic for a
//! seed; the result is never worse, by forecast, than the best placement by pairs; at equal slowdown that placement
//! stays.

use std::collections::BTreeMap;

use cachemate_core::{CpuId, Estimate, Reason, SplitMix64, TaskId, Topology, quantile};

use crate::matrix::{CostKind, PairCosts};
use crate::placement::{
    CacheSeats, Placement, PlacementCost, PlacementError, build_caches, build_programs,
    cache_seats, check_costs, number_names, place, placement_cost, shape_of,
};
use crate::reasons::explain_placement;
use crate::solvers::{self, Seating, SolverMethod, random_seating};

/// Maximum number of forecasts of the search.
const MAX_SEARCHED: usize = 300;
/// Maximum number of random placements that are drawn.
const RANDOM_SAMPLES: usize = 1000;
/// Maximum number of new forecasts for random placements.
const MAX_SAMPLED: usize = 60;
/// Minimum gain in mean slowdown: the last digit that is printed, and above the difference between two placements that
/// are mirror images.
const MIN_GAIN: f64 = 1e-4;

/// Forecasts the slowdown of every program, as a share of its solo time, from the CPU of every program.
pub type MachineForecast<'a, E> = dyn FnMut(&[CpuId]) -> Result<Vec<Estimate>, E> + 'a;

/// Places `names` on the machine with the smallest mean of the forecast slowdowns. With more programs than CPUs, the
/// result is that of [`place`] by `costs`, because programs that take turns do not run at once.
///
/// # Errors
/// Those of [`place`] and of `forecast`.
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
    let is_exhaustive = search
        .count_placements(names.len())
        .is_some_and(|count| count <= MAX_SEARCHED);
    match is_exhaustive {
        true => search.solve_all(&mut Vec::new(), names.len(), &mut best)?,
        false => search.climb(&mut best)?,
    }

    let best_seats = best.1;
    let worst_by_pairs = search.seats_of(
        &solvers::worst_assignment(&costs.cost, &shape).seating,
        names.len(),
    );
    search.solve(&worst_by_pairs)?;
    let mut generator = SplitMix64::new(seed);
    let (mut random_means, forecast_count) = (Vec::new(), search.stored_forecasts.len());
    for _ in 0..RANDOM_SAMPLES {
        let seats = search.seats_of(
            &random_seating(names.len(), &shape, &mut generator),
            names.len(),
        );
        random_means.push(mean_slowdown(search.solve(&seats)?));
        if search.stored_forecasts.len() >= forecast_count + MAX_SAMPLED {
            break;
        }
    }
    // A sum of ascending numbers loses the fewest digits.
    random_means.sort_by(f64::total_cmp);
    let random_quantile = |share: f64| quantile(&random_means, share).unwrap_or(f64::NAN);

    let names = number_names(names);
    let seating = search.seating_of(&best_seats, &seats_by_cache);
    let reasons = match best_seats == start {
        true => explain_placement(&seating, costs),
        false => search.explain(&best_seats, costs),
    };
    let estimates = search.solve(&best_seats)?.to_vec();
    let slowdowns: Vec<f64> = estimates.iter().map(|estimate| estimate.value).collect();
    let mut programs = build_programs(
        &names,
        &seats_by_cache,
        &seating,
        &slowdowns,
        CostKind::Degradation,
        &reasons,
    );
    for (program, estimate) in programs.iter_mut().zip(&estimates) {
        program.forecast = Some(*estimate);
    }
    let cost = |mean: f64| placement_cost(mean, CostKind::Degradation);
    let plan = cost(mean_slowdown(&estimates));
    let worst = search
        .stored_forecasts
        .values()
        .map(|slowdowns| mean_slowdown(slowdowns))
        .fold(f64::NEG_INFINITY, f64::max);
    Ok(Placement {
        programs,
        caches: build_caches(&names, &seats_by_cache, &seating, topology),
        covers_machine: true,
        plan,
        best: plan,
        worst: cost(worst),
        random: cost(random_means.iter().sum::<f64>() / random_means.len() as f64),
        random_low_5_percent: cost(random_quantile(0.05)),
        random_high_5_percent: cost(random_quantile(0.95)),
        method: if is_exhaustive {
            SolverMethod::Exhaustive
        } else {
            SolverMethod::LocalSearch
        },
        lower_bound: if is_exhaustive {
            plan
        } else {
            PlacementCost::default()
        },
        gap: if is_exhaustive {
            cost(0.0)
        } else {
            PlacementCost::default()
        },
        reasons,
    })
}

fn mean_slowdown(estimates: &[Estimate]) -> f64 {
    estimates.iter().map(|estimate| estimate.value).sum::<f64>() / estimates.len() as f64
}

/// A search over placements, each as a position in `cpus` for every program. These are the CPUs of all caches, in
/// order.
struct ForecastSearch<'a, 'f, E> {
    cpus: Vec<CpuId>,
    /// Interchangeable CPUs have the same number: those on different cores of one cache, as long as each core has one
    /// CPU.
    kinds: Vec<usize>,
    forecast: &'a mut MachineForecast<'f, E>,
    /// Forecasts by the kind of every program's CPU.
    stored_forecasts: BTreeMap<Vec<usize>, Vec<Estimate>>,
}

impl<'a, 'f, E> ForecastSearch<'a, 'f, E> {
    fn new(
        seats_by_cache: &[CacheSeats],
        topology: &Topology,
        forecast: &'a mut MachineForecast<'f, E>,
    ) -> Self {
        let cpus: Vec<CpuId> = seats_by_cache
            .iter()
            .flat_map(|seats| &seats.cpus)
            .copied()
            .collect();
        let core_of = |id: CpuId| {
            topology
                .cpus
                .iter()
                .find(|cpu| cpu.id == id)
                .map(|cpu| cpu.core)
        };
        let mut cores: Vec<Option<u32>> = cpus.iter().map(|&cpu| core_of(cpu)).collect();
        cores.sort_unstable();
        cores.dedup();

        let caches = seats_by_cache
            .iter()
            .enumerate()
            .flat_map(|(cache, seats)| seats.cpus.iter().map(move |_| cache));
        let kinds = if cores.len() == cpus.len() {
            caches.collect()
        } else {
            (0..cpus.len()).collect()
        };
        ForecastSearch {
            cpus,
            kinds,
            forecast,
            stored_forecasts: BTreeMap::new(),
        }
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
            let occupants = seats
                .iter()
                .enumerate()
                .filter(|(_, program_seat)| **program_seat == seat);
            occupants
                .map(|(program, _)| program)
                .collect::<Vec<usize>>()
        });
        Seating {
            by_cache: seats_by_cache
                .iter()
                .map(|cache| members.by_ref().take(cache.cpus.len()).collect())
                .collect(),
        }
    }

    fn kinds_of(&self, seats: &[usize]) -> Vec<usize> {
        seats.iter().map(|&seat| self.kinds[seat]).collect()
    }

    /// The slowdowns of a placement, and forecasts them if they are not stored yet.
    fn solve(&mut self, seats: &[usize]) -> Result<&[Estimate], E> {
        let key = self.kinds_of(seats);
        if !self.stored_forecasts.contains_key(&key) {
            let cpus: Vec<CpuId> = seats.iter().map(|&seat| self.cpus[seat]).collect();
            let slowdowns = (self.forecast)(&cpus)?;
            self.stored_forecasts.insert(key.clone(), slowdowns);
        }
        Ok(&self.stored_forecasts[&key])
    }

    /// Number of different placements; `None` if it overflows.
    fn count_placements(&self, programs: usize) -> Option<usize> {
        let mut cpu_counts = BTreeMap::new();
        self.kinds
            .iter()
            .for_each(|kind| *cpu_counts.entry(*kind).or_insert(0usize) += 1);
        // Ways to place as many programs as the index on the kinds so far.
        let mut placement_counts = vec![0usize; programs + 1];
        placement_counts[0] = 1;
        for cpu_count in cpu_counts.into_values() {
            let count_with_kind = |placed: usize| {
                (0..=cpu_count.min(placed)).try_fold(0usize, |sum, added| {
                    let choices = binomial_coefficient(programs - (placed - added), added)?;
                    sum.checked_add(placement_counts[placed - added].checked_mul(choices)?)
                })
            };
            placement_counts = (0..=programs).map(count_with_kind).collect::<Option<_>>()?;
        }
        Some(placement_counts[programs])
    }

    /// Forecasts all placements that begin with these CPUs, and keeps the best.
    fn solve_all(
        &mut self,
        seats: &mut Vec<usize>,
        programs: usize,
        best: &mut (f64, Vec<usize>),
    ) -> Result<(), E> {
        if seats.len() == programs {
            self.improve(best, seats)?;
            return Ok(());
        }

        for seat in 0..self.cpus.len() {
            // Of interchangeable CPUs, the first free one stands for all.
            let is_first = (0..seat).all(|earlier_seat| {
                self.kinds[earlier_seat] != self.kinds[seat] || seats.contains(&earlier_seat)
            });
            if is_first && !seats.contains(&seat) {
                seats.push(seat);
                self.solve_all(seats, programs, best)?;
                seats.pop();
            }
        }

        Ok(())
    }

    /// Takes a placement if its mean slowdown is lower by more than [`MIN_GAIN`], and returns whether it is.
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
            for partner in program + 1..seats.len() {
                if self.kinds[seats[program]] != self.kinds[seats[partner]] {
                    let mut exchanged = seats.to_vec();
                    exchanged.swap(program, partner);
                    neighbors.push((program, Some(partner), exchanged));
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
    fn explain(&self, best_seats: &[usize], costs: &PairCosts) -> Vec<Reason> {
        let known_mean = |seats: &[usize]| {
            self.stored_forecasts
                .get(&self.kinds_of(seats))
                .map(|slowdowns| mean_slowdown(slowdowns))
        };
        let mean = known_mean(best_seats).unwrap_or(0.0);

        let neighbors = self.neighbors(best_seats);
        let explain_program = |program: usize| {
            let changes = neighbors.iter().filter_map(|(first, second, seats)| {
                let partner = match second {
                    Some(second) if *second == program => Some(*first),
                    second if *first == program => *second,
                    _ => return None,
                };
                Some((known_mean(seats)? - mean, partner))
            });
            let cheapest_change = changes.reduce(|a, b| if b.0 < a.0 { b } else { a });
            self.explain_program(program, best_seats, cheapest_change, costs)
        };
        (0..best_seats.len()).map(explain_program).collect()
    }

    fn explain_program(
        &self,
        program: usize,
        best_seats: &[usize],
        cheapest_change: Option<(f64, Option<usize>)>,
        costs: &PairCosts,
    ) -> Reason {
        let is_co_runner = |candidate: &usize| {
            *candidate != program
                && self.kinds[best_seats[*candidate]] == self.kinds[best_seats[program]]
        };
        let costlier_partner = |a: usize, b: usize| {
            if costs.mutual_cost(program, b) > costs.mutual_cost(program, a) {
                b
            } else {
                a
            }
        };
        let companion = (0..best_seats.len())
            .filter(is_co_runner)
            .reduce(costlier_partner);

        let mut tasks = vec![TaskId(program as u32)];
        let mut placeholder_of = |mentioned: usize| {
            tasks.push(TaskId(mentioned as u32));
            format!("{{{}}}", tasks.len() - 1)
        };
        let placement_clause = match companion {
            Some(companion) => {
                let pair = signed_percent(costs.cost[program][companion]);
                format!(
                    "is placed beside {} (the pair alone {pair} %)",
                    placeholder_of(companion)
                )
            }
            None => "has a cache for itself".to_string(),
        };

        let (text, numbers) = match cheapest_change {
            None => (format!("{{0}} {placement_clause}"), Vec::new()),
            Some((added_slowdown, partner)) => {
                let change_clause = match partner {
                    Some(partner) => format!("exchanging it with {}", placeholder_of(partner)),
                    None => "moving it to another cache".to_string(),
                };
                let numbers = vec![(
                    "cheapest_change_costs_mean_percent".to_string(),
                    100.0 * added_slowdown,
                )];
                let added = signed_percent(added_slowdown);
                (
                    format!(
                        "{{0}} {placement_clause}: {change_clause} would slow all programs by {added} points in the mean"
                    ),
                    numbers,
                )
            }
        };

        Reason::new(tasks, text, numbers)
    }
}

/// In percent with one decimal, and with its sign unless that rounds to nothing.
fn signed_percent(fraction: f64) -> String {
    let tenths = (1000.0 * fraction).round();
    if tenths == 0.0 {
        return "0.0".to_string();
    }
    format!("{:+.1}", tenths / 10.0)
}

fn binomial_coefficient(population: usize, count: usize) -> Option<usize> {
    (0..count).try_fold(1usize, |ways, taken| {
        Some(ways.checked_mul(population - taken)? / (taken + 1))
    })
}
