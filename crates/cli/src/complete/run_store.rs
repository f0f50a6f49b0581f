//! The store of simulated runs, for commands that simulate.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use cachemate_report::text::format_count_of;
use cachemate_repro::store::{self, MAX_DIR_BYTES, RunDir};
use clap::Args;

use crate::session::Session;
use cachemate_daemon::paths;

/// Options of commands that simulate.
#[derive(Args)]
pub struct RunStoreArgs {
    /// Directory of stored runs, which are reused [default: in the user's cache]
    #[arg(long, value_name = "DIR", conflicts_with = "no_store")]
    store: Option<PathBuf>,
    /// Repeat every run and store nothing
    #[arg(long)]
    no_store: bool,
}

impl RunStoreArgs {
    /// Opens the store; must be called before any run. Without a usable directory in the user's cache, runs are made
    /// and not stored; a directory that the user names must be usable.
    pub fn start(&self) -> anyhow::Result<()> {
        if self.no_store {
            return Ok(());
        }
        let outcome = use_store_dir(&self.dir());
        match (&self.store, outcome) {
            (None, Err(error)) => {
                _ = writeln!(
                    std::io::stderr(),
                    "cachemate: runs are not stored: {error:#}"
                );
                Ok(())
            }
            (_, outcome) => outcome,
        }
    }

    /// Reports the number of reused runs.
    pub fn report_reuse(&self, session: &Session) {
        let counts = store::store_counts();
        if counts.reused > 0 {
            let (runs, dir) = (format_count_of(counts.reused as u64, "run"), self.dir());
            let saved_minutes = counts.reused_cpu_seconds / 60.0;
            session.note(&format!(
                "{runs} of {saved_minutes:.1} processor minutes reused from {}",
                dir.display()
            ));
        }
    }

    fn dir(&self) -> PathBuf {
        self.store.clone().unwrap_or_else(default_dir)
    }
}

/// Below the user's cache directory.
pub fn default_dir() -> PathBuf {
    paths::cache_dir().join("run-store")
}

/// Stores runs in this directory from this call on, and reuses the stored ones.
pub fn use_store_dir(dir: &Path) -> anyhow::Result<()> {
    let dir = RunDir::new(dir, MAX_DIR_BYTES).context("cannot use the store of runs")?;
    open_store(Arc::new(dir));
    Ok(())
}

/// Stores runs in an open directory, which has its own size limit.
fn open_store(dir: Arc<RunDir>) {
    store::use_directory(dir, |text: &str| {
        _ = writeln!(std::io::stderr(), "cachemate: {text}")
    });
}

/// Version of the package, and a fingerprint of all sources on which a result depends. Hosts that build the same
/// sources get the same text.
pub fn source_version() -> String {
    format!(
        "{}+{}",
        env!("CARGO_PKG_VERSION"),
        env!("CACHEMATE_SOURCES")
    )
}
