//! The daemon's control socket: one request per connection. `status` and `reload` get one JSON object in reply.
//!
//! `progress` comes from programs that report their work, and any user may send it: the reply carries the descriptor of
//! memory for the process that asks ([`cachemate_linux::sense::progress`]).
//!
//! The kernel identifies the client (`SO_PEERCRED`). Otherwise the socket answers root, the daemon's own user, and the
//! users that the configuration allows. Only root and the daemon's own user may request `reload`. Owners, allowed users
//! and all other users have separate sets of connections; in a full set, the user with the most of them loses the
//! oldest. Root and the daemon's user have a second socket, so that other users cannot keep them from getting an
//! answer.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use cachemate_linux::kernel::{LinuxHost, lock};
use cachemate_linux::sense::progress::ProgressReports;
use cachemate_page::serve::connection_limit::{
    ConnectionLimit, Deadlines, accept, serve_in_own_thread,
};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::paths;
use crate::status::DaemonStatus;

/// Timeout of a request and its reply.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_REQUEST_BYTES: usize = 256;
/// Maximum length of a reply: the status of ten thousand threads has a few million bytes.
const MAX_REPLY_BYTES: u64 = 16 << 20;
/// Maximum number of simultaneous connections in a set of users; allowed users together have four times as many.
const MAX_CONNECTIONS: usize = 16;

/// Flags that signals and the socket set, and the status that they show.
#[derive(Clone, Default)]
pub struct ControlFlags {
    /// If set, the daemon ends and restores the host.
    pub stop: Arc<AtomicBool>,
    /// If set, the current window ends.
    pub wake: Arc<AtomicBool>,
    /// If set, the daemon rereads the configuration.
    pub reload: Arc<AtomicBool>,
    /// The status after the last window, which the daemon writes and others read.
    pub status: Arc<Mutex<DaemonStatus>>,
}

/// State that the socket's thread shares with the daemon.
#[derive(Clone, Default)]
pub(crate) struct SharedStatus {
    /// The daemon's flags, and the status after the last window.
    pub flags: ControlFlags,
    /// Users who may query, besides root and the daemon's own user.
    pub allow_users: Arc<Mutex<Vec<u32>>>,
    /// Reports of programs, which any user's program may request.
    pub progress: ProgressReports,
}

impl SharedStatus {
    /// A copy of the current status.
    pub fn status(&self) -> DaemonStatus {
        lock(&self.flags.status).clone()
    }
}

/// A listening socket. When dropped, it removes its file.
pub(crate) struct ControlSocket {
    paths: [PathBuf; 2],
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        for path in &self.paths {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Listens in a separate thread that ends with the process. The caller holds the daemon's lock, so an existing socket
/// file is left over from an earlier run.
///
/// # Errors
/// The directory cannot be created, or the socket cannot be bound.
pub(crate) fn serve(path: &Path, shared_status: SharedStatus) -> anyhow::Result<ControlSocket> {
    let path_text = path.display();
    if let Some(dir) = path.parent() {
        paths::create_public_dir(dir)?;
    }
    if UnixStream::connect(path).is_ok() {
        bail!("{path_text}: another daemon listens there");
    }
    let _ = std::fs::remove_file(path);
    let owner_path = owner_socket_path(path);
    let _ = std::fs::remove_file(&owner_path);
    // The kernel checks the mode when a client connects, so only root and this user enter the owners' queue. Every user
    // may connect to the other socket; the peer's credentials decide about the reply.
    listen_at(&owner_path, 0o600, shared_status.clone())?;
    listen_at(path, 0o666, shared_status)?;
    Ok(ControlSocket {
        paths: [path.to_path_buf(), owner_path],
    })
}

/// The socket of root and the daemon's own user. It has its own queue in the kernel, so a flood of the public socket
/// delays no request here.
fn owner_socket_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".owner");
    path.with_file_name(name)
}

fn listen_at(path: &Path, mode: u32, shared_status: SharedStatus) -> anyhow::Result<()> {
    let path_text = path.display();
    let listener =
        UnixListener::bind(path).with_context(|| format!("{path_text}: cannot listen"))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("{path_text}: cannot set its mode"))?;
    let start_result = listener.set_nonblocking(true).and_then(|()| {
        serve_in_own_thread("cachemate-socket", || {
            Ok(listen(
                tokio::net::UnixListener::from_std(listener)?,
                shared_status,
            ))
        })
    });
    start_result.with_context(|| format!("{path_text}: the socket's thread cannot be started"))
}

