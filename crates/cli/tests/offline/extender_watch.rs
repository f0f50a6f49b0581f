//! The extender and the daemon's publisher on an API server: a scripted server on the loopback interface lists,
//! watches, takes writes, breaks and falls silent.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::common::{ChildGuard, MANAGE, command, run, until};
use serde_json::{Value, json};

/// A scripted API server: its answer to lists, and the lines that every open watch receives.
#[derive(Default)]
struct Script {
    profiles: Vec<Value>,
    nodes: Vec<Value>,
    /// Status of every answer; 0 closes connections without one, and 1 leaves them without one.
    status: u16,
    watches: Vec<(String, Sender<String>)>,
    /// Paths that were requested.
    requests: Vec<String>,
    /// Writes that were accepted: time, method, path and body.
    writes: Vec<(Instant, String, String, Value)>,
}

impl Script {
    /// Takes a write as an API server would, and returns its status.
    fn write(&mut self, method: &str, path: &str, body: Value) -> u16 {
        let name = path
            .trim_end_matches("/status")
            .rsplit('/')
            .next()
            .unwrap_or("")
            .to_string();
        let object = self
            .nodes
            .iter_mut()
            .find(|node| node["metadata"]["name"] == name.as_str());
        let status = match (method, object) {
            ("POST", _) => {
                self.nodes.push(body.clone());
                201
            }
            (_, Some(object)) => {
                object["status"] = body["status"].clone();
                let line = json!({ "type": "MODIFIED", "object": object });
                let watches = self
                    .watches
                    .iter()
                    .filter(|(path, _)| path.contains("nodecachestates"));
                watches.for_each(|(_, sender)| drop(sender.send(format!("{line}\n"))));
                200
            }
            (_, None) => 404,
        };
        self.writes
            .push((Instant::now(), method.to_string(), path.to_string(), body));
        status
    }
}

#[derive(Clone)]
pub struct FakeServer {
    script: Arc<Mutex<Script>>,
    address: String,
}

impl FakeServer {
    /// A server that lists these objects, and changes nothing.
    pub fn listing(profiles: Vec<Value>, nodes: Vec<Value>) -> Self {
        FakeServer::start(Script {
            profiles,
            nodes,
            status: 200,
            ..Script::default()
        })
    }

    fn start(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = FakeServer {
            address: listener.local_addr().unwrap().to_string(),
            script: Arc::new(Mutex::new(script)),
        };
        let accepting = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = accepting.clone();
                std::thread::spawn(move || server.serve(stream));
            }
        });
        server
    }

    fn serve(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let (method, path) = (
            head.split(' ').next().unwrap(),
            head.split(' ').nth(1).unwrap().to_string(),
        );
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body).unwrap();
        let authorized = head.contains("authorization: Bearer secret\r\n");
        let (status, lines) = {
            let mut script = self.script.lock().unwrap();
            script.requests.push(path.clone());
            let (sender, lines) = channel();
            if path.contains("watch=true") {
                script.watches.push((path.clone(), sender));
            }
            (if authorized { script.status } else { 401 }, lines)
        };
        match status {
            0 => return,
            1 => std::thread::sleep(Duration::from_secs(60)),
            _ => {}
        }
        if method != "GET" && status == 200 {
            let body = serde_json::from_slice(&body).unwrap();
            let status = self.script.lock().unwrap().write(method, &path, body);
            let _ = stream
                .write_all(format!("HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n").as_bytes());
            return;
        }
        if status != 200 || !path.contains("watch=true") {
            let items = {
                let script = self.script.lock().unwrap();
                if path.contains("workloadprofiles") {
                    script.profiles.clone()
                } else {
                    script.nodes.clone()
                }
            };
            let body =
                json!({ "metadata": { "resourceVersion": "7" }, "items": items }).to_string();
            let head = format!(
                "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(&[head.as_bytes(), body.as_bytes()].concat());
            return;
        }
        send_chunks(&mut stream, &lines);
    }

    /// Sends a line to the watches of a resource, once there is one.
    fn tell(&self, resource: &str, line: &Value) {
        until("a watch of the resource", || {
            let script = self.script.lock().unwrap();
            let of_resource = script
                .watches
                .iter()
                .filter(|(path, _)| path.contains(resource));
            of_resource
                .filter(|(_, sender)| sender.send(format!("{line}\n")).is_ok())
                .count()
                > 0
        });
    }

    /// Arguments with which a command uses this server.
    fn arguments(&self, dir: &Path) -> [String; 4] {
        std::fs::write(dir.join("token"), "secret\n").unwrap();
        [
            "--api-server",
            &format!("http://{}", self.address),
            "--token-file",
            "token",
        ]
        .map(String::from)
    }

    /// An extender that knows so many nodes: the listed ones and `last`, which is added when both watches are open.
    pub fn start_informed_extender(
        &self,
        dir: &Path,
        more: &[&str],
        last: &Value,
        nodes: usize,
    ) -> (ChildGuard, String) {
        let watch_counts = || {
            ["workloadprofiles?watch", "nodecachestates?watch"].map(|watch| self.requests(watch))
        };
        let earlier = watch_counts();
        let (guard, address) = self.start_extender(dir, more);
        until("both watches", || {
            let counts = watch_counts();
            counts[0] > earlier[0] && counts[1] > earlier[1]
        });
        // Changes are applied in their order, so an extender that knows this node knows all objects.
        self.tell(
            "nodecachestates",
            &json!({ "type": "ADDED", "object": last }),
        );
        let line = format!("cachemate_extender_fresh_nodes {nodes}.0\n");
        until("the last node", || {
            send_request(&address, "GET", "/metrics", "")
                .1
                .contains(&line)
        });
        (guard, address)
    }

    /// An extender that watches this server.
    fn start_extender(&self, dir: &Path, more: &[&str]) -> (ChildGuard, String) {
        let args = self.arguments(dir);
        let args = args.each_ref().map(String::as_str);
        start_extender(dir, &[&args[..], more].concat())
    }

    fn end_watches(&self) {
        self.script.lock().unwrap().watches.clear();
    }

    fn requests(&self, part: &str) -> usize {
        self.script
            .lock()
            .unwrap()
            .requests
            .iter()
            .filter(|path| path.contains(part))
            .count()
    }
}

