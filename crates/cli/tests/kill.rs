//! `kill -9` at random moments of a managed run: is every program restored?
//!
//! `CACHEMATE_KILLS` sets the number of moments (`make kill`: 200); the default is a few.

mod common;
#[path = "common/managed.rs"]
mod managed;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cachemate_core::CpuSet;
use cachemate_linux::kernel::{Kernel, LinuxHost};
use common::not_shown::report_unchecked;
use common::{ChildGuard, TestCgroup, acting_config, make_cgroup, run, start_sleeper};
use managed::{
    PATIENCE, TestDaemon, TestPrograms, is_reached_within, journal_gone, send_signal, signals,
    thread_state,
};

/// Held by each test: thousands of forks let process numbers wrap, so a daemon of another test, whose rule names the
/// number of a program that has ended, could manage a program of this one.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Waits for the other tests of this file; one that failed does not fail the next.
fn wait_for_turn() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum KillTarget {
    Daemon,
    Guardian,
    Both,
}
#[derive(Clone, Copy, PartialEq, Debug)]
enum RestorePath {
    /// Only the guardian.
    Guardian,
    Reset,
    Restart,
}

const CASES: [(KillTarget, RestorePath); 7] = [
    (KillTarget::Daemon, RestorePath::Guardian),
    (KillTarget::Both, RestorePath::Reset),
    (KillTarget::Guardian, RestorePath::Reset),
    (KillTarget::Both, RestorePath::Restart),
    (KillTarget::Daemon, RestorePath::Reset),
    (KillTarget::Guardian, RestorePath::Restart),
    (KillTarget::Daemon, RestorePath::Restart),
];

fn restore_after_kill(
    dir: &Path,
    programs: &TestPrograms,
    killed: KillTarget,
    then: RestorePath,
    wait: Duration,
) {
    let mut daemon = TestDaemon::start(dir, false);
    daemon.acts();
    std::thread::sleep(wait);
    let (own, guardian) = (daemon.child.id() as i32, daemon.guardian());
    if killed != KillTarget::Daemon {
        guardian
            .into_iter()
            .for_each(|pid| send_signal(pid, signals::KILL));
    }
    if killed == KillTarget::Guardian {
        std::thread::sleep(Duration::from_millis(60));
        daemon.end();
    } else {
        send_signal(own, signals::KILL);
        let _ = daemon.child.wait();
    }
    match then {
        RestorePath::Guardian => assert!(journal_gone(dir), "the guardian did not finish"),
        RestorePath::Reset => {
            run(dir, &["restore", "--state-dir", "state"]).ok();
        }
        RestorePath::Restart => {
            let mut next = TestDaemon::start(dir, true);
            let socket = dir.join("s.sock");
            next.until("restarted", |_| {
                std::os::unix::net::UnixStream::connect(&socket).is_ok()
            });
            next.end();
        }
    }
    assert!(journal_gone(dir), "a journal is left");
    let _ = programs;
}

/// A group of the host with a program in it that the daemon confines to one CPU; empty if there are no cpusets.
struct Confinement(Option<(ChildGuard, TestCgroup, String)>);

impl Confinement {
    fn make() -> Self {
        match make_cgroup() {
            Ok((group, path)) => {
                let sleeper = start_sleeper();
                std::fs::write(group.0.join("cgroup.procs"), sleeper.pid().to_string()).unwrap();
                Confinement(Some((sleeper, group, path)))
            }
            Err(reason) => {
                report_unchecked("kills while a real group is confined", reason);
                Confinement(None)
            }
        }
    }

    fn configuration(&self) -> String {
        let Some((_, group, path)) = &self.0 else {
            return String::new();
        };
        let whole = std::fs::read_to_string(group.0.join("cpuset.cpus")).unwrap();
        let first = whole.trim().parse::<CpuSet>().unwrap().first().unwrap();
        format!("[[cpusets]]\ncgroup = \"{path}\"\ncpus = \"{first}\"\n")
    }

    fn text(&self) -> Option<String> {
        Some(std::fs::read_to_string(self.0.as_ref()?.1.0.join("cpuset.cpus")).unwrap())
    }

    fn mask(&self) -> Option<CpuSet> {
        Some(
            LinuxHost::new("/")
                .affinity(self.0.as_ref()?.0.pid())
                .unwrap(),
        )
    }
}

