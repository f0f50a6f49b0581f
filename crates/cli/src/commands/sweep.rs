//! `cachemate sweep`: runs many scenarios or curves as tasks on any number of machines.

use std::path::PathBuf;

use anyhow::ensure;
use cachemate_report::Table;
use cachemate_report::text::{escape_controls, format_count};
use cachemate_sweep::{MergeSummary, Store, SweepReport, SweepStatus};
use clap::{Args, Subcommand};

use super::sweep_run::SweepRunArgs;
use crate::args::JsonArg;
use crate::engine_args::duration_text;
use crate::files::prepare_output_dir;
use crate::session::Session;

/// Run many scenarios or curves as tasks, on this machine or on a cluster's engine (docs/sweeps.md)
#[derive(Args)]
pub struct SweepArgs {
    #[command(subcommand)]
    command: SweepCommand,
}

#[derive(Subcommand)]
enum SweepCommand {
    Run(Box<SweepRunArgs>),
    Status(SweepStatusArgs),
    Merge(SweepMergeArgs),
    Report(SweepReportArgs),
}

/// Show the progress of a sweep
#[derive(Args)]
pub struct SweepStatusArgs {
    /// Directory of the sweep
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    json: JsonArg,
}

/// Merge all results into one file in the order of the manifest, and report missing or conflicting results
#[derive(Args)]
pub struct SweepMergeArgs {
    /// Directories of the sweep; several if its shards ran on machines without a common disk
    #[arg(value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
    /// File to write [default: merged.jsonl in the first directory]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Exit with 0 even if results are missing
    #[arg(long)]
    allow_incomplete: bool,
    #[command(flatten)]
    json: JsonArg,
}

/// Write tables, figures and an index page for the results of a sweep
#[derive(Args)]
pub struct SweepReportArgs {
    /// Directory of the sweep
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Write index.html, the figures (SVG) and report.json to this directory
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Write to DIR even if it is not empty
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    json: JsonArg,
}

impl SweepArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match &self.command {
            SweepCommand::Run(run) => run.run(session),
            SweepCommand::Status(status) => status.run(session),
            SweepCommand::Merge(merge) => merge.run(session),
            SweepCommand::Report(report) => report.run(session),
        }
    }
}

impl SweepStatusArgs {
    fn run(&self, session: &Session) -> anyhow::Result<()> {
        let status = cachemate_sweep::read_status(&Store::open_to_read(&self.dir)?)?;
        session.print_result(self.json.json, &status, || render(&status))
    }
}

fn render(status: &SweepStatus) -> String {
    let format_count = |count: usize| format_count(count as u64);
    let mut text = format!(
        "{}: {} of {} tasks finished",
        escape_controls(&status.name),
        format_count(status.finished),
        format_count(status.total)
    );
    let other_counts = [
        (status.running, "running"),
        (status.failed, "failed"),
        (status.waiting, "waiting"),
    ];
    for (task_count, label) in other_counts
        .iter()
        .filter(|(task_count, _)| *task_count > 0)
    {
        text.push_str(&format!(", {} {label}", format_count(*task_count)));
    }
    match status.remaining_s {
        Some(remaining) => text.push_str(&format!("; about {} left\n", duration_text(remaining))),
        None if status.running > 0 => {
            text.push_str("; too few are finished to estimate the remaining time\n")
        }
        None if status.waiting > 0 => text.push_str("; no worker is active\n"),
        None => text.push('\n'),
    }
    if status.orphaned > 0 {
        let orphaned = format_count(status.orphaned);
        text.push_str(&format!(
            "{orphaned} results belong to no task: they are from another version or an older sweep file\n"
        ));
    }
    for name in &status.conflicting {
        text.push_str(&format!(
            "two workers have conflicting results: differing/{}\n",
            escape_controls(name)
        ));
    }
    if !status.failures.is_empty() {
        let mut table = Table::from_header("failed | > attempts | error | point");
        for failure in &status.failures {
            let (id, point) = (failure.id.clone(), failure.point.to_string());
            table.add_row([
                id,
                failure.attempts.to_string(),
                failure.error.clone(),
                point,
            ]);
        }
        text.push_str(&format!("\n{}", table.text()));
    }
    text
}

impl SweepMergeArgs {
    fn run(&self, session: &Session) -> anyhow::Result<()> {
        let stores = self
            .dirs
            .iter()
            .map(|dir| Store::open_to_read(dir))
            .collect::<Result<Vec<_>, _>>()?;
        let output = self
            .output
            .clone()
            .unwrap_or_else(|| stores[0].path().join("merged.jsonl"));
        let summary = cachemate_sweep::merge(&stores, &output)?;
        session.print_result(self.json.json, &summary, || {
            render_merge(&summary, &output.display().to_string())
        })?;
        let is_sound = summary.conflicting.is_empty() && summary.damaged.is_empty();
        ensure!(
            is_sound,
            "{} results conflict, {} are damaged",
            summary.conflicting.len(),
            summary.damaged.len()
        );
        ensure!(
            summary.is_complete() || self.allow_incomplete,
            "{} tasks have no result",
            summary.missing.len()
        );
        Ok(())
    }
}

fn render_merge(summary: &MergeSummary, output: &str) -> String {
    let mut text = format!("{output}: {} of {} results", summary.merged, summary.total);
    if summary.duplicates > 0 {
        text.push_str(&format!(
            ", {} of them duplicates with identical bytes",
            summary.duplicates
        ));
    }
    text.push('\n');
    let problem_lists = [
        ("no result", &summary.missing),
        ("conflicting", &summary.conflicting),
        ("damaged", &summary.damaged),
    ];
    for (label, names) in problem_lists {
        names
            .iter()
            .take(20)
            .for_each(|name| text.push_str(&format!("{label}: {}\n", escape_controls(name))));
        if names.len() > 20 {
            text.push_str(&format!("{label}: {} more\n", names.len() - 20));
        }
    }
    text
}

impl SweepReportArgs {
    fn run(&self, session: &Session) -> anyhow::Result<()> {
        if let Some(dir) = &self.output {
            prepare_output_dir(dir, self.force)?;
        }
        let report = cachemate_sweep::collect_report(&Store::open_to_read(&self.dir)?)?;
        if let Some(dir) = &self.output {
            write_report(dir, &report)?;
            session.note(&format!("wrote {}", dir.join("index.html").display()));
        }
        session.print_result(self.json.json, &report, || report.text())
    }
}

fn write_report(dir: &std::path::Path, report: &SweepReport) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(report)?;
    let pages = [
        ("index.html".to_string(), report.html()),
        ("report.json".to_string(), json),
    ];
    let pictures = report
        .pictures
        .iter()
        .map(|picture| (format!("{}.svg", picture.name), picture.svg.clone()));
    pages
        .into_iter()
        .chain(pictures)
        .try_for_each(|(name, text)| {
            crate::files::write_file(&dir.join(name), text.as_bytes(), true)
        })
}
