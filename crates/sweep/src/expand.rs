//! Expands a sweep file into its manifest: checks every point, copies every input, and names every task by its
//! content.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cachemate_files::read_text_limited;
use cachemate_spec::{Scenario, machine_names};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::file::{INPUT_BYTES_LIMIT, SweepDefinition, SweepKind};
use crate::job::{Inputs, JobRunner, SweepJob, whole_file_error};
use crate::manifest::{
    MANIFEST_FORMAT, Manifest, ManifestHeader, RecordingRef, SweepTask, SweepTaskId, checksum_of,
};
use crate::points::Point;
use crate::{Store, SweepError};

/// A manifest with the files that its tasks read.
pub struct ExpandedSweep {
    /// The manifest, with a header and one task for each point.
    pub manifest: Manifest,
    /// Contents of input files, by name below the sweep's directory.
    pub files: BTreeMap<String, String>,
}

impl ExpandedSweep {
    /// Writes the inputs, and then the manifest, into the sweep's directory.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, store: &Store) -> Result<(), SweepError> {
        for (name, content) in &self.files {
            store.write_input(name, content)?;
        }
        store.write_manifest(&self.manifest)
    }
}

/// Checks every point of a sweep and makes its manifest. Recordings are read for their checksums; nothing is run.
///
/// # Errors
/// A scenario or machine is impossible, a program is missing, or the command does not have a policy. Each error names
/// file and field, and the point at which it occurred.
pub fn expand(
    sweep: &SweepDefinition,
    job_runner: &dyn JobRunner,
) -> Result<ExpandedSweep, SweepError> {
    let mut builder = ManifestBuilder::new(sweep, job_runner)?;
    let mut tasks = Vec::new();
    let mut last_hashes: Option<(Point<'_>, u64, u64)> = None;
    for point in sweep.points() {
        let seed = point
            .iter()
            .find(|(axis, _)| *axis == "seed")
            .and_then(|(_, value)| value.as_u64());
        let other_axes: Point<'_> = point
            .iter()
            .filter(|(axis, _)| *axis != "seed")
            .copied()
            .collect();
        // Seeds vary fastest, so that everything else is built once for all of them.
        let known_hashes = last_hashes
            .as_ref()
            .filter(|(hashed_axes, ..)| *hashed_axes == other_axes)
            .map(|(_, content, content_seed)| (*content, *content_seed));
        let (content_hash, scenario_seed) = match known_hashes {
            Some(previous) => previous,
            None => {
                let (content_hash, content_seed) = builder.hash_content(&other_axes)?;
                last_hashes = Some((other_axes, content_hash, content_seed));
                (content_hash, content_seed)
            }
        };
        let id = SweepTaskId::from_text(&format!(
            "{content_hash:016x} {}",
            seed.unwrap_or(scenario_seed)
        ));
        let values: BTreeMap<&str, &Value> = point.into_iter().collect();
        let point_json = serde_json::to_string(&values)
            .map_err(|error| SweepError::Refused(error.to_string()))?;
        tasks.push(SweepTask {
            id,
            point: point_json.into(),
        });
    }
    if tasks.is_empty() {
        return Err(whole_file_error(&sweep.path, "no point that the filters leave").into());
    }
    Ok(builder.finish(sweep, tasks))
}

struct ManifestBuilder<'a> {
    job_runner: &'a dyn JobRunner,
    dir: &'a Path,
    version: String,
    inputs: Inputs,
    files: BTreeMap<String, String>,
    scenarios: BTreeMap<String, String>,
    machines: BTreeMap<String, String>,
    /// Names of programs that need no file.
    built_in_programs: BTreeSet<String>,
}

