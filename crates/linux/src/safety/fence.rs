//! The fence between a daemon and its guardian's restoration.
//!
//! Problem: a daemon that was stopped or hung resumes where it was, possibly in the middle of a change, although the
//! guardian has restored the host meanwhile. Method: both share one page of anonymous memory (`memfd_create(2)`);
//! before the guardian restores, it raises the fence there, and the daemon checks it before every change. Property: at
//! most one call, the one in which the daemon was stopped, takes effect after the fence is raised, and the daemon
//! undoes that call from memory before it arms again.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

/// The variable that passes the descriptor to the guardian.
pub const ENVIRONMENT_VARIABLE: &str = "CACHEMATE_FENCE";

/// A fence; each guardian has a new one.
#[derive(Debug)]
pub struct Fence {
    page: File,
}

impl Fence {
    /// A new fence, which is not raised.
    ///
    /// # Errors
    /// No descriptor or memory is left.
    pub fn new() -> io::Result<Self> {
        let page = File::from(rustix::fs::memfd_create(
            "cachemate-fence",
            rustix::fs::MemfdFlags::CLOEXEC,
        )?);
        page.write_all_at(&[0], 0)?;
        Ok(Fence { page })
    }

    /// The fence that this process inherited, named by [`ENVIRONMENT_VARIABLE`].
    ///
    /// # Errors
    /// The variable does not name a daemon's page of memory.
    pub fn inherit() -> io::Result<Option<Self>> {
        let Some(text) = std::env::var_os(ENVIRONMENT_VARIABLE) else {
            return Ok(None);
        };
        let invalid_variable = || {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{ENVIRONMENT_VARIABLE}: found {text:?}"),
            )
        };
        let fd: RawFd = text
            .to_str()
            .and_then(|text| text.parse().ok())
            .filter(|fd| *fd > 2)
            .ok_or_else(invalid_variable)?;
        // SAFETY: the descriptor is borrowed only to check whether it is open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::fs::fcntl_get_seals(descriptor).map_err(|_| invalid_variable())?;
        // SAFETY: the daemon left the descriptor open for this process, which takes it once, at its start.
        let page = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Some(Fence { page: page.into() }))
    }

    /// Raises the fence, so that the daemon makes no more changes.
    ///
    /// # Errors
    /// The page cannot be written. This error has never been observed for an existing page.
    pub fn raise(&self) -> io::Result<()> {
        self.page.write_all_at(&[1], 0)
    }

    /// Has the guardian raised it? A fence that cannot be read counts as raised.
    pub fn is_raised(&self) -> bool {
        let mut byte = [1u8];
        self.page.read_exact_at(&mut byte, 0).is_err() || byte != [0]
    }
}

impl AsFd for Fence {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.page.as_fd()
    }
}
