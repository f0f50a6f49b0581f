//! A fake gang scheduler on a socket: it accepts plans as the real one does, and can refuse, detach, or be killed.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::fake_tests::FakeHost;
use crate::kernel::scheduling::EXT;
use cachemate_gangs::{CacheTurns, ScheduledTurn, SchedulerPlan, SchedulerRequest, SchedulerState};

/// State of the fake scheduler, and the faults that it simulates.
#[derive(Default)]
pub(crate) struct FakeState {
    /// Accepted plans, oldest first.
    pub plans: Vec<SchedulerPlan>,
    /// Why the next plans are refused.
    pub refuses: Option<String>,
    /// The reason why it has detached from the CPUs.
    pub guarded: Option<String>,
    /// Turns that are read back in place of the plan's.
    pub other_turns: Option<Vec<ScheduledTurn>>,
    /// Original policies, by thread.
    held: BTreeMap<i32, u32>,
}

/// Ends, as by `kill -9`, when dropped: threads keep policy 7, the socket's file stays.
pub(crate) struct FakeScheduler {
    pub inside: Arc<Mutex<FakeState>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FakeScheduler {
    pub fn start(host: Arc<Mutex<FakeHost>>, socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (inside, stop) = (
            Arc::new(Mutex::new(FakeState::default())),
            Arc::new(AtomicBool::new(false)),
        );
        let (there, ends) = (inside.clone(), stop.clone());
        let serve = move || {
            while !ends.load(Ordering::Relaxed) {
                let Ok((client, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_micros(300));
                    continue;
                };
                client.set_nonblocking(false).unwrap();
                let mut line = String::new();
                BufReader::new(&client).read_line(&mut line).unwrap();
                let answer = match serde_json::from_str(&line).unwrap() {
                    SchedulerRequest::Plan(plan) => there.lock().unwrap().take_in(plan, &host),
                    SchedulerRequest::State {} => {
                        serde_json::to_value(there.lock().unwrap().state(&host)).unwrap()
                    }
                    SchedulerRequest::Stop {} => panic!("no client stops the scheduler"),
                };
                let _ = (&client).write_all(format!("{answer}\n").as_bytes());
            }
        };
        FakeScheduler {
            inside,
            stop,
            thread: Some(std::thread::spawn(serve)),
        }
    }
}

impl Drop for FakeScheduler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

impl FakeState {
    fn generation(&self) -> u64 {
        self.plans.last().map_or(0, |plan| plan.generation)
    }

    fn take_in(&mut self, plan: SchedulerPlan, host: &Mutex<FakeHost>) -> serde_json::Value {
        if let Some(error) = &self.refuses {
            return serde_json::json!({ "error": error });
        }
        assert!(plan.generation > self.generation(), "an old generation");
        // The requester must not hold the kernel meanwhile.
        let host = host.lock().unwrap();
        let mut threads = host.threads.borrow_mut();
        let planned = |tid: i32| {
            plan.tasks
                .iter()
                .any(|task| task.thread == Some(tid as u32))
        };
        for (tid, policy) in std::mem::take(&mut self.held) {
            match threads.get_mut(&tid).filter(|thread| thread.policy == EXT) {
                Some(_) if planned(tid) && self.guarded.is_none() => {
                    self.held.insert(tid, policy);
                }
                Some(thread) => thread.policy = policy,
                None => {}
            }
        }
        let mut complaints = Vec::new();
        for task in plan.tasks.iter().filter(|_| self.guarded.is_none()) {
            let tid = task.thread.unwrap() as i32;
            match threads.get_mut(&tid) {
                Some(thread) if thread.policy != EXT => {
                    self.held.insert(tid, thread.policy);
                    thread.policy = EXT;
                }
                Some(_) => {}
                None => complaints.push(format!("thread {tid}: gone")),
            }
        }
        let generation = plan.generation;
        self.plans.push(plan);
        serde_json::json!({ "generation": generation, "complaints": complaints, "attached": self.guarded.is_none() })
    }

    fn state(&self, host: &Mutex<FakeHost>) -> SchedulerState {
        let host = host.lock().unwrap();
        let threads = host.threads.borrow();
        let is_held = |tid: &&i32| threads.get(tid).is_some_and(|thread| thread.policy == EXT);
        let turns = self
            .plans
            .last()
            .map(SchedulerPlan::turns_by_cache)
            .unwrap_or_default();
        let turns = self.other_turns.clone().unwrap_or(turns);
        let cache = |(number, cpus): (u32, &str)| CacheTurns {
            cpus: cpus.to_string(),
            turns: turns
                .iter()
                .filter(|turn| turn.cache == number)
                .cloned()
                .collect(),
        };
        SchedulerState {
            generation: self.generation(),
            kernel: if self.guarded.is_none() {
                "enabled"
            } else {
                "disabled"
            }
            .to_string(),
            guarded: self.guarded.clone(),
            places: self.plans.last().map_or(0, |plan| plan.tasks.len()),
            held: self.held.keys().filter(is_held).count(),
            caches: [(0, "0-1"), (1, "2-3")].map(cache).to_vec(),
        }
    }
}