impl<'a> ManifestBuilder<'a> {
    fn new(sweep: &'a SweepDefinition, job_runner: &'a dyn JobRunner) -> Result<Self, SweepError> {
        let inputs = Inputs {
            kind: sweep.file.kind,
            detail: sweep.file.detail,
            ..Inputs::default()
        };
        let dir = &sweep.dir;
        let mut builder = ManifestBuilder {
            job_runner,
            dir,
            version: job_runner.version(),
            inputs,
            files: BTreeMap::new(),
            scenarios: BTreeMap::new(),
            machines: BTreeMap::new(),
            built_in_programs: BTreeSet::new(),
        };
        for name in &sweep.file.axes.scenario {
            let path = dir.join(name);
            let text = read_text_limited(&path, INPUT_BYTES_LIMIT)
                .map_err(|error| SweepError::file(&path, error))?;
            builder
                .scenarios
                .insert(name.clone(), builder.input_path("scenario", &text));
            builder
                .inputs
                .scenarios
                .insert(name.clone(), (path.display().to_string(), text));
        }
        Ok(builder)
    }

    /// Stores a text among the inputs, under the hash of its content.
    fn store_input(&mut self, subject: &str, text: String) -> String {
        let name = self.input_path(subject, &text);
        self.files.insert(name.clone(), text);
        name
    }

    fn input_path(&self, subject: &str, text: &str) -> String {
        format!("inputs/{subject}-{:016x}.toml", xxh3_64(text.as_bytes()))
    }

