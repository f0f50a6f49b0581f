//! Overhead of a sweep: 100 000 finished tasks, tasks of 200 ms, and two workers against two plain processes. Prints
//! figures and targets; `make sweep-engines` runs it. The order alternates between rounds, and medians are compared.

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use cachemate_sweep::engines::local::LocalEngine;
use cachemate_sweep::{
    DriveOptions, Inputs, JobResult, JobRunner, RunError, Store, SweepJob, drive, read_status,
};
use common::sample_manifest;

const TASKS: usize = 100_000;
const TASK_MS: u64 = 200;
/// Tasks of 200 ms, for each of two workers.
const TASKS_EACH: u64 = 20;
const ROUNDS: usize = 5;

/// Counts the steps that it is given.
struct CountingSource {
    steps: u64,
}

impl JobRunner for CountingSource {
    fn version(&self) -> String {
        "1".to_string()
    }
    fn run(&self, job: &SweepJob, _: &AtomicBool) -> Result<JobResult, RunError> {
        let SweepJob::Repro { run, .. } = job else {
            return Err(RunError::Failed("another job".to_string()));
        };
        let value = run_steps(self.steps, run.len() as u64) as f64;
        Ok(JobResult {
            figures: BTreeMap::from([("value".to_string(), Some(value))]),
            ..JobResult::default()
        })
    }
}

fn run_steps(steps: u64, seed: u64) -> u64 {
    (0..steps).fold(seed | 1, |state, step| {
        std::hint::black_box(state.wrapping_mul(0x5851_F42D_4C95_7F2D) ^ step)
    })
}

/// Number of steps that take this long on this machine now.
fn steps_of(time: Duration) -> u64 {
    let mut steps = 1 << 20;
    loop {
        let start = Instant::now();
        run_steps(steps, 1);
        let took = start.elapsed();
        if took > Duration::from_millis(50) {
            return (steps as f64 * time.as_secs_f64() / took.as_secs_f64()) as u64;
        }
        steps *= 2;
    }
}

fn run_sweep(dir: &Path, tasks: usize, workers: usize, steps: u64) {
    let manifest = sample_manifest(tasks);
    let store = Arc::new(Store::create(dir).expect("a directory to write to"));
    store
        .write_manifest(&manifest)
        .expect("a directory to write to");
    let inputs = Arc::new(Inputs::open(&store, &manifest.header).expect("nothing to open"));
    let mut engine = LocalEngine::new(
        Arc::clone(&store),
        Arc::new(CountingSource { steps }),
        inputs,
        workers,
        0,
    );
    let options = DriveOptions {
        retries: 0,
        idle_timeout: Duration::from_secs(60),
    };
    let stop = AtomicBool::new(false);
    let ended = drive(
        &store,
        &manifest.tasks,
        &mut engine,
        &options,
        &mut |_| (),
        &stop,
    )
    .expect("a sweep that ends");
    assert_eq!(ended.finished, tasks);
}

/// One more task, run by another host, because the rate of a sweep is reported only while it runs.
fn leave_one_running(dir: &Path) {
    let manifest = sample_manifest(TASKS + 1);
    let store = Store::open(dir).expect("a directory to write to");
    store
        .write_manifest(&manifest)
        .expect("a directory to write to");
    let id = manifest.tasks.last().expect("there are tasks").id;
    let claim = r#"{"host":"far","place":"elsewhere","pid":1,"started_ticks":1}"#;
    std::fs::write(dir.join(format!("claims/{id}")), claim).expect("a directory to write to");
}

/// Wall and CPU time, and the peak resident memory, of this program with other arguments.
struct RunCost {
    wall_s: f64,
    cpu_s: f64,
    peak_mib: f64,
}

