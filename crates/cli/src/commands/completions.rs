//! `cachemate completions`: prints command-line completions for a shell, or manual pages.

use std::path::PathBuf;

use anyhow::Context;
use cachemate_pipeline::POLICIES;
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::man;
use crate::session::Session;

/// Print completions for a shell, or the manual page
///
/// For example: cachemate completions bash > ~/.local/share/bash-completion/completions/cachemate
#[derive(Args)]
pub struct Completions {
    /// Shell for which completions are printed
    #[arg(value_enum, required_unless_present = "man")]
    shell: Option<Shell>,
    /// Print the manual page instead, or write cachemate.1, one page per command, and cachemate.toml.5 to this
    /// directory, which is created if necessary
    #[arg(long, value_name = "DIR", num_args = 0..=1, conflicts_with = "shell")]
    man: Option<Option<PathBuf>>,
    /// Overwrite existing pages
    #[arg(long, requires = "man")]
    force: bool,
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
        match &self.man {
            Some(Some(dir)) => return man::write_pages(dir, self.force),
            Some(None) => return session.print(&String::from_utf8_lossy(&man::main_page()?)),
            None => {}
        }
        let shell = self.shell.context("SHELL: expected a shell")?;
        let mut script = Vec::new();
        clap_complete::generate(
            shell,
            &mut add_value_names(super::Cli::command()),
            "cachemate",
            &mut script,
        );
        session.print(&String::from_utf8_lossy(&script))
    }
}
