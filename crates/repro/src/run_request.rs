//! Runs without a policy, described as data: solo, shared, or under one plan. Each is made only once
//! ([`crate::store`]).
//!
//! A request contains everything on which its run depends. It therefore serves as the name under which the run is
//! stored, and a stored run can be repeated to check it.

use cachemate_sim::results::RunResults;
use cachemate_sim::run::run_alone;
use serde::{Deserialize, Serialize};

use crate::encoding::encode_result;
use crate::error::{Result, failed};
use crate::rates::ProgramRates;
use crate::recordings;
use crate::sources::digest_of;
use crate::store::{self, RunName, StoredEntry};
use crate::work::{self, FixedPlan, InstructionRange, WorkRun};
use crate::workload::Workload;

/// A request for a run without a policy.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum RunRequest {
    /// Results of the measured span under the machine's scheduler.
    Unmanaged(Workload),
    /// One job alone: its work, and its speed over that work.
    Alone(Workload),
    /// All jobs over the given work.
    Together(Workload, Vec<InstructionRange>, Option<FixedPlan>),
    /// Results of the measured span under one plan.
    Planned(Workload, FixedPlan),
}

/// The inputs of a stored run: the request, and digests of the recordings that it names.
#[derive(Serialize, Deserialize)]
struct RunInputs {
    request: RunRequest,
    recordings: Vec<String>,
}

impl RunRequest {
    fn workload(&self) -> &Workload {
        let (RunRequest::Unmanaged(workload)
        | RunRequest::Alone(workload)
        | RunRequest::Together(workload, ..)
        | RunRequest::Planned(workload, _)) = self;
        workload
    }

    fn kind(&self) -> &'static str {
        match self {
            RunRequest::Unmanaged(_) => "unmanaged",
            RunRequest::Alone(_) => "alone",
            RunRequest::Together(.., None) => "together",
            RunRequest::Together(.., Some(_)) | RunRequest::Planned(..) => "planned",
        }
    }

    /// The name under which the run is stored.
    ///
    /// # Errors
    /// A value cannot be represented in JSON.
    fn name(&self) -> Result<RunName> {
        let recordings = recordings_of(self.workload());
        let sources = sources_of("run_request", &recordings);
        let inputs = RunInputs {
            request: self.clone(),
            recordings,
        };
        RunName::new(
            self.kind(),
            workload_label(self.workload()),
            sources,
            &inputs,
        )
    }
}

pub(crate) fn recordings_of(workload: &Workload) -> Vec<String> {
    workload
        .jobs
        .iter()
        .filter_map(|job| job.recording.as_deref().map(recordings::file_digest))
        .collect()
}

/// The digest of a module, combined with that of the reader of recordings if any is read.
pub(crate) fn sources_of(module: &str, recordings: &[String]) -> String {
    let reader_digest = if recordings.is_empty() {
        ""
    } else {
        digest_of("recordings")
    };
    format!("{}{reader_digest}", digest_of(module))
}

pub(crate) fn workload_label(workload: &Workload) -> String {
    let jobs: Vec<&str> = workload.jobs.iter().map(|job| job.name.as_str()).collect();
    format!("{} on {}", jobs.join(" + "), workload.machine.name)
}

/// The work of the workload's only job alone in the measured cycles after the warm-up, and its
/// speed.
///
/// # Errors
/// The machine has no data cache, the job does nothing, or [`Workload::build_machine`] fails.
pub fn solo_run(workload: &Workload) -> Result<(InstructionRange, ProgramRates)> {
    store::find_or_make(RunRequest::Alone(workload.clone()).name()?, || {
        work::measure_solo(workload)
    })
}

/// Runs all jobs together, the n-th over the n-th work, under the machine's scheduler or one plan. A job that does not
/// finish its work in [`work::MAX_SOLO_TIME_MULTIPLE`] the solo time of all is marked in its rates.
///
/// # Errors
/// The errors of [`Workload::build_machine`], the errors of the machine, or a job never runs.
pub fn joint_run(
    workload: &Workload,
    work: &[InstructionRange],
    plan: Option<&FixedPlan>,
) -> Result<WorkRun> {
    let run_request = RunRequest::Together(workload.clone(), work.to_vec(), plan.cloned());
    store::find_or_make(run_request.name()?, || {
        work::measure_joint(workload, work, plan)
    })
}

impl Workload {
    /// Runs the workload under the machine's own scheduler.
    ///
    /// # Errors
    /// The errors of [`Workload::build_machine`] and of the machine.
    pub fn unmanaged_run(&self) -> Result<RunResults> {
        store::find_or_make(RunRequest::Unmanaged(self.clone()).name()?, || {
            run_unmanaged(self)
        })
    }

    /// Runs the workload under one plan, for the lengths in its options if these state any.
    ///
    /// # Errors
    /// The machine refuses the plan, or [`Workload::unmanaged_run`] fails.
    pub fn planned_run(&self, plan: &FixedPlan) -> Result<RunResults> {
        let request = RunRequest::Planned(self.clone(), plan.clone());
        store::find_or_make(request.name()?, || run_planned(self, plan))
    }
}

fn run_unmanaged(workload: &Workload) -> Result<RunResults> {
    run_alone(&mut workload.build_machine()?).map_err(failed("unmanaged run"))
}

fn run_planned(workload: &Workload, plan: &FixedPlan) -> Result<RunResults> {
    let mut machine = match workload.options.ends {
        Some(_) => workload.build_machine_with(workload.options.clone())?,
        None => workload.build_machine()?,
    };
    plan.run(&mut machine)
}

/// Repeats a stored run and returns whether its value has the same bits. `None` for a value that does not come from a
/// request, or was made by other sources or recordings than the present ones.
///
/// # Errors
/// The run itself fails.
pub fn rerun_and_compare(entry: &StoredEntry) -> Result<Option<bool>> {
    let Ok(inputs) = serde_json::from_str::<RunInputs>(&entry.inputs) else {
        return Ok(None);
    };
    let name = inputs.request.name()?;
    if name.sources != entry.sources || name.inputs != entry.inputs {
        return Ok(None);
    }

    let encoded_result = match &inputs.request {
        RunRequest::Unmanaged(workload) => encode_result(&name.label, &run_unmanaged(workload)?)?,
        RunRequest::Alone(workload) => encode_result(&name.label, &work::measure_solo(workload)?)?,
        RunRequest::Together(workload, work, plan) => encode_result(
            &name.label,
            &work::measure_joint(workload, work, plan.as_ref())?,
        )?,
        RunRequest::Planned(workload, plan) => {
            encode_result(&name.label, &run_planned(workload, plan)?)?
        }
    };
    Ok(Some(encoded_result == entry.answer))
}
