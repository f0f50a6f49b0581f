//! Traces of a thread: the addresses of consecutive loads that missed the L2, for RapidMRC (thesis ch. 5).
//!
//! Problem: RapidMRC needs the address of every miss for a short time, and the register from which the thesis read them
//! exists on the POWER5 only. Method: Intel's processors record a retired load that missed the L2 by themselves (PEBS),
//! with its address. One event per thread with a period of 1 records each of them. A record has no time, so the
//! processor fills a buffer, and the kernel copies it to a ring at one interrupt for hundreds of records. Counters in
//! the group of this event start and stop with it: instructions, misses of the last level, and the traced event itself
//! without records. Properties: no thread is stopped or moved; entries, memory and time are bounded; a miss that was
//! counted and is not in the log is lost, and is reported as such. Stores and instruction fetches are not recorded.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use cachemate_core::{CounterEvent, EventCounts};
use perf_event_open_sys as perf;

use crate::kernel::Kernel;
use crate::sense::counters::{EventSurvey, run_missing_loop, working_event};
use crate::sense::events::{EventCode, Processor, open_event, traced_misses};
use crate::sense::sampling::records::{
    TRACE_FIELDS, TRACE_RECORD_BYTES, TraceContents, parse_trace,
};
use crate::sense::sampling::ring::SampleRing;

/// Maximum length of a trace. At the cost of a record, it is enough for ten entries per line of an L3 of 16 MiB, the
/// thesis's length of a log (5.6.1); a program that fills its log more slowly has few misses.
pub(crate) const MAX_TRACE_TIME: Duration = Duration::from_secs(1);
/// Time for which a record delays its thread: 200 to 300 ns (doi 10.1145/3095770.3095773).
pub(crate) const RECORD_COST_NS: u64 = 250;
/// Time between two reads of the ring.
const READ_INTERVAL: Duration = Duration::from_millis(1);
/// Limits of a ring; between them, it holds the whole log. A user without privileges may lock the smaller one.
const MAX_RING_BYTES: usize = 16 << 20;
const MIN_RING_BYTES: usize = 64 << 10;
/// Minimum share of the must-miss loop's lines that a trace must contain.
const MIN_TRACED_SHARE: f64 = 0.25;

/// The events that trace a thread on this host.
#[derive(Clone, Debug)]
pub(crate) struct MissTracer {
    /// The vendor's name of the traced event.
    pub(crate) name: &'static str,
    misses: EventCode,
    instructions: EventCode,
    last_level_misses: Option<(CounterEvent, EventCode)>,
    /// Allowed skid; 2 = none, which makes the event a PEBS event.
    precise_ip: u64,
}

/// The log of one thread.
#[derive(Debug)]
pub(crate) struct MissTraceLog {
    /// Addresses in the order of the loads.
    pub(crate) addresses: Vec<u64>,
    /// Misses that were counted and not recorded; `None` if they could not be counted.
    pub(crate) lost_misses: Option<u64>,
    /// Counts over the log.
    pub(crate) counts: EventCounts,
    pub(crate) elapsed_ns: u64,
}

/// Finds the events that trace a thread. `event_surveys` contains the counters that were tested.
///
/// # Errors
/// The processor records no misses, or instructions are not counted.
pub(crate) fn find_tracer(
    kernel: &dyn Kernel,
    event_surveys: &[EventSurvey],
) -> Result<MissTracer, String> {
    let cpuinfo = kernel.read(Path::new("/proc/cpuinfo")).unwrap_or_default();
    let (name, misses) = traced_misses(Processor::parse(&cpuinfo).as_ref())?;
    let instructions = working_event(event_surveys, CounterEvent::Instructions)
        .ok_or("instructions are not counted, so a trace gives no rate of misses")?;
    let last_level_misses = event_surveys.iter().find_map(|survey| match survey.event {
        CounterEvent::Misses(_) => {
            Some((survey.event, working_event(event_surveys, survey.event)?))
        }
        _ => None,
    });
    Ok(MissTracer {
        name,
        misses,
        instructions,
        last_level_misses,
        precise_ip: 2,
    })
}

impl MissTracer {
    /// Records at least `entries` misses of a thread, or fewer if it exits or the time is over.
    ///
    /// # Errors
    /// The kernel opens no event or gives it no counter, or more misses were lost than recorded.
    pub(crate) fn record(
        &self,
        tid: i32,
        entries: u32,
        max_time: Duration,
    ) -> io::Result<MissTraceLog> {
        let mut trace = self.start(tid, entries as usize * TRACE_RECORD_BYTES)?;
        while trace.contents.addresses.len() < entries as usize
            && trace.start_time.elapsed() < max_time
            && trace.wait_for_records()
        {
            trace.drain();
        }
        let log = trace.finish()?;
        let (recorded, lost) = (log.addresses.len() as u64, log.lost_misses.unwrap_or(0));
        if lost > recorded {
            let total = recorded + lost;
            return Err(io::Error::other(format!(
                "{}: only {recorded} of {total} misses were recorded",
                self.name
            )));
        }
        Ok(log)
    }

