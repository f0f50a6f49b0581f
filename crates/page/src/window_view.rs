//! Figures and wording of one window, from which its snapshot is built.
//!
//! Every text is printable, because names and messages come from other users; unmeasured values are missing.

use std::collections::BTreeMap;

use cachemate_auto::service_losses::{ServiceLosses, ServiceReport};
use cachemate_core::{
    CacheId, CounterEvent, CpuSet, Estimate, Observation, PendingItem, PlanItem, PredictorConfig,
    ProbeKind, Profile, Profiles, PromiseReport, Reason, RefusedItem, ShareMember, TaskId,
    TaskSample, Topology, WindowRecord,
};
use cachemate_papers::solo_speeds::SoloSpeeds;
use cachemate_papers::work_metric::{WorkMetric, metrics_of};
use cachemate_pipeline::pair_forecast;
use cachemate_report::text::escape_controls;

/// Printable names of tasks, in the form that a front end uses in sentences.
pub type TaskNames = BTreeMap<TaskId, String>;

/// The text for a thread in sentences.
pub fn describe_thread(name: &str, tid: i32) -> String {
    format!("{}({tid})", escape_controls(name))
}

/// A live task in one window.
#[derive(Clone, Debug)]
pub struct TaskView<'a> {
    /// Readings of the task.
    pub sample: &'a TaskSample,
    /// Profile of the task, if there is one.
    pub profile: Option<&'a Profile>,
    /// CPU time divided by the length of the window.
    pub cpu_share: Option<f64>,
    /// Instructions per cycle while on CPU.
    pub instr_per_cycle: Option<f64>,
    /// Pair of misses of the contended cache and instructions.
    pub misses_and_instructions: Option<(f64, f64)>,
    /// Work per second, by the best available metric.
    pub work_per_second: Option<(WorkMetric, f64)>,
    /// Measured run time divided by solo run time, minus one.
    pub slowdown: Option<f64>,
    /// Slowdown that was forecast for the next window under its plan.
    pub forecast_slowdown: Option<Estimate>,
    /// CPUs that the plan in force allows, if it names any.
    pub allowed: Option<&'a CpuSet>,
}

impl TaskView<'_> {
    /// The misses of the contended cache per thousand instructions.
    pub fn misses_per_kilo_instr(&self) -> Option<f64> {
        self.misses_and_instructions
            .map(|(misses, instructions)| 1000.0 * misses / instructions)
    }
}

/// A reason in the form of a sentence.
#[derive(Clone, Debug)]
pub struct RenderedReason<'a> {
    /// The reason, with its kind, tasks and numbers.
    pub reason: &'a Reason,
    /// Printable text in which names replace the tasks' ids.
    pub text: String,
    /// Whether the reason was absent from the last window that had reasons.
    pub is_new: bool,
}

/// One window in the form that front ends format.
#[derive(Clone, Debug)]
pub struct WindowView<'a> {
    /// Live tasks, in order of arrival.
    pub tasks: Vec<TaskView<'a>>,
    /// Services, ordered by loss, largest first.
    pub services: Vec<ServiceReport>,
    /// Promises, judged by the losses of their service if nothing else was measured.
    pub promises: Vec<PromiseReport>,
    /// Reasons of the decision.
    pub reasons: Vec<RenderedReason<'a>>,
    /// Changes that the host refused, one sentence each.
    pub refused: Vec<String>,
    /// Changes that another process made, one sentence each.
    pub overridden: Vec<String>,
}

/// Turns the records of a run into views, in order.
#[derive(Default)]
pub struct WindowTracker {
    /// The predictor; `None` if losses between services are not forecast.
    predictor: Option<PredictorConfig>,
    solo_speeds: SoloSpeeds,
    losses: ServiceLosses,
    last_texts: Vec<String>,
}

impl WindowTracker {
    /// Builds a tracker that uses the run's predictor to forecast pairs of programs.
    pub fn new(predictor: PredictorConfig) -> Self {
        WindowTracker {
            predictor: Some(predictor),
            ..WindowTracker::default()
        }
    }

