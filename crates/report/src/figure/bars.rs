//! Bars in groups, side by side or stacked, with whiskers and reference levels.

use super::COLORS;
use super::axis::{Axis, AxisLayout};
use super::chart::draw_legend;
use super::svg::{Anchor, Drawing, Svg, text_width};
use crate::text::format_number;

/// One bar of a group.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ChartBar {
    /// Height of the bar, in the unit of the y axis; `None` leaves the bar's position empty.
    pub value: Option<f64>,
    /// Lower and upper end of the confidence interval.
    pub interval: Option<(f64, f64)>,
}

impl From<f64> for ChartBar {
    fn from(value: f64) -> Self {
        ChartBar {
            value: Some(value),
            interval: None,
        }
    }
}

/// Bars above one name on the x axis, one per series.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct BarGroup {
    /// Name below the bars.
    pub name: String,
    /// Bars in the order of [`BarChart::series`].
    pub bars: Vec<ChartBar>,
}

/// A bar chart.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct BarChart {
    /// Title above the figure.
    pub title: String,
    /// The axis of the values.
    pub y: Axis,
    /// Names in the legend, one per series.
    pub series: Vec<String>,
    /// Groups from left to right.
    pub groups: Vec<BarGroup>,
    /// Whether the bars of a group are stacked rather than drawn side by side. Stacked values below zero extend
    /// downward.
    pub is_stacked: bool,
    /// Reference levels: label and value in the unit of the y axis.
    pub references: Vec<(String, f64)>,
    /// Size in pixels; `None` for 680 x 340.
    pub size: Option<(f64, f64)>,
}

impl BarChart {
    /// Standalone: it contains its own style.
    pub fn svg(&self) -> String {
        self.draw().standalone()
    }
    /// The drawing for a page that contains [`super::STYLE`].
    pub fn inline(&self) -> Drawing {
        self.draw().inline()
    }

    /// Stacked bars count as their sum.
    fn axis_values(&self) -> Vec<f64> {
        let mut levels: Vec<f64> = self.references.iter().map(|(_, level)| *level).collect();
        for group in &self.groups {
            let values = group.bars.iter().filter_map(|bar| bar.value);
            if self.is_stacked {
                levels.push(values.clone().filter(|value| *value > 0.0).sum());
                levels.push(values.filter(|value| *value < 0.0).sum());
            } else {
                levels.extend(values);
                levels.extend(
                    group
                        .bars
                        .iter()
                        .filter_map(|bar| bar.interval)
                        .flat_map(|(low, high)| [low, high]),
                );
            }
        }
        levels
    }

    fn draw(&self) -> Svg {
        let (width, height) = self.size.unwrap_or((680.0, 340.0));
        let max_name_width = self
            .groups
            .iter()
            .map(|group| text_width(&group.name))
            .fold(0.0, f64::max);
        let is_slanted = max_name_width > (width - 80.0) / self.groups.len().max(1) as f64 - 4.0;
        let bottom_margin = if is_slanted {
            18.0 + max_name_width * 0.6
        } else {
            28.0
        };

        let legend_entries: Vec<_> = self
            .series
            .iter()
            .enumerate()
            .map(|(index, name)| (name.as_str(), index, false))
            .collect();

        let mut svg = Svg::new(width, height, &[&self.title, &self.y.label]);
        let top = svg.draw_heading(&self.title, 10.0);
        let top = draw_legend(&mut svg, &legend_entries, top);
        // Long names, titles and labels make the picture taller, so that they take no space from the bars.
        let height = svg.grow(bottom_margin + top + text_width(&self.y.label).max(162.0));
        let label_room = if self.y.label.is_empty() { 0.0 } else { 20.0 };
        let bottom = height - bottom_margin;
        let y = AxisLayout::new(
            &self.y,
            self.axis_values().into_iter(),
            (bottom, top + 8.0),
            true,
        );
        let max_label_width = y
            .ticks()
            .iter()
            .map(|(_, label)| text_width(label))
            .fold(0.0, f64::max);
        let (left, right) = (14.0 + label_room + max_label_width, width - 16.0);
        for (value, label) in y.ticks() {
            svg.draw_line("g", (left, y.position(value)), (right, y.position(value)));
            svg.draw_text(
                "n m",
                (left - 7.0, y.position(value) + 4.0),
                Anchor::End,
                &label,
            );
        }
        if !self.y.label.is_empty() {
            svg.draw_text_upwards("m", (16.0, (top + bottom) / 2.0), &self.y.label);
        }
        let group_width = (right - left) / self.groups.len().max(1) as f64;
        for (index, group) in self.groups.iter().enumerate() {
            let group_left = left + index as f64 * group_width;
            self.draw_group(&mut svg, &y, group, group_left, group_width);
            let center_x = group_left + group_width / 2.0;
            match is_slanted {
                true => svg.draw_text_leaning("n", (center_x + 5.0, bottom + 15.0), &group.name),
                false => svg.draw_text("n", (center_x, bottom + 17.0), Anchor::Middle, &group.name),
            }
        }
        svg.draw_line("a", (left, y.position(0.0)), (right, y.position(0.0)));
        for (label, level) in &self.references {
            svg.draw_line("r", (left, y.position(*level)), (right, y.position(*level)));
            svg.draw_text(
                "n m",
                (right - 4.0, y.position(*level) - 5.0),
                Anchor::End,
                label,
            );
        }
        svg
    }

    fn draw_group(
        &self,
        svg: &mut Svg,
        y: &AxisLayout<'_>,
        group: &BarGroup,
        group_left: f64,
        group_width: f64,
    ) {
        let bars_width = (group_width * 0.78).min(90.0);
        let bars_left = group_left + (group_width - bars_width) / 2.0;
        let bar_width = if self.is_stacked {
            bars_width
        } else {
            bars_width / group.bars.len().max(1) as f64
        };

        let (mut positive_sum, mut negative_sum) = (0.0, 0.0);
        for (index, bar) in group.bars.iter().enumerate() {
            let Some(value) = bar.value.filter(|value| value.is_finite()) else {
                continue;
            };
            let base = if !self.is_stacked {
                0.0
            } else if value >= 0.0 {
                positive_sum += value;
                positive_sum - value
            } else {
                negative_sum += value;
                negative_sum - value
            };
            let x = if self.is_stacked {
                bars_left
            } else {
                bars_left + index as f64 * bar_width
            };
            let (high, low) = (
                y.position(base.max(base + value)),
                y.position(base.min(base + value)),
            );
            let name = self.series.get(index).map_or("", String::as_str);
            let title = [group.name.as_str(), name, &format_number(value)]
                .join(" ")
                .replace("  ", " ");
            svg.draw_rect(
                &format!("f{}", index % COLORS),
                (x, high),
                ((bar_width - 1.0).max(1.0), low - high),
                None,
                &title,
            );
            if let Some((low, high)) = bar.interval.filter(|_| !self.is_stacked) {
                let center_x = x + bar_width / 2.0;
                svg.draw_line(
                    "w",
                    (center_x, y.position(low)),
                    (center_x, y.position(high)),
                );
                for end in [low, high] {
                    svg.draw_line(
                        "w",
                        (center_x - 3.0, y.position(end)),
                        (center_x + 3.0, y.position(end)),
                    );
                }
            }
        }
    }
}
