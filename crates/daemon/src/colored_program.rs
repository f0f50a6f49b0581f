//! A program that runs with page colors: it is started with the agent preloaded, observed from outside, and recolored
//! by writing its agent's control file.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cachemate_agent::layout::{DIR_VARIABLE, HOLD_VARIABLE, MASK_VARIABLE};
use cachemate_linux::act::colors::agents::{
    self, AgentReport, ResidentPages, resident_pages, target_text,
};
use cachemate_linux::act::colors::preloadable;
use cachemate_linux::act::colors::reference_set::{self, BASE, FrameLedger};
use cachemate_linux::kernel::{Kernel, LinuxHost};

/// The preloaded library, built together with this crate.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libcachemate_color.so"));

/// Command line and options of a colored program.
pub struct ColoredCommand<'a> {
    /// The program and its arguments.
    pub command: &'a [String],
    /// Allowed colors, one bit per color.
    pub mask: u64,
    /// Maximum memory that the program's agent may hold, including frames of other colors.
    pub hold_bytes: u64,
    /// Additional environment variables.
    pub variables: &'a [(&'a str, &'a Path)],
    /// File for its output; `None` to inherit this process's output.
    pub output: Option<&'a Path>,
    /// Whether the program is killed when this process ends; otherwise it continues.
    pub ends_with_parent: bool,
}

