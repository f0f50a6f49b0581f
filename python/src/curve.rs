//! Miss-rate curves.

use cachemate_locality::stack::StackError;
use cachemate_report::CurveCounts;
use cachemate_report::figure::{Axis, Chart, ChartPoint, Series};
use cachemate_report::text::{format_number, format_size};
use cachemate_study::{
    CurveRequest, CurveSubject, PartTotals, WholeCurve, check_line_bytes, check_rate, curve_counts,
    curve_counts_from_sample, default_sizes, drop_filtered_sizes, limits_for_sizes,
    refuse_late_bursts,
};
use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::trace::Trace;
use crate::value_error;

/// Miss rates of fully associative LRU caches, by cache size.
#[pyclass(frozen, module = "cachemate")]
pub struct Curve {
    pub name: String,
    pub counts: CurveCounts,
}

impl Curve {
    fn per_point<'py, T: numpy::Element>(
        &self,
        py: Python<'py>,
        metric: impl Fn(&cachemate_report::CurvePoint) -> Option<T>,
    ) -> Option<Bound<'py, PyArray1<T>>> {
        let values: Option<Vec<T>> = self.counts.curve.iter().map(metric).collect();
        Some(PyArray1::from_vec(py, values?))
    }

    fn chart(&self) -> Chart {
        let points = &self.counts.curve;
        let has_mpki = points.iter().all(|point| point.mpki.is_some());
        let (label, unit) = if has_mpki {
            ("misses per 1000 instructions", "MPKI")
        } else {
            ("misses, % of accesses", "%")
        };
        let shown_points = points.iter().map(|point| {
            let y = point.mpki.unwrap_or(100.0 * point.miss_ratio);
            // Both are the ratio in another unit.
            let scale = if point.miss_ratio > 0.0 {
                y / point.miss_ratio
            } else {
                0.0
            };
            let error_interval = |error: f64| {
                (
                    (point.miss_ratio - error).max(0.0) * scale,
                    (point.miss_ratio + error) * scale,
                )
            };
            let title = Some(format!(
                "{}: {} {unit} with {}",
                self.name,
                format_number(y),
                format_size(point.bytes)
            ));
            ChartPoint {
                x: point.bytes as f64,
                y,
                interval: point.miss_ratio_error.map(error_interval),
                title,
            }
        });
        let series = Series {
            name: self.name.clone(),
            points: shown_points.collect(),
            ..Series::default()
        };
        let (x, y) = (Axis::bytes("cache to itself"), Axis::linear(label));
        Chart {
            title: self.name.clone(),
            x,
            y,
            series: vec![series],
            ..Chart::default()
        }
    }
}

#[pymethods]
impl Curve {
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Cache sizes in bytes, ascending.
    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_iter(py, self.counts.curve.iter().map(|point| point.bytes))
    }

    /// Misses divided by accesses, 0 to 1.
    #[getter]
    fn misses_per_access<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_iter(py, self.counts.curve.iter().map(|point| point.miss_ratio))
    }

    /// Misses per thousand instructions; `None` if the trace has no instruction counts.
    #[getter]
    fn mpki<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<f64>>> {
        self.per_point(py, |point| point.mpki)
    }

    /// Half the width of the 95 % interval of `misses_per_access`; `None` if the curve is exact or samples too few
    /// lines.
    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<f64>>> {
        self.per_point(py, |point| point.miss_ratio_error)
    }

    #[getter]
    fn accesses(&self) -> u64 {
        self.counts.accesses
    }

    /// Number of distinct lines; `None` for a sampled curve, which follows only some of the lines, and for one from bursts.
    #[getter]
    fn distinct_lines(&self) -> Option<u64> {
        self.counts.cold
    }

    #[getter]
    fn instructions(&self) -> Option<u64> {
        self.counts.instructions
    }

    fn __repr__(&self) -> String {
        let CurveCounts {
            accesses, curve, ..
        } = &self.counts;
        format!(
            "<cachemate.Curve of {}: {} sizes, {accesses} accesses>",
            self.name,
            curve.len()
        )
    }

    /// Draws the curve with Matplotlib into `ax`, or into new axes, and returns the axes.
    #[pyo3(signature = (ax = None))]
    fn plot<'py>(
        slf: &Bound<'py, Self>,
        ax: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("cachemate.plotting")?
            .call_method1("curve", (slf, ax))
    }

    /// The same picture as in reports.
    fn _repr_svg_(&self) -> String {
        self.chart().svg()
    }
}

/// The miss-rate curve of a trace: exact, or from a share of the lines with error bars.
#[pyfunction]
#[pyo3(signature = (trace, *, sizes = None, line_bytes = 64, sample = None, seed = 0, threads = None))]
pub fn mrc(
    py: Python<'_>,
    trace: &Trace,
    sizes: Option<Vec<u64>>,
    line_bytes: u32,
    sample: Option<f64>,
    seed: u64,
    threads: Option<usize>,
) -> PyResult<Curve> {
    let in_field = |field: &'static str| {
        move |problem: String| PyValueError::new_err(format!("{field}: {problem}"))
    };
    check_line_bytes(line_bytes).map_err(in_field("line_bytes"))?;
    if let Some(found) = threads.filter(|threads| !(1..=64).contains(threads)) {
        return Err(in_field("threads")(format!(
            "found {found}, expected 1 to 64"
        )));
    }
    let mut sizes = sizes.unwrap_or_else(default_sizes);
    sizes.sort_unstable();
    sizes.dedup();
    let mut reading = trace.read()?;
    reading
        .header()
        .check_lines(line_bytes)
        .map_err(in_field("line_bytes"))?;
    if let Some(filter_bytes) =
        drop_filtered_sizes(&mut sizes, &reading.header()).filter(|_| sizes.is_empty())
    {
        let problem = format!(
            "found none of at least {filter_bytes} bytes, the size of the recorder's filter"
        );
        return Err(in_field("sizes")(problem));
    }
    if sample.is_some() && !reading.burst_starts().is_empty() {
        return Err(in_field("sample")(
            "found a recording in bursts, expected one without gaps".to_string(),
        ));
    }
    let subject = match sample {
        Some(rate) => {
            check_rate(rate).map_err(in_field("sample"))?;
            CurveSubject::Sample { rate, seed }
        }
        None => CurveSubject::All,
    };
    let limits = limits_for_sizes(&sizes, line_bytes);
    let request = CurveRequest::new(subject, line_bytes, limits, threads).map_err(value_error)?;
    let bursts = reading.burst_starts();
    let mut measurement = request.begin(reading.expected(), &bursts);
    let mut batch = Vec::new();
    while reading.next_addresses(py, &mut batch)? {
        py.detach(|| measurement.push_addresses(&mut batch))
            .map_err(value_error)?;
    }
    refuse_late_bursts(&bursts, reading.totals().as_ref()).map_err(value_error)?;
    let part_totals = PartTotals::from_totals(
        reading.totals().as_ref(),
        reading.header().instructions_known,
    );
    let counts = py.detach(|| {
        let whole = measurement.finish()?.whole;
        Ok::<_, StackError>(match whole {
            WholeCurve::Exact(distances) => {
                curve_counts(&distances, part_totals, &sizes, line_bytes)
            }
            WholeCurve::Sampled(curve) => {
                curve_counts_from_sample(&curve, part_totals, &sizes, line_bytes)
            }
        })
    });
    let counts = counts.map_err(value_error)?;
    if counts.accesses == 0 {
        return Err(value_error(format!(
            "{}: found no accesses, expected at least one",
            trace.name
        )));
    }
    Ok(Curve {
        name: trace.name.clone(),
        counts,
    })
}
