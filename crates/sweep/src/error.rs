//! Errors of a sweep as a whole; the store contains the errors of individual tasks.

use std::io;
use std::path::Path;

use cachemate_spec::SpecError;

use crate::EngineError;

/// The reason for which a sweep cannot continue. The user reads the message.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// An invalid sweep file, scenario or machine, with the position.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A file that cannot be read or written.
    #[error("{path}: {what}")]
    File {
        /// The file or directory.
        path: String,
        /// The error, with its line if there is one.
        what: String,
    },
    /// No more files can be written there; finished results are kept.
    #[error("{0}: the disk is full; what is finished is kept, and the same command goes on from there")]
    Full(String),
    /// An engine that cannot accept tasks.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A sweep that cannot be run, with the reason.
    #[error("{0}")]
    Refused(String),
}

impl SweepError {
    pub(crate) fn file(path: &Path, problem: impl ToString) -> Self {
        SweepError::File { path: path.display().to_string(), what: problem.to_string() }
    }

    /// The error of reading or writing `path`; a full disk has its own error.
    pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> Self + '_ {
        move |error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => SweepError::Full(path.display().to_string()),
            // The message of a rejected file already contains the path.
            io::ErrorKind::PermissionDenied if error.get_ref().is_some() => SweepError::Refused(error.to_string()),
            _ => SweepError::file(path, error),
        }
    }
}
