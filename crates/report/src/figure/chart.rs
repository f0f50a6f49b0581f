//! Lines and points over two axes: curves with error bands, scatter plots, error bars, reference values.

use super::COLORS;
use super::axis::{Axis, AxisLayout};
use super::svg::{Anchor, Drawing, Svg, text_width};
use crate::text::format_number;

/// One value, with its confidence interval and a tooltip.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ChartPoint {
    /// Position in the unit of the x axis.
    pub x: f64,
    /// Value in the unit of the y axis.
    pub y: f64,
    /// Lower and upper end of the confidence interval; `None` if the value is exact, or if its error is unknown.
    pub interval: Option<(f64, f64)>,
    /// Tooltip; `None` to show the values of `x` and `y`.
    pub title: Option<String>,
}

impl ChartPoint {
    /// Builds a point without an interval, with its values as the tooltip.
    pub fn new(x: f64, y: f64) -> Self {
        ChartPoint {
            x,
            y,
            ..ChartPoint::default()
        }
    }
}

/// The mark with which a series is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mark {
    /// A line from point to point.
    #[default]
    Line,
    /// Points only: a scatter plot.
    Points,
    /// A step line, which holds each value until the next point.
    Steps,
}

/// A named sequence of points.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points in drawing order; a point that is not finite interrupts the line.
    pub points: Vec<ChartPoint>,
    /// Mark of the points.
    pub mark: Mark,
    /// Whether intervals are vertical lines at the points, instead of a shaded area around the line.
    pub has_whiskers: bool,
    /// Whether the line is dashed. Points are not affected.
    pub is_dashed: bool,
    /// Index of the series' color; `None` for the next unused color. Equal indices give equal colors in all figures.
    pub color: Option<usize>,
}

/// A reference value, drawn behind the data.
#[derive(Clone, PartialEq, Debug)]
pub enum ReferenceLine {
    /// A level across the figure.
    Y {
        /// Text beside the line.
        label: String,
        /// Level in the unit of the y axis.
        level: f64,
    },
    /// A position along the x axis.
    X {
        /// Text beside the line.
        label: String,
        /// Position in the unit of the x axis.
        position: f64,
    },
    /// A range of levels, such as a published one.
    YBand {
        /// Text at the band.
        label: String,
        /// Lower end, in the unit of the y axis.
        from: f64,
        /// Upper end, in the unit of the y axis.
        to: f64,
    },
    /// A range along the x axis.
    XBand {
        /// Text at the band.
        label: String,
        /// Lower end, in the unit of the x axis.
        from: f64,
        /// Upper end, in the unit of the x axis.
        to: f64,
    },
}

/// Series over two axes.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Chart {
    /// Title above the figure.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// Series in the order of drawing and of the legend.
    pub series: Vec<Series>,
    /// Reference values.
    pub references: Vec<ReferenceLine>,
    /// Size in pixels; `None` for 680 x 360.
    pub size: Option<(f64, f64)>,
}

/// Maximum number of points of a series for which dots with tooltips are drawn.
const MAX_DOTS: usize = 200;

struct ChartLayout<'a> {
    svg: Svg,
    x: AxisLayout<'a>,
    y: AxisLayout<'a>,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Chart {
    /// The drawing as a file of its own, with its style.
    pub fn svg(&self) -> String {
        self.draw().standalone()
    }
    /// The drawing for a page that contains [`super::STYLE`].
    pub fn inline(&self) -> Drawing {
        self.draw().inline()
    }

    fn draw(&self) -> Svg {
        let mut plot = self.lay_out();
        plot.draw_grid(&self.x.label, &self.y.label);
        self.references
            .iter()
            .for_each(|reference| plot.draw_reference(reference));
        let color_of = |index: usize| self.series[index].color.unwrap_or(index);
        for (index, series) in self.series.iter().enumerate() {
            plot.draw_intervals(series, color_of(index));
        }
        for (index, series) in self.series.iter().enumerate() {
            plot.draw_series(series, color_of(index));
        }
        self.references
            .iter()
            .for_each(|reference| plot.draw_reference_label(reference));
        plot.svg
    }

    fn lay_out(&self) -> ChartLayout<'_> {
        let (width, height) = self.size.unwrap_or((680.0, 360.0));
        let axes = format!("{} by {}", self.y.label, self.x.label);
        let mut svg = Svg::new(width, height, &[&self.title, &axes]);
        let top = svg.draw_heading(&self.title, 10.0);
        let legend_entries: Vec<(&str, usize, bool)> = self
            .series
            .iter()
            .enumerate()
            .map(|(index, s)| (s.name.as_str(), s.color.unwrap_or(index), s.is_dashed))
            .collect();
        let top = draw_legend(&mut svg, &legend_entries, top);
        let y_label_room = if self.y.label.is_empty() { 0.0 } else { 20.0 };
        let bottom_margin = if self.x.label.is_empty() { 28.0 } else { 46.0 };
        // A label longer than its axis would run into the legend.
        let bottom = svg.grow((top + 8.0 + text_width(&self.y.label) + bottom_margin).max(height))
            - bottom_margin;
        let right = width - 18.0;
        let points = || self.series.iter().flat_map(|series| &series.points);
        let extents = points().flat_map(|p| {
            let (low, high) = p.interval.unwrap_or((p.y, p.y));
            [p.y, low, high]
        });

        let levels = self
            .references
            .iter()
            .flat_map(|reference| match reference {
                ReferenceLine::Y { level, .. } => vec![*level],
                ReferenceLine::YBand { from, to, .. } => vec![*from, *to],
                _ => vec![],
            });
        let y = AxisLayout::new(&self.y, extents.chain(levels), (bottom, top + 8.0), true);
        let max_label_width = y
            .ticks()
            .iter()
            .map(|(_, label)| text_width(label))
            .fold(0.0, f64::max);
        let left = 14.0 + y_label_room + max_label_width;
        let x = AxisLayout::new(&self.x, points().map(|p| p.x), (left, right), false);
        ChartLayout {
            svg,
            x,
            y,
            left,
            right,
            top: top + 8.0,
            bottom,
        }
    }
}

