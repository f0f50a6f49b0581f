//! Profiles: the cache use of one program.

use std::path::PathBuf;

use cachemate_report::CurveCounts;
use cachemate_study::{ProfilePass, ProfileTarget, whole_curve, whole_distances};
use cachemate_trace::ProfileFile;
use pyo3::prelude::*;

use crate::curve::Curve;
use crate::json::to_python;
use crate::trace::Trace;
use crate::value_error;

/// The cache use of one program: the content of a profile file.
#[pyclass(frozen, module = "cachemate")]
pub struct Profile {
    pub file: ProfileFile,
}

#[pymethods]
impl Profile {
    /// Reads a profile file that `cachemate profile` wrote.
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        Ok(Profile {
            file: ProfileFile::read(path).map_err(value_error)?,
        })
    }

    /// Writes a profile file; replaces an existing one only with `force`.
    #[pyo3(signature = (path, *, force = false))]
    fn write(&self, path: PathBuf, force: bool) -> PyResult<()> {
        self.file.write(path, force).map_err(value_error)
    }

    #[getter]
    fn name(&self) -> &str {
        &self.file.program
    }

    /// Data accesses of the program before any filter; `None` if the trace does not contain their number.
    #[getter]
    fn accesses(&self) -> Option<u64> {
        self.file.accesses
    }

    #[getter]
    fn instructions(&self) -> Option<u64> {
        self.file.instructions
    }

    /// The curve of all threads together; `None` if the profile has none.
    #[getter]
    fn curve(&self) -> Option<Curve> {
        let curve = whole_curve(&self.file)?;
        let counts = CurveCounts {
            accesses: self.file.records.or(self.file.accesses)?,
            program_accesses: self.file.accesses,
            instructions: self.file.instructions,
            cold: whole_distances(&self.file).map(|histogram| histogram.cold),
            curve,
        };
        Some(Curve {
            name: self.file.program.clone(),
            counts,
        })
    }

    /// The content of the profile file as a dictionary.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.file)
    }

    fn __repr__(&self) -> String {
        format!("<cachemate.Profile {}>", self.file.program)
    }
}

/// Profiles a trace for the shared cache of a machine, or for a typical cache without a machine.
#[pyfunction]
#[pyo3(signature = (trace, machine = None, *, name = None))]
pub fn profile(
    py: Python<'_>,
    trace: &Trace,
    machine: Option<&str>,
    name: Option<&str>,
) -> PyResult<Profile> {
    let machine = machine
        .map(cachemate_spec::load_machine)
        .transpose()
        .map_err(value_error)?;
    let target = machine
        .as_ref()
        .map(ProfileTarget::from_machine)
        .transpose()
        .map_err(value_error)?;
    let mut reading = trace.read()?;
    let profiling = ProfilePass::new(target, reading.expected(), &reading.burst_starts());
    let mut profiling = profiling.map_err(value_error)?;
    let mut records = Vec::new();
    while reading.next_records(py, &mut records)? {
        py.detach(|| profiling.push(&records))
            .map_err(value_error)?;
    }
    let (header, totals) = (reading.header(), reading.totals());
    let name = name.unwrap_or(&trace.name);
    let profile = py.detach(|| profiling.finish(name, trace.from(), &header, totals.as_ref()));
    Ok(Profile {
        file: profile.map_err(value_error)?,
    })
}
