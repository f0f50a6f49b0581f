//! INTERVAL-4: four and eight programs on one cache, sized online (MULTI at nominal time).
//!
//! The reference is the best known division: sharing, or the result of hill climbing from the sizes that the exact
//! solver computes from solo curves. A step moves one color between groups, or merges two groups.

use cachemate_core::SplitMix64;

use super::*;
use crate::cp::colors_of_least_cost;
use crate::cp::mixes::{PROGRAMS, draw_programs};
use crate::{DataPoint, Finding, ReproError, least};

/// Length of a run that only evaluates a division: several repetitions of the programs' phases.
const DIVISION_RUN_NS: u64 = 100_000_000_000;

/// Groups of programs and their numbers of colors.
#[derive(Clone, PartialEq, Debug)]
struct ColorSplit(Vec<(Vec<usize>, u32)>);

impl ColorSplit {
    /// The colors of each of `count` programs, in contiguous ranges.
    fn color_ranges(&self, count: usize) -> Vec<String> {
        let mut colors_by_program = vec![String::new(); count];
        let mut next_color = 0;
        for (members, colors) in &self.0 {
            let color_range = format!("{next_color}-{}", next_color + colors - 1);
            members
                .iter()
                .for_each(|&member| colors_by_program[member].clone_from(&color_range));
            next_color += colors;
        }
        colors_by_program
    }

    /// All divisions that one step leads to.
    fn neighbors(&self) -> Vec<ColorSplit> {
        let group_count = self.0.len();
        let transfers = (0..group_count)
            .flat_map(|giver| (0..group_count).map(move |taker| (giver, taker)))
            .filter(|(giver, taker)| giver != taker);

        let mut next_splits = Vec::new();
        for (giving_group, receiving_group) in transfers {
            if self.0[giving_group].1 > 1 {
                let mut moved_split = self.clone();
                moved_split.0[giving_group].1 -= 1;
                moved_split.0[receiving_group].1 += 1;
                next_splits.push(moved_split);
            }
            if giving_group < receiving_group {
                let mut merged_split = self.clone();
                let (members, colors) = merged_split.0.remove(receiving_group);
                merged_split.0[giving_group].0.extend(members);
                merged_split.0[giving_group].1 += colors;
                next_splits.push(merged_split);
            }
        }
        next_splits
    }
}

/// Climbs from `start_split`, each time to the best neighbor, and returns the best split.
fn climb_to_best_split(
    start_split: ColorSplit,
    mut worth: impl FnMut(&ColorSplit) -> Result<f64>,
) -> Result<ColorSplit> {
    let (mut best_split, mut best_speedup) = (start_split.clone(), worth(&start_split)?);
    loop {
        let mut better_split = None;
        for neighbor in best_split.neighbors() {
            let neighbor_speedup = worth(&neighbor)?;
            if neighbor_speedup > best_speedup {
                (best_speedup, better_split) = (neighbor_speedup, Some(neighbor));
            }
        }
        let Some(better_neighbor) = better_split else {
            return Ok(best_split);
        };
        best_split = better_neighbor;
    }
}

/// The solo speeds with 1, 2, ... colors, as costs.
fn measure_color_costs(
    context: &ExperimentContext<'_>,
    machine: &MachineSpec,
    job: &IntervalJob,
    seed: u64,
) -> Result<Vec<f64>> {
    let query = WhatIfQuery {
        length_ns: DIVISION_RUN_NS,
        ..build_query(context, machine, vec![job.clone()], seed)
    };
    let cost_with_colors = |colors: u32| {
        Ok(-speedup_of_outcome(&run_query(
            context,
            &query,
            &confining_policy(&[format!("0-{}", colors - 1)]),
        )?)
        .settled)
    };
    (1..=COLORS).map(cost_with_colors).collect()
}

