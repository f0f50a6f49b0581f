//! Part (c) of the benchmark: CPU time of the daemon, and its effect on unmanaged programs.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use cachemate_core::{median, quantile};
use cachemate_daemon::end_with_parent;
use rustix::process::Signal;

use crate::bench_host::{BenchHost, BenchRow};
use crate::programs::Actor;

const TASK_COUNT: usize = 200;
/// Concurrent viewers of the dashboard, which accepts at most eight.
const VIEWER_COUNT: usize = 4;
/// Seconds over which the daemon's CPU time is measured.
const MEASURED_S: u64 = 30;
/// Rounds of three blocks: one with the daemon and two without it. Comparing the two without it gives
/// the noise between blocks under equal conditions.
const ROUNDS: usize = 15;
const BLOCK_TIME: Duration = Duration::from_millis(2000);
const SETTLING_TIME: Duration = Duration::from_millis(400);
/// Maximum wait for a starting daemon, which uses half a second of CPU time to survey the host. On a busy host this
/// takes several seconds, and it is not part of the cost of managing.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Measures part (c): the cost of managing.
///
/// # Errors
/// A program or the daemon cannot be started.
pub fn bench_rows(host: &BenchHost) -> anyhow::Result<Vec<BenchRow>> {
    let sleepers = SleeperGroup::start(host)?;
    let config = format!(
        "mode = \"act\"\nwindow_ms = 1000\n[policy]\nname = \"round-robin\"\n[[rules]]\npid = {}\n",
        sleepers.0.id()
    );
    std::fs::write(host.work_dir.join("overhead.toml"), config)
        .context("the daemon's configuration cannot be written")?;
    let title = format!("daemon's share of a CPU at {TASK_COUNT} tasks, 1 s windows");
    let overhead_row = |title: &str, cpu_share: Option<f64>| match cpu_share {
        None => BenchRow::skipped("c", title, "the daemon ended".to_string()),
        Some(share) => BenchRow::from_target(
            "c",
            title,
            "0.5 %",
            format!("{:.3} %", 100.0 * share),
            share < 0.005,
        ),
    };
    let mut rows = vec![overhead_row(&title, measure_cpu_share(host, false)?)];
    rows.push(overhead_row(
        &format!("{title}: with a page that {VIEWER_COUNT} look at"),
        measure_cpu_share(host, true)?,
    ));
    rows.push(dashboard_row(host)?);
    rows.push(neutral_load_row(host)?);
    drop(sleepers);
    Ok(rows)
}

/// Share of a CPU that an acting daemon uses, with a viewed dashboard if `has_page`; `None` if the daemon ended.
fn measure_cpu_share(host: &BenchHost, has_page: bool) -> anyhow::Result<Option<f64>> {
    let socket = host.work_dir.join("overhead.page");
    let socket_path = socket.to_string_lossy();
    let page_args = ["--dashboard", &*socket_path];
    let daemon = BenchDaemon::start(
        host,
        "overhead",
        "overhead",
        if has_page { &page_args } else { &[] },
    )?;
    daemon.wait_until_started(host);
    let viewers: Vec<_> = (0..if has_page { VIEWER_COUNT } else { 0 })
        .filter_map(|_| spawn_viewer(&socket))
        .collect();
    let (before_ns, start) = (daemon.cpu_time_ns(), Instant::now());
    host.sleep_unless_stopped(Duration::from_secs(MEASURED_S));
    let seconds = start.elapsed().as_secs_f64();
    let after_ns = daemon.cpu_time_ns();
    drop(daemon);
    // The viewers' streams end with the daemon.
    let viewer_count = viewers
        .into_iter()
        .filter_map(|viewer| viewer.join().ok())
        .filter(|bytes| *bytes > 0)
        .count();
    anyhow::ensure!(
        viewer_count == if has_page { VIEWER_COUNT } else { 0 },
        "{viewer_count} of {VIEWER_COUNT} viewers of the page received data"
    );
    Ok(after_ns
        .zip(before_ns)
        .map(|(after_ns, before_ns)| after_ns.saturating_sub(before_ns) as f64 / 1e9 / seconds))
}

