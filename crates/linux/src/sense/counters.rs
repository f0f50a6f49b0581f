//! Performance counters per thread, through `perf_event_open(2)`.
//!
//! Problem: many virtual machines expose no PMU, some expose one whose counters read a hard zero, and reading counters
//! at every context switch costs a third of the machine. Method: [`survey`] opens each event on the calling thread and
//! runs a loop that must miss; an event that cannot be opened, or does not count the loop's misses, is absent, with the
//! reason. Counters are attached to a managed thread for as long as [`super::counter_table`] allows. Events are opened
//! individually and not as a group, so that the kernel may multiplex them; the share of time in which each one counted
//! is reported with the raw count.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use cachemate_core::{CacheLevel, CounterEvent, EventCount};
use perf_event_open_sys as perf;

use crate::kernel::Kernel;
use crate::sense::events::{EventCode, Processor, events_for, open_event};
pub use crate::sense::events::{EventSurvey, EventUnavailable};

/// Minimum share of the must-miss loop's lines that must be counted as missed. An event that counts fewer counts
/// something else.
const MIN_MISSES: f64 = 0.25;

/// Tests every event of this host's processor by the open call and the must-miss loop.
pub fn survey(kernel: &dyn Kernel, last_level: CacheLevel) -> Vec<EventSurvey> {
    let cpuinfo = kernel.read(Path::new("/proc/cpuinfo")).unwrap_or_default();
    let events = events_for(Processor::parse(&cpuinfo).as_ref(), last_level);
    let survey_event = |named_event: EventSurvey| match named_event.code {
        Some(code) => EventSurvey {
            absence_reason: check_event(named_event.event, code),
            ..named_event
        },
        None => named_event,
    };
    events.into_iter().map(survey_event).collect()
}

/// The reason why the event does not count; `None` if it counts.
fn check_event(event: CounterEvent, code: EventCode) -> Option<EventUnavailable> {
    let mut counter = match open_counter(code, 0) {
        Ok(counter) => counter,
        Err(error) => {
            return Some(match error.raw_os_error() {
                Some(libc::ENOENT) | Some(libc::EOPNOTSUPP) => EventUnavailable::NotOffered,
                Some(libc::EACCES) | Some(libc::EPERM) => EventUnavailable::NotPermitted,
                _ => EventUnavailable::Refused(error.to_string()),
            });
        }
    };
    let fetched_lines = run_missing_loop();
    match counter.read_since_last() {
        Err(error) => Some(EventUnavailable::Refused(error.to_string())),
        Ok(total) => find_implausibility(event, total.count, total.counted_share(), fetched_lines),
    }
}

/// The reason why a count is implausible for a loop that fetched `fetched` lines from memory.
fn find_implausibility(
    event: CounterEvent,
    count: u64,
    counted_share: f64,
    fetched: u64,
) -> Option<EventUnavailable> {
    if counted_share == 0.0 {
        return Some(EventUnavailable::NeverScheduled);
    }
    // No other CPU has the loop's lines, so none of them comes from a remote cache.
    let is_remote = event == CounterEvent::RemoteCacheHits;
    if count == 0 {
        return (!is_remote).then_some(EventUnavailable::HardZero);
    }
    let scaled = count as f64 / counted_share;
    let has_enough_misses = scaled >= MIN_MISSES * fetched as f64;
    ((is_remote && has_enough_misses)
        || (matches!(event, CounterEvent::Misses(_)) && !has_enough_misses))
        .then(|| EventUnavailable::WrongEvent {
            scaled: scaled.round() as u64,
            fetched,
        })
}

/// Runs a loop that misses in every cache: it loads 16 384 flushed lines one after the other, in an order that no
/// prefetcher follows. Returns the number of fetched lines.
pub(crate) fn run_missing_loop() -> u64 {
    const LINES: usize = 1 << 14;
    /// Odd, so that every line is visited once; about five pages, beyond a stride prefetcher's reach.
    const STRIDE: usize = 5 * 64 + 21;
    let memory = vec![1u64; 8 * LINES];
    #[cfg(target_arch = "x86_64")]
    for line in memory.chunks(8) {
        // SAFETY: flushing a line of a vector that we hold changes no content.
        unsafe { core::arch::x86_64::_mm_clflush(line.as_ptr().cast()) };
    }
    let (mut position, mut sum) = (0usize, 0u64);
    for _ in 0..LINES {
        sum = sum.wrapping_add(std::hint::black_box(memory[8 * position]));
        // Always adds zero; the next load waits for this one.
        position = (position + STRIDE + (sum >> 32) as usize) % LINES;
    }
    std::hint::black_box(sum);
    LINES as u64
}

/// The counters of one thread.
#[derive(Debug)]
pub struct ThreadCounters {
    counters: Vec<(CounterEvent, PerfCounter)>,
}

