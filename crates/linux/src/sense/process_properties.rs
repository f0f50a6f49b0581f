//! The properties of a process that rules test, and the service that it belongs to.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use cachemate_core::{
    CgroupService, ServiceIdentity, ServiceKind, is_runtime_helper, service_of_cgroups,
};

use crate::act::rules::{ManageAction, ManageRule, RuleSubject, decide};
use crate::kernel::text_files::read_users;
use crate::kernel::{KeptFile, Kernel, ThreadKey, ThreadStat, none_if_missing};
use crate::sense::group_trust::GroupTrust;
use crate::sense::service_directory::{ContainerRecord, ServiceDirectory};

/// `PF_KTHREAD` of `/proc/TID/stat`'s flags.
const KERNEL_THREAD_FLAG: u64 = 0x0020_0000;
/// A chain of parents is short; the bound protects against a tree that changes while it is read.
const MAX_PARENTS: usize = 1_000;

/// The sources of a process's properties.
pub(crate) struct PropertyReader<'a> {
    pub(crate) kernel: &'a dyn Kernel,
    pub(crate) rules: &'a [ManageRule],
    /// Containers that a runtime has reported.
    directory: &'a ServiceDirectory,
    /// The service of this process: other programs in the same service are distinguished by their commands.
    own_service: Option<&'a ServiceIdentity>,
    /// The groups whose names count.
    group_trust: GroupTrust<'a>,
}

/// The properties of a process that rules test.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct RuleProperties {
    pub(crate) is_kernel_thread: bool,
    pub(crate) command: String,
    /// Its control groups other than the root, that of the unified hierarchy first; only `/` if there is no other.
    pub(crate) cgroups: Vec<String>,
    /// The text of `/proc/PID/cgroup` that contains these paths.
    cgroup_text: String,
    pub(crate) user: Option<u32>,
    /// Ancestors when it was new, so that a process whose parent has exited still descends from the process that a rule
    /// names.
    lineage: Vec<ThreadKey>,
    pub(crate) service: Option<ServiceIdentity>,
    /// Whether it belongs to the runtime and not to the service.
    pub(crate) is_helper: bool,
    /// Its container, as the runtime reports it.
    container: Option<Arc<ContainerRecord>>,
}

/// Knowledge of a process before its properties are read.
#[derive(Default)]
pub(crate) struct KnownProperties<'a> {
    /// The properties as they were read before: its lineage is kept.
    pub(crate) previous: Option<&'a RuleProperties>,
    /// Those of its parent: a new process in the control groups of its parent belongs to the parent's service.
    pub(crate) parent: Option<&'a RuleProperties>,
    /// Its user, if the events determine it; `None` if it must be read.
    pub(crate) user: Option<u32>,
}

fn is_kernel_thread(stat: &ThreadStat) -> bool {
    stat.flags & KERNEL_THREAD_FLAG != 0
}

impl RuleProperties {
    pub(crate) fn decide(&self, rules: &[ManageRule]) -> ManageAction {
        self.subject()
            .map_or(ManageAction::Ignore, |subject| decide(rules, &subject))
    }

    /// The subject for rules; `None` for a kernel thread, which no rule matches.
    pub(crate) fn subject(&self) -> Option<RuleSubject<'_>> {
        (!self.is_kernel_thread).then_some(RuleSubject {
            command: &self.command,
            cgroups: &self.cgroups,
            lineage: &self.lineage,
            user: self.user,
            service: self.service.as_ref(),
            is_helper: self.is_helper,
            container: self.container.as_deref(),
        })
    }

    /// Its service: the command, if there is no other.
    pub(crate) fn service_or_command(&self) -> ServiceIdentity {
        self.service
            .clone()
            .unwrap_or_else(|| ServiceIdentity::command(&self.command))
    }

    /// The properties before the runtime's helper becomes the service's program.
    pub(crate) fn of_unknown_program(self) -> Self {
        RuleProperties {
            command: String::new(),
            is_helper: false,
            ..self
        }
    }

    /// The digest of the image that the program comes from.
    pub(crate) fn image(&self) -> Option<&str> {
        self.container.as_ref()?.image.as_deref()
    }
}

impl<'a> PropertyReader<'a> {
    pub(crate) fn new(
        kernel: &'a dyn Kernel,
        rules: &'a [ManageRule],
        directory: &'a ServiceDirectory,
        own_service: Option<&'a ServiceIdentity>,
    ) -> Self {
        PropertyReader {
            kernel,
            rules,
            directory,
            own_service,
            group_trust: GroupTrust::new(kernel),
        }
    }

