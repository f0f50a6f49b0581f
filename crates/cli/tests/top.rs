//! Is `cachemate top` a screen on a terminal, and a single print into a pipe?

mod common;

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{ChildGuard, command, run, start_daemon, start_sleeper, until};

/// A daemon that observes one sleeping program.
fn start_observing_daemon(dir: &Path) -> (ChildGuard, ChildGuard) {
    let sleeper = start_sleeper();
    let daemon = start_daemon(
        dir,
        &format!("window_ms = 20\n[[rules]]\npid = {}\n", sleeper.pid()),
    );
    until("the program and the evidence level in the status", || {
        let status = run(dir, &["status", "--socket", "s.sock"]).out;
        status.contains("sleep") && !status.contains("being calibrated")
    });
    (daemon, sleeper)
}

/// Tests of `top` on a terminal.
mod screen {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::sync::{Arc, Mutex};

    use super::*;

    /// The two ends of a new terminal of 120 columns and 30 lines.
    fn open_terminal() -> (File, OwnedFd) {
        let (mut ours, mut theirs) = (-1, -1);
        let size = libc::winsize {
            ws_row: 30,
            ws_col: 120,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: two integers are filled in; the size is read; name and settings may be null (openpty(3)).
        let opened = unsafe {
            libc::openpty(
                &raw mut ours,
                &raw mut theirs,
                std::ptr::null_mut(),
                std::ptr::null(),
                &raw const size,
            )
        };
        assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: both descriptors are new and have no other owner.
        unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
    }

    /// Input, output and local modes: raw mode changes all three.
    fn terminal_modes(terminal: &impl AsRawFd) -> [libc::tcflag_t; 3] {
        // SAFETY: all zeros is a valid termios, which the call fills in.
        let mut modes: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is an open terminal, and the structure is live.
        let status = unsafe { libc::tcgetattr(terminal.as_raw_fd(), &raw mut modes) };
        assert_eq!(status, 0);
        [modes.c_iflag, modes.c_oflag, modes.c_lflag]
    }

    /// `top` on a separate terminal, with its output so far.
    struct TopOnTerminal {
        top: ChildGuard,
        ours: File,
        theirs: OwnedFd,
        seen: Arc<Mutex<Vec<u8>>>,
        before: [libc::tcflag_t; 3],
    }

    impl TopOnTerminal {
        fn start(dir: &Path) -> Self {
            let (ours, theirs) = open_terminal();
            let before = terminal_modes(&theirs);
            let terminal_stdio = || Stdio::from(theirs.try_clone().unwrap());
            let mut command = command(dir, &["top", "--socket", "s.sock", "--interval", "0.1"]);
            command
                .env("TERM", "xterm")
                .stdin(terminal_stdio())
                .stdout(terminal_stdio())
                .stderr(terminal_stdio());
            let top = ChildGuard(command.spawn().unwrap());
            let seen = Arc::new(Mutex::new(Vec::new()));
            let (mut reads, into) = (ours.try_clone().unwrap(), seen.clone());
            // Ends with an error once the other end is closed.
            std::thread::spawn(move || {
                let mut part = [0u8; 4096];
                while let Ok(many @ 1..) = reads.read(&mut part) {
                    into.lock().unwrap().extend_from_slice(&part[..many]);
                }
            });
            TopOnTerminal {
                top,
                ours,
                theirs,
                seen,
                before,
            }
        }

        fn text(&self) -> String {
            String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
        }

        fn until(&mut self, words: &str) {
            let start = Instant::now();
            while !self.text().contains(words) {
                assert!(
                    start.elapsed() < Duration::from_secs(180),
                    "'{words}' was not drawn: {:?}",
                    self.text()
                );
                assert!(
                    self.top.0.try_wait().unwrap().is_none(),
                    "it ended by itself: {:?}",
                    self.text()
                );
                std::thread::sleep(Duration::from_millis(20));
            }
        }

        /// Checks that it has ended and left the terminal unchanged.
        fn gave_back(mut self, how: &str) {
            let code = self.top.0.wait().unwrap().code();
            let (start, leave_sequence) = (Instant::now(), "\u{1b}[?1049l");
            while !self.text().contains(leave_sequence) && start.elapsed() < Duration::from_secs(10)
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            let text = self.text();
            assert_eq!(code, Some(0), "{how}: {text:?}");
            let (entered, given_back) = (text.find("\u{1b}[?1049h"), text.rfind(leave_sequence));
            assert!(entered.is_some() && entered < given_back, "{how}: {text:?}");
            assert_eq!(
                terminal_modes(&self.theirs),
                self.before,
                "{how}: line modes"
            );
        }
    }

    /// Is the screen taken, the program shown, and the terminal restored after q, Ctrl-C and a signal alike?
    #[test]
    fn top_takes_the_screen_and_restores_the_terminal() {
        let dir = tempfile::tempdir().unwrap();
        let _both = start_observing_daemon(dir.path());
        for how in ["q", "\u{3}", "SIGTERM"] {
            let mut shown = TopOnTerminal::start(dir.path());
            shown.until("sleep");
            assert_ne!(
                terminal_modes(&shown.theirs),
                shown.before,
                "keys come one by one"
            );
            // Blanks are skipped by cursor movement rather than written. A busy host may have neither counters nor
            // probes.
            let states_evidence =
                shown.text().contains("measured") || shown.text().contains("neither");
            assert!(
                shown.text().contains("observing") && states_evidence,
                "{:?}",
                shown.text()
            );
            match how {
                "SIGTERM" => {
                    let pid = rustix::process::Pid::from_child(&shown.top.0);
                    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
                }
                keys => shown.ours.write_all(keys.as_bytes()).unwrap(),
            }
            shown.gave_back(how);
        }
    }

    /// If the daemon ends: does the screen report it and continue?
    #[test]
    fn top_reports_that_the_daemon_ended_and_continues() {
        let dir = tempfile::tempdir().unwrap();
        let (daemon, _sleeper) = start_observing_daemon(dir.path());
        let mut shown = TopOnTerminal::start(dir.path());
        shown.until("sleep");
        drop(daemon);
        shown.until("s.sock");
        shown.ours.write_all(b"q").unwrap();
        shown.gave_back("q without a daemon");
    }
}

/// Into a pipe: is there one print without escape sequences, and with --json one object per iteration?
#[test]
fn a_pipe_gets_one_print_without_escape_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let _both = start_observing_daemon(dir.path());
    let once = run(dir.path(), &["top", "--socket", "s.sock"]).ok();
    assert!(
        once.out.contains("sleep") && !once.out.contains('\u{1b}'),
        "{}",
        once.out
    );
    assert_eq!(once.out.matches("cachemate 0").count(), 1, "{}", once.out);
    assert!(!once.out.contains('\u{202f}'), "{}", once.out);
    let looks = run(
        dir.path(),
        &[
            "top",
            "--socket",
            "s.sock",
            "--json",
            "-n",
            "2",
            "--interval",
            "0.1",
        ],
    )
    .ok();
    let pids = looks
        .out
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["pid"].clone());
    assert_eq!(pids.filter(|pid| pid.as_u64().is_some()).count(), 2);
    let named = run(
        dir.path(),
        &["explain", "sleep", "--socket", "s.sock", "--json"],
    )
    .json();
    assert!(
        named["pid"].is_number() && named["tasks"][0]["name"] == "sleep",
        "{named}"
    );
    run(dir.path(), &["explain", "sleeep", "--socket", "s.sock"])
        .exits_with(1, &["did you mean 'sleep'"]);
    let nobody = run(dir.path(), &["top", "--socket", "other.sock"]);
    assert_eq!((nobody.code, nobody.out.as_str()), (Some(1), ""));
}
