//! Does the store keep the correct state, whatever engines and workers do?

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use cachemate_sweep::engines::local::LocalEngine;
use cachemate_sweep::{
    AttemptOutcome, DriveOptions, EngineError, EngineStatus, Inputs, JobResult, JobRunner,
    Manifest, PublishOutcome, RunError, Store, SweepJob, SweepSummary, SweepTask, SweepTaskId,
    TaskEngine, attempt, collect_report, drive, merge, read_status,
};
use common::sample_manifest;

/// Returns a number computed from the run's name; some runs fail, panic, or give another result each time.
#[derive(Default)]
struct Numbers {
    runs: AtomicUsize,
    fails: Option<&'static str>,
    panics: Option<&'static str>,
    wavers: Option<&'static str>,
}

impl JobRunner for Numbers {
    fn version(&self) -> String {
        "1".to_string()
    }
    fn run(&self, job: &SweepJob, _: &AtomicBool) -> Result<JobResult, RunError> {
        let SweepJob::Repro { run, .. } = job else {
            return Err(RunError::Failed("another job".to_string()));
        };
        let nth = self.runs.fetch_add(1, Ordering::Relaxed);
        if self.fails == Some(run) {
            return Err(RunError::Failed("as asked".to_string()));
        }
        assert!(self.panics != Some(run), "as asked");
        let value = if self.wavers == Some(run) {
            nth as f64
        } else {
            run.len() as f64 / 3.0
        };
        Ok(JobResult {
            figures: BTreeMap::from([("value".to_string(), Some(value))]),
            ..JobResult::default()
        })
    }
}

fn new_store(dir: &Path, count: usize) -> (Arc<Store>, Manifest, Arc<Inputs>) {
    let manifest = sample_manifest(count);
    let store = Store::create(dir).unwrap();
    store.write_manifest(&manifest).unwrap();
    let inputs = Inputs::open(&store, &manifest.header).unwrap();
    (Arc::new(store), manifest, Arc::new(inputs))
}

fn drive_to_end(
    store: &Arc<Store>,
    manifest: &Manifest,
    engine: &mut dyn TaskEngine,
    retries: u32,
) -> SweepSummary {
    let options = DriveOptions {
        retries,
        idle_timeout: Duration::from_secs(60),
    };
    drive(
        store,
        &manifest.tasks,
        engine,
        &options,
        &mut |_| (),
        &AtomicBool::new(false),
    )
    .unwrap()
}

fn local_engine(
    store: &Arc<Store>,
    inputs: &Arc<Inputs>,
    work: &Arc<Numbers>,
    retries: u32,
) -> LocalEngine {
    LocalEngine::new(
        Arc::clone(store),
        Arc::clone(work) as Arc<dyn JobRunner>,
        Arc::clone(inputs),
        3,
        retries,
    )
}

fn merge_store(store: &Arc<Store>) -> (cachemate_sweep::MergeSummary, String) {
    let out = store.path().join("merged.jsonl");
    let reopened = Store::open(store.path()).unwrap();
    let merged = merge(&[reopened], &out).unwrap();
    (merged, std::fs::read_to_string(out).unwrap())
}

/// Loses some tasks, runs some twice at the same time, and forgets tasks that it holds; seeded.
struct CarelessEngine {
    store: Arc<Store>,
    work: Arc<Numbers>,
    inputs: Arc<Inputs>,
    state: u64,
}

impl CarelessEngine {
    fn draw(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }
}

impl TaskEngine for CarelessEngine {
    fn name(&self) -> &'static str {
        "careless"
    }
    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError> {
        if self.draw().is_multiple_of(4) {
            return Err(EngineError {
                engine: "careless",
                what: "not now".to_string(),
                is_permanent: false,
            });
        }
        for task in tasks {
            for _ in 0..self.draw() % 3 {
                attempt(
                    &self.store,
                    &*self.work,
                    &self.inputs,
                    task,
                    0,
                    &AtomicBool::new(false),
                )
                .unwrap();
            }
        }
        Ok(())
    }
    fn poll(&mut self) -> EngineStatus {
        EngineStatus::Done
    }
    fn stop(&mut self) {}
}

