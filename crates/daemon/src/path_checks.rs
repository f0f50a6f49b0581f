//! Checks that a daemon could use the paths and addresses in a configuration. The check creates nothing.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use anyhow::{Context, bail};
use cachemate_core::{CpuSet, Profile};
use cachemate_linux::sense::topology::read_topology;
use cachemate_spec::ManageConfig;
use rustix::fs::{Access, AtFlags, CWD};

use crate::metrics::MetricsAddress;
use crate::{host, paths};

/// Maximum length of a socket's path: `sun_path` of unix(7) without the terminating zero.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Finds the first path that a daemon could not use. Returns the configured profiles by program.
///
/// # Errors
/// The path, and the reason.
pub fn check_config(config: &ManageConfig) -> anyhow::Result<BTreeMap<String, Profile>> {
    let state_dir = config.state_dir.clone().unwrap_or_else(paths::state_dir);
    check_dir(&state_dir).with_context(|| format!("state_dir: {}", state_dir.display()))?;
    check_cpusets(config)?;
    let path = config.socket.clone().unwrap_or_else(paths::default_socket);
    check_socket(&path).with_context(|| format!("socket: {}", path.display()))?;
    let profiles = host::read_known_profiles(&config.profiles).context("profiles")?;
    if let Some(path) = &config.run_log {
        check_output_file(path).with_context(|| format!("run_log: {}", path.display()))?;
    }
    if let Some(path) = &config.metrics_textfile {
        check_output_file(path).with_context(|| format!("metrics_textfile: {}", path.display()))?;
    }
    MetricsAddress::from_config(config).context("metrics_token_file")?;
    Ok(profiles)
}

/// Checks that every CPU of the confined groups exists.
///
/// # Errors
/// A cpuset names a CPU that this host does not have.
fn check_cpusets(config: &ManageConfig) -> anyhow::Result<()> {
    if config.cpusets.is_empty() {
        return Ok(());
    }
    let host = read_topology(Path::new("/")).context("cannot read the CPUs of this host")?;
    let host_cpus: CpuSet = host.topology.cpus.iter().map(|cpu| cpu.id.0).collect();
    for (index, cpuset) in config.cpusets.iter().enumerate() {
        if cpuset.cpus.iter().any(|cpu| !host_cpus.contains(cpu)) {
            bail!(
                "cpusets[{index}].cpus: found '{}', expected some of the CPUs {host_cpus} of this host",
                cpuset.cpus
            );
        }
    }
    Ok(())
}

fn check_write_access(path: &Path) -> anyhow::Result<()> {
    rustix::fs::accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)
        .map_err(io::Error::from)
        .with_context(|| format!("{} cannot be written in", path.display()))
}

/// Checks that a directory exists or can be created.
fn check_dir(path: &Path) -> anyhow::Result<()> {
    if path.as_os_str().is_empty() {
        bail!("found an empty path, expected a directory");
    }
    let ancestors = path.ancestors().map(|path| {
        if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        }
    });
    for path in ancestors {
        match path.metadata() {
            Ok(metadata) if metadata.is_dir() => return check_write_access(path),
            Ok(_) => bail!("{} is not a directory", path.display()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("{}", path.display())),
        }
    }
    bail!("no parent directory exists")
}

/// The directory that contains a file.
fn parent_dir(path: &Path) -> anyhow::Result<&Path> {
    if path.file_name().is_none() {
        bail!("found a path without a file's name");
    }
    Ok(path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new(".")))
}

fn check_socket(path: &Path) -> anyhow::Result<()> {
    check_dir(parent_dir(path)?)?;
    let bytes = path.as_os_str().len();
    if bytes > MAX_SOCKET_PATH_BYTES {
        bail!("found {bytes} bytes, expected {MAX_SOCKET_PATH_BYTES} at most");
    }
    match path.symlink_metadata() {
        Ok(metadata) if !metadata.file_type().is_socket() => bail!("is there, and no socket"),
        _ => Ok(()),
    }
}

fn check_output_file(path: &Path) -> anyhow::Result<()> {
    let dir = parent_dir(path)?;
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => bail!("is a directory"),
        Ok(_) => check_write_access(path),
        Err(_) if dir.is_dir() => check_write_access(dir),
        Err(_) => bail!("{} is not a directory", dir.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::CpusetGroup;
    use std::path::PathBuf;

    /// Is each unusable path reported with its field, and does a valid configuration pass without creating anything?
    #[test]
    fn unusable_paths_are_reported_with_their_field() {
        let root = tempfile::tempdir().unwrap();
        let path_of = |name: &str| root.path().join(name);
        std::fs::write(path_of("file"), "{}").unwrap();
        std::fs::create_dir(path_of("directory")).unwrap();
        let good = ManageConfig {
            state_dir: Some(path_of("a/b/state")),
            socket: Some(path_of("run/s.sock")),
            run_log: Some(path_of("log.zst")),
            metrics_textfile: Some(path_of("x.prom")),
            profiles: vec![path_of("directory")],
            ..ManageConfig::default()
        };
        check_config(&good).unwrap();
        assert_eq!(
            std::fs::read_dir(root.path()).unwrap().count(),
            2,
            "nothing was made"
        );
        let cases: [(&str, fn(&mut ManageConfig, PathBuf), &str); 11] = [
            ("state_dir", |c, path| c.state_dir = Some(path), ""),
            (
                "state_dir",
                |c, path| c.state_dir = Some(path),
                "file/below",
            ),
            ("state_dir", |c, path| c.state_dir = Some(path), "file"),
            ("socket", |c, path| c.socket = Some(path), ""),
            ("socket", |c, path| c.socket = Some(path), "file"),
            (
                "socket",
                |c, path| c.socket = Some(path.join("s".repeat(120))),
                "directory",
            ),
            (
                "profiles",
                |c, path| c.profiles = vec![path],
                "missing.json",
            ),
            ("profiles", |c, path| c.profiles = vec![path], "file"),
            ("run_log", |c, path| c.run_log = Some(path), "missing/log"),
            (
                "metrics_textfile",
                |c, path| c.metrics_textfile = Some(path),
                "missing/x.prom",
            ),
            (
                "metrics_textfile",
                |c, path| c.metrics_textfile = Some(path),
                "directory",
            ),
        ];
        for (field, spoil, path) in cases {
            let mut config = good.clone();
            spoil(
                &mut config,
                if path.is_empty() {
                    PathBuf::new()
                } else {
                    path_of(path)
                },
            );
            let message = format!("{:#}", check_config(&config).unwrap_err());
            assert!(message.starts_with(field), "{field} {path}: {message}");
        }
        let cpuset_config = |cpus: &str| CpusetGroup {
            cgroup: "/a".into(),
            cpus: cpus.parse().unwrap(),
        };
        check_config(&ManageConfig {
            cpusets: vec![cpuset_config("0")],
            ..good.clone()
        })
        .unwrap();
        let far = ManageConfig {
            cpusets: vec![cpuset_config("0"), cpuset_config("0-8191")],
            ..good
        };
        let message = format!("{:#}", check_config(&far).unwrap_err());
        assert!(
            message.starts_with("cpusets[1].cpus: found '0-8191', expected some of the CPUs 0"),
            "{message}"
        );
    }
}
