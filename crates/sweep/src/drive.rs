//! Drives a sweep: submits missing tasks to an engine until none are missing.
//!
//! Method: in each round, tasks that have no result, no live claim and retries left are submitted. The store is then
//! polled until the engine holds no task, and the next round submits the tasks that are still missing. Properties: an
//! engine that loses, repeats or restarts tasks costs only time; a silent engine is tolerated as long as tasks make
//! progress.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::SweepError;
use crate::engine::{EngineStatus, TaskEngine};
use crate::manifest::{SweepTask, SweepTaskId};
use crate::store::Store;
use crate::worker::is_abandoned;

/// Options for driving a sweep.
#[derive(Clone, Debug)]
pub struct DriveOptions {
    /// Maximum number of retries of a failing task.
    pub retries: u32,
    /// Time without a result after which an engine that loses or rejects every task is abandoned.
    pub idle_timeout: Duration,
}

/// Progress of a sweep.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SweepProgress {
    /// Number of tasks, counting each id once.
    pub total: usize,
    /// Tasks with a result.
    pub finished: usize,
    /// Abandoned tasks.
    pub failed: usize,
    /// Tasks that the engine holds but has not started; `None` if it does not report them.
    pub waiting: Option<usize>,
    /// Tasks that the engine runs; `None` if it does not report them.
    pub running: Option<usize>,
    /// A message for the user; callers print it if it differs from the previous one.
    pub message: Option<String>,
}

/// Outcome of a drive; `cachemate sweep run --json` prints it.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct SweepSummary {
    /// Number of tasks, counting each id once.
    pub total: usize,
    /// Tasks that were finished before the drive.
    pub skipped: usize,
    /// Tasks with a result, including skipped ones.
    pub finished: usize,
    /// Abandoned tasks, each with the reason of its last failure.
    pub failed: Vec<(SweepTaskId, String)>,
    /// Tasks that are neither finished nor abandoned.
    pub missing: Vec<SweepTaskId>,
    /// Incomplete results, one sentence each; these tasks run again.
    pub damaged: Vec<String>,
    /// Results on which two workers disagree.
    pub conflicting: Vec<String>,
    /// Did the user stop it before everything was done?
    pub interrupted: bool,
    /// Number of times that tasks were submitted to the engine.
    pub rounds: u32,
}

/// Drives a sweep until every task has a result or is abandoned, or until `stop` is set. `on_progress` is called at
/// every poll.
///
/// # Errors
/// The store cannot be read or written (a full disk is a separate error); the engine accepted no task within the idle
/// timeout, or never will.
pub fn drive(
    store: &Store,
    tasks: &[SweepTask],
    engine: &mut dyn TaskEngine,
    options: &DriveOptions,
    on_progress: &mut dyn FnMut(&SweepProgress),
    stop: &AtomicBool,
) -> Result<SweepSummary, SweepError> {
    let mut driver = SweepDriver::new(store, tasks, options)?;
    let drive_result = driver.run_rounds(engine, on_progress, stop);
    engine.stop();
    drive_result?;
    driver.into_summary(stop.load(Ordering::Relaxed))
}

struct SweepDriver<'a> {
    store: &'a Store,
    options: &'a DriveOptions,
    tasks: &'a [SweepTask],
    task_ids: BTreeSet<SweepTaskId>,
    finished_tasks: FinishedTasks,
    abandoned_tasks: BTreeMap<SweepTaskId, String>,
    skipped: usize,
    damaged: Vec<String>,
    rounds: u32,
    /// Numbers of results and recorded attempts, which show progress.
    progress: (usize, usize),
    last_progress_at: Instant,
}

impl<'a> SweepDriver<'a> {
    fn new(
        store: &'a Store,
        tasks: &'a [SweepTask],
        options: &'a DriveOptions,
    ) -> Result<Self, SweepError> {
        store.remove_stale_partials()?;
        let task_ids: BTreeSet<SweepTaskId> = tasks.iter().map(|task| task.id).collect();
        let mut finished_tasks = FinishedTasks::default();
        finished_tasks.refresh_results(store)?;
        let mut damaged = Vec::new();
        for &id in task_ids
            .iter()
            .filter(|id| finished_tasks.finished.contains(id))
        {
            if let Err(problem) = store.read(id) {
                damaged.push(problem);
                store.quarantine(id)?;
            }
        }
        if !damaged.is_empty() {
            finished_tasks = FinishedTasks::default();
            finished_tasks.refresh_results(store)?;
        }
        store.remove_claims_on(&finished_tasks.finished)?;
        let skipped = task_ids
            .iter()
            .filter(|id| finished_tasks.finished.contains(id))
            .count();
        let (abandoned_tasks, last_progress_at) = (BTreeMap::new(), Instant::now());
        let mut driver = SweepDriver {
            store,
            options,
            tasks,
            task_ids,
            finished_tasks,
            abandoned_tasks,
            skipped,
            damaged,
            rounds: 0,
            progress: (0, 0),
            last_progress_at,
        };
        driver.refresh()?;
        Ok(driver)
    }

