//! Estimates the effect of each co-runner on a service's speed, by weighted least squares over windows with different
//! presences.
//!
//! The logarithm of the speed is a constant minus the sum of each co-runner's presence times its effect. Among windows
//! with the same co-runners, older ones weigh less. A weak prior keeps an effect that the windows do not separate near
//! zero and its error wide, so it never counts as measured.

/// Weight of a window relative to the next similar one, so that the last forty such windows have most of the weight.
const RETENTION: f64 = 0.975;
/// Standard deviation of an effect before any evidence, as a logarithm of the speed.
const PRIOR_DEVIATION: f64 = 0.5;
/// Noise of one window's speed before any evidence, as a logarithm.
const PRIOR_NOISE: f64 = 0.05;
/// Number of windows with the same weight as the prior noise.
const PRIOR_WINDOWS: f64 = 2.0;

/// An estimated effect with its error.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EffectEstimate {
    /// Logarithm of the speed lost for a presence of one CPU.
    pub value: f64,
    /// Standard error of the value.
    pub error: f64,
}

/// Sums over all windows, from which the effects are computed.
#[derive(Clone, PartialEq, Debug)]
pub struct EffectRegression {
    /// Products of a window's terms with each other: the constant, then the co-runners.
    products: Vec<Vec<f64>>,
    /// Products of the terms with the speed.
    speed_products: Vec<f64>,
    speed_square_sum: f64,
    window_weight: f64,
    /// Error of the last window's prediction, from which the autocorrelation of successive errors is computed.
    last_error: Option<f64>,
    error_square_sum: f64,
    error_product_sum: f64,
    /// Constant near the speeds that is subtracted, because sums of large numbers lose digits.
    speed_offset: Option<f64>,
}

impl Default for EffectRegression {
    fn default() -> Self {
        EffectRegression {
            products: vec![vec![0.0]],
            speed_products: vec![0.0],
            speed_square_sum: 0.0,
            window_weight: 0.0,
            last_error: None,
            error_square_sum: 0.0,
            error_product_sum: 0.0,
            speed_offset: None,
        }
    }
}

impl EffectRegression {
    /// Observes a window. Co-runners keep their index; a new one was absent in all earlier windows.
    pub fn observe(&mut self, log_speed: f64, presence: &[f64]) {
        let centered_speed = log_speed - *self.speed_offset.get_or_insert(log_speed);
        while self.speed_products.len() < presence.len() + 1 {
            self.products.iter_mut().for_each(|row| row.push(0.0));
            self.speed_products.push(0.0);
            self.products.push(vec![0.0; self.speed_products.len()]);
        }

        let terms: Vec<f64> = std::iter::once(1.0)
            .chain(presence.iter().map(|presence| -presence))
            .collect();
        if self.window_weight > 1.0
            && let Some((effects, _)) = self.solve(PRIOR_NOISE * PRIOR_NOISE)
        {
            let error = centered_speed
                - terms
                    .iter()
                    .zip(&effects)
                    .map(|(term, effect)| term * effect)
                    .sum::<f64>();
            self.error_square_sum = RETENTION * self.error_square_sum + error * error;
            self.error_product_sum =
                RETENTION * self.error_product_sum + error * self.last_error.unwrap_or(0.0);
            self.last_error = Some(error);
        }

        self.decay(&terms);
        for (row, row_term) in self.products.iter_mut().zip(&terms) {
            for (product, column_term) in row.iter_mut().zip(&terms) {
                *product += row_term * column_term;
            }
        }

        for (sum, term) in self.speed_products.iter_mut().zip(&terms) {
            *sum += term * centered_speed;
        }
        self.speed_square_sum += centered_speed * centered_speed;
        self.window_weight = RETENTION * self.window_weight + 1.0;
    }

