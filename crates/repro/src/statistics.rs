//! Means, extremes and spreads of values.

use std::borrow::Borrow;

/// Arithmetic mean; NaN without values.
pub fn mean<V: Borrow<f64>>(values: impl IntoIterator<Item = V>) -> f64 {
    let mut count = 0u32;
    let sum: f64 = values
        .into_iter()
        .inspect(|_| count += 1)
        .map(|value| *value.borrow())
        .sum();
    sum / f64::from(count)
}

/// The least value; infinite without values.
pub(crate) fn least<V: Borrow<f64>>(values: impl IntoIterator<Item = V>) -> f64 {
    values
        .into_iter()
        .map(|value| *value.borrow())
        .fold(f64::INFINITY, f64::min)
}

/// The greatest value; minus infinity without values.
pub(crate) fn greatest<V: Borrow<f64>>(values: impl IntoIterator<Item = V>) -> f64 {
    values
        .into_iter()
        .map(|value| *value.borrow())
        .fold(f64::NEG_INFINITY, f64::max)
}

/// A gain as a share of a reference's, in percent. A share of a loss means nothing; then a gain that
/// is no smaller counts as 100 %, and another as 0.
pub(crate) fn percent_of_gain(gain: f64, reference: f64) -> f64 {
    if reference > 0.0 {
        100.0 * gain / reference
    } else {
        100.0 * f64::from(u8::from(gain >= reference))
    }
}

/// Standard deviation of the distribution from which these values were drawn.
pub(crate) fn standard_deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let sum_of_squares: f64 = values
        .iter()
        .map(|value| (value - mean) * (value - mean))
        .sum();
    (sum_of_squares / (values.len() - 1) as f64).sqrt()
}

/// `value` where `position`, which ascends over the points, reaches `target`: interpolated linearly
/// between two points; that of the first point before it; `None` beyond the last.
pub(crate) fn interpolate_at<P>(
    points: &[P],
    target: f64,
    position: impl Fn(&P) -> f64,
    value: impl Fn(&P) -> f64,
) -> Option<f64> {
    let next_index = points.partition_point(|point| position(point) < target);
    let later_point = points.get(next_index)?;
    let Some(earlier_point) = next_index.checked_sub(1).map(|index| &points[index]) else {
        return Some(value(later_point));
    };
    let share =
        (target - position(earlier_point)) / (position(later_point) - position(earlier_point));
    Some(value(earlier_point) + share * (value(later_point) - value(earlier_point)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a policy that loses more than its reference not credited with a share of its loss?
    #[test]
    fn a_losing_policy_gets_no_credit_for_a_share_of_its_loss() {
        assert_eq!(
            [
                percent_of_gain(2.0, 4.0),
                percent_of_gain(-2.1, -2.0),
                percent_of_gain(-1.0, -2.0)
            ],
            [50.0, 0.0, 100.0]
        );
    }
}
