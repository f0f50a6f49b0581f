//! TC-2 on real input: a recorded database server with two databases, replayed on the simulated machine.
//!
//! MariaDB runs under the project's recorder, with sysbench's read-write mix on each of two databases, four connections
//! each. `recordings/servers/mariadb.sh` makes the recording and the list of connections: the kernel's thread id and
//! the database, from the server's own process list while it ran, so that the truth is independent of the clustering.
//! The recorder's filter passes all accesses that caches request from each other; accesses to a thread's private data
//! are mostly not in the recording. The server's own threads sleep between two of their rounds, as they did.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cachemate_core::{
    Access, AccessKind, AccessSource, BatchEnd, CounterEvent, StallCause, WindowRecord,
};
use cachemate_sim::machine::SimProgram;
use cachemate_trace::{CmtReader, CmtSource, ThreadTotals, TraceReader, recording_dirs};
use serde::{Deserialize, Serialize};

use super::figures::sharing_map_figures as shmap_figures;
use super::insight::{RoundAccuracy, round_accuracies};
use super::setup::{
    PlacementRound, SMALL_MACHINE, TIME_SCALE, WINDOW_CYCLES, placement_rounds, run_clustering,
};
use crate::recordings;
use crate::setup::{failed, load_machine};
use crate::{DataPoint, ExperimentContext, Finding, ReproError, Result};

/// Samples of one round.
const ROUND_SAMPLES: u64 = 50_000;
const MAX_THREAD_LIST_BYTES: u64 = 16 << 20;
const RECORDING_NAME: &str = "mariadb";
const CLUSTERING_METHODS: [&str; 2] = ["co-clusters", "one-pass"];

/// A thread of the recording.
#[derive(Clone, Copy, PartialEq, Debug)]
struct RecordedThread {
    thread: u32,
    /// The database; `None` for one of the server's own threads.
    database: Option<u32>,
    /// Pause between two rounds of its records: its idle time relative to the connections.
    idle_ns: u64,
}

fn recording_error(problem: impl Into<String>) -> ReproError {
    ReproError::Failed(RECORDING_NAME.to_string(), problem.into())
}

/// The recording, in the first directory that has it.
fn find_recording() -> Result<PathBuf> {
    let searched_dirs = recording_dirs();
    let recording = searched_dirs
        .iter()
        .map(|dir| dir.join("servers/mariadb.cmt"))
        .find(|path| path.is_file());
    recording.ok_or_else(|| {
        recording_error(
            "found no servers/mariadb.cmt among the bundled recordings; CACHEMATE_RECORDINGS may name their directory",
        )
    })
}

/// The numbers of the databases by the kernel's thread id, from the list that the recording's
/// script writes, in order of appearance.
fn parse_databases(text: &str, name: &str) -> Result<BTreeMap<u32, u32>> {
    let mut names: Vec<&str> = Vec::new();
    let mut database_by_thread = BTreeMap::new();

    for (index, line) in text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.starts_with('#'))
    {
        let words: Vec<&str> = line.split_whitespace().collect();
        let thread_and_database = match words[..] {
            [thread, database] => thread.parse().ok().map(|thread| (thread, database)),
            _ => None,
        };
        let Some((thread, database)) = thread_and_database else {
            let expectation = "expected a thread's number and the name of a database";
            return Err(recording_error(format!(
                "{name}, line {}: found '{line}', {expectation}",
                index + 1
            )));
        };
        let database_number = names
            .iter()
            .position(|&named_database| named_database == database)
            .unwrap_or_else(|| {
                names.push(database);
                names.len() - 1
            });

        if database_by_thread
            .insert(thread, database_number as u32)
            .is_some()
        {
            return Err(recording_error(format!(
                "{name}, line {}: found thread {thread} again, expected it once",
                index + 1
            )));
        }
    }

    Ok(database_by_thread)
}

