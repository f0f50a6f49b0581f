//! Programs alone on a machine, with and without its prefetchers, and beside another program: cycles per instruction,
//! bytes read and written per cycle, and slowdown. `cargo run --release -p cachemate-spec --example alone -- MACHINE
//! [--beside PROGRAM] PROGRAM...`

use cachemate_core::{CpuId, MachineSpec, ProcessId, TaskId};
use cachemate_sim::hw::{FirstTouchFrames, Hardware, HwOptions, HwThread, TaskCounters};
use cachemate_sim::kernels::{Options, build_threads};

const WARM_CYCLES: u64 = 30_000_000;
const CYCLES: u64 = 120_000_000;

/// The counts of the first program, with each program on a CPU of its own.
fn run(
    machine: &MachineSpec,
    names: &[&str],
    prefetch: bool,
) -> Result<TaskCounters, Box<dyn std::error::Error>> {
    let mut hw = Hardware::new(
        machine,
        HwOptions {
            is_prefetch_enabled: prefetch,
            ..HwOptions::default()
        },
    )?;
    let mut frames = FirstTouchFrames::default();
    for (cpu, name) in (0..).zip(names) {
        let source = build_threads(name, 1, &Options::default())?.remove(0);
        hw.load(
            CpuId(cpu),
            HwThread::new(TaskId(cpu), ProcessId(cpu), 0, source),
            0,
        );
    }
    let first = |hw: &Hardware| {
        hw.thread(CpuId(0))
            .map(|thread| thread.counters.clone())
            .unwrap_or_default()
    };
    hw.run(WARM_CYCLES, &mut frames);
    let previous = first(&hw);
    hw.run(WARM_CYCLES + CYCLES, &mut frames);
    Ok(first(&hw).since(&previous))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let neighbor = args
        .iter()
        .position(|word| word == "--beside")
        .map(|index| args.drain(index..index + 2).nth(1));
    let neighbor = neighbor.flatten().unwrap_or_else(|| "milc".to_string());
    let (machine, names) = args.split_first().ok_or("MACHINE PROGRAM...")?;
    let machine = cachemate_spec::load_machine(machine)?;
    println!(
        "| program | CPI | CPI without prefetchers | read, B/cycle | written | L2 misses/1000 | loses beside {neighbor} |"
    );
    println!("|---|---|---|---|---|---|---|");
    for name in names {
        let (with_prefetch, without_prefetch) = (
            run(&machine, &[name], true)?,
            run(&machine, &[name], false)?,
        );
        let shared_run = run(&machine, &[name, &neighbor], true)?;
        let cpi = |counters: &TaskCounters| counters.cycles() as f64 / counters.instructions as f64;
        let a_cycle = |bytes: u64| bytes as f64 / with_prefetch.cycles() as f64;
        let misses = without_prefetch.levels[2].all_misses() as f64 * 1000.0
            / without_prefetch.instructions as f64;
        println!(
            "| {name} | {:.2} | {:.2} | {:.2} | {:.2} | {misses:.1} | {:+.1} % |",
            cpi(&with_prefetch),
            cpi(&without_prefetch),
            a_cycle(with_prefetch.memory_read_bytes),
            a_cycle(with_prefetch.memory_write_bytes),
            100.0 * (cpi(&shared_run) / cpi(&with_prefetch) - 1.0)
        );
    }
    Ok(())
}
