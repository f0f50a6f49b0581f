//! The `cachemate` command.
//!
//! Each command has one file in `commands/` and one line in [`commands::Command`]. Commands compute results, pass them
//! to [`session::Session::print_result`] and never print themselves. A single place therefore guarantees the properties on
//! which scripts rely: one JSON object on standard output; messages on standard error, and only to a terminal; exit
//! codes; no overwriting; quiet broken pipes.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod api_server;
mod args;
mod commands;
mod engine_args;
mod exit;
mod extender_metrics;
mod extender_server;
mod files;
mod fleet_sweep;
mod goal_plan;
mod input;
mod interval_programs;
mod job_runner;
mod knowledge_dir;
mod knowledge_watch;
mod node_publisher;
mod pareto_plans;
mod prediction;
mod programs;
mod repro_cost;
mod repro_run;
mod repro_store;
mod repro_sweep;
mod retired;
mod run_store;
mod service_text;
mod session;
mod status_screen;
mod status_text;
mod traces;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    if let Some(refusal) =
        retired::retired_refusal(&commands::Cli::command(), &args, |name| std::env::var_os(name).is_some())
    {
        return exit::exit_code_of(Err(exit::UsageError(refusal).into()));
    }
    let cli = match commands::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit::print_usage(&error),
    };
    let session = session::Session::new(&cli.global);
    exit::exit_code_of(cli.command.run(&session))
}
