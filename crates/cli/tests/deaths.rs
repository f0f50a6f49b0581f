//! Other ways for a managed run to end than a signal: disks, control groups, an upgrade. Is everything restored?

mod common;
#[path = "common/managed.rs"]
mod managed;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::not_shown::report_unchecked;
use common::{MANAGE, RESTORE, command, run};
use managed::{
    PATIENCE, TestDaemon, TestPrograms, is_reached_within, journal_gone, send_signal, signals,
};

/// A separate file system on a directory, unmounted when dropped.
struct TestMount(PathBuf);

impl TestMount {
    fn mount_on(dir: PathBuf, args: &[&str]) -> Option<Self> {
        std::fs::create_dir_all(&dir).unwrap();
        mount_at(&dir, args).then_some(TestMount(dir))
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn mount_at(dir: &Path, args: &[&str]) -> bool {
    Command::new("mount")
        .args(args)
        .arg(dir)
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

const TMPFS: [&str; 5] = ["-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs"];

/// If the disk of the journal fills up while a daemon acts, and the daemon is then killed: is everything restored?
#[test]
fn everything_is_restored_after_the_journals_disk_fills_up() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_disk) = TestMount::mount_on(dir.path().join("state"), &TMPFS) else {
        println!("not shown here: a full disk (no right to mount)");
        return;
    };
    let (programs, states_before) = TestPrograms::start_configured(dir.path(), "");
    let mut daemon = TestDaemon::start(dir.path(), false);
    daemon.acts();
    let fill = std::fs::write(dir.path().join("state/fill"), vec![0u8; 1 << 20]);
    assert!(fill.is_err(), "the disk is full");
    std::thread::sleep(Duration::from_millis(300));
    send_signal(daemon.child.id() as i32, signals::KILL);
    daemon.child.wait().unwrap();
    assert!(journal_gone(dir.path()), "the guardian did not finish");
    assert_eq!(programs.states(), states_before);
    // A daemon that starts while the disk is still full changes nothing, and acts once there is space.
    let mut next = TestDaemon::start(dir.path(), false);
    std::thread::sleep(Duration::from_millis(300));
    if !dir.path().join("state/restore.journal").exists() {
        assert_eq!(
            programs.states(),
            states_before,
            "nothing is changed without a journal"
        );
    }
    std::fs::remove_file(dir.path().join("state/fill")).unwrap();
    next.acts();
    next.end();
    assert!(journal_gone(dir.path()));
    assert_eq!(programs.states(), states_before);
}

/// If the disk of the journal becomes read-only while a daemon acts, and the daemon is then killed: is everything
/// restored?
#[test]
fn everything_is_restored_after_the_disk_becomes_read_only() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let Some(_disk) = TestMount::mount_on(state.clone(), &TMPFS) else {
        println!("not shown here: a read-only disk (no right to mount)");
        return;
    };
    let (programs, states_before) = TestPrograms::start_configured(dir.path(), "");
    let mut daemon = TestDaemon::start(dir.path(), false);
    daemon.acts();
    // The journal is open for writing, so its mount cannot be made read-only; another mount over it can.
    let state_text = state.display().to_string();
    assert!(
        mount_at(&state, &["--bind", &state_text]) && mount_at(&state, &["-o", "remount,bind,ro"]),
        "read-only"
    );
    std::thread::sleep(Duration::from_millis(200));
    let guardian = daemon.guardian().unwrap();
    send_signal(daemon.child.id() as i32, signals::KILL);
    daemon.child.wait().unwrap();
    let is_guardian_gone = || !Path::new(&format!("/proc/{guardian}")).exists();
    assert!(
        is_reached_within(PATIENCE, is_guardian_gone),
        "the guardian did not finish"
    );
    assert_eq!(programs.states(), states_before);
    let outcome = run(dir.path(), &RESTORE);
    assert!(
        outcome.code == Some(1) && outcome.out.contains("the journal could not be removed"),
        "{}{}",
        outcome.out,
        outcome.err
    );
    assert!(
        Command::new("umount")
            .arg(&state)
            .status()
            .is_ok_and(|status| status.success()),
        "writable again"
    );
    run(dir.path(), &RESTORE).ok();
    assert_eq!(programs.states(), states_before);
}

/// A group of cgroup v2 whose processes are killed together; it is removed at the end of the test.
struct TestCgroupV2(PathBuf);

impl TestCgroupV2 {
    fn new() -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
        let mount = mounts
            .lines()
            .find(|line| line.split(' ').nth(2) == Some("cgroup2"))?
            .split(' ')
            .nth(1)?;
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let nth = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir = Path::new(mount).join(format!("cachemate-test-{}-{nth}", std::process::id()));
        std::fs::create_dir(&dir).ok()?;
        let group = TestCgroupV2(dir);
        group.0.join("cgroup.kill").exists().then_some(group)
    }
}

impl Drop for TestCgroupV2 {
    fn drop(&mut self) {
        let _ = is_reached_within(Duration::from_secs(5), || {
            std::fs::remove_dir(&self.0).is_ok()
        });
    }
}

