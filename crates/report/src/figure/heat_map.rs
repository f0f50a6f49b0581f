//! A matrix of colored cells, with numbers in cells that are large enough.

use super::svg::{Anchor, Drawing, Svg, heading_width, text_width};
use crate::text::{format_fixed, format_number};

/// Color scale of a heat map.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Shade {
    /// Colors from neutral to hot; values below zero are cool.
    #[default]
    Heat,
    /// Grays from white to black, for shMaps and activity vectors.
    Gray,
}

/// Rows of values; `None` is drawn as an empty cell with a dash.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct HeatMap {
    /// Title above the figure.
    pub title: String,
    /// Names of the rows, from the top.
    pub rows: Vec<String>,
    /// Names of the columns, from the left.
    pub columns: Vec<String>,
    /// Label of the axis of rows.
    pub row_label: String,
    /// Label of the axis of columns.
    pub column_label: String,
    /// Values by row and column; as many as there are names.
    pub values: Vec<Vec<Option<f64>>>,
    /// The value that has the strongest color; `None` for the largest magnitude in the map.
    pub strongest_value: Option<f64>,
    /// The scale of colors.
    pub shade: Shade,
    /// Unit written after each number and a blank, such as `%`.
    pub unit: String,
    /// Digits after the point; `None` for three significant digits.
    pub decimals: Option<usize>,
    /// Whether the color follows the square root of the value. Otherwise, one very hot cell makes all others look
    /// alike.
    pub uses_root_scale: bool,
    /// Whether numbers are omitted, as in large maps. Names are also omitted if rows are thinner than text.
    pub hides_numbers: bool,
}

impl HeatMap {
    /// Standalone: it contains its own style.
    pub fn svg(&self) -> String {
        self.draw().standalone()
    }
    /// The drawing for a page that contains [`super::STYLE`].
    pub fn inline(&self) -> Drawing {
        self.draw().inline()
    }

    fn cell_size(&self) -> (f64, f64) {
        let (rows, columns) = (
            self.rows.len().max(1) as f64,
            self.columns.len().max(1) as f64,
        );
        if self.hides_numbers {
            return (
                (640.0 / columns).clamp(1.0, 40.0),
                (420.0 / rows).clamp(2.0, 26.0),
            );
        }
        ((560.0 / columns).clamp(46.0, 78.0), 34.0)
    }

    fn draw(&self) -> Svg {
        let (cell_width, cell_height) = self.cell_size();
        let shows_row_names = cell_height >= 11.0;
        let shows_column_names = cell_width >= 16.0;
        let max_text_width = |names: &[String]| {
            names
                .iter()
                .map(|name| text_width(name))
                .fold(0.0, f64::max)
        };
        let left_edge = 42.0
            + if shows_row_names {
                max_text_width(&self.rows)
            } else {
                0.0
            };

        let title_height = if self.title.is_empty() { 4.0 } else { 34.0 };
        let is_slanted = max_text_width(&self.columns) > cell_width - 4.0;
        let names_height = match (shows_column_names, is_slanted) {
            (false, _) => 6.0,
            (true, false) => 20.0,
            (true, true) => 16.0 + max_text_width(&self.columns) * 0.6,
        };

        let (columns, rows) = (self.columns.len() as f64, self.rows.len() as f64);
        let bottom = title_height + rows * cell_height;
        let label_room = if self.column_label.is_empty() {
            4.0
        } else {
            24.0
        };
        let width =
            (left_edge + columns * cell_width + 14.0).max(heading_width(&self.title) + 24.0);
        // The column label is centered below the cells and may be wider than they are.
        let width = width.max(
            left_edge + columns * cell_width / 2.0 + text_width(&self.column_label) / 2.0 + 8.0,
        );
        let axis_label = format!("{} {}", self.row_label, self.column_label);
        let mut svg = Svg::new(
            width,
            bottom + names_height + label_room,
            &[&self.title, &axis_label],
        );
        svg.draw_text("t", (12.0, 22.0), Anchor::Start, &self.title);
        if !self.row_label.is_empty() {
            svg.draw_text_upwards(
                "m",
                (16.0, title_height + rows * cell_height / 2.0),
                &self.row_label,
            );
        }
        if shows_row_names {
            for (index, name) in self.rows.iter().enumerate() {
                svg.draw_text(
                    "",
                    (
                        left_edge - 8.0,
                        title_height + (index as f64 + 0.5) * cell_height + 4.5,
                    ),
                    Anchor::End,
                    name,
                );
            }
        }
        if shows_column_names {
            for (index, name) in self.columns.iter().enumerate() {
                let x = left_edge + (index as f64 + 0.5) * cell_width;
                match is_slanted {
                    true => svg.draw_text_leaning("", (x + 5.0, bottom + 15.0), name),
                    false => svg.draw_text("", (x, bottom + 17.0), Anchor::Middle, name),
                }
            }
        }
        if !self.column_label.is_empty() {
            let x = left_edge + columns * cell_width / 2.0;
            svg.draw_text(
                "m",
                (x, bottom + names_height + 16.0),
                Anchor::Middle,
                &self.column_label,
            );
        }
        self.draw_cells(
            &mut svg,
            (left_edge, title_height),
            (cell_width, cell_height),
        );
        svg
    }

