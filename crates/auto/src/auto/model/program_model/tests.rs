use super::*;
use cachemate_core::{CacheLevel, Estimate, FactSource};

pub const CACHE: f64 = 4_194_304.0;

/// A program with these misses per instruction by bytes, each costing 100 cycles, and one cycle for everything
/// else.
pub fn program_fixture(misses: impl Fn(f64) -> f64) -> ProgramModel {
    program_far(misses, MemoryDistance::default())
}

/// A stream whose misses cost 100 cycles on its present node.
pub fn far_from(memory: MemoryDistance) -> ProgramModel {
    program_far(|_| 0.015, memory)
}

fn inputs_of(
    profile: &Profile,
    speed: ObservedSpeed,
    penalty_cycles: Option<f64>,
    memory: MemoryDistance,
) -> ModelInputs<'_> {
    ModelInputs {
        profile,
        speed,
        goal: None,
        penalty_cycles,
        largest_cache_bytes: CACHE,
        line_bytes: 64.0,
        local_partner_share: 0.0,
        memory,
    }
}

fn program_far(misses: impl Fn(f64) -> f64, memory: MemoryDistance) -> ProgramModel {
    let curve: SizeCurve = (0..=64u64)
        .map(|step| {
            (
                step * 65_536,
                Estimate::exact(1000.0 * misses(step as f64 * 65_536.0)),
            )
        })
        .collect();
    let profile = Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle);
    let speed = ObservedSpeed {
        cycles_per_instr: 1.0 + 100.0 * misses(CACHE),
        misses_per_instr: Some(misses(CACHE)),
        stall_cycles_per_miss: Some(100.0),
        cpu_demand: 1.0,
        ..ObservedSpeed::default()
    };
    let inputs = inputs_of(&profile, speed, None, memory);
    ProgramModel::from_inputs(&inputs).unwrap()
}

fn counted(bytes: f64, misses_per_instr: f64) -> CountedSize {
    CountedSize {
        bytes,
        misses_per_instr,
    }
}

fn bounds(below: f64, above: f64) -> ErrorBounds {
    ErrorBounds { below, above }
}

/// A program whose references are to equally probable lines.
pub fn uniform_program(bytes: f64, per_instr: f64) -> ProgramModel {
    program_fixture(|bytes_held| per_instr * (1.0 - bytes_held / bytes).max(0.0))
}

/// Does the footprint of independent references grow as in theory, to `1 - 1/e` of the lines after as many
/// references as lines?
#[test]
fn footprints_of_independent_references_grow_as_in_theory() {
    let program = uniform_program(2_097_152.0, 0.02);
    let lines = 2_097_152.0 / 64.0;
    let footprint = |instructions: f64| program.footprint_near(instructions, &mut 0).0;
    let share = footprint(lines / 0.02) / 2_097_152.0;
    assert!((share - (1.0 - (-1.0f64).exp())).abs() < 0.01, "{share}");
    assert_eq!(footprint(0.0), 0.0);
    let mut last = 0;
    for instructions in [1e3, 1e30, 1e7, 0.0, 2e7, 1e6] {
        let growth = program.footprint_near(instructions, &mut last);
        assert_eq!(
            growth,
            program.footprint_near(instructions, &mut 0),
            "wherever it is sought from"
        );
    }
    assert!(footprint(1e30) <= CACHE);
}

/// Does a calibrated program have the occupancy that its misses imply, and a whole cache if it has the cache to
/// itself?
#[test]
fn misses_imply_the_occupancy() {
    let mut program = uniform_program(CACHE, 0.02);
    program.calibrate(0.25 * CACHE, CACHE, 0.01);
    let share = program.real_occupancy(0.25 * CACHE, CACHE) / CACHE;
    assert!((share - 0.5).abs() < 0.03, "{share}");
    assert_eq!(program.real_occupancy(CACHE, CACHE), CACHE);
    assert_eq!(program.real_occupancy(0.0, CACHE), 0.0);
    let mut stream = super::tests::program_fixture(|_| 0.01);
    stream.calibrate(0.25 * CACHE, CACHE, 0.02);
    assert_eq!(stream.odds_ratio, 1.0);
}

