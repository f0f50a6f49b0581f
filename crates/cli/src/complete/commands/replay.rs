//! `cachemate replay`: replays a recorded run with its policy, or scores another policy on the run.

use cachemate_core::PolicyConfig;
use cachemate_pipeline::{ReplayError, ReplayedWindow, replay};
use cachemate_report::Table;
use cachemate_trace::RunLogReader;
use clap::Args;
use serde::Serialize;

use super::replay_page::PageArgs;
use crate::args::JsonArg;
use crate::exit::UsageError;
use crate::session::Session;

/// Replay a run log: check that the recorded policy reproduces every decision, or score another policy's forecasts
///
/// With -o, write it as one HTML page: which programs shared a cache in each window, and the reasons. `cachemate sim
/// -o` writes run logs, and `cachemate manage` does if its configuration sets `run_log`. `cachemate manage --dashboard`
/// serves the same page for a running host.
#[derive(Args)]
pub struct ReplayArgs {
    /// The run log
    #[arg(value_name = "LOG")]
    log: String,
    /// Replay by this policy, with its default parameters [default: the recorded policy]
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    json: JsonArg,
}

#[derive(Serialize)]
struct ReplayJson {
    log: String,
    recorded_policy: String,
    policy: String,
    windows: u64,
    /// Number of windows in which the replayed plan equals the recorded one.
    same_plans: u64,
    /// Window and description of the first difference.
    first_difference: Option<(u64, String)>,
    /// Mean relative error of forecast instructions per cycle; absent without forecasts.
    mean_forecast_error: Option<f64>,
    forecasts: u64,
}

impl ReplayArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if let Some(output) = &self.page.output {
            return self.page.write_page(session, &self.log, output);
        }
        let log = RunLogReader::open(&self.log)?;
        let recorded_policy = log.header().pipeline.policy.clone();
        let other_policy = self
            .policy
            .as_ref()
            .filter(|name| **name != recorded_policy.name)
            .map(|name| PolicyConfig {
                name: name.clone(),
                parameters: String::new(),
                seed: recorded_policy.seed,
            });
        let policy_name = other_policy
            .as_ref()
            .map_or(&recorded_policy.name, |other_policy| &other_policy.name)
            .clone();
        let (mut same_plans, mut first_difference, mut relative_errors) = (0, None, Vec::new());
        let report_window = |replayed: ReplayedWindow| {
            match replayed.plan_difference {
                None => same_plans += 1,
                Some(difference) => {
                    first_difference = first_difference
                        .take()
                        .or(Some((replayed.window, difference)))
                }
            }
            let missed_forecasts = replayed.forecast_errors_instr_per_cycle.into_iter();
            relative_errors.extend(
                missed_forecasts
                    .filter(|miss| miss.2 > 0.0)
                    .map(|miss| (miss.1.value - miss.2).abs() / miss.2),
            );
        };
        let extent = match replay(log, other_policy, report_window) {
            Err(ReplayError::Policy(error)) => return Err(UsageError(error.to_string()).into()),
            other => other?,
        };
        if let Some(damage) = &extent.damage {
            session.warn(&format!(
                "the run log is incomplete: {damage}; the {} windows before it are replayed",
                extent.windows
            ));
        }
        let forecasts = relative_errors.len() as u64;
        let result = ReplayJson {
            log: self.log.clone(),
            recorded_policy: recorded_policy.name,
            policy: policy_name,
            windows: extent.windows,
            same_plans,
            first_difference,
            mean_forecast_error: (forecasts > 0)
                .then(|| relative_errors.iter().sum::<f64>() / forecasts as f64),
            forecasts,
        };
        session.print_result(self.json.json, &result, || render(&result))
    }
}

fn render(result: &ReplayJson) -> String {
    let mut table = Table::with_columns(" | ", "");
    table.add_row([
        "recorded policy".to_string(),
        result.recorded_policy.clone(),
    ]);
    table.add_row(["replayed policy".to_string(), result.policy.clone()]);
    table.add_row(["windows".to_string(), result.windows.to_string()]);
    table.add_row(["same plans".to_string(), result.same_plans.to_string()]);
    if let Some((window, difference)) = &result.first_difference {
        table.add_row([
            "first difference".to_string(),
            format!("window {window}: {difference}"),
        ]);
    }
    if let Some(error) = result.mean_forecast_error {
        let text = format!(
            "{} over {} forecasts",
            cachemate_report::text::format_percent(error, 1),
            result.forecasts
        );
        table.add_row(["mean error of IPC forecasts".to_string(), text]);
    }
    table.text()
}