    fn draw_cells(&self, svg: &mut Svg, corner: (f64, f64), cell: (f64, f64)) {
        let values = || {
            self.values
                .iter()
                .flatten()
                .flatten()
                .filter(|value| value.is_finite())
        };
        let full_value = self.strongest_value.unwrap_or_else(|| {
            values().fold(0.0, |largest_value: f64, value| {
                largest_value.max(value.abs())
            })
        });

        let value_text = |value: f64| {
            self.decimals.map_or_else(
                || format_number(value),
                |digits| format_fixed(value, digits),
            )
        };
        let gap = if self.hides_numbers { 0.0 } else { 1.0 };
        let unit_suffix = if self.unit.is_empty() {
            String::new()
        } else {
            format!(" {}", self.unit)
        };

        for (row, values) in self.values.iter().enumerate().take(self.rows.len()) {
            for (column, value) in values.iter().enumerate().take(self.columns.len()) {
                let cell_corner = (
                    corner.0 + column as f64 * cell.0,
                    corner.1 + row as f64 * cell.1,
                );
                let extent = (cell.0 - gap, cell.1 - gap);
                let cell_name = format!("{} / {}", self.rows[row], self.columns[column]);
                let Some(value) = value.filter(|value| value.is_finite()) else {
                    svg.draw_rect("g", cell_corner, extent, None, &cell_name);
                    if !self.hides_numbers {
                        let middle = (
                            cell_corner.0 + cell.0 / 2.0,
                            cell_corner.1 + cell.1 / 2.0 + 4.5,
                        );
                        svg.draw_text("m n", middle, Anchor::Middle, "–");
                    }
                    continue;
                };
                let strength = if full_value > 0.0 {
                    (value.abs() / full_value).min(1.0)
                } else {
                    0.0
                };
                let strength = if self.uses_root_scale {
                    strength.sqrt()
                } else {
                    strength
                };
                let class = match (self.shade, value < 0.0) {
                    (Shade::Gray, _) => "grey",
                    (Shade::Heat, false) => "hot",
                    (Shade::Heat, true) => "cool",
                };
                // A minimum opacity keeps the cells of a quiet matrix visible.
                let opacity = if self.hides_numbers {
                    strength
                } else {
                    0.05 + 0.95 * strength
                };
                let title = format!("{cell_name}: {}{unit_suffix}", value_text(value));
                svg.draw_rect(class, cell_corner, extent, Some(opacity), &title);
                if !self.hides_numbers {
                    let text_class = if opacity > 0.72 { "n inv" } else { "n" };
                    let middle = (
                        cell_corner.0 + cell.0 / 2.0,
                        cell_corner.1 + cell.1 / 2.0 + 4.5,
                    );
                    svg.draw_text(text_class, middle, Anchor::Middle, &value_text(value));
                }
            }
        }
    }
}
