//! Run logs: recorded runs, window by window.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use cachemate_page::{ServiceSnapshot, Snapshot, page_html, read_recording};
use cachemate_trace::RunLogReader;
use pyo3::prelude::*;
use serde::Serialize;

use crate::json::to_python;
use crate::value_error;

/// The services of one window.
#[derive(Serialize)]
struct WindowServices {
    window: u64,
    at_s: f64,
    services: Vec<ServiceSnapshot>,
}

/// A recorded run.
#[pyclass(frozen, module = "cachemate")]
pub struct RunLog {
    path: PathBuf,
}

#[pymethods]
impl RunLog {
    #[new]
    fn new(path: PathBuf) -> PyResult<Self> {
        RunLogReader::open(&path).map_err(value_error)?;
        Ok(RunLog { path })
    }

    /// Topology, capabilities and pipeline.
    #[getter]
    fn header<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(
            py,
            RunLogReader::open(&self.path)
                .map_err(value_error)?
                .header(),
        )
    }

    /// A new iteration begins at the first window.
    fn __iter__(&self) -> PyResult<RunLogWindows> {
        Ok(RunLogWindows {
            reader: Mutex::new(RunLogReader::open(&self.path).map_err(value_error)?),
        })
    }

    /// The services of each window, with slowdowns and causes, as dictionaries of `window`, `at_s` and `services`.
    fn services<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let windows = py.detach(|| {
            let log = RunLogReader::open(&self.path).map_err(|error| error.to_string())?;
            let run = read_recording(log, "").map_err(|error| error.to_string())?;
            let window_services = |snapshot: Snapshot| {
                let Snapshot {
                    window,
                    at_s,
                    services,
                    ..
                } = snapshot;
                WindowServices {
                    window,
                    at_s,
                    services,
                }
            };
            Ok::<_, String>(
                run.snapshots
                    .into_iter()
                    .map(window_services)
                    .collect::<Vec<_>>(),
            )
        });
        to_python(py, &windows.map_err(value_error)?)
    }

    /// The dashboard with the recorded run, as one HTML file.
    fn page(&self, py: Python<'_>) -> PyResult<String> {
        let name = self
            .path
            .file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let html = py.detach(|| {
            let log = RunLogReader::open(&self.path).map_err(|error| error.to_string())?;
            let run = read_recording(log, &name).map_err(|error| error.to_string())?;
            page_html(Some(&run)).map_err(|error| error.to_string())
        });
        html.map_err(value_error)
    }

    fn __repr__(&self) -> String {
        format!("<cachemate.RunLog {}>", self.path.display())
    }
}

/// Iterator over the windows of a run log.
#[pyclass(frozen, module = "cachemate")]
pub struct RunLogWindows {
    reader: Mutex<RunLogReader>,
}

#[pymethods]
impl RunLogWindows {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let record = py.detach(|| {
            self.reader
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .next_record()
        });
        record
            .map_err(value_error)?
            .map(|record| to_python(py, &record))
            .transpose()
    }
}
