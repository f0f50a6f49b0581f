//! The speed at which the simulator's programs generate accesses; the rest of the time is the machine's.

use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_sim::kernels;

pub const GROUP: BenchGroup = BenchGroup {
    name: "programs",
    about: "accesses made by every program of the simulator",
    run,
};

/// Target in millions of accesses per second.
const MIN_MILLIONS: f64 = 60.0;

/// Generates at least `min_accesses` accesses; returns a number that represents the last of them.
fn generate_accesses(program: &str, min_accesses: usize) -> u64 {
    let mut threads = kernels::build_threads(program, 1, &kernels::Options::default())
        .expect("a shipped program");
    let (mut batch, mut access_count, mut last) = (Vec::new(), 0, 0);
    while access_count < min_accesses {
        for thread in &mut threads {
            batch.clear();
            thread.next_batch(&mut batch);
            access_count += batch.len();
            last = batch.last().map_or(last, |access| access.address());
        }
    }
    last
}

fn run(options: &Options) -> Vec<ResultRow> {
    let min_accesses = options.accesses;
    let run_program = |program: &kernels::KernelSpec| {
        let work = move || generate_accesses(&program.name, min_accesses);
        let contenders =
            vec![Contender::new("accesses made", work).with_min_millions(Some(MIN_MILLIONS))];
        compare(
            "programs",
            &program.name,
            min_accesses,
            options.rounds,
            BenchClock::Thread,
            false,
            contenders,
        )
    };
    kernels::programs().flat_map(run_program).collect()
}
