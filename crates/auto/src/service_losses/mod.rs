//! Finds which services slow each other down, by how much, and with what certainty.
//!
//! Problem: hosts show threads, and a loss has several possible causes. A service has two losses, because it can be
//! slower while it runs (*cache*, by CPU second) and it can wait for CPUs (*waiting*, [`waiting`]); its users feel
//! their product, which the rate of work shows directly if clients wait for the service. Method for the cache: each
//! window gives every service a speed (work by processor time) and the presence of every other service on its caches
//! (in CPUs). Three sources of evidence are used, in this order:
//! 1. *Measured.* A regression of the speed on the presences separates co-runners that come and go. It needs windows
//!    with and without a co-runner, and an effect of more than two standard errors. A probe in which some tasks
//!    wait gives further windows; its speeds are relative to an interval of the same probe in which all tasks run.
//! 2. *Attributed.* If the whole slowdown relative to the solo speed is measured, but not its causes, it is divided
//!    among the co-runners in proportion to their forecast losses.
//! 3. *Forecast.* The reference predictor, or sensitivity times intensity, gives a loss from profiles alone.
//!
//! A service that is preempted loses some speed by CPU second as well, because its private caches refill. So the share
//! of waiting is a term of the same regression (a control for time sharing): a co-runner that is present exactly when
//! the service waits is not separated from it, and is not named. A co-runner that was measured to evict nothing is
//! never a cause of a cache loss.
//!
//! Properties: the computation is pure. Missing evidence gives a missing value with its reason. Short programs count
//! for their service. Cost: in each window, one regression over at most a dozen co-runners for each of the busiest
//! services.

mod probe_rows;
mod regression;
mod waiting;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cachemate_core::{
    CacheId, CounterEvent, CpuId, Estimate, MissingPromiseEvidence, Observation, ProbeEvidence,
    Profile, Profiles, PromiseReport, PromiseState, PromiseTerm, RowInterval, ServiceIdentity,
    ShareMember, SoloBasis, TaskId, TaskSample, Topology,
};
use cachemate_papers::solo_speeds::SoloSpeeds;
use cachemate_papers::work_metric::{MIN_EVENTS, WorkMetric, metrics_of};

pub(crate) use probe_rows::{CountedWork, ProbeRows};
use regression::{EffectEstimate, EffectRegression};
pub use waiting::WaitingCause;
use waiting::{WaitingHistory, WindowWork};

/// Maximum number of services with a regression; the busiest are chosen.
const MAX_SERVICES: usize = 64;
/// Maximum number of co-runners of one service with an effect of their own; those with the largest presence are chosen.
const MAX_CO_RUNNERS: usize = 12;
/// Minimum number of windows with a co-runner, and also without it, before its effect counts as measured.
const MIN_WINDOWS: u32 = 3;
/// Minimum number of CPUs with which a co-runner counts as present in a window.
const MIN_PRESENCE: f64 = 0.02;
/// Minimum number of standard errors with which an effect counts as measured.
const MIN_STANDARD_ERRORS: f64 = 2.0;
/// Minimum part of a service's run time in threads whose work is counted, before the sum is the work of the service.
const MIN_COUNTED_SHARE: f64 = 0.9;
/// Minimum measured slowdown that is attributed to co-runners.
const MIN_ATTRIBUTED_SLOWDOWN: f64 = 0.01;
/// A program that evicts less than this share of a probe's lines takes no cache from others.
const MIN_CACHE_INTENSITY: f64 = 0.05;
/// Minimum part of a service's run time that such programs must have before the service counts as one that evicts
/// nothing.
const MIN_SPARING_SHARE: f64 = 0.95;
/// Number of windows over which the current presence is averaged, weighted by their length, because a loop of short
/// programs has gaps, and a window may end with a program.
const PRESENT_WINDOWS: usize = 20;
/// Number of windows without any task after which a service is forgotten.
const MAX_ABSENT_WINDOWS: u64 = 120;
/// Number of windows between two forecasts of a pair.
const FORECAST_WINDOWS: u64 = 8;
/// Index of the first co-runner among the terms of the regression: the share of waiting comes before.
const CO_RUNNER_TERMS: usize = 1;

/// The source of evidence for a loss.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LossSource {
    /// Derived from windows with and without the cause.
    Measured,
    /// Part of a measured slowdown, which was divided in proportion to forecasts.
    Attributed,
    /// Predicted from profiles alone.
    Forecast,
}

impl LossSource {
    /// The name of the source in files and tables.
    pub fn describe(self) -> &'static str {
        match self {
            LossSource::Measured => "measured",
            LossSource::Attributed => "attributed",
            LossSource::Forecast => "forecast",
        }
    }
}

/// The loss that one service causes to another.
#[derive(Clone, PartialEq, Debug)]
pub struct ServiceLoss {
    /// Service that causes the loss.
    pub cause: ServiceIdentity,
    /// Additional run time, relative to the run time without the cause.
    pub loss: Estimate,
    /// Evidence for the loss.
    pub source: LossSource,
    /// Loss forecast from profiles alone, if they suffice, in addition to a loss from another source.
    pub forecast: Option<f64>,
    /// Number of windows in which both services ran on one cache.
    pub windows: u32,
}

