//! Fleets whose results are known, and the properties that every fleet has.

use std::collections::BTreeMap;

use cachemate_core::test_support::{cache_spec, machine_spec, memory_spec};
use cachemate_core::{CacheLevel, CacheSpec, CoreModel, MachineSpec, WayPartitions};
use cachemate_fleet::arrivals::draw_kinds;
use cachemate_fleet::corun::{CoRunKey, CoRunMember, CoRunSolver};
use cachemate_fleet::placement::PlacementPolicy;
use cachemate_fleet::profile::{ReferenceMix, WorkingSet};
use cachemate_fleet::scorer::NodePolicy;
use cachemate_fleet::spec::{DrawSpec, FleetService, FleetSpec, MoveSpec, PowerSpec};
use cachemate_fleet::study::{FleetChange, FleetPart, FleetResult, FleetStudy};

const MIB: f64 = 1024.0 * 1024.0;

fn cache(level: CacheLevel, size_bytes: u64, shared_by_cores: u32) -> CacheSpec {
    CacheSpec {
        way_partitions: (level == CacheLevel::L2).then_some(WayPartitions {
            groups: 4,
            min_ways: 1,
            contiguous: false,
        }),
        ..cache_spec(level, size_bytes, 16, shared_by_cores)
    }
}

/// Eight cores in two caches of 8 MiB, one memory node.
fn machine() -> MachineSpec {
    MachineSpec {
        hertz: 2_000_000_000,
        cores_per_package: 8,
        pipeline: CoreModel::OutOfOrder {
            issue_width: 4,
            window: 128,
            mshrs: 16,
            loads_pass: false,
        },
        memory: memory_spec(64 << 30, 200, 16.0),
        ..machine_spec(vec![
            cache(CacheLevel::L1Instruction, 32 << 10, 1),
            cache(CacheLevel::L1Data, 32 << 10, 1),
            cache(CacheLevel::L2, 8 << 20, 4),
        ])
    }
}

fn fleet(hosts: u32, services_per_host: f64) -> FleetSpec {
    FleetSpec {
        name: "test".to_string(),
        machine: "test".to_string(),
        hosts,
        hours: 6.0,
        seed: 5,
        services_per_host,
        step_minutes: 60.0,
        cell_hosts: 4,
        host_memory_bytes: None,
        policies: PlacementPolicy::all(),
        nodes: vec![NodePolicy::Off, NodePolicy::Auto],
        partition: true,
        promise_percent: None,
        services: Vec::new(),
        draw: None,
        cluster: None,
        moves: MoveSpec::default(),
        power: PowerSpec::default(),
    }
}

fn kind(name: &str, references: f64, sets: &[(f64, f64)], limit: Option<f64>) -> FleetService {
    let mix = ReferenceMix {
        base_cycles_per_instr: 0.6,
        stall_cycles_per_miss: 100.0,
        references_per_kilo_instr: references,
        working_sets: sets
            .iter()
            .map(|&(bytes, share)| WorkingSet { bytes, share })
            .collect(),
        write_share: 0.3,
    };

    FleetService {
        name: name.to_string(),
        cpus: 1.0,
        memory_bytes: 1e9,
        threads: 1,
        busy_cpus: 0.75,
        max_slowdown_percent: limit,
        weight: 1.0,
        profile: Some(mix.profile()),
        ..FleetService::default()
    }
}

fn run(
    spec: &FleetSpec,
    kinds: &[FleetService],
    workers: usize,
    changes: &[FleetChange],
) -> FleetResult {
    let study = FleetStudy::new(spec, &[machine()], kinds, None, changes).unwrap();
    let parts = study.parts().into_iter();
    let (cells, searches): (Vec<FleetPart>, Vec<FleetPart>) =
        parts.partition(|part| matches!(part, FleetPart::Cell { .. }));
    let mut outcomes = BTreeMap::new();
    for group in [&cells, &searches] {
        let run_share = |worker: usize| {
            let own_parts = group.iter().skip(worker).step_by(workers);
            let run_part = |part| study.run_part(part, &outcomes, &|| false).unwrap();
            own_parts
                .map(|&part| (part, run_part(part)))
                .collect::<Vec<_>>()
        };
        let group_outcomes: Vec<_> = std::thread::scope(|scope| {
            let run_share = &run_share;
            let threads: Vec<_> = (0..workers)
                .map(|worker| scope.spawn(move || run_share(worker)))
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        });
        outcomes.extend(group_outcomes);
    }
    study.merge(&outcomes).unwrap()
}