/// Does a count below all values of a curve contradict it, while one that less space explains does not?
#[test]
fn a_curve_of_other_work_is_contradicted() {
    let stream = program_fixture(|_| 0.008);
    assert!(stream.is_contradicted(CACHE, 0.005) && !stream.is_contradicted(CACHE, 0.0079));
    let reuser = uniform_program(0.5 * CACHE, 0.01);
    assert!(!reuser.is_contradicted(CACHE, 0.0) && !reuser.is_contradicted(CACHE, 0.01));
    assert!(
        reuser.is_contradicted(0.1 * CACHE, 0.004) && !reuser.is_contradicted(0.4 * CACHE, 0.004)
    );
}

/// Does the curve pass through counts, fall between them, and stay uncertain only beyond the largest counted size?
#[test]
fn a_curve_passes_through_counts() {
    let mut program = program_fixture(|bytes| if bytes < 0.2 * CACHE { 0.02 } else { 0.002 });
    program.pass_through(&[counted(0.25 * CACHE, 0.012), counted(0.5 * CACHE, 0.006)]);
    let misses_at = |share: f64| program.misses_at(share * CACHE);
    assert!((misses_at(0.25) - 0.012).abs() < 1e-9 && (misses_at(0.5) - 0.006).abs() < 1e-9);
    assert!((misses_at(0.375) - 0.009).abs() < 1e-9 && misses_at(0.1) > 0.029);
    assert!(misses_at(1.0) <= 0.006);
    assert_eq!(program.curve.errors[STEPS / 2], ErrorBounds::NONE);
    let reach = program.clone();
    program.pass_through(&[]);
    assert_eq!(program, reach);
}

/// Does a count on one side of a counted size correct the curve on that side only?
#[test]
fn a_counted_size_separates_the_errors_on_its_two_sides() {
    let mut program = program_fixture(|bytes| 0.02 * (1.0 - 0.9 * bytes / CACHE));
    program
        .curve
        .errors
        .iter_mut()
        .for_each(|error| *error = bounds(0.002, 0.002));
    program.pass_through(&[counted(0.5 * CACHE, 0.012)]);
    for (counted_share, other_side) in [(0.25, STEPS / 2..=STEPS), (0.75, 0..=STEPS / 2)] {
        let before = program.curve.misses.clone();
        program.shift_within_error(
            counted_share * CACHE,
            program.misses_at(counted_share * CACHE) - 0.001,
        );
        assert!(
            program.misses_at(counted_share * CACHE)
                < before[(counted_share * STEPS as f64) as usize]
        );
        assert_eq!(program.curve.misses[other_side.clone()], before[other_side]);
    }
}

/// Where the log did not reach, so that the curve's error is large, does a count within the log's reach move the curve
/// by no more than it differs?
#[test]
fn a_count_moves_no_point_by_more_than_its_difference() {
    let mut program = program_fixture(|bytes| 0.02 * (1.0 - 0.9 * bytes / CACHE));
    let reach_step = STEPS / 4;
    let rate_at_reach = program.curve.misses[reach_step];
    let curve = &mut program.curve;
    for (step, (rate, error)) in curve.misses.iter().zip(&mut curve.errors).enumerate() {
        *error = if step > reach_step {
            bounds(*rate, rate_at_reach - *rate)
        } else {
            bounds(0.0005, 0.0005)
        };
    }

    for difference in [-0.0003, 0.0003] {
        let mut shifted = program.clone();
        let counted_bytes = reach_step as f64 * program.step_bytes;
        shifted.shift_within_error(counted_bytes, rate_at_reach + difference);
        for share in [0.25, 0.5, 0.75, 1.0] {
            let moved = shifted.misses_at(share * CACHE) - program.misses_at(share * CACHE);
            assert!((moved - difference).abs() < 1e-9, "{share}: {moved}");
        }
    }
}

/// If more misses are counted than the log has at any size, does the curve pass through the count, and does its error
/// cover both that the others depend on space like the logged ones and that they do not?
#[test]
fn unlogged_misses_may_depend_on_space() {
    let mut program = program_fixture(|bytes| 0.01 * (1.0 - 0.9 * bytes / CACHE));
    let logged = program.curve.misses[1];
    program.add_unlogged_misses(logged, 0.03);
    assert!((program.misses_at(program.step_bytes) - 0.03).abs() < 1e-9);
    program.calibrate(0.5 * CACHE, CACHE, 0.03);
    assert!((program.misses_at(0.5 * CACHE) - 0.03).abs() < 1e-6);
    let (shifted, scaled) = (0.001 + 0.03 - 0.0055, 0.001 * 0.03 / 0.0055);
    let rate = program.misses_at(CACHE);
    let ErrorBounds { below, above } = program.curve.errors[STEPS];
    assert!((rate - 0.5 * (shifted + scaled)).abs() < 1e-6, "{rate}");
    assert!(
        rate - below < scaled + 1e-6 && rate + above > shifted - 1e-6,
        "{rate} {below} {above}"
    );
}

