//! The cache of simulated runs, for commands that measure pairs of programs.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use cachemate_repro::store;
use clap::Args;

use crate::session::Session;
use cachemate_daemon::paths;

/// Options of commands that measure pairs.
#[derive(Args)]
pub struct RunCacheArgs {
    /// Directory of measured runs, which are reused [default: the user's cache]
    #[arg(long, value_name = "DIR", conflicts_with = "no_cache")]
    cache: Option<PathBuf>,
    /// Measure every run again and store nothing
    #[arg(long)]
    no_cache: bool,
}

impl RunCacheArgs {
    /// Enables the cache; call it before any measurement.
    pub fn start(&self) {
        if self.no_cache {
            return;
        }
        use_cache_dir(&self.folder());
    }

    /// Reports the number of reused runs.
    pub fn end(&self, session: &Session) {
        if store::taken() > 0 {
            let folder = self.folder();
            session.note(&format!("{} runs were reused from {}", store::taken(), folder.display()));
        }
    }

    fn folder(&self) -> PathBuf {
        self.cache.clone().unwrap_or_else(paths::cache_dir)
    }
}

/// Stores measured runs in this directory from now on, and reuses stored ones.
pub fn use_cache_dir(folder: &Path) {
    let note = |text: &str| _ = writeln!(std::io::stderr(), "cachemate: {text}");
    store::keep_in(folder, &sources(), note);
}

/// The package's version, and a fingerprint of all sources that a result depends on: the same on every host that was
/// built from the same sources.
pub fn sources() -> String {
    format!("{}+{}", env!("CARGO_PKG_VERSION"), env!("CACHEMATE_SOURCES"))
}
