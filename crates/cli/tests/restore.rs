//! `cachemate restore` and the guardian under obstacles: descriptors, the disk, a damaged journal.

mod common;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cachemate_core::CpuSet;
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::safety::journal::{IntendedChange, Journal, JournalObject, ObjectState};
use common::not_shown::report_unchecked;
use common::{ChildGuard, MANAGE, RESTORE, acting_config, run, start_sleeper};

fn affinity_of(pid: i32) -> CpuSet {
    LinuxHost::new("/").affinity(pid).unwrap()
}

/// Moves programs to their first CPU, like a daemon that crashes right afterward; the journal is in `state`.
fn moved_by_one_who_died(dir: &Path, programs: &[ChildGuard]) {
    let (host, state) = (LinuxHost::new("/"), dir.join("state"));
    std::fs::create_dir_all(&state).unwrap();
    let mut journal = Journal::create(&state, &host.boot_id().unwrap(), 0).unwrap();
    for program in programs {
        let thread = host.stat(program.pid()).unwrap().key;
        let object = JournalObject::Affinity {
            pid: program.pid(),
            thread,
        };
        let first_cpu: CpuSet = affinity_of(program.pid()).first().into_iter().collect();
        let (now, wanted) = (
            ObjectState::Cpus(affinity_of(program.pid())),
            ObjectState::Cpus(first_cpu.clone()),
        );
        let change = IntendedChange {
            object,
            current: now,
            target: wanted,
            follows_cpuset: false,
        };
        journal.journal_changes(&[change]).unwrap();
        host.set_affinity(program.pid(), &first_cpu).unwrap();
    }
}

/// The programs below a shell: twelve, and forty more on request.
struct ShellPrograms(ChildGuard);

