//! Controls the shares of a cache: adoption, evidence, and repeated trials.
//!
//! Problem: forecasts err, so shares go on trial before they are adopted ([`super::ab_test`]). A measurement does not
//! stay valid forever either: programs change phase, and shares that helped may then hurt. Permanent trials cost speed
//! too, because all programs run slower while the worse side of a comparison is in force. Method:
//! - Shares that partition the cache are compared with sharing it again from time to time. They are compared at once if
//!   programs run clearly slower than in the matching windows of the last verdict, or if no windows match.
//! - The cost of a trial is measured, and the next trial waits until that cost is at most the configured fraction of
//!   the time since. After a trial without a change, the next one also waits until another trial of the same cost fits
//!   that budget. Every further trial without a change doubles the wait; a change, another phase or a drop of speed
//!   ends the wait.
//! - Hysteresis: shares are adopted if they are significantly faster by at least the minimum gain, and removed if
//!   sharing is as fast.
//! - The measured performance of a process with its units bounds its curve from then on ([`DemandCurve::apply_bound`]),
//!   so that shares that failed are not proposed again. What it measured with units of its own applies again in later
//!   phases of the same kind.
//!
//! Properties: trials cost at most the configured fraction of the time; the first trial with new co-runners is exempt.
//! Other co-runners discard all evidence.

use std::collections::BTreeMap;

use cachemate_core::{CacheShare, ProcessId, ShareMember, View};

use super::ab_test::{AbArm, AbTest, AbTestLengths, AbTestStatus, CLEAR_LOSS, SettlingPeriod};
use crate::partition::demand_curve::{DemandCurve, MeasuredSpeed};
use crate::partition::partitioned_cache::{CacheProcess, PartitionedCache};
use crate::partition::speed_history::{Ratio, SpeedRecord};
use crate::verifier::speeds::ProcessPhase;

/// The processes on a cache with their phases. A verdict applies only to the processes and phases with which it was
/// reached.
type ProcessPhases = Vec<(ProcessId, u32)>;

/// A change of shares on trial.
struct ShareTrial {
    old_shares: Vec<CacheShare>,
    new_shares: Vec<CacheShare>,
    /// Shares that restore the old state; the whole cache for all processes if there were none.
    fallback_shares: Vec<CacheShare>,
    test: AbTest,
    /// Whether the trial compares the shares in force with no shares.
    tests_current_shares: bool,
}

impl ShareTrial {
    /// Returns the shares of the arm in force.
    fn shares(&self) -> &Vec<CacheShare> {
        match self.test.arm() {
            AbArm::Old => &self.old_shares,
            AbArm::New => &self.new_shares,
            AbArm::OldAgain => &self.fallback_shares,
        }
    }
}

/// The measured performance of a process in a phase with a number of units, and whether the units were its own.
struct MeasuredBound {
    process: ProcessId,
    phase: ProcessPhase,
    units: u32,
    is_exclusive: bool,
    speed: MeasuredSpeed,
}

/// The speeds under the shares in force at the time of their verdict, with the weight of each process.
struct AcceptedSpeeds {
    record: SpeedRecord,
    weights: Vec<(ProcessId, f64)>,
}

/// The wait between two trials.
#[derive(Clone, Copy, Debug, Default)]
struct TrialCooldown {
    windows: u32,
    /// Number of windows after which the cost of the trial falls to the configured fraction of the time.
    min_windows: u32,
    /// Number of successive trials without a change.
    unchanged_trials: u32,
    /// Whether the next trial tests the shares in force rather than new ones.
    tests_current_next: bool,
}

/// Maximum number of doublings of the wait.
const MAX_DOUBLINGS: u32 = 6;

impl TrialCooldown {
    /// Starts the wait after a trial. `unchanged_trials` is the number of successive trials without a change, including
    /// this one.
    fn from_trial(
        trial: &AbTest,
        terms: TrialTerms,
        unchanged_trials: u32,
        tests_current_shares: bool,
    ) -> Self {
        let affordable_windows =
            libm::ceil(trial.lost_windows() / terms.trial_share).min(f64::from(u32::MAX)) as u32;
        TrialCooldown {
            windows: 0,
            min_windows: affordable_windows.max(trial.windows),
            unchanged_trials,
            tests_current_next: !tests_current_shares,
        }
    }

    fn is_over(&self) -> bool {
        // The next trial begins only when its possible cost fits the budget too.
        let doublings = self.unchanged_trials.min(MAX_DOUBLINGS);
        self.windows >= self.min_windows.saturating_mul(1 << doublings)
    }
}

