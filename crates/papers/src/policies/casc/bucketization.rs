//! CASC's bucketization, which computes the maximum partial-cache miss rate (PCMR) for each CPU (papers CASC 4.3.1).
//!
//! Problem: threads with high miss rates must not all run at once, but CPUs must not wait for each other. Method: every
//! CPU has a MAX_PCMR, initially the largest PCMR of all threads. While the expected miss rate is above the threshold,
//! one MAX_PCMR is lowered by one. It is that of the CPU on which this bars the fewest threads, and never so far that a
//! thread has no CPU. A thread may run on the CPUs whose MAX_PCMR is at least its PCMR.
//! - *Literal*: the expected rate is the mean of the MAX_PCMRs. At the end, every set of CPUs must still have as many
//!   threads as CPUs (times `runnable_per_cpu`); otherwise, the threshold grows geometrically and the procedure starts
//!   again.
//! - *Better*: the check is inside the loop, so a CPU is never emptied in the first place, and it is stricter. The
//!   paper's check (Hall's condition) ensures that threads could be distributed without an idle CPU. But a scheduler
//!   that does not move a running thread leaves a CPU empty while all of its threads run elsewhere, so each CPU must
//!   accept as many threads as there are CPUs. The expected rate weights each CPU's worst thread by its references,
//!   because a thread that waits for memory makes few.
//!
//! Properties: the threads' sets of CPUs are nested, so Hall's condition is one count per CPU. In a tie, the earlier
//! CPU wins. Steps that bar no thread are combined, with the same result. Cost: CPUs² steps per distinct PCMR.

/// A thread as an input of bucketization.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BucketThread {
    /// Misses per 100 references on a share of the cache; may be negative or above 100.
    pub pcmr: f64,
    /// References per unit of processor time; `None` if unknown.
    pub refs_rate: Option<f64>,
}

/// Constraints of bucketization.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BucketizationRules {
    /// Whether to use the better form of the algorithm instead of the paper's.
    pub is_better_form: bool,
    /// Maximum expected miss rate, in misses per 100 references.
    pub threshold: f64,
    /// Factor by which the literal form raises the threshold; above 1.
    pub threshold_step: f64,
    /// Minimum number of threads for every CPU; more than 1 if threads sleep.
    pub runnable_per_cpu: u32,
    /// Maximum standard deviation of CPU-time shares over their mean; `None` if there is no bound.
    pub max_run_time_variation: Option<f64>,
}

/// The result of bucketization.
#[derive(Clone, PartialEq, Debug)]
pub struct Buckets {
    /// Maximum PCMR that each CPU accepts.
    pub max_pcmr: Vec<u32>,
    /// Threshold that was met, which only the literal form may have raised.
    pub threshold: f64,
    /// Expected miss rate if every CPU runs its worst thread.
    pub miss_rate: f64,
}

impl Buckets {
    /// Whether a thread of this PCMR may run on that CPU.
    pub fn can_admit(&self, cpu: usize, pcmr: f64) -> bool {
        lowest_admitting_level(pcmr) <= self.max_pcmr[cpu]
    }
}

/// The lowest MAX_PCMR that still accepts the thread. A negative rate, which is an artifact of solving, counts as zero.
fn lowest_admitting_level(pcmr: f64) -> u32 {
    pcmr.clamp(0.0, 1e6).ceil() as u32
}

/// Runs the algorithm for this number of CPUs; without threads or CPUs, no thread is barred.
///
/// In the literal form, a higher threshold ends the same descent earlier, and the lower the CPUs' limits, the sooner a
/// CPU idles. The thresholds are therefore tried from the highest down, in one descent, instead of each from the start.
pub fn bucketize(threads: &[BucketThread], cpus: usize, rules: &BucketizationRules) -> Buckets {
    let max_level = threads
        .iter()
        .map(|thread| lowest_admitting_level(thread.pcmr))
        .max()
        .unwrap_or(0);
    let mut state = BucketSearch::new(threads, cpus, max_level, rules);
    if rules.is_better_form {
        state.lower_until(rules.threshold);
        return state.to_buckets(rules.threshold);
    }

    let mut thresholds = vec![rules.threshold];
    let mut highest_threshold = rules.threshold;
    while highest_threshold < f64::from(max_level) {
        highest_threshold =
            (highest_threshold * rules.threshold_step).max(highest_threshold + 1e-3);
        thresholds.push(highest_threshold);
    }

    let mut best_buckets = None;
    for threshold in thresholds.into_iter().rev() {
        state.lower_until(threshold);
        // The highest threshold bars no thread, so a CPU that idles under it would idle under all.
        if best_buckets.is_some() && !state.keeps_cpus_busy(&state.max_pcmr) {
            break;
        }
        best_buckets = Some(state.to_buckets(threshold));
    }
    best_buckets.unwrap_or_else(|| state.to_buckets(rules.threshold))
}

