//! Predicted slowdowns, and plans.

use std::collections::BTreeMap;

use cachemate_core::MachineSpec;
use cachemate_forecast::{self as forecast, TimedProgram};
use cachemate_papers::matrix::PairCosts;
use cachemate_papers::placement::{Placement, place};
use cachemate_papers::schemes::{self as models, SharedCache};
use cachemate_report::text::{escape_controls, format_fixed, format_number, value_or_dash};
use cachemate_report::{CostTable, PlanResult};
use cachemate_study::{ProfileTarget, cost_table, pair_costs, plan_result, profile_for_target};
use numpy::PyArray2;
use pyo3::prelude::*;

use crate::json::to_python;
use crate::profile::Profile;
use crate::value_error;

/// The default model of `cachemate predict`.
const INTERVAL_MODEL: &str = "interval";

/// Predicted slowdown of each row's program when it shares the cache with the column's.
#[pyclass(frozen, module = "cachemate")]
pub struct Matrix {
    table: CostTable,
}

fn to_array<'py>(
    py: Python<'py>,
    rows: &[Vec<Option<f64>>],
) -> PyResult<Bound<'py, PyArray2<f64>>> {
    let row = |row: &Vec<Option<f64>>| row.iter().map(|value| value.unwrap_or(f64::NAN)).collect();
    PyArray2::from_vec2(py, &rows.iter().map(row).collect::<Vec<_>>()).map_err(value_error)
}

#[pymethods]
impl Matrix {
    #[getter]
    fn names(&self) -> Vec<String> {
        self.table.names.clone()
    }

    /// Square matrix of slowdowns by row and column; if the unit is `percent`, 28 means 28 % slower.
    #[getter]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f64>>> {
        to_array(py, &self.table.values)
    }

    /// Lower ends of the 90 % intervals; `None` if the model has no intervals.
    #[getter]
    fn low<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray2<f64>>>> {
        self.table
            .low
            .as_ref()
            .map(|rows| to_array(py, rows))
            .transpose()
    }

    /// Upper ends of the 90 % intervals; `None` if the model has no intervals.
    #[getter]
    fn high<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray2<f64>>>> {
        self.table
            .high
            .as_ref()
            .map(|rows| to_array(py, rows))
            .transpose()
    }

    /// Unit of the values: `percent`, or `weight`, a cost without a unit of which more is worse.
    #[getter]
    fn unit(&self) -> &str {
        &self.table.unit
    }

    #[getter]
    fn model(&self) -> &str {
        &self.table.model
    }

    /// Draws the matrix with Matplotlib into `ax`, or into new axes, and returns the axes.
    #[pyo3(signature = (ax = None))]
    fn plot<'py>(
        slf: &Bound<'py, Self>,
        ax: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("cachemate.plotting")?
            .call_method1("matrix", (slf, ax))
    }

    fn __repr__(&self) -> String {
        format!(
            "<cachemate.Matrix of {} programs by {}>",
            self.table.names.len(),
            self.table.model
        )
    }

    /// The same picture as in reports.
    fn _repr_svg_(&self) -> String {
        let unit = if self.table.unit == "percent" {
            "slowdown in %"
        } else {
            "weight"
        };
        let mut picture = self.table.heat_map();
        picture.title = format!("{unit}, by {}", self.table.model);
        picture.svg()
    }
}

/// The predicted costs of programs on the shared cache of a machine.
struct PredictedCosts {
    machine: MachineSpec,
    costs: PairCosts,
    matrix: Matrix,
    /// Timing of the programs; only the interval model has it.
    timed: Option<Vec<TimedProgram>>,
}

