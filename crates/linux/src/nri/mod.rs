//! A plugin of the container runtime's node resource interface (NRI): it reports pods,
//! containers and their names before a container's first instruction.
//!
//! Problem: a control group identifies a container by an id, and no file of the host contains the pod's name,
//! namespace and labels. Method: the plugin registers at the runtime's socket, receives all pods and containers and
//! then each change, and updates the [`ServiceDirectory`]. A separate thread answers every request immediately, so
//! that no pod waits for the daemon; while the daemon is idle, it places starting containers ([`ContainerStarts`]).
//! The plugin changes no container at its creation, because two plugins that set the same field make the creation
//! fail; the daemon requests changes later ([`ContainerUpdates`]). Properties: if the runtime restarts or disconnects
//! the plugin, the plugin registers again; malformed bytes end the connection with an error and never the daemon.
//! Source: nri `pkg/api/api.proto` 0.12.

mod plugin;
mod starts;
mod updates;
pub mod wire;

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub use plugin::NriPlugin;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
pub use starts::{ContainerStarts, StartRequest};
pub use updates::ContainerUpdates;
use wire::{MessageBuilder, MessageReader, REQUEST, RESPONSE, RUNTIME_CONNECTION, WireMessage};

use crate::kernel::lock;
use crate::sense::service_directory::ServiceDirectory;

/// The runtime's default socket.
pub const SOCKET: &str = "/var/run/nri/nri.sock";
/// Name under which the plugin registers.
const PLUGIN_NAME: &str = "cachemate";
/// Service of the runtime that plugins call.
const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// Maximum wait for bytes, after which the thread checks whether it must end.
const POLL_PERIOD: Duration = Duration::from_millis(200);
/// Shortest and longest time between two registrations.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// Duration of a connection that counts as a success, after which the next attempt has the shortest delay.
const MIN_STABLE_TIME: Duration = Duration::from_secs(10);
/// Maximum wait for the daemon before a container starts, so that answers take at most 5 ms.
const MAX_START_WAIT: Duration = Duration::from_millis(3);
/// Time after which a write that the runtime does not read ends the connection.
const MAX_WRITE_WAIT: Duration = Duration::from_secs(2);

/// Options of the plugin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NriOptions {
    /// The runtime's socket.
    pub socket: PathBuf,
    /// Position among the runtime's plugins, from 0 to 99.
    pub index: u8,
}

/// State of the connection, for the status.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NriState {
    /// The runtime and its version; `None` if the plugin is not registered.
    pub runtime: Option<String>,
    /// Registrations so far.
    pub registrations: u64,
    /// Requests that were answered.
    pub requests: u64,
    /// The longest time from a request to its answer.
    pub max_answer_ns: u64,
    /// Containers that started.
    #[serde(default)]
    pub starts: u64,
    /// Started containers that were placed before their first instruction, because their service had run before.
    #[serde(default)]
    pub placed_starts: u64,
    /// The reason why the last connection ended or could not be made.
    pub error: Option<String>,
}

/// Everything that the plugin shares with the daemon.
#[derive(Clone, Debug)]
pub struct NriChannels {
    /// The containers of this host.
    pub directory: ServiceDirectory,
    /// Containers that wait for their placement.
    pub starts: ContainerStarts,
    /// Requests of the daemon.
    pub updates: ContainerUpdates,
    /// Ends the daemon's window when a container has started.
    pub wake: Arc<AtomicBool>,
}

/// The plugin's thread.
#[derive(Debug)]
pub struct NriThread {
    state: Arc<Mutex<NriState>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl NriThread {
    /// Starts the plugin.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(options: NriOptions, channels: NriChannels) -> std::io::Result<Self> {
        let (state, stop) = (
            Arc::new(Mutex::new(NriState::default())),
            Arc::new(AtomicBool::new(false)),
        );
        let session = NriSession {
            options,
            state: state.clone(),
            stop: stop.clone(),
            channels,
        };
        let thread = std::thread::Builder::new()
            .name("cachemate-nri".into())
            .spawn(move || session.run())?;
        Ok(NriThread {
            state,
            stop,
            thread: Some(thread),
        })
    }

    /// The state now.
    pub fn state(&self) -> NriState {
        lock(&self.state).clone()
    }
}

impl Drop for NriThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

struct NriSession {
    options: NriOptions,
    state: Arc<Mutex<NriState>>,
    stop: Arc<AtomicBool>,
    channels: NriChannels,
}

