//! Tests in which another user attacks: a part of this test program runs as `nobody`.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

pub(crate) const NOBODY: u32 = 65_534;

pub(crate) fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs the ignored test `part` as `nobody`, after `prepare` in the child with all rights, and expects it to pass;
/// false = this user cannot become another one, or `prepare` is not permitted, and the test counts as skipped.
pub(crate) fn run(
    part: &str,
    variables: &[(&str, &str)],
    prepare: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
) -> bool {
    if !rustix::process::geteuid().is_root() {
        crate::skip_test::report_unchecked(part, "needs root to become another user");
        return false;
    }
    // The user `nobody` may have no access to the test program's path, so it is copied, by another process: a file that
    // this process writes may be open in a child of another test, and a file that is open for writing cannot be
    // executed.
    let dir = tempfile::tempdir().unwrap();
    open_to_all(dir.path());
    let program = dir.path().join("part");
    assert!(
        Command::new("cp")
            .arg(std::env::current_exe().unwrap())
            .arg(&program)
            .status()
            .unwrap()
            .success()
    );
    open_to_all(&program);
    let mut command = Command::new(&program);
    command
        .args(["--exact", part, "--ignored", "--nocapture"])
        .envs(variables.iter().copied())
        .current_dir("/");
    let mut prepare = prepare;
    // SAFETY: the callers' preparations and the calls below are system calls on constants.
    unsafe {
        command.pre_exec(move || {
            prepare()?;
            let done = libc::setgroups(0, std::ptr::null()) == 0
                && libc::setgid(NOBODY) == 0
                && libc::setuid(NOBODY) == 0;
            if done {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        });
    }
    match command.output() {
        Ok(output) => {
            let output_text = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            assert!(
                output.status.success() && output_text.contains("1 passed"),
                "{output_text}"
            );
            true
        }
        Err(error) => {
            crate::skip_test::report_unchecked(part, error);
            false
        }
    }
}
