//! One kind of error for everything that is read from TOML: the place, what was found, what was expected.

use std::fmt;

use cachemate_core::nearest_name;

/// Something in a file (or in an override on the command line) that cannot be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpecError {
    /// The file's path, or the built-in's name, as it was given.
    pub file: Box<str>,
    /// Line and column, from 1; `None` where there is no such place (an unreadable file, an override).
    pub line_column: Option<(u32, u32)>,
    /// Path of the field, such as `caches[2].ways`; `None` where the whole file is at fault.
    pub field: Option<Box<str>>,
    /// The value found, in words; it follows "found" in the message.
    pub found: Box<str>,
    /// The values allowed, in words; they follow "expected" in the message.
    pub expected: Box<str>,
    /// The known name that was probably meant.
    pub nearest: Option<Box<str>>,
    /// The spelling that replaced the field's; then nothing else is wrong with it.
    pub successor: Option<Box<str>>,
}

impl std::error::Error for SpecError {}

impl fmt::Display for SpecError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.file)?;
        if let Some((line, column)) = self.line_column {
            write!(out, ":{line}:{column}")?;
        }
        if let (Some(field), Some(successor)) = (&self.field, &self.successor) {
            return write!(out, ": '{field}' is now '{successor}'");
        }
        if let Some(field) = &self.field {
            write!(out, ": field '{field}'")?;
        }
        write!(out, ": found {}, expected {}", self.found, self.expected)?;
        match &self.nearest {
            Some(meant) => write!(out, " (did you mean '{meant}'?)"),
            None => Ok(()),
        }
    }
}

impl SpecError {
    /// An error about a whole file: it cannot be read, or there is none by that name.
    pub(crate) fn for_file(file: &str, found: impl Into<Box<str>>, expected: impl Into<Box<str>>) -> Self {
        SpecError {
            file: file.into(),
            line_column: None,
            field: None,
            found: found.into(),
            expected: expected.into(),
            nearest: None,
            successor: None,
        }
    }

    /// A name that is not among the known ones: says which there are, and the nearest.
    pub(crate) fn unknown_name(subject: &str, name: &str, known: &[&str]) -> Self {
        SpecError {
            nearest: nearest_name(name, known.iter().copied()).map(Box::from),
            ..Self::for_file(subject, format!("'{name}'"), format!("a file, or one of {}", known.join(", ")))
        }
    }
}
