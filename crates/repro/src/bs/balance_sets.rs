//! BS-2, -3, -4, -6: a mix on two cores at several sizes of the L2, under the default scheduler and balance sets.

use crate::niagara::cells::{
    METRICS, SizeSweep, describe_shortfall, measure_bandwidth_sweep, metric_points, run_cells,
    size_chart, size_label,
};
use crate::niagara::{
    NiagaraPolicy, NiagaraSetting, TIME_SCALE, ThreadMix, l2_miss_ratio, run as run_mix,
    sensitivity,
};
use crate::setup::failed;
use crate::{DataPoint, ExperimentContext, Finding, Result, mean};

/// One group per time slice, as in the paper (BS 3): the machine's own slice instead of the policy's turn lengths.
const BALANCE_SET_PARAMETERS: &str =
    "locations = 500\nreplacement = \"lru\"\nslice_ns = 10_000_000\n";

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let sizes: &[u64] = context.pick(&[192], &[48, 96, 192, 384]);
    let uniform_policy = paper_policy();
    let uniform_cells = run_cells(context, ThreadMix::Spec2000, &uniform_policy, sizes)?;
    let mut all_points = metric_points(UNIFORM_NAME, &uniform_cells, sizes, size_label);
    let fair_cells = run_cells(
        context,
        ThreadMix::Spec2000,
        &NiagaraPolicy::BalanceSet(BALANCE_SET_PARAMETERS.to_string()),
        sizes,
    )?;
    all_points.extend(metric_points(FAIR_NAME, &fair_cells, sizes, size_label));

    if !context.quick {
        all_points.extend(sensitivity::compare_variations(
            context,
            ThreadMix::Spec2000,
            &uniform_policy,
            &[],
        )?);
        let composed_policy = NiagaraPolicy::BalanceSet(format!(
            "{BALANCE_SET_PARAMETERS}group_model = \"composed\""
        ));
        all_points.extend(metric_points(
            "composed",
            &run_cells(context, ThreadMix::Spec2000, &composed_policy, &[192])?,
            &[192],
            size_label,
        ));

        let casc_cells = run_cells(context, ThreadMix::Casc, &uniform_policy, sizes)?;
        all_points.extend(metric_points(
            "balance sets on CASC's 18 threads",
            &casc_cells,
            sizes,
            size_label,
        ));
    }

    let (bandwidth_points, bandwidth_figure) = measure_bandwidth_sweep(
        context,
        ThreadMix::Spec2000,
        &uniform_policy,
        "bs-3-bandwidth",
        UNIFORM_NAME,
    )?;
    all_points.extend(bandwidth_points);
    let scale = TIME_SCALE as f64;
    let default_sizes: Vec<u64> = context
        .pick(&[96, 384][..], &[48, 96, 192, 384, 768][..])
        .to_vec();

    let setting_of = |kb, seed| NiagaraSetting {
        mix: ThreadMix::Spec2000,
        ..NiagaraSetting::new(kb, seed, context)
    };
    let default_runs = context.run_unstored_cases(&default_sizes, |kb, seed| {
        let default = run_mix(&setting_of(kb, seed), &NiagaraPolicy::Default)?;
        let miss_ratio =
            l2_miss_ratio(&default).ok_or_else(|| failed("default")("no references"))?;
        Ok((default.instructions_per_cycle(), miss_ratio))
    })?;

    let ipc_change_percent =
        |runs: &[&(f64, f64)]| 100.0 * (runs[0].0 / runs[runs.len() - 1].0 - 1.0);
    let ipc_changes = default_runs.per_seed(ipc_change_percent);
    let mut ipc_by_size = Vec::new();
    for &kb in &default_sizes {
        ipc_by_size.push(default_runs.point(kb, "IPC", size_label(kb), |run| run.0));
        ipc_by_size.push(default_runs.point(kb, "L2 miss ratio", size_label(kb), |run| run.1));
    }

    let series = ["IPC", "L2 miss ratio"];
    let bs_2 = Finding::declared("bs-2-smallest-cache", &ipc_changes)
        .with_figure(size_chart(
            "bs-2-second-level",
            "A mix of SPEC CPU2000 on two cores",
            "IPC, misses per reference",
            &ipc_by_size,
            &series,
        ))
        .with_points(ipc_by_size)
        .with_time_scale(scale);
    let mut findings = vec![bs_2];
    for (form, cells) in [(UNIFORM_NAME, &uniform_cells), (FAIR_NAME, &fair_cells)] {
        findings.extend(throughput_and_misses(
            form,
            SizeSweep {
                cells,
                sizes,
                points: &all_points,
            },
        ));
    }
    findings[1].figures.push(bandwidth_figure);
    findings.push(doubled_cache_finding(context, sizes, &uniform_policy)?);
    Ok(findings)
}

/// The paper's form: all qualifying groups run equally often (BS 4).
const UNIFORM_NAME: &str = "balance sets";
/// Our form: turns that give threads time as evenly as the threshold allows.
const FAIR_NAME: &str = "balance sets with fair turns";

fn paper_policy() -> NiagaraPolicy {
    NiagaraPolicy::BalanceSet(format!("{BALANCE_SET_PARAMETERS}rotation = \"uniform\"\n"))
}

/// The findings of BS-3 and BS-4 for one form.
fn throughput_and_misses(form: &str, sweep: SizeSweep<'_>) -> [Finding; 2] {
    let series = [
        "throughput gain %",
        "of which mix %",
        "of which contention %",
    ]
    .map(|title| format!("{form}: {title}"));
    let series: Vec<&str> = series.iter().map(String::as_str).collect();
    let name = if form == UNIFORM_NAME {
        "bs-3-throughput"
    } else {
        "bs-3-throughput-fair-turns"
    };
    let bs_3 = sweep.worst_size_finding("bs-3-throughput", &[form], METRICS[0].1);
    let chart = size_chart(
        name,
        "Gain of balance sets and what it is made of",
        "%",
        sweep.points,
        &series,
    );
    let bs_4 = sweep.worst_size_finding("bs-4-miss-ratio", &[form], METRICS[7].1);
    [sweep.with_gain_parts(bs_3).with_figure(chart), bs_4]
}

/// The findings of BS-6: against the default on twice the cache.
fn doubled_cache_finding(
    context: &ExperimentContext<'_>,
    sizes: &[u64],
    policy: &NiagaraPolicy,
) -> Result<Finding> {
    let leads = context.run_unstored_cases(sizes, |kb, seed| {
        let setting_of = |kb: u64| NiagaraSetting {
            mix: ThreadMix::Spec2000,
            ..NiagaraSetting::new(kb, seed, context)
        };
        let (policy_run, double_cache_run) = (
            run_mix(&setting_of(kb), policy)?,
            run_mix(&setting_of(2 * kb), &NiagaraPolicy::Default)?,
        );
        Ok(100.0
            * (policy_run.instructions_per_cycle() / double_cache_run.instructions_per_cycle()
                - 1.0))
    })?;
    let series = "IPC of balance sets over the default's on twice the cache, %";
    let points: Vec<DataPoint> = sizes
        .iter()
        .map(|&kb| leads.point(kb, series, size_label(kb), |&lead| lead))
        .collect();
    let note = describe_shortfall(
        sizes.iter().map(|&kb| (kb, mean(leads.of_case(kb)))),
        |value| value >= 0.0,
    );
    Ok(
        Finding::declared("bs-6-twice-the-cache", &leads.least_per_seed(|&lead| lead))
            .require_every_seed()
            .with_points(points)
            .with_note(note)
            .with_time_scale(TIME_SCALE as f64),
    )
}
