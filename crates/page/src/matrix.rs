//! Pairwise slowdowns: forecast for every two programs alone on one cache, and measured while both ran on one cache.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{PredictorConfig, Profile, Topology};
use cachemate_pipeline::pair_forecast;

use crate::snapshot::{MatrixSnapshot, ProgramSnapshot};

/// Maximum number of rows and columns; a larger matrix is unreadable.
const MAX_PROGRAMS: usize = 16;
/// Windows between two forecasts, because profiles change little from one window to the next.
const WINDOWS_BETWEEN: u64 = 8;

/// Sum and number of the measured slowdowns of one pair.
#[derive(Clone, Copy, Default)]
struct SlowdownMean {
    sum: f64,
    windows: u32,
}

/// The forecast and the measured matrix.
#[derive(Default)]
pub struct Matrices {
    measured: BTreeMap<(u32, u32), SlowdownMean>,
    /// CPU seconds of each program so far, by which the matrix selects its programs.
    ran_s: BTreeMap<u32, f64>,
    last: Option<MatrixSnapshot>,
    made_in: Option<u64>,
}

impl Matrices {
    /// Updates the matrices with one window, and returns them if they changed. `busiest` is the profile that
    /// represents each program.
    pub fn observe(
        &mut self,
        window: u64,
        lasted_s: f64,
        programs: &[ProgramSnapshot],
        busiest: &BTreeMap<u32, &Profile>,
        topology: &Topology,
        predictor: &PredictorConfig,
    ) -> Option<MatrixSnapshot> {
        self.measure(lasted_s, programs);
        let is_due = self.made_in.is_none_or(|built_in| window >= built_in + WINDOWS_BETWEEN || window < built_in);
        let members = self.select_members(programs, busiest);
        let same_members = self.last.as_ref().is_some_and(|last| last.programs == members);
        let forecast = match &self.last {
            Some(last) if same_members && !is_due => last.forecast.clone(),
            _ => {
                self.made_in = Some(window);
                forecast_pairs(&members, busiest, topology, predictor)
            }
        };
        let of_pair = |row: &u32, column: &u32| self.measured.get(&(*row, *column)).filter(|_| row != column);
        let table = |row| members.iter().map(move |column| (row, column));
        let mean = |mean: &SlowdownMean| round_short(mean.sum / f64::from(mean.windows));
        let now = MatrixSnapshot {
            measured: members.iter().map(|r| table(r).map(|(r, c)| of_pair(r, c).map(mean)).collect()).collect(),
            windows: members
                .iter()
                .map(|r| table(r).map(|(r, c)| of_pair(r, c).map_or(0, |mean| mean.windows)).collect())
                .collect(),
            forecast,
            programs: members,
        };
        if self.last.as_ref() == Some(&now) || now.programs.len() < 2 {
            return None;
        }
        self.last = Some(now.clone());
        Some(now)
    }

    fn measure(&mut self, lasted_s: f64, programs: &[ProgramSnapshot]) {
        let live_programs: BTreeSet<u32> = programs.iter().map(|program| program.program).collect();
        self.measured.retain(|(row, column), _| live_programs.contains(row) && live_programs.contains(column));
        self.ran_s.retain(|program, _| live_programs.contains(program));
        let mut programs_on: BTreeMap<u32, Vec<&ProgramSnapshot>> = BTreeMap::new();
        for program in programs {
            *self.ran_s.entry(program.program).or_default() += program.cpu_share.unwrap_or(0.0) * lasted_s;
            program.places.iter().for_each(|(cache, _)| programs_on.entry(*cache).or_default().push(program));
        }
        let mut pairs: BTreeMap<(u32, u32), f64> = BTreeMap::new();
        for (row, slowdown) in programs_on.values().flatten().filter_map(|program| Some((program, program.slowdown?))) {
            let caches = row.places.iter().filter_map(|(cache, _)| programs_on.get(cache)).flatten();
            for column in caches.filter(|column| column.program != row.program) {
                pairs.insert((row.program, column.program), slowdown);
            }
        }
        for (pair, slowdown) in pairs {
            let mean = self.measured.entry(pair).or_default();
            mean.sum += slowdown;
            mean.windows += 1;
        }
    }

    /// Selects programs with a forecast or a measurement first, then those that ran most. Returns them in order of
    /// arrival.
    fn select_members(&self, programs: &[ProgramSnapshot], busiest: &BTreeMap<u32, &Profile>) -> Vec<u32> {
        let has_speed = |program: &ProgramSnapshot| {
            let forecast = busiest.get(&program.program).is_some_and(|profile| {
                profile.rates.solo_instr_per_cycle.is_some() && profile.misses_per_kilo_instr().is_some()
            });
            forecast || program.slowdown.is_some()
        };
        let key =
            |program: &ProgramSnapshot| (has_speed(program), self.ran_s.get(&program.program).copied().unwrap_or(0.0));
        let mut ranked_programs: Vec<(usize, (bool, f64))> = programs.iter().map(key).enumerate().collect();
        ranked_programs.sort_by(|(_, a), (_, b)| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)));
        ranked_programs.truncate(MAX_PROGRAMS);
        ranked_programs.sort_by_key(|(index, _)| *index);
        ranked_programs.into_iter().map(|(index, _)| programs[index].program).collect()
    }
}

/// Forecasts the slowdowns of each pair alone on two CPUs of one cache.
fn forecast_pairs(
    members: &[u32],
    busiest: &BTreeMap<u32, &Profile>,
    topology: &Topology,
    predictor: &PredictorConfig,
) -> Vec<Vec<Option<f64>>> {
    let mut table = vec![vec![None; members.len()]; members.len()];
    for row in 0..members.len() {
        for column in row + 1..members.len() {
            let (Some(row_profile), Some(column_profile)) = (busiest.get(&members[row]), busiest.get(&members[column]))
            else {
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
