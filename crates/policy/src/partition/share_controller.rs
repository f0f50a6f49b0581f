//! Which shares of a cache hold, on what evidence, and when they have to prove themselves.
//!
//! Problem: forecasts err, so that shares are tried before they are held ([`super::trial`]). But what was measured once is
//! not true for ever: programs go on to other phases, and shares that helped hurt. Judging all the time costs too: while
//! the worse side of a comparison is in force, everybody runs slower. Method:
//! - Shares that divide the cache are compared anew with sharing it, from time to time, and at once when programs run
//!   clearly slower than in the windows alike by which they were judged, or when there are no windows alike.
//! - What a trial cost is measured, and nothing is tried again until that is no more than the stated share of the time
//!   since, and, after one that changed nothing, until another one like it is paid for as well. Every further one that
//!   changes nothing doubles the wait; a change, another phase or a fall of speed ends that.
//! - Hysteresis: shares are adopted where they are faster by the least gain and not by chance, and given up where sharing is as fast.
//! - What a process was measured to do with its units bounds its curve from then on ([`DemandCurve::bounded`]), so that what
//!   failed is not proposed again.
//!
//! Properties: trials cost at most the stated share of the time, but for the first with new co-runners; other co-runners forget all.

use std::collections::BTreeMap;

use cachemate_core::{CacheShare, ProcessId, ShareMember, View};

use super::ab_test::{AbArm, AbTest, AbTestLengths, AbTestStatus, CLEARLY, SettlingPeriod};
use super::demand_curve::{DemandCurve, MeasuredSpeed};
use super::partitioned_cache::{PartitionedCache, units_of};
use super::speed_history::{Ratio, SpeedRecord};

/// The processes on a cache with their phases, for which a judgment holds.
type ProcessPhases = Vec<(ProcessId, u32)>;

/// A change that is being judged.
struct ShareTrial {
    old: Vec<CacheShare>,
    new: Vec<CacheShare>,
    /// Shares that lead back to the old ones: undivided, where there were none.
    back: Vec<CacheShare>,
    trial: AbTest,
    /// The old ones are to prove themselves; the new ones are none.
    proof: bool,
}

impl ShareTrial {
    /// Shares of the present arm.
    fn shares(&self) -> &Vec<CacheShare> {
        match self.trial.arm() {
            AbArm::Old => &self.old,
            AbArm::New => &self.new,
            AbArm::OldAgain => &self.back,
        }
    }
}

/// What a process was measured to do with so many units, in which it was alone or not.
struct MeasuredBound {
    process: ProcessId,
    units: u32,
    own: bool,
    speed: MeasuredSpeed,
}

/// How the shares held did when they were judged; by which each speed counts.
struct AcceptedSpeeds {
    record: SpeedRecord,
    weights: Vec<(ProcessId, f64)>,
}

/// Time since the last trial.
#[derive(Clone, Copy, Debug, Default)]
struct TrialCooldown {
    windows: u32,
    /// Windows after which the trial's cost is within the stated share.
    paid_after: u32,
    /// Trials in a row that changed nothing.
    unchanged: u32,
    /// It is the turn of a proof, not of new shares.
    proof_next: bool,
}

/// Doublings of the wait at most.
const DOUBLED_AT_MOST: u32 = 6;

impl TrialCooldown {
    /// Begins when a trial has ended, one of so many in a row that changed nothing.
    fn after(trial: &AbTest, terms: TrialTerms, unchanged: u32, proof: bool) -> Self {
        let paid = libm::ceil(trial.lost_windows() / terms.trial_share).min(f64::from(u32::MAX)) as u32;
        TrialCooldown { windows: 0, paid_after: paid.max(trial.windows), unchanged, proof_next: !proof }
    }

    fn is_over(&self) -> bool {
        // What the next one may cost is paid before it begins.
        let doubled = self.unchanged.min(DOUBLED_AT_MOST);
        self.windows >= self.paid_after.saturating_mul(1 << doubled)
    }
}

/// How long the same programs stay in the same phases.
#[derive(Clone, Copy, Debug, Default)]
struct PhaseStability {
    windows: u32,
    /// Mean of the times before, the latest a quarter of it; `None` = nothing has changed yet.
    mean: Option<f64>,
}

impl PhaseStability {
    fn changed(&mut self) {
        let last = f64::from(std::mem::replace(&mut self.windows, 0));
        self.mean = Some(self.mean.map_or(last, |mean| mean + 0.25 * (last - mean)));
    }
}

/// Terms by which shares are judged.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TrialTerms {
    pub lengths: AbTestLengths,
    /// Shares are adopted where they are faster by this share.
    pub min_gain: f64,
    /// Share of the time that trials may cost.
    pub trial_share: f64,
}

