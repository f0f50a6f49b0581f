//! Is `cachemate top` one print into a pipe?

mod common;

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{command, run};

/// Killed when dropped, so that a failing test leaves nobody behind.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A daemon that observes one sleeping program.
fn daemon(folder: &Path) -> (Ended, Ended) {
    let sleeper = Ended(std::process::Command::new("sleep").arg("600").spawn().unwrap());
    std::fs::write(folder.join("c.toml"), format!("window_ms = 20\n[[rules]]\npid = {}\n", sleeper.0.id())).unwrap();
    let args = ["--quiet", "manage", "--config", "c.toml", "--state-dir", "state", "--socket", "s.sock"];
    let daemon = Ended(command(folder, &args).stdout(Stdio::null()).spawn().unwrap());
    let start = Instant::now();
    while !run(folder, &["status", "--socket", "s.sock"]).out.contains("sleep") {
        assert!(start.elapsed() < Duration::from_secs(120), "the daemon does not answer");
        std::thread::sleep(Duration::from_millis(50));
    }
    (daemon, sleeper)
}

/// Into a pipe: one print without escape sequences; with --json one object per look.
#[test]
fn a_pipe_gets_one_print() {
    let folder = tempfile::tempdir().unwrap();
    let _both = daemon(folder.path());
    let once = run(folder.path(), &["top", "--socket", "s.sock"]).ok();
    assert!(once.out.contains("sleep") && !once.out.contains('\u{1b}'), "{}", once.out);
    assert_eq!(once.out.matches("cachemate 0").count(), 1, "{}", once.out);
    let looks = run(folder.path(), &["top", "--socket", "s.sock", "--json", "-n", "2", "--every", "0.1"]).ok();
    let pids = looks.out.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["pid"].clone());
    assert_eq!(pids.filter(|pid| pid.as_u64().is_some()).count(), 2);
    let nobody = run(folder.path(), &["top", "--socket", "other.sock"]);
    assert_eq!((nobody.code, nobody.out.as_str()), (Some(1), ""));
}
