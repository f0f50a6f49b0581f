//! `cachemate cachesim`: simulates one set-associative cache on a trace, and counts its misses.

use cachemate_locality::cachesim::{CacheGeometry, CacheSim, Replacement};
use cachemate_report::CachesimResult;
use cachemate_report::text::{format_count, format_number, format_percent, format_size};
use cachemate_trace::TraceReader;
use clap::{Args, ValueEnum};

use crate::args::{ByteSize, JsonArg};
use crate::exit::UsageError;
use crate::session::Session;
use crate::traces::{TraceArgs, TraceInput};

/// Simulate one set-associative cache on a trace, exactly
///
/// The set is the line number modulo the number of sets. With --l1, only the misses of an L1 in front reach the cache; a
/// file that was recorded with --l1 already contains misses only.
#[derive(Args)]
pub struct Cachesim {
    /// The trace; - is standard input
    #[arg(value_name = "FILE")]
    file: String,
    #[command(flatten)]
    trace: TraceArgs,
    /// Size of the cache
    #[arg(long, value_name = "SIZE")]
    size: ByteSize,
    /// Number of ways
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    ways: u32,
    /// Bytes in a line: a power of two
    #[arg(long, value_name = "N", default_value_t = 64)]
    line_bytes: u32,
    /// Number of equal slices, selected by a hash of the line
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    slices: u32,
    /// Replacement policy; plru needs a power of two of ways
    #[arg(long, value_enum, default_value_t, value_name = "REPLACEMENT")]
    replacement: ReplacementArg,
    /// Seed of random replacement
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// LRU cache in front, as SIZE:WAYS: only its misses reach the cache
    #[arg(long, value_name = "SIZE:WAYS")]
    l1: Option<String>,
    #[command(flatten)]
    json: JsonArg,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum ReplacementArg {
    #[default]
    Lru,
    Plru,
    Random,
}

impl Cachesim {
    fn build_cache(&self) -> Result<CacheSim, UsageError> {
        let replacement = match self.replacement {
            ReplacementArg::Lru => Replacement::Lru,
            ReplacementArg::Plru => Replacement::TreePlru,
            ReplacementArg::Random => Replacement::Random { seed: self.seed },
        };
        let geometry = CacheGeometry::from_bytes(
            self.size.0,
            u64::from(self.line_bytes),
            self.ways,
            self.slices,
        );
        geometry
            .and_then(|shape| CacheSim::new(shape, replacement))
            .map_err(|error| UsageError(error.to_string()))
    }

    fn build_l1(&self) -> Result<Option<CacheSim>, UsageError> {
        let Some(text) = &self.l1 else {
            return Ok(None);
        };
        let l1_problem = || {
            UsageError(format!(
                "--l1: found '{text}', expected SIZE:WAYS such as 32K:8"
            ))
        };
        let (size, ways) = text.split_once(':').ok_or_else(l1_problem)?;
        let size: ByteSize = size.parse().map_err(|_| l1_problem())?;
        let ways: u32 = ways.parse().map_err(|_| l1_problem())?;
        let geometry = CacheGeometry::from_bytes(size.0, u64::from(self.line_bytes), ways, 1);
        let cache = geometry.and_then(|shape| CacheSim::new(shape, Replacement::Lru));
        cache
            .map(Some)
            .map_err(|error| UsageError(format!("--l1: {error}")))
    }

    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let (mut cache, mut first_level_cache) = (self.build_cache()?, self.build_l1()?);
        let shift = self.line_bytes.trailing_zeros();
        let mut trace = TraceInput::open(session, &self.file, &self.trace, "simulating")?;
        let (mut lines, mut l1_missed_lines) = (Vec::new(), Vec::new());
        while trace.next_addresses(&mut lines)? {
            lines.iter_mut().for_each(|address| *address >>= shift);
            match &mut first_level_cache {
                None => cache.push(&lines),
                Some(front) => {
                    l1_missed_lines.clear();
                    front.push_collecting(&lines, &mut l1_missed_lines);
                    cache.push(&l1_missed_lines)
                }
            };
        }
        let totals = trace.finish(session);
        let instructions = totals
            .and_then(|totals| totals.instructions)
            .filter(|_| trace.header().instructions_known);
        let mpki_for = |count: u64| cache.misses() as f64 * 1000.0 / count as f64;
        let accesses = first_level_cache
            .as_ref()
            .map_or(cache.accesses(), CacheSim::accesses);
        let result = CachesimResult {
            file: self.file.clone(),
            size_bytes: self.size.0,
            ways: self.ways,
            line_bytes: self.line_bytes,
            replacement: self
                .replacement
                .to_possible_value()
                .map_or(String::new(), |value| value.get_name().to_string()),
            accesses,
            misses: cache.misses(),
            miss_ratio: (accesses > 0).then(|| cache.misses() as f64 / accesses as f64),
            mpki: instructions.filter(|count| *count > 0).map(mpki_for),
            l1_misses: first_level_cache.as_ref().map(CacheSim::misses),
        };
        session.print_result(self.json.json, &result, || render(&result))?;
        trace.check_whole()
    }
}

fn render(result: &CachesimResult) -> String {
    let l1_text = result
        .l1_misses
        .map(|n| format!(", of which {} missed the L1", format_count(n)))
        .unwrap_or_default();
    let ratio_text = result
        .miss_ratio
        .map(|ratio| format!(" ({})", format_percent(ratio, 3)))
        .unwrap_or_default();
    let mpki_text = result
        .mpki
        .map(|mpki| format!(", {} per 1000 instructions", format_number(mpki)))
        .unwrap_or_default();
    format!(
        "{}: {} accesses{l1_text}\n{} {}-way {}: {} misses{ratio_text}{mpki_text}\n",
        result.file,
        format_count(result.accesses),
        format_size(result.size_bytes),
        result.ways,
        result.replacement,
        format_count(result.misses),
    )
}