/// Are services that each have a host of their own not slowed down, under any policy that spreads them?
#[test]
fn one_service_per_host_has_no_slowdown() {
    let mut spec = fleet(4, 1.0);
    spec.policies = vec![
        PlacementPolicy::Requests,
        PlacementPolicy::Spread,
        PlacementPolicy::Misses,
    ];
    let kinds = [
        kind("reuse", 20.0, &[(6.0 * MIB, 0.9)], Some(1.0)),
        kind("stream", 30.0, &[], Some(1.0)),
    ];
    for variant in run(&spec, &kinds, 1, &[]).variants {
        assert_eq!(
            variant.total.slowdowns.percentile(1.0),
            Some(0.0),
            "{}",
            variant.name
        );
        assert_eq!(variant.total.limit_kept_share(), Some(1.0));
        assert_eq!((variant.total.services, variant.total.moves), (4, 0));
    }
}

/// Do names that hold markup, an escape sequence or a mark that turns the direction of writing act on no page?
#[test]
fn hostile_names_have_no_effect_on_a_page() {
    let evil = "</title><script>x</script>\u{1b}[31m\u{202e}{1}\" onload=\"x";
    let mut spec = fleet(1, 1.0);
    spec.policies = vec![PlacementPolicy::Requests];
    (spec.name, spec.machine) = (evil.to_string(), evil.to_string());
    let kinds = [kind(evil, 20.0, &[(6.0 * MIB, 0.9)], Some(1.0))];
    let page = run(&spec, &kinds, 1, &[]).render_html(&spec, 1.0);
    assert!(
        !page.contains("<script") && !page.contains("\" onload"),
        "{page}"
    );
    assert!(
        !page.contains(['\u{1b}', '\u{202e}']) && page.contains("\\u{202e}"),
        "{page}"
    );
}

/// Do all policies give the same result for identical services that fill all hosts?
#[test]
fn identical_services_make_policies_equal() {
    let mut spec = fleet(2, 8.0);
    spec.nodes = vec![NodePolicy::Off];
    spec.promise_percent = Some(100.0);
    let result = run(
        &spec,
        &[kind("reuse", 20.0, &[(4.0 * MIB, 0.9)], Some(1000.0))],
        2,
        &[],
    );
    let first = &result.variants[0].total;
    assert!(
        first.slowdowns.percentile(0.5).unwrap() > 1.0,
        "eight working sets of 4 MiB on two caches of 8 MiB"
    );
    for variant in &result.variants[1..] {
        assert_eq!(variant.total.slowdowns, first.slowdowns, "{}", variant.name);
        assert_eq!(variant.hosts_needed, result.variants[0].hosts_needed);
    }
    // Eight CPUs each and requests of one: 16 services need two hosts, whatever their speeds.
    assert_eq!(result.variants[0].hosts_needed, Some(2));
}

/// Does the same seed give the same bits on any number of workers, and another seed another result?
#[test]
fn the_same_seed_gives_the_same_bits_on_any_number_of_workers() {
    let spec = fleet(6, 5.0);
    let draw = DrawSpec {
        kinds: 6,
        cpus: (1.0, 2.0),
        ..DrawSpec::default()
    };
    let kinds = draw_kinds(&draw, spec.seed);
    let single = run(&spec, &kinds, 1, &[FleetChange::OneMoreHost]);
    let three = run(&spec, &kinds, 3, &[FleetChange::OneMoreHost]);
    assert_eq!(single.variants, three.variants);
    assert_eq!(single.csv(), three.csv());
    assert_eq!(
        single.variants.len(),
        20,
        "five policies, two node policies, and one more host"
    );
    assert!(
        single.variants[10].name.ends_with("one more host"),
        "{}",
        single.variants[10].name
    );
    let other_seed = FleetSpec { seed: 6, ..spec };
    assert_ne!(
        single.variants,
        run(&other_seed, &kinds, 1, &[FleetChange::OneMoreHost]).variants
    );
}

