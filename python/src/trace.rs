//! Traces: arrays and files that are read in pieces.

use std::path::PathBuf;

use cachemate_trace::{AccessRecord, Format, TraceHeader, TraceReader, TraceTotals};
use numpy::ndarray::s;
use numpy::{PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::value_error;

/// Number of values that are copied at once: 512 KiB, which fit the second-level cache of most hosts.
const PIECE: usize = 1 << 16;

/// The source of the accesses.
enum TraceSource {
    Array {
        addresses: Py<PyArray1<u64>>,
        instructions: Option<Py<PyArray1<u64>>>,
    },
    File {
        path: String,
        format: Option<Format>,
    },
}

/// The accesses of a program, in order.
#[pyclass(frozen, module = "cachemate")]
pub struct Trace {
    source: TraceSource,
    /// Name of the trace in profiles and pictures.
    pub name: String,
    accesses: Option<u64>,
}

#[pymethods]
impl Trace {
    /// A trace from byte addresses, one 64-bit integer for each access. `instructions[i]` is the number of
    /// instructions executed since access `i - 1`, including the one that makes access `i`.
    #[staticmethod]
    #[pyo3(signature = (addresses, *, instructions = None, name = "array"))]
    fn from_numpy(
        addresses: &Bound<'_, PyAny>,
        instructions: Option<&Bound<'_, PyAny>>,
        name: &str,
    ) -> PyResult<Self> {
        let addresses = as_integers(addresses, "addresses")?;
        let instructions = instructions
            .map(|array| as_integers(array, "instructions"))
            .transpose()?;
        let count = addresses.len();
        if let Some(found) = instructions
            .as_ref()
            .map(|array| array.len())
            .filter(|found| *found != count)
        {
            let message = format!(
                "instructions: found {found} values, expected {count}, one for each address"
            );
            return Err(PyValueError::new_err(message));
        }
        let source = TraceSource::Array {
            addresses: addresses.unbind(),
            instructions: instructions.map(Bound::unbind),
        };
        Ok(Trace {
            source,
            name: name.to_string(),
            accesses: Some(count as u64),
        })
    }

    /// Opens a file in any format that the command reads. Without `format`, content and name determine the format.
    #[staticmethod]
    #[pyo3(signature = (path, *, format = None, name = None))]
    pub fn open(path: PathBuf, format: Option<&str>, name: Option<String>) -> PyResult<Self> {
        let format = format
            .map(|name| name.parse::<Format>().map_err(value_error))
            .transpose()?;
        let path_text = path
            .to_str()
            .ok_or_else(|| value_error(format!("{}: expected a name in UTF-8", path.display())))?;
        let reader = cachemate_trace::open(path_text, format).map_err(value_error)?;
        let accesses = reader.totals().map(|totals| totals.records);
        let file_name = path
            .file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let first_part = || {
            file_name
                .split('.')
                .next()
                .filter(|part| !part.is_empty())
                .unwrap_or(&file_name)
                .to_string()
        };
        let name = name.unwrap_or_else(first_part);
        Ok(Trace {
            source: TraceSource::File {
                path: path_text.to_string(),
                format,
            },
            name,
            accesses,
        })
    }

    /// Number of accesses; `None` if it is unknown before the trace is read.
    #[getter]
    fn accesses(&self) -> Option<u64> {
        self.accesses
    }

    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The addresses of the trace: its array, or an array that is read from its file.
    fn addresses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        if let TraceSource::Array { addresses, .. } = &self.source {
            return Ok(addresses.bind(py).clone());
        }
        let (mut addresses, mut batch) = (
            Vec::with_capacity(self.accesses.unwrap_or(0).min(1 << 27) as usize),
            Vec::new(),
        );
        let mut reading = self.read()?;
        while reading.next_addresses(py, &mut batch)? {
            addresses.extend_from_slice(&batch);
        }
        Ok(PyArray1::from_vec(py, addresses))
    }

    fn __repr__(&self) -> String {
        let count = self
            .accesses
            .map_or("unknown number of".to_string(), |count| count.to_string());
        format!("<cachemate.Trace {}: {count} accesses>", self.name)
    }
}

/// Views the given array as unsigned integers, without copying.
fn as_integers<'py>(
    value: &Bound<'py, PyAny>,
    subject: &str,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    let py = value.py();
    let Ok(array) = value.cast::<PyUntypedArray>() else {
        let found = value.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "{subject}: found {found}, expected a NumPy array"
        )));
    };
    if array.ndim() != 1 {
        let found = array.ndim();
        return Err(PyValueError::new_err(format!(
            "{subject}: found {found} dimensions, expected one"
        )));
    }
    let dtype = array.dtype();
    if dtype.is_equiv_to(&numpy::dtype::<i64>(py)) {
        return Ok(value.call_method1("view", ("uint64",))?.cast_into()?);
    }
    if !dtype.is_equiv_to(&numpy::dtype::<u64>(py)) {
        let found = dtype.str()?;
        return Err(PyTypeError::new_err(format!(
            "{subject}: found values of {found}, expected uint64 or int64"
        )));
    }
    Ok(value.clone().cast_into()?)
}

