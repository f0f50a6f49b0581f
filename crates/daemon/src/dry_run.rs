//! Dry run: the host is observed, and the first list of changes is reported instead of being executed.

use std::path::Path;

use cachemate_core::{Change, ControlLoopError, WindowRecord};
use cachemate_linux::machine::OBSERVE_ONLY_REASON;
use cachemate_linux::safety::journal::Journal;
use cachemate_linux::sense::progress::ProgressReports;
use cachemate_page::{TaskNames, describe_refusals};
use cachemate_report::text::escape_controls;
use cachemate_spec::ManageMode;
use serde::Serialize;

use crate::daemon::{ConfigSource, ControlFlags};
use crate::host::{self, LiveLoop, LiveRunOptions};
use crate::paths;

/// Number of windows that are observed before the result is "none".
pub const MAX_WINDOWS: u64 = 30;

/// One change, as a sentence and as data.
#[derive(Serialize)]
struct DryRunChange {
    line: String,
    change: Change,
}

/// The result of `--dry-run`: the first nonempty list of changes.
#[derive(Serialize, Default)]
pub struct DryRun {
    /// The policy that made the list.
    pub policy: String,
    /// Number of windows observed.
    pub windows: u64,
    /// The window of the list; `None` if no window had anything to change.
    pub window: Option<u64>,
    changes: Vec<DryRunChange>,
    /// The policy's reasons in that window.
    reasons: Vec<String>,
    /// Items of the plan that the host would refuse, each once.
    refused: Vec<String>,
    notes: Vec<String>,
}

impl DryRun {
    /// A dry run that has observed nothing yet.
    pub fn new(policy: &str) -> Self {
        DryRun {
            policy: policy.to_string(),
            ..DryRun::default()
        }
    }

    /// Observes one window and the resulting list. Returns whether a list to report has been found.
    pub fn observe(&mut self, record: &WindowRecord, changes: &[Change]) -> bool {
        self.windows += 1;
        let names: TaskNames = record
            .observation
            .tasks
            .iter()
            .map(|task| (task.task, escape_controls(&task.name)))
            .collect();
        for refusal in describe_refusals(record, &names) {
            if !refusal.ends_with(OBSERVE_ONLY_REASON) {
                self.record_refusal(refusal);
            }
        }
        if self.window.is_some() || changes.is_empty() {
            return self.window.is_some();
        }
        self.window = Some(record.observation.window);
        self.changes = changes
            .iter()
            .map(|change| DryRunChange {
                line: change.to_string(),
                change: change.clone(),
            })
            .collect();
        self.reasons = record
            .decision
            .reasons
            .iter()
            .map(|reason| reason.text.clone())
            .collect();
        true
    }

    /// Adds an item that the host would refuse.
    pub fn record_refusal(&mut self, message: String) {
        if !self.refused.contains(&message) {
            self.refused.push(message);
        }
    }

    /// The result as plain lines.
    pub fn render(&self) -> String {
        let policy = &self.policy;
        let mut text = match self.window {
            None => format!("policy '{policy}': none in {} windows\n", self.windows),
            Some(window) => format!(
                "policy '{policy}', window {window}: not applied, because this is a dry run\n"
            ),
        };
        for DryRunChange { line, change } in &self.changes {
            let dependencies: Vec<String> = change
                .depends_on
                .iter()
                .map(|id| id.0.to_string())
                .collect();
            let dependency_text = if dependencies.is_empty() {
                String::new()
            } else {
                format!("; after {}", dependencies.join(", "))
            };
            text.push_str(&format!("{:>4}  {line}{dependency_text}\n", change.id.0));
        }
        self.reasons
            .iter()
            .take(8)
            .for_each(|reason| text.push_str(&format!("decided: {reason}\n")));
        self.refused
            .iter()
            .take(5)
            .for_each(|refusal| text.push_str(&format!("refused: {refusal}\n")));
        self.notes
            .iter()
            .for_each(|note| text.push_str(&format!("note: {note}\n")));
        text
    }

    /// Runs a loop that does not act until there is a list, or until `windows` windows have been observed.
    fn run_until_changes(
        &mut self,
        control_loop: &mut LiveLoop,
        max_windows: u64,
    ) -> anyhow::Result<()> {
        while self.windows < max_windows {
            match control_loop.step() {
                Ok(Some(record)) => {
                    let host = control_loop.machine.host_report();
                    if self.observe(&record, &host.planned_changes) {
                        break;
                    }
                }
                Ok(None) => break,
                Err(ControlLoopError::Plan { bad, .. }) => {
                    self.windows += 1;
                    self.record_refusal(format!("the plan is refused: {bad}"));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// The first changes that `manage` would make with this configuration. Nothing is changed, no file is written, and no
/// socket is served.
///
/// # Errors
/// The configuration is invalid, or the host cannot be read.
pub fn dry_run(
    source: &ConfigSource,
    flags: &ControlFlags,
    max_windows: u64,
) -> anyhow::Result<DryRun> {
    let mut config = source.read()?;
    config.mode = ManageMode::Observe;
    let state_dir = config.state_dir.clone().unwrap_or_else(paths::state_dir);
    let host_survey = host::survey_host(false)?;
    let options = LiveRunOptions {
        rules: host::manage_rules(&config.rules),
        progress: ProgressReports::default(),
        state_dir: state_dir.clone(),
        learned_profiles: Default::default(),
        runtime: None,
        stop: flags.stop.clone(),
        wake: flags.wake.clone(),
        config,
    };
    let host::LiveRun {
        control_loop: mut live,
        missing_evidence,
        ..
    } = host::build_live_run(&host_survey, &options)?;
    let mut dry_run_result = DryRun::new(&live.policy_name);
    dry_run_result
        .notes
        .extend(missing_evidence.iter().map(ToString::to_string));
    dry_run_result
        .notes
        .extend(describe_active_daemon(&state_dir));
    dry_run_result.run_until_changes(&mut live, max_windows)?;
    Ok(dry_run_result)
}

/// Describes a daemon that is already changing the host, whose changes the dry run takes for the original state; `None`
/// if there is none.
fn describe_active_daemon(state_dir: &Path) -> Option<String> {
    let journal = state_dir.join(Journal::FILE_NAME);
    let message = "changes of another daemon are in force, and these would come on top of them";
    cachemate_files::path_exists(&journal).then(|| format!("{}: {message}", journal.display()))
}
