//! TOML into a type, with errors that point into the text.
//!
//! Serde loses the position of a value in tagged enums and in later checks. The text is therefore parsed once into a
//! tree with spans, from which the values are taken (and overridden, if the caller requests it). Every later error
//! gives a *path*, which is looked up in the tree.

use cachemate_core::nearest_name;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::SpecError;
use crate::error::MISSING;
use crate::overrides::{Override, apply_override};

/// Maximum number of errors that are reported for one file.
const MAX_ERRORS: usize = 20;

/// A TOML text, retained so that errors can point into it.
pub struct Located<'a> {
    file: &'a str,
    text: &'a str,
    tree: Spanned<DeTable<'a>>,
}

/// Parses `text` as a `T`. `file` is its name in errors.
///
/// # Errors
/// Invalid TOML, or an unknown, missing or ill-typed field; with line, column, field, the value found and the values
/// expected.
pub fn parse_toml<T: DeserializeOwned>(file: &str, text: &str) -> Result<T, SpecError> {
    Located::parse(file, text)?.deserialize()
}

impl<'a> Located<'a> {
    /// Parses the text into a tree that keeps the position of each value.
    ///
    /// # Errors
    /// Invalid TOML, with its position.
    pub fn parse(file: &'a str, text: &'a str) -> Result<Self, SpecError> {
        let tree = DeTable::parse(text).map_err(|error| syntax_error(file, text, &error))?;
        Ok(Located { file, text, tree })
    }

    /// The text as a `T`.
    ///
    /// # Errors
    /// An unknown, missing or ill-typed field, with its position.
    pub fn deserialize<T: DeserializeOwned>(&self) -> Result<T, SpecError> {
        self.deserialize_changed(|_| Ok(()))
    }

    pub(crate) fn deserialize_with_overrides<T: DeserializeOwned>(
        &self,
        overrides: &[Override],
    ) -> Result<T, SpecError> {
        self.deserialize_changed(|table| {
            overrides
                .iter()
                .try_for_each(|change| apply_override(table, change))
        })
    }

    /// The text as a `T` after changes to the values.
    pub(crate) fn deserialize_changed<T: DeserializeOwned>(
        &self,
        change: impl FnOnce(&mut toml::Table) -> Result<(), SpecError>,
    ) -> Result<T, SpecError> {
        let (value, errors) = self.deserialize_usable(change)?;
        match (SpecError::join(errors), value) {
            (None, Some(value)) => Ok(value),
            (error, _) => {
                Err(error.unwrap_or_else(|| SpecError::for_file(self.file, MISSING, "TOML")))
            }
        }
    }

    /// The usable part of the text as a `T`, and the errors of the other fields. A field with an error is left out, so
    /// that the next error is found.
    ///
    /// # Errors
    /// A number out of range, or a change that fails.
    pub(crate) fn deserialize_usable<T: DeserializeOwned>(
        &self,
        change: impl FnOnce(&mut toml::Table) -> Result<(), SpecError>,
    ) -> Result<(Option<T>, Vec<SpecError>), SpecError> {
        // `self.tree` was parsed from the same text, so only a number out of range can fail here.
        let mut table: toml::Table = toml::from_str(self.text)
            .map_err(|error| syntax_error(self.file, self.text, &error))?;
        change(&mut table).map_err(|error| SpecError {
            file: self.file.into(),
            ..error
        })?;

        let mut errors = Vec::new();
        while errors.len() < MAX_ERRORS {
            let deserialized = serde_path_to_error::deserialize(toml::Value::Table(table.clone()));
            let error = match deserialized {
                Ok(value) => return Ok((Some(value), errors)),
                Err(error) => error,
            };
            let path = error.path().to_string();
            let error = self.build_error(
                if path == "." { "" } else { &path },
                error.inner().message(),
            );
            let field = error.field.clone().unwrap_or_default();
            if !errors.iter().any(|earlier| is_consequence(&error, earlier)) {
                errors.push(error);
            }
            if !remove_field(&mut table, &path_segments(&field)) {
                break;
            }
        }
        Ok((None, errors))
    }

