//! The index page: the papers' values beside the measured values, with every figure below. Missed targets are as
//! visible as met ones.

use cachemate_report::{render_page, scroll_box};
use maud::{Markup, html};

use crate::{Finding, Findings};

/// Renders the page; `command` is the command line that measured the findings.
pub fn index_html(findings: &Findings, command: &str) -> String {
    let tally = findings.verdict_counts();
    let body = html! {
        h1 { "The papers' results, measured" }
        p {
            span.met { (tally["met"]) " met" } ", "
            span.met { (tally["exceeded"]) " better than the paper" } ", "
            span.missed { (tally["missed"]) " missed" } ". Made by " code { (command) } "."
        }
        (scroll_box("Results", &findings_table(findings)))
        @for (index, finding) in findings.results.iter().enumerate() { (finding_section(index, finding)) }
    };
    render_page("cachemate: the papers' results, measured", &body)
}

fn findings_table(findings: &Findings) -> Markup {
    html! {
        table.text {
            thead { tr { th { "id" } th { "result" } th { "paper" } th { "target" } th { "measured" } th { "verdict" } } }
            tbody {
                @for (index, finding) in findings.results.iter().enumerate() {
                    tr {
                        td.l { a style="white-space:nowrap" href={ "#f" (index) } { (finding.id) } }
                        td { (finding.title) }
                        td { (finding.paper) }
                        td { (finding.target.describe()) }
                        td.n { (describe_finding(finding)) }
                        td { (verdict_cell(finding)) }
                    }
                }
            }
        }
    }
}

fn finding_section(index: usize, finding: &Finding) -> Markup {
    let seeds: Vec<String> = finding.seeds.iter().map(u64::to_string).collect();

    html! {
        section {
            h2 id={ "f" (index) } { (finding.id) ": " (finding.title) }
            p { "Measured " b { (describe_finding(finding)) } ", target: " (finding.target.describe()) ", paper: " (finding.paper) " — " (verdict_cell(finding)) }
            @if !finding.note.is_empty() { p { (finding.note) } }
            @for figure in &finding.figures {
                (figure.inline)
            }

            @if !finding.points.is_empty() {
                details {
                    summary { (finding.points.len()) " points" }
                    table.text {
                        thead { tr { th { "series" } th { "at" } th { "value" } th { "low" } th { "high" } } }
                        tbody {
                            @for point in &finding.points {
                                tr {
                                    td { (point.series) } td { (point.at) }
                                    td.n { (format_number(point.value)) } td.n { (format_number(point.low)) } td.n { (format_number(point.high)) }
                                }
                            }
                        }
                    }
                }
            }

            p.soft { "Seeds " (seeds.join(", ")) "; time scale 1/" (finding.time_scale) "." }
        }
    }
}

fn describe_finding(finding: &Finding) -> String {
    let spread_text = finding
        .spread
        .map(|spread| format!(" ± {}", format_number(Some(spread))))
        .unwrap_or_default();
    format!(
        "{}{spread_text} {}",
        format_number(finding.measured),
        finding.unit
    )
}

fn format_number(value: Option<f64>) -> String {
    match value {
        None => "–".to_string(),
        Some(value) if value.abs() >= 100.0 => format!("{value:.0}"),
        Some(value) if value.abs() >= 1.0 => format!("{value:.2}"),
        Some(value) => format!("{value:.3}"),
    }
}

/// A dash if there is no target.
fn verdict_cell(finding: &Finding) -> Markup {
    match finding.verdict {
        Some(verdict) => {
            html! { span class=(if verdict.name() == "missed" { "missed" } else { "met" }) { (verdict.name()) } }
        }
        None => html! { "–" },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ResultTarget;

    /// Does the page count the findings of each verdict, and leave out those without a target?
    #[test]
    fn the_page_counts_each_verdict() {
        let target = ResultTarget::AtLeast {
            target: 1.0,
            paper_best: Some(2.0),
        };
        let sample_finding =
            |value, target| Finding::new("X-1", "a title", "a claim", "%", target, &[(1, value)]);
        let results = vec![
            sample_finding(0.5, target),
            sample_finding(1.5, target),
            sample_finding(1.6, target),
            sample_finding(3.0, target),
            sample_finding(9.0, ResultTarget::Shown),
        ];
        let html = index_html(&Findings { results }, "cachemate repro X-1");

        for part in [
            ">2 met<",
            ">1 better than the paper<",
            ">1 missed<",
            "a claim",
            "cachemate repro X-1",
        ] {
            assert!(html.contains(part), "{part} is missing in {html}");
        }
    }

    /// Do texts that hold markup, an escape sequence or a mark that turns the direction of writing act on no page?
    #[test]
    fn hostile_texts_have_no_effect_on_a_page() {
        let evil = "</title><script>x</script>\u{1b}[31m\u{202e}{1}\" onload=\"x";
        let finding = Finding::new("X-1", evil, evil, evil, ResultTarget::Shown, &[(1, 1.0)]);
        let page = index_html(
            &Findings {
                results: vec![finding],
            },
            evil,
        );
        assert!(
            !page.contains("<script") && !page.contains("\" onload"),
            "{page}"
        );
        assert!(
            !page.contains(['\u{1b}', '\u{202e}']) && page.contains("\\u{202e}"),
            "{page}"
        );
    }
}
