//! The probe that samples accesses of all threads of the processes that a plan names, for some tenths of a second.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use cachemate_core::{AccessSample, CpuId, CpuSet, DataSource, TaskId};

use crate::sense::sampling::records::{RawSample, RingContents, decode_source};
use crate::sense::sampling::{Facility, PerfSampler, SamplingTarget};

/// Length of one stretch of sampling.
const SAMPLING_TIME: Duration = Duration::from_millis(150);
/// Time between two reads of the rings.
const READ_INTERVAL: Duration = Duration::from_millis(25);
/// If there are more threads, they are sampled by CPU, which needs one event per CPU whatever their number.
const MAX_THREADS: usize = 64;

/// The threads that are sampled, and the method.
pub(crate) struct SampledThreads<'a> {
    pub(crate) threads: &'a BTreeMap<i32, TaskId>,
    pub(crate) online: &'a CpuSet,
    pub(crate) line_bytes: u32,
    /// The machine's start on the monotonic clock, on which the samples' times are based.
    pub(crate) origin_ns: u64,
}

/// Samples for one stretch; the result includes the number of events that the samples stand for.
///
/// # Errors
/// The kernel opens no event, neither for the threads nor for the CPUs.
pub(crate) fn sample_accesses(
    facility: &Facility,
    subjects: &SampledThreads<'_>,
    period: u64,
    remote_only: bool,
) -> io::Result<(Vec<AccessSample>, u64)> {
    let mut samplers = open_samplers(facility, subjects, period)?;
    let (start, mut contents) = (Instant::now(), RingContents::default());
    while start.elapsed() < SAMPLING_TIME {
        std::thread::sleep(READ_INTERVAL);
        samplers
            .iter_mut()
            .for_each(|sampler| sampler.drain(&mut contents));
    }
    samplers.iter().for_each(PerfSampler::stop);
    samplers
        .iter_mut()
        .for_each(|sampler| sampler.drain(&mut contents));
    // Sampling by CPU covers all threads; events of unmanaged threads are dropped.
    let subject_samples: Vec<RawSample> = contents
        .samples
        .into_iter()
        .filter(|raw| subjects.threads.contains_key(&raw.tid))
        .collect();
    let event_count = subject_samples.iter().map(|raw| raw.period).sum();
    let samples = subject_samples
        .iter()
        .filter_map(|raw| subjects.resolve_sample(raw));
    Ok((
        samples
            .filter(|sample| !remote_only || sample.source == DataSource::RemoteCache)
            .collect(),
        event_count,
    ))
}

fn open_samplers(
    facility: &Facility,
    subjects: &SampledThreads<'_>,
    period: u64,
) -> io::Result<Vec<PerfSampler>> {
    if subjects.threads.len() <= MAX_THREADS {
        let sampler_results = subjects
            .threads
            .keys()
            .map(|&tid| PerfSampler::open(facility, SamplingTarget::Thread(tid), period));
        // Threads that have exited meanwhile make no accesses.
        let live_samplers = sampler_results.filter(|sampler| {
            !sampler
                .as_ref()
                .is_err_and(|e| e.raw_os_error() == Some(libc::ESRCH))
        });
        match live_samplers.collect::<io::Result<Vec<_>>>() {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            other => return other,
        }
    }
    subjects
        .online
        .iter()
        .map(|cpu| PerfSampler::open(facility, SamplingTarget::Cpu(CpuId(cpu)), period))
        .collect()
}

impl SampledThreads<'_> {
    fn resolve_sample(&self, raw: &RawSample) -> Option<AccessSample> {
        Some(AccessSample {
            task: *self.threads.get(&raw.tid)?,
            virtual_line: raw.address / u64::from(self.line_bytes.max(1)),
            physical_line: None,
            source: decode_source(raw.data_source),
            latency_cycles: u32::try_from(raw.latency_cycles)
                .ok()
                .filter(|cycles| *cycles > 0),
            at_ns: raw.time_ns.saturating_sub(self.origin_ns),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::CacheLevel;

    /// Is a sample assigned, by cache lines, to the task whose thread made it, and does an unreported latency stay
    /// absent?
    #[test]
    fn samples_are_assigned_to_the_task_that_made_them() {
        let threads = BTreeMap::from([(41, TaskId(3))]);
        let online = CpuSet::default();
        let subjects = SampledThreads {
            threads: &threads,
            online: &online,
            line_bytes: 64,
            origin_ns: 400,
        };
        let raw = RawSample {
            tid: 41,
            time_ns: 1_000,
            address: 0x1044,
            period: 7,
            latency_cycles: 0,
            data_source: 0x6810_0442,
        };
        let sample = subjects.resolve_sample(&raw).unwrap();
        assert_eq!(
            (sample.task, sample.virtual_line, sample.at_ns),
            (TaskId(3), 0x41, 600)
        );
        assert_eq!(
            (sample.source, sample.latency_cycles),
            (DataSource::Cache(CacheLevel::L2), None)
        );
        assert_eq!(subjects.resolve_sample(&RawSample { tid: 5, ..raw }), None);
    }
}
