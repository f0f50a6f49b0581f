//! Gangs through a scheduler in the kernel: `schedulers/gangs`, a separate program that receives a plan over a socket.
//!
//! Problem: idle turns only lower weights, and tasks without a gang cannot be kept from running together. Method: if
//! the scheduler runs, one message gives it the schedules that it can keep and advice on tasks that should not run
//! together; the message takes effect at once, and the plan in force is read back. The scheduler gives planned
//! threads policy 7 and restores them; the journal contains their originals as well. Properties: without the
//! scheduler, gangs remain idle turns; if it dies, the kernel runs all its tasks under the fair class, and this
//! module restores the policy number that the scheduler leaves behind.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cachemate_core::{CpuSet, GangSchedule};
use cachemate_gangs::{
    ScheduledTurn, SchedulerPlan, SchedulerReply, SchedulerRequest, SchedulerState,
};

use crate::act::thread_rotation::ThreadRotation;
use crate::kernel::scheduling::{EXT, SchedParams};
use crate::kernel::{Kernel, ThreadKey};

pub mod advisory_gangs;
pub mod compose;

use compose::{AdvisoryGangs, CacheSchedule, plan_message};

/// The scheduler's default socket.
pub const SOCKET: &str = "/run/gangs.sock";
/// Maximum length of a reply.
const MAX_REPLY_BYTES: u64 = 8 << 20;
/// Timeout of a request: the scheduler polls its socket every 20 ms, and reads 65 536 tasks in less.
const MAX_REPLY_WAIT: Duration = Duration::from_secs(1);

/// A last-level cache as the scheduler numbers it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NumberedCache {
    /// Position of the cache in the scheduler's list.
    pub number: u32,
    /// CPUs that share it.
    pub cpus: CpuSet,
}

/// The caches of the scheduler's state with their CPUs.
///
/// # Errors
/// The text of an invalid CPU list.
fn numbered_caches(state: &SchedulerState) -> Result<Vec<NumberedCache>, String> {
    let mut caches = Vec::new();
    for (number, cache) in state.caches.iter().enumerate() {
        let cpus = cache
            .cpus
            .parse::<CpuSet>()
            .map_err(|error| format!("caches[{number}].cpus: found '{}': {error}", cache.cpus))?;
        caches.push(NumberedCache {
            number: number as u32,
            cpus,
        });
    }
    Ok(caches)
}

/// A client of the scheduler, which opens its socket for each request.
#[derive(Clone, Default, Debug)]
pub struct SchedulerClient {
    socket: PathBuf,
}

impl SchedulerClient {
    /// A client that has sent no request yet.
    pub fn new(socket: &Path) -> Self {
        SchedulerClient {
            socket: socket.to_path_buf(),
        }
    }

    /// The plan in force, as the scheduler reads it back from the kernel.
    ///
    /// # Errors
    /// The scheduler does not reply, or its reply cannot be parsed.
    pub fn query_state(&self) -> io::Result<SchedulerState> {
        match self.query(&SchedulerRequest::State {})? {
            SchedulerReply::State(state) => Ok(*state),
            other => Err(io::Error::other(format!(
                "{}: found {other:?}, expected its state",
                self.socket.display()
            ))),
        }
    }

    /// Sends a plan, and returns the scheduler's complaints.
    fn send_plan(&self, message: SchedulerPlan) -> io::Result<Vec<String>> {
        let expected = message.generation;
        match self.query(&SchedulerRequest::Plan(message))? {
            SchedulerReply::Taken { generation, .. } if generation != expected => {
                let socket = self.socket.display();
                Err(io::Error::other(format!(
                    "{socket}: found an answer to plan {generation}, expected to {expected}"
                )))
            }
            SchedulerReply::Taken {
                complaints,
                attached: true,
                ..
            } => Ok(complaints),
            SchedulerReply::Taken { .. } => Err(io::Error::other(
                "the gang scheduler is not attached just now",
            )),
            SchedulerReply::Error { error } => Err(io::Error::other(format!(
                "the gang scheduler refuses: {error}"
            ))),
            other @ SchedulerReply::State(_) => Err(io::Error::other(format!(
                "found {other:?}, expected an answer to a plan"
            ))),
        }
    }