/// The losses of a service, each relative to its run time without the cause.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ServiceSlowdown {
    /// Run time added by CPU second, with its evidence; `None` if unknown.
    pub cache: Option<(Estimate, LossSource)>,
    /// Whether `cache` was measured and has the loss by every co-runner, so that it is not only a lower bound.
    pub is_cache_complete: bool,
    /// Run time added by waiting for CPUs on which other services run; `None` if unknown.
    pub waiting: Option<Estimate>,
    /// Run time added by both, by the rate of work; `None` unless work is counted, and clients wait for the service.
    pub work: Option<Estimate>,
}

impl ServiceSlowdown {
    /// The run time that the users of the service feel: by the rate of work, else the product of both losses, or the
    /// one that is known. A forecast is not felt. `None` if none was measured.
    pub fn run_time(&self) -> Option<Estimate> {
        if self.work.is_some() {
            return self.work;
        }
        let cache = self
            .cache
            .filter(|(_, source)| *source != LossSource::Forecast)
            .map(|(loss, _)| loss);
        match (cache, self.waiting) {
            (Some(cache), Some(waiting)) => Some(compound_loss(cache, waiting)),
            (cache, waiting) => cache.or(waiting),
        }
    }

    /// Whether both losses were measured completely, so that [`Self::run_time`] is not only a lower bound.
    pub fn is_complete(&self) -> bool {
        self.work.is_some() || self.waiting.is_some() && self.is_cache_complete
    }
}

/// The report of a service in one window.
#[derive(Clone, PartialEq, Debug)]
pub struct ServiceReport {
    /// Identity of the service.
    pub service: ServiceIdentity,
    /// Live threads of the service.
    pub tasks: Vec<TaskId>,
    /// Strictest limit that a rule sets for one of these threads.
    pub max_slowdown: Option<f64>,
    /// Number of CPUs in use: processor time over elapsed time.
    pub cpu_share: f64,
    /// Time in which its threads were ready without a CPU, over elapsed time; `None` if the machine does not count it.
    pub waiting_share: Option<f64>,
    /// Both losses.
    pub slowdown: ServiceSlowdown,
    /// Cache losses by cause, largest first.
    pub losses: Vec<ServiceLoss>,
    /// Services that ran while this one waited, largest first.
    pub waiting_causes: Vec<WaitingCause>,
    /// Cache losses that confined causes would add if they were not confined, largest first.
    pub prevented_losses: Vec<ServiceLoss>,
    /// Reason why the cache loss is unknown, or why no cause of it is named.
    pub reason: Option<String>,
}

impl ServiceReport {
    /// Judges a promised slowdown of one of the service's programs by the service's losses, if the promise could not be
    /// judged because the program's own speeds are unknown. An incomplete loss is a lower bound, so that it cannot show
    /// that a promise is kept.
    pub fn judge_promise(&self, promise: &PromiseReport) -> PromiseReport {
        let lacks_speeds = matches!(
            promise.missing,
            Some(MissingPromiseEvidence::Counters | MissingPromiseEvidence::SoloSpeed)
        );
        let is_open = promise.state == PromiseState::Unknown && lacks_speeds;
        let (PromiseTerm::MaxSlowdown(_), true, Some(run_time)) =
            (promise.term, is_open, self.slowdown.run_time())
        else {
            return promise.clone();
        };
        let state = promise.term.state_of(run_time);
        let is_violated = matches!(state, PromiseState::AtRisk | PromiseState::Broken);
        if !is_violated && !self.slowdown.is_complete() {
            return promise.clone();
        }
        PromiseReport {
            state,
            measured: Some(run_time),
            basis: Some(SoloBasis::CoRunners),
            missing: None,
            ..promise.clone()
        }
    }
}

/// The activity of a service in one window.
#[derive(Default)]
pub(crate) struct ServiceActivity<'a> {
    pub(crate) tasks: Vec<&'a TaskSample>,
    ran_ns: u64,
    /// Processor time on each CPU.
    on_cpu_ns: BTreeMap<CpuId, u64>,
    /// Processor time on the CPUs of each cache.
    on_cache_ns: BTreeMap<CacheId, u64>,
    /// Whether some of its tasks have a share of a cache.
    is_confined: bool,
}

/// The activity of all services in one window.
pub(crate) type ServiceActivities<'a> = BTreeMap<Cow<'a, ServiceIdentity>, ServiceActivity<'a>>;

impl<'a> ServiceActivity<'a> {
    pub(crate) fn live_tasks(&self) -> impl Iterator<Item = &'a TaskSample> {
        self.tasks.iter().copied().filter(|task| !task.exited)
    }

    fn ran_on_ns(&self, cpus: &BTreeSet<CpuId>) -> u64 {
        self.on_cpu_ns
            .iter()
            .filter(|(cpu, _)| cpus.contains(cpu))
            .map(|(_, ns)| ns)
            .sum()
    }

    /// The time in which its tasks were ready without a CPU; `None` if it was not counted.
    fn waited_ns(&self) -> Option<u64> {
        self.tasks
            .iter()
            .filter_map(|task| task.run_queue_wait_ns)
            .reduce(u64::saturating_add)
    }

    /// The CPUs that another service used on the caches of this one, while this one ran there.
    fn presence_of(&self, other: &ServiceActivity<'_>, elapsed_ns: u64) -> f64 {
        let total: u64 = self.on_cache_ns.values().sum();
        let presence_on_cache = |(cache, ns): (&CacheId, &u64)| {
            let other_ns = other.on_cache_ns.get(cache).copied().unwrap_or(0);
            *ns as f64 / total.max(1) as f64 * other_ns as f64 / elapsed_ns as f64
        };
        self.on_cache_ns.iter().map(presence_on_cache).sum()
    }

    fn work_in(&self, rows: &[&RowInterval]) -> CountedWork {
        CountedWork::of_tasks(rows, &self.tasks.iter().map(|task| task.task).collect())
    }

    /// The instructions per cycle, and the cycles per nanosecond of run time; `None` if they are not counted.
    fn counted_pace(&self) -> Option<(f64, f64)> {
        let (mut work, mut ran_ns) = (CountedWork::default(), 0.0);
        for task in &self.tasks {
            if let Some(counts) = CountedWork::from_counts(&task.counts) {
                work = work.plus(counts);
                ran_ns += task.ran_ns() as f64;
            }
        }
        let instr_per_cycle = work.instr_per_cycle()?;
        (ran_ns > 0.0).then(|| (instr_per_cycle, work.cycles / ran_ns))
    }
}

