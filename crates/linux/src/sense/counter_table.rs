//! The counters of all managed threads, and what they may cost.
//!
//! Problem: at every switch to and from a thread, the kernel saves and sets the thread's counters. A service that waits
//! for requests ten thousand times a second loses a tenth of its speed because it is observed. Method: two threads of
//! ours that alternate with and without counters show what a switch costs. A thread whose switches would cost it more
//! than a hundredth of its time is counted in one span of each window, which is as short as that limit requires. Spans
//! begin in another part of each window, so that work whose rhythm is that of the windows is not always counted in the
//! same state. Properties: counts stay raw, with the share of the thread's processor time in which they were counted; a
//! thread that was not counted in a window has no counts, never zero. How long a new thread is counted in its first
//! window follows from its switches since its start.

use std::collections::BTreeMap;
use std::io::{Read, Write, pipe};
use std::time::{Duration, Instant};

use cachemate_core::{CpuId, EventCount};

use super::counters::{CounterReading, EventSurvey, ThreadCounters};
use super::probes::PinnedThread;
use crate::kernel::ThreadKey;

/// Maximum part of a thread's processor time that its counters cost.
const MAX_COST: f64 = 0.01;
/// Cost of a thread's counters, as a part of the window, below which they always count: opening and closing them would
/// cost as much.
const MIN_COST: f64 = 0.001;
/// What counters are taken to cost at a switch where it cannot be measured: an assumption on the high
/// side, so that a server that switches often is counted in spans rather than slowed down.
const UNMEASURED_SWITCH_COST_NS: f64 = 20_000.0;
/// Spans last a multiple of this part of a window, so that many of them begin and end together.
const SPAN_STEPS: f64 = 64.0;
/// Part of a window by which the spans of the next one are shifted: the golden ratio covers a window evenly.
const SPAN_SHIFT: f64 = 0.618_033_988_749_895;
/// Rounds with and without counters, and round trips in each. The fastest round is free of interruptions.
const ROUNDS: u32 = 5;
const TRIPS_PER_ROUND: u32 = 100;

/// The counters of all managed threads.
#[derive(Debug)]
pub(crate) struct CounterTable {
    event_surveys: Vec<EventSurvey>,
    /// Time that the counters add to a thread's switch from and back to a CPU.
    switch_cost_ns: f64,
    threads: BTreeMap<ThreadKey, CountingState>,
    /// Begin of the spans of this window: 0 is the earliest possible, 1 the latest.
    span_phase: f64,
    /// Whether descriptors have run out in this window.
    has_no_descriptors: bool,
}

#[derive(Debug)]
enum CountingState {
    /// Counted all the time.
    Always(ThreadCounters),
    /// Counted in a span of each window that lasts this share of it.
    InSpans { share: f64, span: Span },
}

#[derive(Debug)]
enum Span {
    Ahead,
    /// Counters, and the time since the beginning of the window at which the span is to end.
    Open(ThreadCounters, Duration),
    Over(Vec<CounterReading>),
}

/// Use of a CPU by a thread in a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuUse {
    pub(crate) switches: u64,
    pub(crate) ran_ns: u64,
}

impl CounterTable {
    /// A table without threads. Measures for some milliseconds what counters cost.
    pub(crate) fn new(event_surveys: Vec<EventSurvey>) -> Self {
        let has_events = event_surveys
            .iter()
            .any(|survey| survey.absence_reason.is_none());
        let switch_cost_ns = if has_events {
            measure_switch_cost(&event_surveys).unwrap_or(UNMEASURED_SWITCH_COST_NS)
        } else {
            0.0
        };
        CounterTable {
            event_surveys,
            switch_cost_ns,
            threads: BTreeMap::new(),
            span_phase: 0.0,
            has_no_descriptors: false,
        }
    }

    /// Counts a new thread from now on: all the time, unless its use of a CPU in the time before is known and shows
    /// that it switches often.
    pub(crate) fn insert(&mut self, thread: ThreadKey, earlier_use: Option<(CpuUse, Duration)>) {
        let share_after = |(cpu_use, time): (CpuUse, Duration)| {
            find_share(cpu_use, self.switch_cost_ns, time.as_nanos() as f64)
        };
        self.set_share(thread, earlier_use.map_or(1.0, share_after));
    }