/// If either process is killed at any time, whichever of them restores the host: are affinities, nice values, all
/// scheduling classes and cpusets restored?
#[test]
fn everything_is_restored_whichever_process_is_killed() {
    let _turn = wait_for_turn();
    let kills: usize = std::env::var("CACHEMATE_KILLS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(CASES.len());
    let dir = tempfile::tempdir().unwrap();
    let confined = Confinement::make();
    let (programs, states_before) =
        TestPrograms::start_configured(dir.path(), &confined.configuration());
    let group = (confined.text(), confined.mask());
    let mut generator = cachemate_core::SplitMix64::new(1);
    let start = Instant::now();
    for round in 0..kills {
        let (killed, then) = CASES[round % CASES.len()];
        let wait = Duration::from_micros(generator.next_u64() % 300_000);
        restore_after_kill(dir.path(), &programs, killed, then, wait);
        let states_after = programs.states();
        assert_eq!(
            states_after, states_before,
            "round {round}: {killed:?} killed after {wait:?}, then {then:?}"
        );
        let now = (confined.text(), confined.mask());
        assert_eq!(
            now, group,
            "round {round}: the confined group, {killed:?} killed after {wait:?}, then {then:?}"
        );
        // Children created under the daemon's masks and turns must have the original settings of their parent, too.
        let want = &states_before[&(programs.parent.id() as i32)];
        for (pid, name) in programs.family() {
            if states_before.contains_key(&pid) {
                continue;
            }
            let Some(now) = thread_state(pid) else {
                continue;
            };
            assert_eq!(
                (&now.cpus, now.scheduling),
                (&want.cpus, want.scheduling),
                "round {round}: {name} ({pid}), {killed:?}, {then:?}"
            );
        }
    }
    println!(
        "{kills} kills, all as before, in {:.0} s",
        start.elapsed().as_secs_f64()
    );
}

/// Programs that are started by double forks in sessions of their own (`daemon`, `setsid`, `nohup`), so that each is a
/// child of process 1 at once: half of them match a rule, half do not.
struct Orphans {
    marker: String,
    starter: ChildGuard,
}

impl Orphans {
    /// A shell that starts `count` of them once it reads a line.
    fn start(dir: &Path, count: usize) -> Self {
        // The name and the number occur in no other program of the host.
        let marker = format!("9{:09}", std::process::id());
        let program = dir.join(format!("slp{}", std::process::id()));
        std::fs::copy("/bin/sleep", &program).unwrap();
        let script = format!(
            "read go; i=0; while [ $i -lt {count} ]; do (setsid {} {marker} &); (setsid sleep {marker} &); \
             i=$((i+2)); done; exec sleep 1000",
            program.display()
        );
        let mut shell = std::process::Command::new("sh");
        shell
            .args(["-c", &script])
            .stdin(std::process::Stdio::piped());
        let starter = ChildGuard(shell.spawn().unwrap());
        Orphans { marker, starter }
    }

    fn go(&mut self) {
        use std::io::Write;
        writeln!(self.starter.0.stdin.as_mut().unwrap()).unwrap();
    }

    fn pids(&self) -> Vec<i32> {
        let line = format!("\0{}\0", self.marker);
        let is_orphan = |pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|text| text.ends_with(&line))
        };
        let all = LinuxHost::new("/").processes().unwrap();
        all.into_iter().filter(is_orphan).collect()
    }
}

