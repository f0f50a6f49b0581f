//! `cachemate predict`: slowdowns of programs that share a cache.

use cachemate_report::terminal::{Paint, matrix_picture, sparkline};
use cachemate_report::text::{number, or_dash, percent_text, size_text};
use cachemate_report::{Align, GroupForecast, PredictResult, ProgramSummary, Table};
use cachemate_study::{USUAL_SCHEME, matrix_of};
use clap::Args;

use crate::args::JsonArg;
use crate::prediction::{MachineArg, Prediction};
use crate::session::Session;

/// Predict how much programs slow each other down on a shared cache
///
/// A program is a profile file, a recording, or the name of a bundled recording.
#[derive(Args)]
pub struct Predict {
    /// Profile files, recordings, or names of bundled recordings
    #[arg(value_name = "PROGRAM", required = true)]
    programs: Vec<String>,
    #[command(flatten)]
    machine: MachineArg,
    /// Model that predicts slowdowns: statcc, sdc, pain, animal, miss-rate, access-rate, ...
    #[arg(long, value_name = "MODEL", default_value = USUAL_SCHEME)]
    model: String,
    #[command(flatten)]
    json: JsonArg,
}

impl Predict {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let prediction = Prediction::new(session, &self.programs, &self.machine.machine, &self.model)?;
        let result = PredictResult {
            machine: prediction.machine.name.clone(),
            cache: prediction.cache_summary(),
            programs: prediction.programs.iter().map(|program| program.summary()).collect(),
            matrix: matrix_of(&prediction.names(), &self.model, &prediction.costs),
            group: prediction.group()?,
        };
        session.answer(self.json.json, &result, || render(&result, &prediction, session.paint()))
    }
}

fn render(result: &PredictResult, prediction: &Prediction, paint: Paint) -> String {
    let cache = &result.cache;
    let mut text = format!(
        "{}: {} x {} of {}, {}-way, {} CPUs each\n\n",
        result.machine,
        cache.instances,
        cache.level,
        size_text(cache.size_bytes),
        cache.ways,
        cache.cpus_each
    );
    text.push_str(&class_table(&result.programs, prediction));
    text.push('\n');
    text.push_str(&matrix_picture(&result.matrix, paint));
    if let Some(group) = &result.group {
        text.push('\n');
        text.push_str(&group_table(group));
    }
    text
}

/// Classes, and each curve from 64K to 16M as a line of blocks with its own scale.
pub fn class_table(programs: &[ProgramSummary], prediction: &Prediction) -> String {
    let mut table = Table::new(&[
        ("program", Align::Left),
        ("class", Align::Left),
        ("MPKI 64K to 16M", Align::Left),
        ("at 64K", Align::Right),
        ("alone", Align::Right),
        ("on half", Align::Right),
        ("hits lost with half", Align::Right),
    ]);
    for (summary, program) in programs.iter().zip(&prediction.programs) {
        let curve = program.curve();
        let shown = curve.iter().filter(|point| (64 << 10..=16 << 20).contains(&point.bytes));
        let values: Vec<Option<f64>> = shown.map(|point| point.mpki).collect();
        let most = values.iter().flatten().fold(0.0, |most: f64, value| most.max(*value));
        table.row([
            summary.name.clone(),
            or_dash(summary.class.clone()),
            sparkline(&values, most),
            or_dash(values.first().copied().flatten().map(number)),
            or_dash(summary.solo_mpki.map(number)),
            or_dash(summary.half_cache_mpki.map(number)),
            or_dash(summary.lost_hits_share.map(|share| percent_text(share, 1))),
        ]);
    }
    table.text()
}

fn group_table(group: &GroupForecast) -> String {
    let ratio = group.miss_ratio.map(|ratio| format!(", miss ratio {}", percent_text(ratio, 2))).unwrap_or_default();
    let mut table = Table::new(&[
        ("program", Align::Left),
        ("miss ratio", Align::Right),
        ("MPKI alone", Align::Right),
        ("MPKI in the group", Align::Right),
        ("slowdown", Align::Right),
    ]);
    for member in &group.members {
        table.row([
            member.name.clone(),
            or_dash(member.miss_ratio.map(|ratio| percent_text(ratio, 2))),
            or_dash(member.solo_mpki.map(number)),
            or_dash(member.mpki.map(number)),
            or_dash(member.slowdown_percent.map(|percent| format!("{percent:.1} %"))),
        ]);
    }
    format!("all of them on one cache ({}){ratio}\n{}", group.method, table.text())
}