    fn query(&self, request: &SchedulerRequest) -> io::Result<SchedulerReply> {
        let add_path = |error: io::Error| {
            io::Error::new(error.kind(), format!("{}: {error}", self.socket.display()))
        };
        let stream = UnixStream::connect(&self.socket).map_err(add_path)?;
        stream
            .set_write_timeout(Some(MAX_REPLY_WAIT))
            .map_err(add_path)?;
        let mut line = serde_json::to_string(request).map_err(io::Error::other)?;
        line.push('\n');
        (&stream).write_all(line.as_bytes()).map_err(add_path)?;
        let reply_line = read_line(&stream, Instant::now() + MAX_REPLY_WAIT).map_err(add_path)?;
        serde_json::from_str(&reply_line).map_err(|error| {
            let prefix: String = reply_line.chars().take(80).collect();
            io::Error::other(format!(
                "{}: found '{prefix}', expected an answer: {error}",
                self.socket.display()
            ))
        })
    }
}

/// Reads the first line of the stream, which may arrive in several pieces.
fn read_line(mut stream: &UnixStream, deadline: Instant) -> io::Result<String> {
    let (mut line, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(remaining))?;
        let count = match stream.read(&mut bytes) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                continue;
            }
            count => count?,
        };
        line.extend_from_slice(&bytes[..count]);
        if count == 0 || bytes[..count].contains(&b'\n') {
            break;
        }
        if line.len() as u64 > MAX_REPLY_BYTES {
            return Err(io::Error::other(format!(
                "found more than {MAX_REPLY_BYTES} bytes, expected one line"
            )));
        }
    }
    let first_line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(first_line).into_owned())
}

/// The plan that was sent to the scheduler.
#[derive(Debug)]
struct SubmittedPlan {
    generation: u64,
    turns: Vec<ScheduledTurn>,
    /// Threads of the plan, with their original scheduling parameters.
    threads: BTreeMap<ThreadKey, SchedParams>,
}

/// The schedules and the advice that the scheduler keeps for us.
#[derive(Default, Debug)]
pub(crate) struct KernelGangScheduler {
    client: SchedulerClient,
    /// Caches by the last poll; empty if the scheduler does not run.
    caches: Vec<NumberedCache>,
    generation: u64,
    /// Requested schedules, which are in force once `submitted_plan` agrees.
    requested_schedules: Vec<(GangSchedule, CacheSchedule)>,
    advisory_gangs: Option<AdvisoryGangs>,
    /// Weights of all gang members, by thread.
    weights: BTreeMap<ThreadKey, f64>,
    clashes: Vec<(ThreadKey, ThreadKey)>,
    submitted_plan: Option<SubmittedPlan>,
    is_dirty: bool,
    complaints: Vec<String>,
}

impl KernelGangScheduler {
    pub fn new(socket: &Path) -> Self {
        KernelGangScheduler {
            client: SchedulerClient::new(socket),
            ..Self::default()
        }
    }

    /// Checks whether the scheduler still runs and keeps the plan that it was sent. If not, cachemate no longer has
    /// threads in it, and a message is returned.
    pub fn poll(&mut self) -> Option<String> {
        let scheduler_state = self
            .client
            .query_state()
            .map_err(|error| format!("the gang scheduler does not answer ({error})"));
        let reported_generation = scheduler_state.as_ref().ok().map(|state| state.generation);
        let attached_state = scheduler_state.and_then(|state| {
            self.check_state(&state)?;
            let caches = numbered_caches(&state)
                .map_err(|error| format!("the gang scheduler's state cannot be read: {error}"))?;
            Ok((caches, state.generation))
        });
        match attached_state {
            Ok((caches, generation)) => {
                (self.caches, self.generation) = (caches, generation);
                None
            }
            Err(lost_message) => {
                let own_generation = self
                    .submitted_plan
                    .as_ref()
                    .map(|submitted| submitted.generation);
                if let Some(generation) =
                    reported_generation.filter(|_| reported_generation == own_generation)
                {
                    // The scheduler may attach again on its own, and must not schedule our threads when it does. If
                    // this message fails, the next plan replaces the scheduler's current one.
                    let _ = self.client.send_plan(plan_message(
                        generation + 1,
                        &[],
                        None,
                        &self.weights,
                        &self.clashes,
                    ));
                }
                self.clear_requests();
                self.submitted_plan.is_some().then_some(lost_message)
            }
        }
    }

