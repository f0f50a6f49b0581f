//! Tests placements from a matrix and a machine to a plan with reasons.

use cachemate_core::{CpuId, Estimate, MeasuredMatrix, Topology};
use cachemate_papers::forecast_placement::place_by_forecast;
use cachemate_papers::matrix::PairCosts;
use cachemate_papers::placement::{Placement, PlacementCost, PlacementError, cache_seats, place};
use cachemate_papers::solvers::SolverMethod;
use cachemate_spec::{load_topology, parse_measured_matrix};

const TABLE_1: &str = "\
,mcf,milc,gamess,namd
mcf,48.01%,65.63%,2.0%,2.11%
milc,24.75%,45.39%,1.23%,1.11%
gamess,2.67%,4.48%,-1.01%,-1.21%
namd,1.48%,3.45%,-1.19%,-0.93%
";

fn sample_matrix() -> MeasuredMatrix {
    parse_measured_matrix("table 1", TABLE_1).unwrap()
}

fn split_names(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_string).collect()
}

fn place_on_machine(programs: &str, machine: &str) -> Placement {
    let names = split_names(programs);
    let costs = PairCosts::from_slowdowns(sample_matrix().slowdowns_of(&names).unwrap());
    place(&names, &costs, &costs, &load_topology(machine).unwrap(), 1).unwrap()
}

/// CA-3: are the published means 2.3075, 2.325 and 21.995 %, and is {mcf, gamess}, {milc, namd} the best?
#[test]
fn the_published_matrix_gives_the_published_schedules() {
    let placed = place_on_machine("mcf milc gamess namd", "xeon-x5365-4");
    let percent = |outcome: PlacementCost| outcome.mean_slowdown_percent.unwrap();
    assert_eq!(
        (
            percent(placed.plan),
            percent(placed.best),
            percent(placed.worst)
        ),
        (2.3075, 2.3075, 21.995)
    );
    assert!((percent(placed.random) - (2.3075 + 2.325 + 21.995) / 3.0).abs() < 1e-9);
    assert_eq!(
        (placed.method, percent(placed.gap)),
        (SolverMethod::Matching, 0.0)
    );
    let co_runners: Vec<&str> = placed
        .programs
        .iter()
        .map(|program| program.co_runners[0].as_str())
        .collect();
    assert_eq!(co_runners, ["gamess", "namd", "mcf", "milc"]);
    assert_ne!(placed.programs[0].cache, placed.programs[1].cache);
    let reasons: Vec<&str> = placed
        .programs
        .iter()
        .map(|program| program.reason.as_str())
        .collect();
    assert_eq!(
        reasons,
        [
            "mcf is kept away from milc: beside it +65.6 %, beside gamess +2.0 %",
            "milc is kept away from mcf to protect mcf: mcf beside it +65.6 %, namd beside it +3.5 %",
            "gamess is kept away from milc: beside it +4.5 %, beside mcf +2.7 %",
            "namd is placed beside milc (+3.5 %) to protect the others: exchanging it with gamess would cost +0.1 % in total",
        ]
    );
    for reason in &placed.reasons {
        assert!(
            !reason.numbers.is_empty() && reason.text.contains("{0}"),
            "{reason:?}"
        );
    }
}

/// Do copies, idle CPUs, one cache, caches of four and a two-level machine all lead to a valid plan?
#[test]
fn odd_counts_copies_and_other_machines_are_placed() {
    let three = place_on_machine("mcf milc mcf", "xeon-x5365-4");
    assert_eq!(three.programs[2].name, "mcf#2");
    assert!(
        three
            .programs
            .iter()
            .any(|program| program.co_runners.is_empty()),
        "one program is alone"
    );
    assert!(
        three
            .programs
            .iter()
            .any(|program| program.reason.contains("has a cache for itself"))
    );
    let eight = place_on_machine("mcf milc gamess namd mcf milc gamess namd", "opteron-2350");
    assert_eq!(eight.method, SolverMethod::DynamicProgramming);
    assert!(eight.plan.mean_slowdown_percent <= eight.random.mean_slowdown_percent);
    let one_cache = place_on_machine("mcf milc gamess namd", "niagara-2core");
    assert_eq!(one_cache.plan, one_cache.worst);
    assert!(
        one_cache.programs[0].reason.contains("no choice"),
        "{}",
        one_cache.programs[0].reason
    );
    let crowded_plan = place_on_machine("mcf milc gamess namd mcf", "xeon-x5365-4");
    assert!(
        crowded_plan
            .programs
            .iter()
            .any(|program| !program.shares_cpu_with.is_empty())
    );
    assert!(
        crowded_plan
            .programs
            .iter()
            .any(|program| program.reason.contains("takes turns"))
    );
    let sixteen = ["mcf milc gamess namd"; 4].join(" ");
    assert_eq!(place_on_machine(&sixteen, "epyc-7763").programs.len(), 16);
    let single = place_on_machine("mcf", "xeon-x5365-4");
    assert_eq!(
        single.programs[0].reason,
        "mcf shares its cache with no other program"
    );
}

