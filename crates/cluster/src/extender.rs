//! The extender: a server that ranks nodes, and the source of what it knows about them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::api_server::ApiServer;
use crate::extender_server::{ExtenderState, listen};
use crate::knowledge_dir::read_dir;
use crate::knowledge_watch::KnowledgeWatch;

/// Time between two reads of the directory.
const REREAD_INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which the interrupt flag is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

type Log<'l> = dyn Fn(&str) + Sync + 'l;

/// Serves answers at an address until `stop` is set. Peers must send the token, if there is one.
///
/// # Errors
/// The address cannot be used, or no thread can be started.
pub fn serve(
    address: SocketAddr,
    token: Option<String>,
    source: KnowledgeOrigin,
    stop: &AtomicBool,
    log: &Log<'_>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()?;
    let state = Arc::new(ExtenderState::new(token));
    let mut source = KnowledgeSource::open(source, &state, log)?;
    let (bound_address, server) = runtime
        .block_on(listen(address, Arc::clone(&state)))
        .with_context(|| format!("{address}: cannot listen"))?;
    log(&format!("listening on {bound_address}"));

    std::thread::scope(|scope| {
        // A separate thread reads the knowledge: a thousand nodes take milliseconds, and no request should wait
        // for them.
        let refresh_until_stop = || {
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(POLL_INTERVAL);
                source.refresh(&state, log);
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

/// Where the extender gets what nodes publish.
pub enum KnowledgeOrigin {
    /// A directory of JSON objects.
    Folder(PathBuf),
    /// An API server, and the silence after which a watch of it is opened again.
    Server(ApiServer, Duration),
}

/// The open source of published knowledge.
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
    fn open(origin: KnowledgeOrigin, state: &ExtenderState, log: &Log<'_>) -> anyhow::Result<Self> {
        match origin {
            KnowledgeOrigin::Folder(dir) => {
                let mut reported_refusals = BTreeMap::new();
                publish_folder(log, &dir, state, &mut reported_refusals)
                    .context("nothing was served")?;
                Ok(KnowledgeSource::Folder {
                    dir,
                    reported_refusals,
                    last_read: Instant::now(),
                })
            }
            KnowledgeOrigin::Server(server, max_silence) => Ok(KnowledgeSource::Watch {
                watch: KnowledgeWatch::start(server, max_silence)?,
            }),
        }
    }

    /// Publishes new knowledge, if there is any. Otherwise the previous knowledge stays in use, and its states age, so
    /// that answers become neutral.
    fn refresh(&mut self, state: &ExtenderState, log: &Log<'_>) {
        match self {
            KnowledgeSource::Folder {
                dir,
                reported_refusals: reported,
                last_read: read,
            } => {
                if read.elapsed() < REREAD_INTERVAL {
                    return;
                }
                if let Err(error) = publish_folder(log, dir, state, reported) {
                    log(&format!("{error:#}"));
                }
                *read = Instant::now();
            }
            KnowledgeSource::Watch { watch } => {
                let (knowledge, messages) = watch.apply_changes();
                messages.iter().for_each(|message| log(message));
                if let Some(knowledge) = knowledge {
                    state.publish(knowledge);
                }
            }
        }
    }
}

fn publish_folder(
    log: &Log<'_>,
    dir: &Path,
    state: &ExtenderState,
    reported_refusals: &mut BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let (knowledge, refusals) = read_dir(dir)?;
    for (path, reason) in &refusals {
        if reported_refusals.get(path) != Some(reason) {
            log(&format!("{path}: skipped: {reason}"));
        }
    }
    *reported_refusals = refusals;
    state.publish(knowledge);
    Ok(())
}
