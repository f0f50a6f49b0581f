//! `cachemate guardian`: started by whoever changes the host, never by people.

use std::path::PathBuf;

use cachemate_daemon::guardian;
use clap::Args;

use crate::session::Session;

/// Wait for the end of the process on standard input, and put the host back if it did not do so itself
#[derive(Args)]
pub struct GuardianArgs {
    /// The folder with the restore journal
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,
}

impl GuardianArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        guardian::run(&self.state_dir, &|words| session.warn(words))
    }
}
