//! Compares the simulated hardware with the plain move-to-front loop, on the same accesses.
//!
//! Every context runs a program of `crates/sim` (recorded in advance, so that generating accesses is in neither time);
//! the loop gets the lines of the same accesses, context by context in turn. Data accesses are counted. The last rows
//! are whole runs, including operating system and programs, of the largest machines, with their peak memory.

use super::cachesim::move_to_front;
use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_core::{Access, AccessKind, AccessSource, BatchEnd, CpuId, ProcessId, TaskId};
use cachemate_sim::hw::{FirstTouchFrames, Hardware, HwOptions, HwThread, StopReason};
use cachemate_sim::kernels;
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions, SimProgram};
use cachemate_sim::run::run_alone;

pub const GROUP: BenchGroup = BenchGroup {
    name: "machine",
    about: "the simulated hardware with all contexts busy against a move-to-front loop",
    run,
};

/// A machine, the number of contexts that run, and the targets.
struct MachineCase {
    machine: &'static str,
    contexts: u32,
    /// Minimum ratio to the speed of the loop.
    min_ratio: Option<f64>,
    /// Minimum millions of data accesses per second.
    min_millions: Option<f64>,
}

const fn machine_case(machine: &'static str, contexts: u32) -> MachineCase {
    MachineCase {
        machine,
        contexts,
        min_ratio: None,
        min_millions: None,
    }
}

const CASES: [MachineCase; 5] = [
    MachineCase {
        min_ratio: Some(0.125),
        min_millions: Some(15.0),
        ..machine_case("niagara-2core", 8)
    },
    MachineCase {
        min_millions: Some(8.0),
        ..machine_case("power5-2x2x2", 8)
    },
    MachineCase {
        min_millions: Some(8.0),
        ..machine_case("opteron-2350", 8)
    },
    machine_case("xeon-x5365", 2),
    machine_case("epyc-7742", 64),
];

/// The largest shipped machines, with a program on every CPU.
const WHOLE: [&str; 2] = ["epyc-7742", "epyc-7763"];
const WHOLE_MAX_BYTES: u64 = 500_000_000;

/// The cost of an access must not double between these numbers of busy CPUs.
const FLAT: (&str, [u32; 2]) = ("epyc-7742", [2, 64]);

const PROGRAMS: [&str; 4] = ["art", "twolf", "gzip", "swim"];

/// Replays a recording endlessly, a few thousand accesses at a time.
struct Player {
    accesses: std::sync::Arc<Vec<Access>>,
    at: usize,
}

impl AccessSource for Player {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        let end = (self.at + 4096).min(self.accesses.len());
        batch.extend_from_slice(&self.accesses[self.at..end]);
        self.at = if end == self.accesses.len() { 0 } else { end };
        BatchEnd::More
    }
}

fn record(program: &str, seed: u64, min_accesses: usize) -> Vec<Access> {
    let mut threads = kernels::build_threads(program, seed, &kernels::Options::default())
        .expect("a shipped program");
    let mut accesses = Vec::new();
    while accesses.len() < min_accesses {
        threads[0].next_batch(&mut accesses);
    }
    accesses
}

fn is_data(access: &Access) -> bool {
    matches!(access.kind(), AccessKind::Load | AccessKind::Store)
}

/// Runs the machine until its tasks have made `min_accesses` data accesses; returns their actual number.
fn simulate(
    spec: &cachemate_core::MachineSpec,
    contexts: u32,
    programs: &[std::sync::Arc<Vec<Access>>],
    min_accesses: u64,
) -> u64 {
    let mut hw = Hardware::new(spec, HwOptions::default()).expect("a shipped machine");
    let mut frames = FirstTouchFrames::default();
    for cpu in 0..contexts {
        let player = Player {
            accesses: programs[cpu as usize % programs.len()].clone(),
            at: 0,
        };
        hw.load(
            CpuId(cpu),
            HwThread::new(TaskId(cpu), ProcessId(cpu), 0, Box::new(player)),
            0,
        );
    }
    let mut end = 0;
    loop {
        end += 2_000;
        let stop = hw.run(end, &mut frames);
        assert_eq!(stop, StopReason::Time);
        let references = |cpu| {
            hw.thread(CpuId(cpu))
                .map_or(0, |thread| thread.counters.levels[1].references)
        };
        let reference_count: u64 = (0..contexts).map(references).sum();
        if reference_count >= min_accesses {
            return reference_count;
        }
    }
}

