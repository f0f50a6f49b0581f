//! `cachemate status`: shows the state of a running daemon.

use std::path::PathBuf;

use clap::Args;

use crate::args::JsonArg;
use crate::session::Session;
use crate::status_text::status_text;
use cachemate_daemon::{paths, socket};

/// Show the services of a running daemon: which slows which, by how much, and the plans and changes in force
#[derive(Args)]
pub struct StatusArgs {
    #[command(flatten)]
    socket: SocketArg,
    /// List the threads of each cache below the services
    #[arg(long)]
    threads: bool,
    #[command(flatten)]
    json: JsonArg,
}

/// The option that names a running daemon's socket.
#[derive(Args, Clone)]
pub struct SocketArg {
    /// Socket of the daemon
    #[arg(long, value_name = "FILE")]
    socket: Option<PathBuf>,
}

impl SocketArg {
    pub fn path(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(paths::default_socket)
    }
}

impl StatusArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let status = socket::query_status(&self.socket.path())?;
        session.print_result(self.json.json, &status, || {
            status_text(&status, self.threads)
        })
    }
}
