//! Latency and bandwidth.

use super::*;
use crate::hw::dram::{Dram, MemoryReader};

/// Dependent loads around a shuffled ring of `lines` lines.
fn ring(lines: u64, loads: usize) -> Vec<Access> {
    let mut order: Vec<u64> = (0..lines).collect();
    let mut dice = TestRng::new(7);
    for index in (1..order.len()).rev() {
        order.swap(index, dice.draw_below(index as u64 + 1) as usize);
    }
    (0..loads)
        .map(|index| Access::dependent_load(order[index % order.len()] * 64, 0))
        .collect()
}

fn chase_cycles(spec: &MachineSpec, lines: u64, cpu: u32) -> f64 {
    let mut hw = build_hardware(spec);
    let warm = ring(lines, 2 * lines as usize);
    hw.load(CpuId(cpu), scripted_thread(0, 0, warm, false), 0);
    let (_, begun) = finish(&mut hw, 10_000_000);
    let loads = (4 * lines as usize).max(2_000);
    let begun = begun.max(hw.now_cycles());
    hw.load(
        CpuId(cpu),
        scripted_thread(1, 0, ring(lines, loads), false),
        begun,
    );
    let (threads, _) = finish(&mut hw, 100_000_000);
    assert_balanced(&threads[0].counters);
    threads[0].counters.cycles() as f64 / loads as f64
}

fn core_models() -> [CoreModel; 3] {
    [
        CoreModel::in_order(1),
        CoreModel::in_order(2),
        CoreModel::OutOfOrder {
            issue_width: 4,
            window: 128,
            mshrs: 10,
            loads_pass: true,
        },
    ]
}

/// Does a pointer chase see the configured latency at every level, on every kind of core?
#[test]
fn a_pointer_chase_costs_the_configured_latency_at_every_level() {
    for pipeline in core_models() {
        let mut spec = MachineSpec {
            pipeline,
            ..sample_machine()
        };
        spec.caches
            .push(sample_cache(CacheLevel::L3, 64 << 10, 16, 45, 1));
        for (lines, latency) in [(12, 3.0), (96, 14.0), (768, 45.0), (8192, 200.0)] {
            let cycles = chase_cycles(&spec, lines, 0);
            assert!(
                (cycles / latency - 1.0).abs() < 0.02,
                "{lines} lines, {pipeline:?}: {cycles} for {latency}"
            );
        }
    }
}

/// Does a chase see a victim cache's latency if only that cache holds the ring (and no line is held twice)?
#[test]
fn a_chase_through_a_victim_cache_sees_its_latency() {
    let mut spec = sample_machine();
    spec.caches.push(CacheSpec {
        inclusion: Inclusion::Victim,
        ..sample_cache(CacheLevel::L3, 16 << 10, 256, 45, 1)
    });
    spec.caches[1].ways = 128;
    // 128 lines of L2 and 256 of L3 hold 380 together.
    let cycles = chase_cycles(&spec, 380, 0);
    assert!((cycles - 45.0).abs() < 1.0, "{cycles}");
}

/// Does memory of another node cost the remote latency?
#[test]
fn memory_of_another_node_costs_the_remote_latency() {
    let mut spec = sample_machine();
    (
        spec.packages,
        spec.memory.nodes,
        spec.memory.remote_latency_cycles,
    ) = (2, 2, 310);
    assert!((chase_cycles(&spec, 8192, 0) - 200.0).abs() < 2.0);
    assert!((chase_cycles(&spec, 8192, 1) - 310.0).abs() < 2.0);
}

fn stream_loads(lines: u64) -> Vec<Access> {
    (0..lines).map(|line| Access::load(line * 64, 0)).collect()
}

/// Do streams from several cores saturate at the configured bandwidth of memory, and a single one at the limit of its
/// latency?
#[test]
fn streams_saturate_at_the_configured_memory_bandwidth() {
    let mut spec = sample_machine();
    (spec.cores_per_package, spec.caches[1].shared_by_cores) = (4, 4);
    spec.pipeline = CoreModel::OutOfOrder {
        issue_width: 2,
        window: 64,
        mshrs: 16,
        loads_pass: true,
    };
    spec.memory.bytes_per_cycle = 4.0;
    let bytes_per_cycle = |cores: u32, spec: &MachineSpec| {
        let mut hw = build_hardware(spec);
        (0..cores).for_each(|cpu| {
            drop(hw.load(
                CpuId(cpu),
                scripted_thread(cpu, cpu, stream_loads(20_000), true),
                0,
            ))
        });
        finish(&mut hw, 400_000);
        hw.memory_counters(0).read_bytes as f64 / 400_000.0
    };
    let many = bytes_per_cycle(4, &spec);
    assert!((many / 4.0 - 1.0).abs() < 0.01, "{many} bytes a cycle of 4");

    // A blocking core fetches one line per latency: 64 bytes in 200 cycles.
    let blocking = MachineSpec {
        pipeline: CoreModel::in_order(1),
        ..spec
    };
    let blocking_rate = bytes_per_cycle(1, &blocking);
    assert!(
        (blocking_rate / (64.0 / 200.0) - 1.0).abs() < 0.01,
        "{blocking_rate} bytes a cycle alone"
    );
}

