//! The commands: one file each.

use clap::Subcommand;

use crate::session::Session;

mod completions;
mod man;
mod topology;

#[derive(Subcommand)]
pub enum Command {
    Topology(topology::Topology),
    Completions(completions::Completions),
    Man(man::Man),
}

impl Command {
    /// # Errors
    /// What the command says went wrong; the exit code follows from its kind.
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match self {
            Command::Topology(command) => command.run(session),
            Command::Completions(command) => command.run(session),
            Command::Man(command) => command.run(session),
        }
    }
}
