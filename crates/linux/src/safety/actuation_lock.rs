//! The actuation lock: at most one daemon or run of a user may change the host at a time.
//!
//! Problem: if two processes act on the same programs, each saves the other's masks as the originals, and the host is
//! never restored. Method: each user has one lock (an flock, which ends with the process), and the guardian holds it
//! until it has restored the host. The lock file names the state directory of the last owner; a journal in that
//! directory must be restored first. Root announces that it acts by a file beside its lock, on which root's process
//! and its guardian hold a write lock (fcntl); all other users' processes then stop acting. The file also names the
//! acting process, but a user may not see root's processes (`hidepid` of proc(5)), so only the lock is queried.
//! Property: no user can keep root or another user from acting, because a write lock needs a file opened for writing.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::kernel::{Kernel, ThreadKey, lock_file};
use crate::safety::journal::{Journal, JournalError, check_ownership};

/// Paths of the locks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LockPaths {
    /// The user's own lock.
    pub lock: PathBuf,
    /// The file that announces that root acts: written by root, and read by all other users.
    pub root_announcement: PathBuf,
}

/// The right to act on the host, held until this value is dropped.
#[derive(Debug)]
pub struct ActuationLock {
    file: File,
    /// Root's announcement, write-locked; removed at the end.
    announcement: Option<(PathBuf, File)>,
    /// Root's announcement file, if root may overrule this user.
    overruling_announcement: Option<PathBuf>,
}

impl ActuationLock {
    /// Acquires the right to act with this state directory, waiting briefly for an owner that is about to exit; `None`
    /// if another daemon or run of this user acts, or one of root's.
    ///
    /// # Errors
    /// The lock cannot be opened or is not this user's, or the last owner's state directory still holds a journal.
    pub fn acquire(
        kernel: &dyn Kernel,
        paths: &LockPaths,
        state_dir: &Path,
        timeout: Duration,
    ) -> Result<Option<Self>, JournalError> {
        let io_error = JournalError::io_error_at(&paths.lock);
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW);
        let mut file = options.open(&paths.lock).map_err(io_error)?;
        check_ownership(&paths.lock, &file.metadata().map_err(io_error)?)?;
        if !lock_file(&file, timeout).map_err(io_error)? {
            return Ok(None);
        }
        let previous_state_dir = read_state_dir(&file).map_err(io_error)?;
        let state_path = std::path::absolute(state_dir).map_err(io_error)?;
        if let Some(path) = previous_state_dir.filter(|previous| *previous != state_path)
            && cachemate_files::path_exists(&path.join(Journal::FILE_NAME))
        {
            return Err(JournalError::LeftElsewhere { path });
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .map_err(io_error)?;
        file.write_all(state_path.as_os_str().as_bytes())
            .map_err(io_error)?;
        let is_root = rustix::process::geteuid().is_root();
        let root_announcement = (!is_root).then(|| paths.root_announcement.clone());
        let mut actuation_lock = ActuationLock {
            file,
            announcement: None,
            overruling_announcement: root_announcement,
        };
        if actuation_lock.is_overruled(kernel) {
            return Ok(None);
        }
        if is_root {
            let own_key = kernel.stat(kernel.own_pid()).map_err(io_error)?.key;
            actuation_lock.announcement = Some((
                paths.root_announcement.clone(),
                announce(&paths.root_announcement, own_key)?,
            ));
        }
        Ok(Some(actuation_lock))
    }