/// Do programs get their own cores as long as there are enough, and share hardware threads only then?
#[test]
fn programs_get_their_own_cores_before_hardware_threads() {
    let topology = load_topology("power5-2x2x2").unwrap();
    let four_seats = cache_seats(&topology, 4).unwrap();
    assert_eq!(
        four_seats
            .iter()
            .map(|cache| cache.cpus.len())
            .collect::<Vec<_>>(),
        [2, 2]
    );
    assert_eq!(four_seats[1].cpus, [CpuId(4), CpuId(6)]);
    let five_seats = cache_seats(&topology, 5).unwrap();
    assert_eq!(five_seats[0].cpus, [CpuId(0), CpuId(2), CpuId(1), CpuId(3)]);
    let mut offline = topology.clone();
    offline.cpus[4].online = false;
    assert_eq!(
        cache_seats(&offline, 4).unwrap()[1].cpus,
        [CpuId(5), CpuId(6)]
    );
    let mut bare = topology.clone();
    bare.caches.clear();
    assert_eq!(cache_seats(&bare, 1).unwrap().len(), 4);
    assert!(cache_seats(&Topology::default(), 1).is_err());
}

/// Is a matrix of the wrong shape rejected?
#[test]
fn a_matrix_of_the_wrong_shape_is_rejected() {
    let topology = load_topology("xeon-x5365-4").unwrap();
    let costs = PairCosts::from_slowdowns(sample_matrix().slowdowns);
    assert!(place(&split_names("a b"), &costs, &costs, &topology, 1).is_err());
    let mut nan = costs.clone();
    nan.cost[1][2] = f64::NAN;
    let error = place(&split_names("a b c d"), &nan, &costs, &topology, 1)
        .unwrap_err()
        .to_string();
    assert!(error.contains("not finite"), "{error}");
}

/// Slowdowns by a machine on which every pair has a cost of its own on one cache, and a smaller one on different
/// caches.
fn slowdowns_on_machine(topology: &Topology, cpus: &[CpuId]) -> Vec<Estimate> {
    let cache_of = |cpu: &CpuId| {
        topology
            .last_level_caches()
            .position(|cache| cache.cpus.contains(cpu.0))
    };

    let caches: Vec<Option<usize>> = cpus.iter().map(cache_of).collect();
    let slowdown = |a: usize| {
        let others = (0..cpus.len()).filter(|&b| b != a);
        let cost = |b: usize| {
            let pair = ((a.min(b) * 7 + a.max(b) * 11) % 13) as f64;
            if caches[a] == caches[b] {
                0.01 * pair
            } else {
                0.003 * (12.0 - pair)
            }
        };
        Estimate::exact(others.map(cost).sum())
    };
    (0..cpus.len()).map(slowdown).collect()
}

fn place_on(topology: &Topology, programs: &str) -> Placement {
    let names = split_names(programs);
    let costs = PairCosts::from_slowdowns(sample_matrix().slowdowns_of(&names).unwrap());
    let mut forecast =
        |cpus: &[CpuId]| Ok::<_, PlacementError>(slowdowns_on_machine(topology, cpus));
    place_by_forecast(&names, &costs, topology, 1, &mut forecast).unwrap()
}

