//! Pairwise slowdowns: forecast for every pair of programs alone on one cache, and measured while both ran on one
//! cache.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{PredictorConfig, Profile, Topology};
use cachemate_pipeline::pair_forecast;

use crate::snapshot::{MatrixSnapshot, ProgramSnapshot};

/// Maximum number of rows and columns; a larger matrix is unreadable.
const MAX_PROGRAMS: usize = 16;
/// Windows between two forecasts, because profiles change little from one window to the next.
const FORECAST_INTERVAL_WINDOWS: u64 = 8;

/// Sum and number of the measured slowdowns of one pair.
#[derive(Clone, Copy, Default)]
struct SlowdownMean {
    sum: f64,
    windows: u32,
}

/// The forecast and the measured matrix.
#[derive(Default)]
pub struct Matrices {
    measured_pairs: BTreeMap<(u32, u32), SlowdownMean>,
    /// CPU seconds of each program so far, by which the matrix selects its programs.
    run_seconds: BTreeMap<u32, f64>,
    last_snapshot: Option<MatrixSnapshot>,
    forecast_window: Option<u64>,
}

impl Matrices {
    /// Updates the matrices with one window, and returns them if they changed. `busiest_profiles` contains the profile
    /// that represents each program.
    pub fn observe(
        &mut self,
        window: u64,
        window_s: f64,
        programs: &[ProgramSnapshot],
        busiest_profiles: &BTreeMap<u32, &Profile>,
        topology: &Topology,
        predictor: &PredictorConfig,
    ) -> Option<MatrixSnapshot> {
        self.record_slowdowns(window_s, programs);
        let is_due = self.forecast_window.is_none_or(|last_forecast_window| {
            window >= last_forecast_window + FORECAST_INTERVAL_WINDOWS
                || window < last_forecast_window
        });
        let members = self.select_members(programs, busiest_profiles);
        let has_same_members = self
            .last_snapshot
            .as_ref()
            .is_some_and(|last| last.programs == members);
        let forecast = match &self.last_snapshot {
            Some(last) if has_same_members && !is_due => last.forecast.clone(),
            _ => {
                self.forecast_window = Some(window);
                forecast_pairs(&members, busiest_profiles, topology, predictor)
            }
        };

        let mean_of_pair = |row: &u32, column: &u32| {
            self.measured_pairs
                .get(&(*row, *column))
                .filter(|_| row != column)
        };
        let row_pairs = |row| members.iter().map(move |column| (row, column));
        let mean_slowdown = |mean: &SlowdownMean| round_short(mean.sum / f64::from(mean.windows));
        let snapshot = MatrixSnapshot {
            measured: members
                .iter()
                .map(|r| {
                    row_pairs(r)
                        .map(|(r, c)| mean_of_pair(r, c).map(mean_slowdown))
                        .collect()
                })
                .collect(),
            windows: members
                .iter()
                .map(|r| {
                    row_pairs(r)
                        .map(|(r, c)| mean_of_pair(r, c).map_or(0, |mean| mean.windows))
                        .collect()
                })
                .collect(),
            forecast,
            programs: members,
        };
        if self.last_snapshot.as_ref() == Some(&snapshot) || snapshot.programs.len() < 2 {
            return None;
        }
        self.last_snapshot = Some(snapshot.clone());
        Some(snapshot)
    }

    fn record_slowdowns(&mut self, window_s: f64, programs: &[ProgramSnapshot]) {
        let live_programs: BTreeSet<u32> = programs.iter().map(|program| program.program).collect();
        self.measured_pairs.retain(|(row, column), _| {
            live_programs.contains(row) && live_programs.contains(column)
        });
        self.run_seconds
            .retain(|program, _| live_programs.contains(program));
        let mut programs_by_cache: BTreeMap<u32, Vec<&ProgramSnapshot>> = BTreeMap::new();
        for program in programs {
            *self.run_seconds.entry(program.program).or_default() +=
                program.cpu_share.unwrap_or(0.0) * window_s;
            program
                .places
                .iter()
                .for_each(|(cache, _)| programs_by_cache.entry(*cache).or_default().push(program));
        }

        let mut pairs: BTreeMap<(u32, u32), f64> = BTreeMap::new();
        for (row, slowdown) in programs_by_cache
            .values()
            .flatten()
            .filter_map(|program| Some((program, program.slowdown?)))
        {
            let caches = row
                .places
                .iter()
                .filter_map(|(cache, _)| programs_by_cache.get(cache))
                .flatten();
            for column in caches.filter(|column| column.program != row.program) {
                pairs.insert((row.program, column.program), slowdown);
            }
        }

        for (pair, slowdown) in pairs {
            let mean = self.measured_pairs.entry(pair).or_default();
            mean.sum += slowdown;
            mean.windows += 1;
        }
    }

    /// Selects programs with a forecast or a measurement first, then those that ran most. Returns them in order of
    /// arrival.
    fn select_members(
        &self,
        programs: &[ProgramSnapshot],
        busiest_profiles: &BTreeMap<u32, &Profile>,
    ) -> Vec<u32> {
        let has_speed = |program: &ProgramSnapshot| {
            let has_forecast = busiest_profiles
                .get(&program.program)
                .is_some_and(|profile| {
                    profile.rates.solo_instr_per_cycle.is_some()
                        && profile.misses_per_kilo_instr().is_some()
                });
            has_forecast || program.slowdown.is_some()
        };

        let rank_key = |program: &ProgramSnapshot| {
            (
                has_speed(program),
                self.run_seconds
                    .get(&program.program)
                    .copied()
                    .unwrap_or(0.0),
            )
        };
        let mut ranked_programs: Vec<(usize, (bool, f64))> =
            programs.iter().map(rank_key).enumerate().collect();
        ranked_programs.sort_by(|(_, a), (_, b)| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)));
        ranked_programs.truncate(MAX_PROGRAMS);
        ranked_programs.sort_by_key(|(index, _)| *index);
        ranked_programs
            .into_iter()
            .map(|(index, _)| programs[index].program)
            .collect()
    }
}

/// Forecasts the slowdowns of each pair alone on two CPUs of one cache.
fn forecast_pairs(
    members: &[u32],
    busiest_profiles: &BTreeMap<u32, &Profile>,
    topology: &Topology,
    predictor: &PredictorConfig,
) -> Vec<Vec<Option<f64>>> {
    let mut table = vec![vec![None; members.len()]; members.len()];
    for row in 0..members.len() {
        for column in row + 1..members.len() {
            let (Some(row_profile), Some(column_profile)) = (
                busiest_profiles.get(&members[row]),
                busiest_profiles.get(&members[column]),
            ) else {
                continue;
            };
            let pair = pair_forecast(topology, predictor, row_profile, column_profile);
            let [row_slowdown, column_slowdown] =
                pair.map(|forecast| forecast.map(|slowdown| round_short(slowdown.value)));
            (table[row][column], table[column][row]) = (row_slowdown, column_slowdown);
        }
    }

    table
}

/// Rounds to four significant digits, which suffice for display and keep the page small.
pub fn round_short(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}