/// The number of windows for which the same programs stay in the same phases.
#[derive(Clone, Copy, Debug, Default)]
struct PhaseStability {
    windows: u32,
    /// Mean of earlier durations, with the latest weighted by a quarter; `None` before the first change.
    mean_windows: Option<f64>,
}

impl PhaseStability {
    fn record_change(&mut self) {
        let elapsed_windows = f64::from(std::mem::replace(&mut self.windows, 0));
        self.mean_windows = Some(self.mean_windows.map_or(elapsed_windows, |mean| {
            mean + 0.25 * (elapsed_windows - mean)
        }));
    }
}

/// The conditions of trials.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TrialTerms {
    pub lengths: AbTestLengths,
    /// Minimum gain for which shares are adopted, as a fraction.
    pub min_gain: f64,
    /// Maximum fraction of the time that trials may cost.
    pub trial_share: f64,
}

/// The verdict of a trial, with the shares in force from now on.
pub struct ShareVerdict {
    pub shares: Vec<CacheShare>,
    /// Speed under the new shares over that under the old ones; `None` if they were not comparable.
    pub ratio: Option<Ratio>,
    /// Cost of the trial, in windows at the speed of the old shares.
    pub lost_windows: f64,
    pub is_adopted: bool,
    pub tests_current_shares: bool,
}

/// State of a trial after a window.
pub enum TrialStatus {
    /// The trial goes on with these shares in the next window.
    Running(Vec<CacheShare>),
    /// The trial has ended with this verdict.
    Over(ShareVerdict),
}

/// The state of the shares of one cache.
#[derive(Default)]
pub struct ShareController {
    /// Measured speeds under the shares in force.
    pub speeds: SpeedRecord,
    /// Settling period while the cache refills after a change of shares or co-runners; `None` otherwise.
    settling_period: Option<SettlingPeriod>,
    trial: Option<ShareTrial>,
    /// Co-runners with which the guard rolled a trial back, if any.
    rolled_back_with: Option<ProcessPhases>,
    co_runners: ProcessPhases,
    /// Largest number of units with which a goal was measured to be missed with these co-runners, by process.
    pub insufficient_units: BTreeMap<ProcessId, u32>,
    bounds: Vec<MeasuredBound>,
    accepted_speeds: Option<AcceptedSpeeds>,
    /// Wait after the last trial; `None` if there was no trial with these co-runners.
    cooldown: Option<TrialCooldown>,
    phase_stability: PhaseStability,
}

impl ShareController {
    /// Observes a window, and returns the shares that stay in force.
    pub fn observe(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        terms: TrialTerms,
    ) -> Vec<CacheShare> {
        let mut remaining_shares = domain.surviving_shares(&view.previous_plan.shares);
        self.phase_stability.windows += 1;
        let co_runners: ProcessPhases = domain
            .processes
            .iter()
            .map(|cache_process| (cache_process.process, cache_process.phase.number))
            .collect();
        if co_runners != self.co_runners {
            let allows_trials = terms.lengths.measure_windows > 0 && !domain.has_goals();
            self.phase_stability.record_change();
            let unchanged_trials = self
                .cooldown
                .map_or(0, |cooldown| cooldown.unchanged_trials);
            self.reset_evidence(co_runners, allows_trials);
            // Shares without a verdict do not stay, but the cost of their trial is charged all the same.
            if let Some(trial) = self.trial.take() {
                self.cooldown = Some(TrialCooldown::from_trial(
                    &trial.test,
                    terms,
                    unchanged_trials + 1,
                    trial.tests_current_shares,
                ));
                if trial.test.arm() == AbArm::New {
                    remaining_shares = domain.surviving_shares(&trial.fallback_shares);
                    self.settling_period = Some(SettlingPeriod::default());
                }
            }
        }
        match &mut self.settling_period {
            Some(settling) if !settling.is_over => {
                settling.observe(view.observation, domain.cache.level, terms.lengths)
            }
            _ => {
                self.settling_period = None;
                self.speeds.add(
                    view.observation,
                    domain.cache.level,
                    &view.previous_plan.probes,
                );
            }
        }
        if let Some(cooldown) = &mut self.cooldown {
            cooldown.windows = cooldown.windows.saturating_add(1);
        }
        self.detect_slowdown(terms.lengths);
        remaining_shares
    }