    /// Drops all requests to the scheduler until a poll finds it again.
    fn clear_requests(&mut self) {
        self.caches.clear();
        self.is_dirty = false;
        (self.requested_schedules, self.advisory_gangs) = (Vec::new(), None);
    }

    /// Checks that the plan that was sent is in force, by the state that the scheduler reads back from the kernel.
    fn check_state(&self, state: &SchedulerState) -> Result<(), String> {
        if state.kernel != "enabled" {
            let detach_reason = state
                .guarded
                .as_ref()
                .map(|reason| format!(" ({reason})"))
                .unwrap_or_default();
            return Err(format!("the gang scheduler is detached{detach_reason}"));
        }
        let Some(submitted_plan) = &self.submitted_plan else {
            return match state.held {
                0 => Ok(()),
                held => Err(format!(
                    "another process has given {held} threads to the gang scheduler"
                )),
            };
        };
        if state.generation != submitted_plan.generation {
            let message = "another process has sent the gang scheduler another plan";
            return Err(format!(
                "{message}: found generation {}, expected {}",
                state.generation, submitted_plan.generation
            ));
        }
        let turns = state.turns();
        if turns != submitted_plan.turns {
            return Err(format!(
                "the gang scheduler keeps other turns: found {turns:?}, expected {:?}",
                submitted_plan.turns
            ));
        }
        Ok(())
    }

    /// Can the scheduler take plans, by the last poll?
    pub fn is_running(&self) -> bool {
        !self.caches.is_empty()
    }

    /// Sets the plan's weights and clashes, which apply to members of gangs from the next
    /// [`KernelGangScheduler::submit`] on.
    pub fn set_advice(
        &mut self,
        weights: BTreeMap<ThreadKey, f64>,
        clashes: Vec<(ThreadKey, ThreadKey)>,
    ) {
        self.is_dirty |= self.weights != weights || self.clashes != clashes;
        (self.weights, self.clashes) = (weights, clashes);
    }

    /// Sets advice on tasks that should not run together, as gangs without a schedule; `None` withdraws it.
    pub fn set_advisory_gangs(&mut self, advisory_gangs: Option<AdvisoryGangs>) {
        let advisory_gangs = advisory_gangs.filter(|_| self.is_running());
        self.is_dirty |= self.advisory_gangs != advisory_gangs;
        self.advisory_gangs = advisory_gangs;
    }

    pub fn schedules(&self) -> impl Iterator<Item = &GangSchedule> {
        self.requested_schedules
            .iter()
            .map(|(schedule, _)| schedule)
    }

    /// Adds a schedule if the scheduler can keep it; it is in force after [`KernelGangScheduler::submit`].
    ///
    /// # Errors
    /// The reason why idle turns must be used instead.
    pub fn start(
        &mut self,
        schedule: &GangSchedule,
        rotation: &ThreadRotation,
    ) -> Result<(), String> {
        let used_caches: Vec<u32> = self
            .requested_schedules
            .iter()
            .map(|(_, cache_schedule)| cache_schedule.cache)
            .collect();
        let cache_schedule =
            compose::build_cache_schedule(schedule, rotation, &self.caches, &used_caches)?;
        self.requested_schedules
            .push((schedule.clone(), cache_schedule));
        self.is_dirty = true;
        Ok(())
    }

    /// Removes a schedule. Returns false if the schedule was not submitted here.
    pub fn stop(&mut self, schedule: &GangSchedule) -> bool {
        let previous_count = self.requested_schedules.len();
        self.requested_schedules
            .retain(|(running_schedule, _)| running_schedule != schedule);
        self.is_dirty |= self.requested_schedules.len() != previous_count;
        self.requested_schedules.len() != previous_count
    }