/// Do results and work of equal cells add up: three times the hosts, three times the services, the same shares?
#[test]
fn a_fleet_is_the_sum_of_its_cells() {
    let (small, large) = (fleet(4, 6.0), fleet(12, 6.0));
    let kinds = [
        kind("reuse", 20.0, &[(4.0 * MIB, 0.9)], Some(5.0)),
        kind("stream", 30.0, &[], None),
    ];
    let (one, three) = (run(&small, &kinds, 1, &[]), run(&large, &kinds, 1, &[]));
    for (one, three) in one.variants.iter().zip(&three.variants) {
        assert_eq!(
            3 * one.total.slowdowns.sample_count(),
            three.total.slowdowns.sample_count()
        );
        assert!(
            (3.0 * one.total.energy_kwh / three.total.energy_kwh - 1.0).abs() < 0.1,
            "{}",
            one.name
        );
    }
}

/// Does the forecast keep more limits than requests if streams can be separated from reuse?
#[test]
fn forecasts_separate_streams_from_reuse() {
    let mut spec = fleet(4, 6.0);
    spec.policies = vec![PlacementPolicy::Requests, PlacementPolicy::Forecast];
    let kinds = [
        kind("reuse", 20.0, &[(3.0 * MIB, 0.98)], Some(5.0)),
        kind("stream", 40.0, &[], None),
    ];
    let result = run(&spec, &kinds, 1, &[FleetChange::Partition(false)]);
    let kept_share = |name: &str| {
        let variant = result.variants.iter().find(|variant| variant.name == name);
        variant
            .unwrap_or_else(|| panic!("{name}"))
            .total
            .limit_kept_share()
            .unwrap()
    };

    assert!(
        kept_share("forecast+auto") > kept_share("requests"),
        "{} {}",
        kept_share("forecast+auto"),
        kept_share("requests")
    );
    assert!(kept_share("forecast+auto") >= kept_share("forecast+auto, unpartitioned"));
    let needed = |index: usize| result.variants[index].hosts_needed;
    assert!(
        needed(3) <= needed(0),
        "{:?}",
        result
            .variants
            .iter()
            .map(|variant| variant.hosts_needed)
            .collect::<Vec<_>>()
    );
}

/// Does a cache become slower with every service that joins it, and with traffic of other caches?
#[test]
fn slowdowns_rise_with_co_runners_and_other_caches_traffic() {
    let profiles = [
        kind("reuse", 20.0, &[(6.0 * MIB, 0.9)], None),
        kind("stream", 40.0, &[], None),
    ];
    let solver = CoRunSolver::new(
        &machine(),
        profiles
            .iter()
            .filter_map(|kind| kind.profile.clone())
            .collect(),
    )
    .unwrap();

    let member = |kind: u16| CoRunMember {
        kind,
        load: 8,
        threads: 1,
        is_confined: kind == 1,
    };
    let cycles = |traffic: u8, confined_ways: u8, streams: usize| {
        let members = std::iter::once(member(0))
            .chain(std::iter::repeat_n(member(1), streams))
            .collect();
        solver.member_speeds(&CoRunKey {
            traffic,
            confined_ways,
            members,
        })[0]
            .cycles_per_instr
    };
    let company: Vec<f32> = (0..4).map(|streams| cycles(0, 0, streams)).collect();
    assert!(
        company.is_sorted() && company[3] > 1.1 * company[0],
        "{company:?}"
    );
    let traffic: Vec<f32> = [0, 4, 8, 12, 15].map(|level| cycles(level, 0, 1)).to_vec();
    assert!(
        traffic.is_sorted() && traffic[4] > traffic[0],
        "{traffic:?}"
    );
    assert!(cycles(0, 2, 3) < company[3], "confined streams harm less");
    assert_eq!(solver.solo_cycles_per_instr(member(0)), company[0]);
}
