//! Promises as `status`, `top`, `explain` and the metrics show them.

use std::collections::BTreeMap;

use cachemate_core::{Estimate, PromiseReport, PromiseState, PromiseTerm, TaskId};
use serde::{Deserialize, Serialize};

/// A promise to a program and its state.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PromiseStatus {
    /// Process id.
    pub pid: i32,
    /// Name of the process, as the kernel has it.
    pub name: String,
    /// The state by measurements under the plan in force.
    pub state: PromiseState,
    /// Promised maximum of the slowdown.
    pub max_slowdown: Option<f64>,
    /// Promised minimum of work per second of each thread.
    pub min_rate: Option<f64>,
    /// Slowdown or rate with its 95 % interval; `None` if it was not measured.
    pub measured: Option<Estimate>,
    /// The promise as a sentence, with the missing evidence, or the programs that would have to leave.
    pub text: String,
}

/// The promises of a window, without those of exited processes.
pub fn build_promise_statuses(
    reports: &[PromiseReport],
    pid_of: impl Fn(TaskId) -> Option<i32>,
    names: &BTreeMap<TaskId, String>,
) -> Vec<PromiseStatus> {
    let name_of = |task: TaskId| names.get(&task).cloned().unwrap_or_else(|| "?".to_string());
    let promise_status = |report: &PromiseReport| {
        let (max_slowdown, min_rate) = match report.term {
            PromiseTerm::MaxSlowdown(max) => (Some(max), None),
            PromiseTerm::MinRate(min) => (None, Some(min)),
        };
        Some(PromiseStatus {
            pid: pid_of(report.task)?,
            name: name_of(report.task),
            state: report.state,
            max_slowdown,
            min_rate,
            measured: report.measured,
            text: format!("{} is {}", name_of(report.task), report.describe(name_of)),
        })
    };
    reports.iter().filter_map(promise_status).collect()
}
