//! Kinds of a task's phases, by signals that do not depend on its share of the cache.
//!
//! Two phases may access a cache equally often and yet need very different amounts of it. Kinds are therefore
//! identified by the misses of the first-level caches, the references of this one and the cycles without waits for
//! memory, all together. A phase is of a kind if every number is as near to the kind's mean as the kind's own intervals
//! have been. Properties: no allocation of the cache changes any of these numbers; doubtful kinds are split, because a
//! kind that is split in two costs another measurement, whereas merging two gives a task the other's curve.

/// Number of kinds distinguished for one task; further phases have none.
const MAX_KINDS: usize = 64;
/// Intervals of one phase differ by at most this share, because counts of one program vary by a few percent from run to
/// run.
const NEAR_SHARE: f64 = 0.05;
/// They may also differ by this many events per thousand instructions, because finer distinctions gain nothing.
const NEAR: f64 = 0.05;
/// A phase's own intervals determine how far others of its kind may be: this multiple of the largest distance so far.
const TIMES_AS_FAR: f64 = 2.0;
/// Largest distance, as a share: an interval in which the task was measured may be far from all others.
const FAR_SHARE: f64 = 0.25;

/// One number of a kind.
#[derive(Clone, Copy, Debug)]
struct FeatureRange {
    mean: f64,
    /// Distance of the farthest interval from the mean.
    max_deviation: f64,
}

impl FeatureRange {
    /// Returns the distance of a value over the allowed distance.
    fn relative_distance(&self, value: f64) -> f64 {
        let share_of_mean = |share: f64| share * self.mean.abs();
        let max_distance =
            (TIMES_AS_FAR * self.max_deviation).clamp(share_of_mean(NEAR_SHARE), share_of_mean(FAR_SHARE)).max(NEAR);
        (value - self.mean).abs() / max_distance
    }
}

#[derive(Clone, Debug)]
struct PhaseKind {
    intervals: f64,
    usual_ranges: Vec<FeatureRange>,
}

impl PhaseKind {
    fn signal_distance(&self, signal: &[f64]) -> f64 {
        if self.usual_ranges.len() != signal.len() {
            return f64::INFINITY;
        }
        self.usual_ranges.iter().zip(signal).map(|(usual, &value)| usual.relative_distance(value)).fold(0.0, f64::max)
    }

    fn add(&mut self, signal: &[f64]) {
        self.intervals += 1.0;
        for (usual, value) in self.usual_ranges.iter_mut().zip(signal) {
            usual.max_deviation = usual.max_deviation.max((value - usual.mean).abs());
            usual.mean += (value - usual.mean) / self.intervals;
        }
    }
}

/// The kinds of one task.
#[derive(Clone, Debug, Default)]
pub(super) struct PhaseKinds(Vec<PhaseKind>);

impl PhaseKinds {
    /// Returns the kind of a phase with this first steady interval; a new one if none is near. `None` if there are too
    /// many.
    pub fn kind_of(&mut self, signal: &[f64]) -> Option<u32> {
        let distances = self.0.iter().map(|kind| kind.signal_distance(signal)).enumerate();
        let nearest = distances.reduce(|a, b| if b.1 < a.1 { b } else { a });
        if let Some((index, _)) = nearest.filter(|(_, distance)| *distance <= 1.0) {
            return Some(index as u32);
        }
        let usual_range = |&mean: &f64| FeatureRange { mean, max_deviation: 0.0 };
        let kind = PhaseKind { intervals: 0.0, usual_ranges: signal.iter().map(usual_range).collect() };
        (self.0.len() < MAX_KINDS).then(|| {
            self.0.push(kind);
            self.0.len() as u32 - 1
        })
    }

    /// Is one of these first numbers of a signal outside the range of a kind's intervals, and at least this far from
    /// their mean?
    pub fn is_outside(&self, kind: u32, first: &[f64], min_distance: f64) -> bool {
        let Some(kind) = self.0.get(kind as usize) else { return false };
        let is_out_of_range = |(usual, &value): (&FeatureRange, &f64)| {
            usual.relative_distance(value) > 1.0 && (value - usual.mean).abs() > min_distance
        };
        kind.usual_ranges.iter().zip(first).any(is_out_of_range)
    }

    /// Adds another steady interval of a phase of this kind.
    pub fn add(&mut self, kind: u32, signal: &[f64]) {
        if let Some(kind) = self.0.get_mut(kind as usize).filter(|kind| kind.usual_ranges.len() == signal.len()) {
            kind.add(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are phases with equal access rates distinguished by their other cycles, and a recurring one recognized?
    #[test]
    fn phases_with_equal_access_rates_are_distinguished() {
        let mut kinds = PhaseKinds::default();
        let (reuser, streams) = ([8.5, 0.1, 8.5, 760.0], [8.1, 0.1, 8.1, 1520.0]);
        assert_eq!(kinds.kind_of(&reuser), Some(0));
        assert_eq!(kinds.kind_of(&streams), Some(1));
        assert_eq!(kinds.kind_of(&reuser.map(|value| 1.02 * value)), Some(0));
        assert_eq!(kinds.kind_of(&[8.5, 0.1, 8.5]), Some(2), "what is not counted is no number of a kind");
    }

    /// Does a kind include intervals within its spread, and no others?
    #[test]
    fn a_kind_is_as_wide_as_its_intervals() {
        let mut kinds = PhaseKinds::default();
        let kind = kinds.kind_of(&[10.0]).unwrap();
        assert_eq!(kinds.clone().kind_of(&[11.5]), Some(1));
        [9.0, 11.0, 10.0, 9.2, 10.8].into_iter().for_each(|value| kinds.add(kind, &[value]));
        assert_eq!(kinds.kind_of(&[11.5]), Some(kind));
        assert_eq!(kinds.kind_of(&[13.0]), Some(1));
    }
}
