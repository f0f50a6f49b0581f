//! The guardian: a small process that puts the host back when the daemon is gone, however it died.
//!
//! Problem: no handler runs on SIGKILL. Method: the daemon starts the guardian before its first change and holds the
//! write end of a pipe; the guardian waits on the read end. When the daemon says it restored everything itself, the
//! guardian leaves; when the pipe closes without that word, it restores from the journal. It runs in a session of its
//! own and ignores the signals that end a terminal's programs. If the guardian dies first, the daemon notices (the
//! pipe breaks) and starts another, or puts everything back itself if it cannot. If both die, the journal is still
//! there for the next start and for `cachemate reset`.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::journal::{self, JournalError, Recovered};
use crate::kernel::Kernel;
use crate::restore::{Outcome, Restored, restore};

/// What the daemon writes before it closes the pipe in good order.
const ALL_RESTORED: &[u8] = b"restored\n";

/// The daemon's end of a running guardian.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
}

impl Guardian {
    /// Starts `program ARGS...`, which must call [`watch`] on its standard input; waits for its first word, so that
    /// no change is made before it stands.
    ///
    /// # Errors
    /// It could not be started or did not report ready.
    pub fn start(program: &Path, args: &[&str]) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: setsid(2) is async-signal-safe and touches no memory of ours.
        unsafe {
            command.pre_exec(|| rustix::process::setsid().map(|_| ()).map_err(io::Error::from));
        }
        let mut child = command.spawn()?;
        let mut ready = [0u8; 6];
        let stdout = child.stdout.as_mut().expect("standard output was piped");
        match stdout.read_exact(&mut ready) {
            Ok(()) if &ready == b"ready\n" => Ok(Guardian { child }),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                Err(io::Error::other(format!("{}: the guardian did not report ready", program.display())))
            }
        }
    }

    /// Process id, for status pages and tests.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Is it still there? To be asked before every batch of changes.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Everything has been put back by the daemon itself: the guardian may go.
    ///
    /// # Errors
    /// The guardian was gone already.
    pub fn dismiss(mut self) -> io::Result<()> {
        let mut pipe = self.child.stdin.take().expect("standard input was piped, and is taken only here");
        let told = pipe.write_all(ALL_RESTORED);
        drop(pipe);
        self.child.wait()?;
        told
    }
}

/// The guardian's whole life: say ready, wait for the daemon's end, put things back if it did not.
///
/// # Errors
/// The journal could not be read, or the lock not taken. What could not be restored stands in the account.
pub fn watch(kernel: &dyn Kernel, state_dir: &Path) -> Result<Vec<Restored>, JournalError> {
    ignore_terminal_signals();
    let mut stdout = io::stdout();
    let _ = stdout.write_all(b"ready\n").and_then(|()| stdout.flush());
    let mut said = Vec::new();
    let mut buffer = [0u8; 64];
    loop {
        match io::stdin().read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => said.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    if said.ends_with(ALL_RESTORED) {
        return Ok(Vec::new());
    }
    // A daemon that has started since restores before it does anything else; what stands in the journal then is its
    // own. The dead daemon's lock may outlive its pipe by a moment.
    for _ in 0..20 {
        if let Some(_lock) = Lock::daemon(state_dir)? {
            return restore_left_behind(kernel, state_dir);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(Vec::new())
}

fn ignore_terminal_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
        // SAFETY: SIG_IGN installs no handler; the calls cannot fail for these signals.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// One lock per state directory: a daemon holds it while it runs, a restore while it restores.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the daemon's lock, or says that another holds it (`None`).
    ///
    /// # Errors
    /// The file cannot be opened or locked.
    pub fn daemon(state_dir: &Path) -> Result<Option<Self>, JournalError> {
        Self::take(&state_dir.join("daemon.lock"), rustix::fs::FlockOperation::NonBlockingLockExclusive)
    }

    /// Takes the daemon's lock, waiting a while for a guardian that is just restoring; `None` = a daemon runs.
    ///
    /// # Errors
    /// The file cannot be opened or locked.
    pub fn daemon_after(state_dir: &Path, patience: Duration) -> Result<Option<Self>, JournalError> {
        let until = Instant::now() + patience;
        loop {
            let lock = Self::daemon(state_dir)?;
            if lock.is_some() || Instant::now() >= until {
                return Ok(lock);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for the restore lock: restores of one state directory come one after the other.
    fn restoring(state_dir: &Path) -> Result<Option<Self>, JournalError> {
        Self::take(&state_dir.join("restore.lock"), rustix::fs::FlockOperation::LockExclusive)
    }

    fn take(path: &Path, how: rustix::fs::FlockOperation) -> Result<Option<Self>, JournalError> {
        let io = |source| JournalError::Io { path: PathBuf::from(path), source };
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).open(path).map_err(io)?;
        match rustix::fs::flock(file.as_fd(), how) {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(io(error.into())),
        }
    }
}

/// Restores from a journal left behind, if there is one, and removes it when nothing is left to do. A journal of
/// another boot concerns nothing that still exists and is only removed.
///
/// # Errors
/// The journal cannot be read or removed.
pub fn restore_left_behind(kernel: &dyn Kernel, state_dir: &Path) -> Result<Vec<Restored>, JournalError> {
    let _lock = Lock::restoring(state_dir)?;
    let Some(Recovered { boot_id, held, .. }) = journal::recover(state_dir)? else { return Ok(Vec::new()) };
    let this_boot = kernel.boot_id().ok();
    let account = match (boot_id, this_boot) {
        (Some(then), Some(now)) if then != now => Vec::new(),
        _ => restore(kernel, &held),
    };
    let failed = account.iter().any(|restored| matches!(restored.outcome, Outcome::Failed(_)));
    if !failed {
        journal::remove_left_behind(state_dir)?;
    }
    Ok(account)
}
