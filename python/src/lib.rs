//! The Python package cachemate: traces, curves, profiles, predictions, plans, scenarios and run logs.
//!
//! Long calls work in pieces. Between two pieces they acquire the interpreter's lock, check for Ctrl-C, and copy the
//! next piece of an array. If another thread writes to the array during a call, only the result is affected.

mod curve;
mod json;
mod plan;
mod profile;
mod record;
mod run;
mod run_log;
mod trace;

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    cachemate,
    CachemateError,
    PyException,
    "What went wrong, with the place: file, line or field."
);

/// Converts an error of the libraries to a Python exception.
fn value_error(error: impl std::fmt::Display) -> PyErr {
    CachemateError::new_err(error.to_string())
}

/// Names of the bundled machines.
#[pyfunction]
fn machines() -> Vec<&'static str> {
    cachemate_spec::machine_names()
}

/// Names of the slowdown models.
#[pyfunction]
fn models() -> Vec<&'static str> {
    let schemes = cachemate_papers::schemes::all_schemes();
    std::iter::once("interval")
        .chain(schemes.iter().map(|scheme| scheme.name()))
        .collect()
}

#[pymodule]
fn _cachemate(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("CachemateError", module.py().get_type::<CachemateError>())?;
    module.add_class::<trace::Trace>()?;
    module.add_class::<curve::Curve>()?;
    module.add_class::<profile::Profile>()?;
    module.add_class::<plan::Matrix>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<run_log::RunLog>()?;
    module.add_class::<run_log::RunLogWindows>()?;
    module.add_function(wrap_pyfunction!(machines, module)?)?;
    module.add_function(wrap_pyfunction!(models, module)?)?;
    module.add_function(wrap_pyfunction!(curve::mrc, module)?)?;
    module.add_function(wrap_pyfunction!(profile::profile, module)?)?;
    module.add_function(wrap_pyfunction!(plan::predict, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan, module)?)?;
    module.add_function(wrap_pyfunction!(record::record, module)?)?;
    module.add_function(wrap_pyfunction!(run::simulate, module)?)?;
    Ok(())
}
