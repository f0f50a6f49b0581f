//! Processor time of whole experiments, from which later commands estimate their cost.

use serde::{Deserialize, Serialize};

use super::entry::StoredEntry;
use super::run_dir::{RunDir, StoredLookup};

const ENTRY_KIND: &str = "account";

/// The last measured cost of an experiment from an empty store.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ExperimentCost {
    /// Number of seeds.
    pub seeds: usize,
    /// Processor time; stored runs count with their original time.
    pub cpu_seconds: f64,
}

impl ExperimentCost {
    /// The cost grows in proportion to the seeds.
    pub fn cost_of_seeds(&self, seeds: usize) -> f64 {
        self.cpu_seconds * seeds as f64 / self.seeds.max(1) as f64
    }
}

impl RunDir {
    /// Stores an experiment's cost and replaces an earlier one. `form` is `quick`, `sample` or `full`.
    pub fn write_cost(
        &self,
        ids: &[&str],
        form: &str,
        cost: ExperimentCost,
    ) -> std::io::Result<()> {
        let (sources, inputs) = (String::new(), cost_key(ids, form));
        let encoded_cost = rmp_serde::to_vec_named(&cost).map_err(std::io::Error::other)?;
        let (kind, label, cpu_seconds) = (ENTRY_KIND.to_string(), inputs.clone(), 0.0);
        self.store_entry(&StoredEntry {
            kind,
            label,
            sources,
            inputs,
            cpu_seconds,
            answer: encoded_cost,
        })
    }

    /// The most recently stored one.
    pub fn latest_cost(&self, ids: &[&str], form: &str) -> Option<ExperimentCost> {
        match self.find_entry(ENTRY_KIND, "", &cost_key(ids, form)) {
            StoredLookup::Hit(entry) => rmp_serde::from_slice(&entry.answer).ok(),
            StoredLookup::Miss | StoredLookup::Unusable(_) => None,
        }
    }
}

fn cost_key(ids: &[&str], form: &str) -> String {
    format!("{form} {}", ids.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a cost that of the last run of the same ids and form, in proportion to the seeds?
    #[test]
    fn a_cost_is_that_of_the_last_run() {
        let dir = tempfile::tempdir().unwrap();
        let dir = RunDir::new(dir.path(), 1 << 20).unwrap();
        assert_eq!(dir.latest_cost(&["CA-1"], "full"), None);

        dir.write_cost(
            &["CA-1"],
            "full",
            ExperimentCost {
                seeds: 2,
                cpu_seconds: 8.0,
            },
        )
        .unwrap();
        dir.write_cost(
            &["CA-1"],
            "full",
            ExperimentCost {
                seeds: 4,
                cpu_seconds: 12.0,
            },
        )
        .unwrap();
        assert_eq!(
            dir.latest_cost(&["CA-1"], "full")
                .map(|cost| cost.cost_of_seeds(2)),
            Some(6.0)
        );
        assert_eq!(
            (
                dir.latest_cost(&["CA-1"], "quick"),
                dir.latest_cost(&["CA-2"], "full")
            ),
            (None, None)
        );
    }
}
