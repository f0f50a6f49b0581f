//! `PROMISES`: does `auto` keep promises whenever that is possible, and are its reports about them true?
//!
//! Problem: a policy that forecasts its own success proves nothing. Method: mixes are drawn from the seed on four
//! machines, each with one to three promised slowdowns, and run under `auto` with the guard, as shipped, in windows of
//! one second of nominal time. The machine's own account of every program's slowdown is the truth. The best known plan
//! comes from a search over placements and partitions that reads the truth, and from the run itself. Properties: the
//! search does not use the policy's model; a report is compared with the truth over the windows on which it is based;
//! all mixes count.

use std::collections::VecDeque;

use cachemate_core::{Goal, MachineSpec, PolicyConfig, PromiseReport, PromiseState, PromiseTerm, SplitMix64, TaskId};
use cachemate_interval::{IntervalJob, IntervalMachine, Options};
use serde::{Deserialize, Serialize};

use crate::auto::{MixFamily, draw};
use crate::interval::plan_search::{PlanTruth, max_slowdown};
use crate::interval::whatif::interval_pipeline;
use crate::setup::failed;
use crate::{DataPoint, ExperimentContext, ExperimentRun, Finding, ReproError, mean};

/// Machines without partitions, with ways, and with page colors.
const MACHINES: [&str; 4] = [
    "xeon-x5365-4",
    "opteron-2350",
    "epyc-7742?cores_per_package=8&contexts_per_core=1",
    "power5-2x2x2?packages=1&memory.nodes=1&contexts_per_core=1&memory.size=2G",
];

/// Promised maximum slowdowns, drawn with equal probability.
const MAX_SLOWDOWNS: [f64; 4] = [0.03, 0.05, 0.1, 0.2];
/// Excess over a promise, as a share, from which on a report that it is kept is false.
const FALSE_FROM: f64 = 0.02;
/// Share of the windows in which a promise must hold to count as kept.
const KEPT_SHARE: f64 = 0.99;

/// The experiment: its id in `experiments.toml`, and the function that runs it.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[("PROMISES", run)];

/// One mix: its machine by name, its programs, and which of them have promises.
struct PromiseMix {
    machine: &'static str,
    seed: u64,
    jobs: Vec<IntervalJob>,
}

/// The outcome of one mix.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct MixOutcome {
    machine: String,
    seed: u64,
    /// Whether a known plan keeps all promises.
    feasible: bool,
    /// Share of the windows of the second half in which all promises were kept.
    kept_share: f64,
    /// Mean speed relative to solo speed of all programs in the second half, divided by that of the best known plan
    /// that keeps all promises; `None` if there is none.
    work_over_best: Option<f64>,
    /// Seconds until all promises were kept in 99 % of the remaining windows; `None` if never.
    converged_s: Option<f64>,
    /// Reports of a measured state, by type of error.
    reports: ReportCounts,
    /// The worst report that a promise is kept although it is broken, as text.
    worst_false: Option<String>,
}

/// Numbers of reports, one for each promise and window.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
struct ReportCounts {
    all: u32,
    unknown: u32,
    kept: u32,
    kept_falsely: u32,
    broken: u32,
    broken_falsely: u32,
}

impl ReportCounts {
    fn add(&mut self, state: PromiseState, slowdown: f64, max: f64) {
        self.all += 1;
        match state {
            PromiseState::Kept => {
                self.kept += 1;
                self.kept_falsely += u32::from(slowdown > max + FALSE_FROM);
            }
            PromiseState::Broken => {
                self.broken += 1;
                self.broken_falsely += u32::from(slowdown <= max);
            }
            PromiseState::Unknown => self.unknown += 1,
            PromiseState::Likely | PromiseState::AtRisk | PromiseState::Infeasible => {}
        }
    }

