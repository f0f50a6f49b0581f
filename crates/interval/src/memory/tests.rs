use super::*;

fn sample_memory(bytes_per_cycle: f64, bus: Option<f64>) -> MemorySystem {
    MemorySystem {
        controllers: vec![QueueServer::new(bytes_per_cycle, 64.0, false)],
        buses: bus.map_or(Vec::new(), |bus| vec![QueueServer::new(bus, 64.0, false)]),
        read_slots: Vec::new(),
        packages_per_node: 1,
        latency_cycles: 200.0,
        remote_extra_cycles: 0.0,
        prefetch_distance_lines: None,
        max_overlap: 8.0,
        max_in_flight: 1000.0,
        sources: Vec::new(),
    }
}

/// Solves repeatedly until the loads have settled, as the machine does over its steps.
fn settle_demands(memory: &mut MemorySystem, demands: &mut [MemoryDemand]) {
    for _ in 0..60 {
        memory.solve_node(0, &mut |visit| {
            demands.iter_mut().for_each(|demand| visit(0, demand))
        });
    }
}

fn stream_demand(cycles: f32, waits: f32, lines: f32) -> MemoryDemand {
    MemoryDemand {
        cycles,
        serial_misses: waits,
        lines,
        cpu_share: 1.0,
        ..MemoryDemand::default()
    }
}

/// Is a task alone as fast as in its profile, however busy it keeps memory?
#[test]
fn a_task_alone_is_as_fast_as_in_its_profile() {
    for lines in [0.001, 0.02, 0.031] {
        let mut memory = sample_memory(2.0, Some(2.5));
        let mut demands = [stream_demand(1.0, 0.01, lines)];
        settle_demands(&mut memory, &mut demands);
        assert!(demands[0].queued_cycles < 3e-3, "{lines}: {demands:?}");
        assert!((memory.controllers[0].load - lines * 32.0).abs() < 3e-3);
    }
}

/// Do streams that want more than the bandwidth get exactly the bandwidth, in equal parts?
#[test]
fn streams_beyond_the_bandwidth_share_it() {
    for count in [2, 4, 8] {
        let mut memory = sample_memory(2.0, None);
        let mut demands = vec![stream_demand(1.0, 0.01, 0.025); count];
        settle_demands(&mut memory, &mut demands);
        let lines: f32 = demands
            .iter()
            .map(|demand| demand.lines * demand.speed())
            .sum();
        let max_lines = 2.0 / 64.0;
        assert!(
            lines <= max_lines * 1.001,
            "{count}: {lines} of {max_lines}"
        );
        let demanded = 0.025 * count as f32;
        assert!(
            lines > 0.9 * max_lines.min(demanded),
            "{count}: {lines} of {max_lines}"
        );
        let speeds: Vec<f32> = demands.iter().map(MemoryDemand::speed).collect();
        assert!(
            speeds
                .iter()
                .all(|speed| (speed / speeds[0] - 1.0).abs() < 1e-3),
            "{speeds:?}"
        );
    }
}

/// At a light load, is the wait the closed form of a queue with deterministic service?
#[test]
fn a_lightly_loaded_wait_equals_the_closed_form() {
    let mut memory = sample_memory(2.0, None);
    let mut demands = [
        stream_demand(1.0, 0.001, 0.000_01),
        stream_demand(1.0, 0.0, 0.015),
    ];
    settle_demands(&mut memory, &mut demands);
    let busy = 0.015 * 32.0 + 0.000_32;
    let expected = 0.001 * 32.0 * busy / (2.0 * (1.0 - busy));
    assert!(
        (demands[0].queued_cycles / expected - 1.0).abs() < 0.02,
        "{} {expected}",
        demands[0].queued_cycles
    );
    assert!(demands[1].queued_cycles == 0.0);
}