/// Verdict of a trial, with the shares from now on.
pub struct ShareVerdict {
    pub shares: Vec<CacheShare>,
    /// Speed under the new shares over that under the old ones; `None` = they could not be compared.
    pub ratio: Option<Ratio>,
    /// What it cost, in windows' worth of the old shares' speed.
    pub lost_windows: f64,
    pub adopted: bool,
    pub proof: bool,
}

/// What a trial says of the next window.
pub enum TrialStatus {
    GoesOn(Vec<CacheShare>),
    Over(ShareVerdict),
}

/// What is remembered of one cache.
#[derive(Default)]
pub struct ShareController {
    /// Speeds under the shares held.
    pub speeds: SpeedRecord,
    /// The shares or the co-runners changed, and the cache is not full of what they keep.
    settling: Option<SettlingPeriod>,
    trial: Option<ShareTrial>,
    /// Somebody above took a trial back with these co-runners.
    rolled_back_with: Option<ProcessPhases>,
    co_runners: ProcessPhases,
    /// Units with which a promise was measured to be broken, the most of each process; with these co-runners.
    pub insufficient_units: BTreeMap<ProcessId, u32>,
    bounds: Vec<MeasuredBound>,
    proof: Option<AcceptedSpeeds>,
    /// `None` = nothing was tried with these co-runners.
    rest: Option<TrialCooldown>,
    lasting: PhaseStability,
}

impl ShareController {
    /// Takes a window in; the shares that are held on to.
    pub fn observe(&mut self, view: &View<'_>, domain: &PartitionedCache<'_>, terms: TrialTerms) -> Vec<CacheShare> {
        let mut held = domain.surviving_shares(&view.previous_plan.shares);
        self.lasting.windows += 1;
        let co_runners: ProcessPhases = domain.present.iter().map(|present| (present.process, present.phase)).collect();
        if co_runners != self.co_runners {
            let judged = terms.lengths.measure_windows > 0 && !domain.promised();
            self.lasting.changed();
            let unchanged = self.rest.map_or(0, |rest| rest.unchanged);
            self.forget(co_runners, judged);
            // What was not judged to the end does not stay, and is paid for all the same.
            if let Some(tried) = self.trial.take() {
                self.rest = Some(TrialCooldown::after(&tried.trial, terms, unchanged + 1, tried.proof));
                if tried.trial.arm() == AbArm::New {
                    held = domain.surviving_shares(&tried.back);
                    self.settling = Some(SettlingPeriod::default());
                }
            }
        }
        match &mut self.settling {
            Some(settling) if !settling.over => settling.observe(view.observation, domain.cache.level, terms.lengths),
            _ => {
                self.settling = None;
                self.speeds.add(view.observation, domain.cache.level, &view.previous_plan.probes);
            }
        }
        if let Some(rest) = &mut self.rest {
            rest.windows = rest.windows.saturating_add(1);
        }
        self.notice_a_fall(terms.lengths);
        held
    }

    /// Speeds of an old phase or of other co-runners are no evidence for this one. What trials cost stays owed by those
    /// who are still there.
    fn forget(&mut self, co_runners: ProcessPhases, judged: bool) {
        let processes = |co_runners: &ProcessPhases| co_runners.iter().map(|&(process, _)| process).collect::<Vec<_>>();
        if processes(&co_runners) != processes(&self.co_runners) {
            self.rest = None;
            // Newcomers find nothing of theirs in the cache, and the others' leavings are still there.
            self.settling = judged.then(SettlingPeriod::default).or(self.settling.take());
        }
        if let Some(rest) = &mut self.rest {
            rest.unchanged = 0;
        }
        self.speeds.forget();
        self.insufficient_units.clear();
        self.bounds.clear();
        self.proof = None;
        self.co_runners = co_runners;
    }

    fn notice_a_fall(&mut self, lengths: AbTestLengths) {
        let windows = 2 * lengths.measure_windows.max(1);
        let (Some(proof), Some(rest)) = (&self.proof, &mut self.rest) else { return };
        if self.trial.is_some() || self.speeds.windows < windows {
            return;
        }
        let now = self.speeds.latest(windows).speed_over(&proof.record, &proof.weights);
        if now.is_none_or(|found| found.ratio < 1.0 - CLEARLY && found.is_sure()) {
            (rest.unchanged, rest.proof_next) = (0, true);
        }
    }

    /// Is the cache still being filled after a change of shares or of co-runners?
    pub fn is_settling(&self) -> bool {
        self.settling.is_some()
    }

    /// The shares are changed now, untried.
    pub fn changed(&mut self) {
        self.speeds.forget();
        self.settling = Some(SettlingPeriod::default());
        self.proof = None;
    }

