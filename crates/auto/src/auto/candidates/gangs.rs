//! Gangs: tasks of one cache that fit together run in turns.

use cachemate_papers::gang_quantum::{MAX_WAIT_NS, max_quantum_ns};

use super::PlanSearch;
use super::site::SiteTasks;
use crate::auto::model::layout::{GangRotation, SiteLayout};

/// Length of a gang's turn.
const QUANTUM_NS: u64 = 100_000_000;
/// Minimum CPU demand of a gang's members. A task that sleeps more leaves part of its turn unused.
const MIN_GANG_DEMAND: f64 = 0.8;

impl PlanSearch<'_> {
    pub(super) fn add_rotations(&self, layout: &SiteLayout) -> SiteLayout {
        let sites = 0..self.problem.sites.len();
        self.refine_each_site(layout, sites, |site_tasks, new_layout| {
            new_layout.rotations[site_tasks.site] = site_tasks.best_rotation();
        })
    }
}

impl SiteTasks<'_> {
    /// The best gangs; `None` if none are better than single tasks in turn.
    fn best_rotation(&self) -> Option<GangRotation> {
        let problem = self.search.problem;
        let cpus = self.cache_site().cpus.count() as usize;
        let can_be_ganged = |&index: &usize| {
            let program = self.program(index);
            problem.tasks[index].is_movable
                && program.is_none_or(|program| program.cpu_demand >= MIN_GANG_DEMAND)
        };
        if self.members.len() <= cpus || !self.members.iter().all(can_be_ganged) || cpus < 2 {
            return None;
        }

        let can_take_turns = problem.min_slice_ns.is_some_and(|ns| ns <= QUANTUM_NS);
        let mut best_key = self.key(&[], None);
        let mut best_rotation = None;
        for gangs in self.form_gangs(cpus) {
            let is_short = QUANTUM_NS <= max_quantum_ns(gangs.len(), MAX_WAIT_NS);
            if !can_take_turns || !is_short || self.search.is_spent() {
                break;
            }

            let rotation = GangRotation {
                slice_ns: QUANTUM_NS,
                gangs,
            };
            let key = self.key(&[], Some(&rotation));
            if key > best_key + 1e-9 {
                (best_key, best_rotation) = (key, Some(rotation));
            }
        }
        let rotation = self.exchange_members(best_key, best_rotation?);
        Some(rotation.in_order())
    }

    /// Groups similar tasks, by pressure and by space, and completes or evens out the groups.
    fn form_gangs(&self, cpus: usize) -> Vec<Vec<Vec<usize>>> {
        let bytes = self.cache_site().bytes;
        let sorted_by = |sort_key: &dyn Fn(usize) -> f64| {
            let mut sorted_members = self.members.to_vec();
            sorted_members.sort_by(|&a, &b| sort_key(a).total_cmp(&sort_key(b)).then(a.cmp(&b)));
            sorted_members
        };
        let pressure = |index: usize| {
            self.program(index).map_or(0.0, |model| {
                model.misses_at(bytes) / model.solo_cycles(bytes)
            })
        };

        let space_need = |index: usize| {
            self.program(index).map_or(0.0, |model| {
                model.cycles_with_bytes(bytes / 8.0, 0.0, 0.0) / model.solo_cycles(bytes)
            })
        };
        let full_gangs = |ordered_members: &[usize]| {
            ordered_members
                .chunks(cpus)
                .map(<[usize]>::to_vec)
                .collect::<Vec<_>>()
        };

        let even_gangs = |ordered_members: &[usize]| {
            let gangs = ordered_members.len().div_ceil(cpus);
            ordered_members
                .chunks(ordered_members.len().div_ceil(gangs))
                .map(<[usize]>::to_vec)
                .collect::<Vec<_>>()
        };

        // Each gang has one task that needs much space, together with tasks of low pressure.
        let deal_into_gangs = |ordered_members: &[usize]| {
            let gang_count = ordered_members.len().div_ceil(cpus);
            let mut gangs = vec![Vec::new(); gang_count];
            for (position, &index) in ordered_members.iter().rev().enumerate() {
                let round = position / gang_count;
                gangs[if round.is_multiple_of(2) {
                    position % gang_count
                } else {
                    gang_count - 1 - position % gang_count
                }]
                .push(index);
            }

            gangs
        };

        let (by_pressure, by_space_need) = (sorted_by(&pressure), sorted_by(&space_need));
        vec![
            full_gangs(&by_pressure),
            full_gangs(&by_space_need),
            even_gangs(&by_pressure),
            even_gangs(&by_space_need),
            deal_into_gangs(&by_space_need),
            deal_into_gangs(&by_pressure),
        ]
    }

    /// Exchanges members between gangs as long as that helps.
    fn exchange_members(&self, mut key: f64, mut rotation: GangRotation) -> GangRotation {
        for _ in 0..2 {
            let previous_key = key;
            for gang in 0..rotation.gangs.len() {
                for other_gang in gang + 1..rotation.gangs.len() {
                    for member in 0..rotation.gangs[gang].len() {
                        for other_member in 0..rotation.gangs[other_gang].len() {
                            if self.search.is_spent() {
                                return rotation;
                            }
                            let mut exchanged_rotation = rotation.clone();
                            (
                                exchanged_rotation.gangs[gang][member],
                                exchanged_rotation.gangs[other_gang][other_member],
                            ) = (
                                rotation.gangs[other_gang][other_member],
                                rotation.gangs[gang][member],
                            );
                            let new_key = self.key(&[], Some(&exchanged_rotation));
                            if new_key > key + 1e-9 {
                                (key, rotation) = (new_key, exchanged_rotation);
                            }
                        }
                    }
                }
            }
            if key <= previous_key {
                break;
            }
        }
        rotation
    }
}
