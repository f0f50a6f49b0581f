//! The error for a value that a type does not accept.

/// An invalid value, with the place where it stands.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field}: found {found}, expected {expected}")]
pub struct FieldError {
    /// Path of the invalid field, such as `curve[2].bytes`.
    pub field: String,
    /// The invalid value, as text.
    pub found: String,
    /// The allowed values, as text.
    pub expected: String,
}

impl FieldError {
    /// `expected` completes "expected ...", without a period.
    pub fn new(
        field: impl Into<String>,
        found: impl ToString,
        expected: impl Into<String>,
    ) -> Self {
        FieldError {
            field: field.into(),
            found: found.to_string(),
            expected: expected.into(),
        }
    }

    /// Puts `path` before the field; an empty field is the value at `path` itself.
    #[must_use]
    pub fn with_path_prefix(self, path: &str) -> Self {
        let separator = if self.field.is_empty() { "" } else { "." };
        FieldError {
            field: format!("{path}{separator}{}", self.field),
            ..self
        }
    }
}
