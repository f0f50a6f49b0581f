//! Attributes a slowdown to its causes, by the eight runs of CA 3, for any program on any machine.
//!
//! Problem: two programs on one cache compete for its space, for the bus, for the memory controller and for prefetching
//! at once. Method: move the other program away step by step (same cache, other cache of the package, other package,
//! gone), with prefetching on and off. What disappears with a step is due to what was shared until then:
//! - memory controller = (other package, off) - (alone, off)
//! - bus = (other cache, off) - (other package, off)
//! - cache = (same cache, off) - (other cache, off), all three over (alone, off)
//! - total = (same cache, on) over (alone, on), minus one; prefetching = the rest.
//!
//! Properties: the parts add up to the total by construction. The controller's is a lower bound (no extra misses, no
//! prefetches), prefetching's an upper one. If a machine lacks a step (one package, one cache to a package), the two
//! parts that it would separate are one. Times are cycles per instruction over equal work ([`crate::work`]): all eight
//! runs time the same instructions, those that the program executes alone with prefetching in the measured cycles.

use cachemate_core::{CpuId, Topology};
use cachemate_sim::machine::SimOptions;
use serde::{Deserialize, Serialize};

use crate::corun::{CoRunBench, cpus_by_cache};
use crate::setup::{WorkloadJob, failed};
use crate::{ExperimentContext, Result};

/// Location of the co-runner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CoRunnerPlace {
    /// There is no co-runner: the program runs alone.
    None,
    /// Another package, so that only the memory controller is shared.
    OtherPackage,
    /// Another cache of the same package, so that the bus is shared as well.
    OtherCache,
    /// The same cache, so that its space is shared as well.
    SameCache,
}

/// One of the eight runs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct DecompositionRun {
    /// Location of the co-runner.
    pub co_runner_location: CoRunnerPlace,
    /// Whether the machine's prefetchers were enabled.
    pub prefetching: bool,
    /// Cycles per instruction of the program over its work.
    pub cycles_per_instr: f64,
}

/// The part of a slowdown that one cause explains.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SlowdownPart {
    /// Name of the resource for which the two programs compete.
    pub cause: String,
    /// Slowdown in percent of the solo run time; may be negative.
    pub slowdown_percent: f64,
    /// Share of the total slowdown; `None` if the total is about zero, or if a part is negative, so that the others
    /// exceed the whole.
    pub share_percent: Option<f64>,
}

/// Result of the eight runs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Decomposition {
    /// Name of the machine.
    pub machine: String,
    /// The program whose slowdown is attributed.
    pub victim: String,
    /// The co-runner.
    pub aggressor: String,
    /// Run time on the same cache divided by solo run time, minus one, with prefetching; in percent.
    pub total_slowdown_percent: f64,
    /// Parts of the slowdown, which add up to the total.
    pub parts: Vec<SlowdownPart>,
    /// The runs: eight, or fewer if the machine lacks locations.
    pub runs: Vec<DecompositionRun>,
    /// Locations that the machine does not have.
    pub unavailable: Vec<CoRunnerPlace>,
}

/// Slowdown below which shares of it are noise.
const NOTICEABLE: f64 = 1e-3;

impl Decomposition {
    /// The share of the slowdown that is not due to cache space (the statement of CA Figure 4);
    /// `None` without a slowdown.
    pub fn not_cache_percent(&self) -> Option<f64> {
        let cache_part = self
            .parts
            .iter()
            .find(|part| part.cause.starts_with("cache"))?;
        let has_slowdown = self.total_slowdown_percent.abs() > 100.0 * NOTICEABLE;
        has_slowdown
            .then(|| 100.0 * (1.0 - cache_part.slowdown_percent / self.total_slowdown_percent))
    }

    /// The part that hides others, if one is negative: that of prefetching if prefetched lines wait less than the
    /// misses without prefetching, otherwise that of a nearer location at which the co-runner costs less than at the
    /// farther one.
    pub fn hiding_part(&self) -> Option<&SlowdownPart> {
        self.parts
            .iter()
            .find(|part| part.slowdown_percent < -100.0 * NOTICEABLE)
    }
}

