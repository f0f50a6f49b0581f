//! Errors that end a run or an experiment.

use cachemate_forecast::ForecastFailure;
use cachemate_papers::placement::PlacementError;

/// The reason why an experiment ends without findings.
#[derive(Debug, thiserror::Error)]
pub enum ReproError {
    /// A part failed; with its name and the reason.
    #[error("{0}: {1}")]
    Failed(String, String),
    /// The user pressed Ctrl-C; findings so far are kept.
    #[error("interrupted")]
    Interrupted,
    /// A run is not stored, and none may be made.
    #[error("its runs are not stored")]
    NotStored,
}

/// The result of a part of an experiment.
pub type Result<T, E = ReproError> = std::result::Result<T, E>;

impl From<PlacementError> for ReproError {
    fn from(error: PlacementError) -> Self {
        failed("placement")(error)
    }
}

impl From<ForecastFailure> for ReproError {
    fn from(error: ForecastFailure) -> Self {
        ReproError::Failed(error.subject, error.reason)
    }
}

/// Converts any error to an experiment's error about `subject`.
pub fn failed<E: std::fmt::Display>(subject: &str) -> impl Fn(E) -> ReproError {
    let title = subject.to_string();
    move |error| ReproError::Failed(title.clone(), error.to_string())
}
