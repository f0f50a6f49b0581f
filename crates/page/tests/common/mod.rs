//! A real browser, driven over a pipe by its debugging protocol, and a client that is not a browser.
#![allow(dead_code)] // each test file uses its part

pub mod http;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use cachemate_page::{CacheHeader, PageHeader, SHAPE};
use serde_json::{Value, json};

const PROGRAMS: [&str; 4] = [
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
];
const SWITCHES: &str = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run \
                        --disable-component-update --disable-sync --remote-debugging-pipe";
/// Time after which a hung browser is ended; no test needs longer.
const SECONDS: &str = "400";

/// One page of a browser.
pub struct Browser {
    child: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    session: Option<String>,
    next: u64,
    /// Uncaught errors of the page, and violations of its content policy.
    pub complaints: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts the browser; `None` if Chromium is not installed.
    pub fn start() -> Option<Self> {
        let program = PROGRAMS.iter().find(|name| {
            let paths = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&paths).any(|dir| dir.join(name).is_file())
        })?;
        let profile = tempfile::tempdir().unwrap();
        // The browser reads commands from descriptor 3 and responds on 4, each terminated by a zero byte.
        let line = format!(
            "exec {program} {SWITCHES} \"--user-data-dir=$0\" about:blank 3<&0 4>&1 >&2 </dev/null"
        );
        let mut command = Command::new("timeout");
        command
            .args(["-k", "5", SECONDS, "sh", "-c", &line])
            .arg(profile.path());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        let commands = child.stdin.take();
        let answers = BufReader::new(child.stdout.take()?);
        let complaints = Vec::new();
        let mut browser = Browser {
            child,
            commands,
            answers,
            session: None,
            next: 0,
            complaints,
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attached)["sessionId"]
            .as_str()
            .unwrap()
            .to_string();
        browser.session = Some(session);
        for domain in ["Page", "Runtime", "Log", "Accessibility", "Performance"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    #[track_caller]
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut command = json!({"id": self.next, "method": method, "params": params});
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        let pipe = self.commands.as_mut().unwrap();
        pipe.write_all(format!("{command}\0").as_bytes()).unwrap();
        pipe.flush().unwrap();

        loop {
            let mut text = Vec::new();
            self.answers.read_until(0, &mut text).unwrap();
            assert_eq!(text.pop(), Some(0), "the browser ended during {method}");
            let answer: Value = serde_json::from_slice(&text).unwrap();
            if answer["id"] == json!(self.next) {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            self.record_complaint(&answer);
        }
    }

    fn record_complaint(&mut self, event: &Value) {
        let params = &event["params"];
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => {
                self.complaints.push(params["exceptionDetails"].to_string())
            }
            Some("Log.entryAdded") if params["entry"]["level"] == "error" => {
                self.complaints.push(params["entry"]["text"].to_string());
            }
            _ => {}
        }
    }

    /// The value of an expression in the page, awaited.
    #[track_caller]
    pub fn eval(&mut self, script: &str) -> Value {
        let parameters = json!({"expression": script, "awaitPromise": true, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", parameters);
        assert!(
            answer["exceptionDetails"].is_null(),
            "{script}: {}",
            answer["exceptionDetails"]
        );
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    #[track_caller]
    pub fn wait_until(&mut self, script: &str) {
        let start = Instant::now();
        while self.eval(&format!("Boolean({script})")) != json!(true) {
            assert!(start.elapsed() < Duration::from_secs(60), "never: {script}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    #[track_caller]
    pub fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
        self.wait_until("document.readyState === 'complete'");
    }

    pub fn set_viewport(&mut self, width: u32, height: u32, scheme: &str) {
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
        self.eval("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))");
    }

    /// Presses a key, given by the browser's name for it.
    pub fn press_key(&mut self, key: &str) {
        let text = if key == " " { " " } else { "" };
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            let code = match key {
                "Escape" => 27,
                " " => 32,
                "End" => 35,
                "Home" => 36,
                "ArrowRight" => 39,
                other => panic!("{other}: no code is known"),
            };
            let event =
                json!({"type": kind, "key": key, "text": text, "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Stores a screenshot in the directory that `CACHEMATE_PICTURES` names, for inspection.
    pub fn save_screenshot(&mut self, name: &str) {
        let Some(dir) = std::env::var_os("CACHEMATE_PICTURES") else {
            return;
        };
        let screenshot = self.call(
            "Page.captureScreenshot",
            json!({"captureBeyondViewport": false}),
        );
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(screenshot["data"].as_str().unwrap())
            .unwrap();
        std::fs::write(Path::new(&dir).join(name), bytes).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Without its pipe the browser ends by itself; `timeout` would end it otherwise.
        self.commands = None;
        let start = Instant::now();
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if start.elapsed() > Duration::from_secs(10) {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The header of a run on this number of caches.
pub fn page_header(caches: u32) -> PageHeader {
    let cache = |cache| CacheHeader {
        cache,
        level: "L3".into(),
        cpus: format!("{}-{}", 8 * cache, 8 * cache + 7),
        size_bytes: Some(32 << 20),
        ways: Some(16),
        colors: None,
    };

    PageHeader {
        shape: SHAPE,
        version: "1".into(),
        source: "run.jsonl".into(),
        run: String::new(),
        policy: "auto".into(),
        parameters: String::new(),
        guarded: true,
        cpus: 8 * caches,
        caches: (0..caches).map(cache).collect(),
        truth: None,
        cut_off: None,
    }
}
