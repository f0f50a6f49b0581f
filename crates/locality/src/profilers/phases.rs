//! Detects phase changes of programs: raises `phase_number` and drops the evidence of the preceding phase (thesis
//! 5.6.2, 6.4).
//!
//! There are three signals: the miss rate per interval, the accesses that reach the cache (misses of the first-level
//! caches and references of the contended cache), and the locality signature from sampled reuse times. Because the miss
//! rate also depends on the allocation, its history is dropped when shares or placements change, so that a new
//! allocation is not taken for a phase. The other two signals are not affected, because allocating the contended cache
//! does not change the levels before it.
//!
//! Reports by two signals within the history length of one count as one change; two reports by one signal count as two.
//! A difference counts only if it exceeds the noise of its signal, as far as an interval consists of several windows,
//! and for accesses also the share within which intervals are of one kind ([`super::phase_kinds`]).
//! A change that is too small for the mean of the last intervals is detected by the kind of the phase: its incoming
//! accesses stay outside the range of the kind's intervals.

use cachemate_core::{
    AppliedPlan, CacheLevel, CounterEvent, EventCounts, EvidenceKind, Fact, FactSource,
    Observation, PhaseParameters, ProbeEvidence, Profile, Profiler, Profiles, StallCause, TaskId,
};

use super::phase_kinds::{PhaseKinds, SAME_KIND_SHARE};
use super::{PerTask, probe_evidence, retain_live};
use crate::phases::{PhaseDetector, PhaseEvent, SignalNoise};
use crate::reuse::ReuseTimes;
use crate::signature::locality_signature;

/// Number of successive intervals outside the kind's range that mark a change; one alone may merely span two phases.
const OUTSIDE_INTERVALS: usize = 2;
/// Standard errors that the noise of one interval exceeds with a probability of one in a thousand. A false change costs
/// a trace, which takes about as long as an interval.
const NOISE_BOUND: f64 = 3.29;
/// Standard errors that the noise of [`OUTSIDE_INTERVALS`] successive intervals exceeds with that probability.
const REPEATED_NOISE_BOUND: f64 = 2.15;

/// Fills `phase_number` and `phase.kind`, and clears the rest of the profile at a phase change.
///
/// Kinds are identified by the accesses from the first level and by the cycles that do not wait for memory, if those
/// are counted; cache allocation changes neither. Otherwise the miss rate identifies kinds, so one phase may appear as
/// two kinds under two allocations.
#[derive(Clone, Debug)]
pub struct PhaseProfiler {
    level: CacheLevel,
    parameters: PhaseParameters,
    interval_instructions: f64,
    tasks: PerTask<PhaseState>,
    /// The plan in force in the preceding window, by which a change of allocation is detected.
    previous_plan: Option<AppliedPlan>,
}

#[derive(Clone, Debug, Default)]
struct PhaseState {
    instructions: f64,
    misses: f64,
    /// References of the contended cache and misses of the two first-level caches; each is `None` if it was not counted
    /// throughout the interval.
    incoming_counts: [Option<f64>; 3],
    miss_rate_detector: Option<PhaseDetector>,
    incoming_detector: Option<PhaseDetector>,
    signature_detector: Option<PhaseDetector>,
    /// Noise of the miss rate, followed by the incoming accesses.
    noise: SignalNoise,
    /// Cycles that do not wait for memory; `None` if one of the counts was missing in the interval.
    busy_cycles: Option<f64>,
    kinds: PhaseKinds,
    kind: Option<u32>,
    /// Number of successive intervals whose incoming accesses lie outside the range of the current kind.
    outside_intervals: usize,
    /// Signals (miss rate, incoming accesses) that reported the last change, and the number of further intervals within
    /// which a report by the other signal is the same change.
    last_report: ([bool; 2], usize),
}

impl PhaseState {
    /// Records the reports of one interval, and returns whether they signal a change that has not been reported yet.
    fn record_reports(&mut self, reports: [bool; 2], history: usize) -> bool {
        let (last_signals, remaining_intervals) = self.last_report;
        let is_reported = reports[0] || reports[1];
        let is_repeated = (reports[0] && last_signals[0]) || (reports[1] && last_signals[1]);
        let is_new_change = is_reported && (remaining_intervals == 0 || is_repeated);
        self.last_report = if is_new_change {
            (reports, history)
        } else {
            (last_signals, remaining_intervals.saturating_sub(1))
        };
        is_new_change
    }
}