/// Without a store buffer, does each store that misses cost a latency as each load does, and with one only the full
/// buffer?
#[test]
fn stores_that_miss_block_without_a_buffer() {
    let cycles_per_line = |store_buffer: u32, access: fn(u64, u32) -> Access| {
        let pipeline = CoreModel::InOrder {
            issue_width: 1,
            store_buffer,
        };
        let spec = MachineSpec {
            pipeline,
            ..sample_machine()
        };
        let accesses = (0..20_000).map(|line| access(line * 64, 0)).collect();
        let (_, thread) = run_endless(&spec, accesses, 400_000);
        400_000.0 / thread.counters.instructions as f64
    };
    let (loads, stores) = (
        cycles_per_line(0, Access::load),
        cycles_per_line(0, Access::store),
    );
    assert!(
        (stores / loads - 1.0).abs() < 0.05,
        "{stores} and {loads} cycles"
    );
    let buffered = cycles_per_line(8, Access::store);
    assert!(buffered < 0.5 * stores, "{buffered} of {stores} cycles");
    assert!(
        (cycles_per_line(8, Access::load) / loads - 1.0).abs() < 1e-9,
        "loads need no buffer"
    );
}

/// Do the package's bus and a cache's port bound streams in the same way?
#[test]
fn streams_saturate_at_the_bus_and_at_the_cache_port() {
    let mut spec = sample_machine();
    spec.pipeline = CoreModel::OutOfOrder {
        issue_width: 2,
        window: 64,
        mshrs: 32,
        loads_pass: true,
    };
    spec.memory.package_bus_bytes_per_cycle = Some(2.0);
    let (hw, thread) = run_endless(&spec, stream_loads(20_000), 400_000);
    let bus = hw.bus_counters(0).unwrap();
    assert!((bus.bytes as f64 / 400_000.0 / 2.0 - 1.0).abs() < 0.01);
    assert!(
        thread.counters.stalls.queue > 0,
        "queueing has its own owner"
    );

    let mut spec = sample_machine();
    spec.pipeline = CoreModel::OutOfOrder {
        issue_width: 2,
        window: 64,
        mshrs: 32,
        loads_pass: true,
    };
    spec.caches[1].bandwidth_bytes_per_cycle = Some(8.0);
    // 96 lines fit the L2, but not the L1.
    let (hw, _) = run_endless(&spec, stream_loads(96), 400_000);
    let port = hw.cache_counters(CacheId(1));
    let rate = port.bytes_out as f64 / 400_000.0;
    assert!((rate / 8.0 - 1.0).abs() < 0.02, "{rate} bytes a cycle");
}

/// Does a limit of requests in flight, of a bus or of a core, bound a stream at requests x line / latency (Little's
/// law), with or without prefetchers?
#[test]
fn requests_in_flight_bound_a_stream_by_littles_law() {
    for depth in [1, 4, 12] {
        for (prefetch, is_of_core) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut spec = sample_machine();
            spec.pipeline = CoreModel::OutOfOrder {
                issue_width: 2,
                window: 256,
                mshrs: 32,
                loads_pass: true,
            };
            spec.memory.package_bus_bytes_per_cycle = Some(64.0);
            let streamer = PrefetcherSpec::Streamer {
                level: CacheLevel::L2,
                up_streams: 12,
                down_streams: 4,
                ahead_lines: 8,
            };
            spec.prefetchers = vec![streamer];
            spec.memory.scheduling = MemorySchedulingSpec {
                demand_priority: true,
                requests_in_flight: (!is_of_core).then_some(depth),
                core_requests_in_flight: is_of_core.then_some(depth),
                turnaround_cycles: 0,
            };

            let options = HwOptions {
                is_prefetch_enabled: prefetch,
                ..HwOptions::default()
            };
            let hw = Hardware::new(&spec, options).unwrap();
            let (hw, _) = run_thread(hw, stream_loads(20_000), true, 400_000);

            let rate = hw.memory_counters(0).read_bytes as f64 / 400_000.0;
            let bound = f64::from(depth) * 64.0 / 200.0;
            assert!(
                (rate / bound - 1.0).abs() < 0.02,
                "{rate} bytes a cycle of {bound}, prefetch {prefetch}"
            );
        }
    }
}

