//! Jobs: tasks in runnable form, with all inputs that their points name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

use cachemate_core::MachineSpec;
use cachemate_spec::{Scenario, SpecError, vary_scenario};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Store;
use crate::file::{INPUT_BYTES_LIMIT, SweepKind};
use crate::manifest::{ManifestHeader, RecordingRef, checksum_of};
use crate::store::plain_input;

/// A task with all its inputs.
#[derive(Clone, PartialEq, Debug)]
pub enum SweepJob {
    /// A scenario on the simulated machine.
    Scenario(Box<ScenarioJob>),
    /// The miss-rate curve of a recording.
    Curve(CurveJob),
    /// One run of the papers' experiments; the command interprets its name.
    Repro {
        /// The manifest header's `repro`: experiments, their length, and number of seeds.
        request: Value,
        /// The run's name.
        run: String,
    },
    /// One part of a fleet.
    Fleet {
        /// The fleet, from the manifest's header.
        fleet: Value,
        /// Index of the variant.
        variant: usize,
        /// Index of the cell; `None` for the search for the number of hosts.
        cell: Option<usize>,
    },
}

/// A scenario and a machine, with the point's changes applied to both.
#[derive(Clone, PartialEq, Debug)]
pub struct ScenarioJob {
    /// Programs, policy and duration.
    pub scenario: Scenario,
    /// The machine on which the programs run.
    pub machine: MachineSpec,
    /// Recordings that the scenario uses as programs: files by name.
    pub recordings: BTreeMap<String, PathBuf>,
    /// Should the result contain everything that was counted?
    pub detail: bool,
}

/// The miss-rate curve of a recording.
#[derive(Clone, PartialEq, Debug)]
pub struct CurveJob {
    /// The recording's file.
    pub recording: PathBuf,
    /// Line size in bytes.
    pub line_bytes: u32,
    /// Sizes as on the command line: `64K,1M` or `LO..HI:N`.
    pub sizes: Option<String>,
    /// Share of the lines that is sampled; `None` to follow all lines, which is exact.
    pub sample: Option<f64>,
    /// Seed for the choice of sampled lines; has no effect if all lines are followed.
    pub seed: u64,
}

/// Result of a task.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct JobResult {
    /// Figures by name, with the unit last; `None` if a figure could not be measured.
    pub figures: BTreeMap<String, Option<f64>>,
    /// For a curve: bytes, and misses over accesses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curve: Vec<(u64, f64)>,
    /// All other counts of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<Value>,
}

/// The reason why a task has no result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RunError {
    /// The reason, for the user. The task may be retried.
    Failed(String),
    /// The user stopped the run.
    Stopped,
}

/// Runs jobs; the command implements this trait.
pub trait JobRunner: Send + Sync {
    /// Version of the program; results of different versions may differ.
    fn version(&self) -> String;

    /// Returns the file of a program that is a recording; `None` for programs that need no file, as by default.
    ///
    /// # Errors
    /// There is no such program; the error lists the known ones.
    fn find_recording(&self, _program: &str) -> Result<Option<PathBuf>, String> {
        Ok(None)
    }

    /// Checks everything that can be checked without running the job; by default, nothing can.
    ///
    /// # Errors
    /// The job cannot be run, with the reason.
    fn check(&self, _job: &SweepJob) -> Result<(), String> {
        Ok(())
    }

    /// Runs a job. Equal jobs give bit-identical results.
    ///
    /// # Errors
    /// The task failed or was stopped.
    fn run(&self, job: &SweepJob, stop: &AtomicBool) -> Result<JobResult, RunError>;
}