/// Memory available without swapping, as the kernel reports it.
pub fn available_bytes() -> Option<u64> {
    let text = cachemate_files::read_text_limited(Path::new("/proc/meminfo"), 1 << 16).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// A colored program. When dropped, it removes the program's directory.
pub struct ColoredProgram {
    child: Child,
    dir: PathBuf,
    ledger: FrameLedger,
    /// Resident pages of each process, as last read.
    resident_by_pid: BTreeMap<i32, ResidentPages>,
    mask: u64,
}

impl ColoredProgram {
    /// Starts the program without verifying the reference set, because callers verify the set once
    /// ([`reference_set::open`]), and each agent verifies each frame.
    ///
    /// # Errors
    /// There is no reference set, the program is not found or cannot be preloaded, or it cannot be started.
    pub fn start(launch: &ColoredCommand<'_>) -> anyhow::Result<Self> {
        let name = launch.command.first().context("no command")?;
        let path = std::env::var("PATH").ok();
        let program_path = preloadable::find_executable(name, path.as_deref())
            .with_context(|| format!("{name}: not found"))?;
        if let Some(reason) = preloadable::find_refusal(&program_path)
            .with_context(|| format!("{}: cannot be read", program_path.display()))?
        {
            bail!("{reason}");
        }
        let (host, base) = (LinuxHost::new("/"), Path::new(BASE));
        reference_set::read_id(base)?;
        agents::remove_dead_sessions(&host, base);
        let ledger = FrameLedger::open(base)?;
        // Each session of a launcher has a separate directory.
        static SESSIONS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let session = SESSIONS.fetch_add(1, Ordering::Relaxed);
        let dir = agents::create_session(base, std::process::id(), session, LIBRARY)?;
        let library = dir.join(agents::LIBRARY);
        let preload = match std::env::var("LD_PRELOAD") {
            Ok(preloads) if !preloads.is_empty() => format!("{}:{preloads}", library.display()),
            _ => library.display().to_string(),
        };
        let mut command = Command::new(&program_path);
        command
            .arg0(name)
            .args(&launch.command[1..])
            .env("LD_PRELOAD", preload);
        command
            .env(DIR_VARIABLE, &dir)
            .env(MASK_VARIABLE, target_text(launch.mask, true));
        command.env(HOLD_VARIABLE, launch.hold_bytes.to_string());
        command.envs(
            launch
                .variables
                .iter()
                .map(|(name, value)| (*name, value.as_os_str())),
        );
        if let Some(path) = launch.output {
            let file = cachemate_files::create(path, true)
                .with_context(|| format!("{}: cannot be written", path.display()))?;
            command.stdin(Stdio::null()).stdout(file);
        }
        // Transparent huge pages are disabled, because a huge page is 512 frames of all colors. SAFETY: prctl(2) is
        // async-signal-safe and touches no memory of this process.
        unsafe {
            command.pre_exec(|| Ok(rustix::thread::disable_transparent_huge_pages(true)?));
        }
        if launch.ends_with_parent {
            crate::end_with_parent(&mut command, rustix::process::Signal::KILL);
        }
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                let _ = fs::remove_dir_all(&dir);
                return Err(error).with_context(|| format!("{name}: cannot be started"));
            }
        };
        Ok(ColoredProgram {
            child,
            dir,
            ledger,
            resident_by_pid: BTreeMap::new(),
            mask: launch.mask,
        })
    }

    /// Process id of the program itself.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The directory of the program's own agent.
    pub fn agent_dir(&self) -> PathBuf {
        self.dir.join(self.pid().to_string())
    }

    /// The current report of the program's agent.
    pub fn agent_report(&self) -> Option<AgentReport> {
        AgentReport::read(&LinuxHost::new("/"), &self.agent_dir()).ok()
    }

    /// Waits until the agent is running. Fails if the agent refuses, if the program ends, or after `max_wait`.
    pub fn wait_until_ready(&mut self, max_wait: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + max_wait;
        while Instant::now() < deadline {
            match self.agent_report().map(|agent| agent.account) {
                Some(Ok(_)) => return Ok(()),
                Some(Err(reason)) => bail!("the agent could not start: {reason}"),
                None => {}
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("the program has ended: {status}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        bail!(
            "the agent did not report within {:.0} s",
            max_wait.as_secs_f64()
        );
    }

    /// Requests other colors; the agent moves the pages.
    ///
    /// # Errors
    /// The agent's file cannot be written.
    pub fn recolor(&mut self, mask: u64) -> anyhow::Result<()> {
        let path = self.agent_dir().join("wanted");
        let text = format!("{}\n", target_text(mask, true));
        LinuxHost::new("/")
            .write(&path, &text)
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        self.mask = mask;
        Ok(())
    }

    /// Counts the resident frames of the program and its descendants, from outside. A process without an active agent
    /// is not counted; one that has exited counts with its last value.
    pub fn poll_resident_pages(&mut self) -> Option<ResidentPages> {
        for (pid, agent) in self
            .agent_reports()
            .into_iter()
            .filter(|(_, agent)| agent.account.is_ok())
        {
            if let Ok(resident) = resident_pages(pid, &self.ledger, self.mask, Some(&agent))
                && resident.allowed_anonymous_share().is_some()
            {
                self.resident_by_pid.insert(pid, resident);
            }
        }
        self.last_resident_pages()
    }

    /// The pages of all its processes together, as last read.
    pub fn last_resident_pages(&self) -> Option<ResidentPages> {
        self.resident_by_pid
            .values()
            .copied()
            .reduce(|sum, pages| sum.sum(&pages))
    }

    /// The reports of all agents of the session: the program's own, and those of programs that it started.
    pub fn agent_reports(&self) -> Vec<(i32, AgentReport)> {
        let host = LinuxHost::new("/");
        let pids = agents::list_processes(&host, &self.dir);
        pids.into_iter()
            .filter_map(|pid| {
                Some((
                    pid,
                    AgentReport::read(&host, &self.dir.join(pid.to_string())).ok()?,
                ))
            })
            .collect()
    }

    /// Waits for the end of the program, polls its pages in the meantime, and forwards an interruption to it. Returns
    /// the exit code as a shell reports it.
    ///
    /// # Errors
    /// The program cannot be waited for.
    pub fn wait(&mut self, stop: &AtomicBool, max_poll_interval: Duration) -> anyhow::Result<i32> {
        // The first intervals are short, so that a short program is polled at least once; later ones are longer, to
        // limit the cost of a long program.
        let mut poll_interval = Duration::from_millis(15).min(max_poll_interval);
        let (mut is_signaled, mut next_poll) = (false, Instant::now() + poll_interval);
        loop {
            if let Some(status) = self
                .child
                .try_wait()
                .context("cannot wait for the program")?
            {
                return Ok(status
                    .code()
                    .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)));
            }
            if stop.load(Ordering::Relaxed) && !is_signaled {
                is_signaled = true;
                self.signal(rustix::process::Signal::TERM);
            }
            if Instant::now() >= next_poll {
                self.poll_resident_pages();
                poll_interval = (2 * poll_interval).min(max_poll_interval);
                next_poll = Instant::now() + poll_interval;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends a signal to the program itself; a program that has ended needs none.
    pub fn signal(&self, signal: rustix::process::Signal) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid()) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

impl Drop for ColoredProgram {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        // Programs that outlive this one still have the directory's files open or mapped, so a later session
        // removes the directory.
        let host = LinuxHost::new("/");
        if !agents::list_processes(&host, &self.dir)
            .into_iter()
            .any(|pid| host.stat(pid).is_ok())
        {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}
