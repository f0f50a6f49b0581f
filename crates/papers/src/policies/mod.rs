//! The policies, one file or folder each, and the registry that finds them by name.
//!
//! A new policy consists of one file here, one entry in [`ENTRIES`], and one page in `docs/policies/`. The conformance
//! tests (`crates/papers/src/conformance.rs`) apply to it at once.

use cachemate_core::{EvidenceKind, Policy, ProfileRecall, nearest_name, suggestion};

mod activity_vector;
mod balance_set;
mod best_by_matrix;
mod caladan;
mod casc;
mod counter_driven;
mod default;
mod di;
mod dio;
mod fence;
mod intensity_gangs;
mod lfoc;
mod linux_sched_cache;
mod parties;
mod random;
mod round_robin;
mod service_level;
mod static_partition;
mod thread_clustering;
mod worst_by_matrix;

pub use crate::parameters::{ParameterError, ParameterRange, parse_parameters};

/// A function that builds a policy from its parameters (TOML) and a seed.
type PolicyBuilder = fn(&str, u64) -> Result<Box<dyn Policy>, ParameterError>;

/// The evidence that a policy requires: one kind out of each inner list.
pub type RequiredEvidence = &'static [&'static [EvidenceKind]];

/// A policy of a registry.
pub struct PolicyEntry {
    /// Name of the policy.
    pub name: &'static str,
    /// One-line description, as completions print it.
    pub summary: &'static str,
    /// Evidence without which the policy decides nothing.
    pub needs: RequiredEvidence,
    /// Whether the policy is a control that slows programs down on purpose, and is therefore exempt from promises.
    pub is_harmful_by_design: bool,
    /// Builds the last step of profiling, which supplies curves of recurring phases and averages phases that are too
    /// short to be followed. `None` if the policy uses the profiles as measured.
    pub recall: Option<fn() -> Box<dyn ProfileRecall>>,
    build: PolicyBuilder,
}

impl PolicyEntry {
    /// A policy that uses the profiles as measured.
    pub const fn new(
        name: &'static str,
        build: PolicyBuilder,
        needs: RequiredEvidence,
        summary: &'static str,
    ) -> PolicyEntry {
        PolicyEntry {
            name,
            summary,
            needs,
            is_harmful_by_design: false,
            recall: None,
            build,
        }
    }

    /// The policy with this last step of profiling.
    pub const fn with_recall(mut self, recall: fn() -> Box<dyn ProfileRecall>) -> PolicyEntry {
        self.recall = Some(recall);
        self
    }
}

/// Lists of policies, in which one is found by its name.
#[derive(Clone, Copy)]
pub struct PolicyRegistry(pub &'static [&'static [PolicyEntry]]);

impl PolicyRegistry {
    /// All policies, in the order of their names.
    pub fn entries(self) -> Vec<&'static PolicyEntry> {
        let mut entries: Vec<&PolicyEntry> = self.0.iter().copied().flatten().collect();
        entries.sort_by_key(|entry| entry.name);
        entries
    }

    /// `None` if no policy has this name; the case counts.
    pub fn find(self, name: &str) -> Option<&'static PolicyEntry> {
        let mut entries = self.0.iter().copied().flatten();
        entries.find(|entry| entry.name == name)
    }

    /// Builds the policy called `name`. `parameters` is TOML, as stored in a run header; an empty text selects all
    /// defaults.
    ///
    /// # Errors
    /// The name is unknown (the error has the known names and the most similar one), or the parameters are invalid for
    /// the policy.
    pub fn build(
        self,
        name: &str,
        parameters: &str,
        seed: u64,
    ) -> Result<Box<dyn Policy>, PolicyError> {
        let Some(entry) = self.find(name) else {
            let names: Vec<&str> = self.entries().iter().map(|entry| entry.name).collect();
            let meant = nearest_name(name, names.iter().copied());
            return Err(PolicyError::Unknown {
                name: name.to_string(),
                known: names.join(", "),
                meant: suggestion(meant),
            });
        };

        (entry.build)(parameters, seed).map_err(|reason| PolicyError::Parameters {
            name: name.to_string(),
            reason,
        })
    }
}

/// The policies of this crate.
pub const PAPERS: PolicyRegistry = PolicyRegistry(&[ENTRIES]);

use EvidenceKind::{
    AccessSamples, CoRunRows, MissTraces, Neighbor, PrimeProbe, ReuseSamples, StoredProfiles,
    SuperSets, TaskCounters,
};