    /// Decays the sums only in the direction of the next window's terms (directional forgetting, Cao and Schwartz
    /// 2000). The knowledge of the speed without a co-runner therefore does not fade while the co-runner stays.
    fn decay(&mut self, terms: &[f64]) {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let projections: Vec<f64> = self.products.iter().map(|row| dot(row, terms)).collect();
        let information = dot(&projections, terms);
        if information <= 0.0 {
            return;
        }
        let (decay_factor, speed_projection) = (
            (1.0 - RETENTION) / information,
            dot(&self.speed_products, terms),
        );
        let explained_squares = self
            .solve(PRIOR_NOISE * PRIOR_NOISE)
            .map_or(0.0, |(effects, _)| dot(&effects, &self.speed_products));
        let residual = (self.speed_square_sum - explained_squares).max(0.0);
        for (row, projection) in self.products.iter_mut().zip(&projections) {
            row.iter_mut()
                .zip(&projections)
                .for_each(|(product, column_projection)| {
                    *product -= decay_factor * projection * column_projection
                });
        }
        self.speed_products
            .iter_mut()
            .zip(&projections)
            .for_each(|(sum, projection)| *sum -= decay_factor * projection * speed_projection);
        self.speed_square_sum -=
            decay_factor * speed_projection * speed_projection + (1.0 - RETENTION) * residual;
    }

    /// The estimated effect of each co-runner, by index.
    pub fn effects(&self) -> Vec<EffectEstimate> {
        // The prior is in units of the noise, which is known only after a first solution.
        let Some((initial_effects, _)) = self.solve(PRIOR_NOISE * PRIOR_NOISE) else {
            return Vec::new();
        };
        let noise = self.noise_variance(&initial_effects);
        let Some((effects, variances)) = self.solve(noise) else {
            return Vec::new();
        };

        let variance = self.noise_variance(&effects).max(noise);
        let estimate = |(value, unit_variance): (&f64, &f64)| EffectEstimate {
            value: *value,
            error: libm::sqrt(unit_variance * variance),
        };
        effects
            .iter()
            .zip(&variances)
            .skip(1)
            .map(estimate)
            .collect()
    }

    /// The logarithm of the speed that the effects give with these presences; `None` before the first window.
    pub fn predict(&self, presence: &[f64]) -> Option<f64> {
        let speed_offset = self.speed_offset?;
        let (effects, _) = self.solve(PRIOR_NOISE * PRIOR_NOISE)?;
        let losses: f64 = effects
            .iter()
            .skip(1)
            .zip(presence)
            .map(|(effect, presence)| effect * presence)
            .sum();
        Some(speed_offset + effects[0] - losses)
    }

    /// Removes a co-runner; the windows in which it ran still count for the remaining ones.
    pub fn remove(&mut self, index: usize) {
        let index = index + 1;
        if index < self.speed_products.len() {
            self.speed_products.remove(index);
            self.products.remove(index);
            self.products
                .iter_mut()
                .for_each(|row| _ = row.remove(index));
        }
    }

    fn noise_variance(&self, effects: &[f64]) -> f64 {
        let explained_squares: f64 = effects
            .iter()
            .zip(&self.speed_products)
            .map(|(effect, speed_product)| effect * speed_product)
            .sum();
        let prior = PRIOR_WINDOWS * PRIOR_NOISE * PRIOR_NOISE;
        let degrees_of_freedom =
            (self.window_weight + PRIOR_WINDOWS - effects.len() as f64).max(1.0);
        let variance =
            ((self.speed_square_sum - explained_squares).max(0.0) + prior) / degrees_of_freedom;
        // Successive windows resemble each other, so they carry less information than as many independent ones.
        let correlation = if self.error_square_sum > 0.0 {
            self.error_product_sum / self.error_square_sum
        } else {
            0.0
        };
        let correlation = correlation.clamp(0.0, 0.9);
        variance * (1.0 + correlation) / (1.0 - correlation)
    }

