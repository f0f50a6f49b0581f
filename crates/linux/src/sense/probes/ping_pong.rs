//! Cache-line ping-pong: the CPUs that really share a cache. Virtual machines may report a topology that differs from
//! the actual one.
//!
//! Two threads, one on each CPU, pass one cache line back and forth. The fastest of several short rounds is the
//! machine's own latency, because interruptions only add time. A round trip within one last-level cache is several
//! times faster than one between two caches; the caller decides what counts as near and far ([`SharingVerdict`]),
//! because it depends on the host.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cachemate_core::CpuId;

use super::PinnedThread;

/// Rounds, and round trips in each. The minimum over the rounds is reported.
const ROUNDS: u32 = 8;
const TRIPS_PER_ROUND: u32 = 60;
/// Timeout, so that a partner that is never scheduled does not hang the probe.
const MAX_WAIT: Duration = Duration::from_millis(200);

/// Meaning of a round-trip time within the host's bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SharingVerdict {
    /// One last-level cache.
    Shared,
    /// Two last-level caches.
    Split,
    /// Neither near enough nor plausibly far: the sample is dropped.
    Unclear,
}

/// Bounds that distinguish shared from split, in nanoseconds for one round trip.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RoundTripBounds {
    /// Faster round trips are within one last-level cache.
    pub shared_below_ns: f64,
    /// Round trips from this time on are between two last-level caches.
    pub split_from_ns: f64,
    /// Slower round trips are inconclusive, because a thread was interrupted.
    pub split_to_ns: f64,
}

impl Default for RoundTripBounds {
    /// Bounds from measurements on current server processors: within one last-level cache 55-65 ns on small complexes
    /// of cores and 100-140 ns on large meshes, 310-360 ns between two caches.
    fn default() -> Self {
        RoundTripBounds {
            shared_below_ns: 160.0,
            split_from_ns: 200.0,
            split_to_ns: 900.0,
        }
    }
}

impl RoundTripBounds {
    /// Classifies a round trip within these bounds.
    pub fn classify(&self, round_trip_ns: f64) -> SharingVerdict {
        if round_trip_ns < self.shared_below_ns {
            SharingVerdict::Shared
        } else if (self.split_from_ns..=self.split_to_ns).contains(&round_trip_ns) {
            SharingVerdict::Split
        } else {
            SharingVerdict::Unclear
        }
    }
}

/// One measurement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PingPong {
    /// Fastest round trip.
    pub round_trip_ns: f64,
    /// Processor time of both threads.
    pub cost_ns: u64,
}

#[repr(align(128))] // a line of its own, and not half of a prefetched pair
struct SharedLine(AtomicU32);

/// Measures the round trip between two CPUs; takes well under a millisecond of each when both are free.
///
/// # Errors
/// A CPU cannot be used, or one of the threads did not get its CPU within 200 ms (`TimedOut`).
pub fn round_trip(cpus: (CpuId, CpuId)) -> io::Result<PingPong> {
    let line = SharedLine(AtomicU32::new(0));
    let deadline = Instant::now() + MAX_WAIT;
    std::thread::scope(|scope| {
        let pong_thread = scope.spawn(|| {
            let pinned = PinnedThread::new(cpus.1)?;
            for trip in 0..ROUNDS * TRIPS_PER_ROUND {
                wait_for_value(&line, 2 * trip + 1, deadline)?;
                line.0.store(2 * trip + 2, Ordering::Release);
            }
            Ok::<u64, io::Error>(pinned.cost_ns())
        });
        let run_ping = || {
            let pinned = PinnedThread::new(cpus.0)?;
            let mut fastest_round = Duration::MAX;
            for round in 0..ROUNDS {
                let start = Instant::now();
                for trip in round * TRIPS_PER_ROUND..(round + 1) * TRIPS_PER_ROUND {
                    line.0.store(2 * trip + 1, Ordering::Release);
                    wait_for_value(&line, 2 * trip + 2, deadline)?;
                }
                fastest_round = fastest_round.min(start.elapsed());
            }
            Ok::<_, io::Error>((fastest_round, pinned.cost_ns()))
        };
        let ping_result = run_ping();
        let pong_result = pong_thread.join().expect("the probe thread does not panic");
        let ((fastest, ping_cost), pong_cost) = (ping_result?, pong_result?);
        let round_trip_ns = fastest.as_nanos() as f64 / f64::from(TRIPS_PER_ROUND);
        Ok(PingPong {
            round_trip_ns,
            cost_ns: ping_cost + pong_cost,
        })
    })
}

fn wait_for_value(line: &SharedLine, value: u32, deadline: Instant) -> io::Result<()> {
    let mut spins = 0u32;
    while line.0.load(Ordering::Acquire) != value {
        std::hint::spin_loop();
        spins += 1;
        if spins.is_multiple_of(1 << 12) && Instant::now() > deadline {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the partner CPU was not free",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the probe end by itself, even if both threads are on one CPU and can never meet in time?
    #[test]
    fn the_probe_always_ends() {
        let start = Instant::now();
        let cpu = CpuId(
            LinuxHost::new("/")
                .affinity(tid())
                .unwrap()
                .first()
                .unwrap(),
        );
        let same = round_trip((cpu, cpu));
        assert!(start.elapsed() < Duration::from_secs(20), "{same:?}");
    }

    /// Do two CPUs yield a plausible time, and does a missing CPU lead to an error and not a hang?
    #[test]
    fn two_cpus_yield_a_time_and_a_missing_cpu_is_an_error() {
        let mut cpus = LinuxHost::new("/")
            .affinity(tid())
            .unwrap()
            .iter()
            .map(CpuId)
            .collect::<Vec<_>>();
        assert!(round_trip((cpus[0], CpuId(100_000))).is_err());
        cpus.truncate(2);
        if let [a, b] = cpus[..] {
            // A busy host may not let both run; the probe must report this.
            match round_trip((a, b)) {
                Ok(found) => assert!(found.round_trip_ns > 1.0 && found.cost_ns > 0, "{found:?}"),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::TimedOut),
            }
        }
    }

    /// Are times between near and far left undecided?
    #[test]
    fn latencies_between_near_and_far_stay_undecided() {
        let bounds = RoundTripBounds::default();
        let message = [60.0, 180.0, 330.0, 5_000.0].map(|ns| bounds.classify(ns));
        assert_eq!(
            message,
            [
                SharingVerdict::Shared,
                SharingVerdict::Unclear,
                SharingVerdict::Split,
                SharingVerdict::Unclear
            ]
        );
    }

    use crate::kernel::{Kernel, LinuxHost};

    fn tid() -> i32 {
        rustix::thread::gettid().as_raw_nonzero().get()
    }
}