/// Does an engine that loses, refuses and repeats tasks end with the same bytes as one that does not?
#[test]
fn an_engine_that_loses_tasks_ends_with_the_same_bytes() {
    let (first_dir, second_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let work = Arc::new(Numbers::default());
    let (sound, manifest, inputs) = new_store(first_dir.path(), 60);
    let summary = drive_to_end(
        &sound,
        &manifest,
        &mut local_engine(&sound, &inputs, &work, 0),
        0,
    );
    assert_eq!(
        (
            summary.finished,
            summary.rounds,
            work.runs.load(Ordering::Relaxed)
        ),
        (60, 1, 60)
    );
    let want = merge_store(&sound);
    assert!(want.0.is_complete());
    assert_eq!(want.1.lines().count(), 60);
    for seed in 1..=3 {
        let dir = second_dir.path().join(seed.to_string());
        let (store, manifest, inputs) = new_store(&dir, 60);
        let state = 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(seed);
        let mut engine = CarelessEngine {
            store: Arc::clone(&store),
            work: Arc::clone(&work),
            inputs,
            state,
        };
        let summary = drive_to_end(&store, &manifest, &mut engine, 0);
        assert_eq!(
            (summary.finished, summary.missing.len()),
            (60, 0),
            "seed {seed}"
        );
        assert_eq!(merge_store(&store), want, "seed {seed}");
    }
}

/// Holds its first round for four seconds and loses it; completes the second.
struct ForgetfulEngine {
    careless: CarelessEngine,
    submitted: Option<std::time::Instant>,
    rounds: u32,
}

impl TaskEngine for ForgetfulEngine {
    fn name(&self) -> &'static str {
        "loses after long"
    }
    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError> {
        self.rounds += 1;
        self.submitted = (self.rounds == 1).then(std::time::Instant::now);
        let CarelessEngine {
            store,
            work,
            inputs,
            ..
        } = &self.careless;
        for task in tasks.iter().filter(|_| self.rounds > 1) {
            attempt(store, &**work, inputs, task, 0, &AtomicBool::new(false)).unwrap();
        }
        Ok(())
    }
    fn poll(&mut self) -> EngineStatus {
        let waits = self
            .submitted
            .is_some_and(|at| at.elapsed() < Duration::from_secs(4));
        if waits {
            EngineStatus::Working {
                waiting: None,
                running: Some(1),
            }
        } else {
            EngineStatus::Done
        }
    }
    fn poll_interval(&self) -> Duration {
        Duration::from_millis(50)
    }
    fn stop(&mut self) {}
}

/// Are tasks that an engine held for longer than the idle timeout and then lost submitted again?
#[test]
fn tasks_held_beyond_the_idle_timeout_and_lost_are_resubmitted() {
    let dir = tempfile::tempdir().unwrap();
    let (store, manifest, inputs) = new_store(dir.path(), 3);
    let careless = CarelessEngine {
        store: Arc::clone(&store),
        work: Arc::new(Numbers::default()),
        inputs,
        state: 1,
    };
    let mut engine = ForgetfulEngine {
        careless,
        submitted: None,
        rounds: 0,
    };
    let options = DriveOptions {
        retries: 0,
        idle_timeout: Duration::from_secs(3),
    };
    let stop = AtomicBool::new(false);
    let summary = drive(
        &store,
        &manifest.tasks,
        &mut engine,
        &options,
        &mut |_| (),
        &stop,
    )
    .unwrap();
    assert_eq!(
        (summary.finished, summary.missing.len(), summary.rounds),
        (3, 0, 2)
    );
}

