//! The page through the command: of a running daemon, and of a recording.

#[path = "../../page/tests/common/mod.rs"]
mod browser;
mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use browser::Browser;
use browser::http::{exchange, get};
use common::not_shown::report_unchecked;
use common::{ChildGuard, command, page_element, page_windows, run, status_when};
use serde_json::{Value, json};

/// Names of programs, at most 15 bytes as in the kernel, that would have an effect if they were interpreted as markup.
const HOSTILE: [&str; 3] = ["<img onerror=x>", "</script><b>hm", "'\"><svg/onload="];

/// Interval and limit of waiting for a status.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(180));

/// A daemon that observes programs with hostile names, with its page at `address`.
struct PageFixture {
    _daemon: ChildGuard,
    programs: Vec<ChildGuard>,
    _dir: tempfile::TempDir,
    /// The address of the page, as the daemon prints it.
    at: String,
}

impl PageFixture {
    fn start(address: &str, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = "window_ms = 100\n".to_string();
        let mut programs = Vec::new();
        for name in HOSTILE {
            // A file name cannot contain a `/`, so the process sets its own name.
            let script = "printf %s \"$0\" >/proc/self/comm; while :; do read -t 1 line; done";
            let mut bash = Command::new("bash");
            bash.args(["-c", script, name])
                .stdin(Stdio::piped())
                .stderr(Stdio::null());
            programs.push(ChildGuard(bash.spawn().unwrap()));
            config.push_str(&format!(
                "[[rules]]\npid = {}\n",
                programs.last().unwrap().pid()
            ));
        }
        std::fs::write(dir.path().join("c.toml"), config).unwrap();
        let args = [
            "manage",
            "--config",
            "c.toml",
            "--state-dir",
            "state",
            "--socket",
            "s.sock",
            "--dashboard",
            address,
        ];
        let mut started = command(dir.path(), &[&args[..], more].concat());
        let mut daemon = ChildGuard(
            started
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        );
        let at = said_at(&mut daemon.0);
        PageFixture {
            _daemon: daemon,
            programs,
            _dir: dir,
            at,
        }
    }

    fn address(&self) -> &str {
        self.at
            .trim_start_matches("http://")
            .split('/')
            .next()
            .unwrap()
    }

    fn token(&self) -> &str {
        self.at.split_once("#token=").expect("a token").1
    }
}

/// Reads the daemon's messages until it prints the address of its page; later messages are discarded.
fn said_at(daemon: &mut Child) -> String {
    let mut lines = BufReader::new(daemon.stderr.take().unwrap()).lines();
    let at = lines
        .by_ref()
        .map(|line| line.unwrap())
        .find_map(|line| Some(line.split_once("the page is at ")?.1.to_string()));
    std::thread::spawn(move || lines.count());
    at.expect("it says where the page is")
}

fn windows_of(body: &str) -> Vec<Value> {
    let whole = body
        .split("event: window\ndata: ")
        .skip(1)
        .filter_map(|rest| rest.split_once("\n\n"));
    whole
        .map(|(data, _)| serde_json::from_str(data).unwrap())
        .collect()
}

