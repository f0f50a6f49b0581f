//! Performance counters per thread, through `perf_event_open(2)`.
//!
//! Problem: many virtual machines expose no PMU, some expose one whose counters read a hard zero, and reading counters
//! at every context switch costs a third of the machine. Method: [`survey`] opens each event on this very thread and
//! runs a loop that must miss; an event that cannot be opened, or stays at zero where it cannot, is absent, with the
//! reason. Counters are attached to each managed thread once and read once per window. Events are opened one by one
//! and not as a group, so that the kernel may multiplex them; the share of time each one counted goes out with the
//! raw count.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::FromRawFd;

use cachemate_core::{Event, Level, Reading, StallCause};
use perf_event_open_sys as perf;

/// An event we know to ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Known {
    event: Event,
    name: &'static str,
    kind: u32,
    config: u64,
}

fn known(last_level: Level) -> Vec<Known> {
    let hardware = |event, name, config| Known { event, name, kind: perf::bindings::PERF_TYPE_HARDWARE, config };
    vec![
        hardware(Event::Instructions, "instructions", u64::from(perf::bindings::PERF_COUNT_HW_INSTRUCTIONS)),
        hardware(Event::Cycles, "cycles", u64::from(perf::bindings::PERF_COUNT_HW_CPU_CYCLES)),
        hardware(
            Event::References(last_level),
            "cache-references",
            u64::from(perf::bindings::PERF_COUNT_HW_CACHE_REFERENCES),
        ),
        hardware(Event::Misses(last_level), "cache-misses", u64::from(perf::bindings::PERF_COUNT_HW_CACHE_MISSES)),
        hardware(
            Event::StallCycles(StallCause::LocalMemory),
            "stalled-cycles-backend",
            u64::from(perf::bindings::PERF_COUNT_HW_STALLED_CYCLES_BACKEND),
        ),
    ]
}

/// Whether an event counts on this host, or why not.
#[derive(Clone, PartialEq, Debug)]
pub struct Surveyed {
    pub event: Event,
    /// The kernel's name of it.
    pub name: &'static str,
    pub absent_because: Option<String>,
}

/// What the open call and the must-miss loop say of every event.
pub fn survey(last_level: Level) -> Vec<Surveyed> {
    let say = |known: Known| {
        let absent_because = match open(known, 0) {
            Err(error) => Some(match error.raw_os_error() {
                Some(libc::ENOENT) | Some(libc::EOPNOTSUPP) => "the processor or hypervisor does not offer it".into(),
                Some(libc::EACCES) | Some(libc::EPERM) => {
                    "not permitted (kernel.perf_event_paranoid, or CAP_PERFMON)".to_string()
                }
                _ => error.to_string(),
            }),
            Ok(mut counter) => {
                must_miss();
                match counter.total() {
                    Ok(Total { count: 0, .. }) => Some("it read a hard zero in a loop that must count".to_string()),
                    Ok(_) => None,
                    Err(error) => Some(error.to_string()),
                }
            }
        };
        Surveyed { event: known.event, name: known.name, absent_because }
    };
    known(last_level).into_iter().map(say).collect()
}

/// Executes, touches memory and misses in every cache there is: 16 384 lines, flushed before each load.
fn must_miss() {
    let memory = vec![1u64; 8 << 14];
    let mut sum = 0u64;
    for at in (0..memory.len()).step_by(8) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: flushing a line of a vector that we hold changes no content.
        unsafe {
            core::arch::x86_64::_mm_clflush(std::ptr::from_ref(&memory[at]).cast());
        }
        sum = sum.wrapping_add(std::hint::black_box(memory[at]));
    }
    std::hint::black_box(sum);
}

/// The counters of one thread.
#[derive(Debug)]
pub struct ThreadCounters {
    counters: Vec<(Event, Counter)>,
}

impl ThreadCounters {
    /// Attaches the events that the survey found to `tid`.
    ///
    /// # Errors
    /// The thread is gone, or permission or file descriptors are lacking; nothing stays attached then.
    pub fn attach(tid: i32, last_level: Level, surveyed: &[Surveyed]) -> io::Result<Self> {
        let works = |event| surveyed.iter().any(|s| s.event == event && s.absent_because.is_none());
        let wanted = known(last_level).into_iter().filter(|known| works(known.event));
        let counters = wanted.map(|known| Ok((known.event, open(known, tid)?))).collect::<io::Result<_>>()?;
        Ok(ThreadCounters { counters })
    }

