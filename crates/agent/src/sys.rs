//! System calls without the C library, because the agent's thread must not touch memory that it manages, not even
//! `errno`.

use core::arch::asm;
use core::ffi::CStr;

// Numbers of the system calls on x86-64.
const READ: usize = 0;
const OPEN: usize = 2;
const CLOSE: usize = 3;
const POLL: usize = 7;
pub(crate) const LSEEK: usize = 8;
pub(crate) const MMAP: usize = 9;
const IOCTL: usize = 16;
const PREAD: usize = 17;
const PWRITE: usize = 18;
const SCHED_YIELD: usize = 24;
pub(crate) const MADVISE: usize = 28;
pub(crate) const NANOSLEEP: usize = 35;
const GETPID: usize = 39;
pub(crate) const FCNTL: usize = 72;
pub(crate) const MKDIR: usize = 83;
pub(crate) const READLINK: usize = 89;
const CLOCK_GETTIME: usize = 228;
pub(crate) const UNSHARE: usize = 272;
const USERFAULTFD: usize = 323;
pub(crate) const CLOSE_RANGE: usize = 436;

/// `O_CLOEXEC` of open(2) and userfaultfd(2).
const O_CLOEXEC: usize = 0o2_000_000;
/// `O_NONBLOCK`.
const O_NONBLOCK: usize = 0o4_000;
/// `CLOCK_MONOTONIC`.
const CLOCK_MONOTONIC: usize = 1;
/// `POLLIN`: there is something to read.
const POLLIN: u64 = 1;

/// Result of a [`call`]: nothing to read now, or the memory layout is being changed.
pub const EAGAIN: isize = -11;
/// Result of a [`call`]: a signal arrived first.
pub const EINTR: isize = -4;
/// Result of [`userfaultfd::move_page`]: the page is in use elsewhere (pinned, or shared with a child).
pub const EBUSY: isize = -16;
/// Result of a request that maps a page: the page is already present.
pub const EEXIST: isize = -17;
/// Result of a request that maps a page: nothing is registered there, or there is no page to move.
pub const ENOENT: isize = -2;
/// Result of a request that maps a page: the process is ending.
pub const ESRCH: isize = -3;
/// Result of a [`call`] that does not exist.
#[cfg(not(target_arch = "x86_64"))]
const ENOSYS: isize = -38;

/// A system call; a negative result is the negated error number. Arguments that are left out are 0.
///
/// # Safety
/// The requirements of the system call: pointer arguments must be valid for everything that the kernel does with them.
#[cfg(target_arch = "x86_64")]
pub unsafe fn call<const N: usize>(number: usize, args: [usize; N]) -> isize {
    let argument = |index: usize| if index < N { args[index] } else { 0 };
    let result: isize;
    // SAFETY: the kernel's calling convention: rcx and r11 are clobbered, everything else is preserved.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") argument(0),
            in("rsi") argument(1),
            in("rdx") argument(2),
            in("r10") argument(3),
            in("r8") argument(4),
            in("r9") argument(5),
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    result
}

/// Never called: colors are measured on x86-64 only, and no agent starts without colors.
///
/// # Safety
/// None needed.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn call<const N: usize>(_: usize, _: [usize; N]) -> isize {
    ENOSYS
}

/// Nanoseconds of a monotonic clock.
pub fn now_ns() -> u64 {
    let mut time = [0u64; 2];
    // SAFETY: the kernel writes two words.
    unsafe { call(CLOCK_GETTIME, [CLOCK_MONOTONIC, time.as_mut_ptr() as usize]) };
    time[0] * 1_000_000_000 + time[1]
}

/// The process of the calling thread.
pub fn process_id() -> i32 {
    // SAFETY: no memory is passed.
    unsafe { call(GETPID, []) as i32 }
}

/// Lets another thread run.
pub fn yield_cpu() {
    // SAFETY: no memory is passed.
    unsafe { call(SCHED_YIELD, []) };
}