    /// Reads the properties, as far as they are not `known`.
    pub(crate) fn read(
        &self,
        stat: &ThreadStat,
        cgroup_file: &KeptFile,
        known: &KnownProperties<'_>,
    ) -> io::Result<RuleProperties> {
        let (pid, previous, parent) = (stat.key.tid, known.previous, known.parent);
        let mut properties = RuleProperties {
            is_kernel_thread: is_kernel_thread(stat),
            command: stat.name.clone(),
            user: known.user,
            ..RuleProperties::default()
        };
        if properties.is_kernel_thread {
            return Ok(properties);
        }
        properties.cgroup_text = self.read_cgroup_text(cgroup_file)?;
        properties.cgroups = cgroup_paths(&properties.cgroup_text);
        if properties.user.is_none() {
            properties.user = read_users(self.kernel, pid)?.first().copied();
        }
        properties.lineage = match previous {
            Some(previous) => previous.lineage.clone(),
            None if self.rules.iter().any(|rule| rule.pid.is_some()) => {
                find_lineage(self.kernel, stat)?
            }
            None => vec![stat.key],
        };
        // A shim's children belong to the container, and the shim does not.
        let relative = previous.or(parent.filter(|parent| shim_option(&parent.command).is_none()));
        self.identify_service(stat, relative, &mut properties)?;
        Ok(properties)
    }

    /// Whether the process has joined another control group, or a runtime reports another container for it.
    pub(crate) fn has_moved(&self, cgroup_file: &KeptFile, previous: &RuleProperties) -> bool {
        self.read_cgroup_text(cgroup_file).is_ok_and(|cgroup_text| {
            cgroup_text != previous.cgroup_text
                || self
                    .find_container(&cgroup_text, &previous.cgroups)
                    .map(|(_, record)| record)
                    != previous.container
        })
    }

    /// The file with the control groups of a process, to be read again and again.
    pub(crate) fn open_cgroup_file(&self, stat: &ThreadStat) -> KeptFile {
        let path = PathBuf::from(format!("/proc/{}/cgroup", stat.key.tid));
        if is_kernel_thread(stat) {
            KeptFile::new(path)
        } else {
            self.kernel.keep_open(path)
        }
    }

    /// The container that a runtime reports for these control groups, with its id.
    fn find_container(
        &self,
        cgroup_text: &str,
        paths: &[String],
    ) -> Option<(String, Arc<ContainerRecord>)> {
        if self.directory.is_empty() {
            return None;
        }
        let service = service_of_cgroups(&self.group_trust.cut_to_trusted(cgroup_text));
        match service.and_then(|service| service.identity.container) {
            Some(id) => {
                let record = self.directory.find_by_id(&id)?;
                let is_inside = paths.iter().any(|path| record.contains_group(path));
                is_inside.then_some((id, record))
            }
            None => paths
                .iter()
                .find_map(|path| self.directory.find_by_cgroup(path)),
        }
    }

    /// The text of `/proc/PID/cgroup`; empty if the process has exited.
    fn read_cgroup_text(&self, cgroup_file: &KeptFile) -> io::Result<String> {
        Ok(none_if_missing(self.kernel.read_kept(cgroup_file))?.unwrap_or_default())
    }

    fn identify_service(
        &self,
        stat: &ThreadStat,
        relative: Option<&RuleProperties>,
        properties: &mut RuleProperties,
    ) -> io::Result<()> {
        let trusted_text = self.group_trust.cut_to_trusted(&properties.cgroup_text);
        let mut service = service_of_cgroups(&trusted_text);
        if let Some((id, record)) =
            self.find_container(&properties.cgroup_text, &properties.cgroups)
        {
            let is_helper = record.is_helper || service.is_some_and(|service| service.is_helper);
            service = Some(CgroupService {
                identity: record.identity(&id),
                is_helper,
            });
            properties.container = Some(record);
        }
        if service.is_none() && properties.cgroups.iter().any(|path| path != "/") {
            // A runtime may put a container into any group. The name is known from the parent, a shim or a monitor.
            let same_cgroups = relative.filter(|relative| relative.cgroups == properties.cgroups);
            let identity = match same_cgroups {
                Some(relative) => relative.service.clone(),
                None => shim_container(self.kernel, stat)?,
            };
            service = identity.map(|identity| CgroupService {
                identity,
                is_helper: false,
            });
        }
        let service = service.filter(|service| Some(&service.identity) != self.own_service);
        let service_kind: Option<ServiceKind> =
            service.as_ref().map(|service| service.identity.kind);
        properties.is_helper = service
            .as_ref()
            .is_some_and(|service| service.is_helper && service_kind != Some(ServiceKind::Guest))
            || is_runtime_helper(
                &properties.command,
                service_kind,
                properties.user == Some(0),
            );
        properties.service = service.map(|service| service.identity);
        Ok(())
    }
}