impl ThreadCounters {
    /// Attaches the events that the survey found to `tid`.
    ///
    /// # Errors
    /// The thread has exited, or permission or file descriptors are lacking; no event stays attached then.
    pub fn attach(tid: i32, event_surveys: &[EventSurvey]) -> io::Result<Self> {
        let working_surveys = event_surveys
            .iter()
            .filter(|survey| survey.absence_reason.is_none());
        let working_codes = working_surveys.filter_map(|survey| Some((survey.event, survey.code?)));
        let counters = working_codes
            .map(|(event, code)| Ok((event, open_counter(code, tid)?)))
            .collect::<io::Result<_>>()?;
        Ok(ThreadCounters { counters })
    }

    /// Counts since the last reading (or since attaching), by event. A counter that fails is left out.
    pub fn read(&mut self) -> Vec<CounterReading> {
        let read_counter = |(event, counter): &mut (CounterEvent, PerfCounter)| {
            Some(CounterReading {
                event: *event,
                total: counter.read_since_last().ok()?,
            })
        };
        let mut readings: Vec<CounterReading> =
            self.counters.iter_mut().filter_map(read_counter).collect();
        readings.sort_by_key(|reading| reading.event);
        readings
    }
}

/// One counter of a thread between two readings.
#[derive(Clone, Copy, Debug)]
pub struct CounterReading {
    /// The counted event.
    pub event: CounterEvent,
    total: PerfReading,
}

impl CounterReading {
    /// The count of a counter that was attached all the time.
    pub fn event_count(&self) -> EventCount {
        EventCount {
            event: self.event,
            count: self.total.count,
            enabled_share: self.total.counted_share(),
        }
    }

    /// The count of a counter that was attached for some of the time in which the thread ran for `ran_ns`.
    pub fn event_count_in(&self, ran_ns: u64) -> EventCount {
        let enabled_share = if ran_ns == 0 {
            0.0
        } else {
            (self.total.running_ns as f64 / ran_ns as f64).min(1.0)
        };
        EventCount {
            event: self.event,
            count: self.total.count,
            enabled_share,
        }
    }
}

/// The code of an event, if the survey found that it counts.
pub(crate) fn working_event(
    event_surveys: &[EventSurvey],
    event: CounterEvent,
) -> Option<EventCode> {
    event_surveys
        .iter()
        .find(|survey| survey.event == event && survey.absence_reason.is_none())?
        .code
}

/// A running total of one event of one thread.
pub(crate) struct RunningTotal(PerfCounter);

impl RunningTotal {
    /// Starts counting; `None` if the thread has exited, or the event cannot be opened for it.
    pub(crate) fn start(tid: i32, code: EventCode) -> Option<Self> {
        open_counter(code, tid).ok().map(RunningTotal)
    }

    /// The count so far, scaled by the share of the time in which it had a counter; `None` if it has had none yet.
    pub(crate) fn read_value(&mut self) -> Option<u64> {
        let total = self.0.read_total().ok()?;
        match total.enabled_ns {
            0 => Some(0), // the thread has not run yet
            enabled_ns if total.running_ns > 0 => Some(
                (u128::from(total.count) * u128::from(enabled_ns) / u128::from(total.running_ns))
                    as u64,
            ),
            _ => None,
        }
    }
}

#[derive(Debug)]
struct PerfCounter {
    file: File,
    last_reading: PerfReading,
}

#[derive(Clone, Copy, Debug, Default)]
struct PerfReading {
    count: u64,
    enabled_ns: u64,
    running_ns: u64,
}

impl PerfReading {
    /// The share of the enabled time in which the event was counted. It is 1 if the thread did not run at all, because
    /// its count of zero is correct.
    fn counted_share(&self) -> f64 {
        if self.enabled_ns == 0 {
            1.0
        } else {
            (self.running_ns as f64 / self.enabled_ns as f64).min(1.0)
        }
    }
}

impl PerfCounter {
    fn read_total(&mut self) -> io::Result<PerfReading> {
        let mut bytes = [0u8; 24];
        self.file.read_exact(&mut bytes)?;
        let u64_at = |index: usize| {
            u64::from_ne_bytes(
                bytes[8 * index..8 * index + 8]
                    .try_into()
                    .expect("eight bytes"),
            )
        };
        Ok(PerfReading {
            count: u64_at(0),
            enabled_ns: u64_at(1),
            running_ns: u64_at(2),
        })
    }

    /// Count and times since the last call.
    fn read_since_last(&mut self) -> io::Result<PerfReading> {
        let reading = self.read_total()?;
        let previous_reading = std::mem::replace(&mut self.last_reading, reading);
        Ok(PerfReading {
            count: reading.count.saturating_sub(previous_reading.count),
            enabled_ns: reading
                .enabled_ns
                .saturating_sub(previous_reading.enabled_ns),
            running_ns: reading
                .running_ns
                .saturating_sub(previous_reading.running_ns),
        })
    }
}