struct BucketSearch<'a> {
    rules: &'a BucketizationRules,
    /// Level of each thread, in ascending order.
    levels: Vec<u32>,
    max_pcmr: Vec<u32>,
    /// Reference rate of the worst thread of each level; always 1 in the literal form.
    level_weights: Vec<(u32, f64)>,
}

impl<'a> BucketSearch<'a> {
    fn new(
        threads: &[BucketThread],
        cpus: usize,
        max_level: u32,
        rules: &'a BucketizationRules,
    ) -> Self {
        let mut levels: Vec<u32> = threads
            .iter()
            .map(|thread| lowest_admitting_level(thread.pcmr))
            .collect();
        levels.sort_unstable();
        let is_weighted = rules.is_better_form
            && threads
                .iter()
                .all(|thread| thread.refs_rate.is_some_and(|rate| rate > 0.0));

        let mut level_weights: Vec<(u32, f64)> = Vec::new();
        if is_weighted {
            let unsorted_weights = threads.iter().filter_map(|thread| {
                Some((lowest_admitting_level(thread.pcmr), thread.refs_rate?))
            });
            level_weights = unsorted_weights.collect();
            level_weights.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
            level_weights.dedup_by_key(|weight| weight.0);
        }
        BucketSearch {
            rules,
            levels,
            max_pcmr: vec![max_level; cpus],
            level_weights,
        }
    }

    /// Lowers CPUs' limits until the expected rate is at most the threshold, or no limit can be lowered.
    fn lower_until(&mut self, threshold: f64) {
        while self.expected_miss_rate() > threshold {
            let Some(cpu) = self.find_cpu_to_lower() else {
                break;
            };
            self.lower(cpu, threshold);
        }
    }

    fn to_buckets(&self, threshold: f64) -> Buckets {
        Buckets {
            miss_rate: self.expected_miss_rate(),
            max_pcmr: self.max_pcmr.clone(),
            threshold,
        }
    }

    fn threads_up_to(&self, level: u32) -> usize {
        self.levels
            .partition_point(|&thread_level| thread_level <= level)
    }

    fn count_newly_barred(&self, cpu: usize) -> usize {
        let level = self.max_pcmr[cpu];
        self.threads_up_to(level)
            - level
                .checked_sub(1)
                .map_or(0, |below| self.threads_up_to(below))
    }

    /// The expected misses per 100 references.
    fn expected_miss_rate(&self) -> f64 {
        let weight_up_to = |level: u32| {
            let index = self
                .level_weights
                .partition_point(|weight| weight.0 <= level);
            index
                .checked_sub(1)
                .map_or(1.0, |index| self.level_weights[index].1)
        };
        let (mut sum, mut weights) = (0.0, 0.0);
        for &level in &self.max_pcmr {
            sum += weight_up_to(level) * f64::from(level);
            weights += weight_up_to(level);
        }
        if weights > 0.0 { sum / weights } else { 0.0 }
    }

    fn find_cpu_to_lower(&self) -> Option<usize> {
        let bars_no_thread =
            |&cpu: &usize| self.max_pcmr[cpu] > 0 && self.count_newly_barred(cpu) == 0;
        if let Some(cpu) = (0..self.max_pcmr.len()).find(bars_no_thread) {
            return Some(cpu);
        }
        let mut cpus_by_penalty: Vec<(usize, usize)> = (0..self.max_pcmr.len())
            .map(|cpu| (self.count_newly_barred(cpu), cpu))
            .collect();
        cpus_by_penalty.sort_unstable();
        cpus_by_penalty
            .into_iter()
            .map(|(_, cpu)| cpu)
            .find(|&cpu| self.can_lower(cpu))
    }

