//! CA-1, CA-4 and CA-5 from one measured matrix of pairs, and CA-3 from the published matrix.
//!
//! A scheme that predicts slowdowns from profiles is worth what its schedules are worth, and all
//! schedules of ten programs follow from one matrix of pairs. So each pair is run once, and each
//! scheme chooses a schedule that is then scored by the measured matrix, in percent above the best
//! one.
//!
//! For example, of four programs on two caches there are three schedules, with mean slowdowns of 8,
//! 11 and 20 % by the matrix. A scheme that chooses the second is 3 points, or 38 %, above the
//! optimum; the random mean of 13 is 63 % above it.

use cachemate_core::{Fact, Profile};
use cachemate_papers::matrix::PairCosts;
use cachemate_papers::schemes::{self, SharedCache};
use cachemate_papers::solvers::{self, Seats};
use cachemate_report::figure::{Axis, BarChart, Chart, HeatMap, Series};
use cachemate_spec::parse_measured_matrix;

use super::{TEN_PROGRAMS, program_jobs, program_names};
use crate::corun::{CoRunBench, CoRunMatrix};
use crate::setup::{WorkloadJob, failed};
use crate::{
    DataPoint, ExperimentContext, Finding, Result, ResultFigure, bar_groups, greatest,
    line_through, mean, solo,
};

/// Numbers of cores of the compared machines; every two cores share a cache.
const CORE_COUNTS: [usize; 4] = [4, 6, 8, 10];

/// Matrix of one seed, and the profiles from which the schemes predict.
struct SchemeInputs {
    matrix: CoRunMatrix,
    profiles: Vec<Profile>,
    /// Programs with more misses than the mean of the paper's ten (CA 4.1).
    is_intensive: Vec<bool>,
    cache: SharedCache,
}

fn gather_inputs(context: &ExperimentContext<'_>) -> Result<Vec<SchemeInputs>> {
    let mut inputs = Vec::new();
    for &seed in &context.seeds {
        let (warm_up, measured_cycles) = context.pick_by_length(
            (2_000_000, 1_000_000),
            (12_000_000, 6_000_000),
            (25_000_000, 15_000_000),
        );
        let bench = CoRunBench::load("pairs-04", seed, warm_up, measured_cycles)?;
        let jobs = program_jobs(program_names(context), seed);
        context.report_progress(&format!("pairs of {} programs, seed {seed}", jobs.len()));
        let matrix = CoRunMatrix::measure(context, &bench, &jobs, true)?;
        let accesses = context.pick(2_000_000, 6_000_000);
        // The mean covers all ten programs, also those that a quick run leaves out, because a program is intensive
        // relative to the mean of all.
        let ten_jobs = program_jobs(&TEN_PROGRAMS, seed);
        let solo_profiles = context.run_all(&ten_jobs, |job: &WorkloadJob| {
            solo::profile_job(job, &bench.machine, accesses)
        })?;
        let is_intensive = intensive_flags(&solo_profiles);
        let solo_speeds = matrix.solo_rates.iter().map(|rates| rates.instr_per_cycle);
        let profiles = solo_profiles.into_iter().zip(solo_speeds);
        let profile_with_speed = |(mut profile, instr_per_cycle): (Profile, f64)| {
            profile.rates.solo_instr_per_cycle = Some(Fact::oracle(instr_per_cycle));
            profile
        };
        let profiles = profiles.map(profile_with_speed).collect();
        let cache = SharedCache::from_machine(&bench.machine)
            .ok_or_else(|| failed("pairs-04")("no shared cache"))?;
        inputs.push(SchemeInputs {
            matrix,
            profiles,
            is_intensive,
            cache,
        });
    }
    Ok(inputs)
}

/// The findings of CA-1, CA-4 and CA-5.
pub(super) fn compare_schemes(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let scheme_inputs = gather_inputs(context)?;
    let mut findings = vec![optimal_finding(context, &scheme_inputs)?];
    findings.extend(make_up_findings(context, &scheme_inputs));
    findings.push(miss_order_findings(context, &scheme_inputs));
    Ok(findings)
}

