//! Whether two CPUs share a cache, by lines that one of them has just read.
//!
//! Problem: a hypervisor tells its guest which CPUs share a cache, and some tell what is not so, for example one cache
//! for all CPUs of a guest that runs on several, or one for each CPU; placement by such a list moves programs for
//! nothing. A round trip of a line between two CPUs (ping-pong) does not decide it: on a guest it takes 278 ns between
//! CPUs that do share a cache. Method: one CPU reads lines that are in no cache, and the other one then walks them; the
//! latency is that of the shared cache, or that of memory and other packages. For example, a guest walks lines from
//! memory at 120 ns each, and lines that its other CPU has read at 26 ns. Properties: 64 KiB and a tenth of a ms per round,
//! because busy neighbors of a guest evict a new line within a ms from private and shared caches; x86-64 only, because
//! nothing else here empties caches.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use cachemate_core::{CpuId, Estimate};
use serde::{Deserialize, Serialize};

use super::kernels::LineBuffer;
use super::{CalibrationError, LOWER_QUARTILE, at_quantile};
use crate::sense::probes::pinned::PinnedThread;

/// What a walk over lines that another CPU has read costs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharingCheck {
    /// The CPU that walks, and the one that has read.
    pub cpus: [u32; 2],
    /// Whether the kernel says that they share the cache.
    pub are_told_to_share: bool,
    /// Time of a load of a line that the other CPU has read.
    pub read_by_other_ns: Estimate,
    /// Time of a load of a line that is in no cache.
    pub uncached_ns: Estimate,
}

/// Shares of the latency of memory up to which a line is in the same cache, and from which on it is not.
const SHARED_LATENCY: f64 = 0.5;
const UNSHARED_LATENCY: f64 = 0.8;
/// Size of the lines that are read by one CPU and walked by the other.
const SHARED_BYTES: u64 = 64 << 10;
/// Rounds of both walks.
const SHARING_ROUNDS: usize = 15;
/// Passes in which the other CPU reads the lines of a round.
const READ_PASSES: usize = 3;
/// Steps of a walk, as a part of its lines, so that few are met twice.
const WALKED_SHARE: u64 = 4;

impl SharingCheck {
    /// Whether the CPUs share a cache by these times; `None` if they lie between both.
    pub fn do_share(&self) -> Option<bool> {
        let share = self.read_by_other_ns.value / self.uncached_ns.value;
        match share {
            _ if share <= SHARED_LATENCY => Some(true),
            _ if share >= UNSHARED_LATENCY => Some(false),
            _ => None,
        }
    }

    /// Whether they share none by these times.
    pub fn are_apart(&self) -> Option<bool> {
        Some(!self.do_share()?)
    }

    /// Says what was measured, in one line.
    pub fn describe(&self) -> String {
        let [walking, reading] = self.cpus;
        let found = match self.do_share() {
            Some(true) => "they share a cache",
            Some(false) => "they share none",
            None => "which decides nothing",
        };
        format!(
            "CPUs {walking} and {reading}: a line that one has read takes the other {:.0} ns, one from memory {:.0} ns: {found}",
            self.read_by_other_ns.value, self.uncached_ns.value
        )
    }

    /// Says what differs from what the kernel says; `None` if nothing does. Of all times when the CPUs were looked at and the
    /// times told, they were found apart in so many.
    pub fn contradiction(&self, apart_count: usize, look_count: usize) -> Option<String> {
        let [walking, reading] = self.cpus;
        let found = format!(
            "a line that CPU {reading} has read takes CPU {walking} {:.0} ns, one from memory {:.0} ns",
            self.read_by_other_ns.value, self.uncached_ns.value
        );
        if self.are_told_to_share {
            return (apart_count > 0).then(|| {
                format!(
                    "the kernel says that CPUs {walking} and {reading} share a cache, and by their times they did not in \
                     {apart_count} of {look_count} looks ({found}): the hypervisor moves them, or its list (shared_cpu_list) is \
                     wrong; forecasts are means over both, and a placement by caches helps at times only"
                )
            });
        }
        (self.do_share() == Some(true)).then(|| {
            format!(
                "the kernel says that CPUs {walking} and {reading} share no cache, and by their times they do: {found}; the \
                 hypervisor's list (shared_cpu_list) is wrong, so do not place programs by it"
            )
        })
    }
}