/// Speed-ups of one mix, and each program's colors in the best known division.
fn measure_mix(
    context: &ExperimentContext<'_>,
    measured_programs: &[(&'static str, Arc<PhasedProgram>)],
    costs: &[(&'static str, Vec<f64>)],
    program_indices: &[usize],
    seed: u64,
) -> Result<(OnlineMix, Vec<String>)> {
    let machine = chip_with_cores(program_indices.len() as u32)?;
    let names: Vec<&str> = program_indices.iter().map(|&at| PROGRAMS[at]).collect();
    let jobs = names
        .iter()
        .map(|name| build_job(measured_programs, name, None))
        .collect::<Result<_, _>>()?;
    let query = build_query(context, &machine, jobs, seed);
    let trial_query = WhatIfQuery {
        length_ns: DIVISION_RUN_NS,
        ..query.clone()
    };

    let settled_speedup = |query: &WhatIfQuery, policy: &str| {
        Ok::<_, ReproError>(speedup_of_outcome(&run_query(context, query, policy)?).settled)
    };
    let costs_of_program = |name: &&str| {
        let entry = costs.iter().find(|(entry_name, _)| entry_name == name);
        Ok(entry.ok_or_else(|| failed(name)("has no costs"))?.1.clone())
    };
    let costs: Vec<Vec<f64>> = names.iter().map(costs_of_program).collect::<Result<_>>()?;
    let start_split = ColorSplit(
        colors_of_least_cost(costs)
            .iter()
            .enumerate()
            .map(|(at, &colors)| (vec![at], colors))
            .collect(),
    );
    let best_split = climb_to_best_split(start_split, |division| {
        settled_speedup(
            &trial_query,
            &confining_policy(&division.color_ranges(names.len())),
        )
    })?;
    let colors = best_split.color_ranges(names.len());
    let mix = OnlineMix {
        name: names.join("+"),
        shared: settled_speedup(&query, "default")?,
        divided: settled_speedup(&query, &confining_policy(&colors))?,
        online: run_online(context, &query)?,
    };
    Ok((mix, colors))
}

/// The findings of MULTI at nominal time.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let seed = context.seeds[0];
    let mixes_by_size: &[(usize, u64)] = context.pick(&[(4, 2)], &[(4, 11), (8, 6)]);
    let mixes: Vec<Vec<usize>> = mixes_by_size
        .iter()
        .flat_map(|&(count, mixes)| (0..mixes).map(move |nth| (count, nth)))
        .map(|(count, nth)| {
            draw_programs(
                &mut SplitMix64::new(seed.wrapping_mul(1_000_003) + (count as u64) * 1_000 + nth),
                count,
            )
        })
        .collect();
    let needed_programs: Vec<&'static str> =
        mixes.iter().flatten().map(|&at| PROGRAMS[at]).collect();

    let two_cores = chip_with_cores(2)?;
    let measured_programs = measure_programs(context, &needed_programs, &two_cores, seed)?;
    let color_costs = context.run_all(&measured_programs, |(name, _)| {
        Ok((
            *name,
            measure_color_costs(
                context,
                &two_cores,
                &build_job(&measured_programs, name, None)?,
                seed,
            )?,
        ))
    })?;
    let mixes_and_colors = context.run_all(&mixes, |program_indices| {
        context.report_progress(&format!("INTERVAL-4: {} programs", program_indices.len()));
        measure_mix(
            context,
            &measured_programs,
            &color_costs,
            program_indices,
            seed,
        )
    })?;
    let (online_mixes, colors): (Vec<OnlineMix>, Vec<Vec<String>>) =
        mixes_and_colors.into_iter().unzip();
    Ok((0..ONLINE_POLICIES.len())
        .flat_map(|policy| policy_findings(&online_mixes, &colors, policy, seed))
        .collect())
}

/// Findings for the policy at this position in [`ONLINE_POLICIES`].
fn policy_findings(
    online_mixes: &[OnlineMix],
    colors_by_mix: &[Vec<String>],
    policy_index: usize,
    seed: u64,
) -> Vec<Finding> {
    let points = online_mixes
        .iter()
        .zip(colors_by_mix)
        .flat_map(|(mix, colors)| {
            let best_gain = mix.gain_percent(mix.best_speedup());
            let label = format!("{} [{}]", mix.name, colors.join(" "));
            [
                DataPoint::from_values("best division known, % over shared", label, [best_gain]),
                DataPoint::from_values(
                    "online once settled, %",
                    &mix.name,
                    [mix.settled_gain_percent(policy_index)],
                ),
                DataPoint::from_values(
                    "online over the whole run, %",
                    &mix.name,
                    [mix.whole_gain_percent(policy_index)],
                ),
            ]
        });

    let shortfall =
        |mix: &OnlineMix| 100.0 * (1.0 - mix.online[policy_index].0.settled / mix.best_speedup());
    let policy_finding = |name: &str, value: f64| {
        Finding::declared_for(name, &[TITLE_STARTS[policy_index]], &[(seed, value)])
    };
    let worst_gain = least(
        online_mixes
            .iter()
            .map(|mix| mix.settled_gain_percent(policy_index)),
    );
    vec![
        policy_finding(
            "interval-4-short-of-best",
            mean(online_mixes.iter().map(shortfall)),
        )
        .with_points(points.collect())
        .with_note(format!(
            "{} mixes on one L2 of 16 colors, L3 off, the interval machine. The best division is the better of sharing and of a \
             climb from the exact sizes, clusters among its steps.",
            online_mixes.len()
        )),
        policy_finding("interval-4-worst-gain", worst_gain),
        search_price_finding("interval-4-price", online_mixes, policy_index, seed),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the climb find the best division, clusters included, if there is a single maximum?
    #[test]
    fn the_climb_finds_the_best_division_of_a_single_maximum() {
        let start = ColorSplit(vec![(vec![0], 6), (vec![1], 5), (vec![2], 5)]);
        let summit = ColorSplit(vec![(vec![0, 2], 14), (vec![1], 2)]);
        let best = climb_to_best_split(start, |at| {
            let is_shared =
                at.0.iter()
                    .any(|(members, _)| members.len() == 2 && !members.contains(&1));
            let second =
                at.0.iter()
                    .find(|(members, _)| members.contains(&1))
                    .map_or(0, |(_, colors)| *colors);
            Ok(f64::from(u8::from(is_shared)) * 20.0 - f64::from(second.abs_diff(2)))
        });
        assert_eq!(best.unwrap(), summit);
        assert_eq!(summit.color_ranges(3), ["0-13", "14-15", "0-13"]);
    }
}