/// Threads with records, each with its database; every thread of the list must be among them.
fn match_threads(
    totals: &[ThreadTotals],
    database_by_thread: &BTreeMap<u32, u32>,
    hertz: u64,
) -> Result<Vec<RecordedThread>> {
    let threads_with_records: Vec<&ThreadTotals> =
        totals.iter().filter(|thread| thread.records > 0).collect();
    let database_of = |thread: &ThreadTotals| {
        thread
            .os_thread
            .and_then(|id| database_by_thread.get(&id).copied())
    };

    let was_recorded = |id: &u32| {
        threads_with_records
            .iter()
            .any(|thread| thread.os_thread == Some(*id))
    };
    if let Some(id) = database_by_thread.keys().find(|id| !was_recorded(id)) {
        let os_threads: Vec<String> = threads_with_records
            .iter()
            .map(|thread| format!("{:?}", thread.os_thread))
            .collect();
        return Err(recording_error(format!(
            "found threads {}, expected {id} of the list among them",
            os_threads.join(", ")
        )));
    }

    let instructions_of = |thread: &ThreadTotals| thread.instructions.unwrap_or(0);
    let connection_instr: Vec<u64> = threads_with_records
        .iter()
        .filter(|thread| database_of(thread).is_some())
        .map(|thread| instructions_of(thread))
        .collect();

    // A round of a connection takes about one cycle per instruction.
    let round_instr = connection_instr.iter().sum::<u64>() / connection_instr.len().max(1) as u64;
    let idle_ns_of = |thread: &ThreadTotals| {
        let idle_cycles = if database_of(thread).is_some() {
            0
        } else {
            round_instr.saturating_sub(instructions_of(thread))
        };
        (u128::from(idle_cycles) * 1_000_000_000 / u128::from(hertz)) as u64
    };
    let recorded_thread = |thread: &&ThreadTotals| RecordedThread {
        thread: thread.thread,
        database: database_of(thread),
        idle_ns: idle_ns_of(thread),
    };
    let mut threads: Vec<RecordedThread> =
        threads_with_records.iter().map(recorded_thread).collect();
    threads.sort_unstable_by_key(|thread| thread.thread);
    Ok(threads)
}

fn thread_list_of(recording: &Path) -> PathBuf {
    recording.with_extension("threads")
}

fn recorded_threads(path: &Path, hertz: u64) -> Result<Vec<RecordedThread>> {
    let thread_list = thread_list_of(path);
    let name = thread_list.display().to_string();
    let database_by_thread = parse_databases(
        &cachemate_files::read_text_limited(&thread_list, MAX_THREAD_LIST_BYTES)
            .map_err(failed(&name))?,
        &name,
    )?;
    let mut reader = CmtReader::open(path).map_err(failed(RECORDING_NAME))?;
    let mut batch = Vec::new();
    while reader
        .read_batch(&mut batch)
        .map_err(failed(RECORDING_NAME))?
    {}
    let totals = reader
        .totals()
        .ok_or_else(|| recording_error("found a recording without totals, expected a whole one"))?;
    match_threads(&totals.threads, &database_by_thread, hertz)
}

/// One round of a thread's records, repeated with a pause in between.
struct PacedSource {
    round_accesses: Vec<Access>,
    next_index: usize,
    finished_rounds: u64,
    idle_ns: u64,
}

/// Accesses handed out per turn.
const TURN_ACCESSES: usize = 2048;

impl PacedSource {
    fn from_source(mut source: CmtSource, idle_ns: u64) -> Self {
        let (mut round_accesses, mut record_count) = (Vec::new(), 0);
        let (mut batch, round_records) = (Vec::new(), source.records_per_round());
        while record_count < round_records && source.next_batch(&mut batch) == BatchEnd::More {
            for access in batch.drain(..) {
                if record_count < round_records {
                    record_count += u64::from(access.kind() != AccessKind::Compute);
                    round_accesses.push(access);
                }
            }
        }
        PacedSource {
            round_accesses,
            next_index: 0,
            finished_rounds: 0,
            idle_ns,
        }
    }
}