    fn sum_with(self, other: Self) -> Self {
        ReportCounts {
            all: self.all + other.all,
            unknown: self.unknown + other.unknown,
            kept: self.kept + other.kept,
            kept_falsely: self.kept_falsely + other.kept_falsely,
            broken: self.broken + other.broken,
            broken_falsely: self.broken_falsely + other.broken_falsely,
        }
    }
}

fn load(machine: &str) -> Result<MachineSpec, ReproError> {
    cachemate_spec::load_machine(machine).map_err(failed(machine))
}

/// The mixes of one machine: half of them pairs of contending kinds, half with more data than fits.
fn draw_mixes(machine: &'static str, count: u32, seed: u64, length_ns: u64) -> Result<Vec<PromiseMix>, ReproError> {
    let spec = load(machine)?;
    let families = [MixFamily::Contention, MixFamily::Space, MixFamily::Null];
    let mut promise_mixes = Vec::new();
    for index in 0..u64::from(count) {
        let seed = seed.wrapping_mul(1_000_003).wrapping_add(index);
        let mut generator = SplitMix64::new(seed ^ 0x970);
        let family = families[generator.draw_below(families.len() as u64) as usize];
        let drawn = draw::draw_mix_jobs(&spec, family, seed, length_ns);
        let Some(mut jobs) = drawn.or_else(|| draw::draw_mix_jobs(&spec, MixFamily::Contention, seed, length_ns))
        else {
            continue;
        };
        let mut order: Vec<usize> = (0..jobs.len()).collect();
        generator.shuffle(&mut order);
        let promises = 1 + generator.draw_below(3) as usize;
        for &job in order.iter().take(promises) {
            let max_slowdown = Some(MAX_SLOWDOWNS[generator.draw_below(MAX_SLOWDOWNS.len() as u64) as usize]);
            let priority = [1.0, 2.0][generator.draw_below(2) as usize];
            jobs[job].goal = Some(Goal { priority, max_slowdown, min_rate: None });
        }
        promise_mixes.push(PromiseMix { machine, seed, jobs });
    }
    Ok(promise_mixes)
}

/// Times of a promised job in its latest windows: ran or waited to run, and the same work alone, in nanoseconds. Time
/// over time alone is that of all windows together, because windows differ in length.
#[derive(Default)]
struct TruthHistory(VecDeque<(f64, f64)>);

impl TruthHistory {
    fn add(&mut self, wanted_ns: f64, slowdown: Option<f64>) {
        self.0.push_back((wanted_ns, slowdown.map_or(0.0, |slowdown| wanted_ns / slowdown)));
        if self.0.len() > TRUTH_WINDOWS {
            self.0.pop_front();
        }
    }

    /// Slowdown in so many latest windows; `None` if it did nothing.
    fn slowdown_of(&self, windows: usize) -> Option<f64> {
        let latest = self.0.iter().rev().take(windows);
        let (wanted_ns, alone_ns) = latest.fold((0.0, 0.0), |sum, window| (sum.0 + window.0, sum.1 + window.1));
        (alone_ns > 0.0).then(|| wanted_ns / alone_ns - 1.0)
    }
}

/// Maximum number of windows on which a report is based.
const TRUTH_WINDOWS: usize = 64;

