//! Reuse times by hardware watchpoints: the time from one touch of a word to the next.
//!
//! Problem: StatStack needs reuse times, and a virtual machine without a PMU offers no sampled accesses. It usually
//! does offer debug registers. Method: a random word of the program's writable memory is watched; the first touch
//! starts the clock, the second ends it, and the event disarms itself after the two (`PERF_EVENT_IOC_REFRESH`), so that
//! a hot word costs two traps and not a million. Four words are watched at once, one for each debug register.
//! Properties: words are drawn from resident memory ([`super::watch_candidates`]) and not from accesses, so a sample
//! stands for a touched location; a word that is not touched again while it is watched is censored, not dropped; reuses
//! shorter than a trap (some 15 us) are reported as that long; the accesses in between are not counted, but the clock
//! runs only while the thread does. Cost: two traps and one arming per sample.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::ptr;
use std::time::{Duration, Instant};

use cachemate_core::{ReuseSample, SplitMix64};
use perf_event_open_sys as perf;

use super::watch_candidates::{PageMap, WatchCandidates};
use crate::kernel::Kernel;
use crate::sense::events::open_event;
use crate::sense::sampling::records::{take_record, u64_at};
use crate::sense::sampling::ring::SampleRing;

/// Touches per word: one that starts the clock, and one that ends it.
const TOUCHES_PER_WORD: i32 = 2;
/// Bytes per record of a touch.
const RECORD_BYTES: usize = 24;
/// Number of debug registers.
pub const DEBUG_REGISTERS: usize = 4;

/// One watched word of one thread.
struct Watchpoint {
    file: File,
    ring: SampleRing,
    touches_ns: Vec<u64>,
}

impl Watchpoint {
    fn arm(tid: i32, address: u64) -> io::Result<Self> {
        let mut attr = perf::bindings::perf_event_attr::default();
        attr.type_ = perf::bindings::PERF_TYPE_BREAKPOINT;
        attr.bp_type = 3; // reads and writes: reads alone are refused by the hardware
        attr.__bindgen_anon_3.bp_addr = address;
        attr.__bindgen_anon_4.bp_len = 8;
        attr.__bindgen_anon_1.sample_period = 1;
        // The event is enabled only while the thread runs, because a thread that waits for a CPU touches nothing.
        attr.sample_type = u64::from(perf::bindings::PERF_SAMPLE_READ);
        attr.read_format = u64::from(perf::bindings::PERF_FORMAT_TOTAL_TIME_ENABLED);
        attr.set_disabled(1);
        attr.set_exclude_kernel(1);
        attr.set_exclude_hv(1);
        let file = open_event(attr, (tid, -1), None)?;
        let ring = SampleRing::map(&file, TOUCHES_PER_WORD as usize * RECORD_BYTES)?;
        // SAFETY: the call takes an integer and touches no memory of ours.
        if unsafe { perf::ioctls::REFRESH(file.as_raw_fd(), TOUCHES_PER_WORD) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Watchpoint {
            file,
            ring,
            touches_ns: Vec::new(),
        })
    }

    /// Time that the thread has run since the watch began; `None` if the kernel did not report it.
    fn run_time_ns(&self) -> Option<u64> {
        let mut count_and_time = [0u8; 16];
        let read_bytes = (&self.file).read(&mut count_and_time).ok()?;
        (read_bytes == 16)
            .then(|| u64::from_ne_bytes(count_and_time[8..].try_into().expect("eight bytes")))
    }

    /// Times of its touches so far, in running time of the thread.
    fn touches_ns(&mut self) -> &[u64] {
        let bytes = self.ring.take_bytes();
        let mut records = bytes.as_slice();
        while let Some((record_type, _, record)) = take_record(&mut records) {
            // A header, the count, and the time.
            if record_type == perf::bindings::PERF_RECORD_SAMPLE && record.len() == RECORD_BYTES {
                self.touches_ns.push(u64_at(record, 16));
            }
        }
        &self.touches_ns
    }
}

/// Watches a word of this process and touches it.
///
/// # Errors
/// No watchpoint can be set, or it does not fire.
pub fn test_watchpoint() -> io::Result<String> {
    let word = Box::new(std::hint::black_box(1u64));
    let mut watch = Watchpoint::arm(0, ptr::from_ref(word.as_ref()) as u64)?;
    for _ in 0..3 {
        // SAFETY: a volatile read of a live value; the compiler may not leave it out.
        unsafe { ptr::read_volatile(word.as_ref()) };
    }
    match watch.touches_ns().len() {
        2 => Ok(format!(
            "{DEBUG_REGISTERS} at once; reuses under some 15 us are not resolved"
        )),
        touch_count => Err(io::Error::other(format!(
            "a watched word was touched three times and {touch_count} touches of two came"
        ))),
    }
}

/// The watched thread and process, with the number of words and the deadline.
pub struct WatchTarget<'a> {
    /// Its process.
    pub pid: i32,
    /// The thread.
    pub tid: i32,
    /// Candidate words of its process's memory.
    pub candidates: &'a mut WatchCandidates,
    /// Maximum number of samples.
    pub max_samples: usize,
    /// Maximum time for which one word is watched.
    pub max_word_time: Duration,
    /// Time at which all watching ends.
    pub deadline: Instant,
    /// Seed for drawing the words.
    pub seed: u64,
}

