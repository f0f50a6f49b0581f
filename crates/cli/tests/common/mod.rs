//! Runs the command as a script would.
#![allow(dead_code)] // each test file uses its part

#[path = "../../../linux/src/skip_test.rs"]
pub mod not_shown;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

pub struct CommandResult {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl CommandResult {
    #[track_caller]
    pub fn ok(self) -> CommandResult {
        assert_eq!(self.code, Some(0), "stderr: {}", self.err);
        self
    }
    /// Does the command end with this code, and say these words on standard error?
    #[track_caller]
    pub fn exits_with(&self, code: i32, words: &[&str]) {
        let is_said = words.iter().all(|words| self.err.contains(words));
        assert!(
            self.code == Some(code) && is_said,
            "{:?} and not {code} with {words:?}: {}",
            self.code,
            self.err
        );
    }
    #[track_caller]
    pub fn json(self) -> Value {
        let output = self.ok();
        assert_eq!(output.err, "", "--json leaves standard error alone");
        serde_json::from_str(&output.out).expect("one JSON object and nothing else")
    }
}

pub fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(
        std::env::var_os("CACHEMATE_TESTED")
            .unwrap_or_else(|| env!("CARGO_BIN_EXE_cachemate").into()),
    );
    command.args(args).current_dir(dir).stdin(Stdio::null());
    command
        .env_remove("NO_COLOR")
        .env("CACHEMATE_RECORDINGS", dir.join("recordings"));
    command.env("CACHEMATE_CACHE_DIR", dir.join("cache"));
    // Neither a journal nor a configuration of the host concerns a test.
    command.env("CACHEMATE_STATE_DIR", dir.join("state"));
    // Tests act on their own programs concurrently.
    command.env("CACHEMATE_LOCK_DIR", dir);
    command
}

pub fn run(dir: &Path, args: &[&str]) -> CommandResult {
    let output = command(dir, args).output().expect("the command starts");
    let decode_text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    CommandResult {
        code: output.status.code(),
        out: decode_text(output.stdout),
        err: decode_text(output.stderr),
    }
}

