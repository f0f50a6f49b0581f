//! The answer of everything that tries whether the host has a facility: the reason why it cannot be used, and the
//! remedy.

/// A facility that cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{reason}{}", describe_remedy(.remedy))]
pub struct MissingFacility {
    /// The reason, as a sentence.
    pub reason: String,
    /// The remedy; `None` if none is known.
    pub remedy: Option<String>,
    /// Whether the kernel and the processor have it at all, so that a right, an option or a free resource would help.
    pub is_supported: bool,
}

impl MissingFacility {
    /// One that the kernel or the processor does not have.
    pub(crate) fn absent(reason: impl Into<String>, remedy: Option<&str>) -> Self {
        MissingFacility {
            reason: reason.into(),
            remedy: remedy.map(str::to_string),
            is_supported: false,
        }
    }

    /// One that exists, but cannot be used as the host is now.
    pub(crate) fn unusable(reason: impl Into<String>, remedy: Option<&str>) -> Self {
        MissingFacility {
            is_supported: true,
            ..MissingFacility::absent(reason, remedy)
        }
    }
}

fn describe_remedy(remedy: &Option<String>) -> String {
    remedy
        .as_ref()
        .map(|remedy| format!(" (remedy: {remedy})"))
        .unwrap_or_default()
}
