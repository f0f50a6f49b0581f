//! `cachemate run`: starts programs under management, and compares them with an unmanaged run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::bail;
use cachemate_core::{ControlLoopError, median, quantile};
use cachemate_linux::act::rules::{ManageAction, ManageRule};
use cachemate_linux::safety::guardian::DaemonLock;
use cachemate_linux::sense::progress::ProgressReports;
use cachemate_report::Table;
use cachemate_report::text::{format_number, value_or_dash};
use cachemate_spec::{ManageConfig, ManageMode, PolicyChoice};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::exit::{InterruptedError, UsageError};
use crate::files::check_output_path;
use crate::session::Session;
use cachemate_daemon::daemon::report_failures;
use cachemate_daemon::dry_run::DryRun;
use cachemate_daemon::host::{self, HostSurvey, LiveRunOptions};
use cachemate_daemon::paths;
use cachemate_daemon::programs::{ProgramExit, ProgramGroup};
use cachemate_page::SnapshotBuilder;

/// Start programs under management, and optionally compare them with an unmanaged run
///
/// Commands are separated by ':::'. A program that maps the file named in CACHEMATE_PROGRESS and counts its work in the
/// first eight bytes is compared by work per second, other programs by run time. Only these programs are managed, and
/// the host is restored afterward. Standard output is that of the programs: the summary, also with --json, goes to
/// standard error, and --quiet omits it. If a program fails, the exit code is 1; so it is if --timeout kills a program
/// that reports no work, because its run time is then unknown.
#[derive(Args)]
pub struct RunArgs {
    /// Policy that manages the programs
    #[arg(long, short, value_name = "POLICY", default_value = "auto")]
    policy: String,
    /// The policy's parameters as TOML, such as 'slice_ns = 20_000_000'
    #[arg(long, value_name = "TOML", default_value = "")]
    parameters: String,
    /// Length of a window
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    window_ms: u64,
    /// Kill the programs after this time
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<f64>,
    /// Run everything N times managed and N times unmanaged, alternating
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    compare: Option<u32>,
    /// Measure and report, but change nothing
    #[arg(long)]
    observe_only: bool,
    /// Start the programs and print the first changes that would be made, without making them
    #[arg(long, conflicts_with_all = ["compare", "observe_only"])]
    dry_run: bool,
    #[command(flatten)]
    json: JsonArg,
    /// With --json: write to this file instead of standard error
    #[arg(short, long, value_name = "FILE", requires = "json")]
    output: Option<PathBuf>,
    /// Overwrite the file if it exists
    #[arg(long, requires = "output")]
    force: bool,
    /// CMD [ARG...] [::: CMD [ARG...]]...
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    commands: Vec<String>,
}

/// `cachemate run --json`.
#[derive(Serialize)]
struct RunJson {
    policy: String,
    /// `observe` if the runs under `managed` were only observed.
    mode: ManageMode,
    programs: Vec<ProgramJson>,
    /// Reasons of the last managed run, newest first.
    decisions: Vec<String>,
    refused: Vec<String>,
    /// Evidence that the policy uses and this host does not provide.
    missing_evidence: Vec<String>,
    /// Changes that would be made; present with --dry-run only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dry_run: Option<DryRun>,
}

#[derive(Serialize)]
struct ProgramJson {
    command: String,
    managed: Vec<ProgramExit>,
    unmanaged: Vec<ProgramExit>,
    /// Quantity by which runs are compared: `work_per_second` or `seconds`.
    compared_by: &'static str,
    managed_median: Option<f64>,
    /// First and third quartile over the managed runs.
    managed_spread: Option<(f64, f64)>,
    unmanaged_median: Option<f64>,
    unmanaged_spread: Option<(f64, f64)>,
    /// Managed speed divided by unmanaged speed, so above 1 is faster; absent if the runs are too short to compare, or
    /// if they are compared by run time and one was killed at the timeout.
    speed_ratio: Option<f64>,
    /// Whether the shortest run has fewer than [`MIN_COMPARED_WINDOWS`] windows.
    too_short_to_compare: bool,
}