/// The user at the other end of a connection.
#[derive(Clone, Copy)]
struct Peer {
    user: u32,
    /// The process that connected.
    pid: Option<i32>,
    /// Is the user root, or the daemon's own user?
    is_owner: bool,
    is_allowed: bool,
}

async fn listen(listener: tokio::net::UnixListener, shared_status: SharedStatus) {
    let own_user = rustix::process::geteuid().as_raw();
    let new_limit = |capacity| {
        ConnectionLimit::new(
            capacity,
            Deadlines {
                unadmitted_lifetime: REQUEST_TIMEOUT,
                admitted: REQUEST_TIMEOUT,
            },
        )
    };
    // Slots for root and the daemon's own user, for users that the configuration allows, and for all others.
    let (mut owner_limit, mut allowed_limit, mut other_limit) = (
        new_limit(MAX_CONNECTIONS),
        new_limit(4 * MAX_CONNECTIONS),
        new_limit(MAX_CONNECTIONS),
    );
    loop {
        let Some((stream, _)) = accept(listener.accept().await).await else {
            continue;
        };
        let Ok(credentials) = stream.peer_cred() else {
            continue;
        };
        let (user, pid) = (credentials.uid(), credentials.pid());
        let is_owner = user == 0 || user == own_user;
        let is_allowed = is_owner || lock(&shared_status.allow_users).contains(&user);
        let peer = Peer {
            user,
            pid,
            is_owner,
            is_allowed,
        };
        let limit = match (is_owner, is_allowed) {
            (true, _) => &mut owner_limit,
            (false, true) => &mut allowed_limit,
            (false, false) => &mut other_limit,
        };
        limit.serve(user, |_| {
            answer_request(stream, peer, shared_status.clone())
        });
    }
}

/// Answers a request. If the peer has disconnected, the error is ignored.
async fn answer_request(
    mut stream: tokio::net::UnixStream,
    peer: Peer,
    shared_status: SharedStatus,
) {
    let Ok(request) = read_request(&mut stream).await else {
        return;
    };
    if request == PROGRESS_REQUEST {
        let _ = send_report_memory(&stream, peer, &shared_status.progress).await;
        return;
    }
    if let Ok(reply) = render_reply(&request, peer, &shared_status) {
        let _ = stream.write_all(reply.as_bytes()).await;
    }
}

/// The request of a program for memory in which it reports its work.
const PROGRESS_REQUEST: &str = "progress";

