//! `cachemate restore`: everything as it was before anybody managed this host.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use cachemate_linux::act::resctrl;
use cachemate_linux::kernel::{LinuxHost, is_gone};
use cachemate_linux::safety::guardian::{Lock, RecoveryReport, restore_left_behind};
use cachemate_linux::safety::journal;
use cachemate_linux::safety::restore::{RestoreOutcome, RestoredObject};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::session::Session;
use cachemate_daemon::paths;

/// Put back whatever a daemon or a run that died has left changed
///
/// Affinities, nice values, scheduling policies, cpusets and groups become what they were. What somebody else has
/// changed since is left alone and reported. A running daemon is not disturbed: it puts everything back itself when it
/// ends. What cannot be put back, or cannot be known any more, is reported, and the exit code is not 0.
#[derive(Args)]
pub struct RestoreArgs {
    /// Where the restore journal lies
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate restore --json`.
#[derive(Default, Serialize)]
struct RestoreJson {
    restored: usize,
    unchanged: usize,
    gone: usize,
    /// Groups of ours in resctrl whose owner and journal are gone.
    orphans: Vec<String>,
    /// Changed by somebody else since, and left alone.
    changed_by_others: Vec<String>,
    failed: Vec<String>,
    /// Journals with lines that cannot be read, until somebody removes them: what those said may not be put back.
    damaged: Vec<String>,
    /// Journals of which everything is put back, but which could not be removed.
    kept: Vec<String>,
}

impl RestoreJson {
    fn add_left(&mut self, left: &RecoveryReport) {
        self.add(&left.account);
        self.kept.extend(left.stays.as_ref().map(ToString::to_string));
        self.damaged.extend(left.damage.as_ref().map(ToString::to_string));
    }

    fn add(&mut self, account: &[RestoredObject]) {
        for line in account {
            match &line.outcome {
                RestoreOutcome::Restored => self.restored += 1,
                RestoreOutcome::Unchanged => self.unchanged += 1,
                RestoreOutcome::Gone => self.gone += 1,
                RestoreOutcome::ChangedByOther(now) => {
                    self.changed_by_others.push(format!("{:?} is {now}", line.object))
                }
                RestoreOutcome::Failed(why) => self.failed.push(format!("{:?}: {why}", line.object)),
            }
        }
    }

    fn words(&self) -> String {
        let mut text =
            format!("{} put back, {} were as before, {} are gone\n", self.restored, self.unchanged, self.gone);
        self.orphans.iter().for_each(|line| text.push_str(&format!("{line}\n")));
        self.changed_by_others
            .iter()
            .for_each(|line| text.push_str(&format!("left alone, changed by somebody else: {line}\n")));
        self.failed.iter().for_each(|line| text.push_str(&format!("not put back: {line}\n")));
        self.damaged.iter().for_each(|line| text.push_str(&format!("{line}\n")));
        self.kept.iter().for_each(|line| text.push_str(&format!("put back, but the journal stays: {line}\n")));
        text
    }
}

impl RestoreArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let state_dir = self.state_dir.clone().unwrap_or_else(paths::state_dir);
        let mut result = RestoreJson::default();
        for dir in folders(&state_dir)? {
            match Lock::daemon_after(&dir, Duration::from_secs(10)) {
                Ok(Some(_lock)) => result.restore(&dir),
                Ok(None) if dir == state_dir => {
                    bail!("a daemon holds {}: stop it, and it puts everything back itself", dir.display());
                }
                Ok(None) => {} // a run that is under way
                Err(error) => result.failed.push(error.to_string()),
            }
        }
        result.orphans = resctrl::groups::sweep_mounted(&LinuxHost::new("/"));
        session.answer(self.json.json, &result, || result.words())?;
        match (result.failed.len(), result.damaged.len() + result.kept.len()) {
            (0, 0) => Ok(()),
            (0, _) => bail!("look at the damaged journal, then remove it"),
            (failed, _) => bail!("{failed} objects could not be put back; the journal is kept"),
        }
    }
}

impl RestoreJson {
    /// One folder, which is locked. A journal that cannot be used stops nothing else.
    fn restore(&mut self, dir: &Path) {
        match restore_left_behind(&LinuxHost::new("/"), dir) {
            Ok(left) => self.add_left(&left),
            Err(error) => self.failed.push(error.to_string()),
        }
        let already_listed =
            |path: &PathBuf| self.damaged.iter().any(|line| line.starts_with(&path.display().to_string()));
        match journal::quarantined(dir) {
            Ok(aside) => {
                let old: Vec<PathBuf> = aside.into_iter().filter(|path| !already_listed(path)).collect();
                self.damaged.extend(old.iter().map(|path| format!("{}: put aside earlier", path.display())));
            }
            Err(error) => self.failed.push(format!("{}: {error}", dir.display())),
        }
    }
}

/// The state folder, and those in it of `cachemate run`, which keeps a journal of its own each time.
fn folders(state_dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut folders = vec![state_dir.to_path_buf()];
    let read = || -> io::Result<Vec<PathBuf>> {
        let mut runs = Vec::new();
        for entry in std::fs::read_dir(state_dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with("run-") && entry.file_type()?.is_dir() {
                runs.push(entry.path());
            }
        }
        runs.sort();
        Ok(runs)
    };
    match read() {
        Ok(runs) => folders.extend(runs),
        Err(error) if is_gone(&error) => folders.clear(),
        Err(error) => bail!("{}: {error}", state_dir.display()),
    }
    Ok(folders)
}