/// Compares three daemons that observe the same programs: without a dashboard, with an unviewed one, and with a viewed
/// one.
fn dashboard_row(host: &BenchHost) -> anyhow::Result<BenchRow> {
    let title = format!(
        "daemon's share of a CPU observing {TASK_COUNT} tasks: with a page that {VIEWER_COUNT} look at"
    );
    let start_daemon = |name: &str, has_page: bool| {
        let socket = host.work_dir.join(format!("{name}.page"));
        let socket = socket.to_string_lossy();
        let args: &[&str] = if has_page {
            &["--observe-only", "--dashboard", &socket]
        } else {
            &["--observe-only"]
        };
        BenchDaemon::start(host, "overhead", name, args)
    };
    let daemons = [
        start_daemon("plain", false)?,
        start_daemon("unseen", true)?,
        start_daemon("seen", true)?,
    ];
    daemons
        .iter()
        .for_each(|daemon| daemon.wait_until_started(host));
    let socket = host.work_dir.join("seen.page");
    let viewers: Vec<_> = (0..VIEWER_COUNT)
        .filter_map(|_| spawn_viewer(&socket))
        .collect();
    let times_before: Vec<_> = daemons.iter().map(BenchDaemon::cpu_time_ns).collect();
    let start = Instant::now();
    host.sleep_unless_stopped(Duration::from_secs(MEASURED_S));
    let seconds = start.elapsed().as_secs_f64();
    let shares: Vec<f64> = daemons
        .iter()
        .zip(times_before)
        .filter_map(|(daemon, before)| {
            Some(daemon.cpu_time_ns()?.saturating_sub(before?) as f64 / 1e9 / seconds)
        })
        .collect();
    drop(daemons);
    // The viewers' streams end with the daemon.
    let bytes_by_viewer: Vec<usize> = viewers
        .into_iter()
        .filter_map(|viewer| viewer.join().ok())
        .collect();
    let [plain_share, unviewed_share, viewed_share] = shares[..] else {
        return Ok(BenchRow::skipped("c", &title, "a daemon ended".to_string()));
    };
    if bytes_by_viewer.len() < VIEWER_COUNT || bytes_by_viewer.contains(&0) {
        return Ok(BenchRow::skipped(
            "c",
            &title,
            format!(
                "{} of {VIEWER_COUNT} viewers received data",
                bytes_by_viewer.len()
            ),
        ));
    }
    let kibibytes =
        bytes_by_viewer.iter().sum::<usize>() as f64 / VIEWER_COUNT as f64 / seconds / 1024.0;
    let measured = format!(
        "{:.3} %; no viewer {:.3} %, no page {:.3} %: {:.2} and {:.2} times that; a viewer gets {kibibytes:.0} KiB a second",
        100.0 * viewed_share,
        100.0 * unviewed_share,
        100.0 * plain_share,
        viewed_share / plain_share,
        unviewed_share / plain_share
    );
    Ok(BenchRow::from_target(
        "c",
        &title,
        "0.5 %",
        measured,
        viewed_share < 0.005,
    ))
}

/// Reads the stream of a dashboard, and counts its bytes.
fn spawn_viewer(socket: &std::path::Path) -> Option<std::thread::JoinHandle<usize>> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream
        .write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .ok()?;
    Some(std::thread::spawn(move || {
        let (mut buffer, mut bytes) = ([0u8; 1 << 16], 0);
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            bytes += read;
        }
        bytes
    }))
}

/// Compares the work of two quiet unmanaged programs with and without a daemon on the host.
fn neutral_load_row(host: &BenchHost) -> anyhow::Result<BenchRow> {
    const TITLE: &str = "throughput of a neutral load, managed against unmanaged";
    let cpus = [host.cpus.0, host.cpus.1];
    let actors = [
        Actor::start_own(host, "quiet-1", "quiet", 0)?,
        Actor::start_own(host, "quiet-2", "quiet", 0)?,
    ];
    for (actor, cpu) in actors.iter().zip(cpus) {
        actor.set_affinity(&[cpu])?;
    }
    let daemon = BenchDaemon::start(host, "overhead", "overhead", &[])?;
    daemon.wait_until_started(host);
    let (managed_ratios, control_ratios) = measure_pairs(host, &actors, &daemon);
    Ok(match median(&managed_ratios) {
        None => BenchRow::skipped("c", TITLE, "no round came to its end".to_string()),
        Some(ratio) => {
            let measured = describe_ratios(&managed_ratios, &control_ratios);
            BenchRow::from_target(
                "c",
                TITLE,
                "within 1 %",
                measured,
                (0.99..=1.01).contains(&ratio),
            )
        }
    })
}

