//! `cachemate report`: writes programs, prediction and plan as one HTML file.

use cachemate_report::text::{format_count, format_size};
use cachemate_report::{PlanResult, StudyPage};
use cachemate_study::{burst_reach_bytes, plan_result};
use clap::Args;

use crate::args::OutputArgs;
use crate::complete::prediction::{Prediction, PredictionArgs, SlowdownModel};
use crate::files::{check_output_path, write_file};
use crate::session::Session;

/// Write an HTML report: curves, classes, mutual slowdowns, and the plan with its reasons
///
/// The page is one file that loads nothing. A program is a profile file, a recording, or the name of a bundled
/// recording.
#[derive(Args)]
pub struct ReportArgs {
    #[command(flatten)]
    inputs: PredictionArgs,
    /// Title of the page
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "Which programs should share a cache"
    )]
    title: String,
    #[command(flatten)]
    output: OutputArgs,
}

impl ReportArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        check_output_path(&self.output.output, self.output.force)?;
        let prediction = self.inputs.predict(session)?;
        let placement = prediction.place(None, 0)?;
        let plan = plan_result(
            &placement,
            &prediction.machine.name,
            prediction.model.name(),
            prediction.costs.kind,
        );
        let page = StudyPage {
            title: self.title.clone(),
            lead: lead_text(&prediction, &plan),
            machine: prediction.machine.name.clone(),
            cache: prediction.cache_summary(),
            programs: prediction
                .programs
                .iter()
                .map(|program| program.summary())
                .collect(),
            curves: prediction
                .programs
                .iter()
                .map(|program| program.curve())
                .collect(),
            matrix: prediction.matrix(),
            method: method_rows(&prediction, &plan),
            plan: Some(plan),
        };
        write_file(
            &self.output.output,
            page.html().as_bytes(),
            self.output.force,
        )?;
        session.print(&format!("wrote {}\n", self.output.output.display()))
    }
}

fn lead_text(prediction: &Prediction, plan: &PlanResult) -> String {
    let machine_sentence = format!(
        "{} programs on {} ({}).",
        prediction.programs.len(),
        prediction.machine.name,
        prediction.machine.description
    );
    let expected = &plan.expected;
    match (
        plan.unit.as_str(),
        expected.plan,
        expected.random,
        expected.worst,
    ) {
        ("percent", Some(planned), Some(random), Some(worst)) => format!(
            "{machine_sentence} With the plan below, their {} is {planned:.1} %; with a random placement {random:.1} %, with the worst \
             {worst:.1} %.",
            plan.measure()
        ),
        _ => machine_sentence,
    }
}

fn method_rows(prediction: &Prediction, plan: &PlanResult) -> Vec<(String, String)> {
    let labeled_row = |label: &str, text: String| (label.to_string(), text);
    let mut rows = Vec::new();
    let filters = prediction
        .programs
        .iter()
        .map(|program| program.file.source.filter);
    let filters: Vec<_> = filters.collect();
    let record_counts: Vec<u64> = prediction
        .programs
        .iter()
        .filter_map(|program| program.file.records)
        .collect();
    let access_counts: Vec<u64> = prediction
        .programs
        .iter()
        .filter_map(|program| program.file.accesses)
        .collect();
    let filter_text = match filters
        .first()
        .copied()
        .flatten()
        .filter(|first| filters.iter().all(|f| *f == Some(*first)))
    {
        Some(l1) => format!(
            "misses of a {} {}-way L1",
            format_size(l1.size_bytes),
            l1.ways
        ),
        None => "the accesses in the recordings".to_string(),
    };
    rows.push(labeled_row(
        "recorded",
        format!(
            "data accesses of every program, each run alone: {} in all, of which {} reached the shared cache ({filter_text})",
            format_count(access_counts.iter().sum()),
            format_count(record_counts.iter().sum())
        ),
    ));
    let has_bursts = prediction
        .programs
        .iter()
        .any(|program| burst_reach_bytes(&program.file).is_some());
    let method = if has_bursts {
        "LRU stack distances, estimated for recordings in bursts"
    } else {
        "exact LRU stack distances"
    };
    rows.push(labeled_row(
        "curves",
        format!("{method}, per thousand recorded instructions"),
    ));
    rows.push(labeled_row(
        "classes",
        "animal classes by LRU positions on the shared cache: accesses, misses, hits lost with half of the ways"
            .to_string(),
    ));
    rows.push(labeled_row(
        "slowdowns",
        format!(
            "model {}: predicted from each program alone, with 90 % intervals where the model has them; no programs were \
             run together",
            prediction.model.name()
        ),
    ));
    let criterion = match plan.covers_machine {
        true => {
            "least mean slowdown of all programs at once on the whole machine, whose caches share memory bandwidth"
        }
        false => "least total of the slowdowns of all pairs on a cache",
    };
    rows.push(labeled_row("plan", criterion.to_string()));
    let omissions = match prediction.model {
        SlowdownModel::Interval { .. } => {
            "instruction fetches that were not recorded, and conflict misses"
        }
        SlowdownModel::Scheme(_) => {
            "instruction fetches, prefetching and queueing for memory; slowdowns by scarce bandwidth are additional"
        }
    };
    rows.push(labeled_row("not included", omissions.to_string()));
    rows
}
