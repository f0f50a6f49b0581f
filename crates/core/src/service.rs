//! Services: the units, containers, pods, jobs and guests that users run, identified by the path of
//! a control group.
//!
//! Operators know services and the kernel knows threads. The path of a process's control group
//! joins the two, because service managers, container runtimes and batch systems each put what they
//! start into a group with a name of theirs. A name is worth only as much as the right to choose
//! it, however, and users name the groups that were delegated to them; so a path counts as far as
//! the groups in it belong to root, and a user's unit is matched only together with its kind.
//!
//! For example, `/system.slice/redis.service` is the unit `redis.service`,
//! `/kubepods/burstable/podUID/ID` a container of a pod, whatever runs inside it, and
//! `/user.slice/user-1000.slice/user@1000.service/app.slice/redis.service` a unit of user 1000,
//! which the rule `service = "redis"` does not match.
//!
//! A program belongs to the innermost service that its path names, except that a container or a pod
//! hides everything that runs inside it. A program without a service forms one by the name of its
//! command.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of a service.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceKind {
    /// A unit of the system service manager.
    Unit,
    /// A unit of a user's service manager.
    UserUnit,
    /// A login session.
    Session,
    /// A container outside any pod.
    Container,
    /// A container of a pod.
    Pod,
    /// A job of a batch system.
    Job,
    /// A virtual machine.
    Guest,
    /// A program without any of these, identified by its name.
    Command,
}

impl ServiceKind {
    /// All kinds.
    pub const ALL: [ServiceKind; 8] = [
        ServiceKind::Unit,
        ServiceKind::UserUnit,
        ServiceKind::Session,
        ServiceKind::Container,
        ServiceKind::Pod,
        ServiceKind::Job,
        ServiceKind::Guest,
        ServiceKind::Command,
    ];

    /// The spelling of files and tables.
    pub fn text(self) -> &'static str {
        match self {
            ServiceKind::Unit => "unit",
            ServiceKind::UserUnit => "user-unit",
            ServiceKind::Session => "session",
            ServiceKind::Container => "container",
            ServiceKind::Pod => "pod",
            ServiceKind::Job => "job",
            ServiceKind::Guest => "guest",
            ServiceKind::Command => "command",
        }
    }
}

impl fmt::Display for ServiceKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.text())
    }
}

/// A service as every front end names it. Kind and name together identify it on its host.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceIdentity {
    /// Kind of the service.
    pub kind: ServiceKind,
    /// Name of the service: the unit name, the job number, the guest's name, or the pod and the container.
    pub name: String,
    /// The pod: `namespace/name` if the container runtime reports it, else its UID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The container's name or id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

/// Number of digits of an id that a name shows, as container tools print them.
const SHORT_ID: usize = 12;

impl ServiceIdentity {
    /// Builds a service without pod and container.
    pub fn new(kind: ServiceKind, name: impl Into<String>) -> Self {
        ServiceIdentity {
            kind,
            name: name.into(),
            pod: None,
            container: None,
        }
    }

    /// For a program that belongs to no unit, container, job or guest.
    pub fn command(program: &str) -> Self {
        ServiceIdentity::new(ServiceKind::Command, program)
    }

    /// A container outside any pod.
    pub fn container(id: &str) -> Self {
        ServiceIdentity {
            container: Some(id.to_string()),
            ..Self::new(ServiceKind::Container, shorten_id(id))
        }
    }

    /// Without a container, the pod as a whole. A long container id is shortened.
    pub fn from_pod(pod: &str, container: Option<&str>) -> Self {
        let name =
            container.map_or_else(|| pod.to_string(), |id| format!("{pod}/{}", shorten_id(id)));
        ServiceIdentity {
            kind: ServiceKind::Pod,
            name,
            pod: Some(pod.to_string()),
            container: container.map(str::to_string),
        }
    }

    /// Whether the name identifies the service without its kind. Names of users' units do not,
    /// because users choose them.
    pub fn has_trusted_name(&self) -> bool {
        self.kind != ServiceKind::UserUnit
    }

