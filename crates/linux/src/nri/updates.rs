//! Requests to the container runtime from other threads: the CPUs of a running container.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::plugin::check_status;
use super::wire::{MessageBuilder, WireError, parse_fields};
use crate::kernel::lock;

/// Maximum wait for the runtime's response, which takes about 35 ms; a longer wait counts as a refusal.
const MAX_ANSWER_WAIT: Duration = Duration::from_secs(2);
/// Maximum number of waiting requests. Each blocks a thread of this process, so there are few.
const MAX_WAITING_REQUESTS: usize = 64;

/// The queue of requests to the runtime; clones share it.
#[derive(Clone, Debug)]
pub struct ContainerUpdates {
    queue: Arc<Mutex<UpdateQueue>>,
    /// Wakes the plugin's thread.
    wakeup_event: Arc<OwnedFd>,
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
    pub(super) outcome_sender: SyncSender<Result<(), String>>,
}

impl ContainerUpdates {
    /// An empty queue without a connected runtime.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Self> {
        let wakeup_event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(ContainerUpdates {
            queue: Arc::default(),
            wakeup_event: Arc::new(wakeup_event),
        })
    }

    /// Whether a runtime is connected that accepts requests.
    pub fn is_connected(&self) -> bool {
        lock(&self.queue).is_connected
    }

    /// Makes the runtime set the CPUs of a running container, and waits for its response.
    ///
    /// # Errors
    /// There is no runtime, it refuses, or it does not answer in time.
    pub fn set_cpus(&self, id: &str, cpus: &str) -> io::Result<()> {
        let (outcome_sender, outcome_receiver) = sync_channel(1);
        {
            let mut queue = lock(&self.queue);
            if !queue.is_connected || queue.requests.len() >= MAX_WAITING_REQUESTS {
                return Err(io::Error::new(
                    ErrorKind::NotConnected,
                    "the container runtime cannot be asked now",
                ));
            }
            // The reader takes the request only after this lock is released, so a failed wakeup leaves none in the
            // queue.
            rustix::io::write(&self.wakeup_event, &1u64.to_ne_bytes())?;
            queue.requests.push(UpdateRequest {
                id: id.to_string(),
                cpus: cpus.to_string(),
                outcome_sender,
            });
        }
        match outcome_receiver.recv_timeout(MAX_ANSWER_WAIT) {
            Ok(outcome) => outcome.map_err(io::Error::other),
            Err(RecvTimeoutError::Timeout) => {
                let message = format!(
                    "no answer from the container runtime within {} s",
                    MAX_ANSWER_WAIT.as_secs()
                );
                Err(io::Error::new(ErrorKind::TimedOut, message))
            }
            Err(RecvTimeoutError::Disconnected) => Err(io::Error::new(
                ErrorKind::NotConnected,
                "the container runtime ended the connection",
            )),
        }
    }

    /// A descriptor that is readable while requests wait.
    pub(super) fn wakeup_fd(&self) -> BorrowedFd<'_> {
        self.wakeup_event.as_fd()
    }

    /// Takes the requests that wait.
    pub(super) fn take_requests(&self) -> Vec<UpdateRequest> {
        let mut counter_bytes = [0; 8];
        // The counter is already empty if another call has read it.
        let _ = rustix::io::read(&self.wakeup_event, &mut counter_bytes);
        std::mem::take(&mut lock(&self.queue).requests)
    }

    /// Makes the queue accept requests, or refuse them and drop those that wait.
    pub(super) fn set_connected(&self, is_connected: bool) {
        let mut queue = lock(&self.queue);
        queue.is_connected = is_connected;
        if !is_connected {
            queue.requests.clear();
        }
    }
}

impl UpdateRequest {
    /// The payload of `UpdateContainers`.
    pub(super) fn payload(&self) -> Vec<u8> {
        let cpu = MessageBuilder::default()
            .with_bytes(6, self.cpus.as_bytes())
            .build();
        let resources = MessageBuilder::default().with_bytes(2, &cpu).build();
        let linux = MessageBuilder::default().with_bytes(1, &resources).build();
        let update = MessageBuilder::default()
            .with_bytes(1, self.id.as_bytes())
            .with_bytes(2, &linux)
            .build();
        MessageBuilder::default().with_bytes(1, &update).build()
    }
}

/// Checks the runtime's response to `UpdateContainers`, which is an error or the list of updates that failed.
pub(super) fn check_update_response(body: &[u8]) -> Result<(), WireError> {
    check_status(body, "an updated container")?;
    for (_, payload) in parse_fields(body)?
        .into_iter()
        .filter(|(field, _)| *field == 2)
    {
        if parse_fields(payload.bytes())?
            .iter()
            .any(|(field, _)| *field == 1)
        {
            return Err(WireError {
                found: "a failed update".to_string(),
                expected: "an updated container",
            });
        }
    }
    Ok(())
}
