//! Miss-rate curves in Braille dots (two by four per character), and as one line of blocks.

use super::{SERIES_COLORS, TerminalStyle};
use crate::table::{Align, pad_text};
use crate::text::{format_number, format_size};

/// One curve of a picture.
#[derive(Clone, PartialEq, Debug)]
pub struct CurveLine {
    /// Name of the curve, printed in its color.
    pub name: String,
    /// Size in bytes, ascending, and the value at that size.
    pub points: Vec<(u64, f64)>,
}

const ROWS: usize = 12;

/// Bit of a Braille character, by column and row of the dot.
const DOT_BITS: [[u8; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];

struct Canvas {
    columns: usize,
    /// Dots of each character, and the series that drew a dot there last.
    cells: Vec<(u8, usize)>,
}

impl Canvas {
    fn set_dot(&mut self, x: usize, y: usize, series: usize) {
        let (column, row) = (x / 2, y / 4);
        if let Some(cell) = self
            .cells
            .get_mut(row * self.columns + column)
            .filter(|_| column < self.columns)
        {
            cell.0 |= DOT_BITS[x % 2][y % 4];
            cell.1 = series;
        }
    }
}

/// Draws curves over a logarithmic axis of cache sizes, with values from zero. Returns an empty text if there is
/// nothing to draw.
pub fn curve_picture(lines: &[CurveLine], y_label: &str, style: TerminalStyle) -> String {
    let points = || {
        lines
            .iter()
            .flat_map(|line| &line.points)
            .filter(|(bytes, value)| *bytes > 0 && value.is_finite())
    };
    let (Some(low), Some(high)) = (points().map(|p| p.0).min(), points().map(|p| p.0).max()) else {
        return String::new();
    };

    let largest_value = points().map(|p| p.1).fold(0.0, f64::max);
    let largest_value = if largest_value > 0.0 {
        largest_value
    } else {
        1.0
    };
    let labels: Vec<String> = (0..=ROWS / 4)
        .map(|index| format_number(largest_value * index as f64 / (ROWS / 4) as f64))
        .collect();
    let gutter = labels.iter().map(String::len).max().unwrap_or(0) + 1;
    let columns = style.width.saturating_sub(gutter + 3).clamp(16, 72);
    let mut canvas = Canvas {
        columns,
        cells: vec![(0, 0); columns * ROWS],
    };

    let doubling_count = libm::log2(high as f64 / low as f64);
    let axis_share = |bytes: f64| {
        if doubling_count > 0.0 {
            libm::log2(bytes / low as f64) / doubling_count
        } else {
            0.5
        }
    };
    for (series, line) in lines.iter().enumerate() {
        draw_curve(&mut canvas, series, line, &axis_share, largest_value);
    }

    let mut text = format!("{}\n", style.faint(y_label));
    for row in 0..ROWS {
        let rows_from_bottom = ROWS - row;
        let label = if row == 0 || rows_from_bottom.is_multiple_of(4) {
            labels[rows_from_bottom / 4].as_str()
        } else {
            ""
        };
        let tick = if label.is_empty() { '│' } else { '┤' };
        text.push_str(&style.faint(&format!(
            "{} {tick}",
            pad_text(label, gutter - 1, Align::Right)
        )));
        text.push_str(canvas_row(&canvas, row, lines.len() > 1, style).trim_end());
        text.push('\n');
    }

    text.push_str(&style.faint(&size_axis(gutter, columns, low, high, &axis_share)));
    if lines.len() > 1 {
        let names = lines
            .iter()
            .enumerate()
            .map(|(index, line)| series_color(style, index, &format!("━ {}", line.name)));
        text.push_str(&wrap_names(names.collect(), style.width));
    }
    text
}

fn draw_curve(
    canvas: &mut Canvas,
    series: usize,
    line: &CurveLine,
    axis_share: &dyn Fn(f64) -> f64,
    largest_value: f64,
) {
    let (max_x, max_y) = ((canvas.columns * 2 - 1) as f64, (ROWS * 4 - 1) as f64);
    let dot_position = |bytes: f64, value: f64| {
        (
            axis_share(bytes) * max_x,
            max_y - (value / largest_value).clamp(0.0, 1.0) * max_y,
        )
    };

    let usable_points: Vec<(u64, f64)> = line
        .points
        .iter()
        .copied()
        .filter(|p| p.0 > 0 && p.1.is_finite())
        .collect();
    for pair in usable_points.windows(2) {
        let (start, end) = (
            dot_position(pair[0].0 as f64, pair[0].1),
            dot_position(pair[1].0 as f64, pair[1].1),
        );
        let steps = (end.0 - start.0)
            .abs()
            .max((end.1 - start.1).abs())
            .ceil()
            .max(1.0) as usize;
        for step in 0..=steps {
            let share = step as f64 / steps as f64;
            let x = start.0 + share * (end.0 - start.0);
            let y = start.1 + share * (end.1 - start.1);
            canvas.set_dot((x + 0.5) as usize, (y + 0.5) as usize, series);
        }
    }
    if let [(bytes, value)] = usable_points[..] {
        let (x, y) = dot_position(bytes as f64, value);
        canvas.set_dot((x + 0.5) as usize, (y + 0.5) as usize, series);
    }
}

fn canvas_row(canvas: &Canvas, row: usize, is_colored: bool, style: TerminalStyle) -> String {
    let cells = &canvas.cells[row * canvas.columns..(row + 1) * canvas.columns];
    let mut text = String::new();
    for &(dots, series) in cells {
        // U+2800 is the Braille block's first character; its low byte encodes the dots.
        let c = char::from_u32(0x2800 + u32::from(dots)).unwrap_or(' ');
        match dots {
            0 => text.push(' '),
            _ if is_colored => text.push_str(&series_color(style, series, &c.to_string())),
            _ => text.push(c),
        }
    }
    text
}

fn series_color(style: TerminalStyle, series: usize, text: &str) -> String {
    style.apply_sgr(
        &format!("38;5;{}", SERIES_COLORS[series % SERIES_COLORS.len()]),
        text,
    )
}

/// The axis line, above those sizes that fit below it.
fn size_axis(
    gutter: usize,
    columns: usize,
    low: u64,
    high: u64,
    axis_share: &dyn Fn(f64) -> f64,
) -> String {
    let mut axis_chars = vec!['─'; columns];
    let mut label_chars = vec![' '; columns + gutter + 8];
    let mut next_free_column = 0;
    for power in 0..63 {
        let bytes = 1u64 << power;
        if bytes < low || bytes > high {
            continue;
        }

        let column = ((axis_share(bytes as f64) * (columns - 1) as f64) + 0.5) as usize;
        let label = format_size(bytes);
        let start = (gutter + 1 + column).saturating_sub(label.len() / 2);
        if start >= next_free_column && start + label.len() <= label_chars.len() {
            axis_chars[column.min(columns - 1)] = '┴';
            label
                .chars()
                .enumerate()
                .for_each(|(index, c)| label_chars[start + index] = c);
            next_free_column = start + label.len() + 2;
        }
    }

    let names: String = label_chars.into_iter().collect();
    format!(
        "{}└{}\n{}\n",
        " ".repeat(gutter),
        axis_chars.into_iter().collect::<String>(),
        names.trim_end()
    )
}

/// Wraps names into lines of at most `width` columns.
fn wrap_names(names: Vec<String>, width: usize) -> String {
    let mut text = String::new();
    let mut used_width = 0;
    for name in names {
        let name_width = crate::table::text_width(&name) + 2;
        if used_width > 0 && used_width + name_width > width {
            text.push('\n');
            used_width = 0;
        }
        text.push_str(if used_width == 0 { " " } else { "  " });
        text.push_str(&name);
        used_width += name_width;
    }
    text + "\n"
}

/// Draws values as blocks of eight heights, from zero to `max_value`; `None` is a blank.
pub fn sparkline(values: &[Option<f64>], max_value: f64) -> String {
    let block = |value: f64| {
        let eighth = if max_value > 0.0 {
            (value / max_value * 8.0).clamp(0.0, 8.0)
        } else {
            0.0
        };
        ['▁', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][(eighth + 0.5) as usize]
    };
    values
        .iter()
        .map(|value| value.filter(|v| v.is_finite()).map_or(' ', block))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    /// Does a falling curve look like one, with its sizes below it?
    #[test]
    fn a_falling_curve_is_drawn_with_its_sizes() {
        let points = (16..=24)
            .map(|power| (1u64 << power, if power < 20 { 30.0 } else { 2.0 }))
            .collect();
        let line = CurveLine {
            name: "chase".into(),
            points,
        };

        let want = expect![[r#"
            misses per 1000 instructions
            30 ┤⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⢣
               │                    ⠈⡆
               │                     ⢸
               │                      ⢇
            20 ┤                      ⠘⡄
               │                       ⢱
               │                       ⠈⡆
               │                        ⠸⡀
            10 ┤                         ⢇
               │                         ⠘⡄
               │                          ⢱
               │                           ⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉
               └┴──────┴─────┴──────┴──────┴─────┴──────┴─────┴──────┴
               64K   128K  256K   512K    1M    2M     4M    8M     16M
        "#]];

        want.assert_eq(&curve_picture(
            &[line],
            "misses per 1000 instructions",
            TerminalStyle {
                color: false,
                width: 60,
            },
        ));
    }

    /// Are unusual data (nothing, one point, zeros, values that are not finite) drawn without failure?
    #[test]
    fn unusual_data_are_drawn_without_failure() {
        let draw = |points: &[(u64, f64)]| {
            curve_picture(
                &[CurveLine {
                    name: "x".into(),
                    points: points.to_vec(),
                }],
                "",
                TerminalStyle::PLAIN,
            )
        };
        assert_eq!(draw(&[]), "");
        assert_eq!(draw(&[(0, 1.0), (64, f64::NAN)]), "");
        assert!(draw(&[(64, 1.0)]).lines().count() > ROWS);
        assert!(draw(&[(64, 0.0), (1 << 60, 0.0)]).lines().count() > ROWS);
    }

    #[test]
    fn a_sparkline_rises_from_low_to_high() {
        assert_eq!(
            sparkline(&[Some(0.0), Some(4.0), None, Some(8.0)], 8.0),
            "▁▄ █"
        );
        assert_eq!(sparkline(&[Some(0.0)], 0.0), "▁");
    }
}
