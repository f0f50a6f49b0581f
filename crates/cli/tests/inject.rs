//! Faults injected into the real command by strace(1), call by call: does `restore` restore the host, or keep the
//! journal and report it?
//!
//! The default run injects into some positions of each call; `CACHEMATE_FAULTS=all` (`make faults`) into every one.

mod common;
#[path = "common/managed.rs"]
mod managed;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cachemate_core::CpuSet;
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::safety::journal::{IntendedChange, Journal, JournalObject, ObjectState};
use common::not_shown::report_unchecked;
use common::{ChildGuard, MANAGE, RESTORE, acting_config, command, run, start_sleeper};
use managed::{PATIENCE, TestPrograms, is_reached_within, send_signal, signals};

/// System calls that a restore makes, with their possible errors.
const FAULTS: [(&str, &[&str]); 9] = [
    ("openat", &["EMFILE", "ENOMEM", "EIO", "EPERM", "EINTR"]),
    ("read", &["EIO", "EINTR"]),
    ("getdents64", &["EIO", "ENOMEM"]),
    ("sched_setaffinity", &["EPERM", "EIO", "EINTR"]),
    ("setpriority", &["EPERM", "EIO"]),
    ("sched_setscheduler", &["EPERM", "EIO"]),
    ("unlink", &["EROFS", "EIO"]),
    ("fsync", &["EIO", "ENOSPC"]),
    ("flock", &["EIO", "EINTR"]),
];

/// Programs that a daemon has changed before it died together with its guardian.
struct LeftPrograms {
    dir: tempfile::TempDir,
    programs: Vec<ChildGuard>,
    journal: Vec<u8>,
    one: CpuSet,
    whole: CpuSet,
}

impl LeftPrograms {
    fn behind_killed_daemon() -> Self {
        let host = LinuxHost::new("/");
        let dir = tempfile::tempdir().unwrap();
        let programs: Vec<ChildGuard> = (0..3).map(|_| start_sleeper()).collect();
        let whole = host.affinity(programs[0].pid()).unwrap();
        let own_cpus: CpuSet = whole.first().into_iter().collect();
        std::fs::create_dir(dir.path().join("state")).unwrap();
        let mut journal =
            Journal::create(&dir.path().join("state"), &host.boot_id().unwrap(), 0).unwrap();
        for program in &programs {
            let (pid, thread) = (program.pid(), host.stat(program.pid()).unwrap().key);
            let intended_change = |object, now, wanted| IntendedChange {
                object,
                current: now,
                target: wanted,
                follows_cpuset: false,
            };
            let cpus_state = |cpus: &CpuSet| ObjectState::Cpus(cpus.clone());
            let changes = [
                intended_change(
                    JournalObject::Affinity { pid, thread },
                    cpus_state(&whole),
                    cpus_state(&own_cpus),
                ),
                intended_change(
                    JournalObject::Nice { pid, thread },
                    ObjectState::Nice(0),
                    ObjectState::Nice(3),
                ),
                intended_change(
                    JournalObject::Policy { pid, thread },
                    ObjectState::Policy(0),
                    ObjectState::Policy(5),
                ),
            ];
            journal.journal_changes(&changes).unwrap();
        }
        let journal = std::fs::read(dir.path().join("state").join(Journal::FILE_NAME)).unwrap();
        LeftPrograms {
            dir,
            programs,
            journal,
            one: own_cpus,
            whole,
        }
    }

    /// Recreates the state at the time of the crash.
    fn again(&self) {
        let host = LinuxHost::new("/");
        for program in &self.programs {
            host.set_affinity(program.pid(), &self.one).unwrap();
            host.set_policy(program.pid(), 5).unwrap();
            host.set_nice(program.pid(), 3).unwrap();
        }
        std::fs::write(self.journal_path(), &self.journal).unwrap();
    }

    fn journal_path(&self) -> std::path::PathBuf {
        self.dir.path().join("state").join(Journal::FILE_NAME)
    }

    fn changed(&self) -> usize {
        let host = LinuxHost::new("/");
        let as_before = |program: &&ChildGuard| {
            let stat = host.stat(program.pid()).unwrap();
            (stat.nice, stat.policy) == (0, 0)
                && host.affinity(program.pid()).unwrap() == self.whole
        };
        self.programs
            .iter()
            .filter(|program| !as_before(program))
            .count()
    }

    /// Number of times that a restore makes this call.
    fn count_calls(&self, call: &str) -> usize {
        self.again();
        let message = self.dir.path().join("calls");
        restore_under_strace(
            self.dir.path(),
            &[
                "-e",
                &format!("trace={call}"),
                "-o",
                message.to_str().unwrap(),
            ],
        );
        std::fs::read_to_string(message).unwrap().lines().count()
    }
}

