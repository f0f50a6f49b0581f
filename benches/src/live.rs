//! `cachemate-bench live`: what `make live` runs.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use cachemate_core::{CpuId, Topology};
use cachemate_daemon::{host, paths};
use cachemate_linux::sense::probes::PinnedThread;
use cachemate_linux::sense::probes::intensity::PrimeProber;
use cachemate_report::Table;
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::bench_host::{BenchHost, BenchRow, BenchVerdict};
use crate::{auto, colors, gangs, overhead, ranking};

/// Measure, on this host and with real programs, the effects of probing, gangs and colors and the daemon's cost
#[derive(Args)]
pub struct LiveBench {
    /// Run only these parts
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<BenchPart>,
    /// Maximum total time
    #[arg(long, value_name = "MINUTES", default_value_t = 15.0)]
    minutes: f64,
    /// The cachemate command to measure [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    cachemate: Option<PathBuf>,
    /// Print one JSON object on standard output and nothing else
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchPart {
    /// (a) probed intensity against recorded misses
    Ranking,
    /// (b) gangs that the policy chooses
    Gangs,
    /// (c) the daemon's own cost
    Overhead,
    /// (d) to (g) page colors: a partition, re-coloring, real programs, time against colors
    Colors,
    /// (h) `auto` on programs that no plan can help
    Auto,
}

#[derive(Serialize)]
struct LiveJson {
    cpus: (u32, u32),
    /// Size according to the kernel, and measured size.
    cache_bytes: u64,
    measured_cache_bytes: Option<u64>,
    seconds: f64,
    rows: Vec<BenchRow>,
}

impl LiveBench {
    /// Runs the selected parts and prints their rows.
    ///
    /// # Errors
    /// The host cannot be read, the command does not exist, or the result cannot be written.
    pub fn run(&self, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
        let command = find_command(self.cachemate.as_deref())?;
        let start = Instant::now();
        let total_time = Duration::from_secs_f64(60.0 * self.minutes.clamp(1.0, 60.0));
        let mut host = host::survey_host(false)?;
        let dir = tempfile::tempdir().context("cannot create a working directory")?;
        let is_selected = |part: BenchPart| self.only.is_empty() || self.only.contains(&part);
        let mut rows = Vec::new();
        let mut usable_host = None;
        match find_two_cpus(&host.topology) {
            Err(reason) => rows.push(BenchRow::skipped("a-h", "everything", reason)),
            Ok(_) if !paths::is_root() => {
                let reason = "needs root: programs are moved and given turns".to_string();
                rows.push(BenchRow::skipped("a-h", "everything", reason));
            }
            Ok((cpus, cache_bytes)) => {
                usable_host = Some(BenchHost {
                    cpus,
                    cache_bytes,
                    private_bytes: max_private_bytes(&host.topology),
                    work_dir: dir.path().to_path_buf(),
                    command,
                    stop_flag: Arc::clone(stop),
                    deadline: start + total_time,
                });
            }
        }
        let reported_bytes = usable_host.as_ref().map_or(0, |place| place.cache_bytes);
        let must_measure = is_selected(BenchPart::Ranking) || is_selected(BenchPart::Gangs);
        let measured_bytes = usable_host
            .as_ref()
            .filter(|_| must_measure)
            .and_then(|place| measure_cache(place, &mut rows));
        if let (Some(place), Some(bytes)) = (&mut usable_host, measured_bytes) {
            place.cache_bytes = bytes;
            // Probes take the cache's size from this topology as well.
            for cache in host
                .topology
                .caches
                .iter_mut()
                .filter(|cache| cache.last_level)
            {
                cache.size_bytes = Some(bytes);
            }
        }
        if let Some(place) = &mut usable_host {
            let run_gangs = |place: &BenchHost| gangs::bench_rows(place, &host);
            let until_gangs = if is_selected(BenchPart::Gangs) {
                0.75
            } else {
                1.0
            };
            // Each part with its title, the share of the time by which it ends, and its note.
            type RunPart<'a> = &'a dyn Fn(&BenchHost) -> anyhow::Result<Vec<BenchRow>>;
            let parts: [(BenchPart, &'static str, &str, f64, &str, RunPart<'_>); 5] = [
                (
                    BenchPart::Overhead,
                    "c",
                    "overhead",
                    1.0,
                    "overhead",
                    &overhead::bench_rows,
                ),
                (
                    BenchPart::Auto,
                    "h",
                    "auto",
                    1.0,
                    "auto where there is nothing to gain",
                    &auto::bench_rows,
                ),
                (
                    BenchPart::Ranking,
                    "a",
                    "intensity",
                    0.4,
                    "intensity",
                    &ranking::bench_rows,
                ),
                (
                    BenchPart::Colors,
                    "d-g",
                    "page colors",
                    until_gangs,
                    "page colors",
                    &colors::bench_rows,
                ),
                (BenchPart::Gangs, "b", "gangs", 1.0, "gangs", &run_gangs),
            ];
            for (part, name, subject, time_share, note, run) in parts {
                if is_selected(part) {
                    print_note(&format!("({name}) {note} ..."));
                    place.deadline = start + total_time.mul_f64(time_share);
                    rows.extend(BenchRow::rows_or_skipped(name, subject, run(place)));
                }
            }
        }
        rows.sort_by_key(|row| row.part);
        let report = LiveJson {
            cpus: usable_host
                .as_ref()
                .map_or((0, 0), |place| (place.cpus.0.0, place.cpus.1.0)),
            cache_bytes: reported_bytes,
            measured_cache_bytes: measured_bytes,
            seconds: start.elapsed().as_secs_f64(),
            rows,
        };
        let output = if self.json {
            serde_json::to_string_pretty(&report)? + "\n"
        } else {
            render(&report)
        };
        std::io::stdout()
            .lock()
            .write_all(output.as_bytes())
            .context("cannot write to standard output")
    }
}

/// The given path, or the command beside this program.
///
/// # Errors
/// There is no such file.
pub fn find_command(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let own_path = std::env::current_exe().context("this program's own file is not found")?;
    let command = given.map_or_else(|| own_path.with_file_name("cachemate"), Path::to_path_buf);
    // The path is absolute, because the command is also started from other directories.
    std::path::absolute(&command)
        .ok()
        .filter(|path| path.is_file())
        .with_context(|| {
            format!(
                "{}: is not there (make build makes it, --cachemate names another)",
                command.display()
            )
        })
}

/// Prints progress to standard error.
fn print_note(message: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("{message}");
    }
}

