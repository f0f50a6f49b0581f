//! `cachemate completions`: prints command-line completions for a shell.

use cachemate_pipeline::POLICIES;
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::session::Session;

/// Print completions for a shell
///
/// For example: cachemate completions bash > ~/.local/share/bash-completion/completions/cachemate
#[derive(Args)]
pub struct Completions {
    /// Shell for which completions are printed
    #[arg(value_enum)]
    shell: Shell,
}

/// Adds the known machines and policies as values of their options. This is for completions only, because a machine
/// may also be a file.
fn add_value_names(command: clap::Command) -> clap::Command {
    let command_with_values = command.mut_args(|arg| {
        let value_name = arg
            .get_value_names()
            .and_then(|names| names.first())
            .map(|name| name.to_string());
        match value_name.as_deref() {
            Some("MACHINE") => {
                arg.value_parser(PossibleValuesParser::new(cachemate_spec::machine_names()))
            }
            Some("POLICY") => {
                let values = POLICIES
                    .entries()
                    .into_iter()
                    .map(|entry| PossibleValue::new(entry.name).help(entry.summary));
                arg.value_parser(PossibleValuesParser::new(values))
            }
            _ => arg,
        }
    });
    command_with_values.mut_subcommands(add_value_names)
}

impl Completions {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(
            self.shell,
            &mut add_value_names(super::Cli::command()),
            "cachemate",
            &mut script,
        );
        session.print(&String::from_utf8_lossy(&script))
    }
}