/// One pass over the accesses of a trace.
pub struct TracePass<'t> {
    trace: &'t Trace,
    position: usize,
    reader: Option<Box<dyn TraceReader>>,
    /// Sum of instructions so far, for arrays; readers of files compute their own sums.
    instructions: Option<u64>,
}

impl Trace {
    /// Starts a pass at the beginning.
    pub fn read(&self) -> PyResult<TracePass<'_>> {
        let (reader, instructions) = match &self.source {
            TraceSource::Array { instructions, .. } => (None, instructions.as_ref().map(|_| 0)),
            TraceSource::File { path, format } => (
                Some(cachemate_trace::open(path, *format).map_err(value_error)?),
                None,
            ),
        };
        Ok(TracePass {
            trace: self,
            position: 0,
            reader,
            instructions,
        })
    }

    /// Source of the trace, as profiles record it.
    pub fn from(&self) -> &str {
        match &self.source {
            TraceSource::Array { .. } => "array",
            TraceSource::File { path, .. } => path,
        }
    }
}

impl TracePass<'_> {
    /// Reads the next addresses; returns `false` at the end. Ctrl-C raises `KeyboardInterrupt`.
    pub fn next_addresses(&mut self, py: Python<'_>, batch: &mut Vec<u64>) -> PyResult<bool> {
        py.check_signals()?;
        if let Some(reader) = &mut self.reader {
            return py
                .detach(|| reader.read_addresses(batch))
                .map_err(value_error);
        }
        let TraceSource::Array {
            addresses,
            instructions,
        } = &self.trace.source
        else {
            return Ok(false);
        };
        batch.clear();
        visit_chunk(addresses.bind(py), self.position, |part| batch.extend(part))?;
        self.count_gaps(py, instructions.as_ref())?;
        self.position += batch.len();
        Ok(!batch.is_empty())
    }

    /// Reads the next records; see [`TracePass::next_addresses`].
    pub fn next_records(
        &mut self,
        py: Python<'_>,
        batch: &mut Vec<AccessRecord>,
    ) -> PyResult<bool> {
        py.check_signals()?;
        if let Some(reader) = &mut self.reader {
            return py.detach(|| reader.read_batch(batch)).map_err(value_error);
        }
        let TraceSource::Array {
            addresses,
            instructions,
        } = &self.trace.source
        else {
            return Ok(false);
        };
        batch.clear();
        let record_at = |&address: &u64| AccessRecord {
            address,
            ..AccessRecord::default()
        };
        visit_chunk(addresses.bind(py), self.position, |part| {
            batch.extend(part.map(record_at))
        })?;
        if let Some(instructions) = instructions {
            let gaps = |part: ArrayChunk<'_>| {
                batch
                    .iter_mut()
                    .zip(part)
                    .for_each(|(record, gap)| record.gap = *gap)
            };
            visit_chunk(instructions.bind(py), self.position, gaps)?;
        }
        self.count_gaps(py, instructions.as_ref())?;
        self.position += batch.len();
        Ok(!batch.is_empty())
    }

    fn count_gaps(&mut self, py: Python<'_>, gaps: Option<&Py<PyArray1<u64>>>) -> PyResult<()> {
        let (Some(sum), Some(gaps)) = (&mut self.instructions, gaps) else {
            return Ok(());
        };
        visit_chunk(gaps.bind(py), self.position, |part| {
            *sum = part.fold(*sum, |sum, gap| sum.saturating_add(*gap))
        })
    }

    /// Metadata of the trace.
    pub fn header(&self) -> TraceHeader {
        let of_array = || TraceHeader::for_import("array", self.instructions.is_some());
        self.reader
            .as_ref()
            .map_or_else(of_array, |reader| reader.header().clone())
    }

    /// Sums over the whole trace, available after the end of the pass; `None` if unknown.
    pub fn totals(&self) -> Option<TraceTotals> {
        match &self.reader {
            Some(reader) => reader.totals().cloned(),
            None => {
                let (records, instructions) = (self.position as u64, self.instructions);
                Some(TraceTotals {
                    records,
                    program_accesses: Some(records),
                    instructions,
                    ..TraceTotals::default()
                })
            }
        }
    }

    /// First records of the recording's bursts; empty for a recording without gaps.
    pub fn burst_starts(&self) -> Vec<u64> {
        self.totals()
            .map(|totals| totals.bursts)
            .unwrap_or_default()
    }

    /// Number of accesses of the whole trace; 0 if unknown.
    pub fn expected(&self) -> u64 {
        self.trace.accesses.unwrap_or(0)
    }
}

type ArrayChunk<'a> = numpy::ndarray::iter::Iter<'a, u64, numpy::ndarray::Ix1>;

/// Calls `visit` on one piece of the array, while the interpreter's lock is held.
fn visit_chunk(
    array: &Bound<'_, PyArray1<u64>>,
    start: usize,
    visit: impl FnOnce(ArrayChunk<'_>),
) -> PyResult<()> {
    let borrowed = array.try_readonly().map_err(value_error)?;
    let elements = borrowed.as_array();
    // The array may have become shorter since the pass began.
    let end = elements.len().min(start.saturating_add(PIECE));
    visit(elements.slice(s![start.min(end)..end]).iter());
    Ok(())
}
