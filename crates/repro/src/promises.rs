//! `PROMISES`: does `auto` keep promises whenever that is possible, and are its reports about them true?
//!
//! Problem: a policy that forecasts its own success proves nothing. Method: mixes are drawn from the seed on four
//! machines, each with one to three promised slowdowns, and run under `auto` with the guard, as shipped, in windows of
//! one second of nominal time. The machine's own account of every program's slowdown is the truth. The best known plan
//! comes from a search over placements and partitions that reads the truth, and from the run itself. Properties: the
//! search does not use the policy's model; a report is compared with the truth over the windows on which it is based;
//! all mixes count, and each is run under [`RIVALS`] too.

use std::collections::VecDeque;

use cachemate_core::{Goal, PromiseReport, PromiseState, PromiseTerm, SplitMix64, TaskId, median};
use cachemate_interval::{IntervalJob, Options};

use crate::auto::{MixFamily, RIVALS, draw};
use crate::cp::CHIP_MACHINE;
use crate::interval::whatif::start_interval_machine;
use crate::setup::{failed, load_machine};
use crate::{DataPoint, ExperimentContext, ExperimentRun, Finding, Result, mean};
use cachemate_forecast::plan_search::{PlanEvaluator, max_slowdown};

/// Machines without partitions, with ways, and with page colors.
const MACHINES: [&str; 4] = [
    "xeon-x5365-4",
    "opteron-2350",
    "epyc-7742?cores_per_package=8&contexts_per_core=1",
    CHIP_MACHINE,
];

/// Promised maximum slowdowns, drawn with equal probability.
const MAX_SLOWDOWNS: [f64; 4] = [0.03, 0.05, 0.1, 0.2];
/// Excess over a promise, as a share, from which on a report that it is kept is false.
const MIN_FALSE_EXCESS_SHARE: f64 = 0.02;
/// Share of the windows in which a promise must hold to count as kept.
const MIN_KEPT_SHARE: f64 = 0.99;

/// The experiment: its id in `experiments.toml`, and the function that runs it.
pub(crate) const EXPERIMENTS: &[ExperimentRun] = &[("PROMISES", run)];

/// One mix: its machine by name, its programs, and which of them have promises.
struct PromiseMix {
    machine: &'static str,
    seed: u64,
    jobs: Vec<IntervalJob>,
}

/// The outcome of one mix.
#[derive(Clone, PartialEq, Debug)]
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
    /// The same share and work under each of [`RIVALS`].
    rivals: Vec<(f64, Option<f64>)>,
}

/// Numbers of reports, one for each promise and window.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct ReportCounts {
    all: u32,
    unknown: u32,
    kept: u32,
    kept_falsely: u32,
    broken: u32,
    broken_falsely: u32,
}

