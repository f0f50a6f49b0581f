//! Results to what people and scripts read: JSON objects, text tables, terminal pictures, SVG figures, an HTML page.
//!
//! Everything here is pure: data in, text out. Nothing is computed that the data does not hold, and absent values stay
//! visibly absent (`–` in text, `null` in JSON). [`figure`] is general: the papers' figures are drawn with it too.

#![warn(missing_docs)]

pub mod figure;
mod html;
mod html_page;
mod lab_page;
mod results;
mod table;
pub mod terminal;
pub mod text;
mod whatif;

pub use html::StudyPage;
pub use html_page::{render_page, scroll_box};
pub use lab_page::{LabLine, LabResult};
pub use results::*;
pub use table::{Align, Table};
pub use whatif::{PolicyOutcome, ProgramOutcome, ReportedDecision, TimeSeries, WhatIfResult};
