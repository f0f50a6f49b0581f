//! A fact about a task: its value, its error, its source, and its age.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Estimate;

/// The kind of evidence for a fact.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FactSource {
    /// Event counters of the task's own runs.
    Counters,
    /// Stall counters at the cache sizes that the task has occupied.
    StallCounters,
    /// Counters of the shared cache during intervals in which known sets of tasks ran together (CASC).
    CoRunRows,
    /// A trace of first-level misses (RapidMRC).
    MissTrace,
    /// Sampled accesses with their data addresses (thread clustering).
    AccessSamples,
    /// Watched locations (StatCache, StatStack).
    ReuseSamples,
    /// Accesses and misses by super set (activity vectors).
    SuperSets,
    /// Prime, wait and reload beside the task (Prime+Probe).
    PrimeProbe,
    /// A calibrated neighbor that ran beside the task.
    Neighbor,
    /// Phase detection.
    PhaseDetector,
    /// A profile recorded earlier, whose program was recognized.
    StoredProfile,
    /// An exact analysis of a recorded trace.
    ExactTrace,
    /// The simulator's ground truth, available only to experiments.
    Oracle,
}

/// A value with its interval, its source and its age.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Fact<T> {
    /// Value in the unit of the field's name.
    pub value: T,
    /// The confidence interval (two standard errors either way, unless the source defines it otherwise); `None` if the
    /// value has intervals of its own, as a curve's points do, or if its error is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<ConfidenceInterval>,
    /// The kind of evidence.
    pub source: FactSource,
    /// The window in which it was last measured.
    pub window: u64,
}

/// Ends of an interval, both included.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ConfidenceInterval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl FactSource {
    /// The words for this kind in messages.
    pub fn describe(self) -> &'static str {
        match self {
            FactSource::Counters => "counters",
            FactSource::StallCounters => "stall counters",
            FactSource::CoRunRows => "intervals with other co-runners",
            FactSource::MissTrace => "a log of misses",
            FactSource::AccessSamples => "sampled accesses",
            FactSource::ReuseSamples => "watched locations",
            FactSource::SuperSets => "super sets",
            FactSource::PrimeProbe => "a prime-and-probe measurement",
            FactSource::Neighbor => "a calibrated neighbor",
            FactSource::PhaseDetector => "phase detection",
            FactSource::StoredProfile => "an earlier run",
            FactSource::ExactTrace => "a recorded trace",
            FactSource::Oracle => "the simulator",
        }
    }
}

impl<T> Fact<T> {
    /// Builds a value without an interval of its own.
    pub fn new(value: T, source: FactSource, window: u64) -> Self {
        Fact {
            value,
            error: None,
            source,
            window,
        }
    }
}

impl Fact<f64> {
    /// Keeps the interval of `estimate` beside its value.
    pub fn from_measurement(estimate: Estimate, source: FactSource, window: u64) -> Self {
        let error = Some(ConfidenceInterval {
            low: estimate.low,
            high: estimate.high,
        });
        Fact {
            value: estimate.value,
            error,
            source,
            window,
        }
    }

    /// An exact value, known before anything ran; it never ages.
    pub fn oracle(value: f64) -> Self {
        Fact::from_measurement(Estimate::exact(value), FactSource::Oracle, 0)
    }

    /// A fact without an interval counts as exact here.
    pub fn estimate(&self) -> Estimate {
        let interval = self.error.unwrap_or(ConfidenceInterval {
            low: self.value,
            high: self.value,
        });
        Estimate {
            value: self.value,
            low: interval.low,
            high: interval.high,
        }
    }
}

/// Where a fact comes from.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FactOrigin {
    /// The quantity: the name of its field, in words.
    pub fact: String,
    /// The kind of evidence.
    pub source: FactSource,
    /// Age in windows; `None` if the fact was measured by another run.
    pub age_windows: Option<u64>,
}

