//! `cachemate guardian`: restores the host after a crash. Daemons and managed runs start it; users never do.

use std::path::PathBuf;

use cachemate_daemon::guardian;
use clap::Args;

use crate::session::Session;

/// Wait for the end of the process on standard input, and restore the host if the process did not
#[derive(Args)]
pub struct GuardianArgs {
    /// Directory of the restore journal
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,
}

impl GuardianArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        guardian::run(&self.state_dir, &|message| session.warn(message))
    }
}