/// Are failures and panics recorded and retried as configured, without any cost to other tasks?
#[test]
fn failing_tasks_are_recorded_and_do_not_affect_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let (store, manifest, inputs) = new_store(dir.path(), 10);
    let work = Arc::new(Numbers {
        fails: Some("run-3"),
        panics: Some("run-7"),
        ..Numbers::default()
    });
    let summary = drive_to_end(
        &store,
        &manifest,
        &mut local_engine(&store, &inputs, &work, 2),
        2,
    );
    assert_eq!(
        (
            summary.finished,
            summary.failed.len(),
            summary.missing.len()
        ),
        (8, 2, 0)
    );
    let outcome_of = |index: usize| {
        let id = manifest.tasks[index].id;
        let failure = summary.failed.iter().find(|(failed, _)| *failed == id);
        (
            failure
                .map(|(_, message)| message.clone())
                .unwrap_or_default(),
            store.failed_attempts(id).unwrap().len(),
        )
    };
    assert_eq!(outcome_of(3), ("as asked".to_string(), 3));
    assert_eq!(outcome_of(7), ("it panicked: as asked".to_string(), 3));
    let sweep_status = read_status(&store).unwrap();
    assert_eq!(
        (
            sweep_status.total,
            sweep_status.finished,
            sweep_status.failed,
            sweep_status.waiting
        ),
        (10, 8, 2, 0)
    );
    assert_eq!(
        (
            sweep_status.failures.len(),
            sweep_status.failures[0].attempts
        ),
        (2, 3)
    );
    assert_eq!(
        merge_store(&store).0.missing.len(),
        2,
        "never silently absent"
    );
    // An abandoned task stays abandoned until it is requested again.
    let runs = work.runs.load(Ordering::Relaxed);
    drive_to_end(
        &store,
        &manifest,
        &mut local_engine(&store, &inputs, &work, 2),
        2,
    );
    assert_eq!(work.runs.load(Ordering::Relaxed), runs);
    manifest
        .tasks
        .iter()
        .for_each(|task| store.forget_attempts(task.id).unwrap());
    let sound = Arc::new(Numbers::default());
    assert_eq!(
        drive_to_end(
            &store,
            &manifest,
            &mut local_engine(&store, &inputs, &sound, 0),
            0
        )
        .finished,
        10
    );
    assert_eq!(sound.runs.load(Ordering::Relaxed), 2);
}

/// Is a result damaged at any byte detected, quarantined, reported and computed again?
#[test]
fn damage_at_any_byte_is_detected_and_computed_again() {
    let dir = tempfile::tempdir().unwrap();
    let (store, manifest, inputs) = new_store(dir.path(), 3);
    let work = Arc::new(Numbers::default());
    drive_to_end(
        &store,
        &manifest,
        &mut local_engine(&store, &inputs, &work, 0),
        0,
    );
    let id = manifest.tasks[1].id;
    let path = store
        .path()
        .join(format!("results/{}/{id}.json", &id.to_string()[..2]));
    let intact = std::fs::read(&path).unwrap();
    let line = intact.iter().position(|byte| *byte == b'\n').unwrap();
    for index in 0..=line {
        let mut bytes = intact.clone();
        bytes[index] ^= 0x04;
        std::fs::write(&path, &bytes).unwrap();
        assert!(
            store.read(id).is_err(),
            "byte {index} of {}",
            String::from_utf8_lossy(&intact)
        );
        std::fs::write(&path, &intact[..index]).unwrap();
        assert!(store.read(id).is_err(), "cut at {index}");
    }
    let (damaged_merge, _) = merge_store(&store);
    assert_eq!(
        (damaged_merge.damaged.len(), damaged_merge.is_complete()),
        (1, false)
    );
    let summary = drive_to_end(
        &store,
        &manifest,
        &mut local_engine(&store, &inputs, &work, 0),
        0,
    );
    assert_eq!(
        (summary.finished, summary.damaged.len(), summary.skipped),
        (3, 1, 2)
    );
    assert_eq!(
        std::fs::read_dir(store.path().join("damaged"))
            .unwrap()
            .count(),
        1
    );
    assert!(merge_store(&store).0.is_complete());
}

fn claim_of(dir: &Path, id: SweepTaskId, host: &str, place: &str, pid: u32, age: Duration) {
    let text =
        format!("{{\"host\":\"{host}\",\"place\":\"{place}\",\"pid\":{pid},\"started_ticks\":1}}");
    let path = dir.join(format!("claims/{id}"));
    std::fs::write(&path, text).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(SystemTime::now() - age).unwrap();
}

/// Does a claim of another host count while it is touched, is it taken over otherwise, and is its owner's death
/// counted?
#[test]
fn an_untouched_claim_of_another_host_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let (store, manifest, inputs) = new_store(dir.path(), 1);
    let task = &manifest.tasks[0];
    let work = Numbers::default();
    let try_task = || attempt(&store, &work, &inputs, task, 0, &AtomicBool::new(false)).unwrap();
    claim_of(
        dir.path(),
        task.id,
        "far",
        "elsewhere",
        1,
        Duration::from_secs(30),
    );
    assert_eq!(
        try_task(),
        AttemptOutcome::RunningElsewhere("process 1 on far".to_string())
    );
    assert_eq!(read_status(&store).unwrap().running, 1);
    for deaths in 1..5 {
        claim_of(
            dir.path(),
            task.id,
            "far",
            "elsewhere",
            1,
            Duration::from_secs(3600),
        );
        let stop = AtomicBool::new(true);
        let stopped = attempt(&store, &InterruptedRunner, &inputs, task, 0, &stop).unwrap();
        assert_eq!(
            (stopped, store.failed_attempts(task.id).unwrap().len()),
            (AttemptOutcome::Stopped, deaths)
        );
    }
    claim_of(
        dir.path(),
        task.id,
        "far",
        "elsewhere",
        1,
        Duration::from_secs(3600),
    );
    assert_eq!(
        try_task(),
        AttemptOutcome::Abandoned,
        "its workers died five times"
    );
    store.forget_attempts(task.id).unwrap();
    assert_eq!(try_task(), AttemptOutcome::Finished(PublishOutcome::New));
    assert_eq!(
        std::fs::read_dir(dir.path().join("claims"))
            .unwrap()
            .count(),
        0
    );
    assert_eq!(
        std::fs::read_dir(dir.path().join("partial"))
            .unwrap()
            .count(),
        0
    );
}

