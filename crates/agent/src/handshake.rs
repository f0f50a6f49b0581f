//! Lock-free signals between the program's threads and the handler: one flag for a page that is moved out, one for a
//! requested count.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// 1 while the handler has a page moved out, or the program is forking.
static IN_FLIGHT_FLAG: AtomicU32 = AtomicU32::new(0);

/// Set while the program waits for a count of its resident pages, at its start and at its end; cleared when it is done.
static COUNT_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Does the program wait for a count?
pub fn is_count_requested() -> bool {
    COUNT_REQUESTED.load(Ordering::Acquire)
}

/// Reports that the requested count is in the status file, so that the waiting thread continues.
pub fn finish_requested_count() {
    COUNT_REQUESTED.store(false, Ordering::Release);
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

/// Requests a count of the resident pages.
pub fn request_count() {
    COUNT_REQUESTED.store(true, Ordering::Release);
}
