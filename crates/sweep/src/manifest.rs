//! The manifest of a sweep: a header, then one line per task. Together with the inputs in the same directory, it
//! suffices to run every task.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use cachemate_files::{TrustedDir, open_plain};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::SweepError;
use crate::file::SweepKind;

/// Version of the manifest's format; readers reject other versions.
pub const MANIFEST_FORMAT: u32 = 1;
/// The manifest's name in the sweep's directory.
pub(crate) const MANIFEST_FILE: &str = "manifest.jsonl";

/// The hash of a task's inputs and of the program's version, written as 16 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SweepTaskId(pub u64);

impl SweepTaskId {
    /// Computes the id from a text that contains all inputs on which the task's result depends.
    pub fn from_text(text: &str) -> Self {
        SweepTaskId(xxh3_64(text.as_bytes()))
    }
}

impl fmt::Display for SweepTaskId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:016x}", self.0)
    }
}

impl Serialize for SweepTaskId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for SweepTaskId {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse_id = || format!("found '{text}', expected a task's id: 16 hexadecimal digits");
        let is_lower_hex = text
            .bytes()
            .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
        if text.len() != 16 || !is_lower_hex {
            return Err(refuse_id());
        }
        u64::from_str_radix(text, 16)
            .map(SweepTaskId)
            .map_err(|_| refuse_id())
    }
}

/// Reference to a recording, which is used in place because it is too large to copy.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecordingRef {
    /// Absolute path of the recording.
    pub path: PathBuf,
    /// Size of the recording in bytes.
    pub size_bytes: u64,
    /// XXH3 checksum of the recording.
    pub checksum: String,
}

/// The manifest's first line.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ManifestHeader {
    /// Version of the manifest's format: [`MANIFEST_FORMAT`].
    pub format: u32,
    /// Name of the sweep, for display.
    pub name: String,
    /// Purpose of the sweep; may be empty.
    pub description: String,
    /// Kind of each task.
    pub kind: SweepKind,
    /// Version of the cachemate that made the manifest; only this version may run its tasks.
    pub version: String,
    /// Should results contain everything that was counted?
    pub detail: bool,
    /// Names of the axes, the slowest one first.
    pub axes: Vec<String>,
    /// Number of task lines.
    pub tasks: usize,
    /// Scenario files below the sweep's directory, by the names that points use.
    pub scenarios: BTreeMap<String, String>,
    /// Machine files below the sweep's directory, by the names that points use.
    pub machines: BTreeMap<String, String>,
    /// Files of the programs that are recordings, by the names that points use.
    pub recordings: BTreeMap<String, RecordingRef>,
    /// Options of the papers' experiments, or the fleet whose parts the tasks are.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub repro: Value,
}

impl ManifestHeader {
    /// Returns the header of a sweep that a command makes from a request, without files of its own.
    pub fn of_request(
        kind: SweepKind,
        version: String,
        axes: [&str; 2],
        tasks: usize,
        repro: Value,
    ) -> Self {
        ManifestHeader {
            format: MANIFEST_FORMAT,
            name: String::new(),
            description: String::new(),
            kind,
            version,
            detail: true,
            axes: axes.map(str::to_string).to_vec(),
            tasks,
            scenarios: BTreeMap::new(),
            machines: BTreeMap::new(),
            recordings: BTreeMap::new(),
            repro,
        }
    }
}

/// One task. Equivalent points have the same id, and are run once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SweepTask {
    /// Hash of everything on which the result depends.
    pub id: SweepTaskId,
    /// A JSON object with the value of every axis.
    pub point: Box<str>,
}

impl SweepTask {
    /// Returns the value of each axis at the task's point.
    ///
    /// # Errors
    /// The text is not a JSON object.
    pub fn values(&self) -> Result<BTreeMap<String, Value>, String> {
        serde_json::from_str(&self.point)
            .map_err(|error| format!("point of task {}: {error}", self.id))
    }
}

#[derive(Serialize, Deserialize)]
struct ManifestLine<'a> {
    #[serde(borrow)]
    id: &'a str,
    #[serde(borrow)]
    point: &'a RawValue,
}

/// All tasks of a sweep, and their common header.
#[derive(Clone, PartialEq, Debug)]
pub struct Manifest {
    /// The header, from the first line.
    pub header: ManifestHeader,
    /// The tasks, in the order of the following lines.
    pub tasks: Vec<SweepTask>,
}

impl Manifest {
    /// Reads the manifest of a sweep's directory.
    ///
    /// # Errors
    /// The manifest is missing, or damaged; the error names the line.
    pub fn read(dir: &TrustedDir) -> Result<Self, SweepError> {
        Manifest::parse(&dir.path().join(MANIFEST_FILE), open_manifest(dir)?)
    }

    /// Reads a manifest from its lines; `path` is for messages.
    ///
    /// # Errors
    /// The manifest is damaged; the error names the line.
    pub fn parse(path: &Path, mut lines: impl BufRead) -> Result<Self, SweepError> {
        let header = read_header(path, &mut lines)?;
        // No memory is reserved for the number in the header, because it may be wrong.
        let mut tasks = Vec::new();
        let mut line = String::new();
        while read_line(path, &mut lines, &mut line)? {
            tasks.push(parse_line(path, tasks.len() + 2, &line)?);
        }
        if tasks.len() != header.tasks {
            let problem = format!(
                "damaged: found {} tasks, expected {} as stated in its first line",
                tasks.len(),
                header.tasks
            );
            return Err(SweepError::file(path, problem));
        }
        Ok(Manifest { header, tasks })
    }

