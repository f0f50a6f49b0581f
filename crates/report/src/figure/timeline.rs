//! Lanes over time: locations of tasks, phases, and turns of gangs.

use super::COLORS;
use super::axis::{Axis, AxisLayout};
use super::chart::draw_legend;
use super::svg::{Anchor, Drawing, Svg, text_width};
use crate::text::format_number;

/// A time span of one kind, such as a task's stay on one cache.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TimelineSpan {
    /// Start, in the unit of the x axis.
    pub start: f64,
    /// End, in the unit of the x axis.
    pub end: f64,
    /// Index into [`TimelineChart::kinds`].
    pub kind_index: usize,
    /// Description in the tooltip; if it is empty, the name of the kind is used.
    pub detail: String,
}

/// One row of spans: a CPU, a program.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Lane {
    /// Name at the left of the lane.
    pub name: String,
    /// Spans of the lane.
    pub spans: Vec<TimelineSpan>,
}

/// Lanes over a common time axis.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TimelineChart {
    /// Title above the figure.
    pub title: String,
    /// The time axis.
    pub x_axis: Axis,
    /// Meanings of the colors.
    pub kinds: Vec<String>,
    /// Lanes from the top.
    pub lanes: Vec<Lane>,
    /// Marked times across all lanes: label and position in the unit of the x axis.
    pub marks: Vec<(String, f64)>,
}

const LANE_HEIGHT: f64 = 24.0;
const WIDTH: f64 = 680.0;

impl TimelineChart {
    /// Returns the figure as a standalone file.
    pub fn svg(&self) -> String {
        self.draw().standalone()
    }
    /// Returns the figure for a page that contains [`super::STYLE`].
    pub fn inline(&self) -> Drawing {
        self.draw().inline()
    }

    fn draw(&self) -> Svg {
        let legend_entries: Vec<_> = self
            .kinds
            .iter()
            .enumerate()
            .map(|(index, name)| (name.as_str(), index, false))
            .collect();
        let mut svg = Svg::new(WIDTH, 0.0, &[&self.title, &self.x_axis.label]);
        let top = svg.draw_heading(&self.title, 6.0);
        let top = draw_legend(&mut svg, &legend_entries, top) + 18.0;
        let bottom = top + LANE_HEIGHT * self.lanes.len() as f64;
        svg.grow(bottom + 48.0);
        let max_name_width = self
            .lanes
            .iter()
            .map(|lane| text_width(&lane.name))
            .fold(0.0, f64::max);
        let (left, right) = (22.0 + max_name_width, WIDTH - 18.0);
        let span_ends = self
            .lanes
            .iter()
            .flat_map(|lane| &lane.spans)
            .flat_map(|span| [span.start, span.end]);
        let x_layout = AxisLayout::new(
            &self.x_axis,
            span_ends.chain(self.marks.iter().map(|(_, index)| *index)),
            (left, right),
            false,
        );
        for (value, label) in x_layout.ticks() {
            svg.draw_line(
                "g",
                (x_layout.position(value), top),
                (x_layout.position(value), bottom),
            );
            svg.draw_text(
                "n m",
                (x_layout.position(value), bottom + 17.0),
                Anchor::Middle,
                &label,
            );
        }
        svg.draw_text(
            "m",
            ((left + right) / 2.0, bottom + 37.0),
            Anchor::Middle,
            &self.x_axis.label,
        );
        for (index, lane) in self.lanes.iter().enumerate() {
            let y = top + index as f64 * LANE_HEIGHT;
            svg.draw_text(
                "n",
                (left - 8.0, y + LANE_HEIGHT / 2.0 + 4.0),
                Anchor::End,
                &lane.name,
            );
            for span in &lane.spans {
                let (start_x, end_x) = (x_layout.position(span.start), x_layout.position(span.end));
                let name = if span.detail.is_empty() {
                    self.kinds.get(span.kind_index)
                } else {
                    Some(&span.detail)
                };
                let name = name.map_or("", String::as_str);
                let title = format!(
                    "{}: {name}, {} to {}",
                    lane.name,
                    format_number(span.start),
                    format_number(span.end)
                );
                let class = format!("f{}", span.kind_index % COLORS);
                svg.draw_rect(
                    &class,
                    (start_x, y + 3.0),
                    ((end_x - start_x).max(0.8), LANE_HEIGHT - 6.0),
                    None,
                    &title,
                );
            }
        }
        for (label, position) in &self.marks {
            svg.draw_line(
                "r",
                (x_layout.position(*position), top - 4.0),
                (x_layout.position(*position), bottom),
            );
            svg.draw_text(
                "n m",
                (x_layout.position(*position), top - 7.0),
                Anchor::Middle,
                label,
            );
        }
        svg
    }
}
