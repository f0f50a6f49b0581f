//! Axes: from values to pixels, and the positions of ticks.

use crate::text::{format_number, format_size};

/// The scale of an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AxisScale {
    /// Linear: equal differences have equal distances.
    #[default]
    Linear,
    /// Logarithmic, in decades. Values of zero and below are drawn at the low end.
    Log,
    /// Logarithmic, in doublings, labeled as sizes in bytes (K, M, G). Values of zero and below are drawn at the low
    /// end.
    LogBytes,
}

/// One axis of a figure.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Axis {
    /// Label with the unit: "cache size", "misses per 1000 instructions".
    pub label: String,
    /// The scale.
    pub scale: AxisScale,
    /// Lowest and highest value shown; `None` to fit the data.
    pub range: Option<(f64, f64)>,
    /// Ticks at these positions with these texts instead of numbers (names along an axis).
    pub names: Vec<(f64, String)>,
}

impl Axis {
    /// The range follows from the data.
    pub fn linear(label: &str) -> Self {
        Axis {
            label: label.to_string(),
            ..Axis::default()
        }
    }
    /// An axis in decades; its range follows from the data.
    pub fn log(label: &str) -> Self {
        Axis {
            label: label.to_string(),
            scale: AxisScale::Log,
            ..Axis::default()
        }
    }
    /// An axis in doublings of bytes; its range follows from the data.
    pub fn bytes(label: &str) -> Self {
        Axis {
            label: label.to_string(),
            scale: AxisScale::LogBytes,
            ..Axis::default()
        }
    }
    /// Shows the values from `low` to `high` instead of fitting the data.
    pub fn with_range(mut self, low: f64, high: f64) -> Self {
        self.range = Some((low, high));
        self
    }
}

/// An axis with a fixed range, laid out between two pixels.
pub(super) struct AxisLayout<'a> {
    axis: &'a Axis,
    low: f64,
    high: f64,
    pixels: (f64, f64),
}

impl<'a> AxisLayout<'a> {
    /// Lays out `axis` between the two pixels of `pixels`. If `includes_zero` is set, a linear axis without a given
    /// range starts at zero unless a value is below zero.
    pub fn new(
        axis: &'a Axis,
        values: impl Iterator<Item = f64>,
        pixels: (f64, f64),
        includes_zero: bool,
    ) -> Self {
        let is_logarithmic = axis.scale != AxisScale::Linear;
        // Differences and quotients of larger or smaller values would not be finite.
        let is_usable = |value: &f64| value.abs() < 1e150 && (!is_logarithmic || *value > 1e-150);
        let (mut low, mut high) = axis.range.unwrap_or_else(|| {
            let named_positions = axis.names.iter().map(|(position, _)| *position);
            values
                .chain(named_positions)
                .filter(is_usable)
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                    (low.min(value), high.max(value))
                })
        });
        if !low.is_finite() || !high.is_finite() || (is_logarithmic && low <= 0.0) {
            (low, high) = if is_logarithmic {
                (1.0, 10.0)
            } else {
                (0.0, 1.0)
            };
        }

        if !is_logarithmic && axis.range.is_none() && axis.names.is_empty() {
            (low, high) = round_range(low, high, includes_zero);
        } else if high <= low {
            (low, high) = if is_logarithmic {
                (low / 2.0, low * 2.0)
            } else {
                (low - 0.5, low + 0.5)
            };
        }

        AxisLayout {
            axis,
            low,
            high,
            pixels,
        }
    }

    /// A share of the axis from 0 to 1. Values beyond an end are drawn there, and one that is not a
    /// number at the low end.
    pub fn position(&self, value: f64) -> f64 {
        let share = match self.axis.scale {
            AxisScale::Linear => (value - self.low) / (self.high - self.low),
            _ if value <= 0.0 => 0.0,
            _ => libm::log2(value / self.low) / libm::log2(self.high / self.low),
        };
        let share = if share.is_nan() { 0.0 } else { share };
        let (first_pixel, last_pixel) = self.pixels;
        first_pixel + share.clamp(0.0, 1.0) * (last_pixel - first_pixel)
    }

    pub fn contains(&self, value: f64) -> bool {
        let slack = (self.high - self.low).abs() * 1e-9;
        value >= self.low - slack && value <= self.high + slack
    }

    /// Positions and labels of the ticks, ascending.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        if !self.axis.names.is_empty() {
            return self
                .axis
                .names
                .iter()
                .filter(|(position, _)| self.contains(*position))
                .cloned()
                .collect();
        }
        match self.axis.scale {
            AxisScale::Linear => self.linear_ticks(),
            AxisScale::Log => self.log_ticks(),
            AxisScale::LogBytes => self.byte_ticks(),
        }
    }

    fn linear_ticks(&self) -> Vec<(f64, String)> {
        let step = nice_step((self.high - self.low) / 5.0);
        let first_index = libm::ceil(self.low / step - 1e-9);
        let ticks = (0..64).map(|index| (first_index + f64::from(index)) * step);
        ticks
            .take_while(|tick| *tick <= self.high + step * 1e-6)
            .map(|tick| (tick, format_number(tick)))
            .collect()
    }

    fn log_ticks(&self) -> Vec<(f64, String)> {
        let decades = libm::log10(self.high / self.low);
        let steps: &[f64] = if decades < 1.0 {
            &[1.0, 2.0, 3.0, 5.0, 7.0]
        } else if decades < 3.0 {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0]
        };
        let stride = (decades / 8.0).max(1.0) as i32;
        let (first, last) = (
            libm::floor(libm::log10(self.low)) as i32,
            libm::ceil(libm::log10(self.high)) as i32,
        );
        let mut ticks = Vec::new();
        for decade in (first..=last).step_by(stride as usize) {
            for step in steps {
                let tick = step * libm::pow(10.0, f64::from(decade));
                if self.contains(tick) {
                    ticks.push((tick, format_number(tick)));
                }
            }
        }
        ticks
    }

    fn byte_ticks(&self) -> Vec<(f64, String)> {
        let (first, last) = (
            libm::ceil(libm::log2(self.low) - 1e-9),
            libm::floor(libm::log2(self.high) + 1e-9),
        );
        let stride = ((last - first) / 9.0).max(1.0);
        let stride = if stride > 1.0 {
            libm::ceil(stride)
        } else {
            1.0
        };
        let powers = (0..64)
            .map(|index| first + stride * f64::from(index))
            .take_while(|power| *power <= last);
        powers
            .map(|power| (libm::exp2(power), format_size(libm::exp2(power) as u64)))
            .collect()
    }
}

