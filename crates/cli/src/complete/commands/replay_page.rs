//! `cachemate replay -o`: writes a recorded run as an HTML page.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use cachemate_core::CacheLevel;
use cachemate_interval::JobResults;
use cachemate_page::{GroundTruth, ProgramTruth, RecordedRun, page_html, read_recording};
use cachemate_sim::results::TaskResults;
use cachemate_trace::RunLogReader;
use clap::Args;

use super::sim::{MachineResults, SimJson};
use crate::files::{check_output_path, write_file};
use crate::session::Session;

/// Maximum size of an output of `sim --json`.
const MAX_OUTPUT_BYTES: u64 = 256 << 20;

/// Options for the page of a recorded run.
#[derive(Args)]
pub struct PageArgs {
    /// Write the run as one HTML page instead, which loads nothing and plays it back
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["policy", "json"])]
    pub output: Option<PathBuf>,
    /// Overwrite the page if it exists
    #[arg(long, requires = "output")]
    force: bool,
    /// Also show the ground truth of a simulated run on the page: the output of `cachemate sim --json`
    #[arg(long, value_name = "FILE", requires = "output")]
    truth: Option<PathBuf>,
}

impl PageArgs {
    /// Writes a run log as one HTML page: which programs shared a cache in each window, and the reasons.
    pub fn write_page(&self, session: &Session, log: &str, output: &Path) -> anyhow::Result<()> {
        check_output_path(output, self.force)?;
        let name = Path::new(log)
            .file_name()
            .map_or(log.into(), OsStr::to_string_lossy);
        let mut run = read_recording(RunLogReader::open(log)?, &name)?;
        if let Some(path) = &self.truth {
            run.head.truth = Some(ground_truth(path, &run)?);
        }
        if let Some(cut_off) = &run.head.cut_off {
            session.warn(&format!("the recording is incomplete: {cut_off}"));
        }
        write_file(output, page_html(Some(&run))?.as_bytes(), self.force)?;

        let (windows, path) = (run.snapshots.len(), output.display());
        session.print(&format!("wrote {path}: {windows} windows\n"))
    }
}

fn ground_truth(path: &Path, run: &RecordedRun) -> anyhow::Result<GroundTruth> {
    let path_text = path.display();
    let text = crate::files::read_text(path, MAX_OUTPUT_BYTES)?;
    let truth: SimJson = serde_json::from_str(&text)
        .with_context(|| format!("{path_text}: expected the output of 'cachemate sim --json'"))?;
    let source = format!("{}, seed {}", truth.scenario, truth.seed);
    let results = match truth.results {
        MachineResults::Cycle(results) => results,
        MachineResults::Interval(results) => {
            let programs = interval_truth(&results.jobs, run)
                .with_context(|| format!("{path_text}: of another run"))?;
            return Ok(GroundTruth {
                source,
                programs,
                evicted: Vec::new(),
            });
        }
    };
    let is_contended = |level: CacheLevel, cache: u32| {
        run.head.caches.iter().any(|head| head.cache == cache) && level != CacheLevel::L1Data
    };
    let process_of = |task| {
        results
            .tasks
            .iter()
            .find(|other| other.task == task)
            .map(|task| task.process.0)
    };
    let contended_caches = results
        .caches
        .iter()
        .filter(|cache| is_contended(cache.level, cache.cache.0));
    let evicted_lines = contended_caches
        .flat_map(|cache| &cache.evictions_by_pair)
        .filter_map(|(evictor, victim, lines)| {
            Some((process_of(*evictor)?, process_of(*victim)?, *lines))
        })
        .collect();
    let mut programs: Vec<ProgramTruth> = Vec::new();
    for task in &results.tasks {
        if !programs
            .iter()
            .any(|program| program.program == task.process.0)
        {
            let threads = results
                .tasks
                .iter()
                .filter(|other| other.process == task.process);
            programs.push(true_program(task.process.0, &threads.collect::<Vec<_>>()));
        }
    }
    Ok(GroundTruth {
        source,
        programs,
        evicted: evicted_lines,
    })
}

fn interval_truth(jobs: &[JobResults], run: &RecordedRun) -> anyhow::Result<Vec<ProgramTruth>> {
    let mut programs = Vec::new();
    for (program, job) in (0..).zip(jobs) {
        let mut samples = run.snapshots.iter().flat_map(|snapshot| &snapshot.programs);
        // A program that arrived after the last window is in no window.
        let Some(sample) = samples.find(|candidate| candidate.program == program) else {
            continue;
        };
        if sample.name != job.name {
            bail!(
                "program {program}: found '{}', expected '{}'",
                job.name,
                sample.name
            );
        }
        let (instr_per_cycle, mpki) = (job.instr_per_cycle, job.mpki);
        programs.push(ProgramTruth {
            program,
            instr_per_cycle,
            mpki,
            evicted_by_others_share: None,
        });
    }
    Ok(programs)
}

/// Ground truth of one program, with all its threads together.
fn true_program(program: u32, threads: &[&TaskResults]) -> ProgramTruth {
    let sum_over_threads = |value: &dyn Fn(&TaskResults) -> u64| {
        threads.iter().map(|task| value(task)).sum::<u64>() as f64
    };
    let instructions = sum_over_threads(&|task| task.instructions);
    let cycles = sum_over_threads(&|task| task.cycles);
    let sum_last_level = |value: fn(&cachemate_sim::results::MissBreakdown) -> u64| {
        sum_over_threads(&|task| task.levels.last().map_or(0, value))
    };
    let misses = sum_last_level(|level| level.misses);
    ProgramTruth {
        program,
        instr_per_cycle: (cycles > 0.0).then(|| instructions / cycles),
        mpki: (instructions > 0.0).then(|| 1000.0 * misses / instructions),
        evicted_by_others_share: (misses > 0.0)
            .then(|| sum_last_level(|level| level.inter_task) / misses),
    }
}
