//! Predicts the behavior of several programs on one cache from their solo behavior (papers BS 2;
//! StatCC: Eklov, Black-Schaffer and Hagersten 2011).
//!
//! No component allocates a shared cache; occupancies result from the rates at which programs touch
//! lines. So what a program finds in the cache depends on how much the others do between two of its
//! own accesses: while program i makes one access, all programs together make R / r_i, where r are
//! access rates and R is their sum.
//! - For random replacement ([`random_at_rates`], BS 2b), each program's reuse times are stretched
//!   by R / r_i, and one StatCache equation is solved for the overall miss ratio M = Σ (r_i / R)
//!   m_i.
//! - For LRU ([`lru_at_rates`]), program j touches lines_j(r_j τ) distinct lines in a window of τ
//!   cycles. The cache contains the lines touched in the last τ for which these add up to its size,
//!   so i misses the reuses longer than r_i τ.
//! - Rates depend on speed, and speed on misses ([`solve_co_run`], StatCC proper). With CPI_i =
//!   base_i + refs_i · m_i · miss_cycles_i and r_i = refs_i / CPI_i, miss ratios, speeds and rates
//!   are solved together.
//!
//! For example, program 1 makes three accesses while program 2 makes one. A line that program 1
//! reuses after 30 of its own accesses is reused after 40 of both, and one that program 2 reuses
//! after 30 of its own after 120, so the slower program loses more of its lines.
//!
//! There may be two solutions: a program that hits is fast, and a fast one keeps its lines. A cache
//! starts cold, so the search starts from the speeds at which the programs fill an empty cache,
//! where every first touch is a miss.
//!
//! Programs share no data (separate address spaces). One program alone gives exactly the
//! single-program models. Renaming programs renames the result. Lines are those of the cache; rates
//! may be in any common unit of time.

use cachemate_core::ReplacementModel;

use crate::reuse::ReuseTimes;
use crate::statcache::{self, CacheSharer};
use crate::statstack::StackModel;

/// Miss ratios (0 to 1, of the cache's accesses) of programs that share a cache.
#[derive(Clone, PartialEq, Debug)]
pub struct SharedMissRatios {
    /// Miss ratio of each program, in the order given.
    pub miss_ratios: Vec<f64>,
    /// Miss ratio of all accesses together.
    pub group_miss_ratio: f64,
}

/// Reuse times of a program, and its accesses to the cache per unit of time.
pub type ReuseAtRate<'a> = (&'a ReuseTimes, f64);

