//! Default paths: system directories for root, the user's own for other users (XDG base directories).

use std::path::{Path, PathBuf};

use anyhow::Context;
use cachemate_linux::safety::actuation_lock::LockPaths;

/// The default configuration file. `CACHEMATE_*` variables override the defaults; options and the configuration
/// override both.
pub(crate) fn config_file() -> PathBuf {
    path_variable("CACHEMATE_CONFIG").unwrap_or_else(|| match is_root() {
        true => PathBuf::from("/etc/cachemate/cachemate.toml"),
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

/// Directory of data that can be measured again.
pub fn cache_dir() -> PathBuf {
    path_variable("CACHEMATE_CACHE_DIR").unwrap_or_else(|| match is_root() {
        true => PathBuf::from("/var/cache/cachemate"),
        false => path_from_variable("XDG_CACHE_HOME", ".cache").join("cachemate"),
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
pub(crate) fn actuation_lock_paths() -> anyhow::Result<LockPaths> {
    const ROOT_LOCK_DIR: &str = "/run/cachemate";
    let user = rustix::process::geteuid().as_raw();
    let user_dir = PathBuf::from(format!("/run/user/{user}"));
    let dir = path_variable("CACHEMATE_LOCK_DIR").unwrap_or_else(|| match is_root() {
        true => PathBuf::from(ROOT_LOCK_DIR),
        false if user_dir.is_dir() => user_dir,
        false => self::path_from_variable("XDG_STATE_HOME", ".local/state").join("cachemate"),
    });
    std::fs::create_dir_all(&dir)
        .with_context(|| format!("{}: the directory cannot be created", dir.display()))?;
    let root_announcement = path_variable("CACHEMATE_LOCK_DIR")
        .unwrap_or_else(|| PathBuf::from(ROOT_LOCK_DIR))
        .join("root-acts");
    Ok(LockPaths {
        lock: dir.join(format!("cachemate-acting-{user}.lock")),
        root_announcement,
    })
}

fn path_variable(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

fn path_from_variable(variable: &str, home_subpath: &str) -> PathBuf {
    path_variable(variable).unwrap_or_else(|| {
        path_variable("HOME")
            .unwrap_or_else(|| PathBuf::from("/"))
            .join(home_subpath)
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

/// The numeric id of a user of this host, from `/etc/passwd`.
pub(crate) fn find_user_id(name: &str) -> Option<u32> {
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