/// Sends a byte, and with it the descriptor of the memory in which the peer's process reports.
async fn send_report_memory(
    stream: &tokio::net::UnixStream,
    peer: Peer,
    reports: &ProgressReports,
) -> io::Result<()> {
    let pid = peer.pid.filter(|&pid| pid > 0);
    let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    let memory = reports.hand_out(&LinuxHost::new("/"), pid, peer.user)?;
    stream.writable().await?;
    stream.try_io(tokio::io::Interest::WRITABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [memory.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let data = [IoSlice::new(b"\n")];
        sendmsg(stream, &data, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    })
}

/// Asks a running daemon for memory in which this process reports its work: its first eight bytes are the count.
/// Programs in other languages do the same by `cachemate-progress.h` or the Python package.
///
/// # Errors
/// No daemon listens there, or it hands out no memory.
pub fn request_report_memory(path: &Path) -> io::Result<std::fs::File> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    stream.write_all(format!("{PROGRESS_REQUEST}\n").as_bytes())?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    let mut data = [IoSliceMut::new(&mut byte)];
    recvmsg(&stream, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let messages = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptor = messages.flatten().next();
    descriptor
        .map(std::fs::File::from)
        .ok_or_else(|| io::Error::other("the daemon hands out no memory for reports"))
}

/// Reads the first line, up to the maximum length of a request.
async fn read_request(stream: &mut tokio::net::UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    let mut buffer = [0u8; MAX_REQUEST_BYTES];
    while line.len() < MAX_REQUEST_BYTES && !line.contains(&b'\n') {
        let read_len = stream
            .read(&mut buffer[..MAX_REQUEST_BYTES - line.len()])
            .await?;
        if read_len == 0 {
            break;
        }
        line.extend_from_slice(&buffer[..read_len]);
    }
    let text = String::from_utf8_lossy(&line);
    Ok(text.lines().next().unwrap_or_default().trim().to_string())
}

fn render_reply(
    request: &str,
    peer: Peer,
    shared_status: &SharedStatus,
) -> serde_json::Result<String> {
    let user = peer.user;
    let error_json = |error: String| serde_json::to_string(&BTreeMap::from([("error", error)]));
    match request {
        _ if !peer.is_allowed => error_json(format!(
            "user {user} may not ask here (allow_users in the configuration)"
        )),
        "status" => serde_json::to_string(&shared_status.status()),
        "reload" if peer.is_owner => {
            shared_status.flags.reload.store(true, Ordering::Relaxed);
            shared_status.flags.wake.store(true, Ordering::Relaxed);
            Ok("{\"reload\": true}".to_string())
        }
        "reload" => error_json(format!("user {user} may look but not change anything")),
        other => error_json(format!(
            "found request {other:?}, expected status or reload"
        )),
    }
}

/// Sends a request to a running daemon and returns the reply.
///
/// # Errors
/// No daemon listens there, it does not reply, or it refuses.
pub(crate) fn query(path: &Path, request: &str) -> anyhow::Result<String> {
    let path_text = path.display();
    let stream =
        UnixStream::connect(owner_socket_path(path)).or_else(|_| UnixStream::connect(path)).with_context(|| {
            format!("{path_text}: no daemon listens there (cachemate manage starts one; --socket names another path)")
        })?;
    exchange(stream, path, request)
}

/// Sends one request and returns the reply; `path` is the socket's name in errors.
fn exchange(mut stream: UnixStream, path: &Path, request: &str) -> anyhow::Result<String> {
    let path_text = path.display();
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    stream
        .write_all(format!("{request}\n").as_bytes())
        .with_context(|| format!("{path_text}: cannot ask"))?;
    let mut reply = String::new();
    let no_answer = || format!("{path_text}: no answer");
    let mut reader = stream.take(MAX_REPLY_BYTES + 1);
    reader.read_to_string(&mut reply).with_context(no_answer)?;
    if reply.len() as u64 > MAX_REPLY_BYTES {
        bail!("{path_text}: found an answer of more than 16 MiB, expected that of a daemon");
    }
    let texts: Option<BTreeMap<String, String>> = serde_json::from_str(&reply).ok();
    if let Some(error) = texts.as_ref().and_then(|texts| texts.get("error")) {
        bail!("{path_text}: {error}");
    }
    Ok(reply)
}

/// The status of a running daemon.
///
/// # Errors
/// The errors of [`query`], or a reply of another version.
pub fn query_status(path: &Path) -> anyhow::Result<DaemonStatus> {
    let reply = query(path, "status")?;
    serde_json::from_str(&reply)
        .with_context(|| format!("{}: the daemon is of another version", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn server_fixture() -> (tempfile::TempDir, PathBuf, ControlSocket, SharedStatus) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let shared = SharedStatus::default();
        let server = serve(&path, shared.clone()).unwrap();
        (dir, path, server, shared)
    }

    /// Beside two hundred silent connections, and some that send a byte at a time: is a request answered at once?
    #[test]
    fn idle_and_slow_peers_do_not_delay_a_request() {
        let (_dir, path, _server, _) = server_fixture();
        let mut idle: Vec<UnixStream> = (0..200)
            .map(|_| UnixStream::connect(&path).unwrap())
            .collect();
        let start = Instant::now();
        for stream in idle.iter_mut().rev().take(4) {
            stream.write_all(b"s").unwrap();
        }
        for _ in 0..5 {
            exchange(UnixStream::connect(&path).unwrap(), &path, "status").unwrap();
        }
        assert!(
            start.elapsed() < REQUEST_TIMEOUT,
            "answered within the time that one idle peer has"
        );
        let ended = idle.iter().filter(|stream| {
            let mut stream: &UnixStream = stream;
            stream.set_nonblocking(true).unwrap();
            matches!(stream.read(&mut [0]), Ok(0))
        });
        assert!(ended.count() >= 200 - MAX_CONNECTIONS, "the oldest went");
    }

    /// While threads flood the public socket with connections: are requests of root and of the daemon's user answered
    /// at once, and may no other user use their socket?
    #[test]
    fn floods_of_the_public_socket_do_not_delay_owner_requests() {
        let (_dir, path, _server, _) = server_fixture();
        let owners = owner_socket_path(&path);
        assert_eq!(
            std::fs::metadata(&owners).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut held = std::collections::VecDeque::new();
                    while !stop.load(Ordering::Relaxed) {
                        held.extend(UnixStream::connect(&path).ok());
                        held.truncate(400);
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(300));
            let waits = (0..20).map(|_| {
                let start = Instant::now();
                query_status(&path).unwrap();
                start.elapsed()
            });
            let longest = waits.max().unwrap();
            stop.store(true, Ordering::Relaxed);
            assert!(longest < REQUEST_TIMEOUT / 2, "{longest:?}");
        });
    }

    /// Is a peer that never finishes its request dropped?
    #[test]
    fn a_peer_that_never_finishes_its_request_is_dropped() {
        let (_dir, path, _server, _) = server_fixture();
        let mut slow = UnixStream::connect(&path).unwrap();
        slow.write_all(b"stat").unwrap();
        slow.set_read_timeout(Some(4 * REQUEST_TIMEOUT)).unwrap();
        assert_eq!(
            slow.read(&mut [0; 8]).unwrap(),
            0,
            "closed without an answer"
        );
    }

    /// Does a program get memory for its own reports, which the daemon reads, whoever its user is?
    #[test]
    fn a_program_reports_in_memory_that_it_asked_for() {
        use std::os::unix::fs::FileExt;
        let (_dir, path, _server, shared) = server_fixture();
        let memory = request_report_memory(&path).unwrap();
        memory.write_all_at(&42u64.to_ne_bytes(), 0).unwrap();
        let (host, pid) = (LinuxHost::new("/"), std::process::id() as i32);
        assert_eq!(shared.progress.read_total(&host, pid), Some(42));
        assert!(memory.set_len(0).is_err(), "nobody can shrink it");
    }

    /// Is an endless answer of a socket that is not a daemon's cut off?
    #[test]
    fn an_endless_answer_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(&[b'x'; 1 << 16]).is_ok() {}
        });
        let error = query(&path, "status").unwrap_err().to_string();
        assert!(error.contains("more than 16 MiB"), "{error}");
    }

    /// Do the socket's directory and files have their modes whatever the umask is?
    #[test]
    fn modes_do_not_depend_on_the_umask() {
        // The umask belongs to the process, so another one has it.
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args([
            "--ignored",
            "--exact",
            "socket::tests::part_of_a_daemon_without_umask",
        ]);
        assert!(
            command
                .env("CACHEMATE_TEST_RUN", &run)
                .status()
                .unwrap()
                .success()
        );
    }

    #[test]
    #[ignore = "run by the test above, with another umask"]
    fn part_of_a_daemon_without_umask() {
        let Some(run) = std::env::var_os("CACHEMATE_TEST_RUN").map(PathBuf::from) else {
            return;
        };
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
        for (umask, name) in [(0, "open"), (0o77, "closed")] {
            rustix::process::umask(rustix::fs::Mode::from_raw_mode(umask));
            let dir = run.join(name);
            let _server = serve(&dir.join("s.sock"), SharedStatus::default()).unwrap();
            assert_eq!(mode(&dir), 0o755);
            assert_eq!(mode(&dir.join("s.sock")), 0o666);
            assert_eq!(mode(&dir.join("s.sock.owner")), 0o600);
            let file = dir.join("metrics");
            cachemate_files::replace(&file, b"x").unwrap();
            assert_eq!(mode(&file) & 0o022, 0, "nobody else writes an output");
        }
    }

    /// Is an invalid request rejected, whatever its length and content?
    #[test]
    fn invalid_requests_are_rejected() {
        let (_dir, path, _server, shared) = server_fixture();
        assert!(
            format!("{:#}", query(&path, "\u{1b}[2Jstop").unwrap_err()).contains(r"\u{1b}[2Jstop")
        );
        assert!(query(&path, &"x".repeat(10_000)).is_err());
        assert!(!shared.flags.reload.load(Ordering::Relaxed));
        query(&path, "reload").unwrap();
        assert!(shared.flags.reload.load(Ordering::Relaxed));
    }
}
