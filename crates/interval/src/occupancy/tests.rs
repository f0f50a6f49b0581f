use super::*;
use crate::closed_form;
use crate::program::ProgramPhase;

const LINES: f64 = 4096.0;

/// Takes steps of a quarter of a turnover until nothing changes.
fn settle(flow: &mut OccupancyModel, curves: &PhaseCurves, rates: &[f64]) {
    for _ in 0..400 {
        flow.rate.copy_from_slice(rates);
        let step = 0.25 * flow.turnover_cycles(curves).min(1e12);
        flow.advance(flow.advanced_to + step, curves);
    }
}

fn flow_with(phases: &[ProgramPhase]) -> (OccupancyModel, PhaseCurves) {
    let mut curves = PhaseCurves::new(LINES);
    let mut flow = OccupancyModel::new(LINES as f32, ReplacementPolicy::Lru);
    for (task, phase) in phases.iter().enumerate() {
        let curve = curves.add(phase, 64.0, 200.0);
        flow.add_task(task as u32, curve, 0.0);
    }
    (flow, curves)
}

/// Lines of each program, from an exact fully associative LRU list; programs reference their lines
/// at random.
fn simulated_lines(lines: &[usize], weights: &[f64], capacity: usize) -> Vec<f64> {
    let total: usize = lines.iter().sum();
    let (mut stamp, mut state) = (vec![0u64; total], 88_172_645_463_325_252u64);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let total_weight: f64 = weights.iter().sum();
    let mut shares = vec![0.0; lines.len()];
    let (rounds, ticks) = (60u64, 20_000u64);

    for round in 1..=rounds {
        for tick in 0..ticks {
            let (mut pick, mut user) = (next() * total_weight, 0);
            while pick >= weights[user] && user + 1 < weights.len() {
                pick -= weights[user];
                user += 1;
            }
            let first: usize = lines[..user].iter().sum();
            let line = first + (next() * lines[user] as f64) as usize;
            stamp[line] = round * ticks + tick + 1;
        }

        if round > rounds / 3 {
            // An LRU cache holds the `capacity` lines that were touched last.
            let mut order: Vec<usize> = (0..total).filter(|&line| stamp[line] > 0).collect();
            order.sort_unstable_by_key(|&line| std::cmp::Reverse(stamp[line]));
            for &line in order.iter().take(capacity) {
                let user = (0..lines.len())
                    .find(|&candidate| line < lines[..=candidate].iter().sum())
                    .unwrap();
                shares[user] += 1.0 / (rounds - rounds / 3) as f64;
            }
        }
    }

    shares
}

/// Do independent programs occupy an LRU cache as in an exact simulation?
#[test]
fn independent_programs_occupy_lru_as_in_an_exact_simulation() {
    let cases: [(&[usize], &[f64]); 4] = [
        (&[6000, 6000], &[1.0, 1.0]),
        (&[6000, 6000], &[3.0, 1.0]),
        (&[2000, 12_000], &[1.0, 1.0]),
        (&[1500, 5000, 9000], &[1.0, 4.0, 0.5]),
    ];

    for (lines, weights) in cases {
        let phases: Vec<ProgramPhase> = lines
            .iter()
            .map(|&line_count| closed_form::uniform_phase(64.0, LINES, line_count as f64, 0.1))
            .collect();
        let (mut flow, curves) = flow_with(&phases);
        settle(&mut flow, &curves, weights);
        let expected = simulated_lines(lines, weights, LINES as usize);
        for (found, expected) in flow.lines.iter().zip(&expected) {
            let error = (f64::from(*found) - expected).abs() / LINES;
            assert!(
                error < 0.015,
                "{lines:?} {weights:?}: {:?}, exactly {expected}",
                flow.lines
            );
        }
        assert!((f64::from(flow.occupied_lines()) / LINES - 1.0).abs() < 1e-3);
    }
}

/// Do streams share an LRU cache, and a random one, in proportion to their rates?
#[test]
fn streams_share_a_cache_in_proportion_to_their_rates() {
    for replacement in [ReplacementPolicy::Lru, ReplacementPolicy::Random] {
        let (mut flow, curves) = flow_with(&[
            closed_form::stream_phase(64.0, LINES, 0.02),
            closed_form::stream_phase(64.0, LINES, 0.01),
        ]);
        flow.is_random = replacement == ReplacementPolicy::Random;
        settle(&mut flow, &curves, &[1.0, 1.0]);
        assert!(
            (f64::from(flow.lines[0]) / LINES - 2.0 / 3.0).abs() < 0.005,
            "{replacement:?} {:?}",
            flow.lines
        );
    }
}

