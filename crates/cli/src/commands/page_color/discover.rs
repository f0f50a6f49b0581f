//! `cachemate page-color discover`: discovers and verifies the page colors of this host.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail};
use cachemate_core::CpuId;
use cachemate_daemon::colored_program::available_bytes;
use cachemate_linux::act::colors::discover::{DiscoveryOptions, PATIENCE, discover};
use cachemate_linux::act::colors::map::{ColorCoverage, ColorMap};
use cachemate_linux::act::colors::reference_set::BASE;
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::sense::topology::read_topology;
use cachemate_report::Table;
use cachemate_report::text::format_size;
use clap::Args;

use crate::args::{ByteSize, JsonArg};
use crate::files::{check_output_path, write_file};
use crate::session::Session;

/// Discover this host's page colors by timing, and verify them by a pointer chase
///
/// Takes some seconds, at most --timeout. The result is accepted only if there are as many classes as the cache has
/// colors, and if a chase over one class slows down at that color's share of the cache. On a busy host the command
/// fails with the reason.
#[derive(Args)]
pub struct Discover {
    /// Write the map (docs/colors.md) to this file
    #[arg(short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Overwrite FILE
    #[arg(long)]
    force: bool,
    /// Memory whose frames are classified
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    memory: ByteSize,
    /// Give up after this time
    #[arg(long, value_name = "SECONDS", default_value_t = PATIENCE.as_secs_f64())]
    timeout: f64,
    /// Seed for the order of attempts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    json: JsonArg,
}

impl Discover {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if !(1.0..=3600.0).contains(&self.timeout) {
            bail!(crate::exit::UsageError(
                "--timeout must be from 1 to 3600".into()
            ));
        }
        if let Some(path) = &self.output {
            check_output_path(path, self.force)?;
        }
        let map = discover_colors(
            session,
            self.memory.0,
            Duration::from_secs_f64(self.timeout),
            self.seed,
        )?;
        if let Some(path) = &self.output {
            write_file(path, map.to_text().as_bytes(), self.force)?;
        }
        session.print_result(self.json.json, &map, || render(&map))
    }
}

/// Discovers the colors of this host, and shows progress on a terminal.
pub fn discover_colors(
    session: &Session,
    bytes: u64,
    max_time: Duration,
    seed: u64,
) -> anyhow::Result<ColorMap> {
    let topology = read_topology(Path::new("/"))
        .context("cannot read the caches of this host")?
        .topology;
    let allowed_cpus = LinuxHost::new("/")
        .affinity(std::process::id() as i32)
        .context("cannot read this process's CPUs")?;
    // The last CPU is used, because most interrupts are handled on the first.
    let cpu = allowed_cpus
        .iter()
        .last()
        .map(CpuId)
        .context("this process may run on no CPU")?;
    let available_memory = available_bytes().unwrap_or(u64::MAX);
    if bytes > available_memory / 2 {
        bail!(
            "--memory: found {}, expected at most half of the {} of memory that are available",
            format_size(bytes),
            format_size(available_memory)
        );
    }
    let bar = session.progress_bar("colors", Some(1));
    let stop = session.interrupt_flag();
    let mut progress = |stage: &'static str, done: u64, total: u64| {
        bar.set_length(total);
        bar.set_position(done);
        bar.set_message(stage);
    };
    let mut options = DiscoveryOptions {
        base: Path::new(BASE),
        pool_bytes: bytes,
        max_time,
        seed,
        progress: &mut progress,
        should_stop: &|| stop.load(Ordering::Relaxed),
    };
    let discovery = discover(&topology, cpu, &mut options);
    bar.finish_and_clear();
    if stop.load(Ordering::Relaxed) {
        bail!(crate::exit::InterruptedError(
            "no colors were stored".into()
        ));
    }
    Ok(discovery?)
}

fn render(map: &ColorMap) -> String {
    let mut text = format!(
        "{} colors of {} ({:?} cache, {}, {}-way), found in {:.1} s and {} earlier tries\n",
        map.colors,
        format_size(map.cache_bytes / u64::from(map.colors)),
        map.level,
        format_size(map.cache_bytes),
        map.ways,
        map.seconds,
        map.failed_attempts.len()
    );
    text.push_str(&format!(
        "{} frames classified, {:.1} us each; {} ({:.2} %) match no color\n",
        map.pages,
        map.classify_ns / 1000.0,
        map.pages_unclassified,
        100.0 * map.pages_unclassified as f64 / map.pages.max(1) as f64
    ));
    text.push_str(&format!("frame numbers: {}\n", map.frame_numbers));
    text.push_str(&describe_coverage("private cache", &map.private));
    match &map.last_level {
        Some(coverage) => text.push_str(&describe_coverage("last level", coverage)),
        None => text.push_str("last level: the kernel reports none of known size\n"),
    }
    text
}

fn describe_coverage(name: &str, coverage: &ColorCoverage) -> String {
    let verdict = match coverage.is_partitioned {
        Some(true) => "confined",
        Some(false) => "NOT confined",
        None => {
            "not determined: too few frames of one color (--memory), or too little of the cache is free now"
        }
    };
    let knee_text = coverage
        .knee_bytes
        .map_or("none found".to_string(), format_size);
    let mut text = format!(
        "{name}: {verdict}; one color's share {}, knee of one color {knee_text}\n",
        format_size(coverage.share_bytes)
    );
    let mut table = Table::with_columns("", "chase over | one color ns | all colors ns");
    for point in &coverage.curve {
        table.add_row([
            &format_size(point.size_bytes),
            &format!("{:.1}", point.colored_ns),
            &format!("{:.1}", point.ordinary_ns),
        ]);
    }
    text.push_str(&table.text());
    text
}
