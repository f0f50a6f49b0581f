//! A sweep's results as tables, pictures and a page. Points that differ only in their seed share one row, which has
//! statistics over the seeds.

use std::collections::BTreeMap;

use cachemate_report::figure::{
    Axis, BarChart, BarGroup, Chart, ChartBar, ChartPoint, Drawing, Series,
};
use cachemate_report::text::{escape_controls, format_number, value_or_dash};
use cachemate_report::{Align, Table, render_page, scroll_box};
use maud::{Markup, html};
use serde::Serialize;
use serde_json::Value;

use crate::SweepError;
use crate::job::JobResult;
use crate::manifest::{Manifest, ManifestHeader};
use crate::store::Store;

/// One row: a point of all axes except the seed.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ReportRow {
    /// Values in the order of [`SweepReport::axes`].
    pub point: Vec<String>,
    /// Number of seeds with a complete result.
    pub finished: usize,
    /// Number of seeds of the point.
    pub total: usize,
    /// Figures by name, with the unit last.
    pub figures: BTreeMap<String, FigureStats>,
    /// Points of the mean curve: size in bytes, and misses divided by accesses. Empty for kinds other than curves.
    pub curve: Vec<(u64, f64)>,
}

/// Statistics of a figure over the seeds that have it.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct FigureStats {
    /// Mean over the seeds; `None` if no seed has the figure.
    pub mean: Option<f64>,
    /// Smallest value over the seeds.
    pub low: Option<f64>,
    /// Largest value over the seeds.
    pub high: Option<f64>,
}

/// Rows and pictures of a sweep; `cachemate sweep report --json` prints them.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SweepReport {
    /// Name of the sweep.
    pub name: String,
    /// Purpose of the sweep; may be empty.
    pub description: String,
    /// Version of the program that made the results.
    pub version: String,
    /// Names of the axes without the seed.
    pub axes: Vec<String>,
    /// Lines of the manifest with a complete result.
    pub finished: usize,
    /// Lines of the manifest.
    pub total: usize,
    /// Incomplete results, one sentence each.
    pub damaged: Vec<String>,
    /// One row for each point without its seed, in the manifest's order.
    pub rows: Vec<ReportRow>,
    /// Drawings of the rows, written to files and shown on the page.
    #[serde(skip)]
    pub pictures: Vec<Picture>,
}

/// A drawing under its file name.
#[derive(Clone, PartialEq, Debug)]
pub struct Picture {
    /// Name of the file, without its extension.
    pub name: String,
    /// Title of the drawing.
    pub title: String,
    /// The complete SVG file, with its style.
    pub svg: String,
    /// The same without its style, for a page that includes it.
    pub inline: Drawing,
}

#[derive(Default)]
struct PointResults {
    total: usize,
    results: Vec<JobResult>,
}

/// Maximum number of groups in a picture.
const MAX_GROUPS: usize = 24;
const MAX_SERIES: usize = 12;

/// Collects the results that the store has so far; omits damaged ones, and lists them.
///
/// # Errors
/// The manifest cannot be read, or a result is invalid.
pub fn collect_report(store: &Store) -> Result<SweepReport, SweepError> {
    let Manifest { header, tasks } = store.manifest()?;
    let axes: Vec<String> = header
        .axes
        .iter()
        .filter(|axis| *axis != "seed")
        .cloned()
        .collect();
    let (mut point_order, mut results_by_point, mut damaged) = (
        Vec::new(),
        BTreeMap::<Vec<String>, PointResults>::new(),
        Vec::new(),
    );
    for task in &tasks {
        let values = task.values().map_err(SweepError::Refused)?;
        let point: Vec<String> = axes
            .iter()
            .map(|axis| values.get(axis).map_or(String::new(), format_value))
            .collect();
        if !results_by_point.contains_key(&point) {
            point_order.push(point.clone());
        }
        let point_results = results_by_point.entry(point).or_default();
        point_results.total += 1;
        match store.read(task.id) {
            Err(problem) => damaged.push(problem),
            Ok(None) => {}
            Ok(Some(stored)) => match serde_json::from_str::<JobResult>(stored.result.get()) {
                Ok(result) => point_results.results.push(JobResult {
                    detail: None,
                    ..result
                }),
                Err(error) => damaged.push(format!("task {}: {error}", task.id)),
            },
        }
    }
    let rows: Vec<ReportRow> = point_order
        .into_iter()
        .filter_map(|point| Some(build_row(results_by_point.remove(&point)?, point)))
        .collect();
    let finished = rows.iter().map(|row| row.finished).sum();
    let ManifestHeader {
        name,
        description,
        version,
        ..
    } = header;
    let pictures = draw_pictures(&axes, &rows);
    Ok(SweepReport {
        name,
        description,
        version,
        axes,
        finished,
        total: tasks.len(),
        damaged,
        rows,
        pictures,
    })
}

