//! Programs of a bench: they are identified by name, can be paused and resumed, and are killed when the bench ends.

use std::process::{Child, Command, Stdio};

use anyhow::Context;
use cachemate_core::{CpuId, CpuSet};
use cachemate_daemon::end_with_parent;
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::sense::progress::PROGRESS_VARIABLE;

use crate::bench_host::BenchHost;

/// A program of a bench, with its descendants; killed when dropped.
pub struct Actor {
    pub name: String,
    child: Child,
    report_path: std::path::PathBuf,
}

impl Actor {
    /// Starts a load program.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_own(
        bench_host: &BenchHost,
        name: &str,
        kind: &str,
        bytes: u64,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["load", kind, &bytes.to_string()]);
        Self::start(bench_host, name, command)
    }

    /// Starts a shell that repeats a command line.
    ///
    /// # Errors
    /// The shell cannot be started.
    pub fn start_shell(bench_host: &BenchHost, name: &str, line: &str) -> anyhow::Result<Self> {
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("while :; do {line}; done >/dev/null 2>&1")])
            .current_dir(&bench_host.work_dir);
        Self::start(bench_host, name, command)
    }

    fn start(bench_host: &BenchHost, name: &str, mut command: Command) -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt;
        let dir = bench_host.work_dir.join("progress");
        std::fs::create_dir_all(&dir)
            .with_context(|| format!("{}: cannot be created", dir.display()))?;
        let report_path = dir.join(format!("of-{name}"));
        // The file is recreated, because an existing one may belong to another process.
        let _ = std::fs::remove_file(&report_path);
        std::fs::write(&report_path, 0u64.to_ne_bytes())
            .with_context(|| format!("{}: cannot be written", report_path.display()))?;
        command
            .env(PROGRESS_VARIABLE, &report_path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0);
        end_with_parent(&mut command, rustix::process::Signal::KILL);
        let child = command
            .spawn()
            .with_context(|| format!("'{name}' cannot be started"))?;
        let pid_path = dir.join(child.id().to_string());
        let _ = std::fs::remove_file(&pid_path);
        let actor = Actor {
            name: name.to_string(),
            child,
            report_path,
        };
        std::fs::hard_link(&actor.report_path, &pid_path)
            .with_context(|| format!("{}: cannot be linked", pid_path.display()))?;
        Ok(actor)
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Work that the program has reported so far.
    pub fn read_work(&self) -> u64 {
        let bytes = std::fs::read(&self.report_path).unwrap_or_default();
        bytes
            .get(..8)
            .and_then(|bytes| Some(u64::from_ne_bytes(bytes.try_into().ok()?)))
            .unwrap_or(0)
    }

    /// Restricts the program to these CPUs.
    ///
    /// # Errors
    /// The kernel rejects the affinity.
    pub fn set_affinity(&self, cpus: &[CpuId]) -> std::io::Result<()> {
        let cpus: CpuSet = cpus.iter().map(|cpu| cpu.0).collect();
        LinuxHost::new("/").set_affinity(self.pid(), &cpus)
    }

    /// Resumes the program's process group if `is_running`, and stops the group otherwise.
    pub fn set_running(&self, is_running: bool) {
        self.signal(if is_running {
            rustix::process::Signal::CONT
        } else {
            rustix::process::Signal::STOP
        });
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
