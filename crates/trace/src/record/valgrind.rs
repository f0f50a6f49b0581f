//! Finds Valgrind, and builds the recorder for it if necessary.

use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cachemate_files::{DirAccess, TrustedDir, path_exists};
use rustix::fs::OFlags;

use crate::TraceError;

/// The file by which Valgrind starts the tool.
const TOOL_FILE: &str = "cachemate-amd64-linux";
const SOURCE: &str = include_str!("../../../../recorders/valgrind/cm_main.c");
const MAKEFILE: &str = include_str!("../../../../recorders/valgrind/Makefile");
const LICENSE: &str = include_str!("../../../../recorders/valgrind/LICENSE");

/// The way in which a program can be recorded on this host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RecorderTool {
    /// cachemate's tool records; `library` is the value of `VALGRIND_LIB` for Valgrind.
    Tool {
        /// The output of `valgrind --version`, such as `valgrind-3.24.0`.
        valgrind: String,
        /// The directory with the built tool.
        library: PathBuf,
    },
    /// Valgrind's lackey records: without threads or filter, and some hundred times slower. `reason` states why
    /// cachemate's tool cannot be built.
    Lackey {
        /// The output of `valgrind --version`, such as `valgrind-3.24.0`.
        valgrind: String,
        /// The reason why the tool cannot be built, as text.
        reason: String,
    },
}

fn recorder_error(reason: impl Into<String>, remedy: &str) -> TraceError {
    TraceError::Recorder {
        why: reason.into(),
        remedy: Some(remedy.to_string()),
    }
}

/// Finds the recorder of this host. The tool is built on first use into the user's cache directory
/// (`$XDG_CACHE_HOME/cachemate`, else `~/.cache/cachemate`), and again if its source or Valgrind's version changes;
/// `CACHEMATE_RECORDER` names a directory with a finished tool instead.
///
/// # Errors
/// [`TraceError::Recorder`] with the package to install.
pub fn find_recorder_tool() -> Result<RecorderTool, TraceError> {
    if !cfg!(target_arch = "x86_64") {
        return Err(recorder_error(
            "programs can be recorded on x86-64 only",
            "use the shipped recordings",
        ));
    }
    let version = Command::new("valgrind")
        .arg("--version")
        .stdin(Stdio::null())
        .output();
    let valgrind = match version {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_string()
        }
        Ok(output) => {
            let why = format!(
                "valgrind does not run: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
            return Err(recorder_error(why, "reinstall the package 'valgrind'"));
        }
        Err(error) => {
            let remedy = "install the package 'valgrind' (apt-get install valgrind)";
            return Err(recorder_error(
                format!("valgrind cannot be run: {error}"),
                remedy,
            ));
        }
    };
    if let Some(library) = std::env::var_os("CACHEMATE_RECORDER").map(PathBuf::from) {
        if !path_exists(&library.join(TOOL_FILE)) {
            let why = format!(
                "CACHEMATE_RECORDER: no cachemate-amd64-linux in {}",
                library.display()
            );
            return Err(recorder_error(
                why,
                "build it with make -C recorders/valgrind",
            ));
        }
        check_tool(&library)?;
        return Ok(RecorderTool::Tool { valgrind, library });
    }
    match build_tool(&valgrind) {
        Ok(library) => Ok(RecorderTool::Tool { valgrind, library }),
        Err(because) => Ok(RecorderTool::Lackey {
            valgrind,
            reason: because.to_string(),
        }),
    }
}

/// Checks that nobody but this user and root can change the tool, because Valgrind will execute it.
fn check_tool(library: &Path) -> Result<(), TraceError> {
    TrustedDir::open_anchored(library, DirAccess::ReadOnly)
        .and_then(|dir| dir.open_file(Path::new(TOOL_FILE), OFlags::RDONLY))
        .map(drop)
        .map_err(|error| {
            recorder_error(
                error.to_string(),
                "remove it, or name another cache directory",
            )
        })
}

