//! What the last discovery said if it found no colors.
//!
//! A discovery takes a minute, and where it failed it mostly fails again: a host whose cache cannot be timed stays one.
//! So its refusal is kept beside the reference set until the next discovery or boot, `doctor` reports it, and
//! `page-color run` does not try again unasked.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cachemate_files::{DirAccess, TrustedDir};

use super::ColorError;
use super::reference_set::replace_file;

const FILE_NAME: &str = "refusal";
const MAX_FILE_BYTES: u64 = 1 << 14;

/// A discovery that found no colors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ColorRefusal {
    /// When it ended.
    pub ended_at: SystemTime,
    /// Why it found none, as a sentence.
    pub reason: String,
}

impl ColorRefusal {
    /// Describes the discovery with its age.
    pub fn describe(&self) -> String {
        let minutes = self
            .ended_at
            .elapsed()
            .map_or(0, |elapsed| elapsed.as_secs() / 60);
        let age = match minutes {
            0 => "less than a minute ago".to_string(),
            1..=119 => format!("{minutes} min ago"),
            _ => format!("{} h ago", minutes / 60),
        };
        format!("a discovery {age} found no colors: {}", self.reason)
    }
}

/// Keeps the reason of a discovery that ends now.
///
/// # Errors
/// The errors of the file system.
pub(super) fn remember(base: &Path, reason: &str) -> Result<(), ColorError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now.map_or(0, |time| time.as_secs());
    TrustedDir::create_anchored(base).map_err(|source| ColorError::io_error(base, source))?;
    replace_file(base, FILE_NAME, format!("{seconds}\n{reason}\n").as_bytes())
}

/// Forgets an earlier refusal, because colors were found.
pub(super) fn forget(base: &Path) {
    // Without the file, or without the right to remove it, there is nothing to forget.
    let dir = TrustedDir::open_anchored(base, DirAccess::ReadWrite);
    let _ = dir.and_then(|dir| dir.remove(FILE_NAME));
}

/// The last discovery's refusal; `None` if it found colors, or if there was none since the boot.
pub fn last_refusal(base: &Path) -> Option<ColorRefusal> {
    let read = || -> io::Result<Option<String>> {
        TrustedDir::open_anchored(base, DirAccess::ReadOnly)?
            .read_text(Path::new(FILE_NAME), MAX_FILE_BYTES)
    };
    let text = read().ok().flatten()?;
    let (seconds, reason) = text.split_once('\n')?;
    Some(ColorRefusal {
        ended_at: UNIX_EPOCH.checked_add(Duration::from_secs(seconds.parse().ok()?))?,
        reason: reason.trim_end().to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a refusal kept with its reason and age, and forgotten once colors were found?
    #[test]
    fn a_refusal_is_kept_until_colors_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("colors");
        assert_eq!(last_refusal(&base), None);
        remember(&base, "a hit takes 78 cycles and a miss 104").unwrap();
        let described = last_refusal(&base).unwrap().describe();
        assert_eq!(
            described,
            "a discovery less than a minute ago found no colors: a hit takes 78 cycles and a miss 104"
        );
        forget(&base);
        assert_eq!(last_refusal(&base), None);
        forget(&base);
    }
}
