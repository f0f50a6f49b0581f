//! Pictures for a terminal: a curve in dots, a colored matrix, a plan as boxes.
//!
//! Each function takes a [`TerminalStyle`], which the command derives from the terminal. Without color, the characters
//! alone convey the same information. A terminal without Unicode gets none of these pictures.

mod boxes;
mod curve;
mod matrix;

pub use boxes::plan_boxes;
pub use curve::{CurveLine, curve_picture, sparkline};
pub use matrix::matrix_picture;

/// How to write on the terminal: its width, and whether with colors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TerminalStyle {
    /// Whether the terminal supports colors, and the user wants them.
    pub color: bool,
    /// Width of the terminal in columns.
    pub width: usize,
}

impl TerminalStyle {
    /// No color and 80 columns, for files and pipes.
    pub const PLAIN: TerminalStyle = TerminalStyle {
        color: false,
        width: 80,
    };

    /// Applies an SGR code (`1` bold, `2` faint, `38;5;n` color) to the text if colors are enabled.
    pub fn apply_sgr(&self, code: &str, text: &str) -> String {
        if self.color {
            format!("\u{1b}[{code}m{text}\u{1b}[0m")
        } else {
            text.to_string()
        }
    }
    /// The text in bold; unchanged without colors.
    pub fn bold(&self, text: &str) -> String {
        self.apply_sgr("1", text)
    }
    /// The text in faint letters; unchanged without colors.
    pub fn faint(&self, text: &str) -> String {
        self.apply_sgr("2", text)
    }
}

/// Colors of series in the 256-color palette, in the order of the figures' colors; readable on light and dark.
const SERIES_COLORS: [u8; 8] = [32, 166, 36, 133, 136, 63, 161, 70];
