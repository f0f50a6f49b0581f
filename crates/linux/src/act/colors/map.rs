//! The map file: this host's colors, the caches that they divide, and the color of each known frame (docs/colors.md).

use std::io;
use std::path::Path;

use cachemate_core::CacheLevel;
use cachemate_files::{DirAccess, TrustedDir};
use serde::{Deserialize, Serialize};

use super::ColorError;
use super::chase::{ChaseComparison, is_share_confined, knee_bytes};

/// Maximum length of a map file, which describes caches and colors; frames are in the ledger.
const MAX_MAP_BYTES: u64 = 64 << 20;

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

/// Neighboring frames and their colors.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FrameRun {
    /// Frame number of the first two digits.
    pub first_frame: u64,
    /// Two hexadecimal digits per frame; `--` if the frame fits no color.
    pub colors: String,
}

/// Result of a discovery.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ColorMap {
    /// [`ColorMap::FORMAT`].
    pub format: u32,
    /// Boot of the discovery: frame numbers are valid in this boot only.
    pub boot_id: String,
    /// The reference set that the labels belong to.
    pub reference_set: String,
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
    /// Colors by frame number; empty if frame numbers are not visible.
    pub frames: Vec<FrameRun>,
}

impl ColorMap {
    /// Version of the file; another one is refused.
    pub const FORMAT: u32 = 1;
    /// File of the last discovery, in the directory of colors.
    pub const FILE_NAME: &str = "map.json";

    /// Runs of neighboring frames, ascending; frames without a number are left out.
    pub fn frame_runs(frames: &[Option<u64>], colors: &[Option<u32>]) -> Vec<FrameRun> {
        let mut known_frames: Vec<(u64, Option<u32>)> = frames
            .iter()
            .zip(colors)
            .filter_map(|(frame, color)| Some(((*frame)?, *color)))
            .collect();
        known_frames.sort_unstable();
        known_frames.dedup_by_key(|(frame, _)| *frame);
        let mut runs: Vec<FrameRun> = Vec::new();
        let mut next_frame = 0;
        for (frame, color) in known_frames {
            if runs.is_empty() || frame != next_frame {
                runs.push(FrameRun {
                    first_frame: frame,
                    colors: String::new(),
                });
            }
            next_frame = frame + 1;
            let digits = color.map_or("--".to_string(), |color| format!("{color:02x}"));
            runs.last_mut()
                .expect("pushed just now, or there before")
                .colors
                .push_str(&digits);
        }
        runs
    }

    /// Frames of known color, with their colors.
    pub fn known_colors(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.frames.iter().flat_map(|run| {
            let pairs = run.colors.as_bytes().chunks_exact(2).enumerate();
            pairs.filter_map(|(index, digits)| {
                let digits = std::str::from_utf8(digits).ok()?;
                Some((
                    run.first_frame.checked_add(index as u64)?,
                    u32::from_str_radix(digits, 16).ok()?,
                ))
            })
        })
    }

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
    /// The errors of [`ColorMap::read`], or the directory cannot be trusted.
    pub fn open_for_host(base: &Path) -> Result<Self, ColorError> {
        let path = base.join(Self::FILE_NAME);
        let text = TrustedDir::open_anchored(base, DirAccess::ReadOnly)
            .and_then(|dir| dir.read_text(Path::new(Self::FILE_NAME), MAX_MAP_BYTES))
            .and_then(|text| text.ok_or_else(|| io::ErrorKind::NotFound.into()));
        let text = text.map_err(|source| ColorError::io_error(&path, source))?;
        Self::parse(&text).map_err(|problem| ColorError::BadMap(path, problem))
    }

    /// Reads a map file.
    ///
    /// # Errors
    /// The file cannot be read, is not a map, has another version, or has impossible content.
    pub fn read(path: &Path) -> Result<Self, ColorError> {
        let text = cachemate_files::read_text_limited(path, MAX_MAP_BYTES)
            .map_err(|source| ColorError::io_error(path, source))?;
        Self::parse(&text).map_err(|problem| ColorError::BadMap(path.to_path_buf(), problem))
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
        for (index, run) in map.frames.iter().enumerate() {
            let color_error = |found: &str| {
                format!(
                    "frames[{index}].colors: found '{found}', expected '--' or two hexadecimal digits below {:02x}",
                    map.colors
                )
            };
            if !run.colors.is_ascii() || run.colors.len() % 2 != 0 {
                return Err(color_error(&run.colors));
            }
            for digits in run.colors.as_bytes().chunks_exact(2) {
                let digits = std::str::from_utf8(digits).unwrap_or_default();
                let is_hexadecimal = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
                let color = u32::from_str_radix(digits, 16)
                    .ok()
                    .filter(|color| is_hexadecimal && *color < map.colors);
                if digits != "--" && color.is_none() {
                    return Err(color_error(digits));
                }
            }
        }
        Ok(map)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn color_map(frames: Vec<FrameRun>) -> ColorMap {
        let curve = vec![ChaseComparison {
            size_bytes: 65536,
            colored_ns: 5.25,
            ordinary_ns: 5.0,
        }];
        ColorMap {
            format: ColorMap::FORMAT,
            boot_id: "boot".into(),
            reference_set: "00000000000000ff".into(),
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
            frames,
        }
    }

    proptest! {
        /// Are frames and colors read from the file as they were written, whatever the order in which they were found?
        #[test]
        fn frames_and_colors_are_read_back_from_the_file(found in proptest::collection::btree_map(0u64..500, proptest::option::of(0u32..32), 0..100)) {
            let (mut frames, mut known_colors): (Vec<Option<u64>>, Vec<Option<u32>>) =
                found.iter().map(|(frame, color)| (Some(*frame), *color)).unzip();
            frames.reverse();
            known_colors.reverse();
            frames.push(None);
            known_colors.push(Some(1));
            let back = ColorMap::parse(&color_map(ColorMap::frame_runs(&frames, &known_colors)).to_text()).unwrap();
            let expected: Vec<(u64, u32)> = found.iter().filter_map(|(frame, color)| Some((*frame, (*color)?))).collect();
            prop_assert_eq!(back.known_colors().collect::<Vec<_>>(), expected);
            let gaps = found.keys().zip(found.keys().skip(1)).filter(|(first, two)| **first + 1 != **two).count();
            prop_assert_eq!(back.frames.len(), if found.is_empty() { 0 } else { gaps + 1 });
        }
    }

    /// Is a damaged file refused with the place, and never read as something else?
    #[test]
    fn damaged_maps_are_refused_with_the_place() {
        let good = color_map(vec![FrameRun {
            first_frame: 7,
            colors: "001f--".into(),
        }])
        .to_text();
        assert!(ColorMap::parse(&good).is_ok());
        let message = |from: &str, to: &str| ColorMap::parse(&good.replace(from, to)).unwrap_err();
        assert_eq!(
            message("\"format\": 1", "\"format\": 2"),
            "found format 2, expected 1"
        );
        assert!(message("001f--", "0020--").starts_with("frames[0].colors: found '20'"));
        assert!(message("001f--", "001f-").starts_with("frames[0].colors"));
        assert!(message("001f--", "00+f--").starts_with("frames[0].colors"));
        assert_eq!(
            message("\"colors\": 32", "\"colors\": 65"),
            "colors: found 65, expected 2 to 64"
        );
        assert!(ColorMap::parse("").is_err());
    }
}
