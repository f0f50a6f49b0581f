//! `cachemate extender`: serves a scheduler extender that ranks nodes for kube-scheduler.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cachemate_fleet::extender::ClusterKnowledge;
use cachemate_fleet::profile::{ReferenceMix, WorkingSet};
use cachemate_fleet::scorer::{CacheState, NodeCacheState, NodePolicy, ShareEffect};
use cachemate_report::text::format_number;
use clap::Args;
use serde::Serialize;

use crate::api_server::ApiServerArgs;
use crate::args::JsonArg;
use crate::exit::UsageError;
use crate::extender_server::{ExtenderState, listen, unix_seconds};
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
    #[arg(long, value_name = "DIR", required_unless_present_any = ["measure", "api_server"], conflicts_with = "api_server")]
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
    /// Measure the time of this many requests for 1 000 nodes of eight caches on a loopback connection, and exit
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    measure: Option<u32>,
    #[command(flatten)]
    json: JsonArg,
}

/// Time between two reads of the directory.
const REREAD_INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which the interrupt flag is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// `cachemate extender --measure --json`.
#[derive(Serialize)]
struct MeasuredLatency {
    nodes: usize,
    requests: u32,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
}

impl ExtenderArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let state = Arc::new(ExtenderState::default());
        if let Some(requests) = self.measure {
            return measure_latency(session, &runtime, &state, requests, self.json.json);
        }
        if !self.listen.ip().is_loopback() && !self.allow_remote {
            let text = format!("--listen: found {}, expected a loopback address, or --allow-remote", self.listen);
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
            std::thread::Builder::new().name("cachemate-knowledge".into()).spawn_scoped(scope, refresh_until_stop)?;
            runtime.block_on(async {
                tokio::spawn(server);
                while !stop.load(Ordering::Relaxed) {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
            });
            Ok(())
        })
    }

    fn open_source(&self, session: &Session, state: &ExtenderState) -> anyhow::Result<KnowledgeSource> {
        let Some(server) = self.server.open()? else {
            let dir = self.knowledge.clone().context("--knowledge: expected a directory")?;
            let mut reported_refusals = BTreeMap::new();
            publish_folder(session, &dir, state, &mut reported_refusals).context("nothing was served")?;
            return Ok(KnowledgeSource::Folder { dir, reported_refusals, last_read: Instant::now() });
        };
        let max_silence = Duration::from_secs(self.watch_timeout);
        Ok(KnowledgeSource::Watch { watch: KnowledgeWatch::start(server, max_silence)? })
    }
}

/// The source of published knowledge.
enum KnowledgeSource {
    Folder { dir: PathBuf, reported_refusals: BTreeMap<String, String>, last_read: Instant },
    Watch { watch: KnowledgeWatch },
}

