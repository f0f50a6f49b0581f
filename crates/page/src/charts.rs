//! What only the page shows of a window: the curves and the matrix that changed since the window before.

use std::collections::BTreeMap;

use cachemate_core::{Estimate, FactSource, Profile, Profiles, RunHeader};
use cachemate_report::level_name;

use crate::matrix::{Matrices, round_short};
use crate::snapshot::{CurveSnapshot, ProgramSnapshot, Snapshot};

/// Maximum number of points of a curve that are shown.
const MAX_POINTS: usize = 32;
/// Maximum number of services that are shown; those with the largest loss come first.
const MAX_SERVICES: usize = 32;
/// Maximum number of causes that are shown for each service's loss.
const MAX_CAUSES: usize = 8;

/// Turns the snapshots of a run into those of its page, in order.
pub struct PageCharts {
    header: RunHeader,
    matrices: Matrices,
    curves: BTreeMap<u32, CurveSnapshot>,
}

impl PageCharts {
    /// Charts without a window.
    pub fn new(header: &RunHeader) -> Self {
        PageCharts {
            header: header.clone(),
            matrices: Matrices::default(),
            curves: BTreeMap::new(),
        }
    }

    /// Adds the curves and the matrix that changed, and removes what the page does not show: single threads, and
    /// services and causes beyond the largest.
    pub fn complete(&mut self, snapshot: &mut Snapshot, profiles: &Profiles) {
        let profile_of = |program: &ProgramSnapshot| {
            let profile = profiles.get(&program.profiled_task?)?;
            Some((program.program, profile))
        };
        let busiest_profiles: BTreeMap<u32, &Profile> =
            snapshot.programs.iter().filter_map(profile_of).collect();
        snapshot.matrix = self.matrices.observe(
            snapshot.window,
            snapshot.duration_s,
            &snapshot.programs,
            &busiest_profiles,
            &self.header.topology,
            &self.header.pipeline.predictor,
        );
        snapshot.curves = self.take_new_curves(&busiest_profiles, &snapshot.programs);

        snapshot.tasks.clear();
        snapshot.services.truncate(MAX_SERVICES);
        for service in &mut snapshot.services {
            service.task_ids.clear();
            service.cache_by.truncate(MAX_CAUSES);
            service.waiting_by.truncate(MAX_CAUSES);
            service.prevented.truncate(MAX_CAUSES);
        }
    }

    /// The curves that changed since they were last sent.
    fn take_new_curves(
        &mut self,
        busiest_profiles: &BTreeMap<u32, &Profile>,
        programs: &[ProgramSnapshot],
    ) -> Vec<CurveSnapshot> {
        self.curves.retain(|program, _| {
            programs
                .iter()
                .any(|live_program| live_program.program == *program)
        });

        let mut new_curves = Vec::new();
        for (&program, profile) in busiest_profiles {
            let Some(curve) = curve_snapshot(program, profile) else {
                continue;
            };
            if self.curves.get(&program) != Some(&curve) {
                self.curves.insert(program, curve.clone());
                new_curves.push(curve);
            }
        }
        new_curves
    }
}

fn curve_snapshot(program: u32, profile: &Profile) -> Option<CurveSnapshot> {
    let (level, fact) = profile.locality.misses_per_kilo_instr.iter().next_back()?;
    let step = fact.value.len().div_ceil(MAX_POINTS).max(1);
    let last_index = fact.value.len().saturating_sub(1);
    let shown_points = fact
        .value
        .iter()
        .enumerate()
        .filter(|(index, _)| index % step == 0 || *index == last_index);
    let point = |&(bytes, misses): &(u64, Estimate)| {
        let ends = (round_short(misses.low), round_short(misses.high));
        (bytes, round_short(misses.value), ends.0, ends.1)
    };
    Some(CurveSnapshot {
        program,
        level: level_name(*level).to_string(),
        source: source_text(fact.source),
        points: shown_points.map(|(_, misses)| point(misses)).collect(),
    })
}

/// The name of a fact's source, as files spell it.
fn source_text(source: FactSource) -> String {
    let value = serde_json::to_value(source).ok();
    value
        .and_then(|value| value.as_str().map(str::to_string))
        .unwrap_or_default()
}
