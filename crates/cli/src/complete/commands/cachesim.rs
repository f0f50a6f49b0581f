//! `cachemate mrc --ways`: simulates set-associative caches on a trace, and counts their misses.

use cachemate_locality::cachesim::{CacheGeometry, CacheSim, CacheSimGroup, Replacement};
use cachemate_report::text::{
    format_count, format_number, format_percent, format_size, value_or_dash,
};
use cachemate_report::{CachesimResult, SimulatedCache, Table};
use cachemate_trace::TraceReader;
use clap::{Args, ValueEnum};

use crate::args::ByteSize;
use crate::complete::traces::TraceInput;
use crate::exit::UsageError;
use crate::session::Session;

/// Options for caches that are not fully associative.
#[derive(Args)]
pub struct SetAssociativeArgs {
    /// Simulate caches with this number of ways instead, one for each size; exact, and slower than the curve
    #[arg(long, value_name = "N", conflicts_with_all = ["sample_rate", "histogram", "by"],
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub ways: Option<u32>,
    /// With --ways: number of equal slices, selected by a hash of the line
    #[arg(long, value_name = "N", default_value_t = 1, requires = "ways",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    slices: u32,
    /// With --ways: replacement policy; plru needs a power of two of ways
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "REPLACEMENT",
        requires = "ways"
    )]
    replacement: ReplacementArg,
    /// With --ways: LRU cache in front, as SIZE:WAYS, of which only the misses reach the caches
    #[arg(long, value_name = "SIZE:WAYS", requires = "ways")]
    l1: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum ReplacementArg {
    #[default]
    Lru,
    Plru,
    Random,
}

impl SetAssociativeArgs {
    fn build_caches(
        &self,
        sizes: &[u64],
        line_bytes: u32,
        ways: u32,
        seed: u64,
        threads: usize,
    ) -> Result<CacheSimGroup, UsageError> {
        let replacement = match self.replacement {
            ReplacementArg::Lru => Replacement::Lru,
            ReplacementArg::Plru => Replacement::TreePlru,
            ReplacementArg::Random => Replacement::Random { seed },
        };
        let to_geometry = |&size_bytes: &u64| {
            CacheGeometry::from_bytes(size_bytes, u64::from(line_bytes), ways, self.slices)
        };
        let geometries: Result<Vec<CacheGeometry>, _> = sizes.iter().map(to_geometry).collect();
        geometries
            .and_then(|geometries| CacheSimGroup::new(&geometries, replacement, threads))
            .map_err(|error| UsageError(error.to_string()))
    }

    fn build_l1(&self, line_bytes: u32) -> Result<Option<CacheSim>, UsageError> {
        let Some(text) = &self.l1 else {
            return Ok(None);
        };
        let problem = || {
            UsageError(format!(
                "--l1: found '{text}', expected SIZE:WAYS such as 32K:8"
            ))
        };
        let (size, ways) = text.split_once(':').ok_or_else(problem)?;
        let size: ByteSize = size.parse().map_err(|_| problem())?;
        let ways: u32 = ways.parse().map_err(|_| problem())?;
        CacheGeometry::from_bytes(size.0, u64::from(line_bytes), ways, 1)
            .and_then(|geometry| CacheSim::new(geometry, Replacement::Lru))
            .map(Some)
            .map_err(|error| UsageError(format!("--l1: {error}")))
    }

    /// Simulates a cache of each size on the trace, on this number of threads.
    pub fn simulate(
        &self,
        session: &Session,
        file: &str,
        mut trace: TraceInput,
        (sizes, line_bytes, ways, seed): (&[u64], u32, u32, u64),
        threads: usize,
    ) -> anyhow::Result<(CachesimResult, TraceInput)> {
        let mut caches = self.build_caches(sizes, line_bytes, ways, seed, threads)?;
        let mut front = self.build_l1(line_bytes)?;

        let shift = line_bytes.trailing_zeros();
        let mut accesses = 0;
        let mut read_portion = || -> anyhow::Result<Option<Vec<u64>>> {
            let mut lines = Vec::new();
            if !trace.next_lines(shift, &mut lines)? {
                return Ok(None);
            }
            accesses += lines.len() as u64;
            let Some(front) = &mut front else {
                return Ok(Some(lines));
            };
            let mut missed_lines = Vec::new();
            front.push_collecting(&lines, &mut missed_lines);
            Ok(Some(missed_lines))
        };
        let mut portion = read_portion()?;
        while let Some(lines) = portion {
            portion = caches.push_while(&lines, &mut read_portion)?;
        }

        let totals = trace.finish(session);
        let instructions = totals
            .and_then(|totals| totals.instructions)
            .filter(|count| *count > 0 && trace.header().instructions_known);
        let simulated = caches.misses().into_iter().zip(sizes);
        let simulated = simulated.map(|(misses, &bytes)| SimulatedCache {
            bytes,
            misses,
            miss_ratio: (accesses > 0).then(|| misses as f64 / accesses as f64),
            mpki: instructions.map(|count| misses as f64 * 1000.0 / count as f64),
        });
        let replacement = self.replacement.to_possible_value();
        let result = CachesimResult {
            file: file.to_string(),
            ways,
            line_bytes,
            replacement: replacement.map_or(String::new(), |value| value.get_name().to_string()),
            accesses,
            l1_misses: front.as_ref().map(CacheSim::misses),
            caches: simulated.collect(),
        };
        Ok((result, trace))
    }
}

pub fn render(result: &CachesimResult) -> String {
    let l1_text = result
        .l1_misses
        .map(|n| format!(", of which {} missed the L1", format_count(n)))
        .unwrap_or_default();
    let mut table =
        Table::from_header("> size | > misses | > of accesses | > per 1000 instructions");
    for cache in &result.caches {
        table.add_row([
            format_size(cache.bytes),
            format_count(cache.misses),
            value_or_dash(cache.miss_ratio.map(|ratio| format_percent(ratio, 3))),
            value_or_dash(cache.mpki.map(format_number)),
        ]);
    }
    format!(
        "{}: {} accesses{l1_text}; {}-way {}\n{}",
        result.file,
        format_count(result.accesses),
        result.ways,
        result.replacement,
        table.text()
    )
}
