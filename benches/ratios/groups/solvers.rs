//! The cost of the solvers on hundreds of programs, and the distance from the optimum that their bound leaves.
//!
//! The input counts programs, so a speed of 0.0002 millions per second is one second for 200.

use cachemate_core::SplitMix64;
use cachemate_papers::solvers::{self, Seats};

use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};

pub const GROUP: BenchGroup = BenchGroup {
    name: "solvers",
    about: "matching and local search for 64 to 200 programs",
    run,
};

/// Programs whose sensitivity and intensity are individual, with random noise.
fn random_costs(programs: usize) -> Vec<Vec<f64>> {
    let mut generator = SplitMix64::new(1);
    let mut character = || {
        (0..programs)
            .map(|_| generator.draw_unit() * generator.draw_unit())
            .collect::<Vec<f64>>()
    };
    let (sensitivity, intensity) = (character(), character());
    sensitivity
        .iter()
        .map(|s| {
            intensity
                .iter()
                .map(|h| s * h * (0.7 + 0.6 * generator.draw_unit()))
                .collect()
        })
        .collect()
}

fn run(options: &Options) -> Vec<ResultRow> {
    // 200 on pairs, and on the 8 caches of a 64-core host: one per core, one per hardware thread, and with turns.
    let cases = [
        (200, vec![2; 100], 1.0),
        (64, vec![8; 8], 1.0),
        (128, vec![16; 8], 2.0),
        (200, vec![16; 8], 5.0),
    ];
    let mut rows = Vec::new();
    for (programs, cpus_per_cache, seconds_at_most) in cases {
        let (costs, seats) = (random_costs(programs), Seats { cpus_per_cache });
        let solved = solvers::best_assignment(&costs, &seats);
        let name = format!(
            "{:?}, {} caches of {}",
            solved.method,
            seats.cpus_per_cache.len(),
            seats.cpus_per_cache[0]
        );
        let work = || (solvers::best_assignment(&costs, &seats).total * 1e6) as u64;
        let input = format!("{programs} programs");
        let contender = Contender::new(name, work);
        let solver_rows = compare(
            "solvers",
            &input,
            programs,
            options.rounds,
            BenchClock::Thread,
            false,
            vec![contender],
        );
        for row in &solver_rows {
            let seconds = programs as f64 / row.millions_per_s / 1e6;
            let verdict = if seconds <= seconds_at_most {
                "met"
            } else {
                "MISSED"
            };
            eprintln!(
                "solvers {input}, {}: {seconds:.3} s ({verdict}: at most {seconds_at_most} s), lower bound {:.1} % of the total",
                row.contender,
                100.0 * solved.lower_bound / solved.total,
            );
        }
        rows.extend(solver_rows);
    }
    rows
}
