//! Where parts of a bench are shown, what they answer, and how a sample is taken.
//!
//! Everything is a ratio within one run, arms alternate, and every sample lies between two cache-line ping-pongs: samples
//! across which the CPUs did not share a cache are kept apart, not mixed in. What the host cannot show is skipped with the
//! reason; a bar that was missed is printed as missed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cachemate_core::CpuId;
use cachemate_linux::sense::probes::ping_pong::{RoundTripBounds, SharingVerdict, round_trip};
use serde::Serialize;

/// One claim and what came of it.
#[derive(Clone, Debug, Serialize)]
pub struct BenchRow {
    pub part: &'static str,
    pub what: String,
    pub bar: String,
    pub measured: String,
    pub verdict: BenchVerdict,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BenchVerdict {
    Met,
    Missed,
    /// A figure without a bar.
    Told,
    /// The host cannot show it; `measured` says why.
    Skipped,
}

impl BenchRow {
    pub fn new(part: &'static str, what: &str, bar: &str, measured: String, verdict: BenchVerdict) -> Self {
        BenchRow { part, what: what.to_string(), bar: bar.to_string(), measured, verdict }
    }
    pub fn skipped(part: &'static str, what: &str, why: String) -> Self {
        BenchRow::new(part, what, "", why, BenchVerdict::Skipped)
    }
    /// What a part showed, or why it broke off: the other parts go on.
    pub fn of_part(part: &'static str, what: &str, shown: anyhow::Result<Vec<BenchRow>>) -> Vec<BenchRow> {
        shown.unwrap_or_else(|error| vec![BenchRow::skipped(part, what, format!("broke off: {error:#}"))])
    }
    /// `met` decides.
    pub fn row(part: &'static str, what: &str, bar: &str, measured: String, met: bool) -> Self {
        BenchRow::new(part, what, bar, measured, if met { BenchVerdict::Met } else { BenchVerdict::Missed })
    }
}

/// Where things are shown.
pub struct BenchHost {
    /// Two CPUs that share a last-level cache by the kernel's word.
    pub cpus: (CpuId, CpuId),
    /// Size as it was measured; virtual machines are told their host's.
    pub cache_bytes: u64,
    /// The largest cache that a CPU has to itself.
    pub private_bytes: u64,
    pub folder: PathBuf,
    /// The shipped command, which is shown.
    pub command: PathBuf,
    pub stop: Arc<AtomicBool>,
    /// When the part under way has to be through.
    pub until: Instant,
}

impl BenchHost {
    /// Told to stop, or out of time.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || Instant::now() >= self.until
    }

    /// Do the two share a cache now? `None` where it is not clear, or they are not free.
    pub fn shared(&self) -> Option<bool> {
        // A busy CPU costs a try, not the sample.
        let found = (0..3).find_map(|_| round_trip(self.cpus).ok())?;
        match RoundTripBounds::default().classify(found.round_trip_ns) {
            SharingVerdict::Shared => Some(true),
            SharingVerdict::Split => Some(false),
            SharingVerdict::Unclear => None,
        }
    }

    /// Runs `sample` between two ping-pongs; `None` where they differ or are unclear.
    pub fn gated<T>(&self, sample: impl FnOnce() -> T) -> (Option<bool>, T) {
        let before = self.shared();
        let found = sample();
        let after = self.shared();
        (before.filter(|_| before == after), found)
    }

    /// Sleeps, in pieces, until then or until told to stop.
    pub fn sleep(&self, how_long: Duration) {
        let until = Instant::now() + how_long;
        while Instant::now() < until && !self.stopped() {
            std::thread::sleep(Duration::from_millis(20).min(until.saturating_duration_since(Instant::now())));
        }
    }
}

/// The shipped command was run, and this is what it answered.
///
/// # Errors
/// It cannot be started, or says that it failed.
pub fn answered(command: &Path, args: &[&str]) -> anyhow::Result<String> {
    let shown = command.display();
    let ran = Command::new(command).args(args).stdin(Stdio::null()).output();
    let ran = ran.with_context(|| format!("{shown}: cannot be started (--cachemate names another place)"))?;
    if !ran.status.success() {
        bail!("{shown} {}: {}", args.join(" "), String::from_utf8_lossy(&ran.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}

/// Middle of an unsorted list; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    Some((sorted[last / 2] + sorted[last.div_ceil(2)]) / 2.0)
}
