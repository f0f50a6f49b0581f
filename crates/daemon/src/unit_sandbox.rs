//! The sandbox of the shipped systemd unit: where a daemon in it can write.
//!
//! The unit makes the host read-only for the daemon, except for the directories that it states, and gives it a `/tmp`
//! of its own. A file elsewhere passes every check that an administrator's shell can make, and fails, or is written
//! where no collector finds it, when systemd starts the daemon. So the check reads the shipped unit.

use std::io;
use std::path::{Path, PathBuf};

use cachemate_spec::ManageConfig;

const UNIT: &str = include_str!("../../../packaging/cachemate.service");

/// Warnings about configured files that a daemon in the shipped unit cannot write.
pub fn describe_paths_outside_unit(config: &ManageConfig) -> Vec<String> {
    let files = [
        ("state_dir", &config.state_dir),
        ("run_log", &config.run_log),
        ("metrics_textfile", &config.metrics_textfile),
    ];
    let configured = files
        .into_iter()
        .filter_map(|(field, path)| Some((field, path.as_deref()?)));
    configured
        .filter(|(_, path)| !unit_dirs().any(|dir| path.starts_with(dir)))
        .map(|(field, path)| {
            format!(
                "{field}: found {}, where the shipped systemd unit cannot write without {}",
                path.display(),
                unit_drop_in(path)
            )
        })
        .collect()
}

/// Directories in which the shipped unit can write.
fn unit_dirs() -> impl Iterator<Item = PathBuf> {
    let values = |key: &'static str| {
        let lines = UNIT.lines().filter_map(move |line| line.strip_prefix(key));
        lines.flat_map(str::split_ascii_whitespace)
    };
    let stated = values("ReadWritePaths=").map(|path| PathBuf::from(path.trim_start_matches('-')));
    let state = values("StateDirectory=").map(|name| Path::new("/var/lib").join(name));
    let runtime = values("RuntimeDirectory=").map(|name| Path::new("/run").join(name));
    stated.chain(state).chain(runtime)
}

fn unit_drop_in(path: &Path) -> String {
    let dir = path.parent().unwrap_or(path).display();
    format!("'ReadWritePaths={dir}' below [Service] in 'systemctl edit cachemate'")
}

/// The error of writing a file, with the remedy if the sandbox of a systemd unit is the likely reason.
pub fn with_unit_remedy(error: io::Error, path: &Path) -> anyhow::Error {
    let is_sandboxed = error.kind() == io::ErrorKind::ReadOnlyFilesystem
        && std::env::var_os("INVOCATION_ID").is_some();
    let error = anyhow::Error::new(error);
    match is_sandboxed {
        true => error.context(format!(
            "the unit of this daemon needs {}",
            unit_drop_in(path)
        )),
        false => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a file outside of the unit's sandbox reported with the drop-in that permits it, and one inside accepted?
    #[test]
    fn files_that_the_unit_cannot_write_are_reported() {
        let config_of = |path: &str| ManageConfig {
            run_log: Some("/var/lib/cachemate/run.jsonl".into()),
            metrics_textfile: Some(path.into()),
            ..ManageConfig::default()
        };
        for inside in [
            "/var/lib/prometheus/node-exporter/cachemate.prom",
            "/run/cachemate/cachemate.prom",
        ] {
            let found = describe_paths_outside_unit(&config_of(inside));
            assert!(found.is_empty(), "{found:?}");
        }
        for (path, dir) in [
            ("/srv/metrics/cachemate.prom", "/srv/metrics"),
            ("/tmp/cachemate.prom", "/tmp"),
            ("/var/lib/cachemated/x.prom", "/var/lib/cachemated"),
        ] {
            let found = describe_paths_outside_unit(&config_of(path));
            assert_eq!(found.len(), 1, "{found:?}");
            for words in ["metrics_textfile", path, &format!("ReadWritePaths={dir}'")] {
                assert!(found[0].contains(words), "{words} in {found:?}");
            }
        }
    }
}
