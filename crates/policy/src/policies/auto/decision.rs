//! The decision between the plan in force and the best candidate: pure, by the gain and its probability.

/// A plan is applied without a confirmation if its gain is at least this probable.
const MIN_ADOPTION_PROBABILITY: f64 = 0.95;
/// A plan whose gain is less probable than chance is only confirmed, and only if that is worth its cost.
pub const MIN_LIKELY_PROBABILITY: f64 = 0.5;
/// Error that the forecast itself adds to a gain, as one standard deviation, before any verdict.
const FORECAST_ERROR: f64 = 0.02;
/// Error of a large gain, as a share of it.
const RELATIVE_GAIN_ERROR: f64 = 0.25;
/// Number of forecasts that are compared with measurements.
const MAX_VERDICTS: usize = 16;

/// A gain over the plan in force: the forecast, the mean of the draws, and the standard error.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Gain {
    pub forecast: f64,
    pub mean: f64,
    pub standard_error: f64,
    /// Mean error of earlier forecasts.
    pub bias: f64,
}

/// Errors of forecast gains: measured minus forecast.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct GainError {
    pub bias: f64,
    pub variance: f64,
}

impl Gain {
    /// Builds the gain from a forecast, from draws within the errors of curves and costs, and from the errors of earlier
    /// forecasts.
    pub fn from_draws(forecast: f64, drawn_gains: &[f64], forecast_error: GainError) -> Self {
        let draw_count = drawn_gains.len() as f64;
        let mean = drawn_gains.iter().sum::<f64>() / draw_count;
        let draw_variance = drawn_gains
            .iter()
            .map(|draw| (draw - mean) * (draw - mean))
            .sum::<f64>()
            / (draw_count - 1.0);
        let gain_variance = RELATIVE_GAIN_ERROR * RELATIVE_GAIN_ERROR * forecast * forecast;
        let variance = draw_variance + forecast_error.variance + gain_variance;
        Gain {
            forecast,
            mean,
            standard_error: libm::sqrt(variance).max(1e-6),
            bias: forecast_error.bias,
        }
    }

    fn expected(&self) -> f64 {
        self.forecast.min(self.mean) + self.bias
    }

    /// Returns the probability that the gain is at least `min_gain`.
    pub fn probability_of_gain(&self, min_gain: f64) -> f64 {
        let margin = (self.expected() - min_gain) / self.standard_error;
        normal_probability(margin)
    }

    /// Returns whether the change can gain `min_gain`, by its forecast and one standard error, and is worth
    /// `measurement_time`, if its gain lasts for `remaining_time`. The expected gain assumes that the
    /// change is kept only if it gains.
    pub fn is_worth_measuring(
        &self,
        min_gain: f64,
        measurement_time: f64,
        remaining_time: f64,
    ) -> bool {
        let expected = self.expected();
        let margin = expected / self.standard_error;
        let density = libm::exp(-0.5 * margin * margin) / libm::sqrt(2.0 * std::f64::consts::PI);
        let expected_gain = density + margin * normal_probability(margin);
        let expected_loss = expected_gain - margin;
        expected + self.standard_error >= min_gain
            && expected_gain * remaining_time >= expected_loss * measurement_time
    }
}

/// Returns the probability that a standard normal variable is below this value.
fn normal_probability(value: f64) -> f64 {
    0.5 * (1.0 + libm::erf(value / std::f64::consts::SQRT_2))
}

/// A change that was measured.
#[derive(Clone, Debug)]
pub struct MeasuredChange<C> {
    /// Identifies the change for another forecast.
    pub change: C,
    /// Gain by the latest models that could forecast it.
    pub forecast: f64,
    pub measured_log_ratio: f64,
}

/// The latest measured changes.
///
/// Models learn from the counts of a change, and may be replaced. Errors of models that no longer exist say nothing about
/// the next forecast, so changes are forecast again before each search.
#[derive(Clone, Debug)]
pub struct ForecastRecord<C>(Vec<MeasuredChange<C>>);

impl<C> Default for ForecastRecord<C> {
    fn default() -> Self {
        ForecastRecord(Vec::new())
    }
}

impl<C> ForecastRecord<C> {
    /// Records the outcome of a change.
    pub fn record(&mut self, change: MeasuredChange<C>) {
        if self.0.len() == MAX_VERDICTS {
            self.0.remove(0);
        }
        self.0.push(change);
    }

    /// Replaces the forecasts of changes by those of the present models. A change that these do not describe (`None`)
    /// keeps its forecast.
    pub fn forecast_again(&mut self, forecast_gain: impl Fn(&C) -> Option<f64>) {
        for measured in &mut self.0 {
            measured.forecast = forecast_gain(&measured.change).unwrap_or(measured.forecast);
        }
    }