    /// Counts a thread from now on in this share of each window. If it has exited or descriptors have run out, its
    /// counts are absent, never zero, and [`Self::read`] tries again.
    fn set_share(&mut self, thread: ThreadKey, share: f64) {
        let state = if share < 1.0 {
            Ok(CountingState::InSpans {
                share,
                span: Span::Ahead,
            })
        } else {
            ThreadCounters::attach(thread.tid, &self.event_surveys).map(CountingState::Always)
        };
        match state {
            Ok(state) => _ = self.threads.insert(thread, state),
            Err(error) => {
                self.threads.remove(&thread);
                self.has_no_descriptors |= error.raw_os_error() == Some(libc::EMFILE);
            }
        }
    }

    /// Begins and ends the spans that are due after this part of a window. If a probe with rows comes next, the other
    /// spans begin too, because it may last for the rest of the window. Returns the time until the next one is due.
    pub(crate) fn poll(
        &mut self,
        elapsed: Duration,
        window: Duration,
        is_row_next: bool,
    ) -> Duration {
        let mut next_wait = window;
        for (thread, state) in &mut self.threads {
            let CountingState::InSpans { share, span } = state else {
                continue;
            };
            let begin = window.mul_f64((1.0 - *share) * self.span_phase);
            if matches!(span, Span::Ahead) && (is_row_next || elapsed >= begin) {
                *span = match ThreadCounters::attach(thread.tid, &self.event_surveys) {
                    Ok(counters) => Span::Open(counters, elapsed + window.mul_f64(*share)),
                    Err(_) => Span::Over(Vec::new()),
                };
            }
            if let Span::Open(counters, end) = span
                && elapsed >= *end
            {
                *span = Span::Over(counters.read());
            }
            let due = match span {
                Span::Ahead => begin,
                Span::Open(_, end) => *end,
                Span::Over(_) => continue,
            };
            next_wait = next_wait.min(due.saturating_sub(elapsed));
        }
        next_wait
    }

    /// Counts of a thread in the window that ends now. Its use of a CPU there, if it is known, decides how long it is
    /// counted in the next one.
    pub(crate) fn read(
        &mut self,
        thread: ThreadKey,
        cpu_use: Option<CpuUse>,
        window: Duration,
    ) -> Vec<EventCount> {
        let Some(state) = self.threads.get_mut(&thread) else {
            // One failure for lack of descriptors is enough for a window, because thousands of threads may wait for
            // them.
            if !self.has_no_descriptors {
                self.insert(thread, cpu_use.zip(Some(window)));
            }
            return Vec::new();
        };
        let counts = match state {
            CountingState::Always(counters) => counters
                .read()
                .iter()
                .map(CounterReading::event_count)
                .collect(),
            CountingState::InSpans { span, .. } => {
                let readings = match std::mem::replace(span, Span::Ahead) {
                    Span::Ahead => Vec::new(),
                    Span::Open(mut counters, _) => counters.read(),
                    Span::Over(readings) => readings,
                };
                let count_in = |cpu_use: CpuUse| {
                    readings
                        .iter()
                        .map(move |it| it.event_count_in(cpu_use.ran_ns))
                        .collect()
                };
                cpu_use.map(count_in).unwrap_or_default()
            }
        };
        if let Some(cpu_use) = cpu_use {
            let share = find_share(cpu_use, self.switch_cost_ns, window.as_nanos() as f64);
            if share < 1.0 || matches!(state, CountingState::InSpans { .. }) {
                self.set_share(thread, share);
            }
        }
        counts
    }

    /// Closes all counters.
    pub(crate) fn clear(&mut self) {
        self.threads.clear();
    }

    /// Forgets all threads but these, and moves the spans within the next window.
    pub(crate) fn begin_window(&mut self, is_known: impl Fn(&ThreadKey) -> bool) {
        self.threads.retain(|thread, _| is_known(thread));
        self.span_phase = (self.span_phase + SPAN_SHIFT).fract();
        self.has_no_descriptors = false;
    }
}