/// A field that holds facts, or a group of such fields.
pub trait Facts {
    /// Appends the origins of all facts. `field` is the field's name, and `window` the present window.
    fn list_origins(&self, field: &str, window: u64, origins: &mut Vec<FactOrigin>);
    /// Copies the facts of `source` that are missing here.
    fn fill_missing(&mut self, source: &Self);
    /// Copies facts that were measured no earlier than the ones here, or that are missing here. A fact from a stored
    /// profile is not a measurement, so it never replaces one and only fills a gap.
    fn merge_newer(&mut self, source: &Self);
    /// Source and window of every known fact, as if all had been measured then.
    fn restamp(&mut self, source: FactSource, window: u64);
}

impl<T> Fact<T> {
    fn origin(&self, field: &str, window: u64) -> FactOrigin {
        let is_of_this_run = !matches!(self.source, FactSource::StoredProfile | FactSource::Oracle);
        FactOrigin {
            fact: field.replace('_', " "),
            source: self.source,
            age_windows: is_of_this_run.then(|| window.saturating_sub(self.window)),
        }
    }

    fn may_replace(&self, old_fact: &Self) -> bool {
        let is_stored = |fact: &Self| fact.source == FactSource::StoredProfile;
        !is_stored(self) && (is_stored(old_fact) || self.window >= old_fact.window)
    }
}

impl<T: Clone> Facts for Option<Fact<T>> {
    fn list_origins(&self, field: &str, window: u64, origins: &mut Vec<FactOrigin>) {
        origins.extend(self.iter().map(|fact| fact.origin(field, window)));
    }
    fn fill_missing(&mut self, source: &Self) {
        if self.is_none() {
            self.clone_from(source);
        }
    }
    fn merge_newer(&mut self, source: &Self) {
        match (&mut *self, source) {
            (Some(old_fact), Some(new_fact)) if new_fact.may_replace(old_fact) => {
                old_fact.clone_from(new_fact)
            }
            (None, Some(new_fact)) => *self = Some(new_fact.clone()),
            _ => {}
        }
    }
    fn restamp(&mut self, source: FactSource, window: u64) {
        if let Some(fact) = self {
            (fact.source, fact.window) = (source, window);
        }
    }
}

impl<K: Ord + Clone, T: Clone> Facts for BTreeMap<K, Fact<T>> {
    fn list_origins(&self, field: &str, window: u64, origins: &mut Vec<FactOrigin>) {
        let newest_fact = self.values().max_by_key(|fact| fact.window);
        origins.extend(newest_fact.map(|fact| fact.origin(field, window)));
    }
    fn fill_missing(&mut self, source: &Self) {
        for (key, fact) in source {
            self.entry(key.clone()).or_insert_with(|| fact.clone());
        }
    }
    fn merge_newer(&mut self, source: &Self) {
        for (key, new_fact) in source {
            match self.get_mut(key) {
                Some(old_fact) if !new_fact.may_replace(old_fact) => {}
                _ => _ = self.insert(key.clone(), new_fact.clone()),
            }
        }
    }
    fn restamp(&mut self, source: FactSource, window: u64) {
        self.values_mut()
            .for_each(|fact| (fact.source, fact.window) = (source, window));
    }
}

/// Declares a group of facts: each field implements [`Facts`], and the group implements it through its fields.
macro_rules! facts {
    ($(#[$doc:meta])* pub struct $group:ident { $($(#[$field_doc:meta])* pub $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Debug, Default, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $group { $($(#[$field_doc])* pub $field: $type,)* }

        impl $crate::Facts for $group {
            fn list_origins(&self, _group: &str, window: u64, origins: &mut Vec<$crate::FactOrigin>) {
                $($crate::Facts::list_origins(&self.$field, stringify!($field), window, origins);)*
            }
            fn fill_missing(&mut self, from: &Self) {
                $($crate::Facts::fill_missing(&mut self.$field, &from.$field);)*
            }
            fn merge_newer(&mut self, from: &Self) {
                $($crate::Facts::merge_newer(&mut self.$field, &from.$field);)*
            }
            fn restamp(&mut self, source: $crate::FactSource, window: u64) {
                $($crate::Facts::restamp(&mut self.$field, source, window);)*
            }
        }
    };
}
pub(crate) use facts;