    /// The state directory of the lock's present or last owner; `None` if there never was one.
    ///
    /// # Errors
    /// The lock is not this user's, or cannot be read.
    pub fn last_state_dir(paths: &LockPaths) -> Result<Option<PathBuf>, JournalError> {
        let io_error = JournalError::io_error_at(&paths.lock);
        let mut options = OpenOptions::new();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = match options.read(true).custom_flags(flags).open(&paths.lock) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(io_error)?,
        };
        check_ownership(&paths.lock, &file.metadata().map_err(io_error)?)?;
        read_state_dir(&file).map_err(io_error)
    }

    /// The lock of a user whom root may overrule.
    #[cfg(test)]
    pub(crate) fn below_root(kernel: &dyn Kernel, dir: &Path) -> Self {
        let places = LockPaths {
            lock: dir.join("acting.lock"),
            root_announcement: dir.join("own-word"),
        };
        let mut actuation_lock = Self::acquire(kernel, &places, dir, Duration::from_secs(2))
            .expect("taken")
            .expect("free");
        actuation_lock.overruling_announcement = Some(dir.join("root-acts"));
        actuation_lock
    }

    /// The descriptors that hold the locks. A guardian keeps them open until it has restored the host.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        [&self.file]
            .into_iter()
            .chain(self.announcement.iter().map(|(_, file)| file))
            .map(AsFd::as_fd)
            .collect()
    }

    /// Does root act now? Returns true if the announcement exists but cannot be read.
    pub fn is_overruled(&self, kernel: &dyn Kernel) -> bool {
        let Some(path) = &self.overruling_announcement else {
            return false;
        };
        let mut options = OpenOptions::new();
        let file = match options
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)
        {
            Ok(file) => file,
            Err(error) => return error.kind() != io::ErrorKind::NotFound,
        };
        if is_write_locked(&file) {
            return true;
        }
        let mut text = String::new();
        if (&file)
            .take(MAX_ANNOUNCEMENT_BYTES)
            .read_to_string(&mut text)
            .is_err()
        {
            return true;
        }
        let mut words = text.split_ascii_whitespace().map(str::parse::<u64>);
        let (Some(Ok(pid)), Some(Ok(start_ticks))) = (words.next(), words.next()) else {
            return true;
        };
        kernel
            .is_alive(ThreadKey {
                tid: pid as i32,
                start_ticks,
            })
            .unwrap_or(true)
    }
}

/// The state directory of which a lock was written last; `None` if there never was one.
fn read_state_dir(lock: &File) -> io::Result<Option<PathBuf>> {
    let mut path_bytes = Vec::new();
    lock.take(libc::PATH_MAX as u64)
        .read_to_end(&mut path_bytes)?;
    let state_dir = PathBuf::from(std::ffi::OsString::from_vec(path_bytes));
    Ok(state_dir.is_absolute().then_some(state_dir))
}

/// Maximum length of an announcement: two numbers and a separator.
const MAX_ANNOUNCEMENT_BYTES: u64 = 64;

/// Writes the announcement to a temporary file, locks and renames it, so that no reader finds it incomplete or
/// unlocked. The lock belongs to the open file description: it ends with the last process that has it open.
fn announce(path: &Path, own_key: ThreadKey) -> Result<File, JournalError> {
    let io_error = JournalError::io_error_at(path);
    let new_path = path.with_extension("new");
    let _ = std::fs::remove_file(&new_path);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(&new_path)
        .map_err(io_error)?;
    writeln!(file, "{} {}", own_key.tid, own_key.start_ticks).map_err(io_error)?;
    let lock = whole_file_lock(libc::F_WRLCK);
    // SAFETY: the kernel reads a live structure of the size that this command expects.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } != 0 {
        return Err(io_error(io::Error::last_os_error()));
    }
    // Set explicitly, because a service's umask may deny other users read access.
    rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o644))
        .map_err(|error| io_error(error.into()))?;
    std::fs::rename(&new_path, path).map_err(io_error)?;
    Ok(file)
}

fn whole_file_lock(lock_type: i32) -> libc::flock {
    // SAFETY: all fields are integers, for which zero is valid; here it means the whole file and no process.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = lock_type as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock
}

/// Does any process hold a write lock on the file? A read lock, which every user may take, does not count.
fn is_write_locked(file: &File) -> bool {
    let mut lock = whole_file_lock(libc::F_RDLCK);
    // SAFETY: the kernel writes into a live structure of the size that this command expects.
    let status = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    status == 0 && i32::from(lock.l_type) == libc::F_WRLCK
}

impl Drop for ActuationLock {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.announcement {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::kernel::LinuxHost;

    fn lock_paths(dir: &Path) -> LockPaths {
        LockPaths {
            lock: dir.join("acting.lock"),
            root_announcement: dir.join("root-acts"),
        }
    }

    /// Acquires the lock with some patience, because a program that another test starts holds every descriptor until
    /// its exec.
    fn acquire(dir: &Path, state: &str) -> Result<Option<ActuationLock>, JournalError> {
        ActuationLock::acquire(
            &LinuxHost::new("/"),
            &lock_paths(dir),
            &dir.join(state),
            Duration::from_secs(2),
        )
    }

    /// Is there one owner at a time, whatever the state directories; and if one died with a journal, is the next one
    /// told?
    #[test]
    fn one_owner_acts_at_a_time_with_any_state_directories() {
        let dir = tempfile::tempdir().unwrap();
        let first = acquire(dir.path(), "a").unwrap();
        assert!(first.is_some() && acquire(dir.path(), "b").unwrap().is_none());
        std::fs::create_dir(dir.path().join("a")).unwrap();
        std::fs::write(dir.path().join("a").join(Journal::FILE_NAME), "").unwrap();
        drop(first);
        let error = acquire(dir.path(), "b").unwrap_err();
        assert!(
            matches!(error, JournalError::LeftElsewhere { ref path } if path.ends_with("a")),
            "{error}"
        );
        assert!(
            acquire(dir.path(), "a").unwrap().is_some(),
            "it restores from its own journal itself"
        );
        std::fs::remove_file(dir.path().join("a").join(Journal::FILE_NAME)).unwrap();
        assert!(acquire(dir.path(), "b").unwrap().is_some());
    }

