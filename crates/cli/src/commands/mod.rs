//! The commands: one file each.

use clap::Subcommand;

use crate::session::Session;

mod completions;
mod convert;
mod man;
mod mrc;
mod repro;
mod topology;

#[derive(Subcommand)]
pub enum Command {
    Convert(convert::Convert),
    Mrc(mrc::Mrc),
    Topology(topology::Topology),
    Repro(repro::Repro),
    Completions(completions::Completions),
    Man(man::Man),
}

impl Command {
    /// # Errors
    /// What the command says went wrong; the exit code follows from its kind.
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match self {
            Command::Convert(command) => command.run(session),
            Command::Mrc(command) => command.run(session),
            Command::Topology(command) => command.run(session),
            Command::Repro(command) => command.run(session),
            Command::Completions(command) => command.run(session),
            Command::Man(command) => command.run(session),
        }
    }
}