    /// Sends everything that is requested as one plan, which takes effect at once and is read back.
    ///
    /// # Errors
    /// The scheduler rejects the plan, or another plan is in force; the scheduler then has no threads of ours.
    pub fn submit(&mut self) -> io::Result<()> {
        if !self.is_running() || !std::mem::take(&mut self.is_dirty) {
            return Ok(());
        }
        let cache_schedules: Vec<&CacheSchedule> = self
            .requested_schedules
            .iter()
            .map(|(_, cache_schedule)| cache_schedule)
            .collect();
        let generation = self.generation + 1;
        let message = plan_message(
            generation,
            &cache_schedules,
            self.advisory_gangs.as_ref(),
            &self.weights,
            &self.clashes,
        );
        let threads = cache_schedules
            .iter()
            .flat_map(|cache_schedule| cache_schedule.members())
            .chain(self.advisory_gangs.iter().flat_map(AdvisoryGangs::members));
        let mut threads: BTreeMap<ThreadKey, SchedParams> = threads.collect();
        // Threads of the previous plan are ours until they have been restored.
        threads.extend(self.submitted_plan.iter().flat_map(|submitted| {
            submitted
                .threads
                .iter()
                .map(|(key, original)| (*key, *original))
        }));
        self.submitted_plan = Some(SubmittedPlan {
            generation,
            turns: message.turns_by_cache(),
            threads,
        });
        let outcome = self.client.send_plan(message).and_then(|complaints| {
            self.complaints = complaints;
            self.check_state(&self.client.query_state()?)
                .map_err(io::Error::other)
        });
        match outcome {
            Ok(()) => self.generation = generation,
            Err(_) => self.clear_requests(),
        }
        outcome
    }

    /// Withdraws everything from the scheduler, and restores the policy of every thread of ours.
    pub fn withdraw<K: Kernel>(&mut self, kernel: &K) {
        (self.requested_schedules, self.advisory_gangs) = (Vec::new(), None);
        self.is_dirty = self.submitted_plan.is_some();
        // If it does not answer, it has exited or is about to; the policies are restored all the same.
        let _ = self.submit();
        self.restore_released(kernel);
    }

    /// Threads that the scheduler has reported as exited or in another class since the last call.
    pub fn take_complaints(&mut self) -> Vec<String> {
        std::mem::take(&mut self.complaints)
    }

    /// Caches by the last poll; empty if the scheduler does not run.
    pub fn caches(&self) -> &[NumberedCache] {
        &self.caches
    }

    /// Are tasks that clash kept apart whenever there is a choice?
    pub fn is_separating_clashes(&self) -> bool {
        self.is_running() && !self.clashes.is_empty()
    }

    /// Restores threads that still have the scheduler's policy although the scheduler no longer keeps them. Its loader
    /// does this as well, unless it was killed. A thread that has chosen another policy meanwhile keeps it.
    pub fn restore_released<K: Kernel>(&mut self, kernel: &K) {
        let scheduled_threads = self
            .requested_schedules
            .iter()
            .flat_map(|(_, cache_schedule)| cache_schedule.members());
        let scheduled_members: BTreeSet<ThreadKey> = scheduled_threads
            .chain(self.advisory_gangs.iter().flat_map(AdvisoryGangs::members))
            .map(|(thread, _)| thread)
            .collect();
        let Some(submitted_plan) = &mut self.submitted_plan else {
            return;
        };
        submitted_plan.threads.retain(|thread, original| {
            if scheduled_members.contains(thread) {
                return true;
            }
            let has_scheduler_policy = kernel.stat_of(*thread).is_ok()
                && kernel
                    .scheduling(thread.tid)
                    .is_ok_and(|now| now.policy == EXT);
            // A failure is retried in the next window, and the original stays in the journal.
            has_scheduler_policy && kernel.set_scheduling(thread.tid, original).is_err()
        });
        if scheduled_members.is_empty() && submitted_plan.threads.is_empty() {
            self.submitted_plan = None;
        }
    }
}

#[cfg(test)]
pub(crate) mod fake_tests;
#[cfg(test)]
mod tests;