/// Regression, counts and co-runners of a service over all windows.
#[derive(Clone, Debug, Default)]
struct ServiceHistory {
    metric: Option<WorkMetric>,
    waiting: WaitingHistory,
    co_runners: Vec<CoRunnerHistory>,
    regression: EffectRegression,
    /// Number of windows in which the service's speed was counted.
    windows: u32,
    last_window: u64,
    /// Profile of the thread that ran most, as last known.
    profile: Option<Arc<Profile>>,
    /// Whether its threads were measured to evict nothing.
    spares_cache: bool,
}

#[derive(Clone, Debug)]
struct CoRunnerHistory {
    service: ServiceIdentity,
    /// Whether it had a share of a cache. The same service with and without a share has two histories.
    is_confined: bool,
    /// Whether this is the state in which the service ran last.
    is_current: bool,
    windows_with: u32,
    /// Number of windows without the service, in either state.
    windows_without: u32,
    /// Mean presence over the windows of `presence_windows`, weighted by their length.
    presence: f64,
    /// Presence and length of each of these windows.
    presence_windows: VecDeque<(f64, u64)>,
    decayed_presence: f64,
    forecast: Option<(u64, Option<Estimate>)>,
    /// Whether its threads were measured to evict nothing.
    spares_cache: bool,
}

impl CoRunnerHistory {
    /// Whether it runs at present, in this state, and may take cache.
    fn is_suspect(&self) -> bool {
        self.is_current && self.presence >= MIN_PRESENCE && !self.spares_cache
    }

    /// The presence of the service, if it was in this state.
    fn own_presence(&self, (presence, is_confined): (f64, bool)) -> f64 {
        if is_confined == self.is_confined {
            presence
        } else {
            0.0
        }
    }

    /// `None` unless the effect is measured.
    fn measured_loss(&self, effect: Option<&EffectEstimate>, presence: f64) -> Option<Estimate> {
        let is_separated = self.windows_with >= MIN_WINDOWS && self.windows_without >= MIN_WINDOWS;
        let is_measured =
            |effect: &&EffectEstimate| effect.value.abs() > MIN_STANDARD_ERRORS * effect.error;
        let effect = effect.filter(|_| is_separated).filter(is_measured)?;
        let loss_from_effect = |effect: f64| libm::expm1(effect * presence);
        let error_margin = MIN_STANDARD_ERRORS * effect.error;
        Some(Estimate {
            value: loss_from_effect(effect.value),
            low: loss_from_effect(effect.value - error_margin),
            high: loss_from_effect(effect.value + error_margin),
        })
    }

    fn observe(&mut self, presence: f64, elapsed_ns: u64) {
        if self.presence_windows.len() == PRESENT_WINDOWS {
            self.presence_windows.pop_front();
        }
        self.presence_windows.push_back((presence, elapsed_ns));
        let total_ns: u64 = self.presence_windows.iter().map(|(_, ns)| ns).sum();
        let weighted_sum: f64 = self
            .presence_windows
            .iter()
            .map(|(presence, ns)| presence * *ns as f64)
            .sum();
        self.presence = weighted_sum / total_ns.max(1) as f64;
    }
}

/// A function that forecasts the slowdown of the first program beside the second, if the two are alone on one cache.
pub type ServicePairForecast<'a> = dyn Fn(&Profile, &Profile) -> Option<Estimate> + 'a;

/// The current profile of each service.
type PresentProfiles = BTreeMap<ServiceIdentity, Arc<Profile>>;

/// The services whose threads were measured to evict nothing.
type SparingServices = BTreeSet<ServiceIdentity>;

/// The inputs of a report besides the service itself.
struct ReportInputs<'a> {
    observation: &'a Observation,
    topology: &'a Topology,
    profiles: &'a Profiles,
    known_profiles: &'a PresentProfiles,
    sparing_services: &'a SparingServices,
    pair_forecast: &'a ServicePairForecast<'a>,
}

/// The history of all services, and the losses computed from it.
#[derive(Clone, Debug, Default)]
pub struct ServiceLosses {
    histories: BTreeMap<ServiceIdentity, ServiceHistory>,
    solo_speeds: SoloSpeeds,
}

