//! Containers that are about to start: the daemon places them before their first instruction, if it responds in time.

use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Maximum number of waiting starts; any further container is placed in its first window.
const MAX_WAITING: usize = 256;

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
    answer: SyncSender<bool>,
}

impl StartRequest {
    /// Reports whether the process has been placed, so that the runtime can continue.
    pub fn answer(self, is_placed: bool) {
        // The plugin may have stopped waiting already.
        let _ = self.answer.try_send(is_placed);
    }
}

impl ContainerStarts {
    /// Asks the daemon to place a process, and waits at most `patience`: is it placed?
    pub(crate) fn request(&self, id: &str, pid: i32, patience: Duration) -> bool {
        let (answer, outcome) = sync_channel(1);
        {
            let mut requests = self.0.requests.lock().unwrap_or_else(PoisonError::into_inner);
            if requests.len() >= MAX_WAITING {
                return false;
            }
            requests.push_back(StartRequest { id: id.to_string(), pid, answer });
        }
        self.0.arrival.notify_one();
        outcome.recv_timeout(patience).unwrap_or(false)
    }

    /// Waits for the next start, for at most `patience`.
    pub fn wait(&self, patience: Duration) -> Option<StartRequest> {
        let requests = self.0.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let wait_result = self.0.arrival.wait_timeout_while(requests, patience, |requests| requests.is_empty());
        wait_result.unwrap_or_else(PoisonError::into_inner).0.pop_front()
    }
}
