//! `cachemate manage`: runs the daemon.

use std::path::PathBuf;

use cachemate_page::serve::page::PageAddress;
use clap::Args;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

#[cfg(feature = "complete")]
use crate::complete::cluster_args::ClusterArgs;
use crate::session::Session;
use cachemate_daemon::daemon::{ConfigSource, ControlFlags, handle_hangup, run};
use cachemate_daemon::dry_run;
use cachemate_daemon::rule_report::build_rule_report;
use cachemate_daemon::{path_checks, paths, unit_sandbox};
use cachemate_linux::nri::{self, NriOptions};

/// Run the daemon: measure the programs on this host and, with `mode = "act"`, place them and partition caches
///
/// Without a configuration, no program is managed. Unless it sets 'mode = "act"', nothing on the host is changed, and
/// status and top show the changes that would be made. When the daemon ends, for whatever reason, every change is
/// undone. On SIGHUP the daemon rereads the configuration; an invalid one is reported, and the previous one stays in
/// force. See docs/live.md.
#[derive(Args)]
pub struct Manage {
    /// Use this policy instead of the configured one
    #[arg(long, short, value_name = "POLICY")]
    policy: Option<String>,
    /// Configuration file [default: /etc/cachemate/cachemate.toml for root, else ~/.config/cachemate/cachemate.toml]
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Change nothing, even if the configuration sets 'mode = "act"'
    #[arg(long)]
    observe_only: bool,
    /// Check the configuration, print how each entry is understood and what it matches now, report errors, and exit
    #[arg(long)]
    check: bool,
    /// Print the first changes that would be made, and exit without making them
    #[arg(long, conflicts_with = "check")]
    dry_run: bool,
    /// End a dry run after this many windows without a change
    #[arg(long, value_name = "N", requires = "dry_run", default_value_t = dry_run::MAX_WINDOWS)]
    max_windows: u64,
    /// Print the result of a dry run as one JSON object
    #[arg(long, requires = "dry_run")]
    json: bool,
    /// Directory of the restore journal
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Serve the dashboard on a loopback address such as 127.0.0.1:9754, or on a socket at a path
    ///
    /// The address, with the token that it requires, is printed at the start.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["check", "dry_run"])]
    dashboard: Option<String>,
    /// Serve the dashboard to every user of this host, without a token
    #[arg(long, requires = "dashboard")]
    dashboard_no_auth: bool,
    /// Register as a plugin of the container runtime, for the names of pods and containers [default socket:
    /// /var/run/nri/nri.sock]
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, default_missing_value = nri::SOCKET, conflicts_with_all = ["check", "dry_run"])]
    nri: Option<PathBuf>,
    /// Position among the plugins of the container runtime, 0 to 99
    #[arg(long, value_name = "N", requires = "nri", default_value_t = 10, value_parser = clap::value_parser!(u8).range(0..100))]
    nri_index: u8,
    #[cfg(feature = "complete")]
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Socket that status, top and explain connect to
    #[arg(long, value_name = "FILE")]
    socket: Option<PathBuf>,
}

impl Manage {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let source = ConfigSource {
            file: self.config.clone(),
            is_named: self.config.is_some(),
            policy: self.policy.clone(),
            is_observe_only: self.observe_only,
            state_dir: self.state_dir.clone(),
            socket: self.socket.clone(),
            nri: self.nri.clone().map(|socket| NriOptions {
                socket,
                index: self.nri_index,
            }),
            page: self.dashboard.clone().map(|address| PageAddress {
                address,
                requires_token: !self.dashboard_no_auth,
            }),
        };
        if self.check {
            let config = source.read()?;
            let profiles = path_checks::check_config(&config)?;
            let report = build_rule_report(&config, profiles.keys().map(String::as_str))?;
            source
                .describe_absence()
                .iter()
                .for_each(|absence| session.warn(absence));
            report
                .lines
                .iter()
                .try_for_each(|line| session.print(&format!("{line}\n")))?;
            // The unit reads the host's configuration; any other one is for a daemon that a user starts.
            let unit_warnings = match source.path().as_os_str() == paths::SYSTEM_CONFIG_FILE {
                true => unit_sandbox::describe_paths_outside_unit(&config),
                false => Vec::new(),
            };
            let warnings = report.warnings.iter().chain(&unit_warnings);
            warnings.for_each(|warning| session.warn(warning));
            return session.print("the configuration is valid\n");
        }
        let control_flags = ControlFlags {
            stop: session.interrupt_flag(),
            ..ControlFlags::default()
        };
        if self.dry_run {
            let result = dry_run::dry_run(&source, &control_flags, self.max_windows)?;
            return session.print_result(self.json, &result, || result.render());
        }
        handle_hangup(&control_flags)?;
        #[cfg(feature = "complete")]
        self.cluster.start(&control_flags, session)?;
        // systemd's journal has the time of each line.
        let is_journaled = std::env::var_os("JOURNAL_STREAM").is_some();
        run(&source, &control_flags, &|message| match is_journaled {
            true => session.log(message),
            false => session.log(&format!("{} {message}", time_of_day())),
        })
    }
}

/// The time in UTC, such as `2026-11-30T14:19:05Z`; empty if the clock is outside of what a date can say.
fn time_of_day() -> String {
    let time = OffsetDateTime::now_utc().replace_nanosecond(0).ok();
    time.and_then(|time| time.format(&Rfc3339).ok())
        .unwrap_or_default()
}
