//! The page as a daemon serves it, requested directly and in a real browser.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::Browser;
use crate::common::http::{exchange, get};
use cachemate_core::test_support::{
    capabilities_fixture, last_level_caches, observation_fixture, pipeline_config, record_fixture,
    run_header,
};
use cachemate_core::{CacheLevel, CpuId, Profiles, RunHeader, WindowRecord};
use cachemate_page::SnapshotBuilder;
use cachemate_page::serve::connection_limit::Deadlines;
use cachemate_page::serve::page::{DEADLINES, PageAddress, PageFeed, serve, serve_within};
use serde_json::json;

fn header() -> RunHeader {
    run_header(
        last_level_caches(2, 2, CacheLevel::L3, 1 << 20),
        capabilities_fixture(&[]),
        pipeline_config("default"),
    )
}

fn record(window: u64) -> WindowRecord {
    let mut observation = observation_fixture(window, 3);
    for task in &mut observation.tasks {
        task.name = format!("program-{}", task.task.0);
        task.on_cpu_ns = vec![(CpuId(task.task.0), 500_000_000)];
    }
    record_fixture(observation)
}

/// A page with a window every 50 ms, for as long as the process lives.
fn serve_windows(address: &str, token: bool) -> String {
    serve_windows_within(address, token, DEADLINES)
}

/// The same as [`serve_windows`], with other deadlines of a connection.
fn serve_windows_within(address: &str, token: bool, deadlines: Deadlines) -> String {
    let feed = serve_within(
        &PageAddress {
            address: address.into(),
            requires_token: token,
        },
        &header(),
        deadlines,
    )
    .unwrap();
    let address = feed.address.clone();
    std::thread::spawn(move || push_for_ever(&feed));
    address
}