    /// Understands `redis`, `redis.service`, `unit/redis` and `pod/namespace/name`. A unit of a
    /// user is matched only with its kind, `user-unit/redis`, because users choose the names of
    /// their units.
    pub fn is_named(&self, word: &str) -> bool {
        let is_named_by = |word: &str| {
            let stem = self
                .name
                .rsplit_once('.')
                .filter(|(_, suffix)| UNIT_SUFFIXES.contains(suffix));
            self.name == word
                || stem.is_some_and(|(stem, _)| stem == word)
                || self.pod.as_deref() == Some(word)
                || self.container.as_deref() == Some(word)
        };
        let qualified_name = word
            .split_once('/')
            .filter(|(kind, _)| *kind == self.kind.text());
        self.has_trusted_name() && is_named_by(word)
            || qualified_name.is_some_and(|(_, unit_name)| is_named_by(unit_name))
    }
}

impl fmt::Display for ServiceIdentity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.kind, self.name)
    }
}

/// The service of a control group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CgroupService {
    /// The service.
    pub identity: ServiceIdentity,
    /// Does the group contain processes of the runtime rather than of the service: a guest's emulator, a job's step
    /// daemon?
    pub is_helper: bool,
}

const UNIT_SUFFIXES: [&str; 5] = ["service", "scope", "socket", "mount", "swap"];

/// `text` is that of `/proc/PID/cgroup`; `None` if no path in it names a service.
///
/// On cgroup v1 each controller has its own hierarchy, and a batch system uses only some of them,
/// so the most specific path counts.
pub fn service_of_cgroups(text: &str) -> Option<CgroupService> {
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let services = paths.filter_map(service_of_cgroup);
    services.fold(None, |best: Option<CgroupService>, service| match best {
        Some(best)
            if specificity_of(best.identity.kind) >= specificity_of(service.identity.kind) =>
        {
            Some(best)
        }
        _ => Some(service),
    })
}

/// Higher is more specific.
fn specificity_of(kind: ServiceKind) -> u32 {
    match kind {
        ServiceKind::Command => 0,
        ServiceKind::Session => 1,
        ServiceKind::Unit => 2,
        ServiceKind::UserUnit => 3,
        ServiceKind::Job => 4,
        ServiceKind::Guest => 5,
        ServiceKind::Container => 6,
        ServiceKind::Pod => 7,
    }
}

/// `None` if the path names no service. Below a user's service manager (`user@UID.service`) the
/// user makes and names the groups, so that nothing there but her units is a service.
pub fn service_of_cgroup(path: &str) -> Option<CgroupService> {
    let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
    if user_manager_index(&names).is_some() {
        return unit_service(&names);
    }
    pod_service(&names)
        .or_else(|| container_service(&names))
        .or_else(|| guest_service(&names))
        .or_else(|| job_service(&names))
        .or_else(|| unit_service(&names))
}

fn program_service(identity: ServiceIdentity) -> CgroupService {
    CgroupService {
        identity,
        is_helper: false,
    }
}

/// Parses `/kubepods/burstable/podUID/ID` and
/// `/kubepods.slice/.../kubepods-burstable-podUID.slice/cri-containerd-ID.scope`.
fn pod_service(names: &[&str]) -> Option<CgroupService> {
    let uid_of = |name: &&str| {
        let uid = match name.strip_suffix(".slice") {
            Some(slice) => slice
                .rsplit_once("-pod")
                .map(|(_, uid)| uid.replace('_', "-")),
            None => name.strip_prefix("pod").map(str::to_string),
        };
        uid.filter(|uid| is_pod_uid(uid))
    };

    let first_index = names
        .iter()
        .position(|name| name.starts_with("kubepods") || name.contains("-kubepods"))?;
    let (index, uid) =
        (first_index..names.len()).find_map(|index| Some((index, uid_of(&names[index])?)))?;
    let child_name = names.get(index + 1).copied();
    let container = child_name.and_then(container_id);
    // CRI-O and Podman keep their monitor in a separate group, beside the containers.
    let is_helper = child_name.is_some_and(|name| name.contains("conmon"));
    Some(CgroupService {
        identity: ServiceIdentity::from_pod(&uid, container),
        is_helper,
    })
}

