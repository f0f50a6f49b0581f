//! The dashboard of a running daemon: the page of a recording, fed by server-sent events.
//!
//! Users want to watch the daemon, which must not wait for any viewer, and their browsers also show
//! foreign pages that must not have access. So the loop passes each snapshot to a thread that adds
//! the charts, and drops it if that thread is behind; a second thread serves the snapshots.
//!
//! For example, a ninth viewer is refused, and one of the eight who accepts nothing for ten seconds
//! is disconnected; meanwhile the daemon decides as if nobody watched. Whoever connects later gets
//! up to 900 windows, or 8 MiB of them.
//!
//! A client without a token gets the empty page and nothing else. A foreign page can neither use
//! this host's name (`Host`) nor send requests from a browser (`Origin`, `Sec-Fetch-Site`). The
//! server is read-only.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use cachemate_core::{Profiles, RunHeader};
use http_body_util::{Either, Full};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{AUTHORIZATION, HOST, HeaderMap, HeaderValue, ORIGIN};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, watch};

use super::connection_limit::{
    ConnectionLimit, ConnectionSlot, Deadlines, accept, serve_in_own_thread,
};
use super::{is_this_host, single_request_server};
use crate::file::embed_json;
use crate::{
    CurveSnapshot, MatrixSnapshot, POLICY_HEADER, PageCharts, Snapshot, content_policy,
    page_header, page_html,
};

/// Maximum number of viewers at the same time.
const MAX_VIEWERS: usize = 8;
/// Maximum number of connections without a token; beyond it, the peer that has the most loses its oldest connection.
const MAX_CONNECTIONS: usize = 32;
/// Maximum lifetimes of a connection, whatever its peer reads or sends. A viewer reconnects automatically, and sends
/// the number of the last window that it received.
pub const DEADLINES: Deadlines = Deadlines {
    unadmitted_lifetime: Duration::from_secs(15),
    admitted: Duration::from_secs(60),
};
/// Time after which a viewer whose connection has ended reconnects.
const RETRY_MS: u32 = 200;
/// Once the kernel's buffers are full, a viewer that reads nothing for this long is disconnected.
const MAX_SEND_TIME: Duration = Duration::from_secs(10);
/// Size of the kernel's send buffer of a connection; small, so that a viewer that does not read is noticed.
const SEND_BUFFER_BYTES: usize = 64 << 10;
/// Time without a window after which a comment is sent, to detect disconnected viewers.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);
/// Number of windows buffered for viewers that connect later.
const MAX_BUFFERED_WINDOWS: usize = 900;
const MAX_BUFFERED_BYTES: usize = 8 << 20;
/// Maximum number of snapshots that wait for the page's thread; further ones are dropped.
const MAX_QUEUED_SNAPSHOTS: usize = 4;

/// The reason why the page cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("{address}: cannot show the page: {what}")]
pub struct ServeError {
    address: String,
    what: String,
    is_taken: bool,
}

impl ServeError {
    /// Whether another process listens at the address, so that the same call can succeed later.
    pub fn is_taken(&self) -> bool {
        self.is_taken
    }
}

/// Address of the dashboard, from the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageAddress {
    /// `127.0.0.1:PORT`, or the path of a socket.
    pub address: String,
    /// Whether a token is required. Without a token, every user of this host may view the page at a port, but only the
    /// owner can open a socket.
    pub requires_token: bool,
}

/// The sender with which the loop passes snapshots to the page; it never blocks.
pub struct PageFeed {
    snapshot_sender: SyncSender<(Snapshot, Profiles)>,
    /// The address, for display.
    pub address: String,
}

impl PageFeed {
    /// Passes on the snapshot of one iteration, or drops it if the page's thread is behind.
    pub fn push(&self, snapshot: Snapshot, profiles: &Profiles) {
        match self.snapshot_sender.try_send((snapshot, profiles.clone())) {
            // The loop ignores a page that has ended or is behind.
            Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
        }
    }
}

/// One window in the form sent to viewers, with the curves and matrix that remain valid after it.
struct BufferedWindow {
    window: u64,
    event: Bytes,
    curves: Vec<CurveSnapshot>,
    matrix: Option<MatrixSnapshot>,
    programs: Vec<u32>,
}

