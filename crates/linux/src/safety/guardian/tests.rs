use super::*;
use crate::fake_tests::FakeHost;
use crate::safety::journal::{IntendedChange, JournalObject, ObjectState};
use crate::safety::restore::RestoreOutcome;

fn cpu_state(list: &str) -> ObjectState {
    ObjectState::Cpus(list.parse().unwrap())
}

fn record(journal: &mut Journal, object: JournalObject, current: ObjectState, target: ObjectState) {
    let change = IntendedChange {
        object,
        current,
        target,
        follows_cpuset: false,
    };
    journal.journal_changes(&[change]).unwrap();
}

/// Threads 5 to 8 were moved to CPU 1, as the journal records; then the daemon and its guardian died.
fn left_behind(dir: &Path) -> FakeHost {
    let host = FakeHost::default();
    let mut journal = Journal::create(dir, "boot", 0).unwrap();
    for tid in 5..9 {
        let object = JournalObject::Affinity {
            pid: tid,
            thread: host.add_thread(tid, tid, 1, "0-3"),
        };
        record(&mut journal, object, cpu_state("0-3"), cpu_state("1"));
        host.change_thread(tid, |thread| thread.cpus = "1".parse().unwrap());
    }
    host
}

fn count_moved(host: &FakeHost) -> usize {
    host.masks().iter().filter(|mask| *mask == "1").count()
}

/// If lines are damaged: is everything in the other lines restored, the loss reported, and the journal quarantined
/// for inspection?
#[test]
fn damage_is_reported_and_the_journal_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    for round in 1..3 {
        let host = left_behind(dir.path());
        let path = dir.path().join(Journal::FILE_NAME);
        let mut bytes = std::fs::read(&path).unwrap();
        let starts: Vec<usize> = (0..bytes.len())
            .filter(|&index| bytes[index] == b'\n')
            .collect();
        [starts[1] + 30, starts[2] + 40]
            .into_iter()
            .for_each(|index| bytes[index] ^= 1);
        std::fs::write(&path, &bytes).unwrap();
        let restored = restore_left_behind(&host, dir.path()).unwrap();
        let damage = restored.damage.unwrap();
        assert_eq!(
            (count_moved(&host), damage.line_numbers.as_slice()),
            (2, &[3, 4][..])
        );
        assert!(damage.to_string().contains("line 3, 4"), "{damage}");
        assert!(restored.removal_error.is_none() && !path.exists());
        assert_eq!(
            std::fs::read(&damage.journal_path).unwrap(),
            bytes,
            "as it was"
        );
        assert_eq!(journal::find_quarantined(dir.path()).unwrap().len(), round);
    }
}

/// If an object cannot be restored yet: does a damaged journal stay in its place for the next try?
#[test]
fn a_damaged_journal_stays_until_every_object_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let host = left_behind(dir.path());
    let path = dir.path().join(Journal::FILE_NAME);
    let mut bytes = std::fs::read(&path).unwrap();
    let first = bytes.iter().position(|&byte| byte == b'\n').unwrap();
    bytes[first + 30] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    host.reads_fail.set(Some(libc::EMFILE));
    let restored = restore_left_behind(&host, dir.path()).unwrap();
    assert!(
        path.exists()
            && restored
                .damage
                .is_some_and(|damage| damage.journal_path == path)
    );
    host.reads_fail.set(None);
    restore_left_behind(&host, dir.path()).unwrap();
    assert_eq!(count_moved(&host), 1);
    assert!(!path.exists());
}

/// Are locks acquired on a read-only file system, so that everything is restored from there; and is it reported that
/// the journal could not be removed?
#[test]
fn everything_is_restored_from_a_read_only_state_directory() {
    let dir = tempfile::tempdir().unwrap();
    let host = left_behind(dir.path());
    drop(DaemonLock::acquire(dir.path()).unwrap().unwrap());
    let Some(_mounted) = ReadOnly::mount(dir.path()) else {
        crate::skip_test::report_unchecked("a read-only state directory", "no right to mount");
        return;
    };
    assert!(
        std::fs::write(dir.path().join("x"), "x").is_err(),
        "read-only"
    );
    let lock = DaemonLock::acquire(dir.path()).unwrap();
    assert!(
        lock.is_some() && DaemonLock::acquire(dir.path()).unwrap().is_none(),
        "one at a time"
    );
    let restored = restore_left_behind(&host, dir.path()).unwrap();
    assert_eq!(count_moved(&host), 0);
    assert!(restored.removal_error.is_some(), "{restored:?}");
}

/// If a lock file was never created and the disk has become read-only: is the directory itself locked?
#[test]
fn the_directory_is_locked_if_no_lock_file_exists() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_mounted) = ReadOnly::mount(dir.path()) else {
        crate::skip_test::report_unchecked("a read-only state directory", "no right to mount");
        return;
    };
    let lock = DaemonLock::acquire(dir.path()).unwrap();
    assert!(lock.is_some() && DaemonLock::acquire(dir.path()).unwrap().is_none());
}