impl Drop for Orphans {
    fn drop(&mut self) {
        let _ = self.starter.0.kill();
        for pid in self.pids() {
            // SAFETY: a signal to a process that this test started.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }
}

/// After every kind of end, while programs are started by double forks under masks and pauses of ours: does no process
/// that is younger than the journal have a state that we set?
#[test]
fn no_orphan_keeps_a_state_that_we_set() {
    let _turn = wait_for_turn();
    let kills: Option<usize> = std::env::var("CACHEMATE_KILLS")
        .ok()
        .and_then(|text| text.parse().ok());
    let orphan_count = if kills.is_some() { 1_000 } else { 60 };
    let mut generator = cachemate_core::SplitMix64::new(2);
    let mut changed_count = 0;
    for (policy, window_ms) in [("shake", 10), ("random", 50)] {
        for end in ["exit", "daemon", "guardian", "both"] {
            let dir = tempfile::tempdir().unwrap();
            let mut orphans = Orphans::start(dir.path(), orphan_count);
            let starter = orphans.starter.pid();
            let want = thread_state(starter).unwrap();
            let config = acting_config(policy, window_ms, &starter.to_string())
                + &format!("[[rules]]\ncommand = \"slp{}\"\n", std::process::id());
            std::fs::write(dir.path().join("c.toml"), config).unwrap();
            let mut daemon = TestDaemon::start(dir.path(), false);
            if policy == "shake" {
                daemon.acts();
            } else {
                std::thread::sleep(Duration::from_millis(300));
            }
            orphans.go();
            is_reached_within(PATIENCE, || orphans.pids().len() >= orphan_count / 2);
            std::thread::sleep(Duration::from_micros(generator.next_u64() % 100_000));

            let is_changed = |pid: &i32| thread_state(*pid).is_some_and(|state| state != want);
            changed_count += orphans.pids().iter().filter(|pid| is_changed(pid)).count();
            let own = daemon.child.id() as i32;
            if end == "guardian" || end == "both" {
                daemon
                    .guardian()
                    .into_iter()
                    .for_each(|pid| send_signal(pid, signals::KILL));
            }
            if end == "daemon" || end == "both" {
                send_signal(own, signals::KILL);
                let _ = daemon.child.wait();
            } else {
                daemon.end();
            }
            if end == "both" {
                run(dir.path(), &["restore", "--state-dir", "state"]).ok();
            }
            assert!(
                journal_gone(dir.path()),
                "{policy}, {end}: a journal is left"
            );

            is_reached_within(PATIENCE, || orphans.pids().len() == orphan_count);
            let left: Vec<_> = orphans
                .pids()
                .into_iter()
                .filter_map(|pid| Some((pid, thread_state(pid)?)))
                .filter(|(_, state)| *state != want)
                .collect();
            assert!(
                left.is_empty(),
                "{policy}, {end}: {} of {} keep a state, such as {:?}",
                left.len(),
                orphans.pids().len(),
                left.first()
            );
            println!("{policy}, {end}: {} orphans, 0 left", orphans.pids().len());
        }
    }
    assert!(
        changed_count > 0,
        "none had a state of ours before the ends"
    );
}

/// If a daemon is stopped: is everything restored after a while, and does the resumed daemon change nothing until it
/// has a new journal and a new guardian?
#[test]
fn a_stopped_daemon_is_fenced_off() {
    let _turn = wait_for_turn();
    let dir = tempfile::tempdir().unwrap();
    let (programs, states_before) = TestPrograms::start_configured(dir.path(), "");
    let mut daemon = TestDaemon::start(dir.path(), false);
    daemon.acts();
    std::thread::sleep(Duration::from_millis(200));
    let (own, first) = (daemon.child.id() as i32, daemon.guardian());
    send_signal(own, signals::STOP);
    assert!(
        is_reached_within(PATIENCE, || !dir
            .path()
            .join("state/restore.journal")
            .exists()),
        "not put back"
    );
    assert_eq!(programs.states(), states_before);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(programs.states(), states_before);
    send_signal(own, signals::CONT);
    let journal = dir.path().join("state/restore.journal");
    let changed = is_reached_within(PATIENCE, || {
        let changed = programs.states() != states_before;
        assert!(!changed || journal.exists(), "changed without a journal");
        changed
    });
    assert!(changed, "it does not act again");
    let second = daemon.guardian();
    assert!(
        second.is_some() && second != first,
        "{first:?}, then {second:?}"
    );
    daemon.end();
    assert!(journal_gone(dir.path()));
    assert_eq!(programs.states(), states_before);
}

/// If one user runs two daemons over the same programs, with any state directories: does only one act, and is
/// everything restored?
#[test]
fn two_daemons_do_not_act_at_once() {
    let _turn = wait_for_turn();
    let dir = tempfile::tempdir().unwrap();
    let (programs, states_before) = TestPrograms::start_configured(dir.path(), "");
    let mut first = TestDaemon::start(dir.path(), false);
    first.acts();
    run(
        dir.path(),
        &[
            "--quiet",
            "manage",
            "--config",
            "c.toml",
            "--state-dir",
            "other",
            "--socket",
            "other.sock",
        ],
    )
    .exits_with(1, &["another cachemate acts"]);
    first.end();
    assert!(journal_gone(dir.path()));
    assert_eq!(programs.states(), states_before);
}
