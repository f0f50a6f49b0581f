//! Runs the contenders of a comparison in turn, and computes ratios of their speeds.
//!
//! Every round runs all contenders once, in an order that rotates by one each round; a ratio is the median over the
//! rounds of the ratio *within* a round. A temporary slowdown of the machine therefore affects all contenders alike.
//! Work on one thread is timed by that thread's CPU time, and work on several by the wall clock.

use crate::memory::peak_bytes;
use cachemate_bench::resident;
use cachemate_core::median;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BenchClock {
    /// CPU time of the calling thread.
    Thread,
    /// CPU time of all threads.
    Process,
    Wall,
}

impl BenchClock {
    pub fn now_s(self) -> f64 {
        let id = match self {
            BenchClock::Thread => ClockId::ThreadCPUTime,
            BenchClock::Process => ClockId::ProcessCPUTime,
            BenchClock::Wall => ClockId::Monotonic,
        };
        let now = clock_gettime(id);
        now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
    }
}

/// Computes the number that represents a result, after the clock has stopped.
type Digest<'a> = Box<dyn FnOnce() -> u64 + 'a>;

/// One contender: its name, its work, and its targets.
pub struct Contender<'a> {
    pub name: String,
    pub work: Box<dyn FnMut() -> Digest<'a> + 'a>,
    /// Index of the contender with which this one is compared, and the minimum ratio of speeds, if there is a target.
    pub against: Option<(usize, Option<f64>)>,
    pub max_bytes: Option<u64>,
    /// Target in millions of items per second on the machine for which the promise was made.
    pub min_millions: Option<f64>,
}

impl<'a> Contender<'a> {
    /// Describes work that returns a number, which represents its result.
    pub fn new(name: impl Into<String>, work: impl FnMut() -> u64 + 'a) -> Self {
        Contender::with_digest(name, work, |number| number)
    }

    /// Describes work whose result is represented by a number that takes time to compute.
    pub fn with_digest<T: 'a>(
        name: impl Into<String>,
        mut work: impl FnMut() -> T + 'a,
        digest: fn(T) -> u64,
    ) -> Self {
        Contender {
            name: name.into(),
            work: Box::new(move || {
                let result = work();
                Box::new(move || digest(result))
            }),
            against: None,
            max_bytes: None,
            min_millions: None,
        }
    }
    pub fn compare_with(mut self, baseline: usize, at_least: Option<f64>) -> Self {
        self.against = Some((baseline, at_least));
        self
    }
    pub fn with_min_millions(mut self, millions: Option<f64>) -> Self {
        self.min_millions = millions;
        self
    }
    pub fn with_max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = Some(bytes);
        self
    }
}

/// One row of the result.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ResultRow {
    pub group: String,
    /// Name of the input.
    pub input: String,
    pub contender: String,
    /// Millions of items per second, as the median over rounds.
    pub millions_per_s: f64,
    pub millions_per_s_bar: Option<f64>,
    /// Contender of the comparison, and the ratio of speeds as the median over rounds.
    pub against: Option<String>,
    pub speed_ratio: Option<f64>,
    pub speed_ratio_bar: Option<f64>,
    /// Smallest and largest ratio of any round.
    pub speed_ratio_range: Option<(f64, f64)>,
    /// Peak memory beyond that of the input.
    pub peak_bytes: u64,
    pub peak_bytes_bar: Option<u64>,
    /// Peak of the process's resident memory (VmHWM), input included; `None` if the kernel does not count it.
    pub resident_bytes: Option<u64>,
    /// Are all targets met? `None` if there are none.
    pub met: Option<bool>,
}

