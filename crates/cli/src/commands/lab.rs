//! `cachemate lab`: modeled machines whose caches cost time, run under an emulator (docs/lab.md).

use clap::{Args, Subcommand};

use crate::session::Session;

mod config;
mod run;

/// Run an unmodified kernel and unmodified programs on a modeled machine
///
/// The machine itself (lab/machine) is a separate program under the GPL; this command communicates with it by files only.
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
    /// The subcommand failed.
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match &self.what {
            LabCommand::Config(command) => command.run(session),
            LabCommand::Run(command) => command.run(session),
        }
    }
}
