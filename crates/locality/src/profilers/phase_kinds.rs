//! Classifies a task's phases into kinds, by signals that do not depend on the task's share of the cache.
//!
//! Two phases may access a cache equally often and yet need very different amounts of it. Kinds are therefore
//! identified by three signals together: misses of the first-level caches, references of the contended cache, and
//! cycles that do not wait for memory. A phase belongs to a kind if each of its numbers is as close to the kind's mean
//! as the kind's own intervals have been.
//!
//! Properties: cache allocation changes none of these numbers. In case of doubt, a new kind is created, because a
//! superfluous kind costs only another measurement, whereas a merged kind gives a task the wrong curve.

/// Maximum number of kinds for one task; further phases are not classified.
const MAX_KINDS: usize = 64;
/// Relative difference within which intervals belong to one kind, because a program's counts vary by a few percent from
/// run to run.
pub(super) const SAME_KIND_SHARE: f64 = 0.05;
/// Absolute difference, in events per thousand instructions, within which intervals belong to one kind, because a finer
/// distinction gains nothing.
const SAME_KIND_DISTANCE: f64 = 0.05;
/// Allowed distance from a kind's mean, as a multiple of the largest distance of its intervals so far.
const RANGE_FACTOR: f64 = 2.0;
/// Maximum relative distance that widens a kind: an interval in which the task was being measured may be far from all
/// others.
const MAX_RANGE_SHARE: f64 = 0.25;

/// Range of one signal within a kind.
#[derive(Clone, Copy, Debug)]
struct FeatureRange {
    mean: f64,
    /// Distance of the farthest interval from the mean.
    max_deviation: f64,
}

impl FeatureRange {
    /// 1 is the edge of the range: the distance from the mean is divided by the allowed distance.
    fn relative_distance(&self, value: f64) -> f64 {
        let scaled_mean = |share: f64| share * self.mean.abs();
        let max_distance = (RANGE_FACTOR * self.max_deviation)
            .clamp(scaled_mean(SAME_KIND_SHARE), scaled_mean(MAX_RANGE_SHARE))
            .max(SAME_KIND_DISTANCE);
        (value - self.mean).abs() / max_distance
    }
}

#[derive(Clone, Debug)]
struct PhaseKind {
    interval_count: f64,
    feature_ranges: Vec<FeatureRange>,
}

impl PhaseKind {
    fn signal_distance(&self, signal: &[f64]) -> f64 {
        if self.feature_ranges.len() != signal.len() {
            return f64::INFINITY;
        }
        self.feature_ranges
            .iter()
            .zip(signal)
            .map(|(range, &value)| range.relative_distance(value))
            .fold(0.0, f64::max)
    }

    fn add(&mut self, signal: &[f64]) {
        self.interval_count += 1.0;
        for (range, value) in self.feature_ranges.iter_mut().zip(signal) {
            range.max_deviation = range.max_deviation.max((value - range.mean).abs());
            range.mean += (value - range.mean) / self.interval_count;
        }
    }
}

/// The kinds of phases of one task.
#[derive(Clone, Debug, Default)]
pub(super) struct PhaseKinds(Vec<PhaseKind>);

impl PhaseKinds {
    /// Kind of a phase with this first steady interval; a kind is created if none is near. `None` if a new kind is
    /// needed and the task already has [`MAX_KINDS`].
    pub fn find_or_create_kind(&mut self, signal: &[f64]) -> Option<u32> {
        let distances = self
            .0
            .iter()
            .map(|kind| kind.signal_distance(signal))
            .enumerate();
        let nearest_kind = distances.reduce(|a, b| if b.1 < a.1 { b } else { a });
        if let Some((index, _)) = nearest_kind.filter(|(_, distance)| *distance <= 1.0) {
            return Some(index as u32);
        }
        let usual_range = |&mean: &f64| FeatureRange {
            mean,
            max_deviation: 0.0,
        };
        let kind = PhaseKind {
            interval_count: 0.0,
            feature_ranges: signal.iter().map(usual_range).collect(),
        };
        (self.0.len() < MAX_KINDS).then(|| {
            self.0.push(kind);
            self.0.len() as u32 - 1
        })
    }

    /// Whether one of these first numbers of a signal lies outside the range of the kind's intervals, and farther from
    /// their mean than `min_distance` of its position.
    pub fn is_outside(
        &self,
        kind: u32,
        signal_start: &[f64],
        min_distance: impl Fn(usize) -> f64,
    ) -> bool {
        let Some(kind) = self.0.get(kind as usize) else {
            return false;
        };
        let is_out_of_range = |(entry, (range, &value)): (usize, (&FeatureRange, &f64))| {
            range.relative_distance(value) > 1.0 && (value - range.mean).abs() > min_distance(entry)
        };
        kind.feature_ranges
            .iter()
            .zip(signal_start)
            .enumerate()
            .any(is_out_of_range)
    }

    /// Adds another steady interval of a phase of this kind.
    pub fn add(&mut self, kind: u32, signal: &[f64]) {
        if let Some(kind) = self
            .0
            .get_mut(kind as usize)
            .filter(|kind| kind.feature_ranges.len() == signal.len())
        {
            kind.add(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are phases with equal access rates distinguished by their compute cycles, and is a recurring phase recognized?
    #[test]
    fn phases_with_equal_access_rates_are_distinguished() {
        let mut kinds = PhaseKinds::default();
        let (reuser, streams) = ([8.5, 0.1, 8.5, 760.0], [8.1, 0.1, 8.1, 1520.0]);
        assert_eq!(kinds.find_or_create_kind(&reuser), Some(0));
        assert_eq!(kinds.find_or_create_kind(&streams), Some(1));
        assert_eq!(
            kinds.find_or_create_kind(&reuser.map(|value| 1.02 * value)),
            Some(0)
        );
        assert_eq!(
            kinds.find_or_create_kind(&[8.5, 0.1, 8.5]),
            Some(2),
            "what is not counted is no number of a kind"
        );
    }

    /// Does a kind include intervals within its spread, and exclude all others?
    #[test]
    fn a_kind_includes_only_intervals_within_its_spread() {
        let mut kinds = PhaseKinds::default();
        let kind = kinds.find_or_create_kind(&[10.0]).unwrap();
        assert_eq!(kinds.clone().find_or_create_kind(&[11.5]), Some(1));
        [9.0, 11.0, 10.0, 9.2, 10.8]
            .into_iter()
            .for_each(|value| kinds.add(kind, &[value]));
        assert_eq!(kinds.find_or_create_kind(&[11.5]), Some(kind));
        assert_eq!(kinds.find_or_create_kind(&[13.0]), Some(1));
    }
}
