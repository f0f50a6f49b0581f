//! A small HTTP server that serves the pages of one address and strictly bounds the resources of each client.
//!
//! The bounds apply to each connection and to all connections together: a maximum number of connections (the oldest
//! is closed), a request head of a few kilobytes within some seconds, and one response, after which the connection is
//! closed. If a token is configured, every request must contain it. Otherwise a request is rejected if its `Host` is
//! not a name of this host, because a foreign page can make a browser send requests here under that page's own name
//! (DNS rebinding).

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cachemate_page::serve::connection_limit::{
    ConnectionLimit, Deadlines, accept, serve_in_own_thread,
};
use cachemate_page::serve::page::constant_time_eq;
use cachemate_page::serve::{is_this_host, single_request_server};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, WWW_AUTHENTICATE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;

/// Maximum number of simultaneous connections.
const MAX_CONNECTIONS: usize = 32;
/// Timeout of a request and its response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Content type and text for a path; `None` if there is no such path.
pub trait PageRoutes: Fn(&str) -> Option<(&'static str, String)> + Send + Sync + 'static {}
impl<F: Fn(&str) -> Option<(&'static str, String)> + Send + Sync + 'static> PageRoutes for F {}

/// Serves pages in a separate thread that ends with the process. Returns the address at which it listens. If `token` is
/// given, every request must contain it as `Authorization: Bearer TOKEN`.
///
/// # Errors
/// The address is taken, or is not of this host.
pub fn serve(
    address: &str,
    token: Option<String>,
    pages: impl PageRoutes,
) -> anyhow::Result<SocketAddr> {
    let listen_error = || format!("{address}: cannot listen");
    let listener = TcpListener::bind(address).with_context(listen_error)?;
    let bound_address = listener.local_addr().with_context(listen_error)?;
    let start_result = listener.set_nonblocking(true).and_then(|()| {
        serve_in_own_thread("cachemate-http", || {
            Ok(listen(
                tokio::net::TcpListener::from_std(listener)?,
                Arc::new((token, pages)),
            ))
        })
    });
    start_result.with_context(listen_error)?;
    Ok(bound_address)
}

async fn listen(
    listener: tokio::net::TcpListener,
    token_and_pages: Arc<(Option<String>, impl PageRoutes)>,
) {
    let mut limit = ConnectionLimit::new(
        MAX_CONNECTIONS,
        Deadlines {
            unadmitted_lifetime: REQUEST_TIMEOUT,
            admitted: REQUEST_TIMEOUT,
        },
    );
    loop {
        let Some((stream, peer)) = accept(listener.accept().await).await else {
            continue;
        };
        let token_and_pages = Arc::clone(&token_and_pages);
        limit.serve(peer.ip(), |_| async move {
            let (token, pages) = &*token_and_pages;
            let respond = |request| {
                std::future::ready(Ok::<_, Infallible>(answer(
                    &request,
                    token.as_deref(),
                    pages,
                )))
            };
            let service = service_fn(respond);
            // A peer that sends an invalid request, or disconnects, needs no response.
            let _ = single_request_server()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn answer(
    request: &Request<Incoming>,
    token: Option<&str>,
    pages: &impl PageRoutes,
) -> Response<Full<Bytes>> {
    let respond = |status, content_type: &'static str, text: String| {
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    };
    let refuse =
        |status, text: &str| respond(status, "text/plain; charset=utf-8", format!("{text}\n"));
    let host = request
        .headers()
        .get(HOST)
        .and_then(|host| host.to_str().ok());
    if let Some(token) = token {
        let given_token = request
            .headers()
            .get(AUTHORIZATION)
            .and_then(|header| header.as_bytes().strip_prefix(b"Bearer "));
        if !given_token.is_some_and(|given_token| constant_time_eq(given_token, token.as_bytes())) {
            let mut refusal = refuse(
                StatusCode::UNAUTHORIZED,
                "expected the token of metrics_token_file",
            );
            refusal
                .headers_mut()
                .insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return refusal;
        }
    } else if !host.is_some_and(is_this_host) {
        return refuse(
            StatusCode::MISDIRECTED_REQUEST,
            "Host: expected localhost or a loopback address",
        );
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return refuse(
            StatusCode::METHOD_NOT_ALLOWED,
            "pages can be read, by GET and HEAD",
        );
    }
    match pages(request.uri().path()) {
        Some((kind, text)) => respond(StatusCode::OK, kind, text),
        None => refuse(
            StatusCode::NOT_FOUND,
            "nothing is here; metrics are at /metrics",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;

    fn start_server() -> SocketAddr {
        serve("127.0.0.1:0", None, |path| {
            (path == "/metrics").then(|| ("text/plain", "page".to_string()))
        })
        .unwrap()
    }

    fn ask(address: SocketAddr, head: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(4 * REQUEST_TIMEOUT)).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn get(address: SocketAddr, path: &str, host: &str) -> String {
        ask(
            address,
            &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"),
        )
    }

    /// Is a page served only under this host's own names, only by GET, and only at its path?
    #[test]
    fn pages_are_served_only_under_this_hosts_names() {
        let address = start_server();
        for host in [
            "localhost",
            "LOCALHOST:9",
            "127.0.0.1:9753",
            "127.1.2.3",
            "[::1]",
            "[::1]:80",
            &address.to_string(),
        ] {
            let answer = get(address, "/metrics", host);
            assert!(
                answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\npage"),
                "{host}: {answer}"
            );
        }
        for host in [
            "evil.example",
            "evil.example:9753",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "[2001:db8::1]",
            "",
            "@",
        ] {
            assert!(!get(address, "/metrics", host).contains("page"), "{host}");
        }
        assert!(ask(address, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 421"));
        assert!(get(address, "/", "localhost").starts_with("HTTP/1.1 404"));
        let post = "POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n";
        assert!(ask(address, post).starts_with("HTTP/1.1 405"));
    }

    /// With a token: is a page served to a request that contains it, under any name of the host, and to no other?
    #[test]
    fn only_requests_with_the_token_get_the_page() {
        let token = "0123456789abcdef";
        let pages = |path: &str| (path == "/metrics").then(|| ("text/plain", "page".to_string()));
        let address = serve("127.0.0.1:0", Some(token.to_string()), pages).unwrap();
        let ask_with = |header: &str| {
            ask(
                address,
                &format!("GET /metrics HTTP/1.1\r\nHost: node7.example\r\n{header}\r\n"),
            )
        };
        assert!(ask_with(&format!("Authorization: Bearer {token}\r\n")).ends_with("\r\n\r\npage"));
        for header in [
            "",
            "Authorization: Bearer 0123456789abcdeX\r\n",
            "Authorization: Basic 0123456789abcdef\r\n",
        ] {
            let answer = ask_with(header);
            assert!(
                answer.starts_with("HTTP/1.1 401") && !answer.contains("page"),
                "{header}: {answer}"
            );
        }
    }

    /// Is an endless head cut off after some kilobytes?
    #[test]
    fn an_endless_head_is_cut_off() {
        let mut stream = TcpStream::connect(start_server()).unwrap();
        stream.set_write_timeout(Some(REQUEST_TIMEOUT)).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: ")
            .unwrap();
        // Far more than the kernel's buffers hold, so it can be written only if the client reads it.
        let written = (0..2_048)
            .map(|_| stream.write_all(&[b'x'; 8192]))
            .take_while(Result::is_ok)
            .count();
        assert!(written < 2_048, "16 MiB of one header were read");
    }

    /// Beside five hundred silent connections: is a page served, with only a few descriptors?
    #[test]
    fn idle_connections_do_not_delay_a_page() {
        let address = start_server();
        let idle: Vec<TcpStream> = (0..500)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        assert!(get(address, "/metrics", "localhost").ends_with("page"));
        let ended = idle.iter().filter(|stream| {
            let mut stream: &TcpStream = stream;
            stream.set_nonblocking(true).unwrap();
            !matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
        });
        assert!(ended.count() >= 500 - MAX_CONNECTIONS, "the oldest went");
    }

    /// Is a peer that sends its head a byte at a time dropped after some seconds?
    #[test]
    fn a_peer_that_sends_a_byte_at_a_time_is_dropped() {
        let mut stream = TcpStream::connect(start_server()).unwrap();
        let start = std::time::Instant::now();
        while stream.write_all(b"G").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
            assert!(start.elapsed() < 6 * REQUEST_TIMEOUT, "still read");
        }
    }
}
