//! Exports of the preloaded library: `mmap`, a constructor and a destructor.

use core::ffi::{c_int, c_void};

use crate::{start, sys};

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = start::on_load;
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = start::on_unload;

/// mmap(2); anonymous private memory is registered before the program can touch it.
///
/// # Safety
/// The conditions of mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let args = [
        address as usize,
        bytes,
        prot as usize,
        flags as usize,
        fd as isize as usize,
        offset as usize,
    ];
    // SAFETY: the caller's promise.
    let result = unsafe { sys::call(sys::MMAP, args) };
    if (-4095..0).contains(&result) {
        // SAFETY: the C library's own word for this thread.
        unsafe { *__errno_location() = -result as c_int };
        return usize::MAX as *mut c_void;
    }

    // Anonymous and private; not growing downward, not locked, and without huge pages.
    if flags & 0x22 == 0x22 && flags & (0x100 | 0x2000 | 0x40000) == 0 {
        start::register_mapping(result as usize, bytes);
    }
    result as *mut c_void
}

/// The same function, because offsets have 64 bits anyway.
///
/// # Safety
/// The conditions of mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    bytes: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(address, bytes, prot, flags, fd, offset) }
}

/// The core library refers to it, although nothing unwinds.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// Aborts, because any panic here is a bug, and a program must not continue with memory in an unknown state.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    unsafe extern "C" {
        fn abort() -> !;
    }
    // SAFETY: ends the process.
    unsafe { abort() }
}