/// Compares walks on this thread's CPU: of lines in no cache, and of lines that the other CPU has read. `None` where caches
/// cannot be emptied.
pub(super) fn measure_sharing(
    buffer: &LineBuffer,
    cpus: [CpuId; 2],
    are_told_to_share: bool,
) -> Result<Option<SharingCheck>, CalibrationError> {
    let (bytes, line_count) = (SHARED_BYTES, SHARED_BYTES / 64);
    // Turns that were taken. Waits do not sleep: a CPU that idles may lose its private caches, and the lines with them.
    let turns = AtomicUsize::new(0);
    let wait_for_turn = |turn: usize| {
        while turns.load(Ordering::Acquire) < turn {
            std::thread::yield_now();
        }
    };
    let read_in_turns = || -> io::Result<()> {
        let pinned = PinnedThread::new(cpus[1]);
        for round in 0..SHARING_ROUNDS {
            wait_for_turn(2 * round + 1);
            // Caches keep lines for longer that were touched again.
            for _ in 0..READ_PASSES {
                buffer.read_all(bytes, 0, line_count as usize);
            }
            turns.store(2 * round + 2, Ordering::Release);
        }
        pinned.map(drop)
    };
    let timed_walk = |seed: u64| {
        let (start, steps) = (Instant::now(), (line_count / WALKED_SHARE).max(1));
        buffer.walk::<1>(bytes, steps, seed);
        start.elapsed().as_nanos() as f64 / steps as f64
    };
    let (mut read_by_other, mut uncached) = (Vec::new(), Vec::new());
    let mut can_empty = true;
    let read_result = std::thread::scope(|scope| {
        let reader = scope.spawn(read_in_turns);
        for round in 0..SHARING_ROUNDS {
            can_empty &= buffer.empty_caches(bytes);
            uncached.push(timed_walk(2 * round as u64 + 1));
            can_empty &= buffer.empty_caches(bytes);
            turns.store(2 * round + 1, Ordering::Release);
            wait_for_turn(2 * round + 2);
            read_by_other.push(timed_walk(2 * round as u64 + 2));
        }
        reader
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the reading thread has ended")))
    });
    read_result.map_err(|error| CalibrationError::Pin(cpus[1].0, error))?;
    let times =
        at_quantile(read_by_other, LOWER_QUARTILE).zip(at_quantile(uncached, LOWER_QUARTILE));
    Ok(times
        .filter(|_| can_empty)
        .map(|(read_by_other_ns, uncached_ns)| SharingCheck {
            cpus: cpus.map(|cpu| cpu.0),
            are_told_to_share,
            read_by_other_ns,
            uncached_ns,
        }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a time near memory's say "apart", one near a cache's "shared", and one between nothing, and is a list contradicted
    /// by one look that found CPUs apart that it says share, and by times that show the reverse?
    #[test]
    fn only_clear_times_contradict_the_kernels_list() {
        let check = |are_told_to_share, read_by_other_ns| SharingCheck {
            cpus: [0, 1],
            are_told_to_share,
            read_by_other_ns: Estimate::exact(read_by_other_ns),
            uncached_ns: Estimate::exact(100.0),
        };
        let found = [25.0, 65.0, 95.0].map(|ns| check(true, ns).do_share());
        assert_eq!(found, [Some(true), None, Some(false)]);
        assert_eq!(check(true, 25.0).contradiction(0, 3), None);
        // They may share it again at the last look.
        for ns in [25.0, 95.0] {
            let text = check(true, ns).contradiction(2, 3).unwrap();
            assert!(text.contains("they did not in 2 of 3 looks"), "{text}");
        }
        for (ns, is_contradicted) in [(25.0, true), (65.0, false), (130.0, false)] {
            let contradiction = check(false, ns).contradiction(1, 3);
            assert_eq!(contradiction.is_some(), is_contradicted, "{ns}");
        }
    }

    /// Are a CPU's own lines, read a moment ago, never taken for lines of memory, nor their times for contradictions of
    /// a list that says so?
    #[test]
    fn a_cpu_shares_a_cache_with_itself() {
        let allowed = PinnedThread::new(CpuId(0));
        let Ok(_pinned) = allowed else {
            return crate::skip_test::report_unchecked("a walk on CPU 0", "it is not allowed here");
        };
        let buffer = LineBuffer::new(1 << 20);
        let check = measure_sharing(&buffer, [CpuId(0); 2], true).unwrap();
        let Some(check) = check else {
            return crate::skip_test::report_unchecked(
                "a walk of uncached lines",
                "not on this processor",
            );
        };
        assert_ne!(check.do_share(), Some(false), "{check:?}");
    }
}
