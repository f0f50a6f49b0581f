//! A miss-rate curve from one log of 163 840 addresses (papers RM 5.3: 83 ms at 1.5 GHz for the bounded stack).
//!
//! The target is at most 5 ms on one core: 0.0002 million curves per second. The log resembles a program's in its
//! reuses: loops of several sizes, a stream, and lines that recur at random.

use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_core::SplitMix64;
use cachemate_locality::curve::MissRateCurve;
use cachemate_locality::rapidmrc::{LogCounts, MissLog, Warmup, survival_curve, trace_curve};

pub const GROUP: BenchGroup = BenchGroup {
    name: "curve",
    about: "a miss-rate curve from a log of 163 840 addresses: survival against the bounded stack",
    run,
};

const ENTRIES: usize = 163_840;
const LINE_BYTES: u64 = 128;
/// Size of the thesis's L2, which colors partition.
const CACHE_BYTES: u64 = 1_966_080;
const COLORS: u64 = 16;
const LOGS: usize = 4;

fn draw_log(seed: u64) -> Vec<u64> {
    let mut generator = SplitMix64::new(seed);
    let line = |at: usize| match generator.draw_below(4) {
        0 => at as u64 % 3_000,
        1 => (1 << 20) | (at as u64 % 14_000),
        2 => 1 << 21 | at as u64,
        _ => 1 << 22 | generator.draw_below(20_000),
    };
    (0..ENTRIES).map(line).collect()
}

fn run(options: &Options) -> Vec<ResultRow> {
    let logs: Vec<Vec<u64>> = (0..LOGS as u64).map(draw_log).collect();
    let sizes: Vec<u64> = (1..=COLORS)
        .map(|colors| CACHE_BYTES * colors / COLORS)
        .collect();
    let at_all = |curve: Option<MissRateCurve>| {
        let curve = curve.expect("a log with entries and instructions");
        curve
            .points()
            .iter()
            .map(|&(_, rate)| rate as u64)
            .sum::<u64>()
    };
    let run_form = |form: fn(&MissLog<'_>, &[u64]) -> Option<MissRateCurve>| {
        let (logs, sizes) = (&logs, &sizes);
        move || {
            let log_of = |lines| MissLog {
                lines,
                code_positions: &[],
                line_bytes: LINE_BYTES,
                instructions: 4e6,
                lost_accesses: None,
            };
            logs.iter()
                .map(|lines| at_all(form(&log_of(lines), sizes)))
                .sum()
        }
    };
    let survival: fn(&MissLog<'_>, &[u64]) -> _ =
        |trace, sizes| survival_curve(trace, &LogCounts::default(), sizes);
    let contenders = vec![
        Contender::new(
            "bounded stack (thesis)",
            run_form(|trace, sizes| trace_curve(trace, sizes, Warmup::Automatic, true)),
        ),
        Contender::new("survival", run_form(survival))
            .compare_with(0, None)
            .with_min_millions(Some(0.0002)),
    ];
    compare(
        "curve",
        "log of 163 840 entries",
        LOGS,
        options.rounds,
        BenchClock::Thread,
        false,
        contenders,
    )
}