impl ShellPrograms {
    fn start() -> Self {
        let spawn_sleepers = |count| format!("for n in $(seq {count}); do sleep 1000 & done");
        let script = format!(
            "{}; read more; {}; echo there; wait",
            spawn_sleepers(12),
            spawn_sleepers(40)
        );
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let crowd = ShellPrograms(ChildGuard(shell.spawn().unwrap()));
        while crowd.children().len() < 12 {
            std::thread::sleep(Duration::from_millis(5));
        }
        crowd
    }
    fn children(&self) -> Vec<i32> {
        let host = LinuxHost::new("/");
        let is_own_child = |pid: &i32| {
            host.stat(*pid)
                .is_ok_and(|stat| stat.parent == self.0.pid() && stat.name == "sleep")
        };
        host.processes()
            .unwrap()
            .into_iter()
            .filter(is_own_child)
            .collect()
    }
    fn grow(&mut self) {
        self.0.0.stdin.take().unwrap().write_all(b"more\n").unwrap();
        while self.children().len() < 52 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for ShellPrograms {
    fn drop(&mut self) {
        let host = LinuxHost::new("/");
        for pid in self.children() {
            // Only processes that are still children of the shell.
            if host.stat(pid).is_ok_and(|stat| stat.parent == self.0.pid()) {
                let _ = Command::new("kill").arg(pid.to_string()).status();
            }
        }
    }
}

/// If a daemon runs out of descriptors while it has moved programs: are all of them restored in the end?
#[test]
fn everything_is_restored_after_descriptors_run_out() {
    let whole = affinity_of(std::process::id() as i32);
    if whole.count() < 2 {
        report_unchecked("programs that are moved", "one CPU");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut crowd = ShellPrograms::start();
    let first = crowd.children();
    std::fs::write(
        dir.path().join("c.toml"),
        acting_config("shake", 20, &crowd.0.pid().to_string()),
    )
    .unwrap();
    let mut limited = Command::new("sh");
    limited
        .args([
            "-c",
            "ulimit -n 48; exec \"$0\" \"$@\"",
            env!("CARGO_BIN_EXE_cachemate"),
        ])
        .args(MANAGE);
    limited.env("CACHEMATE_LOCK_DIR", dir.path());
    let mut daemon = ChildGuard(
        limited
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let start = Instant::now();
    while first.iter().all(|&pid| affinity_of(pid) == whole) {
        assert!(
            start.elapsed() < Duration::from_secs(180),
            "nobody was moved"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    crowd.grow();
    std::thread::sleep(Duration::from_millis(600));
    Command::new("kill")
        .arg(daemon.pid().to_string())
        .status()
        .unwrap();
    let ended = daemon.0.wait().unwrap();
    let start = Instant::now();
    let journal = dir.path().join("state/restore.journal");
    while journal.exists() && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let moved = crowd
        .children()
        .into_iter()
        .filter(|&pid| affinity_of(pid) != whole)
        .count();
    assert!(
        moved == 0 && !journal.exists(),
        "{moved} stay moved; the daemon ended with {ended}"
    );
    assert_eq!(ended.code(), Some(0));
}

/// If the journal has unreadable lines: is the rest restored, and is the loss reported, by the exit code as well, until
/// a user has handled it?
#[test]
fn a_damaged_journal_is_reported_by_the_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let programs: Vec<ChildGuard> = (0..4).map(|_| start_sleeper()).collect();
    let affinity_before = affinity_of(programs[0].pid());
    moved_by_one_who_died(dir.path(), &programs);
    let path = dir.path().join("state/restore.journal");
    let mut bytes = std::fs::read(&path).unwrap();
    let second = bytes.iter().position(|&byte| byte == b'\n').unwrap() + 40;
    bytes[second] ^= 4;
    std::fs::write(&path, bytes).unwrap();
    let outcome = run(dir.path(), &RESTORE);
    assert_eq!(outcome.code, Some(1), "{}", outcome.err);
    assert!(
        outcome.out.contains("line 2 cannot be read"),
        "{}",
        outcome.out
    );
    assert!(
        programs[1..]
            .iter()
            .all(|program| affinity_of(program.pid()) == affinity_before)
    );
    let again = run(dir.path(), &RESTORE);
    assert!(
        again.code == Some(1) && again.out.contains("quarantined earlier"),
        "{}",
        again.out
    );
    std::fs::remove_file(dir.path().join("state/damaged.journal.1")).unwrap();
    run(dir.path(), &RESTORE).ok();
}

/// If a state directory became read-only: does `restore` restore the host, and report that the journal stays?
#[test]
fn restore_works_with_a_read_only_state_directory() {
    let dir = tempfile::tempdir().unwrap();
    let programs: Vec<ChildGuard> = (0..3).map(|_| start_sleeper()).collect();
    let affinity_before = affinity_of(programs[0].pid());
    moved_by_one_who_died(dir.path(), &programs);
    let state = dir.path().join("state");
    let mount_state = |args: &[&str]| {
        let mount_status = Command::new("mount")
            .args(args)
            .arg(&state)
            .stderr(Stdio::null())
            .status();
        mount_status.is_ok_and(|status| status.success())
    };
    if !mount_state(&["--bind", state.to_str().unwrap()]) {
        report_unchecked("a read-only state directory", "no right to mount");
        return;
    }
    let read_only = mount_state(&["-o", "remount,bind,ro"]);
    let outcome = run(dir.path(), &RESTORE);
    Command::new("umount").arg(&state).status().unwrap();
    assert!(read_only);
    assert!(
        programs
            .iter()
            .all(|program| affinity_of(program.pid()) == affinity_before),
        "{}{}",
        outcome.out,
        outcome.err
    );
    assert!(
        outcome.code == Some(1) && outcome.out.contains("the journal could not be removed"),
        "{}{}",
        outcome.out,
        outcome.err
    );
    run(dir.path(), &RESTORE).ok();
    assert!(!state.join("restore.journal").exists());
}

/// If a journal belongs to another user, or names a file that cachemate never changes: is nothing in it applied, and is
/// this reported?
#[test]
fn a_forged_journal_is_not_applied_and_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [start_sleeper()];
    let affinity_before = affinity_of(programs[0].pid());
    moved_by_one_who_died(dir.path(), &programs);
    let journal = dir.path().join("state/restore.journal");
    if Command::new("chown")
        .arg("65534")
        .arg(&journal)
        .stderr(Stdio::null())
        .status()
        .unwrap()
        .success()
    {
        let outcome = run(dir.path(), &RESTORE);
        assert_eq!(outcome.code, Some(1));
        assert!(outcome.out.contains("found owner 65534"), "{}", outcome.out);
        Command::new("chown")
            .arg("0")
            .arg(&journal)
            .status()
            .unwrap();
    } else {
        println!("not shown here: a journal of another user (not root)");
    }
    run(dir.path(), &RESTORE).ok();
    assert_eq!(affinity_of(programs[0].pid()), affinity_before);
    let secret = dir.path().join("secret");
    std::fs::write(&secret, "one's own").unwrap();
    let mut made_up = Journal::create(
        &dir.path().join("state"),
        &LinuxHost::new("/").boot_id().unwrap(),
        0,
    )
    .unwrap();
    let (now, wanted) = (
        ObjectState::Text("another's".into()),
        ObjectState::Text("one's own".into()),
    );
    made_up
        .journal_changes(&[IntendedChange {
            object: JournalObject::File {
                path: secret.clone(),
            },
            current: now,
            target: wanted,
            follows_cpuset: false,
        }])
        .unwrap();
    let outcome = run(dir.path(), &RESTORE);
    assert!(
        outcome.code == Some(1) && outcome.out.contains("not restored"),
        "{}{}",
        outcome.out,
        outcome.err
    );
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "one's own");
}

/// Is a journal found in the state directory of the configuration, and in that of the last daemon, without an option,
/// and is the exit code 0 only if none is left?
#[test]
fn a_journal_is_found_wherever_the_last_daemon_left_it() {
    let dir = tempfile::tempdir().unwrap();
    for place in ["configuration", "lock"] {
        let home = dir.path().join(place);
        std::fs::create_dir_all(home.join("empty")).unwrap();
        let programs = [start_sleeper()];
        let whole = affinity_of(programs[0].pid());
        moved_by_one_who_died(&home, &programs);
        let state = home.join("state");
        let (config, lock_dir) = (home.join("c.toml"), home.join("locks"));
        std::fs::create_dir(&lock_dir).unwrap();
        if place == "lock" {
            let user = rustix::process::geteuid().as_raw();
            let lock = lock_dir.join(format!("cachemate-acting-{user}.lock"));
            std::fs::write(lock, state.display().to_string()).unwrap();
        } else {
            let text = format!("state_dir = \"{}\"\n", state.display());
            std::fs::write(&config, text).unwrap();
        }
        let restore = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_cachemate"));
            command
                .args(["restore"])
                .env("CACHEMATE_STATE_DIR", home.join("empty"));
            command
                .env("CACHEMATE_CONFIG", &config)
                .env("CACHEMATE_LOCK_DIR", &lock_dir);
            command.output().unwrap()
        };
        let output = restore();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success() && text.contains("1 restored"),
            "{place}: {text}"
        );
        assert_eq!(affinity_of(programs[0].pid()), whole, "{place}");
        assert!(!state.join(Journal::FILE_NAME).exists());

        std::fs::write(state.join(Journal::FILE_NAME), "no journal\n").unwrap();
        std::fs::set_permissions(
            state.join(Journal::FILE_NAME),
            std::os::unix::fs::PermissionsExt::from_mode(0o666),
        )
        .unwrap();
        assert_eq!(
            restore().status.code(),
            Some(1),
            "{place}: a journal is left"
        );
    }
}
