use proptest::prelude::*;

use super::*;

/// A program that keeps `in_flight` lines on their way, each `think_cycles` apart from the server.
fn closed_source(in_flight: f64, think_cycles: f64, service_cycles: f64) -> LineSource {
    LineSource {
        cycles: (think_cycles + service_cycles) / in_flight,
        has_own_waits: false,
        lines: 1.0,
        reads: 1.0,
        demand_reads: 1.0,
        added_elsewhere_cycles: 0.0,
        demand_waits: 1.0 / in_flight,
        late_waits: 0.0,
        max_in_flight: in_flight,
        round_trip_cycles: think_cycles + service_cycles,
        together_lines: 1.0,
        random_share: 1.0,
        time_share: 1.0,
    }
}

fn exponential_station(cycles_per_line: f64) -> QueueStation {
    QueueStation {
        residual_share: 1.0,
        ..QueueStation::in_order(cycles_per_line)
    }
}

fn rates(station: &QueueStation, sources: &[LineSource]) -> Vec<f64> {
    let solution = station.solve(sources, 0.0);
    let rate = |source: &LineSource| {
        source.lines / (source.cycles + station.added_cycles(source, &solution))
    };
    sources.iter().map(rate).collect()
}

/// Lines per cycle of two classes by exact mean value analysis (Reiser and Lavenberg 1980).
fn exact_rates(populations: [usize; 2], think_cycles: [f64; 2], service_cycles: f64) -> [f64; 2] {
    let mut queue = vec![vec![[0.0; 2]; populations[1] + 1]; populations[0] + 1];
    let mut rates = [0.0; 2];
    for first in 0..=populations[0] {
        for second in 0..=populations[1] {
            let mut here = [0.0; 2];
            for class in 0..2 {
                let population = [first, second][class];
                if population == 0 {
                    rates[class] = 0.0;
                    continue;
                }
                let found = if class == 0 {
                    queue[first - 1][second]
                } else {
                    queue[first][second - 1]
                };
                let response = service_cycles * (1.0 + found[0] + found[1]);
                rates[class] = population as f64 / (think_cycles[class] + response);
                here[class] = rates[class] * response;
            }
            queue[first][second] = here;
        }
    }
    rates
}

/// How far are rates from exact mean value analysis, for all populations of two programs up to eight lines together?
#[test]
fn rates_are_within_ten_percent_of_exact_mean_value_analysis() {
    let service_cycles = 20.0;
    let station = exponential_station(service_cycles);
    let mut largest_error = 0.0f64;
    for first in 1..=7usize {
        for second in 1..=8 - first {
            for think_cycles in [[20.0, 20.0], [100.0, 100.0], [300.0, 40.0], [30.0, 2000.0]] {
                let populations = [first, second];
                let sources = [0, 1].map(|class| {
                    closed_source(
                        populations[class] as f64,
                        think_cycles[class],
                        service_cycles,
                    )
                });
                let found = rates(&station, &sources);
                let exact = exact_rates(populations, think_cycles, service_cycles);
                for class in 0..2 {
                    largest_error = largest_error.max((found[class] / exact[class] - 1.0).abs());
                }
            }
        }
    }
    assert!(largest_error < 0.10, "{largest_error}");
}

/// Does a line of one program among many independent ones wait as the queue of random arrivals predicts?
#[test]
fn waits_of_large_populations_are_those_of_random_arrivals() {
    let station = QueueStation::in_order(20.0);
    for load in [0.2, 0.5, 0.8, 0.9] {
        let think_cycles = 20.0 * 4000.0 / load;
        let sources: Vec<LineSource> = (0..4000)
            .map(|_| closed_source(1.0, think_cycles, 20.0))
            .collect();
        let solution = station.solve(&sources, 0.0);
        let found = station.added_waits(&sources[0], &solution).mean;
        let expected = 20.0 * load / (2.0 * (1.0 - load));
        assert!(
            (found / expected - 1.0).abs() < 0.03,
            "{load}: {found} {expected}"
        );
    }
}

/// Does a chase beside a stream wait for no more than the lines that the stream has in flight, although the stream
/// alone would saturate the server?
#[test]
fn a_chase_waits_for_the_lines_in_flight_only() {
    let station = QueueStation::in_order(20.8);
    let stream = LineSource {
        cycles: 0.4,
        has_own_waits: true,
        lines: 0.03,
        reads: 0.03,
        demand_reads: 0.03,
        max_in_flight: 24.0,
        round_trip_cycles: 286.0,
        together_lines: 1.0,
        random_share: 1.0,
        time_share: 1.0,
        ..LineSource::default()
    };
    let chase = LineSource {
        cycles: 286.0,
        lines: 1.0,
        reads: 1.0,
        demand_reads: 1.0,
        demand_waits: 1.0,
        ..stream
    };
    let solution = station.solve(&[stream, chase], 0.0);
    let wait = station.added_waits(&chase, &solution).mean;
    assert!(wait <= 24.0 * 20.8 && wait > 50.0, "{wait}");
}