/// A directory bound over itself, read-only.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn mount(dir: &Path) -> Option<Self> {
        let run = |args: &[&str]| {
            let dir = dir.to_str().unwrap();
            Command::new("mount")
                .args(args)
                .arg(dir)
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success())
        };
        let bound = run(&["--bind", dir.to_str()?]);
        let mounted = bound.then(|| ReadOnly(dir.to_path_buf()));
        mounted.filter(|_| run(&["-o", "remount,bind,ro"]))
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// A pipe that contains `text`, with its write end.
fn pipe_with(text: &str) -> (OwnedFd, OwnedFd) {
    let (read, write) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&write, text.as_bytes()).unwrap();
    (read, write)
}

/// Is a goodbye distinguished from an end, whatever heartbeats came before; and is silence noticed after its time, and
/// not before?
#[test]
fn goodbyes_ends_and_silence_are_distinguished() {
    let short = Duration::from_millis(60);
    for (text, heard) in [
        ("", DaemonOutcome::Exited),
        ("100\n", DaemonOutcome::Exited),
        ("5\n7\nrestored\n", DaemonOutcome::AllRestored),
    ] {
        let (read, write) = pipe_with(text);
        drop(write);
        assert_eq!(
            wait_for_daemon_end(&FakeHost::default(), read, short),
            heard,
            "{text:?}"
        );
    }
    for (text, least) in [("", 60), ("1\n", 60), ("junk\n40\n", 200)] {
        let (read, _write) = pipe_with(text);
        let DaemonOutcome::Silent(silence) = wait_for_daemon_end(&FakeHost::default(), read, short)
        else {
            panic!("no silence")
        };
        assert!(
            silence >= Duration::from_millis(least),
            "{text:?}: {silence:?}"
        );
    }
}

/// If one process raises a fence, does the other, which inherited its descriptor, see it?
#[test]
fn a_raised_fence_is_detected() {
    let fence = Fence::new().unwrap();
    assert!(!fence.is_raised());
    let mut child = Command::new("sh");
    // A shell takes the guardian's part: it gets the descriptor by its number.
    let number = fence.as_fd().as_raw_fd();
    child.args(["-c", &format!("printf '\\001' >/proc/self/fd/{number}")]);
    let descriptor = number;
    // SAFETY: fcntl(2) is async-signal-safe; the descriptor is open.
    unsafe {
        child.pre_exec(move || {
            Ok(rustix::io::fcntl_setfd(
                BorrowedFd::borrow_raw(descriptor),
                rustix::io::FdFlags::empty(),
            )?)
        });
    }
    assert!(child.status().unwrap().success());
    assert!(fence.is_raised());
}

/// Is a journal that belongs to another user, or that another user may have written, refused?
#[test]
fn a_journal_that_another_user_may_have_written_is_refused() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    let host = left_behind(dir.path());
    let path = dir.path().join(Journal::FILE_NAME);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();
    assert!(matches!(
        restore_left_behind(&host, dir.path()),
        Err(JournalError::NotOurs { .. })
    ));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let elsewhere = dir.path().join("elsewhere");
    std::fs::rename(&path, &elsewhere).unwrap();
    symlink(&elsewhere, &path).unwrap();
    assert!(restore_left_behind(&host, dir.path()).is_err(), "a link");
    std::fs::remove_file(&path).unwrap();
    assert!(
        Command::new("mkfifo")
            .arg(&path)
            .status()
            .unwrap()
            .success()
    );
    assert!(
        restore_left_behind(&host, dir.path()).is_err(),
        "a pipe, which is not waited for"
    );
    std::fs::remove_file(&path).unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    assert!(
        matches!(
            DaemonLock::acquire(dir.path()),
            Err(JournalError::NotOurs { .. })
        ),
        "others may write to the directory"
    );
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::rename(&elsewhere, &path).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
        let error = restore_left_behind(&host, dir.path())
            .unwrap_err()
            .to_string();
        assert!(error.contains("found owner 65534"), "{error}");
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    } else {
        println!("not shown here: a journal of another user (not root)");
    }
    assert_eq!(count_moved(&host), 4, "nothing was obeyed");
    restore_left_behind(&host, dir.path()).unwrap();
    assert_eq!(count_moved(&host), 0);
}