    /// The view of one iteration of the loop.
    pub fn observe<'a>(
        &mut self,
        record: &'a WindowRecord,
        topology: &Topology,
        profiles: &'a Profiles,
        names: &TaskNames,
    ) -> WindowView<'a> {
        let observation = &record.observation;
        self.solo_speeds.observe(observation);
        let predictor = self.predictor.as_ref();
        let forecast_pair = |own_profile: &Profile, other_profile: &Profile| {
            pair_forecast(topology, predictor?, own_profile, other_profile)[0]
        };
        let services = self
            .losses
            .observe(observation, topology, profiles, &forecast_pair);
        let promises = record
            .promises
            .iter()
            .map(|promise| judge_by_service(promise, observation, &services))
            .collect();

        let live_tasks = observation.tasks.iter().filter(|task| !task.exited);
        WindowView {
            tasks: live_tasks
                .map(|task| self.task_view(task, record, topology, profiles))
                .collect(),
            services,
            promises,
            reasons: self.render_reasons(&record.decision.reasons, names),
            refused: describe_refusals(record, names),
            overridden: record
                .applied
                .overridden_by_others
                .iter()
                .map(|item| item_text(item, names))
                .collect(),
        }
    }

    fn task_view<'a>(
        &self,
        task: &'a TaskSample,
        record: &'a WindowRecord,
        topology: &Topology,
        profiles: &'a Profiles,
    ) -> TaskView<'a> {
        let elapsed_ns = record.observation.span.elapsed_ns;
        let seconds = Some(elapsed_ns as f64 / 1e9).filter(|seconds| *seconds > 0.0);
        let count_of = |event| task.counts.get(event);
        let instructions = count_of(CounterEvent::Instructions).filter(|count| *count > 0.0);
        let cycles = count_of(CounterEvent::Cycles).filter(|count| *count > 0.0);
        let misses = topology
            .last_level()
            .and_then(|level| count_of(CounterEvent::Misses(level)));
        let profile = profiles.get(&task.task);
        let empty_profile = Profile::default();

        TaskView {
            sample: task,
            profile,
            cpu_share: seconds.map(|seconds| task.ran_ns() as f64 / 1e9 / seconds),
            instr_per_cycle: instructions
                .zip(cycles)
                .map(|(instructions, cycles)| instructions / cycles),
            misses_and_instructions: misses.zip(instructions),
            work_per_second: metrics_of(task, elapsed_ns)
                .next()
                .zip(seconds)
                .map(|((work, count), seconds)| (work, count / seconds)),
            slowdown: self.solo_speeds.slowdown_over_solo(
                task,
                elapsed_ns,
                profile.unwrap_or(&empty_profile),
            ),
            forecast_slowdown: record
                .forecast
                .tasks
                .get(&task.task)
                .and_then(|forecast| forecast.degradation),
            allowed: record.applied.affinity.get(&task.task),
        }
    }

    fn render_reasons<'a>(
        &mut self,
        reasons: &'a [Reason],
        names: &TaskNames,
    ) -> Vec<RenderedReason<'a>> {
        let render = |reason: &'a Reason| {
            // The text of a recording may come from an untrusted source.
            let escaped_reason = Reason {
                text: escape_controls(&reason.text),
                tasks: reason.tasks.clone(),
                ..Reason::default()
            };
            let text = escaped_reason.render(|task| names.get(&task).map_or("?", String::as_str));
            RenderedReason {
                reason,
                is_new: !self.last_texts.contains(&text),
                text,
            }
        };
        let rendered_reasons: Vec<RenderedReason<'a>> = reasons.iter().map(render).collect();
        if !rendered_reasons.is_empty() {
            self.last_texts = rendered_reasons
                .iter()
                .map(|rendered| rendered.text.clone())
                .collect();
        }

        rendered_reasons
    }
}

fn judge_by_service(
    promise: &PromiseReport,
    observation: &Observation,
    services: &[ServiceReport],
) -> PromiseReport {
    let sample = observation
        .tasks
        .iter()
        .find(|task| task.task == promise.task);
    let own_service = sample.map(TaskSample::service_or_command);
    let service_report = services
        .iter()
        .find(|report| own_service.as_deref() == Some(&report.service));
    service_report.map_or_else(|| promise.clone(), |report| report.judge_promise(promise))
}

