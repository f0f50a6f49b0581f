//! Scenarios on the simulated machine, with a policy of the registry or one written in Python.
//!
//! The machine runs on a thread of its own. The thread that called looks for Ctrl-C meanwhile, and asks the callable: it
//! runs where Python code expects to run, and Ctrl-C ends it, too.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use cachemate_core::{Decision, MachineSpec, Plan, Policy, PolicyConfig, Reason, View, WindowLength};
use cachemate_pipeline::Pipeline;
use cachemate_sim::results::RunResults;
use cachemate_spec::Scenario;
use cachemate_trace::RunLogWriter;
use pyo3::exceptions::{PyTypeError, PyUserWarning};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Serialize;

use crate::failed;
use crate::json::{from_python, from_text, to_python};

/// How often Ctrl-C is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// What the machine's thread tells the one that called.
enum RunEvent {
    /// This flag stops the machine.
    Started(Arc<AtomicBool>),
    /// Evidence that the machine cannot give, in words.
    Missing(String),
    /// What to do? The view as JSON, and the window's length in force.
    Asked(String, WindowLength),
}

/// The view as JSON.
#[derive(Serialize)]
struct ViewJson<'a> {
    topology: &'a cachemate_core::Topology,
    capabilities: &'a cachemate_core::Capabilities,
    seen: &'a cachemate_core::Observation,
    profiles: &'a cachemate_core::Profiles,
    previous_plan: &'a Plan,
}

/// A policy that asks the thread that called.
struct PythonPolicy {
    events: Sender<RunEvent>,
    /// `None` = all stays as it is.
    answers: Receiver<Option<Decision>>,
}

impl Policy for PythonPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let &View { topology, capabilities, observation: seen, profiles, previous_plan, .. } = view;
        let shown = ViewJson { topology, capabilities, seen, profiles, previous_plan };
        let text = serde_json::to_string(&shown).expect("run logs hold the same as JSON");
        // Who asked for the run may have given up: then the run ends with this window.
        let sent = self.events.send(RunEvent::Asked(text, previous_plan.window));
        let answer = sent.ok().and_then(|()| self.answers.recv().ok()).flatten();
        answer.unwrap_or_else(|| Decision { plan: previous_plan.clone(), reasons: Vec::new() })
    }
}

/// Asks the callable; only what its answer holds differs from an idle plan.
fn ask(py: Python<'_>, callable: &Py<PyAny>, view: &str, window: WindowLength) -> PyResult<Option<Decision>> {
    let answer = callable.bind(py).call1((from_text(py, view)?,))?;
    if answer.is_none() {
        return Ok(None);
    }
    let answer = answer.cast::<PyDict>().map_err(|_| {
        let found = answer.get_type().name().map_or_else(|_| "something else".to_string(), |name| name.to_string());
        PyTypeError::new_err(format!("the policy's answer: found {found}, expected a dictionary or None"))
    })?;
    let whole = to_python(py, &Plan::idle(window))?;
    let whole = whole.cast::<PyDict>()?;
    let mut why: Vec<Reason> = Vec::new();
    for (key, value) in answer.iter() {
        let name: String = key.extract()?;
        if name == "why" {
            let texts: Vec<String> = value.extract()?;
            why = texts.into_iter().map(|text| Reason { text, ..Reason::default() }).collect();
        } else if whole.contains(&key)? {
            whole.set_item(key, value)?;
        } else {
            let known: Vec<String> = whole.keys().extract()?;
            let known = known.join(", ");
            return Err(failed(format!("the policy's answer: found the field '{name}', expected {known} or why")));
        }
    }
    Ok(Some(Decision { plan: from_python(whole.as_any(), "the policy's plan")?, reasons: why }))
}

/// What is run, and where it is kept.
struct ScenarioRun<'a> {
    /// The scenario's file, for errors.
    file: &'a str,
    scenario: &'a Scenario,
    spec: &'a MachineSpec,
    log: Option<&'a Path>,
    force: bool,
}