/// Makes the runs and computes the parts.
///
/// # Errors
/// No two cores share a cache, or [`CoRunBench::run`] fails.
pub fn decompose(
    context: &ExperimentContext<'_>,
    bench: &CoRunBench,
    program: &WorkloadJob,
    aggressor: &WorkloadJob,
) -> Result<Decomposition> {
    let (own_cpu, placements) = co_runner_places(&bench.machine.topology())?;
    let mut requests = Vec::new();
    for prefetching in [true, false] {
        requests.extend(
            placements
                .iter()
                .map(|&(location, cpu)| (location, cpu, prefetching)),
        );
    }
    let mut co_runner = aggressor.clone();
    // A program beside itself gets a different input.
    co_runner.seed += if program.kernel == aggressor.kernel && program.seed == aggressor.seed {
        1_000_003
    } else {
        0
    };
    let runs = context.run_all(&requests, |&(location, cpu, prefetching)| {
        let options = SimOptions {
            prefetch: prefetching,
            ..bench.options.clone()
        };
        let jobs = [
            Some((program.clone(), own_cpu)),
            cpu.map(|cpu| (co_runner.clone(), cpu)),
        ];
        let jobs: Vec<(WorkloadJob, CpuId)> = jobs.into_iter().flatten().collect();
        Ok(DecompositionRun {
            co_runner_location: location,
            prefetching,
            cycles_per_instr: 1.0 / bench.run_with_options(options, &jobs)?[0].instr_per_cycle,
        })
    })?;
    Ok(decompose_runs(
        &bench.machine.name,
        &program.name,
        &aggressor.name,
        runs,
    ))
}

/// The program's CPU, and the co-runner's CPU in each possible run, the farthest location first.
#[allow(clippy::type_complexity)]
fn co_runner_places(topology: &Topology) -> Result<(CpuId, Vec<(CoRunnerPlace, Option<CpuId>)>)> {
    let caches = cpus_by_cache(topology)?;
    let package_of = |cpu: CpuId| {
        topology
            .cpus
            .iter()
            .find(|described| described.id == cpu)
            .map(|cpu| cpu.package)
    };

    let shared_index = caches.iter().position(|cpus| cpus.len() > 1);
    let cache_index = shared_index
        .ok_or_else(|| failed("machine")("no last-level cache that two cores share"))?;
    let own_cpu = caches[cache_index][0];
    let cpu_on_other_cache = |same_package: bool| {
        let first_cpus = caches
            .iter()
            .enumerate()
            .filter(|(cache, _)| *cache != cache_index)
            .map(|(_, cpus)| cpus[0]);
        first_cpus
            .into_iter()
            .find(|&cpu| (package_of(cpu) == package_of(own_cpu)) == same_package)
    };

    let mut placements = vec![(CoRunnerPlace::None, None)];
    placements
        .extend(cpu_on_other_cache(false).map(|cpu| (CoRunnerPlace::OtherPackage, Some(cpu))));
    placements.extend(cpu_on_other_cache(true).map(|cpu| (CoRunnerPlace::OtherCache, Some(cpu))));
    placements.push((CoRunnerPlace::SameCache, Some(caches[cache_index][1])));
    Ok((own_cpu, placements))
}