/// The share of a window in which a thread may be counted.
fn find_share(cpu_use: CpuUse, switch_cost_ns: f64, window_ns: f64) -> f64 {
    let cost_ns = cpu_use.switches as f64 * switch_cost_ns;
    let max_cost_ns = (MAX_COST * cpu_use.ran_ns as f64).max(MIN_COST * window_ns);
    if cost_ns <= max_cost_ns {
        1.0
    } else {
        (SPAN_STEPS * max_cost_ns / cost_ns).floor().max(1.0) / SPAN_STEPS
    }
}

/// Nanoseconds that the counters of a thread add to a switch from and back to a CPU; `None` if it cannot be measured.
fn measure_switch_cost(event_surveys: &[EventSurvey]) -> Option<f64> {
    let mut fastest_trips = [f64::INFINITY; 2];
    for _ in 0..ROUNDS {
        for (fastest, surveys) in fastest_trips.iter_mut().zip([event_surveys, &[]]) {
            *fastest = fastest.min(alternate(surveys)?);
        }
    }
    let [counted_ns, uncounted_ns] = fastest_trips;
    // In a trip, each of two threads leaves the CPU once and comes back.
    Some((counted_ns - uncounted_ns).max(0.0) / 2.0)
}

/// Nanoseconds of a round trip between two threads on one CPU, both with counters of these events.
fn alternate(event_surveys: &[EventSurvey]) -> Option<f64> {
    let cpu = CpuId(rustix::thread::sched_getcpu() as u32);
    let (mut request_reader, mut request_writer) = pipe().ok()?;
    let (mut reply_reader, mut reply_writer) = pipe().ok()?;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _pinned = PinnedThread::new(cpu).ok()?;
            let _counters = ThreadCounters::attach(0, event_surveys).ok()?;
            let mut byte = [0];
            while request_reader.read_exact(&mut byte).is_ok() {
                reply_writer.write_all(&byte).ok()?;
            }
            Some(())
        });
        let requests = scope.spawn(move || {
            let _pinned = PinnedThread::new(cpu).ok()?;
            let _counters = ThreadCounters::attach(0, event_surveys).ok()?;
            let mut run_trip = || {
                request_writer.write_all(&[0]).ok()?;
                reply_reader.read_exact(&mut [0]).ok()
            };
            run_trip()?; // the partner has its counters then
            let start = Instant::now();
            for _ in 0..TRIPS_PER_ROUND {
                run_trip()?;
            }
            Some(start.elapsed().as_nanos() as f64 / f64::from(TRIPS_PER_ROUND))
        });
        requests.join().ok()?
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use cachemate_core::CounterEvent;

    use super::*;
    use crate::sense::events::EventCode;
    use crate::sense::thread_counts::read_schedstat;

    const WINDOW: Duration = Duration::from_millis(400);
    /// A software event (the thread's processor time in nanoseconds), which every host counts.
    const TASK_CLOCK: EventCode = EventCode { kind: 1, config: 1 };

    fn clock_survey() -> Vec<EventSurvey> {
        let (event, name) = (CounterEvent::Cycles, "task-clock");
        vec![EventSurvey {
            event,
            name,
            code: Some(TASK_CLOCK),
            absence_reason: None,
        }]
    }

    /// Is a thread counted all the time unless its counters cost it more than the limit, and then within the limit?
    #[test]
    fn spans_keep_the_cost_of_counters_within_the_limit() {
        let window_ns = 500e6;
        let share = |switches, ran_ns| find_share(CpuUse { switches, ran_ns }, 4_000.0, window_ns);
        assert_eq!(
            share(100, 1_000),
            1.0,
            "it hardly runs, so that its counters cost less than a thousandth of the window"
        );
        assert_eq!(share(1_000, 450_000_000), 1.0, "4 ms of 450");
        for switches in [2_000, 5_000, 20_000] {
            let cost_ns = share(switches, 200_000_000) * switches as f64 * 4_000.0;
            assert!(
                (1e6..=2e6).contains(&cost_ns),
                "{switches} switches: {cost_ns} ns, expected up to 2 ms"
            );
        }
        assert_eq!(
            share(1_000_000, 200_000_000),
            1.0 / SPAN_STEPS,
            "the shortest span"
        );
    }

    /// Is a thread that switches often counted in one span of each window only, and is its count in proportion to its
    /// whole processor time when scaled by its share?
    #[test]
    fn a_span_gives_the_counts_of_the_window() {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let is_over = &is_over;
            scope.spawn(move || {
                sender
                    .send(rustix::thread::gettid().as_raw_nonzero().get())
                    .unwrap();
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let thread = ThreadKey {
                tid: receiver.recv().unwrap(),
                start_ticks: 0,
            };
            let host = crate::kernel::LinuxHost::new("/");
            let ran_ns = || {
                read_schedstat(&host, std::process::id() as i32, thread.tid)
                    .0
                    .unwrap()
            };
            let mut table = CounterTable {
                switch_cost_ns: 4_000.0,
                ..CounterTable::new(clock_survey())
            };
            let many_switches = CpuUse {
                switches: 1_600,
                ran_ns: 160_000_000,
            };
            table.insert(thread, Some((many_switches, WINDOW)));
            assert!(
                table.read(thread, None, WINDOW).is_empty(),
                "its earlier switches are known"
            );
            table.insert(thread, None);
            assert_eq!(
                table.read(thread, Some(many_switches), WINDOW).len(),
                1,
                "a new thread is counted"
            );
            table.begin_window(|_| true);
            assert!(
                table.read(thread, None, WINDOW).is_empty(),
                "no span has begun"
            );
            let (ran_before, start) = (ran_ns(), Instant::now());
            let mut open_ns = 0;
            while start.elapsed() < WINDOW {
                let since = start.elapsed();
                let wait = table.poll(since, WINDOW, false).min(WINDOW - since);
                let is_open = matches!(
                    table.threads[&thread],
                    CountingState::InSpans {
                        span: Span::Open(..),
                        ..
                    }
                );
                std::thread::sleep(wait);
                open_ns += if is_open { wait.as_nanos() as u64 } else { 0 };
            }
            let ran_ns = ran_ns() - ran_before;
            let counts = table.read(
                thread,
                Some(CpuUse {
                    switches: 0,
                    ran_ns,
                }),
                WINDOW,
            );
            let max_open_ns = WINDOW.as_nanos() as u64 / 4;
            assert!(
                (1..=max_open_ns).contains(&open_ns),
                "{open_ns} ns, expected a quarter of the window at most"
            );
            let [count] = counts[..] else {
                panic!("found {counts:?}, expected one count")
            };
            assert!(
                (count.count as f64) < 0.5 * ran_ns as f64,
                "{count:?} of {ran_ns} ns"
            );
            let ratio = count.count as f64 / count.enabled_share / ran_ns as f64;
            assert!((0.95..1.05).contains(&ratio), "{count:?} of {ran_ns} ns");
            assert!(
                matches!(table.threads[&thread], CountingState::Always(_)),
                "it no longer switches"
            );
            table.read(thread, Some(many_switches), WINDOW);
            table.poll(Duration::ZERO, WINDOW, true);
            assert_eq!(
                table.read(thread, Some(many_switches), WINDOW).len(),
                1,
                "a probe lasted for the rest of the window"
            );
            is_over.store(true, Ordering::Relaxed);
        });
    }

    /// Is a thread whose counters could not be opened counted as soon as they can be?
    #[test]
    fn a_thread_without_counters_gets_them_later() {
        let thread = ThreadKey {
            tid: rustix::thread::gettid().as_raw_nonzero().get(),
            start_ticks: 0,
        };
        let mut no_such_event = clock_survey();
        no_such_event[0].code = Some(EventCode {
            kind: 0x7fff_ffff,
            config: 0,
        });
        let mut table = CounterTable::new(no_such_event);
        table.insert(thread, None);
        assert!(table.read(thread, None, WINDOW).is_empty());
        table.event_surveys = clock_survey();
        table.has_no_descriptors = true;
        assert!(table.read(thread, None, WINDOW).is_empty());
        assert!(
            table.threads.is_empty(),
            "it waits for the next window if descriptors have run out"
        );
        table.begin_window(|_| true);
        assert!(
            table.read(thread, None, WINDOW).is_empty(),
            "counted from now"
        );
        assert_eq!(table.read(thread, None, WINDOW).len(), 1);
    }

    /// Does measuring what counters cost end with a finite figure of at most a millisecond?
    #[test]
    fn the_cost_of_a_switch_is_measured() {
        let cost_ns = measure_switch_cost(&clock_survey()).unwrap();
        assert!((0.0..1e6).contains(&cost_ns), "{cost_ns} ns");
    }
}
