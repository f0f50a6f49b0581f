//! The extender's HTTP server: the scheduler's two paths, health and metrics, with a limit and a deadline for each
//! request.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cachemate_daemon::OPEN_METRICS;
use cachemate_fleet::extender::{ClusterKnowledge, Extender, ExtenderRequest};
use cachemate_page::serve::connection_limit::{ConnectionLimit, Deadlines, accept};
use cachemate_page::serve::page::constant_time_eq;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::extender_metrics::ExtenderMetrics;

/// Maximum size of one request: the names of 5 000 nodes at most 200 letters long, and a pod.
const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Maximum number of requests whose bodies are in memory, over all connections.
const MAX_OPEN_BODIES: usize = 16;
/// Deadline for the body of one request, including its wait for a place among [`MAX_OPEN_BODIES`]. It is ten times the
/// `httpTimeout` of packaging/kubernetes/scheduler-config.yaml, so kube-scheduler gives up first, and only peers that
/// hold bodies back meet it.
const BODY_DEADLINE: Duration = Duration::from_secs(2);
/// Deadline for the head of the next request on a connection.
const IDLE_DEADLINE: Duration = Duration::from_secs(60);
/// Maximum number of concurrent connections, and the maximum life of a connection.
const MAX_CONNECTIONS: usize = 64;
const CONNECTION_DEADLINE: Duration = Duration::from_secs(3600);

/// A running extender.
pub struct ExtenderState {
    extender: Mutex<Extender>,
    metrics: ExtenderMetrics,
    /// What the scheduler must know; `None` if any peer may ask, and nothing that it says is recorded.
    token: Option<String>,
    open_bodies: Arc<Semaphore>,
}

impl ExtenderState {
    /// An extender that answers peers with this token only, or all peers.
    pub fn new(token: Option<String>) -> Self {
        ExtenderState {
            extender: Mutex::default(),
            metrics: ExtenderMetrics::default(),
            token,
            open_bodies: Arc::new(Semaphore::new(MAX_OPEN_BODIES)),
        }
    }

    /// Is the token of a request the extender's? The time does not depend on the place of the first difference.
    fn accepts(&self, given_token: Option<&str>) -> bool {
        let Some(token) = &self.token else {
            return true;
        };
        constant_time_eq(given_token.unwrap_or_default().as_bytes(), token.as_bytes())
    }

    /// Replaces the published knowledge.
    pub fn publish(&self, knowledge: ClusterKnowledge) {
        self.lock().publish(knowledge);
    }

    fn lock(&self) -> MutexGuard<'_, Extender> {
        self.extender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn metrics_page(&self) -> String {
        let extender = self.lock();
        self.metrics.page(
            extender.fresh_nodes(unix_seconds()),
            extender.placements_in_flight(),
        )
    }

    fn handle_request(&self, verb: &'static str, body: &[u8]) -> (StatusCode, Vec<u8>) {
        let start_time = Instant::now();
        match self.response_json(verb, body) {
            Ok(response) => {
                self.metrics
                    .record_response(verb, start_time.elapsed().as_secs_f64());
                (StatusCode::OK, response)
            }
            Err(reason) => {
                self.metrics.record_refusal();
                error_response(StatusCode::BAD_REQUEST, &reason)
            }
        }
    }

    fn response_json(&self, verb: &str, body: &[u8]) -> Result<Vec<u8>, String> {
        let request: ExtenderRequest = serde_json::from_slice(body)
            .map_err(|error| format!("{error}; expected ExtenderArgs in JSON"))?;
        let mut extender = self.lock();
        let now = unix_seconds();

        let encoded = match verb {
            "filter" => extender
                .filter(&request, now)
                .map(|answer| serde_json::to_vec(&answer)),
            // Without a token, anyone could fill a node with pods that do not exist.
            _ if self.token.is_none() => extender
                .rank(&request, now)
                .map(|answer| serde_json::to_vec(&answer)),
            _ => extender
                .prioritize(&request, now)
                .map(|answer| serde_json::to_vec(&answer)),
        };
        encoded
            .map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())
    }
}

fn error_response(status: StatusCode, text: &str) -> (StatusCode, Vec<u8>) {
    (
        status,
        format!(
            "{{\"error\":{}}}",
            serde_json::Value::String(text.to_string())
        )
        .into_bytes(),
    )
}

/// Seconds since 1970 (UTC), as in published states; 0 if the clock is set to an earlier time.
pub fn unix_seconds() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// Reads a body once fewer than the maximum number of bodies are in memory.
async fn read_body(
    body: Incoming,
    state: &ExtenderState,
) -> Result<(Bytes, OwnedSemaphorePermit), String> {
    let permit = Arc::clone(&state.open_bodies).acquire_owned().await;
    let permit = permit.map_err(|error| error.to_string())?;
    let body = Limited::new(body, MAX_REQUEST_BYTES).collect().await;
    let body = body.map_err(|error| error.to_string())?;
    Ok((body.to_bytes(), permit))
}