/// The policies of this crate, in the order of their names.
pub const ENTRIES: &[PolicyEntry] = &[
    PolicyEntry::new(
        "activity-vector",
        activity_vector::build,
        &[&[SuperSets, StoredProfiles]],
        "co-runs programs that use different parts of the cache (AV)",
    ),
    PolicyEntry::new(
        "balance-set",
        balance_set::build,
        &[&[ReuseSamples, StoredProfiles]],
        "runs groups whose reuse fits the cache together in turn, as gangs (BS)",
    ),
    PolicyEntry::new(
        "best-by-matrix",
        best_by_matrix::build,
        &[],
        "uses the assignment with the smallest sum of measured pairwise slowdowns",
    ),
    PolicyEntry::new(
        "caladan",
        caladan::build,
        &[&[TaskCounters]],
        "parks the largest user of memory bandwidth while a promise is missed (Caladan)",
    ),
    PolicyEntry::new(
        "casc",
        casc::build,
        &[&[CoRunRows]],
        "confines threads that miss much to a few CPUs of each cache (CASC)",
    ),
    PolicyEntry::new(
        "counter-driven",
        counter_driven::build,
        &[&[TaskCounters, StoredProfiles]],
        "co-runs programs that miss much with programs that miss little (AV)",
    ),
    PolicyEntry::new(
        "default",
        default::build,
        &[],
        "changes nothing: the machine's own scheduler decides",
    ),
    PolicyEntry::new(
        "di",
        di::build,
        &[&[StoredProfiles]],
        "balances the miss rates of profiles over the caches (CA)",
    ),
    PolicyEntry::new(
        "dio",
        dio::build,
        &[&[TaskCounters, PrimeProbe, Neighbor, StoredProfiles]],
        "balances counted miss rates over the caches (CA)",
    ),
    PolicyEntry::new(
        "fence",
        fence::build,
        &[&[TaskCounters, StoredProfiles]],
        "fences streams into a tenth of each cache, by one counter",
    ),
    PolicyEntry::new(
        "intensity-gangs",
        intensity_gangs::build,
        &[&[PrimeProbe], &[Neighbor]],
        "without a PMU: probes for harm, then separates programs by cache or by gang",
    ),
    PolicyEntry::new(
        "lfoc",
        lfoc::build,
        &[
            &[MissTraces, ReuseSamples, StoredProfiles],
            &[TaskCounters, StoredProfiles],
        ],
        "gives streams one way and sizes the partitions of sensitive programs by lookahead (LFOC)",
    ),
    PolicyEntry::new(
        "linux-sched-cache",
        linux_sched_cache::build,
        &[],
        "gathers threads of a process on one cache, by the rules of Linux 7.2's own balancer",
    ),
    PolicyEntry::new(
        "parties",
        parties::build,
        &[&[TaskCounters]],
        "grows the program that misses its promise, one resource and one step at a time (PARTIES)",
    ),
    PolicyEntry::new(
        "random",
        random::build,
        &[],
        "places each task on a random one of the emptiest caches",
    ),
    PolicyEntry::new(
        "round-robin",
        round_robin::build,
        &[],
        "places tasks on the caches in turn, in order of arrival",
    ),
    PolicyEntry::new(
        "service-level",
        service_level::build,
        &[],
        "gives a program the smallest share with which it reaches a rate of work per client",
    ),
    PolicyEntry::new(
        "static-partition",
        static_partition::build,
        &[],
        "gives each process configured colors or ways at configured times",
    ),
    PolicyEntry::new(
        "thread-clustering",
        thread_clustering::build,
        &[&[AccessSamples]],
        "places threads that share data on one chip, from sampled remote accesses (TC)",
    ),
    PolicyEntry {
        is_harmful_by_design: true,
        ..PolicyEntry::new(
            "worst-by-matrix",
            worst_by_matrix::build,
            &[],
            "uses the assignment with the largest sum of measured pairwise slowdowns",
        )
    },
];

