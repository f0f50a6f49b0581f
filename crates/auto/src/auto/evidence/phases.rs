//! Phases of tasks.

use cachemate_core::{Profiles, TaskId, View};

/// A phase of a task.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PhaseId {
    /// Counted from 0 in the order of the phases; 0 also without a profile.
    pub number: u32,
    /// `None` until it is recognized.
    pub kind: Option<u32>,
}

/// The phase that the profile of a task describes.
pub fn current_phase(view: &View<'_>, task: TaskId) -> PhaseId {
    let profile = view.profiles.get(&task);
    PhaseId {
        number: profile.map_or(0, |profile| profile.phase_number),
        kind: profile.and_then(|known_profile| Some(known_profile.phase.kind.as_ref()?.value)),
    }
}

/// Whether the phases of all live tasks have known kinds. Until then, a window may span two phases.
pub fn are_kinds_known(view: &View<'_>) -> bool {
    view.live_tasks()
        .all(|sample| current_phase(view, sample.task).kind.is_some())
}

/// The profiles as if every task had one phase.
pub fn merge_phases(profiles: &Profiles) -> Profiles {
    let mut merged_profiles = profiles.clone();
    for profile in merged_profiles.values_mut() {
        (profile.phase_number, profile.phase.kind) = (0, None);
    }
    merged_profiles
}
