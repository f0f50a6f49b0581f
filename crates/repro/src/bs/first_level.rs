//! BS-1: throughput of four copies of one program at several sizes of the L1.

use cachemate_core::CacheLevel;
use cachemate_sim::results::RunResults;

use crate::niagara::cells::size_chart;
use crate::niagara::{NiagaraSetting, SPEC_2000_PROGRAMS, TIME_SCALE};
use crate::setup::{WorkloadJob, failed};
use crate::{DataPoint, ExperimentContext, Finding, Result, mean};

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let programs: &[&str] = context.pick(&["gzip", "mcf", "twolf"], &SPEC_2000_PROGRAMS);
    let sizes: &[u64] = context.pick(&[8, 128], &[8, 16, 32, 64, 128]);
    let cases: Vec<(u64, &str)> = sizes
        .iter()
        .flat_map(|&kb| programs.iter().map(move |&program| (kb, program)))
        .collect();

    let runs = context.run_unstored_cases(&cases, |(kb, program), seed| {
        context.report_progress(&format!("four copies of {program}, {kb} KB L1D"));
        let setting = NiagaraSetting {
            l2_kb: 3072,
            ..NiagaraSetting::new(768, seed, context)
        };
        let mut workload = setting
            .build_workload(WorkloadJob::copies(program, 4, seed))?
            .with_length(2_000_000, 4_000_000);
        workload.machine.cores_per_package = 1;
        workload
            .machine
            .caches
            .iter_mut()
            .for_each(|cache| cache.shared_by_cores = 1);

        let l1 = workload
            .machine
            .caches
            .iter_mut()
            .find(|cache| cache.level == CacheLevel::L1Data);
        l1.ok_or_else(|| failed("BS-1")("no L1 data cache"))?
            .size_bytes = kb << 10;
        workload.unmanaged_run()
    })?;

    let metric_at_size =
        |value: fn(&RunResults) -> Option<f64>, kb: u64, seeds: &[u64]| -> Vec<f64> {
            let values_of_seed = |&seed: &u64| {
                programs
                    .iter()
                    .filter_map(|&program| value(runs.get((kb, program), seed)?))
                    .collect::<Vec<_>>()
            };
            seeds.iter().flat_map(values_of_seed).collect()
        };

    let ipc: fn(&RunResults) -> Option<f64> = |run| Some(run.instructions_per_cycle());
    let misses: fn(&RunResults) -> Option<f64> = |run| {
        run.level_breakdown(CacheLevel::L1Data)?
            .miss_ratio()
            .map(|ratio| 100.0 * ratio)
    };

    let mut points = Vec::new();
    for &kb in sizes {
        points.push(DataPoint::from_values(
            "IPC",
            format!("{kb} KB"),
            metric_at_size(ipc, kb, &context.seeds),
        ));
        points.push(DataPoint::from_values(
            "L1D miss ratio %",
            format!("{kb} KB"),
            metric_at_size(misses, kb, &context.seeds),
        ));
    }

    let (smallest_kb, largest_kb) = (sizes[0], sizes[sizes.len() - 1]);
    let ipc_change_percent = |seed: u64| {
        let mean_ipc_at = |kb: u64| mean(metric_at_size(ipc, kb, &[seed]));
        100.0 * (mean_ipc_at(smallest_kb) / mean_ipc_at(largest_kb) - 1.0)
    };
    let per_seed = context.values_by_seed(ipc_change_percent);
    let figure = size_chart(
        "bs-1-first-level",
        "Mean IPC of four copies over the L1D (L2 3 MB)",
        "IPC",
        &points,
        &["IPC"],
    );
    let miss_ratios =
        [smallest_kb, largest_kb].map(|kb| mean(metric_at_size(misses, kb, &context.seeds)));
    let note = format!(
        "Mean over the programs; the points' intervals are the programs' least and most. The L2 is 3 MB, large against four copies, \
         as the paper's is not stated. Of data accesses {:.0} % miss the smallest L1D and {:.0} % the largest.",
        miss_ratios[0], miss_ratios[1]
    );
    Ok(vec![
        Finding::declared("bs-1-first-level", &per_seed)
            .with_points(points)
            .with_figure(figure)
            .with_note(note)
            .with_time_scale(TIME_SCALE as f64),
    ])
}