/// Opens a file, close-on-exec; a negative result is an error. A new file belongs to its user alone.
pub fn open(path: &CStr, flags: usize) -> isize {
    // SAFETY: a path that ends with a zero.
    unsafe { call(OPEN, [path.as_ptr() as usize, flags | O_CLOEXEC, 0o600]) }
}

/// Closes a descriptor of the agent.
pub fn close(fd: isize) {
    // SAFETY: no memory is passed.
    unsafe { call(CLOSE, [fd as usize]) };
}

/// Reads into the words; returns the number of bytes.
pub fn read<T: Plain>(fd: isize, words: &mut [T]) -> isize {
    // SAFETY: the kernel writes at most that many bytes, and every pattern of bits is valid.
    unsafe {
        call(
            READ,
            [fd as usize, words.as_mut_ptr() as usize, size_of_val(words)],
        )
    }
}

/// Reads from this place of a file; returns the number of bytes.
pub fn read_at<T: Plain>(fd: isize, words: &mut [T], offset: u64) -> isize {
    let address = words.as_mut_ptr() as usize;
    // SAFETY: the kernel writes at most that many bytes, and every pattern of bits is valid.
    unsafe {
        call(
            PREAD,
            [fd as usize, address, size_of_val(words), offset as usize],
        )
    }
}

/// Writes to the beginning of a file.
pub fn write_at_start(fd: isize, text: &[u8]) {
    // SAFETY: the text's bytes.
    unsafe { call(PWRITE, [fd as usize, text.as_ptr() as usize, text.len()]) };
}

/// Waits until a descriptor has something to read, for at most this time. Returns whether it has.
pub fn wait_for_input(fd: isize, max_wait_ms: u64) -> bool {
    // One `struct pollfd`: the descriptor, then the events.
    let mut poll_fd = [fd as u64 | POLLIN << 32];
    // SAFETY: one pollfd.
    unsafe {
        call(
            POLL,
            [poll_fd.as_mut_ptr() as usize, 1, max_wait_ms as usize],
        ) > 0
    }
}

/// Words that the kernel may write: every pattern of bits is valid.
pub trait Plain {}
impl Plain for u8 {}
impl Plain for u64 {}
impl Plain for [u64; 4] {}

/// A new mapping; `None` if the kernel refuses it. A negative `fd` makes it anonymous.
pub fn map(bytes: usize, prot: usize, flags: usize, fd: isize) -> Option<*mut u8> {
    // SAFETY: a fresh mapping at an address that the kernel selects.
    let address = unsafe { call(MMAP, [0, bytes, prot, flags, fd as usize]) };
    (address > 0).then_some(address as *mut u8)
}

/// Copies a page, without `memcpy`, which the program may have replaced.
///
/// # Safety
/// Both are whole, mapped, distinct pages.
pub unsafe fn copy_page(source: *const u8, target: *mut u8) {
    for index in 0..crate::layout::PAGE_BYTES / 8 {
        // SAFETY: the caller's promise. Volatile, because the compiler would otherwise turn the loop into a call to
        // `memcpy`.
        unsafe {
            target
                .cast::<u64>()
                .add(index)
                .write_volatile(source.cast::<u64>().add(index).read_volatile())
        };
    }
}

/// Fills a page with zeros.
///
/// # Safety
/// A whole page, mapped and writable.
pub unsafe fn zero_page(page: *mut u8) {
    for index in 0..crate::layout::PAGE_BYTES / 8 {
        // SAFETY: the caller's promise.
        unsafe { page.cast::<u64>().add(index).write_volatile(0) };
    }
}

/// The part of userfaultfd(2) that the agent needs. The numbers are those of `linux/userfaultfd.h` in a version newer
/// than most installed ones.
pub mod userfaultfd {
    use super::{IOCTL, O_CLOEXEC, O_NONBLOCK, USERFAULTFD, call};

    /// A thread has touched a missing page: message word 2 is the address.
    pub const EVENT_FAULT: u8 = 0x12;
    /// mremap(2): message words 1 to 3 are the address before, the address after, and the bytes.
    pub const EVENT_REMAP: u8 = 0x14;
    /// `MADV_DONTNEED` and the like: message words 1 and 2 are the start and the end.
    pub const EVENT_REMOVE: u8 = 0x15;
    /// munmap(2): message words 1 and 2 are the start and the end.
    pub const EVENT_UNMAP: u8 = 0x16;