    /// An error about a field that was found after parsing.
    pub fn error_at(
        &self,
        field: &str,
        found: impl Into<Box<str>>,
        expected: impl Into<Box<str>>,
    ) -> SpecError {
        SpecError {
            line_column: Some(self.locate_path(field)),
            field: Some(field.into()),
            ..SpecError::for_file(self.file, found, expected)
        }
    }

    /// Splits serde's message into field, found and expected.
    fn build_error(&self, path: &str, message: &str) -> SpecError {
        let message = first_line(message);
        let quoted_name = || message.split('`').nth(1).unwrap_or_default().to_string();
        let field_path = |name: &str| {
            let is_field_name = path == name || path.ends_with(&format!(".{name}"));
            if path.is_empty() || is_field_name {
                name_or(path, name)
            } else {
                format!("{path}.{name}")
            }
        };

        let expected_part = || {
            message
                .split_once(", expected ")
                .map_or("something else", |(_, rest)| rest)
                .to_string()
        };
        if message.starts_with("missing field") {
            return self.error_at(&field_path(&quoted_name()), MISSING, "this field");
        }

        if message.starts_with("unknown field") || message.starts_with("unknown variant") {
            let field = if message.starts_with("unknown field") {
                field_path(&quoted_name())
            } else {
                path.to_string()
            };
            let known_fields: Vec<&str> = message.split('`').skip(3).step_by(2).collect();
            let nearest = nearest_name(&quoted_name(), known_fields.iter().copied()).map(Box::from);
            let found = format!("'{}'", quoted_name());
            return SpecError {
                nearest,
                ..self.error_at(&field, found, expected_part().replace('`', "'"))
            };
        }

        let invalid_part = message
            .strip_prefix("invalid type: ")
            .or_else(|| message.strip_prefix("invalid value: "));
        match invalid_part.and_then(|rest| rest.split_once(", expected ")) {
            Some((found, expected)) => {
                let found = match found {
                    "sequence" => "a list".to_string(),
                    "map" => "a table".to_string(),
                    found => found.replace('`', ""),
                };
                self.error_at(path, found, describe_type(expected, path))
            }
            None => self.error_at(path, message, "a usable value"),
        }
    }

    /// Line and column of the longest prefix of `path` that occurs in the text.
    fn locate_path(&self, path: &str) -> (u32, u32) {
        let mut span = self.tree.span();
        let mut node: Option<&DeValue<'_>> = None;
        for step in path_segments(path) {
            let next_node = match (step, node) {
                (PathSegment::Key(key), None) => self.tree.get_ref().get(key),
                (PathSegment::Key(key), Some(DeValue::Table(table))) => table.get(key),
                (PathSegment::Index(index), Some(DeValue::Array(array))) => array.get(index),
                _ => None,
            };
            let Some(next_node) = next_node else { break };
            span = next_node.span();
            node = Some(next_node.get_ref());
        }
        line_column(self.text, span.start)
    }
}

/// Messages of the parser that name its grammar, each with what an author sees instead: the text found, and the text
/// expected if the parser's own says less.
const REWORDED_SYNTAX: [(&str, &str, &str); 8] = [
    ("invalid basic string", "a string without its end", ""),
    ("invalid literal string", "a string without its end", ""),
    (
        "string values must be quoted",
        "a text without quotes",
        "a string in quotes, a number, true, false, a [list] or a { table }",
    ),
    ("key with no value", "a key without a value", "KEY = VALUE"),
    (
        "duplicate key",
        "a key for the second time",
        "each key once",
    ),
    ("unclosed table", "a table's head without its end", "[NAME]"),
    (
        "unclosed array table",
        "a table's head without its end",
        "[[NAME]]",
    ),
    ("unclosed array", "a list without its end", ""),
];