fn run(options: &Options) -> Vec<ResultRow> {
    let min_accesses = options.accesses / 4;
    let record =
        |(at, name): (usize, &&str)| std::sync::Arc::new(record(name, at as u64, min_accesses / 4));
    let programs: Vec<_> = PROGRAMS.iter().enumerate().map(record).collect();
    let mut rows = Vec::new();
    for case in CASES {
        let (name, contexts) = (case.machine, case.contexts);
        let spec = super::shipped_machine(name);
        let line_count = simulate(&spec, contexts, &programs, min_accesses as u64) as usize;
        let mut lines = Vec::with_capacity(line_count);
        'full: for index in 0.. {
            for cpu in 0..contexts as usize {
                let accesses = &programs[cpu % programs.len()];
                let access = &accesses[index % accesses.len()];
                if is_data(access) {
                    lines.push((cpu as u64) << 40 | access.address() >> 6);
                }
                if lines.len() >= line_count {
                    break 'full;
                }
            }
        }
        let machine = Contender::new("machine", || {
            simulate(&spec, contexts, &programs, min_accesses as u64)
        })
        .compare_with(0, case.min_ratio)
        .with_min_millions(case.min_millions);
        let contenders = vec![
            Contender::new("move to front", || move_to_front(&lines)),
            machine,
        ];
        rows.extend(compare(
            "machine",
            name,
            line_count,
            options.rounds,
            BenchClock::Thread,
            false,
            contenders,
        ));
    }
    rows.extend(flatness_rows(&programs, min_accesses, options));
    rows.extend(WHOLE.iter().flat_map(|name| whole_run(name, options)));
    rows
}

/// Runs a program on every CPU under the operating system for this many cycles; returns the number of data accesses.
fn run_whole(spec: &cachemate_core::MachineSpec, cycles: u64) -> u64 {
    let simulated_program = |cpu: u32| {
        let name = PROGRAMS[cpu as usize % PROGRAMS.len()];
        let make_threads = move |_| {
            kernels::build_threads(name, u64::from(cpu), &kernels::Options::default())
                .expect("shipped")
        };
        SimProgram::new(name, Box::new(make_threads))
    };
    let sim = SimOptions {
        ends: Some(RunLimit::Cycles(cycles)),
        ..SimOptions::default()
    };
    let mut machine = SimMachine::new(
        spec,
        &sim,
        (0..spec.cpus()).map(simulated_program).collect(),
    )
    .expect("a shipped machine");
    let results = run_alone(&mut machine).expect("programs that fit");
    results
        .level_breakdown(cachemate_core::CacheLevel::L1Data)
        .map_or(0, |level| level.references)
}

fn whole_run(name: &str, options: &Options) -> Vec<ResultRow> {
    let spec = super::shipped_machine(name);
    // Millions of accesses on machines of this size, enough for every program to have touched its whole working set.
    let cycles = options.accesses as u64 / 20;
    let reference_count = run_whole(&spec, cycles) as usize;
    let contender = Contender::new("whole run, all CPUs", || run_whole(&spec, cycles))
        .with_max_bytes(WHOLE_MAX_BYTES);
    compare(
        "machine",
        name,
        reference_count,
        options.rounds.min(2),
        BenchClock::Thread,
        false,
        vec![contender],
    )
}

/// The same number of accesses *per CPU* on few CPUs and on many, of the same two programs; otherwise the run on many
/// CPUs would be measured cold. The run on few is repeated until both have the same total.
fn flatness_rows(
    programs: &[std::sync::Arc<Vec<Access>>],
    min_accesses: usize,
    options: &Options,
) -> Vec<ResultRow> {
    let (name, cpus) = FLAT;
    let spec = super::shipped_machine(name);
    let of_every_cpu = min_accesses as u64 / 16;
    let run_on_cpus =
        |cpus: u32| simulate(&spec, cpus, &programs[..2], of_every_cpu * u64::from(cpus));
    let times = cpus[1] / cpus[0];
    let few_cpus = Contender::new(format!("flat cost: {} CPUs", cpus[0]), || {
        (0..times).map(|_| run_on_cpus(cpus[0])).sum()
    });
    let many_cpus = Contender::new(format!("flat cost: {} CPUs", cpus[1]), || {
        run_on_cpus(cpus[1])
    })
    .compare_with(0, Some(0.5));
    let reference_count = (of_every_cpu * u64::from(cpus[1])) as usize;
    compare(
        "machine",
        name,
        reference_count,
        options.rounds.min(3),
        BenchClock::Thread,
        false,
        vec![few_cpus, many_cpus],
    )
}
