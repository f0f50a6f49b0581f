//! `cachemate mrc`: prints the miss-rate curve of a trace, or stores what a shard measures of it.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cachemate_daemon::colored_program::available_bytes;
use cachemate_locality::stack::{StackError, StackLimits};
use cachemate_report::terminal::{CurveLine, curve_picture};
use cachemate_report::text::{
    format_count, format_count_of, format_number, format_percent, format_size, value_or_dash,
};
use cachemate_report::{BurstSummary, CurveCounts, MrcPart, MrcResult, SamplingSummary, Table};
use cachemate_repro::store::{self, RunName};
use cachemate_study::{
    CurveRequest, CurveSubject, MeasureError, MeasuredCurves, PartTotals, StoredSegment,
    WholeCurve, check_line_bytes, check_rate, cpu_count, curve_counts, curve_counts_from_sample,
    drop_filtered_sizes, limits_for_sizes,
};
use cachemate_trace::{ThreadTotals, TraceReader};
use clap::{Args, ValueEnum};

use super::cachesim::{self, SetAssociativeArgs};
use crate::args::JsonArg;
use crate::complete::run_store::{source_version, use_store_dir};
use crate::complete::shards::{ShardArg, content_digest, print_shard};
use crate::complete::size_list::SizeList;
use crate::complete::traces::{TraceArgs, TraceInput};
use crate::exit::{InterruptedError, UsageError};
use crate::files::write_file;
use crate::session::Session;

/// Print the miss-rate curve of a trace: the misses of a cache of each size
///
/// The caches are fully associative LRU caches, unless --ways is given. The curve is exact, unless --sample-rate is
/// given or the trace was recorded in bursts; sizes below a recorder's first-level filter have no points. Misses per
/// thousand instructions (MPKI) are printed if the trace has instruction counts.
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
    shard: ShardArg,
    /// Store what was measured of each part of a recording in this directory, and reuse it (docs/shards.md)
    #[arg(long, value_name = "DIR", conflicts_with_all = ["histogram", "by", "sample_rate", "ways", "salvage"])]
    store: Option<PathBuf>,
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

/// Bytes that one distinct line takes at most while all distances are told apart, and in each further thread.
const BYTES_PER_LINE: u64 = 64;
const BYTES_PER_LINE_AND_THREAD: u64 = 32;
/// Least records in a part that is stored, and most parts of a recording.
const MIN_PART_RECORDS: u64 = 1 << 20;
const MAX_PARTS: u64 = 64;
/// Largest size in lines for shards, whose parts the store would not hold otherwise.
const MAX_SHARD_LINES: u64 = 1 << 21;
/// Lines that are told apart at least, because each surplus of them costs a pass over all.
const MIN_SHARD_LINES: u64 = 1 << 16;

impl Mrc {
    /// The curve of the part that could be read; `None` for a shard.
    fn measure_curve(&self, session: &Session) -> anyhow::Result<Option<(MrcResult, TraceInput)>> {
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
        self.check_lines(&trace)?;
        let filter_bytes = drop_filtered_sizes(&mut sizes, trace.header());
        if let Some(filter_bytes) = filter_bytes.filter(|_| self.sizes.is_some()) {
            session.warn(&format!(
                "{}: recorded behind a filter of {}: smaller sizes have no points, and sizes up to twice that are approximate",
                self.file,
                format_size(filter_bytes)
            ));
        }
        let measured = match &self.store {
            Some(dir) => self.measure_stored(session, &trace, &sizes, dir)?,
            None => Some(self.measure(&mut trace, &sizes)?),
        };
        let Some(measured) = measured else {
            return Ok(None);
        };
        let result = self.build_result(session, &mut trace, measured, &sizes)?;
        Ok(Some((result, trace)))
    }

    /// Measures the whole trace.
    fn measure(&self, trace: &mut TraceInput, sizes: &[u64]) -> anyhow::Result<MeasuredCurves> {
        let threads = self.threads.map(usize::from);
        let subject = match (self.sample_rate, self.by) {
            (Some(rate), _) => CurveSubject::Sample {
                rate,
                seed: self.seed,
            },
            (None, CurveScope::All) => CurveSubject::All,
            (None, CurveScope::Process) => CurveSubject::EachProcess,
            (None, CurveScope::Thread) => CurveSubject::EachThread,
        };
        if self.histogram.is_none() {
            let limits = limits_for_sizes(sizes, self.line_bytes);
            let request = CurveRequest::new(subject, self.line_bytes, limits, threads)?;
            return trace.measure(&request);
        }

        let memory = available_bytes().unwrap_or(u64::MAX);
        let further_threads = threads.unwrap_or_else(cpu_count) as u64 - 1;
        let bytes_per_line = BYTES_PER_LINE + BYTES_PER_LINE_AND_THREAD * further_threads;
        let limits = StackLimits {
            cap_lines: None,
            max_lines: usize::try_from(memory / bytes_per_line).ok(),
        };
        let request = CurveRequest::new(subject, self.line_bytes, limits, threads)?;
        let measured = trace.measure(&request);
        let is_too_large = measured.as_ref().is_err_and(is_stack_error);
        if is_too_large {
            let advice = "--histogram: without it, the largest of --sizes bounds the memory";
            return measured.context(advice);
        }
        measured
    }

