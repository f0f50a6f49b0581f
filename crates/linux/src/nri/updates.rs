//! Requests to the container runtime from other threads: the CPUs of a running container.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::plugin::check_status;
use super::wire::{MessageBuilder, WireError, parse_fields};

/// Maximum wait for the runtime's response, which takes about 35 ms; a longer wait counts as a refusal.
const PATIENCE: Duration = Duration::from_secs(2);
/// Requests that wait at most; each waits for a thread of this process, so there are few.
const MAX_WAITING: usize = 64;

/// The way to the runtime; clones share it.
#[derive(Clone, Debug)]
pub struct ContainerUpdates {
    queue: Arc<Mutex<UpdateQueue>>,
    /// Wakes the plugin's thread.
    bell: Arc<OwnedFd>,
}

#[derive(Debug, Default)]
struct UpdateQueue {
    is_connected: bool,
    requests: Vec<UpdateRequest>,
}

/// A request that is to be sent.
#[derive(Debug)]
pub(super) struct UpdateRequest {
    id: String,
    cpus: String,
    pub(super) outcome: SyncSender<Result<(), String>>,
}

impl ContainerUpdates {
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(ContainerUpdates { queue: Arc::default(), bell: Arc::new(bell) })
    }

    /// Whether a runtime is connected that accepts requests.
    pub fn is_connected(&self) -> bool {
        self.queue().is_connected
    }

    /// Makes the runtime set the CPUs of a running container, and waits for its response.
    ///
    /// # Errors
    /// There is no runtime, it refuses, or it does not answer in time.
    pub fn set_cpus(&self, id: &str, cpus: &str) -> io::Result<()> {
        let (outcome, answer) = sync_channel(1);
        {
            let mut queue = self.queue();
            if !queue.is_connected || queue.requests.len() >= MAX_WAITING {
                return Err(io::Error::new(ErrorKind::NotConnected, "the container runtime cannot be asked now"));
            }
            queue.requests.push(UpdateRequest { id: id.to_string(), cpus: cpus.to_string(), outcome });
        }
        rustix::io::write(&self.bell, &1u64.to_ne_bytes())?;
        match answer.recv_timeout(PATIENCE) {
            Ok(outcome) => outcome.map_err(io::Error::other),
            Err(RecvTimeoutError::Timeout) => {
                let message = format!("no answer from the container runtime within {} s", PATIENCE.as_secs());
                Err(io::Error::new(ErrorKind::TimedOut, message))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(io::Error::new(ErrorKind::NotConnected, "the container runtime ended the connection"))
            }
        }
    }

    /// Readable if requests wait.
    pub(super) fn wakeup_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Takes the requests that wait.
    pub(super) fn take(&self) -> Vec<UpdateRequest> {
        let mut count = [0; 8];
        // The counter is already empty if another call has read it.
        let _ = rustix::io::read(&self.bell, &mut count);
        std::mem::take(&mut self.queue().requests)
    }

    /// From now on requests are taken, or refused.
    pub(super) fn set_connected(&self, is_connected: bool) {
        let mut queue = self.queue();
        queue.is_connected = is_connected;
        if !is_connected {
            queue.requests.clear();
        }
    }

    fn queue(&self) -> MutexGuard<'_, UpdateQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UpdateRequest {
    /// The payload of `UpdateContainers`.
    pub(super) fn payload(&self) -> Vec<u8> {
        let cpu = MessageBuilder::default().bytes(6, self.cpus.as_bytes()).build();
        let resources = MessageBuilder::default().bytes(2, &cpu).build();
        let linux = MessageBuilder::default().bytes(1, &resources).build();
        let update = MessageBuilder::default().bytes(1, self.id.as_bytes()).bytes(2, &linux).build();
        MessageBuilder::default().bytes(1, &update).build()
    }
}

/// Checks the runtime's response to `UpdateContainers`, which is an error or the list of updates that failed.
pub(super) fn check_outcome(body: &[u8]) -> Result<(), WireError> {
    check_status(body, "an updated container")?;
    for (_, payload) in parse_fields(body)?.into_iter().filter(|(field, _)| *field == 2) {
        if parse_fields(payload.bytes())?.iter().any(|(field, _)| *field == 1) {
            return Err(WireError { found: "a failed update".to_string(), expected: "an updated container" });
        }
    }
    Ok(())
}