/// The service of this process itself.
pub(crate) fn read_own_service(kernel: &dyn Kernel) -> Option<ServiceIdentity> {
    let cgroup_text = kernel
        .read(&PathBuf::from(format!("/proc/{}/cgroup", kernel.own_pid())))
        .ok()?;
    service_of_cgroups(&cgroup_text).map(|service| service.identity)
}

/// The container of a process that descends from a shim or a monitor, by the ancestor's command line.
fn shim_container(kernel: &dyn Kernel, stat: &ThreadStat) -> io::Result<Option<ServiceIdentity>> {
    let mut parent = stat.parent;
    for _ in 0..MAX_PARENTS {
        if parent <= 1 {
            return Ok(None);
        }
        let Some(stat) = none_if_missing(kernel.stat(parent))? else {
            return Ok(None);
        };
        let Some(option) = shim_option(&stat.name) else {
            parent = stat.parent;
            continue;
        };
        // Anyone can name a program so, and a container that it made up would be joined.
        if !is_roots(kernel, parent)? {
            return Ok(None);
        }
        let command_line =
            none_if_missing(kernel.read(&PathBuf::from(format!("/proc/{parent}/cmdline"))))?
                .unwrap_or_default();
        let arguments: Vec<&str> = command_line.split('\0').collect();
        let name = arguments
            .windows(2)
            .find(|pair| pair[0] == option)
            .map(|pair| pair[1])
            .filter(|name| !name.is_empty());
        return Ok(name.map(ServiceIdentity::container));
    }
    Ok(None)
}

/// Does a process run as root, with its real, effective and saved user?
fn is_roots(kernel: &dyn Kernel, pid: i32) -> io::Result<bool> {
    let users = read_users(kernel, pid)?;
    Ok(!users.is_empty() && users.iter().all(|user| *user == 0))
}

/// The option by which a shim or a monitor gets the name of its container; `None` if the command is neither.
fn shim_option(command: &str) -> Option<&'static str> {
    if command.starts_with("containerd-shim") {
        Some("-id")
    } else {
        (command == "conmon").then_some("-n")
    }
}

/// The process and its ancestors.
fn find_lineage(kernel: &dyn Kernel, stat: &ThreadStat) -> io::Result<Vec<ThreadKey>> {
    let mut lineage = vec![stat.key];
    let mut parent = stat.parent;
    while parent > 0 && lineage.len() < MAX_PARENTS {
        let Some(parent_stat) = none_if_missing(kernel.stat(parent))? else {
            break;
        };
        if lineage.contains(&parent_stat.key) {
            break;
        }
        lineage.push(parent_stat.key);
        parent = parent_stat.parent;
    }
    Ok(lineage)
}