impl ServiceLosses {
    /// Observes one window, and returns reports of its services, ordered by loss and then by processor time.
    pub fn observe(
        &mut self,
        observation: &Observation,
        topology: &Topology,
        profiles: &Profiles,
        pair_forecast: &ServicePairForecast<'_>,
    ) -> Vec<ServiceReport> {
        self.solo_speeds.observe(observation);
        let activities = activities_by_service(observation, topology);
        let elapsed_ns = observation.span.elapsed_ns.max(1);
        let mut services_by_run_time: Vec<&ServiceIdentity> =
            activities.keys().map(|service| &**service).collect();
        services_by_run_time.sort_by_key(|service| std::cmp::Reverse(activities[*service].ran_ns));
        let tracked_services: BTreeSet<&ServiceIdentity> = services_by_run_time
            .into_iter()
            .take(MAX_SERVICES)
            .collect();

        for service in &tracked_services {
            let history = self.histories.entry((*service).clone()).or_default();
            history.last_window = observation.window;
            if activities[*service].ran_ns > 0 {
                history.spares_cache = evicts_nothing(&activities[*service], profiles);
            }
            // A profile changes little from window to window, and copying its curves takes time.
            if (history.profile.is_none() || observation.window.is_multiple_of(FORECAST_WINDOWS))
                && let Some(profile) = busiest_profile(&activities[*service], profiles)
            {
                history.profile = Some(Arc::new(profile.clone()));
            }
        }

        self.histories.retain(|_, history| {
            observation.window.saturating_sub(history.last_window) < MAX_ABSENT_WINDOWS
        });
        let all_rows: Vec<ProbeRows<'_>> = (observation.probe_results.iter())
            .filter_map(|probe_result| match &probe_result.evidence {
                ProbeEvidence::Rows(rows) => Some(ProbeRows::new(rows)),
                _ => None,
            })
            .collect();
        for service in &tracked_services {
            if let Some(history) = self.histories.get_mut(*service) {
                let span = (observation.window, elapsed_ns);
                history.observe(service, &activities, span, !all_rows.is_empty());
            }
        }

        for rows in &all_rows {
            rows.with_pause
                .iter()
                .for_each(|row| self.observe_row(row, rows, &activities, elapsed_ns));
        }

        let histories = self.histories.iter();
        let known_profiles: PresentProfiles = histories
            .filter_map(|(service, history)| Some((service.clone(), history.profile.clone()?)))
            .collect();
        let histories = self.histories.iter();
        let sparing_services: SparingServices = histories
            .filter(|(_, history)| history.spares_cache)
            .map(|(service, _)| service.clone())
            .collect();
        let inputs = ReportInputs {
            observation,
            topology,
            profiles,
            known_profiles: &known_profiles,
            sparing_services: &sparing_services,
            pair_forecast,
        };
        let mut reports: Vec<ServiceReport> = activities
            .iter()
            .map(|(service, activity)| self.build_report(service, activity, &inputs))
            .collect();

        let loss_of = |report: &ServiceReport| {
            let forecast = report.slowdown.cache.map(|(loss, _)| loss);
            let loss = report.slowdown.run_time().or(forecast);
            loss.map_or(0.0, |loss| loss.value.max(0.0))
        };
        reports.sort_by(|a, b| {
            loss_of(b)
                .total_cmp(&loss_of(a))
                .then(b.cpu_share.total_cmp(&a.cpu_share))
                .then(a.service.cmp(&b.service))
        });
        reports
    }

    /// Observes an interval of a probe in which only some tasks ran, as a further window of their services. Speeds are
    /// relative to the probe's interval with all tasks or, if it has none, to the window.
    fn observe_row(
        &mut self,
        row: &RowInterval,
        rows: &ProbeRows<'_>,
        windows: &ServiceActivities<'_>,
        elapsed_ns: u64,
    ) {
        for (service, activity) in windows {
            let Some(row_pace) = activity.work_in(&[row]).instr_per_cycle() else {
                continue;
            };
            let Some(history) = self.histories.get_mut(&**service) else {
                continue;
            };
            let speed = service_speed(activity, elapsed_ns)
                .filter(|(metric, _)| history.metric == Some(*metric));
            let Some(((_, speed), (window_pace, cycles_per_ns))) =
                speed.zip(activity.counted_pace())
            else {
                continue;
            };
            let pace_without_pause = activity.work_in(&rows.without_pause).instr_per_cycle();
            let (reference_speed, pace) = match pace_without_pause {
                Some(pace) => (history.usual_speed(), pace),
                None if rows.without_pause.is_empty() => (Some(speed), window_pace),
                None => continue,
            };
            let Some(reference_speed) = reference_speed else {
                continue;
            };
            let cycles_of_cpu = cycles_per_ns * row.span.elapsed_ns.max(1) as f64;
            // All tasks of a row run at once, each on its own CPU, so the usual waiting stays in the reference.
            let usual_waiting = history.waiting.usual_share();
            history.record_speed(
                reference_speed * row_pace / pace,
                usual_waiting,
                |co_runner| {
                    windows.get(co_runner).map_or((0.0, false), |activity| {
                        (
                            activity.work_in(&[row]).cycles / cycles_of_cpu,
                            activity.is_confined,
                        )
                    })
                },
            );
        }
    }