/// A UUID, or the 32 hex digits of a static pod.
fn is_pod_uid(uid: &str) -> bool {
    uid.len() >= 8 && uid.len() <= 64 && uid.chars().all(|c| c.is_ascii_hexdigit() || c == '-')
}

/// Parses `ID`, `docker-ID.scope`, `cri-containerd-ID.scope` and `cri-containerd:...:ID`; returns the id.
fn container_id(name: &str) -> Option<&str> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let id = name.rsplit(['-', ':']).next()?;
    (id.len() == 64 && id.chars().all(|c| c.is_ascii_hexdigit()) && !name.contains("conmon"))
        .then_some(id)
}

/// Prefixes of the scopes in which container engines put a container.
const CONTAINER_SCOPES: [&str; 6] = [
    "docker-",
    "libpod-",
    "cri-containerd-",
    "crio-",
    "nerdctl-",
    "buildkit-",
];

/// Parses `/docker/ID`, `/system.slice/docker-ID.scope`, `/machine.slice/libpod-ID.scope` and `lxc.payload.NAME`.
fn container_service(names: &[&str]) -> Option<CgroupService> {
    names.iter().enumerate().find_map(|(index, name)| {
        if let Some(monitored_name) = name
            .strip_prefix("libpod-conmon-")
            .or_else(|| name.strip_prefix("crio-conmon-"))
        {
            let id = container_id(monitored_name)?;
            return Some(CgroupService {
                identity: ServiceIdentity::container(id),
                is_helper: true,
            });
        }

        if let Some(name) = name
            .strip_prefix("lxc.payload.")
            .or_else(|| name.strip_prefix("lxc.monitor."))
        {
            let identity = ServiceIdentity::container(name);
            return Some(CgroupService {
                identity,
                is_helper: names[index].starts_with("lxc.monitor."),
            });
        }

        let parent_name = index.checked_sub(1).map(|parent_index| names[parent_index]);
        let is_scope = name.ends_with(".scope")
            && CONTAINER_SCOPES
                .iter()
                .any(|prefix| name.starts_with(prefix));
        let is_bare = matches!(parent_name, Some("docker" | "libpod" | "libpod_parent"));
        let id =
            container_id(name).filter(|_| is_scope || is_bare || !name.contains(['-', '.']))?;
        Some(program_service(ServiceIdentity::container(id)))
    })
}

/// Parses `/machine.slice/machine-qemu\x2dN\x2dNAME.scope/libvirt/{vcpuN,emulator}`.
fn guest_service(names: &[&str]) -> Option<CgroupService> {
    let index = names
        .iter()
        .position(|name| name.starts_with("machine-") && name.ends_with(".scope"))?;
    let machine = unescape_unit_name(
        names[index]
            .strip_prefix("machine-")?
            .strip_suffix(".scope")?,
    );
    let Some(domain) = machine
        .strip_prefix("qemu-")
        .or_else(|| machine.strip_prefix("ch-"))
    else {
        return Some(program_service(ServiceIdentity::container(&machine)));
    };
    let name = match domain.split_once('-') {
        Some((number, name))
            if !number.is_empty() && number.chars().all(|c| c.is_ascii_digit()) =>
        {
            name
        }
        _ => domain,
    };
    // Threads outside the groups of virtual CPUs emulate devices.
    let is_helper = names[index + 1..].contains(&"emulator");
    Some(CgroupService {
        identity: ServiceIdentity::new(ServiceKind::Guest, name),
        is_helper,
    })
}

/// Parses `/slurm_NODE/uid_U/job_J/step_S/task_T` and `/system.slice/slurmstepd.scope/job_J/step_S/user/task_T`.
fn job_service(names: &[&str]) -> Option<CgroupService> {
    let is_slurm = |name: &&str| name.starts_with("slurm") || name.ends_with("slurmstepd.scope");
    let index = names.iter().position(is_slurm)?;
    let job_path = &names[index + 1..];
    let number = job_path.iter().find_map(|name| name.strip_prefix("job_"))?;
    if number.is_empty()
        || !number
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '+' | '-'))
    {
        return None;
    }
    // Version 2 keeps the step daemon in a group beside the user's.
    let is_helper = job_path.last() == Some(&"slurm");
    Some(CgroupService {
        identity: ServiceIdentity::new(ServiceKind::Job, number),
        is_helper,
    })
}

