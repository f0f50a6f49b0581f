//! Tests of mirror images against an exhaustive search over exchanges of like places.

use super::super::cooldown::{CooldownReason, PlanCooldown};
use super::super::live_tasks::{LiveTasks, is_same_placement};
use super::super::symmetry::is_mirror;
use super::*;
use cachemate_core::SplitMix64;
use proptest::prelude::*;

const TASKS: u32 = 5;

/// Caches of two sizes with one or two CPUs, on packages of one or two memory nodes.
fn draw_topology(generator: &mut SplitMix64) -> Topology {
    let mut topology = Topology::default();
    let sizes = if generator.draw_below(2) == 0 {
        [1 << 20, 1 << 20]
    } else {
        [1 << 20, 2 << 20]
    };
    let nodes = 1 + generator.draw_below(2) as u32;

    for package in 0..2 {
        for _ in 0..1 + generator.draw_below(2) {
            let first = topology.cpus.len() as u32;
            let cpus = first..first + 1 + generator.draw_below(2) as u32;
            let memory_node = if nodes == 1 { 0 } else { package };
            let cpu = |id| Cpu {
                id: CpuId(id),
                core: id,
                package,
                memory_node,
                online: true,
                hertz: None,
            };
            topology.cpus.extend(cpus.clone().map(cpu));
            topology.caches.push(Cache {
                id: CacheId(topology.caches.len() as u32),
                level: CacheLevel::L3,
                cpus: cpus.collect(),
                size_bytes: Some(sizes[generator.draw_below(2) as usize]),
                line_bytes: Some(64),
                ways: Some(16),
                last_level: true,
            });
        }
    }

    topology
}

fn set(indices: impl IntoIterator<Item = u32>) -> IndexSet {
    indices.into_iter().collect()
}

/// Tasks on a CPU, on a cache, on two of them or free, some with gangs, ways and colors.
fn draw_plan(topology: &Topology, generator: &mut SplitMix64) -> Plan {
    let mut plan = idle_plan();
    let any_cache = |generator: &mut SplitMix64| {
        &topology.caches[generator.draw_below(topology.caches.len() as u64) as usize]
    };
    for task in 0..TASKS {
        let cache = any_cache(generator);
        let cpus = match generator.draw_below(5) {
            0 => continue,
            1 => set(cache.cpus.first()),
            2 => cache.cpus.union(&any_cache(generator).cpus),
            _ => cache.cpus.clone(),
        };
        plan.affinity.insert(TaskId(task), cpus);
    }

    for cache in &topology.caches {
        let tasks_in_cache: Vec<TaskId> = (0..TASKS)
            .map(TaskId)
            .filter(|task| plan.affinity.get(task) == Some(&cache.cpus))
            .collect();

        if tasks_in_cache.len() > 1 && generator.draw_below(3) == 0 {
            let with_seat = |task| {
                (
                    task,
                    (generator.draw_below(3) == 0).then(|| CpuId(cache.cpus.first().unwrap())),
                )
            };
            let gangs = tasks_in_cache
                .iter()
                .copied()
                .map(with_seat)
                .map(|member| Gang {
                    members: vec![member],
                    slices: 1,
                });
            let gangs: Vec<Gang> = gangs.collect();
            plan.gangs.push(GangSchedule {
                cpus: cache.cpus.clone(),
                slice_ns: 1000,
                gangs,
            });
        }

        if !tasks_in_cache.is_empty() && generator.draw_below(2) == 0 {
            let units = match generator.draw_below(2) {
                0 => Units::Ways {
                    mask: set(0..1 + generator.draw_below(2) as u32),
                },
                _ => Units::Colors {
                    allowed: set([3]),
                    migration: PageMigration::All,
                },
            };

            let members = tasks_in_cache
                .iter()
                .map(|task| ShareMember::Task(*task))
                .collect();
            let group = GroupId(plan.shares.len() as u32);
            plan.shares.push(CacheShare {
                group,
                members,
                cache: cache.id,
                units,
            });
        }
    }

    plan
}

/// All orders of the places.
fn permutations_of(position_count: usize) -> Vec<Vec<usize>> {
    if position_count == 0 {
        return vec![Vec::new()];
    }
    let insertions = |order: Vec<usize>| {
        (0..position_count)
            .map(move |index| [&order[..index], &[position_count - 1], &order[index..]].concat())
    };
    permutations_of(position_count - 1)
        .into_iter()
        .flat_map(insertions)
        .collect()
}

