//! Page colors: groups of frames that fall on the same sets of a cache, the caches that they divide, and programs that
//! are confined to some colors.
//!
//! [`discover`] finds and verifies colors by timing; [`reference_set`] keeps the frames that define them; [`map`] is
//! the file that describes them.

use std::io;
use std::path::{Path, PathBuf};

use cachemate_core::{Cache, CacheId, PartitionSupport, Topology};

use crate::MissingFacility;
use crate::kernel::{Kernel, LinuxHost};

pub mod agents;
pub mod chase;
pub mod discover;
pub mod grouping;
pub mod map;
pub mod migration;
pub mod pool;
pub mod preloadable;
pub mod reference_set;
pub mod refusal;
pub mod shares;
pub mod verification;

/// Why there are no colors, or none now.
#[derive(Debug, thiserror::Error)]
pub enum ColorError {
    /// A file in the directory of colors, or memory for frames, is unavailable.
    #[error("{path}: {source}")]
    Io {
        /// The file or directory concerned.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The host has no cache that colors can divide, or timing cannot show it; trying again does not help. Contains the
    /// reason as a sentence.
    #[error("pages have no colors here: {0}")]
    NoColors(String),
    /// Timing was too noisy; a quieter moment may help.
    #[error("no trustworthy colors: {0}")]
    Noisy(String),
    /// There is no reference set at this path.
    #[error("{0}: no colors are known on this host yet (cachemate page-color discover)")]
    NoReferenceSet(PathBuf),
    /// A reference set of another version, or one in which frames of one label no longer have one color. Path and
    /// reason.
    #[error("{0}: {1} (cachemate page-color discover makes a new one)")]
    BadReferenceSet(PathBuf, String),
    /// An unusable map: path and reason.
    #[error("{0}: {1}")]
    BadMap(PathBuf, String),
}

impl ColorError {
    fn io_error(path: &Path, source: io::Error) -> Self {
        ColorError::Io {
            path: path.to_path_buf(),
            source,
        }
    }
}

/// The kernel's id of this boot; empty if the kernel does not report it.
pub fn boot_id() -> String {
    LinuxHost::new("/").boot_id().unwrap_or_default()
}

/// Caches that colors divide on this host, according to a discovery since its boot; otherwise, why there are none. The
/// cost of moving a page is measured here.
///
/// # Errors
/// The reason, with its remedy.
pub fn survey_partitions(
    topology: &Topology,
) -> Result<Vec<(CacheId, PartitionSupport)>, MissingFacility> {
    let discover_command = "cachemate page-color discover";
    let no_colors = |reason: String, remedy: &str| MissingFacility::unusable(reason, Some(remedy));
    let base = Path::new(reference_set::BASE);
    let map = match map::ColorMap::open_for_host(base) {
        Err(ColorError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(match refusal::last_refusal(base) {
                Some(refusal) => no_colors(
                    refusal.describe(),
                    &format!(
                        "none is known; {discover_command} tries again, best in a quiet moment"
                    ),
                ),
                None => no_colors(
                    "no colors are known on this host yet".to_string(),
                    discover_command,
                ),
            });
        }
        Err(ColorError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            let remedy = format!(
                "root; where {} is another user's: remove it, then {discover_command}",
                reference_set::BASE
            );
            return Err(no_colors(source.to_string(), &remedy));
        }
        other => other.map_err(|error| no_colors(error.to_string(), discover_command))?,
    };
    if map.boot_id != boot_id() {
        return Err(no_colors(
            "colors were discovered before the last boot".to_string(),
            discover_command,
        ));
    }
    let move_page_ns = migration::measure_page_move_ns()?;
    let is_divided = |cache: &Cache| match &map.last_level {
        _ if cache.level == map.level => map.private.is_partitioned == Some(true),
        Some(coverage) if cache.last_level => coverage.is_partitioned == Some(true),
        _ => false,
    };
    let (colors, page_bytes) = (map.colors, u64::from(map.page_bytes));
    let divided_caches = topology.caches.iter().filter(|cache| is_divided(cache));
    Ok(divided_caches
        .map(|cache| {
            (
                cache.id,
                PartitionSupport::Colors {
                    colors,
                    page_bytes,
                    page_migration_ns: move_page_ns,
                },
            )
        })
        .collect())
}

/// The result of [`survey_partitions`] as a sentence.
pub fn describe_partitions(partitions: &[(CacheId, PartitionSupport)]) -> String {
    let colors_and_move_ns = |(_, partition): &(CacheId, PartitionSupport)| match partition {
        PartitionSupport::Colors {
            colors,
            page_migration_ns: move_page_ns,
            ..
        } => Some((*colors, *move_page_ns)),
        _ => None,
    };
    match partitions.iter().find_map(colors_and_move_ns) {
        Some((colors, move_ns)) => format!(
            "{colors} colors divide {} caches, a page moves in {:.1} us; programs started by cachemate page-color run",
            partitions.len(),
            move_ns / 1e3
        ),
        None => "known, but no cache of this host is divided by them".to_string(),
    }
}

#[cfg(test)]
mod trusted_dir_tests;
