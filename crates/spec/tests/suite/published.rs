//! The simulated machine files against published measurements of the real machines.

use cachemate_core::{Access, AccessSource, BatchEnd, CpuId, MachineSpec, ProcessId, TaskId};
use cachemate_sim::hw::{FirstTouchFrames, Hardware, HwOptions, HwThread};
use cachemate_spec::load_machine;

/// An endless loop over arrays of 64 MB, batch by batch.
struct EndlessLoop {
    make: fn(u64) -> Vec<Access>,
    at: u64,
}

impl AccessSource for EndlessLoop {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        for _ in 0..128 {
            batch.extend((self.make)(self.at));
            self.at = (self.at + 1) % (1 << 20);
        }
        BatchEnd::More
    }
}

/// Reads a line, eight bytes at a time.
fn read(line: u64) -> Vec<Access> {
    (0..8)
        .map(|word| Access::load(line * 64 + word * 8, 0))
        .collect()
}

/// STREAM's copy: eight words from one array to another.
fn copy_accesses(line: u64) -> Vec<Access> {
    const OTHER: u64 = 1 << 30;
    let word = |word: u64| {
        [
            Access::load(line * 64 + word * 8, 0),
            Access::store(OTHER + line * 64 + word * 8, 1),
        ]
    };
    (0..8).flat_map(word).collect()
}

/// Dependent loads in a scattered order.
fn chase(at: u64) -> Vec<Access> {
    vec![Access::dependent_load(at * 1_000_003 % (1 << 20) * 64, 0)]
}

/// Bytes per second that some CPUs read and write, and loads per second of the first one.
fn measure_rates(machine: &MachineSpec, cpus: &[u32], make: fn(u64) -> Vec<Access>) -> (f64, f64) {
    let mut hw = Hardware::new(machine, HwOptions::default()).expect("a shipped machine");
    let mut frames = FirstTouchFrames::default();
    for &cpu in cpus {
        let source = EndlessLoop {
            make,
            at: u64::from(cpu) * 30_000,
        };
        hw.load(
            CpuId(cpu),
            HwThread::new(TaskId(cpu), ProcessId(cpu), 0, Box::new(source)),
            0,
        );
    }
    let (warm, end) = (1_000_000, 5_000_000);
    let bytes = |hw: &Hardware| -> u64 {
        let counters = |node| hw.memory_counters(node);
        (0..machine.memory.nodes)
            .map(counters)
            .map(|node| node.read_bytes + node.write_bytes)
            .sum()
    };
    let loads = |hw: &Hardware| {
        hw.thread(CpuId(cpus[0]))
            .map_or(0, |thread| thread.counters.levels[1].references)
    };
    hw.run(warm, &mut frames);
    let counts_before = (bytes(&hw), loads(&hw));
    hw.run(end, &mut frames);
    let seconds = (end - warm) as f64 / machine.hertz as f64;
    (
        (bytes(&hw) - counts_before.0) as f64 / seconds,
        (loads(&hw) - counts_before.1) as f64 / seconds,
    )
}

fn assert_near(subject: &str, found: f64, published: f64, within: f64) {
    assert!(
        (found / published - 1.0).abs() <= within,
        "{subject}: {found:.3e}, published {published:.3e}"
    );
}

/// Is the latency of memory as CPU-Z and lmbench measured it on the real machines?
#[test]
fn memory_latency_is_as_measured() {
    for (name, ns) in [
        ("xeon-x5365-4", 120.0),
        ("opteron-2350", 90.0),
        ("p4-xeon-ht", 150.0),
    ] {
        let (_, loads) = measure_rates(&load_machine(name).unwrap(), &[0], chase);
        assert_near(&format!("{name}: ns to memory"), 1e9 / loads, ns, 0.05);
    }
}

/// Does STREAM's copy on a quarter of a Niagara move a quarter of the bytes measured on a T2000 with 32 threads?
#[test]
fn a_quarter_of_niagara_copies_as_measured() {
    let machine = load_machine("niagara-2core").unwrap();
    let (moved, _) = measure_rates(&machine, &[0, 1, 2, 3, 4, 5, 6, 7], copy_accesses);
    // STREAM counts bytes read and written; the line that a store first fetches moves as well.
    assert_near("bytes that STREAM counts", moved / 1.5, 3493e6 / 4.0, 0.05);
}

/// Do both kinds of prefetchers speed up a stream?
#[test]
fn prefetchers_speed_up_a_stream() {
    for name in ["xeon-x5365-4", "xeon-x5365-4-page"] {
        let machine = load_machine(name).unwrap();
        let mut bare = machine.clone();
        bare.prefetchers.clear();
        let (with, without) = (
            measure_rates(&machine, &[0], read).0,
            measure_rates(&bare, &[0], read).0,
        );
        assert!(
            with > 1.05 * without,
            "{name}: {with:.3e} with, {without:.3e} bytes a second without"
        );
    }
}
/// Do both sockets read at the bandwidth of the Roofline paper's ridge point (11.1 GB/s), and does one core read no
/// less than when it was found to miss hexus.net's figure (just under 6 GiB/s)?
///
/// The target for one core was within 15 % of that figure, and it is missed: 5.25 GB/s, 18 % less. The 20 % here only
/// keep it from getting worse; they are not a target. docs/simulators/cycle.md says so.
#[test]
fn the_xeon_streams_as_measured() {
    let machine = load_machine("xeon-x5365").unwrap();
    let (single, _) = measure_rates(&machine, &[0], read);
    assert_near(
        "one core, bytes a second",
        single,
        5.96 * f64::from(1 << 30),
        0.2,
    );
    let (all, _) = measure_rates(&machine, &[0, 1, 2, 3, 4, 5, 6, 7], read);
    assert_near("both sockets, bytes a second", all, 11.1e9, 0.1);
    // The four cores of a socket share its bus.
    let (socket, _) = measure_rates(&machine, &[0, 1, 2, 3], read);
    assert!(
        socket < 8.0e9 && socket > 0.9 * single,
        "a socket: {socket:.3e}, a core: {single:.3e}"
    );
}
