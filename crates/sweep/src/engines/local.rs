//! Runs tasks on threads of this process.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::engine::{EngineError, EngineStatus, TaskEngine};
use crate::job::{Inputs, JobRunner};
use crate::manifest::SweepTask;
use crate::store::Store;
use crate::worker::attempt;

/// State that workers share.
struct WorkerState {
    store: Arc<Store>,
    job_runner: Arc<dyn JobRunner>,
    inputs: Arc<Inputs>,
    retries: u32,
    stop: AtomicBool,
    /// Set if no further task can run, with the reason.
    failure: Mutex<Option<String>>,
    live_count: Mutex<usize>,
    worker_ended: Condvar,
}

/// The local engine, with its threads.
pub struct LocalEngine {
    workers: usize,
    worker_state: Arc<WorkerState>,
    threads: Vec<JoinHandle<()>>,
}

impl LocalEngine {
    /// An engine that will start `workers` threads, at least one.
    pub fn new(
        store: Arc<Store>,
        job_runner: Arc<dyn JobRunner>,
        inputs: Arc<Inputs>,
        workers: usize,
        retries: u32,
    ) -> Self {
        let (failure, live_count, worker_ended) = (Mutex::new(None), Mutex::new(0), Condvar::new());
        let worker_state = WorkerState {
            store,
            job_runner,
            inputs,
            retries,
            stop: AtomicBool::new(false),
            failure,
            live_count,
            worker_ended,
        };
        LocalEngine {
            workers: workers.max(1),
            worker_state: Arc::new(worker_state),
            threads: Vec::new(),
        }
    }
}

impl WorkerState {
    fn run_tasks(&self, tasks: &[SweepTask], next_index: &AtomicUsize) {
        while let Some(task) = tasks.get(next_index.fetch_add(1, Ordering::Relaxed)) {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            if let Err(error) = attempt(
                &self.store,
                &*self.job_runner,
                &self.inputs,
                task,
                self.retries,
                &self.stop,
            ) {
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(error.to_string());
                self.stop.store(true, Ordering::Relaxed);
            }
        }
        *self
            .live_count
            .lock()
            .unwrap_or_else(PoisonError::into_inner) -= 1;
        self.worker_ended.notify_all();
    }

    fn live_workers(&self) -> usize {
        *self
            .live_count
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl TaskEngine for LocalEngine {
    fn name(&self) -> &'static str {
        "local"
    }

    fn submit(&mut self, tasks: &[SweepTask]) -> Result<(), EngineError> {
        let (tasks, next_index) = (Arc::new(tasks.to_vec()), Arc::new(AtomicUsize::new(0)));
        for _ in 0..self.workers.min(tasks.len()) {
            let (worker_state, tasks, next) = (
                Arc::clone(&self.worker_state),
                Arc::clone(&tasks),
                Arc::clone(&next_index),
            );
            *self
                .worker_state
                .live_count
                .lock()
                .unwrap_or_else(PoisonError::into_inner) += 1;
            self.threads.push(std::thread::spawn(move || {
                worker_state.run_tasks(&tasks, &next)
            }));
        }
        Ok(())
    }

    fn poll(&mut self) -> EngineStatus {
        let failure = self
            .worker_state
            .failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(message) = failure {
            return EngineStatus::Broken(message);
        }
        match self.worker_state.live_workers() {
            0 => EngineStatus::Done,
            live => EngineStatus::Working {
                waiting: None,
                running: Some(live),
            },
        }
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        let live_count = self
            .worker_state
            .live_count
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if *live_count == 0 {
            return true;
        }
        let wait_result = self
            .worker_state
            .worker_ended
            .wait_timeout(live_count, timeout)
            .unwrap_or_else(PoisonError::into_inner);
        *wait_result.0 == 0
    }

    fn stop(&mut self) {
        self.worker_state.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for LocalEngine {
    fn drop(&mut self) {
        self.stop();
    }
}