    fn build_report(
        &mut self,
        service: &ServiceIdentity,
        activity: &ServiceActivity<'_>,
        inputs: &ReportInputs<'_>,
    ) -> ServiceReport {
        let ReportInputs {
            observation,
            topology,
            profiles,
            known_profiles: known,
            sparing_services,
            pair_forecast,
        } = *inputs;
        let elapsed_ns = observation.span.elapsed_ns.max(1);
        let solo_slowdown = self.solo_slowdown(activity, profiles, elapsed_ns);

        let mut report = ServiceReport {
            service: service.clone(),
            tasks: activity.live_tasks().map(|task| task.task).collect(),
            max_slowdown: activity
                .live_tasks()
                .filter_map(|task| task.goal?.max_slowdown)
                .reduce(f64::min),
            cpu_share: activity.ran_ns as f64 / elapsed_ns as f64,
            waiting_share: activity.waited_ns().map(|ns| ns as f64 / elapsed_ns as f64),
            slowdown: ServiceSlowdown::default(),
            losses: Vec::new(),
            waiting_causes: Vec::new(),
            prevented_losses: Vec::new(),
            reason: None,
        };
        let Some(history) = self.histories.get_mut(service) else {
            report.reason = Some(format!(
                "only the {MAX_SERVICES} busiest services are followed"
            ));
            return report;
        };
        for co_runner in &mut history.co_runners {
            co_runner.spares_cache = sparing_services.contains(&co_runner.service);
        }

        history.update_forecasts(observation.window, known, pair_forecast);
        report.losses = history.attribute_losses(solo_slowdown);
        report.prevented_losses = history.prevented_losses();
        let measured_losses = report
            .losses
            .iter()
            .filter(|loss| loss.source == LossSource::Measured);
        let measured_count = measured_losses.clone().count();
        let slowdown_by_causes = measured_losses.fold(None, |total: Option<Estimate>, loss| {
            Some(total.map_or(loss.loss, |total| compound_loss(total, loss.loss)))
        });

        report.slowdown.waiting = history.waiting.loss();
        report.slowdown.work = history.waiting.work_loss();
        report.waiting_causes = history.waiting.causes();
        report.slowdown.cache = solo_slowdown
            .map(|solo| (Estimate::exact(solo), LossSource::Measured))
            .or_else(|| slowdown_by_causes.map(|total| (total, LossSource::Measured)))
            .or_else(|| {
                let total = report
                    .losses
                    .iter()
                    .map(|loss| loss.loss)
                    .reduce(compound_loss)?;
                Some((total, LossSource::Forecast))
            });
        report.slowdown.is_cache_complete = solo_slowdown.is_some()
            || measured_count > 0 && measured_count == history.suspects().count();
        report.reason = history.missing_loss_reason(&report, activity, topology);
        report
    }

    /// The slowdown relative to the solo speeds of the service's tasks, weighted by their run time.
    fn solo_slowdown(
        &self,
        activity: &ServiceActivity<'_>,
        profiles: &Profiles,
        elapsed_ns: u64,
    ) -> Option<f64> {
        let empty_profile = Profile::default();
        let task_slowdowns = activity.tasks.iter().filter_map(|task| {
            let profile = profiles.get(&task.task).unwrap_or(&empty_profile);
            Some((
                self.solo_speeds
                    .slowdown_over_solo(task, elapsed_ns, profile)?,
                task.ran_ns() as f64,
            ))
        });
        let (sum, weight) = task_slowdowns.fold((0.0, 0.0), |(sum, weight), (slowdown, run_ns)| {
            (sum + slowdown * run_ns, weight + run_ns)
        });
        (weight > 0.0).then(|| sum / weight)
    }
}

/// The total of two slowdowns that apply one after the other.
fn compound_loss(a: Estimate, b: Estimate) -> Estimate {
    let compound_value = |a: f64, b: f64| (1.0 + a) * (1.0 + b) - 1.0;
    Estimate {
        value: compound_value(a.value, b.value),
        low: compound_value(a.low, b.low),
        high: compound_value(a.high, b.high),
    }
}

impl ServiceHistory {
    /// Observes a window. The speed does not count if a probe kept tasks off their CPUs in it.
    fn observe(
        &mut self,
        service: &ServiceIdentity,
        activities: &ServiceActivities<'_>,
        (window, elapsed_ns): (u64, u64),
        is_disturbed: bool,
    ) {
        let activity = &activities[service];
        let presence_of = |co_runner: &ServiceIdentity| {
            activities.get(co_runner).map_or((0.0, false), |other| {
                (activity.presence_of(other, elapsed_ns), other.is_confined)
            })
        };
        let others = activities.keys().filter(|other| ***other != *service);
        let others_on_caches: f64 = others.map(|other| presence_of(other).0).sum();
        let done = WindowWork {
            elapsed_ns: elapsed_ns as f64,
            ran_ns: activity.ran_ns as f64,
            work: counted_work(activity),
        };
        self.waiting.observe(
            service,
            activities,
            window,
            done,
            (!is_disturbed).then_some(others_on_caches),
        );
        let min_present_ns = (MIN_PRESENCE * elapsed_ns as f64) as u64;
        let may_be_present =
            |(other, activity): &(&Cow<'_, ServiceIdentity>, &ServiceActivity<'_>)| {
                ***other != *service && activity.ran_ns >= min_present_ns
            };

        for (co_runner, other) in activities.iter().filter(may_be_present) {
            if activity.presence_of(other, elapsed_ns) < MIN_PRESENCE {
                continue;
            }

            let mut windows_without = self.windows;
            let mut is_known = false;
            for known in self
                .co_runners
                .iter_mut()
                .filter(|known| known.service == **co_runner)
            {
                known.is_current = known.is_confined == other.is_confined;
                is_known |= known.is_current;
                windows_without = known.windows_without;
            }

            if !is_known {
                self.co_runners.push(CoRunnerHistory {
                    service: (**co_runner).clone(),
                    is_confined: other.is_confined,
                    is_current: true,
                    windows_with: 0,
                    windows_without,
                    presence: 0.0,
                    presence_windows: VecDeque::with_capacity(PRESENT_WINDOWS),
                    decayed_presence: 0.0,
                    forecast: None,
                    spares_cache: false,
                });
            }
        }

        for co_runner in &mut self.co_runners {
            let present_share = co_runner.own_presence(presence_of(&co_runner.service));
            co_runner.observe(present_share, elapsed_ns);
            co_runner.decayed_presence = 0.99 * co_runner.decayed_presence + present_share;
        }

        while self.co_runners.len() > MAX_CO_RUNNERS {
            let least_present_index = (0..self.co_runners.len()).min_by(|a, b| {
                self.co_runners[*a]
                    .decayed_presence
                    .total_cmp(&self.co_runners[*b].decayed_presence)
            });
            let Some(index) = least_present_index else {
                break;
            };
            self.co_runners.remove(index);
            self.regression.remove(CO_RUNNER_TERMS + index);
        }

        let Some((metric, speed)) = service_speed(activity, elapsed_ns) else {
            return;
        };
        match self.metric {
            Some(previous_metric) if previous_metric < metric => return, // a window without the better measure
            Some(previous_metric) if previous_metric > metric => self.restart(),
            _ => {}
        }

        self.metric = Some(metric);
        if !is_disturbed {
            self.record_speed(speed, self.waiting.last_share(), presence_of);
        }
    }