/// Adds the place to the parser's message, which is like `invalid basic string, expected `"``.
fn syntax_error(file: &str, text: &str, error: &toml::de::Error) -> SpecError {
    let message = first_line(error.message());
    let (found, expected) = message
        .split_once(", expected ")
        .unwrap_or((&message, "TOML"));
    let reworded = REWORDED_SYNTAX.iter().find(|(known, _, _)| *known == found);
    let (found, expected) = reworded.map_or((found, expected), |&(_, found, reworded)| {
        (
            found,
            if reworded.is_empty() {
                expected
            } else {
                reworded
            },
        )
    });

    SpecError {
        line_column: error.span().map(|span| line_column(text, span.start)),
        ..SpecError::for_file(file, found, expected.replace('`', "'"))
    }
}

/// A field may be missing only because an earlier error left it out, or because its name is
/// misspelled.
fn is_consequence(error: &SpecError, earlier: &SpecError) -> bool {
    let (Some(field), Some(earlier_field)) = (&error.field, &earlier.field) else {
        return false;
    };
    let rest = earlier_field.strip_prefix(&**field);
    let is_left_out = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
    let (table, name) = field.rsplit_once('.').unwrap_or(("", field));
    let (earlier_table, _) = earlier_field
        .rsplit_once('.')
        .unwrap_or(("", earlier_field));
    let is_misspelled = table == earlier_table && earlier.nearest.as_deref() == Some(name);
    *error.found == *MISSING && (is_left_out || is_misspelled)
}

/// Removes a field from the values; the field around it if there is none at this path, or if it is an entry of an
/// array, whose further entries must keep their places. Returns whether anything was removed.
fn remove_field(table: &mut toml::Table, segments: &[PathSegment<'_>]) -> bool {
    let [PathSegment::Key(key), inner_segments @ ..] = segments else {
        return false;
    };
    let is_removed_inside = match (table.get_mut(*key), inner_segments) {
        (Some(toml::Value::Table(inner_table)), _) => remove_field(inner_table, inner_segments),
        (Some(toml::Value::Array(entries)), [PathSegment::Index(index), entry_segments @ ..]) => {
            let entry = entries.get_mut(*index).and_then(toml::Value::as_table_mut);
            entry.is_some_and(|entry| remove_field(entry, entry_segments))
        }
        _ => false,
    };
    is_removed_inside || table.remove(*key).is_some()
}

fn name_or(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_string()
    } else {
        path.to_string()
    }
}

/// Replaces Rust's names for types, which mean nothing to the author of a machine, in what the value at this path
/// should be.
fn describe_type(expected: &str, path: &str) -> String {
    match expected.trim_matches('`') {
        "a sequence" => "a list, such as [1, 2]".to_string(),
        "a map" => "a table, such as { name = \"value\" }".to_string(),
        // An entry of a list of tables, each of which has its own head in a file.
        other if other.starts_with("struct ") => match path.rsplit_once('[') {
            Some((list, _)) => format!("a table, below a line [[{list}]]"),
            None => format!("a table, below a line [{path}]"),
        },
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or more".to_string(),
        "i32" | "i64" => "a whole number".to_string(),
        "f32" | "f64" => "a number".to_string(),
        "bool" | "a boolean" => "true or false".to_string(),
        other => other.replace('`', "'"),
    }
}

fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_string()
}

/// Line and column from 1; columns count characters.
fn line_column(text: &str, offset: usize) -> (u32, u32) {
    let boundary = (0..=offset.min(text.len()))
        .rev()
        .find(|&index| text.is_char_boundary(index));
    let prefix = &text[..boundary.unwrap_or(0)];
    let line_start = prefix
        .rfind('\n')
        .map_or(0, |newline_index| newline_index + 1);
    (
        prefix.matches('\n').count() as u32 + 1,
        prefix[line_start..].chars().count() as u32 + 1,
    )
}

enum PathSegment<'a> {
    Key(&'a str),
    Index(usize),
}

/// Splits `caches[2].ways` into its segments.
fn path_segments(path: &str) -> Vec<PathSegment<'_>> {
    let segments = path.split(['.', '[', ']']).filter(|part| !part.is_empty());
    segments
        .map(|part| {
            part.parse()
                .map_or(PathSegment::Key(part), PathSegment::Index)
        })
        .collect()
}