/// Sends lines as chunks, each cut in two, until the script ends the watch.
fn send_chunks(stream: &mut TcpStream, lines: &Receiver<String>) {
    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
    for line in lines {
        let (first, second) = line.split_at(line.len() / 2);
        for part in [first, second] {
            if stream
                .write_all(format!("{:x}\r\n{part}\r\n", part.len()).as_bytes())
                .is_err()
            {
                return;
            }
        }
    }
    let _ = stream.write_all(b"0\r\n\r\n");
}

pub fn workload_profile() -> Value {
    json!({ "kind": "WorkloadProfile", "metadata": { "name": "index" }, "spec": { "profile": {
        "baseCyclesPerInstr": 0.7, "stallCyclesPerMiss": 90, "referencesPerKiloInstr": 12,
        "curve": [{ "bytes": 4e6, "missesPerKiloInstr": 6 }, { "bytes": 32e6, "missesPerKiloInstr": 0.1 }] } } })
}

pub fn node_state(name: &str, fills: f64) -> Value {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();
    json!({ "kind": "NodeCacheState", "metadata": { "name": name, "resourceVersion": "8" }, "status": {
        "observedUnixSeconds": now, "state": { "hertz": 2.4e9, "memoryBytesPerSecond": 2e11, "caches": [{
            "sizeBytes": 33554432, "cpus": 16, "busyCpus": 4, "fillBytesPerSecond": fills,
            "occupancyBytes": 33554432, "bandwidthLeftBytesPerSecond": 1e11 }] } } })
}

/// The guard of an extender with these arguments, and its address.
fn start_extender(dir: &Path, args: &[&str]) -> (ChildGuard, String) {
    let mut child = command(dir, &["extender", "--listen", "127.0.0.1:0"])
        .args(args)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = lines
        .by_ref()
        .map_while(Result::ok)
        .find(|line| line.contains("listening on"))
        .unwrap();
    // The rest is read until the end, so that the server never blocks on its messages.
    std::thread::spawn(move || lines.for_each(drop));
    (
        ChildGuard(child),
        line.rsplit(' ').next().unwrap().to_string(),
    )
}

/// One request over a separate connection; status and response.
pub fn post_request(address: &str, path: &str, body: &str) -> (u16, Value) {
    let (status, answer) = send_request(address, "POST", path, body);
    (status, serde_json::from_str(&answer).unwrap())
}

pub fn send_request(address: &str, method: &str, path: &str, body: &str) -> (u16, String) {
    exchange(
        &mut BufReader::new(TcpStream::connect(address).unwrap()),
        method,
        path,
        body,
    )
}

