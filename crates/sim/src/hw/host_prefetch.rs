//! Hints to the host: state that a held request will need is brought near while other cores have their turns.
//!
//! Problem: the state of many simulated cores exceeds the host's first caches. A request that others see is held until
//! the cores behind have come as far, and then waits for the host's memory at every cache of its way.
//! Method: when it is held, the host is told which lines of sets, history and directory it will read.
//! Properties: a hint changes nothing but time; results are the same bits with and without it.

/// Bytes of a line of the host's caches.
const HOST_LINE_BYTES: usize = 64;
/// Words of tags in it.
pub(crate) const HOST_LINE_WORDS: usize = HOST_LINE_BYTES / size_of::<u32>();

/// The host may bring these words near.
#[inline(always)]
pub(crate) fn prefetch<T>(words: &[T]) {
    let bytes = size_of_val(words);
    for offset in (0..bytes).step_by(HOST_LINE_BYTES) {
        prefetch_place(words.as_ptr().cast::<u8>().wrapping_add(offset));
    }
}

#[inline(always)]
fn prefetch_place(place: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has SSE, and a hint reads nothing: any address is good.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
