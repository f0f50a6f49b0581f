//! The directories of a user by the environment, and those of root, for whom the environment does not count: `sudo -E`
//! and `su -m` keep the home of somebody else.

use std::path::PathBuf;

/// The path in an environment variable; `None` if it is unset or empty.
pub fn path_variable(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// The path in an environment variable, or one below the user's home.
pub fn path_from_variable(variable: &str, home_subpath: &str) -> PathBuf {
    path_variable(variable).unwrap_or_else(|| {
        path_variable("HOME")
            .unwrap_or_else(|| PathBuf::from("/"))
            .join(home_subpath)
    })
}

/// Directory of data that can be made again. `CACHEMATE_CACHE_DIR` names another one.
pub fn cache_dir() -> PathBuf {
    path_variable("CACHEMATE_CACHE_DIR").unwrap_or_else(|| {
        if rustix::process::geteuid().is_root() {
            PathBuf::from("/var/cache/cachemate")
        } else {
            path_from_variable("XDG_CACHE_HOME", ".cache").join("cachemate")
        }
    })
}