    /// Records a speed with this share of waiting beside co-runners of these presences.
    fn record_speed(
        &mut self,
        speed: f64,
        waiting_share: f64,
        presence_of: impl Fn(&ServiceIdentity) -> (f64, bool),
    ) {
        self.windows += 1;
        for co_runner in &mut self.co_runners {
            let presence = presence_of(&co_runner.service);
            co_runner.windows_with += u32::from(co_runner.own_presence(presence) >= MIN_PRESENCE);
            co_runner.windows_without += u32::from(presence.0 < MIN_PRESENCE);
        }
        let own_presence =
            |co_runner: &CoRunnerHistory| co_runner.own_presence(presence_of(&co_runner.service));
        let presences = self.co_runners.iter().map(own_presence);
        let terms: Vec<f64> = std::iter::once(waiting_share).chain(presences).collect();
        self.regression.observe(libm::log(speed), &terms);
    }

    /// The speed in windows with the usual presence of each co-runner; `None` before the first window.
    fn usual_speed(&self) -> Option<f64> {
        let presences = self.co_runners.iter().map(|co_runner| co_runner.presence);
        let terms: Vec<f64> = std::iter::once(self.waiting.usual_share())
            .chain(presences)
            .collect();
        self.regression.predict(&terms).map(libm::exp)
    }

    /// The effect of each co-runner, without the effect of waiting.
    fn co_runner_effects(&self) -> Vec<EffectEstimate> {
        let mut effects = self.regression.effects();
        effects.drain(..CO_RUNNER_TERMS.min(effects.len()));
        effects
    }

    fn restart(&mut self) {
        self.regression = EffectRegression::default();
        self.windows = 0;
        for co_runner in &mut self.co_runners {
            (co_runner.windows_with, co_runner.windows_without) = (0, 0);
        }
    }

    fn update_forecasts(
        &mut self,
        window: u64,
        profiles: &PresentProfiles,
        pair_forecast: &ServicePairForecast<'_>,
    ) {
        let Some(own_profile) = &self.profile else {
            return;
        };

        for co_runner in self
            .co_runners
            .iter_mut()
            .filter(|co_runner| co_runner.presence >= MIN_PRESENCE)
        {
            let is_due = co_runner
                .forecast
                .is_none_or(|(forecast_window, forecast)| {
                    window >= forecast_window + FORECAST_WINDOWS
                        || window < forecast_window
                        || forecast.is_none()
                });
            if let Some(co_runner_profile) = profiles.get(&co_runner.service).filter(|_| is_due) {
                let curve_forecast = pair_forecast(own_profile, co_runner_profile);
                let contention_based = || contention_forecast(own_profile, co_runner_profile);
                co_runner.forecast = Some((window, curve_forecast.or_else(contention_based)));
            }
        }
    }

    fn suspects(&self) -> impl Iterator<Item = &CoRunnerHistory> {
        self.co_runners
            .iter()
            .filter(|co_runner| co_runner.is_suspect())
    }