/// Does the slower of bus and controller limit the traffic?
#[test]
fn the_slower_of_bus_and_controller_limits_traffic() {
    for (controller, bus) in [(4.0, 1.0), (1.0, 4.0)] {
        let mut memory = sample_memory(controller, Some(bus));
        let mut demands = vec![stream_demand(1.0, 0.02, 0.03); 3];
        settle_demands(&mut memory, &mut demands);
        let lines: f32 = demands
            .iter()
            .map(|demand| demand.lines * demand.speed())
            .sum();
        assert!(
            (lines * 64.0 - 1.0).abs() < 0.05,
            "{controller} {bus}: {}",
            lines * 64.0
        );
    }
}

/// Are prefetches dropped only if other tasks crowd memory?
#[test]
fn prefetches_are_dropped_only_if_others_crowd_memory() {
    let mut memory = sample_memory(2.0, None);
    let demand = stream_demand(1.0, 0.001, 0.01);
    let mut loss_at = |load: f64, lines_ahead: f64| {
        memory.controllers[0] = memory.controllers[0].solved(QueueSolution {
            load,
            lines_ahead,
            in_flight: 20.0,
        });
        memory.dropped_share(0, 0, &demand, &Prefetch::default())
    };
    assert!(loss_at(0.32, 0.24) < 1e-6);
    assert!(loss_at(0.97, 16.0) > 0.3);
}

/// With demand priority, does a miss wait as Cobham's formula predicts, and does a late line wait as long as
/// without priority?
#[test]
fn demand_misses_wait_as_cobhams_formula_predicts() {
    let mut memory = sample_memory(2.0, None);
    memory.controllers[0].has_demand_priority = true;
    memory.controllers[0].station.do_prefetches_pass = false;
    let (demand, background) = (
        MemoryDemand {
            demand_lines: 0.01,
            ..stream_demand(1.0, 0.0, 0.01)
        },
        stream_demand(1.0, 0.0, 0.009),
    );
    let light = MemoryDemand {
        serial_late_lines: 0.001,
        ..stream_demand(1.0, 0.001, 1e-6)
    };
    let mut demands = [
        demand,
        background,
        MemoryDemand {
            serial_late_lines: 0.0,
            ..light
        },
        MemoryDemand {
            serial_misses: 0.0,
            ..light
        },
    ];
    settle_demands(&mut memory, &mut demands);
    let (first, busy) = (0.01 * 32.0, 0.019 * 32.0);
    let cobham = 0.001 * 32.0 * busy / 2.0 / (1.0 - first);
    assert!(
        (demands[2].queued_cycles / cobham - 1.0).abs() < 0.02,
        "{} {cobham}",
        demands[2].queued_cycles
    );
    let behind_all = 0.001 * 32.0 * busy / 2.0 / (1.0 - busy);
    assert!(
        (demands[3].queued_cycles / behind_all - 1.0).abs() < 0.02,
        "{} {behind_all}",
        demands[3].queued_cycles
    );
    // A prefetch that would wait longer than the mean wait is dropped.
    memory.controllers[0].station.max_prefetch_wait_cycles = 1000.0 * f64::from(behind_all);
    settle_demands(&mut memory, &mut demands);
    let below = behind_all * (1.0 - 1.0 / (std::f32::consts::E - 1.0));
    assert!(
        (demands[3].queued_cycles / below - 1.0).abs() < 0.02,
        "{} {below}",
        demands[3].queued_cycles
    );
}

/// Do lines that arrive eight at once make others wait eight times as long, as in theory for batch arrivals?
#[test]
fn lines_that_arrive_eight_at_once_make_others_wait_eightfold() {
    let mut memory = sample_memory(2.0, None);
    let (lines, line_cycles) = (0.003, 32.0);
    let mut demands = [
        stream_demand(1.0, 0.001, 1e-6),
        MemoryDemand {
            demand_lines: lines,
            ..stream_demand(1.0, lines / 8.0, lines)
        },
    ];
    settle_demands(&mut memory, &mut demands);
    let busy = lines * line_cycles;
    let expected = 0.001 * 8.0 * line_cycles * busy / (2.0 * (1.0 - busy));
    assert!(
        (demands[0].queued_cycles / expected - 1.0).abs() < 0.1,
        "{} {expected}",
        demands[0].queued_cycles
    );
    let demand = MemoryDemand {
        demand_lines: 0.01,
        ..stream_demand(1.0, 0.002, 0.02)
    };
    assert!(
        (memory.burst_lines(&demand) - (1.0 + 4.0 * 0.5)).abs() < 1e-5,
        "half of the lines come five at once"
    );
    memory.read_slots = vec![QueueServer::of_slots(12.0, 200.0)];
    assert_eq!(memory.burst_lines(&demand), 1.0);
}

