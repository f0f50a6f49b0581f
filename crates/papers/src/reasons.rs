//! Explains placements: for each program, the comparison that decided, as text.
//!
//! A reason contains programs and the numbers on which the plan rests; `{0}` in its text is the program itself.
//! [`render`] inserts names last, so reasons do not depend on them.

use cachemate_core::{Reason, TaskId};

use crate::matrix::{CostKind, PairCosts};
use crate::solvers::Seating;

/// Slowdown below which a reason does not mention a co-runner.
const MIN_MENTIONED_SLOWDOWN: f64 = 0.005;

/// A number of a reason under its name.
pub fn named_number(name: impl Into<String>, value: f64) -> (String, f64) {
    (name.into(), value)
}

/// One reason for every program, in the order of programs, and a second one for a program that takes turns on a CPU.
pub fn explain_placement(seating: &Seating, costs: &PairCosts) -> Vec<Reason> {
    let mut reasons = Vec::new();
    for program in 0..costs.len() {
        let Some((cache, cpu)) = find_seat(seating, program) else {
            continue;
        };
        let alternates: Vec<usize> = seating.by_cache[cache][cpu]
            .iter()
            .copied()
            .filter(|&other| other != program)
            .collect();

        let co_runners: Vec<usize> = members_except(&seating.by_cache[cache], cpu);
        let members_elsewhere: Vec<usize> = (0..costs.len())
            .filter(|candidate| {
                *candidate != program
                    && !alternates.contains(candidate)
                    && !co_runners.contains(candidate)
            })
            .collect();
        let neighborhood = Neighborhood {
            costs,
            program,
            co_runners: &co_runners,
            members_elsewhere: &members_elsewhere,
        };
        reasons.push(neighborhood.explain_seating(seating));
        reasons.extend(neighborhood.explain_turns(&alternates));
    }

    reasons
}

/// The reason's text, with names in place of the numbers in braces.
pub fn render(reason: &Reason, names: &[String]) -> String {
    reason.render(|task| names.get(task.0 as usize).map_or("?", String::as_str))
}

fn find_seat(seating: &Seating, program: usize) -> Option<(usize, usize)> {
    let cpus = seating.by_cache.iter().enumerate();
    let mut seats = cpus.flat_map(|(cache, cpus)| {
        cpus.iter()
            .enumerate()
            .map(move |(cpu, members)| (cache, cpu, members))
    });
    seats
        .find(|(_, _, members)| members.contains(&program))
        .map(|(cache, cpu, _)| (cache, cpu))
}

fn members_except(cache: &[Vec<usize>], cpu: usize) -> Vec<usize> {
    let mut members: Vec<usize> = cache
        .iter()
        .enumerate()
        .filter(|(other, _)| *other != cpu)
        .flat_map(|(_, on)| on)
        .copied()
        .collect();
    members.sort_unstable();
    members
}

struct Neighborhood<'a> {
    costs: &'a PairCosts,
    program: usize,
    co_runners: &'a [usize],
    members_elsewhere: &'a [usize],
}

