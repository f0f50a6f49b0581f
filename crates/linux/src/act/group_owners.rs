//! Programs that own control groups. Cachemate asks an owner to change its group instead of writing the group's file.
//!
//! A service manager or a container runtime rewrites a group's CPUs from its own records at each reload or update, so a
//! value that is written to the file without its knowledge is lost. Therefore the owner is asked to set the CPUs, and
//! the file is written only if there is nobody to ask.
//!
//! For example, `systemctl set-property --runtime -- db.service AllowedCPUs=1` confines a unit until the next boot, and
//! the same with an empty list takes it back. (`systemctl` and not D-Bus: on the public bus the daemon lacks the right,
//! and the replies on the private socket name a sender that zbus rejects.) A container runtime is asked on the
//! connection of its plugin ([`crate::nri`]).
//!
//! An owner's refusal becomes an error with the owner's text, and the file stays as it is; every exchange has a
//! timeout. A restore writes the file itself if the owner does not answer.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cachemate_core::CpuSet;

use crate::act::cpusets::{self, Cpusets};
use crate::kernel::systemd_units::{SYSTEMCTL, is_run_by_systemd, systemd_unit};
use crate::kernel::{GroupOwner, Kernel, LinuxHost};
use crate::nri::ContainerUpdates;
use crate::sense::service_directory::ServiceDirectory;

/// Timeout of an owner's answer.
const MAX_ANSWER_WAIT: Duration = Duration::from_secs(2);
/// Maximum time from the owner's answer until the group has its new CPUs.
const MAX_EFFECT_WAIT: Duration = Duration::from_millis(500);
const POLL_PERIOD: Duration = Duration::from_millis(2);
/// Maximum number of bytes of an error message that are shown.
const MAX_MESSAGE_BYTES: u64 = 400;

/// The owners of groups that accept requests. On a host that runs systemd, systemd is always one of them.
#[derive(Clone, Debug, Default)]
pub struct GroupOwners {
    runtime: Option<ContainerRuntime>,
}

/// A container runtime with the plugin: its containers, and the connection on which it is asked.
#[derive(Clone, Debug)]
struct ContainerRuntime {
    directory: ServiceDirectory,
    updates: ContainerUpdates,
}

impl GroupOwners {
    /// The owners, extended by a container runtime whose containers the directory lists.
    pub fn with_runtime(directory: ServiceDirectory, updates: ContainerUpdates) -> Self {
        GroupOwners {
            runtime: Some(ContainerRuntime { directory, updates }),
        }
    }

    /// The container of this group, if its runtime accepts requests.
    fn find_container(&self, group: &str) -> Option<(String, &ContainerUpdates)> {
        let ContainerRuntime { directory, updates } = self.runtime.as_ref()?;
        if !updates.is_connected() {
            return None;
        }

        let container_id =
            cachemate_core::service_of_cgroup(group).and_then(|service| service.identity.container);
        let known_id = container_id.filter(|id| {
            let record = directory.find_by_id(id);
            record.is_some_and(|record| record.contains_group(group))
        });
        let id = known_id.or_else(|| directory.find_id_by_cgroup(group))?;
        Some((id, updates))
    }
}

impl GroupOwner for GroupOwners {
    fn set_cpus(&self, host: &LinuxHost, file: &Path, cpus: &str) -> io::Result<bool> {
        let Some(hierarchy) = cpusets::find_hierarchy(host) else {
            return Ok(false);
        };
        let (Cpusets::V1(mount) | Cpusets::V2(mount)) = &hierarchy;
        let Some(group) = file.parent().and_then(|dir| dir.strip_prefix(mount).ok()) else {
            return Ok(false);
        };
        let group = format!("/{}", group.display());

        if let Some((id, updates)) = self.find_container(&group) {
            // A runtime cannot be asked to use the CPUs of the parent.
            let cpus = if cpus.is_empty() {
                parent_cpus(host, file)?
            } else {
                cpus.to_string()
            };
            updates.set_cpus(&id, &cpus)?;
            await_cpus(host, file, &cpus)?;
            return Ok(true);
        }

        if !matches!(hierarchy, Cpusets::V2(_)) || !is_run_by_systemd(host) {
            return Ok(false);
        }
        let Some(unit) = systemd_unit(&group) else {
            return Ok(false);
        };
        set_unit_cpus(&host.path_below(Path::new(SYSTEMCTL)), unit, cpus)?;
        if !cpus.is_empty() {
            await_cpus(host, file, cpus)?;
        }
        Ok(true)
    }
}