    /// Drops the evidence. Speeds of an old phase or of other co-runners do not apply to this one, but the remaining
    /// processes are still charged for trials.
    fn reset_evidence(&mut self, co_runners: ProcessPhases, allows_trials: bool) {
        let processes_of = |co_runners: &ProcessPhases| {
            co_runners
                .iter()
                .map(|&(process, _)| process)
                .collect::<Vec<_>>()
        };
        if processes_of(&co_runners) != processes_of(&self.co_runners) {
            self.cooldown = None;
            // New tasks have no lines in the cache yet, and the lines of exited programs are still in it.
            self.settling_period = allows_trials
                .then(SettlingPeriod::default)
                .or(self.settling_period.take());
        }
        if let Some(cooldown) = &mut self.cooldown {
            cooldown.unchanged_trials = 0;
        }
        self.speeds.clear();
        self.insufficient_units.clear();
        // What a process measured with its own units does not depend on the phases of others.
        self.bounds.retain(|bound| {
            bound.is_exclusive
                && co_runners.iter().any(|&(process, phase)| {
                    bound.process == process
                        && (bound.phase.kind.is_some() || bound.phase.number == phase)
                })
        });
        self.accepted_speeds = None;
        self.co_runners = co_runners;
    }

    fn detect_slowdown(&mut self, lengths: AbTestLengths) {
        let windows = 2 * lengths.measure_windows.max(1);
        let (Some(accepted), Some(cooldown)) = (&self.accepted_speeds, &mut self.cooldown) else {
            return;
        };
        if self.trial.is_some() || self.speeds.windows < windows {
            return;
        }
        let current_speed = self
            .speeds
            .latest_windows(windows)
            .speed_over(&accepted.record, &accepted.weights);
        if current_speed.is_none_or(|speed_ratio| {
            speed_ratio.ratio < 1.0 - CLEAR_LOSS && speed_ratio.is_significant()
        }) {
            (cooldown.unchanged_trials, cooldown.tests_current_next) = (0, true);
        }
    }

    /// Returns whether new shares are on trial.
    pub fn is_on_trial(&self) -> bool {
        self.trial.is_some()
    }

    /// Returns whether the cache is still refilling after a change of shares or of co-runners.
    pub fn is_settling(&self) -> bool {
        self.settling_period.is_some()
    }

    /// Records that the shares change now, without a trial.
    pub fn record_change(&mut self) {
        self.speeds.clear();
        self.settling_period = Some(SettlingPeriod::default());
        self.accepted_speeds = None;
    }

    /// Returns whether a trial may start. It may not if the guard rolled one back with these co-runners, because a
    /// policy must not insist.
    pub fn can_start_trial(&self) -> bool {
        self.rolled_back_with.as_ref() != Some(&self.co_runners)
            && self.cooldown.is_none_or(|cooldown| cooldown.is_over())
    }

    /// Returns the time for which the present evidence is likely to apply, in nanoseconds; infinite before the first
    /// change.
    pub fn expected_lifetime_ns(&self, window_ns: u64) -> f64 {
        let windows = self
            .phase_stability
            .mean_windows
            .map(|mean| mean.max(f64::from(self.phase_stability.windows)));
        windows.map_or(f64::INFINITY, |windows| windows * window_ns as f64)
    }

    /// Returns whether the next trial tests the shares in force rather than new ones.
    pub fn tests_current_next(&self) -> bool {
        self.cooldown
            .is_some_and(|cooldown| cooldown.tests_current_next)
    }

    /// Starts a trial of the new shares in the next window, while `old_shares` is in force.
    pub fn start_trial(
        &mut self,
        old_shares: Vec<CacheShare>,
        new_shares: Vec<CacheShare>,
        fallback_shares: Vec<CacheShare>,
        trial: AbTest,
        tests_current_shares: bool,
    ) {
        self.trial = Some(ShareTrial {
            old_shares,
            new_shares,
            fallback_shares,
            test: trial.with_baseline(&self.speeds),
            tests_current_shares,
        });
    }

    /// Returns the demand curve of a process, bounded by the measurements of that process in phases of this kind.
    pub fn apply_bounds(
        &self,
        cache_process: &CacheProcess<'_>,
        demand: DemandCurve,
    ) -> DemandCurve {
        let is_applicable = |bound: &&MeasuredBound| {
            bound.process == cache_process.process && bound.phase.is_comparable(cache_process.phase)
        };
        let process_bounds = self.bounds.iter().filter(is_applicable);
        process_bounds.fold(demand, |demand, bound| {
            demand.apply_bound(bound.units, bound.speed, bound.is_exclusive)
        })
    }

