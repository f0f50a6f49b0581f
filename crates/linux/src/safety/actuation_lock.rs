//! The right to act: one of a user's daemons and runs may change the host at a time.
//!
//! Problem: if two act on the same programs, each takes the other's masks for originals, and the host is not restored
//! in the end. Method: one lock per user (flock, and so released with the process and with the boot), which the
//! guardian holds until it has restored. The lock file names the state directory of the last owner: a journal that
//! still lies there comes first. Root announces its acting by a file beside its lock, with the acting process: all
//! others stop acting, because they act on the same programs. Property: no user can keep root, or another user, from
//! acting.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::kernel::{Kernel, ThreadKey};
use crate::safety::journal::{Journal, JournalError, check_own};

/// Paths of the locks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LockPaths {
    /// This user's.
    pub lock: PathBuf,
    /// The file that tells of root's acting: written where this user is root, read by all others.
    pub root_acts: PathBuf,
}

/// The right to act, as long as it lives.
#[derive(Debug)]
pub struct ActuationLock {
    file: File,
    /// Removed in the end.
    owner_file: Option<PathBuf>,
    /// Whose word counts for more.
    root_lock: Option<PathBuf>,
}

impl ActuationLock {
    /// Acquires the right to act with this state directory, waiting a while for an owner that is about to end; `None`
    /// = another daemon or run of this user acts, or root's does.
    ///
    /// # Errors
    /// The lock cannot be opened or is not this user's, or the last owner's state directory still holds a journal.
    pub fn acquire(
        kernel: &dyn Kernel,
        places: &LockPaths,
        state_dir: &Path,
        patience: Duration,
    ) -> Result<Option<Self>, JournalError> {
        let io = |source| JournalError::Io { path: places.lock.clone(), source };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let mut file = options.open(&places.lock).map_err(io)?;
        check_own(&places.lock, &file.metadata().map_err(io)?)?;
        let until = Instant::now() + patience;
        loop {
            match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(io(error.into())),
            }
        }
        let mut last = Vec::new();
        (&mut file).take(libc::PATH_MAX as u64).read_to_end(&mut last).map_err(io)?;
        let last = PathBuf::from(std::ffi::OsString::from_vec(last));
        let named = std::path::absolute(state_dir).map_err(io)?;
        if last.is_absolute() && last != named && last.join(Journal::FILE_NAME).exists() {
            return Err(JournalError::LeftElsewhere { path: last });
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(io)?;
        file.write_all(named.as_os_str().as_bytes()).map_err(io)?;
        let root = rustix::process::geteuid().is_root();
        let mut acting = ActuationLock { file, owner_file: None, root_lock: (!root).then(|| places.root_acts.clone()) };
        if acting.is_overruled(kernel) {
            return Ok(None);
        }
        if root {
            let own = kernel.stat(std::process::id() as i32).map_err(io)?.key;
            publish_owner(&places.root_acts, own)?;
            acting.owner_file = Some(places.root_acts.clone());
        }
        Ok(Some(acting))
    }

    /// The lock of a user whom root may overrule.
    #[cfg(test)]
    pub(crate) fn below_root(kernel: &dyn Kernel, dir: &Path) -> Self {
        let places = LockPaths { lock: dir.join("acting.lock"), root_acts: dir.join("own-word") };
        let mut acting = Self::acquire(kernel, &places, dir, Duration::from_secs(2)).expect("taken").expect("free");
        acting.root_lock = Some(dir.join("root-acts"));
        acting
    }

    /// Does root act meanwhile? What cannot be read counts as yes where it is there.
    pub fn is_overruled(&self, kernel: &dyn Kernel) -> bool {
        let Some(path) = &self.root_lock else { return false };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => return error.kind() != io::ErrorKind::NotFound,
        };
        let mut words = text.split_ascii_whitespace().map(str::parse::<u64>);
        let (Some(Ok(pid)), Some(Ok(start_ticks))) = (words.next(), words.next()) else { return true };
        kernel.alive(ThreadKey { tid: pid as i32, start_ticks }).unwrap_or(true)
    }
}

/// Written beside and renamed, so that no reader sees half of it.
fn publish_owner(path: &Path, own: ThreadKey) -> Result<(), JournalError> {
    let io = |source| JournalError::Io { path: path.to_path_buf(), source };
    let beside = path.with_extension("new");
    let _ = std::fs::remove_file(&beside);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&beside).map_err(io)?;
    writeln!(file, "{} {}", own.tid, own.start_ticks).map_err(io)?;
    std::fs::rename(&beside, path).map_err(io)
}

impl AsFd for ActuationLock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for ActuationLock {
    fn drop(&mut self) {
        if let Some(owner_file) = &self.owner_file {
            let _ = std::fs::remove_file(owner_file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::LinuxHost;

    fn places(dir: &Path) -> LockPaths {
        LockPaths { lock: dir.join("acting.lock"), root_acts: dir.join("root-acts") }
    }

    /// With patience: a program that another test starts holds every descriptor until it has become itself.
    fn acquire(dir: &Path, state: &str) -> Result<Option<ActuationLock>, JournalError> {
        ActuationLock::acquire(&LinuxHost::new("/"), &places(dir), &dir.join(state), Duration::from_secs(2))
    }

    /// Is there one owner at a time, whatever the state directories; and if one died with a journal, does the next
    /// learn of it?
    #[test]
    fn one_at_a_time_whatever_the_state_folder() {
        let dir = tempfile::tempdir().unwrap();
        let first = acquire(dir.path(), "a").unwrap();
        assert!(first.is_some() && acquire(dir.path(), "b").unwrap().is_none());
        std::fs::create_dir(dir.path().join("a")).unwrap();
        std::fs::write(dir.path().join("a").join(Journal::FILE_NAME), "").unwrap();
        drop(first);
        let left = acquire(dir.path(), "b").unwrap_err();
        assert!(matches!(left, JournalError::LeftElsewhere { ref path } if path.ends_with("a")), "{left}");
        assert!(acquire(dir.path(), "a").unwrap().is_some(), "its own journal it puts back itself");
        std::fs::remove_file(dir.path().join("a").join(Journal::FILE_NAME)).unwrap();
        assert!(acquire(dir.path(), "b").unwrap().is_some());
    }

    /// Does root's acting end that of others for as long as it lasts; and is another user's lock refused?
    #[test]
    fn root_counts_for_more() {
        let dir = tempfile::tempdir().unwrap();
        let host = LinuxHost::new("/");
        let other = ActuationLock::below_root(&host, dir.path());
        assert!(!other.is_overruled(&host));
        let own = host.stat(std::process::id() as i32).unwrap().key;
        publish_owner(&dir.path().join("root-acts"), own).unwrap();
        assert!(other.is_overruled(&host));
        publish_owner(&dir.path().join("root-acts"), ThreadKey { start_ticks: own.start_ticks + 1, ..own }).unwrap();
        assert!(!other.is_overruled(&host), "who told it is gone");
        drop(other);
        if !rustix::process::geteuid().is_root() {
            println!("not shown here: a lock of another user (not root)");
            return;
        }
        std::os::unix::fs::chown(dir.path().join("acting.lock"), Some(65_534), None).unwrap();
        assert!(matches!(acquire(dir.path(), "a"), Err(JournalError::NotOurs { .. })));
    }
}
