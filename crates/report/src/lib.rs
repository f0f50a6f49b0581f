//! Renders results for users and scripts: JSON objects, text tables, terminal pictures, SVG
//! figures, and HTML pages.
//!
//! Every result is shown in several places, and it must be the same result in all of them. So a
//! command builds one value (`results.rs`), and everything here turns such a value into text: data
//! in, text out. Names in it were chosen by the owners of programs, who may be hostile, so text is
//! escaped by its type ([`text`]) rather than by whoever remembers to.
//!
//! For example, a program that calls itself `\u{1b}[2J` would clear the terminal of everybody who
//! runs `cachemate top`. A table shows the escape as visible characters instead, a label of a
//! metric stays one label, and a JSON string has JSON's own escapes.
//!
//! [`figure`] does not depend on the other modules, and also draws the papers' figures.
//!
//! # Invariants
//! - Nothing is added to the data. A missing value is shown as missing: `–` in text, `null` in
//!   JSON.
//! - No name can control a terminal, forge a table row or begin an HTML element.
//! - A figure draws no point where no value was measured.

#![warn(missing_docs)]

pub mod figure;
mod html;
mod html_page;
mod results;
mod table;
pub mod terminal;
pub mod text;

pub use html::StudyPage;
pub use html_page::{render_page, scroll_box};
pub use results::*;
pub use table::{Align, Table};