fn decompose_runs(
    machine: &str,
    victim: &str,
    aggressor: &str,
    runs: Vec<DecompositionRun>,
) -> Decomposition {
    let cycles_beside = |location: CoRunnerPlace, prefetching: bool| {
        runs.iter()
            .find(|run| (run.co_runner_location, run.prefetching) == (location, prefetching))
            .map(|run| run.cycles_per_instr)
    };
    let slowdown_beside = |location: CoRunnerPlace, prefetching: bool| {
        Some(
            cycles_beside(location, prefetching)?
                / cycles_beside(CoRunnerPlace::None, prefetching)?
                - 1.0,
        )
    };
    let total_slowdown = slowdown_beside(CoRunnerPlace::SameCache, true).unwrap_or(f64::NAN);
    let same_cache_slowdown = slowdown_beside(CoRunnerPlace::SameCache, false).unwrap_or(f64::NAN);

    let slowdown_steps = (
        slowdown_beside(CoRunnerPlace::OtherPackage, false),
        slowdown_beside(CoRunnerPlace::OtherCache, false),
    );
    let named_parts: Vec<(&str, f64)> = match slowdown_steps {
        (Some(package), Some(cache)) => {
            vec![
                ("memory controller", package),
                ("bus", cache - package),
                ("cache", same_cache_slowdown - cache),
            ]
        }
        (None, Some(cache)) => vec![
            ("memory controller and bus", cache),
            ("cache", same_cache_slowdown - cache),
        ],
        (Some(package), None) => vec![
            ("memory controller", package),
            ("cache and bus", same_cache_slowdown - package),
        ],
        (None, None) => vec![("cache, bus and memory controller", same_cache_slowdown)],
    };
    let remainder = total_slowdown - named_parts.iter().map(|(_, part)| part).sum::<f64>();
    let has_shares = total_slowdown.abs() > NOTICEABLE
        && named_parts
            .iter()
            .map(|(_, value)| *value)
            .chain([remainder])
            .all(|value| value >= -NOTICEABLE);
    let part = |(cause, value): (&str, f64)| SlowdownPart {
        cause: cause.to_string(),
        slowdown_percent: 100.0 * value,
        share_percent: has_shares.then(|| 100.0 * value / total_slowdown),
    };
    let unavailable = [
        (CoRunnerPlace::OtherPackage, slowdown_steps.0),
        (CoRunnerPlace::OtherCache, slowdown_steps.1),
    ]
    .into_iter()
    .filter(|(_, step)| step.is_none());
    Decomposition {
        machine: machine.to_string(),
        victim: victim.to_string(),
        aggressor: aggressor.to_string(),
        total_slowdown_percent: 100.0 * total_slowdown,
        parts: named_parts
            .into_iter()
            .chain([("prefetching", remainder)])
            .map(part)
            .collect(),
        unavailable: unavailable.map(|(location, _)| location).collect(),
        runs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::quick_context;
    fn pair_with_solo_runs(times: &[(CoRunnerPlace, f64, f64)]) -> Vec<DecompositionRun> {
        let run_pair =
            |&(location, with_prefetch, without_prefetch): &(CoRunnerPlace, f64, f64)| {
                [(true, with_prefetch), (false, without_prefetch)].map(
                    |(prefetching, cycles_per_instr)| DecompositionRun {
                        co_runner_location: location,
                        prefetching,
                        cycles_per_instr,
                    },
                )
            };
        times.iter().flat_map(run_pair).collect()
    }

    /// Are the parts those of the paper's equations computed manually, and do they add up?
    #[test]
    fn parts_follow_the_equations_and_add_up() {
        use CoRunnerPlace::*;
        let times = [
            (None, 1.0, 2.0),
            (OtherPackage, 1.1, 2.2),
            (OtherCache, 1.3, 2.6),
            (SameCache, 1.6, 2.8),
        ];
        let decomposition = decompose_runs("m", "a", "b", pair_with_solo_runs(&times));
        let parts: Vec<(&str, i64)> = decomposition
            .parts
            .iter()
            .map(|p| (p.cause.as_str(), p.slowdown_percent.round() as i64))
            .collect();

        assert_eq!(
            parts,
            [
                ("memory controller", 10),
                ("bus", 20),
                ("cache", 10),
                ("prefetching", 20)
            ]
        );
        assert_eq!(decomposition.total_slowdown_percent.round(), 60.0);
        assert_eq!(
            decomposition.not_cache_percent().map(|share| share.round()),
            Some(83.0)
        );
        assert!(decomposition.unavailable.is_empty());
        let one_package = decompose_runs(
            "m",
            "a",
            "b",
            pair_with_solo_runs(&[times[0], times[2], times[3]]),
        );
        assert_eq!(one_package.unavailable, [OtherPackage]);
        assert_eq!(one_package.parts[0].cause, "memory controller and bus");
        let nothing = decompose_runs(
            "m",
            "a",
            "b",
            pair_with_solo_runs(&[(None, 1.0, 1.0), (SameCache, 1.0, 1.0)]),
        );
        assert_eq!(nothing.parts[0].share_percent, Option::None);
    }

    /// If prefetching hides most of what the cache costs without it, are the parts named without shares of the whole?
    #[test]
    fn parts_beyond_the_whole_have_no_shares() {
        use CoRunnerPlace::*;
        let times = [
            (None, 1.0, 2.0),
            (OtherCache, 1.0, 2.0),
            (SameCache, 1.2, 3.0),
        ];
        let decomposition = decompose_runs("m", "a", "b", pair_with_solo_runs(&times));
        let parts: Vec<i64> = decomposition
            .parts
            .iter()
            .map(|part| part.slowdown_percent.round() as i64)
            .collect();
        assert_eq!(parts, [0, 50, -30]);

        assert!(
            decomposition
                .parts
                .iter()
                .all(|part| part.share_percent.is_none()),
            "{decomposition:?}"
        );
        assert_eq!(
            decomposition.hiding_part().map(|part| part.cause.as_str()),
            Some("prefetching")
        );
        assert_eq!(
            decomposition.not_cache_percent().map(|share| share.round()),
            Some(-150.0)
        );
    }

    /// On the two-socket machine, are all steps run, and do the parts of a slowed program add up?
    #[test]
    fn a_slowdown_is_attributed_to_its_causes() {
        let context = quick_context();
        let bench = CoRunBench::load("xeon-x5365", 1, 4_000_000, 4_000_000).unwrap();
        let decomposition = decompose(
            &context,
            &bench,
            &WorkloadJob::new("milc", 1),
            &WorkloadJob::new("lbm", 1),
        )
        .unwrap();
        assert_eq!(
            (
                decomposition.runs.len(),
                decomposition.unavailable.len(),
                decomposition.parts.len()
            ),
            (8, 0, 4)
        );
        let sum: f64 = decomposition
            .parts
            .iter()
            .map(|part| part.slowdown_percent)
            .sum();
        assert!(
            (sum - decomposition.total_slowdown_percent).abs() < 1e-9 && sum > 2.0,
            "{decomposition:?}"
        );
    }
}
