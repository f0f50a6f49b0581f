//! `cachemate completions`: command-line completions for a shell.

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

impl Completions {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut super::Cli::command(), "cachemate", &mut script);
        session.print(&String::from_utf8_lossy(&script))
    }
}
