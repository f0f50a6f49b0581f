//! Servers for short connections from this host, and the page of a running daemon.

pub mod connection_limit;
pub mod page;

use std::net::IpAddr;
use std::time::Duration;

use hyper::http::uri::Authority;
use hyper::server::conn::http1;
use hyper_util::rt::TokioTimer;

/// Maximum time in which a client must send the head of its request.
const HEAD_DEADLINE: Duration = Duration::from_secs(5);
/// Maximum size of a request's head, in bytes (the smallest that the library accepts) and in lines.
const MAX_HEAD_BYTES: usize = 8192;
const MAX_HEAD_LINES: usize = 64;

/// A server that reads one head of a few kilobytes within some seconds, responds, and closes the connection.
pub fn single_request_server() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .keep_alive(false);
    http.max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEAD_LINES);
    http
}

/// Whether `host` is a name that only this host has. A foreign page can make a browser send requests to this server
/// under that page's own name (DNS rebinding).
pub fn is_this_host(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority
        .host()
        .trim_start_matches('[')
        .trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}