/// If a curve is wrong only beyond the reach of its log, is it corrected there and nowhere else, and is the
/// occupancy not corrected instead?
#[test]
fn a_curve_is_corrected_beyond_the_reach_of_its_log() {
    let truth = uniform_program(0.4 * CACHE, 0.02);
    // Known up to 0.3 of the cache; beyond that, the tail falls too slowly, and its error covers everything below.
    let known_bytes = 0.3 * CACHE;
    let logged = |bytes_held: f64| {
        if bytes_held <= known_bytes {
            truth.misses_at(bytes_held)
        } else {
            truth.misses_at(known_bytes) * known_bytes / bytes_held
        }
    };
    let mut calibrated = program_fixture(logged);
    for step in 0..=STEPS {
        if step as f64 * calibrated.step_bytes > known_bytes {
            calibrated.curve.errors[step] = bounds(
                calibrated.curve.misses[step],
                truth.misses_at(known_bytes) - calibrated.curve.misses[step],
            );
        }
    }
    let composed = 0.39 * CACHE;
    calibrated.calibrate(composed, CACHE, truth.misses_at(composed));
    assert!((calibrated.misses_at(composed) - truth.misses_at(composed)).abs() < 1e-6);
    assert!(
        calibrated.misses_at(0.5 * CACHE) < 0.2 * logged(0.5 * CACHE),
        "{}",
        calibrated.misses_at(0.5 * CACHE)
    );
    assert!(
        (calibrated.misses_at(0.25 * CACHE) / truth.misses_at(0.25 * CACHE) - 1.0).abs() < 0.02
    );
    assert_eq!(calibrated.odds_ratio, 1.0);
}

/// If more misses are counted than the curve beyond the reach of its log predicts, is a program with less space
/// forecast to miss as often as counted, and not more often?
#[test]
fn a_stream_misses_as_often_with_less_space() {
    let reach = 0.1 * CACHE;
    let logged = |bytes_held: f64| {
        if bytes_held <= reach {
            0.06
        } else {
            0.06 * reach / bytes_held * reach / bytes_held
        }
    };
    let mut calibrated = program_fixture(logged);
    for step in 0..=STEPS {
        if step as f64 * calibrated.step_bytes > reach {
            calibrated.curve.errors[step] = bounds(
                calibrated.curve.misses[step],
                0.06 - calibrated.curve.misses[step],
            );
        }
    }
    calibrated.calibrate(0.6 * CACHE, CACHE, 0.013);
    for share in [0.3, 0.4, 0.6] {
        let misses = calibrated.misses_at(share * CACHE);
        assert!((misses / 0.013 - 1.0).abs() < 0.05, "{share}: {misses}");
    }
    assert!(
        calibrated.misses_at(0.05 * CACHE) > 0.059,
        "what the log reached stays"
    );
    assert_eq!(calibrated.odds_ratio, 1.0);
}

/// If hardly any misses are counted although the log ended before the curve fell, is the program still forecast to
/// miss with little more space than the log has seen, and not beyond the space that it had?
#[test]
fn a_loop_larger_than_the_log_keeps_its_space() {
    let (reach, rate, count) = (0.05 * CACHE, 0.004, 4e-6);
    let curve: SizeCurve = (1..=16u64)
        .map(|step| {
            let bytes = step * CACHE as u64 / 16;
            let tail = 1000.0 * rate * (reach / bytes as f64).powf(0.1);
            let unknown = Estimate {
                value: tail,
                low: 0.0,
                high: 1000.0 * rate,
            };
            (bytes, unknown)
        })
        .collect();
    let profile = Profile::default().with_misses(CacheLevel::L3, curve, FactSource::MissTrace);
    let speed = ObservedSpeed {
        cycles_per_instr: 0.25,
        misses_per_instr: Some(count),
        references_per_instr: Some(0.08),
        stall_cycles_per_miss: Some(200.0),
        cpu_demand: 1.0,
        ..ObservedSpeed::default()
    };
    let inputs = inputs_of(&profile, speed, None, MemoryDistance::default());
    let mut program = ProgramModel::from_inputs(&inputs).unwrap();
    program.calibrate(0.6 * CACHE, CACHE, count);
    let slowdown = |share: f64| program.cycles_with_bytes(share * CACHE, 0.0, 0.0) / 0.25;
    assert!(slowdown(0.0625) > 3.0, "{}", slowdown(0.0625));
    assert!((slowdown(0.6) - 1.0).abs() < 0.02, "{}", slowdown(0.6));
}