/// Data buffered for viewers.
#[derive(Default)]
struct PageBuffer {
    run: String,
    head: Bytes,
    windows: VecDeque<BufferedWindow>,
    event_bytes: usize,
    /// Curves and matrix of windows that have left the buffer.
    curves: BTreeMap<u32, CurveSnapshot>,
    matrix: Option<MatrixSnapshot>,
}

impl PageBuffer {
    fn push(&mut self, snapshot: Snapshot) -> serde_json::Result<()> {
        let data = embed_json(&snapshot)?;
        let event = Bytes::from(format!(
            "id: {}:{}\nevent: window\ndata: {data}\n\n",
            self.run, snapshot.window
        ));
        self.event_bytes += event.len();
        self.windows.push_back(BufferedWindow {
            window: snapshot.window,
            event,
            programs: snapshot
                .programs
                .iter()
                .map(|program| program.program)
                .collect(),
            curves: snapshot.curves,
            matrix: snapshot.matrix,
        });

        while self.windows.len() > MAX_BUFFERED_WINDOWS
            || (self.event_bytes > MAX_BUFFERED_BYTES && self.windows.len() > 1)
        {
            let Some(oldest_window) = self.windows.pop_front() else {
                break;
            };
            self.event_bytes -= oldest_window.event.len();
            self.curves.extend(
                oldest_window
                    .curves
                    .into_iter()
                    .map(|curve| (curve.program, curve)),
            );
            self.curves
                .retain(|program, _| oldest_window.programs.contains(program));
            self.matrix = oldest_window.matrix.or(self.matrix.take());
        }
        Ok(())
    }

    /// The first events for a viewer; a viewer that has windows of this run up to `last_seen` gets only those after it.
    fn first_events(&self, last_seen: Option<u64>) -> serde_json::Result<Vec<Bytes>> {
        let mut events = vec![self.head.clone()];
        if last_seen.is_none() {
            let so_far = serde_json::json!({
                "window": self.windows.front().map_or(0, |first| first.window.saturating_sub(1)),
                "curves": self.curves.values().collect::<Vec<_>>(),
                "matrix": self.matrix,
            });
            events.push(Bytes::from(format!("event: so-far\ndata: {so_far}\n\n")));
        }
        events.extend(self.events_after(last_seen).1);
        Ok(events)
    }

    /// All that are buffered if `last_seen` is `None` or too old.
    fn events_after(&self, last_seen: Option<u64>) -> (Option<u64>, Vec<Bytes>) {
        let new_windows = self
            .windows
            .iter()
            .filter(|stored| last_seen.is_none_or(|last| stored.window > last));
        (
            self.windows
                .back()
                .map(|stored| stored.window)
                .or(last_seen),
            new_windows.map(|stored| stored.event.clone()).collect(),
        )
    }
}

/// The state from which requests are answered.
struct PageServer {
    buffer: Mutex<PageBuffer>,
    /// Number of windows so far, which wakes the viewers' streams.
    window_count: watch::Sender<u64>,
    page: Bytes,
    policy_value: HeaderValue,
    token: Option<String>,
    viewer_count: AtomicUsize,
}

