//! What can be wrong with an input or a recording: where, what was found, what was expected.

use std::fmt;
use std::io;

/// Where in a file something was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The file as a whole.
    File,
    /// A line of a text format, counted from 1.
    Line(u64),
    /// A byte offset of a binary format.
    Byte(u64),
    /// A block of a `.cmt` file, counted from 0, and its byte offset.
    Block { block: u64, offset: u64 },
    /// The closing part of a `.cmt` file (totals and index) and its byte offset.
    Footer { offset: u64 },
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File => write!(out, "the file"),
            Place::Line(line) => write!(out, "line {line}"),
            Place::Byte(offset) => write!(out, "byte {offset}"),
            Place::Block { block, offset } => write!(out, "block {block} at byte {offset}"),
            Place::Footer { offset } => write!(out, "footer at byte {offset}"),
        }
    }
}

/// Everything that reading, writing, converting or recording can fail with.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The operating system refused.
    #[error("{file}: cannot {what}: {source}")]
    Io { file: String, what: &'static str, source: io::Error },
    /// The content is not what the format says.
    #[error("{file}: {place}: found {found}, expected {expected}")]
    Bad { file: String, place: Place, found: String, expected: String },
    /// The output exists and overwriting was not asked for.
    #[error("{file} exists already; it is not overwritten unless forced")]
    Exists { file: String },
    /// A name that is not known, with what there is.
    #[error("no {what} is named '{name}'{}; there are: {}", nearest_hint(.nearest), known_list(.known))]
    Unknown { what: &'static str, name: String, nearest: Option<String>, known: Vec<String> },
    /// A name to look for in the pack, and no pack.
    #[error("no pack to find '{name}' in: none beside the program or installed, expected CACHEMATE_PACK to name one")]
    NoPack { name: String },
    /// The recorder cannot work here.
    #[error("{why}{}", remedy_hint(.remedy))]
    Recorder { why: String, remedy: Option<String> },
}

fn nearest_hint(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|name| format!(" (did you mean '{name}'?)")).unwrap_or_default()
}
fn known_list(known: &[String]) -> String {
    if known.is_empty() { "none".to_string() } else { known.join(", ") }
}
fn remedy_hint(remedy: &Option<String>) -> String {
    remedy.as_ref().map(|text| format!("; {text}")).unwrap_or_default()
}

impl TraceError {
    pub(crate) fn io(file: &str, what: &'static str) -> impl FnOnce(io::Error) -> TraceError + use<> {
        let file = file.to_string();
        move |source| TraceError::Io { file, what, source }
    }
    pub(crate) fn bad(file: &str, place: Place, found: impl Into<String>, expected: impl Into<String>) -> TraceError {
        TraceError::Bad { file: file.to_string(), place, found: found.into(), expected: expected.into() }
    }
}
