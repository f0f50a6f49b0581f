//! Figures as SVG: a few kinds of charts that the HTML report, the command line and the papers' figures share.
//!
//! A figure is plain data ([`Chart`], [`HeatMap`], [`BarChart`]). `svg()` returns a standalone file, and `inline()`
//! returns the same drawing without its style, for a page that includes [`STYLE`]. Colors are names that the style
//! defines, so one drawing serves both light and dark mode. Equal data give equal bytes.

mod axis;
mod bars;
mod chart;
mod heat_map;
mod svg;

pub use axis::{Axis, AxisScale};
pub use bars::{BarChart, BarGroup, ChartBar};
pub use chart::{Chart, ChartPoint, Mark, ReferenceLine, Series};
pub use heat_map::{HeatMap, Shade};
pub use svg::Drawing;

/// The style sheet that every figure needs, included once per page: colors for light and dark mode, and text sizes.
pub const STYLE: &str = include_str!("figure.css");

/// Number of colors for series; further series reuse the colors with dashed lines.
pub const COLORS: usize = 8;