    fn can_lower(&self, cpu: usize) -> bool {
        let level = self.max_pcmr[cpu];
        let is_level_kept = || {
            (0..self.max_pcmr.len())
                .any(|other_cpu| other_cpu != cpu && self.max_pcmr[other_cpu] >= level)
        };
        if level == 0 || (self.count_newly_barred(cpu) > 0 && !is_level_kept()) {
            return false;
        }
        if !self.rules.is_better_form || self.count_newly_barred(cpu) == 0 {
            return true;
        }

        let mut lowered_limits = self.max_pcmr.clone();
        lowered_limits[cpu] -= 1;
        let is_fair = |max_variation: f64| {
            run_time_variation(&self.levels, &lowered_limits)
                .is_none_or(|variation| variation <= max_variation)
        };
        self.keeps_cpus_busy(&lowered_limits)
            && self.rules.max_run_time_variation.is_none_or(is_fair)
    }

    /// Lowers a CPU's limit by one step, or by several if the further steps bar no thread and are needed anyway.
    fn lower(&mut self, cpu: usize, threshold: f64) {
        let level = self.max_pcmr[cpu];
        if self.count_newly_barred(cpu) > 0 {
            self.max_pcmr[cpu] = level - 1;
            return;
        }
        let next_level = self.levels[..self.threads_up_to(level)]
            .last()
            .copied()
            .unwrap_or(0);
        let mut step_count = level - next_level;
        if self.level_weights.is_empty() {
            let level_sum: u64 = self.max_pcmr.iter().map(|&level| u64::from(level)).sum();
            let missing_levels = (level_sum as f64 - threshold * self.max_pcmr.len() as f64)
                .ceil()
                .max(1.0);
            step_count = step_count.min(missing_levels as u32);
        }
        self.max_pcmr[cpu] = level - step_count.max(1);
    }

    /// Whether every set of CPUs has enough threads. Because the threads' sets of CPUs are nested, only the sets of the
    /// k lowest CPUs need to be checked.
    fn keeps_cpus_busy(&self, max_pcmr: &[u32]) -> bool {
        let mut sorted_pcmr = max_pcmr.to_vec();
        sorted_pcmr.sort_unstable();
        let (threads, cpus) = (self.levels.len(), max_pcmr.len());
        // All other CPUs may run threads that this CPU accepts, so one more thread must be waiting.
        let min_threads = if self.rules.is_better_form && threads > cpus {
            cpus
        } else {
            0
        };
        let has_enough_threads = |(index, &level): (usize, &u32)| {
            let needed_threads = (index + 1) * self.rules.runnable_per_cpu as usize;
            self.threads_up_to(level) >= needed_threads.max(min_threads).min(threads)
        };
        sorted_pcmr.iter().enumerate().all(has_enough_threads)
    }
}

/// The standard deviation over the mean of the CPU-time shares of threads with these ascending levels, if CPUs are
/// shared as evenly as their MAX_PCMRs allow (max-min fair). `None` without threads or CPUs.
pub fn run_time_variation(levels: &[u32], max_pcmr: &[u32]) -> Option<f64> {
    let shares = fair_shares(levels, max_pcmr);
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let variance = shares
        .iter()
        .map(|share| (share - mean) * (share - mean))
        .sum::<f64>()
        / shares.len() as f64;
    (mean > 0.0).then(|| variance.sqrt() / mean)
}

