//! Parses the parameters of policies from TOML, and checks their ranges.

use std::fmt::Display;

use serde::de::DeserializeOwned;

/// The error for parameters that a policy does not accept.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParameterError {
    /// The TOML is invalid, or a name is unknown, or a value has the wrong type. Contains the TOML parser's message,
    /// with line and column.
    #[error("{}", .0.to_string().trim_end())]
    Toml(Box<toml::de::Error>),
    /// A value is outside its range.
    #[error("{name}: found {found}, expected {expected}")]
    Value {
        /// Name of the parameter, with its position in tables and lists.
        name: String,
        /// The given value.
        found: String,
        /// A description of the accepted values.
        expected: String,
    },
}

impl ParameterError {
    /// Builds the error for a value outside its range.
    pub fn invalid_value(name: impl Display, found: impl Display, expected: impl Display) -> Self {
        ParameterError::Value {
            name: name.to_string(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }
}

/// Parses a policy's parameters from TOML. The type must have `#[serde(deny_unknown_fields, default)]`.
///
/// # Errors
/// The TOML is invalid, a name is unknown, or a value has the wrong type.
pub fn parse_parameters<T: DeserializeOwned>(text: &str) -> Result<T, ParameterError> {
    toml::from_str(text).map_err(|error| ParameterError::Toml(Box::new(error)))
}

/// The range of accepted values of a parameter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ParameterRange {
    /// Integers above 0.
    OneOrMore,
    /// Finite numbers above this bound.
    Above(f64),
    /// Finite numbers, 0 or more.
    FromZero,
    /// Numbers of 0 or more; infinity means no limit.
    FromZeroUnlimited,
    /// Numbers from 0 to this bound.
    UpTo(f64),
    /// Numbers above 0 and at most 1.
    PositiveShare,
}

impl ParameterRange {
    fn contains(self, value: f64) -> bool {
        match self {
            ParameterRange::OneOrMore => value >= 1.0,
            ParameterRange::Above(bound) => value.is_finite() && value > bound,
            ParameterRange::FromZero => value.is_finite() && value >= 0.0,
            ParameterRange::FromZeroUnlimited => value >= 0.0,
            ParameterRange::UpTo(bound) => (0.0..=bound).contains(&value),
            ParameterRange::PositiveShare => value > 0.0 && value <= 1.0,
        }
    }

    fn describe(self) -> String {
        match self {
            ParameterRange::OneOrMore => "1 or more".to_string(),
            ParameterRange::Above(bound) => format!("a number above {bound}"),
            ParameterRange::FromZero => "a number from 0 up".to_string(),
            ParameterRange::FromZeroUnlimited => "0 or more".to_string(),
            ParameterRange::UpTo(bound) => format!("0 to {bound}"),
            ParameterRange::PositiveShare => "more than 0, at most 1".to_string(),
        }
    }

    /// Checks values with their names.
    ///
    /// # Errors
    /// Names the first value outside the range.
    pub fn check<'a>(
        self,
        values: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> Result<(), ParameterError> {
        match values.into_iter().find(|(_, value)| !self.contains(*value)) {
            Some((name, value)) => Err(ParameterError::invalid_value(name, value, self.describe())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does every range accept its bounds as documented, and reject values beyond them and NaN?
    #[test]
    fn ranges_accept_their_bounds_and_reject_values_beyond() {
        use ParameterRange::{Above, FromZero, FromZeroUnlimited, OneOrMore, PositiveShare, UpTo};
        let table: [(ParameterRange, &[f64], &[f64]); 6] = [
            (OneOrMore, &[1.0, 1e18], &[0.0]),
            (Above(1.0), &[1.1], &[1.0, f64::INFINITY]),
            (FromZero, &[0.0, 3.0], &[-1e-9, f64::INFINITY]),
            (FromZeroUnlimited, &[0.0, f64::INFINITY], &[-1e-9]),
            (UpTo(10.0), &[0.0, 10.0], &[-1e-9, 10.1]),
            (PositiveShare, &[1e-9, 1.0], &[0.0, 1.1]),
        ];

        for (range, accepted, refused) in table {
            accepted.iter().for_each(|&value| {
                assert!(range.check([("x", value)]).is_ok(), "{range:?} {value}")
            });
            for &value in refused.iter().chain(&[f64::NAN]) {
                let error = range
                    .check([("fine", accepted[0]), ("x", value)])
                    .unwrap_err()
                    .to_string();
                assert_eq!(
                    error,
                    format!("x: found {value}, expected {}", range.describe())
                );
            }
        }
    }
}