    /// What was counted since the last reading (or since attaching). A counter that fails is left out.
    pub fn read(&mut self) -> Vec<Reading> {
        let reading = |(event, counter): &mut (Event, Counter)| {
            let (count, counted_share) = counter.since_last().ok()?;
            Some(Reading { event: *event, count, counted_share })
        };
        let mut readings: Vec<Reading> = self.counters.iter_mut().filter_map(reading).collect();
        readings.sort_by_key(|reading| reading.event);
        readings
    }
}

#[derive(Debug)]
struct Counter {
    file: File,
    last: Total,
}

#[derive(Clone, Copy, Debug, Default)]
struct Total {
    count: u64,
    enabled_ns: u64,
    running_ns: u64,
}

impl Counter {
    fn total(&mut self) -> io::Result<Total> {
        let mut bytes = [0u8; 24];
        self.file.read_exact(&mut bytes)?;
        let word = |at: usize| u64::from_ne_bytes(bytes[8 * at..8 * at + 8].try_into().expect("eight bytes"));
        Ok(Total { count: word(0), enabled_ns: word(1), running_ns: word(2) })
    }

    /// Count, and the share of the enabled time in which it counted. A thread that did not run at all was counted
    /// all the time: its zero is a true one.
    fn since_last(&mut self) -> io::Result<(u64, f64)> {
        let now = self.total()?;
        let last = std::mem::replace(&mut self.last, now);
        let enabled = now.enabled_ns.saturating_sub(last.enabled_ns);
        let running = now.running_ns.saturating_sub(last.running_ns);
        let share = if enabled == 0 { 1.0 } else { running as f64 / enabled as f64 };
        Ok((now.count.saturating_sub(last.count), share.min(1.0)))
    }
}

fn open(known: Known, tid: i32) -> io::Result<Counter> {
    let mut attr = perf::bindings::perf_event_attr::default();
    attr.type_ = known.kind;
    attr.size = size_of::<perf::bindings::perf_event_attr>() as u32;
    attr.config = known.config;
    attr.read_format =
        u64::from(perf::bindings::PERF_FORMAT_TOTAL_TIME_ENABLED | perf::bindings::PERF_FORMAT_TOTAL_TIME_RUNNING);
    attr.set_exclude_hv(1);
    // SAFETY: `attr` is a whole, zero-extended perf_event_attr of the stated size; the call returns a descriptor.
    let fd =
        unsafe { perf::perf_event_open(&raw mut attr, tid, -1, -1, u64::from(perf::bindings::PERF_FLAG_FD_CLOEXEC)) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours alone.
    let file = unsafe { File::from_raw_fd(fd) };
    Ok(Counter { file, last: Total::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does every event either count or come with a reason, and does attaching use only those that count?
    #[test]
    fn every_event_counts_or_says_why_not() {
        let surveyed = survey(Level::L3);
        assert_eq!(surveyed.len(), 5);
        assert!(surveyed.iter().all(|s| s.absent_because.as_ref().is_none_or(|why| !why.is_empty())));
        let mut counters = ThreadCounters::attach(0, Level::L3, &surveyed).unwrap();
        must_miss();
        let readings = counters.read();
        let working = surveyed.iter().filter(|s| s.absent_because.is_none()).count();
        assert_eq!(readings.len(), working);
        assert!(readings.is_sorted_by_key(|reading| reading.event));
        assert!(readings.iter().all(|r| r.counted_share == 0.0 || r.event != Event::Instructions || r.count > 0));
    }

    /// Is a counter of a thread that does not exist an error?
    #[test]
    fn a_thread_that_is_gone_cannot_be_counted() {
        let all: Vec<Surveyed> = known(Level::L3)
            .iter()
            .map(|known| Surveyed { event: known.event, name: known.name, absent_because: None })
            .collect();
        assert!(ThreadCounters::attach(i32::MAX, Level::L3, &all).is_err());
    }
}