/// Predicts the costs of programs on the shared cache of a machine.
fn costs_of(
    py: Python<'_>,
    programs: &[PyRef<'_, Profile>],
    machine: &str,
    model: &str,
) -> PyResult<PredictedCosts> {
    let machine = cachemate_spec::load_machine(machine).map_err(value_error)?;
    let names: Vec<String> = programs
        .iter()
        .map(|program| escape_controls(&program.file.program))
        .collect();
    if model == INTERVAL_MODEL {
        let timed = time_programs(py, programs, &machine)?;
        let pairs =
            py.detach(|| forecast::forecast_pairs(&machine, &timed.iter().collect::<Vec<_>>()));
        let intervals = pairs.map_err(value_error)?;
        let costs = forecast::costs_of_pairs(&intervals);
        let matrix = Matrix {
            table: cost_table(&names, model, &costs, Some(&intervals)),
        };
        return Ok(PredictedCosts {
            machine,
            costs,
            matrix,
            timed: Some(timed),
        });
    }
    let target = ProfileTarget::from_machine(&machine).map_err(value_error)?;
    let no_cache = || {
        value_error(format!(
            "machine '{}': found no data cache to share",
            machine.name
        ))
    };
    let cache = SharedCache::from_machine(&machine).ok_or_else(no_cache)?;
    let profiles = programs
        .iter()
        .map(|program| profile_for_target(&program.file, target))
        .collect::<Result<Vec<_>, _>>();
    let profiles = profiles.map_err(value_error)?;
    let costs = py.detach(|| {
        // The model is built here, because it cannot be sent to another thread.
        let own_model = models::find_scheme(model).map_err(|error| error.to_string())?;
        let profiles: Vec<_> = profiles.iter().collect();
        pair_costs(own_model.as_ref(), &names, &profiles, &cache).map_err(|error| error.to_string())
    });
    let costs = costs.map_err(value_error)?;
    let matrix = Matrix {
        table: cost_table(&names, model, &costs, None),
    };
    Ok(PredictedCosts {
        machine,
        costs,
        matrix,
        timed: None,
    })
}

/// Times programs as `cachemate predict` does; Ctrl-C ends the computation between two programs.
fn time_programs(
    py: Python<'_>,
    programs: &[PyRef<'_, Profile>],
    machine: &MachineSpec,
) -> PyResult<Vec<TimedProgram>> {
    let mut timed = Vec::with_capacity(programs.len());
    for program in programs {
        py.check_signals()?;
        let file = &program.file;
        let timed_program = py.detach(|| TimedProgram::from_profile(file, machine));
        timed.push(timed_program.map_err(value_error)?);
    }
    Ok(timed)
}

/// Predicts how much programs slow each other down on the shared cache of a machine.
#[pyfunction]
#[pyo3(signature = (programs, machine, *, model = "interval"))]
pub fn predict(
    py: Python<'_>,
    programs: Vec<PyRef<'_, Profile>>,
    machine: &str,
    model: &str,
) -> PyResult<Matrix> {
    Ok(costs_of(py, &programs, machine, model)?.matrix)
}

/// A placement of programs, its expected outcome, and the reasons.
#[pyclass(frozen, module = "cachemate")]
pub struct Plan {
    placement: Placement,
    /// The placement, as pictures and dashboards show it.
    shown: PlanResult,
}

#[pymethods]
impl Plan {
    /// One dictionary per program, in the given order.
    #[getter]
    fn programs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.placement.programs)
    }

    /// Expected outcomes of this plan, and of the best, the worst and random placements.
    #[getter]
    fn expected<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Placement {
            plan,
            best,
            worst,
            random,
            ..
        } = &self.placement;
        to_python(
            py,
            &BTreeMap::from([
                ("plan", plan),
                ("best", best),
                ("worst", worst),
                ("random", random),
            ]),
        )
    }

    /// Whether it is proved that no placement is better under this model.
    #[getter]
    fn optimal(&self) -> bool {
        self.shown.optimal
    }

    /// Name of the solver that found the plan, such as `minimum-weight matching`.
    #[getter]
    fn solver(&self) -> &str {
        &self.shown.solver
    }

    /// The whole plan, as in `cachemate plan --json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.placement)
    }

    fn __repr__(&self) -> String {
        let row = |program: &cachemate_papers::placement::PlacedProgram| {
            format!(
                "{} on CPU {}",
                escape_controls(&program.name),
                program.cpu.0
            )
        };
        let rows: Vec<String> = self.placement.programs.iter().map(row).collect();
        format!("<cachemate.Plan: {}>", rows.join(", "))
    }

    /// The caches with their programs and the reasons.
    fn _repr_html_(&self) -> String {
        let is_percent = self.shown.unit == "percent";
        let cost = |value: f64| {
            if is_percent {
                format!("{} %", format_fixed(value, 1))
            } else {
                format_number(value)
            }
        };
        let mut rows = String::new();
        for cache in &self.shown.caches {
            for program in &cache.programs {
                let cpu = value_or_dash(program.cpu.map(|cpu| cpu.to_string()));
                let slowdown = value_or_dash(program.slowdown.map(cost));
                let cells = [
                    &cache.cache,
                    &cpu,
                    &program.name,
                    &slowdown,
                    &program.reason,
                ]
                .map(|text| escape(text));
                rows.push_str(&format!("<tr><td>{}</td></tr>", cells.join("</td><td>")));
            }
        }
        let heads = ["cache", "CPU", "program", "slowdown", "reason"].join("</th><th>");
        let expected = &self.shown.expected;
        let [plan, random, worst] = [expected.plan, expected.random, expected.worst]
            .map(|mean| value_or_dash(mean.map(cost)));
        format!(
            "<table><thead><tr><th>{heads}</th></tr></thead><tbody>{rows}</tbody></table>\
             <p>expected on average: {plan}; placed at random {random}; at worst {worst}</p>"
        )
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Plans which programs share a cache on a machine.
#[pyfunction]
#[pyo3(signature = (programs, machine, *, model = "interval", seed = 0))]
pub fn plan(
    py: Python<'_>,
    programs: Vec<PyRef<'_, Profile>>,
    machine: &str,
    model: &str,
    seed: u64,
) -> PyResult<Plan> {
    let PredictedCosts {
        machine,
        costs,
        matrix,
        timed,
    } = costs_of(py, &programs, machine, model)?;
    let names = &matrix.table.names;
    let placement = match timed {
        Some(timed) => {
            let timed: Vec<&TimedProgram> = timed.iter().collect();
            let placed =
                py.detach(|| forecast::place_programs(&machine, names, &costs, &timed, seed));
            placed.map_err(value_error)?
        }
        None => place(names, &costs, &costs, &machine.topology(), seed).map_err(value_error)?,
    };
    let shown = plan_result(&placement, &machine.name, model, costs.kind);
    Ok(Plan { placement, shown })
}
