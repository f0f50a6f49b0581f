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
