//! `cachemate extender`: serves a scheduler extender that ranks nodes for kube-scheduler.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use cachemate_cluster::extender::serve;
use clap::Args;

use crate::complete::cluster_args::ApiServerArgs;
use crate::exit::UsageError;
use crate::session::Session;

/// Rank nodes for kube-scheduler by forecast slowdowns: a scheduler extender over HTTP
///
/// Answers `filter` and `prioritize` for node names (nodeCacheCapable: true) with scores from 0 to 10. Profiles and
/// node states are the objects WorkloadProfile and NodeCacheState of the API server. Without a profile or a fresh
/// state, answers are neutral. docs/kubernetes.md has the scheduler's configuration.
#[derive(Args)]
pub struct ExtenderArgs {
    /// The API server whose objects are watched
    #[command(flatten)]
    server: ApiServerArgs,
    /// Seconds of silence after which a watch of the API server is opened again
    #[arg(long, value_name = "SECONDS", default_value_t = 240, value_parser = clap::value_parser!(u64).range(1..=3600))]
    watch_timeout: u64,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8888")]
    listen: SocketAddr,
    /// Serve other hosts, too; without this option only a loopback address is accepted
    #[arg(long)]
    allow_remote: bool,
    /// File with a token that the scheduler sends, as the first part of the path or as a bearer token; without one
    /// every peer gets an answer, and placements in flight are not counted
    #[arg(long, value_name = "FILE")]
    scheduler_token_file: Option<PathBuf>,
}

/// Lengths of a token: enough not to be guessed, and bounded.
const MIN_TOKEN_BYTES: usize = 16;
const MAX_TOKEN_BYTES: u64 = 4096;

impl ExtenderArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let token = self.read_token()?;
        if !self.listen.ip().is_loopback() && !self.allow_remote {
            let text = format!(
                "--listen: found {}, expected a loopback address, or --allow-remote",
                self.listen
            );
            return Err(UsageError(text).into());
        }
        let Some(server) = self.server.open()? else {
            let text = "--api-server: found none, expected a URL or in-cluster".to_string();
            return Err(UsageError(text).into());
        };
        let max_silence = Duration::from_secs(self.watch_timeout);
        let stop = session.interrupt_flag();
        let log = |message: &str| session.log(message);
        serve(self.listen, token, server, max_silence, &stop, &log)
    }

    fn read_token(&self) -> anyhow::Result<Option<String>> {
        let Some(path) = &self.scheduler_token_file else {
            return Ok(None);
        };
        let text = cachemate_files::read_text_limited(path, MAX_TOKEN_BYTES)
            .with_context(|| format!("{}: cannot be read", path.display()))?;
        let token = text.trim().to_string();
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
        anyhow::ensure!(
            token.len() >= MIN_TOKEN_BYTES && token.bytes().all(is_plain),
            "{}: found a token of {} bytes, expected at least {MIN_TOKEN_BYTES} letters, digits, '-', '_', '.' or '~'",
            path.display(),
            token.len()
        );
        Ok(Some(token))
    }
}
