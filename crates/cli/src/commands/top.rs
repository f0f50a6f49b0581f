//! `cachemate top`: shows the daemon's status, refreshed periodically.

use std::io::IsTerminal;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::Args;

use super::status::SocketArg;
use crate::args::JsonArg;
use crate::exit::UsageError;
use crate::session::Session;
use crate::status_screen::ScreenOptions;
use crate::status_text::top_text;
use cachemate_daemon::socket;

/// Watch the services: which slows which, the threads on each cache, and the decisions
///
/// The services come first, with their slowdowns and the causes. For each last-level cache, top then lists the
/// threads with their intensity, class, forecast and measured slowdown, followed by the last decisions. On a terminal
/// it is a full-screen view: q quits, arrow keys scroll. To a pipe it prints once (or -n times). With --json it
/// prints one object per line and iteration until it is stopped.
#[derive(Args)]
pub struct Top {
    /// Time between two iterations
    #[arg(long, short = 'd', value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
    /// Exit after this many iterations
    #[arg(long, short = 'n', value_name = "N")]
    iterations: Option<u64>,
    #[command(flatten)]
    socket: SocketArg,
    /// List the threads of each cache below the services; a full screen always does
    #[arg(long)]
    threads: bool,
    #[command(flatten)]
    json: JsonArg,
}

impl Top {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if !(self.interval >= 0.1 && self.interval <= 3600.0) {
            return Err(UsageError(format!(
                "--interval: found {}, expected 0.1 to 3600 seconds",
                self.interval
            ))
            .into());
        }
        let (stop, interval) = (
            session.interrupt_flag(),
            Duration::from_secs_f64(self.interval),
        );
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let uses_screen = !self.json.json && std::io::stdout().is_terminal() && !is_dumb;
        if uses_screen {
            let socket = self.socket.path();
            let screen = ScreenOptions {
                socket: &socket,
                interval,
                iterations: self.iterations,
                color: session.terminal_style().color,
            };
            return screen.run(&stop);
        }
        let max_iterations = self.iterations.or((!self.json.json).then_some(1));
        let mut iterations = 0;
        while !stop.load(Ordering::Relaxed) {
            let status = socket::query_status(&self.socket.path())?;
            if self.json.json {
                session.print_json(&serde_json::to_string(&status)?)?;
            } else {
                session.print(&top_text(&status, self.threads, session.columns()))?;
            }
            iterations += 1;
            if max_iterations.is_some_and(|max_iterations| iterations >= max_iterations) {
                break;
            }
            let next_iteration = Instant::now() + interval;
            while Instant::now() < next_iteration && !stop.load(Ordering::Relaxed) {
                std::thread::sleep(
                    Duration::from_millis(50)
                        .min(next_iteration.saturating_duration_since(Instant::now())),
                );
            }
        }
        Ok(())
    }
}
