//! Runs scenarios on the simulated machine, with a policy of the registry or one written in Python.
//!
//! The machine runs on its own thread. Meanwhile, the calling thread checks for Ctrl-C and calls the policy, so that
//! Python code runs on the thread that called it and can be interrupted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use cachemate_core::{
    Decision, MachineSpec, Plan, Policy, PolicyConfig, Reason, View, WindowLength,
};
use cachemate_pipeline::Pipeline;
use cachemate_sim::results::RunResults;
use cachemate_spec::Scenario;
use cachemate_trace::RunLogWriter;
use pyo3::exceptions::{PyTypeError, PyUserWarning};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Serialize;

use crate::json::{from_python, from_text, to_python};
use crate::value_error;

/// Time between two checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// An event that the machine's thread reports to the calling thread.
enum RunEvent {
    /// The run has begun; setting the flag stops the machine.
    Started(Arc<AtomicBool>),
    /// The policy needs evidence that the machine cannot measure.
    Missing(String),
    /// A decision is due; with the view as JSON, and the present length of a window.
    DecisionRequested(String, WindowLength),
}

/// A view, in the form that becomes JSON.
#[derive(Serialize)]
struct ViewJson<'a> {
    topology: &'a cachemate_core::Topology,
    capabilities: &'a cachemate_core::Capabilities,
    observation: &'a cachemate_core::Observation,
    profiles: &'a cachemate_core::Profiles,
    previous_plan: &'a Plan,
}

/// A policy that requests its decisions from the calling thread.
struct PythonPolicy {
    events: Sender<RunEvent>,
    /// Decisions from the calling thread; `None` keeps the previous plan.
    decisions: Receiver<Option<Decision>>,
}

impl Policy for PythonPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let &View {
            topology,
            capabilities,
            observation,
            profiles,
            previous_plan,
            ..
        } = view;
        let view_json = ViewJson {
            topology,
            capabilities,
            observation,
            profiles,
            previous_plan,
        };
        let text = serde_json::to_string(&view_json).expect("run logs hold the same as JSON");
        // Sending fails if the caller has stopped the run, which then ends with this window.
        let sent = self
            .events
            .send(RunEvent::DecisionRequested(text, previous_plan.window));
        let decision = sent
            .ok()
            .and_then(|()| self.decisions.recv().ok())
            .flatten();
        decision.unwrap_or_else(|| Decision::new(previous_plan.clone(), Vec::new()))
    }
}

/// Calls the policy. Fields that its answer omits are those of an idle plan.
fn query_decision(
    py: Python<'_>,
    callable: &Py<PyAny>,
    view: &str,
    window: WindowLength,
) -> PyResult<Option<Decision>> {
    let answer = callable.bind(py).call1((from_text(py, view)?,))?;
    if answer.is_none() {
        return Ok(None);
    }
    let answer = answer.cast::<PyDict>().map_err(|_| {
        let found = answer
            .get_type()
            .name()
            .map_or_else(|_| "something else".to_string(), |name| name.to_string());
        PyTypeError::new_err(format!(
            "the policy's answer: found {found}, expected a dictionary or None"
        ))
    })?;
    let idle_plan = to_python(py, &Plan::idle(window))?;
    let idle_plan = idle_plan.cast::<PyDict>()?;
    let mut reasons: Vec<Reason> = Vec::new();
    for (key, value) in answer.iter() {
        let name: String = key.extract()?;
        if name == "reasons" {
            let texts: Vec<String> = value.extract()?;
            reasons = texts
                .into_iter()
                .map(|text| Reason {
                    text,
                    ..Reason::default()
                })
                .collect();
        } else if idle_plan.contains(&key)? {
            idle_plan.set_item(key, value)?;
        } else {
            let known_fields: Vec<String> = idle_plan.keys().extract()?;
            let known_fields = known_fields.join(", ");
            return Err(value_error(format!(
                "the policy's answer: found the field '{name}', expected {known_fields} or reasons"
            )));
        }
    }
    Ok(Some(Decision::new(
        from_python(idle_plan.as_any(), "the policy's plan")?,
        reasons,
    )))
}

/// A scenario, together with its run log.
struct ScenarioRun<'a> {
    /// Name of the scenario's file, for errors.
    file: &'a str,
    scenario: &'a Scenario,
    spec: &'a MachineSpec,
    log: Option<&'a Path>,
    force: bool,
}

