//! Records a program.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use cachemate_trace::{ChildProcesses, L1Filter, Recorder, RecordingEnd};
use pyo3::exceptions::{PyRuntimeWarning, PyValueError};
use pyo3::prelude::*;

use crate::trace::Trace;
use crate::value_error;

/// Runs a program under Valgrind and records its data accesses to `output`, as `cachemate record` does. The program
/// keeps its standard output and error. Returns the recording; Ctrl-C ends the program and keeps the recorded part.
#[pyfunction]
#[pyo3(signature = (command, output, *, skip_accesses = 0, max_accesses = None, kill_at_max = false, l1 = "32K:8",
                    follow_children = false, force = false))]
#[allow(clippy::too_many_arguments)] // the options of the command
pub fn record(
    py: Python<'_>,
    command: Vec<String>,
    output: PathBuf,
    skip_accesses: u64,
    max_accesses: Option<u64>,
    kill_at_max: bool,
    l1: &str,
    follow_children: bool,
    force: bool,
) -> PyResult<Trace> {
    let mut recorder = Recorder::new(command, &output);
    recorder.skip_accesses = skip_accesses;
    recorder.max_accesses = max_accesses;
    recorder.kill_at_max = kill_at_max;
    recorder.force = force;
    recorder.filter = match l1 {
        "none" => None,
        filter => Some(
            L1Filter::parse(filter).map_err(|why| PyValueError::new_err(format!("l1: {why}")))?,
        ),
    };
    recorder.children = if follow_children {
        ChildProcesses::Follow
    } else {
        ChildProcesses::Ignore
    };
    let interrupt = AtomicBool::new(false);
    // The program gets Ctrl-C as well. Polling the interpreter between batches detects it without installing a handler.
    let recorded = py.detach(|| {
        recorder.run(&interrupt, |_| {
            if Python::attach(|py| py.check_signals().is_err()) {
                interrupt.store(true, Ordering::Relaxed);
            }
        })
    });
    let recorded = recorded.map_err(value_error)?;
    let warning = py.get_type::<PyRuntimeWarning>();
    let warn_in_python = |text: String| -> PyResult<()> {
        let text = std::ffi::CString::new(text).map_err(value_error)?;
        PyErr::warn(py, &warning, &text, 1)
    };
    if let Some(note) = recorded.note {
        warn_in_python(note)?;
    }
    match recorded.recording_end {
        RecordingEnd::Interrupted => {
            return Err(pyo3::exceptions::PyKeyboardInterrupt::new_err(()));
        }
        RecordingEnd::Exit(0) | RecordingEnd::AtMax => {}
        ended => warn_in_python(format!("the recorded program ended with {ended}"))?,
    }
    Trace::open(output, None, None)
}
