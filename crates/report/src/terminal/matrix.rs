//! Pairwise slowdowns as a matrix in colors, or in shades if colors are disabled.

use super::TerminalStyle;
use crate::results::{CostTable, HIGH_PERCENT};
use crate::table::{Align, pad_text, text_width};
use crate::text::{format_fixed, format_number};

/// Colors from calm to hot, from the 256-color palette.
const HEAT_COLORS: [u8; 6] = [0, 58, 94, 130, 166, 160];
/// Characters behind the numbers that represent the same scale without color.
const SHADES: [&str; 6] = [" ", "·", "░", "▒", "▓", "█"];

/// Draws the matrix under its names, with a line that explains its direction: the column's program slows down the
/// row's.
pub fn matrix_picture(matrix: &CostTable, style: TerminalStyle) -> String {
    let is_percent = matrix.unit == "percent";
    let cell_text = |value: f64| {
        if is_percent {
            format_fixed(value, 1)
        } else {
            format_number(value)
        }
    };

    let values = || {
        matrix
            .values
            .iter()
            .flatten()
            .flatten()
            .copied()
            .filter(|value| value.is_finite())
    };
    let largest_value = values().fold(if is_percent { HIGH_PERCENT } else { 0.0 }, f64::max);
    let max_name_width = matrix
        .names
        .iter()
        .map(|name| text_width(name))
        .max()
        .unwrap_or(0);

    let column_names = shorten_names(&matrix.names, 9);
    let cell_width = values()
        .map(|v| cell_text(v).len() + 2)
        .chain(column_names.iter().map(|n| text_width(n) + 1))
        .max()
        .unwrap_or(4);
    let mut text = " ".repeat(max_name_width + 1);
    for name in &column_names {
        text.push_str(&style.bold(&pad_text(name, cell_width - 1, Align::Right)));
        text.push(' ');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');

    for (row, name) in matrix.names.iter().enumerate() {
        text.push_str(&style.bold(&pad_text(name, max_name_width, Align::Left)));
        text.push(' ');
        for column in 0..matrix.names.len() {
            let value = matrix
                .values
                .get(row)
                .and_then(|values| values.get(column))
                .copied()
                .flatten();
            text.push_str(&render_cell(
                value
                    .filter(|v| v.is_finite())
                    .map(|v| (cell_text(v), v / largest_value)),
                cell_width,
                style,
            ));
        }
        text.truncate(text.trim_end_matches(' ').len());
        text.push('\n');
    }

    let unit = if is_percent {
        "percent of its solo run time lost"
    } else {
        "weight"
    };
    text + &style.faint(&format!(
        "row slowed down by column: {unit} (model {})",
        matrix.model
    )) + "\n"
}

fn render_cell(value: Option<(String, f64)>, cell_width: usize, style: TerminalStyle) -> String {
    let Some((value_text, share)) = value else {
        return pad_text("– ", cell_width, Align::Right);
    };
    // The color follows the square root, because one very hot pair would otherwise make all others look alike.
    let step = (share.clamp(0.0, 1.0).sqrt() * (HEAT_COLORS.len() - 1) as f64 + 0.5) as usize;
    if style.color {
        let padded_value = format!("{} ", pad_text(&value_text, cell_width - 1, Align::Right));
        return if step == 0 || share.is_nan() {
            padded_value
        } else {
            style.apply_sgr(&format!("97;48;5;{}", HEAT_COLORS[step]), &padded_value)
        };
    }
    format!(
        "{}{}",
        pad_text(&value_text, cell_width - 1, Align::Right),
        SHADES[step]
    )
}

/// Truncates names to `max_chars` characters if they stay distinct; otherwise returns the full names.
fn shorten_names(names: &[String], max_chars: usize) -> Vec<String> {
    let short_names: Vec<String> = names
        .iter()
        .map(|name| name.chars().take(max_chars).collect())
        .collect();
    let mut distinct_names = short_names.clone();
    distinct_names.sort();
    distinct_names.dedup();
    if distinct_names.len() == names.len() {
        short_names
    } else {
        names.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    fn matrix() -> CostTable {
        let values = vec![vec![Some(0.0), Some(48.0)], vec![Some(2.31), None]];
        let names = vec!["mcf".to_string(), "milc".to_string()];
        CostTable {
            model: "sdc".into(),
            unit: "percent".into(),
            names,
            values,
            ..CostTable::default()
        }
    }

    /// Does the matrix show slowdowns without any color?
    #[test]
    fn the_matrix_shows_slowdowns_without_color() {
        expect![[r#"
                   mcf  milc
            mcf    0.0  48.0█
            milc   2.3·    –
            row slowed down by column: percent of its solo run time lost (model sdc)
        "#]]
        .assert_eq(&matrix_picture(&matrix(), TerminalStyle::PLAIN));
    }

    #[test]
    fn the_matrix_is_colored_if_color_is_enabled() {
        let text = matrix_picture(
            &matrix(),
            TerminalStyle {
                color: true,
                width: 80,
            },
        );
        assert!(text.contains("\u{1b}[97;48;5;160m"), "{text}");
    }
}
