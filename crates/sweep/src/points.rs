//! The points of a sweep's axes, in order, after filtering.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::file::{SweepAxis, SweepDefinition, matches_value};

/// A value for every axis, in the order of the axes.
pub type Point<'a> = Vec<(&'a str, &'a Value)>;

impl SweepDefinition {
    /// Every point that passes the filters; the last axis varies fastest.
    pub fn points(&self) -> impl Iterator<Item = Point<'_>> {
        all_points(&self.axes).filter(|point| self.is_selected(point))
    }

    fn is_selected(&self, point: &Point<'_>) -> bool {
        let is_matched = |filter: &BTreeMap<String, Vec<Value>>| {
            let axis_value = |name: &str| {
                point
                    .iter()
                    .find(|(axis, _)| *axis == name)
                    .map(|(_, value)| *value)
            };
            filter.iter().all(|(name, patterns)| {
                axis_value(name).is_some_and(|value| {
                    patterns.iter().any(|pattern| matches_value(value, pattern))
                })
            })
        };
        !self.skip.iter().any(is_matched)
            && (self.only.is_empty() || self.only.iter().any(is_matched))
    }
}

fn all_points(axes: &[SweepAxis]) -> impl Iterator<Item = Point<'_>> {
    let count: usize = axes.iter().map(|axis| axis.values.len()).product();
    (0..count).map(move |mut remaining_index| {
        let mut point: Point<'_> = axes
            .iter()
            .rev()
            .map(|axis| {
                let value = &axis.values[remaining_index % axis.values.len()];
                remaining_index /= axis.values.len();
                (axis.name.as_str(), value)
            })
            .collect();
        point.reverse();
        point
    })
}
