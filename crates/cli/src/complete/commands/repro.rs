//! `cachemate repro`: reproduces the papers' results, selected by their ids, on the simulator.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use cachemate_report::Table;
use cachemate_report::text::format_count_of;
use cachemate_repro::{
    Experiment, ExperimentContext, Finding, Findings, ReproError, ResultVerdict, index_html,
};
use clap::{Args, Subcommand};
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::attribute::AttributeArgs;
use crate::complete::repro_run::{CostMeter, FormArgs, ReproPlan, ReproRun, processor_hours};
use crate::complete::repro_store::ReproStore;
use crate::complete::run_store::{RunStoreArgs, source_version};
use crate::complete::shards::{Shard, ShardArg, print_shard};
use crate::exit::{InterruptedError, UsageError};
use crate::files::prepare_output_dir;
use crate::session::Session;

/// Reproduce the papers' results on the simulator, by their ids (docs/repro.md)
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Repro {
    #[command(subcommand)]
    action: Option<ReproAction>,
    #[command(flatten)]
    form: FormArgs,
    /// Number of seeds, instead of three (one with --quick or --sample)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: Option<u64>,
    /// Write figures (SVG), results.json and an index.html there
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Overwrite files in DIR
    #[arg(long)]
    force: bool,
    /// List what can be reproduced
    #[arg(long, conflicts_with = "json")]
    list: bool,
    /// Machine for AUTO (default: three machines)
    #[arg(long, value_name = "MACHINE")]
    machine: Option<String>,
    /// Number of mixes in each family of AUTO
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    mixes: Option<u32>,
    #[command(flatten)]
    shard: ShardArg,
    #[command(flatten)]
    runs: RunStoreArgs,
}

#[derive(Subcommand)]
enum ReproAction {
    Plan(ReproPlan),
    Run(ReproRun),
    Store(ReproStore),
    Attribute(AttributeArgs),
}

