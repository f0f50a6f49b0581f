//! The page of a lab run: each figure that the guest or cachemate reports beside the model's figure, with its target.

use maud::{Markup, html};
use serde::{Deserialize, Serialize};

use crate::figure::{Axis, Chart, ChartPoint, Mark, Series};
use crate::html_page::{render_page, scroll_box};
use crate::text::format_count_of;

/// The results of a lab run, as the lab's scripts write them (`result.json`).
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct LabResult {
    /// Whether any scenario was run; if not, `reason` gives the cause.
    pub ran: bool,
    /// Reason why no scenario was run.
    pub reason: Option<String>,
    /// Version of the guest's kernel.
    pub kernel: Option<String>,
    /// Git commit of the lab's scripts; `None` if they are not in a Git checkout.
    pub commit: Option<String>,
    /// The command that repeats the run.
    pub command: Option<String>,
    /// All figures of the run.
    #[serde(default)]
    pub lines: Vec<LabLine>,
    /// Elapsed time of the run on the host.
    pub seconds: Option<f64>,
}

/// A figure of a lab run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LabLine {
    /// Scenario and figure: `colors.plain`.
    pub id: String,
    /// Description of the figure.
    pub title: String,
    /// Whether the figure meets its target; `None` if it has no target, or was not measured.
    pub passed: Option<bool>,
    /// The figure reported by cachemate, by the guest, or by a closed form.
    pub reported: String,
    /// The figure of the model.
    pub modeled: String,
    /// The target, as text.
    pub target: String,
}

/// Lines of forecast slowdowns, which may be 0 or less.
const FORECAST_ID: &str = "forecast.pair";

impl LabLine {
    fn scenario(&self) -> &str {
        self.id.split('.').next().unwrap_or(&self.id)
    }

    fn is_forecast(&self) -> bool {
        self.id == FORECAST_ID
    }

    /// Returns the reported and modeled figure, if both are single numbers.
    fn figure_pair(&self) -> Option<(f64, f64)> {
        let parse_number = |text: &str| {
            text.trim()
                .parse::<f64>()
                .ok()
                .filter(|value| value.is_finite())
        };
        Some((parse_number(&self.reported)?, parse_number(&self.modeled)?))
    }

    fn verdict(&self) -> &'static str {
        match self.passed {
            Some(true) => "met",
            Some(false) => "missed",
            None => "–",
        }
    }
}

impl LabResult {
    /// Returns the HTML page.
    pub fn render_html(&self, title: &str) -> String {
        let body = html! {
            h1 { (title) }
            p.lead { (self.lead_text()) }
            (self.forecasts_section())
            (self.pairs_section())
            @for scenario in self.scenarios() { (self.scenario_section(scenario)) }
        };
        render_page(title, &body)
    }