/// In order of arrival; a process stands for all of its tasks.
pub fn member_tasks<'a>(
    members: &[ShareMember],
    tasks: &'a [TaskSample],
) -> impl Iterator<Item = TaskId> + use<'a> {
    let members = members.to_vec();
    let is_member =
        move |task: &&TaskSample| ShareMember::name_task(&members, task.task, task.process);
    tasks.iter().filter(is_member).map(|task| task.task)
}

/// Describes the items of a plan that the machine refused, each with its tasks and the reason.
pub fn describe_refusals(record: &WindowRecord, names: &TaskNames) -> Vec<String> {
    let probes = &record.decision.plan.probes;
    let refusal_text = |refused: &RefusedItem| {
        let probe = probes
            .iter()
            .find(|probe| refused.item == PlanItem::Probe(probe.id));
        let item = probe.map_or_else(
            || item_text(&refused.item, names),
            |probe| probe_text(&probe.kind, names),
        );
        format!("{item}: {}", escape_controls(&refused.message))
    };
    record.applied.refused.iter().map(refusal_text).collect()
}

fn task_name(task: TaskId, names: &TaskNames) -> String {
    names
        .get(&task)
        .cloned()
        .unwrap_or_else(|| format!("task {}", task.0))
}

/// Describes a requested probe for users.
fn probe_text(kind: &ProbeKind, names: &TaskNames) -> String {
    let name_of = |task: &TaskId| task_name(*task, names);

    match kind {
        ProbeKind::CoRunRows { rows, .. } => {
            let rows = rows.iter().map(|row| {
                let members: Vec<String> = row.iter().map(name_of).collect();
                members.join(" + ")
            });
            format!("intervals of {}", rows.collect::<Vec<_>>().join(" and "))
        }
        ProbeKind::PairedRows { task, .. } => format!("intervals of {} in pairs", name_of(task)),
        ProbeKind::MissTrace { task, .. } => format!("log of misses of {}", name_of(task)),
        ProbeKind::AccessSamples { processes, .. } => {
            format!("sampled accesses of {} processes", processes.len())
        }
        ProbeKind::ReuseTimes { task, .. } => format!("watched words of {}", name_of(task)),
        ProbeKind::SuperSets { tasks, .. } => {
            let members: Vec<String> = tasks.iter().map(name_of).collect();
            format!("super-set counters of {}", members.join(" + "))
        }
        ProbeKind::Neighbor { task, .. } => format!("{} beside a neighbor", name_of(task)),
        ProbeKind::PingPong { .. } => "ping-pong between two CPUs".to_string(),
        ProbeKind::PrimeProbe { task, .. } => format!("lines that {} evicts", name_of(task)),
    }
}

/// Describes a change in progress for users.
pub fn pending_text(pending: &PendingItem, names: &TaskNames) -> String {
    let total_text = pending
        .total
        .map_or(String::new(), |total| format!(" of {total}"));
    format!(
        "{}: {}{total_text}",
        item_text(&pending.item, names),
        pending.done
    )
}

