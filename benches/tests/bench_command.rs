//! `cachemate-bench` from outside.

use std::process::Command;

/// Is a missing command reported with its path and the way to build it, before anything is measured?
#[test]
fn a_missing_command_is_reported_with_its_path() {
    let mut bench = Command::new(env!("CARGO_BIN_EXE_cachemate-bench"));
    let output = bench
        .args([
            "live",
            "--only",
            "overhead",
            "--cachemate",
            "/nowhere/cachemate",
        ])
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(
        message.contains("/nowhere/cachemate: is not there") && message.contains("--cachemate"),
        "{message}"
    );
    assert!(
        output.stdout.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}
