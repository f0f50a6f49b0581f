//! `cachemate lab`: machines with caches that cost time, modelled under an emulator (docs/lab.md).

use clap::{Args, Subcommand};

use crate::session::Session;

mod config;
mod run;

/// The lab: a modelled machine for an unmodified kernel and unmodified programs
///
/// The machine itself (lab/machine) is a program of its own under the GPL; this command speaks with it by files only.
/// docs/lab.md is a tutorial.
#[derive(Args)]
pub struct Lab {
    #[command(subcommand)]
    what: LabCommand,
}

#[derive(Subcommand)]
enum LabCommand {
    Config(config::LabConfigArgs),
    Run(run::LabRunArgs),
}

impl Lab {
    /// # Errors
    /// What went wrong, in words.
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match &self.what {
            LabCommand::Config(command) => command.run(session),
            LabCommand::Run(command) => command.run(session),
        }
    }
}