fn max_private_bytes(topology: &Topology) -> u64 {
    let private_caches = topology.caches.iter().filter(|cache| !cache.last_level);
    private_caches
        .filter_map(|cache| cache.size_bytes)
        .max()
        .unwrap_or(0)
}

/// Measures the part of the last-level cache that a buffer can occupy; `None` if hits and misses cannot be
/// distinguished, which a row then reports.
fn measure_cache(bench_host: &BenchHost, rows: &mut Vec<BenchRow>) -> Option<u64> {
    const TITLE: &str = "last-level cache by measurement";
    let prober_result = PinnedThread::new(bench_host.cpus.0)
        .and_then(|_pinned_thread| PrimeProber::fit_to_cache(Some(bench_host.cache_bytes), 1));
    match prober_result {
        Err(error) => {
            rows.push(BenchRow::skipped("a-b", TITLE, error.to_string()));
            None
        }
        Ok(prober) => {
            let (bytes, reported_bytes) = (
                prober.cache_bytes().min(bench_host.cache_bytes),
                bench_host.cache_bytes,
            );
            let format_size = cachemate_report::text::format_size;
            let measured = format!(
                "{} (reported: {}); it determines the sizes of programs and probes",
                format_size(bytes),
                format_size(reported_bytes)
            );
            rows.push(BenchRow::new(
                "a-b",
                TITLE,
                "",
                measured,
                BenchVerdict::Reported,
            ));
            Some(bytes)
        }
    }
}

/// The first two CPUs on different cores that share a last-level cache, and the size of that cache.
pub fn find_two_cpus(topology: &Topology) -> Result<((CpuId, CpuId), u64), String> {
    for cache in topology.last_level_caches() {
        let mut cpus = topology
            .cpus
            .iter()
            .filter(|cpu| cpu.online && cache.cpus.contains(cpu.id.0));
        let Some(first) = cpus.next() else { continue };
        if let Some(second) =
            cpus.find(|cpu| cpu.core != first.core || cpu.package != first.package)
        {
            let cache_bytes = cache
                .size_bytes
                .ok_or("the kernel does not say how large the last-level cache is")?;
            return Ok(((first.id, second.id), cache_bytes));
        }
    }
    Err("according to the kernel, no two cores share a last-level cache".to_string())
}

fn render(report: &LiveJson) -> String {
    let mut table = Table::with_columns(" | what | target | measured | verdict", "");
    for row in &report.rows {
        let verdict = match row.verdict {
            BenchVerdict::Met => "met",
            BenchVerdict::Missed => "MISSED",
            BenchVerdict::Reported => "",
            BenchVerdict::Skipped => "skipped",
        };
        table.add_row([row.part, &row.what, &row.target, &row.measured, verdict]);
    }
    format!(
        "CPUs {} and {}, last-level cache of {}, {:.0} s\n{}",
        report.cpus.0,
        report.cpus.1,
        cachemate_report::text::format_size(report.cache_bytes),
        report.seconds,
        table.text()
    )
}