fn push_for_ever(feed: &PageFeed) {
    let mut builder = SnapshotBuilder::new(&header());
    for window in 0.. {
        let snapshot = builder.build_snapshot(&record(window), &Profiles::new(), None);
        feed.push(snapshot, &Profiles::new());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn split_token(address_and_token: &str) -> (String, Option<String>) {
    match address_and_token
        .strip_prefix("http://")
        .and_then(|after_scheme| after_scheme.split_once("/#token="))
    {
        Some((address, token)) => (address.to_string(), Some(token.to_string())),
        None => (
            address_and_token
                .trim_start_matches("http://")
                .trim_end_matches('/')
                .to_string(),
            None,
        ),
    }
}

/// Is nothing shown without the token, to a foreign page, or under a foreign name, and is the page itself sent with its
/// policy?
#[test]
fn nothing_is_shown_without_the_token() {
    let (address, token) = split_token(&serve_windows("127.0.0.1:0", true));
    let token = token.unwrap();
    let bearer = format!("Bearer {token}");
    let status =
        |path: &str, headers: &[(&str, &str)]| get(&address, path, headers, 0).0[9..12].to_string();
    let (head, body) = get(&address, "/", &[], 0);
    assert!(
        head.contains("content-security-policy: default-src 'none'")
            && body.contains("<title>cachemate</title>")
    );
    assert!(
        !body.contains("id=\"head\""),
        "the page without a token holds no data"
    );
    assert_eq!(status("/events", &[]), "401");
    assert_eq!(status("/events", &[("Authorization", "Bearer 00")]), "401");
    for name in ["cachemate", "cachemate-0"] {
        assert_eq!(
            status("/events", &[("Cookie", &format!("{name}={token}"))]),
            "401",
            "a cookie is no token"
        );
    }
    assert_eq!(status("/other", &[("Authorization", &bearer)]), "404");
    for foreign in ["evil.example", "evil.example:80", "10.0.0.1", ""] {
        assert_eq!(
            status("/events", &[("Host", foreign), ("Authorization", &bearer)]),
            "421",
            "{foreign}"
        );
        assert_eq!(status("/", &[("Host", foreign)]), "421", "{foreign}");
    }
    let origin =
        |origin: &str| status("/events", &[("Authorization", &bearer), ("Origin", origin)]);
    assert_eq!(origin("http://evil.example"), "403");
    assert_eq!(origin("null"), "403");
    assert_eq!(origin(&format!("http://{address}")), "200");
    assert_eq!(
        status(
            "/events",
            &[("Authorization", &bearer), ("Sec-Fetch-Site", "cross-site")]
        ),
        "403"
    );
    let (head, _) = get(&address, "/enter", &[("Authorization", &bearer)], 0);
    assert!(
        !head.contains("set-cookie"),
        "a cookie goes to every port of this host: {head}"
    );
    assert_eq!(status("/00/events", &[]), "401");
    assert_eq!(status(&format!("/{token}/"), &[]), "404");
    let (head, body) = get(&address, &format!("/{token}/events"), &[], 0);
    assert!(
        head.contains("text/event-stream") && body.contains("event: head\ndata: {"),
        "{head}"
    );
    assert!(!body.contains(&token));
}

/// Are addresses other than loopback rejected, a socket accessible only to its owner, and a page without a token open
/// to every user?
#[test]
fn only_loopback_addresses_are_accepted() {
    let refused = serve(
        &PageAddress {
            address: "0.0.0.0:0".into(),
            requires_token: true,
        },
        &header(),
    )
    .err()
    .unwrap();
    assert!(
        refused
            .to_string()
            .contains("found 0.0.0.0, expected a loopback address"),
        "{refused}"
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("page.sock").display().to_string();
    assert_eq!(serve_windows(&path, true), format!("socket {path}"));
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let (head, _) = exchange(stream, "localhost", "/events", &[], 0);
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let (address, token) = split_token(&serve_windows("127.0.0.1:0", false));
    assert_eq!(token, None);
    assert!(
        get(&address, "/events", &[], 0)
            .0
            .starts_with("HTTP/1.1 200")
    );
}

/// Does a viewer with the token stay connected while strangers open hundreds of connections, both silent ones and
/// requests for the page?
#[test]
fn floods_by_strangers_do_not_disconnect_a_viewer() {
    let (address, token) = split_token(&serve_windows("127.0.0.1:0", true));
    let mut viewer = TcpStream::connect(&address).unwrap();
    let head = format!(
        "GET /{}/events HTTP/1.1\r\nHost: {address}\r\n\r\n",
        token.unwrap()
    );
    viewer.write_all(head.as_bytes()).unwrap();
    let mut lines = BufReader::new(viewer)
        .lines()
        .map(|line| line.expect("the viewer is still connected"));
    assert!(lines.next().unwrap().contains("200"));
    let mut strangers: Vec<TcpStream> = (0..300)
        .map(|_| TcpStream::connect(&address).unwrap())
        .collect();
    for stranger in strangers.iter_mut().step_by(2) {
        // A connection that was displaced cannot be written to.
        let _ = stranger.write_all(format!("GET / HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes());
    }
    assert_eq!(
        lines
            .filter(|line| line == "event: window")
            .take(40)
            .count(),
        40
    );
}

/// Are viewers that read nothing disconnected at the deadline, so that another one is admitted?
#[test]
fn viewers_that_read_nothing_are_disconnected() {
    let deadlines = Deadlines {
        admitted: Duration::from_secs(2),
        ..DEADLINES
    };
    let (address, _) = split_token(&serve_windows_within("127.0.0.1:0", false, deadlines));
    let head = format!("GET /events HTTP/1.1\r\nHost: {address}\r\n\r\n");
    let silent = |_| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        stream
    };

    let start = Instant::now();
    let _silent: Vec<TcpStream> = (0..8).map(silent).collect();
    let mut was_full = false;
    while !get(&address, "/events", &[], 0)
        .0
        .starts_with("HTTP/1.1 200")
    {
        was_full = true;
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "the slots stay taken"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(was_full, "all slots were taken");
}

/// Is the ninth viewer rejected because all slots are taken, and admitted once another has left?
#[test]
fn the_ninth_viewer_is_rejected_until_another_leaves() {
    let (address, _) = split_token(&serve_windows("127.0.0.1:0", false));
    let head = format!("GET /events HTTP/1.1\r\nHost: {address}\r\n\r\n");
    let status_line = || {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        let mut status = [0u8; 12];
        stream.read_exact(&mut status).unwrap();
        (String::from_utf8_lossy(&status[9..]).into_owned(), stream)
    };
    let mut looking: Vec<(String, TcpStream)> = (0..8).map(|_| status_line()).collect();
    assert!(looking.iter().all(|(status, _)| status == "200"));
    assert_eq!(status_line().0, "503");
    looking.pop();
    let start = Instant::now();
    while status_line().0 != "200" {
        assert!(start.elapsed() < Duration::from_secs(120), "never let in");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Does a viewer that reconnects get the windows that it missed and none twice, and a viewer of another run everything?
#[test]
fn a_reconnecting_viewer_gets_the_missed_windows_once() {
    let feed = serve(
        &PageAddress {
            address: "127.0.0.1:0".into(),
            requires_token: false,
        },
        &header(),
    )
    .unwrap();
    let (address, _) = split_token(&feed.address);

    let read_events = |id: Option<&str>, last: u64| {
        let mut stream = TcpStream::connect(&address).unwrap();
        let id = id.map_or(String::new(), |id| format!("Last-Event-ID: {id}\r\n"));
        stream
            .write_all(format!("GET /events HTTP/1.1\r\nHost: {address}\r\n{id}\r\n").as_bytes())
            .unwrap();
        let mut ids = Vec::new();
        for line in BufReader::new(stream).lines() {
            if let Some(id) = line.unwrap().strip_prefix("id: ") {
                ids.push(id.to_string());
                if id.ends_with(&format!(":{last}")) {
                    break;
                }
            }
        }
        ids
    };

    let mut builder = SnapshotBuilder::new(&header());
    for window in 0..4 {
        let snapshot = builder.build_snapshot(&record(window), &Profiles::new(), None);
        feed.push(snapshot, &Profiles::new());
        // One at a time, because windows are dropped if the page is behind.
        std::thread::sleep(Duration::from_millis(300));
    }

    let event_ids = read_events(None, 3);
    let windows = |ids: &[String]| {
        ids.iter()
            .map(|id| id.split_once(':').unwrap().1.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(windows(&event_ids), ["0", "1", "2", "3"]);
    assert_eq!(windows(&read_events(Some(&event_ids[1]), 3)), ["2", "3"]);
    assert_eq!(
        windows(&read_events(Some("other:2"), 3)),
        ["0", "1", "2", "3"]
    );
}

/// A server in a separate process, so that it can be ended.
struct OtherServer(Child, String);

impl OtherServer {
    fn start(address: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "live::served_by_another_process",
            "--exact",
            "--ignored",
            "--nocapture",
        ]);
        let mut child = command
            .env("CACHEMATE_SERVE", address)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines
            .map(|line| line.unwrap())
            .find_map(|line| Some(line.split_once("page at ")?.1.to_string()));
        OtherServer(child, split_token(&address.expect("it says where")).0)
    }
}

impl Drop for OtherServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other process of a test, which is not a test of its own.
#[test]
#[ignore = "started by another test"]
fn served_by_another_process() {
    let Ok(address) = std::env::var("CACHEMATE_SERVE") else {
        return;
    };
    let feed = serve(
        &PageAddress {
            address,
            requires_token: false,
        },
        &header(),
    )
    .unwrap();
    println!("page at {}", feed.address);
    push_for_ever(&feed);
}

/// In a browser: do windows arrive, does the page continue by itself when the daemon returns, does the token in the
/// fragment grant access and leave the address, and is a wrong one reported?
#[test]
fn a_browser_shows_new_windows_and_resumes_with_the_daemon() {
    let Some(mut browser) = Browser::start() else {
        crate::not_shown::report_unchecked("the live page", "no Chromium");
        return;
    };
    let shown = OtherServer::start("127.0.0.1:0");
    let address = shown.1.clone();
    browser.open(&format!("http://{address}/"));
    browser.wait_until("cachemate.store.windows.length > 3");
    assert_eq!(
        browser.eval("document.getElementById('state').textContent"),
        json!("live")
    );
    assert_eq!(
        browser.eval("document.querySelectorAll('.chip').length"),
        json!(3)
    );
    let run = browser.eval("cachemate.store.head.run");
    drop(shown);
    browser.wait_until("document.getElementById('state').textContent.startsWith('no answer')");
    let second_server = OtherServer::start(&address);
    browser.wait_until(&format!(
        "cachemate.store.head.run !== {run} && cachemate.store.windows.length > 2"
    ));
    drop(second_server);
    let (address, token) = split_token(&serve_windows("127.0.0.1:0", true));
    browser.open(&format!("http://{address}/"));
    browser.wait_until("!document.getElementById('enter').hidden");
    browser.eval("document.getElementById('token').value = 'wrong'; document.querySelector('#enter button').click()");
    browser.wait_until("document.getElementById('refusal').textContent.includes('wrong')");
    assert_eq!(browser.eval("cachemate.store.windows.length"), json!(0));
    browser.open("about:blank");
    browser.open(&format!("http://{address}/#token={}", token.unwrap()));
    browser.wait_until("cachemate.store.windows.length > 1");
    assert_eq!(
        browser.eval("location.href.includes('token') || document.cookie !== ''"),
        json!(false)
    );
    browser.call("Page.reload", json!({}));
    browser.wait_until("window.cachemate && cachemate.store.windows.length > 1");
}
