//! Runs the papers' experiments as a sweep: each independent run is a task, and tasks are executed in waves.
//!
//! A wave consists of all runs whose inputs exist; most experiments have one or two waves. The command assembles the
//! findings from the store with the same code as without a sweep.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use cachemate_repro::split_runs::RunDivision;
use cachemate_repro::{Experiment, ExperimentContext, Finding, Findings, ReproError};
use cachemate_sweep::{
    JobResult, Manifest, ManifestHeader, RunError, Store, SweepKind, SweepTask, SweepTaskId,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::run_store::{source_version, use_store_dir};

/// Subdirectory of the sweep for runs of single programs and pairs, which several tasks share.
pub const SHARED_RUNS_DIR: &str = "kept";

/// The request for the experiments, stored in the manifest's header.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReproRequest {
    pub quick: bool,
    #[serde(default)]
    pub sample: bool,
    pub seeds: Vec<u64>,
    pub mixes: Option<u32>,
    /// Name of the machine. A file is not allowed, because its content would not be part of a run's id.
    pub machine: Option<String>,
}

impl ReproRequest {
    /// Returns the id of a run: a hash of everything on which the result depends.
    fn task_id(&self, run: &str) -> SweepTaskId {
        SweepTaskId::from_text(&format!("{} repro {self:?} {run}", source_version()))
    }

    /// Returns the lookup of an experiment's stored results by the names of its runs.
    pub fn stored_lookup<'a>(
        &'a self,
        store: &'a Store,
        experiment_index: usize,
    ) -> impl Fn(&str) -> Option<Vec<u8>> + Sync + 'a {
        move |run: &str| {
            let stored = store
                .read(self.task_id(&format!("{experiment_index}:{run}")))
                .ok()??;
            let job_result: JobResult = serde_json::from_str(stored.result.get()).ok()?;
            decode_hex(job_result.detail?.get(ANSWER)?.as_str()?)
        }
    }

    pub fn build_context<'a>(
        &'a self,
        run_division: &'a RunDivision<'a>,
        stop: &'a AtomicBool,
    ) -> ExperimentContext<'a> {
        ExperimentContext {
            quick: self.quick,
            sample: self.sample,
            seeds: self.seeds.clone(),
            stop,
            mixes: self.mixes,
            machine: self.machine.as_deref(),
            progress: &|_| (),
            run_division: Some(run_division),
        }
    }
}

/// Executes the run `nth:call.item` of the experiments in this process.
pub fn run_task(
    dir: &Path,
    request_value: &Value,
    run: &str,
    stop: &AtomicBool,
) -> Result<JobResult, RunError> {
    let run_error = |message: String| RunError::Failed(message);
    let request: ReproRequest = serde_json::from_value(request_value.clone())
        .map_err(|error| run_error(error.to_string()))?;
    let no_such_run = || run_error(format!("'{run}' is not a run of the experiments"));
    let (index_text, name) = run.split_once(':').ok_or_else(no_such_run)?;
    let experiment_index: usize = index_text.parse().map_err(|_| no_such_run())?;
    let experiments = cachemate_repro::experiments();
    let experiment = experiments.get(experiment_index).ok_or_else(no_such_run)?;
    let store = Store::open(dir).map_err(|error| run_error(error.to_string()))?;
    use_store_dir(&store.path().join(SHARED_RUNS_DIR))
        .map_err(|error| run_error(format!("{error:#}")))?;
    let lookup = request.stored_lookup(&store, experiment_index);
    let run_division =
        RunDivision::pass_for_run(name, &lookup).map_err(|error| run_error(error.to_string()))?;
    match (experiment.run)(&request.build_context(&run_division, stop)) {
        Err(ReproError::Interrupted) => Err(RunError::Stopped),
        Err(ReproError::Elsewhere) | Ok(_) => {
            let encoded_result = run_division.take_result().ok_or_else(|| {
                run_error("an earlier run that it needs has no answer".to_string())
            })?;
            Ok(JobResult {
                detail: Some(json!({ ANSWER: encode_hex(&encoded_result) })),
                ..JobResult::default()
            })
        }
        Err(error) => Err(run_error(error.to_string())),
    }
}

/// Field of a task's result that contains the run's value: MessagePack in hexadecimal digits.
const ANSWER: &str = "messagepack";

fn encode_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes hexadecimal digits; `None` if they are not whole bytes.
fn decode_hex(digits: &str) -> Option<Vec<u8>> {
    let parse_byte = |index: usize| u8::from_str_radix(digits.get(index..index + 2)?, 16).ok();
    (0..digits.len()).step_by(2).map(parse_byte).collect()
}

/// Experiments with their positions among all experiments. A run's name begins with that position.
pub fn indexed_experiments(experiments: &[Experiment]) -> Vec<(usize, Experiment)> {
    let is_same = |a: &Experiment, b: &Experiment| a.ids == b.ids && a.title == b.title;
    let is_requested = |candidate: &Experiment| {
        experiments
            .iter()
            .any(|requested| is_same(requested, candidate))
    };
    cachemate_repro::experiments()
        .into_iter()
        .enumerate()
        .filter(|(_, candidate)| is_requested(candidate))
        .collect()
}

