//! Declarations of experiments and their results: `experiments.toml` and `results.toml`.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::{Experiment, Finding, ResultTarget, RunExperiment};

/// A declared result; without a target, it is shown as measured, and with two, it must lie between
/// them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultDeclaration {
    id: String,
    title: String,
    paper: String,
    unit: String,
    at_least: Option<f64>,
    at_most: Option<f64>,
    paper_best: Option<f64>,
    #[serde(default)]
    note: String,
}

impl ResultDeclaration {
    fn target(&self) -> ResultTarget {
        match (self.at_least, self.at_most) {
            (Some(target), None) => ResultTarget::AtLeast {
                target,
                paper_best: self.paper_best,
            },
            (None, Some(target)) => ResultTarget::AtMost {
                target,
                paper_best: self.paper_best,
            },
            (Some(low), Some(high)) => ResultTarget::Within { low, high },
            (None, None) => ResultTarget::Shown,
        }
    }
}

static DECLARATIONS: LazyLock<BTreeMap<String, ResultDeclaration>> = LazyLock::new(|| {
    toml::from_str(include_str!("results.toml"))
        .expect("results.toml is built in, and a test reads it")
});

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExperimentDeclaration {
    title: String,
    full_minutes: f64,
}

static EXPERIMENTS: LazyLock<BTreeMap<String, ExperimentDeclaration>> = LazyLock::new(|| {
    toml::from_str(include_str!("experiments.toml"))
        .expect("experiments.toml is built in, and a test reads it")
});

impl Experiment {
    /// The experiment that `experiments.toml` declares under these ids, which are separated by
    /// spaces.
    pub(crate) fn declared(ids: &'static str, run: RunExperiment) -> Self {
        let declared = EXPERIMENTS
            .get(ids)
            .unwrap_or_else(|| panic!("experiments.toml declares no '{ids}'"));
        let ExperimentDeclaration {
            title,
            full_minutes,
        } = declared;
        Experiment {
            ids: ids.split(' ').collect(),
            title,
            full_minutes: *full_minutes,
            run,
        }
    }
}

impl Finding {
    /// A finding that `results.toml` declares, with one value per seed.
    pub(crate) fn declared(name: &str, per_seed: &[(u64, f64)]) -> Self {
        let declared = DECLARATIONS
            .get(name)
            .unwrap_or_else(|| panic!("results.toml declares no '{name}'"));
        let ResultDeclaration {
            id,
            title,
            paper,
            unit,
            note,
            ..
        } = declared;
        Finding::new(id, title, paper, unit, declared.target(), per_seed).with_note(note)
    }

    /// A finding that `results.toml` declares for several subjects, whose labels take the places
    /// `{}` in its title.
    pub(crate) fn declared_for(name: &str, labels: &[&str], per_seed: &[(u64, f64)]) -> Self {
        let mut finding = Finding::declared(name, per_seed);
        for label in labels {
            finding.title = finding.title.replacen("{}", label, 1);
        }
        finding
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use super::*;

    fn sources(dir: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        entries
            .flat_map(|path| {
                if path.is_dir() {
                    sources(&path)
                } else {
                    vec![path]
                }
            })
            .collect()
    }

    /// Does every declared experiment run?
    #[test]
    fn every_declared_experiment_runs() {
        let runs: BTreeSet<String> = crate::experiments()
            .iter()
            .map(|experiment| experiment.ids.join(" "))
            .collect();
        assert_eq!(runs, EXPERIMENTS.keys().cloned().collect());
    }

    /// Is every declared result reported by an experiment, every reported one declared, and every target one that can
    /// be met?
    #[test]
    fn declared_results_are_those_that_experiments_report() {
        let texts = sources(Path::new("src"))
            .into_iter()
            .map(|path| std::fs::read_to_string(path).unwrap());
        let code: String = texts
            .filter(|text| !text.contains("fn declared("))
            .collect();
        let used: BTreeSet<&str> = code
            .split('"')
            .filter(|word| DECLARATIONS.contains_key(*word))
            .collect();
        let unused: Vec<&String> = DECLARATIONS
            .keys()
            .filter(|name| !used.contains(name.as_str()))
            .collect();
        assert!(
            unused.is_empty(),
            "declared, and reported by no experiment: {unused:?}"
        );
        for name in code
            .split("Finding::declared(\"")
            .skip(1)
            .filter_map(|rest| rest.split('"').next())
        {
            assert!(DECLARATIONS.contains_key(name), "'{name}' is not declared");
        }
        for (name, declared) in &*DECLARATIONS {
            if let ResultTarget::Within { low, high } = declared.target() {
                assert!(
                    low < high && declared.paper_best.is_none(),
                    "{name} has two targets"
                );
            }
        }
    }
}
