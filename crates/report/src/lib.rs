//! Renders results for users and scripts: JSON objects, text tables, terminal pictures, SVG figures, and HTML pages.
//!
//! All functions are pure: data in, text out. They add nothing to the data, and show a missing value as missing (`–`
//! in text, `null` in JSON). [`figure`] does not depend on the other modules, and also draws the papers' figures.

#![warn(missing_docs)]

pub mod figure;
mod html;
mod html_page;
mod policy_outcome;
mod results;
mod table;
pub mod terminal;
pub mod text;

pub use html::StudyPage;
pub use html_page::{render_page, scroll_box};
pub use policy_outcome::{PolicyOutcome, ProgramOutcome, ReportedDecision, TimeSeries};
pub use results::*;
pub use table::{Align, Table};