/// Do the slots limit the number of reads per latency, and does a single slot behave like an ordinary queue?
#[test]
fn slots_limit_the_number_of_reads_per_latency() {
    for slots in [1.0, 4.0, 12.0] {
        let mut memory = sample_memory(64.0, None);
        memory.read_slots = vec![QueueServer::of_slots(f64::from(slots), 200.0)];
        let mut demands = vec![stream_demand(1.0, 0.005, 0.03); 3];
        settle_demands(&mut memory, &mut demands);
        let lines: f32 = demands
            .iter()
            .map(|demand| demand.lines * demand.speed())
            .sum();
        let max_lines = slots / 200.0;
        assert!(
            lines <= max_lines * 1.001 && lines > 0.85 * max_lines.min(0.09),
            "{slots}: {lines} of {max_lines}"
        );
    }
    let mut memory = sample_memory(64.0, None);
    memory.read_slots = vec![QueueServer::of_slots(1.0, 200.0)];
    let mut demands = [
        stream_demand(1.0, 0.001, 1e-6),
        stream_demand(1.0, 0.0, 0.002),
    ];
    settle_demands(&mut memory, &mut demands);
    let expected = 0.001 * 200.0 * 0.4 / (2.0 * 0.6);
    assert!(
        (demands[0].queued_cycles / expected - 1.0).abs() < 0.03,
        "{} {expected}",
        demands[0].queued_cycles
    );
}

/// Does a stream whose prefetches start later slow down in proportion to its shorter distance, and a stream with
/// spare time not at all?
#[test]
fn a_streams_speed_follows_its_prefetch_distance() {
    let mut memory = sample_memory(64.0, None);
    memory.read_slots = vec![QueueServer::of_slots(12.0, 200.0)];
    memory.prefetch_distance_lines = Some(8.0);
    // 8 x (1 - 5/12) + 0.5 lines ahead when alone: five outstanding, one every 40 cycles.
    let demand = stream_demand(40.0, 0.0, 1.0);
    let prefetch = Prefetch {
        aided_cycles: 40.0,
        unaided_cycles: 200.0,
        late_share: 1.0,
    };

    let source = memory.source_at(&memory.read_slots[0], &demand, 0.0);
    memory.read_slots[0].load = memory.read_slots[0].station.own_load(&source) as f32;
    assert_eq!(memory.dropped_share(0, 0, &demand, &prefetch), 0.0, "alone");
    memory.read_slots[0].load = 0.7;
    let others_load = (0.7 - 5.0 / 12.0) * 12.0 / std::f32::consts::PI;
    let lines_ahead = 8.0 * (0.3 + others_load.sqrt() / 12.0) + 0.5;
    let expected = (200.0 / lines_ahead - 40.0) / 160.0;
    let found = memory.late_prefetch_loss(0, 0, &demand, &prefetch, 8.0);
    assert!((found / expected - 1.0).abs() < 0.02, "{found} {expected}");
    let slow = Prefetch {
        aided_cycles: 400.0,
        unaided_cycles: 500.0,
        ..prefetch
    };
    assert_eq!(
        memory.late_prefetch_loss(0, 0, &stream_demand(400.0, 0.0, 1.0), &slow, 8.0),
        0.0
    );
    let without_room = memory.dropped_share(0, 0, &stream_demand(400.0, 0.0, 1.0), &slow);
    assert!(without_room > 0.1, "{without_room}");
}

