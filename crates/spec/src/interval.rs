//! Options of a scenario for the interval machine: time sharing, counters, timed events, mixes by distribution.

use cachemate_core::{CounterNoise, FieldError, MachineEvent, MachineSpec};
use serde::{Deserialize, Serialize};

use crate::SpecError;
use crate::located_toml::Located;

/// The simulated machine that runs a scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SimModel {
    /// The cycle-level machine, which simulates each access.
    #[default]
    Cycle,
    /// The interval machine, which simulates hours of nominal time from programs' profiles.
    Interval,
}

impl SimModel {
    pub(crate) fn is_cycle(&self) -> bool {
        *self == SimModel::Cycle
    }
}

/// The way in which tasks of one CPU share its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeSharingModel {
    /// Each task of a queue runs all the time, at its share of the CPU.
    #[default]
    Averaged,
    /// Tasks take turns, one slice at a time.
    Explicit,
}

/// A number that is drawn from the scenario's seed.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// Always this number.
    Fixed(f64),
    /// Exponential, by its mean.
    Exponential(f64),
    /// Uniform between two bounds.
    Uniform(f64, f64),
    /// Log-normal: median, and the standard deviation of the logarithm.
    LogNormal(f64, f64),
}

/// Programs drawn by weight, one after the other.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixSpec {
    /// Number of copies to draw; 1 to 100 000.
    pub count: u32,
    /// The programs to draw from; not empty.
    pub programs: Vec<WeightedProgram>,
    /// Arrival time of the first copy.
    #[serde(default)]
    pub start_ns: u64,
    /// Time between arrivals; `None` if all arrive together.
    pub interarrival_ns: Option<Distribution>,
    /// Instructions until a copy ends; `None` if it never ends.
    pub instructions: Option<Distribution>,
}

/// One program of a mix, with its weight.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightedProgram {
    /// The same as [`crate::ScenarioProgram::program`].
    pub program: String,
    /// Weight relative to the other programs; positive, 1 by default.
    #[serde(default = "one")]
    pub weight: f64,
}

fn one() -> f64 {
    1.0
}

/// The table `interval` of a scenario.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IntervalSpec {
    /// Do tasks of one CPU share its time continuously, or do they take turns?
    pub time_sharing: TimeSharingModel,
    /// The error of counters.
    pub counters: CounterNoise,
    /// Factor by which phases that were measured on the cycle-level machine are stretched.
    pub phase_scale: f64,
    /// Events of the machine during the run, each at its own time.
    pub events: Vec<MachineEvent>,
    /// Programs that are drawn, in addition to those that the scenario lists.
    pub mixes: Vec<MixSpec>,
}

impl Default for IntervalSpec {
    fn default() -> Self {
        IntervalSpec {
            time_sharing: TimeSharingModel::default(),
            counters: CounterNoise::default(),
            phase_scale: 1000.0,
            events: Vec::new(),
            mixes: Vec::new(),
        }
    }
}

/// Mixes are bounded like the programs of a scenario.
const MAX_COPIES: u32 = 100_000;

impl IntervalSpec {
    pub(crate) fn check(
        &self,
        located: &Located<'_>,
        machine: &MachineSpec,
    ) -> Result<(), SpecError> {
        if !(self.phase_scale.is_finite() && self.phase_scale >= 1.0) {
            return Err(located.error_at(
                "interval.phase_scale",
                self.phase_scale.to_string(),
                "1 or more",
            ));
        }

        let counters = &self.counters;
        let bounded_shares = [
            ("noise", counters.noise, 1.0),
            ("autocorrelation", counters.autocorrelation, 0.9999),
            ("multiplexing_noise", counters.multiplexing_noise, 10.0),
            ("skew", counters.skew, 1.0),
        ];
        for (field, share, max) in bounded_shares {
            if !(0.0..=max).contains(&share) {
                let field = format!("interval.counters.{field}");
                return Err(located.error_at(&field, share.to_string(), format!("0 to {max}")));
            }
        }

        for (index, event) in self.events.iter().enumerate() {
            let located_error = |error: FieldError| {
                let error = error.with_path_prefix(&format!("interval.events[{index}]"));
                located.error_at(&error.field, error.found, error.expected)
            };
            event.check(machine).map_err(located_error)?;
        }

        self.mixes
            .iter()
            .enumerate()
            .try_for_each(|(index, mix)| mix.check(&format!("interval.mixes[{index}]"), located))
    }
}

impl MixSpec {
    fn check(&self, field_path: &str, located: &Located<'_>) -> Result<(), SpecError> {
        if !(1..=MAX_COPIES).contains(&self.count) {
            let expected = format!("1 to {MAX_COPIES}");
            return Err(located.error_at(
                &format!("{field_path}.count"),
                self.count.to_string(),
                expected,
            ));
        }

        if self.programs.is_empty() {
            return Err(located.error_at(
                &format!("{field_path}.programs"),
                "none",
                "one program or more",
            ));
        }

        for (program_index, weighted_program) in self.programs.iter().enumerate() {
            if !(weighted_program.weight.is_finite() && weighted_program.weight > 0.0) {
                let field = format!("{field_path}.programs[{program_index}].weight");
                return Err(located.error_at(
                    &field,
                    weighted_program.weight.to_string(),
                    "a positive number",
                ));
            }
        }

        check_distribution(
            self.interarrival_ns,
            &format!("{field_path}.interarrival_ns"),
            0.0,
            located,
        )?;

        check_distribution(
            self.instructions,
            &format!("{field_path}.instructions"),
            1.0,
            located,
        )
    }
}

/// Checks that a distribution can be drawn from, and gives only numbers of at least `min`.
pub(crate) fn check_distribution(
    distribution: Option<Distribution>,
    field: &str,
    min: f64,
    located: &Located<'_>,
) -> Result<(), SpecError> {
    let (found, is_valid) = match distribution {
        None => return Ok(()),
        Some(Distribution::Fixed(value)) => (format!("{value}"), value >= min && value.is_finite()),
        Some(Distribution::Exponential(mean)) => {
            (format!("{mean}"), mean >= min && mean.is_finite())
        }
        Some(Distribution::Uniform(from, to)) => (
            format!("{from} to {to}"),
            from >= min && from <= to && to.is_finite(),
        ),
        Some(Distribution::LogNormal(median, sigma)) => {
            let fits = median >= min && median.is_finite() && (0.0..=10.0).contains(&sigma);
            (format!("{median}, {sigma}"), fits)
        }
    };

    let expected =
        format!("numbers of {min} or more, ascending; a deviation of the logarithm of 0 to 10");
    if is_valid {
        Ok(())
    } else {
        Err(located.error_at(field, found, expected))
    }
}
