//! `cachemate mrc`: prints the miss-rate curve of a trace.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cachemate_locality::sampled::FixedRateSampler;
use cachemate_locality::stack::StackDistances;
use cachemate_report::terminal::{CurveLine, curve_picture};
use cachemate_report::text::{
    format_count, format_count_of, format_number, format_percent, format_size, value_or_dash,
};
use cachemate_report::{BurstSummary, CurveCounts, MrcPart, MrcResult, SamplingSummary, Table};
use cachemate_study::{
    DistanceEngine, PartTotals, check_line_bytes, check_rate, curve_counts,
    curve_counts_from_sample, drop_filtered_sizes,
};
use cachemate_trace::{AccessRecord, ThreadTotals, TraceReader};
use clap::{Args, ValueEnum};

use super::cachesim::{self, SetAssociativeArgs};
use crate::args::JsonArg;
use crate::exit::UsageError;
use crate::files::write_file;
use crate::session::Session;
use crate::size_list::SizeList;
use crate::traces::{TraceArgs, TraceInput};

/// Print the miss-rate curve of a trace: the misses of a cache of each size
///
/// The caches are fully associative LRU caches, unless --ways is given. The curve is exact, unless --sample-rate is given or the trace was recorded
/// in bursts; sizes below a recorder's first-level filter have no points. Misses per thousand instructions (MPKI) are
/// printed if the trace has instruction counts.
#[derive(Args)]
pub struct Mrc {
    /// The trace; - is standard input
    #[arg(value_name = "FILE")]
    file: String,
    #[command(flatten)]
    trace: TraceArgs,
    /// Bytes in a cache line: a power of two
    #[arg(long, value_name = "N", default_value_t = 64)]
    line_bytes: u32,
    /// Sizes: 64K,1M,... or LO..HI:N for N sizes in equal ratios
    #[arg(long, value_name = "SIZES")]
    sizes: Option<SizeList>,
    /// Also print a curve for each process or thread on a cache of its own
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    by: CurveScope,
    /// Follow only this share of the lines (0.01 = 1 %): much faster, with an error bar
    #[arg(long, value_name = "RATE", conflicts_with_all = ["histogram", "by"], value_parser = parse_sample_rate)]
    sample_rate: Option<f64>,
    /// Seed for the choice of the sampled lines, and for random replacement
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    associativity: SetAssociativeArgs,
    /// Threads that compute one curve, with the same result [default: all CPUs for large files]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    threads: Option<u8>,
    /// Write the stack distances to this file: a line "cold N", then "d count" per occurring distance, ascending
    #[arg(long, value_name = "OUT")]
    histogram: Option<PathBuf>,
    /// Overwrite the histogram file if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    json: JsonArg,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum CurveScope {
    #[default]
    All,
    Process,
    Thread,
}

fn parse_sample_rate(text: &str) -> Result<f64, String> {
    let rate = text
        .parse()
        .map_err(|_| format!("found '{text}', expected a share of the lines such as 0.01"))?;
    check_rate(rate).map(|()| rate)
}

/// Engines for one trace: one for the whole trace, and one for each requested part.
struct Engines {
    shift: u32,
    scope: CurveScope,
    whole_trace: DistanceEngine,
    part_distances: BTreeMap<(u32, u32), StackDistances>,
}

impl Engines {
    fn push_all(&mut self, trace: &mut TraceInput) -> anyhow::Result<()> {
        let mut addresses = Vec::new();
        while trace.next_addresses(&mut addresses)? {
            addresses
                .iter_mut()
                .for_each(|address| *address >>= self.shift);
            self.whole_trace.push(&addresses)?;
        }
        Ok(())
    }

    fn push_split(&mut self, trace: &mut TraceInput) -> anyhow::Result<()> {
        let header = trace.header().clone();
        let mut records: Vec<AccessRecord> = Vec::new();
        let mut lines = Vec::new();
        while trace.next_records(&mut records)? {
            lines.clear();
            lines.extend(records.iter().map(|record| record.address >> self.shift));
            self.whole_trace.push(&lines)?;
            let part_key = |record: &AccessRecord| {
                (
                    header.process_of(record),
                    if self.scope == CurveScope::Thread {
                        record.thread
                    } else {
                        0
                    },
                )
            };
            // Consecutive accesses of one part go to its engine together, because a thread usually runs for some
            // time.
            for part_records in records.chunk_by(|a, b| part_key(a) == part_key(b)) {
                let part_lines: Vec<u64> = part_records
                    .iter()
                    .map(|record| record.address >> self.shift)
                    .collect();
                self.part_distances
                    .entry(part_key(&part_records[0]))
                    .or_default()
                    .push(&part_lines)?;
            }
        }
        Ok(())
    }
}

