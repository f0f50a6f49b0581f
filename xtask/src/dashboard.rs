//! Checks that the dashboard and the alert rules use existing metrics.
//!
//! Problem: a dashboard with a wrong metric name shows nothing, and a rule with one never fires. Method: the names in
//! `packaging/grafana.json` and `packaging/alerts.yaml` are compared with the names that `crates/daemon/src/metrics.rs`
//! registers. The encoder adds the prefix `cachemate_`, and the suffixes `_total` and the unit.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

const READERS: [&str; 2] = ["packaging/grafana.json", "packaging/alerts.yaml"];
const METRICS_FILE: &str = "crates/daemon/src/metrics.rs";

/// Complaints have the form `file: description`.
///
/// # Errors
/// One of the files cannot be read.
pub fn check(root: &Path) -> io::Result<Vec<String>> {
    let source = fs::read_to_string(root.join(METRICS_FILE))?;
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let registered_names: BTreeSet<&str> = code.split('"').skip(1).step_by(2).collect();
    let mut complaints = Vec::new();
    for reader in READERS {
        let names = metric_names(&fs::read_to_string(root.join(reader))?);
        let unknown_names = names
            .iter()
            .filter(|name| !is_registered(bare_name(name), &registered_names));
        complaints.extend(
            unknown_names
                .map(|name| format!("{reader}: '{name}' is registered nowhere in {METRICS_FILE}")),
        );
        if names.is_empty() {
            complaints.push(format!("{reader}: no metric is asked for"));
        }
    }
    Ok(complaints)
}

/// Names in a text that begin with the common prefix of all metrics.
fn metric_names(dashboard: &str) -> BTreeSet<String> {
    let is_name_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = dashboard.split(|c: char| !is_name_part(c));
    words
        .filter(|word| word.starts_with("cachemate_"))
        .map(str::to_string)
        .collect()
}

/// A metric may also be an end of a registered one's interval.
fn is_registered(name: &str, registered_names: &BTreeSet<&str>) -> bool {
    let value = name
        .strip_suffix("_low")
        .or_else(|| name.strip_suffix("_high"));
    registered_names.contains(name) || value.is_some_and(|value| registered_names.contains(value))
}

/// The name without prefix and suffixes.
fn bare_name(name: &str) -> &str {
    let name = name.strip_prefix("cachemate_").unwrap_or(name);
    let name = name.strip_suffix("_total").unwrap_or(name);
    name.strip_suffix("_seconds").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are all metrics of the dashboard registered?
    #[test]
    fn all_metrics_of_the_dashboard_are_registered() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert_eq!(check(root).unwrap(), Vec::<String>::new());
    }

    /// Is a name that is not registered found?
    #[test]
    fn a_metric_that_is_not_registered_is_found() {
        let root = tempfile::tempdir().unwrap();
        for (file, text) in [
            (
                READERS[0],
                r#"{"expr": "rate(cachemate_cpu_seconds_total[5m])", "other": "cachemate_gone{cache_id=\"1\"}"}"#,
            ),
            (READERS[1], "expr: cachemate_cpu_seconds_total > 0.01"),
            (
                METRICS_FILE,
                r#"registry.register_with_unit("cpu", "Processor time", Unit::Seconds, counter);"#,
            ),
        ] {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        let complaints = check(root.path()).unwrap();
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].contains("'cachemate_gone'"));
    }
}
