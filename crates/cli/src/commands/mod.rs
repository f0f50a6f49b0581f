//! The commands: one file each.

use clap::Subcommand;

use crate::session::Session;

mod cachesim;
mod completions;
mod convert;
mod man;
mod mrc;
mod plan;
mod predict;
mod profile;
mod record;
mod replay;
mod report;
mod repro;
mod sim;
mod topology;

#[derive(Subcommand)]
pub enum Command {
    Record(record::Record),
    Convert(convert::Convert),
    Mrc(mrc::Mrc),
    Cachesim(cachesim::Cachesim),
    Profile(profile::Profile),
    Topology(topology::Topology),
    Predict(predict::Predict),
    Plan(plan::Plan),
    Report(report::Report),
    Sim(sim::Sim),
    Replay(replay::ReplayRun),
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
            Command::Record(command) => command.run(session),
            Command::Cachesim(command) => command.run(session),
            Command::Profile(command) => command.run(session),
            Command::Predict(command) => command.run(session),
            Command::Plan(command) => command.run(session),
            Command::Report(command) => command.run(session),
            Command::Topology(command) => command.run(session),
            Command::Sim(command) => command.run(session),
            Command::Replay(command) => command.run(session),
            Command::Repro(command) => command.run(session),
            Command::Completions(command) => command.run(session),
            Command::Man(command) => command.run(session),
        }
    }
}
