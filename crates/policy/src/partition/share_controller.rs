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
//! - What a process was measured to do with its units bounds its curve from then on ([`Space::bounded`]), so that what
//!   failed is not proposed again.
//!
//! Properties: trials cost at most the stated share of the time, but for the first with new co-runners; other co-runners forget all.

use std::collections::BTreeMap;

use cachemate_core::{CacheShare, Member, ProcessId, View};

use super::ab_test::{AbTest, Arm, CLEARLY, Lengths, Outcome, Settling};
use super::demand_curve::{Space, Speed};
use super::divided_cache::{DividedCache, units_of};
use super::speed_history::{Ratio, SpeedRecord};

/// The processes on a cache with their phases, for which a judgment holds.
type Present = Vec<(ProcessId, u32)>;

/// A change that is being judged.
struct Tried {
    old: Vec<CacheShare>,
    new: Vec<CacheShare>,
    /// Shares that lead back to the old ones: undivided, where there were none.
    back: Vec<CacheShare>,
    trial: AbTest,
    /// The old ones are to prove themselves; the new ones are none.
    proof: bool,
}

impl Tried {
    /// Shares of the present arm.
    fn shares(&self) -> &Vec<CacheShare> {
        match self.trial.arm() {
            Arm::Old => &self.old,
            Arm::New => &self.new,
            Arm::OldAgain => &self.back,
        }
    }
}

/// What a process was measured to do with so many units, in which it was alone or not.
struct Bound {
    process: ProcessId,
    units: u32,
    own: bool,
    speed: Speed,
}

/// How the shares held did when they were judged; by which each speed counts.
struct Proof {
    record: SpeedRecord,
    weights: Vec<(ProcessId, f64)>,
}

/// Time since the last trial.
#[derive(Clone, Copy, Debug, Default)]
struct Rest {
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

impl Rest {
    /// Begins when a trial has ended, one of so many in a row that changed nothing.
    fn after(trial: &AbTest, terms: Terms, unchanged: u32, proof: bool) -> Self {
        let paid = libm::ceil(trial.lost_windows() / terms.trial_share).min(f64::from(u32::MAX)) as u32;
        Rest { windows: 0, paid_after: paid.max(trial.windows), unchanged, proof_next: !proof }
    }

    fn is_over(&self) -> bool {
        // What the next one may cost is paid before it begins.
        let doubled = self.unchanged.min(DOUBLED_AT_MOST);
        self.windows >= self.paid_after.saturating_mul(1 << doubled)
    }
}

/// How long the same programs stay in the same phases.
#[derive(Clone, Copy, Debug, Default)]
struct Lasting {
    windows: u32,
    /// Mean of the times before, the latest a quarter of it; `None` = nothing has changed yet.
    mean: Option<f64>,
}

impl Lasting {
    fn changed(&mut self) {
        let last = f64::from(std::mem::replace(&mut self.windows, 0));
        self.mean = Some(self.mean.map_or(last, |mean| mean + 0.25 * (last - mean)));
    }
}

/// Terms by which shares are judged.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Terms {
    pub lengths: Lengths,
    /// Shares are adopted where they are faster by this share.
    pub least_gain: f64,
    /// Share of the time that trials may cost.
    pub trial_share: f64,
}

/// Verdict of a trial, with the shares from now on.
pub struct Verdict {
    pub shares: Vec<CacheShare>,
    /// Speed under the new shares over that under the old ones; `None` = they could not be compared.
    pub ratio: Option<Ratio>,
    /// What it cost, in windows' worth of the old shares' speed.
    pub lost_windows: f64,
    pub adopted: bool,
    pub proof: bool,
}

/// What a trial says of the next window.
pub enum Judged {
    GoesOn(Vec<CacheShare>),
    Over(Verdict),
}

/// What is remembered of one cache.
#[derive(Default)]
pub struct Judging {
    /// Speeds under the shares held.
    pub speeds: SpeedRecord,
    /// The shares or the co-runners changed, and the cache is not full of what they keep.
    settling: Option<Settling>,
    tried: Option<Tried>,
    /// Somebody above took a trial back with these co-runners.
    left: Option<Present>,
    co_runners: Present,
    /// Units with which a promise was measured to be broken, the most of each process; with these co-runners.
    pub too_few: BTreeMap<ProcessId, u32>,
    bounds: Vec<Bound>,
    proof: Option<Proof>,
    /// `None` = nothing was tried with these co-runners.
    rest: Option<Rest>,
    lasting: Lasting,
}

