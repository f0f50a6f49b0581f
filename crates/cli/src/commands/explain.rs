//! `cachemate explain`: the reasons for a program's placement.

use anyhow::bail;
use cachemate_spec::ManageMode;
use clap::Args;
use serde::Serialize;

use super::status::SocketArg;
use crate::args::JsonArg;
use crate::session::Session;
use crate::status_text::explain_text;
use cachemate_daemon::socket;
use cachemate_daemon::status::thread_text;
use cachemate_daemon::status::{DecisionStatus, TaskStatus};

/// Explain a program's placement: the reasons, the measurements behind them, and the slowdown
#[derive(Args)]
pub struct Explain {
    /// A process or thread id
    #[arg(value_name = "PID")]
    pid: i32,
    #[command(flatten)]
    at: SocketArg,
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate explain --json`.
#[derive(Serialize)]
struct ExplainJson {
    pid: i32,
    policy: String,
    mode: ManageMode,
    tasks: Vec<TaskStatus>,
    /// Managed threads of other processes on its cache.
    co_runners: Vec<String>,
    /// Decisions that name it, latest first.
    decisions: Vec<DecisionStatus>,
    refused: Vec<String>,
    /// How its affinities counteract the kernel's own cache-aware scheduling.
    conflicts: Vec<String>,
}

impl Explain {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let status = socket::status(&self.at.path())?;
        let mine = |task: &TaskStatus| task.pid == self.pid || task.tid == self.pid;
        let tasks: Vec<TaskStatus> = status.tasks.iter().filter(|task| mine(task)).cloned().collect();
        if tasks.is_empty() {
            let there = match std::path::Path::new(&format!("/proc/{}", self.pid)).exists() {
                true => "no rule of the configuration matches it, or it started after the last window",
                false => "no such process exists",
            };
            bail!("process {} is not managed: {there}", self.pid);
        }
        let about = |ids: &[u32]| tasks.iter().any(|task| ids.contains(&task.task));
        let caches = |task: &TaskStatus| tasks.iter().any(|own| own.cache.is_some() && own.cache == task.cache);
        let others = status.tasks.iter().filter(|task| !mine(task) && caches(task));
        let tokens: Vec<String> = tasks.iter().map(|task| format!("TaskId({})", task.task)).collect();
        let result = ExplainJson {
            pid: self.pid,
            policy: status.policy.clone(),
            mode: status.mode,
            co_runners: others.map(|task| thread_text(&task.name, task.tid)).collect(),
            decisions: status.decisions.iter().filter(|decision| about(&decision.tasks)).cloned().collect(),
            refused: status.refused.iter().filter(|line| tokens.iter().any(|t| line.contains(t))).cloned().collect(),
            conflicts: status
                .kernel_conflicts
                .iter()
                .filter(|conflict| tasks.iter().any(|task| task.pid == conflict.pid))
                .map(|conflict| conflict.detail.clone())
                .collect(),
            tasks,
        };
        session.answer(self.json.json, &result, || {
            let ExplainJson { tasks, co_runners, decisions, refused, conflicts, mode, .. } = &result;
            explain_text(tasks, co_runners, decisions, refused, conflicts, *mode)
        })
    }
}