impl PhaseProfiler {
    /// Builds a profiler that uses the misses of this level, over intervals of at least `interval_instructions` of the
    /// task.
    ///
    /// The thesis uses 10^9 instructions. Windows are not split, so the machine's windows should not be much longer
    /// than an interval.
    pub fn new(level: CacheLevel, parameters: PhaseParameters, interval_instructions: f64) -> Self {
        PhaseProfiler {
            level,
            parameters,
            interval_instructions,
            tasks: PerTask::default(),
            previous_plan: None,
        }
    }

    /// Records the plan in force. Returns whether placements, gangs or shares have changed since the last window.
    fn update_allocation(&mut self, current_plan: &AppliedPlan) -> bool {
        let shares_in_force = |applied: &AppliedPlan| {
            applied
                .shares
                .iter()
                .map(|active_share| active_share.share.clone())
                .collect::<Vec<_>>()
        };
        let is_unchanged = self.previous_plan.as_ref().is_none_or(|previous_plan| {
            previous_plan.affinity == current_plan.affinity
                && previous_plan.gangs == current_plan.gangs
                && shares_in_force(previous_plan) == shares_in_force(current_plan)
        });
        self.previous_plan = Some(current_plan.clone());
        !is_unchanged
    }

    /// Adds a window. Returns whether it completes an interval that reveals a change of phase.
    fn add_window(
        &self,
        state: &mut PhaseState,
        counts: &EventCounts,
        has_allocation_changed: bool,
    ) -> bool {
        let misses_and_instructions = counts
            .get(CounterEvent::Misses(self.level))
            .zip(counts.get(CounterEvent::Instructions));
        let Some((misses, instructions)) = misses_and_instructions else {
            return false;
        };
        let miss_rate_detector = state
            .miss_rate_detector
            .get_or_insert_with(|| PhaseDetector::new(self.parameters));
        if has_allocation_changed {
            miss_rate_detector.clear_history();
            (state.instructions, state.misses) = (0.0, 0.0);
        }
        if state.instructions == 0.0 {
            (state.incoming_counts, state.busy_cycles) = ([Some(0.0); 3], Some(0.0));
            state.noise.begin_interval();
        }
        state.instructions += instructions;
        state.misses += misses;
        let incoming_counts = self.count_incoming_accesses(counts);
        state.incoming_counts = [0, 1, 2].map(|index| {
            state.incoming_counts[index]
                .zip(incoming_counts[index])
                .map(|(sum, addend)| sum + addend)
        });
        state.busy_cycles = state
            .busy_cycles
            .zip(cycles_without_waits(counts))
            .map(|(sum, addend)| sum + addend);
        if instructions > 0.0 {
            let window_counts =
                std::iter::once(misses).chain(incoming_counts.into_iter().flatten());
            let window_signal: Vec<f64> = window_counts
                .map(|count| 1000.0 * count / instructions)
                .collect();
            state.noise.add_window(&window_signal, instructions);
        }
        if state.instructions < self.interval_instructions || state.instructions <= 0.0 {
            return false;
        }
        let per_kilo_instr = 1000.0 / state.instructions;
        let rate = [state.misses * per_kilo_instr];
        // Without references, the signal of incoming accesses is absent.
        let incoming_signal: Option<Vec<f64>> = state.incoming_counts[0].map(|_| {
            state
                .incoming_counts
                .iter()
                .flatten()
                .map(|sum| sum * per_kilo_instr)
                .collect()
        });
        state.noise.end_interval();
        let noise_of = |entry: usize| state.noise.standard_error(entry);
        // The mean of the last intervals has noise too.
        let noise_bound =
            NOISE_BOUND * libm::sqrt(1.0 + 1.0 / self.parameters.history.max(1) as f64);
        let rate_threshold = self.parameters.threshold.max(noise_bound * noise_of(0));
        let rate_event = miss_rate_detector.push_with_thresholds(&rate, &[rate_threshold]);
        let incoming_event = incoming_signal.as_ref().map(|signal| {
            let detector = state
                .incoming_detector
                .get_or_insert_with(|| PhaseDetector::new(self.parameters));
            let threshold_of = |(index, access_rate): (usize, &f64)| {
                self.parameters
                    .threshold
                    .max(SAME_KIND_SHARE * access_rate)
                    .max(noise_bound * noise_of(index + 1))
            };
            let thresholds: Vec<f64> = signal.iter().enumerate().map(threshold_of).collect();
            detector.push_with_thresholds(signal, &thresholds)
        });
        (state.instructions, state.misses) = (0.0, 0.0);
        let is_settled = |event| matches!(event, PhaseEvent::Steady | PhaseEvent::Settled);
        let is_change = |event| matches!(event, PhaseEvent::Changed { .. });
        let is_outside_range =
            state
                .kind
                .zip(incoming_signal.as_ref())
                .is_some_and(|(kind, signal)| {
                    let edge = self.parameters.threshold * self.parameters.edge_share;
                    state.kinds.is_outside(kind, signal, |entry| {
                        edge.max(REPEATED_NOISE_BOUND * noise_of(entry + 1))
                    })
                });
        state.outside_intervals = if is_outside_range {
            state.outside_intervals + 1
        } else {
            0
        };
        let reports = [
            is_change(rate_event),
            incoming_event.is_some_and(is_change) || state.outside_intervals == OUTSIDE_INTERVALS,
        ];
        let is_new_change = state.record_reports(reports, self.parameters.history);
        if is_new_change {
            state.kind = None;
        } else if incoming_event.map_or(is_settled(rate_event), is_settled) {
            let own_cycles = state.busy_cycles.map(|cycles| cycles * per_kilo_instr);
            let signal: Vec<f64> = incoming_signal.map_or(rate.to_vec(), |incoming| {
                incoming.into_iter().chain(own_cycles).collect()
            });
            match state.kind {
                Some(kind) if !is_outside_range => state.kinds.add(kind, &signal),
                Some(_) => {}
                None => state.kind = state.kinds.find_or_create_kind(&signal),
            }
        }
        is_new_change
    }

