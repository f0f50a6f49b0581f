//! Ids, sets of small indices, and estimates with their intervals.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
        pub struct $name(pub u32);
    )*};
}
id! {
    /// A schedulable thread. The id is not a pid: the live machine maps it to (pid, tid, start time, boot id).
    TaskId,
    /// An address space, to which colors and pages belong.
    ProcessId,
    /// A cache partition of the plan (a resctrl group, a color set, ...).
    GroupId,
    /// A hardware context as the operating system numbers it.
    CpuId,
    /// Index into `Topology::caches`; not the kernel's cache id, which is neither dense nor unique.
    CacheId,
    /// A probe; the policy chooses the id, and results and refusals refer to it. The same id with the same content is
    /// the same probe.
    ProbeId,
}

/// A set of small indices: CPUs, page colors or ways, depending on the field. Trailing zero words are not stored.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct IndexSet(Vec<u64>);

/// A set of CPUs.
pub type CpuSet = IndexSet;

impl IndexSet {
    /// Exclusive upper bound of indices read from text, so that a malformed file cannot request unbounded memory.
    pub const LIMIT: u32 = 1 << 20;

    /// An index beyond the largest one is not in the set; it is no error.
    pub fn contains(&self, index: u32) -> bool {
        self.0
            .get(index as usize / 64)
            .is_some_and(|word| word >> (index % 64) & 1 == 1)
    }
    /// Adds an index, if it is not in the set yet. Memory grows with the largest index.
    pub fn insert(&mut self, index: u32) {
        let word = index as usize / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (index % 64);
    }
    /// Does nothing if the index is absent.
    pub fn remove(&mut self, index: u32) {
        if let Some(word) = self.0.get_mut(index as usize / 64) {
            *word &= !(1 << (index % 64));
        }
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
    }
    /// An empty set of CPUs means that nothing can run there.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    /// The smallest index; `None` if the set is empty.
    pub fn first(&self) -> Option<u32> {
        self.iter().next()
    }
    /// Empty sets intersect nothing.
    pub fn intersects(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a & b != 0)
    }
    /// The empty set is a subset of every set.
    pub fn is_subset(&self, superset: &Self) -> bool {
        self.0
            .iter()
            .enumerate()
            .all(|(i, word)| word & !superset.0.get(i).copied().unwrap_or(0) == 0)
    }
    /// Indices that are in either set.
    pub fn union(&self, other: &Self) -> Self {
        self.iter().chain(other.iter()).collect()
    }
    /// Indices that are in both sets; see [`Self::common_count`] for their number alone.
    pub fn intersection(&self, other: &Self) -> Self {
        self.iter().filter(|&index| other.contains(index)).collect()
    }
    /// Like `intersection(other).count()`, without building the intersection.
    pub fn common_count(&self, other: &Self) -> u32 {
        self.0
            .iter()
            .zip(&other.0)
            .map(|(a, b)| (a & b).count_ones())
            .sum()
    }
    /// Counts the indices, and not the span from the first to the last.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }
    /// Indices in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().enumerate().flat_map(|(i, &word)| {
            let mut remaining = word;
            std::iter::from_fn(move || {
                let bit = (remaining != 0).then(|| remaining.trailing_zeros())?;
                remaining &= remaining - 1;
                Some(64 * i as u32 + bit)
            })
        })
    }
}
impl FromIterator<u32> for IndexSet {
    fn from_iter<I: IntoIterator<Item = u32>>(indices: I) -> Self {
        let mut set = Self::default();
        indices.into_iter().for_each(|index| set.insert(index));
        set
    }
}

impl Extend<u32> for IndexSet {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, indices: I) {
        indices.into_iter().for_each(|index| self.insert(index));
    }
}
impl From<IndexSet> for String {
    fn from(set: IndexSet) -> Self {
        set.to_string()
    }
}
impl TryFrom<String> for IndexSet {
    type Error = ParseIndexSetError;
    fn try_from(text: String) -> Result<Self, ParseIndexSetError> {
        text.parse()
    }
}

