//! The commands, one file each.

use clap::{Parser, Subcommand};

use crate::args::Global;
use crate::session::Session;

mod advise;
mod attribute;
mod cachesim;
mod completions;
mod convert;
mod dashboard;
mod doctor;
mod explain;
mod extender;
mod fleet;
mod guardian;
pub mod history;
mod lab;
mod man;
mod manage;
mod merge;
mod mixes;
mod mrc;
mod page_color;
mod plan;
mod predict;
mod profile;
mod profile_export;
mod record;
mod replay;
mod report;
mod repro;
mod restore;
mod run;
mod sim;
mod sim_interval;
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
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    Record(record::Record),
    Convert(convert::Convert),
    Mrc(mrc::Mrc),
    PageColor(page_color::PageColorArgs),
    Profile(profile::ProfileArgs),
    Topology(topology::TopologyArgs),
    Predict(predict::Predict),
    Plan(plan::PlanArgs),
    Attribute(attribute::AttributeArgs),
    Report(report::ReportArgs),
    Sim(sim::Sim),
    Replay(replay::ReplayArgs),
    Dashboard(dashboard::DashboardArgs),
    Repro(Box<repro::Repro>),
    Merge(merge::MergeArgs),
    Fleet(fleet::FleetArgs),
    Extender(extender::ExtenderArgs),
    Doctor(doctor::Doctor),
    Advise(advise::Advise),
    Run(run::RunArgs),
    Manage(manage::Manage),
    Status(status::StatusArgs),
    Top(top::Top),
    Explain(explain::Explain),
    History(history::HistoryArgs),
    Restore(restore::RestoreArgs),
    Lab(lab::Lab),
    #[command(hide = true)]
    Guardian(guardian::GuardianArgs),
    Completions(completions::Completions),
    Man(man::Man),
}

impl Command {
    /// Returns whether the command only computes, so that an interruption may end it anywhere.
    fn is_calculation(&self) -> bool {
        match self {
            Command::Advise(_)
            | Command::Attribute(_)
            | Command::Plan(_)
            | Command::Predict(_)
            | Command::Replay(_)
            | Command::Report(_)
            | Command::Topology(_) => true,
            Command::Profile(command) => command.is_calculation(),
            _ => false,
        }
    }

    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if self.is_calculation() {
            session.limit_calculation();
        }
        match self {
            Command::Convert(command) => command.run(session),
            Command::Mrc(command) => command.run(session),
            Command::Record(command) => command.run(session),
            Command::PageColor(command) => command.run(session),
            Command::Profile(command) => command.run(session),
            Command::Predict(command) => command.run(session),
            Command::Plan(command) => command.run(session),
            Command::Attribute(command) => command.run(session),
            Command::Report(command) => command.run(session),
            Command::Topology(command) => command.run(session),
            Command::Sim(command) => command.run(session),
            Command::Replay(command) => command.run(session),
            Command::Dashboard(command) => command.run(session),
            Command::Repro(command) => command.run(session),
            Command::Merge(command) => command.run(session),
            Command::Fleet(command) => command.run(session),
            Command::Extender(command) => command.run(session),
            Command::Doctor(command) => command.run(session),
            Command::Advise(command) => command.run(session),
            Command::Run(command) => command.run(session),
            Command::Manage(command) => command.run(session),
            Command::Status(command) => command.run(session),
            Command::Top(command) => command.run(session),
            Command::Explain(command) => command.run(session),
            Command::History(command) => command.run(session),
            Command::Restore(command) => command.run(session),
            Command::Lab(command) => command.run(session),
            Command::Guardian(command) => command.run(session),
            Command::Completions(command) => command.run(session),
            Command::Man(command) => command.run(session),
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