impl Repro {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match &self.action {
            Some(ReproAction::Plan(plan)) => return plan.run(session),
            Some(ReproAction::Run(run)) => return run.run(session),
            Some(ReproAction::Store(store)) => return store.run(session),
            Some(ReproAction::Attribute(attribute)) => return attribute.run(session),
            None => {}
        }
        if self.list {
            return session.print(&render_list());
        }
        if self.form.ids.is_empty() {
            let problem =
                "ID: found none, expected result ids such as CASC-1, or all; --list shows them";
            return Err(UsageError(problem.to_string()).into());
        }
        self.runs.start()?;
        let experiments = self.form.experiments()?;
        if let Some(dir) = self.output.as_deref() {
            prepare_output_dir(dir, self.force)?;
        }
        self.print_cost(session, &experiments);
        if let Some(shard) = self.shard.shard {
            return self.run_shard(session, &experiments, shard);
        }
        let (findings, failures, interrupted) = self.run_all(session, &experiments)?;
        self.runs.report_reuse(session);
        let report = self.build_report(if self.form.sample {
            findings.without_targets()
        } else {
            findings
        })?;
        if let Some(dir) = self.output.as_deref() {
            write_results(dir, &report)?;
            session.note(&format!("wrote {}", dir.join("index.html").display()));
        }
        session.print_result(self.form.json.json, &report, || render(&report.findings))?;
        if interrupted {
            let note = format!(
                "{} results were measured before that",
                report.findings.results.len()
            );
            return Err(InterruptedError(note).into());
        }
        anyhow::ensure!(
            failures.is_empty(),
            "experiments failed: {}",
            failures.join("; ")
        );
        Ok(())
    }

    fn seed_count(&self) -> usize {
        let default_count = if self.form.is_short() { 1 } else { 3 };
        self.seeds.unwrap_or(default_count) as usize
    }

    fn build_report(&self, findings: Findings) -> anyhow::Result<ReproJson> {
        let date = OffsetDateTime::now_utc()
            .replace_nanosecond(0)?
            .format(&Rfc3339)?;
        Ok(ReproJson {
            command: self.command_line(),
            version: source_version(),
            date,
            quick: self.form.is_short(),
            sample: self.form.sample,
            findings,
        })
    }

    fn print_cost(&self, session: &Session, experiments: &[Experiment]) {
        if self.form.is_short() {
            return;
        }
        let count = self.seed_count();
        let (hours, seeds) = (
            processor_hours(experiments, count),
            format_count_of(count as u64, "seed"),
        );
        session.note(&format!(
            "about {hours:.1} processor hours for {seeds}; --quick shows less in a fraction of it"
        ));
    }

    /// Runs the experiments of a shard, each with one seed at a time, and stores their runs. What an experiment with
    /// all seeds needs is then stored, whichever shard made it.
    fn run_shard(
        &self,
        session: &Session,
        experiments: &[Experiment],
        shard: Shard,
    ) -> anyhow::Result<()> {
        let seeds = self.form.seed..self.form.seed.saturating_add(self.seed_count() as u64);
        let units = experiments
            .iter()
            .flat_map(|experiment| seeds.clone().map(move |seed| (experiment, seed)));
        let owned = self.shard.select(units);

        let stop = session.interrupt_flag();
        let bar = session.progress_bar("repro", Some(owned.len() as u64));
        let mut failures = Vec::new();
        for (experiment, seed) in &owned {
            let ids = experiment.ids.join(", ");
            let report_stage =
                |stage: &str| bar.set_message(format!("{ids}, seed {seed}: {stage}"));
            let mut context = self.build_context(&stop, &report_stage);
            context.seeds = vec![*seed];
            match (experiment.run)(&context) {
                Ok(_) => {}
                Err(ReproError::Interrupted) => {
                    let note = format!("the runs before {ids}, seed {seed}, are stored");
                    return Err(InterruptedError(note).into());
                }
                Err(error) => failures.push(format!("{ids}, seed {seed}: {error}")),
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        print_shard(session, self.form.json.json, shard, owned.len(), failures)
    }

    fn build_context<'a>(
        &'a self,
        stop: &'a AtomicBool,
        progress: &'a (dyn Fn(&str) + Sync),
    ) -> ExperimentContext<'a> {
        ExperimentContext {
            mixes: self.mixes,
            machine: self.machine.as_deref(),
            ..self.form.build_context(self.seed_count(), stop, progress)
        }
    }

    /// Findings, failures with their reasons, and whether the user stopped the command. A failed experiment does not
    /// affect others: its ids are missing, with the reason, and the command exits with 1.
    fn run_all(
        &self,
        session: &Session,
        experiments: &[Experiment],
    ) -> anyhow::Result<(Findings, Vec<String>, bool)> {
        let stop = session.interrupt_flag();
        let bar = session.progress_bar("repro", Some(experiments.len() as u64));
        let mut findings = Findings {
            results: Vec::new(),
        };
        let mut failures = Vec::new();
        for experiment in experiments {
            bar.set_message(experiment.ids.join(", "));
            let report_stage =
                |stage: &str| bar.set_message(format!("{}: {stage}", experiment.ids.join(", ")));
            let context = self.build_context(&stop, &report_stage);
            let meter = CostMeter::start();
            match (experiment.run)(&context) {
                Ok(mut new_findings) => {
                    meter.finish(experiment, self.form.form(), context.seeds.len());
                    findings.results.append(&mut new_findings);
                }
                Err(ReproError::Interrupted) => return Ok((findings, failures, true)),
                Err(error) => {
                    failures.push(format!("{}: {error}", experiment.ids.join(", ")));
                    let failed_finding = |id: &&str| {
                        Finding::from_failure(
                            id,
                            experiment.title,
                            &context.seeds,
                            &error.to_string(),
                        )
                    };
                    findings
                        .results
                        .extend(experiment.ids.iter().map(failed_finding));
                }
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok((findings, failures, stop.load(Ordering::Relaxed)))
    }

    fn command_line(&self) -> String {
        let form_option = match self.form.form() {
            "full" => String::new(),
            form => format!(" --{form}"),
        };
        let seeds_option = self
            .seeds
            .map(|seeds| format!(" --seeds {seeds}"))
            .unwrap_or_default();
        format!(
            "cachemate repro {}{form_option} --seed {}{seeds_option}",
            self.form.ids.join(" "),
            self.form.seed
        )
    }
}

fn render_list() -> String {
    let mut table = Table::with_columns("ids | result", "full run, minutes");
    for experiment in cachemate_repro::experiments() {
        table.add_row([
            experiment.ids.join(", "),
            experiment.title.to_string(),
            format!("{:.1}", experiment.full_minutes),
        ]);
    }
    table.text()
}

fn render(findings: &Findings) -> String {
    let mut table = Table::from_header("id | result | paper | target | > measured | ");
    for finding in &findings.results {
        let verdict = match finding.verdict {
            Some(ResultVerdict::Missed) => "MISSED",
            Some(verdict) => verdict.name(),
            None => "",
        };
        let cells = [
            &finding.id,
            &finding.title,
            &finding.paper,
            &finding.target.describe(),
            &format_value(finding),
        ];
        table.add_row(cells.into_iter().cloned().chain([verdict.to_string()]));
    }
    let notes: Vec<String> = findings
        .results
        .iter()
        .filter(|finding| !finding.note.is_empty())
        .map(|finding| format!("{}: {}\n", finding.id, finding.note))
        .collect();
    format!("{}\n{}", table.text(), notes.concat())
}

fn format_value(finding: &Finding) -> String {
    let number_text = |value: f64| cachemate_report::text::format_number(value);
    match (finding.measured, finding.spread) {
        (None, _) => "–".to_string(),
        (Some(value), None) => format!("{} {}", number_text(value), finding.unit),
        (Some(value), Some(spread)) => format!(
            "{} ± {} {}",
            number_text(value),
            number_text(spread),
            finding.unit
        ),
    }
}

/// Findings with version and date, as --json prints them.
#[derive(Serialize)]
struct ReproJson {
    command: String,
    version: String,
    /// Date and time in UTC, to the second.
    date: String,
    quick: bool,
    sample: bool,
    #[serde(flatten)]
    findings: Findings,
}

fn write_results(dir: &Path, report: &ReproJson) -> anyhow::Result<()> {
    let write_file = |name: &str, text: &str| {
        let path = dir.join(name);
        cachemate_files::replace(&path, text.as_bytes())
            .with_context(|| format!("{}: cannot write", path.display()))
    };
    let findings = &report.findings;
    for figure in findings.results.iter().flat_map(|finding| &finding.figures) {
        write_file(&format!("{}.svg", figure.name), &figure.svg)?;
    }
    let json = serde_json::to_string_pretty(report).context("cannot write the results as JSON")?;
    write_file("results.json", &json)?;
    write_file("index.html", &index_html(findings, &report.command))
}