fn run_mix(mix: &PromiseMix, length_ns: u64) -> Result<MixOutcome, ReproError> {
    let spec = load(mix.machine)?;
    let truth = PlanTruth::new(&spec, &mix.jobs)?.of_running_jobs();
    let options = Options { seed: mix.seed, length_ns: Some(length_ns), ..Options::default() };
    let mut machine = IntervalMachine::new(&spec, options, mix.jobs.clone()).map_err(failed(mix.machine))?;
    let policy = PolicyConfig { name: "auto".to_string(), parameters: String::new(), seed: mix.seed };
    let policy_pipeline = interval_pipeline(&machine, &spec, policy, true)?;
    machine.set_first_window(policy_pipeline.config().first_window);
    let mut histories: Vec<TruthHistory> = mix.jobs.iter().map(|_| TruthHistory::default()).collect();
    let mut reports = ReportCounts::default();
    let mut worst_false: Option<(f64, String)> = None;
    // For each window: its end in seconds, whether all promises were kept, and the mean speed relative to solo speed.
    let mut windows: Vec<(f64, bool, f64)> = Vec::new();
    policy_pipeline
        .run(machine, |machine, record| {
            let mut speeds = Vec::new();
            let mut is_kept = true;
            for task in &record.observation.tasks {
                let Some(job) = machine.job_of(task.task) else { continue };
                let wanted_ns = (task.ran_ns() + task.run_queue_wait_ns.unwrap_or(0)) as f64;
                let ratio = machine.task_slowdown(task.task).map(|(ratio, _)| ratio);
                histories[job].add(wanted_ns, ratio);
                let Some(ratio) = ratio else { continue };
                speeds.push(1.0 / ratio);
                is_kept &= max_slowdown(&mix.jobs[job]).is_none_or(|max| ratio - 1.0 <= max);
            }
            let true_slowdown = |task: TaskId, report: &PromiseReport| {
                histories[machine.job_of(task)?].slowdown_of(report.windows as usize)
            };
            for report in &record.promises {
                let PromiseTerm::MaxSlowdown(max) = report.term else { continue };
                let slowdown = true_slowdown(report.task, report);
                match slowdown {
                    Some(slowdown) => {
                        reports.add(report.state, slowdown, max);
                        let excess = slowdown - max;
                        let is_false = report.state == PromiseState::Kept && excess > FALSE_FROM;
                        if is_false && worst_false.as_ref().is_none_or(|(worst_excess, _)| excess > *worst_excess) {
                            let name = |task: TaskId| format!("task {}", task.0);
                            let text = format!(
                                "{:.1} % true, {} windows: {}",
                                100.0 * slowdown,
                                report.windows,
                                report.describe(name)
                            );
                            worst_false = Some((excess, text));
                        }
                    }
                    None => reports.add(PromiseState::Unknown, 0.0, max),
                }
            }
            windows.push((machine.now_ns() as f64 / 1e9, is_kept, mean(&speeds)));
            true
        })
        .map_err(failed(mix.machine))?;
    let half = &windows[windows.len() / 2..];
    let kept_window_share = |window_slice: &[(f64, bool, f64)]| {
        window_slice.iter().filter(|(_, is_kept, _)| *is_kept).count() as f64 / window_slice.len().max(1) as f64
    };
    let speed = mean(&half.iter().map(|(.., speed)| *speed).collect::<Vec<f64>>());
    let kept_share = kept_window_share(half);
    let known_speed = Some(truth.search(mix.seed)?).filter(|plan| plan.keeps_all).map(|plan| plan.mean_speed);
    let by_itself = (kept_share >= KEPT_SHARE).then_some(speed);
    let best = known_speed.into_iter().chain(by_itself).reduce(f64::max);
    let converged = (0..windows.len()).find(|&start| kept_window_share(&windows[start..]) >= KEPT_SHARE);
    Ok(MixOutcome {
        machine: mix.machine.to_string(),
        seed: mix.seed,
        feasible: best.is_some(),
        kept_share,
        work_over_best: best.map(|best| speed / best),
        converged_s: converged.map(|index| if index == 0 { 0.0 } else { windows[index - 1].0 }),
        reports,
        worst_false: worst_false.map(|(_, text)| text),
    })
}

fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let seed = context.seeds.first().copied().unwrap_or(1);
    let count = context.mixes.unwrap_or(context.pick_of_three(1, 6, 25));
    let length_ns = context.pick_of_three(120, 900, 3_600) * 1_000_000_000;
    let mut promise_mixes = Vec::new();
    for machine in MACHINES {
        promise_mixes.extend(draw_mixes(machine, count, seed, length_ns)?);
    }
    let outcomes = context.run_all(&promise_mixes, |mix| {
        context.report_progress(&format!("PROMISES: {} seed {}", mix.machine, mix.seed));
        run_mix(mix, length_ns)
    })?;
    Ok(promise_findings(seed, &outcomes))
}