    /// Do all other users stop acting while root acts; and is another user's lock refused?
    #[test]
    fn other_users_stop_acting_while_root_acts() {
        let dir = tempfile::tempdir().unwrap();
        let host = LinuxHost::new("/");
        let other_lock = ActuationLock::below_root(&host, dir.path());
        assert!(!other_lock.is_overruled(&host));
        let own_key = host.stat(host.own_pid()).unwrap().key;
        let word = dir.path().join("root-acts");
        drop(announce(&word, own_key).unwrap());
        assert!(other_lock.is_overruled(&host));
        let reused = ThreadKey {
            start_ticks: own_key.start_ticks + 1,
            ..own_key
        };
        let locked = announce(&word, reused).unwrap();
        assert!(
            other_lock.is_overruled(&host),
            "a process that cannot be seen, but holds the lock"
        );
        drop(locked);
        // Another test's child may hold every descriptor until its exec.
        let deadline = Instant::now() + Duration::from_secs(2);
        while other_lock.is_overruled(&host) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!other_lock.is_overruled(&host), "who told it is gone");
        drop(other_lock);
        if !rustix::process::geteuid().is_root() {
            println!("not shown here: a lock of another user (not root)");
            return;
        }
        std::os::unix::fs::chown(dir.path().join("acting.lock"), Some(65_534), None).unwrap();
        assert!(matches!(
            acquire(dir.path(), "a"),
            Err(JournalError::NotOurs { .. })
        ));
    }

    /// If `/proc` hides root's processes from a user (`hidepid=2`): does that user's daemon still yield to root's, and
    /// act once root's has ended; and does another user's read lock not block root?
    #[test]
    fn a_users_daemon_yields_to_root_under_hidepid() {
        let dir = tempfile::tempdir().unwrap();
        crate::stranger_tests::open_to_all(dir.path());
        let root = acquire(dir.path(), "a").unwrap().unwrap();
        let word = dir.path().join("root-acts");
        let hide = || {
            let mount = |source: &std::ffi::CStr,
                         target: &std::ffi::CStr,
                         flags,
                         data: *const libc::c_void| {
                // SAFETY: all strings end with a NUL and live through the call.
                unsafe {
                    libc::mount(
                        source.as_ptr(),
                        target.as_ptr(),
                        source.as_ptr(),
                        flags,
                        data,
                    )
                }
            };
            // SAFETY: no memory is passed.
            let is_mounted = unsafe { libc::unshare(libc::CLONE_NEWNS) } == 0
                && mount(
                    c"none",
                    c"/",
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
                && mount(c"proc", c"/proc", 0, c"hidepid=2".as_ptr().cast()) == 0;
            if is_mounted {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        };
        let part = |acts: &str| {
            let pid = std::process::id().to_string();
            let variables = [
                ("WORD", word.to_str().unwrap()),
                ("ROOT_PID", &pid),
                ("ROOT_ACTS", acts),
            ];
            crate::stranger_tests::run(
                "safety::actuation_lock::tests::part_of_a_user_below_root",
                &variables,
                hide,
            )
        };
        if !part("yes") {
            return;
        }
        drop(root);
        assert!(part("no"));
    }

    #[test]
    #[ignore = "run by the test above, as nobody"]
    fn part_of_a_user_below_root() {
        let Some(word) = std::env::var_os("WORD").map(PathBuf::from) else {
            return;
        };
        let pid = std::env::var("ROOT_PID").unwrap().parse().unwrap();
        let host = LinuxHost::new("/");
        assert!(host.stat(pid).is_err(), "root's process is hidden");
        let dir = tempfile::tempdir().unwrap();
        let places = LockPaths {
            lock: dir.path().join("acting.lock"),
            root_announcement: word.clone(),
        };
        let actuation_lock =
            ActuationLock::acquire(&host, &places, dir.path(), Duration::from_secs(2)).unwrap();
        let root_acts = std::env::var("ROOT_ACTS").unwrap() == "yes";
        assert_eq!(actuation_lock.is_none(), root_acts);
        assert!(
            !root_acts || OpenOptions::new().write(true).open(&word).is_err(),
            "not for a stranger to lock"
        );
    }
}