/// Experiments in progress through the waves.
pub struct Waves {
    request: ReproRequest,
    /// Unfinished experiments, in the form of [`indexed_experiments`].
    unfinished: Vec<(usize, Experiment)>,
    findings: Vec<(usize, Vec<Finding>)>,
    failures: Vec<String>,
    /// Tasks of all waves submitted up to now.
    tasks: Vec<SweepTask>,
    abandoned: BTreeMap<SweepTaskId, String>,
}

impl Waves {
    /// Opens the sweep of a request; the runs of an earlier command with the same request stay in its manifest.
    pub fn new(request: ReproRequest, experiments: &[Experiment], store: &Store) -> Self {
        let has_same_request = |earlier: &Manifest| {
            earlier.header.version == source_version() && earlier.header.repro == json!(request)
        };
        let tasks = store
            .manifest()
            .ok()
            .filter(has_same_request)
            .map_or(Vec::new(), |earlier| earlier.tasks);
        let (unfinished, findings, failures) =
            (indexed_experiments(experiments), Vec::new(), Vec::new());
        Waves {
            request,
            unfinished,
            findings,
            failures,
            tasks,
            abandoned: BTreeMap::new(),
        }
    }

    /// Returns the runs whose inputs exist; none once every experiment has its findings or has failed.
    pub fn next_wave(&mut self, store: &Store, stop: &AtomicBool) -> Vec<SweepTask> {
        let mut needed_tasks = Vec::new();
        for (experiment_index, experiment) in std::mem::take(&mut self.unfinished) {
            match self.advance(store, experiment_index, &experiment, stop) {
                Ok(WaveStep::Findings(new_findings)) => {
                    self.findings.push((experiment_index, new_findings))
                }
                Ok(WaveStep::Needs(needs)) => {
                    needed_tasks.extend(needs);
                    self.unfinished.push((experiment_index, experiment));
                }
                Err(reason) => {
                    self.record_failed_experiment(experiment_index, &experiment, &reason)
                }
            }
        }
        let known_ids: BTreeSet<SweepTaskId> = self.tasks.iter().map(|task| task.id).collect();
        self.tasks.extend(
            needed_tasks
                .iter()
                .filter(|task| !known_ids.contains(&task.id))
                .cloned(),
        );
        needed_tasks
    }

    /// Records a failed experiment: each of its ids gets a finding that states the error.
    fn record_failed_experiment(
        &mut self,
        experiment_index: usize,
        experiment: &Experiment,
        reason: &str,
    ) {
        let seeds = &self.request.seeds;
        let failed_finding = |id: &&str| Finding::from_failure(id, experiment.title, seeds, reason);
        self.findings.push((
            experiment_index,
            experiment.ids.iter().map(failed_finding).collect(),
        ));
        self.failures
            .push(format!("{}: {reason}", experiment.ids.join(", ")));
    }

    /// Runs an experiment on its stored results; returns its findings or the runs that it still needs.
    fn advance(
        &self,
        store: &Store,
        experiment_index: usize,
        experiment: &Experiment,
        stop: &AtomicBool,
    ) -> Result<WaveStep, String> {
        let lookup = self.request.stored_lookup(store, experiment_index);
        let run_division = RunDivision::list(&lookup);
        match (experiment.run)(&self.request.build_context(&run_division, stop)) {
            Ok(findings) => return Ok(WaveStep::Findings(findings)),
            Err(ReproError::Elsewhere) => {}
            Err(ReproError::Interrupted) => return Ok(WaveStep::Needs(Vec::new())),
            Err(error) => return Err(error.to_string()),
        }
        let ids = experiment.ids.join(", ");
        let sweep_task = |name: &String| {
            let run = format!("{experiment_index}:{name}");
            let point = json!({ "experiment": ids, "run": run }).to_string();
            SweepTask {
                id: self.request.task_id(&run),
                point: point.into(),
            }
        };
        let needed_tasks: Vec<SweepTask> =
            run_division.missing_runs().iter().map(sweep_task).collect();
        match needed_tasks
            .iter()
            .find_map(|task| self.abandoned.get(&task.id))
        {
            Some(reason) => Err(reason.clone()),
            None => Ok(WaveStep::Needs(needed_tasks)),
        }
    }

    /// Records abandoned runs and their reasons.
    pub fn record_abandoned_runs(&mut self, failed_tasks: &[(SweepTaskId, String)]) {
        self.abandoned.extend(failed_tasks.iter().cloned());
    }

    /// Returns the findings in the order of the experiments, and the failures.
    pub fn into_findings(mut self) -> (Findings, Vec<String>) {
        self.findings.sort_by_key(|(nth, _)| *nth);
        (
            Findings {
                results: self
                    .findings
                    .into_iter()
                    .flat_map(|(_, findings)| findings)
                    .collect(),
            },
            self.failures,
        )
    }

    /// Returns the manifest with the tasks of all waves so far.
    pub fn manifest(&self) -> Manifest {
        let (axes, request) = (["experiment", "run"], json!(self.request));
        let header = ManifestHeader {
            name: "repro".to_string(),
            description: "The papers' experiments, run by run".to_string(),
            ..ManifestHeader::of_request(
                SweepKind::Repro,
                source_version(),
                axes,
                self.tasks.len(),
                request,
            )
        };
        Manifest {
            header,
            tasks: self.tasks.clone(),
        }
    }
}

/// The next step of an experiment.
enum WaveStep {
    Findings(Vec<Finding>),
    /// The experiment needs these runs.
    Needs(Vec<SweepTask>),
}