/// Do cycles follow from the measurements, and does a task without a cost of misses have no model?
#[test]
fn cycles_follow_from_the_measurements() {
    let program = uniform_program(2_097_152.0, 0.02);
    assert!((program.solo_cycles(CACHE) - 1.0).abs() < 1e-9);
    assert!((program.cycles_with_bytes(1_048_576.0, 0.0, 0.0) - 2.0).abs() < 1e-6);
    assert!((program.cycles_with_bytes(1_048_576.0, 50.0, 0.0) - 2.5).abs() < 1e-6);
    let profile = Profile::default();
    let speed = ObservedSpeed::default();
    let inputs = inputs_of(&profile, speed, Some(100.0), MemoryDistance::default());
    assert_eq!(ProgramModel::from_inputs(&inputs), None);
}

/// If stalls are not counted, does a pointer chase pay the stated cost, and a stream whose misses overlap no more
/// than its measured cycles?
#[test]
fn overlapping_misses_cost_no_more_than_the_elapsed_time() {
    let model = |cycles_per_instr: f64, misses: f64| {
        let curve: SizeCurve = [0, CACHE as u64]
            .map(|bytes| (bytes, Estimate::exact(1000.0 * misses)))
            .to_vec();
        let profile = Profile::default().with_misses(CacheLevel::L3, curve, FactSource::Oracle);
        let speed = ObservedSpeed {
            cycles_per_instr,
            misses_per_instr: Some(misses),
            cpu_demand: 1.0,
            ..ObservedSpeed::default()
        };
        let inputs = inputs_of(&profile, speed, Some(200.0), MemoryDistance::default());
        ProgramModel::from_inputs(&inputs).unwrap()
    };
    let (chase, stream) = (model(60.0, 0.2), model(6.0, 0.25));
    assert!(
        (chase.cycles_per_miss - 200.0).abs() < 1e-9
            && (chase.solo_cycles(CACHE) - 60.0).abs() < 1e-9
    );
    assert!(
        (stream.cycles_per_miss - 21.6).abs() < 1e-9
            && (stream.solo_cycles(CACHE) - 6.0).abs() < 1e-9
    );
}

/// Is the cost of a miss split by node: less on the node of its memory, the same queue on all nodes, and no split
/// if distances are unknown?
#[test]
fn the_cost_of_a_miss_is_split_by_node_distance() {
    let near_and_far = |factors: &[f64], now: usize| {
        far_from(MemoryDistance {
            factors: factors.to_vec(),
            current_node: now,
        })
    };
    let costs = |model: &ProgramModel| {
        (
            model.cycles_per_miss,
            [0, 1, 2].map(|node| model.far_cycles(node)),
        )
    };
    assert_eq!(
        costs(&near_and_far(&[1.0, 2.0], 1)),
        (50.0, [0.0, 50.0, 0.0])
    );
    assert_eq!(
        costs(&near_and_far(&[1.0, 2.0], 0)),
        (100.0, [0.0, 100.0, 0.0])
    );
    assert_eq!(
        costs(&near_and_far(&[2.0, 0.0, 1.0], 0)),
        (50.0, [50.0, 0.0, 0.0])
    );
    assert_eq!(costs(&near_and_far(&[], 0)), (100.0, [0.0; 3]));
    let queued = MemoryDistance {
        factors: vec![1.0, 2.0],
        current_node: 1,
    }
    .split_cost(100.0, 40.0);
    assert_eq!(queued, (70.0, vec![0.0, 30.0]));
    // On the node of the measurement, the cost is the measured one.
    let (near_model, far_model) = (near_and_far(&[1.0, 2.0], 0), near_and_far(&[1.0, 2.0], 1));
    assert!(
        (far_model.cycles_with_bytes(CACHE, far_model.far_cycles(1), 0.0)
            - near_model.cycles_with_bytes(CACHE, 0.0, 0.0))
        .abs()
            < 1e-9
    );
}