/// An engine whose workers are killed between a result and the end of their claims.
struct DyingEngine(CarelessEngine);

impl TaskEngine for DyingEngine {
    fn name(&self) -> &'static str {
        "dies at the end"
    }
    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError> {
        let CarelessEngine {
            store,
            work,
            inputs,
            ..
        } = &self.0;
        for task in tasks {
            attempt(store, &**work, inputs, task, 0, &AtomicBool::new(false)).unwrap();
            claim_of(store.path(), task.id, "far", "elsewhere", 1, Duration::ZERO);
        }
        Ok(())
    }
    fn poll(&mut self) -> EngineStatus {
        EngineStatus::Done
    }
    fn stop(&mut self) {}
}

/// Is a claim that a worker left on a finished task removed, by its own sweep and by the next, without a recorded
/// death?
#[test]
fn claims_on_finished_tasks_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (store, manifest, inputs) = new_store(dir.path(), 3);
    let claim_count = || {
        std::fs::read_dir(dir.path().join("claims"))
            .unwrap()
            .count()
    };
    let careless = CarelessEngine {
        store: Arc::clone(&store),
        work: Arc::new(Numbers::default()),
        inputs,
        state: 1,
    };
    let mut engine = DyingEngine(careless);
    assert_eq!(drive_to_end(&store, &manifest, &mut engine, 0).finished, 3);
    assert_eq!(claim_count(), 0, "of the same sweep");
    claim_of(
        dir.path(),
        manifest.tasks[0].id,
        "far",
        "elsewhere",
        1,
        Duration::ZERO,
    );
    assert_eq!(drive_to_end(&store, &manifest, &mut engine, 0).skipped, 3);
    assert_eq!(
        (claim_count(), store.failed_tasks().unwrap().len()),
        (0, 0),
        "of an earlier one"
    );
}

/// A runner whose task is interrupted.
struct InterruptedRunner;
impl JobRunner for InterruptedRunner {
    fn version(&self) -> String {
        "1".to_string()
    }
    fn run(&self, _: &SweepJob, _: &AtomicBool) -> Result<JobResult, RunError> {
        Err(RunError::Stopped)
    }
}

