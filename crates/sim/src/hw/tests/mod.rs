//! Tests of the hardware, and their shared helpers.

mod coherence;
mod memory;
mod pipeline;
mod probes;
mod replacement;
mod step;

use cachemate_core::test_support::{machine_spec, memory_spec};
use cachemate_core::*;

use super::*;

/// A machine for tests to modify: one package, one core with one context, 1-tick cycles, L1 1 KB 4-way, L2 8 KB 8-way.
pub(crate) fn sample_machine() -> MachineSpec {
    MachineSpec {
        memory: memory_spec(1 << 28, 200, 1e6),
        pages: PageSpec {
            fault_cycles: 0,
            ..PageSpec::default()
        },
        ..machine_spec(vec![
            sample_cache(CacheLevel::L1Data, 1 << 10, 4, 3, 1),
            sample_cache(CacheLevel::L2, 8 << 10, 8, 14, 1),
        ])
    }
}

pub(crate) fn sample_cache(
    level: CacheLevel,
    size_bytes: u64,
    ways: u32,
    latency_cycles: u32,
    shared_by_cores: u32,
) -> CacheSpec {
    CacheSpec {
        latency_cycles,
        ..cachemate_core::test_support::cache_spec(level, size_bytes, ways, shared_by_cores)
    }
}

/// Plays accesses once, or forever.
pub(crate) struct AccessScript {
    pub accesses: Vec<Access>,
    pub endless: bool,
}

impl AccessSource for AccessScript {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        batch.extend_from_slice(&self.accesses);
        if self.endless {
            BatchEnd::More
        } else {
            BatchEnd::Exit
        }
    }
}

/// Frames whose numbers equal the page numbers; the processes are 4096 pages apart.
pub(crate) struct IdentityFrames;

impl FrameProvider for IdentityFrames {
    fn find_frame(
        &mut self,
        process: ProcessId,
        page: u64,
        _cpu: CpuId,
        _store: bool,
    ) -> FrameLookup {
        FrameLookup {
            frame: page + 4096 * u64::from(process.0),
            cost_cycles: 0,
            is_copied: false,
        }
    }
}

pub(crate) fn scripted_thread(
    task: u32,
    process: u32,
    accesses: Vec<Access>,
    endless: bool,
) -> HwThread {
    HwThread::new(
        TaskId(task),
        ProcessId(process),
        0,
        Box::new(AccessScript { accesses, endless }),
    )
}

pub(crate) fn build_hardware(spec: &MachineSpec) -> Hardware {
    Hardware::new(spec, HwOptions::default()).unwrap()
}

/// Runs every thread to its exit (endless ones for `cycles`). Returns the threads by CPU, and the time at which the
/// last one ended.
pub(crate) fn finish(hw: &mut Hardware, cycles: u64) -> (Vec<HwThread>, u64) {
    let mut threads = Vec::new();
    let mut last = 0;
    loop {
        match hw.run(cycles, &mut IdentityFrames) {
            StopReason::BatchEnd {
                cpu,
                batch_end: BatchEnd::Exit,
                end_cycle: at_cycle,
            } => {
                last = at_cycle;
                threads.extend(hw.unload(cpu));
            }
            StopReason::Time => break,
            _ => {}
        }
    }

    for cpu in 0..hw.spec().cpus() {
        threads.extend(hw.unload(CpuId(cpu)));
    }
    threads.sort_by_key(|thread| thread.task);
    (threads, last)
}

/// Runs one endless thread alone for this many cycles; returns the hardware and the thread.
pub(crate) fn run_endless(
    spec: &MachineSpec,
    accesses: Vec<Access>,
    cycles: u64,
) -> (Hardware, HwThread) {
    run_thread(build_hardware(spec), accesses, true, cycles)
}

/// Runs one thread alone on this hardware, and checks that its counters balance.
pub(crate) fn run_thread(
    mut hw: Hardware,
    accesses: Vec<Access>,
    endless: bool,
    cycles: u64,
) -> (Hardware, HwThread) {
    hw.load(CpuId(0), scripted_thread(0, 0, accesses, endless), 0);
    let thread = finish(&mut hw, cycles).0.remove(0);
    assert_balanced(&thread.counters);
    (hw, thread)
}

/// The counters of all tasks, and the counters and lines of all caches.
pub(crate) type HardwareState = (
    Vec<TaskCounters>,
    Vec<(CacheCounters, Vec<(u64, store::LineMeta)>)>,
);

/// Runs the loaded threads to their end, and returns the state that they leave.
pub(crate) fn final_state(hw: &mut Hardware, cycles: u64) -> HardwareState {
    let tasks = finish(hw, cycles)
        .0
        .into_iter()
        .map(|thread| thread.counters)
        .collect();
    let of_unit =
        |unit: &cache_unit::CacheUnit| (unit.counters, unit.store.lines().collect::<Vec<_>>());
    (tasks, hw.caches.units.iter().map(of_unit).collect())
}

/// Asserts that a task's counters balance: every tick has one owner, every miss one cause, and every miss of a level a
/// reference at the next.
pub(crate) fn assert_balanced(counters: &TaskCounters) {
    let owned = counters.instructions + counters.stalls.sum();
    assert_eq!(
        counters.ticks, owned,
        "ticks with one owner each: {counters:?}"
    );
}

/// The tests' own generator.
pub(crate) struct TestRng(SplitMix64);

impl TestRng {
    pub(crate) fn new(seed: u64) -> Self {
        TestRng(SplitMix64::new(seed))
    }
    pub(crate) fn draw_below(&mut self, limit: u64) -> u64 {
        self.0.draw_below(limit)
    }
    pub(crate) fn unit(&mut self) -> f64 {
        (self.draw_below(1 << 53) as f64 + 0.5) / (1u64 << 53) as f64
    }
}