/// If the daemon's control group is killed with everything in it: is the guardian outside of it, does it restore the
/// host alone, and is its own group removed afterward?
#[test]
fn the_guardian_outlives_the_daemons_control_group() {
    let Some(group) = TestCgroupV2::new() else {
        report_unchecked(
            "a guardian outside the daemon's control group",
            "no cgroup v2, or no right to it",
        );
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (programs, states_before) = TestPrograms::start_configured(dir.path(), "");
    let mut usual = command(dir.path(), &MANAGE);
    let procs = group.0.join("cgroup.procs");
    // The child is in the group from its first instruction on. SAFETY: one write(2) to a file that is already open; no
    // memory is allocated.
    unsafe {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&procs)
            .unwrap();
        usual.pre_exec(move || std::io::Write::write_all(&mut &file, b"0"));
    }
    let child = usual.stdout(Stdio::null()).spawn().unwrap();
    let mut daemon = TestDaemon {
        child,
        state: dir.path().join("state"),
    };
    daemon.acts();
    let guardian = daemon.guardian().unwrap();
    let is_guardian_apart = || {
        std::fs::read_to_string(&procs)
            .unwrap()
            .lines()
            .all(|pid| pid != guardian.to_string())
    };
    assert!(
        is_reached_within(PATIENCE, is_guardian_apart),
        "the guardian is in the daemon's group"
    );
    let query_status = || run(dir.path(), &["status", "--json", "--socket", "s.sock"]);
    assert!(
        is_reached_within(PATIENCE, || query_status()
            .out
            .contains("\"guardian_isolated\": true")),
        "{}",
        query_status().out
    );
    std::thread::sleep(Duration::from_millis(150));
    std::fs::write(group.0.join("cgroup.kill"), "1").unwrap();
    daemon.child.wait().unwrap();
    assert!(journal_gone(dir.path()), "the guardian did not finish");
    assert_eq!(programs.states(), states_before);
    let own = group.0.with_file_name(format!(
        "{}{guardian}",
        cachemate_linux::safety::guardian::cgroup::PREFIX
    ));
    assert!(
        is_reached_within(PATIENCE, || !own.exists()),
        "{} stays",
        own.display()
    );
}

/// If daemon and guardian are killed at the same instant, through their control group: does `restore` restore the host?
#[test]
fn restore_works_after_the_whole_control_group_is_killed() {
    let Some(group) = TestCgroupV2::new() else {
        println!("not shown here: cgroup.kill (no cgroup v2, or no right to it)");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (programs, states_before) = TestPrograms::start_configured(dir.path(), "");
    let mut daemon = TestDaemon::start(dir.path(), false);
    std::fs::write(group.0.join("cgroup.procs"), daemon.child.id().to_string()).unwrap();
    daemon.acts();
    // If the daemon acted before it was moved, the guardian is in another group.
    let guardian = daemon.guardian().unwrap();
    let _ = std::fs::write(group.0.join("cgroup.procs"), guardian.to_string());
    std::thread::sleep(Duration::from_millis(150));
    std::fs::write(group.0.join("cgroup.kill"), "1").unwrap();
    daemon.child.wait().unwrap();
    assert!(
        dir.path().join("state/restore.journal").exists(),
        "nobody was left to put anything back"
    );
    run(dir.path(), &RESTORE).ok();
    assert!(journal_gone(dir.path()));
    assert_eq!(programs.states(), states_before);
}

/// If the command is replaced by another file while a journal is in force, and the daemon is then killed: does the
/// guardian, which runs the old file, restore the host, and does the new file continue from there?
#[test]
fn the_guardian_restores_after_the_command_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let installed = dir.path().join("cachemate");
    let install_binary = || {
        let beside = dir.path().join("cachemate.new");
        // Copied by another process, because a file that this one has open for writing cannot be executed while a child
        // forked by another test exists.
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_cachemate"))
            .arg(&beside)
            .status()
            .unwrap();
        assert!(copied.success(), "{copied}");
        std::fs::rename(&beside, &installed).unwrap();
    };
    install_binary();
    let (programs, states_before) = TestPrograms::start_configured(dir.path(), "");
    let start_daemon = || {
        let usual = command(dir.path(), &MANAGE);
        let mut own = Command::new(&installed);
        own.args(usual.get_args())
            .current_dir(dir.path())
            .env("CACHEMATE_LOCK_DIR", dir.path());
        own.stdin(Stdio::null()).stdout(Stdio::null());
        TestDaemon {
            child: own.spawn().unwrap(),
            state: dir.path().join("state"),
        }
    };
    for with_guardian in [true, false] {
        let mut daemon = start_daemon();
        daemon.acts();
        install_binary();
        std::thread::sleep(Duration::from_millis(100));
        if !with_guardian {
            daemon
                .guardian()
                .into_iter()
                .for_each(|pid| send_signal(pid, signals::KILL));
        }
        send_signal(daemon.child.id() as i32, signals::KILL);
        daemon.child.wait().unwrap();
        if !with_guardian {
            let mut next = start_daemon();
            next.acts();
            next.end();
        }
        assert!(
            journal_gone(dir.path()),
            "a guardian of the file before: {with_guardian}"
        );
        assert_eq!(programs.states(), states_before);
    }
}