/// Does turning from reads to writes and back cost the configured time, once in sixteen lines?
#[test]
fn a_turn_from_reads_to_writes_costs_once_a_batch() {
    let mut spec = sample_machine();
    spec.pipeline = CoreModel::OutOfOrder {
        issue_width: 2,
        window: 256,
        mshrs: 32,
        loads_pass: true,
    };
    spec.memory.bytes_per_cycle = 2.0;
    let lines_a_cycle = |turnaround_cycles, demand_first| {
        let mut spec = spec.clone();
        spec.memory.scheduling = MemorySchedulingSpec {
            demand_priority: demand_first,
            turnaround_cycles,
            ..MemorySchedulingSpec::default()
        };
        let stores = (0..20_000)
            .map(|line| Access::store(line * 64, 0))
            .collect();
        let (hw, _) = run_endless(&spec, stores, 800_000);
        hw.memory_counters(0).write_bytes as f64 / 64.0 / 800_000.0
    };

    for demand_first in [false, true] {
        // A line read, a line written: 64 cycles; a turn on top in sixteen.
        for (turnaround, cycles) in [(0, 64.0), (160, 74.0)] {
            let measured = 1.0 / lines_a_cycle(turnaround, demand_first);
            assert!(
                (measured / cycles - 1.0).abs() < 0.02,
                "{measured} cycles a line for {cycles}, {demand_first}"
            );
        }
    }
}

/// Do demand reads wait less beside a core that streams through prefetchers if they go first, and does the stream get
/// the rest?
#[test]
fn demand_reads_overtake_prefetches() {
    let mut spec = sample_machine();
    (spec.cores_per_package, spec.caches[1].shared_by_cores) = (2, 1);
    spec.pipeline = CoreModel::OutOfOrder {
        issue_width: 2,
        window: 64,
        mshrs: 8,
        loads_pass: true,
    };
    spec.memory.bytes_per_cycle = 2.0;
    spec.prefetchers = vec![PrefetcherSpec::Stride {
        level: CacheLevel::L2,
        streams: 8,
        degree: 64,
    }];

    let measure_cycles = |demand_first| {
        let mut spec = spec.clone();
        spec.memory.scheduling = MemorySchedulingSpec {
            demand_priority: demand_first,
            ..MemorySchedulingSpec::default()
        };
        let mut hw = build_hardware(&spec);
        let paced = (0..20_000)
            .map(|line| Access::load(line * 64, 40))
            .collect();
        hw.load(CpuId(0), scripted_thread(0, 0, paced, true), 0);
        hw.load(CpuId(1), scripted_thread(1, 1, ring(8192, 2_000), true), 0);
        let (threads, _) = finish(&mut hw, 1_000_000);
        let stalls = |task: usize| {
            threads[task].counters.ticks as f64
                / threads[task].counters.levels[1].all_misses() as f64
        };
        threads
            .iter()
            .for_each(|thread| assert_balanced(&thread.counters));
        (stalls(1), hw.memory_counters(0).read_bytes as f64 / 1e6)
    };

    let ((chase, before), (first, after)) = (measure_cycles(false), measure_cycles(true));
    assert!(
        first < chase,
        "ticks a miss of the chase: {first} first, {chase} in turn"
    );
    assert!(
        after > 0.9 * before,
        "bytes a cycle in all: {after}, before {before}"
    );
}