    /// The effects, and their variances at a noise of one, by Gauss-Jordan elimination of a positive definite matrix.
    fn solve(&self, noise_variance: f64) -> Option<(Vec<f64>, Vec<f64>)> {
        let size = self.speed_products.len();
        let prior = noise_variance / (PRIOR_DEVIATION * PRIOR_DEVIATION);
        let mut matrix: Vec<Vec<f64>> = self.products.clone();
        for (index, row) in matrix.iter_mut().enumerate() {
            row[index] += if index == 0 { 1e-9 } else { prior };
            row.extend((0..size).map(|column| if column == index { 1.0 } else { 0.0 }));
        }

        for pivot in 0..size {
            let pivot_value = matrix[pivot][pivot];
            if pivot_value.is_nan() || pivot_value <= 1e-12 {
                return None;
            }

            matrix[pivot]
                .iter_mut()
                .for_each(|cell| *cell /= pivot_value);
            let pivot_row = matrix[pivot].clone();
            for (_, row) in matrix
                .iter_mut()
                .enumerate()
                .filter(|(index, _)| *index != pivot)
            {
                let factor = row[pivot];
                row.iter_mut()
                    .zip(&pivot_row)
                    .for_each(|(cell, pivot_cell)| *cell -= factor * pivot_cell);
            }
        }

        let inverse_at = |row: usize, column: usize| matrix[row][size + column];
        let effects = (0..size).map(|row| {
            (0..size)
                .map(|column| inverse_at(row, column) * self.speed_products[column])
                .sum()
        });
        Some((
            effects.collect(),
            (0..size)
                .map(|index| inverse_at(index, index).max(0.0))
                .collect(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;

    /// Uniform noise between -1 and 1, with standard deviation 0.58.
    fn draw_noise(random: &mut SplitMix64) -> f64 {
        2.0 * random.draw_unit() - 1.0
    }

    /// Are effects of several co-runners recovered from noisy windows, within their errors?
    #[test]
    fn effects_are_recovered_within_their_errors() {
        let mut random = SplitMix64::new(7);
        let mut regression = EffectRegression::default();
        for window in 0..120 {
            let presence = [f64::from(window / 10 % 2), f64::from(window / 7 % 2) * 0.5];
            let speed =
                20.0 - 0.3 * presence[0] - 0.1 * presence[1] + 0.02 * draw_noise(&mut random);
            regression.observe(speed, &presence);
        }
        let effects = regression.effects();
        for (effect, truth) in effects.iter().zip([0.3, 0.1]) {
            assert!(
                (effect.value - truth).abs() < 3.0 * effect.error && effect.error < 0.03,
                "{effects:?}"
            );
        }
        let predicted = regression.predict(&[0.5, 1.0]).unwrap();
        assert!(
            (predicted - (20.0 - 0.15 - 0.1)).abs() < 0.03,
            "{predicted}"
        );
    }

    /// Is an effect measured a few windows after its co-runner starts, even if the co-runner never stops?
    #[test]
    fn an_effect_is_measured_soon_after_its_co_runner_starts() {
        let mut random = SplitMix64::new(3);
        let mut regression = EffectRegression::default();
        for window in 0..40 {
            let presence_share = if window < 34 { 0.0 } else { 1.0 };
            let presence: &[f64] = if window < 34 { &[] } else { &[1.0] };
            regression.observe(
                5.0 - 0.4 * presence_share + 0.02 * draw_noise(&mut random),
                presence,
            );
        }
        let effect = regression.effects()[0];
        assert!(
            effect.value > 3.0 * effect.error && (effect.value - 0.4).abs() < 0.05,
            "{effect:?}"
        );
    }

    /// Does an effect stay measured while its co-runner runs for many times the memory of a window?
    #[test]
    fn an_effect_does_not_fade_while_its_cause_stays() {
        let mut random = SplitMix64::new(11);
        let mut regression = EffectRegression::default();
        for window in 0..1_060 {
            let presence = if window < 60 { 0.0 } else { 1.0 };
            regression.observe(
                5.0 - 0.4 * presence + 0.02 * draw_noise(&mut random),
                &[presence],
            );
        }
        let effect = regression.effects()[0];
        assert!(
            (effect.value - 0.4).abs() < 0.02 && (effect.value - 0.4).abs() < 3.0 * effect.error,
            "{effect:?}"
        );
    }

    /// Are two co-runners that always run together not separated, and is one that always runs not measured?
    #[test]
    fn effects_that_windows_do_not_separate_stay_unknown() {
        let mut regression = EffectRegression::default();
        for window in 0..60 {
            let presence = f64::from(window / 5 % 2);
            regression.observe(3.0 - 0.2 * presence, &[presence, presence, 1.0]);
        }
        let effects = regression.effects();
        assert!(
            effects
                .iter()
                .all(|effect| effect.value.abs() < 2.0 * effect.error),
            "{effects:?}"
        );
        regression.remove(1);
        let effect = regression.effects()[0];
        assert!(
            effect.value > 2.0 * effect.error,
            "the one that remains has the whole effect: {effect:?}"
        );
    }
}
