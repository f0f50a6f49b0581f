//! The loader's service: it accepts plans over the socket, adopts planned tasks, watches whether unmanaged tasks need
//! the CPUs, and finally restores everything.

use crate::machine::{self, HostCaches};
use crate::scheduler::BpfScheduler;
use crate::tasks::PolicyJournal;
use cachemate_gangs::{CacheTurns, ScheduledTurn, SchedulerRequest, SchedulerState};
use gangs::maps::{CacheCounts, MapTurn, TaskKey};
use gangs::plan::{CheckedPlan, MAX_BYTES, check_plan, parse_request};
use gangs::starvation_guard::{BackOff, StarvationGuard, WINDOW_NS};
use serde::Serialize;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// SCX_EXIT_UNREG_KERN and SCX_EXIT_ERROR of include/linux/sched/ext.h, Linux 6.18.
const EXIT_UNREG_KERN: u32 = 66;
/// Maximum number of consecutive restarts. The kernel requests a restart after a hotplug (SCX_ECODE_ACT_RESTART).
const RESTARTS: u32 = 5;
const POLL: Duration = Duration::from_millis(20);
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// A cache in the state in force, as read from the maps.
#[derive(Serialize)]
struct ServiceCacheState {
    #[serde(flatten)]
    cache: CacheTurns,
    counts: CacheCounts,
}

pub struct Service {
    machine: HostCaches,
    schedules_all: bool,
    tasks: PolicyJournal,
    plan: Option<CheckedPlan>,
    scheduler: Option<BpfScheduler>,
    guard: StarvationGuard,
    looked: Instant,
    attached: Instant,
    back_off: BackOff,
    next_attempt: Option<(Instant, String)>,
    restarts: u32,
}

impl Service {
    /// Restores the threads that an earlier run left in the journal, and attaches the scheduler.
    ///
    /// # Errors
    /// The host lacks a prerequisite, or the kernel refuses the scheduler.
    pub fn start(journal: &Path, schedules_all: bool) -> Result<Self, String> {
        let missing_prerequisites = machine::missing_prerequisites();
        if !missing_prerequisites.is_empty() {
            return Err(format!(
                "missing here: {}",
                missing_prerequisites.join("; ")
            ));
        }
        let (tasks, restored) = PolicyJournal::open(journal)?;
        if restored > 0 {
            eprintln!("gangs: {restored} threads of an earlier run restored");
        }
        let machine = HostCaches::read()?;
        let scheduler = BpfScheduler::attach(&machine, schedules_all)?;
        Ok(Service {
            machine,
            schedules_all,
            tasks,
            plan: None,
            scheduler: Some(scheduler),
            guard: StarvationGuard::default(),
            looked: Instant::now(),
            attached: Instant::now(),
            back_off: BackOff::default(),
            next_attempt: None,
            restarts: 0,
        })
    }

    /// Serves requests until stopped. All tasks are restored at the end, whatever the cause.
    ///
    /// # Errors
    /// The socket cannot be opened, or the kernel has ended the scheduler.
    pub fn run(&mut self, socket: &Path, stop: &Arc<AtomicBool>) -> Result<(), String> {
        let outcome = self.serve(socket, stop);
        let restore_result = self.tasks.restore_all();
        self.scheduler = None;
        let _ = std::fs::remove_file(socket);
        restore_result?;
        outcome
    }