    // Requests of ioctl(2), whose kernel names begin with `UFFDIO_`.
    const API: usize = 0xc018_aa3f;
    const REGISTER: usize = 0xc020_aa00;
    const WAKE: usize = 0x8010_aa02;
    const COPY: usize = 0xc028_aa03;
    const ZEROPAGE: usize = 0xc020_aa04;
    const MOVE: usize = 0xc028_aa05;
    /// `UFFD_API`, the version of the interface.
    const API_VERSION: u64 = 0xaa;
    /// `UFFDIO_REGISTER_MODE_MISSING`.
    const REGISTER_MODE_MISSING: u64 = 1;
    const PAGE: u64 = crate::layout::PAGE_BYTES as u64;

    /// `UFFD_FEATURE_MOVE`: moving pages (Linux 6.8).
    pub const FEATURE_MOVE: u64 = 1 << 16;
    const FEATURE_EVENT_REMAP: u64 = 1 << 2;
    const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
    const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
    /// Remapping, removing and unmapping are reported. The thread waits until the report was read, so the handler
    /// itself must never do any of these.
    pub const FEATURE_EVENTS: u64 =
        FEATURE_EVENT_REMAP | FEATURE_EVENT_REMOVE | FEATURE_EVENT_UNMAP;

    fn ioctl(fd: isize, request: usize, words: &mut [u64]) -> isize {
        // SAFETY: the kernel reads and writes as many words as each request has; all callers pass that many.
        unsafe { call(IOCTL, [fd as usize, request, words.as_mut_ptr() as usize]) }
    }
    /// A new userfaultfd, close-on-exec and non-blocking; negative if the kernel refuses it. Faults in kernel mode are
    /// handled as well, because a program's read(2) into fresh memory would fail otherwise.
    pub fn open() -> isize {
        // SAFETY: no memory is passed.
        unsafe { call(USERFAULTFD, [O_CLOEXEC | O_NONBLOCK]) }
    }
    /// Initializes the userfaultfd with these features; negative if the kernel lacks one, or the file is in use
    /// already.
    pub fn enable_features(fd: isize, features: u64) -> isize {
        ioctl(fd, API, &mut [API_VERSION, features, 0])
    }
    /// Makes the kernel report missing pages of the range.
    pub fn register_range(fd: isize, start: u64, bytes: u64) -> isize {
        ioctl(fd, REGISTER, &mut [start, bytes, REGISTER_MODE_MISSING, 0])
    }
    /// Wakes the threads that wait for the page without mapping anything there, so that they fault again.
    pub fn wake_waiters(fd: isize, page: u64) -> isize {
        ioctl(fd, WAKE, &mut [page, PAGE])
    }
    /// Maps the kernel's zero page at `page`; waiting threads continue.
    pub fn map_zero_page(fd: isize, page: u64) -> isize {
        ioctl(fd, ZEROPAGE, &mut [page, PAGE, 0, 0])
    }
    /// Maps a frame from the kernel at `page`, with the content of the page at `source`; waiting threads continue.
    pub fn map_copied_page(fd: isize, source: u64, page: u64) -> isize {
        ioctl(fd, COPY, &mut [page, source, PAGE, 0, 0])
    }
    /// Moves the frame at `source` to `page`; waiting threads continue.
    pub fn move_page(fd: isize, source: u64, page: u64) -> isize {
        ioctl(fd, MOVE, &mut [page, source, PAGE, 0, 0])
    }
}

/// The decimal digits of a number, without a formatter.
pub fn decimal_digits(number: u64, buffer: &mut [u8; 20]) -> &[u8] {
    let (mut remaining, mut position) = (number, 20);
    loop {
        position -= 1;
        buffer[position] = b'0' + (remaining % 10) as u8;
        remaining /= 10;
        if remaining == 0 {
            return &buffer[position..];
        }
    }
}
