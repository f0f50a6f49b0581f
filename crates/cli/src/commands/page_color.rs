//! `cachemate page-color`: discovers page colors of this host, and confines programs to some of them.

use clap::{Args, Subcommand};

use crate::session::Session;

mod discover;
mod run;
mod verify;

/// Discover page colors, and run unmodified programs on some of them
///
/// Frames that map to the same sets of a cache have the same color. Programs on frames of different colors cannot evict
/// each other's lines. docs/colors.md describes the method, its costs and its limits.
#[derive(Args)]
pub struct PageColorArgs {
    #[command(subcommand)]
    command: PageColorCommand,
}

#[derive(Subcommand)]
enum PageColorCommand {
    Discover(discover::Discover),
    Run(run::ColorRunArgs),
    Verify(verify::Verify),
}

impl PageColorArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match &self.command {
            PageColorCommand::Discover(command) => command.run(session),
            PageColorCommand::Run(command) => command.run(session),
            PageColorCommand::Verify(command) => command.run(session),
        }
    }
}
