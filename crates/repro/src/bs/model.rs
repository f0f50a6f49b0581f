//! BS-5: the expected miss ratio of groups against what they do, on random replacement by StatCache and on LRU by StatStack.
//!
//! Reuse times come from watch points, as the policy's do, and once more from six times as many: the difference is
//! sampling error, the rest the model's. Code is not watched; its references are counted and taken for hits.

use std::collections::BTreeMap;

use cachemate_core::{Level, Profiler, Profiles, Record, Replacement, TaskId};
use cachemate_locality::profilers::ReuseProfiler;
use cachemate_locality::reuse::ReuseTimes;
use cachemate_locality::statcc::{Composition, lru_at_rates, random_at_rates};
use cachemate_locality::{statcache, statstack};

use super::scatter;
use crate::cmt::groups::{Asked, GROUPS, Sum, by_group, by_task, measure_groups};
use crate::cmt::{CONTEXTS, SCALE, Setting, jobs};
use crate::setup::failed;
use crate::{Bar, Context, DataPoint, Finding, ReproError, mean};

const LOCATIONS: u32 = 1_000;
const LINE_BYTES: u64 = 64;

/// Measured and expected miss ratios of a group, in misses per 100 references.
struct Pair {
    measured: f64,
    average: f64,
    composed: f64,
}

pub fn run(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let sizes: &[u64] = context.pick(&[192], &[48, 192, 768]);
    let replacements = [(Replacement::Random, Composition::Random), (Replacement::Lru, Composition::Lru)];
    let factors: &[u32] = context.pick(&[1], &[1, 6]);
    let mut settings = Vec::new();
    for by in replacements {
        for &kb in sizes {
            for &seed in &context.seeds {
                settings.extend(factors.iter().map(|&factor| (by, kb, seed, factor)));
            }
        }
    }
    let pairs = context.run_all(&settings, |&((replacement, by), kb, seed, factor)| {
        (context.progress)(&format!("groups at {kb} KB, {replacement:?}, seed {seed}, {factor} x locations"));
        measure(context, kb, seed, replacement, by, factor)
    })?;
    let mut findings = Vec::new();
    for ((_, by), name) in replacements.into_iter().zip(["StatCache on random replacement", "StatStack on LRU"]) {
        let of = |seed: Option<u64>, kb: Option<u64>, factor: u32| -> Vec<&Pair> {
            let wanted = |s: &((Replacement, Composition), u64, u64, u32)| {
                s.0.1 == by && s.3 == factor && seed.is_none_or(|seed| seed == s.2) && kb.is_none_or(|kb| kb == s.1)
            };
            settings.iter().zip(&pairs).filter(|(s, _)| wanted(s)).flat_map(|(_, pairs)| pairs).collect()
        };
        let mut points = Vec::new();
        for &factor in factors {
            let sampling = if factor == 1 { "as sampled" } else { "six times the samples (model error alone)" };
            for &kb in sizes {
                let errors = |expected: fn(&Pair) -> f64| vec![error(&of(None, Some(kb), factor), expected)];
                let at = format!("{kb} KB");
                points.push(DataPoint::over(
                    format!("average, {sampling}: mean error %"),
                    at.clone(),
                    &errors(|p| p.average),
                ));
                points.push(DataPoint::over(
                    format!("composed, {sampling}: mean error %"),
                    at,
                    &errors(|p| p.composed),
                ));
            }
        }
        let per_seed: Vec<(u64, f64)> =
            context.seeds.iter().map(|&seed| (seed, error(&of(Some(seed), None, 1), |pair| pair.composed))).collect();
        let all = of(None, None, 1);
        let series = |expected: fn(&Pair) -> f64| all.iter().map(|pair| (pair.measured, expected(pair))).collect();
        let file = if by == Composition::Lru { "bs-5-statstack" } else { "bs-5-statcache" };
        findings.push(
            Finding::new(
                "BS-5",
                &format!("{name}: mean error of the composed miss ratio of random groups of eight"),
                "17 % in the mean (average of C/n)",
                "%",
                Bar::AtMost { bar: 8.0, paper_best: None },
                &per_seed,
            )
            .points(points)
            .figure(scatter(
                file,
                name,
                vec![("average".to_string(), series(|p| p.average)), ("composed".to_string(), series(|p| p.composed))],
            ))
            .time_scale(SCALE as f64)
            .note("Access rates are those of the groups measured. The average of C/n is in the points beside the composition."),
        );
    }
    Ok(findings)
}