/// For each round, the ratio of the programs' work with the daemon to that without it, and the control ratio between
/// the two blocks without it.
pub fn measure_pairs(
    host: &BenchHost,
    actors: &[Actor],
    daemon: &BenchDaemon,
) -> (Vec<f64>, Vec<f64>) {
    let (mut managed_ratios, mut control_ratios) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let mut rates = [0.0; 3];
        // The order changes from round to round, so that drifts of the host affect all blocks alike.
        for arm in (0..3).map(|at| (at + round) % 3) {
            daemon.signal(if arm == 0 { Signal::CONT } else { Signal::STOP });
            host.sleep_unless_stopped(SETTLING_TIME);
            let work_before: u64 = actors.iter().map(Actor::read_work).sum();
            let start = Instant::now();
            host.sleep_unless_stopped(BLOCK_TIME);
            let work = actors
                .iter()
                .map(Actor::read_work)
                .sum::<u64>()
                .saturating_sub(work_before) as f64;
            rates[arm] = work / start.elapsed().as_secs_f64();
        }
        if host.is_stopped() {
            break;
        }
        managed_ratios.push(rates[0] / rates[1].max(1.0));
        control_ratios.push(rates[2] / rates[1].max(1.0));
    }
    (managed_ratios, control_ratios)
}

/// The median of the managed ratios, with the spread of the control ratios.
pub fn describe_ratios(managed_ratios: &[f64], control_ratios: &[f64]) -> String {
    let [low, ratio, high] = quartiles(managed_ratios);
    let [control_low, control_ratio, control_high] = quartiles(control_ratios);
    format!(
        "{ratio:.3} (middle half of {} rounds {low:.3} to {high:.3}); unmanaged against unmanaged {control_ratio:.3} \
         ({control_low:.3} to {control_high:.3})",
        managed_ratios.len()
    )
}

/// The three quartiles of the values; NaN without values.
fn quartiles(values: &[f64]) -> [f64; 3] {
    [0.25, 0.5, 0.75].map(|share| quantile(values, share).unwrap_or(f64::NAN))
}

/// A group of [`TASK_COUNT`] programs that sleep.
struct SleeperGroup(Child);

impl SleeperGroup {
    fn start(host: &BenchHost) -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt;
        let script = format!(
            "trap 'kill -9 0' TERM; i=0; while [ $i -lt {TASK_COUNT} ]; do sleep 10000 & i=$((i+1)); done; wait"
        );
        let mut command = Command::new("sh");
        command
            .args(["-c", &script])
            .stdin(Stdio::null())
            .process_group(0)
            .current_dir(&host.work_dir);
        end_with_parent(&mut command, Signal::TERM);
        Ok(SleeperGroup(
            command.spawn().context("sh cannot be started")?,
        ))
    }
}

impl Drop for SleeperGroup {
    fn drop(&mut self) {
        if let Some(group) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            // A process group that has ended needs no signal.
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

/// A daemon of the shipped command, which is stopped when dropped.
pub struct BenchDaemon(Child);

impl BenchDaemon {
    /// Starts a daemon with its own state directory and socket, named after `name`.
    pub fn start(
        host: &BenchHost,
        config: &str,
        name: &str,
        extra_args: &[&str],
    ) -> anyhow::Result<Self> {
        let dir = &host.work_dir;
        let mut command = Command::new(&host.command);
        command
            .args(["--quiet", "manage", "--config"])
            .arg(dir.join(format!("{config}.toml")));
        command
            .arg("--state-dir")
            .arg(dir.join(format!("{name}-state")))
            .args(extra_args);
        command
            .arg("--socket")
            .arg(dir.join(format!("{name}.sock")))
            .stdin(Stdio::null());
        end_with_parent(&mut command, Signal::TERM);
        Ok(BenchDaemon(
            command.spawn().context("the daemon cannot be started")?,
        ))
    }

    /// CPU time of all the daemon's threads in nanoseconds. Clock ticks would be too coarse: one is 0.03 % of the
    /// measured time.
    fn cpu_time_ns(&self) -> Option<u64> {
        let mut sum = 0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.0.id())).ok()? {
            let schedstat = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            sum += schedstat
                .split_ascii_whitespace()
                .next()?
                .parse::<u64>()
                .ok()?;
        }
        Some(sum)
    }

    /// Waits until the daemon has finished its survey of the host.
    pub fn wait_until_started(&self, host: &BenchHost) {
        let start = Instant::now();
        let mut previous_ns = self.cpu_time_ns();
        while start.elapsed() < START_TIMEOUT && !host.is_stopped() {
            host.sleep_unless_stopped(Duration::from_millis(1500));
            let current_ns = self.cpu_time_ns();
            if current_ns
                .zip(previous_ns)
                .is_none_or(|(now, before)| now.saturating_sub(before) <= 20_000_000)
            {
                break;
            }
            previous_ns = current_ns;
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            // A daemon that has ended needs no signal.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

impl Drop for BenchDaemon {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
        self.signal(Signal::TERM);
        let _ = self.0.wait();
    }
}
