//! Errors of inputs and recordings: the place, the value found and the value expected.

use std::fmt;
use std::io;

use cachemate_core::suggestion;

/// A position in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FilePosition {
    /// The file as a whole.
    File,
    /// A line of a text format, counted from 1.
    Line(u64),
    /// A byte offset of a binary format.
    Byte(u64),
    /// A block of a `.cmt` file, counted from 0, and its byte offset.
    Block {
        /// Number of the block, from 0.
        block: u64,
        /// Offset of the block in bytes from the start of the file.
        offset: u64,
    },
    /// The closing part of a `.cmt` file (totals and index) and its byte offset.
    Footer {
        /// Offset in bytes from the start of the file.
        offset: u64,
    },
}

impl fmt::Display for FilePosition {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FilePosition::File => write!(out, "the file"),
            FilePosition::Line(line) => write!(out, "line {line}"),
            FilePosition::Byte(offset) => write!(out, "byte {offset}"),
            FilePosition::Block { block, offset } => write!(out, "block {block} at byte {offset}"),
            FilePosition::Footer { offset } => write!(out, "footer at byte {offset}"),
        }
    }
}

/// The errors of reading, writing, converting and recording.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The operating system reported an error.
    #[error("{file}: cannot {what}: {source}")]
    Io {
        /// The path, or another name of the input.
        file: String,
        /// The action that failed, as a verb such as "open" or "read".
        what: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The content violates the format.
    #[error("{file}: {place}: found {found}, expected {expected}")]
    Bad {
        /// The path, or another name of the input.
        file: String,
        /// The position in the file.
        place: FilePosition,
        /// A description of the value there.
        found: String,
        /// A description of the values that the format allows there.
        expected: String,
    },
    /// The output exists, and overwriting was not requested.
    #[error("{file} exists already; it is not overwritten unless forced")]
    Exists {
        /// The output's path.
        file: String,
    },
    /// An unknown name, with the known ones.
    #[error("no {what} is named '{name}'{}; there are: {}", suggestion(.nearest.as_deref()), known_list(.known))]
    Unknown {
        /// The kind of thing that the name refers to.
        what: &'static str,
        /// The given name.
        name: String,
        /// The known name that was probably meant; `None` if none is close.
        nearest: Option<String>,
        /// Every known name; empty if there is nothing of this kind.
        known: Vec<String>,
    },
    /// A name to be looked up among the bundled recordings, although none are installed.
    #[error(
        "no bundled recordings to find '{name}' in: none beside the program or installed ('cargo install' leaves them \
         out); CACHEMATE_RECORDINGS may name their directory, such as recordings of the sources"
    )]
    NoRecordings {
        /// The given name.
        name: String,
    },
    /// The recorder cannot work here.
    #[error("{why}{}", remedy_hint(.remedy))]
    Recorder {
        /// The cause of the failure.
        why: String,
        /// A step by which the user can fix it; `None` if there is no known remedy.
        remedy: Option<String>,
    },
}

fn known_list(known_names: &[String]) -> String {
    if known_names.is_empty() {
        "none".to_string()
    } else {
        known_names.join(", ")
    }
}
fn remedy_hint(remedy: &Option<String>) -> String {
    remedy
        .as_ref()
        .map(|text| format!("; {text}"))
        .unwrap_or_default()
}

impl TraceError {
    /// For `map_err`; `operation` is a verb that the message puts before the file.
    pub fn io_error(
        file: &str,
        operation: &'static str,
    ) -> impl FnOnce(io::Error) -> TraceError + use<> {
        let file = file.to_string();
        move |source| TraceError::Io {
            file,
            what: operation,
            source,
        }
    }
    pub(crate) fn format_error(
        file: &str,
        position: FilePosition,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> TraceError {
        TraceError::Bad {
            file: file.to_string(),
            place: position,
            found: found.into(),
            expected: expected.into(),
        }
    }
}
