//! The extender: a server that ranks nodes by what it watches at the API server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;

use crate::api_server::ApiServer;
use crate::extender_server::{ExtenderState, listen};
use crate::knowledge_watch::KnowledgeWatch;

/// Interval at which the interrupt flag is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

type Log<'l> = dyn Fn(&str) + Sync + 'l;

/// Serves answers at an address until `stop` is set, by the objects of `server`; a watch that is silent for
/// `max_silence` is opened again. Peers must send the token, if there is one.
///
/// # Errors
/// The address cannot be used, or no thread can be started.
pub fn serve(
    address: SocketAddr,
    token: Option<String>,
    server: ApiServer,
    max_silence: Duration,
    stop: &AtomicBool,
    log: &Log<'_>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()?;
    let state = Arc::new(ExtenderState::new(token));
    let mut watch = KnowledgeWatch::start(server, max_silence)?;
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
                // Without new knowledge the previous one stays in use, and its states age, so that answers become
                // neutral.
                let (knowledge, messages) = watch.apply_changes();
                messages.iter().for_each(|message| log(message));
                if let Some(knowledge) = knowledge {
                    state.publish(knowledge);
                }
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