/// Minimum number of windows of a compared run. In its first windows, a policy has no evidence yet.
const MIN_COMPARED_WINDOWS: u32 = 10;
/// Maximum number of decisions that are reported, the latest first.
const MAX_DECISIONS: usize = 30;

#[derive(Default)]
struct RunOutcome {
    exits: Vec<ProgramExit>,
    decisions: Vec<String>,
    refused: Vec<String>,
    missing_evidence: Vec<String>,
    dry_run: Option<DryRun>,
}

impl RunArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let commands: Vec<Vec<String>> = self
            .commands
            .split(|word| word == ":::")
            .map(<[String]>::to_vec)
            .collect();
        if commands.iter().any(Vec::is_empty) {
            return Err(UsageError(
                "found an empty command between ':::', expected CMD ::: CMD".into(),
            )
            .into());
        }
        if self
            .timeout
            .is_some_and(|seconds| !(seconds > 0.0 && seconds < 1e6))
            || self.window_ms == 0
        {
            return Err(UsageError("--timeout and --window-ms must be above 0".into()).into());
        }
        let config = ManageConfig {
            mode: if self.observe_only || self.dry_run {
                ManageMode::Observe
            } else {
                ManageMode::Act
            },
            policy: Some(PolicyChoice {
                name: self.policy.clone(),
                parameters: self.parameters.parse()?,
            }),
            window_ms: Some(self.window_ms),
            ..ManageConfig::default()
        };
        host::build_verified_policy(&config)?;
        if let Some(path) = &self.output {
            check_output_path(path, self.force)?;
        }
        let state_dir = RunStateDir::new()?;
        let host = host::survey_host(false)?;
        let (mut managed_exits, mut unmanaged_exits, mut last_outcome) =
            (Vec::new(), Vec::new(), None);
        // A single run shows only what its programs print.
        let progress = self
            .compare
            .map(|rounds| session.progress_bar("runs", Some(2 * u64::from(rounds))));
        for round in 0..self.compare.unwrap_or(1) {
            // The order alternates between rounds, so that drifts of the host affect both kinds of runs alike.
            let run_kinds: &[bool] = match (self.compare.is_some(), round % 2 == 0) {
                (false, _) => &[true],
                (true, true) => &[false, true],
                (true, false) => &[true, false],
            };
            for &is_managed in run_kinds {
                if let Some(progress) = &progress {
                    progress.set_message(if is_managed {
                        "(managed now)"
                    } else {
                        "(unmanaged now)"
                    });
                }
                let outcome = self.run_once(
                    session,
                    &commands,
                    is_managed.then_some((&host, &config)),
                    &state_dir.0,
                )?;
                if is_managed {
                    managed_exits.push(outcome.exits.clone());
                    last_outcome = Some(outcome);
                } else {
                    unmanaged_exits.push(outcome.exits);
                }
                if let Some(progress) = &progress {
                    progress.inc(1);
                }
            }
        }
        if let Some(progress) = progress {
            progress.finish_and_clear();
        }
        let programs = commands.iter().enumerate().map(|(index, command)| {
            let exits_of = |runs: &[Vec<ProgramExit>]| {
                runs.iter()
                    .filter_map(|run| run.get(index).cloned())
                    .collect()
            };
            compare_program(
                command.join(" "),
                exits_of(&managed_exits),
                exits_of(&unmanaged_exits),
                self.min_compared_seconds(),
            )
        });
        let last_run = last_outcome.unwrap_or_default();
        let result = RunJson {
            policy: self.policy.clone(),
            mode: config.mode,
            programs: programs.collect(),
            decisions: last_run.decisions,
            refused: last_run.refused,
            missing_evidence: last_run.missing_evidence,
            dry_run: last_run.dry_run,
        };
        let output = self.output.as_deref().map(|path| (path, self.force));
        session.print_result_beside_programs(self.json.json, output, &result, || {
            self.render(&result)
        })?;
        check_exits(&result.programs)
    }

    /// The shortest run, in seconds, that may be compared with another.
    fn min_compared_seconds(&self) -> f64 {
        self.window_ms as f64 / 1e3 * f64::from(MIN_COMPARED_WINDOWS)
    }

    /// Runs all programs once, managed or unmanaged.
    fn run_once(
        &self,
        session: &Session,
        commands: &[Vec<String>],
        management: Option<(&HostSurvey, &ManageConfig)>,
        state_dir: &Path,
    ) -> anyhow::Result<RunOutcome> {
        let (stop, is_over) = (session.interrupt_flag(), Arc::new(AtomicBool::new(false)));
        let progress_path = state_dir.join("progress");
        let deadline = self.timeout.map(Duration::from_secs_f64);
        // Programs wait until cachemate has started, because its start-up time must not affect the comparison.
        let programs = ProgramGroup::start(
            commands,
            &progress_path,
            deadline,
            stop.clone(),
            is_over.clone(),
        )?;
        let (mut decisions, mut refused): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
        let mut missing_evidence: Vec<String> = Vec::new();
        let mut dry_run = self.dry_run.then(|| DryRun::new(&self.policy));
        if let Some((host, config)) = management {
            let pid_rule = |&pid| ManageRule {
                pid: Some(pid),
                action: ManageAction::Manage(None),
                ..ManageRule::default()
            };
            let options = LiveRunOptions {
                config: config.clone(),
                rules: programs.pids.iter().map(pid_rule).collect(),
                state_dir: state_dir.to_path_buf(),
                progress: ProgressReports::in_dir(progress_path),
                learned_profiles: Default::default(),
                runtime: None,
                stop: is_over,
                wake: Arc::default(),
            };
            let host::LiveRun {
                control_loop: mut live,
                header,
                missing_evidence: missing,
            } = host::build_live_run(host, &options)?;
            programs.release();
            missing_evidence = missing.iter().map(ToString::to_string).collect();
            let mut builder = SnapshotBuilder::new(&header);
            let mut refused_plan: Option<String> = None;
            let mut last_refused = Vec::new();
            let loop_result = loop {
                match live.step() {
                    Ok(Some(record)) => {
                        let host = live.machine.host_report();
                        if let Some(dry_run) = &mut dry_run {
                            dry_run.observe(&record, &host.planned_changes);
                        }
                        let snapshot =
                            builder.build_snapshot(&record, live.profiles(), Some(&host));
                        for decision in snapshot.new_decisions {
                            decisions.insert(0, decision.reason);
                        }
                        decisions.truncate(MAX_DECISIONS);
                        (refused_plan, last_refused) = (None, snapshot.refused);
                    }
                    Ok(None) => break Ok(()),
                    Err(ControlLoopError::Plan { bad, window, .. }) => {
                        let refusal = format!("the policy's plan: {bad}");
                        if refused_plan.as_ref() != Some(&refusal) {
                            session.warn(&format!(
                                "the plan of window {window} is refused, and the previous one stays in force: {bad}"
                            ));
                        }
                        refused_plan = Some(refusal);
                    }
                    Err(error) => break Err(error),
                }
            };
            // Restore the host first, because an error must not prevent it.
            let restored_objects = live.machine.restore_all()?;
            loop_result?;
            report_failures(&restored_objects, &|message| session.warn(message))?;
            refused = refused_plan.into_iter().chain(last_refused).collect();
        }
        programs.release();
        let exits = programs.into_exits();
        if stop.load(Ordering::Relaxed) {
            return Err(InterruptedError(
                "the programs were killed and the host was restored".into(),
            )
            .into());
        }
        Ok(RunOutcome {
            exits,
            decisions,
            refused,
            missing_evidence,
            dry_run,
        })
    }

    fn render(&self, result: &RunJson) -> String {
        let mode = if self.observe_only {
            "observed"
        } else {
            "managed"
        };
        let mut table = Table::from_header(&format!(
            "program | by | > {mode} | quartiles | > unmanaged | quartiles | > speed ratio"
        ));
        let number_or_dash = |value: Option<f64>| value_or_dash(value.map(format_number));
        let spread_text = |spread: Option<(f64, f64)>| {
            let range_text =
                |(low, high)| format!("{}..{}", format_number(low), format_number(high));
            value_or_dash(spread.map(range_text))
        };
        for program in &result.programs {
            table.add_row([
                program.command.chars().take(40).collect(),
                program.compared_by.replace('_', " "),
                number_or_dash(program.managed_median),
                spread_text(program.managed_spread),
                number_or_dash(program.unmanaged_median),
                spread_text(program.unmanaged_spread),
                match (
                    program
                        .managed
                        .iter()
                        .chain(&program.unmanaged)
                        .any(|exit| exit.timed_out),
                    program.speed_ratio,
                ) {
                    (true, None) => "timed out".to_string(),
                    _ if program.too_short_to_compare => "too short".to_string(),
                    (_, ratio) => value_or_dash(ratio.map(|ratio| format!("{ratio:.2}"))),
                },
            ]);
        }
        if let Some(dry_run) = &result.dry_run {
            return dry_run.render();
        }
        let mode_text = if self.observe_only {
            ", only observing"
        } else {
            ""
        };
        let mut text = format!("policy {}{mode_text}\n{}", result.policy, table.text());
        match self.compare {
            None => text.push_str("--compare N also runs them unmanaged\n"),
            Some(1) => {
                text.push_str("one run of each kind: a ratio may be noise, of which --compare 5 shows the spread\n")
            }
            Some(_) => {}
        }
        if result.decisions.is_empty() {
            text.push_str("the policy decided nothing\n");
        }
        if result
            .programs
            .iter()
            .any(|program| program.too_short_to_compare)
        {
            let (windows, seconds) = (
                MIN_COMPARED_WINDOWS,
                format_number(self.min_compared_seconds()),
            );
            text.push_str(&format!(
            "'too short': a comparison needs runs of at least {windows} windows ({seconds} s), because the first have no evidence\n"
        ));
        }
        result
            .missing_evidence
            .iter()
            .for_each(|missing| text.push_str(&format!("{missing}\n")));
        result
            .decisions
            .iter()
            .take(8)
            .for_each(|reason| text.push_str(&format!("decided: {reason}\n")));
        result
            .refused
            .iter()
            .take(5)
            .for_each(|refusal| text.push_str(&format!("refused: {refusal}\n")));
        text
    }
}