impl ScenarioRun<'_> {
    /// To its end on this thread. `answers`: a policy of the caller's decides.
    fn go(
        &self,
        events: Sender<RunEvent>,
        answers: Option<Receiver<Option<Decision>>>,
        stop: &AtomicBool,
    ) -> Result<(RunResults, u64), String> {
        let words = |error: &dyn std::fmt::Display| error.to_string();
        let built = cachemate_scenario::build(self.scenario, self.spec);
        let mut machine = built.map_err(|error| format!("{}: {error}", self.file))?;
        let mut config = cachemate_scenario::pipeline(self.scenario, self.spec, &machine);
        // Who called waits for an event or the end; without it nobody is there to tell.
        let _ = events.send(RunEvent::Started(machine.stop_flag()));
        let pipeline = match answers {
            Some(answers) => {
                // A replay finds no such policy in the registry, and says so.
                config.policy = PolicyConfig { name: "python".into(), parameters: String::new(), ..config.policy };
                Pipeline::with_policy(config, Box::new(PythonPolicy { events: events.clone(), answers }))
            }
            None => Pipeline::build(config).map_err(|error| words(&error))?,
        };
        for missing in pipeline.missing_evidence(&machine) {
            let _ = events.send(RunEvent::Missing(missing.to_string()));
        }
        let create = |path| RunLogWriter::create(path, self.force, &pipeline.header(&machine));
        let mut log = self.log.map(create).transpose().map_err(|error| words(&error))?;
        machine.set_first_window(pipeline.config().first_window);
        let (mut windows, mut broken) = (0, None);
        let ran = pipeline.run(machine, |_, record| {
            windows += 1;
            broken = log.as_mut().and_then(|log| log.push(&record).err());
            broken.is_none() && !stop.load(Ordering::Relaxed)
        });
        if let Some(error) = broken {
            return Err(error.to_string());
        }
        log.map_or(Ok(()), RunLogWriter::finish).map_err(|error| words(&error))?;
        Ok((ran.map_err(|error| words(&error))?.results(), windows))
    }
}

/// Follows a run until it ends; the first error of Python, Ctrl-C among them, ends it.
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
            let event = events.recv_timeout(LOOK);
            (events, event)
        });
        let done = match event {
            Ok(RunEvent::Started(flag)) => {
                machine = Some(flag);
                Ok(())
            }
            Ok(RunEvent::Missing(words)) => {
                let words = std::ffi::CString::new(words).unwrap_or_default();
                PyErr::warn(py, &py.get_type::<PyUserWarning>(), &words, 1)
            }
            Ok(RunEvent::Asked(view, window)) => match &policy {
                Some((callable, answers)) => ask(py, callable, &view, window).map(|decision| {
                    // The end of the run is told by the events.
                    let _ = answers.send(decision);
                }),
                None => Ok(()),
            },
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        if let Err(error) = done.and_then(|()| py.check_signals()) {
            stop.store(true, Ordering::Relaxed);
            if let Some(machine) = machine {
                machine.store(true, Ordering::Relaxed);
            }
            return Err(error);
        }
    }
}

/// Runs a scenario on the simulated machine. `policy`: a callable that gets `topology`, `capabilities`, `seen`, `profiles`
/// and `previous_plan` in a dictionary and answers with a plan; without it the scenario's own policy decides. Plans are
/// checked like any.
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
    let (mut scenario, spec) = cachemate_spec::load_scenario(&file).map_err(failed)?;
    scenario.seed = seed.unwrap_or(scenario.seed);
    if policy.is_some() {
        // The scenario's own has windows of its own; the callable gets the usual ones.
        scenario.policy.name = "default".to_string();
        scenario.policy.parameters.clear();
    }
    let run = ScenarioRun { file: &file, scenario: &scenario, spec: &spec, log: log.as_deref(), force };
    let stop = AtomicBool::new(false);
    let (tells, events) = channel();
    let (policy, answers) = match policy {
        Some(callable) => {
            let (answers, wait) = channel();
            (Some((callable, answers)), Some(wait))
        }
        None => (None, None),
    };
    let (followed, ran) = std::thread::scope(|scope| {
        let running = scope.spawn(|| run.go(tells, answers, &stop));
        let followed = follow(py, events, policy, &stop);
        (followed, py.detach(|| running.join()))
    });
    followed?;
    let (results, windows) = ran.unwrap_or_else(|panic| std::panic::resume_unwind(panic)).map_err(failed)?;
    let answer = to_python(py, &results)?;
    answer.cast::<PyDict>()?.set_item("windows", windows)?;
    Ok(answer)
}
