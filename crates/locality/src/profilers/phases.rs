//! A program's phase changes: raises `phase` and drops the evidence of the phase before (thesis 5.6.2, 6.4).
//!
//! Two signals: the miss rate per interval, from counters, and the locality signature, from sampled reuse times. A miss
//! rate changes with the allocation too: when shares or placements in force change, its history is forgotten rather than
//! taken for a phase. The signature needs no such care.

use cachemate_core::{Applied, Event, Evidence, Level, Observation, Profile, Profiler, Profiles, TaskId};

use super::{PerTask, evidence, keep_present};
use crate::intervals::locality_signature;
use crate::phases::{PhaseDetector, PhaseEvent, PhaseParameters};
use crate::reuse::ReuseTimes;

/// Fills `phase`; at a change it resets everything else.
#[derive(Clone, Debug)]
pub struct PhaseProfiler {
    level: Level,
    parameters: PhaseParameters,
    interval_instructions: f64,
    tasks: PerTask<State>,
    /// What held in the window before; allocations are compared with it.
    before: Option<Applied>,
}

#[derive(Clone, Debug, Default)]
struct State {
    instructions: f64,
    misses: f64,
    by_miss_rate: Option<PhaseDetector>,
    by_signature: Option<PhaseDetector>,
}

impl PhaseProfiler {
    /// By misses of this level, per interval of at least so many instructions of the task (the thesis: 10^9; windows
    /// are not split, so the machine's windows should not be much longer).
    pub fn new(level: Level, parameters: PhaseParameters, interval_instructions: f64) -> Self {
        PhaseProfiler { level, parameters, interval_instructions, tasks: PerTask::default(), before: None }
    }

    /// Did placements or shares change since the last window?
    fn allocation_changed(&mut self, now: &Applied) -> bool {
        let shares = |applied: &Applied| applied.shares.iter().map(|held| held.share.clone()).collect::<Vec<_>>();
        let same = self.before.as_ref().is_none_or(|before| {
            before.allowed == now.allowed && before.gangs == now.gangs && shares(before) == shares(now)
        });
        self.before = Some(now.clone());
        !same
    }

    fn miss_rate_changed(&self, state: &mut State, misses: f64, instructions: f64, allocation_changed: bool) -> bool {
        let detector = state.by_miss_rate.get_or_insert_with(|| PhaseDetector::new(self.parameters));
        if allocation_changed {
            detector.forget();
            (state.instructions, state.misses) = (0.0, 0.0);
        }
        state.instructions += instructions;
        state.misses += misses;
        if state.instructions < self.interval_instructions || state.instructions <= 0.0 {
            return false;
        }
        let rate = 1000.0 * state.misses / state.instructions;
        (state.instructions, state.misses) = (0.0, 0.0);
        matches!(detector.next(&[rate]), PhaseEvent::Changed { .. })
    }
}

impl Profiler for PhaseProfiler {
    fn update(&mut self, seen: &Observation, profiles: &mut Profiles) {
        keep_present(seen, profiles);
        let allocation_changed = self.allocation_changed(&seen.in_force);
        let mut changed: Vec<TaskId> = Vec::new();
        // Not `follow`: this memory outlives a phase, which it is there to end.
        let mut tasks = std::mem::take(&mut self.tasks);
        tasks.states.retain(|task, _| profiles.contains_key(task));
        for task in &seen.tasks {
            let counted = task.counts.get(Event::Misses(self.level)).zip(task.counts.get(Event::Instructions));
            let (Some((misses, instructions)), Some((state, _))) = (counted, tasks.of(task.task, profiles)) else {
                continue;
            };
            if self.miss_rate_changed(state, misses, instructions, allocation_changed) {
                changed.push(task.task);
            }
        }
        for evidence in evidence(seen) {
            let Evidence::Reuses { task, samples } = evidence else { continue };
            let Some((state, profile)) = tasks.of(*task, profiles) else { continue };
            let Some(refs) = profile.llc_refs_per_mega_instr else { continue };
            let times = ReuseTimes::from_samples(samples, None);
            let Some(signature) = locality_signature(&times, refs.value / 1000.0) else { continue };
            let detector = state.by_signature.get_or_insert_with(|| PhaseDetector::new(self.parameters));
            if matches!(detector.next(&signature), PhaseEvent::Changed { .. }) {
                changed.push(*task);
            }
        }
        self.tasks = tasks;
        changed.sort_unstable();
        changed.dedup();
        for task in changed {
            if let Some(profile) = profiles.get_mut(&task) {
                *profile = Profile { phase: profile.phase + 1, ..Profile::default() };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::{Estimate, ReuseSample};

    const LLC: Level = Level::L2;

    fn profiler() -> PhaseProfiler {
        PhaseProfiler::new(LLC, PhaseParameters::default(), 1000.0)
    }
    fn with_rate(number: u64, misses: u64) -> Observation {
        let mut seen = window(number, &[]);
        seen.tasks = vec![task_seen(0, &[(Event::Instructions, 1000), (Event::Misses(LLC), misses)])];
        seen
    }

    /// Does a true phase change raise the phase once and drop what was known?
    #[test]
    fn a_phase_change_raises_the_phase_and_drops_the_evidence() {
        let (mut profiler, mut profiles) = (profiler(), Profiles::new());
        let mut phases = Vec::new();
        for (number, misses) in [2, 2, 2, 12, 12, 12, 12, 12].into_iter().enumerate() {
            profiler.update(&with_rate(number as u64, misses), &mut profiles);
            let profile = profiles.get_mut(&TaskId(0)).unwrap();
            phases.push((profile.phase, profile.pcmr.is_some()));
            profile.pcmr = Some(Estimate::exact(1.0));
        }
        let kept = |phase| (phase, true);
        assert_eq!(phases[1..5], [kept(0), kept(0), (1, false), kept(1)]);
        assert_eq!(phases[7], kept(1));
    }

    /// Is a new allocation not taken for a phase, and a phase after it still seen?
    #[test]
    fn a_new_allocation_is_no_phase() {
        let (mut profiler, mut profiles) = (profiler(), Profiles::new());
        for (number, (misses, colours)) in
            [(2, 16), (2, 16), (2, 16), (9, 4), (9, 4), (9, 4), (20, 4)].into_iter().enumerate()
        {
            profiler.update(&with_colours(with_rate(number as u64, misses), colours), &mut profiles);
            let expected = u32::from(number == 6);
            assert_eq!(profiles[&TaskId(0)].phase, expected, "window {number}");
        }
    }

    /// Do reuse times alone show a phase, where no counter says anything?
    #[test]
    fn reuse_times_show_a_phase_without_counters() {
        let (mut profiler, mut profiles) = (profiler(), Profiles::new());
        for number in 0..8 {
            let mut seen = window(number, &[0]);
            let accesses = Some(if number < 5 { 10 } else { 100_000 });
            let samples = vec![ReuseSample { accesses, elapsed_ns: 1, touched_again: true }; 50];
            seen.answers = vec![answer(0, Evidence::Reuses { task: TaskId(0), samples })];
            keep_present(&seen, &mut profiles);
            profiles.get_mut(&TaskId(0)).unwrap().llc_refs_per_mega_instr = Some(Estimate::exact(20_000.0));
            profiler.update(&seen, &mut profiles);
            assert_eq!(profiles[&TaskId(0)].phase, u32::from(number >= 5), "window {number}");
        }
    }
}
