//! The commands, one file each.

use clap::{Parser, Subcommand};

use crate::args::Global;
use crate::session::Session;

#[cfg(feature = "complete")]
mod advise;
#[cfg(feature = "complete")]
mod attribute;
#[cfg(feature = "complete")]
mod cachesim;
mod completions;
mod doctor;
mod explain;
#[cfg(feature = "complete")]
mod extender;
#[cfg(feature = "complete")]
mod fleet;
pub mod history;
#[cfg(feature = "complete")]
mod lab;
mod man;
mod manage;
#[cfg(feature = "complete")]
mod merge;
#[cfg(feature = "complete")]
mod mixes;
#[cfg(feature = "complete")]
mod mrc;
mod page_color;
#[cfg(feature = "complete")]
mod plan;
#[cfg(feature = "complete")]
mod predict;
#[cfg(feature = "complete")]
mod profile;
#[cfg(feature = "complete")]
mod profile_export;
#[cfg(feature = "complete")]
mod record;
#[cfg(feature = "complete")]
mod replay;
#[cfg(feature = "complete")]
mod replay_page;
#[cfg(feature = "complete")]
mod report;
#[cfg(feature = "complete")]
mod repro;
mod restore;
mod run;
#[cfg(feature = "complete")]
mod sim;
#[cfg(feature = "complete")]
mod sim_interval;
#[cfg(feature = "complete")]
mod slurm_node;
mod status;
mod top;
pub mod topology;

/// Decides which programs share a cache, and how much of it each program gets.
///
/// cachemate records real programs, profiles how they use a cache, predicts how much they slow each other down, and plans
/// on which CPUs they run, with reasons.
/// Sizes take K, M and G (powers of 1024). Exit codes: 0 done, 1 the input or the host is at fault, 2 usage,
/// 130 interrupted.
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
    Complete(CompleteCommand),
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

/// Commands that only the complete command has: programs and traces, simulated machines, clusters.
#[cfg(feature = "complete")]
#[derive(Subcommand)]
pub enum CompleteCommand {
    Record(record::Record),
    Mrc(mrc::Mrc),
    Profile(profile::ProfileArgs),
    Predict(predict::Predict),
    Plan(plan::PlanArgs),
    Report(report::ReportArgs),
    Sim(sim::Sim),
    Replay(replay::ReplayArgs),
    Repro(Box<repro::Repro>),
    Merge(merge::MergeArgs),
    Fleet(fleet::FleetArgs),
    Extender(extender::ExtenderArgs),
    Advise(advise::Advise),
    Lab(lab::Lab),
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

#[cfg(feature = "complete")]
impl CompleteCommand {
    /// Returns whether the command only computes, so that an interruption may end it anywhere.
    fn is_calculation(&self) -> bool {
        match self {
            CompleteCommand::Advise(_)
            | CompleteCommand::Plan(_)
            | CompleteCommand::Predict(_)
            | CompleteCommand::Replay(_)
            | CompleteCommand::Report(_) => true,
            CompleteCommand::Profile(command) => command.is_calculation(),
            _ => false,
        }
    }

    fn run(&self, session: &Session) -> anyhow::Result<()> {
        if self.is_calculation() {
            session.limit_calculation();
        }
        match self {
            CompleteCommand::Record(command) => command.run(session),
            CompleteCommand::Mrc(command) => command.run(session),
            CompleteCommand::Profile(command) => command.run(session),
            CompleteCommand::Predict(command) => command.run(session),
            CompleteCommand::Plan(command) => command.run(session),
            CompleteCommand::Report(command) => command.run(session),
            CompleteCommand::Sim(command) => command.run(session),
            CompleteCommand::Replay(command) => command.run(session),
            CompleteCommand::Repro(command) => command.run(session),
            CompleteCommand::Merge(command) => command.run(session),
            CompleteCommand::Fleet(command) => command.run(session),
            CompleteCommand::Extender(command) => command.run(session),
            CompleteCommand::Advise(command) => command.run(session),
            CompleteCommand::Lab(command) => command.run(session),
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