impl Judging {
    /// Takes a window in; the shares that are held on to.
    pub fn follow(&mut self, view: &View<'_>, domain: &DividedCache<'_>, terms: Terms) -> Vec<CacheShare> {
        let mut held = domain.kept(&view.previous_plan.shares);
        self.lasting.windows += 1;
        let co_runners: Present = domain.present.iter().map(|present| (present.process, present.phase)).collect();
        if co_runners != self.co_runners {
            let judged = terms.lengths.judge_windows > 0 && !domain.promised();
            self.lasting.changed();
            let unchanged = self.rest.map_or(0, |rest| rest.unchanged);
            self.forget(co_runners, judged);
            // What was not judged to the end does not stay, and is paid for all the same.
            if let Some(tried) = self.tried.take() {
                self.rest = Some(Rest::after(&tried.trial, terms, unchanged + 1, tried.proof));
                if tried.trial.arm() == Arm::New {
                    held = domain.kept(&tried.back);
                    self.settling = Some(Settling::default());
                }
            }
        }
        match &mut self.settling {
            Some(settling) if !settling.over => settling.take(view.seen, domain.cache.level, terms.lengths),
            _ => {
                self.settling = None;
                self.speeds.add(view.seen, domain.cache.level, &view.previous_plan.probes);
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
    fn forget(&mut self, co_runners: Present, judged: bool) {
        let processes = |co_runners: &Present| co_runners.iter().map(|&(process, _)| process).collect::<Vec<_>>();
        if processes(&co_runners) != processes(&self.co_runners) {
            self.rest = None;
            // Newcomers find nothing of theirs in the cache, and the others' leavings are still there.
            self.settling = judged.then(Settling::default).or(self.settling.take());
        }
        if let Some(rest) = &mut self.rest {
            rest.unchanged = 0;
        }
        self.speeds.forget();
        self.too_few.clear();
        self.bounds.clear();
        self.proof = None;
        self.co_runners = co_runners;
    }

    fn notice_a_fall(&mut self, lengths: Lengths) {
        let windows = 2 * lengths.judge_windows.max(1);
        let (Some(proof), Some(rest)) = (&self.proof, &mut self.rest) else { return };
        if self.tried.is_some() || self.speeds.windows < windows {
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
        self.settling = Some(Settling::default());
        self.proof = None;
    }

    /// May something be tried? Not where somebody above took it back: it is not for a policy to insist.
    pub fn may_try(&self) -> bool {
        self.left.as_ref() != Some(&self.co_runners) && self.rest.is_none_or(|rest| rest.is_over())
    }

    /// Time for which what is known now is likely to hold; infinite where nothing has changed yet.
    pub fn lasts_ns(&self, window_ns: u64) -> f64 {
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
        self.tried = Some(Tried { old, new, back, trial: trial.after(&self.speeds), proof });
    }

    /// What is known of a process bounds its curve.
    pub fn bounded(&self, process: ProcessId, space: Space) -> Space {
        let mine = self.bounds.iter().filter(|bound| bound.process == process);
        mine.fold(space, |space, bound| space.bounded(bound.units, bound.speed, bound.own))
    }

    /// The window's say in a trial; `None` where nothing is on trial.
    pub fn judge(
        &mut self,
        view: &View<'_>,
        domain: &DividedCache<'_>,
        held: &[CacheShare],
        terms: Terms,
    ) -> Option<Judged> {
        let tried = self.tried.as_mut()?;
        if tried.shares() != held {
            (self.tried, self.left) = (None, Some(self.co_runners.clone()));
            self.changed();
            return Some(Judged::GoesOn(held.to_vec()));
        }
        let said = tried.trial.add(view.seen, domain.cache.level, &view.previous_plan.probes);
        if said == Outcome::GoesOn {
            return Some(Judged::GoesOn(tried.shares().clone()));
        }
        let tried = self.tried.take()?;
        let found = if let Outcome::Ratio(found) = said { Some(found) } else { None };
        // New shares have to be faster, and not by chance; held ones lose to sharing where they are not.
        let faster = |found: Ratio| found.ratio >= 1.0 + terms.least_gain && found.is_sure();
        let adopted = found.is_some_and(|found| if tried.proof { found.ratio >= 1.0 } else { faster(found) });
        Some(Judged::Over(self.over(tried, domain, terms, found, adopted)))
    }

    fn over(
        &mut self,
        tried: Tried,
        domain: &DividedCache<'_>,
        terms: Terms,
        ratio: Option<Ratio>,
        adopted: bool,
    ) -> Verdict {
        let Tried { back, new, trial, proof, .. } = tried;
        let lost_windows = trial.lost_windows();
        let unchanged = if adopted { 0 } else { self.rest.map_or(0, |rest| rest.unchanged) + 1 };
        self.rest = Some(Rest::after(&trial, terms, unchanged, proof));
        if ratio.is_some() {
            self.learn(domain, &new, &trial);
        }
        let weights = trial.weights().to_vec();
        let (shares, speeds) = if adopted { (new, trial.new) } else { (back, trial.old()) };
        let divided = !domain.is_undivided(&shares);
        self.proof = (divided && ratio.is_some()).then(|| Proof { record: speeds.clone(), weights });
        self.speeds = speeds;
        Verdict { shares, ratio, lost_windows, adopted, proof }
    }

    fn learn(&mut self, domain: &DividedCache<'_>, shares: &[CacheShare], trial: &AbTest) {
        let old = trial.old();
        for share in shares.iter().filter(|share| units_of(share).count() < domain.divided.units()) {
            let (units, own) = (units_of(share).count(), share.members.len() == 1);
            for member in &share.members {
                let Member::Process(process) = *member else { continue };
                let Some((speed, like)) = trial.new.speed(process).zip(trial.new.like(&old, process)) else {
                    continue;
                };
                self.bounds.retain(|bound| (bound.process, bound.units) != (process, units));
                let speed = Speed { cycles_per_instr: like.cycles_per_instr[0], ..speed };
                self.bounds.push(Bound { process, units, own, speed });
            }
        }
    }
}
