//! CASC-4 and CASC-5: what the measured rates say of threads and of groups.
//!
//! One run measures all threads in rows, as the policy does, and then random groups of eight for longer. Truth for
//! single threads is each one's miss ratio alone on an eighth of the cache, above or below the mean of all; for groups it
//! is what the group then did. *Linearity* is the error that a formula keeps when every member's rate and references are
//! those of all the groups it was in; what is left is error of measurement.

use std::collections::BTreeMap;

use cachemate_core::{
    Counts, Decision, Event, Evidence, Level, Plan, Policy, Probe, ProbeId, ProbeWhat, Profiler, Profiles, Record,
    RowInterval, TaskId, View, Window,
};
use cachemate_locality::profilers::{RowParameters, RowProfiler};
use cachemate_sim::run::Deciding;

use crate::cmt::{CONTEXTS, SCALE, SIZES_KB, Setting, jobs, l2, ratio};
use crate::setup::failed;
use crate::{Bar, Context, DataPoint, Finding, ReproError, mean};

const GROUPS: ProbeId = ProbeId(1_000);

/// Rows of nine threads at a time, then groups.
struct RowsThenGroups {
    cache: cachemate_core::CacheId,
    seed: u64,
    groups: u64,
    group_ns: u64,
    probes: Vec<Probe>,
}

impl Policy for RowsThenGroups {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(Window::Time { ns: 10_000_000 });
        if self.probes.is_empty() && view.seen.window >= 1 {
            let tasks: Vec<TaskId> = view.seen.tasks.iter().map(|task| task.task).collect();
            self.ask(&tasks);
        }
        plan.probes.clone_from(&self.probes);
        Decision { plan, why: Vec::new() }
    }
}

impl RowsThenGroups {
    fn ask(&mut self, tasks: &[TaskId]) {
        let without = |block: &[TaskId], out: TaskId| block.iter().copied().filter(|&task| task != out).collect();
        for (at, block) in tasks.chunks(CONTEXTS + 1).enumerate() {
            let rows: Vec<Vec<TaskId>> = block.iter().map(|&out| without(block, out)).collect();
            self.probes.push(self.rows(ProbeId(at as u32), rows, 2_500_000));
        }
        let mut generator = cachemate_policy::rng::SplitMix64::new(self.seed);
        let mut group = || {
            let mut shuffled = tasks.to_vec();
            generator.shuffle(&mut shuffled);
            shuffled.truncate(CONTEXTS);
            shuffled
        };
        let groups: Vec<Vec<TaskId>> = (0..self.groups).map(|_| group()).collect();
        self.probes.push(self.rows(GROUPS, groups, self.group_ns));
    }

    fn rows(&self, id: ProbeId, rows: Vec<Vec<TaskId>>, total_ns: u64) -> Probe {
        let what = ProbeWhat::Rows { cache: self.cache, rows, total_ns, settle_ns: 500_000, boost: true };
        Probe { id, what, budget_ns: u64::MAX / 8 }
    }
}

/// Misses and references.
#[derive(Clone, Copy, Default)]
struct Sum {
    misses: f64,
    references: f64,
    ns: f64,
}

impl Sum {
    fn add(&mut self, counts: &Counts, ns: u64) {
        self.misses += counts.get(Event::Misses(Level::L2)).unwrap_or(f64::NAN);
        self.references += counts.get(Event::References(Level::L2)).unwrap_or(f64::NAN);
        self.ns += ns as f64;
    }
    fn rate(&self) -> f64 {
        100.0 * self.misses / self.references
    }
}