impl Mrc {
    /// Returns the curve of the part that could be read.
    fn measure_part(&self, session: &Session) -> anyhow::Result<(MrcResult, TraceInput)> {
        let mut sizes = self.sizes.clone().unwrap_or_else(SizeList::with_defaults).0;
        let mut trace = TraceInput::open(session, &self.file, &self.trace, "reading")?;
        if !trace.burst_starts().is_empty()
            && (self.sample_rate.is_some() || self.by != CurveScope::All)
        {
            let file = &self.file;
            anyhow::bail!(UsageError(format!(
                "{file}: found a recording in bursts, for which --sample-rate and --by have no curve"
            )));
        }
        let filter_bytes = drop_filtered_sizes(&mut sizes, trace.header());
        if let Some(filter_bytes) = filter_bytes.filter(|_| self.sizes.is_some()) {
            session.warn(&format!(
                "{}: recorded behind a filter of {}: smaller sizes have no points, and sizes up to twice that are approximate",
                self.file,
                format_size(filter_bytes)
            ));
        }
        let result = match self.sample_rate {
            Some(rate) => self.measure_sampled_curve(session, &mut trace, rate, &sizes)?,
            None => self.measure_exact_curve(session, &mut trace, &sizes)?,
        };
        Ok((result, trace))
    }

    fn simulate_ways(&self, session: &Session, ways: u32) -> anyhow::Result<()> {
        check_line_bytes(self.line_bytes).map_err(UsageError)?;
        let Some(SizeList(sizes)) = &self.sizes else {
            return Err(UsageError("--ways: expected --sizes, such as 512K,1M".to_string()).into());
        };
        let trace = TraceInput::open(session, &self.file, &self.trace, "simulating")?;
        let options = (&sizes[..], self.line_bytes, ways, self.seed);
        let (result, trace) = self
            .associativity
            .simulate(session, &self.file, trace, options)?;
        session.print_result(self.json.json, &result, || cachesim::render(&result))?;
        trace.check_whole()
    }

    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if let Some(ways) = self.associativity.ways {
            return self.simulate_ways(session, ways);
        }
        check_line_bytes(self.line_bytes)
            .map_err(|problem| UsageError(format!("--line-bytes: {problem}")))?;
        if let Some(path) = &self.histogram {
            crate::files::refuse_existing(path, self.force)?;
        }
        let (result, trace) = self.measure_part(session)?;
        session.print_result(self.json.json, &result, || render(&result, session))?;
        trace.check_whole()
    }

    fn measure_sampled_curve(
        &self,
        session: &Session,
        trace: &mut TraceInput,
        rate: f64,
        sizes: &[u64],
    ) -> anyhow::Result<MrcResult> {
        let shift = self.line_bytes.trailing_zeros();
        let mut sampler = FixedRateSampler::new(rate, self.seed)?;
        let mut addresses = Vec::new();
        while trace.next_addresses(&mut addresses)? {
            addresses.iter_mut().for_each(|address| *address >>= shift);
            sampler.push(&addresses)?;
        }
        let totals = trace.finish(session);
        let part_totals =
            PartTotals::from_totals(totals.as_ref(), trace.header().instructions_known);
        let curve = sampler.finish()?;
        let whole_counts = curve_counts_from_sample(&curve, part_totals, sizes, self.line_bytes);
        let sampling_summary = SamplingSummary {
            rate: curve.rate(),
            accesses: curve.sampled_accesses(),
            lines: curve.sampled_lines(),
            error: max_error(&whole_counts),
        };
        Ok(MrcResult {
            file: self.file.clone(),
            line_bytes: self.line_bytes,
            all: whole_counts,
            sampled: Some(sampling_summary),
            bursts: None,
            parts: Vec::new(),
        })
    }

    fn measure_exact_curve(
        &self,
        session: &Session,
        trace: &mut TraceInput,
        sizes: &[u64],
    ) -> anyhow::Result<MrcResult> {
        let mut engines = Engines {
            shift: self.line_bytes.trailing_zeros(),
            scope: self.by,
            whole_trace: DistanceEngine::new(
                self.threads.map(usize::from),
                trace.expected_records(),
                trace.burst_starts(),
            ),
            part_distances: BTreeMap::new(),
        };
        if self.by == CurveScope::All {
            engines.push_all(trace)?
        } else {
            engines.push_split(trace)?
        }
        let totals = trace.finish(session);
        let instructions_known = trace.header().instructions_known;
        let distances = engines.whole_trace.finish()?;
        if let Some(path) = &self.histogram {
            write_file(path, distances.histogram.to_string().as_bytes(), self.force)?;
        }
        let mut parts = Vec::new();
        for ((process, thread), engine) in engines.part_distances {
            let thread = (self.by == CurveScope::Thread).then_some(thread);
            let is_in_part = |t: &ThreadTotals| {
                t.process == process && thread.is_none_or(|thread| t.thread == thread)
            };
            let part_totals = PartTotals::for_part(totals.as_ref(), instructions_known, is_in_part);
            let counts = curve_counts(
                &engine.finish()?.into(),
                part_totals,
                sizes,
                self.line_bytes,
            );
            parts.push(MrcPart {
                process: Some(process),
                thread,
                counted: counts,
            });
        }
        let part_totals = PartTotals::from_totals(totals.as_ref(), instructions_known);
        let curve = curve_counts(&distances, part_totals, sizes, self.line_bytes);
        let bursts = distances.bursts.map(|bursts| BurstSummary {
            count: bursts.count,
            reach_bytes: bursts.reach_lines * u64::from(self.line_bytes),
            error: max_error(&curve),
        });
        Ok(MrcResult {
            file: self.file.clone(),
            line_bytes: self.line_bytes,
            all: curve,
            sampled: None,
            bursts,
            parts,
        })
    }
}

