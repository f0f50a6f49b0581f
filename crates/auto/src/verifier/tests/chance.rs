use super::super::verdict::{GoalChange, GuardVerdict, ProcessChange};
use super::*;
use cachemate_core::SplitMix64;
use cachemate_papers::work_metric::WorkMetric;

/// Number of roll-backs in a thousand runs with one change each. Four programs each have independent noise of this
/// standard deviation, and their windows have this autocorrelation.
fn count_rollbacks(factors: [f64; 4], noise: f64, alike: f64) -> usize {
    let run_seed = |seed: u64| {
        let policy = ScriptedPolicy(|view: &View<'_>| {
            if view.observation.window >= 30 {
                pinned_plan(&[(0, 0)])
            } else {
                idle_plan()
            }
        });

        let mut generator = SplitMix64::new(seed);
        let mut deviations = [0.0; 4];
        let machine = |_, plan: &Plan| {
            let has_moved = !plan.affinity.is_empty();
            let mut speed = |index: usize| {
                let fresh = draw_normal(&mut generator) * libm::sqrt(1.0 - alike * alike);
                deviations[index] = alike * deviations[index] + fresh;
                100.0
                    * libm::exp(noise * deviations[index])
                    * if has_moved { factors[index] } else { 1.0 }
            };
            (0..4)
                .map(|index| program_sample(index as u32, None, speed(index)))
                .collect()
        };
        !rollback_windows(&run(policy, GuardConfig::default(), 45, machine)).is_empty()
    };

    (0..1000).filter(|&seed| run_seed(seed)).count()
}

/// How many of a thousand changes without effect are rolled back at a noise of 30 %? Two in a hundred are stated.
#[test]
fn changes_without_effect_are_rarely_rolled_back_by_chance() {
    let independent = count_rollbacks([1.0; 4], 0.3, 0.0);
    let alike = count_rollbacks([1.0; 4], 0.3, 0.6);
    println!(
        "rolled back by chance at 30 % noise, of 1000: {independent}; windows alike by 0.6: {alike}"
    );
    assert!(independent <= 20, "{independent} of 1000");
    assert!(alike <= 60, "{alike} of 1000, windows alike");
}

/// How many harmful changes are noticed, at the same noise and at a usual one?
#[test]
fn harmful_changes_are_noticed() {
    let halved = count_rollbacks([0.5; 4], 0.3, 0.0);
    let one_of_four = count_rollbacks([0.5, 1.0, 1.0, 1.0], 0.05, 0.0);
    let tenth = count_rollbacks([0.9; 4], 0.05, 0.0);
    println!(
        "found of 1000: all halved at 30 % noise {halved}, one halved at 5 % {one_of_four}, a tenth at 5 % {tenth}"
    );
    assert!(
        halved >= 900 && one_of_four >= 990 && tenth >= 900,
        "{halved} {one_of_four} {tenth}"
    );
}

/// Does a gain of a noisy program make up for losses of others if it exceeds its own noise, and not otherwise? The
/// changes are those of four programs of which one got most of a cache.
#[test]
fn a_certain_gain_of_a_noisy_program_counts_fully() {
    let change = |id: u32, log_ratio: f64, standard_error: f64| ProcessChange {
        process: ProcessId(id),
        user: None,
        metric: WorkMetric::Instructions,
        priority: 1.0,
        log_ratio,
        standard_error,
        degrees_of_freedom: 23.0,
        goal_change: GoalChange::default(),
    };

    let is_worse = |noisy_error: f64| {
        let changes = [
            change(0, 0.006, 0.011),
            change(1, 0.498, noisy_error),
            change(2, -0.277, 0.019),
            change(3, -0.013, 0.003),
        ];
        let config = GuardConfig::default();
        GuardVerdict::from_changes(&changes, config.objective, config.min_loss).is_worse
    };
    assert!(!is_worse(0.089), "5.6 standard errors");
    assert!(is_worse(0.3), "noise may explain the gain");
}