    /// The hash of everything but the seed, and the scenario's seed, for points that set none.
    fn hash_content(&mut self, point: &Point<'_>) -> Result<(u64, u64), SweepError> {
        let describe_point = || {
            point
                .iter()
                .map(|(axis, value)| format!("{axis} {value}"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let refuse_at_point =
            |problem: String| SweepError::Refused(format!("{problem} (at {})", describe_point()));
        match self.inputs.kind {
            SweepKind::Scenario => self.hash_scenario(point),
            SweepKind::Curve => self.hash_curve(point).map_err(refuse_at_point),
            SweepKind::Repro | SweepKind::Fleet => Err(SweepError::Refused(
                "runs of experiments and fleets are not made from a sweep file".into(),
            )),
        }
    }

    fn hash_scenario(&mut self, point: &Point<'_>) -> Result<(u64, u64), SweepError> {
        let (scenario, machine) = self.inputs.scenario_at(point)?;
        self.copy_machine_file(&scenario.machine)?;
        let label = self.point_label(point);
        let refuse_input = |problem: String| SweepError::Refused(format!("{label}: {problem}"));
        let mut checksums = Vec::new();
        let programs: Vec<String> = scenario
            .programs
            .iter()
            .map(|program| program.program.clone())
            .collect();
        for program in programs {
            checksums.push(self.find_checksum(&program, None).map_err(refuse_input)?);
        }
        let seed = scenario.seed;
        // The display name and the path of the machine's description are omitted, because they do not affect the run.
        let base_scenario = Scenario {
            name: String::new(),
            description: String::new(),
            machine: String::new(),
            seed: 0,
            ..scenario.clone()
        };
        let job = self.inputs.job_at(point).map_err(refuse_input)?;
        self.job_runner.check(&job).map_err(refuse_input)?;
        let content = serde_json::to_string(&(
            &self.version,
            "scenario",
            self.inputs.detail,
            &base_scenario,
            &machine,
            checksums,
        ))
        .map_err(|error| refuse_input(error.to_string()))?;
        Ok((xxh3_64(content.as_bytes()), seed))
    }

    /// Describes a point for messages: its scenario's file, and its changes.
    fn point_label(&self, point: &Point<'_>) -> String {
        let axes = point.iter().filter(|(axis, _)| *axis != "scenario");
        let axis_values: Vec<String> = axes
            .map(|(axis, value)| format!("{axis} {value}"))
            .collect();
        let scenario = point
            .iter()
            .find(|(axis, _)| *axis == "scenario")
            .and_then(|(_, value)| value.as_str());
        let file = scenario
            .and_then(|scenario_name| self.inputs.scenarios.get(scenario_name))
            .map_or("", |(label, _)| label);
        if axis_values.is_empty() {
            file.to_string()
        } else {
            format!("{file} with {}", axis_values.join(", "))
        }
    }

    /// Copies a machine file into the inputs; the scenario's path may already refer to the copy.
    fn copy_machine_file(&mut self, machine_name: &str) -> Result<(), SweepError> {
        let name = machine_name
            .split('?')
            .next()
            .unwrap_or_default()
            .to_string();
        if machine_names().contains(&name.as_str()) || self.machines.contains_key(&name) {
            return Ok(());
        }
        let text = read_text_limited(Path::new(&name), INPUT_BYTES_LIMIT)
            .map_err(|error| SweepError::file(Path::new(&name), error))?;
        let path = self.store_input("machine", text);
        self.machines.insert(name, path);
        Ok(())
    }

    fn hash_curve(&mut self, point: &Point<'_>) -> Result<(u64, u64), String> {
        let recording = point
            .iter()
            .find(|(axis, _)| *axis == "recording")
            .and_then(|(_, value)| value.as_str());
        let recording_name = recording.unwrap_or_default().to_string();
        let checksum = self.find_checksum(&recording_name, Some(self.dir.to_path_buf()))?;
        let job = self.inputs.job_at(point)?;
        self.job_runner.check(&job)?;
        let SweepJob::Curve(curve) = job else {
            return Err("not a curve".to_string());
        };
        let curve_key = (curve.line_bytes, &curve.sizes, curve.sample);
        let content = serde_json::to_string(&(&self.version, "curve", checksum, curve_key))
            .map_err(|e| e.to_string())?;
        Ok((xxh3_64(content.as_bytes()), 0))
    }

    /// The checksum of a program's recording; `None` if the program is not a recording. Relative paths are relative to
    /// `dir`, or to the working directory.
    fn find_checksum(
        &mut self,
        program: &str,
        dir: Option<PathBuf>,
    ) -> Result<Option<String>, String> {
        if self.built_in_programs.contains(program) {
            return Ok(None);
        }
        if let Some(stored) = self.inputs.recordings.get(program) {
            return Ok(Some(stored.checksum.clone()));
        }
        let adjacent_path = dir
            .map(|dir| dir.join(program))
            .filter(|path| path.is_file());
        let recording_path = match adjacent_path {
            Some(path) => Some(path),
            None => self.job_runner.find_recording(program)?,
        };
        let Some(path) = recording_path else {
            self.built_in_programs.insert(program.to_string());
            return Ok(None);
        };
        let read_error = |error: std::io::Error| format!("{}: {error}", path.display());
        let path = path.canonicalize().map_err(read_error)?;
        let (size_bytes, checksum) = checksum_of(&path).map_err(read_error)?;
        let recording = RecordingRef {
            path,
            size_bytes,
            checksum: checksum.clone(),
        };
        self.inputs
            .recordings
            .insert(program.to_string(), recording);
        Ok(Some(checksum))
    }

    fn finish(mut self, sweep: &SweepDefinition, tasks: Vec<SweepTask>) -> ExpandedSweep {
        let texts: Vec<String> = self
            .inputs
            .scenarios
            .values()
            .map(|(_, text)| text.clone())
            .collect();
        texts
            .into_iter()
            .for_each(|text| _ = self.store_input("scenario", text));
        let header = ManifestHeader {
            format: MANIFEST_FORMAT,
            name: sweep.file.name.clone(),
            description: sweep.file.description.clone(),
            kind: sweep.file.kind,
            version: self.version,
            detail: sweep.file.detail,
            axes: sweep.axes.iter().map(|axis| axis.name.clone()).collect(),
            tasks: tasks.len(),
            scenarios: self.scenarios,
            machines: self.machines,
            recordings: self.inputs.recordings,
            repro: Value::Null,
        };
        ExpandedSweep {
            manifest: Manifest { header, tasks },
            files: self.files,
        }
    }
}
