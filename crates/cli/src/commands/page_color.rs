//! `cachemate page-color`: page colors of this host, and programs that are kept to some of them.

use clap::{Args, Subcommand};

use crate::session::Session;

mod discover;
mod run;
mod verify;

/// Page colors: find them, run unmodified programs on some of them
///
/// Frames that fall on the same sets of a cache have the same color; programs on frames of different colors cannot push
/// each other out of it. docs/colors.md has the method, its costs and what it covers.
#[derive(Args)]
pub struct PageColorArgs {
    #[command(subcommand)]
    what: PageColorCommand,
}

#[derive(Subcommand)]
enum PageColorCommand {
    Discover(discover::Discover),
    Run(run::ColorRunArgs),
    Verify(verify::Verify),
}

impl PageColorArgs {
    /// # Errors
    /// What went wrong, in words.
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match &self.what {
            PageColorCommand::Discover(command) => command.run(session),
            PageColorCommand::Run(command) => command.run(session),
            PageColorCommand::Verify(command) => command.run(session),
        }
    }
}
