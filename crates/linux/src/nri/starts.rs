//! Containers that are about to start: the daemon places them before their first instruction, if it responds in time.

use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::kernel::lock;

/// Maximum number of waiting starts; any further container is placed in its first window.
const MAX_WAITING_STARTS: usize = 256;

/// Starts that wait for the daemon; clones share them.
#[derive(Clone, Debug, Default)]
pub struct ContainerStarts(Arc<StartQueue>);

#[derive(Debug, Default)]
struct StartQueue {
    requests: Mutex<VecDeque<StartRequest>>,
    arrival: Condvar,
}

/// A container whose program has not run yet.
#[derive(Debug)]
pub struct StartRequest {
    /// The container's id.
    pub id: String,
    /// The process that is to become its program.
    pub pid: i32,
    answer_sender: SyncSender<bool>,
}

impl StartRequest {
    /// Reports whether the process has been placed, so that the runtime can continue.
    pub fn answer(self, is_placed: bool) {
        // The plugin may have stopped waiting already.
        let _ = self.answer_sender.try_send(is_placed);
    }
}

impl ContainerStarts {
    /// Requests the placement of a process from the daemon; returns whether it was placed within `max_wait`.
    pub(crate) fn request_placement(&self, id: &str, pid: i32, max_wait: Duration) -> bool {
        let (answer_sender, answer_receiver) = sync_channel(1);
        {
            let mut requests = lock(&self.0.requests);
            if requests.len() >= MAX_WAITING_STARTS {
                return false;
            }
            requests.push_back(StartRequest {
                id: id.to_string(),
                pid,
                answer_sender,
            });
        }
        self.0.arrival.notify_one();
        answer_receiver.recv_timeout(max_wait).unwrap_or(false)
    }

    /// Waits for the next start, for at most `max_wait`.
    pub fn wait_for_start(&self, max_wait: Duration) -> Option<StartRequest> {
        let requests = lock(&self.0.requests);
        let wait_result = self
            .0
            .arrival
            .wait_timeout_while(requests, max_wait, |requests| requests.is_empty());
        wait_result
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .pop_front()
    }
}
