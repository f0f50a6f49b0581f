//! Units of the host's service manager, as their control groups name them.

use std::path::Path;

use super::Kernel;

/// The client of systemd, below the host's root.
pub(crate) const SYSTEMCTL: &str = "/usr/bin/systemctl";
/// Directory that exists if systemd runs as the first process (`sd_booted`).
const SYSTEMD_RUN_DIR: &str = "/run/systemd/system";
/// Suffixes of units with a control group.
const UNIT_SUFFIXES: [&str; 6] = [".service", ".scope", ".slice", ".socket", ".mount", ".swap"];

/// Whether systemd runs this host, so that it must be asked.
pub(crate) fn is_run_by_systemd(host: &dyn Kernel) -> bool {
    let path_exists = |path: &str| host.exists(Path::new(path)).unwrap_or(false);
    path_exists(SYSTEMD_RUN_DIR) && path_exists(SYSTEMCTL)
}

/// The unit of the host's service manager that has exactly this group. A unit itself manages the groups below it.
pub(crate) fn systemd_unit(group: &str) -> Option<&str> {
    let mut components = group.trim_matches('/').split('/');
    let unit = components.next_back()?;
    let is_unit = UNIT_SUFFIXES
        .iter()
        .any(|suffix| unit.len() > suffix.len() && unit.ends_with(suffix));
    // systemd puts an underscore before names that the kernel reserves.
    let unit = unit.strip_prefix('_').unwrap_or(unit);
    (is_unit && components.all(|slice| slice.ends_with(".slice"))).then_some(unit)
}

/// Whether the group has no CPUs of its own only because systemd enables the controller for units that request it.
pub(crate) fn has_latent_cpuset(kernel: &dyn Kernel, cpus_file: &Path) -> bool {
    let is_v2 = |dir: &Path| {
        kernel
            .exists(&dir.join("cgroup.controllers"))
            .unwrap_or(false)
    };
    let Some(dir) = cpus_file.parent().filter(|dir| is_v2(dir)) else {
        return false;
    };
    let root = dir.ancestors().take_while(|dir| is_v2(dir)).last();
    let group = root
        .and_then(|root| dir.strip_prefix(root).ok())
        .and_then(Path::to_str);
    group.is_some_and(|group| systemd_unit(group).is_some()) && is_run_by_systemd(kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which groups are units of the host's service manager?
    #[test]
    fn units_of_the_service_manager_are_found_by_their_group() {
        for (group, unit) in [
            ("/system.slice/db.service", Some("db.service")),
            ("/system.slice", Some("system.slice")),
            ("/machine.slice/libpod-1.scope", Some("libpod-1.scope")),
            ("/system.slice/_cpu.service", Some("cpu.service")),
            ("/system.slice/containerd.service/a.scope", None),
            (
                "/user.slice/user-7.slice/user@7.service/app.slice/x.service",
                None,
            ),
            ("/kubepods/pod1/2", None),
            ("/.service", None),
            ("/", None),
        ] {
            assert_eq!(systemd_unit(group), unit, "{group}");
        }
    }
}
