//! Output files that are never overwritten by accident.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use crate::TraceError;

/// Creates a file; an existing one is rejected unless `force` is set.
///
/// # Errors
/// [`TraceError::Exists`] or [`TraceError::Io`].
pub fn create_output(path: &Path, force: bool) -> Result<File, TraceError> {
    cachemate_files::create(path, force).map_err(|error| {
        let file = path.display().to_string();
        match error.kind() {
            ErrorKind::AlreadyExists => TraceError::Exists { file },
            _ => TraceError::Io {
                file,
                what: "create",
                source: error,
            },
        }
    })
}
