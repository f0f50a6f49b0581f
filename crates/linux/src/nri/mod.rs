//! A plugin of the container runtime's node resource interface (NRI): pods, containers and their names as the runtime has
//! them, before a container's first instruction.
//!
//! Problem: a control group names a container by an id, and no file of the host has the pod's name, namespace and labels.
//! Method: the plugin registers at the runtime's socket, is told all pods and containers at once and each later change,
//! and keeps the [`ServiceDirectory`]. It answers every request at once from a thread of its own, whatever the daemon
//! does, so that no pod waits for it; it changes no container at its creation, because two plugins that set the same field
//! make the creation fail. Properties: if the runtime restarts or throws the plugin out, the socket ends and the plugin
//! registers anew; foreign bytes end the connection with an error and never the daemon. Source: nri `pkg/api/api.proto`
//! 0.12.

mod plugin;
pub mod wire;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use plugin::NriPlugin;
use wire::{MessageBuilder, MessageReader, REQUEST, RESPONSE, RUNTIME_CONNECTION, WireMessage};

use crate::sense::service_directory::ServiceDirectory;

/// The runtime's socket if none is named.
pub const SOCKET: &str = "/var/run/nri/nri.sock";
/// The plugin's name at the runtime.
const PLUGIN_NAME: &str = "cachemate";
/// Service of the runtime that plugins call.
const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The longest wait for bytes, after which the thread looks whether it is to end.
const POLL: Duration = Duration::from_millis(200);
/// Shortest and longest time between two registrations.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// A registration that lasted this long counts as a success: the next one is tried at once.
const STABLE: Duration = Duration::from_secs(10);
/// A write that the runtime does not read for this long ends the connection.
const WRITE_PATIENCE: Duration = Duration::from_secs(2);

/// Options of the plugin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NriOptions {
    /// The runtime's socket.
    pub socket: PathBuf,
    /// Position among the runtime's plugins, from 0 to 99.
    pub index: u8,
}

/// State of the connection, for the status.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NriState {
    /// The runtime and its version; `None` = not registered.
    pub runtime: Option<String>,
    /// Registrations so far.
    pub registrations: u64,
    /// Requests that were answered.
    pub requests: u64,
    /// The longest time from a request to its answer.
    pub max_answer_ns: u64,
    /// Why the last connection ended, or none could be made.
    pub error: Option<String>,
}

/// The plugin's thread.
#[derive(Debug)]
pub struct NriThread {
    state: Arc<Mutex<NriState>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl NriThread {
    /// Starts the plugin. It wakes the daemon by `wake` when a container starts.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(options: NriOptions, directory: ServiceDirectory, wake: Arc<AtomicBool>) -> std::io::Result<Self> {
        let (state, stop) = (Arc::new(Mutex::new(NriState::default())), Arc::new(AtomicBool::new(false)));
        let session = NriSession { options, state: state.clone(), stop: stop.clone(), wake };
        let thread = std::thread::Builder::new().name("cachemate-nri".into()).spawn(move || session.run(&directory))?;
        Ok(NriThread { state, stop, thread: Some(thread) })
    }

    /// The state now.
    pub fn state(&self) -> NriState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
    wake: Arc<AtomicBool>,
}

impl NriSession {
    fn run(&self, directory: &ServiceDirectory) {
        let mut patience = RETRY[0];
        while !self.has_ended() {
            let start = std::time::Instant::now();
            let ended = self.connect(directory);
            self.update(|state| {
                state.runtime = None;
                state.error = ended.err();
            });
            patience = if start.elapsed() >= STABLE { RETRY[0] } else { (patience * 2).min(RETRY[1]) };
            let until = std::time::Instant::now() + patience;
            while !self.has_ended() && std::time::Instant::now() < until {
                std::thread::sleep(POLL);
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn update(&self, change: impl FnOnce(&mut NriState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// One connection from registration to its end.
    fn connect(&self, directory: &ServiceDirectory) -> Result<(), String> {
        let place = self.options.socket.display();
        let mut socket = UnixStream::connect(&self.options.socket).map_err(|error| format!("{place}: {error}"))?;
        let set = socket.set_read_timeout(Some(POLL)).and_then(|()| socket.set_write_timeout(Some(WRITE_PATIENCE)));
        set.map_err(|error| format!("{place}: {error}"))?;
        let failed = |error: std::io::Error| format!("{place}: {error}");
        let payload = MessageBuilder::default()
            .bytes(1, PLUGIN_NAME.as_bytes())
            .bytes(2, format!("{:02}", self.options.index).as_bytes())
            .build();
        let body = MessageBuilder::default()
            .bytes(1, RUNTIME_SERVICE.as_bytes())
            .bytes(2, b"RegisterPlugin")
            .bytes(3, &payload)
            .build();
        let register = WireMessage { connection: RUNTIME_CONNECTION, stream: 1, kind: REQUEST, body };
        socket.write_all(&register.encode()).map_err(failed)?;
        let (mut plugin, mut reader) = (NriPlugin::new(directory.clone()), MessageReader::default());
        let mut bytes = vec![0; 64 << 10];
        while !self.has_ended() {
            let count = match socket.read(&mut bytes) {
                Ok(0) => return Err(format!("{place}: the runtime closed the connection")),
                Ok(count) => count,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                    return Err(format!("{place}: the runtime closed the connection"));
                }
                Err(error) => return Err(failed(error)),
            };
            let start = std::time::Instant::now();
            let messages = reader.push(bytes.get(..count).unwrap_or_default()).map_err(|error| error.to_string())?;
            for message in messages {
                let is_request = message.kind == REQUEST;
                if let Some(answer) = plugin.handle(&message).map_err(|error| error.to_string())? {
                    let answer = WireMessage { kind: RESPONSE, body: answer, ..message };
                    socket.write_all(&answer.encode()).map_err(failed)?;
                }
                self.update(|state| {
                    state.runtime = plugin.runtime().map(str::to_string);
                    state.registrations += u64::from(plugin.take_registration());
                    state.requests += u64::from(is_request);
                    state.max_answer_ns = state.max_answer_ns.max(start.elapsed().as_nanos() as u64);
                });
                if plugin.take_start() {
                    self.wake.store(true, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