    /// Returns the errors of the forecasts, with two errors of [`FORECAST_ERROR`] in opposite directions before the first
    /// verdict. The best of many candidates is often best because its forecast errs, so the mean error is negative (Smith
    /// and Winkler, Management Science 2006).
    pub fn forecast_error(&self) -> GainError {
        let prior = [-FORECAST_ERROR, FORECAST_ERROR].into_iter();
        let error_of =
            |change: &MeasuredChange<C>| libm::expm1(change.measured_log_ratio) - change.forecast;
        let errors: Vec<f64> = prior.chain(self.0.iter().map(error_of)).collect();
        let bias = errors.iter().sum::<f64>() / errors.len() as f64;
        let squares = errors
            .iter()
            .map(|error| (error - bias) * (error - bias))
            .sum::<f64>();
        GainError {
            bias,
            variance: squares / errors.len() as f64,
        }
    }
}

/// The best candidate, compared with the plan in force.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CandidateComparison {
    /// Whether the candidate is the plan in force.
    pub is_in_force: bool,
    /// Whether the candidate meets a goal that is missed now.
    pub meets_missed_goal: bool,
    /// Forecast gain, as a share.
    pub gain: f64,
    /// Probability that the gain pays off.
    pub probability: f64,
    /// Whether the gain is worth a measurement, see [`Gain::is_worth_measuring`].
    pub is_worth_measuring: bool,
    /// Whether tasks and phases change too rarely to end every confirmation.
    pub has_time_to_confirm: bool,
}

/// The decision about the best candidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CandidateVerdict {
    /// Drop the candidate.
    Keep,
    /// Apply the candidate, and keep it only if it is measured faster.
    Confirm,
    /// Apply the candidate and monitor it.
    Adopt,
}

