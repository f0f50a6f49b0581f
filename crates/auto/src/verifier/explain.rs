//! Reasons of the verifier: verdicts, roll-backs, and plans that it does not apply.

use cachemate_core::{
    ChangeVerdict, MeasuredLogRatio, Reason, ReasonKind, TaskId, VerificationMethod,
    VerificationOutcome, View,
};
use cachemate_papers::reasons::named_number;
use cachemate_papers::work_metric::WorkMetric;

use super::cooldown::CooldownReason;
use super::judge::Regression;

fn to_percent_change(log_ratio: f64) -> f64 {
    100.0 * libm::expm1(log_ratio)
}

/// Describes the measured effect of a change that was proposed for this verification.
pub fn explain_verdict(
    verdict: &ChangeVerdict,
    method: VerificationMethod,
    view: &View<'_>,
) -> Option<Reason> {
    let forecast_gain = verdict.forecast_gain?;
    let is_confirmation = method == VerificationMethod::Confirmation;
    let (result, consequence) = match verdict.outcome {
        VerificationOutcome::NotSlower => (
            if is_confirmation {
                "faster"
            } else {
                "not slower"
            },
            "it is kept",
        ),
        VerificationOutcome::Slower => (
            if is_confirmation {
                "not faster"
            } else {
                "slower"
            },
            "it is rolled back",
        ),
        VerificationOutcome::NotMeasured
        | VerificationOutcome::Interrupted
        | VerificationOutcome::Refused => {
            return None;
        }
    };

    let measured_log_ratio = verdict.measured?;
    let text = format!(
        "the change was measured: {:+.1} %, forecast {:+.1} %, {result}; {consequence}",
        to_percent_change(measured_log_ratio.log_ratio),
        100.0 * forecast_gain
    );
    let numbers = vec![
        named_number(
            "measured_percent",
            to_percent_change(measured_log_ratio.log_ratio),
        ),
        named_number(
            "standard_error_percent",
            100.0 * measured_log_ratio.error.min(1e6),
        ),
        named_number("forecast_percent", 100.0 * forecast_gain),
    ];
    Some(Reason {
        kind: ReasonKind::TrialVerdict,
        tasks: live_tasks(view),
        text,
        numbers,
    })
}

/// Describes a measurement that a change of tasks or phases has ended.
pub fn explain_interruption(cause: &str, view: &View<'_>) -> Reason {
    explanation(
        format!("the change was not measured to the end: {cause}"),
        view,
    )
}

/// Describes the end of the pins by which tasks returned to their earlier caches.
pub fn explain_unpinning(view: &View<'_>) -> Reason {
    explanation(
        "the tasks have returned to their earlier caches and are no longer pinned there"
            .to_string(),
        view,
    )
}

fn explanation(text: String, view: &View<'_>) -> Reason {
    Reason::new(live_tasks(view), text, Vec::new())
}

/// Describes a roll-back after a comparison of speeds.
pub fn describe_rollback(
    regression: &Regression,
    cooldown_windows: u64,
    view: &View<'_>,
) -> Reason {
    let verdict = &regression.guard_verdict;
    let period = if regression.is_from_baseline {
        "over the last decisions together"
    } else {
        "since the last decision"
    };
    let mut tasks: Vec<TaskId> = Vec::new();

    // A proposed change that harms no program by the guard's terms is rolled back by its own.
    let own_change = regression.measured.filter(|_| !verdict.is_worse);
    let MeasuredLogRatio { log_ratio, error } = own_change.unwrap_or(MeasuredLogRatio {
        log_ratio: verdict.mean_log_ratio,
        error: verdict.standard_error,
    });
    let mut numbers = vec![
        named_number("change_percent", to_percent_change(log_ratio)),
        named_number("standard_error_percent", 100.0 * error.min(1e6)),
    ];
    let mut text = format!(
        "rolled back: the programs run {:+.1} % {period}{}",
        to_percent_change(log_ratio),
        proxy_note(regression)
    );
    let first_task = |process| {
        view.observation
            .tasks
            .iter()
            .find(|task| task.process == process && !task.exited)
    };
    let most_harmed = verdict
        .worst_loss
        .and_then(|(process, log_ratio)| Some((log_ratio, first_task(process)?)));
    if let Some((log_ratio, task)) = most_harmed {
        tasks.push(task.task);
        text += &format!(", {{0}} {:+.1} %", to_percent_change(log_ratio));
        numbers.push(named_number(
            "most_harmed_percent",
            to_percent_change(log_ratio),
        ));
    }
    if verdict.broken_goal_change > 0 {
        text += &format!(", and {} more miss their goal", verdict.broken_goal_change);
        numbers.push(named_number(
            "goals_missed",
            verdict.broken_goal_change as f64,
        ));
    }
    text += &format!("; the plan is on cooldown for {cooldown_windows} windows");
    let task_ids = view.observation.tasks.iter().map(|task| task.task);
    let moved_tasks: Vec<TaskId> = task_ids
        .filter(|task| view.previous_plan.affinity.contains_key(task) && !tasks.contains(task))
        .collect();
    tasks.extend(moved_tasks);
    Reason {
        kind: ReasonKind::RolledBack,
        tasks,
        text,
        numbers,
    }
}

/// The names of the proxy events as text.
fn proxy_note(regression: &Regression) -> String {
    let (count, events) = &regression.guard_verdict.proxy_comparison;
    let mut names: Vec<&str> = events
        .iter()
        .map(|event| WorkMetric::Proxy(*event).describe())
        .collect();
    names.sort_unstable();
    match count {
        0 => String::new(),
        count => format!(
            " ({count} of them judged by {}, because they report no work)",
            names.join(" and ")
        ),
    }
}

/// Describes a plan that is not applied before there is a reference.
pub fn explain_missing_reference(missing_windows: usize) -> Reason {
    let text = format!(
        "no change yet: {missing_windows} more measured windows are needed for a comparison"
    );
    Reason::new(Vec::new(), text, Vec::new())
}

/// Describes a plan that is not applied because of earlier failures.
pub fn explain_cooldown(cooldown: &CooldownReason) -> Reason {
    let text = match cooldown {
        CooldownReason::Failed { until } => {
            format!(
                "not tried: the plan that made programs slower is on cooldown until window {until}"
            )
        }
        CooldownReason::FailuresInARow { until } => {
            format!(
                "not tried: a plan has made programs slower; no plan is tried until window {until}"
            )
        }
    };
    Reason {
        kind: ReasonKind::CoolingDown,
        tasks: Vec::new(),
        text,
        numbers: Vec::new(),
    }
}

fn live_tasks(view: &View<'_>) -> Vec<TaskId> {
    view.live_tasks().map(|task| task.task).collect()
}
