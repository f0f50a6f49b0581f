//! `cachemate guardian`: started by whoever changes the host, never by people.

use std::path::PathBuf;

use anyhow::bail;
use cachemate_linux::kernel::Host;
use cachemate_linux::safety::guardian::watch;
use clap::Args;

use crate::session::Session;
use cachemate_daemon::daemon::{complain, say_loss};

/// Wait for the end of the process on standard input, and put the host back if it did not do so itself
#[derive(Args)]
pub struct Guardian {
    #[arg(long, value_name = "FOLDER")]
    state_dir: PathBuf,
}

impl Guardian {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let left = watch(&Host::new("/"), &self.state_dir)?;
        say_loss(&left, &|words| session.warn(words));
        complain(&left.account, &|words| session.warn(words))?;
        if left.damage.is_some() || left.stays.is_some() {
            bail!("look at the restore journal: cachemate reset gives the reason");
        }
        Ok(())
    }
}