/// Do two programs that always wait for memory, and have more misses in flight than there are slots, keep all slots
/// busy, and wait as many times as long as there are misses too many?
#[test]
fn programs_that_always_wait_keep_every_slot_busy() {
    let mut memory = sample_memory(64.0, None);
    memory.read_slots = vec![QueueServer::of_slots(12.0, 200.0)];
    // Eight overlapping misses of 200 cycles each, and nothing else.
    let chase = MemoryDemand {
        stall_cycles: 24.5,
        ..stream_demand(25.0, 0.125, 1.0)
    };
    let mut demands = [chase; 2];
    settle_demands(&mut memory, &mut demands);
    let lines: f32 = demands
        .iter()
        .map(|demand| demand.lines * demand.speed())
        .sum();
    assert!(
        lines > 0.97 * 12.0 / 200.0 && lines <= 12.0 / 200.0,
        "{lines} of {}",
        12.0 / 200.0
    );
    let wait = demands[0].queued_cycles / 0.125;
    let expected = 4.0 * 200.0 / 12.0;
    assert!((wait / expected - 1.0).abs() < 0.15, "{wait} {expected}");
}

/// Lines per cycle of tasks that each keep a number of misses in flight. A miss takes its turn at
/// the server and then the latency; the next one follows after a random time.
fn simulate_closed_network(
    tasks: &[(u32, f64)],
    service_cycles: f64,
    latency_cycles: f64,
) -> Vec<f64> {
    let mut generator = cachemate_core::SplitMix64::new(5);
    let mut arrivals: Vec<(f64, usize)> = Vec::new();
    for (task, &(misses, _)) in tasks.iter().enumerate() {
        arrivals.extend((0..misses).map(|_| (generator.draw_unit() * latency_cycles, task)));
    }

    let (mut free_at, mut now, mut lines) = (0.0f64, 0.0, vec![0.0; tasks.len()]);
    for _ in 0..40_000 {
        let Some(next) = arrivals.iter_mut().min_by(|a, b| a.0.total_cmp(&b.0)) else {
            break;
        };
        now = next.0;
        free_at = free_at.max(now) + service_cycles;
        lines[next.1] += 1.0;
        let think_cycles = generator.draw_exponential(tasks[next.1].1);
        next.0 = free_at - service_cycles + latency_cycles + think_cycles;
    }
    lines.iter().map(|lines| lines / now).collect()
}

/// Do tasks that mostly wait for memory slow each other down as in a simulation of the closed network, in which no task
/// sends a line before another one has returned? Independent arrivals would slow both of the first pair down by 31 %.
#[test]
fn tasks_that_wait_for_memory_form_a_closed_network() {
    let (service_cycles, latency_cycles) = (64.0 / 5.3, 200.0);

    for tasks in [
        [(8, 8.0), (8, 8.0)],
        [(8, 8.0), (8, 60.0)],
        [(8, 8.0), (4, 100.0)],
        [(8, 8.0), (2, 100.0)],
    ] {
        let solo_rates =
            tasks.map(|task| simulate_closed_network(&[task], service_cycles, latency_cycles)[0]);
        let joint_rates = simulate_closed_network(&tasks, service_cycles, latency_cycles);
        let mut demands = [0, 1].map(|index| {
            let (misses, think_cycles) = tasks[index];
            let cycles = 1.0 / solo_rates[index];
            MemoryDemand {
                demand_lines: 1.0,
                stall_cycles: (cycles * latency_cycles / (latency_cycles + think_cycles)) as f32,
                ..stream_demand(cycles as f32, 1.0 / misses as f32, 1.0)
            }
        });
        settle_demands(&mut sample_memory(5.3, None), &mut demands);
        for (index, demand) in demands.iter().enumerate() {
            let slowdown = f64::from(demand.queued_cycles) * solo_rates[index];
            let expected = solo_rates[index] / joint_rates[index] - 1.0;
            assert!(
                (slowdown - expected).abs() < 0.06,
                "{tasks:?}: {slowdown} {expected}"
            );
        }
    }
}