/// Does the daemon show its programs, window by window, to users with the printed token, and nothing to others?
#[test]
fn the_daemons_page_requires_the_printed_token() {
    let shown = PageFixture::start("127.0.0.1:0", &["--observe-only"]);
    let (address, bearer) = (shown.address(), format!("Bearer {}", shown.token()));
    let with = ("Authorization", bearer.as_str());
    let status_of =
        |path: &str, headers: &[(&str, &str)]| get(address, path, headers, 0).0[9..12].to_string();
    let (head, body) = get(address, "/", &[], 0);
    assert!(
        head.starts_with("HTTP/1.1 200") && !body.contains("onerror=x"),
        "{head}"
    );
    assert_eq!(status_of("/events", &[]), "401");
    assert_eq!(
        status_of("/events", &[("Authorization", "Bearer 0")]),
        "401"
    );
    assert_eq!(
        status_of("/events", &[("Host", "evil.example"), with]),
        "421"
    );
    assert_eq!(
        status_of("/events", &[with, ("Origin", "http://evil.example")]),
        "403"
    );
    let (head, body) = get(address, "/events", &[with], 4);
    assert!(head.contains("text/event-stream"), "{head}");
    let reported = windows_of(&body);
    assert!(reported.len() >= 4, "{} windows came", reported.len());
    assert!(
        reported
            .windows(2)
            .all(|pair| pair[0]["window"].as_u64() < pair[1]["window"].as_u64())
    );
    let last = reported.last().unwrap();
    assert_eq!(last["daemon"]["acting"], json!(false));
    let mut names: Vec<_> = last["programs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["name"].as_str().unwrap())
        .collect();
    names.sort_unstable();
    let mut wanted = HOSTILE;
    wanted.sort_unstable();
    assert_eq!(names, wanted);
    let pids: Vec<i64> = shown
        .programs
        .iter()
        .map(|program| i64::from(program.pid()))
        .collect();
    assert!(
        last["programs"]
            .as_array()
            .unwrap()
            .iter()
            .all(|p| pids.contains(&p["pid"].as_i64().unwrap()))
    );
}

/// In a browser: are programs shown by their names, whatever these are, do windows arrive, and is the end reported?
#[test]
fn a_browser_shows_programs_windows_and_the_daemons_end() {
    let Some(mut browser) = Browser::start() else {
        report_unchecked("a daemon's page in a browser", "no Chromium");
        return;
    };
    let shown = PageFixture::start("127.0.0.1:0", &["--observe-only"]);
    browser.open(&shown.at);
    browser.wait_until("window.cachemate && cachemate.store.windows.length > 2");
    let before = browser.eval("cachemate.store.windows.length").as_u64();
    browser.wait_until(&format!(
        "cachemate.store.windows.length > {}",
        before.unwrap() + 2
    ));
    let chips =
        browser.eval("[...document.querySelectorAll('.chip')].map((chip) => chip.querySelector('.name').textContent)");
    for name in HOSTILE {
        assert!(
            chips
                .as_array()
                .unwrap()
                .iter()
                .any(|chip| chip.as_str().unwrap().contains(name)),
            "{name}: {chips}"
        );
    }
    assert_eq!(
        browser.eval("document.querySelectorAll('main img, main b:not([class]) svg').length"),
        json!(0)
    );
    assert_eq!(browser.complaints, Vec::<String>::new());
    drop(shown);
    browser.wait_until("document.getElementById('state').textContent.startsWith('no answer')");
}

/// Is a page on a socket accessible only to its owner, and one without a token open to all users of this host?
#[test]
fn a_page_on_a_socket_is_accessible_only_to_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("page.sock");
    let shown = PageFixture::start(path.to_str().unwrap(), &["--observe-only"]);
    assert_eq!(shown.at, format!("socket {}", path.display()));
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let (head, body) = exchange(
        UnixStream::connect(&path).unwrap(),
        "localhost",
        "/events",
        &[],
        1,
    );
    assert!(
        head.starts_with("HTTP/1.1 200") && !windows_of(&body).is_empty(),
        "{head}"
    );
    let open = PageFixture::start("127.0.0.1:0", &["--observe-only", "--dashboard-no-auth"]);
    assert!(open.at.ends_with('/'), "{}", open.at);
    assert!(
        get(open.address(), "/events", &[], 0)
            .0
            .starts_with("HTTP/1.1 200")
    );
}

/// Is a page that cannot be served rejected with the place, before anything starts?
#[test]
fn a_page_that_cannot_be_served_is_rejected_before_the_start() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.toml"), "").unwrap();
    let run_manage = |page: &str| {
        run(
            dir.path(),
            &[
                "manage",
                "--config",
                "c.toml",
                "--state-dir",
                "state",
                "--socket",
                "s.sock",
                "--dashboard",
                page,
            ],
        )
    };
    let output = run_manage("0.0.0.0:0");
    output.exits_with(1, &["0.0.0.0:0", "expected a loopback address"]);
    assert_eq!(
        run(dir.path(), &["manage", "--dashboard-no-auth"]).code,
        Some(2)
    );
    assert_eq!(
        run(
            dir.path(),
            &["manage", "--check", "--dashboard", "127.0.0.1:0"]
        )
        .code,
        Some(2)
    );
}

