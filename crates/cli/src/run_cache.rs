//! Where runs that were measured on the simulator are kept, for commands that measure who hurts whom.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use cachemate_repro::store;
use clap::Args;

use crate::session::Session;
use cachemate_daemon::paths;

/// Switches of commands that measure pairs.
#[derive(Args)]
pub struct RunCacheArgs {
    /// Keep measured runs in this folder, and take from it what was measured before [default: the user's cache]
    #[arg(long, value_name = "DIR", conflicts_with = "no_cache")]
    cache: Option<PathBuf>,
    /// Measure everything anew and keep nothing
    #[arg(long)]
    no_cache: bool,
}

impl RunCacheArgs {
    /// To be called before anything is measured.
    pub fn start(&self) {
        if self.no_cache {
            return;
        }
        use_cache_dir(&self.folder());
    }

    /// Says how much was not measured now.
    pub fn end(&self, session: &Session) {
        if store::taken() > 0 {
            let folder = self.folder();
            session.note(&format!("{} runs were taken from {}", store::taken(), folder.display()));
        }
    }

    fn folder(&self) -> PathBuf {
        self.cache.clone().unwrap_or_else(paths::cache_dir)
    }
}

/// Keeps measured runs in this folder from now on, and takes from it what was measured before.
pub fn use_cache_dir(folder: &Path) {
    let note = |text: &str| _ = writeln!(std::io::stderr(), "cachemate: {text}");
    store::keep_in(folder, &sources(), note);
}

/// The package's version, and a fingerprint of all sources that a result depends on: the same on every host that was
/// built from the same sources.
pub fn sources() -> String {
    format!("{}+{}", env!("CARGO_PKG_VERSION"), env!("CACHEMATE_SOURCES"))
}
