//! Reasons for which a run or an experiment ends without a value.

/// Reasons for which an experiment ends without findings.
#[derive(Debug, thiserror::Error)]
pub enum ReproError {
    /// The failed part, and the reason.
    #[error("{0}: {1}")]
    Failed(String, String),
    /// Ctrl-C; findings so far are kept.
    #[error("interrupted")]
    Interrupted,
    /// Other processes make the remaining runs, or the requested run has been made.
    #[error("its runs are made elsewhere")]
    Elsewhere,
}

/// Converts an error of any kind to the experiment's.
pub fn failed<E: std::fmt::Display>(subject: &str) -> impl Fn(E) -> ReproError {
    let title = subject.to_string();
    move |error| ReproError::Failed(title.clone(), error.to_string())
}
