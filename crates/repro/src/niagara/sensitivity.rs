//! Sensitivity of a comparison on this machine: bounds, other baselines, other scales.

use super::cells::{metric_points, size_label};
use super::{
    NiagaraPolicy, NiagaraSetting, SOLARIS_TIME_SCALE, TIME_SCALE, ThreadMix, measure_against,
    measure_gain_without_greedy,
};
use crate::{DataPoint, ExperimentContext, Result, mean};

/// The L2 size at which sensitivity is tested.
pub const SIZE_KB: u64 = 192;

/// At each size, the throughput gain of a schedule that never runs the greedy program, also as
/// text.
pub fn gain_bound(
    context: &ExperimentContext<'_>,
    sizes: &[u64],
) -> Result<(Vec<DataPoint>, String)> {
    let gains = context.run_unstored_cases(sizes, |kb, seed| {
        context.report_progress(&format!(
            "without the greedy program at {kb} KB, seed {seed}"
        ));
        Ok(100.0 * measure_gain_without_greedy(&NiagaraSetting::new(kb, seed, context))?)
    })?;
    let gain_point = |&kb: &u64| {
        gains.point(
            kb,
            "throughput gain of never running art %",
            size_label(kb),
            |&gain| gain,
        )
    };

    let gain_texts: Vec<String> = sizes
        .iter()
        .map(|&kb| format!("{:+.1} % at {kb} KB", mean(gains.of_case(kb))))
        .collect();
    let bound_text = format!(
        "A schedule that never ran art would gain {}",
        gain_texts.join(", ")
    );
    Ok((sizes.iter().map(gain_point).collect(), bound_text))
}

/// Every metric of the comparison at one size: `policy` at two time scales and against Solaris's
/// time sharing, and then each of `extra_policies`.
pub fn compare_variations(
    context: &ExperimentContext<'_>,
    mix: ThreadMix,
    policy: &NiagaraPolicy,
    extra_policies: &[(&str, NiagaraPolicy)],
) -> Result<Vec<DataPoint>> {
    // Each variation has a name, a policy, its time scale, and whether Solaris's time sharing is the baseline.
    let mut variations = vec![
        (format!("scale {TIME_SCALE}"), policy, TIME_SCALE, false),
        (
            format!("scale {}", 2 * TIME_SCALE),
            policy,
            2 * TIME_SCALE,
            false,
        ),
        (
            format!("against Solaris' time sharing, scale {SOLARIS_TIME_SCALE}"),
            policy,
            TIME_SCALE,
            true,
        ),
    ];

    variations.extend(
        extra_policies
            .iter()
            .map(|(name, policy)| (name.to_string(), policy, TIME_SCALE, false)),
    );
    let indices: Vec<usize> = (0..variations.len()).collect();
    let results = context.run_unstored_cases(&indices, |index, seed| {
        let (name, policy, scale, is_against_solaris) = &variations[index];
        context.report_progress(&format!("{name}, seed {seed}"));
        let setting = NiagaraSetting {
            mix,
            scale: *scale,
            ..NiagaraSetting::new(SIZE_KB, seed, context)
        };
        measure_against(
            &setting,
            policy,
            &if *is_against_solaris {
                setting.with_solaris()
            } else {
                setting
            },
        )
    })?;
    let name = format!("varied at {SIZE_KB} KB");
    Ok(metric_points(&name, &results, &indices, |index| {
        variations[index].0.clone()
    }))
}