/// One request over an open connection; status and response.
pub fn exchange(
    connection: &mut BufReader<TcpStream>,
    method: &str,
    path: &str,
    body: &str,
) -> (u16, String) {
    let stream = connection.get_mut();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream
        .write_all(&[head.as_bytes(), body.as_bytes()].concat())
        .unwrap();
    let head: Vec<String> = connection
        .by_ref()
        .lines()
        .map(Result::unwrap)
        .take_while(|line| !line.is_empty())
        .collect();
    let length = head.iter().find_map(|line| {
        line.to_lowercase()
            .strip_prefix("content-length: ")?
            .parse()
            .ok()
    });
    let mut answer = vec![0; length.unwrap()];
    connection.read_exact(&mut answer).unwrap();
    (
        head[0].split(' ').nth(1).unwrap().parse().unwrap(),
        String::from_utf8(answer).unwrap(),
    )
}

/// Scores of the nodes `a` and `b` for a pod with the profile `index`.
fn scores(address: &str) -> (u64, u64) {
    let body = json!({ "Pod": { "metadata": { "annotations": { "cachemate.io/profile": "index" } },
        "spec": { "containers": [{ "image": "i", "resources": { "requests": { "cpu": "1" } } }] } },
        "NodeNames": ["a", "b"] })
    .to_string();
    let (_, answer) = post_request(address, "/prioritize", &body);
    (
        answer[0]["score"].as_u64().unwrap(),
        answer[1]["score"].as_u64().unwrap(),
    )
}

/// Waits until the scores are as expected; every request on the way is answered.
fn expect_scores(address: &str, is_expected: impl Fn(u64, u64) -> bool, state: &str) {
    until(state, || {
        let (a, b) = scores(address);
        is_expected(a, b)
    });
}

/// Does scheduling go on, by the newest knowledge that there is, while the API server lists, watches, expires versions,
/// forges objects, falls silent, refuses and is gone?
#[test]
fn scheduling_continues_despite_api_server_failures() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = vec![node_state("a", 1e6), node_state("b", 9e9)];
    let server = FakeServer::listing(vec![workload_profile()], nodes);
    let (_guard, address) = server.start_extender(dir.path(), &["--watch-timeout", "1"]);
    expect_scores(&address, |a, b| a == 10 && b < 5, "the list");
    server.tell(
        "nodecachestates",
        &json!({ "type": "BOOKMARK", "object": { "metadata": { "resourceVersion": "9" } } }),
    );
    server.tell(
        "nodecachestates",
        &json!({ "type": "MODIFIED", "object": node_state("a", 9e9) }),
    );
    server.tell(
        "nodecachestates",
        &json!({ "type": "MODIFIED", "object": node_state("b", 1e6) }),
    );
    expect_scores(&address, |a, b| a < 5 && b == 10, "changes");
    let mut forged = node_state("b", 1e6);
    forged["status"]["state"]["caches"][0]["busyCpus"] = json!(-1);
    server.tell(
        "nodecachestates",
        &json!({ "type": "MODIFIED", "object": forged }),
    );
    expect_scores(&address, |_, b| b == 5, "a forged object is no knowledge");
    server.script.lock().unwrap().nodes = vec![node_state("a", 1e6), node_state("b", 9e9)];
    server.tell(
        "nodecachestates",
        &json!({ "type": "ERROR", "object": { "kind": "Status", "code": 410 } }),
    );
    expect_scores(
        &address,
        |a, b| a == 10 && b < 5,
        "an expired version needs a list",
    );
    assert!(server.requests("nodecachestates?limit") >= 2);
    // Silence for longer than the deadline: the watch is opened again from the last version.
    let watches = server.requests("watch=true");
    until("another watch after silence", || {
        server.requests("watch=true") >= watches + 3
    });
    expect_scores(&address, |a, b| a == 10 && b < 5, "silence");
    for status in [500, 0] {
        server.script.lock().unwrap().status = status;
        server.end_watches();
        let requests = server.requests("");
        while server.requests("") < requests + 2 {
            assert_eq!(scores(&address).0, 10, "the last knowledge stays");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    server.script.lock().unwrap().status = 200;
    server.end_watches();
    server.tell(
        "workloadprofiles",
        &json!({ "type": "DELETED", "object": workload_profile() }),
    );
    expect_scores(
        &address,
        |a, b| (a, b) == (5, 5),
        "without a profile answers are neutral",
    );
}

/// Are addresses without a port, an authority or a known scheme refused with what was expected?
#[test]
fn impossible_server_addresses_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ca.pem"), "no certificate").unwrap();
    for (args, words) in [
        (
            vec!["--api-server", "https://a:1"],
            "--ca-file: expected the certificate",
        ),
        (
            vec!["--api-server", "https://a:1", "--ca-file", "ca.pem"],
            "found no certificate",
        ),
        (
            vec!["--api-server", "ftp://a:1"],
            "found 'ftp://a:1', expected https://HOST:PORT",
        ),
        (
            vec!["--api-server", "http://a"],
            "found 'http://a', expected https://HOST:PORT",
        ),
        (
            vec!["--api-server", "in-cluster"],
            "KUBERNETES_SERVICE_HOST: not set",
        ),
    ] {
        run(
            dir.path(),
            &[&["extender", "--listen", "127.0.0.1:0"], &args[..]].concat(),
        )
        .exits_with(2, &[words]);
    }
    for (node, words) in [
        (&[][..], "--node: found ''"),
        (&["--node", "a/b"], "--node: found 'a/b', expected the name"),
    ] {
        run(
            dir.path(),
            &[&["manage", "--api-server", "http://127.0.0.1:1"], node].concat(),
        )
        .exits_with(2, &[words]);
    }
}