/// Runs `rounds` rounds over `items` items each. Contenders must agree on the result if `same_result` is set.
///
/// # Panics
/// Contenders disagree, because the speed of a wrong result is meaningless.
pub fn compare(
    group: &str,
    input: &str,
    items: usize,
    rounds: usize,
    clock: BenchClock,
    same_result: bool,
    mut contenders: Vec<Contender>,
) -> Vec<ResultRow> {
    let count = contenders.len();
    let mut seconds = vec![Vec::with_capacity(rounds); count];
    let mut peaks = vec![0; count];
    let mut resident_peaks: Vec<Option<u64>> = vec![None; count];
    let mut results = vec![None; count];
    for round in 0..rounds {
        for turn in 0..count {
            let at = (turn + round) % count;
            let counts_resident = resident::reset_peak();
            let start = clock.now_s();
            let (digest, peak) = peak_bytes(&mut contenders[at].work);
            seconds[at].push(clock.now_s() - start);
            let resident = resident::peak_bytes().filter(|_| counts_resident);
            resident_peaks[at] = resident_peaks[at].max(resident);
            let result = digest();
            peaks[at] = peak.max(peaks[at]);
            let earlier = results[at].replace(result);
            assert!(
                earlier.is_none_or(|before| before == result),
                "{group} {input}: a result changed"
            );
        }
        eprintln!("{group} {input}: round {} of {rounds}", round + 1);
    }
    if same_result {
        for (result, contender) in results.iter().zip(&contenders) {
            assert_eq!(
                *result, results[0],
                "{group} {input}: '{}' disagrees",
                contender.name
            );
        }
    }
    let row = |at: usize| {
        let contender = &contenders[at];
        let ratios = contender.against.map(|(baseline, _)| {
            let mut ratios: Vec<f64> = seconds[baseline]
                .iter()
                .zip(&seconds[at])
                .map(|(o, s)| o / s)
                .collect();
            ratios.sort_by(f64::total_cmp);
            ratios
        });
        let speed_ratio = ratios.as_deref().and_then(median);
        let speed_ratio_bar = contender.against.and_then(|(_, bar)| bar);
        let median_seconds = median(&seconds[at]).expect("invariant: each contender ran");
        let millions_per_s = items as f64 / median_seconds / 1e6;
        let bars = [
            speed_ratio_bar.map(|bar| speed_ratio.is_some_and(|ratio| ratio >= bar)),
            contender.max_bytes.map(|limit| peaks[at] <= limit),
            contender
                .min_millions
                .map(|minimum| millions_per_s >= minimum),
        ];
        ResultRow {
            group: group.into(),
            input: input.into(),
            contender: contender.name.clone(),
            millions_per_s,
            millions_per_s_bar: contender.min_millions,
            against: contender
                .against
                .map(|(baseline, _)| contenders[baseline].name.clone()),
            speed_ratio,
            speed_ratio_bar,
            speed_ratio_range: ratios.map(|ratios| (ratios[0], ratios[ratios.len() - 1])),
            peak_bytes: peaks[at],
            peak_bytes_bar: contender.max_bytes,
            resident_bytes: resident_peaks[at],
            met: bars.iter().flatten().copied().reduce(|a, b| a && b),
        }
    };
    (0..count).map(row).collect()
}

/// Prints the rows as a table.
pub fn print_table(rows: &[ResultRow]) {
    println!(
        "{:<8} {:<14} {:<26} {:>8}  {:>7} {:>15}  {:<26} {:>9} {:>9}",
        "group",
        "input",
        "contender",
        "M/s",
        "ratio",
        "(least-most)",
        "against",
        "peak MB",
        "VmHWM MB"
    );
    for row in rows {
        let ratio = row
            .speed_ratio
            .map_or(String::new(), |ratio| format!("{ratio:.2}x"));
        let range = row
            .speed_ratio_range
            .map_or(String::new(), |(low, high)| format!("({low:.2}-{high:.2})"));
        let resident = row
            .resident_bytes
            .map_or(String::new(), |bytes| format!("{:.1}", bytes as f64 / 1e6));
        let verdict = match (row.met, row.speed_ratio_bar, row.peak_bytes_bar) {
            (None, ..) => String::new(),
            (Some(met), ratio, bytes) => {
                let targets: Vec<String> = [
                    row.millions_per_s_bar.map(|bar| format!(">= {bar} M/s")),
                    ratio.map(|bar| format!(">= {bar}x")),
                    bytes.map(|bar| format!("<= {} MB", bar / 1_000_000)),
                ]
                .into_iter()
                .flatten()
                .collect();
                format!(
                    "  {} ({})",
                    if met { "met" } else { "MISSED" },
                    targets.join(", ")
                )
            }
        };
        println!(
            "{:<8} {:<14} {:<26} {:>8.1}  {:>7} {:>15}  {:<26} {:>9.1} {:>9}{}",
            row.group,
            row.input,
            row.contender,
            row.millions_per_s,
            ratio,
            range,
            row.against.as_deref().unwrap_or(""),
            row.peak_bytes as f64 / 1e6,
            resident,
            verdict
        );
    }
}
