//! The commands, one file each.

use clap::{Parser, Subcommand};

use crate::args::Global;
use crate::session::Session;

mod completions;
mod doctor;
mod explain;
pub mod history;
mod man;
mod manage;
mod page_color;
mod restore;
mod run;
pub mod status;
mod top;
pub mod topology;

/// Decides which programs share a cache, and how much of it each program gets.
///
/// cachemate records real programs, profiles how they use a cache, predicts how much they slow each other down, and
/// plans on which CPUs they run, with reasons. Sizes take K, M and G (powers of 1024). Exit codes: 0 done, 1 the input
/// or the host is at fault, 2 usage, 130 interrupted.
#[derive(Parser)]
#[command(name = "cachemate", version = env!("CACHEMATE_VERSION"), max_term_width = 100, propagate_version = true)]
#[cfg_attr(
    not(feature = "complete"),
    command(
        after_help = "This is the package cachemate-daemon; the package cachemate also records, predicts, plans and simulates"
    )
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    #[cfg(feature = "complete")]
    #[command(flatten)]
    Complete(crate::complete::commands::CompleteCommand),
    PageColor(page_color::PageColorArgs),
    Topology(topology::TopologyArgs),
    Doctor(doctor::Doctor),
    Run(run::RunArgs),
    Manage(manage::Manage),
    Status(status::StatusArgs),
    Top(top::Top),
    Explain(explain::Explain),
    History(history::HistoryArgs),
    Restore(restore::RestoreArgs),
    Completions(completions::Completions),
}

impl Command {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match self {
            #[cfg(feature = "complete")]
            Command::Complete(command) => command.run(session),
            Command::PageColor(command) => command.run(session),
            Command::Topology(command) => {
                session.limit_calculation();
                command.run(session)
            }
            Command::Doctor(command) => command.run(session),
            Command::Run(command) => command.run(session),
            Command::Manage(command) => command.run(session),
            Command::Status(command) => command.run(session),
            Command::Top(command) => command.run(session),
            Command::Explain(command) => command.run(session),
            Command::History(command) => command.run(session),
            Command::Restore(command) => command.run(session),
            Command::Completions(command) => command.run(session),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn unexplained(command: &clap::Command, parent_path: &str, paths: &mut Vec<String>) {
        let path = format!("{parent_path} {}", command.get_name());
        if command.get_about().is_none() {
            paths.push(path.clone());
        }
        let shown_arguments = command
            .get_arguments()
            .filter(|argument| !argument.is_hide_set());
        let silent = shown_arguments.filter(|argument| argument.get_help().is_none());
        paths.extend(silent.map(|argument| format!("{path}: {}", argument.get_id())));
        let subcommands = command
            .get_subcommands()
            .filter(|command| !command.is_hide_set());
        subcommands.for_each(|command| unexplained(command, &path, paths));
    }

    /// Does `--help` explain every command and argument that it shows?
    #[test]
    fn every_command_and_argument_is_explained() {
        let mut missing_help = Vec::new();
        unexplained(&Cli::command(), "", &mut missing_help);
        assert!(missing_help.is_empty(), "{missing_help:#?}");
    }
}