/// All choices of `size` out of `programs` programs.
fn program_subsets(programs: usize, size: usize) -> Vec<Vec<usize>> {
    let members_of = |member_bits: u32| {
        (0..programs)
            .filter(|index| member_bits >> index & 1 == 1)
            .collect::<Vec<usize>>()
    };
    (0u32..1 << programs)
        .filter(|set| set.count_ones() as usize == size)
        .map(members_of)
        .collect()
}

fn sub_matrix(costs: &PairCosts, members: &[usize]) -> Vec<Vec<f64>> {
    members
        .iter()
        .map(|&i| members.iter().map(|&j| costs.cost[i][j]).collect())
        .collect()
}

/// The mean slowdown of every scheme's best schedule in percent above the optimal one, over all
/// workloads of this many programs; the last two rows are the random mean and the worst schedule.
fn excess_over_optimal(scheme_inputs: &SchemeInputs, cores: usize) -> Result<Vec<(String, f64)>> {
    let profiles: Vec<&Profile> = scheme_inputs.profiles.iter().collect();
    let mut costs_by_scheme = Vec::new();
    for scheme in schemes::all_schemes() {
        // A scheme whose input a profile lacks (PCMRs are measured online) is left out.
        if let Ok(costs) = scheme.pair_costs(&profiles, &scheme_inputs.cache) {
            costs_by_scheme.push((scheme.name().to_string(), costs));
        }
    }

    let measured_costs = scheme_inputs.matrix.costs();
    let seats = Seats {
        cpus_per_cache: vec![2; cores / 2],
    };
    let mut excess_by_scheme: Vec<Vec<f64>> = vec![Vec::new(); costs_by_scheme.len() + 2];
    for workload in program_subsets(scheme_inputs.profiles.len(), cores) {
        let measured_sub_matrix = sub_matrix(&measured_costs, &workload);
        let mean_percent = |total: f64| 100.0 * total / cores as f64;
        let best_percent =
            mean_percent(solvers::best_assignment(&measured_sub_matrix, &seats).total);
        for (row, (_, costs)) in costs_by_scheme.iter().enumerate() {
            let chosen_seating =
                solvers::best_assignment(&sub_matrix(costs, &workload), &seats).seating;
            excess_by_scheme[row]
                .push(mean_percent(chosen_seating.total_cost(&measured_sub_matrix)) - best_percent);
        }
        excess_by_scheme[costs_by_scheme.len()].push(
            mean_percent(solvers::random_totals(&measured_sub_matrix, &seats, 1).mean)
                - best_percent,
        );
        excess_by_scheme[costs_by_scheme.len() + 1].push(
            mean_percent(solvers::worst_assignment(&measured_sub_matrix, &seats).total)
                - best_percent,
        );
    }
    let names = costs_by_scheme
        .into_iter()
        .map(|(name, _)| name)
        .chain(["random".to_string(), "worst".to_string()]);
    Ok(names
        .zip(excess_by_scheme)
        .map(|(name, values)| (name, mean(&values)))
        .collect())
}