/// Does the daemon manage the host although other users have its ports, and does `status` report what is missing?
#[test]
fn the_daemon_manages_the_host_although_its_ports_are_taken() {
    let dir = tempfile::tempdir().unwrap();
    let ports = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let [metrics, page] = ports
        .each_ref()
        .map(|port| port.local_addr().unwrap().to_string());
    let config = format!(
        "window_ms = 100\nmetrics_address = \"{metrics}\"\n[[rules]]\npid = {}\n",
        std::process::id()
    );
    std::fs::write(dir.path().join("c.toml"), config).unwrap();
    let args = [
        "manage",
        "--config",
        "c.toml",
        "--state-dir",
        "state",
        "--socket",
        "s.sock",
        "--observe-only",
    ];
    let mut started = command(dir.path(), &[&args[..], &["--dashboard", &page]].concat());
    let _daemon = ChildGuard(
        started
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let status = status_when(dir.path(), "windows", PATIENCE, |status| {
        status["windows"].as_u64() > Some(2)
    });
    let unavailable = status["unavailable"].to_string();
    assert!(
        unavailable.contains(&metrics) && unavailable.contains(&page),
        "{unavailable}"
    );
    let text = run(dir.path(), &["status", "--socket", "s.sock"]).ok().out;
    assert!(
        text.contains(&format!("no metrics: {metrics}")) && text.contains("no dashboard"),
        "{text}"
    );
}

/// A directory with a run of some windows on the simulated machine, and the machine's ground truth.
fn recorded_run() -> tempfile::TempDir {
    static RUN: OnceLock<tempfile::TempDir> = OnceLock::new();
    let once = RUN.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut scenario = "name = \"four\"\ndescription = \"\"\nmachine = \"xeon-x5365-4\"\nseed = 3\nscale = 100\n\
                            length = { cycles = 40_000_000 }\npolicy = { name = \"dio\" }\n"
            .to_string();
        for program in ["mcf-2006", "libquantum", "povray", "gamess"] {
            scenario.push_str(&format!("[[programs]]\nprogram = \"{program}\"\n"));
        }
        std::fs::write(dir.path().join("s.toml"), scenario).unwrap();
        let answer = run(dir.path(), &["sim", "s.toml", "-o", "run.jsonl.zst", "--json"]).ok();
        std::fs::write(dir.path().join("truth.json"), answer.out).unwrap();
        dir
    });
    let copy = tempfile::tempdir().unwrap();
    for file in ["s.toml", "run.jsonl.zst", "truth.json"] {
        std::fs::copy(once.path().join(file), copy.path().join(file)).unwrap();
    }
    copy
}

/// The header in a page.
fn page_header(page: &str) -> Value {
    serde_json::from_str(page_element(page, "head")).unwrap()
}

