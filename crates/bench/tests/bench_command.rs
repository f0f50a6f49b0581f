//! `cachemate-bench` from outside.

use std::process::Command;

/// Is a command that is not there told by its path and by who makes it, before anything is measured?
#[test]
fn a_missing_command_is_told_by_its_path() {
    let mut bench = Command::new(env!("CARGO_BIN_EXE_cachemate-bench"));
    let ran = bench.args(["live", "--only", "overhead", "--cachemate", "/nowhere/cachemate"]).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{said}");
    assert!(said.contains("/nowhere/cachemate: is not there") && said.contains("--cachemate"), "{said}");
    assert!(ran.stdout.is_empty(), "{}", String::from_utf8_lossy(&ran.stdout));
}