/// Inputs that points name. Paths are valid either when the manifest is made or when a task runs, never in both cases.
#[derive(Default, Debug)]
pub struct Inputs {
    /// Kind of each task.
    pub kind: SweepKind,
    /// Should results contain everything that was counted?
    pub detail: bool,
    /// Text of each scenario, with its name for messages, by its name on the axis.
    pub scenarios: BTreeMap<String, (String, String)>,
    /// Machine files, by the names that scenarios and axes use.
    pub machines: BTreeMap<String, PathBuf>,
    /// Files of the programs that are recordings, by the names that points use.
    pub recordings: BTreeMap<String, RecordingRef>,
    /// Options of the papers' experiments, or a fleet; `Null` in every other sweep.
    pub repro: Value,
    /// Names of recordings whose checksum was already verified.
    pub(crate) verified_names: Mutex<Vec<String>>,
}

impl Inputs {
    /// Opens the inputs that a manifest's header names, below the sweep's directory.
    ///
    /// # Errors
    /// An input is missing or unreadable.
    pub fn open(store: &Store, header: &ManifestHeader) -> Result<Self, String> {
        let mut inputs = Inputs {
            kind: header.kind,
            detail: header.detail,
            recordings: header.recordings.clone(),
            repro: header.repro.clone(),
            ..Inputs::default()
        };
        for (name, file) in &header.scenarios {
            let text = read_input(store, file)?;
            inputs.scenarios.insert(name.clone(), (name.clone(), text));
        }
        for (machine_name, file) in &header.machines {
            read_input(store, file)?;
            inputs
                .machines
                .insert(machine_name.clone(), store.path().join(file));
        }
        Ok(inputs)
    }

    /// The scenario of a point, with its machine.
    ///
    /// # Errors
    /// The sweep has no such scenario, or the point's values make it impossible; the error names the field.
    pub fn scenario_at(
        &self,
        point: &[(&str, &Value)],
    ) -> Result<(Scenario, MachineSpec), SpecError> {
        let axis_value = |name: &str| {
            point
                .iter()
                .find(|(axis, _)| *axis == name)
                .map(|(_, value)| *value)
        };
        let scenario = axis_value("scenario")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let (label, text) = self
            .scenarios
            .get(scenario)
            .ok_or_else(|| whole_file_error(scenario, "no such scenario in the sweep"))?;
        let mut changes: Vec<(String, toml::Value)> = Vec::new();
        for (axis, value) in point.iter().filter(|(axis, _)| *axis != "scenario") {
            let value = match (*axis, *value) {
                ("policy", Value::String(name)) => {
                    toml::Table::from_iter([("name".to_string(), name.clone().into())]).into()
                }
                _ => toml::Value::try_from(value)
                    .map_err(|error| whole_file_error(label, &error.to_string()))?,
            };
            changes.push((axis.to_string(), value));
        }
        let scenario_machine = || {
            toml::from_str::<toml::Table>(text)
                .ok()?
                .get("machine")?
                .as_str()
                .map(str::to_string)
        };
        let machine = axis_value("machine")
            .and_then(Value::as_str)
            .map(str::to_string)
            .or_else(scenario_machine)
            .unwrap_or_default();
        let name = machine.split('?').next().unwrap_or_default();
        if let Some(path) = self.machines.get(name) {
            let moved_machine = machine.replacen(name, &path.display().to_string(), 1);
            changes.retain(|(axis, _)| axis != "machine");
            changes.push(("machine".to_string(), moved_machine.into()));
        }
        vary_scenario(label, text, &changes)
    }

