//! `cachemate restore`: restores the host to its state before cachemate changed it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use cachemate_linux::act::group_owners::GroupOwners;
use cachemate_linux::act::resctrl;
use cachemate_linux::kernel::{LinuxHost, is_gone};
use cachemate_linux::safety::actuation_lock::ActuationLock;
use cachemate_linux::safety::guardian::{DaemonLock, RecoveryReport, restore_left_behind};
use cachemate_linux::safety::journal;
use cachemate_linux::safety::restore::{RestoreOutcome, RestoredObject};
use cachemate_spec::load_manage_config;
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::session::Session;
use cachemate_daemon::{guardian, paths};

/// Restore everything that a crashed daemon or run left changed
///
/// Affinities, nice values, scheduling policies, cpusets and resctrl groups are restored. Objects that another program
/// has changed since are reported and left as they are. A running daemon is not disturbed, because it restores the host
/// when it ends. Failures are reported, and the exit code is then 1.
#[derive(Args)]
pub struct RestoreArgs {
    /// Directory of the restore journal
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Wait for the end of the process on standard input, and restore the host if the process did not; daemons and
    /// managed runs start this, users never do
    #[arg(long, hide = true, requires = "state_dir")]
    guardian: bool,
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate restore --json`.
#[derive(Default, PartialEq, Serialize)]
struct RestoreJson {
    restored: usize,
    unchanged: usize,
    gone: usize,
    /// cachemate's groups in resctrl whose owner and journal no longer exist.
    orphans: Vec<String>,
    /// Objects that were left as they are, because another program has changed them since.
    changed_by_others: Vec<String>,
    failed: Vec<String>,
    /// Journals with unreadable lines, whose objects may not have been restored; they are reported until they are
    /// removed.
    damaged: Vec<String>,
    /// Journals that could not be removed after everything in them was restored.
    kept: Vec<String>,
}

impl RestoreJson {
    fn add_report(&mut self, report: &RecoveryReport) {
        self.add_account(&report.restored_objects);
        self.kept
            .extend(report.removal_error.as_ref().map(ToString::to_string));
        self.damaged
            .extend(report.damage.as_ref().map(ToString::to_string));
    }

    fn add_account(&mut self, account: &[RestoredObject]) {
        for restored_object in account {
            match &restored_object.outcome {
                RestoreOutcome::Restored => self.restored += 1,
                RestoreOutcome::Unchanged => self.unchanged += 1,
                RestoreOutcome::Gone => self.gone += 1,
                RestoreOutcome::ChangedByOther(current_value) => self
                    .changed_by_others
                    .push(format!("{:?} is {current_value}", restored_object.object)),
                RestoreOutcome::Failed(reason) => self
                    .failed
                    .push(format!("{:?}: {reason}", restored_object.object)),
            }
        }
    }

    fn render(&self) -> String {
        if *self == Self::default() {
            return "nothing to restore: no journal of a crashed daemon or run is left; after a crash, its guardian \
                    restores the host and removes the journal\n"
                .to_string();
        }
        let mut text = format!(
            "{} restored, {} were unchanged, {} no longer exist\n",
            self.restored, self.unchanged, self.gone
        );
        self.orphans
            .iter()
            .for_each(|line| text.push_str(&format!("{line}\n")));
        self.changed_by_others.iter().for_each(|line| {
            text.push_str(&format!(
                "left as it is, changed by another program: {line}\n"
            ))
        });
        self.failed
            .iter()
            .for_each(|line| text.push_str(&format!("not restored: {line}\n")));
        self.damaged
            .iter()
            .for_each(|line| text.push_str(&format!("{line}\n")));
        self.kept.iter().for_each(|line| {
            text.push_str(&format!(
                "restored, but the journal could not be removed: {line}\n"
            ))
        });
        text
    }

    /// Restores from the journal of one locked directory. An unusable journal does not prevent restoring from others.
    fn restore(&mut self, dir: &Path) {
        match restore_left_behind(
            &LinuxHost::new("/").with_owners(GroupOwners::default()),
            dir,
        ) {
            Ok(report) => self.add_report(&report),
            Err(error) => self.failed.push(error.to_string()),
        }
        let already_listed = |path: &PathBuf| {
            self.damaged
                .iter()
                .any(|line| line.starts_with(&path.display().to_string()))
        };
        match journal::find_quarantined(dir) {
            Ok(quarantined_paths) => {
                let earlier_files: Vec<PathBuf> = quarantined_paths
                    .into_iter()
                    .filter(|path| !already_listed(path))
                    .collect();
                self.damaged.extend(
                    earlier_files
                        .iter()
                        .map(|path| format!("{}: quarantined earlier", path.display())),
                );
            }
            Err(error) => self.failed.push(format!("{}: {error}", dir.display())),
        }
    }
}

impl RestoreArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let state_dir = self.state_dir.clone().unwrap_or_else(paths::state_dir);
        if self.guardian {
            return guardian::run(&state_dir, &|message| session.warn(message));
        }
        let mut result = RestoreJson::default();
        let mut dirs = state_dirs(&state_dir)?;
        // The default directory is missing if nothing was ever changed; a named one, if its name is wrong.
        if dirs.is_empty() && self.state_dir.is_some() {
            bail!(
                "{}: no such directory, expected the one with the restore journal",
                state_dir.display()
            );
        }
        for other_dir in self.other_state_dirs(session) {
            if other_dir != std::path::absolute(&state_dir).unwrap_or(state_dir.clone()) {
                dirs.extend(state_dirs(&other_dir)?);
            }
        }
        for dir in dirs {
            match DaemonLock::acquire_within(&dir, Duration::from_secs(10)) {
                Ok(Some(_lock)) => result.restore(&dir),
                Ok(None) if dir == state_dir => {
                    bail!(
                        "a daemon holds {}: stop it, and it restores the host itself",
                        dir.display()
                    );
                }
                Ok(None) => {} // a run is in progress
                Err(error) => result.failed.push(error.to_string()),
            }
        }
        for orphan in resctrl::groups::remove_orphans_if_mounted(&LinuxHost::new("/")) {
            let list = if orphan.error.is_some() {
                &mut result.failed
            } else {
                &mut result.orphans
            };
            list.push(orphan.to_string());
        }
        session.print_result(self.json.json, &result, || result.render())?;
        match (
            result.failed.len(),
            result.damaged.len() + result.kept.len(),
        ) {
            (0, 0) => Ok(()),
            (0, _) if result.damaged.is_empty() => {
                bail!(
                    "all is restored, but a journal is left: remove it once the disk can be written"
                )
            }
            (0, _) => bail!("inspect the damaged journal, then remove it"),
            (failed, _) => bail!("{failed} objects could not be restored; the journal is kept"),
        }
    }
}

impl RestoreArgs {
    /// The state directories, other than a named one, in which a daemon of this user may have left a journal: the
    /// default, the one in the configuration, and that of the lock's last owner.
    fn other_state_dirs(&self, session: &Session) -> Vec<PathBuf> {
        let mut dirs = vec![paths::state_dir()];
        let config_file = paths::config_file();
        if cachemate_files::path_exists(&config_file) {
            // A configuration that cannot be read does not keep the host from being restored.
            match load_manage_config(&config_file.display().to_string(), &paths::find_user_id) {
                Ok(config) => dirs.extend(config.state_dir),
                Err(error) => {
                    session.note(&format!("{error}; its state directory is not searched"))
                }
            }
        }
        let last_state_dir = paths::actuation_lock_paths()
            .and_then(|paths| Ok(ActuationLock::last_state_dir(&paths)?));
        match last_state_dir {
            Ok(dir) => dirs.extend(dir),
            Err(error) => session.note(&format!("{error:#}; its state directory is not searched")),
        }
        dirs.retain(|dir| cachemate_files::path_exists(dir));
        dirs.sort();
        dirs.dedup();
        dirs
    }
}

/// The state directory, and the directories of `cachemate run` below it, each with its own journal; empty if it does
/// not exist.
fn state_dirs(state_dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut dirs = vec![state_dir.to_path_buf()];
    let read_run_dirs = || -> io::Result<Vec<PathBuf>> {
        let is_run_dir = |path: &PathBuf| {
            let has_run_name = path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("run-"));
            has_run_name
                && path
                    .symlink_metadata()
                    .is_ok_and(|metadata| metadata.is_dir())
        };
        Ok(cachemate_files::list_dir(state_dir)?
            .into_iter()
            .filter(is_run_dir)
            .collect())
    };
    match read_run_dirs() {
        Ok(run_dirs) => dirs.extend(run_dirs),
        Err(error) if is_gone(&error) => dirs.clear(),
        Err(error) => bail!("{}: {error}", state_dir.display()),
    }
    Ok(dirs)
}