/// Runs children at the same time and waits for all; returns their total cost.
fn run_children(runs: &[Vec<String>]) -> RunCost {
    let own_program = std::env::current_exe().expect("this program has a name");
    let (start, cpu_before) = (Instant::now(), children_cpu_s());
    let started: Vec<_> = runs
        .iter()
        .map(|args| {
            Command::new(&own_program)
                .args(args)
                .spawn()
                .expect("it starts")
        })
        .collect();
    let mut peak_mib: f64 = 0.0;
    for mut child in started {
        let status = format!("/proc/{}/status", child.id());
        loop {
            // The peak is in the status file as long as the process exists.
            let text = std::fs::read_to_string(&status).unwrap_or_default();
            let peak = text.lines().find_map(|line| {
                line.strip_prefix("VmHWM:")?
                    .split_whitespace()
                    .next()?
                    .parse()
                    .ok()
            });
            peak_mib = peak_mib.max(peak.map_or(0.0, |kib: f64| kib / 1024.0));
            match child.try_wait().expect("it is our child") {
                Some(code) => break assert!(code.success()),
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
    RunCost {
        wall_s: start.elapsed().as_secs_f64(),
        cpu_s: children_cpu_s() - cpu_before,
        peak_mib,
    }
}

/// Fields 16 and 17 of `/proc/self/stat`: CPU time of children that were waited for, in hundredths of a second.
fn children_cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    let ticks_at = |index: usize| {
        fields
            .get(index)
            .and_then(|field| field.parse::<f64>().ok())
            .unwrap_or(0.0)
    };
    (ticks_at(13) + ticks_at(14)) / 100.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn format_verdict(met: bool) -> &'static str {
    if met { "met" } else { "MISSED" }
}

fn measure() {
    let dir = tempfile::tempdir().expect("a directory for temporary files");
    let path_text = |dir: &Path| dir.display().to_string();
    let many_tasks = dir.path().join("many");
    let start = Instant::now();
    run_sweep(&many_tasks, TASKS, 2, 0);
    let seconds_per_task = start.elapsed().as_secs_f64() / TASKS as f64;
    println!(
        "{TASKS} tasks that do nothing, 2 workers: {:.3} ms each",
        1e3 * seconds_per_task
    );
    leave_one_running(&many_tasks);
    let looked: Vec<RunCost> = (0..ROUNDS)
        .map(|_| run_children(&[vec!["status".to_string(), path_text(&many_tasks)]]))
        .collect();
    let peak = looked.iter().map(|took| took.peak_mib).fold(0.0, f64::max);
    let wall = median(looked.iter().map(|took| took.wall_s).collect());
    let cpu = median(looked.iter().map(|took| took.cpu_s).collect());
    let met = format_verdict(wall <= 1.0 && peak * 1.048_576 < 200.0);
    println!(
        "status of {TASKS} finished tasks and one that runs: {wall:.2} s ({cpu:.2} s of processor), {peak:.0} MiB at most \
         [1 s, 200 MB: {met}]"
    );

    let steps = steps_of(Duration::from_millis(TASK_MS));
    let plain_args = vec![
        "plain".to_string(),
        TASKS_EACH.to_string(),
        steps.to_string(),
    ];
    let (mut walls, mut cpus) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let out = dir.path().join(format!("round-{round}"));
        let swept = vec![
            "sweep".to_string(),
            path_text(&out),
            (2 * TASKS_EACH).to_string(),
            steps.to_string(),
        ];
        let (by_hand, by_sweep) = (
            run_children(&[plain_args.clone(), plain_args.clone()]),
            run_children(&[swept]),
        );
        walls.push(by_hand.wall_s / by_sweep.wall_s);
        cpus.push(by_sweep.cpu_s / by_hand.cpu_s - 1.0);
    }
    let (speed, extra_cpu) = (median(walls.clone()), median(cpus));
    let spread = format!(
        "{:.3} to {:.3}",
        walls.iter().copied().fold(f64::MAX, f64::min),
        walls.iter().copied().fold(0.0, f64::max)
    );
    println!(
        "tasks of {TASK_MS} ms: two workers reach {speed:.3} of two plain processes ({spread} in {ROUNDS} rounds) \
         [0.95: {}]",
        format_verdict(speed >= 0.95)
    );
    println!(
        "tasks of {TASK_MS} ms: the sweep takes {:+.1} % processor time [5 %: {}]",
        100.0 * extra_cpu,
        format_verdict(extra_cpu < 0.05)
    );
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number_at = |index: usize| {
        args.get(index)
            .and_then(|text| text.parse().ok())
            .unwrap_or(0u64)
    };
    match args.first().map(String::as_str) {
        None => measure(),
        Some("status") => {
            let store = Store::open(Path::new(&args[1])).expect("a sweep's directory");
            let sweep_status = read_status(&store).expect("a sweep's directory");
            assert_eq!(
                (
                    sweep_status.total,
                    sweep_status.finished,
                    sweep_status.running
                ),
                (TASKS + 1, TASKS, 1)
            );
            assert!(
                sweep_status.remaining_s.is_some(),
                "the time left is part of a status"
            );
        }
        Some("plain") => (0..number_at(1))
            .for_each(|index| _ = std::hint::black_box(run_steps(number_at(2), index))),
        Some("sweep") => run_sweep(Path::new(&args[1]), number_at(2) as usize, 2, number_at(3)),
        Some(argument) => {
            println!("found '{argument}', expected nothing");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
