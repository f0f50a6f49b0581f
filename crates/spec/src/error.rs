//! The error type of everything that is read from TOML: the position, the value found, the values expected.

use std::fmt;

use cachemate_core::{nearest_name, suggestion};

/// The value found if a required field is missing.
pub(crate) const MISSING: &str = "nothing";

/// Something in a file (or in an override on the command line) that cannot be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpecError {
    /// The path of the file, or the name of the built-in, as given.
    pub file: Box<str>,
    /// Line and column, from 1; `None` if there is no position (an unreadable file, an override).
    pub line_column: Option<(u32, u32)>,
    /// Path of the field, such as `caches[2].ways`; `None` if the error concerns the whole file.
    pub field: Option<Box<str>>,
    /// The value found, as text; it follows "found" in the message.
    pub found: Box<str>,
    /// The values allowed, as text; they follow "expected" in the message.
    pub expected: Box<str>,
    /// The known name that was probably meant; `None` if no known name is similar.
    pub nearest: Option<Box<str>>,
    /// The next error of the same file.
    pub next: Option<Box<SpecError>>,
}

impl std::error::Error for SpecError {}

impl fmt::Display for SpecError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.file)?;
        if let Some((line, column)) = self.line_column {
            write!(out, ":{line}:{column}")?;
        }
        if let Some(field) = &self.field {
            write!(out, ": field '{field}'")?;
        }
        write!(out, ": found {}, expected {}", self.found, self.expected)?;
        out.write_str(&suggestion(self.nearest.as_deref()))?;
        match &self.next {
            Some(next) => write!(out, "\n{next}"),
            None => Ok(()),
        }
    }
}

impl SpecError {
    /// An error about a whole file: it cannot be read, or no file has that name.
    pub(crate) fn for_file(
        file: &str,
        found: impl Into<Box<str>>,
        expected: impl Into<Box<str>>,
    ) -> Self {
        SpecError {
            file: file.into(),
            line_column: None,
            field: None,
            found: found.into(),
            expected: expected.into(),
            nearest: None,
            next: None,
        }
    }

    /// Joins the errors of one file, in the order of their positions; missing fields, which have none, come last.
    /// `None` without errors.
    pub(crate) fn join(mut errors: Vec<SpecError>) -> Option<SpecError> {
        errors.sort_by_key(|error| (&*error.found == MISSING, error.line_column));
        let prepend = |next: Option<SpecError>, error| {
            Some(SpecError {
                next: next.map(Box::new),
                ..error
            })
        };
        errors.into_iter().rev().fold(None, prepend)
    }

    /// The error for an unknown name. It lists the known names that contain this one; without any, the nearest of all.
    pub(crate) fn unknown_name(subject: &str, name: &str, known_names: &[&str]) -> Self {
        let containing_names: Vec<&str> = known_names
            .iter()
            .copied()
            .filter(|known| !name.is_empty() && known.contains(name))
            .collect();
        let (names, nearest) = match containing_names.len() {
            0 => (known_names, nearest_name(name, known_names.iter().copied())),
            1 => (known_names, containing_names.first().copied()),
            _ => (&containing_names[..], None),
        };
        SpecError {
            nearest: nearest.map(Box::from),
            ..Self::for_file(
                subject,
                format!("'{name}'"),
                format!("a file, or one of {}", names.join(", ")),
            )
        }
    }
}