prop_compose! {
    fn any_source()(
        cycles in 0.05f64..500.0,
        has_own_waits in any::<bool>(),
        lines in 1e-6f64..2.0,
        written_share in 0.0f64..0.6,
        waits in 0.0f64..1.0,
        demand_share in 0.0f64..1.0,
        priority_share in 0.0f64..1.0,
        max_in_flight in 1.0f64..48.0,
        round_trip_cycles in 20.0f64..600.0,
        together_share in 0.0f64..1.0,
        random_share in 0.0f64..1.0,
        time_share in 0.01f64..1.0,
    ) -> LineSource {
        let reads = lines * (1.0 - written_share);
        let serial = reads * waits;
        LineSource {
            cycles,
            has_own_waits,
            lines,
            reads,
            demand_reads: reads * demand_share,
            added_elsewhere_cycles: 0.0,
            demand_waits: serial * priority_share,
            late_waits: serial * (1.0 - priority_share),
            max_in_flight,
            round_trip_cycles,
            together_lines: 1.0 + together_share * (max_in_flight - 1.0),
            random_share,
            time_share,
        }
    }
}

proptest! {
    /// Do the asymptotic bounds hold for every input: a wait beyond the solo wait is at most the others' lines in
    /// flight times the time of a line, no program becomes faster, and the state is finite?
    #[test]
    fn waits_never_exceed_the_lines_of_others(
        sources in prop::collection::vec(any_source(), 1..6),
        cycles_per_line in 0.5f64..100.0,
        servers in prop::sample::select(vec![1.0, 4.0, 12.0]),
        priority_share in 0.0f64..1.0,
        do_prefetches_pass in any::<bool>(),
        max_prefetch_wait_cycles in prop::sample::select(vec![0.0, 300.0, f64::INFINITY]),
        start in 0.0f64..200.0,
    ) {
        let station = QueueStation {
            servers,
            priority_share,
            do_prefetches_pass,
            max_prefetch_wait_cycles,
            ..QueueStation::in_order(cycles_per_line)
        };
        let solution = station.solve(&sources, start);
        prop_assert!(solution.lines_ahead.is_finite() && (0.0..=1.0).contains(&solution.load));
        for source in &sources {
            let is_possible = source.lines * cycles_per_line <= source.cycles;
            let own_lines = if source.has_own_waits && is_possible { source.in_flight() } else { 0.0 };
            let others = solution.in_flight - own_lines;
            let waits = station.added_waits(source, &solution);
            for wait in [waits.demand, waits.prefetched, waits.mean] {
                prop_assert!(wait >= 0.0 && wait <= others * cycles_per_line * (1.0 + 1e-9));
            }
            prop_assert!(waits.demand <= waits.mean + station.solo_waits(source).mean + 1e-9);
            let added = station.added_cycles(source, &solution);
            let waits = source.demand_waits + source.late_waits;
            let replacements = (source.lines / source.in_flight()).max(waits);
            let most = replacements * others * cycles_per_line;
            prop_assert!(added >= 0.0 && added <= most * (1.0 + 1e-9), "{added} {most}");
        }
    }

    /// In theory's closed network, is throughput below one line per time of a line, above what the waits behind all
    /// other lines leave, and independent of the point at which the search starts?
    #[test]
    fn throughput_keeps_its_asymptotic_bounds(
        populations in prop::collection::vec((1.0f64..24.0, 1.0f64..2000.0), 1..6),
        service_cycles in 1.0f64..60.0,
        start in 0.0f64..100.0,
    ) {
        let station = QueueStation::in_order(service_cycles);
        let sources: Vec<LineSource> = populations
            .iter()
            .map(|&(in_flight, think)| closed_source(in_flight, think, service_cycles))
            .collect();
        let found = rates(&station, &sources);
        prop_assert!(found.iter().sum::<f64>() <= 1.02 / service_cycles, "{found:?}");
        let all: f64 = populations.iter().map(|population| population.0).sum();
        for (rate, &(in_flight, think)) in found.iter().zip(&populations) {
            prop_assert!(*rate <= in_flight / (think + service_cycles) * (1.0 + 1e-6));
            prop_assert!(*rate >= in_flight / (think + service_cycles * (all + 1.0)) * (1.0 - 1e-3));
        }
        let load = station.solve(&sources, 0.0).load;
        let restarted_load = station.solve(&sources, start).load;
        prop_assert!((load - restarted_load).abs() <= 2e-3, "{load} {restarted_load}");
    }
}
