//! A matrix of colored cells, with numbers in cells that are large enough.

use super::svg::{Anchor, Drawing, Svg, text_width};
use crate::text::format_number;

/// Color scale of a heat map.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Shade {
    /// Colors from neutral to hot; values below zero are cool.
    #[default]
    Heat,
    /// Grays from white to black, for shMaps and activity vectors.
    Grey,
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
    pub full: Option<f64>,
    /// The scale of colors.
    pub shade: Shade,
    /// Unit written after each number and a blank, such as `%`.
    pub unit: String,
    /// Digits after the point; `None` for three significant digits.
    pub decimals: Option<usize>,
    /// Does the color follow the square root of the value? Otherwise one very hot cell makes all others look alike.
    pub by_root: bool,
    /// Are numbers omitted, as in large maps? Names are also omitted if rows are thinner than text.
    pub bare: bool,
}

impl HeatMap {
    /// The figure as a standalone file.
    pub fn svg(&self) -> String {
        self.draw().standalone()
    }
    /// The figure for a page that contains [`super::STYLE`].
    pub fn inline(&self) -> Drawing {
        self.draw().inline()
    }

    fn cell(&self) -> (f64, f64) {
        let (rows, columns) = (self.rows.len().max(1) as f64, self.columns.len().max(1) as f64);
        if self.bare {
            return ((640.0 / columns).clamp(1.0, 40.0), (420.0 / rows).clamp(2.0, 26.0));
        }
        ((560.0 / columns).clamp(46.0, 78.0), 34.0)
    }

    fn draw(&self) -> Svg {
        let (wide, high) = self.cell();
        let named_rows = high >= 11.0;
        let named_columns = wide >= 16.0;
        let longest = |names: &[String]| names.iter().map(|name| text_width(name)).fold(0.0, f64::max);
        let left_edge = 42.0 + if named_rows { longest(&self.rows) } else { 0.0 };
        let title = if self.title.is_empty() { 4.0 } else { 34.0 };
        let leaning = longest(&self.columns) > wide - 4.0;
        let names_below = match (named_columns, leaning) {
            (false, _) => 6.0,
            (true, false) => 20.0,
            (true, true) => 16.0 + longest(&self.columns) * 0.6,
        };
        let (columns, rows) = (self.columns.len() as f64, self.rows.len() as f64);
        let bottom = title + rows * high;
        let label_room = if self.column_label.is_empty() { 4.0 } else { 24.0 };
        let width = (left_edge + columns * wide + 14.0).max(text_width(&self.title) * 1.2 + 24.0);
        // The column label is centered below the cells and may be wider than they are.
        let width = width.max(left_edge + columns * wide / 2.0 + text_width(&self.column_label) / 2.0 + 8.0);
        let roles = format!("{} {}", self.row_label, self.column_label);
        let mut svg = Svg::new(width, bottom + names_below + label_room, &[&self.title, &roles]);
        svg.draw_text("t", (12.0, 22.0), Anchor::Start, &self.title);
        if !self.row_label.is_empty() {
            svg.draw_text_upwards("m", (16.0, title + rows * high / 2.0), &self.row_label);
        }
        if named_rows {
            for (index, name) in self.rows.iter().enumerate() {
                svg.draw_text("", (left_edge - 8.0, title + (index as f64 + 0.5) * high + 4.5), Anchor::End, name);
            }
        }
        if named_columns {
            for (index, name) in self.columns.iter().enumerate() {
                let x = left_edge + (index as f64 + 0.5) * wide;
                match leaning {
                    true => svg.draw_text_leaning("", (x + 5.0, bottom + 15.0), name),
                    false => svg.draw_text("", (x, bottom + 17.0), Anchor::Middle, name),
                }
            }
        }
        if !self.column_label.is_empty() {
            let x = left_edge + columns * wide / 2.0;
            svg.draw_text("m", (x, bottom + names_below + 16.0), Anchor::Middle, &self.column_label);
        }
        self.draw_cells(&mut svg, (left_edge, title), (wide, high));
        svg
    }

    fn draw_cells(&self, svg: &mut Svg, corner: (f64, f64), cell: (f64, f64)) {
        let values = || self.values.iter().flatten().flatten().filter(|value| value.is_finite());
        let full_value =
            self.full.unwrap_or_else(|| values().fold(0.0, |largest_value: f64, value| largest_value.max(value.abs())));
        let shown =
            |value: f64| self.decimals.map_or_else(|| format_number(value), |digits| format!("{value:.digits$}"));
        let gap = if self.bare { 0.0 } else { 1.0 };
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        for (row, values) in self.values.iter().enumerate().take(self.rows.len()) {
            for (column, value) in values.iter().enumerate().take(self.columns.len()) {
                let cell_corner = (corner.0 + column as f64 * cell.0, corner.1 + row as f64 * cell.1);
                let extent = (cell.0 - gap, cell.1 - gap);
                let pair = format!("{} / {}", self.rows[row], self.columns[column]);
                let Some(value) = value.filter(|value| value.is_finite()) else {
                    svg.draw_rect("g", cell_corner, extent, None, &pair);
                    if !self.bare {
                        let middle = (cell_corner.0 + cell.0 / 2.0, cell_corner.1 + cell.1 / 2.0 + 4.5);
                        svg.draw_text("m n", middle, Anchor::Middle, "–");
                    }
                    continue;
                };
                let strength = if full_value > 0.0 { (value.abs() / full_value).min(1.0) } else { 0.0 };
                let strength = if self.by_root { strength.sqrt() } else { strength };
                let class = match (self.shade, value < 0.0) {
                    (Shade::Grey, _) => "grey",
                    (Shade::Heat, false) => "hot",
                    (Shade::Heat, true) => "cool",
                };
                // A minimum opacity keeps the cells of a quiet matrix visible.
                let opacity = if self.bare { strength } else { 0.05 + 0.95 * strength };
                let title = format!("{pair}: {}{unit}", shown(value));
                svg.draw_rect(class, cell_corner, extent, Some(opacity), &title);
                if !self.bare {
                    let text_class = if opacity > 0.72 { "n inv" } else { "n" };
                    let middle = (cell_corner.0 + cell.0 / 2.0, cell_corner.1 + cell.1 / 2.0 + 4.5);
                    svg.draw_text(text_class, middle, Anchor::Middle, &shown(value));
                }
            }
        }
    }
}