    /// Measures the parts of a recording that belong to the shard, or takes them from the store; `None` for a shard,
    /// which has no curve.
    fn measure_stored(
        &self,
        session: &Session,
        trace: &TraceInput,
        sizes: &[u64],
        dir: &Path,
    ) -> anyhow::Result<Option<MeasuredCurves>> {
        let Some(seekable) = trace.seekable().filter(|_| trace.burst_starts().is_empty()) else {
            anyhow::bail!(UsageError(format!(
                "{}: found bursts, or a trace that can only be read in order; --store expects a complete recording, which \
                 record --from writes, or raw records of one size",
                self.file
            )));
        };
        let largest_lines = sizes.iter().max().unwrap_or(&0) / u64::from(self.line_bytes);
        if largest_lines > MAX_SHARD_LINES {
            let limit = format_size(MAX_SHARD_LINES * u64::from(self.line_bytes));
            anyhow::bail!(UsageError(format!(
                "--sizes: found {}, expected at most {limit} for --store",
                format_size(largest_lines * u64::from(self.line_bytes))
            )));
        }
        use_store_dir(dir)?;

        let limits = StackLimits {
            cap_lines: usize::try_from(largest_lines.max(MIN_SHARD_LINES)).ok(),
            max_lines: None,
        };
        let threads = self.threads.map(usize::from);
        let request = CurveRequest::new(CurveSubject::All, self.line_bytes, limits, threads)?;
        let records = trace.expected_records();
        let part_count = (records / MIN_PART_RECORDS).clamp(1, MAX_PARTS);
        let digest = content_digest(&seekable.path);
        let source = &trace.header().source;
        let observer = trace.observer();
        let measure_part = |part: u64| -> anyhow::Result<StoredSegment> {
            let part_range = records * part / part_count..records * (part + 1) / part_count;
            let inputs = (&digest, source, &part_range, self.line_bytes, largest_lines);
            let name = RunName::new("curve-part", self.file.clone(), source_version(), &inputs)?;
            store::find_or_make(name, || {
                let open = |record: u64| seekable.open_at(record);
                let segment = request.measure_segment(part_range, &open, &observer)?;
                segment.ok_or_else(|| {
                    let note = format!("part {part} of {part_count} is not stored yet");
                    InterruptedError(format!("{note}; the same command continues")).into()
                })
            })
        };
        if let Some(shard) = self.shard.shard {
            let parts = self.shard.select(0..part_count);
            for &part in &parts {
                measure_part(part)?;
            }
            print_shard(session, self.json.json, shard, parts.len(), Vec::new())?;
            return Ok(None);
        }
        request
            .join_segments((0..part_count).map(measure_part))
            .map(Some)
    }

    fn check_lines(&self, trace: &TraceInput) -> Result<(), UsageError> {
        let result = trace.header().check_lines(self.line_bytes);
        result.map_err(|problem| UsageError(format!("{}: {problem}", self.file)))
    }

    fn simulate_ways(&self, session: &Session, ways: u32) -> anyhow::Result<()> {
        check_line_bytes(self.line_bytes).map_err(UsageError)?;
        let Some(SizeList(sizes)) = &self.sizes else {
            return Err(UsageError("--ways: expected --sizes, such as 512K,1M".to_string()).into());
        };
        let trace = TraceInput::open(session, &self.file, &self.trace, "simulating")?;
        self.check_lines(&trace)?;
        let options = (&sizes[..], self.line_bytes, ways, self.seed);
        let threads = self.threads.map_or_else(cpu_count, usize::from);
        let (result, trace) = self
            .associativity
            .simulate(session, &self.file, trace, options, threads)?;
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
            crate::files::check_output_path(path, self.force)?;
        }
        let Some((result, trace)) = self.measure_curve(session)? else {
            return Ok(());
        };
        session.print_result(self.json.json, &result, || render(&result, session))?;
        trace.check_whole()
    }

    fn build_result(
        &self,
        session: &Session,
        trace: &mut TraceInput,
        measured: MeasuredCurves,
        sizes: &[u64],
    ) -> anyhow::Result<MrcResult> {
        let totals = trace.finish(session);
        let instructions_known = trace.header().instructions_known;
        let whole_totals = PartTotals::from_totals(totals.as_ref(), instructions_known);
        let line_bytes = self.line_bytes;
        let (all, sampled, bursts) = match measured.whole {
            WholeCurve::Sampled(curve) => {
                let all = curve_counts_from_sample(&curve, whole_totals, sizes, line_bytes);
                let sampling_summary = SamplingSummary {
                    rate: curve.rate(),
                    accesses: curve.sampled_accesses(),
                    lines: curve.sampled_lines(),
                    error: max_error(&all),
                };
                (all, Some(sampling_summary), None)
            }
            WholeCurve::Exact(distances) => {
                if let Some(path) = &self.histogram {
                    write_file(path, distances.histogram.to_string().as_bytes(), self.force)?;
                }
                let all = curve_counts(&distances, whole_totals, sizes, line_bytes);
                let bursts = distances.bursts.map(|bursts| BurstSummary {
                    count: bursts.count,
                    reach_bytes: bursts.reach_lines * u64::from(line_bytes),
                    error: max_error(&all),
                });
                (all, None, bursts)
            }
        };

        let mut parts = Vec::new();
        for ((process, thread), distances) in measured.parts {
            let thread = (self.by == CurveScope::Thread).then_some(thread);
            let is_in_part = |t: &ThreadTotals| {
                t.process == process && thread.is_none_or(|thread| t.thread == thread)
            };
            let part_totals = PartTotals::for_part(totals.as_ref(), instructions_known, is_in_part);
            parts.push(MrcPart {
                process: Some(process),
                thread,
                counted: curve_counts(&distances, part_totals, sizes, line_bytes),
            });
        }
        Ok(MrcResult {
            file: self.file.clone(),
            line_bytes,
            all,
            sampled,
            bursts,
            parts,
        })
    }
}

fn is_stack_error(error: &anyhow::Error) -> bool {
    error.is::<StackError>() || matches!(error.downcast_ref(), Some(MeasureError::Stack(_)))
}

/// `None` if a point has no error.
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
    text.push_str(&curve_picture(&lines, label, session.terminal_style()));
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
