//! `cachemate man`: manual pages, generated from the definition of the command line.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, CommandFactory};

use crate::files::write_file;
use crate::session::Session;

/// Print the manual page, or write one page per command to a directory
#[derive(Args)]
pub struct Man {
    /// Write cachemate.1 and one page per command to this directory, which is created if necessary
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Overwrite existing pages
    #[arg(long, requires = "dir")]
    force: bool,
}

impl Man {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let mut command = super::Cli::command();
        command.build();
        let Some(folder) = &self.dir else {
            return session.print(&String::from_utf8_lossy(&page(command)?));
        };
        std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot be created", folder.display()))?;
        let pages = command.get_subcommands().filter(|sub| sub.get_name() != "help" && !sub.is_hide_set()).map(|sub| {
            let name = format!("cachemate-{}", sub.get_name());
            (format!("{name}.1"), sub.clone().display_name(&name))
        });
        let pages: Vec<_> = pages.chain([("cachemate.1".to_string(), command.clone())]).collect();
        for (name, command) in pages {
            write_file(&folder.join(name), &page(command)?, self.force)?;
        }
        Ok(())
    }
}

fn page(command: clap::Command) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    clap_mangen::Man::new(command).render(&mut text).context("cannot render the manual page")?;
    Ok(text)
}