impl NriSession {
    fn run(&self) {
        let mut retry_delay = RETRY_DELAYS[0];
        while !self.is_stopping() {
            let start = Instant::now();
            let outcome = self.run_connection();
            self.channels.updates.set_connected(false);
            self.update_state(|state| {
                state.runtime = None;
                state.error = outcome.err();
            });
            if start.elapsed() >= MIN_STABLE_TIME {
                retry_delay = RETRY_DELAYS[0];
            }
            let deadline = Instant::now() + retry_delay;
            retry_delay = (retry_delay * 2).min(RETRY_DELAYS[1]);
            while !self.is_stopping() && Instant::now() < deadline {
                std::thread::sleep(POLL_PERIOD);
            }
        }
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn update_state(&self, change: impl FnOnce(&mut NriState)) {
        change(&mut lock(&self.state));
    }

    /// Runs one connection, from the registration until the connection ends.
    fn run_connection(&self) -> Result<(), String> {
        let socket_path = self.options.socket.display();
        let connect_error = |error: std::io::Error| format!("{socket_path}: {error}");
        let mut socket = UnixStream::connect(&self.options.socket).map_err(connect_error)?;
        let timeout_result = socket
            .set_read_timeout(Some(POLL_PERIOD))
            .and_then(|()| socket.set_write_timeout(Some(MAX_WRITE_WAIT)));
        timeout_result.map_err(connect_error)?;
        let payload = MessageBuilder::default()
            .with_bytes(1, PLUGIN_NAME.as_bytes())
            .with_bytes(2, format!("{:02}", self.options.index).as_bytes())
            .build();
        socket
            .write_all(&runtime_call(1, "RegisterPlugin", &payload))
            .map_err(connect_error)?;
        let (mut plugin, mut reader) = (
            NriPlugin::new(self.channels.directory.clone()),
            MessageReader::default(),
        );
        let mut pending_calls: BTreeMap<u32, SyncSender<Result<(), String>>> = BTreeMap::new();
        let (mut bytes, mut call_number) = (vec![0; 64 << 10], 1);
        while !self.is_stopping() {
            let (has_bytes, has_update) = self.wait_for_input(&socket).map_err(connect_error)?;
            if has_update {
                for request in self.channels.updates.take_requests() {
                    call_number += 2; // a client's calls have odd numbers
                    let call = runtime_call(call_number, "UpdateContainers", &request.payload());
                    socket.write_all(&call).map_err(connect_error)?;
                    pending_calls.insert(call_number, request.outcome_sender);
                }
            }
            if !has_bytes {
                continue;
            }
            let count = match socket.read(&mut bytes) {
                Ok(0) => return Err(format!("{socket_path}: the runtime closed the connection")),
                Ok(count) => count,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                    return Err(format!("{socket_path}: the runtime closed the connection"));
                }
                Err(error) => return Err(connect_error(error)),
            };
            let messages = reader
                .push(bytes.get(..count).unwrap_or_default())
                .map_err(|error| error.to_string())?;
            for message in messages {
                match pending_calls
                    .remove(&message.stream)
                    .filter(|_| message.kind == RESPONSE)
                {
                    // A caller that has stopped waiting needs no answer.
                    Some(call) => {
                        _ = call.try_send(
                            updates::check_update_response(&message.body)
                                .map_err(|error| error.to_string()),
                        )
                    }
                    None => self.answer_message(&mut socket, &mut plugin, message)?,
                }
            }
        }
        Ok(())
    }

    /// Waits for bytes from the runtime and for requests to it. Returns, for each of the two, whether any are waiting.
    fn wait_for_input(&self, socket: &UnixStream) -> std::io::Result<(bool, bool)> {
        let wakeup_fd = self.channels.updates.wakeup_fd();
        let mut poll_fds = [
            PollFd::new(socket, PollFlags::IN),
            PollFd::from_borrowed_fd(wakeup_fd, PollFlags::IN),
        ];
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(POLL_PERIOD.subsec_nanos()),
        };
        match poll(&mut poll_fds, Some(&timeout)) {
            Ok(_) => Ok((
                !poll_fds[0].revents().is_empty(),
                !poll_fds[1].revents().is_empty(),
            )),
            Err(rustix::io::Errno::INTR) => Ok((false, false)),
            Err(error) => Err(error.into()),
        }
    }

    /// Answers one message of the runtime.
    fn answer_message(
        &self,
        socket: &mut UnixStream,
        plugin: &mut NriPlugin,
        message: WireMessage,
    ) -> Result<(), String> {
        let start = Instant::now();
        let is_request = message.kind == REQUEST;
        let response_body = plugin.handle(&message).map_err(|error| error.to_string())?;
        let container_start = plugin.take_start();
        let is_placed = container_start.as_ref().is_some_and(|(id, pid)| {
            self.channels
                .starts
                .request_placement(id, *pid, MAX_START_WAIT)
        });
        if let Some(body) = response_body {
            let response = WireMessage {
                kind: RESPONSE,
                body,
                ..message
            };
            let write_result = socket.write_all(&response.encode());
            write_result.map_err(|error| format!("{}: {error}", self.options.socket.display()))?;
        }
        let is_registered = plugin.take_registration();
        if is_registered {
            self.channels.updates.set_connected(true);
        }
        self.update_state(|state| {
            state.runtime = plugin.runtime().map(str::to_string);
            state.registrations += u64::from(is_registered);
            state.requests += u64::from(is_request);
            state.max_answer_ns = state.max_answer_ns.max(start.elapsed().as_nanos() as u64);
            state.starts += u64::from(container_start.is_some());
            state.placed_starts += u64::from(is_placed);
        });
        if container_start.is_some() {
            self.channels.wake.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// A call to the runtime, encoded for the socket.
fn runtime_call(stream: u32, method: &str, payload: &[u8]) -> Vec<u8> {
    let body = MessageBuilder::default()
        .with_bytes(1, RUNTIME_SERVICE.as_bytes())
        .with_bytes(2, method.as_bytes())
        .with_bytes(3, payload)
        .build();
    WireMessage {
        connection: RUNTIME_CONNECTION,
        stream,
        kind: REQUEST,
        body,
    }
    .encode()
}

#[cfg(test)]
mod tests;