    fn lead_text(&self) -> String {
        if !self.ran {
            return format!(
                "Nothing was run: {}.",
                self.reason.as_deref().unwrap_or("no reason was recorded")
            );
        }
        let count_with = |passed| {
            self.lines
                .iter()
                .filter(|line| line.passed == passed)
                .count()
        };
        let mut lead = format!(
            "All figures are of a modeled machine. {} met, {} missed, {} without a target.",
            format_count_of(count_with(Some(true)) as u64, "target"),
            count_with(Some(false)),
            format_count_of(count_with(None) as u64, "figure"),
        );
        let facts = [
            ("Kernel", &self.kernel),
            ("Commit", &self.commit),
            ("Command", &self.command),
        ];
        for (name, value) in facts
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_ref()?)))
        {
            lead.push_str(&format!(" {name}: {value}."));
        }
        lead
    }

    fn scenarios(&self) -> Vec<&str> {
        let mut scenarios = Vec::new();
        for line in &self.lines {
            if !scenarios.contains(&line.scenario()) {
                scenarios.push(line.scenario());
            }
        }
        scenarios
    }

    fn pairs_section(&self) -> Markup {
        let point = |line: &LabLine| {
            let (x, y) = line
                .figure_pair()
                .filter(|&(x, y)| x > 0.0 && y > 0.0 && !line.is_forecast())?;
            Some(ChartPoint {
                title: Some(format!("{}: {x} reported, {y} modeled", line.id)),
                ..ChartPoint::new(x, y)
            })
        };
        let points: Vec<ChartPoint> = self.lines.iter().filter_map(point).collect();
        if points.is_empty() {
            return html! {};
        }
        html! {
            h2 { "Reported and modeled" }
            p.soft { "Figures that are single numbers, each in its own unit." }
            (scatter_chart(points, Axis::log("reported"), Axis::log("modeled")))
        }
    }

    fn forecasts_section(&self) -> Markup {
        let point = |line: &LabLine| {
            let (x, y) = line.figure_pair().filter(|_| line.is_forecast())?;
            let title = format!("{}: forecast {x} %, measured {y} %", line.title);
            Some(ChartPoint {
                title: Some(title),
                ..ChartPoint::new(x, y)
            })
        };
        let points: Vec<ChartPoint> = self.lines.iter().filter_map(point).collect();
        if points.is_empty() {
            return html! {};
        }
        html! {
            h2 { "Forecast and measured slowdowns" }
            p.soft { "One point for each pair of programs; on the dashed line, the forecast is right." }
            (scatter_chart(points, Axis::linear("forecast slowdown, percent"), Axis::linear("measured, percent")))
        }
    }

    fn scenario_section(&self, scenario: &str) -> Markup {
        html! {
            h2 { (scenario) }
            (scroll_box(scenario, &html! { table.text {
                thead { tr { th { "figure" } th { "reported" } th { "modeled" } th { "target" } th { "verdict" } } }
                tbody { @for line in self.lines.iter().filter(|line| line.scenario() == scenario) { tr {
                    td { (line.title) } td { (line.reported) } td { (line.modeled) } td { (line.target) } td.(line.verdict()) { (line.verdict()) }
                } } }
            } }))
        }
    }
}

/// Points, and the line on which both figures are equal.
fn scatter_chart(points: Vec<ChartPoint>, x: Axis, y: Axis) -> Markup {
    let values = points.iter().flat_map(|point| [point.x, point.y]);
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), end| {
        (low.min(end), high.max(end))
    });
    let equality_line = Series {
        name: "equal".to_string(),
        points: vec![ChartPoint::new(low, low), ChartPoint::new(high, high)],
        is_dashed: true,
        ..Series::default()
    };
    let figures = Series {
        name: "figures".to_string(),
        points,
        mark: Mark::Points,
        ..Series::default()
    };
    html! { (Chart { x, y, series: vec![figures, equality_line], ..Chart::default() }.inline()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lab_line(id: &str, passed: Option<bool>, reported: &str, modeled: &str) -> LabLine {
        let text = |text: &str| text.to_string();
        LabLine {
            id: text(id),
            title: text("a <figure>"),
            passed,
            reported: text(reported),
            modeled: text(modeled),
            target: text("-"),
        }
    }

    /// Does the page have every scenario once, its figures as text, and points only for pairs of numbers?
    #[test]
    fn every_figure_is_on_the_page() {
        let lines = vec![
            lab_line("colors.plain", Some(true), "26.5", "26.73"),
            lab_line("ways.gain", Some(false), "static-partition", "4.72"),
            lab_line("colors.end", None, "-", "3"),
            lab_line("forecast.pair", None, "0.00", "-1.5"),
        ];
        let result = LabResult {
            ran: true,
            kernel: Some("6.18".to_string()),
            lines,
            ..LabResult::default()
        };
        let page = result.render_html("The lab");
        assert_eq!(
            (
                page.matches("<h2>colors</h2>").count(),
                page.matches("<h2>ways</h2>").count()
            ),
            (1, 1)
        );
        assert!(
            page.contains("1 target met, 1 missed, 2 figures without a target. Kernel: 6.18."),
            "{page}"
        );
        assert_eq!(
            page.matches("a &lt;figure&gt;").count(),
            5,
            "four lines, and a forecast's point"
        );
        assert_eq!(page.matches("reported, ").count(), 1, "one pair of numbers");
        let nothing = LabResult {
            ran: false,
            reason: Some("no QEMU".to_string()),
            lines: Vec::new(),
            ..result
        };
        assert!(
            nothing
                .render_html("The lab")
                .contains("Nothing was run: no QEMU.")
        );
    }
}