/// The max-min fair CPU time of each thread, in CPUs, for ascending levels. The most restricted threads share the CPUs
/// that accept them; a thread that cannot use its even share leaves the remainder to the others.
fn fair_shares(levels: &[u32], max_pcmr: &[u32]) -> Vec<f64> {
    let mut shares = vec![0.0; levels.len()];
    let mut remaining_threads = levels.len();
    let mut used_cpus = 0.0;
    while remaining_threads > 0 {
        // The highest k of the remaining threads can use only the CPUs that accept the lowest of them.
        let cpus_per_thread = |first_thread: usize| {
            let cpus = max_pcmr
                .iter()
                .filter(|&&max| max >= levels[first_thread])
                .count() as f64;
            (cpus - used_cpus).max(0.0) / (remaining_threads - first_thread) as f64
        };

        let is_group_start = |&index: &usize| index == 0 || levels[index - 1] < levels[index];
        let Some(first) = (0..remaining_threads)
            .filter(is_group_start)
            .min_by(|&a, &b| cpus_per_thread(a).total_cmp(&cpus_per_thread(b)))
        else {
            break;
        };
        let share = cpus_per_thread(first).min(1.0);
        shares[first..remaining_threads].fill(share);
        used_cpus += share * (remaining_threads - first) as f64;
        remaining_threads = first;
    }

    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LITERAL: BucketizationRules = BucketizationRules {
        is_better_form: false,
        threshold: 15.0,
        threshold_step: 1.25,
        runnable_per_cpu: 1,
        max_run_time_variation: None,
    };
    const BETTER: BucketizationRules = BucketizationRules {
        is_better_form: true,
        ..LITERAL
    };

    fn bucket_threads(pcmrs: &[f64]) -> Vec<BucketThread> {
        pcmrs
            .iter()
            .map(|&pcmr| BucketThread {
                pcmr,
                refs_rate: None,
            })
            .collect()
    }

    /// The algorithm as the paper states it: one step at a time, recomputing all counts.
    fn reference_buckets(
        threads: &[BucketThread],
        cpus: usize,
        rules: &BucketizationRules,
    ) -> (Vec<u32>, f64) {
        let levels: Vec<u32> = threads
            .iter()
            .map(|thread| thread.pcmr.max(0.0).ceil() as u32)
            .collect();
        let max_level = levels.iter().copied().max().unwrap_or(0);

        let mut threshold = rules.threshold;
        loop {
            let mut max = vec![max_level; cpus];
            while max.iter().sum::<u32>() as f64 / cpus as f64 > threshold {
                let penalty =
                    |cpu: usize| levels.iter().filter(|&&level| level == max[cpu]).count();
                let homeless = |cpu: usize| {
                    let runs =
                        |level: u32| (0..cpus).any(|c| max[c] - u32::from(c == cpu) >= level);
                    !levels.iter().all(|&level| runs(level))
                };
                let open = (0..cpus).filter(|&cpu| max[cpu] > 0 && !homeless(cpu));
                let Some(cpu) = open.min_by_key(|&cpu| (penalty(cpu), cpu)) else {
                    break;
                };
                max[cpu] -= 1;
            }

            let mut sets_of_cpus = 1u32..1 << cpus;
            let busy = sets_of_cpus.all(|set| {
                let chosen_cpus: Vec<usize> = (0..cpus).filter(|cpu| set >> cpu & 1 == 1).collect();
                let runnable = levels
                    .iter()
                    .filter(|&&level| chosen_cpus.iter().any(|&cpu| max[cpu] >= level))
                    .count();
                runnable >= (chosen_cpus.len() * rules.runnable_per_cpu as usize).min(levels.len())
            });
            if busy || threshold >= f64::from(max_level) {
                return (max, threshold);
            }
            threshold = (threshold * rules.threshold_step).max(threshold + 1e-3);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Do the shortcuts (combined steps, nested sets) give the same result as the paper's algorithm, for every set
        /// of CPUs?
        #[test]
        fn shortcuts_give_the_result_of_the_papers_algorithm(
            pcmrs in prop::collection::vec(-5.0f64..70.0, 0..14), cpus in 1usize..6, threshold in 1.0f64..40.0, m in 1u32..3,
        ) {
            let rules = BucketizationRules { threshold, runnable_per_cpu: m, ..LITERAL };
            let buckets = bucketize(&bucket_threads(&pcmrs), cpus, &rules);
            prop_assert_eq!((buckets.max_pcmr, buckets.threshold), reference_buckets(&bucket_threads(&pcmrs), cpus, &rules));
        }

        /// In either form, does every thread have a CPU and every set of CPUs enough threads?
        #[test]
        fn no_thread_starves_and_no_cpu_idles(
            pcmrs in prop::collection::vec((-5.0f64..120.0, 0.01f64..1.0), 1..20), cpus in 1usize..9, weighted: bool,
        ) {
            let threads: Vec<BucketThread> = pcmrs
                .iter()
                .map(|&(pcmr, rate)| BucketThread { pcmr, refs_rate: weighted.then_some(rate) })
                .collect();

            for rules in [LITERAL, BETTER] {
                let buckets = bucketize(&threads, cpus, &rules);
                for thread in &threads {
                    prop_assert!((0..cpus).any(|cpu| buckets.can_admit(cpu, thread.pcmr)));
                }
                for set in 1u32..1 << cpus {
                    let runs = |thread: &&BucketThread| (0..cpus).any(|cpu| set >> cpu & 1 == 1 && buckets.can_admit(cpu, thread.pcmr));
                    let runnable = threads.iter().filter(runs).count();
                    prop_assert!(runnable >= (set.count_ones() as usize).min(threads.len()), "{rules:?} {buckets:?}");
                    let others_may_run_them = rules.is_better_form && threads.len() > cpus;
                    prop_assert!(!others_may_run_them || runnable >= cpus, "{rules:?} {buckets:?}");
                }
            }
        }

        /// Is the bound on the spread of run times observed, and does a bound of 0 leave all threads unrestricted?
        #[test]
        fn the_fairness_bound_is_kept(
            pcmrs in prop::collection::vec(0.0f64..80.0, 8..20), cpus in 2usize..8, bound in 0.0f64..1.0,
        ) {
            let threads = bucket_threads(&pcmrs);
            let mut levels: Vec<u32> = pcmrs.iter().map(|&pcmr| lowest_admitting_level(pcmr)).collect();
            levels.sort_unstable();
            let rules = BucketizationRules { max_run_time_variation: Some(bound), threshold: 1.0, ..BETTER };
            let buckets = bucketize(&threads, cpus, &rules);
            prop_assert!(run_time_variation(&levels, &buckets.max_pcmr).unwrap() <= bound + 1e-9);
            let rules = BucketizationRules { max_run_time_variation: Some(0.0), ..rules };
            let buckets = bucketize(&threads, cpus, &rules);
            let shares = fair_shares(&levels, &buckets.max_pcmr);
            prop_assert!(shares.iter().all(|share| (share - shares[0]).abs() < 1e-9));
        }

        /// Are shares max-min fair, that is, no thread has more than the CPUs, and no thread with less than another
        /// shares a CPU with it that could give it more?
        #[test]
        fn shares_are_max_min_fair(levels in prop::collection::vec(0u32..9, 1..12), max in prop::collection::vec(0u32..9, 1..6)) {
            let (mut levels, mut max) = (levels, max);
            levels.sort_unstable();
            max[0] = 9;
            let shares = fair_shares(&levels, &max);
            prop_assert!(shares.iter().all(|&share| (0.0..=1.0).contains(&share)));
            // More restricted threads never have more than less restricted ones, and CPUs are used as far as possible.
            prop_assert!(shares.windows(2).all(|pair| pair[0] >= pair[1] - 1e-9), "{shares:?}");
            for first in 0..levels.len() {
                let cpus = max.iter().filter(|&&max| max >= levels[first]).count() as f64;
                prop_assert!(shares[first..].iter().sum::<f64>() <= cpus + 1e-9, "{shares:?} {levels:?} {max:?}");
            }
        }
    }

    /// For the threads of the paper's Figure 4 on four CPUs, is the expected rate at most the threshold, and are the
    /// greedy threads on few CPUs?
    #[test]
    fn the_papers_threads_meet_their_threshold() {
        let figure_4 = [1.0, 0.0, 3.0, 5.0, 11.0, 9.0, 15.0, 12.0, 16.0];
        let rules = BucketizationRules {
            threshold: 8.5,
            ..BETTER
        };
        let buckets = bucketize(&bucket_threads(&figure_4), 4, &rules);
        assert!(buckets.miss_rate <= 8.5, "{buckets:?}");
        assert!(
            (0..4).filter(|&cpu| buckets.can_admit(cpu, 16.0)).count() <= 2,
            "{buckets:?}"
        );
        assert!((0..4).all(|cpu| buckets.can_admit(cpu, 0.0)), "{buckets:?}");
    }

    /// Does the weight by references lower the expected rate of a CPU whose greedy thread mostly waits?
    #[test]
    fn a_waiting_thread_has_little_weight_in_the_expected_rate() {
        let two = |rate: f64| {
            [
                BucketThread {
                    pcmr: 2.0,
                    refs_rate: Some(1.0),
                },
                BucketThread {
                    pcmr: 60.0,
                    refs_rate: Some(rate),
                },
            ]
        };

        let rules = BucketizationRules {
            threshold: 0.0,
            ..BETTER
        };
        let rate = |greedy: f64| bucketize(&two(greedy), 2, &rules).miss_rate;
        assert!(
            (rate(1.0) - 31.0).abs() < 1e-9 && (rate(0.1) - 8.0 / 1.1).abs() < 1e-9,
            "{} {}",
            rate(1.0),
            rate(0.1)
        );
    }
}