    /// Reads the header and the tasks with these ids, in the manifest's order, without keeping other tasks in memory.
    ///
    /// # Errors
    /// An id is unknown, or [`Manifest::read`] fails.
    pub fn find(dir: &TrustedDir, ids: &[SweepTaskId]) -> Result<Self, SweepError> {
        let path = dir.path().join(MANIFEST_FILE);
        let mut lines = open_manifest(dir)?;
        let header = read_header(&path, &mut lines)?;
        let line_starts: Vec<String> = ids.iter().map(|id| format!("{{\"id\":\"{id}\"")).collect();
        let mut tasks: Vec<Option<SweepTask>> = vec![None; ids.len()];
        let (mut line, mut line_number) = (String::new(), 1);
        while tasks.iter().any(Option::is_none) && read_line(&path, &mut lines, &mut line)? {
            line_number += 1;
            for (start, task_slot) in line_starts.iter().zip(&mut tasks) {
                if task_slot.is_none() && line.starts_with(start.as_str()) {
                    *task_slot = Some(parse_line(&path, line_number, &line)?);
                }
            }
        }
        let missing_task = ids.iter().zip(&tasks).find(|(_, task)| task.is_none());
        if let Some((id, _)) = missing_task {
            return Err(SweepError::file(
                &path,
                format!("no task {id} among its {}", header.tasks),
            ));
        }
        Ok(Manifest {
            header,
            tasks: tasks.into_iter().flatten().collect(),
        })
    }

    /// Writes the manifest to a temporary file and renames the file, unless the same manifest exists already.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, dir: &TrustedDir) -> Result<(), SweepError> {
        let path = dir.path().join(MANIFEST_FILE);
        let mut bytes = serde_json::to_vec(&self.header)
            .expect("texts, numbers and checked JSON can be written");
        bytes.push(b'\n');
        for task in &self.tasks {
            writeln!(bytes, "{{\"id\":\"{}\",\"point\":{}}}", task.id, task.point)
                .map_err(SweepError::io_error(&path))?;
        }
        dir.replace(MANIFEST_FILE, &bytes)
            .map_err(SweepError::io_error(&path))
    }

    /// The first task of every id, in the order of the manifest.
    pub fn distinct_tasks(&self) -> Vec<SweepTask> {
        let mut visited_ids = std::collections::BTreeSet::new();
        self.tasks
            .iter()
            .filter(|task| visited_ids.insert(task.id))
            .cloned()
            .collect()
    }
}

/// Maximum length of a line: the header names every input, and a task has a value for each axis.
const LINE_BYTES_LIMIT: u64 = 16 << 20;

fn open_manifest(dir: &TrustedDir) -> Result<BufReader<File>, SweepError> {
    let path = dir.path().join(MANIFEST_FILE);
    let file = dir
        .open_file(Path::new(MANIFEST_FILE), OFlags::RDONLY)
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => SweepError::file(
                &path,
                "no such file: 'cachemate sweep run FILE -o DIR' makes it",
            ),
            _ => SweepError::file(&path, error),
        })?;
    Ok(BufReader::with_capacity(1 << 20, file))
}

fn read_line(path: &Path, lines: &mut impl BufRead, line: &mut String) -> Result<bool, SweepError> {
    line.clear();
    let byte_count = lines
        .by_ref()
        .take(LINE_BYTES_LIMIT)
        .read_line(line)
        .map_err(|error| SweepError::file(path, error))?;
    if byte_count as u64 == LINE_BYTES_LIMIT {
        return Err(SweepError::file(
            path,
            format!("found a line of {LINE_BYTES_LIMIT} bytes or more, expected less"),
        ));
    }
    Ok(byte_count > 0)
}

fn read_header(path: &Path, lines: &mut impl BufRead) -> Result<ManifestHeader, SweepError> {
    let mut line = String::new();
    read_line(path, lines, &mut line)?;
    let format = serde_json::from_str::<Value>(&line)
        .ok()
        .and_then(|value| value.get("format")?.as_u64());
    match format {
        Some(found) if found == u64::from(MANIFEST_FORMAT) => serde_json::from_str(&line)
            .map_err(|error| SweepError::file(path, format!("line 1: {error}"))),
        Some(found) => Err(SweepError::file(
            path,
            format!("line 1: found format {found}, expected {MANIFEST_FORMAT}"),
        )),
        None => Err(SweepError::file(
            path,
            "line 1: expected a manifest's header",
        )),
    }
}

fn parse_line(path: &Path, line_number: usize, text: &str) -> Result<SweepTask, SweepError> {
    let damaged_line =
        |problem: String| SweepError::file(path, format!("line {line_number}: damaged: {problem}"));
    let line: ManifestLine<'_> =
        serde_json::from_str(text).map_err(|error| damaged_line(error.to_string()))?;
    Ok(SweepTask {
        id: line.id.parse().map_err(damaged_line)?,
        point: line.point.get().into(),
    })
}

/// Returns size and checksum of a file's content.
pub fn checksum_of(path: &Path) -> std::io::Result<(u64, String)> {
    let (mut file, mut hash) = (open_plain(path)?, Xxh3::new());
    let (mut size_bytes, mut buffer) = (0u64, vec![0; 1 << 16]);
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok((size_bytes, format!("{:016x}", hash.digest())));
        }
        size_bytes += count as u64;
        hash.update(&buffer[..count]);
    }
}