    /// Polls the store, and detects progress since the last poll.
    fn refresh(&mut self) -> Result<(), SweepError> {
        self.finished_tasks.refresh_results(self.store)?;
        let mut attempt_count = 0;
        for id in self.store.failed_tasks()? {
            if !self.task_ids.contains(&id)
                || self.finished_tasks.finished.contains(&id)
                || self.abandoned_tasks.contains_key(&id)
            {
                continue;
            }
            let failures = self.store.failed_attempts(id)?;
            attempt_count += failures.len();
            if is_abandoned(&failures, self.options.retries) {
                let message = failures
                    .last()
                    .map_or(String::new(), |attempt| attempt.what.clone());
                self.abandoned_tasks.insert(id, message);
            }
        }
        let progress = (
            self.finished_tasks.finished.len(),
            attempt_count + self.abandoned_tasks.len(),
        );
        if progress != self.progress {
            (self.progress, self.last_progress_at) = (progress, Instant::now());
        }
        Ok(())
    }

    fn open_tasks(&self) -> Vec<SweepTask> {
        let is_open = |task: &&SweepTask| {
            !self.finished_tasks.finished.contains(&task.id)
                && !self.abandoned_tasks.contains_key(&task.id)
        };
        self.tasks.iter().filter(is_open).cloned().collect()
    }

    fn build_progress(&self, engine_status: &EngineStatus) -> SweepProgress {
        let (waiting, running) = match engine_status {
            EngineStatus::Working { waiting, running } => (*waiting, *running),
            _ => (None, None),
        };
        let message = match engine_status {
            EngineStatus::Unresponsive(problem)
            | EngineStatus::Stuck(problem)
            | EngineStatus::Broken(problem) => Some(problem.clone()),
            _ => None,
        };
        let finished = self
            .task_ids
            .iter()
            .filter(|id| self.finished_tasks.finished.contains(id))
            .count();
        SweepProgress {
            total: self.task_ids.len(),
            finished,
            failed: self.abandoned_tasks.len(),
            waiting,
            running,
            message,
        }
    }

    fn run_rounds(
        &mut self,
        engine: &mut dyn TaskEngine,
        on_progress: &mut dyn FnMut(&SweepProgress),
        stop: &AtomicBool,
    ) -> Result<(), SweepError> {
        self.last_progress_at = Instant::now();
        let mut idle_rounds = 0;
        loop {
            let open_tasks = self.open_tasks();
            if open_tasks.is_empty() || stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let claimed_ids: BTreeSet<SweepTaskId> = self
                .store
                .running_tasks()?
                .into_iter()
                .map(|(id, _)| id)
                .collect();
            let free_tasks: Vec<SweepTask> = open_tasks
                .into_iter()
                .filter(|task| !claimed_ids.contains(&task.id))
                .collect();
            if free_tasks.is_empty() {
                // Other processes run everything that is left; this one waits for them, because their claims end with
                // them.
                pause_unless_stopped(Duration::from_millis(300), stop);
                self.refresh()?;
                on_progress(&self.build_progress(&EngineStatus::Working {
                    waiting: None,
                    running: Some(claimed_ids.len()),
                }));
                continue;
            }
            if self.rounds > 0 && self.last_progress_at.elapsed() > self.options.idle_timeout {
                return Ok(());
            }
            let progress_before = self.progress;
            self.rounds += 1;
            match engine.submit(&free_tasks) {
                Ok(()) => self.watch_round(engine, on_progress, stop)?,
                Err(error)
                    if error.is_permanent
                        || self.last_progress_at.elapsed() > self.options.idle_timeout =>
                {
                    return Err(error.into());
                }
                Err(error) => on_progress(&SweepProgress {
                    message: Some(error.to_string()),
                    ..self.build_progress(&EngineStatus::Done)
                }),
            }
            idle_rounds = if self.progress == progress_before {
                idle_rounds + 1
            } else {
                0
            };
            if idle_rounds > 0 {
                pause_unless_stopped(Duration::from_millis(500) * (1 << idle_rounds.min(5)), stop);
            }
        }
    }

