//! Pictures for a terminal: a curve in dots, a coloured matrix, a plan as boxes.
//!
//! Each takes a [`Paint`], which the command fills in from what the terminal is: without colour the pictures say the
//! same by characters alone, without Unicode nothing here is used.

mod boxes;
mod curve;
mod matrix;

pub use boxes::plan_boxes;
pub use curve::{CurveLine, curve_picture, sparkline};
pub use matrix::matrix_picture;

/// What the terminal can show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Paint {
    pub colour: bool,
    /// Columns.
    pub width: usize,
}

impl Paint {
    /// No colour, 80 columns: for files and pipes.
    pub const PLAIN: Paint = Paint { colour: false, width: 80 };

    /// The text under an SGR code (`1` bold, `2` faint, `38;5;n` colour) where colour is wanted.
    pub fn sgr(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_string() }
    }
    pub fn bold(&self, text: &str) -> String {
        self.sgr("1", text)
    }
    pub fn faint(&self, text: &str) -> String {
        self.sgr("2", text)
    }
}

/// Colours of series in the 256-colour palette, in the order of the figures' colours; readable on light and dark.
const SERIES: [u8; 8] = [32, 166, 36, 133, 136, 63, 161, 70];
