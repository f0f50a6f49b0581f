//! `cachemate reset`: everything as it was before anybody managed this host.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use cachemate_linux::guardian::{Lock, restore_left_behind};
use cachemate_linux::kernel::Host;
use cachemate_linux::resctrl;
use cachemate_linux::restore::{Outcome, Restored};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::live::paths;
use crate::session::Session;

/// Put back whatever a daemon or a run that died has left changed
///
/// Affinities, nice values, scheduling policies, cpusets and groups become what they were. What somebody else has changed since
/// is left alone and told. A running daemon is not disturbed: it puts everything back itself when it ends.
#[derive(Args)]
pub struct Reset {
    /// Where the restore journal lies
    #[arg(long, value_name = "FOLDER")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate reset --json`.
#[derive(Default, Serialize)]
struct ResetJson {
    put_back: usize,
    unchanged: usize,
    gone: usize,
    /// Groups of ours in resctrl whose owner and journal are gone.
    orphans: Vec<String>,
    /// Changed by somebody else since, and left alone.
    theirs: Vec<String>,
    failed: Vec<String>,
}

impl ResetJson {
    fn add(&mut self, account: &[Restored]) {
        for line in account {
            match &line.outcome {
                Outcome::PutBack => self.put_back += 1,
                Outcome::Unchanged => self.unchanged += 1,
                Outcome::Gone => self.gone += 1,
                Outcome::Theirs(now) => self.theirs.push(format!("{:?} is {now}", line.object)),
                Outcome::Failed(why) => self.failed.push(format!("{:?}: {why}", line.object)),
            }
        }
    }

    fn words(&self) -> String {
        let mut text =
            format!("{} put back, {} were as before, {} are gone\n", self.put_back, self.unchanged, self.gone);
        self.orphans.iter().for_each(|line| text.push_str(&format!("{line}\n")));
        self.theirs.iter().for_each(|line| text.push_str(&format!("left alone, changed by somebody else: {line}\n")));
        self.failed.iter().for_each(|line| text.push_str(&format!("not put back: {line}\n")));
        text
    }
}

impl Reset {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let state_dir = self.state_dir.clone().unwrap_or_else(paths::state_dir);
        let mut result = ResetJson::default();
        let mut dirs = vec![state_dir.clone()];
        // `cachemate run` keeps a journal of its own, one folder each.
        let runs = std::fs::read_dir(&state_dir).into_iter().flatten().flatten().map(|entry| entry.path());
        dirs.extend(runs.filter(|path| {
            path.is_dir() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("run-"))
        }));
        for dir in dirs.iter().filter(|dir| dir.is_dir()) {
            let Some(_lock) = Lock::daemon_after(dir, Duration::from_secs(10))? else {
                if *dir == state_dir {
                    bail!("a daemon holds {}: stop it, and it puts everything back itself", dir.display());
                }
                continue; // a run that is under way
            };
            result.add(&restore_left_behind(&Host::new("/"), dir)?);
        }
        result.orphans = resctrl::groups::sweep_mounted(&Host::new("/"));
        session.answer(self.json.json, &result, || result.words())?;
        match result.failed.len() {
            0 => Ok(()),
            failed => bail!("{failed} objects could not be put back; the journal is kept"),
        }
    }
}
