//! The host of a bench, its results, and the way in which samples are taken.
//!
//! Every figure is a ratio within one run. Arms alternate, and every sample lies between two cache-line ping-pongs,
//! so that samples in which the CPUs did not share a cache are reported separately. A part that the host cannot run
//! is skipped with the reason; a missed target is printed as missed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cachemate_core::CpuId;
use cachemate_linux::sense::probes::ping_pong::{RoundTripBounds, SharingVerdict, round_trip};
use serde::Serialize;

/// One claim of a bench, with its verdict.
#[derive(Clone, Debug, Serialize)]
pub struct BenchRow {
    pub part: &'static str,
    pub what: String,
    pub target: String,
    pub measured: String,
    pub verdict: BenchVerdict,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BenchVerdict {
    Met,
    Missed,
    /// The figure has no target.
    Reported,
    /// The host cannot run this part; `measured` contains the reason.
    Skipped,
}

impl BenchRow {
    pub fn new(
        part: &'static str,
        subject: &str,
        target: &str,
        measured: String,
        verdict: BenchVerdict,
    ) -> Self {
        BenchRow {
            part,
            what: subject.to_string(),
            target: target.to_string(),
            measured,
            verdict,
        }
    }
    pub fn skipped(part: &'static str, subject: &str, reason: String) -> Self {
        BenchRow::new(part, subject, "", reason, BenchVerdict::Skipped)
    }
    /// Rows of a part. An error becomes a skipped row, so that the other parts continue.
    pub fn rows_or_skipped(
        part: &'static str,
        subject: &str,
        result: anyhow::Result<Vec<BenchRow>>,
    ) -> Vec<BenchRow> {
        result.unwrap_or_else(|error| {
            vec![BenchRow::skipped(
                part,
                subject,
                format!("failed: {error:#}"),
            )]
        })
    }
    /// A row with the verdict met or missed.
    pub fn from_target(
        part: &'static str,
        subject: &str,
        target: &str,
        measured: String,
        is_met: bool,
    ) -> Self {
        BenchRow::new(
            part,
            subject,
            target,
            measured,
            if is_met {
                BenchVerdict::Met
            } else {
                BenchVerdict::Missed
            },
        )
    }
}

/// The host on which the parts of a bench run.
pub struct BenchHost {
    /// Two CPUs that share a last-level cache according to the kernel.
    pub cpus: (CpuId, CpuId),
    /// Measured size of the cache. The kernel's value is not used, because virtual machines report that of their
    /// host.
    pub cache_bytes: u64,
    /// Size of the largest private cache.
    pub private_bytes: u64,
    pub work_dir: PathBuf,
    /// Path of the shipped command, which the bench measures.
    pub command: PathBuf,
    pub stop_flag: Arc<AtomicBool>,
    /// Deadline of the current part.
    pub deadline: Instant,
}

impl BenchHost {
    /// Has the bench been interrupted, or the deadline passed?
    pub fn is_stopped(&self) -> bool {
        self.stop_flag.load(Ordering::Relaxed) || Instant::now() >= self.deadline
    }

    /// Sleeps for this time, or until the bench is interrupted.
    pub fn sleep_unless_stopped(&self, duration: Duration) {
        let wake_time = Instant::now() + duration;
        while Instant::now() < wake_time && !self.is_stopped() {
            std::thread::sleep(
                Duration::from_millis(20).min(wake_time.saturating_duration_since(Instant::now())),
            );
        }
    }
}

/// Runs `sample` between two ping-pongs. The verdict on sharing is `None` if they differ or are unclear.
pub fn sample_between_ping_pongs<T>(
    cpus: (CpuId, CpuId),
    sample: impl FnOnce() -> T,
) -> (Option<bool>, T) {
    let shared_before = measure_sharing(cpus);
    let outcome = sample();
    let shared_after = measure_sharing(cpus);
    (
        shared_before.filter(|_| shared_before == shared_after),
        outcome,
    )
}

/// Do two CPUs share a cache at present? `None` if the measurement is unclear, or the CPUs are busy.
fn measure_sharing(cpus: (CpuId, CpuId)) -> Option<bool> {
    // A busy CPU invalidates one of three attempts rather than the whole sample.
    let sample = (0..3).find_map(|_| round_trip(cpus).ok())?;
    match RoundTripBounds::default().classify(sample.round_trip_ns) {
        SharingVerdict::Shared => Some(true),
        SharingVerdict::Split => Some(false),
        SharingVerdict::Unclear => None,
    }
}

/// Runs the shipped command and returns its output.
///
/// # Errors
/// The command cannot be started, or fails.
pub fn run_command(command: &Path, args: &[&str]) -> anyhow::Result<String> {
    let command_text = command.display();
    let spawn_result = Command::new(command)
        .args(args)
        .stdin(Stdio::null())
        .output();
    let output = spawn_result.with_context(|| {
        format!("{command_text}: cannot be started (--cachemate sets another path)")
    })?;
    if !output.status.success() {
        bail!(
            "{command_text} {}: {}: {}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
