//! `cachemate history`: the losses of services over time, and their causes.

use std::path::PathBuf;

use anyhow::{Context, anyhow, bail};
use cachemate_daemon::loss_history::{LossHistory, MAX_AGE_S, ServiceMinute, unix_time_s};
use cachemate_daemon::{paths, socket};
use clap::Args;

use super::status::SocketArg;
use crate::args::{JsonArg, TimeAgo};
use crate::history_text::{HistoryJson, overview_text, service_text};
use crate::service_text::nearest_name_hint;
use crate::session::Session;

/// Show the losses of services over time, through the cache and by waiting for CPUs, and their causes
///
/// The daemon stores the worst window of each minute, for eight days. Without a service, the services that lost most
/// are listed; with one, its losses over time, and those that it caused to others. A service that has ended is found as
/// well.
#[derive(Args)]
pub struct HistoryArgs {
    /// A service such as redis, unit/redis or pod/NAMESPACE/NAME
    #[arg(value_name = "SERVICE")]
    service: Option<String>,
    /// Show this much of the past: 30m, 3h, 2d, or 8d at most
    #[arg(long, value_name = "TIME", default_value = "3h")]
    since: TimeAgo,
    /// State directory of the daemon that wrote the history; by default that of the running daemon, or the usual one
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    socket: SocketArg,
    #[command(flatten)]
    json: JsonArg,
}

/// The directory of the history: that of the daemon at this socket or, if none runs, the usual one.
pub fn find_state_dir(state_dir: Option<PathBuf>, socket: &SocketArg) -> PathBuf {
    let running_dir = || {
        let status = socket::query_status(&socket.path()).ok()?;
        status.state_dir.map(PathBuf::from)
    };
    state_dir
        .or_else(running_dir)
        .unwrap_or_else(paths::state_dir)
}

/// Reads what concerns a service, or everything.
///
/// # Errors
/// The files cannot be read.
fn read_history(
    state_dir: &std::path::Path,
    since_unix_s: u64,
    service: Option<&str>,
) -> anyhow::Result<HistoryJson> {
    let is_wanted = |entry: &ServiceMinute| {
        service.is_none_or(|word| entry.is_named(word) || entry.has_cause(word))
    };
    let history = LossHistory::read(state_dir, since_unix_s, is_wanted)
        .with_context(|| format!("{}: the history cannot be read", state_dir.display()))?;
    let LossHistory {
        mut minutes,
        damaged_lines,
    } = history;
    if service.is_some() {
        minutes.retain(|minute| !minute.services.is_empty());
    }
    Ok(HistoryJson {
        service: service.map(str::to_string),
        since_unix_s,
        damaged_lines,
        minutes,
    })
}

impl HistoryArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let state_dir = find_state_dir(self.state_dir.clone(), &self.socket);
        let now_s = unix_time_s();
        let since_s = now_s.saturating_sub(self.since.seconds());
        let history = read_history(&state_dir, since_s, self.service.as_deref())?;
        if history.minutes.is_empty() {
            let all = read_history(&state_dir, now_s.saturating_sub(MAX_AGE_S), None)?;
            return Err(self.absence_error(&state_dir, &all));
        }

        session.print_result(self.json.json, &history, || match &self.service {
            Some(word) => service_text(&history, word),
            None => overview_text(&history),
        })
    }

    /// For a request that the history does not answer: the error names the reason.
    fn absence_error(&self, state_dir: &std::path::Path, all: &HistoryJson) -> anyhow::Error {
        let place = state_dir.display();
        if all.minutes.is_empty() {
            return anyhow!(
                "{place}: there is no history; a daemon (cachemate manage) writes its first minute after a minute"
            );
        }
        let Some(word) = &self.service else {
            return anyhow!(
                "{place}: no minute in the last {}; the history has older ones (--since 8d)",
                self.since
            );
        };
        let is_older = |service: &ServiceMinute| service.is_named(word) || service.has_cause(word);
        let services = all.minutes.iter().flat_map(|minute| &minute.services);
        if services.clone().any(is_older) {
            return anyhow!(
                "no minute of '{word}' in the last {}; the history has older ones (--since 8d)",
                self.since
            );
        }
        let names = services.map(|service| service.name.as_str());
        let hint = nearest_name_hint(word, names);
        anyhow!("the history has no service '{word}'{hint}; cachemate history --since 8d lists all")
    }
}

/// For requests about services that have ended.
///
/// # Errors
/// The files cannot be read, or nothing in them concerns the service.
pub fn read_ended_service(state_dir: &std::path::Path, word: &str) -> anyhow::Result<HistoryJson> {
    let since_s = unix_time_s().saturating_sub(MAX_AGE_S);
    let history = read_history(state_dir, since_s, Some(word))?;
    if history.minutes.is_empty() {
        bail!("the history has no service '{word}'");
    }
    Ok(history)
}