/// Under random replacement, is the occupancy of each program its share of all fills (the closed-form fixed point)?
#[test]
fn occupancies_under_random_replacement_are_shares_of_fills() {
    let phases = [
        closed_form::uniform_phase(64.0, LINES, 6000.0, 0.1),
        closed_form::uniform_phase(64.0, LINES, 3000.0, 0.1),
    ];
    let (mut flow, curves) = flow_with(&phases);
    flow.is_random = true;
    settle(&mut flow, &curves, &[1.0, 1.0]);
    let fills = |lines: f64, own_lines: f64| 0.1 * (1.0 - lines / own_lines);
    let (a, b) = (
        fills(f64::from(flow.lines[0]), 6000.0),
        fills(f64::from(flow.lines[1]), 3000.0),
    );
    assert!(
        (f64::from(flow.lines[0]) / LINES - a / (a + b)).abs() < 0.01,
        "{:?}",
        flow.lines
    );
}

/// Does a task in its own partition have the occupancy of a cache of that size, whatever its co-runners?
#[test]
fn a_partition_behaves_as_a_cache_of_its_size() {
    let stream = closed_form::stream_phase(64.0, LINES, 0.05);
    for ways in [1, 4, 12] {
        let part = (LINES / 16.0 * f64::from(ways)) as f32;
        let (mut flow, curves) = flow_with(&[
            closed_form::uniform_phase(64.0, LINES, 8000.0, 0.1),
            stream.clone(),
        ]);
        let other_part = LINES as f32 - part;
        flow.divide(&[(part, 0), (other_part, 1)], &[part, other_part], |task| {
            task as u8
        });
        settle(&mut flow, &curves, &[1.0, 5.0]);
        assert!(
            (flow.lines[0] / part - 1.0).abs() < 2e-3,
            "{ways}: {:?}",
            flow.lines
        );
        let solo_demand = curves.rates_at(0, part, 0.0).demand_per_instr;
        let rate = curves.rates_at(0, flow.lines[0], 0.0).demand_per_instr;
        assert!(
            (rate / solo_demand - 1.0).abs() < 0.01,
            "{ways} ways: {rate}, alone {solo_demand}"
        );
    }
}

/// Does a newcomer's refill take the time that the growth of its footprint implies, in small steps and in growing ones?
#[test]
fn a_refill_takes_as_long_as_the_footprint_grows() {
    let (own_lines, references) = (3000.0, 0.05);

    for first_step in [1.0 / 256.0, 1.0 / 32.0] {
        let stream = closed_form::stream_phase(64.0, LINES, 0.001);
        let (mut flow, curves) = flow_with(&[
            stream,
            closed_form::uniform_phase(64.0, LINES, own_lines, references),
        ]);
        flow.stop_task(1);
        settle(&mut flow, &curves, &[1.0, 0.0]);
        assert!(flow.lines[1] < 1.0 && f64::from(flow.lines[0]) > 0.99 * LINES);
        flow.is_running[1] = true;
        let (began, mut half) = (flow.advanced_to, 0.0);
        let mut step = first_step * LINES / references;
        while f64::from(flow.lines[1]) < 0.5 * own_lines {
            flow.rate[1] = 1.0;
            let earlier = (flow.advanced_to, f64::from(flow.lines[1]));
            flow.advance(flow.advanced_to + step, &curves);
            let share = (0.5 * own_lines - earlier.1) / (f64::from(flow.lines[1]) - earlier.1);
            half = earlier.0 + share * step - began;
            step *= 1.3;
        }
        let expected = own_lines / references * std::f64::consts::LN_2;
        assert!(
            (half / expected - 1.0).abs() < 0.05,
            "{first_step}: {half}, {expected}"
        );
    }
}

/// Does a returning program find those of its lines that are still resident, and is its entry removed once all of
/// them have been evicted?
#[test]
fn a_returning_program_finds_its_lines_that_are_still_resident() {
    let (mut flow, curves) = flow_with(&[
        closed_form::uniform_phase(64.0, LINES, 4000.0, 0.1),
        closed_form::stream_phase(64.0, LINES, 0.01),
    ]);
    settle(&mut flow, &curves, &[1.0, 0.1]);
    let lines_before = flow.lines[0];
    flow.stop_task(0);
    flow.rate[1] = 0.1;
    flow.advance(flow.advanced_to + 0.1 * LINES / 0.001, &curves);
    let lines = flow.lines[0];
    assert!(
        lines < lines_before && lines > 0.5 * lines_before,
        "{lines} of {lines_before}"
    );
    assert_eq!(flow.add_task(0, 0, flow.advanced_to), 0);
    assert_eq!(flow.lines[0], lines);
    flow.stop_task(0);
    settle(&mut flow, &curves, &[0.0, 0.1]);
    let mut moves = Vec::new();
    flow.remove_empty_entries(|task, at| moves.push((task, at)));
    assert_eq!((flow.len(), moves), (1, vec![(1, 0)]));
}