/// Chooses between the plan in force and the best candidate. Without time for a confirmation, only a likely plan is applied.
pub fn decide(comparison: &CandidateComparison, min_gain: f64) -> CandidateVerdict {
    let is_likely = comparison.probability >= MIN_LIKELY_PROBABILITY;
    let is_worth_trying =
        is_likely || comparison.is_worth_measuring && comparison.has_time_to_confirm;
    let can_gain = comparison.gain >= min_gain && is_worth_trying;
    if comparison.is_in_force || !(comparison.meets_missed_goal || can_gain) {
        CandidateVerdict::Keep
    } else if comparison.meets_missed_goal
        || comparison.probability >= MIN_ADOPTION_PROBABILITY
        || !comparison.has_time_to_confirm
    {
        CandidateVerdict::Adopt
    } else {
        CandidateVerdict::Confirm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A change whose forecast was 5 %.
    fn measured(measured_log_ratio: f64) -> MeasuredChange<()> {
        MeasuredChange {
            change: (),
            forecast: 0.05,
            measured_log_ratio,
        }
    }

    const LIKELY_GAIN: CandidateComparison = CandidateComparison {
        is_in_force: false,
        meets_missed_goal: false,
        gain: 0.03,
        probability: 0.7,
        is_worth_measuring: false,
        has_time_to_confirm: true,
    };

    /// Does every condition lead to its choice?
    #[test]
    fn every_condition_leads_to_its_choice() {
        let table = [
            (LIKELY_GAIN, CandidateVerdict::Confirm),
            (
                CandidateComparison {
                    is_in_force: true,
                    meets_missed_goal: true,
                    ..LIKELY_GAIN
                },
                CandidateVerdict::Keep,
            ),
            (
                CandidateComparison {
                    probability: 0.49,
                    ..LIKELY_GAIN
                },
                CandidateVerdict::Keep,
            ),
            (
                CandidateComparison {
                    probability: 0.49,
                    is_worth_measuring: true,
                    ..LIKELY_GAIN
                },
                CandidateVerdict::Confirm,
            ),
            (
                CandidateComparison {
                    probability: 0.49,
                    is_worth_measuring: true,
                    has_time_to_confirm: false,
                    ..LIKELY_GAIN
                },
                CandidateVerdict::Keep,
            ),
            (
                CandidateComparison {
                    gain: 0.009,
                    ..LIKELY_GAIN
                },
                CandidateVerdict::Keep,
            ),
            (
                CandidateComparison {
                    probability: 0.95,
                    ..LIKELY_GAIN
                },
                CandidateVerdict::Adopt,
            ),
            (
                CandidateComparison {
                    has_time_to_confirm: false,
                    ..LIKELY_GAIN
                },
                CandidateVerdict::Adopt,
            ),
            (
                CandidateComparison {
                    meets_missed_goal: true,
                    gain: -0.1,
                    probability: 0.0,
                    ..LIKELY_GAIN
                },
                CandidateVerdict::Adopt,
            ),
        ];
        for (comparison, expected) in table {
            assert_eq!(decide(&comparison, 0.01), expected, "{comparison:?}");
        }
    }

    /// Do the numbers of the page's example hold?
    #[test]
    fn the_example_of_the_page_holds() {
        let mut record = ForecastRecord::default();
        let decision = |record: &ForecastRecord<()>, forecast: f64| {
            let gain = Gain::from_draws(forecast, &[forecast, forecast], record.forecast_error());
            let probability = gain.probability_of_gain(0.01);
            (
                libm::round(100.0 * probability),
                decide(
                    &CandidateComparison {
                        gain: forecast,
                        probability,
                        is_worth_measuring: gain.is_worth_measuring(0.01, 20.0, 60.0),
                        ..LIKELY_GAIN
                    },
                    0.01,
                ),
            )
        };
        assert_eq!(decision(&record, 0.05), (96.0, CandidateVerdict::Adopt));
        assert_eq!(decision(&record, 0.03), (83.0, CandidateVerdict::Confirm));
        (0..3).for_each(|_| record.record(measured(libm::log1p(-0.05))));
        assert_eq!(decision(&record, 0.05), (35.0, CandidateVerdict::Confirm));
        (0..2).for_each(|_| record.record(measured(libm::log1p(-0.05))));
        assert_eq!(decision(&record, 0.05), (26.0, CandidateVerdict::Keep));
    }

    /// Does the probability follow a normal distribution around the smaller of forecast and mean?
    #[test]
    fn the_probability_is_that_of_a_normal_distribution() {
        let gain = |middle: f64, mean: f64| Gain {
            forecast: middle,
            mean,
            standard_error: 0.02,
            bias: 0.0,
        };
        assert_eq!(gain(0.01, 0.05).probability_of_gain(0.01), 0.5);
        assert!((gain(0.06, 0.05).probability_of_gain(0.01) - 0.977_249_868).abs() < 1e-8);
        assert!((gain(0.05, 0.06).probability_of_gain(0.01) - 0.977_249_868).abs() < 1e-8);
    }

    /// Is a probable gain worth its measurement, and a probable loss only if it is uncertain and the gain would last?
    #[test]
    fn a_probable_loss_is_rarely_worth_a_measurement() {
        let gain = |middle: f64| Gain {
            forecast: middle,
            mean: middle,
            standard_error: 0.02,
            bias: 0.0,
        };
        let is_worth =
            |middle: f64, lasting: f64| gain(middle).is_worth_measuring(0.01, 20.0, lasting);
        assert!(is_worth(0.001, 20.0) && !is_worth(-0.001, 20.0));
        assert!(is_worth(-0.008, 60.0) && !is_worth(-0.01, 60.0));
        let sure = Gain {
            standard_error: 0.005,
            ..gain(0.004)
        };
        assert!(
            !sure.is_worth_measuring(0.01, 20.0, 60.0),
            "it cannot gain enough"
        );
    }

    /// Do wrong forecasts widen the error of the next gain, and right ones narrow it? Is a constant error subtracted?
    #[test]
    fn wrong_forecasts_widen_the_error() {
        let gain = |record: &ForecastRecord<()>| {
            Gain::from_draws(0.05, &[0.05, 0.05], record.forecast_error())
        };
        let mut record = ForecastRecord::default();
        let fresh = gain(&record);
        assert!((fresh.standard_error - libm::sqrt(0.02 * 0.02 + 0.0125 * 0.0125)).abs() < 1e-12);
        (0..20).for_each(|_| record.record(measured(libm::log1p(0.05))));
        assert!(gain(&record).standard_error < fresh.standard_error);
        (0..20).for_each(|index| {
            record.record(measured(libm::log1p(if index % 2 == 0 {
                -0.05
            } else {
                0.15
            })))
        });
        let wide = gain(&record).standard_error;
        assert!(
            wide > 0.09,
            "the record holds the last {MAX_VERDICTS}: {wide}"
        );
        assert!(gain(&record).probability_of_gain(0.01) > 0.5);
        (0..20).for_each(|_| record.record(measured(libm::log1p(-0.05))));
        assert!(
            gain(&record).probability_of_gain(0.01) < 0.5,
            "{:?}",
            gain(&record)
        );
    }

    /// Do errors of models that have been replaced stop counting, while those of changes that the present models do not
    /// describe still count?
    #[test]
    fn errors_of_replaced_models_do_not_count() {
        let mut record = ForecastRecord::default();
        for change in ["same phases", "other phases"] {
            record.record(MeasuredChange {
                change,
                forecast: 0.25,
                measured_log_ratio: libm::log1p(-0.05),
            });
        }
        let bias =
            |record: &ForecastRecord<&str>| libm::round(1e4 * record.forecast_error().bias) / 1e4;
        assert_eq!(bias(&record), -0.15);
        record.forecast_again(|change| (*change == "same phases").then_some(-0.05));
        assert_eq!(bias(&record), -0.075);
        record.forecast_again(|_| None);
        assert_eq!(bias(&record), -0.075);
    }
}
