//! Composition of programs on one cache from their reuse times (StatCC; papers BS 2b).
//!
//! Problem: run times and miss ratios of any group are to be predicted before it has ever run together. Method:
//! [`cachemate_locality::statcc::solve_co_run`] uses StatStack (LRU and its approximations) or StatCache (random
//! replacement), according to the cache's own replacement, and solves miss ratios and speeds together. If the profile
//! has a measured curve, misses are read from it at the program's occupancy. `balance-set` is the older composition at
//! the programs' solo rates (BS 2b), for balance-set scheduling. Properties: the result is run time and miss ratios,
//! per program and of the group, for any number of programs. The cost of a group is not the sum of its pairs.

use cachemate_core::ReplacementModel;
use cachemate_core::{Profile, ReplacementPolicy};
use cachemate_locality::curve::MissRateCurve;
use cachemate_locality::reuse::ReuseTimes;
use cachemate_locality::statcc::{
    CoRunner, SharedMissRatios, lru_at_rates, random_at_rates, solve_co_run,
};

use super::shared_cache::{SharedCache, SoloRates, refs_per_mega_instr};
use super::{GroupCosts, MissingEvidence, Scheme, gather_evidence};
use crate::matrix::CostKind;

/// The scheme of StatCC, with speeds solved jointly or fixed at their solo values.
pub struct StatCc {
    /// Whether speeds and miss ratios are solved together; otherwise, solo speeds are used.
    pub solves_jointly: bool,
}

/// Evidence of a member, and its solo speed at the model's own solo miss ratio, so that the member has no slowdown
/// alone.
struct MemberModel {
    reuse: ReuseTimes,
    /// Miss ratio by number of lines, if the profile has a curve that reaches the cache's size.
    curve_ratios: Vec<(f64, f64)>,
    solo: SoloRates,
    base_cycles_per_instr: f64,
}

fn replacement_model(cache: &SharedCache) -> ReplacementModel {
    match cache.replacement {
        ReplacementPolicy::Random => ReplacementModel::Random,
        ReplacementPolicy::Lru
        | ReplacementPolicy::TreePlru
        | ReplacementPolicy::Srrip
        | ReplacementPolicy::Drrip => ReplacementModel::Lru,
    }
}

fn solo_rate_ratios(
    programs: &[(&ReuseTimes, f64)],
    cache: &SharedCache,
) -> Option<SharedMissRatios> {
    match replacement_model(cache) {
        ReplacementModel::Random => random_at_rates(programs, cache.lines()),
        ReplacementModel::Lru => lru_at_rates(programs, cache.lines()),
    }
}

/// The profile's curve as miss ratios by number of lines, with a point at the cache's own size. Empty if the curve does
/// not reach that size, or if the cache does not replace by LRU, which the curve assumes.
fn measured_ratios(profile: &Profile, cache: &SharedCache, refs_per_instr: f64) -> Vec<(f64, f64)> {
    let curve = profile
        .misses_per_kilo_instr()
        .and_then(|points| MissRateCurve::from_profile(points).ok());
    let mpki_at_size = curve
        .as_ref()
        .and_then(|curve| curve.rate_at(cache.size_bytes));
    let (Some(curve), Some(mpki_at_size), ReplacementModel::Lru) =
        (curve, mpki_at_size, replacement_model(cache))
    else {
        return Vec::new();
    };

    let miss_ratio_of = |rate: f64| (rate / 1000.0 / refs_per_instr).clamp(0.0, 1.0);
    let lines_of_bytes = |size_bytes: u64| (size_bytes / u64::from(cache.line_bytes.max(1))) as f64;
    let points_below = curve
        .points()
        .iter()
        .filter(|&&(size_bytes, _)| lines_of_bytes(size_bytes) < lines_of_bytes(cache.size_bytes));
    let mut ratios: Vec<(f64, f64)> = points_below
        .map(|&(size_bytes, rate)| (lines_of_bytes(size_bytes), miss_ratio_of(rate)))
        .collect();
    ratios.push((
        lines_of_bytes(cache.size_bytes),
        miss_ratio_of(mpki_at_size),
    ));
    ratios
}

