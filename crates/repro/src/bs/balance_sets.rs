//! BS-2, -3, -4, -6: a mix on two cores at several sizes of the L2, under the default scheduler and balance sets.

use crate::niagara::cells::{
    METRICS, SizeSweep, describe_shortfall, metric_points, run_cells, size_chart, values_over_bandwidth,
};
use crate::niagara::{NiagaraPolicy, NiagaraSetting, SCALE, ThreadMix, l2_miss_ratio, run as run_mix, sensitivity};
use crate::setup::failed;
use crate::{DataPoint, ExperimentContext, Finding, ReproError, ResultTarget, mean};

/// One group per time slice, as in the paper (BS 3): the machine's own slice instead of the policy's turn lengths.
const BALANCE_SET: &str = "locations = 500\nreplacement = \"lru\"\nslice_ns = 10_000_000\n";

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let sizes: &[u64] = context.pick(&[192], &[48, 96, 192, 384]);
    let policy = paper_policy();
    let literal = run_cells(context, ThreadMix::Spec2000, &policy, sizes)?;
    let mut all_points = metric_points(NAME, &literal, sizes);
    let fair = run_cells(context, ThreadMix::Spec2000, &NiagaraPolicy::BalanceSet(BALANCE_SET.to_string()), sizes)?;
    all_points.extend(metric_points(FAIR, &fair, sizes));
    if !context.quick {
        all_points.extend(sensitivity::compare_variations(context, ThreadMix::Spec2000, &policy, &[])?);
        let composed = NiagaraPolicy::BalanceSet(format!("{BALANCE_SET}group_model = \"composed\""));
        all_points.extend(metric_points(
            "composed",
            &run_cells(context, ThreadMix::Spec2000, &composed, &[192])?,
            &[192],
        ));
        let casc_cells = run_cells(context, ThreadMix::Casc, &policy, sizes)?;
        all_points.extend(metric_points("balance sets on CASC's 18 threads", &casc_cells, sizes));
    }
    let (swept, sweep) = values_over_bandwidth(context, ThreadMix::Spec2000, &policy, "bs-3-bandwidth", NAME)?;
    all_points.extend(swept);
    let scale = SCALE as f64;
    let defaults: Vec<u64> = context.pick(&[96, 384][..], &[48, 96, 192, 384, 768][..]).to_vec();
    let mut by_size = Vec::new();
    let mut falls = Vec::new();
    for &seed in &context.seeds {
        let ipc = context.run_all(&defaults, |&kb| {
            let setting = NiagaraSetting { mix: ThreadMix::Spec2000, ..NiagaraSetting::new(kb, seed, context) };
            let default = run_mix(&setting, &NiagaraPolicy::Default)?;
            let misses = l2_miss_ratio(&default).ok_or_else(|| failed("default")("no references"))?;
            Ok((kb, default.instructions_per_cycle(), misses))
        })?;
        falls.push((seed, 100.0 * (ipc[0].1 / ipc[ipc.len() - 1].1 - 1.0)));
        by_size.extend(ipc);
    }
    let mut sensitivity = Vec::new();
    for &kb in &defaults {
        let values_at_size = |value: fn(&(u64, f64, f64)) -> f64| -> Vec<f64> {
            by_size.iter().filter(|p| p.0 == kb).map(value).collect()
        };
        sensitivity.push(DataPoint::over_values("IPC", format!("{kb} KB"), &values_at_size(|point| point.1)));
        sensitivity.push(DataPoint::over_values("L2 miss ratio", format!("{kb} KB"), &values_at_size(|point| point.2)));
    }
    let series = ["IPC", "L2 miss ratio"];
    let bs_2 = Finding::declared("bs-2-smallest-cache", &falls)
        .with_figure(size_chart(
            "bs-2-second-level",
            "A mix of SPEC CPU2000 on two cores",
            "IPC, misses per reference",
            &sensitivity,
            &series,
        ))
        .with_points(sensitivity)
        .time_scale(scale);
    let mut findings = vec![bs_2];
    for (form, cells) in [(NAME, &literal), (FAIR, &fair)] {
        findings.extend(throughput_and_misses(form, SizeSweep { cells, sizes, points: &all_points }));
    }
    findings[1].figures.push(sweep);
    findings.push(doubled_cache_finding(context, sizes, &policy)?);
    Ok(findings)
}

