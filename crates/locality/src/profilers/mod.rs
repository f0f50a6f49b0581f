//! Profilers, which turn observations into profiles; each file handles one kind of evidence.
//!
//! The machine reports raw readings. Filters, weights and averaging periods are applied here, so that a replay of a
//! recording repeats them. Every profiler fills its own fields of [`cachemate_core::Profile`], leaves the others
//! unchanged, and forgets a task when it exits or enters a new phase.
//!
//! [`PhaseProfiler`] must come first, because it drops the evidence of an old phase before others add to it.
//! [`StoredProfileProfiler`] must come last, because it fills only facts that were not measured. [`PhaseCurveRecall`]
//! runs after all profilers and works on a copy of the profiles.

mod activity;
mod corun_slowdown;
mod counters;
mod pcmr;
mod phase_kinds;
mod phases;
mod prime_probe;
mod rapidmrc;
mod recall;
mod reuses;
mod sharing;
mod size_sweep;
mod solo_interval;
mod stalls;
mod stored_profile;

pub use activity::ActivityProfiler;
pub use corun_slowdown::CoRunSlowdownProfiler;
pub use counters::CountersProfiler;
pub use pcmr::PcmrProfiler;
pub use phases::PhaseProfiler;
pub use prime_probe::{MIN_EVICTED_SAMPLES, PrimeProbeProfiler};
pub use rapidmrc::{CurveForm, RapidMrcProfiler};
pub use recall::{AVERAGED, PhaseCurveRecall};
pub use reuses::ReuseProfiler;
pub use sharing::SharingProfiler;
pub use size_sweep::SizeSweepProfiler;
pub use solo_interval::SoloIntervalProfiler;
pub use stalls::StallProfiler;
pub use stored_profile::StoredProfileProfiler;

use std::collections::BTreeMap;

use cachemate_core::{
    CacheShare, Estimate, Observation, ProbeEvidence, Profile, Profiles, ShareMember, TaskId,
    TaskSample, TracedCache, Units,
};

/// Adds an empty profile for every live task without one, and removes the profiles of exited tasks.
pub(crate) fn retain_live(observation: &Observation, profiles: &mut Profiles) {
    let live_tasks = observation.live_tasks();
    profiles.retain(|task, _| live_tasks.contains(task));
    live_tasks.into_iter().for_each(|task| {
        profiles.entry(task).or_default();
    });
}

/// State of a profiler for each task, kept until the task exits or changes phase.
#[derive(Clone, Debug)]
pub(crate) struct PerTask<S> {
    /// The phase to which the state belongs, and the state.
    states: BTreeMap<TaskId, (u32, S)>,
}

impl<S> Default for PerTask<S> {
    fn default() -> Self {
        PerTask {
            states: BTreeMap::new(),
        }
    }
}

impl<S: Default> PerTask<S> {
    /// Drops the profiles of exited tasks, and the state of exited tasks and of earlier phases. A profiler calls this
    /// first in every update.
    pub(crate) fn retain_current(&mut self, observation: &Observation, profiles: &mut Profiles) {
        retain_live(observation, profiles);
        self.states.retain(|task, (phase, _)| {
            profiles
                .get(task)
                .is_some_and(|profile| profile.phase_number == *phase)
        });
    }

    /// The state is created if the task is new; `None` if the task is not live.
    pub(crate) fn find_profile<'a>(
        &'a mut self,
        task: TaskId,
        profiles: &'a mut Profiles,
    ) -> Option<(&'a mut S, &'a mut Profile)> {
        let profile = profiles.get_mut(&task)?;
        let (_, state) = self
            .states
            .entry(task)
            .or_insert_with(|| (profile.phase_number, S::default()));
        Some((state, profile))
    }
}

/// In order of arrival.
pub(crate) fn probe_evidence(observation: &Observation) -> impl Iterator<Item = &ProbeEvidence> {
    observation
        .probe_results
        .iter()
        .map(|probe_result| &probe_result.evidence)
}

pub(crate) fn find_sample(observation: &Observation, task: TaskId) -> Option<&TaskSample> {
    observation.tasks.iter().find(|sample| sample.task == task)
}

/// Mean and spread of readings, computed in one pass (Welford).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunningStats {
    count: f64,
    mean: f64,
    squared_deviations: f64,
}

impl RunningStats {
    pub(crate) fn add(&mut self, reading: f64) {
        self.count += 1.0;
        let deviation = reading - self.mean;
        self.mean += deviation / self.count;
        self.squared_deviations += deviation * (reading - self.mean);
    }

    /// Mean with an interval of two standard errors on either side; `None` without a reading. The spread of a single
    /// reading is unknown, so its interval reaches from 0 to twice the reading.
    pub(crate) fn estimate(&self) -> Option<Estimate> {
        if self.count < 1.0 {
            return None;
        }
        let error = if self.count < 2.0 {
            self.mean.abs()
        } else {
            2.0 * (self.squared_deviations / (self.count - 1.0) / self.count).sqrt()
        };
        Some(Estimate {
            value: self.mean,
            low: self.mean - error,
            high: self.mean + error,
        })
    }
}

/// Shares in force that name the task or its process.
pub(crate) fn shares_with_task<'a>(
    observation: &'a Observation,
    task: &TaskSample,
) -> impl Iterator<Item = &'a CacheShare> {
    let (process, task) = (task.process, task.task);
    observation
        .applied
        .shares
        .iter()
        .map(|active_share| &active_share.share)
        .filter(move |share| {
            share.members.iter().any(|member| match member {
                ShareMember::Process(member) => *member == process,
                ShareMember::Task(member) => *member == task,
            })
        })
}

/// Bytes of a cache that a task may use under the shares in force; the whole cache if it is in no share.
pub(crate) fn share_bytes(
    observation: &Observation,
    task: &TaskSample,
    cache: &TracedCache,
) -> u64 {
    let bytes_of_units = |units: u32, total_units: u32| {
        cache.size_bytes * u64::from(units.min(total_units)) / u64::from(total_units.max(1))
    };
    match shares_with_task(observation, task)
        .next()
        .map(|share| &share.units)
    {
        Some(Units::Colors { allowed, .. }) => bytes_of_units(allowed.count(), cache.colors),
        Some(Units::Ways { mask }) => bytes_of_units(mask.count(), cache.ways),
        None => cache.size_bytes,
    }
}

pub(crate) fn active_tasks(observation: &Observation) -> Vec<&TaskSample> {
    observation
        .tasks
        .iter()
        .filter(|task| task.has_run())
        .collect()
}

/// Whether, as far as is known, no other task fills the ways or colors that this task may use. This requires that all
/// other tasks that ran are in other shares.
pub(crate) fn has_exclusive_units(
    observation: &Observation,
    active_samples: &[&TaskSample],
    task: &TaskSample,
) -> bool {
    let share_index_of = |task: &TaskSample| {
        let is_member = |member: &ShareMember| match member {
            ShareMember::Process(process) => *process == task.process,
            ShareMember::Task(member) => *member == task.task,
        };
        observation
            .applied
            .shares
            .iter()
            .position(|active_share| active_share.share.members.iter().any(is_member))
    };
    let own_share = share_index_of(task);
    let other_tasks = active_samples
        .iter()
        .filter(|active_task| active_task.process != task.process);
    other_tasks.copied().all(|active_task| {
        own_share.is_some()
            && share_index_of(active_task).is_some_and(|other_share| Some(other_share) != own_share)
    })
}

#[cfg(test)]
pub(crate) mod synthetic;
