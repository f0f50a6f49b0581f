//! Sensitivity of a comparison on this machine: bounds, other baselines, other scales.

use super::cells::METRICS;
use super::{
    NiagaraPolicy, NiagaraSetting, SOLARIS_TIME_SCALE, TIME_SCALE, ThreadMix, measure, measure_against,
    measure_gain_without_greedy,
};
use crate::{DataPoint, ExperimentContext, ReproError, mean};

/// The L2 size at which sensitivity is tested.
pub const SIZE_KB: u64 = 192;

/// At each size, the throughput gain of a schedule that never runs the greedy program, also as text.
pub fn gain_bound(context: &ExperimentContext<'_>, sizes: &[u64]) -> Result<(Vec<DataPoint>, String), ReproError> {
    let settings: Vec<NiagaraSetting> = sizes
        .iter()
        .flat_map(|&kb| context.seeds.iter().map(move |&seed| (kb, seed)))
        .map(|(kb, seed)| NiagaraSetting::new(kb, seed, context))
        .collect();
    let gains = context.run_all(&settings, |setting| {
        context.report_progress(&format!("without the greedy program at {} KB, seed {}", setting.l2_kb, setting.seed));
        Ok(100.0 * measure_gain_without_greedy(setting)?)
    })?;
    let gains_at_size = |kb: u64| -> Vec<f64> {
        settings.iter().zip(&gains).filter(|(setting, _)| setting.l2_kb == kb).map(|(_, gain)| *gain).collect()
    };
    let gain_point = |&kb: &u64| {
        DataPoint::from_values("throughput gain of never running art %", format!("{kb} KB"), &gains_at_size(kb))
    };
    let gain_texts: Vec<String> =
        sizes.iter().map(|&kb| format!("{:+.1} % at {kb} KB", mean(&gains_at_size(kb)))).collect();
    let bound_text = format!("A schedule that never ran art would gain {}", gain_texts.join(", "));
    Ok((sizes.iter().map(gain_point).collect(), bound_text))
}

/// One variation of the comparison: its name, the policy and setting, and the setting of the default.
struct Variation {
    name: String,
    policy: NiagaraPolicy,
    setting: NiagaraSetting,
    baseline: NiagaraSetting,
}

/// Returns every metric of the comparison at one size: `policy` at two time scales and against Solaris's time sharing,
/// and then each of `extra_policies`.
pub fn compare_variations(
    context: &ExperimentContext<'_>,
    mix: ThreadMix,
    policy: &NiagaraPolicy,
    extra_policies: &[(&str, NiagaraPolicy)],
) -> Result<Vec<DataPoint>, ReproError> {
    let mut variations = Vec::new();
    for &seed in &context.seeds {
        let base_setting = NiagaraSetting { mix, ..NiagaraSetting::new(SIZE_KB, seed, context) };
        let variation_against_own_default = |name: String, policy: &NiagaraPolicy, setting: NiagaraSetting| Variation {
            name,
            policy: policy.clone(),
            setting,
            baseline: setting,
        };
        variations.push(variation_against_own_default(format!("scale {TIME_SCALE}"), policy, base_setting));
        variations.push(variation_against_own_default(
            format!("scale {}", 2 * TIME_SCALE),
            policy,
            NiagaraSetting { scale: 2 * TIME_SCALE, ..base_setting },
        ));
        let name = format!("against Solaris' time sharing, scale {SOLARIS_TIME_SCALE}");
        variations.push(Variation {
            name,
            policy: policy.clone(),
            setting: base_setting,
            baseline: base_setting.with_solaris(),
        });
        variations.extend(
            extra_policies
                .iter()
                .map(|(name, policy)| variation_against_own_default((*name).to_string(), policy, base_setting)),
        );
    }
    let results = context.run_all(&variations, |variation| {
        context.report_progress(&format!("{}, seed {}", variation.name, variation.setting.seed));
        if variation.setting == variation.baseline {
            measure(&variation.setting, &variation.policy)
        } else {
            measure_against(&variation.setting, &variation.policy, &variation.baseline)
        }
    })?;
    let mut names: Vec<&str> = Vec::new();
    for variation in &variations {
        if !names.contains(&variation.name.as_str()) {
            names.push(&variation.name);
        }
    }
    let mut points = Vec::new();
    for (metric, value_of) in METRICS {
        for &name in &names {
            let named_runs = variations.iter().zip(&results).filter(|(variation, _)| variation.name == name);
            let values: Vec<f64> = named_runs.map(|(_, result)| value_of(result)).collect();
            points.push(DataPoint::from_values(format!("varied at {SIZE_KB} KB: {metric}"), name, &values));
        }
    }
    Ok(points)
}