/// Sets the unit's CPUs until the next boot. An empty list removes the property.
fn set_unit_cpus(systemctl: &Path, unit: &str, cpus: &str) -> io::Result<()> {
    let mut command = Command::new(systemctl);
    command.args(["--no-ask-password", "set-property", "--runtime", "--", unit]);
    command
        .arg(format!("AllowedCPUs={cpus}"))
        .env_clear()
        .env("LC_ALL", "C");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let deadline = Instant::now() + MAX_ANSWER_WAIT;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() < deadline => std::thread::sleep(POLL_PERIOD),
            None => {
                child.kill()?;
                child.wait()?;
                let message = format!(
                    "no answer from systemd within {} s",
                    MAX_ANSWER_WAIT.as_secs()
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut message = String::new();
    if let Some(stderr) = child.stderr.take() {
        stderr
            .take(MAX_MESSAGE_BYTES)
            .read_to_string(&mut message)?;
    }
    Err(io::Error::other(format!(
        "systemd refuses AllowedCPUs={cpus} of {unit}: {}",
        message.trim()
    )))
}

/// Waits until the owner has made the change that it agreed to, at most [`MAX_EFFECT_WAIT`]. A change that is still
/// missing then is no error here, because the caller reads the result back.
fn await_cpus(host: &LinuxHost, file: &Path, cpus_text: &str) -> io::Result<()> {
    let deadline = Instant::now() + MAX_EFFECT_WAIT;
    let requested_cpus: Option<CpuSet> = cpus_text.parse().ok();
    loop {
        let read_result = host.read(file);
        if read_result
            .as_ref()
            .is_ok_and(|now| now.trim().parse::<CpuSet>().ok() == requested_cpus)
            || Instant::now() >= deadline
        {
            return read_result.map(drop);
        }
        std::thread::sleep(POLL_PERIOD);
    }
}

fn parent_cpus(host: &LinuxHost, file: &Path) -> io::Result<String> {
    let parent: PathBuf = file
        .parent()
        .and_then(Path::parent)
        .unwrap_or(Path::new("/"))
        .into();
    Ok(host
        .read(&parent.join("cpuset.cpus.effective"))?
        .trim()
        .to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::act::actuator::Actuator;
    use crate::act::changes::fixture::{ApplyFixture, sample_capabilities};
    use crate::fake_tests::{waiting_guardian, write_tree};
    use crate::sense::tasks::TaskTable;
    use cachemate_core::{CpusetGroup, Plan, WindowLength};

    const UNIT: &str = "/system.slice/db.service";

    /// A host under systemd whose unit has no cpuset yet, and whose `systemctl` is this script.
    fn systemd_host(script: &str) -> (tempfile::TempDir, LinuxHost) {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let unit = format!("sys/fs/cgroup{UNIT}");
        let files = [
            ("proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"),
            ("proc/sys/kernel/random/boot_id", "boot\n"),
            ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu\n"),
            ("sys/fs/cgroup/cgroup.subtree_control", "memory pids\n"),
            ("sys/fs/cgroup/cpuset.cpus.effective", "0-3\n"),
            (
                "sys/fs/cgroup/system.slice/cgroup.controllers",
                "memory pids\n",
            ),
            (&format!("{unit}/cgroup.controllers"), "memory pids\n"),
            (&format!("{unit}/cgroup.procs"), ""),
            (&format!("{unit}/cgroup.threads"), ""),
            ("usr/bin/systemctl", script),
        ];
        write_tree(dir.path(), files);
        std::fs::create_dir_all(dir.path().join("run/systemd/system")).unwrap();
        let systemctl = dir.path().join("usr/bin/systemctl");
        std::fs::set_permissions(systemctl, std::fs::Permissions::from_mode(0o755)).unwrap();
        let host = LinuxHost::new(dir.path()).with_owners(GroupOwners::default());
        (dir, host)
    }

    /// A script in place of systemd: it records its arguments, and gives the unit the requested CPUs, or none.
    const OBEDIENT: &str = "#!/bin/sh\nroot=${0%/usr/bin/systemctl}\nprintf '%s\\n' \"$*\" >>$root/calls\n\
        cpus=${6#AllowedCPUs=}\nfile=$root/sys/fs/cgroup/system.slice/$5/cpuset.cpus\n\
        case $cpus in '') rm -f $file;; *) printf '%s\\n' $cpus >$file;; esac\n";

    /// Confines the unit to CPU 1, and returns the actuator and the refusals.
    fn confine(host: &LinuxHost, state: &Path) -> (Actuator, Vec<String>) {
        let mut actuator = Actuator::new(state, waiting_guardian());
        let fixture = ApplyFixture {
            host,
            actuator: &mut actuator,
            ways: None,
            tasks: &TaskTable::default(),
            capabilities: &sample_capabilities(),
            groups: &[CpusetGroup {
                cgroup: UNIT.into(),
                cpus: [1].into_iter().collect(),
            }],
        };
        let (applied, _) = fixture.apply(&Plan::idle(WindowLength::Time { ns: 1 }));
        let refused = applied
            .refused_items
            .iter()
            .map(|refused| refused.message.clone())
            .collect();
        (actuator, refused)
    }

    /// Does systemd set the CPUs of its unit, although it has given the unit no cpuset before, and take them back at
    /// the end?
    #[test]
    fn systemd_sets_and_restores_the_cpus_of_its_units() {
        let (dir, host) = systemd_host(OBEDIENT);
        let state = tempfile::tempdir().unwrap();
        let (mut actuator, refused) = confine(&host, state.path());
        assert_eq!(refused, Vec::<String>::new());
        let file = dir.path().join(format!("sys/fs/cgroup{UNIT}/cpuset.cpus"));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "1\n");
        actuator.restore_all(&host).unwrap();
        assert!(!file.exists());
        let calls = std::fs::read_to_string(dir.path().join("calls")).unwrap();
        let call = "--no-ask-password set-property --runtime -- db.service AllowedCPUs=";
        assert_eq!(calls, format!("{call}1\n{call}\n"));
    }

    /// Is a refusal of systemd reported in its words, and the group's file not written behind its back?
    #[test]
    fn a_refusal_of_systemd_is_reported_and_obeyed() {
        let (dir, host) = systemd_host("#!/bin/sh\necho 'Unit is masked.' >&2\nexit 1\n");
        let file = dir.path().join(format!("sys/fs/cgroup{UNIT}/cpuset.cpus"));
        std::fs::write(&file, "0-3\n").unwrap();
        let state = tempfile::tempdir().unwrap();
        let (_actuator, refused) = confine(&host, state.path());
        assert!(
            refused.len() == 1
                && refused[0].contains("refuses AllowedCPUs=1 of db.service: Unit is masked.")
        );
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "0-3\n");
    }
}
