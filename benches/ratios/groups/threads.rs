//! Exact stack distances on two threads against one, by the wall clock; the result needs two free cores to be
//! meaningful.

use super::stack::{exact_histogram, fingerprint};
use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_locality::simd::Simd;
use cachemate_locality::stack::{DistanceHistogram, ParallelStackDistances};

pub const GROUP: BenchGroup = BenchGroup {
    name: "threads",
    about: "exact stack distances on two threads against one (wall clock; wants two idle cores)",
    run,
};

fn count_on_threads(threads: usize, lines: &[u64]) -> DistanceHistogram {
    let mut engine = ParallelStackDistances::new(threads);
    engine
        .push(lines)
        .and_then(|()| engine.finish())
        .expect("the traces have fewer lines than the limit")
}

fn run(options: &Options) -> Vec<ResultRow> {
    let mut rows = Vec::new();
    for kind in &options.traces {
        let lines = &kind.generate_lines(options.accesses);
        let contenders = vec![
            Contender::new("1 thread", || {
                fingerprint(&exact_histogram(Simd::detect_best(), lines))
            }),
            Contender::new("2 threads", || fingerprint(&count_on_threads(2, lines)))
                .compare_with(0, Some(1.5))
                .with_max_bytes(80_000_000),
        ];
        rows.extend(compare(
            "threads",
            kind.name(),
            lines.len(),
            options.rounds,
            BenchClock::Wall,
            true,
            contenders,
        ));
        report_balance(kind.name(), lines);
    }
    rows
}

/// The balance of the work in CPU time, which busy neighbors disturb less than wall-clock time: the speedup on two idle
/// cores is at most one thread's time over the busier thread's.
fn report_balance(input: &str, lines: &[u64]) {
    let start = BenchClock::Thread.now_s();
    exact_histogram(Simd::detect_best(), lines);
    let one_s = BenchClock::Thread.now_s() - start;
    let (caller, process) = (BenchClock::Thread.now_s(), BenchClock::Process.now_s());
    count_on_threads(2, lines);
    let (find_s, both_s) = (
        BenchClock::Thread.now_s() - caller,
        BenchClock::Process.now_s() - process,
    );
    let count_s = both_s - find_s;
    eprintln!(
        "threads {input}: one thread {one_s:.3} s; of two, finding {find_s:.3} s, counting {count_s:.3} s of processor \
         time: at most {:.2}x",
        one_s / find_s.max(count_s)
    );
}