    /// Tests the events on this thread, in a loop that must miss. Returns the number of its lines that were recorded,
    /// and the number of all.
    ///
    /// # Errors
    /// The kernel opens no event, or too few lines were recorded with their addresses.
    pub(crate) fn check_usable(&self) -> io::Result<(u64, u64)> {
        let own_tid = rustix::thread::gettid().as_raw_nonzero().get();
        let trace = self.start(own_tid, 1 << 20)?;
        let fetched_lines = run_missing_loop();
        let mut lines: Vec<u64> = trace
            .finish()?
            .addresses
            .iter()
            .map(|address| address / 64)
            .collect();
        lines.sort_unstable();
        lines.dedup();
        let recorded_lines = lines.len() as u64;
        if (recorded_lines as f64) < MIN_TRACED_SHARE * fetched_lines as f64 {
            let message = format!(
                "{recorded_lines} lines were recorded while {fetched_lines} were fetched from memory"
            );
            return Err(io::Error::other(message));
        }
        Ok((recorded_lines, fetched_lines))
    }

    fn start(&self, tid: i32, ring_bytes: usize) -> io::Result<RunningTrace> {
        // The leader stays on its counter, because a log with gaps shows reuses closer than they are.
        let leader = open_trace_event(self.misses, tid, None, |attr| {
            attr.__bindgen_anon_1.sample_period = 1;
            attr.sample_type = TRACE_FIELDS;
            attr.set_precise_ip(self.precise_ip);
            attr.set_disabled(1);
            attr.set_pinned(1);
        })?;
        let open_follower = |code| open_trace_event(code, tid, Some(&leader), |_| {});
        let instructions = open_follower(self.instructions)?;
        // If the processor has too few counters for the group, the trace is recorded without these.
        let all_misses = open_follower(self.misses).ok();
        let last_level_misses = self
            .last_level_misses
            .and_then(|(event, code)| Some((event, open_follower(code).ok()?)));
        let mut ring_size = ring_bytes.clamp(MIN_RING_BYTES, MAX_RING_BYTES);
        let ring = loop {
            match SampleRing::map(&leader, ring_size) {
                Err(error)
                    if error.raw_os_error() == Some(libc::EPERM) && ring_size > MIN_RING_BYTES =>
                {
                    ring_size /= 2
                }
                mapped => break mapped?,
            }
        };
        control_group(&leader, perf::ioctls::ENABLE)?;
        let (contents, start_time) = (TraceContents::default(), Instant::now());
        Ok(RunningTrace {
            tid,
            leader,
            instructions,
            all_misses,
            last_level_misses,
            ring,
            contents,
            start_time,
        })
    }
}

/// A trace that is being recorded.
struct RunningTrace {
    tid: i32,
    leader: File,
    instructions: File,
    all_misses: Option<File>,
    last_level_misses: Option<(CounterEvent, File)>,
    ring: SampleRing,
    contents: TraceContents,
    start_time: Instant,
}

impl RunningTrace {
    /// Waits for records, for at most [`READ_INTERVAL`]. Returns false if the thread has exited or the event has no
    /// counter.
    fn wait_for_records(&self) -> bool {
        let mut poll_fd = libc::pollfd {
            fd: self.leader.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: `poll_fd` is one pollfd of ours, and the count is 1.
        unsafe {
            libc::poll(
                &raw mut poll_fd,
                1,
                READ_INTERVAL.as_millis() as libc::c_int,
            )
        };
        poll_fd.revents & (libc::POLLHUP | libc::POLLERR) == 0
    }

    fn drain(&mut self) {
        parse_trace(&self.ring.take_bytes(), self.tid, &mut self.contents);
    }

    fn finish(mut self) -> io::Result<MissTraceLog> {
        control_group(&self.leader, perf::ioctls::DISABLE)?;
        let elapsed_ns = self.start_time.elapsed().as_nanos() as u64;
        self.drain();
        // A pinned event that has lost its counter reads nothing.
        read_count(&mut self.leader)
            .map_err(|_| io::Error::other("all counters of the processor are taken"))?;
        let mut counts = vec![(
            CounterEvent::Instructions,
            read_count(&mut self.instructions)?,
        )];
        if let Some((event, file)) = &mut self.last_level_misses {
            counts.push((*event, read_count(file)?));
        }
        let TraceContents {
            addresses,
            lost_count: lost,
            unusable_count: unusable,
            is_cut,
        } = self.contents;
        let reported_losses = lost + unusable;
        let counted_misses = self.all_misses.as_mut().map(read_count).transpose()?;
        let lost_misses = match counted_misses {
            Some(count) => Some(
                count
                    .saturating_sub(addresses.len() as u64)
                    .max(reported_losses),
            ),
            None if is_cut => None,
            None => (reported_losses > 0).then_some(reported_losses),
        };
        Ok(MissTraceLog {
            addresses,
            lost_misses,
            counts: EventCounts::exact(counts),
            elapsed_ns,
        })
    }
}

fn control_group(
    leader: &File,
    group_ioctl: unsafe fn(std::os::raw::c_int, u32) -> std::os::raw::c_int,
) -> io::Result<()> {
    // SAFETY: both calls take a flag and no memory.
    match unsafe { group_ioctl(leader.as_raw_fd(), perf::bindings::PERF_IOC_FLAG_GROUP) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn read_count(file: &mut File) -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    file.read_exact(&mut bytes)
        .map(|()| u64::from_ne_bytes(bytes))
}

/// Opens one event of a thread, in user code only, in the group of `leader` if there is one.
fn open_trace_event(
    code: EventCode,
    tid: i32,
    leader: Option<&File>,
    configure: impl FnOnce(&mut perf::bindings::perf_event_attr),
) -> io::Result<File> {
    let mut attr = perf::bindings::perf_event_attr::default();
    attr.type_ = code.kind;
    attr.config = code.config;
    attr.set_exclude_kernel(1);
    attr.set_exclude_hv(1);
    configure(&mut attr);
    open_event(attr, (tid, -1), leader.map(AsRawFd::as_raw_fd))
}

#[cfg(test)]
mod tests;
