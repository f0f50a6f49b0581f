//! The Python package cachemate: traces, curves, profiles, predictions, plans, scenarios and run
//! logs.
//!
//! Whoever explores curves wants arrays and notebooks, but an interpreter has one lock: a call that
//! holds it for a minute stops every other thread, and Ctrl-C with them. So long calls work in
//! pieces. Between two pieces they acquire the lock, check for Ctrl-C, and copy the next piece of
//! an array.
//!
//! For example, `cachemate.mrc` of 16 million addresses copies 512 KiB of the array at a time.
//! Copying it whole would need 128 MB more, and reading it in place without the lock would race
//! with whoever writes to it; if another thread does so during a call, only the result is affected.
//!
//! # Invariants
//! - Absent values are `None`, never zero, and answers are the command's.
//! - No long call holds the interpreter's lock while it computes.
//! - Errors are `CachemateError` with file, line or field; wrong arguments raise `ValueError` or
//!   `TypeError`.

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
