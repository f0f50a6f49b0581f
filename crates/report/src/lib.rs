//! From results to output for users and scripts: JSON objects, text tables, terminal pictures, SVG figures, an HTML
//! page.
//!
//! Everything here is pure: data in, text out. It adds nothing that is not in the data, and missing values remain
//! visible (`–` in text, `null` in JSON). [`figure`] is general: it also draws the papers' figures.

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
