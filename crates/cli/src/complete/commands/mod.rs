//! The commands that the package cachemate-daemon leaves out, one file each.

use clap::Subcommand;

use crate::session::Session;

mod attribute;
mod cachesim;
mod extender;
mod fleet;
mod lab;
mod merge;
mod mrc;
mod plan;
mod predict;
mod profile;
mod profile_export;
mod record;
mod replay;
mod replay_page;
mod report;
mod repro;
mod sim;
mod sim_interval;

/// Commands that only the complete command has: programs and traces, simulated machines, clusters.
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
    Lab(lab::Lab),
}

impl CompleteCommand {
    /// A command that only computes may be ended anywhere by an interruption.
    fn is_calculation(&self) -> bool {
        match self {
            CompleteCommand::Plan(_)
            | CompleteCommand::Predict(_)
            | CompleteCommand::Replay(_)
            | CompleteCommand::Report(_) => true,
            CompleteCommand::Profile(command) => command.is_calculation(),
            _ => false,
        }
    }

    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
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
            CompleteCommand::Lab(command) => command.run(session),
        }
    }
}
