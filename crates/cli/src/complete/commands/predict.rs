//! `cachemate predict`: predicts the slowdowns of programs that share a cache.

use cachemate_report::terminal::{TerminalStyle, matrix_picture, sparkline};
use cachemate_report::text::{
    format_fixed, format_number, format_percent, format_size, value_or_dash,
};
use cachemate_report::{Align, CostTable, GroupForecast, PredictResult, ProgramSummary, Table};
use cachemate_study::default_sizes;
use clap::Args;

use crate::args::JsonArg;
use crate::complete::prediction::{INTERVAL_MODEL, Prediction, PredictionArgs};
use crate::session::Session;

/// Predict how much programs slow each other down on a shared cache
///
/// A program is a profile file, a recording, or the name of a bundled recording.
#[derive(Args)]
pub struct Predict {
    #[command(flatten)]
    inputs: PredictionArgs,
    #[command(flatten)]
    json: JsonArg,
}

impl Predict {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let prediction = self.inputs.predict(session)?;
        let timing_bases = prediction.timing_bases();
        let result = PredictResult {
            machine: prediction.machine.name.clone(),
            cache: prediction.cache_summary(),
            programs: prediction
                .programs
                .iter()
                .map(|program| program.summary())
                .collect(),
            matrix: prediction.matrix(),
            timing: timing_bases.map(|bases| {
                bases
                    .iter()
                    .map(|basis| basis.describe().to_string())
                    .collect()
            }),
            group: prediction.forecast_all()?,
        };
        session.print_result(self.json.json, &result, || {
            render(&result, &prediction, session.terminal_style())
        })
    }
}

fn render(result: &PredictResult, prediction: &Prediction, style: TerminalStyle) -> String {
    let cache = &result.cache;
    let mut text = format!(
        "{}: {} x {} of {}, {}-way, {} CPUs each\n\n",
        result.machine,
        cache.instances,
        cache.level,
        format_size(cache.size_bytes),
        cache.ways,
        cache.cpus_each
    );
    text.push_str(&class_table(&result.programs, prediction));
    text.push('\n');
    text.push_str(&matrix_picture(&result.matrix, style));
    text.push_str(&interval_table(&result.matrix));
    text.push_str(&timing_lines(
        &result.matrix.names,
        result.timing.as_deref().unwrap_or_default(),
    ));
    if let Some(group) = &result.group {
        text.push('\n');
        text.push_str(&group_table(group));
    }
    text
}

/// A line for each source of timing, with the programs that have it; empty if the model uses none.
fn timing_lines(names: &[String], bases: &[String]) -> String {
    let mut names_by_basis: Vec<(&String, Vec<&str>)> = Vec::new();
    for (name, basis) in names.iter().zip(bases) {
        match names_by_basis.iter_mut().find(|(known, _)| *known == basis) {
            Some((_, names)) => names.push(name),
            None => names_by_basis.push((basis, vec![name])),
        }
    }
    names_by_basis
        .iter()
        .map(|(basis, names)| format!("{}: {basis}\n", names.join(", ")))
        .collect()
}

/// Formats the 90 % intervals of a matrix; empty if the model has none.
fn interval_table(matrix: &CostTable) -> String {
    let (Some(low), Some(high)) = (&matrix.low, &matrix.high) else {
        return String::new();
    };
    let mut columns = vec![("90 % intervals, %", Align::Left)];
    columns.extend(
        matrix
            .names
            .iter()
            .map(|name| (name.as_str(), Align::Right)),
    );
    let mut table = Table::new(&columns);
    for (row, name) in matrix.names.iter().enumerate() {
        let cell = |column: usize| match (low[row][column], high[row][column]) {
            (Some(low), Some(high)) => {
                format!("{} to {}", format_fixed(low, 0), format_fixed(high, 0))
            }
            _ => "-".to_string(),
        };
        table.add_row(
            std::iter::once(name.clone())
                .chain((0..matrix.names.len()).map(cell))
                .collect::<Vec<String>>(),
        );
    }
    format!("\n{}", table.text())
}

/// Formats the programs' classes, and each curve from 128K, the usual filter of recordings, to 16M as a line of blocks, of
/// which the highest is a full one.
pub fn class_table(programs: &[ProgramSummary], prediction: &Prediction) -> String {
    let mut table = Table::from_header(
        "program | class | MPKI 128K to 16M | > highest | > alone | > on half | > hits lost with half",
    );
    let mut shown_sizes = default_sizes();
    shown_sizes.retain(|bytes| (128 << 10..=16 << 20).contains(bytes));
    for (summary, program) in programs.iter().zip(&prediction.programs) {
        let curve = program.curve();
        let value_at = |bytes: &u64| curve.iter().find(|point| point.bytes == *bytes)?.mpki;
        let values: Vec<Option<f64>> = shown_sizes.iter().map(value_at).collect();
        let peak = values
            .iter()
            .flatten()
            .fold(0.0, |peak: f64, value| peak.max(*value));
        table.add_row([
            summary.name.clone(),
            value_or_dash(summary.class.clone()),
            sparkline(&values, peak),
            value_or_dash((peak > 0.0).then(|| format_number(peak))),
            value_or_dash(summary.solo_mpki.map(format_number)),
            value_or_dash(summary.half_cache_mpki.map(format_number)),
            value_or_dash(
                summary
                    .lost_hits_share
                    .map(|share| format_percent(share, 1)),
            ),
        ]);
    }
    table.text()
}

fn group_table(group: &GroupForecast) -> String {
    let ratio_text = group
        .miss_ratio
        .map(|ratio| format!(", miss ratio {}", format_percent(ratio, 2)))
        .unwrap_or_default();
    let mut table = Table::from_header(
        "program | > CPI alone | > miss ratio | > MPKI alone | > MPKI in the group | > slowdown",
    );
    for member in &group.members {
        let range = member
            .slowdown_interval
            .map_or(String::new(), |range| format!(" ({})", range.describe()));
        table.add_row([
            member.name.clone(),
            value_or_dash(
                member
                    .solo_cycles_per_instr
                    .map(|cycles| format_fixed(cycles, 2)),
            ),
            value_or_dash(member.miss_ratio.map(|ratio| format_percent(ratio, 2))),
            value_or_dash(member.solo_mpki.map(format_number)),
            value_or_dash(member.mpki.map(format_number)),
            value_or_dash(
                member
                    .slowdown_percent
                    .map(|percent| format!("{} %{range}", format_fixed(percent, 1))),
            ),
        ]);
    }
    // The table of classes shows the recording's curve.
    let note = match group.method == INTERVAL_MODEL {
        true => {
            "MPKI here are demand misses after the start, alone on the machine or in the group; those of the table above \
                 also count first touches and lines that prefetchers fetch\n"
        }
        false => "",
    };
    let (method, count) = (&group.method, group.members.len());
    format!(
        "all {count} on one cache, with a CPU for each ({method}){ratio_text}\n{}{note}",
        table.text()
    )
}
