//! `cachemate manage`: the daemon.

use std::path::PathBuf;

use cachemate_page::serve::page::PageAddress;
use clap::Args;

use crate::session::Session;
use cachemate_daemon::daemon::{ConfigSource, ControlFlags, on_hangup, run};
use cachemate_daemon::dry_run;
use cachemate_daemon::path_checks;

/// Manage the programs of this host: measure them, and place them where the configuration says act
///
/// Without a configuration nothing is managed. Without 'mode = "act"' in it nothing on the host is changed: what would be
/// done is shown by status and top. Everything that is changed is put back when the daemon ends, however it ends.
/// SIGHUP reads the configuration again; a wrong one is reported, and the one before stays in force. docs/live.md
/// explains all of it.
#[derive(Args)]
pub struct Manage {
    /// Decide by this policy, whatever the configuration says
    #[arg(long, short, value_name = "POLICY")]
    policy: Option<String>,
    /// The configuration; /etc/cachemate/cachemate.toml for root, ~/.config/cachemate/cachemate.toml for others
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only observe, whatever the configuration says
    #[arg(long)]
    observe_only: bool,
    /// Read and check the configuration, say what is wrong, and end
    #[arg(long)]
    check: bool,
    /// Print the first changes that would be made, and end: nothing is changed
    #[arg(long, conflicts_with = "check")]
    dry_run: bool,
    /// End a dry run after so many looks without anything to change
    #[arg(long, value_name = "N", requires = "dry_run", default_value_t = dry_run::WINDOWS)]
    max_windows: u64,
    /// One JSON object on standard output and nothing else, of a dry run
    #[arg(long, requires = "dry_run")]
    json: bool,
    /// Where the restore journal lies
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Show what happens as a page: on a loopback address such as 127.0.0.1:9754, or on a socket at a path
    ///
    /// Where to look, and the token without which nothing is shown, is printed at the start.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["check", "dry_run"])]
    dashboard: Option<String>,
    /// Let everybody on this host look at the page
    #[arg(long, requires = "dashboard")]
    dashboard_no_auth: bool,
    /// Socket at which status, top and explain ask
    #[arg(long, value_name = "FILE")]
    socket: Option<PathBuf>,
}

impl Manage {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let source = ConfigSource {
            file: self.config.clone(),
            named: self.config.is_some(),
            policy: self.policy.clone(),
            observe: self.observe_only,
            state_dir: self.state_dir.clone(),
            socket: self.socket.clone(),
            page: self.dashboard.clone().map(|address| PageAddress { address, token: !self.dashboard_no_auth }),
        };
        if self.check {
            path_checks::check(&source.read()?)?;
            session.note("the configuration is fine");
            return Ok(());
        }
        let switches = ControlFlags { stop: session.interrupt_flag(), ..ControlFlags::default() };
        if self.dry_run {
            let answer = dry_run::manage(&source, &switches, self.max_windows)?;
            return session.answer(self.json, &answer, || answer.words());
        }
        on_hangup(&switches)?;
        run(&source, &switches, &|words| session.log(words))
    }
}
