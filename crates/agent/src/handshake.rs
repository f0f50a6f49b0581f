//! Lock-free signals between the program's threads and the handler: one flag for a page that is out, one for the last
//! count.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// 1 = the handler has a page out, or the program is forking.
static OUT: AtomicU32 = AtomicU32::new(0);

/// The program is ending: one last count, please. Turns false when it is done.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Has the program asked for the last count?
pub fn is_ending() -> bool {
    ENDING.load(Ordering::Acquire)
}

/// The last count stands in the status file; the waiting thread goes on.
pub fn finish_final_count() {
    ENDING.store(false, Ordering::Release);
}

/// Acquires the right to have a page out; refused while the program forks, because the child would find a hole.
pub fn try_acquire() -> bool {
    OUT.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// Releases the right of [`try_acquire`]. A child that was just forked calls it too, because it has its parent's
/// flag.
pub fn release() {
    OUT.store(0, Ordering::Release);
}

/// The program asks for one last count.
pub fn request_final_count() {
    ENDING.store(true, Ordering::Release);
}
