use super::*;
use crate::reference_predictor::ReferencePredictor;
use cachemate_core::test_support::{ViewFixture, capabilities_fixture, last_level_caches};
use cachemate_core::{CacheLevel, Estimate, FactSource, SizeCurve};

const MIB: u64 = 1 << 20;
/// Time of a hit on the modeled machine of docs/sched-ext.md, on which a miss takes 127 ns.
const HIT_NS: f64 = 26.5;
const MISS_NS: f64 = 127.0;

fn chase_refill_ns(bytes: u64) -> f64 {
    (bytes / 64) as f64 * (MISS_NS - HIT_NS)
}

fn victim_fixture(bytes: u64) -> GangCandidate {
    GangCandidate {
        refill_ns: Some(chase_refill_ns(bytes)),
        slowdown: 0.0,
    }
}

/// Does the mean slowdown match the access times that were measured with gangs on a modeled machine?
#[test]
fn the_mean_slowdown_matches_measured_access_times() {
    let measured = [
        (3, 20e6, 35.3),
        (3, 50e6, 29.5),
        (3, 100e6, 28.0),
        (1, 5e6, 40.0),
        (1, 10e6, 32.0),
        (1, 20e6, 29.0),
    ];
    for (mib, turn_ns, found_ns) in measured {
        let law_ns = HIT_NS * (1.0 + mean_slowdown(&[victim_fixture(mib * MIB)], turn_ns));
        assert!(
            (law_ns / found_ns - 1.0).abs() < 0.03,
            "{mib} MiB, {turn_ns} ns: {law_ns} against {found_ns}"
        );
    }
}

/// Do turns have a usual length if possible, and are they lengthened until they pay off?
#[test]
fn turns_have_a_usual_length_or_are_lengthened_to_pay_off() {
    let alone = MISS_NS / HIT_NS - 1.0;
    assert_eq!(
        quantum_ns(&[victim_fixture(MIB / 16)], 0.9 * alone, 2, MAX_WAIT_NS),
        Ok(Some(20_000_000))
    );
    let usual = quantum_ns(
        &[victim_fixture(6 * MIB), victim_fixture(MIB)],
        0.9 * alone,
        2,
        MAX_WAIT_NS,
    )
    .unwrap()
    .unwrap();
    assert_eq!(usual, (4.0 * chase_refill_ns(6 * MIB)) as u64);
    let long = quantum_ns(&[victim_fixture(16 * MIB)], 0.05, 2, 10_000_000_000)
        .unwrap()
        .unwrap();
    assert!(
        long > 100_000_000 && mean_slowdown(&[victim_fixture(16 * MIB)], long as f64) <= 0.05,
        "{long}"
    );
    assert!(
        mean_slowdown(&[victim_fixture(16 * MIB)], long as f64 - 1e5) > 0.05,
        "no longer than it must be"
    );
}

/// Are gangs rejected if turns that pay off make tasks wait longer than allowed, or if no turn pays off?
#[test]
fn gangs_are_rejected_if_turns_pay_off_too_late() {
    let refused = quantum_ns(&[victim_fixture(3 * MIB)], 0.3, 2, 120_000_000).unwrap_err();
    assert_eq!(refused.max_quantum_ns, 5_000_000);
    assert!(
        refused
            .break_even_ns
            .is_some_and(|break_even_ns| break_even_ns > 5_000_000),
        "{refused:?}"
    );
    let hopeless = GangCandidate {
        slowdown: 2.0,
        ..victim_fixture(MIB)
    };
    assert_eq!(
        quantum_ns(&[hopeless], 1.0, 2, MAX_WAIT_NS)
            .unwrap_err()
            .break_even_ns,
        None
    );
}

/// Is there no length if no footprint is known?
#[test]
fn turns_have_no_length_if_no_footprint_is_known() {
    let unknown = GangCandidate {
        refill_ns: None,
        slowdown: 0.1,
    };
    assert_eq!(quantum_ns(&[unknown; 3], 0.5, 2, MAX_WAIT_NS), Ok(None));
    let known_quantum = quantum_ns(&[victim_fixture(MIB)], 0.5, 2, MAX_WAIT_NS);
    assert_eq!(
        quantum_ns(&[victim_fixture(MIB), unknown], 0.5, 2, MAX_WAIT_NS),
        known_quantum
    );
}

fn refill_of(misses: &[(u64, f64)]) -> Option<f64> {
    let mut topology = last_level_caches(1, 2, CacheLevel::L3, 8 * MIB);
    topology
        .cpus
        .iter_mut()
        .for_each(|cpu| cpu.hertz = Some(2_000_000_000));
    let bench = ViewFixture::new(topology, capabilities_fixture(&[]), 0);
    let curve: SizeCurve = misses
        .iter()
        .map(|(bytes, rate)| (*bytes, Estimate::exact(*rate)))
        .collect();
    let profile = Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle);
    let predictor = ReferencePredictor {
        miss_penalty_cycles: 200.0,
    };
    refill_ns(&profile, &bench.topology.caches[0], &bench.view(&predictor))
}

/// Does the refill end at the knee of the curve, and is there none if the curve is flat within the cache?
#[test]
fn the_refill_ends_at_the_knee_of_the_curve() {
    let chase = [(MIB, 40.0), (3 * MIB, 1.0), (8 * MIB, 0.5), (16 * MIB, 0.0)];
    assert_eq!(refill_of(&chase), Some((3 * MIB / 64) as f64 * 100.0));
    assert_eq!(
        refill_of(&[(MIB, 40.0), (8 * MIB, 40.0), (16 * MIB, 0.0)]),
        Some(0.0),
        "a stream within this cache"
    );
    assert_eq!(refill_of(&[(MIB, 40.0)]), None, "one point is no curve");
}