impl Neighborhood<'_> {
    /// The first member with the largest mutual cost, or with the smallest if `sign` is negative.
    fn extreme_member(&self, candidates: &[usize], sign: f64) -> Option<usize> {
        let cost_of = |other: usize| sign * self.costs.mutual_cost(self.program, other);
        candidates.iter().copied().reduce(|best, other| {
            if cost_of(other) > cost_of(best) {
                other
            } else {
                best
            }
        })
    }

    fn describe(&self, value: f64) -> String {
        match self.costs.kind {
            // What rounds to nothing has no sign: -0.0 would say that the neighbor helps.
            CostKind::Degradation if value.abs() < 0.0005 => "0.0 %".to_string(),
            CostKind::Degradation => format!("{:+.1} %", 100.0 * value),
            CostKind::Weight => format!("weight {value:.3}"),
        }
    }

    fn cost_number(&self, subject: &str, value: f64) -> (String, f64) {
        match self.costs.kind {
            CostKind::Degradation => (format!("{subject}_slowdown_percent"), 100.0 * value),
            CostKind::Weight => (format!("{subject}_weight"), value),
        }
    }

    fn build_reason(
        &self,
        named_programs: &[usize],
        text: String,
        numbers: Vec<(String, f64)>,
    ) -> Reason {
        let tasks = std::iter::once(self.program).chain(named_programs.iter().copied());
        Reason::new(
            tasks.map(|task| TaskId(task as u32)).collect(),
            text,
            numbers,
        )
    }

    fn explain_seating(&self, seating: &Seating) -> Reason {
        let cost = &self.costs.cost;
        let program = self.program;
        let (Some(avoided), Some(companion)) = (
            self.extreme_member(self.members_elsewhere, 1.0),
            self.extreme_member(self.co_runners, 1.0),
        ) else {
            return self.explain_no_choice();
        };
        let co_programs = (0..cost.len()).filter(|&other| other != program);
        let largest_cost = co_programs
            .map(|other| cost[program][other].abs().max(cost[other][program].abs()))
            .fold(0.0, f64::max);
        if self.costs.kind == CostKind::Degradation && largest_cost < MIN_MENTIONED_SLOWDOWN {
            let text = format!(
                "{{0}} and the others barely affect each other (at most {}), so any CPU will do",
                self.describe(largest_cost)
            );
            return self.build_reason(&[], text, vec![self.cost_number("at_most", largest_cost)]);
        }
        let numbers = vec![
            self.cost_number("beside_avoided", cost[program][avoided]),
            self.cost_number("avoided_beside_it", cost[avoided][program]),
            self.cost_number("beside_companion", cost[program][companion]),
            self.cost_number("companion_beside_it", cost[companion][program]),
        ];
        if self.costs.mutual_cost(program, avoided) <= self.costs.mutual_cost(program, companion) {
            return self.explain_for_others(seating, companion, numbers);
        }
        let (own_cost, other_cost) = (cost[program][avoided], cost[avoided][program]);
        let text = if own_cost >= other_cost {
            let current_cost = self.describe(cost[program][companion]);
            format!(
                "{{0}} is kept away from {{1}}: beside it {}, beside {{2}} {current_cost}",
                self.describe(own_cost)
            )
        } else {
            let current_cost = self.describe(cost[companion][program]);
            let other_text = self.describe(other_cost);
            format!(
                "{{0}} is kept away from {{1}} to protect {{1}}: {{1}} beside it {other_text}, {{2}} beside it {current_cost}"
            )
        };
        self.build_reason(&[avoided, companion], text, numbers)
    }

    fn explain_no_choice(&self) -> Reason {
        match (
            self.extreme_member(self.members_elsewhere, 1.0),
            self.extreme_member(self.co_runners, 1.0),
        ) {
            (Some(avoided), None) => {
                let cost = self.costs.cost[self.program][avoided];
                let text = format!(
                    "{{0}} has a cache for itself: beside {{1}} {}",
                    self.describe(cost)
                );
                self.build_reason(
                    &[avoided],
                    text,
                    vec![self.cost_number("beside_avoided", cost)],
                )
            }
            (None, Some(companion)) => {
                let cost = self.costs.cost[self.program][companion];
                let text = format!(
                    "{{0}} has no choice, because all programs share one cache; {{1}} costs it most, {}",
                    self.describe(cost)
                );
                self.build_reason(
                    &[companion],
                    text,
                    vec![self.cost_number("beside_companion", cost)],
                )
            }
            _ => self.build_reason(
                &[],
                "{0} shares its cache with no other program".to_string(),
                Vec::new(),
            ),
        }
    }

    /// The reason for a program whose co-runner is no better than the programs that it avoids: the cost of an exchange.
    fn explain_for_others(
        &self,
        seating: &Seating,
        companion: usize,
        mut numbers: Vec<(String, f64)>,
    ) -> Reason {
        let total = seating.total_cost(&self.costs.cost);
        let exchanges = self
            .members_elsewhere
            .iter()
            .map(|&other| (exchange(seating, self.program, other), other));
        let costs =
            exchanges.map(|(seating, other)| (seating.total_cost(&self.costs.cost) - total, other));
        let cheapest_exchange = costs.reduce(|a, b| if b.0 < a.0 { b } else { a });
        let (added_cost, exchange_partner) = cheapest_exchange.unwrap_or((0.0, companion));
        let current_cost = self.describe(self.costs.cost[self.program][companion]);
        numbers.push(self.cost_number("cheapest_exchange_costs_all", added_cost));

        let scale = self
            .costs
            .cost
            .iter()
            .flatten()
            .fold(0.0f64, |largest_cost, cost| largest_cost.max(cost.abs()));
        let text = if added_cost > 1e-9 * scale {
            let added_text = self.describe(added_cost);
            format!(
                "{{0}} is placed beside {{1}} ({current_cost}) to protect the others: exchanging it with {{2}} would cost {added_text} in total"
            )
        } else {
            format!(
                "{{0}} is placed beside {{1}} ({current_cost}): no exchange, such as with {{2}}, would gain"
            )
        };
        self.build_reason(&[companion, exchange_partner], text, numbers)
    }

    fn explain_turns(&self, alternates: &[usize]) -> Option<Reason> {
        let alternate = self.extreme_member(alternates, 1.0)?;
        let (own_cost, other_cost) = (
            self.costs.cost[self.program][alternate],
            self.costs.cost[alternate][self.program],
        );
        let text = format!(
            "{{0}} takes turns with {{1}} on one CPU, so they never run at once: side by side {}, and {{1}} {}",
            self.describe(own_cost),
            self.describe(other_cost)
        );
        let numbers = vec![
            self.cost_number("side_by_side", own_cost),
            self.cost_number("other_side_by_side", other_cost),
        ];
        Some(self.build_reason(&[alternate], text, numbers))
    }
}

fn exchange(seating: &Seating, a: usize, b: usize) -> Seating {
    let mut exchanged_seating = seating.clone();
    for member in exchanged_seating.by_cache.iter_mut().flatten().flatten() {
        *member = match *member {
            m if m == a => b,
            m if m == b => a,
            m => m,
        };
    }
    exchanged_seating
}
