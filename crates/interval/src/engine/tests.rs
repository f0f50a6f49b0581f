use super::*;
use crate::closed_form;
use crate::program::{ProgramPhase, RegionUse};
pub(crate) use cachemate_core::test_support::cache_spec as cache;
use cachemate_core::test_support::{machine_spec, memory_spec};
use cachemate_core::{CacheLevel, CoherenceSpec, MemorySpec};

pub(crate) fn sample_machine(
    packages: u32,
    cores: u32,
    shared_by: u32,
    contexts: u32,
) -> MachineSpec {
    MachineSpec {
        hertz: 2_000_000_000,
        packages,
        cores_per_package: cores,
        contexts_per_core: contexts,
        pipeline: CoreModel::OutOfOrder {
            issue_width: 2,
            window: 64,
            mshrs: 8,
            loads_pass: false,
        },
        coherence: CoherenceSpec {
            same_package_cycles: Some(60),
            other_package_cycles: Some(240),
        },
        memory: MemorySpec {
            nodes: packages,
            remote_latency_cycles: 300,
            ..memory_spec(1 << 30, 200, 4.0)
        },
        ..machine_spec(vec![
            cache(CacheLevel::L1Instruction, 32 << 10, 8, 1),
            cache(CacheLevel::L1Data, 32 << 10, 8, 1),
            cache(CacheLevel::L2, 4 << 20, 16, shared_by),
        ])
    }
}

const LINES: f64 = 65_536.0;

fn uniform_phase(lines: f64, references: f64) -> ProgramPhase {
    closed_form::uniform_phase(64.0, LINES, lines, references)
}

fn sample_engine(explicit: bool) -> IntervalEngine {
    IntervalEngine::new(&sample_machine(1, 4, 2, 1), explicit).unwrap()
}

fn cpu_set(cpus: &[u32]) -> CpuSet {
    cpus.iter().copied().collect()
}

/// Does a program alone run exactly as its profile states, in cycles and in lines?
#[test]
fn a_program_alone_runs_as_its_profile_states() {
    let mut engine = sample_engine(false);
    let phase = uniform_phase(100_000.0, 0.02);
    let last = phase.points[phase.points.len() - 1];
    let program = engine.add_program(PhasedProgram::endless_program("one", phase));
    let slot = engine.start_task(program, cpu_set(&[0]));
    engine.run(4e9);
    let earlier = *engine.task_totals(slot);
    engine.run(8e9);
    let totals = engine.task_totals(slot);
    let instructions = totals.instructions - earlier.instructions;
    let cycles = 4e9 / instructions;
    assert!(
        (cycles / last.cycles_per_instr - 1.0).abs() < 2e-3,
        "{cycles} {}",
        last.cycles_per_instr
    );
    let misses = (totals.counts[DEMAND] - earlier.counts[DEMAND]) / instructions;
    assert!(
        (misses / last.demand_fills_per_instr - 1.0).abs() < 2e-3,
        "{misses}"
    );
    assert!((engine.occupied_bytes(slot, 0) / (LINES * 64.0) - 1.0).abs() < 1e-3);
}

/// Do two programs in one cache slow each other down, without an effect on programs in another cache?
#[test]
fn neighbors_in_a_cache_slow_each_other() {
    let speed = |cpus: &[u32]| {
        let mut engine = sample_engine(false);
        let program = engine.add_program(PhasedProgram::endless_program(
            "fits",
            uniform_phase(50_000.0, 0.02),
        ));
        let slots: Vec<u32> = cpus
            .iter()
            .map(|&cpu| engine.start_task(program, cpu_set(&[cpu])))
            .collect();
        engine.run(4e9);
        let instr_before = engine.task_totals(slots[0]).instructions;
        engine.run(8e9);
        engine.task_totals(slots[0]).instructions - instr_before
    };

    let (solo_instr, split_instr, shared_instr) = (speed(&[0]), speed(&[0, 2]), speed(&[0, 1]));
    assert!(
        (split_instr / solo_instr - 1.0).abs() < 0.01,
        "{split_instr} {solo_instr}"
    );
    assert!(
        shared_instr < 0.8 * solo_instr,
        "{shared_instr} {solo_instr}"
    );
}