/// Do reads that hold a place stay in order, prefetched or not, and overtake nothing but write-backs?
#[test]
fn reads_in_flight_stay_in_order() {
    let demand_waits = |requests_in_flight| {
        let mut spec = sample_machine();
        spec.memory.bytes_per_cycle = 2.0;
        spec.memory.scheduling = MemorySchedulingSpec {
            demand_priority: true,
            requests_in_flight,
            ..MemorySchedulingSpec::default()
        };
        let reader = MemoryReader {
            package: 0,
            core: 0,
        };
        let mut dram = Dram::new(&spec, 1);
        dram.write(0, 0, 64, 0);
        let prefetched: Vec<u64> = (1..4)
            .map(|line| dram.read(line * 64, reader, 64, 0, true).1)
            .collect();
        (prefetched, dram.read(4 * 64, reader, 64, 0, false).1)
    };

    // 32 cycles a line.
    assert_eq!(demand_waits(Some(12)), (vec![0, 32, 64], 96));
    assert_eq!(
        demand_waits(None),
        (vec![32, 64, 96], 0),
        "without places demand goes first"
    );
    assert_eq!(
        demand_waits(Some(2)).1,
        232,
        "a place is free when the second read is back, after 32 and 200 cycles"
    );
}

/// Does a next-line prefetcher hide the latency of a stream as a stride prefetcher does, and of steps of three lines
/// nothing?
#[test]
fn a_next_line_prefetcher_follows_steps_of_one_line() {
    let cycles_per_load = |prefetcher: PrefetcherSpec, step_lines: u64| {
        let spec = MachineSpec {
            prefetchers: vec![prefetcher],
            ..sample_machine()
        };
        let paced = (0..20_000)
            .map(|step| Access::load(step * step_lines * 64, 99))
            .collect();
        100.0 * 1_000_000.0 / run_endless(&spec, paced, 1_000_000).1.counters.instructions as f64
    };

    let (level, streams, degree) = (CacheLevel::L2, 8, 4);
    let stride = PrefetcherSpec::Stride {
        level,
        streams,
        degree,
    };

    let next_line = PrefetcherSpec::NextLine {
        level,
        streams,
        degree,
    };
    assert_eq!(cycles_per_load(stride, 1), cycles_per_load(next_line, 1));
    let (followed, not_followed) = (cycles_per_load(stride, 3), cycles_per_load(next_line, 3));
    assert!(
        not_followed > followed + 100.0,
        "{followed} and {not_followed} cycles"
    );
}

/// Does a stride prefetcher hide the latency of a stream, and does the latency return if it is switched off?
#[test]
fn a_prefetcher_hides_latency_and_can_be_turned_off() {
    let mut spec = sample_machine();
    spec.prefetchers = vec![PrefetcherSpec::Stride {
        level: CacheLevel::L2,
        streams: 8,
        degree: 4,
    }];

    let measure_cycles = |prefetch: bool| {
        let hw = Hardware::new(
            &spec,
            HwOptions {
                is_prefetch_enabled: prefetch,
                ..HwOptions::default()
            },
        )
        .unwrap();
        let paced = (0..20_000)
            .map(|line| Access::load(line * 64, 99))
            .collect();
        let (_, thread) = run_thread(hw, paced, false, 100_000_000);
        let hits = thread.counters.levels[CacheLevel::L2 as usize].prefetch_hits;
        assert_eq!(hits > 15_000, prefetch, "{hits} prefetched lines used");
        thread.counters.cycles() as f64 / 20_000.0
    };
    let (with, without) = (measure_cycles(true), measure_cycles(false));
    assert!(
        (without - 299.0).abs() < 3.0,
        "99 instructions, then memory: {without}"
    );
    assert!(with < 140.0, "{with} with prefetching");
}

/// Is the other line of a pair present after one miss?
#[test]
fn the_adjacent_line_is_present_after_one_miss() {
    let mut spec = sample_machine();
    spec.prefetchers = vec![PrefetcherSpec::AdjacentLine {
        level: CacheLevel::L2,
    }];
    let mut hw = build_hardware(&spec);

    let pairs = (0..1000)
        .flat_map(|pair| {
            [
                Access::load(pair * 128, 0),
                Access::load(pair * 128 + 64, 999),
            ]
        })
        .collect();
    hw.load(CpuId(0), scripted_thread(0, 0, pairs, false), 0);
    let (threads, _) = finish(&mut hw, 100_000_000);
    let l2 = threads[0].counters.levels[CacheLevel::L2 as usize];
    assert_eq!(
        (l2.references, l2.all_misses(), l2.prefetch_hits),
        (2000, 1000, 1000)
    );
}