impl KnowledgeSource {
    /// Publishes new knowledge, if there is any. Otherwise the previous knowledge stays in use, and its states age, so
    /// that answers become neutral.
    fn refresh(&mut self, session: &Session, state: &ExtenderState) {
        match self {
            KnowledgeSource::Folder { dir, reported_refusals: reported, last_read: read } => {
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

/// Number of nodes in the measurement.
const MEASURED_NODES: usize = 1000;

/// Returns a cluster of equal nodes with differently loaded caches.
fn build_measured_cluster() -> ClusterKnowledge {
    let mix = ReferenceMix {
        base_cycles_per_instr: 0.7,
        stall_cycles_per_miss: 90.0,
        references_per_kilo_instr: 12.0,
        working_sets: vec![WorkingSet { bytes: 16e6, share: 0.9 }],
        write_share: 0.3,
    };
    let mut cluster = ClusterKnowledge::default();
    cluster.profiles.insert("index".to_string(), mix.profile());
    for node in 0..MEASURED_NODES {
        let sample_cache = |index: usize| CacheState {
            size_bytes: 33_554_432.0,
            cpus: 16.0,
            busy_cpus: 6.0,
            fill_bytes_per_second: Some(1e8 * ((node * 8 + index) % 97) as f64),
            occupancy_bytes: 33_554_432.0,
            bandwidth_left_bytes_per_second: Some(1e11),
            free_classes: Some(8),
            effects: [1.0, 0.75, 0.5, 0.25]
                .map(|share| ShareEffect { share, slowdown_percent: 40.0 * (1.0 - share), broken_limits: 0.0 })
                .to_vec(),
        };
        let state = NodeCacheState {
            hertz: 2.45e9,
            memory_bytes_per_second: Some(2e11),
            policy: NodePolicy::Auto,
            caches: (0..8).map(sample_cache).collect(),
        };
        cluster.nodes.insert(format!("node-{node:04}"), (unix_seconds(), state));
    }
    cluster
}

fn measure_latency(
    session: &Session,
    runtime: &tokio::runtime::Runtime,
    state: &Arc<ExtenderState>,
    requests: u32,
    json: bool,
) -> anyhow::Result<()> {
    state.publish(build_measured_cluster());
    let (address, server) = runtime.block_on(listen(SocketAddr::from(([127, 0, 0, 1], 0)), Arc::clone(state)))?;
    let client_thread = std::thread::spawn(move || -> anyhow::Result<Vec<f64>> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut milliseconds = Vec::new();
        for request in 0..requests {
            let (path, body) = build_request(request);
            let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
            let start_time = Instant::now();
            stream.write_all(&[head.as_bytes(), body.as_bytes()].concat())?;
            read_response(&mut stream)?;
            milliseconds.push(start_time.elapsed().as_secs_f64() * 1e3);
        }
        Ok(milliseconds)
    });
    let mut milliseconds = runtime.block_on(async {
        let server = tokio::spawn(server);
        while !client_thread.is_finished() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        server.abort();
        client_thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the client failed")))
    })?;
    milliseconds.sort_by(f64::total_cmp);
    let latency_quantile = |share: f64| milliseconds[((milliseconds.len() - 1) as f64 * share).ceil() as usize];
    let result = MeasuredLatency {
        nodes: MEASURED_NODES,
        requests,
        p50_ms: latency_quantile(0.5),
        p99_ms: latency_quantile(0.99),
        max_ms: latency_quantile(1.0),
    };
    session.print_result(json, &result, || {
        format!(
            "{} requests for {} nodes: median {} ms, 99 % {} ms, longest {} ms\n",
            result.requests,
            result.nodes,
            format_number(result.p50_ms),
            format_number(result.p99_ms),
            format_number(result.max_ms)
        )
    })
}

/// Returns the path and body of a request: `filter` and `prioritize` alternate, with a new pod each time.
fn build_request(request: u32) -> (&'static str, String) {
    let names: Vec<String> = (0..MEASURED_NODES).map(|node| format!("node-{node:04}")).collect();
    let body = serde_json::json!({
        "Pod": {
            "metadata": { "uid": format!("pod-{}", request / 2), "annotations": { "cachemate.io/profile": "index" } },
            "spec": { "containers": [{ "image": "index:1", "resources": { "requests": { "cpu": "500m" } } }] }
        },
        "NodeNames": names
    });
    (if request.is_multiple_of(2) { "/filter" } else { "/prioritize" }, body.to_string())
}

/// Reads one response: the head, then the number of bytes that the head announces.
fn read_response(stream: &mut TcpStream) -> anyhow::Result<()> {
    let mut bytes = Vec::new();
    let mut buffer = [0u8; 65_536];
    loop {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            bail!("the connection ended before the answer");
        }
        bytes.extend_from_slice(&buffer[..count]);
        let Some(head_end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let head_text = String::from_utf8_lossy(&bytes[..head_end]).to_lowercase();
        if !head_text.starts_with("http/1.1 200") {
            bail!("found '{}', expected status 200", head_text.lines().next().unwrap_or(""));
        }
        let body_length =
            head_text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
        if bytes.len() >= head_end + 4 + body_length.context("an answer without a length")? {
            return Ok(());
        }
    }
}
