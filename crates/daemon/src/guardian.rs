//! The process that restores the host if the process that changed it ends without doing so.

use std::path::Path;

use anyhow::bail;
use cachemate_linux::act::group_owners::GroupOwners;
use cachemate_linux::kernel::LinuxHost;
use cachemate_linux::safety::guardian::watch;

use crate::daemon::{report_damage, report_failures};

/// Waits for the end of the process on standard input, and restores the host unless that process did so itself.
///
/// # Errors
/// The journal cannot be read, or one of its objects could not be restored.
pub fn run(state_dir: &Path, report: &dyn Fn(&str)) -> anyhow::Result<()> {
    let recovery = watch(
        &LinuxHost::new("/").with_owners(GroupOwners::default()),
        state_dir,
    )?;
    report_damage(&recovery, report);
    report_failures(&recovery.restored_objects, report)?;
    if recovery.damage.is_some() || recovery.removal_error.is_some() {
        bail!("look at the restore journal: cachemate restore gives the reason");
    }
    Ok(())
}
