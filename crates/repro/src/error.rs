//! Reasons for which a run or an experiment ends without a value.

/// Reasons for which an experiment ends without findings.
#[derive(Debug, thiserror::Error)]
pub enum ReproError {
    /// The failed part, and the reason.
    #[error("{0}: {1}")]
    Failed(String, String),
    /// Ctrl-C: findings made so far are kept.
    #[error("interrupted")]
    Interrupted,
    /// The runs that come next are made by others, or the one that was wanted is made.
    #[error("its runs are made elsewhere")]
    Elsewhere,
}

/// An error of any kind as the experiment's.
pub fn failed<E: std::fmt::Display>(what: &str) -> impl Fn(E) -> ReproError {
    let what = what.to_string();
    move |error| ReproError::Failed(what.clone(), error.to_string())
}
