//! Requests to a page from a client that is not a browser.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Head and body of a response. A `Host` among the headers replaces `host`. A stream of events has no end, so it is
/// read until more than `windows` events have arrived.
pub fn exchange(
    mut stream: impl Read + Write,
    host: &str,
    path: &str,
    headers: &[(&str, &str)],
    windows: usize,
) -> (String, String) {
    let host = headers
        .iter()
        .find(|(name, _)| *name == "Host")
        .map_or(host, |(_, host)| *host);
    let mut head = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n");
    for (name, value) in headers.iter().filter(|(name, _)| *name != "Host") {
        head.push_str(&format!("{name}: {value}\r\n"));
    }

    stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
    let (mut answer, mut chunk) = (Vec::new(), [0u8; 4096]);
    while String::from_utf8_lossy(&answer)
        .matches("event: window")
        .count()
        <= windows
    {
        match stream.read(&mut chunk) {
            Ok(0) | Err(_) => break,
            Ok(read) => answer.extend_from_slice(&chunk[..read]),
        }
    }

    let text = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    (head.to_string(), body.to_string())
}

/// [`exchange`] over a connection to `address`.
pub fn get(
    address: &str,
    path: &str,
    headers: &[(&str, &str)],
    windows: usize,
) -> (String, String) {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(120)))
        .unwrap();
    exchange(stream, address, path, headers, windows)
}