/// State directory of this run, which is removed at the end unless a journal remains in it.
struct RunStateDir(PathBuf, #[allow(dead_code)] DaemonLock);

impl RunStateDir {
    fn new() -> anyhow::Result<Self> {
        let path = paths::state_dir().join(format!("run-{}", std::process::id()));
        paths::create_private_dir(&path)?;
        let Some(lock) = DaemonLock::acquire(&path)? else {
            bail!("{}: another process holds the lock", path.display())
        };
        Ok(RunStateDir(path, lock))
    }
}

impl Drop for RunStateDir {
    fn drop(&mut self) {
        // A remaining journal lists objects that could not be restored; `cachemate restore` needs it.
        if !cachemate_files::path_exists(
            &self
                .0
                .join(cachemate_linux::safety::journal::Journal::FILE_NAME),
        ) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

fn check_exits(programs: &[ProgramJson]) -> anyhow::Result<()> {
    let describe_failure = |program: &ProgramJson| {
        program
            .managed
            .iter()
            .chain(&program.unmanaged)
            .find_map(|exit| match (exit.code, exit.signal) {
                (Some(code), _) if code != 0 => {
                    Some(format!("'{}' (exit {code})", program.command))
                }
                (_, Some(signal)) => Some(format!("'{}' (signal {signal})", program.command)),
                _ if exit.timed_out && exit.work.is_none() => {
                    let seconds = format_number(exit.seconds);
                    Some(format!(
                        "'{}' (still running at the timeout, killed after {seconds} s)",
                        program.command
                    ))
                }
                _ => None,
            })
    };
    let failures: Vec<String> = programs.iter().filter_map(describe_failure).collect();
    if !failures.is_empty() {
        bail!("a program failed: {}", failures.join(", "));
    }
    Ok(())
}

fn compare_program(
    command: String,
    managed: Vec<ProgramExit>,
    unmanaged: Vec<ProgramExit>,
    min_compared_seconds: f64,
) -> ProgramJson {
    let min_seconds = managed
        .iter()
        .chain(&unmanaged)
        .map(|exit| exit.seconds)
        .fold(f64::INFINITY, f64::min);
    let too_short_to_compare = !unmanaged.is_empty() && min_seconds < min_compared_seconds;
    let compares_work = managed
        .iter()
        .chain(&unmanaged)
        .all(|exit| exit.work.is_some());
    let figure_of = |exit: &ProgramExit| match exit.work {
        Some(work) if compares_work => work as f64 / exit.seconds,
        _ => exit.seconds,
    };
    let managed_figures: Vec<f64> = managed.iter().map(figure_of).collect();
    let unmanaged_figures: Vec<f64> = unmanaged.iter().map(figure_of).collect();
    let quartiles = |figures: &[f64]| quantile(figures, 0.25).zip(quantile(figures, 0.75));
    let managed_median = median(&managed_figures);
    let unmanaged_median = median(&unmanaged_figures);
    let has_all_figures =
        compares_work || !managed.iter().chain(&unmanaged).any(|exit| exit.timed_out);
    let is_comparable = !too_short_to_compare && has_all_figures;
    let ratio = managed_median
        .zip(unmanaged_median)
        .filter(|(a, b)| *a > 0.0 && *b > 0.0 && is_comparable);
    ProgramJson {
        command,
        compared_by: if compares_work {
            "work_per_second"
        } else {
            "seconds"
        },
        speed_ratio: ratio.map(|(managed_figure, unmanaged_figure)| {
            if compares_work {
                managed_figure / unmanaged_figure
            } else {
                unmanaged_figure / managed_figure
            }
        }),
        managed_median,
        managed_spread: quartiles(&managed_figures),
        unmanaged_median,
        unmanaged_spread: quartiles(&unmanaged_figures),
        too_short_to_compare,
        managed,
        unmanaged,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn successful_exit(seconds: f64, work: Option<u64>) -> ProgramExit {
        ProgramExit {
            seconds,
            work,
            code: Some(0),
            signal: None,
            timed_out: false,
        }
    }

    /// Is the ratio one of speeds, whether programs report work or not, and missing without a comparison?
    #[test]
    fn ratios_compare_speeds_and_are_missing_without_a_comparison() {
        let by_time = compare_program(
            "x".into(),
            vec![successful_exit(1.0, None)],
            vec![successful_exit(2.0, None)],
            1.0,
        );
        assert_eq!(
            (by_time.speed_ratio, by_time.compared_by),
            (Some(2.0), "seconds")
        );
        let by_work = compare_program(
            "x".into(),
            vec![successful_exit(2.0, Some(60))],
            vec![successful_exit(1.0, Some(10))],
            1.0,
        );
        assert_eq!(
            (by_work.speed_ratio, by_work.compared_by),
            (Some(3.0), "work_per_second")
        );
        assert_eq!(
            compare_program(
                "x".into(),
                vec![successful_exit(1.0, None)],
                Vec::new(),
                1.0
            )
            .speed_ratio,
            None
        );
        let short = compare_program(
            "x".into(),
            vec![successful_exit(1.0, None)],
            vec![successful_exit(2.0, None)],
            1.5,
        );
        assert_eq!(
            (short.speed_ratio, short.too_short_to_compare),
            (None, true)
        );
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.75), Some(3.0));
    }

    /// Does a program killed at the timeout fail and have no ratio, unless it reports work?
    #[test]
    fn a_killed_program_has_no_run_time() {
        let killed = |work| ProgramExit {
            code: None,
            timed_out: true,
            ..successful_exit(3.0, work)
        };
        let program = compare_program(
            "sleep 30".into(),
            vec![killed(None)],
            vec![successful_exit(2.0, None)],
            1.0,
        );
        assert_eq!(program.speed_ratio, None);
        let message = check_exits(&[program]).unwrap_err().to_string();
        assert_eq!(
            message,
            "a program failed: 'sleep 30' (still running at the timeout, killed after 3 s)"
        );
        let program = compare_program(
            "server".into(),
            vec![killed(Some(60))],
            vec![killed(Some(30))],
            1.0,
        );
        assert_eq!(program.speed_ratio, Some(2.0));
        check_exits(&[program]).unwrap();
    }
}
