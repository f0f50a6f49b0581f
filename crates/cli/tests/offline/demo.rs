//! Does the demo work without a recorder, and in directories whose names contain blanks?

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The tools that the script needs besides cachemate; Valgrind, which records, is not among them.
const TOOLS: [&str; 17] = [
    "sh", "awk", "basename", "cat", "cp", "date", "dirname", "find", "head", "mkdir", "realpath",
    "rm", "sed", "sort", "tail", "true", "xargs",
];

fn in_path(tool: &str) -> PathBuf {
    let path = std::env::var_os("PATH").expect("a PATH");
    let mut candidates = std::env::split_paths(&path).map(|dir| dir.join(tool));
    candidates
        .find(|file| {
            file.metadata()
                .is_ok_and(|m| m.permissions().mode() & 0o111 != 0)
        })
        .expect(tool)
}

/// A copy of the part of the project's directory that the demo uses, with a name as users choose it.
fn copy_project(dir: &Path) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap();
    let copy = dir.join("my dir/cachemate");
    std::fs::create_dir_all(copy.join("demo")).unwrap();
    std::fs::create_dir_all(copy.join("docs")).unwrap();
    std::fs::create_dir_all(dir.join("my tools")).unwrap();
    std::fs::copy(here.join("demo/run.sh"), copy.join("demo/run.sh")).unwrap();
    std::fs::copy(here.join("docs/json.md"), copy.join("docs/json.md")).unwrap();
    for shared in ["machines", "recordings"] {
        symlink(here.join(shared), copy.join(shared)).unwrap();
    }
    TOOLS
        .iter()
        .for_each(|tool| symlink(in_path(tool), dir.join("my tools").join(tool)).unwrap());
    copy
}

/// Does the demo end with a report on eight shipped programs in a directory with blanks in its path and without
/// Valgrind?
#[test]
fn the_demo_runs_with_blanks_in_the_path_and_no_valgrind() {
    let dir = tempfile::tempdir().unwrap();
    let copy = copy_project(dir.path());
    let output = Command::new("sh")
        .arg(copy.join("demo/run.sh"))
        .env("PATH", dir.path().join("my tools"))
        .env("CACHEMATE", env!("CARGO_BIN_EXE_cachemate"))
        .env_remove("CACHEMATE_RECORDINGS")
        .env("MACHINE", "opteron-2350")
        .env("TIMING", "prior")
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (stdout_text, complained) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{stdout_text}\n{complained}");
    assert!(
        complained.contains("valgrind") && complained.contains("0 of 8 programs"),
        "{complained}"
    );
    assert_eq!(stdout_text.matches("(shipped)").count(), 8, "{stdout_text}");
    assert!(
        stdout_text.contains("not measured: the forecast is for opteron-2350"),
        "{stdout_text}"
    );
    let last = stdout_text.lines().last().unwrap();
    assert!(
        last.ends_with("my dir/cachemate/target/demo/report.html"),
        "{last}"
    );
    assert!(
        std::fs::read_to_string(last).unwrap().contains("<svg"),
        "a page with pictures"
    );
}