impl ReportCounts {
    fn count_report(&mut self, state: PromiseState, slowdown: f64, promised_slowdown: f64) {
        self.all += 1;
        match state {
            PromiseState::Kept => {
                self.kept += 1;
                self.kept_falsely +=
                    u32::from(slowdown > promised_slowdown + MIN_FALSE_EXCESS_SHARE);
            }
            PromiseState::Broken => {
                self.broken += 1;
                self.broken_falsely += u32::from(slowdown <= promised_slowdown);
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

/// The mixes of one machine: half of them pairs of contending kinds, half with more data than fits.
fn draw_mixes(
    machine: &'static str,
    count: u32,
    seed: u64,
    length_ns: u64,
) -> Result<Vec<PromiseMix>> {
    let spec = load_machine(machine)?;
    let drawable_families = [MixFamily::Contention, MixFamily::Space, MixFamily::Null];

    let mut promise_mixes = Vec::new();
    for index in 0..u64::from(count) {
        let seed = seed.wrapping_mul(1_000_003).wrapping_add(index);
        let mut generator = SplitMix64::new(seed ^ 0x970);
        let family =
            drawable_families[generator.draw_below(drawable_families.len() as u64) as usize];
        let drawn_jobs = draw::draw_mix_jobs(&spec, family, seed, length_ns);
        let Some(mut jobs) = drawn_jobs
            .or_else(|| draw::draw_mix_jobs(&spec, MixFamily::Contention, seed, length_ns))
        else {
            continue;
        };

        let mut job_order: Vec<usize> = (0..jobs.len()).collect();
        generator.shuffle(&mut job_order);
        let promise_count = 1 + generator.draw_below(3) as usize;
        for &job in job_order.iter().take(promise_count) {
            let max_slowdown =
                Some(MAX_SLOWDOWNS[generator.draw_below(MAX_SLOWDOWNS.len() as u64) as usize]);
            let priority = [1.0, 2.0][generator.draw_below(2) as usize];
            jobs[job].goal = Some(Goal {
                priority,
                max_slowdown,
                ..Goal::default()
            });
        }

        promise_mixes.push(PromiseMix {
            machine,
            seed,
            jobs,
        });
    }

    Ok(promise_mixes)
}

/// Times of a promised job in its latest windows: ran or waited to run, and the same work alone, in nanoseconds. Time
/// over time alone is that of all windows together, because windows differ in length.
#[derive(Default)]
struct TruthHistory(VecDeque<(f64, f64)>);

impl TruthHistory {
    fn add_window(&mut self, wanted_ns: f64, slowdown: Option<f64>) {
        self.0.push_back((
            wanted_ns,
            slowdown.map_or(0.0, |slowdown| wanted_ns / slowdown),
        ));
        if self.0.len() > MAX_TRUTH_WINDOWS {
            self.0.pop_front();
        }
    }

    /// The slowdown in so many latest windows; `None` if it did nothing.
    fn slowdown_of(&self, window_count: usize) -> Option<f64> {
        let latest_windows = self.0.iter().rev().take(window_count);
        let (wanted_ns, alone_ns) = latest_windows.fold((0.0, 0.0), |sum, window| {
            (sum.0 + window.0, sum.1 + window.1)
        });
        (alone_ns > 0.0).then(|| wanted_ns / alone_ns - 1.0)
    }
}

/// Maximum number of windows on which a report is based.
const MAX_TRUTH_WINDOWS: usize = 64;

/// A run of a mix under one policy.
struct PromiseRun {
    /// For each window: its end in seconds, whether all promises were kept, and the mean speed relative to solo speed.
    windows: Vec<(f64, bool, f64)>,
    reports: ReportCounts,
    worst_false: Option<String>,
}

impl PromiseRun {
    fn kept_share_from(&self, window: usize) -> f64 {
        let windows = &self.windows[window..];
        let kept_windows = windows.iter().filter(|(_, is_kept, _)| *is_kept).count();
        kept_windows as f64 / windows.len().max(1) as f64
    }

    /// The share of kept windows and the mean speed of the second half.
    fn second_half(&self) -> (f64, f64) {
        let middle = self.windows.len() / 2;
        let speed = mean(self.windows[middle..].iter().map(|(.., speed)| *speed));
        (self.kept_share_from(middle), speed)
    }

    /// The seconds until all promises were kept in 99 % of the remaining windows; `None` if never.
    fn converged_s(&self) -> Option<f64> {
        let is_start = |&start: &usize| self.kept_share_from(start) >= MIN_KEPT_SHARE;
        let start = (0..self.windows.len()).find(is_start)?;
        Some(
            start
                .checked_sub(1)
                .map_or(0.0, |last| self.windows[last].0),
        )
    }
}

fn run_under(mix: &PromiseMix, policy: &str, length_ns: u64) -> Result<PromiseRun> {
    let spec = load_machine(mix.machine)?;
    let options = Options {
        seed: mix.seed,
        length_ns: Some(length_ns),
        ..Options::default()
    };
    let (machine, pipeline) =
        start_interval_machine(&spec, options, mix.jobs.clone(), policy, true)?;
    let mut histories: Vec<TruthHistory> =
        mix.jobs.iter().map(|_| TruthHistory::default()).collect();
    let mut report_counts = ReportCounts::default();
    let mut worst_false_report: Option<(f64, String)> = None;
    let mut window_outcomes: Vec<(f64, bool, f64)> = Vec::new();

    pipeline
        .run(machine, |machine, record| {
            let mut speeds = Vec::new();
            let mut is_kept = true;
            for task in &record.observation.tasks {
                let Some(job) = machine.job_of(task.task) else {
                    continue;
                };
                let wanted_ns = (task.ran_ns() + task.run_queue_wait_ns.unwrap_or(0)) as f64;
                let slowdown_ratio = machine.task_slowdown(task.task).map(|(ratio, _)| ratio);
                histories[job].add_window(wanted_ns, slowdown_ratio);
                let Some(ratio) = slowdown_ratio else {
                    continue;
                };
                speeds.push(1.0 / ratio);
                is_kept &= max_slowdown(&mix.jobs[job]).is_none_or(|max| ratio - 1.0 <= max);
            }
            let true_slowdown_of = |task: TaskId, report: &PromiseReport| {
                histories[machine.job_of(task)?].slowdown_of(report.windows as usize)
            };
            for report in &record.promises {
                let PromiseTerm::MaxSlowdown(promised_slowdown) = report.term else {
                    continue;
                };
                let slowdown = true_slowdown_of(report.task, report);
                match slowdown {
                    Some(slowdown) => {
                        report_counts.count_report(report.state, slowdown, promised_slowdown);
                        let excess = slowdown - promised_slowdown;
                        let is_false =
                            report.state == PromiseState::Kept && excess > MIN_FALSE_EXCESS_SHARE;
                        if is_false
                            && worst_false_report
                                .as_ref()
                                .is_none_or(|(worst_excess, _)| excess > *worst_excess)
                        {
                            let name = |task: TaskId| format!("task {}", task.0);
                            let text = format!(
                                "{:.1} % true, {} windows: {}",
                                100.0 * slowdown,
                                report.windows,
                                report.describe(name)
                            );
                            worst_false_report = Some((excess, text));
                        }
                    }
                    None => {
                        report_counts.count_report(PromiseState::Unknown, 0.0, promised_slowdown)
                    }
                }
            }
            window_outcomes.push((machine.now_ns() as f64 / 1e9, is_kept, mean(&speeds)));
            true
        })
        .map_err(failed(mix.machine))?;
    Ok(PromiseRun {
        windows: window_outcomes,
        reports: report_counts,
        worst_false: worst_false_report.map(|(_, text)| text),
    })
}

fn measure_mix(mix: &PromiseMix, length_ns: u64) -> Result<MixOutcome> {
    let spec = load_machine(mix.machine)?;
    let plan_truth = PlanEvaluator::new(&spec, &mix.jobs)?.with_running_jobs();
    let best_plan = plan_truth.search_best_plan(mix.seed)?;
    let run = run_under(mix, "auto", length_ns)?;
    let (kept_share, speed) = run.second_half();
    let rivals: Vec<(f64, f64)> = RIVALS
        .iter()
        .map(|rival| Ok(run_under(mix, rival, length_ns)?.second_half()))
        .collect::<Result<_>>()?;

    let planned_speed = best_plan.keeps_all_promises.then_some(best_plan.mean_speed);
    let own_run = (kept_share, speed);
    let runs = rivals.iter().chain([&own_run]);
    let kept_speeds = runs
        .filter(|(kept, _)| *kept >= MIN_KEPT_SHARE)
        .map(|(_, speed)| *speed);
    let best_speed = kept_speeds.chain(planned_speed).reduce(f64::max);
    let over_best = |speed: f64| best_speed.map(|best| speed / best);
    Ok(MixOutcome {
        machine: mix.machine.to_string(),
        seed: mix.seed,
        feasible: best_speed.is_some(),
        kept_share,
        work_over_best: over_best(speed),
        converged_s: run.converged_s(),
        reports: run.reports,
        worst_false: run.worst_false,
        rivals: rivals
            .into_iter()
            .map(|(kept, speed)| (kept, over_best(speed)))
            .collect(),
    })
}

fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let seed = context.seeds[0];
    let mixes_per_machine = context.mixes.unwrap_or(context.pick_by_length(1, 6, 25));
    let length_ns = context.pick_by_length(120, 900, 3_600) * 1_000_000_000;
    let mut promise_mixes = Vec::new();
    for machine in MACHINES {
        promise_mixes.extend(draw_mixes(machine, mixes_per_machine, seed, length_ns)?);
    }
    let outcomes = context.run_all(&promise_mixes, |mix| {
        context.report_progress(&format!("PROMISES: {} seed {}", mix.machine, mix.seed));
        measure_mix(mix, length_ns)
    })?;
    Ok(promise_findings(seed, &outcomes))
}

fn percent_of(count: u32, total: u32) -> f64 {
    if total == 0 {
        f64::NAN
    } else {
        100.0 * f64::from(count) / f64::from(total)
    }
}

fn describe_false_reports(outcomes: &[MixOutcome], report_counts: ReportCounts) -> String {
    let mut text = format!(
        "{} of {} reports say that a promise is kept",
        report_counts.kept, report_counts.all
    );
    for outcome in outcomes {
        if let Some(worst) = &outcome.worst_false {
            let false_count = outcome.reports.kept_falsely;
            text += &format!(
                "; {} seed {}, {false_count} times, worst: {worst}",
                outcome.machine, outcome.seed
            );
        }
    }
    text
}

/// The finding about a rival: the feasible mixes in which it keeps all promises, and what they cost.
fn rival_finding(seed: u64, feasible_outcomes: &[&MixOutcome], rival: usize) -> Finding {
    let kept: Vec<&(f64, Option<f64>)> = feasible_outcomes
        .iter()
        .map(|outcome| &outcome.rivals[rival])
        .filter(|(kept_share, _)| *kept_share >= MIN_KEPT_SHARE)
        .collect();
    let lost_percents: Vec<f64> = kept
        .iter()
        .filter_map(|(_, work_over_best)| Some(100.0 * (1.0 - (*work_over_best)?)))
        .collect();
    let kept_percent = percent_of(kept.len() as u32, feasible_outcomes.len() as u32);
    let note = format!("{:.1} % of work lost in them", mean(&lost_percents));
    Finding::declared_for(
        "promises-7-rival",
        &[RIVALS[rival]],
        &[(seed, kept_percent)],
    )
    .with_note(note)
}

fn promise_findings(seed: u64, outcomes: &[MixOutcome]) -> Vec<Finding> {
    let feasible_outcomes: Vec<&MixOutcome> =
        outcomes.iter().filter(|outcome| outcome.feasible).collect();
    let kept_outcomes: Vec<&&MixOutcome> = feasible_outcomes
        .iter()
        .filter(|outcome| outcome.kept_share >= MIN_KEPT_SHARE)
        .collect();
    let report_counts = outcomes
        .iter()
        .map(|outcome| outcome.reports)
        .fold(ReportCounts::default(), ReportCounts::sum_with);

    let promise_finding = |name: &str, value: f64| Finding::declared(name, &[(seed, value)]);
    let work_shares: Vec<f64> = kept_outcomes
        .iter()
        .filter_map(|outcome| outcome.work_over_best)
        .collect();
    let lost_percents: Vec<f64> = work_shares
        .iter()
        .map(|share| 100.0 * (1.0 - share))
        .collect();
    let convergence_seconds: Vec<f64> = kept_outcomes
        .iter()
        .filter_map(|outcome| outcome.converged_s)
        .collect();

    let point = |outcome: &MixOutcome| {
        let series = if outcome.feasible {
            "feasible"
        } else {
            "no known plan keeps all"
        };
        DataPoint::from_values(
            series,
            format!("{} seed {}", outcome.machine, outcome.seed),
            [100.0 * outcome.kept_share],
        )
    };

    let mut findings = vec![
        promise_finding(
            "promises-1-kept-mixes",
            percent_of(kept_outcomes.len() as u32, feasible_outcomes.len() as u32),
        )
        .with_points(outcomes.iter().map(point).collect())
        .with_note(format!(
            "{} of {} mixes have a known plan that keeps all promises",
            feasible_outcomes.len(),
            outcomes.len()
        )),
        promise_finding(
            "promises-2-kept-falsely",
            f64::from(report_counts.kept_falsely),
        )
        .with_note(describe_false_reports(outcomes, report_counts)),
        promise_finding(
            "promises-3-broken-falsely",
            percent_of(report_counts.broken_falsely, report_counts.all),
        )
        .with_note(format!(
            "{} reports say that a promise is broken",
            report_counts.broken
        )),
        promise_finding(
            "promises-4-work",
            if lost_percents.is_empty() {
                f64::NAN
            } else {
                mean(&lost_percents)
            },
        ),
        promise_finding(
            "promises-5-time",
            median(&convergence_seconds).unwrap_or(f64::NAN),
        ),
        promise_finding(
            "promises-6-unknown",
            percent_of(report_counts.unknown, report_counts.all),
        ),
    ];

    findings.extend((0..RIVALS.len()).map(|rival| rival_finding(seed, &feasible_outcomes, rival)));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a report false only against the truth of its windows, by the stated margin?
    #[test]
    fn reports_are_false_only_against_their_windows_truth() {
        let mut counts = ReportCounts::default();
        for (state, slowdown) in [
            (PromiseState::Kept, 0.06),
            (PromiseState::Kept, 0.08),
            (PromiseState::Broken, 0.04),
            (PromiseState::Broken, 0.08),
            (PromiseState::Unknown, 0.5),
            (PromiseState::Likely, 0.5),
        ] {
            counts.count_report(state, slowdown, 0.05);
        }

        let expected = ReportCounts {
            all: 6,
            unknown: 1,
            kept: 2,
            kept_falsely: 1,
            broken: 2,
            broken_falsely: 1,
        };
        assert_eq!(counts, expected);
    }
}