/// The style class of a series' line, dashed if the series is, or once all colors are used.
fn line_class(color: usize, is_dashed: bool) -> String {
    let dash = if is_dashed || color >= COLORS {
        " d"
    } else {
        ""
    };
    format!("l s{}{dash}", color % COLORS)
}

/// A page on a telephone (375 pixels) shows this much of a figure until it is scrolled, and a legend that ends behind it
/// would hide which series there are.
const MAX_LEGEND_WIDTH: f64 = 360.0;

/// Draws names and colors of the series, wrapped to the width, and returns the y below them. A single series needs no
/// legend.
pub(super) fn draw_legend(svg: &mut Svg, entries: &[(&str, usize, bool)], top: f64) -> f64 {
    if entries.len() < 2 {
        return top;
    }

    let width = svg.width().min(MAX_LEGEND_WIDTH);
    let (mut x, mut y) = (14.0, top + 8.0);
    for (name, color, is_dashed) in entries {
        let entry_width = 34.0 + text_width(name);
        if x + entry_width > width && x > 14.0 {
            (x, y) = (14.0, y + 19.0);
        }
        svg.draw_line(&line_class(*color, *is_dashed), (x, y), (x + 16.0, y));
        svg.draw_text("n", (x + 21.0, y + 4.0), Anchor::Start, name);
        x += entry_width;
    }
    y + 10.0
}