fn error(pairs: &[&Pair], expected: fn(&Pair) -> f64) -> f64 {
    mean(&pairs.iter().map(|pair| 100.0 * (expected(pair) / pair.measured - 1.0).abs()).collect::<Vec<f64>>())
}

fn measure(
    context: &Context<'_>,
    kb: u64,
    seed: u64,
    replacement: Replacement,
    by: Composition,
    factor: u32,
) -> Result<Vec<Pair>, ReproError> {
    let mut workload = Setting::new(kb, seed, context).workload(jobs(seed))?;
    workload.machine.caches.last_mut().ok_or_else(|| failed("BS-5")("no cache"))?.replacement = replacement;
    let locations = Some(context.pick(LOCATIONS / 2, LOCATIONS) * factor);
    let asked = Asked { rows: false, locations, groups: context.pick(6, 16), group_ns: 10_000_000 };
    let records = measure_groups(workload, asked)?;
    let reuse = reuse_times(&records, by, kb)?;
    let did = by_task(&records, true);
    by_group(&records).iter().map(|(members, sum)| pair(members, sum, &did, &reuse, kb, by)).collect()
}

fn reuse_times(records: &[Record], by: Composition, kb: u64) -> Result<BTreeMap<TaskId, ReuseTimes>, ReproError> {
    let mut profiler = ReuseProfiler::new(Level::L2, by, LINE_BYTES, vec![kb << 10]);
    let mut profiles = Profiles::new();
    for record in records {
        // What happens while the groups are brought together says nothing new of single threads.
        if record.seen.answers.iter().any(|answer| answer.probe == GROUPS) {
            break;
        }
        profiler.update(&record.seen, &mut profiles);
    }
    let of = |(task, profile): (&TaskId, &cachemate_core::Profile)| {
        let times = profile.reuse_times.as_deref().and_then(ReuseTimes::from_profile);
        Ok((*task, times.ok_or_else(|| failed("BS-5")(format!("no reuse times of {task:?}")))?))
    };
    profiles.iter().map(of).collect()
}

fn pair(
    members: &[TaskId],
    sum: &Sum,
    did: &BTreeMap<TaskId, Sum>,
    reuse: &BTreeMap<TaskId, ReuseTimes>,
    kb: u64,
    by: Composition,
) -> Result<Pair, ReproError> {
    let missing = || failed("BS-5")("a member was not measured");
    let lines = (kb << 10) / LINE_BYTES;
    let sums: Vec<&Sum> = members.iter().map(|task| did.get(task)).collect::<Option<_>>().ok_or_else(missing)?;
    let times: Vec<&ReuseTimes> =
        members.iter().map(|task| reuse.get(task)).collect::<Option<_>>().ok_or_else(missing)?;
    let data = |sum: &Sum| (sum.references - sum.code).max(1.0) / sum.ns;
    let rates: Vec<f64> = sums.iter().map(|sum| data(sum)).collect();
    let all: f64 = sums.iter().map(|sum| sum.references / sum.ns).sum();
    let part = (lines / CONTEXTS as u64).max(1);
    let alone = |times: &&ReuseTimes| match by {
        Composition::Random => statcache::miss_ratio(times, part),
        Composition::Lru => statstack::miss_ratio(times, part),
    };
    let alone: Vec<f64> = times.iter().map(alone).collect::<Option<_>>().ok_or_else(missing)?;
    // In the paper's form every member weighs the same; its ratio is of all its references.
    let of_references = alone.iter().zip(&sums).map(|(ratio, sum)| ratio * data(sum) * sum.ns / sum.references);
    let at_rates: Vec<(&ReuseTimes, f64)> = times.iter().copied().zip(rates.iter().copied()).collect();
    let shared = match by {
        Composition::Random => random_at_rates(&at_rates, lines),
        Composition::Lru => lru_at_rates(&at_rates, lines),
    };
    let shared = shared.ok_or_else(missing)?;
    let misses: f64 = shared.miss_ratios.iter().zip(&rates).map(|(ratio, rate)| ratio * rate).sum();
    Ok(Pair {
        measured: sum.rate(),
        average: 100.0 * of_references.sum::<f64>() / members.len() as f64,
        composed: 100.0 * misses / all,
    })
}