fn open_counter(code: EventCode, tid: i32) -> io::Result<PerfCounter> {
    let mut attr = perf::bindings::perf_event_attr::default();
    attr.type_ = code.kind;
    attr.config = code.config;
    attr.read_format = u64::from(
        perf::bindings::PERF_FORMAT_TOTAL_TIME_ENABLED
            | perf::bindings::PERF_FORMAT_TOTAL_TIME_RUNNING,
    );
    attr.set_exclude_hv(1);
    let file = open_event(attr, (tid, -1), None)?;
    if crate::kernel::is_descriptor_scarce(&file) {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok(PerfCounter {
        file,
        last_reading: PerfReading::default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does every event either count or have a reason, and does attaching use only those that count?
    #[test]
    fn every_event_counts_or_has_a_reason() {
        let surveyed = survey(&crate::kernel::LinuxHost::new("/"), CacheLevel::L3);
        assert_eq!(surveyed.len(), 6);
        assert!(surveyed.iter().all(|s| {
            s.absence_reason
                .as_ref()
                .is_none_or(|why| !why.to_string().is_empty())
        }));
        assert!(
            surveyed
                .iter()
                .all(|s| s.code.is_some() || s.absence_reason.is_some())
        );
        let mut counters = ThreadCounters::attach(0, &surveyed).unwrap();
        run_missing_loop();
        let readings: Vec<EventCount> = counters
            .read()
            .iter()
            .map(CounterReading::event_count)
            .collect();
        let working = surveyed
            .iter()
            .filter(|s| s.absence_reason.is_none())
            .count();
        assert_eq!(readings.len(), working);
        assert!(readings.is_sorted_by_key(|reading| reading.event));
        assert!(readings.iter().all(|r| r.enabled_share == 0.0
            || r.event != CounterEvent::Instructions
            || r.count > 0));
    }

    /// Are a hard zero and a miss event that counts almost no fetched line rejected, and multiplexed counts scaled?
    #[test]
    fn hard_zeros_and_undercounting_miss_events_are_rejected() {
        let misses = CounterEvent::Misses(CacheLevel::L3);
        assert!(find_implausibility(misses, 0, 1.0, 16_384) == Some(EventUnavailable::HardZero));
        assert!(
            find_implausibility(misses, 300, 1.0, 16_384)
                .unwrap()
                .to_string()
                .starts_with("it read 300 while 16384 lines")
        );
        assert!(
            find_implausibility(misses, 300, 0.0, 16_384) == Some(EventUnavailable::NeverScheduled)
        );
        assert_eq!(find_implausibility(misses, 16_000, 1.0, 16_384), None);
        assert_eq!(
            find_implausibility(misses, 3_000, 0.25, 16_384),
            None,
            "a quarter of the time, and so scaled"
        );
        assert_eq!(
            find_implausibility(CounterEvent::References(CacheLevel::L3), 300, 1.0, 16_384),
            None
        );
        let remote = |count| find_implausibility(CounterEvent::RemoteCacheHits, count, 1.0, 16_384);
        assert_eq!(
            (remote(0), remote(300)),
            (None, None),
            "no other CPU holds a line of the loop"
        );
        assert!(remote(16_000).is_some(), "it counts every miss");
    }

    /// Does a running total grow with the executed work, and is an event that the survey found absent never opened?
    #[test]
    fn a_running_total_grows_with_the_work() {
        let surveyed = survey(&crate::kernel::LinuxHost::new("/"), CacheLevel::L3);
        let instructions = surveyed
            .iter()
            .find(|found| found.event == CounterEvent::Instructions)
            .unwrap();
        let Some(code) = working_event(&surveyed, CounterEvent::Instructions) else {
            assert!(instructions.absence_reason.is_some());
            eprintln!(
                "not shown here: a running total, as instructions are not counted on this host"
            );
            return;
        };
        let mut total = RunningTotal::start(0, code).unwrap();
        let before = total.read_value().unwrap();
        let loads = run_missing_loop();
        assert!(total.read_value().unwrap() >= before + loads);
    }

    /// Is a counter of a thread that does not exist an error?
    #[test]
    fn counting_a_thread_that_does_not_exist_is_an_error() {
        let all: Vec<EventSurvey> = events_for(None, CacheLevel::L3)
            .into_iter()
            .map(|named| EventSurvey {
                event: named.event,
                name: named.name,
                code: named.code,
                absence_reason: None,
            })
            .collect();
        assert!(ThreadCounters::attach(i32::MAX, &all).is_err());
    }
}
