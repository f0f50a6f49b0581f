//! Predicted slowdowns, and plans.

use std::collections::BTreeMap;

use cachemate_core::MachineSpec;
use cachemate_policy::matrix::{CostKind, PairCosts};
use cachemate_policy::placement::{Placement, place};
use cachemate_policy::schemes::{self as models, SharedCache};
use cachemate_report::PlanResult;
use cachemate_report::text::{fixed, number, or_dash, printable};
use cachemate_study::{ProfileTarget, matrix_of, on_target, pair_costs, plan_picture};
use numpy::PyArray2;
use pyo3::prelude::*;

use crate::failed;
use crate::json::to_python;
use crate::profile::Profile;

/// Predicted slowdown of each row's program when it shares the cache with the column's.
#[pyclass(frozen, module = "cachemate")]
pub struct Matrix {
    names: Vec<String>,
    model: String,
    costs: PairCosts,
}

#[pymethods]
impl Matrix {
    #[getter]
    fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    /// Square; 0.28 = 28 % slower if the unit is `slowdown`.
    #[getter]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f64>>> {
        PyArray2::from_vec2(py, &self.costs.cost).map_err(failed)
    }

    /// `slowdown`, or `weight`: a cost without a unit, larger is worse.
    #[getter]
    fn unit(&self) -> &'static str {
        match self.costs.kind {
            CostKind::Degradation => "slowdown",
            CostKind::Weight => "weight",
        }
    }

    #[getter]
    fn model(&self) -> &str {
        &self.model
    }

    fn __repr__(&self) -> String {
        format!("<cachemate.Matrix of {} programs by {}>", self.names.len(), self.model)
    }

    /// The picture of the reports.
    fn _repr_svg_(&self) -> String {
        let unit = if self.costs.kind == CostKind::Degradation { "slowdown in %" } else { "weight" };
        let mut picture = matrix_of(&self.names, &self.model, &self.costs).heat_map();
        picture.title = format!("{unit}, by {}", self.model);
        picture.svg()
    }
}

/// Programs on the shared cache of a machine, and their predicted costs.
fn costs_of(
    py: Python<'_>,
    programs: &[PyRef<'_, Profile>],
    machine: &str,
    model: &str,
) -> PyResult<(MachineSpec, Matrix)> {
    let machine = cachemate_spec::load_machine(machine).map_err(failed)?;
    let target = ProfileTarget::of(&machine).map_err(failed)?;
    let none = || failed(format!("machine '{}': found no data cache to share", machine.name));
    let cache = SharedCache::of_machine(&machine).ok_or_else(none)?;
    let names: Vec<String> = programs.iter().map(|program| printable(&program.file.program)).collect();
    let profiles = programs.iter().map(|program| on_target(&program.file, target)).collect::<Result<Vec<_>, _>>();
    let profiles = profiles.map_err(failed)?;
    let costs = py.detach(|| {
        // Built here, because a model cannot be sent to another thread.
        let own_model = models::by_name(model).map_err(|error| error.to_string())?;
        let profiles: Vec<_> = profiles.iter().collect();
        pair_costs(own_model.as_ref(), &names, &profiles, &cache).map_err(|error| error.to_string())
    });
    let costs = costs.map_err(failed)?;
    Ok((machine, Matrix { names, model: model.to_string(), costs }))
}

/// Predicts how much programs slow each other down on the shared cache of a machine.
#[pyfunction]
#[pyo3(signature = (programs, machine, *, model = "statcc"))]
pub fn predict(py: Python<'_>, programs: Vec<PyRef<'_, Profile>>, machine: &str, model: &str) -> PyResult<Matrix> {
    Ok(costs_of(py, &programs, machine, model)?.1)
}

/// A placement of programs, its expected outcome, and the reasons.
#[pyclass(frozen, module = "cachemate")]
pub struct Plan {
    placement: Placement,
    /// The placement as pictures and dashboards show it.
    shown: PlanResult,
}

#[pymethods]
impl Plan {
    /// One dictionary per program, in the given order.
    #[getter]
    fn programs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.placement.programs)
    }

    /// Expected outcomes of this plan, the best, the worst and random ones.
    #[getter]
    fn expected<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Placement { plan, best, worst, random, .. } = &self.placement;
        to_python(py, &BTreeMap::from([("plan", plan), ("best", best), ("worst", worst), ("random", random)]))
    }

    /// Is it proven that no placement is better under this model?
    #[getter]
    fn optimal(&self) -> bool {
        self.shown.optimal
    }

    /// The solver that found it, such as `minimum-weight matching`.
    #[getter]
    fn solver(&self) -> &str {
        &self.shown.solver
    }

    /// The whole plan, as in `cachemate plan --json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.placement)
    }

    fn __repr__(&self) -> String {
        let row = |program: &cachemate_policy::placement::PlacedProgram| {
            format!("{} on CPU {}", printable(&program.name), program.cpu.0)
        };
        let rows: Vec<String> = self.placement.programs.iter().map(row).collect();
        format!("<cachemate.Plan: {}>", rows.join(", "))
    }

    /// The caches with their programs and the reasons.
    fn _repr_html_(&self) -> String {
        let percent = self.shown.unit == "percent";
        let cost = |value: f64| if percent { format!("{} %", fixed(value, 1)) } else { number(value) };
        let mut rows = String::new();
        for cache in &self.shown.caches {
            for program in &cache.programs {
                let cpu = or_dash(program.cpu.map(|cpu| cpu.to_string()));
                let slowdown = or_dash(program.slowdown.map(cost));
                let cells = [&cache.cache, &cpu, &program.name, &slowdown, &program.reason].map(|text| escaped(text));
                rows.push_str(&format!("<tr><td>{}</td></tr>", cells.join("</td><td>")));
            }
        }
        let heads = ["cache", "CPU", "program", "slowdown", "reason"].join("</th><th>");
        let expected = &self.shown.expected;
        let [plan, random, worst] =
            [expected.plan, expected.random, expected.worst].map(|mean| or_dash(mean.map(cost)));
        format!(
            "<table><thead><tr><th>{heads}</th></tr></thead><tbody>{rows}</tbody></table>\
             <p>expected on average: {plan}; placed at random {random}; at worst {worst}</p>"
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Plans which programs share a cache on a machine.
#[pyfunction]
#[pyo3(signature = (programs, machine, *, model = "statcc", seed = 0))]
pub fn plan(
    py: Python<'_>,
    programs: Vec<PyRef<'_, Profile>>,
    machine: &str,
    model: &str,
    seed: u64,
) -> PyResult<Plan> {
    let (machine, matrix) = costs_of(py, &programs, machine, model)?;
    let topology = machine.topology();
    let placed = py.detach(|| place(&matrix.names, &matrix.costs, &matrix.costs, &topology, seed));
    let placement = placed.map_err(failed)?;
    let shown = plan_picture(&placement, &machine.name, model, matrix.costs.kind);
    Ok(Plan { placement, shown })
}
