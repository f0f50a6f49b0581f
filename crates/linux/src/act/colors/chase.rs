//! Measured capacity of a set of frames: a pointer chase over the set, and the knee in its curve.
//!
//! A wrong threshold between hit and miss yields classes that are stable but color nothing. Therefore a class is
//! accepted only if a chase over frames of k colors becomes slow beyond k colors' share of the cache, while a chase
//! over as many frames of all colors does not.

use std::time::Instant;

use cachemate_agent::layout::PAGE_BYTES;
use cachemate_agent::timing::LINE_BYTES;
use cachemate_core::SplitMix64;

/// Rounds whose median is the result: interruptions only add time, but a neighbor may come and go.
const ROUNDS: usize = 5;
const MIN_STEPS: usize = 20_000;

/// Nanoseconds per load of a chase that visits every line of these pages once per round, in an order drawn by `rng`.
///
/// # Safety
/// The pages must be mapped, writable and used by the caller only.
pub unsafe fn load_ns(pages: &[*mut u8], rng: &mut SplitMix64) -> f64 {
    let mut lines: Vec<*mut u8> = Vec::with_capacity(pages.len() * PAGE_BYTES / LINE_BYTES);
    for &page in pages {
        // SAFETY: inside the page.
        lines.extend(
            (0..PAGE_BYTES / LINE_BYTES).map(|line| unsafe { page.add(line * LINE_BYTES) }),
        );
    }
    if lines.is_empty() {
        return 0.0;
    }
    rng.shuffle(&mut lines);
    for (index, &line) in lines.iter().enumerate() {
        // SAFETY: lines begin at multiples of 64 bytes in pages that the caller owns.
        unsafe {
            line.cast::<*mut u8>()
                .write(lines[(index + 1) % lines.len()])
        };
    }
    let steps = lines.len().max(MIN_STEPS);
    // SAFETY: the cycle just written.
    let mut pointer = unsafe { chase_pointers(lines[0], 2 * lines.len()) };
    let mut rounds_ns = [0.0; ROUNDS];
    for round_ns in &mut rounds_ns {
        let start = Instant::now();
        // SAFETY: the same cycle.
        pointer = unsafe { chase_pointers(pointer, steps) };
        *round_ns = start.elapsed().as_nanos() as f64 / steps as f64;
    }
    rounds_ns.sort_by(f64::total_cmp);
    rounds_ns[ROUNDS / 2]
}

unsafe fn chase_pointers(start: *mut u8, steps: usize) -> *mut u8 {
    let mut pointer = start;
    for _ in 0..steps {
        // SAFETY: every line holds the address of another one.
        pointer = unsafe { pointer.cast::<*mut u8>().read_volatile() };
    }
    pointer
}

/// One size of a comparison: the same number of frames, of some colors and of all.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
pub struct ChaseComparison {
    /// Memory of the frames of each chase.
    pub size_bytes: u64,
    /// Time of a load in the chase over frames of one color.
    pub colored_ns: f64,
    /// Time of a load in the chase over as many frames of all colors.
    pub ordinary_ns: f64,
}

/// How much slower colored frames must be than ordinary ones for a knee to count.
const MIN_SLOWDOWN: f64 = 1.3;

/// The smallest size at which colored frames are slower than ordinary ones; `None` if they are slower at no size. Sizes
/// ascend; one outlier in the middle does not make a knee.
pub fn knee_bytes(curve: &[ChaseComparison]) -> Option<u64> {
    let is_slower = |point: &ChaseComparison| point.colored_ns > MIN_SLOWDOWN * point.ordinary_ns;
    let knee = (0..curve.len())
        .find(|&index| is_slower(&curve[index]) && curve.get(index + 1).is_none_or(is_slower))?;
    Some(curve[knee].size_bytes)
}

/// Are frames for `share_bytes` of a cache as fast as ordinary ones below half of that share, and slower beyond it?
pub fn is_share_confined(curve: &[ChaseComparison], share_bytes: u64) -> bool {
    let fitting_points = curve
        .iter()
        .filter(|point| 2 * point.size_bytes <= share_bytes);
    let is_fast_within_half = fitting_points
        .clone()
        .all(|point| point.colored_ns <= MIN_SLOWDOWN * point.ordinary_ns);
    is_fast_within_half && knee_bytes(curve).is_some_and(|knee| knee <= 2 * share_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(u64, f64, f64)]) -> Vec<ChaseComparison> {
        let point = |&(size_bytes, colored_ns, ordinary_ns)| ChaseComparison {
            size_bytes,
            colored_ns,
            ordinary_ns,
        };
        points.iter().map(point).collect()
    }

    /// Is there a knee if only colored frames become slow, and none if ordinary ones do as well?
    #[test]
    fn a_knee_exists_only_if_colored_frames_alone_become_slow() {
        let real = curve(&[
            (32, 5.0, 5.0),
            (64, 6.0, 5.0),
            (128, 20.0, 5.0),
            (256, 22.0, 5.5),
        ]);
        assert_eq!(knee_bytes(&real), Some(128));
        assert!(is_share_confined(&real, 64));
        let sham = curve(&[
            (32, 5.0, 5.0),
            (64, 5.0, 5.0),
            (128, 5.1, 5.0),
            (256, 21.0, 20.0),
        ]);
        assert_eq!(knee_bytes(&sham), None);
        assert!(!is_share_confined(&sham, 64));
    }

    /// Is one slow sample in the middle not taken for a knee, and slowness below the share not for confinement?
    #[test]
    fn one_slow_sample_is_not_taken_for_a_knee() {
        let spike = curve(&[
            (32, 5.0, 5.0),
            (64, 50.0, 5.0),
            (128, 5.0, 5.0),
            (256, 5.0, 5.0),
        ]);
        assert_eq!(knee_bytes(&spike), None);
        let slow_everywhere = curve(&[
            (16, 20.0, 5.0),
            (32, 20.0, 5.0),
            (64, 20.0, 5.0),
            (128, 20.0, 5.0),
        ]);
        assert!(!is_share_confined(&slow_everywhere, 64));
    }

    /// Does a chase over a few pages end with a positive time, and one over no pages with zero?
    #[test]
    fn a_chase_ends_with_a_positive_time_or_zero_for_no_pages() {
        let mut memory = vec![0u64; 8 * PAGE_BYTES / 8 + PAGE_BYTES / 8];
        let start = memory.as_mut_ptr().cast::<u8>();
        let first = start.align_offset(PAGE_BYTES);
        // SAFETY: eight whole pages inside the vector.
        let pages: Vec<*mut u8> = (0..8)
            .map(|page| unsafe { start.add(first + page * PAGE_BYTES) })
            .collect();
        // SAFETY: pages of a vector that is ours.
        assert!(unsafe { load_ns(&pages, &mut SplitMix64::new(1)) } > 0.0);
        // SAFETY: no page at all.
        assert_eq!(unsafe { load_ns(&[], &mut SplitMix64::new(1)) }, 0.0);
    }
}
