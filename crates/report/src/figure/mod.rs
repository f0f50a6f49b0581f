//! Figures as SVG: the same few kinds serve the HTML report, the command line and the papers' figures.
//!
//! A figure is plain data ([`Chart`], [`HeatMap`], [`BarChart`], [`TimelineChart`]); `svg()` gives a standalone file,
//! and `inline()` the same drawing without its style, for a page that includes [`STYLE`]. Colors are names that the
//! style defines, so that one drawing serves light and dark. The same data gives the same bytes.

mod axis;
mod bars;
mod chart;
mod heat_map;
mod svg;
mod timeline;

pub use axis::{Axis, AxisScale};
pub use bars::{BarChart, BarGroup, ChartBar};
pub use chart::{Chart, ChartPoint, IntervalStyle, Mark, ReferenceLine, Series};
pub use heat_map::{HeatMap, Shade};
pub use svg::Drawing;
pub use timeline::{Lane, TimelineChart, TimelineSpan};

/// The style that every figure needs, once per page: colors for light and dark, and text sizes.
pub const STYLE: &str = include_str!("figure.css");

/// Number of colors for series; additional series reuse them with dashes.
pub const COLORS: usize = 8;
