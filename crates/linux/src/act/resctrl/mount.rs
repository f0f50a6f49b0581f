//! Mount point of resctrl, or the reason why it cannot be used.

use std::path::{Path, PathBuf};

use crate::MissingFacility;
use crate::kernel::Kernel;
use crate::kernel::text_files::unescape;

/// The number in a file of the mount, without which a facility cannot be used.
pub(super) fn read_number(kernel: &dyn Kernel, path: &Path) -> Result<u32, MissingFacility> {
    let number = kernel
        .read(path)
        .ok()
        .and_then(|text| text.trim().parse().ok());
    number.ok_or_else(|| {
        let reason = format!("{}: expected a whole number", path.display());
        MissingFacility::unusable(reason, None)
    })
}

/// The mount point of the whole file system (a bind mount may show one group only); writable mounts are preferred.
pub(crate) fn mount_point(kernel: &dyn Kernel) -> Result<PathBuf, MissingFacility> {
    let mounts = kernel
        .read(Path::new("/proc/self/mountinfo"))
        .unwrap_or_default();
    let mut mounts: Vec<(bool, PathBuf)> = mounts.lines().filter_map(parse_mount_line).collect();
    mounts.sort_by_key(|(read_only, _)| *read_only);
    match mounts.into_iter().next() {
        Some((false, mount)) => Ok(mount),
        Some((true, mount)) => Err(MissingFacility::unusable(
            format!("{}: mounted read-only", mount.display()),
            Some("remount it rw"),
        )),
        None => {
            let is_supported = kernel
                .read(Path::new("/proc/filesystems"))
                .is_ok_and(|text| text.contains("resctrl"));
            Err(match is_supported {
                true => MissingFacility::unusable(
                    "not mounted",
                    Some("mount -t resctrl resctrl /sys/fs/resctrl"),
                ),
                false => MissingFacility::absent(
                    "the kernel has no resctrl, or the processor no RDT/QoS",
                    Some("bare metal with Intel RDT, AMD QoS or Arm MPAM"),
                ),
            })
        }
    }
}

/// Whether resctrl was mounted with this option.
pub(super) fn has_mount_option(kernel: &dyn Kernel, option: &str) -> bool {
    let mounts = kernel
        .read(Path::new("/proc/self/mountinfo"))
        .unwrap_or_default();
    mounts
        .lines()
        .filter(|line| parse_mount_line(line).is_some())
        .filter_map(|line| line.rsplit(' ').next())
        .any(|options| options.split(',').any(|other| other == option))
}

/// Parses a line such as `36 35 0:30 / /sys/fs/resctrl rw,relatime shared:1 - resctrl resctrl rw`
/// (proc_pid_mountinfo(5)).
fn parse_mount_line(line: &str) -> Option<(bool, PathBuf)> {
    let (mount_text, source_text) = line.split_once(" - ")?;
    let mount_fields: Vec<&str> = mount_text.split(' ').collect();
    let mut source_fields = source_text.split(' ');
    if source_fields.next()? != "resctrl" || *mount_fields.get(3)? != "/" {
        return None;
    }
    let has_read_only_option = |options: &str| options.split(',').any(|option| option == "ro");
    let is_read_only = has_read_only_option(mount_fields.get(5)?)
        || source_fields.nth(1).is_some_and(has_read_only_option);
    Some((is_read_only, PathBuf::from(unescape(mount_fields.get(4)?))))
}
