//! Cores: how well contexts fill the pipeline.

use super::*;

/// Rounds of instructions that take `busy` cycles together (one of them is the load that misses), each followed by a
/// wait for memory.
fn busy_then_miss(rounds: u64, busy: impl Fn(u64) -> u64, first_line: u64) -> Vec<Access> {
    let round = |nth: u64| {
        let gap = busy(nth).max(1) - 1;
        let load = Access::load((first_line + nth) % 60_000 * 64 * 5, gap.min(8000) as u32);
        (gap > 8000)
            .then(|| Access::compute(gap - 8000))
            .into_iter()
            .chain([load])
    };
    (0..rounds).flat_map(round).collect()
}

fn measure_utilization(contexts: u32, apart_cycles: u64, busy: impl Fn(u32, u64) -> u64) -> f64 {
    let mut spec = sample_machine();
    spec.contexts_per_core = contexts;
    let mut hw = build_hardware(&spec);
    for cpu in 0..contexts {
        let rounds = busy_then_miss(20_000, |nth| busy(cpu, nth), u64::from(cpu) * 14_000);
        hw.load(
            CpuId(cpu),
            scripted_thread(cpu, 0, rounds, true),
            u64::from(cpu) * apart_cycles,
        );
    }
    let cycles = 4_000_000;
    finish(&mut hw, cycles);
    let issued: u64 = (0..contexts)
        .map(|cpu| hw.cpu_counters(CpuId(cpu)).instructions)
        .sum();
    issued as f64 / cycles as f64
}

/// Do four threads that are busy 20 % of the time fill 80 % of the pipeline when they interleave (CASC, Figure 1)?
#[test]
fn fixed_times_interleaved_give_the_sum_of_busy_times() {
    // Busy 50 cycles, the last one the load; its data is there 200 cycles after it was issued, 199 after it ended.
    let single = measure_utilization(1, 0, |_, _| 50);
    assert!((single - 50.0 / 249.0).abs() < 0.001, "{single}");
    let four = measure_utilization(4, 62, |_, _| 50);
    assert!((four - 200.0 / 249.0).abs() < 0.005, "{four}");
}

/// Do exponential busy times reach the machine-repairman model's utilization for fixed waits? (The model needs only one
/// of the two to be exponential: with processor sharing or first come, first served at one server, the waits'
/// distribution does not matter.)
#[test]
fn exponential_times_give_the_machine_repairman_model() {
    let exponential = |cpu: u32, nth: u64| {
        let mut dice = TestRng::new(u64::from(cpu) << 32 | nth);
        (-f64::ln(dice.unit()) * 50.0 + 0.5) as u64
    };
    let four = measure_utilization(4, 0, exponential);
    // p0 = 1 / sum over n of 4!/(4-n)! (1/4)^n; busy = 1 - p0 = 0.689.
    let theory = {
        let terms = [1.0, 4.0 * 0.25, 12.0 * 0.0625, 24.0 / 64.0, 24.0 / 256.0];
        1.0 - 1.0 / terms.iter().sum::<f64>()
    };
    assert!((theory - 0.689_f64).abs() < 0.001);
    assert!((four - theory).abs() < 0.01, "{four} for {theory}");
}

/// Out of order, do independent misses overlap up to the miss registers, and dependent ones not at all?
#[test]
fn independent_misses_overlap_and_dependent_ones_do_not() {
    let measure_cycles = |mshrs: u32, window: u32, dependent: bool| {
        let mut spec = sample_machine();
        spec.pipeline = CoreModel::OutOfOrder {
            issue_width: 1,
            window,
            mshrs,
            loads_pass: true,
        };
        let load = |line: u64| Access::new(AccessKind::Load, line * 64 * 5, 0, dependent);
        let (_, thread) = run_thread(
            build_hardware(&spec),
            (0..5_000).map(load).collect(),
            false,
            100_000_000,
        );
        thread.counters.cycles() as f64 / 5_000.0
    };
    let assert_near = |found: f64, expected: f64| {
        assert!(
            (found / expected - 1.0).abs() < 0.05,
            "{found} for {expected}"
        )
    };
    assert_near(measure_cycles(8, 512, true), 200.0);
    assert_near(measure_cycles(8, 512, false), 200.0 / 8.0);
    assert_near(measure_cycles(16, 512, false), 200.0 / 16.0);
    // Four instructions in flight: four misses.
    assert_near(measure_cycles(64, 4, false), 200.0 / 4.0);
}

/// Do two contexts share the window and the issue width of an SMT core?
#[test]
fn contexts_share_issue_width_and_window() {
    let measure_ipc = |contexts: u32, accesses: Vec<Access>| {
        let mut spec = sample_machine();
        spec.contexts_per_core = 2;
        spec.pipeline = CoreModel::OutOfOrder {
            issue_width: 4,
            window: 8,
            mshrs: 64,
            loads_pass: true,
        };
        let mut hw = build_hardware(&spec);
        for cpu in 0..contexts {
            hw.load(
                CpuId(cpu),
                scripted_thread(cpu, 0, accesses.clone(), true),
                0,
            );
        }
        let (threads, _) = finish(&mut hw, 200_000);
        threads
            .iter()
            .for_each(|thread| assert_balanced(&thread.counters));
        threads
            .iter()
            .map(|thread| thread.counters.instructions as f64 / 200_000.0)
            .collect::<Vec<_>>()
    };
    let compute = vec![Access::compute(1000)];
    assert!((measure_ipc(1, compute.clone())[0] - 4.0).abs() < 0.01);
    let both = measure_ipc(2, compute);
    assert!(
        (both[0] - 2.0).abs() < 0.01 && (both[1] - 2.0).abs() < 0.01,
        "{both:?}"
    );
    let misses: Vec<Access> = (0..50_000)
        .map(|line| Access::load(line * 320, 0))
        .collect();
    let (one, two) = (measure_ipc(1, misses.clone())[0], measure_ipc(2, misses)[0]);
    assert!(
        (one / two - 2.0).abs() < 0.1,
        "half the window each: {one} and {two}"
    );
}

/// Does code larger than the L1 instruction cache stall the front end, while code that fits does not?
#[test]
fn a_code_footprint_beyond_the_instruction_cache_stalls() {
    let run_functions = |functions: u64| {
        let mut spec = sample_machine();
        spec.caches.insert(
            0,
            CacheSpec {
                ..sample_cache(CacheLevel::L1Instruction, 2 << 10, 4, 1, 1)
            },
        );
        let calls = (0..functions)
            .map(|index| Access::jump((1 << 20) + index * 256, 64))
            .collect();
        let (_, thread) = run_endless(&spec, calls, 2_000_000);
        let l1i = thread.counters.levels[CacheLevel::L1Instruction as usize];
        assert!(l1i.references > 5_000);
        (
            l1i.all_misses() as f64 / l1i.references as f64,
            thread.counters.instructions as f64 / 2_000_000.0,
        )
    };
    let (few, fast) = run_functions(6);
    let (many, slow) = run_functions(24);
    assert!(few < 0.01 && fast > 0.95, "{few} {fast}");
    assert!(
        many > 0.99 && (slow - 16.0 / 30.0).abs() < 0.02,
        "{many} {slow}: 16 instructions, 14 cycles of L2"
    );
}