/// If a restore runs in another PID namespace than the journal's: does it name both, change neither journal nor
/// threads, and does a restore in the journal's own namespace succeed afterwards?
#[test]
fn a_journal_of_another_pid_namespace_is_kept() {
    const DIR: &str = "CACHEMATE_TEST_JOURNAL";
    let dir = tempfile::tempdir().unwrap();
    let host = crate::kernel::LinuxHost::new("/");
    let mut program = Command::new("sleep").arg("100").spawn().unwrap();
    let stat = host.stat(program.id() as i32).unwrap();
    let (tid, affinity_before) = (stat.key.tid, host.affinity(stat.key.tid).unwrap());
    let narrow: cachemate_core::CpuSet = affinity_before.iter().take(1).collect();
    let mut journal = Journal::create(dir.path(), &host.boot_id().unwrap(), 0).unwrap();
    let object = JournalObject::Affinity {
        pid: tid,
        thread: stat.key,
    };
    let cpus = |cpus: &cachemate_core::CpuSet| ObjectState::Cpus(cpus.clone());
    record(&mut journal, object, cpus(&affinity_before), cpus(&narrow));
    host.set_affinity(tid, &narrow).unwrap();
    drop(journal);
    let mut elsewhere = Command::new("unshare");
    elsewhere
        .args(["--pid", "--fork", "--mount-proc"])
        .arg(std::env::current_exe().unwrap())
        .env(DIR, dir.path());
    let part = "safety::guardian::tests::part_of_a_restore_in_another_pid_namespace";
    let output = elsewhere
        .args(["--exact", part, "--ignored", "--nocapture"])
        .output();
    let message = output.map_or_else(
        |error| error.to_string(),
        |output| {
            format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            )
        },
    );
    if message.contains("running 1 test") {
        assert!(message.contains("1 passed"), "{message}");
        assert!(dir.path().join(Journal::FILE_NAME).exists());
        assert_eq!(host.affinity(tid).unwrap(), narrow);
    } else {
        crate::skip_test::report_unchecked("a restore in another PID namespace", message);
    }
    let restored = restore_left_behind(&host, dir.path()).unwrap();
    let affinity_after = host.affinity(tid).unwrap();
    program.kill().unwrap();
    program.wait().unwrap();
    assert_eq!(
        (affinity_after, restored.restored_objects.len()),
        (affinity_before, 1)
    );
    assert!(!dir.path().join(Journal::FILE_NAME).exists());
}

#[test]
#[ignore = "run by the test above, in a PID namespace of its own"]
fn part_of_a_restore_in_another_pid_namespace() {
    let Some(dir) = std::env::var_os("CACHEMATE_TEST_JOURNAL").map(PathBuf::from) else {
        return;
    };
    let error = restore_left_behind(&crate::kernel::LinuxHost::new("/"), &dir).unwrap_err();
    let JournalError::OtherPidNamespace {
        found, expected, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_ne!(found, expected);
    for number in [found, expected] {
        assert!(error.to_string().contains(&number.to_string()), "{error}");
    }
}

/// If the parent of a confined cpuset was narrowed: is everything else restored, and the cpuset reported and kept in
/// the journal? Does a later try restore it, and keep changes that others made since?
#[test]
fn a_cpuset_below_a_narrowed_parent_is_restored_later() {
    let dir = tempfile::tempdir().unwrap();
    let host = left_behind(dir.path());
    let path = Path::new("/cg/batch/cpuset.cpus");
    host.set_file("/proc/mounts", "cgroup /cg cgroup rw,cpuset 0 0\n");
    host.set_file("/cg/cpuset.cpus", "1");
    host.set_file("/cg/batch/cpuset.cpus", "1");
    let object = JournalObject::File { path: path.into() };

    let recovered = journal::read_left_behind(dir.path()).unwrap().unwrap();
    journal::remove_left_behind(dir.path()).unwrap();
    let mut journal = Journal::create(dir.path(), "boot", 0).unwrap();
    record(
        &mut journal,
        object.clone(),
        ObjectState::Text("0-3".into()),
        ObjectState::Text("1".into()),
    );
    for (object, entry) in recovered.entries {
        record(
            &mut journal,
            object,
            entry.original,
            entry.applied_states[0].clone(),
        );
    }
    *host.refused_file.borrow_mut() = Some((path.into(), libc::EACCES));
    for _ in 0..2 {
        let restored = restore_left_behind(&host, dir.path()).unwrap();
        assert_eq!(count_moved(&host), 0, "all threads are restored");
        let failed = restored
            .restored_objects
            .iter()
            .filter_map(|line| match &line.outcome {
                RestoreOutcome::Failed(reason) => {
                    Some((line.object.clone(), reason.contains("parent has CPUs '1'")))
                }
                _ => None,
            });
        assert_eq!(failed.collect::<Vec<_>>(), [(object.clone(), true)]);
        let retained = journal::read_left_behind(dir.path()).unwrap().unwrap();
        assert_eq!(retained.entries.keys().collect::<Vec<_>>(), [&object]);
        assert_eq!(retained.boot_id.as_deref(), Some("boot"));
    }
    *host.refused_file.borrow_mut() = None;
    host.set_file("/cg/cpuset.cpus", "0-3");
    // Another process's choice, which happens to be the mask that we once set.
    host.change_thread(5, |thread| thread.cpus = "1".parse().unwrap());
    restore_left_behind(&host, dir.path()).unwrap();
    assert_eq!(
        (
            host.file_text("/cg/batch/cpuset.cpus").trim(),
            count_moved(&host)
        ),
        ("0-3", 1)
    );
    assert!(!dir.path().join(Journal::FILE_NAME).exists());
}