/// Watches random words of one thread's process, [`DEBUG_REGISTERS`] at a time, until [`WatchTarget::max_samples`]
/// words were touched or the deadline has passed.
///
/// # Errors
/// The process has exited, has no writable memory, or may not be watched.
pub fn sample_reuses(kernel: &dyn Kernel, target: WatchTarget<'_>) -> io::Result<Vec<ReuseSample>> {
    let WatchTarget {
        pid,
        tid,
        candidates: words,
        max_samples: locations,
        max_word_time: patience,
        deadline,
        seed,
    } = target;
    words.refresh(kernel, pid)?;
    let pages = PageMap::open_pagemap(pid);
    let mut generator = SplitMix64::new(seed);
    let mut samples = Vec::new();
    while samples.len() < locations && Instant::now() < deadline {
        let mut watchpoints = Vec::new();
        for _ in 0..DEBUG_REGISTERS.min(locations - samples.len()) {
            let Some(address) = words.draw(&mut generator, |address| pages.is_resident(address))
            else {
                break;
            };
            watchpoints.push((address, Watchpoint::arm(tid, address)?));
        }
        if watchpoints.is_empty() {
            break;
        }
        let wait_end = (Instant::now() + patience).min(deadline);
        while Instant::now() < wait_end
            && watchpoints
                .iter_mut()
                .any(|(_, watch)| watch.touches_ns().len() < 2)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut has_touch = false;
        for (address, watch) in &mut watchpoints {
            let ran_ns = watch.run_time_ns();
            let touches_ns = watch.touches_ns();
            words.record_watch(*address, !touches_ns.is_empty());
            has_touch |= !touches_ns.is_empty();
            samples.extend(reuse_sample(touches_ns, ran_ns));
        }
        // Words that were not touched give no sample. If no word of a round was touched, and the time does not suffice
        // for another round, the search ends.
        if !has_touch && Instant::now() + patience > deadline {
            break;
        }
    }
    Ok(samples)
}

/// The sample of a watch; `ran_ns` is the thread's running time at the end of the watch.
fn reuse_sample(touches_ns: &[u64], ran_ns: Option<u64>) -> Option<ReuseSample> {
    let first_touch_ns = *touches_ns.first()?;
    let second_touch_ns = touches_ns.get(1).copied();
    let elapsed_ns = second_touch_ns.or(ran_ns)?.saturating_sub(first_touch_ns);
    Some(ReuseSample {
        accesses: None,
        elapsed_ns,
        reused: second_touch_ns.is_some(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::LinuxHost;

    /// Does a watched word report both touches, or the host the reason why it cannot be watched?
    #[test]
    fn a_watchpoint_reports_both_touches_or_a_reason() {
        match test_watchpoint() {
            Ok(says) => assert!(says.contains("at once")),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }

    /// Does the clock stand still while the thread sleeps?
    #[test]
    fn the_clock_stands_still_while_the_thread_sleeps() {
        if test_watchpoint().is_err() {
            return;
        }
        let word = Box::new(std::hint::black_box(1u64));
        // Tests beside this one may hold the watch points for a moment.
        let give_up = Instant::now() + Duration::from_secs(20);
        let mut watch = loop {
            match Watchpoint::arm(0, ptr::from_ref(word.as_ref()) as u64) {
                Ok(watch) => break watch,
                Err(error) => assert!(Instant::now() < give_up, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let asleep = Duration::from_millis(100);
        for pause in [Duration::ZERO, asleep] {
            std::thread::sleep(pause);
            // SAFETY: a volatile read of a live value; the compiler may not leave it out.
            unsafe { ptr::read_volatile(word.as_ref()) };
        }
        let touches = watch.touches_ns().to_vec();
        assert_eq!(touches.len(), 2);
        assert!(
            touches[1] - touches[0] < asleep.as_nanos() as u64 / 2,
            "{touches:?}"
        );
        assert!(
            watch
                .run_time_ns()
                .is_some_and(|ran_ns| ran_ns >= touches[1])
        );
    }

    /// Is a word touched once censored, and one never touched no sample?
    #[test]
    fn a_word_touched_once_is_censored() {
        assert_eq!(reuse_sample(&[], Some(9)), None);
        let once = ReuseSample {
            accesses: None,
            elapsed_ns: 5,
            reused: false,
        };
        assert_eq!(reuse_sample(&[4], Some(9)), Some(once));
        assert_eq!(reuse_sample(&[4], None), None);
        assert_eq!(
            reuse_sample(&[4, 6], None),
            Some(ReuseSample {
                elapsed_ns: 2,
                reused: true,
                ..once
            })
        );
    }

    /// Is an exited process an error, and does sampling end by its deadline?
    #[test]
    fn sampling_ends_by_its_deadline() {
        let host = LinuxHost::new("/");
        let soon = || Instant::now() + Duration::from_millis(20);
        let watch = |pid: i32, locations: usize| {
            let (patience, deadline) = (Duration::from_millis(2), soon());
            let words = &mut WatchCandidates::default();
            sample_reuses(
                &host,
                WatchTarget {
                    pid,
                    tid: pid,
                    candidates: words,
                    max_samples: locations,
                    max_word_time: patience,
                    deadline,
                    seed: 1,
                },
            )
        };
        assert!(watch(i32::MAX, 4).is_err());
        let pid = std::process::id() as i32;
        if test_watchpoint().is_ok() {
            // A thread has four watch points, and tests beside this one may hold them for a moment.
            let is_busy = |error: &io::Error| error.raw_os_error() == Some(libc::ENOSPC);
            let give_up = Instant::now() + Duration::from_secs(20);
            let (took, sampled) = loop {
                let start = Instant::now();
                match watch(pid, 1000) {
                    Err(error) if is_busy(&error) && Instant::now() < give_up => {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    other => break (start.elapsed(), other),
                }
            };
            sampled.unwrap();
            assert!(took < Duration::from_secs(10));
        }
    }
}