/// The ends are round numbers; zero lies within if `includes_zero` is set.
fn round_range(low: f64, high: f64, includes_zero: bool) -> (f64, f64) {
    let low = if includes_zero { low.min(0.0) } else { low };
    let high = if includes_zero { high.max(0.0) } else { high };
    if high <= low {
        return if low == 0.0 {
            (0.0, 1.0)
        } else {
            (low - low.abs() / 2.0, high + low.abs() / 2.0)
        };
    }
    let step = nice_step((high - low) / 5.0);
    (
        libm::floor(low / step + 1e-9) * step,
        libm::ceil(high / step - 1e-9) * step,
    )
}

/// Smallest number of the form 1, 2, 2.5 or 5 times a power of ten that is at least `min_step`.
fn nice_step(min_step: f64) -> f64 {
    if !(min_step.is_finite() && min_step > 0.0) {
        return 1.0;
    }
    let decade = libm::pow(10.0, libm::floor(libm::log10(min_step)));
    let factor = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .find(|step| step * decade >= min_step * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * decade
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis, values: &[f64]) -> Vec<String> {
        let laid = AxisLayout::new(axis, values.iter().copied(), (0.0, 100.0), true);
        laid.ticks().into_iter().map(|(_, label)| label).collect()
    }

    /// Are ticks at round values, and few enough to read?
    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(
            labels(&Axis::linear(""), &[0.0, 9.3]),
            ["0", "2", "4", "6", "8", "10"]
        );
        assert_eq!(
            labels(&Axis::linear(""), &[-0.12, 0.3]),
            ["-0.2", "-0.1", "0", "0.1", "0.2", "0.3"]
        );
        assert_eq!(
            labels(&Axis::log(""), &[1.0, 1000.0]),
            ["1", "10", "100", "1000"]
        );
        assert_eq!(
            labels(&Axis::bytes(""), &[65536.0, 1048576.0]),
            ["64K", "128K", "256K", "512K", "1M"]
        );
        assert_eq!(labels(&Axis::bytes(""), &[1024.0, 1073741824.0]).len(), 7);
    }

    /// Does every input, empty, constant, zero or not finite, give an axis?
    #[test]
    fn odd_data_still_gives_an_axis() {
        for scale in [AxisScale::Linear, AxisScale::Log, AxisScale::LogBytes] {
            for values in [
                &[][..],
                &[0.0],
                &[5.0, 5.0],
                &[f64::NAN, -3.0],
                &[f64::INFINITY, 1e-300, 1e300],
            ] {
                let axis = Axis {
                    scale,
                    ..Axis::default()
                };
                let laid = AxisLayout::new(&axis, values.iter().copied(), (0.0, 100.0), true);
                assert!(laid.ticks().len() < 80, "{scale:?} {values:?}");
                for value in [0.0, -1.0, 1.0, 1e9] {
                    assert!(
                        (0.0..=100.0).contains(&laid.position(value)),
                        "{scale:?} {values:?} {value}"
                    );
                }
            }
        }
    }
}
