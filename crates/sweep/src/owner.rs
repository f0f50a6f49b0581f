//! Owners of claims, and the heartbeat by which owners show that they are alive.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cachemate_files::TrustedDir;
use rustix::fs::{OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, futimens};
use serde::{Deserialize, Serialize};

const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// A process, with an identity that is unique across all hosts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClaimOwner {
    /// The host's name; every character except letters, digits and hyphens is replaced by `_`.
    pub host: String,
    /// Boot and process namespace. If both equal those of this process, the pid denotes the same process here.
    pub place: String,
    /// Process id in that namespace.
    pub pid: u32,
    /// Start of the process in kernel ticks since boot; distinguishes processes that had the same pid.
    pub started_ticks: Option<u64>,
}

impl ClaimOwner {
    /// This process.
    pub fn this_process() -> Self {
        let read_proc_file = |path: &str| {
            cachemate_files::read_text_limited(Path::new(path), 4096)
                .map_or(String::new(), |text| text.trim().to_string())
        };
        let pid_namespace = cachemate_files::link_target(Path::new("/proc/self/ns/pid"))
            .map_or(String::new(), |link| link.display().to_string());
        let pid = std::process::id();
        let host_name = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
        let host = host_name
            .chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() || c == '-' {
                    c
                } else {
                    '_'
                }
            })
            .collect();
        let place = format!(
            "{} {pid_namespace}",
            read_proc_file("/proc/sys/kernel/random/boot_id")
        );
        ClaimOwner {
            host,
            place,
            pid,
            started_ticks: started_ticks(pid),
        }
    }

    /// Is the owner alive? `None` if `observer` cannot determine that.
    pub(crate) fn is_alive(&self, observer: &ClaimOwner) -> Option<bool> {
        let is_comparable = self.place == observer.place && !observer.place.trim().is_empty();
        is_comparable
            .then(|| started_ticks(self.pid).is_some_and(|ticks| Some(ticks) == self.started_ticks))
    }
}

impl std::fmt::Display for ClaimOwner {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "process {} on {}", self.pid, self.host)
    }
}

/// Start time of a process, from field 22 of `/proc/PID/stat`; `None` if it is dead or a zombie. The program's name,
/// in parentheses before that field, may contain any character.
pub(crate) fn started_ticks(pid: u32) -> Option<u64> {
    let stat =
        cachemate_files::read_text_limited(Path::new(&format!("/proc/{pid}/stat")), 4096).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if state == "Z" || state == "X" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Keeps this process' claims alive by touching them until it is dropped.
pub struct Heartbeat {
    dir: Arc<TrustedDir>,
    state: Arc<Mutex<HeartbeatState>>,
}

#[derive(Default)]
struct HeartbeatState {
    /// Names of the claims below the sweep's directory.
    claims: BTreeSet<String>,
    is_running: bool,
}

impl Heartbeat {
    pub(crate) fn new(dir: Arc<TrustedDir>) -> Self {
        Heartbeat {
            dir,
            state: Arc::default(),
        }
    }

    fn with_state<T>(&self, access: impl FnOnce(&mut HeartbeatState) -> T) -> T {
        access(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn hold(&self, claim: &str) {
        let is_first = self.with_state(|state| {
            state.claims.insert(claim.to_string());
            !std::mem::replace(&mut state.is_running, true)
        });
        if is_first {
            let (dir, state) = (Arc::clone(&self.dir), Arc::downgrade(&self.state));
            std::thread::spawn(move || {
                loop {
                    std::thread::sleep(HEARTBEAT_INTERVAL);
                    let Some(state) = state.upgrade() else { return };
                    let claims = state
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .claims
                        .clone();
                    claims.iter().for_each(|claim| _ = touch(&dir, claim));
                }
            });
        }
    }

    pub(crate) fn release(&self, claim: &str) {
        self.with_state(|state| state.claims.remove(claim));
    }
}

/// Sets the file's time to now, by the clock of the host that stores the file.
fn touch(dir: &TrustedDir, claim: &str) -> io::Result<()> {
    let (now, unchanged_time) = (
        Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        },
        Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
    );
    let file = dir.open_file(Path::new(claim), OFlags::WRONLY)?;
    futimens(
        &file,
        &Timestamps {
            last_access: unchanged_time,
            last_modification: now,
        },
    )
    .map_err(io::Error::from)
}