fn optimal_finding(
    context: &ExperimentContext<'_>,
    scheme_inputs: &[SchemeInputs],
) -> Result<Finding> {
    let core_counts: Vec<usize> = CORE_COUNTS
        .into_iter()
        .filter(|&cores| cores <= scheme_inputs[0].profiles.len())
        .collect();
    let mut points = Vec::new();
    let mut worst_pain_by_seed = vec![f64::NEG_INFINITY; scheme_inputs.len()];

    let mut names: Vec<String> = Vec::new();
    for &cores in &core_counts {
        let excess_by_seed: Vec<Vec<(String, f64)>> = scheme_inputs
            .iter()
            .map(|seed_inputs| excess_over_optimal(seed_inputs, cores))
            .collect::<Result<_, _>>()?;

        for (row, (name, _)) in excess_by_seed[0].iter().enumerate() {
            let values: Vec<f64> = excess_by_seed.iter().map(|seed| seed[row].1).collect();
            if name == "pain" {
                worst_pain_by_seed
                    .iter_mut()
                    .zip(&values)
                    .for_each(|(worst, &value)| *worst = worst.max(value));
            }

            points.push(DataPoint::from_values(name, cores.to_string(), &values));
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
    }

    let figure = Chart {
        title: "Mean slowdown above the optimal schedule, all workloads".into(),
        x: Axis::linear("cores, two to each cache"),
        y: Axis::linear("percentage points"),
        series: names
            .iter()
            .map(|name| Series {
                has_whiskers: true,
                ..line_through(&points, name)
            })
            .collect(),
        ..Chart::default()
    };

    let per_seed = context.with_seeds(worst_pain_by_seed);
    let workloads: Vec<String> = core_counts
        .iter()
        .map(|&cores| {
            program_subsets(scheme_inputs[0].profiles.len(), cores)
                .len()
                .to_string()
        })
        .collect();
    let note = format!(
        "{} workloads of {} programs on {:?} cores; slowdowns from pair runs on two cores of one cache, schedules \
         judged by them as in the paper. Schemes see profiles of the stream alone and the IPC alone.",
        workloads.join(", "),
        scheme_inputs[0].profiles.len(),
        core_counts,
    );
    Ok(Finding::declared("ca-1-above-optimal", &per_seed)
        .with_points(points)
        .with_note(note)
        .with_figure(ResultFigure::chart("ca-1-schemes", &figure)))
}

/// Whether each program misses more than the mean of all (CA 4.1). The rates are DI's, from
/// stack-distance profiles: every line that a program needs from memory. A count of demand misses
/// would leave out those that a prefetcher brought, and with them the programs that stream.
fn intensive_flags(profiles: &[Profile]) -> Vec<bool> {
    let needed_lines = |profile: &Profile| {
        profile
            .stack_positions()
            .and_then(<[f64]>::last)
            .copied()
            .unwrap_or(f64::NAN)
    };
    let rates: Vec<f64> = profiles.iter().map(needed_lines).collect();
    let mean = mean(&rates);
    rates.iter().map(|&rate| rate > mean).collect()
}

fn make_up_findings(
    context: &ExperimentContext<'_>,
    scheme_inputs: &[SchemeInputs],
) -> Vec<Finding> {
    let seats = Seats {
        cpus_per_cache: vec![2; 2],
    };

    // Gains by number of memory-intensive programs, one list per seed.
    let mut gains_by_seed: Vec<Vec<Vec<f64>>> = vec![vec![Vec::new(); 5]; scheme_inputs.len()];
    for (seed, seed_inputs) in scheme_inputs.iter().enumerate() {
        let (is_intensive, costs) = (&seed_inputs.is_intensive, seed_inputs.matrix.costs());
        for workload in program_subsets(seed_inputs.profiles.len(), 4) {
            let measured_sub_matrix = sub_matrix(&costs, &workload);
            let relative_time = |total: f64| 1.0 + total / 4.0;
            let gain = relative_time(solvers::worst_assignment(&measured_sub_matrix, &seats).total)
                / relative_time(solvers::best_assignment(&measured_sub_matrix, &seats).total)
                - 1.0;
            let intensive_count = workload
                .iter()
                .filter(|&&program| is_intensive[program])
                .count();
            gains_by_seed[seed][intensive_count].push(100.0 * gain);
        }
    }

    let mut points = Vec::new();
    for intensive_count in 0..5 {
        let label = format!("{intensive_count} intensive of 4");
        let all_gains = gains_by_seed.iter().flat_map(|seed| &seed[intensive_count]);
        points.push(DataPoint::from_values(
            "mean, least and greatest gain",
            label,
            all_gains,
        ));
    }

    let ratio_to_next_make_up = |seed: &Vec<Vec<f64>>| {
        // NaN if no workload has this number, which `max` ignores.
        let means: Vec<f64> = seed.iter().map(mean).collect();
        means[2]
            / [means[0], means[1], means[3], means[4]]
                .into_iter()
                .fold(f64::NAN, f64::max)
    };
    let ratios = context.with_seeds(gains_by_seed.iter().map(ratio_to_next_make_up));

    let figure = BarChart {
        title: "Gain of the best over the worst schedule, by make-up of the workload".into(),
        y: Axis::linear("percent"),
        series: vec!["gain".into()],
        groups: bar_groups(&points, &["mean, least and greatest gain"]),
        ..BarChart::default()
    };

    let max_gain = |seed: &Vec<Vec<f64>>| greatest(seed.iter().flatten());
    let max_gains = context.with_seeds(gains_by_seed.iter().map(max_gain));
    let make_up_finding = Finding::declared("ca-4-make-up", &ratios)
        .with_points(points)
        .with_figure(ResultFigure::bars("ca-4-make-up", &figure));
    vec![
        make_up_finding,
        Finding::declared("ca-4-greatest-gain", &max_gains),
    ]
}

fn miss_order_findings(context: &ExperimentContext<'_>, scheme_inputs: &[SchemeInputs]) -> Finding {
    let mut points = Vec::new();
    let mut changed_pair_counts = Vec::new();
    let names = &scheme_inputs[0].matrix.names;
    let metric_row =
        |value_of: &dyn Fn(&CoRunMatrix, usize) -> f64, program_index: usize| -> Vec<f64> {
            scheme_inputs
                .iter()
                .map(|evidence| value_of(&evidence.matrix, program_index))
                .collect()
        };

    let solo_mpki = |matrix: &CoRunMatrix, program_index: usize| {
        matrix.solo_rates[program_index].misses_per_kilo_instr
    };
    let max_mpki = |matrix: &CoRunMatrix, program_index: usize| {
        matrix.pair_rates[program_index]
            .iter()
            .map(|rates| rates.misses_per_kilo_instr)
            .fold(solo_mpki(matrix, program_index), f64::max)
    };

    for (program_index, name) in names.iter().enumerate() {
        points.push(DataPoint::from_values(
            "alone",
            name,
            metric_row(&solo_mpki, program_index),
        ));
        points.push(DataPoint::from_values(
            "most beside any other",
            name,
            metric_row(&max_mpki, program_index),
        ));
    }

    let mut pairs: Vec<String> = Vec::new();
    for seed_inputs in scheme_inputs {
        let matrix = &seed_inputs.matrix;
        let mut swapped_pairs = 0;
        for i in 0..names.len() {
            for j in 0..names.len() {
                if solo_mpki(matrix, i) > solo_mpki(matrix, j)
                    && max_mpki(matrix, i) < max_mpki(matrix, j)
                {
                    swapped_pairs += 1;
                    pairs.push(format!("{} and {}", names[i], names[j]));
                }
            }
        }
        changed_pair_counts.push(f64::from(swapped_pairs));
    }
    pairs.sort();
    pairs.dedup();

    let figure = BarChart {
        title: "Misses per 1000 instructions, alone and at most beside another".into(),
        y: Axis::linear("misses per 1000 instructions"),
        series: vec!["alone".into(), "most".into()],
        groups: bar_groups(&points, &["alone", "most beside any other"]),
        ..BarChart::default()
    };

    let miss_rate_map = HeatMap {
        title: "Slowdown (of the row's program beside the column's), first seed".into(),
        rows: names.clone(),
        columns: names.clone(),
        row_label: "victim".into(),
        column_label: "beside".into(),
        values: scheme_inputs[0]
            .matrix
            .costs()
            .cost
            .iter()
            .map(|r| r.iter().map(|d| Some(100.0 * d)).collect())
            .collect(),
        unit: "%".into(),
        decimals: Some(0),
        ..HeatMap::default()
    };

    let per_seed = context.with_seeds(changed_pair_counts);
    let pair_count = names.len() * (names.len() - 1) / 2;
    let note = match pairs.is_empty() {
        true => format!("None of {pair_count} pairs changes."),
        false => format!("Of {pair_count} pairs: {}.", pairs.join(", ")),
    };
    Finding::declared("ca-5-order", &per_seed)
        .with_points(points)
        .with_note(note)
        .with_figure(ResultFigure::bars("ca-5-order", &figure))
        .with_figure(ResultFigure::heat_map("ca-1-slowdowns", &miss_rate_map))
}

/// CA Table 1, measured on the paper's Xeon.
const PUBLISHED_TABLE_1: &str = "\
,mcf,milc,gamess,namd
mcf,48.01%,65.63%,2.0%,2.11%
milc,24.75%,45.39%,1.23%,1.11%
gamess,2.67%,4.48%,-1.01%,-1.21%
namd,1.48%,3.45%,-1.19%,-0.93%
";
/// CA 2.1.1 and Figure 2: mean slowdown of the three schedules in percent, mcf beside each of the others.
const PUBLISHED_SCHEDULES: [(&str, f64); 3] =
    [("milc", 21.995), ("gamess", 2.3075), ("namd", 2.325)];

/// The findings of CA-3: is the published best schedule found, with the published mean?
pub(super) fn published_findings(_context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let measured_table =
        parse_measured_matrix("CA Table 1", PUBLISHED_TABLE_1).map_err(failed("CA-3"))?;
    let costs = PairCosts::from_slowdowns(measured_table.slowdowns);
    let cost = &costs.cost;
    let seats = Seats {
        cpus_per_cache: vec![2; 2],
    };
    let mean_percent = |total: f64| 100.0 * total / 4.0;
    let (best_assignment, worst_assignment) = (
        solvers::best_assignment(cost, &seats),
        solvers::worst_assignment(cost, &seats),
    );
    let mut points = vec![
        DataPoint::from_values("solver", "best", [mean_percent(best_assignment.total)]),
        DataPoint::from_values("solver", "worst", [mean_percent(worst_assignment.total)]),
        DataPoint::from_values(
            "solver",
            "random",
            [mean_percent(solvers::random_totals(cost, &seats, 1).mean)],
        ),
    ];
    let mut max_deviation = (mean_percent(best_assignment.total) - PUBLISHED_SCHEDULES[1].1)
        .abs()
        .max((mean_percent(worst_assignment.total) - PUBLISHED_SCHEDULES[0].1).abs());
    for (index, (mcf_partner, published_mean)) in PUBLISHED_SCHEDULES.into_iter().enumerate() {
        let other_pair: Vec<usize> = (1..4).filter(|&program| program != index + 1).collect();
        let computed_mean = mean_percent(
            costs.mutual_cost(0, index + 1) + costs.mutual_cost(other_pair[0], other_pair[1]),
        );
        max_deviation = max_deviation.max((computed_mean - published_mean).abs());
        points.push(DataPoint::from_values(
            "mean slowdown",
            format!("mcf beside {mcf_partner}"),
            [computed_mean],
        ));
    }
    let pair_texts: Vec<String> = best_assignment
        .seating
        .by_cache
        .iter()
        .map(|cache| describe_cache(cache, &measured_table.names))
        .collect();
    let finding = Finding::declared("ca-3-published", &[(0, max_deviation)]);
    Ok(vec![
        finding
            .with_points(points)
            .with_note(format!("Best: {}.", pair_texts.join(" and "))),
    ])
}

fn describe_cache(cache: &[Vec<usize>], names: &[String]) -> String {
    cache
        .iter()
        .flatten()
        .map(|&index| names[index].as_str())
        .collect::<Vec<_>>()
        .join(" + ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::quick_context;
    /// Does the number of workloads match the paper's?
    #[test]
    fn the_number_of_workloads_matches_the_papers() {
        assert_eq!(
            [4, 6, 8, 10].map(|size| program_subsets(10, size).len()),
            [210, 210, 45, 1]
        );
    }

    /// Does the published table give the published schedules and the best pairs, by name?
    #[test]
    fn the_published_table_gives_the_published_schedules() {
        let context = quick_context();
        let findings = published_findings(&context).unwrap();
        assert_eq!(
            findings[0].verdict,
            Some(crate::ResultVerdict::Met),
            "{findings:?}"
        );
        assert_eq!(findings[0].note, "Best: mcf + gamess and milc + namd.");
    }
}