/// The paths in `/proc/PID/cgroup` other than the root, each once, the unified hierarchy's first; only `/` if all are
/// roots.
pub(crate) fn cgroup_paths(cgroup_text: &str) -> Vec<String> {
    let unified_paths = cgroup_text
        .lines()
        .filter_map(|line| line.strip_prefix("0::"));
    let other_paths = cgroup_text
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2));
    let mut paths: Vec<String> = Vec::new();
    for path in unified_paths
        .chain(other_paths)
        .filter(|path| !path.is_empty() && *path != "/")
    {
        if !paths.iter().any(|known| known == path) {
            paths.push(path.to_string());
        }
    }
    if paths.is_empty() && !cgroup_text.is_empty() {
        paths.push("/".to_string());
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;

    fn service(host: &FakeHost, directory: &ServiceDirectory, pid: i32) -> (Option<String>, bool) {
        let own_service = ServiceIdentity::new(ServiceKind::Session, "session-1.scope");
        let reader = PropertyReader::new(host, &[], directory, Some(&own_service));
        let stat = host.stat(pid).unwrap();
        let properties = reader
            .read(
                &stat,
                &reader.open_cgroup_file(&stat),
                &KnownProperties::default(),
            )
            .unwrap();
        (
            properties.service.map(|service| service.to_string()),
            properties.is_helper,
        )
    }

    /// Which paths of /proc/PID/cgroup count, on v1, v2 and mixed hosts?
    #[test]
    fn cgroup_paths_are_read_on_v1_v2_and_mixed_hosts() {
        assert_eq!(cgroup_paths("0::/user.slice/x\n"), ["/user.slice/x"]);
        assert_eq!(
            cgroup_paths("5:cpuset:/a\n4:memory:/b\n3:cpu:/a\n0::/\n"),
            ["/a", "/b"]
        );
        assert_eq!(cgroup_paths("5:cpuset:/a\n0::/c\n"), ["/c", "/a"]);
        assert_eq!(cgroup_paths("0::/\n"), ["/"]);
        assert_eq!(cgroup_paths(""), Vec::<String>::new());
    }

    /// Is a container in a group of any name found by its shim, and renamed by the runtime's report?
    #[test]
    fn a_shim_names_the_container_of_an_unknown_group() {
        let host = FakeHost::default();
        let directory = ServiceDirectory::default();
        host.add_thread(4, 4, 1, "0");
        host.add_thread(5, 5, 4, "0");
        host.add_thread(6, 6, 5, "0");
        host.set_file("/proc-comm/4", "containerd-shim");
        host.set_file(
            "/proc/4/status",
            "Uid:\t0\t0\t0\t0\nCpus_allowed_list:\t0\n",
        );
        host.set_file(
            "/proc/4/cmdline",
            "/usr/bin/containerd-shim-runc-v2\0-namespace\0default\0-id\0web-1\0",
        );
        for pid in [5, 6] {
            host.set_file(
                &format!("/proc/{pid}/cgroup"),
                "3:cpuset:/fleet/web\n0::/\n",
            );
        }
        assert_eq!(
            service(&host, &directory, 6),
            (Some("container/web-1".into()), false)
        );
        let record = ContainerRecord {
            name: "web".into(),
            cgroup: "/fleet/web".into(),
            ..ContainerRecord::default()
        };
        directory.insert("x", record);
        assert_eq!(
            service(&host, &directory, 6),
            (Some("container/web".into()), false)
        );
        host.set_file("/proc/6/cgroup", "0::/fleet/other\n");
        host.change_thread(6, |thread| thread.parent = 1);
        assert_eq!(service(&host, &directory, 6), (None, false));
    }

    /// Does a user join no container by a shim of her own, by a group of her own with the id of another's, or by an id
    /// that the runtime reports for another group; and does root's own group with such a name still name its service?
    #[test]
    fn made_up_identities_join_no_service() {
        const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        let (host, directory) = (FakeHost::default(), ServiceDirectory::default());
        host.add_thread(4, 4, 1, "0");
        host.add_thread(5, 5, 4, "0");
        host.set_file("/proc-comm/4", "containerd-shim");
        host.set_file("/proc/4/status", "Uid:\t1001\t1001\t1001\t1001\n");
        host.set_file("/proc/4/cmdline", "containerd-shim\0-id\0web\0");
        host.set_file("/proc/5/cgroup", "0::/fleet\n");
        assert_eq!(service(&host, &directory, 5), (None, false));

        host.set_file("/proc/mounts", "cgroup2 /cg cgroup2 rw 0 0\n");
        for path in [
            "/delegated/docker-ID.scope",
            "/delegated/kubepods/pod3f7a1c22/ID",
        ] {
            host.set_file(
                "/proc/5/cgroup",
                &format!("0::{}\n", path.replace("ID", ID)),
            );
            assert_ne!(service(&host, &directory, 5).0, None, "{path}");
        }
        host.owners
            .borrow_mut()
            .insert("/cg/delegated".into(), 1001);
        for path in [
            "/delegated/docker-ID.scope",
            "/delegated/kubepods/pod3f7a1c22/ID",
        ] {
            host.set_file(
                "/proc/5/cgroup",
                &format!("0::{}\n", path.replace("ID", ID)),
            );
            assert_eq!(service(&host, &directory, 5).0, None, "{path}");
        }

        let record = ContainerRecord {
            name: "web".into(),
            cgroup: format!("/docker/{ID}"),
            ..ContainerRecord::default()
        };
        directory.insert(ID, record);
        host.set_file(
            "/proc/5/cgroup",
            &format!("0::/elsewhere/docker-{ID}.scope\n"),
        );
        assert_ne!(
            service(&host, &directory, 5).0.as_deref(),
            Some("container/web")
        );
        host.set_file("/proc/5/cgroup", &format!("0::/docker/{ID}\n"));
        assert_eq!(
            service(&host, &directory, 5).0.as_deref(),
            Some("container/web")
        );
    }

    /// Are programs in this process's own session distinguished by command, and those of another session not?
    #[test]
    fn programs_in_this_session_are_distinguished_by_command() {
        let host = FakeHost::default();
        host.add_thread(5, 5, 1, "0");
        host.set_file(
            "/proc/5/cgroup",
            "0::/user.slice/user-7.slice/session-1.scope\n",
        );
        assert_eq!(
            service(&host, &ServiceDirectory::default(), 5),
            (None, false)
        );
        host.set_file(
            "/proc/5/cgroup",
            "0::/user.slice/user-7.slice/session-2.scope\n",
        );
        assert_eq!(
            service(&host, &ServiceDirectory::default(), 5),
            (Some("session/session-2.scope".into()), false)
        );
    }
}
