//! The reading end of the recorder's FIFO, which also watches the child.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use super::child_watch::{ChildWatch, NamedChildren, read_stat};
use crate::TraceError;

/// Time between SIGTERM and SIGKILL for a child that does not stop.
const TERM_GRACE: Duration = Duration::from_secs(3);
/// Time for which surviving children may hold the FIFO open without writing after the program's end.
const MAX_SILENCE: Duration = Duration::from_millis(500);

/// Reads until the program and all processes that write for it have ended. An interrupt stops them, and their remaining
/// output is read.
pub(super) struct FifoReader<'a> {
    input: File,
    child: Child,
    interrupt: &'a AtomicBool,
    /// Whether to wait for processes that outlive the program.
    follows_children: bool,
    /// Whether the program must be stopped at the next read.
    pub(super) is_stop_requested: bool,
    /// Processes that write, besides the child.
    pub(super) writers: Vec<u32>,
    stop_time: Option<Instant>,
    was_killed: bool,
    exit_time: Option<Instant>,
    /// CPU time of the child's own children, which it had waited for when it ended.
    children_time: Duration,
    child_watch: ChildWatch,
}

impl<'a> FifoReader<'a> {
    /// Opens the reading end without blocking; it must exist before the child starts.
    pub(super) fn create_and_open(path: &Path) -> Result<File, TraceError> {
        let name = path.display().to_string();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, path, mode)
            .map_err(|error| TraceError::io_error(&name, "make the FIFO")(error.into()))?;
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let input = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(path);
        let input = input.map_err(TraceError::io_error(&name, "open"))?;
        // A large pipe reduces switches between writer and reader; it is optional.
        rustix::pipe::fcntl_setpipe_size(&input, 1 << 20).ok();
        Ok(input)
    }

    pub(super) fn new(
        input: File,
        child: Child,
        interrupt: &'a AtomicBool,
        follows_children: bool,
    ) -> Self {
        FifoReader {
            input,
            child,
            interrupt,
            follows_children,
            is_stop_requested: false,
            writers: Vec::new(),
            stop_time: None,
            was_killed: false,
            exit_time: None,
            children_time: Duration::ZERO,
            child_watch: ChildWatch::default(),
        }
    }

    /// Whether the program was asked to stop; false if it ended on its own.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop_time.is_some()
    }

    /// Reads the account of its children first, which goes with the zombie.
    pub(super) fn wait(&mut self) -> std::io::Result<ExitStatus> {
        if self.exit_time.is_none() {
            self.observe_end(WaitIdOptions::empty())?;
        }
        self.child.wait()
    }

    /// The CPU time of the processes that the program started and waited for; known once it has ended.
    pub(super) fn children_time(&self) -> Duration {
        self.children_time
    }

    /// The processes that the program started, and that were seen, by name; none if they are followed.
    pub(super) fn take_children(&mut self, program: &str) -> BTreeMap<String, NamedChildren> {
        std::mem::take(&mut self.child_watch).finish(program)
    }

    /// Whether the program has ended, and then reads the account of its children. The account goes with the zombie, so
    /// the zombie stays.
    fn observe_end(&mut self, options: WaitIdOptions) -> std::io::Result<bool> {
        let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) else {
            return Ok(true);
        };
        let options = options | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let has_ended = loop {
            match waitid(WaitId::Pid(pid), options) {
                Ok(status) => break status.is_some(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        };
        if has_ended {
            let stat = read_stat(self.child.id());
            self.children_time = stat.map(|stat| stat.children_time).unwrap_or_default();
        }
        Ok(has_ended)
    }

    fn signal(&self, signal: Signal) {
        let child_pid = self.exit_time.is_none().then(|| self.child.id());
        for pid in child_pid.into_iter().chain(self.writers.iter().copied()) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                // A process that has ended needs no signal.
                kill_process(pid, signal).ok();
            }
        }
    }

    fn stop_if_requested(&mut self) {
        if !self.is_stop_requested && !self.interrupt.load(Ordering::Relaxed) {
            return;
        }
        match self.stop_time {
            None => {
                self.stop_time = Some(Instant::now());
                self.signal(Signal::TERM);
            }
            Some(since) if !self.was_killed && since.elapsed() > TERM_GRACE => {
                self.was_killed = true;
                self.signal(Signal::KILL);
            }
            Some(_) => {}
        }
    }

    fn record_exit(&mut self) -> std::io::Result<()> {
        if self.exit_time.is_none() && !self.follows_children {
            self.child_watch.look(self.child.id());
        }
        if self.exit_time.is_none()
            && self.observe_end(WaitIdOptions::NOHANG)?
            && self.child.try_wait()?.is_some()
        {
            self.exit_time = Some(Instant::now());
        }
        Ok(())
    }
}

impl Read for FifoReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let poll_timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 50_000_000,
        };
        let mut last_input = Instant::now();

        loop {
            self.stop_if_requested();
            // Checked before the read, because everything that a dead child wrote is in the pipe by then.
            self.record_exit()?;
            let has_exited = self.exit_time.is_some();

            match self.input.read(buffer) {
                Ok(0) if has_exited => return Ok(0),
                // No process has opened it yet, or the program closed it and continues.
                Ok(0) => std::thread::sleep(Duration::from_millis(5)),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if has_exited
                        && (self.was_killed
                            || !self.follows_children && last_input.elapsed() > MAX_SILENCE)
                    {
                        return Ok(0);
                    }
                    let mut poll_fds = [PollFd::new(&self.input, PollFlags::IN)];
                    match poll(&mut poll_fds, Some(&poll_timeout)) {
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }

                    if !has_exited {
                        last_input = Instant::now();
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for FifoReader<'_> {
    /// Kills the program, because an error of the recorder must leave neither the program nor a zombie behind.
    fn drop(&mut self) {
        if self.exit_time.is_none() {
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }
}
