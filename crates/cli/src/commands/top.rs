//! `cachemate top`: the daemon's status, again and again.

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

/// Watch the caches: who is on each, its intensity and slowdown, and what was decided
///
/// Per last-level cache the programs with their intensity, class, forecast and measured slowdown, then the last decisions.
/// On a terminal that is a screen: q ends it, arrow keys scroll. Into a pipe it prints once (or -n times). With --json one
/// object per line and look, until it is ended.
#[derive(Args)]
pub struct Top {
    /// Time between two looks
    #[arg(long, short = 'd', value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
    /// End after that many looks
    #[arg(long, short = 'n', value_name = "N")]
    iterations: Option<u64>,
    #[command(flatten)]
    at: SocketArg,
    #[command(flatten)]
    json: JsonArg,
}

impl Top {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if !(self.interval >= 0.1 && self.interval <= 3600.0) {
            return Err(UsageError(format!("--interval: found {}, expected 0.1 to 3600 seconds", self.interval)).into());
        }
        let (stop, every) = (session.interrupt_flag(), Duration::from_secs_f64(self.interval));
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let screen = !self.json.json && std::io::stdout().is_terminal() && !dumb;
        if screen {
            let socket = self.at.path();
            let watch = ScreenOptions { socket: &socket, every, looks: self.iterations, color: session.paint().color };
            return watch.run(&stop);
        }
        let most = self.iterations.or((!self.json.json).then_some(1));
        let mut looks = 0;
        while !stop.load(Ordering::Relaxed) {
            let status = socket::status(&self.at.path())?;
            if self.json.json {
                session.print(&format!("{}\n", serde_json::to_string(&status)?))?;
            } else {
                session.print(&top_text(&status, session.paint().width))?;
            }
            looks += 1;
            if most.is_some_and(|most| looks >= most) {
                break;
            }
            let until = Instant::now() + every;
            while Instant::now() < until && !stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(50).min(until.saturating_duration_since(Instant::now())));
            }
        }
        Ok(())
    }
}