/// The paper's form: all qualifying groups run equally often (BS 4).
const NAME: &str = "balance sets";
/// Our form: turns that give threads time as evenly as the threshold allows.
const FAIR: &str = "balance sets with fair turns";

fn paper_policy() -> NiagaraPolicy {
    NiagaraPolicy::BalanceSet(format!("{BALANCE_SET}rotation = \"uniform\"\n"))
}

/// BS-3 and BS-4 for one form.
fn throughput_and_misses(form: &str, sweep: SizeSweep<'_>) -> [Finding; 2] {
    let series =
        ["throughput gain %", "of which mix %", "of which contention %"].map(|title| format!("{form}: {title}"));
    let series: Vec<&str> = series.iter().map(String::as_str).collect();
    let name = if form == NAME { "bs-3-throughput" } else { "bs-3-throughput-fair-turns" };
    let title =
        format!("{form}: instructions per cycle against the default scheduler, at the size where they grow least");
    let target = ResultTarget::AtLeast { target: 27.0, paper_best: Some(45.0) };
    let bs_3 = sweep.worst_size("BS-3", &title, "+27 % (384 KB) to +45 % (48 KB)", METRICS[0].1, target);
    let chart = size_chart(name, "Gain of balance sets and what it is made of", "%", sweep.points, &series);
    let title = format!("{form}: L2 miss ratio against the default scheduler, at the size where it falls least");
    let target = ResultTarget::AtMost { target: -25.0, paper_best: Some(-37.0) };
    let bs_4 = sweep.worst_size("BS-4", &title, "-25 to -37 %", METRICS[7].1, target);
    [sweep.with_splits(bs_3).with_figure(chart), bs_4]
}

/// BS-6: against the default on twice the cache.
fn doubled_cache_finding(
    context: &ExperimentContext<'_>,
    sizes: &[u64],
    policy: &NiagaraPolicy,
) -> Result<Finding, ReproError> {
    let mut per_seed = Vec::new();
    let mut leads: Vec<(u64, f64)> = Vec::new();
    for &seed in &context.seeds {
        let setting_at =
            |kb: u64| NiagaraSetting { mix: ThreadMix::Spec2000, ..NiagaraSetting::new(kb, seed, context) };
        let gains = context.run_all(sizes, |&kb| {
            let (new, twice) =
                (run_mix(&setting_at(kb), policy)?, run_mix(&setting_at(2 * kb), &NiagaraPolicy::Default)?);
            Ok(100.0 * (new.instructions_per_cycle() / twice.instructions_per_cycle() - 1.0))
        })?;
        per_seed.push((seed, gains.iter().copied().fold(f64::INFINITY, f64::min)));
        leads.extend(sizes.iter().copied().zip(gains));
    }
    let gains_at_size = |kb: u64| leads.iter().filter(|(at, _)| *at == kb).map(|(_, gain)| *gain).collect::<Vec<f64>>();
    let points: Vec<DataPoint> = sizes
        .iter()
        .map(|&kb| {
            DataPoint::over_values(
                "IPC of balance sets over the default's on twice the cache, %",
                format!("{kb} KB"),
                &gains_at_size(kb),
            )
        })
        .collect();
    let note = describe_shortfall(sizes.iter().map(|&kb| (kb, mean(&gains_at_size(kb)))), |value| value >= 0.0);
    Ok(Finding::declared("bs-6-twice-the-cache", &per_seed)
        .require_every_seed()
        .with_points(points)
        .with_note(note)
        .time_scale(SCALE as f64))
}