/// The kernel's list form: `0-3,8`; nothing for the empty set.
impl fmt::Display for IndexSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut remaining_indices = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = remaining_indices.next() {
            let mut last = first;
            while remaining_indices
                .next_if(|&next| next == last + 1)
                .is_some()
            {
                last += 1;
            }
            write!(out, "{comma}{first}")?;
            if last > first {
                write!(out, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

/// The error for a text that is not an index list such as `0-3,8`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{found}' is not an index list such as '0-3,8' (indices below {LIMIT})", LIMIT = IndexSet::LIMIT)]
pub struct ParseIndexSetError {
    /// The part that could not be parsed.
    pub found: String,
}

impl FromStr for IndexSet {
    type Err = ParseIndexSetError;
    fn from_str(text: &str) -> Result<Self, ParseIndexSetError> {
        let mut set = Self::default();
        for part in text
            .trim()
            .split(',')
            .filter(|part| !part.trim().is_empty())
        {
            let parse_error = || ParseIndexSetError {
                found: part.to_string(),
            };
            let parse_index = |digits: &str| {
                digits
                    .trim()
                    .parse()
                    .ok()
                    .filter(|&index: &u32| index < Self::LIMIT)
                    .ok_or_else(parse_error)
            };

            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (parse_index(first)?, parse_index(last)?);
            if first > last {
                return Err(parse_error());
            }
            (first..=last).for_each(|index| set.insert(index));
        }

        Ok(set)
    }
}

/// The share of references that miss: between 0 and 1, because a miss is a reference.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug, Serialize, Deserialize)]
pub struct MissRatio(f64);

impl MissRatio {
    /// The ratio of two counts of the same references; `None` without references. If errors of the
    /// two make the misses more than the references, every reference is a miss.
    pub fn from_counts(misses: f64, references: f64) -> Option<Self> {
        (references > 0.0 && misses >= 0.0).then(|| MissRatio((misses / references).min(1.0)))
    }

    /// A number from 0 to 1.
    pub fn value(self) -> f64 {
        self.0
    }
}

/// An estimate with its confidence interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Estimate {
    /// The best estimate.
    pub value: f64,
    /// Lower end of the interval, inclusive.
    pub low: f64,
    /// Upper end of the interval, inclusive.
    pub high: f64,
}

impl Estimate {
    /// An interval of no width, for the result of an exact computation.
    pub fn exact(value: f64) -> Self {
        Estimate {
            value,
            low: value,
            high: value,
        }
    }
}

/// A ratio of two sums over windows, with its error.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RatioOfSums {
    /// Sum of the amounts divided by the sum of the references.
    pub ratio: f64,
    /// Two standard errors; windows are correlated, so only half of them count. Zero with fewer than two windows.
    pub half_width: f64,
}

impl RatioOfSums {
    /// Builds the ratio from the amount and the reference of each window; `None` if the references sum up to nothing.
    pub fn new(windows: &[(f64, f64)]) -> Option<Self> {
        let count = windows.len() as f64;
        let amount: f64 = windows.iter().map(|(amount, _)| amount).sum();
        let reference: f64 = windows.iter().map(|(_, reference)| reference).sum();
        if reference.is_nan() || reference <= 0.0 {
            return None;
        }

        let ratio = amount / reference;
        let excess_of = |(amount, own_reference): &(f64, f64)| {
            (amount - ratio * own_reference) * count / reference
        };
        let squared_excess: f64 = windows
            .iter()
            .map(|window| excess_of(window) * excess_of(window))
            .sum();
        let half_width = if count < 2.0 {
            0.0
        } else {
            2.0 * (squared_excess / (count - 1.0) / (0.5 * count)).sqrt()
        };
        Some(RatioOfSums { ratio, half_width })
    }
}

#[cfg(test)]
mod miss_ratio_tests {
    use super::MissRatio;

    /// Is every ratio between 0 and 1, whatever the counts, and absent without references?
    #[test]
    fn no_ratio_of_misses_exceeds_one() {
        let ratio = |misses, references| MissRatio::from_counts(misses, references);
        assert_eq!(ratio(1.0, 4.0).map(MissRatio::value), Some(0.25));
        assert_eq!(ratio(9.8, 1.0).map(MissRatio::value), Some(1.0));
        assert_eq!(ratio(0.0, 0.0), None);
        assert_eq!(ratio(f64::NAN, 1.0), None);
    }
}