/// What one run says.
struct Told {
    /// Largest and mean relative error of the expected group rates, in per cent, by form.
    errors: Vec<(&'static str, f64, f64)>,
    right: [u32; 2],
}

pub fn run(context: &Context<'_>) -> Result<Vec<Finding>, ReproError> {
    let sizes: &[u64] = context.pick(&[192], &SIZES_KB);
    let settings: Vec<(u64, u64)> =
        sizes.iter().flat_map(|&size| context.seeds.iter().map(move |&seed| (size, seed))).collect();
    let told = context.run_all(&settings, |&(size, seed)| {
        (context.progress)(&format!("rows and groups at {size} KB, seed {seed}"));
        tell(context, &Setting::new(size, seed, context))
    })?;
    let at = |size: u64| settings.iter().zip(&told).filter(move |((of, _), _)| *of == size).map(|(_, told)| told);
    let mut points = Vec::new();
    for &size in sizes {
        for (form, name) in ["own counts", "linear solve"].iter().enumerate() {
            let values: Vec<f64> = at(size).map(|told| f64::from(told.right[form])).collect();
            points.push(DataPoint::over(format!("threads on the right side, {name}"), format!("{size} KB"), &values));
        }
    }
    let per_seed = |of: &dyn Fn(&Told) -> f64, worse: fn(f64, f64) -> f64| {
        let value = |seed: u64| {
            let of_seed = settings.iter().zip(&told).filter(|((_, of), _)| *of == seed).map(|(_, told)| of(told));
            of_seed.reduce(worse).unwrap_or(f64::NAN)
        };
        context.seeds.iter().map(|&seed| (seed, value(seed))).collect::<Vec<(u64, f64)>>()
    };
    let casc_4 = Finding::new(
        "CASC-4",
        "threads of 18 whose measured rate is on the same side of the mean as their solo miss ratio on an eighth of the cache, worst size",
        "12 to 16",
        "threads",
        Bar::AtLeast { bar: 17.0, paper_best: Some(16.0) },
        &per_seed(&|told| f64::from(told.right[0]), f64::min),
    )
    .points(points)
    .time_scale(SCALE as f64)
    .note("Members' own counts; the linear solve of the paper beside it in the points.");
    let mut errors = Vec::new();
    for &size in sizes {
        let forms: Vec<&'static str> = told.first().map_or(Vec::new(), |t| t.errors.iter().map(|e| e.0).collect());
        for (form, name) in forms.iter().enumerate() {
            let worst: Vec<f64> = at(size).map(|told| told.errors[form].1).collect();
            let means: Vec<f64> = at(size).map(|told| told.errors[form].2).collect();
            errors.push(DataPoint::over(format!("{name}: worst error %"), format!("{size} KB"), &worst));
            errors.push(DataPoint::over(format!("{name}: mean error %"), format!("{size} KB"), &means));
        }
    }
    let casc_5 = |what: &str, bar: f64, of: &dyn Fn(&Told) -> f64| {
        Finding::new(
            "CASC-5",
            what,
            "within 30 % at worst",
            "%",
            Bar::AtMost { bar, paper_best: None },
            &per_seed(of, f64::max),
        )
        .points(errors.clone())
        .time_scale(SCALE as f64)
        .note("Better form: members' own rates weighted by their references. The literal form (mean of solved rates) and both forms' linearity error are in the points.")
    };
    let mean_error = casc_5("mean error of the expected miss rate of random groups of eight, worst size", 8.0, &|told| told.errors[0].2);
    let worst_error = casc_5("largest error of the expected miss rate of random groups of eight, worst size", 30.0, &|told| told.errors[0].1);
    Ok(vec![casc_4, mean_error, worst_error])
}

fn tell(context: &Context<'_>, setting: &Setting) -> Result<Told, ReproError> {
    let groups = context.pick(6, 24);
    let group_ns = context.pick(5_000_000, 15_000_000);
    let mut workload = setting.workload(jobs(setting.seed))?;
    // 18 rows of 3 ms and the groups, at the run's scale and 992 cycles a microsecond; a quarter more for windows' ends.
    workload.measured_cycles = (18 * 3_000_000 + groups * (group_ns + 500_000)) / SCALE * 992 / 1_000 * 5 / 4;
    workload.warm_up_cycles = context.pick(5_000_000, 20_000_000);
    let cache = l2(&workload).ok_or_else(|| failed("rows")("no shared cache"))?;
    let policy = RowsThenGroups { cache, seed: setting.seed, groups, group_ns, probes: Vec::new() };
    let by = Deciding {
        policy: Box::new(policy),
        name: "rows-then-groups".to_string(),
        profilers: Vec::new(),
        yardstick: workload.yardstick(),
        first_window: Window::Time { ns: 10_000_000 },
    };
    let records = workload.managed(by)?.records;
    let (own, solved) = (measured(&records, true)?, measured(&records, false)?);
    let truth = solo_ratios(setting)?;
    let ids: Vec<TaskId> = own.keys().copied().collect();
    let rate = |of: &BTreeMap<TaskId, f64>| ids.iter().map(|task| of[task]).collect::<Vec<f64>>();
    let right = [rate(&own), rate(&solved)].map(|rates| same_side(&rates, &truth));
    Ok(Told { errors: errors(&records, &own, &solved)?, right })
}

fn same_side(found: &[f64], truth: &[f64]) -> u32 {
    let (a, b) = (mean(found), mean(truth));
    found.iter().zip(truth).filter(|&(found, truth)| (*found > a) == (*truth > b)).count() as u32
}

/// PCMRs from the rows alone.
fn measured(records: &[Record], own_counts: bool) -> Result<BTreeMap<TaskId, f64>, ReproError> {
    let mut profiler = RowProfiler::new(Level::L2, RowParameters { own_counts, ..RowParameters::default() });
    let mut profiles = Profiles::new();
    for record in records {
        let mut seen = record.seen.clone();
        seen.answers.retain(|answer| answer.probe != GROUPS);
        profiler.update(&seen, &mut profiles);
    }
    let unknown = |task: &TaskId| failed("rows")(format!("the rate of {task:?} was not measured"));
    profiles.iter().map(|(task, profile)| Ok((*task, profile.pcmr.ok_or_else(|| unknown(task))?.value))).collect()
}

fn intervals(records: &[Record], groups: bool) -> impl Iterator<Item = &RowInterval> {
    let answers = records.iter().flat_map(|record| &record.seen.answers).filter(move |a| (a.probe == GROUPS) == groups);
    let rows = answers.filter_map(|answer| match &answer.evidence {
        Evidence::Rows(rows) => Some(rows),
        _ => None,
    });
    rows.flatten().filter(|interval| interval.span.elapsed_ns >= 200_000)
}

/// Worst and mean error of each form over the groups.
fn errors(
    records: &[Record],
    own: &BTreeMap<TaskId, f64>,
    solved: &BTreeMap<TaskId, f64>,
) -> Result<Vec<(&'static str, f64, f64)>, ReproError> {
    let mut groups: BTreeMap<Vec<TaskId>, Sum> = BTreeMap::new();
    let (mut in_rows, mut in_groups): (BTreeMap<TaskId, Sum>, BTreeMap<TaskId, Sum>) = Default::default();
    for interval in intervals(records, true) {
        groups.entry(interval.tasks.clone()).or_default().add(&interval.cache_counts, interval.span.elapsed_ns);
    }
    for (from, sums) in [(false, &mut in_rows), (true, &mut in_groups)] {
        for interval in intervals(records, from) {
            for (task, counts) in interval.tasks.iter().zip(&interval.task_counts) {
                sums.entry(*task).or_default().add(counts, interval.span.elapsed_ns);
            }
        }
    }
    if groups.is_empty() {
        return Err(failed("groups")("none was measured"));
    }
    let refs = |sums: &BTreeMap<TaskId, Sum>, task: &TaskId| sums.get(task).map_or(0.0, |sum| sum.references / sum.ns);
    let weighted = |sums: &BTreeMap<TaskId, Sum>, rate: &dyn Fn(&TaskId) -> f64, members: &[TaskId]| {
        let all: f64 = members.iter().map(|task| refs(sums, task)).sum();
        members.iter().map(|task| refs(sums, task) * rate(task)).sum::<f64>() / all
    };
    let plain = |rate: &dyn Fn(&TaskId) -> f64, members: &[TaskId]| {
        members.iter().map(rate).sum::<f64>() / members.len() as f64
    };
    let of = |rates: &BTreeMap<TaskId, f64>, task: &TaskId| rates.get(task).copied().unwrap_or(f64::NAN);
    let long = |task: &TaskId| in_groups.get(task).map_or(f64::NAN, Sum::rate);
    type Expect<'a> = Box<dyn Fn(&[TaskId]) -> f64 + 'a>;
    let forms: [(&'static str, Expect<'_>); 4] = [
        ("better", Box::new(|members| weighted(&in_rows, &|task| of(own, task), members))),
        ("better, linearity alone", Box::new(|members| weighted(&in_groups, &long, members))),
        ("literal", Box::new(|members| plain(&|task| of(solved, task), members))),
        ("literal, linearity alone", Box::new(|members| plain(&long, members))),
    ];
    let error = |expect: &Expect<'_>| -> Vec<f64> {
        groups.iter().map(|(members, sum)| 100.0 * (expect(members) / sum.rate() - 1.0).abs()).collect()
    };
    let summary = |(name, expect): &(&'static str, Expect<'_>)| {
        let errors = error(expect);
        (*name, errors.iter().copied().fold(0.0, f64::max), mean(&errors))
    };
    Ok(forms.iter().map(summary).collect())
}

/// Every thread alone on an eighth of the cache: misses over references.
fn solo_ratios(setting: &Setting) -> Result<Vec<f64>, ReproError> {
    let eighth = Setting { quick: true, ..*setting };
    let one = |(at, job): (usize, crate::setup::Job)| {
        let mut workload = eighth.workload(vec![job])?.lasting(4_000_000, 8_000_000);
        let cache = workload.machine.caches.last_mut().ok_or_else(|| failed("eighth")("no cache"))?;
        cache.size_bytes /= CONTEXTS as u64;
        let results = workload.unmanaged()?;
        ratio(&results).ok_or_else(|| failed("eighth")(format!("thread {at} made no references")))
    };
    jobs(setting.seed).into_iter().enumerate().map(one).collect()
}
