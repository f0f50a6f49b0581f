//! CA-8: run times of the same programs with the same inputs, arriving in different orders.

use std::collections::BTreeMap;

use super::online::{
    EIGHT_CORES, PlacementSource, QUICK_ORDERS, Testbed, arrival_seeds, percent_above,
    shuffle_arrivals, workload_jobs, workload_name,
};
use super::time_scale;
use crate::{DataPoint, ExperimentContext, Finding, Result, at_time_scale, mean};

/// The findings of CA-8: the same programs with the same inputs, arriving in different orders.
pub(super) fn findings(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let seeds = arrival_seeds(context, QUICK_ORDERS, 20.max(context.seeds.len() as u64));
    let orders = seeds.len();
    let workloads: Vec<usize> = context.pick(vec![1], (0..8).collect());
    let testbed = Testbed::load(context, EIGHT_CORES[0], time_scale(context))?;
    let policies = context.pick(
        vec![PlacementSource::Default, PlacementSource::Dio],
        vec![
            PlacementSource::Default,
            PlacementSource::DiWhole,
            PlacementSource::Dio,
        ],
    );
    let mut times_by_program: BTreeMap<(usize, String, PlacementSource), Vec<f64>> =
        BTreeMap::new();
    for &workload in &workloads {
        context.report_progress(&format!(
            "{}, {orders} orders of arrival",
            workload_name(workload)
        ));
        let programs = workload_jobs(workload, 2, 1);
        let requests: Vec<(u64, PlacementSource)> = seeds
            .iter()
            .flat_map(|&seed| policies.iter().map(move |&source| (seed, source)))
            .collect();
        let slowdowns_by_run = context.run_all(&requests, |&(seed, source)| {
            let jobs = shuffle_arrivals(&programs, seed);
            let slowdowns = testbed
                .measure_slowdowns(source, &jobs, None, seed)?
                .slowdowns_by_job;
            Ok(jobs
                .into_iter()
                .map(|job| job.name)
                .zip(slowdowns)
                .collect::<Vec<(String, f64)>>())
        })?;
        for ((_, source), slowdowns) in requests.iter().zip(slowdowns_by_run) {
            for (name, slowdown) in slowdowns {
                times_by_program
                    .entry((workload, name, *source))
                    .or_default()
                    .push(slowdown);
            }
        }
    }
    Ok(at_time_scale(
        time_scale(context) as f64,
        findings_by_program(&seeds, &policies[1..], &times_by_program),
    ))
}

fn deviation_percent(values: &[f64]) -> f64 {
    let mean = mean(values);
    100.0
        * (values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / values.len() as f64).sqrt()
        / mean
}

fn findings_by_program(
    seeds: &[u64],
    policies: &[PlacementSource],
    times_by_program: &BTreeMap<(usize, String, PlacementSource), Vec<f64>>,
) -> Vec<Finding> {
    let mut points = Vec::new();
    let mut deviations: BTreeMap<PlacementSource, Vec<f64>> = BTreeMap::new();
    let mut best_gains: BTreeMap<PlacementSource, f64> = BTreeMap::new();
    let max_slowdown = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);

    for ((workload, name, source), values) in times_by_program {
        let label = format!("{}, {name}", workload_name(*workload));
        let deviation = deviation_percent(values);
        deviations.entry(*source).or_default().push(deviation);
        points.push(DataPoint::from_values(
            format!("run time over alone, {}", source.name()),
            label.clone(),
            values,
        ));
        points.push(DataPoint::from_values(
            format!("deviation, {}, %", source.name()),
            label.clone(),
            [deviation],
        ));

        if *source != PlacementSource::Default {
            let default_times =
                &times_by_program[&(*workload, name.clone(), PlacementSource::Default)];
            let worst_case_gain = percent_above(max_slowdown(default_times), max_slowdown(values));
            let best_gain = best_gains.entry(*source).or_insert(f64::NEG_INFINITY);
            *best_gain = best_gain.max(worst_case_gain);
            points.push(DataPoint::from_values(
                format!("worst case over the default's, {}, %", source.name()),
                label,
                [worst_case_gain],
            ));
        }
    }

    let ratio = |source: PlacementSource| {
        100.0 * mean(&deviations[&source]) / mean(&deviations[&PlacementSource::Default])
    };
    let mut findings = Vec::new();
    for &source in policies {
        let labels = [source.name().to_uppercase(), seeds.len().to_string()];
        for (name, value) in [
            ("ca-8-deviation", ratio(source)),
            ("ca-8-worst-case", best_gains[&source]),
        ] {
            let labels = labels.each_ref().map(String::as_str);
            findings
                .push(Finding::declared_for(name, &labels, &[(seeds[0], value)]).over_seeds(seeds));
        }
    }
    findings[0].points = points;
    findings[0].note =
        "Inputs are the same in all runs; the order of arrival and the frames differ. Deviations are means \
                        over programs of standard deviation over mean."
            .to_string();
    findings
}
