//! The guardian: a small process that puts the host back when the daemon is gone, however it died.
//!
//! Problem: no handler runs on SIGKILL. Method: the daemon starts the guardian before its first change and holds the
//! write end of a pipe; the guardian waits on the read end. When the daemon says it restored everything itself, the
//! guardian leaves; when the pipe closes without that word, it restores from the journal. It runs in a session of its
//! own and ignores the signals that end a terminal's programs. If the guardian dies first, the daemon notices (the
//! pipe breaks) and starts another, or puts everything back itself if it cannot. If both die, the journal is still
//! there for the next start and for `cachemate reset`.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::journal::{self, Journal, JournalError, Recovered};
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
pub fn watch(kernel: &dyn Kernel, state_dir: &Path) -> Result<LeftBehind, JournalError> {
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
        return Ok(LeftBehind::default());
    }
    // A daemon that has started since restores before it does anything else; what stands in the journal then is its
    // own. The dead daemon's lock may outlive its pipe by a moment.
    for _ in 0..20 {
        if let Some(_lock) = Lock::daemon(state_dir)? {
            return restore_left_behind(kernel, state_dir);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(LeftBehind::default())
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
    _file: OwnedFd,
}

impl Lock {
    /// Takes the daemon's lock, or says that another holds it (`None`).
    ///
    /// # Errors
    /// The file cannot be opened or locked.
    pub fn daemon(state_dir: &Path) -> Result<Option<Self>, JournalError> {
        let path = state_dir.join("daemon.lock");
        let file = Self::open(&path)?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(JournalError::Io { path, source: error.into() }),
        }
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

    /// Only to read: a file system that became read-only keeps nobody from being put back. Where the file is not there either,
    /// and cannot come to be, its folder is locked in its place.
    fn open(path: &Path) -> Result<OwnedFd, JournalError> {
        use rustix::fs::{Mode, OFlags, open};
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = match open(path, flags | OFlags::CREATE, Mode::RUSR | Mode::WUSR) {
            Err(rustix::io::Errno::ROFS) => {
                open(path.parent().unwrap_or(path), flags | OFlags::DIRECTORY, Mode::empty())
            }
            other => other,
        };
        file.map_err(|error| JournalError::Io { path: path.to_path_buf(), source: error.into() })
    }
}

/// What came of a journal that was left behind.
#[derive(Debug, Default)]
pub struct LeftBehind {
    pub account: Vec<Restored>,
    /// What some lines of the journal said is lost: objects that they named may still be changed.
    pub damage: Option<Damage>,
    /// Everything is put back, but the journal lies there still. The next look at it changes nothing.
    pub stays: Option<JournalError>,
}

/// A journal with lines that cannot be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    /// Counted from 1.
    pub lines: Vec<usize>,
    /// Where it lies now.
    pub journal: PathBuf,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lines: Vec<String> = self.lines.iter().map(usize::to_string).collect();
        write!(
            out,
            "{}: line {} cannot be read: what was changed there is not known and may not be put back",
            self.journal.display(),
            lines.join(", ")
        )
    }
}

/// Restores from a journal left behind, if there is one, and removes it when nothing is left to do. One with damaged lines is
/// put aside instead. A journal of another boot concerns nothing that still exists and is only removed. Whoever calls holds the
/// folder's [`Lock`].
///
/// # Errors
/// The journal cannot be read.
pub fn restore_left_behind(kernel: &dyn Kernel, state_dir: &Path) -> Result<LeftBehind, JournalError> {
    let Some(Recovered { boot_id, held, damaged_lines, .. }) = journal::recover(state_dir)? else {
        return Ok(LeftBehind::default());
    };
    let mut left = LeftBehind::default();
    if let (Some(then), Ok(now)) = (boot_id, kernel.boot_id())
        && then != now
    {
        left.stays = journal::remove_left_behind(state_dir).err();
        return Ok(left);
    }
    left.account = restore(kernel, &held);
    let failed = left.account.iter().any(|restored| matches!(restored.outcome, Outcome::Failed(_)));
    if !damaged_lines.is_empty() {
        let mut journal = state_dir.join(Journal::FILE_NAME);
        if !failed {
            match journal::set_aside(state_dir) {
                Ok(aside) => journal = aside,
                Err(error) => left.stays = Some(error),
            }
        }
        left.damage = Some(Damage { lines: damaged_lines, journal });
    } else if !failed {
        left.stays = journal::remove_left_behind(state_dir).err();
    }
    Ok(left)
}

#[cfg(test)]
mod tests;