/// Parses and answers a request on the runtime's pool for blocking work, so that a large one delays no other
/// connection.
async fn handle_on_blocking_pool(
    state: Arc<ExtenderState>,
    verb: &'static str,
    body: Bytes,
    permit: OwnedSemaphorePermit,
) -> (StatusCode, Vec<u8>) {
    let handle = tokio::task::spawn_blocking(move || {
        let response = state.handle_request(verb, &body);
        drop(permit);
        response
    });
    handle.await.unwrap_or_else(|error| {
        error_response(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string())
    })
}

async fn respond(
    request: Request<Incoming>,
    state: Arc<ExtenderState>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    // kube-scheduler sends no header of its own, so its token is the first part of the path. (The target of a CONNECT
    // has no path at all.)
    let uri_path = request.uri().path();
    let without_slash = uri_path.strip_prefix('/').unwrap_or(uri_path);
    let (path_token, path) = match without_slash.split_once('/') {
        Some((token, verb)) => (Some(token.to_string()), format!("/{verb}")),
        None => (None, uri_path.to_string()),
    };
    let header = request.headers().get(hyper::header::AUTHORIZATION);
    let header_token = header
        .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "))
        .map(str::to_string);
    let verb = match path.as_str() {
        "/filter" => Some("filter"),
        "/prioritize" => Some("prioritize"),
        _ => None,
    };
    let is_accepted = state.accepts(header_token.or(path_token).as_deref());
    let mut content_type = "application/json";
    let (status, body) = match (request.method(), path.as_str(), verb) {
        (&Method::GET, "/healthz", _) => (StatusCode::OK, b"{}".to_vec()),
        (&Method::GET, "/metrics", _) => {
            content_type = OPEN_METRICS;
            (StatusCode::OK, state.metrics_page().into_bytes())
        }
        (&Method::POST, _, Some(_)) if !is_accepted => {
            error_response(StatusCode::UNAUTHORIZED, "expected the extender's token")
        }
        (&Method::POST, _, Some(verb)) => {
            let read_body = read_body(request.into_body(), &state);
            match tokio::time::timeout(BODY_DEADLINE, read_body).await {
                Ok(Ok((body, permit))) => {
                    handle_on_blocking_pool(Arc::clone(&state), verb, body, permit).await
                }
                Ok(Err(error)) => error_response(StatusCode::PAYLOAD_TOO_LARGE, &error),
                Err(_) => error_response(
                    StatusCode::REQUEST_TIMEOUT,
                    &format!(
                        "the body was not read within {} s: it is late, or {MAX_OPEN_BODIES} others are being read",
                        BODY_DEADLINE.as_secs()
                    ),
                ),
            }
        }
        (_, _, Some(_)) => error_response(StatusCode::METHOD_NOT_ALLOWED, "expected POST"),
        _ => error_response(
            StatusCode::NOT_FOUND,
            "expected /filter, /prioritize, /healthz or /metrics",
        ),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let content_type = hyper::header::HeaderValue::from_static(content_type);
    response
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, content_type);
    Ok(response)
}

/// Listens at an address. Returns the bound address, and the server, which runs in the calling runtime until dropped.
pub async fn listen(
    address: SocketAddr,
    state: Arc<ExtenderState>,
) -> io::Result<(SocketAddr, impl Future<Output = ()> + Send)> {
    let listener = TcpListener::bind(address).await?;
    let bound_address = listener.local_addr()?;
    let server = async move {
        let deadlines = Deadlines {
            unadmitted_lifetime: CONNECTION_DEADLINE,
            admitted: CONNECTION_DEADLINE,
        };
        let mut connection_limit = ConnectionLimit::new(MAX_CONNECTIONS, deadlines);
        loop {
            let Some((stream, peer)) = accept(listener.accept().await).await else {
                continue;
            };
            let state = Arc::clone(&state);
            // Without this option, the kernel may delay small answers.
            let _ = stream.set_nodelay(true);
            connection_limit.serve(peer.ip(), move |_| async move {
                let service = service_fn(move |request| respond(request, Arc::clone(&state)));
                let mut http = http1::Builder::new();
                http.timer(TokioTimer::new())
                    .header_read_timeout(IDLE_DEADLINE)
                    .max_headers(64);
                // A peer that disconnects in the middle of a request needs no response.
                let _ = http.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    };
    Ok((bound_address, server))
}