    fn serve(&mut self, socket: &Path, stop: &Arc<AtomicBool>) -> Result<(), String> {
        let describe_error = |error: std::io::Error| format!("{}: {error}", socket.display());
        if UnixStream::connect(socket).is_ok() {
            return Err(format!(
                "{}: another loader listens there",
                socket.display()
            ));
        }
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).map_err(describe_error)?;
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))
            .map_err(describe_error)?;
        listener.set_nonblocking(true).map_err(describe_error)?;
        println!(
            "attached, {} last-level caches, socket {}",
            self.machine.cpus_of_cache.len(),
            socket.display()
        );
        while !stop.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((client, _)) => {
                    if self.answer_request(client) {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(POLL),
                Err(error) => return Err(describe_error(error)),
            }
            self.watch()?;
        }
        Ok(())
    }

    /// Handles one request; returns true if it asks to stop. A client that sends nothing is dropped after two
    /// seconds.
    fn answer_request(&mut self, client: UnixStream) -> bool {
        let _ = client.set_nonblocking(false);
        let _ = client.set_read_timeout(Some(CLIENT_TIMEOUT));
        let _ = client.set_write_timeout(Some(CLIENT_TIMEOUT));
        let mut line = String::new();
        let read_result =
            BufReader::new(Read::take(&client, MAX_BYTES as u64 + 2)).read_line(&mut line);
        let request = match read_result {
            Ok(_) => parse_request(line.trim_end()),
            Err(error) => Err(format!("message: {error}")),
        };
        let is_stop_request = matches!(request, Ok(SchedulerRequest::Stop {}));
        let reply = request.and_then(|request_message| match request_message {
            SchedulerRequest::Plan(message) => {
                let plan = check_plan(
                    &message,
                    self.machine.cpus_of_cache.len(),
                    self.generation(),
                )?;
                self.submit_plan(plan)
            }
            SchedulerRequest::State {} => self.state(),
            SchedulerRequest::Stop {} => Ok(serde_json::json!({ "stopping": true })),
        });
        let message = reply.unwrap_or_else(|error| serde_json::json!({ "error": error }));
        let _ = (&client).write_all(format!("{message}\n").as_bytes());
        is_stop_request
    }

    /// Generation of the last loaded plan.
    fn generation(&self) -> u64 {
        self.plan.as_ref().map_or(0, |plan| plan.generation)
    }

    fn submit_plan(&mut self, plan: CheckedPlan) -> Result<serde_json::Value, String> {
        if let Some(scheduler) = &self.scheduler {
            scheduler.load_plan(&plan)?;
        }
        let mut complaints = if self.scheduler.is_some() {
            self.adopt_tasks(&plan)
        } else {
            Vec::new()
        };
        let is_kept = |thread, process| {
            self.schedules_all
                || plan.places.contains_key(&TaskKey::Thread(thread))
                || plan.places.contains_key(&TaskKey::Process(process))
        };
        // The plan does not list children of planned processes, so they are selected by their parent.
        let adopts_children = |process| {
            plan.places
                .get(&TaskKey::Process(process))
                .is_some_and(|place| place.children)
        };
        // If the kernel refuses a thread, its entry stays in the journal, and the plan remains in force.
        complaints.extend(self.tasks.restore(is_kept, adopts_children).err());
        let generation = plan.generation;
        self.plan = Some(plan);
        Ok(
            serde_json::json!({ "generation": generation, "complaints": complaints, "attached": self.scheduler.is_some() }),
        )
    }

    fn adopt_tasks(&mut self, plan: &CheckedPlan) -> Vec<String> {
        let mut complaints = Vec::new();
        for task_key in plan.places.keys().filter(|_| !self.schedules_all) {
            match task_key {
                TaskKey::Process(process) => complaints.extend(self.tasks.adopt_process(*process)),
                TaskKey::Thread(thread) => {
                    complaints.extend(self.tasks.adopt_thread(*thread).err())
                }
            }
        }
        let adopts_children = |process| {
            plan.places
                .get(&TaskKey::Process(process))
                .is_some_and(|place| place.children)
        };
        if !self.schedules_all && plan.places.values().any(|place| place.children) {
            self.tasks.adopt_children(adopts_children);
        }
        let stolen_ns = self
            .scheduler
            .as_ref()
            .and_then(|scheduler| scheduler.stolen_times_ns(now_ns()).ok());
        if self.tasks.take_adopted_count() > 0
            && stolen_ns.is_some_and(|stolen_ns| self.guard.restart_window(&stolen_ns))
        {
            self.looked = Instant::now();
        }
        complaints
    }

    /// Complete state in force, read back from the maps and the kernel.
    fn state(&self) -> Result<serde_json::Value, String> {
        let mut caches = Vec::new();
        if let Some(scheduler) = &self.scheduler {
            let (rotations, counts) = (scheduler.rotations()?, scheduler.counts()?);
            let cache_readings = rotations
                .into_iter()
                .zip(counts)
                .zip(&self.machine.cpus_of_cache)
                .enumerate();
            for (cache, ((turns, counts), cpus)) in cache_readings {
                let turns = turns
                    .iter()
                    .map(|turn| turn_message(cache as u32, turn))
                    .collect();
                let cache = CacheTurns {
                    cpus: cpus.clone(),
                    turns,
                };
                caches.push(ServiceCacheState { cache, counts });
            }
        }
        let state = SchedulerState {
            generation: self.generation(),
            kernel: machine::sched_ext_state(),
            guarded: self.next_attempt.as_ref().map(|(_, reason)| reason.clone()),
            places: self
                .scheduler
                .as_ref()
                .map_or(Ok(0), BpfScheduler::places)?,
            held: self.tasks.held_count(),
            caches,
        };
        serde_json::to_value(state).map_err(|error| error.to_string())
    }

    /// Polls the kernel, the starvation guard and the clock once.
    fn watch(&mut self) -> Result<(), String> {
        if let Some((at, _)) = &self.next_attempt {
            return if Instant::now() >= *at {
                self.reattach()
            } else {
                Ok(())
            };
        }
        let Some(scheduler) = &self.scheduler else {
            return Ok(());
        };
        if let Some((kind, code)) = scheduler.read_exit()? {
            if kind == EXIT_UNREG_KERN && self.restarts < RESTARTS {
                self.restarts += 1;
                return self.detach("the kernel asks for a restart (hotplug)".to_owned(), 1);
            }
            return Err(format!(
                "the kernel has ended the scheduler: exit kind {kind}, code {code}"
            ));
        }
        let window = self.looked.elapsed();
        if self.schedules_all || window.as_nanos() < u128::from(WINDOW_NS) {
            return Ok(());
        }
        self.looked = Instant::now();
        let stolen_ns = scheduler.stolen_times_ns(now_ns())?;
        if let Some((cpu, share)) = self.guard.observe(&stolen_ns, window.as_nanos() as u64) {
            let seconds = self
                .back_off
                .next_delay_s(self.attached.elapsed().as_secs());
            let percent = share * 100.0;
            return self.detach(
                format!(
                    "CPU {cpu}: unmanaged tasks had {percent:.0} % of {} ms",
                    window.as_millis()
                ),
                seconds,
            );
        }
        Ok(())
    }

    fn detach(&mut self, reason: String, seconds: u64) -> Result<(), String> {
        let restored = self.tasks.restore_all();
        self.scheduler = None;
        let restored = restored.map_or_else(
            |error| error,
            |threads| format!("{threads} threads back in the fair class"),
        );
        eprintln!("gangs: {reason}; {restored}, next attempt in {seconds} s");
        self.next_attempt = Some((Instant::now() + Duration::from_secs(seconds), reason));
        Ok(())
    }

    fn reattach(&mut self) -> Result<(), String> {
        self.next_attempt = None;
        self.machine = HostCaches::read()?;
        let scheduler = BpfScheduler::attach(&self.machine, self.schedules_all)?;
        self.guard = StarvationGuard::default();
        (self.looked, self.attached) = (Instant::now(), Instant::now());
        if let Some(plan) = self.plan.take() {
            scheduler.load_plan(&plan)?;
            self.scheduler = Some(scheduler);
            self.adopt_tasks(&plan)
                .iter()
                .for_each(|complaint| eprintln!("gangs: {complaint}"));
            self.plan = Some(plan);
        } else {
            self.scheduler = Some(scheduler);
        }
        eprintln!("gangs: attached again");
        Ok(())
    }
}

fn turn_message(cache: u32, turn: &MapTurn) -> ScheduledTurn {
    let may_fill = (0..u32::BITS)
        .filter(|gang| turn.may_fill & (1 << gang) != 0)
        .collect();
    ScheduledTurn {
        cache,
        gang: turn.gang,
        turn_us: turn.length_ns / 1000,
        may_fill,
    }
}

/// Time in ns of the monotonic clock, which the BPF scheduler also uses.
fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
