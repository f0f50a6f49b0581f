//! The directory of colors if other users can tamper with it: which accesses are refused, and which are allowed.

use std::path::{Path, PathBuf};

use cachemate_files::TrustedDir;
use rustix::fs::{CWD, Mode};

use crate::act::colors::{agents, reference_set};
use crate::kernel::{Kernel, LinuxHost};
use std::os::unix::fs::{PermissionsExt, chown, symlink};

const NOBODY: u32 = 65_534;

fn with_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// A root that contains the directory of colors, as the discovery creates it.
fn host_with_colors_dir() -> (tempfile::TempDir, LinuxHost, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join(&reference_set::BASE[1..]);
    std::fs::create_dir_all(base.parent().unwrap()).unwrap();
    with_mode(base.parent().unwrap(), 0o1777);
    TrustedDir::create_anchored(&base).unwrap();
    let host = LinuxHost::new(root.path());
    (root, host, base)
}

fn path_inside(rest: &str) -> PathBuf {
    Path::new(reference_set::BASE).join(rest)
}

/// If another user made the directory, may write to it, or can replace it: is nothing read from it, written to it, or
/// placed in it for a program to preload?
#[test]
fn a_directory_that_others_can_change_is_not_used() {
    let cases: [(&str, &str, fn(&Path)); 4] = [
        ("another user's", "a directory of user 65534", |base| {
            chown(base, Some(NOBODY), None).unwrap()
        }),
        (
            "writable by all users",
            "a directory with mode 0777",
            |base| with_mode(base, 0o777),
        ),
        ("a link", "no directory of its own", |base| {
            let real = base.with_file_name("real");
            std::fs::rename(base, &real).unwrap();
            symlink(&real, base).unwrap();
        }),
        (
            "in a place that all users can write to",
            "mode 0777",
            |base| with_mode(base.parent().unwrap(), 0o777),
        ),
    ];
    for (name, expected, spoil) in cases {
        let (_root, host, base) = host_with_colors_dir();
        for file in ["reference-set", "ledger"] {
            std::fs::write(base.join(file), "x").unwrap();
        }
        std::fs::create_dir_all(base.join("s1-0/5")).unwrap();
        std::fs::write(base.join("s1-0/5/wanted"), "as it was").unwrap();
        if name.starts_with("another") && !rustix::process::geteuid().is_root() {
            crate::skip_test::report_unchecked(&format!("a directory of {name}"), "needs root");
            continue;
        }
        spoil(&base);
        let wanted = path_inside("s1-0/5/wanted");
        for message in [
            host.write(&wanted, "overwritten").unwrap_err().to_string(),
            host.read(&wanted).unwrap_err().to_string(),
            host.list(&path_inside("s1-0")).unwrap_err().to_string(),
            agents::create_session(&base, 1, 1, b"library")
                .unwrap_err()
                .to_string(),
            reference_set::replace_file(&base, "map.json", b"map")
                .unwrap_err()
                .to_string(),
            reference_set::read_id(&base).unwrap_err().to_string(),
        ] {
            assert!(message.contains(expected), "{name}: {message}");
        }
        assert_eq!(
            std::fs::read_to_string(base.join("s1-0/5/wanted")).unwrap(),
            "as it was",
            "{name}"
        );
        assert!(
            !base.join("s1-1").exists() && !base.join("map.json").exists(),
            "{name}"
        );
    }
}

/// Is a link in the directory, at any place in a path, neither read nor written through, and another user's file
/// refused?
#[test]
fn links_and_others_files_in_the_directory_are_refused() {
    let (root, host, base) = host_with_colors_dir();
    let secret = root.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    std::fs::create_dir_all(base.join("s1-0/5")).unwrap();
    symlink(&secret, base.join("s1-0/5/wanted")).unwrap();
    symlink(&secret, base.join("s1-0/5/status")).unwrap();
    symlink(root.path(), base.join("s2-0")).unwrap();
    symlink(&secret, base.join("map.json.new")).unwrap();
    symlink(&secret, base.join("ledger")).unwrap();
    for path in ["s1-0/5/wanted", "s1-0/5/status", "s2-0/secret", "../secret"] {
        assert!(host.read(&path_inside(path)).is_err(), "{path}");
        assert!(
            host.write(&path_inside(path), "overwritten").is_err(),
            "{path}"
        );
    }
    assert!(
        reference_set::replace_file(&base, "map.json", b"map")
            .unwrap_err()
            .to_string()
            .contains("found a link")
    );
    assert!(
        reference_set::FrameLedger::open(&base)
            .unwrap_err()
            .to_string()
            .contains("found a link")
    );
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret");
    std::fs::remove_file(base.join("s1-0/5/wanted")).unwrap();
    rustix::fs::mknodat(
        CWD,
        base.join("s1-0/5/wanted"),
        rustix::fs::FileType::Fifo,
        Mode::RWXU,
        0,
    )
    .unwrap();
    assert!(
        host.read(&path_inside("s1-0/5/wanted"))
            .unwrap_err()
            .to_string()
            .contains("found a FIFO")
    );
    if !rustix::process::geteuid().is_root() {
        crate::skip_test::report_unchecked("another user's file", "needs root");
        return;
    }
    std::fs::write(base.join("s1-0/5/theirs"), "theirs").unwrap();
    chown(base.join("s1-0/5/theirs"), Some(NOBODY), None).unwrap();
    assert!(
        host.read(&path_inside("s1-0/5/theirs"))
            .unwrap_err()
            .to_string()
            .contains("a file of user 65534")
    );
}

/// Is a control file outside the directory not written through if it is a link?
#[test]
fn nothing_is_written_through_a_link() {
    let root = tempfile::tempdir().unwrap();
    let secret = root.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    symlink(&secret, root.path().join("control")).unwrap();
    assert!(
        LinuxHost::new(root.path())
            .write(Path::new("/control"), "overwritten")
            .is_err()
    );
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret");
}

/// In a directory of our own: is a session created with the library, and are its files read and written?
#[test]
fn a_session_is_created_read_and_written_in_our_own_directory() {
    let (_root, host, base) = host_with_colors_dir();
    for file in ["reference-set", "ledger"] {
        std::fs::write(base.join(file), file).unwrap();
    }
    for _ in 0..2 {
        let session = agents::create_session(&base, 7, 0, b"library").unwrap();
        assert_eq!(
            std::fs::read(session.join(agents::LIBRARY)).unwrap(),
            b"library"
        );
        assert_eq!(
            std::fs::read(session.join("reference-set")).unwrap(),
            b"reference-set"
        );
    }
    reference_set::replace_file(&base, "map.json", b"long text").unwrap();
    reference_set::replace_file(&base, "map.json", b"text").unwrap();
    assert_eq!(host.read(&path_inside("map.json")).unwrap(), "text");
    host.write(&path_inside("map.json"), "TE").unwrap();
    assert_eq!(host.read(&path_inside("map.json")).unwrap(), "TExt");
    let mut names = host.list(Path::new(reference_set::BASE)).unwrap();
    names.retain(|name| !name.starts_with('s'));
    assert_eq!(names, ["ledger", "map.json", "reference-set"]);
}
