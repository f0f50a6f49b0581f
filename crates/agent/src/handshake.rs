//! Lock-free signals between the program's threads and the handler: one flag for a page that is moved out, one for the
//! final count.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// 1 while the handler has a page moved out, or the program is forking.
static IN_FLIGHT_FLAG: AtomicU32 = AtomicU32::new(0);

/// Set when the program is ending and requests a final count; cleared when the count is done.
static FINAL_COUNT_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Has the program requested the final count?
pub fn is_ending() -> bool {
    FINAL_COUNT_REQUESTED.load(Ordering::Acquire)
}

/// Reports that the final count is in the status file, so that the waiting thread continues.
pub fn finish_final_count() {
    FINAL_COUNT_REQUESTED.store(false, Ordering::Release);
}

/// Acquires the right to move a page out; refused while the program forks, because the child would find a missing page.
pub fn try_acquire() -> bool {
    IN_FLIGHT_FLAG
        .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
        .is_ok()
}

/// Releases the right that [`try_acquire`] gave. A newly forked child calls it as well, because it has its parent's
/// flag.
pub fn release() {
    IN_FLIGHT_FLAG.store(0, Ordering::Release);
}

/// Requests a final count for the ending program.
pub fn request_final_count() {
    FINAL_COUNT_REQUESTED.store(true, Ordering::Release);
}