    /// Evaluates a window for the trial; `None` if no trial runs.
    pub fn judge_window(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        current_shares: &[CacheShare],
        terms: TrialTerms,
    ) -> Option<TrialStatus> {
        let trial = self.trial.as_mut()?;
        if trial.shares() != current_shares {
            (self.trial, self.rolled_back_with) = (None, Some(self.co_runners.clone()));
            self.record_change();
            return Some(TrialStatus::Running(current_shares.to_vec()));
        }
        let status = trial.test.observe(
            view.observation,
            domain.cache.level,
            &view.previous_plan.probes,
        );
        if status == AbTestStatus::Running {
            return Some(TrialStatus::Running(trial.shares().clone()));
        }
        let trial = self.trial.take()?;
        let ratio = if let AbTestStatus::Ratio(ratio_result) = status {
            Some(ratio_result)
        } else {
            None
        };
        // New shares must be significantly faster. Shares in force are removed if they are not faster than sharing.
        let is_better = |measured_ratio: Ratio| {
            measured_ratio.ratio >= 1.0 + terms.min_gain && measured_ratio.is_significant()
        };
        let is_adopted = ratio.is_some_and(|measured| {
            if trial.tests_current_shares {
                measured.ratio >= 1.0
            } else {
                is_better(measured)
            }
        });
        Some(TrialStatus::Over(
            self.finish_trial(trial, domain, terms, ratio, is_adopted),
        ))
    }

    fn finish_trial(
        &mut self,
        share_trial: ShareTrial,
        domain: &PartitionedCache<'_>,
        terms: TrialTerms,
        ratio: Option<Ratio>,
        is_adopted: bool,
    ) -> ShareVerdict {
        let ShareTrial {
            fallback_shares: restored_shares,
            new_shares: new,
            test: trial,
            tests_current_shares: proof,
            ..
        } = share_trial;
        let lost_windows = trial.lost_windows();
        let unchanged_trials = if is_adopted {
            0
        } else {
            self.cooldown
                .map_or(0, |cooldown| cooldown.unchanged_trials)
                + 1
        };
        self.cooldown = Some(TrialCooldown::from_trial(
            &trial,
            terms,
            unchanged_trials,
            proof,
        ));
        if ratio.is_some() {
            self.record_bounds(domain, &new, &trial);
        }
        let weights = trial.weights().to_vec();
        let (shares, speeds) = if is_adopted {
            (new, trial.speeds_under_new)
        } else {
            (restored_shares, trial.old_speeds())
        };
        let is_divided = !domain.is_undivided(&shares);
        self.accepted_speeds = (is_divided && ratio.is_some()).then(|| AcceptedSpeeds {
            record: speeds.clone(),
            weights,
        });
        self.speeds = speeds;
        ShareVerdict {
            shares,
            ratio,
            lost_windows,
            is_adopted,
            tests_current_shares: proof,
        }
    }

    fn record_bounds(
        &mut self,
        domain: &PartitionedCache<'_>,
        shares: &[CacheShare],
        trial: &AbTest,
    ) {
        let old_speeds = trial.old_speeds();
        for share in shares
            .iter()
            .filter(|share| share.units.set().count() < domain.partition_units.units())
        {
            let (units, is_own) = (share.units.set().count(), share.members.len() == 1);
            for member in &share.members {
                let ShareMember::Process(process) = *member else {
                    continue;
                };
                let cache_process = domain
                    .processes
                    .iter()
                    .find(|cache_process| cache_process.process == process);
                let Some(phase) = cache_process.map(|cache_process| cache_process.phase) else {
                    continue;
                };
                let Some((speed, matched_speeds)) = trial
                    .speeds_under_new
                    .measured_speed(process)
                    .zip(trial.speeds_under_new.match_speeds(&old_speeds, process))
                else {
                    continue;
                };
                let is_superseded = |bound: &MeasuredBound| {
                    (bound.process, bound.units) == (process, units)
                        && bound.phase.is_comparable(phase)
                };
                self.bounds.retain(|bound| !is_superseded(bound));
                let speed = MeasuredSpeed {
                    cycles_per_instr: matched_speeds.cycles_per_instr[0],
                    ..speed
                };
                self.bounds.push(MeasuredBound {
                    process,
                    phase,
                    units,
                    is_exclusive: is_own,
                    speed,
                });
            }
        }
    }
}