/// Do phases change at the stated instructions, and does an endless program repeat?
#[test]
fn phases_change_at_the_stated_instructions() {
    let mut engine = sample_engine(false);
    let fast = ProgramPhase {
        instructions: Some(1e9),
        ..closed_form::build_phase(64.0, LINES, 4, |_| 0.0)
    };

    let slow = ProgramPhase {
        instructions: Some(1e9),
        ..closed_form::build_phase(64.0, LINES, 4, |_| 0.01)
    };
    let mut program = PhasedProgram {
        phases: vec![fast, slow],
        ..PhasedProgram::endless_program("two", uniform_phase(1000.0, 0.01))
    };
    program.repeats_from = Some(0);
    let round_cycles = 1e9 + 2e9;
    let number = engine.add_program(program);
    let slot = engine.start_task(number, cpu_set(&[0]));
    engine.run(1.001e9);
    assert_eq!(engine.phase_index(slot), 1);
    engine.run(round_cycles * 10.0);
    let instructions = engine.task_totals(slot).instructions;
    assert!((instructions / 2e10 - 1.0).abs() < 1e-3, "{instructions}");
}

/// Is a task in its present phase when it returns to a cache with lines of an earlier phase, although that phase
/// ended elsewhere?
#[test]
fn a_task_that_returns_to_old_lines_is_in_its_present_phase() {
    let mut engine = sample_engine(false);
    let slow = ProgramPhase {
        instructions: Some(2e9),
        ..closed_form::build_phase(64.0, LINES, 4, |_| 0.01)
    };
    let fast = closed_form::build_phase(64.0, LINES, 4, |_| 0.0);
    let number = engine.add_program(PhasedProgram {
        phases: vec![slow, fast],
        ..PhasedProgram::endless_program("two", uniform_phase(1e3, 0.01))
    });
    let slot = engine.start_task(number, cpu_set(&[0]));
    engine.run(1e9);
    engine.run_queues.set_allowed_cpus(slot, cpu_set(&[2]));
    engine.run(1e10);
    assert_eq!(engine.phase_index(slot), 1);

    let speed = |engine: &mut IntervalEngine| {
        let (instr_before, now) = (engine.task_totals(slot).instructions, engine.now_cycles());
        engine.run(now + 1e9);
        engine.task_totals(slot).instructions - instr_before
    };
    let speed_there = speed(&mut engine);
    engine.run_queues.set_allowed_cpus(slot, cpu_set(&[0]));
    let speed_back = speed(&mut engine);
    assert!(
        (speed_back / speed_there - 1.0).abs() < 1e-3,
        "{speed_back} after {speed_there}"
    );
}

/// Is the end of a program reported at its cycle, and is its slot then free again?
#[test]
fn ended_programs_are_reported_and_their_slots_freed() {
    let mut engine = sample_engine(false);
    let phase = ProgramPhase {
        instructions: Some(2e9),
        ..closed_form::build_phase(64.0, LINES, 4, |_| 0.0)
    };
    let program = PhasedProgram {
        phases: vec![phase],
        ..PhasedProgram::endless_program("ends", uniform_phase(1000.0, 0.01))
    };
    let number = engine.add_program(program);
    let slot = engine.start_task(number, cpu_set(&[0, 1]));
    engine.run(1e10);
    assert_eq!(std::mem::take(&mut engine.ended_slots), [slot]);
    assert!(
        (engine.now_cycles() / 2e9 - 1.0).abs() < 1e-3,
        "{}",
        engine.now_cycles()
    );
    engine.remove_task(slot);
    assert_eq!(engine.start_task(number, cpu_set(&[3])), slot);
}