impl MemberModel {
    fn from_profile(profile: &Profile, cache: &SharedCache, needs_curve: bool) -> Option<Self> {
        let reuse = ReuseTimes::from_profile(profile.reuse_times()?)?;
        let refs_per_instr = refs_per_mega_instr(profile).filter(|&refs| refs > 0.0)? * 1e-6;
        let curve_ratios = if needs_curve {
            measured_ratios(profile, cache, refs_per_instr)
        } else {
            Vec::new()
        };
        let curve_ratio_at_size = curve_ratios
            .iter()
            .find(|&&(lines, _)| lines == cache.lines() as f64)
            .map(|&(_, ratio)| ratio);

        let solo_miss_ratio = match curve_ratio_at_size {
            Some(ratio) => ratio,
            None => solo_rate_ratios(&[(&reuse, 1.0)], cache)?.group_miss_ratio,
        };
        let solo = SoloRates::from_rates(
            profile,
            cache,
            refs_per_instr,
            refs_per_instr * solo_miss_ratio,
        );
        Some(MemberModel {
            reuse,
            curve_ratios,
            solo,
            base_cycles_per_instr: solo.base_cycles_per_instr(cache),
        })
    }

    fn as_co_runner(&self) -> CoRunner<'_> {
        CoRunner {
            reuse: &self.reuse,
            measured_ratios: &self.curve_ratios,
            refs_per_instr: self.solo.refs_per_instr,
            base_cycles_per_instr: self.base_cycles_per_instr,
            miss_cycles: self.solo.miss_cycles,
        }
    }

    /// The reuse times and the solo accesses per cycle.
    fn solo_reuses(&self) -> (&ReuseTimes, f64) {
        (
            &self.reuse,
            self.solo.refs_per_instr / self.solo.cycles_per_instr,
        )
    }

    fn slowdown_at(&self, miss_ratio: f64) -> f64 {
        self.solo.slowdown_from_misses(
            (self.solo.refs_per_instr * miss_ratio - self.solo.misses_per_instr).max(0.0),
        )
    }
}

impl StatCc {
    /// The slowdowns and miss ratios of one or more programs; `None` if the cache has no lines.
    fn compose(
        &self,
        models: &[MemberModel],
        cache: &SharedCache,
    ) -> Option<(Vec<f64>, SharedMissRatios)> {
        if self.solves_jointly {
            let co_runners: Vec<CoRunner<'_>> =
                models.iter().map(MemberModel::as_co_runner).collect();
            let solution = solve_co_run(&co_runners, cache.lines(), replacement_model(cache))?;
            return Some((solution.degradation, solution.shared_ratios));
        }
        let rates: Vec<(&ReuseTimes, f64)> = models.iter().map(MemberModel::solo_reuses).collect();
        let shared_ratios = solo_rate_ratios(&rates, cache)?;
        let slowdowns = models
            .iter()
            .zip(&shared_ratios.miss_ratios)
            .map(|(model, &ratio)| model.slowdown_at(ratio));
        Some((slowdowns.collect(), shared_ratios))
    }
}

impl Scheme for StatCc {
    fn name(&self) -> &'static str {
        if self.solves_jointly {
            "statcc"
        } else {
            "balance-set"
        }
    }

    fn group_costs(
        &self,
        members: &[&Profile],
        cache: &SharedCache,
    ) -> Result<GroupCosts, MissingEvidence> {
        let subject = "reuse times and references per instruction";
        let models = gather_evidence(self, members, subject, |profile| {
            MemberModel::from_profile(profile, cache, self.solves_jointly)
        })?;
        if models.is_empty() {
            return Ok(GroupCosts::sum_of_pairs(
                CostKind::Degradation,
                0,
                |_, _| 0.0,
            ));
        }

        let subject = "rates that are positive numbers";
        let missing_rates = MissingEvidence {
            scheme: self.name(),
            program: 0,
            what: subject,
        };
        let (slowdowns, shared_ratios) = self.compose(&models, cache).ok_or(missing_rates)?;
        Ok(GroupCosts {
            kind: CostKind::Degradation,
            costs: slowdowns,
            miss_ratios: Some(shared_ratios.miss_ratios),
            group_miss_ratio: Some(shared_ratios.group_miss_ratio),
        })
    }
}
