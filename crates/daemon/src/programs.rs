//! Programs started for a run: they can report progress, are timed individually, and end together.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use cachemate_linux::sense::progress::PROGRESS_VARIABLE;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;

use crate::paths;

/// Time that a program gets to react to SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(2);

/// Interval at which the programs are polled for their end.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The end of one program.
#[derive(Clone, Debug, Serialize)]
pub struct ProgramExit {
    /// Time until its end, or until this process ended it.
    pub seconds: f64,
    /// Work in its own unit, if it reports any.
    pub work: Option<u64>,
    /// Exit code; `None` if a signal ended it, or if this process ended it at the deadline.
    pub code: Option<i32>,
    /// The signal that ended the program, unless this process sent it.
    pub signal: Option<i32>,
    /// Did it still run at the deadline, so that this process ended it?
    pub timed_out: bool,
}

struct RunningChild {
    child: Child,
    report_path: std::path::PathBuf,
}

/// Running programs, for which a separate thread waits.
pub struct ProgramGroup {
    /// Process ids in the order of the commands.
    pub pids: Vec<i32>,
    is_released: Arc<AtomicBool>,
    waiter: JoinHandle<Vec<ProgramExit>>,
}

impl ProgramGroup {
    /// Starts all programs and stops each immediately, until [`ProgramGroup::release`], so that the time for starting
    /// the others does not count. Sets `is_over` when all have ended. Programs that still run at `deadline`, or when
    /// `stop` is set, are terminated.
    ///
    /// # Errors
    /// A program cannot be started; those before it are terminated.
    pub fn start(
        commands: &[Vec<String>],
        progress_dir: &Path,
        deadline: Option<Duration>,
        stop: Arc<AtomicBool>,
        is_over: Arc<AtomicBool>,
    ) -> anyhow::Result<Self> {
        paths::create_private_dir(progress_dir)?;
        let mut children: Vec<RunningChild> = Vec::new();
        for (index, command) in commands.iter().enumerate() {
            match spawn_child(
                command,
                &progress_dir.join(format!("program-{index}")),
                progress_dir,
            ) {
                Ok(program) => {
                    signal_group(&program, Signal::STOP);
                    children.push(program);
                }
                Err(error) => {
                    end_programs(&mut children);
                    return Err(error);
                }
            }
        }
        let pids = children
            .iter()
            .map(|program| program.child.id() as i32)
            .collect();
        let is_released = Arc::new(AtomicBool::new(false));
        let release_flag = Arc::clone(&is_released);
        let waiter = std::thread::Builder::new()
            .name("cachemate-waiter".into())
            .spawn(move || {
                while !release_flag.load(Ordering::Relaxed) && !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(POLL_INTERVAL);
                }
                wait_for_exits(children, deadline, &stop, &is_over)
            })
            .context("cannot start the waiting thread")?;
        Ok(ProgramGroup {
            pids,
            is_released,
            waiter,
        })
    }

    /// Resumes all programs; their time starts now.
    pub fn release(&self) {
        self.is_released.store(true, Ordering::Relaxed);
    }

    /// Waits for all programs. Returns their exits in the order of the commands.
    pub fn into_exits(self) -> Vec<ProgramExit> {
        self.waiter.join().unwrap_or_default()
    }
}

fn spawn_child(
    command: &[String],
    report_path: &Path,
    progress_dir: &Path,
) -> anyhow::Result<RunningChild> {
    let name = command.first().context("an empty command")?;
    cachemate_files::replace(report_path, &0u64.to_ne_bytes())
        .with_context(|| format!("{}: cannot be written", report_path.display()))?;
    let mut child = Command::new(name);
    child
        .args(&command[1..])
        .env(PROGRESS_VARIABLE, report_path)
        .stdin(Stdio::null());
    // Each program gets its own process group, so that Ctrl-C reaches only this process, which then ends the
    // programs.
    child.process_group(0);
    let mut child = child
        .spawn()
        .with_context(|| format!("'{name}' cannot be started"))?;
    // The daemon looks up reports by process id, whereas the name in the environment had to be chosen before the id
    // was known.
    let pid_path = progress_dir.join(child.id().to_string());
    let _ = std::fs::remove_file(&pid_path);
    if let Err(error) = std::fs::hard_link(report_path, &pid_path) {
        let _ = child.kill();
        let _ = child.wait();
        return Err(error).with_context(|| format!("{}: cannot be linked", pid_path.display()));
    }
    Ok(RunningChild {
        child,
        report_path: report_path.to_path_buf(),
    })
}

fn wait_for_exits(
    mut children: Vec<RunningChild>,
    deadline: Option<Duration>,
    stop: &AtomicBool,
    is_over: &AtomicBool,
) -> Vec<ProgramExit> {
    // A short program may end before this thread runs again, so the clock starts first.
    let start = Instant::now();
    children
        .iter()
        .for_each(|program| signal_group(program, Signal::CONT));
    let mut exits: Vec<Option<ProgramExit>> = vec![None; children.len()];
    while exits.iter().any(Option::is_none) {
        let is_late = deadline.is_some_and(|deadline| start.elapsed() >= deadline);
        if is_late || stop.load(Ordering::Relaxed) {
            break;
        }
        for (program, exit) in children
            .iter_mut()
            .zip(&mut exits)
            .filter(|(_, exit)| exit.is_none())
        {
            if let Ok(Some(status)) = program.child.try_wait() {
                *exit = Some(read_exit(start, &program.report_path, Some(status)));
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    // Work is read before the programs end, so that their shutdown is not measured.
    let results = children.iter().zip(exits);
    let results = results
        .map(|(program, exit)| exit.unwrap_or_else(|| read_exit(start, &program.report_path, None)))
        .collect();
    is_over.store(true, Ordering::Relaxed);
    end_programs(&mut children);
    results
}

/// The exit with this status; without one, the program still runs.
fn read_exit(start: Instant, report: &Path, status: Option<ExitStatus>) -> ProgramExit {
    let work = cachemate_files::read_limited(report, 4096)
        .ok()
        .and_then(|bytes| Some(u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?)));
    ProgramExit {
        seconds: start.elapsed().as_secs_f64(),
        work: work.filter(|work| *work > 0),
        code: status.and_then(|status| status.code()),
        signal: status.and_then(|status| status.signal()),
        timed_out: status.is_none(),
    }
}

fn signal_group(program: &RunningChild, signal: Signal) {
    if let Some(group) = Pid::from_raw(program.child.id() as i32) {
        // A process group that has exited needs no signal.
        let _ = kill_process_group(group, signal);
    }
}

/// Terminates the whole process group, first with SIGTERM and then with SIGKILL.
fn end_programs(children: &mut [RunningChild]) {
    let is_alive = |program: &mut RunningChild| matches!(program.child.try_wait(), Ok(None));
    children
        .iter_mut()
        .filter_map(|p| is_alive(p).then_some(p))
        .for_each(|p| signal_group(p, Signal::TERM));
    let deadline = Instant::now() + TERM_GRACE;
    while Instant::now() < deadline && children.iter_mut().any(is_alive) {
        std::thread::sleep(Duration::from_millis(10));
    }
    children
        .iter_mut()
        .filter_map(|p| is_alive(p).then_some(p))
        .for_each(|p| signal_group(p, Signal::KILL));
    children
        .iter_mut()
        .for_each(|program| drop(program.child.wait()));
}