/// Does a daemon's node state reach the extender, at most every 10 s, and does the daemon go on while the API server
/// refuses, is gone and hangs?
#[test]
fn the_extender_ranks_by_what_a_daemon_publishes() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = vec![node_state("b", 9e9)];
    let server = FakeServer::start(Script {
        profiles: vec![workload_profile()],
        nodes,
        status: 500,
        ..Script::default()
    });
    let config =
        "window_ms = 100\npolicy = { name = \"default\" }\n[[rules]]\ncommand = \"cachemate\"\n";
    std::fs::write(dir.path().join("c.toml"), config).unwrap();

    let mut daemon = command(dir.path(), &MANAGE);
    let daemon = daemon
        .args(server.arguments(dir.path()))
        .args(["--node", "a"]);
    let _daemon = ChildGuard(daemon.spawn().unwrap());

    let windows = || {
        run(dir.path(), &["status", "--json", "--socket", "s.sock"]).json()["windows"]
            .as_u64()
            .unwrap()
    };
    until("a refused request", || {
        server.requests("nodecachestates/a/status") > 0
    });
    server.script.lock().unwrap().status = 200;
    let patches = || -> Vec<(Instant, Value)> {
        let script = server.script.lock().unwrap();
        let of_state = script
            .writes
            .iter()
            .filter(|(_, method, ..)| method == "PATCH")
            .skip(1);
        of_state
            .map(|(time, _, _, body)| (*time, body["status"].clone()))
            .collect()
    };
    // The first one finds no object, which is then created.
    until("two states", || patches().len() >= 2);
    let times: Vec<Instant> = patches().iter().map(|(time, _)| *time).collect();
    assert!(
        times[1] - times[0] >= Duration::from_secs(10),
        "{:?}",
        times[1] - times[0]
    );
    let state = patches()[0].1["state"].clone();
    let caches = state["caches"].as_array().unwrap();
    assert!(
        state["hertz"].as_f64().unwrap() > 1e8 && state["policy"] == "off",
        "{state}"
    );
    assert!(
        caches
            .iter()
            .all(|cache| cache["sizeBytes"].as_f64() > Some(1e5)),
        "{state}"
    );
    let (_extender, address) = server.start_extender(dir.path(), &["--watch-timeout", "1"]);
    let are_fills_known = caches
        .iter()
        .all(|cache| cache["fillBytesPerSecond"].is_number());
    // Where this host counts no misses, the state says so and the extender has no forecast for the node.
    let is_expected = |a: u64, b: u64| {
        if are_fills_known {
            a == 10 && b < 10
        } else {
            a == 5 && b == 10
        }
    };
    expect_scores(&address, is_expected, "a published state");
    for status in [0, 1] {
        server.script.lock().unwrap().status = status;
        let (requests, before) = (server.requests("nodecachestates/a/status"), windows());
        until("a request without an answer", || {
            server.requests("nodecachestates/a/status") > requests
        });
        until("the daemon goes on", || windows() > before + 20);
    }
}