impl ScenarioRun<'_> {
    /// Runs the scenario to its end on this thread. If `answers` is given, the caller's policy decides.
    fn run_scenario(
        &self,
        events: Sender<RunEvent>,
        decisions: Option<Receiver<Option<Decision>>>,
        stop: &AtomicBool,
    ) -> Result<(RunResults, u64), String> {
        let error_text = |error: &dyn std::fmt::Display| error.to_string();
        let built = cachemate_scenario::build(self.scenario, self.spec);
        let mut machine = built.map_err(|error| format!("{}: {error}", self.file))?;
        let mut config = cachemate_scenario::pipeline_config(self.scenario, self.spec, &machine);
        // Sending fails if the caller has stopped waiting, which is not an error.
        let _ = events.send(RunEvent::Started(machine.stop_flag()));
        let pipeline = match decisions {
            Some(decisions) => {
                // Replay refuses this name, because the registry has no such policy.
                config.policy = PolicyConfig {
                    name: "python".into(),
                    parameters: String::new(),
                    ..config.policy
                };
                Pipeline::with_policy(
                    config,
                    Box::new(PythonPolicy {
                        events: events.clone(),
                        decisions,
                    }),
                )
            }
            None => Pipeline::build(config).map_err(|error| error_text(&error))?,
        };
        for evidence in pipeline.missing_evidence(&machine) {
            let _ = events.send(RunEvent::Missing(evidence.to_string()));
        }
        let create =
            |path| RunLogWriter::create(path, self.force, &pipeline.build_run_header(&machine));
        let mut log = self
            .log
            .map(create)
            .transpose()
            .map_err(|error| error_text(&error))?;
        machine.set_first_window(pipeline.config().first_window);
        let (mut windows, mut log_error) = (0, None);
        let outcome = pipeline.run(machine, |_, record| {
            windows += 1;
            log_error = log.as_mut().and_then(|log| log.push(&record).err());
            log_error.is_none() && !stop.load(Ordering::Relaxed)
        });
        if let Some(error) = log_error {
            return Err(error.to_string());
        }
        log.map_or(Ok(()), RunLogWriter::finish)
            .map_err(|error| error_text(&error))?;
        Ok((
            outcome
                .map_err(|error| error_text(&error))?
                .collect_results(),
            windows,
        ))
    }
}

/// Follows a run to its end. The first error in Python, including Ctrl-C, ends the run.
fn follow(
    py: Python<'_>,
    mut events: Receiver<RunEvent>,
    policy: Option<(Py<PyAny>, Sender<Option<Decision>>)>,
    stop: &AtomicBool,
) -> PyResult<()> {
    let mut machine: Option<Arc<AtomicBool>> = None;
    loop {
        let event;
        (events, event) = py.detach(move || {
            let event = events.recv_timeout(POLL_INTERVAL);
            (events, event)
        });
        let outcome = match event {
            Ok(RunEvent::Started(flag)) => {
                machine = Some(flag);
                Ok(())
            }
            Ok(RunEvent::Missing(evidence)) => {
                let message = std::ffi::CString::new(evidence).unwrap_or_default();
                PyErr::warn(py, &py.get_type::<PyUserWarning>(), &message, 1)
            }
            Ok(RunEvent::DecisionRequested(view, window)) => match &policy {
                Some((callable, decisions)) => {
                    query_decision(py, callable, &view, window).map(|decision| {
                        // Sending fails if the run has ended, which the events report.
                        let _ = decisions.send(decision);
                    })
                }
                None => Ok(()),
            },
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        if let Err(error) = outcome.and_then(|()| py.check_signals()) {
            stop.store(true, Ordering::Relaxed);
            if let Some(machine) = machine {
                machine.store(true, Ordering::Relaxed);
            }
            return Err(error);
        }
    }
}

/// Runs a scenario on the simulated machine. `policy` is a callable that takes a dictionary of `topology`,
/// `capabilities`, `observation`, `profiles` and `previous_plan` and returns a plan, which is checked like any other.
/// Without it, the policy of the scenario decides.
#[pyfunction]
#[pyo3(signature = (scenario, *, policy = None, seed = None, log = None, force = false))]
pub fn simulate<'py>(
    py: Python<'py>,
    scenario: PathBuf,
    policy: Option<Py<PyAny>>,
    seed: Option<u64>,
    log: Option<PathBuf>,
    force: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let file = scenario.display().to_string();
    let (mut scenario, spec) = cachemate_spec::load_scenario(&file).map_err(value_error)?;
    scenario.seed = seed.unwrap_or(scenario.seed);
    if policy.is_some() {
        // The scenario's window length suits its own policy; a callable gets the default length.
        scenario.policy.name = "default".to_string();
        scenario.policy.parameters.clear();
    }
    let run = ScenarioRun {
        file: &file,
        scenario: &scenario,
        spec: &spec,
        log: log.as_deref(),
        force,
    };
    let stop = AtomicBool::new(false);
    let (event_sender, events) = channel();
    let (policy, decisions) = match policy {
        Some(callable) => {
            let (decision_sender, decision_receiver) = channel();
            (Some((callable, decision_sender)), Some(decision_receiver))
        }
        None => (None, None),
    };
    let (followed, outcome) = std::thread::scope(|scope| {
        let run_thread = scope.spawn(|| run.run_scenario(event_sender, decisions, &stop));
        let followed = follow(py, events, policy, &stop);
        (followed, py.detach(|| run_thread.join()))
    });
    followed?;
    let (results, windows) = outcome
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        .map_err(value_error)?;
    let result = to_python(py, &results)?;
    result.cast::<PyDict>()?.set_item("windows", windows)?;
    Ok(result)
}