fn user_manager_index(names: &[&str]) -> Option<usize> {
    names
        .iter()
        .position(|name| name.starts_with("user@") && name.ends_with(".service"))
}

/// Units and sessions: `/system.slice/NAME.service`, `user@UID.service/app.slice/NAME`, `session-N.scope`.
fn unit_service(names: &[&str]) -> Option<CgroupService> {
    let has_unit_suffix = |name: &str| {
        name.rsplit_once('.')
            .is_some_and(|(_, suffix)| UNIT_SUFFIXES.contains(&suffix))
    };
    if let Some(manager) = user_manager_index(names) {
        let user_unit = names[manager + 1..]
            .iter()
            .find(|name| has_unit_suffix(name));
        let name = user_unit.copied().unwrap_or(names[manager]);
        return Some(program_service(ServiceIdentity::new(
            ServiceKind::UserUnit,
            name,
        )));
    }

    let name = names.iter().find(|name| has_unit_suffix(name))?;
    let kind =
        match name.starts_with("session-") && names.iter().any(|name| name.starts_with("user-")) {
            true => ServiceKind::Session,
            false => ServiceKind::Unit,
        };
    Some(program_service(ServiceIdentity::new(kind, *name)))
}

/// Decodes systemd's escapes, such as `\x2d` for a `-` that is part of a name.
fn unescape_unit_name(name: &str) -> String {
    let mut bytes = Vec::with_capacity(name.len());
    let mut remaining_bytes = name.as_bytes();
    while let Some((&first, after)) = remaining_bytes.split_first() {
        let digits = after.strip_prefix(b"x").and_then(|digits| digits.get(..2));
        let code = digits
            .filter(|_| first == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                remaining_bytes = &after[3..];
            }
            None => {
                bytes.push(first);
                remaining_bytes = after;
            }
        }
    }

    String::from_utf8_lossy(&bytes).into_owned()
}

fn shorten_id(id: &str) -> &str {
    let is_id = id.len() == 64 && id.chars().all(|c| c.is_ascii_hexdigit());
    if is_id { &id[..SHORT_ID] } else { id }
}

/// Whether a program of this name belongs to the runtime of a service rather than to the service.
/// These are pause containers, monitors, shims, step daemons, and a child that has not yet executed
/// its program (`runc:[2:INIT]`, `(server)`). Anyone can give a program such a name, so outside of
/// containers only root's programs are helpers.
pub fn is_runtime_helper(command: &str, kind: Option<ServiceKind>, is_roots: bool) -> bool {
    let helper_prefixes = [
        "containerd-shim",
        "runc:[",
        "slurmstepd",
        "conmon",
        "crun:[",
    ];
    let is_contained = matches!(kind, Some(ServiceKind::Pod | ServiceKind::Container));
    is_roots
        && helper_prefixes
            .iter()
            .any(|prefix| command.starts_with(prefix))
        || is_contained
            && matches!(
                command,
                "pause" | "runc" | "crun" | "catatonit" | "docker-init" | "tini"
            )
        || is_roots && command.starts_with('(') && command.ends_with(')')
}