/// Returns the largest error of a point; `None` if a point has none.
fn max_error(counts: &CurveCounts) -> Option<f64> {
    let errors = counts.curve.iter().map(|point| point.miss_ratio_error);
    errors
        .collect::<Option<Vec<f64>>>()
        .map(|errors| errors.into_iter().fold(0.0, f64::max))
}

fn error_bar(error: Option<f64>, unknown_reason: &str) -> String {
    error.map_or(format!("unknown: {unknown_reason}"), |error| {
        format!("±{} at most", format_percent(error, 2))
    })
}

fn render(result: &MrcResult, session: &Session) -> String {
    let mut text = summary_line(&result.file, &result.all);
    if let Some(bursts) = &result.bursts {
        text.push_str(&format!(
            "recorded in {}: sizes up to {} have an estimate, error bar {} (95 %)\n",
            format_count_of(bursts.count as u64, "burst"),
            format_size(bursts.reach_bytes),
            error_bar(bursts.error, "too few bursts")
        ));
    }
    if let Some(sampled) = &result.sampled {
        text.push_str(&format!(
            "sampled: {} of the lines, {} accesses followed, error bar {} (95 %)\n",
            format_percent(sampled.rate, 2),
            format_count(sampled.accesses),
            error_bar(sampled.error, "too few lines")
        ));
    }
    let has_mpki = result.all.curve.iter().all(|point| point.mpki.is_some());
    let curve_line = |name: &str, counts: &CurveCounts| CurveLine {
        name: name.to_string(),
        points: counts
            .curve
            .iter()
            .map(|p| (p.bytes, p.mpki.unwrap_or(p.miss_ratio * 100.0)))
            .collect(),
    };
    let mut lines = vec![curve_line("all", &result.all)];
    lines.extend(
        result
            .parts
            .iter()
            .map(|part| curve_line(&part_name(part), &part.counted)),
    );
    let label = if has_mpki {
        "misses per 1000 instructions"
    } else {
        "misses, % of accesses"
    };
    text.push_str(&curve_picture(&lines, label, session.paint()));
    text.push('\n');
    text.push_str(&curve_table(&result.all));
    for part in &result.parts {
        text.push('\n');
        text.push_str(&summary_line(&part_name(part), &part.counted));
        text.push_str(&curve_table(&part.counted));
    }
    text
}

fn part_name(part: &MrcPart) -> String {
    match (part.process, part.thread) {
        (Some(process), None) => format!("process {process}"),
        (_, Some(thread)) => format!("thread {thread}"),
        (None, None) => "part".to_string(),
    }
}

fn summary_line(name: &str, counts: &CurveCounts) -> String {
    let program_text = counts
        .program_accesses
        .map(|n| format!(" of {} by the program", format_count(n)));
    let instructions_text = counts
        .instructions
        .map(|n| format!(", {} instructions", format_count(n)));
    let lines_text = counts
        .cold
        .map(|n| format!(", {} distinct lines", format_count(n)));
    format!(
        "{name}: {} accesses{}{}{}\n",
        format_count(counts.accesses),
        program_text.unwrap_or_default(),
        instructions_text.unwrap_or_default(),
        lines_text.unwrap_or_default()
    )
}

fn curve_table(counts: &CurveCounts) -> String {
    let mut table = Table::with_columns("", "size | miss ratio | ± | MPKI");
    for point in &counts.curve {
        table.add_row([
            format_size(point.bytes),
            format_percent(point.miss_ratio, 3),
            point
                .miss_ratio_error
                .map(|error| format_percent(error, 3))
                .unwrap_or_default(),
            value_or_dash(point.mpki.map(format_number)),
        ]);
    }
    table.text()
}