    /// Counts of the accesses that reach the cache, which its allocation does not change; `None` for an event that was
    /// not counted.
    fn count_incoming_accesses(&self, counts: &EventCounts) -> [Option<f64>; 3] {
        let misses_at = |level| counts.get(CounterEvent::Misses(level));
        [
            counts.get(CounterEvent::References(self.level)),
            misses_at(CacheLevel::L1Data),
            misses_at(CacheLevel::L1Instruction),
        ]
    }
}

/// Cycles without those that wait for memory or for other caches; `None` if one of these was not counted.
fn cycles_without_waits(counts: &EventCounts) -> Option<f64> {
    let causes = [
        StallCause::LocalMemory,
        StallCause::RemoteMemory,
        StallCause::BusQueue,
        StallCause::RemoteCache,
    ];
    let wait_cycles: Vec<f64> = causes
        .into_iter()
        .filter_map(|cause| counts.get(CounterEvent::StallCycles(cause)))
        .collect();
    (!wait_cycles.is_empty()).then_some(())?;
    Some((counts.get(CounterEvent::Cycles)? - wait_cycles.iter().sum::<f64>()).max(0.0))
}

impl Profiler for PhaseProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("phases", Some(EvidenceKind::TaskCounters))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        retain_live(observation, profiles);
        let has_allocation_changed = self.update_allocation(&observation.applied);
        let mut changed_tasks: Vec<TaskId> = Vec::new();
        // `retain_current` would drop this state at the end of a phase, although the state is what detects that end.
        let mut tasks = std::mem::take(&mut self.tasks);
        tasks.states.retain(|task, _| profiles.contains_key(task));
        for task in &observation.tasks {
            let Some((state, _)) = tasks.find_profile(task.task, profiles) else {
                continue;
            };
            if self.add_window(state, &task.counts, has_allocation_changed) {
                changed_tasks.push(task.task);
            }
        }
        for evidence in probe_evidence(observation) {
            let ProbeEvidence::Reuses { task, samples } = evidence else {
                continue;
            };
            let Some((state, profile)) = tasks.find_profile(*task, profiles) else {
                continue;
            };
            let Some(refs) = profile.rates.llc_refs_per_mega_instr else {
                continue;
            };
            let times = ReuseTimes::from_samples(samples, None);
            let Some(signature) = locality_signature(&times, refs.value / 1000.0) else {
                continue;
            };
            let detector = state
                .signature_detector
                .get_or_insert_with(|| PhaseDetector::new(self.parameters));
            if matches!(detector.push(&signature), PhaseEvent::Changed { .. }) {
                state.kind = None;
                changed_tasks.push(*task);
            }
        }
        changed_tasks.sort_unstable();
        changed_tasks.dedup();
        for task in changed_tasks {
            if let Some(profile) = profiles.get_mut(&task) {
                *profile = Profile {
                    phase_number: profile.phase_number + 1,
                    ..Profile::default()
                };
            }
        }
        for (task, profile) in profiles.iter_mut() {
            let kind = tasks.states.get(task).and_then(|(_, state)| state.kind);
            if profile.phase.kind.map(|fact| fact.value) != kind {
                profile.phase.kind =
                    kind.map(|kind| Fact::new(kind, FactSource::PhaseDetector, observation.window));
            }
        }
        self.tasks = tasks;
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::ReuseSample;

    const LLC: CacheLevel = CacheLevel::L2;

    fn llc_profiler() -> PhaseProfiler {
        PhaseProfiler::new(LLC, PhaseParameters::default(), 1000.0)
    }
    fn with_rate(number: u64, misses: u64) -> Observation {
        counted_window(
            number,
            &[
                (CounterEvent::Instructions, 1000),
                (CounterEvent::Misses(LLC), misses),
            ],
        )
    }

    /// Does a real phase change raise the phase number once and drop earlier evidence?
    #[test]
    fn a_phase_change_raises_the_phase_and_drops_the_evidence() {
        let (mut profiler, mut profiles) = (llc_profiler(), Profiles::new());
        let mut phases = Vec::new();
        for (number, misses) in [2, 2, 2, 12, 12, 12, 12, 12].into_iter().enumerate() {
            profiler.update(&with_rate(number as u64, misses), &mut profiles);
            let profile = profiles.get_mut(&TaskId(0)).unwrap();
            phases.push((profile.phase_number, profile.rates.pcmr.is_some()));
            profile.rates.pcmr = Some(Fact::new(1.0, FactSource::CoRunRows, number as u64));
        }
        let in_phase = |phase| (phase, true);
        assert_eq!(
            phases[1..5],
            [in_phase(0), in_phase(0), (1, false), in_phase(1)]
        );
        assert_eq!(phases[7], in_phase(1));
    }

    /// Does a recurring phase get its earlier kind, a different phase another kind, and a transition none?
    #[test]
    fn a_recurring_phase_gets_its_earlier_kind() {
        let (mut profiler, mut profiles) = (llc_profiler(), Profiles::new());
        let levels = [2, 12, 30, 2, 31, 12];
        let misses = levels.into_iter().flat_map(|misses| [misses; 6]);
        let mut kinds = Vec::new();
        for (number, misses) in misses.enumerate() {
            profiler.update(&with_rate(number as u64, misses), &mut profiles);
            kinds.push(profiles[&TaskId(0)].phase.kind.map(|fact| fact.value));
        }
        let of_phase = |index: usize| (kinds[index * 6], kinds[index * 6 + 5]);
        let phase_ends: Vec<_> = (0..levels.len()).map(of_phase).collect();
        let expected = [0, 1, 2, 0, 2, 1].map(Some);
        assert_eq!(
            phase_ends.iter().map(|(_, last)| *last).collect::<Vec<_>>(),
            expected,
            "{kinds:?}"
        );
        assert!(
            phase_ends.iter().skip(1).all(|(first, _)| first.is_none()),
            "{kinds:?}"
        );
    }

    /// Is a phase detected that differs too little for the mean of the last intervals, if only references are counted?
    #[test]
    fn a_small_lasting_difference_of_incoming_accesses_is_a_phase() {
        let (mut profiler, mut profiles) = (llc_profiler(), Profiles::new());
        let mut phases = Vec::new();
        let windows = [7; 6].into_iter().chain([5; 6]).chain([7; 6]);
        for (number, references) in windows.enumerate() {
            let counts = [
                (CounterEvent::Instructions, 1000),
                (CounterEvent::Misses(LLC), 4),
                (CounterEvent::References(LLC), references),
            ];
            profiler.update(&counted_window(number as u64, &counts), &mut profiles);
            let profile = &profiles[&TaskId(0)];
            phases.push((
                profile.phase_number,
                profile.phase.kind.as_ref().map(|fact| fact.value),
            ));
        }
        assert_eq!(
            [phases[5], phases[11], phases[17]],
            [(0, Some(0)), (1, Some(1)), (2, Some(0))],
            "{phases:?}"
        );
    }

    /// Is noise of frequent accesses above the threshold no phase, and is a difference above the noise still one?
    #[test]
    fn noise_above_the_threshold_is_no_phase() {
        let mut profiler = PhaseProfiler::new(LLC, PhaseParameters::default(), 3e6);
        let mut profiles = Profiles::new();
        let mut generator = cachemate_core::SplitMix64::new(3);
        let mut changes_at = [0; 2];
        for number in 0..1_200 {
            // Twelve uniform numbers have a variance of one: the noise of an interval of three windows is 3.5 %.
            let normal = (0..12).map(|_| generator.draw_unit()).sum::<f64>() - 6.0;
            let level = if number < 1_150 { 120_000.0 } else { 170_000.0 };
            let counts = [
                (CounterEvent::Instructions, 1_000_000),
                (CounterEvent::Misses(LLC), 1_000),
                (
                    CounterEvent::References(LLC),
                    (level * (1.0 + 0.06 * normal)) as u64,
                ),
            ];
            profiler.update(&counted_window(number, &counts), &mut profiles);
            changes_at[usize::from(number >= 1_150)] = profiles[&TaskId(0)].phase_number;
        }
        assert!(changes_at[0] <= 3, "{changes_at:?}: noise");
        assert!(changes_at[1] > changes_at[0], "{changes_at:?}: a phase");
    }

    /// Is a new allocation not reported as a phase, and is a phase after it still detected?
    #[test]
    fn a_new_allocation_is_no_phase() {
        let (mut profiler, mut profiles) = (llc_profiler(), Profiles::new());
        for (number, (misses, colors)) in
            [(2, 16), (2, 16), (2, 16), (9, 4), (9, 4), (9, 4), (20, 4)]
                .into_iter()
                .enumerate()
        {
            profiler.update(
                &with_colors(with_rate(number as u64, misses), colors),
                &mut profiles,
            );
            let expected = u32::from(number == 6);
            assert_eq!(
                profiles[&TaskId(0)].phase_number,
                expected,
                "window {number}"
            );
        }
    }

    /// Do incoming accesses reveal a phase that coincides with a new allocation, exactly once?
    #[test]
    fn incoming_accesses_show_a_phase_that_a_new_allocation_hides() {
        let (mut profiler, mut profiles) = (llc_profiler(), Profiles::new());
        // The phase changes in window 4, together with the allocation; the misses change later.
        let windows = [
            (2, 20, 16),
            (2, 20, 16),
            (2, 20, 16),
            (2, 20, 16),
            (9, 60, 4),
            (14, 60, 4),
            (14, 60, 4),
        ];
        for (number, (misses, first_level, colors)) in windows.into_iter().enumerate() {
            let first = [
                CounterEvent::Misses(CacheLevel::L1Data),
                CounterEvent::Misses(CacheLevel::L1Instruction),
                CounterEvent::References(LLC),
            ];
            let mut readings = vec![
                (CounterEvent::Instructions, 1000),
                (CounterEvent::Misses(LLC), misses),
            ];
            readings.extend(first.map(|event| (event, first_level)));
            profiler.update(
                &with_colors(counted_window(number as u64, &readings), colors),
                &mut profiles,
            );
            assert_eq!(
                profiles[&TaskId(0)].phase_number,
                u32::from(number >= 4),
                "window {number}"
            );
        }
    }

    /// Do reuse times alone reveal a phase without counters?
    #[test]
    fn reuse_times_show_a_phase_without_counters() {
        let (mut profiler, mut profiles) = (llc_profiler(), Profiles::new());
        for number in 0..8 {
            let accesses = Some(if number < 5 { 10 } else { 100_000 });
            let samples = vec![
                ReuseSample {
                    accesses,
                    elapsed_ns: 1,
                    reused: true
                };
                50
            ];
            let observation = answered_window(
                number,
                &[0],
                ProbeEvidence::Reuses {
                    task: TaskId(0),
                    samples,
                },
            );
            retain_live(&observation, &mut profiles);
            profiles
                .get_mut(&TaskId(0))
                .unwrap()
                .rates
                .llc_refs_per_mega_instr = Some(Fact::new(20_000.0, FactSource::Counters, number));
            profiler.update(&observation, &mut profiles);
            assert_eq!(
                profiles[&TaskId(0)].phase_number,
                u32::from(number >= 5),
                "window {number}"
            );
        }
    }
}
