//! A limit on connections: few at a time, each with a deadline, so that a slow connection never delays another.
//!
//! Problem: a client can connect and send nothing, send a byte per second, never read, or open a hundred connections.
//! Method: every connection is served at once, and has a deadline for its whole life. Slots are few; if all are
//! taken, the peer that holds the most slots loses its oldest connection. A connection that has proved its
//! authorization is admitted: it leaves its slot and can no longer be displaced. Properties: descriptors and memory
//! are bounded; a client that sends a request and reads the response is served; no unauthorized client ends an
//! admitted connection.

use std::collections::VecDeque;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::task::AbortHandle;

/// The handle with which a connection controls its slot.
#[derive(Clone, Default)]
pub struct ConnectionSlot(Arc<SlotState>);

#[derive(Default)]
struct SlotState {
    is_admitted: AtomicBool,
    task: OnceLock<AbortHandle>,
}

impl ConnectionSlot {
    /// Admits the connection after it has proved its authorization. An admitted connection is not displaced, and has
    /// the deadline of admitted connections. The caller limits the number of admitted connections.
    pub fn admit(&self) {
        self.0.is_admitted.store(true, Ordering::Relaxed);
    }

    /// Ends the connection at once. Dropping its task closes the socket and discards unsent bytes.
    pub fn close(&self) {
        if let Some(task) = self.0.task.get() {
            task.abort();
        }
    }

    fn is_admitted(&self) -> bool {
        self.0.is_admitted.load(Ordering::Relaxed)
    }

    fn is_finished(&self) -> bool {
        self.0.task.get().is_none_or(AbortHandle::is_finished)
    }
}

/// Maximum lifetimes of a connection.
#[derive(Clone, Copy)]
pub struct Deadlines {
    /// Lifetime of a connection that is not admitted, from its start.
    pub unadmitted_lifetime: Duration,
    /// Lifetime of an admitted connection, from its admission.
    pub admitted: Duration,
}

/// The connections of one listener, oldest first. `Peer` identifies the client: a user's id or an address.
pub struct ConnectionLimit<Peer> {
    capacity: usize,
    deadlines: Deadlines,
    connections: VecDeque<(Peer, ConnectionSlot)>,
}

impl<Peer: PartialEq> ConnectionLimit<Peer> {
    /// Builds a limit without connections. A capacity of 0 counts as 1.
    pub fn new(capacity: usize, deadlines: Deadlines) -> Self {
        ConnectionLimit {
            capacity: capacity.max(1),
            deadlines,
            connections: VecDeque::new(),
        }
    }

    /// Starts serving one more connection, and returns without waiting for it.
    pub fn serve<S>(&mut self, peer: Peer, service: impl FnOnce(ConnectionSlot) -> S)
    where
        S: Future<Output = ()> + Send + 'static,
    {
        // An admitted connection has left its slot; its task continues.
        self.connections
            .retain(|(_, slot)| !slot.is_finished() && !slot.is_admitted());
        while self.connections.len() >= self.capacity {
            self.close_oldest();
        }

        let slot = ConnectionSlot::default();
        let (service, own_slot, deadlines) = (service(slot.clone()), slot.clone(), self.deadlines);
        let task = tokio::spawn(async move {
            let mut service = pin!(service);
            let has_ended = tokio::time::timeout(deadlines.unadmitted_lifetime, &mut service)
                .await
                .is_ok();
            if !has_ended && own_slot.is_admitted() {
                // A service that ends at the deadline and one that ends before it both close the socket, so the
                // result is ignored.
                let _ = tokio::time::timeout(deadlines.admitted, service).await;
            }
        });
        // The runtime has one thread, so the task has not run yet.
        let _ = slot.0.task.set(task.abort_handle());
        self.connections.push_back((peer, slot));
    }

    /// Closes the oldest connection of the peer that has the most of them.
    fn close_oldest(&mut self) {
        let connections_of = |peer: &Peer| {
            self.connections
                .iter()
                .filter(|(other_peer, _)| other_peer == peer)
                .count()
        };
        let max_connections = self
            .connections
            .iter()
            .map(|(peer, _)| connections_of(peer))
            .max();
        let oldest_index = self
            .connections
            .iter()
            .position(|(peer, _)| Some(connections_of(peer)) == max_connections);
        if let Some((_, slot)) = oldest_index.and_then(|index| self.connections.remove(index)) {
            slot.close();
        }
    }
}

/// The accepted connection; `None` if accept(2) failed. A failure, such as a lack of descriptors, is followed by a
/// pause, because an immediate retry would fail again.
pub async fn accept<T>(result: io::Result<T>) -> Option<T> {
    // Yields, so that closed connections release their descriptors before the next one is accepted.
    tokio::task::yield_now().await;
    if result.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    result.ok()
}

/// Runs a service in a separate thread that ends with the process. The calling thread runs `build_service` first, so
/// that `build_service` can listen and report errors.
///
/// # Errors
/// The error of `build_service`, or the thread cannot be started.
pub fn serve_in_own_thread<S>(
    name: &str,
    build_service: impl FnOnce() -> io::Result<S>,
) -> io::Result<()>
where
    S: Future<Output = ()> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()?;
    let runtime_guard = runtime.enter();
    let service = build_service()?;
    drop(runtime_guard);
    std::thread::Builder::new()
        .name(name.to_string())
        .spawn(move || runtime.block_on(service))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `test` on the same kind of runtime as the servers.
    fn served(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(test);
    }

    const HOUR: Duration = Duration::from_secs(3600);

    /// Does a flood by one peer leave the only connection of another one, and its own admitted one, undisturbed?
    #[test]
    fn a_flood_by_one_peer_leaves_another_peers_connection() {
        served(async {
            let mut limit = ConnectionLimit::new(
                4,
                Deadlines {
                    unadmitted_lifetime: HOUR,
                    admitted: HOUR,
                },
            );
            let mut slots = Vec::new();
            let connect =
                |limit: &mut ConnectionLimit<u32>, slots: &mut Vec<ConnectionSlot>, peer| {
                    limit.serve(peer, |slot| {
                        slots.push(slot);
                        std::future::pending()
                    });
                };
            connect(&mut limit, &mut slots, 1);
            connect(&mut limit, &mut slots, 2);
            slots[1].admit();
            for _ in 0..100 {
                connect(&mut limit, &mut slots, 2);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(!slots[0].is_finished() && !slots[1].is_finished());
            assert_eq!(
                slots.iter().filter(|slot| !slot.is_finished()).count(),
                4 + 1
            );
        });
    }

    /// Does every connection end: a stranger's after its deadline, an admitted one after both, a closed one at once?
    #[test]
    fn every_connection_ends_by_its_deadline_or_when_closed() {
        served(async {
            let ms = Duration::from_millis;
            let mut limit = ConnectionLimit::new(
                4,
                Deadlines {
                    unadmitted_lifetime: ms(50),
                    admitted: ms(400),
                },
            );
            let mut slots = Vec::new();
            for peer in 0..3 {
                limit.serve(peer, |slot| {
                    slots.push(slot);
                    std::future::pending()
                });
            }
            slots[1].admit();
            slots[2].admit();
            slots[2].close();
            tokio::time::sleep(ms(200)).await;
            assert_eq!(
                [0, 1, 2].map(|index: usize| slots[index].is_finished()),
                [true, false, true]
            );
            tokio::time::sleep(ms(600)).await;
            assert!(slots[1].is_finished());
        });
    }
}