impl PageServer {
    fn lock_buffer(&self) -> MutexGuard<'_, PageBuffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves the page in separate threads that end with the process.
///
/// # Errors
/// The address is taken, or is not a loopback address, or the socket cannot be created.
pub fn serve(page_address: &PageAddress, header: &RunHeader) -> Result<PageFeed, ServeError> {
    serve_within(page_address, header, DEADLINES)
}

/// Serves the page as [`serve`] does, but with other lifetimes of connections.
pub fn serve_within(
    page_address: &PageAddress,
    header: &RunHeader,
    deadlines: Deadlines,
) -> Result<PageFeed, ServeError> {
    serve_at(page_address, header, deadlines).map_err(|error| ServeError {
        address: page_address.address.clone(),
        is_taken: error.kind() == io::ErrorKind::AddrInUse,
        what: error.to_string(),
    })
}

fn serve_at(
    page_address: &PageAddress,
    header: &RunHeader,
    deadlines: Deadlines,
) -> io::Result<PageFeed> {
    let is_path = page_address.address.contains('/');
    let token = if page_address.requires_token && !is_path {
        Some(random_text()?)
    } else {
        None
    };

    let mut charts = PageCharts::new(header);
    let run = random_text()?;
    let mut head = page_header(header, "live");
    head.run.clone_from(&run);
    let head = Bytes::from(format!(
        "retry: {RETRY_MS}\nevent: head\ndata: {}\n\n",
        embed_json(&head)?
    ));
    let listener = if is_path {
        BoundListener::bind_path(&page_address.address)?
    } else {
        BoundListener::bind_address(&page_address.address)?
    };

    let server = Arc::new(PageServer {
        buffer: Mutex::new(PageBuffer {
            run,
            head,
            ..PageBuffer::default()
        }),
        window_count: watch::Sender::new(0),
        page: Bytes::from(page_html(None)?),
        policy_value: HeaderValue::from_str(&content_policy()).map_err(io::Error::other)?,
        token: token.clone(),
        viewer_count: AtomicUsize::new(0),
    });

    let display_address = match (&listener, &token) {
        (BoundListener::Path(_), _) => format!("socket {}", page_address.address),
        (BoundListener::Tcp(_, address), Some(token)) => format!("http://{address}/#token={token}"),
        (BoundListener::Tcp(_, address), None) => format!("http://{address}/"),
    };
    let (snapshot_sender, snapshot_receiver) =
        sync_channel::<(Snapshot, Profiles)>(MAX_QUEUED_SNAPSHOTS);
    let page_server = Arc::clone(&server);
    std::thread::Builder::new()
        .name("cachemate-page".into())
        .spawn(move || {
            for (mut snapshot, profiles) in snapshot_receiver {
                let window = snapshot.window;
                charts.complete(&mut snapshot, &profiles);
                // A window with a number that JSON cannot represent is left out.
                if page_server.lock_buffer().push(snapshot).is_ok() {
                    page_server.window_count.send_replace(window + 1);
                }
            }
        })?;
    serve_in_own_thread("cachemate-http", || listener.listen(server, deadlines))?;
    Ok(PageFeed {
        snapshot_sender,
        address: display_address,
    })
}

/// 128 random bits as text.
fn random_text() -> io::Result<String> {
    let mut bytes = [0u8; 16];
    let mut filled_bytes = 0;
    while filled_bytes < bytes.len() {
        filled_bytes += rustix::rand::getrandom(
            &mut bytes[filled_bytes..],
            rustix::rand::GetRandomFlags::empty(),
        )?;
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

enum BoundListener {
    Tcp(TcpListener, SocketAddr),
    Path(std::os::unix::net::UnixListener),
}

impl BoundListener {
    fn bind_address(address: &str) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let local_address = listener.local_addr()?;
        if !local_address.ip().is_loopback() {
            let message = format!(
                "found {}, expected a loopback address such as 127.0.0.1:9754, or a path",
                local_address.ip()
            );
            return Err(io::Error::other(message));
        }
        listener.set_nonblocking(true)?;
        Ok(BoundListener::Tcp(listener, local_address))
    }

    /// Binds a socket that only its owner may open; a stale socket is replaced.
    fn bind_path(path: &str) -> io::Result<Self> {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                "another process serves it",
            ));
        }
        let is_socket = |metadata: std::fs::Metadata| {
            std::os::unix::fs::FileTypeExt::is_socket(&metadata.file_type())
        };
        if std::fs::symlink_metadata(path).is_ok_and(is_socket) {
            std::fs::remove_file(path)?;
        }
        let listener = std::os::unix::net::UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(BoundListener::Path(listener))
    }

    /// Listens, and returns the service; must be called within a runtime.
    fn listen(
        self,
        server: Arc<PageServer>,
        deadlines: Deadlines,
    ) -> io::Result<Pin<Box<dyn Future<Output = ()> + Send>>> {
        Ok(match self {
            BoundListener::Tcp(listener, _) => {
                let listener = tokio::net::TcpListener::from_std(listener)?;
                Box::pin(async move {
                    let mut connection_limit = ConnectionLimit::new(MAX_CONNECTIONS, deadlines);
                    loop {
                        let Some((stream, peer)) = accept(listener.accept().await).await else {
                            continue;
                        };
                        shrink_buffer(&stream);
                        connection_limit.serve(peer.ip(), |slot| {
                            serve_connection(stream, slot, Arc::clone(&server))
                        });
                    }
                })
            }
            BoundListener::Path(listener) => {
                let listener = tokio::net::UnixListener::from_std(listener)?;

                Box::pin(async move {
                    let mut connection_limit = ConnectionLimit::new(MAX_CONNECTIONS, deadlines);
                    loop {
                        let Some((stream, _)) = accept(listener.accept().await).await else {
                            continue;
                        };
                        let Ok(user) = stream.peer_cred().map(|peer| peer.uid()) else {
                            continue;
                        };
                        shrink_buffer(&stream);
                        connection_limit.serve(user, |slot| {
                            serve_connection(stream, slot, Arc::clone(&server))
                        });
                    }
                })
            }
        })
    }
}

