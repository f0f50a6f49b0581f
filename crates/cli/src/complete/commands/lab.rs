//! `cachemate lab`: runs modeled machines, whose caches cost time, under an emulator (docs/lab.md).

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand};

use crate::session::Session;

mod config;
mod run;

/// Environment variable with the directory of the lab's scripts.
const LAB_DIR_VARIABLE: &str = "CACHEMATE_LAB";

/// Run an unmodified kernel and unmodified programs on a modeled machine
///
/// The machine itself (lab/machine) is a separate program under the GPL; this command communicates with it by files
/// only. docs/lab.md is a tutorial.
#[derive(Args)]
pub struct Lab {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Subcommand)]
enum LabCommand {
    Config(config::LabConfigArgs),
    Run(run::LabRunArgs),
}

impl Lab {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match &self.command {
            LabCommand::Config(command) => command.run(session),
            LabCommand::Run(command) => command.run(session),
        }
    }
}

/// A script is searched for in the directory that the environment names, beside this build, and in the installation.
fn find_script(name: &str) -> anyhow::Result<PathBuf> {
    let env_dir = std::env::var_os(LAB_DIR_VARIABLE).map(PathBuf::from);
    let own_path = std::env::current_exe().ok();
    let nearby_dirs = own_path
        .iter()
        .flat_map(|own_path| own_path.ancestors().skip(1).map(|dir| dir.join("lab")));
    let installed_dirs =
        ["/usr/local/lib/cachemate/lab", "/usr/lib/cachemate/lab"].map(PathBuf::from);
    let mut dirs = env_dir.into_iter().chain(nearby_dirs).chain(installed_dirs);
    dirs.find_map(|dir| Some(dir.join(name)).filter(|script| script.is_file())).with_context(|| {
        format!(
            "the lab is not installed: it is a separate package (lab/ of the source); {LAB_DIR_VARIABLE} may name its directory"
        )
    })
}
