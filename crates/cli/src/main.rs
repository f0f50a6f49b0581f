//! The `cachemate` command.
//!
//! Scripts rely on a command in ways that its author does not see: they parse its output, test its
//! exit code, cut it off with `head`, and run it where nobody reads messages. A rule that each of
//! two dozen commands has to keep would be broken by the next one. So each command has one file in
//! `commands/` and one line in [`commands::Command`]; commands compute results, pass them to
//! [`session::Session::print_result`], and never print themselves.
//!
//! For example, `cachemate mrc gzip.cmt --json | head -1` prints the first line of one JSON object
//! and ends quietly, and `cachemate record -o gzip.cmt` refuses to overwrite a file of that name
//! unless `--force` is given.
//!
//! # Invariants
//! - With `--json`, standard output has one JSON object with the documented fields, and nothing
//!   else.
//! - Messages go to standard error, and only to a terminal; elsewhere progress is a line every ten
//!   seconds.
//! - Invalid input gives exit code 1 and names the location.
//! - No file is overwritten unless the user says so.
#![deny(clippy::print_stdout, clippy::print_stderr)]
// The command of the daemon's package leaves out commands, and with them callers of what all commands share.
#![cfg_attr(not(feature = "complete"), allow(dead_code))]

mod args;
mod commands;
#[cfg(feature = "complete")]
mod complete;
mod exit;
mod files;
mod history_text;
mod host_machine;
mod service_text;
mod session;
mod status_screen;
mod status_text;

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

/// Whether the command or one of its subcommands was given `--json`.
fn prints_json(matches: &ArgMatches) -> bool {
    let has_flag = matches
        .try_get_one::<bool>("json")
        .is_ok_and(|flag| flag == Some(&true));
    has_flag
        || matches
            .subcommand()
            .is_some_and(|(_, subcommand)| prints_json(subcommand))
}