impl AccessSource for PacedSource {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        if self.next_index == self.round_accesses.len() {
            (self.next_index, self.finished_rounds) = (0, self.finished_rounds + 1);
            return BatchEnd::Sleep { ns: self.idle_ns };
        }
        let end_index = self
            .round_accesses
            .len()
            .min(self.next_index + TURN_ACCESSES);
        batch.extend_from_slice(&self.round_accesses[self.next_index..end_index]);
        self.next_index = end_index;
        BatchEnd::More
    }

    fn progress(&self) -> Option<f64> {
        Some(self.finished_rounds as f64)
    }
}

fn replay_program(path: &Path, threads: &[RecordedThread]) -> Result<SimProgram> {
    // Opened once to detect errors now; the maker opens them again.
    for thread in threads {
        CmtSource::open(path, thread.thread, 0, 0).map_err(failed(RECORDING_NAME))?;
    }
    let (path, threads) = (path.to_path_buf(), threads.to_vec());
    let make_threads = move |_| {
        let open_thread = |thread: &RecordedThread| -> Box<dyn AccessSource> {
            let source = CmtSource::open(&path, thread.thread, 0, 0).expect("opened before");
            if thread.idle_ns == 0 {
                Box::new(source)
            } else {
                Box::new(PacedSource::from_source(source, thread.idle_ns))
            }
        };
        threads.iter().map(open_thread).collect()
    };
    Ok(SimProgram::new(RECORDING_NAME, Box::new(make_threads)))
}

/// The findings of one run: the last round that placed threads, the first round of sampling, and the databases.
#[derive(Serialize, Deserialize)]
struct RecordedRunResult {
    last: Option<PlacementRound>,
    insight: Option<RoundAccuracy>,
    truth: Vec<Option<u32>>,
    remote_percent: f64,
}

impl RecordedRunResult {
    fn agreement(&self) -> f64 {
        self.last
            .as_ref()
            .map_or(0.0, |round| round.agreement(&self.truth))
    }
}

/// The share of all cycles of the run that stall on remote caches, in percent.
fn remote_stall_percent(records: &[WindowRecord]) -> f64 {
    let sum_of_counts = |event| {
        records
            .iter()
            .flat_map(|r| &r.observation.tasks)
            .filter_map(|task| task.counts.get(event))
            .sum::<f64>()
    };
    100.0 * sum_of_counts(CounterEvent::StallCycles(StallCause::RemoteCache))
        / sum_of_counts(CounterEvent::Cycles).max(1.0)
}

/// A run over the recording; the digests of its file and of its list of threads stand for their content.
#[derive(Serialize)]
struct RecordedRunInputs<'a> {
    method: &'static str,
    seed: u64,
    file_digests: &'a [String; 2],
}

