//! The guardian: a small process that restores the host after the daemon has died, whatever the cause.
//!
//! Problem: no handler runs on SIGKILL. Method: the daemon starts the guardian before its first change and holds the
//! write end of a pipe; the guardian waits on the read end. If the daemon reports that it has restored everything
//! itself, the guardian exits; if the pipe closes without that message, it restores from the journal. A daemon that is
//! stopped or hangs does not close the pipe. It therefore sends a heartbeat with the window's length in each window; if
//! it is silent for ten seconds and for five windows, the guardian raises the [`Fence`] and then restores everything.
//! The guardian runs in its own session, in its own control group if possible ([`cgroup`]), and ignores the signals
//! that end a terminal's programs. If the guardian dies first, the daemon notices and starts another. If both die, the
//! journal is still there for the next start and for `cachemate restore`.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub mod cgroup;

use crate::kernel::{self, Kernel, lock_file};
use crate::safety::fence::{self, Fence};
use crate::safety::journal::{self, Journal, JournalError, JournalObject};
use crate::safety::limits;
use crate::safety::restore::{RestoredObject, restore};

/// The message of a daemon that has restored everything, before it closes the pipe.
const ALL_RESTORED_MESSAGE: &[u8] = b"restored\n";

/// The shortest silence after which a daemon counts as hung.
pub const MIN_SILENCE: Duration = Duration::from_secs(10);
/// Number of the daemon's windows that the silence must also span.
const MIN_SILENT_WINDOWS: u32 = 5;
/// Maximum wait for a dismissed guardian to exit.
const MAX_EXIT_WAIT: Duration = Duration::from_secs(2);

/// The daemon's end of a running guardian.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
    fence: Arc<Fence>,
}

/// State of a guardian.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GuardianStatus {
    /// It runs, and has restored nothing.
    Alive,
    /// A signal ended it before it restored anything.
    Killed,
    /// It has judged the daemon dead or hung: it has restored the host, or is restoring it.
    TakenOver,
}

impl Guardian {
    /// Starts `program ARGS...`, which must call [`watch`], and waits until it reports ready, so that no change is
    /// made without a guardian. The guardian keeps `held_fds` open as long as it lives.
    ///
    /// # Errors
    /// It could not be started or did not report ready.
    pub fn start(program: &Path, args: &[&str], held_fds: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let fence = Arc::new(Fence::new()?);
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command.env(
            fence::ENVIRONMENT_VARIABLE,
            fence.as_fd().as_raw_fd().to_string(),
        );
        let inherited_fds: Vec<RawFd> = held_fds
            .iter()
            .chain([&fence.as_fd()])
            .map(AsRawFd::as_raw_fd)
            .collect();
        // SAFETY: setsid(2) and fcntl(2) are async-signal-safe and touch no memory of ours; the descriptors are open.
        unsafe {
            command.pre_exec(move || {
                for &fd in &inherited_fds {
                    rustix::io::fcntl_setfd(
                        BorrowedFd::borrow_raw(fd),
                        rustix::io::FdFlags::empty(),
                    )?;
                }
                rustix::process::setsid()
                    .map(|_| ())
                    .map_err(io::Error::from)
            });
        }
        let mut child = command.spawn()?;
        let mut ready_message = [0u8; 6];
        let stdout = child.stdout.as_mut().expect("standard output was piped");
        let ready_result = stdout.read_exact(&mut ready_message).and_then(|()| {
            // A stopped guardian must not block the daemon.
            let pipe = child.stdin.as_ref().expect("standard input was piped");
            Ok(rustix::fs::fcntl_setfl(pipe, rustix::fs::OFlags::NONBLOCK)?)
        });
        match ready_result {
            Ok(()) if &ready_message == b"ready\n" => Ok(Guardian { child, fence }),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                Err(io::Error::other(format!(
                    "{}: the guardian did not report ready",
                    program.display()
                )))
            }
        }
    }

    /// Process id, for status pages and tests.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The fence that it raises before it restores.
    pub fn fence(&self) -> &Arc<Fence> {
        &self.fence
    }

    /// State of the guardian, to be checked before every batch of changes.
    pub fn status(&mut self) -> GuardianStatus {
        match self.child.try_wait() {
            Ok(None) if self.fence.is_raised() => GuardianStatus::TakenOver,
            Ok(None) => GuardianStatus::Alive,
            Ok(Some(status)) if status.signal().is_some() && !self.fence.is_raised() => {
                GuardianStatus::Killed
            }
            _ => GuardianStatus::TakenOver,
        }
    }

    /// Sends a heartbeat with the length of the windows; every window sends one.
    pub fn send_heartbeat(&mut self, window: Duration) {
        if let Some(pipe) = &mut self.child.stdin {
            // A full pipe holds enough heartbeats; a broken one means that the guardian has exited, as its state shows.
            let _ = pipe.write_all(format!("{}\n", window.as_millis()).as_bytes());
        }
    }

    /// Waits until the guardian, which may still be restoring, has exited. Returns false if it still runs after
    /// `max_wait`.
    pub fn wait_for_exit(&mut self, max_wait: Duration) -> bool {
        let deadline = Instant::now() + max_wait;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5))
                }
                Ok(None) => return false,
                _ => return true,
            }
        }
    }

    /// Dismisses the guardian, because the daemon has restored everything itself.
    ///
    /// # Errors
    /// The guardian had exited already, or does not exit. In both cases it has nothing left to do.
    pub fn dismiss(mut self) -> io::Result<()> {
        let mut pipe = self
            .child
            .stdin
            .take()
            .expect("standard input was piped, and is taken only here");
        let write_result = pipe.write_all(ALL_RESTORED_MESSAGE);
        drop(pipe);
        if self.wait_for_exit(MAX_EXIT_WAIT) {
            write_result
        } else {
            Err(io::ErrorKind::TimedOut.into())
        }
    }
}

