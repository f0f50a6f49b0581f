//! `cachemate extender`: serves a scheduler extender that ranks nodes for kube-scheduler.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;

use crate::api_server::ApiServerArgs;
use crate::exit::UsageError;
use crate::extender_server::{ExtenderState, listen};
use crate::knowledge_dir::read_dir;
use crate::knowledge_watch::KnowledgeWatch;
use crate::session::Session;

/// Rank nodes for kube-scheduler by forecast slowdowns: a scheduler extender over HTTP
///
/// Answers `filter` and `prioritize` for node names (nodeCacheCapable: true) with scores from 0 to 10. Profiles and
/// node states are JSON objects of the resources WorkloadProfile and NodeCacheState in a directory. Without a profile
/// or a fresh state, answers are neutral. docs/kubernetes.md has the scheduler's configuration.
#[derive(Args)]
pub struct ExtenderArgs {
    /// Directory of JSON objects, which is reread every few seconds
    #[arg(
        long,
        value_name = "DIR",
        required_unless_present = "api_server",
        conflicts_with = "api_server"
    )]
    knowledge: Option<PathBuf>,
    /// The API server whose objects are watched instead
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
    /// File with a token that the scheduler sends, as the first part of the path or as a bearer token; without one every
    /// peer gets an answer, and placements in flight are not counted
    #[arg(long, value_name = "FILE")]
    scheduler_token_file: Option<PathBuf>,
}

/// Time between two reads of the directory.
const REREAD_INTERVAL: Duration = Duration::from_secs(5);
/// Lengths of a token: enough not to be guessed, and bounded.
const MIN_TOKEN_BYTES: usize = 16;
const MAX_TOKEN_BYTES: u64 = 4096;
/// Interval at which the interrupt flag is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

impl ExtenderArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let state = Arc::new(ExtenderState::new(self.read_token()?));
        if !self.listen.ip().is_loopback() && !self.allow_remote {
            let text = format!(
                "--listen: found {}, expected a loopback address, or --allow-remote",
                self.listen
            );
            return Err(UsageError(text).into());
        }
        let mut source = self.open_source(session, &state)?;
        let (address, server) = runtime
            .block_on(listen(self.listen, Arc::clone(&state)))
            .with_context(|| format!("{}: cannot listen", self.listen))?;
        session.log(&format!("listening on {address}"));
        let stop = session.interrupt_flag();
        std::thread::scope(|scope| {
            // A separate thread reads the knowledge: a thousand nodes take milliseconds, and no request should wait
            // for them.
            let refresh_until_stop = || {
                while !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(POLL_INTERVAL);
                    source.refresh(session, &state);
                }
            };
            std::thread::Builder::new()
                .name("cachemate-knowledge".into())
                .spawn_scoped(scope, refresh_until_stop)?;
            runtime.block_on(async {
                tokio::spawn(server);
                while !stop.load(Ordering::Relaxed) {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
            });
            Ok(())
        })
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

    fn open_source(
        &self,
        session: &Session,
        state: &ExtenderState,
    ) -> anyhow::Result<KnowledgeSource> {
        let Some(server) = self.server.open()? else {
            let dir = self
                .knowledge
                .clone()
                .context("--knowledge: expected a directory")?;
            let mut reported_refusals = BTreeMap::new();
            publish_folder(session, &dir, state, &mut reported_refusals)
                .context("nothing was served")?;
            return Ok(KnowledgeSource::Folder {
                dir,
                reported_refusals,
                last_read: Instant::now(),
            });
        };
        let max_silence = Duration::from_secs(self.watch_timeout);
        Ok(KnowledgeSource::Watch {
            watch: KnowledgeWatch::start(server, max_silence)?,
        })
    }
}

/// The source of published knowledge.
enum KnowledgeSource {
    Folder {
        dir: PathBuf,
        reported_refusals: BTreeMap<String, String>,
        last_read: Instant,
    },
    Watch {
        watch: KnowledgeWatch,
    },
}

impl KnowledgeSource {
    /// Publishes new knowledge, if there is any. Otherwise the previous knowledge stays in use, and its states age, so
    /// that answers become neutral.
    fn refresh(&mut self, session: &Session, state: &ExtenderState) {
        match self {
            KnowledgeSource::Folder {
                dir,
                reported_refusals: reported,
                last_read: read,
            } => {
                if read.elapsed() < REREAD_INTERVAL {
                    return;
                }
                if let Err(error) = publish_folder(session, dir, state, reported) {
                    session.log(&format!("{error:#}"));
                }
                *read = Instant::now();
            }
            KnowledgeSource::Watch { watch } => {
                let (knowledge, messages) = watch.apply_changes();
                messages.iter().for_each(|message| session.log(message));
                if let Some(knowledge) = knowledge {
                    state.publish(knowledge);
                }
            }
        }
    }
}

fn publish_folder(
    session: &Session,
    dir: &std::path::Path,
    state: &ExtenderState,
    reported_refusals: &mut BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let (knowledge, refusals) = read_dir(dir)?;
    for (path, reason) in &refusals {
        if reported_refusals.get(path) != Some(reason) {
            session.log(&format!("{path}: skipped: {reason}"));
        }
    }
    *reported_refusals = refusals;
    state.publish(knowledge);
    Ok(())
}