    fn attribute_losses(&self, solo_slowdown: Option<f64>) -> Vec<ServiceLoss> {
        let effects = self.co_runner_effects();

        let mut losses = Vec::new();
        let mut unmeasured_losses = Vec::new();
        for (index, co_runner) in self.co_runners.iter().enumerate() {
            if !co_runner.is_suspect() {
                continue;
            }

            let presence_share = co_runner.presence.min(1.0);
            let forecast = co_runner.forecast.and_then(|(_, forecast)| forecast);
            let forecast = forecast.map(|loss| Estimate {
                value: loss.value * presence_share,
                low: loss.low * presence_share,
                high: loss.high * presence_share,
            });
            let build_loss = |loss, source| ServiceLoss {
                cause: co_runner.service.clone(),
                loss,
                source,
                forecast: forecast.map(|forecast| forecast.value),
                windows: co_runner.windows_with,
            };

            match co_runner.measured_loss(effects.get(index), co_runner.presence) {
                Some(loss) => losses.push(build_loss(loss, LossSource::Measured)),
                None => unmeasured_losses.push((
                    co_runner,
                    forecast,
                    build_loss(Estimate::exact(0.0), LossSource::Forecast),
                )),
            }
        }

        let measured_loss = losses
            .iter()
            .map(|loss| loss.loss)
            .reduce(compound_loss)
            .map_or(0.0, |total| total.value);
        let unexplained_loss = solo_slowdown
            .map(|solo| (1.0 + solo) / (1.0 + measured_loss) - 1.0)
            .filter(|unexplained_loss| *unexplained_loss > MIN_ATTRIBUTED_SLOWDOWN);

        let are_all_forecast = unmeasured_losses
            .iter()
            .all(|(_, forecast, _)| forecast.is_some());
        let attribution_weight =
            |co_runner: &CoRunnerHistory, forecast: Option<Estimate>| match forecast {
                Some(forecast) if are_all_forecast => forecast.value.max(0.0),
                _ => co_runner.presence,
            };
        let total: f64 = unmeasured_losses
            .iter()
            .map(|(co_runner, forecast, _)| attribution_weight(co_runner, *forecast))
            .sum();

        for (co_runner, forecast, loss_entry) in &unmeasured_losses {
            match (unexplained_loss.filter(|_| total > 0.0), forecast) {
                (Some(unexplained_loss), _) => {
                    let value = unexplained_loss * attribution_weight(co_runner, *forecast) / total;
                    let loss = Estimate {
                        value,
                        low: 0.0,
                        high: unexplained_loss,
                    };
                    losses.push(ServiceLoss {
                        loss,
                        source: LossSource::Attributed,
                        ..loss_entry.clone()
                    });
                }
                (None, Some(forecast)) => losses.push(ServiceLoss {
                    loss: *forecast,
                    ..loss_entry.clone()
                }),
                (None, None) => {}
            }
        }

        sort_losses(&mut losses);
        losses
    }

    /// The measured losses that services which are confined now would add without their confinement, at their present
    /// activity.
    fn prevented_losses(&self) -> Vec<ServiceLoss> {
        let effects = self.co_runner_effects();
        let loss_of = |confined: &CoRunnerHistory| {
            let is_unconfined =
                |other: &CoRunnerHistory| other.service == confined.service && !other.is_confined;
            let (index, unconfined) = self
                .co_runners
                .iter()
                .enumerate()
                .find(|(_, co_runner)| is_unconfined(co_runner))?;
            let loss = unconfined.measured_loss(effects.get(index), confined.presence)?;
            (loss.value > 0.0).then(|| ServiceLoss {
                cause: confined.service.clone(),
                loss,
                source: LossSource::Measured,
                forecast: None,
                windows: unconfined.windows_with,
            })
        };

        let confined = self
            .co_runners
            .iter()
            .filter(|co_runner| co_runner.is_current && co_runner.is_confined);
        let mut losses: Vec<ServiceLoss> = confined.filter_map(loss_of).collect();
        sort_losses(&mut losses);
        losses
    }

    /// The reason why the report lacks a slowdown or losses; `None` if it has both.
    fn missing_loss_reason(
        &self,
        report: &ServiceReport,
        activity: &ServiceActivity<'_>,
        topology: &Topology,
    ) -> Option<String> {
        if report.slowdown.cache.is_some() && !report.losses.is_empty() {
            return None;
        }
        let co_runners: Vec<&CoRunnerHistory> = self
            .co_runners
            .iter()
            .filter(|co_runner| co_runner.presence >= MIN_PRESENCE)
            .collect();

        Some(if activity.ran_ns == 0 {
            "it did not run in this window".to_string()
        } else if topology.last_level_caches().next().is_none() {
            "the caches of this host are unknown".to_string()
        } else if co_runners.is_empty() {
            "no other managed service ran on its caches".to_string()
        } else if co_runners.iter().all(|co_runner| co_runner.spares_cache) {
            "its co-runners were measured to evict nothing: they take its CPUs at most".to_string()
        } else if self.metric.is_none() {
            "no work is counted: hardware counters, a progress file or a busy program's system calls would measure it"
                .to_string()
        } else if self.windows < 2 * MIN_WINDOWS {
            format!(
                "{} of {} needed windows were observed",
                self.windows,
                2 * MIN_WINDOWS
            )
        } else if co_runners
            .iter()
            .all(|co_runner| co_runner.windows_without < MIN_WINDOWS)
        {
            "its co-runners ran in every window: windows without them, a limit for it in mode act, or profiles would separate them"
                .to_string()
        } else if co_runners
            .iter()
            .all(|co_runner| co_runner.windows_with < MIN_WINDOWS)
        {
            format!(
                "its co-runners ran in fewer than {MIN_WINDOWS} windows: more of them will tell"
            )
        } else {
            "no cache loss is larger than its error: a count of its work (progress_file), or a pause in mode act, would narrow it"
                .to_string()
        })
    }
}

/// Whether nearly all that a service ran was measured to evict nothing from the caches of others.
fn evicts_nothing(activity: &ServiceActivity<'_>, profiles: &Profiles) -> bool {
    let is_sparing = |task: &&&TaskSample| {
        let profile = profiles.get(&task.task);
        let intensity = profile.and_then(|profile| profile.contention.intensity);
        intensity.is_some_and(|fact| fact.estimate().high < MIN_CACHE_INTENSITY)
    };
    let sparing_tasks = activity.tasks.iter().filter(is_sparing);
    let sparing_ns: u64 = sparing_tasks.map(|task| task.ran_ns()).sum();
    sparing_ns as f64 >= MIN_SPARING_SHARE * activity.ran_ns as f64
}