/// The error for a policy that cannot be built.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PolicyError {
    /// There is no policy of that name.
    #[error("policy: found '{name}', expected one of {known}{meant}")]
    Unknown {
        /// The requested name.
        name: String,
        /// The known names, as a list.
        known: String,
        /// " (did you mean ...?)" if a known name is similar, otherwise empty.
        meant: String,
    },
    /// The parameters are not valid for the policy.
    #[error("parameters of policy '{name}': {reason}")]
    Parameters {
        /// Name of the policy.
        name: String,
        /// The error in its parameters.
        reason: ParameterError,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::check_policy;

    /// Does every policy of the registry obey the rules for all policies?
    #[test]
    fn every_policy_conforms() {
        assert!(ENTRIES.is_sorted_by_key(|entry| entry.name));
        for entry in ENTRIES {
            check_policy(&|seed| PAPERS.build(entry.name, "", seed).unwrap(), 40)
                .unwrap_or_else(|broken| panic!("policy '{}': {broken}", entry.name));
        }
    }

    /// Do the policies also obey the rules with parameters that change their decisions?
    #[test]
    fn policies_conform_with_other_parameters() {
        let matrix = "slowdowns = [[0.1, 0.5, 0.2, 0.0], [0.4, 0.0, 0.1, 0.1], [0.0, 0.2, 0.0, 0.3], [0.6, 0.1, 0.1, 0.2]]";
        let distributed = "form = \"distributed\"\nworth_moving = 0.0\nrounds_per_window = 2";

        for (name, parameters) in [
            ("di", distributed),
            ("dio", distributed),
            ("dio", "worth_moving = 0.0\npriorities = false"),
            ("best-by-matrix", matrix),
            ("worst-by-matrix", matrix),
            (
                "balance-set",
                "group_model = \"composed\"\nreplacement = \"lru\"\nrotation = \"uniform\"",
            ),
            ("casc", "form = \"literal\""),
            (
                "casc",
                "max_run_time_variation = 0.3\nremeasure_every_ns = 3000000\nrow_ns = 1000",
            ),
        ] {
            check_policy(&|seed| PAPERS.build(name, parameters, seed).unwrap(), 40)
                .unwrap_or_else(|broken| panic!("policy '{name}' with {parameters}: {broken}"));
        }
    }

    /// Do the other forms of co-scheduling conform too?
    #[test]
    fn every_form_of_coscheduling_conforms() {
        for name in ["activity-vector", "counter-driven"] {
            for form in ["set", "advice"] {
                let parameters = format!("form = \"{form}\"");
                check_policy(&|seed| PAPERS.build(name, &parameters, seed).unwrap(), 40)
                    .unwrap_or_else(|broken| panic!("policy '{name}', form '{form}': {broken}"));
            }
        }
    }

    /// Does the error for a wrong name or parameter help to correct it?
    #[test]
    fn errors_for_wrong_names_and_parameters_help_to_correct_them() {
        let known_names = ENTRIES
            .iter()
            .map(|entry| entry.name)
            .collect::<Vec<_>>()
            .join(", ");
        let error = |name: &str, parameters: &str| {
            PAPERS.build(name, parameters, 1).err().unwrap().to_string()
        };
        assert_eq!(
            error("round-robbin", ""),
            format!(
                "policy: found 'round-robbin', expected one of {known_names} (did you mean 'round-robin'?)"
            )
        );
        let unknown = error("random", "windov_ns = 3");
        assert!(
            unknown.contains("windov_ns")
                && unknown.contains("line 1")
                && unknown.contains("window_ns"),
            "{unknown}"
        );
        assert!(error("default", "window_ns = 0").contains("window_ns"));
        assert!(
            error("activity-vector", "[weights]\nsample = 0.0").contains("weights.sample: found 0")
        );
        assert!(
            error("activity-vector", "weights.newcomer = -1.0")
                .contains("weights.newcomer: found -1")
        );
        assert!(error("activity-vector", "super_sets = 0").contains("super_sets: found 0"));
        assert!(error("counter-driven", "form = \"one\"").contains("replacement"));
        assert!(
            error("counter-driven", "penalty_weight = nan").contains("penalty_weight: found NaN")
        );
        assert!(error("dio", "window_cycles = 0").contains("window_cycles"));
        assert!(error("di", "form = \"central-ish\"").contains("distributed"));
        assert!(error("di", "worth_moving = -1.0").contains("expected 0 to 10"));
        let ragged = error("best-by-matrix", "slowdowns = [[0.0, 1.0], [0.5]]");
        assert!(
            ragged.ends_with("slowdowns: found 1 values in row 1, expected 2"),
            "{ragged}"
        );
        assert!(error("worst-by-matrix", "slowdowns = [[nan]]").contains("row 0, column 0"));
    }
}