/// Are two results of one task compared bit by bit, and is a disagreement kept and reported?
#[test]
fn two_results_of_one_task_are_compared_bit_by_bit() {
    let (first_dir, second_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let work = Arc::new(Numbers {
        wavers: Some("run-1"),
        ..Numbers::default()
    });
    let (first, manifest, inputs) = new_store(first_dir.path(), 3);
    drive_to_end(
        &first,
        &manifest,
        &mut local_engine(&first, &inputs, &work, 0),
        0,
    );
    let (second, _, inputs) = new_store(second_dir.path(), 3);
    drive_to_end(
        &second,
        &manifest,
        &mut local_engine(&second, &inputs, &work, 0),
        0,
    );
    let stored = first.read(manifest.tasks[0].id).unwrap().unwrap();
    let note = stored.note.clone().unwrap();
    assert_eq!(
        first
            .publish(manifest.tasks[0].id, &stored.result, &note)
            .unwrap(),
        PublishOutcome::Same
    );
    let second_result = second.read(manifest.tasks[1].id).unwrap().unwrap();
    assert_eq!(
        first
            .publish(manifest.tasks[1].id, &second_result.result, &note)
            .unwrap(),
        PublishOutcome::Differs
    );
    assert_eq!(read_status(&first).unwrap().conflicting.len(), 1);
    let out = first_dir.path().join("both.jsonl");
    let stores = [
        Store::open(first_dir.path()).unwrap(),
        Store::open(second_dir.path()).unwrap(),
    ];
    let merged = merge(&stores, &out).unwrap();
    assert_eq!(
        (
            merged.duplicates,
            merged.conflicting.len(),
            merged.is_complete()
        ),
        (2, 2, false)
    );
}

/// Are manifests read back as they were written, and damaged ones rejected with the line?
#[test]
fn manifests_read_back_and_damaged_ones_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let (store, manifest, _) = new_store(dir.path(), 5);
    assert_eq!(store.manifest().unwrap(), manifest);
    let ids = [manifest.tasks[4].id, manifest.tasks[1].id];
    let chosen_manifest = store.find_tasks(&ids).unwrap();
    assert_eq!(
        chosen_manifest.tasks,
        [manifest.tasks[4].clone(), manifest.tasks[1].clone()]
    );
    assert!(
        store
            .find_tasks(&[SweepTaskId(7)])
            .unwrap_err()
            .to_string()
            .contains("no task 0000000000000007")
    );
    let path = dir.path().join("manifest.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let refusal_of = |text: &str| {
        std::fs::write(&path, text).unwrap();
        store.manifest().unwrap_err().to_string()
    };
    let lines: Vec<&str> = text.lines().collect();
    assert!(refusal_of(&lines[..4].join("\n")).contains("found 3 tasks, expected 5"));
    assert!(refusal_of(&text.replacen("\"run-2\"", "\"run", 1)).contains("line 4: damaged"));
    assert!(
        refusal_of(&text.replacen("\"format\":1", "\"format\":9", 1))
            .contains("found format 9, expected 1")
    );
    assert!(refusal_of("").contains("expected a manifest's header"));
}

/// Does a report contain every point, and list missing results?
#[test]
fn a_report_lists_missing_results() {
    let dir = tempfile::tempdir().unwrap();
    let (store, manifest, inputs) = new_store(dir.path(), 4);
    let work = Arc::new(Numbers {
        fails: Some("run-2"),
        ..Numbers::default()
    });
    drive_to_end(
        &store,
        &manifest,
        &mut local_engine(&store, &inputs, &work, 0),
        0,
    );
    let summary = collect_report(&store).unwrap();
    assert_eq!(
        (summary.finished, summary.total, summary.rows.len()),
        (3, 4, 4)
    );
    assert_eq!(summary.rows[2].figures.len(), 0);
    assert_eq!(summary.rows[0].figures["value"].mean, Some(5.0 / 3.0));
    assert!(
        summary.html().contains("3 of 4 results") && summary.text().contains("0 of 1"),
        "{}",
        summary.text()
    );
}

/// Do names that hold markup, an escape sequence or a mark that turns the direction of writing act on no page?
#[test]
fn hostile_names_have_no_effect_on_a_page() {
    let dir = tempfile::tempdir().unwrap();
    let (store, manifest, inputs) = new_store(dir.path(), 2);
    drive_to_end(
        &store,
        &manifest,
        &mut local_engine(&store, &inputs, &Arc::new(Numbers::default()), 0),
        0,
    );
    let evil = "</title><script>x</script>\u{1b}[31m\u{202e}{1}\" onload=\"x";
    let mut summary = collect_report(&store).unwrap();
    (summary.name, summary.description) = (evil.to_string(), evil.to_string());
    summary.axes.fill(evil.to_string());
    summary.damaged.push(evil.to_string());
    let page = summary.html();
    assert!(
        !page.contains("<script") && !page.contains("\" onload"),
        "{page}"
    );
    assert!(
        !page.contains(['\u{1b}', '\u{202e}']) && page.contains("\\u{202e}"),
        "{page}"
    );
}

/// Files that an attacker leaves in a sweep's directory.
type Trap = fn(&Path, SweepTaskId, &Path);