/// The command with these arguments, run in this directory by another program.
pub fn run_by(dir: &Path, runner: &[&str], args: &[&str]) -> Command {
    let own = command(dir, args);
    let mut run = Command::new(runner[0]);
    run.args(&runner[1..])
        .arg(own.get_program())
        .args(own.get_args())
        .current_dir(dir);
    run.envs(
        own.get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    run.stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    run
}

/// The command with these arguments under this umask.
pub fn run_with_umask(dir: &Path, umask: &str, args: &[&str]) -> Command {
    let shell = format!("umask {umask}; exec \"$0\" \"$@\"");
    run_by(dir, &["sh", "-c", &shell], args)
}

/// A raw trace of these addresses.
pub fn write_raw_trace(
    dir: &Path,
    name: &str,
    addresses: impl IntoIterator<Item = u64>,
) -> PathBuf {
    let bytes: Vec<u8> = addresses.into_iter().flat_map(u64::to_le_bytes).collect();
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A lackey text of `rounds` sweeps over `lines` lines with `gap` plain instructions before each load.
pub fn lackey_text(lines: u64, rounds: u64, gap: u64) -> String {
    let mut text = String::new();
    for _ in 0..rounds {
        for line in 0..lines {
            for index in 0..=gap {
                text.push_str(&format!("I  {:x},4\n", 0x40_0000 + 4 * index));
            }
            text.push_str(&format!(" L {:x},8\n", 0x1000_0000 + 64 * line));
        }
    }
    text
}

/// A child that is killed when dropped, so that a failing test leaves no process behind.
pub struct ChildGuard(pub Child);

impl ChildGuard {
    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Arguments of a restore in a test's directory.
pub const RESTORE: [&str; 3] = ["restore", "--state-dir", "state"];

/// A program that does nothing.
pub fn start_sleeper() -> ChildGuard {
    ChildGuard(
        Command::new("sleep")
            .arg("600")
            .stdin(Stdio::null())
            .spawn()
            .unwrap(),
    )
}

/// The configuration of a daemon whose policy moves everything below a process.
pub fn acting_config(policy: &str, window_ms: u32, pid: &str) -> String {
    format!(
        "mode = \"act\"\nwindow_ms = {window_ms}\n\
         [policy]\nname = \"{policy}\"\n[rollback]\nenabled = false\n[[rules]]\npid = {pid}\n"
    )
}

/// Arguments with which a daemon is started in a test's directory.
pub const MANAGE: [&str; 8] = [
    "--quiet",
    "manage",
    "--config",
    "c.toml",
    "--state-dir",
    "state",
    "--socket",
    "s.sock",
];

/// A daemon with this configuration.
pub fn start_daemon(dir: &Path, config: &str) -> ChildGuard {
    std::fs::write(dir.join("c.toml"), config).unwrap();
    ChildGuard(command(dir, &MANAGE).stdout(Stdio::null()).spawn().unwrap())
}

/// Stops a daemon with SIGTERM, after which it restores the host.
#[track_caller]
pub fn stop(daemon: &mut ChildGuard) {
    Command::new("kill")
        .args(["-TERM", &daemon.0.id().to_string()])
        .status()
        .unwrap();
    assert!(daemon.0.wait().unwrap().success());
}

/// The first status of that daemon that meets the condition, with this polling interval and timeout.
#[track_caller]
pub fn status_when(
    dir: &Path,
    subject: &str,
    (every, within): (Duration, Duration),
    is_wanted: impl Fn(&Value) -> bool,
) -> Value {
    let start = Instant::now();
    let mut last = Value::Null;
    while start.elapsed() < within {
        let outcome = run(dir, &["status", "--json", "--socket", "s.sock"]);
        if outcome.code == Some(0) {
            last = serde_json::from_str(&outcome.out).unwrap();
            if is_wanted(&last) {
                return last;
            }
        }
        std::thread::sleep(every);
    }
    panic!("{subject} did not come: {last}");
}

/// Waits until the condition holds; the limit is far longer than needed, so that a hang is an error.
#[track_caller]
pub fn until(subject: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(
            start.elapsed() < Duration::from_secs(600),
            "{subject} did not come about in 10 minutes"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A cgroup below the root of one hierarchy, removed when dropped.
pub struct TestCgroup(pub PathBuf);

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// A group in the host's cpuset hierarchy with all CPUs, or the reason why there is none.
pub fn make_cgroup() -> Result<(TestCgroup, String), String> {
    use cachemate_linux::act::cpusets::{Cpusets, find_hierarchy};
    use cachemate_linux::kernel::LinuxHost;
    let mount = match find_hierarchy(&LinuxHost::new("/")) {
        Some(Cpusets::V1(mount) | Cpusets::V2(mount)) => mount,
        None => return Err("no cpuset controller".to_string()),
    };
    let name = format!("cachemate-test-{}", std::process::id());
    let dir = mount.join(&name);
    std::fs::create_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let group = TestCgroup(dir.clone());
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let whole = std::fs::read_to_string(mount.join(file))
            .or_else(|_| std::fs::read_to_string(mount.join(format!("{file}.effective"))));
        let whole = whole.map_err(|error| format!("{file}: {error}"))?;
        std::fs::write(dir.join(file), whole)
            .map_err(|error| format!("{}/{file}: {error}", dir.display()))?;
    }
    Ok((group, format!("/{name}")))
}

/// Writes a program for the interval machine: one endless phase, with its fills in a part of a 4 MiB cache and in the
/// whole cache.
pub fn interval_program(dir: &Path, name: &str, part: (u64, f64), whole: f64) {
    let point_toml = |(size, fills): (u64, f64)| {
        format!(
            "[[phases.points]]\nsize_bytes = {size}.0\ncycles_per_instr = {}\ndemand_fills_per_instr = {fills}\n\
             memory_stall_cycles_per_instr = {}\n",
            0.8 + 100.0 * fills,
            100.0 * fills
        )
    };
    let points = point_toml(part) + &point_toml((4 << 20, whole));
    let text = format!("name = \"{name}\"\n[[phases]]\nreferences_per_instr = 0.03\n{points}");
    std::fs::write(dir.join(format!("{name}.toml")), text).unwrap();
}

/// The content of a page's script element.
pub fn page_element<'a>(page: &'a str, id: &str) -> &'a str {
    let (_, rest) = page.split_once(&format!("\" id=\"{id}\">")).unwrap();
    rest.split_once("</script>").unwrap().0
}

/// The windows in a page, as any user of the file can unpack them.
pub fn page_windows(page: &str) -> Value {
    let mut unpack = Command::new("sh");
    unpack
        .args(["-c", "base64 -d | gzip -d"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut unpack = unpack.spawn().unwrap();
    let mut input = unpack.stdin.take().unwrap();
    let text = page_element(page, "windows").to_string();
    let writer = std::thread::spawn(move || input.write_all(text.as_bytes()).unwrap());
    let output = unpack.wait_with_output().unwrap();
    writer.join().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}
