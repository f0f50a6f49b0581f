//! Figures as SVG: the same few kinds serve the HTML report, the command line and the papers' figures.
//!
//! A figure is plain data ([`Chart`], [`HeatMap`], [`BarChart`], [`TimelineChart`]); `svg()` gives a file that stands alone,
//! `inline()` the same drawing without its style, for a page that brings [`STYLE`] along. Colors are names that the
//! style fills in, so that one drawing serves light and dark. Same data, same bytes.

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

/// The style that every figure needs, once per page: colors for light and dark, text sizes.
pub const STYLE: &str = include_str!("figure.css");

/// Colors for series; further ones begin again, with dashes.
pub const COLORS: usize = 8;