/// Shrinks the send buffer. If the kernel refuses, a viewer that does not read is noticed later.
fn shrink_buffer(stream: &impl std::os::fd::AsFd) {
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(stream, SEND_BUFFER_BYTES);
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    slot: ConnectionSlot,
    server: Arc<PageServer>,
) {
    let service = service_fn(|request| {
        std::future::ready(Ok::<_, Infallible>(respond(&request, &slot, &server)))
    });
    // A peer that sends an invalid request, or disconnects, needs no response.
    let _ = single_request_server()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

type PageResponse = Response<Either<Full<Bytes>, Events>>;

fn build_response(
    status: StatusCode,
    content_type: &'static str,
    text: impl Into<Bytes>,
) -> PageResponse {
    let mut response = Response::new(Either::Left(Full::new(text.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(
        hyper::header::CONTENT_TYPE,
        HeaderValue::from_static(content_type),
    );
    response
}

fn build_refusal(status: StatusCode, text: &str) -> PageResponse {
    build_response(status, "text/plain; charset=utf-8", format!("{text}\n"))
}

fn respond(
    request: &Request<Incoming>,
    slot: &ConnectionSlot,
    server: &Arc<PageServer>,
) -> PageResponse {
    let mut response = route(request, slot, server);
    let fixed_headers = [
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-store"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cross-origin-opener-policy", "same-origin"),
        ("x-frame-options", "DENY"),
    ];
    for (name, value) in fixed_headers {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }

    response
        .headers_mut()
        .insert(POLICY_HEADER, server.policy_value.clone());
    response
}

fn route(
    request: &Request<Incoming>,
    slot: &ConnectionSlot,
    server: &Arc<PageServer>,
) -> PageResponse {
    let headers = request.headers();
    let header_text = |name| {
        headers
            .get(name)
            .and_then(|value: &HeaderValue| value.to_str().ok())
    };
    let Some(host) = header_text(HOST.as_str()).filter(|host| is_this_host(host)) else {
        return build_refusal(
            StatusCode::MISDIRECTED_REQUEST,
            "Host: expected localhost or a loopback address",
        );
    };
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return build_refusal(
            StatusCode::METHOD_NOT_ALLOWED,
            "the page can be read, by GET and HEAD",
        );
    }
    let (path_secret, path_name) = secret_and_name(request.uri().path());
    match path_name {
        "/" if path_secret.is_none() => {
            return build_response(
                StatusCode::OK,
                "text/html; charset=utf-8",
                server.page.clone(),
            );
        }
        "/events" | "/enter" => {}
        _ => return build_refusal(StatusCode::NOT_FOUND, "nothing is here; the page is at /"),
    }
    let is_own_origin = headers
        .get(ORIGIN)
        .is_none_or(|origin| origin.as_bytes() == format!("http://{host}").as_bytes());
    let is_same_site =
        header_text("sec-fetch-site").is_none_or(|site| matches!(site, "same-origin" | "none"));
    if !is_own_origin || !is_same_site {
        return build_refusal(StatusCode::FORBIDDEN, "the request comes from another page");
    }
    if !is_authorized(headers, path_secret, server) {
        return build_refusal(
            StatusCode::UNAUTHORIZED,
            "expected the token that was printed at the start",
        );
    }
    if path_name == "/events" {
        let last_event_id = header_text("last-event-id").map(str::to_string);
        return stream_events(server, slot, last_event_id.as_deref());
    }
    build_response(StatusCode::OK, "text/plain; charset=utf-8", "look\n")
}

/// Splits `/TOKEN/events` into the token and `/events`. The token is in the path, because a browser sends a path only
/// to this port but a cookie to every port of this host.
fn secret_and_name(path: &str) -> (Option<&str>, &str) {
    match path.get(1..).and_then(|path_rest| path_rest.find('/')) {
        Some(end) => (Some(&path[1..=end]), &path[end + 1..]),
        None => (None, path),
    }
}

/// Whether a request contains the token, in the header or in the path.
fn is_authorized(headers: &HeaderMap, path_secret: Option<&str>, server: &PageServer) -> bool {
    let Some(token) = &server.token else {
        return true;
    };
    let bearer = headers
        .get(AUTHORIZATION)
        .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    let mut secrets = bearer.into_iter().chain(path_secret.map(str::as_bytes));
    secrets.any(|secret| constant_time_eq(secret, token.as_bytes()))
}

/// Compares two secrets in a time that does not depend on the position of the first difference.
pub fn constant_time_eq(secret: &[u8], token: &[u8]) -> bool {
    secret.len() == token.len()
        && secret
            .iter()
            .zip(token)
            .fold(0, |differs, (a, b)| differs | (a ^ b))
            == 0
}

/// A stream of events as the body of a response; a viewer keeps its slot while the stream lasts.
struct Events {
    events: mpsc::Receiver<Bytes>,
    server: Arc<PageServer>,
}

impl Drop for Events {
    fn drop(&mut self) {
        self.server.viewer_count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.events
            .poll_recv(context)
            .map(|event| event.map(|bytes| Ok(Frame::data(bytes))))
    }
}

fn stream_events(
    server: &Arc<PageServer>,
    slot: &ConnectionSlot,
    last_id: Option<&str>,
) -> PageResponse {
    if server.viewer_count.fetch_add(1, Ordering::Relaxed) >= MAX_VIEWERS {
        server.viewer_count.fetch_sub(1, Ordering::Relaxed);
        return build_refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            "the limit on viewers is reached",
        );
    }
    let (event_sender, event_receiver) = mpsc::channel(4);
    let stream = Events {
        events: event_receiver,
        server: Arc::clone(server),
    };
    // Only viewers are admitted, so the limit on viewers also limits admitted connections.
    slot.admit();
    let last_window = last_id
        .and_then(|id| id.split_once(':'))
        .filter(|(run, _)| *run == server.lock_buffer().run);
    let last_window = last_window.and_then(|(_, window)| window.parse().ok());
    let (send_task, slot) = (
        stream_to_viewer(Arc::clone(server), event_sender, last_window),
        slot.clone(),
    );
    tokio::spawn(async move {
        if send_task.await == ViewerEnd::Stalled {
            // The connection would otherwise wait for a viewer that does not read, although the sender has ended.
            slot.close();
        }
    });
    let mut response = Response::new(Either::Right(stream));
    let content_type = HeaderValue::from_static("text/event-stream; charset=utf-8");
    response
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, content_type);
    response
}