fn item_text(item: &PlanItem, names: &TaskNames) -> String {
    let name_of = |task: &TaskId| task_name(*task, names);
    match item {
        PlanItem::Plan => "the plan".to_string(),
        PlanItem::Affinity(task) => format!("CPUs of {}", name_of(task)),
        PlanItem::Weight(task) => format!("weight of {}", name_of(task)),
        PlanItem::Gangs(at) => format!("turns {at}"),
        PlanItem::Share(group, CacheId(cache)) => format!("part {} of cache {cache}", group.0),
        PlanItem::Bandwidth(group, CacheId(cache)) => {
            format!("limit {} of bandwidth behind cache {cache}", group.0)
        }
        PlanItem::Penalties => "advice".to_string(),
        PlanItem::Probe(probe) => format!("probe {}", probe.0),
        PlanItem::Window => "window".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{last_level_caches, observation_fixture, record_fixture};
    use cachemate_core::{
        CacheLevel, Decision, EventCounts, ProbeId, ProbeRequest, ReasonKind, RefusalReason,
    };

    fn record(reasons: Vec<Reason>, tasks: u32) -> WindowRecord {
        let record = record_fixture(observation_fixture(0, tasks));
        WindowRecord {
            decision: Decision {
                reasons,
                ..record.decision
            },
            ..record
        }
    }

    /// Do names with braces, escape sequences, marks that change the direction of writing, or two hundred characters
    /// stay one word in their place, in reasons and refusals, without any effect on a terminal?
    #[test]
    fn hostile_names_stay_one_word_in_their_place() {
        let long = "n".repeat(200);
        let names = ["{1}", "\u{1b}[2J\n  1  1 init", "a\u{202e}b", &long];
        let names: TaskNames = (0..).map(TaskId).zip(names.map(escape_controls)).collect();
        let text = "{0} beside {1}, {2} and {3}, not {9}".to_string();
        let mut record = record(
            vec![Reason {
                text,
                tasks: (0..4).map(TaskId).collect(),
                ..Reason::default()
            }],
            4,
        );
        record.applied.refused = vec![RefusedItem {
            item: PlanItem::Affinity(TaskId(1)),
            reason: RefusalReason::Busy,
            message: "no\u{1b}[2J".to_string(),
        }];
        record.applied.overridden_by_others = vec![PlanItem::Weight(TaskId(7))];
        let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 20);
        let profiles = Profiles::new();
        let view = WindowTracker::default().observe(&record, &topology, &profiles, &names);
        let init = r"\u{1b}[2J\n  1  1 init";
        assert_eq!(
            view.reasons[0].text,
            format!(r"{{1}} beside {init}, a\u{{202e}}b and {long}, not {{9}}")
        );
        assert_eq!(view.refused, [format!(r"CPUs of {init}: no\u{{1b}}[2J")]);
        assert_eq!(view.overridden, ["weight of task 7"]);

        record.applied.refused[0].item = PlanItem::Probe(ProbeId(5));
        record.decision.plan.probes = vec![ProbeRequest {
            id: ProbeId(5),
            kind: ProbeKind::ReuseTimes {
                task: TaskId(0),
                locations: 4,
            },
            budget_ns: 1,
        }];
        let refusals = describe_refusals(&record, &names);
        assert_eq!(
            refusals,
            [r"watched words of {1}: no\u{1b}[2J"],
            "the probe names its task"
        );
    }

    /// Is a reason new once, until another one was given, even with windows without reasons in between?
    #[test]
    fn a_reason_is_new_once_until_another_is_given() {
        let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 20);
        let mut tracker = WindowTracker::default();
        let mut is_new = |texts: &[&str]| {
            let reason = |text: &&str| Reason {
                kind: ReasonKind::RolledBack,
                text: text.to_string(),
                ..Reason::default()
            };
            let record = record(texts.iter().map(reason).collect(), 1);
            let (profiles, names) = (Profiles::new(), TaskNames::new());
            let view = tracker.observe(&record, &topology, &profiles, &names);
            view.reasons
                .iter()
                .map(|item| item.is_new)
                .collect::<Vec<_>>()
        };
        assert_eq!(is_new(&["a", "b"]), [true, true]);

        assert!(is_new(&[]).is_empty());
        assert_eq!(is_new(&["b", "c"]), [false, true]);
        assert_eq!(is_new(&["a"]), [true]);
    }

    /// Are figures missing if nothing was counted, and otherwise computed from the counts?
    #[test]
    fn uncounted_figures_are_absent() {
        let mut record = record(Vec::new(), 2);
        record.observation.tasks[1].counts = EventCounts::exact([
            (CounterEvent::Instructions, 2_000),
            (CounterEvent::Cycles, 1_000),
            (CounterEvent::Misses(CacheLevel::L3), 10),
        ]);
        let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 20);
        let profiles = Profiles::new();
        let view =
            WindowTracker::default().observe(&record, &topology, &profiles, &TaskNames::new());

        let figures = |task: &TaskView<'_>| {
            (
                task.instr_per_cycle,
                task.misses_per_kilo_instr(),
                task.slowdown,
            )
        };
        assert_eq!(
            view.tasks.iter().map(figures).collect::<Vec<_>>(),
            [(None, None, None), (Some(2.0), Some(5.0), None)]
        );
    }
}
