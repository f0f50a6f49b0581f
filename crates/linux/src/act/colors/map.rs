//! The map file: this host's colors, and the caches that they divide (docs/colors.md). Colors of frames are in the
//! ledger.

use std::io;
use std::path::Path;

use cachemate_core::CacheLevel;
use cachemate_files::{DirAccess, TrustedDir};
use serde::{Deserialize, Serialize};

use super::ColorError;
use super::chase::{ChaseComparison, is_share_confined, knee_bytes};

/// Maximum length of a map file, which has one curve for each of two caches.
const MAX_MAP_BYTES: u64 = 1 << 20;

/// [`ColorMap::frame_numbers`] if the numbers of 9 of 10 frames of known color predict it.
pub const PFN_BITS_ARE_REAL: &str = "the low bits of the frame number give the color";
/// [`ColorMap::frame_numbers`] if they do not predict it.
pub const PFN_BITS_ARE_VIRTUAL: &str = "the low bits of the frame number do not give the color (the host backs this machine with scattered pages)";
/// [`ColorMap::frame_numbers`] if frame numbers are not visible.
pub const PFN_UNKNOWN: &str = "not visible to this user (needs CAP_SYS_ADMIN)";

/// Whether colors confine programs in one cache, with the evidence.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ColorCoverage {
    /// One color's share of an evenly divided cache.
    pub share_bytes: u64,
    /// True if a chase over one color's frames is slow beyond the color's share of the cache. `None` if undecided,
    /// because there are too few frames of one color, or the cache currently holds no set of that size.
    pub is_partitioned: Option<bool>,
    /// The smallest size at which the color's frames are slower; `None` if they were slower at no tested size.
    pub knee_bytes: Option<u64>,
    /// The chases, by size.
    pub curve: Vec<ChaseComparison>,
}

impl ColorCoverage {
    /// Coverage of a cache with this share per color, by a curve that extends beyond the share.
    pub fn from_share(share_bytes: u64, curve: &[ChaseComparison]) -> Self {
        let is_partitioned = Some(is_share_confined(curve, share_bytes));
        ColorCoverage {
            share_bytes,
            is_partitioned,
            knee_bytes: knee_bytes(curve),
            curve: curve.to_vec(),
        }
    }
}

/// Result of a discovery.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ColorMap {
    /// [`ColorMap::FORMAT`].
    pub format: u32,
    /// Boot of the discovery, in which alone it holds.
    pub boot_id: String,
    /// Number of colors on this host, 2 to 64.
    pub colors: u32,
    /// Bytes of one frame.
    pub page_bytes: u32,
    /// Level of the private cache whose sets define the colors.
    pub level: CacheLevel,
    /// Size of that cache, as the kernel reports it.
    pub cache_bytes: u64,
    /// Ways of that cache, as the kernel reports them.
    pub ways: u32,
    /// Median time of a load that hits it.
    pub hit_cycles: u64,
    /// Median time of a load that misses it.
    pub miss_cycles: u64,
    /// Mean time to classify one frame.
    pub classify_ns: f64,
    /// Pages that were classified.
    pub pages: u64,
    /// Pages among them that fit no color.
    pub pages_unclassified: u64,
    /// Whether colors confine programs in the private cache.
    pub private: ColorCoverage,
    /// Whether colors confine programs in the last level; `None` if the kernel describes no last level of known size.
    pub last_level: Option<ColorCoverage>,
    /// Whether frame numbers predict colors on this host.
    pub frame_numbers: String,
    /// Time of the whole discovery, refused tries included.
    pub seconds: f64,
    /// Why earlier tries were not accepted.
    pub failed_attempts: Vec<String>,
}

impl ColorMap {
    /// Version of the file; another one is refused.
    pub const FORMAT: u32 = 1;
    /// File of the last discovery, in the directory of colors.
    pub const FILE_NAME: &str = "map.json";

    /// The map in the format that [`ColorMap::parse`] reads.
    pub fn to_text(&self) -> String {
        let mut text = serde_json::to_string_pretty(self)
            .expect("a map has only string keys, and no serializer that fails");
        text.push('\n');
        text
    }

    /// The map of the last discovery on this host.
    ///
    /// # Errors
    /// The directory cannot be trusted, or the file cannot be read, is not a map, has another version, or has impossible
    /// content.
    pub fn open_for_host(base: &Path) -> Result<Self, ColorError> {
        let path = base.join(Self::FILE_NAME);
        let text = TrustedDir::open_anchored(base, DirAccess::ReadOnly)
            .and_then(|dir| dir.read_text(Path::new(Self::FILE_NAME), MAX_MAP_BYTES))
            .and_then(|text| text.ok_or_else(|| io::ErrorKind::NotFound.into()));
        let text = text.map_err(|source| ColorError::io_error(&path, source))?;
        Self::parse(&text).map_err(|problem| ColorError::BadMap(path, problem))
    }

    /// The map that a text holds.
    ///
    /// # Errors
    /// The text is not a map, has another version, or has impossible content.
    pub fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct MapVersion {
            format: u32,
        }
        let MapVersion { format } =
            serde_json::from_str(text).map_err(|error| error.to_string())?;
        if format != Self::FORMAT {
            return Err(format!("found format {format}, expected {}", Self::FORMAT));
        }
        let map: ColorMap = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let max_colors = cachemate_agent::layout::MAX_COLORS;
        if !(2..=max_colors).contains(&map.colors) {
            return Err(format!(
                "colors: found {}, expected 2 to {max_colors}",
                map.colors
            ));
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn color_map() -> ColorMap {
        let curve = vec![ChaseComparison {
            size_bytes: 65536,
            colored_ns: 5.25,
            ordinary_ns: 5.0,
        }];
        ColorMap {
            format: ColorMap::FORMAT,
            boot_id: "boot".into(),
            colors: 32,
            page_bytes: 4096,
            level: CacheLevel::L2,
            cache_bytes: 2 << 20,
            ways: 16,
            hit_cycles: 60,
            miss_cycles: 180,
            classify_ns: 15_000.0,
            pages: 4,
            pages_unclassified: 1,
            private: ColorCoverage::from_share(65536, &curve),
            last_level: None,
            frame_numbers: PFN_BITS_ARE_VIRTUAL.into(),
            seconds: 2.5,
            failed_attempts: vec!["31 classes instead of 32".into()],
        }
    }

    /// Is a map read from the file as it was written?
    #[test]
    fn a_map_is_read_back_from_the_file() {
        assert_eq!(ColorMap::parse(&color_map().to_text()), Ok(color_map()));
    }

    /// Is a damaged file refused with the place, and never read as something else?
    #[test]
    fn damaged_maps_are_refused_with_the_place() {
        let good = color_map().to_text();
        assert!(ColorMap::parse(&good).is_ok());
        let message = |from: &str, to: &str| ColorMap::parse(&good.replace(from, to)).unwrap_err();
        assert_eq!(
            message("\"format\": 1", "\"format\": 2"),
            "found format 2, expected 1"
        );
        assert_eq!(
            message("\"colors\": 32", "\"colors\": 65"),
            "colors: found 65, expected 2 to 64"
        );
        assert!(ColorMap::parse("").is_err());
    }
}