/// Do streams on one node share its bandwidth, whichever cache they are in?
#[test]
fn streams_in_different_caches_share_a_nodes_bandwidth() {
    let mut engine = sample_engine(false);
    let mut phase = closed_form::stream_phase(64.0, LINES, 0.05);
    phase.points[0].cycles_per_instr = 1.0;
    phase.points[0].memory_stall_cycles_per_instr = 0.2;
    let program = engine.add_program(PhasedProgram::endless_program("stream", phase));
    let slots: Vec<u32> = (0..4)
        .map(|cpu| engine.start_task(program, cpu_set(&[cpu])))
        .collect();

    engine.run(4e9);
    let instr_before: Vec<f64> = slots
        .iter()
        .map(|&slot| engine.task_totals(slot).instructions)
        .collect();
    engine.run(8e9);
    let lines = |(slot, earlier): (&u32, &f64)| {
        0.05 * (engine.task_totals(*slot).instructions - earlier) / 4e9
    };
    let bytes: f64 = slots.iter().zip(&instr_before).map(lines).sum::<f64>() * 64.0;
    assert!((3.6..=4.02).contains(&bytes), "{bytes} bytes a cycle of 4");
}

/// Do averaged and explicit turns agree if turns are short compared with the cache's turnover?
#[test]
fn averaged_and_explicit_turns_agree_if_turns_are_short() {
    let run = |explicit: bool| {
        let mut spec = sample_machine(1, 4, 2, 1);
        spec.os.time_slice_ns = 1_000_000;
        let mut engine = IntervalEngine::new(&spec, explicit).unwrap();
        let a = engine.add_program(PhasedProgram::endless_program(
            "a",
            uniform_phase(50_000.0, 0.01),
        ));
        let b = engine.add_program(PhasedProgram::endless_program(
            "b",
            uniform_phase(90_000.0, 0.005),
        ));
        let slots: Vec<u32> = [a, b, a, b, a]
            .iter()
            .map(|&program| engine.start_task(program, cpu_set(&[0, 1])))
            .collect();

        engine.run(2e9);
        let instr_before: Vec<f64> = slots
            .iter()
            .map(|&slot| engine.task_totals(slot).instructions)
            .collect();
        engine.run(6e9);
        let total: f64 = slots
            .iter()
            .zip(&instr_before)
            .map(|(&slot, earlier)| engine.task_totals(slot).instructions - earlier)
            .sum();
        total
    };

    let (explicit, averaged) = (run(true), run(false));
    assert!(
        (explicit / averaged - 1.0).abs() < 0.03,
        "{explicit} {averaged}"
    );
}

/// Does a newcomer refill a cache in the time that its growth implies, while the earlier task slows down?
#[test]
fn a_migration_costs_the_refill_and_nothing_else() {
    let mut engine = sample_engine(false);
    let program = engine.add_program(PhasedProgram::endless_program(
        "mover",
        uniform_phase(40_000.0, 0.02),
    ));
    let slot = engine.start_task(program, cpu_set(&[0]));
    engine.run(2e9);
    let instr_before = engine.task_totals(slot).instructions;
    engine.run(3e9);
    let speed = (engine.task_totals(slot).instructions - instr_before) / 1e9;
    engine.run_queues.set_allowed_cpus(slot, cpu_set(&[2]));
    let instr_before = engine.task_totals(slot).instructions;
    engine.run(4e9);
    let lost_instr = speed * 1e9 - (engine.task_totals(slot).instructions - instr_before);

    // It misses each of its lines once more, and each miss waits 100 cycles; at its usual speed it does this much work.
    let expected = 40_000.0 * 100.0 * speed;
    assert!(engine.step_count < 300, "{} steps", engine.step_count);
    assert!(
        (lost_instr / expected - 1.0).abs() < 0.08,
        "{lost_instr} {expected}"
    );
    assert!(
        engine.occupied_bytes(slot, 0) > 0.9 * 40_000.0 * 64.0,
        "its old lines stay while nobody needs the room"
    );
}