/// Largest first.
fn sort_losses(losses: &mut [ServiceLoss]) {
    losses.sort_by(|a, b| {
        b.loss
            .value
            .total_cmp(&a.loss.value)
            .then(a.cause.cmp(&b.cause))
    });
}

/// A forecast from probes. Sensitivity is the slowdown beside a full stream, and intensity is a fraction of a stream's
/// effect.
fn contention_forecast(profile: &Profile, co_runner: &Profile) -> Option<Estimate> {
    let sensitivity = profile.contention.sensitivity?.estimate();
    let intensity = co_runner.contention.intensity?.estimate();
    let clamp_to_share = |value: f64| value.clamp(0.0, 1.0);
    Some(Estimate {
        value: sensitivity.value * clamp_to_share(intensity.value),
        low: sensitivity.low.max(0.0) * clamp_to_share(intensity.low),
        high: sensitivity.high * clamp_to_share(intensity.high),
    })
}

pub(crate) fn activities_by_service<'a>(
    observation: &'a Observation,
    topology: &Topology,
) -> ServiceActivities<'a> {
    let mut activities = ServiceActivities::new();
    let shares = observation.applied.shares.iter();
    let members: BTreeSet<ShareMember> = shares
        .flat_map(|active| &active.share.members)
        .copied()
        .collect();

    for task in &observation.tasks {
        let activity = activities.entry(task.service_or_command()).or_default();
        activity.is_confined |= !members.is_empty()
            && [
                ShareMember::Process(task.process),
                ShareMember::Task(task.task),
            ]
            .iter()
            .any(|m| members.contains(m));
        activity.ran_ns += task.ran_ns();
        for (cpu, ns) in &task.on_cpu_ns {
            *activity.on_cpu_ns.entry(*cpu).or_default() += ns;
            if let Some(cache) = topology.last_level_cache_of(*cpu) {
                *activity.on_cache_ns.entry(cache.id).or_default() += ns;
            }
        }
        activity.tasks.push(task);
    }

    // A service whose tasks all ended in this window still slowed down others in it.
    activities.retain(|_, window| window.ran_ns > 0 || window.live_tasks().next().is_some());
    activities
}

/// The work per second of processor time, by the best metric that any of the tasks has.
fn service_speed(activity: &ServiceActivity<'_>, elapsed_ns: u64) -> Option<(WorkMetric, f64)> {
    let task_metrics: Vec<(&TaskSample, Vec<(WorkMetric, f64)>)> = activity
        .tasks
        .iter()
        .map(|task| (*task, metrics_of(task, elapsed_ns).collect()))
        .collect();
    let metric = task_metrics
        .iter()
        .flat_map(|(_, metrics)| metrics.iter().map(|(metric, _)| *metric))
        .min()?;
    let metric_counts = task_metrics.iter().filter_map(|(task, metrics)| {
        let (_, count) = metrics
            .iter()
            .find(|(task_metric, _)| *task_metric == metric)?;
        Some((task.ran_ns(), *count))
    });
    let (ran_ns, work_sum) = metric_counts.fold((0, 0.0), |(run_ns, work), (ns, count)| {
        (run_ns + ns, work + count)
    });

    // One thread reports the work of all threads of its process.
    let ran_ns = if metric == WorkMetric::Reported {
        activity.ran_ns
    } else {
        ran_ns
    };
    // The speed of threads that ran for less than half of the time is not that of the service.
    (ran_ns > 0 && 2 * ran_ns >= activity.ran_ns && work_sum > 0.0)
        .then(|| (metric, work_sum * 1e9 / ran_ns as f64))
}

/// The work of all threads by the best metric that covers them; a rate of page faults is not one of work.
fn counted_work(activity: &ServiceActivity<'_>) -> Option<(WorkMetric, f64)> {
    let work_by = |metric: WorkMetric| {
        let counts = activity
            .tasks
            .iter()
            .filter_map(|task| Some((task.ran_ns(), metric.count(task)?)));
        let (ran_ns, work) = counts.fold((0, 0.0), |(ran_ns, work), (ns, count)| {
            (ran_ns + ns, work + count)
        });
        let (covers_all, is_enough) = match metric {
            WorkMetric::Reported => (true, work > 0.0),
            WorkMetric::Instructions => (false, work > 0.0),
            WorkMetric::Proxy(_) => (false, work >= MIN_EVENTS),
        };
        let covers_all = covers_all || ran_ns as f64 >= MIN_COUNTED_SHARE * activity.ran_ns as f64;
        (covers_all && is_enough).then_some((metric, work))
    };
    let is_work = |metric: &WorkMetric| *metric != WorkMetric::Proxy(CounterEvent::PageFaults);
    WorkMetric::BEST_FIRST
        .into_iter()
        .filter(is_work)
        .find_map(work_by)
}

fn busiest_profile<'p>(
    activity: &ServiceActivity<'_>,
    profiles: &'p Profiles,
) -> Option<&'p Profile> {
    let known_profiles = activity
        .tasks
        .iter()
        .filter_map(|task| Some((task.ran_ns(), profiles.get(&task.task)?)));
    known_profiles
        .filter(|(_, profile)| **profile != Profile::default())
        .max_by_key(|(run_ns, _)| *run_ns)
        .map(|(_, profile)| profile)
}

#[cfg(test)]
mod tests;