/// Do independent misses overlap behind one that waits for its address, up to the number of miss registers (Little's
/// law), and follow one after the other if everything behind waits?
#[test]
fn independent_misses_overlap_behind_a_dependent_one() {
    let mut spec = sample_machine();
    let pairs = 20_000;

    let mut measure_cycles = |loads_pass| {
        spec.pipeline = CoreModel::OutOfOrder {
            issue_width: 2,
            window: 256,
            mshrs: 16,
            loads_pass,
        };
        let mut hw = build_hardware(&spec);
        let pair = |at: u64| {
            [
                Access::load(at * 128, 0),
                Access::dependent_load(at * 128 + 64, 0),
            ]
        };
        hw.load(
            CpuId(0),
            scripted_thread(0, 0, (0..pairs).flat_map(pair).collect(), false),
            0,
        );
        let (threads, last) = finish(&mut hw, 100_000_000);
        assert_balanced(&threads[0].counters);
        assert_eq!(
            threads[0].counters.levels[CacheLevel::L1Data as usize].references,
            2 * pairs
        );
        last as f64 / pairs as f64
    };
    // Two misses of 200 cycles each occupy one of sixteen registers; otherwise a pair begins when the previous pair has
    // returned its address.
    let (with, without) = (measure_cycles(true), measure_cycles(false));
    assert!(
        (with / (2.0 * 200.0 / 16.0) - 1.0).abs() < 0.05,
        "{with} cycles a pair"
    );
    assert!(
        (without / 200.0 - 1.0).abs() < 0.05,
        "{without} cycles a pair"
    );
}

/// Do the accesses of chains of three wait for one another, and the window for the oldest deferred access?
#[test]
fn chained_accesses_wait_and_the_window_ends_their_overlap() {
    for (window, chains_at_once) in [(6, 2.0), (12, 4.0), (24, 8.0)] {
        let mut spec = sample_machine();
        spec.pipeline = CoreModel::OutOfOrder {
            issue_width: 1,
            window,
            mshrs: 64,
            loads_pass: true,
        };

        let mut hw = build_hardware(&spec);
        let chains = 6_000;
        let load_chain = |at: u64| {
            let line_address = |nth| (3 * at + nth) * 64;
            [
                Access::load(line_address(0), 0),
                Access::dependent_load(line_address(1), 0),
                Access::dependent_load(line_address(2), 0),
            ]
        };
        hw.load(
            CpuId(0),
            scripted_thread(0, 0, (0..chains).flat_map(load_chain).collect(), false),
            0,
        );

        let (threads, last) = finish(&mut hw, 100_000_000);
        assert_balanced(&threads[0].counters);
        // A chain leaves the window 600 cycles after it entered, and this many are in the window.
        let (found, expected) = (last as f64 / chains as f64, 600.0 / chains_at_once);
        assert!(
            (found / expected - 1.0).abs() < 0.35,
            "window {window}: {found} cycles a chain of {expected}"
        );
    }
}

/// Do eight loads of a line take one miss register out of order, so that a stream of words is as fast as one of lines
/// (Little's law)? Does a store buffer have an entry for each of eight stores?
#[test]
fn accesses_to_a_line_on_its_way_share_its_miss_register() {
    let cycles_a_line = |pipeline, words: u64, store: bool| {
        let spec = MachineSpec {
            pipeline,
            ..sample_machine()
        };
        let mut hw = build_hardware(&spec);
        let access_at = |at: u64| {
            if store {
                Access::store(at, 0)
            } else {
                Access::load(at, 0)
            }
        };
        let line = |line: u64| (0..words).map(move |word| access_at(line * 64 + word * 8));
        hw.load(
            CpuId(0),
            scripted_thread(0, 0, (0..5_000).flat_map(line).collect(), false),
            0,
        );
        let (threads, last) = finish(&mut hw, 100_000_000);
        assert_balanced(&threads[0].counters);
        last as f64 / 5_000.0
    };
    let out_of_order = CoreModel::OutOfOrder {
        issue_width: 2,
        window: 256,
        mshrs: 8,
        loads_pass: true,
    };
    for (words, store) in [(1, false), (8, false), (1, true), (8, true)] {
        let measured = cycles_a_line(out_of_order, words, store);
        assert!(
            (measured / (200.0 / 8.0) - 1.0).abs() < 0.05,
            "{measured} cycles a line, {words} words, {store}"
        );
    }
    // Eight places: the stores of one line at a time, or one store each of eight lines.
    let in_order = CoreModel::in_order(2);
    let (one, eight) = (
        cycles_a_line(in_order, 1, true),
        cycles_a_line(in_order, 8, true),
    );
    assert!(
        (one / (200.0 / 8.0) - 1.0).abs() < 0.05,
        "{one} cycles a line"
    );
    assert!((eight / 200.0 - 1.0).abs() < 0.05, "{eight} cycles a line");
}
