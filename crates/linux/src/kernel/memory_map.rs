//! Owner of memory that the kernel maps.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Memory that is mapped until this value is dropped.
#[derive(Debug)]
pub(crate) struct MemoryMap {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the value owns addresses and gives no access to what is there; whoever reads or writes answers for the order.
unsafe impl Send for MemoryMap {}
// SAFETY: as above.
unsafe impl Sync for MemoryMap {}

impl MemoryMap {
    /// Maps the first bytes of a file or of an event's buffer, shared with all who map it.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn of_file(file: &File, bytes: usize, is_writable: bool) -> io::Result<Self> {
        let protection = if is_writable {
            libc::PROT_READ | libc::PROT_WRITE
        } else {
            libc::PROT_READ
        };
        Self::map(bytes, protection, libc::MAP_SHARED, file.as_raw_fd())
    }

    /// Maps fresh memory of this process in small pages, each of which faults by itself.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn of_small_pages(bytes: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let map = Self::map(bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1)?;
        // SAFETY: the mapping above. A kernel without huge pages refuses the advice and has none.
        unsafe { libc::madvise(map.start.cast(), bytes, libc::MADV_NOHUGEPAGE) };
        Ok(map)
    }

    fn map(bytes: usize, protection: i32, flags: i32, fd: i32) -> io::Result<Self> {
        // SAFETY: a fresh mapping without any other reference.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(MemoryMap {
            start: start.cast(),
            bytes,
        })
    }

    /// Address of the first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Length of the mapping.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for MemoryMap {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` with this length, and no reference to it remains.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}
