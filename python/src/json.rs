//! Converts values between Rust and Python through the JSON that the command prints.

use pyo3::prelude::*;
use pyo3::types::{PyAnyMethods, PyDict};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::value_error;

/// Converts a value to dictionaries, lists, numbers and strings.
pub fn to_python<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    from_text(py, &serde_json::to_string(value).map_err(value_error)?)
}

/// Converts JSON text to dictionaries, lists, numbers and strings.
pub fn from_text<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (text,))
}

/// Converts a Python value to Rust; `subject` names the value in errors. NumPy's numbers and arrays count as numbers
/// and lists.
pub fn from_python<T: DeserializeOwned>(value: &Bound<'_, PyAny>, subject: &str) -> PyResult<T> {
    let py = value.py();
    let options = PyDict::new(py);
    options.set_item(
        "default",
        py.import("operator")?
            .call_method1("methodcaller", ("tolist",))?,
    )?;
    let text = py
        .import("json")?
        .call_method("dumps", (value,), Some(&options));
    let text: String = text
        .map_err(|error| value_error(format!("{subject}: {error}")))?
        .extract()?;
    serde_json::from_str(&text).map_err(|error| value_error(format!("{subject}: {error}")))
}