/// Is the plan the best of all placements by the forecast, and does its cost state the forecast, although pairs prefer
/// another placement?
#[test]
fn the_plan_is_the_best_of_all_placements_by_the_forecast() {
    let topology = load_topology("opteron-2350").unwrap();
    let placed = place_on(&topology, "mcf milc gamess namd mcf milc");
    let mean = |cpus: &[CpuId]| {
        let slowdowns = slowdowns_on_machine(&topology, cpus);
        slowdowns
            .iter()
            .map(|estimate| 100.0 * estimate.value)
            .sum::<f64>()
            / slowdowns.len() as f64
    };
    let planned: Vec<CpuId> = placed.programs.iter().map(|program| program.cpu).collect();
    let mut distinct = planned.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(
        distinct.len(),
        6,
        "each program has its own CPU: {planned:?}"
    );
    // Every way to put two to four of six programs on the first cache of four.
    let all = (0u32..64)
        .filter(|set| (2..=4).contains(&set.count_ones()))
        .map(|set| {
            let mut free = [[0, 1, 2, 3].iter(), [4, 5, 6, 7].iter()];
            (0..6)
                .map(|program| CpuId(*free[(set >> program & 1) as usize].next().unwrap()))
                .collect::<Vec<_>>()
        });
    let means: Vec<f64> = all.map(|cpus| mean(&cpus)).collect();
    let (least, most) = (
        means.iter().copied().fold(f64::MAX, f64::min),
        means.iter().copied().fold(0.0, f64::max),
    );
    let percent = |cost: PlacementCost| cost.mean_slowdown_percent.unwrap();
    assert!((mean(&planned) - least).abs() < 1e-9 && (percent(placed.plan) - least).abs() < 1e-9);
    assert!(
        (percent(placed.worst) - most).abs() < 1e-9,
        "{most} {:?}",
        placed.worst
    );
    assert!(percent(placed.random) > least && percent(placed.random) < most);
    assert!(placed.covers_machine && placed.method == SolverMethod::Exhaustive);
    assert!(
        placed
            .programs
            .iter()
            .all(|program| program.forecast.is_some() && !program.reason.is_empty())
    );
    assert_ne!(
        place_on_machine("mcf milc gamess namd mcf milc", "opteron-2350").programs[0].co_runners,
        placed.programs[0].co_runners
    );
    let reason = &placed.programs[0].reason;
    assert!(reason.contains("points in the mean"), "{reason}");
}

/// With more placements than can be forecast, does no known exchange or move improve the plan, and is the result the
/// same again?
#[test]
fn a_large_search_ends_where_no_exchange_helps() {
    let topology = load_topology("epyc-7763").unwrap();
    let programs = ["mcf milc gamess namd"; 3].join(" ");
    let placed = place_on(&topology, &programs);
    assert_eq!(
        (placed.method, placed.gap),
        (SolverMethod::LocalSearch, PlacementCost::default())
    );
    assert!(placed.plan.mean_slowdown_percent < placed.random.mean_slowdown_percent);
    assert_eq!(placed, place_on(&topology, &programs));
}

/// Do programs that take turns keep the plan by pairs, because a forecast of all at once does not apply to them?
#[test]
fn programs_that_take_turns_are_placed_by_pairs() {
    let topology = load_topology("xeon-x5365-4").unwrap();
    let placed = place_on(&topology, "mcf milc gamess namd mcf");
    assert!(!placed.covers_machine);
    assert_eq!(
        placed,
        place_on_machine("mcf milc gamess namd mcf", "xeon-x5365-4")
    );
}

/// Does a plan for a host name its kernel's CPUs, for programs and caches alike, and keep who is beside whom?
#[test]
fn cpus_have_the_numbers_that_the_kernel_gives_them() {
    let described = place_on_machine("mcf milc gamess namd", "xeon-x5365-4");
    let mut placed = described.clone();
    placed.renumber_cpus(&[0, 2, 1, 3]);
    let numbers = [0, 2, 1, 3];
    for (renumbered, original) in placed.programs.iter().zip(&described.programs) {
        assert_eq!(renumbered.cpu.0, numbers[original.cpu.0 as usize]);
        assert_eq!(renumbered.co_runners, original.co_runners);
        let is_listed = placed.caches.iter().any(|cache| {
            cache
                .cpus
                .iter()
                .any(|(cpu, names)| *cpu == renumbered.cpu && names.contains(&renumbered.name))
        });
        assert!(is_listed, "{}: {:?}", renumbered.name, placed.caches);
    }
}
