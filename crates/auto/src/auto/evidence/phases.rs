//! Phases of tasks.

use cachemate_core::{Profiles, TaskId, View};

use super::speeds::CurrentPhase;

/// The number of the phase, 0 without a profile, and its kind, `None` until it is recognized.
pub fn current_phase(view: &View<'_>, task: TaskId) -> CurrentPhase {
    let profile = view.profiles.get(&task);
    (
        profile.map_or(0, |profile| profile.phase_number),
        profile.and_then(|known_profile| Some(known_profile.phase.kind.as_ref()?.value)),
    )
}

/// Whether the phases of all live tasks have known kinds. Until then, a window may span two phases.
pub fn are_kinds_known(view: &View<'_>) -> bool {
    view.live_tasks()
        .all(|sample| current_phase(view, sample.task).1.is_some())
}

/// The profiles as if every task had one phase.
pub fn merge_phases(profiles: &Profiles) -> Profiles {
    let mut merged_profiles = profiles.clone();
    for profile in merged_profiles.values_mut() {
        (profile.phase_number, profile.phase.kind) = (0, None);
    }
    merged_profiles
}