/// The new places of each cache and CPU, for every exchange that preserves nodes, packages and properties of caches.
fn symmetric_exchanges(topology: &Topology) -> Vec<(Vec<usize>, Vec<u32>)> {
    let node_and_package = |cache: usize| {
        let first = topology.caches[cache].cpus.first().unwrap();
        let cpu = topology.cpus.iter().find(|cpu| cpu.id.0 == first).unwrap();
        (cpu.memory_node, cpu.package)
    };
    let are_alike = |a: usize, b: usize| {
        let (cache, other_cache) = (&topology.caches[a], &topology.caches[b]);
        (cache.size_bytes, cache.cpus.count(), node_and_package(a).0)
            == (
                other_cache.size_bytes,
                other_cache.cpus.count(),
                node_and_package(b).0,
            )
    };

    let caches = topology.caches.len();
    let share_package = |a: usize, b: usize| node_and_package(a).1 == node_and_package(b).1;
    let preserves_topology = |permutation: &Vec<usize>| {
        (0..caches).all(|a| {
            are_alike(a, permutation[a])
                && (0..caches)
                    .all(|b| share_package(a, b) == share_package(permutation[a], permutation[b]))
        })
    };

    let mut symmetries = Vec::new();
    for permutation in permutations_of(caches)
        .into_iter()
        .filter(preserves_topology)
    {
        // Caches have two CPUs at most, which may be exchanged in each cache separately.
        for turned in 0..1u32 << caches {
            let mut cpus = vec![0; topology.cpus.len()];
            for (source, &target) in permutation.iter().enumerate() {
                let targets: Vec<u32> = topology.caches[target].cpus.iter().collect();
                for (nth, cpu) in topology.caches[source].cpus.iter().enumerate() {
                    let turn = usize::from(turned >> source & 1 == 1);
                    cpus[cpu as usize] = targets[(nth + turn) % targets.len()];
                }
            }
            symmetries.push((permutation.clone(), cpus));
        }
    }
    symmetries
}

fn exchange_places(plan: &Plan, caches: &[usize], cpus: &[u32]) -> Plan {
    let moved_set = |set: &CpuSet| set.iter().map(|cpu| cpus[cpu as usize]).collect::<CpuSet>();
    let mut plan = plan.clone();
    plan.affinity
        .values_mut()
        .for_each(|allowed| *allowed = moved_set(allowed));
    for schedule in &mut plan.gangs {
        schedule.cpus = moved_set(&schedule.cpus);
        let members = schedule.gangs.iter_mut().flat_map(|gang| &mut gang.members);
        members.for_each(|(_, cpu)| *cpu = cpu.map(|cpu| CpuId(cpus[cpu.0 as usize])));
    }
    plan.gangs.sort_by_key(|schedule| schedule.cpus.first());
    plan.shares
        .iter_mut()
        .for_each(|share| share.cache = CacheId(caches[share.cache.0 as usize] as u32));
    plan
}

/// Colors apply to all caches of a level, so only the properties of their cache count.
fn colors_anywhere(plan: &Plan, topology: &Topology) -> Plan {
    let mut plan = plan.clone();
    for share in plan
        .shares
        .iter_mut()
        .filter(|share| matches!(share.units, Units::Colors { .. }))
    {
        let size = |cache: CacheId| topology.cache(cache).unwrap().size_bytes;
        share.cache = topology
            .caches
            .iter()
            .find(|candidate| candidate.size_bytes == size(share.cache))
            .unwrap()
            .id;
    }
    plan
}

fn all_tasks() -> LiveTasks {
    let tasks: Vec<TaskSample> = (0..TASKS)
        .map(|task| program_sample(task, None, 1.0))
        .collect();
    LiveTasks::from_samples(&tasks)
}

