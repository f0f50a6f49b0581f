//! Connections that are served at the same time: few, none for long, and nobody waits behind somebody who dawdles.
//!
//! Problem: whoever may connect can also connect and say nothing, a byte a second, or a hundred times. Method: everybody is
//! served at once, within a deadline for the whole of it; each party has so many places, and where all are taken the guest who
//! has been there longest goes. Properties: descriptors and memory are bounded; who asks and takes the answer is always served.

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
    /// A party with nobody there yet. 0 places are taken as 1; `patience` is the deadline for one guest's whole
    /// service.
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

/// What accept(2) brought. Where it failed (out of descriptors) there is a pause: it would fail again at once.
pub async fn accepted<T>(result: io::Result<T>) -> Option<T> {
    // Who was sent away lets go of his descriptor before the next one is served, however many wait.
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
