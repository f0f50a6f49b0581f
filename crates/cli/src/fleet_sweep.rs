//! Runs a fleet as a sweep: every part of its study is a task, on any engine, and the results merge to the same bits.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use cachemate_core::MachineSpec;
use cachemate_fleet::spec::{FleetService, FleetSpec};
use cachemate_fleet::study::{FleetChange, FleetPart, FleetPartOutcome, FleetResult, FleetStudy};
use cachemate_sweep::{
    JobResult, JobRunner, Manifest, ManifestHeader, RunError, Store, SweepKind, SweepTask,
    SweepTaskId,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::engine_args::EngineArgs;
use crate::exit::InterruptedError;
use crate::run_store::source_version;
use crate::session::Session;

/// A fleet with the content of all its files, stored in the manifest's header.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FleetRequest {
    pub spec: FleetSpec,
    pub machines: Vec<MachineSpec>,
    pub kinds: Vec<FleetService>,
    /// Index of each pod's kind; `None` without a cluster's export.
    pub pods: Option<Vec<u16>>,
    pub changes: Vec<FleetChange>,
}

impl FleetRequest {
    pub fn study(&self) -> anyhow::Result<FleetStudy<'_>> {
        Ok(FleetStudy::new(
            &self.spec,
            &self.machines,
            &self.kinds,
            self.pods.as_deref(),
            &self.changes,
        )?)
    }

    /// Ids of the tasks: hashes of everything on which their results depend.
    fn task_id_function(&self) -> impl Fn(FleetPart) -> SweepTaskId {
        let fleet_id = SweepTaskId::from_text(&json!(self).to_string());
        move |part| {
            SweepTaskId::from_text(&format!("{} fleet {fleet_id} {part:?}", source_version()))
        }
    }

    /// Runs all parts on an engine, whose tasks in this process `job_runner` executes, and merges their results; see
    /// docs/sweeps.md.
    pub fn run_swept(
        &self,
        session: &Session,
        dir: &Path,
        engines: &EngineArgs,
        job_runner: &Arc<dyn JobRunner>,
        is_silent: bool,
    ) -> anyhow::Result<FleetResult> {
        let study = self.study()?;
        let task_id = self.task_id_function();
        let sweep_task = |part: &FleetPart| {
            let (variant, cell) = match *part {
                FleetPart::Cell { variant, cell } => (variant, Some(cell)),
                FleetPart::Search { variant } => (variant, None),
            };
            SweepTask {
                id: task_id(*part),
                point: json!({ "variant": variant, "cell": cell })
                    .to_string()
                    .into(),
            }
        };
        let parts = study.parts();
        let tasks: Vec<SweepTask> = parts.iter().map(sweep_task).collect();
        let axes = ["variant", "cell"];
        let header = ManifestHeader {
            name: "fleet".to_string(),
            description: self.spec.name.clone(),
            ..ManifestHeader::of_request(
                SweepKind::Fleet,
                source_version(),
                axes,
                tasks.len(),
                json!(self),
            )
        };
        let manifest = Manifest {
            header,
            tasks: tasks.clone(),
        };
        let store = Arc::new(Store::create(dir)?);
        store.write_manifest(&manifest)?;
        tasks
            .iter()
            .try_for_each(|task| store.forget_attempts(task.id))?;
        let summary =
            engines.drive_tasks(session, &store, &manifest, &tasks, job_runner, is_silent)?;
        if summary.interrupted {
            let note = format!(
                "{} of {} parts are finished and kept",
                summary.finished, summary.total
            );
            return Err(InterruptedError(format!("{note}; the same command continues")).into());
        }
        if let Some((id, reason)) = summary.failed.first() {
            anyhow::bail!("task {id}: {reason}");
        }
        let outcomes = read_outcomes(&store, &task_id, parts).map_err(anyhow::Error::msg)?;
        study
            .merge(&outcomes)
            .with_context(|| format!("{}: a part of the fleet has no result", dir.display()))
    }
}

/// Returns the stored outcomes of parts; those without a result are left out.
fn read_outcomes(
    store: &Store,
    task_id: &dyn Fn(FleetPart) -> SweepTaskId,
    parts: Vec<FleetPart>,
) -> Result<BTreeMap<FleetPart, FleetPartOutcome>, String> {
    let mut outcomes = BTreeMap::new();
    for part in parts {
        let id = task_id(part);
        let Some(stored_result) = store.read(id)? else {
            continue;
        };
        let result: JobResult = serde_json::from_str(stored_result.result.get())
            .map_err(|error| format!("task {id}: {error}"))?;
        let detail = result.detail.unwrap_or(Value::Null);
        outcomes.insert(
            part,
            serde_json::from_value(detail).map_err(|error| format!("task {id}: {error}"))?,
        );
    }
    Ok(outcomes)
}

/// The fleet of a process that runs tasks. All tasks of a directory belong to one fleet and share its solved caches.
#[derive(Default)]
pub struct FleetWorker(OnceLock<Result<LoadedFleet, String>>);

struct LoadedFleet {
    study: FleetStudy<'static>,
    request: &'static FleetRequest,
}

impl LoadedFleet {
    fn new(fleet: &Value) -> Result<Self, String> {
        let request: FleetRequest =
            serde_json::from_value(fleet.clone()).map_err(|error| error.to_string())?;
        request.spec.check().map_err(|error| error.to_string())?;
        // One fleet for each sweep of this process; it is used until the process ends.
        let request: &'static FleetRequest = Box::leak(Box::new(request));
        Ok(LoadedFleet {
            study: request.study().map_err(|error| format!("{error:#}"))?,
            request,
        })
    }
}

impl FleetWorker {
    /// Runs one part of the fleet in the manifest's header.
    pub fn run_task(
        &self,
        dir: &Path,
        fleet: &Value,
        variant: usize,
        cell: Option<usize>,
        stop: &AtomicBool,
    ) -> Result<JobResult, RunError> {
        let loaded_fleet = self.0.get_or_init(|| LoadedFleet::new(fleet)).as_ref();
        let LoadedFleet { study, request } =
            loaded_fleet.map_err(|problem| RunError::Failed(problem.clone()))?;
        let part = match cell {
            Some(cell) => FleetPart::Cell { variant, cell },
            None => FleetPart::Search { variant },
        };
        if !study.parts().contains(&part) {
            return Err(RunError::Failed(format!(
                "found {part:?}, expected a part of the fleet"
            )));
        }
        let mut known_outcomes = BTreeMap::new();
        if cell.is_none() {
            // A search starts with the first cells, if they are finished.
            let store = Store::open(dir).map_err(|error| RunError::Failed(error.to_string()))?;
            let first_cells = study
                .parts()
                .into_iter()
                .filter(|part| matches!(part, FleetPart::Cell { cell: 0, .. }));
            known_outcomes =
                read_outcomes(&store, &request.task_id_function(), first_cells.collect())
                    .unwrap_or_default();
        }
        let outcome = study.run_part(part, &known_outcomes, &|| stop.load(Ordering::Relaxed));
        let outcome = outcome.ok_or(RunError::Stopped)?;
        let detail =
            serde_json::to_value(outcome).map_err(|error| RunError::Failed(error.to_string()))?;
        Ok(JobResult {
            detail: Some(detail),
            ..JobResult::default()
        })
    }
}
