//! Small programs that are shown: a chase, a stream and a quiet one, each counting its work.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, bail};
use cachemate_core::{CpuId, CpuSet};
use cachemate_linux::kernel::{Host, Kernel};
use cachemate_linux::sense::progress::VARIABLE;

use super::Place;
use cachemate_daemon::ends_with_us;

/// Accesses between two notes of progress.
const STEP: usize = 1 << 14;

/// What `cachemate live-program` runs; all but `count` until told to stop.
///
/// # Errors
/// The progress file cannot be written, or an addition was lost.
pub fn act(kind: &str, bytes: u64, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    let progress = Progress::open(stop)?;
    let lines = (bytes / 64).max(2) as usize;
    match kind {
        "chase" => chase(lines, &progress),
        "stream" => stream(lines, &progress),
        "count" => return count(bytes, &progress.stop),
        _ => quiet(&progress),
    }
    Ok(())
}

/// The first eight bytes of the file named in the environment, written through; or nowhere.
struct Progress {
    file: Option<std::fs::File>,
    count: AtomicU64,
    stop: Arc<AtomicBool>,
}

impl Progress {
    fn open(stop: Arc<AtomicBool>) -> anyhow::Result<Self> {
        let file = match std::env::var_os(VARIABLE) {
            Some(path) => Some(
                std::fs::OpenOptions::new()
                    .write(true)
                    .open(&path)
                    .with_context(|| format!("{}: cannot be written", path.to_string_lossy()))?,
            ),
            None => None,
        };
        Ok(Progress { file, count: AtomicU64::new(0), stop })
    }

    /// True = go on.
    fn add(&self, work: u64) -> bool {
        use std::os::unix::fs::FileExt;
        let now = self.count.fetch_add(work, Ordering::Relaxed) + work;
        if let Some(file) = &self.file {
            // One small write every few hundred microseconds; who cannot report goes on working.
            let _ = file.write_at(&now.to_ne_bytes(), 0);
        }
        !self.stop.load(Ordering::Relaxed)
    }
}

/// One random cycle through all lines (Sattolo's algorithm).
fn chase(lines: usize, progress: &Progress) {
    let mut memory = vec![0u64; lines * 8];
    let mut order: Vec<u32> = (0..lines as u32).collect();
    let mut state = 1u64;
    for at in (1..lines).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(at, ((state >> 33) % at as u64) as usize);
    }
    order.iter().enumerate().for_each(|(at, &next)| memory[at * 8] = u64::from(next) * 8);
    drop(order);
    let mut at = 0usize;
    while progress.add(STEP as u64) {
        for _ in 0..STEP {
            at = std::hint::black_box(memory[at]) as usize;
        }
    }
}

fn stream(lines: usize, progress: &Progress) {
    let memory = vec![1u64; lines * 8];
    let mut sum = 0u64;
    for part in memory.chunks(STEP * 8).cycle() {
        sum = part.iter().step_by(8).fold(sum, |sum, word| sum.wrapping_add(*word));
        std::hint::black_box(sum);
        if !progress.add((part.len() / 8) as u64) {
            break;
        }
    }
}

/// Two threads add to counters all over 2 000 pages, `each` times or until told to stop; an error where one addition was lost.
/// The only one that ends by itself.
fn count(each: u64, stop: &AtomicBool) -> anyhow::Result<()> {
    const PAGES: usize = 2_000;
    const BETWEEN_LOOKS: u64 = 1 << 16;
    let counters: Vec<[AtomicU64; 2]> = (0..PAGES * 256).map(|_| Default::default()).collect();
    let made = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for own in 0..2 {
            let (counters, made) = (&counters, &made);
            scope.spawn(move || {
                let (mut state, mut done) = (own as u64 + 1, 0);
                while done < each && !stop.load(Ordering::Relaxed) {
                    let until = each.min(done + BETWEEN_LOOKS);
                    for _ in done..until {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let counter = &counters[(state >> 33) as usize % counters.len()][own];
                        // Plain load and store: each counter has one writer, and a page that moves must not lose a store.
                        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    }
                    done = until;
                }
                made.fetch_add(done, Ordering::Relaxed);
            });
        }
    });
    let sum: u64 = counters.iter().flatten().map(|counter| counter.load(Ordering::Relaxed)).sum();
    let made = made.into_inner();
    if sum == made { Ok(()) } else { bail!("{sum} of {made} additions are left") }
}

/// Arithmetic in registers.
fn quiet(progress: &Progress) {
    let mut word = 1u64;
    while progress.add(STEP as u64) {
        for _ in 0..STEP * 16 {
            word = std::hint::black_box(word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
}

/// A program that is shown, with everything that it starts; ended when dropped.
pub struct Actor {
    pub name: String,
    child: Child,
    report: std::path::PathBuf,
}

impl Actor {
    /// One of our own programs.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn own(place: &Place, name: &str, kind: &str, bytes: u64) -> anyhow::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["live-program", kind, &bytes.to_string()]);
        Self::start(place, name, command)
    }

    /// A shell line, again and again.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn shell(place: &Place, name: &str, line: &str) -> anyhow::Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("while :; do {line}; done >/dev/null 2>&1")]).current_dir(&place.folder);
        Self::start(place, name, command)
    }

    fn start(place: &Place, name: &str, mut command: Command) -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt;
        let dir = place.folder.join("progress");
        std::fs::create_dir_all(&dir).with_context(|| format!("{}: cannot be made", dir.display()))?;
        let report = dir.join(format!("of-{name}"));
        // A new file: an older one may be another process's by now.
        let _ = std::fs::remove_file(&report);
        std::fs::write(&report, 0u64.to_ne_bytes())
            .with_context(|| format!("{}: cannot be written", report.display()))?;
        command.env(VARIABLE, &report).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        ends_with_us(&mut command, rustix::process::Signal::KILL);
        let child = command.spawn().with_context(|| format!("'{name}' cannot be started"))?;
        let by_pid = dir.join(child.id().to_string());
        let _ = std::fs::remove_file(&by_pid);
        std::fs::hard_link(&report, &by_pid).with_context(|| format!("{}: cannot be linked", by_pid.display()))?;
        Ok(Actor { name: name.to_string(), child, report })
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Work done so far.
    pub fn work(&self) -> u64 {
        let bytes = std::fs::read(&self.report).unwrap_or_default();
        bytes.get(..8).and_then(|bytes| Some(u64::from_ne_bytes(bytes.try_into().ok()?))).unwrap_or(0)
    }

    /// For this program and all that it starts from now on.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn sit_on(&self, cpus: &[CpuId]) -> std::io::Result<()> {
        let cpus: CpuSet = cpus.iter().map(|cpu| cpu.0).collect();
        Host::new("/").set_affinity(self.pid(), &cpus)
    }

    /// Our own child, so that nobody else's program is ever stopped.
    pub fn runs(&self, runs: bool) {
        self.signal(if runs { rustix::process::Signal::CONT } else { rustix::process::Signal::STOP });
    }

    fn signal(&self, signal: rustix::process::Signal) {
        if let Some(group) = rustix::process::Pid::from_raw(self.pid()) {
            // A group that has ended needs no signal.
            let _ = rustix::process::kill_process_group(group, signal);
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.signal(rustix::process::Signal::KILL);
        let _ = self.child.wait();
    }
}