/// The directory with the tool for this source and this Valgrind, from the cache if it was built
/// before.
fn build_tool(valgrind: &str) -> Result<PathBuf, TraceError> {
    let key = xxhash_rust::xxh3::xxh3_64([SOURCE, MAKEFILE, valgrind].join("\0").as_bytes());
    let cache_dir = cachemate_files::cache_dir();
    let io_error_at =
        |path: &Path, action| TraceError::io_error(&path.display().to_string(), action);
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&cache_dir)
        .map_err(io_error_at(&cache_dir, "create"))?;
    let cache = TrustedDir::open_anchored(&cache_dir, DirAccess::ReadWrite)
        .map_err(io_error_at(&cache_dir, "use"))?;

    let library = cache_dir.join(format!("recorder-{key:016x}"));
    // If Valgrind was removed since, its links do not resolve, and the tool is built again.
    let is_complete =
        || path_exists(&library.join(TOOL_FILE)) && path_exists(&library.join("default.supp"));
    if is_complete() {
        check_tool(&library)?;
        return Ok(library);
    }

    // One process builds while the others wait, so that no tool is replaced while it is in use.
    let lock_path = cache_dir.join("recorder.lock");
    let lock = cache
        .open_file(Path::new("recorder.lock"), OFlags::RDWR | OFlags::CREATE)
        .map_err(io_error_at(&lock_path, "create"))?;
    let lock_result = rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive);
    lock_result.map_err(|error| io_error_at(&lock_path, "lock")(error.into()))?;
    if is_complete() {
        check_tool(&library)?;
        return Ok(library);
    }
    let work_dir = tempfile::Builder::new()
        .prefix("building-")
        .tempdir_in(&cache_dir)
        .map_err(io_error_at(&cache_dir, "write in"))?;
    for (name, content) in [
        ("cm_main.c", SOURCE),
        ("Makefile", MAKEFILE),
        ("LICENSE", LICENSE),
    ] {
        let path = work_dir.path().join(name);
        cachemate_files::replace(&path, content.as_bytes()).map_err(io_error_at(&path, "write"))?;
    }
    let make_result = Command::new("make")
        .arg("-C")
        .arg(work_dir.path())
        .stdin(Stdio::null())
        .output();
    let remedy = "install the packages 'valgrind', 'gcc', 'libc6-dev' and 'make'";
    let output = make_result.map_err(|error| {
        recorder_error(
            format!("the recorder cannot be built: make: {error}"),
            remedy,
        )
    })?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = stderr.lines().take(6).collect();
        return Err(recorder_error(
            format!("the recorder cannot be built: {}", lines.join(" / ")),
            remedy,
        ));
    }
    let build_dir = work_dir.path().join("build");
    std::fs::set_permissions(&build_dir, std::fs::Permissions::from_mode(0o700))
        .map_err(io_error_at(&build_dir, "protect"))?;
    if path_exists(&library) {
        std::fs::remove_dir_all(&library).map_err(io_error_at(&library, "remove the stale"))?;
    }
    std::fs::rename(&build_dir, &library).map_err(io_error_at(&library, "create"))?;
    Ok(library)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Is a tool refused that another user could have made or can change, and a link to one as well?
    #[test]
    fn a_tool_that_another_user_can_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join("recorder-1");
        std::fs::create_dir(&library).unwrap();
        std::fs::write(library.join(TOOL_FILE), "#!/bin/sh\n").unwrap();
        let set_mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set_mode(&library, 0o755);
        check_tool(&library).unwrap();
        symlink(&library, dir.path().join("link")).unwrap();
        assert!(check_tool(&dir.path().join("link")).is_err());
        set_mode(&library, 0o777);
        assert!(check_tool(&library).is_err());
        set_mode(&library, 0o755);

        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(library.join(TOOL_FILE), Some(65_534), None).unwrap();
            assert!(check_tool(&library).is_err(), "a file of another user");
            std::os::unix::fs::chown(&library, Some(65_534), None).unwrap();
            assert!(check_tool(&library).is_err(), "a directory of another user");
        }
    }
}
