//! Results of sweeps that `cachemate sweep run` has produced.

use std::path::PathBuf;

use cachemate_report::figure::STYLE;
use cachemate_sweep::{Store, collect_report, read_status};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::json::{from_text, to_python};
use crate::value_error;

/// A sweep's directory. Every call reads it again, because other processes may change it.
#[pyclass(frozen, module = "cachemate")]
pub struct Sweep {
    dir: PathBuf,
}

impl Sweep {
    fn store(&self) -> PyResult<Store> {
        Store::open_to_read(&self.dir).map_err(value_error)
    }
}

#[pymethods]
impl Sweep {
    #[new]
    fn new(dir: PathBuf) -> PyResult<Self> {
        let sweep = Sweep { dir };
        sweep.store()?.manifest().map_err(value_error)?;
        Ok(sweep)
    }

    /// The progress, as `cachemate sweep status --json` prints it.
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &read_status(&self.store()?).map_err(value_error)?)
    }

    /// Figures over the seeds, as `cachemate sweep report --json` prints them.
    #[getter]
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &collect_report(&self.store()?).map_err(value_error)?)
    }

    /// A dictionary with `id`, `point` and `result` for each finished task, in the order of the manifest.
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let store = self.store()?;
        let rows = PyList::empty(py);
        for task in store.manifest().map_err(value_error)?.tasks {
            py.check_signals()?;
            if let Some(task_result) = store.read(task.id).map_err(value_error)? {
                let (id, point, result) = (task.id, &task.point, task_result.result.get());
                rows.append(from_text(
                    py,
                    &format!("{{\"id\":\"{id}\",\"point\":{point},\"result\":{result}}}"),
                )?)?;
            }
        }
        Ok(rows)
    }

    fn __repr__(&self) -> String {
        format!("<cachemate.Sweep {}>", self.dir.display())
    }

    /// The pictures of the sweep's report.
    fn _repr_html_(&self) -> PyResult<String> {
        let report = collect_report(&self.store()?).map_err(value_error)?;
        let pictures: String = report
            .pictures
            .iter()
            .map(|picture| picture.inline.as_str())
            .collect();
        Ok(format!("<style>{STYLE}</style>{pictures}"))
    }
}