/// If links, FIFOs and endless devices replace a sweep's files: does a status that reads them end, change nothing, and
/// leave the target of each link unchanged?
#[test]
fn a_status_of_replaced_files_ends_and_changes_nothing() {
    let make_fifo = |path: &Path| {
        let _ = std::fs::remove_file(path);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
    };
    let traps: [Trap; 5] = [
        |root, id, secret| {
            std::os::unix::fs::symlink(secret, root.join(format!("failed/{id}.jsonl"))).unwrap()
        },
        |root, id, secret| {
            std::os::unix::fs::symlink(secret, root.join(format!("claims/{id}"))).unwrap()
        },
        |root, id, _| {
            std::os::unix::fs::symlink("/dev/zero", root.join(format!("failed/{id}.jsonl")))
                .unwrap()
        },
        |root, _, _| {
            std::fs::remove_file(root.join("manifest.jsonl")).unwrap();
            std::os::unix::fs::symlink("/dev/zero", root.join("manifest.jsonl")).unwrap();
        },
        |root, _, secret| {
            std::fs::remove_dir(root.join("failed")).unwrap();
            std::os::unix::fs::symlink(secret.parent().unwrap(), root.join("failed")).unwrap();
        },
    ];
    for trap in traps {
        let outside = tempfile::tempdir().unwrap();
        let secret = outside.path().join("secret");
        std::fs::write(&secret, "secret\n").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (_, manifest, _) = new_store(dir.path(), 2);
        trap(dir.path(), manifest.tasks[0].id, &secret);
        let file_count = |name: &str| std::fs::read_dir(dir.path().join(name)).unwrap().count();
        let counts_before = (file_count("partial"), file_count("claims"));
        let _ = read_status(&Store::open_to_read(dir.path()).unwrap());
        assert_eq!((file_count("partial"), file_count("claims")), counts_before);
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret\n");
    }
    for place in ["claims", "failed", "manifest.jsonl"] {
        let dir = tempfile::tempdir().unwrap();
        let (_, manifest, _) = new_store(dir.path(), 1);
        let id = manifest.tasks[0].id;
        make_fifo(&dir.path().join(match place {
            "claims" => format!("claims/{id}"),
            "failed" => format!("failed/{id}.jsonl"),
            name => name.to_string(),
        }));
        let _ = read_status(&Store::open_to_read(dir.path()).unwrap());
    }
}

/// If a failed attempt is recorded at a link to another file: is that file unchanged, and the error reported?
#[test]
fn no_failure_is_appended_through_a_link() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let profile = outside.path().join("profile");
    std::fs::write(&profile, "export A=1\n").unwrap();
    let (store, manifest, inputs) = new_store(dir.path(), 1);
    let id = manifest.tasks[0].id;
    std::os::unix::fs::symlink(&profile, dir.path().join(format!("failed/{id}.jsonl"))).unwrap();
    let work = Numbers {
        fails: Some("run-0"),
        ..Numbers::default()
    };
    let tried = attempt(
        &store,
        &work,
        &inputs,
        &manifest.tasks[0],
        0,
        &AtomicBool::new(false),
    );
    assert!(tried.unwrap_err().to_string().contains("found a link"));
    assert_eq!(std::fs::read_to_string(&profile).unwrap(), "export A=1\n");
}

/// Is a directory that another user created or may write rejected before anything in it is read, run or written?
#[test]
fn a_directory_that_another_user_can_change_is_rejected() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sweep");
    new_store(&path, 1);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    for opened in [
        Store::open(&path),
        Store::open_to_read(&path),
        Store::create(&path),
    ] {
        assert!(
            opened
                .err()
                .unwrap()
                .to_string()
                .contains("mode 0777, expected one that only its owner may write")
        );
    }
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    if rustix::process::geteuid().is_root() {
        chown(&path, Some(65_534), None).unwrap();
        for opened in [
            Store::open(&path),
            Store::open_to_read(&path),
            Store::create(&path),
        ] {
            assert!(
                opened
                    .err()
                    .unwrap()
                    .to_string()
                    .contains("a directory of user 65534")
            );
        }
    }
}

/// If a manifest names inputs elsewhere: is no file outside of `inputs` read?
#[test]
fn no_file_outside_of_inputs_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (store, manifest, _) = new_store(dir.path(), 1);
    for outside in [
        "../../x",
        "/etc/passwd",
        "inputs/../manifest.jsonl",
        "manifest.jsonl",
        "inputs/",
        "inputs/.hidden",
    ] {
        let mut header = manifest.header.clone();
        header.scenarios = [("p".to_string(), outside.to_string())].into();
        let error = Inputs::open(&store, &header).unwrap_err();
        assert!(
            error.contains("expected a name below inputs/"),
            "{outside}: {error}"
        );
        header.scenarios = BTreeMap::new();
        header.machines = [("m".to_string(), outside.to_string())].into();
        assert!(Inputs::open(&store, &header).is_err(), "{outside}");
    }
}