/// The other threads of a guest's process emulate devices.
pub fn is_virtual_cpu(thread: &str) -> bool {
    let number = thread
        .strip_prefix("CPU ")
        .and_then(|after_prefix| after_prefix.split('/').next());
    number.is_some_and(|number| !number.is_empty() && number.chars().all(|c| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const UID: &str = "3f7a1c22-8a6e-4d5f-9b3a-0c1d2e3f4a5b";

    fn read(path: &str) -> Option<(String, bool)> {
        let path = path
            .replace("ID", ID)
            .replace("UU", UID)
            .replace("U_", &UID.replace('-', "_"));
        service_of_cgroup(&path).map(|service| (service.identity.to_string(), service.is_helper))
    }

    /// Does every pattern of every runtime name its service, and its helpers?
    #[test]
    fn each_path_names_its_service() {
        let pod = format!("pod/{UID}/{}", &ID[..12]);

        for (path, expected, is_helper) in [
            ("/system.slice/redis.service", "unit/redis.service", false),
            (
                "/system.slice/system-getty.slice/getty@tty1.service",
                "unit/getty@tty1.service",
                false,
            ),
            ("/system.slice/run-r12.scope", "unit/run-r12.scope", false),
            (
                "/user.slice/user-1000.slice/session-3.scope",
                "session/session-3.scope",
                false,
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/web.service",
                "user-unit/web.service",
                false,
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/app-org.gnome.scope/x",
                "user-unit/app-org.gnome.scope",
                false,
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/init.scope",
                "user-unit/init.scope",
                false,
            ),
            ("/kubepods/podUU/ID", &pod, false),
            ("/kubepods/burstable/podUU/ID", &pod, false),
            (
                "/kubepods/besteffort/podUU/ID/nested/x.service",
                &pod,
                false,
            ),
            (
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podU_.slice/cri-containerd-ID.scope",
                &pod,
                false,
            ),
            (
                "/kubepods.slice/kubepods-podU_.slice/crio-ID.scope",
                &pod,
                false,
            ),
            (
                "/kubepods.slice/kubepods-podU_.slice/crio-conmon-ID.scope",
                &format!("pod/{UID}"),
                true,
            ),
            (
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podU_.slice/cri-containerd-ID.scope",
                &pod,
                false,
            ),
            ("/docker/ID", &format!("container/{}", &ID[..12]), false),
            (
                "/system.slice/docker-ID.scope",
                &format!("container/{}", &ID[..12]),
                false,
            ),
            (
                "/system.slice/docker-ID.scope/system.slice/x.service",
                &format!("container/{}", &ID[..12]),
                false,
            ),
            (
                "/machine.slice/libpod-ID.scope/container",
                &format!("container/{}", &ID[..12]),
                false,
            ),
            (
                "/machine.slice/libpod-conmon-ID.scope",
                &format!("container/{}", &ID[..12]),
                true,
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope",
                &format!("user-unit/libpod-{ID}.scope"),
                false,
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/kubepods/podUU/ID",
                "user-unit/user@1000.service",
                false,
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/slurmx/job_42",
                "user-unit/user@1000.service",
                false,
            ),
            ("/default/ID", &format!("container/{}", &ID[..12]), false),
            (
                "/lxc.payload.web/system.slice/x.service",
                "container/web",
                false,
            ),
            (
                "/slurm_node7/uid_1000/job_42/step_0/task_1",
                "job/42",
                false,
            ),
            ("/slurm/uid_0/job_1", "job/1", false),
            (
                "/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0",
                "job/42",
                false,
            ),
            (
                "/system.slice/slurmstepd.scope/job_42/step_batch/slurm",
                "job/42",
                true,
            ),
            (
                "/system.slice/node7_slurmstepd.scope/job_42/step_0/user",
                "job/42",
                false,
            ),
            (
                "/system.slice/slurmstepd.scope/system",
                "unit/slurmstepd.scope",
                false,
            ),
            (
                r"/machine.slice/machine-qemu\x2d3\x2dweb\x2d1.scope/libvirt/vcpu0",
                "guest/web-1",
                false,
            ),
            (
                r"/machine.slice/machine-qemu\x2d3\x2dweb.scope/libvirt/emulator",
                "guest/web",
                true,
            ),
            (
                r"/machine.slice/machine-debian.scope",
                "container/debian",
                false,
            ),
        ] {
            assert_eq!(
                read(path),
                Some((expected.to_string(), is_helper)),
                "{path}"
            );
        }
    }

    /// Does a path that names no service give none, whatever it looks like?
    #[test]
    fn other_paths_name_no_service() {
        for path in [
            "",
            "/",
            "/fleet/redis",
            "/kubepods/podx/x",
            "/slurm_node/uid_0",
            "/docker",
            "/a-ID",
            "///",
            "/pod1",
        ] {
            assert_eq!(read(path), None, "{path}");
        }
    }

    /// Do pods and containers have their ids, and does a name identify them?
    #[test]
    fn a_container_of_a_pod_has_both_ids() {
        let service = service_of_cgroup(&format!("/kubepods/pod{UID}/{ID}"))
            .unwrap()
            .identity;
        assert_eq!(
            (service.pod.as_deref(), service.container.as_deref()),
            (Some(UID), Some(ID))
        );
        assert!(
            service.is_named(UID)
                && service.is_named(&format!("pod/{UID}"))
                && service.is_named(ID)
        );
        let unit = ServiceIdentity::new(ServiceKind::Unit, "redis.service");
        assert!(
            ["redis", "redis.service", "unit/redis"]
                .iter()
                .all(|word| unit.is_named(word))
        );
        assert!(
            ["redi", "job/redis", "service", "unit"]
                .iter()
                .all(|word| !unit.is_named(word))
        );
        let users_unit = ServiceIdentity::new(ServiceKind::UserUnit, "redis.service");
        assert!(users_unit.is_named("user-unit/redis") && !users_unit.is_named("redis"));
        let named = ServiceIdentity::from_pod("shop/cart-1", Some("redis"));
        assert!(named.is_named("pod/shop/cart-1") && named.is_named("shop/cart-1/redis"));
    }

    /// On cgroup v1, does the most specific hierarchy decide?
    #[test]
    fn the_most_specific_hierarchy_counts() {
        let name =
            |text: &str| service_of_cgroups(text).map(|service| service.identity.to_string());
        let slurm = "9:cpuset:/\n8:freezer:/slurm_n/uid_0/job_7/step_0\n1:name=systemd:/system.slice/slurmd.service\n";
        assert_eq!(name(slurm).as_deref(), Some("job/7"));
        assert_eq!(name("5:cpuset:/\n0::/\n"), None);
        assert_eq!(
            name("0::/system.slice/db.service\n").as_deref(),
            Some("unit/db.service")
        );
        assert_eq!(name("broken\n:\n1:x\n"), None);
        let v1 = format!("4:memory:/docker/{ID}\n1:name=systemd:/system.slice/docker.service\n");
        assert_eq!(name(&v1).unwrap(), format!("container/{}", &ID[..12]));
    }

    /// Are helpers of runtimes distinguished from programs that only have such a name elsewhere?
    #[test]
    fn runtime_helpers_differ_from_programs_of_the_same_name() {
        let pod = Some(ServiceKind::Pod);
        for command in [
            "pause",
            "runc:[2:INIT]",
            "containerd-shim",
            "conmon",
            "slurmstepd",
            "(s-server)",
        ] {
            assert!(is_runtime_helper(command, pod, true), "{command}");
            assert!(!is_runtime_helper(command, None, false), "{command}");
        }
        assert!(!is_runtime_helper("(half", pod, true) && !is_runtime_helper("half)", pod, true));
        assert!(
            !is_runtime_helper("redis-server", pod, true)
                && !is_runtime_helper("pause", Some(ServiceKind::Unit), true)
        );
        assert!(is_virtual_cpu("CPU 0/KVM") && is_virtual_cpu("CPU 12/TCG"));
        assert!(
            !is_virtual_cpu("qemu-system-x86")
                && !is_virtual_cpu("CPU x/KVM")
                && !is_virtual_cpu("IO iothread1")
        );
    }

    /// Are escapes in unit names decoded, and malformed ones kept?
    #[test]
    fn unit_name_escapes_are_decoded_and_malformed_ones_kept() {
        assert_eq!(unescape_unit_name(r"qemu\x2d1\x2da"), "qemu-1-a");
        assert_eq!(unescape_unit_name(r"a\x2"), r"a\x2");
        assert_eq!(unescape_unit_name(r"a\xzz\"), r"a\xzz\");
        assert_eq!(unescape_unit_name("é\\xff"), "é\u{fffd}");
    }
}