impl ChartLayout<'_> {
    fn draw_grid(&mut self, x_label: &str, y_label: &str) {
        for (value, label) in self.y.ticks() {
            let y = self.y.position(value);
            self.svg.draw_line("g", (self.left, y), (self.right, y));
            self.svg
                .draw_text("n m", (self.left - 7.0, y + 4.0), Anchor::End, &label);
        }

        let mut next_free_x = f64::NEG_INFINITY;
        for (value, label) in self.x.ticks() {
            let x = self.x.position(value);
            self.svg.draw_line("g", (x, self.top), (x, self.bottom));
            // A label that would overlap the previous one is omitted; its grid line stays.
            let half_width = text_width(&label) / 2.0;
            if x - half_width >= next_free_x {
                self.svg
                    .draw_text("n m", (x, self.bottom + 17.0), Anchor::Middle, &label);
                next_free_x = x + half_width + 4.0;
            }
        }

        self.svg
            .draw_line("a", (self.left, self.bottom), (self.right, self.bottom));
        if !x_label.is_empty() {
            let middle = (self.left + self.right) / 2.0;
            self.svg
                .draw_text("m", (middle, self.bottom + 37.0), Anchor::Middle, x_label);
        }

        if !y_label.is_empty() {
            let middle = (self.top + self.bottom) / 2.0;
            self.svg.draw_text_upwards("m", (16.0, middle), y_label);
        }
    }

    fn draw_reference(&mut self, reference: &ReferenceLine) {
        match reference {
            ReferenceLine::Y { level, .. } => {
                let y = self.y.position(*level);
                self.svg.draw_line("r", (self.left, y), (self.right, y));
            }
            ReferenceLine::X { position, .. } if self.x.contains(*position) => {
                let x = self.x.position(*position);
                self.svg.draw_line("r", (x, self.top), (x, self.bottom));
            }
            ReferenceLine::X { .. } => {}
            ReferenceLine::YBand { label, from, to } => {
                let (high, low) = (
                    self.y.position(from.max(*to)),
                    self.y.position(from.min(*to)),
                );
                self.svg.draw_rect(
                    "rb",
                    (self.left, high),
                    (self.right - self.left, low - high),
                    None,
                    label,
                );
            }
            ReferenceLine::XBand { label, from, to } => {
                let (left, right) = (
                    self.x.position(from.min(*to)),
                    self.x.position(from.max(*to)),
                );
                self.svg.draw_rect(
                    "rb",
                    (left, self.top),
                    (right - left, self.bottom - self.top),
                    None,
                    label,
                );
            }
        }
    }

    /// Draws the label of a reference. Labels are drawn after the data, because the data would otherwise cover them.
    fn draw_reference_label(&mut self, reference: &ReferenceLine) {
        let (y, label) = match reference {
            ReferenceLine::Y { label, level } => (self.y.position(*level) - 5.0, label),
            ReferenceLine::YBand { label, from, to } => {
                (self.y.position(from.max(*to)) + 14.0, label)
            }
            ReferenceLine::X { label, position } if self.x.contains(*position) => {
                return self.draw_top_label(self.x.position(*position), label);
            }
            ReferenceLine::X { .. } => return,
            ReferenceLine::XBand { label, from, to } => {
                return self.draw_top_label(self.x.position(from.min(*to)), label);
            }
        };
        self.svg
            .draw_text("n m k", (self.right - 4.0, y), Anchor::End, label);
    }

    /// Draws a label at the top, on the side of `x` that has more room.
    fn draw_top_label(&mut self, x: f64, label: &str) {
        let has_room = x + 6.0 + text_width(label) < self.right;
        let (text_x, anchor) = if has_room {
            (x + 5.0, Anchor::Start)
        } else {
            (x - 5.0, Anchor::End)
        };
        self.svg
            .draw_text("n m k", (text_x, self.top + 12.0), anchor, label);
    }

    fn draw_intervals(&mut self, series: &Series, color: usize) {
        let interval_points: Vec<(f64, f64, f64)> = series
            .points
            .iter()
            .filter(|p| p.x.is_finite())
            .filter_map(|p| {
                p.interval.map(|(low, high)| {
                    (
                        self.x.position(p.x),
                        self.y.position(low),
                        self.y.position(high),
                    )
                })
            })
            .collect();
        let color_slot = color % COLORS;

        if series.has_whiskers || series.mark == Mark::Points {
            for (x, low, high) in interval_points {
                let class = format!("l s{color_slot}");
                self.svg.draw_line(&class, (x, low), (x, high));
                self.svg.draw_line(&class, (x - 4.0, low), (x + 4.0, low));
                self.svg.draw_line(&class, (x - 4.0, high), (x + 4.0, high));
            }
        } else if interval_points
            .iter()
            .any(|(_, low, high)| (low - high).abs() > 0.3)
        {
            let upper_edge = interval_points.iter().map(|(x, _, high)| (*x, *high));
            let lower_edge = interval_points.iter().rev().map(|(x, low, _)| (*x, *low));
            let area: Vec<(f64, f64)> = upper_edge.chain(lower_edge).collect();
            self.svg.draw_path(&format!("b f{color_slot}"), &area, true);
        }
    }

    fn draw_series(&mut self, series: &Series, color: usize) {
        let color_slot = color % COLORS;
        if series.mark != Mark::Points {
            let class = line_class(color, series.is_dashed);
            for segment in series
                .points
                .split(|p| !(p.x.is_finite() && p.y.is_finite()))
            {
                let line = self.polyline(segment, series.mark);
                self.svg.draw_path(&class, &line, false);
            }
        }

        let finite_points = series
            .points
            .iter()
            .filter(|p| p.x.is_finite() && p.y.is_finite());
        let is_dense = series.points.len() > MAX_DOTS;
        for point in finite_points {
            let position = (self.x.position(point.x), self.y.position(point.y));
            let title = || {
                point
                    .title
                    .clone()
                    .unwrap_or_else(|| point_title(&series.name, point))
            };
            if series.mark == Mark::Points {
                self.svg.draw_circle(
                    &format!("f{color_slot}"),
                    position,
                    if is_dense { 2.0 } else { 4.0 },
                    &title(),
                );
            } else if !is_dense {
                if series.points.len() <= 40 {
                    self.svg
                        .draw_circle(&format!("f{color_slot}"), position, 2.4, "");
                }
                self.svg.draw_circle("h", position, 8.0, &title());
            }
        }
    }

    fn polyline(&self, segment: &[ChartPoint], mark: Mark) -> Vec<(f64, f64)> {
        let mut line = Vec::with_capacity(segment.len());
        for point in segment {
            let position = (self.x.position(point.x), self.y.position(point.y));
            if let (Mark::Steps, Some(&(_, previous_y))) = (mark, line.last()) {
                line.push((position.0, previous_y));
            }
            line.push(position);
        }
        line
    }
}

fn point_title(name: &str, point: &ChartPoint) -> String {
    let interval = point
        .interval
        .map(|(low, high)| format!(" ({} to {})", format_number(low), format_number(high)));
    format!(
        "{name}: {} at {}{}",
        format_number(point.y),
        format_number(point.x),
        interval.unwrap_or_default()
    )
}
