//! Connections that are served at the same time: few, none for long, and none behind a slow one.
//!
//! Problem: a client can connect and send nothing, a byte a second, or a hundred connections. Method: every
//! connection is served at once, within a deadline for the whole of it; each party has a fixed number of places, and
//! if all are taken, its oldest connection is closed. Properties: descriptors and memory are bounded; a client that
//! sends a request and reads the response is always served.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use tokio::task::AbortHandle;

/// The guests of one party, longest there first.
pub struct ConnectionLimit {
    capacity: usize,
    patience: Duration,
    connections: VecDeque<AbortHandle>,
}

impl ConnectionLimit {
    /// A party without connections. A capacity of 0 counts as 1; `patience` is the deadline of one connection.
    pub fn new(capacity: usize, patience: Duration) -> Self {
        ConnectionLimit { capacity, patience, connections: VecDeque::new() }
    }

    /// Serves one more guest; returns at once.
    pub fn serve(&mut self, service: impl Future<Output = ()> + Send + 'static) {
        self.connections.retain(|guest| !guest.is_finished());
        while self.connections.len() >= self.capacity.max(1) {
            self.connections.pop_front().expect("at least one place, all taken").abort();
        }
        let within = tokio::time::timeout(self.patience, service);
        // Too late is as good as gone.
        let task = tokio::spawn(async move { drop(within.await) });
        self.connections.push_back(task.abort_handle());
    }
}

/// The result of accept(2). A failure (no descriptors left) is followed by a pause, because it would fail again at
/// once.
pub async fn accepted<T>(result: io::Result<T>) -> Option<T> {
    // A closed connection releases its descriptor before the next one is served, however many wait.
    tokio::task::yield_now().await;
    if result.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    result.ok()
}

/// Runs a service in a thread of its own, which ends with the process. `make` is called before, where it may listen.
///
/// # Errors
/// Those of `make`, or the thread cannot be started.
pub fn in_own_thread<S>(name: &str, make: impl FnOnce() -> io::Result<S>) -> io::Result<()>
where
    S: Future<Output = ()> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let inside = runtime.enter();
    let service = make()?;
    drop(inside);
    std::thread::Builder::new().name(name.to_string()).spawn(move || runtime.block_on(service))?;
    Ok(())
}
