//! The `cachemate` command.
//!
//! Each command has one file in `commands/` and one line in [`commands::Command`]. Commands compute results, pass them
//! to [`session::Session::print_result`] and never print themselves. A single place therefore guarantees the properties on
//! which scripts rely: one JSON object on standard output; messages on standard error, and only to a terminal; exit
//! codes; no overwriting; quiet broken pipes.
#![deny(clippy::print_stdout, clippy::print_stderr)]
// The command of the daemon's package leaves out commands, and with them callers of what all commands share.
#![cfg_attr(not(feature = "complete"), allow(dead_code))]

#[cfg(feature = "complete")]
mod api_server;
mod args;
mod commands;
mod exit;
#[cfg(feature = "complete")]
mod extender_metrics;
#[cfg(feature = "complete")]
mod extender_server;
mod files;
#[cfg(feature = "complete")]
mod goal_plan;
mod history_text;
mod host_machine;
#[cfg(feature = "complete")]
mod input;
#[cfg(feature = "complete")]
mod interval_programs;
#[cfg(feature = "complete")]
mod knowledge_dir;
#[cfg(feature = "complete")]
mod knowledge_watch;
#[cfg(feature = "complete")]
mod node_publisher;
#[cfg(feature = "complete")]
mod pinning;
#[cfg(feature = "complete")]
mod prediction;
#[cfg(feature = "complete")]
mod programs;
#[cfg(feature = "complete")]
mod repro_run;
#[cfg(feature = "complete")]
mod repro_store;
#[cfg(feature = "complete")]
mod run_store;
mod service_text;
mod session;
#[cfg(feature = "complete")]
mod shards;
#[cfg(feature = "complete")]
mod size_list;
mod status_screen;
mod status_text;
#[cfg(feature = "complete")]
mod traces;

use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches};

fn main() -> ExitCode {
    let parsed = commands::Cli::command()
        .try_get_matches()
        .and_then(|matches| {
            Ok((
                commands::Cli::from_arg_matches(&matches)?,
                prints_json(&matches),
            ))
        });
    let (cli, prints_json) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return exit::print_usage(error),
    };
    let session = session::Session::new(&cli.global, prints_json);
    exit::exit_code_of(cli.command.run(&session))
}

/// Returns whether the command or one of its subcommands was given `--json`.
fn prints_json(matches: &ArgMatches) -> bool {
    let has_flag = matches
        .try_get_one::<bool>("json")
        .is_ok_and(|flag| flag == Some(&true));
    has_flag
        || matches
            .subcommand()
            .is_some_and(|(_, subcommand)| prints_json(subcommand))
}