/// The event that ends the guardian's watch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DaemonOutcome {
    /// The daemon has restored everything itself.
    AllRestored,
    /// The daemon has exited.
    Exited,
    /// The daemon is alive, and has been silent for this long.
    Silent(Duration),
}

/// Reads the daemon's messages until it reports a complete restoration, closes the pipe, or is silent for too long.
fn wait_for_daemon_end(
    kernel: &dyn Kernel,
    pipe: impl AsFd,
    min_silence: Duration,
) -> DaemonOutcome {
    let (mut max_silence, mut last_message_time, mut received_bytes) =
        (min_silence, Instant::now(), Vec::new());
    loop {
        kernel.record_births();
        let poll_start = Instant::now();
        let remaining = max_silence
            .saturating_sub(last_message_time.elapsed())
            .min(Duration::from_secs(1));
        let timeout = Timespec {
            tv_sec: remaining.as_secs() as i64,
            tv_nsec: i64::from(remaining.subsec_nanos()),
        };
        let mut poll_fds = [PollFd::new(&pipe, PollFlags::IN)];
        let ready_count = match poll(&mut poll_fds, Some(&timeout)) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return DaemonOutcome::Exited,
        };
        if ready_count > 0 {
            let mut buffer = [0u8; 256];
            match rustix::io::read(&pipe, &mut buffer) {
                Ok(0) => return DaemonOutcome::Exited,
                Ok(count) => {
                    last_message_time = Instant::now();
                    received_bytes.extend_from_slice(&buffer[..count]);
                    for message in drain_complete_lines(&mut received_bytes) {
                        match message.parse::<u64>() {
                            _ if message.as_bytes() == ALL_RESTORED_MESSAGE.trim_ascii_end() => {
                                return DaemonOutcome::AllRestored;
                            }
                            Ok(ms) => {
                                max_silence = min_silence.max(
                                    MIN_SILENT_WINDOWS
                                        * Duration::from_millis(ms.min(MAX_WINDOW_MS)),
                                )
                            }
                            Err(_) => {}
                        }
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return DaemonOutcome::Exited,
            }
        } else if poll_start.elapsed() > remaining + Duration::from_secs(1) {
            // The guardian was stopped as well, so the daemon's time starts again.
            last_message_time = Instant::now();
        } else if last_message_time.elapsed() >= max_silence {
            return DaemonOutcome::Silent(last_message_time.elapsed());
        }
    }
}

/// Maximum length of a window in a heartbeat; a larger number counts as this one.
const MAX_WINDOW_MS: u64 = 3_600_000;

/// Removes and returns the complete lines of the bytes read so far.
fn drain_complete_lines(received_bytes: &mut Vec<u8>) -> Vec<String> {
    let end = received_bytes
        .iter()
        .rposition(|&byte| byte == b'\n')
        .map_or(0, |last| last + 1);
    let complete_bytes: Vec<u8> = received_bytes.drain(..end).collect();
    String::from_utf8_lossy(&complete_bytes)
        .lines()
        .map(str::to_string)
        .collect()
}

/// Runs the guardian: reports ready, waits for the daemon's end or silence, and restores the host if the daemon did
/// not.
///
/// # Errors
/// The journal could not be read, or the lock's file not opened. Objects that could not be restored are in the report.
pub fn watch(kernel: &dyn Kernel, state_dir: &Path) -> Result<RecoveryReport, JournalError> {
    ignore_terminal_signals();
    // Without a control group of its own, the guardian stays in the daemon's, and `status` reports it.
    let guardian_cgroup = cgroup::GuardianCgroup::enter(kernel).ok().flatten();
    let recovery = watch_daemon(kernel, state_dir);
    if let Some(own_cgroup) = guardian_cgroup {
        own_cgroup.leave(kernel);
    }
    recovery
}

fn watch_daemon(kernel: &dyn Kernel, state_dir: &Path) -> Result<RecoveryReport, JournalError> {
    let io_error = JournalError::io_error_at(state_dir);
    let fence = Fence::inherit().map_err(io_error)?;
    kernel.record_births();
    let mut stdout = io::stdout();
    let _ = stdout.write_all(b"ready\n").and_then(|()| stdout.flush());
    match wait_for_daemon_end(kernel, io::stdin(), MIN_SILENCE) {
        DaemonOutcome::AllRestored => return Ok(RecoveryReport::default()),
        DaemonOutcome::Silent(silence) => {
            // The daemon holds the lock, but the raised fence keeps it from changing anything.
            let Some(fence) = fence else {
                return Ok(RecoveryReport::default());
            };
            fence.raise().map_err(io_error)?;
            let recovery = restore_left_behind(kernel, state_dir)?;
            return Ok(RecoveryReport {
                silence: Some(silence),
                ..recovery
            });
        }
        DaemonOutcome::Exited => {}
    }
    // A daemon that has started in the meantime restores the host before it does anything else, and the journal then
    // belongs to it. The dead daemon's lock may outlive its pipe by a moment.
    for _ in 0..20 {
        if let Some(_lock) = DaemonLock::acquire(state_dir)? {
            return restore_left_behind(kernel, state_dir);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(RecoveryReport::default())
}

fn ignore_terminal_signals() {
    for signal in [
        libc::SIGINT,
        libc::SIGTERM,
        libc::SIGHUP,
        libc::SIGQUIT,
        libc::SIGPIPE,
    ] {
        // SAFETY: SIG_IGN installs no handler; the calls cannot fail for these signals.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// One lock per state directory: a daemon holds it while it runs, a restore while it restores.
#[derive(Debug)]
pub struct DaemonLock {
    _file: OwnedFd,
}

impl DaemonLock {
    /// Acquires the daemon's lock; `None` if another process holds it.
    ///
    /// # Errors
    /// The file cannot be opened or locked, or others may write to the directory.
    pub fn acquire(state_dir: &Path) -> Result<Option<Self>, JournalError> {
        Self::acquire_within(state_dir, Duration::ZERO)
    }

    /// Acquires the daemon's lock, waiting for a guardian that may be restoring; `None` if a daemon runs.
    ///
    /// # Errors
    /// The file cannot be opened or locked, or others may write to the directory.
    pub fn acquire_within(
        state_dir: &Path,
        max_wait: Duration,
    ) -> Result<Option<Self>, JournalError> {
        let path = state_dir.join("daemon.lock");
        let io_error = JournalError::io_error_at(&path);
        let dir = std::fs::metadata(state_dir).map_err(io_error)?;
        journal::check_ownership(state_dir, &dir)?;
        let file = Self::open(&path).map_err(io_error)?;
        let is_ours = lock_file(&file, max_wait).map_err(io_error)?;
        Ok(is_ours.then_some(DaemonLock { _file: file }))
    }

    /// Opened only for reading, so that a file system that became read-only does not prevent a restore. If the file
    /// does not exist and cannot be created, its directory is locked instead.
    fn open(path: &Path) -> std::io::Result<OwnedFd> {
        use rustix::fs::{Mode, OFlags, open};
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = match open(path, flags | OFlags::CREATE, Mode::RUSR | Mode::WUSR) {
            Err(rustix::io::Errno::ROFS) => open(
                path.parent().unwrap_or(path),
                flags | OFlags::DIRECTORY,
                Mode::empty(),
            ),
            other => other,
        };
        Ok(file?)
    }
}

/// Outcome of the recovery from a journal that was left behind.
#[derive(Debug, Default)]
pub struct RecoveryReport {
    /// Outcome for each object of the journal; empty if there was nothing to restore.
    pub restored_objects: Vec<RestoredObject>,
    /// Lines of the journal that could not be read. The objects in them may still be changed.
    pub damage: Option<JournalDamage>,
    /// The reason why the journal could not be removed, although everything is restored. Restoring from it again
    /// changes nothing.
    pub removal_error: Option<JournalError>,
    /// Length of the daemon's silence, if the daemon is still alive.
    pub silence: Option<Duration>,
}

/// A journal with lines that cannot be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JournalDamage {
    /// Numbers of the lines, from 1.
    pub line_numbers: Vec<usize>,
    /// Current path of the journal.
    pub journal_path: PathBuf,
}

impl std::fmt::Display for JournalDamage {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lines: Vec<String> = self.line_numbers.iter().map(usize::to_string).collect();
        write!(
            out,
            "{}: line {} cannot be read: its change is unknown and may not have been restored",
            self.journal_path.display(),
            lines.join(", ")
        )
    }
}

/// Restores from a journal left behind, if there is one, and removes it when nothing is left to do. A journal with
/// damaged lines is quarantined instead. A journal of another boot is only removed, because none of its objects still
/// exists. Either the caller holds the directory's [`DaemonLock`], or the
/// raised fence keeps its holder from changing anything.
///
/// # Errors
/// The journal cannot be read, or was written in another PID namespace.
pub fn restore_left_behind(
    kernel: &dyn Kernel,
    state_dir: &Path,
) -> Result<RecoveryReport, JournalError> {
    let Some(recovered_journal) = journal::read_left_behind(state_dir)? else {
        return Ok(RecoveryReport::default());
    };
    let mut report = RecoveryReport::default();
    if let (Some(journal_boot_id), Ok(current_boot_id)) =
        (&recovered_journal.boot_id, kernel.boot_id())
        && *journal_boot_id != current_boot_id
    {
        report.removal_error = journal::remove_left_behind(state_dir).err();
        return Ok(report);
    }
    // In this namespace the journal's thread ids name no threads or other ones, so a live program would count as
    // exited.
    if let (Some(found), Some(expected)) =
        (recovered_journal.pid_namespace, kernel::pid_namespace())
        && found != expected
    {
        let path = state_dir.join(Journal::FILE_NAME);
        return Err(JournalError::OtherPidNamespace {
            path,
            found,
            expected,
        });
    }
    let damaged_lines = recovered_journal.damaged_lines.clone();
    let (allowed_entries, refused_objects) =
        limits::split_entries(kernel, recovered_journal.entries.clone());
    report.restored_objects = restore(kernel, &allowed_entries);
    report.restored_objects.extend(refused_objects);
    let has_failure = report
        .restored_objects
        .iter()
        .any(|restored| restored.has_failed());
    if !damaged_lines.is_empty() {
        let mut journal_path = state_dir.join(Journal::FILE_NAME);
        if !has_failure {
            match journal::quarantine(state_dir) {
                Ok(quarantined_path) => journal_path = quarantined_path,
                Err(error) => report.removal_error = Some(error),
            }
        }
        report.damage = Some(JournalDamage {
            line_numbers: damaged_lines,
            journal_path,
        });
    } else if has_failure {
        // If that fails, as on a disk that became read-only, the whole journal remains.
        let _ = journal::retain_left_behind(state_dir, recovered_journal, |object| {
            must_retain(&report.restored_objects, object)
        });
    } else {
        report.removal_error = journal::remove_left_behind(state_dir).err();
    }
    Ok(report)
}

/// Does the next restore need this object? Yes if its restoration failed or was not tried (masks are removed with their
/// group), and for every property of a thread if the restoration of any thread failed.
fn must_retain(restored_objects: &[RestoredObject], object: &JournalObject) -> bool {
    let is_failed = |restored: &&RestoredObject| restored.has_failed();
    let mut restorations = restored_objects
        .iter()
        .filter(|restored| restored.object == *object)
        .peekable();
    let is_untried = restorations.peek().is_none();
    let has_failed_thread = || {
        restored_objects
            .iter()
            .filter(is_failed)
            .any(|restored| restored.object.thread().is_some())
    };
    is_untried
        || restorations.any(|restored| is_failed(&restored))
        || object.thread().is_some() && has_failed_thread()
}

#[cfg(test)]
mod tests;