fn total_rate(programs: &[ReuseAtRate<'_>]) -> Option<f64> {
    let is_valid =
        |&(reuse, rate): &ReuseAtRate<'_>| rate.is_finite() && rate > 0.0 && reuse.samples() > 0.0;
    (!programs.is_empty() && programs.iter().all(is_valid))
        .then(|| programs.iter().map(|(_, rate)| rate).sum())
}

/// Solves random replacement at fixed access rates. Returns `None` without programs or lines, or if a program has no
/// samples or no positive rate.
pub fn random_at_rates(programs: &[ReuseAtRate<'_>], lines: u64) -> Option<SharedMissRatios> {
    let group_rate = total_rate(programs)?;
    let sharers: Vec<CacheSharer<'_>> = programs
        .iter()
        .map(|&(reuse, rate)| CacheSharer {
            reuse,
            access_share: rate / group_rate,
            reuse_stretch: group_rate / rate,
        })
        .collect();
    let group_miss_ratio = statcache::total_miss_ratio(&sharers, lines)?;
    let miss_ratio_of = |sharer| statcache::misses_at(sharer, group_miss_ratio, lines).0;
    Some(SharedMissRatios {
        miss_ratios: sharers.iter().map(miss_ratio_of).collect(),
        group_miss_ratio,
    })
}

/// Solves LRU at fixed access rates. Returns `None` in the same cases as [`random_at_rates`].
pub fn lru_at_rates(programs: &[ReuseAtRate<'_>], lines: u64) -> Option<SharedMissRatios> {
    total_rate(programs)?;
    let models: Vec<StackModel> = programs
        .iter()
        .map(|(reuse, _)| StackModel::new(reuse))
        .collect::<Option<_>>()?;
    let rates: Vec<f64> = programs.iter().map(|&(_, rate)| rate).collect();
    (lines > 0).then(|| solve_lru(&models, &[], &rates, lines))
}

/// Measured miss ratios by the number of lines that a program has to itself, ascending. If empty, only the model is
/// used.
pub type MeasuredMissRatios<'a> = &'a [(f64, f64)];

/// The measured miss ratio at this number of lines.
///
/// Between two measured sizes, it is interpolated in the shape of the model's curve, or linearly if that curve is flat
/// there. Without lines, every access misses; beyond the largest size, the ratio is constant.
fn measured_or_modeled(
    measured_ratios: MeasuredMissRatios<'_>,
    model: &StackModel,
    lines: f64,
) -> f64 {
    let upper_index = measured_ratios.partition_point(|&(size, _)| size < lines);
    let (low, ratio_low) = upper_index
        .checked_sub(1)
        .map_or((0.0, 1.0), |index| measured_ratios[index]);
    let Some(&(high, ratio_high)) = measured_ratios.get(upper_index) else {
        return ratio_low;
    };
    if high <= low {
        return ratio_high;
    }
    let modeled_ratios = [low, lines, high].map(|lines| model.miss_ratio_at(lines));
    let modeled_fall = modeled_ratios[0] - modeled_ratios[2];
    let fraction = if modeled_fall > 1e-9 {
        (modeled_ratios[0] - modeled_ratios[1]) / modeled_fall
    } else {
        (lines - low) / (high - low)
    };
    ratio_low + fraction.clamp(0.0, 1.0) * (ratio_high - ratio_low)
}

/// Miss ratios under LRU. Each program holds the lines that it touched within the time in which the programs fill the
/// cache, and misses as it would alone with that number of lines.
fn solve_lru(
    models: &[StackModel],
    measured_ratios: &[MeasuredMissRatios<'_>],
    rates: &[f64],
    lines: u64,
) -> SharedMissRatios {
    let fill_time = time_to_fill(models, rates, lines as f64);
    let miss_ratio_of = |(index, model): (usize, &StackModel)| {
        let accesses = fill_time.map_or(f64::INFINITY, |time| time * rates[index]);
        match measured_ratios.get(index) {
            Some(measured) if !measured.is_empty() => {
                let occupancy_lines =
                    fill_time.map_or(lines as f64, |_| model.lines_in(accesses).min(lines as f64));
                measured_or_modeled(measured, model, occupancy_lines)
            }
            _ => model.late_reuse_fraction(accesses),
        }
    };
    let miss_ratios: Vec<f64> = models.iter().enumerate().map(miss_ratio_of).collect();
    let group_rate: f64 = rates.iter().sum();
    let group_miss_ratio = miss_ratios
        .iter()
        .zip(rates)
        .map(|(ratio, rate)| ratio * rate / group_rate)
        .sum();
    SharedMissRatios {
        miss_ratios,
        group_miss_ratio,
    }
}

/// The time in which the programs together touch this many distinct lines; `None` if they never do.
fn time_to_fill(models: &[StackModel], rates: &[f64], lines: f64) -> Option<f64> {
    if let [model] = models {
        return Some(model.accesses_to_touch(lines)? / rates[0]);
    }
    let lines_touched = |time: f64| {
        models
            .iter()
            .zip(rates)
            .map(|(model, rate)| model.lines_in(time * rate))
            .sum::<f64>()
    };
    // A program alone takes at least as long, so the fastest program bounds the result from above. If there is no
    // bound, double the time until it suffices.
    let solo_fill_time =
        |(model, rate): (&StackModel, &f64)| Some(model.accesses_to_touch(lines)? / rate);
    let shortest_fill_time = models
        .iter()
        .zip(rates)
        .filter_map(solo_fill_time)
        .min_by(f64::total_cmp);
    let total_lines = models.iter().map(|model| model.max_lines()).sum::<f64>();
    if shortest_fill_time.is_none() && total_lines < lines - 1e-9 * (1.0 + lines) {
        return None;
    }
    let longest_reuse_end = models
        .iter()
        .zip(rates)
        .map(|(model, rate)| model.max_reuse_time() / rate)
        .fold(0.0, f64::max);
    Some(bisect(
        0.0,
        shortest_fill_time.unwrap_or(longest_reuse_end),
        |time| lines_touched(time) < lines,
    ))
}

/// A program as an input of [`solve_co_run`].
#[derive(Clone, Copy, Debug)]
pub struct CoRunner<'a> {
    /// Reuse times of the program's accesses to the shared cache, sampled while it ran alone.
    pub reuse: &'a ReuseTimes,
    /// Measured solo miss ratios on an LRU cache.
    ///
    /// StatStack assumes one phase, and misjudges a program that has several. Its footprint then still determines how
    /// much of the cache it occupies, and this curve determines its misses there (the natural partition of Xiang, Ding,
    /// Luo and Bao 2013).
    pub measured_ratios: MeasuredMissRatios<'a>,
    /// Accesses to the shared cache per instruction.
    pub refs_per_instr: f64,
    /// Cycles per instruction without misses of the shared cache.
    pub base_cycles_per_instr: f64,
    /// Cost of one miss in cycles: latency beyond a hit, divided by the number of misses that overlap.
    pub miss_cycles: f64,
}

impl CoRunner<'_> {
    fn cycles_per_instr(&self, miss_ratio: f64) -> f64 {
        self.base_cycles_per_instr + self.refs_per_instr * miss_ratio * self.miss_cycles
    }
}

/// The estimated miss ratios and speeds of programs that share one cache.
#[derive(Clone, PartialEq, Debug)]
pub struct CoRunEstimate {
    /// Miss ratios on the shared cache at these speeds.
    pub shared_ratios: SharedMissRatios,
    /// Cycles per instruction of each program, in the order given.
    pub cycles_per_instr: Vec<f64>,
    /// Slowdown of each program: run time beside the others over solo run time, minus one.
    pub degradation: Vec<f64>,
}

impl CoRunEstimate {
    fn new(
        shared_ratios: SharedMissRatios,
        cycles_per_instr: Vec<f64>,
        solo_cycles: &[f64],
    ) -> Self {
        let slowdown = |(shared, alone): (&f64, &f64)| shared / alone - 1.0;
        let degradation = cycles_per_instr.iter().zip(solo_cycles).map(slowdown);
        CoRunEstimate {
            shared_ratios,
            degradation: degradation.collect(),
            cycles_per_instr,
        }
    }
}

/// The miss ratios at which the programs have these cycles per instruction and rates; that of `ratios` for a program whose
/// misses cost nothing.
fn ratios_at_speeds(
    programs: &[CoRunner<'_>],
    cycles: &[f64],
    rates: &[f64],
    mut ratios: SharedMissRatios,
) -> SharedMissRatios {
    for ((program, cpi), ratio) in programs.iter().zip(cycles).zip(&mut ratios.miss_ratios) {
        let cycles_per_ratio = program.refs_per_instr * program.miss_cycles;
        if cycles_per_ratio > 0.0 {
            *ratio = (cpi - program.base_cycles_per_instr) / cycles_per_ratio;
        }
    }
    let group_rate: f64 = rates.iter().sum();
    let misses = ratios.miss_ratios.iter().zip(rates);
    ratios.group_miss_ratio = misses.map(|(ratio, rate)| ratio * rate / group_rate).sum();
    ratios
}

/// Miss ratios and speeds that are consistent with each other.
///
/// `None` without programs or lines, if a program has no samples, or if one of its figures is not positive;
/// `miss_cycles` may be 0.
pub fn solve_co_run(
    programs: &[CoRunner<'_>],
    lines: u64,
    replacement_model: ReplacementModel,
) -> Option<CoRunEstimate> {
    let is_positive = |x: f64| x.is_finite() && x > 0.0;
    let is_valid = |p: &CoRunner<'_>| {
        is_positive(p.refs_per_instr)
            && is_positive(p.base_cycles_per_instr)
            && p.miss_cycles >= 0.0
            && p.miss_cycles.is_finite()
    };
    if programs.is_empty() || lines == 0 || !programs.iter().all(is_valid) {
        return None;
    }
    let models: Vec<StackModel> = programs
        .iter()
        .map(|p| StackModel::new(p.reuse))
        .collect::<Option<_>>()?;
    let measured_ratios: Vec<MeasuredMissRatios<'_>> = programs
        .iter()
        .map(|program| program.measured_ratios)
        .collect();
    let solve_at_rates = |rates: &[f64]| match replacement_model {
        ReplacementModel::Lru => Some(solve_lru(&models, &measured_ratios, rates, lines)),
        ReplacementModel::Random => {
            let programs_at_rates: Vec<ReuseAtRate<'_>> = programs
                .iter()
                .zip(rates)
                .map(|(p, &rate)| (p.reuse, rate))
                .collect();
            random_at_rates(&programs_at_rates, lines)
        }
    };
    let solo_cycles_per_instr = |(program, model): (&CoRunner<'_>, &StackModel)| {
        let ratio = match replacement_model {
            ReplacementModel::Lru if !program.measured_ratios.is_empty() => Some(
                measured_or_modeled(program.measured_ratios, model, lines as f64),
            ),
            ReplacementModel::Lru => Some(model.miss_ratio(lines)),
            ReplacementModel::Random => statcache::miss_ratio(program.reuse, lines),
        };
        Some(program.cycles_per_instr(ratio?))
    };
    let solo_cycles: Vec<f64> = programs
        .iter()
        .zip(&models)
        .map(solo_cycles_per_instr)
        .collect::<Option<_>>()?;
    let mut cycles = filling_cycles_per_instr(programs, &models, lines as f64);
    for round in 0..400 {
        let rates: Vec<f64> = programs
            .iter()
            .zip(&cycles)
            .map(|(p, cpi)| p.refs_per_instr / cpi)
            .collect();
        let shared_ratios = solve_at_rates(&rates)?;
        let next_cycles: Vec<f64> = programs
            .iter()
            .zip(&shared_ratios.miss_ratios)
            .map(|(p, &ratio)| p.cycles_per_instr(ratio))
            .collect();
        let change = cycles
            .iter()
            .zip(&next_cycles)
            .map(|(previous_cpi, current_cpi)| (current_cpi - previous_cpi).abs() / current_cpi)
            .fold(0.0, f64::max);
        if change < 1e-9 {
            return Some(CoRunEstimate::new(shared_ratios, next_cycles, &solo_cycles));
        }
        if round == 399 {
            // No speeds are consistent where a miss ratio jumps: the programs alternate between its sides, so that their mean is
            // that of the small steps around it.
            let shared_ratios = ratios_at_speeds(programs, &cycles, &rates, shared_ratios);
            return Some(CoRunEstimate::new(shared_ratios, cycles, &solo_cycles));
        }
        // If reuse times cluster, a miss ratio can jump; smaller steps later on keep it from oscillating.
        let step = if round < 40 {
            0.5
        } else {
            20.0 / f64::from(round)
        };
        cycles
            .iter_mut()
            .zip(&next_cycles)
            .for_each(|(cpi, next)| *cpi += step * (next - *cpi));
    }
    None
}

/// Cycles per instruction of each program while the programs together fill an empty cache, when first touches miss and
/// all other accesses hit.
fn filling_cycles_per_instr(
    programs: &[CoRunner<'_>],
    models: &[StackModel],
    lines: f64,
) -> Vec<f64> {
    let cycles_for = |program_index: usize, accesses: f64| {
        accesses * programs[program_index].base_cycles_per_instr
            / programs[program_index].refs_per_instr
            + models[program_index].lines_in(accesses) * programs[program_index].miss_cycles
    };
    let accesses_within = |program_index: usize, time: f64| {
        let max_accesses = time * programs[program_index].refs_per_instr
            / programs[program_index].base_cycles_per_instr;
        bisect(0.0, max_accesses, |accesses| {
            cycles_for(program_index, accesses) < time
        })
    };
    let lines_touched = |time: f64| {
        let lines_of = |program_index: usize| {
            models[program_index].lines_in(accesses_within(program_index, time))
        };
        (0..models.len()).map(lines_of).sum::<f64>()
    };
    // By then, even the program with the longest reuse times has shown them all; programs that fit never fill the
    // cache.
    let max_time = (0..models.len())
        .map(|index| cycles_for(index, models[index].max_reuse_time() + lines))
        .fold(1.0, f64::max);
    let fill_time = bisect(0.0, max_time, |time| lines_touched(time) < lines);
    let cycles_per_instr_of = |(at, program): (usize, &CoRunner<'_>)| {
        fill_time * program.refs_per_instr / accesses_within(at, fill_time)
    };
    programs
        .iter()
        .enumerate()
        .map(cycles_per_instr_of)
        .collect()
}

/// The point at which `is_below` becomes false between `low_bound` (excluded) and `high_bound`, to the last few bits.
fn bisect(mut low_bound: f64, mut high_bound: f64, is_below: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..60 {
        let middle = 0.5 * (low_bound + high_bound);
        if is_below(middle) {
            low_bound = middle
        } else {
            high_bound = middle
        }
    }
    high_bound
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reuse::ReuseSampler;
    use cachemate_core::SplitMix64;
    use proptest::prelude::*;

    /// The endless access stream of a synthetic program.
    #[derive(Clone)]
    enum AccessPattern {
        Cycle(u64),
        Skewed(u64),
        HotAndStream(u64),
    }
    struct SyntheticProgram {
        pattern: AccessPattern,
        position: u64,
        random: SplitMix64,
    }
    impl SyntheticProgram {
        fn new(pattern: AccessPattern, seed: u64) -> Self {
            SyntheticProgram {
                pattern,
                position: 0,
                random: SplitMix64::new(seed),
            }
        }
        fn next(&mut self) -> u64 {
            self.position += 1;
            match self.pattern {
                AccessPattern::Cycle(lines) => self.position % lines,
                AccessPattern::Skewed(lines) => {
                    self.random.draw_below(lines) * self.random.draw_below(lines) / lines
                }
                AccessPattern::HotAndStream(lines) if self.position.is_multiple_of(2) => {
                    self.random.draw_below(lines)
                }
                AccessPattern::HotAndStream(_) => 1_000_000 + self.position,
            }
        }
        fn sampled_reuse(pattern: &AccessPattern, one_in: u32) -> ReuseTimes {
            let (mut program, mut sampler) = (
                SyntheticProgram::new(pattern.clone(), 99),
                ReuseSampler::new(one_in, 1),
            );
            (0..200_000).for_each(|_| sampler.touch(program.next()));
            sampler.finish()
        }
    }

    struct OracleCache {
        /// Resident lines; with LRU, the most recently used line is last, with random replacement, the order has no
        /// meaning.
        stored_lines: Vec<u64>,
        lines: usize,
        random: Option<SplitMix64>,
    }
    impl OracleCache {
        fn is_miss(&mut self, line: u64) -> bool {
            let position = self
                .stored_lines
                .iter()
                .rposition(|&stored_line| stored_line == line);
            match (&mut self.random, position) {
                (Some(_), Some(_)) => {}
                (Some(random), None) if self.stored_lines.len() == self.lines => {
                    self.stored_lines[random.draw_below(self.lines as u64) as usize] = line;
                }
                (Some(_), None) => self.stored_lines.push(line),
                (None, _) => {
                    if let Some(index) = position {
                        self.stored_lines.remove(index);
                    } else if self.stored_lines.len() == self.lines {
                        self.stored_lines.remove(0);
                    }
                    self.stored_lines.push(line);
                }
            }
            position.is_none()
        }
    }

    /// Simulates programs side by side; `cycles` has, for each program, the cycles of a hit and the additional cycles
    /// of a miss. Returns the miss ratios and the CPIs after a warm-up.
    fn simulate(
        patterns: &[AccessPattern],
        cycles: &[(f64, f64)],
        mut cache: OracleCache,
    ) -> (Vec<f64>, Vec<f64>) {
        let program_count = patterns.len();
        let mut programs: Vec<SyntheticProgram> = patterns
            .iter()
            .enumerate()
            .map(|(index, p)| SyntheticProgram::new(p.clone(), index as u64))
            .collect();
        let (mut clock, mut accesses, mut misses) = (
            vec![0.0f64; program_count],
            vec![0u64; program_count],
            vec![0u64; program_count],
        );
        let mut warm = vec![0.0; program_count];
        for step in 0..240_000 {
            if step == 80_000 {
                (accesses, misses, warm) = (
                    vec![0; program_count],
                    vec![0; program_count],
                    clock.clone(),
                );
            }
            let next = (0..program_count)
                .min_by(|&a, &b| clock[a].total_cmp(&clock[b]))
                .unwrap();
            let missed = cache.is_miss((next as u64) << 40 | programs[next].next());
            clock[next] += cycles[next].0 + if missed { cycles[next].1 } else { 0.0 };
            accesses[next] += 1;
            misses[next] += u64::from(missed);
        }
        let ratio = |index: usize| misses[index] as f64 / accesses[index] as f64;
        let cpi = |index: usize| (clock[index] - warm[index]) / accesses[index] as f64;
        (
            (0..program_count).map(ratio).collect(),
            (0..program_count).map(cpi).collect(),
        )
    }

    fn mixes() -> Vec<Vec<AccessPattern>> {
        use AccessPattern::*;
        vec![
            vec![Skewed(400), HotAndStream(60)],
            vec![Cycle(90), Skewed(300)],
            vec![HotAndStream(100), HotAndStream(40)],
            vec![Skewed(200), Skewed(400), HotAndStream(50)],
        ]
    }

    /// Does StatCC, which solves speeds and misses together, agree with an exact shared LRU cache: miss ratios within 4
    /// points, CPI within 8 %?
    #[test]
    fn joint_solution_agrees_with_a_simulated_shared_lru_cache() {
        check_joint(ReplacementModel::Lru, None);
    }

    /// Does StatCC agree with random replacement as well?
    #[test]
    fn joint_solution_agrees_with_a_simulated_shared_random_cache() {
        check_joint(ReplacementModel::Random, Some(SplitMix64::new(77)));
    }

    fn check_joint(composition: ReplacementModel, random: Option<SplitMix64>) {
        for patterns in mixes() {
            let cycles: Vec<(f64, f64)> = (0..patterns.len())
                .map(|index| (2.0 + index as f64, 20.0))
                .collect();
            let reuses: Vec<ReuseTimes> = patterns
                .iter()
                .map(|pattern| SyntheticProgram::sampled_reuse(pattern, 10))
                .collect();
            for lines in [100usize, 160] {
                let co_runners: Vec<CoRunner<'_>> = reuses
                    .iter()
                    .zip(&cycles)
                    .map(|(reuse, &(base, miss))| CoRunner {
                        reuse,
                        measured_ratios: &[],
                        refs_per_instr: 1.0,
                        base_cycles_per_instr: base,
                        miss_cycles: miss,
                    })
                    .collect();
                let model = solve_co_run(&co_runners, lines as u64, composition).unwrap();
                let cache = OracleCache {
                    stored_lines: Vec::new(),
                    lines,
                    random: random.clone(),
                };
                let (ratios, cpis) = simulate(&patterns, &cycles, cache);
                for index in 0..patterns.len() {
                    let (guess, real) = (model.shared_ratios.miss_ratios[index], ratios[index]);
                    assert!(
                        (guess - real).abs() < 0.04,
                        "{composition:?} {lines} #{index}: {guess:.3}, real {real:.3}"
                    );
                    let relative_error = model.cycles_per_instr[index] / cpis[index] - 1.0;
                    assert!(
                        relative_error.abs() < 0.08,
                        "{composition:?} {lines} #{index}: CPI off by {relative_error:.3}"
                    );
                }
            }
        }
    }

    fn any_reuse() -> impl Strategy<Value = ReuseTimes> {
        (
            prop::collection::vec((0u64..5000, 1u32..50), 1..20),
            0u32..20,
        )
            .prop_map(|(times, cold_weight)| {
                let mut reuse = ReuseTimes::new();
                times
                    .iter()
                    .for_each(|&(time, weight)| reuse.add_weighted(Some(time), f64::from(weight)));
                reuse.add_weighted(None, f64::from(cold_weight));
                reuse
            })
    }

    proptest! {
        /// Does one program alone agree with the single-program models?
        #[test]
        fn one_program_alone_agrees_with_the_single_program_models(reuse in any_reuse(), lines in 1u64..3000, rate in 0.001f64..10.0) {
            let lru = lru_at_rates(&[(&reuse, rate)], lines).unwrap();
            let expected = crate::statstack::miss_ratio(&reuse, lines).unwrap();
            prop_assert!((lru.group_miss_ratio - expected).abs() < 1e-6);
            let random = random_at_rates(&[(&reuse, rate)], lines).unwrap();
            let expected = crate::statcache::miss_ratio(&reuse, lines).unwrap();
            prop_assert!((random.group_miss_ratio - expected).abs() < 1e-9);
        }

        /// Does reordering the programs only reorder the result, does a co-runner never help, and is the group's ratio
        /// the weighted mean?
        #[test]
        fn order_has_no_effect_and_a_co_runner_never_helps(
            a in any_reuse(), b in any_reuse(), lines in 1u64..3000, rate in 0.01f64..10.0,
        ) {
            for compose in [lru_at_rates, random_at_rates] {
                let ab = compose(&[(&a, 1.0), (&b, rate)], lines).unwrap();
                let ba = compose(&[(&b, rate), (&a, 1.0)], lines).unwrap();
                prop_assert!((ab.miss_ratios[0] - ba.miss_ratios[1]).abs() < 1e-6);
                prop_assert!((ab.miss_ratios[1] - ba.miss_ratios[0]).abs() < 1e-6);
                let alone = compose(&[(&a, 1.0)], lines).unwrap();
                prop_assert!(ab.miss_ratios[0] >= alone.miss_ratios[0] - 1e-6);
                let mean = (ab.miss_ratios[0] + rate * ab.miss_ratios[1]) / (1.0 + rate);
                prop_assert!((ab.group_miss_ratio - mean).abs() < 1e-6);
            }
        }
    }

    /// Does interpolation reproduce a measured curve at its points, and follow the shape of the model between them?
    #[test]
    fn a_measured_curve_is_read_between_its_points() {
        let measured = [(100.0, 0.5), (200.0, 0.1)];
        let mut reuse = ReuseTimes::new();
        reuse.add_weighted(Some(11), 100.0); // a cycle through 12 lines
        let model = StackModel::new(&reuse).unwrap();
        let ratio_at = |lines| measured_or_modeled(&measured, &model, lines);
        for (lines, expected) in [
            (0.0, 1.0),
            (11.0, 1.0),
            (12.0, 0.5),
            (100.0, 0.5),
            (150.0, 0.3),
            (900.0, 0.1),
        ] {
            assert!(
                (ratio_at(lines) - expected).abs() < 1e-12,
                "{lines}: {}, expected {expected}",
                ratio_at(lines)
            );
        }
    }

    /// Is there no result for a program without samples or without accesses?
    #[test]
    fn absent_evidence_gives_no_answer() {
        let (no_reuse, mut one_reuse) = (ReuseTimes::new(), ReuseTimes::new());
        one_reuse.add(Some(4));
        assert_eq!(lru_at_rates(&[(&no_reuse, 1.0)], 8), None);
        assert_eq!(lru_at_rates(&[(&one_reuse, 0.0)], 8), None);
        assert_eq!(random_at_rates(&[], 8), None);
        assert_eq!(random_at_rates(&[(&one_reuse, 1.0)], 0), None);
    }

    /// Are the speeds at a jump of a miss ratio, where none are consistent, between those of its two sides? The stream has a
    /// quarter of 400 lines if its instructions take three cycles, fewer lines if they take more, and misses more with more.
    #[test]
    fn a_co_run_without_consistent_speeds_is_between_its_sides() {
        let mut reuse = ReuseTimes::new();
        reuse.add_weighted(Some(1 << 20), 100.0);
        let stream = |measured_ratios, miss_cycles| CoRunner {
            reuse: &reuse,
            measured_ratios,
            refs_per_instr: 0.1,
            base_cycles_per_instr: 1.0,
            miss_cycles,
        };
        let jump = [(100.0, 0.1), (100.000_001, 0.9), (400.0, 0.9)];
        let programs = [stream(&jump, 60.0), stream(&[], 0.0)];
        let estimate = solve_co_run(&programs, 400, ReplacementModel::Lru).unwrap();
        let cycles = estimate.cycles_per_instr[0];
        assert!((cycles - 3.0).abs() < 0.3, "{cycles}");
        let ratio = estimate.shared_ratios.miss_ratios[0];
        assert!((ratio * 6.0 + 1.0 - cycles).abs() < 1e-9, "{ratio}");
        let group_ratio = (ratio / cycles + 1.0) / (1.0 / cycles + 1.0);
        let difference = estimate.shared_ratios.group_miss_ratio - group_ratio;
        assert!(difference.abs() < 1e-9, "{difference}");
    }
}
