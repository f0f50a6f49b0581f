//! Options that name a cluster: its API server, and this node in it.

use std::path::PathBuf;

use cachemate_cluster::api_server::ApiServer;
use cachemate_cluster::node_publisher::{NodePublisher, is_object_name};
use cachemate_daemon::daemon::ControlFlags;
use clap::Args;

use crate::exit::UsageError;
use crate::session::Session;

/// Options that name an API server.
#[derive(Args)]
pub struct ApiServerArgs {
    /// API server: https://HOST:PORT, http://HOST:PORT, or in-cluster for a pod's own
    #[arg(long, value_name = "URL")]
    pub api_server: Option<String>,
    /// Certificates (PEM) of the authority of an https server
    #[arg(long, value_name = "FILE", requires = "api_server")]
    ca_file: Option<PathBuf>,
    /// File with a token for the API server
    #[arg(long, value_name = "FILE", requires = "api_server")]
    token_file: Option<PathBuf>,
}

impl ApiServerArgs {
    /// The server, if one is named.
    pub fn open(&self) -> anyhow::Result<Option<ApiServer>> {
        let Some(url) = &self.api_server else {
            return Ok(None);
        };
        let server = match url.as_str() {
            "in-cluster" => ApiServer::in_cluster(),
            url => ApiServer::new(url, self.ca_file.as_deref(), self.token_file.clone()),
        };
        Ok(Some(server.map_err(|error| {
            UsageError(format!("--api-server: {error:#}"))
        })?))
    }
}

/// Options of `manage` that publish a node's state.
#[derive(Args)]
pub struct ClusterArgs {
    /// Publish the state of this node's caches and the profiles of its services as objects of this API server
    #[command(flatten)]
    server: ApiServerArgs,
    /// Name of this node at the API server
    #[arg(long, value_name = "NAME", requires = "api_server", conflicts_with_all = ["check", "dry_run"])]
    node: Option<String>,
    /// Memory bandwidth of this host, from which the published bandwidth left follows where traffic is counted
    #[arg(long, value_name = "BYTES", requires = "api_server", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000_000_000))]
    memory_bytes_per_second: Option<u64>,
}

impl ClusterArgs {
    /// Starts to publish what the daemon's status says, if an API server is named.
    ///
    /// # Errors
    /// The server's options or the node's name are unusable, or no thread can be started.
    pub fn start(&self, control_flags: &ControlFlags, session: &Session) -> anyhow::Result<()> {
        if let Some(server) = self.server.open()? {
            let node = self.node.clone().filter(|name| is_object_name(name));
            let found = self.node.as_deref().unwrap_or("");
            let node_problem = || {
                UsageError(format!(
                    "--node: found '{found}', expected the name of this node"
                ))
            };
            let node = node.ok_or_else(node_problem)?;
            let memory_bytes_per_second = self.memory_bytes_per_second.map(|bytes| bytes as f64);
            let publisher = NodePublisher::new(server, node, memory_bytes_per_second);
            let log = session.clone();
            publisher.start(control_flags.status.clone(), move |message| {
                log.log(message)
            })?;
        }
        Ok(())
    }
}