    /// Watches until the engine holds no task, or nothing is left to do.
    fn watch_round(
        &mut self,
        engine: &mut dyn TaskEngine,
        on_progress: &mut dyn FnMut(&SweepProgress),
        stop: &AtomicBool,
    ) -> Result<(), SweepError> {
        loop {
            let engine_status = engine.poll();
            let poll_start = Instant::now();
            self.refresh()?;
            on_progress(&self.build_progress(&engine_status));
            match engine_status {
                EngineStatus::Broken(problem) => {
                    return Err(SweepError::Refused(format!("{}: {problem}", engine.name())));
                }
                EngineStatus::Done => {
                    self.finished_tasks.reset_timestamps();
                    return self.refresh();
                }
                _ if stop.load(Ordering::Relaxed) || self.open_tasks().is_empty() => return Ok(()),
                // Polling a large store is slow, so it takes at most a twentieth of the time.
                look => {
                    let pause = engine.poll_interval().max(20 * poll_start.elapsed());
                    wait(engine, pause, stop);
                    // The timeout runs only while the engine holds no task: a job may take hours, or be lost and
                    // noticed after minutes.
                    if matches!(look, EngineStatus::Working { .. }) {
                        self.last_progress_at += poll_start.elapsed();
                    }
                }
            }
        }
    }

    fn into_summary(mut self, interrupted: bool) -> Result<SweepSummary, SweepError> {
        self.finished_tasks.reset_timestamps();
        self.refresh()?;
        self.store.remove_claims_on(&self.finished_tasks.finished)?;
        let missing_ids: Vec<SweepTaskId> =
            self.open_tasks().into_iter().map(|task| task.id).collect();
        let finished = self
            .task_ids
            .iter()
            .filter(|id| self.finished_tasks.finished.contains(id))
            .count();
        Ok(SweepSummary {
            total: self.task_ids.len(),
            skipped: self.skipped,
            finished,
            failed: self.abandoned_tasks.into_iter().collect(),
            interrupted: interrupted && !missing_ids.is_empty(),
            missing: missing_ids,
            damaged: self.damaged,
            conflicting: self.store.differing_files()?,
            rounds: self.rounds,
        })
    }
}

const WAIT_STEP: Duration = Duration::from_millis(100);

/// Waits in small steps, so that Ctrl-C takes effect; ends early if the engine has news.
fn wait(engine: &mut dyn TaskEngine, time: Duration, stop: &AtomicBool) {
    let start = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let remaining_time = time.saturating_sub(start.elapsed());
        if remaining_time.is_zero() || engine.wait(remaining_time.min(WAIT_STEP)) {
            return;
        }
    }
}

fn pause_unless_stopped(time: Duration, stop: &AtomicBool) {
    let start = Instant::now();
    while start.elapsed() < time && !stop.load(Ordering::Relaxed) {
        std::thread::sleep(WAIT_STEP.min(time.saturating_sub(start.elapsed())));
    }
}

/// Ids of finished tasks; a directory that did not change is not read again.
#[derive(Default)]
struct FinishedTasks {
    finished: BTreeSet<SweepTaskId>,
    known_mtimes: BTreeMap<String, SystemTime>,
}

/// File systems record times in steps; a directory that changed less than this before it was read may change unnoticed.
const MAX_TIMESTAMP_STEP: Duration = Duration::from_secs(2);

impl FinishedTasks {
    fn refresh_results(&mut self, store: &Store) -> Result<(), SweepError> {
        for (dir, modified) in store.result_dirs()? {
            if self.known_mtimes.get(&dir) == Some(&modified) {
                continue;
            }
            let is_settled = SystemTime::now()
                .duration_since(modified)
                .is_ok_and(|age| age > MAX_TIMESTAMP_STEP);
            self.finished.extend(store.finished_tasks_in(&dir)?);
            if is_settled {
                self.known_mtimes.insert(dir, modified);
            }
        }
        Ok(())
    }

    fn reset_timestamps(&mut self) {
        self.known_mtimes.clear();
    }
}