/// Runs `restore` under strace; returns its exit code and its messages.
fn restore_under_strace(dir: &Path, args: &[&str]) -> (Option<i32>, String) {
    let restore = command(dir, &RESTORE);
    let output = Command::new("strace")
        .args(["-f", "-qq"])
        .args(args)
        .arg(restore.get_program())
        .args(restore.get_args())
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let message =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (output.status.code(), message.concat())
}

fn can_trace() -> bool {
    let works = Command::new("strace")
        .args(["-qq", "-o", "/dev/null", "true"])
        .stderr(Stdio::null())
        .status();
    let works = works.is_ok_and(|status| status.success());
    if !works {
        report_unchecked(
            "faults in the real command",
            "no strace, or not allowed to trace",
        );
    }
    works
}

/// If any call of a restore fails, with any error: is everything restored, or does the journal stay and the exit code
/// report it, and does the next attempt do the rest?
#[test]
fn a_restore_with_a_fault_at_any_call_loses_nothing() {
    if !can_trace() {
        return;
    }
    let is_exhaustive = std::env::var("CACHEMATE_FAULTS").is_ok_and(|text| text == "all");
    let leftover = LeftPrograms::behind_killed_daemon();
    let mut shown = 0;
    for (call, errors) in FAULTS {
        let calls = leftover.count_calls(call);
        let stride = if is_exhaustive { 1 } else { calls / 8 + 1 };
        for (index, nth) in (1..=calls).step_by(stride).enumerate() {
            for (turn, error) in errors.iter().enumerate() {
                if !is_exhaustive && turn != index % errors.len() {
                    continue;
                }
                leftover.again();
                let inject = format!("--inject={call}:error={error}:when={nth}");
                let (code, message) = restore_under_strace(
                    leftover.dir.path(),
                    &["-e", "trace=none", "-o", "/dev/null", &inject],
                );
                let (changed, is_journal_kept) =
                    (leftover.changed(), leftover.journal_path().exists());
                let case = format!(
                    "{inject} of {calls}: exit code {code:?}, {changed} changed, journal kept: {is_journal_kept}: {message}"
                );
                assert!(changed == 0 || is_journal_kept, "{case}");
                assert!(
                    code != Some(0) || changed == 0 && !is_journal_kept,
                    "{case}"
                );
                run(leftover.dir.path(), &RESTORE).ok();
                assert!(
                    leftover.changed() == 0 && !leftover.journal_path().exists(),
                    "the next try, after {case}"
                );
                shown += 1;
            }
        }
    }
    println!("{shown} faults, none of which lost anything");
}

/// System calls that a daemon and its guardian make while they manage, with their possible errors.
const OF_A_DAEMON: [(&str, &[&str]); 14] = [
    ("openat", &["EMFILE", "ENOMEM", "EIO", "EINTR"]),
    ("read", &["EIO", "EINTR"]),
    ("pread64", &["EIO", "ESRCH"]),
    ("getdents64", &["EIO", "ENOMEM"]),
    ("write", &["ENOSPC", "EIO", "EINTR"]),
    ("fdatasync", &["EIO", "ENOSPC"]),
    ("fsync", &["EIO", "EROFS"]),
    ("sched_setaffinity", &["EPERM", "EINVAL"]),
    ("setpriority", &["EPERM", "EACCES"]),
    ("sched_setscheduler", &["EPERM", "EINVAL"]),
    ("sched_getattr", &["EPERM", "ESRCH"]),
    ("pipe2", &["EMFILE"]),
    ("unlink", &["EROFS", "EIO"]),
    ("poll", &["EINTR", "ENOMEM"]),
];

/// Duration of a daemon's life under strace after its first change; if a fault prevents all changes, it is stopped
/// later.
const ACTING: Duration = Duration::from_millis(500);
const NOT_ACTING: Duration = Duration::from_secs(5);