proptest! {
    /// Is a failed plan refused under every exchange of like caches, and a plan that no exchange maps to it allowed, as
    /// by exhaustive search?
    #[test]
    fn exactly_the_exchanges_of_like_caches_are_refused(seed in any::<u64>()) {
        let generator = &mut SplitMix64::new(seed);
        let topology = draw_topology(generator);
        let exchanges = symmetric_exchanges(&topology);
        let failed = draw_plan(&topology, generator);
        let mut keep_out = PlanCooldown::default();
        let live_tasks = all_tasks();
        keep_out.record_failure(&failed, &live_tasks, &topology, 100, 60);
        let refused = |plan: &Plan| {
            matches!(keep_out.refusal_of(plan, &idle_plan(), &live_tasks, &topology, 110), Some(CooldownReason::Failed { until: 160 }))
        };
        let says_nothing = is_same_placement(&failed, &idle_plan(), &live_tasks);
        for (caches, cpus) in &exchanges {
            prop_assert!(refused(&exchange_places(&failed, caches, cpus)) || says_nothing);
        }

        // Another plan, or this one with a task elsewhere, on a mirrored place or on another one.
        for _ in 0..8 {
            let mut other_plan = if generator.draw_below(2) == 0 { draw_plan(&topology, generator) } else { failed.clone() };
            let (caches, cpus) = &exchanges[generator.draw_below(exchanges.len() as u64) as usize];
            other_plan = exchange_places(&other_plan, caches, cpus);
            let task = TaskId(generator.draw_below(TASKS.into()) as u32);
            let place = &topology.caches[generator.draw_below(topology.caches.len() as u64) as usize].cpus;
            other_plan.affinity.insert(task, place.clone());
            let is_image = |(caches, cpus): &(Vec<usize>, Vec<u32>)| {
                let image = colors_anywhere(&exchange_places(&failed, caches, cpus), &topology);
                is_same_placement(&image, &colors_anywhere(&other_plan, &topology), &live_tasks)
            };
            let expected = exchanges.iter().any(is_image);
            prop_assert_eq!(is_mirror(&failed, &other_plan, &live_tasks, &topology), expected, "{:?} {:?}", &failed, &other_plan);
            prop_assert!(refused(&other_plan) == expected || says_nothing);
        }
    }
}

/// If a mirror image is in force, is only the plan itself refused, and only the image if the plan is in force?
#[test]
fn only_the_plan_itself_is_refused_if_its_image_is_in_force() {
    let (topology, live_tasks) = (topology_fixture(), all_tasks());
    let [failed, image] = [[(0, 0), (1, 2)], [(0, 2), (1, 0)]].map(|places| pinned_plan(&places));
    let mut keep_out = PlanCooldown::default();
    keep_out.record_failure(&failed, &live_tasks, &topology, 0, 60);
    let refused = |plan: &Plan, instead: &Plan| {
        keep_out
            .refusal_of(plan, instead, &live_tasks, &topology, 1)
            .is_some()
    };
    assert!(refused(&failed, &image) && !refused(&image, &image) && !refused(&image, &failed));
    assert!(refused(&failed, &idle_plan()) && refused(&image, &idle_plan()));
}

/// Do a plan and its mirror image share a growing cooldown?
#[test]
fn the_cooldown_of_a_plan_and_its_image_doubles() {
    let (topology, live_tasks) = (topology_fixture(), all_tasks());
    let image = |nth: u32| pinned_plan(&[(0, 2 * (nth % 2)), (1, 2 - 2 * (nth % 2))]);
    let mut keep_out = PlanCooldown::default();
    let waits = [0, 70, 200].map(|window: u64| {
        keep_out.record_failure(
            &image(window as u32 / 70),
            &live_tasks,
            &topology,
            window,
            60,
        )
    });
    assert_eq!(waits, [60, 120, 240]);
}

/// If a policy proposes the mirror image of a plan that was rolled back, is that refused as well?
#[test]
fn the_mirror_image_of_a_rolled_back_plan_is_refused() {
    let [bad, mirror] = [
        [(0, 0), (2, 1), (1, 2), (3, 3)],
        [(1, 0), (3, 1), (0, 2), (2, 3)],
    ]
    .map(|places| pinned_plan(&places));
    let policy = ScriptedPolicy(|view: &View<'_>| match view.observation.window {
        0..8 => idle_plan(),
        8..16 => bad.clone(),
        _ => mirror.clone(),
    });

    // Tasks 0 and 1 lose four fifths beside 2 and 3, on either cache.
    let machine = |_, plan: &Plan| {
        let harmed = !plan.affinity.is_empty();
        (0..4)
            .map(|id| program_sample(id, None, if harmed && id < 2 { 20.0 } else { 100.0 }))
            .collect()
    };
    let config = GuardConfig {
        waits_for_reference: false,
        ..GuardConfig::default()
    };
    let decisions = run(policy, config, 60, machine);
    assert!(!windows_with(&decisions, &bad).is_empty(), "it was tried");
    assert_eq!(windows_with(&decisions, &mirror), Vec::<usize>::new());

    assert!(
        decisions[30]
            .reasons
            .iter()
            .any(|reason| reason.kind == ReasonKind::CoolingDown),
        "{:?}",
        decisions[30].reasons
    );
}
