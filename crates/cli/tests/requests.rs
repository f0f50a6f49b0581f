//! Requests of any form to a daemon's socket and metrics page, made by seeded changes to valid and invalid ones. Does
//! the daemon survive, answer others, and use no more memory?
//!
//! `CACHEMATE_FUZZ_SECONDS` sets the duration for each.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use cachemate_core::SplitMix64;
use cachemate_fuzzing::mutate;
use common::{acting_config, run, start_daemon, start_sleeper, status_when};

const REQUESTS: u64 = 1_500;
/// Maximum growth of the memory: connections are few, and each takes some kilobytes.
const MAX_GROWTH_KIB: u64 = 32 << 10;

const TO_THE_SOCKET: &[&[u8]] = &[
    b"status\n",
    b"reload\n",
    b"status",
    b"\0\0\n",
    b"",
    b"{\"status\": 1}\n",
];
const TO_THE_PAGE: &[&[u8]] = &[
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD /metrics HTTP/1.0\r\nHost: 127.0.0.1:9\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\nx",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"GET http://[::1]:80/metrics HTTP/1.1\r\nHost: [::1]\r\nConnection: keep-alive, upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /\r\n",
];

fn peak_kib(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    line.split_ascii_whitespace()
        .next()
        .unwrap()
        .parse()
        .unwrap()
}

/// Sends changed requests; returns their number.
fn send(seed: u64, corpus: &[&[u8]], max_bytes: usize, mut send_one: impl FnMut(&[u8])) -> u64 {
    let seconds = std::env::var("CACHEMATE_FUZZ_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let mut generator = SplitMix64::new(seed);
    let (start, mut sent) = (Instant::now(), 0);
    while seconds.map_or(sent < REQUESTS, |seconds: u64| {
        start.elapsed().as_secs() < seconds
    }) {
        let draw_request =
            |generator: &mut SplitMix64| corpus[generator.draw_below(corpus.len() as u64) as usize];
        let (request, other) = (draw_request(&mut generator), draw_request(&mut generator));
        send_one(&mutate(&mut generator, request, other, max_bytes));
        sent += 1;
    }
    sent
}

/// Sends a request and disconnects, ignoring the answer except for the part that arrives at once.
fn ask<S: Read + Write>(mut stream: S, request: &[u8], hang_up: impl Fn(&S)) {
    // Peers that disconnect in the middle of a request are intended here.
    if stream.write_all(request).is_ok() {
        hang_up(&stream);
        let _ = stream.read(&mut [0u8; 512]);
    }
}

/// After thousands of changed requests at both endpoints: is the daemon running and answering, with its memory within
/// the bound?
#[test]
fn the_daemon_survives_thousands_of_changed_requests() {
    let dir = tempfile::tempdir().unwrap();
    let program = start_sleeper();
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let config = acting_config("default", 100, &program.pid().to_string());
    let mut daemon = start_daemon(
        dir.path(),
        &format!("metrics_address = \"{free}\"\n{config}"),
    );
    let patience = (Duration::from_millis(50), Duration::from_secs(180));
    status_when(dir.path(), "the first window", patience, |status| {
        status["windows"].as_u64() > Some(0)
    });
    let before_kib = peak_kib(daemon.pid());
    let socket = dir.path().join("s.sock");
    let soon = Some(Duration::from_secs(2));
    let to_socket = send(1, TO_THE_SOCKET, 4_096, |request| {
        let stream = UnixStream::connect(&socket).expect("the socket is there");
        stream.set_read_timeout(soon).unwrap();
        ask(stream, request, |stream| {
            drop(stream.shutdown(Shutdown::Write))
        });
    });
    let to_page = send(2, TO_THE_PAGE, 65_536, |request| {
        let stream = TcpStream::connect(free).expect("the page is there");
        stream.set_read_timeout(soon).unwrap();
        stream.set_write_timeout(soon).unwrap();
        ask(stream, request, |stream| {
            drop(stream.shutdown(Shutdown::Write))
        });
    });
    assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon ended");
    run(dir.path(), &["status", "--socket", "s.sock"]).ok();
    let mut page = TcpStream::connect(free).unwrap();
    page.set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    page.write_all(TO_THE_PAGE[0]).unwrap();
    let mut text = String::new();
    page.read_to_string(&mut text).unwrap();
    assert!(text.contains("cachemate_windows"), "{text}");
    let more_kib = peak_kib(daemon.pid()) - before_kib;
    println!(
        "{to_socket} requests to the socket, {to_page} to the page; {more_kib} KiB more than before"
    );
    assert!(
        more_kib <= MAX_GROWTH_KIB,
        "{more_kib} KiB more than before"
    );
}
