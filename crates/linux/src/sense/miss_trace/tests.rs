//! Traces of this kernel's page faults, which have addresses on every host, in the place of misses.

use std::sync::Barrier;

use cachemate_core::CacheLevel;

use super::*;
use crate::fake_tests::FakeHost;
use crate::kernel::memory_map::MemoryMap;
use crate::sense::counters::EventUnavailable;

const PAGE: usize = 4096;

fn fault_tracer() -> MissTracer {
    use perf::bindings::{PERF_COUNT_SW_PAGE_FAULTS, PERF_COUNT_SW_TASK_CLOCK, PERF_TYPE_SOFTWARE};
    let code = |config: u32| EventCode {
        kind: PERF_TYPE_SOFTWARE,
        config: config.into(),
    };
    MissTracer {
        name: "page faults",
        misses: code(PERF_COUNT_SW_PAGE_FAULTS),
        instructions: code(PERF_COUNT_SW_TASK_CLOCK),
        last_level_misses: None,
        precise_ip: 0,
    }
}

/// Pages of this process that no one has touched.
struct FreshPages(MemoryMap);

impl FreshPages {
    fn new(pages: usize) -> Self {
        FreshPages(MemoryMap::of_small_pages(pages * PAGE).unwrap())
    }

    /// Touches every page once, in an order that no sorting would give. Returns the addresses in this order.
    fn touch_all(&self) -> Vec<u64> {
        let (start, pages) = (self.0.start() as usize, self.0.bytes() / PAGE);
        let addresses = (0..pages).map(|index| start + index * 7 % pages * PAGE + index % 64 * 64);
        let touch = |address: usize| {
            // SAFETY: the address lies in our mapping.
            unsafe { std::ptr::write_volatile(address as *mut u8, 1) };
            address as u64
        };
        addresses.map(touch).collect()
    }

    /// The addresses of a log that lie in these pages.
    fn touches_in(&self, log: &MissTraceLog) -> Vec<u64> {
        let range = self.0.start() as u64..self.0.start() as u64 + self.0.bytes() as u64;
        log.addresses
            .iter()
            .copied()
            .filter(|address| range.contains(address))
            .collect()
    }
}

fn own_tid() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Does a trace have every access of its thread in order, none of another thread, and counts over the same time?
#[test]
fn a_trace_has_every_access_of_its_thread_in_order() {
    let (own, others) = (FreshPages::new(300), FreshPages::new(300));
    let mut trace = fault_tracer().start(own_tid(), 1 << 16).unwrap();
    let touched = std::thread::scope(|scope| {
        scope.spawn(|| others.touch_all());
        own.touch_all()
    });
    trace.drain();
    let log = trace.finish().unwrap();
    assert_eq!(own.touches_in(&log), touched);
    assert!(others.touches_in(&log).is_empty());
    assert_eq!(log.lost_misses, Some(0));
    assert!(log.counts.get(CounterEvent::Instructions).unwrap() > 0.0);
    let after = FreshPages::new(10);
    after.touch_all();
    assert!(after.touches_in(&log).is_empty());
}

/// Are accesses for which the ring has no room counted as lost, and is a log that lost more than it has refused?
#[test]
fn accesses_without_room_are_counted_as_lost() {
    // A ring of 64 KiB has room for 2730 records.
    let pages = FreshPages::new(4_000);
    let trace = fault_tracer().start(own_tid(), 1).unwrap();
    let touched = pages.touch_all();
    let log = trace.finish().unwrap();
    let recorded = pages.touches_in(&log);
    assert_eq!(recorded, touched[..recorded.len()], "the first ones");
    assert!(
        recorded.len() > 2_000 && recorded.len() < 2_731,
        "{}",
        recorded.len()
    );
    assert!(
        log.lost_misses.unwrap() >= 4_000 - recorded.len() as u64,
        "{:?} of {}",
        log.lost_misses,
        recorded.len()
    );
}

/// Does a log end at its number of entries, at the limit of time, and when its thread exits?
#[test]
fn a_log_ends_by_entries_time_or_exit() {
    let tracer = fault_tracer();
    let (tid_sender, tid_receiver) = std::sync::mpsc::channel();
    let (started, is_over) = (Barrier::new(2), std::sync::atomic::AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            tid_sender.send(own_tid()).unwrap();
            started.wait();
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                FreshPages::new(100).touch_all();
            }
        });
        let tid = tid_receiver.recv().unwrap();
        started.wait();
        let log = tracer.record(tid, 500, Duration::from_secs(60)).unwrap();
        assert!(log.addresses.len() >= 500, "{}", log.addresses.len());
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    // This thread sleeps while it records itself, so the time ends the log.
    let log = tracer
        .record(own_tid(), u32::MAX, Duration::from_millis(5))
        .unwrap();
    assert!(log.addresses.len() < 10_000 && log.elapsed_ns >= 5_000_000);
    let thread = std::thread::spawn(move || {
        tid_sender.send(own_tid()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    });
    let exiting = tid_receiver.recv().unwrap();
    let start = Instant::now();
    drop(tracer.record(exiting, u32::MAX, Duration::from_secs(600)));
    assert!(
        start.elapsed() < Duration::from_secs(300),
        "the thread has exited"
    );
    thread.join().unwrap();
}

/// Is the missing prerequisite of a trace named: the processor's event, instructions, or misses that leave records?
#[test]
fn a_traces_missing_prerequisite_is_named() {
    let host = FakeHost::default();
    let survey = |event, absent_because: Option<EventUnavailable>| EventSurvey {
        event,
        name: "",
        code: Some(EventCode { kind: 0, config: 1 }),
        absence_reason: absent_because,
    };
    let misses = CounterEvent::Misses(CacheLevel::L3);
    let counting = [
        survey(CounterEvent::Instructions, None),
        survey(misses, None),
    ];
    assert!(
        find_tracer(&host, &counting)
            .unwrap_err()
            .contains("no event is known")
    );
    host.set_file(
        "/proc/cpuinfo",
        "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n",
    );
    assert!(find_tracer(&host, &counting).unwrap_err().contains("IBS"));
    host.set_file(
        "/proc/cpuinfo",
        "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\n",
    );
    let tracer = find_tracer(&host, &counting).unwrap();
    assert_eq!(
        (
            tracer.misses.config,
            tracer.last_level_misses.map(|(event, _)| event)
        ),
        (0x10d1, Some(misses))
    );
    let silent = [
        survey(CounterEvent::Instructions, Some(EventUnavailable::HardZero)),
        survey(misses, None),
    ];
    assert!(
        find_tracer(&host, &silent)
            .unwrap_err()
            .contains("instructions")
    );
    // Page faults are no misses: the must-miss loop faults a few hundred times and fetches 16 384 lines.
    let error = fault_tracer().check_usable().unwrap_err().to_string();
    assert!(error.contains("while 16384 were fetched"), "{error}");
}