/// Does a run of the simulated machine become one page that contains every window and the ground truth, and does it
/// play back in a browser?
#[test]
fn a_recording_becomes_a_page() {
    let dir = recorded_run();
    let args = [
        "replay",
        "run.jsonl.zst",
        "--truth",
        "truth.json",
        "-o",
        "run.html",
    ];
    let message = run(dir.path(), &args).ok().out;
    let page = std::fs::read_to_string(dir.path().join("run.html")).unwrap();
    let windows = page_windows(&page);
    let count = windows.as_array().unwrap().len();
    assert!(
        count >= 2 && message.contains(&format!("{count} windows")),
        "{message}"
    );
    let replayed = run(dir.path(), &["replay", "run.jsonl.zst", "--json"]).json();
    assert_eq!(
        replayed["windows"],
        json!(count),
        "as many as a replay finds"
    );
    let head = page_header(&page);
    assert_eq!(
        (&head["policy"], &head["source"]),
        (&json!("dio"), &json!("run.jsonl.zst"))
    );
    assert_eq!(head["truth"]["programs"].as_array().unwrap().len(), 4);
    assert!(
        head["truth"]["evicted"]
            .as_array()
            .unwrap()
            .iter()
            .any(|row| row[2].as_u64() > Some(0)),
        "{head}"
    );
    assert_eq!(
        run(dir.path(), &args).code,
        Some(1),
        "not over a file that exists"
    );
    run(dir.path(), &[&args[..], &["--force"]].concat()).ok();
    let Some(mut browser) = Browser::start() else {
        report_unchecked("playback in a browser", "no Chromium");
        return;
    };
    browser.open(&format!("file://{}", dir.path().join("run.html").display()));
    browser.wait_until("window.cachemate && cachemate.store.windows.length");
    assert_eq!(browser.eval("cachemate.store.windows.length"), json!(count));
    assert_eq!(
        browser.eval("document.getElementById('slider').value"),
        json!((count - 1).to_string()),
        "it opens at the end"
    );
    assert_eq!(
        browser.eval("document.querySelectorAll('.chip').length"),
        json!(4)
    );
    assert_eq!(
        browser.eval("document.getElementById('s-truth').hidden"),
        json!(false)
    );
    browser.save_screenshot("recording.png");
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// Does a run of the interval machine stand beside its own account, program by program, and is the account of another
/// run refused by the name that it expects?
#[test]
fn an_interval_run_is_shown_beside_its_own_account() {
    let dir = tempfile::tempdir().unwrap();
    let mut scenario =
        "name = \"two\"\nmachine = \"xeon-x5365-4\"\nsimulator = \"interval\"\nseed = 3\n\
                        length = { ns = 2_000_000_000 }\npolicy = { name = \"dio\" }\n"
            .to_string();
    for program in ["mcf-2006", "povray"] {
        scenario.push_str(&format!("[[programs]]\nprogram = \"{program}\"\n"));
    }
    std::fs::write(dir.path().join("s.toml"), &scenario).unwrap();
    let answer = run(dir.path(), &["sim", "s.toml", "-o", "run.jsonl", "--json"])
        .ok()
        .out;
    std::fs::write(dir.path().join("truth.json"), &answer).unwrap();
    std::fs::write(
        dir.path().join("other.json"),
        answer.replace("povray", "gamess"),
    )
    .unwrap();
    run(
        dir.path(),
        &[
            "replay",
            "run.jsonl",
            "--truth",
            "truth.json",
            "-o",
            "run.html",
        ],
    )
    .ok();
    let head = page_header(&std::fs::read_to_string(dir.path().join("run.html")).unwrap());
    let programs = head["truth"]["programs"].as_array().unwrap();
    assert!(
        programs.len() == 2 && programs[0]["mpki"].as_f64() > programs[1]["mpki"].as_f64(),
        "{head}"
    );
    run(
        dir.path(),
        &[
            "replay",
            "run.jsonl",
            "--truth",
            "other.json",
            "-o",
            "x.html",
        ],
    )
    .exits_with(1, &["found 'gamess', expected 'povray'"]);
}

/// Is a file that is not a recording rejected with the place, and a truncated one shown up to its end?
#[test]
fn a_broken_recording_is_rejected_with_the_place() {
    let dir = recorded_run();
    std::fs::write(dir.path().join("no.jsonl"), "{}\n").unwrap();
    run(dir.path(), &["replay", "no.jsonl", "-o", "no.html"])
        .exits_with(1, &["no.jsonl", "line 1"]);
    assert!(!dir.path().join("no.html").exists());
    run(
        dir.path(),
        &[
            "replay",
            "run.jsonl.zst",
            "--truth",
            "s.toml",
            "-o",
            "x.html",
        ],
    )
    .exits_with(1, &["s.toml", "sim --json"]);
    let content = std::fs::read(dir.path().join("run.jsonl.zst")).unwrap();
    std::fs::write(
        dir.path().join("cut.jsonl.zst"),
        &content[..content.len() - 9],
    )
    .unwrap();
    run(dir.path(), &["replay", "cut.jsonl.zst", "-o", "cut.html"]).ok();
    let page = std::fs::read_to_string(dir.path().join("cut.html")).unwrap();
    assert!(
        page_header(&page)["cut_off"]
            .as_str()
            .unwrap()
            .contains("cut.jsonl.zst")
    );
}