    /// May something be tried? Not where somebody above took it back: it is not for a policy to insist.
    pub fn can_start_trial(&self) -> bool {
        self.rolled_back_with.as_ref() != Some(&self.co_runners) && self.rest.is_none_or(|rest| rest.is_over())
    }

    /// Time for which what is known now is likely to hold; infinite where nothing has changed yet.
    pub fn expected_lifetime_ns(&self, window_ns: u64) -> f64 {
        let windows = self.lasting.mean.map(|mean| mean.max(f64::from(self.lasting.windows)));
        windows.map_or(f64::INFINITY, |windows| windows * window_ns as f64)
    }

    /// Is it the turn of the shares held, before new ones?
    pub fn proof_next(&self) -> bool {
        self.rest.is_some_and(|rest| rest.proof_next)
    }

    /// Tries the new shares from the next window on; `old` is held.
    pub fn try_out(
        &mut self,
        old: Vec<CacheShare>,
        new: Vec<CacheShare>,
        back: Vec<CacheShare>,
        trial: AbTest,
        proof: bool,
    ) {
        self.trial = Some(ShareTrial { old, new, back, trial: trial.after(&self.speeds), proof });
    }

    /// What is known of a process bounds its curve.
    pub fn bounded(&self, process: ProcessId, space: DemandCurve) -> DemandCurve {
        let mine = self.bounds.iter().filter(|bound| bound.process == process);
        mine.fold(space, |space, bound| space.bounded(bound.units, bound.speed, bound.own))
    }

    /// The window's say in a trial; `None` where nothing is on trial.
    pub fn judge(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        held: &[CacheShare],
        terms: TrialTerms,
    ) -> Option<TrialStatus> {
        let tried = self.trial.as_mut()?;
        if tried.shares() != held {
            (self.trial, self.rolled_back_with) = (None, Some(self.co_runners.clone()));
            self.changed();
            return Some(TrialStatus::GoesOn(held.to_vec()));
        }
        let status = tried.trial.add(view.observation, domain.cache.level, &view.previous_plan.probes);
        if status == AbTestStatus::GoesOn {
            return Some(TrialStatus::GoesOn(tried.shares().clone()));
        }
        let tried = self.trial.take()?;
        let ratio = if let AbTestStatus::Ratio(found) = status { Some(found) } else { None };
        // New shares have to be faster, and not by chance; held ones lose to sharing where they are not.
        let faster = |found: Ratio| found.ratio >= 1.0 + terms.min_gain && found.is_sure();
        let adopted = ratio.is_some_and(|found| if tried.proof { found.ratio >= 1.0 } else { faster(found) });
        Some(TrialStatus::Over(self.finish_trial(tried, domain, terms, ratio, adopted)))
    }

    fn finish_trial(
        &mut self,
        tried: ShareTrial,
        domain: &PartitionedCache<'_>,
        terms: TrialTerms,
        ratio: Option<Ratio>,
        adopted: bool,
    ) -> ShareVerdict {
        let ShareTrial { back, new, trial, proof, .. } = tried;
        let lost_windows = trial.lost_windows();
        let unchanged = if adopted { 0 } else { self.rest.map_or(0, |rest| rest.unchanged) + 1 };
        self.rest = Some(TrialCooldown::after(&trial, terms, unchanged, proof));
        if ratio.is_some() {
            self.learn(domain, &new, &trial);
        }
        let weights = trial.weights().to_vec();
        let (shares, speeds) = if adopted { (new, trial.new) } else { (back, trial.old_speeds()) };
        let divided = !domain.is_undivided(&shares);
        self.proof = (divided && ratio.is_some()).then(|| AcceptedSpeeds { record: speeds.clone(), weights });
        self.speeds = speeds;
        ShareVerdict { shares, ratio, lost_windows, adopted, proof }
    }

    fn learn(&mut self, domain: &PartitionedCache<'_>, shares: &[CacheShare], trial: &AbTest) {
        let old = trial.old_speeds();
        for share in shares.iter().filter(|share| units_of(share).count() < domain.divided.units()) {
            let (units, own) = (units_of(share).count(), share.members.len() == 1);
            for member in &share.members {
                let ShareMember::Process(process) = *member else { continue };
                let Some((speed, like)) = trial.new.speed(process).zip(trial.new.match_speeds(&old, process)) else {
                    continue;
                };
                self.bounds.retain(|bound| (bound.process, bound.units) != (process, units));
                let speed = MeasuredSpeed { cycles_per_instr: like.cycles_per_instr[0], ..speed };
                self.bounds.push(MeasuredBound { process, units, own, speed });
            }
        }
    }
}