fn run_recorded(
    context: &ExperimentContext<'_>,
    &RecordedRunInputs { method, seed, .. }: &RecordedRunInputs<'_>,
) -> Result<RecordedRunResult> {
    context.report_progress(&format!("TC-2 recorded server, {method}, seed {seed}"));

    let path = find_recording()?;
    let spec = load_machine(SMALL_MACHINE)?;
    let threads = recorded_threads(&path, spec.hertz)?;
    let parameters = format!(
        "window_cycles = {WINDOW_CYCLES}\nsamples = {ROUND_SAMPLES}\nactivation_share = 0.01\nmethod = \"{method}\""
    );
    let programs = vec![replay_program(&path, &threads)?];
    let records = run_clustering(
        &spec,
        programs,
        context.pick(6, 12) * WINDOW_CYCLES,
        parameters,
        false,
        seed,
    )?;
    let true_groups: Vec<Option<u32>> = threads.iter().map(|thread| thread.database).collect();
    let first_round_accuracy = round_accuracies(&records, &true_groups).into_iter().next();
    let last_round = placement_rounds(&records, true_groups.len()).pop();
    Ok(RecordedRunResult {
        last: last_round,
        insight: first_round_accuracy,
        truth: true_groups,
        remote_percent: remote_stall_percent(&records),
    })
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let recording = find_recording()?;
    let file_digests =
        [&recording, &thread_list_of(&recording)].map(|path| recordings::file_digest(path));
    let inputs = |method, seed| RecordedRunInputs {
        method,
        seed,
        file_digests: &file_digests,
    };
    let run = context.run_cases(&CLUSTERING_METHODS, inputs, run_recorded)?;

    let mut points = Vec::new();
    for method in CLUSTERING_METHODS {
        let mut add_point = |series: &str, value: &dyn Fn(&RecordedRunResult) -> Option<f64>| {
            points.push(DataPoint::from_values(
                series,
                method,
                run.of_case(method).filter_map(value),
            ));
        };
        add_point("adjusted Rand index", &|run| Some(run.agreement()));
        add_point("clusters", &|run| Some(run.last.as_ref()?.clusters as f64));
        add_point("unclustered connections", &|run| {
            Some(run.last.as_ref()?.count_unclustered_workers(&run.truth) as f64)
        });

        add_point("server's own threads", &|run| {
            Some(run.truth.iter().filter(|cluster| cluster.is_none()).count() as f64)
        });
        add_point("cycles stalled on remote caches, %", &|run| {
            Some(run.remote_percent)
        });
        add_point("first round: samples", &|run| {
            Some(run.insight.as_ref()?.samples as f64)
        });

        add_point("first round: samples past the filter", &|run| {
            Some(run.insight.as_ref()?.passed as f64)
        });
        add_point("first round: entries global by the thesis's rule", &|run| {
            Some(run.insight.as_ref()?.global as f64)
        });
        add_point("first round: mean similarity within a database", &|run| {
            Some(run.insight.as_ref()?.inside)
        });
        add_point("first round: mean similarity across databases", &|run| {
            Some(run.insight.as_ref()?.across)
        });
    }

    let agreements = run
        .of_case(CLUSTERING_METHODS[0])
        .map(RecordedRunResult::agreement);
    let per_seed = context.with_seeds(agreements);
    let mut finding = Finding::declared("tc-2-recorded-server", &per_seed)
        .with_points(points)
        .with_time_scale(TIME_SCALE as f64);
    if let Some(round) = run
        .of_case(CLUSTERING_METHODS[0])
        .find_map(|runs| runs.last.as_ref())
    {
        finding
            .figures
            .extend(shmap_figures("recorded MariaDB", round));
    }

    Ok(vec![finding])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are databases numbered in order of appearance, and is an invalid line rejected with its position?
    #[test]
    fn the_list_of_threads_is_read_or_rejected_with_the_line() {
        assert_eq!(
            parse_databases("# comment\n7 b\n9 a\n11 b\n", "x").unwrap(),
            [(7, 0), (9, 1), (11, 0)].into()
        );
        let parse_failure =
            |text: &str| parse_databases(text, "x.threads").unwrap_err().to_string();
        assert!(parse_failure("7 b\nseven a\n").contains("x.threads, line 2: found 'seven a'"));
        assert!(parse_failure("7 b\n7 a\n").contains("x.threads, line 2: found thread 7 again"));
    }

    /// Are threads matched only by the kernel's thread id, and is a connection without records an error?
    #[test]
    fn threads_are_matched_by_the_kernels_thread_id() {
        let thread_totals = |thread, os_thread, instructions| ThreadTotals {
            thread,
            os_thread: Some(os_thread),
            records: 1,
            instructions: Some(instructions),
            ..ThreadTotals::default()
        };
        let totals = [
            thread_totals(0, 50, 400),
            thread_totals(1, 52, 3_000),
            thread_totals(2, 51, 1_000),
        ];
        let matches = match_threads(&totals, &[(51, 1), (52, 0)].into(), 1_000_000_000).unwrap();
        let background = RecordedThread {
            thread: 0,
            database: None,
            idle_ns: 1_600,
        };

        let connection_thread = |thread, database| RecordedThread {
            thread,
            database: Some(database),
            idle_ns: 0,
        };
        assert_eq!(
            matches,
            [background, connection_thread(1, 0), connection_thread(2, 1)]
        );
        let error = match_threads(&totals, &[(53, 1)].into(), 1)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("expected 53 of the list among them"),
            "{error}"
        );
    }
}
