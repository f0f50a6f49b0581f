//! The daemon's control socket: one request per connection, one JSON object back.
//!
//! Who asks is told by the kernel (`SO_PEERCRED`): root, the daemon's own user, and those that the configuration allows.
//! `reload` is for root and the daemon's own user only.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::status::Status;

/// Slow peers do not hold the socket.
const PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_REQUEST: u64 = 256;

#[derive(Serialize, Deserialize)]
struct Refusal {
    error: String,
}

/// What the socket's thread shares with the daemon.
#[derive(Clone)]
pub struct Shared {
    pub status: Arc<Mutex<Status>>,
    pub reload: Arc<AtomicBool>,
    pub wake: Arc<AtomicBool>,
    pub allow_users: Arc<Mutex<Vec<u32>>>,
}

impl Shared {
    /// A copy of the present status.
    pub fn status(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A listening socket; the file goes with it.
pub struct Server {
    path: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Listens, in a thread of its own that ends with the process. The caller holds the daemon's lock: a socket file that is
/// there was left behind.
///
/// # Errors
/// The folder cannot be made, or the socket not be bound.
pub fn serve(path: &Path, shared: Shared) -> anyhow::Result<Server> {
    let shown = path.display();
    if let Some(dir) = path.parent().filter(|dir| !dir.exists()) {
        std::fs::create_dir_all(dir).with_context(|| format!("{}: the folder cannot be made", dir.display()))?;
    }
    if UnixStream::connect(path).is_ok() {
        bail!("{shown}: another daemon answers there");
    }
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).with_context(|| format!("{shown}: cannot listen"))?;
    // Everybody may knock; who is let in is decided by the peer's credentials.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))
        .with_context(|| format!("{shown}: cannot set its mode"))?;
    std::thread::Builder::new()
        .name("cachemate-socket".into())
        .spawn(move || {
            for stream in listener.incoming().flatten() {
                // A peer that went away needs no answer.
                let _ = answer(stream, &shared);
            }
        })
        .context("cannot start the socket's thread")?;
    Ok(Server { path: path.to_path_buf() })
}

fn answer(mut stream: UnixStream, shared: &Shared) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    let (user, own) = (peer.uid.as_raw(), rustix::process::geteuid().as_raw());
    let owner = user == 0 || user == own;
    let allowed = owner || shared.allow_users.lock().unwrap_or_else(PoisonError::into_inner).contains(&user);
    let mut request = String::new();
    BufReader::new((&stream).take(LONGEST_REQUEST)).read_line(&mut request)?;
    let refuse = |error: String| serde_json::to_string(&Refusal { error });
    let text = match request.trim() {
        _ if !allowed => refuse(format!("user {user} may not ask here (allow_users in the configuration)"))?,
        "status" => serde_json::to_string(&shared.status())?,
        "reload" if owner => {
            shared.reload.store(true, Ordering::Relaxed);
            shared.wake.store(true, Ordering::Relaxed);
            "{\"reload\": true}".to_string()
        }
        "reload" => refuse(format!("user {user} may look but not change anything"))?,
        other => refuse(format!("found request '{other}', expected status or reload"))?,
    };
    stream.write_all(text.as_bytes())?;
    Ok(())
}

/// Asks a running daemon.
///
/// # Errors
/// No daemon listens there, it does not answer, or it refuses.
pub fn ask(path: &Path, request: &str) -> anyhow::Result<String> {
    let shown = path.display();
    let mut stream = UnixStream::connect(path).with_context(|| {
        format!("{shown}: no daemon answers there (cachemate manage starts one; --socket names another place)")
    })?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{request}\n").as_bytes()).with_context(|| format!("{shown}: cannot ask"))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).with_context(|| format!("{shown}: no answer"))?;
    if let Ok(refusal) = serde_json::from_str::<Refusal>(&text) {
        bail!("{shown}: {}", refusal.error);
    }
    Ok(text)
}

/// The status of a running daemon.
///
/// # Errors
/// As [`ask`], and an answer of another version.
pub fn status(path: &Path) -> anyhow::Result<Status> {
    let text = ask(path, "status")?;
    serde_json::from_str(&text).with_context(|| format!("{}: the daemon is of another version", path.display()))
}