/// Is the result independent of the length of steps once rates are steady?
#[test]
fn steps_of_any_length_end_in_the_same_state() {
    let phases = [
        closed_form::uniform_phase(64.0, LINES, 6000.0, 0.1),
        closed_form::uniform_phase(64.0, LINES, 20_000.0, 0.1),
    ];
    let ends: Vec<f32> = [1e-2, 1.0, 100.0, 1e6]
        .into_iter()
        .map(|turnovers| {
            let (mut flow, curves) = flow_with(&phases);
            flow.rate.copy_from_slice(&[1.0, 2.0]);
            for _ in 0..(40.0 / turnovers) as usize + 3 {
                flow.advance(flow.advanced_to + turnovers * LINES / 0.3, &curves);
            }
            flow.lines[0]
        })
        .collect();

    assert!(
        ends.iter()
            .all(|lines| (lines / ends[0] - 1.0).abs() < 0.01),
        "{ends:?}"
    );
}

/// If one user's partition lies inside the shared one, is the user confined to it, while the others use the rest and
/// the partition's free space?
#[test]
fn a_partition_inside_a_shared_one_confines_its_user_only() {
    let stream = || closed_form::stream_phase(64.0, LINES, 0.05);

    for (references, holds) in [(0.1, 1024.0), (0.000_01, 0.0)] {
        let (mut flow, curves) = flow_with(&[
            closed_form::uniform_phase(64.0, LINES, 8000.0, references),
            stream(),
            stream(),
        ]);
        flow.divide(&[(1024.0, 0), (LINES as f32, 0)], &[LINES as f32], |task| {
            u8::from(task > 0)
        });
        settle(&mut flow, &curves, &[1.0, 1.0, 1.0]);
        let lines = f64::from(flow.lines[0]);
        assert!(
            if holds > 0.0 {
                (lines / holds - 1.0).abs() < 0.01
            } else {
                lines < 10.0
            },
            "{:?}",
            flow.lines
        );
        assert!(
            (f64::from(flow.lines[1]) * 2.0 + lines - LINES).abs() < 0.005 * LINES,
            "{:?}",
            flow.lines
        );
    }
}

/// Does a program with several identical phases have the same occupancy as with one phase, however short the phases
/// are?
#[test]
fn identical_phases_occupy_as_much_as_one_phase() {
    let own_phase = || closed_form::uniform_phase(64.0, LINES, 6000.0, 0.1);
    let (mut cache, curves) =
        flow_with(&[own_phase(), closed_form::stream_phase(64.0, LINES, 0.05)]);
    settle(&mut cache, &curves, &[1.0, 1.0]);

    for phases_per_turnover in [0.5, 4.0, 40.0] {
        let (mut flow, mut curves) =
            flow_with(&[own_phase(), closed_form::stream_phase(64.0, LINES, 0.05)]);
        let other_curve = curves.add(&own_phase(), 64.0, 200.0);
        let length = LINES / 0.1 / phases_per_turnover;
        for number in 0..(20.0 * phases_per_turnover) as u32 {
            for _ in 0..8 {
                flow.rate.copy_from_slice(&[1.0, 1.0]);
                flow.advance(flow.advanced_to + length / 8.0, &curves);
            }
            flow.start_phase(
                0,
                if number % 2 == 0 { other_curve } else { 0 },
                1.0,
                &curves,
            );
        }
        let error = (flow.lines[0] / cache.lines[0] - 1.0).abs();
        assert!(
            error < 0.04,
            "{phases_per_turnover}: {:?}, one phase {:?}",
            flow.lines,
            cache.lines
        );
    }
}

/// Does a phase that uses little lose the lines of an earlier one, once a neighbor has filled the rest of the cache?
#[test]
fn a_phase_that_uses_little_loses_an_earlier_phases_lines() {
    let (mut flow, mut curves) = flow_with(&[
        closed_form::uniform_phase(64.0, LINES, 3500.0, 0.1),
        closed_form::stream_phase(64.0, LINES, 0.05),
    ]);
    let small = curves.add(
        &closed_form::uniform_phase(64.0, LINES, 500.0, 0.1),
        64.0,
        200.0,
    );
    settle(&mut flow, &curves, &[1.0, 0.2]);
    let occupancy = flow.lines[0];
    assert!(occupancy > 3000.0, "{occupancy}");
    flow.start_phase(0, small, 1.0, &curves);
    let mut shown = Vec::new();
    for _ in 0..12 {
        flow.rate.copy_from_slice(&[1.0, 0.2]);
        flow.advance(flow.advanced_to + LINES / 0.01 / 10.0, &curves);
        shown.push(flow.lines[0]);
    }
    assert!(
        shown[0] > 0.7 * occupancy && shown.is_sorted_by(|a, b| a >= b),
        "not at once, and never more: {shown:?}"
    );
    assert!(
        (shown[11] - 500.0).abs() < 25.0,
        "its own working set stays: {shown:?}"
    );
    assert!(
        (shown[11] + flow.lines[1] - LINES as f32).abs() < 5.0,
        "{:?}",
        flow.lines
    );
}