/// Formats a value for display.
fn format_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(fields) if fields.contains_key("name") => {
            let parameters = fields
                .get("parameters")
                .map_or(String::new(), Value::to_string);
            format!("{} {parameters}", format_value(&fields["name"]))
        }
        other => other.to_string(),
    }
}

fn build_row(point_results: PointResults, point: Vec<String>) -> ReportRow {
    let results = point_results.results;
    let names: std::collections::BTreeSet<&String> = results
        .iter()
        .flat_map(|result| result.figures.keys())
        .collect();
    let figures = names.into_iter().map(|name| {
        let values = results
            .iter()
            .filter_map(|result| *result.figures.get(name)?);
        (name.clone(), figure_stats(&values.collect::<Vec<f64>>()))
    });
    let figures = figures.collect();
    let mut points: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (bytes, ratio) in results.iter().flat_map(|result| &result.curve) {
        points.entry(*bytes).or_default().push(*ratio);
    }
    let mean_of = |values: &Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    let curve = points
        .iter()
        .map(|(bytes, ratios)| (*bytes, mean_of(ratios)))
        .collect();
    ReportRow {
        point,
        finished: results.len(),
        total: point_results.total,
        figures,
        curve,
    }
}

fn figure_stats(values: &[f64]) -> FigureStats {
    let if_present = |value: f64| (!values.is_empty()).then_some(value);
    FigureStats {
        mean: if_present(values.iter().sum::<f64>() / values.len() as f64),
        low: if_present(values.iter().copied().fold(f64::INFINITY, f64::min)),
        high: if_present(values.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
    }
}

/// The title of a figure such as `instr_per_cycle`.
fn figure_title(name: &str) -> String {
    name.replace('_', " ")
}

fn figure_names(rows: &[ReportRow]) -> Vec<String> {
    let names: std::collections::BTreeSet<&String> =
        rows.iter().flat_map(|row| row.figures.keys()).collect();
    names.into_iter().cloned().collect()
}

fn draw_pictures(axes: &[String], rows: &[ReportRow]) -> Vec<Picture> {
    let label_axes = find_label_axes(rows);
    let curve_rows: Vec<&ReportRow> = rows.iter().filter(|row| !row.curve.is_empty()).collect();
    let mut pictures: Vec<Picture> = curve_rows
        .chunks(MAX_SERIES)
        .enumerate()
        .map(|(index, rows)| curve_picture(index, rows, &label_axes))
        .collect();
    let bar_axis = axes
        .iter()
        .position(|axis| axis == "policy")
        .or_else(|| axes.len().checked_sub(1));
    let (Some(bar_axis), true) = (bar_axis, curve_rows.is_empty()) else {
        return pictures;
    };
    pictures.extend(
        figure_names(rows)
            .iter()
            .filter_map(|name| bars_picture(bar_axis, rows, name, &label_axes)),
    );
    pictures
}

/// Axes on which rows differ. Only these label the pictures, because labels with all axes would leave no room.
fn find_label_axes(rows: &[ReportRow]) -> Vec<usize> {
    let axes = rows.first().map_or(0, |row| row.point.len());
    let is_varying = |index: &usize| {
        rows.iter()
            .any(|row| row.point[*index] != rows[0].point[*index])
    };
    (0..axes).filter(is_varying).collect()
}

fn curve_picture(index: usize, rows: &[&ReportRow], label_axes: &[usize]) -> Picture {
    let series = rows.iter().map(|row| Series {
        name: label_axes
            .iter()
            .map(|&index| row.point[index].as_str())
            .collect::<Vec<_>>()
            .join(", "),
        points: row
            .curve
            .iter()
            .map(|&(bytes, ratio)| ChartPoint::new(bytes as f64, 100.0 * ratio))
            .collect(),
        ..Series::default()
    });
    let chart = Chart {
        title: "Miss-rate curves".to_string(),
        x: Axis::bytes("cache to itself"),
        y: Axis::linear("misses, % of accesses"),
        series: series.collect(),
        ..Chart::default()
    };
    Picture {
        name: format!("curves-{}", index + 1),
        title: chart.title.clone(),
        svg: chart.svg(),
        inline: chart.inline(),
    }
}

/// A bar chart with one bar for each value of axis `bar_axis`, grouped by the other axes.
fn bars_picture(
    bar_axis: usize,
    rows: &[ReportRow],
    name: &str,
    label_axes: &[usize],
) -> Option<Picture> {
    let (mut series, mut groups) = (Vec::<String>::new(), Vec::<String>::new());
    let group_of = |row: &ReportRow| {
        let other_values = label_axes
            .iter()
            .filter(|index| **index != bar_axis)
            .map(|&index| row.point[index].as_str());
        other_values.collect::<Vec<_>>().join(", ")
    };
    for row in rows {
        if !series.contains(&row.point[bar_axis]) {
            series.push(row.point[bar_axis].clone());
        }
        if !groups.contains(&group_of(row)) {
            groups.push(group_of(row));
        }
    }
    if groups.len() > MAX_GROUPS || series.len() > MAX_SERIES {
        return None;
    }
    let bar_of = |group: &String, group_series: &String| {
        let row = rows
            .iter()
            .find(|row| row.point[bar_axis] == *group_series && group_of(row) == *group)?;
        let figure = row.figures.get(name)?;
        let interval = figure.low.zip(figure.high).filter(|_| row.finished > 1);
        Some(ChartBar {
            value: figure.mean,
            interval,
        })
    };
    let group_bars = |group: &String| BarGroup {
        name: group.clone(),
        bars: series
            .iter()
            .map(|group_series| bar_of(group, group_series).unwrap_or_default())
            .collect(),
    };
    let bars = BarChart {
        title: figure_title(name),
        y: Axis::linear(&figure_title(name)),
        groups: groups.iter().map(group_bars).collect(),
        series: series.clone(),
        ..BarChart::default()
    };
    Some(Picture {
        name: name.replace('_', "-"),
        title: bars.title.clone(),
        svg: bars.svg(),
        inline: bars.inline(),
    })
}

impl SweepReport {
    /// Renders the table: one line per row, with means over the seeds.
    pub fn text(&self) -> String {
        let names = figure_names(&self.rows);
        let titles: Vec<String> = names.iter().map(|name| figure_title(name)).collect();
        let mut header: Vec<(&str, Align)> = self
            .axes
            .iter()
            .map(|axis| (axis.as_str(), Align::Left))
            .collect();
        header.push(("seeds", Align::Right));
        header.extend(titles.iter().map(|title| (title.as_str(), Align::Right)));
        let mut table = Table::new(&header);
        for row in &self.rows {
            let figures = names.iter().map(|name| {
                value_or_dash(
                    row.figures
                        .get(name)
                        .and_then(|f| f.mean)
                        .map(format_number),
                )
            });
            table.add_row(
                row.point
                    .iter()
                    .cloned()
                    .chain([row.seeds()])
                    .chain(figures),
            );
        }
        format!("{}\n\n{}", self.lead_text(), table.text())
    }

    fn lead_text(&self) -> String {
        let damaged_text = match self.damaged.len() {
            0 => String::new(),
            count => format!("; {count} results are damaged; 'sweep run' repeats them"),
        };
        format!(
            "{}: {} of {} results{damaged_text}",
            escape_controls(&self.name),
            self.finished,
            self.total
        )
    }

    /// Renders the page with all pictures.
    pub fn html(&self) -> String {
        let body = html! {
            h1 { (self.name) }
            p { (self.description) }
            p { (self.lead_text()) ". Version " code { (self.version) } "." }
            @for damage in &self.damaged { p.missed { (damage) } }
            @for picture in &self.pictures {
                (picture.inline)
            }
            (self.table())
        };
        render_page(&format!("cachemate sweep: {}", self.name), &body)
    }

    fn table(&self) -> Markup {
        let names = figure_names(&self.rows);
        html! {
            h2 { "All points" }
            p { "Mean over the seeds, with the smallest and largest where there are several." }
            (scroll_box("All points", &html! { table.text {
                thead { tr {
                    @for axis in &self.axes { th { (axis) } }
                    th { "seeds" }
                    @for name in &names { th { (figure_title(name)) } }
                } }
                tbody { @for row in &self.rows { tr {
                    @for value in &row.point { td { (value) } }
                    td { (row.seeds()) }
                    @for name in &names { td.n { (row.format_cell(name)) } }
                } } }
            } }))
        }
    }
}

impl ReportRow {
    fn seeds(&self) -> String {
        if self.finished == self.total {
            self.total.to_string()
        } else {
            format!("{} of {}", self.finished, self.total)
        }
    }

    fn format_cell(&self, name: &str) -> String {
        let Some(figure) = self.figures.get(name) else {
            return value_or_dash(None);
        };
        let spread = figure.low.zip(figure.high).filter(|(low, high)| low < high);
        let spread_text = spread
            .map(|(low, high)| format!(" ({} to {})", format_number(low), format_number(high)));
        value_or_dash(figure.mean.map(format_number)) + &spread_text.unwrap_or_default()
    }
}
