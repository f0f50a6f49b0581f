//! `cachemate status`: what a running daemon sees and does.

use std::path::PathBuf;

use clap::Args;

use crate::args::JsonArg;
use crate::session::Session;
use crate::status_text::status_text;
use cachemate_daemon::{paths, socket};

/// Show what a running daemon sees, decides and does
#[derive(Args)]
pub struct StatusArgs {
    #[command(flatten)]
    at: SocketArg,
    #[command(flatten)]
    json: JsonArg,
}

/// Where the daemon listens.
#[derive(Args, Clone)]
pub struct SocketArg {
    /// The daemon's socket
    #[arg(long, value_name = "FILE")]
    socket: Option<PathBuf>,
}

impl SocketArg {
    pub fn path(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(paths::socket)
    }
}

impl StatusArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let status = socket::status(&self.at.path())?;
        session.answer(self.json.json, &status, || status_text(&status))
    }
}