/// Do writers of a region slow each other down if they run in different caches, but not if they share one cache?
#[test]
fn sharing_across_caches_costs_and_within_one_does_not() {
    let run = |cpus: [u32; 2]| {
        let mut engine = sample_engine(false);
        let mut phase = uniform_phase(1000.0, 0.01);
        phase.sharing = vec![RegionUse {
            region: 3,
            bytes: 4096.0,
            reads_per_instr: 0.01,
            writes_per_instr: 0.005,
        }];
        let program = engine.add_program(PhasedProgram::endless_program("talks", phase));
        let slots = cpus.map(|cpu| engine.start_task(program, cpu_set(&[cpu])));
        engine.run(2e9);
        (
            engine.task_totals(slots[0]).instructions,
            engine.task_totals(slots[0]).counts[REMOTE_HITS],
        )
    };
    let (shared_counts, split_counts) = (run([0, 1]), run([0, 2]));
    assert_eq!(shared_counts.1, 0.0);

    // Reads: writes elsewhere over all accesses, 5 of 20; writes: 15 of 20.
    let expected = 0.01 * 0.25 + 0.005 * 0.75;
    assert!(
        (split_counts.1 / split_counts.0 / expected - 1.0).abs() < 0.02,
        "{} {expected}",
        split_counts.1 / split_counts.0
    );
    assert!(split_counts.0 < 0.9 * shared_counts.0);
}

/// Does a program whose profile begins with an empty cache run as profiled, while a program with another profile
/// first misses the lines that it lacks?
#[test]
fn first_touches_that_are_in_the_profile_are_not_counted_twice() {
    let cycles = |from_empty_cache: bool| {
        let mut engine = sample_engine(false);
        let program = PhasedProgram {
            from_empty_cache,
            ..PhasedProgram::endless_program("a", uniform_phase(40_000.0, 0.02))
        };
        let program = engine.add_program(program);
        let slot = engine.start_task(program, cpu_set(&[0]));
        engine.run(2e6);
        2e6 / engine.task_totals(slot).instructions
    };
    assert!((cycles(true) - 1.0).abs() < 0.01, "{}", cycles(true));
    assert!(cycles(false) > 1.5, "{}", cycles(false));
}

/// Do contexts of one core share its slots, and does a machine with one context never wait for slots?
#[test]
fn contexts_of_one_core_share_its_slots() {
    let run = |count: u32| {
        let mut engine = IntervalEngine::new(&sample_machine(1, 2, 2, 2), false).unwrap();
        let quick = closed_form::build_phase(64.0, LINES, 4, |_| 0.0);
        let mut quick = quick;
        quick
            .points
            .iter_mut()
            .for_each(|point| point.cycles_per_instr = 0.6);

        let program = engine.add_program(PhasedProgram::endless_program("quick", quick));
        let slots: Vec<u32> = (0..count)
            .map(|cpu| engine.start_task(program, cpu_set(&[cpu])))
            .collect();
        engine.run(1e9);
        let total: f64 = slots
            .iter()
            .map(|&slot| engine.task_totals(slot).instructions)
            .sum();
        total / 1e9
    };

    let (one, two) = (run(1), run(2));
    assert!((one - 1.0 / 0.6).abs() < 1e-3, "{one}");
    assert!(
        (1.85..=2.001).contains(&two),
        "a core issues two a cycle: {two}"
    );
}

/// Do the same calls give the same bits?
#[test]
fn the_same_calls_give_the_same_bits() {
    let run = || {
        let mut engine = sample_engine(true);
        let program = engine.add_program(PhasedProgram::endless_program(
            "a",
            uniform_phase(90_000.0, 0.02),
        ));
        let slots: Vec<u32> = (0..6)
            .map(|_| engine.start_task(program, cpu_set(&[0, 1, 2, 3])))
            .collect();
        engine.run(3e9);
        slots
            .iter()
            .map(|&slot| engine.task_totals(slot).instructions.to_bits())
            .collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
}
