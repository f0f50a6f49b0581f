//! Default paths: system directories for root, the user's own for other users (XDG base directories).

use std::path::{Path, PathBuf};

use anyhow::Context;
pub use cachemate_files::cache_dir;
use cachemate_files::{path_from_variable, path_variable};
use cachemate_linux::safety::actuation_lock::LockPaths;

/// Configuration of the shipped unit's daemon.
pub const SYSTEM_CONFIG_FILE: &str = "/etc/cachemate/cachemate.toml";

/// The default configuration file. `CACHEMATE_*` variables override the defaults; options and the configuration
/// override both.
pub fn config_file() -> PathBuf {
    path_variable("CACHEMATE_CONFIG").unwrap_or_else(|| match is_root() {
        true => PathBuf::from(SYSTEM_CONFIG_FILE),
        false => path_from_variable("XDG_CONFIG_HOME", ".config").join("cachemate/cachemate.toml"),
    })
}

/// Directory of the restore journal and the locks. It must survive a crash, but need not survive a reboot.
pub fn state_dir() -> PathBuf {
    path_variable("CACHEMATE_STATE_DIR").unwrap_or_else(|| match is_root() {
        true => PathBuf::from("/var/lib/cachemate"),
        false => path_from_variable("XDG_STATE_HOME", ".local/state").join("cachemate"),
    })
}

/// The daemon's default socket.
pub fn default_socket() -> PathBuf {
    path_variable("CACHEMATE_SOCKET").unwrap_or_else(|| {
        match (is_root(), std::env::var_os("XDG_RUNTIME_DIR")) {
            (true, _) => PathBuf::from("/run/cachemate/cachemate.sock"),
            (false, Some(dir)) => PathBuf::from(dir).join("cachemate.sock"),
            (false, None) => state_dir().join("cachemate.sock"),
        }
    })
}

/// Locks of the right to act: one per user, and root's announcement to all. `CACHEMATE_LOCK_DIR` names another
/// directory for both.
///
/// # Errors
/// The directory is missing and cannot be created.
pub fn actuation_lock_paths() -> anyhow::Result<LockPaths> {
    const ROOT_LOCK_DIR: &str = "/run/cachemate";
    let user = rustix::process::geteuid().as_raw();
    let user_dir = PathBuf::from(format!("/run/user/{user}"));
    let dir = path_variable("CACHEMATE_LOCK_DIR").unwrap_or_else(|| match is_root() {
        true => PathBuf::from(ROOT_LOCK_DIR),
        false if user_dir.is_dir() => user_dir,
        false => path_from_variable("XDG_STATE_HOME", ".local/state").join("cachemate"),
    });
    create_public_dir(&dir)?;
    let root_announcement = path_variable("CACHEMATE_LOCK_DIR")
        .unwrap_or_else(|| PathBuf::from(ROOT_LOCK_DIR))
        .join("root-acts");
    Ok(LockPaths {
        lock: dir.join(format!("cachemate-acting-{user}.lock")),
        root_announcement,
    })
}

/// Is the effective user root?
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Creates a directory that only its owner can read.
///
/// # Errors
/// It does not exist and cannot be created.
pub fn create_private_dir(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("{}: the directory cannot be created", path.display()))
}

/// Creates a directory in which every user may look up names and only its owner may change them, whatever the umask is.
/// One that exists keeps its mode.
///
/// # Errors
/// It does not exist and cannot be created.
pub fn create_public_dir(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let creation_error = || format!("{}: the directory cannot be created", path.display());
    if path.as_os_str().is_empty() || cachemate_files::path_exists(path) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        create_public_dir(parent)?;
    }
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(()),
        outcome => outcome.with_context(creation_error)?,
    }
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(path, mode).with_context(creation_error)
}

/// The numeric id of a user of this host, from `/etc/passwd`.
pub fn find_user_id(name: &str) -> Option<u32> {
    let users =
        cachemate_files::read_text_limited(std::path::Path::new("/etc/passwd"), 64 << 20).ok()?;
    let mut entries = users
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>());
    entries
        .find(|fields| fields.first() == Some(&name))?
        .get(2)?
        .parse()
        .ok()
}
