//! Profiles recorded earlier and recognised: what is known of a task before anything was measured.
//!
//! What was measured in this run is better evidence, so a known profile only fills fields that nothing has filled; it is
//! remembered and fills them again after a phase change has emptied them. Put this profiler last.

use std::collections::BTreeMap;

use cachemate_core::{Evidence, Observation, Profile, Profiler, Profiles, TaskId};

use super::{evidence, keep_present};

/// Fills whatever is absent; never `phase`.
#[derive(Clone, Debug, Default)]
pub struct KnownProfiler {
    known: BTreeMap<TaskId, Profile>,
}

impl Profiler for KnownProfiler {
    fn update(&mut self, seen: &Observation, profiles: &mut Profiles) {
        keep_present(seen, profiles);
        for evidence in evidence(seen) {
            if let Evidence::Known { task, profile } = evidence {
                self.known.insert(*task, profile.as_ref().clone());
            }
        }
        self.known.retain(|task, _| profiles.contains_key(task));
        for (task, known) in &self.known {
            if let Some(profile) = profiles.get_mut(task) {
                fill(profile, known);
            }
        }
    }
}

/// Fills the fields of `profile` that are absent. The pattern names every field, so that a new one cannot be forgotten.
fn fill(profile: &mut Profile, known: &Profile) {
    let Profile {
        misses_per_kilo_instr,
        stalls_per_kilo_instr,
        reuse_times,
        stack_positions,
        llc_refs_per_mega_instr,
        solo_instr_per_cycle,
        observed_misses_per_kilo_instr,
        observed_read_bytes_per_kilo_instr,
        observed_instr_per_cycle,
        pcmr,
        activity,
        sharing,
        sharing_is_machine_wide,
        remote_stall_share,
        intensity,
        sensitivity,
        phase: _,
        process: _,
    } = known;
    fn absent<T: Clone>(field: &mut Option<T>, known: &Option<T>) {
        if field.is_none() {
            field.clone_from(known);
        }
    }
    absent(&mut profile.misses_per_kilo_instr, misses_per_kilo_instr);
    absent(&mut profile.stalls_per_kilo_instr, stalls_per_kilo_instr);
    absent(&mut profile.reuse_times, reuse_times);
    absent(&mut profile.stack_positions, stack_positions);
    absent(&mut profile.llc_refs_per_mega_instr, llc_refs_per_mega_instr);
    absent(&mut profile.solo_instr_per_cycle, solo_instr_per_cycle);
    absent(&mut profile.observed_misses_per_kilo_instr, observed_misses_per_kilo_instr);
    absent(&mut profile.observed_read_bytes_per_kilo_instr, observed_read_bytes_per_kilo_instr);
    absent(&mut profile.observed_instr_per_cycle, observed_instr_per_cycle);
    absent(&mut profile.pcmr, pcmr);
    if profile.sharing.is_none() {
        profile.sharing_is_machine_wide = *sharing_is_machine_wide;
    }
    absent(&mut profile.sharing, sharing);
    absent(&mut profile.remote_stall_share, remote_stall_share);
    absent(&mut profile.intensity, intensity);
    absent(&mut profile.sensitivity, sensitivity);
    if profile.activity.is_empty() {
        profile.activity.clone_from(activity);
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::Estimate;

    /// Does a known profile fill what is absent, keep what was measured, and come back after a phase change?
    #[test]
    fn a_known_profile_fills_only_what_nothing_measured() {
        let (mut profiler, mut profiles) = (KnownProfiler::default(), Profiles::new());
        let estimate = |value| Some(Estimate::exact(value));
        let known = Profile { pcmr: estimate(7.0), intensity: estimate(3.0), phase: 9, ..Profile::default() };
        profiles.insert(TaskId(0), Profile { pcmr: estimate(1.0), ..Profile::default() });
        let mut seen = window(0, &[0, 1]);
        seen.answers = vec![answer(0, Evidence::Known { task: TaskId(0), profile: Box::new(known) })];
        profiler.update(&seen, &mut profiles);
        let profile = &profiles[&TaskId(0)];
        assert_eq!((profile.pcmr, profile.intensity, profile.phase), (estimate(1.0), estimate(3.0), 0));
        assert_eq!(profiles[&TaskId(1)], Profile::default());
        profiles.insert(TaskId(0), Profile { phase: 1, ..Profile::default() });
        profiler.update(&window(1, &[0, 1]), &mut profiles);
        let profile = &profiles[&TaskId(0)];
        assert_eq!((profile.pcmr, profile.phase), (estimate(7.0), 1));
        profiler.update(&window(2, &[1]), &mut profiles);
        assert!(!profiles.contains_key(&TaskId(0)));
    }
}