/// Runs a daemon for a while under strace, stops it, and returns its messages.
fn run_daemon_life(dir: &Path, strace: &[String], patience: Duration) -> String {
    let _ = std::fs::remove_dir_all(dir.join("state"));
    let manage = command(dir, &MANAGE);
    let message = std::fs::File::create(dir.join("said")).unwrap();
    let mut tracer = Command::new("strace");
    tracer
        .args(["-f", "-qq"])
        .args(strace)
        .arg(manage.get_program())
        .args(manage.get_args())
        .current_dir(dir);
    tracer.envs(
        manage
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    let mut tracer = tracer
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(message)
        .spawn()
        .unwrap();
    let (start, journal) = (Instant::now(), dir.join("state/restore.journal"));
    let has_ended = |tracer: &mut Child| tracer.try_wait().unwrap().is_some();
    while !journal.exists() && start.elapsed() < patience && !has_ended(&mut tracer) {
        std::thread::sleep(Duration::from_millis(20));
    }
    is_reached_within(ACTING, || has_ended(&mut tracer));
    end(&mut tracer);
    let text = std::fs::read(dir.join("said")).unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

/// Stops the daemon with SIGTERM or, if that has no effect, with SIGKILL, as a service manager does. The tracer ends
/// after its last program, the guardian.
fn end(tracer: &mut Child) {
    let read_children = || {
        std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", tracer.id()))
            .unwrap_or_default()
    };
    let daemon = read_children()
        .split_ascii_whitespace()
        .next()
        .and_then(|pid| pid.parse::<i32>().ok());
    if let Some(daemon) = daemon {
        send_signal(daemon, signals::TERM);
        if !is_reached_within(PATIENCE, || !Path::new(&format!("/proc/{daemon}")).exists()) {
            send_signal(daemon, signals::KILL);
        }
    }
    assert!(
        is_reached_within(PATIENCE, || tracer.try_wait().unwrap().is_some()),
        "the guardian does not end"
    );
}

/// If any call of a daemon or its guardian fails, with any error, while it acts or restores: is everything restored, or
/// does the journal stay and one of the two report it, and does `restore` do the rest?
///
/// Cost: 14 s of CPU, because each of about a hundred system calls gets its own daemon.
#[test]
fn a_daemon_with_a_fault_at_any_call_loses_nothing() {
    if !can_trace() {
        return;
    }
    let is_exhaustive = std::env::var("CACHEMATE_FAULTS").is_ok_and(|text| text == "all");
    let dir = tempfile::tempdir().unwrap();
    let programs = TestPrograms::start();
    std::fs::write(
        dir.path().join("c.toml"),
        acting_config("shake", 20, &programs.parent.id().to_string()),
    )
    .unwrap();
    let states_before = programs.states();
    let journal = dir.path().join("state/restore.journal");
    let mut generator = cachemate_core::SplitMix64::new(15);
    let (mut shown, mut kept_and_said) = (0u32, 0u32);
    let (counted, named) = (
        dir.path().join("calls"),
        OF_A_DAEMON.map(|(call, _)| call).join(","),
    );
    run_daemon_life(
        dir.path(),
        &[
            "-e".into(),
            format!("trace={named}"),
            "-o".into(),
            counted.display().to_string(),
        ],
        12 * NOT_ACTING,
    );
    let counted = std::fs::read_to_string(&counted).unwrap();
    for (call, errors) in OF_A_DAEMON {
        let calls = counted
            .lines()
            .filter(|line| line.contains(&format!(" {call}(")))
            .count() as u64;
        // Calls that only some plans need, or some hosts.
        let rare = matches!(
            call,
            "sched_getattr" | "pread64" | "fsync" | "setpriority" | "sched_setscheduler" | "pipe2"
        );
        assert!(calls > 0 || rare, "no {call} in a daemon's life");
        for turn in 0..if is_exhaustive { 24 } else { 1 } {
            // Most positions are in the first calls of a thread.
            let nth = 1 + generator
                .draw_below(calls.max(1))
                .min(generator.draw_below(calls.max(1)));
            let error = errors[(turn + shown as usize) % errors.len()];
            let inject = format!("--inject={call}:error={error}:when={nth}");
            let message = run_daemon_life(
                dir.path(),
                &[
                    "-e".into(),
                    "trace=none".into(),
                    "-o".into(),
                    "/dev/null".into(),
                    inject.clone(),
                ],
                NOT_ACTING,
            );
            let (as_before, is_journal_kept) =
                (programs.states() == states_before, journal.exists());
            let case = format!(
                "{inject} of {calls}: as before: {as_before}, journal kept: {is_journal_kept}: {message}"
            );
            assert!(as_before || is_journal_kept, "{case}");
            assert!(
                !is_journal_kept || !message.is_empty(),
                "nothing is said of what is left: {case}"
            );
            run(dir.path(), &RESTORE);
            assert!(
                programs.states() == states_before && !journal.exists(),
                "after a reset: {case}"
            );
            (shown, kept_and_said) = (shown + 1, kept_and_said + u32::from(is_journal_kept));
        }
    }
    println!(
        "{shown} faults in a daemon's life, after {kept_and_said} of which the journal stayed and was told"
    );
}
