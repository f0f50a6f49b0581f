use super::*;
use crate::fake_tests::FakeHost;
use crate::journal::{Change, Object, State};

fn cpus(list: &str) -> State {
    State::Cpus(list.parse().unwrap())
}

/// Threads 5 to 8 were moved to CPU 1, as the journal says; then everybody died.
fn left_behind(dir: &Path) -> FakeHost {
    let host = FakeHost::default();
    let mut journal = Journal::create(dir, "boot", 0).unwrap();
    for tid in 5..9 {
        let object = Object::Affinity { pid: tid, thread: host.thread(tid, tid, 1, "0-3") };
        journal.before(&[Change { object, now: cpus("0-3"), wanted: cpus("1") }]).unwrap();
        host.threads.borrow_mut().get_mut(&tid).unwrap().cpus = "1".parse().unwrap();
    }
    host
}

fn moved(host: &FakeHost) -> usize {
    host.threads.borrow().values().filter(|thread| thread.cpus.to_string() == "1").count()
}

/// Damaged lines: is what can be read put back, the loss told, and the journal kept for people to look at?
#[test]
fn damage_is_told_and_the_journal_put_aside() {
    let dir = tempfile::tempdir().unwrap();
    for round in 1..3 {
        let host = left_behind(dir.path());
        let path = dir.path().join(Journal::FILE_NAME);
        let mut bytes = std::fs::read(&path).unwrap();
        let starts: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] == b'\n').collect();
        [starts[1] + 30, starts[2] + 40].into_iter().for_each(|at| bytes[at] ^= 1);
        std::fs::write(&path, &bytes).unwrap();
        let left = restore_left_behind(&host, dir.path()).unwrap();
        let damage = left.damage.unwrap();
        assert_eq!((moved(&host), damage.lines.as_slice()), (2, &[3, 4][..]));
        assert!(damage.to_string().contains("line 3, 4"), "{damage}");
        assert!(left.stays.is_none() && !path.exists());
        assert_eq!(std::fs::read(&damage.journal).unwrap(), bytes, "as it was");
        assert_eq!(journal::aside(dir.path()).unwrap().len(), round);
    }
}

/// Where something cannot be put back yet: does a damaged journal stay in its place, for the next try?
#[test]
fn damage_does_not_end_what_is_still_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let host = left_behind(dir.path());
    let path = dir.path().join(Journal::FILE_NAME);
    let mut bytes = std::fs::read(&path).unwrap();
    let first = bytes.iter().position(|&byte| byte == b'\n').unwrap();
    bytes[first + 30] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    host.reads_fail.set(Some(libc::EMFILE));
    let left = restore_left_behind(&host, dir.path()).unwrap();
    assert!(path.exists() && left.damage.is_some_and(|damage| damage.journal == path));
    host.reads_fail.set(None);
    restore_left_behind(&host, dir.path()).unwrap();
    assert_eq!(moved(&host), 1);
    assert!(!path.exists());
}

/// Are locks taken where nothing can be written, so that everything is put back from there; and is it told that the journal
/// could not be removed?
#[test]
fn a_read_only_state_folder_keeps_nobody_from_being_put_back() {
    let dir = tempfile::tempdir().unwrap();
    let host = left_behind(dir.path());
    drop(Lock::daemon(dir.path()).unwrap().unwrap());
    let Some(_mounted) = ReadOnly::mount(dir.path()) else {
        crate::not_shown::not_shown("a read-only state folder", "no right to mount");
        return;
    };
    assert!(std::fs::write(dir.path().join("x"), "x").is_err(), "read-only");
    let lock = Lock::daemon(dir.path()).unwrap();
    assert!(lock.is_some() && Lock::daemon(dir.path()).unwrap().is_none(), "one at a time");
    let left = restore_left_behind(&host, dir.path()).unwrap();
    assert_eq!(moved(&host), 0);
    assert!(left.stays.is_some(), "{left:?}");
}

/// Locks that never came to be, on a disk that has become read-only: is the folder itself locked?
#[test]
fn without_a_lock_file_the_folder_is_locked() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_mounted) = ReadOnly::mount(dir.path()) else {
        crate::not_shown::not_shown("a read-only state folder", "no right to mount");
        return;
    };
    let lock = Lock::daemon(dir.path()).unwrap();
    assert!(lock.is_some() && Lock::daemon(dir.path()).unwrap().is_none());
}

/// A folder bound over itself, read-only.
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