fn percent_of(count: u32, total: u32) -> f64 {
    if total == 0 { f64::NAN } else { 100.0 * f64::from(count) / f64::from(total) }
}

/// Mixes with a false report, each with its worst.
fn false_reports(outcomes: &[MixOutcome], reports: ReportCounts) -> String {
    let mut text = format!("{} of {} reports say that a promise is kept", reports.kept, reports.all);
    for outcome in outcomes {
        if let Some(worst) = &outcome.worst_false {
            let count = outcome.reports.kept_falsely;
            text += &format!("; {} seed {}, {count} times, worst: {worst}", outcome.machine, outcome.seed);
        }
    }
    text
}

fn promise_findings(seed: u64, outcomes: &[MixOutcome]) -> Vec<Finding> {
    let feasible: Vec<&MixOutcome> = outcomes.iter().filter(|outcome| outcome.feasible).collect();
    let kept_outcomes: Vec<&&MixOutcome> = feasible.iter().filter(|outcome| outcome.kept_share >= KEPT_SHARE).collect();
    let reports = outcomes.iter().map(|outcome| outcome.reports).fold(ReportCounts::default(), ReportCounts::sum_with);
    let promise_finding = |name: &str, value: f64| Finding::declared(name, &[(seed, value)]);
    let work: Vec<f64> = kept_outcomes.iter().filter_map(|outcome| outcome.work_over_best).collect();
    let lost_percents: Vec<f64> = work.iter().map(|share| 100.0 * (1.0 - share)).collect();
    let mut times: Vec<f64> = kept_outcomes.iter().filter_map(|outcome| outcome.converged_s).collect();
    times.sort_by(f64::total_cmp);
    let point = |outcome: &MixOutcome| {
        let series = if outcome.feasible { "feasible" } else { "no known plan keeps all" };
        DataPoint::over_values(
            series,
            format!("{} seed {}", outcome.machine, outcome.seed),
            &[100.0 * outcome.kept_share],
        )
    };
    vec![
        promise_finding("promises-1-kept-mixes", percent_of(kept_outcomes.len() as u32, feasible.len() as u32))
            .with_points(outcomes.iter().map(point).collect())
            .with_note(format!(
                "{} of {} mixes have a known plan that keeps all promises",
                feasible.len(),
                outcomes.len()
            )),
        promise_finding("promises-2-kept-falsely", f64::from(reports.kept_falsely))
            .with_note(false_reports(outcomes, reports)),
        promise_finding("promises-3-broken-falsely", percent_of(reports.broken_falsely, reports.all))
            .with_note(format!("{} reports say that a promise is broken", reports.broken)),
        promise_finding("promises-4-work", if lost_percents.is_empty() { f64::NAN } else { mean(&lost_percents) }),
        promise_finding("promises-5-time", times.get(times.len() / 2).copied().unwrap_or(f64::NAN)),
        promise_finding("promises-6-unknown", percent_of(reports.unknown, reports.all)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a report false only against the truth of its windows, by the stated margin?
    #[test]
    fn reports_are_counted_by_their_truth() {
        let mut counts = ReportCounts::default();
        for (state, slowdown) in [
            (PromiseState::Kept, 0.06),
            (PromiseState::Kept, 0.08),
            (PromiseState::Broken, 0.04),
            (PromiseState::Broken, 0.08),
            (PromiseState::Unknown, 0.5),
            (PromiseState::Likely, 0.5),
        ] {
            counts.add(state, slowdown, 0.05);
        }
        let expected = ReportCounts { all: 6, unknown: 1, kept: 2, kept_falsely: 1, broken: 2, broken_falsely: 1 };
        assert_eq!(counts, expected);
    }
}
