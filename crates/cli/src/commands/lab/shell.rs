//! `cachemate lab shell`: opens a shell in a guest on a modeled machine.

use std::process::Command;

use anyhow::{Context, bail};
use clap::Args;

use super::config::ProcessorOptions;
use super::find_script;
use crate::session::Session;

const SHELL_SCRIPT: &str = "shell.sh";

/// Open a shell in a guest on a modeled machine, with this command inside
///
/// `exit` ends the guest. Everything that the guest shows is modeled. Needs the lab's scripts, QEMU and a kernel from Debian
/// packages (docs/lab.md).
#[derive(Args)]
pub struct LabShellArgs {
    /// Bundled machine (lab-2x16M, lab-vm, ...) or TOML file
    #[arg(long, short, value_name = "MACHINE", default_value = "lab-vm")]
    machine: String,
    #[command(flatten)]
    processor: ProcessorOptions,
}

impl LabShellArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let script = find_script(SHELL_SCRIPT)?;
        let machine = cachemate_spec::load_machine(&self.machine)?;
        let config = super::config::render_config(&machine, self.processor)?;
        let job_dir = tempfile::tempdir().context("cannot create a temporary directory")?;
        let machine_path = job_dir.path().join("machine");
        cachemate_files::replace(&machine_path, config.as_bytes())
            .with_context(|| format!("{}: cannot be written", machine_path.display()))?;
        session.note("booting the modeled machine; this takes about ten seconds");
        let binary = std::env::current_exe().context("this command's own file")?;
        let status = Command::new(&script)
            .arg(job_dir.path())
            .arg(&binary)
            .status();
        let status = status.with_context(|| format!("{}: cannot be started", script.display()))?;
        if !status.success() {
            bail!("{}: {status}", script.display());
        }
        Ok(())
    }
}
