//! Hints to the host: state that a held request will need is prefetched while other cores run.
//!
//! Problem: the state of many simulated cores exceeds the host's first caches. A request that others can see is held
//! until the cores that are behind have caught up, and then waits for the host's memory at every cache on its way.
//! Method: when the request is held, prefetch hints name the lines of sets, history and directory that it will read.
//! Properties: hints change only the run time; results are the same bits with and without them.

/// Bytes of a line in the host's caches.
const HOST_LINE_BYTES: usize = 64;
/// Number of tag words in such a line.
pub(crate) const HOST_LINE_WORDS: usize = HOST_LINE_BYTES / size_of::<u32>();

/// Hints to the host that these words will be read.
#[inline(always)]
pub(crate) fn prefetch<T>(words: &[T]) {
    let bytes = size_of_val(words);
    for offset in (0..bytes).step_by(HOST_LINE_BYTES) {
        prefetch_line(words.as_ptr().cast::<u8>().wrapping_add(offset));
    }
}

#[inline(always)]
fn prefetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has SSE, and a hint reads nothing, so any address is valid.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
