//! Pictures for a terminal: a curve in dots, a colored matrix, a plan as boxes.
//!
//! Each takes a [`Paint`], which the command derives from the terminal. Without color, the characters alone convey the
//! same information; without Unicode, nothing here is used.

mod boxes;
mod curve;
mod matrix;

pub use boxes::plan_boxes;
pub use curve::{CurveLine, curve_picture, sparkline};
pub use matrix::matrix_picture;

/// Capabilities of the terminal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Paint {
    /// Does the terminal support colors, and are they wanted?
    pub color: bool,
    /// Width in columns.
    pub width: usize,
}

impl Paint {
    /// No color, 80 columns: for files and pipes.
    pub const PLAIN: Paint = Paint { color: false, width: 80 };

    /// The text under an SGR code (`1` bold, `2` faint, `38;5;n` color) if colors are enabled.
    pub fn sgr(&self, code: &str, text: &str) -> String {
        if self.color { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_string() }
    }
    /// The text in bold if colors are enabled.
    pub fn style_bold(&self, text: &str) -> String {
        self.sgr("1", text)
    }
    /// The text in faint if colors are enabled.
    pub fn style_faint(&self, text: &str) -> String {
        self.sgr("2", text)
    }
}

/// Colors of series in the 256-color palette, in the order of the figures' colors; readable on light and dark.
const SERIES: [u8; 8] = [32, 166, 36, 133, 136, 63, 161, 70];