/// The reason why a stream of events ended.
#[derive(PartialEq, Eq)]
enum ViewerEnd {
    /// The viewer or the daemon closed the connection.
    Disconnected,
    /// The viewer stopped reading.
    Stalled,
}

/// Sends one viewer every window, until it disconnects or stalls.
async fn stream_to_viewer(
    server: Arc<PageServer>,
    sender: mpsc::Sender<Bytes>,
    mut last_seen: Option<u64>,
) -> ViewerEnd {
    let mut window_updates = server.window_count.subscribe();
    window_updates.mark_unchanged();
    let (mut events, last_sent) = {
        let buffer = server.lock_buffer();
        let Ok(first_events) = buffer.first_events(last_seen) else {
            return ViewerEnd::Disconnected;
        };
        (first_events, buffer.events_after(last_seen).0)
    };
    last_seen = last_sent;

    loop {
        for event in events.drain(..) {
            match tokio::time::timeout(MAX_SEND_TIME, sender.send(event)).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return ViewerEnd::Disconnected,
                Err(_) => return ViewerEnd::Stalled,
            }
        }

        match tokio::time::timeout(HEARTBEAT_INTERVAL, window_updates.changed()).await {
            Ok(Ok(())) => (last_seen, events) = server.lock_buffer().events_after(last_seen),
            Ok(Err(_)) => return ViewerEnd::Disconnected,
            Err(_) => events = vec![Bytes::from_static(b":\n\n")],
        }
    }
}