    /// The job of the task at this point.
    ///
    /// # Errors
    /// An input is missing, changed or invalid; the text describes the problem.
    pub fn job_at(&self, point: &[(&str, &Value)]) -> Result<SweepJob, String> {
        let axis_value = |name: &str| {
            point
                .iter()
                .find(|(axis, _)| *axis == name)
                .map(|(_, value)| *value)
        };
        match self.kind {
            SweepKind::Scenario => {
                let (scenario, machine) =
                    self.scenario_at(point).map_err(|error| error.to_string())?;
                let mut recordings = BTreeMap::new();
                for program in &scenario.programs {
                    if let Some(manifest_entry) = self.recordings.get(&program.program) {
                        recordings.insert(
                            program.program.clone(),
                            self.verify_recording(&program.program, manifest_entry)?,
                        );
                    }
                }
                Ok(SweepJob::Scenario(Box::new(ScenarioJob {
                    scenario,
                    machine,
                    recordings,
                    detail: self.detail,
                })))
            }
            SweepKind::Curve => {
                let name = axis_value("recording")
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                let manifest_entry = self
                    .recordings
                    .get(name)
                    .ok_or_else(|| format!("'{name}' is not in the manifest"))?;
                let parse_whole_number = |name: &str, value: &Value| {
                    value
                        .as_u64()
                        .ok_or_else(|| format!("{name}: found {value}, expected a whole number"))
                };
                let line_bytes = axis_value("line_bytes")
                    .map_or(Ok(64), |value| parse_whole_number("line_bytes", value))?;
                let line_bytes = u32::try_from(line_bytes)
                    .map_err(|_| format!("line_bytes: found {line_bytes}"))?;
                let text_of = |value: &Value| {
                    value
                        .as_str()
                        .map_or_else(|| value.to_string(), str::to_string)
                };
                let parse_share = |value: &Value| {
                    value.as_f64().ok_or_else(|| {
                        format!("sample: found {value}, expected a share such as 0.01")
                    })
                };
                let seed =
                    axis_value("seed").map_or(Ok(0), |value| parse_whole_number("seed", value))?;
                let sample = axis_value("sample").map(parse_share).transpose()?;
                let (recording, sizes) = (
                    self.verify_recording(name, manifest_entry)?,
                    axis_value("sizes").map(text_of),
                );
                Ok(SweepJob::Curve(CurveJob {
                    recording,
                    line_bytes,
                    sizes,
                    sample,
                    seed,
                }))
            }
            SweepKind::Repro => {
                let run = axis_value("run")
                    .and_then(Value::as_str)
                    .unwrap_or_default()
                    .to_string();
                Ok(SweepJob::Repro {
                    request: self.repro.clone(),
                    run,
                })
            }
            SweepKind::Fleet => {
                let index_of = |name: &str| {
                    axis_value(name)
                        .and_then(Value::as_u64)
                        .map(|index| index as usize)
                };
                let variant =
                    index_of("variant").ok_or("variant: found none, expected a number")?;
                Ok(SweepJob::Fleet {
                    fleet: self.repro.clone(),
                    variant,
                    cell: index_of("cell"),
                })
            }
        }
    }

    /// Returns the recording's file if it is unchanged since the manifest was made.
    fn verify_recording(&self, name: &str, recording: &RecordingRef) -> Result<PathBuf, String> {
        let lock_verified = || {
            self.verified_names
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let is_verified = lock_verified()
            .iter()
            .any(|verified_name| verified_name == name);
        if !is_verified {
            let (path, path_text) = (&recording.path, recording.path.display());
            let (bytes, checksum) =
                checksum_of(path).map_err(|error| format!("{path_text}: {error}"))?;
            if (bytes, &checksum) != (recording.size_bytes, &recording.checksum) {
                return Err(format!(
                    "{path_text}: found {bytes} bytes with checksum {checksum}, expected {} with {}: it is not the file \
                     that the manifest was made with",
                    recording.size_bytes, recording.checksum
                ));
            }
            lock_verified().push(name.to_string());
        }
        Ok(recording.path.clone())
    }
}

/// The text of an input, which must be a plain name below `inputs/`.
fn read_input(store: &Store, relative: &str) -> Result<String, String> {
    let path = store.path().join(relative);
    let describe_problem = |problem: String| format!("{}: {problem}", path.display());
    plain_input(relative).map_err(describe_problem)?;
    let input_text = store
        .root()
        .read_text(Path::new(relative), INPUT_BYTES_LIMIT)
        .map_err(|error| error.to_string())?;
    input_text.ok_or_else(|| describe_problem("no such file".to_string()))
}

/// An error about a file as a whole.
pub(crate) fn whole_file_error(file: &str, found: &str) -> SpecError {
    SpecError {
        file: file.into(),
        line_column: None,
        field: None,
        found: found.into(),
        expected: "a usable point".into(),
        nearest: None,
        next: None,
    }
}
