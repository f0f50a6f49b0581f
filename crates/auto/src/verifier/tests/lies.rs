use super::*;
use cachemate_core::SplitMix64;

/// The verdicts on one change in window 20, by the speeds of honest programs and of misreporting ones. The honest ones
/// belong to user 1 if the others do, otherwise to a user each.
fn verdicts_of(honest: &[f64], mut lies: impl FnMut() -> Vec<f64>, liar_user: u32) -> usize {
    let policy = ScriptedPolicy(|view: &View<'_>| {
        if view.observation.window >= 20 {
            pinned_plan(&[(0, 0)])
        } else {
            idle_plan()
        }
    });

    let machine = |_, plan: &Plan| {
        let has_moved = !plan.affinity.is_empty();
        let factor = |factor: f64| 100.0 * if has_moved { factor } else { 1.0 };
        let user = |id: u32| Some(if liar_user == 1 { 1 } else { 10 + id });
        let programs = honest
            .iter()
            .zip(0..)
            .map(|(&speed, id)| program_sample(id, user(id), factor(speed)));
        let mut samples: Vec<TaskSample> = programs.collect();
        let liars = lies().into_iter().enumerate();
        samples.extend(
            liars.map(|(id, lie)| program_sample(100 + id as u32, Some(liar_user), factor(lie))),
        );
        samples
    };
    rollback_windows(&run(policy, GuardConfig::default(), 60, machine)).len()
}

/// If a program claims to be a thousand times faster, does it hide that others were halved, with one process or with
/// nine, for which the mean of the reported logarithms would be a gain?
#[test]
fn a_misreporting_program_hides_no_harm() {
    assert_eq!(
        verdicts_of(&[0.5, 0.5, 0.5], || vec![1000.0], 1),
        1,
        "of the same user"
    );
    assert_eq!(verdicts_of(&[0.5, 0.5, 0.5], || vec![1000.0], 2), 1);
    assert_eq!(
        verdicts_of(&[0.5, 0.5, 0.5], || vec![1000.0; 9], 2),
        1,
        "nine weigh no more than the three"
    );
    assert_eq!(
        verdicts_of(&[0.5], || vec![1000.0], 2),
        1,
        "one against one: a loss without an equal gain is rolled back"
    );
    assert_eq!(verdicts_of(&[0.7, 0.7, 0.7], || vec![1000.0], 2), 1);
}

/// If a program claims to be a thousand times slower, does it veto a gain of the others?
#[test]
fn a_misreporting_program_vetoes_no_gain() {
    assert_eq!(verdicts_of(&[1.4, 1.4, 1.4], || vec![0.001], 2), 0);
    assert_eq!(
        verdicts_of(&[1.4, 1.4, 1.4], || vec![0.001], 1),
        0,
        "of the same user"
    );
    // Within its bounds, a reported halving is a loss like any other.
    assert_eq!(verdicts_of(&[1.0, 1.0, 1.0], || vec![0.001], 2), 1);
}

/// Does a program with arbitrary reports hide a loss of the others?
#[test]
fn noise_of_one_program_hides_no_harm() {
    for seed in 0..20 {
        let mut generator = SplitMix64::new(seed);
        let mut noisy = || {
            vec![
                libm::exp(3.0 * draw_normal(&mut generator)),
                libm::exp(3.0 * draw_normal(&mut generator)),
            ]
        };
        assert_eq!(
            verdicts_of(&[0.8, 0.8, 0.8], &mut noisy, 2),
            1,
            "seed {seed}"
        );
        assert_eq!(
            verdicts_of(&[0.94, 0.94, 0.94, 0.94], &mut noisy, 2),
            1,
            "each loses less than a tenth"
        );
    }
}
