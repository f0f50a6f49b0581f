//! Errors that end a sweep; errors of individual tasks are recorded in the store.

use std::io;
use std::path::Path;

use cachemate_spec::SpecError;

use crate::EngineError;

/// The reason why a sweep cannot continue. Its message is shown to the user.
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
        /// Description of the error, with the line if it concerns one.
        what: String,
    },
    /// The disk is full, so no more files can be written there; finished results are kept.
    #[error(
        "{0}: the disk is full; what is finished is kept, and the same command goes on from there"
    )]
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
        SweepError::File {
            path: path.display().to_string(),
            what: problem.to_string(),
        }
    }

    /// The error of reading or writing `path`; a full disk has its own error.
    pub(crate) fn io_error(path: &Path) -> impl Fn(io::Error) -> Self + '_ {
        move |error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                SweepError::Full(path.display().to_string())
            }
            // The message of a rejected file already contains the path.
            io::ErrorKind::PermissionDenied if error.get_ref().is_some() => {
                SweepError::Refused(error.to_string())
            }
            _ => SweepError::file(path, error),
        }
    }
}
