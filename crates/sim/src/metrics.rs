//! Scores of a mix relative to solo runs, computed from rates.
//!
//! `rates` and `solo_rates` are the same quantity (instructions per cycle, operations per second) of the same programs
//! in the same order, together and alone. All scores are `None` without programs, or if a rate is not a positive
//! number.

/// Sum of each program's rate over its solo rate (Snavely and Tullsen), which is the number of
/// programs if none is slowed down.
pub fn weighted_speedup(rates: &[f64], solo_rates: &[f64]) -> Option<f64> {
    Some(relative_rates(rates, solo_rates)?.iter().sum())
}

/// Harmonic mean of the relative rates (Luo, Gummaraju and Franklin), which balances throughput and
/// fairness.
pub fn harmonic_mean(rates: &[f64], solo_rates: &[f64]) -> Option<f64> {
    let relative = relative_rates(rates, solo_rates)?;
    Some(relative.len() as f64 / relative.iter().map(|rate| 1.0 / rate).sum::<f64>())
}

/// Largest ratio of a solo rate to the rate in the mix.
pub fn worst_slowdown(rates: &[f64], solo_rates: &[f64]) -> Option<f64> {
    relative_rates(rates, solo_rates)?
        .into_iter()
        .map(|rate| 1.0 / rate)
        .reduce(f64::max)
}

/// Mean of run time in the mix over solo run time, minus one (CA).
pub fn mean_slowdown(rates: &[f64], solo_rates: &[f64]) -> Option<f64> {
    let relative = relative_rates(rates, solo_rates)?;
    Some(relative.iter().map(|rate| 1.0 / rate - 1.0).sum::<f64>() / relative.len() as f64)
}

/// Standard deviation over the mean, which is the fairness of run times in CASC-6; `None` if the
/// mean is not positive.
pub fn coefficient_of_variation(values: &[f64]) -> Option<f64> {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values
        .iter()
        .map(|value| (value - mean) * (value - mean))
        .sum::<f64>()
        / values.len() as f64;
    (!values.is_empty() && mean > 0.0).then(|| variance.sqrt() / mean)
}

fn relative_rates(rates: &[f64], solo_rates: &[f64]) -> Option<Vec<f64>> {
    let is_usable = |rate: &f64| rate.is_finite() && *rate > 0.0;
    let is_complete = !rates.is_empty()
        && rates.len() == solo_rates.len()
        && rates.iter().chain(solo_rates).all(is_usable);
    is_complete.then(|| {
        rates
            .iter()
            .zip(solo_rates)
            .map(|(rate, solo)| rate / solo)
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do the scores agree with their definitions on a mix worked out by hand?
    #[test]
    fn scores_agree_with_a_mix_worked_out_by_hand() {
        let (rates, solo) = ([0.5, 1.0], [1.0, 1.25]);
        assert_eq!(weighted_speedup(&rates, &solo), Some(1.3));
        assert!((harmonic_mean(&rates, &solo).unwrap() - 2.0 / 3.25).abs() < 1e-12);
        assert_eq!(worst_slowdown(&rates, &solo), Some(2.0));
        assert_eq!(mean_slowdown(&rates, &solo), Some(0.625));
        assert_eq!(coefficient_of_variation(&[1.0, 3.0]), Some(0.5));
    }

    /// Is there no score for programs that never ran?
    #[test]
    fn programs_that_never_ran_have_no_score() {
        assert_eq!(weighted_speedup(&[0.0], &[1.0]), None);
        assert_eq!(harmonic_mean(&[], &[]), None);
        assert_eq!(worst_slowdown(&[1.0], &[]), None);
        assert_eq!(coefficient_of_variation(&[]), None);
    }
}
