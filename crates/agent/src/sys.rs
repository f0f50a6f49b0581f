//! System calls without the C library, because the agent's thread must not touch memory that it manages, not even
//! `errno`.

use core::arch::asm;

// Numbers of the system calls on x86-64.
pub(crate) const READ: usize = 0;
pub(crate) const OPEN: usize = 2;
pub(crate) const CLOSE: usize = 3;
pub(crate) const POLL: usize = 7;
pub(crate) const MMAP: usize = 9;
pub(crate) const IOCTL: usize = 16;
pub(crate) const PREAD: usize = 17;
pub(crate) const PWRITE: usize = 18;
pub(crate) const SCHED_YIELD: usize = 24;
pub(crate) const MADVISE: usize = 28;
pub(crate) const NANOSLEEP: usize = 35;
pub(crate) const GETPID: usize = 39;
pub(crate) const FCNTL: usize = 72;
pub(crate) const MKDIR: usize = 83;
pub(crate) const READLINK: usize = 89;
pub(crate) const CLOCK_GETTIME: usize = 228;
pub(crate) const UNSHARE: usize = 272;
/// userfaultfd(2).
pub const USERFAULTFD: usize = 323;
pub(crate) const CLOSE_RANGE: usize = 436;

/// Result of [`call`]: nothing to read now, or the memory layout is being changed.
pub const EAGAIN: isize = -11;
/// Result of [`call`]: the page is in use elsewhere (pinned, or shared with a child).
pub const EBUSY: isize = -16;
/// Result of [`call`]: the page is already present.
pub const EEXIST: isize = -17;
/// Result of [`call`]: nothing is registered there, or there is no page to move.
pub const ENOENT: isize = -2;
/// Result of [`call`]: the process is ending.
pub const ESRCH: isize = -3;

/// A system call; a negative result is the negated error number.
///
/// # Safety
/// The requirements of the system call: pointer arguments must be valid for everything that the kernel does with them.
#[cfg(target_arch = "x86_64")]
pub unsafe fn call(number: usize, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention: rcx and r11 are clobbered, everything else is preserved.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
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
pub unsafe fn call(_: usize, _: [usize; 6]) -> isize {
    -38
}

/// Nanoseconds of a monotonic clock.
pub fn now_ns() -> u64 {
    let mut time = [0u64; 2];
    // SAFETY: the kernel writes two words.
    unsafe { call(CLOCK_GETTIME, [1, time.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    time[0] * 1_000_000_000 + time[1]
}

/// A new mapping; `None` if the kernel refuses it. A negative `fd` makes it anonymous.
pub fn map(bytes: usize, prot: usize, flags: usize, fd: isize) -> Option<*mut u8> {
    // SAFETY: a fresh mapping at an address that the kernel selects.
    let address = unsafe { call(MMAP, [0, bytes, prot, flags, fd as usize, 0]) };
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
pub mod fault {
    use super::{IOCTL, call};

    /// A thread has touched a missing page: message word 2 is the address.
    pub const EVENT_FAULT: u8 = 0x12;
    /// mremap(2): message words 1 to 3 are the address before, the address after, and the bytes.
    pub const EVENT_REMAP: u8 = 0x14;
    /// `MADV_DONTNEED` and the like: message words 1 and 2 are the start and the end.
    pub const EVENT_REMOVE: u8 = 0x15;
    /// munmap(2): message words 1 and 2 are the start and the end.
    pub const EVENT_UNMAP: u8 = 0x16;

    const API: usize = 0xc018_aa3f;
    const REGISTER: usize = 0xc020_aa00;
    const WAKE: usize = 0x8010_aa02;
    const COPY: usize = 0xc028_aa03;
    const ZEROPAGE: usize = 0xc020_aa04;
    const MOVE: usize = 0xc028_aa05;
    const PAGE: u64 = crate::layout::PAGE_BYTES as u64;

    /// Moving pages (Linux 6.8).
    pub const MOVE_PAGES: u64 = 1 << 16;
    /// Remapping, removing and unmapping are reported. The thread waits until the report was read, so the handler
    /// itself must never do any of these.
    pub const EVENTS: u64 = 1 << 2 | 1 << 3 | 1 << 6;

    fn ioctl(fd: isize, request: usize, words: &mut [u64]) -> isize {
        // SAFETY: the kernel reads and writes as many words as each request has; all callers pass that many.
        unsafe {
            call(
                IOCTL,
                [fd as usize, request, words.as_mut_ptr() as usize, 0, 0, 0],
            )
        }
    }
    /// Initializes the userfaultfd with these features; negative if the kernel lacks one, or the file is in use
    /// already.
    pub fn enable_features(fd: isize, features: u64) -> isize {
        ioctl(fd, API, &mut [0xaa, features, 0])
    }
    /// Makes the kernel report missing pages of the range.
    pub fn register_range(fd: isize, start: u64, bytes: u64) -> isize {
        ioctl(fd, REGISTER, &mut [start, bytes, 1, 0])
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
